#include "device_thread.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { RING = 4 }; /* a power of two above DEVICE_PLANS_MAX and the end mark */

struct device_thread {
    const struct backend *backend;
    struct stream *compute, *notify;
    struct event *done[DEVICE_PLANS_MAX];
    int done_fd;
    struct device_work *ring[RING]; /* one producer, one consumer; NULL ends the thread */
    uint64_t n_submitted;           /* of the producer */
    sem_t n_waiting;                /* orders the ring's entries too */
    pthread_t thread;
    bool is_running;
};

static int enqueue_copies(struct device_thread *t, const struct device_copies *copies) {
    int r = 0;

    for (int i = 0; r == 0 && i < copies->n; i++)
        r = t->backend->copy(t->compute, copies->copies[i].dst, copies->copies[i].src, copies->copies[i].bytes);
    return r;
}

static int enqueue(struct device_thread *t, struct device_work *work) {
    int r = enqueue_copies(t, &work->before);

    if (r == 0 && work->prefill)
        r = model_pass_run(work->prefill, t->compute, work->prefill_input);
    if (r == 0 && work->rerun)
        r = model_pass_run(work->rerun, t->compute, work->rerun_input);
    if (r == 0)
        r = enqueue_copies(t, &work->between);
    if (r == 0 && work->cycle)
        r = model_pass_run_cycle(work->cycle, t->compute, work->cycle_list);
    return r;
}

/* The notify stream waits for the compute stream and signals; nothing else ever runs there. */
static void enqueue_done(struct device_thread *t, struct event *event, struct device_work *work) {
    int r = t->backend->event_record(t->compute, event);

    if (r == 0)
        r = t->backend->event_wait(t->notify, event);
    if (r == 0)
        r = t->backend->notify(t->notify, t->done_fd);
    if (r != 0) { /* the device is lost: the loop must hear of it all the same */
        work->error = r;
        eventfd_write(t->done_fd, 1);
    }
}

static void *run(void *arg) {
    struct device_thread *t = arg;

    pthread_setname_np(pthread_self(), "device");
    for (uint64_t n = 0;; n++) {
        struct device_work *work;

        while (sem_wait(&t->n_waiting) != 0)
            assert(errno == EINTR);
        work = t->ring[n % RING];
        if (!work)
            return NULL;
        work->error = enqueue(t, work);
        enqueue_done(t, t->done[n % DEVICE_PLANS_MAX], work);
    }
}

static void push(struct device_thread *t, struct device_work *work) {
    t->ring[t->n_submitted++ % RING] = work;
    sem_post(&t->n_waiting);
}

int device_thread_start(const struct backend *backend, struct device *device, int done_fd,
                        struct device_thread **ret_thread) {
    struct device_thread *t = calloc(1, sizeof *t);
    int r;

    if (!t)
        return -ENOMEM;
    t->backend = backend;
    t->done_fd = done_fd;
    sem_init(&t->n_waiting, 0, 0);
    r = backend->stream_open(device, STREAM_COMPUTE, &t->compute);
    if (r == 0)
        r = backend->stream_open(device, STREAM_NOTIFY, &t->notify);
    for (int i = 0; r == 0 && i < DEVICE_PLANS_MAX; i++)
        r = backend->event_new(device, &t->done[i]);
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
        push(t, NULL);
        pthread_join(t->thread, NULL);
        backend_stream_wait(t->backend, t->notify);
    }
    for (int i = 0; i < DEVICE_PLANS_MAX; i++)
        if (t->done[i])
            t->backend->event_free(t->done[i]);
    if (t->notify)
        t->backend->stream_close(t->notify);
    if (t->compute)
        t->backend->stream_close(t->compute);
    sem_destroy(&t->n_waiting);
    free(t);
}

void device_thread_submit(struct device_thread *t, struct device_work *work) {
    push(t, work);
}
