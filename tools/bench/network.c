#include "network.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { FIRST_ID = 1, IDS = 3000 };

static int token_at(int seq, int pos) {
    return FIRST_ID + (seq * 131 + pos * 37) % IDS;
}

/* ---- opening -------------------------------------------------------------------------------------------------------- */

static int open_model(struct network *net, const struct network_options *o) {
    struct rig *rig = net->rig;
    struct model_options options = {.target_folder = o->shape->target,
                                    .draft_folder = o->has_draft ? o->shape->draft : NULL,
                                    .dummy = true,
                                    .kv_dtype = DTYPE_BF16,
                                    .draft_dtype = DTYPE_BF16,
                                    .n_valid = o->n_valid,
                                    .n_slots = o->n_seqs,
                                    .n_segs_max = o->n_seqs,
                                    .n_rows_max = rig->scale.chunk,
                                    .n_outs_max = BLOCK_ROWS_MAX,
                                    .n_steps_max = NETWORK_AHEAD};
    struct report report = {0};
    int r = model_open(rig->backend, rig->device, &options, &net->model, &report);

    if (r != 0)
        fprintf(stderr, "spillway-bench: %s\n", report.line);
    return r;
}

static int open_prefill(struct network *net) {
    int chunk = net->rig->scale.chunk, r;
    struct model_pass_options options = {.kind = PASS_PREFILL, .n_segs_max = 1, .n_rows_max = chunk, .n_outs_max = 1};

    r = model_pass_new(net->model, &net->space.view, &options, &net->prefill);
    for (int i = 0; r == 0 && i < NETWORK_AHEAD; i++)
        r = model_batch_new(net->model, MEM_HOST, 1, chunk, 1, &net->chunks[i]);
    return r;
}

int network_open(struct network *net, struct rig *rig, const struct network_options *options) {
    void *ctl = NULL;
    int r;

    *net = (struct network){.rig = rig, .shape = options->shape, .n_seqs = options->n_seqs};
    r = open_model(net, options);
    if (r == 0) {
        r = space_open(&net->space, rig->backend, rig->device, rig->compute, net->model, options->n_seqs,
                       options->n_tokens_max);
        if (r != 0)
            fprintf(stderr, "spillway-bench: %s: no room for %d seqs of %d tokens beside the weights\n",
                    options->shape->name, options->n_seqs, options->n_tokens_max);
    }
    if (r == 0)
        r = open_prefill(net);
    if (r == 0)
        r = rig->backend->mem_alloc(rig->device, MEM_HOST, (size_t)net->n_seqs * sizeof *net->ctl, &ctl);
    net->ctl = ctl;
    return r;
}

void network_close(struct network *net) {
    const struct backend *backend = net->rig->backend;

    if (net->ctl)
        backend->mem_free(net->rig->device, MEM_HOST, net->ctl, (size_t)net->n_seqs * sizeof *net->ctl);
    for (int i = 0; net->model && i < NETWORK_AHEAD; i++)
        model_batch_free(net->model, &net->chunks[i]);
    model_pass_free(net->prefill);
    space_close(&net->space);
    model_close(net->model);
    *net = (struct network){.rig = net->rig};
}

/* ---- seqs ----------------------------------------------------------------------------------------------------------- */

void network_batch(struct model_batch *batch, int n_seqs, int pos, int n_rows, int flags, int first_out) {
    struct batch *b = &batch->view;
    int row = 0, out = 0;

    for (int seq = 0; seq < n_seqs; seq++) {
        b->seg_slot[seq] = seq;
        b->seg_pos[seq] = pos;
        b->seg_flags[seq] = flags;
        b->seg_row[seq] = row;
        for (int i = 0; i < n_rows; i++, row++) {
            b->row_token[row] = token_at(seq, pos + i);
            b->row_seg[row] = seq;
            if (i >= first_out)
                b->out_row[out++] = row;
        }
    }
    b->seg_row[n_seqs] = row;
    *b->n_segs = n_seqs;
    *b->n_rows = row;
    *b->n_outs = out;
}

