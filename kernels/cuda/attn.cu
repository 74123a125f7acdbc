/* attn: paged attention. A row reads exactly the keys it sees: pages outside its window may be gone, and what lies in a
 * page beyond the seq's length may be anything, NaN included; keys that no row of a tile sees are read as zeros.
 *
 * A tile is 64 q rows: the query heads of one kv head, over consecutive rows of one seg. A block is a page of keys, a span
 * the blocks of [k * SPAN_TOKENS, (k + 1) * SPAN_TOKENS); a draft's own block rows are one more span after all others. A
 * block yields (max, sum, output) from its own keys alone. Blocks are merged in order into their span, spans in order into
 * the row's result, always by merge() and fold(): by a CTA that runs through all of them, or, where rows are few, by
 * `combine` from what CTAs have left that took a block or a span each. So the bits do not depend on who took what. */
#include "kv.cuh"

#include <errno.h>

enum {
    TILE = 64, /* q rows */
    THREADS = 128,
    KEYS = PAGE_TOKENS, /* of a block */
    SPAN_BLOCKS = SPAN_TOKENS / KEYS,
    SLICE = 32,            /* dimensions of V at a time: four chains of matrix instructions, 16 registers */
    CTAS_PER_MP = 2,       /* that fit, by registers and shared memory */
    COMBINED_AT_ONCE = 32, /* rows */

    /* Who takes what. A CTA is reckoned to need 5 us for a block alone and 16 times as long for a span, whatever runs beside
     * it, and 264 CTAs run at a time: so blocks are done sooner than spans while they are fewer than 13 * 264, which for one
     * tile is 850 at 4 kv heads and 1,700 at 2. But a row leaves (head_dim + 2) floats per head and block, written once and
     * read once: 25 KB at 24 heads (27B), 16.5 KB at 16 (9B, 4B), 8 KB at 8 (0.8B), beside 256 KB of K and V (0.8B: 128 KB).
     * For one row that is a tenth and does not matter, but `combine` waits for the L2 cache once for every 16 blocks: up to
     * 512 of them. 16 rows leave as much as there is of K and V or more, so it has to stay in half of an L2 cache of 50 MB: 66
     * blocks at the 27B, 99 at 9B and 4B, 198 at the 0.8B. */
    CUT_ROWS_MAX = 256,                      /* tiles of more rows are CTAs enough */
    CUT_BLOCKS_MAX = 512,                    /* of a seg */
    CUT_BLOCKS_BYTES_MAX = 25 * 1024 * 1024, /* of a batch in which all rows leave as much as the seg's */
    PARTS_BYTES_MAX = 256 * 1024 * 1024,     /* a seg whose parts are beyond it is one CTA's work per tile */
};

struct attn_op {
    struct attn_args args;
    struct batch batch;
    struct kv_view kv;
    size_t layer_bytes; /* of a page */
    int group;          /* query heads per kv head */
    int n_tiles_max;
    int n_parts_max, n_block_parts_max; /* of all heads each: in `parts`; of a batch that is cut into blocks */
    float *totals; /* [n_rows_max, heads, head_dim + 2]: max, sum, output, of what is not cut; kept between runs */
    float *parts;  /* [n_parts_max, heads, head_dim + 2] of pieces; V's scale is still missing */
};

/* Context keys are positions; block keys are rows of the seg. [lo, hi), empty if lo >= hi. */
struct keys {
    int lo, hi;
};

__device__ static inline struct keys context_keys(const struct attn_op &op, int seg, int j) {
    const struct attn_args *a = &op.args;
    int start = op.batch.seg_pos[seg], pos = start + j;
    struct keys keys = {0, a->block_k != NULL ? start : pos + 1};

    if (a->block_k != NULL && a->ctl != NULL)
        keys.lo = a->ctl[op.batch.seg_slot[seg]].draft_valid_from;
    if (a->window > 0)
        keys.lo = max(keys.lo, pos - (a->window - 1));
    return keys;
}

__device__ static inline struct keys block_keys(const struct attn_op &op, int seg, int j) {
    const struct attn_args *a = &op.args;
    struct keys keys = {0, a->block_causal ? j + 1 : op.batch.seg_row[seg + 1] - op.batch.seg_row[seg]};

    if (a->window > 0)
        keys.lo = max(0, j - (a->window - 1));
    return keys;
}

/* ---- parts -------------------------------------------------------------------------------------------------------- */

