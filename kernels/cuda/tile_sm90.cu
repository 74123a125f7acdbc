/* tile_sm90: products of many rows on compute capability 9.0: tiles of 128 rows of W by WGMMA_ROWS rows of x. One warp
 * brings stages of both into a ring; two warpgroups have half of the rows of W each and keep the chain that runs and the
 * sum of those before it in registers. Results go through shared memory, so that what is written lies together. */
#include "gemm.cuh"
#include "wgmma.cuh"

#include <cuda.h>

enum {
    GROUP_THREADS = 128, /* a warpgroup */
    CONSUMERS = 2,       /* warpgroups */
    THREADS = (CONSUMERS + 1) * GROUP_THREADS,
    STAGES = 5,
    X_ROW_BYTES = STAGE_STEPS * 32,
    X_BYTES = WGMMA_ROWS * X_ROW_BYTES,
    W_BYTES = STAGE_STEPS * STEP_BYTES,
    STAGE_BYTES = W_BYTES + X_BYTES,
    ALIGN = 1024,               /* of x in shared memory */
    SUM_STRIDE = TILE_ROWS + 4, /* floats between two rows of x; keeps banks apart */
    CONSUMER_REGISTERS = 240,
    BRINGER_REGISTERS = 24,
};
static_assert(WGMMA_ROWS * SUM_STRIDE * (int)sizeof(float) <= STAGES * STAGE_BYTES, "results fit the ring");

struct args {
    CUtensorMap x; /* [n_max rows, n_steps * 16 columns] in boxes of WGMMA_ROWS by a stage */
    const char *w;
    struct row_count count;
    int n_steps;
    struct stretches stretches;
    struct gemm_out out;
};

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL) /* to other cards the kernel is empty */

/* A box of x, from this column and row on; what lies outside comes as zeros. */
__device__ static inline void copy_box(void *shared, const CUtensorMap *map, int column, int row, uint64_t *barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
                 "%3}], [%4];" ::"r"(shared_address(shared)),
                 "l"(map), "r"(column), "r"(row), "r"(shared_address(barrier))
                 : "memory");
}

__device__ static inline void bring(const struct args &a, char *ring, uint64_t *full, uint64_t *empty) {
    const int row0 = (int)blockIdx.x * WGMMA_ROWS;
    const char *w = a.w + (size_t)blockIdx.y * (size_t)a.n_steps * STEP_BYTES;
    ring_place<STAGES> place = {};

    for (int stage = 0; stage < a.stretches.n_stages; stage++, place.step()) {
        const int w_bytes = min(STAGE_STEPS, a.n_steps - stage * STAGE_STEPS) * STEP_BYTES;
        char *dst = ring + place.stage * STAGE_BYTES;

        if (stage >= STAGES)
            barrier_wait(&empty[place.stage], place.parity ^ 1);
        barrier_announce_and_arrive(&full[place.stage], w_bytes + X_BYTES);
        copy_piece(dst + X_BYTES, w + (size_t)stage * W_BYTES, w_bytes, &full[place.stage]);
        copy_box(dst, &a.x, stage * STAGE_STEPS * 16, row0, &full[place.stage]);
    }
}

/* 8 outputs of a row from n on. */
__device__ static inline void emit8(const struct gemm_out &out, int row, int n, const float v[8]) {
    const size_t at = (size_t)row * (size_t)out.y_stride + (size_t)n;
    const bool is_f32 = out.epilogue == LINEAR_ADD_F32 || out.epilogue == LINEAR_STORE_F32;

    if (!is_f32 && n + 8 <= out.n && at % 8 == 0 && (uintptr_t)out.y % 16 == 0) {
        uint4 *y = (uint4 *)((bf16 *)out.y + at), raw = {};
        uint32_t *word = &raw.x;

        if (out.epilogue == LINEAR_ADD)
            raw = *y;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float low = v[2 * i], high = v[2 * i + 1];

            if (out.epilogue == LINEAR_ADD) {
                low = __uint_as_float(word[i] << 16) + low;
                high = __uint_as_float(word[i] & 0xffff0000u) + high;
            }
            word[i] = pack_bf16(low, high);
        }
        *y = raw;
        return;
    }
    for (int i = 0; i < 8 && n + i < out.n; i++)
        switch (out.epilogue) {
        case LINEAR_STORE:
        case LINEAR_SWIGLU:
            bf16_store(out.y, at + (size_t)i, v[i]);
            break;
        case LINEAR_STORE_F32:
            ((float *)out.y)[at + (size_t)i] = v[i];
            break;
        case LINEAR_ADD:
            bf16_store(out.y, at + (size_t)i, bf16_load(out.y, at + (size_t)i) + v[i]);
            break;
        case LINEAR_ADD_F32:
            ((float *)out.y)[at + (size_t)i] += v[i];
            break;
        }
}

