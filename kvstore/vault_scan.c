/* vault_scan: what the folder held at open. First the heads of all segments, before any file is made; then, while the store
 * works already, the headers of their slots. Payloads are held against their headers when they are read. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "vault_internal.h"

/* What the kernel still has a part of stays until the end. */
static void finish(struct kv_vault *vault) {
    vault->scan_state = VAULT_SCAN_DONE;
    for (int i = 0; i < VAULT_SCANS; i++)
        if (vault->scans[i].is_busy)
            return;
    free(vault->scan_memory);
    vault->scan_memory = NULL;
}

void vault_scan_init(struct kv_vault *vault) {
    for (int i = 0; i < VAULT_SCANS; i++) {
        vault->scans[i].vault = vault;
        vault->scans[i].block = (char *)vault->scan_memory + (size_t)i * VAULT_SCAN_BYTES;
    }
    for (uint32_t s = 0; s < vault->n_segments_max; s++)
        vault->stats.n_segments += disk_segment_exists(vault->disk, s);
    if (vault->stats.n_segments == 0)
        finish(vault);
}

static struct vault_scan_read *free_read(struct kv_vault *vault) {
    for (int i = 0; i < VAULT_SCANS; i++)
        if (!vault->scans[i].is_busy)
            return &vault->scans[i];
    return NULL;
}

static bool send(struct kv_vault *vault, struct vault_scan_read *read, uint32_t bytes, void (*late)(struct disk_op *op),
                 void (*done)(struct disk_op *op)) {
    read->op.kind = DISK_READ;
    read->op.buffer = read->block;
    read->op.bytes = bytes;
    read->op.late = late;
    read->op.done = done;
    read->is_given_up = read->is_home = false;
    read->is_busy = disk_submit(vault->disk, &read->op, vault->options.now_us()) == 0;
    vault->n_scans_out += read->is_busy;
    return read->is_busy;
}

/* ---- segments ------------------------------------------------------------------------------------------------------- */

static void take_head(struct kv_vault *vault, uint32_t s, const void *block, int result) {
    const struct kv_vault_options *o = &vault->options;
    struct format_segment head;
    int r = result == 0 ? format_segment_read(block, &head) : FORMAT_E_FOREIGN; /* unread is not ours to overwrite */

    if (r == FORMAT_E_FREE || r == FORMAT_E_BAD) { /* what lies behind it is not to be found again: another file */
        segment_found_empty(vault->segments, s);
        segment_retire(vault->segments, s);
        return;
    }
    if (r == 0 && memcmp(head.store_id, o->store_id, sizeof o->store_id) == 0 && head.segment == s &&
        head.segment_bytes == vault->segment_bytes && head.first_offset == vault->alignment &&
        head.slot_bytes == o->group[head.group].slot_bytes) {
        segment_found(vault->segments, s, head.group);
        vault->segment[s].bound_sequence = head.write_sequence;
        vault->write_sequence = max_u64(vault->write_sequence, head.write_sequence);
        vault->tick++;
        vault_stored_in(vault, s, 0); /* who wrote it may have ended before it was synced */
        return;
    }
    segment_found_foreign(vault->segments, s);
    vault->segment[s].is_outdated = r == 0 && memcmp(head.store_id, o->store_id, sizeof o->store_id) == 0;
    vault->stats.n_segments_foreign++;
}

/* True: somebody waits for it. One that is late is given up, and may come home or not. */
static bool come_home(struct vault_scan_read *read) {
    read->is_busy = false;
    read->vault->n_scans_out -= !read->is_given_up;
    return !read->is_given_up;
}

static void give_up(struct vault_scan_read *read) {
    read->is_given_up = true;
    read->vault->n_scans_out--;
}

static void on_head_read(struct disk_op *op) {
    struct vault_scan_read *read = container_of(op, struct vault_scan_read, op);

    if (come_home(read) && op->result != -ECANCELED)
        take_head(read->vault, op->segment, read->block, op->result);
}

static void on_late_head(struct disk_op *op) {
    struct vault_scan_read *read = container_of(op, struct vault_scan_read, op);

    give_up(read);
    take_head(read->vault, op->segment, read->block, -ETIMEDOUT);
}

