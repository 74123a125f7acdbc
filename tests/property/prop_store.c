/* The store beside an obvious model: seqs of two users begin, fill pages, publish, take restore points, let go and end at
 * random, over pools too small for them. The model knows each prefix by its number in a tree of all possible prefixes and
 * picks who leaves by looking at everything. After each operation the store checks itself, counts what the model counts,
 * finds for a random prompt exactly what the model finds, and every slot in use holds what its tokens say. */
#include <time.h>

#include "../fake/kv_rig.h"

#define CHECK KV_RIG_CHECK

enum {
    USERS = 2,
    KINDS = 3,
    DEPTH = 6,
    N_NODES = 1093, /* (KINDS^(DEPTH + 1) - 1) / (KINDS - 1): the empty prefix and all others */
    N_SEQS = 7,
    SLOTS_MAX = 64,
};
enum slot_state { SLOT_FREE, SLOT_PRIVATE, SLOT_INDEXED };

struct config {
    uint32_t n_slots[KV_GROUP_N], window_tokens, n_records_max;
};

struct node { /* a prefix that may be in the index; it is if it has its target page */
    struct node *parent;
    uint32_t n_pages;
    bool is_in_window; /* scratch of victim() */
    struct {
        bool is_there;
        uint32_t slot, n_pins;
        uint64_t used;
    } group[KV_GROUP_N];
};

struct sim_seq {
    struct kv_seq seq;
    bool is_running;
    struct node *path[DEPTH]; /* of page i */
    bool pins[DEPTH][KV_GROUP_N];
};

struct world {
    const struct config *config;
    struct kv_rig rig;
    struct node nodes[USERS][N_NODES]; /* node 0: nothing; children of n: n * KINDS + 1 + kind */
    struct node *live[SLOTS_MAX];      /* those in the index */
    uint32_t n_live;
    enum slot_state slots[KV_GROUP_N][SLOTS_MAX];
    uint32_t n_free[KV_GROUP_N];
    uint64_t tick, random;
    struct sim_seq seqs[N_SEQS], onlooker;
    uint64_t n_hits, n_full, n_evicted, n_not_taken; /* that the run met what it is about */
};

static uint32_t below(struct world *w, uint32_t n) {
    w->random = w->random * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((w->random >> 33) % n);
}

/* ---- the model ---- */

static uint32_t window_first(const struct world *w, uint32_t n_pages) {
    int64_t first = (int64_t)n_pages * PAGE_TOKENS - w->config->window_tokens;

    return first > 0 ? (uint32_t)first / PAGE_TOKENS : 0;
}

static bool has_children(const struct world *w, const struct node *node) {
    for (uint32_t i = 0; i < w->n_live; i++)
        if (w->live[i]->parent == node)
            return true;
    return false;
}

static void mark_windows(struct world *w) {
    for (uint32_t i = 0; i < w->n_live; i++)
        w->live[i]->is_in_window = false;
    for (uint32_t i = 0; i < w->n_live; i++)
        if (w->live[i]->group[KV_TARGET_STATE].is_there)
            for (struct node *up = w->live[i]; up->n_pages > window_first(w, w->live[i]->n_pages); up = up->parent)
                up->is_in_window = true;
}

static struct node *victim(struct world *w, int g) {
    struct node *first = NULL;
    bool first_is_needed = false;

    mark_windows(w);
    for (uint32_t i = 0; i < w->n_live; i++) {
        struct node *node = w->live[i];
        bool is_needed = g == KV_TARGET_FULL     ? node->group[KV_TARGET_STATE].is_there
                         : g == KV_DRAFT_SLIDING ? node->is_in_window
                                                 : true;

        if (!node->group[g].is_there || node->group[g].n_pins > 0 || (g == KV_TARGET_FULL && has_children(w, node)))
            continue;
        if (first == NULL || is_needed < first_is_needed ||
            (is_needed == first_is_needed && node->group[g].used < first->group[g].used)) {
            first = node;
            first_is_needed = is_needed;
        }
    }
    return first;
}

