#include "lookup.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base.h"
#include "bench.h"
#include "crew.h"
#include "lease.h"
#include "load.h"
#include "restore.h"
#include "scratch.h"
#include "vault_internal.h"

enum { LOOKUPS = 2000, SLOT_BYTES = 2 * FORMAT_BLOCK_BYTES, SMALL = 64, RESTORES = 8, UID = 1 };

struct lookup {
    uint32_t n_chains;
    struct kv_key *keys; /* [n_chains, LOOKUP_CHAIN_PAGES] */
    int32_t *tokens;     /* [n_chains, LOOKUP_CHAIN_PAGES, PAGE_TOKENS] */
    struct kv_hasher *hasher;
    const struct backend *backend;
    struct device *device;
    struct kv_store *full, *empty;
    struct kv_shelf *shelf; /* empty */
    char path[SCRATCH_PATH_BYTES];
    struct disk_folder folder;
    struct crew *crew;
    struct kv_work work;
    struct kv_vault *vault;
    struct kv_restores *on_device, *on_disk;
    uint64_t seed;
};

static uint32_t draw(struct lookup *lookup, uint32_t below) {
    lookup->seed = lookup->seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)((lookup->seed >> 33) % below);
}

static const int32_t *tokens_of(const struct lookup *lookup, uint32_t chain, uint32_t page) {
    return lookup->tokens + ((size_t)chain * LOOKUP_CHAIN_PAGES + page) * PAGE_TOKENS;
}

static const struct kv_key *keys_of(const struct lookup *lookup, uint32_t chain) {
    return lookup->keys + (size_t)chain * LOOKUP_CHAIN_PAGES;
}

static bool has_state(uint32_t page) {
    return (page + 1) % LOOKUP_STATE_EVERY == 0;
}

static uint64_t now_us(void) {
    return (uint64_t)(bench_now() * 1e6);
}

