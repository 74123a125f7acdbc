#include "bare.h"

#include <errno.h>
#include <stdio.h>

#include "bench.h"
#include "space.h"

enum { CHUNK = 512, PROMPT = 128, REPEATS_MAX = 100 };

struct bare {
    const struct backend *backend;
    struct device *device;
    struct stream *stream;
    struct model *model;
    struct space space;
    struct model_pass *prefill, *cycle;
    struct model_batch input;
    int32_t *list;
    int n_seqs, n_repeats;
};

static int open_bare(struct bare *bare, int n_threads) {
    struct backend_options device = {.numeric = NUMERIC_FAST, .n_threads = n_threads};
    struct model_options options = {.target_folder = SHARE "/tiny/target",
                                    .draft_folder = SHARE "/tiny/draft",
                                    .kv_dtype = DTYPE_BF16,
                                    .draft_dtype = DTYPE_BF16,
                                    .n_slots = bare->n_seqs,
                                    .n_segs_max = bare->n_seqs,
                                    .n_rows_max = CHUNK,
                                    .n_outs_max = bare->n_seqs,
                                    .n_steps_max = 2};
    struct model_pass_options prefill = {.kind = PASS_PREFILL, .n_segs_max = 1, .n_rows_max = CHUNK, .n_outs_max = 1};
    struct model_pass_options cycle = {.kind = PASS_CYCLE, .n_segs_max = bare->n_seqs};
    int n_tokens_max = CHUNK + (2 * bare->n_repeats + 2) * BLOCK_ROWS_MAX;
    struct report report = {0};
    void *list;
    int r;

    bare->backend = backend_find("cpu");
    r = bare->backend->open(&device, &bare->device);
    if (r == 0)
        r = bare->backend->stream_open(bare->device, STREAM_COMPUTE, &bare->stream);
    if (r == 0 && model_open(bare->backend, bare->device, &options, &bare->model, &report) != 0) {
        fprintf(stderr, "spillway-bench: %s\n", report.line);
        r = -EINVAL;
    }
    if (r == 0)
        r = space_open(&bare->space, bare->backend, bare->device, bare->stream, bare->model, bare->n_seqs,
                       n_tokens_max);
    if (r == 0)
        r = model_pass_new(bare->model, &bare->space.view, &prefill, &bare->prefill);
    if (r == 0)
        r = model_batch_new(bare->model, MEM_HOST, 1, CHUNK, 1, &bare->input);
    if (r == 0)
        r = model_pass_new(bare->model, &bare->space.view, &cycle, &bare->cycle);
    if (r == 0)
        r = bare->backend->mem_alloc(bare->device, MEM_HOST, (BARE_SEQS_MAX + 1) * sizeof(int32_t), &list);
    if (r == 0)
        bare->list = list;
    return r;
}

static void close_bare(struct bare *bare) {
    if (bare->list)
        bare->backend->mem_free(bare->device, MEM_HOST, bare->list, (BARE_SEQS_MAX + 1) * sizeof(int32_t));
    if (bare->model)
        model_batch_free(bare->model, &bare->input);
    model_pass_free(bare->prefill);
    model_pass_free(bare->cycle);
    space_close(&bare->space);
    model_close(bare->model);
    if (bare->stream)
        bare->backend->stream_close(bare->stream);
    if (bare->device)
        bare->backend->close(bare->device);
}

/* Seconds of the first n tokens of a made-up prompt in a fresh seq, which then has its first token. */
static int feed(struct bare *bare, int slot, int n, bool speculate, double *ret_seconds) {
    struct seq_ctl ctl = space_ctl(1 << 30, 1 << 30, NULL, 0);
    int ids[CHUNK], r;
    double start;

    ctl.speculate = speculate;
    r = space_admit(&bare->space, slot, &ctl);
    for (int i = 0; i < n; i++)
        ids[i] = 300 + (slot * 31 + i) * 37 % 2500;
    space_fill(&bare->input, slot, ids, 0, n, SEG_PREFILL | SEG_SAMPLE, false);
    start = bench_now();
    if (r == 0)
        r = model_pass_run(bare->prefill, bare->stream, &bare->input, NULL, NULL);
    if (r == 0)
        r = backend_stream_wait(bare->backend, bare->stream);
    *ret_seconds = bench_now() - start;
    return r;
}

static int time_prompts(struct bare *bare, double *ret_seconds) {
    double samples[REPEATS_MAX];
    int r = 0;

    for (int i = 0; r == 0 && i < bare->n_repeats; i++)
        r = feed(bare, 0, CHUNK, true, &samples[i]);
    *ret_seconds = bench_median(samples, bare->n_repeats) / CHUNK;
    return r;
}

static int time_cycles(struct bare *bare, bool speculate, double *ret_seconds) {
    double samples[REPEATS_MAX], start;
    int r = 0;

    bare->list[0] = bare->n_seqs;
    for (int i = 0; r == 0 && i < bare->n_seqs; i++) {
        bare->list[1 + i] = i;
        r = feed(bare, i, PROMPT, speculate, &start);
    }
    for (int i = 0; r == 0 && i < bare->n_repeats; i++) {
        start = bench_now();
        r = model_pass_run_cycle(bare->cycle, bare->stream, bare->list, NULL);
        if (r == 0)
            r = backend_stream_wait(bare->backend, bare->stream);
        samples[i] = bench_now() - start;
    }
    *ret_seconds = bench_median(samples, bare->n_repeats);
    return r;
}

int bare_measure(int n_seqs, int n_threads, int n_repeats, struct bare_cost *ret_cost) {
    struct bare bare = {.n_seqs = min_int(n_seqs, BARE_SEQS_MAX), .n_repeats = min_int(n_repeats, REPEATS_MAX)};
    int r = open_bare(&bare, n_threads);

    if (r == 0) {
        ret_cost->block_rows = model_info(bare.model)->block_size;
        r = time_prompts(&bare, &ret_cost->prompt_token);
    }
    if (r == 0)
        r = time_cycles(&bare, true, &ret_cost->drafted);
    if (r == 0)
        r = time_cycles(&bare, false, &ret_cost->plain);
    close_bare(&bare);
    return r;
}
