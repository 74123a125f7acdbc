/* gemm: rows of activations times packed weights. Internal to gemm.cu, linear.cu, head.cu, moe.cu.
 *
 * Order of a sum over K, for every number of rows and either kernel: K's steps of 16 are cut into n_splits groups of
 * GEMM_CHUNKS chunks; a chunk is one chain of matrix instructions over its steps, ascending; a group is the sum of its
 * chunks in order, the result the sum of the groups in order. Weights are always the A operand. So a row has the same
 * bits in a block, alone, and in a prefill.
 *
 * Rows are packed first: [group of 16 rows][step][512 bytes], each lane's 16 bytes being its B operands for the group's
 * two tiles of 8 rows. */
#pragma once
#include "weight.cuh"

enum {
    GEMM_CHUNKS = 8,
    GEMM_TILE_ROWS = 128,  /* rows of one tile of the kernel for many rows */
    GEMM_SKINNY_ROWS = 32, /* up to this many rows the kernel that streams the weights runs */
};

struct row_count {         /* read on the device: *n, or 0 if *n_segs is 0 */
    const int32_t *n_segs; /* NULL: not asked */
    const int32_t *n;
};
static inline struct row_count batch_row_count(const struct batch *batch) {
    return (struct row_count){batch->n_segs, batch->n_rows};
}

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
static inline size_t gemm_packed_bytes(int n_max, int n_steps) {
    return align_up((size_t)n_max, GEMM_TILE_ROWS) / 16 * (size_t)n_steps * FRAG_BYTES;
}
void gemm_pack(const struct launch *launch, const struct gemm_rows *rows, void *packed);

struct gemm_out {
    enum linear_epilogue epilogue;
    const float *bias; /* f32 [N] or NULL */
    void *y;
    int y_stride;
};
/* For the experts of a layer: packed rows come in groups of 16 of one expert each. */
struct gemm_groups {
    const int32_t *n, *expert; /* [1], [n_max] */
    int n_max;
};
struct gemm_job {
    const struct weight *weight;
    const void *packed;
    struct row_count count;
    int n_max;
    struct gemm_out out;
    const struct gemm_groups *groups; /* or NULL */
};
size_t gemm_scratch_bytes(const struct weight *weight, int n_max);
void gemm_launch(const struct launch *launch, const struct gemm_job *job, void *scratch);
