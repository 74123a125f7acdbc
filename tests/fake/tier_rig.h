/* tier_rig: all tiers of a store: device memory of the CPU backend, a shelf, a vault over real files, what moves pages
 * between them, and a clock. Copies come home and work is done when the test says so, calls of files too: with one seed all
 * happens in one order. */
#pragma once
#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include "disk_faults.h"
#include "fast_folder.h"
#include "kv_rig.h"
#include "restore.h"
#include "scrub.h"
#include "spill.h"
#include "vault.h"

enum {
    TIER_OUT_MAX = 32,
    TIER_WORKS_MAX = 256,
    TIER_RESTORES = 4,
    TIER_SPILLS = 2,
    TIER_DEADLINE_US = 1000000,
    TIER_SHARE = 30
};

struct tier_rig {
    struct kv_rig kv;
    struct kv_shelf *shelf;
    struct kv_spill *spill;
    struct kv_restores *restores;
    struct kv_vault *vault;
    struct kv_scrub *scrub;
    struct kv_vault_options options;
    char path[64];
    struct disk_folder folder;
    struct disk_faults *faults;
    struct kv_copy_batch *batches[KV_COPY_DIRECTION_N][TIER_OUT_MAX];
    int n_batches[KV_COPY_DIRECTION_N];
    struct kv_work work;
    struct kv_work_item *works[TIER_WORKS_MAX];
    int n_works;
    bool refuses_copies, refuses_work;
};

static uint64_t tier_clock_us;

static inline uint64_t tier_now_us(void) {
    return tier_clock_us;
}

/* ---- fakes ---- */

static inline int tier_submit_batch(void *user, struct kv_copy_batch *batch) {
    struct tier_rig *rig = user;

    KV_RIG_CHECK(batch->n > 0 && batch->n <= KV_COPIES_MAX);
    if (rig->refuses_copies)
        return -EAGAIN;
    KV_RIG_CHECK(rig->n_batches[batch->direction] < TIER_OUT_MAX);
    rig->batches[batch->direction][rig->n_batches[batch->direction]++] = batch;
    return 0;
}

static inline int tier_submit_work(void *user, struct kv_work_item *item) {
    struct tier_rig *rig = user;

    if (rig->refuses_work)
        return -ENOMEM;
    KV_RIG_CHECK(rig->n_works < TIER_WORKS_MAX);
    rig->works[rig->n_works++] = item;
    return 0;
}

static inline void tier_check(const struct tier_rig *rig) {
    const char *wrong = kv_shelf_check(rig->shelf);

    if (!wrong)
        wrong = kv_restores_check(rig->restores);
    if (!wrong && rig->vault)
        wrong = kv_vault_check(rig->vault);
    if (wrong)
        fprintf(stderr, "%s\n", wrong);
    KV_RIG_CHECK(!wrong);
    kv_rig_check(&rig->kv);
}

/* The oldest batch comes home. One that failed has written something else than it should. False: none is out. */
static inline bool tier_come_home(struct tier_rig *rig, enum kv_copy_direction direction, int result) {
    struct kv_copy_batch *batch = rig->batches[direction][0];

    if (rig->n_batches[direction] == 0)
        return false;
    rig->n_batches[direction]--;
    memmove(&rig->batches[direction][0], &rig->batches[direction][1],
            (size_t)rig->n_batches[direction] * sizeof(struct kv_copy_batch *));
    for (int i = batch->n - 1; i >= 0; i--) /* in any order */
        if (result == 0)
            memcpy(batch->transfers[i].dst, batch->transfers[i].src, batch->transfers[i].bytes);
        else
            memset(batch->transfers[i].dst, 0xee, batch->transfers[i].bytes);
    batch->result = result;
    batch->done(batch);
    return true;
}

static inline bool tier_do_work(struct tier_rig *rig, int i) {
    struct kv_work_item *item;

    if (i < 0 || i >= rig->n_works)
        return false;
    item = rig->works[i];
    rig->works[i] = rig->works[--rig->n_works];
    item->run(item);
    item->done(item);
    return true;
}

static inline uint64_t tier_turn(struct tier_rig *rig) {
    uint64_t next;

    kv_vault_dispatch(rig->vault);
    kv_restores_turn(rig->restores);
    do
        next = kv_vault_turn(rig->vault);
    while (kv_spill_turn(rig->spill));
    kv_scrub_turn(rig->scrub, rig->n_works == 0);
    tier_check(rig);
    return next;
}

/* ---- open and close ---- */

