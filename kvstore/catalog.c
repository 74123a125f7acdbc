#include "catalog.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "lines.h"

enum { KEY_PREFIX_BYTES = KV_KEY_BYTES / 2 };

enum record_state {
    RECORD_FREE,
    RECORD_WRITING,
    RECORD_STORED,
    RECORD_DROPPED, /* STORED until its last pin or guard goes, and not found */
};

struct record {
    uint8_t key[KEY_PREFIX_BYTES];
    uint32_t next;         /* in its chain of the hash table */
    uint32_t older, newer; /* of its user's in its group, of those that are STORED and unpinned */
    uint32_t page_idx, uid, slot, segment;
    uint32_t n_pins;
    uint8_t group, state;
    uint8_t owner; /* its user's number in the shares */
    bool was_read, is_guarded;
    uint64_t stored_tick, used;
};

struct list {
    uint32_t oldest, newest;
};

struct group {
    struct list lists[KV_SHARE_OWNERS];
    uint32_t n_writing, n_stored, n_pinned;
};

struct catalog {
    struct kv_pool free_records;
    struct record *records;
    uint32_t *table; /* first record of each chain, or KV_NO_RECORD */
    uint32_t table_mask;
    uint64_t first_tick, tick; /* of the longest unused, the last used */
    struct kv_share share;
    struct group group[KV_GROUP_N];
};

int catalog_open(uint32_t n_records_max, uint32_t share_percent, struct catalog **ret_catalog) {
    struct catalog *catalog = calloc(1, sizeof *catalog);
    uint64_t n_table = 1;
    int r;

    if (!catalog)
        return -ENOMEM;
    catalog->first_tick = catalog->tick = UINT64_MAX / 2;
    kv_share_init(&catalog->share, share_percent);
    while (n_table < n_records_max)
        n_table *= 2;
    catalog->table_mask = (uint32_t)(n_table - 1);
    r = kv_pool_init(&catalog->free_records, n_records_max, 0);
    if (r == 0) {
        catalog->records = calloc((size_t)n_records_max + 1, sizeof *catalog->records);
        catalog->table = malloc(n_table * sizeof *catalog->table);
        r = catalog->records && catalog->table ? 0 : -ENOMEM;
    }
    for (uint64_t i = 0; r == 0 && i < n_table; i++)
        catalog->table[i] = KV_NO_RECORD;
    for (int g = 0; g < KV_GROUP_N; g++)
        memset(catalog->group[g].lists, 0xff, sizeof catalog->group[g].lists); /* KV_NO_RECORD */
    if (r != 0) {
        catalog_close(catalog);
        return r;
    }
    *ret_catalog = catalog;
    return 0;
}

void catalog_close(struct catalog *catalog) {
    if (!catalog)
        return;
    for (uint32_t r = 0; catalog->records && r < catalog->free_records.n_slots; r++) {
        assert(catalog->records[r].n_pins == 0);
        if (catalog->records[r].state != RECORD_FREE)
            kv_pool_give(&catalog->free_records, r);
    }
    kv_pool_deinit(&catalog->free_records);
    free(catalog->table);
    free(catalog->records);
    free(catalog);
}

/* ---- by key --------------------------------------------------------------------------------------------------------- */

static uint32_t *chain_of(const struct catalog *catalog, const uint8_t *key) {
    uint32_t hash;

    memcpy(&hash, key, sizeof hash); /* a key is a hash already */
    return &catalog->table[hash & catalog->table_mask];
}

bool catalog_is(const struct catalog *catalog, uint32_t r, const struct kv_key *key, uint32_t page_idx,
                enum kv_group group) {
    const struct record *record = &catalog->records[r];

    return record->group == group && record->page_idx == page_idx &&
           memcmp(record->key, key->bytes, sizeof record->key) == 0;
}

static uint32_t find(const struct catalog *catalog, const struct kv_key *key, uint32_t page_idx, enum kv_group group) {
    uint32_t r = *chain_of(catalog, key->bytes);

    while (r != KV_NO_RECORD &&
           (catalog->records[r].state == RECORD_DROPPED || !catalog_is(catalog, r, key, page_idx, group)))
        r = catalog->records[r].next;
    return r;
}

