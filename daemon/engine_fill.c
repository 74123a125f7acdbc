/* engine_fill: what the next plan holds. */
#include <assert.h>
#include <string.h>

#include "engine_internal.h"

enum {
    PLAIN_PASSES = 64,    /* without drafts before drafting is tried again */
    DRAFT_PASSES_MIN = 8, /* before the average is believed */
};

/* ---- the scheduler's view ------------------------------------------------------------------------------------------- */

static int feed_end(const struct seq *seq) {
    return seq->n_fed < seq->n_prompt ? seq->n_prompt : seq->n_given;
}

/* Where the next piece must end at the latest. */
static int next_cut(const struct seq *seq) {
    for (int i = 0; i < seq->n_cuts; i++)
        if (seq->cuts[i] > seq->n_fed)
            return seq->cuts[i];
    return feed_end(seq);
}

static bool has_place(const struct seq *seq) {
    return seq->state == SEQ_FEEDING || seq->state == SEQ_DECODING;
}

static void add_to_list(struct engine *engine, struct seq *seq, int at) {
    uint32_t n_pages = engine_pages_to_decode(engine, seq), n_held = 0;

    if (engine_is_large(engine, seq)) /* the rest needs no device */
        n_pages = (uint32_t)min_int((int)n_pages, engine->residency.most);
    if (has_place(seq))
        n_held =
            (uint32_t)(engine->pages[seq->slot].n_pages[KV_TARGET_FULL] - pages_n_streamed(&engine->pages[seq->slot]));
    else if (seq->restore)
        n_held = kv_restore_n_pages(seq->restore);
    engine->list_seqs[at] = seq;
    engine->list[at] =
        (struct schedule_seq){.priority = seq->priority,
                              .order = seq->order,
                              .is_waiting = seq->state == SEQ_WAITING,
                              .is_parked = seq->is_parked,
                              .is_fed = seq->state == SEQ_DECODING,
                              .is_replay = seq->n_fed >= seq->n_prompt,
                              .n_left = seq->n_given - seq->n_fed,
                              .n_to_cut = next_cut(seq) - seq->n_fed,
                              .n_pages = seq->state != SEQ_DECODING && n_pages > n_held ? n_pages - n_held : 0,
                              .n_passed_by = seq->n_passed_by};
}

/* Those with a place, oldest first. */
static int list_placed(struct engine *engine) {
    int n = 0;

    for (struct seq *seq = engine->placed; seq; seq = seq->next)
        if (has_place(seq))
            add_to_list(engine, seq, n++);
    return n;
}

/* Behind the first n: those that wait, as far as one looks. Returns where they end. */
static int list_waiting(struct engine *engine, int n) {
    int end = min_int(n + ENGINE_LOOK_AHEAD, engine->n_list_max);

    for (struct seq *seq = waiting_first(&engine->waiting); seq && n < end; seq = waiting_next(&engine->waiting, seq))
        if (!seq->is_parked && !seq->is_restoring) /* until its client reads; until its pages are there */
            add_to_list(engine, seq, n++);
    return n;
}

/* ---- admission ------------------------------------------------------------------------------------------------------ */

/* Token counts as the device's penalties read them (struct seq_tables). */
static void write_counts(struct engine *engine, const struct seq *seq) {
    size_t vocab = (size_t)engine->info->target.vocab;
    int32_t *counts = engine->tables.counts + (size_t)seq->slot * vocab;

    memset(counts, 0, vocab * sizeof *counts);
    for (int i = 0; i < seq->n_tokens; i++)
        if (i < seq->n_prompt)
            counts[seq->tokens[i]] |= 1;
        else
            counts[seq->tokens[i]] += 2;
}

