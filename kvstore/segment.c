#include "segment.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum {
    WORD_BITS = 64,
    WINDOW_SLOTS = 32, /* a chain begins in so many free slots, so that chains that grow side by side do not mix */
};
#define NONE UINT32_MAX

struct segment {
    enum segment_state state;
    enum kv_group group; /* KV_GROUP_N: none */
    uint32_t n_taken;
};

/* Kept up with every change; segment_check() counts anew. */
struct counts {
    uint32_t n_in_state[SEGMENT_STATE_N];
    struct {
        uint32_t n_in_state[SEGMENT_STATE_N];
        uint32_t n_idle; /* bound, no slot taken */
        uint32_t n_taken, n_taken_elsewhere;
    } group[KV_GROUP_N];
};

struct segment_map {
    struct segment_options options;
    uint32_t n_slots[KV_GROUP_N]; /* of one segment; 0: no such group */
    uint32_t n_words;             /* of one segment */
    struct segment *segments;     /* [n_segments_max] */
    uint64_t *taken;              /* [n_segments_max, n_words] bits; those past the last slot are set */
    uint64_t *open[KV_GROUP_N];   /* bit s: segment s is bound to the group and has a free slot */
    struct counts counts;
};

/* ---- bits -------------------------------------------------------------------------------------------------------- */

static bool bit_get(const uint64_t *words, uint32_t i) {
    return words[i / WORD_BITS] >> i % WORD_BITS & 1;
}

static void bit_put(uint64_t *words, uint32_t i, bool is_set) {
    uint64_t bit = UINT64_C(1) << i % WORD_BITS;

    words[i / WORD_BITS] = is_set ? words[i / WORD_BITS] | bit : words[i / WORD_BITS] & ~bit;
}

/* The first bit from `from` on that is set, or is not; n_bits if there is none. */
static uint32_t bit_next(const uint64_t *words, uint32_t n_bits, uint32_t from, bool is_set) {
    while (from < n_bits) {
        uint64_t word = (is_set ? words[from / WORD_BITS] : ~words[from / WORD_BITS]) >> from % WORD_BITS;

        if (word != 0) {
            from += (uint32_t)__builtin_ctzll(word);
            return from < n_bits ? from : n_bits;
        }
        from += WORD_BITS - from % WORD_BITS;
    }
    return n_bits;
}

static uint64_t *taken_of(const struct segment_map *map, uint32_t segment) {
    return map->taken + (size_t)segment * map->n_words;
}

/* ---- changes ----------------------------------------------------------------------------------------------------- */

static void count(const struct segment *segment, struct counts *counts, uint32_t sign) { /* sign: 1 or -1 */
    counts->n_in_state[segment->state] += sign;
    if (segment->group == KV_GROUP_N)
        return;
    counts->group[segment->group].n_in_state[segment->state] += sign;
    if (segment->state != SEGMENT_BOUND) {
        counts->group[segment->group].n_taken_elsewhere += sign * segment->n_taken;
        return;
    }
    counts->group[segment->group].n_idle += segment->n_taken == 0 ? sign : 0;
    counts->group[segment->group].n_taken += sign * segment->n_taken;
}

/* The one way in which a segment becomes something else. */
static void put(struct segment_map *map, uint32_t segment, struct segment now) {
    struct segment *was = &map->segments[segment];

    if (was->state == SEGMENT_BOUND)
        bit_put(map->open[was->group], segment, false);
    count(was, &map->counts, UINT32_MAX);
    *was = now;
    count(was, &map->counts, 1);
    if (now.state == SEGMENT_BOUND)
        bit_put(map->open[now.group], segment, now.n_taken < map->n_slots[now.group]);
}

static void put_state(struct segment_map *map, uint32_t segment, enum segment_state state) {
    struct segment now = map->segments[segment];

    now.state = state;
    put(map, segment, now);
}

/* To or from a state in which it has no group and no slots. */
static void put_unbound(struct segment_map *map, uint32_t segment, enum segment_state state) {
    assert(map->segments[segment].n_taken == 0);
    put(map, segment, (struct segment){.state = state, .group = KV_GROUP_N});
}

/* Carves it into free slots of the group. */
static void put_carved(struct segment_map *map, uint32_t segment, enum segment_state state, enum kv_group group) {
    uint64_t *taken = taken_of(map, segment);

    assert(group < KV_GROUP_N && map->n_slots[group] > 0 && map->segments[segment].n_taken == 0);
    memset(taken, 0, map->n_words * sizeof *taken);
    for (uint32_t i = map->n_slots[group]; i < map->n_words * WORD_BITS; i++)
        bit_put(taken, i, true);
    put(map, segment, (struct segment){.state = state, .group = group});
}

