/* The matrix ops of the CUDA backend against the CPU's oracle: linear, embed, moe, head's logits. */
#include "cuda_rig.h"

static struct rig rig;

static int teardown(void **state) {
    (void)state;
    rig_clear(&rig);
    return 0;
}

struct shape {
    int n, k;
};
static const struct shape shapes[] = {{64, 16}, {48, 40}, {257, 256}, {640, 2048}, {5120, 1024}, {1000, 5120}};
static const int row_counts[] = {1, 2, 7, 16, 17, 32, 33, 64, 65, 150};

static void linear_agrees_for_every_shape_and_number_of_rows(void **state) {
    (void)state;
    for (size_t s = 0; s < ARRAY_LEN(shapes); s++) {
        const int n = shapes[s].n, k = shapes[s].k;
        struct weight **weight = rig_pack(&rig, WEIGHT_ROWS, n, k, 1, 1.0f / sqrtf((float)k));
        struct buf *x = rig_floats(&rig, 150 * (size_t)(k + 8), 2, true), *norm = rig_floats(&rig, (size_t)k, 1, false);
        struct buf *bias = rig_floats(&rig, (size_t)n, 1, false);

        for (size_t m = 0; m < ARRAY_LEN(row_counts); m++) {
            struct rig_batch batch = rig_rows(&rig, row_counts[m], 150);
            struct buf *y = rig_poison(&rig, 150 * (size_t)(n + 3), m % 2 == 0);
            char what[80];

            for (int i = 0; i < N_SIDES; i++)
                RIG_RUN(&rig, i, linear,
                        (&(struct linear_args){.batch = &batch.side[i],
                                               .x = x->mem[i],
                                               .x_stride = k + 8,
                                               .norm = m % 2 == 0 ? norm->mem[i] : NULL,
                                               .eps = 1e-6f,
                                               .n_outs = 1,
                                               .out = {{.weight = weight[i],
                                                        .bias = m % 4 == 0 ? bias->mem[i] : NULL,
                                                        .epilogue = m % 2 == 0 ? LINEAR_STORE : LINEAR_STORE_F32,
                                                        .y = y->mem[i],
                                                        .y_stride = n + 3}}}));
            snprintf(what, sizeof what, "linear N %d K %d, %d rows", n, k, row_counts[m]);
            for (int row = 0; row < row_counts[m]; row++)
                if (row == 0 || row == row_counts[m] - 1)
                    rig_compare(&rig, y, (size_t)row * (size_t)(n + 3), (size_t)row * (size_t)(n + 3) + (size_t)n,
                                m % 2 == 0 ? 2e-3 : 1e-3, what);
        }
        rig_clear(&rig);
    }
}

/* A row has the same bits whatever else is in the batch, in either kernel. */
static void a_row_has_the_same_bits_in_every_batch(void **state) {
    static const int counts[] = {1, 1, 2, 7, 16, 17, 31, 33, 48, 64, 65, 128, 150};

    (void)state;
    for (size_t s = 0; s < ARRAY_LEN(shapes); s++) {
        const int n = shapes[s].n, k = shapes[s].k;
        struct weight **weight = rig_pack(&rig, WEIGHT_ROWS, n, k, 1, 1);
        struct buf *x = rig_floats(&rig, 150 * (size_t)k, 1, true), *norm = rig_floats(&rig, (size_t)k, 1, false);
        float *first = NULL;

        for (size_t m = 0; m < ARRAY_LEN(counts); m++) {
            struct rig_batch batch = rig_rows(&rig, counts[m], m % 2 == 0 ? 150 : counts[m]);
            struct buf *y = rig_poison(&rig, 150 * (size_t)n, false);
            float *got;

            RIG_RUN(
                &rig, GPU, linear,
                (&(struct linear_args){
                    .batch = &batch.side[GPU],
                    .x = x->mem[GPU],
                    .x_stride = k,
                    .norm = norm->mem[GPU],
                    .eps = 1e-6f,
                    .n_outs = 1,
                    .out = {{.weight = weight[GPU], .epilogue = LINEAR_STORE_F32, .y = y->mem[GPU], .y_stride = n}}}));
            got = rig_get(&rig, y, GPU);
            if (first)
                assert_memory_equal(first, got, (size_t)n * sizeof *got);
            if (!first)
                first = got;
            else
                free(got);
        }
        free(first);
        rig_clear(&rig);
    }
}

/* Tiles give what the kernel for few rows gives, bit for bit: every row, every epilogue; several tiles for each CTA, cut ones,
 * an odd number of them, and rows of y that are not aligned. */
