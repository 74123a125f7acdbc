/* generate: greedy generation for a list of prompts, as the daemon's cycle does it, blocking. */
#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "probe.h"

struct generator {
    struct probe *probe;
    struct model_pass *prefill, *cycle;
    struct model_batch input;
    int32_t *list; /* MEM_HOST, [1 + n_slots] */
    size_t list_bytes;
    uint64_t n_steps_seen;
};

static double now_s(void) {
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

void generation_free(struct generation *g) {
    free(g->out.id);
    free(g->steps);
    *g = (struct generation){0};
}

static int generator_open(struct generator *g, struct probe *probe) {
    int n_slots = probe->space.n_slots, r;
    struct model_pass_options prefill = {
        .kind = PASS_PREFILL, .n_segs_max = 1, .n_rows_max = PROBE_CHUNK_ROWS, .n_outs_max = 1};
    struct model_pass_options cycle = {.kind = PASS_CYCLE, .n_segs_max = n_slots};
    void *list;

    *g = (struct generator){.probe = probe};
    g->n_steps_seen = *model_ring(probe->model)->n_steps;
    g->list_bytes = (size_t)(n_slots + 1) * sizeof *g->list;
    r = model_pass_new(probe->model, &probe->space.view, &prefill, &g->prefill);
    if (r == 0)
        r = model_pass_new(probe->model, &probe->space.view, &cycle, &g->cycle);
    if (r == 0)
        r = model_batch_new(probe->model, MEM_HOST, 1, PROBE_CHUNK_ROWS, 1, &g->input);
    if (r == 0)
        r = probe->backend->mem_alloc(probe->device, MEM_HOST, g->list_bytes, &list);
    if (r == 0)
        g->list = list;
    return r;
}

static void generator_close(struct generator *g) {
    if (g->list)
        g->probe->backend->mem_free(g->probe->device, MEM_HOST, g->list, g->list_bytes);
    model_batch_free(g->probe->model, &g->input);
    model_pass_free(g->prefill);
    model_pass_free(g->cycle);
}

static int append(struct generation *gen, const struct step_out *out) {
    int *id = realloc(gen->out.id, (size_t)(gen->out.n + out->n_tokens) * sizeof *id + 1);

    if (!id)
        return -ENOMEM;
    gen->out.id = id;
    for (int i = 0; i < out->n_tokens; i++)
        id[gen->out.n++] = out->tokens[i];
    return 0;
}

static int append_step(struct generation *gen, const struct step_out *out) {
    struct generation_step *steps = realloc(gen->steps, (size_t)(gen->n_steps + 1) * sizeof *steps);
    struct generation_step *s;

    if (!steps)
        return -ENOMEM;
    gen->steps = steps;
    s = &steps[gen->n_steps++];
    *s = (struct generation_step){
        .position = out->pos, .anchor = out->anchor_before, .n_drafts = out->n_proposed, .accepted = out->n_accepted};
    for (int i = 0; i < out->n_proposed; i++)
        s->drafts[i] = out->drafts[i];
    return 0;
}

/* The one step that is new in the ring. */
static const struct step_out *take_step(struct generator *g, int *ret_n) {
    const struct step_ring *ring = model_ring(g->probe->model);
    uint64_t step = g->n_steps_seen++;

    *ret_n = ring->n_segs[step % (uint64_t)ring->n_steps_max];
    return ring->out + (step % (uint64_t)ring->n_steps_max) * (uint64_t)ring->n_segs_max;
}

static int prefill(struct generator *g, int slot, const struct ids *prompt, struct generation *gen, bool *ret_done) {
    const struct probe_options *o = g->probe->options;
    const struct model_info *info = g->probe->info;
    struct seq_ctl ctl =
        space_ctl(o->n_generate, g->probe->space.n_pages * PAGE_TOKENS, info->stop, o->ignore_eos ? 0 : info->n_stop);
    const struct step_out *out = NULL;
    int n_out = 0, r;

    r = space_admit(&g->probe->space, slot, &ctl);
    for (int pos = 0; r == 0 && pos < prompt->n;) {
        int n = min_int(PROBE_CHUNK_ROWS, prompt->n - pos);
        int flags = SEG_PREFILL | (pos + n == prompt->n ? SEG_SAMPLE : 0);

        r = probe_feed(g->probe, g->prefill, &g->input, slot, prompt->id + pos, pos, n, flags, false);
        out = take_step(g, &n_out);
        pos += n;
    }
    *ret_done = true;
    if (r != 0)
        return r;
    assert(out); /* a prompt has tokens */
    *ret_done = out->done != FINISH_NONE;
    return out->done == FINISH_NONFINITE ? -EDOM : append(gen, out);
}

static int run_cycle(struct generator *g, struct generation *group, bool *done, int n) {
    const struct step_out *out;
    int n_out, r;

    g->list[0] = 0;
    for (int slot = 0; slot < n; slot++)
        if (!done[slot])
            g->list[++g->list[0]] = slot;
    r = model_pass_run_cycle(g->cycle, g->probe->stream, g->list, NULL);
    if (r == 0)
        r = backend_stream_wait(g->probe->backend, g->probe->stream);
    if (r != 0)
        return r;
    out = take_step(g, &n_out);
    for (int i = 0; r == 0 && i < n_out; i++) {
        r = append(&group[out[i].slot], &out[i]);
        if (r == 0)
            r = append_step(&group[out[i].slot], &out[i]);
        if (r == 0 && out[i].done == FINISH_NONFINITE)
            r = -EDOM;
        done[out[i].slot] = out[i].done != FINISH_NONE;
    }
    return r;
}

/* n <= n_slots prompts side by side. */
static int run_group(struct generator *g, const struct ids *prompts, int n, struct generation *group) {
    bool done[PROBE_SLOTS_MAX] = {false};
    double start;
    int n_live = 0, r = 0;

    for (int slot = 0; r == 0 && slot < n; slot++)
        r = prefill(g, slot, &prompts[slot], &group[slot], &done[slot]);
    start = now_s();
    do {
        n_live = 0;
        for (int slot = 0; slot < n; slot++)
            n_live += !done[slot];
        if (r == 0 && n_live > 0)
            r = run_cycle(g, group, done, n);
    } while (r == 0 && n_live > 0);
    for (int slot = 0; slot < n; slot++)
        group[slot].decode_s = now_s() - start;
    return r;
}

int probe_generate(struct probe *probe, const struct ids *prompts, int n, struct generation *ret,
                   struct report *report) {
    int n_slots = probe->space.n_slots, r;
    struct generator g;

    memset(ret, 0, (size_t)n * sizeof *ret);
    r = generator_open(&g, probe);
    for (int at = 0; r == 0 && at < n; at += n_slots)
        r = run_group(&g, prompts + at, min_int(n_slots, n - at), ret + at);
    generator_close(&g);
    if (r == -EDOM)
        report_error(report, r, "%s: logits are not finite; the weights or a kernel are broken", probe->options->model);
    else if (r != 0)
        report_error(report, r, "%s: generation failed: %s", probe->options->model, strerror(-r));
    return r;
}
