/* disk_uring: calls through one io_uring. Alone knows liburing. The thread that opens it is the only one that may use it. */
#include <assert.h>
#include <errno.h>
#include <liburing.h>
#include <linux/ioprio.h>
#include <stdlib.h>
#include <unistd.h>

#include "base.h"
#include "disk_queue.h"

#define BUFFER_BYTES_MAX ((size_t)1 << 30) /* the kernel's limit for a registered one */
enum { BUFFERS_MAX = 16384 };              /* and for their number */
enum { ID_OF_CANCEL = 0 };

struct uring {
    struct disk_queue queue;
    struct io_uring ring;
    struct disk_uring_facts *facts; /* the disk's, which shows them */
    struct iovec *buffers;          /* registered ones */
    uint32_t n_buffers;
    int event_fd;
};

/* ---- open -------------------------------------------------------------------------------------------------------- */

/* From what the newest kernels have to what all have. An older one answers -EINVAL to a flag it does not know. */
static int open_ring(uint32_t n_calls_max, struct io_uring *ret_ring) {
    static const unsigned flags[] = {IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN |
                                         IORING_SETUP_COOP_TASKRUN | IORING_SETUP_TASKRUN_FLAG,
                                     IORING_SETUP_COOP_TASKRUN | IORING_SETUP_TASKRUN_FLAG, 0};
    int r = -EINVAL;

    for (size_t i = 0; i < ARRAY_LEN(flags) && r == -EINVAL; i++) {
        struct io_uring_params params = {.flags = flags[i] | IORING_SETUP_CQSIZE | IORING_SETUP_CLAMP,
                                         .cq_entries = 4 * n_calls_max}; /* each may be cancelled too */

        r = io_uring_queue_init_params(n_calls_max, ret_ring, &params);
    }
    return r;
}

/* All of it, in pieces that the kernel takes, or nothing. */
static int register_buffers(struct uring *uring, const struct disk_options *options) {
    struct iovec *pieces;
    uint64_t n = 0;
    int r;

    for (uint32_t b = 0; b < options->n_buffers; b++)
        n += div_ceil(options->buffers[b].bytes, BUFFER_BYTES_MAX);
    if (n == 0)
        return 0;
    if (n > BUFFERS_MAX)
        return -E2BIG;
    pieces = calloc(n, sizeof(*pieces));
    if (pieces == NULL)
        return -ENOMEM;
    n = 0;
    for (uint32_t b = 0; b < options->n_buffers; b++) {
        for (size_t at = 0; at < options->buffers[b].bytes; at += BUFFER_BYTES_MAX) {
            size_t rest = options->buffers[b].bytes - at;

            pieces[n].iov_base = (char *)options->buffers[b].start + at;
            pieces[n++].iov_len = rest < BUFFER_BYTES_MAX ? rest : BUFFER_BYTES_MAX;
        }
    }
    r = io_uring_register_buffers(&uring->ring, pieces, (unsigned)n);
    if (r != 0) {
        free(pieces);
        return r;
    }
    uring->buffers = pieces;
    uring->n_buffers = (uint32_t)n;
    return 0;
}

static void uring_free(struct uring *uring) {
    io_uring_queue_exit(&uring->ring);
    free(uring->buffers);
    free(uring);
}

/* ---- the queue --------------------------------------------------------------------------------------------------- */

static int find_buffer(const struct uring *uring, const void *start, size_t bytes) {
    for (uint32_t i = 0; i < uring->n_buffers; i++) {
        size_t at = (size_t)((uintptr_t)start - (uintptr_t)uring->buffers[i].iov_base);

        if (at < uring->buffers[i].iov_len && bytes <= uring->buffers[i].iov_len - at)
            return (int)i;
    }
    return -1;
}

static struct io_uring_sqe *take_sqe(struct uring *uring) {
    struct io_uring_sqe *sqe = io_uring_get_sqe(&uring->ring);

    if (sqe == NULL) {
        io_uring_submit(&uring->ring);
        sqe = io_uring_get_sqe(&uring->ring);
    }
    return sqe;
}

/* What is started is sent together, by the next reap if nobody does it before: a call into the kernel, and of a virtual disk
 * out of the machine, costs as much for one as for many. */
static void wake_up(const struct uring *uring) {
    uint64_t one = 1;
    ssize_t n = write(uring->event_fd, &one, sizeof(one)); /* fails only if it is readable as it is */

    (void)n;
}

