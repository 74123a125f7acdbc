/* All tiers of a store, in any order and with faults: seqs compute, publish, save, restore, cancel and end; copies, checks and
 * calls of files come home in any order, late, or wrongly; bytes on disk change; time passes; the store is closed and opened
 * again. Whatever a seq is given holds what its tokens say, every account is right after every step, and when all is home
 * nothing is pinned or missing.
 *
 *     prop_tiers [seed [n_steps]]     0: a seed from the clock; 1000000 steps take some minutes */
#include <time.h>

#include "../fake/tier_rig.h"

enum { N_SEQS = 6, N_STEPS = 25000 };

struct user {
    struct kv_seq seq;
    struct kv_restore *restore;
    bool is_done;
    int result;
};

struct world {
    uint64_t random;
    struct tier_rig rig;
    struct user users[N_SEQS];
    struct kv_vault_flush flush;
    struct kv_vault_verify verify;
    bool is_flushing, is_verifying;
    uint64_t n_scrubbed, n_scrubbed_before; /* slots of the disk; by the scrubber that runs */
    uint64_t n_warmed;                      /* pages, before the last restart */
    uint64_t n_hits, n_restored, n_failed, n_restarts, n_flips, n_flushed;
};

static uint32_t below(struct world *w, uint32_t n) {
    w->random = w->random * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((w->random >> 33) % n);
}

/* ---- users ----------------------------------------------------------------------------------------------------------- */

static void on_restored(void *user, int result) {
    struct user *u = user;

    KV_RIG_CHECK(!u->is_done);
    u->is_done = true;
    u->result = result;
}

static void begin(struct world *w, struct user *u) {
    struct kv_found found;
    char kinds[24];
    uint32_t n = 1 + below(w, 22), uid = 1 + below(w, 2);

    for (uint32_t i = 0; i < n; i++)
        kinds[i] = (char)('a' + below(w, 9) / 8);
    kinds[n] = '\0';
    kv_seq_list(&u->seq, &w->rig.kv, uid, kinds);
    kv_restores_lookup(w->rig.restores, u->seq.keys, n, &found);
    KV_RIG_CHECK(found.n_device_tokens == kv_seq_lookup(&u->seq, &w->rig.kv).n_tokens);
    KV_RIG_CHECK(found.n_tokens >= found.n_device_tokens && found.n_tokens <= n * PAGE_TOKENS);
    u->is_done = false;
    if (found.n_tokens > found.n_device_tokens &&
        kv_restore_start(w->rig.restores, u->seq.keys, u->seq.tokens, found.n_tokens / PAGE_TOKENS, KV_RESTORE_REQUEST,
                         on_restored, u, &u->restore) == 0) {
        KV_RIG_CHECK(!u->is_done); /* never from inside */
        return;
    }
    kv_seq_match(&u->seq, &w->rig.kv); /* checks what it found */
    w->n_hits += u->seq.match.n_tokens > 0;
    n = u->seq.n_filled + 1 + below(w, u->seq.n_pages);
    if (n <= u->seq.n_pages && kv_seq_compute(&u->seq, &w->rig.kv, n))
        kv_spill_start(w->rig.spill, &u->seq.lease, n, uid,
                       (enum kv_spill_depth[]){KV_SPILL_TO_HOST, KV_SPILL_TO_DISK, KV_SPILL_MUST}[below(w, 3)]);
}

static void act(struct world *w, struct user *u) {
    if (!u->restore && u->seq.n_filled == 0) {
        begin(w, u);
    } else if (!u->restore) {
        kv_seq_check(&u->seq, &w->rig.kv);
        kv_seq_end(&u->seq, &w->rig.kv);
    } else if (!u->is_done) {
        if (below(w, 20) == 0)
            kv_restore_cancel(u->restore);
    } else {
        if (u->result == 0) {
            kv_seq_match(&u->seq, &w->rig.kv);
            KV_RIG_CHECK(u->seq.match.n_tokens >= kv_restore_n_pages(u->restore) * PAGE_TOKENS);
        }
        w->n_restored += u->result == 0;
        w->n_failed += u->result != 0;
        kv_restore_end(u->restore);
        u->restore = NULL;
    }
}

/* ---- trouble --------------------------------------------------------------------------------------------------------- */

static void on_flushed(struct kv_vault_flush *flush, int result) {
    struct world *w = container_of(flush, struct world, flush);

    KV_RIG_CHECK(w->is_flushing && (result == 0 || result == -EIO));
    w->is_flushing = false;
    w->n_flushed++;
}

static void on_verified(struct kv_vault_verify *verify) {
    struct world *w = container_of(verify, struct world, verify);

    KV_RIG_CHECK(w->is_verifying);
    w->is_verifying = false;
}

