/* restore_internal: the insides of restores. restore.c: what is looked for, taken, published and given back; restore_flow.c:
 * how it comes up, whose turn it is, and where the time goes. */
#pragma once
#include "restore.h"

enum {
    RESTORE_READS_MAX = 32,  /* of one restore side by side: read, or checked */
    RESTORE_BATCHES_MAX = 2, /* of all: one is copied while the next waits behind it */
};

enum restore_item_state {
    RESTORE_ON_DISK, /* pinned there */
    RESTORE_READING,
    RESTORE_ON_HOST, /* pinned there */
    RESTORE_COPYING,
    RESTORE_THERE,
};

struct restore_item { /* one page of one group, or the state */
    uint32_t page;
    uint32_t record; /* of the vault while it lies on disk, then of the shelf */
    uint32_t slot;   /* of the device, private */
    enum kv_group group;
    enum restore_item_state state;
    const void *src;
};

struct restore_reading {
    struct kv_restore *restore;
    struct kv_vault_read read;
    bool is_busy;
    uint32_t item;
};

struct kv_restore {
    struct kv_restores *restores;
    bool is_used, is_sending;
    bool is_handed; /* the caller copies */
    bool is_stuck;  /* was asked in this round, and can begin nothing now */
    int error;      /* what ends it when all is home */
    const struct kv_key *keys;
    const int32_t *tokens;
    uint32_t n_pages, n_held; /* wanted; pages that the device had */
    struct kv_lease lease;
    struct restore_item *items; /* [n_items_max], by page */
    uint32_t n_items, n_done;
    uint32_t next_read, next_copy; /* before which no item is ON_DISK, ON_HOST */
    uint32_t next_far;             /* from next_read to here none is ON_HOST */
    struct restore_reading readings[RESTORE_READS_MAX];
    struct kv_copy_batch batch;
    uint32_t batch_items[KV_COPIES_MAX];
    void (*on_done)(void *user, int result);
    void *user;
    uint64_t order;                     /* in which they began */
    uint64_t reading_bytes, copy_bytes; /* on their way: from disk, to the device */
    struct kv_restored sum;             /* so far */
    uint64_t began_us, counted_us;
};

struct kv_restores {
    struct kv_restores_options options;
    struct kv_vault *vault;
    struct kv_restore *all; /* [n_restores] */
    uint64_t n_begun;
    int n_batches; /* out */
    struct kv_restores_stats stats;
    void (*on_ended)(void *user, const struct kv_restored *restored);
    void *user;
};

struct kv_page_name restore_name(const struct kv_key *keys, const int32_t *tokens, uint32_t page);
void restore_let_go_below(struct kv_restore *restore, struct restore_item *item);
void restore_arrived(struct kv_restore *restore, struct restore_item *item); /* on the device */
/* Everything is on the device, or will not be: publishes it, or gives it back, and calls on_done. */
void restore_finish(struct kv_restore *restore, int result);

/* The time since it was last counted goes to the stage that it was in: to be called before it goes to another. */
void restore_flow_count(struct kv_restore *restore);
void restore_flow_init(struct kv_restore *restore);
/* Of all restores what can be read or copied now begins to be, in fair turns; nobody is called. */
void restore_flow_go_on(struct kv_restores *restores);
/* Ends it if it failed or has all, and nothing is on its way any more. */
void restore_flow_end(struct kv_restore *restore);
bool restore_flow_is_hungry(const struct kv_restore *restore); /* it has room for another read, and something to read */
struct kv_transfer restore_flow_transfer(const struct kv_restore *restore, const struct restore_item *item);
