/* gdn_chunk: the gated delta net of a prefill, in chunks of 64 rows: chunk k of a seg has the positions [64 k, 64 k + 64).
 *
 * With S before the chunk, decays d, and D_ij = d_(j+1) ... d_i, E_i = d_1 ... d_i, all per value head:
 *   M_ij = beta_i D_ij (k_i . k_j), j < i;  A_ij = D_ij (q_i . k_j), j <= i;  X = (I + M)^-1
 *   T = beta (V - E K S^T);  U = X T;  O = E Q S^T + A U;  S <- E_64 S + sum over i of D_(64)i u_i k_i^T
 * Rows that a chunk lacks have k = v = beta = 0 and d = 1, and leave S as it is. Decays are multiplied, not taken from sums
 * of logarithms, so nothing overflows and nothing cancels. X comes by forward substitution: repeated squaring overflows
 * where one token follows itself.
 *
 * Products run on the matrix unit in bf16. q, k and v are bf16 as the convolution leaves them, and exact; the norms of q and
 * k are factors of rows, applied to the products. What is f32 enters as three parts, which hold all of its bits: with two, one
 * in 300 values of o would be rounded to another bf16 than the step form's, with three one in 10,000. The matrix unit cuts its
 * sums off, so the products of the first parts are summed over 64 columns at a time and added to nearest, the small ones apart.
 *
 * conv, solve and scan take a slab of chunks at a time, so that what they leave each other is in the L2 cache still. */
#include "gdn.cuh"

enum {
    CHUNK = PAGE_TOKENS,
    SLAB_CHUNKS = 17, /* 1,024 tokens, also where the seg begins inside a chunk */
    CONV_THREADS = 128,
    CONV_ROWS = 16, /* of a thread */
    SOLVE_WARPS = 8,
    SCAN_WARPS = 4,
    SLICE = SCAN_WARPS * 16, /* rows of S of a CTA of scan */
    FINISH_WARPS = 8,
    CHAIN = 4,                /* steps of 16 columns that the matrix unit sums up */
    PARTS = 3,                /* of a float: bf16 that sum up to it, by falling size */
    FLOAT_STRIDE = CHUNK + 8, /* of a matrix of floats in shared memory: keeps banks apart */
};

