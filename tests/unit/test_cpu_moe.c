/* The op moe against a dense loop in double, with planted ties, forced routings and every batch and worker count. */
#include "cpu_rig.h"

#include <errno.h>

static const struct backend *const cpu = &backend_cpu;
static const enum numeric numerics[] = {NUMERIC_FAST, NUMERIC_BF16, NUMERIC_REFERENCE};

enum { H = 41, N_EXPERTS = 9, TOP_K = 3, WIDTH = 21, SHARED = 35, ROWS = 40 };

struct fixture {
    struct rig rig;
    struct batch batch;
    struct matrix router, gate_up, down, shared_gate_up, shared_down, norm, x;
    struct weight *w_router, *w_gate_up, *w_down, *w_shared_gate_up, *w_shared_down;
    int32_t routing[ROWS * TOP_K];
    float y[ROWS * H];
};

static struct fixture fixture_new(const struct backend_options *options) {
    struct fixture f = {.rig = rig_open(options)};

    f.batch = rig_batch(ROWS);
    f.router = matrix_new(&f.rig, N_EXPERTS + 1, H, DTYPE_BF16);
    f.gate_up = matrix_new(&f.rig, N_EXPERTS * 2 * WIDTH, H, DTYPE_BF16);
    f.down = matrix_new(&f.rig, N_EXPERTS * H, WIDTH, DTYPE_BF16);
    f.shared_gate_up = matrix_new(&f.rig, 2 * SHARED, H, DTYPE_BF16);
    f.shared_down = matrix_new(&f.rig, H, SHARED, DTYPE_BF16);
    f.norm = matrix_new(&f.rig, 1, H, DTYPE_F32);
    f.x = matrix_new(&f.rig, ROWS, H, DTYPE_BF16);
    f.w_gate_up = rig_pack_gate_up(&f.rig, &f.gate_up, N_EXPERTS);
    f.w_down = rig_pack(&f.rig, &f.down, N_EXPERTS);
    f.w_shared_gate_up = rig_pack_gate_up(&f.rig, &f.shared_gate_up, 1);
    f.w_shared_down = rig_pack(&f.rig, &f.shared_down, 1);
    return f;
}

static void fixture_free(struct fixture *f) {
    struct matrix *matrices[] = {&f->router,      &f->gate_up, &f->down, &f->shared_gate_up,
                                 &f->shared_down, &f->norm,    &f->x};

    cpu->weight_free(f->rig.device, f->w_router);
    cpu->weight_free(f->rig.device, f->w_gate_up);
    cpu->weight_free(f->rig.device, f->w_down);
    cpu->weight_free(f->rig.device, f->w_shared_gate_up);
    cpu->weight_free(f->rig.device, f->w_shared_down);
    for (size_t i = 0; i < ARRAY_LEN(matrices); i++)
        matrix_free(matrices[i]);
    rig_batch_free(&f->batch);
    rig_close(&f->rig);
}

static struct moe_args args_of(struct fixture *f, const int32_t *forced) {
    return (struct moe_args){
        .batch = &f->batch,
        .x = f->y,
        .hidden = H,
        .n_experts = N_EXPERTS,
        .top_k = TOP_K,
        .width = WIDTH,
        .shared_width = SHARED,
        .norm = f->norm.f32,
        .eps = 1e-6f,
        .router = f->w_router,
        .gate_up = f->w_gate_up,
        .down = f->w_down,
        .shared_gate_up = f->w_shared_gate_up,
        .shared_down = f->w_shared_down,
        .forced = forced,
        .routing = f->routing,
    };
}

/* Runs rows [first, first + n_rows) of x into y. */
static void run_rows(struct fixture *f, const int32_t *forced, int first, int n_rows) {
    struct program *program = rig_begin(&f->rig);
    struct moe_args args;

    if (f->w_router == NULL) /* a test may have changed it */
        f->w_router = rig_pack(&f->rig, &f->router, 1);
    args = args_of(f, forced == NULL ? NULL : forced + first * TOP_K);
    memset(f->y, 0xff, sizeof f->y);
    memset(f->routing, 0xff, sizeof f->routing);
    memcpy(f->y, f->x.f32 + first * H, (size_t)n_rows * H * sizeof *f->y);
    *f->batch.n_rows = n_rows;
    assert_int_equal(cpu->moe(program, &args), 0);
    assert_int_equal(cpu->program_end(program), 0);
    rig_run(&f->rig, program);
    for (int i = n_rows * H; i < ROWS * H; i++)
        assert_int_equal(f32_bits(f->y[i]), 0xffffffffu);
    for (int i = n_rows * TOP_K; i < ROWS * TOP_K; i++)
        assert_int_equal(f->routing[i], -1);
    cpu->program_free(program);
}

