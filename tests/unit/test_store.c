/* What a store finds, keeps and lets go, case by case; prop_store.c holds the same against a model. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "../fake/kv_rig.h"

enum { WINDOW = 2 * PAGE_TOKENS, ALL = KV_RIG_PAGES_MAX };

static struct kv_rig rig_of(uint32_t target, uint32_t state, uint32_t full, uint32_t sliding, uint32_t n_records) {
    const uint32_t n_slots[KV_GROUP_N] = {target, state, full, sliding};

    return kv_rig_open(n_slots, WINDOW, n_records);
}

/* Runs pages up to n_pages of the seq's list through a device: takes slots, fills them, publishes. */
static void run(struct kv_seq *seq, struct kv_rig *rig, uint32_t n_pages) {
    bool taken[KV_GROUP_N];

    for (uint32_t page = seq->n_filled; page < n_pages; page++) {
        for (int g = 0; g < KV_GROUP_N; g++)
            if (g != KV_TARGET_STATE && kv_store_arena(rig->store, (enum kv_group)g) != NULL)
                if (kv_seq_take(seq, rig, (enum kv_group)g, page) != 0)
                    assert_true(kv_group_is_draft((enum kv_group)g));
        seq->n_filled++;
        assert_int_equal(kv_seq_publish(seq, page, taken), 0);
        kv_rig_check(rig);
    }
    kv_seq_check(seq, rig);
}

static void restore_point(struct kv_seq *seq, struct kv_rig *rig, uint32_t n_pages) {
    bool taken;

    assert_int_equal(kv_seq_publish_state(seq, rig, n_pages, &taken), 0);
    assert_true(taken);
    kv_rig_check(rig);
}

/* A finished request: all pages of the list, a restore point at its end. */
static void leave_behind(struct kv_rig *rig, uint32_t uid, const char *kinds) {
    struct kv_seq seq;

    kv_seq_init(&seq, rig, uid, kinds);
    kv_seq_match(&seq, rig);
    run(&seq, rig, seq.n_pages);
    if (seq.match.n_tokens < seq.n_pages * PAGE_TOKENS)
        restore_point(&seq, rig, seq.n_pages);
    kv_seq_deinit(&seq, rig);
    kv_rig_check(rig);
}

/* b in pages, and how far pages match. */
static void assert_finds(struct kv_rig *rig, uint32_t uid, const char *kinds, uint32_t n_hit, uint32_t n_full) {
    struct kv_seq seq;
    struct kv_match match;

    kv_seq_init(&seq, rig, uid, kinds);
    match = kv_seq_lookup(&seq, rig);
    assert_int_equal(match.n_tokens, n_hit * PAGE_TOKENS);
    assert_int_equal(match.n_full_tokens, n_full * PAGE_TOKENS);
    kv_seq_match(&seq, rig);
    assert_memory_equal(&match, &seq.match, sizeof match);
    kv_rig_check(rig);
    kv_seq_deinit(&seq, rig);
}

static struct kv_store_stats stats_of(const struct kv_rig *rig) {
    struct kv_store_stats stats;

    kv_store_stats(rig->store, &stats);
    return stats;
}

/* ---- hits ---- */

static void empty_store_finds_nothing(void **state) {
    struct kv_rig rig = rig_of(8, 2, 8, 8, 8);
    struct kv_seq seq;

    (void)state;
    kv_seq_init(&seq, &rig, 0, "abc");
    kv_seq_match(&seq, &rig);
    assert_int_equal(seq.match.n_tokens, 0);
    assert_int_equal(seq.match.n_full_tokens, 0);
    assert_int_equal(seq.match.draft_valid_from, 0);
    assert_int_equal(seq.match.state_slot, KV_NO_SLOT);
    kv_store_match(rig.store, &seq.lease, NULL, NULL, 0, &seq.match); /* a prompt shorter than a page */
    assert_int_equal(seq.match.n_full_tokens, 0);
    kv_seq_deinit(&seq, &rig);
    assert_int_equal(stats_of(&rig).n_matches, 2);
    assert_int_equal(stats_of(&rig).n_hits, 0);
    kv_rig_close(&rig);
}

static void a_prefix_is_found_up_to_its_last_restore_point(void **state) {
    struct kv_rig rig = rig_of(16, 4, 16, 16, 16);
    struct kv_seq seq;

    (void)state;
    kv_seq_init(&seq, &rig, 0, "abcdef");
    run(&seq, &rig, 6);
    assert_finds(&rig, 0, "abcdef", 0, 6); /* no restore point yet */
    restore_point(&seq, &rig, 2);
    restore_point(&seq, &rig, 4);
    kv_seq_deinit(&seq, &rig);
    assert_finds(&rig, 0, "a", 0, 1);
    assert_finds(&rig, 0, "ab", 2, 2);
    assert_finds(&rig, 0, "abc", 2, 3);
    assert_finds(&rig, 0, "abcd", 4, 4);
    assert_finds(&rig, 0, "abcdef", 4, 6);
    assert_finds(&rig, 0, "abcdefg", 4, 6);
    assert_finds(&rig, 0, "abxdef", 2, 2);
    assert_finds(&rig, 0, "xbcdef", 0, 0);
    kv_rig_close(&rig);
}

