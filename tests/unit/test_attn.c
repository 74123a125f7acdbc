#include "fake/cpu_program.h"
#include "cpu/kv_elem.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

enum { LAYER = 1, N_LAYERS = 2, N_SLOTS = 2 };

/* One seq's (or two seqs') keys in pages at random places, everything else NaN. */
struct fixture {
    struct fake_device fake;
    struct fake_random random;
    int heads, kv_heads, dim, n_pages_max, n_pages;
    struct kv_view kv;
    int32_t *table;
    float k_scale[N_LAYERS], v_scale[N_LAYERS];
    int len[N_SLOTS];               /* K/V hold exactly positions [0, len) */
    float *k[N_SLOTS], *v[N_SLOTS]; /* f32 [len, kv_heads, dim] what was written */
    struct batch *batch;
    struct seq_ctl ctl[N_SLOTS];
    float *q, *gate, *block_k, *block_v, *out;
    bool use_block, block_causal, use_gate;
    int window;
};

struct dims {
    int heads, kv_heads, dim;
};
static const struct dims dims_small = {4, 2, 16};

static void fixture_init(struct fixture *f, struct dims dims, enum dtype dtype, float k_scale, float v_scale,
                         const int len[N_SLOTS], uint64_t seed) {
    int n_used = 0, *free_pages;

    memset(f, 0, sizeof *f);
    fake_device_init(&f->fake, NUMERIC_REFERENCE, CPU_ISA_SCALAR, 1);
    f->random.state = seed;
    f->heads = dims.heads;
    f->kv_heads = dims.kv_heads;
    f->dim = dims.dim;
    f->n_pages_max = (int)div_ceil((uint64_t)max_int(len[0], len[1]) + 1, PAGE_TOKENS);
    f->n_pages = 1 + N_SLOTS * f->n_pages_max + 2; /* the null page, and two that belong to nobody */
    f->table = calloc((size_t)(N_SLOTS * f->n_pages_max), sizeof *f->table);
    free_pages = calloc((size_t)f->n_pages, sizeof *free_pages);
    for (int i = 0; i < f->n_pages - 1; i++)
        free_pages[i] = i + 1;
    for (int i = f->n_pages - 2; i > 0; i--) {
        int j = fake_random_below(&f->random, i + 1), page = free_pages[i];

        free_pages[i] = free_pages[j];
        free_pages[j] = page;
    }
    for (int l = 0; l < N_LAYERS; l++) {
        f->k_scale[l] = l == LAYER ? k_scale : 99;
        f->v_scale[l] = l == LAYER ? v_scale : 99;
    }
    f->kv = (struct kv_view){
        .dtype = dtype,
        .n_layers = N_LAYERS,
        .n_kv_heads = dims.kv_heads,
        .head_dim = dims.dim,
        .page_bytes = kv_page_bytes(dtype, N_LAYERS, dims.kv_heads, dims.dim),
        .table = f->table,
        .n_pages_max = f->n_pages_max,
        .k_scale = f->k_scale,
        .v_scale = f->v_scale,
    };
    f->kv.arena = malloc((size_t)f->n_pages * f->kv.page_bytes);
    memset(f->kv.arena, 0xff, (size_t)f->n_pages * f->kv.page_bytes); /* NaN in every element type */
    for (int slot = 0; slot < N_SLOTS; slot++) {
        const size_t row = (size_t)(dims.kv_heads * dims.dim);

        f->len[slot] = len[slot];
        f->k[slot] = fake_random_floats(&f->random, (size_t)len[slot] * row + 1, -2, 2);
        f->v[slot] = fake_random_floats(&f->random, (size_t)len[slot] * row + 1, -2, 2);
        for (int pos = 0; pos < len[slot]; pos++) {
            if (pos % PAGE_TOKENS == 0)
                f->table[slot * f->n_pages_max + pos / PAGE_TOKENS] = free_pages[n_used++];
            for (int h = 0; h < dims.kv_heads; h++) {
                const size_t at = (size_t)pos * row + (size_t)(h * dims.dim);

                kv_write(&f->kv, slot, LAYER, KV_K, h, pos, f->k[slot] + at);
                kv_write(&f->kv, slot, LAYER, KV_V, h, pos, f->v[slot] + at);
            }
        }
    }
    free(free_pages);
}

