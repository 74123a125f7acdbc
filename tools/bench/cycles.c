#include "cycles.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>

#include "network.h"

enum { RUNS = 2 }; /* in a row, as many as the daemon has on their way */
static_assert((int)RUNS <= (int)NETWORK_AHEAD, "the ring holds all steps of a sample");

enum { STAND_FEW, STAND_ALL, STAND_N };

static const char *const names[STAND_N] = {"cycle, drafts as they fall", "cycle, every draft stands"};

struct cycle {
    double seconds, accept; /* tokens per seq and cycle */
    double n_experts;
    double row_s; /* to commit one row more of each seq; STAND_ALL */
};

struct run { /* of which a sample is made */
    struct model_pass *pass;
    int32_t *list; /* MEM_HOST: n, slots */
    int context, n_cycles;
    int stop_id; /* or -1 */
};

struct cycles {
    struct cycle cycles[STAND_N][RIG_LIST_MAX][RIG_LIST_MAX]; /* [][context][batch] */
};

/* ---- measuring ------------------------------------------------------------------------------------------------------ */

/* Tokens per seq of the RUNS latest steps. A seq that ended would make them shorter than they are. */
static int mean_accept(const struct network *net, int n_seqs, double *ret_accept) {
    const struct step_ring *ring = model_ring(net->model);
    int n = 0;

    for (uint64_t step = *ring->n_steps - RUNS; step < *ring->n_steps; step++)
        for (int seq = 0; seq < n_seqs; seq++) {
            uint64_t place = step % (uint64_t)ring->n_steps_max;
            const struct step_out *out = &ring->out[place * (uint64_t)ring->n_segs_max + (uint64_t)seq];

            if (ring->n_segs[place] != n_seqs || out->n_tokens < 1 || out->done != FINISH_NONE) {
                fprintf(stderr, "spillway-bench: %s: seq %d of %d ended (%d) in the middle of what was measured\n",
                        net->shape->name, seq, n_seqs, out->done);
                return -EPROTO;
            }
            n += out->n_tokens;
        }
    *ret_accept = (double)n / RUNS / n_seqs;
    return 0;
}

static int time_cycles(struct network *net, const struct run *run, double *ret_seconds) {
    static double samples[RIG_REPEATS_MAX];
    struct rig *rig = net->rig;
    int r = 0;

    for (int i = -1; r == 0 && i < rig->options->n_repeats; i++) {
        double start;

        r = network_place(net, run->context, run->stop_id);
        start = bench_now();
        for (int k = 0; r == 0 && k < run->n_cycles; k++)
            r = model_pass_run_cycle(run->pass, rig->compute, run->list, NULL);
        if (r == 0)
            r = backend_stream_wait(rig->backend, rig->compute);
        samples[max_int(i, 0)] = (bench_now() - start) / run->n_cycles;
    }
    if (r == 0)
        *ret_seconds = bench_median(samples, rig->options->n_repeats);
    return r;
}

/* One id alone may be chosen: all rows are committed, or, if it is the one that ends a seq, the first alone. */
static int time_row(struct network *net, struct run run, int block, double *ret_seconds) {
    double all_s, one_s;
    int r;

    run.n_cycles = 1;
    r = time_cycles(net, &run, &all_s);
    run.stop_id = 0;
    if (r == 0)
        r = time_cycles(net, &run, &one_s);
    if (r == 0) /* below noise it costs nothing */
        *ret_seconds = all_s > one_s ? (all_s - one_s) / (block - 1) : 0;
    return r;
}

static int measure_cycle(struct network *net, int stand, int context, int n_seqs, struct cycle *ret_cycle) {
    const struct backend *backend = net->rig->backend;
    struct model_pass_options options = {.kind = PASS_CYCLE, .n_segs_max = n_seqs, .routing = true};
    size_t list_bytes = (size_t)(n_seqs + 1) * sizeof(int32_t);
    int block = model_info(net->model)->block_size, n_rows = n_seqs * block;
    struct run run = {.context = context, .n_cycles = RUNS, .stop_id = -1};
    void *list = NULL;
    int r = backend->mem_alloc(net->rig->device, MEM_HOST, list_bytes, &list);

    run.list = list;
    if (r == 0)
        r = model_pass_new(net->model, &net->space.view, &options, &run.pass);
    if (r == 0) {
        run.list[0] = n_seqs;
        for (int i = 0; i < n_seqs; i++)
            run.list[1 + i] = i;
        r = time_cycles(net, &run, &ret_cycle->seconds);
    }
    if (r == 0)
        r = network_experts(net, run.pass, n_rows, n_rows, &ret_cycle->n_experts);
    if (r == 0)
        r = mean_accept(net, n_seqs, &ret_cycle->accept);
    if (r == 0 && stand == STAND_ALL)
        r = time_row(net, run, block, &ret_cycle->row_s);
    model_pass_free(run.pass);
    if (list)
        backend->mem_free(net->rig->device, MEM_HOST, list, list_bytes);
    return r;
}

/* ---- figures -------------------------------------------------------------------------------------------------------- */

static struct need need_cycle(const struct model_info *info, int context, int n_seqs, double n_experts) {
    struct need draft = need_draft(info, n_seqs, context);
    struct need verify = need_target(info, &(struct need_rows){.n_seqs = n_seqs,
                                                               .n_rows = info->block_size,
                                                               .n_outs = info->block_size,
                                                               .context = context,
                                                               .is_frozen = true,
                                                               .n_experts = n_experts});

    return (struct need){draft.bytes + verify.bytes, draft.kv_bytes + verify.kv_bytes, draft.ops + verify.ops};
}

