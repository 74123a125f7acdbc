/* vault_scan: what the folder held at open. First the heads of all segments, before any file is made; then, while the store
 * works already, the headers of their slots. Payloads are held against their headers when they are read. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "vault_internal.h"

static void on_head_read(struct disk_op *op);
static void on_header_read(struct disk_op *op);

static void finish(struct kv_vault *vault) {
    vault->scan_state = VAULT_SCAN_DONE;
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

static bool send(struct kv_vault *vault, struct vault_scan_read *read, uint32_t bytes,
                 void (*done)(struct disk_op *op)) {
    read->op.kind = DISK_READ;
    read->op.buffer = read->block;
    read->op.bytes = bytes;
    read->op.done = done;
    read->is_busy = disk_submit(vault->disk, &read->op, vault->options.now_us()) == 0;
    vault->n_scans_out += read->is_busy;
    return read->is_busy;
}

/* ---- segments ------------------------------------------------------------------------------------------------------- */

static void take_head(struct kv_vault *vault, uint32_t s, const void *block, int result) {
    const struct kv_vault_options *o = &vault->options;
    struct format_segment head;
    int r = result == 0 ? format_segment_read(block, &head) : FORMAT_E_FOREIGN; /* unread is not ours to overwrite */

    if (r == FORMAT_E_FREE || r == FORMAT_E_BAD) {
        segment_found_empty(vault->segments, s);
        return;
    }
    if (r == 0 && memcmp(head.store_id, o->store_id, sizeof o->store_id) == 0 && head.segment == s &&
        head.segment_bytes == vault->segment_bytes && head.first_offset == vault->alignment &&
        head.slot_bytes == o->group[head.group].slot_bytes) {
        segment_found(vault->segments, s, head.group);
        vault->write_sequence = max_u64(vault->write_sequence, head.write_sequence);
        return;
    }
    segment_found_foreign(vault->segments, s);
    vault->segment[s].is_outdated = r == 0 && memcmp(head.store_id, o->store_id, sizeof o->store_id) == 0;
    vault->stats.n_segments_foreign++;
}

static void on_head_read(struct disk_op *op) {
    struct vault_scan_read *read = container_of(op, struct vault_scan_read, op);
    struct kv_vault *vault = read->vault;

    read->is_busy = false;
    vault->n_scans_out--;
    if (op->result != -ECANCELED)
        take_head(vault, op->segment, read->block, op->result);
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
        if (!send(vault, read, vault->alignment, on_head_read))
            return;
    }
    if (vault->n_scans_out > 0)
        return;
    vault->scan_state = VAULT_SCAN_SLOTS;
    vault->scan_segment = UINT32_MAX;
    vault->scan_slot = vault->scan_end = 0;
}

/* ---- slots ---------------------------------------------------------------------------------------------------------- */

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
    if (r != 0) {
        *(r == FORMAT_E_FOREIGN ? &vault->stats.n_scan_foreign : &vault->stats.n_scan_bad) += 1;
        return;
    }
    if (memcmp(header.store_id, o->store_id, sizeof o->store_id) != 0 || header.group != vault->scan_group ||
        format_slot_bytes(header.payload_bytes, vault->alignment) != o->group[header.group].slot_bytes ||
        (kv_group_is_draft(header.group) && memcmp(header.drafter, o->drafter, sizeof o->drafter) != 0)) {
        vault->stats.n_scan_foreign++;
        return;
    }
    vault->write_sequence = max_u64(vault->write_sequence, header.write_sequence);
    entry.key = header.key;
    entry.page_idx = header.page_idx;
    entry.uid = header.uid;
    r = catalog_put(vault->catalog, &entry, &record);
    if (r != 0) /* there twice, which is as good; or more than the group may have now */
        return;
    catalog_stored(vault->catalog, record, 0);
    segment_mark_taken(vault->segments, entry.group, entry.slot);
}

static bool read_slots(struct kv_vault *vault, struct vault_scan_read *read, uint32_t first_slot, uint32_t n) {
    read->first_slot = first_slot;
    read->n_slots = n;
    vault_locate(vault, vault->scan_group, first_slot, &read->op);
    return send(vault, read, (n - 1) * vault->options.group[vault->scan_group].slot_bytes + vault->alignment,
                on_header_read);
}

static void on_header_read(struct disk_op *op) {
    struct vault_scan_read *read = container_of(op, struct vault_scan_read, op);
    struct kv_vault *vault = read->vault;
    uint32_t next = read->first_slot + 1;

    read->is_busy = false;
    vault->n_scans_out--;
    if (op->result == -ECANCELED)
        return;
    for (uint32_t i = 0; op->result == 0 && i < read->n_slots; i++)
        take_header(vault, op->segment, read->first_slot + i,
                    (char *)read->block + (size_t)i * vault->options.group[vault->scan_group].slot_bytes);
    if (op->result != 0 && read->n_slots > 1) { /* one place that cannot be read hides the others: each for itself */
        next = read->first_slot;
        read->n_singly = read->n_slots;
    } else if (op->result != 0) {
        vault->stats.n_scan_bad++;
    }
    if (read->n_singly > 0 && !read_slots(vault, read, next, 1)) {
        vault->stats.n_scan_bad += read->n_singly;
        read->n_singly = 0;
    } else if (read->n_singly > 0) {
        read->n_singly--;
    }
}

/* False: all are done. */
static bool next_segment(struct kv_vault *vault) {
    for (uint32_t s = vault->scan_segment + 1; s < vault->n_segments_max; s++) {
        uint32_t n;

        if (segment_state(vault->segments, s) != SEGMENT_SCANNING)
            continue;
        n = segment_slots(vault->segments, s, &vault->scan_group, &vault->scan_slot);
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
