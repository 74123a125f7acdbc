/* restore: pages that lie below come back to the device before a request begins. A restore takes device slots for all that
 * is missing, copies into them, and when everything is there publishes it as if it had just been computed: all or nothing.
 * Its lease holds the result until the caller has matched it, and only then ends.
 *
 *     start --> COPYING --all copied--> READY --end--> gone
 *                  '---something failed--> FAILED --end--> gone */
#pragma once
#include "copier.h"
#include "lease.h"
#include "shelf.h"

struct kv_restore;  /* one */
struct kv_restores; /* all */

enum { KV_RESTORE_E_BUSY = 1, KV_RESTORE_E_FULL = 2 };

struct kv_restores_options {
    struct kv_store *store;
    struct kv_shelf *shelf;
    struct kv_copier copier;
    uint32_t n_restores;  /* at a time */
    uint32_t n_pages_max; /* of a chain */
};

int kv_restores_open(const struct kv_restores_options *options, struct kv_restores **ret_restores);
void kv_restores_close(struct kv_restores *restores); /* none is on its way */

/* What a prompt of these pages finds on the device and below together, and what on the device alone, as
 * kv_store_lookup() would: tokens, multiples of PAGE_TOKENS. */
uint32_t kv_restores_lookup(const struct kv_restores *restores, const struct kv_key *keys, const int32_t *tokens,
                            uint32_t n_pages, uint32_t *ret_n_device);

/* Begins to bring n_pages pages and the restore point at their end, as kv_restores_lookup() found them. keys and tokens
 * stay as they are until the end. E_BUSY: as many are on their way as may be; E_FULL: the device has no slots for it.
 * Then nothing has happened. Else on_done(user, result) comes once, never from inside: 0, or why it failed. */
int kv_restore_start(struct kv_restores *restores, const struct kv_key *keys, const int32_t *tokens, uint32_t n_pages,
                     void (*on_done)(void *user, int result), void *user, struct kv_restore **ret_restore);
uint32_t kv_restore_n_pages(const struct kv_restore *restore); /* that it holds once it is READY */
void kv_restore_end(struct kv_restore *restore);               /* after on_done */

struct kv_restores_stats {
    uint64_t n_done, n_failed, n_copies, bytes;
    uint32_t n_now;
};
void kv_restores_stats(const struct kv_restores *restores, struct kv_restores_stats *ret_stats);
