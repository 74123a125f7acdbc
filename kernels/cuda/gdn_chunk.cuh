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

/* ---- tiles in shared memory ----------------------------------------------------------------------------------------- */

/* 16-byte unit u of row r of a tile of WIDTH columns lies at u ^ (r & 7): reads of 8 rows meet 8 banks of 16 bytes. */
template <int WIDTH> __device__ static inline bf16 *unit_of(bf16 *tile, int r, int u) {
    return tile + r * WIDTH + (u ^ (r & 7)) * 8;
}

/* Where a lane finds rows of a tile, as B operands of d += a . tile^T: rows 16 p to 16 p + 15 are 16 columns of d, columns
 * 16 step to 16 step + 15 are summed over, and lie at this address ^ 32 step. A row begins at a multiple of its bytes. */
template <int WIDTH> __device__ static inline unsigned rows_at(bf16 *tile, int p) {
    const int lane = (int)threadIdx.x % 32;

    return shared_address(unit_of<WIDTH>(tile, p * 16 + lane / 16 * 8 + lane % 8, lane / 8 % 2));
}
template <int WIDTH> __device__ static inline void load_rows(uint32_t b[4], bf16 *tile, int p, int step) {
    ldmatrix_x4(b, rows_at<WIDTH>(tile, p) ^ (unsigned)(step * 32));
}
/* Columns of a tile, as B operands of d += a . tile: columns 16 p to 16 p + 15 are 16 columns of d, and lie at ^ 32 p. */
template <int WIDTH> __device__ static inline unsigned columns_at(bf16 *tile, int step) {
    const int lane = (int)threadIdx.x % 32;

    return shared_address(unit_of<WIDTH>(tile, step * 16 + lane / 8 % 2 * 8 + lane % 8, lane / 16));
}
template <int WIDTH> __device__ static inline void load_columns(uint32_t b[4], bf16 *tile, int p, int step) {
    ldmatrix_x4_trans(b, columns_at<WIDTH>(tile, step) ^ (unsigned)(p * 32));
}