static void put_taken(struct segment_map *map, uint32_t segment, uint32_t index, bool is_taken) {
    struct segment now = map->segments[segment];

    assert(bit_get(taken_of(map, segment), index) != is_taken);
    bit_put(taken_of(map, segment), index, is_taken);
    now.n_taken += is_taken ? 1 : UINT32_MAX;
    put(map, segment, now);
}

/* ---- open, close ------------------------------------------------------------------------------------------------- */

uint32_t segment_bytes_for(uint64_t disk_bytes) {
    uint32_t bytes = FORMAT_SEGMENT_BYTES_MIN;

    while (bytes < FORMAT_SEGMENT_BYTES_MAX && 2 * (uint64_t)bytes <= disk_bytes / 32)
        bytes *= 2;
    return bytes;
}

static int carve(struct segment_map *map) {
    const struct segment_options *options = &map->options;

    if (options->n_segments_max == 0 || options->first_offset < FORMAT_BLOCK_BYTES ||
        options->first_offset >= options->segment_bytes || options->segment_bytes > FORMAT_SEGMENT_BYTES_MAX)
        return -EINVAL;
    for (int g = 0; g < KV_GROUP_N; g++) {
        uint32_t slot_bytes = options->group[g].slot_bytes;
        uint64_t n_slots;

        if (slot_bytes == 0)
            continue;
        n_slots = (options->segment_bytes - options->first_offset) / slot_bytes;
        if (slot_bytes <= FORMAT_BLOCK_BYTES || n_slots == 0 || n_slots * options->n_segments_max >= KV_NO_SLOT)
            return -EINVAL;
        map->n_slots[g] = (uint32_t)n_slots;
        if (div_ceil(n_slots, WORD_BITS) > map->n_words)
            map->n_words = (uint32_t)div_ceil(n_slots, WORD_BITS);
    }
    return map->n_words > 0 ? 0 : -EINVAL;
}

int segment_open(const struct segment_options *options, struct segment_map **ret_map) {
    struct segment_map *map = calloc(1, sizeof *map);
    uint32_t n = options->n_segments_max;
    int r;

    if (map == NULL)
        return -ENOMEM;
    map->options = *options;
    r = carve(map);
    if (r == 0) {
        bool is_there = true;

        map->segments = calloc(n, sizeof *map->segments);
        map->taken = calloc((size_t)n * map->n_words, sizeof *map->taken);
        for (int g = 0; g < KV_GROUP_N; g++) {
            map->open[g] = calloc(div_ceil(n, WORD_BITS), sizeof *map->open[g]);
            is_there = is_there && map->open[g] != NULL;
        }
        r = is_there && map->segments != NULL && map->taken != NULL ? 0 : -ENOMEM;
    }
    if (r != 0) {
        segment_close(map);
        return r;
    }
    for (uint32_t s = 0; s < n; s++)
        map->segments[s].group = KV_GROUP_N;
    map->counts.n_in_state[SEGMENT_ABSENT] = n;
    *ret_map = map;
    return 0;
}

void segment_close(struct segment_map *map) {
    if (map == NULL)
        return;
    for (int g = 0; g < KV_GROUP_N; g++)
        free(map->open[g]);
    free(map->taken);
    free(map->segments);
    free(map);
}

void segment_set_cap(struct segment_map *map, uint64_t cap_bytes) {
    map->options.cap_bytes = cap_bytes;
}

/* ---- slots ------------------------------------------------------------------------------------------------------- */

static bool has_slot(const struct segment_map *map, enum kv_group group, uint32_t slot) {
    return slot < (uint64_t)map->n_slots[group] * map->options.n_segments_max &&
           map->segments[slot / map->n_slots[group]].group == group;
}

/* The segment has a free slot: the first of the lowest free window, or of the longest run. */
static uint32_t begin_in(const struct segment_map *map, uint32_t segment) {
    const uint64_t *taken = taken_of(map, segment);
    uint32_t n = map->n_slots[map->segments[segment].group], longest = 0, ret_index = NONE;

    for (uint32_t i = 0; i + WINDOW_SLOTS <= n; i += WINDOW_SLOTS)
        if ((uint32_t)(taken[i / WORD_BITS] >> i % WORD_BITS) == 0)
            return i;
    for (uint32_t i = bit_next(taken, n, 0, false); i < n;) {
        uint32_t end = bit_next(taken, n, i, true);

        if (end - i > longest) {
            longest = end - i;
            ret_index = i;
        }
        i = bit_next(taken, n, end, false);
    }
    assert(ret_index != NONE);
    return ret_index;
}

