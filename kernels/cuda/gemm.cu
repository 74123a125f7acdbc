/* gemm: the packing of rows and the two kernels. */
#include "gemm.cuh"

enum {
    THREADS = 256,
    PACK_THREADS = 256,
    RED_STRIDE = UNIT_ROWS + 4, /* floats between two tokens of a partial sum; keeps banks apart */
    TILE_BLOCKS = 8,
    TILE_STAGES = 4,
    TILE_STAGE_STEPS = 2,
    CTAS = 132, /* of the card this is cut for: what n_splits balances; any grid gives the same bits */
};

/* ---- packing ------------------------------------------------------------------------------------------------------ */

__device__ static int count_rows(struct row_count count) {
    return count.n_segs != NULL && *count.n_segs == 0 ? 0 : *count.n;
}

__global__ static void pack_rows(struct gemm_rows a, char *packed) {
    __shared__ float sums[PACK_THREADS / 32];
    int row = (int)blockIdx.x, src;
    float scale = 1;
    char *dst;

    if (row >= count_rows(a.count))
        return;
    src = a.index != NULL ? a.index[row] : row;
    dst = packed + (size_t)(row / 16) * (size_t)a.n_steps * FRAG_BYTES;
    if (a.norm != NULL && src >= 0) {
        float sum = 0;

        for (int k = (int)threadIdx.x; k < a.n_cols; k += PACK_THREADS) {
            size_t at = (size_t)src * a.stride + (size_t)k;
            float v = a.is_f32 ? ((const float *)a.x)[at] : bf16_load(a.x, at);

            sum = fmaf(v, v, sum);
        }
        scale = rsqrtf(cta_sum(sum, sums, PACK_THREADS) / (float)a.n_cols + a.eps);
    }
    for (int k = 2 * (int)threadIdx.x; k < a.n_steps * 16; k += 2 * PACK_THREADS) {
        float v[2] = {0, 0};
        int j = row % 16, lane = j % 8 * 4 + k % 8 / 2, reg = j / 8 * 2 + k % 16 / 8;

        for (int i = 0; i < 2 && k + i < a.n_cols && src >= 0; i++) {
            size_t at = (size_t)src * a.stride + (size_t)(k + i);

            v[i] = a.is_f32 ? ((const float *)a.x)[at] : bf16_load(a.x, at);
            if (a.norm != NULL)
                v[i] = v[i] * scale * a.norm[k + i];
        }
        *(uint32_t *)(dst + (size_t)(k / 16) * FRAG_BYTES + lane * 16 + reg * 4) = pack_bf16(v[0], v[1]);
    }
}

void gemm_pack(const struct launch *launch, const struct gemm_rows *rows, void *packed) {
    pack_rows<<<(unsigned)rows->n_max, PACK_THREADS, 0, launch->stream>>>(*rows, (char *)packed);
}

/* ---- how K is cut ------------------------------------------------------------------------------------------------- */

__host__ __device__ static inline int chunk_begin(int chunk, int n_splits, int n_steps) {
    return (int)((int64_t)chunk * n_steps / (n_splits * GEMM_CHUNKS));
}

/* The cut that keeps CTAS equally busy; each split costs a round of partial sums. A function of the shape alone. */
int gemm_n_splits(int n_units, int n_steps) {
    double best_cost = 0;
    int best = 1;

    if (n_units > COUNTERS_MAX)
        return 1;
    for (int s = 1; s <= 16 && (s == 1 || n_steps >= s * GEMM_CHUNKS * 4); s++) {
        double items = (double)n_units * s, rounds = (double)div_ceil((uint64_t)n_units * (uint64_t)s, CTAS);
        double cost = rounds * CTAS / items * (1 + 0.015 * s) * (1 + 0.02 * (s > 1));

        if (s == 1 || cost < best_cost) {
            best_cost = cost;
            best = s;
        }
    }
    return best;
}

/* ---- results ------------------------------------------------------------------------------------------------------ */

struct epilogue {
    struct gemm_out out;
    int n; /* outputs per row */
};

/* Output n of a row; up: of the up half, for SWIGLU. */
__device__ static void emit(const struct epilogue *e, int row, int n, float v, float up) {
    size_t at = (size_t)row * (size_t)e->out.y_stride + (size_t)n;

    if (n >= e->n)
        return;
    if (e->out.bias != NULL) {
        v += e->out.bias[n];
        if (e->out.epilogue == LINEAR_SWIGLU)
            up += e->out.bias[e->n + n];
    }
    switch (e->out.epilogue) {
    case LINEAR_STORE:
        bf16_store(e->out.y, at, v);
        break;
    case LINEAR_STORE_F32:
        ((float *)e->out.y)[at] = v;
        break;
    case LINEAR_ADD:
        bf16_store(e->out.y, at, bf16_load(e->out.y, at) + v);
        break;
    case LINEAR_ADD_F32:
        ((float *)e->out.y)[at] += v;
        break;
    case LINEAR_SWIGLU:
        bf16_store(e->out.y, at, v * sigmoid(v) * up);
        break;
    }
}

