/* spill and restore over a store of the CPU backend, with copies and checksums that come home when the test says so, or
 * fail: what comes back is what went down, and comes back whole or not at all. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include "../fake/kv_rig.h"
#include "digest.h"
#include "restore.h"
#include "spill.h"

enum { N_OUT_MAX = 16, N_RESTORES = 4, N_FLOOD = 2, N_SPILLS = 2 };

/* All of a device's slots and more: nothing need leave. */
static const uint32_t ROOMY[KV_GROUP_N] = {
    [KV_TARGET_FULL] = 100, [KV_TARGET_STATE] = 10, [KV_DRAFT_FULL] = 100, [KV_DRAFT_SLIDING] = 100};

struct rig {
    struct kv_rig kv;
    struct kv_shelf *shelf;
    struct kv_spill *spill;
    struct kv_restores *restores;
    struct kv_copy_batch *batches[KV_COPY_DIRECTION_N][N_OUT_MAX];
    int n_batches[KV_COPY_DIRECTION_N];
    struct kv_work_item *works[N_OUT_MAX];
    int n_works;
    bool refuses_copies, refuses_work;
    struct kv_restore *restore;
    int n_done, result; /* of on_done */
};

/* ---- fakes ---- */

static uint64_t clock_us;

static uint64_t now_us(void) {
    return clock_us;
}

static int submit_batch(void *user, struct kv_copy_batch *batch) {
    struct rig *rig = user;

    KV_RIG_CHECK(batch->n > 0 && batch->n <= KV_COPIES_MAX);
    if (rig->refuses_copies)
        return -EAGAIN;
    KV_RIG_CHECK(rig->n_batches[batch->direction] < N_OUT_MAX);
    rig->batches[batch->direction][rig->n_batches[batch->direction]++] = batch;
    return 0;
}

static int submit_work(void *user, struct kv_work_item *item) {
    struct rig *rig = user;

    if (rig->refuses_work)
        return -ENOMEM;
    KV_RIG_CHECK(rig->n_works < N_OUT_MAX);
    rig->works[rig->n_works++] = item;
    return 0;
}

static void check(const struct rig *rig) {
    const char *wrong = kv_shelf_check(rig->shelf);

    if (!wrong)
        wrong = kv_restores_check(rig->restores);
    if (wrong)
        fprintf(stderr, "%s\n", wrong);
    KV_RIG_CHECK(!wrong);
    kv_rig_check(&rig->kv);
}

/* The oldest batch comes home. One that failed has written something else than it should. */
static bool come_home(struct rig *rig, enum kv_copy_direction direction, int result) {
    struct kv_copy_batch *batch = rig->batches[direction][0];

    if (rig->n_batches[direction] == 0)
        return false;
    rig->n_batches[direction]--;
    memmove(&rig->batches[direction][0], &rig->batches[direction][1],
            (size_t)rig->n_batches[direction] * sizeof(struct kv_copy_batch *));
    for (int i = batch->n - 1; i >= 0; i--) /* in any order */
        if (result == 0)
            memcpy(batch->transfers[i].dst, batch->transfers[i].src, batch->transfers[i].bytes);
        else
            memset(batch->transfers[i].dst, 0xee, batch->transfers[i].bytes);
    batch->result = result;
    batch->done(batch);
    check(rig);
    return true;
}

static bool do_work(struct rig *rig) {
    struct kv_work_item *item;

    if (rig->n_works == 0)
        return false;
    item = rig->works[--rig->n_works]; /* a pool keeps no order */
    item->run(item);
    item->done(item);
    check(rig);
    return true;
}

static void drain(struct rig *rig) {
    while (come_home(rig, KV_COPY_SPILL, 0) || come_home(rig, KV_COPY_FETCH, 0) || do_work(rig))
        continue;
    kv_restores_turn(rig->restores);
}

static void on_done(void *user, int result) {
    struct rig *rig = user;

    rig->n_done++;
    rig->result = result;
}

static void on_result(void *user, int result) {
    *(int *)user = result;
}

