/* tile_sm90: products of many rows on compute capability 9.0: tiles of 128 rows of W by X_ROWS rows of x. A CTA does one
 * tile after the other, beside another CTA that has the next 128 rows of W and the same rows of x: of these each brings
 * half to both, so that less is read from the L2 cache. One warp brings stages of W and x into a ring and runs ahead into the
 * next tile. Two warpgroups have half of the rows of W each; a warpgroup does a stage in two halves of the rows of x, so that
 * while one half's chain runs the other's is added to the sum of those before it, or its results are written. */
#include "gemm.cuh"
#include "wgmma.cuh"

#include <cuda.h>

enum {
    GROUP_THREADS = 128, /* a warpgroup */
    CONSUMERS = 2,       /* warpgroups */
    CONSUMER_WARPS = CONSUMERS * GROUP_THREADS / 32,
    THREADS = (CONSUMERS + 1) * GROUP_THREADS,
    CTAS = 2, /* of a cluster */
    STAGES = 5,
    STAGES_AT_ONCE = 4, /* whose chains follow one another without a gap */
    X_ROWS = 2 * WGMMA_ROWS,
    X_ROW_BYTES = STAGE_STEPS * 32,
    X_HALF_BYTES = WGMMA_ROWS * X_ROW_BYTES,
    W_BYTES = STAGE_STEPS * STEP_BYTES,
    STAGE_BYTES = W_BYTES + 2 * X_HALF_BYTES,
    ALIGN = 1024,    /* of x in shared memory */
    OUT_ROWS = 16,   /* rows of x that a warp writes at a time */
    OUT_STRIDE = 20, /* floats between two of them; keeps banks apart */
    OUT_FLOATS = OUT_ROWS * OUT_STRIDE,
    N_OUTS = WGMMA_ROWS / OUT_ROWS,
    SHARED = ALIGN + STAGES * STAGE_BYTES + CONSUMER_WARPS * OUT_FLOATS * (int)sizeof(float),
    CONSUMER_REGISTERS = 240,
    BRINGER_REGISTERS = 24,
};
static_assert(X_HALF_BYTES % ALIGN == 0 && STAGE_BYTES % ALIGN == 0, "each half of x is aligned");
static_assert(WGMMA_ROWS % OUT_ROWS == 0 && (int)SHARED <= (int)SHARED_BYTES, "");

struct args {
    CUtensorMap x; /* [n_max rows, n_steps * 16 columns] in boxes of WGMMA_ROWS by a stage */
    const char *w;
    struct row_count count;
    int n_steps;
    struct stretches stretches;
    struct gemm_out out;
};

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL) /* to other cards the kernel is empty */

/* ---- which tiles --------------------------------------------------------------------------------------------------- */

/* A cluster's tiles: pairs of tiles of W by X_ROWS rows of x. Clusters side by side have the same pair, as far as the rows
 * go: they read it from memory once. */
struct work {
    int n_x, n_items, item;

    __device__ work(const struct args &a, int n_rows)
        : n_x((n_rows + X_ROWS - 1) / X_ROWS), n_items((a.stretches.n_tiles + CTAS - 1) / CTAS * n_x),
          item((int)blockIdx.x / CTAS) {
    }
    __device__ bool is_left(void) const {
        return item < n_items;
    }
    __device__ void step(void) {
        item += (int)gridDim.x / CTAS;
    }
    __device__ int row0(void) const {
        return item % n_x * X_ROWS;
    }
    __device__ int
    tile(void) const { /* may be the one behind the last, whose CTA does the last again and writes nothing */
        return item / n_x * CTAS + (int)blockIdx.x % CTAS;
    }
    __device__ int tile_of(const struct args &a) const {
        return min(tile(), a.stretches.n_tiles - 1);
    }
};

/* ---- the warp that brings ------------------------------------------------------------------------------------------ */

/* A box of x, from this column and row on, to both CTAs; what lies outside comes as zeros. */
__device__ static inline void copy_box(void *shared, const CUtensorMap *map, int column, int row, uint64_t *barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(shared)),
                 "l"(map), "r"(column), "r"(row), "r"(shared_address(barrier)), "h"((uint16_t)((1 << CTAS) - 1))
                 : "memory");
}

