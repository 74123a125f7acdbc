/* pages: where the K/V and states of one running seq lie: its rows of the tables, what it holds of the store's index and
 * what is its own. Turns a hit into page tables, grows them, lets sliding pages go and publishes what is committed. Knows
 * neither requests nor plans: copies that a change needs are appended to a list in stream order.
 *
 * A seq that streams keeps a part of its target pages in host memory: [first_streamed, end_streamed). They were its own,
 * complete and committed, and are nobody else's there either. */
#pragma once
#include "lease.h"
#include "residency.h"
#include "restore.h"
#include "shelf.h"
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
    uint32_t restored;            /* state slot of a restore point that is on its way here, or KV_NO_SLOT */
    int n_restored, n_handed;     /* pages before it; copies that bring all */
    uint32_t live, rolling, held; /* state slots; held: the restore point taken last, or KV_NO_SLOT */
    int held_tokens;              /* what it is the state after */

    struct kv_shelf *shelf; /* NULL: no seq streams */
    struct residency residency;
    bool is_large; /* it may come to stream: what it may then have to move is not published */
    bool streams;
    int first_streamed, end_streamed;
    int first_steered; /* where first_streamed began: what lies between the two came back, and may go again */
    enum { PAGES_STILL, PAGES_MOVE_IN, PAGES_MOVE_OUT } move; /* of one page, on its way */
    uint32_t move_record, move_slot;                          /* what it leaves, to be given back then */
    const void **streamed;                                    /* [n_pages_max] where the bytes of those pages lie */
    uint32_t *streamed_records; /* [n_pages_max] of the shelf: reserved, and found by nobody */
};

/* A prompt's identity: what the index is asked with. */
struct seq_keys {
    const struct kv_key *keys; /* of pages [0, n_pages) */
    const int32_t *tokens;     /* [n_pages * 64] */
    int n_pages;
    uint32_t uid; /* whose they are */
};

int pages_open(struct seq_pages *pages, struct kv_store *store, const struct tables *tables, int slot,
               int sliding_window);
/* Seqs of this place may stream: into slots of the shelf, through the streamer of the tables. -ENOMEM. */
int pages_open_streaming(struct seq_pages *pages, struct kv_shelf *shelf, struct residency residency);
void pages_close(struct seq_pages *pages);

/* Takes states and whatever the index has of keys (none: n_pages 0). The copies set up tables and the live state; the
 * restore point is held until pages_restored(). KV_STORE_E_FULL: no state slots; nothing is taken. is_large: keys are of
 * residency.head pages at most. */
int pages_begin(struct seq_pages *pages, const struct seq_keys *keys, bool is_large, struct device_copies *copies,
                struct kv_match *ret_match);
void pages_restored(struct seq_pages *pages); /* the copies of pages_begin are done */

/* The same with what the device and host memory have together of keys: all of it, as kv_restores_lookup() found. What the
 * device lacks is the seq's own until it is published, and to be filled by pages_add_restore()'s copies before anything
 * reads it. KV_STORE_E_FULL, or as kv_restore_hand_over(): nothing has happened. */
int pages_begin_restored(struct seq_pages *pages, struct kv_restores *restores, const struct seq_keys *keys,
                         bool is_large, struct device_copies *copies, struct kv_match *ret_match,
                         struct kv_restore **ret_restore);
void pages_add_restore(const struct seq_pages *pages, const struct kv_restore *restore, struct device_restore *ret);
/* The copies are done. Where one failed, all that remains is pages_end(). */
void pages_publish_restored(struct seq_pages *pages, const struct seq_keys *keys);

/* Pages of the seq's own that the index has from another seq too, and holds because this one publishes behind them. */
int pages_n_doubles(const struct seq_pages *pages);

/* From now on the seq, which is large and wants n_pages of target_full, streams. */
void pages_begin_streaming(struct seq_pages *pages, int n_pages);
/* Moves one page, if none is on its way, towards n_more pages on the device than it began with; true: one is now, with the
 * copies' plan. False: it is as wanted, or there is no room. */
bool pages_steer(struct seq_pages *pages, int n_more, struct device_copies *copies);
void pages_steered(struct seq_pages *pages); /* that plan is done; or no page is on its way */
static inline int pages_n_streamed(const struct seq_pages *pages) {
    return pages->end_streamed - pages->first_streamed;
}

/* Room for positions [0, n_tokens); len: what plans that are done have committed, which decides what the window still
 * needs and which pages may go to host memory. KV_STORE_E_FULL: the target's pool is empty, and nothing can go; what was
 * got is kept. An empty draft pool only clears has_draft. */
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
 * KV_NO_SLOT: it goes to the index or back to the pool. All of these tokens must be committed and their keys known. Of a
 * large seq only the head is published, and restore points in it. */
void pages_publish(struct seq_pages *pages, const struct seq_keys *keys, int n_tokens, uint32_t state_slot);

/* Gives everything back. No work that reads or writes these pages may be on its way. */
void pages_end(struct seq_pages *pages);
