#include "process.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <uv.h>

#include "conn.h"
#include "durable.h"
#include "gen.h"
#include "errand.h"
#include "later.h"
#include "park.h"
#include "reload.h"
#include "server.h"
#include "tiers.h"
#include "uvwork.h"
#include "watch.h"

enum {
    TICK_MS = 100,                /* while something runs: heartbeats, deadlines, the end of draining */
    LOADING_TICK_MS = 1000,       /* while loading: the service manager hears that it goes on */
    EXTEND_US = 60 * 1000 * 1000, /* asked for again long before it is over */
    EXTEND_EVERY_US = 1000 * 1000,
    STUCK_US = 60 * 1000 * 1000, /* where no manager says how long is too long */
    INPUT_BYTES_MAX = 256 << 20,
    OUTPUT_BYTES_MAX = 256 << 20, /* of one connection; one response may be large */
    MESSAGE_TIMEOUT_MS = 60 * 1000,
    LINGER_MS = 2000,
    PARK_MS = 5000,        /* of the drain timeout, or a quarter of it: for putting sessions on disk */
    HANG_US = 5000 * 1000, /* after it: what a dead disk holds up is left behind */
    PINS_PERCENT = 50,     /* of the device, that pinned sessions may take from running requests */
};

struct process {
    struct service service;
    struct notify notify;
    uv_loop_t loop;
    uv_timer_t tick, watchdog, retry; /* retry: of records of sessions that could not be written */
    uv_prepare_t turn;
    uv_signal_t signals[3];
    uv_work_t load;
    struct report load_report;
    int load_result;
    struct watch *watches[1 + KV_COPY_DIRECTION_N]; /* plans, copies */
    uint64_t drain_until_us, gens_until_us;         /* gens: requests have until then, what they leave has the rest */
    uint64_t extended_us, extended_at;              /* at: how far work had come */
    bool is_loading, is_closing, is_parking, is_lost /* the device */;
    int status; /* to exit with */
};

static struct process *process_of(struct service *service) {
    return container_of(service, struct process, service);
}

/* ---- the end -------------------------------------------------------------------------------------------------------- */

static void on_server_closed(void *user) {
    struct process *p = user;

    p->service.server = NULL;
    if (p->is_loading) { /* loading does not stop half way, and nobody waits for it */
        log_line(&p->service.log, LOG_INFO, "stop", "status=%d", p->status);
        _exit(p->status);
    }
    for (size_t i = 0; i < ARRAY_LEN(p->watches); i++)
        watch_stop(p->watches[i]);
    tiers_stop(&p->service);
    uv_close((uv_handle_t *)&p->tick, NULL);
    uv_close((uv_handle_t *)&p->watchdog, NULL);
    uv_close((uv_handle_t *)&p->retry, NULL);
    uv_close((uv_handle_t *)&p->turn, NULL);
    for (size_t i = 0; i < ARRAY_LEN(p->signals); i++)
        uv_close((uv_handle_t *)&p->signals[i], NULL);
}

/* Everything is answered, or will not be. */
static void close_all(struct process *p) {
    if (p->is_closing)
        return;
    p->is_closing = true;
    server_close(p->service.server, on_server_closed, p);
}

/* A worker that hangs in a call to a dead disk would keep the process for good. */
static void leave_what_hangs(struct process *p) {
    struct service *service = &p->service;

    log_line(&service->log, LOG_ERROR, "exit.now", "reason=%s errands=%d records_idle=%d", "the disk does not answer",
             service->errands != NULL, durable_is_idle(service));
    server_stop_accepting(service->server); /* removes the socket */
    _exit(PROCESS_EXIT_FAILED);
}

static bool is_all_over(struct process *p) {
    struct service *service = &p->service;

    if (p->is_lost) /* what waits for the device waits for good */
        return durable_is_idle(service);
    return !service->errands && service_is_quiet(service) && durable_is_idle(service);
}

