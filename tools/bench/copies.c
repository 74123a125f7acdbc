#include "copies.h"

#include <errno.h>
#include <stdlib.h>

#include "convoy.h"
#include "network.h"

enum { WINDOW_STEPS = 30 }; /* of one kind in a row; there are n_repeats windows of each */

enum { BESIDE_NOTHING, BESIDE_SPILL, BESIDE_RESTORE, BESIDE_N };
static const char *const beside_names[BESIDE_N] = {"decode, no copies beside it", "decode, spill beside it",
                                                   "decode, restore beside it"};

struct copies {
    struct network net;
    int context, n_pages; /* of the prefix: they lie behind those that decoding uses */
    size_t page_bytes;
    char *device, *host;
    char *state; /* host: of the restore point */
    size_t state_bytes;
};

static void put_copies(struct copies *c, const char *name, enum figure_way way, int context, double bytes,
                       double seconds, double piece_bytes) {
    struct figure figure = {.group = "copies",
                            .shape = c->net.shape->name,
                            .name = name,
                            .context = context,
                            .batch = 1,
                            .way = way,
                            .seconds = seconds,
                            .bytes = bytes};

    figure_add(&figure, "GB_per_s", bytes / seconds * 1e-9);
    figure_add(&figure, "piece_KiB", piece_bytes / 1024);
    figures_put(&c->net.rig->figures, &figure);
}

/* ---- prefixes ------------------------------------------------------------------------------------------------------- */

static int open_convoy(struct copies *c, enum kv_copy_direction direction, int n_batches, struct convoy *ret_convoy) {
    return convoy_open(ret_convoy, c->net.rig,
                       &(struct convoy_options){direction, c->device, c->host, c->page_bytes, c->n_pages, n_batches});
}

/* With a restore the restore point comes first. */
static int time_prefix(struct copies *c, struct convoy *convoy, double *ret_seconds) {
    static double samples[RIG_REPEATS_MAX];
    struct rig *rig = c->net.rig;
    bool is_restore = convoy->options.direction == KV_COPY_FETCH;
    int r = 0;

    for (int i = -1; r == 0 && i < rig->options->n_repeats; i++) {
        double start = bench_now(), seconds;

        if (is_restore)
            r = rig->backend->copy(rig->load, c->net.space.view.target_state.arena, c->state, c->state_bytes);
        if (r == 0)
            r = convoy_run(convoy, &seconds);
        samples[max_int(i, 0)] = bench_now() - start;
    }
    if (r == 0)
        *ret_seconds = bench_median(samples, rig->options->n_repeats);
    return r;
}

static int measure_prefix(struct copies *c, enum kv_copy_direction direction, int n_batches, const char *name) {
    bool is_restore = direction == KV_COPY_FETCH;
    double bytes = (double)c->n_pages * (double)c->page_bytes + (is_restore ? (double)c->state_bytes : 0), seconds;
    struct convoy convoy;
    int r = open_convoy(c, direction, n_batches, &convoy);

    if (r == 0)
        r = time_prefix(c, &convoy, &seconds);
    if (r == 0)
        put_copies(c, name, is_restore ? FIGURE_UP : FIGURE_DOWN, c->n_pages * PAGE_TOKENS, bytes, seconds,
                   (double)c->page_bytes);
    convoy_close(&convoy);
    return r;
}

/* As a prefix comes beside its first chunk: the restore point, then layer by layer its part of each page. */
static int bring_layers(struct copies *c, int n_layers) {
    struct rig *rig = c->net.rig;
    size_t piece = c->page_bytes / (size_t)n_layers;
    int r = rig->backend->copy(rig->load, c->net.space.view.target_state.arena, c->state, c->state_bytes);

    for (int layer = 0; r == 0 && layer < n_layers; layer++)
        for (int page = 0; r == 0 && page < c->n_pages; page++) {
            size_t at = (size_t)page * c->page_bytes + (size_t)layer * piece;

            r = rig->backend->copy(rig->load, c->device + at, c->host + at, piece);
        }
    return r == 0 ? backend_stream_wait(rig->backend, rig->load) : r;
}

