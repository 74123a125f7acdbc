/* gdn: the ops of the gated delta net, and its few-row kernels: a verify block, and the commit of its rows. A CTA of them has
 * one value head. They run the arithmetic that prefill runs, on the open rows and the block's own, so a row is the same bits
 * whichever pass it was in.
 *
 * A block writes its rows behind the open rows, where they become open rows once they are committed; so a commit has nothing to
 * do but where a multiple of 64 is crossed: there the chunk goes into S and the columns.
 *
 * What is here runs once and at once, from cold caches: code counts as much as arithmetic. So loops are rolled, and what a
 * product leaves to the next lies in shared memory, as the operands that it becomes. Warps of S read it while others solve. */
#include "gdn_chunk.cuh"

#include <errno.h>

enum {
    S_WARPS = DV_MAX / 16, /* 16 rows of S each */
    SOLVE_WARPS = 4,
    WARPS = S_WARPS + SOLVE_WARPS,
    THREADS = WARPS * 32,
    UNITS = (2 * DK + DV_MAX) / 8, /* of 16 bytes, in a head's channels of a row */
    WANTED_MAX = 2,                /* squares in which a block's rows of a chunk lie */
};

static struct gdn_shape shape_of(const struct state_view *s) {
    struct gdn_shape shape = {};

    shape.hk = s->n_k_heads;
    shape.hv = s->n_v_heads;
    shape.dv = s->head_dim_v;
    shape.conv_dim = state_conv_dim(s);
    shape.layer_bytes = state_layer_bytes(s, DTYPE_BF16);
    shape.s_bytes = (size_t)s->n_v_heads * (size_t)s->head_dim_v * (size_t)s->head_dim_k * sizeof(float);
    shape.slot_bytes = s->slot_bytes;
    shape.open_layer_bytes = s->open_bytes / (size_t)s->n_layers;
    shape.open_bytes = s->open_bytes;
    return shape;
}

static int check_shape(const struct state_view *s) {
    const bool is_sound = s->n_layers > 0 && s->n_k_heads > 0 && s->n_v_heads > 0 && s->n_v_heads % s->n_k_heads == 0 &&
                          s->head_dim_k > 0 && s->head_dim_v > 0 && s->conv_taps > 0;

    if (!is_sound || s->open == NULL || s->open_bytes != state_open_bytes(s, DTYPE_BF16, OPEN_ROWS, OPEN_INPUTS))
        return -EINVAL;
    return s->head_dim_k == DK && s->head_dim_v % 32 == 0 && s->head_dim_v <= DV_MAX && s->conv_taps == TAPS ? 0
                                                                                                             : -ENOTSUP;
}

/* Of a chunk's rows for one value head; tiles are those of the file top of gdn_chunk.cuh. */
struct head_shared {
    bf16 k[CHUNK * DK], q[CHUNK * DK], v[CHUNK * DV_MAX]; /* v: then o */
    union {
        struct {
            bf16 x[PARTS][CHUNK * CHUNK], a[PARTS][CHUNK * CHUNK];
            float4 queried[S_WARPS][WANTED_MAX][2][32]; /* E Q S^T, a lane its own */
        };
        float s[DV_MAX * DK]; /* between two chunks of a block */
    };
    union {
        struct system_shared system;
        float4 u[S_WARPS][SQUARES][2][32]; /* likewise, once X and A are there */
    };
    uint4 operands[S_WARPS][SQUARES][PARTS][32]; /* of a warp's 16 columns: T, U, and U as S takes it */
    struct row_factors factors;
    float conv[2 * DK + DV_MAX][TAPS];
    bf16 inputs[TAPS - 1 + BLOCK_ROWS_MAX][2 * DK + DV_MAX]; /* of the block's convolution */
    bf16 z[BLOCK_ROWS_MAX][DV_MAX];                          /* of the chunk's rows in the block */
};

/* ---- a chunk's tiles -------------------------------------------------------------------------------------------------- */

