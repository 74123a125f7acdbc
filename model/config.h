/* config: config.json of a target and of a drafter, as checked numbers. Knows every key and fallback of the
 * formats; refuses what the network code does not implement, by name. Reads text only, no weights.
 * Keys and defaults: Qwen3.5 config (transformers, configuration_qwen3_5.py), DFlash drafter config (z-lab/dflash). */
#pragma once
#include "backend.h"
#include "report.h"

/* Bounds of what is read. They lie far above every published size and keep each product of two of them that the network
 * code forms (heads by head width) inside an int, and products of a matrix inside 63 bits. */
enum { VOCAB_MAX = 1 << 24, WIDTH_MAX = 1 << 18, HEADS_MAX = 1 << 12, EXPERTS_MAX = 1 << 12, POSITIONS_MAX = 1 << 24 };
enum { LAYERS_MAX = 256, TAPS_MAX = 32, EOS_MAX = 8, DRAFT_LAYERS_MAX = 32 };

enum layer_kind { LAYER_LINEAR, LAYER_FULL };

struct qwen_config {
    int vocab, hidden, n_layers;
    enum layer_kind layers[LAYERS_MAX];
    int intermediate; /* dense; 0 in MoE models */
    int n_heads, n_kv_heads, head_dim, rotary_dim;
    double rope_theta;
    bool has_attn_gate; /* attn_output_gate */
    int gdn_k_heads, gdn_v_heads, gdn_head_dim_k, gdn_head_dim_v, conv_taps;
    enum gate_act gdn_gate; /* output_gate_type */
    double rms_eps;
    int n_experts, top_k, moe_width, shared_width; /* n_experts 0: dense */
    bool tied_key, has_tied_key;                   /* what tie_word_embeddings says, if present */
    bool ambiguous_tied_key; /* its two levels contradict each other: has_tied_key is false, the tensors decide */
    bool nested;             /* text_config container: tensors carry model.language_model. */
    int max_positions;
    int n_eos, eos[EOS_MAX]; /* from config.json; generation_config.json may add */
    bool fp8;                /* quantization_config says block fp8 */
};

enum draft_causal { DRAFT_CAUSAL_AUTO, DRAFT_CAUSAL_YES, DRAFT_CAUSAL_NO };

struct draft_config {
    int vocab, hidden, n_layers, intermediate;
    int n_heads, n_kv_heads, head_dim, rotary_dim;
    double rope_theta, rms_eps;
    bool has_bias; /* attention_bias */
    int block_size, mask_id;
    int n_taps, taps[TAPS_MAX]; /* target_layer_ids in the order of the file */
    int n_target_layers;        /* num_target_layers, or -1 if absent */
    bool sliding[DRAFT_LAYERS_MAX];
    int window;          /* of every sliding layer; 0 if none */
    bool sliding_causal; /* resolved: override, is_causal, dflash_config.causal, else causal */
    char warning[256];   /* e.g. rope_theta defaulted; empty if none */
};

struct generation_config {
    int n_eos, eos[EOS_MAX];
    bool do_sample;
    float temperature, top_p;
    int top_k;
};

/* `path` names the file in reports. -EINVAL: refused, report says why; -ENOENT/-EIO/...: the file could not be read. */
int qwen_config_read(const char *path, struct qwen_config *ret_config, struct report *report);
int qwen_config_parse(const char *path, const char *text, size_t n, struct qwen_config *ret_config,
                      struct report *report);
int draft_config_read(const char *path, enum draft_causal causal, struct draft_config *ret_config,
                      struct report *report);
int draft_config_parse(const char *path, const char *text, size_t n, enum draft_causal causal,
                       struct draft_config *ret_config, struct report *report);
/* All fatal checks of a drafter against its target (fc width is checked with the weights). */
int draft_config_check(const char *path, const struct draft_config *draft, const struct qwen_config *target,
                       struct report *report);
/* A missing file is no error: greedy defaults and no eos. */
int generation_config_read(const char *path, struct generation_config *ret_config, struct report *report);
int generation_config_parse(const char *path, const char *text, size_t n, struct generation_config *ret_config,
                            struct report *report);
