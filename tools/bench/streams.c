#include "streams.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "network.h"

enum { TAIL_PAGES = 4 }; /* the newest: they are written */

struct streams {
    struct network net;
    struct streamer *streamer;
    int context, n_pages, first, end; /* pages of the seq; [first, end) are not on the device */
    int32_t *table;                   /* host copy of the seq's */
    char *host;                       /* MEM_HOST: where those pages lie */
    size_t host_bytes;
    const void **pages; /* [end] */
    struct streamed_seq seq;
    struct streamed streamed;
    struct model_pass *pass;
    struct model_batch batch;
    float *logits[2]; /* with all pages on the device, and streamed */
};

/* ---- where pages are ------------------------------------------------------------------------------------------------ */

static int open_streamer(struct streams *s) {
    struct rig *rig = s->net.rig;
    struct model_space *view = &s->net.space.view;
    struct streamer_options options = {.backend = rig->backend,
                                       .device = rig->device,
                                       .upload = rig->compute,
                                       .n_places = 1,
                                       .n_pages_max = view->target_full.n_pages_max,
                                       .region_spans = rig->scale.region_spans,
                                       .layer_bytes = kv_layer_bytes(&view->target_full)};
    int r = streamer_open(&options, &s->streamer);

    if (r != 0)
        return r;
    view->streamer = s->streamer;
    view->target_full.ring = streamer_ring(s->streamer);
    return 0;
}

/* Copies to host memory what is to come from there. The pages' places on the device keep what they have, so that the pass
 * that finds all of it there can be run too. */
static int move_out(struct streams *s) {
    struct rig *rig = s->net.rig;
    const struct kv_view *full = &s->net.space.view.target_full;
    void *host = NULL;
    int r;

    s->host_bytes = (size_t)(s->end - s->first) * full->page_bytes;
    s->pages = calloc((size_t)s->end, sizeof *s->pages);
    r = s->pages ? rig->backend->mem_alloc(rig->device, MEM_HOST, s->host_bytes, &host) : -ENOMEM;
    if (r != 0)
        return r;
    s->host = host;
    for (int page = s->first; page < s->end; page++)
        s->pages[page] = s->host + (size_t)(page - s->first) * full->page_bytes;
    s->seq = (struct streamed_seq){.slot = 0, .first_page = s->first, .end_page = s->end, .pages = s->pages};
    s->streamed = (struct streamed){&s->seq, 1};
    r = rig->backend->copy(rig->store, s->host, (char *)full->arena + (size_t)(1 + s->first) * full->page_bytes,
                           s->host_bytes);
    return r == 0 ? backend_stream_wait(rig->backend, rig->store) : r;
}

/* The table of a seq whose pages are all on the device, or that of one of which half is streamed. */
static int write_table(struct streams *s, bool is_streamed) {
    struct rig *rig = s->net.rig;
    const struct kv_view *full = &s->net.space.view.target_full;
    int r;

    for (int page = 0; page < full->n_pages_max; page++)
        s->table[page] = is_streamed && page >= s->first && page < s->end ? streamer_entry(s->streamer, 0, page)
                                                                          : 1 + page; /* as space has it */
    r = rig->backend->copy(rig->compute, (void *)(uintptr_t)full->table, s->table,
                           (size_t)full->n_pages_max * sizeof *s->table);
    return r == 0 ? backend_stream_wait(rig->backend, rig->compute) : r;
}

/* ---- passes --------------------------------------------------------------------------------------------------------- */

static int open_pass(struct streams *s, int n_rows) {
    struct model_pass_options options = {.kind = PASS_RERUN,
                                         .n_segs_max = 1,
                                         .n_rows_max = n_rows,
                                         .n_outs_max = n_rows,
                                         .all_logits = true,
                                         .has_gate = true};
    int r = model_pass_new(s->net.model, &s->net.space.view, &options, &s->pass);

    if (r == 0)
        r = model_batch_new(s->net.model, MEM_HOST, 1, n_rows, n_rows, &s->batch);
    if (r == 0)
        network_batch(&s->batch, 1, s->context, n_rows, SEG_PREFILL, 0);
    return r;
}

static void close_pass(struct streams *s) {
    model_batch_free(s->net.model, &s->batch);
    model_pass_free(s->pass);
    s->pass = NULL;
}

/* From the same state each time, so that results can be compared. */
static int time_pass(struct streams *s, bool is_streamed, double *ret_seconds) {
    static double samples[RIG_REPEATS_MAX];
    struct rig *rig = s->net.rig;
    struct seq_ctl ctl = space_ctl(1 << 30, 1 << 30, NULL, 0);
    int n = rig->options->n_repeats, r = write_table(s, is_streamed);

    ctl.len = s->context;
    for (int i = -1; r == 0 && i < n; i++) {
        double start;

        r = space_admit(&s->net.space, 0, &ctl);
        start = bench_now();
        if (r == 0)
            r = model_pass_run(s->pass, rig->compute, &s->batch, is_streamed ? &s->streamed : NULL, NULL);
        if (r == 0)
            r = backend_stream_wait(rig->backend, rig->compute);
        samples[max_int(i, 0)] = bench_now() - start;
    }
    if (r == 0)
        *ret_seconds = bench_median(samples, n);
    return r;
}

