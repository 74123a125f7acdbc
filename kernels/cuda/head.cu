/* head: the final norm and lm_head on the rows whose logits are wanted, then sample.cuh for the choice of a token. */
#include "gemm.cuh"
#include "sample.cuh"

#include <errno.h>

struct head_op {
    struct head_args args;
    struct batch batch;
    struct seq_tables tables;
    bool has_tables;
};

static void launch_head(const struct launch *launch, const void *op_args) {
    const struct head_op *op = (const struct head_op *)op_args;
    const struct head_args *args = &op->args;
    struct gemm_rows rows = {};
    struct gemm_job job = {};
    struct sample_rows sample = {};

    rows.count.n = op->batch.n_outs;
    rows.n_max = op->batch.n_outs_max;
    rows.x = args->x;
    rows.stride = (size_t)args->hidden;
    rows.index = op->batch.out_row;
    rows.norm = args->norm;
    rows.eps = args->eps;
    rows.n_cols = args->hidden;
    rows.n_steps = args->lm_head->n_steps;
    job.x = gemm_rows_make(launch, &rows, launch->scratch);
    job.count = rows.count;
    job.n_max = rows.n_max;
    job.n_products = 1;
    job.products[0].weight = args->lm_head;
    job.products[0].out.epilogue = LINEAR_STORE_F32;
    job.products[0].out.y = args->logits;
    job.products[0].out.y_stride = args->vocab;
    gemm_launch(launch, &job);
    if (args->mode == HEAD_LOGITS)
        return;
    sample.batch = op->batch;
    sample.logits = args->logits;
    sample.vocab = args->vocab;
    sample.n_valid = args->n_valid;
    sample.is_argmax = args->mode == HEAD_ARGMAX;
    sample.ctl = args->ctl;
    sample.tables = op->tables;
    sample.has_tables = op->has_tables;
    sample.chosen = args->chosen;
    sample.logprobs = args->logprobs;
    sample.tile_max = (int32_t *)(void *)launch->scratch; /* the GEMM has read its rows */
    sample_launch(launch, &sample);
}

int cuda_head(struct program *program, const struct head_args *args) {
    struct head_op op = {*args, *args->batch, {}, args->tables != NULL};
    size_t gemm_bytes, tile_bytes;

    if (args->lm_head->n_rows != args->vocab || args->lm_head->n_cols != args->hidden || args->n_valid < 1 ||
        args->n_valid > args->vocab)
        return -EINVAL;
    if (args->mode != HEAD_LOGITS && args->chosen == NULL)
        return -EINVAL;
    if (args->mode == HEAD_SELECT && args->ctl == NULL)
        return -EINVAL;
    if (args->tables != NULL)
        op.tables = *args->tables;
    gemm_bytes = gemm_rows_bytes(args->batch->n_outs_max, args->lm_head->n_steps);
    tile_bytes = (size_t)args->batch->n_outs_max * sample_tile_bytes(args->n_valid);
    return cuda_program_add(program, launch_head, &op, sizeof op, gemm_bytes > tile_bytes ? gemm_bytes : tile_bytes);
}