/* The rows: n_rows[slot] of each slot from position start[slot] on; 0 rows: the slot is not in the batch. */
static void fixture_rows(struct fixture *f, const int start[N_SLOTS], const int n_rows[N_SLOTS]) {
    const int n = n_rows[0] + n_rows[1];
    const size_t q_row = (size_t)(f->heads * f->dim), kv_row_len = (size_t)(f->kv_heads * f->dim);

    f->batch = fake_batch_new(N_SLOTS, n);
    for (int slot = N_SLOTS - 1; slot >= 0; slot--)
        if (n_rows[slot] > 0)
            fake_batch_add(f->batch, slot, start[slot], n_rows[slot], 0);
    f->q = fake_random_floats(&f->random, (size_t)n * q_row, -2, 2);
    f->gate = fake_random_floats(&f->random, (size_t)n * (2 * q_row + 3), -4, 4);
    f->block_k = fake_random_floats(&f->random, (size_t)n * kv_row_len, -2, 2);
    f->block_v = fake_random_floats(&f->random, (size_t)n * kv_row_len, -2, 2);
    f->out = calloc((size_t)n * q_row, sizeof *f->out);
}

static void fixture_deinit(struct fixture *f) {
    void *const owned[] = {f->table, f->kv.arena, f->k[0],    f->k[1],    f->v[0], f->v[1],
                           f->q,     f->gate,     f->block_k, f->block_v, f->out};

    for (size_t i = 0; i < ARRAY_LEN(owned); i++)
        free(owned[i]);
    fake_batch_free(f->batch);
}

static void fixture_run(struct fixture *f, enum numeric numeric, enum cpu_isa isa, int n_workers) {
    struct program *program;

    fake_device_init(&f->fake, numeric, isa, n_workers);
    f->fake.backwards = n_workers == 3;
    program = fake_program_new(&f->fake);
    for (int i = 0; i < *f->batch->n_rows * f->heads * f->dim; i++)
        f->out[i] = NAN;
    assert_int_equal(cpu_attn(program,
                              &(struct attn_args){
                                  .batch = f->batch,
                                  .q = f->q,
                                  .n_heads = f->heads,
                                  .n_kv_heads = f->kv_heads,
                                  .head_dim = f->dim,
                                  .gate = f->use_gate ? f->gate : NULL,
                                  .gate_stride = 2 * f->heads * f->dim + 3,
                                  .gate_head_stride = 2 * f->dim,
                                  .kv = &f->kv,
                                  .layer = LAYER,
                                  .block_k = f->use_block ? f->block_k : NULL,
                                  .block_v = f->use_block ? f->block_v : NULL,
                                  .block_causal = f->block_causal,
                                  .window = f->window,
                                  .ctl = f->use_block ? f->ctl : NULL,
                                  .out = f->out,
                              }),
                     0);
    fake_program_run(program);
    fake_program_free(program);
}