static void rig_open(struct rig *rig, const uint32_t device[KV_GROUP_N], uint32_t n_shelf_pages, uint32_t n_states) {
    struct kv_shelf_options shelf = {.alignment = FORMAT_ALIGN_MIN};
    struct kv_spill_options spill = {.n_jobs = N_SPILLS, .n_pages_max = KV_RIG_PAGES_MAX};
    struct kv_restores_options restores = {.now_us = now_us, .n_restores = N_RESTORES, .n_pages_max = KV_RIG_PAGES_MAX};

    memset(rig, 0, sizeof *rig);
    rig->kv = kv_rig_open(device, 2 * PAGE_TOKENS, device[KV_TARGET_FULL]);
    shelf.backend = rig->kv.backend;
    shelf.device = rig->kv.device;
    for (int g = 0; g < KV_GROUP_N; g++) {
        shelf.group[g].payload_bytes = KV_RIG_SLOT_BYTES;
        shelf.group[g].n_slots = g == KV_TARGET_STATE ? n_states : n_shelf_pages;
    }
    KV_RIG_CHECK(kv_shelf_open(&shelf, &rig->shelf) == 0);
    spill.store = restores.store = rig->kv.store;
    spill.shelf = restores.shelf = rig->shelf;
    spill.copier = restores.copier = (struct kv_copier){submit_batch, rig};
    spill.work = (struct kv_work){submit_work, rig};
    KV_RIG_CHECK(kv_spill_open(&spill, &rig->spill) == 0);
    KV_RIG_CHECK(kv_restores_open(&restores, &rig->restores) == 0);
}

/* Nothing is on its way, nothing pinned, and no slot missing. */
static void check_is_home(const struct rig *rig) {
    struct kv_store_stats device;
    struct kv_restores_stats restores;

    check(rig);
    KV_RIG_CHECK(kv_spill_is_idle(rig->spill));
    kv_restores_stats(rig->restores, &restores);
    KV_RIG_CHECK(restores.n_now == 0);
    kv_store_stats(rig->kv.store, &device);
    for (int g = 0; g < KV_GROUP_N; g++) {
        struct kv_shelf_group_stats shelf;

        kv_shelf_stats(rig->shelf, (enum kv_group)g, &shelf);
        KV_RIG_CHECK(device.group[g].n_private == 0 && device.group[g].n_pinned == 0);
        KV_RIG_CHECK(shelf.n_filling == 0 && shelf.n_pinned == 0);
    }
}

static void rig_close(struct rig *rig) {
    check_is_home(rig);
    kv_restores_close(rig->restores);
    kv_spill_close(rig->spill);
    kv_shelf_close(rig->shelf);
    kv_rig_close(&rig->kv);
}

/* A chain on the shelf alone, with restore points after each of the two numbers of pages. */
static void put_below(struct rig *rig, const char *kinds, uint32_t n_first, uint32_t n_second) {
    struct kv_seq *seq = malloc(sizeof *seq);

    KV_RIG_CHECK(seq != NULL);
    kv_seq_init(seq, &rig->kv, 1, kinds);
    for (int i = n_first == n_second; i < 2; i++) {
        uint32_t n_pages = i == 0 ? n_first : n_second;

        assert_true(kv_seq_compute(seq, &rig->kv, n_pages));
        kv_spill_start(rig->spill, &seq->lease, n_pages, 7, KV_SPILL_TO_HOST);
        drain(rig);
    }
    kv_seq_deinit(seq, &rig->kv);
    free(seq);
    kv_store_evict_all(rig->kv.store);
    check(rig);
}

static uint32_t lookup(const struct rig *rig, const struct kv_seq *seq) {
    struct kv_match match;
    struct kv_found found;

    kv_restores_lookup(rig->restores, seq->keys, seq->n_pages, &found);
    kv_store_lookup(rig->kv.store, seq->keys, seq->tokens, seq->n_pages, &match);
    assert_int_equal(found.n_device_tokens, match.n_tokens);
    assert_int_equal(found.n_disk_tokens, 0);
    return found.n_tokens / PAGE_TOKENS;
}

static int start(struct rig *rig, const struct kv_seq *seq, uint32_t n_pages) {
    int r = kv_restore_start(rig->restores, seq->keys, seq->tokens, n_pages, KV_RESTORE_REQUEST, on_done, rig,
                             &rig->restore);

    check(rig);
    return r;
}

static uint32_t n_on_device(const struct rig *rig) {
    struct kv_store_stats stats;

    kv_store_stats(rig->kv.store, &stats);
    return stats.n_records;
}

/* ---- claims ---- */

