/* What a start finds in its folder, and what an end leaves: stores of others, of other times and other sizes, damage in
 * every head and header, operations that are out. */
#include "vault_rig.h"

static const struct disk_fault none, held = {.is_held = true}, deaf = {.is_held = true, .is_deaf = true};

/* The number of files in the folder. */
static void count_file(void *user, const char *name) {
    uint32_t segment;

    *(uint32_t *)user += disk_segment_parse(name, &segment);
}

static uint32_t n_files(const struct vault_rig *rig) {
    uint32_t n = 0;

    assert_int_equal(disk_folder_list(&rig->folder, count_file, &n), 0);
    return n;
}

static void reopen(struct vault_rig *rig) {
    vr_close(rig);
    vr_open(rig);
    vr_settle(rig);
}

/* ---- others ---------------------------------------------------------------------------------------------------------- */

static void another_store_is_left_alone(void **state) {
    static struct vault_chain chain, mine;
    struct vault_rig rig;
    struct kv_vault_stats stats;

    (void)state;
    vr_init(&rig);
    vr_open(&rig);
    vr_chain(&rig, &chain, 1, 5);
    vr_save(&rig, &chain);
    rig.options.store_id[3] ^= 1;
    reopen(&rig);
    stats = vr_stats(&rig);
    assert_int_equal(stats.n_segments_foreign, 3);
    assert_int_equal(stats.group[KV_TARGET_FULL].n_stored, 0);
    vr_chain(&rig, &mine, 2, 5);
    for (int i = 0; i < 40; i++) { /* beside it, however full it gets */
        vr_chain(&rig, &mine, 2 + i, 40);
        vr_save(&rig, &mine);
        assert_true(vr_stats(&rig).bytes <= vr_stats(&rig).cap_bytes);
    }
    vr_expect_chain(&rig, &mine, true);
    rig.options.store_id[3] ^= 1;
    reopen(&rig);
    vr_expect_chain(&rig, &chain, true);
    vr_free(&rig);
}

static void reseal(uint8_t *block) {
    uint64_t checksum = htole64(format_checksum(block, FORMAT_BLOCK_BYTES - 8));

    memcpy(block + FORMAT_BLOCK_BYTES - 8, &checksum, sizeof checksum);
}

/* at, value: of a u32 in a block. The checksum fits. */
static void change(struct vault_rig *rig, uint32_t segment, uint64_t offset, uint32_t at, uint32_t value) {
    uint8_t block[FORMAT_BLOCK_BYTES];

    vr_read_file(rig, segment, offset, block, sizeof block);
    memcpy(block + at, &value, sizeof value);
    reseal(block);
    vr_write_file(rig, segment, offset, block, sizeof block);
}

enum { AT_VERSION = 8, AT_BYTE_ORDER = 12, AT_FEATURES = 16 };

static void other_versions_byte_orders_and_features_are_not_read_nor_overwritten(void **state) {
    static const struct {
        uint32_t at, value;
    } changes[] = {{AT_VERSION, 2}, {AT_BYTE_ORDER, 0x04030201}, {AT_FEATURES, 4}};
    static struct vault_chain chain, other;
    static uint8_t before[1 << 16], after[1 << 16];

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(changes); i++)
        for (int of_head = 0; of_head < 2; of_head++) {
            struct vault_rig rig;
            struct vr_place place;

            vr_init(&rig);
            vr_open(&rig);
            vr_chain(&rig, &chain, 1, 5);
            vr_save(&rig, &chain);
            vr_close(&rig);
            assert_true(vr_find(&rig, &chain, 2, KV_TARGET_FULL, &place));
            change(&rig, place.segment, of_head ? 0 : place.offset, changes[i].at, changes[i].value);
            vr_read_file(&rig, place.segment, 0, before, sizeof before);
            vr_open(&rig);
            vr_settle(&rig);
            assert_int_equal(vr_n_pages(&rig, &chain), of_head ? 0 : 2);
            assert_int_equal(of_head ? vr_stats(&rig).n_segments_foreign : vr_stats(&rig).n_scan_foreign, 1);
            for (int k = 0; k < 20; k++) {
                vr_chain(&rig, &other, 2 + k, 60);
                vr_save(&rig, &other);
            }
            vr_expect_chain(&rig, &other, true);
            vr_read_file(&rig, place.segment, of_head ? 0 : place.offset, after, rig.options.group[0].slot_bytes);
            assert_memory_equal(after, before + (of_head ? 0 : place.offset), rig.options.group[0].slot_bytes);
            vr_free(&rig);
        }
}

