#include "fake/cpu_program.h"
#include "cpu/kv_elem.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <cmocka.h>

enum { HEADS = 3, KV_HEADS = 2, DIM = 16, ROTARY = 8, N_PAGES_MAX = 4, N_PAGES = 9, N_SLOTS = 2, N_LAYERS = 2 };

struct cache {
    struct kv_view view;
    int32_t table[N_SLOTS * N_PAGES_MAX];
    float k_scale[N_LAYERS], v_scale[N_LAYERS];
};

static void cache_init(struct cache *c, enum dtype dtype, float k_scale, float v_scale) {
    for (int i = 0; i < N_SLOTS * N_PAGES_MAX; i++)
        c->table[i] = N_PAGES - 1 - i;
    for (int l = 0; l < N_LAYERS; l++) {
        c->k_scale[l] = k_scale + (float)l;
        c->v_scale[l] = v_scale + (float)l;
    }
    c->view = (struct kv_view){
        .dtype = dtype,
        .n_layers = N_LAYERS,
        .n_kv_heads = KV_HEADS,
        .head_dim = DIM,
        .page_bytes = kv_page_bytes(dtype, N_LAYERS, KV_HEADS, DIM),
        .table = c->table,
        .n_pages_max = N_PAGES_MAX,
        .k_scale = c->k_scale,
        .v_scale = c->v_scale,
    };
    c->view.arena = calloc(N_PAGES, c->view.page_bytes);
    assert_non_null(c->view.arena);
}

static void cache_read(const struct cache *c, int slot, int layer, enum kv_half half, int head, int pos, float *x) {
    float scale = half == KV_K ? c->k_scale[layer] : c->v_scale[layer];

    memset(x, 0, DIM * sizeof *x); /* at -O3 gcc does not see that every type loads all of it */
    kv_elems_load(c->view.dtype, x, kv_row(&c->view, kv_page_of(&c->view, slot, pos), layer, half, head, pos), DIM);
    for (int i = 0; i < DIM; i++)
        x[i] *= scale;
}

static bool is_zero(const void *p, size_t bytes) {
    for (size_t i = 0; i < bytes; i++)
        if (((const char *)p)[i] != 0)
            return false;
    return true;
}

static float inv_freq[ROTARY / 2];
static float norm_w[DIM];

static int set_up(void **state) {
    (void)state;
    for (int i = 0; i < ROTARY / 2; i++)
        inv_freq[i] = powf(1e7f, -(float)i / (ROTARY / 2));
    for (int i = 0; i < DIM; i++)
        norm_w[i] = 1 + 0.01f * (float)i;
    return 0;
}

/* What qk must make of one head, spelt out. */
static void expect_head(const float *x, const float *w, int pos, float *y) {
    double sum = 0;

    for (int i = 0; i < DIM; i++)
        sum += (double)x[i] * (double)x[i];
    for (int i = 0; i < DIM; i++)
        y[i] = (float)((double)x[i] / sqrt(sum / DIM + 1e-6) * (double)w[i]);
    for (int i = 0; i < ROTARY / 2; i++) {
        float angle = (float)pos * inv_freq[i], a = y[i], b = y[i + ROTARY / 2];

        y[i] = (float)((double)a * cos((double)angle) - (double)b * sin((double)angle));
        y[i + ROTARY / 2] = (float)((double)b * cos((double)angle) + (double)a * sin((double)angle));
    }
}

static void assert_near(const float *x, const float *y, int n, float tolerance) {
    for (int i = 0; i < n; i++)
        if (!(fabsf(x[i] - y[i]) <= tolerance * fmaxf(1, fabsf(y[i]))))
            fail_msg("element %d: %.9g, want %.9g", i, (double)x[i], (double)y[i]);
}

