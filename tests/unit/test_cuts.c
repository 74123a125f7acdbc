#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "cuts.h"

enum { ROOM = 16 };

static void expect(struct cuts_prompt prompt, int n, const int *expected) {
    int cuts[ROOM];

    assert_int_equal(cuts_find(&prompt, cuts), n);
    for (int i = 0; i < n; i++)
        assert_int_equal(cuts[i], expected[i]);
}

static void the_last_one_leaves_a_token_to_feed(void **state) {
    (void)state;
    expect((struct cuts_prompt){.n = 1, .n_max = ROOM}, 0, NULL);
    expect((struct cuts_prompt){.n = 64, .n_max = ROOM}, 0, NULL);
    expect((struct cuts_prompt){.n = 65, .n_max = ROOM}, 1, (int[]){64});
    expect((struct cuts_prompt){.n = 128, .n_max = ROOM}, 1, (int[]){64});
    expect((struct cuts_prompt){.n = 129, .n_max = ROOM}, 1, (int[]){128});
}

static void parts_of_the_prompt_are_cut_before_their_end(void **state) {
    (void)state;
    expect((struct cuts_prompt){.n = 1000, .n_system = 300, .n_head = 700, .n_max = ROOM}, 3, (int[]){256, 640, 960});
    expect((struct cuts_prompt){.n = 1000, .n_system = 63, .n_head = 64, .n_max = ROOM}, 2, (int[]){64, 960});
    expect((struct cuts_prompt){.n = 1000, .n_system = 1000, .n_head = 999, .n_max = ROOM}, 1, (int[]){960});
    expect((struct cuts_prompt){.n = 128, .n_head = 128, .n_max = ROOM}, 1, (int[]){64}); /* 128 needs a token more */
}

static void the_last_goes_before_the_head_and_the_head_before_the_system(void **state) {
    (void)state;
    expect((struct cuts_prompt){.n = 1000, .n_system = 300, .n_head = 700, .n_max = 0}, 0, NULL);
    expect((struct cuts_prompt){.n = 1000, .n_system = 300, .n_head = 700, .n_max = 1}, 1, (int[]){960});
    expect((struct cuts_prompt){.n = 1000, .n_system = 300, .n_head = 700, .n_max = 2}, 2, (int[]){640, 960});
}

static void long_prompts_are_cut_at_growing_distances(void **state) {
    int s = CUTS_SPACING_TOKENS, last = 20 * s;

    (void)state;
    expect((struct cuts_prompt){.n = last + 1, .n_max = ROOM}, 5,
           (int[]){last - 15 * s, last - 7 * s, last - 3 * s, last - s, last});
    expect((struct cuts_prompt){.n = s + 1, .n_max = ROOM}, 1, (int[]){s});
    expect((struct cuts_prompt){.n = s + 65, .n_max = ROOM}, 2, (int[]){64, s + 64});
    expect((struct cuts_prompt){.n = last + 1, .n_max = 3}, 3, (int[]){last - 3 * s, last - s, last});
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_last_one_leaves_a_token_to_feed),
        cmocka_unit_test(parts_of_the_prompt_are_cut_before_their_end),
        cmocka_unit_test(the_last_goes_before_the_head_and_the_head_before_the_system),
        cmocka_unit_test(long_prompts_are_cut_at_growing_distances),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