/* Plain softmax over all keys the definition shows to row j of a seg, from the values before they went into the cache. */
static void expect_row(const struct fixture *f, int seg, int j, int head, double *y) {
    const int slot = f->batch->seg_slot[seg], start = f->batch->seg_pos[seg], row0 = f->batch->seg_row[seg];
    const int n_rows = f->batch->seg_row[seg + 1] - row0, pos = start + j, d = f->dim;
    const int kv_head = head / (f->heads / f->kv_heads);
    const float *q = f->q + ((row0 + j) * f->heads + head) * d;
    const int end = f->use_block ? start + n_rows : pos + 1;
    double max = -INFINITY, sum = 0, *scores = malloc((size_t)(end + 1) * sizeof *scores);

    memset(y, 0, (size_t)d * sizeof *y);
    for (int pass = 0; pass < 2; pass++)
        for (int p = 0; p < end; p++) {
            const bool in_block = f->use_block && p >= start;
            const size_t at = in_block ? (size_t)(((row0 + p - start) * f->kv_heads + kv_head) * d)
                                       : (size_t)((p * f->kv_heads + kv_head) * d);
            const float *k = (in_block ? f->block_k : f->k[slot]) + at;
            const float *v = (in_block ? f->block_v : f->v[slot]) + at;

            if (f->window > 0 && p < pos - (f->window - 1))
                continue;
            if (in_block && f->block_causal && p > pos)
                continue;
            if (f->use_block && !in_block && p < f->ctl[slot].draft_valid_from)
                continue;
            if (pass == 0) {
                scores[p] = 0;
                for (int i = 0; i < d; i++)
                    scores[p] += (double)q[i] * (double)k[i] / sqrt(d);
                max = fmax(max, scores[p]);
            } else {
                double w = exp(scores[p] - max);

                sum += w;
                for (int i = 0; i < d; i++)
                    y[i] += w * (double)v[i];
            }
        }
    for (int i = 0; i < d; i++) {
        y[i] = sum > 0 ? y[i] / sum : 0;
        if (f->use_gate)
            y[i] /= 1 + exp(-(double)f->gate[(row0 + j) * (2 * f->heads * d + 3) + head * 2 * d + i]);
    }
    free(scores);
}

/* Largest difference, relative to the largest value. */
static double fixture_error(const struct fixture *f) {
    double error = 0, largest = 1e-3, *y = malloc((size_t)f->dim * sizeof *y);

    for (int seg = 0; seg < *f->batch->n_segs; seg++)
        for (int row = f->batch->seg_row[seg]; row < f->batch->seg_row[seg + 1]; row++)
            for (int h = 0; h < f->heads; h++) {
                expect_row(f, seg, row - f->batch->seg_row[seg], h, y);
                for (int i = 0; i < f->dim; i++) {
                    double diff = fabs((double)f->out[(row * f->heads + h) * f->dim + i] - y[i]);

                    error = isnan(diff) ? INFINITY : fmax(error, diff);
                    largest = fmax(largest, fabs(y[i]));
                }
            }
    free(y);
    return error / largest;
}

/* Every path on this fixture, with one, two and three workers, against the definition; the paths' own tolerance is far
 * below the cache type's. */
static void check_all_paths(struct fixture *f, double cache_tolerance) {
    const size_t bytes = (size_t)(*f->batch->n_rows * f->heads * f->dim) * sizeof(float);
    float *first = malloc(bytes + 1);
    static const struct {
        enum numeric numeric;
        enum cpu_isa isa;
        double tolerance;
    } paths[] = {{NUMERIC_REFERENCE, CPU_ISA_SCALAR, 2e-7},
                 {NUMERIC_BF16, CPU_ISA_SCALAR, 4e-3},
                 {NUMERIC_FAST, CPU_ISA_SCALAR, 1e-5},
                 {NUMERIC_FAST, CPU_ISA_AVX2, 1e-5}};

    for (size_t i = 0; i < ARRAY_LEN(paths); i++) {
        if (paths[i].isa > fake_best_isa())
            continue;
        for (int n_workers = 1; n_workers <= 3; n_workers++) {
            fixture_run(f, paths[i].numeric, paths[i].isa, n_workers);
            if (n_workers == 1) {
                double error = fixture_error(f);

                if (!(error <= paths[i].tolerance + cache_tolerance))
                    fail_msg("numeric %d isa %d: error %g", (int)paths[i].numeric, (int)paths[i].isa, error);
                memcpy(first, f->out, bytes);
            }
            assert_memory_equal(first, f->out, bytes);
        }
    }
    free(first);
}

static void check(struct fixture *f, const int start[N_SLOTS], const int n_rows[N_SLOTS], double cache_tolerance) {
    fixture_rows(f, start, n_rows);
    check_all_paths(f, cache_tolerance);
    fixture_deinit(f);
}

/* ---- against the definition ---- */

static void causal_rows_see_all_positions_up_to_their_own(void **state) {
    static const int lens[] = {1, 15, 63, 64, 65, 1023, 1024, 1025, 3000};
    struct fixture f;

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(lens); i++)
        for (int n_rows = 1; n_rows <= 16; n_rows += 5) {
            int n = min_int(n_rows, lens[i]);

            fixture_init(&f, dims_small, DTYPE_F32, 1, 1, (const int[]){lens[i], 70}, 10 + i);
            f.use_gate = n_rows > 1;
            check(&f, (const int[]){lens[i] - n, 66}, (const int[]){n, 4}, 0);
        }
}

