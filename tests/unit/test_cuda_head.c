/* The choice of tokens and the bookkeeping of a cycle on the GPU, held against the CPU's word for word. */
#include "cuda_rig.h"

enum { HIDDEN = 32, VOCAB = 5000, N_VALID = 4900, N_SEQS = 12, ROWS = 4 };

static struct rig rig;

static int teardown(void **state) {
    (void)state;
    rig_clear(&rig);
    return 0;
}

/* A normed row of ones is ones in bf16, and each row of W has one element: the logits are its exact values. */
static struct weight **exact_head(int n_equal) {
    uint16_t *raw = calloc(VOCAB * HIDDEN, sizeof *raw);
    struct weight_part part = {.data = raw, .dtype = DTYPE_BF16, .n_rows = VOCAB, .row_bytes = HIDDEN * 2};
    struct weight_desc desc = {WEIGHT_ROWS, HIDDEN, 1, 1, &part};

    for (int n = 0; n < VOCAB; n++)
        raw[n * HIDDEN + n % HIDDEN] = bf16_from_f32(n >= N_VALID ? 100 : n % 7 < n_equal ? 3 : rig_random(&rig) * 8);
    for (int i = 0; i < N_SIDES; i++)
        assert_int_equal(rig.side[i].backend->weight_pack(rig.side[i].device, &desc, &rig.weights[rig.n_weights][i]),
                         0);
    free(raw);
    return rig.weights[rig.n_weights++];
}

static struct sample_params params_of(int seq) {
    static const struct sample_params list[N_SEQS] = {
        {.temperature = 0, .top_p = 1, .repetition = 1, .n_logprobs = 3},
        {.temperature = 1, .top_p = 1, .repetition = 1, .n_logprobs = -1},
        {.temperature = 0.7f, .top_p = 0.9f, .repetition = 1, .top_k = 20, .n_logprobs = 20},
        {.temperature = 2, .top_p = 0.5f, .repetition = 1, .n_logprobs = -1},
        {.temperature = 1, .top_p = 1, .min_p = 0.1f, .repetition = 1, .n_logprobs = 0},
        {.temperature = 1.5f, .top_p = 0.95f, .min_p = 0.02f, .repetition = 1.3f, .top_k = 300, .n_logprobs = -1},
        {.temperature = 0, .top_p = 1, .repetition = 1.5f, .presence = 0.7f, .frequency = 0.3f, .n_logprobs = -1},
        {.temperature = 1, .top_p = 0.8f, .repetition = 0.8f, .frequency = -0.2f, .top_k = 1000, .n_logprobs = -1},
        {.temperature = 5, .top_p = 1, .repetition = 1, .top_k = 1, .n_logprobs = -1},
        {.temperature = 0.01f, .top_p = 0.01f, .repetition = 1, .n_logprobs = -1},
        {.temperature = 100, .top_p = 0.99f, .repetition = 1, .n_logprobs = -1},
        {.temperature = 1, .top_p = 0.7f, .min_p = 0.5f, .repetition = 1, .top_k = 50, .n_logprobs = -1},
    };
    struct sample_params params = list[seq];

    params.seed = (uint64_t)seq * 0x123456789abu;
    return params;
}

static void compare_logprobs(struct buf *buf, int seq, int row) {
    struct logprob_row *all[N_SIDES];

    for (int i = 0; i < N_SIDES; i++) {
        all[i] = malloc(buf->bytes[i]);
        rig_copy(&rig.side[i], buf->mem[i], all[i], buf->bytes[i], false);
    }
    if (params_of(seq).n_logprobs >= 0) {
        const struct logprob_row *want = &all[CPU][row], *got = &all[GPU][row];

        assert_true(fabsf(want->chosen - got->chosen) < 1e-5f);
        assert_int_equal(want->n_top, got->n_top);
        for (int i = 0; i < want->n_top; i++) {
            assert_int_equal(want->top_id[i], got->top_id[i]);
            assert_true(fabsf(want->top[i] - got->top[i]) < 1e-5f);
        }
    }
    free(all[CPU]);
    free(all[GPU]);
}

