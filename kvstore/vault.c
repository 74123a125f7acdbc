#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "vault_internal.h"

enum {
    ERRORS_MAX = 8, /* in a window: one more, and the disk is left alone */
    LATE_MAX = 3,
    WINDOW_US = 60 * 1000 * 1000,
    PROBE_US = 30 * 1000 * 1000,
    WRITE_OFF_US = 30 * 1000 * 1000, /* then it is tried again */
    RETRY_US = 50 * 1000,
    BLOCKS = 1 + 1 + 1 + 1 /* zeros, a file's head, the probe's, a header */
};

static void on_blanked(struct disk_op *op);
static void on_probed(struct disk_op *op);

/* ---- open, close ---------------------------------------------------------------------------------------------------- */

static void init_ops(struct kv_vault *vault) {
    char *block = vault->blocks;

    vault->zeros = block;
    vault->file.block = block + vault->alignment;
    vault->probe.block = block + 2 * (size_t)vault->alignment;
    for (int i = 0; i < VAULT_BLANKS; i++) {
        vault->blanks[i].vault = vault;
        vault->blanks[i].op = (struct disk_op){.kind = DISK_WRITE, .done = on_blanked};
    }
    vault->probe.op.done = on_probed;
    for (int i = 0; i < VAULT_SYNCS; i++)
        vault->syncs[i].vault = vault;
    for (int i = 0; i < VAULT_WRITES; i++)
        vault->writes[i].vault = vault;
    vault_warm_init(vault, block + 3 * (size_t)vault->alignment);
    vault_read_init(vault);
    vault_scan_init(vault);
}

static int open_disk(struct kv_vault *vault) {
    const struct kv_vault_options *o = &vault->options;
    struct disk_options disk = {.folder = o->folder,
                                .work = o->work,
                                .segment_bytes = vault->segment_bytes,
                                .n_segments_max = vault->n_segments_max,
                                .n_ops_max = VAULT_OPS,
                                .deadline_us = o->deadline_us,
                                .buffers = o->buffers,
                                .n_buffers = o->n_buffers,
                                .no_ring = o->no_ring,
                                .no_direct = o->no_direct,
                                .wrap = o->wrap,
                                .wrap_user = o->wrap_user};
    int r = disk_open(&disk, &vault->disk);

    vault->alignment = r == 0 ? disk_alignment(vault->disk) : 0;
    return r;
}

/* One segment at least. */
static uint64_t share_of(const struct kv_vault *vault, enum kv_group group, uint64_t bytes) {
    uint32_t percent = vault->options.group[group].share;

    return max_u64(bytes / 100 * percent + bytes % 100 * percent / 100, vault->segment_bytes);
}

static int open_maps(struct kv_vault *vault) {
    const struct kv_vault_options *o = &vault->options;
    struct segment_options segments = {.n_segments_max = vault->n_segments_max,
                                       .segment_bytes = vault->segment_bytes,
                                       .first_offset = vault->alignment,
                                       .cap_bytes = o->disk_bytes};
    uint64_t n_records = 0;
    int r;

    for (int g = 0; g < KV_GROUP_N; g++) {
        segments.group[g].slot_bytes = o->group[g].slot_bytes;
        if (o->group[g].slot_bytes == 0)
            continue;
        if (o->group[g].slot_bytes % vault->alignment != 0)
            return -EINVAL;
        segments.group[g].cap_bytes = share_of(vault, (enum kv_group)g, o->disk_bytes);
        n_records += segments.group[g].cap_bytes / o->group[g].slot_bytes;
    }
    n_records = max_u64(n_records, vault->n_slots_found); /* they may be others than those that are due now */
    if (n_records >= KV_NO_RECORD / 2)
        return -EINVAL;
    r = segment_open(&segments, &vault->segments);
    if (r == 0)
        r = catalog_open((uint32_t)n_records, o->share_percent, &vault->catalog);
    vault->n_records_max = (uint32_t)n_records;
    return r;
}

