/* Seqs that the device does not hold: their pages go to host memory and are streamed, and they get the tokens they get where
 * there is room; also where every stream is delayed at random. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "fake/engine_rig.h"
#include "store.h"

enum { CONTEXT = 4032, N_PLACES = 3, CHUNK = 64, TAIL = 5 /* residency.h, of this chunk */ };

struct client {
    int32_t tokens[CONTEXT];
    int n_tokens, n_cached, n_ends;
    enum seq_end why;
    struct seq *seq;
};

static void on_admitted(void *user) {
    struct client *client = user;

    client->n_cached = client->seq->stats.n_cached;
}

static void on_progress(void *user, int n_done, int n_total) {
    (void)user, (void)n_done, (void)n_total;
}

static void on_tokens(void *user, const int32_t *tokens, int n, const struct logprob_row *logprobs) {
    struct client *client = user;

    (void)logprobs;
    memcpy(client->tokens + client->n_tokens, tokens, (size_t)n * sizeof *tokens);
    client->n_tokens += n;
}

static void on_end(void *user, enum seq_end why) {
    struct client *client = user;

    client->n_ends++;
    client->why = why;
}

static const struct seq_calls CALLS = {on_admitted, on_progress, on_tokens, on_end};

static struct engine_rig_pair pair_, delayed_;

static int open_pairs(void **state) {
    struct backend_options options = {.n_threads = 2};

    (void)state;
    engine_rig_pair_open(&pair_, backend_find("cpu"), &options, N_PLACES, 256);
    options.delay_seed = 5;
    engine_rig_pair_open(&delayed_, backend_find("cpu"), &options, N_PLACES, 256);
    return 0;
}

static int close_pairs(void **state) {
    (void)state;
    engine_rig_pair_close(&pair_);
    engine_rig_pair_close(&delayed_);
    return 0;
}

/* A device with so many pages, and host memory for the rest of one context. */
static void open_small(struct engine_rig *rig, struct engine_rig_pair *pair, int n_device_pages) {
    struct engine_rig_options options = engine_rig_roomy(N_PLACES, CONTEXT);

    memcpy(options.n_below, options.n_slots, sizeof options.n_below);
    options.n_below[KV_TARGET_FULL] = CONTEXT / PAGE_TOKENS;
    options.n_slots[KV_TARGET_FULL] = n_device_pages;
    options.chunk_rows = options.batch_rows = CHUNK;
    options.region_spans = 2;
    engine_rig_open(rig, pair, &options);
}

static struct seq *new_seq(const struct engine_rig *rig, struct client *client, int n_prompt, int max_tokens) {
    struct seq *seq = seq_new(CONTEXT + BLOCK_ROWS_MAX, 0);

    assert_non_null(seq);
    *client = (struct client){.seq = seq};
    for (int i = 0; i < n_prompt; i++)
        seq->tokens[i] = (i * i / 7 + i) % 61;
    seq->n_prompt = seq->n_tokens = n_prompt;
    seq->max_tokens = max_tokens;
    assert_int_equal(kv_store_root(rig->store, 1, &seq->root), 0);
    seq->calls = &CALLS;
    seq->user = client;
    return seq;
}

static struct seq *submit(struct engine_rig *rig, struct client *client, int n_prompt, int max_tokens, bool speculate) {
    struct seq *seq = new_seq(rig, client, n_prompt, max_tokens);

    seq->speculate = speculate;
    assert_int_equal(engine_submit(rig->engine, seq), 0);
    return seq;
}

static struct engine_view look(const struct engine_rig *rig) {
    struct engine_view view;

    engine_look(rig->engine, &view);
    return view;
}

static void turn_until_quiet(struct engine_rig *rig) {
    while (engine_rig_turn(rig))
        engine_rig_check(rig);
}

static void run_alone(struct engine_rig *rig, struct client *client, int n_prompt, int max_tokens, bool speculate) {
    submit(rig, client, n_prompt, max_tokens, speculate);
    turn_until_quiet(rig);
    assert_int_equal(client->n_ends, 1);
    assert_int_equal(client->why, SEQ_END_LENGTH);
    assert_int_equal(client->n_tokens, max_tokens);
    engine_rig_check_is_idle(rig);
}

