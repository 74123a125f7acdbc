/* moe: the mixture-of-experts layer. Tokens are grouped by expert in groups of 16, so that an expert's weights pass by once
 * for up to 16 tokens that chose it. A token's result does not depend on its group: every product is the same sum, and
 * its experts are added in the order of its own choice. */
#include "gemm.cuh"

#include <errno.h>

enum { GROUP = 16, ROUTE_THREADS = 32, SORT_THREADS = 512, TOP_K_MAX = 32 };

struct moe_op {
    struct moe_args args;
    struct batch batch;
    bool has_shared;
    int n_groups_max;
    /* Offsets into the scratch. R = n_rows_max; a slot is one (row, choice), in groups of one expert. */
    size_t rows_h;       /* normed rows */
    size_t logits;       /* f32 [R, n_experts + 1] */
    size_t weights;      /* f32 [R, top_k + 1]: of the experts, then of the shared one */
    size_t ids;          /* int32 [R, top_k] */
    size_t slot_of;      /* int32 [R, top_k] */
    size_t slot_row;     /* int32 [slots], -1: nobody */
    size_t n_groups;     /* int32: groups, then slots */
    size_t group_expert; /* int32 [groups] */
    size_t rows_x;       /* gathered rows, then the experts' inner activations */
    size_t act;          /* bf16 [slots, width], then of the shared expert */
    size_t out;          /* f32 [slots, hidden] */
    size_t shared_act, shared_out, rows_shared;
    size_t bytes;
};

/* ---- routing ------------------------------------------------------------------------------------------------------ */

struct route {
    struct moe_args args;
    struct batch batch;
    const float *logits;
    float *weights;
    int32_t *ids;
};

/* By falling logit, ties to the lower id. A warp per row. */
__device__ static int best_of(const float *logits, int n_experts, const int32_t *used, int n_used) {
    float best = -INFINITY;
    int id = n_experts;

    for (int e = (int)threadIdx.x; e < n_experts; e += ROUTE_THREADS) {
        bool is_used = false;

        for (int j = 0; j < n_used; j++)
            is_used |= used[j] == e;
        if (!is_used && (id == n_experts || logits[e] > best)) {
            best = logits[e];
            id = e;
        }
    }
    for (int m = 16; m > 0; m >>= 1) {
        float other = __shfl_xor_sync(0xffffffffu, best, m);
        int other_id = __shfl_xor_sync(0xffffffffu, id, m);

        if (other_id < n_experts && (id == n_experts || other > best || (other == best && other_id < id))) {
            best = other;
            id = other_id;
        }
    }
    return id;
}

__global__ static void choose_experts(struct route r) {
    __shared__ int32_t ids[TOP_K_MAX];
    const struct moe_args *a = &r.args;
    const int row = (int)blockIdx.x;
    const float *logits = r.logits + (size_t)row * (size_t)(a->n_experts + 1);
    float *weights = r.weights + (size_t)row * (size_t)(a->top_k + 1), max, sum = 0;

    if (row >= batch_rows(r.batch))
        return;
    for (int j = 0; j < a->top_k; j++) {
        int id;

        if (a->forced != NULL) {
            id = a->forced[(size_t)row * (size_t)a->top_k + (size_t)j];
            id = id >= 0 && id < a->n_experts ? id : 0;
        } else {
            id = best_of(logits, a->n_experts, ids, j);
        }
        if (threadIdx.x == 0)
            ids[j] = id;
        __syncwarp();
    }
    if (threadIdx.x != 0)
        return;
    /* The softmax over all experts, renormalised over the chosen ones, is the softmax over the chosen ones. */
    max = logits[ids[0]];
    for (int j = 1; j < a->top_k; j++)
        max = fmaxf(max, logits[ids[j]]);
    for (int j = 0; j < a->top_k; j++)
        sum += expf(logits[ids[j]] - max);
    for (int j = 0; j < a->top_k; j++) {
        weights[j] = expf(logits[ids[j]] - max) / sum;
        r.ids[(size_t)row * (size_t)a->top_k + (size_t)j] = ids[j];
        if (a->routing != NULL)
            a->routing[(size_t)row * (size_t)a->top_k + (size_t)j] = ids[j];
    }
    weights[a->top_k] = sigmoid(logits[a->n_experts]);
}

struct sort {
    struct batch batch;
    int n_experts, top_k;
    const int32_t *ids;
    int32_t *slot_of, *slot_row, *n_groups, *group_expert;
};

