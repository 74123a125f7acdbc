/* costs: what was measured lately decides between bringing back and computing again. */
#include "costs.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

static void at_first_a_gigabyte_per_second_is_assumed(void **state) {
    struct costs costs;

    (void)state;
    costs_init(&costs, 10);
    assert_true(costs_prefer_restore(&costs, 100, (struct costs_bytes){.host = 999 * 1000}));
    assert_false(costs_prefer_restore(&costs, 100, (struct costs_bytes){.host = 1001 * 1000}));
}

static void a_tie_is_computed(void **state) {
    struct costs costs = {.us_per_token = 2, .us_per_host_byte = 0.5};

    (void)state;
    assert_true(costs_prefer_restore(&costs, 10, (struct costs_bytes){.host = 39}));
    assert_false(costs_prefer_restore(&costs, 10, (struct costs_bytes){.host = 40}));
    assert_false(costs_prefer_restore(&costs, 0, (struct costs_bytes){.host = 0}));
}

static void measurements_pull_the_averages_to_them(void **state) {
    struct costs costs;

    (void)state;
    costs_init(&costs, 10);
    for (int i = 0; i < 100; i++) {
        costs_fed(&costs, 50, 50 * 4);
        costs_restored(&costs, (struct costs_bytes){.host = 1000}, 1000 * 3);
    }
    assert_float_equal(costs.us_per_token, 4, 1e-3);
    assert_float_equal(costs.us_per_host_byte, 3, 1e-3);
}

static void one_slow_restore_does_not_decide_alone(void **state) {
    struct costs costs;

    (void)state;
    costs_init(&costs, 10);
    costs_restored(&costs, (struct costs_bytes){.host = 1000}, 5); /* five times as slow as assumed */
    assert_true(costs_prefer_restore(&costs, 100, (struct costs_bytes){.host = 500 * 1000}));
    for (int i = 0; i < 20; i++)
        costs_restored(&costs, (struct costs_bytes){.host = 1000}, 5);
    assert_false(costs_prefer_restore(&costs, 100, (struct costs_bytes){.host = 500 * 1000}));
}

static void the_disk_has_a_price_of_its_own(void **state) {
    struct costs costs;

    (void)state;
    costs_init(&costs, 10);
    for (int i = 0; i < 100; i++) {
        costs_restored(&costs, (struct costs_bytes){.host = 1000}, 1000);
        costs_restored(&costs, (struct costs_bytes){.host = 1000, .disk = 1000}, 1000 + 5000);
    }
    assert_float_equal(costs.us_per_host_byte, 1, 1e-3);
    assert_float_equal(costs.us_per_disk_byte, 5, 1e-2);
    assert_true(costs_prefer_restore(&costs, 10, (struct costs_bytes){.host = 99}));
    assert_false(costs_prefer_restore(&costs, 10, (struct costs_bytes){.disk = 99}));
    assert_true(costs_prefer_restore(&costs, 10, (struct costs_bytes){.host = 40, .disk = 10}));
}

static void what_takes_nearly_as_long_to_read_is_not_worth_writing(void **state) {
    struct costs costs = {.us_per_token = 10, .us_per_disk_byte = 1};

    (void)state;
    assert_true(costs_worth_saving(&costs, 10, 69));
    assert_false(costs_worth_saving(&costs, 10, 71));
}

static void a_restore_that_crawls_is_given_up_if_computing_is_faster(void **state) {
    const struct costs costs = {.us_per_token = 1000, .us_per_disk_byte = 1}; /* 1000 tokens: 1 s */
    const struct costs_bytes bytes = {.disk = 100000};                        /* planned: 0.1 s */

    (void)state;
    assert_false(costs_give_up(&costs, 1000, bytes, 0, 499999)); /* everybody stumbles */
    assert_true(costs_give_up(&costs, 1000, bytes, 0, 500000));
    assert_true(costs_give_up(&costs, 1000, bytes, 0.25, 500000));                                 /* 1.5 s to go */
    assert_false(costs_give_up(&costs, 1000, bytes, 0.5, 500000));                                 /* 0.5 s to go */
    assert_false(costs_give_up(&costs, 1000, (struct costs_bytes){.disk = 2000000}, 0.2, 500000)); /* as planned */
}

static void what_had_no_size_is_no_measurement(void **state) {
    struct costs costs;

    (void)state;
    costs_init(&costs, 10);
    costs_fed(&costs, 0, 1000);
    costs_restored(&costs, (struct costs_bytes){.host = 0}, 1000);
    assert_float_equal(costs.us_per_token, 10, 0);
    assert_float_equal(costs.us_per_host_byte, 1e-3, 0);
}

static void what_is_refused_for_long_is_tried_again(void **state) {
    struct costs costs;
    int n = 0;

    (void)state;
    costs_init(&costs, 10);
    for (int i = 0; i < 100; i++)
        costs_restored(&costs, (struct costs_bytes){.host = 1000}, 100 * 1000);
    while (!costs_prefer_restore(&costs, 100, (struct costs_bytes){.host = 500 * 1000}))
        n++;
    assert_in_range(n, 20, 400);
}

static void what_is_not_worth_writing_for_long_is_written_again(void **state) {
    struct costs costs;
    int n = 0;

    (void)state;
    costs_init(&costs, 10);
    for (int i = 0; i < 100; i++)
        costs_restored(&costs, (struct costs_bytes){.disk = 1000}, 100 * 1000);
    while (
        !costs_worth_saving(&costs, 100, 500 * 1000)) { /* nothing is read meanwhile: what is there is not asked for */
        assert_true(n < 400);
        n++;
    }
    assert_in_range(n, 20, 400);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(at_first_a_gigabyte_per_second_is_assumed),
        cmocka_unit_test(a_tie_is_computed),
        cmocka_unit_test(measurements_pull_the_averages_to_them),
        cmocka_unit_test(one_slow_restore_does_not_decide_alone),
        cmocka_unit_test(the_disk_has_a_price_of_its_own),
        cmocka_unit_test(what_takes_nearly_as_long_to_read_is_not_worth_writing),
        cmocka_unit_test(a_restore_that_crawls_is_given_up_if_computing_is_faster),
        cmocka_unit_test(what_had_no_size_is_no_measurement),
        cmocka_unit_test(what_is_refused_for_long_is_tried_again),
        cmocka_unit_test(what_is_not_worth_writing_for_long_is_written_again),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