static void heads_turn(struct kv_vault *vault) {
    for (; vault->scan_segment < vault->n_segments_max; vault->scan_segment++) {
        struct vault_scan_read *read;

        if (!disk_segment_exists(vault->disk, vault->scan_segment))
            continue;
        read = free_read(vault);
        if (!read)
            return;
        read->op.segment = vault->scan_segment;
        read->op.offset = 0;
        read->first_slot = KV_NO_SLOT;
        if (!send(vault, read, vault->alignment, on_late_head, on_head_read))
            return;
    }
    if (vault->n_scans_out > 0)
        return;
    if (vault->n_purged > 0)
        vault_drop_outdated(vault);
    vault->scan_state = VAULT_SCAN_SLOTS;
    vault->scan_segment = UINT32_MAX;
    vault->scan_slot = vault->scan_end = 0;
}

/* ---- slots ---------------------------------------------------------------------------------------------------------- */

static bool is_purged(const struct kv_vault *vault, const struct format_slot *header) {
    for (uint32_t i = 0; i < vault->n_purged && i < VAULT_PURGES; i++)
        if (vault->purged[i] == header->uid)
            return true;
    return vault->n_purged > VAULT_PURGES;
}

/* No record is to be had for it. It is blanked, so that no header lies in a free slot that a later start finds again. */
static void blank_found(struct kv_vault *vault, uint32_t slot) {
    if (!vault_has_room(vault))
        return;
    segment_mark_taken(vault->segments, vault->scan_group, slot);
    vault_blank(vault, vault->scan_group, slot);
}

/* Only what the models that run can find is worth its slot, and what another model of the same shapes left: that has other
 * keys, and stays until its slots are needed. */
static void take_header(struct kv_vault *vault, uint32_t segment, uint32_t slot, const void *block) {
    const struct kv_vault_options *o = &vault->options;
    struct catalog_entry entry = {.group = vault->scan_group, .slot = slot, .segment = segment};
    struct format_slot header;
    int r = format_slot_read(block, &header);
    uint32_t record;

    vault->stats.n_scanned++;
    if (r == FORMAT_E_FREE)
        return;
    if (segment_state(vault->segments, segment) != SEGMENT_SCANNING)
        return;                  /* retired meanwhile */
    if (r == FORMAT_E_FOREIGN) { /* not ours to overwrite */
        vault->stats.n_scan_foreign++;
        vault->n_foreign_slots++;
        segment_mark_taken(vault->segments, vault->scan_group, slot);
        return;
    }
    if (r != 0) {
        vault->stats.n_scan_bad++;
        return;
    }
    if (memcmp(header.store_id, o->store_id, sizeof o->store_id) != 0 || header.group != vault->scan_group ||
        header.write_sequence < vault->segment[segment].bound_sequence ||
        format_slot_bytes(header.payload_bytes, vault->alignment) != o->group[header.group].slot_bytes ||
        (kv_group_is_draft(header.group) && memcmp(header.drafter, o->drafter, sizeof o->drafter) != 0)) {
        vault->stats.n_scan_foreign++;
        blank_found(vault, slot);
        return;
    }
    if (is_purged(vault, &header)) {
        blank_found(vault, slot);
        return;
    }
    vault->write_sequence = max_u64(vault->write_sequence, header.write_sequence);
    entry.key = header.key;
    entry.page_idx = header.page_idx;
    entry.uid = header.uid;
    if (!vault_has_room(vault) || catalog_put(vault->catalog, &entry, &record) != 0) {
        blank_found(vault, slot); /* there twice, which is as good; or more than there may be now */
        return;
    }
    catalog_found(vault->catalog, record);
    segment_mark_taken(vault->segments, entry.group, entry.slot);
    if (entry.group == KV_TARGET_STATE && memcmp(header.fingerprint, o->fingerprint, sizeof o->fingerprint) == 0)
        vault_warm_found(vault, record, header.write_sequence);
}

static struct vault_scan_read *find_read(struct kv_vault *vault, uint32_t slot) {
    for (int i = 0; i < VAULT_SCANS; i++)
        if (vault->scans[i].is_busy && vault->scans[i].first_slot == slot)
            return &vault->scans[i];
    return NULL;
}

static void on_header_read(struct disk_op *op);
static void on_late_header(struct disk_op *op);

