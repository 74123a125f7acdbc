/* gdn and gdn_commit of the CUDA backend against the CPU's oracle. */
#include "cuda_rig.h"

enum { LAYER = 1, N_LAYERS = 2, HK = 2, HV = 4, D = 128, TAPS = 4, N_SEGS = 2, N_SLOTS = 4 };
enum { CONV_DIM = (2 * HK + HV) * D, MZ = CONV_DIM + HV * D + 8, KV_WIDTH = (HK + HV) * D };

static struct rig rig;

static int teardown(void **state) {
    (void)state;
    rig_clear(&rig);
    return 0;
}

struct setup {
    struct state_view state[N_SIDES];
    struct gdn_record record[N_SIDES];
    struct buf *arena, *mz, *ba, *conv, *neg_a, *dt_bias, *norm, *out, *record_kv, *record_gb;
    size_t slot_bytes, layer_bytes;
};

static struct setup setup_new(int n_rows_max) {
    const size_t rows = (size_t)n_rows_max;
    struct setup s = {.mz = rig_floats(&rig, rows * MZ, 1, true), .ba = rig_floats(&rig, rows * 2 * HV, 2, false)};
    struct state_view view = {
        .n_layers = N_LAYERS, .n_k_heads = HK, .n_v_heads = HV, .head_dim_k = D, .head_dim_v = D, .conv_taps = TAPS};
    struct buf *record_m = rig_new(&rig, N_LAYERS * rows * CONV_DIM, 2, 2);
    struct buf *live = rig_words(&rig, (int32_t[]){2, 0}, 2), *rolling = rig_words(&rig, (int32_t[]){1, 3}, 2);
    float *values;
    char *slots;

    s.conv = rig_floats(&rig, CONV_DIM * TAPS, 0.5f, false);
    s.dt_bias = rig_floats(&rig, HV, 1, false);
    s.norm = rig_floats(&rig, D, 1, false);
    s.out = rig_poison(&rig, rows * HV * D, true);
    s.record_kv = rig_poison(&rig, N_LAYERS * rows * KV_WIDTH, false);
    s.record_gb = rig_poison(&rig, N_LAYERS * rows * 2 * HV, false);
    s.neg_a = rig_new(&rig, HV, 4, 4);
    values = rig_randoms(&rig, HV, 1);
    for (int i = 0; i < HV; i++)
        values[i] = -0.1f - 2 * fabsf(values[i]);
    rig_set(&rig, s.neg_a, values);
    free(values);

    view.slot_bytes = state_slot_bytes(&view, DTYPE_BF16);
    s.slot_bytes = view.slot_bytes;
    s.layer_bytes = state_layer_bytes(&view, DTYPE_BF16);
    slots = calloc(N_SLOTS, view.slot_bytes);
    for (int slot = 0; slot < N_SLOTS; slot++)
        for (int l = 0; l < N_LAYERS; l++) {
            float *S = (float *)(void *)(slots + (size_t)slot * s.slot_bytes + (size_t)l * s.layer_bytes);
            uint16_t *columns = (uint16_t *)(void *)(S + HV * D * D);

            for (int i = 0; i < HV * D * D; i++)
                S[i] = rig_random(&rig) * 0.3f;
            for (int i = 0; i < (TAPS - 1) * CONV_DIM; i++)
                columns[i] = bf16_from_f32(rig_random(&rig));
        }
    s.arena = rig_new(&rig, N_SLOTS * view.slot_bytes, 1, 1);
    rig_set_bytes(&rig, s.arena, slots, N_SLOTS * view.slot_bytes);
    free(slots);
    for (int i = 0; i < N_SIDES; i++) {
        s.state[i] = view;
        s.state[i].arena = s.arena->mem[i];
        s.state[i].live = live->mem[i];
        s.state[i].rolling = rolling->mem[i];
        s.record[i] = (struct gdn_record){record_m->mem[i], s.record_kv->mem[i], s.record_gb->mem[i]};
    }
    return s;
}

