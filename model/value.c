#include "value.h"

#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <stdalign.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base.h"
#include "json.h"
#include "report.h"

static_assert((int)VALUE_DEPTH_MAX <= (int)JSON_DEPTH_MAX, "the reader is the one that counts");

enum { CHUNK_BYTES_MIN = 1024, CHUNK_BYTES_MAX = 64 * 1024, ROOM_MIN = 4, SORT_MIN = 16 };

struct value_chunk {
    struct value_chunk *next;
    size_t n_bytes;
    alignas(max_align_t) char bytes[];
};

void value_arena_init(struct value_arena *arena, size_t bytes_max) {
    *arena = (struct value_arena){.bytes_max = bytes_max};
}

void value_arena_clear(struct value_arena *arena) {
    while (arena->chunks) {
        struct value_chunk *chunk = arena->chunks;

        arena->chunks = chunk->next;
        free(chunk);
    }
    arena->n_free = 0;
    arena->bytes = 0;
}

void value_arena_deinit(struct value_arena *arena) {
    value_arena_clear(arena);
    *arena = (struct value_arena){0};
}

void *value_alloc(struct value_arena *arena, size_t n_bytes) {
    struct value_chunk *chunk = arena->chunks;
    size_t chunk_bytes, left = arena->bytes_max - arena->bytes;

    assert(n_bytes > 0);
    if (n_bytes > left && n_bytes > arena->n_free) /* also keeps the sums below from overflowing */
        return NULL;
    n_bytes = align_up(n_bytes, alignof(max_align_t));
    if (n_bytes <= arena->n_free) {
        arena->n_free -= n_bytes;
        return chunk->bytes + (chunk->n_bytes - arena->n_free - n_bytes);
    }
    chunk_bytes = chunk ? chunk->n_bytes * 2 : CHUNK_BYTES_MIN;
    if (chunk_bytes > CHUNK_BYTES_MAX)
        chunk_bytes = CHUNK_BYTES_MAX;
    if (chunk_bytes > left)
        chunk_bytes = left & ~(alignof(max_align_t) - 1);
    if (chunk_bytes < n_bytes)
        chunk_bytes = n_bytes;
    if (chunk_bytes > left)
        return NULL;
    chunk = malloc(sizeof *chunk + chunk_bytes);
    if (!chunk)
        return NULL;
    chunk->next = arena->chunks;
    chunk->n_bytes = chunk_bytes;
    arena->chunks = chunk;
    arena->bytes += chunk_bytes;
    arena->n_free = chunk_bytes - n_bytes;
    return chunk->bytes;
}

static int copy_span(struct value_arena *arena, struct span span, struct span *ret_copy) {
    char *bytes = NULL;

    if (span.n > 0) {
        bytes = value_alloc(arena, span.n);
        if (!bytes)
            return VALUE_E_FULL;
        memcpy(bytes, span.bytes, span.n);
    }
    *ret_copy = (struct span){bytes, span.n};
    return 0;
}

static int set_text(struct value_arena *arena, struct value *value, enum value_kind kind, struct span text) {
    struct span copy;
    int r = copy_span(arena, text, &copy);

    if (r == 0)
        *value = (struct value){.kind = kind, .text = copy};
    return r;
}

int value_set_int64(struct value_arena *arena, struct value *value, int64_t i) {
    char digits[24];

    snprintf(digits, sizeof digits, "%" PRId64, i);
    return set_text(arena, value, VALUE_INT, span_of(digits));
}

int value_set_uint64(struct value_arena *arena, struct value *value, uint64_t u) {
    char digits[24];

    snprintf(digits, sizeof digits, "%" PRIu64, u);
    return set_text(arena, value, VALUE_INT, span_of(digits));
}

int value_set_string(struct value_arena *arena, struct value *value, struct span string) {
    return set_text(arena, value, VALUE_STRING, string);
}