static void rows_of_tiles_have_the_bits_of_few(void **state) {
    enum { M = 700, FEW = 64, WAYS = 2 };
    static const enum linear_epilogue epilogues[] = {LINEAR_STORE, LINEAR_STORE_F32, LINEAR_ADD, LINEAR_ADD_F32,
                                                     LINEAR_SWIGLU};

    (void)state;
    for (size_t s = 0; s < ARRAY_LEN(shapes); s++)
        for (size_t e = 0; e < ARRAY_LEN(epilogues); e++) {
            const enum linear_epilogue epilogue = epilogues[e];
            const int n = shapes[s].n, k = shapes[s].k, n_parts = epilogue == LINEAR_SWIGLU ? 2 : 1;
            const bool is_act = epilogue != LINEAR_STORE_F32 && epilogue != LINEAR_ADD_F32;
            struct weight **weight =
                rig_pack(&rig, n_parts == 2 ? WEIGHT_GATE_UP : WEIGHT_ROWS, n_parts * n, k, 1, 1.0f / sqrtf((float)k));
            struct buf *x = rig_floats(&rig, (size_t)M * (size_t)k, 2, true);
            struct buf *bias = rig_floats(&rig, (size_t)(n_parts * n), 1, false), *y[WAYS];
            float *values = rig_randoms(&rig, (size_t)M * (size_t)n, 1), *got[WAYS];

            for (int i = 0; i < WAYS; i++) {
                const int step = i == 0 ? M : FEW;

                y[i] = rig_new(&rig, (size_t)M * (size_t)n, 4, is_act ? 2 : 4);
                rig_set(&rig, y[i], values);
                for (int row = 0; row < M; row += step) {
                    const int n_bufs = rig.n_bufs, n_rows = M - row < step ? M - row : step;
                    struct rig_batch batch = rig_rows(&rig, n_rows, n_rows);

                    RIG_RUN(&rig, GPU, linear,
                            (&(struct linear_args){
                                .batch = &batch.side[GPU],
                                .x = (char *)x->mem[GPU] + (size_t)row * (size_t)k * 2,
                                .x_stride = k,
                                .n_outs = 1,
                                .out = {{.weight = weight[GPU],
                                         .bias = (s + e) % 2 == 0 ? bias->mem[GPU] : NULL,
                                         .epilogue = epilogue,
                                         .y = (char *)y[i]->mem[GPU] + (size_t)row * (size_t)n * (is_act ? 2 : 4),
                                         .y_stride = n}}}));
                    rig_forget(&rig, n_bufs);
                }
                got[i] = rig_get(&rig, y[i], GPU);
            }
            for (int row = 0; row < M; row++)
                if (memcmp(got[0] + (size_t)row * (size_t)n, got[1] + (size_t)row * (size_t)n, (size_t)n * 4) != 0) {
                    printf("N %d K %d, epilogue %d: row %d differs\n", n, k, epilogue, row);
                    fail();
                }
            for (int i = 0; i < WAYS; i++)
                free(got[i]);
            free(values);
            rig_clear(&rig);
        }
}

static void epilogues_agree(void **state) {
    enum { N = 512, K = 256, M = 20 };

    (void)state;
    for (int m = 1; m <= 40; m += 13) {
        struct weight **rows = rig_pack(&rig, WEIGHT_ROWS, N, K, 1, 0.1f);
        struct weight **gate_up = rig_pack(&rig, WEIGHT_GATE_UP, 2 * 328, K, 1, 0.1f);
        struct buf *x = rig_floats(&rig, 40 * K, 1, false), *bias = rig_floats(&rig, 2 * 328, 1, false);
        struct buf *add = rig_floats(&rig, 40 * N, 1, true), *add_f32 = rig_floats(&rig, 40 * N, 1, false);
        struct buf *swiglu = rig_poison(&rig, 40 * 328, true);
        struct rig_batch batch = rig_rows(&rig, m, 40);

        for (int i = 0; i < N_SIDES; i++) {
            struct linear_args args = {
                .batch = &batch.side[i],
                .x = x->mem[i],
                .x_stride = K,
                .x_is_f32 = true,
                .n_outs = 2,
                .out = {{.weight = rows[i], .epilogue = LINEAR_ADD, .y = add->mem[i], .y_stride = N},
                        {.weight = rows[i], .epilogue = LINEAR_ADD_F32, .y = add_f32->mem[i], .y_stride = N}}};

            RIG_RUN(&rig, i, linear, &args);
            args.n_outs = 1;
            args.out[0] = (struct linear_out){gate_up[i], bias->mem[i], LINEAR_SWIGLU, swiglu->mem[i], 328};
            RIG_RUN(&rig, i, linear, &args);
        }
        rig_compare(&rig, add, 0, (size_t)m * N, 2e-3, "linear, residual");
        rig_compare(&rig, add_f32, 0, (size_t)m * N, 1e-5, "linear, f32 accumulator");
        rig_compare(&rig, swiglu, 0, (size_t)m * 328, 2e-3, "linear, swiglu");
        rig_clear(&rig);
    }
}

