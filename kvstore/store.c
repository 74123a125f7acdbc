#include "store.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "store_internal.h"

enum { RECORDS_MAX = 1 << 30 }; /* the table has twice as many entries, numbered in 32 bits */

static int open_group(struct kv_store *store, enum kv_group g, size_t slot_bytes, uint32_t n_slots) {
    struct kv_store_group *group = &store->group[g];
    uint32_t n_reserved = kv_group_is_paged(g) ? 1 : 0;
    uint64_t n_bytes;
    int r;

    if (slot_bytes == 0 || n_slots <= n_reserved || n_slots == KV_NO_SLOT ||
        !checked_mul(slot_bytes, n_slots, &n_bytes) || n_bytes > SIZE_MAX)
        return -EINVAL;
    group->slot_bytes = slot_bytes;
    group->n_slots = n_slots;
    r = kv_pool_init(&group->pool, n_slots - n_reserved, n_reserved);
    if (r != 0)
        return r;
    return store->backend->mem_alloc(store->device, MEM_DEVICE, (size_t)n_bytes, &group->arena);
}

int kv_store_open(const struct kv_store_options *options, struct kv_store **ret_store) {
    uint32_t n_slots[KV_GROUP_N];
    struct kv_store *store;
    int r = 0;

    for (int g = 0; g < KV_GROUP_N; g++)
        n_slots[g] = options->group[g].n_slots;
    if (n_slots[KV_TARGET_FULL] == 0 || n_slots[KV_TARGET_STATE] == 0 || options->n_records_max == 0 ||
        options->n_records_max > RECORDS_MAX || (n_slots[KV_DRAFT_SLIDING] > 0 && options->sliding_window_tokens == 0))
        return -EINVAL;
    store = calloc(1, sizeof *store);
    if (store == NULL)
        return -ENOMEM;
    store->backend = options->backend;
    store->device = options->device;
    memcpy(store->fingerprint, options->fingerprint, sizeof store->fingerprint);
    memcpy(store->secret, options->secret, sizeof store->secret);
    for (int g = 0; g < KV_GROUP_N && r == 0; g++)
        if (n_slots[g] > 0)
            r = open_group(store, (enum kv_group)g, options->group[g].slot_bytes, n_slots[g]);
    if (r == 0)
        r = kv_index_init(&store->index, options->n_records_max, n_slots, options->sliding_window_tokens,
                          options->share_percent);
    if (r != 0) {
        kv_store_close(store);
        return r;
    }
    *ret_store = store;
    return 0;
}

void kv_store_close(struct kv_store *store) {
    if (store == NULL)
        return;
    assert(store->leases == NULL);
    kv_store_evict_all(store);
    kv_index_deinit(&store->index);
    for (int g = 0; g < KV_GROUP_N; g++) {
        struct kv_store_group *group = &store->group[g];

        if (group->arena != NULL)
            store->backend->mem_free(store->device, MEM_DEVICE, group->arena, group->slot_bytes * group->n_slots);
        kv_pool_deinit(&group->pool);
    }
    explicit_bzero(store->secret, sizeof store->secret);
    free(store);
}

void *kv_store_arena(const struct kv_store *store, enum kv_group group) {
    return store->group[group].arena;
}

int kv_store_root(const struct kv_store *store, uint32_t uid, struct kv_key *ret_root) {
    return kv_key_root(store->secret, store->fingerprint, uid, ret_root);
}

/* ---- slots ---- */

int kv_store_take(struct kv_store *store, enum kv_group group, uint32_t *ret_slot) {
    struct kv_pool *pool = &store->group[group].pool;

    if (kv_pool_take(pool, ret_slot) == KV_POOL_E_FULL) {
        if (kv_store_evict_first(store, group) == 0)
            return KV_STORE_E_FULL;
        kv_pool_take(pool, ret_slot);
    }
    store->group[group].n_private++;
    return 0;
}

void kv_store_give(struct kv_store *store, enum kv_group group, uint32_t slot) {
    assert(slot < store->index.group[group].n_slots);
    assert(store->index.group[group].record_of[slot] == KV_NO_RECORD); /* published slots are given by evicting */
    kv_pool_give(&store->group[group].pool, slot);
    store->group[group].n_private--;
}

/* Whoever pins a page pins all before it, so unpinned target pages form whole ends of chains, which can leave one by one:
 * none is held back by a pinned one behind it. */