static void head_counts_and_sizes_of_real_models_work(void **state) {
    static const struct dims dims[] = {{8, 2, 256},  {24, 4, 256}, {16, 1, 64}, {3, 3, 32},
                                       {12, 4, 128}, {5, 1, 8},    {2, 1, 2}};
    struct fixture f;

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(dims); i++) {
        fixture_init(&f, dims[i], DTYPE_BF16, 1, 1, (const int[]){150, 20}, 20 + i);
        f.use_gate = true;
        check(&f, (const int[]){147, 0}, (const int[]){3, 20}, 1e-2);
    }
}

static void windows_cut_off_older_positions(void **state) {
    enum { W = 100 };
    static const int lens[] = {1, W - 1, W, W + 1, 3 * W, 1100};
    struct fixture f;

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(lens); i++)
        for (int window = 1; window <= W; window += W - 1) {
            int n = min_int(9, lens[i]);

            fixture_init(&f, dims_small, DTYPE_F32, 1, 1, (const int[]){lens[i], 1}, 30 + i);
            f.window = window;
            check(&f, (const int[]){lens[i] - n, 0}, (const int[]){n, 0}, 0);
        }
}

/* The draft form: N context positions, B rows of which none is in the pages. */
static void draft_blocks_see_context_and_themselves(void **state) {
    enum { W = 80 };
    static const int contexts[] = {0, 1, 15, 63, 64, 65, W - 1, W, W + 1, 3 * W, 1023, 1024, 1025, 3000};
    static const int blocks[] = {1, 2, 8, 16};
    struct fixture f;

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(contexts); i++)
        for (size_t b = 0; b < ARRAY_LEN(blocks); b++)
            for (int form = 0; form < 4; form++) {
                fixture_init(&f, dims_small, DTYPE_F32, 1, 1, (const int[]){contexts[i], 40}, 40 + i);
                f.use_block = true;
                f.block_causal = form & 1;
                f.window = form & 2 ? W : 0;
                check(&f, (const int[]){contexts[i], 40}, (const int[]){blocks[b], form == 0 ? 3 : 0}, 0);
            }
}

static void a_window_below_the_block_cuts_block_rows_too(void **state) {
    struct fixture f;

    (void)state;
    fixture_init(&f, dims_small, DTYPE_F32, 1, 1, (const int[]){30, 1}, 50);
    f.use_block = true;
    f.window = 4;
    check(&f, (const int[]){30, 0}, (const int[]){16, 0}, 0);
}

static void context_before_valid_from_is_masked(void **state) {
    static const int valid_from[] = {1, 64, 100, 1030, 1199, 1200, 5000};
    struct fixture f;

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(valid_from); i++) {
        fixture_init(&f, dims_small, DTYPE_F32, 1, 1, (const int[]){1200, 10}, 60);
        f.use_block = true;
        f.ctl[0].draft_valid_from = valid_from[i];
        for (int p = 0; p < min_int(valid_from[i], 1200) / PAGE_TOKENS; p++)
            f.table[p] = 0; /* the null page: NaN here, so reading it would show */
        check(&f, (const int[]){1200, 0}, (const int[]){16, 0}, 0);
    }
}

static void element_types_and_scales_are_honoured(void **state) {
    static const struct {
        enum dtype dtype;
        float k_scale, v_scale;
        double tolerance;
    } cases[] = {{DTYPE_F32, 1, 1, 0},         {DTYPE_F32, 0.3f, 5, 1e-6},      {DTYPE_BF16, 1, 1, 1e-2},
                 {DTYPE_BF16, 3, 0.25f, 1e-2}, {DTYPE_F16, 1, 1, 2e-3},         {DTYPE_F16, 0.5f, 3, 2e-3},
                 {DTYPE_E4M3, 1, 1, 6e-2},     {DTYPE_E4M3, 0.01f, 0.02f, 6e-2}};
    struct fixture f;

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(cases); i++)
        for (int use_block = 0; use_block < 2; use_block++) {
            fixture_init(&f, dims_small, cases[i].dtype, cases[i].k_scale, cases[i].v_scale, (const int[]){1300, 90},
                         70);
            f.use_block = use_block;
            check(&f, (const int[]){use_block ? 1300 : 1295, 85}, (const int[]){5, use_block ? 0 : 5},
                  cases[i].tolerance);
        }
}

