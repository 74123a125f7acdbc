/* evaluate: one run over given ids, in chunks, with what the network computed written to .npy files. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "npy.h"
#include "probe.h"

/* Rows of one run of the network and the pass that takes them. */
struct lane {
    struct model_pass *pass;
    struct model_batch input;
    int n_rows_max;
};

struct evaluation {
    struct probe *probe;
    const struct ids *ids;
    struct lane prefill, verify, draft;
    struct npy logits, draft_logits;
    float *row_buffer; /* logits of one pass */
    float *hidden;     /* [n_layers, T, hidden] */
    int32_t *routing;  /* [n_layers, T, top_k] */
    int pos;           /* rows done */
};

static int lane_open(struct evaluation *e, struct lane *lane, enum pass_kind kind, int n_rows_max) {
    const struct probe_options *o = e->probe->options;
    bool outs = kind == PASS_DRAFT || o->logits_path;
    struct model_pass_options options = {.kind = kind,
                                         .n_segs_max = 1,
                                         .n_rows_max = n_rows_max,
                                         .n_outs_max = outs ? n_rows_max : 1,
                                         .all_logits = true,
                                         .hidden = kind != PASS_DRAFT && o->hidden_path,
                                         .routing = kind != PASS_DRAFT && o->routing_path};
    int r = model_pass_new(e->probe->model, &e->probe->space.view, &options, &lane->pass);

    lane->n_rows_max = n_rows_max;
    return r != 0 ? r : model_batch_new(e->probe->model, MEM_HOST, 1, n_rows_max, options.n_outs_max, &lane->input);
}

static void lane_close(struct evaluation *e, struct lane *lane) {
    model_batch_free(e->probe->model, &lane->input);
    model_pass_free(lane->pass);
}

/* Copies [n_layers, n_rows of n_rows_max] of a pass into [n_layers, T] at the current position. */
static int keep_layers(struct evaluation *e, void *dst, const void *src, size_t row_bytes, int n_rows, int n_rows_max) {
    size_t n_layers = (size_t)e->probe->info->target.n_layers, T = (size_t)e->ids->n;
    char *all = malloc(n_layers * (size_t)n_rows_max * row_bytes);
    int r = all ? space_read(&e->probe->space, all, src, n_layers * (size_t)n_rows_max * row_bytes) : -ENOMEM;

    for (size_t i = 0; r == 0 && i < n_layers; i++)
        memcpy((char *)dst + (i * T + (size_t)e->pos) * row_bytes, all + i * (size_t)n_rows_max * row_bytes,
               (size_t)n_rows * row_bytes);
    free(all);
    return r;
}

static int keep_logits(struct evaluation *e, struct npy *npy, const struct lane *lane, int n_rows) {
    size_t bytes = (size_t)n_rows * (size_t)e->probe->info->target.vocab * sizeof(float);
    int r = space_read(&e->probe->space, e->row_buffer, model_pass_logits(lane->pass), bytes);

    return r != 0 ? r : npy_write(npy, e->row_buffer, bytes);
}

static int run_rows(struct evaluation *e, struct lane *lane, int n_rows) {
    const struct qwen_config *c = &e->probe->info->target;
    int r = probe_feed(e->probe, lane->pass, &lane->input, 0, e->ids->id + e->pos, e->pos, n_rows, SEG_PREFILL,
                       e->logits.file != NULL);

    if (r == 0 && e->logits.file)
        r = keep_logits(e, &e->logits, lane, n_rows);
    if (r == 0 && e->hidden)
        r = keep_layers(e, e->hidden, model_pass_hidden(lane->pass), (size_t)c->hidden * sizeof(float), n_rows,
                        lane->n_rows_max);
    if (r == 0 && e->routing)
        r = keep_layers(e, e->routing, model_pass_routing(lane->pass), (size_t)c->top_k * sizeof(int32_t), n_rows,
                        lane->n_rows_max);
    e->pos += n_rows;
    return r;
}

/* The block whose anchor sits at e->pos; leaves the seq as it is. */
static int run_draft(struct evaluation *e) {
    int B = e->probe->info->block_size, rows[BLOCK_ROWS_MAX], r;

    rows[0] = e->ids->id[e->pos];
    for (int i = 1; i < B; i++)
        rows[i] = e->probe->info->draft.mask_id;
    r = probe_feed(e->probe, e->draft.pass, &e->draft.input, 0, rows, e->pos, B, 0, true);
    return r != 0 ? r : keep_logits(e, &e->draft_logits, &e->draft, B);
}

/* Rows of the next run: the split's, cut at the next anchor and at the end. */
static int next_rows(const struct evaluation *e, int split_idx, int next_anchor) {
    const struct probe_options *o = e->probe->options;
    int n = split_idx < o->n_splits ? o->splits[split_idx] : e->prefill.n_rows_max;

    if (o->verify_rows > 0 && e->pos > 0)
        n = o->verify_rows;
    n = min_int(n, e->ids->n - e->pos);
    return next_anchor > e->pos ? min_int(n, next_anchor - e->pos) : n;
}

static int run_all(struct evaluation *e) {
    const struct probe_options *o = e->probe->options;
    int anchor = 0, r = 0;

    for (int split = 0; r == 0; split++) {
        int next_anchor = anchor < o->n_anchors ? o->anchors[anchor] : -1;

        if (next_anchor == e->pos) {
            r = run_draft(e);
            anchor++;
            split--;
            continue;
        }
        if (e->pos == e->ids->n)
            break;
        r = run_rows(e, o->verify_rows > 0 && e->pos > 0 ? &e->verify : &e->prefill, next_rows(e, split, next_anchor));
    }
    return r;
}

