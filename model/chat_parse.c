#include "chat_parse.h"

#include <assert.h>
#include <string.h>

#include "chat_call.h"
#include "utf8.h"

static const char *const mark_texts[CHAT_N_MARKS] = {
    [CHAT_MARK_THINK_OPEN] = "<think>",    [CHAT_MARK_THINK_CLOSE] = "</think>",
    [CHAT_MARK_CALL_OPEN] = "<tool_call>", [CHAT_MARK_CALL_CLOSE] = "</tool_call>",
    [CHAT_MARK_END] = "<|im_end|>",        [CHAT_MARK_END_TEXT] = "<|endoftext|>",
};

void chat_parse_init(struct chat_parse *parse, const struct chat_parse_config *config) {
    *parse = (struct chat_parse){
        .config = *config,
        .state = config->in_reasoning ? CHAT_PARSE_REASONING : CHAT_PARSE_CONTENT,
        .at_start = true,
    };
    text_init(&parse->call, config->call_bytes_max);
    value_arena_init(&parse->arguments, config->arguments_bytes_max);
}

void chat_parse_deinit(struct chat_parse *parse) {
    text_deinit(&parse->call);
    value_arena_deinit(&parse->arguments);
    *parse = (struct chat_parse){.state = CHAT_PARSE_ENDED};
}

/* ---- deltas ---- */

static void flush_delta(struct chat_parse *parse) {
    struct chat_event event = {.kind = parse->delta_kind, .text = {parse->delta, parse->n_delta}};

    if (parse->n_delta == 0)
        return;
    parse->n_delta = 0;
    parse->config.on_event(parse->config.user, &event);
}

static void put(struct chat_parse *parse, struct span character) {
    enum chat_event_kind kind = parse->state == CHAT_PARSE_REASONING ? CHAT_EVENT_REASONING : CHAT_EVENT_CONTENT;

    if (kind != parse->delta_kind || parse->n_delta + character.n > sizeof parse->delta)
        flush_delta(parse);
    parse->delta_kind = kind;
    memcpy(parse->delta + parse->n_delta, character.bytes, character.n);
    parse->n_delta += character.n;
    parse->has_delivered[kind] = true;
}

/* The newlines held back turn out to be text, unless nothing of the kind was delivered before them. */
static void release_newlines(struct chat_parse *parse) {
    enum chat_event_kind kind = parse->state == CHAT_PARSE_REASONING ? CHAT_EVENT_REASONING : CHAT_EVENT_CONTENT;

    for (; parse->has_delivered[kind] && parse->n_newlines > 0; parse->n_newlines--)
        put(parse, span_of("\n"));
    parse->n_newlines = 0;
}

/* Text of reasoning or content, whole characters. */
static void say(struct chat_parse *parse, struct span text) {
    assert(parse->state == CHAT_PARSE_REASONING || parse->state == CHAT_PARSE_CONTENT);
    for (size_t i = 0, n; i < text.n; i += n) {
        unsigned char lead = (unsigned char)text.bytes[i];

        n = lead < 0x80 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
        if (lead == '\n') {
            parse->n_newlines++;
            continue;
        }
        release_newlines(parse);
        put(parse, (struct span){text.bytes + i, n});
        parse->at_start = false;
    }
}

/* ---- calls ---- */

/* What was taken for a call is content. The newlines before it are still held back, so they come with it. */
static void give_up_call(struct chat_parse *parse, const char *end) {
    parse->state = CHAT_PARSE_CONTENT;
    say(parse, span_of(mark_texts[CHAT_MARK_CALL_OPEN]));
    say(parse, text_span(&parse->call));
    say(parse, span_of(end));
    text_clear(&parse->call);
}

static void add_to_call(struct chat_parse *parse, struct span text) {
    text_add(&parse->call, text.bytes, text.n);
    if (parse->call.error == 0)
        return;
    give_up_call(parse, "");
    say(parse, text);
}

static void close_call(struct chat_parse *parse) {
    struct value arguments;
    struct chat_event event = {.kind = CHAT_EVENT_CALL, .arguments = &arguments};

    if (chat_call_parse(&parse->arguments, text_span(&parse->call), parse->config.tools, &event.text, &arguments) ==
        0) {
        flush_delta(parse);
        parse->config.on_event(parse->config.user, &event);
        text_clear(&parse->call);
        parse->state = CHAT_PARSE_CONTENT;
        parse->at_start = true;
        parse->n_newlines = 0;
    } else {
        give_up_call(parse, mark_texts[CHAT_MARK_CALL_CLOSE]);
    }
    value_arena_clear(&parse->arguments);
}

/* A mark now would stand inside a parameter's value: one was opened, and nothing was closed just before. Remembers that
 * a parameter was seen, since a value may be full of marks. */
static bool is_in_value(struct chat_parse *parse) {
    struct span call = text_span(&parse->call);

    if (!parse->call_has_parameter)
        parse->call_has_parameter = span_find(call, "<parameter=") >= 0;
    return parse->call_has_parameter && !chat_call_is_closed(call);
}

/* ---- marks and text ---- */

static void mark_in_reasoning(struct chat_parse *parse, enum chat_mark mark) {
    if (mark == CHAT_MARK_THINK_CLOSE) {
        parse->state = CHAT_PARSE_CONTENT;
        parse->at_start = true;
        parse->n_newlines = 0;
    } else if (mark != CHAT_MARK_THINK_OPEN || !parse->at_start) {
        say(parse, span_of(mark_texts[mark]));
    }
}

static void open_call(struct chat_parse *parse) {
    parse->state = CHAT_PARSE_CALL;
    parse->call_has_parameter = false;
}

