/* Whatever a disk gives when it is read, or does not: what comes up is the page that was asked for, or a miss that is
 * counted, and nobody waits longer than a deadline. */
#include "vault_rig.h"

enum { N_BLOCKS = VR_PAYLOAD / FORMAT_BLOCK_BYTES + 1 }; /* of a slot */

static void open_with_faults(struct vault_rig *rig) {
    vr_init(rig);
    vr_use_faults(rig);
    vr_open(rig);
}

static struct disk_fault error(int result) {
    return (struct disk_fault){.result = result};
}

static void expect_home(struct vault_rig *rig) {
    struct kv_vault_stats stats;

    vr_quiesce(rig);
    stats = vr_stats(rig);
    assert_int_equal(stats.disk.n_out, 0);
    for (int g = 0; g < KV_GROUP_N; g++) {
        struct kv_shelf_group_stats shelf;

        kv_shelf_stats(rig->shelf, (enum kv_group)g, &shelf);
        assert_int_equal(shelf.n_filling + shelf.n_pinned, 0);
        assert_int_equal(stats.group[g].n_pinned, 0);
    }
}

/* ---- damage ---------------------------------------------------------------------------------------------------------- */

/* The page is a miss now, counted once, and its slot takes pages again. */
static void expect_miss_that_heals(struct vault_rig *rig, const struct vault_chain *chain, uint32_t page,
                                   enum kv_group group) {
    uint64_t n_damaged = vr_stats(rig).n_damaged;

    assert_int_equal(vr_read_page(rig, chain, page, group), -EBADMSG);
    assert_int_equal(vr_stats(rig).n_damaged, n_damaged + 1);
    assert_int_equal(vr_read_page(rig, chain, page, group), KV_VAULT_E_NONE); /* nobody tries it again */
    vr_settle(rig);
    expect_home(rig);
    vr_save(rig, chain);
    assert_int_equal(vr_read_page(rig, chain, page, group), 0);
    vr_empty_shelf(rig);
}

static void flip(struct vault_rig *rig, const struct vault_chain *chain, uint32_t page, enum kv_group group,
                 uint32_t at) {
    struct vr_place place;
    uint8_t byte;

    assert_true(vr_find(rig, chain, page, group, &place));
    vr_read_file(rig, place.segment, place.offset + at, &byte, 1);
    byte ^= 0x10;
    vr_write_file(rig, place.segment, place.offset + at, &byte, 1);
}

static void a_flipped_bit_anywhere_is_a_miss(void **state) {
    static const uint32_t fields[] = {0,   8,   12,  16,  24,  32,  48,  56,  60,  64,  96,  112,  143,  144, 176,
                                      180, 184, 188, 192, 200, 208, 216, 220, 475, 476, 600, 4087, 4088, 4095};
    static struct vault_chain chain;
    struct vault_rig rig;

    (void)state;
    vr_init(&rig);
    vr_open(&rig);
    vr_chain(&rig, &chain, 1, 3);
    vr_save(&rig, &chain);
    for (size_t i = 0; i < ARRAY_LEN(fields); i++) {
        flip(&rig, &chain, 1, KV_TARGET_FULL, fields[i]);
        expect_miss_that_heals(&rig, &chain, 1, KV_TARGET_FULL);
    }
    for (uint32_t at = FORMAT_BLOCK_BYTES; at < FORMAT_BLOCK_BYTES + VR_PAYLOAD; at += 1371) { /* in every block */
        flip(&rig, &chain, 1, KV_TARGET_FULL, at);
        expect_miss_that_heals(&rig, &chain, 1, KV_TARGET_FULL);
    }
    flip(&rig, &chain, 2, KV_TARGET_STATE, 5000);
    expect_miss_that_heals(&rig, &chain, 2, KV_TARGET_STATE);
    flip(&rig, &chain, 2, KV_DRAFT_FULL, 100);
    expect_miss_that_heals(&rig, &chain, 2, KV_DRAFT_FULL);
    vr_expect_chain(&rig, &chain, true);
    vr_free(&rig);
}

/* The first n_new blocks of one slot and the others of another, in one place. */
static void tear(struct vault_rig *rig, const uint8_t *first, const uint8_t *last, uint32_t n_first,
                 const struct vr_place *place) {
    uint8_t slot[N_BLOCKS * FORMAT_BLOCK_BYTES];

    memcpy(slot, last, sizeof slot);
    memcpy(slot, first, (size_t)n_first * FORMAT_BLOCK_BYTES);
    vr_write_file(rig, place->segment, place->offset, slot, sizeof slot);
}

