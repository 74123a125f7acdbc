/* chat_parse: the model's output, token by token, to reasoning, content and tool calls. Knows what the chat template
 * makes a model write, not the tokenizer and not what becomes of an event. However the output is cut into pieces, the
 * events say the same; only deltas are cut differently.
 *
 *        ,---<think>, before any text---.
 *        v                              |
 *    REASONING ------</think>-----> CONTENT <-----</tool_call>, well-formed: the call---- CALL
 *                                       |   <-----otherwise: its text, as content-------   ^
 *                                       '--------------------<tool_call>-------------------'
 *
 * Marks are what moves it. If the ids of the marks are given they decide, and the same letters as ordinary text are
 * text: a model that explains its own format calls nothing. With text_marks they are taken from the text, for callers
 * that have only that. Marks where the drawing has no arrow are text of where they stand; so are tool calls inside
 * reasoning, which are thoughts about a call. <think> right at the start of reasoning is dropped: the prompt has one
 * already.
 *
 * Newlines that belong to the format go: those at the start of reasoning and content, before </think> and around calls.
 * They are held back until it is clear what follows, as are incomplete UTF-8 characters and, with text_marks, what may
 * yet become a mark. Bytes that are no UTF-8 become U+FFFD.
 *
 * A call is malformed if chat_call.h says so, if the output ends inside, or if it meets a limit. Inside a parameter's
 * value marks are part of the value. Nothing is lost: what makes no call is delivered as content, marks included. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "text.h"
#include "value.h"

enum chat_mark {
    CHAT_MARK_THINK_OPEN,
    CHAT_MARK_THINK_CLOSE,
    CHAT_MARK_CALL_OPEN,
    CHAT_MARK_CALL_CLOSE,
    CHAT_MARK_END,      /* <|im_end|> */
    CHAT_MARK_END_TEXT, /* <|endoftext|> */
    CHAT_N_MARKS,
};

enum chat_event_kind { CHAT_EVENT_REASONING, CHAT_EVENT_CONTENT, CHAT_EVENT_CALL };

struct chat_event {
    enum chat_event_kind kind;
    struct span text;              /* a delta of whole characters, never empty; of a call the function's name */
    const struct value *arguments; /* CALL: a map. All good only until on_event returns. */
};

struct chat_parse_config {
    bool in_reasoning;              /* the prompt ended inside a thinking block */
    bool text_marks;                /* marks come as text; mark_ids are not looked at */
    int32_t mark_ids[CHAT_N_MARKS]; /* -1: the vocabulary has none */
    const struct value *tools;  /* the request's, for the types of arguments; NULL or a tree that outlives the parser */
    size_t call_bytes_max;      /* of one call's text */
    size_t arguments_bytes_max; /* memory of one call's arguments */
    void (*on_event)(void *user, const struct chat_event *event); /* must not call the parser */
    void *user;
};

enum chat_parse_state { CHAT_PARSE_REASONING, CHAT_PARSE_CONTENT, CHAT_PARSE_CALL, CHAT_PARSE_ENDED };

enum { CHAT_PARSE_DELTA_BYTES = 512, CHAT_PARSE_HELD_BYTES = 16 };

struct chat_parse {
    struct chat_parse_config config;
    enum chat_parse_state state;
    bool at_start;         /* REASONING, CONTENT: nothing but newlines since the last mark that counted */
    bool has_delivered[2]; /* by kind of event: some text of it, ever */
    uint64_t n_newlines;   /* held back before what comes next */
    char half[4];          /* an incomplete character */
    size_t n_half;
    char held[CHAT_PARSE_HELD_BYTES]; /* the beginning of a mark */
    size_t n_held;
    struct text call;        /* CALL: its text so far */
    bool call_has_parameter; /* known to contain "<parameter=" */
    struct value_arena arguments;
    enum chat_event_kind delta_kind;
    char delta[CHAT_PARSE_DELTA_BYTES]; /* not yet handed out; empty between calls of the functions below */
    size_t n_delta;
};

void chat_parse_init(struct chat_parse *parse, const struct chat_parse_config *config);
void chat_parse_deinit(struct chat_parse *parse);

/* One token: its id, or -1 for text of unknown origin, and the bytes it stands for. Whatever follows the end is
 * ignored. */
void chat_parse_token(struct chat_parse *parse, int32_t id, struct span bytes);

/* The output is over, for whatever reason. Delivers what was held back. */
void chat_parse_end(struct chat_parse *parse);
