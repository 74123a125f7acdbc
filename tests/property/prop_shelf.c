/* shelf beside a flat table: random reservations, pins, drops and evictions; what the table says is what is found, and
 * bytes under a pin never change. */
#include "shelf.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define CHECK(claim)                                                                                                   \
    do {                                                                                                               \
        if (!(claim)) {                                                                                                \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #claim);                                        \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

enum { N_PAGES = 24, N_STEPS = 40000, PAYLOAD = 40, N_USERS = 3, SHARE_PERCENT = 34 };

struct copy {
    enum { GONE_OR_CLEAN, FILLING, DROPPED } state; /* unpinned clean copies may leave at any reservation */
    bool was_filled;
    uint32_t record, n_pins;
    uint64_t content;
    const void *payload;
};

struct world {
    uint64_t random;
    struct kv_shelf *shelf;
    uint32_t n_slots[KV_GROUP_N];
    int32_t tokens[N_PAGES][PAGE_TOKENS];
    struct copy copies[N_PAGES][KV_GROUP_N];
};

static uint32_t below(struct world *w, uint32_t n) {
    w->random = w->random * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((w->random >> 33) % n);
}

/* Few different keys, so that pages meet in the table, and some differ in their tokens alone. */
static struct kv_page_name name_of(struct world *w, int page) {
    struct kv_page_name name = {
        .page_idx = (uint32_t)page / 8, .tokens = w->tokens[page], .uid = (uint32_t)page % N_USERS};

    name.key.bytes[0] = (uint8_t)(page % 3);
    return name;
}

static bool is_found(struct world *w, int page, enum kv_group group, uint32_t *ret_record) {
    struct kv_page_name name = name_of(w, page);

    *ret_record = kv_shelf_find(w->shelf, &name);
    return kv_shelf_has(w->shelf, *ret_record, group);
}

/* What one user keeps of a full group, and what each has of it. */
static uint32_t share_of(struct world *w, enum kv_group group, uint32_t wanting, uint32_t n_held[N_USERS]) {
    uint32_t n_users = 0, n_slots = 0, record;

    memset(n_held, 0, N_USERS * sizeof *n_held);
    for (int page = 0; page < N_PAGES; page++)
        n_held[page % N_USERS] += w->copies[page][group].state != GONE_OR_CLEAN || is_found(w, page, group, &record);
    for (uint32_t u = 0; u < N_USERS; u++) {
        n_slots += n_held[u];
        n_users += n_held[u] > 0 || u == wanting;
    }
    return n_slots * SHARE_PERCENT / 100 < n_slots / n_users ? n_slots * SHARE_PERCENT / 100 : n_slots / n_users;
}

static void reserve(struct world *w, int page, enum kv_group group) {
    struct copy *copy = &w->copies[page][group];
    struct kv_page_name name = name_of(w, page);
    uint32_t found, record, n_held[N_USERS], share = share_of(w, group, name.uid, n_held), n_lost = 0, n_may_leave = 0;
    bool exists = is_found(w, page, group, &found) || copy->state != GONE_OR_CLEAN, was_found[N_PAGES];
    struct kv_shelf_group_stats stats;
    void *payload;
    int r;

    for (int p = 0; p < N_PAGES; p++) {
        was_found[p] = is_found(w, p, group, &found);
        n_may_leave += was_found[p] && w->copies[p][group].n_pins == 0 &&
                       (n_held[p % N_USERS] > share || (uint32_t)p % N_USERS == name.uid);
    }
    kv_shelf_stats(w->shelf, group, &stats);
    r = kv_shelf_reserve(w->shelf, &name, group, &record, &payload);
    CHECK((r == KV_SHELF_E_EXISTS) == exists);
    if (!exists)
        CHECK((r == KV_SHELF_E_FULL) == (stats.n_free == 0 && n_may_leave == 0));
    for (int p = 0; p < N_PAGES; p++) {
        if (!was_found[p] || is_found(w, p, group, &found))
            continue;
        n_lost++;
        CHECK(n_held[p % N_USERS] > share || (uint32_t)p % N_USERS == name.uid);
    }
    CHECK(n_lost == (r == 0 && stats.n_free == 0));
    if (r != 0)
        return;
    *copy = (struct copy){.state = FILLING, .record = record, .content = ++w->random, .payload = payload};
    memcpy(payload, &copy->content, sizeof copy->content);
}

static void step_copy(struct world *w, int page, enum kv_group group) {
    struct copy *copy = &w->copies[page][group];
    uint32_t record;

    if (copy->state == FILLING) {
        copy->was_filled = below(w, 4) > 0;
        copy->state = GONE_OR_CLEAN;
        if (copy->was_filled)
            kv_shelf_filled(w->shelf, copy->record, group, copy->content);
        else
            kv_shelf_abandon(w->shelf, copy->record, group);
    } else if (copy->n_pins > 0 && below(w, 3) > 0) {
        kv_shelf_unpin(w->shelf, copy->record, group);
        if (--copy->n_pins == 0 && copy->state == DROPPED)
            *copy = (struct copy){0};
    } else if (is_found(w, page, group, &record)) {
        if (below(w, 5) > 0) {
            copy->payload = kv_shelf_pin(w->shelf, record, group);
            copy->record = record;
            copy->n_pins++;
        } else {
            kv_shelf_drop(w->shelf, record, group);
            if (copy->n_pins > 0)
                copy->state = DROPPED;
            else
                *copy = (struct copy){0};
        }
    }
}

static void check(struct world *w) {
    const char *wrong = kv_shelf_check(w->shelf);
    uint32_t n_found[KV_GROUP_N] = {0};

    if (wrong)
        fprintf(stderr, "%s\n", wrong);
    CHECK(!wrong);
    for (int page = 0; page < N_PAGES; page++)
        for (int g = 0; g < KV_GROUP_N; g++) {
            struct copy *copy = &w->copies[page][g];
            uint32_t record;
            bool found = is_found(w, page, (enum kv_group)g, &record);

            n_found[g] += found || copy->state == DROPPED;
            if (found) {
                CHECK(copy->state == GONE_OR_CLEAN && copy->was_filled);
                CHECK(kv_shelf_checksum(w->shelf, record, (enum kv_group)g) == copy->content);
                CHECK(memcmp(copy->payload, &copy->content, sizeof copy->content) == 0);
            }
            if (copy->n_pins > 0) {
                CHECK(found != (copy->state == DROPPED));
                CHECK(memcmp(copy->payload, &copy->content, sizeof copy->content) == 0);
            }
        }
    for (int g = 0; g < KV_GROUP_N; g++) {
        struct kv_shelf_group_stats stats;

        kv_shelf_stats(w->shelf, (enum kv_group)g, &stats);
        CHECK(stats.n_slots == w->n_slots[g] && stats.n_clean == n_found[g]);
        CHECK(stats.n_free + stats.n_filling + stats.n_clean == stats.n_slots);
    }
}

int main(int argc, char **argv) {
    static const uint32_t N_SLOTS[KV_GROUP_N] = {
        [KV_TARGET_FULL] = 7, [KV_TARGET_STATE] = 2, [KV_DRAFT_FULL] = 7, [KV_DRAFT_SLIDING] = 0};
    uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 0) : (uint64_t)time(NULL);
    const struct backend *backend = backend_find("cpu");
    struct world *w = calloc(1, sizeof *w);
    struct kv_shelf_options options = {
        .backend = backend, .alignment = FORMAT_ALIGN_MIN, .share_percent = SHARE_PERCENT};

    printf("seed %llu\n", (unsigned long long)seed);
    fflush(stdout);
    CHECK(w != NULL && backend->open(&(struct backend_options){.n_threads = 1}, &options.device) == 0);
    w->random = seed;
    for (int g = 0; g < KV_GROUP_N; g++) {
        options.group[g].payload_bytes = PAYLOAD;
        options.group[g].n_slots = w->n_slots[g] = N_SLOTS[g];
    }
    CHECK(kv_shelf_open(&options, &w->shelf) == 0);
    for (int page = 0; page < N_PAGES; page++)
        for (int k = 0; k < PAGE_TOKENS; k++)
            w->tokens[page][k] = k == PAGE_TOKENS - 1 ? page : k;
    for (int step = 0; step < N_STEPS; step++) {
        int page = (int)below(w, N_PAGES);
        enum kv_group group = (enum kv_group)below(w, KV_GROUP_N);

        if (below(w, 200) == 0)
            kv_shelf_evict_bytes(w->shelf, below(w, 3) ? below(w, 6 * PAYLOAD) : UINT64_MAX);
        else if (below(w, 8) == 0)
            kv_shelf_touch(w->shelf, &(struct kv_page_name){.key = name_of(w, page).key,
                                                            .page_idx = (uint32_t)page / 8,
                                                            .tokens = w->tokens[page]});
        else if (below(w, 2))
            reserve(w, page, group);
        else
            step_copy(w, page, group);
        check(w);
    }
    for (int page = 0; page < N_PAGES; page++)
        for (int g = 0; g < KV_GROUP_N; g++) {
            struct copy *copy = &w->copies[page][g];

            if (copy->state == FILLING)
                kv_shelf_abandon(w->shelf, copy->record, (enum kv_group)g);
            for (; copy->n_pins > 0; copy->n_pins--)
                kv_shelf_unpin(w->shelf, copy->record, (enum kv_group)g);
        }
    kv_shelf_close(w->shelf);
    backend->close(options.device);
    free(w);
    return 0;
}
