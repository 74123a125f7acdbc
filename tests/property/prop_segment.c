/* The slots of the disk beside an obvious model: chains take and give slots, segments are prepared, fail, retire and go,
 * caps change, and a map is built anew as a scan at start-up does it. The model keeps one bool per slot and counts by
 * looking at everything; after each operation the map checks itself and says what the model says. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "segment.h"

#define CHECK(claim)                                                                                                   \
    do {                                                                                                               \
        if (!(claim)) {                                                                                                \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #claim);                                                \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

enum { SEGMENTS_MAX = 80, SLOTS_MAX = 200, N_CHAINS = 12, FIRST_OFFSET = 4096, UNIT = FORMAT_SEGMENT_BYTES_MIN };

struct model_segment {
    enum segment_state state;
    enum kv_group group;
    bool has_file;
    bool taken[SLOTS_MAX];
};

struct world {
    struct segment_options options;
    struct segment_map *map;
    uint32_t n_slots[KV_GROUP_N];
    struct model_segment segments[SEGMENTS_MAX];
    uint32_t last[N_CHAINS]; /* slot that the chain took last */
    uint64_t random;
    uint64_t n_takes, n_follow, n_answers[4], n_surplus, n_restarts, n_rebound;
};

static uint32_t below(struct world *w, uint32_t n) {
    w->random = w->random * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((w->random >> 33) % n);
}

/* ---- the model ---- */

static uint32_t n_taken(const struct world *w, uint32_t s) {
    uint32_t n = 0;

    for (uint32_t i = 0; i < SLOTS_MAX; i++)
        n += w->segments[s].taken[i];
    return n;
}

static uint32_t n_files(const struct world *w) {
    uint32_t n = 0;

    for (uint32_t s = 0; s < w->options.n_segments_max; s++)
        n += w->segments[s].state != SEGMENT_ABSENT;
    return n;
}

static uint32_t n_of(const struct world *w, enum kv_group group, enum segment_state state) {
    uint32_t n = 0;

    for (uint32_t s = 0; s < w->options.n_segments_max; s++)
        n += w->segments[s].state == state && w->segments[s].group == group;
    return n;
}

static bool has_room(const struct world *w, enum kv_group group) {
    for (uint32_t s = 0; s < w->options.n_segments_max; s++)
        if (w->segments[s].state == SEGMENT_BOUND && w->segments[s].group == group && n_taken(w, s) < w->n_slots[group])
            return true;
    return false;
}

static uint32_t n_own(const struct world *w, enum kv_group group) {
    return n_of(w, group, SEGMENT_PREPARING) + n_of(w, group, SEGMENT_SCANNING) + n_of(w, group, SEGMENT_BOUND);
}

static bool has_too_many(const struct world *w, enum kv_group group) {
    return n_own(w, group) * (uint64_t)UNIT > w->options.group[group].cap_bytes;
}

/* Of the state that the group may have next, or ABSENT for a new file; false: none. */
static bool may_prepare(const struct world *w, enum kv_group group, enum segment_state *ret_from) {
    bool is_empty = false, is_idle = false;

    if ((n_own(w, group) + 1) * (uint64_t)UNIT > w->options.group[group].cap_bytes)
        return false;
    for (uint32_t s = 0; s < w->options.n_segments_max; s++) {
        is_empty |= w->segments[s].state == SEGMENT_EMPTY;
        is_idle |= w->segments[s].state == SEGMENT_BOUND && w->segments[s].group != group && n_taken(w, s) == 0;
    }
    *ret_from = is_empty ? SEGMENT_EMPTY : is_idle ? SEGMENT_BOUND : SEGMENT_ABSENT;
    if (is_empty || is_idle)
        return (uint64_t)n_files(w) * UNIT <= w->options.cap_bytes;
    return n_files(w) < w->options.n_segments_max && (uint64_t)(n_files(w) + 1) * UNIT <= w->options.cap_bytes;
}

