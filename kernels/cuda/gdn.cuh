/* gdn: what the files of the gated delta net share: shapes, the rows of the open chunk, and how a row is made and finished.
 *
 * The rule is computed in chunks of 64 rows at absolute multiples of 64, however many of them a pass has (gdn_chunk.cuh): a
 * state slot holds S and the conv columns at the last multiple, and the rows since then, the open chunk, lie beside it. */
#pragma once
#include "util.cuh"

enum {
    DK = 128, /* key dimension of every model of the family */
    DV_MAX = 128,
    TAPS = 4,                  /* of the convolution, likewise */
    LANE_VALUES = DV_MAX / 32, /* of a row that a warp finishes */
    CHUNK = PAGE_TOKENS,
    OPEN_ROWS = CHUNK + BLOCK_ROWS_MAX,         /* a block may begin in the last row of a chunk */
    OPEN_INPUTS = TAPS - 1 + BLOCK_ROWS_MAX + 1 /* and its convolution looks back; a row more for alignment */
};

struct gdn_shape {
    int hk, hv, dv, conv_dim;
    size_t layer_bytes, s_bytes, slot_bytes;
    size_t open_layer_bytes, open_bytes;
};
struct gdn_op {
    struct gdn_args args;
    struct batch batch;
    struct state_view state;
    struct gdn_shape shape;
};

/* ---- gdn_chunk.cu: GDN_ADVANCE */
void gdn_advance_launch(const struct launch *launch, const struct gdn_op *op);
size_t gdn_advance_scratch_bytes(const struct gdn_op *op);

/* ---- states ------------------------------------------------------------------------------------------------------- */

__device__ static inline char *gdn_state_at(const struct gdn_shape &shape, const struct state_view &state, int slot,
                                            int layer) {
    return (char *)state.arena + (size_t)slot * shape.slot_bytes + (size_t)layer * shape.layer_bytes;
}

/* Of a seq and a layer. What belongs to position p is at p modulo their number: rows of a block that is not committed lie
 * behind those that count, and the next block's take their places. */
struct gdn_open {
    bf16 *rows;   /* [OPEN_ROWS, conv_dim] after conv and SiLU */
    bf16 *inputs; /* [OPEN_INPUTS, conv_dim] of the convolution */
    float *gates; /* [OPEN_ROWS, 2 * hv] decay, then beta */
};
__device__ static inline struct gdn_open gdn_open_at(const struct gdn_shape &shape, const struct state_view &state,
                                                     int seq_slot, int layer) {
    char *base = (char *)state.open + (size_t)seq_slot * shape.open_bytes + (size_t)layer * shape.open_layer_bytes;
    const size_t row_bytes = (size_t)shape.conv_dim * sizeof(bf16);

    return (struct gdn_open){(bf16 *)base, (bf16 *)(base + OPEN_ROWS * row_bytes),
                             (float *)(base + (OPEN_ROWS + OPEN_INPUTS) * row_bytes)};
}
__device__ static inline bf16 *gdn_open_row(const struct gdn_shape &shape, const struct gdn_open &open, int pos) {
    return open.rows + (size_t)(pos % OPEN_ROWS) * (size_t)shape.conv_dim;
}
__device__ static inline bf16 *gdn_open_input(const struct gdn_shape &shape, const struct gdn_open &open, int pos) {
    return open.inputs + (size_t)(pos % OPEN_INPUTS) * (size_t)shape.conv_dim;
}
__device__ static inline float *gdn_open_gates(const struct gdn_shape &shape, const struct gdn_open &open, int pos) {
    return open.gates + (size_t)(pos % OPEN_ROWS) * 2 * (size_t)shape.hv;
}