/* Requests first; then sessions are put on disk; then what is on its way comes home. */
static void step_drain(struct process *p) {
    struct service *service = &p->service;
    uint64_t now = service_now_us();

    if (service->phase != SERVICE_DRAINING || p->is_closing)
        return;
    if (now >= p->gens_until_us)
        gens_end_all(service->gens, PROTO_FINISH_SHUTDOWN);
    if (now >= p->drain_until_us)
        errands_stop(service);
    if (gens_count(service->gens) == 0 && !service->laters && !p->is_parking && !p->is_lost) {
        p->is_parking = true;
        if (now < p->drain_until_us && park_all_start(service))
            notify_status(&p->notify, "draining: %d sessions go to the disk", sessions_count(service->sessions));
    }
    if (gens_count(service->gens) == 0 && !service->laters && is_all_over(p))
        close_all(p);
    else if (now >= p->drain_until_us + HANG_US && (p->is_lost || service_is_quiet(service)))
        leave_what_hangs(p);
}

/* Loading and draining may last longer than the manager's own patience, as long as work comes on. */
static void extend(struct process *p) {
    uint64_t now = service_now_us(), at = service_progress(&p->service);

    if (p->extended_us != 0 && (now - p->extended_us < EXTEND_EVERY_US || at == p->extended_at))
        return;
    p->extended_us = now;
    p->extended_at = at;
    notify_extend(&p->notify, EXTEND_US);
}

static void start_ticking(struct process *p);

static void begin_draining(struct process *p) {
    uint64_t timeout_us = (uint64_t)p->service.config.server.drain_timeout_ms * 1000, park_us = 0;

    if (p->service.pair.vault)
        park_us = min_u64(timeout_us / 4, (uint64_t)PARK_MS * 1000);
    p->drain_until_us = service_now_us() + timeout_us;
    p->gens_until_us = p->drain_until_us - park_us;
}

static void drain(struct service *service) {
    struct process *p = process_of(service);

    if (p->is_closing || service->phase == SERVICE_DRAINING)
        return;
    notify_stopping(&p->notify);
    log_line(&service->log, LOG_INFO, "drain.begin", "running=%d", service->gens ? gens_count(service->gens) : 0);
    if (service->phase == SERVICE_LOADING) { /* nobody was promised anything, and loading does not stop half way */
        close_all(p);
        return;
    }
    service->phase = SERVICE_DRAINING;
    service->n_draining = gens_count(service->gens);
    begin_draining(p);
    p->extended_us = 0; /* the manager counts anew from STOPPING on */
    extend(p);
    notify_status(&p->notify, "draining: %d requests run", gens_count(service->gens));
    server_stop_accepting(service->server);
    start_ticking(p);
}

static void lose_device(struct process *p, int error) {
    log_line(&p->service.log, LOG_ERROR, "device.lost", "error=%s", strerror(error < 0 ? -error : error));
    p->status = PROCESS_EXIT_FAILED;
    p->is_lost = true;
    p->service.phase = SERVICE_DRAINING;
    p->drain_until_us = p->gens_until_us = service_now_us();
    step_drain(p);
}

/* ---- turns and ticks ------------------------------------------------------------------------------------------------ */

static void check_device(struct process *p) {
    const struct pair *pair = &p->service.pair;
    struct engine_view view;
    int r;

    if (p->is_closing)
        return;
    engine_look(pair->engine, &view);
    r = view.error != 0 ? view.error : pair->backend->status(pair->device);
    if (r != 0)
        lose_device(p, r);
}

static void on_tick(uv_timer_t *timer) {
    struct process *p = timer->data;
    struct service *service = &p->service;

    if (service->phase == SERVICE_LOADING) {
        int percent = __atomic_load_n(&service->progress.percent, __ATOMIC_ACQUIRE);
        const char *what = __atomic_load_n(&service->progress.what, __ATOMIC_ACQUIRE);

        extend(p);
        notify_status(&p->notify, "loading: %s, %d %%", what ? what : "starting", percent);
        return;
    }
    if (service->phase == SERVICE_DRAINING)
        extend(p);
    gens_tick(service->gens);
    check_device(p);
    step_drain(p);
    if (service->phase == SERVICE_SERVING && gens_count(service->gens) == 0 && !service->errands)
        uv_timer_stop(&p->tick); /* a process that does nothing uses no CPU */
}

