/* gdn and gdn_commit of the CUDA backend against the CPU's oracle. */
#include "cuda_rig.h"

enum { LAYER = 1, N_LAYERS = 2, HK = 2, HV = 4, D = 128, TAPS = 4, N_SEGS = 2, N_SLOTS = 4 };
enum { CONV_DIM = (2 * HK + HV) * D, MZ = CONV_DIM + HV * D + 8, KV_WIDTH = (HK + HV) * D };

/* The chunk form is as near to the step form in double precision as the step form in f32 is: S to 1e-7 on random rows, to 1e-4
 * where decay and beta next to 1 keep what 2,048 rows have rounded; one in 10,000 outputs is the next bf16. What the limits
 * leave room for are conv outputs next to a rounding boundary. */
static const double STATE_LIMIT = 5e-4, OUT_LIMIT = 1e-3;

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
    struct buf *open, *record_m = rig_new(&rig, N_LAYERS * rows * CONV_DIM, 2, 2);
    const struct backend_caps *caps = rig.side[GPU].backend->caps(rig.side[GPU].device);
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
    open = rig_poison(&rig, N_SEGS * state_open_bytes(&view, DTYPE_BF16, caps->open_rows, caps->open_inputs) / 2, true);
    for (int i = 0; i < N_SIDES; i++) {
        s.state[i] = view;
        if (i == GPU) {
            s.state[i].open = open->mem[i];
            s.state[i].open_bytes = open->bytes[i] / N_SEGS;
        }
        s.state[i].arena = s.arena->mem[i];
        s.state[i].live = live->mem[i];
        s.state[i].rolling = rolling->mem[i];
        s.record[i] = i == GPU ? (struct gdn_record){0}
                               : (struct gdn_record){record_m->mem[i], s.record_kv->mem[i], s.record_gb->mem[i]};
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

/* All slots: S by distance, conv columns bit by bit. Of live states where each is at a multiple of 64. */
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
            assert_true(sqrt(diff / norm) <
                        STATE_LIMIT); /* conv outputs next to a rounding boundary may fall either way */
            assert_memory_equal(want + at + s_bytes, got + at + s_bytes, (TAPS - 1) * CONV_DIM * 2);
        }
    free(want);
    free(got);
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

