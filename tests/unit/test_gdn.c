#include "fake/cpu_program.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

/* One delta net of two layers over a few slots, with everything an op reads in one place. */
enum { N_LAYERS = 2, N_SLOTS = 3, N_STATE_SLOTS = 6, ROWS_MAX = 600 };

struct shape {
    int hk, hv, dk, dv, taps;
};
static const struct shape shape_small = {1, 2, 2, 2, 4}; /* only the oracle runs it */
static const struct shape shape_wide = {2, 4, 24, 16, 4};

struct net {
    struct fake_device fake;
    struct state_view state;
    int32_t live[N_SLOTS], rolling[N_SLOTS];
    int conv_dim, mz_width;
    float *conv, *neg_a, *dt_bias, *norm; /* of both layers */
    float *mz, *ba, *out;                 /* [N_LAYERS, ROWS_MAX, ...] */
    struct gdn_record record;
    struct batch *batch;
    int32_t commit[N_SLOTS], snapshot[N_SLOTS];
    enum gate_act gate;
};

static void net_init(struct net *n, const struct shape *s, enum numeric numeric, enum cpu_isa isa, int n_workers) {
    struct fake_random random = {7};
    size_t layer_floats;

    memset(n, 0, sizeof *n);
    fake_device_init(&n->fake, numeric, isa, n_workers);
    n->state = (struct state_view){.n_layers = N_LAYERS,
                                   .n_k_heads = s->hk,
                                   .n_v_heads = s->hv,
                                   .head_dim_k = s->dk,
                                   .head_dim_v = s->dv,
                                   .conv_taps = s->taps,
                                   .live = n->live,
                                   .rolling = n->rolling};
    n->state.slot_bytes = state_slot_bytes(&n->state, n->fake.device.caps.conv_dtype);
    n->state.arena = aligned_alloc(64, N_STATE_SLOTS * n->state.slot_bytes);
    memset(n->state.arena, 0xff, N_STATE_SLOTS * n->state.slot_bytes); /* recycled memory: NaN everywhere */
    for (int i = 0; i < N_SLOTS; i++) {
        n->live[i] = 4 - i;
        n->rolling[i] = i == 0 ? 5 : i == 1 ? 1 : 0;
        memset((char *)n->state.arena + (size_t)n->live[i] * n->state.slot_bytes, 0, n->state.slot_bytes);
    }
    n->conv_dim = state_conv_dim(&n->state);
    n->mz_width = n->conv_dim + s->hv * s->dv + 8; /* a stride wider than the row */
    layer_floats = (size_t)(n->conv_dim * s->taps);
    n->conv = fake_random_floats(&random, N_LAYERS * layer_floats, -0.6f, 0.6f);
    n->neg_a = fake_random_floats(&random, (size_t)(N_LAYERS * s->hv), -2, -0.01f);
    n->dt_bias = fake_random_floats(&random, (size_t)(N_LAYERS * s->hv), -2, 2);
    n->norm = fake_random_floats(&random, (size_t)(N_LAYERS * s->dv), 0.5f, 1.5f);
    n->mz = fake_random_floats(&random, (size_t)(N_LAYERS * ROWS_MAX * n->mz_width), -3, 3);
    n->ba = fake_random_floats(&random, (size_t)(N_LAYERS * ROWS_MAX * 2 * s->hv), -3, 3);
    n->out = calloc((size_t)(N_LAYERS * ROWS_MAX * s->hv * s->dv), sizeof(float));
    n->record.m = calloc((size_t)(N_LAYERS * ROWS_MAX * n->conv_dim), sizeof(float));
    n->record.kv = calloc((size_t)(N_LAYERS * ROWS_MAX * n->conv_dim), sizeof(float));
    n->record.g_beta = calloc((size_t)(N_LAYERS * ROWS_MAX * 2 * s->hv), sizeof(float));
    n->batch = fake_batch_new(N_SLOTS, ROWS_MAX);
}

static void net_deinit(struct net *n) {
    void *const owned[] = {n->state.arena, n->conv, n->neg_a,    n->dt_bias,   n->norm,         n->mz,
                           n->ba,          n->out,  n->record.m, n->record.kv, n->record.g_beta};

    for (size_t i = 0; i < ARRAY_LEN(owned); i++)
        free(owned[i]);
    fake_batch_free(n->batch);
}

static size_t out_width(const struct net *n) {
    return (size_t)(n->state.n_v_heads * n->state.head_dim_v);
}

