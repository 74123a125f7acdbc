#include "convoy.h"

#include <errno.h>
#include <sys/eventfd.h>
#include <unistd.h>

int convoy_open(struct convoy *c, struct rig *rig, const struct convoy_options *options) {
    int r;

    *c = (struct convoy){.rig = rig, .options = *options};
    c->fd = eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
    r = c->fd < 0 ? -errno : rig->backend->stream_open(rig->device, STREAM_NOTIFY, &c->notify);
    for (int i = 0; r == 0 && i < CONVOY_BATCHES_MAX; i++)
        r = rig->backend->event_new(rig->device, &c->events[i]);
    return r;
}

void convoy_close(struct convoy *c) {
    for (int i = 0; i < CONVOY_BATCHES_MAX; i++)
        if (c->events[i])
            c->rig->backend->event_free(c->events[i]);
    if (c->notify) {
        backend_stream_wait(c->rig->backend, c->notify);
        c->rig->backend->stream_close(c->notify);
    }
    if (c->fd >= 0)
        close(c->fd);
    *c = (struct convoy){.fd = -1};
}

static struct stream *stream_of(const struct convoy *c) {
    return c->options.direction == KV_COPY_FETCH ? c->rig->load : c->rig->store;
}

static int send_batch(struct convoy *c, int first, int n, struct event *event) {
    const struct convoy_options *o = &c->options;
    const struct backend *backend = c->rig->backend;
    struct stream *stream = stream_of(c);
    int r = 0;

    for (int i = first; r == 0 && i < first + n; i++) {
        char *device = o->device + (size_t)i * o->page_bytes, *host = o->host + (size_t)i * o->page_bytes;

        r = o->direction == KV_COPY_FETCH ? backend->copy(stream, device, host, o->page_bytes)
                                          : backend->copy(stream, host, device, o->page_bytes);
    }
    if (r == 0)
        r = backend->event_record(stream, event);
    if (r == 0)
        r = backend->event_wait(c->notify, event);
    return r == 0 ? backend->notify(c->notify, c->fd) : r;
}

static int await_batch(struct convoy *c) {
    eventfd_t one;

    while (eventfd_read(c->fd, &one) != 0)
        if (errno != EINTR)
            return -errno;
    return 0;
}

/* Until all pages went once, or without end until it is stopped. */
static int go(struct convoy *c, bool is_endless) {
    const struct convoy_options *o = &c->options;
    int n_out = 0, at = 0, r = 0;
    uint64_t n_sent = 0;

    while (r == 0 && !atomic_load(&c->stop)) {
        int n = min_int(KV_COPIES_MAX, o->n_pages - at);

        if (n == 0 && !is_endless)
            break;
        if (n == 0) {
            at = 0;
            continue;
        }
        if (n_out == o->n_batches) {
            r = await_batch(c);
            n_out--;
        }
        if (r == 0)
            r = send_batch(c, at, n, c->events[n_sent++ % CONVOY_BATCHES_MAX]);
        n_out += r == 0;
        at += n;
        c->bytes += r == 0 ? (double)n * (double)o->page_bytes : 0;
    }
    for (; r == 0 && n_out > 0; n_out--)
        r = await_batch(c);
    return r;
}

int convoy_run(struct convoy *c, double *ret_seconds) {
    double start = bench_now();
    int r = go(c, false);

    *ret_seconds = bench_now() - start;
    return r;
}

static void *run_endless(void *arg) {
    struct convoy *c = arg;
    double start = bench_now();

    c->result = go(c, true);
    c->seconds += bench_now() - start;
    return NULL;
}

int convoy_start(struct convoy *c) {
    atomic_store(&c->stop, false);
    return -pthread_create(&c->thread, NULL, run_endless, c);
}

int convoy_stop(struct convoy *c) {
    atomic_store(&c->stop, true);
    pthread_join(c->thread, NULL);
    return c->result;
}
