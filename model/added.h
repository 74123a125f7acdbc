/* added: the added tokens (markup) of a tokenizer, cut out of text before anything else looks at it. Longest match at the
 * leftmost place, as the reference; a token may also swallow white space beside it. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "unicode.h"

enum { ADDED_TOKENS_MAX = 1 << 14, ADDED_BYTES_MAX = 256 }; /* search costs up to text bytes x ADDED_BYTES_MAX */

struct added_token {
    char *content; /* owned */
    size_t n_bytes;
    int32_t id;
    bool swallows_left, swallows_right; /* lstrip, rstrip: white space beside it belongs to it */
};

/* One set of tokens; tokens with and without `normalized` are looked for at different times and live in two. */
struct added {
    struct added_token *tokens; /* sorted by content */
    int n_tokens, n_tokens_max;
    bool first_byte[256]; /* some token begins with it */
};

void added_deinit(struct added *added);

/* Takes a copy of the content. 0 or -ENOMEM. Call added_sort() once after the last. */
int added_add(struct added *added, const struct added_token *token);
/* The content that two tokens share, or NULL. */
const struct added_token *added_sort(struct added *added);

struct added_range {
    size_t begin, end;
};

/* A walk over one text. */
struct added_walk {
    const char *text;
    size_t n;
    const struct added_range *ranges; /* tokens lie wholly inside one of these, ascending; NULL: anywhere */
    size_t n_ranges;
    size_t searched; /* the next match begins here or later */
    size_t taken;    /* the next piece begins here */
};

/* One piece: plain text (token is NULL) or a token. */
struct added_piece {
    const struct added_token *token;
    size_t start, end;
};

/* False at the end of the text. Plain pieces are never empty. */
bool added_next(const struct added *added, const struct unicode *unicode, struct added_walk *walk,
                struct added_piece *ret_piece);
