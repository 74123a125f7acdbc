#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "cuts.h"
#include "fake/engine_rig.h"
#include "store.h"

enum { CONTEXT = 512 };

struct client { /* of one seq */
    int n_tokens, n_ends;
    enum seq_end why;
    struct engine *engine; /* ends victim at on_admitted, if there is one */
    struct seq *victim;
};

static void on_admitted(void *user) {
    struct client *client = user;

    if (client->victim)
        engine_end(client->engine, client->victim);
}

static void on_progress(void *user, int n_done, int n_total) {
    (void)user, (void)n_done, (void)n_total;
}

static void on_tokens(void *user, const int32_t *tokens, int n, const struct logprob_row *logprobs) {
    struct client *client = user;

    (void)tokens, (void)logprobs;
    client->n_tokens += n;
}

static void on_end(void *user, enum seq_end why) {
    struct client *client = user;

    client->n_ends++;
    client->why = why;
}

static const struct seq_calls CALLS = {on_admitted, on_progress, on_tokens, on_end};

static struct engine_rig_pair pair_;

static int open_pair(void **state) {
    (void)state;
    engine_rig_pair_open(&pair_, backend_find("cpu"), &(struct backend_options){.n_threads = 1}, 4, 256);
    return 0;
}

static int close_pair(void **state) {
    (void)state;
    engine_rig_pair_close(&pair_);
    return 0;
}

static struct seq *new_seq(const struct engine_rig *rig, struct client *client, int n_prompt, int max_tokens) {
    struct seq *seq = seq_new(CONTEXT + BLOCK_ROWS_MAX, 0);

    assert_non_null(seq);
    for (int i = 0; i < n_prompt; i++)
        seq->tokens[i] = i * 7 % 61;
    seq->n_prompt = seq->n_tokens = n_prompt;
    seq->max_tokens = max_tokens;
    assert_int_equal(kv_store_root(rig->store, 1, &seq->root), 0);
    seq->calls = &CALLS;
    seq->user = client;
    return seq;
}

static struct seq *submit(struct engine_rig *rig, struct client *client, int n_prompt, int max_tokens) {
    struct seq *seq = new_seq(rig, client, n_prompt, max_tokens);

    assert_int_equal(engine_submit(rig->engine, seq), 0);
    return seq;
}

static void turn_until_quiet(struct engine_rig *rig) {
    while (engine_rig_turn(rig))
        engine_rig_check(rig);
}

/* Pages that nobody gives back, as those of pinned sessions. */
static void hold_pages(struct engine_rig *rig, enum kv_group group, int n, uint32_t *ret_slots) {
    for (int i = 0; i < n; i++)
        assert_int_equal(kv_store_take(rig->store, group, &ret_slots[i]), 0);
}

static void give_pages(struct engine_rig *rig, enum kv_group group, int n, const uint32_t *slots) {
    for (int i = 0; i < n; i++)
        kv_store_give(rig->store, group, slots[i]);
}

/* ---- pages run out -------------------------------------------------------------------------------------------------- */

static void what_a_parked_seq_holds_is_for_those_that_go_on(void **state) {
    struct engine_rig_options options = engine_rig_roomy(2, CONTEXT);
    struct client old = {0}, young = {0};
    struct engine_rig rig;
    struct seq *seq;

    (void)state;
    options.n_slots[KV_TARGET_FULL] = 8;
    engine_rig_open(&rig, &pair_, &options);
    seq = submit(&rig, &old, 150, 100);
    submit(&rig, &young, 20, 400);
    for (int i = 0; i < 20; i++)
        engine_rig_turn(&rig);
    seq->is_parked = true;
    turn_until_quiet(&rig); /* the young one needs more pages than are left beside the parked one's */
    assert_int_equal(young.n_ends, 1);
    assert_int_equal(young.why, SEQ_END_LENGTH);
    assert_int_equal(young.n_tokens, 400);
    assert_int_equal(old.n_ends, 0);
    seq->is_parked = false;
    turn_until_quiet(&rig);
    assert_int_equal(old.n_ends, 1);
    assert_int_equal(old.n_tokens, 100);
    engine_rig_check_is_idle(&rig);
    engine_rig_close(&rig);
}

