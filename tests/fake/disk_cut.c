#include "disk_cut.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base.h"

enum { BLOCK_BYTES = 4096, OUT_MAX = 256 };

/* What a write left in a block, or, of the number 0, what it was when the file was last synced. */
struct version {
    uint32_t write; /* ascending */
    struct version *next;
    unsigned char bytes[BLOCK_BYTES];
};

struct block {
    uint32_t segment, number;
    struct version *versions; /* the oldest first; the first one is synced */
    struct block *next;       /* with the same hash */
};

struct out {
    struct disk_request request;
    uint32_t n_writes; /* of a sync: those that it covers */
};

struct disk_cut {
    struct disk_queue queue;
    struct disk_queue *inner; /* which is never asked for anything */
    uint64_t random;
    uint32_t n_calls, n_calls_max, n_writes, n_whole; /* writes; those of them that were done when it died */
    bool is_dead;
    struct out out[OUT_MAX];
    uint32_t n_out;
    struct {
        uint64_t id;
        int result;
    } cancelled[OUT_MAX];
    uint32_t n_cancelled;
    struct block *blocks[1024];
};

static void need(bool claim, const char *text) {
    if (!claim) {
        fprintf(stderr, "disk_cut: not so: %s\n", text);
        abort();
    }
}

static uint32_t below(struct disk_cut *cut, uint32_t n) {
    cut->random = cut->random * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((cut->random >> 33) % n);
}

/* ---- what is not synced ------------------------------------------------------------------------------------------- */

static struct block **chain_of(struct disk_cut *cut, uint32_t segment, uint32_t number) {
    return &cut->blocks[(segment * 7919 + number) % ARRAY_LEN(cut->blocks)];
}

static void add_version(struct block *block, uint32_t write, const void *bytes) {
    struct version *version = malloc(sizeof *version), **at = &block->versions;

    need(version != NULL, "there is memory");
    version->write = write;
    version->next = NULL;
    memcpy(version->bytes, bytes, BLOCK_BYTES);
    while (*at)
        at = &(*at)->next;
    *at = version;
}

/* The block as the disk's user will read it from now on. The file holds what it was before. */
static void note_block(struct disk_cut *cut, const struct disk_request *request, uint32_t at) {
    uint32_t number = (uint32_t)((request->offset + at) / BLOCK_BYTES);
    struct block **chain = chain_of(cut, request->segment, number), *block = *chain;

    while (block && (block->segment != request->segment || block->number != number))
        block = block->next;
    if (!block) {
        _Alignas(BLOCK_BYTES) unsigned char before[BLOCK_BYTES];

        block = calloc(1, sizeof *block);
        need(block != NULL, "there is memory");
        need(pread(request->fd, before, BLOCK_BYTES, (off_t)(request->offset + at)) == BLOCK_BYTES, "a block is read");
        *block = (struct block){.segment = request->segment, .number = number, .next = *chain};
        *chain = block;
        add_version(block, 0, before);
    }
    add_version(block, cut->n_writes, (const unsigned char *)request->buffer + at);
}

static void note_write(struct disk_cut *cut, const struct disk_request *request) {
    need((request->offset | request->bytes) % BLOCK_BYTES == 0, "a write is of whole blocks");
    cut->n_writes++;
    for (uint32_t at = 0; at < request->bytes; at += BLOCK_BYTES)
        note_block(cut, request, at);
}

/* Older ones than the last of the first n_writes are gone for good. All of them: there is no such file any more. */
static void settle(struct disk_cut *cut, uint32_t segment, uint32_t n_writes) {
    for (size_t i = 0; i < ARRAY_LEN(cut->blocks); i++)
        for (struct block **at = &cut->blocks[i]; *at;) {
            struct block *block = *at;

            while (block->segment == segment && block->versions &&
                   (n_writes == UINT32_MAX || (block->versions->next && block->versions->next->write <= n_writes))) {
                struct version *version = block->versions;

                block->versions = version->next;
                free(version);
            }
            if (block->versions) {
                at = &block->next;
                continue;
            }
            *at = block->next;
            free(block);
        }
}

/* ---- calls -------------------------------------------------------------------------------------------------------- */

static int make(struct disk_cut *cut, const struct out *out) {
    const struct disk_request *request = &out->request;

    if (request->call == DISK_CALL_WRITE)
        note_write(cut, request);
    else if (request->call == DISK_CALL_SYNC)
        settle(cut, request->segment, out->n_writes);
    else if (request->call == DISK_CALL_CREATE || request->call == DISK_CALL_REMOVE)
        settle(cut, request->segment, UINT32_MAX);
    return disk_request_run(request);
}

