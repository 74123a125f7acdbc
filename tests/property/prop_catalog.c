/* catalog beside a flat table: random puts, pins and drops; what the table says is what is found, and the longest unused
 * leaves first. */
#include "catalog.h"

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

enum { N_NAMES = 30, N_RECORDS = 20, N_STEPS = 60000, N_USERS = 5, SHARE_PERCENT = 30 };

/* One that is, or was; a name may have one that is found and others that were dropped and are pinned. */
struct entry {
    enum { GONE, WRITING, STORED, DROPPED } state;
    int name;
    uint32_t record, slot, n_pins;
    uint64_t used, stored_tick;
    bool was_read, is_guarded;
};

struct world {
    uint64_t random, first_tick, tick, stored_tick;
    struct catalog *catalog;
    struct entry entries[N_RECORDS];
    uint32_t next_slot;
};

static uint32_t below(struct world *w, uint32_t n) {
    w->random = w->random * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((w->random >> 33) % n);
}

/* Few different keys, so that names meet in the table; some differ in their group or number alone, and some keys in their
 * second half alone, which is not looked at. */
static struct catalog_entry entry_of(int name) {
    struct catalog_entry entry = {.group = (enum kv_group)(name % KV_GROUP_N), .page_idx = (uint32_t)name / 8};

    entry.key.bytes[0] = (uint8_t)(name % 3);
    entry.key.bytes[KV_KEY_BYTES - 1] = (uint8_t)name;
    entry.uid = (uint32_t)name % N_USERS;
    return entry;
}

/* The same page as the catalog sees it. */
static bool is_same(int a, int b) {
    struct catalog_entry x = entry_of(a), y = entry_of(b);

    return x.key.bytes[0] == y.key.bytes[0] && x.group == y.group && x.page_idx == y.page_idx;
}

static struct entry *find(struct world *w, int name) {
    for (int i = 0; i < N_RECORDS; i++)
        if ((w->entries[i].state == WRITING || w->entries[i].state == STORED) && is_same(w->entries[i].name, name))
            return &w->entries[i];
    return NULL;
}

static struct entry *find_gone(struct world *w) {
    for (int i = 0; i < N_RECORDS; i++)
        if (w->entries[i].state == GONE)
            return &w->entries[i];
    return NULL;
}

static void put(struct world *w, int name) {
    struct catalog_entry entry = entry_of(name);
    struct entry *gone = find_gone(w);
    bool is_known = find(w, name) != NULL;
    uint32_t record;
    int r;

    entry.slot = ++w->next_slot;
    entry.segment = entry.slot / 7;
    r = catalog_put(w->catalog, &entry, &record);
    CHECK(r == (is_known ? CATALOG_E_EXISTS : gone == NULL ? CATALOG_E_FULL : 0));
    if (r == 0)
        *gone = (struct entry){.state = WRITING, .name = name, .record = record, .slot = entry.slot};
}

static struct entry *oldest(struct world *w, enum kv_group group) {
    struct entry *best = NULL;

    for (int i = 0; i < N_RECORDS; i++) {
        struct entry *e = &w->entries[i];

        if (e->state == STORED && e->n_pins == 0 && !e->is_guarded && entry_of(e->name).group == group &&
            (best == NULL || e->used < best->used))
            best = e;
    }
    return best;
}

/* Who makes room for a user: of those with more than their shares the longest unused; else of his own. */
static void check_shares(struct world *w, enum kv_group group, uint32_t uid) {
    uint32_t n_held[N_USERS] = {0}, n_slots = 0, n_users = 0, share, record;
    struct entry *best = NULL, *found = NULL;
    bool best_is_over = false;

    for (int i = 0; i < N_RECORDS; i++)
        if (w->entries[i].state != GONE && entry_of(w->entries[i].name).group == group)
            n_held[entry_of(w->entries[i].name).uid]++;
    for (uint32_t u = 0; u < N_USERS; u++) {
        n_slots += n_held[u];
        n_users += n_held[u] > 0 || u == uid;
    }
    share = n_slots * SHARE_PERCENT / 100 < n_slots / n_users ? n_slots * SHARE_PERCENT / 100 : n_slots / n_users;
    record = catalog_oldest_for(w->catalog, group, uid);
    for (int i = 0; i < N_RECORDS; i++) {
        struct entry *e = &w->entries[i];
        uint32_t owner = entry_of(e->name).uid;
        bool is_over = n_held[owner] > share;

        if (e->state == STORED && e->record == record)
            found = e;
        if (e->state == STORED && e->n_pins == 0 && !e->is_guarded && entry_of(e->name).group == group &&
            (is_over || owner == uid) &&
            (best == NULL || is_over > best_is_over || (is_over == best_is_over && e->used < best->used))) {
            best = e;
            best_is_over = is_over;
        }
    }
    CHECK((record == KV_NO_RECORD) == (best == NULL) && found == best);
}