/* Runs both layers over the batch, whose rows take their inputs from input row in_row0 + row on. */
static void net_run(struct net *n, enum gdn_mode mode, int in_row0) {
    struct program *program = fake_program_new(&n->fake);
    const int hv = n->state.n_v_heads;

    for (int l = 0; l < N_LAYERS; l++) {
        const size_t row = (size_t)(l * ROWS_MAX + in_row0);

        assert_int_equal(cpu_gdn(program,
                                 &(struct gdn_args){
                                     .batch = n->batch,
                                     .state = &n->state,
                                     .layer = l,
                                     .mode = mode,
                                     .mz = n->mz + row * (size_t)n->mz_width,
                                     .mz_stride = n->mz_width,
                                     .ba = n->ba + row * 2 * (size_t)hv,
                                     .conv = n->conv + l * n->conv_dim * n->state.conv_taps,
                                     .neg_a = n->neg_a + l * hv,
                                     .dt_bias = n->dt_bias + l * hv,
                                     .norm = n->norm + l * n->state.head_dim_v,
                                     .eps = 1e-6f,
                                     .gate = n->gate,
                                     .record = mode == GDN_FROZEN ? &n->record : NULL,
                                     .out = n->out + row * out_width(n),
                                 }),
                         0);
    }
    fake_program_run(program);
    fake_program_free(program);
}

static void net_commit(struct net *n) {
    struct program *program = fake_program_new(&n->fake);

    assert_int_equal(
        cpu_gdn_commit(program, &(struct gdn_commit_args){n->batch, &n->state, &n->record, n->commit, n->snapshot}), 0);
    fake_program_run(program);
    fake_program_free(program);
}

/* Rows [begin, end) of the inputs for one seq, as one prefill seg. */
static void net_advance(struct net *n, int slot, int begin, int end) {
    fake_batch_clear(n->batch);
    fake_batch_add(n->batch, slot, begin, end - begin, SEG_PREFILL);
    net_run(n, GDN_ADVANCE, begin);
}

/* ... as a verify pass of which `commit` rows stand. */
static void net_verify(struct net *n, int slot, int begin, int end, int commit, int snapshot) {
    fake_batch_clear(n->batch);
    fake_batch_add(n->batch, slot, begin, end - begin, 0);
    net_run(n, GDN_FROZEN, begin);
    n->commit[0] = commit;
    n->snapshot[0] = snapshot;
    net_commit(n);
}

static const char *slot_at(const struct net *n, int state_slot) {
    return (const char *)n->state.arena + (size_t)state_slot * n->state.slot_bytes;
}

static void assert_same_slot(const struct net *a, int slot_a, const struct net *b, int slot_b) {
    const size_t layer_bytes = state_layer_bytes(&a->state, a->fake.device.caps.conv_dtype);
    const size_t used = (size_t)(a->state.n_v_heads * a->state.head_dim_v * a->state.head_dim_k) * 4 +
                        (size_t)((a->state.conv_taps - 1) * a->conv_dim) * dtype_bytes(a->fake.device.caps.conv_dtype);

    for (size_t l = 0; l < N_LAYERS; l++)
        assert_memory_equal(slot_at(a, slot_a) + l * layer_bytes, slot_at(b, slot_b) + l * layer_bytes, used);
}

static void assert_same_state(const struct net *a, const struct net *b, int slot) {
    assert_same_slot(a, a->live[slot], b, b->live[slot]);
}

static void assert_same_out(const struct net *a, const struct net *b, int begin, int end) {
    for (int l = 0; l < N_LAYERS; l++) {
        size_t at = (size_t)(l * ROWS_MAX + begin) * out_width(a);

        assert_memory_equal(a->out + at, b->out + at, (size_t)(end - begin) * out_width(a) * sizeof(float));
    }
}

/* Calls test for every numeric mode and path this machine can run. */
static void each_mode(void (*test)(const struct shape *shape, enum numeric numeric, enum cpu_isa isa)) {
    for (int numeric = NUMERIC_FAST; numeric <= NUMERIC_REFERENCE; numeric++) {
        test(&shape_small, (enum numeric)numeric, CPU_ISA_SCALAR);
        test(&shape_wide, (enum numeric)numeric, CPU_ISA_SCALAR);
    }
    if (fake_best_isa() == CPU_ISA_AVX2) {
        test(&shape_small, NUMERIC_FAST, CPU_ISA_AVX2);
        test(&shape_wide, NUMERIC_FAST, CPU_ISA_AVX2);
    }
}

