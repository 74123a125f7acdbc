#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "schedule.h"

static struct schedule_seq waiting(uint64_t order, int priority, uint32_t n_pages) {
    return (struct schedule_seq){
        .order = order, .priority = priority, .n_pages = n_pages, .is_waiting = true, .n_left = 1, .n_to_cut = 1};
}

static struct schedule_seq feeding(uint64_t order, int n_left, int n_to_cut) {
    return (struct schedule_seq){.order = order, .n_left = n_left, .n_to_cut = n_to_cut};
}

static struct schedule_seq decoding(uint64_t order) {
    return (struct schedule_seq){.order = order, .is_fed = true};
}

/* ---- admission ---- */

static void the_urgent_come_first_and_among_equals_the_old(void **state) {
    struct schedule_seq seqs[] = {waiting(1, 0, 1), waiting(2, 0, 1), waiting(3, 5, 1), waiting(4, -5, 1)};
    int admitted[4];

    (void)state;
    assert_int_equal(schedule_admit(seqs, 4, 3, 100, admitted), 3);
    assert_int_equal(admitted[0], 2);
    assert_int_equal(admitted[1], 0);
    assert_int_equal(admitted[2], 1);
}

static void pages_promised_to_those_being_fed_are_not_given_twice(void **state) {
    struct schedule_seq seqs[] = {feeding(1, 64, 64), waiting(2, 0, 4), waiting(3, 0, 3)};
    int admitted[3];

    (void)state;
    seqs[0].n_pages = 7;
    assert_int_equal(schedule_admit(seqs, 3, 5, 10, admitted), 1);
    assert_int_equal(admitted[0], 2);
    assert_int_equal(schedule_admit(seqs, 3, 5, 14, admitted), 2);
    assert_int_equal(schedule_admit(seqs, 3, 5, 11, admitted), 1);
    assert_int_equal(admitted[0], 1);
    assert_int_equal(schedule_admit(seqs, 3, 0, 100, admitted), 0);
}

static void one_that_does_not_fit_is_passed_by_for_a_while_only(void **state) {
    struct schedule_seq seqs[] = {waiting(1, 0, 50), waiting(2, 0, 1), waiting(3, 9, 1)};
    int admitted[3];

    (void)state;
    seqs[0].n_passed_by = SCHEDULE_PASSED_BY_MAX - 1;
    assert_int_equal(schedule_admit(seqs, 3, 5, 10, admitted), 2);
    seqs[0].n_passed_by = SCHEDULE_PASSED_BY_MAX;
    assert_int_equal(schedule_admit(seqs, 3, 5, 10, admitted), 1); /* who is more urgent still goes first */
    assert_int_equal(admitted[0], 2);
}

/* ---- feeding ---- */

static void the_oldest_is_fed_though_decoding_takes_the_whole_batch(void **state) {
    struct schedule_seq seqs[] = {decoding(1), feeding(3, 500, 500), feeding(2, 1000, 1000)};
    struct schedule_rows rows = {512, 256, 256};
    struct schedule_feed feed[3];

    (void)state;
    assert_int_equal(schedule_feed(seqs, 3, &rows, feed), 1);
    assert_int_equal(feed[0].seq, 2);
    assert_int_equal(feed[0].n_rows, 64);
}

static void short_ones_go_along_with_a_long_one(void **state) {
    struct schedule_seq seqs[] = {feeding(1, 5000, 5000), feeding(2, 300, 300), feeding(3, 10, 10), feeding(4, 70, 70)};
    struct schedule_rows rows = {256, 512, 16};
    struct schedule_feed feed[4];

    (void)state;
    assert_int_equal(schedule_feed(seqs, 4, &rows, feed), 4);
    assert_int_equal(feed[0].seq, 2);
    assert_int_equal(feed[0].n_rows, 10);
    assert_int_equal(feed[1].seq, 3);
    assert_int_equal(feed[1].n_rows, 70);
    assert_int_equal(feed[2].seq, 1);
    assert_int_equal(feed[2].n_rows, 64);
    assert_int_equal(feed[3].seq, 0);
    assert_int_equal(feed[3].n_rows, 64);
}

static void a_piece_ends_at_a_cut_or_on_the_grid(void **state) {
    struct schedule_seq seqs[] = {feeding(1, 5000, 192)};
    struct schedule_rows rows = {512, 1024, 0};
    struct schedule_feed feed[1];

    (void)state;
    assert_int_equal(schedule_feed(seqs, 1, &rows, feed), 1);
    assert_int_equal(feed[0].n_rows, 192);
    seqs[0].n_to_cut = 5000;
    schedule_feed(seqs, 1, &rows, feed);
    assert_int_equal(feed[0].n_rows, 512);
    rows.decode = 1000 - 600;
    rows.batch = 600;
    schedule_feed(seqs, 1, &rows, feed);
    assert_int_equal(feed[0].n_rows, 192);
    seqs[0].n_left = seqs[0].n_to_cut = 130;
    schedule_feed(seqs, 1, &rows, feed);
    assert_int_equal(feed[0].n_rows, 130);
}

static void a_replay_takes_a_block_at_most(void **state) {
    struct schedule_seq seqs[] = {feeding(1, 100, 100), feeding(2, 100, 100)};
    struct schedule_rows rows = {512, 1024, 0};
    struct schedule_feed feed[2];

    (void)state;
    seqs[0].is_replay = seqs[1].is_replay = true;
    assert_int_equal(schedule_feed(seqs, 2, &rows, feed), 2);
    assert_int_equal(feed[0].n_rows, SCHEDULE_REPLAY_ROWS);
    assert_int_equal(feed[1].n_rows, SCHEDULE_REPLAY_ROWS);
}

static void nobody_to_feed_is_fine(void **state) {
    struct schedule_seq seqs[] = {decoding(1), waiting(2, 0, 1)};
    struct schedule_rows rows = {512, 1024, 16};
    struct schedule_feed feed[2];

    (void)state;
    assert_int_equal(schedule_feed(seqs, 2, &rows, feed), 0);
    assert_int_equal(schedule_feed(seqs, 0, &rows, feed), 0);
}

/* ---- who leaves ---- */

static void of_the_least_urgent_the_youngest_leaves(void **state) {
    struct schedule_seq seqs[] = {decoding(1), feeding(2, 1, 1), decoding(3), waiting(4, -9, 1), decoding(5)};

    (void)state;
    seqs[4].priority = 1;
    assert_int_equal(schedule_victim(seqs, 5), 2);
    seqs[0].priority = -1;
    assert_int_equal(schedule_victim(seqs, 5), 0);
    assert_int_equal(schedule_victim(seqs + 3, 1), -1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_urgent_come_first_and_among_equals_the_old),
        cmocka_unit_test(pages_promised_to_those_being_fed_are_not_given_twice),
        cmocka_unit_test(one_that_does_not_fit_is_passed_by_for_a_while_only),
        cmocka_unit_test(the_oldest_is_fed_though_decoding_takes_the_whole_batch),
        cmocka_unit_test(short_ones_go_along_with_a_long_one),
        cmocka_unit_test(a_piece_ends_at_a_cut_or_on_the_grid),
        cmocka_unit_test(a_replay_takes_a_block_at_most),
        cmocka_unit_test(nobody_to_feed_is_fine),
        cmocka_unit_test(of_the_least_urgent_the_youngest_leaves),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
