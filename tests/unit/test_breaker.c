/* A breaker opens when there is too much trouble in one window, and closes again one careful step after the other. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "breaker.h"

static const struct kv_breaker_options options = {
    .n_errors_max = 3, .n_late_max = 1, .window_us = 1000, .probe_us = 30000};

static void report(struct kv_breaker *breaker, enum kv_breaker_report what, uint64_t now_us) {
    uint64_t ticket;

    assert_true(kv_breaker_admits(breaker, &ticket));
    kv_breaker_report(breaker, ticket, what, now_us);
}

static void errors_within_a_window_open_it(void **state) {
    struct kv_breaker breaker;
    uint64_t ticket;

    (void)state;
    kv_breaker_init(&breaker, &options);
    for (uint64_t i = 0; i < 3; i++)
        report(&breaker, KV_BREAKER_FAILED, 100 + i);
    report(&breaker, KV_BREAKER_WORKED, 105);
    assert_int_equal(breaker.state, KV_BREAKER_CLOSED);
    report(&breaker, KV_BREAKER_FAILED, 110);
    assert_int_equal(breaker.state, KV_BREAKER_OPEN);
    assert_int_equal(breaker.n_opened, 1);
    assert_false(kv_breaker_admits(&breaker, &ticket));
}

static void errors_far_apart_do_not_open_it(void **state) {
    struct kv_breaker breaker;

    (void)state;
    kv_breaker_init(&breaker, &options);
    for (uint64_t i = 0; i < 100; i++)
        report(&breaker, KV_BREAKER_FAILED, i * 334); /* three to a window */
    assert_int_equal(breaker.state, KV_BREAKER_CLOSED);
}

static void late_operations_have_a_count_of_their_own(void **state) {
    struct kv_breaker breaker;

    (void)state;
    kv_breaker_init(&breaker, &options);
    for (int i = 0; i < 3; i++)
        report(&breaker, KV_BREAKER_FAILED, 0);
    report(&breaker, KV_BREAKER_LATE, 1);
    assert_int_equal(breaker.state, KV_BREAKER_CLOSED);
    report(&breaker, KV_BREAKER_LATE, 2);
    assert_int_equal(breaker.state, KV_BREAKER_OPEN);
}

static void it_closes_by_a_probe_and_one_operation(void **state) {
    struct kv_breaker breaker;
    uint64_t ticket, other;

    (void)state;
    kv_breaker_init(&breaker, &options);
    kv_breaker_trip(&breaker, 100);
    assert_false(kv_breaker_wants_probe(&breaker, 100 + 29999));
    assert_true(kv_breaker_wants_probe(&breaker, 100 + 30000));
    assert_false(kv_breaker_wants_probe(&breaker, 100 + 60000)); /* one at a time */
    kv_breaker_report_probe(&breaker, false, 40000);
    assert_false(kv_breaker_wants_probe(&breaker, 69999));
    assert_true(kv_breaker_wants_probe(&breaker, 70000));
    kv_breaker_report_probe(&breaker, true, 70001);
    assert_int_equal(breaker.state, KV_BREAKER_HALF_OPEN);
    assert_true(kv_breaker_admits(&breaker, &ticket));
    assert_false(kv_breaker_admits(&breaker, &other));
    kv_breaker_report(&breaker, ticket, KV_BREAKER_WORKED, 70002);
    assert_int_equal(breaker.state, KV_BREAKER_CLOSED);
    assert_true(kv_breaker_admits(&breaker, &ticket));
    assert_true(kv_breaker_admits(&breaker, &other));
}

static void trouble_while_half_open_opens_it_again(void **state) {
    static const enum kv_breaker_report troubles[] = {KV_BREAKER_FAILED, KV_BREAKER_LATE};

    (void)state;
    for (int i = 0; i < 2; i++) {
        struct kv_breaker breaker;

        kv_breaker_init(&breaker, &options);
        kv_breaker_trip(&breaker, 0);
        assert_true(kv_breaker_wants_probe(&breaker, 30000));
        kv_breaker_report_probe(&breaker, true, 30001);
        report(&breaker, troubles[i], 30002);
        assert_int_equal(breaker.state, KV_BREAKER_OPEN);
        assert_int_equal(breaker.n_opened, 2);
        assert_false(kv_breaker_wants_probe(&breaker, 60001));
        assert_true(kv_breaker_wants_probe(&breaker, 60002));
    }
}

static void report_from_before_it_opened_says_nothing(void **state) {
    struct kv_breaker breaker;
    uint64_t old, trial;

    (void)state;
    kv_breaker_init(&breaker, &options);
    assert_true(kv_breaker_admits(&breaker, &old));
    kv_breaker_trip(&breaker, 0);
    kv_breaker_report(&breaker, old, KV_BREAKER_WORKED, 1);
    assert_int_equal(breaker.state, KV_BREAKER_OPEN);
    assert_true(kv_breaker_wants_probe(&breaker, 30000));
    kv_breaker_report_probe(&breaker, true, 30001);
    assert_true(kv_breaker_admits(&breaker, &trial));
    kv_breaker_report(&breaker, old, KV_BREAKER_WORKED, 30002);
    kv_breaker_report(&breaker, old, KV_BREAKER_LATE, 30002);
    assert_int_equal(breaker.state, KV_BREAKER_HALF_OPEN);
    kv_breaker_report(&breaker, trial, KV_BREAKER_WORKED, 30003);
    assert_int_equal(breaker.state, KV_BREAKER_CLOSED);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(errors_within_a_window_open_it),
        cmocka_unit_test(errors_far_apart_do_not_open_it),
        cmocka_unit_test(late_operations_have_a_count_of_their_own),
        cmocka_unit_test(it_closes_by_a_probe_and_one_operation),
        cmocka_unit_test(trouble_while_half_open_opens_it_again),
        cmocka_unit_test(report_from_before_it_opened_says_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
