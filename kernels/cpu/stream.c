/* stream: work in order, on two threads: the compute thread serves COMPUTE and AUX streams, the copy thread serves LOAD,
 * STORE and NOTIFY. Between streams nothing is ordered but by events.
 *
 * A stream is a ring of items with two counters. Recording an event notes (stream, items queued so far); a wait is an item
 * that may leave its ring once that stream's n_done has reached the noted number. So a wait means the latest record made
 * before it, later records do not move it, and neither the event nor the recording stream needs to outlive it: streams
 * live in slots whose counters go on when a slot is used again. Every item depends only on items queued before it, so a
 * full ring always drains and queuing may block on it. */
#include "device.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum {
    ITEMS_MAX = 4096, /* per stream; far more than a step queues, little memory */
    STREAMS_MAX = 64,
    COPY_SLICE = 256 * 1024, /* a long copy gives way to other streams of its thread this often */
    DELAY_US_MAX = 1000,
};

enum item_kind { ITEM_WAIT, ITEM_COPY, ITEM_NOTIFY, ITEM_PROGRAM, ITEM_CALL };

struct item {
    enum item_kind kind;
    bool delayed; /* test mode: had its delay */
    union {
        struct {
            const struct stream *stream;
            uint64_t n_done;
            uint64_t *n_late; /* NULL once it is known to be too early, or if nobody counts */
        } wait;
        struct {
            char *dst;
            const char *src;
            size_t bytes;
        } copy; /* what is left of it */
        int eventfd;
        struct {
            struct program *program;
            int part, part_end;
        } run;
        struct {
            void (*fn)(void *arg);
            void *arg;
        } call;
    };
};

struct stream {
    struct cpu_queue *queue;
    struct service *service;
    enum stream_kind kind;
    bool is_open;
    uint64_t n_queued, n_done;
    struct item *items; /* ring [ITEMS_MAX] */
};

struct event {
    struct cpu_queue *queue;
    const struct stream *stream; /* NULL: never recorded */
    uint64_t n_done;
};

struct service { /* a thread and the streams it serves */
    struct cpu_queue *queue;
    pthread_t thread;
    pthread_cond_t wake;
    bool is_started;
    int next;        /* where the search for a runnable stream begins */
    uint64_t random; /* test mode: state of the delays; 0: none */
};

enum { SERVICE_COMPUTE, SERVICE_COPY, SERVICE_N };

struct cpu_queue {
    struct device *device;
    pthread_mutex_t mutex; /* over all that follows; not held while an item runs */
    pthread_cond_t done;   /* some n_done moved */
    bool stop;
    struct service services[SERVICE_N];
    struct stream streams[STREAMS_MAX];
    struct stream *calls; /* of cpu_queue_call */
};

static uint64_t next_random(uint64_t *state) { /* xorshift64* */
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return (*state * 0x2545f4914f6cdd1du) >> 33;
}

static struct item *head_of(struct stream *stream) {
    return &stream->items[stream->n_done % ITEMS_MAX];
}

static bool is_runnable(struct stream *stream) {
    struct item *item;

    if (!stream->is_open || stream->n_done == stream->n_queued)
        return false;
    item = head_of(stream);
    if (item->kind != ITEM_WAIT || item->wait.stream->n_done >= item->wait.n_done)
        return true;
    if (item->wait.n_late)
        __atomic_fetch_add(item->wait.n_late, 1, __ATOMIC_RELAXED);
    item->wait.n_late = NULL;
    return false;
}

/* In turn; in test mode any one of the runnable streams. */
static struct stream *pick_stream(struct service *service) {
    struct stream *picked = NULL;
    uint64_t n_seen = 0;

    for (int i = 0; i < STREAMS_MAX; i++) {
        struct stream *stream = &service->queue->streams[(service->next + i) % STREAMS_MAX];

        if (stream->service != service || !is_runnable(stream))
            continue;
        n_seen++;
        if (n_seen == 1 || next_random(&service->random) % n_seen == 0)
            picked = stream;
        if (service->random == 0)
            break;
    }
    if (picked != NULL)
        service->next = (int)(picked - service->queue->streams) + 1;
    return picked;
}

static void delay(uint64_t *random) {
    uint64_t dice = next_random(random);
    struct timespec t = {.tv_nsec = (long)(dice / 4 % DELAY_US_MAX) * 1000};

    if (dice % 4 != 0)
        nanosleep(&t, NULL);
}

