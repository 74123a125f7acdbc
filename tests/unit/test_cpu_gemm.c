/* Products of the CPU backend, for the instruction set named on the command line: against a dense loop in double, and bit
 * by bit against themselves in other batches, with other worker counts and on the scalar path. Exit 77: not on this CPU. */
#include "cpu_rig.h"

#include <errno.h>
#include <stdio.h>

static const int row_counts[] = {1, 2, 3, 7, 15, 16, 17, 33, 64, 65, 200};
static const int shapes[][2] = {{16, 2}, {1, 1}, {17, 3}, {48, 64}, {33, 129}, {130, 257}};
enum { ROWS_MAX = 200, POISON = 0x7fc12345 };

static struct rig open_fast(const char *isa, int n_threads) {
    return rig_open(&(struct backend_options){.isa = isa, .n_threads = n_threads});
}

/* y with a wider stride, poisoned beforehand; checks that nothing but [n_rows, n] was written. */
static float *product(struct rig *rig, const struct weight *weight, const float *x, int n_rows) {
    int n = cpu_weight_rows(weight), k = cpu_weight_cols(weight), stride = n + 3;
    size_t n_elements = (size_t)(n_rows + 1) * (size_t)stride;
    float *y = malloc(n_elements * sizeof *y), *dense = malloc((size_t)n_rows * (size_t)n * sizeof *dense);

    for (size_t i = 0; i < n_elements; i++)
        y[i] = f32_from_bits(POISON);
    rig_gemm(rig, weight, 0, x, k, n_rows, y, stride);
    for (size_t i = 0; i < n_elements; i++) {
        size_t row = i / (size_t)stride, col = i % (size_t)stride;

        if (row < (size_t)n_rows && col < (size_t)n)
            dense[row * (size_t)n + col] = y[i];
        else
            assert_int_equal(f32_bits(y[i]), POISON);
    }
    free(y);
    return dense;
}

static void check_product(struct rig *rig, enum dtype dtype, int n, int k, double tolerance) {
    struct matrix w = matrix_new(rig, n, k, dtype), x = matrix_new(rig, ROWS_MAX, k, DTYPE_F32);
    struct weight *weight = rig_pack(rig, &w, 1);

    for (size_t i = 0; i < ARRAY_LEN(row_counts); i++) {
        float *y = product(rig, weight, x.f32, row_counts[i]);

        for (int r = 0; r < row_counts[i]; r++)
            for (int c = 0; c < n; c++) {
                double sum = 0, size = 0;

                for (int j = 0; j < k; j++) {
                    float wv = weight->elem == DTYPE_BF16 ? bf16_round(w.f32[c * k + j]) : w.f32[c * k + j];
                    double p = (double)wv * (double)cpu_round_gemm_in(rig->device, x.f32[r * k + j]);

                    sum += p;
                    size += fabs(p);
                }
                assert_true(fabs(sum - (double)y[r * n + c]) <= tolerance * size + 1e-37);
            }
        free(y);
    }
    backend_cpu.weight_free(rig->device, weight);
    matrix_free(&w);
    matrix_free(&x);
}

static void products_match_a_dense_loop_in_double(void **state) {
    struct rig rig = open_fast(*state, 2);

    for (size_t s = 0; s < ARRAY_LEN(shapes); s++)
        check_product(&rig, DTYPE_BF16, shapes[s][0], shapes[s][1], 0x1p-24 * (double)shapes[s][1]);
    rig_close(&rig);
}

static void plain_modes_round_once(void **state) {
    static const enum numeric numerics[] = {NUMERIC_BF16, NUMERIC_REFERENCE};

    for (size_t m = 0; m < ARRAY_LEN(numerics); m++) {
        struct rig rig = rig_open(&(struct backend_options){.isa = *state, .n_threads = 2, .numeric = numerics[m]});

        for (size_t s = 0; s < ARRAY_LEN(shapes); s++) {
            check_product(&rig, DTYPE_BF16, shapes[s][0], shapes[s][1], 0x1.01p-24);
            check_product(&rig, DTYPE_F32, shapes[s][0], shapes[s][1], 0x1.01p-24);
        }
        rig_close(&rig);
    }
}

/* Rows of a batch of 200 on one worker are the truth; every other batch and worker count must have their bits. */
static void check_invariance(const struct backend_options *options, bool is_gate_up) {
    enum { N = 2 * 75, K = 131 };
    struct backend_options with_threads = *options;
    float *truth = NULL;

    for (int n_threads = 1; n_threads <= 3; n_threads++) {
        struct rig rig;
        struct matrix w, x;
        struct weight *weight;

        with_threads.n_threads = n_threads;
        rig = rig_open(&with_threads);
        w = matrix_new(&rig, N, K, DTYPE_BF16);
        x = matrix_new(&rig, ROWS_MAX, K, DTYPE_F32);
        weight = is_gate_up ? rig_pack_gate_up(&rig, &w, 1) : rig_pack(&rig, &w, 1);
        if (truth == NULL)
            truth = product(&rig, weight, x.f32, ROWS_MAX);
        for (size_t i = 0; i < ARRAY_LEN(row_counts); i++)
            for (int first = 0; first + row_counts[i] <= ROWS_MAX; first += 67) {
                float *y = product(&rig, weight, x.f32 + (size_t)first * K, row_counts[i]);

                assert_memory_equal(y, truth + (size_t)first * N, (size_t)row_counts[i] * N * sizeof *y);
                free(y);
            }
        backend_cpu.weight_free(rig.device, weight);
        matrix_free(&w);
        matrix_free(&x);
        rig_close(&rig);
    }
    free(truth);
}

