#include "matrices.h"

#include <stdio.h>

#include "product.h"

enum { ROWS_MAX = 2048, STREAM_ROWS = 64 /* up to so many, weights bound a product */, HEAD_ROWS = 100000 };

struct matrix {
    const char *name;
    int n, k;
    enum linear_epilogue epilogue;
};
static const struct matrix gpu_matrices[] = {
    {"27B gate_up", 34816, 5120, LINEAR_SWIGLU},  {"27B down", 5120, 17408, LINEAR_ADD},
    {"27B gdn_in", 16384, 5120, LINEAR_STORE},    {"27B out", 5120, 6144, LINEAR_ADD},
    {"9B gate_up", 24576, 4096, LINEAR_SWIGLU},   {"9B down", 4096, 12288, LINEAR_ADD},
    {"4B gate_up", 18432, 2560, LINEAR_SWIGLU},   {"4B down", 2560, 9216, LINEAR_ADD},
    {"4B gdn_in", 12288, 2560, LINEAR_STORE},     {"4B out", 2560, 4096, LINEAR_ADD},
    {"27B head", 248320, 5120, LINEAR_STORE_F32},
};
static const struct matrix cpu_matrices[] = {
    {"0.8B gate_up", 7168, 1024, LINEAR_SWIGLU},
    {"0.8B down", 1024, 3584, LINEAR_ADD},
};
static const int row_counts[] = {1, 16, 32, 64, 512, 2048};

static int measure(struct rig *rig, const struct matrix *m) {
    int rows_max = !rig_is_gpu(rig) || m->n > HEAD_ROWS ? STREAM_ROWS : ROWS_MAX, r;
    double elements = (double)m->n * m->k, seconds;
    struct product product;
    char name[64];

    r = product_open(&product, rig, m->n, m->k, m->epilogue, rows_max, rig->scale.matrix_bytes);
    for (size_t i = 0; r == 0 && i < ARRAY_LEN(row_counts) && row_counts[i] <= rows_max; i++) {
        int n_rows = row_counts[i];

        r = product_time(&product, n_rows, n_rows > STREAM_ROWS ? min_int(product.n_copies, 2) : product.n_copies,
                         &seconds);
        if (r != 0)
            break;
        snprintf(name, sizeof name, "%s %d x %d, %d rows", m->name, m->n, m->k, n_rows);
        figures_put(&rig->figures, &(struct figure){.group = "matrices",
                                                    .name = name,
                                                    .seconds = seconds,
                                                    .bytes = elements * 2,
                                                    .ops = elements * 2 * n_rows});
    }
    product_close(&product);
    return r;
}

int matrices_measure(struct rig *rig) {
    const struct matrix *matrices = rig_is_gpu(rig) ? gpu_matrices : cpu_matrices;
    size_t n = rig_is_gpu(rig) ? ARRAY_LEN(gpu_matrices) : ARRAY_LEN(cpu_matrices);
    int r = 0;

    for (size_t i = 0; r == 0 && i < n; i++)
        r = measure(rig, &matrices[i]);
    return r;
}
