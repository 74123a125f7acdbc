/* plan: what one turn of the scheduler sends to the device: given rows (prompts, and replays after a preemption), then a
 * cycle of the seqs that decode. Holds the pinned memory of its inputs, which stays as it is until the plan is done, and
 * notes whose rows they are. Two plans exist and take turns. */
#pragma once
#include "pages.h"
#include "seq.h"
#include "tables.h"

struct plan_part { /* given rows of one seq */
    struct seq *seq;
    int n_rows;
    uint32_t state_slot; /* a copy of the state after these rows, or KV_NO_SLOT */
};

struct plan {
    uint64_t id; /* 1, 2, ... in the order of submission */
    uint64_t submitted_us;
    struct device_work work;
    struct plan_part *prefill, *replay; /* [n_segs_max], in batch order */
    int n_prefill, n_replay;
    struct seq **cycle; /* [n_segs_max] */
    int n_cycle;

    struct model_batch prefill_input, replay_input;
    int32_t *cycle_list;
    int32_t *words; /* single values for device fields */
    int n_words, n_words_max;
    struct streamed_seq streamed; /* the one that streams */
    struct devmem mem;
};

/* n_restored_max: pages that may come with a plan, of each group. */
int plan_open(struct plan *plan, const struct backend *backend, struct device *device, struct model *model,
              int n_segs_max, int n_rows_max, int n_restored_max);
void plan_close(struct plan *plan, struct model *model);

void plan_clear(struct plan *plan);
/* Of a plan that nobody looks at any more: the slots for restore points that it was to fill. */
void plan_give_states(struct plan *plan, struct kv_store *store);
bool plan_has_restore(const struct plan *plan);
bool plan_is_empty(const struct plan *plan); /* nothing to run and nothing to copy */

/* n rows of the seq's tokens from position pos on; with_sample: the last one yields a token. */
void plan_add_prefill(struct plan *plan, struct seq *seq, int pos, int n_rows, bool with_sample);
void plan_add_replay(struct plan *plan, struct seq *seq, int pos, int n_rows);
void plan_add_cycle(struct plan *plan, struct seq *seq);
/* The seq of these pages streams; which passes it is in, work says. */
void plan_set_streamed(struct plan *plan, const struct seq_pages *pages);
/* The device's field becomes value before any row of this plan is looked at. */
void plan_set(struct plan *plan, int32_t *device_field, int32_t value);