struct __align__(8) part { /* of one row and head; sum 0: no key seen, and the largest is -INFINITY */
    float max, sum;
};
struct weights { /* of two parts in their merger; one of them is 1 */
    float a, b;
};
constexpr struct part NO_PART = {-INFINITY, 0};
constexpr float NO_OUT = -0.0f; /* what is added to it keeps its bits */

__device__ static inline struct weights merge(struct part *total, struct part part) {
    const bool has_keys =
        part.sum != 0; /* else expf(0) and expf(-INFINITY): selected, for a branch would hold up the next */
    const float m = fmaxf(total->max, part.max);
    const struct weights w = {expf(has_keys ? total->max - m : 0), expf(has_keys ? part.max - m : -INFINITY)};

    total->max = m;
    total->sum = fmaf(total->sum, w.a, part.sum * w.b);
    return w;
}
/* An output element; a part that weighs nothing may hold anything. */
__device__ static inline float fold(float total, float part, struct weights w) {
    return w.b == 0 ? total : fmaf(total, w.a, part * w.b);
}

/* Of elements i and i + 1, if there are gates. */
__device__ static inline float2 gates_at(const struct attn_op &op, int row, int head, int i) {
    const struct attn_args *a = &op.args;
    size_t at = (size_t)row * (size_t)a->gate_stride + (size_t)head * (size_t)a->gate_head_stride + (size_t)i;

    return a->gate != NULL ? make_float2(bf16_load(a->gate, at), bf16_load(a->gate, at + 1)) : make_float2(0, 0);
}

/* Writes elements i and i + 1. */
__device__ static inline void finish(const struct attn_op &op, int row, int head, int i, float2 out, float sum,
                                     float2 gates) {
    const struct attn_args *a = &op.args;
    size_t at = ((size_t)row * (size_t)a->n_heads + (size_t)head) * (size_t)a->head_dim + (size_t)i;
    float2 y = sum > 0 ? make_float2(out.x / sum, out.y / sum) : make_float2(0, 0);

    if (a->gate != NULL)
        y = {y.x * sigmoid(gates.x), y.y * sigmoid(gates.y)};
    *(uint32_t *)((bf16 *)a->out + at) = pack_bf16(y.x, y.y);
}

/* ---- who takes what ------------------------------------------------------------------------------------------------ */

/* How a seg's keys are divided among CTAs. attn and combine come to the same cut from the same numbers. */
struct cut {
    int size;     /* keys of a piece of the context: KEYS or SPAN_TOKENS; 0: one CTA per tile runs through everything */
    int first, n; /* the context's pieces are [first, first + n); the seg's own block rows are one more piece */
    int at;       /* where in `parts` the first row's part of the first piece is; rows follow each other, then pieces */
};

__device__ static inline int cut_pieces(const struct attn_op &op, struct cut cut) {
    return cut.size == 0 ? 1 : cut.n + (op.args.block_k != NULL);
}

/* What a seg would be cut into if its parts had room; n_all rows in the batch. */
__device__ static inline struct cut cut_wanted(const struct attn_op &op, int seg, int n_rows, int n_all) {
    const struct attn_spans *spans = op.args.spans;
    struct cut cut = {};
    struct keys keys;

    if (n_all > CUT_ROWS_MAX || (spans != NULL && (spans->begin != 0 || spans->end != ATTN_SPANS_END)))
        return cut;
    keys = {context_keys(op, seg, 0).lo, context_keys(op, seg, n_rows - 1).hi};
    cut.size = SPAN_TOKENS;
    if (keys.lo < keys.hi) {
        int n_blocks = (keys.hi - 1) / KEYS - keys.lo / KEYS + 1;

        if (n_blocks <= CUT_BLOCKS_MAX && n_blocks * n_all <= op.n_block_parts_max)
            cut.size = KEYS;
        cut.first = keys.lo / cut.size;
        cut.n = (keys.hi - 1) / cut.size - cut.first + 1;
    }
    return cut;
}

__device__ static inline int sum_of_lanes_before(int v) {
    int sum = v;

    for (int m = 1; m < 32; m *= 2) {
        int before = __shfl_up_sync(0xffffffffu, sum, m);

        if ((int)threadIdx.x % 32 >= m)
            sum += before;
    }
    return sum - v;
}

struct lane_seg { /* of 32 segs, one in each lane; beyond the last one n_rows is 0 */
    int row, n_rows;
    struct cut cut;
};

