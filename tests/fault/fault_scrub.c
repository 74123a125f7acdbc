/* The scrubber finds what is damaged before anybody asks for it, in its own time and in nobody's way. */
#include "vault_rig.h"

enum { SLOT = 4096 + VR_PAYLOAD, N_PAGES = 12, N_SLOTS = 2 * N_PAGES + 1 /* with the drafter's, and the state */ };
#define S UINT64_C(1000000)

static const struct disk_fault held = {.is_held = true};

static struct kv_scrub_stats stats_of(const struct vault_rig *rig) {
    struct kv_scrub_stats stats;

    kv_scrub_stats(rig->scrub, &stats);
    return stats;
}

/* A chain on disk alone, and a scrubber that looks at so many slots a second. */
static void open_saved(struct vault_rig *rig, struct vault_chain *chain, uint32_t slots_per_s) {
    vr_init(rig);
    vr_use_faults(rig);
    vr_open(rig);
    vr_chain(rig, chain, 1, N_PAGES);
    vr_save(rig, chain);
    assert_int_equal(vr_flush(rig), 0);
    vr_open_scrub(rig, slots_per_s * (uint64_t)SLOT);
}

static void damage(const struct vault_rig *rig, const struct vault_chain *chain, uint32_t page, enum kv_group group) {
    unsigned char byte;
    struct vr_place place;

    assert_true(vr_find(rig, chain, page, group, &place));
    vr_read_file(rig, place.segment, place.offset + 5000, &byte, 1);
    byte ^= 4;
    vr_write_file(rig, place.segment, place.offset + 5000, &byte, 1);
}

static void damage_is_found_before_anybody_asks(void **state) {
    static struct vault_chain chain;
    struct vault_rig rig;

    (void)state;
    open_saved(&rig, &chain, 4);
    damage(&rig, &chain, 7, KV_TARGET_FULL);
    vr_pass(&rig, S / 2);
    assert_int_equal(stats_of(&rig).n_disk, 0); /* its time has not come */
    for (int i = 1; i <= N_SLOTS / 4 + 1; i++) {
        uint64_t n_before = stats_of(&rig).n_disk;

        vr_pass(&rig, S);
        assert_in_range(stats_of(&rig).n_disk - n_before, i <= N_SLOTS / 4 ? 4 : 0, 4);
    }
    assert_int_equal(stats_of(&rig).n_disk, N_SLOTS);
    assert_int_equal(stats_of(&rig).n_disk_damaged, 1);
    assert_int_equal(vr_stats(&rig).n_damaged, 1);
    for (uint32_t page = 0; page < N_PAGES; page++)
        assert_int_equal(vr_has(&rig, &chain, page, KV_TARGET_FULL), page != 7);
    assert_true(vr_has(&rig, &chain, 7, KV_DRAFT_FULL));
    vr_free(&rig);
}

static void between_rounds_nothing_is_to_be_done(void **state) {
    static struct vault_chain chain;
    struct vault_rig rig;
    uint64_t ends_us;

    (void)state;
    open_saved(&rig, &chain, 1000);
    vr_pass(&rig, 2 * S);
    assert_int_equal(stats_of(&rig).n_disk, N_SLOTS);
    assert_true(rig.next_us > vr_clock_us + 23 * 3600 * S);
    ends_us = rig.next_us;
    damage(&rig, &chain, 0, KV_TARGET_FULL);
    vr_pass(&rig, 3600 * S);
    assert_int_equal(rig.next_us, ends_us);
    assert_int_equal(stats_of(&rig).n_disk, N_SLOTS);
    vr_pass(&rig, 24 * 3600 * S);
    vr_pass(&rig, S);
    assert_int_equal(stats_of(&rig).n_rounds, 1);
    assert_int_equal(stats_of(&rig).n_disk, 2 * N_SLOTS);
    assert_int_equal(stats_of(&rig).n_disk_damaged, 1);
    vr_free(&rig);
}