static void branches_share_their_beginning(void **state) {
    struct kv_rig rig = rig_of(16, 4, 16, 16, 16);

    (void)state;
    leave_behind(&rig, 0, "ab");
    leave_behind(&rig, 0, "abcd");
    leave_behind(&rig, 0, "abxy");
    assert_int_equal(stats_of(&rig).n_records, 6);
    assert_finds(&rig, 0, "abcd", 4, 4);
    assert_finds(&rig, 0, "abxy", 4, 4);
    assert_finds(&rig, 0, "abz", 2, 2);
    kv_rig_close(&rig);
}

static void pages_of_another_user_are_not_found(void **state) {
    struct kv_rig rig = rig_of(16, 4, 16, 16, 16);

    (void)state;
    leave_behind(&rig, 1000, "abc");
    assert_finds(&rig, 1000, "abc", 3, 3);
    assert_finds(&rig, 1001, "abc", 0, 0);
    kv_rig_close(&rig);
}

static void hashes_narrow_and_tokens_decide(void **state) {
    struct kv_rig rig = rig_of(16, 4, 16, 16, 16);
    struct kv_seq seq;

    (void)state;
    leave_behind(&rig, 0, "abc");
    kv_seq_init(&seq, &rig, 0, "abc");
    seq.tokens[2 * PAGE_TOKENS - 1]++; /* the keys are those of the old tokens: a collision */
    kv_seq_match(&seq, &rig);
    assert_int_equal(seq.match.n_full_tokens, PAGE_TOKENS);
    run(&seq, &rig, 3); /* both live side by side */
    assert_int_equal(stats_of(&rig).n_records, 5);
    assert_finds(&rig, 0, "abc", 3, 3);
    kv_seq_deinit(&seq, &rig);
    kv_rig_close(&rig);
}

static void a_match_pins_all_of_the_hit(void **state) {
    struct kv_rig rig = rig_of(16, 4, 16, 16, 16);
    struct kv_store_stats stats;
    struct kv_seq seq;

    (void)state;
    leave_behind(&rig, 0, "abcdef");
    kv_seq_init(&seq, &rig, 0, "abcdef");
    kv_seq_match(&seq, &rig);
    assert_int_equal(seq.match.n_tokens, 6 * PAGE_TOKENS);
    assert_int_equal(seq.match.draft_valid_from, 0);
    kv_store_evict_all(rig.store);
    kv_rig_check(&rig);
    kv_seq_check(&seq, &rig);
    stats = stats_of(&rig);
    assert_int_equal(stats.group[KV_TARGET_FULL].n_pinned, 6);
    assert_int_equal(stats.group[KV_TARGET_STATE].n_pinned, 1);
    assert_int_equal(stats.group[KV_DRAFT_FULL].n_pinned, 6);
    assert_int_equal(stats.group[KV_DRAFT_SLIDING].n_indexed, 2); /* the window; the four before it are gone */
    for (uint32_t page = 0; page < 6; page++) {
        assert_int_not_equal(kv_lease_slot(&seq.lease, KV_DRAFT_FULL, page), KV_NO_SLOT);
        assert_int_equal(kv_lease_slot(&seq.lease, KV_DRAFT_SLIDING, page) != KV_NO_SLOT, page >= 4);
        assert_int_equal(kv_lease_slot(&seq.lease, KV_TARGET_STATE, page) != KV_NO_SLOT, page == 5);
    }
    assert_int_equal(kv_lease_slot(&seq.lease, KV_TARGET_FULL, 6), KV_NO_SLOT);
    kv_seq_deinit(&seq, &rig);
    kv_store_evict_all(rig.store);
    assert_finds(&rig, 0, "abcdef", 0, 0);
    kv_rig_close(&rig);
}

static void a_restore_point_stays_until_its_copy_is_done(void **state) {
    struct kv_rig rig = rig_of(16, 1, 0, 0, 16);
    struct kv_seq seq;
    bool taken;

    (void)state;
    leave_behind(&rig, 0, "ab");
    kv_seq_init(&seq, &rig, 0, "abcd");
    kv_seq_match(&seq, &rig);
    run(&seq, &rig, 4);
    assert_int_equal(kv_store_n_available(rig.store, KV_TARGET_STATE), 0);
    assert_int_equal(kv_seq_publish_state(&seq, &rig, 4, &taken), KV_STORE_E_FULL);
    kv_lease_drop_state(&seq.lease);
    assert_int_equal(kv_store_n_available(rig.store, KV_TARGET_STATE), 1);
    restore_point(&seq, &rig, 4);
    kv_lease_drop_state(&seq.lease); /* nothing is pinned: nothing happens */
    assert_finds(&rig, 0, "ab", 0, 2);
    assert_finds(&rig, 0, "abcd", 4, 4);
    kv_seq_deinit(&seq, &rig);
    kv_rig_close(&rig);
}

/* ---- publishing ---- */

