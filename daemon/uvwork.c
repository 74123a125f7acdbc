#include "uvwork.h"

#include <assert.h>
#include <uv.h>

static_assert(sizeof(uv_work_t) <= sizeof((struct kv_work_item *)NULL)->impl, "a request fits into its item");

static void on_work(uv_work_t *work) {
    struct kv_work_item *item = work->data;

    item->run(item);
}

static void on_done(uv_work_t *work, int status) {
    struct kv_work_item *item = work->data;

    (void)status; /* nobody cancels */
    item->done(item);
}

static int submit(void *user, struct kv_work_item *item) {
    uv_work_t *work = (uv_work_t *)(void *)item->impl;

    work->data = item;
    return uv_queue_work(user, work, on_work, on_done);
}

struct kv_work uvwork_of(uv_loop_t *loop) {
    return (struct kv_work){submit, loop};
}
