#include "crew.h"

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { THREADS_MAX = 16 };

struct list { /* items, linked through what is theirs to use */
    struct kv_work_item *first, *last;
};

struct crew {
    pthread_mutex_t mutex;
    pthread_cond_t wake;
    struct list todo, finished;
    bool is_ending;
    int event_fd;
    int n_threads;
    pthread_t threads[THREADS_MAX];
};

static struct kv_work_item **next_of(struct kv_work_item *item) {
    return (struct kv_work_item **)(void *)item->impl;
}

static void put(struct list *list, struct kv_work_item *item) {
    *next_of(item) = NULL;
    *(list->last ? next_of(list->last) : &list->first) = item;
    list->last = item;
}

static struct kv_work_item *get(struct list *list) {
    struct kv_work_item *item = list->first;

    if (!item)
        return NULL;
    list->first = *next_of(item);
    if (!list->first)
        list->last = NULL;
    return item;
}

static void make_readable(const struct crew *crew) {
    uint64_t one = 1;
    ssize_t n = write(crew->event_fd, &one, sizeof one); /* fails only if it is readable as it is */

    (void)n;
}

static void *work(void *user) {
    struct crew *crew = user;

    pthread_mutex_lock(&crew->mutex);
    for (;;) {
        struct kv_work_item *item = get(&crew->todo);

        if (!item && crew->is_ending)
            break;
        if (!item) {
            pthread_cond_wait(&crew->wake, &crew->mutex);
            continue;
        }
        pthread_mutex_unlock(&crew->mutex);
        item->run(item);
        pthread_mutex_lock(&crew->mutex);
        put(&crew->finished, item);
        make_readable(crew);
    }
    pthread_mutex_unlock(&crew->mutex);
    return NULL;
}

int crew_open(int n_threads, struct crew **ret_crew) {
    struct crew *crew = calloc(1, sizeof *crew);
    int r = 0;

    if (!crew)
        return -ENOMEM;
    pthread_mutex_init(&crew->mutex, NULL);
    pthread_cond_init(&crew->wake, NULL);
    crew->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (crew->event_fd < 0)
        r = -errno;
    while (r == 0 && crew->n_threads < n_threads && crew->n_threads < THREADS_MAX) {
        r = -pthread_create(&crew->threads[crew->n_threads], NULL, work, crew);
        crew->n_threads += r == 0;
    }
    if (r != 0) {
        crew_close(crew);
        return r;
    }
    *ret_crew = crew;
    return 0;
}

void crew_close(struct crew *crew) {
    if (!crew)
        return;
    pthread_mutex_lock(&crew->mutex);
    crew->is_ending = true;
    pthread_cond_broadcast(&crew->wake);
    pthread_mutex_unlock(&crew->mutex);
    for (int i = 0; i < crew->n_threads; i++)
        pthread_join(crew->threads[i], NULL);
    pthread_cond_destroy(&crew->wake);
    pthread_mutex_destroy(&crew->mutex);
    if (crew->event_fd >= 0)
        close(crew->event_fd);
    free(crew);
}

static int submit(void *user, struct kv_work_item *item) {
    struct crew *crew = user;

    pthread_mutex_lock(&crew->mutex);
    put(&crew->todo, item);
    pthread_cond_signal(&crew->wake);
    pthread_mutex_unlock(&crew->mutex);
    return 0;
}

struct kv_work crew_work(struct crew *crew) {
    return (struct kv_work){.submit = submit, .user = crew};
}

int crew_fd(const struct crew *crew) {
    return crew->event_fd;
}

void crew_dispatch(struct crew *crew) {
    uint64_t n_wakeups;
    ssize_t n = read(crew->event_fd, &n_wakeups, sizeof n_wakeups);

    (void)n;
    for (;;) {
        struct kv_work_item *item;

        pthread_mutex_lock(&crew->mutex);
        item = get(&crew->finished);
        pthread_mutex_unlock(&crew->mutex);
        if (!item)
            return;
        item->done(item);
    }
}