struct args {
    const char *w, *packed;
    struct row_count count;
    int rows_min, rows_max; /* the kernel runs for (rows_min, rows_max] rows */
    int n_units, n_blocks, n_steps, n_splits;
    bool is_gate_up;
    struct epilogue epilogue;
    float *partial;     /* [n_units, n_splits, tokens, UNIT_ROWS] */
    unsigned *counters; /* [n_units] */
    size_t matrix_bytes;
    const int32_t *n_groups, *group_expert; /* NULL: one matrix, rows from group 0 on */
};

/* ---- few rows: the weights pass by once, as fast as memory gives them ---------------------------------------------
 * An item is a unit of 64 rows of W and one split of K; each of the 8 warps has one chunk of it. A warp keeps a ring of
 * steps in flight, across items, and every lane reads what itself has copied: nothing is synchronised before the sums. */

struct item {
    const char *w, *x; /* of the unit and the first group, at step 0 */
    int step, end;
    bool is_last; /* no more items: nothing to do */
};

__device__ static inline int n_items_of(const struct args &a) {
    return a.n_units * a.n_splits * (a.n_groups != NULL ? *a.n_groups : 1);
}

__device__ static inline struct item item_at(const struct args &a, int i, int n_items, int warp) {
    int unit = i / a.n_splits % a.n_units, group = i / (a.n_splits * a.n_units);
    int chunk = i % a.n_splits * GEMM_CHUNKS + warp;
    size_t block_bytes = (size_t)a.n_steps * FRAG_BYTES;
    struct item item = {};

    item.is_last = i >= n_items;
    if (item.is_last)
        return item;
    item.w = a.w + (size_t)unit * UNIT_BLOCKS * block_bytes;
    if (a.n_groups != NULL)
        item.w += (size_t)a.group_expert[group] * a.matrix_bytes;
    item.x = a.packed + (size_t)group * block_bytes;
    item.step = chunk_begin(chunk, a.n_splits, a.n_steps);
    item.end = chunk_begin(chunk + 1, a.n_splits, a.n_steps);
    return item;
}

/* What thread `i` of the unit's results writes: the sums come from `value(row of the unit, token)`. */
template <typename VALUE>
__device__ static inline void emit_unit(const struct args &a, int unit, int row0, int n_rows, VALUE value) {
    if (a.is_gate_up) {
        for (int i = (int)threadIdx.x; i < n_rows * (UNIT_ROWS / 2); i += THREADS) {
            int token = i / (UNIT_ROWS / 2), n = i % (UNIT_ROWS / 2), at = n / 16 * 32 + n % 16;

            emit(&a.epilogue, row0 + token, unit * (UNIT_ROWS / 2) + n, value(at, token), value(at + 16, token));
        }
    } else {
        for (int i = (int)threadIdx.x; i < n_rows * UNIT_ROWS; i += THREADS)
            emit(&a.epilogue, row0 + i / UNIT_ROWS, unit * UNIT_ROWS + i % UNIT_ROWS,
                 value(i % UNIT_ROWS, i / UNIT_ROWS), 0);
    }
}

/* Steps in flight per warp: as many as shared memory holds; at 9 that is 144 KiB of weights per multiprocessor. */
__host__ __device__ constexpr int skinny_stages(int n_groups) {
    return n_groups == 1 ? 9 : 6;
}
__host__ __device__ constexpr int skinny_bytes(int n_groups) {
    return GEMM_CHUNKS * n_groups * 16 * RED_STRIDE * (int)sizeof(float) +
           GEMM_CHUNKS * skinny_stages(n_groups) * (UNIT_BLOCKS + n_groups) * FRAG_BYTES;
}

