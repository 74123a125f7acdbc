/* spillway-bench: benchmarks of the backends and of the whole daemon, one group per file. */
#include "bench.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const struct bench_group *const groups[] = {
    &bench_cuda, &bench_gemm, &bench_kv, &bench_pass, &bench_system, &bench_tokenizer, &bench_trace,
};
enum { N_GROUPS = sizeof groups / sizeof groups[0] };

double bench_now(void) {
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

int bench_open_json(const struct bench_options *options, FILE **ret_file) {
    FILE *file = options->json ? fopen(options->json, "we") : NULL;
    int r = options->json && !file ? -errno : 0;

    if (r != 0)
        fprintf(stderr, "spillway-bench: %s: %s\n", options->json, strerror(-r));
    *ret_file = file;
    return r;
}

int bench_close_json(FILE *file, int r) {
    return file && fclose(file) != 0 && r == 0 ? -EIO : r;
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
    fprintf(f, "usage: spillway-bench GROUP [--threads N] [--repeats N] [--isa NAME] [--file PATH]\n\ngroups:\n");
    for (int i = 0; i < N_GROUPS; i++)
        fprintf(f, "  %-10s %s\n", groups[i]->name, groups[i]->summary);
    return f == stdout ? 0 : 1;
}

/* False: there is no such option. */
static bool take_option(struct bench_options *options, const char *name, const char *value) {
    struct {
        const char *name;
        int *number;
        const char **text;
        double *real;
    } table[] = {
        {"--threads", &options->n_threads, NULL, NULL},   {"--repeats", &options->n_repeats, NULL, NULL},
        {"--seconds", &options->n_seconds, NULL, NULL},   {"--isa", NULL, &options->isa, NULL},
        {"--file", NULL, &options->file, NULL},           {"--json", NULL, &options->json, NULL},
        {"--spillwayd", NULL, &options->spillwayd, NULL}, {"--socket", NULL, &options->socket, NULL},
        {"--folder", NULL, &options->folder, NULL},       {"--entries", &options->n_entries, NULL, NULL},
        {"--tokens", &options->n_tokens, NULL, NULL},     {"--chats", &options->n_chats, NULL, NULL},
        {"--turns", &options->n_turns, NULL, NULL},       {"--model-shape", NULL, &options->model_shape, NULL},
        {"--backend", NULL, &options->backend, NULL},     {"--cases", NULL, &options->cases, NULL},
        {"--context", NULL, &options->contexts, NULL},    {"--batch", NULL, &options->batches, NULL},
        {"--accept", NULL, NULL, &options->accept},
    };

    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        if (strcmp(name, table[i].name) != 0)
            continue;
        if (table[i].number)
            *table[i].number = atoi(value);
        if (table[i].text)
            *table[i].text = value;
        if (table[i].real)
            *table[i].real = atof(value);
        return true;
    }
    return false;
}

int main(int argc, char **argv) {
    struct bench_options options = {.n_repeats = 7,
                                    .n_seconds = 15,
                                    .folder = "/var/tmp",
                                    .n_entries = 1000000,
                                    .n_tokens = 32768,
                                    .n_chats = 20,
                                    .n_turns = 15,
                                    .backend = "cuda",
                                    .cases = "ceilings,matrices,pass,cycle,copies,streamed",
                                    .contexts = "1024",
                                    .batches = "1"};
    const struct bench_group *group = NULL;
    int r;

    if (argc == 2 && strcmp(argv[1], "--help") == 0)
        return usage(stdout);
    for (int i = 0; i < N_GROUPS && argc > 1; i++)
        if (strcmp(argv[1], groups[i]->name) == 0)
            group = groups[i];
    if (group == NULL || argc % 2 != 0)
        return usage(stderr);
    for (int i = 2; i < argc; i += 2)
        if (!take_option(&options, argv[i], argv[i + 1]))
            return usage(stderr);
    if (options.n_threads < 0 || options.n_repeats < 1 || options.n_repeats > 1000 || options.n_seconds < 1)
        return usage(stderr);
    r = group->run(&options);
    if (r < 0)
        fprintf(stderr, "spillway-bench: %s: %s\n", group->name, strerror(-r));
    return r < 0;
}
