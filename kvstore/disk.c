#include "disk.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base.h"
#include "disk_queue.h"
#include "pool.h"

#define SEGMENT_BYTES_MAX ((uint64_t)1 << 30)
enum { OPS_MAX = 4096, N_RETRIES_MAX = 8, SAFETY_TICK_US = 1000000, N_QUEUES_MAX = 2 };

struct entry {
    struct disk_op *op; /* NULL: cached pages being dropped, for nobody */
    uint32_t generation;
    bool is_out;
};

struct segment {
    int fd;
    uint32_t n_out; /* operations */
    enum { SEGMENT_NONE, SEGMENT_ADDING, SEGMENT_READY, SEGMENT_REMOVING } state;
};

struct disk {
    struct disk_options options;
    struct disk_queue *queues[N_QUEUES_MAX]; /* the last makes and removes segments, the first does the rest */
    uint32_t n_queues;
    int event_fd;
    uint32_t alignment;
    struct entry *entries; /* [n_entries]: first those of operations, then as many for dropping cached pages */
    uint32_t n_entries;
    struct kv_pool free_ops, free_drops;
    struct segment *segments;
    struct disk_uring_facts facts;
    struct disk_stats stats;
};

static const enum disk_call call_of_kind[] = {
    [DISK_READ] = DISK_CALL_READ,          [DISK_WRITE] = DISK_CALL_WRITE,           [DISK_SYNC] = DISK_CALL_SYNC,
    [DISK_SEGMENT_ADD] = DISK_CALL_CREATE, [DISK_SEGMENT_REMOVE] = DISK_CALL_REMOVE,
};

static bool has_bytes(const struct disk_op *op) {
    return op->kind == DISK_READ || op->kind == DISK_WRITE;
}

static struct disk_queue *queue_of(struct disk *disk, enum disk_call call) {
    return disk->queues[call >= DISK_CALL_CREATE ? disk->n_queues - 1 : 0];
}

static uint64_t entry_id(const struct disk *disk, uint32_t idx) {
    return (uint64_t)disk->entries[idx].generation << 32 | idx;
}

static void make_readable(struct disk *disk) {
    uint64_t one = 1;
    ssize_t n = write(disk->event_fd, &one, sizeof(one)); /* fails only if it is readable as it is */

    (void)n;
}

/* ---- segments ---------------------------------------------------------------------------------------------------- */

static void set_buffered(int fd) {
    int flags = fcntl(fd, F_GETFL);

    if (flags >= 0)
        fcntl(fd, F_SETFL, flags & ~O_DIRECT);
}

/* The file system took the flag, or not, but does no direct I/O as we need it. */
static void go_buffered(struct disk *disk) {
    disk->stats.is_direct = false;
    disk->alignment = DISK_ALIGN_MIN;
    for (uint32_t i = 0; i < disk->options.n_segments_max; i++) {
        if (disk->segments[i].fd >= 0)
            set_buffered(disk->segments[i].fd);
    }
}

static void set_ready(struct disk *disk, uint32_t segment, int fd) {
    disk->segments[segment].fd = fd;
    disk->segments[segment].state = SEGMENT_READY;
    disk->queues[0]->table->set_file(disk->queues[0], segment, fd);
}

struct found {
    struct disk *disk;
    int error;
};

static void on_name(void *user, const char *name) {
    struct found *found = user;
    struct disk *disk = found->disk;
    uint32_t segment;
    int fd = -ENOENT;

    if (found->error != 0 || !disk_segment_parse(name, &segment))
        return;
    if (segment < disk->options.n_segments_max)
        fd = disk_segment_open(disk->options.folder, segment, disk->options.segment_bytes, disk->stats.is_direct);
    if (fd == -EINVAL && disk->stats.is_direct) {
        go_buffered(disk);
        fd = disk_segment_open(disk->options.folder, segment, disk->options.segment_bytes, false);
    }
    if (fd >= 0)
        set_ready(disk, segment, fd);
    else if (fd == -EMFILE || fd == -ENFILE || fd == -ENOMEM)
        found->error = fd;
    else
        disk->stats.n_segments_refused++;
}

bool disk_segment_exists(const struct disk *disk, uint32_t segment) {
    return segment < disk->options.n_segments_max && disk->segments[segment].state == SEGMENT_READY;
}

