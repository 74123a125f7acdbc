/* What went down to disk comes back with equal bytes or not at all, in every way in which a disk can be reached, also after
 * a restart and after a crash. */
#include "vault_rig.h"

struct mode {
    bool no_ring, no_direct;
};

static void open_rig(void **state, struct vault_rig *rig) {
    const struct mode *mode = *state;

    vr_init_in(rig, mode ? "/tmp" /* on a real file system */ : fast_folder());
    if (mode) {
        rig->options.no_ring = mode->no_ring;
        rig->options.no_direct = mode->no_direct;
    }
    vr_open(rig);
    if (mode && vr_stats(rig).disk.is_ring == mode->no_ring) {
        vr_free(rig);
        skip(); /* this kernel has no ring for us */
    }
}

/* ---- there and back -------------------------------------------------------------------------------------------------- */

static void what_is_saved_is_read_back_the_same(void **state) {
    static struct vault_chain a, b;
    struct vault_rig rig;
    struct kv_vault_stats stats;

    open_rig(state, &rig);
    vr_chain(&rig, &a, 1, 40);
    vr_branch(&rig, &b, 1, 1, 10, 2, 20);
    vr_save(&rig, &a);
    vr_save(&rig, &b);
    stats = vr_stats(&rig);
    assert_int_equal(stats.group[KV_TARGET_FULL].n_stored, 40 + 10); /* what they share lies there once */
    assert_int_equal(stats.group[KV_DRAFT_FULL].n_stored, 40 + 10);
    assert_int_equal(stats.group[KV_TARGET_STATE].n_stored, 2);
    assert_int_equal(stats.n_saved_pages, 102);
    assert_int_equal(stats.n_saves, 2);
    vr_expect_chain(&rig, &a, true);
    vr_expect_chain(&rig, &b, true);
    stats = vr_stats(&rig);
    assert_int_equal(stats.n_damaged + stats.n_read_errors + stats.n_read_late + stats.n_write_errors, 0);
    assert_int_equal(stats.disk.n_late, 0);
    vr_free(&rig);
}

static bool is_on_disk(void *user, const struct kv_page_name *name, enum kv_group group) {
    struct vault_rig *rig = user;

    return kv_vault_has(rig->vault, &name->key, name->page_idx, group);
}

/* Memory that was short: what is on disk leaves the shelf, what is not stays; and what comes into that memory afterwards
 * goes down and comes up as ever. */
static void memory_that_was_given_back_is_used_again(void **state) {
    static struct vault_chain a, b, c;
    struct kv_shelf_group_stats pages;
    struct vault_rig rig;

    open_rig(state, &rig);
    vr_chain(&rig, &a, 1, 20);
    vr_chain(&rig, &b, 2, 20);
    vr_save(&rig, &a);
    vr_put_from(&rig, &b, 0);
    assert_true(kv_vault_forget_buffers(rig.vault));
    assert_false(vr_stats(&rig).disk.has_registered_buffers);
    assert_true(kv_shelf_shrink(rig.shelf, UINT64_MAX, is_on_disk, &rig) > 0);
    vr_check(&rig);
    kv_shelf_stats(rig.shelf, KV_TARGET_FULL, &pages);
    assert_int_equal(pages.n_away, 64 / 2);
    for (uint32_t page = 0; page < b.n_pages; page++) {
        struct kv_page_name name = vr_name(&b, page);

        assert_true(kv_shelf_has(rig.shelf, kv_shelf_find(rig.shelf, &name), KV_TARGET_FULL));
    }
    assert_true(kv_shelf_grow(rig.shelf, UINT64_MAX) > 0);
    vr_save(&rig, &b);
    vr_chain(&rig, &c, 3, 64); /* in every slot */
    vr_save(&rig, &c);
    kv_shelf_evict_bytes(rig.shelf, UINT64_MAX);
    vr_expect_chain(&rig, &c, true);
    vr_expect_chain(&rig, &a, true);
    vr_expect_chain(&rig, &b, true);
    assert_int_equal(vr_stats(&rig).n_damaged, 0);
    vr_free(&rig);
}

static void operations_after_a_long_time_are_not_late(void **state) {
    static struct vault_chain chain[6];
    struct vault_rig rig;

    open_rig(state, &rig);
    for (int i = 0; i < 6; i++) {
        vr_chain(&rig, &chain[i], i + 1, 6);
        vr_save(&rig, &chain[i]);
        vr_expect_chain(&rig, &chain[i], true);
        vr_pass(&rig, 10 * (uint64_t)VR_DEADLINE_US);
    }
    assert_int_equal(vr_stats(&rig).disk.n_late, 0);
    assert_int_equal(vr_stats(&rig).n_breaker_opened, 0);
    vr_free(&rig);
}

static void after_a_restart_all_is_found(void **state) {
    static struct vault_chain a, b;
    struct vault_rig rig;

    open_rig(state, &rig);
    vr_chain(&rig, &a, 1, 30);
    vr_branch(&rig, &b, 2, 1, 30, 1, 30); /* the same tokens of another user */
    vr_save(&rig, &a);
    vr_save(&rig, &b);
    assert_int_equal(vr_flush(&rig), 0);
    for (int i = 0; i < 3; i++) {
        vr_close(&rig);
        vr_open(&rig);
        assert_false(vr_has(&rig, &a, 0, KV_TARGET_FULL)); /* open reads nothing */
        vr_settle(&rig);
        assert_int_equal(vr_stats(&rig).n_scan_bad + vr_stats(&rig).n_scan_foreign, 0);
        vr_expect_chain(&rig, &a, true);
        vr_expect_chain(&rig, &b, true);
    }
    assert_int_equal(vr_stats(&rig).n_damaged, 0);
    vr_free(&rig);
}

