/* What the disk does to those who compute: nothing. */
#include <errno.h>
#include <limits.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "fake/engine_rig.h"

enum { N_PROMPT = 300, N_ANSWER = 40, N_TOKENS = N_PROMPT + N_ANSWER };

struct talk {
    int32_t tokens[N_TOKENS + BLOCK_ROWS_MAX];
    int n;
    bool is_over;
    enum seq_end why;
    struct seq_stats stats;
    struct seq *seq;
};

static void on_admitted(void *user) {
    (void)user;
}

static void on_progress(void *user, int n_done, int n_total) {
    (void)user, (void)n_done, (void)n_total;
}

static void on_tokens(void *user, const int32_t *tokens, int n, const struct logprob_row *logprobs) {
    struct talk *talk = user;

    (void)logprobs;
    memcpy(talk->tokens + talk->n, tokens, (size_t)n * sizeof *tokens);
    talk->n += n;
}

static void on_end(void *user, enum seq_end why) {
    struct talk *talk = user;

    talk->why = why;
    talk->stats = talk->seq->stats;
    talk->is_over = true;
}

static const struct seq_calls CALLS = {on_admitted, on_progress, on_tokens, on_end};

static void start(struct engine_rig *rig, struct talk *talk, int first) {
    struct seq *seq = seq_new(N_TOKENS + BLOCK_ROWS_MAX, 0);

    *talk = (struct talk){.n = N_PROMPT, .seq = seq};
    for (int i = 0; i < N_PROMPT; i++)
        talk->tokens[i] = (first * 7 + i * i) % (ENGINE_RIG_VOCAB - 1);
    memcpy(seq->tokens, talk->tokens, N_PROMPT * sizeof *seq->tokens);
    seq->n_prompt = seq->n_tokens = N_PROMPT;
    seq->max_tokens = N_ANSWER;
    seq->cuts[0] = (N_PROMPT - 1) / PAGE_TOKENS * PAGE_TOKENS;
    seq->n_cuts = 1;
    seq->is_kept = true;
    assert_int_equal(kv_store_root(rig->store, 1, &seq->root), 0);
    seq->calls = &CALLS;
    seq->user = talk;
    assert_int_equal(engine_submit(rig->engine, seq), 0);
}

/* Turns until it is over; nothing on disk is waited for. */
static void finish(struct engine_rig *rig, struct talk *talk) {
    while (!talk->is_over) {
        engine_turn(rig->engine);
        engine_rig_dispatch(rig);
        engine_rig_dispatch_copies(rig, false);
    }
    assert_int_equal(talk->why, SEQ_END_LENGTH);
}

static void settle(struct engine_rig *rig) {
    while (engine_rig_turn(rig))
        continue;
}

static struct engine_rig_pair pair;
static const struct engine_rig_options WITH_DISK = {
    .n_places = 2,
    .n_context = 512,
    .chunk_rows = 128,
    .batch_rows = 128,
    .n_seqs_max = 8,
    .n_slots = {[KV_TARGET_FULL] = 40, [KV_TARGET_STATE] = 12, [KV_DRAFT_FULL] = 40, [KV_DRAFT_SLIDING] = 40},
    .n_below = {[KV_TARGET_FULL] = 40, [KV_TARGET_STATE] = 12, [KV_DRAFT_FULL] = 40, [KV_DRAFT_SLIDING] = 40},
    .disk_bytes = UINT64_C(64) << 20};

static void forget(struct engine_rig *rig) {
    kv_store_evict_all(rig->store);
    kv_shelf_evict_bytes(rig->shelf, UINT64_MAX);
}

static void steps_go_on_while_no_write_comes_back(void **state) {
    static struct talk first, second, again;
    struct engine_rig rig;
    struct kv_vault_stats stats;

    (void)state;
    engine_rig_open(&rig, &pair, &WITH_DISK);
    disk_faults_always(rig.disk.faults, DISK_CALL_WRITE, (struct disk_fault){.is_held = true, .is_deaf = true});
    start(&rig, &first, 1);
    finish(&rig, &first);
    for (int i = 0; i < 1000 && disk_faults_n_held(rig.disk.faults) == 0; i++)
        engine_rig_dispatch_copies(&rig, false);
    assert_true(disk_faults_n_held(rig.disk.faults) > 0);
    start(&rig, &second, 2);
    finish(&rig, &second); /* another one, beginning to end, meanwhile */
    kv_vault_stats(rig.disk.vault, &stats);
    assert_int_equal(stats.n_saved_pages, 0);
    kv_store_evict_all(rig.store); /* what the device lost comes back from host memory meanwhile */
    start(&rig, &again, 1);
    finish(&rig, &again);
    assert_true(again.stats.n_restored > 0);
    assert_memory_equal(again.tokens, first.tokens, sizeof again.tokens);
    disk_faults_always(rig.disk.faults, DISK_CALL_WRITE, (struct disk_fault){0});
    disk_faults_release(rig.disk.faults);
    settle(&rig);
    kv_vault_stats(rig.disk.vault, &stats);
    assert_true(stats.n_saved_pages > 0);
    engine_rig_check_is_idle(&rig);
    engine_rig_close(&rig);
}