static void assert_close(const float *x, const float *want, size_t n, float tolerance) {
    for (size_t i = 0; i < n; i++)
        if (!(fabsf(x[i] - want[i]) <= tolerance * fmaxf(1, fabsf(want[i]))))
            fail_msg("element %zu: %.9g, want %.9g", i, (double)x[i], (double)want[i]);
}

/* ---- known values ---- */

/* An identity conv is not an identity op (SiLU follows), so inputs are the inverse SiLU of the wanted values. */
static float silu_inverse(double y) {
    double x = y > 0 ? y + 1 : 0, below = -1.2784645;

    if (y < 0) { /* the branch right of the minimum */
        double lo = below, hi = 0;

        for (int i = 0; i < 200; i++) {
            x = (lo + hi) / 2;
            *(x / (1 + exp(-x)) > y ? &hi : &lo) = x;
        }
        return (float)x;
    }
    for (int i = 0; i < 200; i++)
        x -= (x / (1 + exp(-x)) - y) / (1 / (1 + exp(-x)) * (1 + x / (1 + exp(x))) + 1e-30);
    return (float)x;
}

/* q and k only count up to a factor, so their values below SiLU's minimum are reached by scaling; v is scaled by 1/16 and so
 * are u, S and o. */
static void recurrence_follows_the_known_vector(void **state) {
    static const double q[3][2] = {{1, 2}, {0.5, -1}, {-1, 0.25}}, k[3][2] = {{2, -1}, {1, 1}, {0.5, 3}},
                        v[3][2] = {{1, -2}, {0.5, 4}, {-3, 1}};
    const float a[3] = {0.1f, -0.4f, 0.7f}, b[3] = {0.3f, -1.2f, 2.0f};
    const float g[3] = {-0.6936677f, -0.5187440f, -0.9338930f}, beta[3] = {0.5744425f, 0.2314752f, 0.8807971f};
    const float s_want[4] = {-0.2874717f, -2.6321982f, 0.1189784f, 0.9203888f};
    const float o_want[6] = {0, 0, 0.1731516f, -0.6051002f, -0.2542142f, 0.0762269f};
    const float identity[6 * 4] = {0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1};
    const float neg_a = -0.5f, dt_bias = 1, ones[2] = {1, 1};
    struct shape shape = {1, 1, 2, 2, 4};
    struct net n;
    struct program *program;
    float mz[3 * 8], ba[6], out[6], s[4];

    (void)state;
    net_init(&n, &shape, NUMERIC_REFERENCE, CPU_ISA_SCALAR, 1);
    for (int t = 0; t < 3; t++) {
        for (int i = 0; i < 2; i++) {
            mz[t * 8 + i] = silu_inverse(q[t][i] * 0.1);
            mz[t * 8 + 2 + i] = silu_inverse(k[t][i] * 0.1);
            mz[t * 8 + 4 + i] = silu_inverse(v[t][i] / 16);
            mz[t * 8 + 6 + i] = i == 0 ? 0.5f : -1;
        }
        ba[2 * t] = b[t];
        ba[2 * t + 1] = a[t];
    }
    fake_batch_add(n.batch, 0, 0, 3, 0);
    program = fake_program_new(&n.fake);
    /* eps so large that the norm divides by a constant: out = o / sqrt(eps) * act(z) */
    assert_int_equal(cpu_gdn(program, &(struct gdn_args){.batch = n.batch,
                                                         .state = &n.state,
                                                         .mode = GDN_FROZEN,
                                                         .mz = mz,
                                                         .mz_stride = 8,
                                                         .ba = ba,
                                                         .conv = identity,
                                                         .neg_a = &neg_a,
                                                         .dt_bias = &dt_bias,
                                                         .norm = ones,
                                                         .eps = 1e8f,
                                                         .gate = GATE_SIGMOID,
                                                         .record = &n.record,
                                                         .out = out}),
                     0);
    fake_program_run(program);
    n.commit[0] = 3;
    net_commit(&n);
    for (int t = 0; t < 3; t++)
        for (int i = 0; i < 2; i++)
            out[2 * t + i] *= 1e4f * 16 * (1 + expf(i == 0 ? -0.5f : 1));
    /* l2 norm of a tenth sees the eps 1e-6 a little more */
    assert_close(out, o_want, 6, 5e-5f);
    memcpy(s, slot_at(&n, n.live[0]), sizeof s);
    for (int i = 0; i < 4; i++)
        s[i] *= 16;
    assert_close(s, s_want, 4, 2e-4f);
    for (int t = 0; t < 3; t++) {
        assert_close(n.record.g_beta + 2 * t, &g[t], 1, 1e-6f);
        assert_close(n.record.g_beta + 2 * t + 1, &beta[t], 1, 1e-6f);
    }
    fake_program_free(program);
    net_deinit(&n);
}

