#include "workers.h"

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { THREADS_MAX = 8, ITEMS_MAX = 4096 };

struct ring {
    struct kv_work_item *items[ITEMS_MAX];
    uint32_t n_in, n_out;
};

struct workers {
    pthread_mutex_t mutex;
    pthread_cond_t wake;
    struct ring todo, finished;
    bool is_ending;
    uint32_t n_threads, n_items, n_to_refuse;
    int fd;
    pthread_t threads[THREADS_MAX];
};

static void need(bool claim, const char *text) {
    if (!claim) {
        fprintf(stderr, "workers: not so: %s\n", text);
        abort();
    }
}

static void put(struct ring *ring, struct kv_work_item *item) {
    need(ring->n_in - ring->n_out < ITEMS_MAX, "there is room for an item");
    ring->items[ring->n_in++ % ITEMS_MAX] = item;
}

static struct kv_work_item *get(struct ring *ring) {
    return ring->n_in == ring->n_out ? NULL : ring->items[ring->n_out++ % ITEMS_MAX];
}

static void *thread(void *argument) {
    struct workers *workers = argument;

    pthread_mutex_lock(&workers->mutex);
    for (;;) {
        struct kv_work_item *item = get(&workers->todo);

        if (item == NULL && workers->is_ending)
            break;
        if (item == NULL) {
            pthread_cond_wait(&workers->wake, &workers->mutex);
            continue;
        }
        pthread_mutex_unlock(&workers->mutex);
        item->run(item);
        pthread_mutex_lock(&workers->mutex);
        put(&workers->finished, item);
        need(eventfd_write(workers->fd, 1) == 0, "who waits is woken");
    }
    pthread_mutex_unlock(&workers->mutex);
    return NULL;
}

struct workers *workers_new(uint32_t n_threads) {
    struct workers *workers = calloc(1, sizeof(*workers));

    need(workers != NULL && n_threads <= THREADS_MAX, "workers can be made");
    pthread_mutex_init(&workers->mutex, NULL);
    pthread_cond_init(&workers->wake, NULL);
    workers->fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    need(workers->fd >= 0, "there is an eventfd");
    for (; workers->n_threads < n_threads; workers->n_threads++)
        need(pthread_create(&workers->threads[workers->n_threads], NULL, thread, workers) == 0, "a thread starts");
    return workers;
}

void workers_free(struct workers *workers) {
    need(workers->n_items == 0, "nothing is out");
    pthread_mutex_lock(&workers->mutex);
    workers->is_ending = true;
    pthread_cond_broadcast(&workers->wake);
    pthread_mutex_unlock(&workers->mutex);
    for (uint32_t i = 0; i < workers->n_threads; i++)
        pthread_join(workers->threads[i], NULL);
    pthread_cond_destroy(&workers->wake);
    pthread_mutex_destroy(&workers->mutex);
    close(workers->fd);
    free(workers);
}

static int submit(void *user, struct kv_work_item *item) {
    struct workers *workers = user;

    if (workers->n_to_refuse > 0) {
        workers->n_to_refuse--;
        return -EAGAIN;
    }
    workers->n_items++;
    pthread_mutex_lock(&workers->mutex);
    put(&workers->todo, item);
    pthread_cond_signal(&workers->wake);
    pthread_mutex_unlock(&workers->mutex);
    return 0;
}

struct kv_work workers_interface(struct workers *workers) {
    return (struct kv_work){.submit = submit, .user = workers};
}

int workers_fd(const struct workers *workers) {
    return workers->fd;
}

uint32_t workers_dispatch(struct workers *workers) {
    eventfd_t n_woken;

    eventfd_read(workers->fd, &n_woken); /* or there is nothing */
    for (uint32_t n = 0;; n++) {
        struct kv_work_item *item;

        pthread_mutex_lock(&workers->mutex);
        item = get(&workers->finished);
        pthread_mutex_unlock(&workers->mutex);
        if (item == NULL)
            return n;
        workers->n_items--;
        item->done(item);
    }
}

uint32_t workers_n_out(const struct workers *workers) {
    return workers->n_items;
}

void workers_refuse(struct workers *workers, uint32_t n) {
    workers->n_to_refuse = n;
}