/* Seconds of this thread: others' work on its core is no part of a lookup. */
static double cpu_now(void) {
    struct timespec t;

    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- making --------------------------------------------------------------------------------------------------------- */

static int make_chains(struct lookup *lookup) {
    size_t n = (size_t)lookup->n_chains * LOOKUP_CHAIN_PAGES;
    const struct kv_key root = {{1}};
    int r = kv_hasher_new(&lookup->hasher);

    lookup->keys = calloc(n, sizeof *lookup->keys);
    lookup->tokens = calloc(n * PAGE_TOKENS, sizeof *lookup->tokens);
    if (!lookup->keys || !lookup->tokens)
        return -ENOMEM;
    for (size_t i = 0; i < n * PAGE_TOKENS; i++)
        lookup->tokens[i] = (int32_t)draw(lookup, 1 << 17);
    for (uint32_t chain = 0; r == 0 && chain < lookup->n_chains; chain++)
        r = kv_key_chain(lookup->hasher, &root, tokens_of(lookup, chain, 0), LOOKUP_CHAIN_PAGES,
                         lookup->keys + (size_t)chain * LOOKUP_CHAIN_PAGES);
    return r;
}

static int open_store(const struct lookup *lookup, uint32_t n_pages, struct kv_store **ret_store) {
    struct kv_store_options options = {.backend = lookup->backend, .device = lookup->device, .n_records_max = n_pages};

    options.group[KV_TARGET_FULL].slot_bytes = options.group[KV_TARGET_STATE].slot_bytes = SMALL;
    options.group[KV_TARGET_FULL].n_slots = n_pages + 1;
    options.group[KV_TARGET_STATE].n_slots = n_pages / LOOKUP_STATE_EVERY;
    return kv_store_open(&options, ret_store);
}

static int publish(struct lookup *lookup, struct kv_lease *lease, uint32_t chain) {
    struct kv_store *store = lookup->full;
    int r = 0;

    for (uint32_t page = 0; r == 0 && page < LOOKUP_CHAIN_PAGES; page++) {
        uint32_t slots[KV_GROUP_N] = {KV_NO_SLOT, KV_NO_SLOT, KV_NO_SLOT, KV_NO_SLOT}, state;
        bool taken[KV_GROUP_N];

        r = kv_store_take(store, KV_TARGET_FULL, &slots[KV_TARGET_FULL]);
        if (r == 0)
            r = kv_lease_publish_page(lease, page, &keys_of(lookup, chain)[page], tokens_of(lookup, chain, page), slots,
                                      taken);
        if (r == 0 && has_state(page)) {
            r = kv_store_take(store, KV_TARGET_STATE, &state);
            if (r == 0)
                kv_lease_publish_state(lease, page + 1, state, taken);
        }
    }
    kv_lease_release(lease);
    return r;
}

static int fill_store(struct lookup *lookup) {
    struct kv_lease lease = {0};
    int r = open_store(lookup, lookup->n_chains * LOOKUP_CHAIN_PAGES, &lookup->full);

    if (r == 0)
        r = kv_lease_init(&lease, lookup->full, LOOKUP_CHAIN_PAGES);
    for (uint32_t chain = 0; r == 0 && chain < lookup->n_chains; chain++)
        r = publish(lookup, &lease, chain);
    kv_lease_deinit(&lease);
    return r;
}

static int put(struct lookup *lookup, uint32_t chain, uint32_t page, enum kv_group group) {
    struct catalog_entry entry = {.key = keys_of(lookup, chain)[page], .group = group, .page_idx = page, .uid = UID};
    uint32_t record;
    int r = catalog_put(lookup->vault->catalog, &entry, &record);

    if (r == 0)
        catalog_stored(lookup->vault->catalog, record, 1);
    return r;
}

/* Straight into the catalog: there is not a byte on disk. */
static int fill_vault(struct lookup *lookup) {
    uint64_t n = (uint64_t)lookup->n_chains * LOOKUP_CHAIN_PAGES;
    struct kv_vault_options options = {.folder = &lookup->folder,
                                       .work = &lookup->work,
                                       .shelf = lookup->shelf,
                                       .disk_bytes = max_u64(3 * n * SLOT_BYTES, (uint64_t)1 << 30),
                                       .n_pages_max = LOOKUP_CHAIN_PAGES,
                                       .deadline_us = 1000000,
                                       .now_us = now_us};
    int r;

    options.group[KV_TARGET_FULL].slot_bytes = options.group[KV_TARGET_STATE].slot_bytes = SLOT_BYTES;
    options.group[KV_TARGET_FULL].share = options.group[KV_TARGET_STATE].share = 50;
    r = kv_vault_open(&options, &lookup->vault);
    for (uint32_t chain = 0; r == 0 && chain < lookup->n_chains; chain++)
        for (uint32_t page = 0; r == 0 && page < LOOKUP_CHAIN_PAGES; page++) {
            r = put(lookup, chain, page, KV_TARGET_FULL);
            if (r == 0 && has_state(page))
                r = put(lookup, chain, page, KV_TARGET_STATE);
        }
    return r;
}

static int open_shelf(struct lookup *lookup) {
    struct kv_shelf_options options = {
        .backend = lookup->backend, .device = lookup->device, .alignment = FORMAT_ALIGN_MIN};

    options.group[KV_TARGET_FULL].payload_bytes = options.group[KV_TARGET_STATE].payload_bytes = SMALL;
    options.group[KV_TARGET_FULL].n_slots = options.group[KV_TARGET_STATE].n_slots = SMALL;
    return kv_shelf_open(&options, &lookup->shelf);
}

static int open_restores(struct lookup *lookup) {
    struct kv_restores_options options = {.store = lookup->full,
                                          .shelf = lookup->shelf,
                                          .now_us = now_us,
                                          .n_restores = RESTORES,
                                          .n_pages_max = LOOKUP_CHAIN_PAGES};
    int r = kv_restores_open(&options, &lookup->on_device);

    options.store = lookup->empty;
    if (r == 0)
        r = kv_restores_open(&options, &lookup->on_disk);
    if (r == 0) {
        kv_restores_set_vault(lookup->on_device, lookup->vault);
        kv_restores_set_vault(lookup->on_disk, lookup->vault);
    }
    return r;
}

static int open_all(struct lookup *lookup, const char *folder) {
    int r = make_chains(lookup);

    if (r == 0)
        r = lookup->backend->open(&(struct backend_options){.n_threads = 1}, &lookup->device);
    if (r == 0)
        r = fill_store(lookup);
    if (r == 0)
        r = open_store(lookup, SMALL, &lookup->empty);
    if (r == 0)
        r = open_shelf(lookup);
    if (r == 0)
        r = scratch_make(folder, lookup->path);
    if (r == 0)
        r = disk_folder_open(lookup->path, &lookup->folder);
    if (r == 0)
        r = crew_open(1, &lookup->crew);
    if (r == 0) {
        lookup->work = crew_work(lookup->crew);
        r = fill_vault(lookup);
    }
    return r == 0 ? open_restores(lookup) : r;
}

static void close_all(struct lookup *lookup) {
    kv_restores_close(lookup->on_device);
    kv_restores_close(lookup->on_disk);
    kv_vault_close(lookup->vault); /* nothing is out */
    kv_shelf_close(lookup->shelf);
    kv_store_close(lookup->full);
    kv_store_close(lookup->empty);
    crew_close(lookup->crew);
    if (lookup->folder.fd >= 0)
        disk_folder_close(&lookup->folder);
    scratch_remove(lookup->path);
    if (lookup->device)
        lookup->backend->close(lookup->device);
    kv_hasher_free(lookup->hasher);
    free(lookup->keys);
    free(lookup->tokens);
}

/* ---- looking -------------------------------------------------------------------------------------------------------- */

static struct lookup_times times_of(struct load_samples *samples) {
    return (struct lookup_times){load_percentile(samples, 0.5), load_percentile(samples, 0.99)};
}

static int time_prompts(struct lookup *lookup, const struct kv_restores *restores, uint32_t n_pages, bool is_on_disk,
                        struct load_samples *samples, struct lookup_times *ret_times) {
    int r = 0;

    samples->n = 0;
    for (int i = 0; r == 0 && i < LOOKUPS; i++) {
        uint32_t chain = draw(lookup, lookup->n_chains);
        struct kv_found found;
        double start = cpu_now();

        kv_restores_lookup(restores, keys_of(lookup, chain), n_pages, &found);
        r = load_add(samples, cpu_now() - start);
        if (found.n_tokens != n_pages * PAGE_TOKENS || found.n_disk_tokens != (is_on_disk ? found.n_tokens : 0)) {
            fprintf(stderr, "spillway-bench: kv: of %u pages %u tokens were found, %u of them on disk\n", n_pages,
                    found.n_tokens, found.n_disk_tokens);
            return -EPROTO;
        }
    }
    *ret_times = times_of(samples);
    return r;
}

static int time_one(struct lookup *lookup, struct load_samples *samples, struct lookup_times *ret_times) {
    int r = 0;

    samples->n = 0;
    for (int i = 0; r == 0 && i < LOOKUPS; i++) {
        uint32_t page = draw(lookup, LOOKUP_CHAIN_PAGES);
        const struct kv_key *key = &keys_of(lookup, draw(lookup, lookup->n_chains))[page];
        double start = bench_now();
        uint32_t record = catalog_find(lookup->vault->catalog, key, page, KV_TARGET_FULL);

        r = record == KV_NO_RECORD ? -EPROTO : load_add(samples, bench_now() - start);
    }
    *ret_times = times_of(samples);
    return r;
}

static int time_hash(struct lookup *lookup, uint32_t n_pages, struct load_samples *samples, double *ret_seconds) {
    struct kv_key keys[LOOKUP_CHAIN_PAGES];
    int r = 0;

    samples->n = 0;
    for (int i = 0; r == 0 && i < LOOKUPS / 10; i++) {
        uint32_t chain = draw(lookup, lookup->n_chains);
        double start = bench_now();

        r = kv_key_chain(lookup->hasher, &(struct kv_key){{1}}, tokens_of(lookup, chain, 0), n_pages, keys);
        if (r == 0)
            r = load_add(samples, bench_now() - start);
    }
    *ret_seconds = times_of(samples).p50;
    return r;
}

int lookup_measure(const char *folder, int n_entries, struct lookup_figures *ret_figures) {
    static const uint32_t lengths[LOOKUP_ROWS] = {32, 128, 512};
    struct lookup lookup = {.n_chains = (uint32_t)div_ceil((uint64_t)max_int(n_entries, 1), LOOKUP_CHAIN_PAGES),
                            .folder = {-1, -1},
                            .backend = backend_find("cpu"),
                            .seed = 1};
    struct load_samples samples = {0};
    int r = open_all(&lookup, folder);

    *ret_figures = (struct lookup_figures){.n_entries = lookup.n_chains * LOOKUP_CHAIN_PAGES};
    if (r == 0)
        r = time_one(&lookup, &samples, &ret_figures->one);
    for (int i = 0; r == 0 && i < LOOKUP_ROWS; i++) {
        ret_figures->n_pages[i] = lengths[i];
        r = time_hash(&lookup, lengths[i], &samples, &ret_figures->hash[i]);
        if (r == 0)
            r = time_prompts(&lookup, lookup.on_device, lengths[i], false, &samples, &ret_figures->device[i]);
        if (r == 0)
            r = time_prompts(&lookup, lookup.on_disk, lengths[i], true, &samples, &ret_figures->disk[i]);
    }
    free(samples.values);
    close_all(&lookup);
    if (r != 0)
        fprintf(stderr, "spillway-bench: kv: lookups among %d pages: %s\n", n_entries, strerror(r < 0 ? -r : ENOSPC));
    return r > 0 ? -ENOSPC : r;
}
