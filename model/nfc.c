#include "nfc.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

enum { SORT_SMALL = 16, DECOMPOSED_MAX = 8 };

void nfc_deinit(struct nfc *nfc) {
    free(nfc->out);
    free(nfc->cps);
    free(nfc->sorted);
    *nfc = (struct nfc){0};
}

static int append(struct nfc *nfc, const char *bytes, size_t n) {
    if (nfc->capacity - nfc->n < n) {
        size_t capacity = nfc->capacity + nfc->capacity / 2 + n + 256;
        char *grown = realloc(nfc->out, capacity);

        if (!grown)
            return -ENOMEM;
        nfc->out = grown;
        nfc->capacity = capacity;
    }
    if (n > 0)
        memcpy(nfc->out + nfc->n, bytes, n);
    nfc->n += n;
    return 0;
}

static int reserve(int32_t **cps, size_t *max, size_t n) {
    int32_t *grown;

    if (n <= *max)
        return 0;
    grown = realloc(*cps, (n + n / 2) * sizeof **cps);
    if (!grown)
        return -ENOMEM;
    *cps = grown;
    *max = n + n / 2;
    return 0;
}

static unsigned combining_class(int32_t cp) {
    return (unsigned)utf8proc_get_property(cp)->combining_class;
}

/* Stable sort of marks by combining class. Long runs, which only an attacker writes, are counted: no quadratic time. */
static int sort_marks(struct nfc *nfc, int32_t *marks, size_t n) {
    size_t place[256] = {0}, at = 0;
    int r;

    if (n <= SORT_SMALL) {
        for (size_t i = 1; i < n; i++) {
            int32_t mark = marks[i];
            unsigned class = combining_class(mark);
            size_t k = i;

            for (; k > 0 && combining_class(marks[k - 1]) > class; k--)
                marks[k] = marks[k - 1];
            marks[k] = mark;
        }
        return 0;
    }
    r = reserve(&nfc->sorted, &nfc->sorted_max, n);
    if (r != 0)
        return r;
    for (size_t i = 0; i < n; i++)
        place[combining_class(marks[i]) & 0xFF]++;
    for (int class = 0; class < 256; class ++) {
        size_t count = place[class];

        place[class] = at;
        at += count;
    }
    for (size_t i = 0; i < n; i++)
        nfc->sorted[place[combining_class(marks[i]) & 0xFF]++] = marks[i];
    memcpy(marks, nfc->sorted, n * sizeof *marks);
    return 0;
}

/* Decompose, order, compose: a stretch that begins with a boundary or at the start of the text. */
static int normalize_stretch(struct nfc *nfc, const char *text, size_t n) {
    size_t n_cps = 0, at = 0;
    utf8proc_ssize_t n_composed;
    int r = 0;

    while (at < n) {
        int boundclass = UTF8PROC_BOUNDCLASS_START;
        uint32_t cp = 0;

        at += (size_t)utf8_decode((const unsigned char *)text + at, n - at, &cp);
        r = reserve(&nfc->cps, &nfc->cps_max, n_cps + DECOMPOSED_MAX);
        if (r != 0)
            return r;
        n_cps += (size_t)utf8proc_decompose_char((int32_t)cp, nfc->cps + n_cps, DECOMPOSED_MAX,
                                                 UTF8PROC_DECOMPOSE | UTF8PROC_STABLE, &boundclass);
    }
    for (size_t i = 0; i < n_cps && r == 0; i++) {
        size_t first = i;

        while (i < n_cps && combining_class(nfc->cps[i]) != 0)
            i++;
        if (i - first > 1)
            r = sort_marks(nfc, nfc->cps + first, i - first);
    }
    if (r != 0)
        return r;
    n_composed = utf8proc_normalize_utf32(nfc->cps, (utf8proc_ssize_t)n_cps, UTF8PROC_COMPOSE | UTF8PROC_STABLE);
    for (utf8proc_ssize_t i = 0; i < n_composed && r == 0; i++) {
        char bytes[UTF8_CHAR_BYTES_MAX];

        r = append(nfc, bytes, (size_t)utf8_encode((uint32_t)nfc->cps[i], bytes));
    }
    return r;
}

int nfc_normalize(struct nfc *nfc, const struct unicode *unicode, const char *text, size_t n, const char **ret_text,
                  size_t *ret_n) {
    size_t copied = 0; /* text[0..copied) stands in nfc->out, normalised */
    size_t start = 0;  /* of the boundary character before `at`, or `at` if that joins nothing */
    size_t at = 0;
    int r;

    nfc->n = 0;
    while (at < n) {
        int n_char;
        unsigned bits = unicode_at(unicode, text + at, n - at, &n_char);

        if (bits & UNICODE_BOUNDARY) {
            start = bits & UNICODE_OPAQUE ? at + (size_t)n_char : at;
            at += (size_t)n_char;
            continue;
        }
        do {
            at += (size_t)n_char;
            bits = unicode_at(unicode, text + at, n - at, &n_char);
        } while (bits != UNICODE_NONE && !(bits & UNICODE_BOUNDARY));
        r = append(nfc, text + copied, start - copied);
        if (r == 0)
            r = normalize_stretch(nfc, text + start, at - start);
        if (r != 0)
            return r;
        copied = start = at;
    }
    if (copied == 0) {
        *ret_text = text;
        *ret_n = n;
        return 0;
    }
    r = append(nfc, text + copied, n - copied);
    if (r != 0)
        return r;
    *ret_text = nfc->out;
    *ret_n = nfc->n;
    return 0;
}
