#include "engine.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "engine_internal.h"
#include "watch.h"

/* ---- seqs ----------------------------------------------------------------------------------------------------------- */

struct seq *seq_new(int n_tokens_max, int n_bias) {
    struct seq *seq = calloc(1, sizeof *seq);

    if (!seq)
        return NULL;
    seq->n_tokens_max = n_tokens_max;
    seq->n_bias = n_bias;
    seq->tokens = calloc((size_t)n_tokens_max, sizeof *seq->tokens);
    seq->keys = calloc((size_t)n_tokens_max / PAGE_TOKENS + 1, sizeof *seq->keys);
    seq->bias_id = calloc((size_t)n_bias + 1, sizeof *seq->bias_id);
    seq->bias = calloc((size_t)n_bias + 1, sizeof *seq->bias);
    seq->sample = (struct sample_params){.top_p = 1, .repetition = 1, .n_logprobs = -1};
    seq->speculate = true;
    seq->slot = -1;
    if (seq->tokens && seq->keys && seq->bias_id && seq->bias)
        return seq;
    seq_free(seq);
    return NULL;
}

void seq_free(struct seq *seq) {
    if (!seq)
        return;
    free(seq->tokens);
    free(seq->keys);
    free(seq->bias_id);
    free(seq->bias);
    free(seq);
}

/* ---- the end of a seq ----------------------------------------------------------------------------------------------- */

/* False: hashing failed, and what has no key is neither found nor published. */
bool engine_extend_keys(struct engine *engine, struct seq *seq, int n_pages) {
    const struct kv_key *parent = seq->n_keys == 0 ? &seq->root : &seq->keys[seq->n_keys - 1];

    if (n_pages <= seq->n_keys)
        return true;
    if (kv_key_chain(engine->hasher, parent, seq->tokens + (size_t)seq->n_keys * PAGE_TOKENS,
                     (uint32_t)(n_pages - seq->n_keys), &seq->keys[seq->n_keys]) != 0)
        return false;
    seq->n_keys = n_pages;
    return true;
}

enum kv_spill_depth engine_depth(struct engine *engine, uint32_t n_pages, bool is_likely) {
    const struct kv_geometry *groups = engine->info->groups;
    uint64_t bytes = n_pages * (groups[KV_TARGET_FULL].page_bytes + groups[KV_DRAFT_FULL].page_bytes) +
                     engine->info->state.slot_bytes;

    return is_likely && (engine->options.restore_always ||
                         costs_worth_saving(&engine->costs, (int)n_pages * PAGE_TOKENS, bytes))
               ? KV_SPILL_TO_DISK
               : KV_SPILL_TO_HOST;
}

void engine_publish(struct engine *engine, struct seq *seq, int n_tokens, uint32_t state_slot) {
    struct seq_pages *pages = &engine->pages[seq->slot];
    int n_pages = n_tokens / PAGE_TOKENS;

    if (seq->cache != SEQ_CACHE_USE || !engine_extend_keys(engine, seq, n_pages)) {
        pages_give_state(pages, state_slot);
        return;
    }
    pages_publish(pages, &(struct seq_keys){seq->keys, seq->tokens, seq->n_keys, seq->uid}, n_tokens, state_slot);
    if (engine->options.spill && state_slot != KV_NO_SLOT && pages->lease.n_pages >= (uint32_t)n_pages)
        kv_spill_start(engine->options.spill, &pages->lease, (uint32_t)n_pages, seq->uid,
                       engine_depth(engine, (uint32_t)n_pages, seq->is_kept));
}

/* What is committed becomes findable: up to the held restore point with it, the rest for the sake of branches. Pages
 * below len are complete and never written again, whatever plans on their way still do. */
