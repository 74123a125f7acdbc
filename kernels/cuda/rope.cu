/* rope: what lies between a projection and attention: head split, q/k norm, RoPE, the K/V write. A warp per head. */
#include "kv.cuh"

#include <errno.h>

enum {
    HEAD_DIM_MAX = 1024,
    WARPS = 4,
    NORMS = 8, /* of a lane, kept in registers: all of a head of 256 */
    TURNS = 2, /* likewise: all of 128 rotated dimensions */
};

static bool rope_fits(const struct rope_table *rope, int head_dim) {
    return head_dim > 0 && head_dim <= HEAD_DIM_MAX && rope->rotary_dim >= 0 && rope->rotary_dim % 2 == 0 &&
           rope->rotary_dim <= head_dim;
}

__device__ static __noinline__ float2 turn_of(struct rope_table rope, int pos, int i) { /* cosine, sine */
    float s, c;

    sincosf((float)pos * rope.inv_freq[i], &s, &c);
    return make_float2(c, s);
}

/* What a lane needs to norm and rotate a head, as far as registers hold it: it is there before the head is. */
struct lane_head {
    float norm[NORMS];
    float2 turn[TURNS];
};
__device__ static inline struct lane_head lane_head(const float *norm, int d, struct rope_table rope, int pos) {
    const int lane = (int)threadIdx.x % 32;
    struct lane_head l;

#pragma unroll
    for (int j = 0; j < NORMS; j++)
        l.norm[j] = lane + j * 32 < d ? norm[lane + j * 32] : 0;
#pragma unroll
    for (int j = 0; j < TURNS; j++)
        l.turn[j] = lane + j * 32 < rope.rotary_dim / 2 ? turn_of(rope, pos, lane + j * 32) : make_float2(1, 0);
    return l;
}

/* x := rotate(x * rsqrt(mean(x^2) + eps) * norm), in shared memory, by one warp. */
__device__ static inline void norm_and_rotate(float *x, const struct lane_head &l, const float *norm, int d, float eps,
                                              struct rope_table rope, int pos) {
    const int lane = (int)threadIdx.x % 32, half = rope.rotary_dim / 2;
    float sum = 0, scale;
    auto rotate = [&](int i, float2 turn) {
        const float a = x[i], b = x[i + half];

        x[i] = fmaf(a, turn.x, -(b * turn.y));
        x[i + half] = fmaf(b, turn.x, a * turn.y);
    };

    for (int i = lane; i < d; i += 32)
        sum = fmaf(x[i], x[i], sum);
    scale = rsqrtf(warp_sum(sum) / (float)d + eps);
#pragma unroll
    for (int j = 0; j < NORMS; j++)
        if (lane + j * 32 < d)
            x[lane + j * 32] = x[lane + j * 32] * scale * l.norm[j];
    for (int i = lane + NORMS * 32; i < d; i += 32)
        x[i] = x[i] * scale * norm[i];
    __syncwarp();
#pragma unroll
    for (int j = 0; j < TURNS; j++)
        if (lane + j * 32 < half)
            rotate(lane + j * 32, l.turn[j]);
    for (int i = lane + TURNS * 32; i < half; i += 32)
        rotate(i, turn_of(rope, pos, i));
    __syncwarp();
}

/* ---- qk ----------------------------------------------------------------------------------------------------------- */

struct qk_op {
    struct qk_args args;
    struct batch batch;
    struct kv_view kv;
};

/* The projection before it writes q, k and v; all else is there before the wait for it. */
__global__ static void qk(struct qk_op op) {
    __shared__ float shared[WARPS][HEAD_DIM_MAX];
    const struct qk_args *a = &op.args;
    const int d = a->head_dim, lane = (int)threadIdx.x % 32, row = (int)blockIdx.x;
    const int q_step = a->has_gate ? 2 * d : d, k_at = a->n_heads * q_step, v_at = k_at + a->n_kv_heads * d;
    int head = (int)blockIdx.y * WARPS + (int)threadIdx.x / 32; /* q heads, then k heads, then v heads */
    const bool is_there = row < batch_rows(op.batch) && head < a->n_heads + 2 * a->n_kv_heads;
    const bool is_q = head < a->n_heads, is_k = !is_q && head < a->n_heads + a->n_kv_heads;
    const float *norm = is_q ? a->q_norm : a->k_norm;
    float *x = shared[threadIdx.x / 32];
    size_t qkv = (size_t)row * (size_t)a->qkv_stride;
    struct kv_place place = {};
    struct lane_head l = {};
    int pos = 0;

    head -= is_q ? 0 : is_k ? a->n_heads : a->n_heads + a->n_kv_heads;
    qkv += (size_t)(is_q ? head * q_step : (is_k ? k_at : v_at) + head * d);
    if (is_there) {
        pos = row_pos(op.batch, row);
        if (is_q || is_k)
            l = lane_head(norm, d, a->rope, pos);
        if (!is_q && a->kv != NULL)
            place =
                kv_place_of(op.kv, op.batch.seg_slot[op.batch.row_seg[row]], a->layer, is_k ? KV_K : KV_V, head, pos);
    }
    wait_for_previous();
    may_launch_next();
    if (!is_there)
        return;
    for (int i = lane; i < d; i += 32)
        x[i] = bf16_load(a->qkv, qkv + (size_t)i);
    __syncwarp();
    if (is_q || is_k)
        norm_and_rotate(x, l, norm, d, a->eps, a->rope, pos);
    if (is_q) {
        for (int i = lane; i < d; i += 32)
            bf16_store(a->q, ((size_t)row * (size_t)a->n_heads + (size_t)head) * (size_t)d + (size_t)i, x[i]);
    } else if (a->kv != NULL) {
        kv_write(op.kv, place, x);
    } else {
        for (int i = lane; i < d; i += 32)
            bf16_store(is_k ? a->block_k : a->block_v,
                       ((size_t)row * (size_t)a->n_kv_heads + (size_t)head) * (size_t)d + (size_t)i, x[i]);
    }
}

