/* chat_cases: the conversations of tests/golden/chat-render.json. A file that is missing or unreadable fails the
 * test. */
#pragma once
#include <stdio.h>
#include <stdlib.h>

#include "report.h"
#include "value.h"

enum { CHAT_CASES_BYTES_MAX = 16 << 20 };

static inline struct value chat_cases_read(struct value_arena *arena) {
    const char *path = GOLDEN_FOLDER "/chat-render.json";
    char *json = malloc(CHAT_CASES_BYTES_MAX);
    FILE *f = fopen(path, "rb");
    struct report report = {0};
    struct value document;
    const struct value *cases;
    size_t n;

    if (!f || !json)
        fail_msg("%s cannot be read", path);
    n = fread(json, 1, CHAT_CASES_BYTES_MAX, f);
    fclose(f);
    if (n == CHAT_CASES_BYTES_MAX)
        fail_msg("%s is too large", path);
    if (value_from_json(arena, path, (struct span){json, n}, VALUE_DEPTH_MAX, &document, &report) != 0)
        fail_msg("%s", report.line);
    free(json);
    cases = value_get(&document, "cases");
    if (!cases || cases->kind != VALUE_ARRAY || cases->array.n == 0)
        fail_msg("%s holds no cases", path);
    return *cases;
}
