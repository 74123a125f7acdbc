#include "pool.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>

int kv_pool_init(struct kv_pool *pool, uint32_t n_slots, uint32_t n_reserved) {
    *pool = (struct kv_pool){.n_reserved = n_reserved};
    if (n_slots == 0)
        return 0;
    pool->free_slots = calloc(n_slots, sizeof *pool->free_slots);
    pool->is_taken = calloc((size_t)n_reserved + n_slots, sizeof *pool->is_taken);
    if (pool->free_slots == NULL || pool->is_taken == NULL) {
        kv_pool_deinit(pool);
        return -ENOMEM;
    }
    for (uint32_t i = 0; i < n_slots; i++)
        pool->free_slots[i] = n_reserved + n_slots - 1 - i;
    pool->n_free = pool->n_slots = n_slots;
    return 0;
}

void kv_pool_deinit(struct kv_pool *pool) {
    assert(pool->n_free == pool->n_slots);
    free(pool->free_slots);
    free(pool->is_taken);
    *pool = (struct kv_pool){0};
}

int kv_pool_take(struct kv_pool *pool, uint32_t *ret_slot) {
    uint32_t slot;

    if (pool->n_free == 0)
        return KV_POOL_E_FULL;
    slot = pool->free_slots[--pool->n_free];
    pool->is_taken[slot] = true;
    *ret_slot = slot;
    return 0;
}

void kv_pool_give(struct kv_pool *pool, uint32_t slot) {
    assert(kv_pool_is_taken(pool, slot));
    pool->is_taken[slot] = false;
    pool->free_slots[pool->n_free++] = slot;
}

bool kv_pool_is_taken(const struct kv_pool *pool, uint32_t slot) {
    return slot >= pool->n_reserved && slot - pool->n_reserved < pool->n_slots && pool->is_taken[slot];
}

const char *kv_pool_check(const struct kv_pool *pool) {
    size_t n_numbers = (size_t)pool->n_reserved + pool->n_slots;
    bool *is_seen = calloc(n_numbers + 1, sizeof *is_seen);
    const char *wrong = is_seen == NULL ? "no memory to check with" : NULL;
    uint32_t n_taken = 0;

    for (uint32_t i = 0; i < pool->n_free && wrong == NULL; i++) {
        uint32_t slot = pool->free_slots[i];

        if (slot < pool->n_reserved || slot >= n_numbers)
            wrong = "a free slot has a number that is not the pool's";
        else if (pool->is_taken[slot] || is_seen[slot])
            wrong = "a free slot is taken or free twice";
        else
            is_seen[slot] = true;
    }
    for (size_t slot = 0; slot < n_numbers && pool->n_slots > 0; slot++)
        n_taken += pool->is_taken[slot];
    if (wrong == NULL && n_taken + pool->n_free != pool->n_slots)
        wrong = "free and taken slots do not add up";
    free(is_seen);
    return wrong;
}