static void rows_have_the_same_bits_in_every_batch(void **state) {
    check_invariance(&(struct backend_options){.isa = *state}, false);
    check_invariance(&(struct backend_options){.isa = *state}, true);
    check_invariance(&(struct backend_options){.isa = *state, .numeric = NUMERIC_BF16}, false);
    check_invariance(&(struct backend_options){.isa = *state, .numeric = NUMERIC_REFERENCE}, true);
}

/* A product of two bf16 values is exact in f32, so fused or not makes no difference: scalar and AVX2 agree in bits. */
static void avx2_has_the_bits_of_scalar(void **state) {
    enum { N = 45, K = 77 };
    const char *const isas[] = {"scalar", "avx2"};
    float *y[2];

    if (strcmp(*state, "avx2") != 0)
        skip();
    for (int i = 0; i < 2; i++) {
        struct rig rig = open_fast(isas[i], 2);
        struct matrix w = matrix_new(&rig, N, K, DTYPE_BF16), x = matrix_new(&rig, ROWS_MAX, K, DTYPE_F32);
        struct weight *weight = rig_pack(&rig, &w, 1);

        y[i] = product(&rig, weight, x.f32, ROWS_MAX);
        backend_cpu.weight_free(rig.device, weight);
        matrix_free(&w);
        matrix_free(&x);
        rig_close(&rig);
    }
    assert_memory_equal(y[0], y[1], ROWS_MAX * N * sizeof *y[0]);
    free(y[0]);
    free(y[1]);
}

static void one_expert_of_a_stack_is_used(void **state) {
    enum { N = 19, K = 10, N_EXPERTS = 5 };
    struct rig rig = open_fast(*state, 2);
    struct matrix w = matrix_new(&rig, N_EXPERTS * N, K, DTYPE_BF16), x = matrix_new(&rig, 2, K, DTYPE_F32);
    struct weight *stack = rig_pack(&rig, &w, N_EXPERTS), *flat = rig_pack(&rig, &w, 1);
    float want[2 * N_EXPERTS * N], y[2 * N];

    rig_gemm(&rig, flat, 0, x.f32, K, 2, want, N_EXPERTS * N);
    for (int e = 0; e < N_EXPERTS; e++) {
        rig_gemm(&rig, stack, e, x.f32, K, 2, y, N);
        for (int r = 0; r < 2; r++)
            assert_memory_equal(y + r * N, want + (r * N_EXPERTS + e) * N, N * sizeof *y);
    }
    backend_cpu.weight_free(rig.device, stack);
    backend_cpu.weight_free(rig.device, flat);
    matrix_free(&w);
    matrix_free(&x);
    rig_close(&rig);
}

/* A NaN or an infinity in one row stays in that row. */
static void rows_do_not_leak_into_each_other(void **state) {
    enum { N = 20, K = 9, ROWS = 16 };
    struct rig rig = open_fast(*state, 2);
    struct matrix w = matrix_new(&rig, N, K, DTYPE_BF16), x = matrix_new(&rig, ROWS, K, DTYPE_F32);
    struct weight *weight = rig_pack(&rig, &w, 1);
    float *want = product(&rig, weight, x.f32, ROWS), *y;

    x.f32[5 * K + 3] = NAN;
    x.f32[9 * K] = INFINITY;
    y = product(&rig, weight, x.f32, ROWS);
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < N; c++) {
            if (r == 5 || r == 9)
                assert_false(isfinite(y[r * N + c]));
            else
                assert_int_equal(f32_bits(y[r * N + c]), f32_bits(want[r * N + c]));
        }
    free(want);
    free(y);
    backend_cpu.weight_free(rig.device, weight);
    matrix_free(&w);
    matrix_free(&x);
    rig_close(&rig);
}

int main(int argc, char **argv) {
    const char *isa = argc > 1 ? argv[1] : "scalar";
    struct device *device;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_prestate(products_match_a_dense_loop_in_double, (void *)(uintptr_t)isa),
        cmocka_unit_test_prestate(plain_modes_round_once, (void *)(uintptr_t)isa),
        cmocka_unit_test_prestate(rows_have_the_same_bits_in_every_batch, (void *)(uintptr_t)isa),
        cmocka_unit_test_prestate(avx2_has_the_bits_of_scalar, (void *)(uintptr_t)isa),
        cmocka_unit_test_prestate(one_expert_of_a_stack_is_used, (void *)(uintptr_t)isa),
        cmocka_unit_test_prestate(rows_do_not_leak_into_each_other, (void *)(uintptr_t)isa),
    };
    int r = backend_cpu.open(&(struct backend_options){.isa = isa, .n_threads = 1}, &device);

    if (r == -ENOTSUP) {
        printf("%s: not on this CPU\n", isa);
        return 77;
    }
    if (r < 0)
        return 1;
    backend_cpu.close(device);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
