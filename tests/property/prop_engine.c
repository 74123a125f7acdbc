/* Whatever happens around it, a seq gets the tokens it gets alone: random requests on an engine with pools that are too
 * small, shared prefixes, continued answers, priorities, parking, ends by the caller at any moment, streams that delay
 * every item at random, chains that go down to a host tier and to a disk that makes trouble, and come back, also after a
 * restart. After each turn the store is whole; at the end everything is back. */
#include "fake/engine_rig.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cuts.h"
#include "store.h"

#define CHECK ENGINE_RIG_CHECK

enum { CONTEXT = 512, PROMPT_MAX = 300, ANSWER_MAX = 280, N_BASES = 2, N_SIMS = 12, ROWS_MAX = 256 };

/* A request, and what became of it. */
struct sim {
    struct world *world;
    struct seq *seq; /* NULL once it ended */
    bool is_used;
    int32_t tokens[CONTEXT + BLOCK_ROWS_MAX]; /* the prompt, then what it was told */
    int n_prompt, n_tokens, max_tokens;
    struct sample_params sample;
    int32_t stop_ids[2], bias_id[2];
    float bias[2];
    int n_stop_ids, n_bias, priority;
    bool speculate;
    enum seq_cache cache;
    int ends_at; /* tokens after which the caller ends it inside the call; -1: never */
    int n_ends, n_admitted;
    bool is_over;
    enum seq_end why;
};

struct world {
    uint64_t random;
    struct engine_rig rig;
    struct engine_rig *alone;
    struct kv_key root;
    int32_t bases[N_BASES][CONTEXT];
    struct sim sims[N_SIMS];
    int32_t last[CONTEXT]; /* an answer that came whole, with its prompt */
    int n_last;
    uint32_t n_faults; /* of the disk */
    int n_finished, n_ended, n_tokens, n_cached, n_no_space, n_accepted;
};

static uint32_t below(struct world *w, uint32_t n) {
    w->random = w->random * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((w->random >> 33) % n);
}

/* ---- calls ---- */

static void on_admitted(void *user) {
    struct sim *sim = user;

    CHECK(!sim->is_over && sim->n_admitted++ == 0);
}

static void on_progress(void *user, int n_done, int n_total) {
    struct sim *sim = user;

    CHECK(!sim->is_over && n_done > 0 && n_done <= n_total && n_total == sim->n_prompt);
}

static void on_tokens(void *user, const int32_t *tokens, int n, const struct logprob_row *logprobs) {
    struct sim *sim = user;

    CHECK(!sim->is_over && n > 0 && (logprobs != NULL) == (sim->sample.n_logprobs >= 0));
    memcpy(sim->tokens + sim->n_tokens, tokens, (size_t)n * sizeof *tokens);
    sim->n_tokens += n;
    CHECK(sim->n_tokens == sim->seq->n_tokens);
    CHECK(memcmp(sim->tokens, sim->seq->tokens, (size_t)sim->n_tokens * sizeof *tokens) == 0);
    if (sim->ends_at >= 0 && sim->n_tokens - sim->n_prompt >= sim->ends_at) {
        sim->is_over = true;
        engine_end(sim->world->rig.engine, sim->seq);
        sim->seq = NULL;
    }
}

static void on_end(void *user, enum seq_end why) {
    struct sim *sim = user;

    CHECK(!sim->is_over && ++sim->n_ends == 1);
    sim->is_over = true;
    sim->why = why;
    if (sim->world) {
        sim->world->n_cached += sim->seq->stats.n_cached;
        sim->world->n_accepted += sim->seq->stats.n_accepted;
    }
    sim->seq = NULL;
}

static const struct seq_calls CALLS = {on_admitted, on_progress, on_tokens, on_end};

/* ---- requests ---- */

static struct seq *seq_of(struct sim *sim, const struct kv_key *root, enum seq_cache cache) {
    struct cuts_prompt cuts = {.n = sim->n_prompt, .n_system = sim->n_prompt / 3, .n_max = 8};
    struct seq *seq = seq_new(CONTEXT + BLOCK_ROWS_MAX, sim->n_bias);

