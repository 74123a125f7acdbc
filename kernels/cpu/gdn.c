/* gdn: the gated delta net and the commit of a frozen pass. Only the step form exists, also for prefill: S lags nothing,
 * and a state is the same bits whichever way its rows came. A fresh state slot must be zeroed by its owner: recycled
 * memory may hold NaN patterns, and 0 * NaN is NaN. */
#include "cpu.h"
#include "gdn_kernels.h"

#include <assert.h>
#include <errno.h>
#include <math.h>

/* ---- the oracle ---- */

static void ref_conv(const struct gdn_conv *a) {
    for (int t = 0; t < a->n_rows; t++)
        for (int ch = 0; ch < a->n_channels; ch++) {
            double sum = 0;

            for (int j = 0; j < a->taps; j++)
                sum += (double)a->weight[ch * a->taps + j] * (double)a->window[(t + j) * a->stride + ch];
            a->out[t * a->stride + ch] = (float)(sum / (1 + exp(-sum)));
        }
}

static void ref_l2_norm(const float *x, int n, double scale, double *out) {
    double sum = 0;

    for (int i = 0; i < n; i++)
        sum += (double)x[i] * (double)x[i];
    for (int i = 0; i < n; i++)
        out[i] = (double)x[i] / sqrt(sum + 1e-6) * scale;
}

/* One row of S over all rows of the run: the rows of S are independent of each other. */
static void ref_steps_state_row(const struct gdn_steps *a, int v, const double *qn, const double *kn, float *s) {
    for (int t = 0; t < a->n_rows; t++) {
        const double *q = qn + t * a->dk, *k = kn + t * a->dk;
        double decay = exp((double)a->g[t * a->g_stride]), read = 0, u, o = 0;

        for (int i = 0; i < a->dk; i++)
            read += decay * (double)s[i] * k[i];
        u = (double)a->beta[t * a->beta_stride] * ((double)a->v[t * a->v_stride + v] - read);
        for (int i = 0; i < a->dk; i++)
            s[i] = (float)(decay * (double)s[i] + u * k[i]);
        if (!a->q)
            continue;
        for (int i = 0; i < a->dk; i++)
            o += (double)s[i] * q[i];
        a->o[t * a->dv + v] = (float)o;
    }
}

static void ref_steps(const struct gdn_steps *a) {
    double *qn = a->scratch, *kn = qn + GDN_RUN_ROWS_MAX * a->dk;
    float *s = (float *)(kn + GDN_RUN_ROWS_MAX * a->dk);

    for (int t = 0; t < a->n_rows; t++) {
        ref_l2_norm(a->k + t * a->k_stride, a->dk, 1, kn + t * a->dk);
        if (a->q)
            ref_l2_norm(a->q + t * a->q_stride, a->dk, 1 / sqrt(a->dk), qn + t * a->dk);
    }
    for (int v = 0; v < a->dv; v++) {
        memcpy(s, a->s_in + v * a->dk, (size_t)a->dk * sizeof *s);
        ref_steps_state_row(a, v, qn, kn, s);
        if (a->s_out)
            memcpy(a->s_out + v * a->dk, s, (size_t)a->dk * sizeof *s);
    }
}

static void ref_gated_norm(const struct gdn_gated_norm *a) {
    for (int t = 0; t < a->n_rows; t++) {
        const float *o = a->o + t * a->dv, *z = a->z + (size_t)t * (size_t)a->z_stride;
        double sum = 0, scale;

        for (int i = 0; i < a->dv; i++)
            sum += (double)o[i] * (double)o[i];
        scale = 1 / sqrt(sum / a->dv + (double)a->eps);
        for (int i = 0; i < a->dv; i++) {
            double act = 1 / (1 + exp(-(double)z[i]));

            if (a->gate == GATE_SILU)
                act *= (double)z[i];
            a->out[(size_t)t * (size_t)a->out_stride + (size_t)i] =
                (float)((double)o[i] * scale * (double)a->w[i] * act);
        }
    }
}

static const struct gdn_kernels kernels_ref = {ref_conv, ref_steps, ref_gated_norm};

/* Without vectors FAST runs the oracle's arithmetic too: its rounding points are the mode's, not the kernels'. */
static const struct gdn_kernels *kernels_for(const struct device *device, int dk, int dv) {
    if (device->numeric == NUMERIC_FAST && device->isa >= CPU_ISA_AVX2 && dk % 8 == 0 && dv % 8 == 0)
        return &gdn_kernels_avx2;
    return &kernels_ref;
}