/* N_GROUPS groups of 16 rows. */
template <int N_GROUPS> __global__ static void __launch_bounds__(THREADS, 1) skinny(struct args a) {
    constexpr int TOKENS = N_GROUPS * 16, STAGE_BYTES = (UNIT_BLOCKS + N_GROUPS) * FRAG_BYTES;
    constexpr int STAGES = skinny_stages(N_GROUPS);
    extern __shared__ char smem[];
    __shared__ int is_last_cta;
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    const int n_rows = a.n_groups != NULL ? TOKENS : count_rows(a.count);
    const size_t block_bytes = (size_t)a.n_steps * FRAG_BYTES;
    float *red = (float *)smem; /* [8, TOKENS, RED_STRIDE] */
    char *ring =
        smem + (size_t)GEMM_CHUNKS * TOKENS * RED_STRIDE * sizeof(float) + warp * STAGES * STAGE_BYTES + lane * 16;
    struct item next;
    int next_i = (int)blockIdx.x, head = 0, n_items;

    if (n_rows <= a.rows_min || n_rows > a.rows_max)
        return;
    n_items = n_items_of(a);
    next = item_at(a, next_i, n_items, warp);

    auto fetch = [&](int stage) { /* one step, or an empty group at the end */
                                  while (!next.is_last && next.step >= next.end) {
                                      next_i += (int)gridDim.x;
                                      next = item_at(a, next_i, n_items, warp);
                                  }
                                  if (!next.is_last) {
                                      char *dst = ring + stage * STAGE_BYTES;
                                      size_t at = (size_t)next.step * FRAG_BYTES + (size_t)lane * 16;

#pragma unroll
                                      for (int b = 0; b < UNIT_BLOCKS; b++)
                                          copy_async(dst + b * FRAG_BYTES, next.w + (size_t)b * block_bytes + at, 16);
#pragma unroll
                                      for (int g = 0; g < N_GROUPS; g++)
                                          copy_async(dst + (UNIT_BLOCKS + g) * FRAG_BYTES,
                                                     next.x + (size_t)g * block_bytes + at, 16);
                                      next.step++;
                                  }
                                  copy_commit();
    };
    for (int stage = 0; stage < STAGES - 1; stage++)
        fetch(stage);

    for (int i = (int)blockIdx.x; i < n_items; i += (int)gridDim.x) {
        struct item item = item_at(a, i, n_items, warp);
        int unit = i / a.n_splits % a.n_units, split = i % a.n_splits;
        int row0 = a.n_groups != NULL ? i / (a.n_splits * a.n_units) * 16 : 0;
        float acc[UNIT_BLOCKS][2 * N_GROUPS][4] = {};

        for (; item.step < item.end; item.step++) {
            uint4 w[UNIT_BLOCKS], x[N_GROUPS];
            const char *src = ring + head * STAGE_BYTES;

            fetch((head + STAGES - 1) % STAGES);
            copy_wait<STAGES - 1>();
#pragma unroll
            for (int b = 0; b < UNIT_BLOCKS; b++)
                w[b] = *(const uint4 *)(src + b * FRAG_BYTES);
#pragma unroll
            for (int g = 0; g < N_GROUPS; g++)
                x[g] = *(const uint4 *)(src + (UNIT_BLOCKS + g) * FRAG_BYTES);
#pragma unroll
            for (int b = 0; b < UNIT_BLOCKS; b++)
#pragma unroll
                for (int g = 0; g < N_GROUPS; g++) {
                    mma_bf16(acc[b][2 * g], &w[b].x, x[g].x, x[g].y);
                    mma_bf16(acc[b][2 * g + 1], &w[b].x, x[g].z, x[g].w);
                }
            head = (head + 1) % STAGES;
        }

#pragma unroll
        for (int b = 0; b < UNIT_BLOCKS; b++)
#pragma unroll
            for (int t = 0; t < 2 * N_GROUPS; t++)
#pragma unroll
                for (int c = 0; c < 4; c++)
                    red[(size_t)(warp * TOKENS + t * 8 + lane % 4 * 2 + c % 2) * RED_STRIDE + b * 16 + lane / 4 +
                        c / 2 * 8] = acc[b][t][c];
        __syncthreads();
        auto group_sum = [&](int n, int token) {
            float sum = red[token * RED_STRIDE + n];

            for (int w = 1; w < GEMM_CHUNKS; w++)
                sum += red[(w * TOKENS + token) * RED_STRIDE + n];
            return sum;
        };
        if (a.n_splits == 1) {
            emit_unit(a, unit, row0, n_rows, group_sum);
        } else {
            float *partial = a.partial + (size_t)unit * (size_t)a.n_splits * TOKENS * UNIT_ROWS;

            for (int j = (int)threadIdx.x; j < TOKENS * UNIT_ROWS; j += THREADS)
                __stcg(&partial[(size_t)split * TOKENS * UNIT_ROWS + (size_t)j],
                       group_sum(j % UNIT_ROWS, j / UNIT_ROWS));
            __threadfence();
            __syncthreads();
            if (threadIdx.x == 0) {
                is_last_cta = atomicAdd(&a.counters[unit], 1) == (unsigned)a.n_splits - 1;
                if (is_last_cta)
                    a.counters[unit] = 0;
            }
            __syncthreads();
            if (is_last_cta) {
                __threadfence();
                emit_unit(a, unit, row0, n_rows, [&](int n, int token) {
                    float sum = __ldcg(&partial[token * UNIT_ROWS + n]);

                    for (int s = 1; s < a.n_splits; s++)
                        sum += __ldcg(&partial[(size_t)s * TOKENS * UNIT_ROWS + (size_t)(token * UNIT_ROWS + n)]);
                    return sum;
                });
            }
        }
        __syncthreads();
    }
}

