#include "service.h"

#include <sys/resource.h>
#include <time.h>

#include "gen.h"
#include "server.h"
#include "tiers.h"

uint64_t service_now_us(void) {
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_nsec / 1000;
}

struct found service_find(const struct service *service, const struct kv_key *keys, const int32_t *tokens,
                          int n_pages) {
    const struct pair *pair = &service->pair;
    struct kv_match match;
    struct kv_found found;
    int n_below;

    if (!pair->restores) {
        kv_store_lookup(pair->store, keys, tokens, (uint32_t)n_pages, &match);
        return (struct found){.device = (int)match.n_tokens};
    }
    kv_restores_lookup(pair->restores, keys, (uint32_t)n_pages, &found);
    n_below = (int)(found.n_tokens - found.n_device_tokens);
    return (struct found){(int)found.n_device_tokens, n_below - min_int(n_below, (int)found.n_disk_tokens),
                          min_int(n_below, (int)found.n_disk_tokens)};
}

void service_write_tiers(struct wire_out *out, struct found found) {
    wire_map(out, 3);
    wire_key(out, "device");
    wire_int(out, found.device);
    wire_key(out, "host");
    wire_int(out, found.host);
    wire_key(out, "disk");
    wire_int(out, found.disk);
}

bool service_is_progressing(const struct service *service) {
    struct engine_view view;

    if (service->phase == SERVICE_LOADING)
        return true;
    engine_look(service->pair.engine, &view);
    return view.error == 0 && (view.waits_since_us == 0 || service_now_us() - view.waits_since_us < service->stuck_us);
}

int service_percent(const struct service *service) {
    int n = service->n_draining;

    switch (service->phase) {
    case SERVICE_LOADING:
        return __atomic_load_n(&service->progress.percent, __ATOMIC_ACQUIRE);
    case SERVICE_SERVING:
        break;
    case SERVICE_DRAINING:
        return n > 0 ? 99 * (n - gens_count(service->gens)) / n : 99;
    }
    return 100;
}

uint64_t service_progress(const struct service *service) {
    const struct pair *pair = &service->pair;
    struct session_files_stats files = {0};
    struct kv_restores_stats restores = {0};
    struct kv_spill_stats spills = {0};
    struct kv_vault_stats vault = {0};
    struct engine_view view;

    if (service->phase == SERVICE_LOADING)
        return service_now_us(); /* the steps of loading are few and long */
    engine_look(pair->engine, &view);
    if (service->files)
        session_files_stats(service->files, &files);
    if (pair->restores)
        kv_restores_stats(pair->restores, &restores);
    if (pair->spill)
        kv_spill_stats(pair->spill, &spills);
    if (pair->vault)
        kv_vault_stats(pair->vault, &vault);
    return view.n_plans + files.n_written + files.n_removed + restores.n_copies + spills.n_copies +
           vault.n_saved_pages + vault.n_reads + vault.n_syncs;
}

bool service_is_quiet(const struct service *service) {
    struct engine_view view;

    engine_look(service->pair.engine, &view);
    return view.n_in_flight == 0 && tiers_are_quiet(service);
}

static void update_server(struct service *service) {
    struct metrics *m = &service->metrics;
    struct server_stats s;

    server_read_stats(service->server, &s);
    metrics_set(m, METRIC_CONNECTIONS, 0, s.n_conns);
    metrics_set(m, METRIC_CONNECTIONS_ACCEPTED, 0, (int64_t)s.n_accepted);
    metrics_set(m, METRIC_CONNECTIONS_REJECTED, 0, (int64_t)s.n_rejected);
    metrics_set(m, METRIC_BAD_FRAMES, 0, (int64_t)s.n_bad_frames);
    metrics_set(m, METRIC_SLOW_CLIENTS, 0, (int64_t)s.n_slow_closes);
    metrics_set(m, METRIC_READ_BYTES, 0, (int64_t)s.in_bytes);
    metrics_set(m, METRIC_WRITTEN_BYTES, 0, (int64_t)s.out_bytes);
}

static int64_t percent(uint64_t n, uint64_t of) {
    return of > 0 ? (int64_t)(100 * n / of) : 0;
}

