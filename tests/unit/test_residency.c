/* Which pages of a seq that is too large for the device stay there, and how that is steered. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "residency.h"

enum { N_DEVICE = 512, CHUNK = 256, W = 64 /* fences of a window */ };

static struct residency_steering steering;
static uint64_t n_passes, n_fences, n_late;

/* A window in which so many fences of 64 were late. */
static int window(int late) {
    struct residency residency = residency_of(N_DEVICE, CHUNK);

    n_passes += RESIDENCY_WINDOW_PASSES;
    n_fences += W;
    n_late += (uint64_t)late;
    residency_steer(&steering, &residency, n_passes, n_fences, n_late);
    return steering.n_more;
}

static int begin(void **state) {
    (void)state;
    steering = (struct residency_steering){0};
    n_passes = n_fences = n_late = 0;
    return 0;
}

static void an_eighth_is_left_to_others_and_most_of_it_may_stay(void **state) {
    struct residency residency = residency_of(N_DEVICE, CHUNK), tiny = residency_of(12, 64);

    (void)state;
    assert_int_equal(residency.most, 448);
    assert_int_equal(residency.head, 448 - residency.tail);
    assert_int_equal(residency.more, 64 - 16);
    assert_int_equal(tiny.more, 0);
    assert_int_equal(residency_pages_min(64), 5);
}

static void where_compute_waits_more_stay_until_nothing_is_left_to_take(void **state) {
    (void)state;
    assert_int_equal(window(W), 0); /* one window is no trend */
    assert_int_equal(window(W), 6);
    assert_int_equal(window(W / 4), 6);
    assert_int_equal(window(W / 4), 12);
    for (int i = 0; i < 100; i++)
        window(W);
    assert_int_equal(steering.n_more, 48);
}

static void where_it_does_not_they_go_more_slowly(void **state) {
    (void)state;
    for (int i = 0; i < 4; i++)
        window(W);
    assert_int_equal(steering.n_more, 12);
    for (int i = 0; i < RESIDENCY_QUIET_WINDOWS - 1; i++)
        assert_int_equal(window(0), 12);
    assert_int_equal(window(1), 6); /* of 64 */
    for (int i = 0; i < 100; i++)
        window(0);
    assert_int_equal(steering.n_more, 0);
}

static void in_between_and_to_and_fro_nothing_changes(void **state) {
    (void)state;
    for (int i = 0; i < 2; i++)
        window(W);
    for (int i = 0; i < 50; i++)
        assert_int_equal(window(W / 8), 6);
    for (int i = 0; i < 50; i++)
        assert_int_equal(window(i % 2 == 0 ? W : 0), 6);
}

static void less_than_a_window_says_nothing(void **state) {
    struct residency residency = residency_of(N_DEVICE, CHUNK);

    (void)state;
    window(W);
    residency_steer(&steering, &residency, n_passes + RESIDENCY_WINDOW_PASSES - 1, n_fences + W, n_late + W);
    assert_int_equal(steering.n_more, 0);
    residency_steer(&steering, &residency, n_passes + RESIDENCY_WINDOW_PASSES, n_fences + W, n_late + W);
    assert_int_equal(steering.n_more, 6);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(an_eighth_is_left_to_others_and_most_of_it_may_stay, begin),
        cmocka_unit_test_setup(where_compute_waits_more_stay_until_nothing_is_left_to_take, begin),
        cmocka_unit_test_setup(where_it_does_not_they_go_more_slowly, begin),
        cmocka_unit_test_setup(in_between_and_to_and_fro_nothing_changes, begin),
        cmocka_unit_test_setup(less_than_a_window_says_nothing, begin),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
