/* head: which rows it reads, what it hands to the choice, and that nothing depends on the workers. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "../fake/fake_batch.h"
#include "../fake/cpu_program.h"
#include "../fake/fake_weight.h"
#include "cpu/sample.h"

#include <errno.h>
#include <math.h>
#include <string.h>

enum { HIDDEN = 8, VOCAB = 300, N_VALID = 290, SLOTS = 3, ROWS = 12 };

struct fixture {
    struct fake_device fake;
    struct weight lm_head;
    float w[VOCAB * HIDDEN], x[ROWS * HIDDEN], norm[HIDDEN], logits[ROWS * VOCAB];
    int32_t chosen[ROWS], counts[SLOTS * VOCAB];
    struct logprob_row logprobs[ROWS];
    struct seq_ctl ctl[SLOTS];
    struct seq_tables tables;
    struct fake_batch batch;
    struct head_args args;
};

static float pseudo(uint64_t i) { /* any fixed numbers in [-1, 1) */
    return (float)(2 * sample_uniform(1234, i, SAMPLE_TARGET) - 1);
}

/* A prefill seg of slot 2 whose last row is an output, then a block of four rows of slot 1. */
static void setup(struct fixture *f, enum head_mode mode, int n_workers) {
    memset(f, 0, sizeof *f);
    fake_device_init(&f->fake, NUMERIC_REFERENCE, CPU_ISA_SCALAR, n_workers);
    f->fake.backwards = true;
    for (int i = 0; i < VOCAB * HIDDEN; i++)
        f->w[i] = pseudo((uint64_t)i);
    for (int i = 0; i < ROWS * HIDDEN; i++)
        f->x[i] = pseudo(100000 + (uint64_t)i);
    for (int i = 0; i < HIDDEN; i++)
        f->norm[i] = 1 + 0.1f * (float)i;
    f->lm_head = (struct weight){VOCAB, HIDDEN, f->w};
    for (int s = 0; s < SLOTS; s++) {
        f->ctl[s].has_counts = 1;
        f->ctl[s].sample = (struct sample_params){.top_p = 1, .repetition = 1, .n_logprobs = -1, .seed = 5};
    }
    f->tables = (struct seq_tables){.vocab = VOCAB, .counts = f->counts};
    fake_batch_init(&f->batch, 4, ROWS, ROWS);
    fake_batch_seg(&f->batch, 2, 10, SEG_PREFILL | SEG_SAMPLE);
    for (int i = 0; i < 5; i++)
        fake_batch_row(&f->batch, 20 + i, i == 4);
    fake_batch_seg(&f->batch, 1, 40, 0);
    for (int i = 0; i < 4; i++)
        fake_batch_row(&f->batch, 30 + i, true);
    f->args = (struct head_args){&f->batch.batch, f->x, HIDDEN,    f->norm,   1e-6f,  &f->lm_head, VOCAB,
                                 N_VALID,         mode, f->logits, f->chosen, f->ctl, &f->tables,  f->logprobs};
}

static void run(struct fixture *f) {
    struct program *program = fake_program_new(&f->fake);

    memset(f->chosen, 0xee, sizeof f->chosen);
    assert_int_equal(cpu_head(program, &f->args), 0);
    fake_program_run(program);
    fake_program_free(program);
}

static void expect_logits(const struct fixture *f) {
    for (int out = 0; out < *f->batch.batch.n_outs; out++) {
        const float *x = f->x + f->batch.out_row[out] * HIDDEN;
        double sum = 0;

        for (int i = 0; i < HIDDEN; i++)
            sum += (double)x[i] * (double)x[i];
        for (int id = 0; id < VOCAB; id++) {
            double logit = 0;

            for (int i = 0; i < HIDDEN; i++)
                logit += (double)f->w[id * HIDDEN + i] * (double)x[i] * (double)f->norm[i] / sqrt(sum / HIDDEN + 1e-6);
            assert_true(fabs(logit - (double)f->logits[out * VOCAB + id]) < 1e-5);
        }
    }
}

static int32_t naive_argmax(const float *logits) {
    int best = 0;

    for (int id = 1; id < N_VALID; id++)
        if (logits[id] > logits[best])
            best = id;
    return best;
}

static void logits_mode_reads_the_output_rows_and_chooses_nothing(void **state) {
    struct fixture f;

    (void)state;
    setup(&f, HEAD_LOGITS, 3);
    run(&f);
    expect_logits(&f);
    for (int i = 0; i < ROWS; i++)
        assert_int_equal(f.chosen[i], (int32_t)0xeeeeeeee);
}

static void argmax_and_greedy_select_agree_for_any_number_of_workers(void **state) {
    (void)state;
    for (int n_workers = 1; n_workers <= 7; n_workers++)
        for (int mode = HEAD_ARGMAX; mode <= HEAD_SELECT; mode++) {
            struct fixture f;

            setup(&f, (enum head_mode)mode, n_workers);
            run(&f);
            expect_logits(&f);
            for (int out = 0; out < 5; out++)
                assert_int_equal(f.chosen[out], naive_argmax(f.logits + out * VOCAB));
            assert_int_equal(f.chosen[5], (int32_t)0xeeeeeeee);
        }
}

static void padding_ids_are_never_chosen(void **state) {
    struct fixture f;

    (void)state;
    setup(&f, HEAD_ARGMAX, 2);
    for (int i = 0; i < HIDDEN; i++) /* row 4's best direction: certainly the largest logit */
        f.w[(N_VALID + 3) * HIDDEN + i] = 100 * f.x[4 * HIDDEN + i];
    run(&f);
    assert_true(f.logits[N_VALID + 3] > f.logits[naive_argmax(f.logits)]);
    assert_int_equal(f.chosen[0], naive_argmax(f.logits));
}

static void a_non_finite_row_says_so_alone(void **state) {
    (void)state;
    for (int mode = HEAD_ARGMAX; mode <= HEAD_SELECT; mode++) {
        struct fixture f;

        setup(&f, (enum head_mode)mode, 2);
        f.x[6 * HIDDEN] = NAN;
        run(&f);
        for (int out = 0; out < 5; out++)
            assert_int_equal(f.chosen[out] == -1, out == 2);
    }
}

static void an_empty_batch_is_a_no_op(void **state) {
    struct fixture f;

    (void)state;
    setup(&f, HEAD_SELECT, 2);
    fake_batch_init(&f.batch, 4, ROWS, ROWS);
    run(&f);
    assert_int_equal(f.chosen[0], (int32_t)0xeeeeeeee);
}

static void wrong_shapes_are_refused(void **state) {
    struct fixture f;
    struct program *program;

    (void)state;
    setup(&f, HEAD_SELECT, 2);
    program = fake_program_new(&f.fake);
    f.args.n_valid = VOCAB + 1;
    assert_int_equal(cpu_head(program, &f.args), -EINVAL);
    f.args.n_valid = N_VALID;
    f.args.hidden = HIDDEN + 1;
    assert_int_equal(cpu_head(program, &f.args), -EINVAL);
    fake_program_free(program);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(logits_mode_reads_the_output_rows_and_chooses_nothing),
        cmocka_unit_test(argmax_and_greedy_select_agree_for_any_number_of_workers),
        cmocka_unit_test(padding_ids_are_never_chosen),
        cmocka_unit_test(a_non_finite_row_says_so_alone),
        cmocka_unit_test(an_empty_batch_is_a_no_op),
        cmocka_unit_test(wrong_shapes_are_refused),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