static void publish_all(struct engine *engine, struct seq *seq) {
    struct seq_pages *pages = &engine->pages[seq->slot];

    if (seq->restore) /* what its pages begin with has not arrived */
        return;
    if (seq->rolled > 0)
        pages_keep_rolling(pages, seq->rolled);
    seq->rolled = 0;
    if (pages->held != KV_NO_SLOT) {
        uint32_t held = pages->held;

        pages->held = KV_NO_SLOT;
        engine_publish(engine, seq, pages->held_tokens, held);
    }
    engine_publish(engine, seq, seq->len - seq->len % PAGE_TOKENS, KV_NO_SLOT);
}

void engine_place(struct engine *engine, struct seq *seq, int slot) {
    struct seq **at = &engine->placed;

    waiting_remove(&engine->waiting, seq);
    while (*at && (*at)->order < seq->order)
        at = &(*at)->next;
    seq->next = *at;
    *at = seq;
    seq->slot = slot;
    engine->at_slot[slot] = seq;
    engine->n_free_places--;
}

static void leave_place(struct engine *engine, struct seq *seq) {
    struct seq **at = &engine->placed;

    pages_end(&engine->pages[seq->slot]);
    if (engine->streaming == seq)
        engine->streaming = NULL;
    while (*at != seq)
        at = &(*at)->next;
    *at = seq->next;
    seq->next = NULL;
    engine->at_slot[seq->slot] = NULL;
    engine->n_free_places++;
    seq->slot = -1;
}

void engine_end_restore(struct seq *seq) {
    if (seq->restore)
        kv_restore_end(seq->restore);
    seq->restore = NULL;
}

static void forget(struct engine *engine, struct seq *seq) {
    engine_end_restore(seq);
    engine->n_seqs--;
    seq_free(seq);
}

/* No plan on its way knows the seq any more: what it holds goes back, and it waits again or is gone. */
static void settle(struct engine *engine, struct seq *seq) {
    if (seq->state == SEQ_PREEMPTED && engine->error == 0)
        publish_all(engine, seq);
    engine_end_restore(seq);
    leave_place(engine, seq);
    if (seq->state == SEQ_LEAVING) {
        forget(engine, seq);
        return;
    }
    seq->state = SEQ_WAITING;
    seq->len = seq->n_fed = seq->n_cycles = 0;
    seq->n_given = seq->n_tokens > seq->n_prompt ? seq->n_tokens - 1 : seq->n_prompt;
    seq->is_granted = false;
    seq->restore_plan = 0;
    seq->was_restored = false;
    seq->found = (struct kv_found){0};
    waiting_put(&engine->waiting, seq);
}

static bool settle_if_home(struct engine *engine, struct seq *seq) {
    if ((seq->state != SEQ_LEAVING && seq->state != SEQ_PREEMPTED) || seq->last_plan > engine->n_done)
        return false;
    settle(engine, seq);
    return true;
}

static void leave(struct engine *engine, struct seq *seq) {
    if (seq->state == SEQ_WAITING) {
        waiting_remove(&engine->waiting, seq);
        seq->next = engine->gone;
        engine->gone = seq;
    } else if (engine->error == 0) {
        publish_all(engine, seq);
    }
    seq->has_ended = true;
    seq->state = SEQ_LEAVING;
}

/* The device, or its loss, ended it. */
void engine_finish(struct engine *engine, struct seq *seq, enum seq_end why) {
    leave(engine, seq);
    seq->calls->on_end(seq->user, why);
}

void engine_end(struct engine *engine, struct seq *seq) {
    assert(!seq->has_ended);
    leave(engine, seq);
    if (!engine->is_busy)
        engine_settle_all(engine);
}

bool engine_settle_all(struct engine *engine) {
    bool any = false;

    for (struct seq *seq = engine->placed, *next; seq; seq = next) {
        next = seq->next;
        any |= settle_if_home(engine, seq);
    }
    for (struct seq **at = &engine->gone; *at;) {
        struct seq *seq = *at;

        if (seq->is_restoring) { /* until the copies into its slots are done */
            at = &seq->next;
            continue;
        }
        *at = seq->next;
        forget(engine, seq);
        any = true;
    }
    return any;
}