/* Where there is room for all. */
static void run_roomy(struct client *client, int n_prompt, int max_tokens) {
    struct engine_rig_options options = engine_rig_roomy(1, CONTEXT);
    struct engine_rig rig;

    engine_rig_open(&rig, &pair_, &options);
    run_alone(&rig, client, n_prompt, max_tokens, false);
    assert_int_equal(look(&rig).streamed_bytes, 0);
    engine_rig_close(&rig);
}

/* ---- the same tokens ------------------------------------------------------------------------------------------------ */

static void any_share_on_the_device_gives_the_same_tokens(void **state) {
    enum { PROMPT = 1700, ANSWER = 40, PAGES = (PROMPT + ANSWER + 63) / 64 };
    static const struct {
        int percent;
        bool speculate, is_delayed;
    } cases[] = {{100, true, false}, {75, false, false}, {50, true, true}, {10, false, false}, {10, true, true}};
    struct client *roomy = malloc(sizeof *roomy), *client = malloc(sizeof *client);
    struct engine_rig rig;

    (void)state;
    run_roomy(roomy, PROMPT, ANSWER);
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        open_small(&rig, cases[i].is_delayed ? &delayed_ : &pair_, max_int(PAGES * cases[i].percent / 100, TAIL));
        run_alone(&rig, client, PROMPT, ANSWER, cases[i].speculate);
        assert_memory_equal(client->tokens, roomy->tokens, ANSWER * sizeof(int32_t));
        assert_int_equal(look(&rig).streamed_bytes > 0, cases[i].percent < 100);
        engine_rig_close(&rig);
    }
    free(roomy);
    free(client);
}

static void a_seq_crosses_over_while_it_decodes_and_goes_on_growing(void **state) {
    enum { PROMPT = 500, ANSWER = 700, DEVICE = 12 };
    struct client *roomy = malloc(sizeof *roomy), *client = malloc(sizeof *client);
    struct engine_rig rig;
    uint32_t n_streamed = 0;
    int n_crossed = 0;

    (void)state;
    run_roomy(roomy, PROMPT, ANSWER);
    open_small(&rig, &pair_, DEVICE);
    submit(&rig, client, PROMPT, ANSWER, true);
    while (engine_rig_turn(&rig)) {
        struct engine_view view = look(&rig);

        if (n_streamed == 0 && view.n_streamed > 0)
            n_crossed = client->n_tokens;
        assert_true(view.n_streamed >= n_streamed || client->n_ends > 0); /* what has gone stays */
        assert_true(view.n_stays <= DEVICE);
        n_streamed = view.n_streamed;
        engine_rig_check(&rig);
    }
    assert_in_range(n_crossed, DEVICE * 3 / 4 * 64 - PROMPT, DEVICE * 64 - PROMPT);
    assert_int_equal(client->n_tokens, ANSWER);
    assert_memory_equal(client->tokens, roomy->tokens, ANSWER * sizeof(int32_t));
    engine_rig_check_is_idle(&rig);
    engine_rig_close(&rig);
    free(roomy);
    free(client);
}

static void others_run_beside_who_streams(void **state) {
    enum { PROMPT = 1500, ANSWER = 200, DEVICE = 24 };
    struct client *roomy = malloc(2 * sizeof *roomy), *clients = malloc(2 * sizeof *clients);
    struct engine_rig rig;
    int n_beside = 0;

    (void)state;
    run_roomy(&roomy[0], PROMPT, ANSWER);
    run_roomy(&roomy[1], 20, 100);
    open_small(&rig, &pair_, DEVICE);
    submit(&rig, &clients[0], PROMPT, ANSWER, true);
    while (look(&rig).n_streamed == 0)
        engine_rig_turn(&rig);
    submit(&rig, &clients[1], 20, 100, true);
    while (engine_rig_turn(&rig)) {
        n_beside += look(&rig).n_running == 2 && look(&rig).n_streamed > 0;
        engine_rig_check(&rig);
    }
    assert_true(n_beside > 0);
    assert_memory_equal(clients[0].tokens, roomy[0].tokens, ANSWER * sizeof(int32_t));
    assert_memory_equal(clients[1].tokens, roomy[1].tokens, 100 * sizeof(int32_t));
    assert_int_equal(look(&rig).n_preemptions, 0);
    engine_rig_close(&rig);
    free(roomy);
    free(clients);
}

