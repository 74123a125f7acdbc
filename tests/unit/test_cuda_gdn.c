/* gdn and gdn_commit of the CUDA backend against the CPU's oracle. */
#include "cuda_rig.h"

enum { LAYER = 1, N_LAYERS = 2, HK = 2, HV = 4, D = 128, TAPS = 4, N_SEGS = 2, N_SLOTS = 4 };
enum { CONV_DIM = (2 * HK + HV) * D, MZ = CONV_DIM + HV * D + 8, KV_WIDTH = (HK + HV) * D };

/* The chunk form is as near to the step form in double precision as the step form in f32 is: S to 1e-7 on random rows, to 1e-4
 * where decay and beta next to 1 keep what 2,048 rows have rounded; one in 10,000 outputs is the next bf16. What the limits
 * leave room for are conv outputs next to a rounding boundary. */
static const double STEP_LIMIT = 2e-3, CHUNK_LIMIT = 5e-4, CHUNK_OUT_LIMIT = 1e-3;

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

/* Rows from `row` of the inputs and of the output on. */
static struct gdn_args args_at(const struct setup *s, int i, const struct batch *batch, enum gdn_mode mode, int layer,
                               int row) {
    const size_t act_bytes = i == CPU ? 4 : 2, at = (size_t)row;

    return (struct gdn_args){.batch = batch,
                             .state = &s->state[i],
                             .layer = layer,
                             .mode = mode,
                             .mz = (char *)s->mz->mem[i] + at * MZ * act_bytes,
                             .mz_stride = MZ,
                             .ba = (float *)s->ba->mem[i] + at * 2 * HV,
                             .conv = s->conv->mem[i],
                             .neg_a = s->neg_a->mem[i],
                             .dt_bias = s->dt_bias->mem[i],
                             .norm = s->norm->mem[i],
                             .eps = 1e-6f,
                             .gate = GATE_SILU,
                             .record = &s->record[i],
                             .out = (char *)s->out->mem[i] + at * HV * D * act_bytes};
}

static void run_gdn(const struct setup *s, int i, const struct batch *batch, enum gdn_mode mode, int layer) {
    struct gdn_args args = args_at(s, i, batch, mode, layer, 0);

    RIG_RUN(&rig, i, gdn, &args);
}

/* All slots: S by distance, conv columns bit by bit. */
static void compare_states(struct setup *s, double limit, const char *what) {
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
            assert_true(sqrt(diff / norm) < limit); /* conv outputs next to a rounding boundary may fall either way */
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
        compare_states(&s, STEP_LIMIT, "gdn, frozen states");
        for (int i = 0; i < N_SIDES; i++)
            RIG_RUN(&rig, i, gdn_commit,
                    (&(struct gdn_commit_args){.batch = &batch.side[i],
                                               .state = &s.state[i],
                                               .record = &s.record[i],
                                               .seg_commit = commit->mem[i],
                                               .seg_snapshot = snapshot->mem[i]}));
        compare_states(&s, STEP_LIMIT, "gdn_commit");
        rig_clear(&rig);
    }
}

/* ---- prefill */

enum rows { RANDOM, ONE_TOKEN, STRONG_DECAY, NO_DECAY };

/* ONE_TOKEN: the same row over and over, beta next to 1, next to no decay. */
static void set_rows(struct setup *s, int n_rows, enum rows rows) {
    float *mz = rig_get(&rig, s->mz, CPU), *ba = rig_get(&rig, s->ba, CPU);

    for (int t = 0; t < n_rows; t++) {
        for (int h = 0; h < HV; h++) {
            float *b = &ba[t * 2 * HV + h], *a = &ba[t * 2 * HV + HV + h];

            if (rows == ONE_TOKEN)
                *b = 12;
            if (rows == ONE_TOKEN || rows == NO_DECAY)
                *a = -12;
            if (rows == STRONG_DECAY) /* neg_a times this: exp of it is 0 in some heads */
                *a = t % 7 == 3 ? 60 : -6;
        }
        if (rows == ONE_TOKEN)
            memcpy(mz + (size_t)t * MZ, mz, MZ * sizeof *mz);
    }
    rig_set(&rig, s->mz, mz);
    rig_set(&rig, s->ba, ba);
    free(mz);
    free(ba);
}

