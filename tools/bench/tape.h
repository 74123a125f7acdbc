/* tape: what a vault asks of its disk, written down, and the same asked again by a plain loop over one io_uring: the same
 * bytes of the same files, from and to the same memory, as many side by side, and nothing else. What the loop takes is the
 * floor of what the vault takes. */
#pragma once
#include <stdbool.h>

#include "disk_queue.h"

struct tape_op {
    enum disk_call call; /* DISK_CALL_READ, WRITE or SYNC */
    uint32_t segment;
    uint64_t offset;
    void *buffer;
    uint32_t bytes;
};

struct tape_queue { /* one of the disk's, and before it the tape */
    struct disk_queue queue;
    struct disk_queue *behind;
    struct tape *tape;
    bool *is_transfer; /* [TAPE_OUT_MAX] by the low half of a request's id */
};

enum { TAPE_QUEUES = 2, TAPE_OUT_MAX = 8192 };

struct tape {
    struct tape_queue queues[TAPE_QUEUES];
    int n_queues;
    bool is_running;
    struct tape_op *ops;
    size_t n, n_room;
    int n_out, depth; /* transfers on their way: now, and at most since the start */
    uint64_t bytes;   /* of all transfers */
    int error;
};

/* For the disk's option `wrap`; user: the tape, zeroed, which stays where it is. */
struct disk_queue *tape_wrap(void *user, struct disk_queue *queue);
void tape_free(struct tape *tape); /* the disk is closed */

void tape_start(struct tape *tape); /* from its beginning */
void tape_stop(struct tape *tape);

/* Asks it all again. Syncs are sent when what was written before them has been sent, as by the vault, and one of each file
 * comes last if there was one. 0 and how long it took, or negative errno. */
int tape_play(const struct tape *tape, const struct disk_folder *folder, uint64_t segment_bytes, bool is_direct,
              const struct disk_buffer *buffers, uint32_t n_buffers, double *ret_seconds);
