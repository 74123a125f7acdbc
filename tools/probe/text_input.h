/* text_input: text and chats -> prompt text -> ids, for spillway-probe. */
#pragma once
#include "added.h"
#include "chat.h"
#include "input.h"
#include "tokenizer.h"

/* <folder>/tokenizer.json. */
int text_input_tokenizer(const char *folder, struct tokenizer **ret_tokenizer, struct report *report);

/* One case as in chat-render.json: messages, tools, thinking (default true), add_generation_prompt (default true).
 * prompt: initialised by the caller. A refused conversation is -EINVAL. */
int text_input_chat(const char *path, struct chat_prompt *prompt, struct report *report);

/* Ids of a text (markup recognised only if asked for) or of a rendered chat (the template's own markup only). */
int text_input_ids(const struct tokenizer *tokenizer, const char *text, bool markup, struct ids *ret_ids,
                   struct report *report);
int text_input_chat_ids(const struct tokenizer *tokenizer, const struct chat_prompt *prompt, struct ids *ret_ids,
                        struct report *report);