/* Of the rows of a chunk, for one value head. */
struct row_factors {
    float beta[CHUNK];
    float read[CHUNK];      /* beta E, and the norm of k: of what is read from S */
    float query[CHUNK];     /* E, and the norm of q: of what S gives to o */
    float write[CHUNK];     /* D to the end, and the norm of k: of u in S */
    float decay, unused[3]; /* E of the whole chunk */
};
/* What solve leaves to scan of a chunk and a value head: the parts of X and A, blocks of 16 x 16 on and below the diagonal. */
struct chunk_head {
    bf16 x[PARTS][CHUNK][CHUNK], a[PARTS][CHUNK][CHUNK];
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
    int seg, begin, n; /* rows [begin, begin + n) of the seg */
};
__device__ static inline struct chunk chunk_of(const struct batch &batch, int seg, int k) {
    const int n = batch.seg_row[seg + 1] - batch.seg_row[seg], off = batch.seg_pos[seg] % CHUNK;
    struct chunk chunk = {seg, max(0, k * CHUNK - off), 0};

    chunk.n = min(n, (k + 1) * CHUNK - off) - chunk.begin;
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

__device__ static inline float2 load_pair(const void *base, size_t i) {
    const uint32_t raw = *(const uint32_t *)((const bf16 *)base + i);

    return make_float2(__uint_as_float(raw << 16), __uint_as_float(raw & 0xffff0000u));
}

/* Convolution and SiLU: two channels of CONV_ROWS rows for each thread. */
__global__ static void __launch_bounds__(CONV_THREADS) conv(struct chunk_op op) {
    const struct gdn_shape &shape = op.gdn.shape;
    const struct gdn_args *a = &op.gdn.args;
    const int ch = ((int)blockIdx.x * CONV_THREADS + (int)threadIdx.x) * 2;
    const int slot = (int)blockIdx.y / (CHUNK / CONV_ROWS), r0 = (int)blockIdx.y % (CHUNK / CONV_ROWS) * CONV_ROWS;
    float2 w[TAPS], x[TAPS - 1 + CONV_ROWS];
    const char *columns;
    struct chunk chunk;
    size_t row0;

    may_launch_next();
    if (ch < shape.conv_dim)
#pragma unroll
        for (int j = 0; j < TAPS; j++) /* no kernel writes these */
            w[j] = make_float2(a->conv[ch * TAPS + j], a->conv[(ch + 1) * TAPS + j]);
    wait_for_previous();
    chunk = chunk_at(op, slot);
    if (chunk.n == 0 || ch >= shape.conv_dim)
        return;
    row0 = (size_t)op.gdn.batch.seg_row[chunk.seg];
    columns = gdn_state_at(shape, op.gdn.state, op.gdn.state.live[op.gdn.batch.seg_slot[chunk.seg]], a->layer) +
              shape.s_bytes;
#pragma unroll
    for (int i = 0; i < TAPS - 1 + CONV_ROWS; i++) {
        const int r = r0 + i - (TAPS - 1), t = chunk.begin + r; /* of the chunk, of the seg */

        x[i] = make_float2(0, 0);
        if (r >= chunk.n)
            continue;
        x[i] = t < 0 ? load_pair(columns, (size_t)(TAPS - 1 + t) * (size_t)shape.conv_dim + (size_t)ch)
                     : load_pair(a->mz, (row0 + (size_t)t) * (size_t)a->mz_stride + (size_t)ch);
    }
#pragma unroll
    for (int i = 0; i < CONV_ROWS; i++) {
        uint32_t *to = (uint32_t *)(op.rows + ((size_t)(slot * CHUNK + r0 + i) * (size_t)shape.conv_dim + (size_t)ch));
        float2 sum = make_float2(0, 0);

#pragma unroll
        for (int j = 0; j < TAPS; j++) {
            sum.x = fmaf(w[j].x, x[i + j].x, sum.x);
            sum.y = fmaf(w[j].y, x[i + j].y, sum.y);
        }
        *to = r0 + i < chunk.n ? pack_bf16(gdn_activated(sum.x), gdn_activated(sum.y)) : 0;
    }
}

/* ---- tiles in shared memory ----------------------------------------------------------------------------------------- */

/* 16-byte unit u of row r of a tile of WIDTH columns lies at u ^ (r & 7): reads of 8 rows meet 8 banks of 16 bytes. */
template <int WIDTH> __device__ static inline bf16 *unit_of(bf16 *tile, int r, int u) {
    return tile + r * WIDTH + (u ^ (r & 7)) * 8;
}

/* Rows of a tile as B operands of d += a . tile^T: rows 16 p to 16 p + 15 are 16 columns of d, columns 16 step to
 * 16 step + 15 are summed over. */
template <int WIDTH> __device__ static inline void load_rows(uint32_t b[4], bf16 *tile, int p, int step) {
    const int lane = (int)threadIdx.x % 32;

    ldmatrix_x4(b, unit_of<WIDTH>(tile, p * 16 + lane / 16 * 8 + lane % 8, step * 2 + lane / 8 % 2));
}
/* Columns of a tile, as B operands of d += a . tile: columns 16 p to 16 p + 15 are 16 columns of d. */
template <int WIDTH> __device__ static inline void load_columns(uint32_t b[4], bf16 *tile, int p, int step) {
    const int lane = (int)threadIdx.x % 32;

    ldmatrix_x4_trans(b, unit_of<WIDTH>(tile, step * 16 + lane / 8 % 2 * 8 + lane % 8, p * 2 + lane / 16));
}

__device__ static inline void split_pair(uint32_t parts[PARTS], float a, float b) {
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        parts[part] = pack_bf16(a, b);
        a -= __uint_as_float(parts[part] << 16);
        b -= __uint_as_float(parts[part] & 0xffff0000u);
    }
}
/* A result, 16 rows by 16 columns in two squares, as the A operand of the next product. */
__device__ static inline void split_operand(uint32_t parts[PARTS][4], const float d[2][4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t pair[PARTS];

        split_pair(pair, d[i / 2][i % 2 * 2], d[i / 2][i % 2 * 2 + 1]);
#pragma unroll
        for (int part = 0; part < PARTS; part++)
            parts[part][i] = pair[part];
    }
}

/* d += a . b, pair after pair of squares: a square is met again only after all others, when its last sum is there. */
template <int PAIRS>
__device__ static inline void mma_pairs(float d[2 * PAIRS][4], const uint32_t a[4], const uint32_t b[PAIRS][4]) {
#pragma unroll
    for (int p = 0; p < PAIRS; p++) {
        mma_bf16(d[2 * p], a, b[p][0], b[p][1]);
        mma_bf16(d[2 * p + 1], a, b[p][2], b[p][3]);
    }
}

