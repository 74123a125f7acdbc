/* bench: what the groups of spillway-bench share. A figure is the median of several runs and stands beside a ceiling that
 * was measured in the same run; figures of different runs are not compared. */
#pragma once
#include <stddef.h>

struct bench_options {
    int n_threads;                  /* 0: one per physical core */
    int n_repeats;                  /* runs per figure */
    const char *isa;                /* NULL: every path this CPU has */
    const char *file;               /* NULL: the tiny pair's */
    int n_seconds;                  /* measured with one number of clients */
    const char *json;               /* file for the figures; NULL: none */
    const char *spillwayd, *socket; /* program to start, or where one listens; both NULL: that of the build folder */
};

struct bench_group {
    const char *name, *summary;
    int (*run)(const struct bench_options *options); /* 0, or negative errno */
};
extern const struct bench_group bench_cuda, bench_gemm, bench_pass, bench_system, bench_tokenizer;

double bench_now(void);                      /* seconds */
double bench_median(double *samples, int n); /* sorts them */