    CHECK(seq != NULL);
    memcpy(seq->tokens, sim->tokens, (size_t)sim->n_prompt * sizeof *seq->tokens);
    seq->n_prompt = seq->n_tokens = sim->n_prompt;
    seq->max_tokens = sim->max_tokens;
    seq->sample = sim->sample;
    seq->n_stop_ids = sim->n_stop_ids;
    memcpy(seq->stop_ids, sim->stop_ids, sizeof sim->stop_ids);
    memcpy(seq->bias_id, sim->bias_id, (size_t)sim->n_bias * sizeof *seq->bias_id);
    memcpy(seq->bias, sim->bias, (size_t)sim->n_bias * sizeof *seq->bias);
    seq->speculate = sim->speculate;
    seq->priority = sim->priority;
    seq->cache = cache;
    seq->root = *root;
    seq->is_kept = sim->n_prompt % 2 == 0; /* goes on to the disk, if there is one */
    seq->n_cuts = cuts_find(&cuts, seq->cuts);
    seq->calls = &CALLS;
    seq->user = sim;
    return seq;
}

static void draw_prompt(struct world *w, struct sim *sim) {
    int n_shared;

    sim->n_prompt = 1 + (int)below(w, below(w, 3) == 0 ? 60 : PROMPT_MAX);
    if (below(w, 3) == 0)
        sim->n_prompt = 64 * (1 + (int)below(w, 4)) + (int)below(w, 3) - 1;
    if (w->n_last > 0 && below(w, 3) == 0) { /* the conversation goes on */
        n_shared = w->n_last;
        memcpy(sim->tokens, w->last, (size_t)n_shared * sizeof *w->last);
        sim->n_prompt = n_shared + 1 + (int)below(w, 40);
    } else {
        n_shared = below(w, 4) ? max_int(0, sim->n_prompt - (int)below(w, 40)) : (int)below(w, (uint32_t)sim->n_prompt);
        memcpy(sim->tokens, w->bases[below(w, N_BASES)], (size_t)n_shared * sizeof *w->last);
    }
    for (int i = n_shared; i < sim->n_prompt; i++)
        sim->tokens[i] = (int32_t)below(w, ENGINE_RIG_VOCAB - 1);
}

static void draw(struct world *w, struct sim *sim) {
    static const int longest[] = {0, 1, 2, 17, ANSWER_MAX};

    *sim = (struct sim){.world = w, .is_used = true, .ends_at = -1};
    draw_prompt(w, sim);
    sim->n_tokens = sim->n_prompt;
    sim->max_tokens = below(w, 4) ? ANSWER_MAX - (int)below(w, 150) : longest[below(w, ARRAY_LEN(longest))];
    sim->sample = (struct sample_params){.temperature = below(w, 2) ? 0 : 0.8f,
                                         .top_p = below(w, 2) ? 1 : 0.9f,
                                         .repetition = below(w, 4) ? 1 : 1.2f,
                                         .frequency = below(w, 4) ? 0 : 0.4f,
                                         .n_logprobs = (int)below(w, 4) - 1,
                                         .seed = below(w, 1000)};
    if (below(w, 12) == 0) { /* seldom met, so that answers are long */
        sim->n_stop_ids = 1;
        sim->stop_ids[0] = (int32_t)below(w, ENGINE_RIG_IDS);
    }
    if (below(w, 4) == 0) {
        sim->n_bias = 1;
        sim->bias_id[0] = (int32_t)below(w, ENGINE_RIG_IDS);
        sim->bias[0] = 0.5f;
    }
    sim->speculate = below(w, 4) > 0;
    sim->priority = below(w, 3) ? 0 : (int)below(w, 3) - 1;
    sim->cache = below(w, 5) ? SEQ_CACHE_USE : below(w, 2) ? SEQ_CACHE_NO_STORE : SEQ_CACHE_BYPASS;
    if (below(w, 8) == 0)
        sim->ends_at = (int)below(w, 100);
}

/* What the request gets alone, cold and without a drafter. */
static void check_against_alone(struct world *w, const struct sim *sim) {
    struct sim alone = *sim;
    int n = sim->n_tokens - sim->n_prompt;

    alone.world = NULL;
    alone.is_over = false;
    alone.n_ends = alone.n_admitted = 0;
    alone.n_tokens = alone.n_prompt;
    alone.ends_at = -1;
    alone.speculate = false;
    alone.seq = seq_of(&alone, &w->root, SEQ_CACHE_BYPASS);
    CHECK(engine_submit(w->alone->engine, alone.seq) == 0);
    while (!alone.is_over)
        CHECK(engine_rig_turn(w->alone));
    while (engine_rig_turn(w->alone))
        continue;
    if (sim->n_ends == 1 && sim->why != SEQ_END_NO_SPACE)
        CHECK(alone.n_tokens == sim->n_tokens && alone.why == sim->why);
    CHECK(alone.n_tokens >= sim->n_tokens);
    CHECK(memcmp(alone.tokens, sim->tokens, (size_t)sim->n_tokens * sizeof *sim->tokens) == 0);
    w->n_tokens += n;
}