static void conv_starts_from_zeros_and_ends_with_the_last_columns(void **state) {
    const float m[5] = {1, 2, -1, 0.5f, 3}, want[5] = {0.2394751f, 0.8252861f, 0, -0.1605249f, 1.4909174f};
    const float taps[4] = {0.1f, -0.2f, 0.3f, 0.4f};
    struct shape shape = {1, 1, 2, 2, 4};
    struct net n;
    float *columns;

    (void)state;
    net_init(&n, &shape, NUMERIC_REFERENCE, CPU_ISA_SCALAR, 1);
    for (int t = 0; t < 5; t++)
        for (int ch = 0; ch < n.conv_dim; ch++)
            n.mz[t * n.mz_width + ch] = m[t];
    for (int ch = 0; ch < n.conv_dim; ch++)
        memcpy(n.conv + ch * 4, taps, sizeof taps);
    net_verify(&n, 0, 0, 5, 5, 0);
    for (int t = 0; t < 5; t++)
        for (int i = 0; i < 4; i++) /* k and v */
            assert_close(n.record.kv + t * 4 + i, &want[t], 1, 2e-7f);
    columns = (float *)(uintptr_t)slot_at(&n, n.live[0]) + 4;
    for (int c = 0; c < 3; c++)
        for (int ch = 0; ch < n.conv_dim; ch++)
            assert_true(columns[c * n.conv_dim + ch] == m[2 + c]);
    net_deinit(&n);
}

/* ---- one row after the other, or many at once: the same bits ---- */

static void check_verify(const struct shape *shape, enum numeric numeric, enum cpu_isa isa) {
    struct net steps, block, advance;

    for (int commit = 1; commit <= BLOCK_ROWS_MAX; commit++) {
        net_init(&steps, shape, numeric, isa, 1);
        net_init(&block, shape, numeric, isa, 2);
        net_init(&advance, shape, numeric, isa, 1);
        net_advance(&steps, 0, 0, 10);
        net_advance(&block, 0, 0, 10);
        for (int t = 0; t < commit; t++)
            net_verify(&steps, 0, 10 + t, 11 + t, 1, 0);
        net_verify(&block, 0, 10, 10 + BLOCK_ROWS_MAX, commit, 0);
        net_advance(&advance, 0, 0, 10 + commit);
        assert_same_out(&steps, &block, 10, 10 + commit);
        assert_same_out(&steps, &advance, 0, 10 + commit);
        assert_same_state(&steps, &block, 0);
        assert_same_state(&steps, &advance, 0);
        net_deinit(&steps);
        net_deinit(&block);
        net_deinit(&advance);
    }
}

static void a_verified_block_equals_single_steps_for_every_accepted_length(void **state) {
    (void)state;
    each_mode(check_verify);
}

static void check_splits(const struct shape *shape, enum numeric numeric, enum cpu_isa isa) {
    struct fake_random random = {11};
    struct net whole, parts;

    net_init(&whole, shape, numeric, isa, 3);
    net_init(&parts, shape, numeric, isa, 1);
    net_advance(&whole, 1, 0, 300);
    for (int t = 0, n; t < 300; t += n) {
        n = min_int(1 + fake_random_below(&random, 70), 300 - t);
        net_advance(&parts, 1, t, t + n);
    }
    assert_same_out(&whole, &parts, 0, 300);
    assert_same_state(&whole, &parts, 1);
    net_deinit(&whole);
    net_deinit(&parts);
}

static void prefill_may_be_split_anywhere(void **state) {
    (void)state;
    each_mode(check_splits);
}

static void check_snapshots(const struct shape *shape, enum numeric numeric, enum cpu_isa isa) {
    for (int at = 1; at <= 9; at += 2) {
        struct net block, steps;

        net_init(&block, shape, numeric, isa, 2);
        net_init(&steps, shape, numeric, isa, 1);
        net_advance(&block, 0, 0, 60);
        net_verify(&block, 0, 60, 76, 9, at);
        net_advance(&steps, 0, 0, 60 + at);
        assert_same_slot(&block, block.rolling[0], &steps, steps.live[0]);
        net_advance(&steps, 0, 60 + at, 69);
        assert_same_state(&block, &steps, 0);
        net_deinit(&block);
        net_deinit(&steps);
    }
}

