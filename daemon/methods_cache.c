/* methods_cache: what is done with the tiers as a whole. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "conn.h"
#include "durable.h"
#include "methods_internal.h"

enum {
    SPILL_US = 30 * 1000 * 1000, /* how long something waits for what others have on their way */
    PURGE_EVERY_US = 100 * 1000,
};

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

/* Pages of the device are its index's; of the others those of the target. */
static struct tier_stats disk_tier(const struct pair *pair) {
    struct tier_stats t = {0};
    struct kv_vault_stats stats;

    if (!pair->vault)
        return t;
    kv_vault_stats(pair->vault, &stats);
    t.bytes = stats.cap_bytes;
    for (int g = 0; g < KV_GROUP_N; g++) {
        t.used_bytes +=
            (stats.group[g].n_stored + stats.group[g].n_writing) * kv_shelf_slot_bytes(pair->shelf, (enum kv_group)g);
        t.n_evicted += stats.group[g].n_evicted;
    }
    t.n_pages = stats.group[KV_TARGET_FULL].n_stored;
    t.n_hits = stats.n_reads;
    t.n_spilled = stats.n_saved_pages;
    t.n_fetched = stats.n_reads;
    return t;
}

void cache_stats(const struct call *call) {
    const struct pair *pair = &call->service->pair;
    struct tier_stats device = device_tier(pair), host = host_tier(pair), disk = disk_tier(pair);

    begin(call, 1);
    wire_key(call->out, "tiers");
    wire_map(call->out, 3);
    put_tier(call->out, "device", &device);
    put_tier(call->out, "host", &host);
    put_tier(call->out, "disk", &disk);
}

/* ---- what takes several turns --------------------------------------------------------------------------------------- */

/*  SPILLING --the shelf has what it will get--> SAVING --the disk has, too--> over
 *  what is done in the end is the method's */
enum chore_state { CHORE_SPILLING, CHORE_SAVING, CHORE_OVER };

struct chore {
    struct errand errand;
    enum chore_state state;
    struct kv_vault_flush flush;
    struct kv_vault_verify verify;
    struct kv_vault_stats before;
    uint64_t until_us; /* SPILLING */
    bool is_done;      /* the flush, the verification */
    int result;
};

static struct chore *chore_of(struct errand *errand) {
    return container_of(errand, struct chore, errand);
}

static void free_chore(struct errand *errand) {
    free(chore_of(errand));
}

/* NULL: it was refused. */
static struct chore *chore_new(const struct call *call, bool (*step)(struct errand *errand)) {
    struct chore *chore = calloc(1, sizeof *chore);

    if (!chore) {
        refuse(call, PROTO_INTERNAL, "out of memory");
        return NULL;
    }
    if (call->service->pair.vault)
        kv_vault_stats(call->service->pair.vault, &chore->before);
    chore->until_us = service_now_us() + SPILL_US;
    chore->errand.step = step;
    chore->errand.free = free_chore;
    return chore;
}

static void enter(struct chore *chore, enum chore_state state) {
    chore->state = state;
    chore->errand.has_moved = true;
}

/* Others go on and on, or the process ends. */
static bool is_out_of_time(const struct chore *chore) {
    return chore->errand.is_stopping || service_now_us() >= chore->until_us;
}

/* What was answered has let go of its pages, and they are below. */
static bool is_spilled(const struct chore *chore) {
    const struct pair *pair = &chore->errand.service->pair;
    struct engine_view view;

    engine_look(pair->engine, &view);
    return is_out_of_time(chore) || (view.n_leaving == 0 && (!pair->spill || kv_spill_is_idle(pair->spill)));
}

/* ---- making room ---------------------------------------------------------------------------------------------------- */

enum tier { TIER_DEVICE, TIER_HOST, TIER_DISK };

static enum tier tier_of(const struct request *request) {
    struct span tier = {0};

    request_get_str(request, "tier", &tier);
    return span_is(tier, "device") ? TIER_DEVICE : span_is(tier, "host") ? TIER_HOST : TIER_DISK;
}

static uint64_t n_pages_of(const struct pair *pair, enum tier tier) {
    struct tier_stats stats = tier == TIER_DEVICE ? device_tier(pair)
                              : tier == TIER_HOST ? host_tier(pair)
                                                  : disk_tier(pair);

    return stats.n_pages;
}

