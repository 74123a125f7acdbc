#include "shelf.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "lines.h"

enum copy_state {
    COPY_NONE,
    COPY_FILLING,
    COPY_CLEAN,
    COPY_DROPPED /* CLEAN until its last pin goes, and not found */
};

struct shelf_copy {
    enum copy_state state;
    uint32_t slot;
    uint32_t n_pins;
    uint64_t used;
    uint64_t checksum;
};

struct shelf_record {
    struct kv_key key;
    uint32_t page_idx;
    struct kv_key parent; /* zero: none */
    uint32_t uid;
    uint32_t owner; /* its number in the shares */
    uint32_t next;  /* in its chain of the hash table */
    struct shelf_copy copies[KV_GROUP_N];
    int32_t tokens[PAGE_TOKENS]; /* last: who walks by keys alone does not touch them */
};

struct shelf_group {
    struct kv_pool pool;
    struct kv_evict evict; /* CLEAN and unpinned */
    void *memory;
    size_t memory_bytes;
    char *arena; /* in it, aligned */
    size_t payload_bytes, slot_bytes;
    uint32_t n_filling, n_clean, n_pinned;
    uint32_t *away; /* [n_slots] slots whose memory the system has */
    uint32_t n_away;
    uint64_t n_evicted;
};

struct kv_shelf {
    const struct backend *backend;
    struct device *device;
    struct kv_pool free_records;
    struct shelf_record *records;
    uint32_t *table; /* first record of each chain, or KV_NO_RECORD */
    uint32_t table_mask;
    struct {
        uint32_t record;
        enum kv_group group;
    } * aside; /* [n_records] while memory is given back: what may not go */
    uint64_t tick;
    struct kv_share share; /* a record is held in the groups in which it has a slot */
    struct shelf_group group[KV_GROUP_N];
};

/* ---- memory --------------------------------------------------------------------------------------------------------- */

static int open_group(struct kv_shelf *shelf, const struct kv_shelf_options *options, enum kv_group g,
                      uint32_t n_records) {
    struct shelf_group *group = &shelf->group[g];
    uint32_t n_slots = options->group[g].n_slots;
    void *memory;
    int r;

    group->payload_bytes = options->group[g].payload_bytes;
    group->slot_bytes = format_slot_bytes(group->payload_bytes, options->alignment);
    if (n_slots > 0 && group->slot_bytes == 0)
        return -EINVAL;
    group->memory_bytes = group->slot_bytes * n_slots + options->alignment;
    r = kv_pool_init(&group->pool, n_slots, 0);
    if (r == 0)
        r = kv_evict_init(&group->evict, n_slots > 0 ? n_records : 0);
    if (r == 0) {
        group->away = calloc((size_t)n_slots + 1, sizeof *group->away);
        r = group->away ? 0 : -ENOMEM;
    }
    if (r == 0 && n_slots > 0) {
        r = shelf->backend->mem_alloc(shelf->device, MEM_HOST, group->memory_bytes, &memory);
        if (r == 0) {
            group->memory = memory;
            group->arena = (char *)memory + (align_up((uintptr_t)memory, options->alignment) - (uintptr_t)memory);
        }
    }
    return r;
}

int kv_shelf_open(const struct kv_shelf_options *options, struct kv_shelf **ret_shelf) {
    struct kv_shelf *shelf = calloc(1, sizeof *shelf);
    uint64_t n_records = 0, n_table = 1;
    int r;

    if (!shelf)
        return -ENOMEM;
    shelf->backend = options->backend;
    shelf->device = options->device;
    kv_share_init(&shelf->share, options->share_percent);
    for (int g = 0; g < KV_GROUP_N; g++)
        n_records += options->group[g].n_slots;
    while (n_table < n_records)
        n_table *= 2;
    shelf->table_mask = (uint32_t)n_table - 1;
    r = n_records < KV_NO_RECORD / 2 ? kv_pool_init(&shelf->free_records, (uint32_t)n_records, 0) : -EINVAL;
    if (r == 0) {
        shelf->records = calloc(n_records + 1, sizeof *shelf->records);
        shelf->table = malloc(n_table * sizeof *shelf->table);
        shelf->aside = calloc(n_records + 1, sizeof *shelf->aside);
        r = shelf->records && shelf->table && shelf->aside ? 0 : -ENOMEM;
    }
    for (uint64_t i = 0; r == 0 && i < n_table; i++)
        shelf->table[i] = KV_NO_RECORD;
    for (int g = 0; r == 0 && g < KV_GROUP_N; g++)
        r = open_group(shelf, options, (enum kv_group)g, (uint32_t)n_records);
    if (r != 0) {
        kv_shelf_close(shelf);
        return r;
    }
    *ret_shelf = shelf;
    return 0;
}

