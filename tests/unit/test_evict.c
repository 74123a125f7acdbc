/* Candidates leave in their order, whatever was put in, moved and taken out before. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "evict.h"

enum { N_RECORDS = 700, N_OPERATIONS = 20000 };

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
    struct kv_evict evict;

    (void)state;
    assert_int_equal(kv_evict_init(&evict, N_RECORDS, N_RECORDS), 0);
    for (int i = 0; i < N_OPERATIONS; i++) {
        uint32_t record = (uint32_t)(random_next(&random) % N_RECORDS), lowest = KV_NO_RECORD;

        order[record] = random_next(&random) % 3 == 0 ? 0 : random_next(&random) << 15 | (uint64_t)i;
        if (order[record] == 0)
            kv_evict_remove(&evict, record);
        else
            kv_evict_put(&evict, record, order[record]);
        for (uint32_t r = 0; r < N_RECORDS; r++)
            if (order[r] != 0 && (lowest == KV_NO_RECORD || order[r] < order[lowest]))
                lowest = r;
        assert_int_equal(kv_evict_first(&evict), lowest);
        assert_int_equal(kv_evict_find(&evict, record, &found), order[record] != 0);
        if (order[record] != 0)
            assert_int_equal(found, order[record]);
        assert_null(kv_evict_check(&evict));
    }
    kv_evict_deinit(&evict);
}

static void group_without_slots_has_no_candidates(void **state) {
    struct kv_evict evict;
    uint64_t order;

    (void)state;
    assert_int_equal(kv_evict_init(&evict, N_RECORDS, 0), 0);
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
        cmocka_unit_test(group_without_slots_has_no_candidates),
    };

    return cmocka_run_group_tests_name("evict", tests, NULL, NULL);
}