static void position_five_turns_pairs_by_the_known_angles(void **state) {
    struct fake_device fake;
    struct program *program;
    struct batch *batch = fake_batch_new(1, 1);
    const float freq[2] = {1, 0.6042964f}, ones[4] = {1, 1, 1, 1};
    /* rms of each head is 1 */
    const float qkv[12] = {1, 1, 1, 1, 1, -1, 1, -1, 0.25f, 0.5f, 0.75f, 1};
    float q[4], k[4], v[4];

    (void)state;
    fake_device_init(&fake, NUMERIC_REFERENCE, CPU_ISA_SCALAR, 1);
    program = fake_program_new(&fake);
    fake_batch_add(batch, 0, 5, 1, 0);
    assert_int_equal(cpu_qk(program, &(struct qk_args){.batch = batch,
                                                       .qkv = qkv,
                                                       .qkv_stride = 12,
                                                       .n_heads = 1,
                                                       .n_kv_heads = 1,
                                                       .head_dim = 4,
                                                       .q_norm = ones,
                                                       .k_norm = ones,
                                                       .rope = {freq, 4},
                                                       .q = q,
                                                       .block_k = k,
                                                       .block_v = v}),
                     0);
    fake_program_run(program);
    /* slot 0: cos 0.2836622 sin -0.9589243; slot 1: cos -0.9927954 sin 0.1198221 */
    assert_near(q, (const float[]){1.2425865f, -1.1126175f, -0.6752621f, -0.8729733f}, 4, 2e-6f);
    assert_near(k, (const float[]){1.2425865f, 1.1126175f, -0.6752621f, 0.8729733f}, 4, 2e-6f);
    assert_memory_equal(v, qkv + 8, sizeof v);
    fake_program_free(program);
    fake_batch_free(batch);
}

static void qk_splits_norms_turns_and_writes_pages(void **state) {
    const int width = HEADS * 2 * DIM + 2 * KV_HEADS * DIM, n_rows = 70;
    struct fake_random random = {1};
    struct batch *batch = fake_batch_new(2, n_rows);
    float *qkv = fake_random_floats(&random, (size_t)(n_rows * width), -2, 2), *q = calloc(70, HEADS * DIM * 4);
    float *before = malloc((size_t)(n_rows * width) * sizeof *before);

    memcpy(before, qkv, (size_t)(n_rows * width) * sizeof *before);
    (void)state;
    fake_batch_add(batch, 1, 60, 66, SEG_PREFILL);
    fake_batch_add(batch, 0, 190, 4, 0);
    for (int n_workers = 1; n_workers <= 3; n_workers++) {
        struct fake_device fake;
        struct program *program;
        struct cache cache;

        fake_device_init(&fake, NUMERIC_REFERENCE, CPU_ISA_SCALAR, n_workers);
        cache_init(&cache, DTYPE_F32, 0.5f, 2);
        program = fake_program_new(&fake);
        assert_int_equal(cpu_qk(program, &(struct qk_args){.batch = batch,
                                                           .qkv = qkv,
                                                           .qkv_stride = width,
                                                           .n_heads = HEADS,
                                                           .n_kv_heads = KV_HEADS,
                                                           .head_dim = DIM,
                                                           .has_gate = true,
                                                           .q_norm = norm_w,
                                                           .k_norm = norm_w,
                                                           .eps = 1e-6f,
                                                           .rope = {inv_freq, ROTARY},
                                                           .q = q,
                                                           .kv = &cache.view,
                                                           .layer = 1}),
                         0);
        fake_program_run(program);
        for (int row = 0; row < n_rows; row++) {
            int seg = batch->row_seg[row], pos = batch->seg_pos[seg] + row - batch->seg_row[seg];
            float want[DIM], got[DIM];

            for (int h = 0; h < HEADS; h++) {
                expect_head(qkv + row * width + h * 2 * DIM, norm_w, pos, want);
                assert_near(q + (row * HEADS + h) * DIM, want, DIM, 1e-6f);
            }
            for (int h = 0; h < KV_HEADS; h++) {
                const float *k = qkv + row * width + HEADS * 2 * DIM + h * DIM, *v = k + KV_HEADS * DIM;

                expect_head(k, norm_w, pos, want);
                cache_read(&cache, batch->seg_slot[seg], 1, KV_K, h, pos, got);
                assert_near(got, want, DIM, 1e-6f);
                cache_read(&cache, batch->seg_slot[seg], 1, KV_V, h, pos, got);
                assert_near(got, v, DIM, 1e-6f);
            }
        }
        assert_memory_equal(qkv, before, (size_t)(n_rows * width) * sizeof *before); /* the gate stays in place */
        fake_program_free(program);
        free(cache.view.arena);
    }
    free(qkv);
    free(before);
    free(q);
    fake_batch_free(batch);
}

