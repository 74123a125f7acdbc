/* pool: the free slots of one group (or the free records of the index). Knows no keys, leases or policy; allocates only
 * in init. */
#pragma once
#include "backend.h"

struct kv_pool {
    uint32_t *free_slots; /* stack, [n_slots] */
    bool *is_taken;       /* [n_reserved + n_slots] */
    uint32_t n_free, n_slots;
    uint32_t n_reserved; /* the lowest numbers, never handed out */
};
enum { KV_POOL_E_FULL = 1 };

/* Slots n_reserved .. n_reserved + n_slots - 1. n_slots may be 0: always full. -ENOMEM. */
int kv_pool_init(struct kv_pool *pool, uint32_t n_slots, uint32_t n_reserved);
void kv_pool_deinit(struct kv_pool *pool); /* a missing slot is a leaked page: asserts that all are home */

/* Slots come out in ascending order at first, later the one given last. E_FULL: the caller evicts or waits. */
int kv_pool_take(struct kv_pool *pool, uint32_t *ret_slot);
void kv_pool_give(struct kv_pool *pool, uint32_t slot);
bool kv_pool_is_taken(const struct kv_pool *pool, uint32_t slot);

/* NULL, or what is wrong. For tests. */
const char *kv_pool_check(const struct kv_pool *pool);