/* Two have been brought up while a third could not be looked at, and hold all restores there are for one user, and all
 * pages: nobody of them fits beside the other, and the third, who is first in line, has nothing brought up. */
static void who_was_brought_up_and_waits_is_in_nobodys_way(void **state) {
    static struct talk cold[3], warm[3];
    struct engine_rig_options options = WITH_DISK;
    struct engine_rig rig;

    (void)state;
    options.n_slots[KV_TARGET_FULL] = 8;
    engine_rig_open(&rig, &pair, &options);
    for (int i = 0; i < 3; i++) {
        start(&rig, &cold[i], i);
        finish(&rig, &cold[i]);
        settle(&rig);
        forget(&rig);
    }
    start(&rig, &warm[0], 0);
    warm[0].seq->is_parked = true;
    for (int i = 1; i < 3; i++) {
        start(&rig, &warm[i], i);
        engine_turn(rig.engine);
        assert_true(warm[i].seq->is_restoring);
    }
    warm[0].seq->is_parked = false;
    settle(&rig);
    for (int i = 0; i < 3; i++) {
        assert_true(warm[i].is_over && warm[i].why == SEQ_END_LENGTH);
        assert_memory_equal(warm[i].tokens, cold[i].tokens, sizeof warm[i].tokens);
        assert_int_equal(warm[i].stats.n_recomputed, 0);
    }
    engine_rig_check_is_idle(&rig);
    engine_rig_close(&rig);
}

/* Computed once, on disk only; then asked for again while the first read goes wrong in this way. */
static void check_reading(struct disk_fault fault, bool is_from_disk) {
    static struct talk cold, warm, after;
    struct engine_rig rig;

    engine_rig_open(&rig, &pair, &WITH_DISK);
    start(&rig, &cold, 3);
    finish(&rig, &cold);
    settle(&rig);
    forget(&rig);
    disk_faults_add(rig.disk.faults, DISK_CALL_READ, fault);
    start(&rig, &warm, 3);
    finish(&rig, &warm);
    assert_int_equal(warm.stats.n_from_disk > 0, is_from_disk);
    assert_memory_equal(warm.tokens, cold.tokens, sizeof warm.tokens);
    settle(&rig);
    engine_rig_check_is_idle(&rig);
    forget(&rig);
    start(&rig, &after, 3); /* it heals: what was computed again was written again */
    finish(&rig, &after);
    assert_memory_equal(after.tokens, cold.tokens, sizeof after.tokens);
    assert_true(after.stats.n_from_disk > 0);
    settle(&rig);
    engine_rig_close(&rig);
}

static void what_cannot_be_read_is_computed(void **state) {
    (void)state;
    check_reading((struct disk_fault){0}, true);
    check_reading((struct disk_fault){.result = -EIO}, false);
    check_reading((struct disk_fault){.result = -ENOMEM}, false);
    check_reading((struct disk_fault){.short_by = 4096}, true); /* the rest is asked for again */
}

/* ---- slow disks ------------------------------------------------------------------------------------------------------- */

/* Of a clock that stands still otherwise: a plan takes so long, and what comes from the disk no time, if it comes. */
enum { PLAN_US = 10000 };

/* It is the disk alone that is waited for. */
static bool waits_for_disk(const struct engine_rig *rig, const struct talk *talk) {
    struct kv_vault_stats stats;

    kv_vault_stats(rig->disk.vault, &stats);
    return !talk->is_over && talk->seq->is_restoring && rig->n_works == 0 && workers_n_out(rig->disk.workers) == 0 &&
           rig->copies.out[KV_COPY_FETCH].n == 0 && stats.disk.n_out == disk_faults_n_held(rig->disk.faults);
}