static void evict(const struct call *call) {
    const struct pair *pair = &call->service->pair;
    enum tier tier = tier_of(call->request);
    uint64_t n_before = n_pages_of(pair, tier), n_freed = 0;
    int64_t n_bytes = INT64_MAX;

    request_get_int(call->request, "bytes", &n_bytes); /* else all */
    if (tier == TIER_DEVICE)
        n_freed = kv_store_evict_bytes(pair->store, (uint64_t)n_bytes);
    else if (tier == TIER_HOST && pair->shelf)
        n_freed = kv_shelf_evict_bytes(pair->shelf, (uint64_t)n_bytes);
    else if (tier == TIER_DISK && pair->vault)
        n_freed = kv_vault_evict_bytes(pair->vault, (uint64_t)n_bytes);
    begin(call, 2);
    put_int(call->out, "pages", (int64_t)(n_before - n_pages_of(pair, tier)));
    put_int(call->out, "bytes", (int64_t)n_freed);
}

/* What is only being looked at does not leave with the others. */
static bool is_looked_at(const struct chore *chore) {
    const struct pair *pair = &chore->errand.service->pair;

    return pair->scrub && kv_scrub_is_looking(pair->scrub) && !is_out_of_time(chore);
}

/* What leaves a tier shall be in the one below by then, if it is to be there at all. */
static bool step_evict(struct errand *errand) {
    struct chore *chore = chore_of(errand);
    const struct pair *pair = &errand->service->pair;
    enum tier tier = tier_of(errand->request);
    struct call call;
    int refusal;

    if (!errand->conn) /* nobody wants it any more */
        return true;
    if (chore->state == CHORE_SPILLING && (tier == TIER_DISK || is_spilled(chore))) {
        enter(chore, tier == TIER_HOST && pair->vault ? CHORE_SAVING : CHORE_OVER);
        if (chore->state == CHORE_SAVING)
            kv_vault_save_all(pair->vault);
    } else if (chore->state == CHORE_SAVING && (errand->is_stopping || !kv_vault_is_saving(pair->vault))) {
        enter(chore, CHORE_OVER);
    }
    if (chore->state != CHORE_OVER || is_looked_at(chore))
        return false;
    call = call_of_errand(errand, &refusal);
    evict(&call);
    call_answer(&call);
    return true;
}

void cache_evict(const struct call *call) {
    struct chore *chore = chore_new(call, step_evict);

    if (chore)
        call_later(call, &chore->errand);
}

/* ---- the disk ------------------------------------------------------------------------------------------------------- */

static void refuse_flush(const struct chore *chore, const struct call *call, uint32_t n_records, int error) {
    struct proto_number data[] = {{"records", n_records}, {"pages", (int64_t)chore->flush.n_unsaved}};
    struct report report;

    if (chore->errand.is_stopping) {
        refuse(call, PROTO_SHUTTING_DOWN, "the daemon stopped before all was written");
        return;
    }
    if (n_records + chore->flush.n_unsaved == 0)
        report_line(&report, "the disk does not take what is due; see the log");
    else if (n_records == 0)
        report_line(&report, "%llu pages and states could not be written; see the log",
                    (unsigned long long)chore->flush.n_unsaved);
    else
        report_line(
            &report,
            "the records of %u sessions, and %llu pages and states, could not be written: %s; records are tried "
            "again by themselves",
            n_records, (unsigned long long)chore->flush.n_unsaved, strerror(-error));
    *call->ret_refusal = PROTO_NO_SPACE;
    proto_error_data(call->out, call->request->id, PROTO_NO_SPACE, report.line, data, ARRAY_LEN(data));
}

static void answer_flush(struct chore *chore) {
    const struct service *service = chore->errand.service;
    struct kv_vault_stats after = chore->before;
    int refusal, error;
    struct call call = call_of_errand(&chore->errand, &refusal);
    uint32_t n_records = durable_n_unwritten(service, &error);

    if (service->pair.vault)
        kv_vault_stats(service->pair.vault, &after);
    if (chore->result != 0 || chore->flush.n_unsaved > 0 || n_records > 0) {
        refuse_flush(chore, &call, n_records, error);
    } else {
        begin(&call, 2);
        put_int(call.out, "saved", (int64_t)(after.n_saved_pages - chore->before.n_saved_pages));
        put_int(call.out, "bytes", (int64_t)(after.saved_bytes - chore->before.saved_bytes));
    }
    call_answer(&call);
}

