/* prepare: the batches of a cycle, built from seq_ctl, and all acceptance and bookkeeping after it. The rules are in
 * backend.h (rows_args, prepare_args); other backends are held against this file. Knows no logits and no model. */
#include "cpu.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

/* ---- building batches -------------------------------------------------------------------------------------------- */

/* Tokens that may still be shown, which is how many rows of a block can matter. */
static int seq_room(const struct seq_ctl *ctl) {
    return min_int(ctl->max_tokens - ctl->n_generated, ctl->context_max - 1 - ctl->len);
}

static int seq_drafts(const struct seq_ctl *ctl, int block) {
    return ctl->done == FINISH_NONE && ctl->speculate && min_int(block, seq_room(ctl)) >= 2;
}

static void batch_clear(const struct batch *batch) {
    *batch->n_segs = *batch->n_rows = *batch->n_outs = 0;
    batch->seg_row[0] = 0;
}

static void batch_add_seg(const struct batch *batch, int slot, int pos) {
    int seg = (*batch->n_segs)++;

    assert(seg < batch->n_segs_max);
    batch->seg_slot[seg] = slot;
    batch->seg_pos[seg] = pos;
    batch->seg_flags[seg] = 0;
    batch->seg_row[seg + 1] = *batch->n_rows;
}

/* Adds to the last seg. */
static void batch_add_row(const struct batch *batch, int32_t token, bool is_out) {
    int seg = *batch->n_segs - 1, row = (*batch->n_rows)++;

    assert(row < batch->n_rows_max);
    batch->row_token[row] = token;
    batch->row_seg[row] = seg;
    batch->seg_row[seg + 1] = row + 1;
    if (is_out) {
        assert(*batch->n_outs < batch->n_outs_max);
        batch->out_row[(*batch->n_outs)++] = row;
    }
}

static void draft_rows(struct device *device, const void *args_, void *scratch) {
    const struct rows_args *args = args_;

    (void)device, (void)scratch;
    batch_clear(args->draft);
    for (int i = 0; i < *args->n_seqs; i++) {
        const struct seq_ctl *ctl = &args->ctl[args->seq_slot[i]];

        if (!seq_drafts(ctl, args->block))
            continue;
        assert(ctl->anchor >= 0);
        batch_add_seg(args->draft, args->seq_slot[i], ctl->len);
        batch_add_row(args->draft, ctl->anchor, false);
        for (int r = 1; r < args->block; r++)
            batch_add_row(args->draft, args->mask_id, true);
    }
}

static void verify_rows(struct device *device, const void *args_, void *scratch) {
    const struct rows_args *args = args_;
    const int32_t *drafts = args->draft_ids;
    int draft_seg = 0;

    (void)device, (void)scratch;
    batch_clear(args->verify);
    for (int i = 0; i < *args->n_seqs; i++) {
        int slot = args->seq_slot[i], n_rows = 1;
        const struct seq_ctl *ctl = &args->ctl[slot];
        /* The draft batch lists a part of the same seqs in the same order. */
        bool drafted = args->draft && draft_seg < *args->draft->n_segs && args->draft->seg_slot[draft_seg] == slot;

        if (ctl->done == FINISH_NONE) {
            assert(ctl->anchor >= 0);
            if (drafted)
                n_rows = max_int(1, min_int(args->block, seq_room(ctl)));
            batch_add_seg(args->verify, slot, ctl->len);
            batch_add_row(args->verify, ctl->anchor, true);
            for (int r = 1; r < n_rows; r++)
                batch_add_row(args->verify, drafts[r - 1], true);
        }
        if (drafted) {
            drafts += args->block - 1;
            draft_seg++;
        }
    }
}

static int rows_args_check(const struct rows_args *args, const struct batch *batch, int n_outs) {
    if (args->block < 1 || args->block > BLOCK_ROWS_MAX || args->n_seqs_max < 0)
        return -EINVAL;
    if (batch == NULL || batch->n_segs_max < args->n_seqs_max ||
        batch->n_outs_max / max_int(1, n_outs) < args->n_seqs_max || batch->n_rows_max / args->block < args->n_seqs_max)
        return -EINVAL;
    return 0;
}

