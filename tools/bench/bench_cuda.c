/* bench_cuda: the CUDA backend: single matrices and whole passes with random weights at the shapes of Qwen3.5. Decode is
 * held against the rate at which the card reads its memory, prefill against its matrix rate; both were measured on one
 * H200 and are named in the output. Copies of a matrix are many enough that none is in cache when its turn comes again. */
#include "bench.h"

#include "space.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    STREAM_BYTES = 1 << 30, /* weights per shape at least */
    ROWS_MAX = 2048,
    K_MAX = 17408,
    N_MAX = 248320,
    COPIES_MAX = 128,
    REPEATS_MAX = 1000,
    RUNS = 4, /* programs in a row per sample */
    CONTEXT = 1024,
    CHUNK = 2048,
};
#define READ_RATE 4.55e12
#define MATRIX_RATE 790e12

struct bench {
    const struct backend *backend;
    struct device *device;
    struct stream *stream;
};

static int open_bench(struct bench *bench) {
    int r;

    bench->backend = backend_find("cuda");
    r = bench->backend->open(&(struct backend_options){0}, &bench->device);
    if (r == 0)
        r = bench->backend->stream_open(bench->device, STREAM_COMPUTE, &bench->stream);
    return r;
}

static void close_bench(struct bench *bench) {
    if (bench->stream)
        bench->backend->stream_close(bench->stream);
    if (bench->device)
        bench->backend->close(bench->device);
}

/* ---- matrices ----------------------------------------------------------------------------------------------------- */

struct shape {
    const char *name;
    int n, k;
    enum linear_epilogue epilogue;
};
static const struct shape shapes[] = {
    {"27B gate_up", 34816, 5120, LINEAR_SWIGLU},  {"27B down", 5120, 17408, LINEAR_ADD},
    {"27B gdn_in", 16384, 5120, LINEAR_STORE},    {"27B out", 5120, 6144, LINEAR_ADD},
    {"9B gate_up", 24576, 4096, LINEAR_SWIGLU},   {"9B down", 4096, 12288, LINEAR_ADD},
    {"4B gate_up", 18432, 2560, LINEAR_SWIGLU},   {"4B down", 2560, 9216, LINEAR_ADD},
    {"4B gdn_in", 12288, 2560, LINEAR_STORE},     {"4B out", 2560, 4096, LINEAR_ADD},
    {"head 27B", 248320, 5120, LINEAR_STORE_F32},
};
static const int row_counts[] = {1, 16, 32, 512, 2048};

struct matrices {
    struct weight *weights[COPIES_MAX];
    int n;
    int32_t *words, *host_words; /* the batch, and where it is written */
    void *x, *y;
};

static int pack_copies(struct bench *bench, const struct shape *shape, struct matrices *m) {
    size_t n_values = (size_t)shape->n * (size_t)shape->k;
    int n_copies = min_int(COPIES_MAX, (int)div_ceil(STREAM_BYTES, n_values * 2)), r = 0;
    bool is_pair = shape->epilogue == LINEAR_SWIGLU;
    uint16_t *data = malloc(n_values * 2);
    struct weight_part parts[2];
    struct weight_desc desc = {is_pair ? WEIGHT_GATE_UP : WEIGHT_ROWS, shape->k, 1, is_pair ? 2 : 1, parts};
    uint32_t state = 1;

    if (data == NULL)
        return -ENOMEM;
    for (size_t i = 0; i < n_values; i++) {
        state = state * 1664525u + 1013904223u;
        data[i] = bf16_from_f32((float)(int32_t)state * 0x1p-36f);
    }
    for (int i = 0; i < desc.n_parts; i++)
        parts[i] = (struct weight_part){.data = data + (size_t)i * (n_values / 2),
                                        .dtype = DTYPE_BF16,
                                        .n_rows = shape->n / desc.n_parts,
                                        .row_bytes = (size_t)shape->k * 2};
    for (m->n = 0; r == 0 && m->n < n_copies; m->n += r == 0)
        r = bench->backend->weight_pack(bench->device, &desc, &m->weights[m->n]);
    free(data);
    return r;
}

