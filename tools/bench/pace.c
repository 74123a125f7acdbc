#include "pace.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base.h"
#include "bench.h"
#include "depot.h"
#include "model.h"

#define MIB ((size_t)1 << 20)

enum { SIDE = 32 /* pages that one restore has read or checked at a time */, WORKERS = 4 /* of a daemon's loop */ };
enum { REPEATS_MAX = 100 };

typedef int transfer_fn(struct depot *depot, double *ret_seconds);

static int save(struct depot *depot, double *ret_seconds) {
    int r = depot_forget(depot);

    return r == 0 ? depot_save(depot, ret_seconds) : r;
}

static int read_back(struct depot *depot, double *ret_seconds) {
    return depot_read(depot, SIDE, ret_seconds);
}

/* The vault and the plain loop in turn, each after the other, so that neither finds more in caches than the other. The first
 * round is for the files: what is written for the first time takes longer. */
static int compare(struct depot *depot, transfer_fn *transfer, int n_repeats, struct pace *ret_pace) {
    double rates[REPEATS_MAX], plains[REPEATS_MAX], shares[REPEATS_MAX];
    int r = 0;

    for (int i = -1; r == 0 && i < n_repeats; i++) {
        double seconds, plain;

        r = transfer(depot, &seconds);
        if (r == 0)
            r = depot_play(depot, &plain);
        if (r != 0 || i < 0)
            continue;
        rates[i] = (double)depot_bytes(depot) / seconds;
        plains[i] = (double)depot_bytes(depot) / plain;
        shares[i] = plain / seconds;
    }
    if (r == 0)
        *ret_pace = (struct pace){bench_median(rates, n_repeats), bench_median(plains, n_repeats),
                                  bench_median(shares, n_repeats), depot_depth(depot)};
    return r;
}

/* Counted from an empty disk to the last sync. */
static int count_written(struct depot *depot, struct pace_figures *figures) {
    struct kv_vault_stats before, after;
    double seconds;
    int r = depot_forget(depot);

    depot_stats(depot, &before);
    if (r == 0)
        r = depot_save(depot, &seconds);
    depot_stats(depot, &after);
    figures->bytes = depot_bytes(depot);
    figures->written_bytes = after.disk.written_bytes - before.disk.written_bytes;
    figures->payload_bytes = depot_payload_bytes(depot);
    return r;
}

static int use_tiny_pair(struct depot_options *options) {
    struct model_options model = {.target_folder = SHARE "/tiny/target",
                                  .draft_folder = SHARE "/tiny/draft",
                                  .kv_dtype = DTYPE_BF16,
                                  .draft_dtype = DTYPE_BF16};
    const struct backend *backend = backend_find("cpu");
    struct report report = {0};
    struct device *device;
    struct model_info info;
    int r = backend->open(&(struct backend_options){.n_threads = 1}, &device);

    if (r != 0)
        return r;
    r = model_inspect(&model, backend->caps(device), &info, &report);
    if (r != 0)
        fprintf(stderr, "spillway-bench: %s\n", report.line);
    for (int g = 0; r == 0 && g < KV_GROUP_N; g++) {
        options->group[g].payload_bytes = g == KV_TARGET_STATE ? info.state.slot_bytes : info.groups[g].page_bytes;
        options->group[g].n_pages = options->n_pages;
    }
    options->group[KV_TARGET_STATE].n_pages = 1;
    if (r == 0)
        options->group[KV_DRAFT_SLIDING].n_pages =
            options->n_pages - kv_window_first_page((uint32_t)info.draft.window, options->n_pages);
    backend->close(device);
    return r;
}

int pace_measure(const struct bench_options *options, enum pace_shape shape, struct pace_figures *ret_figures) {
    struct depot_options shapes[PACE_SHAPES] = {
        [PACE_27B] = {.group = {[KV_TARGET_FULL] = {4 * MIB, 64},
                                [KV_TARGET_STATE] = {150 * MIB, 1},
                                [KV_DRAFT_SLIDING] = {5 * MIB / 4, 32}},
                      .n_pages = 64,
                      .n_chains = 1,
                      .disk_bytes = 8192 * MIB},
        [PACE_TINY] = {.n_pages = 512, .n_chains = 2, .disk_bytes = 1024 * MIB},
    };
    int n_repeats = min_int(options->n_repeats, REPEATS_MAX);
    struct depot *depot = NULL;
    int r = shape == PACE_TINY ? use_tiny_pair(&shapes[shape]) : 0;

    *ret_figures = (struct pace_figures){0};
    shapes[shape].folder = options->folder;
    shapes[shape].n_workers = WORKERS;
    if (r == 0)
        r = depot_open(&shapes[shape], &depot);
    if (r == 0)
        r = compare(depot, save, n_repeats, &ret_figures->write);
    if (r == 0)
        r = count_written(depot, ret_figures);
    if (r == 0)
        r = compare(depot, read_back, n_repeats, &ret_figures->read);
    if (r == 0)
        r = depot_checksum(depot, &ret_figures->checksum);
    depot_close(depot);
    return r;
}