void kv_shelf_close(struct kv_shelf *shelf) {
    if (!shelf)
        return;
    kv_shelf_evict_bytes(shelf, UINT64_MAX);
    kv_shelf_grow(shelf, UINT64_MAX);
    for (int g = 0; g < KV_GROUP_N; g++) {
        struct shelf_group *group = &shelf->group[g];

        if (group->memory)
            shelf->backend->mem_free(shelf->device, MEM_HOST, group->memory, group->memory_bytes);
        kv_evict_deinit(&group->evict);
        kv_pool_deinit(&group->pool);
        free(group->away);
    }
    free(shelf->aside);
    free(shelf->table);
    free(shelf->records);
    kv_pool_deinit(&shelf->free_records);
    free(shelf);
}

/* ---- records -------------------------------------------------------------------------------------------------------- */

static uint32_t *chain_of(const struct kv_shelf *shelf, const struct kv_key *key) {
    uint32_t hash;

    memcpy(&hash, key->bytes, sizeof hash); /* a key is a hash already */
    return &shelf->table[hash & shelf->table_mask];
}

uint32_t kv_shelf_find(const struct kv_shelf *shelf, const struct kv_page_name *name) {
    uint32_t r = *chain_of(shelf, &name->key);

    for (; r != KV_NO_RECORD; r = shelf->records[r].next) {
        const struct shelf_record *record = &shelf->records[r];

        if (memcmp(&record->key, &name->key, sizeof name->key) == 0 && record->page_idx == name->page_idx &&
            memcmp(record->tokens, name->tokens, sizeof record->tokens) == 0)
            return r;
    }
    return KV_NO_RECORD;
}

void kv_shelf_prefetch_entry(const struct kv_shelf *shelf, const struct kv_key *key) {
    __builtin_prefetch(chain_of(shelf, key));
}

/* Of the first of the key's chain; mostly that is the one. */
void kv_shelf_prefetch_record(const struct kv_shelf *shelf, const struct kv_key *key) {
    uint32_t r = *chain_of(shelf, key);

    if (r != KV_NO_RECORD)
        lines_prefetch(&shelf->records[r], offsetof(struct shelf_record, tokens));
}

uint32_t kv_shelf_find_key(const struct kv_shelf *shelf, const struct kv_key *key, uint32_t page_idx) {
    uint32_t r = *chain_of(shelf, key);

    while (r != KV_NO_RECORD &&
           (shelf->records[r].page_idx != page_idx || memcmp(&shelf->records[r].key, key, sizeof *key) != 0))
        r = shelf->records[r].next;
    return r;
}

uint32_t kv_shelf_next_state(const struct kv_shelf *shelf, uint32_t record) {
    for (; record < shelf->free_records.n_slots; record++)
        if (kv_pool_is_taken(&shelf->free_records, record) && kv_shelf_has(shelf, record, KV_TARGET_STATE))
            return record;
    return KV_NO_RECORD;
}

bool kv_shelf_next_clean(const struct kv_shelf *shelf, uint32_t *record, int *group) {
    for (; *record < shelf->free_records.n_slots; ++*record, *group = 0)
        for (; *group < KV_GROUP_N; ++*group)
            if (kv_pool_is_taken(&shelf->free_records, *record) &&
                kv_shelf_has(shelf, *record, (enum kv_group) * group))
                return true;
    return false;
}

struct kv_page_name kv_shelf_name(const struct kv_shelf *shelf, uint32_t r) {
    const struct shelf_record *record = &shelf->records[r];

    return (struct kv_page_name){.key = record->key,
                                 .page_idx = record->page_idx,
                                 .tokens = record->tokens,
                                 .parent = record->page_idx > 0 ? &record->parent : NULL,
                                 .uid = record->uid};
}

