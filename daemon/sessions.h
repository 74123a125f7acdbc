/* sessions: named token lists of users that are kept between requests. Owns the tokens and what pins their pages; knows
 * no messages. While a generation uses a session its tokens do not change, and no second one may use it. */
#pragma once
#include <stdbool.h>
#include <sys/types.h>

#include "lease.h"
#include "text.h"

struct gen;
struct session_file;
struct sessions;

struct session {
    struct session *next;
    uid_t uid;
    char *name; /* owned */
    int32_t *tokens;
    struct kv_key *keys; /* [n / 64]: of its whole pages */
    int n, n_room;
    struct kv_key root;
    struct gen *user;          /* who uses it now, or NULL */
    struct session_file *file; /* its record's, or NULL; not owned */
    int restore_point; /* tokens at the last one that it was seen to have; while parked: at the one it was parked with */
    bool is_parked;    /* was put down, and nobody has come back to it */
    bool is_moving;    /* is being put down: nobody may use it meanwhile */
    bool is_pinned;
    struct kv_lease pin;
};

enum { SESSIONS_E_QUOTA = 1, SESSIONS_E_NO_SPACE = 2 };

struct sessions_pins {
    uint32_t n_pages, n_states;
};

struct sessions_pinned {
    struct sessions_pins has, max;
};

struct sessions_options {
    struct kv_store *store;
    int n_context;            /* tokens of the longest one */
    bool has_shared_prefixes; /* one namespace for all users */
    /* Of all sessions together, and of those of one user: what is pinned is lost to running requests. Each pinned session
     * holds one restore point, at its end. */
    struct sessions_pins pins_max, pins_per_uid_max;
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

/* Pages of it that can be looked for: all whole ones, but no more than the longest context has. */
int sessions_n_pages(const struct session *session);
/* Tokens of all sessions of a user. */
int64_t sessions_tokens(const struct sessions *sessions, uid_t uid);
/* They may become n more; n_max 0: any number. */
bool sessions_have_room(const struct sessions *sessions, uid_t uid, int64_t n, int n_max);

/* Its tokens become the n given ones, which go on from those it has. -ENOMEM: it keeps those it has. */
int sessions_extend(struct sessions *sessions, struct session *session, const int32_t *tokens, int n);

/* Lets go of what is pinned, without unpinning: what is found then is pinned again by sessions_extend() or
 * sessions_hold_again(). */
void sessions_let_go(struct sessions *sessions, struct session *session);
void sessions_hold_again(struct sessions *sessions, struct session *session);

/* What of it can be found now stays; what sessions_extend adds joins it, as far as the limits allow. They would be exceeded:
 * E_QUOTA: the user's; E_NO_SPACE: that of all. */
int sessions_pin(struct sessions *sessions, struct session *session);
struct sessions_pinned sessions_pinned(const struct sessions *sessions, uid_t uid); /* by sessions of that user */
struct sessions_pinned sessions_all_pinned(const struct sessions *sessions);
struct sessions_pins sessions_to_pin(const struct sessions *sessions,
                                     const struct session *session); /* what it would pin */
void sessions_unpin(struct sessions *sessions, struct session *session);

/* The namespace of a user: whose pages his are, and the root of their keys. */
uint32_t sessions_namespace(const struct sessions *sessions, uid_t uid);
int sessions_root(const struct sessions *sessions, uid_t uid, struct kv_key *ret_root);