static void add_fault(struct world *w) {
    static const int errors[] = {EIO, EIO, EINTR, EAGAIN, EINVAL, ENOSPC, EROFS, EDQUOT, ENOMEM, ENODEV};
    static const enum disk_call calls[] = {DISK_CALL_READ,  DISK_CALL_READ, DISK_CALL_READ,   DISK_CALL_WRITE,
                                           DISK_CALL_WRITE, DISK_CALL_SYNC, DISK_CALL_CREATE, DISK_CALL_REMOVE};
    enum disk_call call = calls[below(w, ARRAY_LEN(calls))];
    struct disk_fault fault = {0};

    if (disk_faults_n_waiting(w->rig.faults, call) > 3)
        return;
    switch (below(w, 6)) {
    case 0:
    case 1:
        fault.result = -errors[below(w, ARRAY_LEN(errors))];
        break;
    case 2:
        fault.short_by = call <= DISK_CALL_WRITE ? 1 + below(w, 3 * 4096) : 0;
        break;
    case 3:
        fault.n_copies = call <= DISK_CALL_WRITE ? below(w, 3) : 0;
        break;
    default:
        fault.is_held = call != DISK_CALL_CREATE || below(w, 4) == 0;
        fault.is_deaf = below(w, 2);
    }
    disk_faults_add(w->rig.faults, call, fault);
}

/* Any byte, more often of a header or a head. */
static void change_a_byte(struct world *w) {
    uint32_t segment = below(w, 4), slot = below(w, 60);
    uint64_t at = below(w, 10) == 0 ? below(w, 4096) : 4096 + (uint64_t)slot * 8192 + below(w, 8192);

    tier_flip(&w->rig, segment, at);
    w->n_flips++;
}

static void count_scrubbed(struct world *w) {
    struct kv_scrub_stats stats;

    kv_scrub_stats(w->rig.scrub, &stats);
    w->n_scrubbed += stats.n_disk - w->n_scrubbed_before;
    w->n_scrubbed_before = stats.n_disk;
    KV_RIG_CHECK(stats.n_host_damaged == 0); /* nobody changes what lies in memory */
}

static void drain(struct world *w) {
    w->rig.refuses_copies = w->rig.refuses_work = false;
    for (int i = 0; i < 4; i++) { /* what waits for the breaker or for space, too */
        tier_drain_of(&w->rig, true);
        tier_clock_us += 61000000;
    }
    tier_drain_of(&w->rig, true);
    count_scrubbed(w);
    KV_RIG_CHECK(!w->is_flushing && !w->is_verifying);
    for (int i = 0; i < N_SEQS; i++) {
        struct user *u = &w->users[i];

        KV_RIG_CHECK(!u->restore || u->is_done); /* nobody waits for ever */
        if (u->restore)
            act(w, u);
        kv_seq_end(&u->seq, &w->rig.kv);
    }
    tier_drain_of(&w->rig, true);
    tier_check_is_home(&w->rig);
    KV_RIG_CHECK(tier_stats(&w->rig).disk.n_out == 0 && tier_stats(&w->rig).n_to_blank == 0);
}

static void close_and_open(struct world *w) {
    if (below(w, 3) != 0)
        drain(w);
    for (int i = 0; i < N_SEQS; i++) /* the others end first: only the vault's own operations are out */
        if (w->users[i].restore && !w->users[i].is_done)
            return;
    if (w->is_flushing)
        kv_vault_flush_cancel(w->rig.vault, &w->flush);
    if (w->is_verifying)
        kv_vault_verify_cancel(w->rig.vault);
    w->is_flushing = w->is_verifying = false;
    w->rig.refuses_work = false;
    w->n_warmed += tier_stats(&w->rig).n_warm_pages;
    tier_close_vault(&w->rig);
    if (below(w, 4) == 0)
        kv_shelf_evict_bytes(w->rig.shelf, UINT64_MAX);
    tier_open_vault(&w->rig);
    w->n_scrubbed_before = 0;
    w->n_restarts++;
}

