/* disk_rig: a disk in a folder of its own, with workers, a clock that the test moves, and operations that note their end.
 * For cmocka. */
#pragma once
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "base.h"
#include "disk.h"
#include "disk_faults.h"
#include "workers.h"

enum { RIG_SEGMENT_BYTES = 1 << 20, RIG_N_SEGMENTS = 4, RIG_N_OPS = 16, RIG_DEADLINE_US = 1000000, RIG_N_BUFFERS = 32 };
enum { RIG_BUFFER_BYTES = 64 << 10 };

struct disk_rig {
    char path[64]; /* of the folder, which lies in a temporary one */
    struct disk_folder folder;
    struct workers *workers;
    struct kv_work work;
    struct disk_faults *faults;
    struct disk *disk;
    struct disk_buffer area; /* RIG_N_BUFFERS * RIG_BUFFER_BYTES */
    struct disk_options options;
    uint64_t now_us;
};

struct rig_op {
    struct disk_op op;
    uint32_t n_done, n_late;
    uint32_t order; /* which one it was to be done */
    uint32_t *counter;
};

static inline void rig_on_done(struct disk_op *op) {
    struct rig_op *mine = container_of(op, struct rig_op, op);

    mine->n_done++;
    if (mine->counter != NULL)
        mine->order = (*mine->counter)++;
}

static inline void rig_on_late(struct disk_op *op) {
    container_of(op, struct rig_op, op)->n_late++;
}

static inline char *rig_buffer(const struct disk_rig *rig, uint32_t idx) {
    return (char *)rig->area.start + (size_t)idx * RIG_BUFFER_BYTES;
}

/* Where the real file system of this machine is, or one in memory. */
static inline void rig_make_folder(struct disk_rig *rig, const char *under) {
    memset(rig, 0, sizeof(*rig));
    snprintf(rig->path, sizeof(rig->path), "%s/disk-XXXXXX", under);
    assert_non_null(mkdtemp(rig->path));
    strcat(rig->path, "/kv"); /* NOLINT: it fits */
    assert_int_equal(disk_folder_open(rig->path, &rig->folder), 0);
    rig->workers = workers_new(4);
    rig->work = workers_interface(rig->workers);
    rig->area.bytes = (size_t)RIG_N_BUFFERS * RIG_BUFFER_BYTES;
    rig->area.start = aligned_alloc(RIG_BUFFER_BYTES, rig->area.bytes);
    assert_non_null(rig->area.start);
    memset(rig->area.start, 0, rig->area.bytes);
    rig->now_us = 1000;
    rig->options = (struct disk_options){.segment_bytes = RIG_SEGMENT_BYTES,
                                         .n_segments_max = RIG_N_SEGMENTS,
                                         .n_ops_max = RIG_N_OPS,
                                         .deadline_us = RIG_DEADLINE_US,
                                         .n_buffers = 1};
}

static inline void rig_open_disk(struct disk_rig *rig) {
    rig->options.folder = &rig->folder;
    rig->options.work = &rig->work;
    rig->options.buffers = &rig->area;
    assert_int_equal(disk_open(&rig->options, &rig->disk), 0);
}

static inline struct disk_stats rig_stats(const struct disk_rig *rig) {
    struct disk_stats stats;

    disk_stats(rig->disk, &stats);
    return stats;
}

/* One turn of a loop: what finishes shows on the descriptor. */
static inline void rig_turn(struct disk_rig *rig, int wait_ms) {
    struct pollfd pollfd = {.fd = disk_fd(rig->disk), .events = POLLIN};

    workers_dispatch(rig->workers);
    if (rig->faults != NULL)
        wait_ms = wait_ms > 1 ? 1 : wait_ms; /* faults answer without a wake-up */
    if (poll(&pollfd, 1, wait_ms) > 0 || rig->faults != NULL)
        disk_dispatch(rig->disk);
}

static inline void rig_close_disk(struct disk_rig *rig) {
    for (int i = 0; disk_close(rig->disk) > 0; i++) {
        assert_true(i < 10000);
        workers_dispatch(rig->workers);
        usleep(1000);
    }
    rig->disk = NULL;
}

static inline void rig_remove(void *user, const char *name) {
    struct disk_rig *rig = user;

    assert_int_equal(unlinkat(rig->folder.fd, name, AT_REMOVEDIR) == 0 || unlinkat(rig->folder.fd, name, 0) == 0, 1);
}

static inline void rig_free(struct disk_rig *rig) {
    if (rig->disk != NULL)
        rig_close_disk(rig);
    if (rig->faults != NULL)
        disk_faults_free(rig->faults);
    workers_free(rig->workers);
    disk_folder_list(&rig->folder, rig_remove, rig);
    unlinkat(rig->folder.fd, "lock", 0);
    disk_folder_close(&rig->folder);
    rmdir(rig->path);
    *strrchr(rig->path, '/') = '\0';
    assert_int_equal(rmdir(rig->path), 0); /* nothing under construction was left behind */
    free(rig->area.start);
}

/* ---- operations -------------------------------------------------------------------------------------------------- */

static inline struct rig_op rig_op(enum disk_op_kind kind, uint32_t segment) {
    return (struct rig_op){.op = {.kind = kind, .segment = segment, .done = rig_on_done, .late = rig_on_late}};
}

static inline struct rig_op rig_transfer(enum disk_op_kind kind, uint32_t segment, uint64_t offset, void *buffer,
                                         uint32_t bytes) {
    struct rig_op op = rig_op(kind, segment);

    op.op.offset = offset;
    op.op.buffer = buffer;
    op.op.bytes = bytes;
    return op;
}

static inline void rig_submit(struct disk_rig *rig, struct rig_op *op) {
    assert_int_equal(disk_submit(rig->disk, &op->op, rig->now_us), 0);
    assert_int_equal(op->n_done, 0); /* never from inside submit */
}

static inline int rig_wait(struct disk_rig *rig, struct rig_op *op) {
    for (int i = 0; op->n_done == 0; i++) {
        assert_true(i < 10000);
        rig_turn(rig, 5);
    }
    assert_int_equal(op->n_done, 1);
    return op->op.result;
}

static inline int rig_do(struct disk_rig *rig, struct rig_op op) {
    rig_submit(rig, &op);
    return rig_wait(rig, &op);
}

static inline void rig_fill(char *buffer, size_t bytes, uint32_t seed) {
    for (size_t i = 0; i < bytes; i++)
        buffer[i] = (char)((i * 2654435761u + seed * 40503u) >> 7);
}
