#include "roof.h"

#include <stdio.h>
#include <string.h>

#include "ceiling.h"
#include "product.h"

/* One H200 (docs/benchmarks/cuda-h200.md): bulk copies of 8 GiB into shared memory, bf16 products of random numbers, pinned
 * copies by copy engine. */
struct roof roof_documented(const char *backend_name) {
    if (strcmp(backend_name, "cuda") == 0)
        return (struct roof){.read = 4.55e12, .matrix = 790e12, .up = 55.5e9, .down = 55.3e9};
    return (struct roof){0};
}

enum { WAYS_MAX = 8 };

struct ways { /* in which it was measured: their lines wait until the roof is known */
    struct figure figures[WAYS_MAX];
    int n;
};

static struct figure *add_way(struct ways *ways, const char *name, double seconds) {
    struct figure *f = &ways->figures[ways->n++];

    *f = (struct figure){.group = "ceilings", .name = name, .seconds = seconds};
    return f;
}

static void raise_to(double *roof, double rate) {
    if (rate > *roof)
        *roof = rate;
}

/* ---- device memory -------------------------------------------------------------------------------------------------- */

static int time_product(struct rig *rig, int n, int k, int n_rows, size_t bytes, double *ret_seconds) {
    struct product product;
    int r = product_open(&product, rig, n, k, LINEAR_STORE, n_rows, bytes);

    if (r == 0)
        r = product_time(&product, n_rows, product.n_copies, ret_seconds);
    product_close(&product);
    return r;
}

static int read_by_product(struct rig *rig, struct roof *roof, struct ways *ways) {
    const struct rig_scale *scale = &rig->scale;
    double bytes = (double)scale->read_n * scale->read_k * 2, seconds;
    int r = time_product(rig, scale->read_n, scale->read_k, 1, scale->read_bytes, &seconds);

    if (r == 0) {
        struct figure *f = add_way(ways, "one row times matrices", seconds);

        f->bytes = bytes;
        figure_add(f, "TB_per_s", bytes / seconds * 1e-12);
        raise_to(&roof->read, bytes / seconds);
    }
    return r;
}

/* Bytes per second of copies from each address to the one beside it, each on its stream, all at the same time. */
struct flow {
    struct stream *stream;
    void *dst;
    const void *src;
};
static int time_flows(struct rig *rig, const struct flow *flows, int n, size_t bytes, double *ret_seconds) {
    static double samples[RIG_REPEATS_MAX];
    int r = 0;

    for (int i = -1; r == 0 && i < rig->options->n_repeats; i++) {
        double start = bench_now();

        for (int k = 0; r == 0 && k < n; k++)
            r = rig->backend->copy(flows[k].stream, flows[k].dst, flows[k].src, bytes);
        for (int k = 0; r == 0 && k < n; k++)
            r = backend_stream_wait(rig->backend, flows[k].stream);
        if (i >= 0)
            samples[i] = bench_now() - start;
    }
    if (r == 0)
        *ret_seconds = bench_median(samples, rig->options->n_repeats);
    return r;
}

static int copy_inside(struct rig *rig, struct roof *roof, struct ways *ways) {
    size_t bytes = rig->scale.read_bytes / 2;
    void *from = NULL, *to = NULL;
    double seconds;
    int r = rig->backend->mem_alloc(rig->device, MEM_DEVICE, bytes, &from);

    if (r == 0)
        r = rig->backend->mem_alloc(rig->device, MEM_DEVICE, bytes, &to);
    if (r == 0)
        r = time_flows(rig, &(struct flow){rig->compute, to, from}, 1, bytes, &seconds);
    if (r == 0) {
        struct figure *f = add_way(ways, "copy inside the device, both ways", seconds);

        f->bytes = 2 * (double)bytes;
        figure_add(f, "TB_per_s", f->bytes / seconds * 1e-12);
        raise_to(&roof->read, f->bytes / seconds);
    }
    if (to)
        rig->backend->mem_free(rig->device, MEM_DEVICE, to, bytes);
    if (from)
        rig->backend->mem_free(rig->device, MEM_DEVICE, from, bytes);
    return r;
}