/* Room for one more element: the elements moved to twice the room, or where they are. NULL: VALUE_E_FULL. */
static void *grow(struct value_arena *arena, void *old, uint32_t n, uint32_t *n_room, size_t element_bytes) {
    uint32_t n_more = *n_room ? *n_room * 2 : ROOM_MIN;
    uint64_t bytes;
    void *moved;

    if (n < *n_room)
        return old;
    if (n_more <= *n_room || !checked_mul(n_more, element_bytes, &bytes) || bytes > arena->bytes_max)
        return NULL;
    moved = value_alloc(arena, bytes);
    if (!moved)
        return NULL;
    if (n > 0)
        memcpy(moved, old, n * element_bytes);
    *n_room = n_more;
    return moved;
}

int value_array_add(struct value_arena *arena, struct value *array, struct value **ret_item) {
    struct value *items;

    assert(array->kind == VALUE_ARRAY);
    items = grow(arena, array->array.items, array->array.n, &array->array.n_room, sizeof *items);
    if (!items)
        return VALUE_E_FULL;
    array->array.items = items;
    *ret_item = &items[array->array.n++];
    **ret_item = (struct value){.kind = VALUE_NIL};
    return 0;
}

/* `key` already lies in the arena. */
static int map_add(struct value_arena *arena, struct value *map, struct span key, struct value **ret_value) {
    struct value_pair *pairs;

    assert(map->kind == VALUE_MAP);
    pairs = grow(arena, map->map.pairs, map->map.n, &map->map.n_room, sizeof *pairs);
    if (!pairs)
        return VALUE_E_FULL;
    map->map.pairs = pairs;
    pairs[map->map.n] = (struct value_pair){.key = key, .value = {.kind = VALUE_NIL}};
    *ret_value = &pairs[map->map.n++].value;
    return 0;
}

int value_map_add(struct value_arena *arena, struct value *map, struct span key, struct value **ret_value) {
    struct span copy;
    int e = copy_span(arena, key, &copy);

    return e ? e : map_add(arena, map, copy, ret_value);
}

const struct value *value_get_span(const struct value *map, struct span key) {
    if (map->kind != VALUE_MAP)
        return NULL;
    for (uint32_t i = 0; i < map->map.n; i++)
        if (span_equal(map->map.pairs[i].key, key))
            return &map->map.pairs[i].value;
    return NULL;
}

const struct value *value_get(const struct value *map, const char *key) {
    return value_get_span(map, span_of(key));
}

static int copy_array(struct value_arena *arena, const struct value *array, struct value *ret_copy) {
    struct value copy = {.kind = VALUE_ARRAY};

    for (uint32_t i = 0; i < array->array.n; i++) {
        struct value *item;

        if (value_array_add(arena, &copy, &item) != 0 || value_copy(arena, &array->array.items[i], item) != 0)
            return VALUE_E_FULL;
    }
    *ret_copy = copy;
    return 0;
}

static int copy_map(struct value_arena *arena, const struct value *map, struct value *ret_copy) {
    struct value copy = {.kind = VALUE_MAP};

    for (uint32_t i = 0; i < map->map.n; i++) {
        struct value *value;

        if (value_map_add(arena, &copy, map->map.pairs[i].key, &value) != 0 ||
            value_copy(arena, &map->map.pairs[i].value, value) != 0)
            return VALUE_E_FULL;
    }
    *ret_copy = copy;
    return 0;
}

int value_copy(struct value_arena *arena, const struct value *value, struct value *ret_copy) {
    switch (value->kind) {
    case VALUE_INT:
    case VALUE_STRING:
        return set_text(arena, ret_copy, value->kind, value->text);
    case VALUE_ARRAY:
        return copy_array(arena, value, ret_copy);
    case VALUE_MAP:
        return copy_map(arena, value, ret_copy);
    default:
        *ret_copy = *value;
        return 0;
    }
}

/* ---- from JSON ---- */

static int compare_keys(const void *a, const void *b) {
    struct span x = *(const struct span *)a, y = *(const struct span *)b;
    size_t n = x.n < y.n ? x.n : y.n;
    int order = n ? memcmp(x.bytes, y.bytes, n) : 0;

    return order ? order : (x.n > y.n) - (x.n < y.n);
}