/* `before`: parts of all segs before these, and then of those before the next 32. */
__device__ static inline struct lane_seg lane_seg(const struct attn_op &op, int seg, int *before) {
    const int n_all = *op.batch.n_rows;
    struct lane_seg l = {};
    int n_parts;

    if (seg < *op.batch.n_segs) {
        l.row = op.batch.seg_row[seg];
        l.n_rows = op.batch.seg_row[seg + 1] - l.row;
        l.cut = cut_wanted(op, seg, l.n_rows, n_all);
    }
    n_parts = l.cut.size == 0 ? 0 : cut_pieces(op, l.cut) * l.n_rows;
    l.cut.at = *before + sum_of_lanes_before(n_parts);
    *before = __shfl_sync(0xffffffffu, l.cut.at + n_parts, 31);
    if (l.cut.at + n_parts > op.n_parts_max)
        l.cut.size = 0;
    return l;
}

__device__ static inline struct lane_seg seg_of_lane(struct lane_seg l, int lane) {
    l.row = __shfl_sync(0xffffffffu, l.row, lane);
    l.n_rows = __shfl_sync(0xffffffffu, l.n_rows, lane);
    l.cut.size = __shfl_sync(0xffffffffu, l.cut.size, lane);
    l.cut.first = __shfl_sync(0xffffffffu, l.cut.first, lane);
    l.cut.n = __shfl_sync(0xffffffffu, l.cut.n, lane);
    l.cut.at = __shfl_sync(0xffffffffu, l.cut.at, lane);
    return l;
}

struct work { /* what a CTA does at a time */
    int seg, row, n_rows;
    int tile, kv_head;
    int piece; /* of cut_pieces() */
    struct cut cut;
};

/* Every thread of a CTA calls it. False: there is no such item. */
__device__ static inline bool find_work(const struct attn_op &op, int item, struct work *ret_work) {
    const int lane = (int)threadIdx.x % 32, n_segs = *op.batch.n_segs;

    for (int from = 0, before = 0; from < n_segs; from += 32) {
        struct lane_seg l = lane_seg(op, from + lane, &before);
        int n_items = (l.n_rows * op.group + TILE - 1) / TILE * cut_pieces(op, l.cut) * op.args.n_kv_heads;
        int first = sum_of_lanes_before(n_items);
        unsigned owners = __ballot_sync(0xffffffffu, item < first + n_items);

        if (owners != 0) {
            int owner = __ffs((int)owners) - 1, i = item - __shfl_sync(0xffffffffu, first, owner), n_tiles, n_pieces;

            l = seg_of_lane(l, owner);
            n_tiles = (l.n_rows * op.group + TILE - 1) / TILE;
            n_pieces = cut_pieces(op, l.cut);
            *ret_work = {.seg = from + owner,
                         .row = l.row,
                         .n_rows = l.n_rows,
                         .tile = n_tiles - 1 - i % n_tiles, /* a prompt's last has most keys, and comes first */
                         .kv_head = i / n_tiles / n_pieces,
                         .piece = i / n_tiles % n_pieces,
                         .cut = l.cut};
            return true;
        }
        item -= __shfl_sync(0xffffffffu, first + n_items, 31);
    }
    return false;
}

/* ---- one tile ------------------------------------------------------------------------------------------------------ */

/* 16-byte unit u of row r of a tile of Q, K or V lies at u ^ (r & 7): reads of 8 rows meet 8 banks of 16 bytes. */
template <int D> __device__ static inline int swizzled(int r, int u) {
    return r * D * 2 + (u ^ (r & 7)) * 16;
}
/* The same with u + step, from a lane's swizzled(r, u) with u < 2 and an even step. Written so that what differs from step to
 * step is known to the compiler. */
__device__ static inline int swizzled_step(int at, int step) {
    return (at ^ (step % 8 * 16)) + step / 8 * 128;
}

/* A thread brings unit i % (D / 8) of every ROWS_APART<D>-th row. */
template <int D> constexpr int ROWS_APART = THREADS / (D / 8);

