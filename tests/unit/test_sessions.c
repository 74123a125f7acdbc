#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "../fake/kv_rig.h"
#include "sessions.h"

enum { N_CONTEXT = 8 * PAGE_TOKENS, UID = 1000 };

static struct kv_rig rig;
static struct sessions *sessions;
static int32_t tokens[N_CONTEXT];

static void open_rig_of(struct sessions_pins max, struct sessions_pins per_uid_max, bool is_shared) {
    struct sessions_options options = {
        .n_context = N_CONTEXT, .has_shared_prefixes = is_shared, .pins_max = max, .pins_per_uid_max = per_uid_max};

    rig = kv_rig_open((const uint32_t[KV_GROUP_N]){32, 16, 0, 0}, 0, 32);
    options.store = rig.store;
    assert_int_equal(sessions_open(&options, &sessions), 0);
    for (int i = 0; i < N_CONTEXT; i++)
        tokens[i] = i;
}

static void open_rig(uint32_t n_pin_pages, uint32_t n_pin_states, bool is_shared) {
    struct sessions_pins max = {n_pin_pages, n_pin_states};

    open_rig_of(max, (struct sessions_pins){32, 16}, is_shared);
}

static void close_rig(void) {
    sessions_close(sessions);
    kv_rig_check(&rig);
    kv_rig_close(&rig);
}

static struct session *make(uid_t uid, const char *name) {
    struct session *session;

    assert_int_equal(sessions_make(sessions, uid, span_of(name), 4, &session), 0);
    return session;
}

/* Somebody has served these tokens: they are in the index, with a restore point at the end. */
static void serve(const struct session *session, uint32_t n_pages) {
    struct kv_lease lease;
    bool taken[KV_GROUP_N];

    assert_int_equal(kv_lease_init(&lease, rig.store, n_pages), 0);
    for (uint32_t page = 0; page < n_pages; page++) {
        uint32_t slots[KV_GROUP_N] = {KV_NO_SLOT, KV_NO_SLOT, KV_NO_SLOT, KV_NO_SLOT};

        assert_int_equal(kv_store_take(rig.store, KV_TARGET_FULL, &slots[KV_TARGET_FULL]), 0);
        assert_int_equal(kv_lease_publish_page(&lease, page, &session->keys[page], session->tokens + page * PAGE_TOKENS,
                                               slots, taken),
                         0);
        if (!taken[KV_TARGET_FULL])
            kv_store_give(rig.store, KV_TARGET_FULL, slots[KV_TARGET_FULL]);
    }
    for (uint32_t slot; kv_store_take(rig.store, KV_TARGET_STATE, &slot) == 0;) {
        kv_lease_publish_state(&lease, n_pages, slot, taken);
        if (!taken[0])
            kv_store_give(rig.store, KV_TARGET_STATE, slot);
        break;
    }
    kv_lease_deinit(&lease);
}

static uint32_t n_pinned(enum kv_group group) {
    struct kv_store_stats stats;

    kv_store_stats(rig.store, &stats);
    return stats.group[group].n_pinned;
}

/* ---- names ---- */

static void a_name_is_one_session_of_one_user(void **state) {
    struct session *a, *b, *session;

    (void)state;
    open_rig(16, 4, false);
    a = make(UID, "a");
    b = make(UID + 1, "a");
    assert_ptr_not_equal(a, b);
    assert_ptr_equal(make(UID, "a"), a);
    assert_ptr_equal(sessions_find(sessions, UID, span_of("a")), a);
    assert_null(sessions_find(sessions, UID, span_of("aa")));
    assert_null(sessions_find(sessions, UID, span_of("")));
    assert_int_equal(sessions_count(sessions), 2);
    assert_memory_not_equal(&a->root, &b->root, sizeof a->root);
    for (int i = 0; i < 3; i++)
        make(UID, (const char *[]){"b", "c", "d"}[i]);
    assert_int_equal(sessions_make(sessions, UID, span_of("e"), 4, &session), SESSIONS_E_QUOTA);
    make(UID + 1, "e");
    sessions_drop(sessions, a);
    make(UID, "e");
    assert_null(sessions_find(sessions, UID, span_of("a")));
    close_rig();
}