static int open_memory(struct kv_vault *vault) {
    size_t blocks_bytes = (size_t)BLOCKS * vault->alignment, verify_bytes = 0;

    vault->blocks = aligned_alloc(vault->alignment, blocks_bytes);
    for (int g = 0; g < KV_GROUP_N; g++)
        verify_bytes = max_u64(verify_bytes, vault->options.group[g].slot_bytes);
    vault->verify.buffer = aligned_alloc(vault->alignment, verify_bytes);
    vault->scan_memory = aligned_alloc(VAULT_SCAN_BYTES, (size_t)VAULT_SCANS * VAULT_SCAN_BYTES);
    vault->segment = calloc(vault->n_segments_max, sizeof *vault->segment);
    vault->save.records = calloc(vault->options.n_pages_max, sizeof *vault->save.records);
    vault->save.keys = calloc(vault->options.n_pages_max, sizeof *vault->save.keys);
    vault->to_blank = calloc((size_t)vault->n_records_max + 1, sizeof *vault->to_blank);
    if (!vault->blocks || !vault->verify.buffer || !vault->scan_memory || !vault->segment || !vault->save.records ||
        !vault->save.keys || !vault->to_blank)
        return -ENOMEM;
    memset(vault->blocks, 0, blocks_bytes);
    return 0;
}

/* As far as it can be known before the files are made. */
static int look_for_room(struct kv_vault *vault) {
    uint64_t bytes;
    int r = disk_folder_free_bytes(vault->options.folder, &bytes);

    if (r != 0)
        return r;
    for (uint32_t s = 0; s < vault->n_segments_max; s++)
        bytes += disk_segment_exists(vault->disk, s) ? vault->segment_bytes : 0;
    vault->room_bytes = min_u64(vault->options.disk_bytes, bytes);
    vault->room_bytes -= vault->room_bytes % vault->segment_bytes;
    return 0;
}

int kv_vault_open(const struct kv_vault_options *options, struct kv_vault **ret_vault) {
    struct kv_breaker_options breaker = {
        .n_errors_max = ERRORS_MAX, .n_late_max = LATE_MAX, .window_us = WINDOW_US, .probe_us = PROBE_US};
    struct kv_vault *vault = calloc(1, sizeof *vault);
    int r;

    if (!vault)
        return -ENOMEM;
    vault->options = *options;
    vault->next_of_all = KV_NO_RECORD;
    vault->budget_bytes = (double)options->write_bytes_per_day;
    vault->budget_us = options->now_us();
    kv_breaker_init(&vault->breaker, &breaker);
    r = vault_survey(vault);
    if (r == 0)
        r = open_disk(vault);
    if (r == 0)
        r = open_maps(vault);
    if (r == 0)
        r = vault_mark_strangers(vault);
    if (r == 0)
        r = look_for_room(vault);
    if (r == 0)
        r = open_memory(vault);
    if (r != 0) {
        kv_vault_close(vault);
        return r;
    }
    init_ops(vault);
    *ret_vault = vault;
    return 0;
}

uint32_t kv_vault_close(struct kv_vault *vault) {
    uint32_t n_out;

    if (!vault)
        return 0;
    vault->is_closing = true;
    n_out = vault->disk ? disk_close(vault->disk) : 0;
    if (n_out == 0)
        vault->disk = NULL;
    vault_read_stop(vault);
    if (n_out > 0 || vault->n_work > 0) /* or a worker reads what would be freed */
        return n_out + vault->n_work;
    catalog_close(vault->catalog);
    segment_close(vault->segments);
    free(vault->blocks);
    free(vault->verify.buffer);
    free(vault->scan_memory);
    free(vault->segment);
    free(vault->save.records);
    free(vault->save.keys);
    free(vault->to_blank);
    free(vault);
    return 0;
}

/* ---- what leaves ---------------------------------------------------------------------------------------------------- */

/* Records and slots to be blanked are no more than records can be: see vault_has_room(). */
void vault_blank(struct kv_vault *vault, enum kv_group group, uint32_t slot) {
    assert(vault->n_to_blank < vault->n_records_max);
    vault->to_blank[vault->n_to_blank].slot = slot;
    vault->to_blank[vault->n_to_blank++].group = group;
}

void vault_forget(struct kv_vault *vault, uint32_t record) {
    struct catalog_view view = catalog_look(vault->catalog, record);

    if (catalog_drop(vault->catalog, record))
        vault_blank(vault, view.group, view.slot);
}

void vault_pin(struct kv_vault *vault, uint32_t record) {
    struct catalog_view view = catalog_look(vault->catalog, record);

    if (!view.was_read)
        vault->stats.used_bytes += vault->options.group[view.group].slot_bytes;
    catalog_pin(vault->catalog, record);
}

