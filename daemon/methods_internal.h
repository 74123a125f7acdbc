/* methods_internal: what the handlers of requests share. Those of methods.c answer at once; methods_session.c, park.c and
 * methods_cache.c may need several turns; methods_text.c and reload.c may take a worker. */
#pragma once
#include "errand.h"
#include "proto.h"
#include "service.h"

struct call { /* one request being answered */
    struct service *service;
    struct conn *conn;
    struct request *request;
    struct wire_out *out;
    int *ret_refusal;   /* -1, or the code of the error that is the answer */
    bool *ret_is_later; /* of a handler: it has taken the request over, and answers later */
};

/* A handler lets an errand answer its request. */
static inline void call_later(const struct call *call, struct errand *errand) {
    *call->ret_is_later = true;
    errand_start(errand, call->service, call->conn, call->request);
}

static inline void begin(const struct call *call, uint32_t n_pairs) {
    proto_result_begin(call->out, call->request->id);
    wire_map(call->out, n_pairs);
}

static inline void put_int(struct wire_out *out, const char *key, int64_t value) {
    wire_key(out, key);
    wire_int(out, value);
}

static inline void put_cstr(struct wire_out *out, const char *key, const char *value) {
    wire_key(out, key);
    wire_cstr(out, value);
}

static inline void put_bool(struct wire_out *out, const char *key, bool value) {
    wire_key(out, key);
    wire_bool(out, value);
}

static inline void put_cached(struct wire_out *out, struct found found) {
    wire_key(out, "cached");
    service_write_tiers(out, found);
}

/* May be called in a worker. */
static inline void refuse_data(const struct call *call, enum proto_code code, const char *message,
                               const struct proto_number *data, uint32_t n_data) {
    *call->ret_refusal = (int)code;
    proto_error_data(call->out, call->request->id, code, message, data, n_data);
}

static inline void refuse(const struct call *call, enum proto_code code, const char *message) {
    refuse_data(call, code, message, NULL, 0);
}

/* What an errand answers with; its conn is there. */
static inline struct call call_of_errand(const struct errand *errand, int *refusal) {
    *refusal = -1;
    return (struct call){errand->service, errand->conn, errand->request, &errand->service->out, refusal, NULL};
}

/* Sends what is in `out`; then the request is answered. On the loop. */
void call_answer(const struct call *call);
/* There is no memory for handling it. */
void call_fail(struct service *service, struct conn *conn, const struct request *request);

/* text.tokenize, text.detokenize, chat.render, cache.lookup: long ones take a worker. Takes the request over. */
void methods_text_start(struct service *service, struct conn *conn, struct request *request);

/* ---- handlers: each answers, refuses, or calls call_later() ---- */

void session_open(const struct call *call);
void session_close(const struct call *call);
void session_list(const struct call *call);
void session_info(const struct call *call);
void session_fork(const struct call *call);
void session_pin(const struct call *call);
void session_unpin(const struct call *call);
void session_park(const struct call *call);
void session_resume(const struct call *call);

/* The session that the request names, or NULL: it was refused. to_change: nobody else may be at it. */
struct session *session_named(const struct call *call, bool to_change);
/* What is known of it, as the result. */
void session_put_info(const struct call *call, const struct session *session);

void cache_stats(const struct call *call);
void cache_evict(const struct call *call);
void cache_verify(const struct call *call);
void cache_flush(const struct call *call);
void cache_purge(const struct call *call);