static int check_request(const struct probe *probe, const struct ids *ids, struct report *report) {
    const struct probe_options *o = probe->options;

    if (o->routing_path && probe->info->target.n_experts == 0)
        return report_error(report, -EINVAL, "--routing: %s has no experts", o->model);
    if (o->n_anchors > 0 && probe->info->draft.n_layers == 0)
        return report_error(report, -EINVAL, "--anchors: no drafter is loaded; give --draft DIR");
    for (int i = 0; i < o->n_anchors; i++)
        if (o->anchors[i] < 1 || o->anchors[i] >= ids->n || (i > 0 && o->anchors[i] <= o->anchors[i - 1]))
            return report_error(report, -EINVAL, "--anchors: %d: anchors are ascending positions in [1, %d)",
                                o->anchors[i], ids->n);
    return 0;
}

static int open_outputs(struct evaluation *e, struct report *report) {
    const struct probe_options *o = e->probe->options;
    const struct qwen_config *c = &e->probe->info->target;
    size_t T = (size_t)e->ids->n, L = (size_t)c->n_layers;
    int B = e->probe->info->block_size, r = 0;

    if (o->logits_path)
        r = npy_open(&e->logits, o->logits_path, "<f4", (long[]){e->ids->n, c->vocab}, 2);
    if (r == 0 && o->draft_logits_path)
        r = npy_open(&e->draft_logits, o->draft_logits_path, "<f4", (long[]){o->n_anchors, B, c->vocab}, 3);
    if (r != 0)
        return report_error(report, r, "%s: cannot be written: %s",
                            e->draft_logits.path ? e->draft_logits.path : e->logits.path, strerror(-r));
    e->row_buffer = malloc((size_t)max_int(e->prefill.n_rows_max, BLOCK_ROWS_MAX) * (size_t)c->vocab * sizeof(float));
    e->hidden = o->hidden_path ? malloc(L * T * (size_t)c->hidden * sizeof(float)) : NULL;
    e->routing = o->routing_path ? malloc(L * T * (size_t)c->top_k * sizeof(int32_t)) : NULL;
    if (!e->row_buffer || (o->hidden_path && !e->hidden) || (o->routing_path && !e->routing))
        return report_error(report, -ENOMEM, "out of memory for the results of %d tokens", e->ids->n);
    return 0;
}

static int write_whole(const char *path, const char *type, const long *shape, const void *data, size_t bytes,
                       struct report *report) {
    struct npy npy;
    int r = npy_open(&npy, path, type, shape, 3);

    if (r == 0) {
        r = npy_write(&npy, data, bytes);
        if (npy_close(&npy) != 0)
            r = -EIO;
    }
    return r == 0 ? 0 : report_error(report, r, "%s: cannot be written: %s", path, strerror(-r));
}

static int write_layers(const struct evaluation *e, struct report *report) {
    const struct probe_options *o = e->probe->options;
    const struct qwen_config *c = &e->probe->info->target;
    size_t n = (size_t)c->n_layers * (size_t)e->ids->n;
    int r = 0;

    if (e->hidden)
        r = write_whole(o->hidden_path, "<f4", (long[]){c->n_layers, e->ids->n, c->hidden}, e->hidden,
                        n * (size_t)c->hidden * sizeof(float), report);
    if (r == 0 && e->routing)
        r = write_whole(o->routing_path, "<i4", (long[]){c->n_layers, e->ids->n, c->top_k}, e->routing,
                        n * (size_t)c->top_k * sizeof(int32_t), report);
    return r;
}

int probe_evaluate(struct probe *probe, const struct ids *ids, struct report *report) {
    const struct probe_options *o = probe->options;
    struct evaluation e = {.probe = probe, .ids = ids};
    struct npy *files[] = {&e.logits, &e.draft_logits};
    int rows = probe_chunk_rows_max(o, ids->n), r;
    struct seq_ctl ctl = space_ctl(1 << 30, ids->n + BLOCK_ROWS_MAX, NULL, 0);

    r = check_request(probe, ids, report);
    if (r != 0)
        return r;
    r = lane_open(&e, &e.prefill, PASS_PREFILL, rows);
    if (r == 0 && o->verify_rows > 0)
        r = lane_open(&e, &e.verify, PASS_RERUN, o->verify_rows);
    if (r == 0 && o->n_anchors > 0)
        r = lane_open(&e, &e.draft, PASS_DRAFT, probe->info->block_size);
    if (r != 0)
        report_error(report, r, "%s: a pass of %d rows cannot be made: %s", o->model, rows, strerror(-r));
    if (r == 0)
        r = open_outputs(&e, report);
    if (r == 0) {
        r = space_admit(&probe->space, 0, &ctl);
        if (r == 0)
            r = run_all(&e);
        if (r != 0)
            report_error(report, r, "%s: the run failed at position %d: %s", o->model, e.pos, strerror(-r));
    }
    if (r == 0)
        r = write_layers(&e, report);
    for (int i = 0; i < 2; i++) /* also after a failed run: a full disk is told by the name of the file */
        if (npy_close(files[i]) != 0)
            r = report_error(report, -EIO, "%s: could not be written whole", files[i]->path);
    lane_close(&e, &e.prefill);
    lane_close(&e, &e.verify);
    lane_close(&e, &e.draft);
    free(e.row_buffer);
    free(e.hidden);
    free(e.routing);
    return r;
}
