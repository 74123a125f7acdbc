#include "frame.h"

#include <assert.h>
#include <errno.h>
#include <msgpack.h>
#include <stdlib.h>
#include <string.h>

#include "base.h"
#include "report.h"
#include "utf8.h"

enum { SORT_MIN = 16 }; /* keys of a map from which on sorting beats comparing each with each */

/* ---- scan ---- */

/* What the first bytes of a value say. */
struct head {
    size_t n_bytes;    /* of the head; if there are fewer, nothing else holds yet */
    size_t n_tail;     /* bytes that follow and are no values */
    uint64_t n_values; /* that follow inside */
    bool is_container, is_array;
    const char *refusal; /* NULL, or why no such value is taken */
};

static uint64_t big_endian(const unsigned char *bytes, size_t n) {
    uint64_t u = 0;

    for (size_t i = 0; i < n; i++)
        u = u << 8 | bytes[i];
    return u;
}

static struct head scalar(size_t n_bytes) {
    return (struct head){.n_bytes = n_bytes};
}

static struct head array(size_t n_bytes, uint64_t n) {
    return (struct head){.n_bytes = n_bytes, .n_values = n, .is_container = true, .is_array = true};
}

static struct head map(size_t n_bytes, uint64_t n) {
    return (struct head){.n_bytes = n_bytes, .n_values = 2 * n, .is_container = true};
}

static struct head bytes_of(size_t n_bytes, uint64_t n) {
    return (struct head){.n_bytes = n_bytes, .n_tail = n};
}

/* The head of the value that the n >= 1 bytes at p begin with. */
static struct head read_head(const unsigned char *p, size_t n) {
    static const uint8_t length_bytes[] = {
        [0xc4 - 0xc0] = 1, [0xc5 - 0xc0] = 2, [0xc6 - 0xc0] = 4, /* bin */
        [0xd9 - 0xc0] = 1, [0xda - 0xc0] = 2, [0xdb - 0xc0] = 4, /* str */
        [0xdc - 0xc0] = 2, [0xdd - 0xc0] = 4,                    /* array */
        [0xde - 0xc0] = 2, [0xdf - 0xc0] = 4,                    /* map */
    };
    static const uint8_t number_bytes[] = {
        [0xca - 0xc0] = 5, [0xcb - 0xc0] = 9,                                       /* float */
        [0xcc - 0xc0] = 2, [0xcd - 0xc0] = 3, [0xce - 0xc0] = 5, [0xcf - 0xc0] = 9, /* unsigned */
        [0xd0 - 0xc0] = 2, [0xd1 - 0xc0] = 3, [0xd2 - 0xc0] = 5, [0xd3 - 0xc0] = 9, /* signed */
    };
    unsigned type = p[0], k;
    uint64_t count;

    if (type <= 0x7f || type >= 0xe0)
        return scalar(1);
    if (type <= 0x8f)
        return map(1, type & 0x0f);
    if (type <= 0x9f)
        return array(1, type & 0x0f);
    if (type <= 0xbf)
        return bytes_of(1, type & 0x1f);
    if (type == 0xc0 || type == 0xc2 || type == 0xc3)
        return scalar(1);
    if (type == 0xc1)
        return (struct head){.n_bytes = 1, .refusal = "the byte 0xc1, which begins no value"};
    if ((type >= 0xc7 && type <= 0xc9) || (type >= 0xd4 && type <= 0xd8))
        return (struct head){.n_bytes = 1, .refusal = "an extension type; there are none in this protocol"};
    k = type - 0xc0;
    if (k < ARRAY_LEN(number_bytes) && number_bytes[k])
        return scalar(number_bytes[k]);
    if (n < 1u + length_bytes[k])
        return scalar(1u + length_bytes[k]);
    count = big_endian(p + 1, length_bytes[k]);
    if (type >= 0xde)
        return map(1u + length_bytes[k], count);
    if (type >= 0xdc)
        return array(1u + length_bytes[k], count);
    return bytes_of(1u + length_bytes[k], count);
}

void frame_scan_init(struct frame_scan *scan, size_t bytes_max) {
    *scan = (struct frame_scan){.bytes_max = bytes_max};
}

size_t frame_scan_bytes_min(const struct frame_scan *scan) {
    return scan->n_walked + scan->n_skip + (scan->n_values == 0 ? 1 : scan->n_due) + scan->n_head_more;
}

