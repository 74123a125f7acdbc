/* evict: who leaves next. The candidates of one group, ordered; the first one goes, or the first of who has more than his
 * share. Pure choice: what a record holds, and when it is a candidate at all, is the index's business, and so is what follows
 * from leaving.
 *
 * A leftist heap for each owner, so that putting in, taking out and finding the first each look at O(log n) candidates,
 * however many records are pinned or inside a chain: those are not in it. */
#pragma once
#include "share.h"

#define KV_NO_RECORD UINT32_MAX

struct kv_candidate { /* of the record with its number */
    uint64_t order;   /* lowest leaves first */
    uint32_t left, right, parent;
    uint8_t owner, rank; /* rank 0: it is no candidate; else one more than that of its right child */
};

struct kv_evict {
    struct kv_candidate *nodes; /* [n_records] */
    uint32_t first[KV_SHARE_OWNERS];
    uint32_t n, n_records;
};

/* Of the records 0 .. n_records - 1. -ENOMEM. */
int kv_evict_init(struct kv_evict *evict, uint32_t n_records);
void kv_evict_deinit(struct kv_evict *evict);

/* Records that a restore point needs leave after those that none needs; among equals the longest unused goes first. */
uint64_t kv_evict_order(bool is_needed, uint64_t used);

/* In, or to another place. */
void kv_evict_put(struct kv_evict *evict, uint32_t record, uint32_t owner, uint64_t order);
void kv_evict_remove(struct kv_evict *evict, uint32_t record); /* nothing happens if it is not in */
uint32_t kv_evict_first(const struct kv_evict *evict);         /* whoever's; KV_NO_RECORD: nothing may leave */

/* The one that gives its slot to `wanting`; KV_NO_RECORD: nothing may leave, or all of it is in others' shares. */
uint32_t kv_evict_first_for(const struct kv_evict *evict, struct kv_share *share, enum kv_group group, uint32_t n_slots,
                            uint32_t wanting);

/* True and its order if the record is a candidate. */
bool kv_evict_find(const struct kv_evict *evict, uint32_t record, uint64_t *ret_order);

/* NULL, or what is wrong. For tests. */
const char *kv_evict_check(const struct kv_evict *evict);
