#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <string.h>

#include "fake/engine_rig.h"
#include "pages.h"

enum { N_PLACES = 2, N_PAGES = 8, COPIES_MAX = 256 };

/* A store, tables and the pages of two places; copies are collected and never run. */
struct rig {
    struct engine_rig_pair pair;
    struct kv_store *store;
    struct tables tables;
    struct stream *stream;
    struct seq_pages pages[N_PLACES];
    struct device_copy list[COPIES_MAX];
    struct device_copies copies;
    struct kv_hasher *hasher;
    int32_t tokens[N_PAGES * PAGE_TOKENS];
    struct kv_key keys[N_PAGES];
    struct kv_match match;
};

static struct rig rig;

static void open_rig(int n_full, int n_state, int n_draft, int n_sliding) {
    struct engine_rig_options options = {.n_slots = {[KV_TARGET_FULL] = n_full,
                                                     [KV_TARGET_STATE] = n_state,
                                                     [KV_DRAFT_FULL] = n_draft,
                                                     [KV_DRAFT_SLIDING] = n_sliding}};
    void *arenas[KV_GROUP_N];
    struct kv_key root;

    memset(&rig, 0, sizeof rig);
    engine_rig_pair_open(&rig.pair, backend_find("cpu"), &(struct backend_options){.n_threads = 1}, N_PLACES, 64);
    rig.store = engine_rig_store_open(&rig.pair, &options);
    for (int g = 0; g < KV_GROUP_N; g++)
        arenas[g] = kv_store_arena(rig.store, (enum kv_group)g);
    assert_int_equal(rig.pair.backend->stream_open(rig.pair.device, STREAM_LOAD, &rig.stream), 0);
    assert_int_equal(tables_open(&rig.tables, rig.pair.backend, rig.pair.device, rig.stream, model_info(rig.pair.model),
                                 arenas, N_PLACES, N_PAGES),
                     0);
    for (int i = 0; i < N_PLACES; i++)
        assert_int_equal(pages_open(&rig.pages[i], rig.store, &rig.tables, i, ENGINE_RIG_WINDOW), 0);
    rig.copies = (struct device_copies){.copies = rig.list, .n_max = COPIES_MAX};
    assert_int_equal(kv_hasher_new(&rig.hasher), 0);
    assert_int_equal(kv_store_root(rig.store, 1, &root), 0);
    for (int i = 0; i < N_PAGES * PAGE_TOKENS; i++)
        rig.tokens[i] = i;
    assert_int_equal(kv_key_chain(rig.hasher, &root, rig.tokens, N_PAGES, rig.keys), 0);
}

static void check_rig(void) {
    char line[200];

    if (kv_store_check(rig.store, line, sizeof line) != 0)
        fail_msg("%s", line);
}

/* Asserts, by kv_store_close(), that every slot came home. */
static void close_rig(void) {
    check_rig();
    for (int i = 0; i < N_PLACES; i++)
        pages_close(&rig.pages[i]);
    kv_hasher_free(rig.hasher);
    tables_close(&rig.tables);
    rig.pair.backend->stream_close(rig.stream);
    kv_store_close(rig.store);
    engine_rig_pair_close(&rig.pair);
}

static struct seq_keys keys_of(int n_pages) {
    return (struct seq_keys){.keys = rig.keys, .tokens = rig.tokens, .n_pages = n_pages};
}

static int begin(int place, int n_pages) {
    struct seq_keys keys = keys_of(n_pages);

    rig.copies.n = 0;
    return pages_begin(&rig.pages[place], &keys, false, &rig.copies, &rig.match);
}

static int grow(int place, int len, int n_tokens) {
    rig.copies.n = 0;
    return pages_grow(&rig.pages[place], len, n_tokens, &rig.copies);
}

static void publish(int place, int n_tokens, bool with_state) {
    struct seq_keys keys = keys_of(N_PAGES);

    pages_publish(&rig.pages[place], &keys, n_tokens, with_state ? pages_take_state(&rig.pages[place]) : KV_NO_SLOT);
}

