/* moe: the mixture-of-experts layer. Tokens are grouped by expert, so that an expert's weights are read once however many
 * tokens chose it, and all experts of a step run in one parallel region. A token's result does not depend on its group:
 * products are the same in every batch, and its experts are summed in the order of its own choice. */
#include "fast_exp.h"
#include "gemm.h"

#include <assert.h>
#include <errno.h>

enum { ALONE_MAX = 8 * 1024 }; /* elements below which waking the workers costs more than the work */

/* Where a job's results go. */
struct dst {
    const struct device *device;
    float *y; /* of the job's row 0 */
    size_t stride;
};

struct moe_op {
    struct moe_args args;
    const struct batch *batch;
    /* Offsets into the scratch. R = n_rows_max, S = R * top_k slots: a slot is one (row, choice), in order of experts. */
    size_t h;           /* f32 [R, hidden] normalised, rounded as GEMM inputs */
    size_t packed_h;    /* the same, packed */
    size_t logits;      /* f32 [R, n_experts + 1] */
    size_t weights;     /* f64 [R, top_k] */
    size_t shared_gate; /* f64 [R] */
    size_t ids;         /* int32 [R, top_k] */
    size_t slot_of;     /* int32 [R, top_k] */
    size_t slot_row;    /* int32 [S] */
    size_t first;       /* int32 [n_experts + 1] first slot of each expert */
    size_t used;        /* bool [n_threads, n_experts] */
    size_t packed_x;    /* [S, hidden] gathered rows of h, packed per expert */
    size_t act;         /* f32 [S, width], then packed */
    size_t packed_act;
    size_t shared_act; /* f32 [R, shared_width], then packed */
    size_t packed_shared;
    size_t out;        /* f32 [S, hidden] */
    size_t shared_out; /* f32 [R, hidden] */
    size_t jobs, dsts; /* [n_experts + 1] */
    size_t bytes;
};

/* One run: the op, its rows, and the scratch as arrays. */
struct moe {
    struct device *device;
    const struct moe_args *args;
    int n_rows;
    float *h, *logits, *act, *shared_act, *out, *shared_out;
    double *weights, *shared_gate;
    int32_t *ids, *slot_of, *slot_row, *first;
    bool *used;
    char *packed_h, *packed_x, *packed_act, *packed_shared;
    struct gemm_job *jobs;
    struct dst *dsts;
};

static bool is_alone(int64_t n_elements) {
    return n_elements <= ALONE_MAX;
}

/* Runs fn on all workers, or on this one alone if there is little to do. */
static void spread(const struct moe *moe, int64_t n_elements, cpu_task_fn *fn) {
    if (is_alone(n_elements))
        fn((void *)(uintptr_t)moe, 0, 1);
    else
        cpu_parallel(moe->device, fn, (void *)(uintptr_t)moe);
}

/* ---- routing ------------------------------------------------------------------------------------------------------ */

static void norm_share(void *arg, int worker, int n_workers) {
    const struct moe *moe = arg;
    const struct moe_args *args = moe->args;
    struct cpu_range rows = cpu_share(moe->n_rows, 1, worker, n_workers);

    for (int row = rows.begin; row < rows.end; row++) {
        float *h = moe->h + (size_t)row * (size_t)args->hidden;

        cpu_rms_norm(moe->device, (const float *)args->x + (size_t)row * (size_t)args->hidden, args->norm, args->hidden,
                     args->eps, h);
        for (int i = 0; i < args->hidden; i++)
            h[i] = cpu_round_gemm_in(moe->device, h[i]);
    }
}

/* By falling logit, ties to the lower id. Softmax is monotone, so these are the ids of the largest probabilities. */
static void choose(const float *logits, int n_experts, int top_k, bool *used, int32_t *ids) {
    memset(used, 0, (size_t)n_experts * sizeof *used);
    for (int j = 0; j < top_k; j++) {
        int best = -1;

        for (int e = 0; e < n_experts; e++)
            if (!used[e] && (best < 0 || logits[e] > logits[best]))
                best = e;
        used[best] = true;
        ids[j] = best;
    }
}

