/* pace: how fast a vault writes to a disk and reads from it, beside a plain loop that asks the same of the same files. */
#pragma once
#include <stdint.h>

struct bench_options;

struct pace {           /* bytes per second */
    double rate, plain; /* medians */
    double share;       /* median of how the two compare, one right after the other */
    int depth;          /* operations side by side, of both */
};

struct pace_figures {
    uint64_t bytes; /* of one saving, or reading */
    struct pace write, read;
    double checksum;                       /* bytes per second on one core, over pages that are in no cache */
    uint64_t written_bytes, payload_bytes; /* of one saving: all that went to disk; of the pages kept */
};

enum pace_shape {
    PACE_27B,  /* one chain: 64 pages of 4 MiB, 32 of the drafter's of 1.25 MiB, a state of 150 MiB */
    PACE_TINY, /* two chains of 32,768 tokens of the tiny pair */
    PACE_SHAPES
};

/* 0, or negative errno after a line on stderr. */
int pace_measure(const struct bench_options *options, enum pace_shape shape, struct pace_figures *ret_figures);
