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

/* ---- turns ---------------------------------------------------------------------------------------------------------- */

enum way { WAY_READ, WAY_COPY };

static bool has_state(const struct kv_restore *restore) {
    return restore->n_items > 0 && restore->items[restore->n_items - 1].group == KV_TARGET_STATE;
}

static bool is_to_read(const struct kv_restore *restore) {
    return restore->next_read < restore->n_items ||
           (has_state(restore) && restore->items[restore->n_items - 1].state == RESTORE_ON_DISK);
}

static bool is_in_line(const struct kv_restore *restore, enum way way) {
    if (!restore->is_used || restore->n_items == 0 || restore->is_handed || restore->error != 0 || restore->is_stuck)
        return false;
    return way == WAY_READ ? is_to_read(restore) : !restore->is_sending;
}

/* What its user has on the way. */
static uint64_t bytes_of_user(const struct kv_restore *restore, enum way way) {
    const struct kv_restores *restores = restore->restores;
    uint64_t bytes = 0;

    for (uint32_t i = 0; i < restores->options.n_restores; i++) {
        const struct kv_restore *other = &restores->all[i];

        if (other->is_used && other->sum.uid == restore->sum.uid)
            bytes += way == WAY_READ ? other->reading_bytes : other->copy_bytes;
    }
    return bytes;
}

/* The user who has least on the way is next, with the first that he began; what he has no use for goes to the others. So
 * whoever floods the line leaves each other user an equal part, and has all of it if nobody else wants any. NULL: nobody is
 * in line. */
static struct kv_restore *next_in_line(struct kv_restores *restores, enum way way) {
    struct kv_restore *next = NULL;
    uint64_t next_bytes = 0;

    for (uint32_t i = 0; i < restores->options.n_restores; i++) {
        struct kv_restore *restore = &restores->all[i];
        uint64_t bytes;

        if (!is_in_line(restore, way))
            continue;
        bytes = bytes_of_user(restore, way);
        if (next && (bytes > next_bytes || (bytes == next_bytes && restore->order > next->order)))
            continue;
        next = restore;
        next_bytes = bytes;
    }
    return next;
}

static void begin_round(struct kv_restores *restores) {
    for (uint32_t i = 0; i < restores->options.n_restores; i++)
        restores->all[i].is_stuck = false;
}

static size_t bytes_of(const struct kv_restore *restore, const struct restore_item *item) {
    return restore->restores->options.store->group[item->group].slot_bytes;
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
    restore->reading_bytes += bytes_of(restore, item);
    reading->is_busy = true;
    reading->item = idx;
    return true;
}

/* The state first: it weighs as much as many pages, so it is on its way, checked and copied while they are. False: nothing
 * can be read now. */
static bool read_next(struct kv_restore *restore) {
    uint32_t last = restore->n_items - 1;

    if (has_state(restore) && restore->items[last].state == RESTORE_ON_DISK && read_item(restore, last))
        return true;
    while (restore->next_read < restore->n_items && restore->items[restore->next_read].state != RESTORE_ON_DISK)
        restore->next_read++;
    if (restore->next_read == restore->n_items || !read_item(restore, restore->next_read))
        return false;
    restore->next_read++;
    return true;
}

static void read_some(struct kv_restores *restores) {
    struct kv_restore *restore;

    begin_round(restores);
    while ((restore = next_in_line(restores, WAY_READ)) != NULL)
        restore->is_stuck = !read_next(restore);
}

bool restore_flow_is_hungry(const struct kv_restore *restore) {
    bool has_room = false;

    for (int i = 0; i < RESTORE_READS_MAX; i++)
        has_room = has_room || !restore->readings[i].is_busy;
    return restore->is_used && !restore->is_handed && restore->error == 0 && restore->n_items > 0 && has_room &&
           is_to_read(restore);
}

static void on_read(struct kv_vault_read *read, int result) {
    struct restore_reading *reading = container_of(read, struct restore_reading, read);
    struct kv_restore *restore = reading->restore;
    struct kv_restores_options *o = &restore->restores->options;
    struct restore_item *item = &restore->items[reading->item];
    struct kv_page_name name = restore_name(restore->keys, restore->tokens, item->page);

    restore_flow_count(restore);
    reading->is_busy = false;
    restore->reading_bytes -= bytes_of(restore, item);
    if (result == 0) {
        restore->sum.n_disk_pages++;
        restore->restores->stats.n_disk_pages++;
        take_from_shelf(restore, item, kv_shelf_find(o->shelf, &name));
    } else {
        do_without(restore, item, result);
    }
    restore_flow_go_on(restore->restores);
    restore_flow_end(restore);
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
static void fill_batch(struct kv_restore *restore) {
    bool is_gap = false;

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
}

/* False: there is nothing to copy now. */
static bool copy_next(struct kv_restore *restore) {
    struct kv_restores *restores = restore->restores;
    struct kv_copier *copier = &restores->options.copier;

    fill_batch(restore);
    if (restore->batch.n == 0)
        return false;
    restore_flow_count(restore);
    if (copier->submit(copier->user, &restore->batch) != 0) {
        restore->error = -EIO;
        return true;
    }
    restore->is_sending = true;
    restores->n_batches++;
    for (int i = 0; i < restore->batch.n; i++)
        restore->copy_bytes += restore->batch.transfers[i].bytes;
    return true;
}

static void copy_some(struct kv_restores *restores) {
    struct kv_restore *restore;

    begin_round(restores);
    while (restores->n_batches < RESTORE_BATCHES_MAX && (restore = next_in_line(restores, WAY_COPY)) != NULL)
        restore->is_stuck = !copy_next(restore);
}

static void on_copied(struct kv_copy_batch *batch) {
    struct kv_restore *restore = container_of(batch, struct kv_restore, batch);

    restore_flow_count(restore);
    restore->is_sending = false;
    restore->copy_bytes = 0;
    restore->restores->n_batches--;
    if (batch->result != 0 && restore->error == 0)
        restore->error = batch->result;
    for (int i = 0; batch->result == 0 && i < batch->n; i++)
        restore_arrived(restore, &restore->items[restore->batch_items[i]]);
    restore_flow_go_on(restore->restores);
    restore_flow_end(restore);
}

/* ---- going on ------------------------------------------------------------------------------------------------------- */

void restore_flow_go_on(struct kv_restores *restores) {
    read_some(restores);
    copy_some(restores);
}

void restore_flow_end(struct kv_restore *restore) {
    if (restore->error == 0 && restore->n_done < restore->n_items)
        return;
    restore_flow_count(restore);
    for (int i = 0; i < RESTORE_READS_MAX; i++) /* what is still being read is for others, or for the next time */
        if (restore->readings[i].is_busy) {
            kv_vault_read_cancel(restore->restores->vault, &restore->readings[i].read);
            restore->readings[i].is_busy = false;
        }
    restore->reading_bytes = 0;
    if (!restore->is_sending)
        restore_finish(restore, restore->error);
}

void restore_flow_init(struct kv_restore *restore) {
    for (int k = 0; k < RESTORE_READS_MAX; k++)
        restore->readings[k] = (struct restore_reading){.restore = restore, .read = {.done = on_read}};
    restore->batch = (struct kv_copy_batch){.direction = KV_COPY_FETCH, .done = on_copied};
}
