/* What a vault may hold, and who gets it: caps, the order in which pages leave, the day's bytes, the queue; what is evicted
 * or purged is gone from the files too; and what becomes of pages and segments while that goes on. */
#include "vault_rig.h"

#include <sys/mount.h>
#include <sys/statvfs.h>

static const struct disk_fault none, held = {.is_held = true};

/* Pages so large that few fit: 15 in each of 8 segments. */
static void make_pages_large(struct vault_rig *rig) {
    for (int g = 0; g < KV_GROUP_N; g++) {
        bool is_kept = g == KV_TARGET_FULL || g == KV_TARGET_STATE;

        rig->shelf_options.group[g].payload_bytes = is_kept ? (512 << 10) - 4096 : 0;
        rig->shelf_options.group[g].n_slots = g == KV_TARGET_FULL ? 20 : is_kept ? 3 : 0;
    }
}

static void open_large(struct vault_rig *rig) {
    vr_init(rig);
    make_pages_large(rig);
    vr_open(rig);
}

/* ---- who leaves ------------------------------------------------------------------------------------------------------ */

static void the_longest_unused_chain_leaves_from_its_end(void **state) {
    static struct vault_chain first, second, other;
    struct vault_rig rig;
    uint32_t n_before = 10;

    (void)state;
    open_large(&rig);
    vr_chain(&rig, &first, 1, 10);
    vr_chain(&rig, &second, 2, 10);
    vr_save(&rig, &first);
    vr_save(&rig, &second);
    for (int i = 0; vr_n_pages(&rig, &first) > 0; i++) { /* 60 slots for target pages */
        uint32_t n;

        assert_true(i < 60);
        vr_chain(&rig, &other, 100 + i, 1);
        vr_save(&rig, &other);
        n = vr_n_pages(&rig, &first);
        for (uint32_t page = n; page < 10; page++)
            assert_false(vr_has(&rig, &first, page, KV_TARGET_FULL)); /* never a hole */
        assert_in_range(n, n_before - 1, n_before);
        n_before = n;
        assert_int_equal(vr_n_pages(&rig, &second), 10);
    }
    assert_int_equal(vr_stats(&rig).group[KV_TARGET_FULL].n_evicted, 10);
    vr_free(&rig);
}

static void a_chain_that_is_saved_again_stays(void **state) {
    static struct vault_chain first, longer, other;
    struct vault_rig rig;

    (void)state;
    open_large(&rig);
    vr_chain(&rig, &first, 1, 8);
    vr_branch(&rig, &longer, 1, 1, 8, 2, 9);
    vr_save(&rig, &first);
    for (int i = 0; i < 70; i++) {
        vr_chain(&rig, &other, 100 + i, 1);
        vr_save(&rig, &other);
        if (i % 20 == 0)
            vr_save(&rig, &longer); /* its first pages are the other's */
    }
    assert_int_equal(vr_n_pages(&rig, &longer), 9);
    vr_free(&rig);
}

static void after_a_restart_a_chain_leaves_from_its_end_too(void **state) {
    static struct vault_chain first, other;
    struct vault_rig rig;

    (void)state;
    open_large(&rig);
    vr_chain(&rig, &first, 1, 12);
    vr_save(&rig, &first);
    vr_close(&rig);
    vr_open(&rig);
    vr_settle(&rig);
    vr_chain(&rig, &other, 2, 1);
    vr_save(&rig, &other);
    kv_vault_evict_bytes(rig.vault, 5 * (512 << 10));
    assert_in_range(vr_n_pages(&rig, &first), 7, 8);
    assert_true(vr_is_whole(&rig, &other));
    for (uint32_t page = vr_n_pages(&rig, &first); page < 12; page++)
        assert_false(vr_has(&rig, &first, page, KV_TARGET_FULL));
    vr_free(&rig);
}

