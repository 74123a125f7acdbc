#include "device_thread.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { RING = 64 }; /* a power of two above all that may be out, and the end mark */

struct command { /* one of them; both NULL: the end */
    struct device_work *work;
    struct kv_copy_batch *batch;
};

struct device_thread {
    const struct backend *backend;
    struct stream *compute, *notify;
    struct stream *copy[KV_COPY_DIRECTION_N], *copied_notify[KV_COPY_DIRECTION_N];
    struct event *done[DEVICE_PLANS_MAX], *copied[DEVICE_BATCHES_MAX];
    struct event *arrived; /* recorded and waited for anew for each piece of a restore */
    int done_fd, copied_fd[KV_COPY_DIRECTION_N];
    struct command ring[RING]; /* one producer, one consumer */
    uint64_t n_submitted;      /* of the producer */
    sem_t n_waiting;           /* orders the ring's entries too */
    pthread_t thread;
    bool is_running;
};

static int enqueue_copies(struct device_thread *t, const struct device_copies *copies) {
    int r = 0;

    for (int i = 0; r == 0 && i < copies->n; i++)
        r = t->backend->copy(t->compute, copies->copies[i].dst, copies->copies[i].src, copies->copies[i].bytes);
    return r;
}

/* ---- restores ------------------------------------------------------------------------------------------------------- */

struct piece {         /* of a restore */
    int begin, end;    /* copies */
    int part, n_parts; /* of each */
};

/* On the load stream, and compute waits for it. A copy that fails is the restore's error; what was enqueued before it is
 * waited for all the same. */
static int bring(struct device_thread *t, struct device_restore *restore, struct piece piece) {
    int r;

    for (int i = piece.begin; restore->error == 0 && i < piece.end; i++) {
        const struct device_copy *copy = &restore->copies.copies[i];
        size_t bytes = copy->bytes / (size_t)piece.n_parts, at = (size_t)piece.part * bytes;

        restore->error =
            t->backend->copy(t->copy[KV_COPY_FETCH], (char *)copy->dst + at, (const char *)copy->src + at, bytes);
    }
    r = t->backend->event_record(t->copy[KV_COPY_FETCH], t->arrived);
    return r != 0 ? r : t->backend->event_wait(t->compute, t->arrived);
}

struct layers { /* that come while the pass runs */
    struct device_thread *thread;
    struct device_restore *restore;
};

static int bring_layer(void *user, int layer) {
    struct layers *layers = user;
    struct device_restore *restore = layers->restore;

    return bring(layers->thread, restore, (struct piece){1, 1 + restore->n_pages, layer, restore->n_layers});
}

static int enqueue_with_restore(struct device_thread *t, struct device_work *work) {
    struct device_restore *restore = &work->restore;
    struct layers layers = {t, restore};
    int r;

    restore->error = 0;
    r = bring(t, restore, (struct piece){0, 1, 0, 1});
    if (r == 0)
        r = t->backend->copy(t->compute, restore->live.dst, restore->live.src, restore->live.bytes);
    if (r == 0)
        r = model_pass_run(work->prefill, t->compute, work->prefill_input, &work->prefill_streamed,
                           &(struct pass_gate){bring_layer, &layers});
    return r != 0 ? r : bring(t, restore, (struct piece){1 + restore->n_pages, restore->copies.n, 0, 1});
}

/* ---- plans and batches ---------------------------------------------------------------------------------------------- */

static int enqueue(struct device_thread *t, struct device_work *work) {
    int r = enqueue_copies(t, &work->before);

    if (r == 0 && work->moves_pages_out)
        r = streamer_follow(work->streamer, t->compute);
    if (r == 0 && work->restore.copies.n > 0)
        r = enqueue_with_restore(t, work);
    else if (r == 0 && work->prefill)
        r = model_pass_run(work->prefill, t->compute, work->prefill_input, &work->prefill_streamed, NULL);
    if (r == 0 && work->rerun)
        r = model_pass_run(work->rerun, t->compute, work->rerun_input, &work->rerun_streamed, NULL);
    if (r == 0)
        r = enqueue_copies(t, &work->between);
    if (r == 0 && work->cycle)
        r = model_pass_run_cycle(work->cycle, t->compute, work->cycle_list, &work->cycle_streamed);
    return r;
}

/* A notify stream waits for the other one and signals; nothing else ever runs there, and each has its own, so that no
 * signal waits behind another's work. If it cannot, the device is lost, and the loop must hear of it all the same. */
static void enqueue_signal(struct device_thread *t, struct stream *stream, struct stream *notify, struct event *event,
                           int fd, int *error) {
    int r = t->backend->event_record(stream, event);

    if (r == 0)
        r = t->backend->event_wait(notify, event);
    if (r == 0)
        r = t->backend->notify(notify, fd);
    if (r != 0) {
        *error = r;
        eventfd_write(fd, 1);
    }
}

static int enqueue_batch(struct device_thread *t, const struct kv_copy_batch *batch) {
    int r = 0;

    for (int i = 0; r == 0 && i < batch->n; i++)
        r = t->backend->copy(t->copy[batch->direction], batch->transfers[i].dst, batch->transfers[i].src,
                             batch->transfers[i].bytes);
    return r;
}

