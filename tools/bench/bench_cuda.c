/* Group cuda: a device by what its table offers: what it can do at best, single matrices, passes, whole cycles and copies at
 * the shapes of Qwen3.5 with random weights. For the GPU; the same runs on the CPU at small shapes. */
#include "bench.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "copies.h"
#include "cycles.h"
#include "matrices.h"
#include "passes.h"
#include "rig.h"
#include "streams.h"

static const struct rig_shape shapes[] = {
    {"qwen3.5-0.8b", SHAPES "/qwen3.5-0.8b", NULL},
    {"qwen3.5-2b", SHAPES "/qwen3.5-2b", NULL},
    {"qwen3.5-4b", SHAPES "/qwen3.5-4b", SHAPES "/qwen3.5-4b-dflash"},
    {"qwen3.5-9b", SHAPES "/qwen3.5-9b", SHAPES "/qwen3.5-9b-dflash"},
    {"qwen3.5-27b", SHAPES "/qwen3.5-27b", SHAPES "/qwen3.5-27b-dflash"},
    {"qwen3.5-35b-a3b", SHAPES "/qwen3.5-35b-a3b", SHAPES "/qwen3.5-35b-a3b-dflash"},
    {"tiny", SHARE "/tiny/target", SHARE "/tiny/draft"},
    {"tiny-moe", SHAPES "/tiny-moe", SHAPES "/tiny-moe-dflash"}, /* nobody's */
};

static const struct {
    const char *name;
    int (*measure)(struct rig *rig, const struct rig_shape *shape);
} cases[] = {
    {"pass", passes_measure}, {"cycle", cycles_measure}, {"copies", copies_measure}, {"streamed", streams_measure}};

/* A name in a list with commas. */
static bool is_listed(const char *list, const char *name) {
    size_t n = strlen(name);

    for (const char *at = list; at; at = strchr(at, ',')) {
        at += *at == ',';
        if (strncmp(at, name, n) == 0 && (at[n] == ',' || at[n] == '\0'))
            return true;
    }
    return false;
}

/* Every name in the list is one of these. */
static int check_list(const char *option, const char *list, const char *const *names, int n_names) {
    for (const char *at = list;;) {
        size_t n = strcspn(at, ",");
        bool is_known = false;

        for (int i = 0; i < n_names; i++)
            is_known |= strlen(names[i]) == n && strncmp(names[i], at, n) == 0;
        if (!is_known) {
            fprintf(stderr, "spillway-bench: %s %s: %.*s is not one of", option, list, (int)n, at);
            for (int i = 0; i < n_names; i++)
                fprintf(stderr, " %s", names[i]);
            fprintf(stderr, "\n");
            return -EINVAL;
        }
        if (at[n] == '\0')
            return 0;
        at += n + 1;
    }
}

static int check_options(const struct bench_options *options) {
    static const char *const case_names[] = {"ceilings", "matrices", "pass", "cycle", "copies", "streamed"};
    const char *shape_names[ARRAY_LEN(shapes)];
    int r = check_list("--cases", options->cases, case_names, ARRAY_LEN(case_names));

    for (size_t i = 0; i < ARRAY_LEN(shapes); i++)
        shape_names[i] = shapes[i].name;
    if (r == 0 && options->model_shape)
        r = check_list("--model-shape", options->model_shape, shape_names, ARRAY_LEN(shapes));
    if (r == 0 && options->accept != 0 && (options->accept < 1 || options->accept > BLOCK_ROWS_MAX)) {
        fprintf(stderr, "spillway-bench: --accept %g: not between 1 and %d tokens\n", options->accept, BLOCK_ROWS_MAX);
        r = -EINVAL;
    }
    return r;
}

/* Without a list: the tiny ones on the CPU, the others on a GPU. */
static bool is_wanted(const struct rig *rig, const struct rig_shape *shape) {
    bool is_tiny = strncmp(shape->name, "tiny", 4) == 0;

    return rig->options->model_shape ? is_listed(rig->options->model_shape, shape->name) : is_tiny != rig_is_gpu(rig);
}

static int measure_shape(struct rig *rig, const struct rig_shape *shape) {
    int r = 0;

    for (size_t i = 0; r == 0 && i < ARRAY_LEN(cases); i++) {
        if (!is_listed(rig->options->cases, cases[i].name))
            continue;
        r = cases[i].measure(rig, shape);
        if (r == -ENOMEM) { /* the others may fit */
            printf("\n%s, %s: not measured, there is no room for it on the device or in pinned memory\n", cases[i].name,
                   shape->name);
            r = 0;
        }
    }
    return r;
}

static int measure(struct rig *rig) {
    int r = roof_measure(rig);

    if (r != 0)
        return r;
    if (is_listed(rig->options->cases, "matrices"))
        r = matrices_measure(rig);
    for (size_t i = 0; r == 0 && i < ARRAY_LEN(shapes); i++)
        if (is_wanted(rig, &shapes[i]))
            r = measure_shape(rig, &shapes[i]);
    figures_end(&rig->figures);
    return r == 0 ? rig->backend->status(rig->device) : r;
}

static int run(const struct bench_options *options) {
    struct rig rig = {0};
    FILE *json = NULL;
    int r = check_options(options);

    if (r == 0)
        r = bench_open_json(options, &json);
    if (r == 0) {
        r = rig_open(&rig, options);
        rig.figures.json = json;
    }
    if (r == 0)
        r = measure(&rig);
    if (rig.backend)
        rig_close(&rig);
    return bench_close_json(json, r);
}

const struct bench_group bench_cuda = {
    .name = "cuda",
    .summary =
        "a GPU: what it can do at best, and matrices, passes, cycles and copies with random weights;\n"
        "             --cases LIST of ceilings,matrices,pass,cycle,copies,streamed (all; ceilings always),\n"
        "             --model-shape LIST (all), --context LIST of tokens (1024; copies: the least, streamed: the "
        "most),\n"
        "             --batch LIST of seqs of a cycle (1), --accept N tokens a cycle, simulated, --tokens N of a\n"
        "             prefix (32768), --json FILE, --backend cpu for the same on the CPU",
    .run = run,
};