static void route_row(const struct moe *moe, int row, bool *used) {
    const struct moe_args *args = moe->args;
    const float *logits = moe->logits + (size_t)row * (size_t)(args->n_experts + 1);
    int32_t *ids = moe->ids + (size_t)row * (size_t)args->top_k;
    double *weights = moe->weights + (size_t)row * (size_t)args->top_k;
    double gate = logits[args->n_experts], sum = 0;
    float max;

    if (args->forced != NULL) {
        for (int j = 0; j < args->top_k; j++) {
            int32_t id = args->forced[(size_t)row * (size_t)args->top_k + (size_t)j];

            ids[j] = id >= 0 && id < args->n_experts ? id : 0;
        }
    } else {
        choose(logits, args->n_experts, args->top_k, used, ids);
    }
    /* The softmax over all experts, renormalised over the chosen ones, is the softmax over the chosen ones. */
    max = logits[ids[0]];
    for (int j = 1; j < args->top_k; j++)
        max = logits[ids[j]] > max ? logits[ids[j]] : max;
    for (int j = 0; j < args->top_k; j++)
        sum += exp((double)logits[ids[j]] - (double)max);
    for (int j = 0; j < args->top_k; j++)
        weights[j] = exp((double)logits[ids[j]] - (double)max) / sum;
    moe->shared_gate[row] = 1.0 / (1.0 + exp(-gate));
    if (args->routing != NULL)
        memcpy(args->routing + (size_t)row * (size_t)args->top_k, ids, (size_t)args->top_k * sizeof *ids);
}

static void route_share(void *arg, int worker, int n_workers) {
    const struct moe *moe = arg;
    struct cpu_range rows = cpu_share(moe->n_rows, 1, worker, n_workers);

    for (int row = rows.begin; row < rows.end; row++)
        route_row(moe, row, moe->used + (size_t)worker * (size_t)moe->args->n_experts);
}

/* Slots in order of experts, rows ascending within one: a counting sort. */
static void group(const struct moe *moe) {
    int n_slots = moe->n_rows * moe->args->top_k, n_experts = moe->args->n_experts;
    int32_t at = 0;

    memset(moe->first, 0, (size_t)(n_experts + 1) * sizeof *moe->first);
    for (int i = 0; i < n_slots; i++)
        moe->first[moe->ids[i]]++;
    for (int e = 0; e <= n_experts; e++) { /* counts to first slots */
        int32_t n = moe->first[e];

        moe->first[e] = at;
        at += n;
    }
    for (int i = 0; i < n_slots; i++) {
        int32_t slot = moe->first[moe->ids[i]]++;

        moe->slot_of[i] = slot;
        moe->slot_row[slot] = i / moe->args->top_k;
    }
    for (int e = n_experts; e > 0; e--) /* each has moved to where the next begins */
        moe->first[e] = moe->first[e - 1];
    moe->first[0] = 0;
}

/* ---- experts ------------------------------------------------------------------------------------------------------ */

static char *packed_at(char *packed, int slot, int n_cols) { /* the groups lie end to end */
    return packed + (size_t)slot * gemm_packed_row_bytes(n_cols);
}

static int group_rows(const struct moe *moe, int e) {
    return moe->first[e + 1] - moe->first[e];
}

static void gather_share(void *arg, int worker, int n_workers) {
    const struct moe *moe = arg;
    int hidden = moe->args->hidden;

    for (int e = worker; e < moe->args->n_experts; e += n_workers) {
        struct gemm_rows rows = {.x = moe->h,
                                 .stride = (size_t)hidden,
                                 .index = moe->slot_row + moe->first[e],
                                 .n_rows = group_rows(moe, e),
                                 .n_cols = hidden};

        if (rows.n_rows > 0)
            gemm_pack_alone(moe->device, &rows, packed_at(moe->packed_x, moe->first[e], hidden), NULL);
    }
}