/* ---- what the two ops share ---- */

struct gdn_shape {
    int hk, hv, dk, dv, taps, conv_dim;
    enum dtype conv_dtype;
    size_t layer_bytes, s_bytes, slot_bytes;
};

static struct gdn_shape shape_of(const struct device *device, const struct state_view *s) {
    struct gdn_shape shape = {
        .hk = s->n_k_heads,
        .hv = s->n_v_heads,
        .dk = s->head_dim_k,
        .dv = s->head_dim_v,
        .taps = s->conv_taps,
        .conv_dim = state_conv_dim(s),
        .conv_dtype = device->caps.conv_dtype,
        .layer_bytes = state_layer_bytes(s, device->caps.conv_dtype),
        .s_bytes = (size_t)s->n_v_heads * (size_t)s->head_dim_v * (size_t)s->head_dim_k * sizeof(float),
        .slot_bytes = s->slot_bytes,
    };
    return shape;
}

static bool shape_is_sound(const struct state_view *s) {
    return s->n_k_heads > 0 && s->n_v_heads > 0 && s->n_v_heads % s->n_k_heads == 0 && s->head_dim_k > 0 &&
           s->head_dim_v > 0 && s->conv_taps >= 2 && s->conv_taps <= GDN_TAPS_MAX;
}

static char *state_at(const struct gdn_shape *shape, const struct state_view *state, int slot, int layer) {
    return (char *)state->arena + (size_t)slot * shape->slot_bytes + (size_t)layer * shape->layer_bytes;
}

static float conv_elem_load(enum dtype dtype, const void *src, size_t i) {
    return dtype == DTYPE_F32 ? ((const float *)src)[i] : bf16_to_f32(((const uint16_t *)src)[i]);
}

static void conv_elem_store(enum dtype dtype, void *dst, size_t i, float v) {
    if (dtype == DTYPE_F32)
        ((float *)dst)[i] = v;
    else
        ((uint16_t *)dst)[i] = bf16_from_f32(v);
}

/* Columns := the last taps - 1 of (columns ++ n rows of m) for channels [begin, end). In place is safe: a column moves
 * towards the front only. m is f32 (m_dtype F32) or already in the columns' type; rows m_stride elements apart. */
static void conv_shift(const struct gdn_shape *shape, const void *from, void *to, const void *m, enum dtype m_dtype,
                       size_t m_stride, int n, struct cpu_range channels) {
    for (int c = 0; c < shape->taps - 1; c++) {
        int src = n + c; /* column of the concatenation */

        for (int ch = channels.begin; ch < channels.end; ch++) {
            size_t at = (size_t)src * (size_t)shape->conv_dim + (size_t)ch;
            float v;

            if (src < shape->taps - 1)
                v = conv_elem_load(shape->conv_dtype, from, at);
            else
                v = conv_elem_load(m_dtype, m, (size_t)(src - (shape->taps - 1)) * m_stride + (size_t)ch);
            conv_elem_store(shape->conv_dtype, to, (size_t)c * (size_t)shape->conv_dim + (size_t)ch, v);
        }
    }
}

static void *worker_scratch(void *scratch, size_t bytes, int worker) {
    return (char *)scratch + (size_t)worker * bytes;
}

/* ---- gdn ---- */

struct gdn_job {
    const struct device *device;
    const struct gdn_args *args;
    struct gdn_shape shape;
    const struct gdn_kernels *kernels;
    void *scratch;
    size_t worker_bytes;
};

/* What one worker needs for one head's run of rows. Channels are the head's own: [q Dk][k Dk][v Dv]. */
struct gdn_run {
    float *window; /* [taps - 1 + GDN_RUN_ROWS_MAX, n_channels] */
    float *c;      /* [GDN_RUN_ROWS_MAX, n_channels] after conv + SiLU */
    float *weight; /* [n_channels, taps] */
    float *g, *beta, *o;
    void *steps;
};

static int run_channels(const struct state_view *s) {
    return 2 * s->head_dim_k + s->head_dim_v;
}