static void administer(struct world *w) {
    struct kv_vault *vault = w->rig.vault;

    switch (below(w, 12)) {
    case 0:
        kv_vault_evict_bytes(vault, (uint64_t)below(w, 200) * 8192);
        break;
    case 1:
        if (below(w, 10) == 0)
            kv_vault_purge(vault, 1 + below(w, 2));
        break;
    case 2:
        kv_vault_save_all(vault);
        break;
    case 3:
        if (!w->is_flushing)
            kv_vault_flush(vault, &w->flush);
        w->is_flushing = true;
        break;
    case 4:
        if (!w->is_verifying)
            w->is_verifying = kv_vault_verify(vault, &w->verify) == 0;
        break;
    case 5:
        if (w->is_verifying && below(w, 3) == 0) {
            kv_vault_verify_cancel(vault);
            w->is_verifying = false;
        }
        break;
    case 6:
        kv_store_evict_bytes(w->rig.kv.store, below(w, 20) * KV_RIG_SLOT_BYTES);
        break;
    case 7:
        kv_shelf_evict_bytes(w->rig.shelf, below(w, 40) * KV_RIG_SLOT_BYTES);
        break;
    case 8:
        disk_faults_release(w->rig.faults);
        break;
    case 9:
        disk_faults_answer(w->rig.faults, (UINT64_C(1) << 63) + below(w, 80)); /* nobody's */
        break;
    case 10:
        change_a_byte(w);
        break;
    default:
        if (below(w, 6) == 0)
            close_and_open(w);
    }
}

static void step(struct world *w) {
    struct tier_rig *rig = &w->rig;

    rig->refuses_copies = below(w, 50) == 0;
    rig->refuses_work = below(w, 100) == 0;
    if (below(w, 150) == 0)
        add_fault(w);
    switch (below(w, 12)) {
    case 0:
        tier_come_home(rig, KV_COPY_SPILL, below(w, 20) ? 0 : -EIO);
        break;
    case 1:
        tier_come_home(rig, KV_COPY_FETCH, below(w, 20) ? 0 : -EIO);
        break;
    case 2:
    case 3:
    case 4:
    case 5:
        for (uint32_t n = 1 + below(w, 6); n > 0 && rig->n_works > 0; n--)
            tier_do_work(rig, (int)below(w, (uint32_t)rig->n_works));
        break;
    case 6:
        tier_clock_us += below(w, 20) ? below(w, 30000) : below(w, 20000000);
        break;
    case 7:
        if (below(w, 3) == 0)
            administer(w);
        break;
    default:
        act(w, &w->users[below(w, N_SEQS)]);
    }
    tier_turn(rig); /* checks everything */
}

int main(int argc, char **argv) {
    static const uint32_t device[KV_GROUP_N] = {
        [KV_TARGET_FULL] = 40, [KV_TARGET_STATE] = 6, [KV_DRAFT_FULL] = 30, [KV_DRAFT_SLIDING] = 14};
    static const uint32_t shelf[KV_GROUP_N] = {
        [KV_TARGET_FULL] = 14, [KV_TARGET_STATE] = 3, [KV_DRAFT_FULL] = 12, [KV_DRAFT_SLIDING] = 6};
    static struct world w;
    uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 0) : 0,
             n_steps = argc > 2 ? strtoull(argv[2], NULL, 0) : N_STEPS;
    struct kv_vault_stats stats;

    w.random = seed != 0 ? seed : (uint64_t)time(NULL);
    printf("seed %llu\n", (unsigned long long)w.random);
    fflush(stdout);
    w.flush.done = on_flushed;
    w.verify.done = on_verified;
    tier_open(&w.rig, device, shelf);
    for (int i = 0; i < N_SEQS; i++)
        kv_seq_init(&w.users[i].seq, &w.rig.kv, 1, "a");
    for (uint64_t i = 0; i < n_steps; i++) {
        step(&w);
        if (i % 4000 == 3999)
            drain(&w);
    }
    drain(&w);
    stats = tier_stats(&w.rig);
    printf("%llu hits, %llu restored, %llu failed, %llu restarts, %llu changed bytes, %llu flushes, %llu scrubbed, "
           "%llu warmed; "
           "since the last "
           "restart: "
           "%llu pages saved, %llu read, %llu damaged, %llu late, %llu lost, opened %llu times\n",
           (unsigned long long)w.n_hits, (unsigned long long)w.n_restored, (unsigned long long)w.n_failed,
           (unsigned long long)w.n_restarts, (unsigned long long)w.n_flips, (unsigned long long)w.n_flushed,
           (unsigned long long)w.n_scrubbed, (unsigned long long)w.n_warmed, (unsigned long long)stats.n_saved_pages,
           (unsigned long long)stats.n_reads, (unsigned long long)stats.n_damaged,
           (unsigned long long)stats.n_read_late, (unsigned long long)stats.n_lost,
           (unsigned long long)stats.n_breaker_opened);
    fflush(stdout);
    KV_RIG_CHECK(n_steps < N_STEPS || (w.n_restored > 50 && w.n_hits > 100 && w.n_restarts > 1 && w.n_scrubbed > 0));
    for (int i = 0; i < N_SEQS; i++)
        kv_seq_deinit(&w.users[i].seq, &w.rig.kv);
    tier_close(&w.rig);
    return 0;
}
