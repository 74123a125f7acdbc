/* Whatever a disk answers to what is written, synced or made: the store goes on, holds no more than it may, says that
 * something survives a power cut only when it does, and lets go of everything. */
#include "vault_rig.h"

static void open_with_faults(struct vault_rig *rig) {
    vr_init(rig);
    vr_use_faults(rig);
    vr_open(rig);
}

static struct disk_fault error(int result) {
    return (struct disk_fault){.result = result};
}

static const struct disk_fault none, held = {.is_held = true}, deaf = {.is_held = true, .is_deaf = true};

static void expect_home(struct vault_rig *rig) {
    struct kv_vault_stats stats;

    vr_quiesce(rig);
    stats = vr_stats(rig);
    assert_int_equal(stats.disk.n_out, 0);
    for (int g = 0; g < KV_GROUP_N; g++) {
        struct kv_shelf_group_stats shelf;

        kv_shelf_stats(rig->shelf, (enum kv_group)g, &shelf);
        assert_int_equal(shelf.n_filling + shelf.n_pinned, 0);
        assert_int_equal(stats.group[g].n_pinned + stats.group[g].n_writing, 0);
    }
}

/* A page so large that few fit: the disk has 15 slots in each of its 8 segments. */
static void make_pages_large(struct vault_rig *rig) {
    for (int g = 0; g < KV_GROUP_N; g++) {
        if (rig->shelf_options.group[g].n_slots > 0)
            rig->shelf_options.group[g].payload_bytes = (512 << 10) - 4096;
        rig->shelf_options.group[g].n_slots = rig->shelf_options.group[g].n_slots > 8 ? 20 : 3;
    }
    rig->shelf_options.group[KV_DRAFT_FULL].n_slots = rig->shelf_options.group[KV_DRAFT_SLIDING].n_slots = 0;
    rig->shelf_options.group[KV_DRAFT_FULL].payload_bytes = 0;
}

/* ---- writes ---------------------------------------------------------------------------------------------------------- */

static void a_write_that_meets_no_space_stops_writing_for_a_while(void **state) {
    static const int errors[] = {ENOSPC, EDQUOT, EROFS, EACCES, EPERM};
    static struct vault_chain chain, other;
    struct vault_rig rig;

    (void)state;
    open_with_faults(&rig);
    vr_chain(&rig, &other, 99, 5);
    vr_save(&rig, &other);
    for (size_t i = 0; i < ARRAY_LEN(errors); i++) {
        vr_chain(&rig, &chain, 1 + (int)i, 5);
        disk_faults_add(rig.faults, DISK_CALL_WRITE, error(-errors[i]));
        vr_save(&rig, &chain);
        assert_true(vr_stats(&rig).is_write_off);
        assert_false(vr_stats(&rig).is_off);
        assert_false(vr_is_whole(&rig, &chain));
        vr_expect_chain(&rig, &other, true); /* reading goes on */
        vr_save(&rig, &chain);
        assert_false(vr_is_whole(&rig, &chain));
        assert_int_equal(vr_flush(&rig), -EIO);
        vr_pass(&rig, 30000000);
        vr_save(&rig, &chain);
        assert_false(vr_stats(&rig).is_write_off);
        vr_expect_chain(&rig, &chain, true);
    }
    assert_int_equal(vr_stats(&rig).n_write_errors, ARRAY_LEN(errors));
    expect_home(&rig);
    vr_free(&rig);
}

static void a_write_that_fails_retires_its_segment(void **state) {
    static struct vault_chain chain, other;
    struct vault_rig rig;
    struct vr_place before, after;

    (void)state;
    open_with_faults(&rig);
    vr_chain(&rig, &other, 1, 3);
    vr_save(&rig, &other);
    assert_true(vr_find(&rig, &other, 0, KV_TARGET_FULL, &before));
    vr_chain(&rig, &chain, 2, 5);
    vr_put_from(&rig, &chain, 0);
    disk_faults_add(rig.faults, DISK_CALL_WRITE, error(-EIO)); /* of a target page: it is the first */
    vr_ask_save(&rig, &chain, KV_VAULT_SAVE_MUST);
    vr_settle(&rig);
    vr_expect_on_shelf(&rig, &chain, 0, KV_TARGET_FULL); /* the copy in memory stays */
    vr_ask_save(&rig, &chain, KV_VAULT_SAVE_MUST);
    vr_settle(&rig);
    assert_true(vr_find(&rig, &chain, 0, KV_TARGET_FULL, &after));
    assert_true(before.segment != after.segment);
    vr_expect_chain(&rig, &chain, true);
    vr_expect_chain(&rig, &other, true); /* what lay there is read still */
    expect_home(&rig);
    vr_free(&rig);
}

