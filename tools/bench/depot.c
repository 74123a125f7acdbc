#include "depot.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base.h"
#include "bench.h"
#include "crew.h"
#include "scratch.h"
#include "tape.h"

#define DEADLINE_US (UINT64_C(60) * 1000 * 1000) /* a busy machine is no reason to give a page up */
enum { SIDE_MAX = 64, UID = 1 };

struct page { /* one slot of one group */
    uint32_t chain, page;
    enum kv_group group;
};

struct depot {
    struct depot_options options;
    char path[SCRATCH_PATH_BYTES];
    struct disk_folder folder;
    const struct backend *backend;
    struct device *device;
    struct crew *crew;
    struct kv_work work;
    struct kv_shelf *shelf;
    struct kv_vault *vault;
    struct disk_buffer buffers[KV_GROUP_N];
    uint32_t n_buffers;
    struct tape tape;
    struct kv_key *keys; /* [n_chains, n_pages] */
    int32_t *tokens;     /* [n_chains, n_pages, PAGE_TOKENS] */
    struct page *pages;  /* all slots, as they are read */
    size_t n_pages;
    struct { /* a reading of all */
        struct side {
            struct kv_vault_read read;
            struct depot *depot;
            bool is_busy;
        } sides[SIDE_MAX];
        size_t at;
        int n_side, n_out, error;
    } reading;
};

static uint64_t now_us(void) {
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_nsec / 1000;
}

static struct kv_page_name name_of(const struct depot *depot, uint32_t chain, uint32_t page) {
    size_t at = (size_t)chain * depot->options.n_pages + page;

    return (struct kv_page_name){.key = depot->keys[at],
                                 .page_idx = page,
                                 .tokens = depot->tokens + at * PAGE_TOKENS,
                                 .parent = page > 0 ? &depot->keys[at - 1] : NULL,
                                 .uid = UID};
}

/* ---- turns ---------------------------------------------------------------------------------------------------------- */

/* One turn of a loop, as the daemon's: what has come, then what there is to do. */
static void turn(struct depot *depot, bool may_wait) {
    struct pollfd fds[] = {{.fd = kv_vault_fd(depot->vault), .events = POLLIN},
                           {.fd = crew_fd(depot->crew), .events = POLLIN}};

    poll(fds, ARRAY_LEN(fds), may_wait ? 10 : 0);
    kv_vault_dispatch(depot->vault);
    crew_dispatch(depot->crew);
    kv_vault_turn(depot->vault);
}

static void settle(struct depot *depot) {
    struct kv_vault_stats stats;

    do {
        turn(depot, true);
        kv_vault_stats(depot->vault, &stats);
    } while (!kv_vault_is_quiet(depot->vault) || stats.n_to_blank > 0);
}

/* ---- open, close ---------------------------------------------------------------------------------------------------- */

static int make_chains(struct depot *depot) {
    const struct depot_options *o = &depot->options;
    size_t n = (size_t)o->n_chains * o->n_pages;
    struct kv_key root = {{1}};
    struct kv_hasher *hasher;
    int r;

    depot->keys = calloc(n, sizeof *depot->keys);
    depot->tokens = calloc(n * PAGE_TOKENS, sizeof *depot->tokens);
    depot->pages = calloc(n * KV_GROUP_N, sizeof *depot->pages);
    if (!depot->keys || !depot->tokens || !depot->pages)
        return -ENOMEM;
    r = kv_hasher_new(&hasher);
    if (r != 0)
        return r;
    for (size_t i = 0; i < n * PAGE_TOKENS; i++)
        depot->tokens[i] = (int32_t)(i * 2654435761u >> 17);
    for (uint32_t chain = 0; r == 0 && chain < o->n_chains; chain++)
        r = kv_key_chain(hasher, &root, name_of(depot, chain, 0).tokens, o->n_pages,
                         depot->keys + (size_t)chain * o->n_pages);
    kv_hasher_free(hasher);
    for (uint32_t chain = 0; chain < o->n_chains; chain++) { /* the state first, as a restore reads it */
        depot->pages[depot->n_pages++] = (struct page){chain, o->n_pages - 1, KV_TARGET_STATE};
        for (uint32_t page = 0; page < o->n_pages; page++)
            for (int g = 0; g < KV_GROUP_N; g++)
                if (g != KV_TARGET_STATE && o->group[g].payload_bytes > 0 && page + o->group[g].n_pages >= o->n_pages)
                    depot->pages[depot->n_pages++] = (struct page){chain, page, (enum kv_group)g};
    }
    return r;
}

