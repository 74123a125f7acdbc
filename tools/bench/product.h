/* product: the op linear over copies of one random matrix, so many that none is in a cache when its turn comes again. */
#pragma once
#include "rig.h"

enum { PRODUCT_COPIES_MAX = 128 };

struct product {
    struct rig *rig;
    int n, k, rows_max, n_copies;
    enum linear_epilogue epilogue;
    struct weight *weights[PRODUCT_COPIES_MAX];
    int32_t *words, *host_words; /* of the batch, and where they are written */
    void *x, *y;
    size_t x_bytes, y_bytes;
};

/* Copies for `bytes` bytes at least. 0 or negative errno; then it can be closed all the same. */
int product_open(struct product *product, struct rig *rig, int n, int k, enum linear_epilogue epilogue, int rows_max,
                 size_t bytes);
void product_close(struct product *product);

/* Seconds of one product of n_rows rows, the median over runs through n_copies of the copies. */
int product_time(struct product *product, int n_rows, int n_copies, double *ret_seconds);