static void what_went_down_comes_back_the_same(void **state) {
    static struct kv_seq seq;
    static struct rig rig;

    (void)state;
    rig_open(&rig, ROOMY, 60, 4);
    put_below(&rig, "abcdefghijklmnopqrstuvwxyzabcdefghijklmn", 40, 40);
    assert_int_equal(n_on_device(&rig), 0);
    kv_seq_init(&seq, &rig.kv, 1, "abcdefghijklmnopqrstuvwxyzabcdefghijklmnop");
    assert_int_equal(lookup(&rig, &seq), 40);
    assert_int_equal(start(&rig, &seq, 40), 0);
    while (rig.n_done == 0) {
        assert_int_equal(n_on_device(&rig), 0); /* nothing is found before all is there */
        assert_true(come_home(&rig, KV_COPY_FETCH, 0));
    }
    assert_int_equal(rig.result, 0);
    kv_store_evict_all(rig.kv.store); /* its lease holds it */
    kv_seq_match(&seq, &rig.kv);
    assert_int_equal(seq.match.n_tokens, 40 * PAGE_TOKENS);
    assert_int_equal(seq.match.draft_valid_from, 0);
    kv_restore_end(rig.restore);
    kv_seq_check(&seq, &rig.kv);
    kv_seq_deinit(&seq, &rig.kv);
    rig_close(&rig);
}

static void looking_goes_by_keys_and_taking_by_tokens(void **state) {
    static struct kv_seq seq;
    static struct rig rig;
    struct kv_found found;

    (void)state;
    rig_open(&rig, ROOMY, 60, 4);
    put_below(&rig, "abcdefgh", 8, 8);
    kv_seq_init(&seq, &rig.kv, 1, "abcdefgh");
    seq.tokens[3 * PAGE_TOKENS]++; /* the keys are those of the old tokens: a collision */
    kv_restores_lookup(rig.restores, seq.keys, seq.n_pages, &found);
    assert_int_equal(found.n_tokens, 8 * PAGE_TOKENS);
    assert_int_equal(start(&rig, &seq, 8), KV_RESTORE_E_FULL);
    assert_int_equal(n_on_device(&rig), 0);
    seq.tokens[3 * PAGE_TOKENS]--;
    assert_int_equal(start(&rig, &seq, 8), 0);
    assert_true(come_home(&rig, KV_COPY_FETCH, 0));
    kv_restore_end(rig.restore);
    kv_store_lookup(rig.kv.store, seq.keys, seq.tokens, seq.n_pages, &seq.match);
    assert_int_equal(seq.match.n_tokens, 8 * PAGE_TOKENS);
    seq.tokens[3 * PAGE_TOKENS]++;
    kv_restores_lookup(rig.restores, seq.keys, seq.n_pages, &found);
    assert_int_equal(found.n_device_tokens, 8 * PAGE_TOKENS);
    kv_store_lookup(rig.kv.store, seq.keys, seq.tokens, seq.n_pages, &seq.match);
    assert_int_equal(seq.match.n_full_tokens, 3 * PAGE_TOKENS);
    seq.match = (struct kv_match){0};
    kv_seq_deinit(&seq, &rig.kv);
    rig_close(&rig);
}

static void only_what_the_device_lacks_is_copied(void **state) {
    static struct kv_seq seq, shorter;
    static struct rig rig;

    (void)state;
    rig_open(&rig, ROOMY, 60, 4);
    put_below(&rig, "abcdefgh", 8, 8);
    kv_seq_init(&shorter, &rig.kv, 1, "abcde");
    assert_true(kv_seq_compute(&shorter, &rig.kv, 5));
    kv_seq_init(&seq, &rig.kv, 1, "abcdefghi");
    assert_int_equal(lookup(&rig, &seq), 8);
    assert_int_equal(start(&rig, &seq, 8), 0);
    assert_int_equal(rig.batches[KV_COPY_FETCH][0]->n, 3 /* target */ + 3 /* draft */ + 2 /* its window */ + 1);
    kv_seq_deinit(&shorter, &rig.kv);
    kv_store_evict_all(rig.kv.store); /* what it builds on is held too */
    assert_true(come_home(&rig, KV_COPY_FETCH, 0));
    kv_seq_match(&seq, &rig.kv);
    assert_int_equal(seq.match.n_tokens, 8 * PAGE_TOKENS);
    kv_restore_end(rig.restore);
    kv_seq_deinit(&seq, &rig.kv);
    rig_close(&rig);
}