static int open_shelf(struct depot *depot, uint32_t alignment) {
    const struct depot_options *o = &depot->options;
    struct kv_shelf_options shelf = {.backend = depot->backend, .device = depot->device, .alignment = alignment};
    int r;

    for (int g = 0; g < KV_GROUP_N; g++)
        if (o->group[g].payload_bytes > 0) {
            shelf.group[g].payload_bytes = o->group[g].payload_bytes;
            shelf.group[g].n_slots = o->n_chains * o->group[g].n_pages;
        }
    r = kv_shelf_open(&shelf, &depot->shelf);
    for (int g = 0; r == 0 && g < KV_GROUP_N; g++)
        if (kv_shelf_memory(depot->shelf, (enum kv_group)g, &depot->buffers[depot->n_buffers].start,
                            &depot->buffers[depot->n_buffers].bytes))
            depot->n_buffers++;
    return r;
}

static int open_vault(struct depot *depot) {
    const struct depot_options *o = &depot->options;
    struct kv_vault_options vault = {.folder = &depot->folder,
                                     .work = &depot->work,
                                     .shelf = depot->shelf,
                                     .buffers = depot->buffers,
                                     .n_buffers = depot->n_buffers,
                                     .store_id = {1},
                                     .disk_bytes = o->disk_bytes,
                                     .n_pages_max = o->n_pages,
                                     .deadline_us = DEADLINE_US,
                                     .now_us = now_us,
                                     .wrap = tape_wrap,
                                     .wrap_user = &depot->tape};
    int r;

    for (int g = 0; g < KV_GROUP_N; g++)
        if (o->group[g].payload_bytes > 0) {
            vault.group[g].slot_bytes = (uint32_t)kv_shelf_slot_bytes(depot->shelf, (enum kv_group)g);
            vault.group[g].share = 50;
        }
    r = kv_vault_open(&vault, &depot->vault);
    return r == 0 ? depot->tape.error : r;
}

/* Pages whose bytes are no zeros, so that a disk behind the disk does not save itself their writing. */
static int fill(struct depot *depot) {
    uint64_t word = 1;

    for (size_t i = 0; i < depot->n_pages; i++) {
        const struct page *page = &depot->pages[i];
        struct kv_page_name name = name_of(depot, page->chain, page->page);
        size_t bytes = depot->options.group[page->group].payload_bytes;
        uint32_t record;
        void *payload;
        int r = kv_shelf_reserve(depot->shelf, &name, page->group, &record, &payload);

        if (r != 0)
            return r < 0 ? r : -ENOBUFS;
        for (size_t at = 0; at + sizeof word <= bytes; at += sizeof word) {
            word = word * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
            memcpy((char *)payload + at, &word, sizeof word);
        }
        kv_shelf_filled(depot->shelf, record, page->group, format_checksum(payload, bytes));
    }
    return 0;
}