template <int N> __device__ static inline void add(float d[N][4], const float more[N][4]) {
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
        for (int c = 0; c < 4; c++)
            d[i][c] += more[i][c];
}

/* ---- solve: X and A of a chunk and a value head ---------------------------------------------------------------------- */

struct solve_shared {
    bf16 k[CHUNK * DK], q[CHUNK * DK];
    float d[CHUNK][FLOAT_STRIDE], m[CHUNK][FLOAT_STRIDE]; /* on and below the diagonal; d: zeros above */
    float decay[CHUNK], beta[CHUNK], k_factor[CHUNK], q_factor[CHUNK];
};

/* A thread's row of q or k: the sum of its squares. */
__device__ static inline float squares_of(bf16 *tile, int r) {
    float sum = 0;

#pragma unroll
    for (int u = 0; u < DK / 8; u++) {
        const uint4 raw = *(const uint4 *)unit_of<DK>(tile, r, u);
        const uint32_t *word = &raw.x;

#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float a = __uint_as_float(word[i] << 16), b = __uint_as_float(word[i] & 0xffff0000u);

            sum = fmaf(b, b, fmaf(a, a, sum));
        }
    }
    return sum;
}

/* Columns [FIRST, FIRST + 32) of X by one warp, from row FIRST on: (I + M) x = e. */
template <int FIRST>
__device__ static inline void solve_columns(const float m[CHUNK][FLOAT_STRIDE], bf16 x_parts[PARTS][CHUNK][CHUNK]) {
    constexpr int N = CHUNK - FIRST;
    const int j = (int)threadIdx.x % 32;
    float x[N];

#pragma unroll
    for (int i = 0; i < N; i++) {
        float sum[4] = {i == j ? 1.0f : 0.0f, 0, 0, 0}, rest;

#pragma unroll
        for (int c = 0; c < i; c += 4) {
            const float4 v = *(const float4 *)&m[FIRST + i][FIRST + c];

            sum[0] = fmaf(-v.x, x[c], sum[0]);
            if (c + 1 < i)
                sum[1] = fmaf(-v.y, x[c + 1], sum[1]);
            if (c + 2 < i)
                sum[2] = fmaf(-v.z, x[c + 2], sum[2]);
            if (c + 3 < i)
                sum[3] = fmaf(-v.w, x[c + 3], sum[3]);
        }
        x[i] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
        rest = x[i];
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            bf16_store(x_parts[part][FIRST + i], (size_t)(FIRST + j), rest);
            rest -= round_bf16(rest);
        }
    }
}