static void tokens_are_chosen_as_the_cpu_chooses(void **state) {
    (void)state;
    for (int n_equal = 0; n_equal <= 7; n_equal += n_equal == 0 ? 2 : 5) {
        struct weight **head = exact_head(n_equal);
        struct seq_ctl ctl[N_SEQS] = {0};
        int n_rows[N_SEQS], pos[N_SEQS], flags[N_SEQS], n_different = 0;
        const size_t n = N_SEQS * ROWS;
        int32_t *counts = calloc(N_SEQS * VOCAB, sizeof *counts), *bias_id = calloc(N_SEQS * SEQ_BIAS_MAX, 4);
        float *bias = calloc(N_SEQS * SEQ_BIAS_MAX, 4), ones[N_SEQS * ROWS * HIDDEN], norm[HIDDEN];
        struct buf *x = rig_new(&rig, n * HIDDEN, 4, 2), *logits = rig_poison(&rig, n * VOCAB, false);
        struct buf *chosen = rig_new(&rig, n, 4, 4), *argmax = rig_new(&rig, n, 4, 4), *norm_buf, *ctl_buf;
        struct buf *logprobs = rig_new(&rig, n * sizeof(struct logprob_row), 1, 1), *tables[3];
        struct rig_batch batch;
        int32_t ids[N_SEQS * ROWS];

        for (int s = 0; s < N_SEQS; s++) {
            n_rows[s] = ROWS;
            pos[s] = 100 * s;
            flags[s] = s % 4 == 3 ? SEG_PREFILL : 0;
            ctl[s].sample = params_of(s);
            ctl[s].has_counts = 1;
            ctl[s].n_bias = s % 3 == 2 ? 5 : 0;
            for (int i = 0; i < 5; i++) {
                bias_id[s * SEQ_BIAS_MAX + i] = i == 4 ? VOCAB + 7 : rig_below(&rig, N_VALID);
                bias[s * SEQ_BIAS_MAX + i] = rig_random(&rig) * 10;
            }
            for (int i = 0; i < 800; i++)
                counts[s * VOCAB + rig_below(&rig, N_VALID)] += rig_below(&rig, 4);
        }
        for (size_t i = 0; i < ARRAY_LEN(ones); i++)
            ones[i] = 1;
        for (int i = 0; i < HIDDEN; i++)
            norm[i] = 1;
        rig_set(&rig, x, ones);
        norm_buf = rig_words(&rig, norm, HIDDEN);
        ctl_buf = rig_words(&rig, ctl, sizeof ctl / 4);
        tables[0] = rig_words(&rig, counts, N_SEQS * VOCAB);
        tables[1] = rig_words(&rig, bias_id, N_SEQS * SEQ_BIAS_MAX);
        tables[2] = rig_words(&rig, bias, N_SEQS * SEQ_BIAS_MAX);
        batch = rig_batch(&rig, N_SEQS, n_rows, pos, flags, (int)n);
        for (int i = 0; i < N_SIDES; i++) {
            struct seq_tables view = {VOCAB, tables[0]->mem[i], tables[1]->mem[i], tables[2]->mem[i]};
            struct head_args args = {.batch = &batch.side[i],
                                     .x = x->mem[i],
                                     .hidden = HIDDEN,
                                     .norm = norm_buf->mem[i],
                                     .eps = 1e-6f,
                                     .lm_head = head[i],
                                     .vocab = VOCAB,
                                     .n_valid = N_VALID,
                                     .mode = HEAD_SELECT,
                                     .logits = logits->mem[i],
                                     .chosen = chosen->mem[i],
                                     .ctl = ctl_buf->mem[i],
                                     .tables = &view,
                                     .logprobs = logprobs->mem[i]};

            RIG_RUN(&rig, i, head, &args);
            args.mode = HEAD_ARGMAX;
            args.chosen = argmax->mem[i];
            RIG_RUN(&rig, i, head, &args);
        }
        rig_compare(&rig, logits, 0, n * VOCAB, 0, "head, logits");
        rig_compare_words(&rig, argmax, "head, argmax");
        rig_compare_words(&rig, chosen, "head, chosen");
        for (int row = 0; row < N_SEQS * ROWS; row++)
            compare_logprobs(logprobs, N_SEQS - 1 - row / ROWS, row); /* slots fall */
        rig_copy(&rig.side[CPU], chosen->mem[CPU], ids, sizeof ids, false);
        for (int row = 1; row < N_SEQS * ROWS; row++)
            n_different += ids[row] != ids[0];
        assert_true(n_different > 10);
        free(counts);
        free(bias_id);
        free(bias);
        rig_clear(&rig);
    }
}