/* 0, VALUE_E_BAD: two keys are the same, or VALUE_E_FULL. */
static int check_unique(struct value_arena *arena, const struct value *map) {
    uint32_t n = map->map.n;
    struct span *keys;

    if (n < SORT_MIN) {
        for (uint32_t i = 1; i < n; i++)
            for (uint32_t k = 0; k < i; k++)
                if (span_equal(map->map.pairs[i].key, map->map.pairs[k].key))
                    return VALUE_E_BAD;
        return 0;
    }
    keys = value_alloc(arena, n * sizeof *keys);
    if (!keys)
        return VALUE_E_FULL;
    for (uint32_t i = 0; i < n; i++)
        keys[i] = map->map.pairs[i].key;
    qsort(keys, n, sizeof *keys, compare_keys);
    for (uint32_t i = 1; i < n; i++)
        if (span_equal(keys[i - 1], keys[i]))
            return VALUE_E_BAD;
    return 0;
}

static int read_string(struct value_arena *arena, const struct json_reader *r, struct span *ret_string) {
    char *bytes = NULL;

    if (r->string_bytes > 0) {
        bytes = value_alloc(arena, r->string_bytes);
        if (!bytes)
            return VALUE_E_FULL;
        json_unescape(r, bytes);
    }
    *ret_string = (struct span){bytes, r->string_bytes};
    return 0;
}

static int read_number(struct value_arena *arena, struct json_reader *r, struct value *value) {
    struct span digits = {r->token, r->token_bytes};
    double number;
    char *copy;

    if (!memchr(digits.bytes, '.', digits.n) && !memchr(digits.bytes, 'e', digits.n) &&
        !memchr(digits.bytes, 'E', digits.n))
        return set_text(arena, value, VALUE_INT, span_is(digits, "-0") ? span_of("0") : digits);
    copy = value_alloc(arena, digits.n + 1); /* strtod wants a zero at the end */
    if (!copy)
        return VALUE_E_FULL;
    memcpy(copy, digits.bytes, digits.n);
    copy[digits.n] = 0;
    number = strtod(copy, NULL);
    if (!isfinite(number)) {
        json_fail(r, "number too large for a double");
        return VALUE_E_BAD;
    }
    *value = (struct value){.kind = VALUE_FLOAT, .number = number};
    return 0;
}

/* Fills `value` from the token the reader stands on; containers start empty. */
static int read_value(struct value_arena *arena, struct json_reader *r, struct value *value) {
    struct span string;
    int e;

    switch (r->kind) {
    case JSON_OBJECT:
        *value = (struct value){.kind = VALUE_MAP};
        return 0;
    case JSON_ARRAY:
        *value = (struct value){.kind = VALUE_ARRAY};
        return 0;
    case JSON_STRING:
        e = read_string(arena, r, &string);
        if (e == 0)
            *value = (struct value){.kind = VALUE_STRING, .text = string};
        return e;
    case JSON_NUMBER:
        return read_number(arena, r, value);
    case JSON_TRUE:
    case JSON_FALSE:
        *value = (struct value){.kind = VALUE_BOOL, .boolean = r->kind == JSON_TRUE};
        return 0;
    case JSON_NULL:
        *value = (struct value){.kind = VALUE_NIL};
        return 0;
    default:
        return VALUE_E_BAD;
    }
}

/* One key with its place for a value, or one more item: what the reader's current token belongs into. */
static int add_member(struct value_arena *arena, struct json_reader *r, struct value *parent,
                      struct value **ret_place) {
    struct span key;
    int e;

    if (parent->kind == VALUE_ARRAY)
        return value_array_add(arena, parent, ret_place);
    if (r->kind != JSON_KEY)
        return VALUE_E_BAD;
    e = read_string(arena, r, &key);
    if (e == 0)
        e = map_add(arena, parent, key, ret_place);
    if (e == 0)
        json_next(r);
    return e;
}

/* The open containers stand on a stack of ours, so that the text does not choose the depth of C's. A parent does not
 * grow while its last child is open, so the pointers stay good. */