/* n_first = 0: the write was lost. Then it is another page, with a whole header and payload. */
static void a_torn_or_lost_write_is_a_miss(void **state) {
    static uint8_t was[N_BLOCKS * FORMAT_BLOCK_BYTES], is[N_BLOCKS * FORMAT_BLOCK_BYTES],
        zeros[N_BLOCKS * FORMAT_BLOCK_BYTES];
    static struct vault_chain chain, other;
    struct vault_rig rig;
    struct vr_place place, place_of_other;

    (void)state;
    vr_init(&rig);
    vr_open(&rig);
    vr_chain(&rig, &chain, 1, 2);
    vr_chain(&rig, &other, 2, 2);
    vr_save(&rig, &other);
    assert_true(vr_find(&rig, &other, 0, KV_TARGET_FULL, &place_of_other));
    vr_read_file(&rig, place_of_other.segment, place_of_other.offset, was, sizeof was);
    vr_save(&rig, &chain);
    for (int kind = 0; kind < 4;
         kind++) /* new over old, old over new, over what was blank before, nothing but a header */
        for (uint32_t n = 0; n < N_BLOCKS; n++) {
            assert_true(vr_find(&rig, &chain, 0, KV_TARGET_FULL, &place));
            vr_read_file(&rig, place.segment, place.offset, is, sizeof is);
            if (kind == 0)
                tear(&rig, is, was, n, &place);
            else if (kind == 1)
                tear(&rig, was, is, n + 1, &place);
            else if (kind == 2)
                tear(&rig, is, zeros, n, &place);
            else
                tear(&rig, zeros, is, n + 1, &place);
            expect_miss_that_heals(&rig, &chain, 0, KV_TARGET_FULL);
        }
    vr_expect_chain(&rig, &other, true);
    vr_free(&rig);
}

/* The same after a restart, when the header is all that is known. */
static void a_torn_write_before_a_crash_is_a_miss(void **state) {
    static uint8_t is[N_BLOCKS * FORMAT_BLOCK_BYTES], zeros[N_BLOCKS * FORMAT_BLOCK_BYTES];
    static struct vault_chain chain;
    struct vault_rig rig;
    struct vr_place place;

    (void)state;
    vr_init(&rig);
    vr_open(&rig);
    vr_chain(&rig, &chain, 1, 2);
    vr_save(&rig, &chain);
    for (uint32_t n = 0; n < N_BLOCKS; n++) {
        assert_true(vr_find(&rig, &chain, 1, KV_TARGET_FULL, &place));
        vr_close(&rig);
        vr_read_file(&rig, place.segment, place.offset, is, sizeof is);
        tear(&rig, is, zeros, n, &place);
        vr_open(&rig);
        vr_settle(&rig);
        assert_int_equal(vr_has(&rig, &chain, 1, KV_TARGET_FULL), n > 0);
        assert_int_equal(vr_read_page(&rig, &chain, 1, KV_TARGET_FULL), n > 0 ? -EBADMSG : KV_VAULT_E_NONE);
        vr_settle(&rig);
        vr_save(&rig, &chain);
        vr_expect_chain(&rig, &chain, true);
    }
    vr_free(&rig);
}

static void a_misdirected_write_is_a_miss_in_both_places(void **state) {
    static uint8_t slot[N_BLOCKS * FORMAT_BLOCK_BYTES];
    static struct vault_chain chain;
    struct vault_rig rig;
    struct vr_place from, to;

    (void)state;
    vr_init(&rig);
    vr_open(&rig);
    vr_chain(&rig, &chain, 1, 4);
    vr_save(&rig, &chain);
    assert_true(vr_find(&rig, &chain, 1, KV_TARGET_FULL, &from)); /* a whole slot of this store, and another page */
    vr_read_file(&rig, from.segment, from.offset, slot, sizeof slot);
    assert_true(vr_find(&rig, &chain, 2, KV_TARGET_FULL, &to));
    vr_write_file(&rig, to.segment, to.offset, slot, sizeof slot);
    expect_miss_that_heals(&rig, &chain, 2, KV_TARGET_FULL);
    assert_true(vr_find(&rig, &chain, 3, KV_DRAFT_FULL, &from)); /* the same page of another group */
    vr_read_file(&rig, from.segment, from.offset, slot, sizeof slot);
    assert_true(vr_find(&rig, &chain, 3, KV_TARGET_FULL, &to));
    vr_write_file(&rig, to.segment, to.offset, slot, sizeof slot);
    expect_miss_that_heals(&rig, &chain, 3, KV_TARGET_FULL);
    vr_expect_chain(&rig, &chain, true);
    vr_free(&rig);
}

