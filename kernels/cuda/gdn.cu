/* gdn: the ops of the gated delta net, and its few-row kernels: a verify block, and the commit of its rows. A CTA of them has
 * one value head: all of S in registers, the chunk in shared memory. They run the arithmetic that prefill runs
 * (gdn_chunk.cuh), on the open rows and the block's own, so a row is the same bits whichever pass it was in.
 *
 * A block writes its rows behind the open rows, where they become open rows once they are committed; so a commit has nothing to
 * do but where a multiple of 64 is crossed: there the chunk goes into S and the columns. */
#include "gdn_chunk.cuh"

#include <errno.h>

enum {
    THREADS = SOLVE_WARPS * 32,
    CONV_ROWS = 4, /* of a thread at a time */
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
    shape.open_layer_bytes = s->open_bytes / (size_t)s->n_layers;
    shape.open_bytes = s->open_bytes;
    return shape;
}

static int check_shape(const struct state_view *s) {
    const bool is_sound = s->n_layers > 0 && s->n_k_heads > 0 && s->n_v_heads > 0 && s->n_v_heads % s->n_k_heads == 0 &&
                          s->head_dim_k > 0 && s->head_dim_v > 0 && s->conv_taps > 0;

    if (!is_sound || s->open == NULL || s->open_bytes != state_open_bytes(s, DTYPE_BF16, OPEN_ROWS, OPEN_INPUTS))
        return -EINVAL;
    return s->head_dim_k == DK && s->head_dim_v % 32 == 0 && s->head_dim_v <= DV_MAX && s->conv_taps == TAPS ? 0
                                                                                                             : -ENOTSUP;
}

struct head_shared {
    struct stage<DV_MAX> stage;
    struct system_shared system;
    float conv[2 * DK + DV_MAX][TAPS];
    bf16 z[BLOCK_ROWS_MAX][DV_MAX]; /* of the chunk's rows in the block */
};

/* ---- a chunk's tiles -------------------------------------------------------------------------------------------------- */

/* Channels of a head: q, k, v. Channel ch of them among all conv channels. */
__device__ static inline int channel_of(const struct gdn_shape &shape, int head, int ch) {
    int key_head = head / (shape.hv / shape.hk);

    if (ch < DK)
        return key_head * DK + ch;
    if (ch < 2 * DK)
        return (shape.hk + key_head) * DK + ch - DK;
    return 2 * shape.hk * DK + head * shape.dv + ch - 2 * DK;
}
/* Where it lies in row r of the tiles. */
__device__ static inline bf16 *tile_at(struct stage<DV_MAX> *stage, int r, int ch) {
    if (ch < 2 * DK)
        return unit_of<DK>(ch < DK ? stage->q : stage->k, r, ch % DK / 8) + ch % 8;
    return unit_of<DV_MAX>(stage->v, r, (ch - 2 * DK) / 8) + ch % 8;
}

/* Rows [0, n_open) of the tiles from the open rows of positions from `grid` on, zeros in [n, end); begins at channel ch_begin of
 * the head. Asynchronous. */
__device__ static void load_open(const struct gdn_shape &shape, const struct gdn_open &open, int grid, int head,
                                 struct stage<DV_MAX> *stage, int ch_begin, int n_open, int n, int end) {
    const int n_units = (2 * DK + shape.dv - ch_begin) / 8;

    for (int i = (int)threadIdx.x; i < (n_open + end - n) * n_units; i += THREADS) {
        const int at = i / n_units, r = at < n_open ? at : at - n_open + n, ch = ch_begin + i % n_units * 8;

        copy_async(tile_at(stage, r, ch), gdn_open_row(shape, open, grid + r) + channel_of(shape, head, ch),
                   at < n_open ? 16 : 0);
    }
    copy_commit();
}

/* ---- a verify block --------------------------------------------------------------------------------------------------- */

/* Rows [first, n) of the chunk, rows of the seg from begin + first on: into the tiles, and with their inputs behind the open
 * rows. Key heads are shared by value heads: the first of them keeps q and k. */