void engine_preempt(struct engine *engine, struct seq *seq) {
    seq->state = SEQ_PREEMPTED;
    seq->stats.n_preempted++;
    engine->view.n_preemptions++;
    settle_if_home(engine, seq);
}

/* ---- submission ----------------------------------------------------------------------------------------------------- */

/* Positions it may ever fill: the last token shown is never fed. */
int engine_positions_max(const struct engine *engine, const struct seq *seq) {
    int64_t n = (int64_t)seq->n_prompt + seq->max_tokens;

    return (int)(n < engine->options.n_context ? n : engine->options.n_context);
}

static uint32_t pages_max(const struct engine *engine, const struct seq *seq) {
    return (uint32_t)div_ceil((uint64_t)engine_positions_max(engine, seq), PAGE_TOKENS);
}

bool engine_is_large(const struct engine *engine, const struct seq *seq) {
    return engine->streamer && pages_max(engine, seq) > engine->view.n_device_pages;
}

static bool can_ever_run(const struct engine *engine, const struct seq *seq) {
    uint32_t n_most = engine->view.n_device_pages;

    if (engine_is_large(engine, seq))
        n_most = (uint32_t)engine->residency.most + engine->view.n_host_pages;
    return seq->n_prompt < engine->options.n_context && pages_max(engine, seq) <= n_most;
}

uint32_t engine_pages_to_decode(const struct engine *engine, const struct seq *seq) {
    int n = min_int(max_int(seq->n_given, seq->n_prompt) + BLOCK_ROWS_MAX, engine_positions_max(engine, seq));

    return (uint32_t)div_ceil((uint64_t)max_int(n, seq->n_prompt), PAGE_TOKENS);
}

int engine_submit(struct engine *engine, struct seq *seq) {
    if (engine->n_seqs >= engine->options.n_seqs_max)
        return ENGINE_E_BUSY;
    assert(seq->n_prompt > 0 && seq->n_tokens == seq->n_prompt && seq->n_tokens <= seq->n_tokens_max);
    seq->n_given = seq->n_prompt;
    if (!can_ever_run(engine, seq))
        return ENGINE_E_TOO_LARGE;
    seq->state = SEQ_WAITING;
    seq->engine = engine;
    seq->order = ++engine->n_submitted;
    seq->submitted_us = engine->options.now_us();
    seq->draws_drafts = seq->speculate;
    waiting_put(&engine->waiting, seq);
    engine->n_seqs++;
    return 0;
}

/* ---- plans ---------------------------------------------------------------------------------------------------------- */

int engine_fd(const struct engine *engine) {
    return device_thread_done_fd(engine->options.thread);
}

/* A plan that is not sent: who asked in vain for a page in it is in no plan. */
static void drop_plan(struct engine *engine, const struct plan *plan) {
    for (struct seq *seq = engine->placed; seq; seq = seq->next)
        if (seq->last_plan == plan->id)
            seq->last_plan = plan->id - 1;
}

void engine_turn(struct engine *engine) {
    engine_watch_restores(engine);
    while (engine->error == 0 && engine->n_sent - engine->n_done < DEVICE_PLANS_MAX) {
        struct plan *plan = &engine->plans[engine->n_sent % DEVICE_PLANS_MAX];
        uint64_t n_preemptions = engine->view.n_preemptions;
        bool is_empty;

        plan_clear(plan);
        plan->id = engine->n_sent + 1;
        engine->is_busy = true;
        is_empty = !engine_fill(engine, plan);
        engine->is_busy = false;
        if (is_empty) {
            drop_plan(engine, plan);
            if (!engine_settle_all(engine) && engine->view.n_preemptions == n_preemptions)
                return;
            continue; /* pages may have come back */
        }
        plan->submitted_us = engine->options.now_us();
        engine->n_sent++;
        engine->view.n_plans++;
        device_thread_submit(engine->options.thread, &plan->work);
    }
}

