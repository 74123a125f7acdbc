/* bench_pass: whole passes of the network on the CPU backend: the tiny pair as it is, and Qwen3.5-0.8B shapes with
 * random weights. Decode is held against a plain read loop over as many bytes as the pass must read. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "ceiling.h"
#include "space.h"
#include "tokenizer.h"

enum { CONTEXT = 1024, CHUNK = 512, GENERATE = 128, PROMPT_MAX = 64, REPEATS_MAX = 1000, BLOCK = 16 };

struct bench {
    const struct bench_options *options;
    const struct backend *backend;
    struct device *device;
    struct stream *stream;
    struct model *model;
    struct space space;
    struct model_pass *prefill, *verify, *cycle;
    struct model_batch prefill_in, verify_in;
    int32_t *list;
    int pos;
};

static int open_pass(struct bench *bench, enum pass_kind kind, int n_rows, bool logits, struct model_pass **ret_pass,
                     struct model_batch *ret_batch) {
    struct model_pass_options options = {
        .kind = kind, .n_segs_max = 1, .n_rows_max = n_rows, .n_outs_max = logits ? n_rows : 1, .all_logits = logits};
    int r = model_pass_new(bench->model, &bench->space.view, &options, ret_pass);

    if (r == 0 && ret_batch)
        r = model_batch_new(bench->model, MEM_HOST, 1, n_rows, options.n_outs_max, ret_batch);
    return r;
}

static int open_bench(struct bench *bench, const char *target, const char *draft, bool dummy, const char *isa) {
    struct backend_options device = {.numeric = NUMERIC_FAST, .n_threads = bench->options->n_threads, .isa = isa};
    struct model_options options = {.target_folder = target,
                                    .draft_folder = draft,
                                    .dummy = dummy,
                                    .kv_dtype = DTYPE_BF16,
                                    .draft_dtype = DTYPE_BF16,
                                    .n_slots = 1,
                                    .n_segs_max = 1,
                                    .n_rows_max = CHUNK,
                                    .n_outs_max = BLOCK,
                                    .n_steps_max = 2};
    int n_tokens_max = CONTEXT + BLOCK * (2 * bench->options->n_repeats + 2) + GENERATE, r;
    struct report report = {0};
    void *list;

    bench->backend = backend_find("cpu");
    r = bench->backend->open(&device, &bench->device);
    if (r == 0)
        r = bench->backend->stream_open(bench->device, STREAM_COMPUTE, &bench->stream);
    if (r == 0 && model_open(bench->backend, bench->device, &options, &bench->model, &report) != 0) {
        fprintf(stderr, "spillway-bench: %s\n", report.line);
        r = -EINVAL;
    }
    if (r == 0)
        r = space_open(&bench->space, bench->backend, bench->device, bench->stream, bench->model, 1, n_tokens_max);
    if (r == 0)
        r = open_pass(bench, PASS_PREFILL, CHUNK, false, &bench->prefill, &bench->prefill_in);
    if (r == 0)
        r = open_pass(bench, PASS_RERUN, BLOCK, true, &bench->verify, &bench->verify_in);
    if (r == 0)
        r = open_pass(bench, PASS_CYCLE, 1, false, &bench->cycle, NULL);
    if (r == 0)
        r = bench->backend->mem_alloc(bench->device, MEM_HOST, 2 * sizeof(int32_t), &list);
    if (r == 0)
        bench->list = list;
    return r;
}

static void close_bench(struct bench *bench) {
    if (bench->list)
        bench->backend->mem_free(bench->device, MEM_HOST, bench->list, 2 * sizeof(int32_t));
    if (bench->model) {
        model_batch_free(bench->model, &bench->prefill_in);
        model_batch_free(bench->model, &bench->verify_in);
    }
    model_pass_free(bench->prefill);
    model_pass_free(bench->verify);
    model_pass_free(bench->cycle);
    space_close(&bench->space);
    model_close(bench->model);
    if (bench->stream)
        bench->backend->stream_close(bench->stream);
    if (bench->device)
        bench->backend->close(bench->device);
}

/* Seconds of one pass over n rows at the current position; ids NULL: made-up ones. */
static double feed(struct bench *bench, struct model_pass *pass, struct model_batch *in, const int32_t *ids, int n,
                   bool outs, int flags) {
    int made_up[CHUNK];
    double start;

    for (int i = 0; !ids && i < n; i++)
        made_up[i] = 1 + (bench->pos + i) * 37 % 3000;
    space_fill(in, 0, ids ? ids : made_up, bench->pos, n, SEG_PREFILL | flags, outs);
    start = bench_now();
    model_pass_run(pass, bench->stream, in, NULL, NULL);
    backend_stream_wait(bench->backend, bench->stream);
    bench->pos += n;
    return bench_now() - start;
}