static uint64_t n_unsaved_after_flush(struct vault_rig *rig) {
    struct vr_flush flush;

    vr_ask_flush(rig, &flush);
    vr_settle(rig);
    assert_int_equal(flush.n_done, 1);
    return flush.flush.n_unsaved;
}

/* Until they are written, by whoever asks for it next. */
static void a_flush_counts_what_could_not_be_saved(void **state) {
    static struct vault_chain chain;
    struct vault_rig rig;

    (void)state;
    open_with_faults(&rig);
    vr_chain(&rig, &chain, 1, 5);
    vr_put_from(&rig, &chain, 0);
    disk_faults_add(rig.faults, DISK_CALL_WRITE, none); /* the head of a file */
    disk_faults_add(rig.faults, DISK_CALL_WRITE, error(-EIO));
    vr_ask_save(&rig, &chain, KV_VAULT_SAVE_MUST);
    assert_int_equal(n_unsaved_after_flush(&rig), 1);
    assert_int_equal(n_unsaved_after_flush(&rig), 0); /* nothing was to be saved since */
    disk_faults_always(rig.faults, DISK_CALL_WRITE, error(-ENOSPC));
    vr_ask_save(&rig, &chain, KV_VAULT_SAVE_MUST);
    assert_int_equal(n_unsaved_after_flush(&rig), 1);
    disk_faults_always(rig.faults, DISK_CALL_WRITE, none);
    vr_pass(&rig, 30000000);
    vr_ask_save(&rig, &chain, KV_VAULT_SAVE_WORTH);
    vr_ask_save(&rig, &chain, KV_VAULT_SAVE_MUST);
    assert_int_equal(n_unsaved_after_flush(&rig), 0);
    vr_expect_chain(&rig, &chain, true);
    expect_home(&rig);
    vr_free(&rig);
}

static void other_errors_of_a_write_cost_the_page(void **state) {
    static const struct disk_fault faults[] = {
        {.result = -ENOMEM}, {.result = -EINVAL}, {.result = -ENODEV}, {.short_by = UINT32_MAX}};
    static struct vault_chain chain;
    struct vault_rig rig;

    (void)state;
    open_with_faults(&rig);
    for (size_t i = 0; i < ARRAY_LEN(faults); i++) {
        vr_chain(&rig, &chain, 1 + (int)i, 3);
        vr_save(&rig, &chain); /* there are segments */
        kv_vault_purge(rig.vault, 1);
        vr_settle(&rig);
        disk_faults_always(rig.faults, DISK_CALL_WRITE, faults[i]);
        vr_save(&rig, &chain);
        assert_int_equal(vr_n_pages(&rig, &chain), 0);
        disk_faults_always(rig.faults, DISK_CALL_WRITE, none);
        vr_pass(&rig, 61000000); /* it may be off: with EIO heads of other segments were tried too */
        vr_save(&rig, &chain);
        vr_expect_chain(&rig, &chain, true);
        expect_home(&rig);
    }
    vr_free(&rig);
}

static void short_and_interrupted_writes_go_on(void **state) {
    static const struct disk_fault faults[] = {
        {.short_by = 4096}, {.short_by = 3 * 4096}, {.result = -EINTR}, {.result = -EAGAIN}, {.short_by = 100}};
    static struct vault_chain chain;
    struct vault_rig rig;

    (void)state;
    open_with_faults(&rig);
    for (size_t i = 0; i < ARRAY_LEN(faults); i++) {
        vr_chain(&rig, &chain, 1 + (int)i, 3);
        disk_faults_add(rig.faults, DISK_CALL_WRITE, none);
        disk_faults_add(rig.faults, DISK_CALL_WRITE, none);
        disk_faults_add(rig.faults, DISK_CALL_WRITE, faults[i]);
        vr_save(&rig, &chain);
        vr_expect_chain(&rig, &chain, true);
    }
    assert_int_equal(vr_stats(&rig).n_write_errors, 0);
    vr_free(&rig);
}

