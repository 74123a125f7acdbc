/* Chains come back from wherever their pages lie, through a shelf that may be smaller than they, or not at all: whatever is
 * damaged, late, cancelled or gone, the device holds what the keys say, and nothing stays pinned. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include "tier_rig.h"

static const uint32_t ROOMY[KV_GROUP_N] = {
    [KV_TARGET_FULL] = 100, [KV_TARGET_STATE] = 10, [KV_DRAFT_FULL] = 100, [KV_DRAFT_SLIDING] = 100};
static const uint32_t SMALL[KV_GROUP_N] = {
    [KV_TARGET_FULL] = 6, [KV_TARGET_STATE] = 1, [KV_DRAFT_FULL] = 6, [KV_DRAFT_SLIDING] = 2};

#define LONG "abcdefghijklmnopqrstuvwxyzabcdefghijklmn" /* 40 pages */

struct answer {
    int n_done, result;
};

static void on_done(void *user, int result) {
    struct answer *answer = user;

    answer->n_done++;
    answer->result = result;
}

static struct kv_found lookup(const struct tier_rig *rig, const struct kv_seq *seq) {
    struct kv_found found;

    kv_restores_lookup(rig->restores, seq->keys, seq->n_pages, &found);
    return found;
}

static int start(struct tier_rig *rig, const struct kv_seq *seq, uint32_t n_pages, struct answer *answer,
                 struct kv_restore **ret_restore) {
    int r;

    *answer = (struct answer){0};
    r = kv_restore_start(rig->restores, seq->keys, seq->tokens, n_pages, KV_RESTORE_REQUEST, on_done, answer,
                         ret_restore);
    assert_int_equal(answer->n_done, 0); /* never from inside */
    tier_check(rig);
    return r;
}

/* On the device now, as far as that, with the drafter's pages from there on. */
static void expect_match(struct tier_rig *rig, struct kv_seq *seq, uint32_t n_pages, uint32_t draft_from_page) {
    kv_seq_match(seq, &rig->kv);
    assert_int_equal(seq->match.n_tokens, n_pages * PAGE_TOKENS);
    assert_int_equal(seq->match.draft_valid_from, draft_from_page * PAGE_TOKENS);
}

static void end(struct tier_rig *rig, struct kv_seq *seq, struct kv_restore *restore) {
    kv_restore_end(restore);
    kv_seq_check(seq, &rig->kv);
    kv_seq_deinit(seq, &rig->kv);
    tier_drain(rig);
    tier_check_is_home(rig);
}

static void a_chain_on_disk_comes_back(void **state) {
    static struct kv_seq seq;
    static struct tier_rig rig;
    struct kv_restore *restore;
    struct answer answer;

    (void)state;
    tier_open(&rig, ROOMY, ROOMY);
    tier_put_below(&rig, 1, LONG, 40, 40, true);
    kv_seq_init(&seq, &rig.kv, 1, LONG "op");
    assert_int_equal(lookup(&rig, &seq).n_tokens, 40 * PAGE_TOKENS);
    assert_int_equal(lookup(&rig, &seq).n_disk_tokens, 40 * PAGE_TOKENS);
    assert_int_equal(start(&rig, &seq, 40, &answer, &restore), 0);
    assert_true(lookup(&rig, &seq).is_coming);
    tier_drain(&rig);
    assert_int_equal(answer.n_done, 1);
    assert_int_equal(answer.result, 0);
    kv_store_evict_all(rig.kv.store); /* its lease holds it */
    expect_match(&rig, &seq, 40, 0);
    end(&rig, &seq, restore);
    tier_close(&rig);
}

/* Test 9 of the design: the shelf holds 6 pages of 40, and one restore point. */
static void a_chain_longer_than_the_whole_shelf_comes_back_through_it(void **state) {
    static struct kv_seq seq;
    static struct tier_rig rig;
    struct kv_restore *restore;
    struct kv_restores_stats stats;
    struct answer answer;

    (void)state;
    tier_open(&rig, ROOMY, ROOMY);
    tier_put_below(&rig, 1, LONG, 20, 40, true);
    tier_close_vault(&rig);
    tier_close_shelf(&rig);
    tier_open_shelf(&rig, SMALL);
    tier_open_vault(&rig);
    tier_drain(&rig);
    for (int i = 0; i < 2; i++) {
        kv_seq_init(&seq, &rig.kv, 1, LONG);
        assert_int_equal(lookup(&rig, &seq).n_tokens, 40 * PAGE_TOKENS);
        assert_int_equal(start(&rig, &seq, 40, &answer, &restore), 0);
        tier_drain(&rig);
        assert_int_equal(answer.n_done, 1);
        assert_int_equal(answer.result, 0);
        expect_match(&rig, &seq, 40, 0);
        end(&rig, &seq, restore);
        kv_store_evict_all(rig.kv.store);
    }
    kv_restores_stats(rig.restores, &stats);
    assert_int_equal(stats.n_done, 2);
    assert_true(stats.n_disk_pages >= (40 - 6) * 4);
    tier_close(&rig);
}

