/* pages: where the K/V and states of one running seq lie: its rows of the tables, what it holds of the store's index and
 * what is its own. Turns a hit into page tables, grows them, lets sliding pages go and publishes what is committed. Knows
 * neither requests nor plans: copies that a change needs are appended to a list in stream order. */
#pragma once
#include "lease.h"
#include "store.h"
#include "tables.h"

struct seq_pages { /* one for each place, made at start */
    struct kv_store *store;
    const struct tables *tables;
    int slot;           /* its place: row of the tables */
    int sliding_window; /* tokens; 0 without such a group */
    struct kv_lease lease;
    uint8_t *own;                 /* [n_pages_max] bit per group: the page is this seq's alone */
    int n_pages[KV_GROUP_N];      /* the tables hold pages [0, n), null pages among them */
    int first_sliding;            /* pages before it have left the window */
    int n_published;              /* pages [0, n) are in the index, held by the lease */
    int draft_valid_from;         /* draft context below is masked */
    bool has_draft;               /* false once a draft pool was empty: the seq goes on without drafting */
    uint32_t live, rolling, held; /* state slots; held: the restore point taken last, or KV_NO_SLOT */
    int held_tokens;              /* what it is the state after */
};

/* A prompt's identity: what the index is asked with. */
struct seq_keys {
    const struct kv_key *keys; /* of pages [0, n_pages) */
    const int32_t *tokens;     /* [n_pages * 64] */
    int n_pages;
};

int pages_open(struct seq_pages *pages, struct kv_store *store, const struct tables *tables, int slot,
               int sliding_window);
void pages_close(struct seq_pages *pages);

/* Takes states and whatever the index has of keys (none: n_pages 0). The copies set up tables and the live state; the
 * restore point is held until pages_restored(). KV_STORE_E_FULL: no state slots; nothing is taken. */
int pages_begin(struct seq_pages *pages, const struct seq_keys *keys, struct device_copies *copies,
                struct kv_match *ret_match);
void pages_restored(struct seq_pages *pages); /* the copies of pages_begin are done */

/* Room for positions [0, n_tokens); len: the least that is committed, which decides what the window still needs.
 * KV_STORE_E_FULL: the target's pool is empty; what was got is kept. An empty draft pool only clears has_draft. */
int pages_grow(struct seq_pages *pages, int len, int n_tokens, struct device_copies *copies);

/* A restore point was written into the rolling slot: it becomes the held one, if the pool has another slot to roll into.
 * False if not: the rolling slot is then to be written again. */
bool pages_hold_rolling(struct seq_pages *pages, int n_tokens, struct device_copies *copies);

/* The same at the end of a seq, when nothing will write the rolling slot any more. */
void pages_keep_rolling(struct seq_pages *pages, int n_tokens);

/* A slot for a restore point that a copy will fill, or KV_NO_SLOT if there is none. Hand it back to pages_publish or to
 * pages_give_state. */
uint32_t pages_take_state(struct seq_pages *pages);
void pages_give_state(struct seq_pages *pages, uint32_t state_slot);

/* Makes pages up to the multiple of 64 at n_tokens findable, with the restore point there if state_slot is not
 * KV_NO_SLOT: it goes to the index or back to the pool. All of these tokens must be committed and their keys known. */
void pages_publish(struct seq_pages *pages, const struct seq_keys *keys, int n_tokens, uint32_t state_slot);

/* Gives everything back. No work that reads or writes these pages may be on its way. */
void pages_end(struct seq_pages *pages);