static inline void tier_open_shelf(struct tier_rig *rig, const uint32_t n_slots[KV_GROUP_N]) {
    struct kv_shelf_options shelf = {.backend = rig->kv.backend,
                                     .device = rig->kv.device,
                                     .alignment = FORMAT_ALIGN_MIN,
                                     .share_percent = TIER_SHARE};
    struct kv_spill_options spill = {
        .store = rig->kv.store, .n_jobs = TIER_SPILLS, .n_pages_max = KV_RIG_PAGES_MAX, .work = rig->work};
    struct kv_restores_options restores = {
        .store = rig->kv.store, .now_us = tier_now_us, .n_restores = TIER_RESTORES, .n_pages_max = KV_RIG_PAGES_MAX};

    for (int g = 0; g < KV_GROUP_N; g++) {
        shelf.group[g].payload_bytes = KV_RIG_SLOT_BYTES;
        shelf.group[g].n_slots = n_slots[g];
    }
    KV_RIG_CHECK(kv_shelf_open(&shelf, &rig->shelf) == 0);
    spill.shelf = restores.shelf = rig->shelf;
    spill.copier = restores.copier = (struct kv_copier){tier_submit_batch, rig};
    KV_RIG_CHECK(kv_spill_open(&spill, &rig->spill) == 0);
    KV_RIG_CHECK(kv_restores_open(&restores, &rig->restores) == 0);
}

static inline void tier_open_scrub(struct tier_rig *rig) {
    struct kv_scrub_options options = {.shelf = rig->shelf,
                                       .vault = rig->vault,
                                       .work = &rig->work,
                                       .bytes_per_s = 4 * rig->options.group[KV_TARGET_FULL].slot_bytes,
                                       .now_us = tier_now_us};

    KV_RIG_CHECK(kv_scrub_open(&options, &rig->scrub) == 0);
}

static inline void tier_open_vault(struct tier_rig *rig) {
    static const uint32_t shares[KV_GROUP_N] = {
        [KV_TARGET_FULL] = 25, [KV_TARGET_STATE] = 25, [KV_DRAFT_FULL] = 25, [KV_DRAFT_SLIDING] = 25};

    rig->faults = disk_faults_new();
    rig->options = (struct kv_vault_options){.folder = &rig->folder,
                                             .work = &rig->work,
                                             .shelf = rig->shelf,
                                             .disk_bytes = 4 * (uint64_t)FORMAT_SEGMENT_BYTES_MIN,
                                             .share_percent = TIER_SHARE,
                                             .warm_percent = 100,
                                             .n_pages_max = KV_RIG_PAGES_MAX,
                                             .n_pages_min = 1,
                                             .deadline_us = TIER_DEADLINE_US,
                                             .now_us = tier_now_us,
                                             .no_ring = true,
                                             .wrap = disk_faults_wrap,
                                             .wrap_user = rig->faults};
    for (int g = 0; g < KV_GROUP_N; g++) {
        rig->options.group[g].slot_bytes = (uint32_t)kv_shelf_slot_bytes(rig->shelf, (enum kv_group)g);
        rig->options.group[g].share = shares[g];
    }
    KV_RIG_CHECK(kv_vault_open(&rig->options, &rig->vault) == 0);
    kv_spill_set_vault(rig->spill, rig->vault);
    kv_restores_set_vault(rig->restores, rig->vault);
    tier_open_scrub(rig);
}

static inline void tier_open(struct tier_rig *rig, const uint32_t device[KV_GROUP_N],
                             const uint32_t shelf[KV_GROUP_N]) {
    memset(rig, 0, sizeof *rig);
    tier_clock_us = 1000000;
    rig->kv = kv_rig_open_shared(device, 2 * PAGE_TOKENS, device[KV_TARGET_FULL], TIER_SHARE);
    rig->work = (struct kv_work){tier_submit_work, rig};
    snprintf(rig->path, sizeof rig->path, "%s/tiers-XXXXXX", fast_folder());
    KV_RIG_CHECK(mkdtemp(rig->path) != NULL);
    strcat(rig->path, "/kv"); /* NOLINT: it fits */
    KV_RIG_CHECK(disk_folder_open(rig->path, &rig->folder) == 0);
    tier_open_shelf(rig, shelf);
    tier_open_vault(rig);
}

static inline void tier_close_vault(struct tier_rig *rig) {
    while (tier_do_work(rig, 0))
        continue;
    kv_scrub_close(rig->scrub);
    disk_faults_release(rig->faults);
    for (int i = 0; kv_vault_close(rig->vault) > 0; i++) {
        KV_RIG_CHECK(i < 100000);
        tier_do_work(rig, 0);
    }
    disk_faults_free(rig->faults);
    rig->vault = NULL;
    kv_spill_set_vault(rig->spill, NULL);
    kv_restores_set_vault(rig->restores, NULL);
}

/* Nothing is on its way, nothing pinned, and no slot missing. */
static inline void tier_check_is_home(const struct tier_rig *rig) {
    struct kv_store_stats device;
    struct kv_restores_stats restores;
    struct kv_vault_stats vault;

    tier_check(rig);
    KV_RIG_CHECK(kv_spill_is_idle(rig->spill));
    kv_restores_stats(rig->restores, &restores);
    KV_RIG_CHECK(restores.n_now == 0);
    kv_store_stats(rig->kv.store, &device);
    kv_vault_stats(rig->vault, &vault);
    for (int g = 0; g < KV_GROUP_N; g++) {
        struct kv_shelf_group_stats shelf;

        kv_shelf_stats(rig->shelf, (enum kv_group)g, &shelf);
        KV_RIG_CHECK(device.group[g].n_private == 0 && device.group[g].n_pinned == 0);
        KV_RIG_CHECK(shelf.n_filling == 0 && shelf.n_pinned == 0);
        KV_RIG_CHECK(vault.group[g].n_pinned == 0 && vault.group[g].n_writing == 0);
    }
}