static void finish(struct world *w, struct sim *sim) {
    check_against_alone(w, sim);
    w->n_finished += sim->n_ends;
    w->n_ended += sim->n_ends == 0;
    w->n_no_space += sim->n_ends == 1 && sim->why == SEQ_END_NO_SPACE;
    if (sim->n_ends == 1 && sim->n_tokens < PROMPT_MAX) {
        w->n_last = sim->n_tokens;
        memcpy(w->last, sim->tokens, (size_t)sim->n_tokens * sizeof *sim->tokens);
    }
    sim->is_used = false;
}

/* ---- the run ---- */

static void act(struct world *w) {
    struct sim *sim = &w->sims[below(w, N_SIMS)];

    if (!sim->is_used) {
        draw(w, sim);
        sim->seq = seq_of(sim, &w->root, sim->cache);
        CHECK(engine_submit(w->rig.engine, sim->seq) == 0);
    } else if (sim->is_over) {
        finish(w, sim);
    } else if (below(w, 100) == 0) {
        sim->is_over = true;
        engine_end(w->rig.engine, sim->seq);
        sim->seq = NULL;
    } else {
        sim->seq->is_parked = below(w, 8) == 0;
    }
}

/* What a disk may do to those who use it. */
static void trouble_disk(struct world *w) {
    static const int errors[] = {-EIO, -EINTR, -EAGAIN, -ENOMEM};
    struct disk_faults *faults = w->rig.disk.faults;
    struct disk_fault fault = {0};

    if (below(w, 20) == 0)
        kv_vault_save_all(w->rig.disk.vault);
    if (below(w, 200) == 0)
        kv_vault_evict_bytes(w->rig.disk.vault, below(w, 1 << 20));
    if (below(w, 8) == 0 && w->n_faults <= disk_faults_n_calls(faults, DISK_CALL_READ)) { /* not without end */
        switch (below(w, 4)) {
        case 0:
            fault.result = errors[below(w, ARRAY_LEN(errors))];
            break;
        case 1:
            fault.short_by = 1 + below(w, 8192);
            break;
        case 2:
            fault.is_held = true;
            break;
        default:
            fault.n_copies = 1;
        }
        w->n_faults++;
        disk_faults_add(faults, below(w, 2) ? DISK_CALL_READ : DISK_CALL_WRITE, fault);
    }
    if (below(w, 10) == 0)
        disk_faults_release(faults);
}

/* Chains leave the device, so that they come back; and the host tier, sometimes, so that they do not. */
static void evict(struct world *w) {
    if (!w->rig.shelf)
        return;
    if (below(w, 12) == 0)
        kv_store_evict_all(w->rig.store);
    if (below(w, 60) == 0)
        kv_shelf_evict_bytes(w->rig.shelf, below(w, 2) ? UINT64_MAX : below(w, 1 << 20));
    if (w->rig.disk.vault)
        trouble_disk(w);
    engine_rig_check(&w->rig);
}

static void run(struct world *w, int n_turns) {
    for (int turn = 0; turn < n_turns; turn++) {
        struct pollfd pollfd = {.fd = engine_fd(w->rig.engine), .events = POLLIN};

        for (uint32_t n = below(w, 3); n > 0; n--)
            act(w);
        evict(w);
        engine_turn(w->rig.engine);
        engine_rig_check(&w->rig);
        w->rig.fails_copies = below(w, 8) == 0;
        if (below(w, 3) == 0)
            engine_rig_dispatch_copies(&w->rig, below(w, 4) == 0);
        if (below(w, 4) > 0)
            poll(&pollfd, 1, (int)below(w, 6)); /* sometimes both plans come home at once, sometimes none has */
        engine_dispatch(w->rig.engine);
        engine_rig_check(&w->rig);
    }
    w->rig.fails_copies = false;
    for (int i = 0; i < N_SIMS; i++)
        if (w->sims[i].is_used && !w->sims[i].is_over)
            w->sims[i].seq->is_parked = false;
    do { /* faults that were added for calls to come still hold some */
        engine_rig_check(&w->rig);
        if (w->rig.disk.vault)
            disk_faults_release(w->rig.disk.faults);
    } while (engine_rig_turn(&w->rig));
    for (int i = 0; i < N_SIMS; i++)
        if (w->sims[i].is_used) {
            CHECK(w->sims[i].is_over); /* nobody is forgotten */
            finish(w, &w->sims[i]);
        }
    engine_rig_check_is_idle(&w->rig);
    CHECK(w->n_no_space == 0); /* each of them fits alone, and nobody but them holds anything for good */
}

