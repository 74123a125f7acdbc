/* vault_rig: a vault over a shelf, real files, workers and a clock that the test moves; and chains of pages whose bytes
 * follow from their keys. Its loop turns only when a loop would: when the descriptor is readable, a worker is done, or the
 * time has come that the vault named. For cmocka. */
#pragma once
#include "disk_rig.h"
#include "fast_folder.h"
#include "key.h"
#include "scrub.h"
#include "vault.h"

enum { VR_PAGES_MAX = 96, VR_PAYLOAD = 3 * 4096, VR_SEGMENT = FORMAT_SEGMENT_BYTES_MIN, VR_DEADLINE_US = 1000000 };

struct vault_rig {
    char path[64]; /* of the folder, which lies in a temporary one */
    struct disk_folder folder;
    struct workers *workers;
    struct kv_work work;
    struct disk_faults *faults; /* NULL: none, and the loop waits for events */
    const struct backend *backend;
    struct device *device;
    struct kv_hasher *hasher;
    struct kv_shelf_options shelf_options;
    struct kv_shelf *shelf;
    struct kv_vault_options options;
    struct disk_buffer buffers[KV_GROUP_N];
    struct kv_vault *vault;
    struct kv_scrub *scrub; /* NULL: none */
    uint64_t next_us;       /* when the vault wants its next turn */
    bool is_asked;          /* since the last turn something was called */
};

struct vault_chain {
    uint32_t n_pages, uid;
    struct kv_key keys[VR_PAGES_MAX];
    int32_t tokens[VR_PAGES_MAX * PAGE_TOKENS];
};

static uint64_t vr_clock_us;

static inline uint64_t vr_now_us(void) {
    return vr_clock_us;
}

/* ---- open and close -------------------------------------------------------------------------------------------------- */

/* With slots on the shelf and the disk for target pages, states and full draft pages. */
static inline void vr_init_in(struct vault_rig *rig, const char *under) {
    memset(rig, 0, sizeof *rig);
    vr_clock_us = 1000000;
    snprintf(rig->path, sizeof rig->path, "%s/vault-XXXXXX", under);
    assert_non_null(mkdtemp(rig->path));
    strcat(rig->path, "/kv"); /* NOLINT: it fits */
    assert_int_equal(disk_folder_open(rig->path, &rig->folder), 0);
    rig->workers = workers_new(2);
    rig->work = workers_interface(rig->workers);
    rig->backend = backend_find("cpu");
    assert_int_equal(rig->backend->open(&(struct backend_options){.n_threads = 1}, &rig->device), 0);
    assert_int_equal(kv_hasher_new(&rig->hasher), 0);
    rig->shelf_options =
        (struct kv_shelf_options){.backend = rig->backend, .device = rig->device, .alignment = FORMAT_ALIGN_MIN};
    for (int g = 0; g < KV_GROUP_N; g++) {
        static const uint32_t n_slots[KV_GROUP_N] = {
            [KV_TARGET_FULL] = 64, [KV_TARGET_STATE] = 8, [KV_DRAFT_FULL] = 64};
        static const uint32_t shares[KV_GROUP_N] = {
            [KV_TARGET_FULL] = 50, [KV_TARGET_STATE] = 20, [KV_DRAFT_FULL] = 25, [KV_DRAFT_SLIDING] = 5};

        rig->shelf_options.group[g].payload_bytes = n_slots[g] > 0 ? VR_PAYLOAD : 0;
        rig->shelf_options.group[g].n_slots = n_slots[g];
        rig->options.group[g].share = shares[g];
    }
    rig->options.disk_bytes = (uint64_t)8 * VR_SEGMENT;
    rig->options.n_pages_max = VR_PAGES_MAX;
    rig->options.n_pages_min = 1;
    rig->options.deadline_us = VR_DEADLINE_US;
    rig->options.now_us = vr_now_us;
    memset(rig->options.store_id, 0x51, sizeof rig->options.store_id);
    memset(rig->options.fingerprint, 0xf1, sizeof rig->options.fingerprint);
    memset(rig->options.drafter, 0xd1, sizeof rig->options.drafter);
}