/* Tokens per second of CONTEXT prompt tokens. */
static double prefill(struct bench *bench) {
    double seconds = 0;

    bench->pos = 0;
    for (int at = 0; at < CONTEXT; at += CHUNK)
        seconds += feed(bench, bench->prefill, &bench->prefill_in, NULL, CHUNK, false, 0);
    return CONTEXT / seconds;
}

/* Decode at CONTEXT tokens: one row and sixteen rows, in turn with the read loop. */
static int bench_rows(struct bench *bench, struct ceiling_read *read_loop) {
    static double one[REPEATS_MAX], block[REPEATS_MAX], rate[REPEATS_MAX];
    const struct model_info *info = model_info(bench->model);
    struct seq_ctl ctl = space_ctl(1 << 30, 1 << 30, NULL, 0);
    int n = bench->options->n_repeats, n_threads = bench->backend->caps(bench->device)->n_threads;
    const struct kv_geometry *full = &info->groups[KV_TARGET_FULL];
    /* Weights once, K/V of the context, the state read by the pass, and read and written by the commit. */
    double bytes = (double)info->weight_bytes + (double)full->page_bytes * CONTEXT / PAGE_TOKENS +
                   3 * (double)info->state.slot_bytes;
    double prompt_rate, one_s, read;
    int r = space_admit(&bench->space, 0, &ctl);

    if (r != 0)
        return r;
    prompt_rate = prefill(bench);
    for (int i = 0; i < n; i++) {
        rate[i] = ceiling_read_rate(read_loop, n_threads);
        one[i] = feed(bench, bench->verify, &bench->verify_in, NULL, 1, true, 0);
        block[i] = feed(bench, bench->verify, &bench->verify_in, NULL, BLOCK, true, 0);
    }
    one_s = bench_median(one, n);
    read = bench_median(rate, n);
    printf("  one token   %8.2f ms  %6.1f tokens/s  %5.2f GB read at %5.1f GB/s = %4.2f of the read loop's %5.1f\n",
           one_s * 1e3, 1 / one_s, bytes * 1e-9, bytes / one_s * 1e-9, bytes / one_s / read, read * 1e-9);
    printf("  16 rows     %8.2f ms  = %.2f x one token\n", bench_median(block, n) * 1e3,
           bench_median(block, n) / one_s);
    printf("  prefill     %8.1f tokens/s (%d tokens in chunks of %d)\n", prompt_rate, CONTEXT, CHUNK);
    fflush(stdout);
    return 0;
}

/* Ids of a text with markup, PROMPT_MAX at most. */
static int encode(const char *folder, const char *text, int32_t *ids, int *ret_n) {
    struct tokenizer_ids encoded = {0};
    struct report report = {0};
    struct tokenizer *tokenizer;
    char path[4096];
    int r;

    snprintf(path, sizeof path, "%s/tokenizer.json", folder);
    r = tokenizer_open(path, &tokenizer, &report);
    if (r != 0) {
        fprintf(stderr, "spillway-bench: %s\n", report.line);
        return r;
    }
    r = tokenizer_encode(tokenizer, text, strlen(text), TOKENIZER_MARKUP, &encoded);
    *ret_n = min_int((int)encoded.n, PROMPT_MAX);
    for (int i = 0; r == 0 && i < *ret_n; i++)
        ids[i] = encoded.ids[i];
    tokenizer_ids_deinit(&encoded);
    tokenizer_free(tokenizer);
    return r;
}

