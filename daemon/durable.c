#include "durable.h"

#include <errno.h>
#include <limits.h>
#include <string.h>

#include "fingerprint.h"
#include "service.h"
#include "uvwork.h"

enum { RETRY_US = 30 * 1000 * 1000 };

/* ---- at start ------------------------------------------------------------------------------------------------------- */

static int adopt(void *user, const struct session_record *record) {
    struct service *service = user;
    struct session *session;
    int r;

    for (uint32_t i = 0; i < record->n_tokens; i++)
        if (record->tokens[i] >= service->pair.info->n_valid) { /* the tokenizer has it, and this model not */
            service->n_sessions_unfit++;
            return 0;
        }
    r = sessions_make(service->sessions, record->uid, record->name, INT_MAX, &session);
    if (r == 0)
        r = sessions_extend(service->sessions, session, record->tokens, (int)record->n_tokens);
    if (r != 0)
        return r;
    session->is_pinned = record->is_pinned; /* what it pins comes with its next turn */
    session->is_parked = record->is_parked;
    session->restore_point = (int)record->restore_point;
    return 0;
}

static int names_of(const struct service *service, struct session_names *ret_names, struct report *report) {
    memcpy(ret_names->secret, service->folder.secret.bytes, sizeof ret_names->secret);
    return fingerprint_read_vocabulary(service->config.model.path, ret_names->vocabulary, report);
}

int durable_load(struct service *service, struct report *report) {
    int r;

    if (!config_has_disk(&service->config))
        return 0;
    r = names_of(service, &service->session_names, report);
    if (r != 0)
        return r;
    r = session_files_load(&service->folder.sessions, &service->session_names, adopt, service,
                           &service->sessions_found);
    return r == 0 ? 0
                  : report_error(report, r, "kv.disk_path: %s/sessions cannot be read: %s",
                                 report_path(service->config.kv.disk_path), strerror(-r));
}

static void log_found(struct service *service) {
    const struct session_files_found *found = &service->sessions_found;
    uint32_t n_bad = found->n_damaged + found->n_unreadable;

    for (uint32_t i = 0; i < found->n_bad; i++)
        log_line(&service->log, LOG_WARN, "session.record.bad", "file=sessions/%s reason=%s", found->bad[i].name,
                 found->bad[i].error ? strerror(-found->bad[i].error) : "damaged");
    if (found->n_whole + n_bad + found->n_foreign > 0)
        log_line(&service->log, n_bad > 0 ? LOG_WARN : LOG_INFO, "sessions.loaded",
                 "n=%d damaged=%u unreadable=%u foreign=%u", sessions_count(service->sessions), found->n_damaged,
                 found->n_unreadable, found->n_foreign + service->n_sessions_unfit);
}

/* ---- writing -------------------------------------------------------------------------------------------------------- */

static void on_trouble(void *user, int error) {
    struct service *service = user;

    if (error != 0)
        log_line(&service->log, LOG_ERROR, "sessions.not_durable", "folder=%s/sessions reason=%s",
                 service->config.kv.disk_path, strerror(-error));
    else
        log_line(&service->log, LOG_INFO, "sessions.durable", "folder=%s/sessions", service->config.kv.disk_path);
}

int durable_open(struct service *service) {
    struct session_files_options options = {.folder = &service->folder.sessions,
                                            .work = uvwork_of(service->loop),
                                            .names = service->session_names,
                                            .now_us = service_now_us,
                                            .retry_us = RETRY_US,
                                            .on_trouble = on_trouble,
                                            .user = service};
    int r;

    if (!config_has_disk(&service->config))
        return 0;
    log_found(service);
    r = session_files_open(&options, &service->files);
    for (struct session *session = sessions_first(service->sessions); r == 0 && session; session = session->next)
        r = session_files_add(service->files, session->uid, span_of(session->name), &session->file);
    return r;
}

void durable_close(struct service *service) {
    session_files_close(service->files);
    service->files = NULL;
}

void durable_look(const struct service *service, struct session *session) {
    struct found found = service_find(service, session->keys, session->tokens, sessions_n_pages(session));
    int n = found.device + found.host + found.disk;

    if (n > 0)
        session->restore_point = n;
}

/* False without a disk tier, and where there is no memory for it. */
static bool has_file(struct service *service, struct session *session) {
    if (!service->files)
        return false;
    return session->file ||
           session_files_add(service->files, session->uid, span_of(session->name), &session->file) == 0;
}

