#include "plan.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum {
    COPIES_PER_SEQ =
        20, /* an admission: 13; running: 3 groups twice, states, fields; pages that move out come on top */
    WORDS_PER_SEQ = 4,
};

static int open_copies(struct device_copies *copies, int n_max) {
    copies->n_max = n_max;
    copies->copies = calloc((size_t)n_max, sizeof *copies->copies);
    return copies->copies ? 0 : -ENOMEM;
}

int plan_open(struct plan *plan, const struct backend *backend, struct device *device, struct model *model,
              int n_segs_max, int n_rows_max, int n_restored_max) {
    size_t n = (size_t)n_segs_max;
    int r;

    *plan = (struct plan){.n_words_max = n_segs_max * WORDS_PER_SEQ};
    devmem_init(&plan->mem, backend, device, NULL);
    plan->prefill = calloc(n, sizeof *plan->prefill);
    plan->replay = calloc(n, sizeof *plan->replay);
    plan->cycle = calloc(n, sizeof(struct seq *));
    plan->cycle_list = devmem_take(&plan->mem, MEM_HOST, (n + 1) * sizeof *plan->cycle_list);
    plan->words = devmem_take(&plan->mem, MEM_HOST, (size_t)plan->n_words_max * sizeof *plan->words);
    r = plan->prefill && plan->replay && plan->cycle && plan->cycle_list && plan->words ? 0 : -ENOMEM;
    if (r == 0)
        r = open_copies(&plan->work.before, n_segs_max * COPIES_PER_SEQ + n_rows_max / PAGE_TOKENS);
    if (r == 0)
        r = open_copies(&plan->work.between, n_segs_max);
    if (r == 0)
        r = open_copies(&plan->work.restore.copies, 1 + 3 * n_restored_max);
    if (r == 0)
        r = model_batch_new(model, MEM_HOST, n_segs_max, n_rows_max, n_segs_max, &plan->prefill_input);
    if (r == 0)
        r = model_batch_new(model, MEM_HOST, n_segs_max, n_segs_max * BLOCK_ROWS_MAX, n_segs_max, &plan->replay_input);
    if (r != 0)
        plan_close(plan, model);
    return r;
}

void plan_close(struct plan *plan, struct model *model) {
    model_batch_free(model, &plan->prefill_input);
    model_batch_free(model, &plan->replay_input);
    devmem_deinit(&plan->mem);
    free(plan->work.before.copies);
    free(plan->work.between.copies);
    free(plan->work.restore.copies.copies);
    free(plan->prefill);
    free(plan->replay);
    free(plan->cycle);
    *plan = (struct plan){0};
}

static void clear_batch(struct batch *batch) {
    *batch->n_segs = *batch->n_rows = *batch->n_outs = 0;
    batch->seg_row[0] = 0;
}

void plan_clear(struct plan *plan) {
    plan->work.before.n = plan->work.between.n = plan->work.restore.copies.n = 0;
    plan->work.restore.error = 0;
    plan->work.prefill = plan->work.rerun = plan->work.cycle = NULL;
    plan->work.prefill_streamed = plan->work.rerun_streamed = plan->work.cycle_streamed =
        (struct streamed){.seqs = &plan->streamed};
    plan->work.moves_pages_out = false;
    plan->work.error = 0;
    plan->n_prefill = plan->n_replay = plan->n_cycle = plan->n_words = 0;
    clear_batch(&plan->prefill_input.view);
    clear_batch(&plan->replay_input.view);
    plan->cycle_list[0] = 0;
}

static void give_states(struct plan_part *parts, int n, struct kv_store *store) {
    for (int i = 0; i < n; i++)
        if (parts[i].state_slot != KV_NO_SLOT)
            kv_store_give(store, KV_TARGET_STATE, parts[i].state_slot);
}

bool plan_has_restore(const struct plan *plan) {
    return plan->work.restore.copies.n > 0;
}

void plan_give_states(struct plan *plan, struct kv_store *store) {
    give_states(plan->prefill, plan->n_prefill, store);
    give_states(plan->replay, plan->n_replay, store);
}

bool plan_is_empty(const struct plan *plan) {
    return plan->n_prefill + plan->n_replay + plan->n_cycle + plan->work.before.n == 0;
}

static void add_seg(struct batch *batch, const struct seq *seq, int pos, int n_rows, int flags) {
    int seg = (*batch->n_segs)++, row = *batch->n_rows;

    assert(seg < batch->n_segs_max && row + n_rows <= batch->n_rows_max && n_rows > 0);
    batch->seg_slot[seg] = seq->slot;
    batch->seg_pos[seg] = pos;
    batch->seg_flags[seg] = flags;
    for (int i = 0; i < n_rows; i++) {
        batch->row_token[row + i] = seq->tokens[pos + i];
        batch->row_seg[row + i] = seg;
    }
    *batch->n_rows = batch->seg_row[seg + 1] = row + n_rows;
    if (flags & SEG_SAMPLE)
        batch->out_row[(*batch->n_outs)++] = row + n_rows - 1;
}

void plan_add_prefill(struct plan *plan, struct seq *seq, int pos, int n_rows, bool with_sample) {
    add_seg(&plan->prefill_input.view, seq, pos, n_rows, SEG_PREFILL | (with_sample ? SEG_SAMPLE : 0));
    plan->prefill[plan->n_prefill++] = (struct plan_part){seq, n_rows, KV_NO_SLOT};
}

void plan_add_replay(struct plan *plan, struct seq *seq, int pos, int n_rows) {
    add_seg(&plan->replay_input.view, seq, pos, n_rows, SEG_PREFILL);
    plan->replay[plan->n_replay++] = (struct plan_part){seq, n_rows, KV_NO_SLOT};
}

void plan_add_cycle(struct plan *plan, struct seq *seq) {
    plan->cycle[plan->n_cycle++] = seq;
    plan->cycle_list[0] = plan->n_cycle;
    plan->cycle_list[plan->n_cycle] = seq->slot;
}

void plan_set_streamed(struct plan *plan, const struct seq_pages *pages) {
    plan->streamed = (struct streamed_seq){0, pages->first_streamed, pages->end_streamed, pages->streamed};
}

void plan_set(struct plan *plan, int32_t *device_field, int32_t value) {
    assert(plan->n_words < plan->n_words_max);
    plan->words[plan->n_words] = value;
    device_copies_add(&plan->work.before, device_field, &plan->words[plan->n_words++], sizeof value);
}