static inline void vr_init(struct vault_rig *rig) {
    vr_init_in(rig, fast_folder());
}

static inline void vr_open_shelf(struct vault_rig *rig) {
    rig->options.n_buffers = 0;
    assert_int_equal(kv_shelf_open(&rig->shelf_options, &rig->shelf), 0);
    for (int g = 0; g < KV_GROUP_N; g++) {
        struct disk_buffer *buffer = &rig->buffers[rig->options.n_buffers];

        rig->options.group[g].slot_bytes = (uint32_t)kv_shelf_slot_bytes(rig->shelf, (enum kv_group)g);
        if (kv_shelf_memory(rig->shelf, (enum kv_group)g, &buffer->start, &buffer->bytes))
            rig->options.n_buffers++;
    }
}

/* -errno for a vault that does not open; then there is none. */
static inline int vr_open_vault(struct vault_rig *rig) {
    int r;

    rig->options.folder = &rig->folder;
    rig->options.work = &rig->work;
    rig->options.shelf = rig->shelf;
    rig->options.buffers = rig->buffers;
    r = kv_vault_open(&rig->options, &rig->vault);
    rig->next_us = 0;
    rig->is_asked = true;
    return r;
}

static inline void vr_open(struct vault_rig *rig) {
    vr_open_shelf(rig);
    assert_int_equal(vr_open_vault(rig), 0);
}

static inline void vr_open_scrub(struct vault_rig *rig, uint64_t bytes_per_s) {
    struct kv_scrub_options options = {
        .shelf = rig->shelf, .vault = rig->vault, .work = &rig->work, .bytes_per_s = bytes_per_s, .now_us = vr_now_us};

    assert_int_equal(kv_scrub_open(&options, &rig->scrub), 0);
}

static inline void vr_use_faults(struct vault_rig *rig) {
    rig->faults = disk_faults_new();
    rig->options.wrap = disk_faults_wrap;
    rig->options.wrap_user = rig->faults;
}

static inline void vr_close_vault(struct vault_rig *rig) {
    kv_scrub_close(rig->scrub);
    rig->scrub = NULL;
    for (int i = 0; rig->vault && kv_vault_close(rig->vault) > 0; i++) {
        assert_true(i < 10000);
        workers_dispatch(rig->workers);
        usleep(500);
    }
    rig->vault = NULL;
    if (rig->faults) {
        disk_faults_free(rig->faults);
        rig->faults = NULL;
        rig->options.wrap = NULL;
    }
}

static inline void vr_close(struct vault_rig *rig) {
    vr_close_vault(rig);
    kv_shelf_close(rig->shelf);
    rig->shelf = NULL;
}

static inline void vr_remove(void *user, const char *name) {
    struct vault_rig *rig = user;

    assert_int_equal(unlinkat(rig->folder.fd, name, 0), 0);
}

static inline void vr_free(struct vault_rig *rig) {
    if (rig->shelf)
        vr_close(rig);
    workers_free(rig->workers);
    kv_hasher_free(rig->hasher);
    rig->backend->close(rig->device);
    disk_folder_list(&rig->folder, vr_remove, rig);
    unlinkat(rig->folder.fd, "lock", 0);
    disk_folder_close(&rig->folder);
    assert_int_equal(rmdir(rig->path), 0); /* nothing under construction was left behind */
    *strrchr(rig->path, '/') = '\0';
    rmdir(rig->path);
}

/* ---- turns ---------------------------------------------------------------------------------------------------------- */

static inline struct kv_vault_stats vr_stats(const struct vault_rig *rig) {
    struct kv_vault_stats stats;

    kv_vault_stats(rig->vault, &stats);
    return stats;
}