/* sums: [rows of x][SUM_STRIDE], of the rows of W of a tile. */
__device__ static inline void emit_tile(const struct gemm_out &out, int tile, int row0, int n_rows, const float *sums) {
    const bool is_gate_up = out.epilogue == LINEAR_SWIGLU;
    const int n_pieces = is_gate_up ? TILE_ROWS / 16 : TILE_ROWS / 8;

    for (int i = (int)threadIdx.x; i < min(WGMMA_ROWS, n_rows - row0) * n_pieces; i += CONSUMERS * GROUP_THREADS) {
        const int row = i / n_pieces, piece = i % n_pieces, n = (tile * n_pieces + piece) * 8;
        const float *from = sums + row * SUM_STRIDE + piece * (is_gate_up ? 16 : 8);
        float v[8];

#pragma unroll
        for (int j = 0; j < 8; j++) {
            v[j] = from[j];
            if (out.bias != NULL && n + j < out.n)
                v[j] += out.bias[n + j];
            if (is_gate_up) {
                float up = from[8 + j];

                if (out.bias != NULL && n + j < out.n)
                    up += out.bias[out.n + n + j];
                v[j] = v[j] * sigmoid(v[j]) * up;
            }
        }
        emit8(out, row0 + row, n, v);
    }
}

__device__ static inline void multiply(const struct args &a, char *ring, uint64_t *full, uint64_t *empty, int n_rows) {
    const int lane = (int)threadIdx.x % 32, block = (int)threadIdx.x / 32, tile = (int)blockIdx.y;
    const int n_stages = a.stretches.n_stages;
    int part = stretch_part_of(a.stretches, tile * n_stages);
    int piece_end = stretch_begin(a.stretches, part + 1) - tile * n_stages;
    ring_place<STAGES> place = {};
    float d[WGMMA_SQUARES][4] = {}, sum[WGMMA_SQUARES][4] = {}; /* of a stage, of a piece */
    volatile float total[WGMMA_SQUARES][4]; /* of the tile; needed where a tile is cut: registers are for the others */
    bool is_cut = false;

    for (int stage = 0; stage < n_stages; stage++, place.step()) {
        const char *x = ring + place.stage * STAGE_BYTES, *w_src = x + X_BYTES + block * FRAG_BYTES + lane * 16;
        const int n_steps = min(STAGE_STEPS, a.n_steps - stage * STAGE_STEPS);
        uint4 w[STAGE_STEPS];

        barrier_wait(&full[place.stage], place.parity);
#pragma unroll
        for (int step = 0; step < STAGE_STEPS; step++)
            w[step] = *(const uint4 *)(w_src + step * STEP_BYTES);
        wgmma_begin();
        if (n_steps == STAGE_STEPS) {
#pragma unroll
            for (int step = 0; step < STAGE_STEPS; step++)
                wgmma(d, w[step], wgmma_x(x, step), step > 0);
        } else {
#pragma unroll
            for (int step = 0; step < STAGE_STEPS - 1; step++)
                if (step < n_steps)
                    wgmma(d, w[step], wgmma_x(x, step), step > 0);
        }
        wgmma_end();
        __syncwarp();
        if (lane == 0)
            barrier_arrive(&empty[place.stage]);
#pragma unroll
        for (int i = 0; i < WGMMA_SQUARES; i++)
#pragma unroll
            for (int c = 0; c < 4; c++)
                sum[i][c] += d[i][c];
        if (stage + 1 != piece_end || stage + 1 == n_stages)
            continue;
#pragma unroll
        for (int i = 0; i < WGMMA_SQUARES; i++)
#pragma unroll
            for (int c = 0; c < 4; c++) {
                total[i][c] = is_cut ? total[i][c] + sum[i][c] : sum[i][c];
                sum[i][c] = 0;
            }
        is_cut = true;
        part++;
        piece_end = stretch_begin(a.stretches, part + 1) - tile * n_stages;
    }
    if (is_cut)
#pragma unroll
        for (int i = 0; i < WGMMA_SQUARES; i++)
#pragma unroll
            for (int c = 0; c < 4; c++)
                sum[i][c] = total[i][c] + sum[i][c];

    asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS * GROUP_THREADS) : "memory"); /* the ring is read to its end */
    float *sums = (float *)ring;