static void pack_act_share(void *arg, int worker, int n_workers) {
    const struct moe *moe = arg;
    int width = moe->args->width;

    for (int e = worker; e < moe->args->n_experts; e += n_workers) {
        struct gemm_rows rows = {.x = moe->act + (size_t)moe->first[e] * (size_t)width,
                                 .stride = (size_t)width,
                                 .n_rows = group_rows(moe, e),
                                 .n_cols = width};

        if (rows.n_rows > 0)
            gemm_pack_alone(moe->device, &rows, packed_at(moe->packed_act, moe->first[e], width), NULL);
    }
}

static void emit_swiglu(const struct gemm_job *job, int unit, int row, int n_rows, const float (*acc)[PANEL_ROWS],
                        const float (*acc_up)[PANEL_ROWS]) {
    const struct dst *dst = job->arg;
    int first = unit * PANEL_ROWS, n = min_int(PANEL_ROWS, job->weight->n_rows / 2 - first);

    for (int i = 0; i < n_rows; i++)
        cpu_swiglu(dst->device, acc[i], acc_up[i], n, dst->y + (size_t)(row + i) * dst->stride + first);
}

static void emit_store(const struct gemm_job *job, int unit, int row, int n_rows, const float (*acc)[PANEL_ROWS],
                       const float (*acc_up)[PANEL_ROWS]) {
    const struct dst *dst = job->arg;
    int first = unit * PANEL_ROWS, n = min_int(PANEL_ROWS, job->weight->n_rows - first);

    (void)acc_up;
    for (int i = 0; i < n_rows; i++)
        memcpy(dst->y + (size_t)(row + i) * dst->stride + first, acc[i], (size_t)n * sizeof **acc);
}

static void add_job(const struct moe *moe, int *n_jobs, struct gemm_job job, float *y, int stride) {
    moe->dsts[*n_jobs] = (struct dst){moe->device, y, (size_t)stride};
    job.arg = &moe->dsts[*n_jobs];
    moe->jobs[(*n_jobs)++] = job;
}

static void run_gate_up(const struct moe *moe) {
    const struct moe_args *args = moe->args;
    int n_jobs = 0;

    for (int e = 0; e < args->n_experts; e++) {
        /* One row is its own group whatever it chose: nothing to gather. */
        const char *packed = moe->n_rows == 1 ? moe->packed_h : packed_at(moe->packed_x, moe->first[e], args->hidden);
        struct gemm_job job = {args->gate_up, e, packed, group_rows(moe, e), emit_swiglu, NULL};

        if (moe->n_rows == 1 && job.n_rows > 1) { /* forced to one expert several times */
            for (int i = 0; i < job.n_rows; i++) {
                struct gemm_job one = {args->gate_up, e, packed, 1, emit_swiglu, NULL};

                add_job(moe, &n_jobs, one, moe->act + (size_t)(moe->first[e] + i) * (size_t)args->width, args->width);
            }
        } else if (job.n_rows > 0) {
            add_job(moe, &n_jobs, job, moe->act + (size_t)moe->first[e] * (size_t)args->width, args->width);
        }
    }
    if (args->shared_gate_up != NULL)
        add_job(moe, &n_jobs, (struct gemm_job){args->shared_gate_up, 0, moe->packed_h, moe->n_rows, emit_swiglu, NULL},
                moe->shared_act, args->shared_width);
    gemm_run(moe->device, moe->jobs, n_jobs);
}

static void run_down(const struct moe *moe) {
    const struct moe_args *args = moe->args;
    int n_jobs = 0;

    for (int e = 0; e < args->n_experts; e++) {
        const char *packed = packed_at(moe->packed_act, moe->first[e], args->width);
        struct gemm_job job = {args->down, e, packed, group_rows(moe, e), emit_store, NULL};

        if (job.n_rows > 0)
            add_job(moe, &n_jobs, job, moe->out + (size_t)moe->first[e] * (size_t)args->hidden, args->hidden);
    }
    if (args->shared_down != NULL)
        add_job(moe, &n_jobs,
                (struct gemm_job){args->shared_down, 0, moe->packed_shared, moe->n_rows, emit_store, NULL},
                moe->shared_out, args->hidden);
    gemm_run(moe->device, moe->jobs, n_jobs);
}

/* ---- weighted sum and residual ------------------------------------------------------------------------------------- */

