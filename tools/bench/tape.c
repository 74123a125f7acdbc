#include "tape.h"

#include <errno.h>
#include <liburing.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base.h"
#include "bench.h"
#include "layout.h"

enum { SEGMENTS_MAX = 1024, RING_ENTRIES = 256 };

/* ---- writing down --------------------------------------------------------------------------------------------------- */

static void add(struct tape *tape, const struct disk_request *request) {
    if (tape->n == tape->n_room) {
        size_t n_room = 2 * tape->n_room + 1024;
        struct tape_op *grown = realloc(tape->ops, n_room * sizeof *grown);

        if (!grown) {
            tape->error = -ENOMEM;
            return;
        }
        tape->ops = grown;
        tape->n_room = n_room;
    }
    tape->ops[tape->n++] =
        (struct tape_op){request->call, request->segment, request->offset, request->buffer, request->bytes};
}

static int queue_start(struct disk_queue *queue, const struct disk_request *request) {
    struct tape_queue *mine = container_of(queue, struct tape_queue, queue);
    struct tape *tape = mine->tape;
    bool is_transfer = request->call == DISK_CALL_READ || request->call == DISK_CALL_WRITE;
    int r = mine->behind->table->start(mine->behind, request);

    if (r != 0)
        return r;
    mine->is_transfer[(uint32_t)request->id % TAPE_OUT_MAX] = is_transfer;
    tape->n_out += is_transfer;
    if (!tape->is_running || (!is_transfer && request->call != DISK_CALL_SYNC))
        return 0;
    add(tape, request);
    tape->depth = max_int(tape->depth, tape->n_out);
    tape->bytes += is_transfer ? request->bytes : 0;
    return 0;
}

static void queue_send(struct disk_queue *queue) {
    struct disk_queue *behind = container_of(queue, struct tape_queue, queue)->behind;

    if (behind->table->send)
        behind->table->send(behind);
}

static void queue_cancel(struct disk_queue *queue, uint64_t id) {
    struct disk_queue *behind = container_of(queue, struct tape_queue, queue)->behind;

    behind->table->cancel(behind, id);
}

static bool queue_reap(struct disk_queue *queue, uint64_t *ret_id, int *ret_result) {
    struct tape_queue *mine = container_of(queue, struct tape_queue, queue);
    bool has_come = mine->behind->table->reap(mine->behind, ret_id, ret_result);

    if (has_come)
        mine->tape->n_out -= mine->is_transfer[(uint32_t)*ret_id % TAPE_OUT_MAX];
    return has_come;
}

static void queue_set_file(struct disk_queue *queue, uint32_t segment, int fd) {
    struct disk_queue *behind = container_of(queue, struct tape_queue, queue)->behind;

    behind->table->set_file(behind, segment, fd);
}

static void queue_close(struct disk_queue *queue) {
    struct tape_queue *mine = container_of(queue, struct tape_queue, queue);

    mine->behind->table->close(mine->behind);
    free(mine->is_transfer);
    mine->is_transfer = NULL;
}

static const struct disk_queue_table table = {.start = queue_start,
                                              .send = queue_send,
                                              .cancel = queue_cancel,
                                              .reap = queue_reap,
                                              .set_file = queue_set_file,
                                              .close = queue_close};

struct disk_queue *tape_wrap(void *user, struct disk_queue *queue) {
    struct tape *tape = user;
    struct tape_queue *mine = &tape->queues[tape->n_queues];
    bool *is_transfer = tape->n_queues < TAPE_QUEUES ? calloc(TAPE_OUT_MAX, sizeof *is_transfer) : NULL;

    if (!is_transfer) {
        tape->error = -ENOMEM;
        return queue;
    }
    tape->n_queues++;
    *mine = (struct tape_queue){{&table}, queue, tape, is_transfer};
    return &mine->queue;
}

void tape_free(struct tape *tape) {
    free(tape->ops);
    *tape = (struct tape){0};
}

void tape_start(struct tape *tape) {
    tape->n = 0;
    tape->bytes = 0;
    tape->depth = tape->n_out;
    tape->is_running = true;
}

void tape_stop(struct tape *tape) {
    tape->is_running = false;
}

/* ---- the plain loop ------------------------------------------------------------------------------------------------- */

struct player {
    const struct tape *tape;
    struct io_uring ring;
    int fds[SEGMENTS_MAX];
    bool is_dirty[SEGMENTS_MAX]; /* written, and not synced since */
    const struct disk_buffer *buffers;
    uint32_t n_buffers;
    size_t at; /* the next operation */
    int n_out, n_transfers_out, error;
};

static int open_ring(struct player *player) {
    int r = io_uring_queue_init(RING_ENTRIES, &player->ring,
                                IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_CLAMP);

    return r == -EINVAL ? io_uring_queue_init(RING_ENTRIES, &player->ring, IORING_SETUP_CLAMP) : r;
}

static int open_files(struct player *player, const struct disk_folder *folder, uint64_t segment_bytes, bool is_direct) {
    for (size_t i = 0; i < player->tape->n; i++) {
        uint32_t segment = player->tape->ops[i].segment;

        if (segment >= SEGMENTS_MAX)
            return -E2BIG;
        if (player->fds[segment] < 0)
            player->fds[segment] = disk_segment_open(folder, segment, segment_bytes, is_direct);
        if (player->fds[segment] < 0)
            return player->fds[segment];
    }
    return 0;
}

