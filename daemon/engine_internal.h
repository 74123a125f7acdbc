/* engine_internal: what the engine's files share. engine.c: seqs come, end and are given back; engine_fill.c: a plan is
 * filled; engine_reap.c: a plan's results are looked at; engine_open.c: memory, passes, warm-up. */
#pragma once
#include "costs.h"
#include "engine.h"
#include "pages.h"
#include "plan.h"
#include "schedule.h"
#include "waiting.h"

enum {
    ENGINE_CYCLES = 4,
    ENGINE_LOOK_AHEAD = 64, /* seqs that wait and are looked at in a turn: of those before, some fit or all must wait */
};

struct engine {
    struct engine_options options;
    const struct model_info *info;
    int n_rows_max; /* of a prefill pass */
    struct kv_hasher *hasher;
    struct tables tables;
    struct streamer *streamer; /* NULL: no seq streams */
    struct residency residency;
    struct residency_steering steering;
    uint64_t steered_plan;   /* in which a page of its moves; 0: none does */
    struct seq *streaming;   /* who streams: its place has the ring; NULL: nobody */
    struct seq_pages *pages; /* [n_places] */
    struct seq **at_slot;    /* [n_places] who runs there */
    struct model_pass *prefill, *replay;
    /* The same cycle for ever more seqs, the last one for all places: a device that works by what a program may hold at
     * most is fast with few. They have the same bits. */
    struct model_pass *cycles[ENGINE_CYCLES];
    struct plan plans[DEVICE_PLANS_MAX];

    /* A seq is in one of these: */
    struct waiting waiting;
    struct seq *placed; /* those with a place, oldest first */
    struct seq *gone;   /* ended while they waited, and while somebody may be looking at them */
    int n_seqs, n_free_places;
    uint64_t n_submitted;    /* seqs */
    uint64_t n_sent, n_done; /* plans */
    uint64_t n_steps_seen;   /* of the ring */
    uint64_t last_done_us;
    bool is_busy; /* seqs are being looked at: who ends now is freed later */
    int error;
    struct costs costs;
    struct engine_view view; /* its counters and constants */

    /* of engine_fill: [n_list_max] */
    int n_list_max;
    struct schedule_seq *list;
    struct seq **list_seqs, **feed_seqs;
    int *admitted;
    struct schedule_feed *feed;
};

/* How far down a chain goes: to the disk if it is likely to be asked for again, and reading it would pay. */
enum kv_spill_depth engine_depth(struct engine *engine, uint32_t n_pages, bool is_likely);

/* The smallest that has room for so many. */
struct model_pass *engine_cycle_of(const struct engine *engine, int n_seqs);

/* False: there is nothing to do. */
bool engine_fill(struct engine *engine, struct plan *plan);
/* False: what was reported done has not been done; the device is lost. */
bool engine_has_results(const struct engine *engine, const struct plan *plan);
void engine_reap(struct engine *engine, struct plan *plan);

/* What of a prefix must be copied, or read first. */
struct costs_bytes engine_bytes_below(const struct engine *engine, const struct kv_found *found);

void engine_watch_restores(struct engine *engine);
void engine_keep_hit(struct engine *engine, const struct seq *seq, int n_tokens);
void engine_publish(struct engine *engine, struct seq *seq, int n_tokens, uint32_t state_slot);
void engine_finish(struct engine *engine, struct seq *seq, enum seq_end why);
void engine_preempt(struct engine *engine, struct seq *seq);
void engine_end_restore(struct seq *seq);
void engine_place(struct engine *engine, struct seq *seq, int slot);
/* Those that plans on their way know no longer go or wait again. True: there were some. */
bool engine_settle_all(struct engine *engine);
bool engine_extend_keys(struct engine *engine, struct seq *seq, int n_pages);
int engine_positions_max(const struct engine *engine, const struct seq *seq);
/* It may come to need more pages than the device has, and then streams. */
bool engine_is_large(const struct engine *engine, const struct seq *seq);
uint32_t engine_pages_to_decode(const struct engine *engine, const struct seq *seq);
