/* Cuts: where a prompt leaves restore points. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base.h"
#include "cuts.h"

enum { ROOM = 64 };

static void expect(struct cuts_prompt prompt, const int *cuts, int n_cuts) {
    int found[ROOM];

    if (prompt.n_max == 0)
        prompt.n_max = 8;
    assert_int_equal(cuts_find(&prompt, found), n_cuts);
    for (int i = 0; i < n_cuts; i++)
        assert_int_equal(found[i], cuts[i]);
}
#define EXPECT(prompt, ...)                                                                                            \
    expect((struct cuts_prompt)prompt, (const int[]){__VA_ARGS__}, (int)(ARRAY_LEN(((const int[]){__VA_ARGS__}))))
#define P(...)                                                                                                         \
    { __VA_ARGS__ }

static void short_prompt_has_none(void **state) {
    (void)state;
    expect((struct cuts_prompt){.n = 63, .n_system = 20, .n_head = 60}, NULL, 0);
}

static void last_one_leaves_a_token_to_compute(void **state) {
    (void)state;
    EXPECT(P(.n = 65), 64);
    EXPECT(P(.n = 191), 128);
}

static void prompt_that_ends_on_the_grid_leaves_one_for_what_follows_it(void **state) {
    (void)state;
    EXPECT(P(.n = 64), 64);
    EXPECT(P(.n = 192), 128, 192);
    EXPECT(P(.n = 192, .n_max = 1), 128);
}

static void head_and_system_come_before_those_at_distances(void **state) {
    (void)state;
    EXPECT(P(.n = 700, .n_system = 200, .n_head = 630), 192, 576, 640);
    EXPECT(P(.n = 700, .n_system = 200, .n_head = 690), 192, 640);
    EXPECT(P(.n = 20000, .n_system = 200, .n_head = 19900), 192, 7680, 15872, 19840, 19968);
    EXPECT(P(.n = 20000, .n_system = 200, .n_head = 19900, .n_max = 3), 192, 19840, 19968);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(short_prompt_has_none),
        cmocka_unit_test(last_one_leaves_a_token_to_compute),
        cmocka_unit_test(prompt_that_ends_on_the_grid_leaves_one_for_what_follows_it),
        cmocka_unit_test(head_and_system_come_before_those_at_distances),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