static void other_weights_of_the_same_shapes_find_nothing_and_keep_it(void **state) {
    static struct vault_chain chain, mine;
    struct vault_rig rig;

    (void)state;
    vr_init(&rig);
    vr_open(&rig);
    vr_chain(&rig, &chain, 1, 5);
    vr_save(&rig, &chain);
    rig.options.fingerprint[0] ^= 1;
    reopen(&rig);
    vr_chain(&rig, &mine, 1, 5); /* the same tokens */
    assert_int_equal(vr_n_pages(&rig, &mine), 0);
    vr_save(&rig, &mine);
    vr_expect_chain(&rig, &mine, true);
    assert_int_equal(vr_read_page(&rig, &chain, 1, KV_TARGET_FULL), -EBADMSG); /* even under their key */
    vr_settle(&rig);
    rig.options.fingerprint[0] ^= 1;
    reopen(&rig);
    assert_int_equal(vr_n_pages(&rig, &chain), 1); /* all but the one that was asked for under a wrong name */
    assert_true(vr_has(&rig, &chain, 4, KV_TARGET_STATE));
    vr_free(&rig);
}

static void another_drafter_finds_the_target_and_no_draft(void **state) {
    static struct vault_chain chain;
    struct vault_rig rig;

    (void)state;
    vr_init(&rig);
    vr_open(&rig);
    vr_chain(&rig, &chain, 1, 5);
    vr_save(&rig, &chain);
    rig.options.drafter[0] ^= 1;
    reopen(&rig);
    assert_int_equal(vr_stats(&rig).n_scan_foreign, 5);
    for (uint32_t page = 0; page < 5; page++)
        assert_false(vr_has(&rig, &chain, page, KV_DRAFT_FULL));
    vr_expect_chain(&rig, &chain, false);
    vr_save(&rig, &chain); /* its own draft pages */
    vr_expect_chain(&rig, &chain, true);
    reopen(&rig);
    vr_expect_chain(&rig, &chain, true);
    vr_free(&rig);
}

static void slots_of_another_size_make_room_when_it_is_needed(void **state) {
    static struct vault_chain chain, mine;
    struct vault_rig rig;

    (void)state;
    vr_init(&rig);
    vr_open(&rig);
    vr_chain(&rig, &chain, 1, 5);
    vr_save(&rig, &chain);
    vr_close(&rig);
    rig.shelf_options.group[KV_TARGET_FULL].payload_bytes += 4096; /* another dtype, another T */
    vr_open(&rig);
    vr_settle(&rig);
    assert_int_equal(vr_stats(&rig).n_segments_foreign, 1);
    assert_int_equal(vr_n_pages(&rig, &chain), 0);
    vr_chain(&rig, &mine, 2, 5);
    vr_save(&rig, &mine);
    vr_expect_chain(&rig, &mine, true);
    vr_close(&rig);
    rig.shelf_options.group[KV_TARGET_FULL].payload_bytes -= 4096;
    vr_open(&rig);
    vr_settle(&rig);
    assert_int_equal(vr_n_pages(&rig, &chain), 5); /* it was not needed yet */
    vr_close(&rig);
    rig.shelf_options.group[KV_TARGET_FULL].payload_bytes = (512 << 10) - 4096;
    rig.shelf_options.group[KV_TARGET_FULL].n_slots = 20;
    rig.options.disk_bytes = 5 * (uint64_t)VR_SEGMENT;
    rig.options.group[KV_TARGET_FULL].share = 60;
    vr_open(&rig);
    vr_settle(&rig);
    for (int i = 0; i < 6; i++) {
        vr_chain(&rig, &mine, 3 + i, 10);
        vr_save(&rig, &mine);
        assert_true(vr_is_whole(&rig, &mine));
    }
    assert_int_equal(vr_stats(&rig).bytes, 5 * VR_SEGMENT);
    assert_int_equal(vr_stats(&rig).group[KV_TARGET_FULL].n_stored, 45); /* in their place too */
    vr_free(&rig);
}