static int read_logits(struct streams *s, float *logits, int n_rows) {
    size_t vocab = (size_t)model_info(s->net.model)->target.vocab;

    return space_read(&s->net.space, logits, model_pass_logits(s->pass), (size_t)n_rows * vocab * sizeof *logits);
}

static int measure_rows(struct streams *s, const char *name, int n_rows) {
    size_t bytes = (size_t)n_rows * (size_t)model_info(s->net.model)->target.vocab * sizeof(float);
    struct streamer_stats before, after;
    double resident_s = 0, streamed_s = 0;
    struct figure figure = {.group = "streamed",
                            .shape = s->net.shape->name,
                            .name = name,
                            .context = s->context,
                            .batch = 1,
                            .way = FIGURE_UP};
    int r = open_pass(s, n_rows);

    if (r == 0)
        r = time_pass(s, false, &resident_s);
    if (r == 0)
        r = read_logits(s, s->logits[0], n_rows);
    streamer_stats(s->streamer, &before);
    if (r == 0)
        r = time_pass(s, true, &streamed_s);
    streamer_stats(s->streamer, &after);
    if (r == 0)
        r = read_logits(s, s->logits[1], n_rows);
    close_pass(s);
    if (r != 0)
        return r;
    figure.seconds = streamed_s;
    figure.bytes = (double)after.pass_bytes;
    figure_add(&figure, "GB_per_s", figure.bytes / streamed_s * 1e-9);
    figure_add(&figure, "piece_KiB", (double)kv_layer_bytes(&s->net.space.view.target_full) / 1024);
    figure_add(&figure, "resident_ms", resident_s * 1e3);
    figure_add(&figure, "late_fences",
               (double)(after.n_late - before.n_late) / (double)(after.n_fences - before.n_fences));
    figure_add(&figure, "has_same_bits", memcmp(s->logits[0], s->logits[1], bytes) == 0);
    figures_put(&s->net.rig->figures, &figure);
    return 0;
}

/* ---- all ------------------------------------------------------------------------------------------------------------ */

static int open_streams(struct streams *s) {
    struct rig *rig = s->net.rig;
    size_t logit_bytes = (size_t)BLOCK_ROWS_MAX * (size_t)model_info(s->net.model)->target.vocab * sizeof(float);
    int n_filled = min_int(s->context, rig->scale.prompt) / PAGE_TOKENS * PAGE_TOKENS, r;
    void *table = NULL;
    double fill_s;

    r = rig->backend->mem_alloc(rig->device, MEM_HOST, (size_t)s->net.space.n_pages * sizeof *s->table, &table);
    s->table = table;
    for (int i = 0; r == 0 && i < 2; i++) {
        s->logits[i] = malloc(logit_bytes);
        r = s->logits[i] ? 0 : -ENOMEM;
    }
    if (r == 0)
        r = network_fill(&s->net, n_filled, &fill_s);
    if (r == 0)
        r = network_repeat(&s->net, n_filled, s->context);
    if (r == 0)
        r = open_streamer(s);
    return r == 0 ? move_out(s) : r;
}

static void close_streams(struct streams *s) {
    struct rig *rig = s->net.rig;

    streamer_close(s->streamer);
    if (s->host)
        rig->backend->mem_free(rig->device, MEM_HOST, s->host, s->host_bytes);
    if (s->table)
        rig->backend->mem_free(rig->device, MEM_HOST, s->table, (size_t)s->net.space.n_pages * sizeof *s->table);
    for (int i = 0; i < 2; i++)
        free(s->logits[i]);
    free(s->pages);
    network_close(&s->net);
}

int streams_measure(struct rig *rig, const struct rig_shape *shape) {
    struct streams s = {.context = rig->contexts[rig->n_contexts - 1]};
    struct network_options options = {.shape = shape, .n_seqs = 1, .n_tokens_max = s.context};
    int r;

    s.n_pages = s.context / PAGE_TOKENS;
    s.end = s.n_pages - TAIL_PAGES;
    s.first = s.end - s.n_pages / 2;
    if (s.first < 1) {
        printf("\nstreamed, %s: %d tokens are too few to leave half of them in host memory\n", shape->name, s.context);
        return 0;
    }
    r = network_open(&s.net, rig, &options);
    if (r == 0)
        r = open_streams(&s);
    if (r == 0)
        r = measure_rows(&s, "one token, half of its pages below", 1);
    if (r == 0)
        r = measure_rows(&s, "16 rows, half of their pages below", BLOCK_ROWS_MAX);
    close_streams(&s);
    return r;
}
