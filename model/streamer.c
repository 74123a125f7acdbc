#include "streamer.h"

#include <errno.h>
#include <stdlib.h>

enum { SPAN_PAGES = SPAN_TOKENS / PAGE_TOKENS };

struct streamer {
    struct streamer_options options;
    struct devmem mem;
    struct stream *load;
    struct event *ready[2], *consumed[2], *written;
    char *ring;
    struct attn_spans *spans; /* [1] all, between passes */
    const int32_t *grid;      /* [n_cells + 1] device memory: where cells begin, in spans; then ATTN_SPANS_END */
    int n_cells, cell_spans, cell_pages;
    struct streamer_stats stats; /* atomics */
    uint64_t *n_late;            /* of the stats, in MEM_HOST memory */
};

/* ---- memory --------------------------------------------------------------------------------------------------------- */

static int take_memory(struct streamer *s) {
    const struct streamer_options *o = &s->options;
    const struct attn_spans all = {0, ATTN_SPANS_END};
    int32_t *grid;

    s->cell_spans = o->region_spans / 2;
    s->cell_pages = s->cell_spans * SPAN_PAGES;
    s->n_cells = (int)div_ceil((uint64_t)o->n_pages_max, (uint64_t)s->cell_pages);
    grid = malloc((size_t)(s->n_cells + 1) * sizeof *grid);
    if (!grid)
        return -ENOMEM;
    for (int cell = 0; cell < s->n_cells; cell++)
        grid[cell] = cell * s->cell_spans;
    grid[s->n_cells] = ATTN_SPANS_END;
    s->grid = devmem_upload(&s->mem, grid, (size_t)(s->n_cells + 1) * sizeof *grid);
    s->spans = devmem_upload(&s->mem, &all, sizeof all);
    s->ring = devmem_take(&s->mem, MEM_DEVICE, streamer_ring_bytes(o->n_places, o->region_spans, o->layer_bytes));
    free(grid);
    s->n_late = devmem_take(&s->mem, MEM_HOST, sizeof *s->n_late);
    return s->grid && s->spans && s->ring && s->n_late ? 0 : -ENOMEM;
}

int streamer_open(const struct streamer_options *options, struct streamer **ret_streamer) {
    const struct backend *backend = options->backend;
    struct streamer *s;
    int r;

    if (options->region_spans < STREAMER_REGION_SPANS_MIN || options->region_spans % 2 != 0)
        return -EINVAL;
    s = calloc(1, sizeof *s);
    if (!s)
        return -ENOMEM;
    s->options = *options;
    devmem_init(&s->mem, backend, options->device, options->upload);
    r = take_memory(s);
    if (r == 0)
        r = backend->stream_open(options->device, STREAM_LOAD, &s->load);
    for (int half = 0; r == 0 && half < 2; half++) {
        r = backend->event_new(options->device, &s->ready[half]);
        if (r == 0)
            r = backend->event_new(options->device, &s->consumed[half]);
    }
    if (r == 0)
        r = backend->event_new(options->device, &s->written);
    if (r != 0) {
        streamer_close(s);
        return r;
    }
    *ret_streamer = s;
    return 0;
}

void streamer_close(struct streamer *s) {
    if (!s)
        return;
    for (int half = 0; half < 2; half++) {
        if (s->ready[half])
            s->options.backend->event_free(s->ready[half]);
        if (s->consumed[half])
            s->options.backend->event_free(s->consumed[half]);
    }
    if (s->written)
        s->options.backend->event_free(s->written);
    if (s->load)
        s->options.backend->stream_close(s->load);
    devmem_deinit(&s->mem);
    free(s);
}

void *streamer_ring(const struct streamer *s) {
    return s->ring;
}

const struct attn_spans *streamer_spans(const struct streamer *s) {
    return s->spans;
}

static int ring_place(const struct streamer *s, int slot, int page) {
    return slot * 2 * s->cell_pages + page % (2 * s->cell_pages);
}

int32_t streamer_entry(const struct streamer *s, int slot, int page) {
    return ~ring_place(s, slot, page);
}

/* ---- running -------------------------------------------------------------------------------------------------------- */

/* The next page of the cell that is not on the device, from *page on; false: there is none. */
static bool next_streamed(const struct streamer *s, const struct streamed_seq *seq, int cell, int *page) {
    int end = min_int(seq->end_page, (cell + 1) * s->cell_pages);

    while (*page < end && !seq->pages[*page])
        ++*page;
    return *page < end;
}

static int first_page(const struct streamer *s, const struct streamed_seq *seq, int cell) {
    return max_int(seq->first_page, cell * s->cell_pages);
}