template <int N_GROUPS> static void launch_skinny(const struct launch *launch, const struct args *args, int n_items) {
    constexpr int bytes = skinny_bytes(N_GROUPS);
    static_assert(bytes <= SHARED_BYTES, "what open() asks the card for");

    cudaFuncSetAttribute(skinny<N_GROUPS>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    skinny<N_GROUPS><<<(unsigned)min_int(n_items, CTAS), THREADS, (size_t)bytes, launch->stream>>>(*args);
}

/* ---- many rows: tiles of 128 rows of W by 128 rows of x ------------------------------------------------------------
 * 8 warps, each 4 blocks by 2 groups. Chunks and groups are summed in registers, groups of several splits in shared
 * memory. */

__global__ static void __launch_bounds__(THREADS, 1) tiled(struct args a) {
    constexpr int STEP_BYTES = 2 * TILE_BLOCKS * FRAG_BYTES, STAGE_BYTES = TILE_STAGE_STEPS * STEP_BYTES;
    extern __shared__ char smem[];
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    const int n_rows = count_rows(a.count), row0 = (int)blockIdx.x * GEMM_TILE_ROWS;
    const int block0 = (int)blockIdx.y * TILE_BLOCKS, my_block = warp / 4 * 4, my_group = warp % 4 * 2;
    const size_t block_bytes = (size_t)a.n_steps * FRAG_BYTES;
    const int n_stages = (a.n_steps + TILE_STAGE_STEPS - 1) / TILE_STAGE_STEPS;
    float *total = (float *)(smem + TILE_STAGES * STAGE_BYTES) + (size_t)warp * 64 * 32 + lane; /* [64 values][32] */
    float acc[4][4][4] = {}, sum[4][4][4] = {};
    int chunk = 0, chunk_end = chunk_begin(1, a.n_splits, a.n_steps);

    if (n_rows <= a.rows_min || row0 >= n_rows)
        return;

    auto fetch = [&](int stage) {
        if (stage < n_stages)
#pragma unroll
            for (int i = 0; i < STAGE_BYTES / 16 / THREADS; i++) {
                int piece = (int)threadIdx.x + i * THREADS; /* 16 bytes: [step][W, x][block or group][32] */
                int step = piece / 32 / (2 * TILE_BLOCKS), what = piece / 32 % (2 * TILE_BLOCKS);
                int at_step = stage * TILE_STAGE_STEPS + step, block = what % TILE_BLOCKS;
                bool is_x = what >= TILE_BLOCKS,
                     is_there = at_step < a.n_steps && (is_x || block0 + block < a.n_blocks);
                const char *base = is_x ? a.packed + (size_t)(row0 / 16 + block) * block_bytes
                                        : a.w + (size_t)(block0 + block) * block_bytes;

                copy_async(smem + stage % TILE_STAGES * STAGE_BYTES + piece * 16,
                           is_there ? base + (size_t)at_step * FRAG_BYTES + (size_t)(piece % 32) * 16 : a.w,
                           is_there ? 16 : 0);
            }
        copy_commit();
    };
    auto end_chunk = [&]() {
        bool is_first = chunk % GEMM_CHUNKS == 0, ends_group = chunk % GEMM_CHUNKS == GEMM_CHUNKS - 1;

#pragma unroll
        for (int i = 0; i < 64; i++) {
            float *s = &sum[i / 16][i / 4 % 4][i % 4], *v = &acc[i / 16][i / 4 % 4][i % 4];

            *s = is_first ? *v : *s + *v;
            *v = 0;
            if (ends_group && a.n_splits > 1) {
                *s = chunk < GEMM_CHUNKS ? *s : total[i * 32] + *s;
                total[i * 32] = *s;
            }
        }
        chunk++;
        chunk_end = chunk_begin(chunk + 1, a.n_splits, a.n_steps);
    };

    for (int stage = 0; stage < TILE_STAGES - 1; stage++)
        fetch(stage);
    for (int stage = 0; stage < n_stages; stage++) {
        const char *src = smem + stage % TILE_STAGES * STAGE_BYTES + lane * 16;

        copy_wait<TILE_STAGES - 2>();
        __syncthreads();
        fetch(stage + TILE_STAGES - 1);
#pragma unroll
        for (int step = 0; step < TILE_STAGE_STEPS; step++) {
            uint4 w[4], x[2];

            while (stage * TILE_STAGE_STEPS + step >= chunk_end && chunk < a.n_splits * GEMM_CHUNKS - 1)
                end_chunk();
#pragma unroll
            for (int b = 0; b < 4; b++)
                w[b] = *(const uint4 *)(src + step * STEP_BYTES + (my_block + b) * FRAG_BYTES);
#pragma unroll
            for (int g = 0; g < 2; g++)
                x[g] = *(const uint4 *)(src + step * STEP_BYTES + (TILE_BLOCKS + my_group + g) * FRAG_BYTES);
#pragma unroll
            for (int b = 0; b < 4; b++)
#pragma unroll
                for (int g = 0; g < 2; g++) {
                    mma_bf16(acc[b][2 * g], &w[b].x, x[g].x, x[g].y);
                    mma_bf16(acc[b][2 * g + 1], &w[b].x, x[g].z, x[g].w);
                }
        }
    }
    while (chunk < a.n_splits * GEMM_CHUNKS)
        end_chunk();

#pragma unroll
    for (int i = 0; i < 64; i++) {
        int b = i / 16, t = i / 4 % 4, c = i % 4;
        int row = row0 + my_group * 16 + t * 8 + lane % 4 * 2 + c % 2, r = lane / 4 + c / 2 * 8;
        int block = block0 + my_block + b;

        if (row >= n_rows)
            continue;
        if (!a.is_gate_up)
            emit(&a.epilogue, row, block * 16 + r, sum[b][t][c], 0);
        else if (b % 2 == 0)
            emit(&a.epilogue, row, block / 2 * 16 + r, sum[b][t][c], sum[b + 1 < 4 ? b + 1 : b][t][c]);
    }
}

/* ---- launch ------------------------------------------------------------------------------------------------------- */

size_t gemm_scratch_bytes(const struct weight *weight, int n_max) {
    if (weight->n_splits == 1)
        return 0;
    return (size_t)weight->n_blocks / UNIT_BLOCKS * (size_t)weight->n_splits * UNIT_ROWS *
           (n_max <= 16 ? 16 : GEMM_SKINNY_ROWS) * sizeof(float);
}

void gemm_launch(const struct launch *launch, const struct gemm_job *job, void *scratch) {
    const struct weight *weight = job->weight;
    struct args args = {};
    int n_items;

    args.w = weight->data;
    args.packed = (const char *)job->packed;
    args.count = job->count;
    args.n_units = weight->n_blocks / UNIT_BLOCKS;
    args.n_blocks = weight->n_blocks;
    args.n_steps = weight->n_steps;
    args.n_splits = weight->n_splits;
    args.is_gate_up = weight->form == WEIGHT_GATE_UP;
    args.epilogue.out = job->out;
    args.epilogue.n = args.is_gate_up ? weight->n_rows / 2 : weight->n_rows;
    args.partial = (float *)scratch;
    args.counters = launch->counters;
    args.matrix_bytes = weight->matrix_bytes;
    args.rows_max = 16;
    n_items = args.n_units * args.n_splits;
    if (job->groups != NULL) {
        args.n_groups = job->groups->n;
        args.group_expert = job->groups->expert;
        launch_skinny<1>(launch, &args, n_items * job->groups->n_max);
        return;
    }
    launch_skinny<1>(launch, &args, n_items);
    if (job->n_max > 16) {
        args.rows_min = 16;
        args.rows_max = GEMM_SKINNY_ROWS;
        launch_skinny<2>(launch, &args, n_items);
    }
    if (job->n_max > GEMM_SKINNY_ROWS) {
        int bytes = TILE_STAGES * TILE_STAGE_STEPS * 2 * TILE_BLOCKS * FRAG_BYTES;
        dim3 grid((unsigned)div_ceil((uint64_t)job->n_max, GEMM_TILE_ROWS),
                  (unsigned)div_ceil((uint64_t)weight->n_blocks, TILE_BLOCKS));

        if (args.n_splits > 1)
            bytes += THREADS * 64 * (int)sizeof(float);
        args.rows_min = GEMM_SKINNY_ROWS;
        cudaFuncSetAttribute(tiled, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
        tiled<<<grid, THREADS, (size_t)bytes, launch->stream>>>(args);
    }
}