#pragma unroll
    for (int i = 0; i < WGMMA_SQUARES; i++)
#pragma unroll
        for (int c = 0; c < 4; c++)
            sums[(i * 8 + lane % 4 * 2 + c % 2) * SUM_STRIDE + block * 16 + lane / 4 + c / 2 * 8] = sum[i][c];
    asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS * GROUP_THREADS) : "memory");
    emit_tile(a.out, tile, (int)blockIdx.x * WGMMA_ROWS, n_rows, sums);
}

__device__ static inline void run(const struct args &a) {
    extern __shared__ char smem[];
    __shared__ uint64_t full[STAGES], empty[STAGES];
    char *ring = smem + (ALIGN - shared_address(smem) % ALIGN) % ALIGN;
    const int n_rows = count_rows(a.count);

    if (n_rows <= STREAM_ROWS || (int)blockIdx.x * WGMMA_ROWS >= n_rows)
        return;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(&full[i], 1);
            barrier_init(&empty[i], CONSUMERS * GROUP_THREADS / 32);
        }
        barrier_publish();
    }
    __syncthreads();
    if (threadIdx.x / GROUP_THREADS == CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"((int)BRINGER_REGISTERS));
        if (threadIdx.x == CONSUMERS * GROUP_THREADS)
            bring(a, ring, full, empty);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"((int)CONSUMER_REGISTERS));
        multiply(a, ring, full, empty, n_rows);
    }
}
#else
__device__ static inline void run(const struct args &) {
}
#endif

__global__ static void __launch_bounds__(THREADS, 1) tile_sm90(const __grid_constant__ struct args a) {
    run(a);
}

/* ---- launch ------------------------------------------------------------------------------------------------------- */

typedef CUresult encode_fn(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                           const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                           CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

static bool map_x(const struct gemm_job *job, int n_steps, CUtensorMap *ret_map) {
    const cuuint64_t size[2] = {(cuuint64_t)n_steps * 16, (cuuint64_t)job->n_max};
    const cuuint64_t row_bytes = job->x.stride * sizeof(bf16);
    const cuuint32_t box[2] = {STAGE_STEPS * 16, WGMMA_ROWS}, strides[2] = {1, 1};
    cudaDriverEntryPointQueryResult found;
    void *encode = NULL;

    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &found) !=
            cudaSuccess ||
        found != cudaDriverEntryPointSuccess)
        return false;
    return ((encode_fn *)encode)(ret_map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, (void *)job->x.data, size, &row_bytes,
                                 box, strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

void tile_launch_sm90(const struct launch *launch, const struct gemm_job *job) {
    const int bytes = STAGES * STAGE_BYTES + ALIGN;
    struct args args = {};

    if (!map_x(job, job->products[0].weight->n_steps, &args.x)) {
        tile_launch(launch, job); /* the same bits, more slowly */
        return;
    }
    cudaFuncSetAttribute(tile_sm90, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    for (int i = 0; i < job->n_products; i++) {
        const struct weight *weight = job->products[i].weight;
        dim3 grid((unsigned)div_ceil((uint64_t)job->n_max, WGMMA_ROWS), (unsigned)weight->n_tiles);

        args.w = weight->data;
        args.count = job->count;
        args.n_steps = weight->n_steps;
        args.stretches = weight->stretches;
        args.out = job->products[i].out;
        tile_sm90<<<grid, THREADS, (size_t)bytes, launch->stream>>>(args);
    }
}
