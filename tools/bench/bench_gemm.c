/* bench_gemm: the matrix op of the CPU backend at the layer shapes of Qwen3.5-0.8B. Ceilings, measured in the same run:
 * a plain read loop over a large buffer for M = 1, a loop of multiply-adds on registers for M = 256. Each shape has enough
 * copies of its weight that none is still in cache when its turn comes again. */
#include "bench.h"

#include "backend.h"
#include "ceiling.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    STREAM_BYTES = 256 << 20, /* weights per shape at least */
    ROWS_MAX = 256,
    COPIES_MAX = 256,
    REPEATS_MAX = 1000,
};

/* ---- one device, one shape ---------------------------------------------------------------------------------------- */

struct shape {
    const char *name;
    int n, k;
    enum linear_epilogue epilogue;
    bool has_norm;
};

static const struct shape shapes[] = {
    {"in_proj", 8192, 1024, LINEAR_STORE, true},       {"out_proj", 1024, 2048, LINEAR_ADD, false},
    {"gate_up", 7168, 1024, LINEAR_SWIGLU, true},      {"down", 1024, 3584, LINEAR_ADD, false},
    {"lm_head", 248320, 1024, LINEAR_STORE_F32, true},
};

struct bench {
    const struct backend *backend;
    struct device *device;
    struct stream *stream;
    struct batch batch;
    float *x, *y, *norm;
    struct weight *weights[COPIES_MAX];
    int n_weights;
};

enum { BATCH_INTS = 16 };

/* The same data in every copy: only where it lies matters. */
static int pack_copies(struct bench *bench, const struct shape *shape) {
    size_t n_values = (size_t)shape->n * (size_t)shape->k, bytes = n_values * 2;
    int n_copies = (int)min_int(COPIES_MAX, (int)div_ceil(STREAM_BYTES, bytes)), r = 0;
    uint16_t *data = malloc(bytes);
    bool is_pair = shape->epilogue == LINEAR_SWIGLU;
    int n_rows = is_pair ? shape->n / 2 : shape->n;
    struct weight_part parts[2];
    struct weight_desc desc = {is_pair ? WEIGHT_GATE_UP : WEIGHT_ROWS, shape->k, 1, is_pair ? 2 : 1, parts};

    if (data == NULL)
        return -ENOMEM;
    for (size_t i = 0; i < n_values; i++)
        data[i] = (uint16_t)(0x3c00 + (i * 2654435761u >> 16) % 256 + (i % 2) * 0x8000);
    for (int i = 0; i < desc.n_parts; i++)
        parts[i] = (struct weight_part){.data = data + (size_t)i * (size_t)n_rows * (size_t)shape->k,
                                        .dtype = DTYPE_BF16,
                                        .n_rows = n_rows,
                                        .row_bytes = (size_t)shape->k * 2};
    for (bench->n_weights = 0; r == 0 && bench->n_weights < n_copies; bench->n_weights += r == 0)
        r = bench->backend->weight_pack(bench->device, &desc, &bench->weights[bench->n_weights]);
    free(data);
    return r;
}

static int record(struct bench *bench, const struct shape *shape, struct program **ret_program) {
    const struct backend *backend = bench->backend;
    struct program *program;
    int n_out = shape->epilogue == LINEAR_SWIGLU ? shape->n / 2 : shape->n;
    int r = backend->program_begin(bench->device, &program);

    for (int i = 0; r == 0 && i < bench->n_weights; i++)
        r = backend->linear(program, &(struct linear_args){
                                         .batch = &bench->batch,
                                         .x = bench->x,
                                         .x_stride = shape->k,
                                         .norm = shape->has_norm ? bench->norm : NULL,
                                         .eps = 1e-6f,
                                         .n_outs = 1,
                                         .out = {{bench->weights[i], NULL, shape->epilogue, bench->y, n_out}},
                                     });
    if (r == 0)
        r = backend->program_end(program);
    *ret_program = program;
    return r;
}

/* Seconds per op. */
static double time_rows(struct bench *bench, struct program *program, int n_rows) {
    double t;

    *bench->batch.n_rows = n_rows;
    t = bench_now();
    bench->backend->program_run(bench->stream, program);
    backend_stream_wait(bench->backend, bench->stream);
    return (bench_now() - t) / bench->n_weights;
}

static void print_flops(double flops, double seconds, double peak) {
    printf(" %7.1f GFLOP/s", flops / seconds * 1e-9);
    if (peak > 0)
        printf(" %4.2f of %5.1f", flops / seconds * 1e-9 / peak, peak);
}

