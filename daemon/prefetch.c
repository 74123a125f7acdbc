#include "prefetch.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "service.h"

enum {
    AT_A_TIME = PAIR_RESTORES / 4,
    WAITING_MAX = 64,
};

/*  WAITING --started--> COMING --all there, or failed--> gone  */
struct prefetch {
    struct errand errand;
    struct kv_key *keys; /* owned, with tokens: a session's may move */
    int32_t *tokens;
    uint32_t n_pages;
    struct kv_restore *restore; /* COMING */
    bool is_done;
    void (*answer)(struct errand *errand);
};

static void on_restored(void *user, int result) {
    struct prefetch *prefetch = user;

    (void)result; /* what could not be brought is computed by who asks for it */
    prefetch->is_done = true;
}

/* False: it waits. */
static bool begin(struct prefetch *prefetch) {
    struct service *service = prefetch->errand.service;
    struct kv_restores *restores = service->pair.restores;
    struct kv_found found;
    int r;

    if (service->n_prefetches == AT_A_TIME)
        return false;
    kv_restores_lookup(restores, prefetch->keys, prefetch->n_pages, &found);
    if (found.is_coming)
        return false;
    if (found.n_tokens <= found.n_device_tokens) { /* somebody else brought it, or it is gone */
        prefetch->is_done = true;
        return true;
    }
    r = kv_restore_start(restores, prefetch->keys, prefetch->tokens, found.n_tokens / PAGE_TOKENS, KV_RESTORE_PREFETCH,
                         on_restored, prefetch, &prefetch->restore);
    if (r == KV_RESTORE_E_BUSY)
        return false;
    if (r == 0)
        service->n_prefetches++;
    else
        prefetch->is_done = true; /* the device has no room */
    return true;
}

static bool step(struct errand *errand) {
    struct prefetch *prefetch = container_of(errand, struct prefetch, errand);

    if (!prefetch->restore && !prefetch->is_done) {
        if (errand->is_stopping)
            prefetch->is_done = true;
        else if (begin(prefetch))
            errand->has_moved = true;
    }
    if (prefetch->restore && errand->is_stopping && !prefetch->is_done)
        kv_restore_cancel(prefetch->restore);
    if (!prefetch->is_done)
        return false;
    if (prefetch->restore) {
        kv_restore_end(prefetch->restore); /* whoever comes next finds it in the index */
        errand->service->n_prefetches--;
    }
    errand->service->n_prefetches_waiting--;
    if (errand->conn && prefetch->answer)
        prefetch->answer(errand);
    return true;
}

static void free_prefetch(struct errand *errand) {
    struct prefetch *prefetch = container_of(errand, struct prefetch, errand);

    free(prefetch->keys);
    free(prefetch->tokens);
    free(prefetch);
}

static bool is_worth_it(const struct service *service, const struct kv_key *keys, int n_pages) {
    struct kv_found found;

    if (!service->pair.restores || n_pages == 0 || service->config.kv.restore == CONFIG_RESTORE_NEVER)
        return false;
    kv_restores_lookup(service->pair.restores, keys, (uint32_t)n_pages, &found);
    return found.n_tokens > found.n_device_tokens;
}

int prefetch_start(struct service *service, const struct kv_key *keys, const int32_t *tokens, int n_pages,
                   struct conn *conn, struct request *request, void (*answer)(struct errand *errand)) {
    size_t n_keys = (size_t)n_pages * sizeof *keys, n_tokens = (size_t)n_pages * PAGE_TOKENS * sizeof *tokens;
    struct prefetch *prefetch;

    if (!is_worth_it(service, keys, n_pages))
        return PREFETCH_E_NONE;
    if (service->n_prefetches_waiting == WAITING_MAX)
        return PREFETCH_E_BUSY;
    prefetch = calloc(1, sizeof *prefetch);
    if (!prefetch)
        return -ENOMEM;
    prefetch->errand.step = step;
    prefetch->errand.free = free_prefetch;
    prefetch->answer = answer;
    prefetch->n_pages = (uint32_t)n_pages;
    prefetch->keys = malloc(n_keys);
    prefetch->tokens = malloc(n_tokens);
    if (!prefetch->keys || !prefetch->tokens) {
        free_prefetch(&prefetch->errand);
        return -ENOMEM;
    }
    memcpy(prefetch->keys, keys, n_keys);
    memcpy(prefetch->tokens, tokens, n_tokens);
    service->n_prefetches_waiting++;
    errand_start(&prefetch->errand, service, conn, request);
    return 0;
}
