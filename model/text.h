/* text: a growing run of bytes with a limit, and views of bytes that others own. An append that fails leaves the text
 * as it was and makes the failure sticky, so that a writer of many small pieces looks at `error` once, at its end. */
#pragma once
#include <stdbool.h>
#include <stddef.h>

struct span { /* not owned, no zero at the end; bytes may be NULL if n is 0 */
    const char *bytes;
    size_t n;
};

struct text {
    char *bytes;      /* owned; NULL while nothing was ever appended */
    size_t n, n_room; /* in use, allocated */
    size_t n_max;     /* limit of n */
    int error;        /* 0, -ENOMEM, or -EMSGSIZE: the limit was met; later appends do nothing */
};

void text_init(struct text *text, size_t n_max);
void text_deinit(struct text *text);

/* Forgets the bytes and the error, keeps the memory. */
void text_clear(struct text *text);

void text_add(struct text *text, const char *bytes, size_t n);
void text_add_string(struct text *text, const char *string);
void text_add_lossy(struct text *text, struct span string); /* what is not UTF-8 becomes U+FFFD */

struct span text_span(const struct text *text); /* valid until the next append */
struct span span_of(const char *string);
bool span_equal(struct span a, struct span b);
bool span_is(struct span span, const char *string);
bool span_starts_with(struct span span, const char *string);
bool span_ends_with(struct span span, const char *string);

/* Where `needle` first begins in the span, or -1. The last one for span_find_last. */
ptrdiff_t span_find(struct span span, const char *needle);
ptrdiff_t span_find_last(struct span span, const char *needle);

struct span span_from(struct span span, size_t begin); /* without its first `begin` bytes */
struct span span_cut(struct span span, size_t n_max);  /* to n_max bytes, or less: between two characters */
struct span span_skip(struct span span, char c);       /* without the c at its beginning */

/* Without white space at both ends, as Python's str.strip() sees it: Unicode's White_Space and U+001C..U+001F. */
struct span span_strip(struct span span);