/* As after a crash: nothing was closed, nothing said. The old one ends when the new one has been looked at. */
static void without_a_close_all_that_was_written_is_found(void **state) {
    static struct vault_chain a;
    struct vault_rig rig;
    struct kv_vault *left;
    struct kv_shelf *left_shelf;

    open_rig(state, &rig);
    vr_chain(&rig, &a, 1, 30);
    vr_save(&rig, &a);
    left = rig.vault;
    left_shelf = rig.shelf;
    vr_open(&rig);
    vr_settle(&rig);
    vr_expect_chain(&rig, &a, true);
    assert_int_equal(kv_vault_close(left), 0);
    kv_shelf_close(left_shelf);
    vr_free(&rig);
}

static void many_chains_read_side_by_side_come_back(void **state) {
    enum { N = 40 };
    static struct vault_chain chain;
    static struct vr_read reads[3 * N];
    struct vault_rig rig;
    uint32_t n = 0, n_busy = 0;

    open_rig(state, &rig);
    vr_chain(&rig, &chain, 1, N);
    vr_save(&rig, &chain);
    for (uint32_t i = 0; i < N; i++)
        for (int g = 0; g < 2; g++) {
            enum kv_group group = g ? KV_DRAFT_FULL : KV_TARGET_FULL;
            int r;

            while ((r = vr_ask_read(&rig, &reads[n], &chain, i, group)) == KV_VAULT_E_BUSY) {
                n_busy++;
                vr_step(&rig);
            }
            assert_int_equal(r, 0);
            n++;
        }
    assert_true(n_busy > 0);
    for (uint32_t i = 0; i < n; i++)
        assert_int_equal(vr_wait_read(&rig, &reads[i]), 0);
    for (uint32_t i = 0; i < N; i++) {
        vr_expect_on_shelf(&rig, &chain, i, KV_TARGET_FULL);
        vr_expect_on_shelf(&rig, &chain, i, KV_DRAFT_FULL);
    }
    vr_free(&rig);
}

/* ---- a reader that asks for the next one in its callback -------------------------------------------------------------- */

struct follower {
    struct kv_vault_read read;
    struct vault_rig *rig;
    const struct vault_chain *chain;
    uint32_t page, n_wrong;
    bool is_done;
};

static void follow(struct follower *f);

static void on_followed(struct kv_vault_read *read, int result) {
    struct follower *f = container_of(read, struct follower, read);
    struct kv_page_name name = vr_name(f->chain, f->page);
    bool is_there = kv_shelf_has(f->rig->shelf, kv_shelf_find(f->rig->shelf, &name), KV_TARGET_FULL);

    f->n_wrong += result != 0 || !is_there;
    f->page++;
    f->is_done = f->page == f->chain->n_pages;
    if (!f->is_done)
        follow(f);
}

static void follow(struct follower *f) {
    struct kv_page_name name = vr_name(f->chain, f->page);

    f->read.done = on_followed;
    if (kv_vault_read(f->rig->vault, &name, KV_TARGET_FULL, &f->read) != 0) {
        f->n_wrong++;
        f->is_done = true;
    }
}

static void who_reads_on_in_done_is_answered_when_the_page_is_there(void **state) {
    static struct vault_chain chain;
    struct vault_rig rig;
    struct follower followers[2];

    open_rig(state, &rig);
    vr_chain(&rig, &chain, 1, 20);
    vr_save(&rig, &chain);
    for (int i = 0; i < 2; i++) {
        followers[i] = (struct follower){.rig = &rig, .chain = &chain};
        follow(&followers[i]);
    }
    for (int i = 0; !followers[0].is_done || !followers[1].is_done; i++) {
        assert_true(i < 20000);
        vr_step(&rig);
    }
    assert_int_equal(followers[0].n_wrong + followers[1].n_wrong, 0);
    vr_free(&rig);
}

int main(void) {
    static struct mode modes[] = {{false, false}, {true, false}, {false, true}, {true, true}};
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_prestate(what_is_saved_is_read_back_the_same, &modes[0]),
        cmocka_unit_test_prestate(what_is_saved_is_read_back_the_same, &modes[1]),
        cmocka_unit_test_prestate(what_is_saved_is_read_back_the_same, &modes[2]),
        cmocka_unit_test_prestate(what_is_saved_is_read_back_the_same, &modes[3]),
        cmocka_unit_test_prestate(after_a_restart_all_is_found, &modes[0]),
        cmocka_unit_test_prestate(after_a_restart_all_is_found, &modes[1]),
        cmocka_unit_test_prestate(after_a_restart_all_is_found, &modes[3]),
        cmocka_unit_test_prestate(without_a_close_all_that_was_written_is_found, &modes[0]),
        cmocka_unit_test_prestate(without_a_close_all_that_was_written_is_found, &modes[1]),
        cmocka_unit_test_prestate(many_chains_read_side_by_side_come_back, &modes[0]),
        cmocka_unit_test_prestate(many_chains_read_side_by_side_come_back, &modes[1]),
        cmocka_unit_test_prestate(memory_that_was_given_back_is_used_again, &modes[0]),
        cmocka_unit_test_prestate(memory_that_was_given_back_is_used_again, &modes[1]),
        cmocka_unit_test(operations_after_a_long_time_are_not_late),
        cmocka_unit_test(who_reads_on_in_done_is_answered_when_the_page_is_there),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