static void publish_held(int place) {
    struct seq_keys keys = keys_of(N_PAGES);
    uint32_t held = rig.pages[place].held;

    rig.pages[place].held = KV_NO_SLOT;
    pages_publish(&rig.pages[place], &keys, rig.pages[place].held_tokens, held);
}

/* A seq that came, filled so many pages, left a restore point at their end, and went. */
static void leave_restore_point(int n_pages) {
    assert_int_equal(begin(0, 0), 0);
    assert_int_equal(grow(0, 0, n_pages * PAGE_TOKENS), 0);
    publish(0, n_pages * PAGE_TOKENS, true);
    pages_end(&rig.pages[0]);
}

static int entry(int place, enum kv_group group, int page) {
    return tables_pages(&rig.tables, group, place)[page];
}

static uint32_t n_available(enum kv_group group) {
    return kv_store_n_available(rig.store, group);
}

/* ---- beginning ---- */

static void a_hit_is_not_evicted_by_the_states_its_own_seq_takes(void **state) {
    uint32_t held;

    (void)state;
    open_rig(16, 4, 16, 16);
    leave_restore_point(2); /* the oldest of two, and the one that is wanted */
    assert_int_equal(begin(0, 0), 0);
    assert_int_equal(grow(0, 0, PAGE_TOKENS), 0);
    publish(0, PAGE_TOKENS, true);
    pages_end(&rig.pages[0]);
    assert_int_equal(kv_store_take(rig.store, KV_TARGET_STATE, &held), 0);
    assert_int_equal(begin(0, 3), 0); /* one state is free: a restore point must go */
    assert_int_equal(rig.match.n_tokens, 2 * PAGE_TOKENS);
    pages_end(&rig.pages[0]);
    kv_store_give(rig.store, KV_TARGET_STATE, held);
    close_rig();
}

static void a_hit_that_stands_in_the_way_is_given_up(void **state) {
    (void)state;
    open_rig(16, 2, 16, 16);
    assert_int_equal(begin(0, 0), 0);
    assert_int_equal(grow(0, 0, PAGE_TOKENS), 0);
    pages_keep_rolling(&rig.pages[0], PAGE_TOKENS);
    publish_held(0);
    pages_end(&rig.pages[0]);
    assert_int_equal(begin(0, 1), 0); /* two states, and one is in the index */
    assert_int_equal(rig.match.n_tokens, 0);
    pages_end(&rig.pages[0]);
    close_rig();
}

static void without_states_nothing_is_taken(void **state) {
    uint32_t held[3];

    (void)state;
    open_rig(16, 4, 16, 16);
    leave_restore_point(2);
    for (int i = 0; i < 3; i++)
        assert_int_equal(kv_store_take(rig.store, KV_TARGET_STATE, &held[i]), 0);
    assert_int_equal(begin(0, 3), KV_STORE_E_FULL);
    assert_int_equal(n_available(KV_TARGET_STATE), 1);
    assert_int_equal(n_available(KV_TARGET_FULL), 16);
    for (int i = 0; i < 3; i++)
        kv_store_give(rig.store, KV_TARGET_STATE, held[i]);
    close_rig();
}

static void a_hit_fills_the_tables_with_what_the_index_has(void **state) {
    (void)state;
    open_rig(16, 6, 16, 16);
    leave_restore_point(4);
    assert_int_equal(begin(1, 5), 0);
    assert_int_equal(rig.match.n_tokens, 4 * PAGE_TOKENS);
    for (int page = 0; page < 4; page++) {
        assert_true(entry(1, KV_TARGET_FULL, page) != 0);
        assert_true(entry(1, KV_DRAFT_FULL, page) != 0);
        assert_int_equal(entry(1, KV_DRAFT_SLIDING, page) != 0, page >= (4 * PAGE_TOKENS - ENGINE_RIG_WINDOW) / 64);
    }
    assert_int_equal(n_available(KV_TARGET_STATE), 3); /* two are its own, and the hit is held until it is copied */
    pages_restored(&rig.pages[1]);
    assert_int_equal(n_available(KV_TARGET_STATE), 4);
    pages_end(&rig.pages[1]);
    assert_int_equal(n_available(KV_TARGET_FULL), 16);
    close_rig();
}