/* The bytes of it; fills *run if there is memory to point into. */
static size_t run_layout(const struct state_view *s, char *base, struct gdn_run *run) {
    size_t n_ch = (size_t)run_channels(s), at = 0;
    const size_t floats[] = {
        ((size_t)s->conv_taps - 1 + GDN_RUN_ROWS_MAX) * n_ch,
        GDN_RUN_ROWS_MAX * n_ch,
        n_ch * (size_t)s->conv_taps,
        GDN_RUN_ROWS_MAX,
        GDN_RUN_ROWS_MAX,
        GDN_RUN_ROWS_MAX * (size_t)s->head_dim_v,
    };
    float **const places[] = {&run->window, &run->c, &run->weight, &run->g, &run->beta, &run->o};

    for (size_t i = 0; i < ARRAY_LEN(floats); i++) {
        if (base)
            *places[i] = (float *)(void *)(base + at);
        at += align_up(floats[i] * sizeof(float), 64);
    }
    if (base)
        run->steps = base + at;
    return at + gdn_steps_scratch_bytes(s->head_dim_k);
}

/* First channel of the head's q, k and v among all conv channels, and how many follow. */
struct gdn_span {
    int from, n, to; /* to: place in the run's channels */
};

static void head_spans(const struct gdn_shape *shape, int head, struct gdn_span span[3]) {
    int key_head = head / (shape->hv / shape->hk);

    span[0] = (struct gdn_span){key_head * shape->dk, shape->dk, 0};
    span[1] = (struct gdn_span){(shape->hk + key_head) * shape->dk, shape->dk, shape->dk};
    span[2] = (struct gdn_span){2 * shape->hk * shape->dk + head * shape->dv, shape->dv, 2 * shape->dk};
}

static void gates(const struct gdn_args *a, int hv, int head, int row, float *ret_g, float *ret_beta) {
    const float *ba = a->ba + (size_t)row * 2 * (size_t)hv;
    double x = (double)ba[hv + head] + (double)a->dt_bias[head];
    double softplus = x > 20 ? x : log1p(exp(x));

    *ret_g = (float)((double)a->neg_a[head] * softplus);
    *ret_beta = (float)(1 / (1 + exp(-(double)ba[head])));
}

/* Key heads are shared by value heads: the first of them records k. */
static void record_rows(const struct gdn_job *job, const struct gdn_run *run, int head, int row0, int n) {
    const struct gdn_shape *shape = &job->shape;
    const struct gdn_record *record = job->args->record;
    const size_t layer_row = (size_t)job->args->layer * (size_t)job->args->batch->n_rows_max + (size_t)row0;
    const size_t kv_width = (size_t)shape->hk * (size_t)shape->dk + (size_t)shape->hv * (size_t)shape->dv;
    const int group = shape->hv / shape->hk, key_head = head / group, n_ch = 2 * shape->dk + shape->dv;
    struct gdn_span span[3];

    head_spans(shape, head, span);
    for (int t = 0; t < n; t++) {
        const float *m = run->window + (shape->taps - 1 + t) * n_ch, *c = run->c + t * n_ch;
        const size_t m_at = (layer_row + (size_t)t) * (size_t)shape->conv_dim;
        float *kv = record->kv + (layer_row + (size_t)t) * kv_width;
        float *gb = record->g_beta + (layer_row + (size_t)t) * 2 * (size_t)shape->hv;

        for (int i = head % group == 0 ? 0 : 2; i < 3; i++)
            for (int ch = 0; ch < span[i].n; ch++)
                conv_elem_store(shape->conv_dtype, record->m, m_at + (size_t)(span[i].from + ch), m[span[i].to + ch]);
        if (head % group == 0)
            memcpy(kv + key_head * shape->dk, c + shape->dk, (size_t)shape->dk * sizeof *c);
        memcpy(kv + shape->hk * shape->dk + head * shape->dv, c + 2 * shape->dk, (size_t)shape->dv * sizeof *c);
        gb[head] = run->g[t];
        gb[shape->hv + head] = run->beta[t];
    }
}

static void round_rows(const struct device *device, float *x, size_t stride, int n_rows, int width) {
    if (device->numeric != NUMERIC_BF16)
        return;
    for (int t = 0; t < n_rows; t++)
        for (int i = 0; i < width; i++)
            x[(size_t)t * stride + (size_t)i] = cpu_round_act(device, x[(size_t)t * stride + (size_t)i]);
}