int depot_open(const struct depot_options *options, struct depot **ret_depot) {
    struct depot *depot = calloc(1, sizeof *depot);
    uint32_t alignment;
    int r;

    if (!depot)
        return -ENOMEM;
    depot->options = *options;
    depot->folder = (struct disk_folder){-1, -1};
    r = scratch_make(options->folder, depot->path);
    if (r != 0) {
        free(depot);
        return r;
    }
    r = disk_folder_open(depot->path, &depot->folder);
    alignment = r == 0 ? disk_folder_alignment(&depot->folder) : 0;
    if (r == 0 && alignment == 0)
        fprintf(stderr, "spillway-bench: kv: %s has no direct I/O: what is read may come from memory\n", depot->path);
    depot->backend = backend_find("cpu");
    if (r == 0)
        r = depot->backend->open(&(struct backend_options){.n_threads = 1}, &depot->device);
    if (r == 0)
        r = crew_open(options->n_workers, &depot->crew);
    if (r == 0) {
        depot->work = crew_work(depot->crew);
        r = make_chains(depot);
    }
    if (r == 0)
        r = open_shelf(depot, alignment > 0 ? alignment : DISK_ALIGN_MIN);
    if (r == 0)
        r = open_vault(depot);
    if (r == 0)
        r = fill(depot);
    if (r != 0) {
        fprintf(stderr, "spillway-bench: kv: %s: %s\n", depot->path, strerror(r < 0 ? -r : EBUSY));
        depot_close(depot);
        return r < 0 ? r : -EBUSY;
    }
    *ret_depot = depot;
    return 0;
}

void depot_close(struct depot *depot) {
    if (!depot)
        return;
    while (depot->vault && kv_vault_close(depot->vault) > 0) { /* what is out comes home, or a worker is at it */
        struct pollfd fd = {.fd = crew_fd(depot->crew), .events = POLLIN};

        poll(&fd, 1, 1);
        crew_dispatch(depot->crew);
    }
    kv_shelf_close(depot->shelf);
    tape_free(&depot->tape);
    crew_close(depot->crew);
    if (depot->device)
        depot->backend->close(depot->device);
    if (depot->folder.fd >= 0)
        disk_folder_close(&depot->folder);
    scratch_remove(depot->path);
    free(depot->keys);
    free(depot->tokens);
    free(depot->pages);
    free(depot);
}

/* ---- down ----------------------------------------------------------------------------------------------------------- */

struct waiting {
    struct kv_vault_flush flush;
    bool is_done;
    int result;
};

static void on_flushed(struct kv_vault_flush *flush, int result) {
    struct waiting *waiting = container_of(flush, struct waiting, flush);

    waiting->is_done = true;
    waiting->result = result;
}

static bool is_all_on_disk(const struct depot *depot) {
    for (size_t i = 0; i < depot->n_pages; i++) {
        struct kv_page_name name = name_of(depot, depot->pages[i].chain, depot->pages[i].page);

        if (!kv_vault_has(depot->vault, &name.key, name.page_idx, depot->pages[i].group))
            return false;
    }
    return true;
}

int depot_save(struct depot *depot, double *ret_seconds) {
    struct waiting waiting = {.flush = {.done = on_flushed}};
    double start;

    settle(depot);
    tape_start(&depot->tape);
    start = bench_now();
    for (uint32_t chain = 0; chain < depot->options.n_chains; chain++) {
        struct kv_page_name last = name_of(depot, chain, depot->options.n_pages - 1);

        kv_vault_save(depot->vault, kv_shelf_find(depot->shelf, &last), KV_VAULT_SAVE_MUST);
    }
    kv_vault_flush(depot->vault, &waiting.flush);
    for (bool may_wait = false; !waiting.is_done; may_wait = true)
        turn(depot, may_wait);
    *ret_seconds = bench_now() - start;
    tape_stop(&depot->tape);
    return waiting.result == 0 && !is_all_on_disk(depot) ? -EIO : waiting.result;
}

int depot_forget(struct depot *depot) {
    kv_vault_evict_bytes(depot->vault, UINT64_MAX);
    settle(depot);
    return 0;
}

/* ---- up ------------------------------------------------------------------------------------------------------------- */