/* Registered, as the vault's are. */
static int register_all(struct player *player) {
    struct iovec pieces[KV_GROUP_N];
    int r;

    for (uint32_t i = 0; i < player->n_buffers; i++)
        pieces[i] = (struct iovec){player->buffers[i].start, player->buffers[i].bytes};
    r = io_uring_register_buffers(&player->ring, pieces, player->n_buffers);
    return r == 0 ? io_uring_register_files(&player->ring, player->fds, SEGMENTS_MAX) : r;
}

static int find_buffer(const struct player *player, const void *start) {
    for (uint32_t i = 0; i < player->n_buffers; i++)
        if ((uintptr_t)start - (uintptr_t)player->buffers[i].start < player->buffers[i].bytes)
            return (int)i;
    return -1;
}

static struct io_uring_sqe *take_sqe(struct player *player, uint32_t segment, uint64_t expected) {
    struct io_uring_sqe *sqe = io_uring_get_sqe(&player->ring); /* there is room: the ring has more than are ever out */

    io_uring_prep_nop(sqe);
    sqe->fd = (int)segment;
    sqe->user_data = expected;
    player->n_out++;
    return sqe;
}

static void send_sync(struct player *player, uint32_t segment) {
    struct io_uring_sqe *sqe = take_sqe(player, segment, 0);

    io_uring_prep_fsync(sqe, (int)segment, IORING_FSYNC_DATASYNC);
    sqe->flags |= IOSQE_FIXED_FILE;
    sqe->user_data = 0;
    player->is_dirty[segment] = false;
}

static void send_transfer(struct player *player, const struct tape_op *op) {
    struct io_uring_sqe *sqe = take_sqe(player, op->segment, op->bytes);
    int buffer_idx = find_buffer(player, op->buffer), fd = (int)op->segment;

    if (op->call == DISK_CALL_READ && buffer_idx >= 0)
        io_uring_prep_read_fixed(sqe, fd, op->buffer, op->bytes, op->offset, buffer_idx);
    else if (op->call == DISK_CALL_READ)
        io_uring_prep_read(sqe, fd, op->buffer, op->bytes, op->offset);
    else if (buffer_idx >= 0)
        io_uring_prep_write_fixed(sqe, fd, op->buffer, op->bytes, op->offset, buffer_idx);
    else
        io_uring_prep_write(sqe, fd, op->buffer, op->bytes, op->offset);
    sqe->flags |= IOSQE_FIXED_FILE;
    sqe->user_data = op->bytes;
    player->n_transfers_out++;
    if (op->call == DISK_CALL_WRITE)
        player->is_dirty[op->segment] = true;
}

static void send_some(struct player *player) {
    const struct tape *tape = player->tape;

    while (player->at < tape->n && player->n_out < RING_ENTRIES / 2) {
        const struct tape_op *op = &tape->ops[player->at];

        if (op->call == DISK_CALL_SYNC) {
            send_sync(player, op->segment);
        } else if (player->n_transfers_out < tape->depth) {
            send_transfer(player, op);
        } else {
            break;
        }
        player->at++;
    }
}

static int wait_some(struct player *player) {
    struct io_uring_cqe *cqe;
    int r = io_uring_submit_and_wait(&player->ring, 1);

    if (r < 0)
        return r == -EINTR ? 0 : r;
    while (io_uring_peek_cqe(&player->ring, &cqe) == 0) {
        player->n_out--;
        player->n_transfers_out -= cqe->user_data > 0;
        if (cqe->res < 0)
            player->error = cqe->res;
        else if ((uint64_t)cqe->res != cqe->user_data)
            player->error = -EIO;
        io_uring_cqe_seen(&player->ring, cqe);
    }
    return 0;
}

static int play(struct player *player) {
    bool has_sync = false;
    int r = 0;

    for (size_t i = 0; i < player->tape->n; i++)
        has_sync = has_sync || player->tape->ops[i].call == DISK_CALL_SYNC;
    while (r == 0 && player->error == 0 && (player->at < player->tape->n || player->n_out > 0)) {
        send_some(player);
        r = wait_some(player);
    }
    for (uint32_t s = 0; r == 0 && has_sync && s < SEGMENTS_MAX; s++)
        if (player->is_dirty[s])
            send_sync(player, s);
    while (r == 0 && player->n_out > 0)
        r = wait_some(player);
    return r != 0 ? r : player->error;
}

int tape_play(const struct tape *tape, const struct disk_folder *folder, uint64_t segment_bytes, bool is_direct,
              const struct disk_buffer *buffers, uint32_t n_buffers, double *ret_seconds) {
    struct player *player = calloc(1, sizeof *player);
    double start;
    int r;

    if (!player)
        return -ENOMEM;
    player->tape = tape;
    player->buffers = buffers;
    player->n_buffers = n_buffers;
    memset(player->fds, 0xff, sizeof player->fds); /* -1: none */
    r = tape->error != 0 ? tape->error : open_ring(player);
    if (r == 0) {
        r = open_files(player, folder, segment_bytes, is_direct);
        if (r == 0)
            r = register_all(player);
        start = bench_now();
        if (r == 0)
            r = play(player);
        *ret_seconds = bench_now() - start;
        io_uring_queue_exit(&player->ring); /* what is out still is waited for */
    }
    for (uint32_t s = 0; s < SEGMENTS_MAX; s++)
        if (player->fds[s] >= 0)
            close(player->fds[s]);
    free(player);
    return r;
}
