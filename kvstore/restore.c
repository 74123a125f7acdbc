#include "restore_internal.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "store_internal.h"

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
        restore_flow_init(restore);
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

void kv_restores_set_vault(struct kv_restores *restores, struct kv_vault *vault) {
    restores->vault = vault;
}

void kv_restores_set_listener(struct kv_restores *restores,
                              void (*on_ended)(void *user, const struct kv_restored *restored), void *user) {
    restores->on_ended = on_ended;
    restores->user = user;
}

/* ---- looking -------------------------------------------------------------------------------------------------------- */

struct kv_page_name restore_name(const struct kv_key *keys, const int32_t *tokens, uint32_t page) {
    return (struct kv_page_name){.key = keys[page],
                                 .page_idx = page,
                                 .tokens = tokens + (size_t)page * PAGE_TOKENS,
                                 .parent = page > 0 ? &keys[page - 1] : NULL};
}

static bool is_coming(const struct kv_restores *restores, const struct kv_key *keys, uint32_t page) {
    for (uint32_t i = 0; i < restores->options.n_restores; i++) {
        const struct kv_restore *other = &restores->all[i];

        if (other->is_used && other->error == 0 && other->n_done < other->n_items && other->n_held <= page &&
            page < other->n_pages && memcmp(&other->keys[page], &keys[page], sizeof keys[page]) == 0)
            return true;
    }
    return false;
}

enum { AHEAD_PAGES = 6 /* looking at a page takes a fraction of what its memory takes to come */ };

/* What the pages to come will touch, so that it has come by then: of some the tables' entries, of those before them, whose
 * entries have come, the records. */
static void look_ahead(const struct kv_restores *restores, const struct kv_key *keys, uint32_t page, uint32_t n_pages,
                       bool on_device) {
    const struct kv_index *index = &restores->options.store->index;
    const struct kv_key *entry = page + 2 * AHEAD_PAGES < n_pages ? &keys[page + 2 * AHEAD_PAGES] : NULL;
    const struct kv_key *record = page + AHEAD_PAGES < n_pages ? &keys[page + AHEAD_PAGES] : NULL;

    if (on_device && entry)
        kv_index_prefetch_entry(index, entry);
    if (on_device && record)
        kv_index_prefetch_record(index, record);
    if (on_device)
        return;
    if (entry)
        kv_shelf_prefetch_entry(restores->options.shelf, entry);
    if (record)
        kv_shelf_prefetch_record(restores->options.shelf, record);
    if (restores->vault && entry)
        kv_vault_prefetch_entry(restores->vault, entry);
    if (restores->vault && record)
        kv_vault_prefetch_record(restores->vault, record);
}

static bool lies_on_host(const struct kv_restores *restores, const struct kv_key *key, uint32_t page,
                         enum kv_group group) {
    const struct kv_shelf *shelf = restores->options.shelf;

    return kv_shelf_has(shelf, kv_shelf_find_key(shelf, key, page), group);
}

static bool lies_on_disk(const struct kv_restores *restores, const struct kv_key *key, uint32_t page,
                         enum kv_group group) {
    return restores->vault && kv_vault_has(restores->vault, key, page, group);
}

/* Forward as far as there are pages, then back to the last restore point: there are few, and mostly one is near the end. */
void kv_restores_lookup(const struct kv_restores *restores, const struct kv_key *keys, uint32_t n_pages,
                        struct kv_found *ret_found) {
    const struct kv_index *index = &restores->options.store->index;
    uint32_t device = KV_NO_RECORD, n_found = 0, n_device = 0, n_device_pages = 0, n_disk = 0;
    bool on_device = true; /* the index is whole from its first page on */

    for (; n_found < n_pages; n_found++) {
        look_ahead(restores, keys, n_found, n_pages, on_device);
        if (on_device) {
            device = kv_index_find_key(index, &keys[n_found], device);
            on_device = device != KV_NO_RECORD;
            n_device_pages += on_device;
        }
        if (on_device && kv_index_has(index, device, KV_TARGET_STATE))
            n_device = n_found + 1;
        if (on_device || lies_on_host(restores, &keys[n_found], n_found, KV_TARGET_FULL))
            continue;
        if (!lies_on_disk(restores, &keys[n_found], n_found, KV_TARGET_FULL))
            break;
        n_disk++;
    }
    for (; n_found > n_device; n_found--) {
        uint32_t last = n_found - 1;

        if (lies_on_host(restores, &keys[last], last, KV_TARGET_STATE) ||
            lies_on_disk(restores, &keys[last], last, KV_TARGET_STATE))
            break;
        n_disk -= n_found > n_device_pages && !lies_on_host(restores, &keys[last], last, KV_TARGET_FULL);
    }
    *ret_found = (struct kv_found){.n_tokens = n_found * PAGE_TOKENS,
                                   .n_device_tokens = n_device * PAGE_TOKENS,
                                   .n_disk_tokens = n_disk * PAGE_TOKENS,
                                   .is_incomplete =
                                       restores->vault && n_found < n_pages && kv_vault_is_scanning(restores->vault),
                                   .is_coming = n_found > n_device && is_coming(restores, keys, n_found - 1)};
}