static int add_rows_op(struct program *program, cpu_op_fn *run, const struct rows_args *args) {
    struct rows_args kept = *args;

    /* The structs are only read: what changes lies behind their pointers. */
    kept.draft = (struct batch *)cpu_program_keep(program, args->draft, sizeof *args->draft);
    kept.verify = (struct batch *)cpu_program_keep(program, args->verify, sizeof *args->verify);
    return cpu_program_add(program, run, &kept, sizeof kept, 0);
}

int cpu_draft_rows(struct program *program, const struct rows_args *args) {
    int r = rows_args_check(args, args->draft, args->block - 1);

    return r == 0 ? add_rows_op(program, draft_rows, args) : r;
}

int cpu_verify_rows(struct program *program, const struct rows_args *args) {
    int r = rows_args_check(args, args->verify, args->block);

    return r == 0 ? add_rows_op(program, verify_rows, args) : r;
}

/* ---- acceptance -------------------------------------------------------------------------------------------------- */

static bool is_stop_id(const struct seq_ctl *ctl, int32_t token) {
    for (int i = 0; i < ctl->n_stop_ids; i++)
        if (ctl->stop_ids[i] == token)
            return true;
    return false;
}

/* Whether a limit is met when n_tokens tokens exist, the seq's prompt included, and n_generated of them were shown. */
static enum finish limit_met(const struct seq_ctl *ctl, int n_generated, int n_tokens) {
    if (n_generated >= ctl->max_tokens)
        return FINISH_LENGTH;
    if (n_tokens >= ctl->context_max)
        return FINISH_CONTEXT;
    return FINISH_NONE;
}

/* What stands of one run of rows [drafts[-1], drafts[0], ...]: chosen[r] follows row r. */
struct accepted {
    int n_tokens, n_accepted;
    enum finish finish;
};
static struct accepted accept(const struct seq_ctl *ctl, int n_tokens_before, const int32_t *chosen,
                              const int32_t *drafts, int n_drafts) {
    struct accepted a = {.finish = limit_met(ctl, ctl->n_generated, n_tokens_before)};

    for (int r = 0; a.finish == FINISH_NONE; r++) {
        int32_t token = chosen[r];
        bool draft_stands = r < n_drafts && drafts[r] == token;

        if (token < 0) {
            a.finish = FINISH_NONFINITE;
            break;
        }
        a.n_tokens++;
        a.n_accepted += draft_stands;
        a.finish = is_stop_id(ctl, token) ? FINISH_STOP
                                          : limit_met(ctl, ctl->n_generated + a.n_tokens, n_tokens_before + a.n_tokens);
        if (!draft_stands)
            break;
    }
    return a;
}

static void count_tokens(const struct seq_tables *tables, int slot, const int32_t *tokens, int n_tokens) {
    int32_t *counts = tables->counts + (size_t)slot * (size_t)tables->vocab;

    for (int i = 0; i < n_tokens; i++)
        counts[tokens[i]] += 2; /* bit 0 says "in the prompt" */
}

/* The restore point to write while rows are committed, as a number of rows, or 0. Prefill takes none here: its pass
 * has moved the live state to the end of the chunk already, and a chunk ends where the host wants it to. */
static int take_snapshot(struct seq_ctl *ctl, int len_before, bool is_prefill) {
    int b = ctl->len - ctl->len % PAGE_TOKENS;

    if (is_prefill || !ctl->may_snapshot || b <= len_before || ctl->done == FINISH_NONFINITE)
        return 0;
    ctl->may_snapshot = 0;
    return b - len_before;
}

