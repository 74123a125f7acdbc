#include "tiers.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <uv.h>

#include "pressure.h"
#include "service.h"
#include "uvwork.h"
#include "watch.h"

struct tiers {
    struct kv_work work;
    uv_timer_t timer; /* the vault's next turn */
    struct watch *watch;
    struct { /* of which the log has told */
        bool is_off, is_write_off, is_scanning, is_warming;
        uint64_t n_damaged, n_host_damaged, room_bytes;
    } told;
};

static void on_timer(uv_timer_t *timer) {
    (void)timer; /* the turn after it does the rest */
}

static void on_disk(void *user) {
    struct service *service = user;

    kv_vault_dispatch(service->pair.vault);
}

static void on_saved(void *user, const struct kv_vault_saved *saved) {
    struct service *service = user;

    log_line(&service->log, LOG_INFO, "save", "reason=%s n_tokens=%u slots=%u bytes=%llu ms=%llu result=%s",
             saved->why == KV_VAULT_SAVE_MUST ? "must" : "worth", saved->n_tokens, saved->n_slots,
             (unsigned long long)saved->bytes, (unsigned long long)saved->us / 1000, saved->outcome);
}

static void on_restored(void *user, const struct kv_restored *restored) {
    struct service *service = user;
    double ms[KV_RESTORE_STAGE_N];

    for (int i = 0; i < KV_RESTORE_STAGE_N; i++)
        ms[i] = (double)restored->stage_us[i] / 1000;
    log_line(&service->log, LOG_INFO, "restore",
             "uid=%u reason=%s n_tokens=%u slots=%u disk_slots=%u bytes=%llu ms=%.1f read_ms=%.1f check_ms=%.1f "
             "copy_ms=%.1f wait_ms=%.1f result=%s",
             restored->uid, restored->why == KV_RESTORE_PREFETCH ? "prefetch" : "request", restored->n_tokens,
             restored->n_copies, restored->n_disk_pages, (unsigned long long)restored->bytes,
             (double)restored->us / 1000, ms[KV_RESTORE_READING], ms[KV_RESTORE_CHECKING], ms[KV_RESTORE_COPYING],
             ms[KV_RESTORE_WAITING], restored->result == 0 ? "done" : strerror(-restored->result));
}

/* Room for less than was asked for, or for less than the log has told. */
static void tell_of_room(struct service *service, const struct kv_vault_stats *stats, uint64_t told_bytes) {
    if (stats->room_bytes < told_bytes)
        log_line(
            &service->log, LOG_WARN, "disk.short",
            "path=%s room_bytes=%llu wanted_bytes=%llu: the file system has no room for all of kv.disk_bytes; what "
            "is older leaves sooner; make room, or lower kv.disk_bytes",
            service->config.kv.disk_path, (unsigned long long)stats->room_bytes,
            (unsigned long long)service->config.kv.disk_bytes);
    service->tiers->told.room_bytes = stats->room_bytes;
}

static void log_opened(struct service *service) {
    uint64_t wanted_bytes = service->config.kv.disk_bytes;
    struct kv_vault_stats stats;

    kv_vault_stats(service->pair.vault, &stats);
    log_line(&service->log, LOG_INFO, "disk.open",
             "path=%s bytes=%llu segments=%u segment_bytes=%llu ring=%d direct=%d registered_buffers=%d", //
             service->config.kv.disk_path, (unsigned long long)stats.cap_bytes, stats.n_segments,
             (unsigned long long)stats.segment_bytes, stats.disk.is_ring, stats.disk.is_direct,
             stats.disk.has_registered_buffers);
    tell_of_room(service, &stats, wanted_bytes - wanted_bytes % stats.segment_bytes);
}

/* ---- short of memory ------------------------------------------------------------------------------------------------ */

enum { QUIET_MS = 60 * 1000 };

static void on_pressure_changed(void *user, const struct pressure_stats *stats) {
    struct service *service = user;

    log_line(&service->log, stats->is_short ? LOG_WARN : LOG_INFO, stats->is_short ? "pressure.short" : "pressure.over",
             "events=%llu away_bytes=%llu given_bytes=%llu kv.host_bytes=%llu", (unsigned long long)stats->n_events,
             (unsigned long long)stats->away_bytes, (unsigned long long)stats->given_bytes,
             (unsigned long long)service->config.kv.host_bytes);
}