/* 50 % of 8 segments are 4, 20 % are 1. */
static void no_group_has_more_than_its_share(void **state) {
    static struct vault_chain chain;
    struct vault_rig rig;

    (void)state;
    open_large(&rig);
    for (int i = 0; i < 40; i++) {
        struct kv_vault_stats stats;

        vr_chain(&rig, &chain, 1 + i, 3);
        vr_save(&rig, &chain);
        stats = vr_stats(&rig);
        assert_true(stats.bytes <= stats.cap_bytes);
        assert_true(stats.group[KV_TARGET_FULL].n_slots <= 4 * 15);
        assert_true(stats.group[KV_TARGET_STATE].n_slots <= 15);
        assert_true(vr_is_whole(&rig, &chain));
    }
    assert_int_equal(vr_stats(&rig).group[KV_TARGET_FULL].n_stored, 4 * 15);
    assert_int_equal(vr_stats(&rig).group[KV_TARGET_STATE].n_stored, 15);
    assert_int_equal(vr_stats(&rig).n_never_read, 40 * 4 - 75);
    vr_free(&rig);
}

static void a_flood_of_one_user_leaves_the_other_his_share(void **state) {
    static struct vault_chain mine, other;
    struct vault_rig rig;

    (void)state;
    for (int has_share = 0; has_share < 2; has_share++) {
        vr_init(&rig);
        make_pages_large(&rig);
        rig.options.share_percent = has_share ? 25 : 0;
        vr_open(&rig);
        vr_branch(&rig, &mine, 2, 1, 10, 1, 10);
        vr_save(&rig, &mine);
        for (int i = 0; i < 90; i++) { /* 60 slots for target pages, fewer for states */
            vr_chain(&rig, &other, 100 + i, 1);
            vr_save(&rig, &other);
        }
        assert_true(vr_is_whole(&rig, &other));
        assert_int_equal(vr_is_whole(&rig, &mine), has_share);
        if (has_share)
            vr_expect_chain(&rig, &mine, false);
        assert_int_equal(kv_vault_share(rig.vault)->n_kept > 0, has_share);
        vr_free(&rig);
    }
}

static void what_is_pinned_stays_and_saving_goes_without(void **state) {
    static struct vault_chain first, chain;
    struct vault_rig rig;
    uint32_t records[10], more[50], n_more = 0;

    (void)state;
    open_large(&rig);
    vr_chain(&rig, &first, 1, 10);
    vr_save(&rig, &first);
    for (uint32_t page = 0; page < 10; page++) {
        struct kv_page_name name = vr_name(&first, page);

        assert_true(kv_vault_pin(rig.vault, &name, KV_TARGET_FULL, &records[page]));
    }
    for (int i = 0; i < 6; i++) {
        vr_chain(&rig, &chain, 2 + i, 10);
        vr_save(&rig, &chain);
        assert_int_equal(vr_n_pages(&rig, &first), 10);
        for (uint32_t page = 0; i < 5 && page < 10; page++) {
            struct kv_page_name name = vr_name(&chain, page);

            assert_true(kv_vault_pin(rig.vault, &name, KV_TARGET_FULL, &more[n_more++]));
        }
    }
    assert_int_equal(vr_n_pages(&rig, &chain), 0); /* all of the group is pinned */
    assert_true(vr_stats(&rig).n_skipped_full > 0);
    while (n_more > 0)
        kv_vault_unpin(rig.vault, more[--n_more]);
    vr_save(&rig, &chain);
    assert_true(vr_is_whole(&rig, &chain));
    for (uint32_t page = 0; page < 10; page++)
        kv_vault_unpin(rig.vault, records[page]);
    vr_expect_chain(&rig, &first, false);
    vr_free(&rig);
}

/* Three are for pages, if they are wanted, and one is for states. */
static void init_four_segments(struct vault_rig *rig) {
    vr_init(rig);
    make_pages_large(rig);
    rig->options.disk_bytes = 4 * (uint64_t)VR_SEGMENT;
    rig->options.group[KV_TARGET_FULL].share = 100;
    rig->options.group[KV_TARGET_STATE].share = 75;
}