static void combine_share(void *arg, int worker, int n_workers) {
    const struct moe *moe = arg;
    const struct moe_args *args = moe->args;
    struct cpu_range cols = cpu_share(args->hidden, PANEL_ROWS, worker, n_workers);
    bool has_shared = args->shared_down != NULL, is_fast = moe->device->numeric == NUMERIC_FAST;

    for (int row = 0; row < moe->n_rows; row++) {
        const int32_t *slots = moe->slot_of + (size_t)row * (size_t)args->top_k;
        const double *weights = moe->weights + (size_t)row * (size_t)args->top_k;
        const float *shared = moe->shared_out + (size_t)row * (size_t)args->hidden;
        float *x = (float *)args->x + (size_t)row * (size_t)args->hidden;

        for (int c = cols.begin; c < cols.end; c++) {
            const float *out = moe->out + c;

            if (is_fast) {
                float sum = 0;

                for (int j = 0; j < args->top_k; j++)
                    sum += (float)weights[j] * out[(size_t)slots[j] * (size_t)args->hidden];
                if (has_shared)
                    sum += (float)moe->shared_gate[row] * shared[c];
                x[c] += sum;
            } else {
                double sum = 0;

                for (int j = 0; j < args->top_k; j++)
                    sum += weights[j] * (double)out[(size_t)slots[j] * (size_t)args->hidden];
                if (has_shared)
                    sum += moe->shared_gate[row] * (double)shared[c];
                x[c] = cpu_round_act(moe->device, (float)((double)x[c] + sum));
            }
        }
    }
}

/* ---- the op ------------------------------------------------------------------------------------------------------- */

static void run_moe(struct device *device, const void *op_args, void *scratch) {
    const struct moe_op *op = op_args;
    const struct moe_args *args = &op->args;
    char *base = scratch;
    struct moe moe = {
        .device = device,
        .args = args,
        .n_rows = *op->batch->n_segs > 0 ? *op->batch->n_rows : 0,
        .h = (float *)(void *)(base + op->h),
        .logits = (float *)(void *)(base + op->logits),
        .weights = (double *)(void *)(base + op->weights),
        .shared_gate = (double *)(void *)(base + op->shared_gate),
        .act = (float *)(void *)(base + op->act),
        .shared_act = (float *)(void *)(base + op->shared_act),
        .out = (float *)(void *)(base + op->out),
        .shared_out = (float *)(void *)(base + op->shared_out),
        .ids = (int32_t *)(void *)(base + op->ids),
        .slot_of = (int32_t *)(void *)(base + op->slot_of),
        .slot_row = (int32_t *)(void *)(base + op->slot_row),
        .first = (int32_t *)(void *)(base + op->first),
        .used = (bool *)(void *)(base + op->used),
        .packed_h = base + op->packed_h,
        .packed_x = base + op->packed_x,
        .packed_act = base + op->packed_act,
        .packed_shared = base + op->packed_shared,
        .jobs = (struct gemm_job *)(void *)(base + op->jobs),
        .dsts = (struct dst *)(void *)(base + op->dsts),
    };
    int64_t n_slots = (int64_t)moe.n_rows * args->top_k;
    struct gemm_rows h = {.x = moe.h, .stride = (size_t)args->hidden, .n_rows = moe.n_rows, .n_cols = args->hidden};
    struct gemm_rows shared = {
        .x = moe.shared_act, .stride = (size_t)args->shared_width, .n_rows = moe.n_rows, .n_cols = args->shared_width};
    int n_jobs = 0;

    assert(moe.n_rows >= 0 && moe.n_rows <= op->batch->n_rows_max);
    if (moe.n_rows == 0)
        return;
    spread(&moe, (int64_t)moe.n_rows * args->hidden, norm_share);
    gemm_pack(device, &h, moe.packed_h, NULL);
    add_job(&moe, &n_jobs, (struct gemm_job){args->router, 0, moe.packed_h, moe.n_rows, emit_store, NULL}, moe.logits,
            args->n_experts + 1);
    gemm_run(device, moe.jobs, n_jobs);
    spread(&moe, n_slots * args->n_experts, route_share);
    group(&moe);
    if (moe.n_rows > 1)
        spread(&moe, n_slots * args->hidden, gather_share);
    run_gate_up(&moe);
    spread(&moe, n_slots * args->width, pack_act_share);
    if (args->shared_down != NULL)
        gemm_pack(device, &shared, moe.packed_shared, NULL);
    run_down(&moe);
    spread(&moe, n_slots * args->hidden, combine_share);
}

