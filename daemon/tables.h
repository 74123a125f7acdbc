/* tables: what the passes read of running seqs, in device memory: control blocks, page tables, state slot numbers, the
 * penalties' tables. Beside each lies a mirror in pinned memory, from which stream-ordered copies are made; an entry of a
 * mirror changes only while no copy of it is on its way. Knows no policy: which page a seq gets is decided elsewhere. */
#pragma once
#include "device_thread.h"
#include "devmem.h"

struct tables {
    struct devmem mem;
    struct model_space view;    /* of device memory */
    int n_slots, n_pages_max;   /* places for seqs; pages of the longest one */
    int32_t *pages[KV_GROUP_N]; /* mirrors: [n_slots, n_pages_max]; NULL where the group does not exist */
    int32_t *live, *rolling;    /* [n_slots] */
    struct seq_ctl *ctl;        /* [n_slots] as last admitted */
    int32_t *counts, *bias_id;  /* [n_slots, vocab], [n_slots, SEQ_BIAS_MAX] */
    float *bias;                /* [n_slots, SEQ_BIAS_MAX] */
    const void *zero_state;     /* device memory: the state after no token */
};

/* arenas[group]: the store's memory of the group. 0, or -ENOMEM with nothing kept. Blocks: start-up only. */
int tables_open(struct tables *tables, const struct backend *backend, struct device *device, struct stream *load,
                const struct model_info *info, void *const arenas[KV_GROUP_N], int n_slots, int n_pages_max);
void tables_close(struct tables *tables);

static inline int32_t *tables_pages(const struct tables *tables, enum kv_group group, int slot) {
    return tables->pages[group] + (size_t)slot * (size_t)tables->n_pages_max;
}
void *tables_state(const struct tables *tables, uint32_t state_slot);

/* Each appends the copy that brings the device what the mirror now says. */
void tables_push_pages(const struct tables *tables, struct device_copies *copies, enum kv_group group, int slot,
                       int first_page, int n_pages);
void tables_push_states(const struct tables *tables, struct device_copies *copies, int slot); /* live and rolling */
void tables_push_ctl(const struct tables *tables, struct device_copies *copies, int slot);
void tables_push_counts(const struct tables *tables, struct device_copies *copies, int slot);
void tables_push_bias(const struct tables *tables, struct device_copies *copies, int slot, int n_bias);

void device_copies_add(struct device_copies *copies, void *dst, const void *src, size_t bytes);
