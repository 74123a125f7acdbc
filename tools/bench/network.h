/* network: a network with random weights and a few seqs, all with the same tokens before them: what passes are timed on.
 * Pages and states of seqs beyond the first are copies of the first one's. */
#pragma once
#include "need.h"
#include "rig.h"
#include "space.h"

enum { NETWORK_AHEAD = 4 }; /* passes that may be enqueued before the first is done */

struct network_options {
    const struct rig_shape *shape;
    bool has_draft;
    int n_seqs, n_tokens_max; /* of each seq */
    int n_valid;              /* ids that may be chosen; 0: all */
};

struct network {
    struct rig *rig;
    const struct rig_shape *shape;
    struct model *model;
    struct space space;
    int n_seqs;
    struct model_pass *prefill;
    struct model_batch chunks[NETWORK_AHEAD];
    struct seq_ctl *ctl; /* MEM_HOST, [n_seqs] */
};

/* 0, or negative errno after a line on stderr; -ENOMEM: the device is too small for it. */
int network_open(struct network *net, struct rig *rig, const struct network_options *options);
void network_close(struct network *net);

/* Runs n tokens through prefill, in chunks, and copies what they left to the other seqs. */
int network_fill(struct network *net, int n_tokens, double *ret_seconds);
/* Seq 0's pages of the first n_from tokens, over and over up to n_to: where running so many tokens takes too long. */
int network_repeat(struct network *net, int n_from, int n_to);
/* Every seq as it is after n tokens, with a token of its own chosen next; stop_id: the id that ends it, or -1. Blocks. */
int network_place(struct network *net, int n_tokens, int stop_id);
/* The next n of a seq's tokens, one seg per seq. first_out: row of a seg from which on logits are wanted; n_rows: none. */
void network_batch(struct model_batch *batch, int n_seqs, int pos, int n_rows, int flags, int first_out);

/* Median seconds of a pass over n_rows rows of each of n_seqs seqs behind `context` tokens, in runs of n_runs in a row,
 * NETWORK_AHEAD at most. */
struct network_pass {
    enum pass_kind kind;
    int context, n_seqs, n_rows, n_outs, n_runs;
};
int network_time(struct network *net, const struct network_pass *pass, int n_repeats, double *ret_seconds,
                 double *ret_n_experts);

/* Experts of a layer that some of n_rows rows of the latest run chose, mean over the layers; 0 in dense networks. */
int network_experts(struct network *net, const struct model_pass *pass, int n_rows_max, int n_rows,
                    double *ret_n_experts);
