/* gdn: the gated delta net of a verify block in step form, and the commit of a frozen pass. A CTA has one value head of one
 * seg; four neighbouring lanes share a row of S, a quarter of the key dimension each, in registers. Commit runs the same
 * step: a state is the same bits whichever way its rows came. Prefill is gdn_chunk.cu's. */
#include "gdn.cuh"

#include <errno.h>

enum {
    QUARTER = DK / 4,
    RUN_ROWS = BLOCK_ROWS_MAX, /* of a seg */
    THREADS = DV_MAX * 4,
};

static struct gdn_shape shape_of(const struct state_view *s) {
    struct gdn_shape shape = {};

    shape.hk = s->n_k_heads;
    shape.hv = s->n_v_heads;
    shape.dv = s->head_dim_v;
    shape.conv_dim = state_conv_dim(s);
    shape.layer_bytes = state_layer_bytes(s, DTYPE_BF16);
    shape.s_bytes = (size_t)s->n_v_heads * (size_t)s->head_dim_v * (size_t)s->head_dim_k * sizeof(float);
    shape.slot_bytes = s->slot_bytes;
    return shape;
}

static bool shape_is_sound(const struct state_view *s) {
    return s->n_k_heads > 0 && s->n_v_heads > 0 && s->n_v_heads % s->n_k_heads == 0 && s->head_dim_k > 0 &&
           s->head_dim_v > 0 && s->conv_taps > 0;
}
static bool shape_is_built(const struct state_view *s) {
    return s->head_dim_k == DK && s->head_dim_v % 32 == 0 && s->head_dim_v <= DV_MAX && s->conv_taps == TAPS;
}

/* ---- the step ----------------------------------------------------------------------------------------------------- */

__device__ static inline float quad_sum(float v) {
    v += __shfl_xor_sync(0xffffffffu, v, 1);
    return v + __shfl_xor_sync(0xffffffffu, v, 2);
}

/* Element 4 * i + c of a lane's quarter is dimension 16 * i + 4 * lane + c. */
__device__ static inline void load_quarter(float s[QUARTER], const float *row) {
    for (int i = 0; i < QUARTER / 4; i++)
        *(float4 *)&s[4 * i] = *(const float4 *)(row + 16 * i + threadIdx.x % 4 * 4);
}
__device__ static inline void store_quarter(float *row, const float s[QUARTER]) {
    for (int i = 0; i < QUARTER / 4; i++)
        *(float4 *)(row + 16 * i + threadIdx.x % 4 * 4) = *(const float4 *)&s[4 * i];
}

/* S <- decay S; u = beta (v - S k); S <- S + u k^T, of one row of S. k: normed, in shared memory. */
__device__ static inline void step(float s[QUARTER], const float *k, float v, float decay, float beta) {
    float kq[QUARTER], read = 0, u;

    load_quarter(kq, k);
#pragma unroll
    for (int i = 0; i < QUARTER; i++)
        read = fmaf(s[i], kq[i], read);
    u = beta * (v - decay * quad_sum(read));
#pragma unroll
    for (int i = 0; i < QUARTER; i++)
        s[i] = fmaf(u, kq[i], decay * s[i]);
}

/* One row of DK values by one warp: the factor of its l2 norm. */
__device__ static inline float l2_factor(const float *x) {
    float sum = 0;

    for (int i = (int)threadIdx.x % 32; i < DK; i += 32)
        sum = fmaf(x[i], x[i], sum);
    return gdn_l2_factor(warp_sum(sum));
}

/* ---- gdn ---------------------------------------------------------------------------------------------------------- */

struct gdn_shared {
    float window[TAPS - 1 + RUN_ROWS][2 * DK + DV_MAX]; /* raw conv inputs of q, k, v; oldest first */
    float c[RUN_ROWS][2 * DK + DV_MAX];                 /* after conv and SiLU */
    float o[RUN_ROWS][DV_MAX];
    float conv[2 * DK + DV_MAX][TAPS];
    float g[RUN_ROWS], decay[RUN_ROWS], beta[RUN_ROWS];
};

/* Channel ch of the head's own 2 DK + dv among all conv channels. */
__device__ static inline int channel_of(const struct gdn_shape &shape, int head, int ch) {
    int key_head = head / (shape.hv / shape.hk);

    if (ch < DK)
        return key_head * DK + ch;
    if (ch < 2 * DK)
        return (shape.hk + key_head) * DK + ch - DK;
    return 2 * shape.hk * DK + head * shape.dv + ch - 2 * DK;
}

