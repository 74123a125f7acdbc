#include "scan.h"

#include <stdbool.h>

/* What the first bytes of an object announce. */
struct head {
    size_t n_header;  /* bytes before the payload */
    uint64_t n_bytes; /* of payload */
    uint64_t n_children;
    bool is_container, is_string;
};

static uint64_t big_endian(const unsigned char *bytes, size_t n) {
    uint64_t u = 0;

    for (size_t i = 0; i < n; i++)
        u = u << 8 | bytes[i];
    return u;
}

/* The forms 0xC0..0xDF, by their table in the msgpack specification. */
static int read_long_head(const unsigned char *bytes, size_t n_bytes, struct head *ret) {
    /* bytes of the length or count field */
    static const unsigned char n_field[32] = {
        [0x04] = 1, [0x05] = 2, [0x06] = 4, [0x07] = 1, [0x08] = 2, [0x09] = 4, [0x19] = 1,
        [0x1A] = 2, [0x1B] = 4, [0x1C] = 2, [0x1D] = 4, [0x1E] = 2, [0x1F] = 4,
    };
    static const unsigned char n_fixed[32] = {
        [0x0A] = 4, [0x0B] = 8, [0x0C] = 1, [0x0D] = 2, [0x0E] = 4, [0x0F] = 8, [0x10] = 1, /* floats, integers */
        [0x11] = 2, [0x12] = 4, [0x13] = 8, [0x14] = 2, [0x15] = 3, [0x16] = 5, [0x17] = 9, [0x18] = 17,
    };
    unsigned form = bytes[0] - 0xC0u;
    uint64_t field;

    if (form == 1) /* 0xC1 is never used */
        return SCAN_E_BAD;
    *ret = (struct head){.n_header = 1u + n_field[form], .n_bytes = n_fixed[form]};
    if (n_bytes < ret->n_header)
        return SCAN_E_MORE;
    field = big_endian(bytes + 1, n_field[form]);
    if (form >= 0x1C) {
        ret->is_container = true;
        ret->n_children = form >= 0x1E ? 2 * field : field;
    } else if (n_field[form] > 0) {
        ret->is_string = form >= 0x19;
        ret->n_bytes = field + (form >= 0x07 && form <= 0x09); /* an extension has a type byte as well */
    }
    return 0;
}

static int read_head(const unsigned char *bytes, size_t n_bytes, struct head *ret) {
    unsigned char first;

    if (n_bytes == 0)
        return SCAN_E_MORE;
    first = bytes[0];
    *ret = (struct head){.n_header = 1};
    if (first < 0x80 || first >= 0xE0) /* small integer */
        return 0;
    if (first >= 0xC0)
        return read_long_head(bytes, n_bytes, ret);
    if (first >= 0xA0) {
        ret->n_bytes = first & 0x1F;
        ret->is_string = true;
        return 0;
    }
    ret->is_container = true;
    ret->n_children = first >= 0x90 ? first & 0x0F : 2 * (first & 0x0F);
    return 0;
}

static bool is_utf8(const unsigned char *s, size_t n) {
    while (n > 0) {
        unsigned n_more, low = 0x80, high = 0xBF;

        if (*s < 0x80)
            n_more = 0;
        else if (*s >= 0xC2 && *s <= 0xDF)
            n_more = 1;
        else if ((*s & 0xF0) == 0xE0)
            n_more = 2;
        else if (*s >= 0xF0 && *s <= 0xF4)
            n_more = 3;
        else
            return false;
        if (n <= n_more)
            return false;
        if (*s == 0xE0) /* shorter forms exist */
            low = 0xA0;
        else if (*s == 0xED) /* surrogates */
            high = 0x9F;
        else if (*s == 0xF0)
            low = 0x90;
        else if (*s == 0xF4) /* above U+10FFFF */
            high = 0x8F;
        for (unsigned i = 1; i <= n_more; i++) {
            if (s[i] < low || s[i] > high)
                return false;
            low = 0x80;
            high = 0xBF;
        }
        s += n_more + 1;
        n -= n_more + 1;
    }
    return true;
}

void spillway_scan_begin(struct scan *scan, size_t n_bytes_max) {
    *scan = (struct scan){.n_bytes_max = n_bytes_max, .n_objects = 1};
}

/* One object is complete: closes the containers that end with it. True: it was the message itself. */
static bool close_object(struct scan *scan) {
    while (scan->depth > 0) {
        if (--scan->open[scan->depth - 1] > 0)
            return false;
        scan->depth--;
    }
    return true;
}

int spillway_scan_step(struct scan *scan, const unsigned char *bytes, size_t n_bytes, size_t *ret_n_bytes) {
    for (;;) {
        struct head head;
        size_t n_left = n_bytes - scan->n_done;
        int r = read_head(bytes + scan->n_done, n_left, &head);

        if (r == SCAN_E_MORE && n_bytes >= scan->n_bytes_max)
            return SCAN_E_LIMIT;
        if (r != 0)
            return r;
        if (scan->n_done + head.n_header + head.n_bytes > scan->n_bytes_max ||
            head.n_children > SCAN_OBJECTS_MAX - scan->n_objects)
            return SCAN_E_LIMIT;
        if (head.n_header + head.n_bytes > n_left)
            return SCAN_E_MORE;
        if (head.is_string && !is_utf8(bytes + scan->n_done + head.n_header, head.n_bytes))
            return SCAN_E_BAD;
        scan->n_done += head.n_header + head.n_bytes;
        scan->n_objects += head.n_children;
        if (head.is_container) {
            if (scan->depth == SCAN_DEPTH_MAX)
                return SCAN_E_LIMIT;
            if (head.n_children > 0) {
                scan->open[scan->depth++] = head.n_children;
                continue;
            }
        }
        if (close_object(scan)) {
            *ret_n_bytes = scan->n_done;
            return 0;
        }
    }
}
