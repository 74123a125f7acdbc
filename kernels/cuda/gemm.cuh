/* gemm: rows of activations times packed weights. Internal to gemm.cu, stream.cu, tile.cu and the ops that multiply.
 *
 * Order of a sum over K, for every number of rows and either kernel: the steps of a stage are one chain of matrix
 * instructions, ascending; stages are added in order, from one cut of stretch.h to the next, and what lies between two
 * cuts is added in order, too. Weights are always the A operand. So a row has the same bits in a block, alone, and in a
 * prefill. Chains are short because matrix instructions round their sums towards zero: that error grows with the length of
 * a chain, while that of additions, to nearest, cancels. */
#pragma once
#include "weight.cuh"

enum {
    STREAM_ROWS = 64, /* up to this many rows the kernel that streams the weights runs, beyond it the one of tiles */
};

struct row_count {         /* read on the device: *n, or 0 if *n_segs is 0 */
    const int32_t *n_segs; /* NULL: not asked */
    const int32_t *n;
};
static inline struct row_count batch_row_count(const struct batch *batch) {
    return (struct row_count){batch->n_segs, batch->n_rows};
}
__device__ static inline int count_rows(struct row_count count) {
    int n = *count.n, n_segs = count.n_segs != NULL ? *count.n_segs : 1; /* both loads at once */

    return n_segs == 0 ? 0 : n;
}

/* ---- rows: as they are multiplied: bf16, at 16-byte addresses, n_steps * 16 columns of each readable */
struct gemm_x {
    const bf16 *data;
    size_t stride;
};
/* What they are made of. */
struct gemm_rows {
    struct row_count count;
    int n_max;
    const void *x; /* row i at element (index ? index[i] : i) * stride; index -1: a row of zeros */
    bool is_f32;
    size_t stride;
    const int32_t *index;
    const float *norm; /* f32 [n_cols] or NULL: RMS norm before rounding to bf16 */
    float eps;
    int n_cols, n_steps;
};
static inline size_t gemm_rows_bytes(int n_max, int n_steps) {
    return align_up((size_t)n_max * (size_t)n_steps * 32, 256);
}
/* One normed row, which a product may make itself. */
bool gemm_rows_is_one(const struct gemm_rows *rows);
/* Rows that are fit as they lie stay there; others are made in the scratch, of gemm_rows_bytes(). */
struct gemm_x gemm_rows_make(const struct launch *launch, const struct gemm_rows *rows, void *scratch);

/* ---- products */
struct gemm_out {
    enum linear_epilogue epilogue;
    const float *bias; /* f32 [n] or NULL; SWIGLU: of the gate rows, then of the up rows */
    void *y;
    int y_stride;
    int n; /* outputs per row */
};
/* For the experts of a layer: rows come in groups of 16 of one expert each. */
struct gemm_groups {
    const int32_t *n, *expert; /* [1], [n_max] */
    int n_max;
};
struct gemm_product {
    const struct weight *weight;
    struct gemm_out out; /* n: filled here */
};
/* One or two products of the same rows; with groups, one. */
struct gemm_job {
    struct gemm_x x;
    struct row_count count;
    int n_max, n_products;
    struct gemm_product products[2];
    const struct gemm_groups *groups; /* or NULL */
    const struct gemm_rows *rows;     /* instead of x, one row that the product makes of them itself; or NULL */
};
void gemm_launch(const struct launch *launch, const struct gemm_job *job);

void stream_launch(const struct launch *launch, const struct gemm_job *job);    /* stream.cu */
void tile_launch(const struct launch *launch, const struct gemm_job *job);      /* tile.cu */
void tile_launch_sm90(const struct launch *launch, const struct gemm_job *job); /* tile_sm90.cu */

/* ---- results: what a thread holds of a block of 16 rows of W by 8 rows of x: d[c] is of row lane / 4 + c / 2 * 8 and of
 * x row lane % 4 * 2 + c % 2. */

/* What N such squares side by side are added to, of the x rows from row0 on: it may be loaded long before it is needed. */
template <int N>
__device__ static inline void emit_before(const struct gemm_out &out, int block, int row0, int n_rows,
                                          float before[N][4]) {
    const int lane = (int)threadIdx.x % 32, row = row0 + lane % 4 * 2, n = block * 16 + lane / 4;

    if (out.epilogue != LINEAR_ADD && out.epilogue != LINEAR_ADD_F32)
        return;
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const size_t at = (size_t)(row + i * 8 + c % 2) * (size_t)out.y_stride + (size_t)(n + c / 2 * 8);

            if (row + i * 8 + c % 2 < n_rows && n + c / 2 * 8 < out.n)
                before[i][c] = out.epilogue == LINEAR_ADD_F32 ? ((const float *)out.y)[at] : bf16_load(out.y, at);
        }
}

/* Writes the results of N such squares. */
template <int N>
__device__ static inline void emit(const struct gemm_out &out, int block, int row0, int n_rows, float d[N][4],
                                   const float before[N][4]) {
    const int lane = (int)threadIdx.x % 32, row = row0 + lane % 4 * 2;

    if (out.epilogue == LINEAR_SWIGLU) {
        const int n = block * 8 + lane / 4;

        if (n >= out.n)
            return;
#pragma unroll
        for (int i = 0; i < N; i++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                float gate = d[i][c], up = d[i][2 + c];

                if (row + i * 8 + c >= n_rows)
                    continue;
                if (out.bias != NULL) {
                    gate += out.bias[n];
                    up += out.bias[out.n + n];
                }
                bf16_store(out.y, (size_t)(row + i * 8 + c) * (size_t)out.y_stride + (size_t)n,
                           gate * sigmoid(gate) * up);
            }
        return;
    }

    const int n = block * 16 + lane / 4;
    auto is_mine = [&](int i, int c) { return row + i * 8 + c % 2 < n_rows && n + c / 2 * 8 < out.n; };
    auto at = [&](int i, int c) {
        return (size_t)(row + i * 8 + c % 2) * (size_t)out.y_stride + (size_t)(n + c / 2 * 8);
    };

    if (out.bias != NULL)
#pragma unroll
        for (int i = 0; i < N; i++)
#pragma unroll
            for (int c = 0; c < 4; c++)
                if (is_mine(i, c))
                    d[i][c] += out.bias[n + c / 2 * 8];
    if (out.epilogue == LINEAR_ADD || out.epilogue == LINEAR_ADD_F32)
#pragma unroll
        for (int i = 0; i < N; i++)
#pragma unroll
            for (int c = 0; c < 4; c++)
                d[i][c] = before[i][c] + d[i][c];

    const bool is_f32 = out.epilogue == LINEAR_ADD_F32 || out.epilogue == LINEAR_STORE_F32;

#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
        for (int c = 0; c < 4; c++) {
            if (!is_mine(i, c))
                continue;
            if (is_f32)
                ((float *)out.y)[at(i, c)] = d[i][c];
            else
                bf16_store(out.y, at(i, c), d[i][c]);
        }
}