/* n_rows rows from `first`; chosen, logprobs: of the seg's outputs (a prefill seg has one, or none). */
static void prepare_seg(const struct prepare_args *args, int seg, const int32_t *chosen,
                        const struct logprob_row *logprobs, struct step_out *out) {
    const struct batch *batch = args->batch;
    int slot = batch->seg_slot[seg], first = batch->seg_row[seg], n_rows = batch->seg_row[seg + 1] - first;
    const int32_t *row_token = batch->row_token + first;
    bool is_prefill = batch->seg_flags[seg] & SEG_PREFILL;
    struct seq_ctl *ctl = &args->ctl[slot];
    int len_before = ctl->len;
    struct accepted a = {0};

    assert(n_rows > 0 && (is_prefill || n_rows <= BLOCK_ROWS_MAX));
    assert(batch->seg_pos[seg] == len_before);
    if (ctl->done == FINISH_NONE && ctl->cancel)
        ctl->done = FINISH_CANCELLED;

    out->slot = slot;
    out->pos = len_before;
    out->anchor_before = row_token[0];
    out->n_proposed = 0;
    if (is_prefill)
        ctl->len += n_rows;
    if (ctl->done == FINISH_NONE && chosen) {
        int n_drafts = is_prefill ? 0 : n_rows - 1;

        a = accept(ctl, is_prefill ? ctl->len : len_before + 1, chosen, row_token + 1, n_drafts);
        out->n_proposed = n_drafts;
        memcpy(out->drafts, row_token + 1, (size_t)n_drafts * sizeof *out->drafts);
        if (!is_prefill)
            ctl->len += a.n_tokens;
        if (a.n_tokens > 0)
            ctl->anchor = chosen[a.n_tokens - 1];
        ctl->n_generated += a.n_tokens;
        ctl->done = a.finish;
        if (ctl->has_counts && args->tables && args->tables->counts)
            count_tokens(args->tables, slot, chosen, a.n_tokens);
        memcpy(out->tokens, chosen, (size_t)a.n_tokens * sizeof *out->tokens);
        if (ctl->sample.n_logprobs >= 0 && logprobs)
            memcpy(out->logprobs, logprobs, (size_t)a.n_tokens * sizeof *out->logprobs);
    }
    args->seg_commit[seg] = ctl->len - len_before;
    args->seg_snapshot[seg] = take_snapshot(ctl, len_before, is_prefill);

    out->n_tokens = a.n_tokens;
    out->n_accepted = a.n_accepted;
    out->len = ctl->len;
    out->anchor = ctl->anchor;
    out->done = ctl->done;
    out->snapshot_len = args->seg_snapshot[seg] > 0 ? len_before + args->seg_snapshot[seg] : 0;
}

static void prepare(struct device *device, const void *args_, void *scratch) {
    const struct prepare_args *args = args_;
    const struct batch *batch = args->batch;
    const struct step_ring *ring = args->ring;
    uint64_t step = *ring->n_steps, place = step % (uint64_t)ring->n_steps_max;
    struct step_out *outs = ring->out + place * (uint64_t)ring->n_segs_max;
    int out = 0; /* first output not before the seg's rows that matter */

    (void)device, (void)scratch;
    assert(*batch->n_segs <= ring->n_segs_max);
    for (int seg = 0; seg < *batch->n_segs; seg++) {
        int flags = batch->seg_flags[seg], end = batch->seg_row[seg + 1];
        int row = flags & SEG_PREFILL ? end - 1 : batch->seg_row[seg];
        bool has_choice = !(flags & SEG_PREFILL) || flags & SEG_SAMPLE;

        while (out < *batch->n_outs && batch->out_row[out] < row)
            out++;
        if (has_choice) /* every row from `row` on is an output */
            assert(out + end - row <= *batch->n_outs && batch->out_row[out] == row &&
                   batch->out_row[out + end - row - 1] == end - 1);
        prepare_seg(args, seg, has_choice ? args->chosen + out : NULL,
                    has_choice && args->logprobs ? args->logprobs + out : NULL, &outs[seg]);
    }
    ring->n_segs[place] = *batch->n_segs;
    __atomic_store_n(ring->n_steps, step + 1, __ATOMIC_RELEASE);
}

int cpu_prepare(struct program *program, const struct prepare_args *args) {
    struct prepare_args kept = *args;

    if (args->ring == NULL || args->ring->n_steps_max < 1 || args->ring->n_segs_max < args->batch->n_segs_max)
        return -EINVAL;
    kept.batch = cpu_program_keep(program, args->batch, sizeof *args->batch);
    kept.tables = cpu_program_keep(program, args->tables, sizeof *args->tables);
    kept.ring = cpu_program_keep(program, args->ring, sizeof *args->ring);
    return cpu_program_add(program, prepare, &kept, sizeof kept, 0);
}