static void segments_go_from_one_group_to_another(void **state) {
    static struct vault_chain chain, last;
    struct vault_rig rig;

    (void)state;
    init_four_segments(&rig);
    vr_use_faults(&rig);
    vr_open(&rig);
    for (int i = 0; i < 5; i++) { /* three segments of pages, one of states */
        vr_chain(&rig, &chain, 1 + i, 9);
        vr_save(&rig, &chain);
    }
    assert_int_equal(vr_stats(&rig).group[KV_TARGET_FULL].n_slots, 45);
    disk_faults_add(rig.faults, DISK_CALL_SYNC, held); /* a sync of a segment that gets another group meanwhile */
    disk_faults_add(rig.faults, DISK_CALL_SYNC, held);
    disk_faults_add(rig.faults, DISK_CALL_SYNC, held);
    vr_clock_us += 1000000;
    vr_quiesce(&rig);
    kv_vault_purge(rig.vault, 1);
    vr_settle(&rig);
    for (int i = 0; i < 40; i++) {
        vr_chain(&rig, &chain, 100 + i, 1);
        vr_save(&rig, &chain);
    }
    assert_true(vr_stats(&rig).group[KV_TARGET_STATE].n_slots >= 30);
    disk_faults_release(rig.faults);
    vr_quiesce(&rig);
    assert_int_equal(vr_flush(&rig), 0);
    vr_chain(&rig, &last, 200, 3);
    vr_save(&rig, &last);
    vr_expect_chain(&rig, &chain, false);
    vr_expect_chain(&rig, &last, false);
    vr_close(&rig);
    vr_open(&rig);
    vr_settle(&rig);
    vr_expect_chain(&rig, &chain, false);
    vr_expect_chain(&rig, &last, false);
    vr_free(&rig);
}

/* What is pinned in it keeps it from the other group; what was not is out of the records already. */
static void what_left_a_segment_that_nobody_could_have_stays_purged(void **state) {
    static struct vault_chain chains[5], other;
    uint32_t records[5];
    struct vault_rig rig;

    (void)state;
    init_four_segments(&rig);
    vr_open(&rig);
    for (int i = 0; i < 5; i++) { /* three segments of pages, one of states */
        vr_chain(&rig, &chains[i], 1 + i, 9);
        vr_save(&rig, &chains[i]);
    }
    vr_close(&rig);
    rig.options.group[KV_TARGET_FULL].share = 50; /* that is one too many */
    vr_open(&rig);
    vr_settle(&rig);
    for (int i = 0; i < 5; i++) { /* one page at least of each segment */
        struct kv_page_name name = vr_name(&chains[i], 0);

        assert_true(kv_vault_pin(rig.vault, &name, KV_TARGET_FULL, &records[i]));
    }
    for (int i = 0; i < 30; i++) { /* more states than one segment holds */
        vr_branch(&rig, &other, 2, 100 + i, 1, 100 + i, 1);
        vr_save(&rig, &other);
    }
    kv_vault_purge(rig.vault, 1);
    for (int i = 0; i < 5; i++)
        kv_vault_unpin(rig.vault, records[i]);
    assert_int_equal(vr_flush(&rig), 0);
    vr_close(&rig);
    vr_open(&rig);
    vr_settle(&rig);
    for (int i = 0; i < 5; i++)
        for (uint32_t page = 0; page < 9; page++)
            assert_false(vr_has(&rig, &chains[i], page, KV_TARGET_FULL));
    vr_free(&rig);
}

/* The sync of the group that was there before fails: the segment is the other's now. */
static void a_sync_that_fails_after_its_segment_went_to_another_group(void **state) {
    static struct vault_chain chain;
    struct vault_rig rig;

    (void)state;
    vr_init(&rig);
    make_pages_large(&rig);
    rig.options.disk_bytes = 2 * (uint64_t)VR_SEGMENT;
    rig.options.group[KV_TARGET_FULL].share = 100;
    rig.options.group[KV_TARGET_STATE].share = 100;
    vr_use_faults(&rig);
    vr_open(&rig);
    vr_chain(&rig, &chain, 1, 16); /* both segments are of pages, or one of states */
    vr_save(&rig, &chain);
    for (int i = 0; i < 3; i++)
        disk_faults_add(rig.faults, DISK_CALL_SYNC, (struct disk_fault){.result = -EIO, .is_held = true});
    vr_clock_us += 1000000;
    vr_quiesce(&rig);
    kv_vault_purge(rig.vault, 1);
    vr_settle(&rig);
    disk_faults_add(rig.faults, DISK_CALL_WRITE, held); /* a head that takes its time */
    vr_chain(&rig, &chain, 2, 1);
    vr_put_from(&rig, &chain, 0);
    vr_ask_save(&rig, &chain, KV_VAULT_SAVE_MUST);
    vr_quiesce(&rig);
    disk_faults_release(rig.faults);
    vr_settle(&rig);
    vr_quiesce(&rig);
    vr_free(&rig);
}

