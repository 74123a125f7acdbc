/* shelf: the host tier's copies: only whole ones are found, pinned ones stay, the longest unused leave. */
#include "shelf.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <cmocka.h>

enum { PAYLOAD = 100 };

struct rig {
    const struct backend *backend;
    struct device *device;
    struct kv_shelf *shelf;
};

static struct rig rig_open_shared(uint32_t n_pages, uint32_t n_states, uint32_t share_percent) {
    struct rig rig = {.backend = backend_find("cpu")};
    struct kv_shelf_options options = {
        .backend = rig.backend, .alignment = FORMAT_ALIGN_MIN, .share_percent = share_percent};

    assert_int_equal(rig.backend->open(&(struct backend_options){.n_threads = 1}, &rig.device), 0);
    options.device = rig.device;
    options.group[KV_TARGET_FULL].payload_bytes = options.group[KV_TARGET_STATE].payload_bytes = PAYLOAD;
    options.group[KV_TARGET_FULL].n_slots = n_pages;
    options.group[KV_TARGET_STATE].n_slots = n_states;
    assert_int_equal(kv_shelf_open(&options, &rig.shelf), 0);
    return rig;
}

static struct rig rig_open(uint32_t n_pages, uint32_t n_states) {
    return rig_open_shared(n_pages, n_states, 0);
}

static void rig_close(struct rig *rig) {
    assert_null(kv_shelf_check(rig->shelf));
    kv_shelf_close(rig->shelf);
    rig->backend->close(rig->device);
}

/* Pages whose keys meet in one chain of the table, so that the rest of the key and the tokens must tell. */
static struct kv_page_name name(int32_t *tokens, int which) {
    struct kv_page_name name = {.page_idx = (uint32_t)which, .tokens = tokens};

    name.key.bytes[8] = (uint8_t)which;
    for (int i = 0; i < PAGE_TOKENS; i++)
        tokens[i] = which * 100 + i;
    return name;
}

static uint32_t fill(struct rig *rig, int which, enum kv_group group) {
    int32_t tokens[PAGE_TOKENS];
    struct kv_page_name page = name(tokens, which);
    uint32_t record;
    void *payload;

    assert_int_equal(kv_shelf_reserve(rig->shelf, &page, group, &record, &payload), 0);
    memset(payload, which, PAYLOAD);
    kv_shelf_filled(rig->shelf, record, group, (uint64_t)which + 1);
    assert_null(kv_shelf_check(rig->shelf));
    return record;
}

/* The same as another user's. */
static uint32_t fill_for(struct rig *rig, uint32_t uid, int which, enum kv_group group) {
    int32_t tokens[PAGE_TOKENS];
    struct kv_page_name page = name(tokens, which);
    uint32_t record;
    void *payload;

    page.uid = uid;
    assert_int_equal(kv_shelf_reserve(rig->shelf, &page, group, &record, &payload), 0);
    kv_shelf_filled(rig->shelf, record, group, 1);
    return record;
}

static bool has(const struct rig *rig, int which, enum kv_group group) {
    int32_t tokens[PAGE_TOKENS];
    struct kv_page_name page = name(tokens, which);

    return kv_shelf_has(rig->shelf, kv_shelf_find(rig->shelf, &page), group);
}

static int reserve(const struct rig *rig, int which, enum kv_group group, uint32_t *ret_record) {
    int32_t tokens[PAGE_TOKENS];
    struct kv_page_name page = name(tokens, which);
    void *payload;

    return kv_shelf_reserve(rig->shelf, &page, group, ret_record, &payload);
}

static void a_copy_is_found_only_once_it_is_whole(void **state) {
    struct rig rig = rig_open(2, 1);
    uint32_t record, other;

    (void)state;
    assert_int_equal(reserve(&rig, 1, KV_TARGET_FULL, &record), 0);
    assert_false(has(&rig, 1, KV_TARGET_FULL));
    assert_int_equal(reserve(&rig, 1, KV_TARGET_FULL, &other), KV_SHELF_E_EXISTS);
    kv_shelf_filled(rig.shelf, record, KV_TARGET_FULL, 77);
    assert_true(has(&rig, 1, KV_TARGET_FULL));
    assert_false(has(&rig, 1, KV_TARGET_STATE));
    assert_int_equal(kv_shelf_checksum(rig.shelf, record, KV_TARGET_FULL), 77);
    assert_int_equal(reserve(&rig, 1, KV_TARGET_FULL, &other), KV_SHELF_E_EXISTS);
    rig_close(&rig);
}

static void an_abandoned_copy_leaves_nothing_behind(void **state) {
    struct rig rig = rig_open(1, 1);
    struct kv_shelf_group_stats stats;
    int32_t tokens[PAGE_TOKENS];
    struct kv_page_name page = name(tokens, 1);
    uint32_t record;

    (void)state;
    assert_int_equal(reserve(&rig, 1, KV_TARGET_FULL, &record), 0);
    kv_shelf_abandon(rig.shelf, record, KV_TARGET_FULL);
    assert_int_equal(kv_shelf_find(rig.shelf, &page), KV_NO_RECORD);
    kv_shelf_stats(rig.shelf, KV_TARGET_FULL, &stats);
    assert_int_equal(stats.n_free, 1);
    fill(&rig, 2, KV_TARGET_FULL);
    rig_close(&rig);
}