/* Who wrote it may have ended before it was synced: the kernel has it, and a cut of power would take it. */
static void what_is_found_is_synced_by_the_first_flush(void **state) {
    static struct vault_chain chain;
    struct vault_rig rig;

    (void)state;
    vr_init(&rig);
    vr_open(&rig);
    vr_chain(&rig, &chain, 1, 5);
    vr_save(&rig, &chain);
    vr_close(&rig);
    vr_use_faults(&rig);
    vr_open(&rig);
    vr_settle(&rig);
    assert_int_equal(disk_faults_n_calls(rig.faults, DISK_CALL_SYNC), 0);
    assert_int_equal(vr_flush(&rig), 0);
    assert_int_equal(disk_faults_n_calls(rig.faults, DISK_CALL_SYNC), 3); /* of pages, states and drafts */
    assert_int_equal(vr_flush(&rig), 0);
    assert_int_equal(disk_faults_n_calls(rig.faults, DISK_CALL_SYNC), 3);
    vr_free(&rig);
}

/* ---- damage ---------------------------------------------------------------------------------------------------------- */

static void damaged_heads_and_headers_cost_what_they_named(void **state) {
    static const uint32_t spots[] = {0, 8, 32, 56, 60, 64, 72, 112, 188, 300, 4088, 4095};
    static struct vault_chain chain, other;
    struct vault_rig rig;

    (void)state;
    vr_init(&rig);
    vr_open(&rig);
    vr_chain(&rig, &chain, 1, 5);
    vr_chain(&rig, &other, 2, 5);
    vr_save(&rig, &chain);
    vr_save(&rig, &other);
    for (size_t i = 0; i < ARRAY_LEN(spots); i++)
        for (int of_head = 0; of_head < 2; of_head++) {
            struct vr_place place;
            uint8_t byte;

            vr_close(&rig);
            assert_true(vr_find(&rig, &chain, 2, KV_TARGET_FULL, &place));
            vr_read_file(&rig, place.segment, (of_head ? 0 : place.offset) + spots[i], &byte, 1);
            byte ^= 0x20;
            vr_write_file(&rig, place.segment, (of_head ? 0 : place.offset) + spots[i], &byte, 1);
            vr_open(&rig);
            vr_settle(&rig);
            assert_int_equal(vr_n_pages(&rig, &chain), of_head ? 0 : 2);
            assert_int_equal(vr_n_pages(&rig, &other), of_head ? 0 : 5);
            vr_save(&rig, &chain); /* it heals */
            vr_save(&rig, &other);
            vr_expect_chain(&rig, &chain, true);
            vr_expect_chain(&rig, &other, true);
        }
    vr_free(&rig);
}

static void a_segment_under_the_number_of_another_is_not_taken_for_it(void **state) {
    static uint8_t bytes[1 << 20];
    static struct vault_chain chain;
    struct vault_rig rig;
    struct vr_place full, draft;

    (void)state;
    vr_init(&rig);
    vr_open(&rig);
    vr_chain(&rig, &chain, 1, 5);
    vr_save(&rig, &chain);
    assert_true(vr_find(&rig, &chain, 0, KV_TARGET_FULL, &full));
    assert_true(vr_find(&rig, &chain, 0, KV_DRAFT_FULL, &draft));
    vr_close(&rig);
    vr_read_file(&rig, full.segment, 0, bytes, sizeof bytes);
    vr_write_file(&rig, draft.segment, 0, bytes, sizeof bytes);
    vr_open(&rig);
    vr_settle(&rig);
    assert_int_equal(vr_stats(&rig).n_segments_foreign, 1);
    vr_expect_chain(&rig, &chain, false);
    assert_false(vr_has(&rig, &chain, 0, KV_DRAFT_FULL));
    vr_free(&rig);
}

