/* The JSON reader on any bytes: it ends, stays inside the text, and skipping agrees with reading. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "json.h"
#include "utf8.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

#define CHECK(fact)                                                                                                    \
    do {                                                                                                               \
        if (!(fact))                                                                                                   \
            abort();                                                                                                   \
    } while (0)

static void check_string(const struct json_reader *r) {
    char *out = malloc(r->string_bytes + 1);
    size_t at = 0;

    CHECK(out);
    json_unescape(r, out);
    while (at < r->string_bytes) { /* what comes out is valid UTF-8 of the announced length */
        uint32_t cp;
        int n_char = utf8_decode((const unsigned char *)out + at, r->string_bytes - at, &cp);

        CHECK(n_char > 0);
        at += (size_t)n_char;
    }
    out[r->string_bytes] = 0;
    CHECK(json_is(r, out) == (strlen(out) == r->string_bytes));
    free(out);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    static const char *const names[] = {"a", "b", "model", "vocab"};
    struct json_reader r, skipper;
    uint64_t seen = 0, value;
    size_t pos = 0;

    json_init(&r, (const char *)data, n);
    while (json_next(&r) > JSON_END) {
        CHECK(r.pos > pos && r.pos <= n && r.depth >= 0 && r.depth <= JSON_DEPTH_MAX);
        pos = r.pos;
        if (r.kind == JSON_KEY || r.kind == JSON_STRING)
            check_string(&r);
        json_u64(&r, 1000, &value);
    }
    CHECK(r.kind == JSON_END || r.error_at <= n);

    json_init(&skipper, (const char *)data, n);
    CHECK((json_skip(&skipper) == 0 && json_next(&skipper) == JSON_END) == (r.kind == JSON_END));
    CHECK(r.kind == JSON_END || (skipper.error == r.error && skipper.error_at == r.error_at));

    json_init(&r, (const char *)data, n);
    json_next(&r);
    while (json_next(&r) == JSON_KEY) {
        json_field(&r, names, 4, &seen);
        json_skip(&r);
    }
    return 0;
}