__device__ static inline void bring(const struct args &a, char *ring, uint64_t *full, uint64_t *empty, int n_rows) {
    const int half = (int)blockIdx.x % CTAS;
    ring_place<STAGES> place = {};
    bool is_again = false; /* the place has been filled before */

    for (struct work work(a, n_rows); work.is_left(); work.step()) {
        const char *w = a.w + (size_t)work.tile_of(a) * (size_t)a.n_steps * STEP_BYTES;
        const int row = work.row0() + half * WGMMA_ROWS;

        for (int stage = 0; stage < a.stretches.n_stages; stage++) {
            const int w_bytes = min(STAGE_STEPS, a.n_steps - stage * STAGE_STEPS) * STEP_BYTES;
            char *dst = ring + place.stage * STAGE_BYTES;

            if (is_again)
                barrier_wait(&empty[place.stage], place.parity ^ 1);
            barrier_announce_and_arrive(&full[place.stage], w_bytes + 2 * X_HALF_BYTES);
            copy_box(dst + half * X_HALF_BYTES, &a.x, stage * STAGE_STEPS * 16, row, &full[place.stage]);
            copy_piece(dst + 2 * X_HALF_BYTES, w + (size_t)stage * W_BYTES, w_bytes, &full[place.stage]);
            place.step();
            is_again |= place.stage == 0;
        }
    }
}

/* ---- results ------------------------------------------------------------------------------------------------------- */

__device__ static inline void emit_one(const struct gemm_out &out, size_t at, float v) {
    if (out.epilogue == LINEAR_STORE_F32)
        ((float *)out.y)[at] = v;
    else if (out.epilogue == LINEAR_ADD_F32)
        ((float *)out.y)[at] += v;
    else
        bf16_store(out.y, at, out.epilogue == LINEAR_ADD ? bf16_load(out.y, at) + v : v);
}

/* 8 outputs of a row from n on, or 4 of which v has the gates and then the ups. Whole: n and the row's address are multiples
 * of so many, and there are so many outputs. before: of LINEAR_ADD, whole. */
__device__ static inline void emit8(const struct gemm_out &out, int row, int n, float v[8], bool is_whole,
                                    uint4 before) {
    const size_t at = (size_t)row * (size_t)out.y_stride + (size_t)n;
    const bool is_gate_up = out.epilogue == LINEAR_SWIGLU;

    if (out.bias != NULL)
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int j = n + (is_gate_up ? i % 4 : i);

            if (j < out.n)
                v[i] += out.bias[is_gate_up && i >= 4 ? out.n + j : j];
        }
    if (is_gate_up)
#pragma unroll
        for (int i = 0; i < 4; i++)
            v[i] = v[i] * sigmoid(v[i]) * v[4 + i];
    if (!is_whole) {
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (n + i < out.n && (i < 4 || !is_gate_up))
                emit_one(out, at + (size_t)i, v[i]);
    } else if (is_gate_up) {
        *(uint2 *)((bf16 *)out.y + at) = make_uint2(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]));
    } else if (out.epilogue == LINEAR_STORE_F32 || out.epilogue == LINEAR_ADD_F32) {
        float4 *y = (float4 *)((float *)out.y + at);
        float4 low = make_float4(v[0], v[1], v[2], v[3]), high = make_float4(v[4], v[5], v[6], v[7]);

        if (out.epilogue == LINEAR_ADD_F32) {
            const float4 a = y[0], b = y[1];

            low = make_float4(a.x + low.x, a.y + low.y, a.z + low.z, a.w + low.w);
            high = make_float4(b.x + high.x, b.y + high.y, b.z + high.z, b.w + high.w);
        }
        y[0] = low;
        y[1] = high;
    } else {
        uint32_t *word = &before.x;

#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (out.epilogue == LINEAR_ADD) {
                const float2 pair = pair_of(word[i]);

                v[2 * i] = pair.x + v[2 * i];
                v[2 * i + 1] = pair.y + v[2 * i + 1];
            }
            word[i] = pack_bf16(v[2 * i], v[2 * i + 1]);
        }
        *(uint4 *)((bf16 *)out.y + at) = before;
    }
}

/* Writes a block's results of the WGMMA_ROWS rows from row0 on, by one warp; own: shared memory for OUT_FLOATS. Leaves
 * zeros. */