static void write_ctl(struct engine *engine, struct plan *plan, const struct seq *seq, const struct kv_match *match) {
    const struct sample_params *sample = &seq->sample;
    struct tables *tables = &engine->tables;
    struct seq_ctl *ctl = &tables->ctl[seq->slot];
    bool has_counts = sample->repetition != 1 || sample->presence != 0 || sample->frequency != 0;

    *ctl = (struct seq_ctl){.len = (int32_t)match->n_tokens,
                            .anchor = seq->n_tokens > seq->n_prompt ? seq->tokens[seq->n_tokens - 1] : -1,
                            .n_generated = seq->n_tokens - seq->n_prompt,
                            .max_tokens = seq->max_tokens,
                            .context_max = engine->options.n_context,
                            .speculate = seq->draws_drafts,
                            .draft_valid_from = (int32_t)match->draft_valid_from,
                            .has_counts = has_counts || seq->n_bias > 0,
                            .n_bias = seq->n_bias,
                            .n_stop_ids = seq->n_stop_ids,
                            .sample = *sample};
    memcpy(ctl->stop_ids, seq->stop_ids, sizeof ctl->stop_ids);
    tables_push_ctl(tables, &plan->work.before, seq->slot);
    if (!ctl->has_counts)
        return;
    write_counts(engine, seq);
    tables_push_counts(tables, &plan->work.before, seq->slot);
    memcpy(tables->bias_id + (size_t)seq->slot * SEQ_BIAS_MAX, seq->bias_id,
           (size_t)seq->n_bias * sizeof *seq->bias_id);
    memcpy(tables->bias + (size_t)seq->slot * SEQ_BIAS_MAX, seq->bias, (size_t)seq->n_bias * sizeof *seq->bias);
    tables_push_bias(tables, &plan->work.before, seq->slot, seq->n_bias);
}

/* A restore point at a place of the prompt behind the hit. */
static void add_cut(struct seq *seq, const struct kv_match *match, int cut) {
    int at = 0;

    cut = min_int(cut, (seq->n_prompt - 1) / PAGE_TOKENS * PAGE_TOKENS);
    if (cut <= (int)match->n_tokens || seq->n_cuts == SEQ_CUTS_MAX)
        return;
    while (at < seq->n_cuts && seq->cuts[at] < cut)
        at++;
    if (at < seq->n_cuts && seq->cuts[at] == cut)
        return;
    memmove(&seq->cuts[at + 1], &seq->cuts[at], (size_t)(seq->n_cuts - at) * sizeof *seq->cuts);
    seq->cuts[at] = cut;
    seq->n_cuts++;
}

static int free_place(const struct engine *engine) {
    int slot = 0;

    while (engine->at_slot[slot])
        slot++;
    return slot;
}

struct costs_bytes engine_bytes_below(const struct engine *engine, const struct kv_found *found) {
    const struct kv_geometry *groups = engine->info->groups;
    uint64_t page_bytes = groups[KV_TARGET_FULL].page_bytes + groups[KV_DRAFT_FULL].page_bytes;
    uint64_t n_pages = (found->n_tokens - found->n_device_tokens) / PAGE_TOKENS,
             n_disk_pages = found->n_disk_tokens / PAGE_TOKENS;

    if (n_disk_pages == 0)
        return (struct costs_bytes){.host = n_pages * page_bytes + engine->info->state.slot_bytes};
    return (struct costs_bytes){.host = (n_pages - min_u64(n_pages, n_disk_pages)) * page_bytes,
                                .disk = n_disk_pages * page_bytes + engine->info->state.slot_bytes};
}

static void on_restored(void *user, int result) {
    struct seq *seq = user;
    struct engine *engine = seq->engine;

    seq->is_restoring = false;
    seq->stats.restored_us = engine->options.now_us();
    if (result == 0)
        costs_restored(&engine->costs, engine_bytes_below(engine, &seq->found),
                       seq->stats.restored_us - seq->stats.restore_us);
    else
        engine_end_restore(seq); /* what could not be restored is computed */
    if (seq->has_ended)
        engine_settle_all(engine);
}

/* What was brought up for those that still wait may leave again: the seq needs the room, or a restore of its own. They have
 * it brought up anew. False: there was nothing. */
static bool let_go_of_restored(struct engine *engine, const struct seq *for_whom) {
    bool any = false;

    for (struct seq *seq = waiting_first(&engine->waiting); seq; seq = waiting_next(&engine->waiting, seq)) {
        if (!seq->restore || seq->is_restoring)
            continue;
        engine_end_restore(seq);
        if (seq != for_whom)
            seq->was_restored = false;
        any = true;
    }
    return any;
}