static void start_ticking(struct process *p) {
    if (!uv_is_active((uv_handle_t *)&p->tick))
        uv_timer_start(&p->tick, on_tick, TICK_MS, TICK_MS);
}

/* The manager restarts us when this stops coming: so it is sent only while work moves. */
static void on_watchdog(uv_timer_t *timer) {
    struct process *p = timer->data;

    if (service_is_progressing(&p->service))
        notify_watchdog(&p->notify);
}

static void on_retry(uv_timer_t *timer);

static void start_retrying(struct process *p) {
    uint64_t at_us = durable_tick(&p->service), now = service_now_us();

    if (at_us != 0 && !uv_is_active((uv_handle_t *)&p->retry))
        uv_timer_start(&p->retry, on_retry, at_us > now ? (at_us - now) / 1000 + 1 : 1, 0);
}

static void on_retry(uv_timer_t *timer) {
    start_retrying(timer->data);
}

/* Just before the loop sleeps: all events of this turn are in. */
static void on_turn(uv_prepare_t *prepare) {
    struct process *p = prepare->data;
    struct service *service = &p->service;

    if (service->phase == SERVICE_LOADING || p->is_closing)
        return;
    do {
        tiers_turn(service);
    } while (service_turn(service));
    start_retrying(p);
    if (gens_count(service->gens) > 0 || service->errands) /* these have deadlines */
        start_ticking(p);
    step_drain(p);
}

static void on_engine(void *user) {
    struct process *p = user;

    engine_dispatch(p->service.pair.engine);
}

static void on_copies(void *user) {
    struct process *p = user;

    copies_dispatch(p->service.pair.copies);
}

/* ---- loading -------------------------------------------------------------------------------------------------------- */

static struct sessions_pins part_of_device(const struct memplan *plan, int percent) {
    return (struct sessions_pins){(uint32_t)div_ceil((uint64_t)plan->n_slots[KV_TARGET_FULL] * (uint64_t)percent, 100),
                                  (uint32_t)div_ceil((uint64_t)plan->n_restore_points * (uint64_t)percent, 100)};
}

static int open_sessions(struct service *service, struct report *report) {
    const struct memplan *plan = &service->pair.plan;
    int share = service->config.kv.share_per_uid; /* 0: there are none */
    struct sessions_options options = {.store = service->pair.store,
                                       .n_context = plan->max_context,
                                       .has_shared_prefixes = service->config.kv.shared_prefixes,
                                       .pins_max = part_of_device(plan, PINS_PERCENT),
                                       .pins_per_uid_max = part_of_device(plan, share > 0 ? share : 100)};
    int r = sessions_open(&options, &service->sessions);

    return r == 0 ? durable_load(service, report) : report_error(report, r, "sessions: %s", strerror(-r));
}

static void on_load(uv_work_t *work) {
    struct process *p = work->data;
    struct service *service = &p->service;
    struct kv_work pool = uvwork_of(&p->loop);
    int r =
        pair_open(&service->config, service_now_us, &pool, config_has_disk(&service->config) ? &service->folder : NULL,
                  &service->progress, &service->pair, &p->load_report);

    if (r == 0)
        r = open_sessions(service, &p->load_report);
    p->load_result = r;
}

static int begin_serving(struct process *p) {
    struct service *service = &p->service;
    int r = tiers_open(service, &p->load_report);

    if (r != 0)
        return r;
    r = durable_open(service);
    if (r == 0)
        r = watch_start(&p->loop, engine_fd(service->pair.engine), on_engine, p, &p->watches[0]);
    for (int d = 0; r == 0 && d < KV_COPY_DIRECTION_N; d++)
        r = watch_start(&p->loop, device_thread_copied_fd(service->pair.thread, (enum kv_copy_direction)d), on_copies,
                        p, &p->watches[1 + d]);
    return r == 0 ? 0 : report_error(&p->load_report, r, "the loop cannot be set up: %s", strerror(-r));
}

