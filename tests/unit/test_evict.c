/* Candidates leave in their order, whatever was put in, moved and taken out before. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "evict.h"

enum { N_RECORDS = 700, N_OPERATIONS = 20000, N_OWNERS = 3 };

static uint64_t random_next(uint64_t *random) {
    *random = *random * 6364136223846793005u + 1442695040888963407u;
    return *random >> 33;
}

static void what_nobody_needs_leaves_before_what_was_used_longest_ago(void **state) {
    (void)state;
    assert_true(kv_evict_order(false, 9) < kv_evict_order(true, 1));
    assert_true(kv_evict_order(false, 1) < kv_evict_order(false, 2));
    assert_true(kv_evict_order(true, 1) < kv_evict_order(true, 2));
}

static void first_is_the_lowest_of_all_that_are_in(void **state) {
    uint64_t order[N_RECORDS] = {0}, random = 42, found; /* 0: not in */
    struct kv_share share;
    struct kv_evict evict;

    (void)state;
    kv_share_init(&share, 0);
    for (uint32_t o = 1; o <= N_OWNERS; o++)
        kv_share_hold(&share, kv_share_number(&share, o), KV_TARGET_FULL);
    assert_int_equal(kv_evict_init(&evict, N_RECORDS), 0);
    for (int i = 0; i < N_OPERATIONS; i++) {
        uint32_t record = (uint32_t)(random_next(&random) % N_RECORDS), lowest = KV_NO_RECORD;

        order[record] = random_next(&random) % 3 == 0 ? 0 : random_next(&random) << 15 | (uint64_t)i;
        if (order[record] == 0)
            kv_evict_remove(&evict, record);
        else
            kv_evict_put(&evict, record, 1 + random_next(&random) % N_OWNERS, order[record]);
        for (uint32_t r = 0; r < N_RECORDS; r++)
            if (order[r] != 0 && (lowest == KV_NO_RECORD || order[r] < order[lowest]))
                lowest = r;
        assert_int_equal(kv_evict_first(&evict), lowest);
        assert_int_equal(kv_evict_first_for(&evict, &share, KV_TARGET_FULL, N_RECORDS, KV_SHARE_NOBODY), lowest);
        assert_int_equal(kv_evict_find(&evict, record, &found), order[record] != 0);
        if (order[record] != 0)
            assert_int_equal(found, order[record]);
        assert_null(kv_evict_check(&evict));
    }
    kv_evict_deinit(&evict);
}

static void each_owner_has_an_order_of_his_own(void **state) {
    struct kv_share share;
    struct kv_evict evict;
    uint32_t mine, other;

    (void)state;
    kv_share_init(&share, 50);
    assert_int_equal(kv_evict_init(&evict, 10), 0);
    mine = kv_share_number(&share, 7);
    for (uint32_t r = 0; r < 4; r++) {
        kv_share_hold(&share, mine, KV_TARGET_FULL);
        kv_evict_put(&evict, r, mine, r);
    }
    other = kv_share_number(&share, 8);
    for (uint32_t r = 4; r < 10; r++) {
        kv_share_hold(&share, other, KV_TARGET_FULL);
        kv_evict_put(&evict, r, other, r);
    }
    assert_int_equal(kv_evict_first(&evict), 0);
    assert_int_equal(kv_evict_first_for(&evict, &share, KV_TARGET_FULL, 10, other), 4);
    assert_int_equal(kv_evict_first_for(&evict, &share, KV_TARGET_FULL, 10, mine), 4);
    for (uint32_t r = 4; r < 10; r++)
        kv_evict_remove(&evict, r);
    assert_int_equal(kv_evict_first_for(&evict, &share, KV_TARGET_FULL, 10, other), KV_NO_RECORD);
    assert_int_equal(kv_evict_first_for(&evict, &share, KV_TARGET_FULL, 10, KV_SHARE_NOBODY), 0);
    assert_null(kv_evict_check(&evict));
    kv_evict_deinit(&evict);
}

static void group_without_slots_has_no_candidates(void **state) {
    struct kv_evict evict;
    uint64_t order;

    (void)state;
    assert_int_equal(kv_evict_init(&evict, 0), 0);
    assert_int_equal(kv_evict_first(&evict), KV_NO_RECORD);
    assert_false(kv_evict_find(&evict, 3, &order));
    kv_evict_remove(&evict, 3);
    assert_null(kv_evict_check(&evict));
    kv_evict_deinit(&evict);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_nobody_needs_leaves_before_what_was_used_longest_ago),
        cmocka_unit_test(first_is_the_lowest_of_all_that_are_in),
        cmocka_unit_test(each_owner_has_an_order_of_his_own),
        cmocka_unit_test(group_without_slots_has_no_candidates),
    };

    return cmocka_run_group_tests_name("evict", tests, NULL, NULL);
}