/* Somebody runs, leaves or is brought up: what those that wait hold is taken over, one after the other. */
static bool is_anybody_going_on(struct engine *engine) {
    for (const struct seq *seq = engine->placed; seq; seq = seq->next)
        if (!seq->is_parked || !has_place(seq))
            return true;
    for (const struct seq *seq = waiting_first(&engine->waiting); seq; seq = waiting_next(&engine->waiting, seq))
        if (seq->is_restoring)
            return true;
    return false;
}

static bool is_spilling(const struct engine *engine) {
    return engine->options.spill && !kv_spill_is_idle(engine->options.spill);
}

/* All restores, and all pages, may be held by those that wait for pages, and so for this seq. False: later. */
static bool start_restore(struct engine *engine, struct seq *seq, uint32_t n_pages) {
    int r;

    do
        r = kv_restore_start(engine->options.restores, seq->keys, seq->tokens, n_pages, KV_RESTORE_REQUEST, on_restored,
                             seq, &seq->restore);
    while (r != 0 && !is_anybody_going_on(engine) && let_go_of_restored(engine, seq));
    seq->is_restoring = r == 0;
    return r != KV_RESTORE_E_BUSY && (r == 0 || !is_spilling(engine)); /* what is spilled holds its pages until then */
}

enum { SCAN_WAIT_US = 2 * 1000 * 1000 /* at most, for what may lie on disk */ };

/* While others run their steps hide the copies, and waiting for them would be in the way of those steps. */
static bool is_alone_with_chunk(const struct engine *engine, const struct seq *seq) {
    return !engine->placed && (int)seq->found.n_tokens < seq->n_prompt && seq->found.n_disk_tokens == 0;
}

enum below { BELOW_NOTHING, BELOW_LATER /* it has begun to come, or must wait for others */, BELOW_HANDED };

/* What lies below comes up before the seq is given a place, or, handed over to it, with its first chunk. Tried once: what
 * fails is computed. */
static enum below restore_first(struct engine *engine, struct plan *plan, struct seq *seq, int slot, int n_pages,
                                struct kv_match *ret_match) {
    struct kv_restores *restores = engine->options.restores;
    struct kv_found *found = &seq->found;
    uint32_t n_found;

    if (!restores || seq->was_restored || seq->has_lost_restore || n_pages == 0)
        return BELOW_NOTHING;
    kv_restores_lookup(restores, seq->keys, (uint32_t)n_pages, found);
    if (found->is_incomplete && engine->options.now_us() - seq->submitted_us < SCAN_WAIT_US)
        return BELOW_LATER;
    if (found->n_tokens <= found->n_device_tokens)
        return BELOW_NOTHING;
    if (found->is_coming)
        return BELOW_LATER;
    if (!engine->options.restore_always &&
        !costs_prefer_restore(&engine->costs, (int)(found->n_tokens - found->n_device_tokens),
                              engine_bytes_below(engine, found))) {
        seq->was_restored = true;
        return BELOW_NOTHING;
    }
    n_found = found->n_tokens / PAGE_TOKENS;
    if (is_alone_with_chunk(engine, seq) &&
        pages_begin_restored(&engine->pages[slot], restores,
                             &(struct seq_keys){seq->keys, seq->tokens, (int)n_found, seq->uid},
                             engine_is_large(engine, seq), &plan->work.before, ret_match, &seq->restore) == 0) {
        seq->was_restored = true;
        seq->stats.restore_us = engine->options.now_us();
        return BELOW_HANDED;
    }
    if (!start_restore(engine, seq, n_found))
        return BELOW_LATER;
    seq->was_restored = true;
    if (!seq->is_restoring)
        return BELOW_NOTHING;
    seq->stats.restore_us = engine->options.now_us();
    return BELOW_LATER;
}

/* A restore that crawls is given up for computing. All of it would have taken longer than it did so far: the next one knows. */
void engine_watch_restores(struct engine *engine) {
    if (engine->options.restore_always)
        return;
    for (struct seq *seq = waiting_first(&engine->waiting); seq; seq = waiting_next(&engine->waiting, seq)) {
        struct costs_bytes bytes = engine_bytes_below(engine, &seq->found);
        uint64_t us = engine->options.now_us() - seq->stats.restore_us;

        if (!seq->is_restoring || seq->is_given_up ||
            !costs_give_up(&engine->costs, (int)(seq->found.n_tokens - seq->found.n_device_tokens), bytes,
                           kv_restore_progress(seq->restore), us))
            continue;
        seq->is_given_up = true;
        kv_restore_cancel(seq->restore);
        costs_restored(&engine->costs, bytes, us);
    }
}