__global__ static void __launch_bounds__(SOLVE_WARPS * 32, 2) solve(struct chunk_op op) {
    extern __shared__ __align__(128) char smem[];
    struct solve_shared *sh = (struct solve_shared *)smem;
    const struct gdn_shape &shape = op.gdn.shape;
    const int slot = (int)blockIdx.x / shape.hv, head = (int)blockIdx.x % shape.hv;
    const int thread = (int)threadIdx.x, warp = thread / 32, lane = thread % 32, block = warp % 4; /* of 16 rows */
    const int key_channel = head / (shape.hv / shape.hk) * DK, row = thread % CHUNK;
    const bool is_k = warp < SOLVE_WARPS / 2;
    struct chunk_head *to = &op.heads[slot * shape.hv + head];
    const bf16 *rows = op.rows + (size_t)slot * CHUNK * (size_t)shape.conv_dim + key_channel;
    float products[CHUNK / 8][4] = {}, chain[CHUNK / 8][4] = {};
    double decays = 1; /* 64 roundings of f32 would show */
    struct chunk chunk;

    static_assert(SOLVE_WARPS * 32 == 4 * CHUNK && CHUNK == 64, "two matrices of four blocks of rows, a warp each");
    may_launch_next();
    wait_for_previous();
    chunk = chunk_at(op, slot);
    if (chunk.n == 0)
        return;
    for (int i = thread; i < CHUNK * DK / 8; i += SOLVE_WARPS * 32) {
        const int r = i / (DK / 8), u = i % (DK / 8);
        const bf16 *from = rows + (size_t)r * (size_t)shape.conv_dim + u * 8;

        copy_async(unit_of<DK>(sh->q, r, u), from, 16);
        copy_async(unit_of<DK>(sh->k, r, u), from + shape.hk * DK, 16);
    }
    copy_commit();
    if (thread < CHUNK) {
        const int at = op.gdn.batch.seg_row[chunk.seg] + chunk.begin + row;

        sh->decay[row] = row < chunk.n ? expf(gdn_g(op.gdn, head, at)) : 1;
        sh->beta[row] = row < chunk.n ? gdn_beta(op.gdn, head, at) : 0;
    }
    copy_wait<0>();
    __syncthreads();

    if (thread < CHUNK)
        sh->k_factor[row] = gdn_l2_factor(squares_of(sh->k, row));
    else if (thread < 2 * CHUNK)
        sh->q_factor[row] = gdn_l2_factor(squares_of(sh->q, row)) * rsqrtf((float)DK);
    for (int i = 0; i < thread / CHUNK * 16 + 16; i++) { /* column `row` of d, 16 rows of it */
        if (i > row)
            decays *= (double)sh->decay[i];
        if (i >= thread / CHUNK * 16)
            sh->d[i][row] = i >= row ? (float)decays : 0;
    }
#pragma unroll
    for (int step = 0; step < DK / 16; step++) {
        uint32_t a[4], b[4];

        ldmatrix_x4(a, unit_of<DK>(is_k ? sh->k : sh->q, block * 16 + lane % 16, step * 2 + lane / 16));
#pragma unroll
        for (int p = 0; p < CHUNK / 16; p++)
            if (p <= block) {
                load_rows<DK>(b, sh->k, p, step);
                mma_bf16(chain[2 * p], a, b[0], b[1]);
                mma_bf16(chain[2 * p + 1], a, b[2], b[3]);
            }
        if (step % CHAIN == CHAIN - 1) {
            add<CHUNK / 8>(products, chain);
            memset(chain, 0, sizeof chain);
        }
    }
    __syncthreads();

    if (thread < CHUNK) {
        const float from_begin = sh->decay[0] * sh->d[row][0];

        to->factors.beta[row] = sh->beta[row];
        to->factors.read[row] = sh->beta[row] * from_begin * sh->k_factor[row];
        to->factors.query[row] = from_begin * sh->q_factor[row];
        to->factors.write[row] = sh->d[CHUNK - 1][row] * sh->k_factor[row];
        if (row == CHUNK - 1)
            to->factors.decay = from_begin;
    }
#pragma unroll
    for (int n = 0; n < CHUNK / 8; n++) {
        if (n / 2 > block)
            continue;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int i = block * 16 + half * 8 + lane / 4, j = n * 8 + lane % 4 * 2;
            const float by = is_k ? sh->beta[i] * sh->k_factor[i] : sh->q_factor[i];
            const float2 d = *(const float2 *)&sh->d[i][j], by_column = *(const float2 *)&sh->k_factor[j];
            const float first = products[n][2 * half] * by * by_column.x * d.x;
            const float second = products[n][2 * half + 1] * by * by_column.y * d.y;

            if (is_k)
                *(float2 *)&sh->m[i][j] = make_float2(first, second);
            if (!is_k) {
                uint32_t parts[PARTS];

                split_pair(parts, first, second);
#pragma unroll
                for (int part = 0; part < PARTS; part++)
                    *(uint32_t *)&to->a[part][i][j] = parts[part];
            }
        }
    }
    __syncthreads();
    if (warp == 0)
        solve_columns<0>(sh->m, to->x);
    else if (warp == 1)
        solve_columns<32>(sh->m, to->x);
}

/* ---- scan: a slice of S through the chunks of a seg ------------------------------------------------------------------ */

/* Each warp has 16 rows of S, and of the transposed T, U and O, as results of matrix instructions, which become operands
 * of the next ones where they are. */
struct stage {
    bf16 k[CHUNK * DK], q[CHUNK * DK];
    bf16 x[PARTS][CHUNK * CHUNK], a[PARTS][CHUNK * CHUNK];
    bf16 v[CHUNK * SLICE]; /* then o */
    struct row_factors factors;
};