uint32_t disk_alignment(const struct disk *disk) {
    return disk->alignment;
}

/* ---- one operation ----------------------------------------------------------------------------------------------- */

/* Gives the entry a new id, so that what still comes for the old one is nobody's. */
static int start(struct disk *disk, uint32_t idx, struct disk_request *request) {
    struct entry *entry = &disk->entries[idx];
    struct disk_queue *queue = queue_of(disk, request->call);
    int r;

    entry->generation = entry->generation == UINT32_MAX ? 1 : entry->generation + 1;
    entry->is_out = true;
    request->id = entry_id(disk, idx);
    request->fd = disk->segments[request->segment].fd;
    request->folder = disk->options.folder;
    request->is_direct = disk->stats.is_direct;
    r = queue->table->start(queue, request);
    if (r != 0)
        entry->is_out = false;
    return r;
}

/* What of it is not done yet. */
static int start_op(struct disk *disk, uint32_t idx) {
    struct disk_op *op = disk->entries[idx].op;
    struct disk_request request = {.call = call_of_kind[op->kind], .segment = op->segment};
    int r;

    if (has_bytes(op)) {
        request.offset = op->offset + op->own.n_done;
        request.buffer = (char *)op->buffer + op->own.n_done;
        request.bytes = op->bytes - op->own.n_done;
    } else if (op->kind == DISK_SEGMENT_ADD) {
        request.bytes = (uint32_t)disk->options.segment_bytes;
    }
    op->own.is_buffered = !disk->stats.is_direct;
    r = start(disk, idx, &request);
    op->own.id = entry_id(disk, idx);
    return r;
}

/* Buffered I/O leaves pages in the kernel's cache that we keep ourselves. Nobody waits for it, and if all entries for it
 * are out this time is skipped. A file that is removed meanwhile has nothing to drop. */
static void drop_cached(struct disk *disk, uint32_t segment, uint64_t offset, uint32_t bytes) {
    struct disk_request request = {.call = DISK_CALL_DROP, .segment = segment, .offset = offset, .bytes = bytes};
    uint32_t idx;

    if (kv_pool_take(&disk->free_drops, &idx) == 0 && start(disk, idx, &request) != 0)
        kv_pool_give(&disk->free_drops, idx);
}

static void finish_add(struct disk *disk, uint32_t segment, int result) {
    if (result < 0) {
        disk->segments[segment].state = SEGMENT_NONE;
        return;
    }
    if (!disk->stats.is_direct)
        set_buffered(result); /* we may have learned it meanwhile */
    set_ready(disk, segment, result);
}

static void finish_remove(struct disk *disk, uint32_t segment, int result) {
    if (result < 0)
        set_ready(disk, segment, disk->segments[segment].fd);
    else
        disk->segments[segment] = (struct segment){.fd = -1};
}

static void count(struct disk *disk, const struct disk_op *op) {
    struct disk_stats *stats = &disk->stats;

    stats->n_out--;
    if (op->is_late) {
        stats->n_out_late--;
        stats->out_late_bytes -= has_bytes(op) ? op->bytes : 0;
    }
    if (op->result != 0) {
        stats->n_failed[op->kind]++;
        return;
    }
    stats->n_done[op->kind]++;
    if (op->kind == DISK_READ)
        stats->read_bytes += op->bytes;
    else if (op->kind == DISK_WRITE)
        stats->written_bytes += op->bytes;
}

/* result: 0, -errno, or of an add the descriptor. */
static void finish(struct disk *disk, uint32_t idx, int result) {
    struct disk_op *op = disk->entries[idx].op;

    kv_pool_give(&disk->free_ops, idx);
    disk->segments[op->segment].n_out--;
    if (op->kind == DISK_SEGMENT_ADD)
        finish_add(disk, op->segment, result);
    else if (op->kind == DISK_SEGMENT_REMOVE)
        finish_remove(disk, op->segment, result);
    op->result = result < 0 ? result : 0;
    count(disk, op);
    if (op->own.is_buffered && op->result == 0 && op->kind == DISK_READ)
        drop_cached(disk, op->segment, op->offset, op->bytes);
    else if (op->own.is_buffered && op->result == 0 && op->kind == DISK_SYNC)
        drop_cached(disk, op->segment, 0, 0); /* only clean pages can be dropped */
    op->done(op);
}

