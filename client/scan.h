/* scan: finds the end of one msgpack message in bytes that arrive piece by piece, and refuses what breaks a limit before
 * anything is allocated from its counts. Each byte is looked at once, however the pieces fall. Reads no meaning. */
#pragma once
#include <stddef.h>
#include <stdint.h>

enum { SCAN_DEPTH_MAX = 16 };            /* containers inside each other */
enum { SCAN_OBJECTS_MAX = 4096 * 1024 }; /* in one message; msgpack-c needs 24 to 48 bytes for each */

enum {
    SCAN_E_MORE = 1,  /* the bytes end before the message does */
    SCAN_E_LIMIT = 2, /* too long, too deep, or too many objects */
    SCAN_E_BAD = 3,   /* no msgpack, or a string that is no UTF-8 */
};

struct scan {
    uint64_t open[SCAN_DEPTH_MAX]; /* objects still to come in each open container */
    unsigned depth;
    size_t n_done;    /* bytes looked at, from the beginning of the message */
    size_t n_objects; /* begun or promised */
    size_t n_bytes_max;
};

/* Both carry the prefix of the library, whose static form shares its names with the program. */
void spillway_scan_begin(struct scan *scan, size_t n_bytes_max);

/* `bytes` is the message from its first byte, longer in each call. 0: it is whole and ends after *ret_n_bytes. */
int spillway_scan_step(struct scan *scan, const unsigned char *bytes, size_t n_bytes, size_t *ret_n_bytes);
