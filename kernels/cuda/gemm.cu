/* gemm: the packing of rows and the two kernels. */
#include "gemm.cuh"

enum {
    THREADS = 256,
    PACK_THREADS = 512,
    PACK_PIECES = 2,
    RED_STRIDE = UNIT_ROWS + 4, /* floats between two tokens of a partial sum; keeps banks apart */
    TILE_BLOCKS = 8,
    TILE_STAGES = 4,
    TILE_STAGE_STEPS = 4,
    TILE_STRIDE = TILE_BLOCKS * 16 + 4,
    CTAS = 132, /* of the card this is cut for: what n_splits balances; any grid gives the same bits */
};

/* ---- packing ------------------------------------------------------------------------------------------------------ */

__device__ static int count_rows(struct row_count count) {
    int n = *count.n, n_segs = count.n_segs != NULL ? *count.n_segs : 1; /* both loads at once */

    return n_segs == 0 ? 0 : n;
}

/* 8 elements from column k on, those from n_cols on as zeros. */
__device__ static inline void load_row8(const struct gemm_rows &a, size_t row, int k, float v[8]) {
    size_t at = row * a.stride + (size_t)k;

    if (!a.is_f32 && k + 8 <= a.n_cols && at % 8 == 0 && (uintptr_t)a.x % 16 == 0) {
        uint4 raw = *(const uint4 *)((const bf16 *)a.x + at);
        const uint32_t *word = &raw.x;

#pragma unroll
        for (int i = 0; i < 4; i++) {
            v[2 * i] = __uint_as_float(word[i] << 16);
            v[2 * i + 1] = __uint_as_float(word[i] & 0xffff0000u);
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        v[i] = k + i >= a.n_cols ? 0 : a.is_f32 ? ((const float *)a.x)[at + (size_t)i] : bf16_load(a.x, at + (size_t)i);
}

/* A CTA per row, whose first columns stay in registers between the norm and the writing; without a norm a CTA per piece
 * of a row. */
__global__ static void __launch_bounds__(PACK_THREADS) pack_rows(struct gemm_rows a, char *packed) {
    __shared__ float sums[PACK_THREADS / 32];
    const int row = (int)blockIdx.x, per_pass = 8 * PACK_THREADS * (int)gridDim.y;
    const int first = 8 * ((int)blockIdx.y * PACK_THREADS + (int)threadIdx.x);
    float v[PACK_PIECES][8] = {}, scale = 1, sum = 0;
    int src, lane = row % 8 * 4;
    char *dst;

    may_launch_next();
    wait_for_previous();
    if (row >= count_rows(a.count))
        return;
    src = a.index != NULL ? a.index[row] : row;
    dst = packed + (size_t)(row / 16) * (size_t)a.n_steps * FRAG_BYTES;
    if (src >= 0) {
#pragma unroll
        for (int p = 0; p < PACK_PIECES; p++)
            if (first + p * per_pass < a.n_cols)
                load_row8(a, (size_t)src, first + p * per_pass, v[p]);
        if (a.norm != NULL) {
#pragma unroll
            for (int p = 0; p < PACK_PIECES; p++)
#pragma unroll
                for (int i = 0; i < 8; i++)
                    sum = fmaf(v[p][i], v[p][i], sum);
            for (int k = first + PACK_PIECES * per_pass; k < a.n_cols; k += per_pass) {
                float more[8];

                load_row8(a, (size_t)src, k, more);
                for (int i = 0; i < 8; i++)
                    sum = fmaf(more[i], more[i], sum);
            }
            scale = rsqrtf(cta_sum(sum, sums, PACK_THREADS) / (float)a.n_cols + a.eps);
        }
    }
    auto store = [&](int k, float *x) {
        const int reg = row % 16 / 8 * 2 + k % 16 / 8;

        if (a.norm != NULL)
#pragma unroll
            for (int i = 0; i < 8; i++)
                x[i] = k + i < a.n_cols ? x[i] * scale * a.norm[k + i] : 0;
#pragma unroll
        for (int i = 0; i < 4; i++)
            *(uint32_t *)(dst + (size_t)(k / 16) * FRAG_BYTES + (lane + i) * 16 + reg * 4) =
                pack_bf16(x[2 * i], x[2 * i + 1]);
    };

#pragma unroll
    for (int p = 0; p < PACK_PIECES; p++)
        if (first + p * per_pass < a.n_steps * 16)
            store(first + p * per_pass, v[p]);
    for (int k = first + PACK_PIECES * per_pass; k < a.n_steps * 16; k += per_pass) {
        float more[8] = {};

        if (src >= 0)
            load_row8(a, (size_t)src, k, more);
        store(k, more);
    }
}

void gemm_pack(const struct launch *launch, const struct gemm_rows *rows, void *packed) {
    const int n_pieces = (int)div_ceil((uint64_t)rows->n_steps * 16, 8 * PACK_THREADS);

    launch_early(launch->stream, true, pack_rows,
                 dim3((unsigned)rows->n_max, rows->norm != NULL ? 1 : (unsigned)n_pieces), PACK_THREADS, 0, *rows,
                 (char *)packed);
}

/* ---- how K is cut ------------------------------------------------------------------------------------------------- */

/* Chunks begin at even steps. */
__host__ __device__ static inline int chunk_begin(int chunk, int n_splits, int n_steps) {
    int n_chunks = n_splits * GEMM_CHUNKS;

    return chunk == n_chunks ? n_steps : (int)((int64_t)chunk * ((n_steps + 1) / 2) / n_chunks) * 2;
}

/* The cut that keeps CTAS and their warps equally busy; a split costs a round of partial sums. A function of the shape
 * alone. */
int gemm_n_splits(int n_units, int n_steps) {
    double best_cost = 0;
    int best = 1;

    if (n_units > COUNTERS_MAX)
        return 1;
    for (int s = 1; s <= 16 && (s == 1 || n_steps >= s * GEMM_CHUNKS * 4); s++) {
        int rounds = (int)div_ceil((uint64_t)n_units * (uint64_t)s, CTAS);
        int steps = 2 * (int)div_ceil(div_ceil((uint64_t)n_steps, 2), (uint64_t)s * GEMM_CHUNKS);
        double cost = (double)rounds * (steps + (s == 1 ? 3 : 10)); /* the time of a step; sums as measured */

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
    bool is_early; /* the kernel may begin before its predecessor has ended: it waits itself */
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
    item.w = a.w + frag_at(unit * UNIT_BLOCKS, 0, a.n_steps);
    if (a.n_groups != NULL)
        item.w += (size_t)a.group_expert[group] * a.matrix_bytes;
    item.x = a.packed + (size_t)group * block_bytes;
    item.step = chunk_begin(chunk, a.n_splits, a.n_steps);
    item.end = chunk_begin(chunk + 1, a.n_splits, a.n_steps);
    return item;
}

/* Writes the results of ROWS rows of W, four of a token per thread: the sums come from `value(first row, token)`. */
template <int ROWS, typename VALUE>
__device__ static inline void emit_unit(const struct args &a, int unit, int row0, int n_rows, VALUE value) {
    const int n_outs = a.is_gate_up ? ROWS / 2 : ROWS;

    for (int i = (int)threadIdx.x; i < n_rows * (n_outs / 4); i += THREADS) {
        int token = i / (n_outs / 4), n = i % (n_outs / 4) * 4, at = a.is_gate_up ? n / 16 * 32 + n % 16 : n;
        float4 v = value(at, token), up = a.is_gate_up ? value(at + 16, token) : v;
        int first = unit * n_outs + n;

        emit(&a.epilogue, row0 + token, first, v.x, up.x);
        emit(&a.epilogue, row0 + token, first + 1, v.y, up.y);
        emit(&a.epilogue, row0 + token, first + 2, v.z, up.z);
        emit(&a.epilogue, row0 + token, first + 3, v.w, up.w);
    }
}

__device__ static inline float4 add4(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

/* Steps in flight per warp: as many as shared memory holds; at 9 that is 144 KiB of weights per multiprocessor. */
__host__ __device__ constexpr int skinny_stages(int n_groups) {
    return n_groups == 1 ? 9 : 6;
}
/* No variable lies before the ring: copies are whole lines of shared memory only where it begins at one. */
__host__ __device__ constexpr int skinny_bytes(int n_groups) {
    return GEMM_CHUNKS * n_groups * 16 * RED_STRIDE * (int)sizeof(float) +
           GEMM_CHUNKS * skinny_stages(n_groups) * (UNIT_BLOCKS + n_groups) * FRAG_BYTES + (int)sizeof(int);
}

/* N_GROUPS groups of 16 rows. */
template <int N_GROUPS> __global__ static void __launch_bounds__(THREADS, 1) skinny(struct args a) {
    constexpr int TOKENS = N_GROUPS * 16, STAGE_BYTES = (UNIT_BLOCKS + N_GROUPS) * FRAG_BYTES;
    constexpr int STAGES = skinny_stages(N_GROUPS);
    extern __shared__ char smem[];
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    const size_t block_bytes = (size_t)a.n_steps * FRAG_BYTES;
    float *red = (float *)smem; /* [8, TOKENS, RED_STRIDE] */
    int *is_last_cta = (int *)(smem + skinny_bytes(N_GROUPS)) - 1;
    char *ring =
        smem + (size_t)GEMM_CHUNKS * TOKENS * RED_STRIDE * sizeof(float) + warp * STAGES * STAGE_BYTES + lane * 16;
    struct item next = {};
    int next_i = (int)blockIdx.x, head = 0, n_items, n_rows;

    auto fetch_w = [&](int stage) {
        const char *src = next.w + (size_t)next.step * (UNIT_BLOCKS * FRAG_BYTES) + lane * 16;

#pragma unroll
        for (int b = 0; b < UNIT_BLOCKS; b++)
            copy_async(ring + stage * STAGE_BYTES + b * FRAG_BYTES, src + b * FRAG_BYTES, 16);
    };
    auto fetch_x = [&](int stage) {
        const char *src = next.x + (size_t)next.step * FRAG_BYTES + lane * 16;

#pragma unroll
        for (int g = 0; g < N_GROUPS; g++)
            copy_async(ring + stage * STAGE_BYTES + (UNIT_BLOCKS + g) * FRAG_BYTES, src + (size_t)g * block_bytes, 16);
    };
    auto fetch = [&](int stage) { /* one step, or an empty group at the end */
                                  while (!next.is_last && next.step >= next.end) {
                                      next_i += (int)gridDim.x;
                                      next = item_at(a, next_i, n_items, warp);
                                  }
                                  if (!next.is_last) {
                                      fetch_w(stage);
                                      fetch_x(stage);
                                      next.step++;
                                  }
                                  copy_commit();
    };

    may_launch_next();
    if (a.is_early) { /* the first weights are on their way before the kernel that packs x has ended */
        int n_early;

        next = item_at(a, next_i, a.n_units * a.n_splits, warp);
        n_early = next.is_last ? 0 : min(STAGES - 1, next.end - next.step);
        for (int stage = 0; stage < n_early; stage++, next.step++)
            fetch_w(stage);
        wait_for_previous();
        next.step -= n_early;
        for (int stage = 0; stage < n_early; stage++, next.step++) {
            fetch_x(stage);
            copy_commit();
        }
        n_items = n_items_of(a);
        for (int stage = n_early; stage < STAGES - 1; stage++)
            fetch(stage);
    }
    n_rows = a.n_groups != NULL ? TOKENS : count_rows(a.count);
    if (n_rows <= a.rows_min || n_rows > a.rows_max) {
        copy_wait<0>();
        return;
    }
    if (!a.is_early) {
        n_items = n_items_of(a);
        next = item_at(a, next_i, n_items, warp);
        for (int stage = 0; stage < STAGES - 1; stage++)
            fetch(stage);
    }

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
            float4 sum = *(const float4 *)&red[token * RED_STRIDE + n];

#pragma unroll
            for (int w = 1; w < GEMM_CHUNKS; w++)
                sum = add4(sum, *(const float4 *)&red[(w * TOKENS + token) * RED_STRIDE + n]);
            return sum;
        };
        if (a.n_splits == 1) {
            emit_unit<UNIT_ROWS>(a, unit, row0, n_rows, group_sum);
        } else {
            float4 *partial = (float4 *)a.partial + (size_t)unit * (size_t)a.n_splits * (TOKENS * UNIT_ROWS / 4);

            for (int j = (int)threadIdx.x; j < n_rows * UNIT_ROWS / 4; j += THREADS)
                __stcg(&partial[split * (TOKENS * UNIT_ROWS / 4) + j], group_sum(j * 4 % UNIT_ROWS, j * 4 / UNIT_ROWS));
            __threadfence();
            __syncthreads();
            if (threadIdx.x == 0) {
                *is_last_cta = atomicAdd(&a.counters[unit], 1) == (unsigned)a.n_splits - 1;
                if (*is_last_cta)
                    a.counters[unit] = 0;
            }
            __syncthreads();
            if (*is_last_cta) {
                __threadfence();
                emit_unit<UNIT_ROWS>(a, unit, row0, n_rows, [&](int n, int token) {
                    const float4 *at = &partial[(token * UNIT_ROWS + n) / 4];
                    float4 sum = __ldcg(at);

#pragma unroll 4
                    for (int s = 1; s < a.n_splits; s++)
                        sum = add4(sum, __ldcg(&at[s * (TOKENS * UNIT_ROWS / 4)]));
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
    launch_early(launch->stream, args->is_early, skinny<N_GROUPS>, dim3((unsigned)min_int(n_items, CTAS)), THREADS,
                 bytes, *args);
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
    const int n_stages = (a.n_steps + TILE_STAGE_STEPS - 1) / TILE_STAGE_STEPS;
    const bool has_block = block0 + warp < a.n_blocks;
    /* A warp copies one block of W and one group of x. */
    const char *w_src = a.w + (has_block ? frag_at(block0 + warp, 0, a.n_steps) : 0) + lane * 16;
    const char *x_src = a.packed + (size_t)(row0 / 16 + warp) * (size_t)a.n_steps * FRAG_BYTES + lane * 16;
    float *total = (float *)(smem + TILE_STAGES * STAGE_BYTES) + (size_t)warp * 64 * 32 + lane; /* [64 values][32] */
    float acc[4][4][4] = {}, sum[4][4][4] = {};
    int chunk = 0, chunk_end = chunk_begin(1, a.n_splits, a.n_steps);

    if (n_rows <= a.rows_min || row0 >= n_rows)
        return;

    auto fetch = [&](int stage) {
        char *dst = smem + stage % TILE_STAGES * STAGE_BYTES + warp * FRAG_BYTES + lane * 16;

        if (stage < n_stages)
#pragma unroll
            for (int i = 0; i < TILE_STAGE_STEPS; i++) {
                int step = stage * TILE_STAGE_STEPS + i;
                bool is_there = step < a.n_steps;

                copy_async(dst + i * STEP_BYTES, is_there ? w_src + (size_t)step * (UNIT_BLOCKS * FRAG_BYTES) : w_src,
                           is_there && has_block ? 16 : 0);
                copy_async(dst + i * STEP_BYTES + TILE_BLOCKS * FRAG_BYTES,
                           is_there ? x_src + (size_t)step * FRAG_BYTES : x_src, is_there ? 16 : 0);
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
#pragma unroll 1
        for (int step = 0; step < TILE_STAGE_STEPS; step += 2) { /* the code of a chunk's end is long: one place */
            while (stage * TILE_STAGE_STEPS + step >= chunk_end && chunk < a.n_splits * GEMM_CHUNKS - 1)
                end_chunk();
#pragma unroll
            for (int i = step; i < step + 2; i++) {
                uint4 w[4], x[2];

#pragma unroll
                for (int b = 0; b < 4; b++)
                    w[b] = *(const uint4 *)(src + i * STEP_BYTES + (my_block + b) * FRAG_BYTES);
#pragma unroll
                for (int g = 0; g < 2; g++)
                    x[g] = *(const uint4 *)(src + i * STEP_BYTES + (TILE_BLOCKS + my_group + g) * FRAG_BYTES);
#pragma unroll
                for (int b = 0; b < 4; b++)
#pragma unroll
                    for (int g = 0; g < 2; g++) {
                        mma_bf16(acc[b][2 * g], &w[b].x, x[g].x, x[g].y);
                        mma_bf16(acc[b][2 * g + 1], &w[b].x, x[g].z, x[g].w);
                    }
            }
        }
    }
    while (chunk < a.n_splits * GEMM_CHUNKS)
        end_chunk();

    /* Through shared memory, so that what is written lies together and the code that writes it is short. */
    copy_wait<0>();
    __syncthreads();
    float *sums = (float *)smem; /* [128 tokens][TILE_STRIDE] */

#pragma unroll
    for (int i = 0; i < 64; i++) {
        int b = i / 16, t = i / 4 % 4, c = i % 4;

        sums[(my_group * 16 + t * 8 + lane % 4 * 2 + c % 2) * TILE_STRIDE + (my_block + b) * 16 + lane / 4 +
             c / 2 * 8] = sum[b][t][c];
    }
    __syncthreads();
    emit_unit<TILE_BLOCKS * 16>(a, (int)blockIdx.y, row0, min(GEMM_TILE_ROWS, n_rows - row0),
                                [&](int n, int token) { return *(const float4 *)&sums[token * TILE_STRIDE + n]; });
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
    args.is_early = job->n_max <= 16; /* else another kernel may be the one that runs */
    launch_skinny<1>(launch, &args, n_items);
    args.is_early = false;
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
