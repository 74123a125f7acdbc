/* gdn_chunk: the arithmetic of a chunk of 64 rows for one value head; chunk k of a seq has the positions [64 k, 64 k + 64).
 *
 * With S before the chunk, decays d, and D_ij = d_(j+1) ... d_i, E_i = d_1 ... d_i, all per value head:
 *   M_ij = beta_i D_ij (k_i . k_j), j < i;  A_ij = D_ij (q_i . k_j), j <= i;  X = (I + M)^-1
 *   T = beta (V - E K S^T);  U = X T;  O = E Q S^T + A U;  S <- E_64 S + sum over i of D_(64)i u_i k_i^T
 * Decays are multiplied, not taken from sums of logarithms, so nothing overflows and nothing cancels. X comes by forward
 * substitution: repeated squaring overflows where one token follows itself.
 *
 * Products run on the matrix unit in bf16. q, k and v are bf16 as the convolution leaves them, and exact; the norms of q and
 * k are factors of rows, applied to the products. What is f32 enters as three parts, which hold all of its bits: with two, one
 * in 300 values of o would be rounded to another bf16 than a step in f32 gives, with three one in 10,000. The matrix unit cuts
 * its sums off, so the products of the first parts are summed over 64 columns at a time and added to nearest, the small ones
 * apart.
 *
 * Row i of O has the same bits whichever rows come after it, and however many: rows that are not there have k = v = beta = 0
 * and d = 1. Squares of 16 rows are computed apart from each other; inside a square what a later row gives is a product with a
 * zero of X or A, which a sum that began at +0 does not see. So squares that nobody asks for may be left out. */
#pragma once
#include "gdn.cuh"

enum {
    SOLVE_WARPS = 8,
    CHAIN = 4,                /* steps of 16 columns that the matrix unit sums up */
    PARTS = 3,                /* of a float: bf16 that sum up to it, by falling size */
    FLOAT_STRIDE = CHUNK + 8, /* of a matrix of floats in shared memory: keeps banks apart */
    SQUARES = CHUNK / 16,     /* rows of 16 in a chunk */
};

/* Of the rows of a chunk, for one value head. */
struct row_factors {
    float beta[CHUNK];
    float read[CHUNK];      /* beta E, and the norm of k: of what is read from S */
    float query[CHUNK];     /* E, and the norm of q: of what S gives to o */
    float write[CHUNK];     /* D to the end, and the norm of k: of u in S */
    float decay, unused[3]; /* E of the whole chunk */
};

/* Tiles of one chunk in shared memory; VALUES: columns of v, rows of S, that the CTA has. */
template <int VALUES> struct stage {
    bf16 k[CHUNK * DK], q[CHUNK * DK];
    bf16 x[PARTS][CHUNK * CHUNK], a[PARTS][CHUNK * CHUNK]; /* squares on and below the diagonal */
    bf16 v[CHUNK * VALUES];                                /* then o */
    struct row_factors factors;
};

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

/* Pairs of squares that are asked for. */
struct wanted {
    int begin, end;
};
/* IS_PART: wanted says which; else all are. */
template <bool IS_PART> __device__ static inline bool is_wanted(struct wanted wanted, int p) {
    return !IS_PART || (p >= wanted.begin && p < wanted.end);
}

/* d += a . b, pair after pair of squares: a square is met again only after all others, when its last sum is there. FIRST: the
 * number of the first pair. */
template <int PAIRS, bool IS_PART, int FIRST = 0>
__device__ static inline void mma_pairs(float d[2 * PAIRS][4], const uint32_t a[4], const uint32_t b[PAIRS][4],
                                        struct wanted wanted) {
#pragma unroll
    for (int p = 0; p < PAIRS; p++)
        if (is_wanted<IS_PART>(wanted, FIRST + p)) {
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

/* ---- X and A ---------------------------------------------------------------------------------------------------------- */

struct system_shared {
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
            const float2 x = pair_of(word[i]);

            sum = fmaf(x.y, x.y, fmaf(x.x, x.x, sum));
        }
    }
    return sum;
}