static inline struct kv_vault_stats *vr_look(const struct vault_rig *rig) {
    static struct kv_vault_stats stats;

    kv_vault_stats(rig->vault, &stats);
    return &stats;
}

static inline uint32_t vr_n_held(const struct vault_rig *rig) {
    return rig->faults ? disk_faults_n_held(rig->faults) : 0;
}

static inline void vr_check(const struct vault_rig *rig) {
    const char *wrong = kv_vault_check(rig->vault);

    if (wrong == NULL)
        wrong = kv_shelf_check(rig->shelf);
    if (wrong)
        fail_msg("%s", wrong);
}

static inline void vr_turn(struct vault_rig *rig) {
    rig->is_asked = false;
    rig->next_us = kv_vault_turn(rig->vault);
    if (rig->scrub) {
        uint64_t next = kv_scrub_turn(rig->scrub, true);

        rig->next_us = rig->next_us == 0 || (next != 0 && next < rig->next_us) ? next : rig->next_us;
    }
    vr_check(rig);
}

/* One turn of a loop that has something to wait for. */
static inline void vr_step(struct vault_rig *rig) {
    struct pollfd pollfd = {.fd = kv_vault_fd(rig->vault), .events = POLLIN};

    if (rig->faults) { /* they answer without a wake-up */
        poll(&pollfd, 1, vr_look(rig)->disk.n_out > vr_n_held(rig) ? 1 : 0);
        workers_dispatch(rig->workers);
        kv_vault_dispatch(rig->vault);
        vr_turn(rig);
        return;
    }
    for (int n_idle = 0;; n_idle++) {
        bool is_due = rig->is_asked || (rig->next_us != 0 && vr_clock_us >= rig->next_us);
        bool is_done = workers_dispatch(rig->workers) > 0,
             is_readable = poll(&pollfd, 1, is_due || is_done ? 0 : 1) > 0;

        if (is_readable)
            kv_vault_dispatch(rig->vault);
        if (is_readable || is_done || is_due)
            break;
        if (n_idle < 3 || workers_n_out(rig->workers) > 0 || vr_look(rig)->disk.n_out > 0) {
            assert_true(n_idle < 10000);
            continue;
        }
        if (rig->next_us == 0)
            fail_msg("there is something to do, and nothing calls the next turn");
        vr_clock_us = rig->next_us;
    }
    vr_turn(rig);
}

static inline bool vr_is_busy(const struct vault_rig *rig) {
    struct kv_vault_stats stats = vr_stats(rig);

    return kv_vault_is_saving(rig->vault) || stats.n_to_blank > 0 || stats.is_scanning ||
           stats.disk.n_out > vr_n_held(rig) || workers_n_out(rig->workers) > 0;
}

static inline void vr_settle(struct vault_rig *rig) {
    rig->is_asked = true;
    for (int i = 0; i == 0 || vr_is_busy(rig); i++) {
        if (i >= 20000)
            fail_msg("it does not settle");
        vr_step(rig);
    }
}

/* As many turns as that, whatever happens. */
static inline void vr_turns(struct vault_rig *rig, int n) {
    for (int i = 0; i < n; i++) {
        workers_dispatch(rig->workers);
        kv_vault_dispatch(rig->vault);
        vr_turn(rig);
    }
}

/* Until nothing is out but what is held back: what is really on its way is not to be late on a clock that jumps. */
static inline void vr_quiesce(struct vault_rig *rig) {
    for (int i = 0;; i++) {
        assert_true(i < 20000);
        vr_turns(rig, 1);
        if (vr_look(rig)->disk.n_out <= vr_n_held(rig) && workers_n_out(rig->workers) == 0 &&
            (rig->next_us == 0 || rig->next_us > vr_clock_us))
            return;
        usleep(100);
    }
}

static inline void vr_pass(struct vault_rig *rig, uint64_t us) {
    vr_quiesce(rig);
    vr_clock_us += us;
    vr_turns(rig, 1);
    vr_quiesce(rig);
}

