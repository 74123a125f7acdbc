/* gemm_plain: the kernels in plain C. gemm_path_plain is the oracle of all others: double accumulation, one rounding to
 * f32. gemm_path_scalar is FAST without vector instructions; a product of two bf16 values is exact in f32, so a multiply
 * and an add give the bits of a fused multiply-add, and this path equals the AVX2 one. */
#include "gemm.h"

enum { TILE = 4 };

#define DEFINE_TILE(name, elem_type, to_acc, acc_type)                                                                 \
    static void name(const void *panel, const void *x_tile, int n_pairs, int n_tokens, float(*acc)[PANEL_ROWS]) {      \
        const elem_type *w = panel;                                                                                    \
        const float *x = x_tile;                                                                                       \
        acc_type sum[TILE][PANEL_ROWS] = {{0}};                                                                        \
                                                                                                                       \
        for (int p = 0; p < n_pairs; p++, w += 2 * PANEL_ROWS, x += 2 * n_tokens) {                                    \
            acc_type even[PANEL_ROWS], odd[PANEL_ROWS];                                                                \
                                                                                                                       \
            for (int r = 0; r < PANEL_ROWS; r++) {                                                                     \
                even[r] = (acc_type)to_acc(w[2 * r]);                                                                  \
                odd[r] = (acc_type)to_acc(w[2 * r + 1]);                                                               \
            }                                                                                                          \
            for (int t = 0; t < n_tokens; t++) {                                                                       \
                acc_type x_even = (acc_type)x[t], x_odd = (acc_type)x[n_tokens + t];                                   \
                                                                                                                       \
                for (int r = 0; r < PANEL_ROWS; r++) {                                                                 \
                    sum[t][r] += even[r] * x_even;                                                                     \
                    sum[t][r] += odd[r] * x_odd;                                                                       \
                }                                                                                                      \
            }                                                                                                          \
        }                                                                                                              \
        for (int t = 0; t < n_tokens; t++)                                                                             \
            for (int r = 0; r < PANEL_ROWS; r++)                                                                       \
                acc[t][r] = (float)sum[t][r];                                                                          \
    }

DEFINE_TILE(tile_double_bf16, uint16_t, bf16_to_f32, double)
DEFINE_TILE(tile_double_f32, float, (float), double)
DEFINE_TILE(tile_float_bf16, uint16_t, bf16_to_f32, float)

const struct gemm_path gemm_path_plain = {
    .tile_max = TILE,
    .tile_bf16 = tile_double_bf16,
    .tile_f32 = tile_double_f32,
};

const struct gemm_path gemm_path_scalar = {
    .tile_max = TILE,
    .tile_bf16 = tile_float_bf16,
};
