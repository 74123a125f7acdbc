/* vault_segments: the files of a vault: how one is made, and when what was written to it survives a power cut. */
#include <errno.h>
#include <string.h>

#include "vault_internal.h"

enum {
    SYNC_AFTER_US = 1000 * 1000, /* the oldest write that is not synced */
    SYNC_BYTES = 64 << 20,
    SYNC_ERRORS_MAX = 2, /* then the disk is left alone */
    NO_FILE_US = 30 * 1000 * 1000,
};

/* ---- files ---------------------------------------------------------------------------------------------------------- */

/* Without space for another file the store goes on with those that it has, if there are any. */
static void fail_file(struct kv_vault *vault, int error) {
    struct vault_file *file = &vault->file;
    bool has_file = vault->disk && disk_segment_exists(vault->disk, file->segment);
    struct segment_stats stats;

    file->is_busy = false;
    segment_failed(vault->segments, file->segment, has_file);
    if (error == -ECANCELED)
        return;
    if (error == -EEXIST && !has_file) /* somebody else's */
        segment_found_foreign(vault->segments, file->segment);
    vault_report(vault, file->ticket, &file->is_reported,
                 vault_is_no_space(error) || error == -EEXIST ? KV_BREAKER_WORKED : KV_BREAKER_FAILED);
    segment_stats(vault->segments, &stats);
    if (!has_file && vault_is_no_space(error) && stats.bytes > 0) {
        vault->stats.n_write_errors++;
        vault->no_file_until_us = vault->options.now_us() + NO_FILE_US;
        segment_set_cap(vault->segments, stats.bytes);
        vault->room_bytes = min_u64(vault->room_bytes, stats.bytes);
        return;
    }
    vault_write_failed(vault, error);
}

static void on_late_file(struct disk_op *op) {
    struct kv_vault *vault = container_of(op, struct kv_vault, file.op);

    vault_report(vault, vault->file.ticket, &vault->file.is_reported, KV_BREAKER_LATE);
}

