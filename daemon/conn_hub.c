#include "conn_internal.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#include "base.h"

enum { ANSWER_BYTES_MAX = 16 * 1024, TICK_MS_MIN = 5, TICK_MS_MAX = 1000, TICKS_PER_TIMEOUT = 4 };

static void on_idle(uv_idle_t *idle) {
    (void)idle; /* its being active is all */
}

static void on_prepare(uv_prepare_t *prepare) {
    struct conn_hub *hub = prepare->data;
    struct link now;

    uv_idle_stop(&hub->idle); /* also if those who were marked are gone */
    if (link_is_alone(&hub->marked))
        return;
    link_append(&hub->marked, &now); /* take the ring over: who is marked from here on waits for the next turn */
    link_remove(&hub->marked);
    while (!link_is_alone(&now)) {
        struct conn *conn = container_of(now.next, struct conn, in_marked);

        link_remove(&conn->in_marked);
        conn_service(conn);
    }
}

static void on_tick(uv_timer_t *timer) {
    struct conn_hub *hub = timer->data;
    uint64_t now_ms = uv_now(hub->loop);
    bool is_needed = false;
    struct link *link, *next;

    for (link = hub->conns.next; link != &hub->conns; link = next) {
        next = link->next; /* a connection leaves the ring when it is freed, which is not now */
        is_needed |= conn_tick(container_of(link, struct conn, in_conns), now_ms);
    }
    if (!is_needed)
        uv_timer_stop(timer);
}

static void on_handle_closed(uv_handle_t *handle) {
    struct conn_hub *hub = handle->data;

    if (--hub->n_handles > 0)
        return;
    free(hub->read_buffer);
    wire_out_deinit(&hub->out);
    hub->on_closed(hub);
}

int conn_hub_init(struct conn_hub *hub, uv_loop_t *loop, const struct server_options *options) {
    assert(options->limits.requests_max > 0 && options->limits.frame_bytes > 0);
    assert(options->limits.output_low_bytes < options->limits.output_high_bytes);
    assert(options->limits.output_high_bytes < options->limits.output_bytes_max);
    *hub =
        (struct conn_hub){.loop = loop, .limits = options->limits, .callbacks = options->callbacks, .uid = geteuid()};
    hub->read_buffer = malloc(CONN_INPUT_BYTES);
    if (!hub->read_buffer)
        return -ENOMEM;
    wire_out_init(&hub->out, ANSWER_BYTES_MAX);
    link_init(&hub->conns);
    link_init(&hub->marked);
    link_init(&hub->waiting);
    uv_prepare_init(loop, &hub->prepare);
    uv_idle_init(loop, &hub->idle);
    uv_timer_init(loop, &hub->tick);
    hub->prepare.data = hub->idle.data = hub->tick.data = hub;
    hub->n_handles = 3;
    uv_prepare_start(&hub->prepare, on_prepare);
    uv_unref((uv_handle_t *)&hub->prepare); /* does not keep a loop running that has nothing else to do */
    return 0;
}

void conn_hub_close(struct conn_hub *hub) {
    uv_close((uv_handle_t *)&hub->prepare, on_handle_closed);
    uv_close((uv_handle_t *)&hub->idle, on_handle_closed);
    uv_close((uv_handle_t *)&hub->tick, on_handle_closed);
}

void conn_hub_mark(struct conn_hub *hub, struct conn *conn) {
    if (conn->state == CONN_CLOSING || !link_is_alone(&conn->in_marked))
        return;
    if (link_is_alone(&hub->marked))
        uv_idle_start(&hub->idle, on_idle);
    link_append(&hub->marked, &conn->in_marked);
}

void conn_hub_watch_time(struct conn_hub *hub) {
    int64_t ms = hub->limits.slow_timeout_ms;

    if (uv_is_active((const uv_handle_t *)&hub->tick))
        return;
    if (ms > hub->limits.message_timeout_ms)
        ms = hub->limits.message_timeout_ms;
    if (ms > hub->limits.linger_ms)
        ms = hub->limits.linger_ms;
    ms /= TICKS_PER_TIMEOUT;
    ms = ms < TICK_MS_MIN ? TICK_MS_MIN : ms > TICK_MS_MAX ? TICK_MS_MAX : ms;
    uv_timer_start(&hub->tick, on_tick, (uint64_t)ms, (uint64_t)ms);
}

bool conn_hub_take_input(struct conn_hub *hub, struct conn *conn, size_t n_bytes) {
    if (hub->input_bytes + n_bytes > hub->limits.input_bytes_max) {
        if (hub->favoured && hub->favoured != conn)
            return false;
        hub->favoured = conn;
    }
    hub->input_bytes += n_bytes;
    return true;
}

void conn_hub_give_input(struct conn_hub *hub, struct conn *conn, size_t n_bytes) {
    hub->input_bytes -= n_bytes;
    if (hub->favoured == conn)
        hub->favoured = NULL;
    for (struct link *link = hub->waiting.next; link != &hub->waiting; link = link->next)
        conn_hub_mark(hub, container_of(link, struct conn, in_waiting)); /* in their order */
}
