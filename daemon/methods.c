/* methods: the requests that are answered at once. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "config_keys.h"
#include "conn.h"
#include "gen.h"
#include "methods_internal.h"
#include "reload.h"
#include "server.h"

/* ---- answering ------------------------------------------------------------------------------------------------------ */

static void put_cstr(struct wire_out *out, const char *key, const char *value) {
    wire_key(out, key);
    wire_cstr(out, value);
}

static void put_bool(struct wire_out *out, const char *key, bool value) {
    wire_key(out, key);
    wire_bool(out, value);
}

void call_answer(const struct call *call) {
    struct wire_out *out = call->out;

    if (*call->ret_refusal >= 0)
        metrics_add(&call->service->metrics, METRIC_ERRORS, *call->ret_refusal, 1);
    if (conn_respond(call->conn, out) == 0)
        return;
    wire_out_clear(out);
    proto_error(out, call->request->id, PROTO_INTERNAL, "the response could not be built: out of memory");
    conn_respond(call->conn, out);
}

void call_fail(struct service *service, struct conn *conn, const struct request *request) {
    int refusal = -1;
    struct call call = {service, conn, (struct request *)request, &service->out, &refusal};

    refuse(&call, PROTO_INTERNAL, "out of memory");
    call_answer(&call);
}

/* ---- hello, the model ----------------------------------------------------------------------------------------------- */

static void put_model(const struct call *call) {
    const struct pair *pair = &call->service->pair;
    struct wire_out *out = call->out;

    wire_map(out, 6);
    put_cstr(out, "name", pair->name);
    put_int(out, "n_vocab", pair->info->n_valid);
    put_int(out, "n_context", pair->plan.max_context);
    put_cstr(out, "fingerprint", pair->fingerprint);
    wire_key(out, "draft");
    if (pair->info->draft.n_layers > 0) {
        wire_map(out, 2);
        put_cstr(out, "name", pair->draft_name);
        put_int(out, "block", pair->info->block_size);
    } else {
        wire_nil(out);
    }
    put_cstr(out, "backend", pair->backend->name);
}

static void hello(const struct call *call) {
    const struct service *service = call->service;
    bool has_model = service->phase != SERVICE_LOADING;
    struct wire_out *out = call->out;

    begin(call, 5);
    put_int(out, "version", PROTO_VERSION);
    wire_key(out, "features");
    wire_array(out, 0);
    wire_key(out, "limits");
    wire_map(out, 3);
    put_int(out, "frame_bytes", (int64_t)service->config.limits.frame_bytes);
    put_int(out, "requests", service->config.limits.requests);
    put_int(out, "context", has_model ? service->pair.plan.max_context : 0);
    wire_key(out, "model");
    if (has_model)
        put_model(call);
    else
        wire_nil(out);
    put_int(out, "uid", conn_uid(call->conn));
}

static void model_info_of(const struct call *call) {
    proto_result_begin(call->out, call->request->id);
    put_model(call);
}

/* ---- generations ---------------------------------------------------------------------------------------------------- */

static void cancel(const struct call *call) {
    struct gens *gens = call->service->gens;
    int64_t id = 0, number = 0;
    bool found;

    request_get_int(call->request, "id", &id);
    request_get_int(call->request, "gen", &number);
    if (number > 0) /* the decoder lets exactly one of them through */
        found = gens_cancel_number(gens, conn_uid(call->conn), conn_is_admin(call->conn), (uint64_t)number);
    else
        found = gens_cancel(gens, call->conn, (uint32_t)id);
    if (found)
        begin(call, 0);
    else if (number > 0)
        refuse(call, PROTO_NOT_FOUND, "no generation of this user has this number; it may just have ended");
    else
        refuse(call, PROTO_NOT_FOUND, "no generation of this connection has this id; it may just have ended");
}

static void list_gens(const struct call *call) {
    begin(call, 1);
    wire_key(call->out, "gens");
    gens_write_list(call->service->gens, conn_uid(call->conn), conn_is_admin(call->conn), call->out);
}

