/* restore: pages that lie below come back to the device before a request begins. A restore takes device slots for all that
 * is missing, brings what lies on disk onto the shelf and from there up, in order and side by side, and when everything is
 * there publishes it as if it had just been computed: all or nothing. What passes through the shelf may leave it at once,
 * so that a chain longer than the shelf comes back too. Its lease holds the result until the caller has matched it, and only
 * then ends. Readings and copies are given out in turns that are fair between users: each one goes to the user who has least
 * on the way.
 *
 *     start --> COMING --all copied--> READY --end--> gone
 *                  '---something failed--> FAILED --end--> gone
 *
 * Where all of it lies on the shelf, the caller may copy it himself, in whatever order serves what he computes meanwhile:
 *
 *     hand_over --> HANDED --[copied]--> end--> gone */
#pragma once
#include "copier.h"
#include "lease.h"
#include "shelf.h"
#include "vault.h"

struct kv_restore;  /* one */
struct kv_restores; /* all */

/* Where the time of a restore goes. Each moment, from its start until all is on the device, counts for the first of these
 * stages, which are in the order of the way up, that any page of it is in; what goes on behind it at that moment costs
 * nothing. So the stages add up to the whole. */
enum kv_restore_stage {
    KV_RESTORE_READING,  /* from disk: asked for, and not home */
    KV_RESTORE_CHECKING, /* home, and not yet known to be right */
    KV_RESTORE_COPYING,  /* to the device; if the caller copies: until he says that he has */
    KV_RESTORE_WAITING,  /* in none: for a slot of the shelf, for its turn, for a disk that is being tried */
    KV_RESTORE_STAGE_N
};

enum kv_restore_why { KV_RESTORE_REQUEST, KV_RESTORE_PREFETCH };

/* What became of one. */
struct kv_restored {
    enum kv_restore_why why;
    bool was_handed;                 /* the caller copied */
    uint32_t uid;                    /* whose it is */
    uint32_t n_tokens;               /* of the prefix */
    uint32_t n_copies, n_disk_pages; /* slots filled on the device; of them, read from disk first */
    uint64_t bytes;                  /* of these slots */
    uint64_t us, stage_us[KV_RESTORE_STAGE_N];
    int result;
};

enum { KV_RESTORE_E_BUSY = 1, KV_RESTORE_E_FULL = 2, KV_RESTORE_E_ON_DISK = 3 };

struct kv_restores_options {
    struct kv_store *store;
    struct kv_shelf *shelf;
    struct kv_copier copier;
    uint64_t (*now_us)(void); /* the vault's clock */
    uint32_t n_restores;      /* at a time */
    uint32_t n_pages_max;     /* of a chain */
};

int kv_restores_open(const struct kv_restores_options *options, struct kv_restores **ret_restores);
void kv_restores_close(struct kv_restores *restores);                             /* none is on its way */
void kv_restores_set_vault(struct kv_restores *restores, struct kv_vault *vault); /* NULL: nothing lies further down */

/* Is told of each that ends, before who asked for it. NULL: nobody is. */
void kv_restores_set_listener(struct kv_restores *restores,
                              void (*on_ended)(void *user, const struct kv_restored *restored), void *user);

/* Tokens, multiples of PAGE_TOKENS. */
struct kv_found {
    uint32_t n_tokens;        /* what a prompt of these pages finds on the device and below together */
    uint32_t n_device_tokens; /* and on the device alone, as kv_store_lookup() would */
    uint32_t n_disk_tokens;   /* of those beyond: whose pages only the disk has */
    bool is_coming;           /* another restore brings what this one would end with */
    bool is_incomplete;       /* less than was asked for, and the disk does not know yet all that it holds */
};
/* By the keys alone, so that it costs little, asked often: who takes what was found compares tokens. */
void kv_restores_lookup(const struct kv_restores *restores, const struct kv_key *keys, uint32_t n_pages,
                        struct kv_found *ret_found);

/* Begins to bring n_pages pages and the restore point at their end, as kv_restores_lookup() found them. keys and tokens
 * stay as they are until the end. E_BUSY: as many are on their way as may be, the last of them for a user who has no other; E_FULL: the device has no slots for it.
 * Then nothing has happened. Else on_done(user, result) comes once, never from inside: 0, or why it failed. */
int kv_restore_start(struct kv_restores *restores, const struct kv_key *keys, const int32_t *tokens, uint32_t n_pages,
                     enum kv_restore_why why, void (*on_done)(void *user, int result), void *user,
                     struct kv_restore **ret_restore);
/* The same, but the caller copies. What is missing on the device is kv_restore_handed(0), ... (n - 1), by page, the restore
 * point among it; the slots are the caller's, private, and what belongs into them stays where it is until the end. lease,
 * which is empty, then holds the pages that the device has. E_ON_DISK: some of it lies there; nothing has happened. */
struct kv_handover {
    uint32_t n;
    uint32_t n_held;           /* pages that the lease holds: the first ones */
    uint32_t draft_valid_from; /* as in struct kv_match, when all is there */
};
struct kv_handed {
    enum kv_group group;
    uint32_t page, slot;
    struct kv_transfer transfer; /* that fills it */
};
int kv_restore_hand_over(struct kv_restores *restores, const struct kv_key *keys, const int32_t *tokens,
                         uint32_t n_pages, struct kv_lease *lease, struct kv_handover *ret_handover,
                         struct kv_restore **ret_restore);
struct kv_handed kv_restore_handed(const struct kv_restore *restore, uint32_t i);
void kv_restore_copied(struct kv_restore *restore, int result); /* all of it, or not; then comes the end */

/* Gives up what is not there yet: on_done(-ECANCELED) comes when what is on its way has come home. */
void kv_restore_cancel(struct kv_restore *restore);
/* How much of it is on the device already, from 0 to 1. */
double kv_restore_progress(const struct kv_restore *restore);
uint32_t kv_restore_n_pages(const struct kv_restore *restore); /* that it holds once it is READY */
void kv_restore_end(struct kv_restore *restore); /* after on_done; one that was handed over: at any time */

/* Once per turn of the loop: those that waited for room on the shelf or for the disk go on. */
bool kv_restores_turn(struct kv_restores *restores); /* true: some ended */

struct kv_restores_stats {
    uint64_t n_done, n_failed, n_copies, bytes; /* copies: to the device */
    uint64_t n_disk_pages;                      /* of them, read from disk first */
    uint64_t stage_us[KV_RESTORE_STAGE_N];      /* of those that ended */
    uint32_t n_now;
    uint32_t n_hungry; /* of them, that would read more side by side, if they were given it */
};
void kv_restores_stats(const struct kv_restores *restores, struct kv_restores_stats *ret_stats);

/* NULL, or what is wrong. For tests. */
const char *kv_restores_check(const struct kv_restores *restores);
