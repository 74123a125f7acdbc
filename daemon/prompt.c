#include "prompt.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "added.h"
#include "chat.h"
#include "model.h"
#include "report.h"

enum { SMALL_HIDDEN_MAX = 2048 };

int prompt_rules_init(struct prompt_rules *rules, const struct tokenizer *tokenizer, int32_t n_valid) {
    int r;

    *rules = (struct prompt_rules){
        .tokenizer = tokenizer,
        .n_valid = n_valid,
        .turn_open = tokenizer_find(tokenizer, "<|im_start|>"),
        .turn_close = tokenizer_find(tokenizer, "<|im_end|>"),
        .think_open = tokenizer_find(tokenizer, "<think>"),
        .think_close = tokenizer_find(tokenizer, "</think>"),
    };
    r = tokenizer_encode(tokenizer, "system", strlen("system"), 0, &rules->system_role);
    if (r == 0)
        r = tokenizer_encode(tokenizer, "assistant", strlen("assistant"), 0, &rules->assistant_role);
    if (r != 0)
        prompt_rules_deinit(rules);
    return r;
}

void prompt_rules_deinit(struct prompt_rules *rules) {
    tokenizer_ids_deinit(&rules->system_role);
    tokenizer_ids_deinit(&rules->assistant_role);
    *rules = (struct prompt_rules){0};
}

void prompt_deinit(struct prompt *prompt) {
    free(prompt->ids);
    text_deinit(&prompt->rendered);
    *prompt = (struct prompt){0};
}

bool prompt_default_thinking(const struct qwen_config *config) {
    return config->n_experts > 0 || config->hidden > SMALL_HIDDEN_MAX;
}

/* One prompt in the making. */
struct builder {
    const struct prompt_rules *rules;
    const struct prompt_input *input;
    struct report *report;
    struct tokenizer_ids ids;
    struct text rendered;
    size_t n_tokens; /* of a prompt that is too long: how many, or at least how many */
};

static int refuse_length(struct builder *b, const char *bound, size_t n) {
    b->n_tokens = n;
    return report_error(b->report, PROMPT_E_TOO_LONG, "the prompt has %s%zu tokens, there is room for %u: shorten it",
                        bound, n, b->input->n_tokens_max);
}

/* Before the work of tokenising is begun. */
static int check_bytes(struct builder *b, size_t n_bytes) {
    size_t n_ids_min = tokenizer_ids_min(b->rules->tokenizer, n_bytes);

    if (n_ids_min > b->input->n_tokens_max)
        return refuse_length(b, "at least ", n_ids_min);
    if (n_bytes > TOKENIZER_TEXT_BYTES_MAX)
        return report_error(b->report, PROMPT_E_REFUSED,
                            "the prompt has %zu bytes of text, at most %d are tokenised: shorten it", n_bytes,
                            TOKENIZER_TEXT_BYTES_MAX);
    return 0;
}

static int encode_text(struct builder *b) {
    struct span text = b->input->text;
    int r;

    if (text.n == 0)
        return report_error(b->report, PROMPT_E_REFUSED, "prompt is empty: send at least one character");
    r = check_bytes(b, text.n);
    if (r != 0)
        return r;
    return tokenizer_encode(b->rules->tokenizer, text.bytes, text.n, b->input->markup ? TOKENIZER_MARKUP : 0, &b->ids);
}

static int copy_ids(struct builder *b) {
    uint32_t n = b->input->n_ids;

    if (n == 0)
        return report_error(b->report, PROMPT_E_REFUSED, "prompt is empty: send at least one id");
    if (n > b->input->n_tokens_max)
        return refuse_length(b, "", n);
    b->ids.ids = malloc(n * sizeof *b->ids.ids);
    if (!b->ids.ids)
        return -ENOMEM;
    memcpy(b->ids.ids, b->input->ids, n * sizeof *b->ids.ids);
    b->ids.n = b->ids.capacity = n;
    return 0;
}

/* Only what the template wrote may become marks. */
static int encode_marked(struct builder *b, const struct chat_prompt *chat) {
    struct added_range *ranges = malloc((chat->n_segments + 1) * sizeof *ranges);
    size_t n_ranges = 0;
    int r;

    if (!ranges)
        return -ENOMEM;
    for (size_t i = 0; i < chat->n_segments; i++)
        if (chat->segments[i].is_markup)
            ranges[n_ranges++] = (struct added_range){chat->segments[i].begin, chat->segments[i].end};
    r = tokenizer_encode_marked(b->rules->tokenizer, chat->text.bytes, chat->text.n, ranges, n_ranges, &b->ids);
    assert(r != -EINVAL && r != -E2BIG); /* trees hold valid UTF-8; the length is checked */
    free(ranges);
    return r;
}