static void launch_qk(const struct launch *launch, const void *args) {
    const struct qk_op *op = (const struct qk_op *)args;
    dim3 grid((unsigned)op->batch.n_rows_max,
              (unsigned)div_ceil((uint64_t)(op->args.n_heads + 2 * op->args.n_kv_heads), WARPS));

    launch_early(launch->stream, qk, grid, WARPS * 32, 0, *op);
}

int cuda_qk(struct program *program, const struct qk_args *args) {
    struct qk_op op = {*args, *args->batch, {}};

    if (!rope_fits(&args->rope, args->head_dim) || (args->kv != NULL && args->kv->head_dim != args->head_dim))
        return -EINVAL;
    if (args->kv != NULL)
        op.kv = *args->kv;
    return cuda_program_add(program, launch_qk, &op, sizeof op, 0);
}

/* ---- draft_kv ------------------------------------------------------------------------------------------------------ */

enum { DRAFT_KV_LAYERS = 16 }; /* of one kernel */

struct draft_kv_op {
    struct draft_kv_args args;
    struct batch batch;
    int first, n; /* of the stacked layers */
    struct draft_kv_of_layer {
        struct kv_view kv;
        const float *k_norm;
        int layer; /* within the group */
    } layers[DRAFT_KV_LAYERS];
};

/* Rejected rows never reach the cache: what lies in a draft group is committed context and nothing else. */
__device__ static bool row_stands(const struct draft_kv_op &op, int row) {
    int seg = op.batch.row_seg[row];

    return op.batch.seg_flags[seg] & SEG_PREFILL || row - op.batch.seg_row[seg] < op.args.seg_commit[seg];
}

__global__ static void draft_kv(const __grid_constant__ struct draft_kv_op op) {
    __shared__ float shared[WARPS][HEAD_DIM_MAX];
    const struct draft_kv_args *a = &op.args;
    const struct draft_kv_op::draft_kv_of_layer &layer = op.layers[blockIdx.z];
    const int d = a->head_dim, lane = (int)threadIdx.x % 32, row = (int)blockIdx.x;
    int head = (int)blockIdx.y * WARPS + (int)threadIdx.x / 32; /* k heads, then v heads */
    float *x = shared[threadIdx.x / 32];
    bool is_k = head < a->n_kv_heads;
    size_t from =
        (((size_t)row * (size_t)a->n_layers + (size_t)(op.first + (int)blockIdx.z)) * 2 * (size_t)a->n_kv_heads +
         (size_t)head) *
        (size_t)d;
    int pos;

    wait_for_previous();
    may_launch_next();
    if (row >= batch_rows(op.batch) || head >= 2 * a->n_kv_heads || !row_stands(op, row))
        return;
    pos = row_pos(op.batch, row);
    for (int i = lane; i < d; i += 32)
        x[i] = a->kv_rows[from + (size_t)i];
    __syncwarp();
    if (is_k)
        norm_and_rotate(x, lane_head(layer.k_norm, d, a->rope, pos), layer.k_norm, d, a->eps, a->rope, pos);
    kv_write(layer.kv,
             kv_place_of(layer.kv, op.batch.seg_slot[op.batch.row_seg[row]], layer.layer, is_k ? KV_K : KV_V,
                         is_k ? head : head - a->n_kv_heads, pos),
             x);
}

static void launch_draft_kv(const struct launch *launch, const void *args) {
    const struct draft_kv_op *op = (const struct draft_kv_op *)args;
    dim3 grid((unsigned)op->batch.n_rows_max, (unsigned)div_ceil(2 * (uint64_t)op->args.n_kv_heads, WARPS),
              (unsigned)op->n);

    launch_early(launch->stream, draft_kv, grid, WARPS * 32, 0, *op);
}

int cuda_draft_kv(struct program *program, const struct draft_kv_args *args) {
    struct draft_kv_op op = {};
    int r = 0;

    if (!rope_fits(&args->rope, args->head_dim) || args->n_layers < 1)
        return -EINVAL;
    for (int l = 0; l < args->n_layers; l++)
        if (args->layers[l].kv->head_dim != args->head_dim)
            return -EINVAL;
    op.args = *args;
    op.batch = *args->batch;
    for (; op.first < args->n_layers && r == 0; op.first += op.n) {
        op.n = min_int(args->n_layers - op.first, DRAFT_KV_LAYERS);
        for (int l = 0; l < op.n; l++) {
            const struct draft_kv_layer *from = &args->layers[op.first + l];

            op.layers[l] = {*from->kv, from->k_norm, from->layer};
        }
        r = cuda_program_add(program, launch_draft_kv, &op, sizeof op, 0);
    }
    return r;
}