static void on_verified(struct kv_vault_verify *verify) {
    (void)verify;
}

static bool verify_is_done;

static void note_verified(struct kv_vault_verify *verify) {
    on_verified(verify);
    verify_is_done = true;
}

static struct kv_vault_verify verify_all(struct vault_rig *rig) {
    struct kv_vault_verify verify = {.done = note_verified};

    verify_is_done = false;
    assert_int_equal(kv_vault_verify(rig->vault, &verify), 0);
    assert_int_equal(kv_vault_verify(rig->vault, &verify), -EALREADY);
    rig->is_asked = true;
    for (int i = 0; !verify_is_done; i++) {
        assert_true(i < 20000);
        vr_step(rig);
    }
    return verify;
}

static void verifying_finds_what_is_damaged_and_nothing_else(void **state) {
    static struct vault_chain chain, other;
    struct vault_rig rig;
    struct kv_vault_verify verify;

    (void)state;
    vr_init(&rig);
    vr_open(&rig);
    vr_chain(&rig, &chain, 1, 10);
    vr_chain(&rig, &other, 2, 5);
    vr_save(&rig, &chain);
    vr_save(&rig, &other);
    flip(&rig, &chain, 3, KV_TARGET_FULL, 9000);
    flip(&rig, &chain, 9, KV_TARGET_STATE, 200);
    flip(&rig, &other, 4, KV_DRAFT_FULL, 16383);
    verify = verify_all(&rig);
    assert_int_equal(verify.n_checked, 10 + 10 + 1 + 5 + 5 + 1);
    assert_int_equal(verify.n_damaged, 3);
    assert_int_equal(verify.n_unread, 0);
    assert_int_equal(vr_n_pages(&rig, &chain), 3);
    assert_false(vr_has(&rig, &chain, 9, KV_TARGET_STATE));
    assert_false(vr_has(&rig, &other, 4, KV_DRAFT_FULL));
    vr_settle(&rig);
    verify = verify_all(&rig);
    assert_int_equal(verify.n_checked, 29);
    assert_int_equal(verify.n_damaged, 0);
    vr_save(&rig, &chain);
    vr_save(&rig, &other);
    vr_expect_chain(&rig, &chain, true);
    vr_expect_chain(&rig, &other, true);
    vr_free(&rig);
}

static void verifying_leaves_the_order_in_which_pages_leave(void **state) {
    static struct vault_chain older, newer;
    struct vault_rig rig;

    (void)state;
    vr_init(&rig);
    vr_open(&rig);
    vr_chain(&rig, &older, 1, 4);
    vr_chain(&rig, &newer, 2, 4);
    vr_save(&rig, &older);
    vr_save(&rig, &newer);
    vr_expect_chain(&rig, &older, true); /* was needed last, though it has the lower records */
    verify_all(&rig);
    kv_vault_evict_bytes(rig.vault, 9 * (uint64_t)rig.options.group[KV_TARGET_FULL].slot_bytes);
    assert_int_equal(vr_n_pages(&rig, &newer), 0);
    assert_true(vr_is_whole(&rig, &older));
    vr_free(&rig);
}

static void a_verification_that_is_given_up_may_be_followed_by_another(void **state) {
    static struct vault_chain chain;
    struct vault_rig rig;
    struct kv_vault_verify verify = {.done = note_verified};

    (void)state;
    open_with_faults(&rig);
    vr_chain(&rig, &chain, 1, 3);
    vr_save(&rig, &chain);
    disk_faults_add(rig.faults, DISK_CALL_READ, (struct disk_fault){.is_held = true});
    assert_int_equal(kv_vault_verify(rig.vault, &verify), 0);
    vr_turns(&rig, 3);
    kv_vault_verify_cancel(rig.vault);
    assert_int_equal(kv_vault_verify(rig.vault, &verify), -EALREADY); /* its buffer is the kernel's still */
    kv_vault_purge(rig.vault, 1);
    disk_faults_release(rig.faults);
    vr_settle(&rig);
    expect_home(&rig);
    assert_int_equal(vr_stats(&rig).group[KV_TARGET_FULL].n_stored, 0);
    vr_save(&rig, &chain);
    assert_int_equal(verify_all(&rig).n_checked, 7);
    vr_free(&rig);
}

