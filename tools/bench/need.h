/* need: the bytes that a pass cannot but read and the operations that it cannot but do, counted from the shape of the
 * network. Weights are bf16 and are read once; norms, biases and activations are too little to count. */
#pragma once
#include "model.h"

struct need {
    double bytes, kv_bytes; /* of which these are keys and values of the context */
    double ops;
};

struct need_rows {
    int n_seqs;
    int n_rows, n_outs; /* of each seq: rows, and rows whose logits are wanted */
    int context;        /* tokens before its first row */
    /* The state is read by the pass, and read and written by the commit, but where rows stay in an open chunk for 63 of 64
     * tokens; else read and written. */
    bool is_frozen;
    double n_experts; /* of each layer that some row chose; dense: ignored */
};

struct need need_target(const struct model_info *info, const struct need_rows *rows);
/* The draft pass of a block, and the draft context of what was verified. Projections of K and V serve both and count once. */
struct need need_draft(const struct model_info *info, int n_seqs, int context);
