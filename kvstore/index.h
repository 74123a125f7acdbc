/* index: key -> slots. One record per page key holds the page's slots of all groups, who is its parent, and how many
 * leases need which slot. The records of all namespaces form a forest: a record's ancestors are the pages before it.
 *
 *   - A record lives as long as it holds its target page, and so do all its ancestors: what is found is a whole prefix.
 *   - The target_state slot of page i is the restore point at (i + 1) * PAGE_TOKENS. It and the draft slots may come
 *     later and leave earlier than the page.
 *   - A slot is a candidate for eviction iff no lease needs it and, for a target page, no other page follows it.
 *
 * Knows no pools and no memory of the device: slots are numbers handed in and out. Allocates only in init. */
#pragma once
#include "evict.h"
#include "key.h"
#include "layout.h"
#include "pool.h"

/* A page's place in one group. */
struct kv_copy {
    uint32_t slot;   /* KV_NO_SLOT: not there */
    uint32_t n_pins; /* leases that need it */
    uint64_t used;   /* tick at which it came or was last needed */
};

struct kv_record {
    struct kv_key key;
    uint32_t parent; /* KV_NO_RECORD: page 0 of its namespace */
    uint32_t page_idx;
    uint32_t n_children;
    uint32_t n_windows; /* restore points whose sliding window holds this page */
    uint32_t owner;     /* its user's number in the shares */
    struct kv_copy device[KV_GROUP_N];
};

struct kv_index_entry {
    uint32_t tag; /* first bytes of the key; its low bits are the entry's home */
    uint32_t record;
};

struct kv_index_group {
    uint32_t *record_of;          /* [number of slots] whose slot it is, or KV_NO_RECORD */
    uint32_t n_slots;             /* 0: the group does not exist */
    uint32_t n_indexed, n_pinned; /* slots held; those of them with n_pins > 0 */
    struct kv_evict evict;
};

struct kv_index {
    struct kv_pool free_records;
    struct kv_record *records;      /* [n_records_max] */
    int32_t (*tokens)[PAGE_TOKENS]; /* [n_records_max] */
    struct kv_index_entry *table;   /* open addressing, at most half full */
    uint32_t table_mask;
    uint32_t window_tokens;
    uint64_t tick;
    struct kv_share share;
    struct kv_index_group group[KV_GROUP_N];
};
enum { KV_INDEX_E_FULL = 1 };

/* n_slots: one more than the highest slot number per group, 0 if it does not exist; share_percent: that each user keeps of
 * them. -ENOMEM. */
int kv_index_init(struct kv_index *index, uint32_t n_records_max, const uint32_t n_slots[KV_GROUP_N],
                  uint32_t window_tokens, uint32_t share_percent);
void kv_index_deinit(struct kv_index *index);

/* The page that follows `parent` (KV_NO_RECORD: none) under this key and has exactly these tokens, or KV_NO_RECORD:
 * hashes narrow, tokens decide. */
uint32_t kv_index_find(const struct kv_index *index, const struct kv_key *key, uint32_t parent,
                       const int32_t tokens[PAGE_TOKENS]);

/* By the key alone: for who only asks what is there. Who goes on to use it finds it by its tokens too. */
uint32_t kv_index_find_key(const struct kv_index *index, const struct kv_key *key, uint32_t parent);

/* For a walk along a chain whose keys are known: asks for the memory that a find of this key will touch, first the table's,
 * then, when that has come, the record's and, unless it is by the key alone, the tokens'. */
void kv_index_prefetch_entry(const struct kv_index *index, const struct kv_key *key);
void kv_index_prefetch_record(const struct kv_index *index, const struct kv_key *key);
void kv_index_prefetch_tokens(const struct kv_index *index, const struct kv_key *key);

/* A record with its target page. It must not be there already. uid: whose it is, if it has no parent. E_FULL: no record is
 * free. */
int kv_index_add(struct kv_index *index, const struct kv_key *key, uint32_t parent, const int32_t tokens[PAGE_TOKENS],
                 uint32_t uid, uint32_t target_slot, uint32_t *ret_record);

/* The one to leave next, of who has more than his share if anybody has; else the longest unused: a running request does not
 * wait for a page that nobody needs now. KV_NO_RECORD: nothing may leave. */
uint32_t kv_index_first_to_leave(struct kv_index *index, enum kv_group group);

void kv_index_attach(struct kv_index *index, uint32_t record, enum kv_group group, uint32_t slot);

/* Takes an unpinned slot out. With its target page the record leaves, so the other slots must have been taken first. */
uint32_t kv_index_detach(struct kv_index *index, uint32_t record, enum kv_group group);

/* Pin what is there only. Every lease that pins something of a page pins the target pages up to it. */
void kv_index_pin(struct kv_index *index, uint32_t record, enum kv_group group);
void kv_index_unpin(struct kv_index *index, uint32_t record, enum kv_group group);
void kv_index_touch(struct kv_index *index, uint32_t record, enum kv_group group); /* as if it had just come */

static inline bool kv_index_has(const struct kv_index *index, uint32_t record, enum kv_group group) {
    return index->records[record].device[group].slot != KV_NO_SLOT;
}

/* NULL, or what is wrong. n_pins: [n_records_max] what leases hold of each record. For tests. */
const char *kv_index_check(const struct kv_index *index, const uint32_t (*n_pins)[KV_GROUP_N]);