/* With one key the output is the stored value: all 256 patterns of e4m3, and as many of the wider types. */
static void check_loads(enum numeric numeric, enum cpu_isa isa) {
    for (int dtype = DTYPE_F32; dtype < DTYPE_N; dtype++) {
        const size_t elem = dtype_bytes((enum dtype)dtype);
        struct fixture f;
        float want[256];
        char *row;

        fixture_init(&f, (struct dims){1, 1, 256}, (enum dtype)dtype, 1, 1, (const int[]){1, 1}, 75);
        fixture_rows(&f, (const int[]){0, 0}, (const int[]){1, 0});
        row = kv_row(&f.kv, kv_page_of(&f.kv, 0, 0), LAYER, KV_V, 0, 0);
        for (int i = 0; i < 256; i++)
            for (size_t b = 0; b < elem; b++) /* the byte that holds the sign and the exponent counts up */
                row[(size_t)i * elem + b] = (char)(b == elem - 1 ? i : fake_random_below(&f.random, 256));
        kv_elems_load((enum dtype)dtype, want, row, 256);
        fixture_run(&f, numeric, isa, 1);
        for (int i = 0; i < 256; i++) {
            float y = numeric == NUMERIC_BF16 ? bf16_round(want[i]) : want[i];

            assert_true(isnan(y) ? isnan(f.out[i]) : f.out[i] == y);
        }
        fixture_deinit(&f);
    }
}

static void each_path(void (*test)(enum numeric numeric, enum cpu_isa isa)) {
    for (int numeric = NUMERIC_FAST; numeric <= NUMERIC_REFERENCE; numeric++)
        test((enum numeric)numeric, CPU_ISA_SCALAR);
    if (fake_best_isa() == CPU_ISA_AVX2)
        test(NUMERIC_FAST, CPU_ISA_AVX2);
}

static void a_single_key_yields_its_stored_value(void **state) {
    (void)state;
    each_path(check_loads);
}

/* ---- bits ---- */

static void check_rows_alone(struct dims dims, enum numeric numeric, enum cpu_isa isa) {
    enum { LEN = 1090, ROWS = 70 }; /* rows on both sides of a span's end */
    struct fixture f;
    const int row_len = dims.heads * dims.dim;
    float *together;
    int32_t pos, row0, *row_seg;

    fixture_init(&f, dims, DTYPE_BF16, 1, 1, (const int[]){LEN, 5}, 80);
    fixture_rows(&f, (const int[]){LEN - ROWS, 4}, (const int[]){ROWS, 1});
    f.use_gate = true;
    fixture_run(&f, numeric, isa, 2);
    together = malloc((size_t)((ROWS + 1) * row_len) * sizeof *together);
    memcpy(together, f.out, (size_t)((ROWS + 1) * row_len) * sizeof *together);
    pos = f.batch->seg_pos[1];
    row0 = f.batch->seg_row[1];
    row_seg = f.batch->row_seg;
    for (int j = 0; j < ROWS; j++) {
        f.batch->seg_pos[1] = pos + j;
        f.batch->seg_row[0] = f.batch->seg_row[1] = row0 + j;
        f.batch->seg_row[2] = row0 + j + 1;
        row_seg[row0 + j] = 1;
        fixture_run(&f, numeric, isa, 1);
        assert_memory_equal(f.out + (row0 + j) * row_len, together + (row0 + j) * row_len, (size_t)row_len * 4);
    }
    free(together);
    fixture_deinit(&f);
}

static void check_rows_alone_in_all_groupings(enum numeric numeric, enum cpu_isa isa) {
    check_rows_alone(dims_small, numeric, isa);
    check_rows_alone((struct dims){7, 1, 24}, numeric, isa); /* 4 + 2 + 1 heads at a time */
    check_rows_alone((struct dims){1, 1, 72}, numeric, isa);
}