static void start_again(struct disk *disk, uint32_t idx) {
    int r = start_op(disk, idx);

    if (r != 0)
        finish(disk, idx, r);
}

/* True if a call that ended thus is to be made again, now or for the rest. */
static bool is_worth_more(struct disk *disk, struct disk_op *op, int result) {
    if (op->is_late || op->own.is_cancelled)
        return false;
    if ((result == -EINTR || result == -EAGAIN) && op->own.n_retries < N_RETRIES_MAX) {
        op->own.n_retries++;
        disk->stats.n_retries++;
        return true;
    }
    if (result == -EINVAL && !op->own.is_buffered) {
        if (disk->stats.is_direct)
            go_buffered(disk);
        return true;
    }
    if (has_bytes(op) && result >= 0 && (uint32_t)result < op->bytes - op->own.n_done) {
        disk->stats.n_short++;
        if (op->own.is_rest)
            return false;
        op->own.is_rest = true;
        op->own.n_done += (uint32_t)result & ~(disk->alignment - 1); /* the rest must be aligned too */
        return true;
    }
    return false;
}

static int final_result(const struct disk_op *op, int result) {
    if (result >= 0 && has_bytes(op))
        result = (uint32_t)result == op->bytes - op->own.n_done ? 0 : -EIO;
    else if (result > 0 && op->kind != DISK_SEGMENT_ADD)
        result = -EIO;
    if (result < 0 && op->is_late)
        return -ETIMEDOUT;
    return result < 0 && op->own.is_cancelled ? -ECANCELED : result;
}

static void on_completion(struct disk *disk, uint64_t id, int result) {
    uint32_t idx = (uint32_t)id;
    struct entry *entry;

    if (idx >= disk->n_entries || !disk->entries[idx].is_out || id != entry_id(disk, idx)) {
        disk->stats.n_unknown++;
        return;
    }
    entry = &disk->entries[idx];
    entry->is_out = false;
    if (entry->op == NULL)
        kv_pool_give(&disk->free_drops, idx);
    else if (is_worth_more(disk, entry->op, result))
        start_again(disk, idx);
    else
        finish(disk, idx, final_result(entry->op, result));
}

/* ---- what the store calls ---------------------------------------------------------------------------------------- */

static int check_segment(const struct disk *disk, const struct disk_op *op) {
    const struct segment *segment = &disk->segments[op->segment];

    if (op->kind == DISK_SEGMENT_ADD)
        return segment->state == SEGMENT_NONE ? 0 : segment->state == SEGMENT_READY ? -EEXIST : -EBUSY;
    if (segment->state != SEGMENT_READY)
        return -ENOENT;
    return op->kind == DISK_SEGMENT_REMOVE && segment->n_out > 0 ? -EBUSY : 0;
}

static int check_range(const struct disk *disk, const struct disk_op *op) {
    uint64_t size = disk->options.segment_bytes;
    uint64_t mask = disk->stats.is_direct ? disk->alignment - 1 : 0;

    if (op->bytes == 0 || op->bytes > size || op->offset > size - op->bytes)
        return -EINVAL;
    return ((op->offset | op->bytes | (uintptr_t)op->buffer) & mask) == 0 ? 0 : -EINVAL;
}

int disk_submit(struct disk *disk, struct disk_op *op, uint64_t now_us) {
    struct segment *segment;
    uint32_t idx;
    int r;

    if (op->segment >= disk->options.n_segments_max)
        return -ENOENT;
    r = check_segment(disk, op);
    if (r == 0 && has_bytes(op))
        r = check_range(disk, op);
    if (r != 0)
        return r;
    if (kv_pool_take(&disk->free_ops, &idx) != 0)
        return DISK_E_FULL;
    op->result = 0;
    op->is_late = false;
    memset(&op->own, 0, sizeof(op->own));
    op->own.deadline_us = op->deadline_us != 0 ? op->deadline_us : now_us + disk->options.deadline_us;
    disk->entries[idx].op = op;
    r = start_op(disk, idx);
    if (r != 0) {
        kv_pool_give(&disk->free_ops, idx);
        return r;
    }
    segment = &disk->segments[op->segment];
    segment->n_out++;
    disk->stats.n_out++;
    if (op->kind == DISK_SEGMENT_ADD) {
        segment->state = SEGMENT_ADDING;
    } else if (op->kind == DISK_SEGMENT_REMOVE) {
        segment->state = SEGMENT_REMOVING;
        disk->queues[0]->table->set_file(disk->queues[0], op->segment, -1);
    }
    return 0;
}