/* n <= GDN_RUN_ROWS_MAX rows from row0 on; the window holds the taps - 1 columns before them. */
static void gdn_run_rows(const struct gdn_job *job, const struct gdn_run *run, int head, int row0, int n,
                         const float *s_in, float *s_out) {
    const struct gdn_args *a = job->args;
    const struct gdn_shape *shape = &job->shape;
    const int n_ch = 2 * shape->dk + shape->dv;
    const size_t out_stride = (size_t)shape->hv * (size_t)shape->dv;
    const float *mz = (const float *)a->mz + (size_t)row0 * (size_t)a->mz_stride;
    float *out = (float *)a->out + (size_t)row0 * out_stride + (size_t)head * (size_t)shape->dv;
    struct gdn_span span[3];

    head_spans(shape, head, span);
    for (int t = 0; t < n; t++)
        for (int i = 0; i < 3; i++) {
            const float *src = mz + (size_t)t * (size_t)a->mz_stride + span[i].from;
            float *dst = run->window + (shape->taps - 1 + t) * n_ch + span[i].to;

            for (int ch = 0; ch < span[i].n; ch++)
                dst[ch] = shape->conv_dtype == DTYPE_F32 ? src[ch] : bf16_round(src[ch]);
        }
    job->kernels->conv(&(struct gdn_conv){n, n_ch, shape->taps, run->window, run->weight, run->c, n_ch});
    round_rows(job->device, run->c, (size_t)n_ch, n, n_ch);
    for (int t = 0; t < n; t++)
        gates(a, shape->hv, head, row0 + t, &run->g[t], &run->beta[t]);
    if (a->mode == GDN_FROZEN)
        record_rows(job, run, head, row0, n);

    job->kernels->steps(&(struct gdn_steps){
        .n_rows = n,
        .dk = shape->dk,
        .dv = shape->dv,
        .q = run->c,
        .k = run->c + shape->dk,
        .v = run->c + 2 * shape->dk,
        .q_stride = n_ch,
        .k_stride = n_ch,
        .v_stride = n_ch,
        .g = run->g,
        .beta = run->beta,
        .g_stride = 1,
        .beta_stride = 1,
        .s_in = s_in,
        .s_out = s_out,
        .o = run->o,
        .scratch = run->steps,
    });
    round_rows(job->device, run->o, (size_t)shape->dv, n, shape->dv);
    job->kernels->gated_norm(&(struct gdn_gated_norm){
        .n_rows = n,
        .dv = shape->dv,
        .o = run->o,
        .z = mz + shape->conv_dim + head * shape->dv,
        .z_stride = a->mz_stride,
        .w = a->norm,
        .eps = a->eps,
        .gate = a->gate,
        .out = out,
        .out_stride = (int)out_stride,
    });
    round_rows(job->device, out, out_stride, n, shape->dv);
}

static void gdn_head(const struct gdn_job *job, const struct gdn_run *run, int seg, int head) {
    const struct gdn_args *a = job->args;
    const struct gdn_shape *shape = &job->shape;
    const int n_ch = 2 * shape->dk + shape->dv, n_before = shape->taps - 1;
    const int row0 = a->batch->seg_row[seg], n_rows = a->batch->seg_row[seg + 1] - row0;
    char *state = state_at(shape, a->state, a->state->live[a->batch->seg_slot[seg]], a->layer);
    float *s = (float *)(void *)state + (size_t)head * (size_t)shape->dv * (size_t)shape->dk;
    struct gdn_span span[3];

    assert(a->mode == GDN_ADVANCE || n_rows <= GDN_RUN_ROWS_MAX);
    head_spans(shape, head, span);
    for (int i = 0; i < 3; i++) {
        for (int c = 0; c < n_before; c++)
            for (int ch = 0; ch < span[i].n; ch++)
                run->window[c * n_ch + span[i].to + ch] =
                    conv_elem_load(shape->conv_dtype, state + shape->s_bytes,
                                   (size_t)c * (size_t)shape->conv_dim + (size_t)(span[i].from + ch));
        memcpy(run->weight + span[i].to * shape->taps, a->conv + (size_t)span[i].from * (size_t)shape->taps,
               (size_t)span[i].n * (size_t)shape->taps * sizeof(float));
    }
    for (int t = 0; t < n_rows; t += GDN_RUN_ROWS_MAX) {
        int n = min_int(GDN_RUN_ROWS_MAX, n_rows - t);

        gdn_run_rows(job, run, head, row0 + t, n, s, a->mode == GDN_ADVANCE ? s : NULL);
        memmove(run->window, run->window + n * n_ch, (size_t)n_before * (size_t)n_ch * sizeof(float));
    }
}