/* Turns until it is over, or, if it waits for the disk for so long, until that has passed. */
static void finish_timed(struct engine_rig *rig, struct talk *talk, uint64_t disk_us) {
    struct engine_view view;

    for (int i = 0; !talk->is_over && disk_us != 0; i++) {
        assert_true(i < 2000000);
        engine_turn(rig->engine);
        engine_look(rig->engine, &view);
        if (view.n_in_flight > 0)
            engine_rig_pass(PLAN_US);
        engine_rig_dispatch(rig);
        engine_rig_dispatch_copies(rig, false);
        if (waits_for_disk(rig, talk)) {
            uint64_t us = disk_us < PLAN_US ? disk_us : PLAN_US;

            engine_rig_pass(us);
            disk_us -= us;
        }
    }
}

static void finish_fast(struct engine_rig *rig, struct talk *talk) {
    finish_timed(rig, talk, UINT64_MAX);
    assert_int_equal(talk->why, SEQ_END_LENGTH);
}

/* On disk only. */
static void put_on_disk(struct engine_rig *rig, struct talk *talk, int first) {
    start(rig, talk, first);
    finish_fast(rig, talk);
    settle(rig);
    forget(rig);
}

static void hold_reads(struct engine_rig *rig, bool hold) {
    disk_faults_always(rig->disk.faults, DISK_CALL_READ, (struct disk_fault){.is_held = hold, .is_deaf = hold});
    if (!hold)
        disk_faults_release(rig->disk.faults);
}

static void open_timed(struct engine_rig *rig, uint64_t deadline_us) {
    struct engine_rig_options options = WITH_DISK;

    options.restores_by_cost = true;
    options.deadline_us = deadline_us;
    engine_rig_stop_clock(true);
    engine_rig_open(rig, &pair, &options);
}

static void close_timed(struct engine_rig *rig) {
    settle(rig);
    engine_rig_check_is_idle(rig);
    engine_rig_close(rig);
    engine_rig_stop_clock(false);
}

static void what_a_disk_took_last_decides_whether_it_is_read(void **state) {
    static struct talk cold, warm;
    struct engine_rig rig;
    uint32_t n_calls;
    int n_refused = 0;

    (void)state;
    open_timed(&rig, 0);
    put_on_disk(&rig, &cold, 3);
    start(&rig, &warm, 3);
    finish_fast(&rig, &warm); /* nothing is known of it: it is tried, and fast */
    assert_true(warm.stats.n_from_disk > 0);
    settle(&rig);
    forget(&rig);
    hold_reads(&rig, true);
    start(&rig, &warm, 3);
    finish_timed(&rig, &warm, 400000); /* it comes, and later than it is computed */
    assert_false(warm.is_over);
    hold_reads(&rig, false);
    finish_fast(&rig, &warm);
    assert_true(warm.stats.n_from_disk > 0);
    settle(&rig);
    do { /* then it is computed, until so much time has passed that it may be otherwise by now */
        forget(&rig);
        n_calls = disk_faults_n_calls(rig.disk.faults, DISK_CALL_READ);
        start(&rig, &warm, 3);
        finish_fast(&rig, &warm);
        assert_memory_equal(warm.tokens, cold.tokens, sizeof warm.tokens);
        assert_int_equal(disk_faults_n_calls(rig.disk.faults, DISK_CALL_READ) > n_calls, warm.stats.n_from_disk > 0);
        settle(&rig);
    } while (warm.stats.n_from_disk == 0 && n_refused++ < 100);
    printf("%d refused\n", n_refused);
    assert_in_range(n_refused, 5, 99);
    close_timed(&rig);
}

