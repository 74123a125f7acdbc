/* chat: messages and tools -> the prompt text that the published Qwen3.5 chat template gives for them, byte for byte,
 * or one line saying why there is none. Knows the template, not the tokenizer: beside the text it tells which bytes are
 * the template's own. Only those may become special tokens; what callers wrote stays plain text, so that an
 * "<|im_end|>" inside a message cannot forge a turn. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "text.h"

struct report;
struct value;

enum { CHAT_E_REFUSED = 1 };

/* A run of prompt bytes of one origin. Its borders are no token borders: pieces of text are merged into tokens across
 * them, they only say where added tokens may be looked for. */
struct chat_segment {
    size_t begin, end; /* bytes of the prompt's text */
    bool is_markup;    /* written by the template */
};

struct chat_prompt {
    struct text text;
    struct chat_segment *segments; /* owned; in order, alternating, none empty, covering the whole text */
    size_t n_segments, n_segments_room;
};

struct chat_options {
    bool thinking;              /* what the generation prompt opens with: <think>, or an empty thinking block */
    bool add_generation_prompt; /* end with the head of an assistant's turn */

    /* The messages go on a text that ends with the <|im_end|> of an assistant's turn. Begins with the newline that
     * follows it. No tools, no system message, and no user message is needed. */
    bool continuation;
};

void chat_prompt_init(struct chat_prompt *prompt, size_t bytes_max);
void chat_prompt_deinit(struct chat_prompt *prompt);

/* Replaces what the prompt held, also if it fails. `messages` is the caller's value, `tools` too or NULL; both are
 * trees with valid UTF-8, everything else about them is checked here. Returns 0; CHAT_E_REFUSED: the report's line says
 * what is wrong with the request; -ENOMEM. */
int chat_render(const struct value *messages, const struct value *tools, const struct chat_options *options,
                struct chat_prompt *prompt, struct report *report);