/* Real generation with and without the drafter. */
static int bench_generation(struct bench *bench, const char *target, bool speculate) {
    static const char prompt[] = "<|im_start|>user\nCount from 3 to 40.<|im_end|>\n<|im_start|>assistant\n"
                                 "<think>\n\n</think>\n\n";
    struct seq_ctl ctl = space_ctl(GENERATE, 1 << 30, NULL, 0);
    const struct step_ring *ring = model_ring(bench->model);
    const struct step_out *out;
    int32_t ids[PROMPT_MAX];
    int n_steps = 0, n, r;
    double start, seconds;

    ctl.speculate = speculate;
    r = encode(target, prompt, ids, &n);
    if (r == 0)
        r = space_admit(&bench->space, 0, &ctl);
    if (r != 0)
        return r;
    bench->pos = 0;
    feed(bench, bench->prefill, &bench->prefill_in, ids, n, false, SEG_SAMPLE);
    bench->list[0] = 1;
    bench->list[1] = 0;
    start = bench_now();
    do {
        r = model_pass_run_cycle(bench->cycle, bench->stream, bench->list, NULL);
        if (r == 0)
            r = backend_stream_wait(bench->backend, bench->stream);
        out = ring->out + (*ring->n_steps - 1) % (uint64_t)ring->n_steps_max * (uint64_t)ring->n_segs_max;
        n_steps++;
    } while (r == 0 && !out->done);
    seconds = bench_now() - start;
    printf("  generation  %8.1f tokens/s %s, %.2f tokens a pass\n", (GENERATE - 1) / seconds,
           speculate ? "with the drafter" : "without drafter ", (double)(GENERATE - 1) / n_steps);
    fflush(stdout);
    return r;
}

static int bench_pair(const struct bench_options *options, const char *name, const char *target, const char *draft,
                      bool dummy, const char *isa, struct ceiling_read *read_loop) {
    struct bench bench = {.options = options};
    int r = open_bench(&bench, target, draft, dummy, isa);

    if (r == -ENOTSUP && options->isa == NULL) {
        printf("%s, %s: not on this CPU\n", name, isa);
        r = 0;
    } else if (r == 0) {
        const struct backend_caps *caps = bench.backend->caps(bench.device);

        printf("%s, %s, %d threads, context %d\n", name, caps->kernel_path, caps->n_threads, CONTEXT);
        r = bench_rows(&bench, read_loop);
        if (r == 0 && draft)
            r = bench_generation(&bench, target, false);
        if (r == 0 && draft)
            r = bench_generation(&bench, target, true);
    }
    close_bench(&bench);
    return r;
}

static int run(const struct bench_options *options) {
    static const char *const isas[] = {"avx2", "avx512bf16", "amx"};
    static struct ceiling_read read_loop;
    int r = ceiling_read_open(&read_loop);

    for (size_t i = 0; r == 0 && i < ARRAY_LEN(isas); i++) {
        if (options->isa && i > 0)
            break;
        r = bench_pair(options, "tiny pair", SHARE "/tiny/target", SHARE "/tiny/draft", false,
                       options->isa ? options->isa : isas[i], &read_loop);
        if (r == 0)
            r = bench_pair(options, "Qwen3.5-0.8B shapes", SHAPES "/qwen3.5-0.8b", NULL, true,
                           options->isa ? options->isa : isas[i], &read_loop);
    }
    ceiling_read_close(&read_loop);
    return r;
}

const struct bench_group bench_pass = {
    .name = "pass",
    .summary = "whole passes: the tiny pair, and Qwen3.5-0.8B shapes with random weights",
    .run = run,
};