static void second_of_two_equal_seqs_keeps_its_own_pages(void **state) {
    struct kv_rig rig = rig_of(16, 4, 16, 16, 16);
    struct kv_seq first, second;
    bool taken[KV_GROUP_N];

    (void)state;
    kv_seq_init(&first, &rig, 0, "ab");
    kv_seq_init(&second, &rig, 0, "ab");
    for (uint32_t page = 0; page < 2; page++) {
        kv_seq_take(&first, &rig, KV_TARGET_FULL, page);
        kv_seq_take(&second, &rig, KV_TARGET_FULL, page);
        first.n_filled = second.n_filled = page + 1;
        assert_int_equal(kv_seq_publish(&first, page, taken), 0);
        assert_true(taken[KV_TARGET_FULL]);
        assert_int_equal(kv_seq_publish(&second, page, taken), 0);
        assert_false(taken[KV_TARGET_FULL]);
        assert_int_not_equal(second.own[page][KV_TARGET_FULL], kv_lease_slot(&second.lease, KV_TARGET_FULL, page));
        kv_rig_check(&rig);
    }
    restore_point(&second, &rig, 2);
    assert_int_equal(kv_seq_publish_state(&first, &rig, 2, taken), 0);
    assert_false(taken[0]);
    assert_int_equal(stats_of(&rig).group[KV_TARGET_FULL].n_private, 2);
    assert_int_equal(stats_of(&rig).group[KV_TARGET_STATE].n_indexed, 1);
    kv_seq_deinit(&first, &rig);
    kv_store_evict_all(rig.store); /* the second still needs the shared ones: its next page will hang off them */
    assert_int_equal(stats_of(&rig).n_records, 2);
    kv_seq_deinit(&second, &rig);
    kv_rig_check(&rig);
    kv_rig_close(&rig);
}

static void a_draft_page_that_the_index_lacks_is_taken(void **state) {
    struct kv_rig rig = rig_of(16, 4, 16, 16, 16);
    struct kv_seq first, second;
    bool taken[KV_GROUP_N];

    (void)state;
    kv_seq_init(&first, &rig, 0, "a");
    kv_seq_take(&first, &rig, KV_TARGET_FULL, 0);
    kv_seq_publish(&first, 0, taken);
    kv_seq_init(&second, &rig, 0, "a");
    run(&second, &rig, 1);
    assert_int_not_equal(second.own[0][KV_TARGET_FULL], KV_NO_SLOT);
    assert_int_equal(second.own[0][KV_DRAFT_FULL], KV_NO_SLOT);
    assert_int_equal(second.own[0][KV_DRAFT_SLIDING], KV_NO_SLOT);
    assert_int_not_equal(kv_lease_slot(&second.lease, KV_DRAFT_FULL, 0), KV_NO_SLOT);
    assert_int_equal(kv_lease_slot(&first.lease, KV_DRAFT_FULL, 0), KV_NO_SLOT);
    kv_seq_deinit(&first, &rig);
    kv_seq_deinit(&second, &rig);
    kv_rig_close(&rig);
}

static void index_without_a_free_record_drops_what_is_needed_least(void **state) {
    struct kv_rig rig = rig_of(16, 4, 16, 16, 3);
    struct kv_seq seq;
    bool taken[KV_GROUP_N];

    (void)state;
    leave_behind(&rig, 0, "ab");
    kv_seq_init(&seq, &rig, 0, "xyzw");
    run(&seq, &rig, 3);
    assert_finds(&rig, 0, "ab", 0, 0);
    kv_seq_take(&seq, &rig, KV_TARGET_FULL, 3);
    assert_int_equal(kv_seq_publish(&seq, 3, taken), KV_STORE_E_FULL); /* all three are the seq's */
    kv_rig_check(&rig);
    assert_int_equal(seq.lease.n_pages, 3);
    kv_seq_deinit(&seq, &rig);
    kv_rig_close(&rig);
}

/* ---- who leaves ---- */

static void full_group_says_so_and_keeps_its_slots(void **state) {
    struct kv_rig rig = rig_of(4, 2, 4, 4, 16);
    struct kv_seq seq, other;

    (void)state;
    kv_seq_init(&seq, &rig, 0, "abcd");
    kv_seq_init(&other, &rig, 0, "x");
    run(&seq, &rig, 3);
    assert_int_equal(kv_seq_take(&seq, &rig, KV_TARGET_FULL, 3), 0);
    assert_int_equal(kv_store_n_available(rig.store, KV_TARGET_FULL), 0);
    assert_int_equal(kv_seq_take(&other, &rig, KV_TARGET_FULL, 0), KV_STORE_E_FULL);
    assert_int_equal(other.own[0][KV_TARGET_FULL], KV_NO_SLOT);
    kv_seq_check(&seq, &rig);
    kv_seq_end(&seq, &rig);
    assert_int_equal(kv_store_n_available(rig.store, KV_TARGET_FULL), 4);
    kv_seq_deinit(&seq, &rig);
    kv_seq_deinit(&other, &rig);
    kv_rig_close(&rig);
}