static inline void tier_close_shelf(struct tier_rig *rig) {
    kv_restores_close(rig->restores);
    kv_spill_close(rig->spill);
    kv_shelf_close(rig->shelf);
}

static inline void tier_remove(void *user, const char *name) {
    struct tier_rig *rig = user;

    unlinkat(rig->folder.fd, name, 0);
}

static inline void tier_close(struct tier_rig *rig) {
    tier_close_vault(rig);
    tier_close_shelf(rig);
    kv_rig_close(&rig->kv);
    disk_folder_list(&rig->folder, tier_remove, rig);
    unlinkat(rig->folder.fd, "lock", 0);
    disk_folder_close(&rig->folder);
    rmdir(rig->path);
    *strrchr(rig->path, '/') = '\0';
    KV_RIG_CHECK(rmdir(rig->path) == 0);
}

/* ---- going on ---- */

static inline struct kv_vault_stats tier_stats(const struct tier_rig *rig) {
    struct kv_vault_stats stats;

    kv_vault_stats(rig->vault, &stats);
    return stats;
}

/* Everything that is on its way comes home; what is held back only if so. */
static inline void tier_drain_of(struct tier_rig *rig, bool also_held) {
    for (int n_idle = 0, i = 0; n_idle < 3; i++) {
        bool is_any = false;

        KV_RIG_CHECK(i < 100000);
        if (also_held)
            disk_faults_release(rig->faults);
        while (tier_come_home(rig, KV_COPY_SPILL, 0) || tier_come_home(rig, KV_COPY_FETCH, 0) || tier_do_work(rig, 0))
            is_any = true;
        tier_turn(rig);
        is_any = is_any || rig->n_works > 0 || kv_vault_is_saving(rig->vault) || tier_stats(rig).is_scanning ||
                 tier_stats(rig).n_to_blank > 0;
        n_idle = is_any ? 0 : n_idle + 1;
    }
}

static inline void tier_drain(struct tier_rig *rig) {
    tier_drain_of(rig, false);
}

/* A chain of that user goes down to the disk, with restore points after both numbers of pages, and from the device; from the
 * shelf too if so. */
static inline void tier_put_below(struct tier_rig *rig, uint32_t uid, const char *kinds, uint32_t n_first,
                                  uint32_t n_second, bool on_disk_alone) {
    static struct kv_seq seq;

    kv_seq_init(&seq, &rig->kv, uid, kinds);
    for (int i = n_first == n_second; i < 2; i++) {
        uint32_t n_pages = i == 0 ? n_first : n_second;

        KV_RIG_CHECK(kv_seq_compute(&seq, &rig->kv, n_pages));
        kv_spill_start(rig->spill, &seq.lease, n_pages, uid, KV_SPILL_MUST);
        tier_drain(rig);
    }
    kv_seq_deinit(&seq, &rig->kv);
    kv_store_evict_all(rig->kv.store);
    if (on_disk_alone)
        kv_shelf_evict_bytes(rig->shelf, UINT64_MAX);
    tier_check(rig);
}

/* A slot of the file whose header names this page, by its raw bytes; false: none. */
static inline bool tier_find(const struct tier_rig *rig, const struct kv_key *key, enum kv_group group,
                             uint32_t *ret_segment, uint64_t *ret_offset) {
    unsigned char block[FORMAT_BLOCK_BYTES];

    for (uint32_t segment = 0; segment < 4; segment++) {
        char name[32];
        struct format_segment head;
        struct format_slot slot;
        bool is_found = false;
        int fd;

        snprintf(name, sizeof name, "segment-%08u", segment);
        fd = openat(rig->folder.fd, name, O_RDONLY | O_CLOEXEC);
        if (fd < 0)
            continue;
        if (pread(fd, block, sizeof block, 0) == (ssize_t)sizeof block && format_segment_read(block, &head) == 0)
            for (uint64_t at = head.first_offset; !is_found && at + head.slot_bytes <= head.segment_bytes;
                 at += head.slot_bytes) {
                if (pread(fd, block, sizeof block, (off_t)at) != (ssize_t)sizeof block ||
                    format_slot_read(block, &slot) != 0 || slot.group != group ||
                    memcmp(&slot.key, key, sizeof *key) != 0)
                    continue;
                is_found = true;
                *ret_segment = segment;
                *ret_offset = at;
            }
        close(fd);
        if (is_found)
            return true;
    }
    return false;
}

static inline void tier_flip(const struct tier_rig *rig, uint32_t segment, uint64_t offset) {
    char name[32];
    unsigned char byte = 0;
    int fd;

    snprintf(name, sizeof name, "segment-%08u", segment);
    fd = openat(rig->folder.fd, name, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return;
    KV_RIG_CHECK(pread(fd, &byte, 1, (off_t)offset) == 1);
    byte ^= 0x40;
    KV_RIG_CHECK(pwrite(fd, &byte, 1, (off_t)offset) == 1);
    close(fd);
}