/* ---- gone ------------------------------------------------------------------------------------------------------------ */

static uint32_t n_headers(const struct vault_rig *rig, const struct vault_chain *chain) {
    struct vr_place place;
    uint32_t n = 0;

    for (uint32_t page = 0; page < chain->n_pages; page++)
        for (int g = 0; g < KV_GROUP_N; g++)
            n += vr_find(rig, chain, page, (enum kv_group)g, &place);
    return n;
}

static void what_is_evicted_or_purged_is_gone_from_the_files(void **state) {
    static struct vault_chain mine, other;
    struct vault_rig rig;

    (void)state;
    vr_init(&rig);
    vr_open(&rig);
    vr_branch(&rig, &mine, 1, 1, 0, 1, 6);
    vr_branch(&rig, &other, 2, 1, 0, 1, 6);
    vr_save(&rig, &mine);
    vr_save(&rig, &other);
    assert_int_equal(n_headers(&rig, &mine), 13);
    assert_int_equal(kv_vault_purge(rig.vault, 2), 13 * rig.options.group[KV_TARGET_FULL].slot_bytes);
    assert_int_equal(vr_n_pages(&rig, &other), 0); /* found no more, though its headers are still there */
    assert_int_equal(vr_flush(&rig), 0);           /* waits for them */
    assert_int_equal(n_headers(&rig, &other), 0);
    assert_int_equal(n_headers(&rig, &mine), 13);
    vr_expect_chain(&rig, &mine, true);
    kv_vault_evict_bytes(rig.vault, UINT64_MAX);
    vr_settle(&rig);
    assert_int_equal(n_headers(&rig, &mine), 0);
    vr_close(&rig);
    vr_open(&rig);
    vr_settle(&rig);
    assert_int_equal(vr_stats(&rig).group[KV_TARGET_FULL].n_stored, 0);
    vr_free(&rig);
}

static void what_is_purged_while_it_is_saved_does_not_come_back(void **state) {
    static struct vault_chain chain, waiting, other;
    struct vault_rig rig;

    (void)state;
    vr_init(&rig);
    vr_use_faults(&rig);
    vr_open(&rig);
    vr_branch(&rig, &chain, 2, 1, 0, 1, 20);
    vr_branch(&rig, &waiting, 2, 1, 0, 2, 3);
    vr_branch(&rig, &other, 3, 1, 0, 2, 3);
    vr_save(&rig, &other);
    kv_vault_purge(rig.vault, 3);
    vr_settle(&rig);
    vr_put_from(&rig, &chain, 0);
    vr_put_from(&rig, &waiting, 0);
    vr_put_from(&rig, &other, 0);
    disk_faults_always(rig.faults, DISK_CALL_WRITE, held);
    vr_ask_save(&rig, &chain, KV_VAULT_SAVE_MUST);
    vr_ask_save(&rig, &waiting, KV_VAULT_SAVE_MUST);
    vr_ask_save(&rig, &other, KV_VAULT_SAVE_MUST);
    vr_quiesce(&rig);
    assert_int_equal(disk_faults_n_held(rig.faults), 4);
    kv_vault_purge(rig.vault, 2);
    disk_faults_always(rig.faults, DISK_CALL_WRITE, none);
    disk_faults_release(rig.faults);
    vr_settle(&rig);
    assert_int_equal(vr_flush(&rig), 0);
    assert_int_equal(n_headers(&rig, &chain) + n_headers(&rig, &waiting), 0);
    vr_expect_chain(&rig, &other, true); /* of somebody else */
    vr_free(&rig);
}