static void what_cannot_be_read_is_counted_by_a_verification(void **state) {
    static struct vault_chain chain;
    struct vault_rig rig;
    struct kv_vault_verify verify;

    (void)state;
    open_with_faults(&rig);
    vr_chain(&rig, &chain, 1, 3);
    vr_save(&rig, &chain);
    disk_faults_add(rig.faults, DISK_CALL_READ, error(-ENOMEM));
    disk_faults_add(rig.faults, DISK_CALL_READ, error(-EIO));
    verify = verify_all(&rig);
    assert_int_equal(verify.n_unread, 2);
    assert_int_equal(verify.n_checked, 5);
    assert_int_equal(verify.n_damaged, 1); /* the one that has no more than an error to give */
    vr_settle(&rig);
    expect_home(&rig);
    vr_free(&rig);
}

/* ---- errors ---------------------------------------------------------------------------------------------------------- */

static void a_read_that_fails_is_a_miss(void **state) {
    static const int errors[] = {EINVAL, ENOSPC, EROFS, EDQUOT, ENOMEM, ENODEV};
    static struct vault_chain chain;
    struct vault_rig rig;

    (void)state;
    open_with_faults(&rig);
    vr_chain(&rig, &chain, 1, 3);
    vr_save(&rig, &chain);
    for (size_t i = 0; i < ARRAY_LEN(errors); i++) {
        uint64_t n_errors = vr_stats(&rig).n_read_errors;

        disk_faults_add(rig.faults, DISK_CALL_READ, error(-errors[i]));
        disk_faults_add(rig.faults, DISK_CALL_READ, error(-errors[i])); /* EINVAL is tried once without direct I/O */
        assert_int_equal(vr_read_page(&rig, &chain, 0, KV_TARGET_FULL), -errors[i]);
        assert_int_equal(vr_stats(&rig).n_read_errors, n_errors + 1);
        expect_home(&rig);
        if (errors[i] != EINVAL)
            assert_int_equal(vr_read_page(&rig, &chain, 1, KV_TARGET_FULL), -errors[i]);
        assert_int_equal(vr_read_page(&rig, &chain, 0, KV_TARGET_FULL), 0); /* it may come another time */
        vr_empty_shelf(&rig);
        vr_pass(&rig, 61000000); /* another window of the breaker */
    }
    disk_faults_add(rig.faults, DISK_CALL_READ, error(-EIO)); /* that one does not */
    assert_int_equal(vr_read_page(&rig, &chain, 0, KV_TARGET_FULL), -EIO);
    assert_int_equal(vr_read_page(&rig, &chain, 0, KV_TARGET_FULL), KV_VAULT_E_NONE);
    vr_settle(&rig);
    vr_save(&rig, &chain);
    vr_expect_chain(&rig, &chain, true);
    vr_free(&rig);
}

static void short_and_interrupted_reads_go_on(void **state) {
    static const struct disk_fault faults[] = {
        {.short_by = 4096}, {.short_by = 3 * 4096}, {.result = -EINTR}, {.result = -EAGAIN}, {.short_by = 100}};
    static struct vault_chain chain;
    struct vault_rig rig;

    (void)state;
    open_with_faults(&rig);
    vr_chain(&rig, &chain, 1, 3);
    vr_save(&rig, &chain);
    for (size_t i = 0; i < ARRAY_LEN(faults); i++) {
        disk_faults_add(rig.faults, DISK_CALL_READ, faults[i]);
        assert_int_equal(vr_read_page(&rig, &chain, 1, KV_TARGET_FULL), 0);
        vr_empty_shelf(&rig);
    }
    assert_int_equal(vr_stats(&rig).n_read_errors, 0);
    disk_faults_add(rig.faults, DISK_CALL_READ, (struct disk_fault){.short_by = UINT32_MAX}); /* nothing, twice */
    disk_faults_add(rig.faults, DISK_CALL_READ, (struct disk_fault){.short_by = UINT32_MAX});
    assert_int_equal(vr_read_page(&rig, &chain, 1, KV_TARGET_FULL), -EIO);
    vr_free(&rig);
}