/* Whose pages end with this one, of which something lies below. */
static uint32_t whose(const struct kv_restores *restores, const struct kv_page_name *last) {
    uint32_t record = kv_shelf_find(restores->options.shelf, last);

    if (record != KV_NO_RECORD)
        return kv_shelf_name(restores->options.shelf, record).uid;
    for (int g = 0; g < KV_GROUP_N; g++)
        if (lies_on_disk(restores, &last->key, last->page_idx, (enum kv_group)g))
            return kv_vault_uid(restores->vault, last, (enum kv_group)g);
    return KV_NO_UID;
}

/* ---- taking --------------------------------------------------------------------------------------------------------- */

enum taken { TAKEN, TAKE_NONE /* it is nowhere below */, TAKE_FULL /* the device has no slot */ };

static enum taken take(struct kv_restore *restore, uint32_t page, enum kv_group group) {
    struct kv_restores_options *o = &restore->restores->options;
    struct restore_item *item = &restore->items[restore->n_items];
    struct kv_page_name name = restore_name(restore->keys, restore->tokens, page);
    uint32_t record = kv_shelf_find(o->shelf, &name);
    bool is_on_host = kv_shelf_has(o->shelf, record, group);

    if (!is_on_host && !lies_on_disk(restore->restores, &name.key, page, group))
        return TAKE_NONE;
    if (kv_store_take(o->store, group, &item->slot) != 0)
        return TAKE_FULL;
    item->page = page;
    item->group = group;
    if (is_on_host) {
        item->state = RESTORE_ON_HOST;
        item->record = record;
        item->src = kv_shelf_pin(o->shelf, record, group);
    } else {
        item->state = RESTORE_ON_DISK;
        kv_vault_pin(restore->restores->vault, &name, group, &item->record);
    }
    restore->n_items++;
    return TAKEN;
}

void restore_let_go_below(struct kv_restore *restore, struct restore_item *item) {
    struct kv_restores_options *o = &restore->restores->options;

    if (item->state == RESTORE_ON_DISK || item->state == RESTORE_READING)
        kv_vault_unpin(restore->restores->vault, item->record);
    else if (item->state != RESTORE_THERE)
        kv_shelf_unpin(o->shelf, item->record, item->group);
    item->state = RESTORE_THERE;
}

static void give_back(struct kv_restore *restore) {
    for (uint32_t i = 0; i < restore->n_items; i++) {
        struct restore_item *item = &restore->items[i];

        if (item->slot != KV_NO_SLOT)
            kv_store_give(restore->restores->options.store, item->group, item->slot);
        restore_let_go_below(restore, item);
    }
    restore->n_items = restore->n_done = 0;
}

/* Target pages and the state are needed; the drafter's are welcome. The state comes last, as it is published. */
static bool take_all(struct kv_restore *restore) {
    struct kv_store *store = restore->restores->options.store;
    uint32_t last = restore->n_pages - 1, window_first = kv_window_first_page(store->index.window_tokens, last + 1);

    for (uint32_t page = restore->n_held; page <= last; page++) {
        if (take(restore, page, KV_TARGET_FULL) != TAKEN)
            return false;
        take(restore, page, KV_DRAFT_FULL);
        if (page >= window_first)
            take(restore, page, KV_DRAFT_SLIDING);
    }
    return (restore->n_held > last && kv_index_has(&store->index, restore->lease.records[last], KV_TARGET_STATE)) ||
           take(restore, last, KV_TARGET_STATE) == TAKEN;
}