/* The same page twice: one is found, the other is blanked, so that a purge finds all there is. */
static void a_page_that_lies_there_twice_is_found_once(void **state) {
    static uint8_t slot[1 << 16];
    static struct vault_chain chain;
    struct vault_rig rig;
    struct vr_place place;

    (void)state;
    vr_init(&rig);
    vr_open(&rig);
    vr_chain(&rig, &chain, 1, 5);
    vr_save(&rig, &chain);
    assert_true(vr_find(&rig, &chain, 1, KV_TARGET_FULL, &place));
    vr_close(&rig);
    vr_read_file(&rig, place.segment, place.offset, slot, place.slot_bytes);
    vr_write_file(&rig, place.segment, place.offset + 50 * (uint64_t)place.slot_bytes, slot, place.slot_bytes);
    vr_open(&rig);
    vr_settle(&rig);
    assert_int_equal(vr_stats(&rig).group[KV_TARGET_FULL].n_stored, 5);
    vr_expect_chain(&rig, &chain, true);
    kv_vault_purge(rig.vault, 1);
    vr_settle(&rig);
    assert_false(vr_find(&rig, &chain, 1, KV_TARGET_FULL, &place));
    vr_free(&rig);
}

static void a_head_or_header_that_cannot_be_read_costs_what_it_named(void **state) {
    static struct vault_chain chain;
    struct vault_rig rig;
    int n_heads;

    (void)state;
    vr_init(&rig);
    vr_open(&rig);
    vr_chain(&rig, &chain, 1, 5);
    vr_save(&rig, &chain);
    vr_close(&rig);
    for (int n_before = 0; n_before < 6; n_before++) { /* heads, then headers in runs */
        for (int n_times = 1; n_times <= 2; n_times++) {
            vr_use_faults(&rig);
            for (int i = 0; i < n_before; i++)
                disk_faults_add(rig.faults, DISK_CALL_READ, none);
            for (int i = 0; i < n_times; i++) /* a run, and then the first of those that are read one by one */
                disk_faults_add(rig.faults, DISK_CALL_READ, (struct disk_fault){.result = -EIO});
            vr_open(&rig);
            vr_settle(&rig);
            n_heads = max_int((int)vr_stats(&rig).n_segments - n_before, 0);
            assert_int_equal(vr_stats(&rig).n_segments_foreign, min_int(n_heads, n_times));
            assert_true(vr_stats(&rig).n_scan_bad <= (uint64_t)(n_times - 1));
            vr_close(&rig);
        }
    }
    vr_open(&rig);
    vr_settle(&rig);
    vr_expect_chain(&rig, &chain, true); /* nothing was written over */
    vr_free(&rig);
}

static void a_disk_that_hangs_at_the_start_holds_up_nobody(void **state) {
    static struct vault_chain chain, other;
    struct vault_rig rig;
    struct vr_flush flush;

    (void)state;
    vr_init(&rig);
    vr_open(&rig);
    vr_chain(&rig, &chain, 1, 5);
    vr_save(&rig, &chain);
    for (int n_before = 0; n_before < 5; n_before += 4) { /* in a head, in a header */
        vr_close(&rig);
        vr_use_faults(&rig);
        for (int i = 0; i < n_before; i++)
            disk_faults_add(rig.faults, DISK_CALL_READ, none);
        disk_faults_add(rig.faults, DISK_CALL_READ, deaf);
        vr_open(&rig);
        vr_chain(&rig, &other, 2 + n_before, 3);
        vr_put_from(&rig, &other, 0);
        vr_ask_save(&rig, &other, KV_VAULT_SAVE_MUST);
        vr_ask_flush(&rig, &flush);
        vr_quiesce(&rig);
        assert_true(vr_stats(&rig).is_scanning);
        vr_pass(&rig, VR_DEADLINE_US);
        vr_settle(&rig);
        vr_quiesce(&rig);
        assert_int_equal(flush.n_done, 1);
        assert_false(vr_stats(&rig).is_scanning);
        vr_expect_chain(&rig, &other, true);
        disk_faults_release(rig.faults);
        vr_quiesce(&rig);
    }
    vr_free(&rig);
}

/* ---- while it is read ------------------------------------------------------------------------------------------------ */