static void read_some(struct depot *depot) {
    for (int i = 0; i < depot->reading.n_side; i++) {
        struct side *side = &depot->reading.sides[i];
        const struct page *page = &depot->pages[depot->reading.at];
        struct kv_page_name name;
        int r;

        if (side->is_busy || depot->reading.error != 0)
            continue;
        if (depot->reading.at == depot->n_pages)
            return;
        name = name_of(depot, page->chain, page->page);
        r = kv_vault_read(depot->vault, &name, page->group, &side->read);
        if (r == KV_VAULT_E_BUSY)
            return;
        if (r != 0) {
            depot->reading.error = r < 0 ? r : -ENOENT;
            return;
        }
        side->is_busy = true;
        depot->reading.n_out++;
        depot->reading.at++;
    }
}

static void on_read(struct kv_vault_read *read, int result) {
    struct side *side = container_of(read, struct side, read);
    struct depot *depot = side->depot;

    side->is_busy = false;
    depot->reading.n_out--;
    if (result != 0)
        depot->reading.error = result;
    read_some(depot);
}

int depot_read(struct depot *depot, int n_side, double *ret_seconds) {
    double start;

    settle(depot);
    kv_shelf_evict_bytes(depot->shelf, UINT64_MAX);
    depot->reading.at = 0;
    depot->reading.n_side = min_int(n_side, SIDE_MAX);
    depot->reading.error = 0;
    for (int i = 0; i < SIDE_MAX; i++)
        depot->reading.sides[i] = (struct side){.read = {.done = on_read}, .depot = depot};
    tape_start(&depot->tape);
    start = bench_now();
    read_some(depot);
    while (depot->reading.n_out > 0 || (depot->reading.at < depot->n_pages && depot->reading.error == 0)) {
        turn(depot, true);
        read_some(depot);
    }
    *ret_seconds = bench_now() - start;
    tape_stop(&depot->tape);
    return depot->reading.error;
}

/* ---- figures -------------------------------------------------------------------------------------------------------- */

int depot_play(struct depot *depot, double *ret_seconds) {
    struct kv_vault_stats stats;

    settle(depot);
    kv_vault_stats(depot->vault, &stats);
    return tape_play(&depot->tape, &depot->folder, stats.segment_bytes, stats.disk.is_direct, depot->buffers,
                     depot->n_buffers, ret_seconds);
}

int depot_checksum(struct depot *depot, double *ret_bytes_per_s) {
    double start = bench_now();
    uint64_t bytes = 0;

    for (size_t i = 0; i < depot->n_pages; i++) {
        const struct page *page = &depot->pages[i];
        struct kv_page_name name = name_of(depot, page->chain, page->page);
        size_t n = depot->options.group[page->group].payload_bytes;
        uint32_t record = kv_shelf_find(depot->shelf, &name);
        void *payload;

        if (!kv_shelf_has(depot->shelf, record, page->group))
            return -ENOENT;
        payload = kv_shelf_pin(depot->shelf, record, page->group);
        if (format_checksum(payload, n) != kv_shelf_checksum(depot->shelf, record, page->group))
            return -EBADMSG;
        kv_shelf_unpin(depot->shelf, record, page->group);
        bytes += n;
    }
    *ret_bytes_per_s = (double)bytes / (bench_now() - start);
    return 0;
}

uint64_t depot_bytes(const struct depot *depot) {
    return depot->tape.bytes;
}

int depot_depth(const struct depot *depot) {
    return depot->tape.depth;
}

uint64_t depot_payload_bytes(const struct depot *depot) {
    struct kv_vault_stats stats;
    uint64_t bytes = 0;

    kv_vault_stats(depot->vault, &stats);
    for (int g = 0; g < KV_GROUP_N; g++)
        bytes += stats.group[g].n_stored * depot->options.group[g].payload_bytes;
    return bytes;
}

void depot_stats(const struct depot *depot, struct kv_vault_stats *ret_stats) {
    kv_vault_stats(depot->vault, ret_stats);
}
