/* disk_cut: calls of a disk until its machine dies. It makes them itself, one after the other, in an order that follows from a
 * seed; after a given number of them nothing is done any more. Then what was written and not synced is cut: of every block of
 * 4 KiB the files hold what it was at its last sync, or what any write since left there. What was on its way is done, not
 * done, or done in part.
 *
 *     struct disk_cut *cut = disk_cut_new(seed, 17);
 *     options.wrap = disk_cut_wrap, options.wrap_user = cut, options.no_ring = true;
 *     ... until disk_cut_is_dead(), then the disk is closed: what is out is cancelled ...
 *     disk_cut_fall(cut, DISK_CUT_TORN);
 *
 * A sync covers what was done before it was asked for. Files that were made or removed are so for good: both are synced. */
#pragma once
#include "disk_queue.h"

struct disk_cut;

enum disk_cut_fall {
    DISK_CUT_KILL,  /* the process alone: what was done stays */
    DISK_CUT_NONE,  /* the power: nothing stays that was not synced */
    DISK_CUT_WHOLE, /* any of the writes stay */
    DISK_CUT_TORN,  /* any blocks of any writes */
    DISK_CUT_N
};

struct disk_cut *disk_cut_new(uint64_t seed, uint32_t n_calls_max); /* 0: it lives on */
void disk_cut_free(struct disk_cut *cut);                           /* after the disk is closed */
struct disk_queue *disk_cut_wrap(void *user, struct disk_queue *queue);

bool disk_cut_is_dead(const struct disk_cut *cut);
uint32_t disk_cut_n_calls(const struct disk_cut *cut); /* made so far */
/* Leaves in the folder's files what outlives the cut. The disk is closed. */
void disk_cut_fall(struct disk_cut *cut, const struct disk_folder *folder, enum disk_cut_fall fall);
