/* device_thread: takes plans and copy batches in order and enqueues them, so that the loop thread never meets a driver call that may take
 * its time. Owns the streams and the events between them. Knows no seqs and no pages: a plan reaches it as copies, passes
 * and lists whose memory stays as it is until the plan is done. */
#pragma once
#include "copier.h"
#include "model.h"

enum { DEVICE_PLANS_MAX = 2 }; /* in flight: one runs while the next waits behind it */

struct device_copy { /* any of device and MEM_HOST memory */
    void *dst;
    const void *src;
    size_t bytes;
};
struct device_copies {
    struct device_copy *copies; /* [n_max] */
    int n, n_max;
};

/* What is copied to the device while the pass of given rows runs, which waits for it layer by layer: the restore point with
 * which its seq begins, then of all pages the part of the first full-attention layer, of the second, ...; the drafter's
 * pages, for which no layer waits, come last. All of it has arrived, or was given up, when the work is done. */
struct device_restore {
    /* One for the restore point, n_pages for pages of target_full, the rest for the drafter's; none: nothing is copied. */
    struct device_copies copies;
    int n_pages;
    int n_layers;            /* of a page, of equal size */
    struct device_copy live; /* after the first one: to where the seq goes on from it */
    int error; /* written by the device thread: 0, or why a copy could not be enqueued: then the pass was run all the same,
                  and what it has to say of this seq is nothing */
};

/* In stream order: the copies before, the passes, each if it is there, the copies after them. */
struct device_work {
    struct device_copies before;
    struct model_pass *prefill, *rerun;
    const struct model_batch *prefill_input, *rerun_input;
    struct device_restore restore;
    struct device_copies between; /* after the given rows, before the cycle: restore points of prompts */
    struct model_pass *cycle;
    const int32_t *cycle_list;
    struct streamer *streamer; /* NULL: nothing streams */
    bool moves_pages_out;      /* of the copies before, some write what is streamed from now on */
    struct streamed prefill_streamed, rerun_streamed, cycle_streamed;
    int error; /* written by the device thread before the plan is reported done: 0, or why it was not enqueued whole */
};

struct device_thread;

int device_thread_start(const struct backend *backend, struct device *device, struct device_thread **ret_thread);
/* Ends after all work that was submitted. */
void device_thread_stop(struct device_thread *thread);

/* Eventfds that do not block: the first grows by 1 for each piece of work that is done, the others for each batch of their
 * direction; each in the order of submission. */
int device_thread_done_fd(const struct device_thread *thread);
int device_thread_copied_fd(const struct device_thread *thread, enum kv_copy_direction direction);

/* At most DEVICE_PLANS_MAX may be submitted and not yet done. */
void device_thread_submit(struct device_thread *thread, struct device_work *work);

/* Nothing orders a batch against plans: what it reads is complete, and nobody else touches what it writes. At most
 * DEVICE_BATCHES_MAX may be submitted and not yet done. */
enum { DEVICE_BATCHES_MAX = 32 };
void device_thread_copy(struct device_thread *thread, struct kv_copy_batch *batch);