static void run_gdn(struct setup *s, int i, const struct batch *batch, enum gdn_mode mode, int layer) {
    RIG_RUN(&rig, i, gdn,
            (&(struct gdn_args){.batch = batch,
                                .state = &s->state[i],
                                .layer = layer,
                                .mode = mode,
                                .mz = s->mz->mem[i],
                                .mz_stride = MZ,
                                .ba = s->ba->mem[i],
                                .conv = s->conv->mem[i],
                                .neg_a = s->neg_a->mem[i],
                                .dt_bias = s->dt_bias->mem[i],
                                .norm = s->norm->mem[i],
                                .eps = 1e-6f,
                                .gate = GATE_SILU,
                                .record = &s->record[i],
                                .out = s->out->mem[i]}));
}

/* All slots: S by distance, conv columns bit by bit. */
static void compare_states(struct setup *s, const char *what) {
    char *want = malloc(s->arena->bytes[CPU]), *got = malloc(s->arena->bytes[CPU]);

    rig_copy(&rig.side[CPU], s->arena->mem[CPU], want, s->arena->bytes[CPU], false);
    rig_copy(&rig.side[GPU], s->arena->mem[GPU], got, s->arena->bytes[CPU], false);
    for (int slot = 0; slot < N_SLOTS; slot++)
        for (int l = 0; l < N_LAYERS; l++) {
            size_t at = (size_t)slot * s->slot_bytes + (size_t)l * s->layer_bytes, s_bytes = HV * D * D * 4;
            const float *a = (const float *)(void *)(want + at), *b = (const float *)(void *)(got + at);
            double diff = 0, norm = 0;

            for (int i = 0; i < HV * D * D; i++) {
                diff += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
                norm += (double)a[i] * (double)a[i];
            }
            printf("%s, slot %d layer %d: %.2e\n", what, slot, l, sqrt(diff / norm));
            assert_true(sqrt(diff / norm) < 2e-3); /* conv outputs next to a rounding boundary may fall either way */
            assert_memory_equal(want + at + s_bytes, got + at + s_bytes, (TAPS - 1) * CONV_DIM * 2);
        }
    free(want);
    free(got);
}

static void frozen_rows_and_their_commit_agree(void **state) {
    static const struct {
        int n_rows[N_SEGS], commit[N_SEGS], snapshot[N_SEGS];
    } cases[] = {
        {{16, 1}, {16, 1}, {0, 0}},
        {{16, 16}, {9, 0}, {4, 0}},
        {{3, 7}, {1, 7}, {1, 7}},
        {{5, 2}, {2, 2}, {0, 1}},
    };

    (void)state;
    for (size_t c = 0; c < ARRAY_LEN(cases); c++) {
        struct setup s = setup_new(32);
        struct rig_batch batch = rig_batch(&rig, N_SEGS, cases[c].n_rows, (int[]){100, 3}, NULL, 32);
        struct buf *commit = rig_words(&rig, cases[c].commit, N_SEGS);
        struct buf *snapshot = rig_words(&rig, cases[c].snapshot, N_SEGS);
        int n_rows = cases[c].n_rows[0] + cases[c].n_rows[1];

        for (int i = 0; i < N_SIDES; i++)
            for (int l = 0; l < N_LAYERS; l++)
                run_gdn(&s, i, &batch.side[i], GDN_FROZEN, l);
        rig_compare(&rig, s.out, 0, (size_t)n_rows * HV * D, 4e-3, "gdn, frozen");
        rig_compare(&rig, s.record_kv, 32 * KV_WIDTH, (size_t)(32 + n_rows) * KV_WIDTH, 2e-3, "gdn, recorded k and v");
        rig_compare(&rig, s.record_gb, 32 * 2 * HV, (size_t)(32 + n_rows) * 2 * HV, 1e-5, "gdn, recorded g and beta");
        compare_states(&s, "gdn, frozen states");
        for (int i = 0; i < N_SIDES; i++)
            RIG_RUN(&rig, i, gdn_commit,
                    (&(struct gdn_commit_args){.batch = &batch.side[i],
                                               .state = &s.state[i],
                                               .record = &s.record[i],
                                               .seg_commit = commit->mem[i],
                                               .seg_snapshot = snapshot->mem[i]}));
        compare_states(&s, "gdn_commit");
        rig_clear(&rig);
    }
}