/* ---- chains ---------------------------------------------------------------------------------------------------------- */

/* The first n_same pages are those of every chain of that user with the same `trunk`. */
static inline void vr_branch(struct vault_rig *rig, struct vault_chain *chain, uint32_t uid, int trunk, uint32_t n_same,
                             int seed, uint32_t n_pages) {
    struct kv_key root;

    assert_true(n_pages <= VR_PAGES_MAX);
    chain->n_pages = n_pages;
    chain->uid = uid;
    for (uint32_t i = 0; i < n_pages * PAGE_TOKENS; i++)
        chain->tokens[i] = (i / PAGE_TOKENS < n_same ? trunk : seed) * 10000 + (int32_t)i;
    assert_int_equal(kv_key_root(rig->options.fingerprint /* any secret */, rig->options.fingerprint, uid, &root), 0);
    assert_int_equal(kv_key_chain(rig->hasher, &root, chain->tokens, n_pages, chain->keys), 0);
}

static inline void vr_chain(struct vault_rig *rig, struct vault_chain *chain, int seed, uint32_t n_pages) {
    vr_branch(rig, chain, 1, seed, n_pages, seed, n_pages);
}

static inline struct kv_page_name vr_name(const struct vault_chain *chain, uint32_t page) {
    return (struct kv_page_name){.key = chain->keys[page],
                                 .page_idx = page,
                                 .tokens = chain->tokens + (size_t)page * PAGE_TOKENS,
                                 .parent = page > 0 ? &chain->keys[page - 1] : NULL,
                                 .uid = chain->uid};
}

static inline uint64_t vr_word(const struct kv_key *key, enum kv_group group, size_t i) {
    uint64_t seed;

    memcpy(&seed, key, sizeof seed);
    return (seed + i + (uint64_t)group * 77) * UINT64_C(0x9e3779b97f4a7c15);
}

static inline bool vr_put_page(struct vault_rig *rig, const struct vault_chain *chain, uint32_t page,
                               enum kv_group group) {
    struct kv_page_name name = vr_name(chain, page);
    size_t bytes = kv_shelf_payload_bytes(rig->shelf, group);
    uint64_t *payload;
    uint32_t record;
    void *memory;

    if (bytes == 0 || kv_shelf_reserve(rig->shelf, &name, group, &record, &memory) != 0)
        return false;
    payload = memory;
    for (size_t i = 0; i < bytes / sizeof *payload; i++)
        payload[i] = vr_word(&name.key, group, i);
    kv_shelf_filled(rig->shelf, record, group, format_checksum(payload, bytes));
    return true;
}

/* The pages [first, n_pages) and the restore point at their end. */
static inline void vr_put_from(struct vault_rig *rig, const struct vault_chain *chain, uint32_t first) {
    for (uint32_t page = first; page < chain->n_pages; page++) {
        vr_put_page(rig, chain, page, KV_TARGET_FULL);
        vr_put_page(rig, chain, page, KV_DRAFT_FULL);
    }
    vr_put_page(rig, chain, chain->n_pages - 1, KV_TARGET_STATE);
}

static inline void vr_ask_save(struct vault_rig *rig, const struct vault_chain *chain, enum kv_vault_save why) {
    struct kv_page_name name = vr_name(chain, chain->n_pages - 1);
    uint32_t record = kv_shelf_find(rig->shelf, &name);

    assert_true(kv_shelf_has(rig->shelf, record, KV_TARGET_STATE));
    kv_vault_save(rig->vault, record, why);
    rig->is_asked = true;
}

static inline void vr_empty_shelf(struct vault_rig *rig) {
    kv_shelf_evict_bytes(rig->shelf, UINT64_MAX);
}

/* On disk, and on disk alone. */
static inline void vr_save(struct vault_rig *rig, const struct vault_chain *chain) {
    vr_put_from(rig, chain, 0);
    vr_ask_save(rig, chain, KV_VAULT_SAVE_MUST);
    vr_settle(rig);
    vr_empty_shelf(rig);
}