static void saving_goes_on_while_the_folder_is_read(void **state) {
    static struct vault_chain chain[4], other;
    struct vault_rig rig;

    (void)state;
    vr_init(&rig);
    vr_open(&rig);
    for (int i = 0; i < 4; i++) {
        vr_chain(&rig, &chain[i], 1 + i, 50);
        vr_save(&rig, &chain[i]);
    }
    vr_close(&rig);
    vr_open(&rig);
    vr_chain(&rig, &other, 100, 10);
    vr_put_from(&rig, &other, 0);
    vr_ask_save(&rig, &other, KV_VAULT_SAVE_MUST);
    vr_put_from(&rig, &chain[3], 0); /* the same as is about to be found */
    vr_ask_save(&rig, &chain[3], KV_VAULT_SAVE_MUST);
    vr_settle(&rig);
    assert_int_equal(vr_stats(&rig).group[KV_TARGET_FULL].n_stored, 210);
    for (int i = 0; i < 4; i++)
        vr_expect_chain(&rig, &chain[i], true);
    vr_expect_chain(&rig, &other, true);
    vr_free(&rig);
}

static void what_is_purged_while_the_folder_is_read_does_not_come_back(void **state) {
    static struct vault_chain mine, other;
    struct vault_rig rig;
    struct vr_place place;

    (void)state;
    vr_init(&rig);
    vr_open(&rig);
    vr_branch(&rig, &mine, 1, 1, 0, 1, 50);
    vr_branch(&rig, &other, 2, 1, 0, 1, 50);
    vr_save(&rig, &mine);
    vr_save(&rig, &other);
    vr_close(&rig);
    vr_open(&rig);
    kv_vault_purge(rig.vault, 2);
    vr_settle(&rig);
    assert_int_equal(vr_n_pages(&rig, &other), 0);
    assert_false(vr_find(&rig, &other, 7, KV_TARGET_FULL, &place));
    vr_expect_chain(&rig, &mine, true);
    reopen(&rig);
    assert_int_equal(vr_n_pages(&rig, &other), 0);
    vr_close(&rig);
    vr_open(&rig);
    for (uint32_t uid = 100; uid < 130; uid++) /* more than it remembers: then nobody's are found */
        kv_vault_purge(rig.vault, uid);
    vr_settle(&rig);
    assert_int_equal(vr_n_pages(&rig, &mine), 0);
    vr_free(&rig);
}

/* ---- other sizes ----------------------------------------------------------------------------------------------------- */

static void make_pages_large(struct vault_rig *rig) {
    for (int g = 0; g < KV_GROUP_N; g++) {
        bool is_kept = g == KV_TARGET_FULL || g == KV_TARGET_STATE;

        rig->shelf_options.group[g].payload_bytes = is_kept ? (512 << 10) - 4096 : 0;
        rig->shelf_options.group[g].n_slots = g == KV_TARGET_FULL ? 20 : is_kept ? 3 : 0;
    }
}

static void a_smaller_store_gives_up_files_that_hold_least(void **state) {
    static struct vault_chain chain[8], last;
    struct vault_rig rig;
    uint32_t n_whole = 0;

    (void)state;
    vr_init(&rig);
    make_pages_large(&rig);
    rig.options.disk_bytes = 16 * (uint64_t)VR_SEGMENT;
    vr_open(&rig);
    for (int i = 0; i < 8; i++) {
        vr_chain(&rig, &chain[i], 1 + i, 14);
        vr_save(&rig, &chain[i]);
    }
    assert_true(n_files(&rig) >= 9);
    rig.options.disk_bytes = 5 * (uint64_t)VR_SEGMENT; /* also fewer than the highest number of a file */
    reopen(&rig);
    vr_quiesce(&rig);
    assert_int_equal(n_files(&rig), 5);
    assert_int_equal(vr_stats(&rig).bytes, 5 * VR_SEGMENT);
    for (int i = 0; i < 8; i++)
        for (uint32_t page = 0; page < 14; page++) {
            bool is_there = vr_has(&rig, &chain[i], page, KV_TARGET_FULL);

            n_whole += is_there;
            if (is_there)
                assert_int_equal(vr_read_page(&rig, &chain[i], page, KV_TARGET_FULL), 0);
        }
    assert_true(n_whole >= 3 * 14); /* four of pages, or three and the states */
    vr_chain(&rig, &last, 100, 14);
    vr_save(&rig, &last);
    vr_expect_chain(&rig, &last, false);
    assert_int_equal(n_files(&rig), 5);
    rig.options.disk_bytes = 16 * (uint64_t)VR_SEGMENT;
    reopen(&rig);
    vr_expect_chain(&rig, &last, false);
    for (int i = 0; i < 8; i++) {
        vr_chain(&rig, &chain[i], 200 + i, 14);
        vr_save(&rig, &chain[i]);
    }
    assert_true(n_files(&rig) >= 9);
    vr_free(&rig);
}

