/* Packed weights: every element of every source format at its place, padding, and refusals. */
#include "cpu_rig.h"

#include <errno.h>

static float packed_at(const struct weight *weight, int stack_idx, int panel, int r, int k) {
    const void *p = weight_panel(weight, stack_idx, panel);
    size_t i = ((size_t)(k / 2) * PANEL_ROWS + (size_t)r) * 2 + (size_t)(k % 2);

    return weight->elem == DTYPE_BF16 ? bf16_to_f32(((const uint16_t *)p)[i]) : ((const float *)p)[i];
}

static float kept(const struct weight *weight, float v) {
    return weight->elem == DTYPE_BF16 ? bf16_round(v) : v;
}

static void check_rows(const struct weight *weight, int stack_idx, const float *values) {
    for (int n = 0; n < weight->n_panels * PANEL_ROWS; n++)
        for (int k = 0; k < 2 * weight->n_pairs; k++) {
            bool is_there = n < weight->n_rows && k < weight->n_cols;
            float want = is_there ? kept(weight, values[(size_t)n * (size_t)weight->n_cols + (size_t)k]) : 0;

            assert_true(packed_at(weight, stack_idx, n / PANEL_ROWS, n % PANEL_ROWS, k) == want);
        }
}

static const enum numeric numerics[] = {NUMERIC_FAST, NUMERIC_BF16, NUMERIC_REFERENCE};

static void every_format_is_packed_as_the_mode_asks(void **state) {
    static const enum dtype dtypes[] = {DTYPE_F32, DTYPE_BF16, DTYPE_F16};
    static const int shapes[][2] = {{1, 1}, {16, 2}, {17, 5}, {40, 33}};

    (void)state;
    for (size_t m = 0; m < ARRAY_LEN(numerics); m++) {
        struct rig rig = rig_open(&(struct backend_options){.numeric = numerics[m], .n_threads = 2});

        for (size_t d = 0; d < ARRAY_LEN(dtypes); d++)
            for (size_t s = 0; s < ARRAY_LEN(shapes); s++) {
                struct matrix w = matrix_new(&rig, shapes[s][0], shapes[s][1], dtypes[d]);
                struct weight *weight = rig_pack(&rig, &w, 1);
                bool is_bf16 = numerics[m] == NUMERIC_FAST || dtypes[d] == DTYPE_BF16;

                assert_int_equal(weight->elem, is_bf16 ? DTYPE_BF16 : DTYPE_F32);
                assert_int_equal(cpu_weight_rows(weight), shapes[s][0]);
                assert_int_equal(cpu_weight_cols(weight), shapes[s][1]);
                assert_int_equal(backend_cpu.weight_bytes(weight), weight->bytes);
                check_rows(weight, 0, w.f32);
                backend_cpu.weight_free(rig.device, weight);
                matrix_free(&w);
            }
        rig_close(&rig);
    }
}

/* Ragged blocks, scales of both formats, and a part that is a column and row slice of a larger tensor. */
static void fp8_blocks_are_scaled_in_f32(void **state) {
    enum { ROWS = 300, COLS = 261, SLICE_ROW = 128, SLICE_COL = 128, SCALE_COLS = 3 };

    (void)state;
    for (size_t m = 0; m < ARRAY_LEN(numerics); m++)
        for (int scale_bf16 = 0; scale_bf16 < 2; scale_bf16++) {
            struct rig rig = rig_open(&(struct backend_options){.numeric = numerics[m], .n_threads = 2});
            struct matrix w = matrix_new(&rig, ROWS, COLS, DTYPE_E4M3);
            struct matrix scale = matrix_new(&rig, 3, SCALE_COLS, scale_bf16 ? DTYPE_BF16 : DTYPE_F32);
            struct weight_part whole = matrix_part(&w), slice;
            struct weight_desc desc = {WEIGHT_ROWS, COLS, 1, 1, &whole};
            struct weight *weight;

            for (int n = 0; n < ROWS; n++)
                for (int k = 0; k < COLS; k++)
                    w.f32[n * COLS + k] *= scale.f32[n / 128 * SCALE_COLS + k / 128];
            whole.scale = scale.raw;
            whole.scale_dtype = scale.dtype;
            whole.scale_cols = SCALE_COLS;
            assert_int_equal(backend_cpu.weight_pack(rig.device, &desc, &weight), 0);
            assert_int_equal(weight->elem, numerics[m] == NUMERIC_FAST ? DTYPE_BF16 : DTYPE_F32);
            check_rows(weight, 0, w.f32);
            backend_cpu.weight_free(rig.device, weight);

            slice = whole;
            slice.data = (const char *)w.raw + SLICE_ROW * COLS + SLICE_COL;
            slice.scale = (const char *)scale.raw + (SCALE_COLS + 1) * dtype_bytes(scale.dtype);
            slice.n_rows = ROWS - SLICE_ROW;
            desc = (struct weight_desc){WEIGHT_ROWS, COLS - SLICE_COL, 1, 1, &slice};
            assert_int_equal(backend_cpu.weight_pack(rig.device, &desc, &weight), 0);
            for (int n = 0; n < slice.n_rows; n++)
                for (int k = 0; k < desc.n_cols; k++)
                    assert_true(packed_at(weight, 0, n / 16, n % 16, k) ==
                                kept(weight, w.f32[(n + SLICE_ROW) * COLS + k + SLICE_COL]));
            backend_cpu.weight_free(rig.device, weight);
            matrix_free(&w);
            matrix_free(&scale);
            rig_close(&rig);
        }
}

