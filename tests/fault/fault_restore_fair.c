/* Restores of several users at a time: whoever floods the disk leaves each other user his part of it, and no reading that
 * somebody could begin waits. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include "tier_rig.h"

static const uint32_t DEVICE[KV_GROUP_N] = {
    [KV_TARGET_FULL] = 160, [KV_TARGET_STATE] = 10, [KV_DRAFT_FULL] = 160, [KV_DRAFT_SLIDING] = 40};
static const uint32_t SHELF[KV_GROUP_N] = {
    [KV_TARGET_FULL] = 120, [KV_TARGET_STATE] = 10, [KV_DRAFT_FULL] = 120, [KV_DRAFT_SLIDING] = 40};

enum {
    READS_MAX = 64,     /* of a vault side by side */
    ONE_READS_MAX = 32, /* of one restore */
    N_FLOOD = 2         /* that make use of all these */
};

#define LONG "abcdefghijklmnopqrstuvwxyzabcdefghijklmn"  /* 40 pages */
#define OTHER "nmlkjihgfedcbazyxwvutsrqponmlkjihgfedcba" /* the same */
#define SHORT "abcdefghijklmnopqrst"                     /* 20 pages */
enum { LONG_PAGES = 40, SHORT_PAGES = 20, SHORT_SLOTS = 20 + 20 + 2 + 1 };

struct chain { /* that a user has restored, again and again if he floods */
    struct kv_seq seq;
    uint32_t n_pages;
    struct kv_restore *restore; /* NULL: none is on its way */
    int result;
};

static void on_done(void *user, int result) {
    ((struct chain *)user)->result = result;
}

static void init_chain(struct chain *chain, struct tier_rig *rig, uint32_t uid, const char *kinds) {
    *chain = (struct chain){.n_pages = (uint32_t)strlen(kinds)};
    tier_put_below(rig, uid, kinds, chain->n_pages, chain->n_pages, true);
    kv_seq_init(&chain->seq, &rig->kv, uid, kinds);
}

static int start(struct chain *chain, struct tier_rig *rig) {
    chain->result = 1;
    return kv_restore_start(rig->restores, chain->seq.keys, chain->seq.tokens, chain->n_pages, KV_RESTORE_REQUEST,
                            on_done, chain, &chain->restore);
}

static void end(struct chain *chain) {
    kv_restore_end(chain->restore);
    chain->restore = NULL;
}

static struct kv_restores_stats stats_of(const struct tier_rig *rig) {
    struct kv_restores_stats stats;

    kv_restores_stats(rig->restores, &stats);
    return stats;
}

/* Being read or checked. */
static uint32_t n_reading(const struct tier_rig *rig) {
    uint32_t n = 0;

    for (int g = 0; g < KV_GROUP_N; g++) {
        struct kv_shelf_group_stats shelf;

        kv_shelf_stats(rig->shelf, (enum kv_group)g, &shelf);
        n += shelf.n_filling;
    }
    return n;
}

static bool is_shelf_full(const struct tier_rig *rig) {
    bool is_full = false;

    for (int g = 0; g < KV_GROUP_N; g++) {
        struct kv_shelf_group_stats shelf;

        kv_shelf_stats(rig->shelf, (enum kv_group)g, &shelf);
        is_full = is_full || shelf.n_filling + shelf.n_pinned == shelf.n_slots;
    }
    return is_full;
}

/* One thing comes home, and a turn. */
static void step(struct tier_rig *rig, bool copies_first) {
    if (!(copies_first && tier_come_home(rig, KV_COPY_FETCH, 0)) && !tier_do_work(rig, 0))
        tier_come_home(rig, KV_COPY_FETCH, 0);
    tier_turn(rig);
}

static void close_all(struct tier_rig *rig, struct chain *chains, int n) {
    tier_drain(rig);
    for (int i = 0; i < n; i++) {
        if (chains[i].restore)
            end(&chains[i]);
        kv_seq_deinit(&chains[i].seq, &rig->kv);
    }
    tier_check_is_home(rig);
    tier_close(rig);
}

/* ---- claims ---- */