static void tokens_decide_where_keys_are_the_same(void **state) {
    struct rig rig = rig_open(2, 1);
    int32_t tokens[PAGE_TOKENS];
    struct kv_page_name page = name(tokens, 1);

    (void)state;
    fill(&rig, 1, KV_TARGET_FULL);
    assert_int_not_equal(kv_shelf_find(rig.shelf, &page), KV_NO_RECORD);
    tokens[PAGE_TOKENS - 1]++;
    assert_int_equal(kv_shelf_find(rig.shelf, &page), KV_NO_RECORD);
    tokens[PAGE_TOKENS - 1]--;
    page.page_idx++;
    assert_int_equal(kv_shelf_find(rig.shelf, &page), KV_NO_RECORD);
    rig_close(&rig);
}

static void the_longest_unused_makes_room(void **state) {
    struct rig rig = rig_open(3, 1);
    uint32_t first;

    (void)state;
    first = fill(&rig, 1, KV_TARGET_FULL);
    fill(&rig, 2, KV_TARGET_FULL);
    fill(&rig, 3, KV_TARGET_FULL);
    kv_shelf_pin(rig.shelf, first, KV_TARGET_FULL);
    kv_shelf_unpin(rig.shelf, first, KV_TARGET_FULL);
    fill(&rig, 4, KV_TARGET_FULL);
    assert_true(has(&rig, 1, KV_TARGET_FULL) && !has(&rig, 2, KV_TARGET_FULL) && has(&rig, 3, KV_TARGET_FULL));
    rig_close(&rig);
}

static void groups_do_not_displace_each_other(void **state) {
    struct rig rig = rig_open(2, 1);

    (void)state;
    fill(&rig, 1, KV_TARGET_STATE);
    for (int i = 1; i < 9; i++)
        fill(&rig, i, KV_TARGET_FULL);
    assert_true(has(&rig, 1, KV_TARGET_STATE) && !has(&rig, 1, KV_TARGET_FULL));
    rig_close(&rig);
}

static void a_full_shelf_says_so_and_keeps_what_is_pinned(void **state) {
    struct rig rig = rig_open(2, 1);
    uint32_t pinned = fill(&rig, 1, KV_TARGET_FULL), filling, record;
    const char *payload = kv_shelf_pin(rig.shelf, pinned, KV_TARGET_FULL);

    (void)state;
    assert_int_equal(reserve(&rig, 2, KV_TARGET_FULL, &filling), 0);
    assert_int_equal(reserve(&rig, 3, KV_TARGET_FULL, &record), KV_SHELF_E_FULL);
    assert_int_equal(reserve(&rig, 3, KV_DRAFT_FULL, &record), KV_SHELF_E_FULL); /* no such group */
    assert_int_equal(kv_shelf_evict_bytes(rig.shelf, UINT64_MAX), 0);
    assert_int_equal(payload[PAYLOAD - 1], 1);
    assert_null(kv_shelf_check(rig.shelf));
    kv_shelf_unpin(rig.shelf, pinned, KV_TARGET_FULL);
    kv_shelf_abandon(rig.shelf, filling, KV_TARGET_FULL);
    rig_close(&rig);
}

static void a_dropped_copy_stays_under_its_pins_but_is_not_found(void **state) {
    struct rig rig = rig_open(1, 1);
    uint32_t record = fill(&rig, 1, KV_TARGET_FULL), other;
    const char *payload = kv_shelf_pin(rig.shelf, record, KV_TARGET_FULL);

    (void)state;
    kv_shelf_pin(rig.shelf, record, KV_TARGET_FULL);
    kv_shelf_drop(rig.shelf, record, KV_TARGET_FULL);
    assert_false(has(&rig, 1, KV_TARGET_FULL));
    assert_int_equal(reserve(&rig, 2, KV_TARGET_FULL, &other), KV_SHELF_E_FULL);
    kv_shelf_unpin(rig.shelf, record, KV_TARGET_FULL);
    assert_null(kv_shelf_check(rig.shelf));
    assert_int_equal(payload[0], 1);
    kv_shelf_unpin(rig.shelf, record, KV_TARGET_FULL);
    fill(&rig, 1, KV_TARGET_FULL);
    rig_close(&rig);
}

static void evicting_drops_no_more_than_asked(void **state) {
    struct rig rig = rig_open(4, 1);

    (void)state;
    for (int i = 1; i <= 4; i++)
        fill(&rig, i, KV_TARGET_FULL);
    assert_int_equal(kv_shelf_evict_bytes(rig.shelf, 0), 0);
    assert_int_equal(kv_shelf_evict_bytes(rig.shelf, PAYLOAD + 1), 2 * PAYLOAD);
    assert_true(!has(&rig, 2, KV_TARGET_FULL) && has(&rig, 3, KV_TARGET_FULL));
    rig_close(&rig);
}