void vault_unpin(struct kv_vault *vault, uint32_t record) {
    struct catalog_view view = catalog_look(vault->catalog, record);

    if (catalog_unpin(vault->catalog, record))
        vault_blank(vault, view.group, view.slot);
}

void vault_unguard(struct kv_vault *vault, uint32_t record) {
    struct catalog_view view = catalog_look(vault->catalog, record);

    if (catalog_unguard(vault->catalog, record))
        vault_blank(vault, view.group, view.slot);
}

uint32_t vault_n_to_blank(const struct kv_vault *vault) {
    uint32_t n = vault->n_to_blank;

    for (int i = 0; i < VAULT_BLANKS; i++)
        n += vault->blanks[i].is_busy;
    return n;
}

bool vault_is_blanking(const struct kv_vault *vault) {
    for (int i = 0; i < VAULT_BLANKS; i++)
        if (vault->blanks[i].is_busy ? !vault->blanks[i].op.is_late : vault->n_to_blank > 0)
            return true;
    return false;
}

bool vault_has_room(const struct kv_vault *vault) {
    uint32_t n = vault->n_to_blank;

    for (int g = 0; g < KV_GROUP_N; g++) {
        struct catalog_group_stats group;

        catalog_stats(vault->catalog, (enum kv_group)g, &group);
        n += group.n_stored + group.n_writing;
    }
    return n < vault->n_records_max;
}

static void count_evicted(struct kv_vault *vault, const struct catalog_view *view) {
    vault->stats.group[view->group].n_evicted++;
    vault->stats.n_never_read += !view->was_read;
}

void vault_evict(struct kv_vault *vault, uint32_t record) {
    struct catalog_view view = catalog_look(vault->catalog, record);

    count_evicted(vault, &view);
    if (catalog_drop(vault->catalog, record))
        segment_give(vault->segments, view.group, view.slot);
}

static void on_blanked(struct disk_op *op) {
    struct vault_blank *blank = container_of(op, struct vault_blank, op);

    blank->is_busy = false;
    blank->vault->stats.n_blank_errors += op->result != 0 && op->result != -ECANCELED;
    if (op->result == 0) {
        blank->vault->tick++;
        vault_stored_in(blank->vault, op->segment, op->bytes);
    }
    segment_give(blank->vault->segments, blank->group, blank->slot);
}

/* A slot whose blanking cannot be sent now stays on the stack. */
static void blank_turn(struct kv_vault *vault) {
    for (int i = 0; i < VAULT_BLANKS && vault->n_to_blank > 0; i++) {
        struct vault_blank *blank = &vault->blanks[i];

        if (blank->is_busy)
            continue;
        blank->slot = vault->to_blank[vault->n_to_blank - 1].slot;
        blank->group = vault->to_blank[vault->n_to_blank - 1].group;
        blank->op.buffer = vault->zeros;
        blank->op.bytes = vault->alignment;
        vault_locate(vault, blank->group, blank->slot, &blank->op);
        if (disk_submit(vault->disk, &blank->op, vault->options.now_us()) != 0)
            return;
        blank->is_busy = true;
        vault->n_to_blank--;
    }
}

void vault_locate(const struct kv_vault *vault, enum kv_group group, uint32_t slot, struct disk_op *op) {
    segment_locate(vault->segments, group, slot, &op->segment, &op->offset);
}

/* The longest unused of all groups, by when it was stored: groups have lists of their own. */
static uint32_t oldest_of_all(const struct kv_vault *vault) {
    uint32_t oldest = KV_NO_RECORD;
    uint64_t tick = UINT64_MAX;

    for (int g = 0; g < KV_GROUP_N; g++) {
        uint32_t record = catalog_oldest(vault->catalog, (enum kv_group)g);

        if (record != KV_NO_RECORD && catalog_look(vault->catalog, record).used < tick) {
            oldest = record;
            tick = catalog_look(vault->catalog, record).used;
        }
    }
    return oldest;
}

