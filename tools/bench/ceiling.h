/* ceiling: what this machine can do at best, measured by plain loops, to stand beside every figure. */
#pragma once
#include "backend.h"

enum { CEILING_THREADS_MAX = 1024 };

/* A plain multi-threaded read of 1 GiB. */
struct ceiling_read {
    struct device *device;
    uint64_t *words;
    size_t n_words;
    uint64_t sums[CEILING_THREADS_MAX];
};
int ceiling_read_open(struct ceiling_read *read); /* 0 or negative errno */
void ceiling_read_close(struct ceiling_read *read);
double ceiling_read_rate(struct ceiling_read *read, int n_threads); /* one sample, bytes per second */

/* Multiply-adds on registers with the instructions of a path: one sample; 0 where there is no such loop. */
double ceiling_gflops(const char *isa, int n_threads);
