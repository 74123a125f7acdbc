/* row: a row of activations made fit for a product, by ROW_THREADS threads: normed, rounded to bf16. Included by the kernels
 * that do so; they have the same bits. */
#pragma once
#include "gemm.cuh"

enum {
    ROW_THREADS = 256,
    ROW_PIECES = 3, /* of 8 columns, that a thread keeps between the norm and the writing */
    ROW_COLS_MAX = ROW_PIECES * 8 * ROW_THREADS,
};

/* 8 elements from column k on, those from n_cols on as zeros. */
__device__ static inline void row_load8(const struct gemm_rows &a, size_t row, int k, float v[8]) {
    size_t at = row * a.stride + (size_t)k;

    if (!a.is_f32 && k + 8 <= a.n_cols && at % 8 == 0 && (uintptr_t)a.x % 16 == 0) {
        uint4 raw = *(const uint4 *)((const bf16 *)a.x + at);
        const uint32_t *word = &raw.x;

#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 pair = pair_of(word[i]);

            v[2 * i] = pair.x;
            v[2 * i + 1] = pair.y;
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        v[i] = k + i >= a.n_cols ? 0 : a.is_f32 ? ((const float *)a.x)[at + (size_t)i] : bf16_load(a.x, at + (size_t)i);
}

__device__ static inline float row_squares(const float v[8], float sum) {
#pragma unroll
    for (int i = 0; i < 8; i++)
        sum = fmaf(v[i], v[i], sum);
    return sum;
}

/* 8 elements, times their norm's scale and factors if there is one. */
__device__ static inline void row_store8(const struct gemm_rows &a, bf16 *dst, const float *v, float scale,
                                         const float *factor) {
    uint4 raw;
    uint32_t *word = &raw.x;

#pragma unroll
    for (int i = 0; i < 4; i++)
        word[i] = a.norm != NULL ? pack_bf16(v[2 * i] * scale * factor[2 * i], v[2 * i + 1] * scale * factor[2 * i + 1])
                                 : pack_bf16(v[2 * i], v[2 * i + 1]);
    *(uint4 *)dst = raw;
}

/* The norm's factors of this thread's columns; 0 beyond the last. */
__device__ static inline void row_factors(const struct gemm_rows &a, float factor[ROW_PIECES][8]) {
#pragma unroll
    for (int p = 0; p < ROW_PIECES; p++)
#pragma unroll
        for (int i = 0; i < 8; i++) {
            int k = 8 * ((int)threadIdx.x + p * ROW_THREADS) + i;

            factor[p][i] = k < a.n_cols ? a.norm[k] : 0;
        }
}

/* Row 0, normed, into dst, of gemm_rows_is_one() rows; shared: a float per warp. sync: of the ROW_THREADS threads. */
template <typename SYNC>
__device__ static inline void row_norm(const struct gemm_rows &a, const float factor[ROW_PIECES][8], bf16 *dst,
                                       float *shared, SYNC sync) {
    const int first = 8 * (int)threadIdx.x;
    float v[ROW_PIECES][8] = {}, sum = 0, total = 0, scale;

#pragma unroll
    for (int p = 0; p < ROW_PIECES; p++)
        if (first + p * 8 * ROW_THREADS < a.n_cols)
            row_load8(a, 0, first + p * 8 * ROW_THREADS, v[p]);
#pragma unroll
    for (int p = 0; p < ROW_PIECES; p++)
        sum = row_squares(v[p], sum);
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0)
        shared[threadIdx.x / 32] = sum;
    sync();
    for (int i = 0; i < ROW_THREADS / 32; i++)
        total += shared[i];
    scale = rsqrtf(total / (float)a.n_cols + a.eps);
#pragma unroll
    for (int p = 0; p < ROW_PIECES; p++)
        if (first + p * 8 * ROW_THREADS < a.n_steps * 16)
            row_store8(a, dst + first + p * 8 * ROW_THREADS, v[p], scale, factor[p]);
    sync();
}