static struct restore_item *item_of(struct kv_restore *restore, uint32_t *at, uint32_t page, enum kv_group group) {
    struct restore_item *item = &restore->items[*at];

    if (*at == restore->n_items || item->page != page || item->group != group)
        return NULL;
    ++*at;
    return item;
}

/* Everything is on the device: it becomes findable, page after page and the restore point last. */
static int publish(struct kv_restore *restore) {
    uint32_t at = 0;

    for (uint32_t page = restore->n_held; page < restore->n_pages; page++) {
        struct restore_item *items[KV_GROUP_N] = {NULL};
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
        struct restore_item *state = &restore->items[at];
        bool taken;

        assert(state->group == KV_TARGET_STATE);
        kv_lease_publish_state(&restore->lease, restore->n_pages, state->slot, &taken);
        if (taken)
            state->slot = KV_NO_SLOT;
    }
    kv_lease_hold_state(&restore->lease);
    return 0;
}

void restore_arrived(struct kv_restore *restore, struct restore_item *item) {
    struct kv_restores *restores = restore->restores;
    size_t bytes = restores->options.store->group[item->group].slot_bytes;

    restore_let_go_below(restore, item);
    restore->n_done++;
    restore->sum.n_copies++;
    restore->sum.bytes += bytes;
    restores->stats.n_copies++;
    restores->stats.bytes += bytes;
}

/* What is used leaves shelf and disk later than what is not, and from its end. */
static void touch_chain(const struct kv_restore *restore) {
    for (uint32_t page = restore->n_pages; page-- > 0;) {
        struct kv_page_name name = restore_name(restore->keys, restore->tokens, page);

        kv_shelf_touch(restore->restores->options.shelf, &name);
        if (restore->restores->vault)
            kv_vault_touch(restore->restores->vault, &name);
    }
}

/* Its time is counted. */
static void tell(struct kv_restore *restore, int result) {
    struct kv_restores *restores = restore->restores;
    struct kv_restored *sum = &restore->sum;

    sum->us = restore->counted_us - restore->began_us;
    sum->result = result;
    *(result == 0 ? &restores->stats.n_done : &restores->stats.n_failed) += 1;
    for (int i = 0; i < KV_RESTORE_STAGE_N; i++)
        restores->stats.stage_us[i] += sum->stage_us[i];
    if (restores->on_ended)
        restores->on_ended(restores->user, sum);
}

void restore_finish(struct kv_restore *restore, int result) {
    restore_flow_count(restore);
    if (result == 0)
        result = publish(restore);
    give_back(restore);
    touch_chain(restore);
    tell(restore, result);
    restore->on_done(restore->user, result);
}

bool kv_restores_turn(struct kv_restores *restores) {
    uint64_t n_ended = restores->stats.n_done + restores->stats.n_failed;

    restore_flow_go_on(restores);
    for (uint32_t i = 0; i < restores->options.n_restores; i++) {
        struct kv_restore *restore = &restores->all[i];

        if (restore->is_used && !restore->is_handed && restore->n_items > 0)
            restore_flow_end(restore);
    }
    return restores->stats.n_done + restores->stats.n_failed != n_ended;
}

void kv_restore_cancel(struct kv_restore *restore) {
    if (restore->error == 0 && restore->n_items > 0)
        restore->error = -ECANCELED; /* the next turn or copy sees it */
}