/* Slots in order of experts, rows ascending within one; an expert begins a group. One CTA, a thread per expert. */
__global__ static void __launch_bounds__(SORT_THREADS) group_slots(struct sort s) {
    extern __shared__ int32_t n_groups_of[]; /* [n_experts] */
    const int n_choices = batch_rows(s.batch) * s.top_k;

    for (int e = (int)threadIdx.x; e < s.n_experts; e += SORT_THREADS) {
        int n = 0;

        for (int i = 0; i < n_choices; i++)
            n += s.ids[i] == e;
        n_groups_of[e] = (n + GROUP - 1) / GROUP;
    }
    __syncthreads();
    if (threadIdx.x == 0) { /* counts to first groups */
        int at = 0;

        for (int e = 0; e < s.n_experts; e++) {
            int n = n_groups_of[e];

            n_groups_of[e] = at;
            at += n;
        }
        s.n_groups[0] = at;
        s.n_groups[1] = at * GROUP;
    }
    __syncthreads();
    for (int e = (int)threadIdx.x; e < s.n_experts; e += SORT_THREADS) {
        int first = n_groups_of[e] * GROUP, slot = first;

        for (int i = 0; i < n_choices; i++)
            if (s.ids[i] == e) {
                s.slot_of[i] = slot;
                s.slot_row[slot++] = i / s.top_k;
            }
        for (; slot % GROUP != 0; slot++)
            s.slot_row[slot] = -1;
        for (int g = first / GROUP; g < slot / GROUP; g++)
            s.group_expert[g] = e;
    }
}

/* ---- weighted sum and residual ------------------------------------------------------------------------------------- */

struct combine {
    struct batch batch;
    int hidden, top_k;
    const int32_t *slot_of;
    const float *weights, *out, *shared_out; /* shared_out NULL: no shared expert */
    void *x;
};

__global__ static void combine(struct combine c) {
    const int row = (int)blockIdx.y, i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    const float *weights = c.weights + (size_t)row * (size_t)(c.top_k + 1);
    size_t at = (size_t)row * (size_t)c.hidden + (size_t)i;
    float sum = 0;

    if (row >= batch_rows(c.batch) || i >= c.hidden)
        return;
    for (int j = 0; j < c.top_k; j++)
        sum = fmaf(weights[j],
                   c.out[(size_t)c.slot_of[(size_t)row * (size_t)c.top_k + (size_t)j] * (size_t)c.hidden + (size_t)i],
                   sum);
    if (c.shared_out != NULL)
        sum = fmaf(weights[c.top_k], c.shared_out[at], sum);
    bf16_store(c.x, at, bf16_load(c.x, at) + sum);
}

/* ---- the op ------------------------------------------------------------------------------------------------------- */

static struct gemm_x make_rows(const struct launch *launch, struct row_count count, int n_max, const void *x,
                               int n_cols, const int32_t *index, const struct moe_args *norm, void *scratch) {
    struct gemm_rows rows = {};

    rows.count = count;
    rows.n_max = n_max;
    rows.x = x;
    rows.stride = (size_t)n_cols;
    rows.index = index;
    rows.n_cols = n_cols;
    rows.n_steps = (int)div_ceil((uint64_t)n_cols, 16);
    if (norm != NULL) {
        rows.norm = norm->norm;
        rows.eps = norm->eps;
    }
    return gemm_rows_make(launch, &rows, scratch);
}

static void product(const struct launch *launch, const struct weight *weight, struct gemm_x x, struct row_count count,
                    int n_max, enum linear_epilogue epilogue, void *y, int y_stride, const struct gemm_groups *groups) {
    struct gemm_job job = {};

    job.x = x;
    job.count = count;
    job.n_max = n_max;
    job.n_products = 1;
    job.products[0].weight = weight;
    job.products[0].out.epilogue = epilogue;
    job.products[0].out.y = y;
    job.products[0].out.y_stride = y_stride;
    job.groups = groups;
    gemm_launch(launch, &job);
}

static void launch_moe(const struct launch *launch, const void *op_args) {
    const struct moe_op *op = (const struct moe_op *)op_args;
    const struct moe_args *args = &op->args;
    char *base = launch->scratch;
    const int n_rows = op->batch.n_rows_max, n_slots = op->n_groups_max * GROUP;
    const struct row_count rows = batch_row_count(&op->batch);
    const struct row_count slots = {op->batch.n_segs, (const int32_t *)(base + op->n_groups) + 1};
    const struct gemm_groups groups = {(const int32_t *)(base + op->n_groups),
                                       (const int32_t *)(base + op->group_expert), op->n_groups_max};
    const struct route route = {*args, op->batch, (const float *)(base + op->logits), (float *)(base + op->weights),
                                (int32_t *)(base + op->ids)};
    const struct sort sort = {op->batch,
                              args->n_experts,
                              args->top_k,
                              route.ids,
                              (int32_t *)(base + op->slot_of),
                              (int32_t *)(base + op->slot_row),
                              (int32_t *)(base + op->n_groups),
                              (int32_t *)(base + op->group_expert)};
    const struct combine sum = {op->batch,
                                args->hidden,
                                args->top_k,
                                sort.slot_of,
                                route.weights,
                                (const float *)(base + op->out),
                                op->has_shared ? (const float *)(base + op->shared_out) : NULL,
                                args->x};
    struct gemm_x hidden, x;

    hidden = make_rows(launch, rows, n_rows, args->x, args->hidden, NULL, args, base + op->rows_h);
    product(launch, args->router, hidden, rows, n_rows, LINEAR_STORE_F32, base + op->logits, args->n_experts + 1, NULL);
    choose_experts<<<(unsigned)n_rows, ROUTE_THREADS, 0, launch->stream>>>(route);
    group_slots<<<1, SORT_THREADS, (size_t)args->n_experts * sizeof(int32_t), launch->stream>>>(sort);

    /* The norm is computed again for each choice: the same bits. */
    x = make_rows(launch, slots, n_slots, args->x, args->hidden, sort.slot_row, args, base + op->rows_x);
    product(launch, args->gate_up, x, slots, n_slots, LINEAR_SWIGLU, base + op->act, args->width, &groups);
    x = make_rows(launch, slots, n_slots, base + op->act, args->width, NULL, NULL, base + op->rows_x);
    product(launch, args->down, x, slots, n_slots, LINEAR_STORE_F32, base + op->out, args->hidden, &groups);
    if (op->has_shared) {
        product(launch, args->shared_gate_up, hidden, rows, n_rows, LINEAR_SWIGLU, base + op->shared_act,
                args->shared_width, NULL);
        x = make_rows(launch, rows, n_rows, base + op->shared_act, args->shared_width, NULL, NULL,
                      base + op->rows_shared);
        product(launch, args->shared_down, x, rows, n_rows, LINEAR_STORE_F32, base + op->shared_out, args->hidden,
                NULL);
    }
    combine<<<dim3((unsigned)div_ceil((uint64_t)args->hidden, 256), (unsigned)n_rows), 256, 0, launch->stream>>>(sum);
}

