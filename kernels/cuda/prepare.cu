/* prepare: the batches of a cycle, built from seq_ctl, and the bookkeeping after it. Retells kernels/cpu/prepare.c, the
 * reference, for a device; the rules are in backend.h (rows_args, prepare_args). */
#include "util.cuh"

#include <errno.h>

/* ---- building batches: one thread, for segs depend on the ones before ---------------------------------------------- */

struct rows_op {
    struct rows_args args;
    struct batch draft, verify;
    bool has_draft;
};

/* Tokens that may still be shown, which is how many rows of a block can matter. */
__device__ static int seq_room(const struct seq_ctl *ctl) {
    return min(ctl->max_tokens - ctl->n_generated, ctl->context_max - 1 - ctl->len);
}

struct filling { /* of a batch */
    int n_segs, n_rows, n_outs;
};

__device__ static void add_seg(const struct batch &batch, struct filling *f, int slot, int pos) {
    int seg = f->n_segs++;

    batch.seg_slot[seg] = slot;
    batch.seg_pos[seg] = pos;
    batch.seg_flags[seg] = 0;
}
/* Adds to the last seg. */
__device__ static void add_row(const struct batch &batch, struct filling *f, int32_t token, bool is_out) {
    int row = f->n_rows++;

    batch.row_token[row] = token;
    batch.row_seg[row] = f->n_segs - 1;
    batch.seg_row[f->n_segs] = f->n_rows;
    if (is_out)
        batch.out_row[f->n_outs++] = row;
}
__device__ static void close_batch(const struct batch &batch, const struct filling *f) {
    *batch.n_segs = f->n_segs;
    *batch.n_rows = f->n_rows;
    *batch.n_outs = f->n_outs;
}

__global__ static void draft_rows(struct rows_op op) {
    const struct rows_args *args = &op.args;
    struct filling f = {};

    wait_for_previous();
    may_launch_next();
    op.draft.seg_row[0] = 0;
    for (int i = 0; i < *args->n_seqs; i++) {
        int slot = args->seq_slot[i];
        const struct seq_ctl *ctl = &args->ctl[slot];

        if (ctl->done != FINISH_NONE || !ctl->speculate || min(args->block, seq_room(ctl)) < 2)
            continue;
        add_seg(op.draft, &f, slot, ctl->len);
        add_row(op.draft, &f, ctl->anchor, false);
        for (int r = 1; r < args->block; r++)
            add_row(op.draft, &f, args->mask_id, true);
    }
    close_batch(op.draft, &f);
}

__global__ static void verify_rows(struct rows_op op) {
    const struct rows_args *args = &op.args;
    const int32_t *drafts = args->draft_ids;
    int draft_seg = 0, n_draft_segs;
    struct filling f = {};

    wait_for_previous();
    may_launch_next();
    n_draft_segs = op.has_draft ? *op.draft.n_segs : 0;
    op.verify.seg_row[0] = 0;
    for (int i = 0; i < *args->n_seqs; i++) {
        int slot = args->seq_slot[i], n_rows = 1;
        const struct seq_ctl *ctl = &args->ctl[slot];
        /* The draft batch lists a part of the same seqs in the same order. */
        bool drafted = draft_seg < n_draft_segs && op.draft.seg_slot[draft_seg] == slot;

        if (ctl->done == FINISH_NONE) {
            if (drafted)
                n_rows = max(1, min(args->block, seq_room(ctl)));
            add_seg(op.verify, &f, slot, ctl->len);
            add_row(op.verify, &f, ctl->anchor, true);
            for (int r = 1; r < n_rows; r++)
                add_row(op.verify, &f, drafts[r - 1], true);
        }
        if (drafted) {
            drafts += args->block - 1;
            draft_seg++;
        }
    }
    close_batch(op.verify, &f);
}

static void launch_draft_rows(const struct launch *launch, const void *args) {
    launch_early(launch->stream, draft_rows, dim3(1), 1, 0, *(const struct rows_op *)args);
}
static void launch_verify_rows(const struct launch *launch, const void *args) {
    launch_early(launch->stream, verify_rows, dim3(1), 1, 0, *(const struct rows_op *)args);
}

