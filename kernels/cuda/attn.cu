/* attn: paged attention. A row reads exactly the keys it sees: pages outside its window may be gone, and what lies in a
 * page beyond the seq's length may be anything, NaN included; keys that no row of a tile sees are read as zeros.
 *
 * A tile is 64 q rows: the query heads of one kv head, over consecutive rows of one seg. Keys pass in blocks of a page.
 * A span is [k * SPAN_TOKENS, (k + 1) * SPAN_TOKENS) of positions; a draft's own block rows are one more span after all
 * others. Each span yields (max, sum, output) from its own keys alone, and spans are merged in order, either by the CTA
 * that runs through all of them or, where rows are few, by a kernel of its own: by the same function, so by the same bits. */
#include "kv.cuh"

#include <errno.h>

enum {
    TILE = 64, /* q rows */
    THREADS = 128,
    KEYS = PAGE_TOKENS,                  /* of a block */
    SPLIT_BYTES_MAX = 256 * 1024 * 1024, /* of the spans' results; beyond it CTAs run through all spans */
    SPLIT_ROWS_MAX = 256,
};

struct attn_op {
    struct attn_args args;
    struct batch batch;
    struct kv_view kv;
    int group;     /* query heads per kv head */
    int n_spans;   /* that a row may have, the block's included */
    bool is_split; /* a CTA per span */
    int n_tiles_max;
    float
        *parts; /* [rows, heads, is_split ? n_spans : 1, head_dim + 2]: max, sum, output; kept between runs of spans */
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

struct part { /* of one row and head; sum 0: no key seen */
    float max, sum;
};
struct weights { /* of two parts in their merger */
    float a, b;
};

__device__ static inline struct weights merge(struct part *total, struct part span) {
    float m = fmaxf(total->max, span.max);
    struct weights w = {expf(total->max - m), expf(span.max - m)};

    if (span.sum == 0)
        return (struct weights){1, 0};
    if (total->sum == 0) {
        *total = span;
        return (struct weights){0, 1};
    }
    total->max = m;
    total->sum = total->sum * w.a + span.sum * w.b;
    return w;
}
/* An output element; a part that weighs nothing may hold anything. */
__device__ static inline float merge_out(float total, float span, struct weights w) {
    if (w.b == 0)
        return w.a == 1 ? total : total * w.a;
    return w.a == 0 ? span * w.b : total * w.a + span * w.b;
}

__device__ static inline float finish(const struct attn_op &op, int row, int head, int i, float out, float sum) {
    float y = sum > 0 ? out / sum : 0;

    if (op.args.gate != NULL)
        y *= sigmoid(bf16_load(op.args.gate, (size_t)row * (size_t)op.args.gate_stride +
                                                 (size_t)head * (size_t)op.args.gate_head_stride + (size_t)i));
    return y;
}

/* ---- one tile ------------------------------------------------------------------------------------------------------ */

/* 16-byte unit u of row r of a K or V block lies at u ^ (r & 7): reads of 8 rows meet 8 banks of 16 bytes. */
template <int D> __device__ static inline char *swizzled(char *block, int r, int u) {
    return block + r * D * 2 + (u ^ (r & 7)) * 16;
}

/* Rows [base, base + KEYS) of one half; those outside of [seen.lo, seen.hi) become zeros. */
template <int D>
__device__ static void load_block(const struct attn_op &op, int seg, int kv_head, enum kv_half half, bool is_block,
                                  int base, struct keys seen, char *dst) {
    const struct attn_args *a = &op.args;
    const bool is_plain = is_block || op.kv.dtype == DTYPE_BF16;
    const char *src;
    size_t stride;

    if (is_block) {
        src = (const char *)(half == KV_K ? a->block_k : a->block_v) +
              ((size_t)(op.batch.seg_row[seg] + base) * (size_t)a->n_kv_heads + (size_t)kv_head) * D * 2;
        stride = (size_t)a->n_kv_heads * D * 2;
    } else {
        src = kv_row(op.kv, kv_page_of(op.kv, op.batch.seg_slot[seg], base), a->layer, half, kv_head, base);
        stride = D * kv_elem_bytes(op.kv.dtype);
    }
    for (int i = (int)threadIdx.x; i < KEYS * (D / 8); i += THREADS) {
        int r = i / (D / 8), u = i % (D / 8);
        bool is_seen = base + r >= seen.lo && base + r < seen.hi;
        const char *row = src + (size_t)r * stride;

        if (is_plain)
            copy_async(swizzled<D>(dst, r, u), is_seen ? row + u * 16 : src, is_seen ? 16 : 0);
        else
            *(uint4 *)swizzled<D>(dst, r, u) = is_seen ? kv_load8(op.kv.dtype, row, u * 8) : make_uint4(0, 0, 0, 0);
    }
    copy_commit();
}

template <int D> __global__ static void __launch_bounds__(THREADS) attn(struct attn_op op) {
    extern __shared__ char smem[];
    char *const q_frags = smem, *const k_block = smem + TILE * D * 2, *const v_block = k_block + KEYS * D * 2;
    const struct attn_args *a = &op.args;
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, kv_head = (int)blockIdx.y;
    int tile = (int)blockIdx.x, seg, n_segs, n_q, first_row, last_row;
    struct keys seen[2], mine[2][2]; /* of the tile, and of this thread's two q rows: context, block */
    int my_row[2], my_head[2];
    bool is_mine[2];

    may_launch_next();
    wait_for_previous();
    n_segs = *op.batch.n_segs;
    for (seg = 0; seg < n_segs; seg++) { /* the tiles of a seg lie together */
        n_q = (op.batch.seg_row[seg + 1] - op.batch.seg_row[seg]) * op.group;
        if (tile < (n_q + TILE - 1) / TILE)
            break;
        tile -= (n_q + TILE - 1) / TILE;
    }
    if (seg >= n_segs)
        return;
    first_row = tile * TILE / op.group;
    last_row = min((tile * TILE + TILE - 1) / op.group, n_q / op.group - 1);
    seen[0].lo = context_keys(op, seg, first_row).lo;
    seen[0].hi = context_keys(op, seg, last_row).hi;
    seen[1].lo = seen[1].hi = 0;
    if (a->block_k != NULL) {
        seen[1].lo = block_keys(op, seg, first_row).lo;
        seen[1].hi = block_keys(op, seg, last_row).hi;
    }
    for (int i = 0; i < 2; i++) {
        int q = tile * TILE + warp * 16 + lane / 4 + i * 8, j = min(q, n_q - 1) / op.group;

        is_mine[i] = q < n_q;
        my_row[i] = op.batch.seg_row[seg] + j;
        my_head[i] = kv_head * op.group + q % op.group;
        mine[0][i] = context_keys(op, seg, j);
        mine[1][i] = block_keys(op, seg, j);
    }

    /* Q as A operands, [warp][step][lane][16 bytes]; q rows beyond the last are zeros. */
#pragma unroll
    for (int i = 0; i < 16 * (D / 8) / 32; i++) { /* a warp brings its own 16 rows, 8 elements per lane */
        int piece = lane + i * 32, r = warp * 16 + piece / (D / 8), d = piece % (D / 8) * 8, q = tile * TILE + r;
        uint4 v = {};

        if (q < n_q)
            v = *(const uint4 *)((const bf16 *)a->q +
                                 ((size_t)(op.batch.seg_row[seg] + q / op.group) * (size_t)a->n_heads +
                                  (size_t)(kv_head * op.group + q % op.group)) *
                                     D +
                                 d);
        for (int j = 0; j < 4; j++)
            *(uint32_t *)(q_frags + (warp * (D / 16) + d / 16) * 512 + (r % 8 * 4 + j) * 16 +
                          (r % 16 / 8 + d % 16 / 8 * 2) * 4) = (&v.x)[j];
    }
    __syncthreads();

    struct part total[2] = {{-INFINITY, 0}, {-INFINITY, 0}};
    const struct attn_spans spans = a->spans != NULL ? *a->spans : (struct attn_spans){0, ATTN_SPANS_END};
    const int n_context = op.n_spans - (a->block_k != NULL);
    int span = op.is_split ? (int)blockIdx.z : spans.begin;
    int span_end = op.is_split ? span + 1 : spans.end == ATTN_SPANS_END ? op.n_spans : min(spans.end, n_context);

    for (int i = 0; i < 2 && spans.begin > 0; i++) /* what earlier runs have left; the output lies there too */
        if (is_mine[i])
            total[i] = *(const struct part *)(op.parts +
                                              ((size_t)my_row[i] * (size_t)a->n_heads + (size_t)my_head[i]) * (D + 2));

    for (; span < span_end; span++) {
        const bool is_block = span == n_context;
        const int span_lo = is_block ? 0 : span * SPAN_TOKENS;
        const struct keys keys = {max(span_lo, seen[is_block].lo), min(span_lo + SPAN_TOKENS, seen[is_block].hi)};
        const float scale = (is_block ? 1.0f : op.kv.k_scale[a->layer]) * rsqrtf((float)D);
        float out[D / 8][4] = {};
        struct part part[2] = {{-INFINITY, 0}, {-INFINITY, 0}};
        int base = keys.lo / KEYS * KEYS;

        if (keys.lo >= keys.hi) {
            if (!op.is_split)
                continue;
            return; /* no row of the tile asks for this part */
        }
        load_block<D>(op, seg, kv_head, KV_K, is_block, base, keys, k_block);
        load_block<D>(op, seg, kv_head, KV_V, is_block, base, keys, v_block);
        for (; base < keys.hi; base += KEYS) {
            const bool has_next = base + KEYS < keys.hi;
            float s[KEYS / 8][4] = {};
            float rescale[2];

            copy_wait<1>();
            __syncthreads();
#pragma unroll
            for (int step = 0; step < D / 16; step++) {
                uint4 qa = *(const uint4 *)(q_frags + (warp * (D / 16) + step) * 512 + lane * 16);

#pragma unroll
                for (int n = 0; n < KEYS / 16; n++) { /* 16 keys: lanes name rows of the four 8x8 matrices */
                    uint32_t b[4];

                    ldmatrix_x4(b, swizzled<D>(k_block, n * 16 + lane / 16 * 8 + lane % 8, step * 2 + lane / 8 % 2));
                    mma_bf16(s[2 * n], &qa.x, b[0], b[1]);
                    mma_bf16(s[2 * n + 1], &qa.x, b[2], b[3]);
                }
            }
            __syncthreads();
            if (has_next)
                load_block<D>(op, seg, kv_head, KV_K, is_block, base + KEYS, keys, k_block);
            else
                copy_commit();

#pragma unroll
            for (int i = 0; i < 2; i++) {
                const struct keys see = mine[is_block][i];
                float m = -INFINITY, sum = 0, before = part[i].max;

#pragma unroll
                for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                    for (int c = 0; c < 2; c++) {
                        int key = base + n * 8 + lane % 4 * 2 + c;
                        float *v = &s[n][2 * i + c];

                        *v = key >= see.lo && key < see.hi ? *v * scale : -INFINITY;
                        m = fmaxf(m, *v);
                    }
                m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
                m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
                m = fmaxf(m, before);
                rescale[i] = before == m ? 1.0f : expf(before - m); /* both -inf: nothing seen yet */
#pragma unroll
                for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                    for (int c = 0; c < 2; c++) {
                        float *v = &s[n][2 * i + c];

                        *v = *v == -INFINITY ? 0.0f : expf(*v - m);
                        sum += *v;
                    }
                sum += __shfl_xor_sync(0xffffffffu, sum, 1);
                sum += __shfl_xor_sync(0xffffffffu, sum, 2);
                part[i].max = m;
                part[i].sum = part[i].sum * rescale[i] + sum;
            }
#pragma unroll
            for (int n = 0; n < D / 8; n++) {
                out[n][0] *= rescale[0];
                out[n][1] *= rescale[0];
                out[n][2] *= rescale[1];
                out[n][3] *= rescale[1];
            }
            copy_wait<1>();
            __syncthreads();
#pragma unroll
            for (int step = 0; step < KEYS / 16; step++) {
                uint32_t high[4], low[4]; /* P to 16 bits, in two bf16 operands: nothing is rounded before the sum */

                split_bf16(&high[0], &low[0], s[2 * step][0], s[2 * step][1]);
                split_bf16(&high[1], &low[1], s[2 * step][2], s[2 * step][3]);
                split_bf16(&high[2], &low[2], s[2 * step + 1][0], s[2 * step + 1][1]);
                split_bf16(&high[3], &low[3], s[2 * step + 1][2], s[2 * step + 1][3]);
#pragma unroll
                for (int n = 0; n < D / 16; n++) {
                    uint32_t b[4];

                    ldmatrix_x4_trans(b,
                                      swizzled<D>(v_block, step * 16 + lane / 8 % 2 * 8 + lane % 8, 2 * n + lane / 16));
                    mma_bf16(out[2 * n], low, b[0], b[1]);
                    mma_bf16(out[2 * n], high, b[0], b[1]);
                    mma_bf16(out[2 * n + 1], low, b[2], b[3]);
                    mma_bf16(out[2 * n + 1], high, b[2], b[3]);
                }
            }
            __syncthreads();
            if (has_next)
                load_block<D>(op, seg, kv_head, KV_V, is_block, base + KEYS, keys, v_block);
            else
                copy_commit();
        }
        copy_wait<0>();

        const float v_scale = is_block ? 1.0f : op.kv.v_scale[a->layer];

#pragma unroll
        for (int i = 0; i < 2; i++) {
            float *dst = op.parts + (((size_t)my_row[i] * (size_t)a->n_heads + (size_t)my_head[i]) *
                                         (size_t)(op.is_split ? op.n_spans : 1) +
                                     (size_t)(op.is_split ? span : 0)) *
                                        (D + 2);
            struct weights w;

            if (!is_mine[i])
                continue;
            if (op.is_split) {
                if (lane % 4 == 0) {
                    dst[0] = part[i].max;
                    dst[1] = part[i].sum;
                }
#pragma unroll
                for (int n = 0; n < D / 8; n++)
#pragma unroll
                    for (int c = 0; c < 2; c++)
                        dst[2 + n * 8 + lane % 4 * 2 + c] = out[n][2 * i + c] * v_scale;
                continue;
            }
            w = merge(&total[i], part[i]);
#pragma unroll
            for (int n = 0; n < D / 8; n++)
#pragma unroll
                for (int c = 0; c < 2; c++) { /* only this thread touches the element */
                    float *o = &dst[2 + n * 8 + lane % 4 * 2 + c];

                    *o = merge_out(w.a != 0 ? *o : 0, out[n][2 * i + c] * v_scale, w);
                }
        }
    }
    if (op.is_split)
        return;
    if (spans.end != ATTN_SPANS_END) {
        for (int i = 0; i < 2; i++)
            if (is_mine[i] && lane % 4 == 0)
                *(struct part *)(op.parts + ((size_t)my_row[i] * (size_t)a->n_heads + (size_t)my_head[i]) * (D + 2)) =
                    total[i];
        return;
    }
    for (int i = 0; i < 2; i++) {
        size_t at = (size_t)my_row[i] * (size_t)a->n_heads + (size_t)my_head[i];
        const float *src = op.parts + at * (D + 2);

        if (!is_mine[i])
            continue;
        for (int n = 0; n < D / 8; n++)
            for (int c = 0; c < 2; c++) {
                int d = n * 8 + lane % 4 * 2 + c;

                bf16_store(a->out, at * D + (size_t)d,
                           finish(op, my_row[i], my_head[i], d, total[i].sum > 0 ? src[2 + d] : 0, total[i].sum));
            }
    }
}

/* Merges the spans that the row sees. A CTA per row and head, a thread per dimension. */
__global__ static void combine(struct attn_op op) {
    const struct attn_args *a = &op.args;
    const int row = (int)blockIdx.x, head = (int)blockIdx.y, i = (int)threadIdx.x, d = a->head_dim;
    const int n_context = op.n_spans - (a->block_k != NULL);
    const size_t at = (size_t)row * (size_t)a->n_heads + (size_t)head;
    const float *parts = op.parts + at * (size_t)op.n_spans * (size_t)(d + 2);
    struct part total = {-INFINITY, 0};
    float out = 0;
    struct keys keys;
    int seg, j;

    may_launch_next();
    wait_for_previous();
    if (row >= batch_rows(op.batch))
        return;
    seg = op.batch.row_seg[row];
    j = row - op.batch.seg_row[seg];
    keys = context_keys(op, seg, j);
    for (int span = keys.lo / SPAN_TOKENS; span <= n_context; span++) {
        const float *src = parts + (size_t)span * (size_t)(d + 2);
        struct weights w;

        if (span < n_context && span * SPAN_TOKENS >= keys.hi) {
            span = n_context - 1; /* on to the block */
            continue;
        }
        if (span == n_context) {
            if (a->block_k == NULL)
                break;
            keys = block_keys(op, seg, j);
        }
        if (keys.lo >= keys.hi)
            continue;
        w = merge(&total, (struct part){src[0], src[1]});
        out = merge_out(out, src[2 + i], w);
    }
    bf16_store(a->out, at * (size_t)d + (size_t)i, finish(op, row, head, i, out, total.sum));
}

/* ---- the op ------------------------------------------------------------------------------------------------------- */

template <int D> static void launch_tiles(const struct launch *launch, const struct attn_op *op) {
    int bytes = (TILE + 2 * KEYS) * D * 2;
    dim3 grid((unsigned)op->n_tiles_max, (unsigned)op->args.n_kv_heads, op->is_split ? (unsigned)op->n_spans : 1);

    cudaFuncSetAttribute(attn<D>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    launch_early(launch->stream, true, attn<D>, grid, THREADS, bytes, *op);
}

static void launch_attn(const struct launch *launch, const void *args) {
    struct attn_op op = *(const struct attn_op *)args;

    op.parts = (float *)launch->scratch;
    if (op.args.head_dim == 256)
        launch_tiles<256>(launch, &op);
    else if (op.args.head_dim == 128)
        launch_tiles<128>(launch, &op);
    else
        launch_tiles<64>(launch, &op);
    if (op.is_split)
        launch_early(launch->stream, true, combine, dim3((unsigned)op.batch.n_rows_max, (unsigned)op.args.n_heads),
                     op.args.head_dim, 0, op);
}

/* -ENOTSUP: a head_dim other than 64, 128 and 256. */
int cuda_attn(struct program *program, const struct attn_args *args) {
    struct attn_op op = {*args, *args->batch, *args->kv, 0, 0, false, 0, NULL};
    size_t part_bytes, n_parts;

    if (args->head_dim <= 0 || args->n_kv_heads <= 0 || args->n_heads % args->n_kv_heads != 0 ||
        args->kv->head_dim != args->head_dim || args->kv->n_kv_heads != args->n_kv_heads)
        return -EINVAL;
    if (args->head_dim != 64 && args->head_dim != 128 && args->head_dim != 256)
        return -ENOTSUP;
    op.group = args->n_heads / args->n_kv_heads;
    op.n_spans = (int)div_ceil((uint64_t)args->kv->n_pages_max * PAGE_TOKENS, SPAN_TOKENS) + (args->block_k != NULL);
    op.n_tiles_max = (int)div_ceil((uint64_t)op.batch.n_rows_max * (uint64_t)op.group, TILE) + op.batch.n_segs_max;
    part_bytes = (size_t)(args->head_dim + 2) * sizeof(float);
    n_parts = (size_t)op.batch.n_rows_max * (size_t)args->n_heads;
    op.is_split = args->spans == NULL && op.batch.n_rows_max <= SPLIT_ROWS_MAX &&
                  n_parts * (size_t)op.n_spans * part_bytes <= SPLIT_BYTES_MAX;
    return cuda_program_add(program, launch_attn, &op, sizeof op,
                            n_parts * (op.is_split ? (size_t)op.n_spans : 1) * part_bytes);
}