static void alone_and_without_pages_a_seq_ends(void **state) {
    struct engine_rig_options options = engine_rig_roomy(2, CONTEXT);
    struct client outgrows = {0}, never_fits = {0}, next = {0};
    struct engine_rig rig;
    uint32_t slots[16];

    (void)state;
    options.n_slots[KV_TARGET_FULL] = 8;
    engine_rig_open(&rig, &pair_, &options);
    hold_pages(&rig, KV_TARGET_FULL, 5, slots);
    submit(&rig, &outgrows, 20, 400);
    turn_until_quiet(&rig);
    assert_int_equal(outgrows.n_ends, 1);
    assert_int_equal(outgrows.why, SEQ_END_NO_SPACE);
    engine_rig_turn(&rig);
    submit(&rig, &never_fits, 300, 100);
    submit(&rig, &next, 20, 10);
    turn_until_quiet(&rig);
    assert_int_equal(never_fits.n_ends, 1);
    assert_int_equal(never_fits.why, SEQ_END_NO_SPACE);
    assert_int_equal(next.why, SEQ_END_LENGTH);
    assert_int_equal(next.n_tokens, 10);
    give_pages(&rig, KV_TARGET_FULL, 5, slots);
    engine_rig_check_is_idle(&rig);
    engine_rig_close(&rig);
}

static void alone_and_without_states_a_seq_ends(void **state) {
    struct engine_rig_options options = engine_rig_roomy(2, CONTEXT);
    struct client client = {0}, next = {0};
    struct engine_rig rig;
    uint32_t slots[16];

    (void)state;
    options.n_slots[KV_TARGET_STATE] = 4;
    engine_rig_open(&rig, &pair_, &options);
    hold_pages(&rig, KV_TARGET_STATE, 3, slots);
    submit(&rig, &client, 20, 10);
    submit(&rig, &next, 20, 10);
    turn_until_quiet(&rig);
    assert_int_equal(client.n_ends, 1);
    assert_int_equal(client.why, SEQ_END_NO_SPACE);
    assert_int_equal(next.why, SEQ_END_NO_SPACE);
    give_pages(&rig, KV_TARGET_STATE, 3, slots);
    engine_rig_check_is_idle(&rig);
    engine_rig_close(&rig);
}

static void a_preempted_seq_runs_again_what_it_had_said_through_the_verify_path(void **state) {
    struct engine_rig_options options = engine_rig_roomy(2, CONTEXT);
    struct client old = {0}, young = {0};
    struct engine_rig rig;
    struct engine_view view;

    (void)state;
    options.n_slots[KV_TARGET_FULL] = 8;
    options.n_slots[KV_TARGET_STATE] = 4; /* no restore point survives */
    engine_rig_open(&rig, &pair_, &options);
    submit(&rig, &old, 20, 400);
    submit(&rig, &young, 20, 300);
    turn_until_quiet(&rig);
    engine_look(rig.engine, &view);
    assert_int_equal(view.n_preemptions, 1);
    assert_true(view.n_replay_rows > 0);
    assert_int_equal(view.n_prefill_rows, 3 * 20); /* generated tokens are never prefilled */
    assert_int_equal(old.n_tokens, 400);
    assert_int_equal(young.n_tokens, 300);
    engine_rig_check_is_idle(&rig);
    engine_rig_close(&rig);
}

/* ---- the end -------------------------------------------------------------------------------------------------------- */

static void closing_brings_back_restore_points_on_their_way(void **state) {
    struct engine_rig_options options = engine_rig_roomy(2, CONTEXT);
    struct client client = {0};
    struct engine_rig rig;
    struct seq *seq;

    (void)state;
    engine_rig_open(&rig, &pair_, &options);
    seq = new_seq(&rig, &client, 200, 10);
    seq->n_cuts = cuts_find(&(struct cuts_prompt){.n = 200, .n_system = 70, .n_max = 4}, seq->cuts);
    assert_int_equal(engine_submit(rig.engine, seq), 0);
    engine_turn(rig.engine);
    engine_rig_close(&rig);
    assert_int_equal(client.n_ends, 0);
}

static void a_call_may_end_another_seq(void **state) {
    struct engine_rig_options options = engine_rig_roomy(3, CONTEXT);
    struct client first = {0}, second = {0}, third = {0};
    struct engine_rig rig;

    (void)state;
    engine_rig_open(&rig, &pair_, &options);
    submit(&rig, &first, 20, 10);
    first.engine = rig.engine;
    first.victim = submit(&rig, &second, 20, 10); /* about to be placed in the same turn */
    submit(&rig, &third, 20, 10);
    turn_until_quiet(&rig);
    assert_int_equal(first.n_tokens, 10);
    assert_int_equal(second.n_tokens + second.n_ends, 0);
    assert_int_equal(third.n_tokens, 10);
    engine_rig_check_is_idle(&rig);
    engine_rig_close(&rig);
}

