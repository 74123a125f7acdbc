/* engine_open: memory, passes and their warm-up; the way back. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "engine_internal.h"

static int open_lists(struct engine *engine) {
    size_t n_places = (size_t)engine->options.n_places, n = n_places + ENGINE_LOOK_AHEAD;

    engine->n_list_max = (int)n;
    engine->pages = calloc(n_places, sizeof *engine->pages);
    engine->at_slot = calloc(n_places, sizeof(struct seq *));
    engine->list = calloc(n, sizeof *engine->list);
    engine->list_seqs = calloc(n, sizeof(struct seq *));
    engine->feed_seqs = calloc(n, sizeof(struct seq *));
    engine->admitted = calloc(n, sizeof *engine->admitted);
    engine->feed = calloc(n, sizeof *engine->feed);
    return engine->pages && engine->at_slot && engine->list && engine->list_seqs && engine->feed_seqs &&
                   engine->admitted && engine->feed
               ? 0
               : -ENOMEM;
}

/* After the tables, before the passes are recorded. */
static int open_streaming(struct engine *engine, struct stream *load) {
    const struct engine_options *o = &engine->options;
    struct model_space *space = &engine->tables.view;
    struct streamer_options options = {.backend = o->backend,
                                       .device = o->device,
                                       .upload = load,
                                       .n_places = 1, /* one seq streams at a time */
                                       .n_pages_max = engine->tables.n_pages_max,
                                       .region_spans = o->region_spans,
                                       .layer_bytes = kv_layer_bytes(&space->target_full)};
    struct kv_shelf_group_stats stats;
    int r;

    if (!o->shelf)
        return 0;
    engine->residency = residency_of((int)engine->view.n_device_pages, o->chunk_rows);
    r = engine->residency.head >= 0 ? streamer_open(&options, &engine->streamer) : -EINVAL;
    if (r != 0)
        return r;
    space->streamer = engine->streamer;
    space->target_full.ring = streamer_ring(engine->streamer);
    kv_shelf_stats(o->shelf, KV_TARGET_FULL, &stats);
    engine->view.n_host_pages = stats.n_slots;
    for (int i = 0; r == 0 && i < o->n_places; i++)
        r = pages_open_streaming(&engine->pages[i], o->shelf, engine->residency);
    return r;
}

static int open_tables(struct engine *engine, struct stream *load) {
    const struct engine_options *o = &engine->options;
    int n_pages = (int)div_ceil((uint64_t)o->n_context, PAGE_TOKENS), r;
    void *arenas[KV_GROUP_N];

    for (int g = 0; g < KV_GROUP_N; g++)
        arenas[g] = kv_store_arena(o->store, (enum kv_group)g);
    r = tables_open(&engine->tables, o->backend, o->device, load, engine->info, arenas, o->n_places, n_pages);
    for (int i = 0; r == 0 && i < o->n_places; i++)
        r = pages_open(&engine->pages[i], o->store, &engine->tables, i, engine->info->groups[KV_DRAFT_SLIDING].window);
    return r;
}

/* Seqs of a block are 16 rows each: where products for few rows end, and beyond them. */
static int cycle_segs_max(const struct engine *engine, int i) {
    static const int n_segs[ENGINE_CYCLES - 1] = {1, 4, 16};

    return i < ENGINE_CYCLES - 1 ? min_int(n_segs[i], engine->options.n_places) : engine->options.n_places;
}

struct model_pass *engine_cycle_of(const struct engine *engine, int n_seqs) {
    int i = 0;

    while (cycle_segs_max(engine, i) < n_seqs)
        i++;
    return engine->cycles[i];
}

