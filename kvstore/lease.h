/* lease: which pages of the index a seq needs. Holds pins on the pages [0, n_pages) of one token list, in order; what it
 * pins stays where it is until the lease lets go of it. Pages that a seq fills itself enter the lease by being published.
 *
 * Knows nothing of private slots: a seq owns those until a publish takes them. Allocates in init only, and does not move
 * between init and deinit: the store knows its address. */
#pragma once
#include "store.h"

struct kv_lease {
    struct kv_store *store;
    struct kv_lease *prev, *next; /* all leases of the store */
    uint32_t *records;            /* [n_pages_max] */
    uint8_t *pinned;              /* [n_pages_max] bit g: the page's slot of group g */
    uint32_t n_pages, n_pages_max;
    uint32_t uid;        /* whose the pages are that enter the index through it */
    uint32_t state_page; /* page at whose end the pinned restore point lies; UINT32_MAX: none */
};

int kv_lease_init(struct kv_lease *lease, struct kv_store *store, uint32_t n_pages_max); /* -ENOMEM */
void kv_lease_deinit(struct kv_lease *lease); /* releases it; fine for a zeroed one */

/* The slot the lease pins, or KV_NO_SLOT. For a page whose private slots were not taken this is the index's slot, with
 * the same content. */
uint32_t kv_lease_slot(const struct kv_lease *lease, enum kv_group group, uint32_t page_idx);

/* Pins the restore point at the end of the pages that the lease holds, if the index has it. */
void kv_lease_hold_state(struct kv_lease *lease);
void kv_lease_drop_state(struct kv_lease *lease); /* the restore point was copied; or there is none */
void kv_lease_drop_sliding(struct kv_lease *lease, uint32_t page_idx); /* it left the window; or is not pinned */
void kv_lease_release(struct kv_lease *lease); /* all; the lease is empty and can be used again */

/* For an empty lease: the target pages that the index has of this chain, as far as they go, with or without a restore
 * point. Returns how many pages that are. */
uint32_t kv_lease_hold_prefix(struct kv_lease *lease, const struct kv_key *keys, const int32_t *tokens,
                              uint32_t n_pages);

/* Pins what the index has of the drafter's pages among those that the lease holds: draft_full from first_page on,
 * draft_sliding from first_sliding on. */
void kv_lease_hold_drafts(struct kv_lease *lease, uint32_t first_page, uint32_t first_sliding);

/* For an empty lease: all that the other one pins. That one is empty then. */
void kv_lease_take_over(struct kv_lease *lease, struct kv_lease *from);

/* For an empty lease: everything the index has of the first n_pages pages of the other one, and the restore point at their
 * end if there is one. */
void kv_lease_hold_same(struct kv_lease *lease, const struct kv_lease *other, uint32_t n_pages);

/* Makes the next page findable and pins it: page_idx is the number of pages held so far, key and tokens are the page's.
 * slots: KV_NO_SLOT where the seq has none or where rows of the page were not written (a draft context that starts inside
 * it); target_full must be there; target_state has a function of its own. A slot that the index lacks moves into it,
 * pinned by the lease: ret_taken. If it has one already, the seq's own stays private, and the seq goes on using it.
 * E_FULL: no record is free and none can be evicted; nothing has happened. */
int kv_lease_publish_page(struct kv_lease *lease, uint32_t page_idx, const struct kv_key *key,
                          const int32_t tokens[PAGE_TOKENS], const uint32_t slots[KV_GROUP_N],
                          bool ret_taken[KV_GROUP_N]);

/* Makes the state after n_pages * PAGE_TOKENS tokens a restore point; the lease holds that many pages or more. It is not
 * pinned. ret_taken false: there is one already, and the slot stays private. */
void kv_lease_publish_state(struct kv_lease *lease, uint32_t n_pages, uint32_t slot, bool *ret_taken);
