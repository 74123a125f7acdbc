/* qwen: the Qwen3.5 target as a readable list of ops. Owns its packed weights; knows nothing of drafting, of seqs or of
 * where pages live. Formulas: qwen3_5 family reference implementation (transformers, modeling_qwen3_5.py). */
#pragma once
#include "groups.h"
#include "pack.h"
#include "recorder.h"

struct qwen_layer {
    enum layer_kind kind;
    int idx; /* within target_full or within target_state */
    const float *input_norm, *post_norm;
    /* full attention: qkv rows are [q and gate per head | k | v] */
    struct weight *qkv, *o;
    const float *q_norm, *k_norm;
    /* delta net: in_mz rows are [q | k | v | z], in_ba rows [b | a] */
    struct weight *in_mz, *in_ba, *gdn_out;
    const float *conv, *neg_a, *dt_bias, *gdn_norm;
    /* feed forward; MoE if router */
    struct weight *gate_up, *down;
    struct weight *router, *experts_gate_up, *experts_down, *shared_gate_up, *shared_down;
};

struct qwen {
    struct qwen_config config;
    struct qwen_layer *layers;
    struct weight *embed, *lm_head; /* equal if tied */
    const float *final_norm;
    struct rope_table rope;
    int n_full, n_gdn;
    struct devmem mem;
};

/* Activation buffers of one pass, act elements unless said, n_rows_max rows each. */
struct qwen_buffers {
    void *x;              /* [hidden] residual stream */
    void *mz;             /* [conv_dim + Hv * Dv] */
    float *ba;            /* f32 [2 * Hv] */
    void *gdn_out;        /* [Hv * Dv] */
    void *qkv, *q, *attn; /* [qkv_width], [Hq * head_dim] twice */
    void *ffn;            /* [intermediate] */
};

/* What a pass hands to the layers. */
struct qwen_pass {
    const struct batch *batch;
    const struct qwen_buffers *buffers;
    const struct kv_view *full;
    const struct state_view *state;
    enum gdn_mode gdn_mode;
    const struct gdn_record *record; /* GDN_FROZEN */
    bool has_gate; /* the attention of full layer l is part 2 l + 1 of the program; else it has one part */
    const struct attn_spans *spans; /* of all full layers, which then have a gate; NULL: all keys at once */
    /* Called when x holds the output of `layer` and the next op may change it; NULL: no taps. */
    void (*after_layer)(void *arg, struct recorder *rec, int layer);
    void *after_layer_arg;
    float
        *hidden; /* f32 [n_layers, n_rows_max, hidden]: embeddings, then outputs of all layers but the last; or NULL */
    int32_t *routing;              /* [n_layers, n_rows_max, top_k] or NULL */
    const int32_t *forced_routing; /* same shape, or NULL */
};

/* stream: for uploads while loading. On failure everything is freed and report says why. */
int qwen_init(struct qwen *qwen, const struct backend *backend, struct device *device, struct stream *stream,
              const struct qwen_config *config, const struct qwen_weights *weights, struct report *report);
void qwen_deinit(struct qwen *qwen);

int qwen_qkv_width(const struct qwen_config *config);
int qwen_conv_dim(const struct qwen_config *config);
int qwen_value_dim(const struct qwen_config *config);
/* Shape of the recurrent state; arena and tables are the caller's. */
struct state_view qwen_state_view(const struct qwen_config *config);
/* The attention layers as members of target_full, in layer order; ret_members[n_layers]. Returns their number. */
int qwen_kv_members(const struct qwen_config *config, enum dtype kv_dtype, struct kv_member *ret_members);

/* False: out of device memory. */
bool qwen_buffers_take(struct qwen_buffers *buffers, const struct qwen_config *config, struct devmem *mem,
                       enum dtype act_dtype, int n_rows_max);

/* Embedding and all layers; buffers->x then holds the residual stream before the final norm. */
void qwen_record_layers(struct recorder *rec, const struct qwen *qwen, const struct qwen_pass *pass);