static int bench_shape(struct bench *bench, const struct shape *shape, const struct bench_options *options,
                       struct ceiling_read *read_loop, const char *isa) {
    static double read_rate[REPEATS_MAX], one_s[REPEATS_MAX], block_s[REPEATS_MAX], block_peak[REPEATS_MAX];
    static double many_s[REPEATS_MAX], many_peak[REPEATS_MAX];
    double bytes = (double)shape->n * shape->k * 2, read, one, block;
    int n_threads = bench->backend->caps(bench->device)->n_threads, n = options->n_repeats;
    struct program *program = NULL;
    int r;

    memset(bench->y, 0, (size_t)ROWS_MAX * 248320 * sizeof *bench->y);
    r = pack_copies(bench, shape);
    if (r == 0)
        r = record(bench, shape, &program);
    for (int i = 0; r == 0 && i < n; i++) { /* side by side, so that all see the same machine */
        read_rate[i] = ceiling_read_rate(read_loop, n_threads);
        one_s[i] = time_rows(bench, program, 1);
        block_s[i] = time_rows(bench, program, 16);
        block_peak[i] = ceiling_gflops(isa, n_threads);
    }
    while (bench->n_weights > 1 && r == 0) /* arithmetic decides here: one copy is enough */
        bench->backend->weight_free(bench->device, bench->weights[--bench->n_weights]);
    bench->backend->program_free(program);
    program = NULL;
    if (r == 0)
        r = record(bench, shape, &program);
    for (int i = 0; r == 0 && i < n; i++) {
        many_s[i] = time_rows(bench, program, ROWS_MAX);
        many_peak[i] = ceiling_gflops(isa, n_threads);
        if (shape->n > 100000 && i >= 2)
            n = i + 1; /* a second each */
    }
    bench->backend->program_free(program);
    while (bench->n_weights > 0)
        bench->backend->weight_free(bench->device, bench->weights[--bench->n_weights]);
    if (r < 0)
        return r;

    read = bench_median(read_rate, options->n_repeats);
    one = bench_median(one_s, options->n_repeats);
    block = bench_median(block_s, options->n_repeats);
    printf("%-8s %6d x %-4d | %8.1f us %5.1f GB/s %4.2f of %4.1f | %8.1f us %4.2fx", shape->name, shape->n, shape->k,
           one * 1e6, bytes / one * 1e-9, bytes / one / read, read * 1e-9, block * 1e6, block / one);
    print_flops(bytes * 16, block, bench_median(block_peak, options->n_repeats));
    printf(" |");
    print_flops(bytes * ROWS_MAX, bench_median(many_s, n), bench_median(many_peak, n));
    printf("\n");
    fflush(stdout);
    return 0;
}

static int bench_isa(const char *isa, const struct bench_options *options, struct ceiling_read *read_loop) {
    struct bench bench = {.backend = backend_find("cpu")};
    struct backend_options device_options = {.numeric = NUMERIC_FAST, .n_threads = options->n_threads, .isa = isa};
    static int32_t ints[BATCH_INTS];
    int r = bench.backend->open(&device_options, &bench.device);

    if (r == -ENOTSUP && options->isa == NULL) {
        printf("%s: not on this CPU\n", isa);
        return 0;
    }
    if (r < 0)
        return r;
    ints[0] = 1;
    bench.batch = (struct batch){
        .n_segs_max = 1, .n_rows_max = ROWS_MAX, .n_segs = &ints[0], .n_rows = &ints[1], .n_outs = &ints[2]};
    bench.x = calloc((size_t)ROWS_MAX * 4096, sizeof *bench.x);
    bench.y = calloc((size_t)ROWS_MAX * 248320, sizeof *bench.y);
    bench.norm = calloc(4096, sizeof *bench.norm);
    r = bench.x == NULL || bench.y == NULL || bench.norm == NULL ? -ENOMEM : 0;
    for (int i = 0; r == 0 && i < ROWS_MAX * 4096; i++)
        bench.x[i] = (float)(i * 2654435761u >> 16) / 65536.0f - 0.5f;
    for (int i = 0; r == 0 && i < 4096; i++)
        bench.norm[i] = 1;
    if (r == 0)
        r = bench.backend->stream_open(bench.device, STREAM_COMPUTE, &bench.stream);
    if (r == 0) {
        const struct backend_caps *caps = bench.backend->caps(bench.device);

        printf(
            "%s, %d threads; shares are of a plain read loop and of multiply-adds on registers\n"
            "shape        N x K    | M = 1                               | M = 16                                     "
            "     | M = %d\n",
            caps->kernel_path, caps->n_threads, ROWS_MAX);
        for (size_t i = 0; r == 0 && i < ARRAY_LEN(shapes); i++)
            r = bench_shape(&bench, &shapes[i], options, read_loop, isa);
        bench.backend->stream_close(bench.stream);
    }
    bench.backend->close(bench.device);
    free(bench.x);
    free(bench.y);
    free(bench.norm);
    return r;
}

static int run(const struct bench_options *options) {
    static const char *const isas[] = {"scalar", "avx2", "avx512bf16", "amx"};
    static struct ceiling_read read_loop;
    int r = ceiling_read_open(&read_loop);

    if (r < 0)
        return r;
    if (options->isa != NULL)
        r = bench_isa(options->isa, options, &read_loop);
    for (size_t i = 0; r == 0 && options->isa == NULL && i < ARRAY_LEN(isas); i++)
        r = bench_isa(isas[i], options, &read_loop);
    ceiling_read_close(&read_loop);
    return r;
}

const struct bench_group bench_gemm = {
    .name = "gemm",
    .summary = "matrix op at the layer shapes of Qwen3.5-0.8B: M = 1, 16, 256",
    .run = run,
};