__device__ static inline void emit_half(const struct gemm_out &out, int block, int row0, int n_rows, float *own,
                                        float sum[WGMMA_SQUARES][4]) {
    const int lane = (int)threadIdx.x % 32, side = lane % 2;
    const bool is_gate_up = out.epilogue == LINEAR_SWIGLU;
    const int width = is_gate_up ? 4 : 8; /* outputs of a thread, in two of a row */
    const int n = (block * 2 + side) * width;
    const bool is_whole = (block + 1) * 2 * width <= out.n && out.y_stride % 8 == 0 && (uintptr_t)out.y % 16 == 0;
    const float *mine = own + lane / 2 * OUT_STRIDE + side * width;
    uint4 before[N_OUTS] = {};
    int row = row0 + lane / 2;

    if (out.epilogue == LINEAR_ADD && is_whole) /* all loads at once */
#pragma unroll
        for (int i = 0; i < N_OUTS; i++)
            if (row + i * OUT_ROWS < n_rows)
                before[i] = *(const uint4 *)((const bf16 *)out.y + (size_t)(row + i * OUT_ROWS) * (size_t)out.y_stride +
                                             (size_t)n);

                /* What is next moves to the front: so the code is there once, and yet no register is named by a variable. */
#pragma unroll 1
    for (int i = 0; i < N_OUTS; i++, row += OUT_ROWS) {
        __syncwarp();
#pragma unroll
        for (int s = 0; s < OUT_ROWS / 8; s++)
#pragma unroll
            for (int c = 0; c < 4; c++)
                own[(s * 8 + lane % 4 * 2 + c % 2) * OUT_STRIDE + lane / 4 + c / 2 * 8] = sum[s][c];
#pragma unroll
        for (int s = 0; s < WGMMA_SQUARES; s++)
#pragma unroll
            for (int c = 0; c < 4; c++)
                sum[s][c] = s + OUT_ROWS / 8 < WGMMA_SQUARES ? sum[s + OUT_ROWS / 8][c] : 0;
        __syncwarp();
        if (row < n_rows) {
            const float4 low = *(const float4 *)mine, high = *(const float4 *)(mine + (is_gate_up ? 8 : 4));
            float v[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};

            emit8(out, row, n, v, is_whole, before[0]);
        }
#pragma unroll
        for (int j = 0; j + 1 < N_OUTS; j++)
            before[j] = before[j + 1];
    }
}

/* ---- the warpgroups that multiply ---------------------------------------------------------------------------------- */

typedef float squares[WGMMA_SQUARES][4];

/* The sum of a tile's pieces lies in local memory: registers are for what is needed in every stage. sum := total + sum, all
 * loads at once. */
__device__ static inline void total_add(const squares total, squares sum) {
    squares v;

#pragma unroll
    for (int i = 0; i < WGMMA_SQUARES; i++)
        asm volatile("ld.local.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(v[i][0]), "=f"(v[i][1]), "=f"(v[i][2]), "=f"(v[i][3])
                     : "l"(__cvta_generic_to_local(total[i]))
                     : "memory");
#pragma unroll
    for (int i = 0; i < WGMMA_SQUARES; i++)
#pragma unroll
        for (int c = 0; c < 4; c++)
            sum[i][c] = v[i][c] + sum[i][c];
}
/* Leaves zeros. */
__device__ static inline void total_store(squares total, squares sum) {
#pragma unroll
    for (int i = 0; i < WGMMA_SQUARES; i++) {
        asm volatile("st.local.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_local(total[i])), "f"(sum[i][0]),
                     "f"(sum[i][1]), "f"(sum[i][2]), "f"(sum[i][3])
                     : "memory");
#pragma unroll
        for (int c = 0; c < 4; c++)
            sum[i][c] = 0;
    }
}

/* Here and not later: d's registers are the next chain's. */
__device__ static inline void add(squares sum, const squares d) {
#pragma unroll
    for (int i = 0; i < WGMMA_SQUARES; i++)
#pragma unroll
        for (int c = 0; c < 4; c++)
            asm volatile("add.rn.f32 %0, %0, %1;" : "+f"(sum[i][c]) : "f"(d[i][c]) : "memory");
}

/* Begins the chain of a stage for half of the rows of x. */
__device__ static inline void begin_chain(squares d, const uint4 w[STAGE_STEPS], const char *x) {
    wgmma_begin();
#pragma unroll
    for (int step = 0; step < STAGE_STEPS; step++)
        wgmma(d, w[step], wgmma_x(x, step), step > 0);
    wgmma_end_group();
}

/* The ring as a warp that multiplies sees it. */
struct feed {
    const char *ring;
    uint64_t *full, *empty;
    ring_place<STAGES> place;

    /* Waits for the next stage, of which n_steps are there: its x, and this warp's fragments. */
    __device__ const char *take(int n_steps, uint4 w[STAGE_STEPS]) {
        const char *x = ring + place.stage * STAGE_BYTES;
        const char *from = x + 2 * X_HALF_BYTES + (int)threadIdx.x / 32 * FRAG_BYTES + (int)threadIdx.x % 32 * 16;

        barrier_wait(&full[place.stage], place.parity);
#pragma unroll
        for (int step = 0; step < STAGE_STEPS; step++) /* behind the end x is zeros, too: sums stay as they are */
            w[step] = step < n_steps ? *(const uint4 *)(from + step * STEP_BYTES) : make_uint4(0, 0, 0, 0);
        return x;
    }
    /* The stage taken is read to its end: its place is free, in both CTAs. */
    __device__ void leave(void) {
        __syncwarp();
        if (threadIdx.x % 32 < CTAS)
            barrier_arrive_at(&empty[place.stage], (int)threadIdx.x % 32);
        place.step();
    }
};

