/* What a seq leaves in its caches after speculative decoding is, byte for byte, what a plain run over the same tokens
 * leaves: target pages, draft pages, recurrent state, rolling restore point. Rejected rows leave no trace in the
 * drafter's pages. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "space.h"

/* Decoding passes 128, where the rolling restore point lies, in every case. */
enum { N_PROMPT = 75, N_GENERATE_FEW = 60, N_GENERATE_MANY = 150, N_SLOTS = 3, TOKENS_MAX = 320 };

/* Slot 0 speculates, slot 1 decodes plainly, slot 2 is fed the finished list. */
struct rig {
    const struct backend *backend;
    struct device *device;
    struct stream *stream;
    struct model *model;
    struct space space;
    struct model_pass *prefill, *rerun, *cycle;
    struct model_batch prefill_in, rerun_in;
    int32_t *list;
    int n_generate;
    int tokens[TOKENS_MAX], n_tokens;
};

static void rig_open(struct rig *rig, enum numeric numeric, enum dtype kv, enum dtype draft_kv, uint64_t delay_seed) {
    struct backend_options device = {.numeric = numeric, .n_threads = 2, .delay_seed = delay_seed};
    struct model_options options = {.target_folder = SHARE "/tiny/target",
                                    .draft_folder = SHARE "/tiny/draft",
                                    .kv_dtype = kv,
                                    .draft_dtype = draft_kv,
                                    .n_slots = N_SLOTS,
                                    .n_segs_max = 1,
                                    .n_rows_max = 128,
                                    .n_outs_max = 16,
                                    .n_steps_max = 2};
    struct model_pass_options pass = {.kind = PASS_PREFILL, .n_segs_max = 1, .n_rows_max = 128, .n_outs_max = 1};
    struct report report = {0};
    void *list;

    memset(rig, 0, sizeof *rig);
    rig->backend = backend_find("cpu");
    assert_non_null(rig->backend);
    assert_int_equal(rig->backend->open(&device, &rig->device), 0);
    assert_int_equal(rig->backend->stream_open(rig->device, STREAM_COMPUTE, &rig->stream), 0);
    if (model_open(rig->backend, rig->device, &options, &rig->model, &report) != 0)
        fail_msg("%s", report.line);
    assert_int_equal(space_open(&rig->space, rig->backend, rig->device, rig->stream, rig->model, N_SLOTS, TOKENS_MAX),
                     0);
    assert_int_equal(model_pass_new(rig->model, &rig->space.view, &pass, &rig->prefill), 0);
    assert_int_equal(model_batch_new(rig->model, MEM_HOST, 1, 128, 1, &rig->prefill_in), 0);
    pass.kind = PASS_RERUN;
    pass.n_rows_max = 16;
    assert_int_equal(model_pass_new(rig->model, &rig->space.view, &pass, &rig->rerun), 0);
    assert_int_equal(model_batch_new(rig->model, MEM_HOST, 1, 16, 1, &rig->rerun_in), 0);
    pass.kind = PASS_CYCLE;
    assert_int_equal(model_pass_new(rig->model, &rig->space.view, &pass, &rig->cycle), 0);
    assert_int_equal(rig->backend->mem_alloc(rig->device, MEM_HOST, 2 * sizeof(int32_t), &list), 0);
    rig->list = list;
}

static void rig_close(struct rig *rig) {
    rig->backend->mem_free(rig->device, MEM_HOST, rig->list, 2 * sizeof(int32_t));
    model_batch_free(rig->model, &rig->prefill_in);
    model_batch_free(rig->model, &rig->rerun_in);
    model_pass_free(rig->prefill);
    model_pass_free(rig->rerun);
    model_pass_free(rig->cycle);
    space_close(&rig->space);
    model_close(rig->model);
    rig->backend->stream_close(rig->stream);
    rig->backend->close(rig->device);
}