/* Begins with what is missing, all of it pinned below, and slots for it. */
static int begin(struct kv_restores *restores, const struct kv_key *keys, const int32_t *tokens, uint32_t n_pages,
                 struct kv_restore **ret_restore) {
    struct kv_page_name last = restore_name(keys, tokens, n_pages - 1);
    struct kv_restore *restore = NULL;

    uint32_t uid = whose(restores, &last), n_free = 0, n_mine = 0;

    for (uint32_t i = 0; i < restores->options.n_restores; i++) {
        if (restores->all[i].is_used) {
            n_mine += restores->all[i].sum.uid == uid;
            continue;
        }
        restore = restore ? restore : &restores->all[i];
        n_free++;
    }
    if (n_free == 0 || (n_free == 1 && n_mine > 0))
        return KV_RESTORE_E_BUSY;
    assert(n_pages > 0);
    restore->keys = keys;
    restore->tokens = tokens;
    restore->n_pages = n_pages;
    restore->error = 0;
    restore->is_handed = false;
    restore->n_items = restore->n_done = restore->next_read = restore->next_copy = restore->next_far = 0;
    restore->lease.uid = uid;
    restore->n_held = kv_lease_hold_prefix(&restore->lease, keys, tokens, n_pages);
    if (!take_all(restore) || restore->n_items == 0) {
        give_back(restore);
        kv_lease_release(&restore->lease);
        return KV_RESTORE_E_FULL;
    }
    *ret_restore = restore;
    return 0;
}

static void use(struct kv_restore *restore, enum kv_restore_why why) {
    restore->is_used = true;
    restore->order = ++restore->restores->n_begun;
    restore->began_us = restore->counted_us = restore->restores->options.now_us();
    restore->sum = (struct kv_restored){.why = why,
                                        .was_handed = restore->is_handed,
                                        .uid = restore->lease.uid,
                                        .n_tokens = restore->n_pages * PAGE_TOKENS};
    restore->restores->stats.n_now++;
}

int kv_restore_start(struct kv_restores *restores, const struct kv_key *keys, const int32_t *tokens, uint32_t n_pages,
                     enum kv_restore_why why, void (*on_done)(void *user, int result), void *user,
                     struct kv_restore **ret_restore) {
    struct kv_restore *restore;
    int r = begin(restores, keys, tokens, n_pages, &restore);

    if (r != 0)
        return r;
    use(restore, why);
    restore->on_done = on_done;
    restore->user = user;
    *ret_restore = restore;
    restore_flow_go_on(restores); /* what fails here is seen by the next turn: on_done never comes from inside */
    return 0;
}

/* ---- handing over --------------------------------------------------------------------------------------------------- */

/* The last pages that have or get one of the group. */
static uint32_t run_of(const struct kv_restore *restore, enum kv_group group) {
    const struct kv_index *index = &restore->restores->options.store->index;
    uint32_t page = restore->n_pages, i = restore->n_items;

    while (page > 0) {
        while (i > 0 && (restore->items[i - 1].page > page - 1 ||
                         (restore->items[i - 1].page == page - 1 && restore->items[i - 1].group != group)))
            i--;
        if (page <= restore->n_held ? !kv_index_has(index, restore->lease.records[page - 1], group)
                                    : i == 0 || restore->items[i - 1].page != page - 1)
            break;
        page--;
    }
    return restore->n_pages - page;
}

/* What a hole cuts off is of no use. */
static void drop_drafts_before(struct kv_restore *restore, uint32_t first_page) {
    uint32_t n = 0;

    for (uint32_t i = 0; i < restore->n_items; i++) {
        struct restore_item *item = &restore->items[i];

        if (!kv_group_is_draft(item->group) || item->page >= first_page) {
            restore->items[n++] = *item;
            continue;
        }
        kv_store_give(restore->restores->options.store, item->group, item->slot);
        restore_let_go_below(restore, item);
    }
    restore->n_items = n;
}