__device__ static void take_rows(const struct gdn_op &op, const struct gdn_seg &seg, int head, struct head_shared *sh,
                                 int begin, int first, int n) {
    const struct gdn_shape &shape = op.shape;
    const int n_pairs = (2 * DK + shape.dv) / 2, n_groups = (n - first + CONV_ROWS - 1) / CONV_ROWS;
    const int kept_from = head % (shape.hv / shape.hk) == 0 ? 0 : 2 * DK;

    for (int i = (int)threadIdx.x; i < n_pairs * n_groups; i += THREADS) {
        const int own = i % n_pairs * 2, ch = channel_of(shape, head, own), r0 = first + i / n_pairs * CONV_ROWS;
        uint32_t raw[TAPS - 1 + CONV_ROWS];
        float2 w[TAPS], x[TAPS - 1 + CONV_ROWS];

#pragma unroll
        for (int j = 0; j < TAPS - 1 + CONV_ROWS; j++) {
            const int r = r0 + j - (TAPS - 1);

            raw[j] = r < n ? load_raw_pair(gdn_inputs_of(op, seg, begin + r), ch) : 0;
            x[j] = pair_of(raw[j]);
        }
#pragma unroll
        for (int j = 0; j < TAPS; j++)
            w[j] = make_float2(sh->conv[own][j], sh->conv[own + 1][j]);
#pragma unroll
        for (int j = 0; j < CONV_ROWS; j++) {
            const int r = r0 + j, pos = seg.pos + begin + r;
            const uint32_t row = gdn_conv(w, &x[j]);

            if (r >= n)
                break;
            *(uint32_t *)tile_at(&sh->stage, r, own) = row;
            if (own < kept_from)
                continue;
            *(uint32_t *)(gdn_open_row(shape, seg.open, pos) + ch) = row;
            *(uint32_t *)(gdn_open_input(shape, seg.open, pos) + ch) = raw[TAPS - 1 + j];
        }
    }
}

__device__ static void take_gates(const struct gdn_op &op, const struct gdn_seg &seg, int head,
                                  struct system_shared *sh, int begin, int first, int n) {
    const int r = (int)threadIdx.x, row = seg.row0 + begin + r;
    float *gates = gdn_open_gates(op.shape, seg.open, seg.pos + begin + r);

    if (r >= CHUNK)
        return;
    if (r >= first && r < n) {
        gates[head] = gdn_decay(op, head, row);
        gates[op.shape.hv + head] = gdn_beta(op, head, row);
    }
    sh->decay[r] = r < n ? gates[head] : 1;
    sh->beta[r] = r < n ? gates[op.shape.hv + head] : 0;
}

/* Asynchronous, as load_open. Row 0 of the chunk would be row0 of the batch, here and below. */
__device__ static void load_z(const struct gdn_op &op, int head, struct head_shared *sh, int row0, int first, int n) {
    const int n_units = op.shape.dv / 8;

    for (int i = (int)threadIdx.x; i < (n - first) * n_units; i += THREADS) {
        const int r = first + i / n_units, u = i % n_units;

        copy_async(&sh->z[r - first][u * 8], (const bf16 *)op.args.mz + gdn_z_at(op, head, row0 + r) + u * 8, 16);
    }
    copy_commit();
}

/* Rows [first, n) of o, in the tile of v. */
__device__ static void finish_rows(const struct gdn_op &op, int head, struct head_shared *sh, int row0, int first,
                                   int n) {
    const int lane = (int)threadIdx.x % 32;

    for (int r = first + (int)threadIdx.x / 32; r < n; r += SOLVE_WARPS) {
        float o[LANE_VALUES], z[LANE_VALUES];

#pragma unroll
        for (int i = 0; i < LANE_VALUES; i++) {
            const int v = i * 32 + lane;

            o[i] = v < op.shape.dv ? bf16_load(unit_of<DV_MAX>(sh->stage.v, r, v / 8), (size_t)(v % 8)) : 0;
            z[i] = v < op.shape.dv ? bf16_load(sh->z[r - first], (size_t)v) : 0;
        }
        gdn_finish(op, head, row0 + r, o, z);
    }
}