/* ---- growing ---- */

static void an_empty_target_pool_says_so_and_what_was_got_stays(void **state) {
    (void)state;
    open_rig(3, 4, 16, 16);
    assert_int_equal(begin(0, 0), 0);
    assert_int_equal(grow(0, 0, 5 * PAGE_TOKENS), KV_STORE_E_FULL);
    assert_int_equal(rig.pages[0].n_pages[KV_TARGET_FULL], 3);
    assert_int_equal(rig.copies.n, 1);
    pages_end(&rig.pages[0]);
    assert_int_equal(n_available(KV_TARGET_FULL), 3);
    close_rig();
}

static void an_empty_draft_pool_ends_drafting_alone(void **state) {
    (void)state;
    open_rig(8, 4, 2, 16);
    assert_int_equal(begin(0, 0), 0);
    assert_int_equal(grow(0, 0, 5 * PAGE_TOKENS), 0);
    assert_false(rig.pages[0].has_draft);
    assert_int_equal(rig.pages[0].n_pages[KV_DRAFT_FULL], 5);
    assert_true(entry(0, KV_DRAFT_FULL, 1) != 0);
    assert_int_equal(entry(0, KV_DRAFT_FULL, 2), 0);
    publish(0, 5 * PAGE_TOKENS, true);
    pages_end(&rig.pages[0]);
    assert_int_equal(begin(1, 5), 0);
    assert_int_equal(rig.match.n_tokens, 5 * PAGE_TOKENS);
    assert_int_equal(rig.match.draft_valid_from, 5 * PAGE_TOKENS);
    assert_true(rig.pages[1].has_draft);
    pages_end(&rig.pages[1]);
    close_rig();
}

static void sliding_pages_leave_with_the_window(void **state) {
    (void)state;
    open_rig(16, 4, 16, 16);
    assert_int_equal(begin(0, 0), 0);
    assert_int_equal(grow(0, 0, 4 * PAGE_TOKENS), 0);
    assert_int_equal(n_available(KV_DRAFT_SLIDING), 12);
    assert_int_equal(grow(0, PAGE_TOKENS + ENGINE_RIG_WINDOW - 1, 4 * PAGE_TOKENS), 0);
    assert_int_equal(n_available(KV_DRAFT_SLIDING), 12);
    assert_int_equal(grow(0, PAGE_TOKENS + ENGINE_RIG_WINDOW, 4 * PAGE_TOKENS), 0);
    assert_int_equal(n_available(KV_DRAFT_SLIDING), 13);
    assert_int_equal(entry(0, KV_DRAFT_SLIDING, 0), 0);
    assert_true(entry(0, KV_DRAFT_SLIDING, 1) != 0);
    pages_end(&rig.pages[0]);
    assert_int_equal(n_available(KV_DRAFT_SLIDING), 16);
    close_rig();
}

static void the_window_of_the_held_restore_point_stays(void **state) {
    (void)state;
    open_rig(16, 6, 16, 16);
    assert_int_equal(begin(0, 0), 0);
    assert_int_equal(grow(0, 0, 6 * PAGE_TOKENS), 0);
    assert_true(pages_hold_rolling(&rig.pages[0], 2 * PAGE_TOKENS, &rig.copies));
    assert_int_equal(grow(0, 6 * PAGE_TOKENS, 6 * PAGE_TOKENS), 0);
    assert_true(entry(0, KV_DRAFT_SLIDING, 0) != 0);
    assert_true(pages_hold_rolling(&rig.pages[0], 5 * PAGE_TOKENS, &rig.copies));
    assert_int_equal(grow(0, 6 * PAGE_TOKENS, 6 * PAGE_TOKENS), 0);
    assert_int_equal(entry(0, KV_DRAFT_SLIDING, 2), 0);
    assert_true(entry(0, KV_DRAFT_SLIDING, 3) != 0);
    pages_end(&rig.pages[0]);
    close_rig();
}

