/* methods_session: what users do with their sessions, but for putting them down and taking them up again: park.c. */
#include <stdlib.h>
#include <string.h>

#include "conn.h"
#include "durable.h"
#include "methods_internal.h"

static void put_session(const struct call *call, const struct session *session) {
    struct wire_out *out = call->out;

    wire_map(out, 7);
    put_cstr(out, "name", session->name);
    put_int(out, "n_tokens", session->n);
    put_int(out, "restore_point", session->restore_point);
    put_cached(out, service_find(call->service, session->keys, session->tokens, sessions_n_pages(session)));
    put_bool(out, "pinned", session->is_pinned);
    put_bool(out, "parked", session->is_parked && !session->is_moving);
    put_bool(out, "durable", durable_is(call->service, session));
}

void session_put_info(const struct call *call, const struct session *session) {
    proto_result_begin(call->out, call->request->id);
    put_session(call, session);
}

static void refuse_missing(const struct call *call, struct span name) {
    struct report report;
    enum proto_code code = durable_missing(call->service, conn_uid(call->conn), name, &report);

    refuse(call, code, report.line);
}

struct session *session_named(const struct call *call, bool to_change) {
    struct span name = {0};
    struct session *session;

    request_get_str(call->request, "name", &name);
    session = sessions_find(call->service->sessions, conn_uid(call->conn), name);
    if (!session) {
        refuse_missing(call, name);
        return NULL;
    }
    if (to_change && (session->user || session->is_moving)) {
        refuse(call, PROTO_BUSY,
               session->user ? "a request uses this session now" : "this session is being parked or resumed now");
        return NULL;
    }
    return session;
}

/* What making a session can answer. */
static void answer_made(const struct call *call, int r, struct session *session) {
    if (r == 0) {
        durable_keep(call->service, session, NULL);
        session_put_info(call, session);
    } else if (r == SESSIONS_E_QUOTA) {
        refuse(call, PROTO_QUOTA, "this user has as many sessions as limits.sessions_per_uid allows; close one");
    } else {
        refuse(call, PROTO_INTERNAL, strerror(-r));
    }
}

void session_open(const struct call *call) {
    struct sessions *sessions = call->service->sessions;
    uid_t uid = conn_uid(call->conn);
    struct session *session = NULL;
    struct span name = {0};
    struct report report;
    int r;

    request_get_str(call->request, "name", &name);
    session = sessions_find(sessions, uid, name);
    if (session) {
        session_put_info(call, session);
        return;
    }
    if (durable_missing(call->service, uid, name, &report) == PROTO_CORRUPT) { /* a new one would take its place */
        refuse(call, PROTO_CORRUPT, report.line);
        return;
    }
    r = sessions_make(sessions, uid, name, call->service->config.limits.sessions_per_uid, &session);
    answer_made(call, r, session);
}

/* ---- closing -------------------------------------------------------------------------------------------------------- */

struct closing { /* the record is on its way out */
    struct errand errand;
    struct session_wait wait;
    bool is_done;
    int result;
};

static void on_removed(struct session_wait *wait, int result) {
    struct closing *closing = container_of(wait, struct closing, wait);

    closing->is_done = true;
    closing->result = result;
}

static bool step_closing(struct errand *errand) {
    struct closing *closing = container_of(errand, struct closing, errand);
    struct report report;
    struct call call;
    int refusal;

    if (!closing->is_done)
        return false;
    if (!errand->conn)
        return true;
    call = call_of_errand(errand, &refusal);
    if (closing->result == 0) {
        begin(&call, 0);
    } else {
        report_line(
            &report,
            "the session is forgotten, but its record could not be removed: %s; it is tried again, and would be "
            "there after a restart now",
            strerror(-closing->result));
        refuse(&call, PROTO_INTERNAL, report.line);
    }
    call_answer(&call);
    return true;
}

static void free_closing(struct errand *errand) {
    free(container_of(errand, struct closing, errand));
}