static void on_flushed(struct kv_vault_flush *flush, int result) {
    struct chore *chore = container_of(flush, struct chore, flush);

    chore->is_done = true;
    chore->result = result;
}

static bool step_flush(struct errand *errand) {
    struct chore *chore = chore_of(errand);
    struct kv_vault *vault = errand->service->pair.vault;
    bool is_stopping = errand->is_stopping;

    if (chore->state == CHORE_SPILLING && is_spilled(chore)) {
        enter(chore, vault && !is_stopping ? CHORE_SAVING : CHORE_OVER);
        if (vault && is_stopping)
            chore->result = -ECANCELED;
        if (chore->state == CHORE_SAVING) {
            kv_vault_save_all(vault);
            kv_vault_flush(vault, &chore->flush);
        }
    } else if (chore->state == CHORE_SAVING && chore->is_done) {
        enter(chore, CHORE_OVER);
    } else if (chore->state == CHORE_SAVING && is_stopping) {
        kv_vault_flush_cancel(vault, &chore->flush);
        chore->flush.n_unsaved = 0; /* nobody knows */
        chore->result = -ECANCELED;
        enter(chore, CHORE_OVER);
    }
    if (chore->state != CHORE_OVER || (!is_stopping && !durable_is_idle(errand->service)))
        return false;
    if (errand->conn)
        answer_flush(chore);
    return true;
}

void cache_flush(const struct call *call) {
    struct chore *chore = chore_new(call, step_flush);

    if (!chore)
        return;
    durable_retry(call->service);
    chore->flush.done = on_flushed;
    call_later(call, &chore->errand);
}

static void on_verified(struct kv_vault_verify *verify) {
    container_of(verify, struct chore, verify)->is_done = true;
}

static void put_verified(const struct call *call, const struct kv_vault_verify *verify) {
    begin(call, 3);
    put_int(call->out, "checked", (int64_t)verify->n_checked);
    put_int(call->out, "damaged", (int64_t)verify->n_damaged);
    put_int(call->out, "unread", (int64_t)verify->n_unread);
}

static bool step_verify(struct errand *errand) {
    struct chore *chore = chore_of(errand);
    struct call call;
    int refusal;

    if (!chore->is_done && !errand->is_stopping)
        return false;
    if (!chore->is_done)
        kv_vault_verify_cancel(errand->service->pair.vault);
    if (!errand->conn)
        return true;
    call = call_of_errand(errand, &refusal);
    if (chore->is_done)
        put_verified(&call, &chore->verify);
    else
        refuse(&call, PROTO_SHUTTING_DOWN, "the daemon stopped before all was read");
    call_answer(&call);
    return true;
}

void cache_verify(const struct call *call) {
    struct kv_vault *vault = call->service->pair.vault;
    struct chore *chore;

    if (!vault) {
        put_verified(call, &(struct kv_vault_verify){0});
        return;
    }
    chore = chore_new(call, step_verify);
    if (!chore)
        return;
    chore->verify.done = on_verified;
    if (kv_vault_verify(vault, &chore->verify) != 0) {
        free(chore);
        refuse(call, PROTO_BUSY, "the disk is being verified already");
        return;
    }
    call_later(call, &chore->errand);
}

/* ---- forgetting ----------------------------------------------------------------------------------------------------- */

/*  FORGETTING --nobody uses them--> FLUSHING --they are gone from the disk for good--> over */
struct purge {
    struct errand errand;
    uint32_t space; /* whose pages */
    struct kv_key root;
    bool is_flushing, is_flushed;
    struct kv_vault_flush flush;
    int result; /* of it */
    uint64_t until_us, next_us;
    uint64_t n_device, n_host, n_disk; /* bytes that went */
    uint32_t n_left;                   /* pages in use */
};

