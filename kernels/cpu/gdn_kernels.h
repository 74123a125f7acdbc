/* gdn_kernels: the arithmetic of the gated delta net over a run of rows of one (seq, value head): as plain C in double
 * (gdn.c, the oracle) and as AVX2 in f32 (gdn_avx2.c). What is done per row is the same sequence of operations however
 * rows are grouped into runs, so decode, verify, commit and prefill agree bit for bit. Internal to gdn*.c. */
#pragma once
#include "../backend.h"

enum {
    GDN_RUN_ROWS_MAX = BLOCK_ROWS_MAX, /* longer segs are cut into runs of this many rows */
    GDN_TAPS_MAX = 8,
};

/* Causal depthwise conv + SiLU of some channels. */
struct gdn_conv {
    int n_rows, n_channels, taps;
    const float *window; /* [taps - 1 + n_rows, stride] inputs, oldest first */
    const float *weight; /* [n_channels, taps] */
    float *out;          /* [n_rows, stride] */
    int stride;
};

/* q/k l2 norm and the recurrence: S <- exp(g) S; u = beta (v - S k); S <- S + u k^T; o = S q. */
struct gdn_steps {
    int n_rows, dk, dv;
    const float *q, *k, *v; /* after conv, before the norm; q NULL: no output (commit) */
    int q_stride, k_stride, v_stride;
    const float *g, *beta;
    int g_stride, beta_stride;
    const float *s_in; /* [dv, dk]; may be s_out */
    float *s_out;      /* NULL: the new state is dropped */
    float *o;          /* [n_rows, dv] */
    void *scratch;     /* gdn_steps_scratch_bytes(), 64-byte aligned */
};
static inline size_t gdn_steps_scratch_bytes(int dk) {
    return align_up((size_t)(2 * GDN_RUN_ROWS_MAX + 4) * (size_t)dk * sizeof(double), 64);
}

/* out = o * rsqrt(mean(o^2) + eps) * w * act(z) */
struct gdn_gated_norm {
    int n_rows, dv;
    const float *o; /* [n_rows, dv] */
    const float *z;
    int z_stride;
    const float *w;
    float eps;
    enum gate_act gate;
    float *out;
    int out_stride;
};

struct gdn_kernels {
    void (*conv)(const struct gdn_conv *conv);
    void (*steps)(const struct gdn_steps *steps);
    void (*gated_norm)(const struct gdn_gated_norm *norm);
};
extern const struct gdn_kernels gdn_kernels_avx2; /* dk and dv: multiples of 8 */