static void a_late_write_holds_up_neither_its_chain_nor_a_flush(void **state) {
    static struct vault_chain chain, other;
    struct vault_rig rig;
    struct vr_flush flush;
    struct kv_shelf_group_stats shelf;

    (void)state;
    open_with_faults(&rig);
    vr_chain(&rig, &other, 1, 2); /* the segments are there */
    vr_save(&rig, &other);
    vr_chain(&rig, &chain, 2, 3);
    vr_put_from(&rig, &chain, 0);
    disk_faults_add(rig.faults, DISK_CALL_WRITE, deaf);
    vr_ask_save(&rig, &chain, KV_VAULT_SAVE_MUST);
    vr_ask_flush(&rig, &flush);
    vr_quiesce(&rig);
    assert_true(kv_vault_is_saving(rig.vault));
    assert_int_equal(flush.n_done, 0);
    vr_pass(&rig, VR_DEADLINE_US);
    assert_false(kv_vault_is_saving(rig.vault));
    assert_int_equal(flush.n_done, 1);
    vr_empty_shelf(&rig);
    kv_shelf_stats(rig.shelf, KV_TARGET_FULL, &shelf);
    assert_int_equal(shelf.n_pinned, 1); /* its memory is the kernel's */
    assert_int_equal(vr_stats(&rig).group[KV_TARGET_FULL].n_writing, 1);
    vr_chain(&rig, &other, 3, 2);
    vr_save(&rig, &other);
    vr_expect_chain(&rig, &other, true);
    disk_faults_release(rig.faults);
    expect_home(&rig);
    vr_expect_chain(&rig, &chain, true); /* it is there after all */
    vr_free(&rig);
}

static void a_disk_that_takes_nothing_answers_a_flush(void **state) {
    static struct vault_chain chain;
    struct vault_rig rig;
    struct vr_flush flush;

    (void)state;
    open_with_faults(&rig);
    vr_chain(&rig, &chain, 1, 2);
    vr_save(&rig, &chain);
    vr_chain(&rig, &chain, 2, 30);
    vr_put_from(&rig, &chain, 0);
    disk_faults_always(rig.faults, DISK_CALL_WRITE, deaf);
    vr_ask_save(&rig, &chain, KV_VAULT_SAVE_MUST);
    vr_ask_flush(&rig, &flush);
    vr_pass(&rig, 1);
    vr_pass(&rig, VR_DEADLINE_US);
    assert_int_equal(flush.n_done, 1);
    assert_int_equal(flush.result, -EIO);
    assert_true(vr_stats(&rig).is_off);
    assert_false(kv_vault_is_saving(rig.vault));
    assert_int_equal(vr_flush(&rig), -EIO);
    disk_faults_always(rig.faults, DISK_CALL_WRITE, none);
    disk_faults_release(rig.faults);
    expect_home(&rig);
    vr_free(&rig);
}

static void while_somebody_waits_for_a_page_one_goes_down_at_a_time(void **state) {
    static struct vault_chain chain, other;
    struct vault_rig rig;
    struct vr_read read;

    (void)state;
    open_with_faults(&rig);
    vr_chain(&rig, &chain, 1, 2);
    vr_save(&rig, &chain);
    disk_faults_always(rig.faults, DISK_CALL_WRITE, held);
    vr_chain(&rig, &other, 2, 10);
    vr_put_from(&rig, &other, 0);
    vr_ask_save(&rig, &other, KV_VAULT_SAVE_MUST);
    vr_quiesce(&rig);
    assert_int_equal(disk_faults_n_held(rig.faults), 4);
    disk_faults_add(rig.faults, DISK_CALL_READ, held);
    assert_int_equal(vr_ask_read(&rig, &read, &chain, 0, KV_TARGET_FULL), 0);
    disk_faults_release(rig.faults); /* the read too: hold another */
    disk_faults_add(rig.faults, DISK_CALL_READ, held);
    assert_int_equal(vr_wait_read(&rig, &read), 0);
    assert_int_equal(vr_ask_read(&rig, &read, &chain, 1, KV_TARGET_FULL), 0);
    disk_faults_always(rig.faults, DISK_CALL_WRITE, none);
    vr_quiesce(&rig);
    disk_faults_release(rig.faults);
    vr_settle(&rig);
    assert_int_equal(read.n_done, 1);
    vr_expect_chain(&rig, &other, true);
    vr_free(&rig);
}

