#include "index.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "lines.h"

int kv_index_init(struct kv_index *index, uint32_t n_records_max, const uint32_t n_slots[KV_GROUP_N],
                  uint32_t window_tokens, uint32_t share_percent) {
    size_t n_entries = 4;
    int r;

    *index = (struct kv_index){.window_tokens = window_tokens};
    kv_share_init(&index->share, share_percent);
    while (n_entries < (size_t)n_records_max * 2)
        n_entries *= 2;
    index->table_mask = (uint32_t)(n_entries - 1);
    index->table = malloc(n_entries * sizeof *index->table);
    index->records = calloc(n_records_max, sizeof *index->records);
    index->tokens = calloc(n_records_max, sizeof *index->tokens);
    r = kv_pool_init(&index->free_records, n_records_max, 0);
    for (int g = 0; g < KV_GROUP_N && r == 0; g++) {
        struct kv_index_group *group = &index->group[g];

        if (n_slots[g] == 0)
            continue;
        group->n_slots = n_slots[g];
        group->record_of = malloc(n_slots[g] * sizeof *group->record_of);
        if (group->record_of == NULL)
            r = -ENOMEM;
        else
            memset(group->record_of, 0xff, n_slots[g] * sizeof *group->record_of); /* KV_NO_RECORD */
        if (r == 0)
            r = kv_evict_init(&group->evict, n_records_max);
    }
    if (index->table == NULL || index->records == NULL || index->tokens == NULL)
        r = -ENOMEM;
    if (r != 0) {
        kv_index_deinit(index);
        return r;
    }
    memset(index->table, 0xff, n_entries * sizeof *index->table); /* KV_NO_RECORD */
    return 0;
}

void kv_index_deinit(struct kv_index *index) {
    for (int g = 0; g < KV_GROUP_N; g++) {
        assert(index->group[g].n_indexed == 0);
        free(index->group[g].record_of);
        kv_evict_deinit(&index->group[g].evict);
    }
    kv_pool_deinit(&index->free_records);
    free(index->records);
    free(index->tokens);
    free(index->table);
    *index = (struct kv_index){0};
}

/* ---- the table ---- */

static uint32_t tag_of(const struct kv_key *key) {
    uint32_t tag;

    memcpy(&tag, key->bytes, sizeof tag); /* as good as any hash: the key is one, with a secret in it */
    return tag;
}

/* tokens: NULL if the key is enough. */
static uint32_t find(const struct kv_index *index, const struct kv_key *key, uint32_t parent, const int32_t *tokens) {
    uint32_t tag = tag_of(key);

    for (uint32_t i = tag & index->table_mask; index->table[i].record != KV_NO_RECORD;
         i = (i + 1) & index->table_mask) {
        uint32_t r = index->table[i].record;

        if (index->table[i].tag == tag && index->records[r].parent == parent &&
            memcmp(&index->records[r].key, key, sizeof *key) == 0 &&
            (tokens == NULL || memcmp(index->tokens[r], tokens, sizeof index->tokens[r]) == 0))
            return r;
    }
    return KV_NO_RECORD;
}

uint32_t kv_index_find(const struct kv_index *index, const struct kv_key *key, uint32_t parent,
                       const int32_t tokens[PAGE_TOKENS]) {
    return find(index, key, parent, tokens);
}

uint32_t kv_index_find_key(const struct kv_index *index, const struct kv_key *key, uint32_t parent) {
    return find(index, key, parent, NULL);
}

void kv_index_prefetch_entry(const struct kv_index *index, const struct kv_key *key) {
    __builtin_prefetch(&index->table[tag_of(key) & index->table_mask]);
}

/* The one that lies at the key's home; mostly that is the one. */
static uint32_t likely_record(const struct kv_index *index, const struct kv_key *key) {
    return index->table[tag_of(key) & index->table_mask].record;
}

void kv_index_prefetch_record(const struct kv_index *index, const struct kv_key *key) {
    uint32_t r = likely_record(index, key);

    if (r != KV_NO_RECORD)
        lines_prefetch(&index->records[r], sizeof *index->records);
}

void kv_index_prefetch_tokens(const struct kv_index *index, const struct kv_key *key) {
    uint32_t r = likely_record(index, key);

    if (r != KV_NO_RECORD)
        lines_prefetch(index->tokens[r], sizeof *index->tokens);
}