static void neighbours_of_what_a_reader_could_not_read_are_looked_at(void **state) {
    static struct vault_chain chain;
    struct vault_rig rig;

    (void)state;
    open_saved(&rig, &chain, 4);
    for (int i = 0; i < 10; i++)
        vr_pass(&rig, S);
    assert_true(rig.next_us > vr_clock_us + 20 * 3600 * S); /* the round is over */
    damage(&rig, &chain, 5, KV_TARGET_FULL);
    damage(&rig, &chain, 2, KV_TARGET_FULL); /* not near */
    disk_faults_add(rig.faults, DISK_CALL_READ, (struct disk_fault){.result = -EIO});
    assert_int_equal(vr_read_page(&rig, &chain, 6, KV_TARGET_FULL), -EIO);
    vr_pass(&rig, S);
    assert_false(vr_has(&rig, &chain, 6, KV_TARGET_FULL));
    assert_false(vr_has(&rig, &chain, 5, KV_TARGET_FULL));
    assert_true(vr_has(&rig, &chain, 7, KV_TARGET_FULL));
    assert_true(vr_has(&rig, &chain, 2, KV_TARGET_FULL));
    assert_int_equal(stats_of(&rig).n_disk, N_SLOTS + 4);
    assert_int_equal(stats_of(&rig).n_disk_damaged, 1);
    assert_true(rig.next_us > vr_clock_us + 20 * 3600 * S);
    vr_free(&rig);
}

static void what_the_scrubber_cannot_read_is_forgotten_and_its_neighbours_come_next(void **state) {
    static struct vault_chain chain;
    struct vault_rig rig;

    (void)state;
    open_saved(&rig, &chain, 1);
    disk_faults_add(rig.faults, DISK_CALL_READ, (struct disk_fault){.result = -EIO});
    vr_pass(&rig, S);
    assert_false(vr_has(&rig, &chain, 0, KV_TARGET_FULL)); /* the first that it looked at */
    assert_int_equal(stats_of(&rig).n_unread, 1);
    assert_int_equal(stats_of(&rig).n_disk_damaged, 1);
    damage(&rig, &chain, 1, KV_TARGET_FULL);
    damage(&rig, &chain, 2, KV_TARGET_FULL);
    vr_pass(&rig, S);
    vr_pass(&rig, S);
    assert_int_equal(stats_of(&rig).n_disk, 2);
    assert_false(vr_has(&rig, &chain, 1, KV_TARGET_FULL));
    assert_false(vr_has(&rig, &chain, 2, KV_TARGET_FULL));
    vr_free(&rig);
}

/* On one slot: the scrubber's look, a restore's reading, a saving that finds it there, and a purge. */
static void scrub_read_save_and_purge_meet_on_one_slot(void **state) {
    static struct vault_chain chain;
    struct vault_rig rig;
    struct vr_read read;
    uint32_t n_pages;

    (void)state;
    open_saved(&rig, &chain, 1);
    disk_faults_add(rig.faults, DISK_CALL_READ, held);
    vr_pass(&rig, S);
    assert_int_equal(vr_n_held(&rig), 1); /* page 0 of the target, which was written first */
    assert_int_equal(vr_ask_read(&rig, &read, &chain, 0, KV_TARGET_FULL), 0);
    assert_int_equal(vr_wait_read(&rig, &read), 0);
    vr_expect_on_shelf(&rig, &chain, 0, KV_TARGET_FULL);
    vr_put_from(&rig, &chain, 1);
    vr_ask_save(&rig, &chain, KV_VAULT_SAVE_MUST);
    vr_turns(&rig, 20);
    assert_int_equal(vr_stats(&rig).n_saved_pages, N_SLOTS); /* nothing anew */
    n_pages = vr_stats(&rig).group[KV_TARGET_FULL].n_stored;
    kv_vault_purge(rig.vault, chain.uid);
    vr_turns(&rig, 20);
    assert_int_equal(vr_n_pages(&rig, &chain), 0);
    assert_int_equal(vr_stats(&rig).group[KV_TARGET_FULL].n_stored, 1); /* until it has been looked at */
    assert_int_equal(n_pages, N_PAGES);
    disk_faults_release(rig.faults);
    vr_settle(&rig);
    assert_int_equal(vr_stats(&rig).group[KV_TARGET_FULL].n_stored, 0);
    assert_int_equal(stats_of(&rig).n_disk, 1);
    assert_int_equal(stats_of(&rig).n_disk_damaged, 0);
    vr_free(&rig);
}

static void while_somebody_reads_it_waits(void **state) {
    static struct vault_chain chain;
    struct vault_rig rig;
    struct vr_read read;

    (void)state;
    open_saved(&rig, &chain, 4);
    disk_faults_add(rig.faults, DISK_CALL_READ, held);
    assert_int_equal(vr_ask_read(&rig, &read, &chain, 3, KV_TARGET_FULL), 0);
    for (int i = 0; i < 3; i++) /* the reading's deadline is at the end of it */
        vr_pass(&rig, VR_DEADLINE_US / 4);
    assert_int_equal(stats_of(&rig).n_disk, 0);
    disk_faults_release(rig.faults);
    vr_pass(&rig, S);
    assert_int_equal(read.result, 0);
    assert_true(stats_of(&rig).n_disk > 0);
    vr_free(&rig);
}

