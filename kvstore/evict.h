/* evict: who leaves next. The candidates of one group, ordered; the first one goes. Pure choice: what a record holds, and
 * when it is a candidate at all, is the index's business, and so is what follows from leaving.
 *
 * A binary heap, so that putting in, taking out and finding the first each look at O(log n) candidates, however many
 * records are pinned or inside a chain: those are not in it. */
#pragma once
#include "backend.h"

#define KV_NO_RECORD UINT32_MAX

struct kv_candidate {
    uint64_t order; /* lowest leaves first */
    uint32_t record;
};

struct kv_evict {
    struct kv_candidate *heap; /* [n_max] */
    uint32_t *place;           /* [n_records] index in heap, or UINT32_MAX */
    uint32_t n, n_max;
};

/* At most n_max of the records 0 .. n_records - 1 are candidates at a time. -ENOMEM. */
int kv_evict_init(struct kv_evict *evict, uint32_t n_records, uint32_t n_max);
void kv_evict_deinit(struct kv_evict *evict);

/* Records that a restore point needs leave after those that none needs; among equals the longest unused goes first. */
uint64_t kv_evict_order(bool is_needed, uint64_t used);

void kv_evict_put(struct kv_evict *evict, uint32_t record, uint64_t order); /* in, or to another place */
void kv_evict_remove(struct kv_evict *evict, uint32_t record);              /* nothing happens if it is not in */
uint32_t kv_evict_first(const struct kv_evict *evict);                      /* KV_NO_RECORD: nothing may leave */

/* True and its order if the record is a candidate. */
bool kv_evict_find(const struct kv_evict *evict, uint32_t record, uint64_t *ret_order);

/* NULL, or what is wrong. For tests. */
const char *kv_evict_check(const struct kv_evict *evict);