/* Reads S, does not write it. A block may lie in two chunks: the first of them is then whole. */
__global__ static void __launch_bounds__(THREADS, 1) verify(struct gdn_op op) {
    extern __shared__ __align__(128) char smem[];
    struct head_shared *sh = (struct head_shared *)smem;
    const struct gdn_shape &shape = op.shape;
    const int at = (int)blockIdx.x / shape.hv, head = (int)blockIdx.x % shape.hv;
    const int v0 = (int)threadIdx.x / 32 * 16; /* the warp's first row of S */
    float s[DK / 8][4] = {};
    struct gdn_seg seg;
    int n_segs;

    may_launch_next();
    for (int i = (int)threadIdx.x; i < (2 * DK + shape.dv) * TAPS; i += THREADS) /* no kernel writes these */
        sh->conv[i / TAPS][i % TAPS] =
            op.args.conv[(size_t)channel_of(shape, head, i / TAPS) * (size_t)TAPS + (size_t)(i % TAPS)];
    wait_for_previous();
    n_segs = *op.batch.n_segs; /* all loads at once */
    seg = gdn_seg_at(op, at);
    if (at >= n_segs || seg.n > BLOCK_ROWS_MAX)
        return;
    if (v0 < shape.dv)
        load_s(s, (float *)seg.state + ((size_t)head * (size_t)shape.dv + (size_t)v0) * DK);
    for (int begin = -(seg.pos % CHUNK); begin < seg.n; begin += CHUNK) {
        const int first = max(0, -begin), n = min(CHUNK, seg.n - begin), n_squares = (n + 15) / 16;
        float t[CHUNK / 8][4] = {}, u[CHUNK / 8][4] = {};

        __syncthreads();
        load_open(shape, seg.open, seg.pos + begin, head, &sh->stage, 0, first, n, n_squares * 16);
        load_z(op, head, sh, seg.row0 + begin, first, n);
        take_rows(op, seg, head, sh, begin, first, n);
        take_gates(op, seg, head, &sh->system, begin, first, n);
        copy_wait<0>();
        __syncthreads();
        solve_chunk<true>(sh->stage.k, sh->stage.q, &sh->system, sh->stage.x, sh->stage.a, &sh->stage.factors, first,
                          n);
        if (v0 < shape.dv) /* while two warps are about X */
            read_state<true>(t, s, sh->stage.k, {0, n_squares});
        __syncthreads();
        if (v0 < shape.dv) {
            chunk_u<true>(&sh->stage, t, u, {0, n_squares});
            chunk_o<true>(&sh->stage, s, u, {first / 16, n_squares});
            if (begin + CHUNK < seg.n)
                chunk_s(&sh->stage, s, u);
        }
        __syncthreads();
        finish_rows(op, head, sh, seg.row0 + begin, first, n);
    }
}

static void launch_gdn(const struct launch *launch, const void *args) {
    const struct gdn_op *op = (const struct gdn_op *)args;

    if (op->args.mode == GDN_ADVANCE) {
        gdn_advance_launch(launch, op);
        return;
    }
    static_assert(sizeof(struct head_shared) <= SHARED_BYTES, "a chunk fits");
    cudaFuncSetAttribute(verify, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)sizeof(struct head_shared));
    launch_early(launch->stream, true, verify, dim3((unsigned)(op->batch.n_segs_max * op->shape.hv)), THREADS,
                 (int)sizeof(struct head_shared), *op);
}

/* -ENOTSUP: shapes that no model of the family has, and rows that are not aligned to 16 bytes. */
int cuda_gdn(struct program *program, const struct gdn_args *args) {
    int r = check_shape(args->state);

    if (r < 0)
        return r;
    if (args->mz_stride % 8 != 0 || (uintptr_t)args->mz % 16 != 0 || (uintptr_t)args->out % 16 != 0)
        return -ENOTSUP;
    struct gdn_op op = {*args, *args->batch, *args->state, shape_of(args->state)};

    return cuda_program_add(program, launch_gdn, &op, sizeof op,
                            args->mode == GDN_ADVANCE ? gdn_advance_scratch_bytes(&op) : 0);
}

/* ---- commit ------------------------------------------------------------------------------------------------------- */

struct commit_op {
    struct gdn_commit_args args;
    struct batch batch;
    struct state_view state;
    struct gdn_shape shape;
};

