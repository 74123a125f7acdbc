#include "restore.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "store_internal.h"

struct item { /* one copy */
    uint32_t page;
    uint32_t record; /* of the shelf, pinned */
    uint32_t slot;   /* of the device, private */
    const void *src; /* where its record's copy lies while it is pinned */
    enum kv_group group;
};

struct kv_restore {
    struct kv_restores *restores;
    bool is_used;
    const struct kv_key *keys;
    const int32_t *tokens;
    uint32_t n_pages, n_held; /* wanted; pages that the device had */
    struct kv_lease lease;
    struct item *items; /* [n_items_max], by page */
    uint32_t n_items, n_sent;
    struct kv_copy_batch batch;
    void (*on_done)(void *user, int result);
    void *user;
};

struct kv_restores {
    struct kv_restores_options options;
    struct kv_restore *all; /* [n_restores] */
    struct kv_restores_stats stats;
};

static void on_copied(struct kv_copy_batch *batch);

int kv_restores_open(const struct kv_restores_options *options, struct kv_restores **ret_restores) {
    struct kv_restores *restores = calloc(1, sizeof *restores);
    int r = 0;

    if (!restores)
        return -ENOMEM;
    restores->options = *options;
    restores->all = calloc(options->n_restores, sizeof *restores->all);
    if (!restores->all)
        r = -ENOMEM;
    for (uint32_t i = 0; r == 0 && i < options->n_restores; i++) {
        struct kv_restore *restore = &restores->all[i];

        restore->restores = restores;
        restore->batch = (struct kv_copy_batch){.direction = KV_COPY_FETCH, .done = on_copied};
        restore->items = calloc((size_t)options->n_pages_max * KV_GROUP_N, sizeof *restore->items);
        r = restore->items ? kv_lease_init(&restore->lease, options->store, options->n_pages_max) : -ENOMEM;
    }
    if (r != 0) {
        kv_restores_close(restores);
        return r;
    }
    *ret_restores = restores;
    return 0;
}

void kv_restores_close(struct kv_restores *restores) {
    if (!restores)
        return;
    for (uint32_t i = 0; restores->all && i < restores->options.n_restores; i++) {
        assert(!restores->all[i].is_used);
        kv_lease_deinit(&restores->all[i].lease);
        free(restores->all[i].items);
    }
    free(restores->all);
    free(restores);
}

/* ---- looking -------------------------------------------------------------------------------------------------------- */

static struct kv_page_name name_of(const struct kv_key *keys, const int32_t *tokens, uint32_t page) {
    return (struct kv_page_name){keys[page], page, tokens + (size_t)page * PAGE_TOKENS};
}

uint32_t kv_restores_lookup(const struct kv_restores *restores, const struct kv_key *keys, const int32_t *tokens,
                            uint32_t n_pages, uint32_t *ret_n_device) {
    const struct kv_index *index = &restores->options.store->index;
    const struct kv_shelf *shelf = restores->options.shelf;
    uint32_t device = KV_NO_RECORD, n_found = 0, n_device = 0;
    bool on_device = true; /* the index is whole from its first page on */

    for (uint32_t page = 0; page < n_pages; page++) {
        struct kv_page_name name = name_of(keys, tokens, page);
        uint32_t below = kv_shelf_find(shelf, &name);

        if (on_device) {
            device = kv_index_find(index, &keys[page], device, name.tokens);
            on_device = device != KV_NO_RECORD;
        }
        if (!on_device && !kv_shelf_has(shelf, below, KV_TARGET_FULL))
            break;
        if (on_device && kv_index_has(index, device, KV_TARGET_STATE))
            n_device = n_found = page + 1;
        else if (kv_shelf_has(shelf, below, KV_TARGET_STATE))
            n_found = page + 1;
    }
    *ret_n_device = n_device * PAGE_TOKENS;
    return n_found * PAGE_TOKENS;
}

/* ---- taking --------------------------------------------------------------------------------------------------------- */