uint32_t kv_store_n_available(const struct kv_store *store, enum kv_group group) {
    const struct kv_index_group *indexed = &store->index.group[group];

    return store->group[group].pool.n_free + indexed->n_indexed - indexed->n_pinned;
}

static uint64_t drop(struct kv_store *store, uint32_t record, enum kv_group group) {
    if (!kv_index_has(&store->index, record, group))
        return 0;
    kv_pool_give(&store->group[group].pool, kv_index_detach(&store->index, record, group));
    store->group[group].n_evicted++;
    return store->group[group].slot_bytes;
}

/* With its target page, which no lease needs and no page follows, goes all that hangs off it. */
static uint64_t drop_page(struct kv_store *store, uint32_t record) {
    uint64_t n_bytes = 0;

    for (int g = 0; g < KV_GROUP_N; g++)
        if (g != KV_TARGET_FULL)
            n_bytes += drop(store, record, (enum kv_group)g);
    return n_bytes + drop(store, record, KV_TARGET_FULL);
}

uint64_t kv_store_evict_first(struct kv_store *store, enum kv_group group) {
    uint32_t record = kv_index_first_to_leave(&store->index, group);

    if (record == KV_NO_RECORD)
        return 0;
    return group == KV_TARGET_FULL ? drop_page(store, record) : drop(store, record, group);
}

/* ---- hits ---- */

enum { PREFETCH_PAGES = 6 }; /* comparing a page takes a fraction of what its memory takes to come */

/* The longest prefix that is there, and how long its last run of pages is in each group. */
struct walk {
    uint32_t n_pages, record, n_run[KV_GROUP_N];
};

/* Returns how far pages match. ret_hit: the walk as it was at the last restore point, or n_pages 0. */
static uint32_t walk_chain(const struct kv_index *index, const struct kv_key *keys, const int32_t *tokens,
                           uint32_t n_pages, struct walk *ret_hit) {
    struct walk walk = {.record = KV_NO_RECORD};

    *ret_hit = walk;
    while (walk.n_pages < n_pages) {
        if (walk.n_pages + 2 * PREFETCH_PAGES < n_pages)
            kv_index_prefetch_entry(index, &keys[walk.n_pages + 2 * PREFETCH_PAGES]);
        if (walk.n_pages + PREFETCH_PAGES < n_pages) {
            kv_index_prefetch_record(index, &keys[walk.n_pages + PREFETCH_PAGES]);
            kv_index_prefetch_tokens(index, &keys[walk.n_pages + PREFETCH_PAGES]);
        }
        walk.record =
            kv_index_find(index, &keys[walk.n_pages], walk.record, tokens + (size_t)walk.n_pages * PAGE_TOKENS);
        if (walk.record == KV_NO_RECORD)
            break;
        walk.n_pages++;
        for (int g = 0; g < KV_GROUP_N; g++)
            walk.n_run[g] = kv_index_has(index, walk.record, (enum kv_group)g) ? walk.n_run[g] + 1 : 0;
        if (walk.n_run[KV_TARGET_STATE] > 0)
            *ret_hit = walk;
    }
    return walk.n_pages;
}

/* A whole window counts as reaching back to 0: nobody looks before it. */
uint32_t kv_store_draft_first_page(const struct kv_store *store, uint32_t n_pages, const uint32_t n_run[KV_GROUP_N]) {
    const struct kv_index *index = &store->index;
    uint32_t window_first = kv_window_first_page(index->window_tokens, n_pages);
    uint32_t full_first = n_pages - n_run[KV_DRAFT_FULL];
    uint32_t sliding_first = n_pages - n_run[KV_DRAFT_SLIDING];
    bool has_full = index->group[KV_DRAFT_FULL].n_slots > 0, has_sliding = index->group[KV_DRAFT_SLIDING].n_slots > 0;

    if (!has_full && !has_sliding)
        return n_pages;
    if (!has_full)
        full_first = 0;
    if (!has_sliding || sliding_first <= window_first)
        sliding_first = 0;
    return full_first > sliding_first ? full_first : sliding_first;
}

/* Returns the last page of the hit: the one with the restore point, or KV_NO_RECORD. */
static uint32_t find_hit(const struct kv_store *store, const struct kv_key *keys, const int32_t *tokens,
                         uint32_t n_pages, struct kv_match *ret_match) {
    const struct kv_index *index = &store->index;
    struct walk hit;
    uint32_t n_full = walk_chain(index, keys, tokens, n_pages, &hit);

    *ret_match = (struct kv_match){
        .n_tokens = hit.n_pages * PAGE_TOKENS,
        .n_full_tokens = n_full * PAGE_TOKENS,
        .state_slot = hit.n_pages > 0 ? index->records[hit.record].device[KV_TARGET_STATE].slot : KV_NO_SLOT,
        .draft_valid_from = kv_store_draft_first_page(store, hit.n_pages, hit.n_run) * PAGE_TOKENS,
    };
    return hit.record;
}