/* Channels of a head: q, k, v. Channel ch of them among all conv channels. */
__device__ static inline int channel_of(const struct gdn_shape &shape, int head, int ch) {
    int key_head = head / (shape.hv / shape.hk);

    if (ch < DK)
        return key_head * DK + ch;
    if (ch < 2 * DK)
        return (shape.hk + key_head) * DK + ch - DK;
    return 2 * shape.hk * DK + head * shape.dv + ch - 2 * DK;
}
/* Where it lies in row r of the tiles. */
__device__ static inline bf16 *tile_at(struct head_shared *sh, int r, int ch) {
    bf16 *tile = ch < DK ? sh->q : ch < 2 * DK ? sh->k : sh->v;

    static_assert(DK == DV_MAX, "tiles of one width");
    return unit_of<DK>(tile, r, ch % DK / 8) + ch % 8;
}

/* k and v of rows [0, n_open) from the open rows of positions from `grid` on. Asynchronous. */
__device__ static void load_open(const struct gdn_shape &shape, const struct gdn_open &open, int grid, int head,
                                 struct head_shared *sh, int n_open) {
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < n_open * (UNITS - DK / 8); i += THREADS) {
        const int r = i / (UNITS - DK / 8), ch = DK + i % (UNITS - DK / 8) * 8;

        if (ch < 2 * DK + shape.dv)
            copy_async(tile_at(sh, r, ch), gdn_open_row(shape, open, grid + r) + channel_of(shape, head, ch), 16);
    }
}

/* Zeros where a square has no row, and in the rows of q before `first`. */
__device__ static void clear_rows(struct head_shared *sh, int first, int n) {
    const int end = (n + 15) / 16 * 16, n_before = first % 16;

#pragma unroll 1
    for (int i = (int)threadIdx.x; i < (end - n) * UNITS + n_before * (DK / 8); i += THREADS) {
        const int after = i - n_before * (DK / 8);
        const int r = after < 0 ? first - n_before + i / (DK / 8) : n + after / UNITS;
        const int u = after < 0 ? i % (DK / 8) : after % UNITS;

        *(uint4 *)tile_at(sh, r, u * 8) = make_uint4(0, 0, 0, 0);
    }
}

/* ---- a chunk ---------------------------------------------------------------------------------------------------------- */

/* The parts of a warp's 16 rows of S, as operands. */
struct state_operands {
    uint32_t at[DK / 16][PARTS][4];
};

/* Into the L2 cache, a warp its rows: registers are short until they are split. */
__device__ static inline void prefetch_s(const float *rows) {
#pragma unroll
    for (int i = 0; i < 16 * DK * 4 / (32 * 128); i++)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(rows + (i * 32 + (int)threadIdx.x % 32) * 32));
}
__device__ static inline void split_state(struct state_operands *operands, float *rows) {
    float s[DK / 8][4];

    load_s(s, rows);
#pragma unroll
    for (int step = 0; step < DK / 16; step++)
        split_operand(operands->at[step], &s[2 * step]);
}

__device__ static inline void store_operands(uint4 operands[PARTS][32], const float d[2][4]) {
    uint32_t parts[PARTS][4];

    split_operand(parts, d);
#pragma unroll
    for (int part = 0; part < PARTS; part++)
        operands[part][threadIdx.x % 32] = *(const uint4 *)parts[part];
}

/* d: S times rows 16 p to 16 p + 15 of the tile of q or k. */
__device__ static inline void read_square(float d[2][4], const struct state_operands &s, bf16 *tile, int p) {
    const unsigned at = rows_at<DK>(tile, p);
    float chain[2][4] = {}, small[2][4] = {};

    memset(d, 0, 2 * sizeof d[0]);
#pragma unroll
    for (int step = 0; step < DK / 16; step++) {
        uint32_t b[1][4];

        ldmatrix_x4(b[0], at ^ (unsigned)(step * 32));
        mma_pairs<1>(small, s.at[step][2], b);
        mma_pairs<1>(small, s.at[step][1], b);
        mma_pairs<1>(chain, s.at[step][0], b);
        if (step % CHAIN == CHAIN - 1) {
            add<2>(d, chain);
            memset(chain, 0, sizeof chain);
        }
    }
    add<2>(d, small);
}

