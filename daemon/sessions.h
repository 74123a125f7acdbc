/* sessions: named token lists of users that are kept between requests. Owns the tokens and what pins their pages; knows
 * no messages. While a generation uses a session its tokens do not change, and no second one may use it. */
#pragma once
#include <stdbool.h>
#include <sys/types.h>

#include "lease.h"
#include "text.h"

struct gen;
struct sessions;

struct session {
    struct session *next;
    uid_t uid;
    char *name; /* owned */
    int32_t *tokens;
    struct kv_key *keys; /* [n / 64]: of its whole pages */
    int n, n_room;
    struct kv_key root;
    struct gen *user; /* who uses it now, or NULL */
    bool is_pinned;
    struct kv_lease pin;
};

enum { SESSIONS_E_QUOTA = 1, SESSIONS_E_NO_SPACE = 2 };

struct sessions_options {
    struct kv_store *store;
    int n_context;            /* tokens of the longest one */
    bool has_shared_prefixes; /* one namespace for all users */
    /* of all sessions together: what is pinned is lost to running requests */
    uint32_t n_pin_pages_max, n_pin_states_max; /* each pinned session holds one restore point, at its end */
};

int sessions_open(const struct sessions_options *options, struct sessions **ret_sessions);
void sessions_close(struct sessions *sessions);

struct session *sessions_find(const struct sessions *sessions, uid_t uid, struct span name); /* NULL: none */
struct session *sessions_first(const struct sessions *sessions);
int sessions_count(const struct sessions *sessions);

/* The one of that name, made if there is none. E_QUOTA: the user has n_max already. */
int sessions_make(struct sessions *sessions, uid_t uid, struct span name, int n_max, struct session **ret_session);
/* Nobody may be using it. */
void sessions_drop(struct sessions *sessions, struct session *session);
/* A second one under a new name, which must not exist, with the first n tokens. */
int sessions_fork(struct sessions *sessions, const struct session *session, struct span new_name, int n, int n_max,
                  struct session **ret_session);

/* Its tokens become the n given ones, which go on from those it has. -ENOMEM: it keeps those it has. */
int sessions_extend(struct sessions *sessions, struct session *session, const int32_t *tokens, int n);

/* What of it can be found now stays; what sessions_extend adds joins it, as far as the limits allow. E_NO_SPACE: they would
 * be exceeded. */
int sessions_pin(struct sessions *sessions, struct session *session);
void sessions_unpin(struct sessions *sessions, struct session *session);

/* The namespace of a user: whose pages his are, and the root of their keys. */
uint32_t sessions_namespace(const struct sessions *sessions, uid_t uid);
int sessions_root(const struct sessions *sessions, uid_t uid, struct kv_key *ret_root);
