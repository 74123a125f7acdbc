/* gdn_chunk: the gated delta net of a prefill: all chunks of the batch side by side as far as they do not need S, then rows of
 * S through the chunks of a seg. conv, solve and scan take a slab of chunks at a time, so that what they leave each other is
 * in the L2 cache still. */
#include "gdn_chunk.cuh"

enum {
    SOLVE_WARPS = 8,
    SLAB_CHUNKS = 17, /* 1,024 tokens, also where the seg begins inside a chunk */
    CONV_THREADS = 128,
    CONV_ROWS = 16, /* of a thread */
    SCAN_WARPS = 4,
    SLICE = SCAN_WARPS * 16, /* rows of S of a CTA of scan */
    FINISH_WARPS = 8,
};

/* What solve leaves to scan of a chunk and a value head: the parts of X and A as they lie in a stage. */
struct chunk_head {
    bf16 x[PARTS][CHUNK * CHUNK], a[PARTS][CHUNK * CHUNK];
    struct row_factors factors;
};

struct chunk_op {
    struct gdn_op gdn;
    int first, n_slots;       /* the slab: chunks of the batch, counted through its segs */
    bf16 *rows;               /* [n_slots, CHUNK, conv_dim], after conv and SiLU; zeros where the chunk has no row */
    struct chunk_head *heads; /* [n_slots, hv] */
};

/* ---- chunks of a batch --------------------------------------------------------------------------------------------- */

__device__ static inline int n_chunks_of(const struct batch &batch, int seg) {
    const int n = batch.seg_row[seg + 1] - batch.seg_row[seg];

    return n > 0 ? (batch.seg_pos[seg] % CHUNK + n + CHUNK - 1) / CHUNK : 0;
}

struct chunk {
    int seg;
    int begin; /* row of the seg that is the chunk's row 0; negative: so many rows of it are open rows */
    int n;     /* rows that it has, open ones included */
};
__device__ static inline struct chunk chunk_of(const struct batch &batch, int seg, int k) {
    struct chunk chunk = {seg, k * CHUNK - batch.seg_pos[seg] % CHUNK, 0};

    chunk.n = min(CHUNK, batch.seg_row[seg + 1] - batch.seg_row[seg] - chunk.begin);
    return chunk;
}
/* Of the batch's chunks, seg after seg, the one of the slab's place `slot`; n 0: there is none. */
__device__ static inline struct chunk chunk_at(const struct chunk_op &op, int slot) {
    const struct batch &batch = op.gdn.batch;
    const int n_segs = *batch.n_segs;
    int k = op.first + slot;

    for (int seg = 0; seg < n_segs; seg++) {
        const int n = n_chunks_of(batch, seg);

        if (k < n)
            return chunk_of(batch, seg, k);
        k -= n;
    }
    return (struct chunk){0, 0, 0};
}

/* ---- conv ----------------------------------------------------------------------------------------------------------- */

