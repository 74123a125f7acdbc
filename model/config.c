#include "config.h"
#include "quant_config.h"
#include "rope_config.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum {
    HEAD_DIM = 256,    /* of full attention, in every Qwen3.5 */
    GDN_HEAD_DIM = 128 /* keys and values of the delta net */
};

struct architecture {
    const char *name;
    bool is_moe;
};

static const struct architecture architectures[] = {
    {"Qwen3_5ForCausalLM", false},
    {"Qwen3_5MoeForCausalLM", true},
    {"Qwen3_5ForConditionalGeneration", false},
    {"Qwen3_5MoeForConditionalGeneration", true},
};

/* The class name, or without one the model type. Sets *ret_moe. */
static void read_architecture(const struct config_object *root, bool *ret_moe) {
    static const char *const types[] = {"qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", NULL};
    json_t *names = config_get(root, "architectures");
    const char *name, *type = config_string(root, "model_type");

    config_one_of(root, "model_type", types, "model type");
    if (!names) {
        if (!type)
            config_refuse(root->file, "architectures and model_type are missing");
        *ret_moe = type && strstr(type, "_moe");
        return;
    }
    if (!json_is_array(names) || json_array_size(names) != 1 || !json_is_string(json_array_get(names, 0))) {
        config_refuse(root->file, "architectures must be an array of one string");
        return;
    }
    name = json_string_value(json_array_get(names, 0));
    for (size_t i = 0; i < ARRAY_LEN(architectures); i++)
        if (strcmp(name, architectures[i].name) == 0) {
            *ret_moe = architectures[i].is_moe;
            return;
        }
    config_refuse(root->file,
                  "architectures[0] \"%.100s\": unsupported architecture (supported: Qwen3_5ForCausalLM, "
                  "Qwen3_5MoeForCausalLM and their ForConditionalGeneration forms)",
                  name);
}

/* layer_types where present, else every interval-th layer is full attention. */
static void read_layers(const struct config_object *text, struct qwen_config *c) {
    json_t *types = config_get(text, "layer_types"), *item;
    int interval = (int)config_int(text, "full_attention_interval", 1, LAYERS_MAX, 4);
    size_t i;

    if (!types) {
        for (int l = 0; l < c->n_layers; l++)
            c->layers[l] = (l + 1) % interval == 0 ? LAYER_FULL : LAYER_LINEAR;
        return;
    }
    if (!json_is_array(types) || json_array_size(types) != (size_t)c->n_layers) {
        config_refuse(text->file, "%slayer_types must be an array of num_hidden_layers (%d) strings", text->prefix,
                      c->n_layers);
        return;
    }
    json_array_foreach(types, i, item) {
        const char *type = json_is_string(item) ? json_string_value(item) : "not a string";

        if (strcmp(type, "linear_attention") == 0) {
            c->layers[i] = LAYER_LINEAR;
        } else if (strcmp(type, "full_attention") == 0) {
            c->layers[i] = LAYER_FULL;
        } else {
            config_refuse(text->file, "%slayer_types[%zu] \"%.100s\": unsupported layer type", text->prefix, i, type);
            return;
        }
    }
}

/* `a` groups over `b`: b divides a. */
static void check_groups(const struct config_object *text, const char *a_name, int a, const char *b_name, int b) {
    if (text->file->error == 0 && a % b != 0)
        config_refuse(text->file, "%s%s %d is not a multiple of %s %d", text->prefix, a_name, a, b_name, b);
}

static void read_attention(const struct config_object *text, struct qwen_config *c) {
    static const char *const types[] = {"full_attention", NULL};
    struct rope_config rope;

    c->n_heads = (int)config_int(text, "num_attention_heads", 1, HEADS_MAX, CONFIG_REQUIRED);
    c->n_kv_heads = (int)config_int(text, "num_key_value_heads", 1, HEADS_MAX, CONFIG_REQUIRED);
    check_groups(text, "num_attention_heads", c->n_heads, "num_key_value_heads", c->n_kv_heads);
    c->head_dim = (int)config_int(text, "head_dim", 1, WIDTH_MAX, HEAD_DIM);
    if (c->head_dim != HEAD_DIM)
        config_refuse(text->file, "%shead_dim %d: unsupported head width (supported: %d)", text->prefix, c->head_dim,
                      HEAD_DIM);
    c->has_attn_gate = config_bool(text, "attn_output_gate", true);
    if (config_bool(text, "attention_bias", false))
        config_refuse(text->file, "%sattention_bias true: unsupported in a target", text->prefix);
    rope = rope_config_read(text, types, c->head_dim, 0.25);
    if (!rope.has_theta)
        config_refuse(text->file,
                      "%srope_parameters.rope_theta is missing (also looked for: rope_theta, "
                      "rope_scaling.rope_theta); a guess would be silently wrong",
                      text->prefix);
    c->rope_theta = rope.theta;
    c->rotary_dim = rope.rotary_dim;
}