static void advancing_rows_agree(void **state) {
    static const int n_rows[][N_SEGS] = {{1, 2}, {16, 17}, {70, 64}};

    (void)state;
    for (size_t c = 0; c < ARRAY_LEN(n_rows); c++) {
        struct setup s = setup_new(140);
        struct rig_batch batch = rig_batch(&rig, N_SEGS, n_rows[c], (int[]){64, 0}, NULL, 140);

        for (int i = 0; i < N_SIDES; i++)
            run_gdn(&s, i, &batch.side[i], GDN_ADVANCE, LAYER);
        rig_compare(&rig, s.out, 0, (size_t)(n_rows[c][0] + n_rows[c][1]) * HV * D, 4e-3, "gdn, advance");
        compare_states(&s, "gdn, advanced states");
        rig_clear(&rig);
    }
}

/* 16 rows at once, one at a time, and frozen then committed leave the same bits. */
static void a_state_is_the_same_bits_however_its_rows_came(void **state) {
    struct setup s = setup_new(16);
    char *before = malloc(s.arena->bytes[CPU]), *after[3];
    struct buf *commit = rig_words(&rig, (int32_t[]){16}, 1), *none = rig_words(&rig, (int32_t[]){0}, 1);
    struct rig_batch all = rig_batch(&rig, 1, (int[]){16}, (int[]){64}, NULL, 16);

    (void)state;
    rig_copy(&rig.side[GPU], s.arena->mem[GPU], before, s.arena->bytes[GPU], false);
    for (int c = 0; c < 3; c++) {
        rig_copy(&rig.side[GPU], s.arena->mem[GPU], before, s.arena->bytes[GPU], true);
        if (c == 0)
            run_gdn(&s, GPU, &all.side[GPU], GDN_ADVANCE, LAYER);
        for (int t = 0; c == 1 && t < 16; t++) {
            struct rig_batch one = rig_batch(&rig, 1, (int[]){1}, (int[]){64 + t}, NULL, 1);
            struct setup at = s;
            struct buf mz = *s.mz, ba = *s.ba;

            mz.mem[GPU] = (uint16_t *)mz.mem[GPU] + t * MZ;
            ba.mem[GPU] = (float *)ba.mem[GPU] + t * 2 * HV;
            at.mz = &mz;
            at.ba = &ba;
            run_gdn(&at, GPU, &one.side[GPU], GDN_ADVANCE, LAYER);
        }
        if (c == 2) {
            for (int l = 0; l < N_LAYERS; l++)
                run_gdn(&s, GPU, &all.side[GPU], GDN_FROZEN, l);
            RIG_RUN(&rig, GPU, gdn_commit,
                    (&(struct gdn_commit_args){.batch = &all.side[GPU],
                                               .state = &s.state[GPU],
                                               .record = &s.record[GPU],
                                               .seg_commit = commit->mem[GPU],
                                               .seg_snapshot = none->mem[GPU]}));
        }
        after[c] = malloc(s.arena->bytes[GPU]);
        rig_copy(&rig.side[GPU], s.arena->mem[GPU], after[c], s.arena->bytes[GPU], false);
    }
    for (int c = 1; c < 3; c++) /* slot 0 lives in state slot 2 */
        assert_memory_equal(after[0] + 2 * s.slot_bytes + s.layer_bytes, after[c] + 2 * s.slot_bytes + s.layer_bytes,
                            s.layer_bytes);
    assert_memory_not_equal(after[0] + 2 * s.slot_bytes, before + 2 * s.slot_bytes, s.slot_bytes);
    for (int c = 0; c < 3; c++)
        free(after[c]);
    free(before);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(frozen_rows_and_their_commit_agree, teardown),
        cmocka_unit_test_teardown(advancing_rows_agree, teardown),
        cmocka_unit_test_teardown(a_state_is_the_same_bits_however_its_rows_came, teardown),
    };
    int failed;

    rig_open(&rig);
    failed = cmocka_run_group_tests(tests, NULL, NULL);
    rig_close(&rig);
    return failed;
}