/* KEYS rows; those outside of [seen.lo, seen.hi) become zeros. */
template <int D> __device__ static inline void load_plain(const char *src, size_t stride, struct keys seen, char *dst) {
    const int u = (int)threadIdx.x % (D / 8), first = (int)threadIdx.x / (D / 8);
    const char *row = src + (size_t)first * stride + (size_t)u * 16;

#pragma unroll
    for (int i = 0; i < KEYS / ROWS_APART<D>; i++, row += ROWS_APART<D> * stride) {
        const int r = first + i * ROWS_APART<D>;
        const bool is_seen = r >= seen.lo && r < seen.hi;

        copy_async(dst + swizzled<D>(r, u), is_seen ? row : src, is_seen ? 16 : 0);
    }
}
template <int D, enum dtype DTYPE>
__device__ static inline void load_widened(const char *src, size_t stride, struct keys seen, char *dst) {
    enum { N = 4 }; /* loads on their way at a time */
    const int u = (int)threadIdx.x % (D / 8), first = (int)threadIdx.x / (D / 8);

    for (int from = first; from < KEYS; from += N * ROWS_APART<D>) {
        uint4 v[N];

#pragma unroll
        for (int i = 0; i < N; i++) /* the page is there, whoever sees the row */
            v[i] = kv_load8(DTYPE, src + (size_t)(from + i * ROWS_APART<D>)*stride, u * 8);
#pragma unroll
        for (int i = 0; i < N; i++) {
            int r = from + i * ROWS_APART<D>;

            *(uint4 *)(dst + swizzled<D>(r, u)) = r >= seen.lo && r < seen.hi ? v[i] : make_uint4(0, 0, 0, 0);
        }
    }
}

struct source {       /* of the keys of a piece */
    int row, kv_head; /* the seg's first row */
    bool is_own;      /* the seg's own block rows */
    struct keys seen; /* by any row of the tile */
};

/* Keys [base, base + KEYS) of one half; a page of the context is named. */
template <int D>
__device__ static inline void load_block(const struct attn_op &op, const struct source &from, enum kv_half half,
                                         int base, int page, char *dst) {
    const struct attn_args *a = &op.args;
    const struct keys seen = {from.seen.lo - base, from.seen.hi - base};
    const char *src;

    if (from.is_own) {
        src = (const char *)(half == KV_K ? a->block_k : a->block_v) +
              ((size_t)(from.row + base) * (size_t)a->n_kv_heads + (size_t)from.kv_head) * D * 2;
        load_plain<D>(src, (size_t)a->n_kv_heads * D * 2, seen, dst);
    } else {
        src = kv_rows(op.kv, op.layer_bytes, page, a->layer, half, from.kv_head);
        if (op.kv.dtype == DTYPE_BF16)
            load_plain<D>(src, D * 2, seen, dst);
        else if (op.kv.dtype == DTYPE_E4M3)
            load_widened<D, DTYPE_E4M3>(src, D, seen, dst);
        else if (op.kv.dtype == DTYPE_F16)
            load_widened<D, DTYPE_F16>(src, D * 2, seen, dst);
        else
            load_widened<D, DTYPE_F32>(src, D * 4, seen, dst);
    }
}

/* q rows beyond the last are zeros. */
template <int D> __device__ static inline void load_q(const struct attn_op &op, const struct work &work, char *dst) {
    const int u = (int)threadIdx.x % (D / 8), first = (int)threadIdx.x / (D / 8), n_q = work.n_rows * op.group;
    const bf16 *src = (const bf16 *)op.args.q + u * 8;

#pragma unroll
    for (int i = 0; i < TILE / ROWS_APART<D>; i++) {
        int r = first + i * ROWS_APART<D>, q = min(work.tile * TILE + r, n_q - 1);
        size_t row = (size_t)(work.row + q / op.group), head = (size_t)(work.kv_head * op.group + q % op.group);

        copy_async(dst + swizzled<D>(r, u), src + (row * (size_t)op.args.n_heads + head) * D,
                   work.tile * TILE + r < n_q ? 16 : 0);
    }
}

/* A warp's 16 q rows by the keys of a block. */
template <int D>
__device__ static inline void scores(char *q_tile, int first_row, char *k_block, float s[KEYS / 8][4]) {
    const int lane = (int)threadIdx.x % 32; /* lanes name rows of four 8x8 matrices */
    const int q_at = swizzled<D>(first_row + lane % 16, lane / 16);
    const int k_at = swizzled<D>(lane / 16 * 8 + lane % 8, lane / 8 % 2);

#pragma unroll
    for (int step = 0; step < D / 16; step++) {
        uint32_t q[4];

        ldmatrix_x4(q, q_tile + swizzled_step(q_at, step * 2));
#pragma unroll
        for (int n = 0; n < KEYS / 16; n++) {
            uint32_t b[4];

            ldmatrix_x4(b, k_block + n * 16 * D * 2 + swizzled_step(k_at, step * 2));
            mma_bf16(s[2 * n], q, b[0], b[1]);
            mma_bf16(s[2 * n + 1], q, b[2], b[3]);
        }
    }
}

