/* A prefix in host memory that comes layer by layer, while the chunk behind it is computed: same tokens as from the device
 * and as a restore before the chunk; with late streams, with copies that fail, and for a seq that is ended meanwhile. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "cuts.h"
#include "fake/engine_rig.h"
#include "store.h"

enum {
    CONTEXT = 1024,
    N_PLACES = 2,
    CHUNK = 128,
    PROMPT = 700,
    FOUND = (PROMPT - 1) / 64 * 64,
    PAGES = FOUND / 64,
    ANSWER = 40,
    N_LAYERS = 2, /* full-attention ones of the rig's target */
};

/* ---- a backend that looks at copies to the device -------------------------------------------------------------------- */

enum { BALLAST_BYTES = 128 << 20 };

static struct {
    struct stream *loads[16]; /* streams of that kind */
    int n_loads;
    bool is_on;                      /* it looks */
    int n_parts;                     /* that were enqueued */
    int n_copies;                    /* on the load streams */
    int parts_before[4 * PAGES + 1]; /* of each: parts that were enqueued by then */
    int fails_at;                    /* a copy; < 0: none */
    bool holds_back;                 /* copies of the second layer run when the attention of the first one has */
    bool is_slow;                    /* the first copy of each piece takes longer than the whole pass */
    struct event *attended;
    char *ballast; /* [2 * BALLAST_BYTES] */
} spy;

static const struct backend *cpu(void) {
    return backend_find("cpu");
}

static bool is_load(const struct stream *stream) {
    for (int i = 0; i < spy.n_loads; i++)
        if (spy.loads[i] == stream)
            return true;
    return false;
}

static int spy_stream_open(struct device *device, enum stream_kind kind, struct stream **ret_stream) {
    int r = cpu()->stream_open(device, kind, ret_stream);

    if (r == 0 && kind == STREAM_LOAD) {
        assert_true(spy.n_loads < (int)ARRAY_LEN(spy.loads));
        spy.loads[spy.n_loads++] = *ret_stream;
    }
    return r;
}

static void spy_stream_close(struct stream *stream) {
    for (int i = 0; i < spy.n_loads; i++)
        if (spy.loads[i] == stream)
            spy.loads[i] = spy.loads[--spy.n_loads];
    cpu()->stream_close(stream);
}

static int spy_copy(struct stream *stream, void *dst, const void *src, size_t bytes) {
    int n = spy.n_copies;

    if (!spy.is_on || !is_load(stream))
        return cpu()->copy(stream, dst, src, bytes);
    assert_true(n < (int)ARRAY_LEN(spy.parts_before));
    spy.parts_before[n] = spy.n_parts;
    spy.n_copies++;
    if (n == spy.fails_at)
        return -EIO;
    if (spy.is_slow && (n == 0 || spy.parts_before[n - 1] != spy.n_parts))
        assert_int_equal(cpu()->copy(stream, spy.ballast + BALLAST_BYTES, spy.ballast, BALLAST_BYTES), 0);
    if (spy.holds_back && spy.n_parts == 3) /* 0, 1: the first attention, 2 */
        cpu()->event_wait(stream, spy.attended);
    return cpu()->copy(stream, dst, src, bytes);
}

static int spy_run_part(struct stream *stream, struct program *program, int part) {
    int r = cpu()->program_run_part(stream, program, part);

    if (r != 0 || !spy.is_on)
        return r;
    spy.n_parts++;
    return part == 1 && spy.holds_back ? cpu()->event_record(stream, spy.attended) : 0;
}

static struct backend backend_;

static void look_on(int fails_at, bool holds_back) {
    spy.is_on = true;
    spy.is_slow = false;
    spy.n_parts = spy.n_copies = 0;
    spy.fails_at = fails_at;
    spy.holds_back = holds_back;
}

/* ---- seqs ----------------------------------------------------------------------------------------------------------- */

struct client {
    int32_t tokens[CONTEXT];
    int n_tokens, n_admitted, n_ends;
    enum seq_end why;
    struct seq *seq;
    struct seq_stats stats; /* at its end */
};

static void on_admitted(void *user) {
    struct client *client = user;

    client->n_admitted++;
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
    client->stats = client->seq->stats;
}

static const struct seq_calls CALLS = {on_admitted, on_progress, on_tokens, on_end};

static struct engine_rig_pair pair_, delayed_;