/* Copies on their way hold pages, of the device and of host memory, which come back when they are done. */
static bool are_copies_out(const struct engine *engine) {
    struct kv_restores_stats restores = {0};
    struct kv_shelf_group_stats below = {0};

    if (engine->options.restores)
        kv_restores_stats(engine->options.restores, &restores);
    if (engine->options.shelf)
        kv_shelf_stats(engine->options.shelf, KV_TARGET_FULL, &below);
    return below.n_pinned > 0 || restores.n_now > 0 || is_spilling(engine);
}

/* Where the tokens came from that are not computed, and how many are that somebody had. */
static void count_cached(struct seq *seq, const struct kv_match *match) {
    struct seq_stats *stats = &seq->stats;
    int n_held = min_int(max_int((int)match->n_full_tokens, (int)seq->found.n_tokens), seq->n_prompt);

    stats->n_cached = seq->len;
    if (stats->restore_us != 0) {
        stats->n_restored = max_int(0, seq->len - (int)seq->found.n_device_tokens);
        stats->n_from_disk = min_int((int)seq->found.n_disk_tokens, stats->n_restored);
    }
    stats->n_recomputed = max_int(0, n_held - seq->len);
}

/* What is found a second time may be asked for a third time. */
void engine_keep_hit(struct engine *engine, const struct seq *seq, int n_tokens) {
    uint32_t n_pages = (uint32_t)n_tokens / PAGE_TOKENS;

    if (n_pages > 0 && engine->options.spill && seq->cache == SEQ_CACHE_USE)
        kv_spill_start(engine->options.spill, &engine->pages[seq->slot].lease, n_pages, seq->uid,
                       engine_depth(engine, n_pages, true));
}

enum placed { PLACED, PLACE_LATER, PLACE_FULL };

static enum placed place(struct engine *engine, struct plan *plan, struct seq *seq) {
    bool is_new = seq->n_tokens == seq->n_prompt, is_large = engine_is_large(engine, seq), is_first;
    int n_pages = seq->cache == SEQ_CACHE_BYPASS ? 0 : (is_new ? seq->n_prompt - 1 : seq->n_given) / PAGE_TOKENS;
    int slot = free_place(engine);
    struct kv_match match;
    enum below below;

    if (is_large)
        n_pages = min_int(n_pages, engine->residency.head);
    if (!engine_extend_keys(engine, seq, n_pages))
        n_pages = 0;
    below = restore_first(engine, plan, seq, slot, n_pages, &match);
    if (below == BELOW_LATER)
        return PLACE_LATER;
    while (below == BELOW_NOTHING &&
           pages_begin(&engine->pages[slot], &(struct seq_keys){seq->keys, seq->tokens, n_pages, seq->uid}, is_large,
                       &plan->work.before, &match) != 0)
        if (!let_go_of_restored(engine, seq))
            return PLACE_FULL;
    if (below == BELOW_NOTHING)
        engine_end_restore(seq); /* the seq's own lease holds it now */
    engine_place(engine, seq, slot);
    write_ctl(engine, plan, seq, &match);
    add_cut(seq, &match, (int)match.n_full_tokens); /* the next that shares these pages finds one there */
    if (is_large)                                   /* the last place from which its like can go on */
        add_cut(seq, &match, engine->residency.head * PAGE_TOKENS);
    seq->len = seq->n_fed = (int)match.n_tokens;
    seq->last_plan = plan->id;
    seq->state = seq->n_fed < seq->n_given ? SEQ_FEEDING : SEQ_DECODING;
    if (below == BELOW_NOTHING) {
        seq->restore_plan = plan->id;
        engine_keep_hit(engine, seq, seq->len);
    }
    is_first = seq->stats.admitted_us == 0;
    if (is_first || seq->has_lost_restore)
        count_cached(seq, &match);
    if (is_first) {
        seq->stats.admitted_us = engine->options.now_us();
        seq->calls->on_admitted(seq->user);
    }
    return PLACED;
}

/* Those that stand before the one admitted. */
static void count_passed_by(struct engine *engine, int first, int admitted) {
    for (int i = first; i < admitted; i++)
        engine->list_seqs[i]->n_passed_by += engine->list_seqs[i]->state == SEQ_WAITING;
}