static void what_is_available_can_be_taken(void **state) {
    struct kv_rig rig = rig_of(16, 4, 9, 7, 16);
    struct kv_seq seq;

    (void)state;
    leave_behind(&rig, 0, "abcd");
    leave_behind(&rig, 0, "abxy");
    leave_behind(&rig, 0, "uvw");
    kv_seq_init(&seq, &rig, 0, "abc");
    run(&seq, &rig, 3); /* pins "abc", keeps three copies of its own */
    assert_int_equal(kv_store_n_available(rig.store, KV_TARGET_FULL), 16 - 3 - 3);
    for (int g = 0; g < KV_GROUP_N; g++) {
        uint32_t slots[16], n = 0;

        for (uint32_t left = kv_store_n_available(rig.store, (enum kv_group)g); left > 0; left--) {
            assert_int_equal(kv_store_n_available(rig.store, (enum kv_group)g), left);
            assert_int_equal(kv_store_take(rig.store, (enum kv_group)g, &slots[n++]), 0);
            kv_rig_check(&rig);
        }
        assert_int_equal(kv_store_take(rig.store, (enum kv_group)g, &slots[n]), KV_STORE_E_FULL);
        while (n > 0)
            kv_store_give(rig.store, (enum kv_group)g, slots[--n]);
    }
    kv_seq_check(&seq, &rig);
    kv_seq_deinit(&seq, &rig);
    kv_rig_close(&rig);
}

static void burst_of_one_off_prompts_leaves_leased_pages_alone(void **state) {
    struct kv_rig rig = rig_of(12, 4, 12, 12, 12);
    struct kv_seq kept;
    char kinds[] = "A!!!";

    (void)state;
    leave_behind(&rig, 0, "abcd");
    kv_seq_init(&kept, &rig, 0, "abcd");
    kv_seq_match(&kept, &rig);
    for (int i = 0; i < 50; i++) {
        kinds[0] = (char)('A' + i);
        leave_behind(&rig, 0, kinds);
    }
    kv_seq_check(&kept, &rig);
    assert_finds(&rig, 0, "abcd", 4, 4);
    kv_seq_deinit(&kept, &rig);
    kv_rig_close(&rig);
}

static void a_flood_of_one_user_leaves_the_other_his_share(void **state) {
    static const uint32_t n_slots[KV_GROUP_N] = {[KV_TARGET_FULL] = 20, [KV_TARGET_STATE] = 8};
    struct kv_rig rig = kv_rig_open_shared(n_slots, WINDOW, 20, 25);
    uint32_t slots[20];

    (void)state;
    leave_behind(&rig, 2, "abcd");
    for (int kind = 'A'; kind <= 'Z'; kind++)
        leave_behind(&rig, 1, (char[]){(char)kind, 'x', 'y', '\0'});
    kv_rig_check(&rig);
    assert_finds(&rig, 2, "abcd", 4, 4);
    assert_finds(&rig, 1, "Zxy", 3, 3);
    for (int i = 0; i < 20; i++) { /* who runs gets all there is, and what is in shares last */
        assert_finds(&rig, 2, "abcd", i < 17 ? 4 : 0, i < 17 ? 4 : 20 - (uint32_t)i);
        assert_int_equal(kv_store_n_available(rig.store, KV_TARGET_FULL), 20 - i);
        assert_int_equal(kv_store_take(rig.store, KV_TARGET_FULL, &slots[i]), 0);
    }
    for (int i = 0; i < 20; i++)
        kv_store_give(rig.store, KV_TARGET_FULL, slots[i]);
    kv_rig_close(&rig);
}

static void longest_unused_chain_leaves_from_its_end(void **state) {
    struct kv_rig rig = rig_of(9, 9, 0, 0, 9);
    struct kv_seq seq;

    (void)state;
    leave_behind(&rig, 0, "abc");
    leave_behind(&rig, 0, "xyz");
    leave_behind(&rig, 0, "a"); /* the first page of the oldest chain is used again, and gets a restore point */
    kv_seq_init(&seq, &rig, 0, "mmmmmmmmmmmm");
    run(&seq, &rig, 3);
    assert_finds(&rig, 0, "abc", 3, 3);
    assert_finds(&rig, 0, "xyz", 3, 3); /* from now on the chain used last */
    run(&seq, &rig, 4);
    assert_finds(&rig, 0, "ab", 1, 2); /* "c" left, with its restore point; this look makes "a", "ab" the last used */
    run(&seq, &rig, 5);
    assert_finds(&rig, 0, "ab", 1, 1); /* beyond the last restore point */
    run(&seq, &rig, 8);
    assert_finds(&rig, 0, "xyz", 0, 0);
    assert_finds(&rig, 0, "a", 1, 1);
    kv_seq_deinit(&seq, &rig);
    kv_rig_close(&rig);
}

static void pages_beyond_the_last_restore_point_leave_first(void **state) {
    struct kv_rig rig = rig_of(8, 8, 0, 0, 8);
    struct kv_seq seq;

    (void)state;
    leave_behind(&rig, 0, "old");
    kv_seq_init(&seq, &rig, 0, "newer");
    run(&seq, &rig, 5);
    restore_point(&seq, &rig, 3);
    kv_seq_end(&seq, &rig);
    kv_seq_deinit(&seq, &rig);
    kv_seq_init(&seq, &rig, 0, "mm");
    run(&seq, &rig, 2);
    assert_finds(&rig, 0, "newer", 3, 3);
    assert_finds(&rig, 0, "old", 3, 3);
    kv_seq_deinit(&seq, &rig);
    kv_rig_close(&rig);
}

