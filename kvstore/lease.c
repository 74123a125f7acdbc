#include "lease.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "store_internal.h"

#define NO_PAGE UINT32_MAX

int kv_lease_init(struct kv_lease *lease, struct kv_store *store, uint32_t n_pages_max) {
    *lease = (struct kv_lease){.store = store, .n_pages_max = n_pages_max, .state_page = NO_PAGE};
    lease->records = calloc(n_pages_max, sizeof *lease->records);
    lease->pinned = calloc(n_pages_max, sizeof *lease->pinned);
    if (lease->records == NULL || lease->pinned == NULL) {
        free(lease->records);
        free(lease->pinned);
        *lease = (struct kv_lease){0};
        return -ENOMEM;
    }
    lease->next = store->leases;
    if (lease->next != NULL)
        lease->next->prev = lease;
    store->leases = lease;
    return 0;
}

void kv_lease_deinit(struct kv_lease *lease) {
    if (lease->store == NULL)
        return;
    kv_lease_release(lease);
    if (lease->next != NULL)
        lease->next->prev = lease->prev;
    if (lease->prev != NULL)
        lease->prev->next = lease->next;
    else
        lease->store->leases = lease->next;
    free(lease->records);
    free(lease->pinned);
    *lease = (struct kv_lease){0};
}

uint32_t kv_lease_slot(const struct kv_lease *lease, enum kv_group group, uint32_t page_idx) {
    if (page_idx >= lease->n_pages || !(lease->pinned[page_idx] >> group & 1))
        return KV_NO_SLOT;
    return lease->store->index.records[lease->records[page_idx]].device[group].slot;
}

static void pin(struct kv_lease *lease, uint32_t page_idx, enum kv_group group) {
    kv_index_pin(&lease->store->index, lease->records[page_idx], group);
    lease->pinned[page_idx] |= (uint8_t)(1 << group);
}

static void unpin(struct kv_lease *lease, uint32_t page_idx, enum kv_group group) {
    if (!(lease->pinned[page_idx] >> group & 1))
        return;
    kv_index_unpin(&lease->store->index, lease->records[page_idx], group);
    lease->pinned[page_idx] &= (uint8_t) ~(1 << group);
}

void kv_lease_hold_state(struct kv_lease *lease) {
    uint32_t last = lease->n_pages - 1;

    assert(lease->n_pages > 0 && lease->state_page == NO_PAGE);
    if (!kv_index_has(&lease->store->index, lease->records[last], KV_TARGET_STATE))
        return;
    lease->state_page = last;
    pin(lease, last, KV_TARGET_STATE);
}

void kv_lease_drop_state(struct kv_lease *lease) {
    if (lease->state_page != NO_PAGE)
        unpin(lease, lease->state_page, KV_TARGET_STATE);
    lease->state_page = NO_PAGE;
}

void kv_lease_drop_sliding(struct kv_lease *lease, uint32_t page_idx) {
    if (page_idx < lease->n_pages)
        unpin(lease, page_idx, KV_DRAFT_SLIDING);
}

/* Pages in ascending order, so that of draft pages, which are candidates one by one, the first ones leave first: what is
 * before a hole is of no use, what is behind it still is. */
void kv_lease_release(struct kv_lease *lease) {
    for (uint32_t page = 0; page < lease->n_pages; page++)
        for (int g = 0; g < KV_GROUP_N; g++)
            unpin(lease, page, (enum kv_group)g);
    lease->n_pages = 0;
    lease->state_page = NO_PAGE;
}

void kv_lease_hold(struct kv_lease *lease, uint32_t record, uint32_t n_pages, uint32_t draft_first_page) {
    const struct kv_index *index = &lease->store->index;
    uint32_t window_first = kv_window_first_page(index->window_tokens, n_pages);

    assert(lease->n_pages == 0);
    assert(n_pages <= lease->n_pages_max);
    lease->n_pages = n_pages;
    for (uint32_t page = n_pages; page-- > 0; record = index->records[record].parent) {
        lease->records[page] = record;
        lease->pinned[page] = 0;
        pin(lease, page, KV_TARGET_FULL);
        if (page >= draft_first_page && index->group[KV_DRAFT_FULL].n_slots > 0)
            pin(lease, page, KV_DRAFT_FULL);
        if (page >= draft_first_page && page >= window_first && index->group[KV_DRAFT_SLIDING].n_slots > 0)
            pin(lease, page, KV_DRAFT_SLIDING);
    }
    if (n_pages > 0) {
        lease->state_page = n_pages - 1;
        pin(lease, lease->state_page, KV_TARGET_STATE);
    }
}

uint32_t kv_lease_hold_prefix(struct kv_lease *lease, const struct kv_key *keys, const int32_t *tokens,
                              uint32_t n_pages) {
    const struct kv_index *index = &lease->store->index;
    uint32_t record = KV_NO_RECORD;

    assert(lease->n_pages == 0);
    assert(n_pages <= lease->n_pages_max);
    for (; lease->n_pages < n_pages; lease->n_pages++) {
        uint32_t page = lease->n_pages;

        record = kv_index_find(index, &keys[page], record, tokens + (size_t)page * PAGE_TOKENS);
        if (record == KV_NO_RECORD)
            break;
        lease->records[page] = record;
        lease->pinned[page] = 0;
        pin(lease, page, KV_TARGET_FULL);
    }
    return lease->n_pages;
}