/* ---- sessions ------------------------------------------------------------------------------------------------------- */

static void put_session(const struct call *call, const struct session *session) {
    struct wire_out *out = call->out;

    wire_map(out, 5);
    put_cstr(out, "name", session->name);
    put_int(out, "n_tokens", session->n);
    put_cached(out, service_find(call->service, session->keys, session->tokens, session->n / PAGE_TOKENS));
    put_bool(out, "pinned", session->is_pinned);
    put_bool(out, "durable", false); /* no tier outlives the process */
}

static void answer_session(const struct call *call, const struct session *session) {
    proto_result_begin(call->out, call->request->id);
    put_session(call, session);
}

/* The session that the request names, or NULL: it was refused. */
static struct session *named_session(const struct call *call, bool must_be_idle) {
    struct span name = {0};
    struct session *session;

    request_get_str(call->request, "name", &name);
    session = sessions_find(call->service->sessions, conn_uid(call->conn), name);
    if (!session) {
        refuse(call, PROTO_NOT_FOUND, "there is no session of this name; session.open makes one");
        return NULL;
    }
    if (must_be_idle && session->user) {
        refuse(call, PROTO_BUSY, "a request uses this session now");
        return NULL;
    }
    return session;
}

/* What making a session can answer. */
static void answer_made(const struct call *call, int r, const struct session *session) {
    if (r == 0)
        answer_session(call, session);
    else if (r == SESSIONS_E_QUOTA)
        refuse(call, PROTO_QUOTA, "this user has as many sessions as limits.sessions_per_uid allows; close one");
    else
        refuse(call, PROTO_INTERNAL, strerror(-r));
}

static void open_session(const struct call *call) {
    struct session *session = NULL;
    struct span name = {0};
    int r;

    request_get_str(call->request, "name", &name);
    r = sessions_make(call->service->sessions, conn_uid(call->conn), name,
                      call->service->config.limits.sessions_per_uid, &session);
    answer_made(call, r, session);
}

static void close_session(const struct call *call) {
    struct session *session = named_session(call, true);

    if (!session)
        return;
    sessions_drop(call->service->sessions, session);
    begin(call, 0);
}