/* A seg as the convolution sees it. */
struct gdn_seg {
    int slot, row0, n, pos;
    struct gdn_open open;
    char *state; /* of the layer */
};
__device__ static inline struct gdn_seg gdn_seg_at(const struct gdn_op &op, int seg) {
    struct gdn_seg at;

    at.slot = op.batch.seg_slot[seg];
    at.row0 = op.batch.seg_row[seg];
    at.n = op.batch.seg_row[seg + 1] - at.row0;
    at.pos = op.batch.seg_pos[seg];
    at.open = gdn_open_at(op.shape, op.state, at.slot, op.args.layer);
    at.state = gdn_state_at(op.shape, op.state, op.state.live[at.slot], op.args.layer);
    return at;
}
/* Inputs of row t of the seg, t >= 1 - TAPS: before row 0 they are the open chunk's, and before that the columns'. */
__device__ static inline const bf16 *gdn_inputs_of(const struct gdn_op &op, const struct gdn_seg &seg, int t) {
    const int in_chunk = seg.pos % CHUNK + t;

    if (t >= 0)
        return (const bf16 *)op.args.mz + (size_t)(seg.row0 + t) * (size_t)op.args.mz_stride;
    if (in_chunk >= 0)
        return gdn_open_input(op.shape, seg.open, seg.pos + t);
    return (const bf16 *)(seg.state + op.shape.s_bytes) + (TAPS - 1 + in_chunk) * op.shape.conv_dim;
}

/* ---- rows ---------------------------------------------------------------------------------------------------------- */

__device__ static inline uint32_t load_raw_pair(const bf16 *base, int i) {
    return *(const uint32_t *)(base + i);
}

/* Convolution and SiLU of two channels of a row; x: of the row and of those before it, oldest first. */
__device__ static inline uint32_t gdn_conv(const float2 w[TAPS], const float2 x[TAPS]) {
    float2 sum = make_float2(0, 0);

#pragma unroll
    for (int j = 0; j < TAPS; j++) {
        sum.x = fmaf(w[j].x, x[j].x, sum.x);
        sum.y = fmaf(w[j].y, x[j].y, sum.y);
    }
    return pack_bf16(sum.x * sigmoid(sum.x), sum.y * sigmoid(sum.y));
}

__device__ static inline float gdn_decay(const struct gdn_op &op, int head, int row) {
    float x = op.args.ba[(size_t)row * 2 * (size_t)op.shape.hv + (size_t)(op.shape.hv + head)] + op.args.dt_bias[head];
    float softplus = x > 20 ? x : log1pf(expf(x));

    return expf(op.args.neg_a[head] * softplus);
}
__device__ static inline float gdn_beta(const struct gdn_op &op, int head, int row) {
    return sigmoid(op.args.ba[(size_t)row * 2 * (size_t)op.shape.hv + (size_t)head]);
}

/* The factor of the l2 norm of a row of q or k. */
__device__ static inline float gdn_l2_factor(float sum_of_squares) {
    return rsqrtf(sum_of_squares + 1e-6f);
}

/* The gated norm of a row of a head, by one warp: lane i has the elements i, i + 32, ... of o, in bf16, and of z. */
__device__ static inline void gdn_finish(const struct gdn_op &op, int head, int row, const float o[LANE_VALUES],
                                         const float z[LANE_VALUES]) {
    const struct gdn_args *a = &op.args;
    const int dv = op.shape.dv, lane = (int)threadIdx.x % 32;
    const size_t out = ((size_t)row * (size_t)op.shape.hv + (size_t)head) * (size_t)dv;
    float sum = 0, scale;

#pragma unroll
    for (int j = 0; j < LANE_VALUES; j++)
        if (j * 32 < dv)
            sum = fmaf(o[j], o[j], sum);
    scale = rsqrtf(warp_sum(sum) / (float)dv + a->eps);
#pragma unroll
    for (int j = 0; j < LANE_VALUES; j++) {
        const int i = j * 32 + lane;
        float act = sigmoid(z[j]);

        if (i >= dv)
            break;
        if (a->gate == GATE_SILU)
            act *= z[j];
        bf16_store(a->out, out + (size_t)i, o[j] * scale * a->norm[i] * act);
    }
}
/* Where z of the head begins in its row. */
__device__ static inline size_t gdn_z_at(const struct gdn_op &op, int head, int row) {
    return (size_t)row * (size_t)op.args.mz_stride + (size_t)(op.shape.conv_dim + head * op.shape.dv);
}