static void a_prefix_ends_at_its_last_restore_point(void **state) {
    static struct kv_seq seq, shorter;
    static struct rig rig;
    uint32_t last;

    (void)state;
    rig_open(&rig, ROOMY, 60, 4);
    put_below(&rig, "abcdefgh", 3, 8);
    kv_seq_init(&seq, &rig.kv, 1, "abcdefghi");
    assert_int_equal(lookup(&rig, &seq), 8);
    last = kv_shelf_find_key(rig.shelf, &seq.keys[7], 7);
    kv_shelf_drop(rig.shelf, last, KV_TARGET_STATE);
    assert_int_equal(lookup(&rig, &seq), 3);
    kv_seq_init(&shorter, &rig.kv, 1, "abcde");
    assert_true(kv_seq_compute(&shorter, &rig.kv, 5));
    kv_seq_deinit(&shorter, &rig.kv);
    assert_int_equal(lookup(&rig, &seq), 5); /* the device has one there, and the shelf the pages beyond */
    kv_store_evict_all(rig.kv.store);
    assert_int_equal(lookup(&rig, &seq), 3);
    kv_seq_deinit(&seq, &rig.kv);
    rig_close(&rig);
}

static void another_user_finds_nothing(void **state) {
    static struct kv_seq seq;
    static struct rig rig;

    (void)state;
    rig_open(&rig, ROOMY, 60, 4);
    put_below(&rig, "abc", 3, 3);
    kv_seq_init(&seq, &rig.kv, 2, "abc");
    assert_int_equal(lookup(&rig, &seq), 0);
    kv_seq_deinit(&seq, &rig.kv);
    rig_close(&rig);
}

static void a_copy_that_fails_leaves_nothing_on_the_device(void **state) {
    static struct kv_seq seq;
    static struct rig rig;
    int n_batches = 1;

    (void)state;
    rig_open(&rig, ROOMY, 60, 4);
    put_below(&rig, "abcdefghijklmnopqrstuvwxyzabcdefghijklmn", 40, 40);
    kv_seq_init(&seq, &rig.kv, 1, "abcdefghijklmnopqrstuvwxyzabcdefghijklmn");
    for (int bad = 0; bad < n_batches; bad++) {
        rig.n_done = 0;
        assert_int_equal(start(&rig, &seq, 40), 0);
        n_batches = (40 + 40 + 2 + 1 + KV_COPIES_MAX - 1) / KV_COPIES_MAX;
        for (int i = 0; i <= bad; i++) {
            assert_int_equal(rig.n_done, 0);
            assert_true(come_home(&rig, KV_COPY_FETCH, i == bad ? -EIO : 0));
        }
        assert_int_equal(rig.n_done, 1);
        assert_int_equal(rig.result, -EIO);
        assert_int_equal(n_on_device(&rig), 0);
        assert_int_equal(rig.n_batches[KV_COPY_FETCH], 0);
        kv_restore_end(rig.restore);
        check_is_home(&rig);
        assert_int_equal(lookup(&rig, &seq), 40); /* below it is as it was */
    }
    kv_seq_deinit(&seq, &rig.kv);
    rig_close(&rig);
}

static void a_batch_that_cannot_be_sent_fails_the_restore(void **state) {
    static struct kv_seq seq;
    static struct rig rig;

    (void)state;
    rig_open(&rig, ROOMY, 60, 4);
    put_below(&rig, "abcdefghijklmnopqrst", 20, 20);
    kv_seq_init(&seq, &rig.kv, 1, "abcdefghijklmnopqrst");
    rig.refuses_copies = true;
    assert_int_equal(start(&rig, &seq, 20), 0);
    assert_int_equal(rig.n_done, 0); /* never from inside */
    assert_true(kv_restores_turn(rig.restores));
    assert_int_equal(rig.n_done, 1);
    assert_true(rig.result < 0);
    kv_restore_end(rig.restore);
    check_is_home(&rig);
    rig.refuses_copies = false;
    assert_int_equal(start(&rig, &seq, 20), 0);
    rig.refuses_copies = true;
    assert_true(come_home(&rig, KV_COPY_FETCH, 0));
    assert_int_equal(rig.n_done, 2);
    assert_true(rig.result < 0);
    kv_restore_end(rig.restore);
    assert_int_equal(n_on_device(&rig), 0);
    kv_seq_deinit(&seq, &rig.kv);
    rig_close(&rig);
}

