/* Who gives up a slot: nobody loses what is in his share, and what is beyond leaves in the order of its last use. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "share.h"

#define G KV_TARGET_FULL
enum { N_SLOTS = 100 };

struct rig {
    struct kv_share share;
    uint64_t orders[KV_SHARE_OWNERS];
};

static struct rig rig_of(uint32_t percent) {
    struct rig rig;

    kv_share_init(&rig.share, percent);
    memset(rig.orders, 0xff, sizeof rig.orders);
    return rig;
}

/* A user with so many slots, of which the longest unused was used at that time. */
static uint32_t add(struct rig *rig, uint32_t uid, uint32_t n, uint64_t oldest) {
    uint32_t owner = kv_share_number(&rig->share, uid);

    for (uint32_t i = 0; i < n; i++)
        kv_share_hold(&rig->share, owner, G);
    rig->orders[owner] = oldest;
    return owner;
}

static uint32_t loser(struct rig *rig, uint32_t wanting) {
    return kv_share_loser(&rig->share, G, N_SLOTS, wanting, rig->orders);
}

static void without_shares_the_longest_unused_leaves(void **state) {
    struct rig rig = rig_of(0);
    uint32_t a = add(&rig, 1, 99, 20), b = add(&rig, 2, 1, 10);

    (void)state;
    assert_int_equal(loser(&rig, a), b);
    assert_int_equal(loser(&rig, b), b);
    assert_int_equal(rig.share.n_kept, 0);
}

static void what_is_in_a_share_stays_however_old_it_is(void **state) {
    struct rig rig = rig_of(25);
    uint32_t a = add(&rig, 1, 75, 20), b = add(&rig, 2, 25, 10);

    (void)state;
    assert_int_equal(loser(&rig, a), a);
    assert_int_equal(loser(&rig, b), a);
    assert_int_equal(rig.share.n_kept, 2);
    kv_share_hold(&rig.share, b, G); /* one more than its share */
    assert_int_equal(loser(&rig, a), b);
    assert_int_equal(loser(&rig, KV_SHARE_NOBODY), b);
    assert_int_equal(rig.share.n_kept, 2);
}

static void many_users_have_equal_parts(void **state) {
    struct rig rig = rig_of(50);
    uint32_t users[5];

    (void)state;
    for (uint32_t i = 0; i < 5; i++)
        users[i] = add(&rig, 10 + i, i < 4 ? 20 : 19, i);
    kv_share_hold(&rig.share, users[3], G);
    for (uint32_t i = 0; i < 5; i++)
        assert_int_equal(loser(&rig, users[i]), users[3]);
    kv_share_let_go(&rig.share, users[3], G);
    kv_share_hold(&rig.share, users[4], G);
    for (uint32_t i = 0; i < 5; i++) /* each has his part: who wants more takes it from himself */
        assert_int_equal(loser(&rig, users[i]), users[i]);
    assert_int_equal(loser(&rig, kv_share_number(&rig.share, 99)), users[0]); /* the parts are smaller now */
}

static void who_has_nothing_that_may_leave_takes_nothing_from_a_share(void **state) {
    struct rig rig = rig_of(50);
    uint32_t a = add(&rig, 1, 50, UINT64_MAX), b = add(&rig, 2, 50, 10);

    (void)state;
    assert_int_equal(loser(&rig, a), KV_SHARE_OWNERS);
    assert_int_equal(loser(&rig, KV_SHARE_NOBODY), b); /* but what runs goes on */
}

static void a_number_is_another_users_once_nothing_is_held_under_it(void **state) {
    struct rig rig = rig_of(50);
    uint32_t a = add(&rig, 1, 1, 1), b = add(&rig, 2, 1, 1);

    (void)state;
    assert_int_not_equal(a, b);
    assert_int_equal(kv_share_number(&rig.share, 1), a);
    assert_int_equal(kv_share_n_users(&rig.share), 2);
    kv_share_let_go(&rig.share, a, G);
    assert_int_equal(kv_share_number(&rig.share, 3), a);
    assert_int_equal(kv_share_n_users(&rig.share), 1);
    assert_int_equal(kv_share_number(&rig.share, KV_NO_UID), KV_SHARE_NOBODY);
}

static void users_beyond_the_numbers_share_the_last(void **state) {
    struct rig rig = rig_of(50);
    uint32_t last = KV_SHARE_OWNERS - 1;

    (void)state;
    for (uint32_t i = 1; i < KV_SHARE_OWNERS; i++)
        assert_int_equal(add(&rig, 1000 + i, 1, i), i);
    assert_int_equal(add(&rig, 5, 1, 100), last);
    assert_int_equal(add(&rig, 6, 1, 100), last);
    assert_int_equal(rig.share.owners[last].n_held[G], 3);
    assert_int_equal(kv_share_n_held(&rig.share, G), KV_SHARE_OWNERS + 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(without_shares_the_longest_unused_leaves),
        cmocka_unit_test(what_is_in_a_share_stays_however_old_it_is),
        cmocka_unit_test(many_users_have_equal_parts),
        cmocka_unit_test(who_has_nothing_that_may_leave_takes_nothing_from_a_share),
        cmocka_unit_test(a_number_is_another_users_once_nothing_is_held_under_it),
        cmocka_unit_test(users_beyond_the_numbers_share_the_last),
    };

    return cmocka_run_group_tests_name("share", tests, NULL, NULL);
}
