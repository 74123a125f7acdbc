#include "text.h"

#include <assert.h>
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "utf8.h"

enum { TEXT_ROOM_MIN = 256 };

void text_init(struct text *text, size_t n_max) {
    *text = (struct text){.n_max = n_max};
}

void text_deinit(struct text *text) {
    free(text->bytes);
    *text = (struct text){0};
}

void text_clear(struct text *text) {
    text->n = 0;
    text->error = 0;
}

static int grow(struct text *text, size_t n_wanted) {
    size_t n_room = text->n_room > text->n_max / 2 ? text->n_max : text->n_room * 2;
    char *bytes;

    if (n_room < n_wanted)
        n_room = n_wanted;
    if (n_room < TEXT_ROOM_MIN)
        n_room = TEXT_ROOM_MIN;
    bytes = realloc(text->bytes, n_room);
    if (!bytes)
        return -ENOMEM;
    text->bytes = bytes;
    text->n_room = n_room;
    return 0;
}

void text_add(struct text *text, const char *bytes, size_t n) {
    if (text->error != 0 || n == 0)
        return;
    if (n > text->n_max - text->n) {
        text->error = -EMSGSIZE;
        return;
    }
    if (text->n + n > text->n_room)
        text->error = grow(text, text->n + n);
    if (text->error != 0)
        return;
    memcpy(text->bytes + text->n, bytes, n);
    text->n += n;
}

void text_add_string(struct text *text, const char *string) {
    text_add(text, string, strlen(string));
}

void text_add_lossy(struct text *text, struct span string) {
    char character[UTF8_CHAR_BYTES_MAX];
    size_t i = 0;

    while (i < string.n) {
        uint32_t cp = UTF8_REPLACEMENT;
        int n = utf8_decode((const unsigned char *)string.bytes + i, string.n - i, &cp);

        if (n <= 0)
            cp = UTF8_REPLACEMENT;
        text_add(text, character, (size_t)utf8_encode(cp, character));
        i += n > 0 ? (size_t)n : n < 0 ? (size_t)-n : string.n - i;
    }
}

struct span text_span(const struct text *text) {
    return (struct span){text->bytes, text->n};
}

struct span span_of(const char *string) {
    return (struct span){string, strlen(string)};
}

bool span_equal(struct span a, struct span b) {
    return a.n == b.n && (a.n == 0 || memcmp(a.bytes, b.bytes, a.n) == 0);
}

bool span_is(struct span span, const char *string) {
    return span_equal(span, span_of(string));
}

bool span_starts_with(struct span span, const char *string) {
    size_t n = strlen(string);

    return span.n >= n && memcmp(span.bytes, string, n) == 0;
}

bool span_ends_with(struct span span, const char *string) {
    size_t n = strlen(string);

    return span.n >= n && memcmp(span.bytes + span.n - n, string, n) == 0;
}

ptrdiff_t span_find(struct span span, const char *needle) {
    const char *at = span.n ? memmem(span.bytes, span.n, needle, strlen(needle)) : NULL;

    return at ? at - span.bytes : -1;
}

ptrdiff_t span_find_last(struct span span, const char *needle) {
    size_t n = strlen(needle);

    if (span.n < n)
        return -1;
    for (size_t i = span.n - n + 1; i-- > 0;)
        if (memcmp(span.bytes + i, needle, n) == 0)
            return (ptrdiff_t)i;
    return -1;
}

struct span span_cut(struct span span, size_t n_max) {
    if (span.n > n_max)
        for (span.n = n_max; span.n > 0 && ((unsigned char)span.bytes[span.n] & 0xC0) == 0x80;)
            span.n--;
    return span;
}

struct span span_from(struct span span, size_t begin) {
    assert(begin <= span.n);
    if (begin == 0)
        return span;
    return (struct span){span.bytes + begin, span.n - begin};
}

struct span span_skip(struct span span, char c) {
    size_t n = 0;

    while (n < span.n && span.bytes[n] == c)
        n++;
    return span_from(span, n);
}

static bool is_space(uint32_t cp) {
    return (cp >= 0x09 && cp <= 0x0D) || (cp >= 0x1C && cp <= 0x20) || cp == 0x85 || cp == 0xA0 || cp == 0x1680 ||
           (cp >= 0x2000 && cp <= 0x200A) || cp == 0x2028 || cp == 0x2029 || cp == 0x202F || cp == 0x205F ||
           cp == 0x3000;
}

/* Bytes of the white space character at the beginning, or 0. */
static size_t space_first(struct span span) {
    uint32_t cp;
    int n = span.n ? utf8_decode((const unsigned char *)span.bytes, span.n, &cp) : 0;

    return n > 0 && is_space(cp) ? (size_t)n : 0;
}

/* Of the one at the end, or 0. */
static size_t space_last(struct span span) {
    for (size_t n = 1; n <= UTF8_CHAR_BYTES_MAX && n <= span.n; n++) {
        const unsigned char *s = (const unsigned char *)span.bytes + span.n - n;
        uint32_t cp;

        if ((*s & 0xC0) == 0x80) /* the middle of a character */
            continue;
        return utf8_decode(s, n, &cp) == (int)n && is_space(cp) ? n : 0;
    }
    return 0;
}

struct span span_strip(struct span span) {
    size_t n;

    while ((n = space_first(span)) > 0)
        span = span_from(span, n);
    while ((n = space_last(span)) > 0)
        span.n -= n;
    return span;
}