static void shared_prefixes_are_one_namespace(void **state) {
    (void)state;
    open_rig(16, 4, true);
    assert_memory_equal(&make(UID, "a")->root, &make(UID + 1, "b")->root, sizeof(struct kv_key));
    close_rig();
}

/* ---- tokens ---- */

static void keys_grow_with_the_tokens(void **state) {
    static const int lengths[] = {1, 63, 64, 65, 200, 200, 511, 512};
    struct session *bit_by_bit, *at_once;

    (void)state;
    open_rig(16, 4, false);
    bit_by_bit = make(UID, "a");
    at_once = make(UID, "b");
    for (size_t i = 0; i < ARRAY_LEN(lengths); i++) {
        assert_int_equal(sessions_extend(sessions, bit_by_bit, tokens, lengths[i]), 0);
        assert_int_equal(bit_by_bit->n, lengths[i]);
    }
    assert_int_equal(sessions_extend(sessions, at_once, tokens, N_CONTEXT), 0);
    assert_memory_equal(bit_by_bit->tokens, tokens, sizeof tokens);
    assert_memory_equal(bit_by_bit->keys, at_once->keys, N_CONTEXT / PAGE_TOKENS * sizeof(struct kv_key));
    close_rig();
}

static void a_fork_has_the_first_tokens_and_goes_its_own_way(void **state) {
    struct session *session, *fork;

    (void)state;
    open_rig(16, 4, false);
    session = make(UID, "a");
    assert_int_equal(sessions_extend(sessions, session, tokens, 300), 0);
    assert_int_equal(sessions_fork(sessions, session, span_of("b"), 150, 4, &fork), 0);
    assert_int_equal(fork->n, 150);
    assert_memory_equal(fork->keys, session->keys, 2 * sizeof(struct kv_key));
    for (int i = 150; i < 300; i++)
        tokens[i]++;
    assert_int_equal(sessions_extend(sessions, fork, tokens, 300), 0);
    assert_memory_equal(fork->keys, session->keys, 2 * sizeof(struct kv_key));
    assert_memory_not_equal(&fork->keys[2], &session->keys[2], sizeof(struct kv_key));
    assert_int_equal(sessions_fork(sessions, session, span_of("c"), 0, 4, &fork), 0);
    assert_int_equal(fork->n, 0);
    make(UID, "d");
    assert_int_equal(sessions_fork(sessions, session, span_of("e"), 10, 4, &fork), SESSIONS_E_QUOTA);
    close_rig();
}

/* How many of its tokens the index has. */
static int n_found(const struct session *session) {
    struct kv_match match;

    kv_store_lookup(rig.store, session->keys, session->tokens, (uint32_t)session->n / PAGE_TOKENS, &match);
    return (int)match.n_tokens;
}

/* ---- pins ---- */

static void pinned_pages_stay_until_unpinned(void **state) {
    struct session *session;

    (void)state;
    open_rig(16, 4, false);
    session = make(UID, "a");
    assert_int_equal(sessions_extend(sessions, session, tokens, 300), 0);
    serve(session, 4);
    assert_int_equal(n_found(session), 256);
    assert_int_equal(sessions_pin(sessions, session), 0);
    assert_int_equal(sessions_pin(sessions, session), 0);
    assert_int_equal(n_pinned(KV_TARGET_FULL), 4);
    kv_store_evict_all(rig.store);
    assert_int_equal(n_found(session), 256);
    sessions_unpin(sessions, session);
    sessions_unpin(sessions, session);
    kv_store_evict_all(rig.store);
    assert_int_equal(n_found(session), 0);
    close_rig();
}