/* A shelf of 12 pages of 40, that others use too. */
static const uint32_t MIDDLING[KV_GROUP_N] = {
    [KV_TARGET_FULL] = 12, [KV_TARGET_STATE] = 4, [KV_DRAFT_FULL] = 12, [KV_DRAFT_SLIDING] = 12};

static void a_chain_longer_than_the_whole_shelf_goes_down_through_it(void **state) {
    static struct kv_seq seq, other;
    static struct tier_rig rig;
    struct kv_restore *restore;
    struct answer answer;

    (void)state;
    tier_open(&rig, ROOMY, MIDDLING);
    tier_put_below(&rig, 1, "zyxw", 4, 4, false);
    tier_put_below(&rig, 1, LONG, 40, 40, false);
    kv_seq_init(&other, &rig.kv, 1, "zyxw");
    assert_int_equal(lookup(&rig, &other).n_tokens, 4 * PAGE_TOKENS);
    assert_int_equal(lookup(&rig, &other).n_disk_tokens, 0); /* it was not pushed out */
    kv_seq_deinit(&other, &rig.kv);
    for (int i = 0; i < 2; i++) {
        kv_seq_init(&seq, &rig.kv, 1, LONG);
        assert_int_equal(lookup(&rig, &seq).n_tokens, 40 * PAGE_TOKENS);
        assert_int_equal(start(&rig, &seq, 40, &answer, &restore), 0);
        tier_drain(&rig);
        assert_int_equal(answer.result, 0);
        expect_match(&rig, &seq, 40, 0);
        end(&rig, &seq, restore);
        kv_store_evict_all(rig.kv.store);
        tier_close_vault(&rig); /* the second time after a restart */
        tier_close_shelf(&rig);
        tier_open_shelf(&rig, MIDDLING);
        tier_open_vault(&rig);
        tier_drain(&rig);
    }
    tier_close(&rig);
}

static struct kv_spill_stats spill_stats(const struct tier_rig *rig) {
    struct kv_spill_stats stats;

    kv_spill_stats(rig->spill, &stats);
    return stats;
}

/* Its first stretches are on the disk; then nothing more gets there. */
static void a_chain_whose_stretch_cannot_be_saved_ends_there(void **state) {
    static struct kv_seq seq;
    static struct tier_rig rig;

    (void)state;
    for (int how = 0; how < 2; how++) {
        tier_open(&rig, ROOMY, MIDDLING);
        kv_seq_init(&seq, &rig.kv, 1, LONG);
        assert_true(kv_seq_compute(&seq, &rig.kv, 40));
        kv_spill_start(rig.spill, &seq.lease, 40, 7, KV_SPILL_MUST);
        while (tier_stats(&rig).n_saved_pages < 3 * 3) {
            if (!tier_come_home(&rig, KV_COPY_SPILL, 0))
                tier_do_work(&rig, 0);
            tier_turn(&rig);
        }
        if (how == 0)
            disk_faults_always(rig.faults, DISK_CALL_WRITE, (struct disk_fault){.result = -ENOSPC});
        else
            kv_spill_set_vault(rig.spill, NULL);
        tier_drain(&rig);
        assert_true(kv_spill_is_idle(rig.spill));
        assert_true(spill_stats(&rig).n_no_slot > 0);
        kv_seq_deinit(&seq, &rig.kv);
        tier_check_is_home(&rig);
        tier_close(&rig);
    }
}

