/* client_internal: one connection from inside: bytes in and out, the requests that have no answer yet. For client.c and
 * call.c. */
#pragma once
#include "scan.h"
#include "spillway_client.h"

enum { CLIENT_CALLS_MAX = 1024 }; /* without an answer, on one connection */

struct bytes { /* used: [begin, end) */
    unsigned char *at;
    size_t begin, end, n_room;
};

struct call { /* a request without an answer */
    struct call *next;
    uint32_t id;
    bool is_gen, is_cancelled, is_abandoned; /* abandoned: nobody waits; its answer and events are dropped */
    uint64_t n_events;
    struct spillway_handler handler;
};

struct spillway {
    int fd;
    int status;                 /* 0, or the negative errno with which the connection was lost */
    struct spillway_error lost; /* says why, once status is not 0 */
    char path[108];
    int call_timeout_ms, silence_timeout_ms; /* negative: no limit */
    size_t frame_bytes_max;
    uint32_t last_id;
    struct call *calls; /* newest first */
    size_t n_calls;
    bool in_callback;
    bool is_deaf; /* the daemon takes no more bytes; what it said before is still to be read */
    struct bytes in, out;
    struct scan scan;             /* of the message at in.begin */
    const unsigned char *message; /* during on_done of an answer: its bytes, n_message_bytes long */
    size_t n_message_bytes;
};

/* Fills *ret_error if it is wanted. The value is `status`. */
int spillway_client_error(struct spillway_error *ret_error, int status, const char *code, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

struct call *spillway_client_find(struct spillway *client, uint32_t id); /* NULL: answered, or never was */