static void read_delta_net(const struct config_object *text, struct qwen_config *c) {
    static const char *const gates[] = {"silu", "swish", "sigmoid", NULL};
    static const char *const state_dtypes[] = {"float32", NULL};
    const char *gate;

    c->gdn_k_heads = (int)config_int(text, "linear_num_key_heads", 1, HEADS_MAX, 16);
    c->gdn_v_heads = (int)config_int(text, "linear_num_value_heads", 1, HEADS_MAX, 32);
    check_groups(text, "linear_num_value_heads", c->gdn_v_heads, "linear_num_key_heads", c->gdn_k_heads);
    c->gdn_head_dim_k = (int)config_int(text, "linear_key_head_dim", 1, WIDTH_MAX, GDN_HEAD_DIM);
    c->gdn_head_dim_v = (int)config_int(text, "linear_value_head_dim", 1, WIDTH_MAX, GDN_HEAD_DIM);
    if (c->gdn_head_dim_k != GDN_HEAD_DIM || c->gdn_head_dim_v != GDN_HEAD_DIM)
        config_refuse(text->file,
                      "%slinear_key_head_dim %d, linear_value_head_dim %d: unsupported head width (supported: %d)",
                      text->prefix, c->gdn_head_dim_k, c->gdn_head_dim_v, GDN_HEAD_DIM);
    c->conv_taps = (int)config_int(text, "linear_conv_kernel_dim", 1, WIDTH_MAX, 4);
    if (c->conv_taps != 4)
        config_refuse(text->file, "%slinear_conv_kernel_dim %d: unsupported number of taps (supported: 4)",
                      text->prefix, c->conv_taps);
    /* Absent means silu, but null was written by somebody who meant something: it is refused like a foreign name. */
    if (json_is_null(json_object_get(text->json, "output_gate_type")))
        config_refuse(text->file, "%soutput_gate_type null: unsupported gate (supported: silu, swish, sigmoid)",
                      text->prefix);
    config_one_of(text, "output_gate_type", gates, "gate");
    gate = config_string(text, "output_gate_type");
    c->gdn_gate = gate && strcmp(gate, "sigmoid") == 0 ? GATE_SIGMOID : GATE_SILU;
    config_one_of(text, "mamba_ssm_dtype", state_dtypes, "type of the recurrent state");
}

static void read_mlp(const struct config_object *text, bool is_moe, struct qwen_config *c) {
    json_t *dense_layers = config_get(text, "mlp_only_layers");

    if (!is_moe) {
        if (config_int(text, "num_experts", 0, EXPERTS_MAX, 0) > 0)
            config_refuse(text->file, "%snum_experts is given, but the architecture is dense", text->prefix);
        c->intermediate = (int)config_int(text, "intermediate_size", 1, WIDTH_MAX, CONFIG_REQUIRED);
        return;
    }
    c->n_experts = (int)config_int(text, "num_experts", 1, EXPERTS_MAX, CONFIG_REQUIRED);
    c->top_k = (int)config_int(text, "num_experts_per_tok", 1, c->n_experts, CONFIG_REQUIRED);
    c->moe_width = (int)config_int(text, "moe_intermediate_size", 1, WIDTH_MAX, CONFIG_REQUIRED);
    c->shared_width = (int)config_int(text, "shared_expert_intermediate_size", 1, WIDTH_MAX, CONFIG_REQUIRED);
    if (dense_layers && (!json_is_array(dense_layers) || json_array_size(dense_layers) != 0))
        config_refuse(text->file, "%smlp_only_layers is not empty: dense layers in a MoE model are unsupported",
                      text->prefix);
    if (config_int(text, "decoder_sparse_step", 1, LAYERS_MAX, 1) != 1)
        config_refuse(text->file, "%sdecoder_sparse_step: dense layers in a MoE model are unsupported", text->prefix);
}

/* One id or an array of them. */
static int read_eos(const struct config_object *o, int64_t max, int eos[EOS_MAX]) {
    json_t *value = config_get(o, "eos_token_id");

    if (json_is_integer(value)) { /* NULL is none */
        eos[0] = (int)config_int(o, "eos_token_id", 0, max, 0);
        return 1;
    }
    return config_ints(o, "eos_token_id", EOS_MAX, 0, max, eos);
}