static void put_cycle(struct network *net, const char *name, int context, int n_seqs, const struct cycle *cycle) {
    const struct model_info *info = model_info(net->model);
    struct need need = need_cycle(info, context, n_seqs, cycle->n_experts);
    struct figure figure = {.group = "cycle",
                            .shape = net->shape->name,
                            .name = name,
                            .context = context,
                            .batch = n_seqs,
                            .seconds = cycle->seconds,
                            .bytes = need.bytes,
                            .ops = need.ops};

    figure_add(&figure, "kv_GB", need.kv_bytes * 1e-9);
    figure_add(&figure, "tokens_per_cycle", cycle->accept);
    figure_add(&figure, "tokens_per_s", cycle->accept * n_seqs / cycle->seconds);
    if (cycle->row_s > 0)
        figure_add(&figure, "commit_us_per_row", cycle->row_s * 1e6);
    if (info->target.n_experts > 0)
        figure_add(&figure, "experts_per_layer", cycle->n_experts);
    figures_put(&net->rig->figures, &figure);
}

/* Its two passes by themselves; the verify pass commits all its rows. */
static int measure_parts(struct network *net, int context) {
    const struct model_info *info = model_info(net->model);
    int block = info->block_size, n_repeats = net->rig->options->n_repeats, r;
    struct network_pass draft = {
        .kind = PASS_DRAFT, .context = context, .n_seqs = 1, .n_rows = block, .n_outs = block - 1, .n_runs = RUNS};
    struct network_pass verify = draft;
    struct need need = need_draft(info, 1, context);
    struct figure figure = {
        .group = "cycle", .shape = net->shape->name, .name = "draft pass alone", .context = context, .batch = 1};
    double n_experts;

    r = network_time(net, &draft, n_repeats, &figure.seconds, &n_experts);
    if (r != 0)
        return r;
    figure.bytes = need.bytes;
    figure.ops = need.ops;
    figures_put(&net->rig->figures, &figure);
    verify.kind = PASS_RERUN;
    verify.n_outs = block;
    r = network_time(net, &verify, n_repeats, &figure.seconds, &n_experts);
    if (r != 0)
        return r;
    need = need_target(info, &(struct need_rows){.n_seqs = 1,
                                                 .n_rows = block,
                                                 .n_outs = block,
                                                 .context = context,
                                                 .is_frozen = true,
                                                 .n_experts = n_experts});
    figure.name = "verify pass, all rows committed";
    figure.bytes = need.bytes;
    figure.ops = need.ops;
    if (info->target.n_experts > 0)
        figure_add(&figure, "experts_per_layer", n_experts);
    figures_put(&net->rig->figures, &figure);
    return 0;
}

/* The cycle whose drafts stand as they fall, and the other rows' commit. */
static void put_simulated(struct network *net, const struct cycles *all, int context, int batch) {
    const struct cycle *few = &all->cycles[STAND_FEW][context][batch], *many = &all->cycles[STAND_ALL][context][batch];
    double accept = net->rig->options->accept;
    struct cycle cycle = {
        .accept = accept, .seconds = few->seconds + (accept - few->accept) * many->row_s, .n_experts = few->n_experts};
    char name[64];

    snprintf(name, sizeof name, "cycle, simulated %.4g tokens", accept);
    put_cycle(net, name, net->rig->contexts[context], net->rig->batches[batch], &cycle);
}

/* ---- all ------------------------------------------------------------------------------------------------------------ */

static int measure_context(struct network *net, struct cycles *all, int stand, int context) {
    struct rig *rig = net->rig;
    int n_tokens = rig->contexts[context], r;
    double fill_s;

    r = network_fill(net, n_tokens, &fill_s);
    if (r == 0 && stand == STAND_FEW)
        r = measure_parts(net, n_tokens);
    for (int i = 0; r == 0 && i < rig->n_batches; i++) {
        struct cycle *cycle = &all->cycles[stand][context][i];

        r = measure_cycle(net, stand, n_tokens, rig->batches[i], cycle);
        if (r == 0)
            put_cycle(net, names[stand], n_tokens, rig->batches[i], cycle);
        if (r == 0 && stand == STAND_ALL && rig->options->accept > 0)
            put_simulated(net, all, context, i);
    }
    return r;
}

int cycles_measure(struct rig *rig, const struct rig_shape *shape) {
    struct network_options options = {.shape = shape,
                                      .has_draft = true,
                                      .n_seqs = rig->batches[rig->n_batches - 1],
                                      .n_tokens_max =
                                          rig->contexts[rig->n_contexts - 1] + NETWORK_AHEAD * BLOCK_ROWS_MAX};
    struct cycles all = {0};
    int r = 0;

    if (!shape->draft) {
        printf("\ncycle, %s: there is no drafter of this shape\n", shape->name);
        return 0;
    }
    printf(
        "\ncycle, %s: with random weights few drafts stand, or, where one id alone may be chosen, all; then choosing "
        "costs\n"
        "less. The passes are the same; what differs is the commit of states and draft context. No restore points.%s\n",
        shape->name,
        rig->options->accept > 0 ? "\nA simulated number of tokens adds the commit of so many rows to the former."
                                 : "");
    for (int stand = STAND_FEW; r == 0 && stand < STAND_N; stand++) {
        struct network net;

        options.n_valid = stand == STAND_ALL ? 1 : 0;
        r = network_open(&net, rig, &options);
        for (int i = 0; r == 0 && i < rig->n_contexts; i++)
            r = measure_context(&net, &all, stand, i);
        network_close(&net);
    }
    return r;
}