static void what_cannot_be_blanked_now_is_blanked_later(void **state) {
    static struct vault_chain chain;
    struct vault_rig rig;

    (void)state;
    vr_init(&rig);
    vr_use_faults(&rig);
    vr_open(&rig);
    for (int i = 0; i < 10; i++) {
        vr_chain(&rig, &chain, 1 + i, 12);
        vr_save(&rig, &chain);
    }
    disk_faults_always(rig.faults, DISK_CALL_WRITE, held);
    kv_vault_evict_bytes(rig.vault, UINT64_MAX);
    vr_quiesce(&rig);
    assert_int_equal(vr_stats(&rig).n_to_blank, 250);
    disk_faults_always(rig.faults, DISK_CALL_WRITE, none);
    disk_faults_release(rig.faults);
    vr_settle(&rig);
    assert_int_equal(n_headers(&rig, &chain), 0);
    disk_faults_always(rig.faults, DISK_CALL_WRITE, (struct disk_fault){.result = -EIO});
    disk_faults_always(rig.faults, DISK_CALL_WRITE, none);
    vr_save(&rig, &chain);
    disk_faults_add(rig.faults, DISK_CALL_WRITE, (struct disk_fault){.result = -EIO});
    kv_vault_evict_bytes(rig.vault, 1);
    vr_settle(&rig);
    assert_int_equal(vr_stats(&rig).n_blank_errors, 1);
    vr_free(&rig);
}

/* More than ever lay there at a time wait to be blanked: then nothing is saved, and no memory overrun. */
static void slots_that_wait_to_be_blanked_are_no_more_than_there_are(void **state) {
    static struct vault_chain chain;
    struct vault_rig rig;

    (void)state;
    vr_init(&rig);
    make_pages_large(&rig);
    vr_use_faults(&rig);
    vr_open(&rig);
    for (int i = 0; i < 10; i++) {
        vr_chain(&rig, &chain, 1 + i, 15);
        vr_put_from(&rig, &chain, 0);
        vr_ask_save(&rig, &chain, KV_VAULT_SAVE_MUST);
        vr_quiesce(&rig);
        if (i < 9)
            vr_empty_shelf(&rig);
        for (int k = 0; i == 0 && k < 4; k++) /* the first to be blanked never are */
            disk_faults_add(rig.faults, DISK_CALL_WRITE, (struct disk_fault){.is_held = true, .is_deaf = true});
        kv_vault_evict_bytes(rig.vault, UINT64_MAX);
        vr_quiesce(&rig);
        assert_int_equal(disk_faults_n_held(rig.faults), 4);
        assert_true(vr_stats(&rig).n_to_blank <= 75);
    }
    assert_true(kv_vault_is_saving(rig.vault)); /* it waits for them */
    vr_pass(&rig, VR_DEADLINE_US);
    assert_false(kv_vault_is_saving(rig.vault)); /* no longer */
    disk_faults_release(rig.faults);
    vr_quiesce(&rig);
    vr_pass(&rig, 61000000);
    vr_settle(&rig);
    vr_save(&rig, &chain);
    vr_expect_chain(&rig, &chain, false);
    vr_free(&rig);
}

/* ---- what is saved --------------------------------------------------------------------------------------------------- */

static void short_chains_are_saved_only_if_they_must_be(void **state) {
    static struct vault_chain chain;
    struct vault_rig rig;

    (void)state;
    vr_init(&rig);
    rig.options.n_pages_min = 4;
    vr_open(&rig);
    vr_chain(&rig, &chain, 1, 3);
    vr_put_from(&rig, &chain, 0);
    vr_ask_save(&rig, &chain, KV_VAULT_SAVE_WORTH);
    assert_int_equal(vr_flush(&rig), 0);
    assert_int_equal(vr_stats(&rig).n_skipped_short, 1);
    assert_int_equal(vr_n_pages(&rig, &chain), 0);
    vr_ask_save(&rig, &chain, KV_VAULT_SAVE_MUST);
    assert_int_equal(vr_flush(&rig), 0);
    vr_expect_chain(&rig, &chain, true);
    vr_chain(&rig, &chain, 2, 3);
    vr_put_from(&rig, &chain, 0);
    kv_vault_save_all(rig.vault);
    rig.is_asked = true;
    assert_int_equal(vr_flush(&rig), 0);
    assert_int_equal(vr_n_pages(&rig, &chain), 0);
    vr_chain(&rig, &chain, 3, 4);
    vr_put_from(&rig, &chain, 0);
    kv_vault_save_all(rig.vault);
    rig.is_asked = true;
    assert_int_equal(vr_flush(&rig), 0);
    vr_expect_chain(&rig, &chain, true);
    vr_free(&rig);
}