static void feed(struct rig *rig, struct model_pass *pass, struct model_batch *in, int slot, const int *tokens, int pos,
                 int n, bool sample) {
    space_fill(in, slot, tokens + pos, pos, n, SEG_PREFILL | (sample ? SEG_SAMPLE : 0), false);
    assert_int_equal(model_pass_run(pass, rig->stream, in, NULL, NULL), 0);
    assert_int_equal(backend_stream_wait(rig->backend, rig->stream), 0);
}

static const struct step_out *last_step(struct rig *rig) {
    const struct step_ring *ring = model_ring(rig->model);

    return ring->out + (*ring->n_steps - 1) % (uint64_t)ring->n_steps_max * (uint64_t)ring->n_segs_max;
}

/* Decodes in `slot`; its tokens go to rig->tokens (or are compared with them). ret_snapshot: the last rolling b. */
static void generate(struct rig *rig, int slot, bool speculate, bool compare, int *ret_snapshot) {
    struct seq_ctl ctl = space_ctl(rig->n_generate, TOKENS_MAX, NULL, 0);
    int n = N_PROMPT;
    const struct step_out *out;

    ctl.speculate = speculate;
    ctl.may_snapshot = 1;
    assert_int_equal(space_admit(&rig->space, slot, &ctl), 0);
    feed(rig, rig->prefill, &rig->prefill_in, slot, rig->tokens, 0, 64, false);
    feed(rig, rig->prefill, &rig->prefill_in, slot, rig->tokens, 64, N_PROMPT - 64, true);
    *ret_snapshot = 0;
    for (;;) {
        out = last_step(rig);
        for (int i = 0; i < out->n_tokens; i++, n++) {
            if (compare)
                assert_int_equal(out->tokens[i], rig->tokens[n]);
            rig->tokens[n] = out->tokens[i];
        }
        if (out->snapshot_len > 0)
            *ret_snapshot = out->snapshot_len; /* the grant is used up: it stays the last one */
        if (out->done)
            break;
        rig->list[0] = 1;
        rig->list[1] = slot;
        assert_int_equal(model_pass_run_cycle(rig->cycle, rig->stream, rig->list, NULL), 0);
        assert_int_equal(backend_stream_wait(rig->backend, rig->stream), 0);
    }
    assert_int_equal(n, N_PROMPT + rig->n_generate);
    rig->n_tokens = n;
    assert_int_equal(out->len, n - 1); /* the last token was never fed */
}

static const char *page_row(const struct kv_view *kv, int slot, int layer, int is_v, int head, int pos) {
    const int32_t *table = kv->table + slot * kv->n_pages_max;
    size_t row = (size_t)kv->head_dim * dtype_bytes(kv->dtype);

    return (const char *)kv->arena + (size_t)table[pos / PAGE_TOKENS] * kv->page_bytes +
           (((size_t)layer * 2 + (size_t)is_v) * (size_t)kv->n_kv_heads + (size_t)head) * PAGE_TOKENS * row +
           (size_t)(pos % PAGE_TOKENS) * row;
}

static bool is_zero(const char *bytes, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (bytes[i] != 0)
            return false;
    return true;
}

/* Rows [0, len) of two slots are equal and not empty; `clean`: rows from len on were never written in slot a. */
static void pages_agree(const struct kv_view *kv, int a, int b, int len, bool clean) {
    size_t row = (size_t)kv->head_dim * dtype_bytes(kv->dtype);

    for (int i = 0; i < kv->n_layers * 2 * kv->n_kv_heads; i++) {
        int layer = i / (2 * kv->n_kv_heads), is_v = i / kv->n_kv_heads % 2, head = i % kv->n_kv_heads;

        for (int pos = 0; pos < kv->n_pages_max * PAGE_TOKENS; pos++) {
            const char *row_a = page_row(kv, a, layer, is_v, head, pos);

            if (pos < len) {
                assert_memory_equal(row_a, page_row(kv, b, layer, is_v, head, pos), row);
                assert_false(is_zero(row_a, row));
            } else if (clean) {
                assert_true(is_zero(row_a, row));
            }
        }
    }
}