static void table_put(struct kv_index *index, uint32_t record) {
    uint32_t tag = tag_of(&index->records[record].key), i = tag & index->table_mask;

    while (index->table[i].record != KV_NO_RECORD)
        i = (i + 1) & index->table_mask;
    index->table[i] = (struct kv_index_entry){.tag = tag, .record = record};
}

/* Entries behind the hole that would no longer be reached from their home move into it, so that no marks stay behind. */
static void table_remove(struct kv_index *index, uint32_t record) {
    uint32_t mask = index->table_mask, hole = tag_of(&index->records[record].key) & mask;

    while (index->table[hole].record != record)
        hole = (hole + 1) & mask;
    for (uint32_t i = (hole + 1) & mask; index->table[i].record != KV_NO_RECORD; i = (i + 1) & mask) {
        if (((i - index->table[i].tag) & mask) >= ((i - hole) & mask)) {
            index->table[hole] = index->table[i];
            hole = i;
        }
    }
    index->table[hole].record = KV_NO_RECORD;
}

/* ---- candidates ---- */

static bool is_candidate(const struct kv_record *record, enum kv_group group) {
    return record->device[group].slot != KV_NO_SLOT && record->device[group].n_pins == 0 &&
           (group != KV_TARGET_FULL || record->n_children == 0);
}

/* A target page that ends its chain without a restore point lies beyond the last one: it serves no hit. A sliding page
 * outside every window serves none either. */
static uint64_t order_of(const struct kv_record *record, enum kv_group group) {
    bool is_needed = true;

    if (group == KV_TARGET_FULL)
        is_needed = record->device[KV_TARGET_STATE].slot != KV_NO_SLOT;
    else if (group == KV_DRAFT_SLIDING)
        is_needed = record->n_windows > 0;
    return kv_evict_order(is_needed, record->device[group].used);
}

static void refresh(struct kv_index *index, uint32_t record, enum kv_group group) {
    struct kv_evict *evict = &index->group[group].evict;

    if (is_candidate(&index->records[record], group))
        kv_evict_put(evict, record, index->records[record].owner, order_of(&index->records[record], group));
    else
        kv_evict_remove(evict, record);
}

/* A restore point came to (1) or left (-1) the record. */
static void count_window(struct kv_index *index, uint32_t record, int n) {
    uint32_t n_pages = index->records[record].page_idx + 1;
    uint32_t first = kv_window_first_page(index->window_tokens, n_pages);

    if (index->group[KV_DRAFT_SLIDING].n_slots == 0)
        return;
    for (uint32_t page = n_pages; page > first; page--, record = index->records[record].parent) {
        index->records[record].n_windows += (uint32_t)n;
        refresh(index, record, KV_DRAFT_SLIDING);
    }
}

/* ---- records ---- */

int kv_index_add(struct kv_index *index, const struct kv_key *key, uint32_t parent, const int32_t tokens[PAGE_TOKENS],
                 uint32_t uid, uint32_t target_slot, uint32_t *ret_record) {
    uint32_t r;

    if (kv_pool_take(&index->free_records, &r) == KV_POOL_E_FULL)
        return KV_INDEX_E_FULL;
    index->records[r] = (struct kv_record){.key = *key, .parent = parent};
    index->records[r].owner =
        parent != KV_NO_RECORD ? index->records[parent].owner : kv_share_number(&index->share, uid);
    for (int g = 0; g < KV_GROUP_N; g++)
        index->records[r].device[g].slot = KV_NO_SLOT;
    memcpy(index->tokens[r], tokens, sizeof index->tokens[r]);
    table_put(index, r);
    kv_index_attach(index, r, KV_TARGET_FULL, target_slot);
    if (parent != KV_NO_RECORD) {
        index->records[r].page_idx = index->records[parent].page_idx + 1;
        index->records[parent].n_children++;
        refresh(index, parent, KV_TARGET_FULL);
    }
    *ret_record = r;
    return 0;
}