static inline bool vr_has(const struct vault_rig *rig, const struct vault_chain *chain, uint32_t page,
                          enum kv_group group) {
    struct kv_page_name name = vr_name(chain, page);

    return kv_vault_has(rig->vault, &name.key, name.page_idx, group);
}

/* How many pages from the first on the disk has. */
static inline uint32_t vr_n_pages(const struct vault_rig *rig, const struct vault_chain *chain) {
    uint32_t n = 0;

    while (n < chain->n_pages && vr_has(rig, chain, n, KV_TARGET_FULL))
        n++;
    return n;
}

static inline bool vr_is_whole(const struct vault_rig *rig, const struct vault_chain *chain) {
    return vr_n_pages(rig, chain) == chain->n_pages && vr_has(rig, chain, chain->n_pages - 1, KV_TARGET_STATE);
}

/* ---- reading --------------------------------------------------------------------------------------------------------- */

struct vr_read {
    struct kv_vault_read read;
    int n_done, result;
    bool was_clean; /* in done */
    struct vault_rig *rig;
    struct kv_page_name name;
    enum kv_group group;
};

static inline void vr_on_read(struct kv_vault_read *read, int result) {
    struct vr_read *mine = container_of(read, struct vr_read, read);

    mine->n_done++;
    mine->result = result;
    mine->was_clean = kv_shelf_has(mine->rig->shelf, kv_shelf_find(mine->rig->shelf, &mine->name), mine->group);
}

static inline int vr_ask_read(struct vault_rig *rig, struct vr_read *read, const struct vault_chain *chain,
                              uint32_t page, enum kv_group group) {
    int r;

    *read = (struct vr_read){.read.done = vr_on_read, .rig = rig, .name = vr_name(chain, page), .group = group};
    r = kv_vault_read(rig->vault, &read->name, group, &read->read);
    assert_int_equal(read->n_done, 0); /* never from inside */
    rig->is_asked = true;
    return r;
}

static inline int vr_wait_read(struct vault_rig *rig, struct vr_read *read) {
    for (int i = 0; read->n_done == 0; i++) {
        assert_true(i < 20000);
        vr_step(rig);
    }
    assert_int_equal(read->n_done, 1);
    assert_true(read->was_clean == (read->result == 0));
    return read->result;
}

/* Equal bytes, or the test fails. */
static inline void vr_expect_on_shelf(const struct vault_rig *rig, const struct vault_chain *chain, uint32_t page,
                                      enum kv_group group) {
    struct kv_page_name name = vr_name(chain, page);
    uint32_t record = kv_shelf_find(rig->shelf, &name);
    const uint64_t *payload;

    assert_true(kv_shelf_has(rig->shelf, record, group));
    payload = kv_shelf_pin(rig->shelf, record, group);
    for (size_t i = 0; i < kv_shelf_payload_bytes(rig->shelf, group) / sizeof *payload; i++)
        if (payload[i] != vr_word(&name.key, group, i))
            fail_msg("page %u of group %d: word %zu is another", page, (int)group, i);
    assert_int_equal(kv_shelf_checksum(rig->shelf, record, group),
                     format_checksum(payload, kv_shelf_payload_bytes(rig->shelf, group)));
    kv_shelf_unpin(rig->shelf, record, group);
}

/* 0: it came, as it was saved. */
static inline int vr_read_page(struct vault_rig *rig, const struct vault_chain *chain, uint32_t page,
                               enum kv_group group) {
    struct vr_read read;
    int r = vr_ask_read(rig, &read, chain, page, group);

    if (r != 0)
        return r;
    r = vr_wait_read(rig, &read);
    if (r == 0)
        vr_expect_on_shelf(rig, chain, page, group);
    return r;
}

