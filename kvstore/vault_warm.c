/* vault_warm: after the folder was read, the chains whose restore points were written last are brought onto the shelf, before
 * anybody asks, as far as a part of it goes. Only into free slots, one page at a time, and only while the disk has nothing
 * else to do.
 *
 *     GATHERING --all is known--> CHOOSING --> [HEADER --> PAGE]* --no chain left, no room, the disk makes trouble--> OVER
 *
 * A chain is walked from its end, as the catalog knows no names: the header of a page has its name and its parent's key. */
#include <stdlib.h>

#include "vault_internal.h"

void vault_warm_found(struct kv_vault *vault, uint32_t record, uint64_t write_sequence) {
    uint32_t at = 0;

    if (vault->warm.n == VAULT_WARM_POINTS) { /* the one written first gives its place */
        for (uint32_t i = 1; i < vault->warm.n; i++)
            if (vault->warm.points[i].write_sequence < vault->warm.points[at].write_sequence)
                at = i;
        if (vault->warm.points[at].write_sequence > write_sequence)
            return;
    } else {
        at = vault->warm.n++;
    }
    vault->warm.points[at] = (struct vault_warm_point){record, write_sequence};
}

void kv_vault_let_warm(struct kv_vault *vault, bool may) {
    vault->warm.may = may;
}

bool kv_vault_is_warming(const struct kv_vault *vault) {
    return vault->warm.state != VAULT_WARM_OVER;
}

/* ---- which ---------------------------------------------------------------------------------------------------------- */

static int compare(const void *a, const void *b) {
    uint64_t x = ((const struct vault_warm_point *)a)->write_sequence,
             y = ((const struct vault_warm_point *)b)->write_sequence;

    return (x > y) - (x < y);
}

/* Those written last, as many as the part of the shelf holds if they share nothing; the last of all comes last, so that it
 * leaves last. */
static void choose(struct kv_vault *vault) {
    uint32_t n_left[KV_GROUP_N], n_chosen = 0;

    for (int g = 0; g < KV_GROUP_N; g++) {
        struct kv_shelf_group_stats stats;

        kv_shelf_stats(vault->options.shelf, (enum kv_group)g, &stats);
        n_left[g] = (uint32_t)div_ceil((uint64_t)stats.n_slots * vault->options.warm_percent, 100);
    }
    qsort(vault->warm.points, vault->warm.n, sizeof *vault->warm.points, compare);
    for (uint32_t i = vault->warm.n; i-- > 0;) {
        struct vault_warm_point point = vault->warm.points[i];
        struct catalog_view view = catalog_look(vault->catalog, point.record);

        if (catalog_next(vault->catalog, point.record) != point.record || view.group != KV_TARGET_STATE ||
            view.page_idx >= n_left[KV_TARGET_FULL] || n_left[KV_TARGET_STATE] == 0)
            continue;
        n_left[KV_TARGET_FULL] -= view.page_idx + 1;
        n_left[KV_TARGET_STATE]--;
        vault->warm.points[vault->warm.n - ++n_chosen] = point; /* behind all that are still to be looked at */
    }
    vault->warm.next = vault->warm.n - n_chosen;
}

/* ---- one chain ------------------------------------------------------------------------------------------------------ */

static bool is_still(const struct kv_vault *vault) {
    return catalog_next(vault->catalog, vault->warm.record) == vault->warm.record &&
           catalog_look(vault->catalog, vault->warm.record).slot == vault->warm.slot;
}

static bool ask_header(struct kv_vault *vault, uint32_t record) {
    struct catalog_view view = catalog_look(vault->catalog, record);

    vault->warm.record = record;
    vault->warm.slot = view.slot;
    vault_locate(vault, view.group, view.slot, &vault->warm.op);
    vault->warm.is_out = disk_submit(vault->disk, &vault->warm.op, vault->options.now_us()) == 0;
    return vault->warm.is_out;
}

/* What lies there may be another page by now; if it is not, it must be what the catalog says. */
static void on_header(struct disk_op *op) {
    struct kv_vault *vault = container_of(op, struct kv_vault, warm.op);
    struct format_slot *header = &vault->warm.header;
    struct catalog_view view = catalog_look(vault->catalog, vault->warm.record);

    vault->warm.is_out = false;
    vault->warm.has_failed = true; /* until it is known to be right */
    if (vault->is_closing || op->result != 0 || !is_still(vault))
        return;
    if (format_slot_read(vault->warm.block, header) != 0 || header->group != view.group ||
        !catalog_is(vault->catalog, vault->warm.record, &header->key, header->page_idx, view.group)) {
        vault->stats.n_damaged++;
        vault_forget(vault, vault->warm.record);
        return;
    }
    vault->warm.has_failed = false;
    vault->warm.has_header = true;
}