/* Writers disagree on the level. Levels that contradict each other say nothing, and the tensors decide alone. */
static void read_tied(const struct config_object *root, const struct config_object *text, struct qwen_config *c) {
    bool in_root = config_get(root, "tie_word_embeddings"), in_text = config_get(text, "tie_word_embeddings");
    bool root_says = config_bool(root, "tie_word_embeddings", false);
    bool text_says = config_bool(text, "tie_word_embeddings", false);

    c->ambiguous_tied_key = in_root && in_text && root_says != text_says;
    c->has_tied_key = (in_root || in_text) && !c->ambiguous_tied_key;
    c->tied_key = c->has_tied_key && (root_says || text_says);
}

static void read_target(const struct config_object *root, struct qwen_config *c) {
    static const char *const activations[] = {"silu", "swish", NULL};
    static const char *const text_types[] = {"qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", NULL};
    struct config_object text = config_child(root, "text_config", "text_config.");
    bool is_moe = false;

    c->nested = text.json != NULL;
    if (!c->nested)
        text = *root;
    read_architecture(root, &is_moe);
    config_one_of(&text, "model_type", text_types, "model type");
    c->vocab = (int)config_int(&text, "vocab_size", 2, VOCAB_MAX, 248320);
    c->hidden = (int)config_int(&text, "hidden_size", 1, WIDTH_MAX, CONFIG_REQUIRED);
    c->n_layers = (int)config_int(&text, "num_hidden_layers", 1, LAYERS_MAX, CONFIG_REQUIRED);
    read_layers(&text, c);
    read_attention(&text, c);
    read_delta_net(&text, c);
    read_mlp(&text, is_moe, c);
    c->rms_eps = config_real(&text, "rms_norm_eps", 1e-12, 0.1, 1e-6);
    config_one_of(&text, "hidden_act", activations, "activation");
    c->max_positions = (int)config_int(&text, "max_position_embeddings", 1, POSITIONS_MAX, 262144);
    read_tied(root, &text, c);
    c->n_eos = read_eos(config_get(&text, "eos_token_id") ? &text : root, c->vocab - 1, c->eos);
    c->fp8 = quant_config_is_fp8(root);
    if (c->nested)
        c->fp8 |= quant_config_is_fp8(&text);
}

int qwen_config_parse(const char *path, const char *text, size_t n, struct qwen_config *ret_config,
                      struct report *report) {
    struct qwen_config config = {0};
    struct config_file file;
    struct config_object root;
    int r = config_file_parse(&file, path, text, n, report);

    if (r == 0) {
        root = config_root(&file);
        read_target(&root, &config);
        r = file.error;
    }
    config_file_deinit(&file);
    if (r == 0)
        *ret_config = config;
    return r;
}

int qwen_config_read(const char *path, struct qwen_config *ret_config, struct report *report) {
    char *text;
    size_t n;
    int r = config_file_text(path, &text, &n, report);

    if (r != 0)
        return r;
    r = qwen_config_parse(path, text, n, ret_config, report);
    free(text);
    return r;
}

int generation_config_parse(const char *path, const char *text, size_t n, struct generation_config *ret_config,
                            struct report *report) {
    struct generation_config config = {0};
    struct config_file file;
    struct config_object root;
    int r = config_file_parse(&file, path, text, n, report);

    if (r == 0) {
        root = config_root(&file);
        config.n_eos = read_eos(&root, VOCAB_MAX, config.eos);
        config.do_sample = config_bool(&root, "do_sample", false);
        config.temperature = (float)config_real(&root, "temperature", 0, 100, config.do_sample ? 1 : 0);
        config.top_p = (float)config_real(&root, "top_p", 1e-6, 1, 1);
        config.top_k = (int)config_int(&root, "top_k", 0, VOCAB_MAX, 0);
        r = file.error;
    }
    config_file_deinit(&file);
    if (r == 0)
        *ret_config = config;
    return r;
}

int generation_config_read(const char *path, struct generation_config *ret_config, struct report *report) {
    char *text;
    size_t n;
    int r = config_file_text(path, &text, &n, report);

    if (r == -ENOENT) {
        *ret_config = (struct generation_config){.top_p = 1};
        return 0;
    }
    if (r != 0)
        return r;
    r = generation_config_parse(path, text, n, ret_config, report);
    free(text);
    return r;
}