static void a_restore_point_leaves_alone(void **state) {
    struct kv_rig rig = rig_of(8, 1, 8, 8, 8);
    struct kv_store_stats stats;
    uint32_t slot;

    (void)state;
    leave_behind(&rig, 0, "abcd");
    assert_int_equal(kv_store_take(rig.store, KV_TARGET_STATE, &slot), 0);
    assert_finds(&rig, 0, "abcd", 0, 4);
    kv_store_give(rig.store, KV_TARGET_STATE, slot);
    stats = stats_of(&rig);
    assert_int_equal(stats.group[KV_TARGET_STATE].n_evicted, 1);
    assert_int_equal(stats.group[KV_DRAFT_FULL].n_indexed, 4);
    leave_behind(&rig, 0, "abcd"); /* its pages are there; the restore point comes again */
    assert_finds(&rig, 0, "abcd", 4, 4);
    kv_rig_close(&rig);
}

static void a_page_takes_all_that_hangs_off_it_along(void **state) {
    struct kv_rig rig = rig_of(4, 2, 8, 8, 8);
    struct kv_store_stats stats;
    struct kv_seq seq;

    (void)state;
    leave_behind(&rig, 0, "abcd");
    kv_seq_init(&seq, &rig, 0, "m");
    assert_int_equal(kv_seq_take(&seq, &rig, KV_TARGET_FULL, 0), 0);
    kv_rig_check(&rig);
    stats = stats_of(&rig);
    assert_int_equal(stats.group[KV_TARGET_FULL].n_indexed, 3);
    assert_int_equal(stats.group[KV_TARGET_STATE].n_indexed, 0);
    assert_int_equal(stats.group[KV_DRAFT_FULL].n_indexed, 3);
    assert_int_equal(stats.group[KV_DRAFT_SLIDING].n_indexed, 3);
    for (int g = 0; g < KV_GROUP_N; g++)
        assert_int_equal(stats.group[g].n_evicted, 1);
    kv_seq_deinit(&seq, &rig);
    kv_rig_close(&rig);
}

static void evicting_bytes_drops_the_shortfall_and_all_drops_what_no_lease_needs(void **state) {
    struct kv_rig rig = rig_of(16, 4, 16, 16, 16);
    struct kv_seq seq;

    (void)state;
    leave_behind(&rig, 0, "abcd");
    leave_behind(&rig, 0, "wxyz");
    assert_int_equal(kv_store_evict_bytes(rig.store, 0), 0);
    /* the last page of the older chain, with its restore point and two draft pages */
    assert_int_equal(kv_store_evict_bytes(rig.store, 1), 4 * KV_RIG_SLOT_BYTES);
    kv_rig_check(&rig);
    assert_finds(&rig, 0, "abcd", 0, 3);
    kv_seq_init(&seq, &rig, 0, "wxyz");
    kv_seq_match(&seq, &rig);
    kv_lease_drop_state(&seq.lease);
    /* three pages, their six draft pages; of the leased ones the restore point and two sliding pages */
    assert_int_equal(kv_store_evict_all(rig.store), (3 + 6 + 1 + 2) * KV_RIG_SLOT_BYTES);
    kv_rig_check(&rig);
    kv_seq_check(&seq, &rig);
    assert_int_equal(stats_of(&rig).n_records, 4);
    kv_seq_deinit(&seq, &rig);
    kv_rig_close(&rig);
}

/* ---- the drafter's groups ---- */

static uint64_t evict_chain(struct kv_rig *rig, const char *kinds) {
    struct kv_seq seq;
    uint64_t n_bytes;

    kv_seq_init(&seq, rig, 0, kinds);
    n_bytes = kv_store_evict_chain(rig->store, seq.keys, seq.tokens, seq.n_pages);
    kv_seq_deinit(&seq, rig);
    kv_rig_check(rig);
    return n_bytes;
}

static void a_chain_leaves_from_its_end_up_to_what_must_stay(void **state) {
    struct kv_rig rig = rig_of(24, 8, 24, 24, 24);
    struct kv_seq seq;

    (void)state;
    leave_behind(&rig, 0, "abcd");
    leave_behind(&rig, 0, "abxy");
    leave_behind(&rig, 0, "pq");
    assert_int_equal(evict_chain(&rig, "ab"), 0); /* others go on from it */
    assert_finds(&rig, 0, "abcd", 4, 4);
    assert_true(evict_chain(&rig, "abcdef") >= 2 * KV_RIG_SLOT_BYTES);
    assert_finds(&rig, 0, "abxy", 4, 4);
    assert_int_equal(stats_of(&rig).n_records, 6);
    assert_int_equal(evict_chain(&rig, "abcd"), 0); /* it has left */
    kv_seq_init(&seq, &rig, 0, "abxy");
    kv_seq_match(&seq, &rig);
    assert_int_equal(evict_chain(&rig, "abxy"), 0); /* a lease needs it */
    kv_seq_deinit(&seq, &rig);
    assert_true(evict_chain(&rig, "abxy") >= 4 * KV_RIG_SLOT_BYTES);
    assert_finds(&rig, 0, "abxy", 0, 0);
    assert_finds(&rig, 0, "pq", 2, 2);
    kv_rig_close(&rig);
}