/* Of each seg first the rows up to a multiple of 64, where the GPU's states are those of the CPU, then the rest. */
static void advancing_rows_agree(void **state) {
    static const struct {
        int n_rows[N_SEGS], pos[N_SEGS];
        enum rows rows;
    } cases[] = {
        {{1, 2}, {64, 0}, RANDOM},      {{16, 17}, {64, 0}, RANDOM},         {{63, 65}, {0, 192}, RANDOM},
        {{70, 64}, {64, 0}, RANDOM},    {{128, 6}, {0, 640}, RANDOM},        {{1221, 300}, {64, 0}, RANDOM},
        {{512, 64}, {0, 0}, ONE_TOKEN}, {{300, 131}, {0, 64}, STRONG_DECAY}, {{1100, 130}, {128, 448}, NO_DECAY},
    };

    (void)state;
    for (size_t c = 0; c < ARRAY_LEN(cases); c++) {
        const int n_rows = cases[c].n_rows[0] + cases[c].n_rows[1], n_rows_max = n_rows + 9;
        struct setup s = setup_new(n_rows_max);
        int pos[N_SEGS], row = 0;
        float *out;

        set_rows(&s, n_rows, cases[c].rows);
        memcpy(pos, cases[c].pos, sizeof pos);
        for (int part = 0; part < 2; part++) {
            struct rig_batch batch;
            int n[N_SEGS];

            for (int seg = 0; seg < N_SEGS; seg++)
                n[seg] =
                    part == 0 ? cases[c].n_rows[seg] / PAGE_TOKENS * PAGE_TOKENS : cases[c].n_rows[seg] % PAGE_TOKENS;
            batch = rig_batch(&rig, N_SEGS, n, pos, NULL, n_rows_max);
            for (int i = 0; i < N_SIDES; i++) {
                struct gdn_args args = args_at(&s, i, &batch.side[i], GDN_ADVANCE, LAYER, row);

                RIG_RUN(&rig, i, gdn, &args);
            }
            for (int seg = 0; seg < N_SEGS; seg++) {
                row += n[seg];
                pos[seg] += n[seg];
            }
            if (part == 0)
                compare_states(&s, "gdn, advanced states");
        }
        rig_compare(&rig, s.out, 0, (size_t)n_rows * HV * D, OUT_LIMIT, "gdn, advance");
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

/* One seg's rows; each piece is a batch. */
static void run_pieces(const struct setup *s, int pos, const int *pieces, int n_pieces, int n_rows_max) {
    for (int i = 0, row = 0; i < n_pieces; row += pieces[i++]) {
        struct rig_batch batch = rig_batch(&rig, 1, &pieces[i], (int[]){pos + row}, NULL, n_rows_max);
        struct gdn_args args = args_at(s, GPU, &batch.side[GPU], GDN_ADVANCE, LAYER, row);

        RIG_RUN(&rig, GPU, gdn, &args);
    }
}

static void pieces_of_any_length_leave_the_same_bits(void **state) {
    static const struct {
        int n, pieces[4], n_rows_max;
    } splits[] = {
        {1, {1221}, 1221}, {3, {64, 1152, 5}, 1400}, {4, {640, 64, 512, 5}, 640}, {4, {10, 1, 900, 310}, 900}};
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

static void commit(const struct setup *s, int i, const struct batch *batch, const int *commits, const int *snapshots) {
    struct buf *n = rig_words(&rig, commits, N_SEGS), *snapshot = rig_words(&rig, snapshots, N_SEGS);

    RIG_RUN(&rig, i, gdn_commit,
            (&(struct gdn_commit_args){.batch = batch,
                                       .state = &s->state[i],
                                       .record = &s->record[i],
                                       .seg_commit = n->mem[i],
                                       .seg_snapshot = snapshot->mem[i]}));
}

/* Rows up to the last ones of a chunk, a block that reaches a multiple of 64 with some of its rows, and one behind it. */
static void frozen_rows_and_their_commit_agree(void **state) {
    static const struct {
        int before[N_SEGS], n_rows[N_SEGS], commit[N_SEGS], snapshot[N_SEGS];
    } cases[] = {
        {{48, 63}, {16, 1}, {16, 1}, {0, 0}},
        {{60, 59}, {16, 5}, {4, 5}, {4, 5}},
        {{50, 63}, {16, 16}, {14, 1}, {14, 0}},
        {{63, 61}, {2, 7}, {1, 3}, {0, 3}},
    };
    static const int zeros[N_SEGS] = {0};

    (void)state;
    for (size_t c = 0; c < ARRAY_LEN(cases); c++) {
        const int n_rows_max = 192, pos[N_SEGS] = {64, 0};
        struct setup s = setup_new(n_rows_max);
        int row = 0;

        for (int pass = 0; pass < 3; pass++) {
            int begin[N_SEGS], n_rows = 0;
            const int *n = pass == 0 ? cases[c].before : pass == 1 ? cases[c].n_rows : (const int[]){16, 3};
            struct rig_batch batch;

            for (int seg = 0; seg < N_SEGS; seg++) {
                begin[seg] = pos[seg] + (pass > 0 ? cases[c].before[seg] : 0) + (pass > 1 ? cases[c].commit[seg] : 0);
                n_rows += n[seg];
            }
            batch = rig_batch(&rig, N_SEGS, n, begin, NULL, n_rows);
            for (int i = 0; i < N_SIDES; i++)
                for (int l = 0; l < N_LAYERS; l++) {
                    struct gdn_args args = args_at(&s, i, &batch.side[i], pass == 0 ? GDN_ADVANCE : GDN_FROZEN, l, row);

                    RIG_RUN(&rig, i, gdn, &args);
                }
            rig_compare(&rig, s.out, (size_t)row * HV * D, (size_t)(row + n_rows) * HV * D, OUT_LIMIT,
                        pass == 0 ? "gdn, rows before" : "gdn, frozen");
            row += n_rows;
            if (pass == 1) {
                char *before = bytes_of(s.arena, s.arena->bytes[GPU]), *after;

                for (int i = 0; i < N_SIDES; i++)
                    commit(&s, i, &batch.side[i], zeros, zeros);
                after = bytes_of(s.arena, s.arena->bytes[GPU]);
                assert_memory_equal(before, after, s.arena->bytes[GPU]);
                free(before);
                free(after);
                for (int i = 0; i < N_SIDES; i++)
                    commit(&s, i, &batch.side[i], cases[c].commit, cases[c].snapshot);
                compare_states(&s, "gdn_commit");
            }
        }
        rig_clear(&rig);
    }
}

/* ---- one set of bits */

/* Two seqs, WALK_ROWS rows each: row r of seq i has the inputs of row i * WALK_ROWS + r. */
enum { WALK_ROWS = 200 };
static const int WALK_POS[N_SEGS] = {64, 256};

struct walk {
    struct setup s;
    struct buf *mz, *ba, *out; /* of one pass */
    uint16_t *all_mz, *want;   /* inputs; what a seq's rows yield alone and in one piece */
    float *all_ba;
    char *begin, *end; /* states */
    int at[N_SEGS], state_slot[N_SEGS], rolling_slot[N_SEGS];
};

/* One pass over n rows of each seq, of which commits stand. The others are rows of elsewhere. */
static void step(struct walk *w, enum gdn_mode mode, const int *n, const int *commits, bool takes_snapshots) {
    const size_t mz_bytes = MZ * sizeof(uint16_t), ba_bytes = 2 * HV * sizeof(float), out_row = HV * D;
    const size_t slot_bytes = w->s.slot_bytes;
    char *mz = calloc((size_t)(n[0] + n[1]), mz_bytes), *ba = calloc((size_t)(n[0] + n[1]), ba_bytes);
    char *before = bytes_of(w->s.arena, w->s.arena->bytes[GPU]), *after;
    int pos[N_SEGS], snapshots[N_SEGS];
    struct rig_batch batch;
    uint16_t *out;

    for (int seg = 0, row = 0; seg < N_SEGS; seg++) {
        const int to_grid = PAGE_TOKENS - (WALK_POS[seg] + w->at[seg]) % PAGE_TOKENS;

        pos[seg] = WALK_POS[seg] + w->at[seg];
        snapshots[seg] = takes_snapshots && commits[seg] >= to_grid ? to_grid : 0;
        for (int r = 0; r < n[seg]; r++, row++) {
            int from = seg * WALK_ROWS + (r < commits[seg] ? w->at[seg] + r : rig_below(&rig, WALK_ROWS));

            memcpy(mz + (size_t)row * mz_bytes, w->all_mz + (size_t)from * MZ, mz_bytes);
            memcpy(ba + (size_t)row * ba_bytes, w->all_ba + (size_t)from * 2 * HV, ba_bytes);
        }
    }
    batch = rig_batch(&rig, N_SEGS, n, pos, NULL, n[0] + n[1]);
    rig_copy(&rig.side[GPU], w->mz->mem[GPU], mz, (size_t)(n[0] + n[1]) * mz_bytes, true);
    rig_copy(&rig.side[GPU], w->ba->mem[GPU], ba, (size_t)(n[0] + n[1]) * ba_bytes, true);
    for (int l = 0; l < N_LAYERS; l++) {
        struct gdn_args args = args_at(&w->s, GPU, &batch.side[GPU], mode, l, 0);

        args.mz = w->mz->mem[GPU];
        args.ba = w->ba->mem[GPU];
        args.out = w->out->mem[GPU];
        RIG_RUN(&rig, GPU, gdn, &args);
    }
    if (mode == GDN_FROZEN)
        commit(&w->s, GPU, &batch.side[GPU], commits, snapshots);
    out = (uint16_t *)(void *)bytes_of(w->out, (size_t)(n[0] + n[1]) * out_row * 2);
    after = bytes_of(w->s.arena, w->s.arena->bytes[GPU]);
    for (int seg = 0, row = 0; seg < N_SEGS; row += n[seg++]) {
        const char *live = after + (size_t)w->state_slot[seg] * slot_bytes;
        const size_t rolling = (size_t)w->rolling_slot[seg] * slot_bytes;

        assert_memory_equal(out + (size_t)row * out_row, w->want + (size_t)(seg * WALK_ROWS + w->at[seg]) * out_row,
                            (size_t)commits[seg] * out_row * 2);
        assert_memory_equal(after + rolling, mode == GDN_FROZEN && snapshots[seg] > 0 ? live : before + rolling,
                            slot_bytes);
        w->at[seg] += commits[seg];
    }
    free(mz);
    free(ba);
    free(out);
    free(before);
    free(after);
}

static struct walk walk_new(void) {
    struct walk w = {.s = setup_new(N_SEGS * WALK_ROWS), .state_slot = {0, 2}, .rolling_slot = {3, 1}};
    size_t n_out = (size_t)N_SEGS * WALK_ROWS * HV * D;

    w.mz = rig_new(&rig, (size_t)N_SEGS * WALK_ROWS * MZ, 2, 2);
    w.ba = rig_new(&rig, (size_t)N_SEGS * WALK_ROWS * 2 * HV, 4, 4);
    w.out = rig_new(&rig, n_out, 2, 2);
    w.all_mz = (uint16_t *)(void *)bytes_of(w.s.mz, w.s.mz->bytes[GPU]);
    w.all_ba = (float *)(void *)bytes_of(w.s.ba, w.s.ba->bytes[GPU]);
    w.begin = bytes_of(w.s.arena, w.s.arena->bytes[GPU]);
    for (int seg = 0; seg < N_SEGS; seg++) {
        struct rig_batch batch = rig_batch(&rig, 1, (int[]){WALK_ROWS}, &WALK_POS[seg], NULL, WALK_ROWS);
        int32_t slot = N_SEGS - 1 - seg; /* as in a batch of both */

        rig_copy(&rig.side[GPU], batch.side[GPU].seg_slot, &slot, sizeof slot, true);
        for (int l = 0; l < N_LAYERS; l++) {
            struct gdn_args args = args_at(&w.s, GPU, &batch.side[GPU], GDN_ADVANCE, l, seg * WALK_ROWS);

            RIG_RUN(&rig, GPU, gdn, &args);
        }
    }
    w.want = (uint16_t *)(void *)bytes_of(w.s.out, n_out * 2);
    w.end = bytes_of(w.s.arena, w.s.arena->bytes[GPU]);
    return w;
}

/* Blocks of one length, of which any number stands, with prefills of any length between them: the bits of one prefill. */
static void a_row_is_the_same_bits_whichever_pass_it_was_in(void **state) {
    static const struct {
        int block;
        bool has_prefills;
    } walks[] = {{16, false}, {1, false}, {5, true}, {7, false}, {16, true}};

    (void)state;
    for (size_t c = 0; c < ARRAY_LEN(walks); c++) {
        struct walk w = walk_new();
        char *end;

        rig_copy(&rig.side[GPU], w.s.arena->mem[GPU], w.begin, w.s.arena->bytes[GPU], true);
        for (int pass = 0; w.at[0] < WALK_ROWS || w.at[1] < WALK_ROWS; pass++) {
            const bool is_prefill = walks[c].has_prefills && pass % 4 == 3;
            const int n_bufs = rig.n_bufs;
            int n[N_SEGS], commits[N_SEGS];

            for (int seg = 0; seg < N_SEGS; seg++) {
                const int left = WALK_ROWS - w.at[seg], most = is_prefill ? 1 + pass * 13 % 71 : walks[c].block;

                n[seg] = most < left ? most : left;
                commits[seg] = is_prefill              ? n[seg]
                               : (pass + seg) % 3 == 0 ? n[seg]
                                                       : (pass * 5 + seg * 3) % (n[seg] + 1);
            }
            step(&w, is_prefill ? GDN_ADVANCE : GDN_FROZEN, n, commits, pass % 2 == 0);
            rig_forget(&rig, n_bufs);
        }
        end = bytes_of(w.s.arena, w.s.arena->bytes[GPU]);
        for (int seg = 0; seg < N_SEGS; seg++)
            assert_memory_equal(end + (size_t)w.state_slot[seg] * w.s.slot_bytes,
                                w.end + (size_t)w.state_slot[seg] * w.s.slot_bytes, w.s.slot_bytes);
        free(end);
        free(w.all_mz);
        free(w.all_ba);
        free(w.want);
        free(w.begin);
        free(w.end);
        rig_clear(&rig);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(frozen_rows_and_their_commit_agree, teardown),
        cmocka_unit_test_teardown(advancing_rows_agree, teardown),
        cmocka_unit_test_teardown(a_batch_without_segs_changes_nothing, teardown),
        cmocka_unit_test_teardown(pieces_of_any_length_leave_the_same_bits, teardown),
        cmocka_unit_test_teardown(a_seg_has_the_same_bits_alone_and_in_a_batch, teardown),
        cmocka_unit_test_teardown(what_a_run_before_left_in_scratch_is_not_read, teardown),
        cmocka_unit_test_teardown(a_row_is_the_same_bits_whichever_pass_it_was_in, teardown),
    };
    int failed;

    rig_open(&rig);
    failed = cmocka_run_group_tests(tests, NULL, NULL);
    rig_close(&rig);
    return failed;
}
