/* frame: where one msgpack-RPC message ends in a run of foreign bytes, and whether it may be looked at. Knows msgpack
 * and the limits of a message, no method and no socket.
 *
 * msgpack-c allocates by the counts a message declares. So frame_scan() walks over the bytes first, allocates nothing,
 * and holds every declared count and length against what still fits into the limits. frame_unpack() hands only such a
 * message to msgpack-c and then checks what the scan cannot: strings are UTF-8, keys are strings and unique. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct report;
struct msgpack_object;
struct msgpack_zone;

enum {
    FRAME_E_MORE = 1, /* the message goes on behind these bytes */
    FRAME_E_BAD = 2,  /* no message, or one that breaks a limit; the report says which and where */
};
enum {
    FRAME_DEPTH_MAX = 16,         /* containers inside each other, the message's own array counts */
    FRAME_VALUES_MIN = 64 * 1024, /* see frame_values_max() */
    FRAME_VALUE_BYTES = 8,
};

/* Values (numbers, strings, keys, containers) of one message. msgpack-c needs 24 bytes for each, also if it is one byte
 * long: with this limit unpacking takes at most three times the largest message. */
static inline size_t frame_values_max(size_t bytes_max) {
    size_t n = bytes_max / FRAME_VALUE_BYTES;

    return n > FRAME_VALUES_MIN ? n : FRAME_VALUES_MIN;
}

/* Where the walk over one message stands. A message that comes in pieces is never walked twice. */
struct frame_scan {
    size_t bytes_max;
    size_t n_walked;    /* bytes from the message's first */
    size_t n_skip;      /* bytes of the string the walk stands in, not walked yet */
    size_t n_head_more; /* of the value that begins here, if not all of its head came: bytes after its first */
    size_t n_values;    /* begun so far */
    uint64_t n_due;     /* values that the open containers still wait for, at least a byte each */
    uint32_t depth;     /* open containers */
    uint64_t left[FRAME_DEPTH_MAX]; /* values each of them waits for */
};

void frame_scan_init(struct frame_scan *scan, size_t bytes_max); /* also for the next message */

/* `bytes` are the n bytes received since the message's first; on the next call the same ones and more. 0: the message
 * is the first *ret_n of them. After FRAME_E_BAD the scan is of no use. */
int frame_scan(struct frame_scan *scan, const char *bytes, size_t n, size_t *ret_n, struct report *report);

/* The fewest bytes that a message can have whose walk stands here. */
size_t frame_scan_bytes_min(const struct frame_scan *scan);

/* The id of the request that these bytes begin with; 0 if none can be read. For an answer to a message that is bad. */
uint32_t frame_peek_id(const char *bytes, size_t n);

/* Unpacks a message that frame_scan() measured. Strings point into `bytes`, all else lies in the zone.
 * 0, FRAME_E_BAD or -ENOMEM. */
int frame_unpack(const char *bytes, size_t n, struct msgpack_zone *zone, struct msgpack_object *ret_message,
                 struct report *report);