static bool is_streamed(const struct streamer *s, const struct streamed *streamed, int cell) {
    for (int i = 0; i < streamed->n_seqs; i++) {
        int page = first_page(s, &streamed->seqs[i], cell);

        if (next_streamed(s, &streamed->seqs[i], cell, &page))
            return true;
    }
    return false;
}

/* This layer's segments of the cell's pages. */
static int load_cell(struct streamer *s, const struct streamed *streamed, int cell, int layer) {
    const struct backend *backend = s->options.backend;
    const size_t bytes = s->options.layer_bytes;
    uint64_t n = 0;
    int r = backend->event_wait(s->load, s->consumed[cell % 2]);

    for (int i = 0; i < streamed->n_seqs; i++) {
        const struct streamed_seq *seq = &streamed->seqs[i];

        for (int page = first_page(s, seq, cell); r == 0 && next_streamed(s, seq, cell, &page); page++, n++)
            r = backend->copy(s->load, s->ring + (size_t)ring_place(s, seq->slot, page) * bytes,
                              (const char *)seq->pages[page] + (size_t)layer * bytes, bytes);
    }
    if (r == 0)
        r = backend->event_record(s->load, s->ready[cell % 2]);
    __atomic_fetch_add(&s->stats.bytes, n * bytes, __ATOMIC_RELAXED);
    __atomic_fetch_add(&s->stats.n_fences, 1, __ATOMIC_RELAXED);
    return r;
}

static int set_spans(struct streamer *s, struct stream *compute, int cell_begin, int cell_end) {
    int r = s->options.backend->copy(compute, &s->spans->begin, &s->grid[cell_begin], sizeof *s->grid);

    return r != 0 ? r : s->options.backend->copy(compute, &s->spans->end, &s->grid[cell_end], sizeof *s->grid);
}

/* What follows the last streamed cell is attended with it. */
static int run_attention(struct streamer *s, struct stream *compute, struct program *program, int layer,
                         const struct streamed *streamed, int last_cell) {
    const struct backend *backend = s->options.backend;
    int begin = 0, r = 0;

    for (int cell = 0; r == 0 && cell <= last_cell; cell++) {
        int end = cell == last_cell ? s->n_cells : cell + 1;

        if (!is_streamed(s, streamed, cell))
            continue;
        r = load_cell(s, streamed, cell, layer);
        if (r == 0)
            r = set_spans(s, compute, begin, end);
        if (r == 0)
            r = backend->event_wait_counted(compute, s->ready[cell % 2], s->n_late);
        if (r == 0)
            r = backend->program_run_part(compute, program, 2 * layer + 1);
        if (r == 0)
            r = backend->event_record(compute, s->consumed[cell % 2]);
        begin = end;
    }
    return r;
}

int streamer_run(struct streamer *s, struct stream *compute, struct program *program, const struct kv_view *kv,
                 const struct streamed *streamed, const struct pass_gate *gate) {
    const struct backend *backend = s->options.backend;
    uint64_t bytes = s->stats.bytes; /* nobody else changes it */
    int last_cell = s->n_cells - 1, r = 0;

    while (last_cell >= 0 && !is_streamed(s, streamed, last_cell))
        last_cell--;
    if (last_cell < 0)
        return gate_run(backend, compute, program, kv->n_layers, gate);
    __atomic_fetch_add(&s->stats.n_passes, 1, __ATOMIC_RELAXED);
    for (int layer = 0; r == 0 && layer < kv->n_layers; layer++) {
        r = backend->program_run_part(compute, program, 2 * layer);
        if (r == 0 && gate)
            r = gate->open(gate->user, layer);
        if (r == 0)
            r = run_attention(s, compute, program, layer, streamed, last_cell);
    }
    __atomic_store_n(&s->stats.pass_bytes, s->stats.bytes - bytes, __ATOMIC_RELAXED);
    if (r == 0)
        r = backend->program_run_part(compute, program, 2 * kv->n_layers);
    return r != 0 ? r : set_spans(s, compute, 0, s->n_cells);
}

int streamer_follow(struct streamer *s, struct stream *compute) {
    int r = s->options.backend->event_record(compute, s->written);

    return r != 0 ? r : s->options.backend->event_wait(s->load, s->written);
}

void streamer_stats(const struct streamer *s, struct streamer_stats *ret_stats) {
    ret_stats->bytes = __atomic_load_n(&s->stats.bytes, __ATOMIC_RELAXED);
    ret_stats->n_passes = __atomic_load_n(&s->stats.n_passes, __ATOMIC_RELAXED);
    ret_stats->n_fences = __atomic_load_n(&s->stats.n_fences, __ATOMIC_RELAXED);
    ret_stats->n_late = __atomic_load_n(s->n_late, __ATOMIC_RELAXED);
    ret_stats->pass_bytes = __atomic_load_n(&s->stats.pass_bytes, __ATOMIC_RELAXED);
}