static void an_empty_bucket_lets_pass_what_must(void **state) {
    static struct vault_chain chain, other;
    struct vault_rig rig;
    uint64_t slot_bytes, written;

    (void)state;
    vr_init(&rig);
    rig.options.write_bytes_per_day = 24 * 1000000;
    vr_open(&rig);
    slot_bytes = rig.options.group[KV_TARGET_FULL].slot_bytes;
    for (int i = 0; vr_stats(&rig).budget_bytes > 0; i++) {
        assert_true(i < 2000);
        vr_chain(&rig, &chain, 1 + i % 3, 30);
        vr_put_from(&rig, &chain, 0);
        vr_ask_save(&rig, &chain, KV_VAULT_SAVE_WORTH);
        vr_settle(&rig);
        vr_empty_shelf(&rig);
        kv_vault_purge(rig.vault, 1);
        vr_settle(&rig);
    }
    written = vr_stats(&rig).saved_bytes;
    assert_in_range(written, 24 * 1000000, 24 * 1000000 + 4 * slot_bytes);
    assert_int_equal(written, vr_stats(&rig).n_saved_pages * slot_bytes);
    vr_chain(&rig, &chain, 500, 5);
    vr_chain(&rig, &other, 501, 5);
    vr_put_from(&rig, &chain, 0);
    vr_put_from(&rig, &other, 0);
    vr_ask_save(&rig, &chain, KV_VAULT_SAVE_WORTH);
    vr_ask_save(&rig, &other, KV_VAULT_SAVE_MUST);
    vr_settle(&rig);
    assert_int_equal(vr_n_pages(&rig, &chain), 0);
    assert_int_equal(vr_n_pages(&rig, &other), 5);
    assert_true(vr_stats(&rig).n_skipped_budget > 0);
    vr_clock_us += UINT64_C(3600) * 1000000; /* an hour: a million bytes, less what was overdrawn */
    vr_quiesce(&rig);
    assert_in_range(vr_stats(&rig).budget_bytes, 1, 1000000);
    vr_ask_save(&rig, &chain, KV_VAULT_SAVE_WORTH);
    vr_settle(&rig);
    vr_expect_chain(&rig, &chain, true);
    vr_clock_us += UINT64_C(48 * 3600) * 1000000;
    vr_quiesce(&rig);
    assert_int_equal(vr_stats(&rig).budget_bytes, 24 * 1000000); /* no more than a day's */
    vr_free(&rig);
}

static void a_full_queue_skips_what_need_not_be_saved(void **state) {
    static struct vault_chain chain;
    static struct kv_key keys[300];
    struct vault_rig rig;
    int n_saved = 0;

    (void)state;
    vr_init(&rig);
    rig.shelf_options.group[KV_TARGET_STATE].n_slots = 300;
    rig.shelf_options.group[KV_TARGET_FULL].n_slots = 300;
    rig.shelf_options.group[KV_TARGET_STATE].payload_bytes = 4096;
    rig.shelf_options.group[KV_TARGET_FULL].payload_bytes = 4096;
    rig.shelf_options.group[KV_DRAFT_FULL].payload_bytes = rig.shelf_options.group[KV_DRAFT_FULL].n_slots = 0;
    vr_open(&rig);
    for (int i = 0; i < 300; i++) {
        vr_chain(&rig, &chain, 1 + i, 1);
        keys[i] = chain.keys[0];
        vr_put_from(&rig, &chain, 0);
        vr_ask_save(&rig, &chain, i >= 290 ? KV_VAULT_SAVE_MUST : KV_VAULT_SAVE_WORTH);
        vr_ask_save(&rig, &chain, KV_VAULT_SAVE_WORTH); /* the same again: it stands there once */
    }
    assert_in_range(vr_stats(&rig).n_skipped_full, 44, 2 * 44);
    assert_int_equal(vr_flush(&rig), 0);
    for (int i = 0; i < 300; i++) {
        bool is_saved = kv_vault_has(rig.vault, &keys[i], 0, KV_TARGET_FULL);

        assert_true(i < 290 || is_saved);
        n_saved += is_saved;
    }
    assert_int_equal(n_saved, 256);
    vr_free(&rig);
}

