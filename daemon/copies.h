/* copies: the store's copier over the device thread: hands batches over and tells who waits for them when they are done. */
#pragma once
#include "device_thread.h"

struct copies {
    struct device_thread *thread;
    struct {
        struct kv_copy_batch *first, *last; /* submitted, oldest first */
        int n;
    } out[KV_COPY_DIRECTION_N];
};

void copies_init(struct copies *copies, struct device_thread *thread);
struct kv_copier copies_copier(struct copies *copies);

/* Some of this direction may be done: device_thread_copied_fd() is readable. */
void copies_dispatch(struct copies *copies);
