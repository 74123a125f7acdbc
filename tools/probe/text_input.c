#include "text_input.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "value.h"

enum { CHAT_FILE_BYTES_MAX = 64 << 20 };

int text_input_tokenizer(const char *folder, struct tokenizer **ret_tokenizer, struct report *report) {
    char path[4096];

    snprintf(path, sizeof path, "%s/tokenizer.json", folder);
    return tokenizer_open(path, ret_tokenizer, report);
}

static bool flag(const struct value *chat, const char *key, bool absent) {
    const struct value *v = value_get(chat, key);

    return v && v->kind == VALUE_BOOL ? v->boolean : absent;
}

static int render(const char *path, const struct value *chat, struct chat_prompt *prompt, struct report *report) {
    const struct value *messages = value_get(chat, "messages"), *tools = value_get(chat, "tools");
    struct chat_options options = {.thinking = flag(chat, "thinking", true),
                                   .add_generation_prompt = flag(chat, "add_generation_prompt", true)};
    struct report reason = {0};
    int r;

    if (!messages)
        return report_error(report, -EINVAL, "%s: no \"messages\"", path);
    r = chat_render(messages, tools && tools->kind != VALUE_NIL ? tools : NULL, &options, prompt, &reason);
    if (r != 0)
        return report_error(report, r < 0 ? r : -EINVAL, "%s: %.400s", path, r < 0 ? strerror(-r) : reason.line);
    return 0;
}

int text_input_chat(const char *path, struct chat_prompt *prompt, struct report *report) {
    struct value_arena arena;
    struct value chat;
    size_t bytes;
    char *json;
    int r = input_read_file(path, CHAT_FILE_BYTES_MAX, &json, &bytes, report);

    if (r != 0)
        return r;
    value_arena_init(&arena, 16 * (size_t)CHAT_FILE_BYTES_MAX);
    r = value_from_json(&arena, path, (struct span){json, bytes}, VALUE_DEPTH_MAX, &chat, report);
    if (r == VALUE_E_FULL)
        report_error(report, -ENOMEM, "%s: too large", path);
    r = r == 0 ? render(path, &chat, prompt, report) : -EINVAL;
    value_arena_deinit(&arena);
    free(json);
    return r;
}

/* Hands the tokenizer's ids over, or reports. */
static int finish(int r, struct tokenizer_ids *encoded, struct ids *ret_ids, struct report *report) {
    if (r == 0 && encoded->n == 0)
        r = report_error(report, -EINVAL, "the text is empty: nothing to run");
    else if (r != 0)
        report_error(report, r, "the text cannot be encoded: %s", strerror(-r));
    if (r == 0) {
        *ret_ids = (struct ids){.id = malloc(encoded->n * sizeof(int)), .n = (int)encoded->n};
        if (!ret_ids->id)
            r = report_error(report, -ENOMEM, "out of memory for %zu ids", encoded->n);
        for (size_t i = 0; r == 0 && i < encoded->n; i++)
            ret_ids->id[i] = encoded->ids[i];
    }
    tokenizer_ids_deinit(encoded);
    return r;
}

int text_input_ids(const struct tokenizer *tokenizer, const char *text, bool markup, struct ids *ret_ids,
                   struct report *report) {
    struct tokenizer_ids encoded = {0};
    int r = tokenizer_encode(tokenizer, text, strlen(text), markup ? TOKENIZER_MARKUP : 0, &encoded);

    return finish(r, &encoded, ret_ids, report);
}

int text_input_chat_ids(const struct tokenizer *tokenizer, const struct chat_prompt *prompt, struct ids *ret_ids,
                        struct report *report) {
    struct added_range *marked = calloc(prompt->n_segments + 1, sizeof *marked);
    struct tokenizer_ids encoded = {0};
    size_t n = 0;
    int r;

    if (!marked)
        return report_error(report, -ENOMEM, "out of memory for a prompt of %zu segments", prompt->n_segments);
    for (size_t i = 0; i < prompt->n_segments; i++)
        if (prompt->segments[i].is_markup)
            marked[n++] = (struct added_range){prompt->segments[i].begin, prompt->segments[i].end};
    r = tokenizer_encode_marked(tokenizer, prompt->text.bytes, prompt->text.n, marked, n, &encoded);
    free(marked);
    return finish(r, &encoded, ret_ids, report);
}