/* One value of an open container has ended, and with it each container whose last it was. */
static void end_value(struct frame_scan *scan) {
    while (scan->depth > 0) {
        if (--scan->left[scan->depth - 1] > 0)
            return;
        scan->depth--;
    }
}

static int take_head(struct frame_scan *scan, const struct head *head, struct report *report) {
    size_t at = scan->n_walked, values_max = frame_values_max(scan->bytes_max);
    bool is_first = scan->n_values == 0;

    if (head->refusal)
        return report_error(report, FRAME_E_BAD, "byte %zu of the message is %s", at, head->refusal);
    if (is_first && !(head->is_array && (head->n_values == 3 || head->n_values == 4)))
        return report_error(report, FRAME_E_BAD,
                            "these bytes are no message: one begins with an array of 4 (request, response) or 3 "
                            "(notification)");
    scan->n_head_more = 0;
    scan->n_values++;
    scan->n_due += head->n_values - !is_first;
    scan->n_walked += head->n_bytes;
    scan->n_skip = head->n_tail;
    if (frame_scan_bytes_min(scan) > scan->bytes_max)
        return report_error(report, FRAME_E_BAD,
                            "a value at byte %zu declares %zu more %s; the message would have at least %zu bytes, the "
                            "limit is %zu",
                            at, head->is_container ? (size_t)head->n_values : head->n_tail,
                            head->is_container ? "values" : "bytes", frame_scan_bytes_min(scan), scan->bytes_max);
    if (scan->n_values + scan->n_due > values_max)
        return report_error(report, FRAME_E_BAD, "the message has at least %zu values, the limit is %zu",
                            scan->n_values + (size_t)scan->n_due, values_max);
    if (head->n_values == 0) {
        end_value(scan);
        return 0;
    }
    if (scan->depth == FRAME_DEPTH_MAX)
        return report_error(report, FRAME_E_BAD, "the container at byte %zu is inside %d others, the limit is %d", at,
                            FRAME_DEPTH_MAX, FRAME_DEPTH_MAX - 1);
    scan->left[scan->depth++] = head->n_values;
    return 0;
}

int frame_scan(struct frame_scan *scan, const char *bytes, size_t n, size_t *ret_n, struct report *report) {
    int e;

    assert(n >= scan->n_walked);
    for (;;) {
        struct head head;
        size_t n_new = n - scan->n_walked;

        if (scan->n_skip > 0) {
            size_t n_step = n_new < scan->n_skip ? n_new : scan->n_skip;

            scan->n_walked += n_step;
            scan->n_skip -= n_step;
            if (scan->n_skip > 0)
                return FRAME_E_MORE;
            continue;
        }
        if (scan->n_values > 0 && scan->depth == 0) {
            *ret_n = scan->n_walked;
            return 0;
        }
        if (n_new == 0)
            return FRAME_E_MORE;
        head = read_head((const unsigned char *)bytes + scan->n_walked, n_new);
        if (n_new < head.n_bytes && n >= scan->bytes_max)
            return report_error(report, FRAME_E_BAD, "the message has more than %zu bytes, the limit is %zu", n,
                                scan->bytes_max);
        if (n_new < head.n_bytes) {
            scan->n_head_more = head.n_bytes - 1;
            return FRAME_E_MORE;
        }
        e = take_head(scan, &head, report);
        if (e)
            return e;
    }
}

uint32_t frame_peek_id(const char *bytes, size_t n) {
    const unsigned char *p = (const unsigned char *)bytes;
    struct head head;
    uint64_t id;

    if (n < 3 || p[0] != 0x94 || p[1] != 0)
        return 0;
    if (p[2] <= 0x7f)
        return p[2];
    head = read_head(p + 2, n - 2);
    if (p[2] < 0xcc || p[2] > 0xcf || n - 2 < head.n_bytes)
        return 0;
    id = big_endian(p + 3, head.n_bytes - 1);
    return id <= UINT32_MAX ? (uint32_t)id : 0;
}

/* ---- unpack ---- */

struct check {
    const char *bytes; /* the message's */
    struct report *report;
};

/* Index of the first byte that is not UTF-8, or n. */
static size_t utf8_length(const char *bytes, size_t n) {
    size_t i = 0;

    while (i < n) {
        uint64_t eight;
        uint32_t cp;
        int k;

        if (n - i >= sizeof eight) {
            memcpy(&eight, bytes + i, sizeof eight);
            if ((eight & 0x8080808080808080u) == 0) {
                i += sizeof eight;
                continue;
            }
        }
        k = utf8_decode((const unsigned char *)bytes + i, n - i, &cp);
        if (k <= 0)
            return i;
        i += (size_t)k;
    }
    return n;
}

