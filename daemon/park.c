/* park: see park.h; and session.park, session.resume. */
#include "park.h"

#include <stdlib.h>
#include <string.h>

#include "device_thread.h"
#include "durable.h"
#include "methods_internal.h"
#include "prefetch.h"

enum {
    SPILL_US = 30 * 1000 * 1000, /* what is not down by then does not come down */
    SAVES_AT_A_TIME = 16,
    RETRY_MS = 500, /* when many fetch */
};

/* ---- where the pages of a session are ------------------------------------------------------------------------------- */

/* On the shelf, with the restore point at its end if that is asked for. */
static uint32_t find_on_shelf(const struct kv_shelf *shelf, const struct session *session, int page,
                              enum kv_group group) {
    struct kv_page_name name = {.key = session->keys[page],
                                .page_idx = (uint32_t)page,
                                .tokens = session->tokens + (size_t)page * PAGE_TOKENS,
                                .parent = page > 0 ? &session->keys[page - 1] : NULL};
    uint32_t record = kv_shelf_find(shelf, &name);

    return record != KV_NO_RECORD && kv_shelf_has(shelf, record, group) ? record : KV_NO_RECORD;
}

/* The last page whose restore point is on the shelf, or KV_NO_RECORD. */
static uint32_t last_on_shelf(const struct kv_shelf *shelf, const struct session *session) {
    for (int page = sessions_n_pages(session); page-- > 0;) {
        uint32_t record = find_on_shelf(shelf, session, page, KV_TARGET_STATE);

        if (record != KV_NO_RECORD)
            return record;
    }
    return KV_NO_RECORD;
}

/* ---- one session on its way down ------------------------------------------------------------------------------------ */

/*  SETTLING --its last pages are published--> SPILLING --on the shelf--> SAVING --flushed--> KEEPING --record written--> over
 *     without a host tier: SETTLING --> KEEPING; without a disk tier: SPILLING --> KEEPING, and nothing to write  */
enum park_state { PARK_SETTLING, PARK_SPILLING, PARK_SAVING, PARK_KEEPING, PARK_OVER };

struct park {
    struct errand errand;
    struct session *session; /* is_moving, so it stays */
    enum park_state state;
    uint64_t n_plans;    /* sent when it began */
    uint64_t until_us;   /* SPILLING */
    int n_pages, n_down; /* of the device's; those that were seen below */
    uint64_t n_freed;    /* bytes of the device */
    bool is_spilling;
    struct kv_vault_flush flush;
    struct session_wait wait;
    bool is_flushed, is_kept;
};

static struct park *park_of(struct errand *errand) {
    return container_of(errand, struct park, errand);
}

/* Plans that were on their way have published what they brought. */
static bool is_settled(const struct park *park) {
    struct engine_view view;

    engine_look(park->errand.service->pair.engine, &view);
    return (view.n_leaving == 0 && view.n_in_flight == 0) || view.n_plans > park->n_plans + DEVICE_PLANS_MAX;
}

/* Down to the shelf, what the device has up to its last restore point. False: no job was free. */
static bool start_spill(struct park *park) {
    const struct session *session = park->session;
    const struct service *service = park->errand.service;
    const struct pair *pair = &service->pair;
    struct kv_spill_stats before, after;
    struct kv_match match;
    struct kv_lease lease;

    kv_store_lookup(pair->store, session->keys, session->tokens, (uint32_t)sessions_n_pages(session), &match);
    park->n_pages = (int)match.n_tokens / PAGE_TOKENS;
    if (park->n_pages == 0)
        return true;
    if (kv_lease_init(&lease, pair->store, (uint32_t)park->n_pages) != 0)
        return false;
    kv_spill_stats(pair->spill, &before);
    kv_lease_hold_prefix(&lease, session->keys, session->tokens, (uint32_t)park->n_pages);
    kv_spill_start(pair->spill, &lease, (uint32_t)park->n_pages, sessions_namespace(service->sessions, session->uid),
                   pair->vault ? KV_SPILL_MUST : KV_SPILL_TO_HOST);
    kv_lease_deinit(&lease);
    kv_spill_stats(pair->spill, &after);
    return after.n_no_job == before.n_no_job;
}

static bool is_down(struct park *park) {
    const struct pair *pair = &park->errand.service->pair;

    if (kv_spill_is_idle(pair->spill) || service_now_us() >= park->until_us)
        return true;
    while (park->n_down < park->n_pages &&
           find_on_shelf(pair->shelf, park->session, park->n_down, KV_TARGET_FULL) != KV_NO_RECORD)
        park->n_down++;
    return park->n_down == park->n_pages &&
           (park->n_pages == 0 ||
            find_on_shelf(pair->shelf, park->session, park->n_pages - 1, KV_TARGET_STATE) != KV_NO_RECORD);
}