static int open_passes(struct engine *engine) {
    const struct engine_options *o = &engine->options;
    const struct model_space *space = &engine->tables.view;
    struct model_pass_options prefill = {.kind = PASS_PREFILL,
                                         .n_segs_max = o->n_places,
                                         .n_rows_max = engine->n_rows_max,
                                         .n_outs_max = o->n_places,
                                         .has_gate = o->restores};
    struct model_pass_options replay = {.kind = PASS_RERUN,
                                        .n_segs_max = o->n_places,
                                        .n_rows_max = o->n_places * BLOCK_ROWS_MAX,
                                        .n_outs_max = o->n_places};
    struct model_pass_options cycle = {.kind = PASS_CYCLE};
    int r;

    r = model_pass_new(o->model, space, &prefill, &engine->prefill);
    if (r == 0)
        r = model_pass_new(o->model, space, &replay, &engine->replay);
    for (int i = 0; r == 0 && i < ENGINE_CYCLES; i++) {
        cycle.n_segs_max = cycle_segs_max(engine, i);
        if (i == 0 || cycle.n_segs_max > cycle_segs_max(engine, i - 1))
            r = model_pass_new(o->model, space, &cycle, &engine->cycles[i]);
    }
    for (int i = 0; r == 0 && i < DEVICE_PLANS_MAX; i++)
        r = plan_open(&engine->plans[i], o->backend, o->device, o->model, o->n_places, engine->n_rows_max,
                      o->restores ? engine->tables.n_pages_max : 0);
    for (int i = 0; i < DEVICE_PLANS_MAX; i++)
        engine->plans[i].work.streamer = engine->streamer;
    return r;
}

/* ---- warm-up -------------------------------------------------------------------------------------------------------- */

/* One cycle of a made-up seq in place 0, whose tables name null pages only: it leaves no trace but its time. */
static int time_cycle(struct engine *engine, struct stream *stream, bool speculate, uint64_t *ret_us) {
    const struct engine_options *o = &engine->options;
    struct plan *plan = &engine->plans[0];
    struct seq_ctl *ctl = &engine->tables.ctl[0];
    uint64_t start;
    int r;

    *ctl = (struct seq_ctl){.anchor = 0,
                            .max_tokens = BLOCK_ROWS_MAX + 1,
                            .context_max = o->n_context,
                            .speculate = speculate,
                            .sample = {.top_p = 1, .repetition = 1, .n_logprobs = -1}};
    plan->cycle_list[0] = 1;
    plan->cycle_list[1] = 0;
    r = o->backend->copy(stream, engine->tables.view.ctl, ctl, sizeof *ctl);
    if (r == 0)
        r = backend_stream_wait(o->backend, stream);
    start = o->now_us();
    if (r == 0)
        r = model_pass_run_cycle(engine->cycles[0], stream, plan->cycle_list, NULL);
    if (r == 0)
        r = backend_stream_wait(o->backend, stream);
    *ret_us = o->now_us() - start;
    return r;
}

/* The floor under the steps of who streams: how fast its pages can come. */
static int time_link(struct engine *engine, struct stream *stream) {
    enum { N_RUNS = 3 };
    const struct engine_options *o = &engine->options;
    uint64_t best = UINT64_MAX;
    size_t bytes, ring_bytes;
    void *from;
    int r = 0;

    if (!engine->streamer)
        return 0;
    ring_bytes = streamer_ring_bytes(1, o->region_spans, kv_layer_bytes(&engine->tables.view.target_full));
    kv_shelf_memory(o->shelf, KV_TARGET_FULL, &from, &bytes);
    bytes = (size_t)min_u64(bytes, ring_bytes);
    for (int i = 0; r == 0 && i < N_RUNS; i++) {
        uint64_t start = o->now_us();

        r = o->backend->copy(stream, streamer_ring(engine->streamer), from, bytes);
        if (r == 0)
            r = backend_stream_wait(o->backend, stream);
        best = min_u64(best, o->now_us() - start);
    }
    engine->view.link_bytes_per_us = (double)bytes / (double)max_u64(best, 1);
    engine->view.n_ring_pages = (uint32_t)(o->region_spans * (SPAN_TOKENS / PAGE_TOKENS));
    return r;
}