/* Columns [FIRST, FIRST + 32) of X by one warp, rows FIRST to n - 1 and what fills up a square: (I + M) x = e. */
template <int FIRST>
__device__ static inline void solve_columns(const float m[CHUNK][FLOAT_STRIDE], bf16 x_parts[PARTS][CHUNK * CHUNK],
                                            int n) {
    constexpr int N = CHUNK - FIRST;
    const int j = (int)threadIdx.x % 32;
    float x[N];

#pragma unroll
    for (int i = 0; i < N; i++) {
        float sum[4] = {i == j ? 1.0f : 0.0f, 0, 0, 0}, rest;

        if (i % 16 == 0 && FIRST + i >= n)
            return;
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
            bf16_store(unit_of<CHUNK>(x_parts[part], FIRST + i, (FIRST + j) / 8), (size_t)(j % 8), rest);
            rest -= round_bf16(rest);
        }
    }
}

/* By SOLVE_WARPS warps, from tiles of k and q, decays and betas, which must be there. X of rows [0, n), A of rows [first, n), and
 * what fills up their squares; their factors. !HAS_Q: without A. */
template <bool HAS_Q>
__device__ static inline void solve_chunk(bf16 *k, bf16 *q, struct system_shared *sh, bf16 x[PARTS][CHUNK * CHUNK],
                                          bf16 a_parts[PARTS][CHUNK * CHUNK], struct row_factors *factors, int first,
                                          int n) {
    const int thread = (int)threadIdx.x, warp = thread / 32, lane = thread % 32, block = warp % 4; /* of 16 rows */
    const int row = thread % CHUNK,
              d0 = thread / CHUNK * 16; /* column `row` of d, rows from d0 on, are this thread's */
    const bool is_k = warp < SOLVE_WARPS / 2;
    const bool has_rows = block * 16 < n && (is_k || (HAS_Q && block * 16 + 16 > first));
    float products[CHUNK / 8][4] = {}, chain[CHUNK / 8][4] = {};
    double decays = 1; /* 64 roundings of f32 would show */

    static_assert(SOLVE_WARPS * 32 == 4 * CHUNK && CHUNK == 64, "two matrices of four blocks of rows, a warp each");
    if (thread < CHUNK)
        sh->k_factor[row] = gdn_l2_factor(squares_of(k, row));
    else if (HAS_Q && thread < 2 * CHUNK)
        sh->q_factor[row] = gdn_l2_factor(squares_of(q, row)) * rsqrtf((float)DK);
    if (d0 < n)
        for (int i = 0; i < d0 + 16; i++) {
            if (i > row)
                decays *= (double)sh->decay[i];
            if (i >= d0)
                sh->d[i][row] = i >= row ? (float)decays : 0;
        }
    if (has_rows)
#pragma unroll
        for (int step = 0; step < DK / 16; step++) {
            uint32_t a[4], b[4];

            ldmatrix_x4(a, unit_of<DK>(is_k ? k : q, block * 16 + lane % 16, step * 2 + lane / 16));
#pragma unroll
            for (int p = 0; p < SQUARES; p++)
                if (p <= block) {
                    load_rows<DK>(b, k, p, step);
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

        factors->beta[row] = sh->beta[row];
        factors->read[row] = sh->beta[row] * from_begin * sh->k_factor[row];
        factors->query[row] = HAS_Q ? from_begin * sh->q_factor[row] : 0;
        factors->write[row] = sh->d[CHUNK - 1][row] * sh->k_factor[row];
        if (row == CHUNK - 1)
            factors->decay = from_begin;
    }
#pragma unroll
    for (int at = 0; at < CHUNK / 8; at++) {
        if (at / 2 > block || !has_rows)
            continue;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int i = block * 16 + half * 8 + lane / 4, j = at * 8 + lane % 4 * 2;
            const float by = is_k ? sh->beta[i] * sh->k_factor[i] : sh->q_factor[i];
            const float2 d = *(const float2 *)&sh->d[i][j], by_column = *(const float2 *)&sh->k_factor[j];
            const float one = products[at][2 * half] * by * by_column.x * d.x;
            const float two = products[at][2 * half + 1] * by * by_column.y * d.y;

            if (is_k)
                *(float2 *)&sh->m[i][j] = make_float2(one, two);
            if (!is_k) {
                uint32_t parts[PARTS];

                split_pair(parts, one, two);
#pragma unroll
                for (int part = 0; part < PARTS; part++)
                    *(uint32_t *)(unit_of<CHUNK>(a_parts[part], i, at) + lane % 4 * 2) = parts[part];
            }
        }
    }
    __syncthreads();
    if (warp == 0)
        solve_columns<0>(sh->m, x, n);
    else if (warp == 1)
        solve_columns<32>(sh->m, x, n);
}

