/* The machine ends in the middle of things: after every single call of a script that saves, syncs, evicts, purges, makes files,
 * gives them to other groups and gives them up, the process is killed or the power goes, and of what was written and not
 * synced any part is left. Who starts then finds nothing but right pages: all that a flush had promised and nobody dropped,
 * none that a purge had promised to be gone; and the store works.
 *
 *     fault_power [seed [n_seeds [stride]]]     a script for each seed; every one of `stride` calls is the last one once: with 1,
 *                                               which takes half a minute for each seed, all are */
#include "../fake/disk_cut.h"
#include "vault_rig.h"

enum { N_CHAINS = 12, N_PAGES = 5, N_ACTIONS = 28, N_SEGMENTS = 5, WORKS_MAX = 64, TURNS_MAX = 20000 };
enum { PURGED_UID = 2 };

static uint64_t first_seed = 1, n_seeds = 2, stride = 20;

/* What the script knows of a page. */
struct expected {
    bool is_promised; /* a flush said that it is there, and it has not left since */
    bool is_purged;   /* a purge said that it is gone, and it was not saved since */
};

struct world {
    struct vault_rig rig;
    struct disk_cut *cut;
    uint64_t random;
    struct kv_work_item *works[WORKS_MAX];
    int n_works;
    struct vault_chain chains[N_CHAINS];
    struct expected pages[N_CHAINS][N_PAGES][KV_GROUP_N];
};

static struct world w;
static unsigned long long cut_seed;
static uint32_t last_call;
static uint64_t n_cuts, n_promised, n_found, n_damaged;

static uint32_t below(uint32_t n) {
    w.random = w.random * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((w.random >> 33) % n);
}

/* ---- one thing after the other ------------------------------------------------------------------------------------- */

static int put_work(void *user, struct kv_work_item *item) {
    (void)user;
    assert_true(w.n_works < WORKS_MAX);
    w.works[w.n_works++] = item;
    return 0;
}

static void do_works(void) {
    while (w.n_works > 0) {
        struct kv_work_item *item = w.works[--w.n_works];

        item->run(item);
        item->done(item);
    }
}

static bool is_dead(void) {
    return disk_cut_is_dead(w.cut);
}

static bool is_real(int chain, uint32_t page, enum kv_group group) {
    uint32_t n_pages = w.chains[chain].n_pages;

    return page < n_pages && w.rig.options.group[group].slot_bytes > 0 &&
           (group != KV_TARGET_STATE || page + 1 == n_pages);
}

/* For each page that there may be. */
static void each(void (*look)(int chain, uint32_t page, enum kv_group group, struct expected *expected)) {
    for (int c = 0; c < N_CHAINS; c++)
        for (uint32_t page = 0; page < N_PAGES; page++)
            for (int g = 0; g < KV_GROUP_N; g++)
                if (is_real(c, page, (enum kv_group)g))
                    look(c, page, (enum kv_group)g, &w.pages[c][page][g]);
}

static void note_gone(int chain, uint32_t page, enum kv_group group, struct expected *expected) {
    if (expected->is_promised && !vr_has(&w.rig, &w.chains[chain], page, group))
        expected->is_promised = false;
}

static void turn(void) {
    do_works();
    kv_vault_dispatch(w.rig.vault);
    vr_turn(&w.rig);
    if (!is_dead() && !kv_vault_is_scanning(w.rig.vault))
        each(note_gone);
    if (vr_look(&w.rig)->disk.n_out == 0)
        vr_clock_us += 1000;
}

static bool is_busy(void) {
    const struct kv_vault_stats *stats = vr_look(&w.rig);

    return kv_vault_is_saving(w.rig.vault) || stats->n_to_blank > 0 || stats->is_scanning || stats->disk.n_out > 0 ||
           w.n_works > 0;
}

static void settle(void) {
    for (int i = 0; !is_dead() && (i == 0 || is_busy()); i++) {
        assert_true(i < TURNS_MAX);
        turn();
    }
}

static void some_turns(void) {
    for (uint32_t n = below(12); n > 0 && !is_dead(); n--)
        turn();
}

static void close_vault(void) {
    do_works();
    vr_close_vault(&w.rig);
    assert_int_equal(w.n_works, 0);
}

/* ---- the script ---------------------------------------------------------------------------------------------------- */

static void set_shares(bool has_large_draft) {
    w.rig.options.group[KV_TARGET_FULL].share = has_large_draft ? 25 : 50;
    w.rig.options.group[KV_DRAFT_FULL].share = has_large_draft ? 50 : 25;
}

static const struct kv_key *put_key;

