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
    struct call call = {service, conn, (struct request *)request, &service->out, &refusal, NULL};

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
    struct report report;
    bool found;

    request_get_int(call->request, "id", &id);
    request_get_int(call->request, "gen", &number);
    if (number > 0) /* the decoder lets exactly one of them through */
        found = gens_cancel_number(gens, conn_uid(call->conn), conn_is_admin(call->conn), (uint64_t)number);
    else
        found = gens_cancel(gens, call->conn, (uint32_t)id);
    if (found) {
        begin(call, 0);
        return;
    }
    if (number > 0)
        report_line(&report, "no generation of this user has the number %lld; it may just have ended",
                    (long long)number);
    else
        report_line(&report, "no generation of this connection has the id %lld; it may just have ended", (long long)id);
    refuse(call, PROTO_NOT_FOUND, report.line);
}

static void list_gens(const struct call *call) {
    begin(call, 1);
    wire_key(call->out, "gens");
    gens_write_list(call->service->gens, conn_uid(call->conn), conn_is_admin(call->conn), call->out);
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
    put_int(out, "percent", service_percent(service));
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
    [METHOD_SESSION_OPEN] = session_open,
    [METHOD_SESSION_CLOSE] = session_close,
    [METHOD_SESSION_LIST] = session_list,
    [METHOD_SESSION_INFO] = session_info,
    [METHOD_SESSION_PARK] = session_park,
    [METHOD_SESSION_RESUME] = session_resume,
    [METHOD_SESSION_FORK] = session_fork,
    [METHOD_SESSION_PIN] = session_pin,
    [METHOD_SESSION_UNPIN] = session_unpin,
    [METHOD_CACHE_STATS] = cache_stats,
    [METHOD_CACHE_EVICT] = cache_evict,
    [METHOD_CACHE_VERIFY] = cache_verify,
    [METHOD_CACHE_FLUSH] = cache_flush,
    [METHOD_CACHE_PURGE] = cache_purge,
    [METHOD_SERVER_HEALTH] = health,
    [METHOD_SERVER_STATS] = stats,
    [METHOD_SERVER_METRICS] = server_metrics,
    [METHOD_SERVER_CONFIG] = server_config,
    [METHOD_SERVER_DRAIN] = drain,
    [METHOD_SERVER_LOG_LEVEL] = log_level,
};

void service_request(struct service *service, struct conn *conn, struct request *request) {
    bool is_later = false;
    int refusal = -1;
    struct call call = {service, conn, request, &service->out, &refusal, &is_later};

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
        HANDLERS[request->method](&call);
        if (is_later)
            return;
        call_answer(&call);
        request_free(request);
    }
}

bool service_turn(struct service *service) {
    return errands_turn(service);
}

void service_conn_closed(struct service *service, struct conn *conn) {
    errands_conn_closed(service, conn);
}