void kv_store_lookup(const struct kv_store *store, const struct kv_key *keys, const int32_t *tokens, uint32_t n_pages,
                     struct kv_match *ret_match) {
    find_hit(store, keys, tokens, n_pages, ret_match);
}

void kv_store_match(struct kv_store *store, struct kv_lease *lease, const struct kv_key *keys, const int32_t *tokens,
                    uint32_t n_pages, struct kv_match *ret_match) {
    uint32_t hit = find_hit(store, keys, tokens, n_pages, ret_match);

    assert(lease->store == store);
    kv_lease_hold(lease, hit, ret_match->n_tokens / PAGE_TOKENS, ret_match->draft_valid_from / PAGE_TOKENS);
    store->n_matches++;
    store->n_hits += hit != KV_NO_RECORD;
}

/* ---- administration ---- */

/* Target pages first: they take what hangs off them along. What is left then belongs to pages that leases need. */
uint64_t kv_store_evict_bytes(struct kv_store *store, uint64_t n_bytes) {
    uint64_t n_dropped = 0, n;

    for (int g = 0; g < KV_GROUP_N; g++)
        while (n_dropped < n_bytes && (n = kv_store_evict_first(store, (enum kv_group)g)) > 0)
            n_dropped += n;
    return n_dropped;
}

uint64_t kv_store_evict_all(struct kv_store *store) {
    return kv_store_evict_bytes(store, UINT64_MAX);
}

/* With all that hangs off it: whoever pins something of a page pins its target page. */
static bool may_leave(const struct kv_index *index, uint32_t record) {
    return index->records[record].n_children == 0 && index->records[record].device[KV_TARGET_FULL].n_pins == 0;
}

uint64_t kv_store_evict_chain(struct kv_store *store, const struct kv_key *keys, const int32_t *tokens,
                              uint32_t n_pages) {
    const struct kv_index *index = &store->index;
    uint32_t record = KV_NO_RECORD;
    uint64_t n_dropped = 0;

    for (uint32_t page = 0; page < n_pages; page++) {
        uint32_t next = kv_index_find(index, &keys[page], record, tokens + (size_t)page * PAGE_TOKENS);

        if (next == KV_NO_RECORD)
            break;
        record = next;
    }
    while (record != KV_NO_RECORD && may_leave(index, record)) {
        uint32_t parent = index->records[record].parent;

        n_dropped += drop_page(store, record);
        record = parent;
    }
    return n_dropped;
}

enum owner { OWNER_UNKNOWN, OWNER_MINE, OWNER_OTHER };

/* Of a record, by the key of its chain's first page; those on the way learn it too. */
static enum owner owner_of(const struct kv_index *index, struct kv_hasher *hasher, const struct kv_key *root,
                           uint32_t record, uint8_t *owners) {
    uint32_t at = record;
    enum owner owner;

    while (owners[at] == OWNER_UNKNOWN && index->records[at].parent != KV_NO_RECORD)
        at = index->records[at].parent;
    owner = owners[at];
    if (owner == OWNER_UNKNOWN) {
        struct kv_key key;

        owner = kv_key_chain(hasher, root, index->tokens[at], 1, &key) == 0 &&
                        memcmp(&key, &index->records[at].key, sizeof key) == 0
                    ? OWNER_MINE
                    : OWNER_OTHER;
        owners[at] = (uint8_t)owner;
    }
    for (; record != at; record = index->records[record].parent)
        owners[record] = (uint8_t)owner;
    return owner;
}

uint64_t kv_store_purge(struct kv_store *store, const struct kv_key *root, uint32_t *ret_n_left) {
    const struct kv_index *index = &store->index;
    uint32_t n = index->free_records.n_slots, n_left = 0;
    uint8_t *owners = calloc(n, sizeof *owners);
    struct kv_hasher *hasher = NULL;
    uint64_t n_dropped = 0;

    *ret_n_left = n - index->free_records.n_free;
    if (owners == NULL || kv_hasher_new(&hasher) != 0) {
        free(owners);
        return 0;
    }
    for (uint32_t record = 0; record < n; record++)
        if (kv_pool_is_taken(&index->free_records, record))
            n_left += owner_of(index, hasher, root, record, owners) == OWNER_MINE;
    for (uint32_t i = 0; i < n; i++) { /* from the end of each chain, as far as it goes */
        uint32_t record = i;

        while (record != KV_NO_RECORD && owners[record] == OWNER_MINE && may_leave(index, record)) {
            uint32_t parent = index->records[record].parent;

            n_dropped += drop_page(store, record);
            owners[record] = OWNER_OTHER;
            n_left--;
            record = parent;
        }
    }
    kv_hasher_free(hasher);
    free(owners);
    *ret_n_left = n_left;
    return n_dropped;
}