void kv_lease_hold_drafts(struct kv_lease *lease, uint32_t first_page, uint32_t first_sliding) {
    const struct kv_index *index = &lease->store->index;

    for (uint32_t page = first_page; page < lease->n_pages; page++) {
        if (kv_index_has(index, lease->records[page], KV_DRAFT_FULL))
            pin(lease, page, KV_DRAFT_FULL);
        if (page >= first_sliding && kv_index_has(index, lease->records[page], KV_DRAFT_SLIDING))
            pin(lease, page, KV_DRAFT_SLIDING);
    }
}

void kv_lease_take_over(struct kv_lease *lease, struct kv_lease *from) {
    assert(lease->n_pages == 0 && lease->store == from->store && from->state_page == NO_PAGE);
    assert(from->n_pages <= lease->n_pages_max);
    memcpy(lease->records, from->records, from->n_pages * sizeof *from->records);
    memcpy(lease->pinned, from->pinned, from->n_pages * sizeof *from->pinned);
    lease->n_pages = from->n_pages;
    from->n_pages = 0;
}

void kv_lease_hold_same(struct kv_lease *lease, const struct kv_lease *other, uint32_t n_pages) {
    const struct kv_index *index = &lease->store->index;

    assert(lease->n_pages == 0 && lease->store == other->store);
    assert(n_pages <= other->n_pages && n_pages <= lease->n_pages_max);
    for (; lease->n_pages < n_pages; lease->n_pages++) {
        uint32_t page = lease->n_pages, record = other->records[page];

        lease->records[page] = record;
        lease->pinned[page] = 0;
        for (int g = 0; g < KV_GROUP_N; g++)
            if (g != KV_TARGET_STATE && kv_index_has(index, record, (enum kv_group)g))
                pin(lease, page, (enum kv_group)g);
    }
    if (n_pages > 0)
        kv_lease_hold_state(lease);
}

/* A private slot becomes the record's. */
static void hand_over(struct kv_store *store, uint32_t record, enum kv_group group, uint32_t slot) {
    assert(kv_pool_is_taken(&store->group[group].pool, slot));
    kv_index_attach(&store->index, record, group, slot);
    store->group[group].n_private--;
}

int kv_lease_publish_page(struct kv_lease *lease, uint32_t page_idx, const struct kv_key *key,
                          const int32_t tokens[PAGE_TOKENS], const uint32_t slots[KV_GROUP_N],
                          bool ret_taken[KV_GROUP_N]) {
    struct kv_store *store = lease->store;
    uint32_t parent, record;
    bool is_new;

    assert(page_idx == lease->n_pages);
    assert(page_idx < lease->n_pages_max);
    assert(kv_pool_is_taken(&store->group[KV_TARGET_FULL].pool, slots[KV_TARGET_FULL]));
    assert(slots[KV_TARGET_STATE] == KV_NO_SLOT);
    parent = page_idx > 0 ? lease->records[page_idx - 1] : KV_NO_RECORD;
    record = kv_index_find(&store->index, key, parent, tokens);
    is_new = record == KV_NO_RECORD;
    if (is_new) {
        while (kv_index_add(&store->index, key, parent, tokens, lease->uid, slots[KV_TARGET_FULL], &record) ==
               KV_INDEX_E_FULL)
            if (kv_store_evict_first(store, KV_TARGET_FULL) == 0) /* each record that leaves had a target page */
                return KV_STORE_E_FULL;
        store->group[KV_TARGET_FULL].n_private--;
    }
    lease->records[page_idx] = record;
    lease->pinned[page_idx] = 0;
    lease->n_pages++;
    pin(lease, page_idx, KV_TARGET_FULL);
    for (int g = 0; g < KV_GROUP_N; g++) {
        enum kv_group group = (enum kv_group)g;

        ret_taken[g] = group == KV_TARGET_FULL && is_new;
        if (kv_group_is_draft(group) && slots[g] != KV_NO_SLOT && !kv_index_has(&store->index, record, group)) {
            hand_over(store, record, group, slots[g]);
            pin(lease, page_idx, group);
            ret_taken[g] = true;
        }
    }
    return 0;
}

void kv_lease_publish_state(struct kv_lease *lease, uint32_t n_pages, uint32_t slot, bool *ret_taken) {
    struct kv_store *store = lease->store;
    uint32_t record;

    assert(n_pages > 0);
    assert(n_pages <= lease->n_pages);
    record = lease->records[n_pages - 1];
    *ret_taken = !kv_index_has(&store->index, record, KV_TARGET_STATE);
    if (*ret_taken)
        hand_over(store, record, KV_TARGET_STATE, slot);
    else
        kv_index_touch(&store->index, record, KV_TARGET_STATE);
}
