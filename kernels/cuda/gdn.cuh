/* gdn: what both forms of the gated delta net share: the step form of verify blocks and commits (gdn.cu), and the chunk form
 * of prefill (gdn_chunk.cu). Their rows are made and finished alike; between the two their bits differ. */
#pragma once
#include "util.cuh"

enum {
    DK = 128, /* key dimension of every model of the family */
    DV_MAX = 128,
    TAPS = 4,                  /* of the convolution, likewise */
    LANE_VALUES = DV_MAX / 32, /* of a row that a warp finishes */
};

struct gdn_shape {
    int hk, hv, dv, conv_dim;
    size_t layer_bytes, s_bytes, slot_bytes;
};
struct gdn_op {
    struct gdn_args args;
    struct batch batch;
    struct state_view state;
    struct gdn_record record;
    struct gdn_shape shape;
};

/* ---- gdn_chunk.cu: GDN_ADVANCE */
void gdn_advance_launch(const struct launch *launch, const struct gdn_op *op);
size_t gdn_advance_scratch_bytes(const struct gdn_op *op);
bool gdn_advance_is_built(const struct gdn_args *args); /* rows are read two channels at a time */

__device__ static inline char *gdn_state_at(const struct gdn_shape &shape, const struct state_view &state, int slot,
                                            int layer) {
    return (char *)state.arena + (size_t)slot * shape.slot_bytes + (size_t)layer * shape.layer_bytes;
}

/* ---- rows ---------------------------------------------------------------------------------------------------------- */

/* After the convolution; to be rounded. */
__device__ static inline float gdn_activated(float sum) {
    return sum * sigmoid(sum);
}

__device__ static inline float gdn_g(const struct gdn_op &op, int head, int row) {
    float x = op.args.ba[(size_t)row * 2 * (size_t)op.shape.hv + (size_t)(op.shape.hv + head)] + op.args.dt_bias[head];
    float softplus = x > 20 ? x : log1pf(expf(x));

    return op.args.neg_a[head] * softplus;
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

/* Columns := the last TAPS - 1 of (columns ++ n rows of m), of one channel. `to` may be `from`. */
__device__ static inline void gdn_conv_shift(const struct gdn_shape &shape, const char *from, char *to, const void *m,
                                             size_t m_stride, int n, int ch) {
    float v[TAPS - 1];

#pragma unroll
    for (int c = 0; c < TAPS - 1; c++) {
        int src = n + c;

        v[c] = src < TAPS - 1 ? bf16_load(from, (size_t)src * (size_t)shape.conv_dim + (size_t)ch)
                              : bf16_load(m, (size_t)(src - (TAPS - 1)) * m_stride + (size_t)ch);
    }
    for (int c = 0; c < TAPS - 1; c++)
        bf16_store(to, (size_t)c * (size_t)shape.conv_dim + (size_t)ch, v[c]);
}