bool kv_shelf_has(const struct kv_shelf *shelf, uint32_t record, enum kv_group group) {
    return record != KV_NO_RECORD && shelf->records[record].copies[group].state == COPY_CLEAN;
}

static void remove_if_empty(struct kv_shelf *shelf, uint32_t record) {
    uint32_t *at = chain_of(shelf, &shelf->records[record].key);

    for (int g = 0; g < KV_GROUP_N; g++)
        if (shelf->records[record].copies[g].state != COPY_NONE)
            return;
    while (*at != record)
        at = &shelf->records[*at].next;
    *at = shelf->records[record].next;
    kv_pool_give(&shelf->free_records, record);
}

/* There are as many records as slots, and each has one slot at least, so with a free slot there is a free record. */
static uint32_t add_record(struct kv_shelf *shelf, const struct kv_page_name *name) {
    uint32_t *chain = chain_of(shelf, &name->key), r = KV_NO_RECORD;
    int full = kv_pool_take(&shelf->free_records, &r);

    assert(full == 0);
    (void)full;
    shelf->records[r] = (struct shelf_record){.key = name->key,
                                              .page_idx = name->page_idx,
                                              .uid = name->uid,
                                              .owner = kv_share_number(&shelf->share, name->uid),
                                              .next = *chain};
    if (name->parent)
        shelf->records[r].parent = *name->parent;
    memcpy(shelf->records[r].tokens, name->tokens, sizeof shelf->records[r].tokens);
    *chain = r;
    return r;
}

/* ---- copies --------------------------------------------------------------------------------------------------------- */

static void *payload_of(const struct shelf_group *group, uint32_t slot) {
    return group->arena + (size_t)slot * group->slot_bytes + FORMAT_BLOCK_BYTES;
}

static void free_copy(struct kv_shelf *shelf, uint32_t record, enum kv_group group) {
    struct shelf_copy *copy = &shelf->records[record].copies[group];

    kv_pool_give(&shelf->group[group].pool, copy->slot);
    kv_share_let_go(&shelf->share, shelf->records[record].owner, group);
    *copy = (struct shelf_copy){0};
    remove_if_empty(shelf, record);
}

/* False for KV_NO_RECORD. */
static bool evict(struct kv_shelf *shelf, uint32_t record, enum kv_group g) {
    struct shelf_group *group = &shelf->group[g];

    if (record == KV_NO_RECORD)
        return false;
    kv_evict_remove(&group->evict, record);
    group->n_clean--;
    group->n_evicted++;
    free_copy(shelf, record, g);
    return true;
}

/* Shares are parts of what users have: what running requests need is taken from all. */
static uint32_t first_to_leave_for(struct kv_shelf *shelf, enum kv_group group, uint32_t uid) {
    uint32_t owner = kv_share_number(&shelf->share, uid);

    return kv_evict_first_for(&shelf->group[group].evict, &shelf->share, group, kv_share_n_held(&shelf->share, group),
                              owner);
}

int kv_shelf_reserve(struct kv_shelf *shelf, const struct kv_page_name *name, enum kv_group g, uint32_t *ret_record,
                     void **ret_payload) {
    struct shelf_group *group = &shelf->group[g];
    uint32_t record = kv_shelf_find(shelf, name), slot;

    if (record != KV_NO_RECORD && shelf->records[record].copies[g].state != COPY_NONE)
        return KV_SHELF_E_EXISTS;
    while (kv_pool_take(&group->pool, &slot) != 0)
        if (!evict(shelf, first_to_leave_for(shelf, g, name->uid), g))
            return KV_SHELF_E_FULL;
    record = kv_shelf_find(shelf, name); /* evicting may have taken it away */
    if (record == KV_NO_RECORD)
        record = add_record(shelf, name);
    shelf->records[record].copies[g] = (struct shelf_copy){.state = COPY_FILLING, .slot = slot};
    kv_share_hold(&shelf->share, shelf->records[record].owner, g);
    group->n_filling++;
    *ret_record = record;
    *ret_payload = payload_of(group, slot);
    return 0;
}