/* ---- the device is lost -------------------------------------------------------------------------------------------- */

/* The device as it breaks: one piece of work is never reported done, and no more is taken. */
static atomic_int n_notifies_left; /* 0: it is broken */

static int breaking_event_record(struct stream *stream, struct event *event) {
    return n_notifies_left == 0 ? -EIO : backend_find("cpu")->event_record(stream, event);
}

static int breaking_notify(struct stream *stream, int eventfd) {
    if (n_notifies_left == 0)
        return -EIO;
    return --n_notifies_left == 0 ? 0 : backend_find("cpu")->notify(stream, eventfd);
}

static void a_lost_device_ends_every_seq_once(void **state) {
    struct backend backend = *backend_find("cpu");
    struct engine_rig_options options = engine_rig_roomy(2, CONTEXT);
    struct client clients[5] = {{0}};
    struct engine_rig_pair pair;
    struct engine_rig rig;
    struct engine_view view;

    (void)state;
    backend.event_record = breaking_event_record;
    backend.notify = breaking_notify;
    for (int n_plans = 1; n_plans < 8; n_plans++) {
        n_notifies_left = INT_MAX;
        engine_rig_pair_open(&pair, &backend, &(struct backend_options){.n_threads = 1}, 2, 256);
        engine_rig_open(&rig, &pair, &options);
        memset(clients, 0, sizeof clients);
        for (int i = 0; i < 5; i++) {
            struct seq *seq = new_seq(&rig, &clients[i], 200, 100);

            seq->n_cuts = cuts_find(&(struct cuts_prompt){.n = 200, .n_system = 70, .n_max = 4}, seq->cuts);
            assert_int_equal(engine_submit(rig.engine, seq), 0);
        }
        n_notifies_left = n_plans;
        do {
            assert_true(engine_rig_turn(&rig));
            engine_look(rig.engine, &view);
        } while (view.error == 0);
        assert_int_equal(view.error, -EIO);
        for (int i = 0; i < 5; i++) {
            assert_int_equal(clients[i].n_ends, 1);
            assert_int_equal(clients[i].why, SEQ_END_DEVICE);
        }
        engine_rig_close(&rig);
        engine_rig_pair_close(&pair);
    }
}

/* ---- a tier below ---------------------------------------------------------------------------------------------------- */

enum { BELOW_PROMPT = 200, BELOW_FOUND = 192 };

static struct engine_rig_options with_tier_below(int n_places) {
    struct engine_rig_options options = engine_rig_roomy(n_places, CONTEXT);

    memcpy(options.n_below, options.n_slots, sizeof options.n_below);
    return options;
}

static struct seq *submit_with_cuts(struct engine_rig *rig, struct client *client, int max_tokens) {
    struct seq *seq = new_seq(rig, client, BELOW_PROMPT, max_tokens);

    seq->n_cuts = cuts_find(&(struct cuts_prompt){.n = BELOW_PROMPT, .n_max = 4}, seq->cuts);
    assert_int_equal(engine_submit(rig->engine, seq), 0);
    return seq;
}

/* Both compute the same prompt, as neither finds it yet: the second one has pages of its own beside those that the first one
 * published, and hangs its next ones behind these. */
static void pages_that_two_have_filled_leave_room_for_who_fits_alone(void **state) {
    enum { N_TOKENS = CONTEXT - BELOW_PROMPT };
    struct engine_rig_options options = engine_rig_roomy(2, CONTEXT);
    struct client brief = {0}, twin = {0};
    struct engine_view view;
    struct engine_rig rig;

    (void)state;
    options.n_slots[KV_TARGET_FULL] = 9;
    engine_rig_open(&rig, &pair_, &options);
    submit_with_cuts(&rig, &twin, N_TOKENS);
    submit_with_cuts(&rig, &brief, 1);
    turn_until_quiet(&rig);
    assert_int_equal(brief.n_ends, 1);
    assert_int_equal(twin.n_ends, 1);
    assert_int_equal(twin.why, SEQ_END_LENGTH);
    assert_int_equal(twin.n_tokens, N_TOKENS);
    engine_look(rig.engine, &view);
    assert_int_equal(view.n_preemptions, 1);
    engine_rig_check_is_idle(&rig);
    engine_rig_close(&rig);
}

/* A prompt that lies in the host tier alone. */
static void put_prompt_below(struct engine_rig *rig) {
    struct client client = {0};

    submit_with_cuts(rig, &client, 10);
    turn_until_quiet(rig);
    assert_int_equal(client.n_ends, 1);
    kv_store_evict_all(rig->store);
}

