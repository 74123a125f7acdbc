#include "conn_internal.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "proto.h"

enum {
    DELIVER_MAX = 32, /* messages of one connection in one turn: the others have their turn, too */
    ROOM_MIN = 1024,
};

/* ---- the buffer ---- */

static size_t counted(size_t n_room) { /* of it, what input_bytes_max counts */
    return n_room > CONN_INPUT_BYTES ? n_room - CONN_INPUT_BYTES : 0;
}

static int resize(struct conn *conn, size_t n_room) {
    size_t before = counted(conn->in_room), after = counted(n_room);
    char *in;

    if (after > before && !conn_hub_take_input(conn->hub, conn, after - before))
        return -EAGAIN;
    in = realloc(conn->in, n_room);
    if (!in) {
        if (after > before)
            conn_hub_give_input(conn->hub, conn, after - before);
        return -ENOMEM;
    }
    conn->in = in;
    conn->in_room = n_room;
    if (before > after)
        conn_hub_give_input(conn->hub, conn, before - after);
    return 0;
}

void conn_in_free(struct conn *conn) {
    size_t n = counted(conn->in_room);

    free(conn->in);
    conn->in = NULL;
    conn->in_n = conn->in_room = 0;
    link_remove(&conn->in_waiting);
    if (n > 0)
        conn_hub_give_input(conn->hub, conn, n);
}

/* Keeps the n bytes, which may lie in the buffer. */
static int keep(struct conn *conn, const char *bytes, size_t n) {
    int r = 0;

    if (n == 0) {
        conn_in_free(conn);
        return 0;
    }
    if (!conn->in)
        r = resize(conn, n > ROOM_MIN ? n : ROOM_MIN); /* not from this buffer then */
    if (r != 0)
        return r;
    assert(bytes);
    if (bytes != conn->in)
        memmove(conn->in, bytes, n);
    conn->in_n = n;
    if (conn->in_room > CONN_INPUT_BYTES && n <= CONN_INPUT_BYTES / 2)
        return resize(conn, CONN_INPUT_BYTES);
    return 0;
}

/* Room for at least one more byte. -EAGAIN: others have it, and the connection waits for them. */
static int grow(struct conn *conn) {
    size_t n_max = conn->hub->limits.frame_bytes, n_room = conn->in_room * 2;
    int r;

    if (n_room > n_max && conn->in_room < n_max)
        n_room = n_max;
    r = resize(conn, n_room);
    if (r == -EAGAIN && link_is_alone(&conn->in_waiting))
        link_append(&conn->hub->waiting, &conn->in_waiting);
    else if (r == 0)
        link_remove(&conn->in_waiting);
    return r;
}

/* ---- messages ---- */

static void answer(struct conn *conn, uint32_t id, enum proto_code code, const char *why) {
    struct conn_hub *hub = conn->hub;

    hub->callbacks.on_error(hub->callbacks.user, code);
    proto_error(&hub->out, id, code, why);
    if (conn_out_put(conn, &hub->out) != 0) { /* no memory for a short message: nothing can be said any more */
        conn->close_wanted = true;
        conn_hub_mark(hub, conn);
    }
}

void conn_in_refuse(struct conn *conn, uint32_t id, const char *why) {
    conn->hub->stats.n_bad_frames++;
    answer(conn, id, PROTO_BAD_FRAME, why);
    conn_end(conn);
}

/* Whether this connection may call this method now. */
static bool may_call(const struct conn *conn, const struct request *request, enum proto_code *ret_code,
                     struct report *report) {
    const struct proto_method *about = &proto_methods[request->method];

    if (!conn->hello_done && !(about->flags & METHOD_BEFORE_HELLO)) {
        report_line(report, "%s came before hello; the first request is hello {version: %d}", about->name,
                    PROTO_VERSION);
        *ret_code = PROTO_FORBIDDEN;
        return false;
    }
    if ((about->flags & METHOD_ADMIN) && !conn_is_admin(conn)) {
        report_line(report, "%s is for uid 0 and the daemon's own, %u; this connection is of uid %u", about->name,
                    (unsigned)conn->hub->uid, (unsigned)conn->uid);
        *ret_code = PROTO_FORBIDDEN;
        return false;
    }
    if (!conn->hub->is_ready && !(about->flags & METHOD_WHILE_LOADING)) {
        report_line(report, "%s has to wait: the model is still being loaded", about->name);
        *ret_code = PROTO_MODEL_NOT_READY;
        return false;
    }
    return true;
}

static void deliver(struct conn *conn, const char *bytes, size_t n) {
    struct conn_hub *hub = conn->hub;
    struct proto_refusal refusal;
    struct request *request;
    int e = proto_decode(bytes, n, &request, &refusal);

    if (e == PROTO_E_REFUSED && refusal.code == PROTO_BAD_FRAME) {
        conn_in_refuse(conn, refusal.id, refusal.report.line);
        return;
    }
    if (e < 0) {
        report_line(&refusal.report, "no memory for a request of %zu bytes", n);
        refusal.code = PROTO_INTERNAL;
    }
    if (e == 0 && !may_call(conn, request, &refusal.code, &refusal.report)) {
        request_free(request);
        e = PROTO_E_REFUSED;
    }
    if (e != 0) {
        hub->stats.n_refused++;
        answer(conn, refusal.id, refusal.code, refusal.report.line);
        return;
    }
    if (request->method == METHOD_HELLO)
        conn->hello_done = true;
    hub->stats.n_requests++;
    conn->n_unanswered++;
    hub->callbacks.on_request(hub->callbacks.user, conn, request);
}