static struct kv_page_name name_of(const struct format_slot *header) {
    return (struct kv_page_name){.key = header->key,
                                 .page_idx = header->page_idx,
                                 .tokens = header->tokens,
                                 .parent = header->page_idx > 0 ? &header->parent : NULL,
                                 .uid = header->uid};
}

static void on_page(struct kv_vault_read *read, int result) {
    struct vault_warm_read *mine = container_of(read, struct vault_warm_read, read);
    struct kv_vault *vault = mine->vault;

    vault->warm.n_out--;
    if (result == 0) {
        vault->stats.n_warm_pages++;
        vault->stats.warm_bytes += vault->options.group[mine - vault->warm.reads].slot_bytes;
    } else if (!kv_group_is_draft((enum kv_group)(mine - vault->warm.reads))) {
        vault->warm.has_failed = true;
    }
}

/* All groups of the page that the disk has and the shelf has not. False: there is no free slot. */
static bool ask_page(struct kv_vault *vault) {
    struct kv_page_name name = name_of(&vault->warm.header);
    const struct kv_shelf *shelf = vault->options.shelf;

    for (int g = 0; g < KV_GROUP_N; g++) {
        enum kv_group group = (enum kv_group)g;
        struct kv_shelf_group_stats stats;
        int r;

        if ((group == KV_TARGET_STATE && !vault->warm.is_end) ||
            !kv_vault_has(vault, &name.key, name.page_idx, group) ||
            kv_shelf_has(shelf, kv_shelf_find(shelf, &name), group))
            continue;
        kv_shelf_stats(shelf, group, &stats);
        if (stats.n_free == 0 && !kv_group_is_draft(group))
            return false;
        r = stats.n_free > 0 ? kv_vault_read(vault, &name, group, &vault->warm.reads[g].read) : KV_VAULT_E_BUSY;
        vault->warm.n_out += r == 0;
        if (r != 0 && !kv_group_is_draft(group))
            vault->warm.has_failed = true;
    }
    return true;
}

/* ---- turns ---------------------------------------------------------------------------------------------------------- */

static void finish(struct kv_vault *vault) {
    vault->warm.state = VAULT_WARM_OVER;
    vault->stats.warm_us = vault->options.now_us() - vault->warm.began_us;
}

/* The header of the page before is asked for, or of the next chain's end. False: there is none, or the disk cannot. */
static bool go_on(struct kv_vault *vault) {
    const struct format_slot *header = &vault->warm.header;
    uint32_t record = KV_NO_RECORD;

    if (vault->warm.record != KV_NO_RECORD && !vault->warm.has_failed) {
        if (header->page_idx > 0)
            record = catalog_find(vault->catalog, &header->parent, header->page_idx - 1, KV_TARGET_FULL);
        vault->stats.n_warm_chains += header->page_idx == 0;
    }
    vault->warm.is_end = record == KV_NO_RECORD;
    while (record == KV_NO_RECORD && vault->warm.next < vault->warm.n) {
        uint32_t next = vault->warm.points[vault->warm.next++].record;

        if (catalog_next(vault->catalog, next) == next) /* else it left meanwhile */
            record = next;
    }
    return record != KV_NO_RECORD && ask_header(vault, record);
}

/* Nobody else wants the disk, and nothing of ours is out. */
static bool is_free(const struct kv_vault *vault) {
    return vault->warm.may && !vault->warm.is_out && vault->warm.n_out == 0 && !vault->flushes && !vault->verify.user &&
           vault->n_to_blank == 0 && kv_vault_is_quiet(vault);
}

static void on_late_header(struct disk_op *op) {
    finish(container_of(op, struct kv_vault, warm.op));
}

void vault_warm_init(struct kv_vault *vault, void *block) {
    vault->warm.block = block;
    vault->warm.may = true;
    vault->warm.op = (struct disk_op){
        .kind = DISK_READ, .buffer = block, .bytes = vault->alignment, .late = on_late_header, .done = on_header};
    for (int g = 0; g < KV_GROUP_N; g++) {
        vault->warm.reads[g].vault = vault;
        vault->warm.reads[g].read.done = on_page;
    }
    if (vault->options.warm_percent == 0)
        vault->warm.state = VAULT_WARM_OVER;
}

void vault_warm_turn(struct kv_vault *vault) {
    if (vault->warm.state == VAULT_WARM_GATHERING && vault->scan_state == VAULT_SCAN_DONE) {
        vault->warm.state = VAULT_WARM_CHAINS;
        vault->warm.began_us = vault->options.now_us();
        vault->warm.record = KV_NO_RECORD;
        choose(vault);
    }
    while (vault->warm.state == VAULT_WARM_CHAINS && is_free(vault)) {
        bool has_header = vault->warm.has_header;

        vault->warm.has_header = false;
        if (vault->breaker.state != KV_BREAKER_CLOSED || !(has_header ? ask_page(vault) : go_on(vault)))
            finish(vault);
    }
}
