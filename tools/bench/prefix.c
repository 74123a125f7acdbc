#include "prefix.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend.h"
#include "base.h"
#include "bench.h"
#include "keep.h"

enum { REPEATS_MAX = 100, FIRST_ID = 300, IDS = 3600 /* plain words of the tiny vocabulary */ };

struct prefix {
    struct keep keep;
    int32_t *ids; /* [n + 1] */
    int n;        /* a multiple of PAGE_TOKENS */
    int n_repeats;
};

enum source { SOURCE_NONE, SOURCE_DEVICE, SOURCE_HOST, SOURCE_DISK };

static void make_prompt(struct prefix *prefix) {
    uint64_t seed = 1;

    for (int i = 0; i <= prefix->n; i++) {
        seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        prefix->ids[i] = FIRST_ID + (int32_t)((seed >> 33) % IDS);
    }
}

/* Seconds to the first token; all of the prefix must have come from there. */
static int ask(struct prefix *prefix, enum source source, double *ret_seconds) {
    uint64_t n = (uint64_t)prefix->n;
    struct talk_answer answer;
    int r = talk_generate(prefix->keep.client, prefix->ids, prefix->n + 1, 1, &answer);

    if (r != 0)
        return r;
    if (answer.n_device != (source == SOURCE_DEVICE ? n : 0) || answer.n_host != (source == SOURCE_HOST ? n : 0) ||
        answer.n_disk != (source == SOURCE_DISK ? n : 0)) {
        fprintf(
            stderr,
            "spillway-bench: kv: of a prefix of %d tokens %llu came from the device, %llu from host memory and %llu "
            "from disk; all should have come from tier %d\n",
            prefix->n, (unsigned long long)answer.n_device, (unsigned long long)answer.n_host,
            (unsigned long long)answer.n_disk, source);
        return -EPROTO;
    }
    *ret_seconds = answer.first_s;
    return 0;
}

static int time_from(struct prefix *prefix, enum source source, double *ret_seconds) {
    double samples[REPEATS_MAX];
    int r = 0;

    for (int i = 0; r == 0 && i < prefix->n_repeats; i++) {
        if (source >= SOURCE_HOST)
            r = talk_evict(prefix->keep.client, "device");
        if (r == 0 && source == SOURCE_DISK)
            r = talk_evict(prefix->keep.client, "host");
        if (r == 0)
            r = ask(prefix, source, &samples[i]);
    }
    if (r == 0)
        *ret_seconds = bench_median(samples, prefix->n_repeats);
    return r;
}

static int time_copy(uint64_t bytes, double *ret_bytes_per_s) {
    char *from = malloc(bytes), *to = malloc(bytes);
    double start;

    if (!from || !to) {
        free(from);
        free(to);
        return -ENOMEM;
    }
    memset(from, 1, bytes);
    memset(to, 2, bytes);
    start = bench_now();
    memcpy(to, from, bytes);
    *ret_bytes_per_s = (double)bytes / (bench_now() - start);
    if (to[bytes - 1] != 1) /* and so it is not left out */
        *ret_bytes_per_s = 0;
    free(from);
    free(to);
    return 0;
}

static int measure(struct prefix *prefix, struct prefix_figures *figures) {
    double before = 0, after = 0;
    int r = ask(prefix, SOURCE_NONE, &figures->cold);

    if (r == 0)
        r = time_from(prefix, SOURCE_DEVICE, &figures->device);
    if (r == 0)
        r = talk_metric(prefix->keep.client, "restored_bytes_total", &before);
    if (r == 0)
        r = time_from(prefix, SOURCE_HOST, &figures->host);
    if (r == 0)
        r = talk_metric(prefix->keep.client, "restored_bytes_total", &after);
    figures->bytes = (uint64_t)(after - before) / (uint64_t)prefix->n_repeats;
    if (r == 0)
        r = time_from(prefix, SOURCE_DISK, &figures->disk);
    return r == 0 ? time_copy(figures->bytes, &figures->copy_bytes_per_s) : r;
}

int prefix_measure(const struct bench_options *options, struct prefix_figures *ret_figures) {
    struct prefix prefix = {.n = options->n_tokens / PAGE_TOKENS * PAGE_TOKENS,
                            .n_repeats = min_int(options->n_repeats, REPEATS_MAX)};
    unsigned mib = (unsigned)max_int(128, prefix.n / 128); /* more than twice what the prefix takes */
    struct keep_options keep = {.spillwayd = options->spillwayd,
                                .folder = options->folder,
                                .n_threads = options->n_threads,
                                .device_mib = mib,
                                .host_mib = mib,
                                .disk_mib = 8 * mib,
                                .restore_always = true,
                                .disk_min_tokens = PAGE_TOKENS,
                                .max_context = prefix.n + 256,
                                .max_seqs = 2};
    int r;

    *ret_figures = (struct prefix_figures){.n_tokens = prefix.n};
    if (prefix.n == 0)
        return -EINVAL;
    prefix.ids = calloc((size_t)prefix.n + 1, sizeof *prefix.ids);
    r = prefix.ids ? keep_open(&keep, &prefix.keep) : -ENOMEM;
    if (r == 0) {
        make_prompt(&prefix);
        r = measure(&prefix, ret_figures);
    }
    keep_close(&prefix.keep);
    free(prefix.ids);
    return r;
}