static inline void vr_expect_chain(struct vault_rig *rig, const struct vault_chain *chain, bool has_draft) {
    vr_empty_shelf(rig);
    assert_true(vr_is_whole(rig, chain));
    for (uint32_t page = 0; page < chain->n_pages; page++) {
        assert_int_equal(vr_read_page(rig, chain, page, KV_TARGET_FULL), 0);
        if (has_draft)
            assert_int_equal(vr_read_page(rig, chain, page, KV_DRAFT_FULL), 0);
    }
    assert_int_equal(vr_read_page(rig, chain, chain->n_pages - 1, KV_TARGET_STATE), 0);
    vr_empty_shelf(rig);
}

/* ---- flushes --------------------------------------------------------------------------------------------------------- */

struct vr_flush {
    struct kv_vault_flush flush;
    int n_done, result;
};

static inline void vr_on_flushed(struct kv_vault_flush *flush, int result) {
    struct vr_flush *mine = container_of(flush, struct vr_flush, flush);

    mine->n_done++;
    mine->result = result;
}

static inline void vr_ask_flush(struct vault_rig *rig, struct vr_flush *flush) {
    *flush = (struct vr_flush){.flush.done = vr_on_flushed};
    kv_vault_flush(rig->vault, &flush->flush);
    assert_int_equal(flush->n_done, 0);
    rig->is_asked = true;
}

static inline int vr_flush(struct vault_rig *rig) {
    struct vr_flush flush;

    vr_ask_flush(rig, &flush);
    for (int i = 0; flush.n_done == 0; i++) {
        assert_true(i < 20000);
        vr_step(rig);
    }
    assert_int_equal(flush.n_done, 1);
    return flush.result;
}

/* ---- the files themselves -------------------------------------------------------------------------------------------- */

static inline int vr_file(const struct vault_rig *rig, uint32_t segment) {
    char name[32];
    int fd;

    snprintf(name, sizeof name, "segment-%08u", segment);
    fd = openat(rig->folder.fd, name, O_RDWR | O_CLOEXEC);
    return fd;
}

static inline void vr_read_file(const struct vault_rig *rig, uint32_t segment, uint64_t offset, void *bytes, size_t n) {
    int fd = vr_file(rig, segment);

    assert_true(fd >= 0);
    assert_int_equal(pread(fd, bytes, n, (off_t)offset), n);
    close(fd);
}

static inline void vr_write_file(const struct vault_rig *rig, uint32_t segment, uint64_t offset, const void *bytes,
                                 size_t n) {
    int fd = vr_file(rig, segment);

    assert_true(fd >= 0);
    assert_int_equal(pwrite(fd, bytes, n, (off_t)offset), n);
    assert_int_equal(fdatasync(fd), 0);
    close(fd);
}

struct vr_place {
    uint32_t segment, slot_bytes;
    uint64_t offset;
};

/* The last slot whose header names that page, or zeros. */
static inline bool vr_find(const struct vault_rig *rig, const struct vault_chain *chain, uint32_t page,
                           enum kv_group group, struct vr_place *ret_place) {
    unsigned char block[FORMAT_BLOCK_BYTES];
    bool is_found = false;

    *ret_place = (struct vr_place){0};
    for (uint32_t segment = 0; segment < 64; segment++) {
        struct format_segment head;
        int fd = vr_file(rig, segment);

        if (fd < 0)
            continue;
        if (pread(fd, block, sizeof block, 0) == (ssize_t)sizeof block && format_segment_read(block, &head) == 0)
            for (uint64_t at = head.first_offset; at + head.slot_bytes <= head.segment_bytes; at += head.slot_bytes) {
                struct format_slot slot;

                if (pread(fd, block, sizeof block, (off_t)at) == (ssize_t)sizeof block &&
                    format_slot_read(block, &slot) == 0 && slot.group == group && slot.page_idx == page &&
                    memcmp(&slot.key, &chain->keys[page], sizeof slot.key) == 0) {
                    *ret_place = (struct vr_place){segment, head.slot_bytes, at};
                    is_found = true;
                }
            }
        close(fd);
    }
    return is_found;
}