/* ---- syncs ----------------------------------------------------------------------------------------------------------- */

static void a_flush_is_answered_when_all_is_synced(void **state) {
    static struct vault_chain chain;
    struct vault_rig rig;
    struct vr_flush flush, later, given_up;

    (void)state;
    open_with_faults(&rig);
    assert_int_equal(vr_flush(&rig), 0); /* there is nothing */
    vr_chain(&rig, &chain, 1, 3);
    vr_put_from(&rig, &chain, 0);
    disk_faults_always(rig.faults, DISK_CALL_SYNC, held);
    vr_ask_save(&rig, &chain, KV_VAULT_SAVE_MUST);
    vr_ask_flush(&rig, &flush);
    vr_ask_flush(&rig, &given_up);
    kv_vault_flush_cancel(rig.vault, &given_up.flush);
    vr_settle(&rig);
    vr_quiesce(&rig);
    assert_true(vr_is_whole(&rig, &chain));
    assert_int_equal(disk_faults_n_held(rig.faults), 3); /* one for each segment */
    assert_int_equal(flush.n_done, 0);
    vr_chain(&rig, &chain, 2, 3); /* what comes meanwhile is not of this flush, but of the next */
    vr_put_from(&rig, &chain, 0);
    vr_ask_save(&rig, &chain, KV_VAULT_SAVE_MUST);
    vr_ask_flush(&rig, &later);
    vr_settle(&rig);
    vr_quiesce(&rig);
    disk_faults_release(rig.faults);
    vr_quiesce(&rig);
    vr_turns(&rig, 1);
    assert_int_equal(flush.n_done, 1);
    assert_int_equal(flush.result, 0);
    assert_int_equal(later.n_done, 0);
    assert_int_equal(disk_faults_n_held(rig.faults), 3);
    disk_faults_always(rig.faults, DISK_CALL_SYNC, none);
    disk_faults_release(rig.faults);
    vr_quiesce(&rig);
    assert_int_equal(later.n_done, 1);
    assert_int_equal(later.result, 0);
    assert_int_equal(given_up.n_done, 0);
    assert_int_equal(vr_stats(&rig).n_syncs, 6);
    vr_free(&rig);
}

static void what_is_written_is_synced_without_being_asked(void **state) {
    static struct vault_chain chain;
    struct vault_rig rig;

    (void)state;
    open_with_faults(&rig);
    vr_chain(&rig, &chain, 1, 3);
    vr_save(&rig, &chain);
    vr_quiesce(&rig);
    assert_int_equal(vr_stats(&rig).n_syncs, 0);
    assert_int_equal(rig.next_us, vr_clock_us + 1000000); /* a second after the first write */
    vr_pass(&rig, 1000000);
    assert_int_equal(vr_stats(&rig).n_syncs, 3);
    assert_int_equal(rig.next_us, 0);
    vr_pass(&rig, 10000000);
    assert_int_equal(vr_stats(&rig).n_syncs, 3);
    vr_free(&rig);
}

static void a_sync_that_fails_loses_what_it_was_for_and_nothing_else(void **state) {
    static struct vault_chain synced, lost;
    struct vault_rig rig;

    (void)state;
    open_with_faults(&rig);
    vr_chain(&rig, &synced, 1, 3);
    vr_save(&rig, &synced);
    assert_int_equal(vr_flush(&rig), 0);
    vr_chain(&rig, &lost, 2, 3);
    vr_put_from(&rig, &lost, 0);
    vr_ask_save(&rig, &lost, KV_VAULT_SAVE_MUST);
    disk_faults_add(rig.faults, DISK_CALL_SYNC, error(-EIO)); /* of segment 0, the target pages' */
    assert_int_equal(vr_flush(&rig), -EIO);
    assert_int_equal(vr_stats(&rig).n_sync_errors, 1);
    assert_int_equal(vr_stats(&rig).n_lost, 3);
    assert_int_equal(disk_faults_n_calls(rig.faults, DISK_CALL_SYNC), 6); /* it is not tried again */
    vr_settle(&rig);
    assert_int_equal(vr_n_pages(&rig, &lost), 0);
    assert_false(vr_stats(&rig).is_off);
    vr_ask_save(&rig, &lost, KV_VAULT_SAVE_MUST); /* the shelf has it still: again, elsewhere */
    vr_settle(&rig);
    assert_int_equal(vr_flush(&rig), 0);
    vr_expect_chain(&rig, &lost, true);
    vr_expect_chain(&rig, &synced, true);
    vr_chain(&rig, &lost, 3, 3);
    vr_save(&rig, &lost);
    disk_faults_add(rig.faults, DISK_CALL_SYNC, error(-EIO)); /* the second time */
    assert_int_equal(vr_flush(&rig), -EIO);
    assert_true(vr_stats(&rig).is_off);
    vr_pass(&rig, 30000000);
    vr_turns(&rig, 20);
    vr_quiesce(&rig);
    vr_expect_chain(&rig, &synced, true);
    expect_home(&rig);
    vr_free(&rig);
}

