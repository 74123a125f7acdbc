/* catalog: what the slots of the disk hold, found by key. One record per slot in use; its bytes, and the header that says
 * the same, are the caller's, as are the slots themselves. Pure; allocates in open only.
 *
 *     free --put--> WRITING --stored--> STORED --drop, evict--> free
 *                      '----drop----> free
 *
 * Only STORED records are found, by the first half of their key: what is read is held against the whole name. Pinned
 * records stay until they are unpinned; one that was dropped meanwhile is found no more. */
#pragma once
#include "evict.h"
#include "key.h"
#include "layout.h"
#include "pool.h"

struct catalog;

enum { CATALOG_E_FULL = 1, CATALOG_E_EXISTS = 2 };

struct catalog_entry {
    struct kv_key key;
    enum kv_group group;
    uint32_t page_idx;
    uint32_t uid;
    uint32_t slot; /* of the group */
    uint32_t segment;
};

/* share_percent: of a group's records, that each user keeps. -ENOMEM. */
int catalog_open(uint32_t n_records_max, uint32_t share_percent, struct catalog **ret_catalog);
void catalog_close(struct catalog *catalog); /* NULL is fine; nothing is pinned */

/* A STORED one, or KV_NO_RECORD. */
uint32_t catalog_find(const struct catalog *catalog, const struct kv_key *key, uint32_t page_idx, enum kv_group group);
/* For a walk along a chain whose keys are known: asks for the memory that a find of this key will touch, first the table's,
 * then, when that has come, the record's. */
void catalog_prefetch_entry(const struct catalog *catalog, const struct kv_key *key);
void catalog_prefetch_record(const struct catalog *catalog, const struct kv_key *key);
/* Also one that is being written. */
bool catalog_knows(const struct catalog *catalog, const struct kv_key *key, uint32_t page_idx, enum kv_group group);

/* Whether the record is of this name, as far as it knows. */
bool catalog_is(const struct catalog *catalog, uint32_t record, const struct kv_key *key, uint32_t page_idx,
                enum kv_group group);

/* WRITING. E_EXISTS: it is known. E_FULL: no record is free; the caller evicts. */
int catalog_put(struct catalog *catalog, const struct catalog_entry *entry, uint32_t *ret_record);
/* tick: of this storing; ascending. The most recently used. */
void catalog_stored(struct catalog *catalog, uint32_t record, uint64_t tick);
/* WRITING as it is called, it lies there since an earlier time: the longest unused. A chain that is found from its beginning
 * on leaves from its end. */
void catalog_found(struct catalog *catalog, uint32_t record);

struct catalog_view {
    enum kv_group group;
    uint32_t slot, segment, page_idx, uid;
    uint64_t stored_tick;
    uint64_t used; /* ascending over all groups: when it came or was last needed */
    bool was_read; /* pinned once at least */
};
struct catalog_view catalog_look(const struct catalog *catalog, uint32_t record);

void catalog_pin(struct catalog *catalog, uint32_t record); /* a STORED one */
/* True: it had been dropped, and is gone with this: its slot is the caller's again. Else the most recently used. */
bool catalog_unpin(struct catalog *catalog, uint32_t record);
/* For a look at a STORED record that is no use of it: it stays, as a pinned one does, and keeps its place in the order. */
void catalog_guard(struct catalog *catalog, uint32_t record);
bool catalog_unguard(struct catalog *catalog, uint32_t record); /* as unpin */
/* As if it had just come; nothing happens to what is not STORED, or pinned. */
void catalog_touch(struct catalog *catalog, uint32_t record);

/* True: it is gone, and its slot is the caller's again. False: it is pinned or guarded, and goes with the last of these. */
bool catalog_drop(struct catalog *catalog, uint32_t record);

/* The longest unused of the group that is neither pinned nor guarded, or KV_NO_RECORD. */
uint32_t catalog_oldest(const struct catalog *catalog, enum kv_group group);
/* The longest unused that its user's share does not keep from this user; or KV_NO_RECORD. */
uint32_t catalog_oldest_for(struct catalog *catalog, enum kv_group group, uint32_t uid);

/* The next record from `record` on that is STORED and not dropped, or KV_NO_RECORD: for walks over all. */
uint32_t catalog_next(const struct catalog *catalog, uint32_t record);

struct catalog_group_stats {
    uint32_t n_writing, n_stored, n_pinned; /* pinned: of the stored */
};
const struct kv_share *catalog_share(const struct catalog *catalog);
void catalog_stats(const struct catalog *catalog, enum kv_group group, struct catalog_group_stats *ret_stats);

/* NULL, or what is wrong. For tests. */
const char *catalog_check(const struct catalog *catalog);