void session_close(const struct call *call) {
    uid_t uid = conn_uid(call->conn);
    struct session *session;
    struct closing *closing;
    struct span name = {0};
    struct report report;
    bool is_damaged, is_waited_for;

    request_get_str(call->request, "name", &name);
    is_damaged = !sessions_find(call->service->sessions, uid, name) &&
                 durable_missing(call->service, uid, name, &report) == PROTO_CORRUPT;
    session = is_damaged ? NULL : session_named(call, true);
    if (!session && !is_damaged)
        return;
    closing = calloc(1, sizeof *closing);
    if (!closing) {
        refuse(call, PROTO_INTERNAL, "out of memory");
        return;
    }
    closing->wait.done = on_removed;
    closing->errand.step = step_closing;
    closing->errand.free = free_closing;
    is_waited_for = is_damaged ? durable_drop_damaged(call->service, uid, name, &closing->wait)
                               : durable_drop(call->service, session, &closing->wait);
    if (is_waited_for) {
        call_later(call, &closing->errand);
        return;
    }
    free(closing);
    begin(call, 0);
}

/* ---- looking -------------------------------------------------------------------------------------------------------- */

void session_list(const struct call *call) {
    const struct sessions *sessions = call->service->sessions;
    uid_t uid = conn_uid(call->conn);
    uint32_t n = 0;

    for (const struct session *s = sessions_first(sessions); s; s = s->next)
        n += s->uid == uid;
    begin(call, 1);
    wire_key(call->out, "sessions");
    wire_array(call->out, n);
    for (const struct session *s = sessions_first(sessions); s; s = s->next)
        if (s->uid == uid)
            put_session(call, s);
}

void session_info(const struct call *call) {
    const struct session *session = session_named(call, false);

    if (session)
        session_put_info(call, session);
}

/* ---- copies and pins ------------------------------------------------------------------------------------------------ */

void session_fork(const struct call *call) {
    const struct session *session = session_named(call, false);
    const struct config *config = &call->service->config;
    struct sessions *sessions = call->service->sessions;
    struct session *copy = NULL;
    struct span new_name = {0};
    struct report report;
    int64_t at;
    int r;

    if (!session)
        return;
    at = session->n;
    request_get_str(call->request, "new_name", &new_name);
    request_get_int(call->request, "at", &at);
    if (sessions_find(sessions, session->uid, new_name)) {
        refuse(call, PROTO_BAD_PARAM, "new_name: there is a session of this name already");
        return;
    }
    if (at > session->n) {
        report_line(&report, "at: %lld; the session has %d tokens", (long long)at, session->n);
        refuse(call, PROTO_BAD_PARAM, report.line);
        return;
    }
    if (!sessions_have_room(sessions, session->uid, at, config->limits.session_tokens_per_uid)) {
        report_line(
            &report,
            "the sessions of this user have %lld tokens, and limits.session_tokens_per_uid allows %d; close one",
            (long long)sessions_tokens(sessions, session->uid), config->limits.session_tokens_per_uid);
        refuse(call, PROTO_QUOTA, report.line);
        return;
    }
    r = sessions_fork(sessions, session, new_name, (int)at, config->limits.sessions_per_uid, &copy);
    answer_made(call, r, copy);
}

static void refuse_pin(const struct call *call, const struct session *session, int why) {
    const struct sessions *sessions = call->service->sessions;
    struct sessions_pins more = sessions_to_pin(sessions, session);
    struct sessions_pinned pinned =
        why == SESSIONS_E_QUOTA ? sessions_pinned(sessions, session->uid) : sessions_all_pinned(sessions);
    struct report report;

    report_line(
        &report,
        "%s hold %u pages and %u restore points and may hold %u and %u (%s of the device); this one would hold %u "
        "and %u more; unpin another",
        why == SESSIONS_E_QUOTA ? "the pinned sessions of this user" : "pinned sessions", pinned.has.n_pages,
        pinned.has.n_states, pinned.max.n_pages, pinned.max.n_states,
        why == SESSIONS_E_QUOTA ? "kv.share_per_uid" : "half", more.n_pages, more.n_states);
    refuse(call, why == SESSIONS_E_QUOTA ? PROTO_QUOTA : PROTO_NO_SPACE, report.line);
}

void session_pin(const struct call *call) {
    struct session *session = session_named(call, false);
    int r;

    if (!session)
        return;
    r = sessions_pin(call->service->sessions, session);
    if (r != 0) {
        refuse_pin(call, session, r);
        return;
    }
    durable_keep(call->service, session, NULL);
    session_put_info(call, session);
}

void session_unpin(const struct call *call) {
    struct session *session = session_named(call, false);

    if (!session)
        return;
    sessions_unpin(call->service->sessions, session);
    durable_keep(call->service, session, NULL);
    session_put_info(call, session);
}
