/* server: the listening socket, and all connections that came through it. */
#pragma once
#include <stdbool.h>
#include <stdint.h>

#include "conn.h"

struct report;
struct server;
struct uv_loop_s;

enum { SERVER_E_REFUSED = 1 }; /* this socket cannot be listened on; the report says why */

struct server_options {
    const char *path;   /* of our own socket, at most 107 bytes; unused with listen_fd */
    unsigned mode;      /* its exact permissions, such as 0660 */
    int listen_fd;      /* >= 0: systemd's, listening already; the server's from now on. -1: path */
    int backlog;        /* connections that the kernel keeps while we are busy */
    uint32_t conns_max; /* more get one BUSY and are closed */
    struct conn_limits limits;
    struct conn_callbacks callbacks;
};

struct server_stats {                /* counts since the start, but for those of now */
    uint64_t n_accepted, n_rejected; /* connections; rejected: too many */
    uint64_t n_accept_errors;        /* out of descriptors or memory: accepting paused */
    uint64_t n_requests, n_refused;  /* handed on; answered with an error right here */
    uint64_t n_bad_frames, n_slow_closes;
    uint64_t in_bytes, out_bytes;
    uint32_t n_conns;                   /* now, lingering ones included */
    uint64_t input_bytes, output_bytes; /* now, in buffers */
};

/* Listens. An own path may hold a socket nobody listens on any more; it is replaced. The process must ignore SIGPIPE.
 * 0, SERVER_E_REFUSED or a negative errno. */
int server_open(struct uv_loop_s *loop, const struct server_options *options, struct server **ret_server,
                struct report *report);

/* While false, as it is first, methods that need a model are refused with MODEL_NOT_READY. */
void server_set_ready(struct server *server, bool is_ready);

/* Closes the listening socket, and removes its path if it is still ours. Connections go on. */
void server_stop_accepting(struct server *server);

/* Stops accepting and closes every connection as conn_close() does. on_closed comes when all are closed and the server
 * is freed; it may be NULL. */
void server_close(struct server *server, void (*on_closed)(void *user), void *user);

void server_read_stats(const struct server *server, struct server_stats *ret_stats);