static int uring_start(struct disk_queue *queue, const struct disk_request *request) {
    struct uring *uring = container_of(queue, struct uring, queue);
    struct io_uring_sqe *sqe;
    int buffer_idx;

    assert(request->call <= DISK_CALL_DROP);
    sqe = take_sqe(uring);
    if (sqe == NULL)
        return -EAGAIN;
    switch (request->call) {
    case DISK_CALL_READ:
        buffer_idx = find_buffer(uring, request->buffer, request->bytes);
        if (buffer_idx >= 0)
            io_uring_prep_read_fixed(sqe, request->fd, request->buffer, request->bytes, request->offset, buffer_idx);
        else
            io_uring_prep_read(sqe, request->fd, request->buffer, request->bytes, request->offset);
        break;
    case DISK_CALL_WRITE:
        buffer_idx = find_buffer(uring, request->buffer, request->bytes);
        if (buffer_idx >= 0)
            io_uring_prep_write_fixed(sqe, request->fd, request->buffer, request->bytes, request->offset, buffer_idx);
        else
            io_uring_prep_write(sqe, request->fd, request->buffer, request->bytes, request->offset);
        sqe->ioprio = IOPRIO_PRIO_VALUE(IOPRIO_CLASS_BE, 7); /* somebody may wait for a read, nobody for a write */
        break;
    case DISK_CALL_SYNC:
        io_uring_prep_fsync(sqe, request->fd, IORING_FSYNC_DATASYNC);
        break;
    case DISK_CALL_DROP:
        io_uring_prep_fadvise(sqe, request->fd, request->offset, request->bytes, POSIX_FADV_DONTNEED);
        break;
    case DISK_CALL_CREATE:
    case DISK_CALL_REMOVE:
        break;
    }
    if (uring->facts->has_registered_files) {
        sqe->fd = (int)request->segment;
        sqe->flags |= IOSQE_FIXED_FILE;
    }
    if (!request->is_direct)
        sqe->flags |= IOSQE_ASYNC; /* the kernel's threads copy the bytes, not this one */
    io_uring_sqe_set_data64(sqe, request->id);
    if (io_uring_sq_ready(&uring->ring) == 1)
        wake_up(uring);
    return 0;
}

static void uring_send(struct disk_queue *queue) {
    struct uring *uring = container_of(queue, struct uring, queue);

    if (io_uring_sq_ready(&uring->ring) > 0)
        io_uring_submit(&uring->ring); /* what the kernel does not take now is offered again by the next call */
}

static void uring_cancel(struct disk_queue *queue, uint64_t id) {
    struct uring *uring = container_of(queue, struct uring, queue);
    struct io_uring_sqe *sqe = take_sqe(uring);

    if (sqe == NULL)
        return;
    io_uring_prep_cancel64(sqe, id, 0);
    io_uring_sqe_set_data64(sqe, ID_OF_CANCEL);
    io_uring_submit(&uring->ring);
}

static bool uring_reap(struct disk_queue *queue, uint64_t *ret_id, int *ret_result) {
    struct uring *uring = container_of(queue, struct uring, queue);
    bool has_sent = false;

    for (;;) {
        struct io_uring_cqe *cqe;

        if (io_uring_peek_cqe(&uring->ring, &cqe) == 0) { /* lets the kernel finish what it deferred */
            uint64_t id = cqe->user_data;
            int result = cqe->res;

            io_uring_cqe_seen(&uring->ring, cqe);
            if (id == ID_OF_CANCEL)
                continue;
            *ret_id = id;
            *ret_result = result;
            return true;
        }
        if (has_sent || io_uring_sq_ready(&uring->ring) == 0)
            return false;
        uring_send(queue);
        has_sent = true;
    }
}

/* An update that is refused ends the use of registered files: everything then names its descriptor. */
static void uring_set_file(struct disk_queue *queue, uint32_t segment, int fd) {
    struct uring *uring = container_of(queue, struct uring, queue);

    if (uring->facts->has_registered_files && io_uring_register_files_update(&uring->ring, segment, &fd, 1) != 1)
        uring->facts->has_registered_files = false;
}

static void uring_forget_buffers(struct disk_queue *queue) {
    struct uring *uring = container_of(queue, struct uring, queue);

    if (uring->n_buffers == 0 || io_uring_unregister_buffers(&uring->ring) != 0)
        return;
    uring->n_buffers = 0;
    uring->facts->has_registered_buffers = false;
}

static void uring_close(struct disk_queue *queue) {
    uring_free(container_of(queue, struct uring, queue));
}

static const struct disk_queue_table uring_table = {
    .start = uring_start,
    .send = uring_send,
    .cancel = uring_cancel,
    .reap = uring_reap,
    .set_file = uring_set_file,
    .forget_buffers = uring_forget_buffers,
    .close = uring_close,
};

int disk_uring_open(const struct disk_options *options, uint32_t n_calls_max, int event_fd,
                    struct disk_uring_facts *facts, struct disk_queue **ret_queue) {
    struct uring *uring = calloc(1, sizeof(*uring));
    int r;

    if (uring == NULL)
        return -ENOMEM;
    r = open_ring(n_calls_max, &uring->ring);
    if (r != 0) {
        free(uring);
        return r;
    }
    r = io_uring_register_eventfd(&uring->ring, event_fd);
    if (r != 0) {
        uring_free(uring);
        return r;
    }
    uring->queue.table = &uring_table;
    uring->facts = facts;
    uring->event_fd = event_fd;
    facts->has_registered_files = io_uring_register_files_sparse(&uring->ring, options->n_segments_max) == 0;
    facts->buffers_error = register_buffers(uring, options);
    facts->has_registered_buffers = uring->n_buffers > 0;
    *ret_queue = &uring->queue;
    return 0;
}