static bool fits(const struct segment_map *map, uint32_t n_more) {
    uint32_t n_files = map->options.n_segments_max - map->counts.n_in_state[SEGMENT_ABSENT];

    return ((uint64_t)n_files + n_more) * map->options.segment_bytes <= map->options.cap_bytes;
}

static bool may_prepare(const struct segment_map *map, enum kv_group group) {
    const uint32_t *in_state = map->counts.group[group].n_in_state;
    uint64_t n = UINT64_C(1) + in_state[SEGMENT_PREPARING] + in_state[SEGMENT_SCANNING] + in_state[SEGMENT_BOUND];
    uint32_t n_idle = 0;

    for (int g = 0; g < KV_GROUP_N; g++)
        n_idle += g != (int)group ? map->counts.group[g].n_idle : 0;
    if (n * map->options.segment_bytes > map->options.group[group].cap_bytes)
        return false;
    if (map->counts.n_in_state[SEGMENT_EMPTY] > 0 || n_idle > 0)
        return fits(map, 0);
    return map->counts.n_in_state[SEGMENT_ABSENT] > 0 && fits(map, 1);
}

int segment_take(struct segment_map *map, enum kv_group group, uint32_t near, uint32_t *ret_slot) {
    const uint32_t *in_state = map->counts.group[group].n_in_state;
    uint32_t n = map->n_slots[group], segment = NONE, index;

    if (n == 0)
        return SEGMENT_E_FULL;
    if (near != KV_NO_SLOT && has_slot(map, group, near) && bit_get(map->open[group], near / n))
        segment = near / n;
    if (segment != NONE && near % n + 1 < n && !bit_get(taken_of(map, segment), near % n + 1)) {
        index = near % n + 1;
    } else {
        if (segment == NONE)
            segment = bit_next(map->open[group], map->options.n_segments_max, 0, true);
        if (segment == map->options.n_segments_max) {
            if (in_state[SEGMENT_PREPARING] > 0)
                return SEGMENT_E_BUSY;
            if (may_prepare(map, group))
                return SEGMENT_E_NEEDS_SEGMENT;
            return in_state[SEGMENT_SCANNING] > 0 ? SEGMENT_E_BUSY : SEGMENT_E_FULL;
        }
        index = begin_in(map, segment);
    }
    put_taken(map, segment, index, true);
    *ret_slot = segment * n + index;
    return 0;
}

void segment_give(struct segment_map *map, enum kv_group group, uint32_t slot) {
    assert(segment_is_taken(map, group, slot));
    put_taken(map, slot / map->n_slots[group], slot % map->n_slots[group], false);
}

bool segment_is_taken(const struct segment_map *map, enum kv_group group, uint32_t slot) {
    uint32_t n = map->n_slots[group];

    return n > 0 && has_slot(map, group, slot) && bit_get(taken_of(map, slot / n), slot % n);
}

void segment_locate(const struct segment_map *map, enum kv_group group, uint32_t slot, uint32_t *ret_segment,
                    uint64_t *ret_offset) {
    uint32_t n = map->n_slots[group];

    assert(n > 0 && slot / n < map->options.n_segments_max);
    *ret_segment = slot / n;
    *ret_offset = map->options.first_offset + (uint64_t)(slot % n) * map->options.group[group].slot_bytes;
}

/* ---- segments ---------------------------------------------------------------------------------------------------- */

static uint32_t first_in_state(const struct segment_map *map, enum segment_state state) {
    uint32_t s = 0;

    while (map->segments[s].state != state)
        s++;
    return s;
}

static uint32_t first_idle(const struct segment_map *map, enum kv_group not_of) {
    for (uint32_t s = 0; s < map->options.n_segments_max; s++) {
        const struct segment *segment = &map->segments[s];

        if (segment->state == SEGMENT_BOUND && segment->n_taken == 0 && segment->group != not_of)
            return s;
    }
    return NONE;
}

int segment_prepare(struct segment_map *map, enum kv_group group, uint32_t *ret_segment) {
    uint32_t segment;

    if (map->counts.group[group].n_in_state[SEGMENT_PREPARING] > 0)
        return SEGMENT_E_BUSY;
    if (map->n_slots[group] == 0 || !may_prepare(map, group))
        return SEGMENT_E_FULL;
    if (map->counts.n_in_state[SEGMENT_EMPTY] > 0)
        segment = first_in_state(map, SEGMENT_EMPTY);
    else
        segment = first_idle(map, group);
    if (segment == NONE)
        segment = first_in_state(map, SEGMENT_ABSENT);
    put_carved(map, segment, SEGMENT_PREPARING, group);
    *ret_segment = segment;
    return 0;
}