static void on_flushed(struct kv_vault_flush *flush, int result) {
    (void)result; /* what is on the disk is looked for, not believed */
    container_of(flush, struct park, flush)->is_flushed = true;
}

static void start_save(struct park *park) {
    const struct pair *pair = &park->errand.service->pair;
    uint32_t record = last_on_shelf(pair->shelf, park->session);

    if (record != KV_NO_RECORD)
        kv_vault_save(pair->vault, record, KV_VAULT_SAVE_MUST);
    kv_vault_flush(pair->vault, &park->flush);
}

static void on_kept(struct session_wait *wait, int result) {
    (void)result; /* durable_is() knows */
    container_of(wait, struct park, wait)->is_kept = true;
}

/* Everything that can be below is: the device is free of it. */
static void start_keeping(struct park *park) {
    struct service *service = park->errand.service;
    struct session *session = park->session;

    sessions_let_go(service->sessions, session);
    park->n_freed =
        kv_store_evict_chain(service->pair.store, session->keys, session->tokens, (uint32_t)sessions_n_pages(session));
    durable_look(service, session); /* what is below is what it is put down with */
    session->is_parked = true;
    park->is_kept = !durable_keep(service, session, &park->wait);
}

static void answer_park(struct park *park) {
    const struct session *session = park->session;
    struct found found = service_find(park->errand.service, session->keys, session->tokens, sessions_n_pages(session));
    bool is_used = park->errand.service->config.kv.restore != CONFIG_RESTORE_NEVER;
    int n_below = found.host + found.disk, n = found.device + n_below;
    int n_disk = durable_n_on_disk(park->errand.service, session);
    struct call call;
    int refusal;

    if (!park->errand.conn)
        return;
    call = call_of_errand(&park->errand, &refusal);
    begin(&call, 4);
    put_int(call.out, "tokens", is_used ? n : found.device);
    put_int(call.out, "bytes", (int64_t)park->n_freed);
    put_cstr(call.out, "tier", n > 0 && n_disk >= n ? "disk" : n_below > 0 ? "host" : "none");
    put_bool(call.out, "durable", durable_is(park->errand.service, session));
    call_answer(&call);
}

static void enter(struct park *park, enum park_state state) {
    park->state = state;
    park->errand.has_moved = true;
}

static void step_spilling(struct park *park) {
    bool is_stopping = park->errand.is_stopping;

    if (!park->is_spilling && !is_stopping) {
        park->is_spilling = start_spill(park);
        park->errand.has_moved = park->is_spilling;
    }
    if (!is_stopping && (!park->is_spilling || !is_down(park)) && service_now_us() < park->until_us)
        return;
    if (!park->errand.service->pair.vault || is_stopping) {
        enter(park, PARK_KEEPING);
        start_keeping(park);
    } else {
        enter(park, PARK_SAVING);
        start_save(park);
    }
}

static bool step_park(struct errand *errand) {
    struct park *park = park_of(errand);
    const struct pair *pair = &errand->service->pair;

    switch (park->state) {
    case PARK_SETTLING:
        if (!is_settled(park) && !errand->is_stopping)
            break;
        park->until_us = service_now_us() + SPILL_US;
        enter(park, pair->spill ? PARK_SPILLING : PARK_KEEPING);
        if (park->state == PARK_KEEPING)
            start_keeping(park);
        break;
    case PARK_SPILLING:
        step_spilling(park);
        break;
    case PARK_SAVING:
        if (!park->is_flushed && errand->is_stopping)
            kv_vault_flush_cancel(pair->vault, &park->flush);
        if (!park->is_flushed && !errand->is_stopping)
            break;
        enter(park, PARK_KEEPING);
        start_keeping(park);
        break;
    case PARK_KEEPING:
        if (!park->is_kept)
            break;
        park->session->is_moving = false;
        answer_park(park);
        enter(park, PARK_OVER);
        break;
    case PARK_OVER:
        break;
    }
    return park->state == PARK_OVER;
}

static void free_park(struct errand *errand) {
    free(park_of(errand));
}

void session_park(const struct call *call) {
    struct session *session = session_named(call, true);
    struct engine_view view;
    struct park *park;

    if (!session)
        return;
    park = calloc(1, sizeof *park);
    if (!park) {
        refuse(call, PROTO_INTERNAL, "out of memory");
        return;
    }
    engine_look(call->service->pair.engine, &view);
    park->session = session;
    park->n_plans = view.n_plans;
    park->flush.done = on_flushed;
    park->wait.done = on_kept;
    park->errand.step = step_park;
    park->errand.free = free_park;
    session->is_moving = true;
    call_later(call, &park->errand);
}

/* ---- taking up again ------------------------------------------------------------------------------------------------ */