void kv_index_attach(struct kv_index *index, uint32_t record, enum kv_group group, uint32_t slot) {
    struct kv_copy *copy = &index->records[record].device[group];

    assert(copy->slot == KV_NO_SLOT);
    assert(slot < index->group[group].n_slots);
    assert(index->group[group].record_of[slot] == KV_NO_RECORD);
    *copy = (struct kv_copy){.slot = slot, .used = ++index->tick};
    index->group[group].record_of[slot] = record;
    index->group[group].n_indexed++;
    kv_share_hold(&index->share, index->records[record].owner, group);
    refresh(index, record, group);
    if (group == KV_TARGET_STATE) {
        refresh(index, record, KV_TARGET_FULL);
        count_window(index, record, 1);
    }
}

uint32_t kv_index_detach(struct kv_index *index, uint32_t record, enum kv_group group) {
    struct kv_record *page = &index->records[record];
    uint32_t slot = page->device[group].slot, parent = page->parent;

    assert(slot != KV_NO_SLOT);
    assert(page->device[group].n_pins == 0);
    page->device[group].slot = KV_NO_SLOT;
    index->group[group].record_of[slot] = KV_NO_RECORD;
    index->group[group].n_indexed--;
    kv_share_let_go(&index->share, page->owner, group);
    refresh(index, record, group);
    if (group == KV_TARGET_STATE) {
        refresh(index, record, KV_TARGET_FULL);
        count_window(index, record, -1);
    }
    if (group == KV_TARGET_FULL) {
        assert(page->n_children == 0);
        for (int g = 0; g < KV_GROUP_N; g++)
            assert(page->device[g].slot == KV_NO_SLOT);
        table_remove(index, record);
        kv_pool_give(&index->free_records, record);
        if (parent != KV_NO_RECORD) {
            index->records[parent].n_children--;
            refresh(index, parent, KV_TARGET_FULL);
        }
    }
    return slot;
}

void kv_index_pin(struct kv_index *index, uint32_t record, enum kv_group group) {
    struct kv_copy *copy = &index->records[record].device[group];

    assert(copy->slot != KV_NO_SLOT);
    if (copy->n_pins++ == 0) {
        index->group[group].n_pinned++;
        refresh(index, record, group);
    }
}

void kv_index_unpin(struct kv_index *index, uint32_t record, enum kv_group group) {
    struct kv_copy *copy = &index->records[record].device[group];

    assert(copy->n_pins > 0);
    copy->used = ++index->tick;
    if (--copy->n_pins == 0) {
        index->group[group].n_pinned--;
        refresh(index, record, group);
    }
}

void kv_index_touch(struct kv_index *index, uint32_t record, enum kv_group group) {
    index->records[record].device[group].used = ++index->tick;
    refresh(index, record, group);
}

uint32_t kv_index_first_to_leave(struct kv_index *index, enum kv_group group) {
    const struct kv_index_group *all = &index->group[group];

    return kv_evict_first_for(&all->evict, &index->share, group, all->n_slots, KV_SHARE_NOBODY);
}

/* ---- check ---- */

static const char *check_copy(const struct kv_index *index, uint32_t record, enum kv_group group, uint32_t n_pins) {
    const struct kv_record *page = &index->records[record];
    const struct kv_copy *copy = &page->device[group];
    const struct kv_index_group *all = &index->group[group];
    uint64_t order;

    if (copy->slot != KV_NO_SLOT && (copy->slot >= all->n_slots || all->record_of[copy->slot] != record))
        return "a slot is not the record's that holds it";
    if (copy->slot == KV_NO_SLOT ? copy->n_pins != 0 || n_pins != 0 : copy->n_pins != n_pins)
        return "pins are not what leases hold";
    if (kv_evict_find(&all->evict, record, &order) != is_candidate(page, group))
        return "a slot is a candidate for eviction but is needed, or the other way round";
    if (is_candidate(page, group) && order != order_of(page, group))
        return "a candidate has an old order";
    return NULL;
}