static bool gives(const struct world *w, enum kv_group from, enum kv_group to) {
    return from != to && (has_too_many(w, from) || (n_own(w, to) == 0 && n_own(w, from) > 1));
}

static void compare_excess(const struct world *w, enum kv_group group) {
    uint32_t s, fewest = UINT32_MAX;
    bool is_due = (n_own(w, group) + 1) * (uint64_t)UNIT <= w->options.group[group].cap_bytes;
    bool has_found = segment_excess(w->map, group, &s);

    for (uint32_t other = 0; other < w->options.n_segments_max; other++)
        if (w->segments[other].state == SEGMENT_BOUND && gives(w, w->segments[other].group, group) &&
            n_taken(w, other) < fewest)
            fewest = n_taken(w, other);
    CHECK(has_found == (is_due && fewest < UINT32_MAX));
    if (has_found)
        CHECK(w->segments[s].state == SEGMENT_BOUND && gives(w, w->segments[s].group, group) &&
              n_taken(w, s) == fewest);
}

static void compare(const struct world *w) {
    struct segment_stats stats;
    const char *wrong = segment_check(w->map);
    uint32_t n_in_state[SEGMENT_STATE_N] = {0};

    if (wrong != NULL) {
        fprintf(stderr, "%s\n", wrong);
        abort();
    }
    segment_stats(w->map, &stats);
    for (uint32_t s = 0; s < w->options.n_segments_max; s++) {
        CHECK(segment_state(w->map, s) == w->segments[s].state);
        n_in_state[w->segments[s].state]++;
    }
    CHECK(memcmp(n_in_state, stats.n_segments, sizeof n_in_state) == 0);
    CHECK(stats.bytes == (uint64_t)n_files(w) * UNIT && stats.cap_bytes == w->options.cap_bytes);
    for (enum kv_group g = 0; g < KV_GROUP_N; g++) {
        uint32_t n_in = 0, n_elsewhere = 0;

        for (uint32_t s = 0; s < w->options.n_segments_max; s++)
            if (w->segments[s].group == g && w->segments[s].state == SEGMENT_BOUND)
                n_in += n_taken(w, s);
            else if (w->segments[s].group == g)
                n_elsewhere += n_taken(w, s);
        CHECK(stats.group[g].n_segments == n_of(w, g, SEGMENT_BOUND));
        CHECK(stats.group[g].n_slots == n_of(w, g, SEGMENT_BOUND) * w->n_slots[g]);
        CHECK(stats.group[g].n_preparing == n_of(w, g, SEGMENT_PREPARING));
        CHECK(stats.group[g].n_scanning == n_of(w, g, SEGMENT_SCANNING));
        CHECK(stats.group[g].n_taken == n_in && stats.group[g].n_taken_elsewhere == n_elsewhere);
        compare_excess(w, g);
    }
}

/* ---- operations ---- */

static void unbind(struct world *w, uint32_t s, enum segment_state state) {
    w->segments[s] = (struct model_segment){.state = state, .group = KV_GROUP_N, .has_file = state != SEGMENT_ABSENT};
}

static void prepare(struct world *w, enum kv_group group) {
    enum segment_state from = SEGMENT_ABSENT;
    bool may = may_prepare(w, group, &from), has_file;
    uint32_t s = 12345;
    int r = segment_prepare(w->map, group, &s);

    if (n_of(w, group, SEGMENT_PREPARING) > 0 || w->n_slots[group] == 0 || !may) {
        CHECK(r == (n_of(w, group, SEGMENT_PREPARING) > 0 ? SEGMENT_E_BUSY : SEGMENT_E_FULL) && s == 12345);
        return;
    }
    CHECK(r == 0 && s < w->options.n_segments_max && w->segments[s].state == from && n_taken(w, s) == 0);
    CHECK(from != SEGMENT_BOUND || w->segments[s].group != group);
    w->n_rebound += from == SEGMENT_BOUND;
    has_file = from != SEGMENT_ABSENT;
    w->segments[s] = (struct model_segment){.state = SEGMENT_PREPARING, .group = group, .has_file = has_file};
}

