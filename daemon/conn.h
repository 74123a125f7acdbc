/* conn: one client: what it sent and may not have been read yet, what it is sent and did not take yet, who it is.
 * Decodes requests, answers those that the table or the rights refuse, and hands on the rest. Knows no model.
 *
 *     OPEN --client ended, bad message, conn_close(), too slow--> LINGER --all sent, or linger_ms--> CLOSING --> freed
 *
 * What is waited for is bounded on both sides. Input: the socket is not read while requests_max requests are unanswered
 * or the output is above its high-water mark, and buffers of half messages share input_bytes_max. Output: above the
 * high-water mark conn_is_congested() says so, and whoever produces should park until on_drained; a client that takes
 * nothing meanwhile is reported by on_slow, then closed.
 *
 * Callbacks come from the loop, never from inside a function of this file. A conn is good until on_close returns. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "proto.h"

struct conn;
struct request;
struct wire_out;

struct conn_limits {
    size_t frame_bytes;         /* of one message */
    size_t input_bytes_max;     /* of all connections together: half messages beyond their first 64 KiB */
    size_t output_low_bytes;    /* of one connection: on_drained */
    size_t output_high_bytes;   /* conn_is_congested(); above the low mark */
    size_t output_bytes_max;    /* the connection is closed; far above the high mark */
    uint32_t requests_max;      /* of one connection, without an answer */
    int64_t slow_timeout_ms;    /* above the high mark, for taking high - low bytes; once more and it is closed */
    int64_t message_timeout_ms; /* from a message's first byte to its last, while the socket is read */
    int64_t linger_ms;          /* for taking the last bytes */
};

struct conn_callbacks {
    void *user;
    void (*on_request)(void *user, struct conn *conn, struct request *request); /* the request is the callee's */
    void (*on_error)(void *user, enum proto_code code); /* an error was answered before a method was called */
    void (*on_slow)(void *user, struct conn *conn);     /* once each time it is congested: give up its work */
    void (*on_drained)(void *user, struct conn *conn);  /* no longer congested */
    void (*on_close)(void *user, struct conn *conn);    /* exactly once; what is sent from now on is dropped */
};

/* Takes the bytes of one message, in order; they leave at the end of this loop turn. The wire_out is empty afterwards
 * and may be used again. 0, also if the client is gone; or the wire_out's own error, and nothing was sent. */
int conn_send(struct conn *conn, struct wire_out *out);

/* conn_send() of the one response to a request that on_request delivered. If that fails the request is still
 * unanswered. */
int conn_respond(struct conn *conn, struct wire_out *out);

/* Sends what it was given, for at most linger_ms, then closes. on_close comes. */
void conn_close(struct conn *conn);

bool conn_is_congested(const struct conn *conn);
size_t conn_output_bytes(const struct conn *conn); /* not taken by the client yet */

void conn_set_user(struct conn *conn, void *user); /* NULL before */
void *conn_user(const struct conn *conn);
uint64_t conn_serial(const struct conn *conn); /* from 1, never the same twice; for logs */
uid_t conn_uid(const struct conn *conn);       /* of the process that connected */
gid_t conn_gid(const struct conn *conn);
pid_t conn_pid(const struct conn *conn);
bool conn_is_admin(const struct conn *conn); /* uid 0 or the daemon's own */