/* Convolution and SiLU: two channels of CONV_ROWS rows for each thread. Open rows have it behind them. */
__global__ static void __launch_bounds__(CONV_THREADS) conv(struct chunk_op op) {
    const struct gdn_shape &shape = op.gdn.shape;
    const float *taps = op.gdn.args.conv;
    const int ch = ((int)blockIdx.x * CONV_THREADS + (int)threadIdx.x) * 2;
    const int slot = (int)blockIdx.y / (CHUNK / CONV_ROWS), r0 = (int)blockIdx.y % (CHUNK / CONV_ROWS) * CONV_ROWS;
    float2 w[TAPS], x[TAPS - 1 + CONV_ROWS];
    struct chunk chunk;
    struct gdn_seg seg;

    if (ch < shape.conv_dim)
#pragma unroll
        for (int j = 0; j < TAPS; j++) /* no kernel writes these */
            w[j] = make_float2(taps[ch * TAPS + j], taps[(ch + 1) * TAPS + j]);
    wait_for_previous();
    may_launch_next();
    chunk = chunk_at(op, slot);
    if (chunk.n == 0 || ch >= shape.conv_dim)
        return;
    seg = gdn_seg_at(op.gdn, chunk.seg);
#pragma unroll
    for (int i = 0; i < TAPS - 1 + CONV_ROWS; i++) {
        const int r = r0 + i - (TAPS - 1), t = chunk.begin + r; /* of the chunk, of the seg */

        x[i] = make_float2(0, 0);
        if (r < chunk.n && t > -TAPS)
            x[i] = pair_of(load_raw_pair(gdn_inputs_of(op.gdn, seg, t), ch));
    }
#pragma unroll
    for (int i = 0; i < CONV_ROWS; i++) {
        const int r = r0 + i, t = chunk.begin + r;
        uint32_t *to = (uint32_t *)(op.rows + ((size_t)(slot * CHUNK + r) * (size_t)shape.conv_dim + (size_t)ch));

        if (t < 0)
            *to = load_raw_pair(gdn_open_row(shape, seg.open, seg.pos + t), ch);
        else
            *to = r < chunk.n ? gdn_conv(w, &x[i]) : 0;
    }
}

/* ---- solve: X and A of a chunk and a value head ---------------------------------------------------------------------- */

struct solve_shared {
    bf16 k[CHUNK * DK], q[CHUNK * DK];
    struct system_shared system;
};

__global__ static void __launch_bounds__(SOLVE_WARPS * 32, 2) solve(struct chunk_op op) {
    extern __shared__ __align__(1024) char smem[];
    struct solve_shared *sh = (struct solve_shared *)smem;
    const struct gdn_shape &shape = op.gdn.shape;
    const int slot = (int)blockIdx.x / shape.hv, head = (int)blockIdx.x % shape.hv, row = (int)threadIdx.x;
    const int key_channel = head / (shape.hv / shape.hk) * DK, warp = (int)threadIdx.x / 32;
    struct chunk_head *to = &op.heads[slot * shape.hv + head];
    const bf16 *rows = op.rows + (size_t)slot * CHUNK * (size_t)shape.conv_dim + key_channel;
    struct chunk chunk;

    wait_for_previous();
    may_launch_next();
    chunk = chunk_at(op, slot);
    if (chunk.n == 0)
        return;
    for (int i = (int)threadIdx.x; i < CHUNK * DK / 8; i += SOLVE_WARPS * 32) {
        const int r = i / (DK / 8), u = i % (DK / 8);
        const bf16 *from = rows + (size_t)r * (size_t)shape.conv_dim + u * 8;

        copy_async(unit_of<DK>(sh->q, r, u), from, 16);
        copy_async(unit_of<DK>(sh->k, r, u), from + shape.hk * DK, 16);
    }
    copy_commit();
    if (row < CHUNK) {
        const struct gdn_seg seg = gdn_seg_at(op.gdn, chunk.seg);
        const int t = chunk.begin + row;

        sh->system.decay[row] = 1;
        sh->system.beta[row] = 0;
        if (t < 0) {
            const float *gates = gdn_open_gates(shape, seg.open, seg.pos + t);

            sh->system.decay[row] = gates[head];
            sh->system.beta[row] = gates[shape.hv + head];
        } else if (row < chunk.n) {
            sh->system.decay[row] = gdn_decay(op.gdn, head, seg.row0 + t);
            sh->system.beta[row] = gdn_beta(op.gdn, head, seg.row0 + t);
        }
    }
    copy_wait<0>();
    __syncthreads();
    if (row < 2 * CHUNK)
        norm_row(&sh->system, row < CHUNK ? sh->k : sh->q, row % CHUNK, SQUARES, row < CHUNK);
    multiply_decays<SOLVE_WARPS * 32>(&sh->system, (int)threadIdx.x, SQUARES);
    __syncthreads();
    if (row < CHUNK)
        make_factors(&sh->system, row, &to->factors);
    multiply_rows(&sh->system, sh->k, sh->q, to->a, warp, SOLVE_WARPS, 0, SQUARES);
    __syncthreads();
    if (warp < CHUNK / 32)
        solve_columns(&sh->system, warp * 32, SQUARES);
    __syncthreads();
    split_x(&sh->system, to->x, (int)threadIdx.x, SOLVE_WARPS * 32, SQUARES);
}