/* At its place among the others: `used` says when it was. */
static void offer_to_leave(struct kv_shelf *shelf, uint32_t record, enum kv_group group) {
    struct shelf_copy *copy = &shelf->records[record].copies[group];

    kv_evict_put(&shelf->group[group].evict, record, shelf->records[record].owner, kv_evict_order(false, copy->used));
}

void kv_shelf_filled(struct kv_shelf *shelf, uint32_t record, enum kv_group group, uint64_t checksum) {
    struct shelf_copy *copy = &shelf->records[record].copies[group];

    assert(copy->state == COPY_FILLING);
    copy->state = COPY_CLEAN;
    copy->checksum = checksum;
    shelf->group[group].n_filling--;
    shelf->group[group].n_clean++;
    copy->used = ++shelf->tick;
    offer_to_leave(shelf, record, group);
}

void kv_shelf_abandon(struct kv_shelf *shelf, uint32_t record, enum kv_group group) {
    assert(shelf->records[record].copies[group].state == COPY_FILLING);
    shelf->group[group].n_filling--;
    free_copy(shelf, record, group);
}

void *kv_shelf_pin(struct kv_shelf *shelf, uint32_t record, enum kv_group g) {
    struct shelf_copy *copy = &shelf->records[record].copies[g];
    struct shelf_group *group = &shelf->group[g];

    assert(copy->state == COPY_CLEAN);
    if (copy->n_pins++ == 0) {
        kv_evict_remove(&group->evict, record);
        group->n_pinned++;
    }
    return payload_of(group, copy->slot);
}

void kv_shelf_unpin(struct kv_shelf *shelf, uint32_t record, enum kv_group g) {
    shelf->records[record].copies[g].used = ++shelf->tick;
    kv_shelf_unpin_unused(shelf, record, g);
}

void kv_shelf_unpin_unused(struct kv_shelf *shelf, uint32_t record, enum kv_group g) {
    struct shelf_copy *copy = &shelf->records[record].copies[g];
    struct shelf_group *group = &shelf->group[g];

    assert(copy->n_pins > 0);
    if (--copy->n_pins > 0)
        return;
    group->n_pinned--;
    if (copy->state == COPY_CLEAN) {
        offer_to_leave(shelf, record, g);
        return;
    }
    group->n_clean--;
    free_copy(shelf, record, g);
}

static void set_used(struct kv_shelf *shelf, const struct kv_page_name *name, bool is_used) {
    uint32_t record = kv_shelf_find(shelf, name);

    for (int g = 0; record != KV_NO_RECORD && g < KV_GROUP_N; g++) {
        struct shelf_copy *copy = &shelf->records[record].copies[g];

        if (copy->state != COPY_CLEAN || copy->n_pins > 0)
            continue;
        copy->used = is_used ? ++shelf->tick : 0;
        offer_to_leave(shelf, record, (enum kv_group)g);
    }
}

void kv_shelf_touch(struct kv_shelf *shelf, const struct kv_page_name *name) {
    set_used(shelf, name, true);
}

void kv_shelf_let_leave(struct kv_shelf *shelf, const struct kv_page_name *name) {
    set_used(shelf, name, false);
}

uint64_t kv_shelf_checksum(const struct kv_shelf *shelf, uint32_t record, enum kv_group group) {
    return shelf->records[record].copies[group].checksum;
}

void kv_shelf_drop(struct kv_shelf *shelf, uint32_t record, enum kv_group g) {
    struct shelf_copy *copy = &shelf->records[record].copies[g];
    struct shelf_group *group = &shelf->group[g];

    if (copy->state != COPY_CLEAN)
        return;
    if (copy->n_pins > 0) {
        copy->state = COPY_DROPPED;
        return;
    }
    kv_evict_remove(&group->evict, record);
    group->n_clean--;
    free_copy(shelf, record, g);
}

/* Half of its slots stay. */
static bool may_shrink(const struct shelf_group *group) {
    return 2 * (group->n_away + 1) <= group->pool.n_slots;
}

