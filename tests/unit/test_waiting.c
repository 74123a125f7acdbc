#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "waiting.h"

static void expect(const struct waiting *waiting, int n, const uint64_t *orders) {
    struct seq *seq = waiting_first(waiting);

    assert_int_equal(waiting->n, n);
    for (int i = 0; i < n; i++, seq = waiting_next(waiting, seq)) {
        assert_non_null(seq);
        assert_int_equal(seq->order, orders[i]);
    }
    assert_null(seq);
}

static void the_urgent_stand_first_and_among_equals_the_old(void **state) {
    static const int priorities[] = {0, 100, -100, 0, 7, 100};
    struct waiting waiting = {0};
    struct seq seqs[6] = {{0}};

    (void)state;
    expect(&waiting, 0, NULL);
    for (int i = 0; i < 6; i++) {
        seqs[i].order = (uint64_t)i;
        seqs[i].priority = priorities[i];
        waiting_put(&waiting, &seqs[i]);
    }
    expect(&waiting, 6, (uint64_t[]){1, 5, 4, 0, 3, 2});
    waiting_remove(&waiting, &seqs[1]);
    waiting_remove(&waiting, &seqs[3]);
    waiting_remove(&waiting, &seqs[2]);
    expect(&waiting, 3, (uint64_t[]){5, 4, 0});
}

static void who_comes_back_stands_where_its_age_says(void **state) {
    static const uint64_t orders[] = {50, 60, 70, 30, 10, 40, 65, 80};
    struct waiting waiting = {0};
    struct seq seqs[8] = {{0}};

    (void)state;
    for (int i = 0; i < 8; i++) {
        seqs[i].order = orders[i];
        waiting_put(&waiting, &seqs[i]);
    }
    expect(&waiting, 8, (uint64_t[]){10, 30, 40, 50, 60, 65, 70, 80});
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_urgent_stand_first_and_among_equals_the_old),
        cmocka_unit_test(who_comes_back_stands_where_its_age_says),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