/* At the first read, or in the middle of them. */
static void a_restore_that_crawls_is_given_up_and_not_tried_again(void **state) {
    static struct talk cold, warm;

    (void)state;
    for (int n_before = 0; n_before < 8; n_before += 7) {
        struct engine_rig rig;
        uint32_t n_calls;

        open_timed(&rig, 0);
        put_on_disk(&rig, &cold, 4);
        for (int i = 0; i < n_before; i++)
            disk_faults_add(rig.disk.faults, DISK_CALL_READ, (struct disk_fault){0});
        hold_reads(&rig, true);
        start(&rig, &warm, 4);
        finish_timed(&rig, &warm, 490000); /* what was planned takes a hundredth of that */
        assert_true(!warm.is_over && warm.seq->is_restoring);
        finish_timed(&rig, &warm, 200000);
        assert_int_equal(warm.why, SEQ_END_LENGTH);
        assert_true(warm.is_over && warm.stats.n_from_disk == 0);
        assert_memory_equal(warm.tokens, cold.tokens, sizeof warm.tokens);
        hold_reads(&rig, false);
        settle(&rig);
        forget(&rig);
        n_calls = disk_faults_n_calls(rig.disk.faults, DISK_CALL_READ);
        start(&rig, &warm, 4);
        finish_fast(&rig, &warm);
        assert_int_equal(disk_faults_n_calls(rig.disk.faults, DISK_CALL_READ), n_calls);
        assert_memory_equal(warm.tokens, cold.tokens, sizeof warm.tokens);
        close_timed(&rig);
    }
}

enum { N_STALLED = 12, STALL_US = 15000000 };

static uint64_t n_plans_of(struct engine_rig *rig, struct talk *talk, int first) {
    struct engine_view before, after;

    engine_look(rig->engine, &before);
    start(rig, talk, first);
    finish_fast(rig, talk);
    engine_look(rig->engine, &after);
    return after.n_plans - before.n_plans;
}

/* Fifteen seconds in which nothing comes back, after many writes. */
static void steps_go_on_while_the_disk_stalls(void **state) {
    static const uint64_t deadlines_us[] = {60000000, 5000000}; /* of an operation: after the stall, within it */
    static struct talk cold, warm, again;

    (void)state;
    for (size_t d = 0; d < ARRAY_LEN(deadlines_us); d++) {
        struct kv_vault_stats stats;
        uint64_t n_plans[N_STALLED], stalled_us = 0;
        struct engine_rig rig;

        open_timed(&rig, deadlines_us[d]);
        for (int i = 0; i < N_STALLED; i++) { /* without a stall, and without what the same prompt left before */
            n_plans[i] = n_plans_of(&rig, &again, 10 + i);
            settle(&rig);
            forget(&rig);
            kv_vault_evict_bytes(rig.disk.vault, UINT64_MAX);
        }
        put_on_disk(&rig, &cold, 1);
        disk_faults_always(rig.disk.faults, DISK_CALL_WRITE, (struct disk_fault){.is_held = true, .is_deaf = true});
        disk_faults_always(rig.disk.faults, DISK_CALL_SYNC, (struct disk_fault){.is_held = true, .is_deaf = true});
        hold_reads(&rig, true);
        for (int i = 0; i < N_STALLED; i++) { /* as many plans as if there were no disk, but for those sent ahead */
            assert_true(n_plans_of(&rig, &again, 10 + i) <= n_plans[i] + DEVICE_PLANS_MAX);
            engine_rig_pass(1000000);
            stalled_us += 1000000 + n_plans[i] * PLAN_US;
            kv_store_evict_all(rig.store);
            if (i != 2)
                continue;
            start(&rig, &warm, 1); /* one that the disk has: it is waited for half a second, and computed */
            finish_timed(&rig, &warm, 700000);
            assert_true(warm.is_over && warm.stats.n_from_disk == 0);
            assert_memory_equal(warm.tokens, cold.tokens, sizeof warm.tokens);
        }
        assert_true(stalled_us > STALL_US);
        kv_vault_stats(rig.disk.vault, &stats);
        assert_int_equal(stats.is_off, deadlines_us[d] < STALL_US);
        disk_faults_always(rig.disk.faults, DISK_CALL_WRITE, (struct disk_fault){0});
        disk_faults_always(rig.disk.faults, DISK_CALL_SYNC, (struct disk_fault){0});
        hold_reads(&rig, false);
        for (int i = 0; i == 0 || stats.is_off; i++) { /* the disk is found worth asking again, and works */
            assert_true(i < 60);
            engine_rig_pass(31000000);
            put_on_disk(&rig, &again, 50 + i);
            kv_vault_stats(rig.disk.vault, &stats);
        }
        assert_true(stats.n_saved_pages > 0);
        close_timed(&rig);
    }
}

/* ---- the device is lost ---------------------------------------------------------------------------------------------- */

static atomic_int n_signals_left; /* 0: it is broken */

static int breaking_event_record(struct stream *stream, struct event *event) {
    return n_signals_left == 0 ? -EIO : backend_find("cpu")->event_record(stream, event);
}