/* The group whose first to leave is the longest unused of all, or of those that may shrink; KV_GROUP_N: nothing may leave. */
static int oldest_group(const struct kv_shelf *shelf, bool to_shrink) {
    uint64_t oldest = UINT64_MAX, order;
    int oldest_g = KV_GROUP_N;

    for (int g = 0; g < KV_GROUP_N; g++) {
        uint32_t record = kv_evict_first(&shelf->group[g].evict);

        if (to_shrink && !may_shrink(&shelf->group[g]))
            continue;
        if (record != KV_NO_RECORD && kv_evict_find(&shelf->group[g].evict, record, &order) && order < oldest) {
            oldest = order;
            oldest_g = g;
        }
    }
    return oldest_g;
}

uint64_t kv_shelf_evict_bytes(struct kv_shelf *shelf, uint64_t n_bytes) {
    uint64_t n_dropped = 0;
    int g;

    while (n_dropped < n_bytes && (g = oldest_group(shelf, false)) < KV_GROUP_N) {
        evict(shelf, kv_evict_first(&shelf->group[g].evict), (enum kv_group)g);
        n_dropped += shelf->group[g].payload_bytes;
    }
    return n_dropped;
}

/* ---- giving memory back --------------------------------------------------------------------------------------------- */

/* A free slot. False: its memory cannot be given back. */
static bool send_away(struct kv_shelf *shelf, struct shelf_group *group) {
    uint32_t slot;
    int r = kv_pool_take(&group->pool, &slot);

    assert(r == 0);
    if (shelf->backend->mem_discard(shelf->device, MEM_HOST, group->arena + (size_t)slot * group->slot_bytes,
                                    group->slot_bytes) != 0) {
        kv_pool_give(&group->pool, slot);
        return false;
    }
    group->away[group->n_away++] = slot;
    return true;
}

static bool send_free_away(struct kv_shelf *shelf, uint64_t n_bytes, uint64_t *given) {
    for (int g = 0; g < KV_GROUP_N; g++) {
        struct shelf_group *group = &shelf->group[g];

        while (*given < n_bytes && group->pool.n_free > 0 && may_shrink(group)) {
            if (!send_away(shelf, group))
                return false;
            *given += group->slot_bytes;
        }
    }
    return true;
}

uint64_t kv_shelf_shrink(struct kv_shelf *shelf, uint64_t n_bytes,
                         bool (*may_go)(void *user, const struct kv_page_name *name, enum kv_group group), void *user) {
    uint64_t given = 0;
    uint32_t n_aside = 0;
    int g;

    if (!send_free_away(shelf, n_bytes, &given))
        return given;
    while (given < n_bytes && (g = oldest_group(shelf, true)) < KV_GROUP_N) {
        struct shelf_group *group = &shelf->group[g];
        uint32_t record = kv_evict_first(&group->evict);
        struct kv_page_name name = kv_shelf_name(shelf, record);

        if (may_go && !may_go(user, &name, (enum kv_group)g)) {
            kv_evict_remove(&group->evict, record);
            shelf->aside[n_aside].record = record;
            shelf->aside[n_aside++].group = (enum kv_group)g;
            continue;
        }
        evict(shelf, record, (enum kv_group)g);
        if (!send_away(shelf, group))
            break;
        given += group->slot_bytes;
    }
    while (n_aside-- > 0)
        offer_to_leave(shelf, shelf->aside[n_aside].record, shelf->aside[n_aside].group);
    return given;
}

uint64_t kv_shelf_grow(struct kv_shelf *shelf, uint64_t n_bytes) {
    uint64_t taken = 0;

    for (int g = 0; g < KV_GROUP_N; g++) {
        struct shelf_group *group = &shelf->group[g];

        for (; taken < n_bytes && group->n_away > 0; taken += group->slot_bytes)
            kv_pool_give(&group->pool, group->away[--group->n_away]);
    }
    return taken;
}

uint64_t kv_shelf_purge(struct kv_shelf *shelf, uint32_t uid) {
    uint64_t n_dropped = 0;

    for (uint32_t record = 0; record < shelf->free_records.n_slots; record++)
        for (int g = 0; g < KV_GROUP_N; g++) {
            if (!kv_pool_is_taken(&shelf->free_records, record) || shelf->records[record].uid != uid ||
                shelf->records[record].copies[g].state != COPY_CLEAN)
                continue;
            n_dropped += shelf->group[g].payload_bytes;
            kv_shelf_drop(shelf, record, (enum kv_group)g);
        }
    return n_dropped;
}