static void put(struct world *w, struct node *node, int g, uint32_t slot) {
    CHECK(!node->group[g].is_there && w->slots[g][slot] == SLOT_PRIVATE);
    node->group[g].is_there = true;
    node->group[g].slot = slot;
    node->group[g].used = ++w->tick;
    w->slots[g][slot] = SLOT_INDEXED;
    if (g == KV_TARGET_FULL)
        w->live[w->n_live++] = node;
}

static void drop(struct world *w, struct node *node, int g) {
    if (!node->group[g].is_there)
        return;
    CHECK(node->group[g].n_pins == 0);
    node->group[g].is_there = false;
    w->slots[g][node->group[g].slot] = SLOT_FREE;
    w->n_free[g]++;
    w->n_evicted++;
    for (uint32_t i = 0; g == KV_TARGET_FULL && i < w->n_live; i++)
        if (w->live[i] == node)
            w->live[i--] = w->live[--w->n_live];
}

static bool evict(struct world *w, int g) {
    struct node *node = victim(w, g);

    if (node == NULL)
        return false;
    for (int other = 0; g == KV_TARGET_FULL && other < KV_GROUP_N; other++)
        if (other != g)
            drop(w, node, other);
    drop(w, node, g);
    return true;
}

static bool can_take(struct world *w, int g) {
    return w->n_free[g] > 0 || evict(w, g);
}

static void took(struct world *w, int g, uint32_t slot) {
    CHECK(slot < SLOTS_MAX && w->slots[g][slot] == SLOT_FREE);
    w->slots[g][slot] = SLOT_PRIVATE;
    w->n_free[g]--;
}

static void gave(struct world *w, int g, uint32_t slot) {
    CHECK(w->slots[g][slot] == SLOT_PRIVATE);
    w->slots[g][slot] = SLOT_FREE;
    w->n_free[g]++;
}

static void pin(struct sim_seq *sim, uint32_t page, int g) {
    sim->pins[page][g] = true;
    sim->path[page]->group[g].n_pins++;
}

static void unpin(struct world *w, struct sim_seq *sim, uint32_t page, int g) {
    if (!sim->pins[page][g])
        return;
    sim->pins[page][g] = false;
    sim->path[page]->group[g].n_pins--;
    sim->path[page]->group[g].used = ++w->tick;
}

static uint32_t first_draft_page(const struct sim_seq *sim, int g, uint32_t first, uint32_t n_pages) {
    uint32_t page = n_pages;

    while (page > first && sim->path[page - 1]->group[g].is_there)
        page--;
    return page == first ? 0 : page;
}

static struct kv_match expected_match(const struct world *w, const struct sim_seq *sim) {
    uint32_t n_full = 0, n_hit = 0, from = 0, other;
    struct kv_match match = {.state_slot = KV_NO_SLOT};

    for (; n_full < sim->seq.n_pages && sim->path[n_full]->group[KV_TARGET_FULL].is_there; n_full++)
        if (sim->path[n_full]->group[KV_TARGET_STATE].is_there) {
            n_hit = n_full + 1;
            match.state_slot = sim->path[n_full]->group[KV_TARGET_STATE].slot;
        }
    if (w->config->n_slots[KV_DRAFT_FULL] == 0 && w->config->n_slots[KV_DRAFT_SLIDING] == 0)
        from = n_hit;
    if (w->config->n_slots[KV_DRAFT_FULL] > 0)
        from = first_draft_page(sim, KV_DRAFT_FULL, 0, n_hit);
    if (w->config->n_slots[KV_DRAFT_SLIDING] > 0) {
        other = first_draft_page(sim, KV_DRAFT_SLIDING, window_first(w, n_hit), n_hit);
        from = other > from ? other : from;
    }
    match.n_tokens = n_hit * PAGE_TOKENS;
    match.n_full_tokens = n_full * PAGE_TOKENS;
    match.draft_valid_from = from * PAGE_TOKENS;
    return match;
}

/* ---- operations, on both ---- */