/* A CPU's memory can be read without any op. */
static int read_by_loop(struct rig *rig, struct roof *roof, struct ways *ways) {
    static double samples[RIG_REPEATS_MAX];
    static struct ceiling_read loop;
    int n = rig->options->n_repeats, r = ceiling_read_open(&loop);
    double rate;

    if (r != 0)
        return r;
    for (int i = 0; i < n; i++)
        samples[i] = ceiling_read_rate(&loop, rig->backend->caps(rig->device)->n_threads);
    rate = bench_median(samples, n);
    add_way(ways, "plain loop over memory", (double)loop.n_words * 8 / rate)->bytes = (double)loop.n_words * 8;
    figure_add(&ways->figures[ways->n - 1], "TB_per_s", rate * 1e-12);
    raise_to(&roof->read, rate);
    ceiling_read_close(&loop);
    return 0;
}

/* ---- products, link ------------------------------------------------------------------------------------------------- */

static int multiply(struct rig *rig, struct roof *roof, struct ways *ways) {
    int n = rig->scale.matrix_n, n_rows = rig->scale.matrix_rows;
    double ops = 2.0 * n * n * n_rows, seconds;
    int r = time_product(rig, n, n, n_rows, 1, &seconds);

    if (r == 0) {
        struct figure *f = add_way(ways, "one large product", seconds);

        f->ops = ops;
        figure_add(f, "TFLOP_per_s", ops / seconds * 1e-12);
        raise_to(&roof->matrix, ops / seconds);
    }
    return r;
}

static int copy_over_link(struct rig *rig, const struct flow *flows, struct roof *roof, struct ways *ways) {
    size_t bytes = rig->scale.link_bytes;
    double up, down, both;
    struct figure *f;
    int r = time_flows(rig, flows, 1, bytes, &up);

    if (r == 0)
        r = time_flows(rig, flows + 1, 1, bytes, &down);
    if (r == 0)
        r = time_flows(rig, flows, 2, bytes, &both);
    if (r != 0)
        return r;
    roof->up = (double)bytes / up;
    roof->down = (double)bytes / down;
    f = add_way(ways, "pinned memory to the device", up);
    f->way = FIGURE_UP;
    f->bytes = (double)bytes;
    figure_add(f, "GB_per_s", roof->up * 1e-9);
    f = add_way(ways, "device to pinned memory", down);
    f->way = FIGURE_DOWN;
    f->bytes = (double)bytes;
    figure_add(f, "GB_per_s", roof->down * 1e-9);
    f = add_way(ways, "both at once, each way", both);
    f->way = FIGURE_UP;
    f->bytes = (double)bytes;
    figure_add(f, "GB_per_s_of_both", 2 * (double)bytes / both * 1e-9);
    return 0;
}

static int measure_link(struct rig *rig, struct roof *roof, struct ways *ways) {
    static const enum mem_kind kinds[] = {MEM_HOST, MEM_DEVICE, MEM_DEVICE, MEM_HOST};
    void *memory[4] = {NULL};
    int r = 0;

    for (int i = 0; r == 0 && i < 4; i++)
        r = rig->backend->mem_alloc(rig->device, kinds[i], rig->scale.link_bytes, &memory[i]);
    if (r == 0)
        r = copy_over_link(rig,
                           (const struct flow[]){{rig->load, memory[1], memory[0]}, {rig->store, memory[3], memory[2]}},
                           roof, ways);
    for (int i = 0; i < 4; i++)
        if (memory[i])
            rig->backend->mem_free(rig->device, kinds[i], memory[i], rig->scale.link_bytes);
    return r;
}

int roof_measure(struct rig *rig) {
    struct roof *roof = &rig->figures.measured;
    struct ways ways = {.n = 0};
    int r = rig_is_gpu(rig) ? 0 : read_by_loop(rig, roof, &ways);

    if (r == 0)
        r = read_by_product(rig, roof, &ways);
    if (r == 0)
        r = copy_inside(rig, roof, &ways);
    if (r == 0)
        r = multiply(rig, roof, &ways);
    if (r == 0)
        r = measure_link(rig, roof, &ways);
    if (r != 0)
        return r;
    rig->figures.documented = roof_documented(rig->backend->name);
    figures_begin(&rig->figures, rig->backend->caps(rig->device)->kernel_path);
    for (int i = 0; i < ways.n; i++)
        figures_put(&rig->figures, &ways.figures[i]);
    return 0;
}