static void element_types_and_scales_are_honoured_by_the_writer(void **state) {
    static const struct {
        enum dtype dtype;
        float scale, tolerance;
    } cases[] = {{DTYPE_F32, 1, 0},     {DTYPE_F32, 3, 1e-7f}, {DTYPE_BF16, 1, 4e-3f},   {DTYPE_BF16, 0.1f, 4e-3f},
                 {DTYPE_F16, 1, 5e-4f}, {DTYPE_F16, 7, 5e-4f}, {DTYPE_E4M3, 1, 6.3e-2f}, {DTYPE_E4M3, 0.01f, 6.3e-2f}};
    struct fake_random random = {2};

    (void)state;
    for (size_t c = 0; c < ARRAY_LEN(cases); c++) {
        struct cache cache;
        float *x = fake_random_floats(&random, DIM, -2, 2), got[DIM];

        cache_init(&cache, cases[c].dtype, cases[c].scale, cases[c].scale);
        kv_write(&cache.view, 1, 0, KV_V, 1, 100, x);
        cache_read(&cache, 1, 0, KV_V, 1, 100, got);
        for (int i = 0; i < DIM; i++)
            assert_true(fabsf(got[i] - x[i]) <= cases[c].tolerance * fmaxf(fabsf(x[i]), cases[c].scale * 0x1p-6f));
        free(x);
        free(cache.view.arena);
    }
}

static void e4m3_writes_saturate(void **state) {
    struct cache cache;
    float x[DIM] = {1e6f, -1e6f, 448, 449}, got[DIM];

    (void)state;
    cache_init(&cache, DTYPE_E4M3, 2, 2);
    kv_write(&cache.view, 0, 0, KV_K, 0, 0, x);
    cache_read(&cache, 0, 0, KV_K, 0, 0, got);
    assert_near(got, (const float[]){896, -896, 448, 448}, 4, 0);
    free(cache.view.arena);
}

static void draft_kv_writes_committed_rows_only(void **state) {
    enum { B = 16, WIDTH = 2 * 2 * KV_HEADS * DIM };
    struct fake_random random = {3};
    struct batch *batch = fake_batch_new(3, 64);
    int32_t commit[3] = {5, 0, 0};
    float *rows = fake_random_floats(&random, (size_t)(64 * WIDTH), -2, 2), other_norm[DIM];
    struct fake_device fake;
    struct program *program;
    struct cache full, sliding;
    struct draft_kv_layer layers[2] = {{&sliding.view, 1, norm_w}, {&full.view, 0, other_norm}};

    (void)state;
    for (int i = 0; i < DIM; i++)
        other_norm[i] = 2 - norm_w[i];
    cache_init(&full, DTYPE_F32, 1, 1);
    cache_init(&sliding, DTYPE_F32, 1, 1);
    fake_device_init(&fake, NUMERIC_FAST, CPU_ISA_SCALAR, 2);
    fake_batch_add(batch, 0, 58, B, 0);
    fake_batch_add(batch, 1, 130, 20, SEG_PREFILL);
    fake_batch_add(batch, 0, 200, 4, 0);       /* nothing of it stands */
    sliding.table[N_PAGES_MAX + 130 / 64] = 0; /* the window has left this page */
    program = fake_program_new(&fake);
    assert_int_equal(cpu_draft_kv(program, &(struct draft_kv_args){.batch = batch,
                                                                   .kv_rows = rows,
                                                                   .n_layers = 2,
                                                                   .n_kv_heads = KV_HEADS,
                                                                   .head_dim = DIM,
                                                                   .eps = 1e-6f,
                                                                   .rope = {inv_freq, ROTARY},
                                                                   .seg_commit = commit,
                                                                   .layers = layers}),
                     0);
    fake_program_run(program);
    for (int l = 0; l < 2; l++)
        for (int h = 0; h < KV_HEADS; h++)
            for (int row = 0; row < B + 20; row++) {
                int seg = batch->row_seg[row], j = row - batch->seg_row[seg], pos = batch->seg_pos[seg] + j;
                const float *k = rows + row * WIDTH + l * 2 * KV_HEADS * DIM + h * DIM, *v = k + KV_HEADS * DIM;
                const struct cache *cache = l == 0 ? &sliding : &full;
                float want[DIM], got_k[DIM], got_v[DIM];

                cache_read(cache, seg, layers[l].layer, KV_K, h, pos, got_k);
                cache_read(cache, seg, layers[l].layer, KV_V, h, pos, got_v);
                if ((seg == 0 && j >= commit[0]) || (seg == 1 && l == 0)) {
                    assert_true(is_zero(got_k, sizeof got_k) && is_zero(got_v, sizeof got_v));
                } else {
                    expect_head(k, layers[l].k_norm, pos, want);
                    assert_near(got_k, want, DIM, 1e-6f);
                    assert_near(got_v, v, DIM, 0);
                }
            }
    assert_true(is_zero(sliding.view.arena, sliding.view.page_bytes)); /* the null page is never written */
    for (int pos = 192; pos < 256; pos++) {
        float got[DIM];

        cache_read(&full, 0, 0, KV_K, 0, pos, got);
        assert_true(is_zero(got, sizeof got));
    }
    fake_program_free(program);
    fake_batch_free(batch);
    free(rows);
    free(full.view.arena);
    free(sliding.view.arena);
}