/* Returns whether the item is done; a long copy comes back for its next slice. */
static bool run_item(struct item *item) {
    const uint64_t one = 1;

    switch (item->kind) {
    case ITEM_WAIT:
        return true;
    case ITEM_COPY: {
        size_t bytes = item->copy.bytes < COPY_SLICE ? item->copy.bytes : COPY_SLICE;

        if (bytes > 0)
            memcpy(item->copy.dst, item->copy.src, bytes);
        item->copy.dst += bytes;
        item->copy.src += bytes;
        item->copy.bytes -= bytes;
        return item->copy.bytes == 0;
    }
    case ITEM_NOTIFY:
        while (write(item->eventfd, &one, sizeof one) < 0 && errno == EINTR)
            ; /* any other failure is a full counter, which wakes its reader just as well */
        return true;
    case ITEM_PROGRAM:
        cpu_program_replay(item->run.program, item->run.part, item->run.part_end);
        return true;
    case ITEM_CALL:
        item->call.fn(item->call.arg);
        return true;
    }
    return true;
}

static void *service_main(void *arg) {
    struct service *service = arg;
    struct cpu_queue *queue = service->queue;

    pthread_setname_np(pthread_self(), service == &queue->services[SERVICE_COMPUTE] ? "compute" : "copy");
    if (service == &queue->services[SERVICE_COMPUTE])
        cpu_workers_enter(queue->device->workers);
    pthread_mutex_lock(&queue->mutex);
    for (;;) {
        struct stream *stream = pick_stream(service);
        struct item *item;
        bool is_done;

        if (stream == NULL) {
            if (queue->stop)
                break;
            pthread_cond_wait(&service->wake, &queue->mutex);
            continue;
        }
        item = head_of(stream); /* ours until n_done moves */
        if (service->random != 0 && !item->delayed) {
            item->delayed = true;
            pthread_mutex_unlock(&queue->mutex);
            delay(&service->random);
            pthread_mutex_lock(&queue->mutex);
            continue; /* chooses again: another stream of this thread may overtake */
        }
        pthread_mutex_unlock(&queue->mutex);
        is_done = run_item(item);
        pthread_mutex_lock(&queue->mutex);
        if (is_done) {
            stream->n_done++;
            for (int i = 0; i < SERVICE_N; i++)
                if (&queue->services[i] != service)
                    pthread_cond_signal(&queue->services[i].wake);
            pthread_cond_broadcast(&queue->done);
        }
    }
    pthread_mutex_unlock(&queue->mutex);
    return NULL;
}

/* Mutex held. May wait for room. */
static void push(struct stream *stream, const struct item *item) {
    while (stream->n_queued - stream->n_done == ITEMS_MAX)
        pthread_cond_wait(&stream->queue->done, &stream->queue->mutex);
    stream->items[stream->n_queued % ITEMS_MAX] = *item;
    stream->n_queued++;
    pthread_cond_signal(&stream->service->wake);
}

static int push_locked(struct stream *stream, const struct item *item) {
    pthread_mutex_lock(&stream->queue->mutex);
    push(stream, item);
    pthread_mutex_unlock(&stream->queue->mutex);
    return 0;
}

static void drain(struct stream *stream) { /* mutex held */
    uint64_t n = stream->n_queued;

    while (stream->n_done < n)
        pthread_cond_wait(&stream->queue->done, &stream->queue->mutex);
}

/* ---- streams and events ------------------------------------------------------------------------------------------ */

static int open_slot(struct cpu_queue *queue, enum stream_kind kind, struct stream **ret_stream) {
    bool is_compute = kind == STREAM_COMPUTE || kind == STREAM_AUX;
    struct stream *stream = NULL;
    int r = -ENOMEM;

    pthread_mutex_lock(&queue->mutex);
    for (int i = 0; i < STREAMS_MAX && stream == NULL; i++)
        if (!queue->streams[i].is_open)
            stream = &queue->streams[i];
    if (stream != NULL && stream->items == NULL)
        stream->items = calloc(ITEMS_MAX, sizeof *stream->items);
    if (stream != NULL && stream->items != NULL) {
        stream->queue = queue;
        stream->service = &queue->services[is_compute ? SERVICE_COMPUTE : SERVICE_COPY];
        stream->kind = kind;
        stream->is_open = true;
        *ret_stream = stream;
        r = 0;
    }
    pthread_mutex_unlock(&queue->mutex);
    return r;
}

int cpu_stream_open(struct device *device, enum stream_kind kind, struct stream **ret_stream) {
    if (kind >= STREAM_KIND_N)
        return -EINVAL;
    return open_slot(device->queue, kind, ret_stream);
}

void cpu_stream_close(struct stream *stream) {
    if (stream == NULL)
        return;
    pthread_mutex_lock(&stream->queue->mutex);
    drain(stream);
    stream->is_open = false;
    pthread_mutex_unlock(&stream->queue->mutex);
}

int cpu_event_new(struct device *device, struct event **ret_event) {
    struct event *event = calloc(1, sizeof *event);

    if (event == NULL)
        return -ENOMEM;
    event->queue = device->queue;
    *ret_event = event;
    return 0;
}

void cpu_event_free(struct event *event) {
    free(event);
}