/* T of all squares of rows, and what the queries read of those from first_q on. */
__device__ static inline void read_rows(struct head_shared *sh, const struct state_operands &s, int first_q,
                                        int n_squares) {
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;

#pragma unroll 1
    for (int i = 0; i < 2 * n_squares - first_q; i++) {
        const bool is_k = i < n_squares;
        const int p = is_k ? i : i - n_squares + first_q;
        uint32_t v[4];
        float d[2][4];

        read_square(d, s, is_k ? sh->k : sh->q, p);
        ldmatrix_x4_trans(v, values_at<DV_MAX>(sh->v, p));
#pragma unroll
        for (int side = 0; side < 2; side++) {
            const int at = p * 16 + side * 8 + lane % 4 * 2;
            const float2 beta = *(const float2 *)&sh->factors.beta[at];
            const float2 read = *(const float2 *)&sh->factors.read[at], query = *(const float2 *)&sh->factors.query[at];

#pragma unroll
            for (int c = 0; c < 4; c++) {
                const float2 value = pair_of(v[2 * side + c / 2]);

                if (!is_k)
                    d[side][c] *= c % 2 == 0 ? query.x : query.y;
                else if (c % 2 == 0)
                    d[side][c] = fmaf(-read.x, d[side][c], beta.x * value.x);
                else
                    d[side][c] = fmaf(-read.y, d[side][c], beta.y * value.y);
            }
            if (!is_k)
                sh->queried[warp][p - first_q][side][lane] = *(const float4 *)d[side];
        }
        if (is_k)
            store_operands(sh->operands[warp][p], d);
    }
}

__device__ static inline void load_operands(uint32_t parts[PARTS][4], const uint4 operands[PARTS][32]) {
#pragma unroll
    for (int part = 0; part < PARTS; part++)
        *(uint4 *)parts[part] = operands[part][threadIdx.x % 32];
}

/* d += rows 16 p to 16 p + 15 of X or A times what the warp's operands are. */
__device__ static inline void multiply_lower(float d[2][4], const uint4 operands[SQUARES][PARTS][32],
                                             bf16 tile[PARTS][CHUNK * CHUNK], int p) {
    float chain[2][4] = {}, small[2][4] = {};

#pragma unroll 1
    for (int step = 0; step <= p; step++) {
        uint32_t parts[PARTS][4], b[1][4];

        load_operands(parts, operands[step]);
#pragma unroll
        for (int of_tile = PARTS - 1; of_tile >= 0; of_tile--) {
            load_rows<CHUNK>(b[0], tile[of_tile], p, step);
#pragma unroll
            for (int of_src = PARTS - 1 - of_tile; of_src >= 0; of_src--) /* the others are smaller than f32 sees */
                mma_pairs<1>(of_tile + of_src == 0 ? chain : small, parts[of_src], b);
        }
    }
    add<2>(chain, small);
    add<2>(d, chain);
}

/* U in the place of T: the last rows first, which need those before them. keeps_u: also as floats. */
__device__ static inline void solve_rows(struct head_shared *sh, int n_squares, bool keeps_u) {
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;

#pragma unroll 1
    for (int p = n_squares - 1; p >= 0; p--) {
        float u[2][4] = {};

        multiply_lower(u, sh->operands[warp], sh->x, p);
        store_operands(sh->operands[warp][p], u);
        if (keeps_u)
#pragma unroll
            for (int side = 0; side < 2; side++)
                sh->u[warp][p][side][lane] = *(const float4 *)u[side];
    }
}

/* Rows of o from square first_q on, in the tile of v. */
__device__ static inline void make_outputs(struct head_shared *sh, int first_q, int n_squares) {
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;

#pragma unroll 1
    for (int p = first_q; p < n_squares; p++) {
        float o[2][4];

#pragma unroll
        for (int side = 0; side < 2; side++)
            *(float4 *)o[side] = sh->queried[warp][p - first_q][side][lane];
        multiply_lower(o, sh->operands[warp], sh->a, p);
        store_values<DV_MAX>(sh->v, p, o);
    }
}

