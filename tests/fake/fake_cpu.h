/* fake_cpu: what an op of kernels/cpu needs around it, in one thread: a program that is a list of calls, workers that
 * take turns, and a weight that is a plain matrix. Link it instead of the real ones. */
#pragma once
#include "cpu/cpu.h"

struct weight {
    int n_rows, n_cols;
    const float *w; /* [n_rows, n_cols] */
};

struct program *fake_program_new(struct device *device);
void fake_program_free(struct program *program);
void fake_program_run(struct program *program); /* scratch is filled with garbage before every op */