static int record(struct bench *bench, const struct shape *shape, const struct matrices *m, int n_rows, int n_copies,
                  struct program **ret_program) {
    int n_out = shape->epilogue == LINEAR_SWIGLU ? shape->n / 2 : shape->n;
    struct batch batch = {
        .n_segs_max = 1, .n_rows_max = n_rows, .n_segs = m->words, .n_rows = m->words + 1, .n_outs = m->words + 2};
    int r = bench->backend->program_begin(bench->device, ret_program);

    for (int i = 0; r == 0 && i < n_copies; i++)
        r = bench->backend->linear(*ret_program,
                                   &(struct linear_args){.batch = &batch,
                                                         .x = m->x,
                                                         .x_stride = shape->k,
                                                         .n_outs = 1,
                                                         .out = {{m->weights[i], NULL, shape->epilogue, m->y, n_out}}});
    return r == 0 ? bench->backend->program_end(*ret_program) : r;
}

/* Seconds of one run, the median of n_repeats samples of RUNS in a row. */
static double time_program(struct bench *bench, struct program *program, int n_repeats) {
    static double samples[REPEATS_MAX];

    for (int i = -1; i < n_repeats; i++) {
        double start = bench_now();

        for (int k = 0; k < RUNS; k++)
            bench->backend->program_run(bench->stream, program);
        backend_stream_wait(bench->backend, bench->stream);
        if (i >= 0)
            samples[i] = (bench_now() - start) / RUNS;
    }
    return bench_median(samples, n_repeats);
}

static int bench_shape(struct bench *bench, const struct shape *shape, struct matrices *m, int n_repeats) {
    double bytes = (double)shape->n * shape->k * 2;
    int r = pack_copies(bench, shape, m);

    printf("%-12s %6d x %-5d", shape->name, shape->n, shape->k);
    for (size_t i = 0; r == 0 && i < ARRAY_LEN(row_counts); i++) {
        int n_rows = row_counts[i], n_copies = n_rows > 32 ? min_int(m->n, 2) : m->n;
        struct program *program = NULL;
        double seconds;

        if (n_rows > 32 && shape->n > 100000)
            break;
        m->host_words[0] = 1;
        m->host_words[1] = n_rows;
        r = bench->backend->copy(bench->stream, m->words, m->host_words, 2 * sizeof(int32_t));
        if (r == 0)
            r = record(bench, shape, m, n_rows, n_copies, &program);
        if (r == 0) {
            seconds = time_program(bench, program, n_repeats) / n_copies;
            if (n_rows <= 32)
                printf(" | %7.1f us %5.2f TB/s %4.2f", seconds * 1e6, bytes / seconds * 1e-12,
                       bytes / seconds / READ_RATE);
            else
                printf(" | %7.1f us %5.1f TFLOP/s %4.2f", seconds * 1e6, bytes * n_rows / seconds * 1e-12,
                       bytes * n_rows / seconds / MATRIX_RATE);
        }
        bench->backend->program_free(program);
    }
    printf("\n");
    fflush(stdout);
    while (m->n > 0)
        bench->backend->weight_free(bench->device, m->weights[--m->n]);
    return r;
}

static int bench_matrices(struct bench *bench, int n_repeats) {
    struct matrices m = {0};
    size_t x_bytes = (size_t)ROWS_MAX * K_MAX * 2, y_bytes = (size_t)ROWS_MAX * 34816 * 4;
    void *words = NULL, *host_words = NULL, *host = NULL;
    int r = bench->backend->mem_alloc(bench->device, MEM_DEVICE, 64, &words);

    if (r == 0)
        r = bench->backend->mem_alloc(bench->device, MEM_HOST, 64, &host_words);
    if (r == 0)
        r = bench->backend->mem_alloc(bench->device, MEM_DEVICE, x_bytes, &m.x);
    if (r == 0)
        r = bench->backend->mem_alloc(bench->device, MEM_DEVICE, y_bytes, &m.y);
    if (r == 0)
        r = bench->backend->mem_alloc(bench->device, MEM_HOST, x_bytes, &host);
    if (r == 0) {
        for (size_t i = 0; i < x_bytes / 2; i++)
            ((uint16_t *)host)[i] = bf16_from_f32((float)(int32_t)(i * 2654435761u) * 0x1p-31f);
        r = bench->backend->copy(bench->stream, m.x, host, x_bytes);
    }
    if (r == 0)
        r = backend_stream_wait(bench->backend, bench->stream);
    m.words = words;
    m.host_words = host_words;
    printf("matrices; shares of %.2f TB/s read and of %.0f TFLOP/s\n"
           "%-12s %6s   %-5s | M = 1 | M = 16 | M = 32 | M = 512 | M = 2048\n",
           READ_RATE * 1e-12, MATRIX_RATE * 1e-12, "", "N", "K");
    for (size_t i = 0; r == 0 && i < ARRAY_LEN(shapes); i++)
        r = bench_shape(bench, &shapes[i], &m, n_repeats);
    bench->backend->mem_free(bench->device, MEM_HOST, host, x_bytes);
    bench->backend->mem_free(bench->device, MEM_DEVICE, m.y, y_bytes);
    bench->backend->mem_free(bench->device, MEM_DEVICE, m.x, x_bytes);
    bench->backend->mem_free(bench->device, MEM_HOST, host_words, 64);
    bench->backend->mem_free(bench->device, MEM_DEVICE, words, 64);
    return r;
}