/* What was in them is found again if the process ends before: a purge says that it is done when they are gone. */
static void a_flush_waits_for_files_that_go(void **state) {
    static struct vault_chain chain;

    (void)state;
    for (int fails = 0; fails < 2; fails++) {
        struct vault_rig rig;
        struct vr_flush flush;
        uint32_t n_before;

        vr_init(&rig);
        make_pages_large(&rig);
        vr_open(&rig);
        for (int i = 0; i < 3; i++) {
            vr_chain(&rig, &chain, 1 + i, 14);
            vr_save(&rig, &chain);
        }
        n_before = n_files(&rig);
        vr_close(&rig);
        rig.options.disk_bytes = 2 * (uint64_t)VR_SEGMENT;
        vr_use_faults(&rig);
        if (fails)
            disk_faults_always(rig.faults, DISK_CALL_REMOVE, (struct disk_fault){.result = -EROFS});
        else
            disk_faults_add(rig.faults, DISK_CALL_REMOVE, held);
        vr_open(&rig);
        vr_settle(&rig);
        kv_vault_purge(rig.vault, 1);
        vr_ask_flush(&rig, &flush);
        vr_quiesce(&rig);
        vr_turns(&rig, 20);
        assert_int_equal(flush.n_done, fails);
        disk_faults_release(rig.faults);
        for (int i = 0; flush.n_done == 0; i++) {
            assert_true(i < 1000);
            vr_step(&rig);
        }
        assert_int_equal(flush.result, fails ? -EIO : 0);
        assert_int_equal(n_files(&rig), fails ? n_before : 2);
        vr_free(&rig);
    }
}

static void what_is_being_written_into_a_file_that_goes_goes_too(void **state) {
    static struct vault_chain chain;
    struct vault_rig rig;

    (void)state;
    vr_init(&rig);
    make_pages_large(&rig);
    rig.options.disk_bytes = 16 * (uint64_t)VR_SEGMENT;
    vr_open(&rig);
    for (int i = 0; i < 8; i++) {
        vr_chain(&rig, &chain, 1 + i, 14);
        vr_save(&rig, &chain);
    }
    vr_close(&rig);
    rig.options.disk_bytes = 5 * (uint64_t)VR_SEGMENT;
    vr_use_faults(&rig);
    vr_open(&rig);
    vr_chain(&rig, &chain, 100, 14);
    vr_put_from(&rig, &chain, 0);
    disk_faults_always(rig.faults, DISK_CALL_WRITE, held);
    vr_ask_save(&rig, &chain, KV_VAULT_SAVE_MUST);
    vr_quiesce(&rig);
    assert_false(vr_stats(&rig).is_scanning);
    assert_true(disk_faults_n_held(rig.faults) > 0);
    disk_faults_always(rig.faults, DISK_CALL_WRITE, none);
    disk_faults_release(rig.faults);
    vr_settle(&rig);
    vr_quiesce(&rig);
    assert_int_equal(n_files(&rig), 5);
    vr_save(&rig, &chain);
    vr_expect_chain(&rig, &chain, false);
    vr_free(&rig);
}

/* Segments of 16 MiB in a store that has become too small for them, and of 8 in one that is large. */
static void files_of_another_size_are_kept_or_go_but_are_in_nobodys_way(void **state) {
    static struct vault_chain chain, other;
    struct vault_rig rig;

    (void)state;
    vr_init(&rig);
    rig.options.disk_bytes = (uint64_t)512 << 20;
    vr_open(&rig);
    assert_int_equal(vr_stats(&rig).segment_bytes, 16 << 20);
    vr_chain(&rig, &chain, 1, 5);
    vr_save(&rig, &chain);
    rig.options.disk_bytes = (uint64_t)128 << 20; /* eight of them: enough */
    reopen(&rig);
    assert_int_equal(vr_stats(&rig).segment_bytes, 16 << 20);
    vr_expect_chain(&rig, &chain, true);
    rig.options.disk_bytes = (uint64_t)64 << 20; /* four: too few */
    reopen(&rig);
    assert_int_equal(vr_stats(&rig).segment_bytes, 8 << 20);
    assert_int_equal(vr_n_pages(&rig, &chain), 0);
    assert_int_equal(n_files(&rig), 0);
    vr_save(&rig, &chain);
    vr_expect_chain(&rig, &chain, true);
    rig.options.disk_bytes = (uint64_t)2 << 30;
    reopen(&rig);
    assert_int_equal(vr_stats(&rig).segment_bytes, 8 << 20);
    vr_expect_chain(&rig, &chain, true);
    rig.options.store_id[0] ^= 1; /* and another's, of another size */
    rig.options.disk_bytes = (uint64_t)512 << 20;
    reopen(&rig);
    assert_int_equal(vr_stats(&rig).segment_bytes, 16 << 20);
    assert_int_equal(vr_stats(&rig).disk.n_segments_refused, 3);
    vr_chain(&rig, &other, 2, 5);
    vr_save(&rig, &other);
    vr_expect_chain(&rig, &other, true);
    assert_int_equal(n_files(&rig), 6);
    vr_free(&rig);
}

