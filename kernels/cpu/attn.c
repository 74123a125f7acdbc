/* attn: paged attention. A row reads exactly the keys it sees: pages outside its window may be gone, and what lies in a
 * page beyond the seq's length may be anything, NaN included. */
#include "attn_unit.h"

#include <assert.h>
#include <errno.h>
#include <math.h>

/* ---- the oracle: one (row, head) at a time ---- */

struct ref_part { /* of one span, or of all spans so far; n_keys 0: nothing seen */
    int n_keys;
    double max, sum;
    double *out; /* [head_dim] */
};

struct ref_carry {
    int n_keys;
    double max, sum;
    double out[]; /* [head_dim] */
};

static size_t ref_carry_bytes(int head_dim) {
    return sizeof(struct ref_carry) + (size_t)head_dim * sizeof(double);
}

struct ref_scratch {
    double scores[SPAN_TOKENS];
    struct ref_part span, total;
    double *outs; /* [2, head_dim] */
    float *x;     /* [head_dim] one K or V row */
};

static size_t ref_scratch_bytes(int head_dim) {
    return align_up(sizeof(struct ref_scratch) + (size_t)head_dim * (2 * sizeof(double) + sizeof(float)), 64);
}

static void ref_read(const struct attn_unit *unit, enum kv_half half, bool block, int key, float *x) {
    const struct attn_args *a = unit->args;

    if (block) {
        memcpy(x, attn_block_row(unit, half, key), (size_t)a->head_dim * sizeof *x);
    } else {
        int page = kv_page_of(a->kv, a->batch->seg_slot[unit->seg], key);

        kv_elems_load(a->kv->dtype, x, kv_row(a->kv, page, a->layer, half, unit->kv_head, key), a->head_dim);
    }
}

/* Block rows are activations and carry no scale. */
static double ref_scale(const struct attn_unit *unit, enum kv_half half, bool block) {
    const struct attn_args *a = unit->args;

    return block ? 1 : (double)(half == KV_K ? a->kv->k_scale : a->kv->v_scale)[a->layer];
}

static void ref_span(const struct attn_unit *unit, const float *q, bool block, struct attn_keys keys,
                     struct ref_scratch *s) {
    const int d = unit->args->head_dim;
    const double k_scale = ref_scale(unit, KV_K, block) / sqrt(d), v_scale = ref_scale(unit, KV_V, block);
    struct ref_part *span = &s->span;

    span->n_keys = keys.hi - keys.lo;
    span->max = -INFINITY;
    span->sum = 0;
    for (int key = keys.lo; key < keys.hi; key++) {
        double dot = 0;

        ref_read(unit, KV_K, block, key, s->x);
        for (int i = 0; i < d; i++)
            dot += (double)q[i] * (double)s->x[i];
        s->scores[key - keys.lo] = dot * k_scale;
        span->max = fmax(span->max, s->scores[key - keys.lo]);
    }
    memset(span->out, 0, (size_t)d * sizeof *span->out);
    for (int key = keys.lo; key < keys.hi; key++) {
        double p = exp(s->scores[key - keys.lo] - span->max);

        ref_read(unit, KV_V, block, key, s->x);
        span->sum += p;
        for (int i = 0; i < d; i++)
            span->out[i] += p * ((double)s->x[i] * v_scale);
    }
}

static void ref_merge(struct ref_part *total, const struct ref_part *span, int d) {
    double max = fmax(total->max, span->max), a, b;

    if (total->n_keys == 0) {
        double *out = total->out;

        memcpy(out, span->out, (size_t)d * sizeof *out);
        *total = *span;
        total->out = out;
        return;
    }
    a = exp(total->max - max);
    b = exp(span->max - max);
    total->n_keys += span->n_keys;
    total->max = max;
    total->sum = total->sum * a + span->sum * b;
    for (int i = 0; i < d; i++)
        total->out[i] = total->out[i] * a + span->out[i] * b;
}

static void ref_load(struct ref_part *total, const struct ref_carry *carry, int d) {
    total->n_keys = carry->n_keys;
    total->max = carry->max;
    total->sum = carry->sum;
    memcpy(total->out, carry->out, (size_t)d * sizeof *total->out);
}

static void ref_save(const struct ref_part *total, struct ref_carry *carry, int d) {
    carry->n_keys = total->n_keys;
    carry->max = total->max;
    carry->sum = total->sum;
    memcpy(carry->out, total->out, (size_t)d * sizeof *total->out);
}

static void ref_row(const struct attn_unit *unit, int j, int head, struct ref_scratch *s) {
    const struct attn_args *a = unit->args;
    const int d = a->head_dim, row = a->batch->seg_row[unit->seg] + j;
    const size_t at = attn_row_at(unit, j, head);
    const float *q = (const float *)a->q + at;
    const float *gate = a->gate ? (const float *)a->gate + (size_t)row * (size_t)a->gate_stride +
                                      (size_t)head * (size_t)a->gate_head_stride
                                : NULL;
    struct attn_keys context = attn_context_keys(unit, j), block = attn_block_keys(unit, j);
    float *out = (float *)a->out + at;

    s->total.n_keys = 0;
    if (unit->spans.begin > 0)
        ref_load(&s->total, (const void *)attn_carry(unit, j, head), d);
    for (int from = context.lo; from < context.hi;) {
        int end = min_int(context.hi, (from / SPAN_TOKENS + 1) * SPAN_TOKENS);

        ref_span(unit, q, false, (struct attn_keys){from, end}, s);
        ref_merge(&s->total, &s->span, d);
        from = end;
    }
    if (block.lo < block.hi) {
        ref_span(unit, q, true, block, s);
        ref_merge(&s->total, &s->span, d);
    }
    if (unit->spans.end != ATTN_SPANS_END) {
        ref_save(&s->total, (void *)attn_carry(unit, j, head), d);
        return;
    }
    for (int i = 0; i < d; i++) {
        double y = s->total.n_keys ? s->total.out[i] / s->total.sum : 0;

        if (gate)
            y /= 1 + exp(-(double)gate[i]);
        out[i] = cpu_round_act(unit->device, (float)y);
    }
}