static void *run(void *arg) {
    struct device_thread *t = arg;
    uint64_t n_works = 0, n_batches = 0;

    pthread_setname_np(pthread_self(), "device");
    for (uint64_t n = 0;; n++) {
        struct command command;

        while (sem_wait(&t->n_waiting) != 0)
            assert(errno == EINTR);
        command = t->ring[n % RING];
        if (command.work) {
            struct device_work *work = command.work;

            work->error = enqueue(t, work);
            enqueue_signal(t, t->compute, t->notify, t->done[n_works++ % DEVICE_PLANS_MAX], t->done_fd, &work->error);
        } else if (command.batch) {
            struct kv_copy_batch *batch = command.batch;

            batch->result = enqueue_batch(t, batch);
            enqueue_signal(t, t->copy[batch->direction], t->copied_notify[batch->direction],
                           t->copied[n_batches++ % DEVICE_BATCHES_MAX], t->copied_fd[batch->direction], &batch->result);
        } else {
            return NULL;
        }
    }
}

static void push(struct device_thread *t, struct command command) {
    t->ring[t->n_submitted++ % RING] = command;
    sem_post(&t->n_waiting);
}

static int open_streams(struct device_thread *t, struct device *device) {
    int r = t->backend->stream_open(device, STREAM_COMPUTE, &t->compute);

    if (r == 0)
        r = t->backend->stream_open(device, STREAM_NOTIFY, &t->notify);
    if (r == 0)
        r = t->backend->stream_open(device, STREAM_STORE, &t->copy[KV_COPY_SPILL]);
    if (r == 0)
        r = t->backend->stream_open(device, STREAM_LOAD, &t->copy[KV_COPY_FETCH]);
    for (int i = 0; r == 0 && i < KV_COPY_DIRECTION_N; i++)
        r = t->backend->stream_open(device, STREAM_NOTIFY, &t->copied_notify[i]);
    for (int i = 0; r == 0 && i < DEVICE_PLANS_MAX; i++)
        r = t->backend->event_new(device, &t->done[i]);
    for (int i = 0; r == 0 && i < DEVICE_BATCHES_MAX; i++)
        r = t->backend->event_new(device, &t->copied[i]);
    if (r == 0)
        r = t->backend->event_new(device, &t->arrived);
    return r;
}

static int open_fd(int *ret_fd) {
    *ret_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    return *ret_fd < 0 ? -errno : 0;
}

int device_thread_start(const struct backend *backend, struct device *device, struct device_thread **ret_thread) {
    struct device_thread *t = calloc(1, sizeof *t);
    int r;

    if (!t)
        return -ENOMEM;
    t->backend = backend;
    t->done_fd = -1;
    for (int i = 0; i < KV_COPY_DIRECTION_N; i++)
        t->copied_fd[i] = -1;
    sem_init(&t->n_waiting, 0, 0);
    r = open_fd(&t->done_fd);
    for (int i = 0; r == 0 && i < KV_COPY_DIRECTION_N; i++)
        r = open_fd(&t->copied_fd[i]);
    if (r == 0)
        r = open_streams(t, device);
    if (r == 0) {
        r = -pthread_create(&t->thread, NULL, run, t);
        t->is_running = r == 0;
    }
    if (r != 0) {
        device_thread_stop(t);
        return r;
    }
    *ret_thread = t;
    return 0;
}

void device_thread_stop(struct device_thread *t) {
    if (!t)
        return;
    if (t->is_running) {
        push(t, (struct command){0});
        pthread_join(t->thread, NULL);
        backend_stream_wait(t->backend, t->notify);
        for (int i = 0; i < KV_COPY_DIRECTION_N; i++)
            backend_stream_wait(t->backend, t->copied_notify[i]);
    }
    for (int i = 0; i < DEVICE_PLANS_MAX; i++)
        if (t->done[i])
            t->backend->event_free(t->done[i]);
    for (int i = 0; i < DEVICE_BATCHES_MAX; i++)
        if (t->copied[i])
            t->backend->event_free(t->copied[i]);
    if (t->arrived)
        t->backend->event_free(t->arrived);
    for (int i = 0; i < KV_COPY_DIRECTION_N; i++) {
        if (t->copied_notify[i])
            t->backend->stream_close(t->copied_notify[i]);
        if (t->copy[i])
            t->backend->stream_close(t->copy[i]);
    }
    if (t->notify)
        t->backend->stream_close(t->notify);
    if (t->compute)
        t->backend->stream_close(t->compute);
    if (t->done_fd >= 0)
        close(t->done_fd);
    for (int i = 0; i < KV_COPY_DIRECTION_N; i++)
        if (t->copied_fd[i] >= 0)
            close(t->copied_fd[i]);
    sem_destroy(&t->n_waiting);
    free(t);
}

int device_thread_done_fd(const struct device_thread *t) {
    return t->done_fd;
}

int device_thread_copied_fd(const struct device_thread *t, enum kv_copy_direction direction) {
    return t->copied_fd[direction];
}

void device_thread_submit(struct device_thread *t, struct device_work *work) {
    push(t, (struct command){.work = work});
}

void device_thread_copy(struct device_thread *t, struct kv_copy_batch *batch) {
    push(t, (struct command){.batch = batch});
}