static void the_device_the_shelf_and_the_disk_give_each_what_they_have(void **state) {
    static struct kv_seq seq, part;
    static struct tier_rig rig;
    struct kv_restore *restore;
    struct kv_restores_stats stats;
    struct answer answer;

    (void)state;
    tier_open(&rig, ROOMY, ROOMY);
    tier_put_below(&rig, 1, LONG, 40, 40, true);
    kv_seq_init(&part, &rig.kv, 1, LONG); /* the first ten on the device, and ten more on the shelf */
    assert_true(kv_seq_compute(&part, &rig.kv, 20));
    kv_spill_start(rig.spill, &part.lease, 20, 7, KV_SPILL_TO_HOST);
    tier_drain(&rig);
    kv_seq_deinit(&part, &rig.kv);
    kv_store_evict_all(rig.kv.store);
    kv_seq_init(&part, &rig.kv, 1, "abcdefghij");
    assert_true(kv_seq_compute(&part, &rig.kv, 10));
    kv_seq_init(&seq, &rig.kv, 1, LONG);
    assert_int_equal(lookup(&rig, &seq).n_tokens, 40 * PAGE_TOKENS);
    assert_int_equal(lookup(&rig, &seq).n_device_tokens, 10 * PAGE_TOKENS);
    assert_int_equal(lookup(&rig, &seq).n_disk_tokens, 20 * PAGE_TOKENS);
    assert_int_equal(start(&rig, &seq, 40, &answer, &restore), 0);
    kv_seq_deinit(&part, &rig.kv);
    kv_store_evict_all(rig.kv.store);                /* what it builds on is held, not the drafter's */
    kv_shelf_evict_bytes(rig.shelf, UINT64_MAX);     /* and what is on its way up */
    kv_vault_evict_bytes(rig.vault, UINT64_MAX / 2); /* and what is still to be read */
    tier_drain(&rig);
    assert_int_equal(answer.result, 0);
    expect_match(&rig, &seq, 40, 10);
    kv_restores_stats(rig.restores, &stats);
    assert_int_equal(stats.n_disk_pages, 20 + 20 + 2 + 1);
    end(&rig, &seq, restore);
    tier_close(&rig);
}

static void without_a_damaged_draft_page_the_rest_comes_back(void **state) {
    static struct kv_seq seq;
    static struct tier_rig rig;
    struct kv_restore *restore;
    struct answer answer;
    uint32_t segment = 0;
    uint64_t offset = 0;

    (void)state;
    tier_open(&rig, ROOMY, ROOMY);
    tier_put_below(&rig, 1, LONG, 40, 40, true);
    kv_seq_init(&seq, &rig.kv, 1, LONG);
    assert_true(tier_find(&rig, &seq.keys[25], KV_DRAFT_FULL, &segment, &offset));
    tier_flip(&rig, segment, offset + FORMAT_BLOCK_BYTES + 5);
    assert_int_equal(start(&rig, &seq, 40, &answer, &restore), 0);
    tier_drain(&rig);
    assert_int_equal(answer.result, 0);
    expect_match(&rig, &seq, 40, 26); /* the drafter's context begins behind it */
    assert_int_equal(tier_stats(&rig).n_damaged, 1);
    end(&rig, &seq, restore);
    tier_close(&rig);
}

static void a_damaged_target_page_fails_the_restore_and_the_next_finds_less(void **state) {
    static struct kv_seq seq;
    static struct tier_rig rig;
    struct kv_restore *restore;
    struct answer answer;
    uint32_t segment = 0;
    uint64_t offset = 0;

    (void)state;
    tier_open(&rig, ROOMY, ROOMY);
    tier_put_below(&rig, 1, LONG, 20, 40, true);
    kv_seq_init(&seq, &rig.kv, 1, LONG);
    assert_true(tier_find(&rig, &seq.keys[30], KV_TARGET_FULL, &segment, &offset));
    tier_flip(&rig, segment, offset + 300);
    assert_int_equal(start(&rig, &seq, 40, &answer, &restore), 0);
    tier_drain(&rig);
    assert_int_equal(answer.n_done, 1);
    assert_int_equal(answer.result, -EBADMSG);
    kv_restore_end(restore);
    tier_drain(&rig);
    tier_check_is_home(&rig);
    assert_int_equal(kv_seq_lookup(&seq, &rig.kv).n_tokens, 0); /* nothing of it on the device */
    assert_int_equal(lookup(&rig, &seq).n_tokens, 20 * PAGE_TOKENS);
    assert_int_equal(start(&rig, &seq, 20, &answer, &restore), 0);
    tier_drain(&rig);
    assert_int_equal(answer.result, 0);
    expect_match(&rig, &seq, 20, 0);
    assert_int_equal(tier_stats(&rig).n_damaged, 1); /* the bad one is not tried again */
    end(&rig, &seq, restore);
    tier_close(&rig);
}

