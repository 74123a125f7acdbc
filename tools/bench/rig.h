/* rig: one opened device on which the cases of the group cuda are measured, by what its table offers: on a GPU, or small on
 * the CPU. */
#pragma once
#include "backend.h"
#include "bench.h"
#include "figures.h"

enum { RIG_REPEATS_MAX = 1000, RIG_LIST_MAX = 8 };

/* How much is measured: a CPU is to be done in seconds. */
struct rig_scale {
    size_t read_bytes;         /* streamed through the device to find its rate: far beyond any cache */
    int read_n, read_k;        /* the matrices that they make up */
    int matrix_rows, matrix_n; /* [rows, n] times [n, n] */
    size_t link_bytes;         /* of one copy */
    size_t matrix_bytes;       /* of the copies of one matrix at least */
    int region_spans;          /* of the ring through which pages are streamed: as a daemon has on such a device */
    int chunk, prompt;         /* tokens of a prefill chunk; of a prompt that is prefilled in chunks */
};

struct rig_shape {
    const char *name;
    const char *target, *draft; /* folders with a config.json; draft NULL: none was published */
};

struct rig {
    const struct bench_options *options;
    const struct backend *backend;
    struct device *device;
    struct stream *compute, *load, *store;
    struct rig_scale scale;
    struct figures figures;
    int n_contexts, contexts[RIG_LIST_MAX]; /* ascending */
    int n_batches, batches[RIG_LIST_MAX];
};

int rig_open(struct rig *rig, const struct bench_options *options); /* 0, or negative errno after a line on stderr */
void rig_close(struct rig *rig);
bool rig_is_gpu(const struct rig *rig);

/* Seconds of one run on the compute stream: the median of n_repeats samples of a few runs in a row, behind one to warm up. */
int rig_time(struct rig *rig, struct program *program, int n_repeats, double *ret_seconds);