uint32_t catalog_find(const struct catalog *catalog, const struct kv_key *key, uint32_t page_idx, enum kv_group group) {
    uint32_t r = find(catalog, key, page_idx, group);

    return r != KV_NO_RECORD && catalog->records[r].state == RECORD_STORED ? r : KV_NO_RECORD;
}

void catalog_prefetch_entry(const struct catalog *catalog, const struct kv_key *key) {
    __builtin_prefetch(chain_of(catalog, key->bytes));
}

/* Of the first of the key's chain; mostly that is the one. */
void catalog_prefetch_record(const struct catalog *catalog, const struct kv_key *key) {
    uint32_t r = *chain_of(catalog, key->bytes);

    if (r != KV_NO_RECORD)
        lines_prefetch(&catalog->records[r], sizeof *catalog->records);
}

bool catalog_knows(const struct catalog *catalog, const struct kv_key *key, uint32_t page_idx, enum kv_group group) {
    return find(catalog, key, page_idx, group) != KV_NO_RECORD;
}

static void unchain(struct catalog *catalog, uint32_t r) {
    uint32_t *at = chain_of(catalog, catalog->records[r].key);

    while (*at != r)
        at = &catalog->records[*at].next;
    *at = catalog->records[r].next;
}

/* ---- by age --------------------------------------------------------------------------------------------------------- */

static struct list *list_of(struct catalog *catalog, const struct record *record) {
    return &catalog->group[record->group].lists[record->owner];
}

static void append(struct catalog *catalog, uint32_t r) {
    struct record *record = &catalog->records[r];
    struct list *list = list_of(catalog, record);

    record->used = ++catalog->tick;
    record->older = list->newest;
    record->newer = KV_NO_RECORD;
    *(list->newest != KV_NO_RECORD ? &catalog->records[list->newest].newer : &list->oldest) = r;
    list->newest = r;
}

static void prepend(struct catalog *catalog, uint32_t r) {
    struct record *record = &catalog->records[r];
    struct list *list = list_of(catalog, record);

    record->used = --catalog->first_tick;
    record->newer = list->oldest;
    record->older = KV_NO_RECORD;
    *(list->oldest != KV_NO_RECORD ? &catalog->records[list->oldest].older : &list->newest) = r;
    list->oldest = r;
}

static void detach(struct catalog *catalog, uint32_t r) {
    struct record *record = &catalog->records[r];
    struct list *list = list_of(catalog, record);

    *(record->older != KV_NO_RECORD ? &catalog->records[record->older].newer : &list->oldest) = record->newer;
    *(record->newer != KV_NO_RECORD ? &catalog->records[record->newer].older : &list->newest) = record->older;
}

static uint32_t oldest_of(const struct catalog *catalog, enum kv_group group, uint32_t owner) {
    uint32_t r = catalog->group[group].lists[owner].oldest;

    while (r != KV_NO_RECORD && catalog->records[r].is_guarded)
        r = catalog->records[r].newer;
    return r;
}

static uint64_t used_of(const struct catalog *catalog, uint32_t r) {
    return r == KV_NO_RECORD ? UINT64_MAX : catalog->records[r].used;
}

uint32_t catalog_oldest(const struct catalog *catalog, enum kv_group group) {
    uint32_t oldest = KV_NO_RECORD;

    for (uint32_t o = 0; o < catalog->share.n_owners; o++) {
        uint32_t r = oldest_of(catalog, group, o);

        if (used_of(catalog, r) < used_of(catalog, oldest))
            oldest = r;
    }
    return oldest;
}

uint32_t catalog_oldest_for(struct catalog *catalog, enum kv_group group, uint32_t uid) {
    uint32_t wanting = kv_share_number(&catalog->share, uid), oldest[KV_SHARE_OWNERS], loser;
    uint64_t orders[KV_SHARE_OWNERS];

    for (uint32_t o = 0; o < KV_SHARE_OWNERS; o++) {
        oldest[o] = oldest_of(catalog, group, o);
        orders[o] = used_of(catalog, oldest[o]);
    }
    loser = kv_share_loser(&catalog->share, group, kv_share_n_held(&catalog->share, group), wanting, orders);
    return loser == KV_SHARE_OWNERS ? KV_NO_RECORD : oldest[loser];
}