/* ---- passes ------------------------------------------------------------------------------------------------------- */

struct network {
    struct model *model;
    struct space space;
    struct model_pass *prefill, *verify, *one;
    struct model_batch prefill_in, verify_in, one_in;
    int pos;
};

static int open_pass(struct network *net, enum pass_kind kind, int n_rows, int n_outs, struct model_pass **ret_pass,
                     struct model_batch *ret_batch) {
    struct model_pass_options options = {
        .kind = kind, .n_segs_max = 1, .n_rows_max = n_rows, .n_outs_max = n_outs, .all_logits = n_outs == n_rows};
    int r = model_pass_new(net->model, &net->space.view, &options, ret_pass);

    return r == 0 ? model_batch_new(net->model, MEM_HOST, 1, n_rows, n_outs, ret_batch) : r;
}

/* Seconds of a pass over the next n rows. */
static double feed(struct bench *bench, struct network *net, struct model_pass *pass, struct model_batch *in, int n,
                   bool outs) {
    static int ids[CHUNK];
    double start;

    for (int i = 0; i < n; i++)
        ids[i] = 1 + (net->pos + i) * 37 % 3000;
    space_fill(in, 0, ids, net->pos, n, SEG_PREFILL, outs);
    start = bench_now();
    model_pass_run(pass, bench->stream, in, NULL, NULL);
    backend_stream_wait(bench->backend, bench->stream);
    net->pos += n;
    return bench_now() - start;
}

static void time_passes(struct bench *bench, struct network *net, int n) {
    static double one[REPEATS_MAX], block[REPEATS_MAX];
    const struct model_info *info = model_info(net->model);
    double weights = (double)info->weight_bytes, embedding, bytes, one_s, block_s, prefill_s;

    /* An untied embedding is not read, but for a row per token. */
    embedding = info->target.tied_key ? 0 : (double)info->target.vocab * info->target.hidden * 2;
    feed(bench, net, net->prefill, &net->prefill_in, CONTEXT, false);
    feed(bench, net, net->prefill, &net->prefill_in, PAGE_TOKENS / 2, false); /* half of a chunk is open */
    for (int i = -1; i < n; i++) {
        double s = feed(bench, net, net->one, &net->one_in, 1, true);

        if (i >= 0)
            one[i] = s;
    }
    for (int i = -1; i < n; i++) {
        double s = feed(bench, net, net->verify, &net->verify_in, BLOCK_ROWS_MAX, true);

        if (i >= 0)
            block[i] = s;
    }
    prefill_s = feed(bench, net, net->prefill, &net->prefill_in, CHUNK, false);
    /* Weights once, K/V of the context, the state. A commit writes it one time in 64; open rows are a thousandth of this. */
    bytes = weights - embedding + (double)info->groups[KV_TARGET_FULL].page_bytes * ((double)CONTEXT / PAGE_TOKENS) +
            (double)info->state.slot_bytes;
    one_s = bench_median(one, n);
    block_s = bench_median(block, n);
    printf("  one token   %7.2f ms  %6.1f GB at %4.2f TB/s = %4.2f of the read rate\n", one_s * 1e3, bytes * 1e-9,
           bytes / one_s * 1e-12, bytes / one_s / READ_RATE);
    printf("  16 rows     %7.2f ms  = %4.2f of the read rate\n", block_s * 1e3, bytes / block_s / READ_RATE);
    printf("  prefill     %7.1f ms for %d tokens after %d = %5.1f TFLOP/s in matrices, %4.2f of the matrix rate\n",
           prefill_s * 1e3, CHUNK, CONTEXT, (weights - embedding) * CHUNK / prefill_s * 1e-12,
           (weights - embedding) * CHUNK / prefill_s / MATRIX_RATE);
    fflush(stdout);
}

