#include "output.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* ---- stop strings ---- */

static void find_borders(const char *bytes, size_t n, uint16_t *border) {
    size_t n_matched = 0;

    border[0] = 0;
    for (size_t i = 1; i < n; i++) {
        while (n_matched > 0 && bytes[n_matched] != bytes[i])
            n_matched = border[n_matched - 1];
        n_matched += bytes[n_matched] == bytes[i];
        border[i] = (uint16_t)n_matched;
    }
}

static int init_stops(struct output *output, const struct output_config *config) {
    size_t n_bytes = 0;
    uint16_t *border;
    char *bytes;

    if (config->n_stops > OUTPUT_STOPS_MAX)
        return -EINVAL;
    for (uint32_t i = 0; i < config->n_stops; i++) {
        if (config->stops[i].n == 0 || config->stops[i].n > OUTPUT_STOP_BYTES_MAX)
            return -EINVAL;
        n_bytes += config->stops[i].n;
    }
    if (n_bytes == 0)
        return 0;
    output->stops_memory = border = malloc(n_bytes * (sizeof *border + 1));
    if (!border)
        return -ENOMEM;
    bytes = (char *)(border + n_bytes);
    for (uint32_t i = 0; i < config->n_stops; i++) {
        size_t n = config->stops[i].n;

        memcpy(bytes, config->stops[i].bytes, n);
        find_borders(bytes, n, border);
        output->stops[i] = (struct output_stop){.bytes = bytes, .n = (uint16_t)n, .border = border};
        bytes += n;
        border += n;
    }
    return 0;
}

/* True: the byte completes it. */
static bool stop_step(struct output_stop *stop, char byte) {
    while (stop->n_matched > 0 && stop->bytes[stop->n_matched] != byte)
        stop->n_matched = stop->border[stop->n_matched - 1];
    stop->n_matched += stop->bytes[stop->n_matched] == byte;
    return stop->n_matched == stop->n;
}

/* Follows one more byte of content. The bytes of the match that is now complete, or 0. */
static size_t step_stops(struct output *output, char byte) {
    size_t n_match = 0;

    for (uint32_t i = 0; i < output->config.n_stops; i++)
        if (stop_step(&output->stops[i], byte) && output->stops[i].n > n_match) {
            n_match = output->stops[i].n;
            output->stop_idx = i;
        }
    return n_match;
}

/* Finds where the content beginning at `begin` runs into a stop string, and what of it must wait. */
static void look_for_stops(struct output *output, size_t begin) {
    struct text *content = &output->content.text;

    for (size_t i = begin; i < content->n; i++) {
        size_t n_match = step_stops(output, content->bytes[i]);

        if (n_match == 0)
            continue;
        content->n = i + 1 - n_match; /* all of it was held back: nothing of it is shown */
        assert(content->n >= output->content.n_shown);
        output->n_held = 0;
        output->result = OUTPUT_E_STOPPED;
        return;
    }
    output->n_held = 0;
    for (uint32_t i = 0; i < output->config.n_stops; i++)
        if (output->n_held < output->stops[i].n_matched)
            output->n_held = output->stops[i].n_matched;
}

/* What was held back is no beginning of a stop string: something else follows. */
static void release_held(struct output *output) {
    output->n_held = 0;
    for (uint32_t i = 0; i < output->config.n_stops; i++)
        output->stops[i].n_matched = 0;
}

/* ---- deltas ---- */

/* A delta of this text and of all ids that wait, up to the first n_ids of the output. */
static void give_delta(struct output *output, enum output_channel channel, struct span text, uint32_t n_ids) {
    uint32_t n_new = n_ids - output->n_ids_given;
    struct output_event event = {.kind = OUTPUT_DELTA, .channel = channel, .text = text};

    if (output->config.wants_ids) {
        event.n_ids = n_new;
        event.ids = output->ids.ids + output->n_ids_given;
        event.logprobs = output->n_logprobs > 0 ? output->logprobs : NULL;
    }
    output->config.on_event(output->config.user, &event);
    output->n_ids_given = n_ids;
    if (output->n_logprobs > 0) {
        output->n_logprobs -= n_new;
        memmove(output->logprobs, output->logprobs + n_new, output->n_logprobs * sizeof *output->logprobs);
    }
}

static void give_text(struct output *output, enum output_channel channel, struct output_text *from, size_t end) {
    struct span text;

    if (end == from->n_shown) /* also while there are no bytes to point at */
        return;
    text = (struct span){from->text.bytes + from->n_shown, end - from->n_shown};
    from->n_shown = end;
    give_delta(output, channel, text, from->n_ids > output->n_ids_given ? from->n_ids : output->n_ids_given);
}