#define DISK_BYTES (UINT64_C(64) << 20)

static const struct engine_rig_options CONFIGS[] = {
    /* pools that force preemption; one restore point beside the running states */
    {.n_places = 3,
     .n_context = CONTEXT,
     .chunk_rows = 64,
     .batch_rows = 96,
     .n_seqs_max = 2 * N_SIMS,
     .n_slots = {[KV_TARGET_FULL] = 10, [KV_TARGET_STATE] = 11, [KV_DRAFT_FULL] = 10, [KV_DRAFT_SLIDING] = 8}},
    /* many places, few pages, drafting is given up and taken up again */
    {.n_places = 6,
     .n_context = CONTEXT,
     .chunk_rows = 128,
     .batch_rows = 128,
     .n_seqs_max = 2 * N_SIMS,
     .n_slots = {[KV_TARGET_FULL] = 14, [KV_TARGET_STATE] = 16, [KV_DRAFT_FULL] = 20, [KV_DRAFT_SLIDING] = 30},
     .draft_min_accept = 1.3},
    /* room for all */
    {.n_places = 4,
     .n_context = CONTEXT,
     .chunk_rows = 128,
     .batch_rows = ROWS_MAX,
     .n_seqs_max = 2 * N_SIMS,
     .n_slots = {[KV_TARGET_FULL] = 200, [KV_TARGET_STATE] = 60, [KV_DRAFT_FULL] = 200, [KV_DRAFT_SLIDING] = 100}},
    /* states are what is short */
    {.n_places = 2,
     .n_context = CONTEXT,
     .chunk_rows = 64,
     .batch_rows = 64,
     .n_seqs_max = 2 * N_SIMS,
     .n_slots = {[KV_TARGET_FULL] = 30, [KV_TARGET_STATE] = 4, [KV_DRAFT_FULL] = 30, [KV_DRAFT_SLIDING] = 20}},
    /* a host tier that holds it all, below pools that force preemption */
    {.n_places = 3,
     .n_context = CONTEXT,
     .chunk_rows = 64,
     .batch_rows = 96,
     .n_seqs_max = 2 * N_SIMS,
     .n_slots = {[KV_TARGET_FULL] = 10, [KV_TARGET_STATE] = 11, [KV_DRAFT_FULL] = 10, [KV_DRAFT_SLIDING] = 8},
     .n_below = {[KV_TARGET_FULL] = 200, [KV_TARGET_STATE] = 60, [KV_DRAFT_FULL] = 200, [KV_DRAFT_SLIDING] = 100}},
    /* a host tier that is small itself, below scarce states */
    {.n_places = 4,
     .n_context = CONTEXT,
     .chunk_rows = 64,
     .batch_rows = 128,
     .n_seqs_max = 2 * N_SIMS,
     .n_slots = {[KV_TARGET_FULL] = 40, [KV_TARGET_STATE] = 9, [KV_DRAFT_FULL] = 20, [KV_DRAFT_SLIDING] = 10},
     .n_below = {[KV_TARGET_FULL] = 16, [KV_TARGET_STATE] = 3, [KV_DRAFT_FULL] = 6, [KV_DRAFT_SLIDING] = 4}},
    /* a disk below a small host tier, below pools that force preemption */
    {.n_places = 3,
     .n_context = CONTEXT,
     .chunk_rows = 64,
     .batch_rows = 96,
     .n_seqs_max = 2 * N_SIMS,
     .n_slots = {[KV_TARGET_FULL] = 10, [KV_TARGET_STATE] = 11, [KV_DRAFT_FULL] = 10, [KV_DRAFT_SLIDING] = 8},
     .n_below = {[KV_TARGET_FULL] = 16, [KV_TARGET_STATE] = 4, [KV_DRAFT_FULL] = 12, [KV_DRAFT_SLIDING] = 8},
     .disk_bytes = DISK_BYTES},
    /* a disk below a host tier that only just passes it on, below room for all */
    {.n_places = 4,
     .n_context = CONTEXT,
     .chunk_rows = 128,
     .batch_rows = ROWS_MAX,
     .n_seqs_max = 2 * N_SIMS,
     .n_slots = {[KV_TARGET_FULL] = 60, [KV_TARGET_STATE] = 20, [KV_DRAFT_FULL] = 60, [KV_DRAFT_SLIDING] = 40},
     .n_below = {[KV_TARGET_FULL] = 9, [KV_TARGET_STATE] = 2, [KV_DRAFT_FULL] = 5, [KV_DRAFT_SLIDING] = 3},
     .disk_bytes = DISK_BYTES},
    /* a device that the longer seqs do not fit: they stream */
    {.n_places = 3,
     .n_context = CONTEXT,
     .chunk_rows = 64,
     .batch_rows = 96,
     .n_seqs_max = 2 * N_SIMS,
     .n_slots = {[KV_TARGET_FULL] = 5, [KV_TARGET_STATE] = 11, [KV_DRAFT_FULL] = 30, [KV_DRAFT_SLIDING] = 8},
     .n_below = {[KV_TARGET_FULL] = 16, [KV_TARGET_STATE] = 3, [KV_DRAFT_FULL] = 6, [KV_DRAFT_SLIDING] = 4},
     .region_spans = 2},
    /* the same, with a first page that stays and is shared, in host memory that holds one such seq */
    {.n_places = 4,
     .n_context = CONTEXT,
     .chunk_rows = 64,
     .batch_rows = 128,
     .n_seqs_max = 2 * N_SIMS,
     .n_slots = {[KV_TARGET_FULL] = 7, [KV_TARGET_STATE] = 20, [KV_DRAFT_FULL] = 16, [KV_DRAFT_SLIDING] = 20},
     .n_below = {[KV_TARGET_FULL] = 4, [KV_TARGET_STATE] = 8, [KV_DRAFT_FULL] = 6, [KV_DRAFT_SLIDING] = 4},
     .region_spans = 4},
};