int kv_restore_hand_over(struct kv_restores *restores, const struct kv_key *keys, const int32_t *tokens,
                         uint32_t n_pages, struct kv_lease *lease, struct kv_handover *ret_handover,
                         struct kv_restore **ret_restore) {
    const struct kv_store *store = restores->options.store;
    uint32_t n_run[KV_GROUP_N] = {0}, draft_first;
    struct kv_restore *restore;
    int r = begin(restores, keys, tokens, n_pages, &restore);

    for (uint32_t i = 0; r == 0 && i < restore->n_items; i++)
        if (restore->items[i].state == RESTORE_ON_DISK)
            r = KV_RESTORE_E_ON_DISK;
    if (r == KV_RESTORE_E_ON_DISK) {
        give_back(restore);
        kv_lease_release(&restore->lease);
    }
    if (r != 0)
        return r;
    restore->is_handed = true;
    use(restore, KV_RESTORE_REQUEST);
    restore->next_read = restore->n_items;
    n_run[KV_DRAFT_FULL] = run_of(restore, KV_DRAFT_FULL);
    n_run[KV_DRAFT_SLIDING] = run_of(restore, KV_DRAFT_SLIDING);
    draft_first = kv_store_draft_first_page(store, n_pages, n_run);
    drop_drafts_before(restore, draft_first);
    kv_lease_hold_drafts(&restore->lease, draft_first,
                         (uint32_t)max_u64(draft_first, kv_window_first_page(store->index.window_tokens, n_pages)));
    kv_lease_take_over(lease, &restore->lease);
    *ret_handover = (struct kv_handover){restore->n_items, restore->n_held, draft_first * PAGE_TOKENS};
    *ret_restore = restore;
    return 0;
}

/* Their slots are the caller's from the beginning. */
struct kv_handed kv_restore_handed(const struct kv_restore *restore, uint32_t i) {
    const struct restore_item *item = &restore->items[i];

    assert(restore->is_handed && i < restore->n_items);
    return (struct kv_handed){item->group, item->page, item->slot, restore_flow_transfer(restore, item)};
}

void kv_restore_copied(struct kv_restore *restore, int result) {
    assert(restore->is_handed && restore->n_done == 0);
    restore_flow_count(restore);
    for (uint32_t i = 0; i < restore->n_items; i++)
        if (result == 0)
            restore_arrived(restore, &restore->items[i]);
        else
            restore_let_go_below(restore, &restore->items[i]);
    restore->n_done = restore->n_items;
    touch_chain(restore);
    tell(restore, result);
}

double kv_restore_progress(const struct kv_restore *restore) {
    return restore->n_items > 0 ? (double)restore->n_done / restore->n_items : 1;
}

uint32_t kv_restore_n_pages(const struct kv_restore *restore) {
    return restore->n_pages;
}

void kv_restore_end(struct kv_restore *restore) {
    for (uint32_t i = 0; i < restore->n_items && restore->is_handed; i++)
        restore_let_go_below(restore, &restore->items[i]);
    restore->n_items = 0;
    kv_lease_release(&restore->lease);
    restore->is_used = false;
    restore->restores->stats.n_now--;
}

void kv_restores_stats(const struct kv_restores *restores, struct kv_restores_stats *ret_stats) {
    *ret_stats = restores->stats;
    for (uint32_t i = 0; i < restores->options.n_restores; i++)
        ret_stats->n_hungry += restore_flow_is_hungry(&restores->all[i]);
}

static const char *check(const struct kv_restore *restore, bool may_copy) {
    const struct kv_store *store = restore->restores->options.store;
    uint64_t reading_bytes = 0, copy_bytes = 0;

    for (int i = 0; i < RESTORE_READS_MAX; i++)
        if (restore->readings[i].is_busy)
            reading_bytes += store->group[restore->items[restore->readings[i].item].group].slot_bytes;
    for (int i = 0; restore->is_sending && i < restore->batch.n; i++)
        copy_bytes += restore->batch.transfers[i].bytes;
    if (reading_bytes != restore->reading_bytes || copy_bytes != restore->copy_bytes)
        return "a restore is said to have other bytes on the way than it has";
    for (uint32_t i = 0; may_copy && !restore->is_sending && restore->error == 0 && i < restore->n_items; i++)
        if (!restore->is_handed && restore->items[i].state == RESTORE_ON_HOST)
            return "what could be copied waits";
    return NULL;
}

const char *kv_restores_check(const struct kv_restores *restores) {
    const char *wrong = NULL;
    int n_batches = 0;

    for (uint32_t i = 0; i < restores->options.n_restores; i++)
        n_batches += restores->all[i].is_sending;
    if (n_batches != restores->n_batches || n_batches > RESTORE_BATCHES_MAX)
        return "other batches are out than restores have";
    for (uint32_t i = 0; wrong == NULL && i < restores->options.n_restores; i++)
        if (restores->all[i].is_used)
            wrong = check(&restores->all[i], n_batches < RESTORE_BATCHES_MAX);
    return wrong;
}