/* Delivers the messages that the n bytes begin with, as long as it may. Returns how many bytes they had. */
static size_t deliver_all(struct conn *conn, const char *bytes, size_t n) {
    size_t n_used = 0;
    int n_delivered = 0;

    while (conn->state == CONN_OPEN && n_used < n && !conn_is_held(conn)) {
        struct report report;
        size_t n_message;
        int e = frame_scan(&conn->scan, bytes + n_used, n - n_used, &n_message, &report);

        if (e == FRAME_E_MORE)
            break;
        if (e == FRAME_E_BAD) {
            conn_in_refuse(conn, frame_peek_id(bytes + n_used, n - n_used), report.line);
            break;
        }
        frame_scan_init(&conn->scan, conn->hub->limits.frame_bytes);
        deliver(conn, bytes + n_used, n_message);
        n_used += n_message;
        if (++n_delivered == DELIVER_MAX) {
            conn->turn_is_over = true;
            conn_hub_mark(conn->hub, conn);
        }
    }
    return n_used;
}

/* The n bytes are all there is, in the buffer or not. */
static void take_bytes(struct conn *conn, const char *bytes, size_t n) {
    size_t n_used = deliver_all(conn, bytes, n);
    uint32_t id;
    int r;

    if (conn->state != CONN_OPEN) /* the buffer is gone */
        return;
    if (n_used > 0 || conn->message_since_ms == 0)
        conn->message_since_ms = uv_now(conn->hub->loop);
    id = frame_peek_id(bytes + n_used, n - n_used);
    if (n_used > 0) /* at the end of a turn, others may have acted before: they act on this in the next one */
        conn_hub_mark(conn->hub, conn);
    r = keep(conn, bytes + n_used, n - n_used); /* the bytes may be elsewhere now */
    if (r == 0 && conn->in_n == 0)
        conn->message_since_ms = 0;
    else if (r == 0 && conn->in_n == conn->in_room && !conn_is_held(conn))
        r = grow(conn);
    if (r < 0 && r != -EAGAIN) {
        answer(conn, id, PROTO_INTERNAL, "no memory for this message");
        conn_end(conn);
        return;
    }
    if (conn->in_n > 0 || conn_is_held(conn))
        conn_hub_watch_time(conn->hub);
}

void conn_in_feed(struct conn *conn) {
    if (conn->in_n > 0)
        take_bytes(conn, conn->in, conn->in_n);
}

/* ---- the socket ---- */

void conn_in_alloc(uv_handle_t *handle, size_t suggested, uv_buf_t *ret_buf) {
    struct conn *conn = handle->data;

    (void)suggested;
    if (conn->in_n == 0)
        *ret_buf = uv_buf_init(conn->hub->read_buffer, CONN_INPUT_BYTES);
    else
        *ret_buf = uv_buf_init(conn->in + conn->in_n, (unsigned)(conn->in_room - conn->in_n));
}

static void on_end_of_input(struct conn *conn) {
    struct report report;

    if (conn->in_n == 0) {
        conn_end(conn);
        return;
    }
    report_line(&report, "the connection ended inside a message, after %zu of at least %zu bytes", conn->in_n,
                frame_scan_bytes_min(&conn->scan));
    conn_in_refuse(conn, frame_peek_id(conn->in, conn->in_n), report.line);
}

void conn_in_read(uv_stream_t *stream, ssize_t n_read, const uv_buf_t *buf) {
    struct conn *conn = stream->data;

    if (n_read == 0 || conn->state != CONN_OPEN)
        return;
    if (n_read == UV_EOF)
        on_end_of_input(conn);
    else if (n_read < 0)
        conn_drop(conn);
    if (n_read < 0)
        return;
    conn->hub->stats.in_bytes += (uint64_t)n_read;
    if (conn->in_n == 0) {
        take_bytes(conn, buf->base, (size_t)n_read);
    } else {
        assert(conn->in);
        conn->in_n += (size_t)n_read;
        take_bytes(conn, conn->in, conn->in_n);
    }
    conn_in_update_reading(conn);
}

void conn_in_update_reading(struct conn *conn) {
    bool wanted = conn->state == CONN_OPEN && !conn_is_held(conn) && link_is_alone(&conn->in_waiting);

    if (wanted == conn->is_reading)
        return;
    conn->is_reading = wanted;
    if (!wanted)
        uv_read_stop((uv_stream_t *)&conn->pipe);
    else if (uv_read_start((uv_stream_t *)&conn->pipe, conn_in_alloc, conn_in_read) != 0)
        conn_drop(conn);
}