static void random_prompt(struct world *w, struct sim_seq *sim) {
    char kinds[DEPTH + 1] = {0};
    uint32_t user = below(w, USERS), n_pages = 1 + below(w, DEPTH), node = 0;

    for (uint32_t page = 0; page < n_pages; page++) {
        uint32_t kind = below(w, 5) < 3 ? 0 : below(w, KINDS); /* some prefixes are often shared */

        kinds[page] = (char)('a' + kind);
        node = node * KINDS + 1 + kind;
        sim->path[page] = &w->nodes[user][node];
    }
    kv_seq_list(&sim->seq, &w->rig, user, kinds);
}

static void expect_match(const struct kv_match *is, const struct kv_match *should) {
    CHECK(is->n_tokens == should->n_tokens);
    CHECK(is->n_full_tokens == should->n_full_tokens);
    CHECK(is->state_slot == should->state_slot);
    CHECK(is->draft_valid_from == should->draft_valid_from);
}

static void begin(struct world *w, struct sim_seq *sim) {
    struct kv_match expected;
    uint32_t n_hit, from;

    random_prompt(w, sim);
    expected = expected_match(w, sim);
    kv_seq_match(&sim->seq, &w->rig);
    expect_match(&sim->seq.match, &expected);
    n_hit = expected.n_tokens / PAGE_TOKENS;
    from = expected.draft_valid_from / PAGE_TOKENS;
    for (uint32_t page = 0; page < n_hit; page++) {
        pin(sim, page, KV_TARGET_FULL);
        if (w->config->n_slots[KV_DRAFT_FULL] > 0 && page >= from)
            pin(sim, page, KV_DRAFT_FULL);
        if (w->config->n_slots[KV_DRAFT_SLIDING] > 0 && page >= from && page >= window_first(w, n_hit))
            pin(sim, page, KV_DRAFT_SLIDING);
    }
    if (n_hit > 0)
        pin(sim, n_hit - 1, KV_TARGET_STATE);
    sim->is_running = true;
    w->n_hits += n_hit > 0;
}

static int take(struct world *w, struct sim_seq *sim, int g, uint32_t page) {
    bool can = can_take(w, g);
    int r = kv_seq_take(&sim->seq, &w->rig, (enum kv_group)g, page);

    CHECK(r == (can ? 0 : KV_STORE_E_FULL));
    if (can)
        took(w, g, sim->seq.own[page][g]);
    w->n_full += !can;
    return r;
}

/* Slots for the next page, filled. Draft pages may be missing. */
static void fill(struct world *w, struct sim_seq *sim) {
    uint32_t page = sim->seq.n_filled;

    if (page == sim->seq.n_pages || take(w, sim, KV_TARGET_FULL, page) != 0)
        return;
    if (w->config->n_slots[KV_DRAFT_FULL] > 0 && below(w, 5) > 0)
        take(w, sim, KV_DRAFT_FULL, page);
    if (w->config->n_slots[KV_DRAFT_SLIDING] > 0 && below(w, 5) > 0)
        take(w, sim, KV_DRAFT_SLIDING, page);
    sim->seq.n_filled++;
}

static void publish(struct world *w, struct sim_seq *sim) {
    uint32_t page = sim->seq.lease.n_pages, own[KV_GROUP_N];
    struct node *node;
    bool taken[KV_GROUP_N], has_record = true;

    if (page == sim->seq.n_filled)
        return;
    node = sim->path[page];
    memcpy(own, sim->seq.own[page], sizeof own);
    while (!node->group[KV_TARGET_FULL].is_there && w->n_live == w->config->n_records_max && has_record)
        has_record = evict(w, KV_TARGET_FULL);
    CHECK(kv_seq_publish(&sim->seq, page, taken) == (has_record ? 0 : KV_STORE_E_FULL));
    for (int g = 0; g < KV_GROUP_N && has_record; g++) {
        bool expected = g != KV_TARGET_STATE && own[g] != KV_NO_SLOT && !node->group[g].is_there;

        CHECK(taken[g] == expected);
        if (expected)
            put(w, node, g, own[g]);
        if (expected || g == KV_TARGET_FULL)
            pin(sim, page, g);
        w->n_not_taken += !expected && own[g] != KV_NO_SLOT;
    }
}

