/* fake_weight: a weight that is a plain matrix, and its product in double. Link it instead of the real ones. */
#pragma once
#include "cpu/cpu.h"

struct weight {
    int n_rows, n_cols;
    const float *w; /* [n_rows, n_cols] */
};