/* ---- looking -------------------------------------------------------------------------------------------------------- */

size_t kv_shelf_payload_bytes(const struct kv_shelf *shelf, enum kv_group group) {
    return shelf->group[group].payload_bytes;
}

size_t kv_shelf_slot_bytes(const struct kv_shelf *shelf, enum kv_group group) {
    return shelf->group[group].slot_bytes;
}

bool kv_shelf_memory(const struct kv_shelf *shelf, enum kv_group group, void **ret_start, size_t *ret_bytes) {
    *ret_start = shelf->group[group].arena;
    *ret_bytes = shelf->group[group].slot_bytes * shelf->group[group].pool.n_slots;
    return shelf->group[group].arena != NULL;
}

void kv_shelf_stats(const struct kv_shelf *shelf, enum kv_group g, struct kv_shelf_group_stats *ret_stats) {
    const struct shelf_group *group = &shelf->group[g];

    *ret_stats = (struct kv_shelf_group_stats){.n_slots = group->pool.n_slots,
                                               .n_free = group->pool.n_free,
                                               .n_filling = group->n_filling,
                                               .n_clean = group->n_clean,
                                               .n_pinned = group->n_pinned,
                                               .n_away = group->n_away,
                                               .n_evicted = group->n_evicted};
}

const struct kv_share *kv_shelf_share(const struct kv_shelf *shelf) {
    return &shelf->share;
}

static const char *check_group(const struct kv_shelf *shelf, enum kv_group g) {
    const struct shelf_group *group = &shelf->group[g];
    uint32_t n_held[KV_SHARE_OWNERS] = {0};
    uint32_t n_filling = 0, n_clean = 0, n_pinned = 0, n_candidates = 0;
    const char *wrong = kv_pool_check(&group->pool);

    for (uint32_t r = 0; wrong == NULL && r < shelf->free_records.n_slots; r++) {
        const struct shelf_copy *copy = &shelf->records[r].copies[g];
        bool is_candidate = kv_evict_find(&group->evict, r, &(uint64_t){0});

        if (!kv_pool_is_taken(&shelf->free_records, r)) {
            if (is_candidate)
                return "a free record may leave";
            continue;
        }
        n_held[shelf->records[r].owner] += copy->state != COPY_NONE;
        n_filling += copy->state == COPY_FILLING;
        n_clean += copy->state == COPY_CLEAN || copy->state == COPY_DROPPED;
        n_pinned += copy->n_pins > 0;
        n_candidates += is_candidate;
        if (is_candidate != (copy->state == COPY_CLEAN && copy->n_pins == 0))
            return "what may leave is not what is clean and unpinned";
        if (copy->state == COPY_DROPPED && copy->n_pins == 0)
            return "a dropped copy stayed after its last pin";
        if (copy->state != COPY_NONE && !kv_pool_is_taken(&group->pool, copy->slot))
            return "a copy lies in a free slot";
    }
    if (wrong != NULL)
        return wrong;
    if (n_filling != group->n_filling || n_clean != group->n_clean || n_pinned != group->n_pinned)
        return "counts of copies are wrong";
    for (uint32_t o = 0; o < KV_SHARE_OWNERS; o++)
        if (n_held[o] != shelf->share.owners[o].n_held[g])
            return "a user is said to have other slots than he has";
    if (n_candidates != group->evict.n)
        return "some that may leave belong to no record";
    if (group->pool.n_free + n_filling + n_clean + group->n_away != group->pool.n_slots)
        return "free, filling, clean and absent slots are not all slots";
    return kv_evict_check(&group->evict);
}

const char *kv_shelf_check(const struct kv_shelf *shelf) {
    const char *wrong = kv_pool_check(&shelf->free_records);

    for (int g = 0; g < KV_GROUP_N && wrong == NULL; g++)
        wrong = check_group(shelf, (enum kv_group)g);
    for (uint32_t r = 0; wrong == NULL && r < shelf->free_records.n_slots; r++) {
        struct kv_page_name name = kv_shelf_name(shelf, r);

        if (kv_pool_is_taken(&shelf->free_records, r) && kv_shelf_find(shelf, &name) != r)
            wrong = "a record is not found under its own key";
    }
    return wrong;
}