static void a_snapshot_is_the_state_after_exactly_its_rows(void **state) {
    (void)state;
    each_mode(check_snapshots);
}

static void check_batch(const struct shape *shape, enum numeric numeric, enum cpu_isa isa) {
    struct net alone, together[3];

    net_init(&alone, shape, numeric, isa, 1);
    net_advance(&alone, 0, 0, 16);
    net_advance(&alone, 2, 16, 19);
    net_verify(&alone, 0, 30, 46, 4, 0);
    net_verify(&alone, 2, 46, 47, 1, 1);
    for (int w = 0; w < 3; w++) {
        struct net *n = &together[w];

        net_init(n, shape, numeric, isa, w + 1);
        n->fake.backwards = w == 2;
        fake_batch_clear(n->batch);
        fake_batch_add(n->batch, 0, 0, 16, SEG_PREFILL);
        fake_batch_add(n->batch, 2, 0, 3, SEG_PREFILL);
        net_run(n, GDN_ADVANCE, 0);
        fake_batch_clear(n->batch);
        fake_batch_add(n->batch, 0, 16, 16, 0);
        fake_batch_add(n->batch, 2, 3, 1, 0);
        net_run(n, GDN_FROZEN, 30);
        n->commit[0] = 4;
        n->commit[1] = n->snapshot[1] = 1;
        net_commit(n);
        assert_same_out(n, &alone, 0, 47);
        assert_same_state(n, &alone, 0);
        assert_same_state(n, &alone, 2);
        assert_same_slot(n, n->rolling[2], &alone, alone.rolling[2]);
        net_deinit(n);
    }
    net_deinit(&alone);
}

static void neither_company_nor_workers_change_a_bit(void **state) {
    (void)state;
    each_mode(check_batch);
}

/* ---- what must not be touched ---- */

static void check_untouched(const struct shape *shape, enum numeric numeric, enum cpu_isa isa) {
    struct net n;
    char *before;
    size_t bytes;

    net_init(&n, shape, numeric, isa, 2);
    net_advance(&n, 0, 0, 20);
    net_advance(&n, 1, 20, 40);
    bytes = N_STATE_SLOTS * n.state.slot_bytes;
    before = malloc(bytes);
    memcpy(before, n.state.arena, bytes);

    net_verify(&n, 0, 40, 56, 0, 0); /* every row rejected, and the frozen pass itself */
    assert_memory_equal(before, n.state.arena, bytes);
    fake_batch_clear(n.batch);
    net_run(&n, GDN_ADVANCE, 0); /* no segs */
    net_commit(&n);
    assert_memory_equal(before, n.state.arena, bytes);

    net_verify(&n, 0, 40, 56, 3, 0); /* only seq 0's live slot changes */
    for (int slot = 0; slot < N_STATE_SLOTS; slot++) {
        bool same = memcmp(before + (size_t)slot * n.state.slot_bytes, slot_at(&n, slot), n.state.slot_bytes) == 0;

        assert_int_equal(same, slot != n.live[0]);
    }
    for (size_t i = 0; i < (size_t)(N_LAYERS * ROWS_MAX) * out_width(&n); i++)
        assert_true(isfinite(n.out[i])); /* the free slots are full of NaN */
    free(before);
    net_deinit(&n);
}

static void rejected_rows_and_other_seqs_leave_states_alone(void **state) {
    (void)state;
    each_mode(check_untouched);
}

/* ---- ranges ---- */

static void check_extremes(const struct shape *shape, enum numeric numeric, enum cpu_isa isa) {
    struct net n;

    net_init(&n, shape, numeric, isa, 1);
    for (int i = 0; i < N_LAYERS * shape->hv; i++)
        n.neg_a[i] = -16;
    for (int i = 0; i < N_LAYERS * ROWS_MAX * 2 * shape->hv; i++)
        n.ba[i] = i % 3 == 0 ? 90 : i % 3 == 1 ? -90 : 0; /* decay 0, decay 1; beta 0, beta 1 */
    for (int i = 0; i < 100 * n.mz_width; i++)
        n.mz[i] = i % 5 == 0 ? 0 : i % 2 ? 300 : -300;
    net_advance(&n, 0, 0, 100);
    net_verify(&n, 0, 100, 116, 16, 8);
    for (size_t i = 0; i < 116 * out_width(&n); i++)
        assert_true(isfinite(n.out[i]));
    net_deinit(&n);
}