static void without_room_on_the_device_nothing_happens(void **state) {
    static const uint32_t TIGHT[KV_GROUP_N] = {
        [KV_TARGET_FULL] = 8, [KV_TARGET_STATE] = 2, [KV_DRAFT_FULL] = 8, [KV_DRAFT_SLIDING] = 8};
    static struct kv_seq seq, other;
    static struct rig rig;

    (void)state;
    rig_open(&rig, TIGHT, 60, 4);
    put_below(&rig, "abcdef", 6, 6);
    kv_seq_init(&other, &rig.kv, 1, "xyz");
    for (uint32_t i = 0; i < 3; i++)
        assert_int_equal(kv_seq_take(&other, &rig.kv, KV_TARGET_FULL, i), 0);
    kv_seq_init(&seq, &rig.kv, 1, "abcdef");
    assert_int_equal(start(&rig, &seq, 6), KV_RESTORE_E_FULL);
    assert_int_equal(kv_store_n_available(rig.kv.store, KV_TARGET_FULL), 5);
    assert_int_equal(kv_store_n_available(rig.kv.store, KV_DRAFT_FULL), 8);
    kv_seq_end(&other, &rig.kv);
    check_is_home(&rig);
    assert_int_equal(start(&rig, &seq, 6), 0);
    drain(&rig);
    kv_restore_end(rig.restore);
    kv_seq_deinit(&other, &rig.kv);
    kv_seq_deinit(&seq, &rig.kv);
    rig_close(&rig);
}

/* A chain of that user on the shelf alone. */
static void put_below_of(struct rig *rig, uint32_t uid, const char *kinds) {
    static struct kv_seq seq;

    kv_seq_init(&seq, &rig->kv, uid, kinds);
    assert_true(kv_seq_compute(&seq, &rig->kv, seq.n_pages));
    kv_spill_start(rig->spill, &seq.lease, seq.n_pages, uid, KV_SPILL_TO_HOST);
    drain(rig);
    kv_seq_deinit(&seq, &rig->kv);
    kv_store_evict_all(rig->kv.store);
}

static void the_last_place_is_for_who_has_none(void **state) {
    static struct kv_seq seq, other;
    static struct rig rig;
    struct kv_restore *all[N_RESTORES];

    (void)state;
    rig_open(&rig, ROOMY, 60, 4);
    put_below_of(&rig, 1, "abc");
    put_below_of(&rig, 2, "abcd");
    kv_seq_init(&seq, &rig.kv, 1, "abc");
    kv_seq_init(&other, &rig.kv, 2, "abcd");
    for (int i = 0; i < N_RESTORES - 1; i++) {
        assert_int_equal(start(&rig, &seq, 3), 0);
        all[i] = rig.restore;
    }
    assert_int_equal(start(&rig, &seq, 3), KV_RESTORE_E_BUSY);
    assert_int_equal(start(&rig, &other, 4), 0);
    all[N_RESTORES - 1] = rig.restore;
    assert_int_equal(start(&rig, &other, 4), KV_RESTORE_E_BUSY);
    drain(&rig); /* of those that brought the same one's pages stand, the others' slots go back */
    assert_int_equal(rig.n_done, N_RESTORES);
    assert_int_equal(n_on_device(&rig), 3 + 4);
    kv_restore_end(all[0]); /* now the last place is free again */
    assert_int_equal(start(&rig, &seq, 3), KV_RESTORE_E_BUSY);
    kv_seq_match(&seq, &rig.kv);
    assert_int_equal(seq.match.n_tokens, 3 * PAGE_TOKENS);
    for (int i = 1; i < N_RESTORES; i++)
        kv_restore_end(all[i]);
    kv_seq_deinit(&seq, &rig.kv);
    kv_seq_deinit(&other, &rig.kv);
    rig_close(&rig);
}