static int breaking_notify(struct stream *stream, int eventfd) {
    if (n_signals_left == 0)
        return -EIO;
    n_signals_left--;
    return backend_find("cpu")->notify(stream, eventfd);
}

static uint32_t n_published(const struct engine_rig *rig) {
    struct kv_store_stats stats;
    uint32_t n = 0;

    kv_store_stats(rig->store, &stats);
    for (int g = 0; g < KV_GROUP_N; g++)
        n += stats.group[g].n_indexed;
    return n;
}

/* While it computes and spills, or while it brings up what lies on disk. */
static void check_lost_device(int n_signals, bool is_warm, const struct talk *cold, const struct talk *other) {
    static struct talk talk, again;
    struct backend backend = *backend_find("cpu");
    struct engine_rig_options options = WITH_DISK;
    struct engine_rig_pair broken;
    struct engine_view view = {0};
    struct engine_rig rig;
    uint32_t n_before;
    char path[] = "/tmp/spillway-lost-XXXXXX";

    assert_non_null(mkdtemp(path));
    options.disk_path = path;
    backend.event_record = breaking_event_record;
    backend.notify = breaking_notify;
    n_signals_left = INT_MAX;
    engine_rig_pair_open(&broken, &backend, &(struct backend_options){.n_threads = 1}, 2, 128);
    engine_rig_open(&rig, &broken, &options);
    start(&rig, &talk, 1);
    finish(&rig, &talk);
    assert_memory_equal(talk.tokens, cold->tokens, sizeof talk.tokens);
    settle(&rig);
    forget(&rig);
    start(&rig, &talk, is_warm ? 1 : 2);
    n_signals_left = n_signals;
    while (view.error == 0 && !talk.is_over) {
        engine_turn(rig.engine);
        engine_rig_dispatch(&rig);
        engine_rig_dispatch_copies(&rig, false);
        engine_look(rig.engine, &view);
    }
    assert_int_equal(talk.why, view.error != 0 ? SEQ_END_DEVICE : SEQ_END_LENGTH);
    n_before = n_published(&rig);
    for (int i = 0; i < 200;
         i++) { /* nothing of what it computes is published any more; what is clean may be written */
        engine_turn(rig.engine);
        engine_rig_dispatch(&rig);
        engine_rig_dispatch_copies(&rig, false);
    }
    assert_true(is_warm || n_published(&rig) == n_before);
    engine_rig_close(&rig);
    engine_rig_pair_close(&broken);

    engine_rig_open(&rig, &pair, &options); /* the next process */
    start(&rig, &again, 1);
    finish(&rig, &again);
    assert_true(again.stats.n_from_disk > 0);
    assert_memory_equal(again.tokens, cold->tokens, sizeof again.tokens);
    start(&rig, &again, 2);
    finish(&rig, &again);
    assert_memory_equal(again.tokens, other->tokens, sizeof again.tokens);
    settle(&rig);
    engine_rig_remove_disk(&rig);
    engine_rig_close(&rig);
}

static void after_a_lost_device_the_next_process_finds_what_was_on_disk(void **state) {
    static struct talk cold, other;
    struct engine_rig rig;

    (void)state;
    engine_rig_open(&rig, &pair, &WITH_DISK);
    start(&rig, &cold, 1);
    finish(&rig, &cold);
    start(&rig, &other, 2);
    finish(&rig, &other);
    settle(&rig);
    engine_rig_close(&rig);
    for (int n_signals = 1; n_signals < 10; n_signals += 4)
        for (int is_warm = 0; is_warm < 2; is_warm++)
            check_lost_device(n_signals, is_warm, &cold, &other);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(steps_go_on_while_no_write_comes_back),
        cmocka_unit_test(who_was_brought_up_and_waits_is_in_nobodys_way),
        cmocka_unit_test(what_cannot_be_read_is_computed),
        cmocka_unit_test(what_a_disk_took_last_decides_whether_it_is_read),
        cmocka_unit_test(a_restore_that_crawls_is_given_up_and_not_tried_again),
        cmocka_unit_test(steps_go_on_while_the_disk_stalls),
        cmocka_unit_test(after_a_lost_device_the_next_process_finds_what_was_on_disk),
    };
    int r;

    engine_rig_pair_open(&pair, backend_find("cpu"), &(struct backend_options){.n_threads = 1, .delay_seed = 3}, 2,
                         128);
    r = cmocka_run_group_tests(tests, NULL, NULL);
    engine_rig_pair_close(&pair);
    return r;
}