static void a_namespace_leaves_and_no_other_does(void **state) {
    struct kv_rig rig = rig_of(24, 8, 24, 24, 24);
    struct kv_key root;
    struct kv_seq seq;
    uint32_t n_left;

    (void)state;
    leave_behind(&rig, 0, "abcd");
    leave_behind(&rig, 0, "abxy");
    leave_behind(&rig, 1, "abcd");
    leave_behind(&rig, 0, "pq");
    assert_int_equal(kv_store_root(rig.store, 0, &root), 0);
    kv_seq_init(&seq, &rig, 0, "abcd");
    kv_seq_match(&seq, &rig);
    assert_true(kv_store_purge(rig.store, &root, &n_left) >= 4 * KV_RIG_SLOT_BYTES);
    assert_int_equal(n_left, 4);
    kv_rig_check(&rig);
    assert_finds(&rig, 0, "pq", 0, 0);
    assert_finds(&rig, 0, "abcd", 4, 4);
    kv_seq_deinit(&seq, &rig);
    assert_true(kv_store_purge(rig.store, &root, &n_left) > 0);
    assert_int_equal(n_left, 0);
    kv_rig_check(&rig);
    assert_finds(&rig, 0, "abcd", 0, 0);
    assert_finds(&rig, 1, "abcd", 4, 4);
    assert_int_equal(stats_of(&rig).n_records, 4);
    kv_rig_close(&rig);
}

static void lack_of_draft_pages_never_shortens_a_hit(void **state) {
    struct kv_rig rig = rig_of(16, 4, 2, 1, 16);
    struct kv_seq seq;

    (void)state;
    leave_behind(&rig, 0, "abcd");
    assert_finds(&rig, 0, "abcd", 4, 4);
    kv_seq_init(&seq, &rig, 0, "abcd");
    kv_seq_match(&seq, &rig);
    assert_true(seq.match.draft_valid_from > 0);
    kv_seq_deinit(&seq, &rig);
    kv_rig_close(&rig);
}

/* Publishes "abcdef" with draft pages where the masks say so (bit i: page i), a restore point at the end. */
static uint32_t valid_from_with(uint32_t full, uint32_t sliding, uint32_t n_full_slots, uint32_t n_sliding_slots) {
    struct kv_rig rig = rig_of(8, 2, n_full_slots, n_sliding_slots, 8);
    uint32_t valid_from;
    struct kv_seq seq;
    bool taken[KV_GROUP_N];

    kv_seq_init(&seq, &rig, 0, "abcdef");
    for (uint32_t page = 0; page < 6; page++) {
        assert_int_equal(kv_seq_take(&seq, &rig, KV_TARGET_FULL, page), 0);
        if (full >> page & 1)
            assert_int_equal(kv_seq_take(&seq, &rig, KV_DRAFT_FULL, page), 0);
        if (sliding >> page & 1)
            assert_int_equal(kv_seq_take(&seq, &rig, KV_DRAFT_SLIDING, page), 0);
        assert_int_equal(kv_seq_publish(&seq, page, taken), 0);
    }
    restore_point(&seq, &rig, 6);
    kv_seq_end(&seq, &rig);
    kv_seq_match(&seq, &rig);
    kv_rig_check(&rig);
    valid_from = seq.match.draft_valid_from;
    for (uint32_t page = 0; page < 6; page++) {
        bool in_context = page >= valid_from / PAGE_TOKENS;

        assert_int_equal(kv_lease_slot(&seq.lease, KV_DRAFT_FULL, page) != KV_NO_SLOT, in_context && n_full_slots > 0);
        assert_int_equal(kv_lease_slot(&seq.lease, KV_DRAFT_SLIDING, page) != KV_NO_SLOT,
                         in_context && page >= 4 && n_sliding_slots > 0);
    }
    kv_seq_deinit(&seq, &rig);
    kv_rig_close(&rig);
    return valid_from / PAGE_TOKENS;
}

static void draft_context_starts_behind_its_last_hole(void **state) {
    (void)state;
    assert_int_equal(valid_from_with(0x3f, 0x3f, 6, 6), 0);
    assert_int_equal(valid_from_with(0x3f, 0x30, 6, 6), 0); /* the window is whole: nobody looks before it */
    assert_int_equal(valid_from_with(0x3f, 0x2f, 6, 6), 5);
    assert_int_equal(valid_from_with(0x3f, 0x1f, 6, 6), 6); /* the last sliding page is missing: no context */
    assert_int_equal(valid_from_with(0x3b, 0x3f, 6, 6), 3);
    assert_int_equal(valid_from_with(0x1f, 0x3f, 6, 6), 6);
    assert_int_equal(valid_from_with(0x00, 0x00, 6, 6), 6);
    assert_int_equal(valid_from_with(0x3e, 0x00, 6, 0), 1); /* one draft group alone */
    assert_int_equal(valid_from_with(0x00, 0x30, 0, 6), 0);
    assert_int_equal(valid_from_with(0x00, 0x00, 0, 0), 6); /* no drafter: no context */
}

