#include "sessions.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct sessions {
    struct sessions_options options;
    struct session *first;
    int n;
    struct kv_hasher *hasher;
    struct sessions_pins pinned;
};

int sessions_open(const struct sessions_options *options, struct sessions **ret_sessions) {
    struct sessions *s = calloc(1, sizeof *s);
    int r;

    if (!s)
        return -ENOMEM;
    s->options = *options;
    r = kv_hasher_new(&s->hasher);
    if (r != 0) {
        free(s);
        return r;
    }
    *ret_sessions = s;
    return 0;
}

void sessions_close(struct sessions *s) {
    if (!s)
        return;
    while (s->first)
        sessions_drop(s, s->first);
    kv_hasher_free(s->hasher);
    free(s);
}

struct session *sessions_find(const struct sessions *s, uid_t uid, struct span name) {
    for (struct session *session = s->first; session; session = session->next)
        if (session->uid == uid && span_is(name, session->name))
            return session;
    return NULL;
}

struct session *sessions_first(const struct sessions *s) {
    return s->first;
}

int sessions_count(const struct sessions *s) {
    return s->n;
}

uint32_t sessions_namespace(const struct sessions *s, uid_t uid) {
    return s->options.has_shared_prefixes ? UINT32_MAX : uid;
}

int sessions_root(const struct sessions *s, uid_t uid, struct kv_key *ret_root) {
    /* (uid_t)-1 is no user: chown and setuid take it for "leave as it is". */
    return kv_store_root(s->options.store, sessions_namespace(s, uid), ret_root);
}

static int count_of(const struct sessions *s, uid_t uid) {
    int n = 0;

    for (const struct session *session = s->first; session; session = session->next)
        n += session->uid == uid;
    return n;
}

int64_t sessions_tokens(const struct sessions *s, uid_t uid) {
    int64_t n = 0;

    for (const struct session *session = s->first; session; session = session->next)
        n += session->uid == uid ? session->n : 0;
    return n;
}

bool sessions_have_room(const struct sessions *s, uid_t uid, int64_t n, int n_max) {
    return n_max == 0 || sessions_tokens(s, uid) + n <= n_max;
}

int sessions_n_pages(const struct session *session) {
    return min_int(session->n / PAGE_TOKENS, (int)session->pin.n_pages_max - 1); /* its last one is not a whole one */
}

static void session_free(struct session *session) {
    kv_lease_deinit(&session->pin);
    free(session->tokens);
    free(session->keys);
    free(session->name);
    free(session);
}

int sessions_make(struct sessions *s, uid_t uid, struct span name, int n_max, struct session **ret_session) {
    struct session *session = sessions_find(s, uid, name);
    int r;

    if (session) {
        *ret_session = session;
        return 0;
    }
    if (count_of(s, uid) >= n_max)
        return SESSIONS_E_QUOTA;
    session = calloc(1, sizeof *session);
    if (!session)
        return -ENOMEM;
    session->uid = uid;
    session->name = strndup(name.bytes, name.n);
    r = session->name ? sessions_root(s, uid, &session->root) : -ENOMEM;
    if (r == 0)
        r = kv_lease_init(&session->pin, s->options.store, (uint32_t)s->options.n_context / PAGE_TOKENS + 1);
    if (r != 0) {
        session_free(session);
        return r;
    }
    session->next = s->first;
    s->first = session;
    s->n++;
    *ret_session = session;
    return 0;
}

void sessions_drop(struct sessions *s, struct session *session) {
    struct session **at = &s->first;

    sessions_unpin(s, session);
    while (*at != session)
        at = &(*at)->next;
    *at = session->next;
    s->n--;
    session_free(session);
}

static int reserve(struct session *session, int n) {
    int n_room = n + n / 4 + 256;
    struct kv_key *keys;
    int32_t *tokens;

    if (n <= session->n_room)
        return 0;
    tokens = realloc(session->tokens, (size_t)n_room * sizeof *tokens);
    if (tokens)
        session->tokens = tokens;
    keys = realloc(session->keys, ((size_t)n_room / PAGE_TOKENS + 1) * sizeof *keys);
    if (keys)
        session->keys = keys;
    if (!tokens || !keys)
        return -ENOMEM;
    session->n_room = n_room;
    return 0;
}