/* Of two that do not fit, one streams and the other waits. */
static void two_that_are_too_large_take_turns(void **state) {
    enum { PROMPT = 900, ANSWER = 150, DEVICE = 12 };
    struct client *roomy = malloc(sizeof *roomy), *clients = malloc(2 * sizeof *clients);
    struct engine_rig rig;

    (void)state;
    run_roomy(roomy, PROMPT, ANSWER);
    open_small(&rig, &pair_, DEVICE);
    for (int i = 0; i < 2; i++)
        submit(&rig, &clients[i], PROMPT, ANSWER, i == 0)->cache = i == 0 ? SEQ_CACHE_USE : SEQ_CACHE_BYPASS;
    turn_until_quiet(&rig);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(clients[i].why, SEQ_END_LENGTH);
        assert_memory_equal(clients[i].tokens, roomy->tokens, ANSWER * sizeof(int32_t));
    }
    engine_rig_check_is_idle(&rig);
    engine_rig_close(&rig);
    free(roomy);
    free(clients);
}

/* ---- steering ------------------------------------------------------------------------------------------------------- */

static bool all_are_late; /* what the backend says of fences */

static int wait_and_say(struct stream *stream, struct event *event, uint64_t *n_late) {
    __atomic_fetch_add(n_late, __atomic_load_n(&all_are_late, __ATOMIC_RELAXED), __ATOMIC_RELAXED);
    return backend_find("cpu")->event_wait(stream, event);
}

/* While compute waits for pages, more of them stay; when it does not, they go again. Nobody sees it in the tokens. */
static void fences_that_are_late_move_pages_to_the_device_and_back(void **state) {
    enum { PROMPT = 3600, ANSWER = 350, DEVICE = 48, MOST = DEVICE - DEVICE / 8, MORE = DEVICE / 8 - 2 };
    struct client *roomy = malloc(sizeof *roomy), *client = malloc(sizeof *client);
    struct backend backend = *backend_find("cpu");
    struct backend_options options = {.n_threads = 2, .delay_seed = 3};
    struct engine_rig_pair pair;
    struct engine_rig rig;
    uint32_t n_most = 0;

    (void)state;
    run_roomy(roomy, PROMPT, ANSWER);
    backend.event_wait_counted = wait_and_say;
    engine_rig_pair_open(&pair, &backend, &options, N_PLACES, 256);
    open_small(&rig, &pair, DEVICE);
    __atomic_store_n(&all_are_late, true, __ATOMIC_RELAXED);
    submit(&rig, client, PROMPT, ANSWER, false);
    while (engine_rig_turn(&rig)) {
        struct engine_view view = look(&rig);

        engine_rig_check(&rig);
        assert_true(view.n_stays <= MOST + MORE);
        if (view.n_stays > n_most)
            n_most = view.n_stays;
        if (view.n_stays == MOST + MORE)
            __atomic_store_n(&all_are_late, false, __ATOMIC_RELAXED);
        if (client->n_tokens == ANSWER - 10)
            assert_int_equal(view.n_stays, MOST);
    }
    assert_int_equal(n_most, MOST + MORE);
    assert_int_equal(client->n_tokens, ANSWER);
    assert_memory_equal(client->tokens, roomy->tokens, ANSWER * sizeof(int32_t));
    engine_rig_check_is_idle(&rig);
    engine_rig_close(&rig);
    engine_rig_pair_close(&pair);
    free(roomy);
    free(client);
}

/* ---- what is published ---------------------------------------------------------------------------------------------- */

static void the_head_is_found_by_the_next(void **state) {
    enum { PROMPT = 1500, ANSWER = 30, DEVICE = 16, HEAD = DEVICE - DEVICE / 8 - TAIL };
    struct client *first = malloc(sizeof *first), *second = malloc(sizeof *second);
    struct engine_rig rig;

    (void)state;
    open_small(&rig, &pair_, DEVICE);
    run_alone(&rig, first, PROMPT, ANSWER, true);
    assert_int_equal(first->n_cached, 0);
    run_alone(&rig, second, PROMPT, ANSWER, false);
    assert_int_equal(second->n_cached, HEAD * 64);
    assert_memory_equal(second->tokens, first->tokens, ANSWER * sizeof(int32_t));
    engine_rig_close(&rig);
    free(first);
    free(second);
}

/* ---- no room -------------------------------------------------------------------------------------------------------- */