/* to <- decay S + U^T K, of a chunk that has all its rows; S is at `from`. A lane writes what it has read. */
__device__ static inline void advance_state(struct head_shared *sh, float *from, float *to) {
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    float s[DK / 8][4];

    load_s(s, from);
#pragma unroll 1
    for (int p = 0; p < SQUARES; p++) {
        float u[2][4];

#pragma unroll
        for (int side = 0; side < 2; side++) {
            const float2 write = *(const float2 *)&sh->factors.write[p * 16 + side * 8 + lane % 4 * 2];

            *(float4 *)u[side] = sh->u[warp][p][side][lane];
#pragma unroll
            for (int c = 0; c < 4; c++)
                u[side][c] *= c % 2 == 0 ? write.x : write.y;
        }
        store_operands(sh->operands[warp][p], u);
    }
#pragma unroll
    for (int pair = 0; pair < DK / 16; pair++) {
        float chain[2][4] = {}, small[2][4] = {};

#pragma unroll 1
        for (int step = 0; step < SQUARES; step++) {
            uint32_t parts[PARTS][4], b[1][4];

            load_operands(parts, sh->operands[warp][step]);
            load_columns<DK>(b[0], sh->k, pair, step);
            mma_pairs<1>(small, parts[2], b);
            mma_pairs<1>(small, parts[1], b);
            mma_pairs<1>(chain, parts[0], b);
        }
        add<2>(chain, small);
#pragma unroll
        for (int side = 0; side < 2; side++)
#pragma unroll
            for (int c = 0; c < 4; c++)
                s[2 * pair + side][c] = fmaf(sh->factors.decay, s[2 * pair + side][c], chain[side][c]);
    }
    store_s(to, s);
}

/* From tiles and d to U, and to o from square first_q on. s_rows: the warp's rows of S, if it has some. */
__device__ static inline void run_chunk(struct head_shared *sh, float *s_rows, bool has_state, int first_q,
                                        int n_squares, bool keeps_u) {
    const int thread = (int)threadIdx.x, warp = thread / 32, solver = thread - S_WARPS * 32;
    struct state_operands operands;

    static_assert(SOLVE_WARPS * 32 >= CHUNK + WANTED_MAX * 16, "a thread for each row");
    if (solver >= CHUNK)
        norm_row(&sh->system, sh->q, first_q * 16 + solver - CHUNK, n_squares, false);
    else if (solver >= 0)
        norm_row(&sh->system, sh->k, solver, n_squares, true);
    else if (has_state)
        split_state(&operands, s_rows);
    __syncthreads();
    if (solver >= 0 && solver < CHUNK)
        make_factors(&sh->system, solver, &sh->factors);
    multiply_rows(&sh->system, sh->k, sh->q, sh->a, warp, WARPS, first_q, n_squares);
    __syncthreads();
    if (solver >= 0) {
        if (solver < CHUNK)
            solve_columns(&sh->system, solver / 32 * 32, n_squares);
    } else if (has_state) {
        read_rows(sh, operands, first_q, n_squares);
    }
    __syncthreads();
    split_x(&sh->system, sh->x, thread, THREADS, n_squares);
    __syncthreads();
    if (has_state) {
        solve_rows(sh, n_squares, keeps_u);
        make_outputs(sh, first_q, n_squares);
    }
}

/* ---- a verify block --------------------------------------------------------------------------------------------------- */

/* The inputs of its convolution, of rows [t_begin, t_end). Asynchronous. */
__device__ static void load_inputs(const struct gdn_op &op, const struct gdn_seg &seg, int head, struct head_shared *sh,
                                   int t_begin, int t_end) {
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < (t_end - t_begin) * UNITS; i += THREADS) {
        const int t = t_begin + i / UNITS, ch = i % UNITS * 8;

        if (ch < 2 * DK + op.shape.dv)
            copy_async(&sh->inputs[t + TAPS - 1][ch], gdn_inputs_of(op, seg, t) + channel_of(op.shape, head, ch), 16);
    }
}

/* Asynchronous. Row 0 of the chunk would be row0 of the batch, here and below. */
__device__ static void load_z(const struct gdn_op &op, int head, struct head_shared *sh, int row0, int first, int n) {
    for (int i = (int)threadIdx.x; i < (n - first) * (DV_MAX / 8); i += THREADS) {
        const int r = first + i / (DV_MAX / 8), u = i % (DV_MAX / 8);

        if (u * 8 < op.shape.dv)
            copy_async(&sh->z[r - first][u * 8], (const bf16 *)op.args.mz + gdn_z_at(op, head, row0 + r) + u * 8, 16);
    }
}