static void multiply(const float *w, int n, int k, const double *x, double *y) {
    for (int i = 0; i < n; i++) {
        y[i] = 0;
        for (int j = 0; j < k; j++)
            y[i] += (double)w[i * k + j] * x[j];
    }
}

static void expert(const struct fixture *f, const float *gate_up, const float *down, int width, const double *h,
                   double *y) {
    double both[2 * SHARED], act[SHARED];

    multiply(gate_up, 2 * width, H, h, both);
    for (int i = 0; i < width; i++)
        act[i] = (double)cpu_round_gemm_in(f->rig.device, (float)(both[i] / (1 + exp(-both[i])) * both[width + i]));
    multiply(down, H, width, act, y);
}

static void check_row(const struct fixture *f, int row, const int32_t *forced) {
    double tolerance = f->rig.device->numeric == NUMERIC_BF16   ? 0x1p-7
                       : f->rig.device->numeric == NUMERIC_FAST ? 2e-2
                                                                : 1e-5;
    float normed[H];
    double h[H], logits[N_EXPERTS + 1], out[H], y[H], max = -INFINITY, sum = 0;
    int32_t ids[TOP_K];
    bool used[N_EXPERTS] = {false};

    cpu_rms_norm(f->rig.device, f->x.f32 + row * H, f->norm.f32, H, 1e-6f, normed);
    for (int i = 0; i < H; i++)
        h[i] = (double)cpu_round_gemm_in(f->rig.device, normed[i]);
    multiply(f->router.f32, N_EXPERTS + 1, H, h, logits);
    for (int j = 0; j < TOP_K; j++) {
        ids[j] = -1;
        for (int e = 0; e < N_EXPERTS; e++)
            if (!used[e] && (ids[j] < 0 || (float)logits[e] > (float)logits[ids[j]]))
                ids[j] = e;
        used[ids[j]] = true;
        if (forced != NULL)
            ids[j] = forced[row * TOP_K + j];
        assert_int_equal(f->routing[row * TOP_K + j], ids[j]);
    }
    for (int e = 0; e < N_EXPERTS; e++)
        max = fmax(max, logits[e]);
    for (int j = 0; j < TOP_K; j++)
        sum += exp(logits[ids[j]] - max);
    for (int i = 0; i < H; i++)
        y[i] = (double)f->x.f32[row * H + i];
    for (int j = 0; j < TOP_K; j++) {
        int e = ids[j];

        expert(f, f->gate_up.f32 + e * 2 * WIDTH * H, f->down.f32 + e * H * WIDTH, WIDTH, h, out);
        for (int i = 0; i < H; i++)
            y[i] += exp(logits[e] - max) / sum * out[i];
    }
    expert(f, f->shared_gate_up.f32, f->shared_down.f32, SHARED, h, out);
    for (int i = 0; i < H; i++) {
        float got = f->y[row * H + i];

        y[i] += out[i] / (1 + exp(-logits[N_EXPERTS]));
        assert_true(fabs((double)got - y[i]) <= tolerance * (fabs(y[i]) + 1));
        if (f->rig.device->numeric == NUMERIC_BF16)
            assert_int_equal(f32_bits(got), f32_bits(bf16_round(got)));
    }
}

static void moe_matches_a_dense_loop(void **state) {
    static const int row_counts[] = {1, 2, 7, ROWS};

    (void)state;
    for (size_t m = 0; m < ARRAY_LEN(numerics); m++) {
        struct fixture f = fixture_new(&(struct backend_options){.numeric = numerics[m], .n_threads = 2});

        for (size_t i = 0; i < ARRAY_LEN(row_counts); i++) {
            run_rows(&f, NULL, 0, row_counts[i]);
            for (int r = 0; r < row_counts[i]; r++)
                check_row(&f, r, NULL);
        }
        fixture_free(&f);
    }
}

static void ties_go_to_the_lower_id(void **state) {
    (void)state;
    for (size_t m = 0; m < ARRAY_LEN(numerics); m++) {
        struct fixture f = fixture_new(&(struct backend_options){.numeric = numerics[m], .n_threads = 2});

        for (int e = 1; e < N_EXPERTS; e++) /* all equal, but for one pair with equal larger or smaller logits */
            memcpy((uint16_t *)f.router.raw + e * H, f.router.raw, H * 2);
        for (int k = 0; k < H; k++)
            for (int e = 4; e < 8; e += 3)
                ((uint16_t *)f.router.raw)[e * H + k] ^= 0x8000;
        for (int i = 0; i < (N_EXPERTS + 1) * H; i++)
            f.router.f32[i] = bf16_to_f32(((uint16_t *)f.router.raw)[i]);
        run_rows(&f, NULL, 0, ROWS);
        for (int r = 0; r < ROWS; r++) {
            const int32_t *ids = f.routing + r * TOP_K;

            if (ids[0] == 4) {
                assert_int_equal(ids[1], 7);
                assert_int_equal(ids[2], 0);
            } else {
                for (int j = 0; j < TOP_K; j++)
                    assert_int_equal(ids[j], j);
            }
            check_row(&f, r, NULL);
        }
        fixture_free(&f);
    }
}