static void embed_and_store_rows_copy(void **state) {
    enum { N = 60000, K = 72, M = 9 };
    struct weight **table = rig_pack(&rig, WEIGHT_ROWS, N, K, 1, 1);
    struct rig_batch batch = rig_rows(&rig, M, 12);
    struct buf *x = rig_poison(&rig, 12 * K, true), *f32 = rig_poison(&rig, 12 * K, false);

    (void)state;
    for (int i = 0; i < N_SIDES; i++) {
        RIG_RUN(&rig, i, embed, (&(struct embed_args){.batch = &batch.side[i], .table = table[i], .x = x->mem[i]}));
        RIG_RUN(&rig, i, store_rows,
                (&(struct store_rows_args){.batch = &batch.side[i], .x = x->mem[i], .width = K, .dst = f32->mem[i]}));
    }
    rig_compare(&rig, f32, 0, M * K, 0, "embed, store_rows");
}

static void moe_agrees(void **state) {
    enum { HIDDEN = 256, EXPERTS = 24, TOP_K = 4, WIDTH = 128, SHARED = 192, ROWS = 70 };
    static const int counts[] = {1, 3, 16, 40, 70};

    (void)state;
    for (size_t m = 0; m < ARRAY_LEN(counts); m++) {
        struct weight **router = rig_pack(&rig, WEIGHT_ROWS, EXPERTS + 1, HIDDEN, 1, 0.5f);
        struct weight **gate_up = rig_pack(&rig, WEIGHT_GATE_UP, 2 * WIDTH, HIDDEN, EXPERTS, 0.1f);
        struct weight **down = rig_pack(&rig, WEIGHT_ROWS, HIDDEN, WIDTH, EXPERTS, 0.3f);
        struct weight **shared_gate_up = rig_pack(&rig, WEIGHT_GATE_UP, 2 * SHARED, HIDDEN, 1, 0.1f);
        struct weight **shared_down = rig_pack(&rig, WEIGHT_ROWS, HIDDEN, SHARED, 1, 0.3f);
        struct buf *x = rig_floats(&rig, ROWS * HIDDEN, 1, true), *norm = rig_floats(&rig, HIDDEN, 1, false);
        struct buf *routing = rig_new(&rig, ROWS * TOP_K, 4, 4);
        struct rig_batch batch = rig_rows(&rig, counts[m], ROWS);

        for (int i = 0; i < N_SIDES; i++)
            RIG_RUN(&rig, i, moe,
                    (&(struct moe_args){.batch = &batch.side[i],
                                        .x = x->mem[i],
                                        .hidden = HIDDEN,
                                        .n_experts = EXPERTS,
                                        .top_k = TOP_K,
                                        .width = WIDTH,
                                        .shared_width = SHARED,
                                        .norm = norm->mem[i],
                                        .eps = 1e-6f,
                                        .router = router[i],
                                        .gate_up = gate_up[i],
                                        .down = down[i],
                                        .shared_gate_up = shared_gate_up[i],
                                        .shared_down = shared_down[i],
                                        .routing = routing->mem[i]}));
        rig_compare_words(&rig, routing, "moe, routing");
        rig_compare(&rig, x, 0, (size_t)counts[m] * HIDDEN, 2e-3, "moe");
        rig_clear(&rig);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(linear_agrees_for_every_shape_and_number_of_rows, teardown),
        cmocka_unit_test_teardown(a_row_has_the_same_bits_in_every_batch, teardown),
        cmocka_unit_test_teardown(rows_of_tiles_have_the_bits_of_few, teardown),
        cmocka_unit_test_teardown(epilogues_agree, teardown),
        cmocka_unit_test_teardown(embed_and_store_rows_copy, teardown),
        cmocka_unit_test_teardown(moe_agrees, teardown),
    };
    int failed;

    rig_open(&rig);
    failed = cmocka_run_group_tests(tests, NULL, NULL);
    rig_close(&rig);
    return failed;
}