static int add_rows_op(struct program *program, cuda_launch_fn *fn, const struct rows_args *args,
                       const struct batch *batch, int n_outs) {
    struct rows_op op = {*args, {}, {}, args->draft != NULL};

    if (args->block < 1 || args->block > BLOCK_ROWS_MAX || args->n_seqs_max < 0)
        return -EINVAL;
    if (batch == NULL || batch->n_segs_max < args->n_seqs_max ||
        batch->n_outs_max / max_int(1, n_outs) < args->n_seqs_max || batch->n_rows_max / args->block < args->n_seqs_max)
        return -EINVAL;
    if (args->draft != NULL)
        op.draft = *args->draft;
    if (args->verify != NULL)
        op.verify = *args->verify;
    return cuda_program_add(program, fn, &op, sizeof op, 0);
}

int cuda_draft_rows(struct program *program, const struct rows_args *args) {
    return add_rows_op(program, launch_draft_rows, args, args->draft, args->block - 1);
}

int cuda_verify_rows(struct program *program, const struct rows_args *args) {
    return add_rows_op(program, launch_verify_rows, args, args->verify, args->block);
}

/* ---- acceptance: one thread per seg --------------------------------------------------------------------------------- */

struct prepare_op {
    struct prepare_args args;
    struct batch batch;
    struct seq_tables tables;
    struct step_ring ring;
};

__device__ static bool is_stop_id(const struct seq_ctl *ctl, int32_t token) {
    for (int i = 0; i < ctl->n_stop_ids; i++)
        if (ctl->stop_ids[i] == token)
            return true;
    return false;
}

/* Whether a limit is met when n_tokens tokens exist, the seq's prompt included, and n_generated of them were shown. */
__device__ static int limit_met(const struct seq_ctl *ctl, int n_generated, int n_tokens) {
    if (n_generated >= ctl->max_tokens)
        return FINISH_LENGTH;
    if (n_tokens >= ctl->context_max)
        return FINISH_CONTEXT;
    return FINISH_NONE;
}

/* What stands of one run of rows [drafts[-1], drafts[0], ...]: chosen[r] follows row r. */
struct accepted {
    int n_tokens, n_accepted, finish;
};
__device__ static struct accepted accept(const struct seq_ctl *ctl, int n_tokens_before, const int32_t *chosen,
                                         const int32_t *drafts, int n_drafts) {
    struct accepted a = {0, 0, limit_met(ctl, ctl->n_generated, n_tokens_before)};

    for (int r = 0; a.finish == FINISH_NONE; r++) {
        int32_t token = chosen[r];
        bool draft_stands = r < n_drafts && drafts[r] == token;

        if (token < 0) {
            a.finish = FINISH_NONFINITE;
            break;
        }
        a.n_tokens++;
        a.n_accepted += draft_stands;
        a.finish = is_stop_id(ctl, token) ? (int)FINISH_STOP
                                          : limit_met(ctl, ctl->n_generated + a.n_tokens, n_tokens_before + a.n_tokens);
        if (!draft_stands)
            break;
    }
    return a;
}

/* The restore point to write while rows are committed, as a number of rows, or 0. */
__device__ static int take_snapshot(struct seq_ctl *ctl, int len_before, bool is_prefill) {
    int b = ctl->len - ctl->len % PAGE_TOKENS;

    if (is_prefill || !ctl->may_snapshot || b <= len_before || ctl->done == FINISH_NONFINITE)
        return 0;
    ctl->may_snapshot = 0;
    return b - len_before;
}