/* All rows to one expert, an expert several times in a row, cyclic, and ids out of range (read as 0). */
static void forced_routings_are_followed(void **state) {
    (void)state;
    for (size_t m = 0; m < ARRAY_LEN(numerics); m++)
        for (int kind = 0; kind < 3; kind++) {
            struct fixture f = fixture_new(&(struct backend_options){.numeric = numerics[m], .n_threads = 3});
            int32_t forced[ROWS * TOP_K];

            for (int i = 0; i < ROWS * TOP_K; i++)
                forced[i] = kind == 0 ? 5 : kind == 1 ? i % N_EXPERTS : (i % TOP_K + 6) % N_EXPERTS;
            run_rows(&f, forced, 0, ROWS);
            for (int r = 0; r < ROWS; r++)
                check_row(&f, r, forced);
            run_rows(&f, forced, 0, 1);
            check_row(&f, 0, forced);
            forced[0] = -1;
            forced[1] = N_EXPERTS;
            run_rows(&f, forced, 0, 1);
            assert_int_equal(f.routing[0], 0);
            assert_int_equal(f.routing[1], 0);
            fixture_free(&f);
        }
}

static void rows_have_the_same_bits_in_every_batch(void **state) {
    static const int row_counts[] = {1, 2, 3, 16, 17};
    float truth[ROWS * H];

    (void)state;
    for (size_t m = 0; m < ARRAY_LEN(numerics); m++)
        for (int n_threads = 1; n_threads <= 3; n_threads++) {
            struct fixture f = fixture_new(&(struct backend_options){.numeric = numerics[m], .n_threads = n_threads});

            run_rows(&f, NULL, 0, ROWS);
            if (n_threads == 1)
                memcpy(truth, f.y, sizeof truth);
            assert_memory_equal(f.y, truth, sizeof truth);
            for (size_t i = 0; i < ARRAY_LEN(row_counts); i++)
                for (int first = 0; first + row_counts[i] <= ROWS; first += row_counts[i]) {
                    run_rows(&f, NULL, first, row_counts[i]);
                    assert_memory_equal(f.y, truth + first * H, (size_t)row_counts[i] * H * sizeof *truth);
                }
            fixture_free(&f);
        }
}

static void a_batch_without_segs_does_nothing(void **state) {
    struct fixture f = fixture_new(&(struct backend_options){.n_threads = 1});

    (void)state;
    *f.batch.n_segs = 0;
    run_rows(&f, NULL, 0, 0);
    fixture_free(&f);
}

static void wrong_arguments_are_refused(void **state) {
    struct fixture f = fixture_new(&(struct backend_options){.n_threads = 1});
    struct program *program = rig_begin(&f.rig);
    struct moe_args args;

    (void)state;
    f.w_router = rig_pack(&f.rig, &f.router, 1);
#define REFUSES(change)                                                                                                \
    do {                                                                                                               \
        args = args_of(&f, NULL);                                                                                      \
        change;                                                                                                        \
        assert_int_equal(cpu->moe(program, &args), -EINVAL);                                                           \
    } while (0)
    REFUSES(args.top_k = 0);
    REFUSES(args.top_k = N_EXPERTS + 1);
    REFUSES(args.n_experts = N_EXPERTS - 1);
    REFUSES(args.hidden = H + 1);
    REFUSES(args.width = WIDTH + 1);
    REFUSES(args.shared_width = SHARED - 1);
    REFUSES(args.router = NULL);
    REFUSES(args.gate_up = f.w_down);
    REFUSES(args.shared_down = NULL);
#undef REFUSES
    cpu->program_free(program);
    fixture_free(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(moe_matches_a_dense_loop),          cmocka_unit_test(ties_go_to_the_lower_id),
        cmocka_unit_test(forced_routings_are_followed),      cmocka_unit_test(rows_have_the_same_bits_in_every_batch),
        cmocka_unit_test(a_batch_without_segs_does_nothing), cmocka_unit_test(wrong_arguments_are_refused),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
