/* dflash: the drafter: proposes a block in one pass from tapped hidden states of the target. Owns its packed weights;
 * decides nothing about what of a block stands (that is the op `prepare`). Formulas: DFlash (arXiv 2602.06036) and its
 * public reference code. */
#pragma once
#include "groups.h"
#include "pack.h"
#include "recorder.h"

struct dflash_layer {
    enum kv_group group;
    int idx; /* within the group */
    bool block_causal;
    int window;
    const float *input_norm, *post_norm, *q_norm, *k_norm;
    struct weight *qkv, *o, *gate_up, *down;
    const float *qkv_bias, *o_bias; /* NULL without attention_bias */
};

struct dflash {
    struct draft_config config;
    struct dflash_layer *layers;
    int tap_of_layer[LAYERS_MAX];        /* target layer -> column block of fc, -1: not tapped */
    int first_tap_layer, last_tap_layer; /* in execution order */
    struct weight *fc[TAPS_MAX];         /* [hidden, hidden] column block i of fc, for the i-th listed layer */
    struct weight *wkv;                  /* K_0, V_0, K_1, V_1, ... of all layers */
    const float *wkv_bias;
    const float *hidden_norm, *norm;
    struct rope_table rope;
    struct devmem mem;
};

/* act elements unless said */
struct dflash_buffers {
    float *fc_acc;  /* f32 [n_rows_max of the target's batches, hidden] */
    float *kv_rows; /* f32 [same, n_layers * 2 * n_kv_heads * head_dim] */
    void *x;        /* [block rows, hidden] */
    void *qkv, *q, *attn, *block_k, *block_v, *ffn;
};

int dflash_init(struct dflash *draft, const struct backend *backend, struct device *device, struct stream *stream,
                const struct draft_config *config, const struct draft_weights *weights, struct report *report);
void dflash_deinit(struct dflash *draft);

/* The attention layers as members of draft_full and draft_sliding, in layer order; ret_members[n_layers]. */
void dflash_kv_members(const struct draft_config *config, enum dtype kv_dtype, struct kv_member *ret_members);
bool dflash_buffers_take(struct dflash_buffers *buffers, const struct draft_config *config, struct devmem *mem,
                         enum dtype act_dtype, int n_rows_max, int n_block_rows_max);

/* Context, part 1, beside the target's layers: for qwen_pass.after_layer. Adds the tap's column block of fc into fc_acc
 * (the sum over taps does not depend on their listed order, only the pairing of layer and column block does); behind
 * the last tap also the stacked K/V projection of hidden_norm(fc_acc). */
struct dflash_tap {
    const struct dflash *draft;
    const struct dflash_buffers *buffers;
    const struct batch *batch;
    const void *x; /* act [n_rows, hidden] the target's residual stream */
};
void dflash_after_layer(void *dflash_tap, struct recorder *rec, int layer);

/* Context, part 2, after acceptance: K/V of committed rows into the two groups. */
void dflash_record_context(struct recorder *rec, const struct dflash *draft, const struct dflash_buffers *buffers,
                           const struct batch *batch, const int32_t *seg_commit, const struct kv_view *full,
                           const struct kv_view *sliding);

/* The block: buffers->x then holds the residual stream before the drafter's final norm. `embed` is the target's. */
void dflash_record_block(struct recorder *rec, const struct dflash *draft, const struct dflash_buffers *buffers,
                         const struct batch *batch, const struct weight *embed, const struct seq_ctl *ctl,
                         const struct kv_view *full, const struct kv_view *sliding);
