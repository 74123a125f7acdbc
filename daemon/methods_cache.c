/* methods_cache: what is done with the tiers as a whole. */
#include <stdlib.h>

#include "methods_internal.h"

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

void cache_stats(const struct call *call) {
    const struct pair *pair = &call->service->pair;
    struct tier_stats device = device_tier(pair), host = host_tier(pair);

    begin(call, 1);
    wire_key(call->out, "tiers");
    wire_map(call->out, 3);
    put_tier(call->out, "device", &device);
    put_tier(call->out, "host", &host);
    put_tier(call->out, "disk", &(struct tier_stats){0});
}

/* ---- making room ---------------------------------------------------------------------------------------------------- */

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

/* What leaves a tier shall be in the one below by then, if it is to be there at all. */
static bool is_due_copied(const struct service *service, const struct request *request) {
    struct span tier = {0};

    request_get_str(request, "tier", &tier);
    return !span_is(tier, "device") || !service->pair.spill || kv_spill_is_idle(service->pair.spill);
}

static bool step_evict(struct errand *errand) {
    struct call call;
    int refusal;

    if (!errand->conn) /* nobody wants it any more */
        return true;
    if (!errand->is_stopping && !is_due_copied(errand->service, errand->request))
        return false;
    call = call_of_errand(errand, &refusal);
    evict(&call);
    call_answer(&call);
    return true;
}

static void free_errand(struct errand *errand) {
    free(errand);
}

void cache_evict(const struct call *call) {
    struct errand *errand;

    if (is_due_copied(call->service, call->request)) {
        evict(call);
        return;
    }
    errand = calloc(1, sizeof *errand);
    if (!errand) {
        refuse(call, PROTO_INTERNAL, "out of memory");
        return;
    }
    errand->step = step_evict;
    errand->free = free_errand;
    call_later(call, errand);
}

/* ---- the disk ------------------------------------------------------------------------------------------------------- */

void cache_verify(const struct call *call) { /* nothing lies on a disk */
    begin(call, 2);
    put_int(call->out, "pages", 0);
    put_int(call->out, "bad", 0);
}

void cache_flush(const struct call *call) {
    begin(call, 1);
    put_int(call->out, "pages", 0);
}
