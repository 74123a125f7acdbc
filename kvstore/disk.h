/* disk: reads, writes and syncs of segment files that finish later. Owns the operations while they are out, the open
 * segments and what the kernel was told of buffers. Knows no slots, keys or formats, and decides no policy.
 *
 * An operation is done when all its bytes are: never credited for less. It is tried again after EINTR and EAGAIN, once for
 * the rest of a short one, and once without direct I/O after EINVAL. After its deadline it is cancelled, but its buffer is
 * the kernel's until done() comes, which may be never: late() is for those who must not wait that long.
 *
 *   submit --> OUT --complete--> done(result)
 *               \--deadline--> late() --comes home--> done(0 or -ETIMEDOUT)
 *
 * Through io_uring, or where the kernel refuses it through blocking calls on the work interface. One thread makes all
 * calls, also open. Only open and close block; allocates in open only. Callbacks come out of dispatch, tick and close. */
#pragma once
#include "disk_folder.h"
#include "work.h"

struct disk;
struct disk_queue;

enum { DISK_E_FULL = 1 };

enum disk_op_kind {
    DISK_READ,
    DISK_WRITE,
    DISK_SYNC,           /* the data of all writes to that segment that were done before */
    DISK_SEGMENT_ADD,    /* makes it; when done it is preallocated, durable and may be used */
    DISK_SEGMENT_REMOVE, /* -EBUSY if anything is out on it; from now on it does not exist */
};

/* Embedded by the caller and left alone by it from submit until done. */
struct disk_op {
    enum disk_op_kind kind;
    uint32_t segment;
    uint64_t offset; /* these three for reads and writes, multiples of the alignment if the disk is direct */
    void *buffer;
    uint32_t bytes;
    uint64_t deadline_us;           /* absolute; 0: the disk's default, from submit on */
    void (*late)(struct disk_op *); /* may be NULL; at most once, before done */
    void (*done)(struct disk_op *); /* once; may submit again */
    int result; /* in done: 0 or -errno. -EIO: also for bytes that did not come; -ETIMEDOUT; -ECANCELED */
    bool is_late;

    struct { /* the disk's */
        uint64_t id;
        uint64_t deadline_us;
        uint32_t n_done; /* bytes */
        uint8_t n_retries;
        bool is_rest, is_buffered, is_cancelled;
    } own;
};

struct disk_buffer {
    void *start;
    size_t bytes;
};

struct disk_options {
    const struct disk_folder *folder; /* both outlive the disk */
    const struct kv_work *work;
    uint64_t segment_bytes; /* multiple of DISK_ALIGN_MIN, <= 1 GiB */
    uint32_t n_segments_max;
    uint32_t n_ops_max; /* 1..4096 */
    uint64_t deadline_us;
    const struct disk_buffer *buffers; /* whence and whither most operations go: registered if the limits allow */
    uint32_t n_buffers;
    bool no_ring, no_direct;

    /* For faults: puts another queue before each of the disk's own. NULL: none. */
    struct disk_queue *(*wrap)(void *user, struct disk_queue *queue);
    void *wrap_user;
};

/* Opens the segments found in the folder. -EINVAL for options that cannot work, or what broke. */
int disk_open(const struct disk_options *options, struct disk **ret_disk);

/* Cancels what is out and takes what has come home. 0: all is, and the disk is gone. Otherwise the number of operations
 * that the kernel still owns: try again later, or leave them, their buffers and the disk as they are until the process
 * ends. */
uint32_t disk_close(struct disk *disk);

/* 0: done() will come. DISK_E_FULL: as many are out as may be. -ENOENT: no such segment; -EEXIST for an add; -EBUSY;
 * -EINVAL for a range or alignment that cannot be; or what the kernel says. */
int disk_submit(struct disk *disk, struct disk_op *op, uint64_t now_us);

/* Asks for an operation that is out to come home soon: with -ECANCELED, or with its result if it was faster. */
void disk_cancel(struct disk *disk, struct disk_op *op);

/* Readable when dispatch has something to do. */
int disk_fd(const struct disk *disk);
void disk_dispatch(struct disk *disk);

/* Dispatches, then looks at the deadlines. Returns when to call it next, at the latest; 0: not before the next submit. */
uint64_t disk_tick(struct disk *disk, uint64_t now_us);

/* Sends what was submitted, all at once; without this the next dispatch does, for which the descriptor is readable. Calls
 * nobody back. Returns as disk_tick(). */
uint64_t disk_send(struct disk *disk, uint64_t now_us);

/* From now on the kernel holds no buffer but those of operations that are out. False: some are out now, or it does not let go. */
bool disk_forget_buffers(struct disk *disk);

bool disk_segment_exists(const struct disk *disk, uint32_t segment);

/* What addresses, offsets and lengths must be multiples of; DISK_ALIGN_MIN if the disk is not direct. */
uint32_t disk_alignment(const struct disk *disk);

struct disk_stats {
    uint64_t n_done[DISK_SEGMENT_REMOVE + 1]; /* without error */
    uint64_t n_failed[DISK_SEGMENT_REMOVE + 1];
    uint64_t read_bytes, written_bytes; /* of those without error */
    uint64_t n_short, n_retries, n_late, n_cancelled;
    uint64_t n_unknown;         /* completions that nobody waits for: foreign, or a second one */
    uint32_t n_out, n_out_late; /* now */
    uint64_t out_late_bytes;    /* in quarantine: buffers that the kernel holds past the deadline */
    uint32_t n_segments;
    uint32_t n_segments_refused; /* at open: named as ours, but too many, of another size or not ours alone */
    bool is_direct, is_ring, has_registered_files, has_registered_buffers;
    int ring_error, buffers_error; /* why not: -errno; 0 if it was not tried */
};
void disk_stats(const struct disk *disk, struct disk_stats *ret_stats);