static void update_engine(struct service *service) {
    const struct config *config = &service->config;
    struct metrics *m = &service->metrics;
    struct engine_view v;

    engine_look(service->pair.engine, &v);
    metrics_set(m, METRIC_PREFILL_TOKENS, 0, (int64_t)v.n_prefill_rows);
    metrics_set(m, METRIC_STEPS, METRIC_PART_PREFILL, (int64_t)v.n_prefills);
    metrics_set(m, METRIC_STEPS, METRIC_PART_CYCLE, (int64_t)v.n_cycles);
    metrics_set(m, METRIC_PLAN_ROWS, METRIC_PART_PREFILL, (int64_t)v.n_prefill_rows);
    metrics_set(m, METRIC_PLAN_ROWS, METRIC_PART_CYCLE, (int64_t)v.n_cycle_seqs);
    metrics_set(m, METRIC_PLAN_ROOM, METRIC_PART_PREFILL, (int64_t)v.n_prefills * config->sched.prefill_chunk);
    metrics_set(m, METRIC_PLAN_ROOM, METRIC_PART_CYCLE, (int64_t)v.n_cycles * v.n_places);
    metrics_set(m, METRIC_PREEMPTIONS, 0, (int64_t)v.n_preemptions);
    metrics_set(m, METRIC_QUEUED, 0, v.n_waiting);
    metrics_set(m, METRIC_RUNNING, 0, v.n_running);
    metrics_set(m, METRIC_PREEMPTED, 0, v.n_leaving);
    metrics_set(m, METRIC_STREAMING_PAGES, METRIC_TIER_DEVICE, v.n_stays);
    metrics_set(m, METRIC_STREAMING_PAGES, METRIC_TIER_HOST, v.n_streamed);
    metrics_set(m, METRIC_STREAMED_BYTES, 0, (int64_t)v.streamed_bytes);
    metrics_set(m, METRIC_STREAM_FENCES, 0, (int64_t)v.n_fences);
    metrics_set(m, METRIC_STREAM_LATE_FENCES, 0, (int64_t)v.n_late);
    metrics_set(m, METRIC_STREAM_PASSES, 0, (int64_t)v.n_streamed_passes);
    metrics_set(m, METRIC_STREAM_PASS_BYTES, 0, (int64_t)v.streamed_pass_bytes);
    metrics_set(m, METRIC_STREAM_RESIDENT_PERCENT, 0, percent(v.n_stays, v.n_stays + v.n_streamed));
    metrics_set(m, METRIC_STREAM_RING_PERCENT, 0, min_int(100, (int)percent(v.n_streamed, v.n_ring_pages)));
}

static void update_store(struct service *service) {
    const struct memplan *plan = &service->pair.plan;
    struct metrics *m = &service->metrics;
    struct kv_store_stats s;

    kv_store_stats(service->pair.store, &s);
    tiers_update_share(m, METRIC_TIER_DEVICE, s.share);
    for (int g = 0; g < KV_GROUP_N; g++) {
        const struct kv_group_stats *group = &s.group[g];

        metrics_set(m, METRIC_POOL_SLOTS, g, group->n_slots);
        metrics_set(m, METRIC_POOL_FREE, g, group->n_free);
        metrics_set(m, METRIC_POOL_INDEXED, g, group->n_indexed);
        metrics_set(m, METRIC_POOL_PINNED, g, group->n_pinned);
        metrics_set(m, METRIC_POOL_BYTES, g, (int64_t)(plan->model.slot_bytes[g] * group->n_slots));
        metrics_set(m, METRIC_EVICTIONS, g, (int64_t)group->n_evicted);
    }
    metrics_set(m, METRIC_RESTORE_POINTS, 0, s.group[KV_TARGET_STATE].n_indexed);
    metrics_set(m, METRIC_LOOKUPS, METRIC_LOOKUP_HIT, (int64_t)s.n_hits);
    metrics_set(m, METRIC_LOOKUPS, METRIC_LOOKUP_MISS, (int64_t)(s.n_matches - s.n_hits));
}

static void update_sessions(struct service *service) {
    const struct session_files_found *found = &service->sessions_found;
    struct session_files_stats s = {0};
    struct metrics *m = &service->metrics;

    if (service->files)
        session_files_stats(service->files, &s);
    metrics_set(m, METRIC_SESSIONS, 0, sessions_count(service->sessions));
    metrics_set(m, METRIC_SESSIONS_UNWRITTEN, 0, s.n_unwritten);
    metrics_set(m, METRIC_SESSION_RECORDS, METRIC_RECORD_WRITTEN, (int64_t)s.n_written);
    metrics_set(m, METRIC_SESSION_RECORDS, METRIC_RECORD_REMOVED, (int64_t)s.n_removed);
    metrics_set(m, METRIC_SESSION_RECORDS, METRIC_RECORD_FAILED, (int64_t)s.n_failed);
    metrics_set(m, METRIC_SESSION_RECORDS, METRIC_RECORD_BAD, found->n_damaged + found->n_unreadable);
    metrics_set(m, METRIC_SESSION_RECORD_BYTES, 0, (int64_t)s.bytes);
}

void service_update_metrics(struct service *service) {
    struct metrics *m = &service->metrics;
    struct rusage usage;

    update_server(service);
    if (service->phase != SERVICE_LOADING) {
        update_engine(service);
        update_store(service);
        tiers_update_metrics(service);
        update_sessions(service);
    }
    if (getrusage(RUSAGE_THREAD, &usage) == 0)
        metrics_set(m, METRIC_LOOP_CPU_US, 0,
                    (int64_t)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1000000 + usage.ru_utime.tv_usec +
                        usage.ru_stime.tv_usec);
    metrics_set(m, METRIC_LOG_DROPPED, 0, (int64_t)service->log.n_lost);
    metrics_set(m, METRIC_UPTIME_US, 0, (int64_t)(service_now_us() - service->started_us));
    metrics_set(m, METRIC_READY, 0, service->phase == SERVICE_SERVING);
}
