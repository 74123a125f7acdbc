/* vault_segments: the files of a vault: how one is made, and when what was written to it survives a power cut. */
#include <errno.h>
#include <string.h>

#include "vault_internal.h"

enum {
    SYNC_AFTER_US = 1000 * 1000, /* the oldest write that is not synced */
    SYNC_BYTES = 64 << 20,
    SYNC_ERRORS_MAX = 2, /* then the disk is left alone */
};

/* ---- files ---------------------------------------------------------------------------------------------------------- */

static void fail_file(struct kv_vault *vault, int error) {
    struct vault_file *file = &vault->file;

    file->is_busy = false;
    segment_failed(vault->segments, file->segment, disk_segment_exists(vault->disk, file->segment));
    if (error != -ECANCELED)
        vault_write_failed(vault, error);
}

static void on_head(struct disk_op *op) {
    struct kv_vault *vault = container_of(op, struct kv_vault, file.op);

    if (op->result != 0) {
        fail_file(vault, op->result);
        return;
    }
    vault->file.is_busy = false;
    segment_ready(vault->segments, vault->file.segment);
}

static void write_head(struct kv_vault *vault) {
    struct vault_file *file = &vault->file;
    struct format_segment head = {.write_sequence = ++vault->write_sequence,
                                  .segment = file->segment,
                                  .group = file->group,
                                  .first_offset = vault->alignment,
                                  .slot_bytes = vault->options.group[file->group].slot_bytes,
                                  .segment_bytes = vault->segment_bytes};
    int r;

    memcpy(head.store_id, vault->options.store_id, sizeof head.store_id);
    format_segment_write(&head, file->block);
    file->op = (struct disk_op){.kind = DISK_WRITE,
                                .segment = file->segment,
                                .buffer = file->block,
                                .bytes = vault->alignment,
                                .done = on_head};
    r = disk_submit(vault->disk, &file->op, vault->options.now_us());
    if (r != 0)
        fail_file(vault, r < 0 ? r : -EAGAIN);
}

static void on_added(struct disk_op *op) {
    struct kv_vault *vault = container_of(op, struct kv_vault, file.op);

    if (op->result != 0)
        fail_file(vault, op->result);
    else if (vault->is_closing)
        fail_file(vault, -ECANCELED);
    else
        write_head(vault);
}

/* Files of this store with slots of other sizes hold what no model that runs here can use: they go before anything is
 * evicted for want of space. */
static bool reclaim_outdated(struct kv_vault *vault) {
    for (uint32_t s = 0; s < vault->n_segments_max; s++)
        if (vault->segment[s].is_outdated) {
            vault->segment[s].is_outdated = false;
            segment_reclaim(vault->segments, s);
            return true;
        }
    return false;
}

bool vault_prepare_segment(struct kv_vault *vault, enum kv_group group) {
    struct vault_file *file = &vault->file;
    int r;

    if (file->is_busy)
        return true;
    while ((r = segment_prepare(vault->segments, group, &file->segment)) == SEGMENT_E_FULL && reclaim_outdated(vault))
        ;
    if (r != 0)
        return r == SEGMENT_E_BUSY;
    file->is_busy = true;
    file->group = group;
    vault->segment[file->segment] = (struct vault_segment){0};
    if (disk_segment_exists(vault->disk, file->segment)) {
        write_head(vault);
        return true;
    }
    file->op = (struct disk_op){.kind = DISK_SEGMENT_ADD, .segment = file->segment, .done = on_added};
    r = disk_submit(vault->disk, &file->op, vault->options.now_us());
    if (r != 0)
        fail_file(vault, r < 0 ? r : -EAGAIN);
    return true;
}

/* ---- syncs ---------------------------------------------------------------------------------------------------------- */

void vault_stored_in(struct kv_vault *vault, uint32_t s, uint32_t bytes) {
    struct vault_segment *segment = &vault->segment[s];
    uint64_t *first = segment->is_syncing ? &segment->next_tick : &segment->first_tick;

    if (*first == 0) {
        *first = vault->tick;
        segment->dirty_since_us = vault->options.now_us();
    }
    segment->dirty_bytes += bytes;
    vault->dirty_bytes += bytes;
}

/* What was stored in the segment and did not survive is on disk no more; it takes no new pages. */
static void lose_segment(struct kv_vault *vault, uint32_t s) {
    for (uint32_t r = 0; (r = catalog_next(vault->catalog, r)) != KV_NO_RECORD; r++) {
        struct catalog_view view = catalog_look(vault->catalog, r);

        if (view.segment != s || view.stored_tick <= vault->segment[s].synced_tick)
            continue;
        vault->stats.n_lost++;
        vault_forget(vault, r);
    }
    segment_retire(vault->segments, s);
    vault->stats.n_sync_errors++;
    if (vault->stats.n_sync_errors % SYNC_ERRORS_MAX == 0)
        kv_breaker_trip(&vault->breaker, vault->options.now_us());
}

static void on_synced(struct disk_op *op) {
    struct vault_sync *sync = container_of(op, struct vault_sync, op);
    struct kv_vault *vault = sync->vault;
    struct vault_segment *segment = &vault->segment[op->segment];

    sync->is_busy = false;
    segment->is_syncing = false;
    segment->first_tick = segment->next_tick;
    segment->next_tick = 0;
    if (op->result == 0) {
        segment->synced_tick = sync->tick;
        vault->stats.n_syncs++;
        return;
    }
    if (op->result == -ECANCELED)
        return;
    vault->n_failed_syncs++;
    lose_segment(vault, op->segment);
    segment->first_tick = 0;
}

static struct vault_sync *free_sync(struct kv_vault *vault) {
    for (int i = 0; i < VAULT_SYNCS; i++)
        if (!vault->syncs[i].is_busy)
            return &vault->syncs[i];
    return NULL;
}

static bool is_due(const struct kv_vault *vault, const struct vault_segment *segment, uint64_t now) {
    return segment->first_tick != 0 && !segment->is_syncing &&
           (vault->must_sync || vault->dirty_bytes >= SYNC_BYTES || now - segment->dirty_since_us >= SYNC_AFTER_US);
}

void vault_sync_turn(struct kv_vault *vault) {
    uint64_t now = vault->options.now_us();

    for (uint32_t s = 0; s < vault->n_segments_max; s++) {
        struct vault_segment *segment = &vault->segment[s];
        struct vault_sync *sync;

        if (!is_due(vault, segment, now))
            continue;
        sync = free_sync(vault);
        if (!sync)
            return;
        sync->op = (struct disk_op){.kind = DISK_SYNC, .segment = s, .done = on_synced};
        sync->tick = vault->tick;
        if (disk_submit(vault->disk, &sync->op, now) != 0)
            return;
        sync->is_busy = segment->is_syncing = true;
        vault->dirty_bytes -= segment->dirty_bytes;
        segment->dirty_bytes = 0;
    }
}

uint64_t vault_sync_due_us(const struct kv_vault *vault) {
    uint64_t due = 0;

    for (uint32_t s = 0; s < vault->n_segments_max; s++) {
        const struct vault_segment *segment = &vault->segment[s];
        uint64_t at = segment->dirty_since_us + SYNC_AFTER_US;

        if (segment->first_tick != 0 && !segment->is_syncing && (due == 0 || at < due))
            due = at;
    }
    return due;
}

bool vault_is_synced(const struct kv_vault *vault, uint64_t tick) {
    for (uint32_t s = 0; s < vault->n_segments_max; s++)
        if (vault->segment[s].first_tick != 0 && vault->segment[s].first_tick <= tick)
            return false;
    return true;
}
