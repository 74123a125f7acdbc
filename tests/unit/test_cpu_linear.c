/* The ops linear and embed, the norm and fast_exp: values, rounding points, bits, refusals. */
#include "cpu_rig.h"

#include <errno.h>

#include "cpu/fast_exp.h"

static const struct backend *const cpu = &backend_cpu;
static const enum numeric numerics[] = {NUMERIC_FAST, NUMERIC_BF16, NUMERIC_REFERENCE};

static double silu(double v) {
    return v / (1 + exp(-v));
}

static bool is_bf16(float v) {
    return f32_bits(v) == f32_bits(bf16_round(v));
}

/* ---- fast_exp ----------------------------------------------------------------------------------------------------- */

static void fast_exp_is_within_2_ulp(void **state) {
    double worst = 0;

    (void)state;
    for (uint32_t bits = 0; bits < 0x42b17218; bits += 97) /* up to 88.72; every 97th float of both signs */
        for (int sign = 0; sign < 2; sign++) {
            float x = f32_from_bits(bits | (uint32_t)sign << 31), got, want;
            double error;

            if (x < -87.3f)
                continue;
            got = fast_exp(x);
            want = (float)exp((double)x);
            error = fabs(exp((double)x) - (double)got) / (double)(nextafterf(want, INFINITY) - want);
            worst = error > worst ? error : worst;
        }
    print_message("fast_exp: at most %.3f ulp off\n", worst);
    assert_true(worst <= 2);
    assert_true(fast_exp(0) == 1);
    assert_true(fast_exp(-1000) < 1e-37f && fast_exp(-INFINITY) < 1e-37f);
    assert_true(isinf(fast_exp(1000)) && isinf(fast_exp(INFINITY)));
    assert_true(isnan(fast_exp(NAN)));
}

/* ---- norm --------------------------------------------------------------------------------------------------------- */

static void norm_matches_double(void **state) {
    static const int sizes[] = {1, 15, 16, 17, 1000};

    (void)state;
    for (size_t m = 0; m < ARRAY_LEN(numerics); m++) {
        struct rig rig = rig_open(&(struct backend_options){.numeric = numerics[m], .n_threads = 1});

        for (size_t s = 0; s < ARRAY_LEN(sizes); s++) {
            int n = sizes[s];
            struct matrix x = matrix_new(&rig, 2, n, DTYPE_F32);
            float out[1000];
            double sum = 0;

            cpu_rms_norm(rig.device, x.f32, x.f32 + n, n, 1e-6f, out);
            for (int i = 0; i < n; i++)
                sum += (double)x.f32[i] * (double)x.f32[i];
            for (int i = 0; i < n; i++) {
                double want = (double)x.f32[i] / sqrt(sum / n + (double)1e-6f) * (double)x.f32[n + i];

                assert_true(fabs((double)out[i] - want) <= (numerics[m] == NUMERIC_FAST ? 1e-6 : 6e-8) * fabs(want));
            }
            matrix_free(&x);
        }
        rig_close(&rig);
    }
}

/* ---- linear ------------------------------------------------------------------------------------------------------- */

enum { K = 37, N = 50, N_SMALL = 6, ROWS = 19, STRIDE = N + 5 };

struct fixture {
    struct rig rig;
    struct batch batch;
    struct matrix w, w_small, x, norm, bias, y;
    struct weight *weight, *gate_up, *small;
};

static struct fixture fixture_new(const struct backend_options *options) {
    struct fixture f = {.rig = rig_open(options)};

    f.batch = rig_batch(ROWS);
    f.w = matrix_new(&f.rig, N, K, DTYPE_BF16);
    f.w_small = matrix_new(&f.rig, N_SMALL, K, DTYPE_BF16);
    f.x = matrix_new(&f.rig, ROWS, K + 3, DTYPE_F32);
    f.norm = matrix_new(&f.rig, 1, K, DTYPE_F32);
    f.bias = matrix_new(&f.rig, 1, N, DTYPE_F32);
    f.y = matrix_new(&f.rig, ROWS, STRIDE, DTYPE_F32);
    f.weight = rig_pack(&f.rig, &f.w, 1);
    f.gate_up = rig_pack_gate_up(&f.rig, &f.w, 1);
    f.small = rig_pack(&f.rig, &f.w_small, 1);
    return f;
}

static void fixture_free(struct fixture *f) {
    cpu->weight_free(f->rig.device, f->weight);
    cpu->weight_free(f->rig.device, f->gate_up);
    cpu->weight_free(f->rig.device, f->small);
    matrix_free(&f->w);
    matrix_free(&f->w_small);
    matrix_free(&f->x);
    matrix_free(&f->norm);
    matrix_free(&f->bias);
    matrix_free(&f->y);
    rig_batch_free(&f->batch);
    rig_close(&f->rig);
}

static struct linear_args args_of(struct fixture *f, enum linear_epilogue epilogue, bool has_norm, float *y) {
    return (struct linear_args){
        .batch = &f->batch,
        .x = f->x.f32,
        .x_stride = K + 3,
        .norm = has_norm ? f->norm.f32 : NULL,
        .eps = 1e-5f,
        .n_outs = 1,
        .out = {{epilogue == LINEAR_SWIGLU ? f->gate_up : f->weight, f->bias.f32, epilogue, y, STRIDE}},
    };
}