static void note_put(int chain, uint32_t page, enum kv_group group, struct expected *expected) {
    (void)group;
    if (memcmp(&w.chains[chain].keys[page], put_key, sizeof *put_key) == 0)
        expected->is_purged = false;
}

static void put(int chain) {
    for (uint32_t page = 0; page < w.chains[chain].n_pages; page++) { /* it may be another chain's too */
        put_key = &w.chains[chain].keys[page];
        each(note_put);
    }
    vr_put_from(&w.rig, &w.chains[chain], 0);
    vr_ask_save(&w.rig, &w.chains[chain], KV_VAULT_SAVE_MUST);
}

static void promise(int chain, uint32_t page, enum kv_group group, struct expected *expected) {
    expected->is_promised = vr_has(&w.rig, &w.chains[chain], page, group);
}

/* True: the promise was given. */
static bool flush(void) {
    struct vr_flush flush;

    vr_ask_flush(&w.rig, &flush);
    for (int i = 0; flush.n_done == 0 && !is_dead(); i++) {
        assert_true(i < TURNS_MAX);
        turn();
    }
    if (flush.n_done == 0) {
        kv_vault_flush_cancel(w.rig.vault, &flush.flush);
        return false;
    }
    assert_int_equal(flush.result, 0);
    each(promise);
    return true;
}

static void note_purged(int chain, uint32_t page, enum kv_group group, struct expected *expected) {
    (void)page, (void)group;
    expected->is_purged = expected->is_purged || w.chains[chain].uid == PURGED_UID;
}

static void purge(void) {
    kv_vault_purge(w.rig.vault, PURGED_UID);
    kv_shelf_purge(w.rig.shelf, PURGED_UID);
    if (below(2) == 0)
        some_turns();
    if (!is_dead() && flush())
        each(note_purged);
}

/* Another size, other shares: files go, or are given to another group. */
static void reopen(void) {
    close_vault();
    w.rig.options.disk_bytes = (uint64_t)VR_SEGMENT * (N_SEGMENTS - below(3));
    set_shares(below(2));
    assert_int_equal(vr_open_vault(&w.rig), 0);
    if (below(2) == 0)
        settle();
    else
        some_turns();
    if (!is_dead() && below(3) == 0)
        purge(); /* while it reads what is there, or files go */
}

static int read_page(int chain, uint32_t page, enum kv_group group) {
    struct vr_read read;
    int r;

    for (int i = 0;; i++) { /* the shelf may have it still, and keep it while it is saved */
        assert_true(i < TURNS_MAX);
        vr_empty_shelf(&w.rig);
        r = vr_ask_read(&w.rig, &read, &w.chains[chain], page, group);
        if (r != KV_VAULT_E_BUSY || is_dead())
            break;
        turn();
    }
    for (int i = 0; r == 0 && read.n_done == 0 && !is_dead(); i++) {
        assert_true(i < TURNS_MAX);
        turn();
    }
    if (r == 0 && read.n_done == 0) {
        kv_vault_read_cancel(w.rig.vault, &read.read);
        return -ECANCELED;
    }
    r = r == 0 ? read.result : r;
    if (r == 0)
        vr_expect_on_shelf(&w.rig, &w.chains[chain], page, group);
    return r;
}

static void act(void) {
    int chain = (int)below(N_CHAINS);

    switch (below(12)) {
    case 0:
        flush();
        break;
    case 1:
        kv_vault_evict_bytes(w.rig.vault, (uint64_t)(1 + below(12)) << 19);
        some_turns();
        break;
    case 2:
        purge();
        break;
    case 3:
        reopen();
        break;
    case 4:
        settle();
        vr_clock_us += 1200000; /* a sync is due */
        some_turns();
        break;
    case 5:
        for (uint32_t page = 0; page < w.chains[chain].n_pages && !is_dead(); page++)
            read_page(chain, page, KV_TARGET_FULL);
        break;
    default:
        put(chain);
        if (below(2) == 0)
            settle();
        else
            some_turns();
    }
}

/* ---- an end, and the start after it --------------------------------------------------------------------------------- */