void kv_store_stats(const struct kv_store *store, struct kv_store_stats *ret_stats) {
    const struct kv_pool *records = &store->index.free_records;

    *ret_stats = (struct kv_store_stats){.n_records = records->n_slots - records->n_free,
                                         .n_records_max = records->n_slots,
                                         .n_matches = store->n_matches,
                                         .n_hits = store->n_hits,
                                         .share = &store->index.share};
    for (int g = 0; g < KV_GROUP_N; g++)
        ret_stats->group[g] = (struct kv_group_stats){
            .n_slots = store->group[g].pool.n_slots,
            .n_free = store->group[g].pool.n_free,
            .n_private = store->group[g].n_private,
            .n_indexed = store->index.group[g].n_indexed,
            .n_pinned = store->index.group[g].n_pinned,
            .n_evicted = store->group[g].n_evicted,
        };
}

/* ---- check ---- */

static const char *check_group(const struct kv_store *store, enum kv_group g) {
    const struct kv_store_group *group = &store->group[g];
    const struct kv_index_group *indexed = &store->index.group[g];
    const char *wrong = kv_pool_check(&group->pool);

    if (wrong != NULL)
        return wrong;
    if (group->pool.n_free + group->n_private + indexed->n_indexed != group->pool.n_slots)
        return "free, private and indexed slots are not all slots";
    for (uint32_t slot = 0; slot < indexed->n_slots; slot++)
        if (indexed->record_of[slot] != KV_NO_RECORD && !kv_pool_is_taken(&group->pool, slot))
            return "a slot is in the index and free";
    return NULL;
}

/* Adds the lease's pins to n_pins[record][group]. */
static const char *check_lease(const struct kv_lease *lease, uint32_t (*n_pins)[KV_GROUP_N]) {
    const struct kv_index *index = &lease->store->index;

    if (lease->n_pages > lease->n_pages_max)
        return "a lease holds more pages than it can";
    for (uint32_t page = 0; page < lease->n_pages; page++) {
        uint32_t record = lease->records[page];

        if (!kv_pool_is_taken(&index->free_records, record))
            return "a lease holds a record that is free";
        if (index->records[record].parent != (page > 0 ? lease->records[page - 1] : KV_NO_RECORD))
            return "a lease holds pages that do not follow each other";
        if (!(lease->pinned[page] >> KV_TARGET_FULL & 1))
            return "a lease holds a page without its target page";
        if ((lease->pinned[page] >> KV_TARGET_STATE & 1) != (page == lease->state_page))
            return "a lease pins a restore point it does not know of";
        for (int g = 0; g < KV_GROUP_N; g++)
            n_pins[record][g] += lease->pinned[page] >> g & 1;
    }
    return NULL;
}

int kv_store_check(const struct kv_store *store, char *line, size_t line_bytes) {
    uint32_t(*n_pins)[KV_GROUP_N] = calloc(store->index.free_records.n_slots, sizeof *n_pins);
    const char *wrong = NULL;
    int n = 0;

    if (n_pins == NULL)
        return -ENOMEM;
    for (int g = 0; g < KV_GROUP_N && wrong == NULL; g++) {
        n = snprintf(line, line_bytes, "kv_store_check: group %d: ", g);
        wrong = check_group(store, (enum kv_group)g);
    }
    if (wrong == NULL)
        n = snprintf(line, line_bytes, "kv_store_check: ");
    for (const struct kv_lease *lease = store->leases; lease != NULL && wrong == NULL; lease = lease->next)
        wrong = check_lease(lease, n_pins);
    if (wrong == NULL)
        wrong = kv_index_check(&store->index, (const uint32_t(*)[KV_GROUP_N])n_pins);
    free(n_pins);
    if (wrong == NULL)
        return 0;
    if ((size_t)n < line_bytes)
        snprintf(line + n, line_bytes - (size_t)n, "%s", wrong);
    return -EINVAL;
}