/* One user has copies of host memory made as fast as they come home; the other's are every second one. */
static void a_flood_of_copies_leaves_the_other_user_half(void **state) {
    static struct kv_seq flood, other;
    static struct rig rig;
    struct kv_restore *all[N_FLOOD], *one;
    int result = 1, n_home = 0;

    (void)state;
    rig_open(&rig, (const uint32_t[KV_GROUP_N]){140, 10, 140, 140}, 90, 4);
    put_below_of(&rig, 1, "abcdefghijklmnopqrstuvwxyzabcdefghijklmnopqrstu");
    put_below_of(&rig, 2, "abcdefghijklmnopqrstuvwxyzabcdefghijklmn");
    kv_seq_init(&flood, &rig.kv, 1, "abcdefghijklmnopqrstuvwxyzabcdefghijklmnopqrstu");
    kv_seq_init(&other, &rig.kv, 2, "abcdefghijklmnopqrstuvwxyzabcdefghijklmn");
    for (int i = 0; i < N_FLOOD; i++) {
        assert_int_equal(start(&rig, &flood, 47), 0);
        all[i] = rig.restore;
    }
    assert_int_equal(
        kv_restore_start(rig.restores, other.keys, other.tokens, 40, KV_RESTORE_REQUEST, on_result, &result, &one), 0);
    while (result == 1) {
        assert_true(come_home(&rig, KV_COPY_FETCH, 0));
        n_home++;
        for (int i = 0; i < N_FLOOD; i++)
            if (kv_restore_progress(all[i]) == 1) { /* the next one of the flood */
                kv_restore_end(all[i]);
                kv_store_evict_all(rig.kv.store);
                assert_int_equal(start(&rig, &flood, 47), 0);
                all[i] = rig.restore;
            }
        assert_true(n_home < 100);
    }
    assert_int_equal(result, 0);
    assert_in_range(n_home, 1, 2 + 2 * div_ceil(40 + 40 + 2 + 1, KV_COPIES_MAX));
    drain(&rig);
    kv_restore_end(one);
    for (int i = 0; i < N_FLOOD; i++)
        kv_restore_end(all[i]);
    kv_seq_deinit(&flood, &rig.kv);
    kv_seq_deinit(&other, &rig.kv);
    rig_close(&rig);
}

static void what_is_on_its_way_up_stays_below(void **state) {
    static struct kv_seq seq;
    static struct rig rig;

    (void)state;
    rig_open(&rig, ROOMY, 6, 1);
    put_below(&rig, "abcdef", 6, 6);
    kv_seq_init(&seq, &rig.kv, 1, "abcdef");
    assert_int_equal(start(&rig, &seq, 6), 0);
    kv_shelf_evict_bytes(rig.shelf, UINT64_MAX);
    put_below(&rig, "uvwxyz", 6, 6); /* finds no room below, and copies home the restore */
    kv_seq_match(&seq, &rig.kv);
    kv_restore_end(rig.restore);
    kv_seq_check(&seq, &rig.kv);
    kv_seq_deinit(&seq, &rig.kv);
    rig_close(&rig);
}

static void the_restore_point_is_held_until_the_end_too(void **state) {
    static struct kv_seq seq;
    static struct rig rig;
    uint32_t slots[10];
    int n = 0;

    (void)state;
    rig_open(&rig, ROOMY, 60, 4);
    put_below(&rig, "abcd", 4, 4);
    kv_seq_init(&seq, &rig.kv, 1, "abcd");
    assert_int_equal(start(&rig, &seq, 4), 0);
    drain(&rig);
    while (n < 10 && kv_store_take(rig.kv.store, KV_TARGET_STATE, &slots[n]) == 0)
        n++; /* others begin */
    assert_int_equal(kv_seq_lookup(&seq, &rig.kv).n_tokens, 4 * PAGE_TOKENS);
    while (n > 0)
        kv_store_give(rig.kv.store, KV_TARGET_STATE, slots[--n]);
    kv_restore_end(rig.restore);
    kv_seq_deinit(&seq, &rig.kv);
    rig_close(&rig);
}

static void pages_on_their_way_down_stay_on_the_device(void **state) {
    static struct kv_seq seq, other;
    static struct rig rig;

    (void)state;
    rig_open(&rig, (uint32_t[KV_GROUP_N]){[KV_TARGET_FULL] = 8, [KV_TARGET_STATE] = 4}, 60, 4);
    kv_seq_init(&seq, &rig.kv, 1, "abcdef");
    assert_true(kv_seq_compute(&seq, &rig.kv, 6));
    kv_spill_start(rig.spill, &seq.lease, 6, 7, KV_SPILL_TO_HOST);
    kv_seq_end(&seq, &rig.kv);
    kv_store_evict_all(rig.kv.store);
    kv_seq_init(&other, &rig.kv, 1, "uvwxyz");
    assert_false(kv_seq_compute(&other, &rig.kv, 6)); /* two slots are left */
    drain(&rig);
    assert_true(kv_seq_compute(&other, &rig.kv, 6)); /* over the first chain's slots */
    kv_seq_deinit(&other, &rig.kv);
    kv_store_evict_all(rig.kv.store);
    assert_int_equal(start(&rig, &seq, 6), 0);
    drain(&rig);
    kv_seq_match(&seq, &rig.kv);
    assert_int_equal(seq.match.n_tokens, 6 * PAGE_TOKENS);
    kv_restore_end(rig.restore);
    kv_seq_deinit(&seq, &rig.kv);
    rig_close(&rig);
}