int cpu_event_record(struct stream *stream, struct event *event) {
    pthread_mutex_lock(&stream->queue->mutex);
    event->stream = stream;
    event->n_done = stream->n_queued;
    pthread_mutex_unlock(&stream->queue->mutex);
    return 0;
}

int cpu_event_wait(struct stream *stream, struct event *event) {
    return cpu_event_wait_counted(stream, event, NULL);
}

int cpu_event_wait_counted(struct stream *stream, struct event *event, uint64_t *n_late) {
    struct item item = {.kind = ITEM_WAIT, .wait.n_late = n_late};

    pthread_mutex_lock(&stream->queue->mutex);
    if (event->stream != NULL) {
        item.wait.stream = event->stream;
        item.wait.n_done = event->n_done;
        push(stream, &item);
    }
    pthread_mutex_unlock(&stream->queue->mutex);
    return 0;
}

/* ---- work --------------------------------------------------------------------------------------------------------- */

int cpu_copy(struct stream *stream, void *dst, const void *src, size_t bytes) {
    struct item item = {.kind = ITEM_COPY, .copy = {.dst = dst, .src = src, .bytes = bytes}};

    if (stream->kind == STREAM_NOTIFY)
        return -EINVAL;
    return push_locked(stream, &item);
}

int cpu_notify(struct stream *stream, int eventfd) {
    struct item item = {.kind = ITEM_NOTIFY, .eventfd = eventfd};

    if (eventfd < 0)
        return -EINVAL;
    return push_locked(stream, &item);
}

static int run_parts(struct stream *stream, struct program *program, int part, int part_end) {
    struct item item = {.kind = ITEM_PROGRAM, .run = {program, part, part_end}};

    if (stream->kind != STREAM_COMPUTE && stream->kind != STREAM_AUX)
        return -EINVAL;
    if (part < 0 || part >= part_end || part_end > cpu_program_n_parts(program) ||
        cpu_program_device(program) != stream->queue->device)
        return -EINVAL;
    return push_locked(stream, &item);
}

int cpu_program_run(struct stream *stream, struct program *program) {
    return run_parts(stream, program, 0, cpu_program_n_parts(program));
}

int cpu_program_run_part(struct stream *stream, struct program *program, int part) {
    return run_parts(stream, program, part, part + 1);
}

void cpu_queue_call(struct cpu_queue *queue, void (*fn)(void *arg), void *arg) {
    struct item item = {.kind = ITEM_CALL, .delayed = true, .call = {.fn = fn, .arg = arg}};

    pthread_mutex_lock(&queue->mutex);
    push(queue->calls, &item);
    drain(queue->calls);
    pthread_mutex_unlock(&queue->mutex);
}

/* ---- the two threads ---------------------------------------------------------------------------------------------- */

int cpu_queue_new(struct device *device, uint64_t delay_seed, struct cpu_queue **ret_queue) {
    struct cpu_queue *queue = calloc(1, sizeof *queue);
    int r;

    if (queue == NULL)
        return -ENOMEM;
    queue->device = device;
    pthread_mutex_init(&queue->mutex, NULL);
    pthread_cond_init(&queue->done, NULL);
    for (int i = 0; i < SERVICE_N; i++) {
        queue->services[i].queue = queue;
        queue->services[i].random = delay_seed == 0 ? 0 : (delay_seed ^ (0x9e3779b97f4a7c15u * (uint64_t)(i + 1))) | 1;
        pthread_cond_init(&queue->services[i].wake, NULL);
    }
    r = open_slot(queue, STREAM_COMPUTE, &queue->calls);
    for (int i = 0; r == 0 && i < SERVICE_N; i++) {
        r = -pthread_create(&queue->services[i].thread, NULL, service_main, &queue->services[i]);
        queue->services[i].is_started = r == 0;
    }
    if (r != 0) {
        cpu_queue_free(queue);
        return r;
    }
    *ret_queue = queue;
    return 0;
}

void cpu_queue_free(struct cpu_queue *queue) {
    if (queue == NULL)
        return;
    pthread_mutex_lock(&queue->mutex);
    for (int i = 0; i < STREAMS_MAX; i++)
        assert(!queue->streams[i].is_open || &queue->streams[i] == queue->calls); /* else its work may still run */
    queue->stop = true;
    for (int i = 0; i < SERVICE_N; i++)
        pthread_cond_signal(&queue->services[i].wake);
    pthread_mutex_unlock(&queue->mutex);
    for (int i = 0; i < SERVICE_N; i++) {
        if (queue->services[i].is_started)
            pthread_join(queue->services[i].thread, NULL);
        pthread_cond_destroy(&queue->services[i].wake);
    }
    for (int i = 0; i < STREAMS_MAX; i++)
        free(queue->streams[i].items);
    pthread_cond_destroy(&queue->done);
    pthread_mutex_destroy(&queue->mutex);
    free(queue);
}