static int read_document(struct value_arena *arena, struct json_reader *r, int depth_max, struct value *root) {
    struct value *open[VALUE_DEPTH_MAX], *place = root;
    int depth = 0, e;

    json_next(r);
    for (;;) {
        e = read_value(arena, r, place);
        if (e != 0)
            return e;
        if (!value_is_scalar(place)) {
            if (depth == depth_max) {
                json_fail(r, "too many containers inside each other");
                return VALUE_E_BAD;
            }
            open[depth++] = place;
        }
        while (json_next(r), depth > 0 && (r->kind == JSON_OBJECT_END || r->kind == JSON_ARRAY_END)) {
            e = open[depth - 1]->kind == VALUE_MAP ? check_unique(arena, open[depth - 1]) : 0;
            if (e == VALUE_E_BAD)
                json_fail(r, "the same key twice in an object");
            if (e != 0)
                return e;
            depth--;
        }
        if (depth == 0)
            return r->kind == JSON_END ? 0 : VALUE_E_BAD;
        if (r->kind == JSON_ERROR)
            return VALUE_E_BAD;
        e = add_member(arena, r, open[depth - 1], &place);
        if (e != 0)
            return e;
    }
}

int value_from_json(struct value_arena *arena, const char *name, struct span json, int depth_max,
                    struct value *ret_value, struct report *report) {
    struct json_reader r;
    struct value value;
    int e;

    assert(depth_max >= 0 && depth_max <= VALUE_DEPTH_MAX);
    json_init(&r, json.n ? json.bytes : "", json.n);
    e = read_document(arena, &r, depth_max, &value);
    if (e == VALUE_E_BAD)
        json_refuse(&r, name, report);
    else if (e == VALUE_E_FULL)
        report_error(report, 0, "%s: takes more than %zu bytes of memory", name, arena->bytes_max);
    else
        *ret_value = value;
    return e;
}

/* ---- as text ---- */

/* Adds one to the last of the n decimal digits; "999" becomes "100" and says so. */
static bool increment(char *digits, int n) {
    for (int i = n - 1; i >= 0; i--) {
        if (digits[i] < '9') {
            digits[i]++;
            return false;
        }
        digits[i] = '0';
    }
    digits[0] = '1';
    return true;
}

static bool reads_back(const char *digits, int n, int exponent, double number) {
    char text[40];

    snprintf(text, sizeof text, "%.1s.%.*se%d", digits, n - 1, digits + 1, exponent);
    return strtod(text, NULL) == number;
}

/* The fewest decimal digits that read back as the same double (finite, >= 0), d.ddd * 10^exponent; returns how many.
 * Below a power of two doubles lie twice as dense as above it, so there the nearest decimal of n digits may fail where
 * the next one up holds. */
static int shortest_digits(double number, char *digits, int *ret_exponent) {
    for (int n = 1;; n++) {
        char text[40];
        int exponent;

        snprintf(text, sizeof text, "%.*e", n - 1, number);
        digits[0] = text[0];
        memcpy(digits + 1, text + 2, (size_t)n - 1);
        digits[n] = 0;
        exponent = atoi(strchr(text, 'e') + 1);
        *ret_exponent = exponent;
        if (reads_back(digits, n, exponent, number))
            return n;
        *ret_exponent += increment(digits, n);
        if (reads_back(digits, n, *ret_exponent, number))
            return n;
        assert(n < 17); /* 17 digits tell all doubles apart */
    }
}

static void write_zeros(struct text *out, int n) {
    while (n-- > 0)
        text_add(out, "0", 1);
}