static void pins_go_on_with_the_session(void **state) {
    struct session *session;

    (void)state;
    open_rig(5, 4, false);
    session = make(UID, "a");
    assert_int_equal(sessions_extend(sessions, session, tokens, 200), 0);
    serve(session, 3);
    assert_int_equal(sessions_pin(sessions, session), 0);
    assert_int_equal(n_pinned(KV_TARGET_FULL), 3);
    assert_int_equal(sessions_extend(sessions, session, tokens, 320), 0);
    assert_int_equal(n_pinned(KV_TARGET_FULL), 3); /* what is new has not been served yet */
    serve(session, 5);
    assert_int_equal(sessions_extend(sessions, session, tokens, 400), 0);
    assert_int_equal(n_pinned(KV_TARGET_FULL), 5);
    serve(session, 6);
    assert_int_equal(sessions_extend(sessions, session, tokens, 410), 0);
    assert_true(session->is_pinned);
    assert_int_equal(n_pinned(KV_TARGET_FULL), 5); /* more is not allowed: it keeps what it had */
    sessions_drop(sessions, session);
    assert_int_equal(n_pinned(KV_TARGET_FULL), 0);
    close_rig();
}

static void pins_that_were_let_go_are_taken_again(void **state) {
    struct session *session;

    (void)state;
    open_rig(16, 4, false);
    session = make(UID, "a");
    assert_int_equal(sessions_extend(sessions, session, tokens, 300), 0);
    serve(session, 4);
    assert_int_equal(sessions_pin(sessions, session), 0);
    sessions_let_go(sessions, session);
    assert_true(session->is_pinned);
    assert_int_equal(n_pinned(KV_TARGET_FULL), 0);
    kv_store_evict_all(rig.store);
    sessions_hold_again(sessions, session);
    assert_int_equal(n_pinned(KV_TARGET_FULL), 0); /* nothing is there */
    serve(session, 4);
    sessions_hold_again(sessions, session);
    assert_int_equal(n_pinned(KV_TARGET_FULL), 4);
    assert_int_equal(n_pinned(KV_TARGET_STATE), 1);
    sessions_unpin(sessions, session);
    sessions_hold_again(sessions, session); /* not a pinned one */
    assert_int_equal(n_pinned(KV_TARGET_FULL), 0);
    close_rig();
}

/* As a record may tell that was written when contexts were longer. */
static void what_is_longer_than_the_context_is_kept_and_not_looked_for(void **state) {
    static int32_t many[2 * N_CONTEXT];
    struct session *session;

    (void)state;
    open_rig(16, 4, false);
    session = make(UID, "a");
    assert_int_equal(sessions_extend(sessions, session, many, 2 * N_CONTEXT), 0);
    assert_int_equal(session->n, 2 * N_CONTEXT);
    assert_int_equal(sessions_n_pages(session), N_CONTEXT / PAGE_TOKENS);
    assert_int_equal(sessions_pin(sessions, session), 0);
    assert_int_equal(n_found(session), 0);
    close_rig();
}

static void tokens_of_a_users_sessions_are_counted_together(void **state) {
    (void)state;
    open_rig(16, 4, false);
    assert_int_equal(sessions_extend(sessions, make(UID, "a"), tokens, 300), 0);
    assert_int_equal(sessions_extend(sessions, make(UID, "b"), tokens, 100), 0);
    assert_int_equal(sessions_extend(sessions, make(UID + 1, "a"), tokens, 500), 0);
    assert_int_equal(sessions_tokens(sessions, UID), 400);
    assert_true(sessions_have_room(sessions, UID, 100, 500));
    assert_false(sessions_have_room(sessions, UID, 101, 500));
    assert_true(sessions_have_room(sessions, UID, 1000, 0));
    close_rig();
}