static char *bytes_of(const struct buf *buf, size_t n_bytes) { /* of the GPU's */
    char *bytes = malloc(n_bytes);

    rig_copy(&rig.side[GPU], buf->mem[GPU], bytes, n_bytes, false);
    return bytes;
}

static void advancing_rows_agree(void **state) {
    static const struct {
        int n_rows[N_SEGS], pos[N_SEGS];
        enum rows rows;
    } cases[] = {
        {{1, 2}, {64, 0}, RANDOM},           {{16, 17}, {64, 0}, RANDOM},    {{63, 65}, {0, 192}, RANDOM},
        {{70, 64}, {64, 0}, RANDOM},         {{128, 6}, {0, 640}, RANDOM},   {{75, 65}, {0, 64 + 37}, RANDOM},
        {{1221, 300}, {64, 0}, RANDOM},      {{512, 64}, {0, 0}, ONE_TOKEN}, {{300, 131}, {0, 64}, STRONG_DECAY},
        {{1100, 130}, {128, 448}, NO_DECAY},
    };

    (void)state;
    for (size_t c = 0; c < ARRAY_LEN(cases); c++) {
        const int n_rows = cases[c].n_rows[0] + cases[c].n_rows[1], n_rows_max = n_rows + 9;
        struct setup s = setup_new(n_rows_max);
        struct rig_batch batch = rig_batch(&rig, N_SEGS, cases[c].n_rows, cases[c].pos, NULL, n_rows_max);
        float *out;

        set_rows(&s, n_rows, cases[c].rows);
        for (int i = 0; i < N_SIDES; i++)
            run_gdn(&s, i, &batch.side[i], GDN_ADVANCE, LAYER);
        rig_compare(&rig, s.out, 0, (size_t)n_rows * HV * D, CHUNK_OUT_LIMIT, "gdn, advance");
        compare_states(&s, CHUNK_LIMIT, "gdn, advanced states");
        out = rig_get(&rig, s.out, GPU);
        for (size_t i = (size_t)n_rows * HV * D; i < s.out->n; i++)
            assert_true(isnan(out[i]));
        free(out);
        rig_clear(&rig);
    }
}

static void a_batch_without_segs_changes_nothing(void **state) {
    struct setup s = setup_new(80);
    struct rig_batch batch = rig_batch(&rig, N_SEGS, (int[]){70, 10}, (int[]){64, 0}, NULL, 80);
    char *before = bytes_of(s.arena, s.arena->bytes[GPU]), *after;
    int32_t none = 0;
    float *out;

    (void)state;
    rig_copy(&rig.side[GPU], batch.side[GPU].n_segs, &none, sizeof none, true);
    run_gdn(&s, GPU, &batch.side[GPU], GDN_ADVANCE, LAYER);
    after = bytes_of(s.arena, s.arena->bytes[GPU]);
    assert_memory_equal(before, after, s.arena->bytes[GPU]);
    out = rig_get(&rig, s.out, GPU);
    for (size_t i = 0; i < s.out->n; i++)
        assert_true(isnan(out[i]));
    free(before);
    free(after);
    free(out);
}

/* One seg's rows, in pieces that end at multiples of 64; each piece is a batch. */
static void run_pieces(const struct setup *s, int pos, const int *pieces, int n_pieces, int n_rows_max) {
    for (int i = 0, row = 0; i < n_pieces; row += pieces[i++]) {
        struct rig_batch batch = rig_batch(&rig, 1, &pieces[i], (int[]){pos + row}, NULL, n_rows_max);
        struct gdn_args args = args_at(s, GPU, &batch.side[GPU], GDN_ADVANCE, LAYER, row);

        RIG_RUN(&rig, GPU, gdn, &args);
    }
}

static void pieces_at_multiples_of_64_leave_the_same_bits(void **state) {
    static const struct {
        int n, pieces[4], n_rows_max;
    } splits[] = {{1, {1221}, 1221}, {3, {64, 1152, 5}, 1400}, {4, {640, 64, 512, 5}, 640}};
    struct setup s = setup_new(1221);
    char *before = bytes_of(s.arena, s.arena->bytes[GPU]), *states[ARRAY_LEN(splits)], *outs[ARRAY_LEN(splits)];

    (void)state;
    for (size_t c = 0; c < ARRAY_LEN(splits); c++) {
        rig_copy(&rig.side[GPU], s.arena->mem[GPU], before, s.arena->bytes[GPU], true);
        run_pieces(&s, 128, splits[c].pieces, splits[c].n, splits[c].n_rows_max);
        states[c] = bytes_of(s.arena, s.arena->bytes[GPU]);
        outs[c] = bytes_of(s.out, s.out->bytes[GPU]);
        assert_memory_equal(states[0], states[c], s.arena->bytes[GPU]);
        assert_memory_equal(outs[0], outs[c], s.out->bytes[GPU]);
    }
    assert_memory_not_equal(before, states[0], s.arena->bytes[GPU]);
    for (size_t c = 0; c < ARRAY_LEN(splits); c++) {
        free(states[c]);
        free(outs[c]);
    }
    free(before);
}