static void evicting_takes_the_longest_unused_of_all_groups(void **state) {
    struct rig rig = rig_open(2, 1);

    (void)state;
    fill(&rig, 1, KV_TARGET_STATE);
    fill(&rig, 1, KV_TARGET_FULL);
    kv_shelf_evict_bytes(rig.shelf, 1);
    assert_true(has(&rig, 1, KV_TARGET_FULL) && !has(&rig, 1, KV_TARGET_STATE));
    rig_close(&rig);
}

static void one_users_copies_leave_and_pinned_ones_when_unpinned(void **state) {
    struct rig rig = rig_open(4, 4);
    uint32_t pinned;

    (void)state;
    fill_for(&rig, 7, 1, KV_TARGET_FULL);
    fill_for(&rig, 7, 1, KV_TARGET_STATE);
    fill_for(&rig, 8, 2, KV_TARGET_FULL);
    pinned = fill_for(&rig, 7, 3, KV_TARGET_FULL);
    kv_shelf_pin(rig.shelf, pinned, KV_TARGET_FULL);
    assert_int_equal(kv_shelf_purge(rig.shelf, 7), 3 * PAYLOAD);
    assert_null(kv_shelf_check(rig.shelf));
    assert_false(has(&rig, 1, KV_TARGET_FULL));
    assert_false(has(&rig, 1, KV_TARGET_STATE));
    assert_true(has(&rig, 2, KV_TARGET_FULL));
    assert_false(has(&rig, 3, KV_TARGET_FULL));
    kv_shelf_unpin(rig.shelf, pinned, KV_TARGET_FULL);
    assert_null(kv_shelf_check(rig.shelf));
    assert_int_equal(kv_shelf_purge(rig.shelf, 7), 0);
    rig_close(&rig);
}

static void a_flood_of_one_user_leaves_the_other_his_share(void **state) {
    struct rig rig = rig_open_shared(20, 4, 25);
    int32_t tokens[PAGE_TOKENS];
    struct kv_page_name page;
    uint32_t pinned[15], record;
    void *payload;

    (void)state;
    for (int i = 0; i < 7; i++) /* two more than the share */
        fill_for(&rig, 7, i, KV_TARGET_FULL);
    fill_for(&rig, 7, 0, KV_TARGET_STATE);
    for (int i = 100; i < 200; i++) {
        fill_for(&rig, 8, i, KV_TARGET_FULL);
        fill_for(&rig, 8, i, KV_TARGET_STATE);
    }
    assert_null(kv_shelf_check(rig.shelf));
    for (int i = 0; i < 7; i++)
        assert_int_equal(has(&rig, i, KV_TARGET_FULL), i >= 2);
    assert_true(has(&rig, 0, KV_TARGET_STATE));
    assert_int_equal(kv_share_n_users(kv_shelf_share(rig.shelf)), 2);

    for (int i = 0; i < 15; i++) { /* all that he has is on its way: he gets no more */
        page = name(tokens, 185 + i);
        pinned[i] = kv_shelf_find(rig.shelf, &page);
        kv_shelf_pin(rig.shelf, pinned[i], KV_TARGET_FULL);
    }
    page = name(tokens, 300);
    page.uid = 8;
    assert_int_equal(kv_shelf_reserve(rig.shelf, &page, KV_TARGET_FULL, &record, &payload), KV_SHELF_E_FULL);
    page.uid = KV_NO_UID; /* but what runs gets it */
    assert_int_equal(kv_shelf_reserve(rig.shelf, &page, KV_TARGET_FULL, &record, &payload), 0);
    assert_false(has(&rig, 2, KV_TARGET_FULL));
    assert_null(kv_shelf_check(rig.shelf));
    kv_shelf_abandon(rig.shelf, record, KV_TARGET_FULL);
    for (int i = 0; i < 15; i++)
        kv_shelf_unpin(rig.shelf, pinned[i], KV_TARGET_FULL);
    rig_close(&rig);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_copy_is_found_only_once_it_is_whole),
        cmocka_unit_test(an_abandoned_copy_leaves_nothing_behind),
        cmocka_unit_test(tokens_decide_where_keys_are_the_same),
        cmocka_unit_test(the_longest_unused_makes_room),
        cmocka_unit_test(groups_do_not_displace_each_other),
        cmocka_unit_test(a_full_shelf_says_so_and_keeps_what_is_pinned),
        cmocka_unit_test(a_dropped_copy_stays_under_its_pins_but_is_not_found),
        cmocka_unit_test(evicting_drops_no_more_than_asked),
        cmocka_unit_test(evicting_takes_the_longest_unused_of_all_groups),
        cmocka_unit_test(a_flood_of_one_user_leaves_the_other_his_share),
        cmocka_unit_test(one_users_copies_leave_and_pinned_ones_when_unpinned),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
