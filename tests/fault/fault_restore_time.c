/* Where the time of a restore goes: each moment is counted once, for what was in its way, and the stages add up to the whole,
 * whatever becomes of it. The clock is the test's. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include "tier_rig.h"

static const uint32_t ROOMY[KV_GROUP_N] = {
    [KV_TARGET_FULL] = 100, [KV_TARGET_STATE] = 10, [KV_DRAFT_FULL] = 100, [KV_DRAFT_SLIDING] = 100};
static const uint32_t SMALL[KV_GROUP_N] = {
    [KV_TARGET_FULL] = 6, [KV_TARGET_STATE] = 1, [KV_DRAFT_FULL] = 6, [KV_DRAFT_SLIDING] = 2};

#define CHAIN "abcdefgh"
enum { PAGES = 8, SLOTS = 8 + 8 + 2 + 1 };

struct ended {
    int n;
    struct kv_restored last;
};

static void on_ended(void *user, const struct kv_restored *restored) {
    struct ended *ended = user;
    uint64_t us = 0;

    ended->n++;
    ended->last = *restored;
    for (int i = 0; i < KV_RESTORE_STAGE_N; i++)
        us += restored->stage_us[i];
    assert_int_equal(us, restored->us);
}

static void on_done(void *user, int result) {
    *(int *)user = result;
}

struct run {
    struct tier_rig rig;
    struct kv_seq seq;
    struct kv_restore *restore;
    struct ended ended;
    int result;
};

static void open_run(struct run *run, const uint32_t shelf[KV_GROUP_N], bool on_disk_alone) {
    memset(run, 0, sizeof *run);
    run->result = 1;
    tier_open(&run->rig, ROOMY, shelf);
    tier_put_below(&run->rig, 1, CHAIN, PAGES, PAGES, on_disk_alone);
    kv_restores_set_listener(run->rig.restores, on_ended, &run->ended);
    kv_seq_init(&run->seq, &run->rig.kv, 1, CHAIN);
}

static void start(struct run *run, enum kv_restore_why why) {
    assert_int_equal(kv_restore_start(run->rig.restores, run->seq.keys, run->seq.tokens, PAGES, why, on_done,
                                      &run->result, &run->restore),
                     0);
}

static void close_run(struct run *run) {
    kv_restore_end(run->restore);
    kv_seq_deinit(&run->seq, &run->rig.kv);
    tier_drain(&run->rig);
    tier_check_is_home(&run->rig);
    tier_close(&run->rig);
}

/* The workers do all that they were given before the next turn: calls of files, or checks. */
static void do_all_work(struct run *run) {
    while (tier_do_work(&run->rig, 0))
        kv_vault_dispatch(run->rig.vault);
}

static void expect(const struct run *run, uint64_t reading, uint64_t checking, uint64_t copying, uint64_t waiting) {
    const uint64_t *us = run->ended.last.stage_us;

    assert_int_equal(run->ended.n, 1);
    assert_int_equal(us[KV_RESTORE_READING], reading);
    assert_int_equal(us[KV_RESTORE_CHECKING], checking);
    assert_int_equal(us[KV_RESTORE_COPYING], copying);
    assert_int_equal(us[KV_RESTORE_WAITING], waiting);
    assert_int_equal(run->ended.last.us, reading + checking + copying + waiting);
    assert_int_equal(run->ended.last.result, run->result);
}

static void one_stage_after_the_other_takes_what_it_takes(void **state) {
    static struct run run;
    struct kv_restores_stats stats;

    (void)state;
    open_run(&run, ROOMY, true);
    start(&run, KV_RESTORE_PREFETCH);
    tier_turn(&run.rig); /* sends what is to be read */
    tier_clock_us += 3000;
    do_all_work(&run);
    tier_turn(&run.rig); /* hands what has come to be checked */
    tier_clock_us += 500;
    do_all_work(&run);
    tier_clock_us += 70;
    assert_true(tier_come_home(&run.rig, KV_COPY_FETCH, 0));
    tier_drain(&run.rig);
    assert_int_equal(run.result, 0);
    expect(&run, 3000, 500, 70, 0);
    assert_int_equal(run.ended.last.why, KV_RESTORE_PREFETCH);
    assert_int_equal(run.ended.last.uid, 1);
    assert_int_equal(run.ended.last.n_tokens, PAGES * PAGE_TOKENS);
    assert_int_equal(run.ended.last.n_copies, SLOTS);
    assert_int_equal(run.ended.last.n_disk_pages, SLOTS);
    assert_int_equal(run.ended.last.bytes, SLOTS * KV_RIG_SLOT_BYTES);
    kv_restores_stats(run.rig.restores, &stats);
    assert_memory_equal(stats.stage_us, run.ended.last.stage_us, sizeof stats.stage_us);
    close_run(&run);
}

