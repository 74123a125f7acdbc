/* json_wire: messages for tests written as JSON. */
#pragma once
#include "report.h"
#include "value.h"
#include "wire.h"

/* Appends the msgpack bytes of one JSON document. */
static inline void json_wire(struct wire_out *out, const char *json) {
    struct value_arena arena;
    struct report report;
    struct value value;

    value_arena_init(&arena, 1 << 22);
    if (value_from_json(&arena, "test", span_of(json), VALUE_DEPTH_MAX, &value, &report) != 0)
        fail_msg("%s: %s", json, report.line);
    wire_value(out, &value);
    assert_int_equal(out->bytes.error, 0);
    value_arena_deinit(&arena);
}
