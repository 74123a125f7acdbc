#include "reload.h"

#include <stdlib.h>

#include "conn.h"
#include "later.h"
#include "methods_internal.h"

struct reload {
    struct later later;
    struct reload *next; /* asked for after it */
    struct request *request;
    void (*done)(struct service *service);
    struct config fresh;
    int result;
    struct report report;
};

static struct reload *reload_of(struct later *later) {
    return container_of(later, struct reload, later);
}

static void run(struct later *later) {
    struct reload *reload = reload_of(later);

    reload->result = config_load(later->service->source, &reload->fresh, &reload->report);
}

static void put_changes(struct wire_out *out, const char *key, const struct config_change *changes, int n,
                        bool at_run_time) {
    uint32_t n_mine = 0;
    char name[64];

    for (int i = 0; i < n; i++)
        n_mine += changes[i].at_run_time == at_run_time;
    wire_key(out, key);
    wire_array(out, n_mine);
    for (int i = 0; i < n; i++)
        if (changes[i].at_run_time == at_run_time) {
            snprintf(name, sizeof name, "%s.%s", changes[i].section, changes[i].key);
            wire_cstr(out, name);
        }
}

static int adopt(struct service *service, struct config *fresh, struct config_change *ret_changes) {
    int n = config_diff(&service->config, fresh, ret_changes);

    config_adopt(&service->config, fresh);
    config_free(fresh);
    log_set_level(&service->log, (enum log_level)service->config.log.level);
    log_line(&service->log, LOG_INFO, "reload.done", "changed=%d", n);
    return n;
}

static void answer(struct reload *reload, const struct config_change *changes, int n) {
    struct service *service = reload->later.service;
    int refusal = -1;
    struct call call = {service, reload->later.conn, reload->request, &service->out, &refusal, NULL};

    if (reload->result != 0) {
        refuse(&call, PROTO_BAD_PARAM, reload->report.line);
    } else {
        begin(&call, 2);
        put_changes(call.out, "changed", changes, n, true);
        put_changes(call.out, "needs_restart", changes, n, false);
    }
    call_answer(&call);
}

static void finish(struct later *later) {
    struct reload *reload = reload_of(later);
    struct service *service = later->service;
    struct config_change changes[CONFIG_KEYS_MAX];
    int n = 0;

    later_end(later);
    if (reload->result == 0)
        n = adopt(service, &reload->fresh, changes);
    else
        log_line(&service->log, LOG_ERROR, "reload.refused", "reason=%s", reload->report.line);
    if (later->conn)
        answer(reload, changes, n);
    if (reload->done)
        reload->done(service);
    service->reloads = reload->next;
    if (reload->next)
        later_start(&reload->next->later);
    request_free(reload->request);
    free(reload);
}

void reload_start(struct service *service, struct conn *conn, struct request *request,
                  void (*done)(struct service *service)) {
    struct reload *reload = calloc(1, sizeof *reload), **last = &service->reloads;

    if (!reload) {
        log_line(&service->log, LOG_ERROR, "reload.refused", "reason=%s", "out of memory");
        if (conn)
            call_fail(service, conn, request);
        if (done)
            done(service);
        request_free(request);
        return;
    }
    reload->request = request;
    reload->done = done;
    reload->later.run = run;
    reload->later.finish = finish;
    later_begin(&reload->later, service, conn);
    while (*last)
        last = &(*last)->next;
    *last = reload;
    if (service->reloads == reload)
        later_start(&reload->later);
}