static void pins_have_a_limit_of_pages_and_of_restore_points(void **state) {
    struct session *a, *b, *c;

    (void)state;
    open_rig(5, 2, false);
    a = make(UID, "a");
    b = make(UID, "b");
    c = make(UID, "c");
    assert_int_equal(sessions_extend(sessions, a, tokens, 200), 0);
    assert_int_equal(sessions_extend(sessions, b, tokens + 100, 200), 0);
    assert_int_equal(sessions_extend(sessions, c, tokens + 200, 70), 0);
    serve(a, 3);
    serve(b, 3);
    serve(c, 1);
    assert_int_equal(sessions_pin(sessions, a), 0);
    assert_int_equal(sessions_pin(sessions, b), SESSIONS_E_NO_SPACE);
    assert_false(b->is_pinned);
    assert_int_equal(sessions_pin(sessions, c), 0);
    sessions_unpin(sessions, a);
    assert_int_equal(sessions_pin(sessions, b), 0);
    sessions_unpin(sessions, b);
    sessions_drop(sessions, a);
    a = make(UID, "d");
    assert_int_equal(sessions_extend(sessions, a, tokens + 300, 70), 0);
    serve(a, 1);
    assert_int_equal(sessions_pin(sessions, a), 0);
    assert_int_equal(sessions_extend(sessions, b, tokens + 100, 210), 0);
    assert_int_equal(sessions_pin(sessions, b),
                     SESSIONS_E_NO_SPACE); /* pages there are, restore points there are not */
    assert_int_equal(n_pinned(KV_TARGET_STATE), 2);
    close_rig();
}

static struct session *make_served(uid_t uid, const char *name, int first, int n) {
    struct session *session = make(uid, name);

    assert_int_equal(sessions_extend(sessions, session, tokens + first, n), 0);
    serve(session, (uint32_t)n / PAGE_TOKENS);
    return session;
}

static void pins_of_one_user_leave_room_for_those_of_others(void **state) {
    struct session *a, *b, *c, *d, *other;
    struct sessions_pinned pinned;

    (void)state;
    open_rig_of((struct sessions_pins){9, 5}, (struct sessions_pins){5, 2}, false);
    a = make_served(UID, "a", 0, 200);
    b = make_served(UID, "b", 100, 200);
    c = make_served(UID, "c", 200, 70);
    d = make_served(UID, "d", 300, 70);
    other = make_served(UID + 1, "a", 0, 250);
    assert_int_equal(sessions_pin(sessions, a), 0);
    assert_int_equal(sessions_pin(sessions, b), SESSIONS_E_QUOTA); /* 3 and 3 pages */
    assert_false(b->is_pinned);
    assert_int_equal(sessions_pin(sessions, c), 0);
    assert_int_equal(sessions_pin(sessions, d), SESSIONS_E_QUOTA); /* a third restore point */
    pinned = sessions_pinned(sessions, UID);
    assert_int_equal(pinned.has.n_pages, 3 + 1);
    assert_int_equal(pinned.has.n_states, 2);
    assert_int_equal(pinned.max.n_pages, 5);
    assert_int_equal(sessions_pin(sessions, other), 0);
    assert_int_equal(sessions_pinned(sessions, UID + 1).has.n_pages, 3);
    sessions_unpin(sessions, c);
    assert_int_equal(sessions_pin(sessions, d), 0);
    sessions_unpin(sessions, d);
    /* What is pinned grows no further than that either. */
    assert_int_equal(sessions_extend(sessions, a, tokens, N_CONTEXT), 0);
    serve(a, 5);
    sessions_hold_again(sessions, a);
    assert_int_equal(sessions_pinned(sessions, UID).has.n_pages, 5);
    serve(a, 6);
    sessions_hold_again(sessions, a);
    assert_int_equal(sessions_pinned(sessions, UID).has.n_pages, 5);
    close_rig();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_name_is_one_session_of_one_user),
        cmocka_unit_test(shared_prefixes_are_one_namespace),
        cmocka_unit_test(keys_grow_with_the_tokens),
        cmocka_unit_test(a_fork_has_the_first_tokens_and_goes_its_own_way),
        cmocka_unit_test(pinned_pages_stay_until_unpinned),
        cmocka_unit_test(pins_go_on_with_the_session),
        cmocka_unit_test(pins_that_were_let_go_are_taken_again),
        cmocka_unit_test(what_is_longer_than_the_context_is_kept_and_not_looked_for),
        cmocka_unit_test(tokens_of_a_users_sessions_are_counted_together),
        cmocka_unit_test(pins_have_a_limit_of_pages_and_of_restore_points),
        cmocka_unit_test(pins_of_one_user_leave_room_for_those_of_others),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
