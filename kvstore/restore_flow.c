/* restore_flow: pages come up. */
#include <assert.h>
#include <errno.h>

#include "restore_internal.h"
#include "store_internal.h"

/* ---- time ----------------------------------------------------------------------------------------------------------- */

/* Nothing of it has gone from one stage to the next since but what came from disk, of which the vault has noted when. */
void restore_flow_count(struct kv_restore *restore) {
    uint64_t now = restore->restores->options.now_us(), from = restore->counted_us, came = from;
    enum kv_restore_stage then = restore->is_sending || restore->is_handed ? KV_RESTORE_COPYING : KV_RESTORE_WAITING;

    for (int i = 0; i < RESTORE_READS_MAX; i++) {
        const struct restore_reading *reading = &restore->readings[i];

        if (!reading->is_busy)
            continue;
        then = KV_RESTORE_CHECKING;
        came = max_u64(came, reading->read.came_us != 0 ? reading->read.came_us : now);
    }
    assert(from <= came && came <= now);
    restore->sum.stage_us[KV_RESTORE_READING] += came - from;
    restore->sum.stage_us[then] += now - came;
    restore->counted_us = now;
}

/* ---- reading -------------------------------------------------------------------------------------------------------- */

static struct restore_reading *free_reading(struct kv_restore *restore) {
    for (int i = 0; i < RESTORE_READS_MAX; i++)
        if (!restore->readings[i].is_busy)
            return &restore->readings[i];
    return NULL;
}

/* It is on the shelf now, whoever brought it. */
static void take_from_shelf(struct kv_restore *restore, struct restore_item *item, uint32_t shelf_record) {
    struct kv_restores_options *o = &restore->restores->options;

    kv_vault_unpin(restore->restores->vault, item->record);
    item->record = shelf_record;
    item->state = RESTORE_ON_HOST;
    item->src = kv_shelf_pin(o->shelf, shelf_record, item->group);
    if ((uint32_t)(item - restore->items) < restore->next_copy)
        restore->next_copy = (uint32_t)(item - restore->items);
}

/* The drafter does without it; the target does not. */
static void do_without(struct kv_restore *restore, struct restore_item *item, int why) {
    if (!kv_group_is_draft(item->group)) {
        restore->error = restore->error == 0 ? why : restore->error;
        return;
    }
    kv_store_give(restore->restores->options.store, item->group, item->slot);
    item->slot = KV_NO_SLOT;
    restore_let_go_below(restore, item);
    restore->n_done++;
}

/* False: not now. */
static bool read_item(struct kv_restore *restore, uint32_t idx) {
    struct kv_restores_options *o = &restore->restores->options;
    struct restore_item *item = &restore->items[idx];
    struct kv_page_name name = restore_name(restore->keys, restore->tokens, item->page);
    struct restore_reading *reading = free_reading(restore);
    uint32_t shelf_record;
    int r;

    if (item->state != RESTORE_ON_DISK)
        return true;
    shelf_record = kv_shelf_find(o->shelf, &name);
    if (kv_shelf_has(o->shelf, shelf_record, item->group)) {
        take_from_shelf(restore, item, shelf_record);
        return true;
    }
    if (!reading)
        return false;
    r = kv_vault_read(restore->restores->vault, &name, item->group, &reading->read);
    if (r == KV_VAULT_E_BUSY)
        return false;
    if (r != 0) {
        do_without(restore, item, -EIO);
        return true;
    }
    restore_flow_count(restore);
    item->state = RESTORE_READING;
    reading->is_busy = true;
    reading->item = idx;
    return true;
}

/* It weighs as much as many pages, so it is on its way, checked and copied while they are. */
static bool has_state(const struct kv_restore *restore) {
    return restore->n_items > 0 && restore->items[restore->n_items - 1].group == KV_TARGET_STATE;
}

static void read_some(struct kv_restore *restore) {
    if (restore->error == 0 && has_state(restore))
        read_item(restore, restore->n_items - 1);
    while (restore->error == 0 && restore->next_read < restore->n_items && read_item(restore, restore->next_read))
        restore->next_read++;
}