static size_t reserve(struct moe_op *op, size_t n, size_t bytes) {
    size_t at = op->bytes;

    op->bytes += align_up(n * bytes, 64);
    return at;
}

static void lay_out(struct moe_op *op, int n_threads) {
    const struct moe_args *args = &op->args;
    size_t n_rows = (size_t)args->batch->n_rows_max, n_slots = n_rows * (size_t)args->top_k;
    size_t n_experts = (size_t)args->n_experts, hidden = (size_t)args->hidden;
    /* One row may be forced to one expert top_k times: a job each. */
    size_t n_jobs = n_experts + (size_t)args->top_k + 1;

    op->h = reserve(op, n_rows * hidden, sizeof(float));
    op->packed_h = reserve(op, gemm_packed_bytes((int)n_rows, args->hidden), 1);
    op->logits = reserve(op, n_rows * (n_experts + 1), sizeof(float));
    op->weights = reserve(op, n_slots, sizeof(double));
    op->shared_gate = reserve(op, n_rows, sizeof(double));
    op->ids = reserve(op, n_slots, sizeof(int32_t));
    op->slot_of = reserve(op, n_slots, sizeof(int32_t));
    op->slot_row = reserve(op, n_slots, sizeof(int32_t));
    op->first = reserve(op, n_experts + 1, sizeof(int32_t));
    op->used = reserve(op, (size_t)n_threads * n_experts, sizeof(bool));
    op->packed_x = reserve(op, gemm_packed_bytes((int)n_slots, args->hidden), 1);
    op->act = reserve(op, n_slots * (size_t)args->width, sizeof(float));
    op->packed_act = reserve(op, gemm_packed_bytes((int)n_slots, args->width), 1);
    op->shared_act = reserve(op, n_rows * (size_t)args->shared_width, sizeof(float));
    op->packed_shared = reserve(op, gemm_packed_bytes((int)n_rows, args->shared_width), 1);
    op->out = reserve(op, n_slots * hidden, sizeof(float));
    op->shared_out = reserve(op, n_rows * hidden, sizeof(float));
    op->jobs = reserve(op, n_jobs, sizeof(struct gemm_job));
    op->dsts = reserve(op, n_jobs, sizeof(struct dst));
}

static bool has_shape(const struct weight *weight, enum weight_form form, int n_stack, int n_rows, int n_cols) {
    return weight != NULL && weight->form == form && weight->n_stack == n_stack && weight->n_rows == n_rows &&
           weight->n_cols == n_cols;
}

int cpu_moe(struct program *program, const struct moe_args *args) {
    struct moe_op op = {.args = *args, .batch = cpu_program_keep(program, args->batch, sizeof *args->batch)};
    int hidden = args->hidden;

    if (args->n_experts < 1 || args->top_k < 1 || args->top_k > args->n_experts || args->width < 1)
        return -EINVAL;
    if (!has_shape(args->router, WEIGHT_ROWS, 1, args->n_experts + 1, hidden) ||
        !has_shape(args->gate_up, WEIGHT_GATE_UP, args->n_experts, 2 * args->width, hidden) ||
        !has_shape(args->down, WEIGHT_ROWS, args->n_experts, hidden, args->width))
        return -EINVAL;
    if ((args->shared_gate_up == NULL) != (args->shared_down == NULL))
        return -EINVAL;
    if (args->shared_down != NULL &&
        (!has_shape(args->shared_gate_up, WEIGHT_GATE_UP, 1, 2 * args->shared_width, hidden) ||
         !has_shape(args->shared_down, WEIGHT_ROWS, 1, hidden, args->shared_width)))
        return -EINVAL;
    lay_out(&op, cpu_program_device(program)->caps.n_threads);
    return cpu_program_add(program, run_moe, &op, sizeof op, op.bytes);
}