/* By a thread for each row of the chunk: decay and beta, of rows [first, n) from the batch, before them from the open rows. */
__device__ static void take_gates(const struct gdn_op &op, const struct gdn_seg &seg, int head,
                                  struct system_shared *sh, int begin, int r, int first, int n) {
    float *gates = gdn_open_gates(op.shape, seg.open, seg.pos + begin + r), decay = 1, beta = 0;

    if (r < first) {
        decay = gates[head];
        beta = gates[op.shape.hv + head];
    } else if (r < n) {
        decay = gdn_decay(op, head, seg.row0 + begin + r);
        beta = gdn_beta(op, head, seg.row0 + begin + r);
        gates[head] = decay;
        gates[op.shape.hv + head] = beta;
    }
    sh->decay[r] = (double)decay;
    sh->beta[r] = beta;
}

/* Rows [first, n) of the chunk, rows of the seg from begin + first on: into the tiles, and with their inputs behind the open
 * rows. Key heads are shared by value heads: the first of them keeps q and k. By the warps of S. */
__device__ static void take_rows(const struct gdn_op &op, const struct gdn_seg &seg, int head, struct head_shared *sh,
                                 int begin, int first, int n) {
    constexpr int PAIRS = (2 * DK + DV_MAX) / 2;
    const struct gdn_shape &shape = op.shape;
    const int kept_from = head % (shape.hv / shape.hk) == 0 ? 0 : 2 * DK;

#pragma unroll 1
    for (int i = (int)threadIdx.x; i < PAIRS * (n - first); i += S_WARPS * 32) {
        const int own = i % PAIRS * 2, r = first + i / PAIRS, t = begin + r, ch = channel_of(shape, head, own);
        float2 w[TAPS], x[TAPS];
        uint32_t raw = 0, row;

        if (own >= 2 * DK + shape.dv)
            continue;
#pragma unroll
        for (int j = 0; j < TAPS; j++) {
            raw = load_raw_pair(sh->inputs[t + j], own);
            x[j] = pair_of(raw);
            w[j] = make_float2(sh->conv[own][j], sh->conv[own + 1][j]);
        }
        row = gdn_conv(w, x);
        *(uint32_t *)tile_at(sh, r, own) = row;
        if (own < kept_from)
            continue;
        *(uint32_t *)(gdn_open_row(shape, seg.open, seg.pos + t) + ch) = row;
        *(uint32_t *)(gdn_open_input(shape, seg.open, seg.pos + t) + ch) = raw;
    }
}

/* Rows [first, n) of o, in the tile of v. */
__device__ static void finish_rows(const struct gdn_op &op, int head, struct head_shared *sh, int row0, int first,
                                   int n) {
    const int lane = (int)threadIdx.x % 32;

#pragma unroll 1
    for (int r = first + (int)threadIdx.x / 32; r < n; r += WARPS) {
        float o[LANE_VALUES], z[LANE_VALUES];

#pragma unroll
        for (int i = 0; i < LANE_VALUES; i++) {
            const int v = i * 32 + lane;

            o[i] = v < op.shape.dv ? bf16_load(unit_of<DV_MAX>(sh->v, r, v / 8), (size_t)(v % 8)) : 0;
            z[i] = v < op.shape.dv ? bf16_load(sh->z[r - first], (size_t)v) : 0;
        }
        gdn_finish(op, head, row0 + r, o, z);
    }
}

/* Into the L2 cache: what is needed of a head, and nothing writes. */
__device__ static inline void prefetch_params(const struct gdn_op &op, int head, int thread) {
    const float *at = thread == 0 ? op.args.dt_bias + head : thread == 1 ? op.args.neg_a + head : op.args.norm;

    if (thread < 2)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
    else if ((thread - 2) * 32 < op.shape.dv)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(at + (thread - 2) * 32));
}