uint32_t catalog_next(const struct catalog *catalog, uint32_t record) {
    for (; record < catalog->free_records.n_slots; record++)
        if (catalog->records[record].state == RECORD_STORED)
            return record;
    return KV_NO_RECORD;
}

/* ---- the life of a record ------------------------------------------------------------------------------------------- */

int catalog_put(struct catalog *catalog, const struct catalog_entry *entry, uint32_t *ret_record) {
    uint32_t r, *chain = chain_of(catalog, entry->key.bytes);

    if (catalog_knows(catalog, &entry->key, entry->page_idx, entry->group))
        return CATALOG_E_EXISTS;
    if (kv_pool_take(&catalog->free_records, &r) != 0)
        return CATALOG_E_FULL;
    catalog->records[r] = (struct record){.next = *chain,
                                          .page_idx = entry->page_idx,
                                          .uid = entry->uid,
                                          .slot = entry->slot,
                                          .segment = entry->segment,
                                          .group = (uint8_t)entry->group,
                                          .owner = (uint8_t)kv_share_number(&catalog->share, entry->uid),
                                          .state = RECORD_WRITING};
    memcpy(catalog->records[r].key, entry->key.bytes, KEY_PREFIX_BYTES);
    *chain = r;
    catalog->group[entry->group].n_writing++;
    kv_share_hold(&catalog->share, catalog->records[r].owner, entry->group);
    *ret_record = r;
    return 0;
}

static void make_stored(struct catalog *catalog, uint32_t r, uint64_t tick) {
    struct record *record = &catalog->records[r];

    assert(record->state == RECORD_WRITING);
    record->state = RECORD_STORED;
    record->stored_tick = tick;
    catalog->group[record->group].n_writing--;
    catalog->group[record->group].n_stored++;
}

void catalog_stored(struct catalog *catalog, uint32_t r, uint64_t tick) {
    make_stored(catalog, r, tick);
    append(catalog, r);
}

void catalog_found(struct catalog *catalog, uint32_t r) {
    make_stored(catalog, r, 0);
    prepend(catalog, r);
}

struct catalog_view catalog_look(const struct catalog *catalog, uint32_t r) {
    const struct record *record = &catalog->records[r];

    return (struct catalog_view){.group = (enum kv_group)record->group,
                                 .slot = record->slot,
                                 .segment = record->segment,
                                 .page_idx = record->page_idx,
                                 .uid = record->uid,
                                 .stored_tick = record->stored_tick,
                                 .used = record->used,
                                 .was_read = record->was_read};
}

void catalog_pin(struct catalog *catalog, uint32_t r) {
    struct record *record = &catalog->records[r];

    assert(record->state == RECORD_STORED || (record->state == RECORD_DROPPED && record->n_pins > 0));
    if (record->n_pins++ > 0)
        return;
    record->was_read = true;
    detach(catalog, r);
    catalog->group[record->group].n_pinned++;
}

static void free_record(struct catalog *catalog, uint32_t r) {
    unchain(catalog, r);
    kv_share_let_go(&catalog->share, catalog->records[r].owner, (enum kv_group)catalog->records[r].group);
    catalog->records[r].state = RECORD_FREE;
    kv_pool_give(&catalog->free_records, r);
}

static bool free_dropped(struct catalog *catalog, uint32_t r) {
    const struct record *record = &catalog->records[r];

    if (record->state != RECORD_DROPPED || record->n_pins > 0 || record->is_guarded)
        return false;
    catalog->group[record->group].n_stored--;
    free_record(catalog, r);
    return true;
}

bool catalog_unpin(struct catalog *catalog, uint32_t r) {
    struct record *record = &catalog->records[r];

    assert(record->n_pins > 0);
    if (--record->n_pins > 0)
        return false;
    catalog->group[record->group].n_pinned--;
    if (record->state == RECORD_STORED)
        append(catalog, r);
    return free_dropped(catalog, r);
}

void catalog_guard(struct catalog *catalog, uint32_t r) {
    assert(catalog->records[r].state == RECORD_STORED && !catalog->records[r].is_guarded);
    catalog->records[r].is_guarded = true;
}

