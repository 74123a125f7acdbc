/* output: what one generation shows. Takes the tokens of each step and gives out text by channel, always in whole
 * characters, and tool calls; finds the stop strings; keeps what the final answer says. Knows no connection and no
 * protocol, and does not decide when a generation ends except by a stop string.
 *
 *   tokens --+-- PLAIN: tokenizer_stream --- content --+-- stop strings --.
 *            '-- CHAT: chat_parse --+-- content -------'                  |
 *                                   +-- reasoning ------------------------+-- deltas
 *                                   '-- calls ------------------------------- tool calls
 *
 * Special tokens have no text. In CHAT mode <think>, </think>, <tool_call> and </tool_call> move the parser. Neither
 * <|im_end|> nor any other id ends the output here: the caller says which token is the stop id, and when it is over.
 *
 * Stop strings are looked for in the content alone, as shown: not in reasoning, not in calls. Newlines at borders of
 * content, which belong to the chat format, count when chat_parse gives them out, with what follows them. Text after a
 * reasoning block or a tool call begins anew: no match spans one. The match that is complete first counts; of those
 * complete with the same byte the longest, of equal ones the first in the list. Text from its beginning on is never
 * shown, and neither is text that may yet be the beginning of a match: at most as many bytes as the longest stop string
 * less one wait. Time is proportional to output bytes times stop strings, whatever the bytes are.
 *
 * Which delta has which id: ids wait until there is a delta. A delta takes along all that wait, up to the last one that
 * brought text to its channel (text held back for a stop string included). Ids of a call are in an empty delta of
 * OUTPUT_TOOL just before the call; what waits at the end is in an empty delta of content. So each id is in exactly one
 * delta, in order, and never in one before it was fed. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "backend.h"
#include "chat_parse.h"
#include "text.h"
#include "tokenizer.h"
#include "value.h"

enum { OUTPUT_STOPS_MAX = 16, OUTPUT_STOP_BYTES_MAX = 256 };
enum {
    OUTPUT_E_STOPPED = 1, /* a stop string is complete: end the generation */
    OUTPUT_E_FULL = 2,    /* a limit of the config is met: end the generation */
};

enum output_mode { OUTPUT_PLAIN, OUTPUT_CHAT };
enum output_channel { OUTPUT_CONTENT, OUTPUT_REASONING, OUTPUT_TOOL };
enum output_event_kind { OUTPUT_DELTA, OUTPUT_TOOL_CALL };

struct output_event {
    enum output_event_kind kind;
    enum output_channel channel;
    struct span text; /* DELTA: whole characters, empty only if it is there for its ids. CALL: the function's name */
    uint32_t n_ids;   /* DELTA: 0 unless the config wants ids */
    const int32_t *ids;
    const struct logprob_row *logprobs; /* [n_ids] or NULL */
    uint32_t call_idx;                  /* TOOL_CALL: 0, 1, ... */
    const struct value *arguments;      /* TOOL_CALL: a map */
};

struct output_config {
    const struct tokenizer *tokenizer;
    enum output_mode mode;
    const int32_t *marks;      /* [CHAT_N_MARKS] of output_find_marks() */
    bool in_reasoning;         /* CHAT: the prompt ends inside a thinking block */
    const struct value *tools; /* CHAT: the request's, or NULL; outlives the output */
    uint32_t n_stops;
    const struct span *stops; /* valid UTF-8, 1 to OUTPUT_STOP_BYTES_MAX bytes each; copied */
    bool wants_ids;           /* deltas have ids, and rows if the blocks have some */
    size_t text_bytes_max;    /* of content and of reasoning, each */
    size_t call_bytes_max;    /* of one call's text; a longer one is content */
    size_t calls_bytes_max;   /* memory of all calls' arguments */
    /* All of an event is good until this returns; it must not call the output. */
    void (*on_event)(void *user, const struct output_event *event);
    void *user;
};

/* Tokens of one step, in order. */
struct output_block {
    uint32_t n;
    const int32_t *ids;
    const struct logprob_row *logprobs; /* [n] or NULL; the same in all blocks */
    bool ends_with_stop_id;             /* the last one ends the generation and has no text */
};

struct output_stop {
    const char *bytes;
    uint16_t n, n_matched;  /* so many of its bytes end the text now */
    const uint16_t *border; /* [n] of its first i + 1 bytes: the longest proper prefix that is a suffix too */
};

/* Text of one channel: [0, n_shown) is given out. */
struct output_text {
    struct text text;
    size_t n_shown;
    uint32_t n_ids; /* fed when text was last added */
};

struct output {
    struct output_config config;
    struct chat_parse parse;        /* CHAT */
    struct tokenizer_stream stream; /* PLAIN */
    struct tokenizer_text piece;    /* PLAIN: of one token */
    struct output_text content, reasoning;
    size_t n_held; /* bytes at the end of the content that may become a stop string */
    struct output_stop stops[OUTPUT_STOPS_MAX];
    void *stops_memory;
    struct tokenizer_ids ids;     /* wants_ids: all that were fed */
    struct logprob_row *logprobs; /* of ids[n_ids_given..] */
    uint32_t n_logprobs, n_logprobs_room;
    uint32_t n_ids_given; /* in a delta already */
    struct value_arena arena;
    struct value calls; /* an array of maps {name, arguments} */
    int result;         /* 0, OUTPUT_E_* or -ENOMEM: what ended it; nothing is looked at any more */
    bool has_ended;
    uint32_t n_completion, n_reasoning; /* tokens used; of these, those of a thinking block, its marks included */
    uint32_t stop_idx;                  /* of the stop string, with OUTPUT_E_STOPPED */
};

/* Once per model: what stands for what in its output. */
void output_find_marks(const struct tokenizer *tokenizer, int32_t ret_marks[CHAT_N_MARKS]);

/* 0, -ENOMEM, or -EINVAL: a stop string or their number breaks a limit; deinit is fine in any case. The output stays
 * where it is until then. */
int output_init(struct output *output, const struct output_config *config);
void output_deinit(struct output *output);

/* Feeds a block and gives out what it makes known: at most one delta per change of channel. *ret_n_used is set in any
 * case: after OUTPUT_E_* the tokens behind it are not part of the output, and no block may follow. -ENOMEM: the
 * generation has failed. */
int output_feed(struct output *output, const struct output_block *block, uint32_t *ret_n_used);

/* The generation is over, for whatever reason, once: gives out what was held back and the ids that still wait. Returns
 * what output_feed() returned last, or what this showed: OUTPUT_E_STOPPED if a stop string was in it. */
int output_end(struct output *output);

/* What was shown. The text of the answer is its content; reasoning and calls are not part of it. */
struct span output_content(const struct output *output);
struct span output_reasoning(const struct output *output);
const struct value *output_calls(const struct output *output); /* an array of maps {name, arguments}, perhaps empty */