static int open_pairs(void **state) {
    struct backend_options options = {.n_threads = 1};

    (void)state;
    backend_ = *cpu();
    backend_.stream_open = spy_stream_open;
    backend_.stream_close = spy_stream_close;
    backend_.copy = spy_copy;
    backend_.program_run_part = spy_run_part;
    engine_rig_pair_open(&pair_, &backend_, &options, N_PLACES, 256);
    options.delay_seed = 17;
    engine_rig_pair_open(&delayed_, &backend_, &options, N_PLACES, 256);
    return cpu()->event_new(pair_.device, &spy.attended);
}

static int close_pairs(void **state) {
    (void)state;
    cpu()->event_free(spy.attended);
    engine_rig_pair_close(&pair_);
    engine_rig_pair_close(&delayed_);
    return 0;
}

static void open_rig(struct engine_rig *rig, struct engine_rig_pair *pair) {
    struct engine_rig_options options = engine_rig_roomy(N_PLACES, CONTEXT);

    spy.is_on = false;
    memcpy(options.n_below, options.n_slots, sizeof options.n_below);
    options.chunk_rows = CHUNK;
    options.batch_rows = 2 * CHUNK;
    engine_rig_open(rig, pair, &options);
}

static struct seq *submit(struct engine_rig *rig, struct client *client, int first_token, int n_prompt) {
    struct seq *seq = seq_new(CONTEXT + BLOCK_ROWS_MAX, 0);

    assert_non_null(seq);
    *client = (struct client){.seq = seq};
    for (int i = 0; i < n_prompt; i++)
        seq->tokens[i] = (first_token + i * i / 7 + i) % 61;
    seq->n_prompt = seq->n_tokens = n_prompt;
    seq->max_tokens = ANSWER;
    seq->n_cuts = cuts_find(&(struct cuts_prompt){.n = n_prompt, .n_max = 4}, seq->cuts);
    assert_int_equal(kv_store_root(rig->store, 1, &seq->root), 0);
    seq->calls = &CALLS;
    seq->user = client;
    assert_int_equal(engine_submit(rig->engine, seq), 0);
    return seq;
}

static void turn_until_quiet(struct engine_rig *rig) {
    while (engine_rig_turn(rig))
        engine_rig_check(rig);
}

static struct engine_view look(const struct engine_rig *rig) {
    struct engine_view view;

    engine_look(rig->engine, &view);
    return view;
}

static struct kv_restores_stats restores(const struct engine_rig *rig) {
    struct kv_restores_stats stats;

    kv_restores_stats(rig->restores, &stats);
    return stats;
}

/* Nothing is left on the device, not in free slots either: what is read before it has come is no number. */
static void empty_device(struct engine_rig *rig) {
    const struct model_info *info = model_info(rig->pair->model);

    kv_store_evict_all(rig->store);
    for (int g = 0; g < KV_GROUP_N; g++) {
        size_t bytes = g == KV_TARGET_STATE ? info->state.slot_bytes : info->groups[g].page_bytes;
        size_t first = g == KV_TARGET_STATE ? 0 : 1; /* the null page stays */

        memset((char *)kv_store_arena(rig->store, (enum kv_group)g) + first * bytes, 0xff,
               (size_t)rig->options.n_slots[g] * bytes);
    }
}

/* The prompt lies in host memory, and nowhere else. Its tokens are in `cold`. */
static void put_prompt_below(struct engine_rig *rig, struct client *cold) {
    submit(rig, cold, 0, PROMPT);
    turn_until_quiet(rig);
    assert_int_equal(cold->n_tokens, ANSWER);
    empty_device(rig);
}

static void check_same(const struct client *client, const struct client *cold) {
    assert_int_equal(client->n_ends, 1);
    assert_int_equal(client->why, SEQ_END_LENGTH);
    assert_int_equal(client->n_tokens, ANSWER);
    assert_memory_equal(client->tokens, cold->tokens, ANSWER * sizeof(int32_t));
}

/* ---- order ---------------------------------------------------------------------------------------------------------- */

static void layers_come_one_after_the_other_and_the_restore_point_first(void **state) {
    struct client cold, client, hot;
    struct engine_rig rig;
    int n_target = N_LAYERS * PAGES;

    (void)state;
    open_rig(&rig, &pair_);
    put_prompt_below(&rig, &cold);
    look_on(-1, false);
    submit(&rig, &client, 0, PROMPT);
    turn_until_quiet(&rig);
    spy.is_on = false;
    check_same(&client, &cold);
    assert_int_equal(client.stats.n_cached, FOUND);
    assert_int_equal(client.stats.n_restored, FOUND);
    assert_int_equal(client.n_admitted, 1);
    assert_int_equal(spy.n_parts, 2 * N_LAYERS + 1);
    assert_true(spy.n_copies > 1 + n_target); /* there are the drafter's too */
    assert_int_equal(spy.parts_before[0], 0);
    for (int i = 0; i < n_target; i++)
        assert_int_equal(spy.parts_before[1 + i], 1 + 2 * (i / PAGES));
    assert_int_equal(spy.parts_before[1 + n_target], 2 * N_LAYERS + 1);
    assert_int_equal(restores(&rig).n_done, 1);
    submit(&rig, &hot, 0, PROMPT); /* what has come is found on the device */
    turn_until_quiet(&rig);
    check_same(&hot, &cold);
    assert_int_equal(hot.stats.n_cached, FOUND);
    assert_int_equal(hot.stats.n_restored, 0);
    engine_rig_check_is_idle(&rig);
    engine_rig_close(&rig);
}