/* ---- scan: a slice of S through the chunks of a seg ------------------------------------------------------------------ */

/* Tiles of one chunk in shared memory, for a slice of S. */
struct __align__(256) stage {
    bf16 k[CHUNK * DK], q[CHUNK * DK];
    bf16 x[PARTS][CHUNK * CHUNK], a[PARTS][CHUNK * CHUNK]; /* squares on and below the diagonal */
    bf16 v[CHUNK * SLICE];                                 /* then o */
    struct row_factors factors;
};

/* d += src . tile^T; tile: the rows of q or k. */
__device__ static inline void read_state(float d[CHUNK / 8][4], const float src[DK / 8][4], bf16 *tile) {
    float chain[CHUNK / 8][4] = {}, small[CHUNK / 8][4] = {};

#pragma unroll
    for (int step = 0; step < DK / 16; step++) {
        uint32_t parts[PARTS][4], b[SQUARES][4];

        split_operand(parts, &src[2 * step]);
#pragma unroll
        for (int p = 0; p < SQUARES; p++)
            load_rows<DK>(b[p], tile, p, step);
        mma_pairs<SQUARES>(small, parts[2], b);
        mma_pairs<SQUARES>(small, parts[1], b);
        mma_pairs<SQUARES>(chain, parts[0], b);
        if (step % CHAIN == CHAIN - 1) {
            add<CHUNK / 8>(d, chain);
            memset(chain, 0, sizeof chain);
        }
    }
    add<CHUNK / 8>(d, small);
}

/* chain + small += src . tile^T of the columns 16 STEP to 16 STEP + 15 of a tile that is zero above the diagonal. */
template <int STEP>
__device__ static inline void mma_lower_step(float chain[CHUNK / 8][4], float small[CHUNK / 8][4],
                                             const float src[CHUNK / 8][4], bf16 tile[PARTS][CHUNK * CHUNK]) {
    constexpr int PAIRS = SQUARES - STEP;
    uint32_t parts[PARTS][4], b[PAIRS][4];

    split_operand(parts, &src[2 * STEP]);
#pragma unroll
    for (int of_tile = PARTS - 1; of_tile >= 0; of_tile--) {
#pragma unroll
        for (int p = 0; p < PAIRS; p++)
            load_rows<CHUNK>(b[p], tile[of_tile], STEP + p, STEP);
#pragma unroll
        for (int of_src = PARTS - 1 - of_tile; of_src >= 0; of_src--) /* the others are smaller than f32 sees */
            mma_pairs<PAIRS>(&(of_tile + of_src == 0 ? chain : small)[2 * STEP], parts[of_src], b);
    }
}
/* d += src . tile^T */
__device__ static inline void mma_lower(float d[CHUNK / 8][4], const float src[CHUNK / 8][4],
                                        bf16 tile[PARTS][CHUNK * CHUNK]) {
    float chain[CHUNK / 8][4] = {}, small[CHUNK / 8][4] = {};

    static_assert(CHUNK == CHAIN * 16 && SQUARES == 4, "a chain");
    mma_lower_step<0>(chain, small, src, tile);
    mma_lower_step<1>(chain, small, src, tile);
    mma_lower_step<2>(chain, small, src, tile);
    mma_lower_step<3>(chain, small, src, tile);
    add<CHUNK / 8>(chain, small);
    add<CHUNK / 8>(d, chain);
}

/* Column i of d, which is a row of the chunk, times factor i. */
__device__ static inline void scale_columns(float d[CHUNK / 8][4], const float factors[CHUNK]) {
#pragma unroll
    for (int n = 0; n < CHUNK / 8; n++) {
        const float2 factor = *(const float2 *)&factors[n * 8 + (int)threadIdx.x % 4 * 2];

#pragma unroll
        for (int c = 0; c < 4; c++)
            d[n][c] *= c % 2 == 0 ? factor.x : factor.y;
    }
}