static void a_verification_comes_after_the_look_that_is_out(void **state) {
    static struct vault_chain chain;
    struct kv_vault_verify verify = {.done = NULL};
    struct vault_rig rig;

    (void)state;
    open_saved(&rig, &chain, 1);
    disk_faults_add(rig.faults, DISK_CALL_READ, held);
    vr_pass(&rig, S);
    assert_int_equal(kv_vault_verify(rig.vault, &verify), 0);
    assert_int_equal(kv_vault_verify(rig.vault, &verify), -EALREADY);
    vr_turns(&rig, 10);
    assert_int_equal(verify.n_checked, 0);
    disk_faults_release(rig.faults);
    for (int i = 0; verify.n_checked < N_SLOTS - 1; i++) {
        assert_true(i < 10000);
        vr_step(&rig);
    }
    assert_int_equal(stats_of(&rig).n_disk, 1);
    kv_vault_verify_cancel(rig.vault);
    vr_free(&rig);
}

static void a_look_that_is_out_does_not_hold_up_the_end(void **state) {
    static struct vault_chain chain;
    struct vault_rig rig;

    (void)state;
    open_saved(&rig, &chain, 1);
    disk_faults_add(rig.faults, DISK_CALL_READ, held);
    vr_pass(&rig, S);
    assert_int_equal(vr_n_held(&rig), 1);
    kv_scrub_close(rig.scrub);
    rig.scrub = NULL;
    disk_faults_release(rig.faults);
    vr_settle(&rig);
    assert_int_equal(vr_n_pages(&rig, &chain), N_PAGES);
    vr_free(&rig);
}

static void copies_on_the_shelf_are_looked_at_too_and_keep_their_order(void **state) {
    static struct vault_chain chain, more;
    struct kv_page_name name;
    struct vault_rig rig;
    unsigned char *payload;
    uint32_t record;

    (void)state;
    vr_init(&rig);
    vr_open(&rig);
    vr_chain(&rig, &chain, 1, 64); /* all that the shelf holds */
    vr_put_from(&rig, &chain, 0);
    name = vr_name(&chain, 40);
    record = kv_shelf_find(rig.shelf, &name);
    payload = kv_shelf_pin(rig.shelf, record, KV_DRAFT_FULL);
    payload[77] ^= 1;
    kv_shelf_unpin_unused(rig.shelf, record, KV_DRAFT_FULL);
    vr_open_scrub(&rig, 100 * (uint64_t)SLOT);
    vr_pass(&rig, 2 * S);
    vr_pass(&rig, 2 * S);
    assert_int_equal(stats_of(&rig).n_host, 2 * 64 + 1);
    assert_int_equal(stats_of(&rig).n_host_damaged, 1);
    assert_false(kv_shelf_has(rig.shelf, record, KV_DRAFT_FULL));
    assert_true(kv_shelf_has(rig.shelf, record, KV_TARGET_FULL));
    vr_chain(&rig, &more, 2, 1);
    vr_put_page(&rig, &more, 0, KV_TARGET_FULL);
    name = vr_name(&chain, 0);
    assert_false(kv_shelf_has(rig.shelf, kv_shelf_find(rig.shelf, &name), KV_TARGET_FULL)); /* the first that came */
    name = vr_name(&chain, 1);
    assert_true(kv_shelf_has(rig.shelf, kv_shelf_find(rig.shelf, &name), KV_TARGET_FULL));
    vr_free(&rig);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(damage_is_found_before_anybody_asks),
        cmocka_unit_test(between_rounds_nothing_is_to_be_done),
        cmocka_unit_test(neighbours_of_what_a_reader_could_not_read_are_looked_at),
        cmocka_unit_test(what_the_scrubber_cannot_read_is_forgotten_and_its_neighbours_come_next),
        cmocka_unit_test(scrub_read_save_and_purge_meet_on_one_slot),
        cmocka_unit_test(while_somebody_reads_it_waits),
        cmocka_unit_test(a_verification_comes_after_the_look_that_is_out),
        cmocka_unit_test(a_look_that_is_out_does_not_hold_up_the_end),
        cmocka_unit_test(copies_on_the_shelf_are_looked_at_too_and_keep_their_order),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
