/* convoy: page images that go over the link as the store sends them: batches of KV_COPIES_MAX copies on the stream of their
 * direction, each batch told to whoever waits by an eventfd, and then the next one enqueued. */
#pragma once
#include <pthread.h>
#include <stdatomic.h>

#include "copier.h"
#include "rig.h"

enum { CONVOY_BATCHES_MAX = 2 }; /* on their way */

struct convoy_options {
    enum kv_copy_direction direction;
    char *device, *host; /* n_pages pages each, one behind the other */
    size_t page_bytes;
    int n_pages;
    int n_batches; /* on their way at a time; one: as a single restore or spill has it */
};

struct convoy {
    struct rig *rig;
    struct convoy_options options;
    struct stream *notify;
    struct event *events[CONVOY_BATCHES_MAX];
    int fd;
    /* of a convoy that goes round until it is stopped */
    pthread_t thread;
    atomic_bool stop;
    double bytes, seconds;
    int result;
};

int convoy_open(struct convoy *convoy, struct rig *rig, const struct convoy_options *options); /* 0 or negative errno */
void convoy_close(struct convoy *convoy); /* also after a failure */

/* All pages once. Blocks. */
int convoy_run(struct convoy *convoy, double *ret_seconds);
/* All pages again and again beside the caller's work, until the end; then bytes and seconds say how fast. */
int convoy_start(struct convoy *convoy);
int convoy_stop(struct convoy *convoy);
