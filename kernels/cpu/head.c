/* head: the final norm and lm_head on the rows whose logits are wanted, then sample.h for the choice of a token. */
#include "cpu.h"
#include "sample.h"

#include <assert.h>
#include <errno.h>

/* Scratch: normed rows, then either the GEMM's own or one part per worker for the choice; those two never overlap in
 * time. */
struct head_run {
    const struct head_args *args;
    const struct device *device;
    float *normed; /* [n_outs, hidden] */
    char *choose;
    size_t choose_bytes; /* of one worker */
};

static void norm_rows(void *run_, int worker, int n_workers) {
    const struct head_run *run = run_;
    const struct head_args *args = run->args;
    struct cpu_range share = cpu_share(*args->batch->n_outs, 1, worker, n_workers);

    for (int out = share.begin; out < share.end; out++) {
        const float *x = (const float *)args->x + (size_t)args->batch->out_row[out] * (size_t)args->hidden;

        cpu_rms_norm(run->device, x, args->norm, args->hidden, args->eps,
                     run->normed + (size_t)out * (size_t)args->hidden);
    }
}

static int32_t select_row(const struct head_args *args, int out, void *scratch) {
    const struct batch *batch = args->batch;
    int row = batch->out_row[out], seg = batch->row_seg[row], idx = row - batch->seg_row[seg];
    int slot = batch->seg_slot[seg];
    struct sample_row sample = {
        .logits = args->logits + (size_t)out * (size_t)args->vocab,
        .n_valid = args->n_valid,
        .ctl = &args->ctl[slot],
        .tables = args->tables,
        .slot = slot,
        .position = batch->seg_pos[seg] + idx + 1,
    };

    if (!(batch->seg_flags[seg] & SEG_PREFILL)) { /* the counts hold the anchor, but not yet the drafts after it */
        sample.drafts = batch->row_token + batch->seg_row[seg] + 1;
        sample.n_drafts = idx;
    }
    return sample_choose(&sample, scratch, args->logprobs ? &args->logprobs[out] : NULL);
}

static void choose_rows(void *run_, int worker, int n_workers) {
    const struct head_run *run = run_;
    const struct head_args *args = run->args;
    struct cpu_range share = cpu_share(*args->batch->n_outs, 1, worker, n_workers);

    assert(n_workers <= run->device->caps.n_threads); /* scratch was sized by it */
    for (int out = share.begin; out < share.end; out++)
        args->chosen[out] = args->mode == HEAD_ARGMAX
                                ? sample_argmax(args->logits + (size_t)out * (size_t)args->vocab, args->n_valid)
                                : select_row(args, out, run->choose + (size_t)worker * run->choose_bytes);
}

static size_t normed_bytes(const struct head_args *args) {
    return align_up((size_t)args->batch->n_outs_max * (size_t)args->hidden * sizeof(float), 64);
}

static void head(struct device *device, const void *args_, void *scratch) {
    const struct head_args *args = args_;
    char *after_normed = (char *)scratch + normed_bytes(args);
    struct head_run run = {.args = args,
                           .device = device,
                           .normed = scratch,
                           .choose = after_normed,
                           .choose_bytes = sample_scratch_bytes(args->n_valid)};
    int n_outs = *args->batch->n_outs;

    if (n_outs == 0)
        return;
    cpu_parallel(device, norm_rows, &run);
    cpu_gemm(device, args->lm_head, 0, run.normed, args->hidden, n_outs, args->logits, args->vocab, after_normed);
    if (args->mode != HEAD_LOGITS)
        cpu_parallel(device, choose_rows, &run);
}

int cpu_head(struct program *program, const struct head_args *args) {
    struct head_args kept = *args;
    size_t gemm_bytes = cpu_gemm_scratch_bytes(args->batch->n_outs_max, args->hidden), choose_bytes = 0;

    if (cpu_weight_rows(args->lm_head) != args->vocab || cpu_weight_cols(args->lm_head) != args->hidden ||
        args->n_valid < 1 || args->n_valid > args->vocab)
        return -EINVAL;
    if (args->mode != HEAD_LOGITS && args->chosen == NULL)
        return -EINVAL;
    if (args->mode == HEAD_SELECT && args->ctl == NULL)
        return -EINVAL;
    if (args->mode == HEAD_SELECT)
        choose_bytes = sample_scratch_bytes(args->n_valid) * (size_t)cpu_program_device(program)->caps.n_threads;
    kept.batch = cpu_program_keep(program, args->batch, sizeof *args->batch);
    kept.tables = cpu_program_keep(program, args->tables, sizeof *args->tables);
    return cpu_program_add(program, head, &kept, sizeof kept,
                           normed_bytes(args) + (gemm_bytes > choose_bytes ? gemm_bytes : choose_bytes));
}