/* A file that was under construction: what a crash leaves of it. */
static void leave_unfinished(const struct disk_request *request) {
    char name[40];
    int fd;

    snprintf(name, sizeof name, "segment-%08u.new", request->segment);
    fd = openat(request->folder->fd, name, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    need(fd >= 0 && ftruncate(fd, request->bytes / 2) == 0, "a file is begun");
    close(fd);
}

/* What is on its way when all ends. A write is cut later; a sync says nothing. */
static void die(struct disk_cut *cut) {
    cut->is_dead = true;
    cut->n_whole = cut->n_writes;
    for (uint32_t i = 0; i < cut->n_out; i++) {
        const struct disk_request *request = &cut->out[i].request;
        uint32_t choice = below(cut, 3);

        if (request->call == DISK_CALL_WRITE)
            note_write(cut, request);
        else if (request->call == DISK_CALL_CREATE && choice == 0)
            leave_unfinished(request);
        else if (request->call == DISK_CALL_CREATE && choice == 1)
            close(make(cut, &cut->out[i]));
        else if (request->call == DISK_CALL_REMOVE && choice == 0) { /* its descriptor stays the disk's */
            settle(cut, request->segment, UINT32_MAX);
            need(disk_segment_remove(request->folder, request->segment) == 0, "a file goes");
        }
    }
}

static int cut_start(struct disk_queue *queue, const struct disk_request *request) {
    struct disk_cut *cut = container_of(queue, struct disk_cut, queue);

    need(cut->n_out < OUT_MAX, "there is room for a call");
    cut->out[cut->n_out++] = (struct out){.request = *request, .n_writes = cut->n_writes};
    return 0;
}

static void cut_cancel(struct disk_queue *queue, uint64_t id) {
    struct disk_cut *cut = container_of(queue, struct disk_cut, queue);

    for (uint32_t i = 0; i < cut->n_out; i++)
        if (cut->out[i].request.id == id) {
            need(cut->n_cancelled < OUT_MAX, "there is room for an answer");
            cut->cancelled[cut->n_cancelled].id = id;
            cut->cancelled[cut->n_cancelled++].result = -ECANCELED;
            cut->out[i] = cut->out[--cut->n_out];
            return;
        }
}

/* Mostly one, whichever, then mostly another. */
static bool cut_reap(struct disk_queue *queue, uint64_t *ret_id, int *ret_result) {
    struct disk_cut *cut = container_of(queue, struct disk_cut, queue);
    uint32_t i;

    if (cut->n_cancelled > 0) {
        *ret_id = cut->cancelled[--cut->n_cancelled].id;
        *ret_result = cut->cancelled[cut->n_cancelled].result;
        return true;
    }
    if (cut->is_dead || cut->n_out == 0 || below(cut, 4) == 0)
        return false;
    if (cut->n_calls_max != 0 && cut->n_calls == cut->n_calls_max) {
        die(cut);
        return false;
    }
    i = below(cut, cut->n_out);
    cut->n_calls++;
    *ret_id = cut->out[i].request.id;
    *ret_result = make(cut, &cut->out[i]);
    cut->out[i] = cut->out[--cut->n_out];
    return true;
}

static void cut_set_file(struct disk_queue *queue, uint32_t segment, int fd) {
    (void)queue, (void)segment, (void)fd;
}

static void cut_close(struct disk_queue *queue) {
    struct disk_cut *cut = container_of(queue, struct disk_cut, queue);

    need(cut->n_out == 0 && cut->n_cancelled == 0, "nothing is out");
    cut->inner->table->close(cut->inner);
    cut->inner = NULL;
}

static const struct disk_queue_table cut_table = {
    .start = cut_start,
    .cancel = cut_cancel,
    .reap = cut_reap,
    .set_file = cut_set_file,
    .close = cut_close,
};

struct disk_queue *disk_cut_wrap(void *user, struct disk_queue *queue) {
    struct disk_cut *cut = user;

    need(cut->inner == NULL, "there is one queue: no ring");
    cut->queue.table = &cut_table;
    cut->inner = queue;
    return &cut->queue;
}

/* ---- what a test says --------------------------------------------------------------------------------------------- */

struct disk_cut *disk_cut_new(uint64_t seed, uint32_t n_calls_max) {
    struct disk_cut *cut = calloc(1, sizeof *cut);

    need(cut != NULL, "there is memory");
    cut->random = seed;
    cut->n_calls_max = n_calls_max;
    return cut;
}

void disk_cut_free(struct disk_cut *cut) {
    for (size_t i = 0; i < ARRAY_LEN(cut->blocks); i++)
        while (cut->blocks[i])
            settle(cut, cut->blocks[i]->segment, UINT32_MAX);
    free(cut);
}

bool disk_cut_is_dead(const struct disk_cut *cut) {
    return cut->is_dead;
}

uint32_t disk_cut_n_calls(const struct disk_cut *cut) {
    return cut->n_calls;
}

static uint32_t mix(uint64_t seed, uint32_t a, uint32_t b) {
    uint64_t x = (seed ^ ((uint64_t)a << 32 | b)) * UINT64_C(0x9e3779b97f4a7c15);

    x = (x ^ x >> 32) * UINT64_C(0xbf58476d1ce4e5b9);
    return (uint32_t)(x >> 40);
}

static bool stays(const struct disk_cut *cut, enum disk_cut_fall fall, uint32_t write, uint32_t number) {
    switch (fall) {
    case DISK_CUT_KILL:
        return write <= cut->n_whole || mix(cut->random, write, number) % 2;
    case DISK_CUT_WHOLE:
        return mix(cut->random, write, 0) % 2;
    case DISK_CUT_TORN:
        return mix(cut->random, write, number) % 2;
    default:
        return false;
    }
}

void disk_cut_fall(struct disk_cut *cut, const struct disk_folder *folder, enum disk_cut_fall fall) {
    for (size_t i = 0; i < ARRAY_LEN(cut->blocks); i++)
        for (const struct block *block = cut->blocks[i]; block; block = block->next) {
            const struct version *left = block->versions;
            char name[32];
            int fd;

            for (const struct version *version = left->next; version; version = version->next)
                if (stays(cut, fall, version->write, block->number))
                    left = version;
            snprintf(name, sizeof name, "segment-%08u", block->segment);
            fd = openat(folder->fd, name, O_WRONLY | O_CLOEXEC);
            need(fd >= 0, "a file that was written is there");
            need(pwrite(fd, left->bytes, BLOCK_BYTES, (off_t)block->number * BLOCK_BYTES) == BLOCK_BYTES,
                 "a block is written");
            close(fd);
        }
}