static void lose_device(struct engine *engine, int error) {
    engine->error = error;
    for (struct seq *seq = engine->placed; seq; seq = seq->next)
        if (!seq->has_ended)
            engine_finish(engine, seq, SEQ_END_DEVICE);
    for (struct seq *seq; (seq = waiting_first(&engine->waiting));)
        engine_finish(engine, seq, SEQ_END_DEVICE);
}

/* A restore beside a chunk costs what the chunk takes longer. */
static void learn_costs(struct engine *engine, const struct plan *plan, uint64_t us) {
    int n_rows = *plan->prefill_input.view.n_rows;
    double fed_us = n_rows * engine->costs.us_per_token;

    if (plan->n_prefill == 0 || plan->n_cycle + plan->n_replay > 0 || plan->work.restore.error != 0)
        return;
    if (plan_has_restore(plan))
        costs_restored(&engine->costs, engine_bytes_below(engine, &plan->prefill[0].seq->found),
                       (double)us > fed_us ? us - (uint64_t)fed_us : 1);
    else
        costs_fed(&engine->costs, n_rows, us);
}

void engine_dispatch(struct engine *engine) {
    uint64_t n = watch_take_count(engine_fd(engine));

    engine->is_busy = true;
    for (; n > 0; n--) {
        struct plan *plan = &engine->plans[engine->n_done % DEVICE_PLANS_MAX];
        uint64_t now = engine->options.now_us(), us = now - max_u64(plan->submitted_us, engine->last_done_us);

        engine->n_done++;
        learn_costs(engine, plan, us);
        engine->last_done_us = now;
        if (engine->error == 0 && plan->work.error != 0)
            lose_device(engine, plan->work.error);
        if (engine->error == 0 && !engine_has_results(engine, plan))
            lose_device(engine, -EIO);
        if (engine->error == 0)
            engine_reap(engine, plan);
        else
            plan_give_states(plan, engine->options.store);
    }
    engine->is_busy = false;
    engine_settle_all(engine);
}

static void look_at_streaming(const struct engine *engine, struct engine_view *view) {
    struct streamer_stats stats;

    if (!engine->streamer)
        return;
    streamer_stats(engine->streamer, &stats);
    view->streamed_bytes = stats.bytes;
    view->n_fences = stats.n_fences;
    view->n_late = stats.n_late;
    view->n_streamed_passes = stats.n_passes;
    view->streamed_pass_bytes = stats.pass_bytes;
    if (engine->streaming) {
        const struct seq_pages *pages = &engine->pages[engine->streaming->slot];

        view->n_streamed = (uint32_t)pages_n_streamed(pages);
        view->n_stays = (uint32_t)pages->n_pages[KV_TARGET_FULL] - view->n_streamed;
    }
}

void engine_look(const struct engine *engine, struct engine_view *ret_view) {
    *ret_view = engine->view;
    ret_view->error = engine->error;
    ret_view->n_in_flight = (int)(engine->n_sent - engine->n_done);
    if (ret_view->n_in_flight > 0)
        ret_view->waits_since_us =
            max_u64(engine->plans[engine->n_done % DEVICE_PLANS_MAX].submitted_us, engine->last_done_us);
    ret_view->n_waiting = engine->waiting.n;
    ret_view->n_free_places = engine->n_free_places;
    for (const struct seq *seq = engine->placed; seq; seq = seq->next) {
        ret_view->n_running += seq->state == SEQ_FEEDING || seq->state == SEQ_DECODING;
        ret_view->n_leaving += seq->state == SEQ_LEAVING || seq->state == SEQ_PREEMPTED;
        ret_view->n_free_places += seq->state == SEQ_LEAVING; /* who is preempted wants its place back */
    }
    look_at_streaming(engine, ret_view);
}