static void strong_decay_and_large_inputs_stay_finite(void **state) {
    (void)state;
    each_mode(check_extremes);
}

static void check_repetition(const struct shape *shape, enum numeric numeric, enum cpu_isa isa) {
    struct net n;
    float biggest = 0;

    net_init(&n, shape, numeric, isa, 1);
    for (int l = 0; l < N_LAYERS; l++)
        for (int t = 1; t < 512; t++) {
            memcpy(n.mz + (l * ROWS_MAX + t) * n.mz_width, n.mz + l * ROWS_MAX * n.mz_width,
                   (size_t)n.mz_width * sizeof(float));
            memcpy(n.ba + (l * ROWS_MAX + t) * 2 * shape->hv, n.ba + l * ROWS_MAX * 2 * shape->hv,
                   (size_t)(2 * shape->hv) * sizeof(float));
        }
    net_advance(&n, 0, 0, 512);
    for (size_t i = 0; i < 512 * out_width(&n); i++)
        biggest = fmaxf(biggest, isfinite(n.out[i]) ? fabsf(n.out[i]) : INFINITY);
    assert_true(biggest < 1e3f);
    net_deinit(&n);
}

static void one_token_repeated_512_times_stays_finite(void **state) {
    (void)state;
    each_mode(check_repetition);
}

/* ---- modes against each other ---- */

static void modes_agree_within_their_rounding(void **state) {
    static const struct {
        enum numeric numeric;
        float tolerance;
    } cases[] = {{NUMERIC_FAST, 2e-2f}, {NUMERIC_BF16, 4e-2f}};

    (void)state;
    for (int gate = GATE_SILU; gate <= GATE_SIGMOID; gate++)
        for (size_t c = 0; c < ARRAY_LEN(cases); c++) {
            struct net reference, other;
            double error = 0, norm = 0;

            net_init(&reference, &shape_wide, NUMERIC_REFERENCE, CPU_ISA_SCALAR, 1);
            net_init(&other, &shape_wide, cases[c].numeric, fake_best_isa(), 1);
            reference.gate = other.gate = (enum gate_act)gate;
            net_advance(&reference, 0, 0, 200);
            net_advance(&other, 0, 0, 200);
            for (size_t i = 0; i < 200 * out_width(&other); i++) {
                double d = (double)other.out[i] - (double)reference.out[i];

                error += d * d;
                norm += (double)reference.out[i] * (double)reference.out[i];
            }
            assert_true(norm > 1 && sqrt(error / norm) < (double)cases[c].tolerance);
            net_deinit(&reference);
            net_deinit(&other);
        }
}

/* Same rounding points, f32 against double: what is left is the arithmetic of the vectors. */
static void vectors_stay_close_to_the_oracle(void **state) {
    static const struct shape shape = {1, 2, 128, 128, 4};
    struct net plain, fast;

    (void)state;
    if (fake_best_isa() == CPU_ISA_SCALAR)
        skip();
    net_init(&plain, &shape, NUMERIC_FAST, CPU_ISA_SCALAR, 1);
    net_init(&fast, &shape, NUMERIC_FAST, CPU_ISA_AVX2, 1);
    net_advance(&plain, 0, 0, 200);
    net_advance(&fast, 0, 0, 200);
    assert_close(fast.out, plain.out, 200 * out_width(&fast), 1e-4f);
    net_deinit(&plain);
    net_deinit(&fast);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(recurrence_follows_the_known_vector),
        cmocka_unit_test(conv_starts_from_zeros_and_ends_with_the_last_columns),
        cmocka_unit_test(a_verified_block_equals_single_steps_for_every_accepted_length),
        cmocka_unit_test(prefill_may_be_split_anywhere),
        cmocka_unit_test(a_snapshot_is_the_state_after_exactly_its_rows),
        cmocka_unit_test(neither_company_nor_workers_change_a_bit),
        cmocka_unit_test(rejected_rows_and_other_seqs_leave_states_alone),
        cmocka_unit_test(strong_decay_and_large_inputs_stay_finite),
        cmocka_unit_test(one_token_repeated_512_times_stays_finite),
        cmocka_unit_test(modes_agree_within_their_rounding),
        cmocka_unit_test(vectors_stay_close_to_the_oracle),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