static void on_head(struct disk_op *op) {
    struct kv_vault *vault = container_of(op, struct kv_vault, file.op);
    struct segment_stats stats;

    if (op->result != 0) {
        fail_file(vault, op->result);
        return;
    }
    vault->file.is_busy = false;
    vault->tick++;
    vault_stored_in(vault, op->segment, op->bytes); /* until it is synced the head before it may be back */
    vault_report(vault, vault->file.ticket, &vault->file.is_reported, KV_BREAKER_WORKED);
    segment_ready(vault->segments, vault->file.segment);
    segment_stats(vault->segments, &stats);
    vault->room_bytes = max_u64(vault->room_bytes, stats.bytes);
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
    vault->segment[file->segment].bound_sequence = head.write_sequence;
    format_segment_write(&head, file->block);
    file->op = (struct disk_op){.kind = DISK_WRITE,
                                .segment = file->segment,
                                .buffer = file->block,
                                .bytes = vault->alignment,
                                .late = on_late_file,
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
static bool reclaim_outdated(struct kv_vault *vault, uint32_t *ret_segment) {
    for (uint32_t s = 0; s < vault->n_segments_max; s++)
        if (vault->segment[s].is_outdated) {
            vault->segment[s].is_outdated = false;
            segment_reclaim(vault->segments, s);
            *ret_segment = s;
            return true;
        }
    return false;
}

void vault_drop_outdated(struct kv_vault *vault) {
    uint32_t s;

    while (reclaim_outdated(vault, &s))
        segment_retire(vault->segments, s);
}

/* What lies in it is nobody's any more: whether that survives does not matter. A sync that is out counts for nothing. */
static void forget_unsynced(struct kv_vault *vault, uint32_t s) {
    struct vault_segment *segment = &vault->segment[s];

    vault->dirty_bytes -= segment->dirty_bytes;
    segment->dirty_bytes = 0;
    segment->first_tick = segment->next_tick = 0;
}

/* Everything in it leaves; what is pinned goes when it is unpinned. */
static void empty_segment(struct kv_vault *vault, uint32_t s) {
    for (uint32_t r = 0; (r = catalog_next(vault->catalog, r)) != KV_NO_RECORD; r++)
        if (catalog_look(vault->catalog, r).segment == s)
            vault_evict(vault, r);
}

/* What was in it still is, and nobody's: its file goes when it can. */
static void leave_segment(struct kv_vault *vault, uint32_t s) {
    segment_retire(vault->segments, s);
    vault->segment[s].is_leaving = true;
}

/* Also of files that are there: those that cannot be used, then those that are due to the group. */
static int find_segment(struct kv_vault *vault, enum kv_group group, uint32_t *ret_segment) {
    uint32_t s;
    int r;

    while ((r = segment_prepare(vault->segments, group, ret_segment)) == SEGMENT_E_FULL && reclaim_outdated(vault, &s))
        ;
    if (r != SEGMENT_E_FULL || !segment_excess(vault->segments, group, &s))
        return r;
    empty_segment(vault, s);
    r = segment_prepare(vault->segments, group, ret_segment);
    if (r != 0) /* something in it is pinned, or being blanked */
        leave_segment(vault, s);
    return r;
}

bool vault_prepare_segment(struct kv_vault *vault, enum kv_group group) {
    struct vault_file *file = &vault->file;
    int r;

    if (file->is_busy) /* one that may never come home is not waited for */
        return !file->op.is_late;
    if (!kv_breaker_is_ready(&vault->breaker))
        return vault->breaker.state != KV_BREAKER_OPEN;
    if (vault->no_file_until_us != 0 && vault->options.now_us() >= vault->no_file_until_us) {
        vault->no_file_until_us = 0;
        segment_set_cap(vault->segments, vault->options.disk_bytes);
    }
    r = find_segment(vault, group, &file->segment);
    if (r != 0)
        return r == SEGMENT_E_BUSY;
    kv_breaker_admits(&vault->breaker, &file->ticket); /* it is ready */
    file->is_busy = true;
    file->is_reported = false;
    file->group = group;
    forget_unsynced(vault, file->segment);
    vault->segment[file->segment].is_outdated = vault->segment[file->segment].is_leaving = false;
    if (disk_segment_exists(vault->disk, file->segment)) {
        write_head(vault);
        return true;
    }
    file->op =
        (struct disk_op){.kind = DISK_SEGMENT_ADD, .segment = file->segment, .late = on_late_file, .done = on_added};
    r = disk_submit(vault->disk, &file->op, vault->options.now_us());
    if (r != 0)
        fail_file(vault, r < 0 ? r : -EAGAIN);
    return true;
}

void vault_retire(struct kv_vault *vault, uint32_t s) {
    enum segment_state state = segment_state(vault->segments, s);

    if (state == SEGMENT_BOUND || state == SEGMENT_SCANNING || state == SEGMENT_EMPTY)
        segment_retire(vault->segments, s);
}

static void on_removed(struct disk_op *op) {
    struct kv_vault *vault = container_of(op, struct kv_vault, removal.op);

    vault->removal.is_busy = false;
    if (op->result == 0) {
        forget_unsynced(vault, op->segment);
        segment_removed(vault->segments, op->segment);
        return;
    }
    vault->stats.n_remove_errors += op->result != -ECANCELED;
    vault->removal.retry_at_us = vault->options.now_us() + NO_FILE_US;
}

/* Retired and empty: its file goes, one at a time. One on which something is out, or that could not go, is tried again. */
static void remove_retired(struct kv_vault *vault) {
    if (vault->removal.retry_at_us > vault->options.now_us())
        return;
    vault->removal.retry_at_us = 0;
    for (uint32_t i = 0, first = vault->removal.next; i < vault->n_segments_max && !vault->removal.is_busy; i++) {
        uint32_t s = (first + i) % vault->n_segments_max;

        if (segment_state(vault->segments, s) != SEGMENT_RETIRED || segment_n_taken(vault->segments, s) > 0)
            continue;
        vault->removal.op = (struct disk_op){.kind = DISK_SEGMENT_REMOVE, .segment = s, .done = on_removed};
        vault->removal.is_busy = disk_submit(vault->disk, &vault->removal.op, vault->options.now_us()) == 0;
        vault->removal.next = s + 1;
    }
}

/* A file that is to go, and has what nobody finds any more. */
static bool has_leaving(const struct kv_vault *vault) {
    for (uint32_t s = 0; s < vault->n_segments_max; s++)
        if (segment_state(vault->segments, s) == SEGMENT_RETIRED &&
            (vault->segment[s].is_leaving || segment_n_taken(vault->segments, s) == 0))
            return true;
    return false;
}

bool vault_is_forgetting(const struct kv_vault *vault) {
    const struct vault_file *file = &vault->file;

    return (vault->n_purged > 0 && vault->scan_state != VAULT_SCAN_DONE) ||
           (file->is_busy && file->op.kind == DISK_WRITE && !file->op.is_late) ||
           (has_leaving(vault) && !vault_cannot_remove(vault));
}

/* It could not go lately, or the kernel keeps what may be a part of it. */
bool vault_cannot_remove(const struct kv_vault *vault) {
    struct disk_stats disk;

    disk_stats(vault->disk, &disk);
    return (vault->removal.retry_at_us != 0 || disk.n_out_late > 0) && has_leaving(vault);
}

/* A store that may have less than before gives up files, those first that hold nothing. */
void vault_files_turn(struct kv_vault *vault) {
    uint32_t s;

    if (vault->scan_state != VAULT_SCAN_DONE)
        return;
    if (segment_surplus(vault->segments, &s)) {
        leave_segment(vault, s);
        empty_segment(vault, s);
    }
    remove_retired(vault);
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
    vault_retire(vault, s);
    vault->stats.n_sync_errors++;
    if (vault->stats.n_sync_errors % SYNC_ERRORS_MAX == 0)
        kv_breaker_trip(&vault->breaker, vault->options.now_us());
}

static void on_synced(struct disk_op *op) {
    struct vault_sync *sync = container_of(op, struct vault_sync, op);
    struct kv_vault *vault = sync->vault;
    struct vault_segment *segment = &vault->segment[op->segment];

    sync->is_busy = false;
    segment->is_syncing = segment->is_late = false;
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

static void on_late_sync(struct disk_op *op) {
    struct vault_sync *sync = container_of(op, struct vault_sync, op);

    sync->vault->segment[op->segment].is_late = true;
}

bool vault_has_late_sync(const struct kv_vault *vault) {
    for (uint32_t s = 0; s < vault->n_segments_max; s++)
        if (vault->segment[s].is_late)
            return true;
    return false;
}

/* Its number; VAULT_SYNCS: none is free. */
static int free_sync(const struct kv_vault *vault) {
    int i = 0;

    while (i < VAULT_SYNCS && vault->syncs[i].is_busy)
        i++;
    return i;
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
        int i;

        if (!is_due(vault, segment, now))
            continue;
        i = free_sync(vault);
        if (i == VAULT_SYNCS)
            return;
        sync = &vault->syncs[i];
        sync->op = (struct disk_op){.kind = DISK_SYNC, .segment = s, .late = on_late_sync, .done = on_synced};
        sync->tick = vault->tick;
        if (disk_submit(vault->disk, &sync->op, now) != 0) {
            segment->dirty_since_us = now; /* and not before the loop has turned */
            return;
        }
        sync->is_busy = segment->is_syncing = true;
        vault->dirty_bytes -= segment->dirty_bytes;
        segment->dirty_bytes = 0;
    }
}

uint64_t vault_sync_due_us(const struct kv_vault *vault) {
    uint64_t due = 0;

    if (free_sync(vault) == VAULT_SYNCS) /* one that comes home is followed by the next */
        return 0;
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
        if ((vault->segment[s].first_tick != 0 && vault->segment[s].first_tick <= tick) ||
            (vault->segment[s].next_tick != 0 && vault->segment[s].next_tick <= tick))
            return false;
    return true;
}