/* Its pages leave the shelf, and others come into their records, while it waits or is being saved. */
static void what_leaves_the_shelf_before_its_turn_is_skipped(void **state) {
    static struct vault_chain chain, waiting, other;
    struct vault_rig rig;

    (void)state;
    vr_init(&rig);
    vr_use_faults(&rig);
    vr_open(&rig);
    vr_chain(&rig, &other, 100, 2);
    vr_save(&rig, &other);
    vr_chain(&rig, &chain, 1, 20);
    vr_chain(&rig, &waiting, 2, 20);
    vr_put_from(&rig, &chain, 0);
    vr_put_from(&rig, &waiting, 0);
    disk_faults_always(rig.faults, DISK_CALL_WRITE, held);
    vr_ask_save(&rig, &chain, KV_VAULT_SAVE_MUST);
    vr_ask_save(&rig, &waiting, KV_VAULT_SAVE_MUST);
    vr_quiesce(&rig);
    vr_empty_shelf(&rig);
    vr_chain(&rig, &other, 3, 45);
    vr_put_from(&rig, &other, 0);
    disk_faults_always(rig.faults, DISK_CALL_WRITE, none);
    disk_faults_release(rig.faults);
    vr_settle(&rig);
    assert_in_range(vr_n_pages(&rig, &chain), 1, 4);
    assert_false(vr_has(&rig, &chain, 19, KV_TARGET_STATE));
    assert_int_equal(vr_n_pages(&rig, &waiting), 0);
    assert_int_equal(vr_n_pages(&rig, &other), 0); /* nobody asked for it */
    assert_int_equal(vr_stats(&rig).n_skipped_gone, 2);
    vr_free(&rig);
}

static void a_chain_grows_from_what_the_disk_has(void **state) {
    static struct vault_chain chain, longer, stranger;
    struct vault_rig rig;

    (void)state;
    vr_init(&rig);
    vr_open(&rig);
    vr_chain(&rig, &chain, 1, 10);
    vr_branch(&rig, &longer, 1, 1, 10, 2, 15);
    vr_branch(&rig, &stranger, 1, 3, 10, 3, 15);
    vr_save(&rig, &chain);
    vr_put_from(&rig, &longer, 10); /* the shelf has its end alone */
    vr_ask_save(&rig, &longer, KV_VAULT_SAVE_MUST);
    vr_settle(&rig);
    vr_expect_chain(&rig, &longer, true);
    assert_int_equal(vr_stats(&rig).group[KV_TARGET_FULL].n_stored, 15);
    vr_put_from(&rig, &stranger, 10); /* and of this one nobody has the beginning */
    vr_ask_save(&rig, &stranger, KV_VAULT_SAVE_MUST);
    vr_settle(&rig);
    assert_int_equal(vr_stats(&rig).group[KV_TARGET_FULL].n_stored, 15);
    assert_int_equal(vr_stats(&rig).n_skipped_gone, 1);
    vr_free(&rig);
}

/* ---- a file system that is full -------------------------------------------------------------------------------------- */

static void wait_for_space(const char *path) {
    struct statvfs status;

    for (int i = 0; i < 1000; i++) {
        assert_int_equal(statvfs(path, &status), 0);
        if (status.f_bfree * status.f_bsize > (uint64_t)4 * VR_SEGMENT)
            return;
        usleep(5000);
    }
    fail_msg("files that were removed keep their space");
}

