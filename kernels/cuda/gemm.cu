/* gemm: rows made fit for a product, and which kernels run for it. */
#include "row.cuh"

enum {
    THREADS = ROW_THREADS,
    PIECES = ROW_PIECES,
    FEW_ROWS_MAX = 32, /* more rows than this: most may be none */
};

/* ---- rows --------------------------------------------------------------------------------------------------------- */

/* A CTA per row. */
__global__ static void __launch_bounds__(THREADS) make_rows(struct gemm_rows a, bf16 *rows) {
    __shared__ float sums[THREADS / 32];
    const int row = (int)blockIdx.x, first = 8 * (int)threadIdx.x, width = a.n_steps * 16;
    float v[PIECES][8] = {}, factor[PIECES][8] = {}, scale = 1, sum = 0;
    int src = row, n_rows;
    bf16 *dst = rows + (size_t)row * (size_t)width;

    if (a.norm != NULL) /* no kernel writes these: they may come early */
        row_factors(a, factor);
    wait_for_previous();
    may_launch_next();
    n_rows = count_rows(a.count);
    if (gridDim.x > FEW_ROWS_MAX && row >= n_rows)
        return;
    if (a.index != NULL)
        src = row < n_rows ? a.index[row] : -1;
    if (src >= 0) { /* of few rows all are there, so that their loads need not wait for the count */
#pragma unroll
        for (int p = 0; p < PIECES; p++)
            if (first + p * 8 * THREADS < a.n_cols)
                row_load8(a, (size_t)src, first + p * 8 * THREADS, v[p]);
        if (a.norm != NULL) {
#pragma unroll
            for (int p = 0; p < PIECES; p++)
                sum = row_squares(v[p], sum);
            for (int k = first + PIECES * 8 * THREADS; k < a.n_cols; k += 8 * THREADS) {
                float more[8];

                row_load8(a, (size_t)src, k, more);
                sum = row_squares(more, sum);
            }
            scale = rsqrtf(cta_sum(sum, sums, THREADS) / (float)a.n_cols + a.eps);
        }
    }
    if (row >= n_rows)
        return;
#pragma unroll
    for (int p = 0; p < PIECES; p++)
        if (first + p * 8 * THREADS < width)
            row_store8(a, dst + first + p * 8 * THREADS, v[p], scale, factor[p]);
    for (int k = first + PIECES * 8 * THREADS; k < width; k += 8 * THREADS) {
        float more[8] = {}, by[8] = {};

        if (src >= 0)
            row_load8(a, (size_t)src, k, more);
        if (a.norm != NULL)
            for (int i = 0; i < 8; i++)
                by[i] = k + i < a.n_cols ? a.norm[k + i] : 0;
        row_store8(a, dst + k, more, scale, by);
    }
}

bool gemm_rows_is_one(const struct gemm_rows *rows) {
    return rows->n_max == 1 && rows->norm != NULL && rows->index == NULL && rows->n_steps * 16 <= ROW_COLS_MAX;
}

struct gemm_x gemm_rows_make(const struct launch *launch, const struct gemm_rows *rows, void *scratch) {
    if (!rows->is_f32 && rows->norm == NULL && rows->index == NULL && rows->n_cols % 16 == 0 && rows->stride % 8 == 0 &&
        (uintptr_t)rows->x % 16 == 0)
        return (struct gemm_x){(const bf16 *)rows->x, rows->stride};
    launch_early(launch->stream, make_rows, dim3((unsigned)rows->n_max), THREADS, 0, *rows, (bf16 *)scratch);
    return (struct gemm_x){(const bf16 *)scratch, (size_t)rows->n_steps * 16};
}

/* ---- products ----------------------------------------------------------------------------------------------------- */

void gemm_launch(const struct launch *launch, const struct gemm_job *job) {
    struct gemm_job filled = *job;

    for (int i = 0; i < job->n_products; i++) {
        const struct weight *weight = job->products[i].weight;

        filled.products[i].out.n = weight->form == WEIGHT_GATE_UP ? weight->n_rows / 2 : weight->n_rows;
    }
    stream_launch(launch, &filled);
    if (job->groups == NULL && job->n_max > STREAM_ROWS)
        (launch->is_sm90 ? tile_launch_sm90 : tile_launch)(launch, &filled);
}