static void list_sessions(const struct call *call) {
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

static void info_session(const struct call *call) {
    const struct session *session = named_session(call, false);

    if (session)
        answer_session(call, session);
}

static void park_session(const struct call *call) {
    if (named_session(call, true))
        refuse(call, PROTO_NO_SPACE, "there is no tier below the device to park it in; it stays where it is");
}

static void fork_session(const struct call *call) {
    const struct session *session = named_session(call, false);
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
    r = sessions_fork(sessions, session, new_name, (int)at, call->service->config.limits.sessions_per_uid, &copy);
    answer_made(call, r, copy);
}

static void pin_session(const struct call *call) {
    struct session *session = named_session(call, false);

    if (!session)
        return;
    if (sessions_pin(call->service->sessions, session) != 0)
        refuse(call, PROTO_NO_SPACE,
               "pinned sessions may hold half of the pages and of the restore points; this one no longer fits");
    else
        answer_session(call, session);
}

static void unpin_session(const struct call *call) {
    struct session *session = named_session(call, false);

    if (!session)
        return;
    sessions_unpin(call->service->sessions, session);
    answer_session(call, session);
}

/* ---- the cache ------------------------------------------------------------------------------------------------------ */

struct tier_stats {
    uint64_t bytes, used_bytes, n_pages, n_hits, n_spilled, n_fetched, n_evicted;
};

static void put_tier(struct wire_out *out, const char *name, const struct tier_stats *t) {
    wire_key(out, name);
    wire_map(out, 7);
    put_int(out, "bytes", (int64_t)t->bytes);
    put_int(out, "used_bytes", (int64_t)t->used_bytes);
    put_int(out, "pages", (int64_t)t->n_pages);
    put_int(out, "hits", (int64_t)t->n_hits);
    put_int(out, "spilled", (int64_t)t->n_spilled);
    put_int(out, "fetched", (int64_t)t->n_fetched);
    put_int(out, "evicted", (int64_t)t->n_evicted);
}

static struct tier_stats device_tier(const struct pair *pair) {
    struct kv_store_stats stats;
    struct tier_stats t = {0};

    kv_store_stats(pair->store, &stats);
    for (int g = 0; g < KV_GROUP_N; g++) {
        const struct kv_group_stats *group = &stats.group[g];

        t.bytes += group->n_slots * pair->plan.model.slot_bytes[g];
        t.used_bytes += (group->n_slots - group->n_free) * pair->plan.model.slot_bytes[g];
        t.n_evicted += group->n_evicted;
    }
    t.n_pages = stats.n_records;
    t.n_hits = stats.n_hits;
    return t;
}

static struct tier_stats host_tier(const struct pair *pair) {
    struct kv_restores_stats restores;
    struct kv_spill_stats spills;
    struct tier_stats t = {0};

    if (!pair->shelf)
        return t;
    for (int g = 0; g < KV_GROUP_N; g++) {
        struct kv_shelf_group_stats group;

        kv_shelf_stats(pair->shelf, (enum kv_group)g, &group);
        t.bytes += group.n_slots * pair->plan.model.slot_bytes[g];
        t.used_bytes += (group.n_slots - group.n_free) * pair->plan.model.slot_bytes[g];
        t.n_evicted += group.n_evicted;
        if (g == KV_TARGET_FULL)
            t.n_pages = group.n_clean;
    }
    kv_spill_stats(pair->spill, &spills);
    kv_restores_stats(pair->restores, &restores);
    t.n_hits = restores.n_done;
    t.n_spilled = spills.n_copies;
    t.n_fetched = restores.n_copies;
    return t;
}

static void cache_stats(const struct call *call) {
    const struct pair *pair = &call->service->pair;
    struct tier_stats device = device_tier(pair), host = host_tier(pair);

    begin(call, 1);
    wire_key(call->out, "tiers");
    wire_map(call->out, 3);
    put_tier(call->out, "device", &device);
    put_tier(call->out, "host", &host);
    put_tier(call->out, "disk", &(struct tier_stats){0});
}

/* From the device: what is on its way down has arrived, see must_wait(). */
static void evict(const struct call *call) {
    const struct pair *pair = &call->service->pair;
    struct tier_stats before = device_tier(pair), host_before = host_tier(pair), after, host_after;
    struct span tier = {0};
    int64_t n_bytes = 0;
    uint64_t n_freed = 0;
    bool all = false;

    request_get_str(call->request, "tier", &tier);
    request_get_int(call->request, "bytes", &n_bytes);
    request_get_bool(call->request, "all", &all);
    if (span_is(tier, "device"))
        n_freed = all ? kv_store_evict_all(pair->store) : kv_store_evict_bytes(pair->store, (uint64_t)n_bytes);
    if (span_is(tier, "host") && pair->shelf)
        n_freed = kv_shelf_evict_bytes(pair->shelf, all ? UINT64_MAX : (uint64_t)n_bytes);
    after = device_tier(pair);
    host_after = host_tier(pair);
    begin(call, 2);
    put_int(call->out, "pages",
            (int64_t)(before.n_pages - after.n_pages) + (int64_t)(host_before.n_pages - host_after.n_pages));
    put_int(call->out, "bytes", (int64_t)n_freed);
}

static void verify(const struct call *call) { /* nothing lies on a disk */
    begin(call, 2);
    put_int(call->out, "pages", 0);
    put_int(call->out, "bad", 0);
}

static void flush(const struct call *call) {
    begin(call, 1);
    put_int(call->out, "pages", 0);
}

/* ---- the server ----------------------------------------------------------------------------------------------------- */

static void health(const struct call *call) {
    const struct service *service = call->service;
    static const char *const PHASES[] = {"loading", "serving", "draining"};
    struct wire_out *out = call->out;

    begin(call, 5);
    put_bool(out, "live", true);
    put_bool(out, "ready", service->phase == SERVICE_SERVING);
    put_bool(out, "progressing", service_is_progressing(service));
    put_cstr(out, "phase", PHASES[service->phase]);
    put_int(out, "percent",
            service->phase == SERVICE_LOADING ? __atomic_load_n(&service->progress.percent, __ATOMIC_ACQUIRE) : 100);
}

static void stats(const struct call *call) {
    struct service *service = call->service;
    const struct metrics *m = &service->metrics;
    struct wire_out *out = call->out;
    struct server_stats server;

    service_update_metrics(service);
    server_read_stats(service->server, &server);
    begin(call, 4);
    put_int(out, "uptime_ms", (int64_t)(service_now_us() - service->started_us) / 1000);
    wire_key(out, "connections");
    wire_map(out, 3);
    put_int(out, "open", server.n_conns);
    put_int(out, "accepted", (int64_t)server.n_accepted);
    put_int(out, "refused", (int64_t)server.n_rejected);
    wire_key(out, "requests");
    wire_map(out, 3);
    put_int(out, "running", metrics_get(m, METRIC_RUNNING, 0));
    put_int(out, "waiting", metrics_get(m, METRIC_QUEUED, 0));
    put_int(out, "finished", metrics_sum(m, METRIC_REQUESTS));
    wire_key(out, "tokens");
    wire_map(out, 4);
    put_int(out, "prompt", metrics_get(m, METRIC_PROMPT_TOKENS, 0));
    put_int(out, "completion", metrics_get(m, METRIC_GENERATED_TOKENS, 0));
    put_int(out, "proposed", metrics_get(m, METRIC_DRAFT_PROPOSED, 0));
    put_int(out, "accepted", metrics_get(m, METRIC_DRAFT_ACCEPTED, 0));
}

static void server_metrics(const struct call *call) {
    struct service *service = call->service;
    const struct pair *pair = &service->pair;
    struct metrics_build build = {.version = SPILLWAY_VERSION,
                                  .backend = pair->backend->name,
                                  .kernel_path = pair->backend->caps(pair->device)->kernel_path,
                                  .model = pair->name,
                                  .draft = pair->draft_name};
    struct text text;

    service_update_metrics(service);
    text_init(&text, 1 << 20);
    metrics_write_prometheus(&service->metrics, &build, &text);
    begin(call, 1);
    wire_key(call->out, "text");
    wire_str(call->out, text_span(&text));
    text_deinit(&text);
}

static void server_config(const struct call *call) {
    const struct config *config = &call->service->config;
    struct text value;
    char name[64];

    text_init(&value, 1 << 16);
    begin(call, 1);
    wire_key(call->out, "values");
    wire_map(call->out, (uint32_t)config_n_keys);
    for (int i = 0; i < config_n_keys; i++) {
        snprintf(name, sizeof name, "%s.%s", config_keys[i].section, config_keys[i].name);
        text_clear(&value);
        config_value_write(&config_keys[i], config, &value);
        wire_key(call->out, name);
        wire_map(call->out, 2);
        wire_key(call->out, "value");
        wire_lossy(call->out, text_span(&value)); /* paths are bytes */
        wire_key(call->out, "origin");
        wire_lossy(call->out, span_of(config->origin[i]));
    }
    text_deinit(&value);
}

static void drain(const struct call *call) {
    int n = gens_count(call->service->gens);

    begin(call, 1);
    put_int(call->out, "running", n);
    call->service->drain(call->service);
}

static void log_level(const struct call *call) {
    struct log *log = &call->service->log;
    struct span level = {0};
    char name[16];

    request_get_str(call->request, "level", &level);
    snprintf(name, sizeof name, "%.*s", (int)level.n, level.bytes);
    begin(call, 1);
    put_cstr(call->out, "previous", log_level_name(log->level));
    log_set_level(log, (enum log_level)log_level_find(name)); /* the table allows no other */
}

static void (*const HANDLERS[METHOD_N])(const struct call *call) = {
    [METHOD_HELLO] = hello,
    [METHOD_MODEL_INFO] = model_info_of,
    [METHOD_GEN_CANCEL] = cancel,
    [METHOD_GEN_LIST] = list_gens,
    [METHOD_SESSION_OPEN] = open_session,
    [METHOD_SESSION_CLOSE] = close_session,
    [METHOD_SESSION_LIST] = list_sessions,
    [METHOD_SESSION_INFO] = info_session,
    [METHOD_SESSION_PARK] = park_session,
    [METHOD_SESSION_RESUME] = info_session, /* all there is lies on the device */
    [METHOD_SESSION_FORK] = fork_session,
    [METHOD_SESSION_PIN] = pin_session,
    [METHOD_SESSION_UNPIN] = unpin_session,
    [METHOD_CACHE_STATS] = cache_stats,
    [METHOD_CACHE_EVICT] = evict,
    [METHOD_CACHE_VERIFY] = verify,
    [METHOD_CACHE_FLUSH] = flush,
    [METHOD_SERVER_HEALTH] = health,
    [METHOD_SERVER_STATS] = stats,
    [METHOD_SERVER_METRICS] = server_metrics,
    [METHOD_SERVER_CONFIG] = server_config,
    [METHOD_SERVER_DRAIN] = drain,
    [METHOD_SERVER_LOG_LEVEL] = log_level,
};

/* What leaves the device shall be in host memory by then, if it is to be there at all. */
static bool must_wait(const struct service *service, const struct request *request) {
    struct span tier = {0};

    if (request->method != METHOD_CACHE_EVICT) /* others may come while a worker still makes the pair */
        return false;
    if (!service->pair.spill || kv_spill_is_idle(service->pair.spill))
        return false;
    request_get_str(request, "tier", &tier);
    return span_is(tier, "device");
}

static bool wait_for_quiet(struct service *service, struct conn *conn, struct request *request) {
    struct postponed *postponed = malloc(sizeof *postponed);

    if (!postponed)
        return false;
    *postponed = (struct postponed){service->postponed, conn, request};
    service->postponed = postponed;
    return true;
}

void service_answer_postponed(struct service *service) {
    struct postponed *postponed = service->postponed;

    if (!postponed || !kv_spill_is_idle(service->pair.spill))
        return;
    service->postponed = NULL;
    while (postponed) {
        struct postponed *next = postponed->next;

        service_request(service, postponed->conn, postponed->request);
        free(postponed);
        postponed = next;
    }
}

void service_conn_closed(struct service *service, struct conn *conn) {
    struct postponed **at = &service->postponed;

    while (*at) {
        struct postponed *postponed = *at;

        if (postponed->conn != conn) {
            at = &postponed->next;
            continue;
        }
        *at = postponed->next;
        request_free(postponed->request);
        free(postponed);
    }
}

void service_request(struct service *service, struct conn *conn, struct request *request) {
    int refusal = -1;
    struct call call = {service, conn, request, &service->out, &refusal};

    switch (request->method) {
    case METHOD_GEN_START:
        gens_start(service, conn, request);
        break;
    case METHOD_TEXT_TOKENIZE:
    case METHOD_TEXT_DETOKENIZE:
    case METHOD_CHAT_RENDER:
    case METHOD_CACHE_LOOKUP:
        methods_text_start(service, conn, request);
        break;
    case METHOD_SERVER_RELOAD:
        reload_start(service, conn, request, NULL);
        break;
    default:
        if (must_wait(service, request) && wait_for_quiet(service, conn, request))
            return;
        HANDLERS[request->method](&call);
        call_answer(&call);
        request_free(request);
    }
}
