/* tile: products of many rows: tiles of 128 rows of W by 128 rows of x. 8 warps, each 4 blocks by 4 squares; chains are
 * summed in registers. */
#include "gemm.cuh"

enum {
    THREADS = 256,
    X_ROWS = 128,
    STAGES = 4,
    W_BYTES = STAGE_STEPS * STEP_BYTES,
    X_ROW_BYTES = STAGE_STEPS * 32,
    STAGE_BYTES = W_BYTES + X_ROWS * X_ROW_BYTES,
};

struct args {
    const char *w;
    struct gemm_x x;
    struct row_count count;
    int n_steps;
    struct stretches stretches;
    struct gemm_out out;
};

/* 16-byte unit u of row r of x lies at u ^ (r & 7): reads of 8 rows meet 8 banks of 16 bytes. */
__device__ static inline int x_at(int r, int u) {
    return W_BYTES + r * X_ROW_BYTES + (u ^ (r & 7)) * 16;
}

__global__ static void __launch_bounds__(THREADS, 1) tile(struct args a) {
    extern __shared__ __align__(128) char smem[];
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    const int n_rows = count_rows(a.count), row0 = (int)blockIdx.x * X_ROWS, w_tile = (int)blockIdx.y;
    const int my_block = warp / 4 * 4, my_group = warp % 4 * 2, n_stages = a.stretches.n_stages;
    const char *w = a.w + (size_t)w_tile * (size_t)a.n_steps * STEP_BYTES;
    int part = stretch_part_of(a.stretches, w_tile * n_stages);
    int piece_end = stretch_begin(a.stretches, part + 1) - w_tile * n_stages;
    float sum[4][4][4] = {}, total[4][4][4] = {}; /* of the piece, of the tile */

    if (n_rows <= STREAM_ROWS || row0 >= n_rows)
        return;

    auto fetch = [&](int stage) {
        char *dst = smem + stage % STAGES * STAGE_BYTES;

        if (stage < n_stages) {
            const int n_steps = min(STAGE_STEPS, a.n_steps - stage * STAGE_STEPS);

#pragma unroll
            for (int i = 0; i < W_BYTES / 16 / THREADS; i++) {
                int at = ((int)threadIdx.x + i * THREADS) * 16;
                bool is_there = at < n_steps * STEP_BYTES;

                copy_async(dst + at, is_there ? w + (size_t)stage * W_BYTES + at : w, is_there ? 16 : 0);
            }
#pragma unroll
            for (int i = 0; i < X_ROWS * X_ROW_BYTES / 16 / THREADS; i++) {
                int at = (int)threadIdx.x + i * THREADS, r = at / (X_ROW_BYTES / 16), u = at % (X_ROW_BYTES / 16);
                bool is_there = row0 + r < n_rows && u < n_steps * 2;

                copy_async(dst + x_at(r, u),
                           is_there
                               ? a.x.data + (size_t)(row0 + r) * a.x.stride + (size_t)(stage * STAGE_STEPS * 16 + u * 8)
                               : a.x.data,
                           is_there ? 16 : 0);
            }
        }
        copy_commit();
    };

    for (int stage = 0; stage < STAGES - 1; stage++)
        fetch(stage);
    for (int stage = 0; stage < n_stages; stage++) {
        const char *src = smem + stage % STAGES * STAGE_BYTES;
        const int n_steps = min(STAGE_STEPS, a.n_steps - stage * STAGE_STEPS);
        float acc[4][4][4] = {};

        copy_wait<STAGES - 2>();
        __syncthreads();
        fetch(stage + STAGES - 1);
#pragma unroll
        for (int step = 0; step < STAGE_STEPS; step++) {
            uint4 wf[4];
            uint32_t xf[2][4];

            if (step >= n_steps)
                break;
#pragma unroll
            for (int b = 0; b < 4; b++)
                wf[b] = *(const uint4 *)(src + step * STEP_BYTES + (my_block + b) * FRAG_BYTES + lane * 16);
#pragma unroll
            for (int g = 0; g < 2; g++)
                ldmatrix_x4(xf[g], src + x_at((my_group + g) * 16 + lane / 16 * 8 + lane % 8, step * 2 + lane / 8 % 2));
#pragma unroll
            for (int b = 0; b < 4; b++)
#pragma unroll
                for (int g = 0; g < 2; g++) {
                    mma_bf16(acc[b][2 * g], &wf[b].x, xf[g][0], xf[g][1]);
                    mma_bf16(acc[b][2 * g + 1], &wf[b].x, xf[g][2], xf[g][3]);
                }
        }
        const bool is_end = stage + 1 == piece_end || stage + 1 == n_stages;

#pragma unroll
        for (int i = 0; i < 64; i++) {
            float *s = &sum[i / 16][i / 4 % 4][i % 4], *t = &total[i / 16][i / 4 % 4][i % 4];

            *s += acc[i / 16][i / 4 % 4][i % 4];
            if (is_end) {
                *t += *s;
                *s = 0;
            }
        }
        if (is_end) {
            part++;
            piece_end = stretch_begin(a.stretches, part + 1) - w_tile * n_stages;
        }
    }
    copy_wait<0>();
#pragma unroll
    for (int b = 0; b < 4; b++) {
        const int block = w_tile * TILE_BLOCKS + my_block + b;
        float before[4][4] = {};

        emit_before<4>(a.out, block, row0 + my_group * 16, n_rows, before);
        emit<4>(a.out, block, row0 + my_group * 16, n_rows, total[b], before);
    }
}

void tile_launch(const struct launch *launch, const struct gemm_job *job) {
    const int bytes = STAGES * STAGE_BYTES;

    cudaFuncSetAttribute(tile, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    for (int i = 0; i < job->n_products; i++) {
        const struct weight *weight = job->products[i].weight;
        struct args args = {};
        dim3 grid((unsigned)div_ceil((uint64_t)job->n_max, X_ROWS), (unsigned)weight->n_tiles);

        args.w = weight->data;
        args.x = job->x;
        args.count = job->count;
        args.n_steps = weight->n_steps;
        args.stretches = weight->stretches;
        args.out = job->products[i].out;
        tile<<<grid, THREADS, (size_t)bytes, launch->stream>>>(args);
    }
}
