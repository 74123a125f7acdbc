#include "passes.h"

#include <stdio.h>

#include "network.h"

enum { PROMPT_REPEATS_MAX = 3 }; /* a prompt takes seconds */

static int measure_rows(struct network *net, const char *name, const struct network_pass *pass) {
    const struct model_info *info = model_info(net->model);
    bool is_frozen = pass->kind == PASS_RERUN;
    double seconds, n_experts;
    struct need need;
    struct figure figure;
    int r = network_time(net, pass, net->rig->options->n_repeats, &seconds, &n_experts);

    if (r != 0)
        return r;
    need = need_target(info, &(struct need_rows){.n_seqs = 1,
                                                 .n_rows = pass->n_rows,
                                                 .n_outs = pass->n_outs,
                                                 .context = pass->context,
                                                 .is_frozen = is_frozen,
                                                 .n_experts = n_experts});
    figure = (struct figure){.group = "pass",
                             .shape = net->shape->name,
                             .name = name,
                             .context = pass->context,
                             .batch = 1,
                             .seconds = seconds,
                             .bytes = need.bytes,
                             .ops = need.ops};
    figure_add(&figure, "kv_GB", need.kv_bytes * 1e-9);
    if (is_frozen)
        figure_add(&figure, "TB_per_s", need.bytes / seconds * 1e-12);
    else
        figure_add(&figure, "TFLOP_per_s", need.ops / seconds * 1e-12);
    if (info->target.n_experts > 0)
        figure_add(&figure, "experts_per_layer", n_experts);
    figures_put(&net->rig->figures, &figure);
    return 0;
}

static int measure_context(struct network *net, int context) {
    double fill_s;
    char name[64];
    int chunk = net->rig->scale.chunk, r = network_fill(net, context, &fill_s);

    if (r == 0)
        r = measure_rows(net, "one token",
                         &(struct network_pass){.kind = PASS_RERUN,
                                                .context = context,
                                                .n_seqs = 1,
                                                .n_rows = 1,
                                                .n_outs = 1,
                                                .n_runs = NETWORK_AHEAD});
    if (r == 0)
        r = measure_rows(net, "16 rows",
                         &(struct network_pass){.kind = PASS_RERUN,
                                                .context = context,
                                                .n_seqs = 1,
                                                .n_rows = BLOCK_ROWS_MAX,
                                                .n_outs = BLOCK_ROWS_MAX,
                                                .n_runs = NETWORK_AHEAD});
    snprintf(name, sizeof name, "a chunk of %d rows", chunk);
    if (r == 0)
        r = measure_rows(
            net, name,
            &(struct network_pass){
                .kind = PASS_PREFILL, .context = context, .n_seqs = 1, .n_rows = chunk, .n_outs = 0, .n_runs = 1});
    return r;
}

/* A prompt in chunks, nothing before it. Weights are read once a chunk. */
static int measure_prompt(struct network *net) {
    const struct model_info *info = model_info(net->model);
    struct rig *rig = net->rig;
    int n_tokens = rig->scale.prompt, chunk = rig->scale.chunk, r = 0;
    int n_repeats = min_int(PROMPT_REPEATS_MAX, rig->options->n_repeats);
    double samples[PROMPT_REPEATS_MAX];
    struct figure figure = {.group = "pass", .shape = net->shape->name, .batch = 1};
    char name[64];

    for (int i = 0; r == 0 && i < n_repeats; i++)
        r = network_fill(net, n_tokens, &samples[i]);
    if (r != 0)
        return r;
    for (int at = 0; at < n_tokens; at += chunk) {
        struct need need = need_target(
            info, &(struct need_rows){
                      .n_seqs = 1, .n_rows = chunk, .n_outs = 0, .context = at, .n_experts = info->target.n_experts});

        figure.bytes += need.bytes;
        figure.ops += need.ops;
    }
    snprintf(name, sizeof name, "a prompt of %d tokens", n_tokens);
    figure.name = name;
    figure.seconds = bench_median(samples, n_repeats);
    figure_add(&figure, "tokens_per_s", n_tokens / figure.seconds);
    figure_add(&figure, "TFLOP_per_s", figure.ops / figure.seconds * 1e-12);
    figures_put(&rig->figures, &figure);
    return 0;
}

int passes_measure(struct rig *rig, const struct rig_shape *shape) {
    int context_max = rig->contexts[rig->n_contexts - 1];
    struct network_options options = {
        .shape = shape,
        .n_seqs = 1,
        .n_tokens_max =
            max_int(context_max + max_int(rig->scale.chunk, NETWORK_AHEAD * BLOCK_ROWS_MAX), rig->scale.prompt)};
    struct network net;
    int r = network_open(&net, rig, &options);

    for (int i = 0; r == 0 && i < rig->n_contexts; i++)
        r = measure_context(&net, rig->contexts[i]);
    if (r == 0)
        r = measure_prompt(&net);
    network_close(&net);
    return r;
}