static void act(struct world *w, struct entry *e) {
    switch (below(w, 7)) {
    case 0:
        if (e->state != WRITING)
            return;
        if (below(w, 3) == 0) {
            catalog_found(w->catalog, e->record);
            e->state = STORED;
            e->used = --w->first_tick;
            return;
        }
        e->stored_tick = ++w->stored_tick;
        catalog_stored(w->catalog, e->record, e->stored_tick);
        e->state = STORED;
        e->used = ++w->tick;
        return;
    case 1:
        if (e->state != STORED && !(e->state == DROPPED && e->n_pins > 0))
            return;
        catalog_pin(w->catalog, e->record);
        e->n_pins++;
        e->was_read = true;
        return;
    case 2:
        if (e->n_pins == 0)
            return;
        CHECK(catalog_unpin(w->catalog, e->record) == (--e->n_pins == 0 && e->state == DROPPED && !e->is_guarded));
        if (e->n_pins == 0 && e->state == STORED)
            e->used = ++w->tick;
        else if (e->n_pins == 0 && !e->is_guarded)
            e->state = GONE;
        return;
    case 5:
        if (!e->is_guarded && e->state == STORED)
            catalog_guard(w->catalog, e->record);
        else if (e->is_guarded)
            CHECK(catalog_unguard(w->catalog, e->record) == (e->n_pins == 0 && e->state == DROPPED));
        else
            return;
        e->is_guarded = !e->is_guarded;
        if (!e->is_guarded && e->n_pins == 0 && e->state == DROPPED)
            e->state = GONE;
        return;
    case 3:
        if (e->state == GONE || e->state == DROPPED)
            return;
        CHECK(catalog_drop(w->catalog, e->record) == (e->n_pins == 0 && !e->is_guarded));
        e->state = e->n_pins == 0 && !e->is_guarded ? GONE : DROPPED;
        return;
    case 4:
        if (e->state == GONE)
            return;
        catalog_touch(w->catalog, e->record);
        if (e->state == STORED && e->n_pins == 0)
            e->used = ++w->tick;
        return;
    default: {
        enum kv_group group = entry_of(e->name).group;
        struct entry *first = oldest(w, group);
        uint32_t record = catalog_oldest(w->catalog, group);

        CHECK(record == (first ? first->record : KV_NO_RECORD));
        check_shares(w, group, below(w, N_USERS));
        if (!first || below(w, 4) != 0)
            return;
        CHECK(catalog_drop(w->catalog, record));
        first->state = GONE;
    }
    }
}

static void compare(struct world *w) {
    const char *wrong = catalog_check(w->catalog);
    uint32_t n_stored = 0, n_walked = 0;

    if (wrong)
        fprintf(stderr, "%s\n", wrong);
    CHECK(!wrong);
    for (int name = 0; name < N_NAMES; name++) {
        struct catalog_entry entry = entry_of(name);
        const struct entry *e = find(w, name);
        uint32_t found = catalog_find(w->catalog, &entry.key, entry.page_idx, entry.group);

        CHECK(catalog_knows(w->catalog, &entry.key, entry.page_idx, entry.group) == (e != NULL));
        CHECK(found == (e && e->state == STORED ? e->record : KV_NO_RECORD));
        CHECK(found == KV_NO_RECORD || catalog_is(w->catalog, found, &entry.key, entry.page_idx, entry.group));
    }
    for (int i = 0; i < N_RECORDS; i++) {
        const struct entry *e = &w->entries[i];
        struct catalog_entry entry = entry_of(e->name);
        struct catalog_view view;

        if (e->state == GONE)
            continue;
        n_stored += e->state == STORED;
        view = catalog_look(w->catalog, e->record);
        CHECK(view.slot == e->slot && view.segment == e->slot / 7 && view.group == entry.group);
        CHECK(view.page_idx == entry.page_idx && view.uid == entry.uid && view.was_read == e->was_read);
        CHECK(e->state == WRITING || view.stored_tick == e->stored_tick);
    }
    for (uint32_t r = 0; (r = catalog_next(w->catalog, r)) != KV_NO_RECORD; r++)
        n_walked++;
    CHECK(n_walked == n_stored);
    for (int g = 0; g < KV_GROUP_N; g++) {
        struct catalog_group_stats stats, mine = {0};

        for (int i = 0; i < N_RECORDS; i++) {
            const struct entry *e = &w->entries[i];

            if (e->state == GONE || (int)entry_of(e->name).group != g)
                continue;
            mine.n_writing += e->state == WRITING;
            mine.n_stored += e->state != WRITING;
            mine.n_pinned += e->n_pins > 0;
        }
        catalog_stats(w->catalog, (enum kv_group)g, &stats);
        CHECK(memcmp(&stats, &mine, sizeof stats) == 0);
    }
}

int main(int argc, char **argv) {
    static struct world w;

    w.random = argc > 1 ? strtoull(argv[1], NULL, 0) : (uint64_t)time(NULL);
    printf("seed %llu\n", (unsigned long long)w.random);
    w.first_tick = w.tick = 1 << 20;
    CHECK(catalog_open(N_RECORDS, SHARE_PERCENT, &w.catalog) == 0);
    for (int step = 0; step < N_STEPS; step++) {
        if (below(&w, 3) == 0)
            put(&w, (int)below(&w, N_NAMES));
        else
            act(&w, &w.entries[below(&w, N_RECORDS)]);
        compare(&w);
    }
    for (int i = 0; i < N_RECORDS; i++)
        while (w.entries[i].n_pins > 0) {
            w.entries[i].n_pins--;
            catalog_unpin(w.catalog, w.entries[i].record);
        }
    catalog_close(w.catalog);
    return 0;
}