static void cancel(struct disk *disk, uint32_t idx) {
    struct disk_op *op = disk->entries[idx].op;
    struct disk_queue *queue = queue_of(disk, op != NULL ? call_of_kind[op->kind] : DISK_CALL_DROP);

    queue->table->cancel(queue, entry_id(disk, idx));
}

void disk_cancel(struct disk *disk, struct disk_op *op) {
    uint32_t idx = (uint32_t)op->own.id;

    assert(disk->entries[idx].is_out && disk->entries[idx].op == op);
    if (op->own.is_cancelled)
        return;
    op->own.is_cancelled = true;
    disk->stats.n_cancelled++;
    cancel(disk, idx);
}

int disk_fd(const struct disk *disk) {
    return disk->event_fd;
}

/* Callbacks may submit, and what they submit may be done at once: the rest of that is for the next turn of the loop. */
void disk_dispatch(struct disk *disk) {
    uint32_t n_left = 2 * disk->n_entries;
    uint64_t n_wakeups;
    ssize_t n = read(disk->event_fd, &n_wakeups, sizeof(n_wakeups)); /* first: what comes after it makes it readable */

    (void)n;
    for (uint32_t q = 0; q < disk->n_queues; q++) {
        struct disk_queue *queue = disk->queues[q];
        uint64_t id;
        int result;

        while (n_left > 0 && queue->table->reap(queue, &id, &result)) {
            n_left--;
            on_completion(disk, id, result);
        }
    }
    if (n_left == 0)
        make_readable(disk);
}

static void make_late(struct disk *disk, uint32_t idx) {
    struct disk_op *op = disk->entries[idx].op;

    op->is_late = true;
    disk->stats.n_late++;
    disk->stats.n_out_late++;
    disk->stats.out_late_bytes += has_bytes(op) ? op->bytes : 0;
    cancel(disk, idx);
    if (op->late != NULL)
        op->late(op);
}

static uint64_t next_tick_us(const struct disk *disk, uint64_t now_us) {
    uint64_t next_us = now_us + SAFETY_TICK_US;

    for (uint32_t i = 0; i < disk->options.n_ops_max; i++) {
        const struct entry *entry = &disk->entries[i];

        if (entry->is_out && !entry->op->is_late && entry->op->own.deadline_us < next_us)
            next_us = entry->op->own.deadline_us;
    }
    return disk->stats.n_out > 0 ? next_us : 0;
}

uint64_t disk_tick(struct disk *disk, uint64_t now_us) {
    disk_dispatch(disk);
    for (uint32_t i = 0; i < disk->options.n_ops_max; i++) {
        const struct entry *entry = &disk->entries[i];

        if (entry->is_out && !entry->op->is_late && entry->op->own.deadline_us <= now_us)
            make_late(disk, i);
    }
    return next_tick_us(disk, now_us);
}

uint64_t disk_send(struct disk *disk, uint64_t now_us) {
    for (uint32_t q = 0; q < disk->n_queues; q++)
        if (disk->queues[q]->table->send != NULL)
            disk->queues[q]->table->send(disk->queues[q]);
    return next_tick_us(disk, now_us);
}

void disk_stats(const struct disk *disk, struct disk_stats *ret_stats) {
    *ret_stats = disk->stats;
    for (uint32_t i = 0; i < disk->options.n_segments_max; i++)
        ret_stats->n_segments += disk->segments[i].state == SEGMENT_READY;
    ret_stats->has_registered_files = disk->facts.has_registered_files;
    ret_stats->has_registered_buffers = disk->facts.has_registered_buffers;
    ret_stats->buffers_error = disk->facts.buffers_error;
}

bool disk_forget_buffers(struct disk *disk) {
    for (uint32_t q = 0; disk->stats.n_out == 0 && q < disk->n_queues; q++)
        if (disk->queues[q]->table->forget_buffers)
            disk->queues[q]->table->forget_buffers(disk->queues[q]);
    return !disk->facts.has_registered_buffers;
}

/* ---- open and close ---------------------------------------------------------------------------------------------- */

