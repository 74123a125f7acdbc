/* A pool hands out each of its slots once, never a reserved one, and says so when it is empty. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "pool.h"

enum { N_SLOTS = 5 };

static void take_all(struct kv_pool *pool, uint32_t slots[N_SLOTS]) {
    for (int i = 0; i < N_SLOTS; i++)
        assert_int_equal(kv_pool_take(pool, &slots[i]), 0);
}

static void give_all(struct kv_pool *pool, const uint32_t slots[N_SLOTS]) {
    for (int i = 0; i < N_SLOTS; i++)
        kv_pool_give(pool, slots[i]);
}

static void slots_come_out_in_order_and_without_the_reserved_ones(void **state) {
    struct kv_pool pool;
    uint32_t slots[N_SLOTS];

    (void)state;
    assert_int_equal(kv_pool_init(&pool, N_SLOTS, 2), 0);
    take_all(&pool, slots);
    for (uint32_t i = 0; i < N_SLOTS; i++)
        assert_int_equal(slots[i], i + 2);
    assert_null(kv_pool_check(&pool));
    give_all(&pool, slots);
    kv_pool_deinit(&pool);
}

static void full_pool_says_so_and_keeps_its_slots(void **state) {
    struct kv_pool pool;
    uint32_t slots[N_SLOTS], other = 77;

    (void)state;
    assert_int_equal(kv_pool_init(&pool, N_SLOTS, 0), 0);
    take_all(&pool, slots);
    assert_int_equal(kv_pool_take(&pool, &other), KV_POOL_E_FULL);
    assert_int_equal(other, 77);
    kv_pool_give(&pool, slots[3]);
    assert_int_equal(kv_pool_take(&pool, &other), 0);
    assert_int_equal(other, slots[3]);
    give_all(&pool, slots);
    kv_pool_deinit(&pool);
}

static void pool_without_slots_is_always_full(void **state) {
    struct kv_pool pool;
    uint32_t slot;

    (void)state;
    assert_int_equal(kv_pool_init(&pool, 0, 1), 0);
    assert_int_equal(kv_pool_take(&pool, &slot), KV_POOL_E_FULL);
    assert_false(kv_pool_is_taken(&pool, 0));
    assert_null(kv_pool_check(&pool));
    kv_pool_deinit(&pool);
}

static void a_slot_is_taken_until_it_is_given(void **state) {
    struct kv_pool pool;
    uint32_t slot;

    (void)state;
    assert_int_equal(kv_pool_init(&pool, N_SLOTS, 1), 0);
    assert_false(kv_pool_is_taken(&pool, 0));
    assert_false(kv_pool_is_taken(&pool, N_SLOTS + 1));
    assert_int_equal(kv_pool_take(&pool, &slot), 0);
    assert_true(kv_pool_is_taken(&pool, slot));
    kv_pool_give(&pool, slot);
    assert_false(kv_pool_is_taken(&pool, slot));
    kv_pool_deinit(&pool);
}

static void check_finds_a_slot_that_is_free_twice(void **state) {
    struct kv_pool pool;
    uint32_t kept;

    (void)state;
    assert_int_equal(kv_pool_init(&pool, N_SLOTS, 0), 0);
    kept = pool.free_slots[0];
    pool.free_slots[0] = pool.free_slots[1];
    assert_non_null(kv_pool_check(&pool));
    pool.free_slots[0] = kept;
    assert_null(kv_pool_check(&pool));
    kv_pool_deinit(&pool);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(slots_come_out_in_order_and_without_the_reserved_ones),
        cmocka_unit_test(full_pool_says_so_and_keeps_its_slots),
        cmocka_unit_test(pool_without_slots_is_always_full),
        cmocka_unit_test(a_slot_is_taken_until_it_is_given),
        cmocka_unit_test(check_finds_a_slot_that_is_free_twice),
    };

    return cmocka_run_group_tests_name("pool", tests, NULL, NULL);
}