uint64_t kv_vault_evict_bytes(struct kv_vault *vault, uint64_t n_bytes) {
    uint64_t n_dropped = 0;
    uint32_t record;

    while (n_dropped < n_bytes && (record = oldest_of_all(vault)) != KV_NO_RECORD) {
        struct catalog_view view = catalog_look(vault->catalog, record);

        n_dropped += vault->options.group[view.group].slot_bytes;
        count_evicted(vault, &view);
        vault_forget(vault, record);
    }
    return n_dropped;
}

uint64_t kv_vault_purge(struct kv_vault *vault, uint32_t uid) {
    uint64_t n_dropped = 0;

    vault_purge_saves(vault, uid);
    vault_drop_outdated(vault);
    if (vault->scan_state != VAULT_SCAN_DONE) { /* what is found from now on was written before */
        if (vault->n_purged < VAULT_PURGES)
            vault->purged[vault->n_purged] = uid;
        vault->n_purged++;
    }
    for (uint32_t record = 0; (record = catalog_next(vault->catalog, record)) != KV_NO_RECORD; record++) {
        struct catalog_view view = catalog_look(vault->catalog, record);

        if (view.uid != uid)
            continue;
        n_dropped += vault->options.group[view.group].slot_bytes;
        vault_forget(vault, record);
    }
    return n_dropped;
}

/* ---- trouble -------------------------------------------------------------------------------------------------------- */

void vault_report(struct kv_vault *vault, uint64_t ticket, bool *is_reported, enum kv_breaker_report report) {
    if (!*is_reported)
        kv_breaker_report(&vault->breaker, ticket, report, vault->options.now_us());
    *is_reported = true;
}

bool vault_may_write(struct kv_vault *vault) {
    if (vault->write_off_until_us != 0 && vault->options.now_us() >= vault->write_off_until_us)
        vault->write_off_until_us = 0;
    return vault->write_off_until_us == 0 && vault->scan_state != VAULT_SCAN_HEADS;
}

/* No space, no leave: reading goes on, and writing is tried again later. */
bool vault_is_no_space(int error) {
    return error == -ENOSPC || error == -EDQUOT || error == -EROFS || error == -EACCES || error == -EPERM;
}

void vault_write_failed(struct kv_vault *vault, int error) {
    vault->stats.n_write_errors++;
    vault->stats.write_error = error;
    if (vault_is_no_space(error))
        vault->write_off_until_us = vault->options.now_us() + WRITE_OFF_US;
}

/* An operation that did not come home when it was called, and not after as long again: its memory is lost to us. */
static void quarantine_turn(struct kv_vault *vault) {
    uint64_t now = vault->options.now_us();
    struct disk_stats disk;

    disk_stats(vault->disk, &disk);
    if (disk.n_out_late <= vault->n_quarantined) {
        vault->n_quarantined = disk.n_out_late;
        vault->quarantine_us = 0;
    } else if (vault->quarantine_us == 0) {
        vault->quarantine_us = now + vault->options.deadline_us;
    } else if (now >= vault->quarantine_us) {
        vault->n_quarantined = disk.n_out_late;
        vault->quarantine_us = 0;
        kv_breaker_trip(&vault->breaker, now);
    }
}

/* Writes zeros where nothing lies, and reads them back; if all slots are taken it reads one. */
static void probe_turn(struct kv_vault *vault) {
    uint64_t now = vault->options.now_us();

    if (vault->probe.is_busy || !kv_breaker_wants_probe(&vault->breaker, now))
        return;
    vault->probe.has_slot = false;
    for (int g = 0; !vault->probe.has_slot && g < KV_GROUP_N; g++) {
        vault->probe.group = (enum kv_group)g;
        vault->probe.has_slot = segment_take(vault->segments, (enum kv_group)g, KV_NO_SLOT, &vault->probe.slot) == 0;
    }
    if (vault->probe.has_slot) {
        vault->probe.op.kind = DISK_WRITE;
        memset(vault->probe.block, 0, vault->alignment);
        vault_locate(vault, vault->probe.group, vault->probe.slot, &vault->probe.op);
    } else {
        uint32_t segment = 0;

        while (segment < vault->n_segments_max && !disk_segment_exists(vault->disk, segment))
            segment++;
        if (segment == vault->n_segments_max) { /* there is nothing to ask: who makes the first file finds out */
            kv_breaker_report_probe(&vault->breaker, true, now);
            return;
        }
        vault->probe.op.kind = DISK_READ;
        vault->probe.op.segment = segment;
        vault->probe.op.offset = 0;
    }
    vault->probe.op.buffer = vault->probe.block;
    vault->probe.op.bytes = vault->alignment;
    vault->probe.is_busy = disk_submit(vault->disk, &vault->probe.op, now) == 0;
    if (!vault->probe.is_busy)
        kv_breaker_report_probe(&vault->breaker, false, now);
    if (!vault->probe.is_busy && vault->probe.has_slot)
        segment_give(vault->segments, vault->probe.group, vault->probe.slot);
}