static void mark_in_content(struct chat_parse *parse, enum chat_mark mark) {
    if (mark == CHAT_MARK_CALL_OPEN) {
        open_call(parse);
    } else if (mark == CHAT_MARK_THINK_OPEN && parse->at_start) {
        parse->state = CHAT_PARSE_REASONING;
        parse->n_newlines = 0;
    } else {
        say(parse, span_of(mark_texts[mark]));
    }
}

static void mark_in_call(struct chat_parse *parse, enum chat_mark mark) {
    if (mark == CHAT_MARK_CALL_CLOSE && !is_in_value(parse)) {
        close_call(parse);
    } else if (mark == CHAT_MARK_CALL_OPEN && !is_in_value(parse)) {
        give_up_call(parse, "");
        open_call(parse);
    } else {
        add_to_call(parse, span_of(mark_texts[mark]));
    }
}

static void take_mark(struct chat_parse *parse, enum chat_mark mark) {
    switch (parse->state) {
    case CHAT_PARSE_REASONING:
        mark_in_reasoning(parse, mark);
        break;
    case CHAT_PARSE_CONTENT:
        mark_in_content(parse, mark);
        break;
    case CHAT_PARSE_CALL:
        mark_in_call(parse, mark);
        break;
    case CHAT_PARSE_ENDED:
        break;
    }
}

static void take_plain(struct chat_parse *parse, struct span text) {
    if (parse->state == CHAT_PARSE_CALL)
        add_to_call(parse, text);
    else
        say(parse, text);
}

/* Text marks that would move the parser now. The others are text, and need not be held back. */
static bool is_awaited(const struct chat_parse *parse, enum chat_mark mark) {
    switch (mark) {
    case CHAT_MARK_THINK_OPEN:
        return parse->state != CHAT_PARSE_CALL && parse->at_start;
    case CHAT_MARK_THINK_CLOSE:
        return parse->state == CHAT_PARSE_REASONING;
    case CHAT_MARK_CALL_OPEN:
        return parse->state != CHAT_PARSE_REASONING;
    case CHAT_MARK_CALL_CLOSE:
        return parse->state == CHAT_PARSE_CALL;
    default:
        return false;
    }
}

static void release_held(struct chat_parse *parse) {
    struct span held = {parse->held, parse->n_held};

    parse->n_held = 0;
    take_plain(parse, held);
}

/* Holds the character back if it continues the beginning of an awaited mark, and takes the mark if it completes it.
 * Marks have '<' only at their beginning, so what was held in vain contains no other beginning. */
static bool continues_mark(struct chat_parse *parse, struct span character) {
    if (character.n != 1 || (parse->n_held == 0 && character.bytes[0] != '<'))
        return false;
    for (int mark = 0; mark < CHAT_N_MARKS; mark++) {
        const char *text = mark_texts[mark];
        size_t n = strlen(text);

        if (!is_awaited(parse, (enum chat_mark)mark) || n <= parse->n_held ||
            memcmp(text, parse->held, parse->n_held) != 0 || text[parse->n_held] != character.bytes[0])
            continue;
        if (n == parse->n_held + 1) {
            parse->n_held = 0;
            take_mark(parse, (enum chat_mark)mark);
        } else {
            parse->held[parse->n_held++] = character.bytes[0];
        }
        return true;
    }
    return false;
}

static void take_character(struct chat_parse *parse, struct span character) {
    if (parse->config.text_marks) {
        if (continues_mark(parse, character))
            return;
        if (parse->n_held > 0) {
            release_held(parse);
            if (continues_mark(parse, character))
                return;
        }
    }
    take_plain(parse, character);
}

/* ---- bytes ---- */

static void take_replacement(struct chat_parse *parse) {
    char replacement[UTF8_CHAR_BYTES_MAX];
    int n = utf8_encode(UTF8_REPLACEMENT, replacement);

    take_character(parse, (struct span){replacement, (size_t)n});
}

static void take_byte(struct chat_parse *parse, char byte) {
    parse->half[parse->n_half++] = byte;
    while (parse->n_half > 0) {
        uint32_t cp;
        int n = utf8_decode((const unsigned char *)parse->half, parse->n_half, &cp);

        if (n == 0)
            return;
        if (n > 0)
            take_character(parse, (struct span){parse->half, (size_t)n});
        else
            take_replacement(parse);
        n = n > 0 ? n : -n;
        parse->n_half -= (size_t)n;
        memmove(parse->half, parse->half + n, parse->n_half);
    }
}

/* A character cannot go on behind a mark or the end. */
static void end_half(struct chat_parse *parse) {
    if (parse->n_half > 0)
        take_replacement(parse);
    parse->n_half = 0;
}

void chat_parse_token(struct chat_parse *parse, int32_t id, struct span bytes) {
    if (parse->state == CHAT_PARSE_ENDED)
        return;
    for (int mark = 0; !parse->config.text_marks && id >= 0 && mark < CHAT_N_MARKS; mark++) {
        if (parse->config.mark_ids[mark] != id)
            continue;
        if (mark == CHAT_MARK_END || mark == CHAT_MARK_END_TEXT) {
            chat_parse_end(parse);
            return;
        }
        end_half(parse);
        take_mark(parse, (enum chat_mark)mark);
        flush_delta(parse);
        return;
    }
    for (size_t i = 0; i < bytes.n; i++)
        take_byte(parse, bytes.bytes[i]);
    flush_delta(parse);
}

void chat_parse_end(struct chat_parse *parse) {
    if (parse->state == CHAT_PARSE_ENDED)
        return;
    end_half(parse);
    release_held(parse);
    if (parse->state == CHAT_PARSE_CALL)
        give_up_call(parse, "");
    if (!parse->at_start)
        release_newlines(parse);
    flush_delta(parse);
    parse->state = CHAT_PARSE_ENDED;
}