static void a_seg_has_the_same_bits_alone_and_in_a_batch(void **state) {
    static const int n_rows[N_SEGS] = {70, 1130}, pos[N_SEGS] = {0, 64};
    struct setup s = setup_new(1200);
    struct rig_batch both = rig_batch(&rig, N_SEGS, n_rows, pos, NULL, 1200);
    char *before = bytes_of(s.arena, s.arena->bytes[GPU]), *states[2], *outs[2];

    (void)state;
    for (int c = 0; c < 2; c++) {
        rig_copy(&rig.side[GPU], s.arena->mem[GPU], before, s.arena->bytes[GPU], true);
        if (c == 0)
            run_gdn(&s, GPU, &both.side[GPU], GDN_ADVANCE, LAYER);
        for (int seg = N_SEGS - 1; c == 1 && seg >= 0; seg--) { /* the second one first */
            struct rig_batch one = rig_batch(&rig, 1, &n_rows[seg], &pos[seg], NULL, n_rows[seg]);
            struct gdn_args args = args_at(&s, GPU, &one.side[GPU], GDN_ADVANCE, LAYER, seg == 0 ? 0 : n_rows[0]);
            int32_t slot = N_SEGS - 1 - seg; /* the seq's place in the batch of both */

            rig_copy(&rig.side[GPU], one.side[GPU].seg_slot, &slot, sizeof slot, true);
            RIG_RUN(&rig, GPU, gdn, &args);
        }
        states[c] = bytes_of(s.arena, s.arena->bytes[GPU]);
        outs[c] = bytes_of(s.out, s.out->bytes[GPU]);
    }
    assert_memory_equal(states[0], states[1], s.arena->bytes[GPU]);
    assert_memory_equal(outs[0], outs[1], s.out->bytes[GPU]);
    for (int c = 0; c < 2; c++) {
        free(states[c]);
        free(outs[c]);
    }
    free(before);
}

/* The first run of the program leaves NaN wherever it writes; the second one has shorter segs. */
static void what_a_run_before_left_in_scratch_is_not_read(void **state) {
    static const int rows_max = 140, n_rows[][N_SEGS] = {{75, 65}, {5, 20}};
    const struct side *side = &rig.side[GPU];
    struct setup s = setup_new(rows_max);
    struct rig_batch batch = rig_batch(&rig, N_SEGS, n_rows[0], (int[]){64, 0}, NULL, rows_max);
    struct gdn_args args = args_at(&s, GPU, &batch.side[GPU], GDN_ADVANCE, LAYER, 0);
    const size_t out_bytes = 25 * HV * D * 2;
    char *arena = bytes_of(s.arena, s.arena->bytes[GPU]), *mz = bytes_of(s.mz, s.mz->bytes[GPU]);
    char *states[2], *outs[2];
    float *nans = malloc(s.mz->n * sizeof *nans);
    int32_t seg_row[] = {0, 5, 25}, n = 25;
    struct program *program;

    (void)state;
    for (size_t i = 0; i < s.mz->n; i++)
        nans[i] = NAN;
    assert_int_equal(side->backend->program_begin(side->device, &program), 0);
    assert_int_equal(side->backend->gdn(program, &args), 0);
    assert_int_equal(side->backend->program_end(program), 0);
    for (int c = 0; c < 2; c++) { /* 0: behind the run that leaves NaN; 1: by a program of its own */
        if (c == 0) {
            rig_set(&rig, s.mz, nans);
            assert_int_equal(side->backend->program_run(side->stream, program), 0);
            assert_int_equal(backend_stream_wait(side->backend, side->stream), 0);
            rig_copy(&rig.side[GPU], s.mz->mem[GPU], mz, s.mz->bytes[GPU], true);
            rig_copy(&rig.side[GPU], batch.side[GPU].seg_row, seg_row, sizeof seg_row, true);
            rig_copy(&rig.side[GPU], batch.side[GPU].n_rows, &n, sizeof n, true);
        }
        rig_copy(&rig.side[GPU], s.arena->mem[GPU], arena, s.arena->bytes[GPU], true);
        if (c == 0) {
            assert_int_equal(side->backend->program_run(side->stream, program), 0);
            assert_int_equal(backend_stream_wait(side->backend, side->stream), 0);
        } else {
            RIG_RUN(&rig, GPU, gdn, &args);
        }
        states[c] = bytes_of(s.arena, s.arena->bytes[GPU]);
        outs[c] = bytes_of(s.out, out_bytes);
    }
    side->backend->program_free(program);
    assert_memory_equal(states[0], states[1], s.arena->bytes[GPU]);
    assert_memory_equal(outs[0], outs[1], out_bytes);
    for (int i = 0; i < HV * D * 25; i++)
        assert_false((((uint16_t *)(void *)outs[0])[i] & 0x7fff) > 0x7f80); /* NaN */
    for (int c = 0; c < 2; c++) {
        free(states[c]);
        free(outs[c]);
    }
    free(arena);
    free(mz);
    free(nans);
}