static void options_that_cannot_work_are_refused(void **state) {
    struct vault_rig rig;

    (void)state;
    vr_init(&rig);
    vr_open_shelf(&rig);
    rig.options.disk_bytes = VR_SEGMENT - 1;
    assert_int_equal(vr_open_vault(&rig), -EINVAL);
    rig.options.disk_bytes = 8 * (uint64_t)VR_SEGMENT;
    rig.options.group[KV_TARGET_FULL].slot_bytes += 512;
    assert_int_equal(vr_open_vault(&rig), -EINVAL);
    rig.options.group[KV_TARGET_FULL].slot_bytes = 2 * VR_SEGMENT;
    assert_int_equal(vr_open_vault(&rig), -EINVAL);
    rig.options.group[KV_TARGET_FULL].slot_bytes = 16384;
    rig.options.deadline_us = 0;
    assert_int_equal(vr_open_vault(&rig), -EINVAL);
    rig.vault = NULL;
    vr_free(&rig);
}

/* ---- the end --------------------------------------------------------------------------------------------------------- */

static void on_no_verify(struct kv_vault_verify *verify) {
    (void)verify;
    fail_msg("close calls nobody");
}

static void on_no_flush(struct kv_vault_flush *flush, int result) {
    (void)flush;
    (void)result;
    fail_msg("close calls nobody");
}

static void closing_waits_for_what_is_out_and_calls_nobody(void **state) {
    static struct vault_chain chain, other;
    struct vault_rig rig;
    struct vr_read read;
    struct kv_vault_verify verify = {.done = on_no_verify};
    struct kv_vault_flush flush = {.done = on_no_flush};
    struct kv_shelf_group_stats shelf;

    (void)state;
    vr_init(&rig);
    vr_use_faults(&rig);
    vr_open(&rig);
    vr_chain(&rig, &chain, 1, 5);
    vr_chain(&rig, &other, 2, 30);
    vr_save(&rig, &chain);
    vr_put_from(&rig, &other, 0);
    for (int call = DISK_CALL_READ; call <= DISK_CALL_SYNC; call++)
        disk_faults_always(rig.faults, (enum disk_call)call, call == DISK_CALL_WRITE ? deaf : held);
    assert_int_equal(vr_ask_read(&rig, &read, &chain, 0, KV_TARGET_FULL), 0);
    assert_int_equal(kv_vault_verify(rig.vault, &verify), 0);
    vr_ask_save(&rig, &other, KV_VAULT_SAVE_MUST);
    kv_vault_flush(rig.vault, &flush);
    vr_clock_us += 500000;
    vr_turns(&rig, 3);
    assert_true(disk_faults_n_held(rig.faults) >= 3);
    assert_true(kv_vault_close(rig.vault) > 0); /* the writes do not come when they are called */
    assert_true(kv_vault_close(rig.vault) > 0);
    disk_faults_release(rig.faults);
    vr_close_vault(&rig);
    assert_int_equal(read.n_done, 0);
    for (int g = 0; g < KV_GROUP_N; g++) {
        kv_shelf_stats(rig.shelf, (enum kv_group)g, &shelf);
        assert_int_equal(shelf.n_filling + shelf.n_pinned, 0);
    }
    vr_free(&rig);
}

