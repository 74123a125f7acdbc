/* engine_reap: what a plan that is done has brought. */
#include <assert.h>
#include <string.h>

#include "engine_internal.h"

bool engine_has_results(const struct engine *engine, const struct plan *plan) {
    uint64_t n_steps = (plan->n_prefill > 0) + (plan->n_replay > 0) + (plan->n_cycle > 0);

    return __atomic_load_n(model_ring(engine->options.model)->n_steps, __ATOMIC_ACQUIRE) >=
           engine->n_steps_seen + n_steps;
}

/* One pass published one step. */
static const struct step_out *take_step(struct engine *engine, int *ret_n) {
    const struct step_ring *ring = model_ring(engine->options.model);
    uint64_t at = engine->n_steps_seen++ % (uint64_t)ring->n_steps_max;

    *ret_n = ring->n_segs[at];
    return ring->out + at * (uint64_t)ring->n_segs_max;
}

static enum seq_end end_of(int32_t done) {
    return done == FINISH_STOP      ? SEQ_END_STOP
           : done == FINISH_LENGTH  ? SEQ_END_LENGTH
           : done == FINISH_CONTEXT ? SEQ_END_CONTEXT
                                    : SEQ_END_NONFINITE;
}

static void deliver(struct engine *engine, struct seq *seq, const struct step_out *out) {
    if (seq->has_ended)
        return;
    if (out->n_tokens > 0) {
        assert(seq->n_tokens + out->n_tokens <= seq->n_tokens_max);
        if (seq->stats.first_token_us == 0)
            seq->stats.first_token_us = engine->options.now_us();
        memcpy(seq->tokens + seq->n_tokens, out->tokens, (size_t)out->n_tokens * sizeof *out->tokens);
        seq->n_tokens += out->n_tokens;
        seq->stats.n_accepted_now = out->n_accepted;
        seq->calls->on_tokens(seq->user, out->tokens, out->n_tokens,
                              seq->sample.n_logprobs >= 0 ? out->logprobs : NULL);
    }
    if (!seq->has_ended && out->done != FINISH_NONE)
        engine_finish(engine, seq, end_of(out->done));
}

static void reap_given(struct engine *engine, const struct plan_part *parts, int n_parts) {
    int n;
    const struct step_out *out = take_step(engine, &n);

    assert(n == n_parts);
    for (int i = 0; i < n; i++) {
        struct seq *seq = parts[i].seq;
        bool was_fed = seq->len >= seq->n_prompt;

        assert(out[i].slot == seq->slot);
        seq->len = out[i].len;
        if (parts[i].state_slot != KV_NO_SLOT && seq->publishes_late)
            pages_give_state(&engine->pages[seq->slot], parts[i].state_slot);
        else if (parts[i].state_slot != KV_NO_SLOT)
            engine_publish(engine, seq, seq->len, parts[i].state_slot);
        if (!seq->has_ended && !was_fed)
            seq->calls->on_progress(seq->user, min_int(seq->len, seq->n_prompt), seq->n_prompt);
        deliver(engine, seq, &out[i]);
    }
}

/* The chunk of a seq whose pages did not all come: it was computed from anything. */
static void drop_given(struct engine *engine, struct plan *plan) {
    int n;

    take_step(engine, &n);
    assert(n == 1 && plan->n_prefill == 1);
    plan_give_states(plan, engine->options.store);
}

static void count_pass(struct seq *seq, const struct step_out *out) {
    seq->stats.n_steps++;
    seq->stats.n_by_steps += out->n_tokens;
    seq->stats.n_proposed += out->n_proposed;
    seq->stats.n_accepted += out->n_accepted;
    if (out->n_proposed > 0)
        seq->drafted_tokens += 0.2f * ((float)out->n_tokens - seq->drafted_tokens);
    else
        seq->n_plain++;
}

static void reap_cycle(struct engine *engine, const struct plan *plan) {
    int n;
    const struct step_out *out = take_step(engine, &n);

    for (int i = 0; i < plan->n_cycle; i++)
        plan->cycle[i]->n_cycles--;
    for (int i = 0; i < n; i++) {
        struct seq *seq = engine->at_slot[out[i].slot];

        seq->len = out[i].len;
        if (out[i].snapshot_len > 0) {
            seq->rolled = out[i].snapshot_len;
            seq->is_granted = false;
        }
        if (!seq->has_ended)
            count_pass(seq, &out[i]);
        deliver(engine, seq, &out[i]);
    }
    engine->view.n_cycles++;
    engine->view.n_cycle_seqs += (uint64_t)n;
}

/* What came with this plan's chunk becomes findable; or, if it did not all come, the seq begins again without it. */
static void end_restore(struct engine *engine, struct seq *seq, int error) {
    struct seq_pages *pages = &engine->pages[seq->slot];

    seq->stats.restored_us = engine->options.now_us();
    kv_restore_copied(seq->restore, error);
    engine_end_restore(seq);
    if (error == 0) {
        pages_publish_restored(pages, &(struct seq_keys){seq->keys, seq->tokens, seq->n_keys, seq->uid});
        if (pages->n_published >= pages->n_restored)
            engine_keep_hit(engine, seq, pages->n_restored * PAGE_TOKENS);
        return;
    }
    seq->has_lost_restore = true;
    seq->len = pages->n_published * PAGE_TOKENS;
    if (!seq->has_ended)
        seq->state = SEQ_PREEMPTED;
}

/* Restore points that this plan copied from need no longer be held. */
static void end_restores(struct engine *engine, const struct plan *plan) {
    for (struct seq *seq = engine->placed; seq; seq = seq->next) {
        if (seq->restore_plan != plan->id)
            continue;
        if (seq->restore)
            end_restore(engine, seq, plan->work.restore.error);
        else
            pages_restored(&engine->pages[seq->slot]);
        seq->restore_plan = 0;
    }
}

void engine_reap(struct engine *engine, struct plan *plan) {
    end_restores(engine, plan);
    if (engine->streaming && engine->steered_plan == plan->id)
        pages_steered(&engine->pages[engine->streaming->slot]);
    if (plan->n_prefill > 0 && plan->work.restore.error != 0)
        drop_given(engine, plan);
    else if (plan->n_prefill > 0)
        reap_given(engine, plan->prefill, plan->n_prefill);
    if (plan->n_replay > 0)
        reap_given(engine, plan->replay, plan->n_replay);
    if (plan->n_cycle > 0)
        reap_cycle(engine, plan);
    engine->view.n_prefills += plan->n_prefill > 0;
    engine->view.n_prefill_rows += (uint64_t)*plan->prefill_input.view.n_rows;
    engine->view.n_replay_rows += (uint64_t)*plan->replay_input.view.n_rows;
}
