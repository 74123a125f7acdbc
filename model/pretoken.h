/* pretoken: cuts text into words as the pre-tokenizer of Qwen3.5 does. The pattern is matched by hand: leftmost, first
 * alternative, with the backtracking a regular expression engine would do, in linear time. */
#pragma once
#include <stddef.h>

#include "unicode.h"

/* The one pattern that is implemented, as tokenizer.json spells it. */
extern const char pretoken_pattern[];

/* Length of the word at the start of n > 0 bytes of valid UTF-8; never 0. */
size_t pretoken_next(const struct unicode *unicode, const char *text, size_t n);