static bool is_zero(const unsigned char *bytes, size_t n) {
    return n == 0 || (bytes[0] == 0 && memcmp(bytes, bytes + 1, n - 1) == 0);
}

static void on_probed(struct disk_op *op) {
    struct kv_vault *vault = container_of(op, struct kv_vault, probe.op);
    uint64_t now = vault->options.now_us();
    bool has_worked = op->result == 0;

    if (has_worked && op->kind == DISK_WRITE && !vault->is_closing) {
        memset(vault->probe.block, 0xff, vault->alignment);
        vault->probe.op.kind = DISK_READ;
        if (disk_submit(vault->disk, op, now) == 0)
            return;
        has_worked = false;
    } else if (has_worked && vault->probe.has_slot) {
        has_worked = is_zero(vault->probe.block, vault->alignment);
    }
    if (vault->probe.has_slot)
        segment_give(vault->segments, vault->probe.group, vault->probe.slot);
    vault->probe.is_busy = false;
    kv_breaker_report_probe(&vault->breaker, has_worked, now);
}

/* ---- turns ---------------------------------------------------------------------------------------------------------- */

int kv_vault_fd(const struct kv_vault *vault) {
    return disk_fd(vault->disk);
}

void kv_vault_dispatch(struct kv_vault *vault) {
    disk_dispatch(vault->disk);
}

static uint64_t sooner(uint64_t a, uint64_t b) { /* 0: never */
    return a == 0 || (b != 0 && b < a) ? b : a;
}

/* Something is to be done, and nothing is on its way whose coming home would call the next turn: what could not be sent is
 * tried again. */
static bool is_stalled(const struct kv_vault *vault) {
    struct disk_stats disk;

    if (!kv_vault_is_saving(vault) && vault->n_to_blank == 0 && !vault->flushes && !vault->verify.user &&
        vault->scan_state == VAULT_SCAN_DONE)
        return false;
    disk_stats(vault->disk, &disk);
    return disk.n_out == disk.n_out_late && vault->n_work == 0;
}

uint64_t kv_vault_turn(struct kv_vault *vault) {
    uint64_t next;

    disk_tick(vault->disk, vault->options.now_us());
    vault_may_write(vault); /* again, if its time has come */
    quarantine_turn(vault);
    vault_read_turn(vault);
    vault_scan_turn(vault);
    vault_files_turn(vault);
    vault_save_turn(vault);
    vault_sync_turn(vault);
    vault_verify_turn(vault);
    vault_warm_turn(vault);
    blank_turn(vault);
    probe_turn(vault);
    next = disk_send(vault->disk, vault->options.now_us());
    next = sooner(next, vault_sync_due_us(vault));
    next = sooner(next, vault->write_off_until_us);
    next = sooner(next, vault->removal.retry_at_us);
    if (is_stalled(vault))
        next = sooner(next, vault->options.now_us() + RETRY_US);
    if (vault->breaker.state == KV_BREAKER_OPEN && !vault->probe.is_busy)
        next = sooner(next, vault->breaker.probe_at_us);
    return next;
}

/* ---- looking -------------------------------------------------------------------------------------------------------- */

bool kv_vault_is_scanning(const struct kv_vault *vault) {
    return vault->scan_state != VAULT_SCAN_DONE;
}

bool kv_vault_has(const struct kv_vault *vault, const struct kv_key *key, uint32_t page_idx, enum kv_group group) {
    return vault->breaker.state != KV_BREAKER_OPEN &&
           catalog_find(vault->catalog, key, page_idx, group) != KV_NO_RECORD;
}

uint32_t kv_vault_uid(const struct kv_vault *vault, const struct kv_page_name *name, enum kv_group group) {
    return catalog_look(vault->catalog, catalog_find(vault->catalog, &name->key, name->page_idx, group)).uid;
}