/* Somebody leaves: pages and a place come with the end of plans that are out. */
static bool is_room_coming(const struct engine *engine) {
    for (const struct seq *seq = engine->placed; seq; seq = seq->next)
        if (!has_place(seq))
            return true;
    return false;
}

/* What a client that does not read holds is for those that go on. */
static void preempt_parked(struct engine *engine) {
    for (struct seq *seq = engine->placed, *next; seq && !is_room_coming(engine); seq = next) {
        next = seq->next;
        if (seq->is_parked)
            engine_preempt(engine, seq);
    }
}

static void admit(struct engine *engine, struct plan *plan) {
    uint32_t n_pages = kv_store_n_available(engine->options.store, KV_TARGET_FULL), n_slack;
    bool is_empty = engine->n_free_places == engine->options.n_places;
    int first, n, n_admit;

    if (engine->waiting.n == 0)
        return;
    first = list_placed(engine);
    n = list_waiting(engine, first);
    if (n == first)
        return;
    /* Those that decode grow too: without this, who was preempted would take back what it had just given. */
    n_slack = 2 * (uint32_t)(engine->options.n_places - engine->n_free_places);
    n_pages = n_pages > n_slack ? n_pages - n_slack : 0;
    n_admit = schedule_admit(engine->list, n, engine->n_free_places, n_pages, engine->admitted);
    if (n_admit < n - first)
        preempt_parked(engine);
    if (n_admit == 0 &&
        is_empty) /* nobody will give anything back: it gets what there is, and ends if that is too little */
        engine->admitted[n_admit++] = first;
    for (int i = 0; i < n_admit; i++) {
        struct seq *seq = engine->list_seqs[engine->admitted[i]];

        if (seq->state != SEQ_WAITING) /* ended by a call */
            continue;
        switch (place(engine, plan, seq)) {
        case PLACE_FULL:
            if (is_empty && i == 0 && !are_copies_out(engine))
                engine_finish(engine, seq, SEQ_END_NO_SPACE);
            return;
        case PLACE_LATER:
            continue;
        case PLACED:
            break;
        }
        count_passed_by(engine, first, engine->admitted[i]);
    }
}

/* ---- pages ---------------------------------------------------------------------------------------------------------- */

/* The pool is empty: somebody leaves, unless somebody is leaving already. True if pages are free now; else they come with
 * the end of plans that are out, and the plan at hand goes on without the seq. */
static bool make_room(struct engine *engine, struct seq *seq) {
    struct seq *victim;
    int n;

    if (is_room_coming(engine))
        return false;
    if (let_go_of_restored(engine, seq))
        return true;
    n = list_placed(engine);
    n = schedule_victim(engine->list, n);
    assert(n >= 0); /* the seq itself has a place */
    victim = engine->list_seqs[n];
    if (victim != seq || engine->n_free_places < engine->options.n_places - 1) {
        engine_preempt(engine, victim);
    } else if (pages_n_doubles(&engine->pages[seq->slot]) > 0) { /* it fits, but not twice */
        seq->publishes_late = true;
        engine_preempt(engine, seq);
    } else if (!are_copies_out(engine)) {
        engine_finish(engine, seq, SEQ_END_NO_SPACE);
    }
    return victim != seq && victim->state == SEQ_WAITING;
}

/* The ring serves one seq at a time. */
static bool begin_streaming(struct engine *engine, struct seq *seq, int n_pages) {
    if (engine->streaming || !engine_is_large(engine, seq))
        return false;
    engine->streaming = seq;
    pages_begin_streaming(&engine->pages[seq->slot], n_pages);
    return true;
}

static bool is_alone(const struct engine *engine) {
    return engine->n_free_places == engine->options.n_places - 1;
}

/* A large seq streams as soon as it would take more than its share, or, if it is alone, more than there is. */
static bool grow(struct engine *engine, struct plan *plan, struct seq *seq, int n_tokens) {
    struct seq_pages *pages = &engine->pages[seq->slot];
    int n_streamed = pages_n_streamed(pages), n_pages = (int)div_ceil((uint64_t)n_tokens, PAGE_TOKENS);
    bool has_room = true;

    seq->last_plan = plan->id; /* whatever pages come, their copies are in this plan */
    if (n_pages > engine->residency.most)
        begin_streaming(engine, seq, n_pages);
    while (has_room && pages_grow(pages, seq->len, n_tokens, &plan->work.before) != 0)
        has_room = (is_alone(engine) && begin_streaming(engine, seq, n_pages)) || make_room(engine, seq);
    if (pages_n_streamed(pages) > n_streamed)
        plan->work.moves_pages_out = true;
    return has_room;
}