__device__ static void load_stage(const struct chunk_op &op, int slot, int head, int slice, struct stage *stage) {
    const struct gdn_shape &shape = op.gdn.shape;
    const struct chunk_head *from = &op.heads[slot * shape.hv + head];
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
            copy_async(unit_of<CHUNK>(stage->x[part], r, u), &from->x[part][r][u * 8], 16);
            copy_async(unit_of<CHUNK>(stage->a[part], r, u), &from->a[part][r][u * 8], 16);
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

/* d += src . tile^T; tile: the rows of q or k. */
__device__ static inline void read_state(float d[CHUNK / 8][4], const float src[DK / 8][4], bf16 *tile) {
    float chain[CHUNK / 8][4] = {}, small[CHUNK / 8][4] = {};

#pragma unroll
    for (int step = 0; step < DK / 16; step++) {
        uint32_t parts[PARTS][4], b[CHUNK / 16][4];

        split_operand(parts, &src[2 * step]);
#pragma unroll
        for (int p = 0; p < CHUNK / 16; p++)
            load_rows<DK>(b[p], tile, p, step);
        mma_pairs<CHUNK / 16>(small, parts[2], b);
        mma_pairs<CHUNK / 16>(small, parts[1], b);
        mma_pairs<CHUNK / 16>(chain, parts[0], b);
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
    constexpr int PAIRS = CHUNK / 16 - STEP;
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

    static_assert(CHUNK == CHAIN * 16, "a chain");
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

/* One chunk of n rows. s: the warp's rows of S; out: where its part of the chunk's first row goes. */
__device__ static void advance(const struct gdn_op &op, struct stage *stage, int n, float s[DK / 8][4], bf16 *out) {
    constexpr int PAIRS = 4; /* of squares of S at a time */
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    const struct row_factors *by = &stage->factors;
    float t[CHUNK / 8][4] = {}, u[CHUNK / 8][4] = {}, o[CHUNK / 8][4] = {};
    uint32_t parts[CHUNK / 16][PARTS][4];
    /* Two squares of v or o, rows of the chunk by the warp's 16 columns. */
    auto v_at = [&](int p) {
        return unit_of<SLICE>(stage->v, p * 16 + lane / 16 * 8 + lane % 8, warp * 2 + lane / 8 % 2);
    };

    read_state(t, s, stage->k);
#pragma unroll
    for (int p = 0; p < CHUNK / 16; p++) {
        uint32_t v[4];

        ldmatrix_x4_trans(v, v_at(p));
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int n_at = 2 * p + i, at = n_at * 8 + lane % 4 * 2;
            const float2 beta = *(const float2 *)&by->beta[at], read = *(const float2 *)&by->read[at];

#pragma unroll
            for (int c = 0; c < 4; c++) {
                const uint32_t raw = v[2 * i + c / 2];
                const float value = __uint_as_float(c % 2 == 0 ? raw << 16 : raw & 0xffff0000u);

                t[n_at][c] = fmaf(-(c % 2 == 0 ? read.x : read.y), t[n_at][c], (c % 2 == 0 ? beta.x : beta.y) * value);
            }
        }
    }
    mma_lower(u, t, stage->x);
    read_state(o, s, stage->q);
    scale_columns(o, by->query);
    mma_lower(o, u, stage->a);
#pragma unroll
    for (int p = 0; p < CHUNK / 16; p++) {
        const uint32_t rounded[4] = {pack_bf16(o[2 * p][0], o[2 * p][1]), pack_bf16(o[2 * p][2], o[2 * p][3]),
                                     pack_bf16(o[2 * p + 1][0], o[2 * p + 1][1]),
                                     pack_bf16(o[2 * p + 1][2], o[2 * p + 1][3])};

        stmatrix_x4_trans(v_at(p), rounded);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < CHUNK / 16; i++) {
        const int r = i * 16 + lane / 2;

        if (r < n)
            *(uint4 *)(out + (size_t)r * (size_t)op.shape.hv * (size_t)op.shape.dv + lane % 2 * 8) =
                *(const uint4 *)unit_of<SLICE>(stage->v, r, warp * 2 + lane % 2);
    }
    scale_columns(u, by->write);
#pragma unroll
    for (int step = 0; step < CHUNK / 16; step++)
        split_operand(parts[step], &u[2 * step]);
#pragma unroll
    for (int first = 0; first < DK / 16; first += PAIRS) { /* S <- decay S + U^T K */
        float chain[2 * PAIRS][4] = {}, small[2 * PAIRS][4] = {};

#pragma unroll
        for (int step = 0; step < CHUNK / 16; step++) {
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

__global__ static void __launch_bounds__(SCAN_WARPS * 32, 1) scan(struct chunk_op op) {
    extern __shared__ __align__(128) char smem[];
    struct stage *stages = (struct stage *)smem;
    const struct gdn_shape &shape = op.gdn.shape;
    const struct batch &batch = op.gdn.batch;
    const int n_slices = (shape.dv + SLICE - 1) / SLICE, n_units = shape.hv * n_slices;
    const int seg = (int)blockIdx.x / n_units, unit = (int)blockIdx.x % n_units;
    const int head = unit / n_slices, slice = unit % n_slices, lane = (int)threadIdx.x % 32;
    const int v0 = slice * SLICE + (int)threadIdx.x / 32 * 16; /* the warp's first row of S */
    float s[DK / 8][4] = {}, *s_at;
    int before = -op.first, begin, end, n_chunks; /* chunks of the slab before the seg's, of the seg in the slab */
    char *state;

    may_launch_next();
    wait_for_previous();
    if (seg >= *batch.n_segs)
        return;
    for (int i = 0; i < seg; i++)
        before += n_chunks_of(batch, i);
    n_chunks = n_chunks_of(batch, seg);
    begin = max(0, -before);
    end = min(n_chunks, op.n_slots - before);
    if (begin >= end)
        return;
    state = gdn_state_at(shape, op.gdn.state, op.gdn.state.live[batch.seg_slot[seg]], op.gdn.args.layer);
    s_at = (float *)state + ((size_t)head * (size_t)shape.dv + (size_t)(v0 + lane / 4)) * DK + lane % 4 * 2;
    load_stage(op, before + begin, head, slice, &stages[0]);
    if (v0 < shape.dv)
#pragma unroll
        for (int i = 0; i < DK / 8; i++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                *(float2 *)&s[i][2 * half] = *(const float2 *)(s_at + half * 8 * DK + i * 8);
    for (int k = begin; k < end; k++) {
        const struct chunk chunk = chunk_of(batch, seg, k);
        const size_t row = (size_t)(batch.seg_row[seg] + chunk.begin);

        if (k + 1 < end)
            load_stage(op, before + k + 1, head, slice, &stages[(k + 1 - begin) % 2]);
        else
            copy_commit();
        copy_wait<1>();
        __syncthreads();
        if (v0 < shape.dv)
            advance(op.gdn, &stages[(k - begin) % 2], chunk.n, s,
                    (bf16 *)op.gdn.args.out + (row * (size_t)shape.hv + (size_t)head) * (size_t)shape.dv + v0);
        __syncthreads();
    }
    if (v0 < shape.dv)
#pragma unroll
        for (int i = 0; i < DK / 8; i++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                *(float2 *)(s_at + half * 8 * DK + i * 8) = *(const float2 *)&s[i][2 * half];
    if (end < n_chunks)
        return;
    /* No conv of the seg is left to run: its columns move, a share of them by each CTA. */
    for (int ch = (int)((int64_t)shape.conv_dim * unit / n_units) + (int)threadIdx.x;
         ch < (int)((int64_t)shape.conv_dim * (unit + 1) / n_units); ch += SCAN_WARPS * 32) {
        const size_t row0 = (size_t)batch.seg_row[seg];

        gdn_conv_shift(shape, state + shape.s_bytes, state + shape.s_bytes,
                       (const bf16 *)op.gdn.args.mz + row0 * (size_t)op.gdn.args.mz_stride,
                       (size_t)op.gdn.args.mz_stride, batch.seg_row[seg + 1] - batch.seg_row[seg], ch);
    }
}

/* ---- finish: the gated norm of rows of o, in their place -------------------------------------------------------------- */

/* A CTA per row. */
__global__ static void __launch_bounds__(FINISH_WARPS * 32) finish(struct gdn_op op) {
    const struct gdn_shape &shape = op.shape;
    const int row = (int)blockIdx.x, lane = (int)threadIdx.x % 32;

    may_launch_next();
    wait_for_previous();
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

bool gdn_advance_is_built(const struct gdn_args *args) {
    return args->mz_stride % 2 == 0 && (uintptr_t)args->mz % 4 == 0 && (uintptr_t)args->out % 16 == 0;
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
        launch_early(launch->stream, true, conv,
                     dim3((unsigned)div_ceil((uint64_t)shape->conv_dim, 2 * CONV_THREADS),
                          (unsigned)(n_slots * (CHUNK / CONV_ROWS))),
                     CONV_THREADS, 0, op);
        launch_early(launch->stream, true, solve, dim3((unsigned)(n_slots * shape->hv)), SOLVE_WARPS * 32,
                     (int)sizeof(struct solve_shared), op);
        launch_early(launch->stream, true, scan, dim3((unsigned)(gdn->batch.n_segs_max * shape->hv * n_slices)),
                     SCAN_WARPS * 32, 2 * (int)sizeof(struct stage), op);
    }
    launch_early(launch->stream, true, finish, dim3((unsigned)gdn->batch.n_rows_max), FINISH_WARPS * 32, 0, *gdn);
}