/* ---- restore points ---- */

static void rolling_and_held_change_places(void **state) {
    uint32_t first;

    (void)state;
    open_rig(16, 3, 16, 16);
    assert_int_equal(begin(0, 0), 0);
    first = rig.pages[0].rolling;
    assert_true(pages_hold_rolling(&rig.pages[0], PAGE_TOKENS, &rig.copies));
    assert_int_equal(rig.pages[0].held, first);
    assert_int_equal(rig.tables.rolling[0], rig.pages[0].rolling);
    assert_true(rig.pages[0].rolling != first && rig.pages[0].rolling != rig.pages[0].live);
    assert_true(pages_hold_rolling(&rig.pages[0], 2 * PAGE_TOKENS, &rig.copies));
    assert_int_equal(rig.pages[0].rolling, first);
    assert_int_equal(n_available(KV_TARGET_STATE), 0);
    pages_end(&rig.pages[0]);
    close_rig();
}

static void without_a_slot_to_roll_into_nothing_is_held(void **state) {
    (void)state;
    open_rig(16, 2, 16, 16);
    assert_int_equal(begin(0, 0), 0);
    assert_false(pages_hold_rolling(&rig.pages[0], PAGE_TOKENS, &rig.copies));
    assert_int_equal(rig.pages[0].held, KV_NO_SLOT);
    pages_keep_rolling(&rig.pages[0], PAGE_TOKENS); /* at its end it needs none */
    assert_int_equal(rig.pages[0].held_tokens, PAGE_TOKENS);
    assert_int_equal(rig.pages[0].rolling, KV_NO_SLOT);
    pages_end(&rig.pages[0]);
    close_rig();
}

static void two_that_fill_the_same_pages_leave_one_copy(void **state) {
    (void)state;
    open_rig(16, 8, 16, 16);
    for (int place = 0; place < 2; place++) {
        assert_int_equal(begin(place, 0), 0);
        assert_int_equal(grow(place, 0, 3 * PAGE_TOKENS), 0);
    }
    publish(0, 3 * PAGE_TOKENS, true);
    publish(1, 3 * PAGE_TOKENS, true);
    check_rig();
    assert_int_equal(rig.pages[1].n_published, 3);
    for (int place = 0; place < 2; place++)
        pages_end(&rig.pages[place]);
    assert_int_equal(begin(0, 4), 0);
    assert_int_equal(rig.match.n_tokens, 3 * PAGE_TOKENS);
    assert_int_equal(n_available(KV_TARGET_FULL), 13);
    pages_end(&rig.pages[0]);
    close_rig();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_hit_is_not_evicted_by_the_states_its_own_seq_takes),
        cmocka_unit_test(a_hit_that_stands_in_the_way_is_given_up),
        cmocka_unit_test(without_states_nothing_is_taken),
        cmocka_unit_test(a_hit_fills_the_tables_with_what_the_index_has),
        cmocka_unit_test(an_empty_target_pool_says_so_and_what_was_got_stays),
        cmocka_unit_test(an_empty_draft_pool_ends_drafting_alone),
        cmocka_unit_test(sliding_pages_leave_with_the_window),
        cmocka_unit_test(the_window_of_the_held_restore_point_stays),
        cmocka_unit_test(rolling_and_held_change_places),
        cmocka_unit_test(without_a_slot_to_roll_into_nothing_is_held),
        cmocka_unit_test(two_that_fill_the_same_pages_leave_one_copy),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