/* What the steps of a context that the device does not hold cost at the least. */
static void log_streaming(struct service *service) {
    const struct memplan *plan = &service->pair.plan;
    uint64_t bytes = memplan_step_bytes(plan), token_bytes = memplan_token_bytes(plan);
    struct engine_view view;

    if (bytes == 0)
        return;
    engine_look(service->pair.engine, &view);
    log_line(&service->log, LOG_INFO, "streaming",
             "context=%d n_tokens=%llu token_bytes=%llu step_bytes=%llu link_mb_per_s=%.0f step_floor_ms=%.1f",
             plan->max_context, (unsigned long long)(bytes / token_bytes), (unsigned long long)token_bytes,
             (unsigned long long)bytes, view.link_bytes_per_us, (double)bytes / view.link_bytes_per_us / 1000);
}

static void log_loaded(struct process *p) {
    struct service *service = &p->service;
    const struct pair *pair = &service->pair;

    if (pair->plan.notice[0])
        log_line(&service->log, LOG_WARN, "plan.notice", "notice=%s", pair->plan.notice);
    if (pair->info->warning[0])
        log_line(&service->log, LOG_WARN, "model.warning", "warning=%s", pair->info->warning);
    log_line(&service->log, LOG_INFO, "ready",
             "model=%s draft=%s backend=%s path=%s context=%d places=%d pages=%d restore_points=%d ms=%llu", pair->name,
             pair->draft_name, pair->backend->name, pair->backend->caps(pair->device)->kernel_path,
             pair->plan.max_context, pair->plan.max_seqs, pair->plan.n_slots[KV_TARGET_FULL] - 1,
             pair->plan.n_restore_points, (unsigned long long)(service_now_us() - service->started_us) / 1000);
    log_streaming(service);
}

static void on_loaded(uv_work_t *work, int status) {
    struct process *p = work->data;
    struct service *service = &p->service;

    (void)status;
    p->is_loading = false;
    if (p->load_result == 0 && !p->is_closing)
        p->load_result = begin_serving(p);
    if (p->load_result != 0) {
        log_line(&service->log, LOG_ERROR, "load.failed", "reason=%s", p->load_report.line);
        notify_status(&p->notify, "cannot load: %s", p->load_report.line);
        p->status = PROCESS_EXIT_MODEL;
        close_all(p);
        return;
    }
    if (p->is_closing)
        return;
    service->phase = SERVICE_SERVING;
    server_set_ready(service->server, true);
    log_loaded(p);
    notify_ready(&p->notify);
    notify_status(&p->notify, "serving %s", service->pair.name);
    uv_timer_stop(&p->tick);
}

/* ---- clients -------------------------------------------------------------------------------------------------------- */

static void on_request(void *user, struct conn *conn, struct request *request) {
    service_request(user, conn, request);
}

static void on_error(void *user, enum proto_code code) {
    struct service *service = user;

    metrics_add(&service->metrics, METRIC_ERRORS, (int)code, 1);
}

static void on_slow(void *user, struct conn *conn) {
    struct service *service = user;

    if (service->phase != SERVICE_LOADING)
        gens_conn_slow(service->gens, conn);
}

static void on_drained(void *user, struct conn *conn) {
    struct service *service = user;

    gens_conn_congested(service->gens, conn, false);
}

static void on_close(void *user, struct conn *conn) {
    struct service *service = user;

    later_conn_closed(service, conn);
    gens_conn_closed(service->gens, conn);
    service_conn_closed(service, conn);
}