/* Key heads are shared by value heads: the first of them records q's and k's. */
__device__ static void record_rows(const struct gdn_op &op, const struct gdn_shared *sh, int head, int row0, int n) {
    const struct gdn_shape &shape = op.shape;
    const int group = shape.hv / shape.hk, n_ch = 2 * DK + shape.dv, first = head % group == 0 ? 0 : 2 * DK;
    const size_t layer_row = (size_t)op.args.layer * (size_t)op.batch.n_rows_max + (size_t)row0;
    const size_t kv_width = (size_t)(shape.hk * DK + shape.hv * shape.dv);

    for (int i = (int)threadIdx.x; i < n * n_ch; i += THREADS) {
        int t = i / n_ch, ch = i % n_ch;
        float *kv = op.record.kv + (layer_row + (size_t)t) * kv_width;

        if (ch < first)
            continue;
        bf16_store(op.record.m, (layer_row + (size_t)t) * (size_t)shape.conv_dim + (size_t)channel_of(shape, head, ch),
                   sh->window[TAPS - 1 + t][ch]);
        if (ch >= 2 * DK)
            kv[shape.hk * DK + head * shape.dv + ch - 2 * DK] = sh->c[t][ch];
        else if (ch >= DK)
            kv[head / group * DK + ch - DK] = sh->c[t][ch];
    }
    for (int t = (int)threadIdx.x; t < n; t += THREADS) {
        float *gb = op.record.g_beta + (layer_row + (size_t)t) * 2 * (size_t)shape.hv;

        gb[head] = sh->g[t];
        gb[shape.hv + head] = sh->beta[t];
    }
}

/* The seg's n rows from row0 on; the window holds the columns before them. s: this thread's part of S. */
__device__ static void run_rows(const struct gdn_op &op, struct gdn_shared *sh, int head, int row0, int n,
                                float s[QUARTER]) {
    const struct gdn_shape &shape = op.shape;
    const int n_ch = 2 * DK + shape.dv, warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    const int v = (int)threadIdx.x / 4;
    float z[LANE_VALUES]; /* of the row that this warp finishes */

    static_assert(RUN_ROWS == THREADS / 32, "a warp finishes one row");
#pragma unroll
    for (int i = 0; i < LANE_VALUES; i++)
        z[i] = warp < n && i * 32 < shape.dv
                   ? bf16_load(op.args.mz, gdn_z_at(op, head, row0 + warp) + (size_t)(i * 32 + lane))
                   : 0;
    for (int i = (int)threadIdx.x; i < n * n_ch; i += THREADS) {
        int t = i / n_ch, ch = i % n_ch;

        sh->window[TAPS - 1 + t][ch] =
            bf16_load(op.args.mz, (size_t)(row0 + t) * (size_t)op.args.mz_stride + (size_t)channel_of(shape, head, ch));
    }
    if ((int)threadIdx.x < n) {
        sh->g[threadIdx.x] = gdn_g(op, head, row0 + (int)threadIdx.x);
        sh->decay[threadIdx.x] = expf(sh->g[threadIdx.x]);
        sh->beta[threadIdx.x] = gdn_beta(op, head, row0 + (int)threadIdx.x);
    }
    __syncthreads();
    for (int i = (int)threadIdx.x; i < n * n_ch; i += THREADS) {
        int t = i / n_ch, ch = i % n_ch;
        float sum = 0;

        for (int j = 0; j < TAPS; j++)
            sum = fmaf(sh->conv[ch][j], sh->window[t + j][ch], sum);
        sh->c[t][ch] = round_bf16(gdn_activated(sum));
    }
    __syncthreads();
    record_rows(op, sh, head, row0, n);
    __syncthreads();
    for (int i = warp; i < 2 * n; i += THREADS / 32) { /* q and k of each row */
        float *x = &sh->c[i / 2][i % 2 * DK], factor = l2_factor(x) * (i % 2 == 0 ? rsqrtf((float)DK) : 1.0f);

        __syncwarp();
        for (int j = lane; j < DK; j += 32)
            x[j] = x[j] * factor;
    }
    __syncthreads();
    if (v < shape.dv)
        for (int t = 0; t < n; t++) {
            float q[QUARTER], o = 0;

            step(s, &sh->c[t][DK], sh->c[t][2 * DK + v], sh->decay[t], sh->beta[t]);
            load_quarter(q, sh->c[t]);
#pragma unroll
            for (int i = 0; i < QUARTER; i++)
                o = fmaf(s[i], q[i], o);
            o = quad_sum(o);
            if (threadIdx.x % 4 == 0)
                sh->o[t][v] = round_bf16(o);
        }
    __syncthreads();
    if (warp < n) {
        float o[LANE_VALUES];

#pragma unroll
        for (int i = 0; i < LANE_VALUES; i++)
            o[i] = i * 32 < shape.dv ? sh->o[warp][i * 32 + lane] : 0;
        gdn_finish(op, head, row0 + warp, o, z);
    }
}