static void completions_that_nobody_waits_for_change_nothing(void **state) {
    static struct vault_chain chain;
    struct vault_rig rig;

    (void)state;
    open_with_faults(&rig);
    vr_chain(&rig, &chain, 1, 6);
    vr_save(&rig, &chain);
    disk_faults_always(rig.faults, DISK_CALL_READ, (struct disk_fault){.n_copies = 2});
    disk_faults_always(rig.faults, DISK_CALL_WRITE, (struct disk_fault){.n_copies = 1});
    disk_faults_reverse(rig.faults, true);
    vr_expect_chain(&rig, &chain, true);
    disk_faults_answer(rig.faults, disk_faults_last_id(rig.faults));
    disk_faults_answer(rig.faults, UINT64_C(77) << 32 | 3);
    disk_faults_answer(rig.faults, UINT64_MAX);
    vr_turns(&rig, 3);
    kv_vault_purge(rig.vault, 1);
    vr_settle(&rig);
    vr_save(&rig, &chain);
    vr_expect_chain(&rig, &chain, true);
    assert_true(vr_stats(&rig).disk.n_unknown > 20);
    disk_faults_always(rig.faults, DISK_CALL_READ, (struct disk_fault){0});
    disk_faults_always(rig.faults, DISK_CALL_WRITE, (struct disk_fault){0});
    vr_free(&rig);
}

static void a_page_that_nobody_can_check_is_a_miss(void **state) {
    static struct vault_chain chain;
    struct vault_rig rig;
    struct vr_read read;

    (void)state;
    open_with_faults(&rig);
    vr_chain(&rig, &chain, 1, 2);
    vr_save(&rig, &chain);
    assert_int_equal(vr_ask_read(&rig, &read, &chain, 0, KV_TARGET_FULL), 0);
    workers_refuse(rig.workers, 1);
    assert_int_equal(vr_wait_read(&rig, &read), -EAGAIN);
    expect_home(&rig);
    assert_int_equal(vr_read_page(&rig, &chain, 0, KV_TARGET_FULL), 0);
    vr_free(&rig);
}

/* ---- readers ---------------------------------------------------------------------------------------------------------- */

static void readers_of_one_page_share_a_reading(void **state) {
    static struct vault_chain chain;
    struct vault_rig rig;
    struct vr_read first, second, third;
    uint32_t n_calls;

    (void)state;
    open_with_faults(&rig);
    vr_chain(&rig, &chain, 1, 2);
    vr_save(&rig, &chain);
    n_calls = disk_faults_n_calls(rig.faults, DISK_CALL_READ);
    assert_int_equal(vr_ask_read(&rig, &first, &chain, 0, KV_TARGET_FULL), 0);
    assert_int_equal(vr_ask_read(&rig, &second, &chain, 0, KV_TARGET_FULL), 0);
    assert_int_equal(vr_ask_read(&rig, &third, &chain, 0, KV_TARGET_FULL), 0);
    kv_vault_read_cancel(rig.vault, &first.read);
    kv_vault_read_cancel(rig.vault, &first.read); /* twice is once */
    assert_int_equal(vr_wait_read(&rig, &second), 0);
    assert_int_equal(vr_wait_read(&rig, &third), 0);
    kv_vault_read_cancel(rig.vault, &third.read); /* after it came: nothing */
    assert_int_equal(first.n_done, 0);
    assert_int_equal(disk_faults_n_calls(rig.faults, DISK_CALL_READ), n_calls + 1);
    vr_expect_on_shelf(&rig, &chain, 0, KV_TARGET_FULL);
    expect_home(&rig);
    vr_free(&rig);
}

static void what_all_have_given_up_is_kept_all_the_same(void **state) {
    static struct vault_chain chain;
    struct vault_rig rig;
    struct vr_read read;

    (void)state;
    open_with_faults(&rig);
    vr_chain(&rig, &chain, 1, 2);
    vr_save(&rig, &chain);
    assert_int_equal(vr_ask_read(&rig, &read, &chain, 0, KV_TARGET_FULL), 0);
    kv_vault_read_cancel(rig.vault, &read.read);
    vr_settle(&rig);
    assert_int_equal(read.n_done, 0);
    vr_expect_on_shelf(&rig, &chain, 0, KV_TARGET_FULL);
    vr_free(&rig);
}

/* Both see the page though one asks for others at once, for which the shelf has no other place. */
struct greedy {
    struct kv_vault_read read, next;
    struct vault_rig *rig;
    const struct vault_chain *chain;
    bool has_seen;
    int r;
};

static void on_next(struct kv_vault_read *read, int result) {
    (void)read;
    (void)result;
}

static void on_greedy(struct kv_vault_read *read, int result) {
    struct greedy *greedy = container_of(read, struct greedy, read);
    struct kv_page_name name = vr_name(greedy->chain, 0), next = vr_name(greedy->chain, 1);

    assert_int_equal(result, 0);
    greedy->has_seen = kv_shelf_has(greedy->rig->shelf, kv_shelf_find(greedy->rig->shelf, &name), KV_TARGET_FULL);
    greedy->next.done = on_next;
    greedy->r = kv_vault_read(greedy->rig->vault, &next, KV_TARGET_FULL, &greedy->next);
}