static uint32_t min_u32(uint32_t a, uint32_t b) {
    return a < b ? a : b;
}

struct sessions_pinned sessions_pinned(const struct sessions *s, uid_t uid) {
    struct sessions_pinned pinned = {.max = s->options.pins_per_uid_max};

    for (const struct session *session = s->first; session; session = session->next) {
        if (session->uid != uid)
            continue;
        pinned.has.n_pages += session->pin.n_pages;
        pinned.has.n_states += session->pin.n_pages > 0;
    }
    return pinned;
}

struct sessions_pinned sessions_all_pinned(const struct sessions *s) {
    return (struct sessions_pinned){s->pinned, s->options.pins_max};
}

/* Pages that may be pinned yet, if they are one session's: each has a restore point at its end. */
static uint32_t n_left(struct sessions_pinned pinned) {
    return pinned.has.n_states < pinned.max.n_states ? pinned.max.n_pages - pinned.has.n_pages : 0;
}

/* What is found of the first n_pages. */
static void pin(struct sessions *s, struct session *session, uint32_t n_pages) {
    struct kv_match match;

    kv_store_match(s->options.store, &session->pin, session->keys, session->tokens, n_pages, &match);
    s->pinned.n_pages += session->pin.n_pages;
    s->pinned.n_states += session->pin.n_pages > 0;
    session->is_pinned = true;
}

void sessions_let_go(struct sessions *s, struct session *session) {
    s->pinned.n_pages -= session->pin.n_pages;
    s->pinned.n_states -= session->pin.n_pages > 0;
    kv_lease_release(&session->pin);
}

void sessions_hold_again(struct sessions *s, struct session *session) {
    uint32_t n_pages = (uint32_t)sessions_n_pages(session);

    if (!session->is_pinned)
        return;
    sessions_let_go(s, session);
    n_pages = min_u32(n_pages, n_left(sessions_pinned(s, session->uid))); /* as much as may be */
    pin(s, session, min_u32(n_pages, n_left(sessions_all_pinned(s))));
}

int sessions_extend(struct sessions *s, struct session *session, const int32_t *tokens, int n) {
    int have = session->n / PAGE_TOKENS, want = n / PAGE_TOKENS;
    int r;

    if (n == session->n) /* a copy of an empty session has no memory yet */
        return 0;
    r = reserve(session, n);
    if (r != 0)
        return r;
    memcpy(session->tokens + session->n, tokens + session->n, (size_t)(n - session->n) * sizeof *tokens);
    r = kv_key_chain(s->hasher, have == 0 ? &session->root : &session->keys[have - 1],
                     session->tokens + (size_t)have * PAGE_TOKENS, (uint32_t)(want - have), &session->keys[have]);
    if (r != 0)
        return r;
    session->n = n;
    sessions_hold_again(s, session);
    return 0;
}

int sessions_fork(struct sessions *s, const struct session *session, struct span new_name, int n, int n_max,
                  struct session **ret_session) {
    struct session *copy;
    int r = sessions_make(s, session->uid, new_name, n_max, &copy);

    if (r != 0)
        return r;
    r = sessions_extend(s, copy, session->tokens, n);
    if (r != 0) {
        sessions_drop(s, copy);
        return r;
    }
    *ret_session = copy;
    return 0;
}

struct sessions_pins sessions_to_pin(const struct sessions *s, const struct session *session) {
    struct kv_match match;

    kv_store_lookup(s->options.store, session->keys, session->tokens, (uint32_t)sessions_n_pages(session), &match);
    return (struct sessions_pins){match.n_tokens / PAGE_TOKENS, match.n_tokens > 0};
}

int sessions_pin(struct sessions *s, struct session *session) {
    uint32_t n_pages = sessions_to_pin(s, session).n_pages;

    if (session->is_pinned)
        return 0;
    if (n_pages > n_left(sessions_pinned(s, session->uid)))
        return SESSIONS_E_QUOTA;
    if (n_pages > n_left(sessions_all_pinned(s)))
        return SESSIONS_E_NO_SPACE;
    pin(s, session, (uint32_t)sessions_n_pages(session));
    return 0;
}

void sessions_unpin(struct sessions *s, struct session *session) {
    sessions_let_go(s, session);
    session->is_pinned = false;
}
