/* unicode: what the tokenizer must know of a code point, in one byte: its class in the pre-tokenizer's pattern and its
 * part in NFC. Built once from utf8proc's tables and corrected to the Unicode versions of the reference
 * (unicode_ranges.h), then read-only. */
#pragma once
#include <stdint.h>

#include "utf8.h"

struct report;

enum unicode_class {
    UNICODE_OTHER, /* none of the below: punctuation, symbols, controls, unassigned */
    UNICODE_LETTER,
    UNICODE_MARK,
    UNICODE_NUMBER,
    UNICODE_SPACE, /* White_Space, which is what \s means to the reference */
    UNICODE_NONE,  /* no code point: the end of the text */
};

enum {
    UNICODE_CLASS_MASK = 7,
    /* NFC leaves it alone, and it joins nothing before it: NFC(x y) = NFC(x) NFC(y) if y begins with it. */
    UNICODE_BOUNDARY = 8,
    /* A boundary that joins nothing behind it either: a mark or composite that the reference's NFC does not know. */
    UNICODE_OPAQUE = 16,
};

enum { UNICODE_MAX = 0x10FFFF };

struct unicode {
    uint16_t block_of[(UNICODE_MAX + 1) >> 8]; /* ASCII lies in block 0 */
    uint8_t *blocks;                           /* [n_blocks][256]; equal blocks are stored once */
    int n_blocks;
};

/* -ENOMEM, or -ENOTSUP with a line if utf8proc is older than the corrections assume. */
int unicode_init(struct unicode *unicode, struct report *report);
void unicode_deinit(struct unicode *unicode);

static inline unsigned unicode_of(const struct unicode *unicode, uint32_t cp) {
    return unicode->blocks[(size_t)unicode->block_of[cp >> 8] << 8 | (cp & 0xFF)];
}

/* The byte of the character at s[0..n), valid UTF-8, and its length; UNICODE_NONE and 0 at the end. */
static inline unsigned unicode_at(const struct unicode *unicode, const char *s, size_t n, int *ret_bytes) {
    uint32_t cp = 0; /* stays so only if the text is not valid UTF-8 after all */

    if (n == 0) {
        *ret_bytes = 0;
        return UNICODE_NONE;
    }
    if ((unsigned char)*s < 0x80) {
        *ret_bytes = 1;
        return unicode->blocks[(unsigned char)*s];
    }
    *ret_bytes = utf8_decode((const unsigned char *)s, n, &cp);
    return unicode_of(unicode, cp);
}