/* The one that the request names may be another by now, or none. */
static void answer_resume(struct errand *errand) {
    int refusal;
    struct call call = call_of_errand(errand, &refusal);
    struct session *session = session_named(&call, false);

    if (session) {
        sessions_hold_again(errand->service->sessions, session);
        session_put_info(&call, session);
    }
    call_answer(&call);
}

static void refuse_fetch(const struct call *call) {
    struct proto_number data[] = {{"n_waiting", call->service->n_prefetches_waiting}, {"retry_ms", RETRY_MS}};
    struct report report;

    report_line(&report, "%d sessions and prompts are fetched or wait for it already; try again in %d ms",
                call->service->n_prefetches_waiting, RETRY_MS);
    refuse_data(call, PROTO_BUSY, report.line, data, ARRAY_LEN(data));
}

void session_resume(const struct call *call) {
    struct session *session = session_named(call, true);
    bool wait = false;
    int r;

    if (!session)
        return;
    request_get_bool(call->request, "wait", &wait);
    if (session->is_parked) {
        session->is_parked = false;
        durable_keep(call->service, session, NULL);
    }
    r = prefetch_start(call->service, session->keys, session->tokens, sessions_n_pages(session),
                       wait ? call->conn : NULL, wait ? call->request : NULL, answer_resume);
    if (r == 0 && wait) {
        *call->ret_is_later = true;
        return;
    }
    if (r == PREFETCH_E_BUSY) {
        refuse_fetch(call);
        return;
    }
    if (r < 0) {
        refuse(call, PROTO_INTERNAL, "out of memory");
        return;
    }
    sessions_hold_again(call->service->sessions, session);
    session_put_info(call, session);
}

/* ---- the end of the process ----------------------------------------------------------------------------------------- */

/*  SPILLING --every session was looked at, the shelf has what it will get--> SAVING --all are saved--> FLUSHING --> over  */
enum park_all_state { ALL_SPILLING, ALL_SAVING, ALL_FLUSHING };

struct park_all {
    struct errand errand;
    enum park_all_state state;
    const struct session *next; /* to be looked at */
    struct park one;            /* to start spills with */
    struct kv_vault_flush flush;
    bool is_flushed;
};

static struct park_all *park_all_of(struct errand *errand) {
    return container_of(errand, struct park_all, errand);
}

static void on_all_flushed(struct kv_vault_flush *flush, int result) {
    (void)result;
    container_of(flush, struct park_all, flush)->is_flushed = true;
}

/* As many as jobs are free. True: all were started, and none is on its way. */
static bool spill_all(struct park_all *all) {
    while (all->next) {
        all->one.errand.service = all->errand.service;
        all->one.session = (struct session *)all->next;
        if (!start_spill(&all->one))
            return false;
        all->next = all->next->next;
        all->errand.has_moved = true;
    }
    return kv_spill_is_idle(all->errand.service->pair.spill);
}

/* A few at a time: the vault's queue takes no more than it says. */
static bool save_all(struct park_all *all) {
    const struct pair *pair = &all->errand.service->pair;

    if (kv_vault_is_saving(pair->vault))
        return false;
    for (int i = 0; all->next && i < SAVES_AT_A_TIME; i++, all->next = all->next->next) {
        uint32_t record = last_on_shelf(pair->shelf, all->next);

        if (record != KV_NO_RECORD)
            kv_vault_save(pair->vault, record, KV_VAULT_SAVE_MUST);
        all->errand.has_moved = true;
    }
    return !all->next && !kv_vault_is_saving(pair->vault);
}

static bool step_all(struct errand *errand) {
    struct park_all *all = park_all_of(errand);
    struct service *service = errand->service;
    struct kv_vault *vault = service->pair.vault;

    if (errand->is_stopping) {
        if (all->state == ALL_FLUSHING && !all->is_flushed)
            kv_vault_flush_cancel(vault, &all->flush);
        return true;
    }
    switch (all->state) {
    case ALL_SPILLING:
        if (!spill_all(all))
            break;
        all->next = sessions_first(service->sessions);
        all->state = ALL_SAVING;
        errand->has_moved = true;
        break;
    case ALL_SAVING:
        if (!save_all(all))
            break;
        kv_vault_save_all(vault); /* what belongs to no session, and is worth it */
        kv_vault_flush(vault, &all->flush);
        all->state = ALL_FLUSHING;
        errand->has_moved = true;
        break;
    case ALL_FLUSHING:
        return all->is_flushed;
    }
    return false;
}

static void free_all(struct errand *errand) {
    free(park_all_of(errand));
}

bool park_all_start(struct service *service) {
    struct park_all *all = service->pair.vault ? calloc(1, sizeof *all) : NULL;

    if (!all)
        return false;
    all->next = sessions_first(service->sessions);
    all->flush.done = on_all_flushed;
    all->errand.step = step_all;
    all->errand.free = free_all;
    errand_start(&all->errand, service, NULL, NULL);
    return true;
}