static void from_host_memory_all_is_copying(void **state) {
    static struct run run;

    (void)state;
    open_run(&run, ROOMY, false);
    start(&run, KV_RESTORE_REQUEST);
    tier_clock_us += 900;
    assert_true(tier_come_home(&run.rig, KV_COPY_FETCH, 0));
    assert_int_equal(run.result, 0);
    expect(&run, 0, 0, 900, 0);
    assert_int_equal(run.ended.last.n_disk_pages, 0);
    close_run(&run);
}

/* One page is held back while all others are checked and copied: it is that which the restore waits for. */
static void what_goes_on_behind_a_stage_costs_nothing(void **state) {
    static struct run run;

    (void)state;
    open_run(&run, ROOMY, true);
    disk_faults_add(run.rig.faults, DISK_CALL_READ, (struct disk_fault){.is_held = true});
    start(&run, KV_RESTORE_REQUEST);
    tier_turn(&run.rig);
    tier_clock_us += 1000;
    do_all_work(&run);
    tier_turn(&run.rig);
    tier_clock_us += 200; /* others are checked */
    do_all_work(&run);
    tier_clock_us += 30; /* and copied */
    while (tier_come_home(&run.rig, KV_COPY_FETCH, 0))
        continue;
    tier_clock_us += 4;
    assert_int_equal(run.ended.n, 0);
    disk_faults_release(run.rig.faults);
    tier_turn(&run.rig);
    do_all_work(&run);
    tier_turn(&run.rig);
    tier_clock_us += 50000; /* now it alone is */
    do_all_work(&run);
    tier_clock_us += 600000;
    assert_true(tier_come_home(&run.rig, KV_COPY_FETCH, 0));
    assert_int_equal(run.result, 0);
    expect(&run, 1234, 50000, 600000, 0);
    close_run(&run);
}

/* Another one has pinned what the shelf has; nothing can be read before that is copied. */
static void what_waits_for_the_shelf_waits(void **state) {
    static struct run run;
    static struct kv_seq other;
    struct kv_restore *first;
    int result = 1;

    (void)state;
    open_run(&run, SMALL, true);
    tier_put_below(&run.rig, 1, "uvwxyz", 6, 6, false);
    kv_seq_init(&other, &run.rig.kv, 1, "uvwxyz");
    assert_int_equal(
        kv_restore_start(run.rig.restores, other.keys, other.tokens, 6, KV_RESTORE_REQUEST, on_done, &result, &first),
        0);
    start(&run, KV_RESTORE_REQUEST);
    tier_turn(&run.rig);
    tier_clock_us += 800;
    assert_true(tier_come_home(&run.rig, KV_COPY_FETCH, 0));
    assert_int_equal(result, 0);
    assert_int_equal(run.ended.n, 1);
    kv_restore_end(first);
    kv_seq_deinit(&other, &run.rig.kv);
    tier_drain(&run.rig);
    assert_int_equal(run.ended.n, 2);
    run.ended.n = 1;
    assert_int_equal(run.result, 0);
    expect(&run, 0, 0, 0, 800);
    close_run(&run);
}

/* Also one that fails has its time, and what is not home when it ends counts until then. */
static void one_that_is_given_up_tells_too(void **state) {
    static struct run run;

    (void)state;
    open_run(&run, ROOMY, true);
    disk_faults_always(run.rig.faults, DISK_CALL_READ, (struct disk_fault){.is_held = true});
    start(&run, KV_RESTORE_REQUEST);
    tier_turn(&run.rig);
    tier_clock_us += 700;
    kv_restore_cancel(run.restore);
    tier_turn(&run.rig);
    assert_int_equal(run.result, -ECANCELED);
    expect(&run, 700, 0, 0, 0);
    assert_int_equal(run.ended.last.n_copies, 0);
    disk_faults_always(run.rig.faults, DISK_CALL_READ, (struct disk_fault){0});
    disk_faults_release(run.rig.faults);
    close_run(&run);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_stage_after_the_other_takes_what_it_takes),
        cmocka_unit_test(from_host_memory_all_is_copying),
        cmocka_unit_test(what_goes_on_behind_a_stage_costs_nothing),
        cmocka_unit_test(what_waits_for_the_shelf_waits),
        cmocka_unit_test(one_that_is_given_up_tells_too),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