/* The second layer's pages start on their way when the first layer's have been attended: the whole was not waited for. */
static void the_first_layers_run_before_the_last_have_come(void **state) {
    struct client cold, client;
    struct engine_rig rig;

    (void)state;
    open_rig(&rig, &pair_);
    put_prompt_below(&rig, &cold);
    look_on(-1, true);
    submit(&rig, &client, 0, PROMPT);
    turn_until_quiet(&rig);
    spy.is_on = false;
    check_same(&client, &cold);
    assert_int_equal(restores(&rig).n_done, 1);
    engine_rig_close(&rig);
}

static void what_comes_late_is_waited_for(void **state) {
    struct client cold, client;
    struct engine_rig rig;

    (void)state;
    spy.ballast = calloc(2, BALLAST_BYTES);
    assert_non_null(spy.ballast);
    open_rig(&rig, &pair_);
    put_prompt_below(&rig, &cold);
    look_on(-1, false);
    spy.is_slow = true;
    submit(&rig, &client, 0, PROMPT);
    turn_until_quiet(&rig);
    spy.is_on = false;
    check_same(&client, &cold);
    engine_rig_close(&rig);
    free(spy.ballast);
}

static void in_page_order_and_with_late_streams_the_tokens_are_the_same(void **state) {
    struct client cold, client, other;
    struct engine_rig rig;

    (void)state;
    for (int i = 0; i < 2; i++) {
        open_rig(&rig, i == 0 ? &pair_ : &delayed_);
        put_prompt_below(&rig, &cold);
        for (int k = 0; k < 3; k++) {
            submit(&rig, &client, 0, PROMPT);
            turn_until_quiet(&rig);
            check_same(&client, &cold);
            assert_int_equal(client.stats.n_restored, FOUND);
            empty_device(&rig);
        }
        look_on(-1, false);
        submit(&rig, &other, 5, 100); /* beside another one it comes first, and then the chunk */
        engine_turn(rig.engine);
        submit(&rig, &client, 0, PROMPT);
        turn_until_quiet(&rig);
        spy.is_on = false;
        assert_int_equal(spy.n_parts, 0);
        check_same(&client, &cold);
        assert_int_equal(client.stats.n_restored, FOUND);
        engine_rig_check_is_idle(&rig);
        engine_rig_close(&rig);
    }
}

static void who_comes_meanwhile_waits_for_one_plan(void **state) {
    struct client cold, first, second, alone;
    struct engine_rig rig;

    (void)state;
    open_rig(&rig, &delayed_);
    submit(&rig, &alone, 5, 100);
    turn_until_quiet(&rig);
    put_prompt_below(&rig, &cold);
    submit(&rig, &first, 0, PROMPT);
    engine_turn(rig.engine);
    submit(&rig, &second, 5, 100);
    turn_until_quiet(&rig);
    check_same(&first, &cold);
    check_same(&second, &alone);
    engine_rig_check_is_idle(&rig);
    engine_rig_close(&rig);
}

/* A chain whose beginning is on the device, and one with a hole in the drafter's pages. */
static void what_is_there_already_is_not_brought(void **state) {
    struct client cold, client, shorter;
    struct engine_rig rig;
    uint64_t n_all;

    (void)state;
    open_rig(&rig, &delayed_);
    put_prompt_below(&rig, &cold);
    submit(&rig, &client, 0, PROMPT);
    turn_until_quiet(&rig);
    n_all = restores(&rig).n_copies;
    empty_device(&rig);
    submit(&rig, &shorter, 0, 300); /* its first four pages have no restore point behind them: they are computed */
    turn_until_quiet(&rig);
    for (uint32_t record = 0; (record = kv_shelf_next_state(rig.shelf, record)) != KV_NO_RECORD; record++)
        if (kv_shelf_name(rig.shelf, record).page_idx == PAGES - 1)
            kv_shelf_drop(rig.shelf, record, KV_DRAFT_FULL);
    submit(&rig, &client, 0, PROMPT);
    turn_until_quiet(&rig);
    check_same(&client, &cold);
    assert_int_equal(client.stats.n_cached, FOUND);
    assert_in_range(restores(&rig).n_copies - n_all, 1 + PAGES - 4, n_all - 4);
    engine_rig_check_is_idle(&rig);
    engine_rig_close(&rig);
}

