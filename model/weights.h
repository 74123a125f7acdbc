/* weights: checkpoint folder -> named, shape-checked tensors of one rank. Views into the mapped files; only data at an
 * address that its element type may not have is copied. Every tensor of the file is either used, or skipped by a known
 * name, or an error. */
#pragma once
#include "config.h"

struct checkpoint; /* checkpoint.h: mapped safetensors files of one folder */

/* A matrix or vector as it lies in the file, already cut to this rank. data == NULL: absent. */
struct tensor {
    const void *data;
    enum dtype dtype;
    int n_rows, n_cols; /* a vector has n_rows 1 */
    size_t row_bytes;
    const void *scale; /* E4M3: first block scale of this view */
    enum dtype scale_dtype;
    int scale_cols; /* scales per block row of the file */
};

/* Tensor parallel place; {0, 1} for one device. Heads and MLP widths are divided: rows of q, k, v, in_*, gate and up,
 * columns of o, gdn_out and down, and their biases; all else, embedding and head included, is whole on every rank. */
struct shard_of {
    int rank, size;
};

struct expert_weights {
    struct tensor gate, up, down;
};
struct qwen_layer_weights {
    struct tensor input_norm, post_norm;
    struct tensor q, k, v, o, q_norm, k_norm; /* full attention; q holds [query | gate] per head */
    struct tensor in_qkv[3], in_z, in_b, in_a, conv, a_log, dt_bias, gdn_norm,
        gdn_out;                  /* in_qkv: q, k, v row blocks of this rank */
    struct tensor conv_qkv[3];    /* conv channels of the same row blocks [n, taps]; conv: of all ranks */
    struct tensor gate, up, down; /* dense */
    struct tensor router, shared_gate, shared_up, shared_down, shared_router;
    struct expert_weights *experts; /* [n_experts] or NULL */
};
struct qwen_weights {
    struct tensor embed, final_norm, lm_head; /* lm_head: equal to embed if tied */
    bool tied;
    struct qwen_layer_weights *layers; /* [n_layers] */
    int n_layers;
    int n_skipped; /* vision, mtp, inv_freq */
    size_t skipped_bytes;
};
struct draft_layer_weights {
    struct tensor input_norm, post_norm, q, k, v, o, q_norm, k_norm, gate, up, down;
    struct tensor q_bias, k_bias, v_bias, o_bias; /* attention_bias; o_bias only on rank 0, as ranks are summed */
};
struct draft_weights {
    struct tensor fc, hidden_norm, norm;
    struct draft_layer_weights *layers;
};

int checkpoint_open(const char *folder, struct checkpoint **ret_checkpoint, struct report *report);
void checkpoint_close(struct checkpoint *checkpoint); /* all tensors taken from it become invalid */

/* Whole or nothing: on an error nothing is kept and report names file, tensor and reason. Every weight is finite. */
int qwen_weights_load(struct checkpoint *checkpoint, const struct qwen_config *config, struct shard_of shard,
                      struct qwen_weights *ret_weights, struct report *report);
void qwen_weights_deinit(struct qwen_weights *weights);
int draft_weights_load(struct checkpoint *checkpoint, const struct draft_config *config, struct shard_of shard,
                       struct draft_weights *ret_weights, struct report *report);
void draft_weights_deinit(struct draft_weights *weights);

/* Random weights for a config alone, of plausible magnitudes (never zeros): views into a pseudo-random pool that the
 * returned checkpoint owns. Rows of a matrix overlap there: row_bytes is less than a row. */
int qwen_weights_dummy(const struct qwen_config *config, uint64_t seed, struct checkpoint **ret_checkpoint,
                       struct qwen_weights *ret_weights, struct report *report);
int draft_weights_dummy(const struct draft_config *config, uint64_t seed, struct checkpoint **ret_checkpoint,
                        struct draft_weights *ret_weights, struct report *report);

/* Rows [begin, begin + n) and columns [begin, begin + n) of a matrix; block scales follow (begin a multiple of 128 if scaled). */
struct tensor tensor_rows(struct tensor t, int begin, int n);
struct tensor tensor_cols(struct tensor t, int begin, int n);
/* The value at [row, col] as f32, scale applied. For small tensors and tests. */
float tensor_at(const struct tensor *t, int row, int col);
