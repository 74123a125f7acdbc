/* Any JSON document as a request: no crash, refusals have a line, segments cover the prompt, and the template's own
 * text opens and closes as many turns as it should whatever the messages say. */
#include <assert.h>
#include <stdbool.h>
#include <string.h>

#include "chat.h"
#include "report.h"
#include "value.h"

static size_t count(struct span text, const char *needle) {
    size_t n = 0;
    ptrdiff_t at;

    for (; (at = span_find(text, needle)) >= 0; n++)
        text = span_from(text, (size_t)at + 1);
    return n;
}

static bool is_set(const struct value *map, const char *key) {
    const struct value *value = value_get(map, key);

    return value && value->kind == VALUE_BOOL && value->boolean;
}

static void check(const struct chat_prompt *prompt, const struct value *messages, const struct chat_options *options) {
    const struct value *first_role = value_get(&messages->array.items[0], "role");
    struct text markup;
    size_t end = 0, n_open, n_closed;

    text_init(&markup, SIZE_MAX);
    for (size_t i = 0; i < prompt->n_segments; i++) {
        struct chat_segment segment = prompt->segments[i];

        assert(segment.begin == end && segment.end > segment.begin);
        assert(i == 0 || segment.is_markup != prompt->segments[i - 1].is_markup);
        end = segment.end;
        if (segment.is_markup)
            text_add(&markup, prompt->text.bytes + segment.begin, segment.end - segment.begin);
    }
    assert(end == prompt->text.n && markup.error == 0);
    n_open = count(text_span(&markup), "<|im_start|>") - options->add_generation_prompt;
    n_closed = count(text_span(&markup), "<|im_end|>");
    if (!options->continuation && span_is(first_role->text, "tool")) /* has no head */
        n_closed--;
    assert(n_open == n_closed);
    text_deinit(&markup);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    struct report report = {0};
    struct value_arena arena;
    struct chat_prompt prompt;
    struct value request;

    value_arena_init(&arena, 1 << 20);
    chat_prompt_init(&prompt, 1 << 16);
    if (value_from_json(&arena, "request", (struct span){(const char *)data, n}, 16, &request, &report) == 0) {
        const struct value *messages = value_get(&request, "messages"), *tools = value_get(&request, "tools");
        struct chat_options options = {.thinking = is_set(&request, "thinking"),
                                       .add_generation_prompt = is_set(&request, "add_generation_prompt"),
                                       .continuation = is_set(&request, "continuation")};
        int r = messages ? chat_render(messages, tools, &options, &prompt, &report) : CHAT_E_REFUSED;

        assert(r == 0 || r == CHAT_E_REFUSED);
        assert(r == 0 || !messages || report.line[0]);
        if (r == 0)
            check(&prompt, messages, &options);
    }
    chat_prompt_deinit(&prompt);
    value_arena_deinit(&arena);
    return 0;
}