static void open_world(uint64_t seed, uint32_t n_calls_max) {
    static const uint32_t kib[KV_GROUP_N] = {[KV_TARGET_FULL] = 512, [KV_TARGET_STATE] = 256, [KV_DRAFT_FULL] = 512};
    static const uint32_t n_slots[KV_GROUP_N] = {[KV_TARGET_FULL] = 16, [KV_TARGET_STATE] = 6, [KV_DRAFT_FULL] = 16};

    memset(&w, 0, sizeof w);
    w.random = seed;
    vr_init(&w.rig);
    for (int g = 0; g < KV_GROUP_N; g++) {
        w.rig.shelf_options.group[g].payload_bytes = n_slots[g] > 0 ? (kib[g] << 10) - FORMAT_BLOCK_BYTES : 0;
        w.rig.shelf_options.group[g].n_slots = n_slots[g];
    }
    w.cut = disk_cut_new(seed, n_calls_max);
    w.rig.options.wrap = disk_cut_wrap;
    w.rig.options.wrap_user = w.cut;
    w.rig.options.no_ring = true;
    w.rig.options.disk_bytes = (uint64_t)VR_SEGMENT * N_SEGMENTS;
    w.rig.work = (struct kv_work){.submit = put_work};
    set_shares(false);
    for (int c = 0; c < N_CHAINS; c++) /* some of them begin alike, some belong to who is purged */
        vr_branch(&w.rig, &w.chains[c], c % 3 == 0 ? PURGED_UID : 1, c % 3, c / 6 * 2, 10 + c,
                  N_PAGES - (uint32_t)c % 3);
    vr_open(&w.rig);
}

static void check_page(int chain, uint32_t page, enum kv_group group, struct expected *expected) {
    int r;

    if (!vr_has(&w.rig, &w.chains[chain], page, group)) {
        if (expected->is_promised)
            fail_msg("seed %llu, call %u: page %u of chain %d, group %d, was promised and is not there", cut_seed,
                     last_call, page, chain, (int)group);
        return;
    }
    if (expected->is_purged)
        fail_msg("seed %llu, call %u: page %u of chain %d, group %d, was purged and is back", cut_seed, last_call, page,
                 chain, (int)group);
    r = read_page(chain, page, group);
    if (r != 0 && (expected->is_promised || r != -EBADMSG))
        fail_msg("seed %llu, call %u: page %u of chain %d, group %d: %d", cut_seed, last_call, page, chain, (int)group,
                 r);
    n_promised += expected->is_promised;
    n_found += r == 0;
    n_damaged += r != 0;
}

static void start_again(enum disk_cut_fall fall) {
    static struct vault_chain chain;

    close_vault();
    kv_shelf_close(w.rig.shelf);
    disk_cut_fall(w.cut, &w.rig.folder, fall);
    disk_cut_free(w.cut);
    w.cut = disk_cut_new(1, 0);
    w.rig.options.wrap_user = w.cut;
    w.rig.options.disk_bytes = (uint64_t)VR_SEGMENT * N_SEGMENTS;
    vr_open(&w.rig);
    settle();
    each(check_page);
    vr_empty_shelf(&w.rig);
    vr_chain(&w.rig, &chain, 99, N_PAGES);
    vr_put_from(&w.rig, &chain, 0);
    vr_ask_save(&w.rig, &chain, KV_VAULT_SAVE_MUST);
    settle();
    assert_true(vr_is_whole(&w.rig, &chain));
    assert_true(flush());
}

/* Returns how many calls it took. */
static uint32_t run(uint64_t seed, uint32_t n_calls_max) {
    uint32_t n;

    open_world(seed, n_calls_max);
    for (int i = 0; i < N_ACTIONS && !is_dead(); i++)
        act();
    settle();
    n = disk_cut_n_calls(w.cut);
    if (n_calls_max > 0) {
        assert_true(is_dead());
        start_again((enum disk_cut_fall)((n_calls_max + seed) % DISK_CUT_N));
        n_cuts++;
    }
    close_vault();
    vr_free(&w.rig);
    disk_cut_free(w.cut);
    return n;
}

static void whenever_it_ends_only_what_is_right_is_found(void **state) {
    (void)state;
    for (uint64_t seed = first_seed; seed < first_seed + n_seeds; seed++) {
        uint32_t n_calls = run(cut_seed = seed, 0);

        for (last_call = 1 + (uint32_t)(seed % stride); last_call < n_calls; last_call += (uint32_t)stride)
            run(seed, last_call);
    }
    printf("\n%llu ends: %llu pages found, of them %llu promised; %llu damaged\n", (unsigned long long)n_cuts,
           (unsigned long long)n_found, (unsigned long long)n_promised, (unsigned long long)n_damaged);
    assert_true(n_found > n_cuts && n_promised > 0);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(whenever_it_ends_only_what_is_right_is_found),
    };

    if (argc > 1)
        first_seed = strtoull(argv[1], NULL, 0);
    if (argc > 2)
        n_seeds = strtoull(argv[2], NULL, 0);
    if (argc > 3)
        stride = strtoull(argv[3], NULL, 0);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