static int warm_up(struct engine *engine, struct stream *stream) {
    enum { N_RUNS = 3 };
    uint64_t best[2] = {UINT64_MAX, UINT64_MAX}, us;
    int r = 0;

    for (int i = 0; r == 0 && i < 2 * N_RUNS; i++) {
        r = time_cycle(engine, stream, i % 2 == 1, &us);
        if (us < best[i % 2])
            best[i % 2] = us;
    }
    costs_init(&engine->costs, (double)best[1] / engine->info->block_size);
    engine->n_steps_seen = *model_ring(engine->options.model)->n_steps;
    engine->view.draft_min_accept = engine->options.draft_min_accept;
    if (engine->options.draft_min_accept < 0)
        engine->view.draft_min_accept = (double)best[1] / (double)(best[0] > 0 ? best[0] : 1);
    return r;
}

int engine_open(const struct engine_options *options, struct engine **ret_engine, struct report *report) {
    struct engine *engine = calloc(1, sizeof *engine);
    struct stream *stream = NULL;
    struct kv_store_stats stats;
    int r;

    if (!engine)
        return report_error(report, -ENOMEM, "engine: out of memory");
    engine->options = *options;
    engine->info = model_info(options->model);
    engine->n_rows_max = max_int(options->chunk_rows, options->batch_rows);
    engine->n_free_places = engine->view.n_places = options->n_places;
    kv_store_stats(options->store, &stats);
    engine->view.n_device_pages = stats.group[KV_TARGET_FULL].n_slots;
    r = open_lists(engine);
    if (r == 0)
        r = kv_hasher_new(&engine->hasher);
    if (r == 0)
        r = options->backend->stream_open(options->device, STREAM_COMPUTE, &stream);
    if (r == 0)
        r = open_tables(engine, stream);
    if (r == 0)
        r = open_streaming(engine, stream);
    if (r == 0)
        r = open_passes(engine);
    if (r == 0)
        r = warm_up(engine, stream);
    if (r == 0)
        r = time_link(engine, stream);
    if (stream)
        options->backend->stream_close(stream);
    if (r != 0) {
        engine_close(engine);
        return report_error(report, r, "engine: %d places of %d tokens, %d rows a plan: %s", options->n_places,
                            options->n_context, options->batch_rows, strerror(-r));
    }
    *ret_engine = engine;
    return 0;
}

void engine_close(struct engine *engine) {
    if (!engine)
        return;
    for (; engine->n_done < engine->n_sent; engine->n_done++)
        plan_give_states(&engine->plans[engine->n_done % DEVICE_PLANS_MAX], engine->options.store);
    for (struct seq *seq; (seq = engine->placed);) {
        engine->placed = seq->next;
        pages_end(&engine->pages[seq->slot]);
        engine_end_restore(seq);
        seq_free(seq);
    }
    for (struct seq *seq; (seq = engine->gone);) {
        engine->gone = seq->next;
        engine_end_restore(seq);
        seq_free(seq);
    }
    for (struct seq *seq; (seq = waiting_first(&engine->waiting));) {
        waiting_remove(&engine->waiting, seq);
        engine_end_restore(seq);
        seq_free(seq);
    }
    for (int i = 0; i < DEVICE_PLANS_MAX; i++)
        plan_close(&engine->plans[i], engine->options.model);
    model_pass_free(engine->prefill);
    model_pass_free(engine->replay);
    for (int i = 0; i < ENGINE_CYCLES; i++)
        model_pass_free(engine->cycles[i]);
    for (int i = 0; engine->pages && i < engine->options.n_places; i++)
        pages_close(&engine->pages[i]);
    streamer_close(engine->streamer);
    tables_close(&engine->tables);
    kv_hasher_free(engine->hasher);
    free(engine->pages);
    free(engine->at_slot);
    free(engine->list);
    free(engine->list_seqs);
    free(engine->feed_seqs);
    free(engine->admitted);
    free(engine->feed);
    free(engine);
}