/* ---- feeding -------------------------------------------------------------------------------------------------------- */

static void feed_seq(struct engine *engine, struct plan *plan, struct seq *seq, int n_rows) {
    int pos = seq->n_fed, end = pos + n_rows;
    bool is_replay = pos >= seq->n_prompt, is_new = seq->n_given == seq->n_prompt && seq->n_tokens == seq->n_prompt;
    uint32_t state_slot = KV_NO_SLOT;

    if (!grow(engine, plan, seq, end))
        return;
    if (seq->restore) { /* what it begins with comes with this chunk */
        pages_add_restore(&engine->pages[seq->slot], seq->restore, &plan->work.restore);
        seq->restore_plan = plan->id;
    }
    if (is_replay)
        plan_add_replay(plan, seq, pos, n_rows);
    else
        plan_add_prefill(plan, seq, pos, n_rows, is_new && end == seq->n_prompt);
    for (int i = 0; i < seq->n_cuts && seq->cache == SEQ_CACHE_USE; i++)
        if (seq->cuts[i] == end)
            state_slot = pages_take_state(&engine->pages[seq->slot]);
    if (state_slot != KV_NO_SLOT) {
        struct plan_part *part = is_replay ? &plan->replay[plan->n_replay - 1] : &plan->prefill[plan->n_prefill - 1];

        part->state_slot = state_slot;
        device_copies_add(&plan->work.between, tables_state(&engine->tables, state_slot),
                          tables_state(&engine->tables, engine->pages[seq->slot].live),
                          engine->tables.view.target_state.slot_bytes);
    }
    seq->n_fed = end;
    if (seq->n_fed == seq->n_given)
        seq->state = SEQ_DECODING;
}

/* Nothing follows before it is known that what the seq begins with has arrived. */
static bool is_under_way(const struct seq *seq) {
    return seq->restore && seq->restore_plan != 0;
}

/* A chunk that waits for copies is alone in its plan. */
static void feed(struct engine *engine, struct plan *plan) {
    struct schedule_rows rows = {engine->options.chunk_rows, engine->options.batch_rows, 0};
    struct seq *alone = NULL;
    int n = list_placed(engine), n_feed;

    for (int i = 0; i < n; i++)
        if (engine->list[i].is_fed)
            rows.decode += engine->list_seqs[i]->draws_drafts ? engine->info->block_size : 1;
    n_feed = schedule_feed(engine->list, n, &rows, engine->feed);
    for (int i = 0; i < n_feed; i++) /* make_room() lists the seqs anew: who is fed must be known by then */
        engine->feed_seqs[i] = engine->list_seqs[engine->feed[i].seq];
    for (int i = 0; i < n_feed; i++)
        if (engine->feed_seqs[i]->restore && !is_under_way(engine->feed_seqs[i]))
            alone = engine->feed_seqs[i];
    for (int i = 0; i < n_feed; i++) {
        struct seq *seq = engine->feed_seqs[i];

        if (seq->state == SEQ_FEEDING && !is_under_way(seq) && (!alone || seq == alone))
            feed_seq(engine, plan, seq, engine->feed[i].n_rows);
    }
}

/* ---- cycles --------------------------------------------------------------------------------------------------------- */

/* Drafting pays while a pass yields more tokens than it costs plain passes. */
static bool wants_drafts(const struct engine *engine, struct seq *seq) {
    if (!seq->speculate || !engine->pages[seq->slot].has_draft)
        return false;
    if (seq->draws_drafts)
        return seq->stats.n_steps < DRAFT_PASSES_MIN || seq->drafted_tokens >= engine->view.draft_min_accept;
    if (seq->n_plain < PLAIN_PASSES)
        return false;
    seq->n_plain = 0;
    seq->drafted_tokens = (float)engine->view.draft_min_accept * 1.25f; /* the benefit of a few passes */
    return true;
}