__global__ static void __launch_bounds__(THREADS, 1) gdn(struct gdn_op op) {
    extern __shared__ char smem[];
    struct gdn_shared *sh = (struct gdn_shared *)smem;
    const struct gdn_shape &shape = op.shape;
    const int seg = (int)blockIdx.x / shape.hv, head = (int)blockIdx.x % shape.hv, n_before = TAPS - 1;
    const int n_ch = 2 * DK + shape.dv, v = (int)threadIdx.x / 4;
    float s[QUARTER] = {};
    int n_segs, slot, row0, n_rows;
    char *state;

    may_launch_next();
    for (int i = (int)threadIdx.x; i < n_ch * TAPS; i += THREADS) { /* no kernel writes these */
        const int ch = i / TAPS, tap = i % TAPS;

        sh->conv[ch][tap] = op.args.conv[(size_t)channel_of(shape, head, ch) * (size_t)TAPS + (size_t)tap];
    }
    wait_for_previous();
    n_segs = *op.batch.n_segs; /* all loads at once */
    slot = op.batch.seg_slot[seg];
    row0 = op.batch.seg_row[seg];
    n_rows = op.batch.seg_row[seg + 1] - row0;
    if (seg >= n_segs || n_rows > RUN_ROWS)
        return;
    state = gdn_state_at(shape, op.state, op.state.live[slot], op.args.layer);
    if (v < shape.dv)
        load_quarter(s, (const float *)state + ((size_t)head * (size_t)shape.dv + (size_t)v) * DK);
    for (int i = (int)threadIdx.x; i < n_before * n_ch; i += THREADS)
        sh->window[i / n_ch][i % n_ch] =
            bf16_load(state + shape.s_bytes,
                      (size_t)(i / n_ch) * (size_t)shape.conv_dim + (size_t)channel_of(shape, head, i % n_ch));
    __syncthreads();
    run_rows(op, sh, head, row0, n_rows, s);
}

static void launch_gdn(const struct launch *launch, const void *args) {
    const struct gdn_op *op = (const struct gdn_op *)args;

    if (op->args.mode == GDN_ADVANCE) {
        gdn_advance_launch(launch, op);
        return;
    }
    cudaFuncSetAttribute(gdn, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)sizeof(struct gdn_shared));
    launch_early(launch->stream, true, gdn, dim3((unsigned)(op->batch.n_segs_max * op->shape.hv)), THREADS,
                 (int)sizeof(struct gdn_shared), *op);
}

/* -ENOTSUP: shapes that no model of the family has. */
int cuda_gdn(struct program *program, const struct gdn_args *args) {
    struct gdn_op op = {*args, *args->batch, *args->state, {}, shape_of(args->state)};

    if (!shape_is_sound(args->state) || (args->mode == GDN_FROZEN && args->record == NULL))
        return -EINVAL;
    if (!shape_is_built(args->state) || (args->mode == GDN_ADVANCE && !gdn_advance_is_built(args)))
        return -ENOTSUP;
    if (args->record != NULL)
        op.record = *args->record;
    return cuda_program_add(program, launch_gdn, &op, sizeof op,
                            args->mode == GDN_ADVANCE ? gdn_advance_scratch_bytes(&op) : 0);
}

/* ---- commit ------------------------------------------------------------------------------------------------------- */

struct commit_op {
    struct gdn_commit_args args;
    struct batch batch;
    struct state_view state;
    struct gdn_record record;
    struct gdn_shape shape;
};