/* chosen, logprobs: of the seg's outputs (a prefill seg has one, or none). */
__device__ static void prepare_seg(const struct prepare_op &op, int seg, const int32_t *chosen,
                                   const struct logprob_row *logprobs, struct step_out *out) {
    const struct batch &batch = op.batch;
    int slot = batch.seg_slot[seg], first = batch.seg_row[seg], n_rows = batch.seg_row[seg + 1] - first;
    const int32_t *row_token = batch.row_token + first;
    bool is_prefill = batch.seg_flags[seg] & SEG_PREFILL;
    struct seq_ctl *ctl = &op.args.ctl[slot];
    int len_before = ctl->len, n_drafts = is_prefill ? 0 : n_rows - 1, snapshot;
    struct accepted a = {};

    if (ctl->done == FINISH_NONE && ctl->cancel)
        ctl->done = FINISH_CANCELLED;
    out->slot = slot;
    out->pos = len_before;
    out->anchor_before = row_token[0];
    out->n_proposed = 0;
    if (is_prefill)
        ctl->len += n_rows;
    if (ctl->done == FINISH_NONE && chosen != NULL) {
        a = accept(ctl, is_prefill ? ctl->len : len_before + 1, chosen, row_token + 1, n_drafts);
        out->n_proposed = n_drafts;
        for (int i = 0; i < n_drafts; i++)
            out->drafts[i] = row_token[1 + i];
        if (!is_prefill)
            ctl->len += a.n_tokens;
        if (a.n_tokens > 0)
            ctl->anchor = chosen[a.n_tokens - 1];
        ctl->n_generated += a.n_tokens;
        ctl->done = a.finish;
        for (int i = 0; i < a.n_tokens; i++) {
            if (ctl->has_counts && op.tables.counts != NULL) /* bit 0 says "in the prompt" */
                op.tables.counts[(size_t)slot * (size_t)op.tables.vocab + (size_t)chosen[i]] += 2;
            out->tokens[i] = chosen[i];
            if (ctl->sample.n_logprobs >= 0 && logprobs != NULL)
                out->logprobs[i] = logprobs[i];
        }
    }
    snapshot = take_snapshot(ctl, len_before, is_prefill);
    op.args.seg_commit[seg] = ctl->len - len_before;
    op.args.seg_snapshot[seg] = snapshot;

    out->n_tokens = a.n_tokens;
    out->n_accepted = a.n_accepted;
    out->len = ctl->len;
    out->anchor = ctl->anchor;
    out->done = ctl->done;
    out->snapshot_len = snapshot > 0 ? len_before + snapshot : 0;
}

__global__ static void prepare(struct prepare_op op) {
    const struct batch &batch = op.batch;
    struct step_out *outs;
    uint64_t step, place;
    int n_segs, n_outs;

    wait_for_previous();
    may_launch_next();
    step = *(volatile uint64_t *)op.ring.n_steps;
    place = step % (uint64_t)op.ring.n_steps_max;
    outs = op.ring.out + place * (uint64_t)op.ring.n_segs_max;
    n_segs = *batch.n_segs;
    n_outs = *batch.n_outs;

    for (int seg = (int)threadIdx.x; seg < n_segs; seg += (int)blockDim.x) {
        int flags = batch.seg_flags[seg];
        int row = flags & SEG_PREFILL ? batch.seg_row[seg + 1] - 1 : batch.seg_row[seg], out = 0;
        bool has_choice = !(flags & SEG_PREFILL) || flags & SEG_SAMPLE;

        while (out < n_outs && batch.out_row[out] < row) /* first output not before the seg's rows that matter */
            out++;
        prepare_seg(op, seg, has_choice ? op.args.chosen + out : NULL,
                    has_choice && op.args.logprobs != NULL ? op.args.logprobs + out : NULL, &outs[seg]);
    }
    __threadfence_system(); /* each thread's entries before the count that publishes them */
    __syncthreads();
    if (threadIdx.x == 0) {
        op.ring.n_segs[place] = n_segs;
        __threadfence_system();
        *(volatile uint64_t *)op.ring.n_steps = step + 1;
    }
}

static void launch_prepare(const struct launch *launch, const void *args) {
    launch_early(launch->stream, prepare, dim3(1), 64, 0, *(const struct prepare_op *)args);
}

int cuda_prepare(struct program *program, const struct prepare_args *args) {
    struct prepare_op op = {*args, *args->batch, {}, {}};

    if (args->ring == NULL || args->ring->n_steps_max < 1 || args->ring->n_segs_max < args->batch->n_segs_max)
        return -EINVAL;
    op.ring = *args->ring;
    if (args->tables != NULL)
        op.tables = *args->tables;
    return cuda_program_add(program, launch_prepare, &op, sizeof op, 0);
}