static void on_read(struct kv_vault_read *read, int result) {
    struct restore_reading *reading = container_of(read, struct restore_reading, read);
    struct kv_restore *restore = reading->restore;
    struct kv_restores_options *o = &restore->restores->options;
    struct restore_item *item = &restore->items[reading->item];
    struct kv_page_name name = restore_name(restore->keys, restore->tokens, item->page);

    restore_flow_count(restore);
    reading->is_busy = false;
    if (result == 0) {
        restore->sum.n_disk_pages++;
        restore->restores->stats.n_disk_pages++;
        take_from_shelf(restore, item, kv_shelf_find(o->shelf, &name));
    } else {
        do_without(restore, item, result);
    }
    restore_flow_step(restore);
}

/* ---- copying -------------------------------------------------------------------------------------------------------- */

struct kv_transfer restore_flow_transfer(const struct kv_restore *restore, const struct restore_item *item) {
    struct kv_store *store = restore->restores->options.store;

    return (struct kv_transfer){kv_store_slot(store, item->group, item->slot), item->src,
                                store->group[item->group].slot_bytes};
}

static void add_copy(struct kv_restore *restore, uint32_t idx) {
    struct restore_item *item = &restore->items[idx];

    if (item->state != RESTORE_ON_HOST)
        return;
    item->state = RESTORE_COPYING;
    restore->batch_items[restore->batch.n] = idx;
    restore->batch.transfers[restore->batch.n++] = restore_flow_transfer(restore, item);
}

/* What has been read, and then what the shelf had from the beginning: pinned there, it may be in the way of what is still
 * to be read. */
static void copy_some(struct kv_restore *restore) {
    struct kv_restores_options *o = &restore->restores->options;
    bool is_gap = false;

    if (restore->is_sending || restore->error != 0)
        return;
    restore->batch.n = 0;
    if (has_state(restore))
        add_copy(restore, restore->n_items - 1);
    for (uint32_t i = restore->next_copy; restore->batch.n < KV_COPIES_MAX && i < restore->next_read; i++) {
        is_gap = is_gap || restore->items[i].state == RESTORE_READING;
        add_copy(restore, i);
        if (!is_gap)
            restore->next_copy = i + 1;
    }
    if (restore->next_far < restore->next_read)
        restore->next_far = restore->next_read;
    for (; restore->batch.n < KV_COPIES_MAX && restore->next_far < restore->n_items; restore->next_far++)
        add_copy(restore, restore->next_far);
    if (restore->batch.n == 0)
        return;
    restore_flow_count(restore);
    restore->is_sending = o->copier.submit(o->copier.user, &restore->batch) == 0;
    if (!restore->is_sending)
        restore->error = -EIO;
}

static void on_copied(struct kv_copy_batch *batch) {
    struct kv_restore *restore = container_of(batch, struct kv_restore, batch);

    restore_flow_count(restore);
    restore->is_sending = false;
    if (batch->result != 0 && restore->error == 0)
        restore->error = batch->result;
    for (int i = 0; batch->result == 0 && i < batch->n; i++)
        restore_arrived(restore, &restore->items[restore->batch_items[i]]);
    restore_flow_step(restore);
}

/* Goes on, or ends when nothing is on its way any more. */
void restore_flow_step(struct kv_restore *restore) {
    read_some(restore);
    copy_some(restore);
    if (restore->error != 0) { /* what is still being read is for others, or for the next time */
        restore_flow_count(restore);
        for (int i = 0; i < RESTORE_READS_MAX; i++)
            if (restore->readings[i].is_busy) {
                kv_vault_read_cancel(restore->restores->vault, &restore->readings[i].read);
                restore->readings[i].is_busy = false;
            }
        if (!restore->is_sending)
            restore_finish(restore, restore->error);
    } else if (restore->n_done == restore->n_items) {
        restore_finish(restore, 0);
    }
}

void restore_flow_start(struct kv_restore *restore) {
    read_some(restore);
    copy_some(restore);
}

void restore_flow_init(struct kv_restore *restore) {
    for (int k = 0; k < RESTORE_READS_MAX; k++)
        restore->readings[k] = (struct restore_reading){.restore = restore, .read = {.done = on_read}};
    restore->batch = (struct kv_copy_batch){.direction = KV_COPY_FETCH, .done = on_copied};
}