static void a_damaged_restore_point_is_none(void **state) {
    static struct kv_seq seq;
    static struct tier_rig rig;
    struct kv_restore *restore;
    struct answer answer;
    uint32_t segment = 0;
    uint64_t offset = 0;

    (void)state;
    tier_open(&rig, ROOMY, ROOMY);
    tier_put_below(&rig, 1, LONG, 20, 40, true);
    kv_seq_init(&seq, &rig.kv, 1, LONG);
    assert_true(tier_find(&rig, &seq.keys[39], KV_TARGET_STATE, &segment, &offset));
    tier_flip(&rig, segment, offset + FORMAT_BLOCK_BYTES);
    assert_int_equal(start(&rig, &seq, 40, &answer, &restore), 0);
    tier_drain(&rig);
    assert_int_equal(answer.result, -EBADMSG);
    kv_restore_end(restore);
    assert_int_equal(lookup(&rig, &seq).n_tokens, 20 * PAGE_TOKENS);
    kv_seq_deinit(&seq, &rig.kv);
    tier_drain(&rig);
    tier_check_is_home(&rig);
    tier_close(&rig);
}

/* After so many steps of any kind. */
static void a_restore_is_cancelled_at_any_stage(void **state) {
    static struct kv_seq seq;
    static struct tier_rig rig;

    (void)state;
    tier_open(&rig, ROOMY, ROOMY);
    tier_put_below(&rig, 1, LONG, 40, 40, true);
    tier_close_vault(&rig);
    tier_close_shelf(&rig);
    tier_open_shelf(&rig, SMALL);
    tier_open_vault(&rig);
    tier_drain(&rig);
    for (int n_steps = 0;; n_steps += 1 + n_steps / 15) {
        struct kv_restore *restore;
        struct answer answer;
        bool is_done;

        kv_seq_init(&seq, &rig.kv, 1, LONG);
        assert_int_equal(start(&rig, &seq, 40, &answer, &restore), 0);
        for (int i = 0; i < n_steps && answer.n_done == 0; i++) {
            if (i % 3 == 0)
                tier_turn(&rig);
            else if (i % 3 == 1)
                tier_do_work(&rig, rig.n_works - 1);
            else
                tier_come_home(&rig, KV_COPY_FETCH, 0);
        }
        is_done = answer.n_done > 0;
        kv_restore_cancel(restore);
        kv_restore_cancel(restore); /* twice is once */
        assert_int_equal(answer.n_done, is_done);
        tier_drain(&rig);
        assert_int_equal(answer.n_done, 1);
        assert_int_equal(answer.result, is_done ? 0 : -ECANCELED);
        if (is_done)
            expect_match(&rig, &seq, 40, 0);
        end(&rig, &seq, restore);
        kv_store_evict_all(rig.kv.store);
        if (is_done)
            break;
        assert_true(n_steps < 5000);
    }
    tier_close(&rig);
}

static void two_restores_of_one_chain_share_its_readings(void **state) {
    static struct kv_seq seq, other;
    static struct tier_rig rig;
    struct kv_restore *first, *second;
    struct answer answers[2];
    uint32_t n_calls;

    (void)state;
    for (int way = 0; way < 3; way++) {
        tier_open(&rig, ROOMY, ROOMY);
        tier_put_below(&rig, 1, LONG, 40, 40, true);
        n_calls = disk_faults_n_calls(rig.faults, DISK_CALL_READ);
        kv_seq_init(&seq, &rig.kv, 1, LONG);
        kv_seq_init(&other, &rig.kv, 1, LONG);
        assert_int_equal(start(&rig, &seq, 40, &answers[0], &first), 0);
        assert_int_equal(start(&rig, &other, 40, &answers[1], &second), 0);
        for (int i = 0; way == 1 && i < 6; i++)
            tier_do_work(&rig, 0);
        if (way > 0)
            kv_restore_cancel(first);
        tier_drain(&rig);
        assert_int_equal(answers[0].result, way > 0 ? -ECANCELED : 0);
        assert_int_equal(answers[1].result, 0);
        assert_int_equal(disk_faults_n_calls(rig.faults, DISK_CALL_READ), n_calls + 40 + 40 + 2 + 1);
        expect_match(&rig, &other, 40, 0);
        kv_restore_end(first);
        kv_seq_deinit(&seq, &rig.kv);
        end(&rig, &other, second);
        tier_close(&rig);
    }
}