/* While somebody runs, what lies below comes before its seq is given a place. */
static void let_another_run(struct engine_rig *rig, struct client *other) {
    struct seq *seq = new_seq(rig, other, 20, 400);

    assert_int_equal(engine_submit(rig->engine, seq), 0);
    engine_rig_turn(rig);
}

static int n_computed(const struct engine_rig *rig) {
    struct engine_view view;

    engine_look(rig->engine, &view);
    return (int)view.n_prefill_rows;
}

static void a_prompt_that_lies_below_is_brought_up(void **state) {
    struct engine_rig_options options = with_tier_below(2);
    struct client client = {0}, other = {0};
    struct engine_rig rig;
    int before;

    (void)state;
    engine_rig_open(&rig, &pair_, &options);
    put_prompt_below(&rig);
    let_another_run(&rig, &other);
    before = n_computed(&rig);
    submit_with_cuts(&rig, &client, 10);
    turn_until_quiet(&rig);
    assert_int_equal(client.why, SEQ_END_LENGTH);
    assert_int_equal(n_computed(&rig) - before, BELOW_PROMPT - BELOW_FOUND);
    engine_rig_check_is_idle(&rig);
    engine_rig_close(&rig);
}

static void what_cannot_be_brought_up_is_computed(void **state) {
    struct engine_rig_options options = with_tier_below(2);
    struct client client = {0}, other = {0};
    struct engine_rig rig;
    int before;

    (void)state;
    engine_rig_open(&rig, &pair_, &options);
    put_prompt_below(&rig);
    let_another_run(&rig, &other);
    before = n_computed(&rig);
    rig.fails_copies = true;
    submit_with_cuts(&rig, &client, 10);
    turn_until_quiet(&rig);
    assert_int_equal(client.why, SEQ_END_LENGTH);
    assert_int_equal(client.n_tokens, 10);
    assert_int_equal(n_computed(&rig) - before, BELOW_PROMPT);
    engine_rig_check_is_idle(&rig);
    engine_rig_close(&rig);
}

static void who_ends_during_a_restore_goes_when_its_copies_are_home(void **state) {
    struct engine_rig_options options = with_tier_below(2);
    struct kv_restores_stats stats;
    struct client client = {0}, other = {0};
    struct engine_rig rig;
    struct seq *seq;

    (void)state;
    engine_rig_open(&rig, &pair_, &options);
    put_prompt_below(&rig);
    for (int fails = 0; fails < 2; fails++) {
        kv_store_evict_all(rig.store);
        let_another_run(&rig, &other);
        seq = submit_with_cuts(&rig, &client, 10);
        engine_turn(rig.engine);
        kv_restores_stats(rig.restores, &stats);
        assert_int_equal(stats.n_now, 1);
        engine_end(rig.engine, seq);
        engine_rig_check(&rig);
        rig.fails_copies = fails == 1;
        turn_until_quiet(&rig);
        kv_restores_stats(rig.restores, &stats);
        assert_int_equal(stats.n_now, 0);
        assert_int_equal(client.n_ends, 0);
        engine_rig_check_is_idle(&rig);
    }
    engine_rig_close(&rig);
}

static void pages_under_copies_are_waited_for(void **state) {
    struct engine_rig_options options = with_tier_below(2);
    struct client first = {0}, second = {0};
    struct engine_rig rig;
    struct seq *seq;

    (void)state;
    options.n_slots[KV_TARGET_FULL] = 8;
    engine_rig_open(&rig, &pair_, &options);
    submit_with_cuts(&rig, &first, 10);
    while (first.n_ends == 0) { /* nobody looks at its copies */
        engine_turn(rig.engine);
        engine_rig_dispatch(&rig);
    }
    seq = new_seq(&rig, &second, 400, 100);
    seq->tokens[0]++;
    assert_int_equal(engine_submit(rig.engine, seq), 0);
    for (int i = 0; i < 50; i++) {
        engine_turn(rig.engine);
        engine_rig_dispatch(&rig);
    }
    assert_false(kv_spill_is_idle(rig.spill));
    assert_int_equal(second.n_ends, 0);
    turn_until_quiet(&rig);
    assert_int_equal(second.n_ends, 1);
    assert_int_equal(second.why, SEQ_END_LENGTH);
    engine_rig_check_is_idle(&rig);
    engine_rig_close(&rig);
}

/* ---- restore points ------------------------------------------------------------------------------------------------- */