/* N stages, of the first of which and those behind it n_steps are left. One half's chain of a stage runs while the other's
 * is added. */
template <int N> __device__ static inline void add_stages(struct feed &feed, int n_steps, squares sum[2]) {
    squares d[2] = {};
    uint4 w[2][STAGE_STEPS];

#pragma unroll
    for (int i = 0; i < N; i++) {
        const char *x;
        struct feed next = feed; /* the place before is still read */

        if (i > 0)
            next.place.step();
        x = next.take(n_steps - i * STAGE_STEPS, w[i % 2]);
        begin_chain(d[0], w[i % 2], x);
        if (i > 0) {
            wgmma_wait<1>(d[1]);
            feed.leave();
            add(sum[1], d[1]);
        }
        begin_chain(d[1], w[i % 2], x + X_HALF_BYTES);
        wgmma_wait<1>(d[0]);
        add(sum[0], d[0]);
    }
    wgmma_wait<0>(d[1]);
    feed.leave();
    add(sum[1], d[1]);
}

__device__ static inline void multiply(const struct args &a, const char *ring, float *outs, uint64_t *full,
                                       uint64_t *empty, int n_rows) {
    const int warp = (int)threadIdx.x / 32, n_stages = a.stretches.n_stages;
    struct feed feed = {ring, full, empty, {}};
    squares sum[2] = {}; /* of a piece; of each half of the rows of x */
    alignas(16) squares total[2];

    for (struct work work(a, n_rows); work.is_left(); work.step()) {
        const int first = work.tile_of(a) * n_stages, row0 = work.row0();
        int stage = 0;

        for (int part = stretch_part_of(a.stretches, first); stage < n_stages; part++) {
            const int begin = stage, end = min(stretch_begin(a.stretches, part + 1) - first, n_stages);

            while (stage < end) {
                const int n_steps = a.n_steps - stage * STAGE_STEPS;

                if (end - stage >= STAGES_AT_ONCE) {
                    add_stages<STAGES_AT_ONCE>(feed, n_steps, sum);
                    stage += STAGES_AT_ONCE;
                } else {
                    add_stages<1>(feed, n_steps, sum);
                    stage++;
                }
            }
#pragma unroll
            for (int half = 0; half < 2; half++) {
                if (begin > 0)
                    total_add(total[half], sum[half]);
                if (end == n_stages)
                    emit_half(a.out, work.tile() * TILE_BLOCKS + warp, row0 + half * WGMMA_ROWS, n_rows,
                              outs + warp * OUT_FLOATS, sum[half]);
                else
                    total_store(total[half], sum[half]);
            }
        }
    }
}

__device__ static inline void run(const struct args &a) {
    extern __shared__ char smem[];
    __shared__ uint64_t full[STAGES], empty[STAGES];
    char *ring = smem + (ALIGN - shared_address(smem) % ALIGN) % ALIGN;
    int n_rows;

    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(&full[i], 1);
            barrier_init(&empty[i], CTAS * CONSUMER_WARPS);
        }
        barrier_publish();
    }
    wait_for_previous();
    n_rows = count_rows(a.count);
    if (n_rows <= STREAM_ROWS)
        return;
    cluster_sync();
    if (threadIdx.x / GROUP_THREADS == CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"((int)BRINGER_REGISTERS));
        if (threadIdx.x == CONSUMERS * GROUP_THREADS)
            bring(a, ring, full, empty, n_rows);
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"((int)CONSUMER_REGISTERS));
        multiply(a, ring, (float *)(ring + STAGES * STAGE_BYTES), full, empty, n_rows);
    }
    cluster_sync(); /* what the other CTA sends and who of it arrives find this one here */
}
#else
__device__ static inline void run(const struct args &) {
}
#endif

__global__ static void __cluster_dims__(CTAS, 1, 1) __launch_bounds__(THREADS, 1)
    tile_sm90(const __grid_constant__ struct args a) {
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
    struct args args = {};

    if (!map_x(job, job->products[0].weight->n_steps, &args.x)) {
        tile_launch(launch, job); /* the same bits, more slowly */
        return;
    }
    cudaFuncSetAttribute(tile_sm90, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED);
    for (int i = 0; i < job->n_products; i++) {
        const struct weight *weight = job->products[i].weight;
        const int n_items = (int)(div_ceil((uint64_t)weight->n_tiles, CTAS) * div_ceil((uint64_t)job->n_max, X_ROWS));
        const int n_clusters = min_int(n_items, launch->n_multiprocessors / CTAS);

        args.w = weight->data;
        args.count = job->count;
        args.n_steps = weight->n_steps;
        args.stretches = weight->stretches;
        args.out = job->products[i].out;
        launch_early(launch->stream, tile_sm90, dim3((unsigned)(n_clusters * CTAS)), THREADS, SHARED, args);
    }
}