/* Reads S, does not write it. A block may lie in two chunks: the first of them is then whole. */
__global__ static void __launch_bounds__(THREADS, 1) verify(struct gdn_op op) {
    extern __shared__ __align__(1024) char smem[];
    struct head_shared *sh = (struct head_shared *)smem;
    const struct gdn_shape &shape = op.shape;
    const int at = (int)blockIdx.x / shape.hv, head = (int)blockIdx.x % shape.hv;
    const int v0 = (int)threadIdx.x / 32 * 16, solver = (int)threadIdx.x - S_WARPS * 32; /* the warp's first row of S */
    const bool has_state = solver < 0 && v0 < shape.dv;

    for (int i = (int)threadIdx.x; i < 2 * DK + shape.dv; i += THREADS) /* no kernel writes these */
        *(float4 *)sh->conv[i] = *(const float4 *)&op.args.conv[(size_t)channel_of(shape, head, i) * (size_t)TAPS];
    if (solver >= 0)
        prefetch_params(op, head, solver);
#pragma unroll 1
    for (int k = 0;; k++) {
        const int n_segs = *op.batch.n_segs;           /* all loads at once */
        const struct gdn_seg seg = gdn_seg_at(op, at); /* each time: registers are short in between */
        const int begin = k * CHUNK - seg.pos % CHUNK, first = max(0, -begin), n = min(CHUNK, seg.n - begin);
        const int n_squares = (n + 15) / 16;
        const bool is_there = at < n_segs && seg.n > 0 && seg.n <= BLOCK_ROWS_MAX;
        float *s_rows = (float *)seg.state + ((size_t)head * (size_t)shape.dv + (size_t)v0) * DK;

        if (is_there) { /* S, and the rows before the block: the kernel before does not write them */
            if (has_state)
                prefetch_s(s_rows);
            load_open(shape, seg.open, seg.pos + begin, head, sh, first);
            load_inputs(op, seg, head, sh, 1 - TAPS, 0);
        }
        if (k == 0) {
            wait_for_previous();
            may_launch_next();
        }
        if (!is_there)
            return;
        load_inputs(op, seg, head, sh, 0, seg.n);
        load_z(op, head, sh, seg.row0 + begin, first, n);
        copy_commit();
        clear_rows(sh, first, n);
        if (solver >= 0 && solver < CHUNK)
            take_gates(op, seg, head, &sh->system, begin, solver, first, n);
        copy_wait<0>();
        __syncthreads();
        if (solver >= 0)
            multiply_decays<SOLVE_WARPS * 32>(&sh->system, solver, n_squares);
        else
            take_rows(op, seg, head, sh, begin, first, n);
        __syncthreads();
        run_chunk(sh, k == 0 ? s_rows : sh->s + v0 * DK, has_state, first / 16, n_squares, begin + CHUNK < seg.n);
        __syncthreads();
        finish_rows(op, head, sh, seg.row0 + begin, first, n);
        if (begin + CHUNK >= seg.n)
            return;
        if (has_state)
            advance_state(sh, s_rows, sh->s + v0 * DK);
        __syncthreads(); /* the next chunk's tiles take the place of these */
    }
}

static void launch_gdn(const struct launch *launch, const void *args) {
    const struct gdn_op *op = (const struct gdn_op *)args;

    if (op->args.mode == GDN_ADVANCE) {
        gdn_advance_launch(launch, op);
        return;
    }
    static_assert(sizeof(struct head_shared) <= SHARED_BYTES, "a chunk fits");
    cudaFuncSetAttribute(verify, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)sizeof(struct head_shared));
    launch_early(launch->stream, verify, dim3((unsigned)(op->batch.n_segs_max * op->shape.hv)), THREADS,
                 (int)sizeof(struct head_shared), *op);
}

/* -ENOTSUP: shapes that no model of the family has, and rows that are not aligned to 16 bytes. */
int cuda_gdn(struct program *program, const struct gdn_args *args) {
    int r = check_shape(args->state);

    if (r < 0)
        return r;
    if (args->mz_stride % 8 != 0 || (uintptr_t)args->mz % 16 != 0 || (uintptr_t)args->out % 16 != 0 ||
        (uintptr_t)args->conv % 16 != 0 || (uintptr_t)args->state->arena % 16 != 0)
        return -ENOTSUP;
    struct gdn_op op = {*args, *args->batch, *args->state, shape_of(args->state)};

    return cuda_program_add(program, launch_gdn, &op, sizeof op,
                            args->mode == GDN_ADVANCE ? gdn_advance_scratch_bytes(&op) : 0);
}

/* ---- commit ------------------------------------------------------------------------------------------------------- */

struct commit_op {
    struct gdn_commit_args args;
    struct batch batch;
    struct state_view state;
    struct gdn_shape shape;
};