static void parts_are_stacked_and_mixed_formats_keep_their_values(void **state) {
    struct rig rig = rig_open(&(struct backend_options){.numeric = NUMERIC_REFERENCE, .n_threads = 3});
    struct matrix a = matrix_new(&rig, 5, 7, DTYPE_BF16), b = matrix_new(&rig, 30, 7, DTYPE_F32);
    struct weight_part parts[] = {matrix_part(&a), matrix_part(&b)};
    struct weight_desc desc = {WEIGHT_ROWS, 7, 1, 2, parts};
    struct weight *weight;
    float values[35 * 7];

    (void)state;
    memcpy(values, a.f32, 5 * 7 * sizeof *values);
    memcpy(values + 5 * 7, b.f32, 30 * 7 * sizeof *values);
    assert_int_equal(backend_cpu.weight_pack(rig.device, &desc, &weight), 0);
    assert_int_equal(weight->elem, DTYPE_F32);
    check_rows(weight, 0, values);
    backend_cpu.weight_free(rig.device, weight);
    matrix_free(&a);
    matrix_free(&b);
    rig_close(&rig);
}

static void gate_and_up_panels_alternate_in_every_expert(void **state) {
    enum { N_EXPERTS = 3, WIDTH = 21, COLS = 6 };
    struct rig rig = rig_open(&(struct backend_options){.n_threads = 2});
    struct matrix w = matrix_new(&rig, N_EXPERTS * 2 * WIDTH, COLS, DTYPE_BF16);
    struct weight_part parts[2 * N_EXPERTS];
    struct weight_desc desc = {WEIGHT_GATE_UP, COLS, N_EXPERTS, 2, parts};
    struct weight *weight;

    (void)state;
    for (int i = 0; i < 2 * N_EXPERTS; i++) {
        parts[i] = matrix_part(&w);
        parts[i].n_rows = WIDTH;
        parts[i].data = (uint16_t *)w.raw + (size_t)i * WIDTH * COLS;
    }
    assert_int_equal(backend_cpu.weight_pack(rig.device, &desc, &weight), 0);
    assert_int_equal(cpu_weight_rows(weight), 2 * WIDTH);
    assert_int_equal(weight->n_panels, 4);
    for (int e = 0; e < N_EXPERTS; e++)
        for (int n = 0; n < 32; n++)
            for (int k = 0; k < COLS; k++)
                for (int up = 0; up < 2; up++) {
                    float want = n < WIDTH ? w.f32[((e * 2 + up) * WIDTH + n) * COLS + k] : 0;

                    assert_true(packed_at(weight, e, n / 16 * 2 + up, n % 16, k) == want);
                }
    backend_cpu.weight_free(rig.device, weight);
    matrix_free(&w);
    rig_close(&rig);
}

static void wrong_descriptions_are_refused(void **state) {
    struct rig rig = rig_open(&(struct backend_options){.n_threads = 1});
    struct matrix w = matrix_new(&rig, 32, 8, DTYPE_BF16);
    uint8_t fp8[32 * 8] = {0};
    float scale[1] = {1};
    struct weight_part good = matrix_part(&w), parts[4];
    const struct weight_part fp8_part = {fp8, DTYPE_E4M3, 32, 8, scale, DTYPE_F32, 1};
    const struct weight_desc good_desc = {WEIGHT_ROWS, 8, 1, 1, parts};
    struct weight_desc desc;
    struct weight *weight = NULL;

    (void)state;
#define REFUSES(part0, change)                                                                                         \
    do {                                                                                                               \
        for (int i = 0; i < 4; i++)                                                                                    \
            parts[i] = (part0);                                                                                        \
        desc = good_desc;                                                                                              \
        change;                                                                                                        \
        assert_int_equal(backend_cpu.weight_pack(rig.device, &desc, &weight), -EINVAL);                                \
    } while (0)
    REFUSES(good, desc.n_cols = 0);
    REFUSES(good, desc.n_cols = -8);
    REFUSES(good, desc.n_cols = INT32_MAX);
    REFUSES(good, desc.n_stack = 0);
    REFUSES(good, desc.n_parts = 0);
    REFUSES(good, desc.parts = NULL);
    REFUSES(good, desc.form = (enum weight_form)7);
    REFUSES(good, desc.form = WEIGHT_GATE_UP);
    REFUSES(good, (desc.form = WEIGHT_GATE_UP, desc.n_parts = 2, parts[1].n_rows = 31));
    REFUSES(good, (desc.n_stack = 2, parts[1].n_rows = 31));
    REFUSES(good, parts[0].data = NULL);
    REFUSES(good, parts[0].n_rows = 0);
    REFUSES(good, parts[0].row_bytes = 15);
    REFUSES(good, parts[0].dtype = DTYPE_N);
    REFUSES(good, parts[0].scale = scale);
    REFUSES(good, (desc.n_parts = 4, parts[0].n_rows = parts[1].n_rows = INT32_MAX));
    REFUSES(fp8_part, parts[0].scale = NULL);
    REFUSES(fp8_part, parts[0].scale_dtype = DTYPE_F16);
    REFUSES(fp8_part, parts[0].scale_cols = 0);
#undef REFUSES
    assert_null(weight);
    backend_cpu.weight_free(rig.device, NULL);
    matrix_free(&w);
    rig_close(&rig);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_format_is_packed_as_the_mode_asks),
        cmocka_unit_test(fp8_blocks_are_scaled_in_f32),
        cmocka_unit_test(parts_are_stacked_and_mixed_formats_keep_their_values),
        cmocka_unit_test(gate_and_up_panels_alternate_in_every_expert),
        cmocka_unit_test(wrong_descriptions_are_refused),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