bool catalog_unguard(struct catalog *catalog, uint32_t r) {
    assert(catalog->records[r].is_guarded);
    catalog->records[r].is_guarded = false;
    return free_dropped(catalog, r);
}

void catalog_touch(struct catalog *catalog, uint32_t r) {
    if (catalog->records[r].state != RECORD_STORED || catalog->records[r].n_pins > 0)
        return;
    detach(catalog, r);
    append(catalog, r);
}

bool catalog_drop(struct catalog *catalog, uint32_t r) {
    struct record *record = &catalog->records[r];

    if (record->state == RECORD_WRITING) {
        catalog->group[record->group].n_writing--;
        free_record(catalog, r);
        return true;
    }
    if (record->state == RECORD_STORED && record->n_pins == 0)
        detach(catalog, r);
    record->state = RECORD_DROPPED;
    return free_dropped(catalog, r);
}

/* ---- looking -------------------------------------------------------------------------------------------------------- */

const struct kv_share *catalog_share(const struct catalog *catalog) {
    return &catalog->share;
}

void catalog_stats(const struct catalog *catalog, enum kv_group group, struct catalog_group_stats *ret_stats) {
    *ret_stats = (struct catalog_group_stats){.n_writing = catalog->group[group].n_writing,
                                              .n_stored = catalog->group[group].n_stored,
                                              .n_pinned = catalog->group[group].n_pinned};
}

static const char *check_group(const struct catalog *catalog, enum kv_group g) {
    const struct group *group = &catalog->group[g];
    uint32_t n_writing = 0, n_stored = 0, n_pinned = 0, n_may_leave = 0, n_listed = 0, n_held[KV_SHARE_OWNERS] = {0};

    for (uint32_t r = 0; r < catalog->free_records.n_slots; r++) {
        const struct record *record = &catalog->records[r];

        if (kv_pool_is_taken(&catalog->free_records, r) != (record->state != RECORD_FREE))
            return "a record in use is free, or the reverse";
        if (record->state == RECORD_FREE || record->group != g)
            continue;
        n_held[record->owner]++;
        n_writing += record->state == RECORD_WRITING;
        n_stored += record->state != RECORD_WRITING;
        n_pinned += record->n_pins > 0;
        n_may_leave += record->state == RECORD_STORED && record->n_pins == 0;
        if (record->n_pins == 0 && !record->is_guarded && record->state == RECORD_DROPPED)
            return "a dropped record stayed after its last pin";
    }
    for (uint32_t o = 0; o < KV_SHARE_OWNERS; o++) {
        uint32_t before = KV_NO_RECORD;

        for (uint32_t r = group->lists[o].oldest; r != KV_NO_RECORD; before = r, r = catalog->records[r].newer) {
            const struct record *record = &catalog->records[r];

            if (record->older != before || record->group != g || record->owner != o || record->state != RECORD_STORED ||
                record->n_pins > 0 || ++n_listed > n_stored)
                return "the list of those that may leave is wrong";
        }
        if (group->lists[o].newest != before)
            return "the list of those that may leave has another end";
        if (n_held[o] != catalog->share.owners[o].n_held[g])
            return "a user is said to have other slots than he has";
    }
    if (n_listed != n_may_leave)
        return "the lists of those that may leave are not all of them";
    if (n_writing != group->n_writing || n_stored != group->n_stored || n_pinned != group->n_pinned)
        return "a counter is wrong";
    return NULL;
}

const char *catalog_check(const struct catalog *catalog) {
    const char *wrong = kv_pool_check(&catalog->free_records);
    uint64_t n_chained = 0, n_taken = catalog->free_records.n_slots - catalog->free_records.n_free;

    for (int g = 0; wrong == NULL && g < KV_GROUP_N; g++)
        wrong = check_group(catalog, (enum kv_group)g);
    for (uint64_t i = 0; wrong == NULL && i <= catalog->table_mask; i++)
        for (uint32_t r = catalog->table[i]; r != KV_NO_RECORD; r = catalog->records[r].next)
            if (chain_of(catalog, catalog->records[r].key) != &catalog->table[i] || ++n_chained > n_taken)
                return "a chain of the table is wrong";
    return wrong != NULL || n_chained == n_taken ? wrong : "a record is in no chain";
}