static void closing_waits_for_workers(void **state) {
    static struct vault_chain chain;
    struct vault_rig rig;
    struct vr_read read;
    bool has_waited = false;

    (void)state;
    vr_init(&rig);
    vr_open(&rig);
    vr_chain(&rig, &chain, 1, 5);
    vr_save(&rig, &chain);
    vr_quiesce(&rig);
    assert_int_equal(vr_ask_read(&rig, &read, &chain, 0, KV_TARGET_FULL), 0);
    for (int i = 0; workers_n_out(rig.workers) == 0; i++) { /* it is read, and being checked */
        assert_true(i < 10000);
        usleep(100);
        kv_vault_turn(rig.vault);
    }
    for (int i = 0; kv_vault_close(rig.vault) > 0; i++) {
        assert_true(i < 10000);
        has_waited = true;
        usleep(100);
        if (i > 3)
            workers_dispatch(rig.workers);
    }
    rig.vault = NULL;
    assert_true(has_waited);
    assert_int_equal(read.n_done, 0);
    vr_free(&rig);
}

static void closing_while_the_folder_is_read_or_a_file_is_made(void **state) {
    static struct vault_chain chain;
    struct vault_rig rig;

    (void)state;
    vr_init(&rig);
    vr_open(&rig);
    vr_chain(&rig, &chain, 1, 40);
    vr_save(&rig, &chain);
    for (int i = 0; i < 12; i++) {
        vr_close(&rig);
        vr_use_faults(&rig);
        if (i >= 6)
            disk_faults_always(rig.faults, DISK_CALL_READ, held);
        vr_open(&rig);
        vr_turns(&rig, i % 6);
    }
    vr_close(&rig);
    vr_use_faults(&rig);
    vr_open(&rig);
    vr_settle(&rig);
    kv_vault_purge(rig.vault, 1);
    vr_settle(&rig);
    vr_close(&rig);
    disk_folder_list(&rig.folder, vr_remove, &rig);
    vr_use_faults(&rig);
    disk_faults_add(rig.faults, DISK_CALL_CREATE, deaf);
    vr_open(&rig);
    vr_put_from(&rig, &chain, 0);
    vr_ask_save(&rig, &chain, KV_VAULT_SAVE_MUST);
    vr_turns(&rig, 3);
    assert_true(kv_vault_close(rig.vault) > 0);
    disk_faults_release(rig.faults);
    vr_close_vault(&rig);
    vr_open_vault(&rig);
    vr_settle(&rig);
    vr_save(&rig, &chain);
    vr_expect_chain(&rig, &chain, true);
    vr_free(&rig);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(another_store_is_left_alone),
        cmocka_unit_test(other_versions_byte_orders_and_features_are_not_read_nor_overwritten),
        cmocka_unit_test(other_weights_of_the_same_shapes_find_nothing_and_keep_it),
        cmocka_unit_test(another_drafter_finds_the_target_and_no_draft),
        cmocka_unit_test(slots_of_another_size_make_room_when_it_is_needed),
        cmocka_unit_test(what_is_found_is_synced_by_the_first_flush),
        cmocka_unit_test(damaged_heads_and_headers_cost_what_they_named),
        cmocka_unit_test(a_segment_under_the_number_of_another_is_not_taken_for_it),
        cmocka_unit_test(a_page_that_lies_there_twice_is_found_once),
        cmocka_unit_test(a_head_or_header_that_cannot_be_read_costs_what_it_named),
        cmocka_unit_test(a_disk_that_hangs_at_the_start_holds_up_nobody),
        cmocka_unit_test(saving_goes_on_while_the_folder_is_read),
        cmocka_unit_test(what_is_purged_while_the_folder_is_read_does_not_come_back),
        cmocka_unit_test(a_smaller_store_gives_up_files_that_hold_least),
        cmocka_unit_test(a_flush_waits_for_files_that_go),
        cmocka_unit_test(what_is_being_written_into_a_file_that_goes_goes_too),
        cmocka_unit_test(files_of_another_size_are_kept_or_go_but_are_in_nobodys_way),
        cmocka_unit_test(options_that_cannot_work_are_refused),
        cmocka_unit_test(closing_waits_for_what_is_out_and_calls_nobody),
        cmocka_unit_test(closing_waits_for_workers),
        cmocka_unit_test(closing_while_the_folder_is_read_or_a_file_is_made),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
