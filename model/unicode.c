#include "unicode.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#include "base.h"
#include "report.h"
#include "unicode_ranges.h"

enum { UTF8PROC_UNICODE_MIN = 15 }; /* the corrections begin at 15.0 */

static unsigned class_of(int32_t cp, utf8proc_category_t category) {
    if ((cp >= 0x09 && cp <= 0x0D) || cp == 0x85)
        return UNICODE_SPACE;
    switch (category) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
        return UNICODE_LETTER;
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
        return UNICODE_MARK;
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_NO:
        return UNICODE_NUMBER;
    case UTF8PROC_CATEGORY_ZS:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
        return UNICODE_SPACE;
    default:
        return UNICODE_OTHER;
    }
}

enum { DECOMPOSED_MAX = 8 }; /* canonical decompositions have at most four code points */

/* Full canonical decomposition; the number of code points. */
static int decompose(int32_t cp, utf8proc_int32_t out[DECOMPOSED_MAX]) {
    int boundclass = UTF8PROC_BOUNDCLASS_START;

    return (int)utf8proc_decompose_char(cp, out, DECOMPOSED_MAX, UTF8PROC_DECOMPOSE | UTF8PROC_STABLE, &boundclass);
}

static bool bit_is_set(const uint8_t *bits, int32_t i) {
    return bits[i >> 3] >> (i & 7) & 1;
}

/* joins: the code points that compose with one before them. */
static bool is_boundary(int32_t cp, const uint8_t *joins) {
    utf8proc_int32_t parts[DECOMPOSED_MAX];
    int n_parts = decompose(cp, parts);

    if (n_parts < 1 || n_parts > DECOMPOSED_MAX)
        return false;
    if (utf8proc_get_property(parts[0])->combining_class != 0 || bit_is_set(joins, parts[0]) || bit_is_set(joins, cp))
        return false;
    if (n_parts == 1)
        return parts[0] == cp;
    return utf8proc_normalize_utf32(parts, n_parts, UTF8PROC_COMPOSE | UTF8PROC_STABLE) == 1 && parts[0] == cp;
}

/* The part of first..last that lies in the block of 256 from `block_first` on, as places in it; empty: from > to. */
static void clip(int32_t block_first, uint32_t first, uint32_t last, int *ret_from, int *ret_to) {
    *ret_from = max_int((int)first - block_first, 0);
    *ret_to = min_int((int)last - block_first, 255);
}

static void fill_block(int32_t first, const uint8_t *joins, uint8_t block[256]) {
    int from, to;

    for (int i = 0; i < 256; i++) {
        utf8proc_category_t category = utf8proc_category(first + i);

        block[i] = (uint8_t)class_of(first + i, category);
        if (category == UTF8PROC_CATEGORY_CN || is_boundary(first + i, joins))
            block[i] |= UNICODE_BOUNDARY;
    }
    for (size_t k = 0; k < ARRAY_LEN(unicode_class_ranges); k++) {
        clip(first, unicode_class_ranges[k].first, unicode_class_ranges[k].last, &from, &to);
        for (int i = from; i <= to; i++)
            block[i] = (uint8_t)((block[i] & ~UNICODE_CLASS_MASK) | unicode_class_ranges[k].class);
    }
    for (size_t k = 0; k < ARRAY_LEN(unicode_opaque_ranges); k++) {
        clip(first, unicode_opaque_ranges[k].first, unicode_opaque_ranges[k].last, &from, &to);
        for (int i = from; i <= to; i++)
            block[i] |= UNICODE_BOUNDARY | UNICODE_OPAQUE;
    }
}

/* Sets the bit of every code point that ends a canonical decomposition. Some of them do not compose (exclusions); taking
 * those for joiners costs a little time and no truth. */
static void find_joins(uint8_t *joins) {
    for (int32_t cp = 0x80; cp <= UNICODE_MAX; cp++) {
        utf8proc_int32_t parts[DECOMPOSED_MAX];
        int n_parts;

        if (utf8proc_category(cp) == UTF8PROC_CATEGORY_CN)
            continue;
        n_parts = decompose(cp, parts);
        if (n_parts > 1 && n_parts <= DECOMPOSED_MAX)
            joins[parts[n_parts - 1] >> 3] |= (uint8_t)(1 << (parts[n_parts - 1] & 7));
    }
}

int unicode_init(struct unicode *unicode, struct report *report) {
    uint8_t *joins, *fitted;
    int n_blocks = 0, n_places = (int)ARRAY_LEN(unicode->block_of);

    *unicode = (struct unicode){0};
    if (atoi(utf8proc_unicode_version()) < UTF8PROC_UNICODE_MIN)
        return report_error(report, -ENOTSUP, "utf8proc %s knows Unicode %s only; %d.0 or newer is needed",
                            utf8proc_version(), utf8proc_unicode_version(), UTF8PROC_UNICODE_MIN);
    joins = calloc((UNICODE_MAX + 1) / 8, 1);
    unicode->blocks = malloc((size_t)n_places * 256);
    if (!joins || !unicode->blocks) {
        free(joins);
        unicode_deinit(unicode);
        return -ENOMEM;
    }
    find_joins(joins);
    for (int place = 0; place < n_places; place++) {
        uint8_t *block = unicode->blocks + (size_t)n_blocks * 256;
        int same = n_blocks - 1;

        fill_block(place << 8, joins, block);
        while (same >= 0 && memcmp(unicode->blocks + (size_t)same * 256, block, 256) != 0)
            same--;
        if (same < 0)
            same = n_blocks++;
        unicode->block_of[place] = (uint16_t)same;
    }
    free(joins);
    fitted = realloc(unicode->blocks, (size_t)n_blocks * 256);
    if (fitted)
        unicode->blocks = fitted;
    unicode->n_blocks = n_blocks;
    return 0;
}

void unicode_deinit(struct unicode *unicode) {
    free(unicode->blocks);
    *unicode = (struct unicode){0};
}
