/* engine_internal: what the engine's files share. engine.c: seqs come, end and are given back; engine_fill.c: a plan is
 * filled; engine_reap.c: a plan's results are looked at; engine_open.c: memory, passes, warm-up. */
#pragma once
#include "engine.h"
#include "pages.h"
#include "plan.h"
#include "schedule.h"

struct engine {
    struct engine_options options;
    const struct model_info *info;
    int n_rows_max; /* of a prefill pass */
    struct kv_hasher *hasher;
    struct tables tables;
    struct seq_pages *pages; /* [n_places] */
    struct seq **at_slot;    /* [n_places] who runs there */
    struct model_pass *prefill, *replay, *cycle;
    struct plan plans[DEVICE_PLANS_MAX];
    struct device_thread *thread;
    int done_fd;

    struct seq *seqs; /* all, oldest first */
    int n_seqs, n_free_places;
    uint64_t n_submitted;    /* seqs */
    uint64_t n_sent, n_done; /* plans */
    uint64_t n_steps_seen;   /* of the ring */
    uint64_t last_done_us;
    bool is_dispatching;
    int error;
    struct engine_view view; /* its counters and constants */

    /* of engine_fill: [n_seqs_max] */
    struct schedule_seq *list;
    struct seq **list_seqs, **feed_seqs;
    int *admitted;
    struct schedule_feed *feed;
};

static inline uint64_t max_u64(uint64_t a, uint64_t b) {
    return a > b ? a : b;
}

/* False: there is nothing to do. */
bool engine_fill(struct engine *engine, struct plan *plan);
void engine_reap(struct engine *engine, struct plan *plan);

void engine_publish(struct engine *engine, struct seq *seq, int n_tokens, uint32_t state_slot);
void engine_finish(struct engine *engine, struct seq *seq, enum seq_end why);
void engine_preempt(struct engine *engine, struct seq *seq);
bool engine_extend_keys(struct engine *engine, struct seq *seq, int n_pages);
int engine_positions_max(const struct engine *engine, const struct seq *seq);
uint32_t engine_pages_to_decode(const struct engine *engine, const struct seq *seq);
