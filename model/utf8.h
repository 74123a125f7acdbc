/* utf8: one character at a time out of bytes nobody has checked, and back. Header only.
 *
 * Ill-formed input has one rule everywhere in this project: each maximal subpart of an ill-formed sequence (the longest
 * run of bytes that could still have become a character) counts as one U+FFFD. Python's errors='replace' and Rust's
 * from_utf8_lossy follow the same rule. */
#pragma once
#include <stddef.h>
#include <stdint.h>

enum { UTF8_REPLACEMENT = 0xFFFD, UTF8_CHAR_BYTES_MAX = 4 };

/* Looks at the n >= 1 bytes at s. Returns
 *   k > 0: they begin with a character of k bytes, *ret_cp is set;
 *   k < 0: they begin with -k bytes that can become no character;
 *   0:     all n bytes (at most 3) are the beginning of a character whose rest is missing. */
static inline int utf8_decode(const unsigned char *s, size_t n, uint32_t *ret_cp) {
    unsigned lead = s[0], low = 0x80, high = 0xBF;
    uint32_t cp;
    int n_bytes;

    if (lead < 0x80) {
        *ret_cp = lead;
        return 1;
    }
    if (lead < 0xC2 || lead > 0xF4)
        return -1;
    if (lead < 0xE0) {
        n_bytes = 2;
        cp = lead & 0x1F;
    } else if (lead < 0xF0) {
        n_bytes = 3;
        cp = lead & 0x0F;
        if (lead == 0xE0) /* shorter forms exist */
            low = 0xA0;
        else if (lead == 0xED) /* surrogates */
            high = 0x9F;
    } else {
        n_bytes = 4;
        cp = lead & 0x07;
        if (lead == 0xF0)
            low = 0x90;
        else if (lead == 0xF4) /* above U+10FFFF */
            high = 0x8F;
    }
    for (int i = 1; i < n_bytes; i++) {
        if ((size_t)i == n)
            return 0;
        if (s[i] < low || s[i] > high)
            return -i;
        cp = cp << 6 | (s[i] & 0x3F);
        low = 0x80;
        high = 0xBF;
    }
    *ret_cp = cp;
    return n_bytes;
}

/* Writes a scalar value (no surrogate, at most U+10FFFF) and returns its number of bytes. */
static inline int utf8_encode(uint32_t cp, char *out) {
    if (cp < 0x80) {
        out[0] = (char)cp;
        return 1;
    }
    if (cp < 0x800) {
        out[0] = (char)(0xC0 | cp >> 6);
        out[1] = (char)(0x80 | (cp & 0x3F));
        return 2;
    }
    if (cp < 0x10000) {
        out[0] = (char)(0xE0 | cp >> 12);
        out[1] = (char)(0x80 | (cp >> 6 & 0x3F));
        out[2] = (char)(0x80 | (cp & 0x3F));
        return 3;
    }
    out[0] = (char)(0xF0 | cp >> 18);
    out[1] = (char)(0x80 | (cp >> 12 & 0x3F));
    out[2] = (char)(0x80 | (cp >> 6 & 0x3F));
    out[3] = (char)(0x80 | (cp & 0x3F));
    return 4;
}