void kv_vault_prefetch_entry(const struct kv_vault *vault, const struct kv_key *key) {
    catalog_prefetch_entry(vault->catalog, key);
}

void kv_vault_prefetch_record(const struct kv_vault *vault, const struct kv_key *key) {
    catalog_prefetch_record(vault->catalog, key);
}

bool kv_vault_pin(struct kv_vault *vault, const struct kv_page_name *name, enum kv_group group, uint32_t *ret_record) {
    uint32_t record;

    if (!kv_vault_has(vault, &name->key, name->page_idx, group))
        return false;
    record = catalog_find(vault->catalog, &name->key, name->page_idx, group);
    vault_pin(vault, record);
    *ret_record = record;
    return true;
}

void kv_vault_unpin(struct kv_vault *vault, uint32_t record) {
    vault_unpin(vault, record);
}

bool kv_vault_forget_buffers(struct kv_vault *vault) {
    return disk_forget_buffers(vault->disk);
}

bool kv_vault_is_quiet(const struct kv_vault *vault) {
    struct disk_stats disk;

    disk_stats(vault->disk, &disk);
    return !kv_vault_is_saving(vault) && vault->n_work == 0 && !vault->to_check.first && disk.n_out == disk.n_out_late;
}

void kv_vault_touch(struct kv_vault *vault, const struct kv_page_name *name) {
    for (int g = 0; g < KV_GROUP_N; g++) {
        uint32_t record = catalog_find(vault->catalog, &name->key, name->page_idx, (enum kv_group)g);

        if (record != KV_NO_RECORD)
            catalog_touch(vault->catalog, record);
    }
}

void kv_vault_stats(const struct kv_vault *vault, struct kv_vault_stats *ret_stats) {
    struct segment_stats segments;

    *ret_stats = vault->stats;
    segment_stats(vault->segments, &segments);
    for (int g = 0; g < KV_GROUP_N; g++) {
        struct catalog_group_stats group;

        catalog_stats(vault->catalog, (enum kv_group)g, &group);
        ret_stats->group[g].n_stored = group.n_stored;
        ret_stats->group[g].n_writing = group.n_writing;
        ret_stats->group[g].n_pinned = group.n_pinned;
        ret_stats->group[g].n_slots = segments.group[g].n_slots;
    }
    ret_stats->segment_bytes = vault->segment_bytes;
    ret_stats->bytes = segments.bytes;
    ret_stats->cap_bytes = segments.cap_bytes;
    ret_stats->room_bytes = vault->room_bytes;
    ret_stats->budget_bytes = vault->options.write_bytes_per_day == 0 ? UINT64_MAX
                              : vault->budget_bytes > 0               ? (uint64_t)vault->budget_bytes
                                                                      : 0;
    ret_stats->n_breaker_opened = vault->breaker.n_opened;
    ret_stats->is_off = vault->breaker.state != KV_BREAKER_CLOSED;
    ret_stats->is_write_off = vault->write_off_until_us != 0;
    ret_stats->is_scanning = vault->scan_state != VAULT_SCAN_DONE;
    ret_stats->is_warming = kv_vault_is_warming(vault);
    ret_stats->n_to_blank = vault_n_to_blank(vault);
    disk_stats(vault->disk, &ret_stats->disk);
}

const struct kv_share *kv_vault_share(const struct kv_vault *vault) {
    return catalog_share(vault->catalog);
}

const char *kv_vault_check(const struct kv_vault *vault) {
    const char *wrong = catalog_check(vault->catalog);
    struct segment_stats segments;
    uint64_t n_held = vault_n_to_blank(vault) + vault->n_foreign_slots, n_taken = 0;

    if (wrong == NULL)
        wrong = segment_check(vault->segments);
    segment_stats(vault->segments, &segments);
    n_held += vault->probe.is_busy && vault->probe.has_slot;
    for (int g = 0; g < KV_GROUP_N; g++) {
        struct catalog_group_stats group;

        catalog_stats(vault->catalog, (enum kv_group)g, &group);
        n_held += group.n_stored + group.n_writing;
        n_taken += segments.group[g].n_taken + segments.group[g].n_taken_elsewhere;
    }
    return wrong != NULL || n_held == n_taken ? wrong : "the slots in use are not those that something lies in";
}