/* u: zeros, then U^T of the warp's columns, from t = S K^T, which is lost. */
__device__ static inline void chunk_u(struct stage *stage, float t[CHUNK / 8][4], float u[CHUNK / 8][4]) {
    const int lane = (int)threadIdx.x % 32;
    const struct row_factors *by = &stage->factors;

#pragma unroll
    for (int p = 0; p < SQUARES; p++) {
        uint32_t v[4];

        ldmatrix_x4_trans(v, values_at<SLICE>(stage->v, p));
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int n_at = 2 * p + i, at = n_at * 8 + lane % 4 * 2;
            const float2 beta = *(const float2 *)&by->beta[at], read = *(const float2 *)&by->read[at];

#pragma unroll
            for (int c = 0; c < 4; c++) {
                const float2 value = pair_of(v[2 * i + c / 2]);

                t[n_at][c] = c % 2 == 0 ? fmaf(-read.x, t[n_at][c], beta.x * value.x)
                                        : fmaf(-read.y, t[n_at][c], beta.y * value.y);
            }
        }
    }
    mma_lower(u, t, stage->x);
}

/* v <- o, rounded. */
__device__ static inline void chunk_o(struct stage *stage, const float s[DK / 8][4], const float u[CHUNK / 8][4]) {
    float o[CHUNK / 8][4] = {};

    read_state(o, s, stage->q);
    scale_columns(o, stage->factors.query);
    mma_lower(o, u, stage->a);
#pragma unroll
    for (int p = 0; p < SQUARES; p++)
        store_values<SLICE>(stage->v, p, &o[2 * p]);
}

/* S <- decay S + U^T K, of a chunk that has all its rows. u is lost. */
__device__ static inline void chunk_s(struct stage *stage, float s[DK / 8][4], float u[CHUNK / 8][4]) {
    constexpr int PAIRS = 4; /* of squares of S at a time */
    const struct row_factors *by = &stage->factors;
    uint32_t parts[SQUARES][PARTS][4];

    scale_columns(u, by->write);
#pragma unroll
    for (int step = 0; step < SQUARES; step++)
        split_operand(parts[step], &u[2 * step]);
#pragma unroll
    for (int first = 0; first < DK / 16; first += PAIRS) {
        float chain[2 * PAIRS][4] = {}, small[2 * PAIRS][4] = {};

#pragma unroll
        for (int step = 0; step < SQUARES; step++) {
            uint32_t b[PAIRS][4];

#pragma unroll
            for (int p = 0; p < PAIRS; p++)
                load_columns<DK>(b[p], stage->k, first + p, step);
            mma_pairs<PAIRS>(small, parts[step][2], b);
            mma_pairs<PAIRS>(small, parts[step][1], b);
            mma_pairs<PAIRS>(chain, parts[step][0], b);
        }
        add<2 * PAIRS>(chain, small);
#pragma unroll
        for (int i = 0; i < 2 * PAIRS; i++)
#pragma unroll
            for (int c = 0; c < 4; c++)
                s[2 * first + i][c] = fmaf(by->decay, s[2 * first + i][c], chain[i][c]);
    }
}

