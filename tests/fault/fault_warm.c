/* After a start the chains that were written last lie on the shelf before anybody asks, and nobody waits for that. */
#include "vault_rig.h"

static const struct disk_fault none, held = {.is_held = true};

enum { OLD = 10, LONG = 12, NEW = 5 }; /* a quarter of the shelf holds 16 pages and two states */

struct chains {
    struct vault_chain old, long_one, new;
};

/* Three chains on disk, which the next vault finds. */
static void leave_behind(struct vault_rig *rig, struct chains *chains) {
    vr_init(rig);
    vr_open(rig);
    vr_chain(rig, &chains->old, 1, OLD);
    vr_chain(rig, &chains->long_one, 2, LONG);
    vr_chain(rig, &chains->new, 3, NEW);
    vr_save(rig, &chains->old);
    vr_save(rig, &chains->long_one);
    vr_save(rig, &chains->new);
    assert_int_equal(vr_flush(rig), 0);
    vr_close(rig);
    rig->options.warm_percent = 25;
}

/* The folder is read, and nothing is brought up yet. */
static void open_cold(struct vault_rig *rig) {
    vr_use_faults(rig);
    vr_open(rig);
    kv_vault_let_warm(rig->vault, false);
    vr_settle(rig);
    vr_turns(rig, 5);
    assert_int_equal(vr_stats(rig).n_warm_pages, 0);
    assert_true(kv_vault_is_warming(rig->vault));
    kv_vault_let_warm(rig->vault, true);
}

static void warm(struct vault_rig *rig) {
    rig->is_asked = true;
    for (int i = 0; kv_vault_is_warming(rig->vault); i++) {
        assert_true(i < 20000);
        vr_step(rig);
    }
}

static bool is_on_shelf(struct vault_rig *rig, const struct vault_chain *chain, uint32_t page, enum kv_group group) {
    struct kv_page_name name = vr_name(chain, page);

    return kv_shelf_has(rig->shelf, kv_shelf_find(rig->shelf, &name), group);
}

static void expect_warm(struct vault_rig *rig, const struct vault_chain *chain, bool is_warm) {
    for (uint32_t page = 0; page < chain->n_pages; page++)
        for (int g = 0; g < KV_GROUP_N; g++) {
            bool is_kept =
                g == KV_TARGET_FULL || g == KV_DRAFT_FULL || (g == KV_TARGET_STATE && page + 1 == chain->n_pages);

            assert_int_equal(is_on_shelf(rig, chain, page, (enum kv_group)g), is_kept && is_warm);
            if (is_kept && is_warm)
                vr_expect_on_shelf(rig, chain, page, (enum kv_group)g);
        }
}

static void what_was_written_last_is_brought_up_as_far_as_there_is_room(void **state) {
    static struct chains chains;
    struct vault_rig rig;

    (void)state;
    leave_behind(&rig, &chains);
    vr_open(&rig);
    warm(&rig);
    expect_warm(&rig, &chains.new, true);
    expect_warm(&rig, &chains.long_one, false); /* with the other it would be too much */
    expect_warm(&rig, &chains.old, true);
    assert_int_equal(vr_stats(&rig).n_warm_chains, 2);
    assert_int_equal(vr_stats(&rig).n_warm_pages, 2 * (OLD + NEW) + 2);
    assert_int_equal(vr_stats(&rig).warm_bytes, (2 * (OLD + NEW) + 2) * (4096 + VR_PAYLOAD));
    vr_free(&rig);
}

static void the_one_written_first_leaves_first_and_from_its_end(void **state) {
    static struct vault_chain more;
    static struct chains chains;
    struct vault_rig rig;

    (void)state;
    leave_behind(&rig, &chains);
    vr_open(&rig);
    warm(&rig);
    vr_chain(&rig, &more, 9, 64 - OLD - NEW + 1);
    vr_put_from(&rig, &more, 0);
    for (uint32_t page = 0; page < OLD; page++)
        assert_int_equal(is_on_shelf(&rig, &chains.old, page, KV_TARGET_FULL), page + 1 < OLD);
    vr_free(&rig);
}

static void without_a_part_of_the_shelf_nothing_is_brought_up(void **state) {
    static struct chains chains;
    struct vault_rig rig;

    (void)state;
    leave_behind(&rig, &chains);
    rig.options.warm_percent = 0;
    vr_open(&rig);
    assert_false(kv_vault_is_warming(rig.vault));
    vr_settle(&rig);
    expect_warm(&rig, &chains.new, false);
    vr_close(&rig);
    rig.options.warm_percent = 25;
    rig.options.fingerprint[0] ^= 1; /* nor what another model left */
    vr_open(&rig);
    warm(&rig);
    assert_int_equal(vr_stats(&rig).n_warm_pages, 0);
    vr_free(&rig);
}

static void what_lies_on_the_shelf_stays(void **state) {
    static struct vault_chain mine;
    static struct chains chains;
    struct vault_rig rig;

    (void)state;
    leave_behind(&rig, &chains);
    vr_open_shelf(&rig);
    vr_chain(&rig, &mine, 7, 60);
    vr_put_from(&rig, &mine, 0);
    assert_int_equal(vr_open_vault(&rig), 0);
    warm(&rig);
    expect_warm(&rig, &mine, true);
    assert_int_equal(vr_stats(&rig).n_warm_chains, 0);
    vr_free(&rig);
}