void segment_ready(struct segment_map *map, uint32_t segment) {
    enum segment_state state = segment_state(map, segment);

    assert(state == SEGMENT_PREPARING || state == SEGMENT_SCANNING);
    put_state(map, segment, SEGMENT_BOUND);
}

void segment_failed(struct segment_map *map, uint32_t segment, bool has_file) {
    assert(segment_state(map, segment) == SEGMENT_PREPARING);
    put_unbound(map, segment, has_file ? SEGMENT_EMPTY : SEGMENT_ABSENT);
}

void segment_found(struct segment_map *map, uint32_t segment, enum kv_group group) {
    assert(segment_state(map, segment) == SEGMENT_ABSENT);
    put_carved(map, segment, SEGMENT_SCANNING, group);
}

void segment_found_empty(struct segment_map *map, uint32_t segment) {
    assert(segment_state(map, segment) == SEGMENT_ABSENT);
    put_unbound(map, segment, SEGMENT_EMPTY);
}

void segment_found_foreign(struct segment_map *map, uint32_t segment) {
    assert(segment_state(map, segment) == SEGMENT_ABSENT);
    put_unbound(map, segment, SEGMENT_FOREIGN);
}

void segment_mark_taken(struct segment_map *map, enum kv_group group, uint32_t slot) {
    assert(map->n_slots[group] > 0 && has_slot(map, group, slot));
    assert(segment_state(map, slot / map->n_slots[group]) == SEGMENT_SCANNING);
    put_taken(map, slot / map->n_slots[group], slot % map->n_slots[group], true);
}

void segment_reclaim(struct segment_map *map, uint32_t segment) {
    assert(segment_state(map, segment) == SEGMENT_FOREIGN);
    put_state(map, segment, SEGMENT_EMPTY);
}

void segment_retire(struct segment_map *map, uint32_t segment) {
    enum segment_state state = segment_state(map, segment);

    assert(state != SEGMENT_ABSENT && state != SEGMENT_PREPARING);
    put_state(map, segment, SEGMENT_RETIRED);
}

void segment_removed(struct segment_map *map, uint32_t segment) {
    assert(segment_state(map, segment) == SEGMENT_RETIRED);
    put_unbound(map, segment, SEGMENT_ABSENT);
}

static uint64_t n_of(const struct segment_map *map, enum kv_group group) {
    const uint32_t *in_state = map->counts.group[group].n_in_state;

    return (uint64_t)in_state[SEGMENT_PREPARING] + in_state[SEGMENT_SCANNING] + in_state[SEGMENT_BOUND];
}

static bool has_too_many(const struct segment_map *map, enum kv_group group) {
    return n_of(map, group) * map->options.segment_bytes > map->options.group[group].cap_bytes;
}

/* The bound segment of one of these groups with the fewest taken slots, or NONE. */
static uint32_t least_of(const struct segment_map *map, const bool is_asked[KV_GROUP_N]) {
    uint32_t least = NONE;

    for (uint32_t s = 0; s < map->options.n_segments_max; s++) {
        const struct segment *segment = &map->segments[s];

        if (segment->state == SEGMENT_BOUND && is_asked[segment->group] &&
            (least == NONE || segment->n_taken < map->segments[least].n_taken))
            least = s;
    }
    return least;
}

bool segment_surplus(const struct segment_map *map, uint32_t *ret_segment) {
    const uint32_t *in_state = map->counts.n_in_state;
    uint64_t n = (uint64_t)map->options.n_segments_max - in_state[SEGMENT_ABSENT] - in_state[SEGMENT_RETIRED];
    bool is_over[KV_GROUP_N], is_any[KV_GROUP_N];
    uint32_t least;

    if (n * map->options.segment_bytes <= map->options.cap_bytes)
        return false;
    if (in_state[SEGMENT_EMPTY] > 0) {
        *ret_segment = first_in_state(map, SEGMENT_EMPTY);
        return true;
    }
    for (int g = 0; g < KV_GROUP_N; g++) {
        is_over[g] = has_too_many(map, (enum kv_group)g);
        is_any[g] = true;
    }
    least = least_of(map, is_over);
    if (least == NONE)
        least = least_of(map, is_any);
    if (least == NONE) /* all are in preparation or scanned: later */
        return false;
    *ret_segment = least;
    return true;
}