static void give_reasoning(struct output *output) {
    give_text(output, OUTPUT_REASONING, &output->reasoning, output->reasoning.text.n);
}

static void give_content(struct output *output) {
    give_text(output, OUTPUT_CONTENT, &output->content, output->content.text.n - output->n_held);
}

/* Ids that have no text to go with. */
static void give_ids(struct output *output, enum output_channel channel) {
    if (output->config.wants_ids && output->n_ids_given < output->n_completion)
        give_delta(output, channel, (struct span){"", 0}, output->n_completion);
}

/* ---- channels ---- */

static bool add_text(struct output *output, struct output_text *to, struct span text) {
    text_add(&to->text, text.bytes, text.n);
    if (to->text.error != 0) {
        output->result = to->text.error == -ENOMEM ? -ENOMEM : OUTPUT_E_FULL;
        return false;
    }
    to->n_ids = output->n_completion;
    return true;
}

static void take_content(struct output *output, struct span text) {
    size_t begin = output->content.text.n;

    give_reasoning(output);
    if (add_text(output, &output->content, text) && output->config.n_stops > 0)
        look_for_stops(output, begin);
}

static void take_reasoning(struct output *output, struct span text) {
    release_held(output);
    give_content(output);
    add_text(output, &output->reasoning, text);
}

/* Keeps a call for the final answer. */
static bool keep_call(struct output *output, struct span name, const struct value *arguments) {
    struct value call = {.kind = VALUE_MAP}, *item;

    if (value_map_add(&output->arena, &call, span_of("name"), &item) != 0 ||
        value_set_string(&output->arena, item, name) != 0 ||
        value_map_add(&output->arena, &call, span_of("arguments"), &item) != 0 ||
        value_copy(&output->arena, arguments, item) != 0 || value_array_add(&output->arena, &output->calls, &item) != 0)
        return false;
    *item = call;
    return true;
}

static void take_call(struct output *output, struct span name, const struct value *arguments) {
    struct output_event event = {
        .kind = OUTPUT_TOOL_CALL,
        .channel = OUTPUT_TOOL,
        .text = name,
        .call_idx = output->calls.array.n,
        .arguments = arguments,
    };

    release_held(output);
    give_reasoning(output);
    give_content(output);
    if (!keep_call(output, name, arguments)) {
        output->result = OUTPUT_E_FULL;
        return;
    }
    give_ids(output, OUTPUT_TOOL);
    output->config.on_event(output->config.user, &event);
}

static void on_chat_event(void *user, const struct chat_event *event) {
    struct output *output = user;

    if (output->result != 0)
        return;
    switch (event->kind) {
    case CHAT_EVENT_CONTENT:
        take_content(output, event->text);
        break;
    case CHAT_EVENT_REASONING:
        take_reasoning(output, event->text);
        break;
    case CHAT_EVENT_CALL:
        take_call(output, event->text, event->arguments);
        break;
    }
}

/* ---- tokens ---- */

void output_find_marks(const struct tokenizer *tokenizer, int32_t ret_marks[CHAT_N_MARKS]) {
    ret_marks[CHAT_MARK_THINK_OPEN] = tokenizer_find(tokenizer, "<think>");
    ret_marks[CHAT_MARK_THINK_CLOSE] = tokenizer_find(tokenizer, "</think>");
    ret_marks[CHAT_MARK_CALL_OPEN] = tokenizer_find(tokenizer, "<tool_call>");
    ret_marks[CHAT_MARK_CALL_CLOSE] = tokenizer_find(tokenizer, "</tool_call>");
    ret_marks[CHAT_MARK_END] = -1; /* the caller knows the end */
    ret_marks[CHAT_MARK_END_TEXT] = -1;
}

int output_init(struct output *output, const struct output_config *config) {
    struct chat_parse_config parse = {
        .in_reasoning = config->in_reasoning,
        .tools = config->tools,
        .call_bytes_max = config->call_bytes_max,
        .arguments_bytes_max = config->calls_bytes_max,
        .on_event = on_chat_event,
        .user = output,
    };

    *output = (struct output){.config = *config, .calls = {.kind = VALUE_ARRAY}};
    output->config.stops = NULL; /* the caller's; there are copies */
    text_init(&output->content.text, config->text_bytes_max);
    text_init(&output->reasoning.text, config->text_bytes_max);
    value_arena_init(&output->arena, config->calls_bytes_max);
    memcpy(parse.mark_ids, config->marks, sizeof parse.mark_ids);
    chat_parse_init(&output->parse, &parse);
    return init_stops(output, config);
}

