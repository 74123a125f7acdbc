/* spill: published pages go down from the device to the shelf, in the background, so that leaving the device later costs
 * nothing, and from there to the disk. A job is one chain of pages with the restore point at its end; it holds its pages on
 * the device until they are copied, in batches, and checksummed. Best effort: what finds no job and no slot is counted and
 * not kept.
 *
 *     IDLE --start--> COPYING --copied--> CHECKING --next batch--> COPYING ... --nothing left--> IDLE
 *
 * A chain longer than the shelf that is to go to the disk goes through the shelf in stretches: each one is saved before the
 * next takes its place.
 *
 *     CHECKING --the stretch is on the shelf--> SAVING --the disk has it--> COPYING ... */
#pragma once
#include "copier.h"
#include "lease.h"
#include "shelf.h"
#include "vault.h"
#include "work.h"

struct kv_spill;

struct kv_spill_options {
    struct kv_store *store;
    struct kv_shelf *shelf;
    struct kv_copier copier;
    struct kv_work work;
    uint32_t n_jobs;      /* chains on their way at a time */
    uint32_t n_pages_max; /* of a chain */
};

int kv_spill_open(const struct kv_spill_options *options, struct kv_spill **ret_spill);
void kv_spill_close(struct kv_spill *spill);                             /* it is idle */
void kv_spill_set_vault(struct kv_spill *spill, struct kv_vault *vault); /* NULL: nothing goes further down */
/* Once per turn, after the vault's. True: something has moved, so that the vault wants another. */
bool kv_spill_turn(struct kv_spill *spill);

enum kv_spill_depth {
    KV_SPILL_TO_HOST,
    KV_SPILL_TO_DISK, /* and from there on to the disk, if it is worth it */
    KV_SPILL_MUST,    /* and to the disk in any case */
};

/* The first n_pages pages of the lease, and the restore point at their end, shall be below too. What is there already is
 * not copied again; what does not fit as a whole and is not to go to the disk is not copied at all. uid: whose namespace
 * they are of. */
void kv_spill_start(struct kv_spill *spill, const struct kv_lease *lease, uint32_t n_pages, uint32_t uid,
                    enum kv_spill_depth depth);
bool kv_spill_is_idle(const struct kv_spill *spill);

struct kv_spill_stats {
    uint64_t n_copies, bytes;               /* done */
    uint64_t n_no_job, n_no_slot, n_failed; /* not done: chains; copies; copies */
    uint32_t n_jobs;                        /* now */
};
void kv_spill_stats(const struct kv_spill *spill, struct kv_spill_stats *ret_stats);