static void run_op(struct fixture *f, const struct linear_args *args) {
    struct program *program = rig_begin(&f->rig);

    assert_int_equal(cpu->linear(program, args), 0);
    assert_int_equal(cpu->program_end(program), 0);
    rig_run(&f->rig, program);
    cpu->program_free(program);
}

/* x of a row after the prologue, as the product sees it. */
static void prologue(const struct fixture *f, int row, bool has_norm, double *h) {
    float normed[K];
    const float *x = f->x.f32 + row * (K + 3);

    if (has_norm) {
        cpu_rms_norm(f->rig.device, x, f->norm.f32, K, 1e-5f, normed);
        x = normed;
    }
    for (int k = 0; k < K; k++)
        h[k] = (double)cpu_round_gemm_in(f->rig.device, x[k]);
}

static double dot(const float *w, const double *h) {
    double sum = 0;

    for (int k = 0; k < K; k++)
        sum += (double)w[k] * h[k];
    return sum;
}

static void check_epilogue(struct fixture *f, enum linear_epilogue epilogue, bool has_norm, int n_rows) {
    bool is_add = epilogue == LINEAR_ADD || epilogue == LINEAR_ADD_F32, is_swiglu = epilogue == LINEAR_SWIGLU;
    bool is_rounded =
        f->rig.device->numeric == NUMERIC_BF16 && epilogue != LINEAR_STORE_F32 && epilogue != LINEAR_ADD_F32;
    double tolerance = is_rounded ? 0x1.1p-8 : 2e-6;
    int n_cols = is_swiglu ? N / 2 : N;
    struct linear_args args;
    float y[ROWS * STRIDE];
    double h[K];

    memcpy(y, f->y.f32, sizeof y);
    args = args_of(f, epilogue, has_norm, y);
    *f->batch.n_rows = n_rows;
    run_op(f, &args);
    for (int r = 0; r < ROWS; r++) {
        prologue(f, r, has_norm, h);
        for (int c = 0; c < STRIDE; c++) {
            float before = f->y.f32[r * STRIDE + c], got = y[r * STRIDE + c];
            double want;

            if (r >= n_rows || c >= n_cols) {
                assert_int_equal(f32_bits(got), f32_bits(before));
                continue;
            }
            want = dot(f->w.f32 + c * K, h) + (double)f->bias.f32[c];
            if (is_swiglu)
                want = silu(want) * (dot(f->w.f32 + (n_cols + c) * K, h) + (double)f->bias.f32[n_cols + c]);
            if (is_add)
                want += (double)before;
            assert_true(fabs((double)got - want) <= tolerance * (fabs(want) + (is_rounded ? 1e-4 : 3)));
            if (is_rounded)
                assert_true(is_bf16(got));
        }
    }
}

static void every_epilogue_is_right_in_every_mode(void **state) {
    static const int row_counts[] = {1, 2, ROWS};

    (void)state;
    for (size_t m = 0; m < ARRAY_LEN(numerics); m++) {
        struct fixture f = fixture_new(&(struct backend_options){.numeric = numerics[m], .n_threads = 2});

        for (int e = LINEAR_STORE; e <= LINEAR_SWIGLU; e++)
            for (int has_norm = 0; has_norm < 2; has_norm++)
                for (size_t i = 0; i < ARRAY_LEN(row_counts); i++)
                    check_epilogue(&f, (enum linear_epilogue)e, has_norm, row_counts[i]);
        fixture_free(&f);
    }
}

/* Two outputs of one prologue, any worker count, one row or many: the bits of the separate ops. */
static void two_outputs_have_the_bits_of_two_ops(void **state) {
    float truth[ROWS * STRIDE], truth_small[ROWS * N_SMALL];

    (void)state;
    for (size_t m = 0; m < ARRAY_LEN(numerics); m++)
        for (int n_threads = 1; n_threads <= 3; n_threads++) {
            struct fixture f = fixture_new(&(struct backend_options){.numeric = numerics[m], .n_threads = n_threads});
            float y[ROWS * STRIDE], y_small[ROWS * N_SMALL];
            struct linear_args args = args_of(&f, LINEAR_SWIGLU, true, y);
            struct linear_out small = {f.small, NULL, LINEAR_STORE_F32, y_small, N_SMALL};

            memcpy(y, f.y.f32, sizeof y);
            if (n_threads == 1) {
                run_op(&f, &args);
                memcpy(truth, y, sizeof y);
                args.out[0] = small;
                run_op(&f, &args);
                memcpy(truth_small, y_small, sizeof y_small);
            }
            memcpy(y, f.y.f32, sizeof y);
            memset(y_small, 0xff, sizeof y_small);
            args = args_of(&f, LINEAR_SWIGLU, true, y);
            args.n_outs = 2;
            args.out[1] = small;
            run_op(&f, &args);
            assert_memory_equal(y, truth, sizeof y);
            assert_memory_equal(y_small, truth_small, sizeof y_small);

            for (int r = 0; r < ROWS; r++) { /* row by row */
                args.x = f.x.f32 + r * (K + 3);
                *f.batch.n_rows = 1;
                memset(y, 0xff, sizeof y);
                run_op(&f, &args);
                assert_memory_equal(y, truth + r * STRIDE, N / 2 * sizeof *y);
                assert_memory_equal(y_small, truth_small + r * N_SMALL, N_SMALL * sizeof *y);
            }
            fixture_free(&f);
        }
}