/* The bytes of the restore point that these tokens find; they must find one at exactly b. */
static const void *restore_point(const struct engine_rig *rig, const int32_t *tokens, int b) {
    size_t slot_bytes = model_info(rig->pair->model)->state.slot_bytes;
    struct kv_key root, keys[CONTEXT / PAGE_TOKENS];
    struct kv_hasher *hasher;
    struct kv_match match;

    assert_int_equal(kv_hasher_new(&hasher), 0);
    assert_int_equal(kv_store_root(rig->store, 1, &root), 0);
    assert_int_equal(kv_key_chain(hasher, &root, tokens, (uint32_t)b / PAGE_TOKENS, keys), 0);
    kv_hasher_free(hasher);
    kv_store_lookup(rig->store, keys, tokens, (uint32_t)b / PAGE_TOKENS, &match);
    assert_int_equal(match.n_tokens, b);
    return (const char *)kv_store_arena(rig->store, KV_TARGET_STATE) + match.state_slot * slot_bytes;
}

static int32_t said[CONTEXT + BLOCK_ROWS_MAX];
static int n_said;

static void note_tokens(void *user, const int32_t *tokens, int n, const struct logprob_row *logprobs) {
    on_tokens(user, tokens, n, logprobs);
    memcpy(said + n_said, tokens, (size_t)n * sizeof *tokens);
    n_said += n;
}

/* A run that only feeds tokens [0, b) and one more, cold. */
static void run_cold_to(struct engine_rig *rig, const int32_t *tokens, int b) {
    struct client client = {0};
    struct seq *seq = new_seq(rig, &client, b + 1, 0);

    memcpy(seq->tokens, tokens, (size_t)(b + 1) * sizeof *tokens);
    seq->cuts[0] = b;
    seq->n_cuts = 1;
    assert_int_equal(engine_submit(rig->engine, seq), 0);
    turn_until_quiet(rig);
    assert_int_equal(client.n_ends, 1);
}

static void restore_points_are_the_states_of_a_cold_run(void **state) {
    static const struct seq_calls calls = {on_admitted, on_progress, note_tokens, on_end};
    struct engine_rig_options options = engine_rig_roomy(2, CONTEXT);
    size_t slot_bytes = model_info(pair_.model)->state.slot_bytes;
    struct client client = {0};
    struct engine_rig rig;
    struct seq *seq;
    char *states = malloc(3 * slot_bytes);
    int b[3] = {64, 128, 0};

    (void)state;
    assert_non_null(states);
    engine_rig_open(&rig, &pair_, &options);
    seq = new_seq(&rig, &client, 150, 200);
    seq->cuts[0] = 64; /* the system's part */
    seq->cuts[1] = 128;
    seq->n_cuts = 2;
    seq->calls = &calls;
    memcpy(said, seq->tokens, 150 * sizeof *said);
    n_said = 150;
    assert_int_equal(engine_submit(rig.engine, seq), 0);
    turn_until_quiet(&rig);
    assert_int_equal(n_said, 350);
    b[2] = 320; /* the last multiple of 64 below what was fed: rolled in a cycle */
    for (int i = 0; i < 3; i++)
        memcpy(states + (size_t)i * slot_bytes, restore_point(&rig, said, b[i]), slot_bytes);
    for (int i = 0; i < 3; i++) {
        kv_store_evict_all(rig.store);
        run_cold_to(&rig, said, b[i]);
        assert_memory_equal(states + (size_t)i * slot_bytes, restore_point(&rig, said, b[i]), slot_bytes);
    }
    free(states);
    engine_rig_check_is_idle(&rig);
    engine_rig_close(&rig);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_a_parked_seq_holds_is_for_those_that_go_on),
        cmocka_unit_test(alone_and_without_pages_a_seq_ends),
        cmocka_unit_test(alone_and_without_states_a_seq_ends),
        cmocka_unit_test(pages_that_two_have_filled_leave_room_for_who_fits_alone),
        cmocka_unit_test(a_preempted_seq_runs_again_what_it_had_said_through_the_verify_path),
        cmocka_unit_test(closing_brings_back_restore_points_on_their_way),
        cmocka_unit_test(a_call_may_end_another_seq),
        cmocka_unit_test(a_lost_device_ends_every_seq_once),
        cmocka_unit_test(a_prompt_that_lies_below_is_brought_up),
        cmocka_unit_test(what_cannot_be_brought_up_is_computed),
        cmocka_unit_test(who_ends_during_a_restore_goes_when_its_copies_are_home),
        cmocka_unit_test(pages_under_copies_are_waited_for),
        cmocka_unit_test(restore_points_are_the_states_of_a_cold_run),
    };
    return cmocka_run_group_tests(tests, open_pair, close_pair);
}