static int open_server(struct process *p, int listen_fd, struct report *report) {
    const struct config *c = &p->service.config;
    struct server_options options = {.path = c->server.socket,
                                     .mode = (unsigned)c->server.socket_mode,
                                     .listen_fd = listen_fd,
                                     .backlog = c->server.backlog,
                                     .conns_max = (uint32_t)c->limits.connections,
                                     .limits = {.frame_bytes = c->limits.frame_bytes,
                                                .input_bytes_max = INPUT_BYTES_MAX,
                                                .output_low_bytes = c->server.output_low,
                                                .output_high_bytes = c->server.output_high,
                                                .output_bytes_max = OUTPUT_BYTES_MAX,
                                                .requests_max = (uint32_t)c->limits.requests,
                                                .slow_timeout_ms = c->server.slow_timeout_ms,
                                                .message_timeout_ms = MESSAGE_TIMEOUT_MS,
                                                .linger_ms = LINGER_MS},
                                     .callbacks = {.user = &p->service,
                                                   .on_request = on_request,
                                                   .on_error = on_error,
                                                   .on_slow = on_slow,
                                                   .on_drained = on_drained,
                                                   .on_close = on_close}};

    return server_open(&p->loop, &options, &p->service.server, report);
}

/* ---- signals -------------------------------------------------------------------------------------------------------- */

static void on_reloaded(struct service *service) {
    if (service->phase == SERVICE_SERVING)
        notify_ready(&process_of(service)->notify);
}

static void on_signal(uv_signal_t *handle, int signal) {
    struct process *p = handle->data;
    struct service *service = &p->service;

    if (signal == SIGHUP) {
        notify_reloading(&p->notify, (int64_t)service_now_us());
        reload_start(service, NULL, NULL, on_reloaded);
    } else if (p->is_closing || service->phase == SERVICE_DRAINING) {
        log_line(&service->log, LOG_WARN, "exit.now", "signal=%d running=%d", signal, gens_count(service->gens));
        if (service->server)
            server_stop_accepting(service->server); /* removes the socket */
        _exit(PROCESS_EXIT_FAILED);
    } else {
        drain(service);
    }
}

/* ---- wiring --------------------------------------------------------------------------------------------------------- */

static const char *shown(const char *variable) {
    return variable ? variable : "";
}

static int find_listen_fd(const struct notify_env *env, int *ret_fd, struct report *report) {
    struct notify_listen listen[NOTIFY_LISTEN_MAX];
    int n = notify_listen_fds(env, getpid(), listen);

    if (n == -EINVAL)
        return report_error(report, n, "LISTEN_FDS=%s LISTEN_PID=%s: must be numbers", shown(env->listen_fds),
                            shown(env->listen_pid));
    if (n > 1 || n == -E2BIG)
        return report_error(report, -E2BIG,
                            "LISTEN_FDS=%s: %s sockets are passed in, and one is served; see the socket unit",
                            env->listen_fds, env->listen_fds);
    if (n < 0)
        return report_error(report, n, "LISTEN_FDS=%s: descriptor %d cannot be used: %s", env->listen_fds,
                            NOTIFY_LISTEN_FD, strerror(-n));
    *ret_fd = n > 0 ? listen[0].fd : -1;
    return 0;
}

static int open_notify(struct process *p, const struct notify_env *env, struct report *report) {
    int r = notify_open(&p->notify, env, getpid());

    if (r != 0)
        return report_error(report, r, "NOTIFY_SOCKET=%s WATCHDOG_USEC=%s WATCHDOG_PID=%s: %s", env->notify_socket,
                            shown(env->watchdog_usec), shown(env->watchdog_pid), strerror(-r));
    p->service.stuck_us = p->notify.watchdog_us > 0 ? (uint64_t)p->notify.watchdog_us : STUCK_US;
    return 0;
}

/* One that came since the start of main() is heard now. */
static void hear_reload(void) {
    sigset_t set;

    sigemptyset(&set);
    sigaddset(&set, SIGHUP);
    sigprocmask(SIG_UNBLOCK, &set, NULL);
}

