/* bare: what the passes that a daemon runs cost without a daemon: the tiny pair, n seqs side by side. */
#pragma once

enum { BARE_SEQS_MAX = 64 };

struct bare_cost {       /* seconds */
    double drafted;      /* of a cycle in which all seqs draft */
    double plain;        /* of one in which none does */
    double prompt_token; /* of one token of a prompt, in chunks of 512 */
    int block_rows;
};

/* Medians of n_repeats. 0, or negative errno after a line on stderr. */
int bare_measure(int n_seqs, int n_threads, int n_repeats, struct bare_cost *ret_cost);