/* The chunk of positions [grid, grid + CHUNK), all of them open rows, into one head's S and its share of the columns. */
__device__ static void commit_head(const struct commit_op &op, struct head_shared *sh, int seq_slot, int grid,
                                   bool has_snapshot, int layer, int head) {
    const struct gdn_shape &shape = op.shape;
    const struct gdn_open open = gdn_open_at(shape, op.state, seq_slot, layer);
    const int v0 = (int)threadIdx.x / 32 * 16, solver = (int)threadIdx.x - S_WARPS * 32; /* the warp's first row of S */
    const bool has_state = solver < 0 && v0 < shape.dv;
    const int ch_begin = (int)((int64_t)shape.conv_dim * head / shape.hv);
    const int ch_end = (int)((int64_t)shape.conv_dim * (head + 1) / shape.hv);
    const size_t s_at = ((size_t)head * (size_t)shape.dv + (size_t)v0) * DK * sizeof(float);
    char *live = gdn_state_at(shape, op.state, op.state.live[seq_slot], layer), *rolling;

    if (has_state)
        prefetch_s((float *)(live + s_at));
    load_open(shape, open, grid, head, sh, CHUNK);
    copy_commit();
    if (solver >= 0 && solver < CHUNK) {
        const float *gates = gdn_open_gates(shape, open, grid + solver);

        sh->system.decay[solver] = (double)gates[head];
        sh->system.beta[solver] = gates[shape.hv + head];
    }
    copy_wait<0>();
    __syncthreads();
    if (solver >= 0)
        multiply_decays<SOLVE_WARPS * 32>(&sh->system, solver, SQUARES);
    run_chunk(sh, (float *)(live + s_at), has_state, SQUARES, SQUARES, true);
    live = gdn_state_at(shape, op.state, op.state.live[seq_slot], layer); /* again: registers are short in between */
    rolling = gdn_state_at(shape, op.state, op.state.rolling[seq_slot], layer);
    if (has_state) {
        advance_state(sh, (float *)(live + s_at), (float *)(live + s_at));
        if (has_snapshot) { /* what the lane itself has written */
            float s[DK / 8][4];

            load_s(s, (float *)(live + s_at));
            store_s((float *)(rolling + s_at), s);
        }
    }
    for (int ch = ch_begin + (int)threadIdx.x; ch < ch_end; ch += THREADS)
        for (int c = 0; c < TAPS - 1; c++) {
            const bf16 input = gdn_open_input(shape, open, grid + CHUNK - (TAPS - 1) + c)[ch];
            const size_t to = (size_t)(c * shape.conv_dim + ch);

            ((bf16 *)(live + shape.s_bytes))[to] = input;
            if (has_snapshot)
                ((bf16 *)(rolling + shape.s_bytes))[to] = input;
        }
    __syncthreads(); /* the next head's tiles take the place of these */
}

/* As many CTAs as run at a time; each has every so many heads. */
__global__ static void __launch_bounds__(THREADS, 1) commit(struct commit_op op) {
    extern __shared__ __align__(1024) char smem[];

    wait_for_previous();
    may_launch_next();
    for (int seg = 0; seg < *op.batch.n_segs; seg++) {
        const int n = op.args.seg_commit[seg], grid = op.batch.seg_pos[seg] / CHUNK * CHUNK;
        const bool has_snapshot = op.args.seg_snapshot[seg] > 0;

        if (n <= 0 || n > BLOCK_ROWS_MAX || op.batch.seg_pos[seg] + n < grid + CHUNK)
            continue;
        for (int i = (int)blockIdx.x; i < op.state.n_layers * op.shape.hv; i += (int)gridDim.x)
            commit_head(op, (struct head_shared *)smem, op.batch.seg_slot[seg], grid, has_snapshot, i / op.shape.hv,
                        i % op.shape.hv);
    }
}

static void launch_commit(const struct launch *launch, const void *args) {
    const struct commit_op *op = (const struct commit_op *)args;
    const int n_heads = op->state.n_layers * op->shape.hv;

    cudaFuncSetAttribute(commit, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)sizeof(struct head_shared));
    launch_early(launch->stream, commit, dim3((unsigned)min_int(n_heads, launch->n_multiprocessors)), THREADS,
                 (int)sizeof(struct head_shared), *op);
}

int cuda_gdn_commit(struct program *program, const struct gdn_commit_args *args) {
    int r = check_shape(args->state);

    if (r < 0)
        return r;
    struct commit_op op = {*args, *args->batch, *args->state, shape_of(args->state)};

    return cuda_program_add(program, launch_commit, &op, sizeof op, 0);
}