static void a_spill_that_fails_is_not_found(void **state) {
    static struct kv_seq seq;
    static struct rig rig;
    struct kv_spill_stats stats;

    (void)state;
    rig_open(&rig, ROOMY, 60, 4);
    kv_seq_init(&seq, &rig.kv, 1, "abcdef");
    assert_true(kv_seq_compute(&seq, &rig.kv, 6));
    for (int way = 0; way < 3; way++) {
        rig.refuses_copies = way == 0;
        rig.refuses_work = way == 1;
        kv_spill_start(rig.spill, &seq.lease, 6, 7, KV_SPILL_TO_HOST);
        assert_int_equal(come_home(&rig, KV_COPY_SPILL, way == 2 ? -EIO : 0), way != 0);
        assert_int_equal(rig.n_works, 0);
        assert_true(kv_spill_is_idle(rig.spill));
        rig.refuses_copies = rig.refuses_work = false;
    }
    kv_spill_stats(rig.spill, &stats);
    assert_int_equal(stats.n_copies, 0);
    assert_int_equal(stats.n_failed, 3 * (6 + 6 + 2 + 1));
    kv_seq_end(&seq, &rig.kv);
    kv_store_evict_all(rig.kv.store);
    assert_int_equal(lookup(&rig, &seq), 0);
    kv_seq_deinit(&seq, &rig.kv);
    rig_close(&rig);
}

static void a_chain_leaves_from_its_end(void **state) {
    static struct kv_seq seq;
    static struct rig rig;

    (void)state;
    rig_open(&rig, ROOMY, 6, 4);
    put_below(&rig, "abcd", 2, 4);
    put_below(&rig, "wxyz", 4, 4); /* two of four must go */
    kv_seq_init(&seq, &rig.kv, 1, "abcd");
    assert_int_equal(lookup(&rig, &seq), 2);
    kv_seq_list(&seq, &rig.kv, 1, "wxyz");
    assert_int_equal(lookup(&rig, &seq), 4);
    kv_seq_deinit(&seq, &rig.kv);
    rig_close(&rig);
}

static void a_chain_that_is_used_again_stays(void **state) {
    static struct kv_seq seq;
    static struct rig rig;

    (void)state;
    rig_open(&rig, ROOMY, 8, 4);
    put_below(&rig, "abcd", 4, 4);
    put_below(&rig, "wxyz", 4, 4);
    put_below(&rig, "abcd", 4, 4); /* there already: nothing is copied */
    put_below(&rig, "op", 2, 2);
    kv_seq_init(&seq, &rig.kv, 1, "abcd");
    assert_int_equal(lookup(&rig, &seq), 4);
    kv_seq_deinit(&seq, &rig.kv);
    rig_close(&rig);
}

static void a_chain_longer_than_the_shelf_displaces_nothing(void **state) {
    static struct kv_seq seq;
    static struct rig rig;

    (void)state;
    rig_open(&rig, ROOMY, 6, 4);
    put_below(&rig, "abcd", 4, 4);
    put_below(&rig, "opqrstu", 7, 7);
    kv_seq_init(&seq, &rig.kv, 1, "abcd");
    assert_int_equal(lookup(&rig, &seq), 4);
    kv_seq_deinit(&seq, &rig.kv);
    rig_close(&rig);
}

/* ---- anything, in any order ---- */

enum { N_SEQS = 5 };

struct user { /* one restore on its way for a seq */
    struct kv_seq seq;
    struct kv_restore *restore;
    bool is_done;
    int result;
};

static void on_user_done(void *user, int result) {
    ((struct user *)user)->is_done = true;
    ((struct user *)user)->result = result;
}

static uint32_t below(uint64_t *random, uint32_t n) {
    *random = *random * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((*random >> 33) % n);
}