static int check_string(const struct check *check, msgpack_object_str *string) {
    size_t i;

    if (string->size == 0) /* msgpack-c gives it no place */
        string->ptr = check->bytes;
    i = utf8_length(string->ptr, string->size);
    if (i < string->size)
        return report_error(check->report, FRAME_E_BAD,
                            "the string at byte %zu of the message is not UTF-8: its byte %zu is 0x%02x",
                            (size_t)(string->ptr - check->bytes), i, (unsigned char)string->ptr[i]);
    return 0;
}

static int compare_keys(const void *a, const void *b) {
    const msgpack_object_str *x = &(*(const msgpack_object_kv *const *)a)->key.via.str;
    const msgpack_object_str *y = &(*(const msgpack_object_kv *const *)b)->key.via.str;

    if (x->size != y->size)
        return x->size < y->size ? -1 : 1;
    return memcmp(x->ptr, y->ptr, x->size);
}

static int refuse_same_key(const struct check *check, const msgpack_object_kv *pair) {
    const msgpack_object_str *key = &pair->key.via.str;

    return report_error(check->report, FRAME_E_BAD,
                        "the map with the key at byte %zu of the message has \"%.*s\" twice",
                        (size_t)(key->ptr - check->bytes), key->size < 80 ? (int)key->size : 80, key->ptr);
}

static int check_unique(const struct check *check, const msgpack_object_map *map) {
    const msgpack_object_kv **order;
    int e = 0;

    if (map->size < SORT_MIN) {
        for (uint32_t i = 1; i < map->size; i++)
            for (uint32_t k = 0; k < i; k++)
                if (compare_keys(&(const msgpack_object_kv *){&map->ptr[i]},
                                 &(const msgpack_object_kv *){&map->ptr[k]}) == 0)
                    return refuse_same_key(check, &map->ptr[i]);
        return 0;
    }
    order = malloc(map->size * sizeof(*order));
    if (!order)
        return -ENOMEM;
    for (uint32_t i = 0; i < map->size; i++)
        order[i] = &map->ptr[i];
    qsort(order, map->size, sizeof(*order), compare_keys);
    for (uint32_t i = 1; i < map->size && e == 0; i++)
        if (compare_keys(&order[i - 1], &order[i]) == 0)
            e = refuse_same_key(check, order[i] > order[i - 1] ? order[i] : order[i - 1]);
    free(order);
    return e;
}

static int check_value(const struct check *check, msgpack_object *value);

static int check_map(const struct check *check, msgpack_object_map *map) {
    int e;

    for (uint32_t i = 0; i < map->size; i++) {
        msgpack_object *key = &map->ptr[i].key;

        if (key->type != MSGPACK_OBJECT_STR)
            return report_error(check->report, FRAME_E_BAD,
                                "key %u of a map with %u keys is no string; all keys are strings, also numbers as "
                                "\"123\"",
                                i, map->size);
        e = check_string(check, &key->via.str);
        if (!e)
            e = check_value(check, &map->ptr[i].val);
        if (e)
            return e;
    }
    return check_unique(check, map);
}

static int check_value(const struct check *check, msgpack_object *value) { /* as deep as the scan allowed */
    int e = 0;

    if (value->type == MSGPACK_OBJECT_STR)
        return check_string(check, &value->via.str);
    if (value->type == MSGPACK_OBJECT_MAP)
        return check_map(check, &value->via.map);
    if (value->type == MSGPACK_OBJECT_ARRAY)
        for (uint32_t i = 0; i < value->via.array.size && e == 0; i++)
            e = check_value(check, &value->via.array.ptr[i]);
    return e;
}

int frame_unpack(const char *bytes, size_t n, msgpack_zone *zone, msgpack_object *ret_message, struct report *report) {
    struct check check = {bytes, report};
    msgpack_object message;
    size_t n_read = 0;
    int e = msgpack_unpack(bytes, n, &n_read, zone, &message);

    if (e == MSGPACK_UNPACK_NOMEM_ERROR)
        return -ENOMEM;
    assert(e == MSGPACK_UNPACK_SUCCESS && n_read == n); /* or the scan let something else pass */
    e = check_value(&check, &message);
    if (e == 0)
        *ret_message = message;
    return e;
}