static void a_batch_without_segs_does_nothing(void **state) {
    struct fixture f = fixture_new(&(struct backend_options){.n_threads = 2});
    struct linear_args args = args_of(&f, LINEAR_STORE, true, f.y.f32);
    struct embed_args embed = {&f.batch, f.weight, f.y.f32};
    struct program *program = rig_begin(&f.rig);

    (void)state;
    assert_int_equal(cpu->linear(program, &args), 0);
    assert_int_equal(cpu->embed(program, &embed), 0);
    assert_int_equal(cpu->program_end(program), 0);
    *f.batch.n_segs = 0; /* n_rows is then whatever it was */
    rig_run(&f.rig, program);
    assert_memory_equal(f.y.f32, f.y.raw, ROWS * STRIDE * sizeof(float));
    cpu->program_free(program);
    fixture_free(&f);
}

static void wrong_arguments_are_refused(void **state) {
    struct fixture f = fixture_new(&(struct backend_options){.n_threads = 1});
    struct program *program = rig_begin(&f.rig);
    struct linear_args args;

    (void)state;
#define REFUSES(change)                                                                                                \
    do {                                                                                                               \
        args = args_of(&f, LINEAR_STORE, false, f.y.f32);                                                              \
        change;                                                                                                        \
        assert_int_equal(cpu->linear(program, &args), -EINVAL);                                                        \
    } while (0)
    REFUSES(args.n_outs = 0);
    REFUSES(args.n_outs = 3);
    REFUSES(args.x_stride = K - 1);
    REFUSES(args.out[0].weight = NULL);
    REFUSES(args.out[0].y_stride = N - 1);
    REFUSES(args.out[0].weight = f.gate_up);
    REFUSES(args.out[0].epilogue = LINEAR_SWIGLU);
    REFUSES(args.n_outs = 2);
#undef REFUSES
    assert_int_equal(cpu->embed(program, &(struct embed_args){&f.batch, f.gate_up, f.y.f32}), -EINVAL);
    cpu->program_free(program);
    fixture_free(&f);
}

/* ---- embed -------------------------------------------------------------------------------------------------------- */

static void embed_gathers_rows_and_reads_row_0_for_foreign_ids(void **state) {
    static const int32_t ids[] = {0, 49, 16, 15, 31, -1, 50, INT32_MAX, INT32_MIN, 7};
    static const enum dtype dtypes[] = {DTYPE_BF16, DTYPE_F32};

    (void)state;
    for (size_t m = 0; m < ARRAY_LEN(numerics); m++)
        for (size_t d = 0; d < ARRAY_LEN(dtypes); d++) {
            struct rig rig = rig_open(&(struct backend_options){.numeric = numerics[m], .n_threads = 2});
            struct matrix table = matrix_new(&rig, N, K, dtypes[d]);
            struct weight *weight = rig_pack(&rig, &table, 1);
            struct batch batch = rig_batch(ARRAY_LEN(ids));
            struct program *program = rig_begin(&rig);
            float x[(ARRAY_LEN(ids) + 1) * K];

            memset(x, 0xff, sizeof x);
            memcpy(batch.row_token, ids, sizeof ids);
            assert_int_equal(cpu->embed(program, &(struct embed_args){&batch, weight, x}), 0);
            assert_int_equal(cpu->program_end(program), 0);
            rig_run(&rig, program);
            for (size_t r = 0; r < ARRAY_LEN(ids); r++)
                for (int k = 0; k < K; k++) {
                    float v = table.f32[(ids[r] >= 0 && ids[r] < N ? ids[r] : 0) * K + k];

                    assert_true(x[r * K + (size_t)k] == (numerics[m] == NUMERIC_REFERENCE ? v : bf16_round(v)));
                }
            assert_int_equal(f32_bits(x[ARRAY_LEN(ids) * K]), 0xffffffffu);
            cpu->program_free(program);
            rig_batch_free(&batch);
            cpu->weight_free(rig.device, weight);
            matrix_free(&table);
            rig_close(&rig);
        }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fast_exp_is_within_2_ulp),
        cmocka_unit_test(norm_matches_double),
        cmocka_unit_test(every_epilogue_is_right_in_every_mode),
        cmocka_unit_test(two_outputs_have_the_bits_of_two_ops),
        cmocka_unit_test(a_batch_without_segs_does_nothing),
        cmocka_unit_test(wrong_arguments_are_refused),
        cmocka_unit_test(embed_gathers_rows_and_reads_row_0_for_foreign_ids),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