/* One row's scores, [n][2 * i + c] of this thread, become weights of the keys it sees, relative to the largest. */
__device__ static inline struct part weigh(float s[KEYS / 8][4], int i, int base, struct keys see, float scale) {
    float m = -INFINITY, sum = 0, from;

#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
            int key = base + n * 8 + (int)threadIdx.x % 4 * 2 + c;
            float *v = &s[n][2 * i + c];

            *v = key >= see.lo && key < see.hi ? *v * scale : -INFINITY;
            m = fmaxf(m, *v);
        }
    m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
    m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
    from = m == -INFINITY ? 0 : m; /* no key seen: all weights become 0 */
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
            float *v = &s[n][2 * i + c];

            *v = expf(*v - from);
            sum += *v;
        }
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    return (struct part){m, sum};
}

struct weighed { /* P of a block as A operands: two bf16 each, so nothing is rounded below 16 bits before the sum */
    uint32_t high[KEYS / 16][4], low[KEYS / 16][4];
};

/* P V of a block from nothing, slice by slice from `first` on, each merged into the span's output at once. */
template <int D, int N_SLICES>
__device__ static inline void fold_values(char *v_block, int first, const struct weighed &p, const struct weights w[2],
                                          float out[D / 8][4]) {
    const int lane = (int)threadIdx.x % 32;
    const int v_at = swizzled_step(swizzled<D>(lane / 8 % 2 * 8 + lane % 8, lane / 16), first * (SLICE / 8));

#pragma unroll
    for (int slice = 0; slice < N_SLICES; slice++) {
        float pv[SLICE / 8][4] = {};

#pragma unroll
        for (int step = 0; step < KEYS / 16; step++) {
            uint32_t b[SLICE / 16][4];

#pragma unroll
            for (int n = 0; n < SLICE / 16; n++)
                ldmatrix_x4_trans(b[n], v_block + step * 16 * D * 2 + swizzled_step(v_at, slice * (SLICE / 8) + 2 * n));
#pragma unroll
            for (int n = 0; n < SLICE / 8; n++)
                mma_bf16(pv[n], p.low[step], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
#pragma unroll
            for (int n = 0; n < SLICE / 8; n++)
                mma_bf16(pv[n], p.high[step], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
        }
#pragma unroll
        for (int n = 0; n < SLICE / 8; n++)
#pragma unroll
            for (int c = 0; c < 4; c++) {
                float *o = &out[slice * (SLICE / 8) + n][c];

                *o = fold(*o, pv[n][c], w[c / 2]);
            }
    }
}

/* A q row's part of the piece, or its total: max, sum, output. */
template <int D> __device__ static inline float *result_of(const struct attn_op &op, const struct work &work, int q) {
    int row = q / op.group + (work.cut.size == 0 ? work.row : work.cut.at + work.piece * work.n_rows);
    size_t head = (size_t)(work.kv_head * op.group + q % op.group);

    return (work.cut.size == 0 ? op.totals : op.parts) + ((size_t)row * (size_t)op.args.n_heads + head) * (D + 2);
}

/* The kernel before has ended; the next may begin. Again and again: then it is no wait. */
__device__ static inline void meet_previous(void) {
    wait_for_previous();
    may_launch_next();
}

/* Does a piece for one tile, or all there is to do. Keys that the kernel before cannot have written come before the wait for
 * it. A warp has 16 of the tile's q rows; where there are no more than that, as for a single row, all warps weigh the same
 * keys and each takes a quarter of the dimensions of V. */
template <int D>
__device__ static inline void attend(const struct attn_op &op, const struct work &work, char *q_tile, char *k_block,
                                     char *v_block) {
    const struct attn_args *a = &op.args;
    const struct cut cut = work.cut;
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, q0 = work.tile * TILE;
    const int slot = op.batch.seg_slot[work.seg], n_q = work.n_rows * op.group;
    const bool is_shared = D >= 4 * SLICE && n_q - q0 <= 16;
    const int warp_row = is_shared ? 0 : warp * 16, first_q = q0 + warp_row + lane / 4;
    const int first_slice = is_shared ? warp * (D / SLICE / 4) : 0, first_d = first_slice * SLICE + lane % 4 * 2;
    const int n_out = is_shared ? D / 32 : D / 8; /* of `out`: from first_d on, in steps of 8 */
    const int first_row = q0 / op.group, last_row = (min(q0 + TILE, n_q) - 1) / op.group; /* of the seg */
    const int size = cut.size != 0 ? cut.size : SPAN_TOKENS;
    const struct keys context = {context_keys(op, work.seg, first_row).lo, context_keys(op, work.seg, last_row).hi};
    const bool has_rows = q0 + warp_row < n_q, has_own = a->block_k != NULL;
    int piece = cut.first + work.piece, piece_end = piece + 1, own_piece = cut.first + cut.n;
    struct part total[2] = {NO_PART, NO_PART};
    bool has_q = false;

    if (cut.size == 0) {
        meet_previous();

        const struct attn_spans spans = a->spans != NULL ? *a->spans : (struct attn_spans){0, ATTN_SPANS_END};
        const bool is_last = spans.end == ATTN_SPANS_END;

        piece = spans.begin;
        own_piece = is_last ? max(piece, (context.hi + SPAN_TOKENS - 1) / SPAN_TOKENS) : ATTN_SPANS_END;
        piece_end = is_last ? own_piece + has_own : spans.end;
        for (int i = 0; i < 2 && piece > 0; i++) /* what earlier runs have left; the output lies there too */
            if (first_q + i * 8 < n_q)
                total[i] = *(const struct part *)result_of<D>(op, work, first_q + i * 8);
    }

    for (; piece < piece_end; piece++) {
        const bool is_own = piece == own_piece;
        const float scale = (is_own ? 1.0f : op.kv.k_scale[a->layer]) * rsqrtf((float)D);
        struct source source = {
            work.row, work.kv_head, is_own, {max(piece * size, context.lo), min(piece * size + size, context.hi)}};
        struct part part[2] = {NO_PART, NO_PART};
        float out[D / 8][4];
        struct keys see[2]; /* by this thread's two q rows */
        int base, page = 0;

        for (int i = 0; i < 2; i++) {
            int j = min(first_q + i * 8, n_q - 1) / op.group;

            see[i] = is_own ? block_keys(op, work.seg, j) : context_keys(op, work.seg, j);
        }
        if (is_own)
            source.seen = {block_keys(op, work.seg, first_row).lo, block_keys(op, work.seg, last_row).hi};
        if (source.seen.lo >= source.seen.hi)
            continue;
        base = source.seen.lo / KEYS * KEYS;
        if (!is_own)
            page = kv_page_of(op.kv, slot, base);
        if (is_own || min(base + KEYS, source.seen.hi) > op.batch.seg_pos[work.seg])
            meet_previous();
        load_block<D>(op, source, KV_K, base, page, k_block);
        meet_previous();
        if (!has_q)
            load_q<D>(op, work, q_tile);
        has_q = true;
        copy_commit();
        load_block<D>(op, source, KV_V, base, page, v_block);
        copy_commit();
#pragma unroll
        for (int n = 0; n < D / 8; n++)
            out[n][0] = out[n][1] = out[n][2] = out[n][3] = NO_OUT;
        for (; base < source.seen.hi; base += KEYS) {
            const bool has_next = base + KEYS < source.seen.hi;
            float s[KEYS / 8][4] = {};
            struct weights w[2];
            struct weighed p;

            if (has_next && !is_own)
                page = kv_page_of(op.kv, slot, base + KEYS);
            copy_wait<1>();
            __syncthreads();
            if (has_rows)
                scores<D>(q_tile, warp_row, k_block, s);
            __syncthreads();
            if (has_next)
                load_block<D>(op, source, KV_K, base + KEYS, page, k_block);
            copy_commit();
            if (has_rows) {
#pragma unroll
                for (int i = 0; i < 2; i++)
                    w[i] = merge(&part[i], weigh(s, i, base, see[i], scale));
#pragma unroll
                for (int step = 0; step < KEYS / 16; step++)
#pragma unroll
                    for (int j = 0; j < 4; j++)
                        split_bf16(&p.high[step][j], &p.low[step][j], s[2 * step + j / 2][j % 2 * 2],
                                   s[2 * step + j / 2][j % 2 * 2 + 1]);
            }
            copy_wait<1>();
            __syncthreads();
            if (is_shared)
                fold_values < D, D<4 * SLICE ? 1 : D / SLICE / 4>(v_block, first_slice, p, w, out);
            else if (has_rows)
                fold_values<D, D / SLICE>(v_block, 0, p, w, out);
            __syncthreads();
            if (has_next)
                load_block<D>(op, source, KV_V, base + KEYS, page, v_block);
            copy_commit();
        }
        copy_wait<0>();

#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float v_scale = is_own ? 1.0f : op.kv.v_scale[a->layer];
            const bool is_first = total[i].sum == 0;
            float *dst = result_of<D>(op, work, first_q + i * 8);
            struct weights w;

            if (first_q + i * 8 >= n_q)
                continue;
            if (cut.size != 0 && first_d == 0)
                *(struct part *)dst = part[i];
            w = merge(&total[i], part[i]);
#pragma unroll
            for (int n = 0; n < D / 8; n++) { /* only this thread touches the elements */
                float2 *o = (float2 *)(dst + 2 + first_d + n * 8), v = {out[n][2 * i], out[n][2 * i + 1]};

                if (n >= n_out)
                    break;
                if (cut.size == 0) {
                    float2 before = is_first ? make_float2(NO_OUT, NO_OUT) : *o;

                    v = make_float2(fold(before.x, v.x * v_scale, w), fold(before.y, v.y * v_scale, w));
                }
                *o = v;
            }
        }
    }
    if (cut.size != 0)
        return;
    for (int i = 0; i < 2; i++) {
        int q = first_q + i * 8;
        float *src = result_of<D>(op, work, q);

        if (q >= n_q)
            continue;
        if (a->spans != NULL && a->spans->end != ATTN_SPANS_END) {
            if (first_d == 0)
                *(struct part *)src = total[i];
            continue;
        }
        for (int n = 0; n < n_out; n++) {
            int d = first_d + n * 8;
            float2 v = total[i].sum > 0 ? *(const float2 *)(src + 2 + d) : make_float2(0, 0);

            int row = work.row + q / op.group, head = work.kv_head * op.group + q % op.group;

            finish(op, row, head, d, v, total[i].sum, gates_at(op, row, head, d));
        }
    }
}

/* Where pieces are many, a CTA takes one after the other, so that the grid stays small. */
template <int D> __global__ static void __launch_bounds__(THREADS) attn(struct attn_op op) {
    extern __shared__ __align__(128) char smem[];
    __shared__ struct work work; /* registers are short */
    struct work found;

    for (int item = (int)blockIdx.x; find_work(op, item, &found); item += (int)gridDim.x) {
        __syncthreads();
        if (threadIdx.x == 0)
            work = found;
        __syncthreads();
        attend<D>(op, work, smem, smem + TILE * D * 2, smem + (TILE + KEYS) * D * 2);
    }
    meet_previous();
}

/* Merges what the pieces of cut segs have left. A CTA per row and head, two dimensions per thread. A group of pieces, which
 * is the blocks of a span or as many spans, is brought at once: nothing waits for one part before it asks for the next. */
template <int D> __global__ static void __launch_bounds__(D / 2) combine(struct attn_op op) {
    const struct attn_args *a = &op.args;
    const int head = (int)blockIdx.y, lane = (int)threadIdx.x % 32, d = (int)threadIdx.x * 2;

    for (int row = (int)blockIdx.x, n_all = batch_rows(op.batch); row < n_all; row += (int)gridDim.x) {
        const int seg = op.batch.row_seg[row], j = row - op.batch.seg_row[seg];
        const float v_scale = op.kv.v_scale[a->layer];
        const struct keys keys = context_keys(op, seg, j), own = block_keys(op, seg, j);
        struct part total = NO_PART, own_part = NO_PART;
        float2 out = {NO_OUT, NO_OUT}, own_out = {};
        const float *parts; /* of the row, of piece 0 */
        size_t stride;      /* from piece to piece */
        struct weights w;
        struct lane_seg l;
        struct cut cut;
        float2 gates;

        for (int from = 0, before = 0; from <= seg; from += 32)
            l = lane_seg(op, from + lane, &before);
        l = seg_of_lane(l, seg % 32);
        cut = l.cut;
        if (cut.size == 0)
            continue;
        gates = gates_at(op, row, head, d); /* of the rows' projection, two kernels ago */
        meet_previous();
        stride = (size_t)l.n_rows * (size_t)a->n_heads * (D + 2);
        parts = op.parts + ((size_t)(cut.at + j) * (size_t)a->n_heads + (size_t)head) * (D + 2);
        if (a->block_k != NULL && own.lo < own.hi) {
            const float *src = parts + (size_t)cut.n * stride;

            own_part = *(const struct part *)src;
            own_out = *(const float2 *)(src + 2 + d);
        }
        for (int group = keys.lo / cut.size / SPAN_BLOCKS * SPAN_BLOCKS;
             keys.lo < keys.hi && group * cut.size < keys.hi; group += SPAN_BLOCKS) {
            struct part part[SPAN_BLOCKS], span = NO_PART;
            float2 v[SPAN_BLOCKS], span_out = {NO_OUT, NO_OUT};

#pragma unroll
            for (int i = 0; i < SPAN_BLOCKS; i++) {
                int lo = (group + i) * cut.size;
                const float *src = parts + (size_t)(group + i - cut.first) * stride;

                part[i] = NO_PART;
                v[i] = {};
                if (lo < keys.hi && lo + cut.size > keys.lo) { /* else the part may not be there */
                    part[i] = *(const struct part *)src;
                    v[i] = *(const float2 *)(src + 2 + d);
                }
            }
            if (cut.size == KEYS) {
#pragma unroll
                for (int i = 0; i < SPAN_BLOCKS; i++) {
                    w = merge(&span, part[i]);
                    span_out = {fold(span_out.x, v[i].x, w), fold(span_out.y, v[i].y, w)};
                }
                w = merge(&total, span);
                out = {fold(out.x, span_out.x * v_scale, w), fold(out.y, span_out.y * v_scale, w)};
            } else {
#pragma unroll
                for (int i = 0; i < SPAN_BLOCKS; i++) {
                    w = merge(&total, part[i]);
                    out = {fold(out.x, v[i].x * v_scale, w), fold(out.y, v[i].y * v_scale, w)};
                }
            }
        }
        w = merge(&total, own_part);
        out = {fold(out.x, own_out.x, w), fold(out.y, own_out.y, w)};
        finish(op, row, head, d, out, total.sum, gates);
    }
    meet_previous();
}

/* ---- the op ------------------------------------------------------------------------------------------------------- */

template <int D> static void launch_kernels(const struct launch *launch, const struct attn_op *op) {
    const int bytes = (TILE + 2 * KEYS) * D * 2;
    const int n_ctas = max_int(op->n_tiles_max * op->args.n_kv_heads, CTAS_PER_MP * launch->n_multiprocessors);
    const dim3 rows((unsigned)min_int(op->batch.n_rows_max, COMBINED_AT_ONCE), (unsigned)op->args.n_heads);

    cudaFuncSetAttribute(attn<D>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    launch_early(launch->stream, attn<D>, dim3((unsigned)n_ctas), THREADS, bytes, *op);
    launch_early(launch->stream, combine<D>, rows, D / 2, 0, *op);
}

static void launch_attn(const struct launch *launch, const void *args) {
    struct attn_op op = *(const struct attn_op *)args;

    op.totals = (float *)launch->scratch;
    op.parts = op.totals + (size_t)op.batch.n_rows_max * (size_t)op.args.n_heads * (size_t)(op.args.head_dim + 2);
    if (op.args.head_dim == 256)
        launch_kernels<256>(launch, &op);
    else if (op.args.head_dim == 128)
        launch_kernels<128>(launch, &op);
    else
        launch_kernels<64>(launch, &op);
}

/* -ENOTSUP: a head_dim other than 64, 128 and 256. */
int cuda_attn(struct program *program, const struct attn_args *args) {
    struct attn_op op = {};
    const uint64_t n_keys = (uint64_t)args->kv->n_pages_max * PAGE_TOKENS;
    const int n_own = args->block_k != NULL, n_rows = min_int(args->batch->n_rows_max, CUT_ROWS_MAX);
    int n_blocks = min_int(args->kv->n_pages_max, CUT_BLOCKS_MAX);
    size_t bytes; /* of a row's part of a piece, all heads */

    if (args->head_dim <= 0 || args->n_kv_heads <= 0 || args->kv->n_layers <= 0 ||
        args->n_heads % args->n_kv_heads != 0 || args->kv->head_dim != args->head_dim ||
        args->kv->n_kv_heads != args->n_kv_heads)
        return -EINVAL;
    if (args->head_dim != 64 && args->head_dim != 128 && args->head_dim != 256)
        return -ENOTSUP;
    op.args = *args;
    op.batch = *args->batch;
    op.kv = *args->kv;
    op.layer_bytes = args->kv->page_bytes / (size_t)args->kv->n_layers;
    op.group = args->n_heads / args->n_kv_heads;
    op.n_tiles_max = (int)div_ceil((uint64_t)op.batch.n_rows_max * (uint64_t)op.group, TILE) + op.batch.n_segs_max;
    bytes = (size_t)args->n_heads * (size_t)(args->head_dim + 2) * sizeof(float);
    op.n_block_parts_max = CUT_BLOCKS_BYTES_MAX / (int)bytes;
    op.n_parts_max =
        max_int(n_rows * (int)div_ceil(n_keys, SPAN_TOKENS), min_int(n_rows * n_blocks, op.n_block_parts_max)) +
        n_rows * n_own;
    op.n_parts_max = min_int(op.n_parts_max, PARTS_BYTES_MAX / (int)bytes);
    return cuda_program_add(program, launch_attn, &op, sizeof op,
                            ((size_t)op.batch.n_rows_max + (size_t)op.n_parts_max) * bytes);
}