static void while_somebody_reads_it_waits(void **state) {
    static struct chains chains;
    struct vault_rig rig;
    struct vr_read read;

    (void)state;
    leave_behind(&rig, &chains);
    open_cold(&rig);
    disk_faults_add(rig.faults, DISK_CALL_READ, held);
    assert_int_equal(vr_ask_read(&rig, &read, &chains.long_one, 0, KV_TARGET_FULL), 0);
    vr_turns(&rig, 20);
    assert_int_equal(vr_n_held(&rig), 1);
    assert_int_equal(vr_stats(&rig).n_warm_pages, 0);
    disk_faults_release(rig.faults);
    warm(&rig);
    assert_int_equal(read.result, 0);
    expect_warm(&rig, &chains.new, true);
    vr_free(&rig);
}

static void a_reader_of_the_page_that_is_brought_up_shares_its_reading(void **state) {
    static struct chains chains;
    struct vault_rig rig;
    struct vr_read read;

    (void)state;
    leave_behind(&rig, &chains);
    open_cold(&rig);
    disk_faults_add(rig.faults, DISK_CALL_READ, none); /* the header */
    disk_faults_add(rig.faults, DISK_CALL_READ, held); /* the page: the last of the older chain */
    for (int i = 0; vr_n_held(&rig) == 0; i++) {
        assert_true(i < 1000);
        vr_step(&rig);
    }
    assert_int_equal(vr_ask_read(&rig, &read, &chains.old, OLD - 1, KV_TARGET_FULL), 0);
    vr_turns(&rig, 10);
    assert_int_equal(read.n_done, 0);
    disk_faults_release(rig.faults);
    assert_int_equal(vr_wait_read(&rig, &read), 0);
    warm(&rig);
    assert_int_equal(vr_stats(&rig).n_reads, 2 * (OLD + NEW) + 2);
    expect_warm(&rig, &chains.old, true);
    vr_free(&rig);
}

static void damage_ends_its_chain_and_is_a_miss(void **state) {
    static struct chains chains;
    struct vault_rig rig;
    struct vr_place place;

    (void)state;
    for (int of_header = 0; of_header < 2; of_header++) {
        leave_behind(&rig, &chains);
        open_cold(&rig);
        assert_true(vr_find(&rig, &chains.old, 4, KV_TARGET_FULL, &place));
        vr_write_file(&rig, place.segment, place.offset + (of_header ? 100 : 6000), "damage", 6);
        warm(&rig);
        vr_settle(&rig);
        assert_int_equal(vr_stats(&rig).n_damaged, 1);
        assert_int_equal(vr_stats(&rig).n_warm_chains, 1);
        assert_int_equal(vr_n_pages(&rig, &chains.old), 4);
        assert_false(is_on_shelf(&rig, &chains.old, 4, KV_TARGET_FULL));
        assert_false(is_on_shelf(&rig, &chains.old, 3, KV_TARGET_FULL));
        assert_true(is_on_shelf(&rig, &chains.old, 5, KV_TARGET_FULL));
        expect_warm(&rig, &chains.new, true);
        vr_free(&rig);
    }
}

static void what_is_purged_meanwhile_is_not_brought_up(void **state) {
    static struct chains chains;
    struct vault_rig rig;

    (void)state;
    leave_behind(&rig, &chains);
    open_cold(&rig);
    disk_faults_add(rig.faults, DISK_CALL_READ, held); /* a header */
    vr_turns(&rig, 10);
    assert_int_equal(vr_n_held(&rig), 1);
    kv_vault_purge(rig.vault, chains.old.uid);
    vr_turns(&rig, 10);
    disk_faults_release(rig.faults);
    warm(&rig);
    vr_settle(&rig);
    assert_int_equal(vr_stats(&rig).n_warm_pages, 0);
    assert_int_equal(vr_stats(&rig).n_damaged, 0);
    vr_free(&rig);
}

static void a_disk_that_does_not_answer_ends_it(void **state) {
    static struct chains chains;
    struct vault_rig rig;

    (void)state;
    for (int of_page = 0; of_page < 2; of_page++) {
        leave_behind(&rig, &chains);
        open_cold(&rig);
        for (int i = 0; i < of_page; i++)
            disk_faults_add(rig.faults, DISK_CALL_READ, none);
        disk_faults_always(rig.faults, DISK_CALL_READ, (struct disk_fault){.is_held = true, .is_deaf = true});
        vr_pass(&rig, VR_DEADLINE_US);
        vr_pass(&rig, VR_DEADLINE_US);
        vr_pass(&rig, VR_DEADLINE_US);
        assert_false(kv_vault_is_warming(rig.vault));
        disk_faults_always(rig.faults, DISK_CALL_READ, none);
        disk_faults_release(rig.faults);
        vr_settle(&rig);
        vr_free(&rig);
    }
}

static void closing_does_not_wait_for_it(void **state) {
    static struct chains chains;
    struct vault_rig rig;

    (void)state;
    leave_behind(&rig, &chains);
    for (int n = 0; n < 40; n++) {
        vr_open(&rig);
        vr_turns(&rig, n);
        vr_close(&rig);
    }
    vr_free(&rig);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_was_written_last_is_brought_up_as_far_as_there_is_room),
        cmocka_unit_test(the_one_written_first_leaves_first_and_from_its_end),
        cmocka_unit_test(without_a_part_of_the_shelf_nothing_is_brought_up),
        cmocka_unit_test(what_lies_on_the_shelf_stays),
        cmocka_unit_test(while_somebody_reads_it_waits),
        cmocka_unit_test(a_reader_of_the_page_that_is_brought_up_shares_its_reading),
        cmocka_unit_test(damage_ends_its_chain_and_is_a_miss),
        cmocka_unit_test(what_is_purged_meanwhile_is_not_brought_up),
        cmocka_unit_test(a_disk_that_does_not_answer_ends_it),
        cmocka_unit_test(closing_does_not_wait_for_it),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