__device__ static void load_stage(const struct chunk_op &op, int slot, int head, int slice, struct stage *stage) {
    const struct gdn_shape &shape = op.gdn.shape;
    struct chunk_head *from = &op.heads[slot * shape.hv + head];
    const bf16 *rows = op.rows + (size_t)slot * CHUNK * (size_t)shape.conv_dim;
    const int key_channel = head / (shape.hv / shape.hk) * DK;
    const int value_channel = 2 * shape.hk * DK + head * shape.dv + slice * SLICE;

    for (int i = (int)threadIdx.x; i < CHUNK * DK / 8; i += SCAN_WARPS * 32) {
        const int r = i / (DK / 8), u = i % (DK / 8);
        const bf16 *row = rows + (size_t)r * (size_t)shape.conv_dim + key_channel + u * 8;

        copy_async(unit_of<DK>(stage->q, r, u), row, 16);
        copy_async(unit_of<DK>(stage->k, r, u), row + shape.hk * DK, 16);
    }
    for (int i = (int)threadIdx.x; i < CHUNK * CHUNK / 8; i += SCAN_WARPS * 32) {
        const int r = i / (CHUNK / 8), u = i % (CHUNK / 8);

        if (u / 2 > r / 16)
            continue;
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            copy_async(unit_of<CHUNK>(stage->x[part], r, u), unit_of<CHUNK>(from->x[part], r, u), 16);
            copy_async(unit_of<CHUNK>(stage->a[part], r, u), unit_of<CHUNK>(from->a[part], r, u), 16);
        }
    }
    for (int i = (int)threadIdx.x; i < CHUNK * SLICE / 8; i += SCAN_WARPS * 32) {
        const int r = i / (SLICE / 8), u = i % (SLICE / 8);

        if (slice * SLICE + u * 8 < shape.dv)
            copy_async(unit_of<SLICE>(stage->v, r, u),
                       rows + (size_t)r * (size_t)shape.conv_dim + value_channel + u * 8, 16);
    }
    if (threadIdx.x < sizeof stage->factors / 16)
        copy_async((char *)&stage->factors + threadIdx.x * 16, (const char *)&from->factors + threadIdx.x * 16, 16);
    copy_commit();
}

/* The warp's part of rows [first, n) of o, to where row 0 of the chunk goes; those before it are not touched. */
__device__ static inline void store_o(const struct gdn_shape &shape, struct stage *stage, int first, int n, bf16 *out) {
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;

    __syncwarp();
#pragma unroll
    for (int i = 0; i < CHUNK / 16; i++) {
        const int r = i * 16 + lane / 2;

        if (r >= first && r < n)
            *(uint4 *)(out + (ptrdiff_t)r * shape.hv * shape.dv + lane % 2 * 8) =
                *(const uint4 *)unit_of<SLICE>(stage->v, r, warp * 2 + lane % 2);
    }
}

/* The last chunk of a seg has gone through: the columns move to the last multiple of 64, and what comes after it becomes the
 * open rows. Channels [ch_begin, ch_end), multiples of 8; rows: of the last chunk, after conv. */
__device__ static void leave_channels(const struct gdn_op &op, const struct gdn_seg &seg, struct chunk last,
                                      const bf16 *rows, int ch_begin, int ch_end) {
    const struct gdn_shape &shape = op.shape;
    const int t_grid = last.n == CHUNK ? seg.n : last.begin; /* the row of the seg at that multiple */
    const int t_open = max(0, t_grid), n_units = (ch_end - ch_begin) / 8;
    bf16 *columns = (bf16 *)(seg.state + shape.s_bytes);

    for (int ch = ch_begin + (int)threadIdx.x; ch < ch_end; ch += SCAN_WARPS * 32) {
        bf16 inputs[TAPS - 1];

        if (t_grid > 0) { /* before the open inputs are written: columns may come from them */
#pragma unroll
            for (int c = 0; c < TAPS - 1; c++)
                inputs[c] = gdn_inputs_of(op, seg, t_grid - (TAPS - 1) + c)[ch];
#pragma unroll
            for (int c = 0; c < TAPS - 1; c++)
                columns[c * shape.conv_dim + ch] = inputs[c];
        }
        for (int t = max(t_open, seg.n - (TAPS - 1)); t < seg.n; t++)
            gdn_open_input(shape, seg.open, seg.pos + t)[ch] = gdn_inputs_of(op, seg, t)[ch];
    }
    for (int i = (int)threadIdx.x; i < (seg.n - t_open) * n_units; i += SCAN_WARPS * 32) {
        const int t = t_open + i / n_units, u = ch_begin / 8 + i % n_units;

        *(uint4 *)(gdn_open_row(shape, seg.open, seg.pos + t) + u * 8) =
            *(const uint4 *)(rows + (size_t)(t - last.begin) * (size_t)shape.conv_dim + u * 8);
    }
}
/* And its gates, of a head. */
__device__ static void leave_gates(const struct gdn_op &op, const struct gdn_seg &seg, struct chunk last, int head) {
    const int t = max(0, last.begin) + (int)threadIdx.x;

    if (last.n < CHUNK && t < seg.n) {
        float *gates = gdn_open_gates(op.shape, seg.open, seg.pos + t);

        gates[head] = gdn_decay(op, head, seg.row0 + t);
        gates[op.shape.hv + head] = gdn_beta(op, head, seg.row0 + t);
    }
}