static void a_page_stays_until_all_its_readers_have_seen_it(void **state) {
    static struct vault_chain chain;
    struct vault_rig rig;
    struct greedy readers[2];

    (void)state;
    vr_init(&rig);
    vr_open(&rig);
    vr_chain(&rig, &chain, 1, 2);
    vr_save(&rig, &chain);
    vr_close(&rig);
    rig.shelf_options.group[KV_TARGET_FULL].n_slots = 1;
    vr_open(&rig);
    vr_settle(&rig);
    for (int i = 0; i < 2; i++) {
        struct kv_page_name name = vr_name(&chain, 0);

        readers[i] = (struct greedy){.read.done = on_greedy, .rig = &rig, .chain = &chain};
        assert_int_equal(kv_vault_read(rig.vault, &name, KV_TARGET_FULL, &readers[i].read), 0);
    }
    vr_settle(&rig);
    assert_true(readers[0].has_seen && readers[1].has_seen);
    assert_int_equal(readers[0].r, KV_VAULT_E_BUSY);
    assert_int_equal(vr_read_page(&rig, &chain, 1, KV_TARGET_FULL), 0);
    expect_home(&rig);
    vr_free(&rig);
}

static void a_purged_page_that_is_being_read_goes_when_it_has_come(void **state) {
    static struct vault_chain chain;
    struct vault_rig rig;
    struct vr_read read;
    struct vr_place place;

    (void)state;
    open_with_faults(&rig);
    vr_chain(&rig, &chain, 1, 2);
    vr_save(&rig, &chain);
    assert_int_equal(vr_ask_read(&rig, &read, &chain, 0, KV_TARGET_FULL), 0);
    kv_vault_purge(rig.vault, 1);
    assert_false(vr_has(&rig, &chain, 0, KV_TARGET_FULL));
    assert_int_equal(vr_wait_read(&rig, &read), 0);
    vr_settle(&rig);
    expect_home(&rig);
    for (int g = 0; g < KV_GROUP_N; g++)
        assert_int_equal(vr_stats(&rig).group[g].n_stored, 0);
    for (uint32_t page = 0; page < 2; page++)
        for (int g = 0; g < KV_GROUP_N; g++)
            assert_false(vr_find(&rig, &chain, page, (enum kv_group)g, &place));
    vr_free(&rig);
}

/* ---- a disk that hangs ------------------------------------------------------------------------------------------------ */

static void who_waits_for_a_late_read_is_answered_at_the_deadline(void **state) {
    static struct vault_chain chain;
    struct vault_rig rig;
    struct vr_read read, again;
    struct kv_shelf_group_stats shelf;

    (void)state;
    open_with_faults(&rig);
    vr_chain(&rig, &chain, 1, 4);
    vr_save(&rig, &chain);
    disk_faults_add(rig.faults, DISK_CALL_READ, (struct disk_fault){.is_held = true, .is_deaf = true});
    assert_int_equal(vr_ask_read(&rig, &read, &chain, 0, KV_TARGET_FULL), 0);
    vr_pass(&rig, VR_DEADLINE_US - 1);
    assert_int_equal(read.n_done, 0);
    vr_pass(&rig, 1);
    assert_int_equal(read.n_done, 1);
    assert_int_equal(read.result, -ETIMEDOUT);
    assert_int_equal(vr_stats(&rig).n_read_late, 1);
    kv_shelf_stats(rig.shelf, KV_TARGET_FULL, &shelf);
    assert_int_equal(shelf.n_filling, 1); /* its memory is the kernel's */
    assert_int_equal(vr_stats(&rig).disk.n_out_late, 1);
    assert_int_equal(vr_ask_read(&rig, &again, &chain, 0, KV_TARGET_FULL), KV_VAULT_E_OFF);
    assert_int_equal(vr_read_page(&rig, &chain, 1, KV_TARGET_FULL), 0); /* others come */
    disk_faults_release(rig.faults);
    vr_settle(&rig);
    expect_home(&rig);
    assert_int_equal(read.n_done, 1);
    vr_expect_on_shelf(&rig, &chain, 0, KV_TARGET_FULL); /* it came after all, and was checked */
    vr_free(&rig);
}

