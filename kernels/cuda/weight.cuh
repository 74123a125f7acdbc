/* weight: the packed layout of matrices, and where an element lies in it. Internal to weight.cu, gemm.cu, linear.cu, moe.cu.
 *
 * A matrix is cut into blocks of 16 rows and steps of 16 columns. A (block, step) is one fragment of 512 bytes: lane l's
 * 16 bytes are its A operand of mma.m16n8k16. Four blocks are a unit; the four fragments of a step lie together, and the
 * steps of a unit end to end, so that a warp reads one stream. WEIGHT_GATE_UP alternates: gate block 0, up block 0, gate
 * block 1, ... Blocks are padded to whole units, K to whole steps, with zeros. */
#pragma once
#include "util.cuh"

enum { FRAG_BYTES = 512, UNIT_BLOCKS = 4, UNIT_ROWS = 64 };

struct weight {
    enum weight_form form;
    int n_rows, n_cols, n_stack; /* N, K, experts */
    int n_blocks, n_steps;       /* of one matrix, padded */
    int n_splits;                /* gemm.cu: how K is cut; a function of the shape alone */
    size_t matrix_bytes, bytes;
    char *data; /* [n_stack][n_blocks / 4][n_steps][4][512] */
};

/* Byte offset of column k of the row r of a block in its fragment. */
__host__ __device__ static inline size_t frag_offset(int r, int k) {
    int lane = r % 8 * 4 + k % 8 / 2, reg = r / 8 + k % 16 / 8 * 2;

    return (size_t)(lane * 16 + reg * 4 + k % 2 * 2);
}
/* Byte offset of a fragment in its matrix. */
__host__ __device__ static inline size_t frag_at(int block, int step, int n_steps) {
    return (((size_t)(block / UNIT_BLOCKS) * (size_t)n_steps + (size_t)step) * UNIT_BLOCKS +
            (size_t)(block % UNIT_BLOCKS)) *
           FRAG_BYTES;
}
/* The block of row n. */
__host__ __device__ static inline int rows_block(int n) {
    return n / 16;
}
/* The block of row n of the gate (part 0) or up (part 1) half. */
__host__ __device__ static inline int gate_up_block(int n, int part) {
    return n / 16 * 2 + part;
}

int gemm_n_splits(int n_units, int n_steps); /* gemm.cu */
