#include "fixture.h"
#include "checkpoint.h"
#include "dummy.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

/* Mean and deviation of (at most) the first 200 x 200 elements; each must be finite and not 0. */
static void measure(const struct tensor *t, double *ret_mean, double *ret_deviation) {
    int n_rows = min_int(t->n_rows, 200), n_cols = min_int(t->n_cols, 200);
    double sum = 0, squares = 0, n = (double)n_rows * n_cols;

    assert_non_null(t->data);
    for (int row = 0; row < n_rows; row++)
        for (int col = 0; col < n_cols; col++) {
            double x = (double)tensor_at(t, row, col);

            assert_true(isfinite(x) && x != 0);
            sum += x;
            squares += x * x;
        }
    *ret_mean = sum / n;
    *ret_deviation = sqrt(squares / n - *ret_mean * *ret_mean);
    /* The far corner must lie in the pool too: a sanitizer sees it if it does not. */
    assert_true(isfinite(tensor_at(t, t->n_rows - 1, t->n_cols - 1)));
}

static void expect(const struct tensor *t, int n_rows, int n_cols, double mean, double deviation) {
    double is_mean, is_deviation;

    assert_int_equal(n_rows, t->n_rows);
    assert_int_equal(n_cols, t->n_cols);
    measure(t, &is_mean, &is_deviation);
    if (fabs(is_mean - mean) > 0.25 * (deviation + fabs(mean)) || is_deviation < 0.7 * deviation ||
        is_deviation > 1.3 * deviation)
        fail_msg("mean %g deviation %g, expected %g and %g", is_mean, is_deviation, mean, deviation);
}

static struct qwen_config small_published(void) { /* 0.8B */
    static const char text[] =
        "{\"architectures\":[\"Qwen3_5ForCausalLM\"],\"hidden_size\":1024,\"num_hidden_layers\":24,"
        "\"intermediate_size\":3584,\"num_attention_heads\":8,\"num_key_value_heads\":2,"
        "\"linear_num_value_heads\":16,\"tie_word_embeddings\":true,"
        "\"rope_parameters\":{\"rope_theta\":10000000}}";
    struct report report = {""};
    struct qwen_config config;

    if (qwen_config_parse("c", text, strlen(text), &config, &report) != 0)
        fail_msg("%s", report.line);
    return config;
}

static long resident_kib(void) {
    struct rusage usage;

    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_maxrss;
}

static void a_small_published_size_costs_little(void **state) {
    struct qwen_config config = small_published();
    struct checkpoint *checkpoint;
    struct report report = {""};
    struct qwen_weights w;
    long before = resident_kib();

    (void)state;
    if (qwen_weights_dummy(&config, 1, &checkpoint, &w, &report) != 0)
        fail_msg("%s", report.line);
    assert_true(resident_kib() - before < 64 << 10); /* the real weights are 1.5 GB */
    assert_true(w.tied);
    assert_ptr_equal(w.embed.data, w.lm_head.data);
    expect(&w.embed, 248320, 1024, 0, 1 / 32.0);
    for (int l = 0; l < 24; l++) {
        const struct qwen_layer_weights *x = &w.layers[l];

        expect(&x->input_norm, 1, 1024, 0, 0.1);
        expect(&x->gate, 3584, 1024, 0, 1 / 32.0);
        expect(&x->down, 1024, 3584, 0, 1 / 32.0);
        if (config.layers[l] == LAYER_FULL) {
            expect(&x->q, 4096, 1024, 0, 1 / 32.0);
            expect(&x->o, 1024, 2048, 0, 1 / 32.0);
            expect(&x->k_norm, 1, 256, 0, 0.1);
        } else {
            expect(&x->in_qkv[2], 2048, 1024, 0, 1 / 32.0);
            expect(&x->conv, 6144, 4, 0, 0.4);
            expect(&x->gdn_norm, 1, 128, 1, 0.1);
            assert_int_equal(16, x->a_log.n_cols);
            for (int i = 0; i < 16; i++) {
                assert_true(fabsf(tensor_at(&x->a_log, 0, i)) < 3.1f); /* decays of 0.05 to 8 */
                assert_true(fabsf(tensor_at(&x->dt_bias, 0, i) + 1) < 2);
            }
        }
    }
    assert_true(w.layers[0].gate.data != w.layers[1].gate.data);
    assert_true(w.layers[0].gate.data != w.layers[0].up.data);
    qwen_weights_deinit(&w);
    checkpoint_close(checkpoint);
}

static void the_seed_decides_the_values(void **state) {
    struct qwen_config config = fixture_odd_config(true);
    struct checkpoint *checkpoint[3];
    struct report report = {""};
    struct qwen_weights w[3];

    (void)state;
    for (int i = 0; i < 3; i++)
        if (qwen_weights_dummy(&config, i == 2 ? 8 : 7, &checkpoint[i], &w[i], &report) != 0)
            fail_msg("%s", report.line);
    assert_same_tensor(&w[0].layers[1].experts[2].up, &w[1].layers[1].experts[2].up);
    assert_same_tensor(&w[0].lm_head, &w[1].lm_head);
    assert_true(tensor_at(&w[0].layers[0].gdn_out, 3, 3) != tensor_at(&w[2].layers[0].gdn_out, 3, 3));
    assert_false(w[0].tied);
    for (int i = 0; i < 3; i++) {
        qwen_weights_deinit(&w[i]);
        checkpoint_close(checkpoint[i]);
    }
}

static void fp8_configs_have_scaled_projections(void **state) {
    struct qwen_config config = fixture_odd_config(false);
    struct checkpoint *checkpoint;
    struct report report = {""};
    struct qwen_weights w;
    double deviation = 1 / sqrt(192.0);

    (void)state;
    config.fp8 = true;
    if (qwen_weights_dummy(&config, 3, &checkpoint, &w, &report) != 0)
        fail_msg("%s", report.line);
    assert_int_equal(DTYPE_E4M3, w.layers[0].down.dtype);
    assert_int_equal(3, w.layers[0].down.scale_cols);
    expect(&w.layers[0].down, 192, 320, 0, deviation);
    expect(&w.layers[1].q, 3072, 192, 0, deviation);
    assert_null(w.embed.scale);
    assert_null(w.layers[0].in_a.scale);
    qwen_weights_deinit(&w);
    checkpoint_close(checkpoint);
}

static void drafters_have_dummies_too(void **state) {
    struct checkpoint *checkpoint = NULL;
    struct report report = {""};
    struct draft_config config;
    struct draft_weights w;

    (void)state;
    if (draft_config_read(SOURCE_ROOT "/tests/golden/dense-a-draft-unsorted-bias/config.json", DRAFT_CAUSAL_AUTO,
                          &config, &report) != 0 ||
        draft_weights_dummy(&config, 5, &checkpoint, &w, &report) != 0)
        fail_msg("%s", report.line);
    expect(&w.fc, 128, 384, 0, 1 / sqrt(128.0));
    expect(&w.hidden_norm, 1, 128, 1, 0.1);
    expect(&w.layers[1].input_norm, 1, 128, 1, 0.1);
    expect(&w.layers[1].q_bias, 1, 512, 0, 0.1);
    expect(&w.layers[1].down, 128, 256, 0, 1 / sqrt(128.0));
    draft_weights_deinit(&w);
    checkpoint_close(checkpoint);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_small_published_size_costs_little),
        cmocka_unit_test(the_seed_decides_the_values),
        cmocka_unit_test(fp8_configs_have_scaled_projections),
        cmocka_unit_test(drafters_have_dummies_too),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