int main(int argc, char **argv) {
    uint64_t given = argc > 1 ? strtoull(argv[1], NULL, 0) : 0, seed = given != 0 ? given : (uint64_t)time(NULL);
    int n_turns = argc > 2 ? atoi(argv[2]) : 400;
    size_t first = argc > 3 ? strtoul(argv[3], NULL, 10) : 0; /* of CONFIGS */
    const struct backend *backend = backend_find("cpu");
    struct engine_rig_options alone_options = engine_rig_roomy(1, CONTEXT);
    struct engine_rig_pair alone_pair, pair;
    struct engine_rig alone;

    printf("seed %llu\n", (unsigned long long)seed);
    fflush(stdout);
    engine_rig_pair_open(&alone_pair, backend, &(struct backend_options){.n_threads = 1}, 1, ROWS_MAX);
    engine_rig_open(&alone, &alone_pair, &alone_options);
    engine_rig_pair_open(&pair, backend, &(struct backend_options){.n_threads = 2, .delay_seed = seed | 1}, 6,
                         ROWS_MAX);
    for (size_t i = first; i < ARRAY_LEN(CONFIGS); i++) {
        struct world *w = calloc(1, sizeof *w);
        struct kv_restores_stats restores = {0};
        struct engine_view view;

        CHECK(w != NULL);
        w->random = seed + i;
        w->alone = &alone;
        for (int base = 0; base < N_BASES; base++)
            for (int k = 0; k < CONTEXT; k++)
                w->bases[base][k] = (int32_t)below(w, ENGINE_RIG_VOCAB - 1);
        engine_rig_open(&w->rig, &pair, &CONFIGS[i]);
        CHECK(kv_store_root(w->rig.store, 1, &w->root) == 0);
        run(w, n_turns);
        if (w->rig.disk.vault) { /* and after a restart */
            kv_store_evict_all(w->rig.store);
            kv_shelf_evict_bytes(w->rig.shelf, UINT64_MAX);
            engine_rig_reopen_disk(&w->rig);
            w->n_faults = 0;
            run(w, n_turns / 4);
        }
        engine_look(w->rig.engine, &view);
        if (w->rig.restores)
            kv_restores_stats(w->rig.restores, &restores);
        printf("pools %zu: %d finished, %d ended by the caller, %d tokens, %d of prompts cached, %d drafts accepted, "
               "%llu preemptions, %llu replayed, %llu restores, %llu failed, %llu pages from disk, %llu KiB streamed, "
               "%d without space\n",
               i, w->n_finished, w->n_ended, w->n_tokens, w->n_cached, w->n_accepted,
               (unsigned long long)view.n_preemptions, (unsigned long long)view.n_replay_rows,
               (unsigned long long)restores.n_done, (unsigned long long)restores.n_failed,
               (unsigned long long)restores.n_disk_pages, (unsigned long long)(view.streamed_bytes >> 10),
               w->n_no_space);
        CHECK(view.streamed_bytes == 0 || CONFIGS[i].region_spans > 0);
        fflush(stdout);
        engine_rig_close(&w->rig);
        free(w);
    }
    engine_rig_close(&alone);
    engine_rig_pair_close(&alone_pair);
    engine_rig_pair_close(&pair);
    return 0;
}
