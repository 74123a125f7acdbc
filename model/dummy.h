/* dummy: made-up weights. All tensors are views into a few small blocks of pseudo-random numbers of the right magnitudes:
 * rows of a matrix begin a cache line apart and overlap, so that a model of any size costs a few MiB. Never zeros. */
#pragma once
#include "take.h"

struct dummy_pool;

struct dummy_shape {
    int rows_max, cols_max; /* of any matrix */
    int hidden;             /* matrices have a deviation of hidden^-0.5, which keeps activations near their size */
    bool fp8;               /* projections are e4m3 with block scales */
};

int dummy_pool_new(const struct dummy_shape *shape, uint64_t seed, struct dummy_pool **ret_pool);
void dummy_pool_free(struct dummy_pool *pool);
struct tensor dummy_tensor(const struct dummy_pool *pool, enum take_kind kind, int n_rows, int n_cols,
                           const char *name);
