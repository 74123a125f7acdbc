/* What the disk does to those who compute: nothing. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "fake/engine_rig.h"

enum { N_PROMPT = 300, N_ANSWER = 100, N_TOKENS = N_PROMPT + N_ANSWER };

struct talk {
    int32_t tokens[N_TOKENS + BLOCK_ROWS_MAX];
    int n;
    bool is_over;
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

    assert_int_equal(why, SEQ_END_LENGTH);
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

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(steps_go_on_while_no_write_comes_back),
        cmocka_unit_test(what_cannot_be_read_is_computed),
    };
    int r;

    engine_rig_pair_open(&pair, backend_find("cpu"), &(struct backend_options){.n_threads = 1, .delay_seed = 3}, 2,
                         128);
    r = cmocka_run_group_tests(tests, NULL, NULL);
    engine_rig_pair_close(&pair);
    return r;
}