/* The chunk of positions [grid, grid + CHUNK), all of them open rows, into one head's S and its share of the columns. */
__device__ static void commit_head(const struct commit_op &op, struct head_shared *sh, int seq_slot, int grid,
                                   bool has_snapshot, int layer, int head) {
    const struct gdn_shape &shape = op.shape;
    const struct gdn_open open = gdn_open_at(shape, op.state, seq_slot, layer);
    const int v0 = (int)threadIdx.x / 32 * 16, r = (int)threadIdx.x; /* the warp's first row of S; a row of the chunk */
    const int ch_begin = (int)((int64_t)shape.conv_dim * head / shape.hv);
    const int ch_end = (int)((int64_t)shape.conv_dim * (head + 1) / shape.hv);
    const size_t s_at = ((size_t)head * (size_t)shape.dv + (size_t)v0) * DK * sizeof(float);
    char *live = gdn_state_at(shape, op.state, op.state.live[seq_slot], layer);
    char *rolling = gdn_state_at(shape, op.state, op.state.rolling[seq_slot], layer);
    float s[DK / 8][4] = {}, t[CHUNK / 8][4] = {}, u[CHUNK / 8][4] = {};

    if (v0 < shape.dv)
        load_s(s, (float *)(live + s_at));
    load_open(shape, open, grid, head, &sh->stage, DK, CHUNK, CHUNK, CHUNK);
    if (r < CHUNK) {
        const float *gates = gdn_open_gates(shape, open, grid + r);

        sh->system.decay[r] = gates[head];
        sh->system.beta[r] = gates[shape.hv + head];
    }
    copy_wait<0>();
    __syncthreads();
    solve_chunk<false>(sh->stage.k, NULL, &sh->system, sh->stage.x, NULL, &sh->stage.factors, 0, CHUNK);
    if (v0 < shape.dv)
        read_state<false>(t, s, sh->stage.k, {});
    __syncthreads();
    if (v0 < shape.dv) {
        chunk_u<false>(&sh->stage, t, u, {});
        chunk_s(&sh->stage, s, u);
        store_s((float *)(live + s_at), s);
        if (has_snapshot)
            store_s((float *)(rolling + s_at), s);
    }
    for (int ch = ch_begin + r; ch < ch_end; ch += THREADS)
        for (int c = 0; c < TAPS - 1; c++) {
            const bf16 input = gdn_open_input(shape, open, grid + CHUNK - (TAPS - 1) + c)[ch];
            const size_t to = (size_t)(c * shape.conv_dim + ch);

            ((bf16 *)(live + shape.s_bytes))[to] = input;
            if (has_snapshot)
                ((bf16 *)(rolling + shape.s_bytes))[to] = input;
        }
    __syncthreads(); /* the next head's tiles take the place of these */
}

/* As many CTAs as run at a time; each has every so many heads. */
__global__ static void __launch_bounds__(THREADS, 1) commit(struct commit_op op) {
    extern __shared__ __align__(128) char smem[];

    for (int seg = 0; seg < *op.batch.n_segs; seg++) {
        const int n = op.args.seg_commit[seg], grid = op.batch.seg_pos[seg] / CHUNK * CHUNK;
        const bool has_snapshot = op.args.seg_snapshot[seg] > 0;

        if (n <= 0 || n > BLOCK_ROWS_MAX || op.batch.seg_pos[seg] + n < grid + CHUNK)
            continue;
        for (int i = (int)blockIdx.x; i < op.state.n_layers * op.shape.hv; i += (int)gridDim.x)
            commit_head(op, (struct head_shared *)smem, op.batch.seg_slot[seg], grid, has_snapshot, i / op.shape.hv,
                        i % op.shape.hv);
    }
}

static void launch_commit(const struct launch *launch, const void *args) {
    const struct commit_op *op = (const struct commit_op *)args;
    const int n_heads = op->state.n_layers * op->shape.hv;

    cudaFuncSetAttribute(commit, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)sizeof(struct head_shared));
    launch_early(launch->stream, false, commit, dim3((unsigned)min_int(n_heads, launch->n_multiprocessors)), THREADS,
                 (int)sizeof(struct head_shared), *op);
}

int cuda_gdn_commit(struct program *program, const struct gdn_commit_args *args) {
    int r = check_shape(args->state);

    if (r < 0)
        return r;
    struct commit_op op = {*args, *args->batch, *args->state, shape_of(args->state)};

    return cuda_program_add(program, launch_commit, &op, sizeof op, 0);
}