bool segment_excess(const struct segment_map *map, enum kv_group group, uint32_t *ret_segment) {
    bool is_asked[KV_GROUP_N];
    uint32_t least;

    if ((n_of(map, group) + 1) * map->options.segment_bytes > map->options.group[group].cap_bytes)
        return false;
    for (int g = 0; g < KV_GROUP_N; g++)
        is_asked[g] = g != (int)group && (has_too_many(map, (enum kv_group)g) ||
                                          (n_of(map, group) == 0 && n_of(map, (enum kv_group)g) > 1));
    least = least_of(map, is_asked);
    if (least == NONE)
        return false;
    *ret_segment = least;
    return true;
}

enum segment_state segment_state(const struct segment_map *map, uint32_t segment) {
    assert(segment < map->options.n_segments_max);
    return map->segments[segment].state;
}

uint32_t segment_n_taken(const struct segment_map *map, uint32_t segment) {
    assert(segment < map->options.n_segments_max);
    return map->segments[segment].n_taken;
}

uint32_t segment_slots(const struct segment_map *map, uint32_t segment, enum kv_group *ret_group,
                       uint32_t *ret_first_slot) {
    enum segment_state state = segment_state(map, segment);
    enum kv_group group = map->segments[segment].group;

    if (group == KV_GROUP_N || state == SEGMENT_PREPARING)
        return 0;
    *ret_group = group;
    *ret_first_slot = segment * map->n_slots[group];
    return map->n_slots[group];
}

/* ---- looking ----------------------------------------------------------------------------------------------------- */

void segment_stats(const struct segment_map *map, struct segment_stats *ret_stats) {
    const struct counts *counts = &map->counts;
    struct segment_stats stats = {.cap_bytes = map->options.cap_bytes};

    memcpy(stats.n_segments, counts->n_in_state, sizeof stats.n_segments);
    stats.bytes =
        (uint64_t)(map->options.n_segments_max - counts->n_in_state[SEGMENT_ABSENT]) * map->options.segment_bytes;
    for (int g = 0; g < KV_GROUP_N; g++) {
        const uint32_t *in_state = counts->group[g].n_in_state;

        stats.group[g] = (struct segment_group_stats){
            .n_segments = in_state[SEGMENT_BOUND],
            .n_slots = in_state[SEGMENT_BOUND] * map->n_slots[g],
            .n_taken = counts->group[g].n_taken,
            .n_preparing = in_state[SEGMENT_PREPARING],
            .n_scanning = in_state[SEGMENT_SCANNING],
            .n_taken_elsewhere = counts->group[g].n_taken_elsewhere,
        };
    }
    *ret_stats = stats;
}

static const char *check_segment(const struct segment_map *map, uint32_t s) {
    const struct segment *segment = &map->segments[s];
    bool has_slots = segment->state == SEGMENT_PREPARING || segment->state == SEGMENT_SCANNING ||
                     segment->state == SEGMENT_BOUND || (segment->state == SEGMENT_RETIRED && segment->n_taken > 0);
    uint32_t n_slots = segment->group == KV_GROUP_N ? 0 : map->n_slots[segment->group], n_taken = 0;

    if (has_slots && n_slots == 0)
        return "a segment with slots belongs to no group";
    if (segment->group != KV_GROUP_N && !has_slots && segment->state != SEGMENT_RETIRED)
        return "a segment without slots belongs to a group";
    for (uint32_t i = 0; i < map->n_words * WORD_BITS && n_slots > 0; i++) {
        bool is_taken = bit_get(taken_of(map, s), i);

        n_taken += i < n_slots && is_taken;
        if (i >= n_slots && !is_taken)
            return "there are slots beyond the end of a segment";
    }
    if (n_taken != segment->n_taken)
        return "the taken slots of a segment do not add up";
    if (segment->state == SEGMENT_PREPARING && n_taken > 0)
        return "a slot is taken in a segment that is not ready";
    for (int g = 0; g < KV_GROUP_N; g++) {
        bool is_open = segment->state == SEGMENT_BOUND && (int)segment->group == g && n_taken < n_slots;

        if (bit_get(map->open[g], s) != is_open)
            return "a segment is listed as open and is not, or the other way round";
    }
    return NULL;
}

const char *segment_check(const struct segment_map *map) {
    struct counts counts = {0};

    for (uint32_t s = 0; s < map->options.n_segments_max; s++) {
        const char *wrong = check_segment(map, s);

        if (wrong != NULL)
            return wrong;
        count(&map->segments[s], &counts, 1);
    }
    return memcmp(&counts, &map->counts, sizeof counts) == 0 ? NULL : "the counts are not those of the segments";
}