static void rows_together_equal_rows_one_by_one(void **state) {
    (void)state;
    each_path(check_rows_alone_in_all_groupings);
}

static void check_pages_move(enum numeric numeric, enum cpu_isa isa) {
    struct fixture f;
    float *before;
    size_t bytes;
    char *arena;

    fixture_init(&f, dims_small, DTYPE_E4M3, 0.5f, 2, (const int[]){1500, 100}, 90);
    fixture_rows(&f, (const int[]){1490, 99}, (const int[]){10, 1});
    fixture_run(&f, numeric, isa, 1);
    bytes = (size_t)(11 * f.heads * f.dim) * sizeof(float);
    before = malloc(bytes);
    memcpy(before, f.out, bytes);
    arena = malloc((size_t)f.n_pages * f.kv.page_bytes);
    memset(arena, 0xff, (size_t)f.n_pages * f.kv.page_bytes);
    for (int i = 0; i < N_SLOTS * f.n_pages_max; i++) /* reversed: page p lies where n_pages - p was */
        if (f.table[i] != 0) {
            int to = f.n_pages - f.table[i];

            memcpy(arena + (size_t)to * f.kv.page_bytes, (char *)f.kv.arena + (size_t)f.table[i] * f.kv.page_bytes,
                   f.kv.page_bytes);
            f.table[i] = to;
        }
    free(f.kv.arena);
    f.kv.arena = arena;
    fixture_run(&f, numeric, isa, 1);
    assert_memory_equal(f.out, before, bytes);
    free(before);
    fixture_deinit(&f);
}

static void where_pages_lie_does_not_change_a_bit(void **state) {
    (void)state;
    each_path(check_pages_move);
}

static void check_masked(enum numeric numeric, enum cpu_isa isa) {
    struct fixture f;

    fixture_init(&f, dims_small, DTYPE_F32, 1, 1, (const int[]){200, 1}, 100);
    for (int p = 0; p < 3; p++)
        f.table[p] = 0;
    fixture_rows(&f, (const int[]){-1, 0}, (const int[]){1, 0}); /* a row at position -1 sees no key */
    fixture_run(&f, numeric, isa, 1);
    for (int i = 0; i < f.heads * f.dim; i++)
        assert_true(f.out[i] == 0);
    fixture_deinit(&f);
}

static void a_row_without_keys_yields_zeros(void **state) {
    (void)state;
    each_path(check_masked);
}

static void check_scores(enum numeric numeric, enum cpu_isa isa) {
    struct fixture f;

    fixture_init(&f, dims_small, DTYPE_F32, 1, 1, (const int[]){2500, 1}, 110);
    fixture_rows(&f, (const int[]){2499, 0}, (const int[]){1, 0});
    for (int i = 0; i < f.heads * f.dim; i++)
        f.q[i] *= 200; /* scores of hundreds: whole spans weigh nothing */
    fixture_run(&f, numeric, isa, 1);
    assert_true(fixture_error(&f) < 1e-2);
    fixture_deinit(&f);
}

static void very_uneven_scores_stay_finite(void **state) {
    (void)state;
    each_path(check_scores);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(causal_rows_see_all_positions_up_to_their_own),
        cmocka_unit_test(head_counts_and_sizes_of_real_models_work),
        cmocka_unit_test(windows_cut_off_older_positions),
        cmocka_unit_test(draft_blocks_see_context_and_themselves),
        cmocka_unit_test(a_window_below_the_block_cuts_block_rows_too),
        cmocka_unit_test(context_before_valid_from_is_masked),
        cmocka_unit_test(element_types_and_scales_are_honoured),
        cmocka_unit_test(a_single_key_yields_its_stored_value),
        cmocka_unit_test(rows_together_equal_rows_one_by_one),
        cmocka_unit_test(where_pages_lie_does_not_change_a_bit),
        cmocka_unit_test(a_row_without_keys_yields_zeros),
        cmocka_unit_test(very_uneven_scores_stay_finite),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