static void a_late_sync_answers_a_flush_and_may_yet_succeed(void **state) {
    static struct vault_chain chain;
    struct vault_rig rig;
    struct vr_flush flush;

    (void)state;
    open_with_faults(&rig);
    vr_chain(&rig, &chain, 1, 3);
    vr_put_from(&rig, &chain, 0);
    vr_ask_save(&rig, &chain, KV_VAULT_SAVE_MUST);
    disk_faults_add(rig.faults, DISK_CALL_SYNC, deaf);
    vr_ask_flush(&rig, &flush);
    vr_settle(&rig);
    vr_pass(&rig, VR_DEADLINE_US - 1);
    assert_int_equal(flush.n_done, 0);
    vr_pass(&rig, 1);
    assert_int_equal(flush.n_done, 1);
    assert_int_equal(flush.result, -EIO);
    assert_int_equal(vr_flush(&rig), -EIO); /* at once: it is not waited for again */
    disk_faults_release(rig.faults);
    vr_quiesce(&rig);
    assert_int_equal(vr_flush(&rig), 0);
    vr_expect_chain(&rig, &chain, true);
    vr_free(&rig);
}

/* ---- files ----------------------------------------------------------------------------------------------------------- */

static void a_file_that_cannot_be_made_is_not_tried_for_ever(void **state) {
    static const int errors[] = {EIO, ENOMEM, ENODEV};
    static struct vault_chain chain;
    struct vault_rig rig;

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(errors); i++) {
        uint32_t n_calls;

        open_with_faults(&rig);
        vr_chain(&rig, &chain, 1, 3);
        disk_faults_always(rig.faults, DISK_CALL_CREATE, error(-errors[i]));
        vr_save(&rig, &chain);
        assert_int_equal(vr_flush(&rig), -EIO);
        assert_true(vr_stats(&rig).is_off);
        n_calls = disk_faults_n_calls(rig.faults, DISK_CALL_CREATE);
        assert_in_range(n_calls, 1, 9);
        vr_pass(&rig, 30000000); /* one tries again, if there is something to save */
        vr_turns(&rig, 10);
        vr_save(&rig, &chain);
        assert_int_equal(disk_faults_n_calls(rig.faults, DISK_CALL_CREATE), n_calls + 1);
        disk_faults_always(rig.faults, DISK_CALL_CREATE, none);
        vr_pass(&rig, 30000000);
        vr_save(&rig, &chain);
        vr_expect_chain(&rig, &chain, true);
        assert_false(vr_stats(&rig).is_off);
        expect_home(&rig);
        vr_free(&rig);
    }
}

static void without_space_for_a_file_writing_pauses(void **state) {
    static struct vault_chain chain;
    struct vault_rig rig;

    (void)state;
    open_with_faults(&rig);
    vr_chain(&rig, &chain, 1, 3);
    disk_faults_add(rig.faults, DISK_CALL_CREATE, error(-ENOSPC));
    vr_save(&rig, &chain);
    assert_true(vr_stats(&rig).is_write_off);
    assert_int_equal(disk_faults_n_calls(rig.faults, DISK_CALL_CREATE), 1);
    assert_int_equal(vr_flush(&rig), -EIO);
    vr_pass(&rig, 30000000);
    assert_false(vr_stats(&rig).is_write_off);
    assert_int_equal(vr_flush(&rig), 0); /* nothing of then is waited for any more */
    vr_save(&rig, &chain);
    vr_expect_chain(&rig, &chain, true);
    assert_int_equal(vr_flush(&rig), 0);
    vr_free(&rig);
}

