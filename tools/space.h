/* space: room for a few seqs that own all their pages from the start: what tools and tests need instead of a store.
 * Slot s lives in pages 1 + s * n_pages .. of every group, in state slot s, and rolls into state slot n_slots + s. */
#pragma once
#include "devmem.h"
#include "model.h"

struct space {
    const struct backend *backend;
    struct stream *stream; /* compute stream of all work; not owned */
    struct devmem mem;
    struct model_space view;
    int n_slots, n_pages;
    struct seq_ctl *staging; /* MEM_HOST, one ctl */
    void *zero_state;        /* MEM_HOST, one state slot */
};

/* Seqs of up to n_tokens_max positions. 0, or -ENOMEM. */
int space_open(struct space *space, const struct backend *backend, struct device *device, struct stream *stream,
               const struct model *model, int n_slots, int n_tokens_max);
void space_close(struct space *space);

/* Blocking: the slot starts as a new seq with this ctl: its state is zeroed. */
int space_admit(struct space *space, int slot, const struct seq_ctl *ctl);
/* Blocking copy of device memory. */
int space_read(struct space *space, void *dst_host, const void *src, size_t bytes);

/* Fills a batch with one seg: n_rows given ids from position pos on. Outputs: all rows, or with SEG_SAMPLE the last one, or
 * none. */
void space_fill(struct model_batch *input, int slot, const int *ids, int pos, int n_rows, int flags, bool all_outs);

/* Neutral values: greedy, no limits but the given ones, drafting allowed. */
struct seq_ctl space_ctl(int max_tokens, int context_max, const int *stop_ids, int n_stop_ids);