/* False: the device has no slot. */
static bool take(struct kv_restore *restore, uint32_t page, uint32_t record, enum kv_group group) {
    struct kv_restores_options *o = &restore->restores->options;
    struct item *item = &restore->items[restore->n_items];

    if (kv_store_take(o->store, group, &item->slot) != 0)
        return false;
    item->page = page;
    item->record = record;
    item->group = group;
    item->src = kv_shelf_pin(o->shelf, record, group);
    restore->n_items++;
    return true;
}

static void give_back(struct kv_restore *restore) {
    struct kv_restores_options *o = &restore->restores->options;

    for (uint32_t i = 0; i < restore->n_items; i++) {
        const struct item *item = &restore->items[i];

        if (item->slot != KV_NO_SLOT)
            kv_store_give(o->store, item->group, item->slot);
        kv_shelf_unpin(o->shelf, item->record, item->group);
    }
    restore->n_items = 0;
}

/* Target pages and the state are needed; the drafter's are welcome. */
static bool take_all(struct kv_restore *restore) {
    struct kv_store *store = restore->restores->options.store;
    const struct kv_shelf *shelf = restore->restores->options.shelf;
    uint32_t last = restore->n_pages - 1, window_first = kv_window_first_page(store->index.window_tokens, last + 1);

    for (uint32_t page = restore->n_held; page <= last; page++) {
        struct kv_page_name name = name_of(restore->keys, restore->tokens, page);
        uint32_t record = kv_shelf_find(shelf, &name);

        if (!kv_shelf_has(shelf, record, KV_TARGET_FULL) || !take(restore, page, record, KV_TARGET_FULL))
            return false;
        if (kv_shelf_has(shelf, record, KV_DRAFT_FULL))
            take(restore, page, record, KV_DRAFT_FULL);
        if (kv_shelf_has(shelf, record, KV_DRAFT_SLIDING) && page >= window_first)
            take(restore, page, record, KV_DRAFT_SLIDING);
    }
    if (restore->n_held <= last || !kv_index_has(&store->index, restore->lease.records[last], KV_TARGET_STATE)) {
        struct kv_page_name name = name_of(restore->keys, restore->tokens, last);
        uint32_t record = kv_shelf_find(shelf, &name);

        return kv_shelf_has(shelf, record, KV_TARGET_STATE) && take(restore, last, record, KV_TARGET_STATE);
    }
    return true;
}

/* ---- copying -------------------------------------------------------------------------------------------------------- */

/* The next batch; false: it cannot be sent. */
static bool send(struct kv_restore *restore) {
    struct kv_restores_options *o = &restore->restores->options;

    restore->batch.n = 0;
    while (restore->batch.n < KV_COPIES_MAX && restore->n_sent < restore->n_items) {
        const struct item *item = &restore->items[restore->n_sent++];

        restore->batch.transfers[restore->batch.n++] = (struct kv_transfer){
            kv_store_slot(o->store, item->group, item->slot), item->src, o->store->group[item->group].slot_bytes};
    }
    return o->copier.submit(o->copier.user, &restore->batch) == 0;
}

static struct item *item_of(struct kv_restore *restore, uint32_t *at, uint32_t page, enum kv_group group) {
    struct item *item = &restore->items[*at];

    if (*at == restore->n_items || item->page != page || item->group != group)
        return NULL;
    ++*at;
    return item;
}