/* Best effort: where the kernel does not tell, nothing is given back, and the log says so once. */
static void watch_pressure(struct service *service) {
    struct pressure_options options = {.loop = service->loop,
                                       .shelf = service->pair.shelf,
                                       .vault = service->pair.vault,
                                       .quiet_ms = QUIET_MS,
                                       .on_change = on_pressure_changed,
                                       .user = service};
    char path[4200] = "";
    int r;

    r = pressure_path(path, sizeof path);
    if (r == 0)
        r = options.fd = pressure_trigger(path);
    if (r >= 0) {
        r = pressure_start(&options, &service->pressure);
        if (r != 0)
            close(options.fd);
    }
    if (r < 0)
        log_line(&service->log, LOG_INFO, "pressure.unwatched", "path=%s reason=%s", path, strerror(-r));
    else
        log_line(&service->log, LOG_INFO, "pressure.watched", "path=%s", path);
}

/* ---- opening -------------------------------------------------------------------------------------------------------- */

static int open_disk(struct service *service, struct report *report) {
    struct tiers *tiers = service->tiers;
    int r;

    r = pair_open_disk(&service->pair, &service->config, &service->folder, &tiers->work, service_now_us, on_saved,
                       service, report);
    if (r != 0)
        return r;
    tiers->told.is_scanning = tiers->told.is_warming = true;
    log_opened(service);
    r = watch_start(service->loop, kv_vault_fd(service->pair.vault), on_disk, service, &tiers->watch);
    return r == 0 ? 0 : report_error(report, r, "kv.disk_path: the loop cannot watch the disk: %s", strerror(-r));
}

int tiers_open(struct service *service, struct report *report) {
    struct tiers *tiers;
    int r;

    if (!service->pair.shelf)
        return 0;
    tiers = calloc(1, sizeof *tiers);
    if (!tiers)
        return report_error(report, -ENOMEM, "tiers: out of memory");
    service->tiers = tiers;
    kv_restores_set_listener(service->pair.restores, on_restored, service);
    tiers->work = uvwork_of(service->loop);
    uv_timer_init(service->loop, &tiers->timer);
    r = config_has_disk(&service->config) ? open_disk(service, report) : 0;
    if (r != 0)
        return r;
    r = pair_open_scrub(&service->pair, &service->config, &tiers->work, service_now_us);
    if (r != 0)
        return report_error(report, r, "tiers: out of memory");
    watch_pressure(service);
    return 0;
}

void tiers_stop(struct service *service) {
    struct tiers *tiers = service->tiers;

    pressure_stop(service->pressure);
    service->pressure = NULL;
    if (!tiers)
        return;
    if (tiers->watch)
        watch_stop(tiers->watch);
    uv_close((uv_handle_t *)&tiers->timer, NULL);
}

void tiers_free(struct service *service) {
    free(service->tiers);
    service->tiers = NULL;
}

/* ---- turns ---------------------------------------------------------------------------------------------------------- */

/* One line per change of state. */
static void tell(struct service *service) {
    struct tiers *tiers = service->tiers;
    struct kv_vault_stats stats;

    kv_vault_stats(service->pair.vault, &stats);
    if (stats.is_off != tiers->told.is_off)
        log_line(&service->log, stats.is_off ? LOG_ERROR : LOG_INFO, stats.is_off ? "disk.off" : "disk.on",
                 "path=%s read_errors=%llu late=%llu write_errors=%llu sync_errors=%llu", service->config.kv.disk_path,
                 (unsigned long long)stats.n_read_errors, (unsigned long long)stats.n_read_late,
                 (unsigned long long)stats.n_write_errors, (unsigned long long)stats.n_sync_errors);
    if (stats.is_write_off != tiers->told.is_write_off)
        log_line(&service->log, stats.is_write_off ? LOG_WARN : LOG_INFO,
                 stats.is_write_off ? "disk.write_off" : "disk.write_on", "path=%s error=%s",
                 service->config.kv.disk_path, strerror(-stats.write_error));
    if (stats.n_damaged != tiers->told.n_damaged)
        log_line(&service->log, LOG_WARN, "disk.damaged", "path=%s pages=%llu total=%llu", service->config.kv.disk_path,
                 (unsigned long long)(stats.n_damaged - tiers->told.n_damaged), (unsigned long long)stats.n_damaged);
    if (stats.is_scanning != tiers->told.is_scanning)
        log_line(&service->log, LOG_INFO, "disk.scanned", "segments=%u slots=%llu bad=%llu foreign=%llu",
                 stats.n_segments, (unsigned long long)stats.n_scanned, (unsigned long long)stats.n_scan_bad,
                 (unsigned long long)stats.n_scan_foreign);
    if (stats.is_warming != tiers->told.is_warming && stats.warm_bytes > 0)
        log_line(&service->log, LOG_INFO, "disk.warmed", "prefixes=%llu pages=%llu bytes=%llu ms=%llu",
                 (unsigned long long)stats.n_warm_chains, (unsigned long long)stats.n_warm_pages,
                 (unsigned long long)stats.warm_bytes, (unsigned long long)stats.warm_us / 1000);
    tell_of_room(service, &stats, tiers->told.room_bytes);
    tiers->told.is_warming = stats.is_warming;
    tiers->told.is_off = stats.is_off;
    tiers->told.is_write_off = stats.is_write_off;
    tiers->told.is_scanning = stats.is_scanning;
    tiers->told.n_damaged = stats.n_damaged;
}

