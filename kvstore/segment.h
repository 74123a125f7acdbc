/* segment: which slots of the disk are free. The disk is a number of segment files of one size; each is bound to one group
 * and carved into slots of that group's size. Slots of one chain lie one after the other where that is possible. Pure
 * accounting: files, heads of segments and slots are made, written and removed by the caller; allocates in open only.
 *
 *     ABSENT --prepare--> PREPARING --ready--> BOUND --retire--> RETIRED --removed--> ABSENT
 *     EMPTY ----prepare-----^   '--failed--> ABSENT or EMPTY
 *     BOUND, no slot taken, --prepare for another group--> PREPARING
 *     ABSENT --found--> SCANNING --ready--> BOUND;  EMPTY;  FOREIGN --reclaim--> EMPTY       at start-up
 *
 * A slot is known by its number within its group: segment * slots per segment + index. It is given back when no operation
 * is out on it any more: a segment without taken slots may get another group at once. */
#pragma once
#include "format.h"
#include "layout.h"

struct segment_map;

enum {
    SEGMENT_E_FULL = 1,
    SEGMENT_E_NEEDS_SEGMENT, /* segment_prepare() says which */
    SEGMENT_E_BUSY,          /* one is being prepared or scanned: come back when it is ready */
};

enum segment_state {
    SEGMENT_ABSENT,    /* no file */
    SEGMENT_EMPTY,     /* a file that is bound to no group */
    SEGMENT_PREPARING, /* the caller makes its file, if there is none, and writes its head */
    SEGMENT_SCANNING,  /* the caller reads its headers and marks what is taken */
    SEGMENT_BOUND,     /* slots can be taken */
    SEGMENT_FOREIGN,   /* a file that holds something else: counts, and is left alone */
    SEGMENT_RETIRED,   /* no slot is taken any more; it can be removed when all are given back */
    SEGMENT_STATE_N
};

struct segment_options {
    uint32_t n_segments_max;
    uint32_t segment_bytes;
    uint32_t first_offset; /* of slot 0 in its segment */
    uint64_t cap_bytes;    /* of all files; can be changed */
    struct {
        uint32_t slot_bytes; /* 0: no such group */
        uint64_t cap_bytes;  /* of the segments bound to it: so much it can take from the others */
    } group[KV_GROUP_N];
};

/* The size of segments for a disk tier of this size. */
uint32_t segment_bytes_for(uint64_t disk_bytes);

/* All segments are absent. -EINVAL for sizes that do not fit: a slot larger than a segment, too many slots; -ENOMEM. */
int segment_open(const struct segment_options *options, struct segment_map **ret_map);
void segment_close(struct segment_map *map); /* NULL is fine */

/* Files that lie beyond a lower cap stay until the caller retires what segment_surplus() names. */
void segment_set_cap(struct segment_map *map, uint64_t cap_bytes);

/* ---- slots ---- */

/* near: the slot of the page before, or KV_NO_SLOT. The slot after it if that is free; else one at the beginning of a run
 * of free slots, in the same segment if possible. NEEDS_SEGMENT, BUSY, FULL: the caller evicts. */
int segment_take(struct segment_map *map, enum kv_group group, uint32_t near, uint32_t *ret_slot);
void segment_give(struct segment_map *map, enum kv_group group, uint32_t slot);
bool segment_is_taken(const struct segment_map *map, enum kv_group group, uint32_t slot);

/* Where a slot lies. */
void segment_locate(const struct segment_map *map, enum kv_group group, uint32_t slot, uint32_t *ret_segment,
                    uint64_t *ret_offset);

/* ---- segments ---- */

/* The segment that the group gets next: an empty file, one that another group does not use, or a new file under the cap.
 * Also ahead of need. BUSY: it has one in preparation; FULL. */
int segment_prepare(struct segment_map *map, enum kv_group group, uint32_t *ret_segment);
void segment_ready(struct segment_map *map, uint32_t segment); /* prepared or scanned */
void segment_failed(struct segment_map *map, uint32_t segment, bool has_file);

/* At start-up, of an absent one. */
void segment_found(struct segment_map *map, uint32_t segment, enum kv_group group); /* then mark, then ready */
void segment_found_empty(struct segment_map *map, uint32_t segment);
void segment_found_foreign(struct segment_map *map, uint32_t segment);
void segment_mark_taken(struct segment_map *map, enum kv_group group, uint32_t slot); /* while it is scanned */

void segment_reclaim(struct segment_map *map, uint32_t segment); /* foreign content may be overwritten */
void segment_retire(struct segment_map *map, uint32_t segment);  /* any that has a file and is not in preparation */
void segment_removed(struct segment_map *map, uint32_t segment); /* retired, and all slots given back */

/* False: the files that are not retired fit under the cap, or no more of them can go. Else which of them shall go first;
 * never a foreign one, and none of a group that has no more than it may if another has. */
bool segment_surplus(const struct segment_map *map, uint32_t *ret_segment);

/* For a group that gets no segment: whether others have one that is due to it, because they have more than they may, or it
 * has none and they have several. The one with the fewest taken slots; when those are given back it can be prepared. */
bool segment_excess(const struct segment_map *map, enum kv_group group, uint32_t *ret_segment);

enum segment_state segment_state(const struct segment_map *map, uint32_t segment);
uint32_t segment_n_taken(const struct segment_map *map, uint32_t segment);

/* The numbers of the slots of a segment that is scanned, bound or retired from a group; 0 slots if there are none. */
uint32_t segment_slots(const struct segment_map *map, uint32_t segment, enum kv_group *ret_group,
                       uint32_t *ret_first_slot);

struct segment_group_stats {
    uint32_t n_segments;              /* bound */
    uint32_t n_slots, n_taken;        /* of those; the others are free */
    uint32_t n_preparing, n_scanning; /* segments */
    uint32_t n_taken_elsewhere;       /* in segments that are scanned or retired */
};
struct segment_stats {
    struct segment_group_stats group[KV_GROUP_N];
    uint32_t n_segments[SEGMENT_STATE_N]; /* in each state */
    uint64_t bytes, cap_bytes;            /* of all but the absent ones */
};
void segment_stats(const struct segment_map *map, struct segment_stats *ret_stats);

/* NULL, or what is wrong. For tests. */
const char *segment_check(const struct segment_map *map);