static void a_head_that_cannot_be_written_is_tried_again_and_its_file_kept(void **state) {
    static struct vault_chain chain;
    struct vault_rig rig;

    (void)state;
    open_with_faults(&rig);
    vr_chain(&rig, &chain, 1, 3);
    disk_faults_add(rig.faults, DISK_CALL_WRITE, error(-EIO));
    vr_save(&rig, &chain);
    vr_expect_chain(&rig, &chain, true);
    assert_int_equal(disk_faults_n_calls(rig.faults, DISK_CALL_CREATE), 3);
    vr_free(&rig);
}

/* A file system with less space than the store may have: it lives in the files that it got. */
static void without_space_for_another_file_the_oldest_pages_leave(void **state) {
    static struct vault_chain chain[12];
    struct vault_rig rig;

    (void)state;
    vr_init(&rig);
    vr_use_faults(&rig);
    make_pages_large(&rig);
    vr_open(&rig);
    for (int i = 0; i < 12; i++) {
        vr_chain(&rig, &chain[i], i + 1, 5);
        if (i == 1)
            disk_faults_always(rig.faults, DISK_CALL_CREATE, error(-ENOSPC));
        vr_save(&rig, &chain[i]);
        assert_true(vr_is_whole(&rig, &chain[i]));
        assert_false(vr_stats(&rig).is_write_off);
    }
    assert_int_equal(vr_stats(&rig).bytes, 2 * VR_SEGMENT);
    assert_int_equal(vr_n_pages(&rig, &chain[0]), 0);
    for (int i = 9; i < 12; i++)
        vr_expect_chain(&rig, &chain[i], false);
    disk_faults_always(rig.faults, DISK_CALL_CREATE, none);
    vr_pass(&rig, 31000000);
    vr_chain(&rig, &chain[0], 100, 5);
    vr_save(&rig, &chain[0]);
    assert_true(vr_stats(&rig).bytes > 2 * VR_SEGMENT);
    expect_home(&rig);
    vr_free(&rig);
}

static void a_file_of_somebody_else_is_left_alone(void **state) {
    static struct vault_chain chain;
    struct vault_rig rig;
    char text[8] = {0};
    int fd;

    (void)state;
    vr_init(&rig);
    vr_open(&rig);
    fd = openat(rig.folder.fd, "segment-00000000", O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    assert_true(fd >= 0 && write(fd, "foreign", 7) == 7);
    vr_chain(&rig, &chain, 1, 3);
    vr_save(&rig, &chain);
    vr_expect_chain(&rig, &chain, true);
    assert_int_equal(pread(fd, text, sizeof text, 0), 7);
    assert_string_equal(text, "foreign");
    close(fd);
    vr_free(&rig);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_write_that_meets_no_space_stops_writing_for_a_while),
        cmocka_unit_test(a_write_that_fails_retires_its_segment),
        cmocka_unit_test(a_flush_counts_what_could_not_be_saved),
        cmocka_unit_test(other_errors_of_a_write_cost_the_page),
        cmocka_unit_test(short_and_interrupted_writes_go_on),
        cmocka_unit_test(a_late_write_holds_up_neither_its_chain_nor_a_flush),
        cmocka_unit_test(a_disk_that_takes_nothing_answers_a_flush),
        cmocka_unit_test(while_somebody_waits_for_a_page_one_goes_down_at_a_time),
        cmocka_unit_test(a_flush_is_answered_when_all_is_synced),
        cmocka_unit_test(what_is_written_is_synced_without_being_asked),
        cmocka_unit_test(a_sync_that_fails_loses_what_it_was_for_and_nothing_else),
        cmocka_unit_test(a_late_sync_answers_a_flush_and_may_yet_succeed),
        cmocka_unit_test(a_file_that_cannot_be_made_is_not_tried_for_ever),
        cmocka_unit_test(without_space_for_a_file_writing_pauses),
        cmocka_unit_test(a_head_that_cannot_be_written_is_tried_again_and_its_file_kept),
        cmocka_unit_test(without_space_for_another_file_the_oldest_pages_leave),
        cmocka_unit_test(a_file_of_somebody_else_is_left_alone),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