static void open_handles(struct process *p) {
    static const int SIGNALS[] = {SIGTERM, SIGINT, SIGHUP};

    uv_timer_init(&p->loop, &p->tick);
    uv_timer_init(&p->loop, &p->watchdog);
    uv_timer_init(&p->loop, &p->retry);
    uv_prepare_init(&p->loop, &p->turn);
    p->tick.data = p->watchdog.data = p->retry.data = p->turn.data = p->load.data = p;
    uv_prepare_start(&p->turn, on_turn);
    uv_timer_start(&p->tick, on_tick, 0, LOADING_TICK_MS);
    if (p->notify.watchdog_us > 0)
        uv_timer_start(&p->watchdog, on_watchdog, 0, (uint64_t)p->notify.watchdog_us / 2000);
    for (size_t i = 0; i < ARRAY_LEN(SIGNALS); i++) {
        uv_signal_init(&p->loop, &p->signals[i]);
        p->signals[i].data = p;
        uv_signal_start(&p->signals[i], on_signal, SIGNALS[i]);
    }
    hear_reload();
}

static void close_service(struct service *service) {
    gens_close(service->gens);
    pair_stop(&service->pair);
    engine_close(service->pair.engine); /* before the sessions and the store it has leases on */
    service->pair.engine = NULL;
    durable_close(service);
    sessions_close(service->sessions);
    pair_close(&service->pair);
    tiers_free(service);
    cache_folder_close(&service->folder);
    wire_out_deinit(&service->out);
    config_free(&service->config);
}

/* 0, or the status to exit with. */
static int open_process(struct process *p, const struct process_env *env, struct report *report) {
    struct service *service = &p->service;
    int listen_fd, r;

    r = uv_loop_init(&p->loop);
    if (r == 0)
        r = gens_open(service, &service->gens);
    if (r != 0) {
        report_line(report, "the loop cannot be set up: %s", strerror(-r));
        return PROCESS_EXIT_FAILED;
    }
    if (find_listen_fd(&env->notify, &listen_fd, report) != 0 || open_notify(p, &env->notify, report) != 0)
        return PROCESS_EXIT_CONFIG;
    r = config_has_disk(&service->config) ? cache_folder_open(service->config.kv.disk_path, &service->folder, report)
                                          : 0;
    if (r != 0)
        return r == -EINVAL ? PROCESS_EXIT_CONFIG : PROCESS_EXIT_FAILED;
    if (open_server(p, listen_fd, report) != 0)
        return listen_fd >= 0 ? PROCESS_EXIT_CONFIG : PROCESS_EXIT_FAILED;
    log_line(&service->log, LOG_INFO, "start", "version=%s socket=%s pid=%d", SPILLWAY_VERSION,
             listen_fd >= 0 ? "systemd's" : service->config.server.socket, (int)getpid());
    return 0;
}

int process_run(struct config *config, const struct config_source *source, const struct process_env *env) {
    struct process process = {.service = {.config = *config, .source = source, .started_us = service_now_us()}};
    struct process *p = &process;
    struct service *service = &p->service;
    struct report report;

    log_init(&service->log, STDERR_FILENO, (enum log_level)config->log.level,
             log_is_journal(STDERR_FILENO, env->journal_stream), NULL);
    metrics_init(&service->metrics);
    wire_out_init(&service->out, SERVICE_MESSAGE_BYTES_MAX);
    service->loop = &p->loop;
    service->drain = drain;
    p->notify.fd = -1;
    p->status = open_process(p, env, &report);
    if (p->status != 0) {
        log_line(&service->log, LOG_ERROR, "start.failed", "reason=%s", report.line);
    } else {
        open_handles(p);
        p->is_loading = true;
        uv_queue_work(&p->loop, &p->load, on_load, on_loaded);
        uv_run(&p->loop, UV_RUN_DEFAULT);
        log_line(&service->log, LOG_INFO, "stop", "status=%d", p->status);
    }
    uv_loop_close(&p->loop);
    if (p->is_lost) /* it gives nothing back, and waiting for it would never end */
        return p->status;
    close_service(service);
    notify_close(&p->notify);
    return p->status;
}