static void act(struct rig *rig, struct user *u, uint64_t *random) {
    if (u->restore) {
        if (!u->is_done)
            return;
        if (u->result == 0)
            kv_seq_match(&u->seq, &rig->kv); /* checks what it found */
        kv_restore_end(u->restore);
        u->restore = NULL;
    } else if (u->seq.n_filled > 0) {
        kv_seq_check(&u->seq, &rig->kv);
        kv_seq_end(&u->seq, &rig->kv);
    } else {
        char kinds[20];
        uint32_t n = 1 + below(random, 19), uid = 1 + below(random, 2);

        for (uint32_t i = 0; i < n; i++)
            kinds[i] = (char)('a' + below(random, 8) / 7);
        kinds[n] = '\0';
        kv_seq_list(&u->seq, &rig->kv, uid, kinds);
        n = lookup(rig, &u->seq);
        u->is_done = false;
        if (n > kv_seq_lookup(&u->seq, &rig->kv).n_tokens / PAGE_TOKENS &&
            kv_restore_start(rig->restores, u->seq.keys, u->seq.tokens, n, KV_RESTORE_REQUEST, on_user_done, u,
                             &u->restore) == 0)
            return;
        kv_seq_match(&u->seq, &rig->kv);
        n = u->seq.n_filled + 1 + below(random, u->seq.n_pages);
        if (n <= u->seq.n_pages && kv_seq_compute(&u->seq, &rig->kv, n))
            kv_spill_start(rig->spill, &u->seq.lease, n, uid, KV_SPILL_TO_HOST);
    }
}

static void whatever_happens_pages_hold_what_their_keys_say(void **state) {
    static const uint32_t TIGHT[KV_GROUP_N] = {
        [KV_TARGET_FULL] = 30, [KV_TARGET_STATE] = 6, [KV_DRAFT_FULL] = 24, [KV_DRAFT_SLIDING] = 14};
    static struct user users[N_SEQS];
    static struct rig rig;
    struct kv_restores_stats stats;
    uint64_t random = 4;

    (void)state;
    rig_open(&rig, TIGHT, 40, 9);
    for (int i = 0; i < N_SEQS; i++)
        kv_seq_init(&users[i].seq, &rig.kv, 1, "a");
    for (int step = 0; step < 20000; step++) {
        rig.refuses_copies = below(&random, 50) == 0;
        rig.refuses_work = below(&random, 50) == 0;
        switch (below(&random, 6)) {
        case 0:
            come_home(&rig, KV_COPY_SPILL, below(&random, 20) ? 0 : -EIO);
            break;
        case 1:
            come_home(&rig, KV_COPY_FETCH, below(&random, 10) ? 0 : -EIO);
            break;
        case 2:
            do_work(&rig);
            kv_restores_turn(rig.restores);
            break;
        case 3:
            if (below(&random, 4) == 0)
                kv_store_evict_bytes(rig.kv.store, below(&random, 20) * KV_RIG_SLOT_BYTES);
            if (below(&random, 20) == 0)
                kv_shelf_evict_bytes(rig.shelf, below(&random, 20) * KV_RIG_SLOT_BYTES);
            break;
        default:
            act(&rig, &users[below(&random, N_SEQS)], &random);
        }
        check(&rig);
    }
    rig.refuses_copies = rig.refuses_work = false;
    drain(&rig);
    kv_restores_stats(rig.restores, &stats);
    assert_true(stats.n_done > 100 && stats.n_failed > 10);
    for (int i = 0; i < N_SEQS; i++) {
        if (users[i].restore)
            kv_restore_end(users[i].restore);
        kv_seq_deinit(&users[i].seq, &rig.kv);
    }
    rig_close(&rig);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_went_down_comes_back_the_same),
        cmocka_unit_test(looking_goes_by_keys_and_taking_by_tokens),
        cmocka_unit_test(only_what_the_device_lacks_is_copied),
        cmocka_unit_test(a_prefix_ends_at_its_last_restore_point),
        cmocka_unit_test(another_user_finds_nothing),
        cmocka_unit_test(a_copy_that_fails_leaves_nothing_on_the_device),
        cmocka_unit_test(a_batch_that_cannot_be_sent_fails_the_restore),
        cmocka_unit_test(without_room_on_the_device_nothing_happens),
        cmocka_unit_test(the_last_place_is_for_who_has_none),
        cmocka_unit_test(a_flood_of_copies_leaves_the_other_user_half),
        cmocka_unit_test(what_is_on_its_way_up_stays_below),
        cmocka_unit_test(the_restore_point_is_held_until_the_end_too),
        cmocka_unit_test(pages_on_their_way_down_stay_on_the_device),
        cmocka_unit_test(a_spill_that_fails_is_not_found),
        cmocka_unit_test(a_chain_leaves_from_its_end),
        cmocka_unit_test(a_chain_that_is_used_again_stays),
        cmocka_unit_test(a_chain_longer_than_the_shelf_displaces_nothing),
        cmocka_unit_test(whatever_happens_pages_hold_what_their_keys_say),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