static int measure_layers(struct copies *c) {
    static double samples[RIG_REPEATS_MAX];
    int n = c->net.rig->options->n_repeats, n_layers = c->net.space.view.target_full.n_layers, r = 0;
    double bytes = (double)c->n_pages * (double)c->page_bytes + (double)c->state_bytes;

    for (int i = -1; r == 0 && i < n; i++) {
        double start = bench_now();

        r = bring_layers(c, n_layers);
        samples[max_int(i, 0)] = bench_now() - start;
    }
    if (r == 0)
        put_copies(c, "restore, layer by layer", FIGURE_UP, c->n_pages * PAGE_TOKENS, bytes, bench_median(samples, n),
                   (double)c->page_bytes / n_layers);
    return r;
}

/* ---- decoding beside copies ----------------------------------------------------------------------------------------- */

struct decode {
    struct copies *copies;
    struct model_pass *pass;
    struct model_batch batch;
    struct convoy convoys[BESIDE_N];
    double samples[BESIDE_N][RIG_REPEATS_MAX * WINDOW_STEPS];
    int n;
};

static int run_steps(struct decode *d, double *samples) {
    struct network *net = &d->copies->net;
    struct rig *rig = net->rig;
    int r = network_place(net, d->copies->context, -1);

    for (int i = 0; r == 0 && i < WINDOW_STEPS; i++) {
        double start;

        network_batch(&d->batch, 1, d->copies->context + i, 1, SEG_PREFILL, 0);
        start = bench_now();
        r = model_pass_run(d->pass, rig->compute, &d->batch, NULL, NULL);
        if (r == 0)
            r = backend_stream_wait(rig->backend, rig->compute);
        samples[i] = bench_now() - start;
    }
    return r;
}

static int run_window(struct decode *d, int beside) {
    double *samples = d->samples[beside] + d->n;
    int r = 0, stopped = 0;

    if (beside != BESIDE_NOTHING)
        r = convoy_start(&d->convoys[beside]);
    if (r != 0)
        return r;
    r = run_steps(d, samples);
    if (beside != BESIDE_NOTHING)
        stopped = convoy_stop(&d->convoys[beside]);
    return r != 0 ? r : stopped;
}

static double percentile(const double *sorted, int n, double p) {
    return sorted[min_int(n - 1, (int)(p * n))];
}

static void put_decode(struct decode *d, int beside, double n_experts) {
    struct copies *c = d->copies;
    const double *idle = d->samples[BESIDE_NOTHING], *samples = d->samples[beside];
    const struct convoy *convoy = &d->convoys[beside];
    const struct model_info *info = model_info(c->net.model);
    const struct roof *roof = &c->net.rig->figures.measured;
    struct need need = need_target(
        info,
        &(struct need_rows){
            .n_seqs = 1, .n_rows = 1, .n_outs = 1, .context = c->context, .is_frozen = true, .n_experts = n_experts});
    struct figure figure = {.group = "copies",
                            .shape = c->net.shape->name,
                            .name = beside_names[beside],
                            .context = c->context,
                            .batch = 1,
                            .seconds = percentile(samples, d->n, 0.5),
                            .bytes = need.bytes,
                            .ops = need.ops};

    figure_add(&figure, "p99_ms", percentile(samples, d->n, 0.99) * 1e3);
    if (beside != BESIDE_NOTHING) {
        double rate = convoy->bytes / convoy->seconds;

        figure_add(&figure, "p50_ratio", figure.seconds / percentile(idle, d->n, 0.5));
        figure_add(&figure, "p99_ratio", percentile(samples, d->n, 0.99) / percentile(idle, d->n, 0.99));
        figure_add(&figure, "copies_GB_per_s", rate * 1e-9);
        figure_add(&figure, "copies_share", rate / (beside == BESIDE_SPILL ? roof->down : roof->up));
    }
    figures_put(&c->net.rig->figures, &figure);
}

static int open_decode(struct decode *d) {
    struct model *model = d->copies->net.model;
    struct model_pass_options options = {
        .kind = PASS_RERUN, .n_segs_max = 1, .n_rows_max = 1, .n_outs_max = 1, .all_logits = true, .routing = true};
    int r = model_pass_new(model, &d->copies->net.space.view, &options, &d->pass);

    if (r == 0)
        r = model_batch_new(model, MEM_HOST, 1, 1, 1, &d->batch);
    if (r == 0)
        r = open_convoy(d->copies, KV_COPY_SPILL, CONVOY_BATCHES_MAX, &d->convoys[BESIDE_SPILL]);
    if (r == 0)
        r = open_convoy(d->copies, KV_COPY_FETCH, CONVOY_BATCHES_MAX, &d->convoys[BESIDE_RESTORE]);
    return r;
}