__device__ static inline void split_pair(uint32_t parts[PARTS], float a, float b) {
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        parts[part] = pack_bf16(a, b);
        a -= pair_of(parts[part]).x;
        b -= pair_of(parts[part]).y;
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

/* ---- X and A ---------------------------------------------------------------------------------------------------------- */

/* Functions of this part take what is to be shared out, a thread or a warp and how many there are; between two of them that
 * hand on results the CTA meets. n_squares: squares of 16 rows that the chunk has. */
struct system_shared {
    float d[CHUNK][FLOAT_STRIDE], m[CHUNK][FLOAT_STRIDE]; /* on and below the diagonal; d: zeros above, and then X */
    double decay[CHUNK];                                  /* a float, widened once */
    float beta[CHUNK], k_factor[CHUNK], q_factor[CHUNK];
};

/* Of a thread's row of q or k. */
__device__ static inline float squares_of(bf16 *tile, int r) {
    float sum = 0;

#pragma unroll 4
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

/* The factor of a row, if its square is there. */
__device__ static inline void norm_row(struct system_shared *sh, bf16 *tile, int row, int n_squares, bool is_k) {
    if (row < n_squares * 16) {
        const float factor = gdn_l2_factor(squares_of(tile, row));

        (is_k ? sh->k_factor : sh->q_factor)[row] = is_k ? factor : factor * rsqrtf((float)DK);
    }
}

/* d, from decay. A thread has a column, or some rows of one. */
template <int N_THREADS>
__device__ static inline void multiply_decays(struct system_shared *sh, int thread, int n_squares) {
    constexpr int ROWS = CHUNK * CHUNK / N_THREADS;
    const int column = thread % CHUNK, begin = thread / CHUNK * ROWS, end = min(begin + ROWS, n_squares * 16);
    double decays = 1; /* 64 roundings of f32 would show */

#pragma unroll 4
    for (int i = 0; i < begin; i++)
        if (i > column)
            decays *= sh->decay[i];
#pragma unroll 4
    for (int i = begin; i < end; i++) {
        if (i > column)
            decays *= sh->decay[i];
        sh->d[i][column] = i >= column ? (float)decays : 0;
    }
}

/* Of a row, from d and the norms. */
__device__ static inline void make_factors(const struct system_shared *sh, int row, struct row_factors *factors) {
    const float from_begin = (float)sh->decay[0] * sh->d[row][0];

    factors->beta[row] = sh->beta[row];
    factors->read[row] = sh->beta[row] * from_begin * sh->k_factor[row];
    factors->query[row] = from_begin * sh->q_factor[row];
    factors->write[row] = sh->d[CHUNK - 1][row] * sh->k_factor[row];
    if (row == CHUNK - 1)
        factors->decay = from_begin;
}

/* Squares on and below the diagonal, row after row: square `at` is in row .x, column .y. */
__device__ static inline int squares_above(int row) {
    return row * (row + 1) / 2;
}
__device__ static inline int2 lower_square(int at) {
    const int row = (at >= 1) + (at >= 3) + (at >= 6);

    static_assert(SQUARES == 4, "as many rows of squares");
    return make_int2(row, at - squares_above(row));
}

/* m, and A from the square's row first_q on: a square is a warp's. */
__device__ static inline void multiply_rows(struct system_shared *sh, bf16 *k, bf16 *q,
                                            bf16 a_parts[PARTS][CHUNK * CHUNK], int warp, int n_warps, int first_q,
                                            int n_squares) {
    const int lane = (int)threadIdx.x % 32, n_k = squares_above(n_squares), n = 2 * n_k - squares_above(first_q);

#pragma unroll 1
    for (int at = warp; at < n; at += n_warps) {
        const bool is_k = at < n_k;
        const int2 square = lower_square(is_k ? at : at - n_k + squares_above(first_q));
        const unsigned a_at = shared_address(unit_of<DK>(is_k ? k : q, square.x * 16 + lane % 16, lane / 16));
        const unsigned b_at = rows_at<DK>(k, square.y);
        float products[2][4] = {}, chain[2][4] = {};

#pragma unroll
        for (int step = 0; step < DK / 16; step++) {
            uint32_t a[4], b[4];

            ldmatrix_x4(a, a_at ^ (unsigned)(step * 32));
            ldmatrix_x4(b, b_at ^ (unsigned)(step * 32));
            mma_bf16(chain[0], a, b[0], b[1]);
            mma_bf16(chain[1], a, b[2], b[3]);
            if (step % CHAIN == CHAIN - 1) {
                add<2>(products, chain);
                memset(chain, 0, sizeof chain);
            }
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int i = square.x * 16 + half * 8 + lane / 4;
            const float by = is_k ? sh->beta[i] * sh->k_factor[i] : sh->q_factor[i];

#pragma unroll
            for (int side = 0; side < 2; side++) {
                const int unit = square.y * 2 + side, j = unit * 8 + lane % 4 * 2;
                const float2 d = *(const float2 *)&sh->d[i][j], by_column = *(const float2 *)&sh->k_factor[j];
                const float one = products[side][2 * half] * by * by_column.x * d.x;
                const float two = products[side][2 * half + 1] * by * by_column.y * d.y;

                if (is_k) {
                    *(float2 *)&sh->m[i][j] = make_float2(one, two);
                } else {
                    uint32_t parts[PARTS];

                    split_pair(parts, one, two);
#pragma unroll
                    for (int part = 0; part < PARTS; part++)
                        *(uint32_t *)(unit_of<CHUNK>(a_parts[part], i, unit) + lane % 4 * 2) = parts[part];
                }
            }
        }
    }
}

/* X in the place of d, (I + M) x = e: 32 columns from `first` on by a warp, square after square of rows. Row i sums up over
 * columns c in four sums, by c mod 4. */
__device__ static inline void solve_columns(struct system_shared *sh, int first, int n_squares) {
    const int j = first + (int)threadIdx.x % 32;

#pragma unroll 1
    for (int i0 = first; i0 < n_squares * 16; i0 += 16) {
        float sum[16][4], x[16];

#pragma unroll
        for (int r = 0; r < 16; r++) {
            sum[r][0] = i0 + r == j ? 1 : 0;
            sum[r][1] = sum[r][2] = sum[r][3] = 0;
        }
#pragma unroll 1
        for (int c = first; c < i0; c += 4) { /* squares before the diagonal */
            float before[4];

#pragma unroll
            for (int e = 0; e < 4; e++)
                before[e] = sh->d[c + e][j];
#pragma unroll
            for (int r = 0; r < 16; r++) {
                const float4 m = *(const float4 *)&sh->m[i0 + r][c];

                sum[r][0] = fmaf(-m.x, before[0], sum[r][0]);
                sum[r][1] = fmaf(-m.y, before[1], sum[r][1]);
                sum[r][2] = fmaf(-m.z, before[2], sum[r][2]);
                sum[r][3] = fmaf(-m.w, before[3], sum[r][3]);
            }
        }
#pragma unroll
        for (int r = 0; r < 16; r++) {
#pragma unroll
            for (int c = 0; c < r; c += 4) {
                const float4 m = *(const float4 *)&sh->m[i0 + r][i0 + c];

                sum[r][0] = fmaf(-m.x, x[c], sum[r][0]);
                if (c + 1 < r)
                    sum[r][1] = fmaf(-m.y, x[c + 1], sum[r][1]);
                if (c + 2 < r)
                    sum[r][2] = fmaf(-m.z, x[c + 2], sum[r][2]);
                if (c + 3 < r)
                    sum[r][3] = fmaf(-m.w, x[c + 3], sum[r][3]);
            }
            x[r] = (sum[r][0] + sum[r][1]) + (sum[r][2] + sum[r][3]);
            sh->d[i0 + r][j] = x[r];
        }
    }
}

/* The parts of X. */
__device__ static inline void split_x(const struct system_shared *sh, bf16 x_parts[PARTS][CHUNK * CHUNK], int thread,
                                      int n_threads, int n_squares) {
#pragma unroll 1
    for (int at = thread; at < squares_above(n_squares) * 128; at += n_threads) {
        const int2 square = lower_square(at / 128);
        const int i = square.x * 16 + at % 128 / 8, j = square.y * 16 + at % 8 * 2;
        const float2 x = *(const float2 *)&sh->d[i][j];
        uint32_t parts[PARTS];

        split_pair(parts, x.x, x.y);
#pragma unroll
        for (int part = 0; part < PARTS; part++)
            *(uint32_t *)(unit_of<CHUNK>(x_parts[part], i, j / 8) + j % 8) = parts[part];
    }
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

/* Where this lane meets two squares of v or o: rows of the chunk by the warp's 16 columns. */
template <int VALUES> __device__ static inline bf16 *values_at(bf16 *v, int p) {
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;

    return unit_of<VALUES>(v, p * 16 + lane / 16 * 8 + lane % 8, warp * 2 + lane / 8 % 2);
}
/* Two squares of o, rounded, take the place of v's. */
template <int VALUES> __device__ static inline void store_values(bf16 *v, int p, const float o[2][4]) {
    const uint32_t rounded[4] = {pack_bf16(o[0][0], o[0][1]), pack_bf16(o[0][2], o[0][3]), pack_bf16(o[1][0], o[1][1]),
                                 pack_bf16(o[1][2], o[1][3])};

    stmatrix_x4_trans(values_at<VALUES>(v, p), rounded);
}