static const char *check_record(const struct kv_index *index, uint32_t record, const uint32_t n_pins[KV_GROUP_N]) {
    const struct kv_record *page = &index->records[record];
    const char *wrong = NULL;

    if (page->device[KV_TARGET_FULL].slot == KV_NO_SLOT)
        return "a record lacks its target page";
    if (kv_index_find(index, &page->key, page->parent, index->tokens[record]) != record)
        return "a record is not found by its key";
    if (page->parent == KV_NO_RECORD ? page->page_idx != 0
                                     : !kv_pool_is_taken(&index->free_records, page->parent) ||
                                           page->page_idx != index->records[page->parent].page_idx + 1)
        return "a page's parent is not the page before it";
    for (int g = 0; g < KV_GROUP_N && wrong == NULL; g++)
        wrong = check_copy(index, record, (enum kv_group)g, n_pins[g]);
    return wrong;
}

/* Adds up from the records what is counted as they change. */
static const char *check_counts(const struct kv_index *index) {
    uint32_t n_indexed[KV_GROUP_N] = {0}, n_pinned[KV_GROUP_N] = {0}, n_candidates[KV_GROUP_N] = {0};
    uint32_t n_records = index->free_records.n_slots, n_entries = 0, n_held[KV_GROUP_N][KV_SHARE_OWNERS] = {{0}};
    uint32_t(*n_expected)[2] = calloc((size_t)n_records + 1, sizeof *n_expected); /* children, windows */
    const char *wrong = NULL;

    if (n_expected == NULL)
        return "no memory to check with";
    for (uint32_t r = 0; r < n_records; r++) {
        const struct kv_record *page = &index->records[r];

        if (!kv_pool_is_taken(&index->free_records, r))
            continue;
        for (int g = 0; g < KV_GROUP_N; g++) {
            n_indexed[g] += page->device[g].slot != KV_NO_SLOT;
            n_pinned[g] += page->device[g].n_pins > 0;
            n_candidates[g] += is_candidate(page, (enum kv_group)g);
            n_held[g][page->owner] += page->device[g].slot != KV_NO_SLOT;
        }
        if (page->parent != KV_NO_RECORD)
            n_expected[page->parent][0]++;
        if (page->device[KV_TARGET_STATE].slot != KV_NO_SLOT && index->group[KV_DRAFT_SLIDING].n_slots > 0)
            for (uint32_t up = r; up != KV_NO_RECORD; up = index->records[up].parent)
                if (index->records[up].page_idx >= kv_window_first_page(index->window_tokens, page->page_idx + 1))
                    n_expected[up][1]++;
    }
    for (uint32_t r = 0; r < n_records; r++)
        if (kv_pool_is_taken(&index->free_records, r) &&
            (index->records[r].n_children != n_expected[r][0] || index->records[r].n_windows != n_expected[r][1]))
            wrong = "a record counts its children or windows wrongly";
    for (uint32_t i = 0; i <= index->table_mask; i++)
        n_entries += index->table[i].record != KV_NO_RECORD;
    if (n_entries != n_records - index->free_records.n_free)
        wrong = "the table has other records than there are";
    for (int g = 0; g < KV_GROUP_N; g++) {
        uint32_t n_owned = 0;

        for (uint32_t slot = 0; slot < index->group[g].n_slots; slot++)
            n_owned += index->group[g].record_of[slot] != KV_NO_RECORD;
        if (n_owned != n_indexed[g] || index->group[g].n_indexed != n_indexed[g])
            wrong = "a slot belongs to no record, or to two";
        if (index->group[g].n_pinned != n_pinned[g])
            wrong = "pinned slots do not add up";
        if (index->group[g].evict.n != n_candidates[g])
            wrong = "candidates do not add up";
        for (uint32_t o = 0; o < KV_SHARE_OWNERS; o++)
            if (index->share.owners[o].n_held[g] != n_held[g][o])
                wrong = "a user is said to have other slots than he has";
    }
    free(n_expected);
    return wrong;
}

const char *kv_index_check(const struct kv_index *index, const uint32_t (*n_pins)[KV_GROUP_N]) {
    const char *wrong = kv_pool_check(&index->free_records);

    for (uint32_t r = 0; r < index->free_records.n_slots && wrong == NULL; r++)
        if (kv_pool_is_taken(&index->free_records, r))
            wrong = check_record(index, r, n_pins[r]);
    if (wrong == NULL)
        wrong = check_counts(index);
    for (int g = 0; g < KV_GROUP_N && wrong == NULL; g++)
        wrong = kv_evict_check(&index->group[g].evict);
    return wrong;
}