static int take(struct world *w, enum kv_group group, uint32_t near, uint32_t *ret_slot) {
    enum segment_state from;
    uint32_t slot = 12345, n = w->n_slots[group], s;
    bool room = n > 0 && has_room(w, group);
    int r = segment_take(w->map, group, near, &slot);

    w->n_answers[r]++;
    if (!room) {
        CHECK(slot == 12345);
        if (n == 0)
            CHECK(r == SEGMENT_E_FULL);
        else if (n_of(w, group, SEGMENT_PREPARING) > 0)
            CHECK(r == SEGMENT_E_BUSY);
        else if (may_prepare(w, group, &from))
            CHECK(r == SEGMENT_E_NEEDS_SEGMENT);
        else
            CHECK(r == (n_of(w, group, SEGMENT_SCANNING) > 0 ? SEGMENT_E_BUSY : SEGMENT_E_FULL));
        return r;
    }
    CHECK(r == 0);
    s = slot / n;
    CHECK(s < w->options.n_segments_max && w->segments[s].state == SEGMENT_BOUND && w->segments[s].group == group);
    CHECK(!w->segments[s].taken[slot % n]);
    if (near != KV_NO_SLOT && near / n < w->options.n_segments_max) {
        const struct model_segment *beside = &w->segments[near / n];

        if (beside->state == SEGMENT_BOUND && beside->group == group && n_taken(w, near / n) < n)
            CHECK(s == near / n && (near % n + 1 == n || beside->taken[near % n + 1] || slot == near + 1));
    }
    w->segments[s].taken[slot % n] = true;
    *ret_slot = slot;
    return 0;
}

static void grow_chain(struct world *w) {
    uint32_t chain = below(w, N_CHAINS), slot;
    enum kv_group group = chain % KV_GROUP_N;

    if (below(w, 40) == 0)
        w->last[chain] = below(w, 2) ? KV_NO_SLOT : below(w, UINT32_MAX); /* a hint may be anything */
    for (uint32_t i = 0; i < 8; i++) {                                    /* as a batch does */
        int r = take(w, group, w->last[chain], &slot);

        if (r == SEGMENT_E_NEEDS_SEGMENT && below(w, 4) > 0)
            prepare(w, group);
        if (r != 0)
            return;
        w->n_takes++;
        w->n_follow += slot == w->last[chain] + 1;
        w->last[chain] = slot;
    }
}

static void give_run(struct world *w) {
    uint32_t s = below(w, w->options.n_segments_max), from, n;
    struct model_segment *segment = &w->segments[s];

    if (segment->state != SEGMENT_BOUND && segment->state != SEGMENT_RETIRED)
        return;
    if (segment->group == KV_GROUP_N)
        return;
    from = below(w, w->n_slots[segment->group]);
    n = below(w, 3) == 0 ? SLOTS_MAX : below(w, 24);
    from = n == SLOTS_MAX ? 0 : from;
    for (uint32_t i = from; i < w->n_slots[segment->group] && i < from + n; i++)
        if (segment->taken[i]) {
            segment_give(w->map, segment->group, s * w->n_slots[segment->group] + i);
            segment->taken[i] = false;
        }
}