static void sliding_pages_outside_every_window_leave_first(void **state) {
    struct kv_rig rig = rig_of(16, 4, 0, 8, 16);
    struct kv_seq seq, other;

    (void)state;
    leave_behind(&rig, 0, "ab");
    kv_seq_init(&seq, &rig, 0, "mnopqr");
    run(&seq, &rig, 6);
    restore_point(&seq, &rig, 6);
    for (uint32_t page = 0; page < 4; page++)
        kv_lease_drop_sliding(&seq.lease, page);
    kv_lease_drop_sliding(&seq.lease, 3); /* once more: nothing happens */
    assert_int_equal(kv_lease_slot(&seq.lease, KV_DRAFT_SLIDING, 3), KV_NO_SLOT);
    kv_rig_check(&rig);
    kv_seq_init(&other, &rig, 0, "wxyz");
    run(&other, &rig, 4);
    kv_seq_end(&seq, &rig);
    kv_seq_match(&seq, &rig);
    assert_int_equal(seq.match.draft_valid_from, 0);
    kv_seq_end(&seq, &rig);
    kv_seq_deinit(&seq, &rig);
    kv_seq_init(&seq, &rig, 0, "ab");
    kv_seq_match(&seq, &rig);
    assert_int_equal(seq.match.draft_valid_from, 0); /* older than all of them, but in a window */
    kv_seq_deinit(&seq, &rig);
    kv_seq_deinit(&other, &rig);
    kv_rig_close(&rig);
}

static void first_draft_pages_of_a_chain_leave_first(void **state) {
    struct kv_rig rig = rig_of(16, 4, 4, 0, 16);
    struct kv_seq seq, other;

    (void)state;
    leave_behind(&rig, 0, "abcd");
    kv_seq_init(&other, &rig, 0, "x");
    run(&other, &rig, 1);
    kv_seq_init(&seq, &rig, 0, "abcd");
    kv_seq_match(&seq, &rig);
    assert_int_equal(seq.match.draft_valid_from, PAGE_TOKENS);
    kv_seq_deinit(&seq, &rig);
    kv_seq_deinit(&other, &rig);
    kv_rig_close(&rig);
}

/* ---- opening and checking ---- */

static void open_refuses_what_cannot_work(void **state) {
    struct kv_rig rig = rig_of(4, 2, 0, 0, 4);
    struct kv_store_options good = {.backend = rig.backend,
                                    .device = rig.device,
                                    .group = {{64, 4}, {64, 2}, {64, 4}, {64, 4}},
                                    .sliding_window_tokens = 64,
                                    .n_records_max = 4};
    struct kv_store_options bad[] = {good, good, good, good, good, good, good, good};
    struct kv_store *store = NULL;

    (void)state;
    bad[0].group[KV_TARGET_FULL].n_slots = 0;
    bad[1].group[KV_TARGET_STATE].n_slots = 0;
    bad[2].group[KV_TARGET_FULL].n_slots = 1; /* the null page alone */
    bad[3].group[KV_TARGET_STATE].slot_bytes = 0;
    bad[4].group[KV_DRAFT_FULL].slot_bytes = SIZE_MAX / 2;
    bad[5].sliding_window_tokens = 0;
    bad[6].n_records_max = 0;
    bad[7].n_records_max = UINT32_MAX;
    for (size_t i = 0; i < ARRAY_LEN(bad); i++)
        assert_int_equal(kv_store_open(&bad[i], &store), -EINVAL);
    assert_null(store);
    assert_int_equal(kv_store_open(&good, &store), 0);
    for (int g = 0; g < KV_GROUP_N; g++)
        assert_non_null(kv_store_arena(store, (enum kv_group)g));
    kv_store_close(store);
    assert_null(kv_store_arena(rig.store, KV_DRAFT_FULL));
    assert_int_equal(kv_store_n_available(rig.store, KV_DRAFT_FULL), 0);
    kv_rig_close(&rig);
    kv_store_close(NULL);
}

static int n_allocs_left; /* of the backend below */

static int mem_alloc_until(struct device *device, enum mem_kind kind, size_t bytes, void **ret_ptr) {
    if (n_allocs_left-- == 0)
        return -ENOMEM;
    return backend_find("cpu")->mem_alloc(device, kind, bytes, ret_ptr);
}

static void open_without_memory_gives_back_what_it_had(void **state) {
    struct kv_rig rig = rig_of(4, 2, 0, 0, 4);
    struct backend poor = *rig.backend;
    struct kv_store_options options = {.backend = &poor,
                                       .device = rig.device,
                                       .group = {{64, 4}, {64, 2}, {64, 4}, {64, 4}},
                                       .sliding_window_tokens = 64,
                                       .n_records_max = 4};
    struct kv_store *store = NULL;

    (void)state;
    poor.mem_alloc = mem_alloc_until;
    for (int n = 0; n < KV_GROUP_N; n++) {
        n_allocs_left = n;
        assert_int_equal(kv_store_open(&options, &store), -ENOMEM);
        assert_null(store);
    }
    n_allocs_left = KV_GROUP_N;
    assert_int_equal(kv_store_open(&options, &store), 0);
    kv_store_close(store);
    kv_rig_close(&rig);
}

static void null_page_is_zero_and_never_handed_out(void **state) {
    struct kv_rig rig = rig_of(3, 2, 3, 3, 4);
    uint32_t slots[KV_GROUP_N][3];

    (void)state;
    for (int g = 0; g < KV_GROUP_N; g++)
        for (int i = 0; i < (g == KV_TARGET_STATE ? 2 : 3); i++) {
            assert_int_equal(kv_store_take(rig.store, (enum kv_group)g, &slots[g][i]), 0);
            assert_int_equal(slots[g][i], g == KV_TARGET_STATE ? i : i + 1);
        }
    for (int g = 0; g < KV_GROUP_N; g++)
        for (int i = 0; i < KV_RIG_SLOT_BYTES; i++)
            assert_int_equal(((const char *)kv_store_arena(rig.store, (enum kv_group)g))[i], 0);
    for (int g = 0; g < KV_GROUP_N; g++)
        for (int i = 0; i < (g == KV_TARGET_STATE ? 2 : 3); i++)
            kv_store_give(rig.store, (enum kv_group)g, slots[g][i]);
    kv_rig_close(&rig);
}