static void a_logit_that_is_not_finite_chooses_nothing(void **state) {
    struct weight **head = exact_head(0);
    float x_values[2 * HIDDEN], norm[HIDDEN];
    struct rig_batch batch = rig_rows(&rig, 2, 2);
    struct buf *x = rig_new(&rig, 2 * HIDDEN, 4, 2), *logits = rig_poison(&rig, 2 * VOCAB, false), *norm_buf;
    struct buf *chosen = rig_new(&rig, 2, 4, 4);
    int32_t ids[2];

    (void)state;
    for (int i = 0; i < HIDDEN; i++) {
        x_values[i] = 1;
        x_values[HIDDEN + i] = i == 5 ? NAN : 1;
        norm[i] = 1;
    }
    rig_set(&rig, x, x_values);
    norm_buf = rig_words(&rig, norm, HIDDEN);
    for (int i = 0; i < N_SIDES; i++)
        RIG_RUN(&rig, i, head,
                (&(struct head_args){.batch = &batch.side[i],
                                     .x = x->mem[i],
                                     .hidden = HIDDEN,
                                     .norm = norm_buf->mem[i],
                                     .eps = 1e-6f,
                                     .lm_head = head[i],
                                     .vocab = VOCAB,
                                     .n_valid = N_VALID,
                                     .mode = HEAD_ARGMAX,
                                     .logits = logits->mem[i],
                                     .chosen = chosen->mem[i]}));
    rig_compare_words(&rig, chosen, "head, not finite");
    rig_copy(&rig.side[GPU], chosen->mem[GPU], ids, sizeof ids, false);
    assert_true(ids[0] >= 0 && ids[1] == -1);
}

