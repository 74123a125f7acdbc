/* Packed weights and products of the CPU backend against dense loops in double. */
#include "cpu_rig.h"

static void product_matches_dense_loop_in_double(void **state) {
    static const int shapes[][2] = {{16, 2}, {1, 1}, {17, 3}, {48, 64}, {33, 129}};
    static const int rows[] = {1, 2, 5, 16, 33};

    (void)state;
    for (int numeric = 0; numeric < 3; numeric++) {
        struct rig rig = rig_open(&(struct backend_options){.numeric = (enum numeric)numeric, .n_threads = 2});

        for (size_t s = 0; s < ARRAY_LEN(shapes); s++)
            for (size_t i = 0; i < ARRAY_LEN(rows); i++) {
                int n = shapes[s][0], k = shapes[s][1], m = rows[i];
                struct matrix w = matrix_new(&rig, n, k, DTYPE_BF16), x = matrix_new(&rig, m, k, DTYPE_F32);
                struct weight *weight = rig_pack(&rig, &w, 1);
                float *y = calloc((size_t)m * (size_t)n, sizeof *y);

                rig_gemm(&rig, weight, 0, x.f32, k, m, y, n);
                for (int r = 0; r < m; r++)
                    for (int c = 0; c < n; c++) {
                        double sum = 0, size = 0;

                        for (int j = 0; j < k; j++) {
                            double p =
                                (double)w.f32[c * k + j] * (double)cpu_round_gemm_in(rig.device, x.f32[r * k + j]);
                            sum += p;
                            size += fabs(p);
                        }
                        assert_true(fabs(sum - (double)y[r * n + c]) <=
                                    (numeric == NUMERIC_FAST ? 1e-6 * (double)k : 1e-7) * size);
                    }
                backend_cpu.weight_free(rig.device, weight);
                free(y);
                matrix_free(&w);
                matrix_free(&x);
            }
        rig_close(&rig);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(product_matches_dense_loop_in_double),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