int network_place(struct network *net, int n_tokens, int stop_id) {
    const struct backend *backend = net->rig->backend;
    int r;

    for (int seq = 0; seq < net->n_seqs; seq++) {
        net->ctl[seq] = space_ctl(1 << 30, 1 << 30, &stop_id, stop_id >= 0);
        net->ctl[seq].len = n_tokens;
        net->ctl[seq].anchor = token_at(seq, n_tokens);
    }
    r = backend->copy(net->rig->compute, net->space.view.ctl, net->ctl, (size_t)net->n_seqs * sizeof *net->ctl);
    return r == 0 ? backend_stream_wait(backend, net->rig->compute) : r;
}

/* Seq 0's next n tokens, in chunks; up to NETWORK_AHEAD of them are on their way. */
static int run_chunks(struct network *net, int pos, int n_tokens) {
    const struct backend *backend = net->rig->backend;
    int chunk = net->rig->scale.chunk, r = 0;

    for (int i = 0, at = 0; r == 0 && at < n_tokens; i++, at += chunk) {
        struct model_batch *batch = &net->chunks[i % NETWORK_AHEAD];

        if (i > 0 && i % NETWORK_AHEAD == 0) /* its memory must stay as it is until its step is done */
            r = backend_stream_wait(backend, net->rig->compute);
        network_batch(batch, 1, pos + at, min_int(chunk, n_tokens - at), SEG_PREFILL, chunk);
        if (r == 0)
            r = model_pass_run(net->prefill, net->rig->compute, batch, NULL, NULL);
    }
    return r == 0 ? backend_stream_wait(backend, net->rig->compute) : r;
}

static int copy_pages(struct network *net, const struct kv_view *kv, int n_tokens) {
    size_t bytes = (size_t)div_ceil((uint64_t)n_tokens, PAGE_TOKENS) * kv->page_bytes;
    char *first = (char *)kv->arena + kv->page_bytes; /* space: the first page is the null page */
    int r = 0;

    for (int seq = 1; r == 0 && kv->n_layers > 0 && seq < net->n_seqs; seq++)
        r = net->rig->backend->copy(net->rig->compute,
                                    first + (size_t)seq * (size_t)net->space.n_pages * kv->page_bytes, first, bytes);
    return r;
}

int network_fill(struct network *net, int n_tokens, double *ret_seconds) {
    const struct model_space *view = &net->space.view;
    const struct state_view *state = &view->target_state;
    struct seq_ctl ctl = space_ctl(1 << 30, 1 << 30, NULL, 0);
    double start;
    int r = space_admit(&net->space, 0, &ctl);

    start = bench_now();
    if (r == 0)
        r = run_chunks(net, 0, n_tokens);
    *ret_seconds = bench_now() - start;
    if (r == 0)
        r = copy_pages(net, &view->target_full, n_tokens);
    if (r == 0)
        r = copy_pages(net, &view->draft_full, n_tokens);
    if (r == 0)
        r = copy_pages(net, &view->draft_sliding, n_tokens);
    for (int seq = 1; r == 0 && seq < net->n_seqs; seq++)
        r = net->rig->backend->copy(net->rig->compute, (char *)state->arena + (size_t)seq * state->slot_bytes,
                                    state->arena, state->slot_bytes);
    return r == 0 ? backend_stream_wait(net->rig->backend, net->rig->compute) : r;
}

int network_repeat(struct network *net, int n_from, int n_to) {
    const struct kv_view *kv = &net->space.view.target_full;
    char *pages = (char *)kv->arena + kv->page_bytes; /* space: the first page is the null page */
    size_t period = (size_t)(n_from / PAGE_TOKENS), end = (size_t)div_ceil((uint64_t)n_to, PAGE_TOKENS);
    int r = 0;

    for (size_t page = period; r == 0 && page < end; page++)
        r = net->rig->backend->copy(net->rig->compute, pages + page * kv->page_bytes,
                                    pages + page % period * kv->page_bytes, kv->page_bytes);
    return r == 0 ? backend_stream_wait(net->rig->backend, net->rig->compute) : r;
}