/* ---- what goes wrong ------------------------------------------------------------------------------------------------ */

/* At the restore point, at the first and a later layer, at the drafter's pages. */
static void a_copy_that_fails_lets_the_request_begin_again_with_less(void **state) {
    static const int copies[] = {0, 1, PAGES / 2, 1 + PAGES, 1 + N_LAYERS * PAGES};
    struct client cold, client;
    struct engine_rig rig;

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(copies); i++) {
        uint64_t n_rows;

        open_rig(&rig, i % 2 == 0 ? &pair_ : &delayed_);
        put_prompt_below(&rig, &cold);
        n_rows = look(&rig).n_prefill_rows;
        look_on(copies[i], false);
        submit(&rig, &client, 0, PROMPT);
        while (restores(&rig).n_failed == 0)
            engine_rig_turn(&rig);
        assert_int_equal(kv_store_evict_all(rig.store), 0); /* nothing was published */
        spy.is_on = false;
        turn_until_quiet(&rig);
        check_same(&client, &cold);
        assert_int_equal(client.n_admitted, 1);
        assert_int_equal(client.stats.n_cached, 0);
        assert_int_equal(client.stats.n_preempted, 0);
        assert_int_equal(look(&rig).n_prefill_rows - n_rows, PROMPT + PROMPT - FOUND);
        assert_int_equal(restores(&rig).n_failed, 1);
        assert_int_equal(restores(&rig).n_done, 0);
        engine_rig_check_is_idle(&rig);
        engine_rig_close(&rig);
    }
}

static void pins_at_both_ends_outlast_who_wanted_it(void **state) {
    struct client cold, client, next;
    struct engine_rig rig;

    (void)state;
    open_rig(&rig, &delayed_);
    for (int fails = 0; fails < 2; fails++) {
        struct kv_shelf_group_stats below;
        struct kv_store_stats device;
        struct seq *seq;

        put_prompt_below(&rig, &cold);
        look_on(fails ? PAGES : -1, false);
        seq = submit(&rig, &client, 0, PROMPT);
        engine_turn(rig.engine);
        engine_end(rig.engine, seq);
        kv_store_evict_all(rig.store);
        kv_shelf_evict_bytes(rig.shelf, UINT64_MAX);
        kv_shelf_stats(rig.shelf, KV_TARGET_FULL, &below);
        assert_int_equal(below.n_pinned, PAGES);
        assert_int_equal(below.n_clean, PAGES);
        kv_store_stats(rig.store, &device);
        assert_true(device.group[KV_TARGET_FULL].n_private >= PAGES);
        turn_until_quiet(&rig);
        spy.is_on = false;
        assert_int_equal(client.n_ends, 0);
        engine_rig_check_is_idle(&rig);
        submit(&rig, &next, 0, PROMPT); /* what did come was kept */
        turn_until_quiet(&rig);
        check_same(&next, &cold);
        assert_int_equal(next.stats.n_cached, FOUND);
        assert_int_equal(next.stats.n_restored, fails ? FOUND : 0);
        kv_store_evict_all(rig.store);
        kv_shelf_evict_bytes(rig.shelf, UINT64_MAX);
    }
    engine_rig_close(&rig);
}

static void it_may_be_closed_at_any_time(void **state) {
    struct client cold, client;
    struct engine_rig rig;

    (void)state;
    open_rig(&rig, &delayed_);
    put_prompt_below(&rig, &cold);
    submit(&rig, &client, 0, PROMPT);
    engine_turn(rig.engine);
    engine_rig_close(&rig);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(layers_come_one_after_the_other_and_the_restore_point_first),
        cmocka_unit_test(the_first_layers_run_before_the_last_have_come),
        cmocka_unit_test(what_comes_late_is_waited_for),
        cmocka_unit_test(in_page_order_and_with_late_streams_the_tokens_are_the_same),
        cmocka_unit_test(who_comes_meanwhile_waits_for_one_plan),
        cmocka_unit_test(what_is_there_already_is_not_brought),
        cmocka_unit_test(a_copy_that_fails_lets_the_request_begin_again_with_less),
        cmocka_unit_test(pins_at_both_ends_outlast_who_wanted_it),
        cmocka_unit_test(it_may_be_closed_at_any_time),
    };
    return cmocka_run_group_tests(tests, open_pairs, close_pairs);
}