static void what_neither_tier_holds_is_refused(void **state) {
    enum { DEVICE = 8 };
    struct engine_rig_options options = engine_rig_roomy(N_PLACES, CONTEXT);
    struct client client;
    struct engine_rig rig;
    struct seq *seq;

    (void)state;
    memcpy(options.n_below, options.n_slots, sizeof options.n_below);
    options.n_below[KV_TARGET_FULL] = 20;
    options.n_slots[KV_TARGET_FULL] = DEVICE;
    options.chunk_rows = options.batch_rows = CHUNK;
    options.region_spans = 2;
    engine_rig_open(&rig, &pair_, &options);
    assert_int_equal(look(&rig).n_device_pages, DEVICE);
    assert_int_equal(look(&rig).n_host_pages, 20);
    seq = new_seq(&rig, &client, 1000, 27 * 64 - 1000 + 1); /* a page is left to others */
    assert_int_equal(engine_submit(rig.engine, seq), ENGINE_E_TOO_LARGE);
    seq->max_tokens--;
    assert_int_equal(engine_submit(rig.engine, seq), 0);
    turn_until_quiet(&rig);
    assert_int_equal(client.why, SEQ_END_LENGTH);
    engine_rig_close(&rig);
}

/* Host memory that others hold: who streams ends, and the next one runs. */
static void without_host_memory_who_streams_ends(void **state) {
    struct client *clients = malloc(2 * sizeof *clients);
    uint32_t records[CONTEXT / PAGE_TOKENS];
    static const int32_t tokens[PAGE_TOKENS];
    struct engine_rig rig;
    void *payload;

    (void)state;
    open_small(&rig, &pair_, 12);
    for (int i = 0; i < CONTEXT / PAGE_TOKENS - 3; i++) {
        struct kv_page_name name = {.page_idx = (uint32_t)i, .tokens = tokens, .key.bytes = {1, 2, 3, 4, 5, 6, 7, 8}};

        assert_int_equal(kv_shelf_reserve(rig.shelf, &name, KV_TARGET_FULL, &records[i], &payload), 0);
    }
    submit(&rig, &clients[0], 1500, 20, true);
    turn_until_quiet(&rig);
    assert_int_equal(clients[0].n_ends, 1);
    assert_int_equal(clients[0].why, SEQ_END_NO_SPACE);
    submit(&rig, &clients[1], 100, 20, true);
    turn_until_quiet(&rig);
    assert_int_equal(clients[1].why, SEQ_END_LENGTH);
    for (int i = 0; i < CONTEXT / PAGE_TOKENS - 3; i++)
        kv_shelf_abandon(rig.shelf, records[i], KV_TARGET_FULL);
    engine_rig_check_is_idle(&rig);
    engine_rig_close(&rig);
    free(clients);
}

static void who_streams_may_be_ended_at_any_time(void **state) {
    struct client *client = malloc(sizeof *client);
    struct engine_rig rig;

    (void)state;
    open_small(&rig, &delayed_, 10);
    for (int n = 1; n < 22; n += 6) {
        struct seq *seq = submit(&rig, client, 1100, 20, true);

        while (look(&rig).n_streamed < (uint32_t)min_int(n, 8))
            engine_rig_turn(&rig);
        for (int i = 8; i < n; i++)
            engine_rig_turn(&rig);
        engine_turn(rig.engine); /* so that something is on its way */
        if (client->n_ends == 0)
            engine_end(rig.engine, seq);
        turn_until_quiet(&rig);
        engine_rig_check_is_idle(&rig);
        kv_store_evict_all(rig.store);
    }
    submit(&rig, client, 1100, 20, true);
    while (look(&rig).n_streamed < 4)
        engine_rig_turn(&rig);
    engine_turn(rig.engine);
    engine_rig_close(&rig); /* with what is on its way */
    free(client);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_share_on_the_device_gives_the_same_tokens),
        cmocka_unit_test(a_seq_crosses_over_while_it_decodes_and_goes_on_growing),
        cmocka_unit_test(others_run_beside_who_streams),
        cmocka_unit_test(two_that_are_too_large_take_turns),
        cmocka_unit_test(fences_that_are_late_move_pages_to_the_device_and_back),
        cmocka_unit_test(the_head_is_found_by_the_next),
        cmocka_unit_test(what_neither_tier_holds_is_refused),
        cmocka_unit_test(without_host_memory_who_streams_ends),
        cmocka_unit_test(who_streams_may_be_ended_at_any_time),
    };
    return cmocka_run_group_tests(tests, open_pairs, close_pairs);
}