static void publish_state(struct world *w, struct sim_seq *sim) {
    uint32_t n_pages, slot = KV_NO_SLOT;
    struct node *node;
    bool can, taken;

    if (sim->seq.lease.n_pages == 0)
        return;
    n_pages = 1 + below(w, sim->seq.lease.n_pages);
    node = sim->path[n_pages - 1];
    can = can_take(w, KV_TARGET_STATE);
    CHECK(kv_store_take(w->rig.store, KV_TARGET_STATE, &slot) == (can ? 0 : KV_STORE_E_FULL));
    if (!can)
        return;
    took(w, KV_TARGET_STATE, slot);
    *kv_rig_tag(&w->rig, KV_TARGET_STATE, slot) = kv_seq_tag(&sim->seq, KV_TARGET_STATE, n_pages - 1);
    kv_lease_publish_state(&sim->seq.lease, n_pages, slot, &taken);
    CHECK(taken == !node->group[KV_TARGET_STATE].is_there);
    if (taken) {
        put(w, node, KV_TARGET_STATE, slot);
    } else {
        node->group[KV_TARGET_STATE].used = ++w->tick;
        kv_store_give(w->rig.store, KV_TARGET_STATE, slot);
        gave(w, KV_TARGET_STATE, slot);
    }
}

static void drop_state(struct world *w, struct sim_seq *sim) {
    kv_lease_drop_state(&sim->seq.lease);
    for (uint32_t page = 0; page < DEPTH; page++)
        unpin(w, sim, page, KV_TARGET_STATE);
}

static void drop_sliding(struct world *w, struct sim_seq *sim) {
    uint32_t page = below(w, DEPTH);

    kv_lease_drop_sliding(&sim->seq.lease, page);
    unpin(w, sim, page, KV_DRAFT_SLIDING);
}

static void end(struct world *w, struct sim_seq *sim) {
    for (uint32_t page = 0; page < DEPTH; page++)
        for (int g = 0; g < KV_GROUP_N; g++)
            unpin(w, sim, page, g);
    for (uint32_t page = 0; page < DEPTH; page++)
        for (int g = 0; g < KV_GROUP_N; g++)
            if (sim->seq.own[page][g] != KV_NO_SLOT)
                gave(w, g, sim->seq.own[page][g]);
    kv_seq_end(&sim->seq, &w->rig);
    sim->is_running = false;
}

static void evict_bytes(struct world *w, uint64_t n_bytes) {
    uint64_t n_before = w->n_evicted;

    CHECK(kv_store_evict_bytes(w->rig.store, n_bytes) % KV_RIG_SLOT_BYTES == 0);
    for (int g = 0; g < KV_GROUP_N; g++)
        while ((w->n_evicted - n_before) * KV_RIG_SLOT_BYTES < n_bytes && evict(w, g))
            continue;
}

static void look(struct world *w) {
    struct kv_match match, expected;

    random_prompt(w, &w->onlooker);
    expected = expected_match(w, &w->onlooker);
    match = kv_seq_lookup(&w->onlooker.seq, &w->rig);
    expect_match(&match, &expected);
}

static void compare(struct world *w) {
    struct kv_store_stats stats;

    kv_rig_check(&w->rig);
    kv_store_stats(w->rig.store, &stats);
    CHECK(stats.n_records == w->n_live);
    for (int g = 0; g < KV_GROUP_N; g++) {
        uint32_t n_unpinned = 0, n_indexed = 0;

        for (uint32_t i = 0; i < w->n_live; i++) {
            n_indexed += w->live[i]->group[g].is_there;
            n_unpinned += w->live[i]->group[g].is_there && w->live[i]->group[g].n_pins == 0;
        }
        CHECK(stats.group[g].n_indexed == n_indexed);
        CHECK(stats.group[g].n_pinned == n_indexed - n_unpinned);
        CHECK(stats.group[g].n_free == w->n_free[g]);
        CHECK(kv_store_n_available(w->rig.store, (enum kv_group)g) == w->n_free[g] + n_unpinned);
    }
    for (int i = 0; i < N_SEQS; i++)
        if (w->seqs[i].is_running)
            kv_seq_check(&w->seqs[i].seq, &w->rig);
}