/* ---- verify */

/* 16 rows frozen and committed at once, or in blocks of other lengths: the same bits. */
static void a_state_is_the_same_bits_in_blocks_of_any_length(void **state) {
    static const int blocks[] = {16, 1, 7};
    struct setup s = setup_new(16);
    char *before = bytes_of(s.arena, s.arena->bytes[GPU]), *after[ARRAY_LEN(blocks)], *outs[ARRAY_LEN(blocks)];
    struct buf *none = rig_words(&rig, (int32_t[]){0}, 1);

    (void)state;
    for (size_t c = 0; c < ARRAY_LEN(blocks); c++) {
        rig_copy(&rig.side[GPU], s.arena->mem[GPU], before, s.arena->bytes[GPU], true);
        for (int row = 0, n; row < 16; row += n) {
            struct rig_batch batch;
            struct buf *commit;

            n = blocks[c] < 16 - row ? blocks[c] : 16 - row;
            batch = rig_batch(&rig, 1, &n, (int[]){64 + row}, NULL, n);
            commit = rig_words(&rig, &n, 1);
            for (int l = 0; l < N_LAYERS; l++) {
                struct gdn_args args = args_at(&s, GPU, &batch.side[GPU], GDN_FROZEN, l, row);

                RIG_RUN(&rig, GPU, gdn, &args);
            }
            RIG_RUN(&rig, GPU, gdn_commit,
                    (&(struct gdn_commit_args){.batch = &batch.side[GPU],
                                               .state = &s.state[GPU],
                                               .record = &s.record[GPU],
                                               .seg_commit = commit->mem[GPU],
                                               .seg_snapshot = none->mem[GPU]}));
        }
        after[c] = bytes_of(s.arena, s.arena->bytes[GPU]);
        outs[c] = bytes_of(s.out, s.out->bytes[GPU]);
        assert_memory_equal(after[0], after[c], s.arena->bytes[GPU]);
        assert_memory_equal(outs[0], outs[c], s.out->bytes[GPU]);
    }
    assert_memory_not_equal(after[0], before, s.arena->bytes[GPU]);
    for (size_t c = 0; c < ARRAY_LEN(blocks); c++) {
        free(after[c]);
        free(outs[c]);
    }
    free(before);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(frozen_rows_and_their_commit_agree, teardown),
        cmocka_unit_test_teardown(advancing_rows_agree, teardown),
        cmocka_unit_test_teardown(a_batch_without_segs_changes_nothing, teardown),
        cmocka_unit_test_teardown(pieces_at_multiples_of_64_leave_the_same_bits, teardown),
        cmocka_unit_test_teardown(a_seg_has_the_same_bits_alone_and_in_a_batch, teardown),
        cmocka_unit_test_teardown(what_a_run_before_left_in_scratch_is_not_read, teardown),
        cmocka_unit_test_teardown(a_state_is_the_same_bits_in_blocks_of_any_length, teardown),
    };
    int failed;

    rig_open(&rig);
    failed = cmocka_run_group_tests(tests, NULL, NULL);
    rig_close(&rig);
    return failed;
}
