#include "conn_internal.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum {
    CHUNK_BYTES = 4 * 1024,
    HAND_OVER_BYTES = 16 * 1024, /* from here on a message's own memory is queued instead of a copy */
    WRITE_BYTES = 256 * 1024,    /* of one write, so that one sees how far it came */
    WRITE_BUFS = 16,
};

/* ---- chunks ---- */

static struct conn_chunk *add_chunk(struct conn *conn, char *bytes, size_t n, size_t n_room) {
    struct conn_chunk *chunk = malloc(sizeof *chunk);

    if (!chunk)
        return NULL;
    *chunk = (struct conn_chunk){.bytes = bytes, .n = n, .n_room = n_room};
    if (conn->out_last)
        conn->out_last->next = chunk;
    else
        conn->out_first = chunk;
    conn->out_last = chunk;
    return chunk;
}

static int hand_over(struct conn *conn, struct text *text) {
    if (!add_chunk(conn, text->bytes, text->n, text->n))
        return -ENOMEM;
    text->bytes = NULL;
    text->n = text->n_room = 0;
    return 0;
}

static int copy(struct conn *conn, const char *bytes, size_t n) {
    struct conn_chunk *chunk = conn->out_last;
    char *room;

    if (!chunk || chunk->n_room - chunk->n < n) {
        room = malloc(n > CHUNK_BYTES ? n : CHUNK_BYTES);
        chunk = room ? add_chunk(conn, room, 0, n > CHUNK_BYTES ? n : CHUNK_BYTES) : NULL;
        if (!chunk) {
            free(room);
            return -ENOMEM;
        }
    }
    memcpy(chunk->bytes + chunk->n, bytes, n);
    chunk->n += n;
    return 0;
}

static void free_first_chunk(struct conn *conn) {
    struct conn_chunk *chunk = conn->out_first;

    conn->out_first = chunk->next;
    if (!conn->out_first)
        conn->out_last = NULL;
    conn->out_begin = 0;
    free(chunk->bytes);
    free(chunk);
}

void conn_out_free(struct conn *conn) {
    conn->hub->stats.output_bytes -= conn->out_bytes;
    conn->out_bytes = 0;
    while (conn->out_first)
        free_first_chunk(conn);
}

/* ---- in ---- */

int conn_out_put(struct conn *conn, struct wire_out *out) {
    struct conn_hub *hub = conn->hub;
    size_t n = out->bytes.n;
    int r = out->bytes.error;

    if (r == 0 && n > 0 && n + conn->out_bytes > hub->limits.output_bytes_max) {
        hub->stats.n_slow_closes += !conn->close_wanted;
        conn->close_wanted = true;
        conn_hub_mark(hub, conn);
    } else if (r == 0 && n > 0) {
        r = n < HAND_OVER_BYTES ? copy(conn, out->bytes.bytes, n) : hand_over(conn, &out->bytes);
        if (r == 0) {
            conn->out_bytes += n;
            hub->stats.output_bytes += n;
            conn_hub_mark(hub, conn);
        }
        if (!conn->is_congested && conn->out_bytes > hub->limits.output_high_bytes) {
            conn->is_congested = true;
            conn->slow_reported = false;
            conn->slow_since_ms = uv_now(hub->loop);
            conn->slow_gone_bytes = conn->gone_bytes;
            conn_hub_watch_time(hub);
        }
    }
    wire_out_clear(out);
    return r;
}

/* ---- out ---- */

static void take(struct conn *conn, size_t n) {
    struct conn_hub *hub = conn->hub;

    conn->out_bytes -= n;
    conn->gone_bytes += n;
    hub->stats.output_bytes -= n;
    hub->stats.out_bytes += n;
    while (n > 0) {
        size_t n_left = conn->out_first->n - conn->out_begin;

        if (n < n_left) {
            conn->out_begin += n;
            break;
        }
        n -= n_left;
        free_first_chunk(conn);
    }
    if (!conn->is_congested || conn->out_bytes > hub->limits.output_low_bytes)
        return;
    conn->is_congested = false;
    conn_hub_mark(hub, conn); /* messages may be waiting */
    if (conn->state == CONN_OPEN)
        hub->callbacks.on_drained(hub->callbacks.user, conn);
}

static unsigned gather(const struct conn *conn, uv_buf_t bufs[WRITE_BUFS], size_t *ret_n_bytes) {
    const struct conn_chunk *chunk = conn->out_first;
    size_t begin = conn->out_begin, n_bytes = 0;
    unsigned n = 0;

    for (; chunk && n < WRITE_BUFS && n_bytes < WRITE_BYTES; chunk = chunk->next) {
        size_t n_chunk = chunk->n - begin;

        if (n_chunk > WRITE_BYTES - n_bytes)
            n_chunk = WRITE_BYTES - n_bytes;
        if (n_chunk > 0)
            bufs[n++] = uv_buf_init(chunk->bytes + begin, (unsigned)n_chunk);
        n_bytes += n_chunk;
        begin = 0;
    }
    *ret_n_bytes = n_bytes;
    return n;
}

static void on_written(uv_write_t *write, int status) {
    struct conn *conn = write->data;
    size_t n = conn->write_bytes;

    conn->write_bytes = 0;
    if (conn->state == CONN_CLOSING)
        return;
    if (status < 0) {
        conn_drop(conn);
        return;
    }
    take(conn, n);
    conn_hub_mark(conn->hub, conn); /* for the rest, and to see whether this was all */
}

void conn_out_flush(struct conn *conn) {
    uv_stream_t *stream = (uv_stream_t *)&conn->pipe;
    uv_buf_t bufs[WRITE_BUFS];

    while (conn->state != CONN_CLOSING && conn->out_bytes > 0 && conn->write_bytes == 0) {
        size_t n_bytes;
        unsigned n = gather(conn, bufs, &n_bytes);
        int r = uv_try_write(stream, bufs, n);

        if (r < 0 && r != UV_EAGAIN) {
            conn_drop(conn);
            return;
        }
        if (r > 0)
            take(conn, (size_t)r);
        if (r > 0 && (size_t)r == n_bytes)
            continue;
        n = gather(conn, bufs, &n_bytes);
        conn->write.data = conn;
        r = uv_write(&conn->write, stream, bufs, n, on_written);
        if (r < 0)
            conn_drop(conn);
        else
            conn->write_bytes = n_bytes;
    }
}