__global__ static void __launch_bounds__(SCAN_WARPS * 32, 1) scan(struct chunk_op op) {
    extern __shared__ __align__(1024) char smem[];
    struct stage *stages = (struct stage *)smem;
    const struct gdn_shape &shape = op.gdn.shape;
    const struct batch &batch = op.gdn.batch;
    const int n_slices = (shape.dv + SLICE - 1) / SLICE, n_units = shape.hv * n_slices;
    const int at = (int)blockIdx.x / n_units, unit = (int)blockIdx.x % n_units;
    const int head = unit / n_slices, slice = unit % n_slices;
    const int v0 = slice * SLICE + (int)threadIdx.x / 32 * 16; /* the warp's first row of S */
    int before = -op.first, begin, end, n_chunks; /* chunks of the slab before the seg's, of the seg in the slab */
    float s[DK / 8][4] = {}, *s_rows;
    struct chunk chunk = {};
    int row0;

    static_assert(SCAN_WARPS * 32 >= CHUNK, "a thread for each row's gates");
    wait_for_previous();
    may_launch_next();
    if (at >= *batch.n_segs)
        return;
    for (int i = 0; i < at; i++)
        before += n_chunks_of(batch, i);
    n_chunks = n_chunks_of(batch, at);
    begin = max(0, -before);
    end = min(n_chunks, op.n_slots - before);
    if (begin >= end)
        return;
    row0 = batch.seg_row[at];
    s_rows = (float *)gdn_seg_at(op.gdn, at).state + ((size_t)head * (size_t)shape.dv + (size_t)v0) * DK;
    load_stage(op, before + begin, head, slice, &stages[0]);
    if (v0 < shape.dv)
        load_s(s, s_rows);
    for (int k = begin; k < end; k++) {
        struct stage *stage = &stages[(k - begin) % 2];

        chunk = chunk_of(batch, at, k);
        if (k + 1 < end)
            load_stage(op, before + k + 1, head, slice, &stages[(k + 1 - begin) % 2]);
        else
            copy_commit();
        copy_wait<1>();
        __syncthreads();
        if (v0 < shape.dv) {
            float t[CHUNK / 8][4] = {}, u[CHUNK / 8][4] = {};

            read_state(t, s, stage->k);
            chunk_u(stage, t, u);
            chunk_o(stage, s, u);
            store_o(shape, stage, max(0, -chunk.begin), chunk.n,
                    (bf16 *)op.gdn.args.out + ((ptrdiff_t)(row0 + chunk.begin) * shape.hv + head) * shape.dv + v0);
            if (chunk.n == CHUNK)
                chunk_s(stage, s, u);
        }
        __syncthreads();
    }
    if (v0 < shape.dv && !(end - begin == 1 && chunk.n < CHUNK))
        store_s(s_rows, s);
    if (end < n_chunks) /* else no conv of the seg is left to run */
        return;
    leave_channels(op.gdn, gdn_seg_at(op.gdn, at), chunk,
                   op.rows + (size_t)(before + n_chunks - 1) * CHUNK * (size_t)shape.conv_dim,
                   shape.conv_dim / 8 * unit / n_units * 8, shape.conv_dim / 8 * (unit + 1) / n_units * 8);
    if (slice == 0)
        leave_gates(op.gdn, gdn_seg_at(op.gdn, at), chunk, head);
}

