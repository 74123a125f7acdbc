/* prefetch: pages from below are brought to the device before anybody asks for them: session.resume, cache.lookup. They
 * take at most a quarter of the restores that may be on their way, and wait for each other. */
#pragma once
#include "errand.h"
#include "key.h"

enum { PREFETCH_E_NONE = 1 /* nothing lies below that would be used */, PREFETCH_E_BUSY /* many wait already */ };

struct prefetch;

/* Of a prompt of n_pages pages. keys and tokens are copied. conn: with a request, which it takes over and answers when they
 * are there, by `answer`; NULL: nobody waits. On errors, also -ENOMEM, nothing has happened. */
int prefetch_start(struct service *service, const struct kv_key *keys, const int32_t *tokens, int n_pages,
                   struct conn *conn, struct request *request, void (*answer)(struct errand *errand));
