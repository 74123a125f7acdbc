/* prompt: what a request wants continued -> token ids, and the places in them at which the recurrent state is worth
 * keeping. Pure functions over what they are handed, for any thread; knows the chat format through model/chat, and no
 * session, page or request. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "text.h"
#include "tokenizer.h"

struct qwen_config;
struct report;
struct value;

enum {
    PROMPT_E_REFUSED = 1,  /* the report's line says what is wrong with the request */
    PROMPT_E_TOO_LONG = 2, /* more than n_tokens_max; the line has both numbers */
};

/* What holds for every prompt of one model: made once, then only read. */
struct prompt_rules {
    const struct tokenizer *tokenizer;                      /* the caller's, outlives the rules */
    int32_t n_valid;                                        /* the model knows the ids below it */
    int32_t turn_open, turn_close, think_open, think_close; /* ids of the chat format's marks; -1: not there */
    struct tokenizer_ids system_role, assistant_role;       /* what follows turn_open */
};

/* 0 or -ENOMEM. */
int prompt_rules_init(struct prompt_rules *rules, const struct tokenizer *tokenizer, int32_t n_valid);
void prompt_rules_deinit(struct prompt_rules *rules);

enum prompt_kind { PROMPT_TEXT, PROMPT_IDS, PROMPT_MESSAGES };

struct prompt_input {
    enum prompt_kind kind;
    uint32_t n_tokens_max; /* as many as there is room for */

    struct span text; /* TEXT: UTF-8 */
    bool markup;      /* TEXT: marks such as <|im_start|> in it are tokens, not letters */

    const int32_t *ids; /* IDS */
    uint32_t n_ids;

    const struct value *messages, *tools; /* MESSAGES; tools may be NULL */
    bool thinking;                        /* MESSAGES: open a thinking block; see prompt_default_thinking() */
    bool no_generation_prompt;            /* MESSAGES: end behind the last turn */
    bool continuation;                    /* MESSAGES: they follow tokens that end with turn_close */
    bool close_turn;                      /* with continuation: the tokens before lack turn_close, so it comes first */
    bool keep_text;                       /* MESSAGES: ret_prompt has the rendered text too */
};

/* Token lists are only ever cut in front of turn_open, which is never merged with text before it: the ids in front of
 * such a place are those of every other prompt with the same beginning. The places are found in the ids, so that a
 * client which renders its chat itself is served as well as one which sends messages. */
struct prompt {
    int32_t *ids; /* owned, never empty */
    uint32_t n;
    uint32_t n_system;    /* ids of the turn with system text and tools, when it is the first; 0: there is none */
    uint32_t n_head;      /* ids before the head of the last assistant's turn; 0: there is none */
    bool in_reasoning;    /* ends inside a thinking block */
    struct text rendered; /* owned; empty without keep_text */
};

/* 0, PROMPT_E_*, or -ENOMEM. If not 0 ret_prompt owns nothing; with PROMPT_E_TOO_LONG its n says how many tokens there
 * are, or at least are. Time and memory are those of the tokenizer; a text that is certainly too long is refused
 * before it is cut up. */
int prompt_build(const struct prompt_rules *rules, const struct prompt_input *input, struct prompt *ret_prompt,
                 struct report *report);
void prompt_deinit(struct prompt *prompt);

/* Whether the published template of this model thinks unless it is told not to. The templates of the two smallest
 * models (0.8B and 2B) open an empty thinking block, those of all others an open one, and nothing but the size tells
 * them apart: dense and at most 2048 wide. */
bool prompt_default_thinking(const struct qwen_config *config);