static void look_at(struct world *w) {
    enum kv_group group = below(w, KV_GROUP_N), of;
    uint32_t n = w->n_slots[group], slot, s, first;
    uint64_t offset;
    bool is_taken;

    if (n == 0)
        return;
    slot = below(w, n * w->options.n_segments_max);
    is_taken = w->segments[slot / n].group == group && w->segments[slot / n].taken[slot % n];
    CHECK(segment_is_taken(w->map, group, slot) == is_taken);
    CHECK(!segment_is_taken(w->map, group, n * w->options.n_segments_max));
    segment_locate(w->map, group, slot, &s, &offset);
    CHECK(s == slot / n && offset == FIRST_OFFSET + (uint64_t)(slot % n) * w->options.group[group].slot_bytes);
    CHECK(offset + w->options.group[group].slot_bytes <= UNIT);
    if (segment_slots(w->map, s, &of, &first) > 0)
        CHECK(of == w->segments[s].group && first == s * w->n_slots[of]);
}

static void step_segment(struct world *w) {
    uint32_t s = below(w, w->options.n_segments_max);
    struct model_segment *segment = &w->segments[s];
    bool has_file;

    switch (segment->state) {
    case SEGMENT_PREPARING:
        if (below(w, 5) > 0) {
            segment_ready(w->map, s);
            segment->state = SEGMENT_BOUND;
            segment->has_file = true;
            break;
        }
        has_file = segment->has_file || below(w, 2);
        segment_failed(w->map, s, has_file);
        unbind(w, s, has_file ? SEGMENT_EMPTY : SEGMENT_ABSENT);
        break;
    case SEGMENT_SCANNING:
        segment_ready(w->map, s);
        segment->state = SEGMENT_BOUND;
        break;
    case SEGMENT_FOREIGN:
        segment_reclaim(w->map, s);
        segment->state = SEGMENT_EMPTY;
        break;
    case SEGMENT_RETIRED:
        if (n_taken(w, s) > 0)
            break;
        segment_removed(w->map, s);
        unbind(w, s, SEGMENT_ABSENT);
        break;
    case SEGMENT_EMPTY:
    case SEGMENT_BOUND:
        if (below(w, 10) > 0)
            break;
        segment_retire(w->map, s);
        segment->state = SEGMENT_RETIRED;
        break;
    case SEGMENT_ABSENT:
    case SEGMENT_STATE_N:
        break;
    }
}

static void change_cap(struct world *w) {
    uint32_t s;

    w->options.cap_bytes = (1 + below(w, w->options.n_segments_max + 4)) * (uint64_t)UNIT - below(w, 2);
    segment_set_cap(w->map, w->options.cap_bytes);
    while (segment_surplus(w->map, &s)) {
        w->n_surplus++;
        CHECK(w->segments[s].state == SEGMENT_EMPTY || w->segments[s].state == SEGMENT_BOUND);
        for (uint32_t other = 0; other < w->options.n_segments_max; other++)
            if (w->segments[s].state == SEGMENT_BOUND && w->segments[other].state == SEGMENT_BOUND &&
                has_too_many(w, w->segments[s].group) == has_too_many(w, w->segments[other].group))
                CHECK(n_taken(w, s) <= n_taken(w, other));
            else if (w->segments[s].state == SEGMENT_BOUND && w->segments[other].state == SEGMENT_BOUND)
                CHECK(has_too_many(w, w->segments[s].group));
        segment_retire(w->map, s);
        w->segments[s].state = SEGMENT_RETIRED;
    }
}

/* What a scan finds: retired segments are bound again, those in preparation empty or foreign. */
static void restart(struct world *w) {
    segment_close(w->map);
    CHECK(segment_open(&w->options, &w->map) == 0);
    w->n_restarts++;
    for (uint32_t s = 0; s < w->options.n_segments_max; s++) {
        struct model_segment *segment = &w->segments[s];

        if (segment->state == SEGMENT_PREPARING || (segment->state == SEGMENT_RETIRED && n_taken(w, s) == 0))
            unbind(w, s, below(w, 2) ? SEGMENT_FOREIGN : SEGMENT_EMPTY);
        if (segment->state == SEGMENT_EMPTY) {
            segment_found_empty(w->map, s);
        } else if (segment->state == SEGMENT_FOREIGN) {
            segment_found_foreign(w->map, s);
        } else if (segment->state != SEGMENT_ABSENT) {
            segment->state = SEGMENT_SCANNING;
            segment_found(w->map, s, segment->group);
            for (uint32_t i = 0; i < w->n_slots[segment->group]; i++)
                if (segment->taken[i])
                    segment_mark_taken(w->map, segment->group, s * w->n_slots[segment->group] + i);
        }
    }
}