/* Python's repr: plain digits for exponents -4..15, else scientific with at least two digits of exponent. */
static void write_finite(struct text *out, double number) {
    char digits[20], suffix[16];
    int exponent, n;

    if (signbit(number))
        text_add(out, "-", 1);
    n = shortest_digits(fabs(number), digits, &exponent);
    while (n > 1 && digits[n - 1] == '0')
        n--;
    if (exponent < -4 || exponent > 15) {
        text_add(out, digits, 1);
        if (n > 1) {
            text_add(out, ".", 1);
            text_add(out, digits + 1, (size_t)n - 1);
        }
        snprintf(suffix, sizeof suffix, "e%c%02d", exponent < 0 ? '-' : '+', abs(exponent));
        text_add_string(out, suffix);
    } else if (exponent < 0) {
        text_add(out, "0.", 2);
        write_zeros(out, -exponent - 1);
        text_add(out, digits, (size_t)n);
    } else if (n <= exponent + 1) {
        text_add(out, digits, (size_t)n);
        write_zeros(out, exponent + 1 - n);
        text_add(out, ".0", 2);
    } else {
        text_add(out, digits, (size_t)exponent + 1);
        text_add(out, ".", 1);
        text_add(out, digits + exponent + 1, (size_t)(n - exponent - 1));
    }
}

static void write_float(struct text *out, double number, const char *infinity, const char *nan) {
    if (isfinite(number)) {
        write_finite(out, number);
        return;
    }
    if (isnan(number)) {
        text_add_string(out, nan);
        return;
    }
    if (number < 0)
        text_add(out, "-", 1);
    text_add_string(out, infinity);
}

static void write_json_string(struct text *out, struct span string) {
    static const char plain[] = "\"\\\b\f\n\r\t", letters[] = "\"\\bfnrt";
    size_t begin = 0;

    text_add(out, "\"", 1);
    for (size_t i = 0; i < string.n; i++) {
        unsigned char c = (unsigned char)string.bytes[i];
        char escape[8];
        const char *at;

        if (c >= 0x20 && c != '"' && c != '\\')
            continue;
        text_add(out, string.bytes + begin, i - begin);
        begin = i + 1;
        at = c ? strchr(plain, c) : NULL;
        if (at)
            snprintf(escape, sizeof escape, "\\%c", letters[at - plain]);
        else
            snprintf(escape, sizeof escape, "\\u%04x", c);
        text_add_string(out, escape);
    }
    if (begin < string.n)
        text_add(out, string.bytes + begin, string.n - begin);
    text_add(out, "\"", 1);
}

static void write_json(struct text *out, const struct value *value, int depth) {
    assert(depth <= VALUE_DEPTH_MAX);
    switch (value->kind) {
    case VALUE_NIL:
        text_add_string(out, "null");
        break;
    case VALUE_BOOL:
        text_add_string(out, value->boolean ? "true" : "false");
        break;
    case VALUE_INT:
        text_add(out, value->text.bytes, value->text.n);
        break;
    case VALUE_FLOAT:
        write_float(out, value->number, "Infinity", "NaN");
        break;
    case VALUE_STRING:
        write_json_string(out, value->text);
        break;
    case VALUE_ARRAY:
        text_add(out, "[", 1);
        for (uint32_t i = 0; i < value->array.n; i++) {
            text_add(out, ", ", i ? 2 : 0);
            write_json(out, &value->array.items[i], depth + 1);
        }
        text_add(out, "]", 1);
        break;
    case VALUE_MAP:
        text_add(out, "{", 1);
        for (uint32_t i = 0; i < value->map.n; i++) {
            text_add(out, ", ", i ? 2 : 0);
            write_json_string(out, value->map.pairs[i].key);
            text_add(out, ": ", 2);
            write_json(out, &value->map.pairs[i].value, depth + 1);
        }
        text_add(out, "}", 1);
        break;
    }
}

void value_write_json(struct text *out, const struct value *value) {
    write_json(out, value, 0);
}

void value_write_str(struct text *out, const struct value *scalar) {
    switch (scalar->kind) {
    case VALUE_NIL:
        text_add_string(out, "None");
        break;
    case VALUE_BOOL:
        text_add_string(out, scalar->boolean ? "True" : "False");
        break;
    case VALUE_FLOAT:
        write_float(out, scalar->number, "inf", "nan");
        break;
    case VALUE_INT:
    case VALUE_STRING:
        text_add(out, scalar->text.bytes, scalar->text.n);
        break;
    case VALUE_ARRAY:
    case VALUE_MAP:
        assert(!"a container has no spelling here");
    }
}