static size_t reserve(struct moe_op *op, size_t n, size_t bytes) {
    size_t at = op->bytes;

    op->bytes += align_up(n * bytes, 256);
    return at;
}

static void lay_out(struct moe_op *op) {
    const struct moe_args *args = &op->args;
    const size_t n_rows = (size_t)op->batch.n_rows_max, n_choices = n_rows * (size_t)args->top_k;
    const int hidden_steps = (int)div_ceil((uint64_t)args->hidden, 16);
    const int width_steps = (int)div_ceil((uint64_t)args->width, 16);
    size_t n_slots;

    /* Each expert may leave one group unfilled. */
    op->n_groups_max = (int)(n_choices / GROUP) + min_int((int)n_choices, args->n_experts);
    n_slots = (size_t)op->n_groups_max * GROUP;
    op->rows_h = reserve(op, gemm_rows_bytes((int)n_rows, hidden_steps), 1);
    op->logits = reserve(op, n_rows * (size_t)(args->n_experts + 1), sizeof(float));
    op->weights = reserve(op, n_rows * (size_t)(args->top_k + 1), sizeof(float));
    op->ids = reserve(op, n_choices, sizeof(int32_t));
    op->slot_of = reserve(op, n_choices, sizeof(int32_t));
    op->slot_row = reserve(op, n_slots, sizeof(int32_t));
    op->n_groups = reserve(op, 2, sizeof(int32_t));
    op->group_expert = reserve(op, (size_t)op->n_groups_max, sizeof(int32_t));
    op->rows_x = reserve(op, gemm_rows_bytes((int)n_slots, hidden_steps > width_steps ? hidden_steps : width_steps), 1);
    op->act = reserve(op, n_slots * (size_t)args->width, sizeof(uint16_t));
    op->out = reserve(op, n_slots * (size_t)args->hidden, sizeof(float));
    op->shared_act = reserve(op, n_rows * (size_t)args->shared_width, sizeof(uint16_t));
    op->rows_shared = reserve(op, gemm_rows_bytes((int)n_rows, (int)div_ceil((uint64_t)args->shared_width, 16)), 1);
    op->shared_out = reserve(op, n_rows * (size_t)args->hidden, sizeof(float));
}

static bool has_shape(const struct weight *weight, enum weight_form form, int n_stack, int n_rows, int n_cols) {
    return weight != NULL && weight->form == form && weight->n_stack == n_stack && weight->n_rows == n_rows &&
           weight->n_cols == n_cols;
}

int cuda_moe(struct program *program, const struct moe_args *args) {
    struct moe_op op = {};
    int hidden = args->hidden;

    if (args->n_experts < 1 || args->top_k < 1 || args->top_k > args->n_experts || args->width < 1)
        return -EINVAL;
    if (!has_shape(args->router, WEIGHT_ROWS, 1, args->n_experts + 1, hidden) ||
        !has_shape(args->gate_up, WEIGHT_GATE_UP, args->n_experts, 2 * args->width, hidden) ||
        !has_shape(args->down, WEIGHT_ROWS, args->n_experts, hidden, args->width))
        return -EINVAL;
    if ((args->shared_gate_up == NULL) != (args->shared_down == NULL))
        return -EINVAL;
    op.has_shared = args->shared_down != NULL;
    if (op.has_shared && (!has_shape(args->shared_gate_up, WEIGHT_GATE_UP, 1, 2 * args->shared_width, hidden) ||
                          !has_shape(args->shared_down, WEIGHT_ROWS, 1, hidden, args->shared_width)))
        return -EINVAL;
    if (args->top_k > TOP_K_MAX || args->n_experts > 8192)
        return -ENOTSUP;
    op.args = *args;
    op.batch = *args->batch;
    lay_out(&op);
    return cuda_program_add(program, launch_moe, &op, sizeof op, op.bytes);
}