static void ref_unit(const struct attn_unit *unit, void *scratch) {
    const int d = unit->args->head_dim, group = unit->args->n_heads / unit->args->n_kv_heads;
    struct ref_scratch *s = scratch;

    s->outs = (double *)(s + 1);
    s->x = (float *)(s->outs + 2 * d);
    s->span.out = s->outs;
    s->total.out = s->outs + d;
    for (int j = unit->row_begin; j < unit->row_end; j++)
        for (int h = 0; h < group; h++)
            ref_row(unit, j, unit->kv_head * group + h, s);
}

/* ---- the op ---- */

typedef void attn_unit_fn(const struct attn_unit *unit, void *scratch);

struct attn_kernel {
    attn_unit_fn *run;
    size_t scratch_bytes; /* of one worker */
    size_t carry_bytes;   /* of one (row, head) */
};

/* Without vectors FAST runs the oracle's arithmetic too: nothing in attention is rounded below f32. */
static struct attn_kernel kernel_for(const struct device *device, const struct attn_args *a) {
    if (device->numeric == NUMERIC_FAST && device->isa >= CPU_ISA_AVX2 && a->head_dim % 8 == 0)
        return (struct attn_kernel){attn_avx2_unit, attn_avx2_scratch_bytes(a), attn_avx2_carry_bytes(a)};
    return (struct attn_kernel){ref_unit, ref_scratch_bytes(a->head_dim), ref_carry_bytes(a->head_dim)};
}

/* Every worker's scratch, then what runs over some spans carry on to the next. */
static size_t scratch_bytes(const struct device *device, const struct attn_args *a) {
    const struct attn_kernel kernel = kernel_for(device, a);
    size_t bytes = align_up((size_t)device->caps.n_threads * kernel.scratch_bytes, 64);

    return a->spans ? bytes + (size_t)a->batch->n_rows_max * (size_t)a->n_heads * kernel.carry_bytes : bytes;
}

struct attn_job {
    const struct device *device;
    const struct attn_args *args;
    struct attn_kernel kernel;
    void *scratch;
};

/* Units are dealt out round robin: later rows of a prefill see more keys, so contiguous shares would be uneven. */
static void attn_share(void *arg, int worker, int n_workers) {
    const struct attn_job *job = arg;
    const struct attn_args *a = job->args;
    struct attn_unit unit = {
        .device = job->device,
        .args = a,
        .spans = a->spans ? *a->spans : (struct attn_spans){0, ATTN_SPANS_END},
        .carry = (char *)job->scratch + align_up((size_t)job->device->caps.n_threads * job->kernel.scratch_bytes, 64),
        .carry_bytes = job->kernel.carry_bytes,
    };
    void *scratch = (char *)job->scratch + (size_t)worker * job->kernel.scratch_bytes;
    int turn = 0;

    assert(n_workers <= job->device->caps.n_threads);
    for (unit.seg = 0; unit.seg < *a->batch->n_segs; unit.seg++) {
        int n_rows = a->batch->seg_row[unit.seg + 1] - a->batch->seg_row[unit.seg];

        assert(!a->block_k || n_rows <= SPAN_TOKENS);
        for (unit.row_begin = 0; unit.row_begin < n_rows; unit.row_begin += ATTN_UNIT_ROWS) {
            unit.row_end = min_int(n_rows, unit.row_begin + ATTN_UNIT_ROWS);
            for (unit.kv_head = 0; unit.kv_head < a->n_kv_heads; unit.kv_head++)
                if (turn++ % n_workers == worker)
                    job->kernel.run(&unit, scratch);
        }
    }
}

static void run_attn(struct device *device, const void *args, void *scratch) {
    const struct attn_args *a = args;
    struct attn_job job = {device, a, kernel_for(device, a), scratch};

    if (*a->batch->n_segs > 0)
        cpu_parallel(device, attn_share, &job);
}

int cpu_attn(struct program *program, const struct attn_args *args) {
    const struct device *device = cpu_program_device(program);
    struct attn_args a = *args;

    if (a.head_dim <= 0 || a.n_kv_heads <= 0 || a.n_heads % a.n_kv_heads != 0 || a.kv->head_dim != a.head_dim ||
        a.kv->n_kv_heads != a.n_kv_heads)
        return -EINVAL;
    a.batch = cpu_program_keep(program, args->batch, sizeof *args->batch);
    a.kv = cpu_program_keep(program, args->kv, sizeof *args->kv);
    return cpu_program_add(program, run_attn, &a, sizeof a, scratch_bytes(device, args));
}
