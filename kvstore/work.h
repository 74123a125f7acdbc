/* work: how the store asks for pure functions to be run on another thread: checksums of pages that stay where they are.
 * The process fills it with its thread pool. */
#pragma once

struct kv_work_item {                        /* embedded in who waits for it */
    void (*run)(struct kv_work_item *item);  /* on any thread */
    void (*done)(struct kv_work_item *item); /* on the loop */
    void *impl;                              /* of who runs it */
};

struct kv_work {
    int (*submit)(void *user, struct kv_work_item *item); /* 0: done will come. -errno: it will not */
    void *user;
};
