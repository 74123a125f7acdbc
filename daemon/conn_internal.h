/* conn_internal: what the connections of one server share, and the inside of a connection. */
#pragma once
#include <uv.h>

#include "conn.h"
#include "frame.h"
#include "server.h"
#include "wire.h"

enum { CONN_INPUT_BYTES = 64 * 1024 }; /* of one read, and of a half message that no limit counts */

/* An element of a ring with a head; one that is in no ring points to itself. */
struct link {
    struct link *prev, *next;
};

static inline void link_init(struct link *link) {
    link->prev = link->next = link;
}
static inline bool link_is_alone(const struct link *link) {
    return link->next == link;
}
static inline void link_remove(struct link *link) {
    link->prev->next = link->next;
    link->next->prev = link->prev;
    link_init(link);
}
static inline void link_append(struct link *head, struct link *link) {
    link->prev = head->prev;
    link->next = head;
    head->prev->next = link;
    head->prev = link;
}

/* conn_hub: serves marked connections once per loop turn, looks after timeouts while there are any, and shares the
 * memory for large half messages. */
struct conn_hub {
    uv_loop_t *loop;
    struct conn_limits limits;
    struct conn_callbacks callbacks;
    bool is_ready; /* there is a model */
    uid_t uid;     /* the daemon's */

    /* A turn ends in `prepare`, before the loop waits. Who is marked later than that, or by another prepare callback,
     * must not wait as long as the loop does: while one is marked `idle` keeps the loop from waiting. */
    uv_prepare_t prepare;
    uv_idle_t idle;
    uv_timer_t tick; /* runs while a connection waits for something that has a timeout */

    struct link conns, marked; /* struct conn.in_conns, .in_marked */

    /* Half messages beyond CONN_INPUT_BYTES take from input_bytes_max in pieces. So that holders cannot wait for each
     * other, one at a time may go beyond the limit; its message ends, or its timeout ends it. */
    struct link waiting;   /* struct conn.in_waiting */
    size_t input_bytes;    /* taken */
    struct conn *favoured; /* NULL: nobody goes beyond */

    char *read_buffer;   /* [CONN_INPUT_BYTES]; nothing stays in it */
    struct wire_out out; /* for answers of our own */
    struct server_stats stats;
    uint64_t last_serial;
    int n_handles;                          /* prepare, idle, tick: not closed yet */
    void (*on_empty)(struct conn_hub *hub); /* the last connection was freed */
    void (*on_closed)(struct conn_hub *hub);
};

int conn_hub_init(struct conn_hub *hub, uv_loop_t *loop, const struct server_options *options);
/* After the last connection was freed. on_closed comes; the memory must stay until then. */
void conn_hub_close(struct conn_hub *hub);
void conn_hub_mark(struct conn_hub *hub, struct conn *conn); /* conn_service() at the end of this turn */
void conn_hub_watch_time(struct conn_hub *hub);              /* conn_tick() for all, while one asks for it */
bool conn_hub_take_input(struct conn_hub *hub, struct conn *conn, size_t n_bytes);
void conn_hub_give_input(struct conn_hub *hub, struct conn *conn, size_t n_bytes);

enum conn_state { CONN_OPEN, CONN_LINGER, CONN_CLOSING };

struct conn_chunk { /* of output */
    struct conn_chunk *next;
    char *bytes; /* owned; does not move while a write is out */
    size_t n, n_room;
};

struct conn {
    uv_pipe_t pipe;
    struct conn_hub *hub;
    struct link in_conns, in_marked, in_waiting;
    enum conn_state state;
    bool close_wanted;
    void *user;
    uint64_t serial;
    uid_t uid;
    gid_t gid;
    pid_t pid;

    /* requests */
    bool hello_done;
    bool turn_is_over; /* as many were delivered as one turn may */
    uint32_t n_unanswered;

    /* input */
    bool is_reading;
    struct frame_scan scan; /* of the message that the buffer begins with */
    char *in;               /* what the last read left over */
    size_t in_n, in_room;
    uint64_t message_since_ms;

    /* output */
    struct conn_chunk *out_first, *out_last;
    size_t out_begin;    /* bytes of the first chunk that are gone */
    size_t out_bytes;    /* in all chunks, not gone */
    size_t write_bytes;  /* of them in the write that is out; 0: none is */
    uint64_t gone_bytes; /* ever */
    uv_write_t write;
    bool is_congested, slow_reported;
    uint64_t slow_since_ms, slow_gone_bytes; /* of the window that is running */
    uint64_t linger_until_ms;
};

void conn_open(struct conn_hub *hub, int fd); /* takes the fd; one that fails is closed and that is all */
void conn_service(struct conn *conn);
bool conn_tick(struct conn *conn, uint64_t now_ms); /* whether it still waits for something with a timeout */

/* From the loop only. To LINGER, with on_close. */
void conn_end(struct conn *conn);
/* To CLOSING, from any state. */
void conn_drop(struct conn *conn);
bool conn_is_held(const struct conn *conn); /* no message of it may be delivered now */

/* conn_out.c. put: as conn_send, whoever asks. */
int conn_out_put(struct conn *conn, struct wire_out *out);
void conn_out_flush(struct conn *conn);
void conn_out_free(struct conn *conn);

/* conn_in.c */
void conn_in_alloc(uv_handle_t *handle, size_t suggested, uv_buf_t *ret_buf);
void conn_in_read(uv_stream_t *stream, ssize_t n_read, const uv_buf_t *buf);
void conn_in_feed(struct conn *conn);                                 /* delivers what the buffer holds */
void conn_in_update_reading(struct conn *conn);                       /* reads the socket, or not, as things stand */
void conn_in_refuse(struct conn *conn, uint32_t id, const char *why); /* BAD_FRAME, then the end */
void conn_in_free(struct conn *conn);