/* One head's S and its share of the layer's conv columns. */
__global__ static void __launch_bounds__(THREADS, 1) gdn_commit(struct commit_op op) {
    __shared__ float k[RUN_ROWS][DK], decay[RUN_ROWS], beta[RUN_ROWS];
    const struct gdn_shape &shape = op.shape;
    const int head = (int)blockIdx.x, seg = (int)blockIdx.y, layer = (int)blockIdx.z, v = (int)threadIdx.x / 4;
    const size_t kv_width = (size_t)(shape.hk * DK + shape.hv * shape.dv);
    int n, snapshot, slot, ch_begin, ch_end;
    char *live, *rolling;
    const float *kv, *gb;
    const bf16 *m;
    size_t row, s_at;

    if (seg >= *op.batch.n_segs)
        return;
    n = op.args.seg_commit[seg];
    snapshot = op.args.seg_snapshot[seg];
    if (n <= 0 || n > RUN_ROWS)
        return;
    slot = op.batch.seg_slot[seg];
    row = (size_t)layer * (size_t)op.batch.n_rows_max + (size_t)op.batch.seg_row[seg];
    kv = op.record.kv + row * kv_width;
    gb = op.record.g_beta + row * 2 * (size_t)shape.hv;
    m = (const bf16 *)op.record.m + row * (size_t)shape.conv_dim;
    live = gdn_state_at(shape, op.state, op.state.live[slot], layer);
    rolling = gdn_state_at(shape, op.state, op.state.rolling[slot], layer);
    s_at = ((size_t)head * (size_t)shape.dv + (size_t)v) * DK;

    for (int i = (int)threadIdx.x; i < n * DK; i += THREADS)
        k[i / DK][i % DK] = kv[(size_t)(i / DK) * kv_width + (size_t)(head / (shape.hv / shape.hk) * DK + i % DK)];
    if ((int)threadIdx.x < n) {
        decay[threadIdx.x] = expf(gb[threadIdx.x * 2 * (size_t)shape.hv + (size_t)head]);
        beta[threadIdx.x] = gb[threadIdx.x * 2 * (size_t)shape.hv + (size_t)(shape.hv + head)];
    }
    __syncthreads();
    for (int t = (int)threadIdx.x / 32; t < n; t += THREADS / 32) {
        float factor = l2_factor(k[t]);

        __syncwarp();
        for (int j = (int)threadIdx.x % 32; j < DK; j += 32)
            k[t][j] = k[t][j] * factor;
    }
    __syncthreads();
    if (v < shape.dv) {
        float s[QUARTER];

        load_quarter(s, (const float *)live + s_at);
        for (int t = 0; t < n; t++) {
            step(s, k[t], kv[(size_t)t * kv_width + (size_t)(shape.hk * DK + head * shape.dv + v)], decay[t], beta[t]);
            if (t + 1 == snapshot)
                store_quarter((float *)rolling + s_at, s);
        }
        store_quarter((float *)live + s_at, s);
    }
    ch_begin = (int)((int64_t)shape.conv_dim * head / shape.hv);
    ch_end = (int)((int64_t)shape.conv_dim * (head + 1) / shape.hv);
    for (int ch = ch_begin + (int)threadIdx.x; ch < ch_end; ch += THREADS) {
        if (snapshot > 0)
            gdn_conv_shift(shape, live + shape.s_bytes, rolling + shape.s_bytes, m, (size_t)shape.conv_dim, snapshot,
                           ch);
        gdn_conv_shift(shape, live + shape.s_bytes, live + shape.s_bytes, m, (size_t)shape.conv_dim, n, ch);
    }
}

static void launch_commit(const struct launch *launch, const void *args) {
    const struct commit_op *op = (const struct commit_op *)args;

    gdn_commit<<<dim3((unsigned)op->shape.hv, (unsigned)op->batch.n_segs_max, (unsigned)op->state.n_layers), THREADS, 0,
                 launch->stream>>>(*op);
}

int cuda_gdn_commit(struct program *program, const struct gdn_commit_args *args) {
    struct commit_op op = {*args, *args->batch, *args->state, *args->record, shape_of(args->state)};

    if (!shape_is_sound(args->state))
        return -EINVAL;
    if (!shape_is_built(args->state))
        return -ENOTSUP;
    return cuda_program_add(program, launch_commit, &op, sizeof op, 0);
}
