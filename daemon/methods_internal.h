/* methods_internal: what the handlers of requests share. methods.c answers at once; methods_text.c and reload.c may take
 * a worker. */
#pragma once
#include "proto.h"
#include "service.h"

struct call { /* one request being answered */
    struct service *service;
    struct conn *conn;
    struct request *request;
    struct wire_out *out;
    int *ret_refusal; /* -1, or the code of the error that is the answer */
};

static inline void begin(const struct call *call, uint32_t n_pairs) {
    proto_result_begin(call->out, call->request->id);
    wire_map(call->out, n_pairs);
}

static inline void put_int(struct wire_out *out, const char *key, int64_t value) {
    wire_key(out, key);
    wire_int(out, value);
}

static inline void put_cached(struct wire_out *out, struct found found) {
    wire_key(out, "cached");
    service_write_tiers(out, found);
}

/* May be called in a worker. */
static inline void refuse(const struct call *call, enum proto_code code, const char *message) {
    *call->ret_refusal = (int)code;
    proto_error(call->out, call->request->id, code, message);
}

/* Sends what is in `out`; then the request is answered. On the loop. */
void call_answer(const struct call *call);
/* There is no memory for handling it. */
void call_fail(struct service *service, struct conn *conn, const struct request *request);

/* text.tokenize, text.detokenize, chat.render, cache.lookup: long ones take a worker. Takes the request over. */
void methods_text_start(struct service *service, struct conn *conn, struct request *request);