/* ---- passes --------------------------------------------------------------------------------------------------------- */

int network_experts(struct network *net, const struct model_pass *pass, int n_rows_max, int n_rows,
                    double *ret_n_experts) {
    const struct qwen_config *c = &model_info(net->model)->target;
    size_t n_ids = (size_t)c->n_layers * (size_t)n_rows_max * (size_t)c->top_k;
    int32_t *ids;
    int n = 0, r;

    *ret_n_experts = 0;
    if (c->n_experts == 0)
        return 0;
    ids = malloc(n_ids * sizeof *ids);
    r = ids ? space_read(&net->space, ids, model_pass_routing(pass), n_ids * sizeof *ids) : -ENOMEM;
    for (int l = 0; r == 0 && l < c->n_layers; l++) {
        bool is_chosen[EXPERTS_MAX] = {false};

        for (int i = 0; i < n_rows * c->top_k; i++) {
            int id = ids[(size_t)l * (size_t)n_rows_max * (size_t)c->top_k + (size_t)i];

            n += !is_chosen[id];
            is_chosen[id] = true;
        }
    }
    free(ids);
    if (r == 0)
        *ret_n_experts = (double)n / c->n_layers;
    return r;
}

struct timing {
    struct network *net;
    const struct network_pass *options;
    struct model_pass *pass;
    struct model_batch batches[NETWORK_AHEAD];
};

static int open_timing(struct timing *t) {
    const struct network_pass *o = t->options;
    struct model *model = t->net->model;
    bool is_draft = o->kind == PASS_DRAFT;
    int n_rows = o->n_seqs * o->n_rows, n_outs = max_int(1, o->n_seqs * o->n_outs), r;
    struct model_pass_options options = {.kind = o->kind,
                                         .n_segs_max = o->n_seqs,
                                         .n_rows_max = n_rows,
                                         .n_outs_max = n_outs,
                                         .all_logits = !is_draft && o->n_outs > 0,
                                         .routing = !is_draft};

    r = model_pass_new(model, &t->net->space.view, &options, &t->pass);
    for (int i = 0; r == 0 && i < o->n_runs; i++) {
        /* A draft block leaves its seq where it is. */
        int pos = o->context + (is_draft ? 0 : i * o->n_rows);

        r = model_batch_new(model, MEM_HOST, o->n_seqs, n_rows, n_outs, &t->batches[i]);
        if (r == 0)
            network_batch(&t->batches[i], o->n_seqs, pos, o->n_rows, is_draft ? 0 : SEG_PREFILL, o->n_rows - o->n_outs);
    }
    return r;
}

static int sample(struct timing *t, double *ret_seconds) {
    const struct network_pass *o = t->options;
    struct rig *rig = t->net->rig;
    int r = network_place(t->net, o->context, -1);
    double start = bench_now();

    for (int i = 0; r == 0 && i < o->n_runs; i++)
        r = model_pass_run(t->pass, rig->compute, &t->batches[i], NULL, NULL);
    if (r == 0)
        r = backend_stream_wait(rig->backend, rig->compute);
    *ret_seconds = (bench_now() - start) / o->n_runs;
    return r;
}

int network_time(struct network *net, const struct network_pass *pass, int n_repeats, double *ret_seconds,
                 double *ret_n_experts) {
    static double samples[RIG_REPEATS_MAX];
    struct timing t = {.net = net, .options = pass};
    int r = open_timing(&t);

    *ret_n_experts = 0;
    for (int i = -1; r == 0 && i < n_repeats; i++)
        r = sample(&t, &samples[max_int(i, 0)]);
    if (r == 0 && pass->kind != PASS_DRAFT)
        r = network_experts(net, t.pass, pass->n_seqs * pass->n_rows, pass->n_seqs * pass->n_rows, ret_n_experts);
    if (r == 0)
        *ret_seconds = bench_median(samples, n_repeats);
    for (int i = 0; i < NETWORK_AHEAD; i++)
        model_batch_free(net->model, &t.batches[i]);
    model_pass_free(t.pass);
    return r;
}
