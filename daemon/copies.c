#include "copies.h"

#include <errno.h>

#include "watch.h"

void copies_init(struct copies *copies, struct device_thread *thread) {
    *copies = (struct copies){.thread = thread};
}

static int submit(void *user, struct kv_copy_batch *batch) {
    struct copies *copies = user;

    if (copies->out[batch->direction].n >= DEVICE_BATCHES_MAX / KV_COPY_DIRECTION_N)
        return -EAGAIN;
    batch->next = NULL;
    if (copies->out[batch->direction].last)
        copies->out[batch->direction].last->next = batch;
    else
        copies->out[batch->direction].first = batch;
    copies->out[batch->direction].last = batch;
    copies->out[batch->direction].n++;
    device_thread_copy(copies->thread, batch);
    return 0;
}

struct kv_copier copies_copier(struct copies *copies) {
    return (struct kv_copier){submit, copies};
}

static void take(struct copies *copies, int direction) {
    struct kv_copy_batch *batch = copies->out[direction].first;

    copies->out[direction].first = batch->next;
    if (!batch->next)
        copies->out[direction].last = NULL;
    copies->out[direction].n--;
    batch->done(batch); /* may submit the next one */
}

void copies_dispatch(struct copies *copies) {
    for (int d = 0; d < KV_COPY_DIRECTION_N; d++) {
        unsigned long long n = watch_take_count(device_thread_copied_fd(copies->thread, (enum kv_copy_direction)d));

        for (; n > 0; n--)
            take(copies, d);
    }
}
