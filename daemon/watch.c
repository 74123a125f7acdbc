#include "watch.h"

#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>
#include <uv.h>

struct watch {
    uv_poll_t poll;
    void (*on_readable)(void *user);
    void *user;
};

static void on_poll(uv_poll_t *poll, int status, int events) {
    struct watch *watch = poll->data;

    (void)status, (void)events; /* an fd in error is readable: the read says what it is */
    watch->on_readable(watch->user);
}

static void on_closed(uv_handle_t *handle) {
    free(handle->data);
}

int watch_start(uv_loop_t *loop, int fd, void (*on_readable)(void *user), void *user, struct watch **ret_watch) {
    struct watch *watch = calloc(1, sizeof *watch);
    int r;

    if (!watch)
        return -ENOMEM;
    watch->on_readable = on_readable;
    watch->user = user;
    r = uv_poll_init(loop, &watch->poll, fd);
    if (r != 0) {
        free(watch);
        return r;
    }
    watch->poll.data = watch;
    r = uv_poll_start(&watch->poll, UV_READABLE, on_poll);
    if (r != 0) {
        watch_stop(watch);
        return r;
    }
    *ret_watch = watch;
    return 0;
}

void watch_stop(struct watch *watch) {
    if (!watch)
        return;
    uv_poll_stop(&watch->poll);
    uv_close((uv_handle_t *)&watch->poll, on_closed);
}

unsigned long long watch_take_count(int eventfd) {
    uint64_t count = 0;

    while (read(eventfd, &count, sizeof count) < 0)
        if (errno != EINTR)
            return 0;
    return count;
}
