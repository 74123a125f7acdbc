/* spillway-bench: micro benchmarks of the backends, one group per file. */
#include "bench.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const struct bench_group *const groups[] = {
    &bench_gemm,
    &bench_pass,
};
enum { N_GROUPS = sizeof groups / sizeof groups[0] };

double bench_now(void) {
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

double bench_median(double *samples, int n) {
    qsort(samples, (size_t)n, sizeof *samples, compare);
    return n % 2 != 0 ? samples[n / 2] : (samples[n / 2 - 1] + samples[n / 2]) / 2;
}

static int usage(FILE *f) {
    fprintf(f, "usage: spillway-bench GROUP [--threads N] [--repeats N] [--isa NAME]\n\ngroups:\n");
    for (int i = 0; i < N_GROUPS; i++)
        fprintf(f, "  %-10s %s\n", groups[i]->name, groups[i]->summary);
    return f == stdout ? 0 : 1;
}

int main(int argc, char **argv) {
    struct bench_options options = {.n_repeats = 7};
    const struct bench_group *group = NULL;
    int r;

    if (argc == 2 && strcmp(argv[1], "--help") == 0)
        return usage(stdout);
    for (int i = 0; i < N_GROUPS && argc > 1; i++)
        if (strcmp(argv[1], groups[i]->name) == 0)
            group = groups[i];
    if (group == NULL || argc % 2 != 0)
        return usage(stderr);
    for (int i = 2; i < argc; i += 2) {
        if (strcmp(argv[i], "--threads") == 0)
            options.n_threads = atoi(argv[i + 1]);
        else if (strcmp(argv[i], "--repeats") == 0)
            options.n_repeats = atoi(argv[i + 1]);
        else if (strcmp(argv[i], "--isa") == 0)
            options.isa = argv[i + 1];
        else
            return usage(stderr);
    }
    if (options.n_threads < 0 || options.n_repeats < 1 || options.n_repeats > 1000)
        return usage(stderr);
    r = group->run(&options);
    if (r < 0)
        fprintf(stderr, "spillway-bench: %s: %s\n", group->name, strerror(-r));
    return r < 0;
}