static void an_operation_that_never_comes_home_opens_the_breaker(void **state) {
    static struct vault_chain chain;
    struct vault_rig rig;
    struct vr_read read;

    (void)state;
    open_with_faults(&rig);
    vr_chain(&rig, &chain, 1, 4);
    vr_save(&rig, &chain);
    disk_faults_add(rig.faults, DISK_CALL_READ, (struct disk_fault){.is_held = true, .is_deaf = true});
    assert_int_equal(vr_ask_read(&rig, &read, &chain, 0, KV_TARGET_FULL), 0);
    vr_pass(&rig, VR_DEADLINE_US);
    assert_false(vr_stats(&rig).is_off);
    vr_pass(&rig, VR_DEADLINE_US);
    assert_true(vr_stats(&rig).is_off);
    assert_int_equal(vr_stats(&rig).n_breaker_opened, 1);
    assert_int_equal(vr_ask_read(&rig, &read, &chain, 1, KV_TARGET_FULL), KV_VAULT_E_OFF);
    vr_pass(&rig, 30000000); /* it is still out, but the disk answers a probe, and one that tries */
    vr_turns(&rig, 20);
    assert_int_equal(vr_read_page(&rig, &chain, 1, KV_TARGET_FULL), 0);
    assert_false(vr_stats(&rig).is_off);
    vr_pass(&rig, 100 * (uint64_t)VR_DEADLINE_US);
    assert_int_equal(vr_stats(&rig).n_breaker_opened, 1);
    disk_faults_release(rig.faults);
    vr_settle(&rig);
    expect_home(&rig);
    vr_free(&rig);
}

static void a_disk_that_fails_is_left_alone_until_a_probe_works(void **state) {
    static struct vault_chain chain;
    struct vault_rig rig;
    struct vr_read first, second;
    uint32_t n_calls;

    (void)state;
    open_with_faults(&rig);
    vr_chain(&rig, &chain, 1, 20);
    vr_save(&rig, &chain);
    disk_faults_always(rig.faults, DISK_CALL_READ, error(-ENOMEM));
    disk_faults_always(rig.faults, DISK_CALL_WRITE, error(-ENOMEM));
    for (int i = 0; i < 9; i++) {
        assert_false(vr_stats(&rig).is_off);
        assert_int_equal(vr_read_page(&rig, &chain, 0, KV_TARGET_FULL), -ENOMEM);
    }
    assert_true(vr_stats(&rig).is_off);
    assert_false(vr_has(&rig, &chain, 1, KV_TARGET_FULL));
    assert_int_equal(vr_read_page(&rig, &chain, 1, KV_TARGET_FULL), KV_VAULT_E_OFF);
    n_calls = disk_faults_n_calls(rig.faults, DISK_CALL_WRITE);
    vr_pass(&rig, 29000000);
    assert_int_equal(disk_faults_n_calls(rig.faults, DISK_CALL_WRITE), n_calls);
    for (int i = 0; i < 3; i++) { /* one probe each time */
        vr_pass(&rig, 30000000);
        vr_turns(&rig, 10);
        assert_int_equal(disk_faults_n_calls(rig.faults, DISK_CALL_WRITE), ++n_calls);
        assert_true(vr_stats(&rig).is_off);
    }
    disk_faults_always(rig.faults, DISK_CALL_READ, (struct disk_fault){0});
    disk_faults_always(rig.faults, DISK_CALL_WRITE, (struct disk_fault){0});
    vr_pass(&rig, 30000000);
    vr_turns(&rig, 20);
    assert_true(vr_has(&rig, &chain, 1, KV_TARGET_FULL)); /* half open: one tries, others wait for it */
    assert_int_equal(vr_ask_read(&rig, &first, &chain, 1, KV_TARGET_FULL), 0);
    assert_int_equal(vr_ask_read(&rig, &second, &chain, 2, KV_TARGET_FULL), KV_VAULT_E_BUSY);
    assert_int_equal(vr_wait_read(&rig, &first), 0);
    assert_false(vr_stats(&rig).is_off);
    vr_expect_chain(&rig, &chain, true);
    expect_home(&rig);
    vr_free(&rig);
}