static void close_decode(struct decode *d) {
    for (int i = BESIDE_SPILL; i < BESIDE_N; i++)
        if (d->convoys[i].rig)
            convoy_close(&d->convoys[i]);
    model_batch_free(d->copies->net.model, &d->batch);
    model_pass_free(d->pass);
}

/* Windows of the three kinds take turns, so that all see the same machine. */
static int run_windows(struct decode *d) {
    int r = run_window(d, BESIDE_NOTHING); /* warms up; the first window overwrites it */

    for (int i = 0; r == 0 && i < d->copies->net.rig->options->n_repeats; i++) {
        for (int beside = 0; r == 0 && beside < BESIDE_N; beside++)
            r = run_window(d, beside);
        d->n += WINDOW_STEPS;
    }
    return r;
}

static int measure_decode(struct copies *c) {
    struct decode *d = calloc(1, sizeof *d);
    double n_experts = 0;
    int r;

    if (!d)
        return -ENOMEM;
    d->copies = c;
    r = open_decode(d);
    if (r == 0)
        r = run_windows(d);
    if (r == 0)
        r = network_experts(&c->net, d->pass, 1, 1, &n_experts);
    for (int beside = 0; r == 0 && beside < BESIDE_N; beside++)
        bench_median(d->samples[beside], d->n); /* sorts them */
    for (int beside = 0; r == 0 && beside < BESIDE_N; beside++)
        put_decode(d, beside, n_experts);
    close_decode(d);
    free(d);
    return r;
}

/* ---- all ------------------------------------------------------------------------------------------------------------ */

static int measure(struct copies *c) {
    double fill_s;
    int r = network_fill(&c->net, c->context, &fill_s);

    if (r == 0)
        r = measure_prefix(c, KV_COPY_SPILL, 1, "spill, one batch on its way");
    if (r == 0)
        r = measure_prefix(c, KV_COPY_FETCH, 1, "restore, one batch on its way");
    if (r == 0)
        r = measure_prefix(c, KV_COPY_FETCH, CONVOY_BATCHES_MAX, "restore, two batches on their way");
    if (r == 0)
        r = measure_layers(c);
    if (r == 0)
        r = network_fill(&c->net, c->context, &fill_s); /* the state is a seq's again */
    return r == 0 ? measure_decode(c) : r;
}

int copies_measure(struct rig *rig, const struct rig_shape *shape) {
    struct copies c = {.context = rig->contexts[0]};
    int n_used = (int)div_ceil((uint64_t)c.context + WINDOW_STEPS, PAGE_TOKENS);
    struct network_options options = {.shape = shape, .n_seqs = 1};
    size_t host_bytes = 0;
    void *host = NULL, *state = NULL;
    int r;

    c.n_pages = (int)div_ceil((uint64_t)rig->options->n_tokens, PAGE_TOKENS);
    options.n_tokens_max = (n_used + c.n_pages) * PAGE_TOKENS;
    r = network_open(&c.net, rig, &options);
    if (r == 0) {
        const struct kv_view *full = &c.net.space.view.target_full;

        c.page_bytes = full->page_bytes;
        c.state_bytes = c.net.space.view.target_state.slot_bytes;
        c.device = (char *)full->arena + (size_t)(1 + n_used) * c.page_bytes;
        host_bytes = (size_t)c.n_pages * c.page_bytes;
        r = rig->backend->mem_alloc(rig->device, MEM_HOST, host_bytes, &host);
    }
    if (r == 0)
        r = rig->backend->mem_alloc(rig->device, MEM_HOST, c.state_bytes, &state);
    c.host = host;
    c.state = state;
    if (r == 0)
        r = measure(&c);
    if (state)
        rig->backend->mem_free(rig->device, MEM_HOST, state, c.state_bytes);
    if (host)
        rig->backend->mem_free(rig->device, MEM_HOST, host, host_bytes);
    network_close(&c.net);
    return r;
}