static void check_fails(struct kv_rig *rig, const char *part) {
    char line[200];

    assert_int_equal(kv_store_check(rig->store, line, sizeof line), -EINVAL);
    assert_non_null(strstr(line, part));
}

static void check_finds_what_is_broken(void **state) {
    struct kv_rig rig = rig_of(8, 2, 8, 8, 8);
    struct kv_record *page;
    struct kv_seq seq;
    uint32_t kept;

    (void)state;
    kv_seq_init(&seq, &rig, 0, "abc");
    run(&seq, &rig, 3);
    restore_point(&seq, &rig, 3);
    page = &rig.store->index.records[seq.lease.records[1]];

    page->device[KV_TARGET_FULL].n_pins++;
    check_fails(&rig, "pins are not what leases hold");
    page->device[KV_TARGET_FULL].n_pins--;
    seq.lease.pinned[1] = 0;
    check_fails(&rig, "without its target page");
    seq.lease.pinned[1] = 1 << KV_TARGET_FULL | 1 << KV_DRAFT_FULL | 1 << KV_DRAFT_SLIDING;
    page->n_children++;
    check_fails(&rig, "counts its children");
    page->n_children--;
    page->n_windows = 0;
    check_fails(&rig, "windows");
    page->n_windows = 1;
    kept = page->device[KV_DRAFT_FULL].slot;
    page->device[KV_DRAFT_FULL].slot = kept + 1;
    check_fails(&rig, "a slot is not the record's");
    page->device[KV_DRAFT_FULL].slot = kept;
    page->key.bytes[0] ^= 1;
    check_fails(&rig, "not found by its key");
    page->key.bytes[0] ^= 1;
    rig.store->group[KV_TARGET_STATE].n_private++;
    check_fails(&rig, "group 1: free, private and indexed");
    rig.store->group[KV_TARGET_STATE].n_private--;
    kept = seq.lease.records[2];
    seq.lease.records[2] = seq.lease.records[0];
    check_fails(&rig, "do not follow each other");
    seq.lease.records[2] = kept;
    page = &rig.store->index.records[seq.lease.records[2]];
    page->device[KV_TARGET_STATE].used++;
    check_fails(&rig, "old order");
    page->device[KV_TARGET_STATE].used--;
    kv_rig_check(&rig);
    kv_seq_deinit(&seq, &rig);
    kv_rig_close(&rig);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(empty_store_finds_nothing),
        cmocka_unit_test(a_prefix_is_found_up_to_its_last_restore_point),
        cmocka_unit_test(branches_share_their_beginning),
        cmocka_unit_test(pages_of_another_user_are_not_found),
        cmocka_unit_test(hashes_narrow_and_tokens_decide),
        cmocka_unit_test(a_match_pins_all_of_the_hit),
        cmocka_unit_test(a_restore_point_stays_until_its_copy_is_done),
        cmocka_unit_test(second_of_two_equal_seqs_keeps_its_own_pages),
        cmocka_unit_test(a_draft_page_that_the_index_lacks_is_taken),
        cmocka_unit_test(index_without_a_free_record_drops_what_is_needed_least),
        cmocka_unit_test(full_group_says_so_and_keeps_its_slots),
        cmocka_unit_test(what_is_available_can_be_taken),
        cmocka_unit_test(burst_of_one_off_prompts_leaves_leased_pages_alone),
        cmocka_unit_test(a_flood_of_one_user_leaves_the_other_his_share),
        cmocka_unit_test(longest_unused_chain_leaves_from_its_end),
        cmocka_unit_test(pages_beyond_the_last_restore_point_leave_first),
        cmocka_unit_test(a_restore_point_leaves_alone),
        cmocka_unit_test(a_page_takes_all_that_hangs_off_it_along),
        cmocka_unit_test(evicting_bytes_drops_the_shortfall_and_all_drops_what_no_lease_needs),
        cmocka_unit_test(a_chain_leaves_from_its_end_up_to_what_must_stay),
        cmocka_unit_test(a_namespace_leaves_and_no_other_does),
        cmocka_unit_test(lack_of_draft_pages_never_shortens_a_hit),
        cmocka_unit_test(draft_context_starts_behind_its_last_hole),
        cmocka_unit_test(sliding_pages_outside_every_window_leave_first),
        cmocka_unit_test(first_draft_pages_of_a_chain_leave_first),
        cmocka_unit_test(open_refuses_what_cannot_work),
        cmocka_unit_test(open_without_memory_gives_back_what_it_had),
        cmocka_unit_test(null_page_is_zero_and_never_handed_out),
        cmocka_unit_test(check_finds_what_is_broken),
    };

    return cmocka_run_group_tests_name("store", tests, NULL, NULL);
}