static void a_disk_that_hangs_fails_the_restore_at_the_deadline(void **state) {
    static struct kv_seq seq;
    static struct tier_rig rig;
    struct kv_restore *restore;
    struct answer answer;

    (void)state;
    tier_open(&rig, ROOMY, ROOMY);
    tier_put_below(&rig, 1, LONG, 40, 40, true);
    kv_seq_init(&seq, &rig.kv, 1, LONG);
    disk_faults_add(rig.faults, DISK_CALL_READ, (struct disk_fault){.is_held = true, .is_deaf = true});
    assert_int_equal(start(&rig, &seq, 40, &answer, &restore), 0);
    tier_drain(&rig);
    assert_int_equal(answer.n_done, 0);
    tier_clock_us += TIER_DEADLINE_US;
    tier_drain(&rig);
    assert_int_equal(answer.n_done, 1);
    assert_int_equal(answer.result, -ETIMEDOUT);
    kv_restore_end(restore);
    disk_faults_release(rig.faults);
    tier_drain(&rig);
    tier_check_is_home(&rig);
    assert_int_equal(lookup(&rig, &seq).n_tokens, 40 * PAGE_TOKENS); /* it came late, and was not lost */
    kv_seq_deinit(&seq, &rig.kv);
    tier_close(&rig);
}

static void a_purge_fails_the_restore_or_lets_it_finish(void **state) {
    static struct kv_seq seq;
    static struct tier_rig rig;
    struct kv_restore *restore;
    struct answer answer;

    (void)state;
    for (int n_before = 0; n_before < 60; n_before += 7) {
        tier_open(&rig, ROOMY, ROOMY);
        tier_put_below(&rig, 1, "abcdefghijklmnopqrst", 20, 20, true);
        kv_seq_init(&seq, &rig.kv, 1, "abcdefghijklmnopqrst");
        assert_int_equal(start(&rig, &seq, 20, &answer, &restore), 0);
        for (int i = 0; i < n_before; i++) {
            tier_do_work(&rig, 0);
            if (i % 4 == 0)
                tier_turn(&rig);
        }
        kv_vault_purge(rig.vault, 1);
        assert_int_equal(tier_stats(&rig).n_to_blank > 0 || n_before < 30, 1);
        tier_drain(&rig);
        assert_int_equal(answer.n_done, 1);
        if (answer.result == 0)
            expect_match(&rig, &seq, 20, 0);
        end(&rig, &seq, restore);
        for (int g = 0; g < KV_GROUP_N; g++)
            assert_int_equal(tier_stats(&rig).group[g].n_stored, 0);
        tier_close(&rig);
    }
}

static void a_chain_that_was_read_leaves_the_disk_from_its_end(void **state) {
    static struct kv_seq seq;
    static struct tier_rig rig;
    struct kv_restore *restore;
    struct answer answer;

    (void)state;
    tier_open(&rig, ROOMY, ROOMY);
    tier_put_below(&rig, 1, LONG, 20, 40, true);
    kv_seq_init(&seq, &rig.kv, 1, LONG);
    assert_int_equal(start(&rig, &seq, 40, &answer, &restore), 0);
    tier_drain(&rig);
    assert_int_equal(answer.result, 0);
    kv_restore_end(restore);
    kv_store_evict_all(rig.kv.store);
    kv_shelf_evict_bytes(rig.shelf, UINT64_MAX);
    kv_vault_evict_bytes(rig.vault, (uint64_t)30 * rig.options.group[KV_TARGET_FULL].slot_bytes);
    tier_drain(&rig);
    assert_int_equal(lookup(&rig, &seq).n_tokens, 20 * PAGE_TOKENS);
    kv_seq_deinit(&seq, &rig.kv);
    tier_close(&rig);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_chain_on_disk_comes_back),
        cmocka_unit_test(a_chain_longer_than_the_whole_shelf_comes_back_through_it),
        cmocka_unit_test(a_chain_longer_than_the_whole_shelf_goes_down_through_it),
        cmocka_unit_test(a_chain_whose_stretch_cannot_be_saved_ends_there),
        cmocka_unit_test(the_device_the_shelf_and_the_disk_give_each_what_they_have),
        cmocka_unit_test(without_a_damaged_draft_page_the_rest_comes_back),
        cmocka_unit_test(a_damaged_target_page_fails_the_restore_and_the_next_finds_less),
        cmocka_unit_test(a_damaged_restore_point_is_none),
        cmocka_unit_test(a_restore_is_cancelled_at_any_stage),
        cmocka_unit_test(two_restores_of_one_chain_share_its_readings),
        cmocka_unit_test(a_disk_that_hangs_fails_the_restore_at_the_deadline),
        cmocka_unit_test(a_purge_fails_the_restore_or_lets_it_finish),
        cmocka_unit_test(a_chain_that_was_read_leaves_the_disk_from_its_end),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