static void gdn_share(void *arg, int worker, int n_workers) {
    const struct gdn_job *job = arg;
    const int hv = job->shape.hv;
    struct cpu_range units = cpu_share(*job->args->batch->n_segs * hv, 1, worker, n_workers);
    struct gdn_run run;

    assert(n_workers <= job->device->caps.n_threads);
    run_layout(job->args->state, worker_scratch(job->scratch, job->worker_bytes, worker), &run);
    for (int unit = units.begin; unit < units.end; unit++)
        gdn_head(job, &run, unit / hv, unit % hv);
}

/* A pass of its own: value heads of one key head all read its columns before they move. */
static void gdn_conv_share(void *arg, int worker, int n_workers) {
    const struct gdn_job *job = arg;
    const struct gdn_args *a = job->args;
    struct cpu_range channels = cpu_share(job->shape.conv_dim, 64, worker, n_workers);

    for (int seg = 0; seg < *a->batch->n_segs; seg++) {
        int row0 = a->batch->seg_row[seg], n = a->batch->seg_row[seg + 1] - row0;
        int slot = a->state->live[a->batch->seg_slot[seg]];
        char *columns = state_at(&job->shape, a->state, slot, a->layer) + job->shape.s_bytes;

        conv_shift(&job->shape, columns, columns, (const float *)a->mz + (size_t)row0 * (size_t)a->mz_stride, DTYPE_F32,
                   (size_t)a->mz_stride, n, channels);
    }
}

static void run_gdn(struct device *device, const void *args, void *scratch) {
    const struct gdn_args *a = args;
    struct gdn_run layout;
    struct gdn_job job = {
        .device = device,
        .args = a,
        .shape = shape_of(device, a->state),
        .kernels = kernels_for(device, a->state->head_dim_k, a->state->head_dim_v),
        .scratch = scratch,
        .worker_bytes = run_layout(a->state, NULL, &layout),
    };

    if (*a->batch->n_segs == 0)
        return;
    cpu_parallel(device, gdn_share, &job);
    if (a->mode == GDN_ADVANCE)
        cpu_parallel(device, gdn_conv_share, &job);
}

int cpu_gdn(struct program *program, const struct gdn_args *args) {
    struct gdn_args a = *args;
    struct gdn_run layout;

    if (!shape_is_sound(a.state) || (a.mode == GDN_FROZEN && !a.record))
        return -EINVAL;
    a.batch = cpu_program_keep(program, args->batch, sizeof *args->batch);
    a.state = cpu_program_keep(program, args->state, sizeof *args->state);
    a.record = cpu_program_keep(program, args->record, sizeof *args->record);
    return cpu_program_add(program, run_gdn, &a, sizeof a,
                           (size_t)cpu_program_device(program)->caps.n_threads *
                               run_layout(args->state, NULL, &layout));
}

/* ---- commit ---- */

struct commit_job {
    const struct device *device;
    const struct gdn_commit_args *args;
    struct gdn_shape shape;
    const struct gdn_kernels *kernels;
    void *scratch;
    size_t worker_bytes;
};

/* Replays rows [from, to) of the seg. */
static void commit_steps(const struct commit_job *job, void *scratch, int layer, int seg, int head, int from, int to,
                         const float *s_in, float *s_out) {
    const struct gdn_commit_args *a = job->args;
    const struct gdn_shape *shape = &job->shape;
    const size_t row = (size_t)layer * (size_t)a->batch->n_rows_max + (size_t)a->batch->seg_row[seg] + (size_t)from;
    const int kv_width = shape->hk * shape->dk + shape->hv * shape->dv;
    const float *kv = a->record->kv + row * (size_t)kv_width, *gb = a->record->g_beta + row * 2 * (size_t)shape->hv;

    job->kernels->steps(&(struct gdn_steps){
        .n_rows = to - from,
        .dk = shape->dk,
        .dv = shape->dv,
        .k = kv + head / (shape->hv / shape->hk) * shape->dk,
        .v = kv + shape->hk * shape->dk + head * shape->dv,
        .k_stride = kv_width,
        .v_stride = kv_width,
        .g = gb + head,
        .beta = gb + shape->hv + head,
        .g_stride = 2 * shape->hv,
        .beta_stride = 2 * shape->hv,
        .s_in = s_in,
        .s_out = s_out,
        .scratch = scratch,
    });
}