static void operate(struct world *w) {
    struct sim_seq *sim = &w->seqs[below(w, N_SEQS)];
    uint32_t dice = below(w, 100);

    if (!sim->is_running)
        begin(w, sim);
    else if (dice < 30)
        fill(w, sim);
    else if (dice < 60)
        publish(w, sim);
    else if (dice < 72)
        publish_state(w, sim);
    else if (dice < 79)
        drop_state(w, sim);
    else if (dice < 86)
        drop_sliding(w, sim);
    else if (dice < 99)
        end(w, sim);
    else
        evict_bytes(w, below(w, 4) == 0 ? UINT64_MAX : below(w, 8) * KV_RIG_SLOT_BYTES);
}

static void world_init(struct world *w, const struct config *config, uint64_t seed) {
    memset(w, 0, sizeof *w);
    w->config = config;
    w->random = seed;
    w->rig = kv_rig_open(config->n_slots, config->window_tokens, config->n_records_max);
    for (int i = 0; i < N_SEQS; i++)
        kv_seq_init(&w->seqs[i].seq, &w->rig, 0, "");
    kv_seq_init(&w->onlooker.seq, &w->rig, 0, "");
    memcpy(w->n_free, config->n_slots, sizeof w->n_free);
    for (int user = 0; user < USERS; user++)
        for (uint32_t n = 1; n < N_NODES; n++) {
            w->nodes[user][n].parent = &w->nodes[user][(n - 1) / KINDS];
            w->nodes[user][n].n_pages = w->nodes[user][n].parent->n_pages + 1;
        }
}

int main(int argc, char **argv) {
    static const struct config configs[] = {
        {{20, 5, 14, 9}, 2 * PAGE_TOKENS + 10, 20}, /* all groups, all too small */
        {{12, 3, 0, 6}, PAGE_TOKENS, 9},            /* fewer records than pages */
        {{16, 2, 7, 0}, 0, 40},                     /* one draft group */
        {{10, 4, 0, 0}, 0, 10},                     /* no drafter */
        {{60, 40, 60, 60}, 1000, 60},               /* room, and a window longer than any prompt */
        {{40, 6, 40, 40}, 1, 33},                   /* a window inside one page */
    };
    uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 0) : (uint64_t)time(NULL);
    int n_operations = argc > 2 ? atoi(argv[2]) : 50000;
    struct world *w = calloc(1, sizeof *w);

    CHECK(w != NULL);
    printf("seed %llu\n", (unsigned long long)seed);
    fflush(stdout);
    for (size_t i = 0; i < ARRAY_LEN(configs); i++) {
        world_init(w, &configs[i], seed);
        for (int k = 0; k < n_operations; k++) {
            operate(w);
            compare(w);
            look(w);
        }
        for (int k = 0; k < N_SEQS; k++)
            if (w->seqs[k].is_running)
                end(w, &w->seqs[k]);
        compare(w);
        printf("pools %zu: %llu hits, %llu slots evicted, %llu times full, %llu slots not taken\n", i,
               (unsigned long long)w->n_hits, (unsigned long long)w->n_evicted, (unsigned long long)w->n_full,
               (unsigned long long)w->n_not_taken);
        CHECK(w->n_hits > 0 && w->n_evicted > 0 && w->n_not_taken > 0);
        for (int k = 0; k < N_SEQS; k++)
            kv_seq_deinit(&w->seqs[k].seq, &w->rig);
        kv_seq_deinit(&w->onlooker.seq, &w->rig);
        kv_rig_close(&w->rig);
    }
    free(w);
    return 0;
}
