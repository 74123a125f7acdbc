/* bench: what the groups of spillway-bench share. A figure is the median of several runs and stands beside a ceiling that
 * was measured in the same run; figures of different runs are not compared. */
#pragma once
#include <stddef.h>
#include <stdio.h>

struct bench_options {
    int n_threads;                  /* 0: one per physical core */
    int n_repeats;                  /* runs per figure */
    const char *isa;                /* NULL: every path this CPU has */
    const char *file;               /* NULL: the tiny pair's */
    int n_seconds;                  /* measured with one number of clients */
    const char *json;               /* file for the figures; NULL: none */
    const char *spillwayd, *socket; /* program to start, or where one listens; both NULL: that of the build folder */
    const char *folder;             /* on a disk, for what lies on one */
    int n_entries;                  /* that a cache has in which something is looked up */
    int n_tokens;                   /* of a long prefix */
    int n_chats, n_turns;           /* of a trace */
    const char *model_shape;        /* of the shapes a group knows, those of this list alone; NULL: all it does */
    const char *backend;            /* cuda or cpu */
    const char *cases;              /* of those a group knows, a list */
    const char *contexts, *batches; /* lists: tokens before what is measured; seqs side by side */
    double accept;                  /* tokens a cycle commits, simulated; 0: only what it does */
};

struct bench_group {
    const char *name, *summary;
    int (*run)(const struct bench_options *options); /* 0, or negative errno */
};
extern const struct bench_group bench_cuda, bench_gemm, bench_kv, bench_pass, bench_system, bench_tokenizer,
    bench_trace;

/* The file for the figures, or NULL if none is wanted. Negative errno after a line on stderr. */
int bench_open_json(const struct bench_options *options, FILE **ret_file);
int bench_close_json(FILE *file, int r); /* r, or -EIO if that was 0 and the file is not whole; NULL is fine */

double bench_now(void);                      /* seconds */
double bench_median(double *samples, int n); /* sorts them */
