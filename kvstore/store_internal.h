/* store_internal: the insides of a store, for lease.c and for tests that break them. */
#pragma once
#include "index.h"
#include "lease.h"
#include "pool.h"
#include "store.h"

struct kv_store_group {
    struct kv_pool pool;
    void *arena;
    size_t slot_bytes;
    uint32_t n_slots;   /* with the null page */
    uint32_t n_private; /* taken and not in the index */
    uint64_t n_evicted;
};

struct kv_store {
    const struct backend *backend;
    struct device *device;
    struct kv_index index;
    struct kv_store_group group[KV_GROUP_N];
    struct kv_lease *leases;
    uint64_t n_matches, n_hits;
    uint8_t fingerprint[KV_KEY_BYTES], secret[KV_KEY_BYTES];
};

/* Where a slot's bytes lie in device memory. */
static inline void *kv_store_slot(const struct kv_store *store, enum kv_group group, uint32_t slot) {
    return (char *)store->group[group].arena + (size_t)slot * store->group[group].slot_bytes;
}

/* What the group needs least leaves the index. Returns the bytes of all slots that became free; 0: nothing may leave. */
uint64_t kv_store_evict_first(struct kv_store *store, enum kv_group group);

/* First page from which all draft groups have what they need before a restore point behind n_pages pages, the last n_run[g]
 * of which have group g. */
uint32_t kv_store_draft_first_page(const struct kv_store *store, uint32_t n_pages, const uint32_t n_run[KV_GROUP_N]);

/* Pins a hit for an empty lease: `record` is its last page, which has a restore point; the draft groups have what they
 * need from page draft_first_page on (n_pages: nothing). */
void kv_lease_hold(struct kv_lease *lease, uint32_t record, uint32_t n_pages, uint32_t draft_first_page);
