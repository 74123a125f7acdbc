/* work: how the store asks for pure functions to be run on another thread: checksums of pages that stay where they are.
 * The process fills it with its thread pool. */
#pragma once
#include <stddef.h>

struct kv_work_item {                        /* embedded in who waits for it; stays where it is until done */
    void (*run)(struct kv_work_item *item);  /* on any thread */
    void (*done)(struct kv_work_item *item); /* on the loop */
    max_align_t impl[12];                    /* of who runs it, so that nothing is allocated */
};

struct kv_work {
    int (*submit)(void *user, struct kv_work_item *item); /* 0: done will come. -errno: it will not */
    void *user;
};