static void tell_of_host(struct service *service) {
    struct kv_scrub_stats stats;

    if (!service->pair.scrub)
        return;
    kv_scrub_stats(service->pair.scrub, &stats);
    if (stats.n_host_damaged != service->tiers->told.n_host_damaged)
        log_line(&service->log, LOG_WARN, "host.damaged", "pages=%llu total=%llu",
                 (unsigned long long)(stats.n_host_damaged - service->tiers->told.n_host_damaged),
                 (unsigned long long)stats.n_host_damaged);
    service->tiers->told.n_host_damaged = stats.n_host_damaged;
}

static uint64_t sooner(uint64_t a, uint64_t b) { /* 0: never */
    return a == 0 || (b != 0 && b < a) ? b : a;
}

/* Nobody waits for anything. */
static bool is_idle(const struct service *service) {
    struct engine_view view;

    engine_look(service->pair.engine, &view);
    return service->phase == SERVICE_SERVING && !service->errands && view.n_waiting + view.n_running == 0;
}

void tiers_turn(struct service *service) {
    struct pair *pair = &service->pair;
    uint64_t next = 0, now;
    bool may_look_around;

    do {
        engine_turn(pair->engine);
    } while (pair->restores && kv_restores_turn(pair->restores));
    pressure_turn(service->pressure);
    if (!pair->shelf)
        return;
    may_look_around = is_idle(service);
    if (pair->vault)
        kv_vault_let_warm(pair->vault, may_look_around);
    do
        next = pair->vault ? kv_vault_turn(pair->vault) : 0;
    while (kv_spill_turn(pair->spill));
    if (pair->scrub)
        next = sooner(next, kv_scrub_turn(pair->scrub, may_look_around && tiers_are_quiet(service)));
    now = service_now_us();
    if (pair->vault)
        tell(service);
    tell_of_host(service);
    if (next == 0)
        uv_timer_stop(&service->tiers->timer);
    else
        uv_timer_start(&service->tiers->timer, on_timer, next > now ? (next - now) / 1000 + 1 : 1, 0);
}

bool tiers_are_quiet(const struct service *service) {
    const struct pair *pair = &service->pair;
    struct kv_restores_stats restores = {0};

    if (pair->restores)
        kv_restores_stats(pair->restores, &restores);
    return restores.n_now == 0 && (!pair->spill || kv_spill_is_idle(pair->spill)) &&
           (!pair->vault || kv_vault_is_quiet(pair->vault));
}

/* ---- metrics -------------------------------------------------------------------------------------------------------- */

void tiers_update_share(struct metrics *metrics, enum metric_tier tier, const struct kv_share *share) {
    metrics_set(metrics, METRIC_SHARE_USERS, (int)tier, kv_share_n_users(share));
    metrics_set(metrics, METRIC_SHARE_KEPT, (int)tier, (int64_t)share->n_kept);
}