/* One head's S and its share of the layer's conv columns. */
static void commit_unit(const struct commit_job *job, void *scratch, int layer, int seg, int head) {
    const struct gdn_commit_args *a = job->args;
    const struct gdn_shape *shape = &job->shape;
    const int n = a->seg_commit[seg], snapshot = a->seg_snapshot[seg], slot = a->batch->seg_slot[seg];
    const size_t head_elems = (size_t)shape->dv * (size_t)shape->dk;
    const size_t m_row = (size_t)layer * (size_t)a->batch->n_rows_max + (size_t)a->batch->seg_row[seg];
    const char *m = (const char *)a->record->m + m_row * (size_t)shape->conv_dim * dtype_bytes(shape->conv_dtype);
    const struct cpu_range channels = cpu_share(shape->conv_dim, 16, head, shape->hv);
    char *live = state_at(shape, a->state, a->state->live[slot], layer);
    float *s = (float *)(void *)live + (size_t)head * head_elems;

    if (n == 0)
        return;
    assert(n <= a->batch->seg_row[seg + 1] - a->batch->seg_row[seg] && n <= GDN_RUN_ROWS_MAX);
    assert(snapshot >= 0 && snapshot <= n);
    if (snapshot > 0) {
        char *rolling = state_at(shape, a->state, a->state->rolling[slot], layer);
        float *kept = (float *)(void *)rolling + (size_t)head * head_elems;

        commit_steps(job, scratch, layer, seg, head, 0, snapshot, s, kept);
        commit_steps(job, scratch, layer, seg, head, snapshot, n, kept, s);
        conv_shift(shape, live + shape->s_bytes, rolling + shape->s_bytes, m, shape->conv_dtype,
                   (size_t)shape->conv_dim, snapshot, channels);
    } else {
        commit_steps(job, scratch, layer, seg, head, 0, n, s, s);
    }
    conv_shift(shape, live + shape->s_bytes, live + shape->s_bytes, m, shape->conv_dtype, (size_t)shape->conv_dim, n,
               channels);
}

static void commit_share(void *arg, int worker, int n_workers) {
    const struct commit_job *job = arg;
    const int hv = job->shape.hv, n_segs = *job->args->batch->n_segs;
    struct cpu_range units = cpu_share(job->args->state->n_layers * n_segs * hv, 1, worker, n_workers);
    void *scratch = worker_scratch(job->scratch, job->worker_bytes, worker);

    assert(n_workers <= job->device->caps.n_threads);
    for (int unit = units.begin; unit < units.end; unit++)
        commit_unit(job, scratch, unit / hv / n_segs, unit / hv % n_segs, unit % hv);
}

static void run_gdn_commit(struct device *device, const void *args, void *scratch) {
    const struct gdn_commit_args *a = args;
    struct commit_job job = {
        .device = device,
        .args = a,
        .shape = shape_of(device, a->state),
        .kernels = kernels_for(device, a->state->head_dim_k, a->state->head_dim_v),
        .scratch = scratch,
        .worker_bytes = gdn_steps_scratch_bytes(a->state->head_dim_k),
    };

    if (*a->batch->n_segs > 0)
        cpu_parallel(device, commit_share, &job);
}

int cpu_gdn_commit(struct program *program, const struct gdn_commit_args *args) {
    struct gdn_commit_args a = *args;

    if (!shape_is_sound(a.state))
        return -EINVAL;
    a.batch = cpu_program_keep(program, args->batch, sizeof *args->batch);
    a.state = cpu_program_keep(program, args->state, sizeof *args->state);
    a.record = cpu_program_keep(program, args->record, sizeof *args->record);
    return cpu_program_add(program, run_gdn_commit, &a, sizeof a,
                           (size_t)cpu_program_device(program)->caps.n_threads *
                               gdn_steps_scratch_bytes(args->state->head_dim_k));
}