static void block_rows_are_rounded_in_bf16_mode_only(void **state) {
    const int width = (HEADS + 2 * KV_HEADS) * DIM;
    struct fake_random random = {4};
    struct batch *batch = fake_batch_new(1, 4);
    float *qkv = fake_random_floats(&random, (size_t)(4 * width), -2, 2);
    float q[4 * HEADS * DIM], k[4 * KV_HEADS * DIM], v[4 * KV_HEADS * DIM];

    (void)state;
    fake_batch_add(batch, 0, 1000, 4, 0);
    for (int numeric = NUMERIC_FAST; numeric <= NUMERIC_REFERENCE; numeric++) {
        struct fake_device fake;
        struct program *program;
        bool rounded = true;

        fake_device_init(&fake, (enum numeric)numeric, CPU_ISA_SCALAR, 1);
        program = fake_program_new(&fake);
        assert_int_equal(cpu_qk(program, &(struct qk_args){.batch = batch,
                                                           .qkv = qkv,
                                                           .qkv_stride = width,
                                                           .n_heads = HEADS,
                                                           .n_kv_heads = KV_HEADS,
                                                           .head_dim = DIM,
                                                           .q_norm = norm_w,
                                                           .k_norm = norm_w,
                                                           .eps = 1e-6f,
                                                           .rope = {inv_freq, ROTARY},
                                                           .q = q,
                                                           .block_k = k,
                                                           .block_v = v}),
                         0);
        fake_program_run(program);
        for (size_t i = 0; i < ARRAY_LEN(k); i++)
            rounded = rounded && k[i] == bf16_round(k[i]) && v[i] == bf16_round(v[i]);
        for (size_t i = 0; i < ARRAY_LEN(q); i++)
            rounded = rounded && q[i] == bf16_round(q[i]);
        assert_int_equal(rounded, numeric == NUMERIC_BF16);
        fake_program_free(program);
    }
    free(qkv);
    fake_batch_free(batch);
}

static void store_rows_copies_the_rows_of_the_batch_and_no_more(void **state) {
    struct fake_random random = {5};
    struct batch *batch = fake_batch_new(1, 8);
    float *x = fake_random_floats(&random, 8 * 5, -1, 1), dst[8 * 5] = {0};

    (void)state;
    fake_batch_add(batch, 0, 0, 7, 0);
    for (int n_workers = 1; n_workers <= 3; n_workers++) {
        struct fake_device fake;
        struct program *program;

        fake_device_init(&fake, NUMERIC_FAST, CPU_ISA_SCALAR, n_workers);
        program = fake_program_new(&fake);
        assert_int_equal(cpu_store_rows(program, &(struct store_rows_args){batch, x, 5, dst}), 0);
        fake_program_run(program);
        assert_memory_equal(dst, x, 7 * 5 * sizeof *x);
        assert_true(is_zero(dst + 7 * 5, 5 * sizeof *x));
        fake_program_free(program);
    }
    free(x);
    fake_batch_free(batch);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(position_five_turns_pairs_by_the_known_angles),
        cmocka_unit_test(qk_splits_norms_turns_and_writes_pages),
        cmocka_unit_test(element_types_and_scales_are_honoured_by_the_writer),
        cmocka_unit_test(e4m3_writes_saturate),
        cmocka_unit_test(draft_kv_writes_committed_rows_only),
        cmocka_unit_test(block_rows_are_rounded_in_bf16_mode_only),
        cmocka_unit_test(store_rows_copies_the_rows_of_the_batch_and_no_more),
    };

    return cmocka_run_group_tests(tests, set_up, NULL);
}