static void the_one_that_tries_and_fails_opens_the_breaker_again(void **state) {
    static const int errors[] = {EIO, ENOMEM, EAGAIN, ENODEV, ENOSPC};
    static struct vault_chain chain;
    struct vault_rig rig;

    (void)state;
    open_with_faults(&rig);
    vr_chain(&rig, &chain, 1, 20);
    vr_save(&rig, &chain);
    disk_faults_always(rig.faults, DISK_CALL_READ, error(-ENOMEM));
    for (int i = 0; i < 9; i++)
        assert_int_equal(vr_read_page(&rig, &chain, 0, KV_TARGET_FULL), -ENOMEM);
    for (size_t i = 0; i < ARRAY_LEN(errors); i++) {
        disk_faults_always(rig.faults, DISK_CALL_READ, (struct disk_fault){0});
        vr_pass(&rig, 30000000);
        vr_turns(&rig, 20);
        disk_faults_always(rig.faults, DISK_CALL_READ, error(-errors[i]));
        assert_int_equal(vr_read_page(&rig, &chain, 1 + (uint32_t)i, KV_TARGET_FULL), -errors[i]);
        assert_int_equal(vr_read_page(&rig, &chain, 10, KV_TARGET_FULL), KV_VAULT_E_OFF);
    }
    disk_faults_always(rig.faults, DISK_CALL_READ, (struct disk_fault){0});
    vr_pass(&rig, 30000000);
    vr_turns(&rig, 20);
    assert_int_equal(vr_read_page(&rig, &chain, 10, KV_TARGET_FULL), 0);
    assert_false(vr_stats(&rig).is_off);
    vr_free(&rig);
}

static void a_shelf_full_of_late_reads_does_not_hold_up_who_asks_a_disk_that_is_off(void **state) {
    static struct vault_chain chain;
    static struct vr_read reads[4];
    struct vault_rig rig;
    struct vr_read read;

    (void)state;
    vr_init(&rig);
    vr_open(&rig);
    vr_chain(&rig, &chain, 1, 8);
    vr_save(&rig, &chain);
    vr_close(&rig);
    rig.shelf_options.group[KV_TARGET_FULL].n_slots = 4;
    vr_use_faults(&rig);
    vr_open(&rig);
    vr_settle(&rig);
    disk_faults_always(rig.faults, DISK_CALL_READ, (struct disk_fault){.is_held = true, .is_deaf = true});
    for (uint32_t i = 0; i < 4; i++)
        assert_int_equal(vr_ask_read(&rig, &reads[i], &chain, i, KV_TARGET_FULL), 0);
    assert_int_equal(vr_ask_read(&rig, &read, &chain, 5, KV_TARGET_FULL), KV_VAULT_E_BUSY);
    vr_pass(&rig, VR_DEADLINE_US);
    for (int i = 0; i < 4; i++)
        assert_int_equal(reads[i].result, -ETIMEDOUT);
    assert_true(vr_stats(&rig).is_off);
    assert_int_equal(vr_ask_read(&rig, &read, &chain, 5, KV_TARGET_FULL), KV_VAULT_E_OFF);
    disk_faults_always(rig.faults, DISK_CALL_READ, (struct disk_fault){0});
    disk_faults_release(rig.faults);
    vr_settle(&rig);
    expect_home(&rig);
    vr_free(&rig);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_flipped_bit_anywhere_is_a_miss),
        cmocka_unit_test(a_torn_or_lost_write_is_a_miss),
        cmocka_unit_test(a_torn_write_before_a_crash_is_a_miss),
        cmocka_unit_test(a_misdirected_write_is_a_miss_in_both_places),
        cmocka_unit_test(verifying_finds_what_is_damaged_and_nothing_else),
        cmocka_unit_test(verifying_leaves_the_order_in_which_pages_leave),
        cmocka_unit_test(a_verification_that_is_given_up_may_be_followed_by_another),
        cmocka_unit_test(what_cannot_be_read_is_counted_by_a_verification),
        cmocka_unit_test(a_read_that_fails_is_a_miss),
        cmocka_unit_test(short_and_interrupted_reads_go_on),
        cmocka_unit_test(completions_that_nobody_waits_for_change_nothing),
        cmocka_unit_test(a_page_that_nobody_can_check_is_a_miss),
        cmocka_unit_test(readers_of_one_page_share_a_reading),
        cmocka_unit_test(what_all_have_given_up_is_kept_all_the_same),
        cmocka_unit_test(a_page_stays_until_all_its_readers_have_seen_it),
        cmocka_unit_test(a_purged_page_that_is_being_read_goes_when_it_has_come),
        cmocka_unit_test(who_waits_for_a_late_read_is_answered_at_the_deadline),
        cmocka_unit_test(an_operation_that_never_comes_home_opens_the_breaker),
        cmocka_unit_test(a_disk_that_fails_is_left_alone_until_a_probe_works),
        cmocka_unit_test(the_one_that_tries_and_fails_opens_the_breaker_again),
        cmocka_unit_test(a_shelf_full_of_late_reads_does_not_hold_up_who_asks_a_disk_that_is_off),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