static bool read_slots(struct kv_vault *vault, struct vault_scan_read *read, uint32_t first_slot, uint32_t n) {
    read->first_slot = first_slot;
    read->n_slots = n;
    vault_locate(vault, vault->scan_group, first_slot, &read->op);
    return send(vault, read, (n - 1) * vault->options.group[vault->scan_group].slot_bytes + vault->alignment,
                on_late_header, on_header_read);
}

static void pass_over(struct kv_vault *vault, uint32_t n) {
    vault->stats.n_scan_bad += n;
    vault->scan_taken += n;
}

/* The read whose turn it is has come home, or is late: then it is passed over, and stays busy until it comes. One place that
 * cannot be read hides the others of its run: they are read again, each for itself. */
static void take(struct kv_vault *vault, struct vault_scan_read *read) {
    uint32_t first = read->first_slot, n = read->n_slots, n_singly = read->n_singly;

    read->first_slot = KV_NO_SLOT;
    read->n_singly = 0;
    read->is_busy = !read->is_home;
    vault->n_scans_out--;
    if (read->is_given_up) {
        pass_over(vault, n + n_singly);
        return;
    }
    for (uint32_t i = 0; read->op.result == 0 && i < n; i++)
        take_header(vault, read->op.segment, first + i,
                    (char *)read->block + (size_t)i * vault->options.group[vault->scan_group].slot_bytes);
    if (read->op.result == 0)
        vault->scan_taken += n;
    else if (n > 1)
        n_singly = n;
    else
        pass_over(vault, 1);
    if (n_singly == 0)
        return;
    if (read_slots(vault, read, vault->scan_taken, 1))
        read->n_singly = n_singly - 1;
    else
        pass_over(vault, n_singly);
}

static void take_in_order(struct kv_vault *vault) {
    struct vault_scan_read *read;

    while ((read = find_read(vault, vault->scan_taken)) != NULL && (read->is_home || read->is_given_up))
        take(vault, read);
}

static void on_header_read(struct disk_op *op) {
    struct vault_scan_read *read = container_of(op, struct vault_scan_read, op);

    read->is_home = true;
    if (read->first_slot == KV_NO_SLOT)
        read->is_busy = false;
    else if (!read->vault->is_closing)
        take_in_order(read->vault);
}

static void on_late_header(struct disk_op *op) {
    struct vault_scan_read *read = container_of(op, struct vault_scan_read, op);

    read->is_given_up = true;
    take_in_order(read->vault);
}

/* False: all are done. */
static bool next_segment(struct kv_vault *vault) {
    for (uint32_t s = vault->scan_segment + 1; s < vault->n_segments_max; s++) {
        uint32_t n;

        if (segment_state(vault->segments, s) != SEGMENT_SCANNING)
            continue;
        n = segment_slots(vault->segments, s, &vault->scan_group, &vault->scan_slot);
        vault->scan_taken = vault->scan_slot;
        vault->scan_end = vault->scan_slot + n;
        vault->scan_segment = s;
        return true;
    }
    return false;
}

static uint32_t n_at_once(const struct kv_vault *vault) {
    uint32_t slot_bytes = vault->options.group[vault->scan_group].slot_bytes;

    return slot_bytes <= VAULT_SCAN_BYTES / 4 ? VAULT_SCAN_BYTES / slot_bytes : 1;
}

static void slots_turn(struct kv_vault *vault) {
    for (;;) {
        while (vault->scan_slot < vault->scan_end) {
            struct vault_scan_read *read = free_read(vault);
            uint64_t n;

            if (!read)
                return;
            n = min_u64(vault->scan_end - vault->scan_slot, n_at_once(vault));
            if (!read_slots(vault, read, vault->scan_slot, (uint32_t)n))
                return;
            vault->scan_slot += (uint32_t)n;
        }
        if (vault->n_scans_out > 0)
            return;
        if (vault->scan_segment != UINT32_MAX) {
            if (segment_state(vault->segments, vault->scan_segment) == SEGMENT_SCANNING)
                segment_ready(vault->segments, vault->scan_segment);
            vault->stats.n_segments_scanned++;
        }
        if (!next_segment(vault)) {
            finish(vault);
            return;
        }
    }
}

void vault_scan_turn(struct kv_vault *vault) {
    if (vault->scan_state == VAULT_SCAN_HEADS)
        heads_turn(vault);
    if (vault->scan_state == VAULT_SCAN_SLOTS)
        slots_turn(vault);
}