static const char *state_slot(const struct rig *rig, int slot) {
    return (const char *)rig->space.view.target_state.arena + (size_t)slot * rig->space.view.target_state.slot_bytes;
}

static void agree_in(enum numeric numeric, enum dtype kv, enum dtype draft_kv, int n_generate, uint64_t delay_seed) {
    struct seq_ctl ctl = space_ctl(n_generate, TOKENS_MAX, NULL, 0);
    size_t slot_bytes;
    struct rig rig;
    int len, snapshot[2];

    rig_open(&rig, numeric, kv, draft_kv, delay_seed);
    rig.n_generate = n_generate;
    slot_bytes = rig.space.view.target_state.slot_bytes;
    for (int i = 0; i < N_PROMPT; i++)
        rig.tokens[i] = 200 + i * 37 % 900;
    generate(&rig, 0, true, false, &snapshot[0]);
    generate(&rig, 1, false, true, &snapshot[1]);
    len = rig.n_tokens - 1;
    assert_int_equal(snapshot[0], 128); /* one grant, used at the first multiple of 64 passed in decode */
    assert_int_equal(snapshot[1], 128);

    /* Slot 2: prefill to 128, where the restore point lies, then the verify path, 16 rows at a time. */
    assert_int_equal(space_admit(&rig.space, 2, &ctl), 0);
    feed(&rig, rig.prefill, &rig.prefill_in, 2, rig.tokens, 0, 128, false);
    for (int slot = 0; slot < 2; slot++) /* rolling slots lie behind the live ones */
        assert_memory_equal(state_slot(&rig, N_SLOTS + slot), state_slot(&rig, 2), slot_bytes);
    for (int pos = 128; pos < len; pos += 16)
        feed(&rig, rig.rerun, &rig.rerun_in, 2, rig.tokens, pos, len - pos < 16 ? len - pos : 16, false);

    for (int slot = 0; slot < 2; slot++) {
        pages_agree(&rig.space.view.target_full, slot, 2, len, false);
        pages_agree(&rig.space.view.draft_full, slot, 2, len, true);
        pages_agree(&rig.space.view.draft_sliding, slot, 2, len, true);
        assert_memory_equal(state_slot(&rig, slot), state_slot(&rig, 2), slot_bytes);
    }
    rig_close(&rig);
}

static void speculation_leaves_the_caches_of_a_plain_run_fast(void **state) {
    (void)state;
    agree_in(NUMERIC_FAST, DTYPE_BF16, DTYPE_BF16, N_GENERATE_MANY, 0);
}
static void speculation_leaves_the_caches_of_a_plain_run_small_caches(void **state) {
    (void)state;
    agree_in(NUMERIC_FAST, DTYPE_F16, DTYPE_E4M3, N_GENERATE_FEW, 0);
}
static void speculation_leaves_the_caches_of_a_plain_run_oracle(void **state) {
    (void)state;
    agree_in(NUMERIC_BF16, DTYPE_BF16, DTYPE_F16, N_GENERATE_FEW, 0);
}
static void delays_of_the_device_threads_change_no_byte(void **state) {
    (void)state;
    agree_in(NUMERIC_FAST, DTYPE_BF16, DTYPE_BF16, N_GENERATE_FEW, 7);
}

/* An argument picks cases by a pattern: instrumented builds run one. */
int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(speculation_leaves_the_caches_of_a_plain_run_fast),
        cmocka_unit_test(speculation_leaves_the_caches_of_a_plain_run_small_caches),
        cmocka_unit_test(speculation_leaves_the_caches_of_a_plain_run_oracle),
        cmocka_unit_test(delays_of_the_device_threads_change_no_byte),
    };

    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests_name("cache", tests, NULL, NULL);
}