/* Everything is on the device: it becomes findable, page after page and the restore point last. */
static int publish(struct kv_restore *restore) {
    uint32_t at = 0;

    for (uint32_t page = restore->n_held; page < restore->n_pages; page++) {
        struct item *items[KV_GROUP_N] = {NULL};
        uint32_t slots[KV_GROUP_N];
        bool taken[KV_GROUP_N];

        items[KV_TARGET_FULL] = item_of(restore, &at, page, KV_TARGET_FULL);
        items[KV_DRAFT_FULL] = item_of(restore, &at, page, KV_DRAFT_FULL);
        items[KV_DRAFT_SLIDING] = item_of(restore, &at, page, KV_DRAFT_SLIDING);
        for (int g = 0; g < KV_GROUP_N; g++)
            slots[g] = items[g] ? items[g]->slot : KV_NO_SLOT;
        if (kv_lease_publish_page(&restore->lease, page, &restore->keys[page],
                                  restore->tokens + (size_t)page * PAGE_TOKENS, slots, taken) != 0)
            return -ENOBUFS;
        for (int g = 0; g < KV_GROUP_N; g++)
            if (items[g] && taken[g])
                items[g]->slot = KV_NO_SLOT;
    }
    if (at < restore->n_items) {
        struct item *state = &restore->items[at];
        bool taken;

        assert(state->group == KV_TARGET_STATE);
        kv_lease_publish_state(&restore->lease, restore->n_pages, state->slot, &taken);
        if (taken)
            state->slot = KV_NO_SLOT;
    }
    kv_lease_hold_state(&restore->lease);
    return 0;
}

/* What is used leaves the shelf later than what is not, and from its end. */
static void touch_chain(const struct kv_restore *restore) {
    for (uint32_t page = restore->n_pages; page-- > 0;) {
        struct kv_page_name name = name_of(restore->keys, restore->tokens, page);

        kv_shelf_touch(restore->restores->options.shelf, &name);
    }
}

static void finish(struct kv_restore *restore, int result) {
    struct kv_restores_stats *stats = &restore->restores->stats;

    if (result == 0)
        result = publish(restore);
    give_back(restore);
    touch_chain(restore);
    *(result == 0 ? &stats->n_done : &stats->n_failed) += 1;
    restore->on_done(restore->user, result);
}

static void on_copied(struct kv_copy_batch *batch) {
    struct kv_restore *restore = container_of(batch, struct kv_restore, batch);
    struct kv_restores_stats *stats = &restore->restores->stats;

    if (batch->result == 0) {
        stats->n_copies += (uint64_t)batch->n;
        for (int i = 0; i < batch->n; i++)
            stats->bytes += batch->transfers[i].bytes;
    }
    if (batch->result != 0 || restore->n_sent == restore->n_items)
        finish(restore, batch->result);
    else if (!send(restore))
        finish(restore, -EIO);
}

int kv_restore_start(struct kv_restores *restores, const struct kv_key *keys, const int32_t *tokens, uint32_t n_pages,
                     void (*on_done)(void *user, int result), void *user, struct kv_restore **ret_restore) {
    struct kv_restore *restore = NULL;
    bool is_sent;

    for (uint32_t i = 0; !restore && i < restores->options.n_restores; i++)
        if (!restores->all[i].is_used)
            restore = &restores->all[i];
    if (!restore)
        return KV_RESTORE_E_BUSY;
    assert(n_pages > 0);
    restore->keys = keys;
    restore->tokens = tokens;
    restore->n_pages = n_pages;
    restore->on_done = on_done;
    restore->user = user;
    restore->n_items = restore->n_sent = 0;
    restore->n_held = kv_lease_hold_prefix(&restore->lease, keys, tokens, n_pages);
    is_sent = take_all(restore) && restore->n_items > 0 && send(restore);
    if (!is_sent) {
        give_back(restore);
        kv_lease_release(&restore->lease);
        return KV_RESTORE_E_FULL;
    }
    restore->is_used = true;
    restores->stats.n_now++;
    *ret_restore = restore;
    return 0;
}

uint32_t kv_restore_n_pages(const struct kv_restore *restore) {
    return restore->n_pages;
}

void kv_restore_end(struct kv_restore *restore) {
    kv_lease_release(&restore->lease);
    restore->is_used = false;
    restore->restores->stats.n_now--;
}

void kv_restores_stats(const struct kv_restores *restores, struct kv_restores_stats *ret_stats) {
    *ret_stats = restores->stats;
}