static void disk_free(struct disk *disk) {
    for (uint32_t q = 0; q < disk->n_queues; q++)
        disk->queues[q]->table->close(disk->queues[q]);
    for (uint32_t i = 0; disk->segments != NULL && i < disk->options.n_segments_max; i++) {
        if (disk->segments[i].fd >= 0)
            close(disk->segments[i].fd);
    }
    if (disk->event_fd >= 0)
        close(disk->event_fd);
    kv_pool_deinit(&disk->free_ops);
    kv_pool_deinit(&disk->free_drops);
    free(disk->segments);
    free(disk->entries);
    free(disk);
}

static void add_queue(struct disk *disk, struct disk_queue *queue) {
    if (disk->options.wrap != NULL)
        queue = disk->options.wrap(disk->options.wrap_user, queue);
    disk->queues[disk->n_queues++] = queue;
}

static int open_queues(struct disk *disk) {
    const struct disk_options *options = &disk->options;
    struct disk_queue *queue;
    int r;

    disk->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (disk->event_fd < 0)
        return -errno;
    if (!options->no_ring) {
        r = disk_uring_open(options, disk->n_entries, disk->event_fd, &disk->facts, &queue);
        disk->stats.ring_error = r;
        disk->stats.is_ring = r == 0;
        if (r == 0)
            add_queue(disk, queue);
    }
    r = disk_work_open(options, disk->n_entries, disk->event_fd, &queue);
    if (r == 0)
        add_queue(disk, queue);
    return r;
}

static int check_options(const struct disk_options *options) {
    if (options->folder == NULL || options->work == NULL || options->deadline_us == 0)
        return -EINVAL;
    if (options->segment_bytes == 0 || options->segment_bytes % DISK_ALIGN_MIN != 0 ||
        options->segment_bytes > SEGMENT_BYTES_MAX)
        return -EINVAL;
    if (options->n_segments_max == 0 || options->n_ops_max == 0 || options->n_ops_max > OPS_MAX)
        return -EINVAL;
    return 0;
}

static int open_segments(struct disk *disk) {
    struct found found = {.disk = disk};
    uint32_t alignment = disk->options.no_direct ? 0 : disk_folder_alignment(disk->options.folder);
    int r;

    disk->stats.is_direct = alignment > 0;
    disk->alignment = alignment > 0 ? alignment : DISK_ALIGN_MIN;
    r = disk_folder_list(disk->options.folder, on_name, &found);
    return r != 0 ? r : found.error;
}

int disk_open(const struct disk_options *options, struct disk **ret_disk) {
    struct disk *disk;
    int r = check_options(options);

    if (r != 0)
        return r;
    disk = calloc(1, sizeof(*disk));
    if (disk == NULL)
        return -ENOMEM;
    disk->options = *options;
    disk->event_fd = -1;
    disk->n_entries = 2 * options->n_ops_max;
    disk->entries = calloc(disk->n_entries, sizeof(*disk->entries));
    disk->segments = calloc(options->n_segments_max, sizeof(*disk->segments));
    r = disk->entries == NULL || disk->segments == NULL ? -ENOMEM : 0;
    if (r == 0)
        r = kv_pool_init(&disk->free_ops, options->n_ops_max, 0);
    if (r == 0)
        r = kv_pool_init(&disk->free_drops, options->n_ops_max, options->n_ops_max);
    for (uint32_t i = 0; disk->segments != NULL && i < options->n_segments_max; i++)
        disk->segments[i].fd = -1;
    if (r == 0)
        r = open_queues(disk);
    if (r == 0)
        r = open_segments(disk);
    if (r != 0) {
        disk_free(disk);
        return r;
    }
    *ret_disk = disk;
    return 0;
}

uint32_t disk_close(struct disk *disk) {
    uint32_t n_out;

    for (uint32_t i = 0; i < disk->n_entries; i++) {
        struct entry *entry = &disk->entries[i];

        if (!entry->is_out)
            continue;
        if (entry->op != NULL && !entry->op->is_late)
            disk_cancel(disk, entry->op);
        else
            cancel(disk, i);
    }
    disk_dispatch(disk);
    n_out = disk->n_entries - disk->free_ops.n_free - disk->free_drops.n_free;
    if (n_out == 0)
        disk_free(disk);
    return n_out;
}