static void set_fields(struct engine *engine, struct plan *plan, struct seq *seq) {
    struct seq_ctl *ctl = &engine->tables.view.ctl[seq->slot];
    bool draws = wants_drafts(engine, seq);

    if (seq->rolled > 0) {
        pages_hold_rolling(&engine->pages[seq->slot], seq->rolled, &plan->work.before);
        seq->rolled = 0;
    }
    if (!seq->is_granted && seq->cache == SEQ_CACHE_USE) {
        plan_set(plan, &ctl->may_snapshot, 1);
        seq->is_granted = true;
    }
    if (draws != seq->draws_drafts) {
        plan_set(plan, &ctl->speculate, draws);
        seq->draws_drafts = draws;
    }
}

static void add_cycle(struct engine *engine, struct plan *plan) {
    int block = engine->info->block_size;

    for (struct seq *seq = plan_has_restore(plan) ? NULL : engine->placed, *next; seq; seq = next) {
        int n_tokens;

        next = seq->next;
        if (seq->state != SEQ_DECODING || seq->is_parked || is_under_way(seq))
            continue;
        n_tokens = max_int(seq->len, seq->n_fed) + block * (seq->n_cycles + 1);
        n_tokens = min_int(n_tokens, engine_positions_max(engine, seq));
        if (!grow(engine, plan, seq, max_int(n_tokens, seq->n_fed)))
            continue;
        set_fields(engine, plan, seq);
        plan_add_cycle(plan, seq);
        seq->n_cycles++;
    }
}

/* ---- streaming ------------------------------------------------------------------------------------------------------ */

static bool is_in_parts(const struct seq *seq, const struct plan_part *parts, int n) {
    for (int i = 0; i < n; i++)
        if (parts[i].seq == seq)
            return true;
    return false;
}

static bool is_in_cycle(const struct seq *seq, const struct plan *plan) {
    for (int i = 0; i < plan->n_cycle; i++)
        if (plan->cycle[i] == seq)
            return true;
    return false;
}

/* Of pages that stay beside its share on the device, one at a time comes or goes; while others run, or want to, none stays. */
static void steer(struct engine *engine, struct plan *plan, struct seq *seq) {
    struct seq_pages *pages = &engine->pages[seq->slot];
    bool has_all = is_alone(engine) && engine->waiting.n == 0;
    struct streamer_stats stats;

    streamer_stats(engine->streamer, &stats);
    residency_steer(&engine->steering, &engine->residency, stats.n_passes, stats.n_fences, stats.n_late);
    if (!pages_steer(pages, has_all ? engine->steering.n_more : 0, &plan->work.before))
        return;
    seq->last_plan = engine->steered_plan = plan->id;
    plan->work.moves_pages_out |= pages->move == PAGES_MOVE_OUT;
}

/* Which pages the passes find in host memory. */
static void add_streamed(struct engine *engine, struct plan *plan) {
    struct seq *seq = engine->streaming;
    struct device_work *work = &plan->work;

    if (!seq || pages_n_streamed(&engine->pages[seq->slot]) == 0)
        return;
    if (has_place(seq) && !plan_is_empty(plan))
        steer(engine, plan, seq);
    plan_set_streamed(plan, &engine->pages[seq->slot]);
    work->prefill_streamed.n_seqs = is_in_parts(seq, plan->prefill, plan->n_prefill);
    work->rerun_streamed.n_seqs = is_in_parts(seq, plan->replay, plan->n_replay);
    work->cycle_streamed.n_seqs = is_in_cycle(seq, plan);
}

bool engine_fill(struct engine *engine, struct plan *plan) {
    admit(engine, plan);
    feed(engine, plan);
    add_cycle(engine, plan);
    add_streamed(engine, plan);
    if (plan->n_prefill > 0) {
        plan->work.prefill = engine->prefill;
        plan->work.prefill_input = &plan->prefill_input;
    }
    if (plan->n_replay > 0) {
        plan->work.rerun = engine->replay;
        plan->work.rerun_input = &plan->replay_input;
    }
    if (plan->n_cycle > 0) {
        plan->work.cycle = engine_cycle_of(engine, plan->n_cycle);
        plan->work.cycle_list = plan->cycle_list;
    }
    return !plan_is_empty(plan);
}
