/* linear: the matrix op of a layer, the embedding gather, and rows copied out as f32. */
#include "gemm.cuh"

#include <errno.h>

/* ---- linear ------------------------------------------------------------------------------------------------------- */

struct linear_op {
    struct linear_args args;
    struct batch batch;
};

static void launch_linear(const struct launch *launch, const void *op_args) {
    const struct linear_op *op = (const struct linear_op *)op_args;
    const struct linear_args *args = &op->args;
    const struct weight *weight = args->out[0].weight;
    struct gemm_rows rows = {};
    struct gemm_job job = {};

    rows.count = batch_row_count(&op->batch);
    rows.n_max = op->batch.n_rows_max;
    rows.x = args->x;
    rows.is_f32 = args->x_is_f32;
    rows.stride = (size_t)args->x_stride;
    rows.norm = args->norm;
    rows.eps = args->eps;
    rows.n_cols = weight->n_cols;
    rows.n_steps = weight->n_steps;
    if (gemm_rows_is_one(&rows))
        job.rows = &rows;
    else
        job.x = gemm_rows_make(launch, &rows, launch->scratch);
    job.count = rows.count;
    job.n_max = rows.n_max;
    job.n_products = args->n_outs;
    for (int i = 0; i < args->n_outs; i++) {
        const struct linear_out *out = &args->out[i];

        job.products[i].weight = out->weight;
        job.products[i].out.epilogue = out->epilogue;
        job.products[i].out.bias = out->bias;
        job.products[i].out.y = out->y;
        job.products[i].out.y_stride = out->y_stride;
    }
    gemm_launch(launch, &job);
}

int cuda_linear(struct program *program, const struct linear_args *args) {
    struct linear_op op = {*args, *args->batch};
    int n_cols;

    if (args->n_outs < 1 || args->n_outs > 2 || args->out[0].weight == NULL)
        return -EINVAL;
    n_cols = args->out[0].weight->n_cols;
    if (args->x_stride < n_cols)
        return -EINVAL;
    for (int i = 0; i < args->n_outs; i++) {
        const struct linear_out *out = &args->out[i];
        bool is_swiglu = out->epilogue == LINEAR_SWIGLU;

        if (out->weight == NULL || out->weight->n_cols != n_cols || out->weight->n_stack != 1)
            return -EINVAL;
        if ((out->weight->form == WEIGHT_GATE_UP) != is_swiglu)
            return -EINVAL;
        if (out->y_stride < (is_swiglu ? out->weight->n_rows / 2 : out->weight->n_rows))
            return -EINVAL;
    }
    return cuda_program_add(program, launch_linear, &op, sizeof op,
                            gemm_rows_bytes(args->batch->n_rows_max, args->out[0].weight->n_steps));
}

/* ---- embed -------------------------------------------------------------------------------------------------------- */

struct embed_op {
    struct batch batch;
    const char *data;
    int n_rows, n_cols, n_steps;
    void *x;
};

__global__ static void embed(struct embed_op op) {
    int row = (int)blockIdx.x, id;

    wait_for_previous();
    may_launch_next();
    if (row >= batch_rows(op.batch))
        return;
    id = op.batch.row_token[row];
    if (id < 0 || id >= op.n_rows)
        id = 0;
    for (int k = (int)threadIdx.x; k < op.n_cols; k += (int)blockDim.x)
        ((bf16 *)op.x)[(size_t)row * (size_t)op.n_cols + (size_t)k] =
            *(const bf16 *)(op.data + packed_at(packed_row_of(id), k, op.n_steps));
}

static void launch_embed(const struct launch *launch, const void *op_args) {
    const struct embed_op *op = (const struct embed_op *)op_args;

    launch_early(launch->stream, embed, dim3((unsigned)op->batch.n_rows_max), 256, 0, *op);
}

int cuda_embed(struct program *program, const struct embed_args *args) {
    struct embed_op op = {};

    if (args->table == NULL || args->table->form != WEIGHT_ROWS || args->table->n_stack != 1)
        return -EINVAL;
    op.batch = *args->batch;
    op.data = args->table->data;
    op.n_rows = args->table->n_rows;
    op.n_cols = args->table->n_cols;
    op.n_steps = args->table->n_steps;
    op.x = args->x;
    return cuda_program_add(program, launch_embed, &op, sizeof op, 0);
}

/* ---- store_rows --------------------------------------------------------------------------------------------------- */

struct store_rows_op {
    struct store_rows_args args;
    struct batch batch;
};

__global__ static void store_rows(struct store_rows_op op) {
    size_t at = (size_t)blockIdx.x * (size_t)op.args.width;

    wait_for_previous();
    may_launch_next();
    if ((int)blockIdx.x >= batch_rows(op.batch))
        return;
    for (int i = (int)threadIdx.x; i < op.args.width; i += (int)blockDim.x)
        op.args.dst[at + (size_t)i] = bf16_load(op.args.x, at + (size_t)i);
}

static void launch_store_rows(const struct launch *launch, const void *op_args) {
    const struct store_rows_op *op = (const struct store_rows_op *)op_args;

    launch_early(launch->stream, store_rows, dim3((unsigned)op->batch.n_rows_max), 256, 0, *op);
}

int cuda_store_rows(struct program *program, const struct store_rows_args *args) {
    struct store_rows_op op = {*args, *args->batch};

    return cuda_program_add(program, launch_store_rows, &op, sizeof op, 0);
}