static void one_user_alone_has_all_there_is(void **state) {
    static struct chain chains[N_FLOOD];
    static struct tier_rig rig;

    (void)state;
    tier_open(&rig, DEVICE, SHELF);
    init_chain(&chains[0], &rig, 1, LONG);
    init_chain(&chains[1], &rig, 1, OTHER);
    assert_int_equal(start(&chains[0], &rig), 0);
    assert_int_equal(n_reading(&rig), ONE_READS_MAX);
    assert_int_equal(start(&chains[1], &rig), 0);
    assert_int_equal(n_reading(&rig), READS_MAX);
    close_all(&rig, chains, N_FLOOD);
}

/* Each chain of the flood begins again as soon as it has come, from disk. */
static void a_flood_leaves_the_other_user_half(void **state) {
    static struct chain chains[N_FLOOD + 1];
    static struct tier_rig rig;
    struct chain *other = &chains[N_FLOOD];
    uint64_t n_before;
    uint32_t n_at_once;

    (void)state;
    tier_open(&rig, DEVICE, SHELF);
    init_chain(&chains[0], &rig, 1, LONG);
    init_chain(&chains[1], &rig, 1, OTHER);
    init_chain(other, &rig, 2, SHORT);
    for (int i = 0; i < N_FLOOD; i++)
        assert_int_equal(start(&chains[i], &rig), 0);
    n_before = stats_of(&rig).n_disk_pages;
    assert_int_equal(start(other, &rig), 0);
    assert_int_equal(n_reading(&rig), READS_MAX); /* all of the flood: what is out is not called back */
    for (int n = 0; other->result == 1; n++) {
        assert_true(n < 10000);
        step(&rig, true);
        for (int i = 0; i < N_FLOOD; i++) {
            if (chains[i].result == 1)
                continue;
            assert_int_equal(chains[i].result, 0);
            end(&chains[i]);
            kv_store_evict_all(rig.kv.store);
            kv_shelf_evict_bytes(rig.shelf, UINT64_MAX);
            assert_int_equal(start(&chains[i], &rig), 0);
        }
    }
    assert_int_equal(other->result, 0);
    n_at_once = READS_MAX + ONE_READS_MAX; /* what was out, and his part of what is out at any time */
    assert_in_range(stats_of(&rig).n_disk_pages - n_before, SHORT_SLOTS, n_at_once + 2 * SHORT_SLOTS);
    close_all(&rig, chains, N_FLOOD + 1);
}

/* Three users begin and give up as they like; whenever a restore could have another page read and has not, the vault reads as
 * many as it can, or the shelf has no room. */
static void nothing_that_could_be_read_waits(void **state) {
    static struct chain chains[5];
    static struct tier_rig rig;
    uint64_t random = 7;
    int n_full = 0, n_done = 0;

    (void)state;
    tier_open(&rig, DEVICE, SHELF);
    init_chain(&chains[0], &rig, 1, LONG);
    init_chain(&chains[1], &rig, 1, OTHER);
    init_chain(&chains[2], &rig, 2, LONG);
    init_chain(&chains[3], &rig, 2, SHORT);
    init_chain(&chains[4], &rig, 3, OTHER);
    for (int i = 0; i < 12000; i++) {
        struct chain *chain;

        random = random * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        chain = &chains[(random >> 33) % ARRAY_LEN(chains)];
        if (!chain->restore) {
            kv_store_evict_all(rig.kv.store);
            if ((random >> 40) % 8 == 0)
                kv_shelf_evict_bytes(rig.shelf, UINT64_MAX);
            start(chain, &rig);
        } else if (chain->result != 1) {
            n_done += chain->result == 0;
            end(chain);
        } else if ((random >> 40) % 200 == 0) {
            kv_restore_cancel(chain->restore);
        }
        step(&rig, (random >> 50) % 2);
        n_full += n_reading(&rig) == READS_MAX;
        assert_true(stats_of(&rig).n_hungry == 0 || n_reading(&rig) == READS_MAX || is_shelf_full(&rig));
    }
    assert_true(n_full > 100 && n_done > 20);
    close_all(&rig, chains, ARRAY_LEN(chains));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_user_alone_has_all_there_is),
        cmocka_unit_test(a_flood_leaves_the_other_user_half),
        cmocka_unit_test(nothing_that_could_be_read_waits),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
