/* store: the pages of all groups and the index of what they hold. What daemon/ sees, with lease.h and key.h.
 *
 * A slot is free, private (taken by a seq that fills it), or in the index (published: immutable, found by its key, and
 * evicted when it is the longest unused and no lease needs it). Each group has an arena and a pool of its own, so groups
 * never compete. Slots are numbers; their bytes are written and read by the device only, and nothing here waits for it:
 *
 *   - publish a slot when the device work that fills it is done, or is ordered before all that may read it;
 *   - release a pin, or give a slot, when the work that reads it is done, or is ordered before all that may write it.
 *
 * One thread owns a store and its leases; kv_store_root() alone may be called from any. Allocates in open and in
 * kv_lease_init() only. */
#pragma once
#include "key.h"
#include "layout.h"

struct kv_lease;
struct kv_share;
struct kv_store;

enum { KV_STORE_E_FULL = 1 };

struct kv_store_options {
    const struct backend *backend;
    struct device *device;
    struct {
        size_t slot_bytes;
        uint32_t n_slots; /* with the null page; 0: the group does not exist. Both target groups must exist */
    } group[KV_GROUP_N];
    uint32_t sliding_window_tokens; /* of draft_sliding, > 0 if it exists */
    uint32_t share_percent; /* of a group's slots that each user keeps while others have more; 0: there are no shares */
    uint32_t n_records_max; /* pages of the index; as many as target_full has slots are always enough */
    uint8_t fingerprint[KV_KEY_BYTES], secret[KV_KEY_BYTES];
};

/* -EINVAL for options that cannot work, -ENOMEM, or what the backend says. */
int kv_store_open(const struct kv_store_options *options, struct kv_store **ret_store);

/* All leases are deinitialised and all private slots given before: asserts that every slot is home. NULL is fine. */
void kv_store_close(struct kv_store *store);

/* Slot s lies at s * slot_bytes; NULL if the group does not exist. */
void *kv_store_arena(const struct kv_store *store, enum kv_group group);

/* The root of a namespace: a user, or any constant for one that users share. Any thread. -EIO. */
int kv_store_root(const struct kv_store *store, uint32_t uid, struct kv_key *ret_root);

/* ---- private slots ---- */

/* A slot of unspecified content. If none is free, what the index needs least in this group leaves it (of who has more than his
 * share, if anybody has), and with a target page its restore point and draft pages. E_FULL: all slots are private or pinned. */
int kv_store_take(struct kv_store *store, enum kv_group group, uint32_t *ret_slot);
void kv_store_give(struct kv_store *store, enum kv_group group, uint32_t slot);

/* How many kv_store_take() would succeed now; exact. */
uint32_t kv_store_n_available(const struct kv_store *store, enum kv_group group);

/* ---- hits ---- */

struct kv_match {
    uint32_t n_tokens;         /* b: a multiple of PAGE_TOKENS; 0: no hit */
    uint32_t n_full_tokens;    /* how far target pages match, with or without a restore point; >= b */
    uint32_t state_slot;       /* the restore point at b; KV_NO_SLOT if b is 0 */
    uint32_t draft_valid_from; /* multiple of PAGE_TOKENS in [0, b]: where the draft context starts; b: there is none.
                                  From there to b every draft group that exists has what its retention asks for:
                                  draft_full all pages, draft_sliding those of the window before b */
};

/* What a prompt of these pages finds: keys [n_pages], tokens [n_pages * PAGE_TOKENS]. Holds and changes nothing, so it may
 * be gone at the next call. For a prompt of N tokens n_pages is at most (N - 1) / PAGE_TOKENS. */
void kv_store_lookup(const struct kv_store *store, const struct kv_key *keys, const int32_t *tokens, uint32_t n_pages,
                     struct kv_match *ret_match);

/* The same, and pins it for the lease, which must be empty: target pages [0, b), the restore point at b, and the draft
 * pages that make up draft_valid_from. */
void kv_store_match(struct kv_store *store, struct kv_lease *lease, const struct kv_key *keys, const int32_t *tokens,
                    uint32_t n_pages, struct kv_match *ret_match);

/* ---- administration ---- */

/* Drops index entries that no lease needs, the least needed first, until that many bytes of slots are free that were not
 * before, or nothing is left to drop. Returns the bytes. */
uint64_t kv_store_evict_bytes(struct kv_store *store, uint64_t n_bytes);
uint64_t kv_store_evict_all(struct kv_store *store);

/* Drops what no lease needs of these pages' chain, from its end on, up to the first page that must stay: that a lease needs,
 * or that other pages follow. Returns the bytes. */
uint64_t kv_store_evict_chain(struct kv_store *store, const struct kv_key *keys, const int32_t *tokens,
                              uint32_t n_pages);

/* The same for all pages of one namespace. ret_n_left: pages of it that a lease needs, or that such pages follow. Looks at
 * every record, and allocates a byte for each: without it, or if libcrypto fails, nothing goes and all are left. */
uint64_t kv_store_purge(struct kv_store *store, const struct kv_key *root, uint32_t *ret_n_left);

struct kv_group_stats {
    uint32_t n_slots; /* without the null page; = n_free + n_private + n_indexed */
    uint32_t n_free, n_private, n_indexed;
    uint32_t n_pinned;  /* of n_indexed; in target_state these are restore points that wait for their copy */
    uint64_t n_evicted; /* since open */
};
struct kv_store_stats {
    struct kv_group_stats group[KV_GROUP_N]; /* n_indexed of target_state: the restore points */
    uint32_t n_records, n_records_max;
    uint64_t n_matches, n_hits; /* kv_store_match() calls; those with b > 0 */
    const struct kv_share *share;
};
void kv_store_stats(const struct kv_store *store, struct kv_store_stats *ret_stats);

/* Walks everything and holds it against everything else. -EINVAL: `line` says what is wrong; -ENOMEM. For tests. */
int kv_store_check(const struct kv_store *store, char *line, size_t line_bytes);