/* ---- rows of S through a chunk ----------------------------------------------------------------------------------------- */

/* Each warp has 16 rows of S, and of the transposed T, U and O, as results of matrix instructions, which become operands
 * of the next ones where they are. */

__device__ static inline float *s_at_lane(float *rows) { /* of 16 rows of S: where this lane's squares begin */
    const int lane = (int)threadIdx.x % 32;

    return rows + lane / 4 * DK + lane % 4 * 2;
}
__device__ static inline void load_s(float s[DK / 8][4], float *rows) {
    const float *from = s_at_lane(rows);

#pragma unroll
    for (int i = 0; i < DK / 8; i++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            *(float2 *)&s[i][2 * half] = *(const float2 *)(from + half * 8 * DK + i * 8);
}
__device__ static inline void store_s(float *rows, const float s[DK / 8][4]) {
    float *to = s_at_lane(rows);

#pragma unroll
    for (int i = 0; i < DK / 8; i++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            *(float2 *)(to + half * 8 * DK + i * 8) = *(const float2 *)&s[i][2 * half];
}

/* d += src . tile^T; tile: the rows of q or k. */
template <bool IS_PART>
__device__ static inline void read_state(float d[CHUNK / 8][4], const float src[DK / 8][4], bf16 *tile,
                                         struct wanted wanted) {
    float chain[CHUNK / 8][4] = {}, small[CHUNK / 8][4] = {};

#pragma unroll
    for (int step = 0; step < DK / 16; step++) {
        uint32_t parts[PARTS][4], b[SQUARES][4];

        split_operand(parts, &src[2 * step]);
#pragma unroll
        for (int p = 0; p < SQUARES; p++)
            if (is_wanted<IS_PART>(wanted, p))
                load_rows<DK>(b[p], tile, p, step);
        mma_pairs<SQUARES, IS_PART>(small, parts[2], b, wanted);
        mma_pairs<SQUARES, IS_PART>(small, parts[1], b, wanted);
        mma_pairs<SQUARES, IS_PART>(chain, parts[0], b, wanted);
        if (step % CHAIN == CHAIN - 1) {
            add<CHUNK / 8>(d, chain);
            memset(chain, 0, sizeof chain);
        }
    }
    add<CHUNK / 8>(d, small);
}

/* chain + small += src . tile^T of the columns 16 STEP to 16 STEP + 15 of a tile that is zero above the diagonal. */
template <int STEP, bool IS_PART>
__device__ static inline void mma_lower_step(float chain[CHUNK / 8][4], float small[CHUNK / 8][4],
                                             const float src[CHUNK / 8][4], bf16 tile[PARTS][CHUNK * CHUNK],
                                             struct wanted wanted) {
    constexpr int PAIRS = SQUARES - STEP;
    uint32_t parts[PARTS][4], b[PAIRS][4];

    if (IS_PART && STEP >= wanted.end)
        return;
    split_operand(parts, &src[2 * STEP]);
#pragma unroll
    for (int of_tile = PARTS - 1; of_tile >= 0; of_tile--) {
#pragma unroll
        for (int p = 0; p < PAIRS; p++)
            if (is_wanted<IS_PART>(wanted, STEP + p))
                load_rows<CHUNK>(b[p], tile[of_tile], STEP + p, STEP);
#pragma unroll
        for (int of_src = PARTS - 1 - of_tile; of_src >= 0; of_src--) /* the others are smaller than f32 sees */
            mma_pairs<PAIRS, IS_PART, STEP>(&(of_tile + of_src == 0 ? chain : small)[2 * STEP], parts[of_src], b,
                                            wanted);
    }
}
/* d += src . tile^T */
template <bool IS_PART>
__device__ static inline void mma_lower(float d[CHUNK / 8][4], const float src[CHUNK / 8][4],
                                        bf16 tile[PARTS][CHUNK * CHUNK], struct wanted wanted) {
    float chain[CHUNK / 8][4] = {}, small[CHUNK / 8][4] = {};

    static_assert(CHUNK == CHAIN * 16 && SQUARES == 4, "a chain");
    mma_lower_step<0, IS_PART>(chain, small, src, tile, wanted);
    mma_lower_step<1, IS_PART>(chain, small, src, tile, wanted);
    mma_lower_step<2, IS_PART>(chain, small, src, tile, wanted);
    mma_lower_step<3, IS_PART>(chain, small, src, tile, wanted);
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

/* Where this lane meets two squares of v or o: rows of the chunk by the warp's 16 columns. */
template <int VALUES> __device__ static inline bf16 *values_at(struct stage<VALUES> *stage, int p) {
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;

    return unit_of<VALUES>(stage->v, p * 16 + lane / 16 * 8 + lane % 8, warp * 2 + lane / 8 % 2);
}

/* u: zeros, then U^T of the warp's columns, from t = S K^T, which is lost; IS_PART: of the squares that are wanted. */
template <bool IS_PART, int VALUES>
__device__ static inline void chunk_u(struct stage<VALUES> *stage, float t[CHUNK / 8][4], float u[CHUNK / 8][4],
                                      struct wanted wanted) {
    const int lane = (int)threadIdx.x % 32;
    const struct row_factors *by = &stage->factors;

#pragma unroll
    for (int p = 0; p < SQUARES; p++) {
        uint32_t v[4];

        if (!is_wanted<IS_PART>(wanted, p))
            continue;
        ldmatrix_x4_trans(v, values_at(stage, p));
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
    mma_lower<IS_PART>(u, t, stage->x, wanted);
}

/* v <- o, rounded; IS_PART: of the squares that are wanted. */
template <bool IS_PART, int VALUES>
__device__ static inline void chunk_o(struct stage<VALUES> *stage, const float s[DK / 8][4],
                                      const float u[CHUNK / 8][4], struct wanted wanted) {
    float o[CHUNK / 8][4] = {};

    read_state<IS_PART>(o, s, stage->q, wanted);
    scale_columns(o, stage->factors.query);
    mma_lower<IS_PART>(o, u, stage->a, wanted);
#pragma unroll
    for (int p = 0; p < SQUARES; p++) {
        const uint32_t rounded[4] = {pack_bf16(o[2 * p][0], o[2 * p][1]), pack_bf16(o[2 * p][2], o[2 * p][3]),
                                     pack_bf16(o[2 * p + 1][0], o[2 * p + 1][1]),
                                     pack_bf16(o[2 * p + 1][2], o[2 * p + 1][3])};

        if (is_wanted<IS_PART>(wanted, p))
            stmatrix_x4_trans(values_at(stage, p), rounded);
    }
}

/* S <- decay S + U^T K, of a chunk that has all its rows. u is lost. */
template <int VALUES>
__device__ static inline void chunk_s(struct stage<VALUES> *stage, float s[DK / 8][4], float u[CHUNK / 8][4]) {
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
            mma_pairs<PAIRS, false>(small, parts[step][2], b, {});
            mma_pairs<PAIRS, false>(small, parts[step][1], b, {});
            mma_pairs<PAIRS, false>(chain, parts[step][0], b, {});
        }
        add<2 * PAIRS>(chain, small);
#pragma unroll
        for (int i = 0; i < 2 * PAIRS; i++)
#pragma unroll
            for (int c = 0; c < 4; c++)
                s[2 * first + i][c] = fmaf(by->decay, s[2 * first + i][c], chain[i][c]);
    }
}