static void operate(struct world *w) {
    uint32_t what = below(w, 100);

    if (what < 45)
        grow_chain(w);
    else if (what < 60)
        give_run(w);
    else if (what < 75)
        step_segment(w);
    else if (what < 80)
        prepare(w, below(w, KV_GROUP_N));
    else if (what < 98)
        look_at(w);
    else if (below(w, 20) > 0)
        return;
    else if (below(w, 2) > 0)
        change_cap(w);
    else
        restart(w);
}

int main(int argc, char **argv) {
    static const struct {
        uint32_t n_segments_max, n_slots[KV_GROUP_N], cap_segments[KV_GROUP_N];
    } configs[] = {
        {40, {123, 6, 0, 64}, {30, 10, 0, 5}},    /* as it is with a target and one draft group */
        {80, {200, 1, 33, 32}, {80, 80, 80, 80}}, /* everybody may have everything */
        {5, {31, 63, 65, 127}, {2, 1, 1, 1}},     /* few segments, shared out */
        {1, {12, 3, 7, 2}, {1, 1, 1, 1}},         /* one for all */
    };
    uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 0) : (uint64_t)time(NULL);
    int n_operations = argc > 2 ? atoi(argv[2]) : 50000;
    struct world *w = calloc(1, sizeof *w);

    CHECK(w != NULL);
    printf("seed %llu\n", (unsigned long long)seed);
    fflush(stdout);
    for (size_t i = 0; i < ARRAY_LEN(configs); i++) {
        memset(w, 0, sizeof *w);
        w->random = seed;
        w->options = (struct segment_options){.n_segments_max = configs[i].n_segments_max,
                                              .segment_bytes = UNIT,
                                              .first_offset = FIRST_OFFSET,
                                              .cap_bytes = configs[i].n_segments_max * (uint64_t)UNIT};
        for (int g = 0; g < KV_GROUP_N; g++) {
            w->n_slots[g] = configs[i].n_slots[g];
            if (w->n_slots[g] > 0)
                w->options.group[g].slot_bytes = (UNIT - FIRST_OFFSET) / w->n_slots[g];
            w->options.group[g].cap_bytes = configs[i].cap_segments[g] * (uint64_t)UNIT;
        }
        for (uint32_t s = 0; s < SEGMENTS_MAX; s++)
            w->segments[s].group = KV_GROUP_N;
        for (int chain = 0; chain < N_CHAINS; chain++)
            w->last[chain] = KV_NO_SLOT;
        CHECK(segment_open(&w->options, &w->map) == 0);
        for (int k = 0; k < n_operations; k++) {
            operate(w);
            compare(w);
        }
        printf("disk %zu: %llu slots taken, %.0f %% after their page before; %llu needed, %llu busy, %llu full; "
               "%llu rebound, %llu surplus, %llu restarts\n",
               i, (unsigned long long)w->n_takes, 100.0 * (double)w->n_follow / (double)w->n_takes,
               (unsigned long long)w->n_answers[SEGMENT_E_NEEDS_SEGMENT],
               (unsigned long long)w->n_answers[SEGMENT_E_BUSY], (unsigned long long)w->n_answers[SEGMENT_E_FULL],
               (unsigned long long)w->n_rebound, (unsigned long long)w->n_surplus, (unsigned long long)w->n_restarts);
        for (int e = 0; e < 4; e++)
            CHECK(w->n_answers[e] > 0);
        CHECK(w->n_rebound > 0 && w->n_restarts > 0);
        segment_close(w->map);
    }
    free(w);
    return 0;
}