/* ---- finish: the gated norm of rows of o, in their place -------------------------------------------------------------- */

/* A CTA per row. */
__global__ static void __launch_bounds__(FINISH_WARPS * 32) finish(struct gdn_op op) {
    const struct gdn_shape &shape = op.shape;
    const int row = (int)blockIdx.x, lane = (int)threadIdx.x % 32;

    wait_for_previous();
    may_launch_next();
    if (row >= batch_rows(op.batch))
        return;
    for (int head = (int)threadIdx.x / 32; head < shape.hv; head += FINISH_WARPS) {
        const size_t o_at = ((size_t)row * (size_t)shape.hv + (size_t)head) * (size_t)shape.dv;
        float o[LANE_VALUES], z[LANE_VALUES];

#pragma unroll
        for (int i = 0; i < LANE_VALUES; i++) {
            const bool is_there = i * 32 < shape.dv;

            o[i] = is_there ? bf16_load(op.args.out, o_at + (size_t)(i * 32 + lane)) : 0;
            z[i] = is_there ? bf16_load(op.args.mz, gdn_z_at(op, head, row) + (size_t)(i * 32 + lane)) : 0;
        }
        gdn_finish(op, head, row, o, z);
    }
}

/* ---- the op ------------------------------------------------------------------------------------------------------- */

/* A seg may begin and end inside a chunk. */
static int n_chunks_max(const struct batch *batch) {
    return (batch->n_rows_max + batch->n_segs_max * 2 * (CHUNK - 1)) / CHUNK;
}
static int n_slots_max(const struct batch *batch) {
    return min_int(SLAB_CHUNKS, n_chunks_max(batch));
}
static size_t rows_bytes(const struct gdn_op *op) {
    return (size_t)n_slots_max(&op->batch) * CHUNK * (size_t)op->shape.conv_dim * sizeof(bf16);
}

size_t gdn_advance_scratch_bytes(const struct gdn_op *op) {
    return rows_bytes(op) + (size_t)n_slots_max(&op->batch) * (size_t)op->shape.hv * sizeof(struct chunk_head);
}

void gdn_advance_launch(const struct launch *launch, const struct gdn_op *gdn) {
    const struct gdn_shape *shape = &gdn->shape;
    const int n_slices = (int)div_ceil((uint64_t)shape->dv, SLICE), n_slots = n_slots_max(&gdn->batch);
    struct chunk_op op = {*gdn, 0, n_slots, (bf16 *)launch->scratch,
                          (struct chunk_head *)(launch->scratch + rows_bytes(gdn))};

    static_assert(2 * sizeof(struct stage) <= SHARED_BYTES && sizeof(struct chunk_head) % 16 == 0, "stages fit");
    cudaFuncSetAttribute(solve, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)sizeof(struct solve_shared));
    cudaFuncSetAttribute(scan, cudaFuncAttributeMaxDynamicSharedMemorySize, 2 * (int)sizeof(struct stage));
    for (; op.first < n_chunks_max(&gdn->batch); op.first += n_slots) {
        launch_early(launch->stream, conv,
                     dim3((unsigned)div_ceil((uint64_t)shape->conv_dim, 2 * CONV_THREADS),
                          (unsigned)(n_slots * (CHUNK / CONV_ROWS))),
                     CONV_THREADS, 0, op);
        launch_early(launch->stream, solve, dim3((unsigned)(n_slots * shape->hv)), SOLVE_WARPS * 32,
                     (int)sizeof(struct solve_shared), op);
        launch_early(launch->stream, scan, dim3((unsigned)(gdn->batch.n_segs_max * shape->hv * n_slices)),
                     SCAN_WARPS * 32, 2 * (int)sizeof(struct stage), op);
    }
    launch_early(launch->stream, finish, dim3((unsigned)gdn->batch.n_rows_max), FINISH_WARPS * 32, 0, *gdn);
}
