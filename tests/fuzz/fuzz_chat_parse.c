/* Output of a model, cut anywhere: no crash, whole characters only, limits kept, nothing lost, and the same events as
 * in one piece. The first byte chooses the parser, the second the cuts; of the rest bytes 1..6 are marks if ids are
 * known. */
#include <assert.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "chat_parse.h"
#include "report.h"
#include "utf8.h"

enum { OUTPUT_BYTES_MAX = 1 << 16, RECORD_BYTES_MAX = 1 << 20 };

static const char tools_json[] = "[{\"name\":\"f\",\"parameters\":{\"properties\":{\"i\":{\"type\":\"integer\"},\"o\":{"
                                 "\"type\":[\"object\",\"array\",\"null\"]},\"b\":{\"type\":\"boolean\"}}}}]";

struct record {
    struct text text;
    int last_kind;
    size_t n_calls, n_bytes; /* of text, newlines aside */
};

static void on_event(void *user, const struct chat_event *event) {
    struct record *record = user;

    assert(event->text.n > 0);
    for (size_t i = 0; i < event->text.n;) {
        uint32_t cp = 0;
        int n = utf8_decode((const unsigned char *)event->text.bytes + i, event->text.n - i, &cp);

        assert(n > 0);
        record->n_bytes += cp != '\n' ? (size_t)n : 0;
        i += (size_t)n;
    }
    if (event->kind == CHAT_EVENT_CALL || (int)event->kind != record->last_kind)
        text_add(&record->text, &"\xfd\xfe\xff"[event->kind], 1); /* no text has these */
    text_add(&record->text, event->text.bytes, event->text.n);
    if (event->kind == CHAT_EVENT_CALL) {
        record->n_calls++;
        value_write_json(&record->text, event->arguments);
    }
    record->last_kind = event->kind;
}

static void parse(struct chat_parse_config config, const char *output, size_t n, uint8_t cut_seed,
                  struct record *record) {
    struct chat_parse parser;
    uint32_t random = cut_seed;
    size_t begin = 0;

    *record = (struct record){.last_kind = -1};
    text_init(&record->text, RECORD_BYTES_MAX);
    config.user = record;
    chat_parse_init(&parser, &config);
    for (size_t i = 0; i < n; i++) {
        bool is_mark = !config.text_marks && output[i] >= 1 && output[i] <= CHAT_N_MARKS;

        random = random * 1664525u + 1013904223u;
        if (begin < i && (is_mark || (cut_seed && random >> 30 == 0))) {
            chat_parse_token(&parser, -1, (struct span){output + begin, i - begin});
            begin = i;
        }
        if (is_mark) {
            chat_parse_token(&parser, output[i], (struct span){0});
            begin = i + 1;
        }
    }
    if (begin < n)
        chat_parse_token(&parser, 99, (struct span){output + begin, n - begin});
    chat_parse_end(&parser);
    chat_parse_deinit(&parser);
}

/* Without a call, and without reasoning that lost its tags, each byte that is no newline comes out. */
static void check_nothing_is_lost(const struct chat_parse_config *config, const char *output, size_t n,
                                  const struct record *record) {
    size_t n_bytes = 0;

    for (size_t i = 0; i < n; i++) {
        if (output[i] == 5 || output[i] == 6)
            break;
        n_bytes += output[i] != '\n' && (output[i] > CHAT_N_MARKS || output[i] < 1);
    }
    if (!config->text_marks && record->n_calls == 0)
        assert(record->n_bytes >= n_bytes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    struct chat_parse_config config = {.on_event = on_event, .mark_ids = {1, 2, 3, 4, 5, 6}};
    struct record whole, cut;
    struct value_arena arena;
    struct report report;
    struct value tools;
    int e;

    if (n < 2 || n > OUTPUT_BYTES_MAX)
        return 0;
    value_arena_init(&arena, 1 << 16);
    e = value_from_json(&arena, "tools", span_of(tools_json), VALUE_DEPTH_MAX, &tools, &report);
    assert(e == 0);
    config.in_reasoning = data[0] & 1;
    config.text_marks = data[0] & 2;
    config.tools = data[0] & 4 ? &tools : NULL;
    config.call_bytes_max = data[0] & 8 ? 64 : 4096;
    config.arguments_bytes_max = data[0] & 16 ? 256 : 1 << 16;
    parse(config, (const char *)data + 2, n - 2, 0, &whole);
    parse(config, (const char *)data + 2, n - 2, data[1] | 1, &cut);
    assert(whole.text.error == 0 && cut.text.error == 0);
    assert(span_equal(text_span(&whole.text), text_span(&cut.text)));
    check_nothing_is_lost(&config, (const char *)data + 2, n - 2, &whole);
    text_deinit(&whole.text);
    text_deinit(&cut.text);
    value_arena_deinit(&arena);
    return 0;
}