static int bench_network(struct bench *bench, const char *name, int n_repeats) {
    struct model_options options = {.dummy = true,
                                    .kv_dtype = DTYPE_BF16,
                                    .draft_dtype = DTYPE_BF16,
                                    .n_slots = 1,
                                    .n_segs_max = 1,
                                    .n_rows_max = CHUNK,
                                    .n_outs_max = BLOCK_ROWS_MAX,
                                    .n_steps_max = 2};
    struct seq_ctl ctl = space_ctl(1 << 30, 1 << 30, NULL, 0);
    struct report report = {0};
    struct network net = {0};
    double start = bench_now();
    char folder[256];
    int r;

    snprintf(folder, sizeof folder, "%s/%s", SHAPES, name);
    options.target_folder = folder;
    r = model_open(bench->backend, bench->device, &options, &net.model, &report);
    if (r != 0)
        fprintf(stderr, "spillway-bench: %s\n", report.line);
    if (r == 0)
        r = space_open(&net.space, bench->backend, bench->device, bench->stream, net.model, 1,
                       CONTEXT + CHUNK + (BLOCK_ROWS_MAX + 1) * (n_repeats + 1));
    if (r == 0)
        r = open_pass(&net, PASS_PREFILL, CHUNK, 1, &net.prefill, &net.prefill_in);
    if (r == 0)
        r = open_pass(&net, PASS_RERUN, BLOCK_ROWS_MAX, BLOCK_ROWS_MAX, &net.verify, &net.verify_in);
    if (r == 0)
        r = open_pass(&net, PASS_RERUN, 1, 1, &net.one, &net.one_in);
    if (r == 0)
        r = space_admit(&net.space, 0, &ctl);
    if (r == 0) {
        printf("%s, random weights, loaded in %.1f s, context %d\n", name, bench_now() - start, CONTEXT);
        time_passes(bench, &net, n_repeats);
    }
    if (net.model) {
        model_batch_free(net.model, &net.prefill_in);
        model_batch_free(net.model, &net.verify_in);
        model_batch_free(net.model, &net.one_in);
    }
    model_pass_free(net.prefill);
    model_pass_free(net.verify);
    model_pass_free(net.one);
    space_close(&net.space);
    model_close(net.model);
    return r;
}

static int run(const struct bench_options *options) {
    static const char *const names[] = {"qwen3.5-0.8b", "qwen3.5-4b", "qwen3.5-9b", "qwen3.5-27b"};
    struct bench bench = {0};
    bool is_known = options->model_shape == NULL;
    int r;

    for (size_t i = 0; i < ARRAY_LEN(names); i++)
        is_known |= options->model_shape != NULL && strcmp(options->model_shape, names[i]) == 0;
    if (!is_known) {
        fprintf(stderr, "--model-shape %s: not one of those that are measured\n", options->model_shape);
        return -EINVAL;
    }
    r = open_bench(&bench);
    if (r == 0)
        printf("%s\n", bench.backend->caps(bench.device)->kernel_path);
    if (r == 0 && options->model_shape == NULL)
        r = bench_matrices(&bench, options->n_repeats);
    for (size_t i = 0; r == 0 && i < ARRAY_LEN(names); i++)
        if (options->model_shape == NULL || strcmp(options->model_shape, names[i]) == 0)
            r = bench_network(&bench, names[i], options->n_repeats);
    if (r == 0)
        r = bench.backend->status(bench.device);
    close_bench(&bench);
    return r;
}

const struct bench_group bench_cuda = {
    .name = "cuda",
    .summary = "the CUDA backend: matrices, and passes at the shapes of Qwen3.5 0.8B to 27B with random weights",
    .run = run,
};
