/* weight: the packed layout of matrices, and where an element lies in it. Internal to weight.cu, the files of gemm.cuh,
 * linear.cu, moe.cu.
 *
 * A matrix is cut into blocks of 16 rows and steps of 16 columns. A (block, step) is one fragment of 512 bytes: lane l's
 * 16 bytes are its A operand of mma.m16n8k16. Eight blocks are a tile; the eight fragments of a step lie together, the
 * steps of a tile end to end, and so do the tiles. WEIGHT_GATE_UP: a block holds 8 gate rows, then the 8 up rows that
 * belong to them, so that a thread of a product has both. Blocks are padded to whole tiles, K to whole steps, with zeros. */
#pragma once
#include "stretch.h"
#include "util.cuh"

enum {
    FRAG_BYTES = 512,
    TILE_BLOCKS = 8,
    TILE_ROWS = TILE_BLOCKS * 16,
    STEP_BYTES = TILE_BLOCKS * FRAG_BYTES,
    STAGE_STEPS = 4, /* of a stage of stretch.h */
};

struct weight {
    enum weight_form form;
    int n_rows, n_cols, n_stack; /* N, K, experts */
    int n_tiles, n_steps;        /* of one matrix, padded */
    struct stretches stretches;  /* of one matrix */
    size_t matrix_bytes, bytes;
    char *data; /* [n_stack][n_tiles][n_steps][8][512] */
};

/* A row of the packed matrix. */
struct packed_row {
    int block, row; /* of the block */
};
__host__ __device__ static inline struct packed_row packed_row_of(int n) {
    return (struct packed_row){n / 16, n % 16};
}
/* Row n of the gate (part 0) or up (part 1) half. */
__host__ __device__ static inline struct packed_row packed_gate_up_row(int n, int part) {
    return (struct packed_row){n / 8, n % 8 + part * 8};
}

/* Byte offset of column k of a row in its matrix. */
__host__ __device__ static inline size_t packed_at(struct packed_row row, int k, int n_steps) {
    size_t step = (size_t)(row.block / TILE_BLOCKS) * (size_t)n_steps + (size_t)(k / 16);
    int lane = row.row % 8 * 4 + k % 8 / 2, reg = row.row / 8 + k % 16 / 8 * 2;

    return step * STEP_BYTES + (size_t)(row.block % TILE_BLOCKS * FRAG_BYTES + lane * 16 + reg * 4 + k % 2 * 2);
}