static int put_first(struct builder *b, int32_t id) {
    enum { ROOM = 64 };

    assert(!b->ids.ids);
    b->ids.ids = malloc(ROOM * sizeof *b->ids.ids);
    if (!b->ids.ids)
        return -ENOMEM;
    b->ids.ids[b->ids.n++] = id;
    b->ids.capacity = ROOM;
    return 0;
}

static int encode_messages(struct builder *b) {
    const struct prompt_input *input = b->input;
    struct chat_options options = {
        .thinking = input->thinking,
        .add_generation_prompt = !input->no_generation_prompt,
        .continuation = input->continuation,
    };
    struct chat_prompt chat;
    int r;

    if (b->rules->turn_open < 0 || b->rules->turn_close < 0)
        return report_error(b->report, PROMPT_E_REFUSED,
                            "messages: this model's tokenizer has no <|im_start|> or no <|im_end|>, so it cannot chat: "
                            "send prompt or prompt_ids");
    chat_prompt_init(&chat, TOKENIZER_TEXT_BYTES_MAX);
    r = chat_render(input->messages, input->tools, &options, &chat, b->report);
    if (r == CHAT_E_REFUSED)
        r = PROMPT_E_REFUSED;
    if (r == 0)
        r = check_bytes(b, chat.text.n);
    if (r == 0 && input->continuation && input->close_turn)
        r = put_first(b, b->rules->turn_close);
    if (r == 0)
        r = encode_marked(b, &chat);
    if (r == 0 && input->keep_text) {
        b->rendered = chat.text;
        chat.text = (struct text){0};
    }
    chat_prompt_deinit(&chat);
    return r;
}

/* Ids of a caller, and those of a tokenizer that has more than the model. */
static int check_ids(struct builder *b) {
    int32_t n_valid = b->rules->n_valid;

    for (size_t i = 0; i < b->ids.n; i++) {
        int32_t id = b->ids.ids[i];

        if (id >= 0 && id < n_valid)
            continue;
        if (b->input->kind == PROMPT_IDS)
            return report_error(b->report, PROMPT_E_REFUSED, "prompt_ids[%zu] is %d: this model has the ids 0 to %d", i,
                                id, n_valid - 1);
        return report_error(b->report, PROMPT_E_REFUSED,
                            "the prompt's token %zu is %d: this model has only the ids 0 to %d, its tokenizer more", i,
                            id, n_valid - 1);
    }
    return 0;
}

/* The turn that opens at ids[at] is of this role. */
static bool is_turn_of(const struct tokenizer_ids *role, const int32_t *ids, size_t n, size_t at) {
    return n - at > role->n && memcmp(ids + at + 1, role->ids, role->n * sizeof *ids) == 0;
}

static void find_places(const struct prompt_rules *rules, struct prompt *prompt) {
    bool in_system = false;

    for (uint32_t i = 0; i < prompt->n; i++) {
        int32_t id = prompt->ids[i];

        if (id == rules->turn_open) {
            if (in_system)
                prompt->n_system = i;
            in_system = i == 0 && is_turn_of(&rules->system_role, prompt->ids, prompt->n, i);
            if (is_turn_of(&rules->assistant_role, prompt->ids, prompt->n, i))
                prompt->n_head = i;
        }
        if (id == rules->think_open)
            prompt->in_reasoning = true;
        else if (id == rules->think_close || id == rules->turn_open || id == rules->turn_close)
            prompt->in_reasoning = false;
    }
}

static int encode(struct builder *b) {
    switch (b->input->kind) {
    case PROMPT_TEXT:
        return encode_text(b);
    case PROMPT_IDS:
        return copy_ids(b);
    case PROMPT_MESSAGES:
        return encode_messages(b);
    }
    assert(!"a kind of prompt");
    return -EINVAL;
}

int prompt_build(const struct prompt_rules *rules, const struct prompt_input *input, struct prompt *ret_prompt,
                 struct report *report) {
    struct builder b = {.rules = rules, .input = input, .report = report};
    int r = encode(&b);

    if (r == 0 && b.ids.n > input->n_tokens_max)
        r = refuse_length(&b, "", b.ids.n);
    if (r == 0)
        r = check_ids(&b);
    if (r != 0) {
        tokenizer_ids_deinit(&b.ids);
        text_deinit(&b.rendered);
        *ret_prompt = (struct prompt){.n = b.n_tokens < UINT32_MAX ? (uint32_t)b.n_tokens : UINT32_MAX};
        return r;
    }
    assert(b.ids.n > 0);
    *ret_prompt = (struct prompt){.ids = b.ids.ids, .n = (uint32_t)b.ids.n, .rendered = b.rendered};
    find_places(rules, ret_prompt);
    return 0;
}