/* Random cycles: the batches that are built, what is accepted and what becomes of the seqs, word for word. */
static void cycles_are_kept_as_the_cpu_keeps_them(void **state) {
    enum { SEQS = 6, BLOCK = 8, SLOTS = 9 };

    (void)state;
    for (int round = 0; round < 60; round++) {
        struct seq_ctl ctl[SLOTS] = {0};
        int32_t list[1 + SEQS] = {SEQS}, drafts[SEQS * BLOCK], chosen[SEQS * BLOCK];
        struct logprob_row logprobs[SEQS * BLOCK] = {{.chosen = 1}};
        struct step_out outs[2 * SEQS];
        struct rig_batch draft = rig_batch(&rig, SEQS, (int[SEQS]){0}, (int[SEQS]){0}, NULL, SEQS * BLOCK);
        struct rig_batch verify = rig_batch(&rig, SEQS, (int[SEQS]){0}, (int[SEQS]){0}, NULL, SEQS * BLOCK);
        struct buf *ctl_buf, *list_buf, *drafts_buf, *chosen_buf, *logprobs_buf, *outs_buf;
        struct buf *commit = rig_new(&rig, SEQS, 4, 4), *snapshot = rig_new(&rig, SEQS, 4, 4);
        struct buf *n_steps = rig_words(&rig, (uint64_t[]){5}, 2), *n_segs = rig_new(&rig, 2, 4, 4);
        struct buf *counts = rig_new(&rig, SLOTS * 64, 4, 4);

        for (int i = 0; i < SLOTS; i++) {
            ctl[i].len = rig_below(&rig, 200);
            ctl[i].anchor = rig_below(&rig, 60);
            ctl[i].max_tokens = rig_below(&rig, 30);
            ctl[i].n_generated = rig_below(&rig, 20);
            ctl[i].context_max = ctl[i].len + rig_below(&rig, 25);
            ctl[i].done = rig_below(&rig, 5) == 0 ? FINISH_STOP : FINISH_NONE;
            ctl[i].cancel = rig_below(&rig, 6) == 0;
            ctl[i].speculate = rig_below(&rig, 4) != 0;
            ctl[i].may_snapshot = rig_below(&rig, 2);
            ctl[i].has_counts = rig_below(&rig, 2);
            ctl[i].n_stop_ids = 1;
            ctl[i].stop_ids[0] = rig_below(&rig, 3);
            ctl[i].sample.n_logprobs = rig_below(&rig, 2) - 1;
        }
        for (int i = 0; i < SEQS; i++)
            list[1 + i] = (i * 2 + round) % SLOTS;
        for (int i = 0; i < SEQS * BLOCK; i++)
            drafts[i] = rig_below(&rig, 3);
        for (int i = 0; i < SEQS * BLOCK; i++)
            chosen[i] = rig_below(&rig, 15) == 0 ? -1 : rig_below(&rig, 3);
        memset(outs, 0, sizeof outs);
        ctl_buf = rig_words(&rig, ctl, sizeof ctl / 4);
        list_buf = rig_words(&rig, list, 1 + SEQS);
        drafts_buf = rig_words(&rig, drafts, SEQS * BLOCK);
        chosen_buf = rig_words(&rig, chosen, SEQS * BLOCK);
        logprobs_buf = rig_words(&rig, logprobs, sizeof logprobs / 4);
        outs_buf = rig_words(&rig, outs, sizeof outs / 4);
        for (int i = 0; i < N_SIDES; i++) {
            struct rows_args rows = {.n_seqs = list_buf->mem[i],
                                     .seq_slot = (int32_t *)list_buf->mem[i] + 1,
                                     .n_seqs_max = SEQS,
                                     .block = BLOCK,
                                     .mask_id = 61,
                                     .ctl = ctl_buf->mem[i],
                                     .draft = &draft.side[i],
                                     .draft_ids = drafts_buf->mem[i],
                                     .verify = &verify.side[i]};
            struct seq_tables tables = {.vocab = 64, .counts = counts->mem[i]};
            struct step_ring ring = {2, SEQS, n_steps->mem[i], n_segs->mem[i], outs_buf->mem[i]};

            RIG_RUN(&rig, i, draft_rows, &rows);
            RIG_RUN(&rig, i, verify_rows, &rows);
            RIG_RUN(&rig, i, prepare,
                    (&(struct prepare_args){.batch = &verify.side[i],
                                            .chosen = chosen_buf->mem[i],
                                            .logprobs = logprobs_buf->mem[i],
                                            .ctl = ctl_buf->mem[i],
                                            .tables = &tables,
                                            .seg_commit = commit->mem[i],
                                            .seg_snapshot = snapshot->mem[i],
                                            .ring = &ring}));
        }
        for (int b = 0; b < rig.n_bufs; b++)
            rig_compare_words(&rig, &rig.bufs[b], "a buffer of the cycle");
        rig_clear(&rig);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(tokens_are_chosen_as_the_cpu_chooses, teardown),
        cmocka_unit_test_teardown(a_logit_that_is_not_finite_chooses_nothing, teardown),
        cmocka_unit_test_teardown(cycles_are_kept_as_the_cpu_keeps_them, teardown),
    };
    int failed;

    rig_open(&rig);
    failed = cmocka_run_group_tests(tests, NULL, NULL);
    rig_close(&rig);
    return failed;
}