static void purge_all(struct purge *purge) {
    struct service *service = purge->errand.service;
    struct pair *pair = &service->pair;

    for (struct session *session = sessions_first(service->sessions); session; session = session->next)
        if (sessions_namespace(service->sessions, session->uid) == purge->space)
            sessions_let_go(service->sessions, session); /* pinned sessions pin again what comes next */
    purge->n_device += kv_store_purge(pair->store, &purge->root, &purge->n_left);
    if (pair->shelf)
        purge->n_host += kv_shelf_purge(pair->shelf, purge->space);
    if (pair->vault)
        purge->n_disk += kv_vault_purge(pair->vault, purge->space);
}

/* What requests use now is tried again until they let go of it; and what is on its way down, until it is there. */
static bool step_forgetting(struct purge *purge) {
    const struct errand *errand = &purge->errand;
    const struct pair *pair = &errand->service->pair;
    uint64_t now = service_now_us();
    bool is_spilling;

    if (now < purge->next_us && !errand->is_stopping)
        return false;
    purge->next_us = now + PURGE_EVERY_US;
    is_spilling = pair->spill && !kv_spill_is_idle(pair->spill);
    purge_all(purge);
    return (purge->n_left == 0 && !is_spilling) || now >= purge->until_us || errand->is_stopping;
}

static void answer_purge(struct purge *purge) {
    int refusal;
    struct call call = call_of_errand(&purge->errand, &refusal);

    if (purge->result != 0) {
        refuse(&call, PROTO_NO_SPACE,
               "the pages are forgotten, but the disk does not let them be blanked; after a "
               "restart some may be found again");
    } else {
        begin(&call, 4);
        put_int(call.out, "device", (int64_t)purge->n_device);
        put_int(call.out, "host", (int64_t)purge->n_host);
        put_int(call.out, "disk", (int64_t)purge->n_disk);
        put_int(call.out, "left", purge->n_left);
    }
    call_answer(&call);
}

static void on_purged(struct kv_vault_flush *flush, int result) {
    struct purge *purge = container_of(flush, struct purge, flush);

    purge->is_flushed = true;
    purge->result = result;
}

static bool step_purge(struct errand *errand) {
    struct purge *purge = container_of(errand, struct purge, errand);
    struct kv_vault *vault = errand->service->pair.vault;

    if (!purge->is_flushing) {
        if (!step_forgetting(purge))
            return false;
        purge->is_flushing = errand->has_moved = true;
        purge->is_flushed = !vault;
        if (vault)
            kv_vault_flush(vault, &purge->flush);
        return false;
    }
    if (!purge->is_flushed && !errand->is_stopping)
        return false;
    if (!purge->is_flushed) {
        kv_vault_flush_cancel(vault, &purge->flush);
        purge->result = -ECANCELED;
    }
    if (errand->conn)
        answer_purge(purge);
    return true;
}

static void free_purge(struct errand *errand) {
    free(container_of(errand, struct purge, errand));
}

/* False: it was refused. */
static bool may_purge(const struct call *call, uid_t uid) {
    uid_t own = conn_uid(call->conn);

    if (conn_is_admin(call->conn))
        return true;
    if (call->service->config.kv.shared_prefixes)
        refuse(call, PROTO_FORBIDDEN,
               "with kv.shared_prefixes the pages of all users are one; only an administrator may purge them");
    else if (uid != own)
        refuse(call, PROTO_FORBIDDEN, "only an administrator may purge the pages of another user");
    return uid == own && !call->service->config.kv.shared_prefixes;
}

void cache_purge(const struct call *call) {
    struct sessions *sessions = call->service->sessions;
    int64_t uid = conn_uid(call->conn);
    struct purge *purge;

    request_get_int(call->request, "uid", &uid);
    if (!may_purge(call, (uid_t)uid))
        return;
    purge = calloc(1, sizeof *purge);
    if (!purge || sessions_root(sessions, (uid_t)uid, &purge->root) != 0) {
        free(purge);
        refuse(call, PROTO_INTERNAL, "out of memory");
        return;
    }
    purge->space = sessions_namespace(sessions, (uid_t)uid);
    purge->until_us = service_now_us() + SPILL_US;
    purge->flush.done = on_purged;
    purge->errand.step = step_purge;
    purge->errand.free = free_purge;
    call_later(call, &purge->errand);
}