bool durable_keep(struct service *service, struct session *session, struct session_wait *wait) {
    struct session_record record;

    if (!session->is_parked)
        durable_look(service, session);
    if (!has_file(service, session))
        return false;
    record = (struct session_record){.uid = session->uid,
                                     .name = span_of(session->name),
                                     .is_pinned = session->is_pinned,
                                     .is_parked = session->is_parked,
                                     .restore_point = (uint32_t)session->restore_point,
                                     .tokens = session->tokens,
                                     .n_tokens = (uint32_t)session->n};
    if (session_files_put(service->files, session->file, &record) != 0) {
        log_line(&service->log, LOG_ERROR, "sessions.not_durable", "reason=%s", "out of memory");
        return false;
    }
    if (wait)
        session_files_wait(session->file, wait);
    return wait != NULL;
}

bool durable_drop(struct service *service, struct session *session, struct session_wait *wait) {
    struct session_file *file = session->file;

    sessions_drop(service->sessions, session);
    if (!file)
        return false;
    session_files_remove(service->files, file, wait);
    return true;
}

/* Among those that were found damaged, or -1. */
static int find_bad(const struct service *service, uid_t uid, struct span name) {
    const struct session_files_found *found = &service->sessions_found;
    char file[SESSION_FILES_NAME_BYTES];

    if (found->n_bad == 0 || name.n > SESSION_RECORD_NAME_BYTES_MAX ||
        session_files_name(&service->session_names, uid, name, file) != 0)
        return -1;
    for (uint32_t i = 0; i < found->n_bad; i++)
        if (strcmp(found->bad[i].name, file) == 0)
            return (int)i;
    return -1;
}

enum proto_code durable_missing(const struct service *service, uid_t uid, struct span name, struct report *report) {
    int bad = find_bad(service, uid, name);

    if (bad < 0) {
        report_line(report, "there is no session \"%.*s\"; session.open makes one", (int)name.n, name.bytes);
        return PROTO_NOT_FOUND;
    }
    report_line(
        report,
        "the record of session \"%.*s\" is damaged or cannot be read (%s/sessions/%s); put a copy back and start the "
        "daemon anew, or let session.close remove it",
        (int)name.n, name.bytes, report_path(service->config.kv.disk_path), service->sessions_found.bad[bad].name);
    return PROTO_CORRUPT;
}

bool durable_drop_damaged(struct service *service, uid_t uid, struct span name, struct session_wait *wait) {
    struct session_files_found *found = &service->sessions_found;
    int bad = find_bad(service, uid, name);
    struct session_file *file;

    if (bad < 0 || session_files_add(service->files, uid, name, &file) != 0)
        return false;
    session_files_remove(service->files, file, wait);
    found->bad[bad] = found->bad[--found->n_bad];
    return true;
}

int durable_n_on_disk(const struct service *service, const struct session *session) {
    const struct kv_vault *vault = service->pair.vault;
    int n = 0;

    for (int page = 0; vault && page < sessions_n_pages(session); page++) {
        if (!kv_vault_has(vault, &session->keys[page], (uint32_t)page, KV_TARGET_FULL))
            break;
        if (kv_vault_has(vault, &session->keys[page], (uint32_t)page, KV_TARGET_STATE))
            n = (page + 1) * PAGE_TOKENS;
    }
    return n;
}

bool durable_is(const struct service *service, const struct session *session) {
    return session->file && session_file_is_durable(session->file) &&
           (!session->is_parked || durable_n_on_disk(service, session) >= session->restore_point);
}

void durable_retry(struct service *service) {
    if (!service->files)
        return;
    for (struct session *session = sessions_first(service->sessions); session; session = session->next)
        if (!session->file || session_file_is_lost(session->file))
            durable_keep(service, session, NULL);
    session_files_retry(service->files);
}

uint32_t durable_n_unwritten(const struct service *service, int *ret_error) {
    struct session_files_stats stats = {0};

    *ret_error = 0;
    if (!service->files)
        return 0;
    session_files_stats(service->files, &stats);
    for (const struct session *session = sessions_first(service->sessions); session; session = session->next)
        stats.n_unwritten += !session->file;
    *ret_error = stats.error;
    return stats.n_unwritten;
}

uint64_t durable_tick(struct service *service) {
    return service->files ? session_files_tick(service->files) : 0;
}

bool durable_is_idle(const struct service *service) {
    return !service->files || session_files_is_idle(service->files);
}
