/* prefix: a long prompt whose prefix is computed, or comes from one tier alone, to which it was forced by emptying those
 * above: how long its first token takes. */
#pragma once
#include <stdint.h>

struct bench_options;

struct prefix_figures {
    int n_tokens; /* of the prefix */
    /* Seconds from sending the prompt to its first token: computed, once, as that takes minutes; else medians. */
    double cold, device, host, disk;
    uint64_t bytes;          /* of the prefix, as it is copied up */
    double copy_bytes_per_s; /* of a plain copy in memory, one thread: the floor of the host's */
};

/* 0, or negative errno after a line on stderr: also when a prefix did not come from where it was forced to. */
int prefix_measure(const struct bench_options *options, struct prefix_figures *ret_figures);