static void update_host(struct service *service) {
    struct metrics *m = &service->metrics;
    const struct pair *pair = &service->pair;
    struct kv_restores_stats restores;
    struct kv_spill_stats spill;
    struct pressure_stats pressure;

    for (int g = 0; g < KV_GROUP_N; g++) {
        struct kv_shelf_group_stats group;

        kv_shelf_stats(pair->shelf, (enum kv_group)g, &group);
        metrics_set(m, METRIC_HOST_SLOTS, g, group.n_slots);
        metrics_set(m, METRIC_HOST_CLEAN, g, group.n_clean);
        metrics_set(m, METRIC_HOST_FILLING, g, group.n_filling);
        metrics_set(m, METRIC_HOST_PINNED, g, group.n_pinned);
        metrics_set(m, METRIC_HOST_EVICTIONS, g, (int64_t)group.n_evicted);
        metrics_set(m, METRIC_HOST_AWAY, g, group.n_away);
    }
    if (service->pressure) {
        pressure_stats(service->pressure, &pressure);
        metrics_set(m, METRIC_PRESSURE_EVENTS, 0, (int64_t)pressure.n_events);
        metrics_set(m, METRIC_PRESSURE_GIVEN_BYTES, 0, (int64_t)pressure.given_bytes);
        metrics_set(m, METRIC_PRESSURE_GAVE_NONE, 0, (int64_t)pressure.n_gave_none);
    }
    tiers_update_share(m, METRIC_TIER_HOST, kv_shelf_share(pair->shelf));
    kv_spill_stats(pair->spill, &spill);
    metrics_set(m, METRIC_SPILLED_BYTES, 0, (int64_t)spill.bytes);
    metrics_set(m, METRIC_SPILLS_SKIPPED, METRIC_SPILL_NO_JOB, (int64_t)spill.n_no_job);
    metrics_set(m, METRIC_SPILLS_SKIPPED, METRIC_SPILL_NO_SLOT, (int64_t)spill.n_no_slot);
    metrics_set(m, METRIC_SPILLS_SKIPPED, METRIC_SPILL_FAILED, (int64_t)spill.n_failed);
    kv_restores_stats(pair->restores, &restores);
    metrics_set(m, METRIC_RESTORES, METRIC_RESTORE_DONE, (int64_t)restores.n_done);
    metrics_set(m, METRIC_RESTORES, METRIC_RESTORE_FAILED, (int64_t)restores.n_failed);
    metrics_set(m, METRIC_RESTORED_BYTES, 0, (int64_t)restores.bytes);
    for (int i = 0; i < KV_RESTORE_STAGE_N; i++)
        metrics_set(m, METRIC_RESTORE_US, i, (int64_t)restores.stage_us[i]);
}

static void update_scrub(struct service *service) {
    struct metrics *m = &service->metrics;
    struct kv_scrub_stats s;

    kv_scrub_stats(service->pair.scrub, &s);
    metrics_set(m, METRIC_SCRUBBED, METRIC_TIER_HOST, (int64_t)s.n_host);
    metrics_set(m, METRIC_SCRUBBED, METRIC_TIER_DISK, (int64_t)s.n_disk);
    metrics_set(m, METRIC_SCRUB_DAMAGED, METRIC_TIER_HOST, (int64_t)s.n_host_damaged);
    metrics_set(m, METRIC_SCRUB_DAMAGED, METRIC_TIER_DISK, (int64_t)s.n_disk_damaged);
    metrics_set(m, METRIC_SCRUBBED_BYTES, 0, (int64_t)s.bytes);
    metrics_set(m, METRIC_SCRUB_ROUNDS, 0, (int64_t)s.n_rounds);
}

