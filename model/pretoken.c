#include "pretoken.h"

#include <stdbool.h>

const char pretoken_pattern[] = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}|"
                                " ?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";

static bool is_newline(char c) {
    return c == '\r' || c == '\n';
}

static unsigned class_at(const struct unicode *unicode, const char *text, size_t n, int *ret_bytes) {
    return unicode_at(unicode, text, n, ret_bytes) & UNICODE_CLASS_MASK;
}

static char lower(char c) {
    return c >= 'A' && c <= 'Z' ? (char)(c | 0x20) : c;
}

/* 's|'t|'re|'ve|'m|'ll|'d behind an apostrophe, in any case; 0 if none. */
static size_t contraction(const char *text, size_t n) {
    char c1, c2;

    if (n < 2)
        return 0;
    c1 = lower(text[1]);
    if (c1 == 's' || c1 == 't' || c1 == 'm' || c1 == 'd')
        return 2;
    if (n < 3)
        return 0;
    c2 = lower(text[2]);
    if (((c1 == 'r' || c1 == 'v') && c2 == 'e') || (c1 == 'l' && c2 == 'l'))
        return 3;
    if (text[1] == '\xC5' && text[2] == '\xBF') /* U+017F, the long s, folds to s; no other fold meets these letters */
        return 3;
    return 0;
}

static size_t letters_and_marks(const struct unicode *unicode, const char *text, size_t n, size_t at) {
    for (;;) {
        int n_char;
        unsigned class = class_at(unicode, text + at, n - at, &n_char);

        if (class != UNICODE_LETTER && class != UNICODE_MARK)
            return at;
        at += (size_t)n_char;
    }
}

static size_t others_and_newlines(const struct unicode *unicode, const char *text, size_t n, size_t at) {
    int n_char;

    while (class_at(unicode, text + at, n - at, &n_char) == UNICODE_OTHER)
        at += (size_t)n_char;
    while (at < n && is_newline(text[at]))
        at++;
    return at;
}

/* The last three alternatives: text begins with white space. */
static size_t spaces(const struct unicode *unicode, const char *text, size_t n) {
    size_t at = 0, last_start = 0, newline_end = 0;
    int n_char;

    while (class_at(unicode, text + at, n - at, &n_char) == UNICODE_SPACE) {
        last_start = at;
        at += (size_t)n_char;
        if (is_newline(text[last_start]))
            newline_end = at;
    }
    if (newline_end > 0) /* \s*[\r\n]+ gives back what stands behind its last newline */
        return newline_end;
    if (at == n || last_start == 0) /* \s+(?!\S) at the end of the text; \s+ for a single space */
        return at;
    return last_start; /* \s+(?!\S) gives its last space back to the word that follows */
}

size_t pretoken_next(const struct unicode *unicode, const char *text, size_t n) {
    int n_first, n_second;
    unsigned first = class_at(unicode, text, n, &n_first), second;

    if (first == UNICODE_LETTER)
        return letters_and_marks(unicode, text, n, (size_t)n_first);
    if (first == UNICODE_NUMBER)
        return (size_t)n_first;
    if (*text == '\'') {
        size_t n_word = contraction(text, n);

        if (n_word > 0)
            return n_word;
    }
    second = class_at(unicode, text + n_first, n - (size_t)n_first, &n_second);
    /* One character of any kind but newline, letter and number may lead a run of letters and marks. */
    if ((second == UNICODE_LETTER || second == UNICODE_MARK) && !is_newline(*text))
        return letters_and_marks(unicode, text, n, (size_t)n_first + (size_t)n_second);
    if (first == UNICODE_MARK)
        return (size_t)n_first;
    if (first == UNICODE_OTHER)
        return others_and_newlines(unicode, text, n, (size_t)n_first);
    if (*text == ' ' && second == UNICODE_OTHER)
        return others_and_newlines(unicode, text, n, (size_t)n_first + (size_t)n_second);
    return spaces(unicode, text, n);
}
