#include "conn_internal.h"

#include <assert.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "report.h"

enum { DISCARD_READS_MAX = 4 };

/* ---- the life of a connection ---- */

static void on_handle_closed(uv_handle_t *handle) {
    struct conn *conn = handle->data;
    struct conn_hub *hub = conn->hub;

    conn_out_free(conn);
    link_remove(&conn->in_conns);
    hub->stats.n_conns--;
    free(conn);
    if (link_is_alone(&hub->conns))
        hub->on_empty(hub);
}

void conn_open(struct conn_hub *hub, int fd) {
    struct conn *conn = calloc(1, sizeof *conn);
    struct ucred peer;
    socklen_t n = sizeof peer;

    if (!conn || getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &n) != 0 || uv_pipe_init(hub->loop, &conn->pipe, 0)) {
        free(conn);
        close(fd);
        hub->stats.n_accept_errors++;
        return;
    }
    conn->pipe.data = conn;
    conn->hub = hub;
    conn->serial = ++hub->last_serial;
    conn->uid = peer.uid;
    conn->gid = peer.gid;
    conn->pid = peer.pid;
    link_init(&conn->in_marked);
    link_init(&conn->in_waiting);
    link_append(&hub->conns, &conn->in_conns);
    frame_scan_init(&conn->scan, hub->limits.frame_bytes);
    hub->stats.n_accepted++;
    hub->stats.n_conns++;
    if (uv_pipe_open(&conn->pipe, fd) != 0) {
        close(fd);
        conn_drop(conn);
        return;
    }
    conn_in_update_reading(conn);
}

void conn_end(struct conn *conn) {
    struct conn_hub *hub = conn->hub;

    if (conn->state != CONN_OPEN)
        return;
    conn->state = CONN_LINGER;
    conn->linger_until_ms = uv_now(hub->loop) + (uint64_t)hub->limits.linger_ms;
    conn_in_update_reading(conn);
    conn_in_free(conn);
    conn_hub_mark(hub, conn); /* closed there if all was sent */
    conn_hub_watch_time(hub);
    hub->callbacks.on_close(hub->callbacks.user, conn);
}

/* Unread input would make the client's next read fail instead of end, after it has read what it was sent. */
static void discard_input(struct conn *conn) {
    int fd;

    if (uv_fileno((uv_handle_t *)&conn->pipe, &fd) != 0)
        return;
    for (int i = 0; i < DISCARD_READS_MAX; i++)
        if (recv(fd, conn->hub->read_buffer, CONN_INPUT_BYTES, MSG_DONTWAIT) <= 0)
            return;
}

void conn_drop(struct conn *conn) {
    conn_end(conn);
    if (conn->state == CONN_CLOSING)
        return;
    conn->state = CONN_CLOSING;
    link_remove(&conn->in_marked);
    discard_input(conn);
    uv_close((uv_handle_t *)&conn->pipe, on_handle_closed);
}

bool conn_is_held(const struct conn *conn) {
    return conn->turn_is_over || conn->close_wanted || conn->is_congested ||
           conn->n_unanswered >= conn->hub->limits.requests_max;
}

void conn_service(struct conn *conn) {
    conn->turn_is_over = false;
    if (conn->close_wanted)
        conn_end(conn);
    conn_out_flush(conn);
    if (conn->state == CONN_OPEN && !conn_is_held(conn))
        conn_in_feed(conn);
    if (conn->state == CONN_OPEN)
        conn_in_update_reading(conn);
    if (conn->state == CONN_LINGER && conn->out_bytes == 0)
        conn_drop(conn);
}

/* ---- time ---- */

static void tick_congested(struct conn *conn, uint64_t now_ms) {
    const struct conn_limits *limits = &conn->hub->limits;
    bool took_enough = conn->gone_bytes - conn->slow_gone_bytes >= limits->output_high_bytes - limits->output_low_bytes;

    if (now_ms - conn->slow_since_ms < (uint64_t)limits->slow_timeout_ms)
        return;
    conn->slow_since_ms = now_ms;
    conn->slow_gone_bytes = conn->gone_bytes;
    if (took_enough)
        return;
    if (conn->slow_reported) {
        conn->hub->stats.n_slow_closes++;
        conn_drop(conn);
        return;
    }
    conn->slow_reported = true;
    conn->hub->callbacks.on_slow(conn->hub->callbacks.user, conn);
}

/* A socket that is not read does not tell that its client is gone. */
static bool peer_is_gone(const struct conn *conn) {
    struct pollfd pollfd = {0};

    return uv_fileno((const uv_handle_t *)&conn->pipe, &pollfd.fd) == 0 && poll(&pollfd, 1, 0) > 0 &&
           (pollfd.revents & (POLLHUP | POLLERR));
}

static void tick_half_message(struct conn *conn, uint64_t now_ms) {
    struct report report;

    if (!conn->is_reading) {
        conn->message_since_ms = now_ms; /* it is us who keep it waiting */
        return;
    }
    if (now_ms - conn->message_since_ms < (uint64_t)conn->hub->limits.message_timeout_ms)
        return;
    report_line(&report, "the message did not end within %lld ms; %zu of at least %zu bytes came",
                (long long)conn->hub->limits.message_timeout_ms, conn->in_n, frame_scan_bytes_min(&conn->scan));
    conn_in_refuse(conn, frame_peek_id(conn->in, conn->in_n), report.line);
}

bool conn_tick(struct conn *conn, uint64_t now_ms) {
    if (conn->state == CONN_LINGER && now_ms >= conn->linger_until_ms)
        conn_drop(conn);
    if (conn->state == CONN_OPEN && !conn->is_reading && peer_is_gone(conn))
        conn_drop(conn);
    if (conn->state == CONN_OPEN && conn->is_congested)
        tick_congested(conn, now_ms);
    if (conn->state == CONN_OPEN && conn->in_n > 0)
        tick_half_message(conn, now_ms);
    return conn->state == CONN_LINGER ||
           (conn->state == CONN_OPEN && (conn->is_congested || !conn->is_reading || conn->in_n > 0));
}

/* ---- for the daemon ---- */

int conn_send(struct conn *conn, struct wire_out *out) {
    if (conn->state == CONN_OPEN && !conn->close_wanted)
        return conn_out_put(conn, out);
    wire_out_clear(out);
    return 0;
}

int conn_respond(struct conn *conn, struct wire_out *out) {
    int r = conn_send(conn, out);

    if (r != 0)
        return r;
    assert(conn->n_unanswered > 0);
    if (conn->n_unanswered-- == conn->hub->limits.requests_max)
        conn_hub_mark(conn->hub, conn); /* messages may be waiting */
    return 0;
}

void conn_close(struct conn *conn) {
    conn->close_wanted = true;
    conn_hub_mark(conn->hub, conn);
}

bool conn_is_congested(const struct conn *conn) {
    return conn->is_congested;
}

size_t conn_output_bytes(const struct conn *conn) {
    return conn->out_bytes;
}

void conn_set_user(struct conn *conn, void *user) {
    conn->user = user;
}

void *conn_user(const struct conn *conn) {
    return conn->user;
}

uint64_t conn_serial(const struct conn *conn) {
    return conn->serial;
}

uid_t conn_uid(const struct conn *conn) {
    return conn->uid;
}

gid_t conn_gid(const struct conn *conn) {
    return conn->gid;
}

pid_t conn_pid(const struct conn *conn) {
    return conn->pid;
}

bool conn_is_admin(const struct conn *conn) {
    return conn->uid == 0 || conn->uid == conn->hub->uid;
}
