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
    assert_true(costs_prefer_restore(&costs, 100, 999 * 1000));
    assert_false(costs_prefer_restore(&costs, 100, 1001 * 1000));
}

static void a_tie_is_computed(void **state) {
    struct costs costs = {.us_per_token = 2, .us_per_byte = 0.5};

    (void)state;
    assert_true(costs_prefer_restore(&costs, 10, 39));
    assert_false(costs_prefer_restore(&costs, 10, 40));
    assert_false(costs_prefer_restore(&costs, 0, 0));
}

static void measurements_pull_the_averages_to_them(void **state) {
    struct costs costs;

    (void)state;
    costs_init(&costs, 10);
    for (int i = 0; i < 100; i++) {
        costs_fed(&costs, 50, 50 * 4);
        costs_restored(&costs, 1000, 1000 * 3);
    }
    assert_float_equal(costs.us_per_token, 4, 1e-3);
    assert_float_equal(costs.us_per_byte, 3, 1e-3);
}

static void one_slow_restore_does_not_decide_alone(void **state) {
    struct costs costs;

    (void)state;
    costs_init(&costs, 10);
    costs_restored(&costs, 1000, 5); /* five times as slow as assumed */
    assert_true(costs_prefer_restore(&costs, 100, 500 * 1000));
    for (int i = 0; i < 20; i++)
        costs_restored(&costs, 1000, 5);
    assert_false(costs_prefer_restore(&costs, 100, 500 * 1000));
}

static void what_had_no_size_is_no_measurement(void **state) {
    struct costs costs;

    (void)state;
    costs_init(&costs, 10);
    costs_fed(&costs, 0, 1000);
    costs_restored(&costs, 0, 1000);
    assert_float_equal(costs.us_per_token, 10, 0);
    assert_float_equal(costs.us_per_byte, 1e-3, 0);
}

static void what_is_refused_for_long_is_tried_again(void **state) {
    struct costs costs;
    int n = 0;

    (void)state;
    costs_init(&costs, 10);
    for (int i = 0; i < 100; i++)
        costs_restored(&costs, 1000, 100 * 1000);
    while (!costs_prefer_restore(&costs, 100, 500 * 1000))
        n++;
    assert_in_range(n, 20, 400);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(at_first_a_gigabyte_per_second_is_assumed),
        cmocka_unit_test(a_tie_is_computed),
        cmocka_unit_test(measurements_pull_the_averages_to_them),
        cmocka_unit_test(one_slow_restore_does_not_decide_alone),
        cmocka_unit_test(what_had_no_size_is_no_measurement),
        cmocka_unit_test(what_is_refused_for_long_is_tried_again),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