static void update_disk(struct service *service) {
    struct metrics *m = &service->metrics;
    struct kv_vault_stats s;

    kv_vault_stats(service->pair.vault, &s);
    tiers_update_share(m, METRIC_TIER_DISK, kv_vault_share(service->pair.vault));
    for (int g = 0; g < KV_GROUP_N; g++) {
        metrics_set(m, METRIC_DISK_SLOTS, g, s.group[g].n_slots);
        metrics_set(m, METRIC_DISK_STORED, g, s.group[g].n_stored);
        metrics_set(m, METRIC_DISK_WRITING, g, s.group[g].n_writing);
        metrics_set(m, METRIC_DISK_PINNED, g, s.group[g].n_pinned);
        metrics_set(m, METRIC_DISK_EVICTIONS, g, (int64_t)s.group[g].n_evicted);
    }
    metrics_set(m, METRIC_DISK_FILE_BYTES, 0, (int64_t)s.bytes);
    metrics_set(m, METRIC_DISK_ROOM_BYTES, 0, (int64_t)s.room_bytes);
    metrics_set(m, METRIC_DISK_SAVES, 0, (int64_t)s.n_saves);
    metrics_set(m, METRIC_DISK_SAVED_BYTES, 0, (int64_t)s.saved_bytes);
    metrics_set(m, METRIC_DISK_READ_BYTES, 0, (int64_t)s.read_bytes);
    metrics_set(m, METRIC_DISK_SKIPPED, METRIC_SKIP_SHORT, (int64_t)s.n_skipped_short);
    metrics_set(m, METRIC_DISK_SKIPPED, METRIC_SKIP_BUDGET, (int64_t)s.n_skipped_budget);
    metrics_set(m, METRIC_DISK_SKIPPED, METRIC_SKIP_OFF, (int64_t)s.n_skipped_off);
    metrics_set(m, METRIC_DISK_SKIPPED, METRIC_SKIP_FULL, (int64_t)s.n_skipped_full);
    metrics_set(m, METRIC_DISK_SKIPPED, METRIC_SKIP_GONE, (int64_t)s.n_skipped_gone);
    metrics_set(m, METRIC_DISK_ERRORS, METRIC_DISK_ERROR_READ, (int64_t)s.n_read_errors);
    metrics_set(m, METRIC_DISK_ERRORS, METRIC_DISK_ERROR_LATE, (int64_t)s.n_read_late);
    metrics_set(m, METRIC_DISK_ERRORS, METRIC_DISK_ERROR_WRITE, (int64_t)s.n_write_errors);
    metrics_set(m, METRIC_DISK_ERRORS, METRIC_DISK_ERROR_SYNC, (int64_t)s.n_sync_errors);
    metrics_set(m, METRIC_DISK_ERRORS, METRIC_DISK_ERROR_LOST, (int64_t)s.n_lost);
    metrics_set(m, METRIC_DISK_ERRORS, METRIC_DISK_ERROR_DAMAGED, (int64_t)s.n_damaged);
    metrics_set(m, METRIC_DISK_ERRORS, METRIC_DISK_ERROR_BLANK, (int64_t)s.n_blank_errors);
    metrics_set(m, METRIC_DISK_USED_BYTES, 0, (int64_t)s.used_bytes);
    metrics_set(m, METRIC_DISK_NEVER_READ, 0, (int64_t)s.n_never_read);
    metrics_set(m, METRIC_DISK_OFF, 0, s.is_off);
    metrics_set(m, METRIC_DISK_WRITE_OFF, 0, s.is_write_off);
    metrics_set(m, METRIC_DISK_BREAKER_OPENED, 0, (int64_t)s.n_breaker_opened);
    metrics_set(m, METRIC_DISK_BUDGET_BYTES, 0, s.budget_bytes == UINT64_MAX ? -1 : (int64_t)s.budget_bytes);
    metrics_set(m, METRIC_DISK_SCANNING, 0, s.is_scanning);
    metrics_set(m, METRIC_WARMING, 0, s.is_warming);
    metrics_set(m, METRIC_WARMED_BYTES, 0, (int64_t)s.warm_bytes);
    metrics_set(m, METRIC_WARMED_PREFIXES, 0, (int64_t)s.n_warm_chains);
    metrics_set(m, METRIC_DISK_SCANNED, METRIC_SCANNED_ALL, (int64_t)s.n_scanned);
    metrics_set(m, METRIC_DISK_SCANNED, METRIC_SCANNED_BAD, (int64_t)s.n_scan_bad);
    metrics_set(m, METRIC_DISK_SCANNED, METRIC_SCANNED_FOREIGN, (int64_t)s.n_scan_foreign);
    metrics_set(m, METRIC_DISK_COMPLETIONS, METRIC_COMPLETION_SHORT, (int64_t)s.disk.n_short);
    metrics_set(m, METRIC_DISK_COMPLETIONS, METRIC_COMPLETION_UNKNOWN, (int64_t)s.disk.n_unknown);
    metrics_set(m, METRIC_DISK_COMPLETIONS, METRIC_COMPLETION_CANCELLED, (int64_t)s.disk.n_cancelled);
    metrics_set(m, METRIC_DISK_COMPLETIONS, METRIC_COMPLETION_RETRIED, (int64_t)s.disk.n_retries);
    metrics_set(m, METRIC_DISK_QUARANTINED_BYTES, 0, (int64_t)s.disk.out_late_bytes);
    metrics_set(m, METRIC_DISK_FEATURE, METRIC_FEATURE_DIRECT, s.disk.is_direct);
    metrics_set(m, METRIC_DISK_FEATURE, METRIC_FEATURE_RING, s.disk.is_ring);
    metrics_set(m, METRIC_DISK_FEATURE, METRIC_FEATURE_FILES, s.disk.has_registered_files);
    metrics_set(m, METRIC_DISK_FEATURE, METRIC_FEATURE_BUFFERS, s.disk.has_registered_buffers);
}

void tiers_update_metrics(struct service *service) {
    if (service->pair.shelf)
        update_host(service);
    if (service->pair.vault)
        update_disk(service);
    if (service->pair.scrub)
        update_scrub(service);
}