static void on_a_file_system_that_is_full_it_lives_in_what_it_got(void **state) {
    static struct vault_chain chain[10];
    struct vault_rig rig;
    char path[] = "/tmp/small-XXXXXX";
    int fd;
    char *ballast = calloc(1, VR_SEGMENT);

    (void)state;
    assert_non_null(ballast);
    assert_non_null(mkdtemp(path));
    if (mount("tmpfs", path, "tmpfs", 0, "size=40m,mode=0700") != 0) {
        printf("no file system of limited size can be mounted: %s\n", strerror(errno));
        rmdir(path);
        free(ballast);
        skip();
    }
    vr_init_in(&rig, path);
    make_pages_large(&rig);
    rig.options.disk_bytes = 16 * (uint64_t)VR_SEGMENT; /* more than there is */
    vr_open(&rig);
    assert_in_range(vr_stats(&rig).room_bytes, 4 * VR_SEGMENT, 5 * VR_SEGMENT); /* known before the first file */
    for (int i = 0; i < 10; i++) {
        vr_chain(&rig, &chain[i], 1 + i, 8);
        vr_save(&rig, &chain[i]);
        assert_true(vr_is_whole(&rig, &chain[i]));
    }
    assert_in_range(vr_stats(&rig).bytes, 3 * VR_SEGMENT, 5 * VR_SEGMENT);
    assert_int_equal(vr_stats(&rig).room_bytes, vr_stats(&rig).bytes);
    vr_expect_chain(&rig, &chain[9], false);
    vr_expect_chain(&rig, &chain[8], false);
    vr_close(&rig);
    vr_open(&rig);
    vr_settle(&rig);
    vr_expect_chain(&rig, &chain[9], false);
    vr_free(&rig);

    vr_init_in(&rig, path); /* somebody else took all of it before the first file */
    vr_open(&rig);
    wait_for_space(path); /* a ring lets go of deleted files some time after it was closed */
    fd = open(strcat(strcpy((char[64]){0}, path), "/ballast"), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    while (write(fd, ballast, VR_SEGMENT) > 0)
        continue;
    vr_chain(&rig, &chain[0], 1, 3);
    vr_save(&rig, &chain[0]);
    assert_true(vr_stats(&rig).is_write_off);
    assert_int_equal(vr_stats(&rig).bytes, 0);
    assert_int_equal(ftruncate(fd, 0), 0);
    close(fd);
    vr_pass(&rig, 30000000);
    vr_save(&rig, &chain[0]);
    vr_expect_chain(&rig, &chain[0], true);
    assert_int_equal(unlink(strcat(strcpy((char[64]){0}, path), "/ballast")), 0);
    vr_free(&rig);
    assert_int_equal(umount2(path, MNT_DETACH), 0);
    rmdir(path);
    free(ballast);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_longest_unused_chain_leaves_from_its_end),
        cmocka_unit_test(a_chain_that_is_saved_again_stays),
        cmocka_unit_test(after_a_restart_a_chain_leaves_from_its_end_too),
        cmocka_unit_test(no_group_has_more_than_its_share),
        cmocka_unit_test(a_flood_of_one_user_leaves_the_other_his_share),
        cmocka_unit_test(what_is_pinned_stays_and_saving_goes_without),
        cmocka_unit_test(segments_go_from_one_group_to_another),
        cmocka_unit_test(what_left_a_segment_that_nobody_could_have_stays_purged),
        cmocka_unit_test(a_sync_that_fails_after_its_segment_went_to_another_group),
        cmocka_unit_test(what_is_evicted_or_purged_is_gone_from_the_files),
        cmocka_unit_test(what_is_purged_while_it_is_saved_does_not_come_back),
        cmocka_unit_test(what_cannot_be_blanked_now_is_blanked_later),
        cmocka_unit_test(slots_that_wait_to_be_blanked_are_no_more_than_there_are),
        cmocka_unit_test(short_chains_are_saved_only_if_they_must_be),
        cmocka_unit_test(an_empty_bucket_lets_pass_what_must),
        cmocka_unit_test(a_full_queue_skips_what_need_not_be_saved),
        cmocka_unit_test(what_leaves_the_shelf_before_its_turn_is_skipped),
        cmocka_unit_test(a_chain_grows_from_what_the_disk_has),
        cmocka_unit_test(on_a_file_system_that_is_full_it_lives_in_what_it_got),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