void output_deinit(struct output *output) {
    chat_parse_deinit(&output->parse);
    tokenizer_text_deinit(&output->piece);
    text_deinit(&output->content.text);
    text_deinit(&output->reasoning.text);
    free(output->stops_memory);
    tokenizer_ids_deinit(&output->ids);
    free(output->logprobs);
    value_arena_deinit(&output->arena);
    *output = (struct output){.has_ended = true};
}

static int add_id(struct tokenizer_ids *ids, int32_t id) {
    if (ids->n == ids->capacity) {
        size_t capacity = ids->capacity ? 2 * ids->capacity : 64;
        int32_t *grown = realloc(ids->ids, capacity * sizeof *grown);

        if (!grown)
            return -ENOMEM;
        ids->ids = grown;
        ids->capacity = capacity;
    }
    ids->ids[ids->n++] = id;
    return 0;
}

static int add_logprobs(struct output *output, const struct logprob_row *row) {
    if (output->n_logprobs == output->n_logprobs_room) {
        uint32_t n_room = output->n_logprobs_room ? 2 * output->n_logprobs_room : BLOCK_ROWS_MAX;
        struct logprob_row *grown = realloc(output->logprobs, n_room * sizeof *grown);

        if (!grown)
            return -ENOMEM;
        output->logprobs = grown;
        output->n_logprobs_room = n_room;
    }
    output->logprobs[output->n_logprobs++] = *row;
    return 0;
}

/* Counts the token, and keeps what deltas will say of it. */
static int note_token(struct output *output, int32_t id, const struct logprob_row *row) {
    int r = output->config.wants_ids && row ? add_logprobs(output, row) : 0;

    if (r == 0 && output->config.wants_ids)
        r = add_id(&output->ids, id);
    if (r == 0)
        output->n_completion++;
    return r;
}

static int feed_plain(struct output *output, int32_t id) {
    int r;

    output->piece.n = 0;
    r = tokenizer_stream_feed(output->config.tokenizer, &output->stream, id, TOKENIZER_SKIP_SPECIAL, &output->piece);
    if (r == 0 && output->piece.n > 0)
        take_content(output, (struct span){output->piece.bytes, output->piece.n});
    return r;
}

static void feed_chat(struct output *output, int32_t id) {
    const struct tokenizer *tokenizer = output->config.tokenizer;
    bool was_reasoning = output->parse.state == CHAT_PARSE_REASONING;
    struct span bytes = {0};

    if (!tokenizer_is_special(tokenizer, id)) /* marks are known by their ids, special or not */
        bytes.bytes = tokenizer_bytes(tokenizer, id, &bytes.n);
    chat_parse_token(&output->parse, id, bytes);
    output->n_reasoning += was_reasoning || output->parse.state == CHAT_PARSE_REASONING;
}

static void feed_token(struct output *output, int32_t id, const struct logprob_row *row, bool is_stop_id) {
    int r = note_token(output, id, row);

    if (r == 0 && !is_stop_id) {
        if (output->config.mode == OUTPUT_PLAIN)
            r = feed_plain(output, id);
        else
            feed_chat(output, id);
    }
    if (r != 0)
        output->result = r;
}

int output_feed(struct output *output, const struct output_block *block, uint32_t *ret_n_used) {
    uint32_t n = 0;

    assert(output->result == 0 && !output->has_ended);
    for (; n < block->n && output->result == 0; n++)
        feed_token(output, block->ids[n], block->logprobs ? &block->logprobs[n] : NULL,
                   block->ends_with_stop_id && n + 1 == block->n);
    *ret_n_used = n;
    give_reasoning(output);
    give_content(output);
    return output->result;
}

/* What the decoders still hold. */
static void flush(struct output *output) {
    if (output->config.mode == OUTPUT_CHAT) {
        chat_parse_end(&output->parse);
        return;
    }
    output->piece.n = 0;
    output->result = tokenizer_stream_flush(&output->stream, &output->piece);
    if (output->result == 0 && output->piece.n > 0)
        take_content(output, (struct span){output->piece.bytes, output->piece.n});
}

int output_end(struct output *output) {
    assert(!output->has_ended);
    output->has_ended = true;
    if (output->result == 0)
        flush(output);
    release_held(output);
    give_reasoning(output);
    give_content(output);
    give_ids(output, OUTPUT_CONTENT);
    return output->result;
}

struct span output_content(const struct output *output) {
    return (struct span){output->content.text.bytes, output->content.n_shown};
}

struct span output_reasoning(const struct output *output) {
    return (struct span){output->reasoning.text.bytes, output->reasoning.n_shown};
}

const struct value *output_calls(const struct output *output) {
    return &output->calls;
}
