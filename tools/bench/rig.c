#include "rig.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { RUNS = 4 }; /* in a row, so that a launch is hidden behind the run before */

static const struct rig_scale gpu_scale = {.read_bytes = (size_t)8 << 30,
                                           .read_n = 65536,
                                           .read_k = 16384,
                                           .matrix_rows = 4096,
                                           .matrix_n = 8192,
                                           .link_bytes = (size_t)256 << 20,
                                           .matrix_bytes = (size_t)1 << 30,
                                           .region_spans = 32,
                                           .chunk = 2048,
                                           .prompt = 8192};
static const struct rig_scale cpu_scale = {.read_bytes = (size_t)256 << 20,
                                           .read_n = 16384,
                                           .read_k = 4096,
                                           .matrix_rows = 256,
                                           .matrix_n = 1024,
                                           .link_bytes = (size_t)32 << 20,
                                           .matrix_bytes = (size_t)64 << 20,
                                           .region_spans = 2,
                                           .chunk = 256,
                                           .prompt = 512};

bool rig_is_gpu(const struct rig *rig) {
    return strcmp(rig->backend->name, "cuda") == 0;
}

/* Positive numbers with commas between them. */
static int parse_list(const char *option, const char *text, int *list, int *ret_n) {
    int n = 0;

    for (const char *at = text;; at++) {
        char *end;
        long value = strtol(at, &end, 10);

        if (end == at || value < 1 || value > 1 << 20 || n == RIG_LIST_MAX || (*end != ',' && *end != '\0')) {
            fprintf(stderr, "spillway-bench: %s %s: not one to %d positive numbers with commas between them\n", option,
                    text, RIG_LIST_MAX);
            return -EINVAL;
        }
        list[n++] = (int)value;
        if (*end == '\0')
            break;
        at = end;
    }
    *ret_n = n;
    return 0;
}

static int compare(const void *a, const void *b) {
    return *(const int *)a - *(const int *)b;
}

static int open_device(struct rig *rig) {
    struct backend_options options = {
        .numeric = NUMERIC_FAST, .n_threads = rig->options->n_threads, .isa = rig->options->isa};
    int r = rig->backend->open(&options, &rig->device);

    if (r != 0) {
        fprintf(stderr, "spillway-bench: no device of the backend %s: %s\n", rig->backend->name, strerror(-r));
        return r;
    }
    r = rig->backend->stream_open(rig->device, STREAM_COMPUTE, &rig->compute);
    if (r == 0)
        r = rig->backend->stream_open(rig->device, STREAM_LOAD, &rig->load);
    if (r == 0)
        r = rig->backend->stream_open(rig->device, STREAM_STORE, &rig->store);
    return r;
}

int rig_open(struct rig *rig, const struct bench_options *options) {
    int r;

    *rig = (struct rig){.options = options, .backend = backend_find(options->backend)};
    if (!rig->backend) {
        fprintf(stderr, "spillway-bench: --backend %s: there are cpu and cuda\n", options->backend);
        return -EINVAL;
    }
    rig->scale = rig_is_gpu(rig) ? gpu_scale : cpu_scale;
    r = parse_list("--context", options->contexts, rig->contexts, &rig->n_contexts);
    if (r == 0)
        r = parse_list("--batch", options->batches, rig->batches, &rig->n_batches);
    if (r != 0)
        return r;
    qsort(rig->contexts, (size_t)rig->n_contexts, sizeof *rig->contexts, compare);
    qsort(rig->batches, (size_t)rig->n_batches, sizeof *rig->batches, compare);
    return open_device(rig);
}

void rig_close(struct rig *rig) {
    if (rig->store)
        rig->backend->stream_close(rig->store);
    if (rig->load)
        rig->backend->stream_close(rig->load);
    if (rig->compute)
        rig->backend->stream_close(rig->compute);
    if (rig->device)
        rig->backend->close(rig->device);
    *rig = (struct rig){0};
}

int rig_time(struct rig *rig, struct program *program, int n_repeats, double *ret_seconds) {
    static double samples[RIG_REPEATS_MAX];
    int r = 0;

    for (int i = -1; r == 0 && i < n_repeats; i++) {
        double start = bench_now();

        for (int k = 0; r == 0 && k < RUNS; k++)
            r = rig->backend->program_run(rig->compute, program);
        if (r == 0)
            r = backend_stream_wait(rig->backend, rig->compute);
        if (i >= 0)
            samples[i] = (bench_now() - start) / RUNS;
    }
    if (r == 0)
        *ret_seconds = bench_median(samples, n_repeats);
    return r;
}
