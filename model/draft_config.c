#include "config.h"
#include "quant_config.h"
#include "rope_config.h"
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { HEAD_DIM = 128 };

/* The base of plain Qwen3, which a drafter without any rope_theta was trained with. */
#define THETA_DEFAULT 1e6

/* The two layouts of DFlash keys: inside dflash_config, or beside the others. The nested one wins. */
struct draft_keys {
    struct config_object root, nested;
};

static const struct config_object *holder(const struct draft_keys *keys, const char *key) {
    return config_get(&keys->nested, key) ? &keys->nested : &keys->root;
}

__attribute__((format(printf, 2, 3))) static void warn(struct draft_config *c, const char *format, ...) {
    size_t used = strlen(c->warning);
    va_list args;

    if (used && used + 3 < sizeof c->warning) {
        memcpy(c->warning + used, "; ", 2);
        used += 2;
    }
    va_start(args, format);
    vsnprintf(c->warning + used, sizeof c->warning - used, format, args);
    va_end(args);
}

/* Without a list the ids are spread evenly over the target, one per draft layer, as the reference does. */
static void default_taps(struct config_file *file, struct draft_config *c) {
    if (file->error != 0)
        return;
    if (c->n_target_layers < 5) {
        config_refuse(file, "target_layer_ids is missing%s",
                      c->n_target_layers < 0 ? ", and num_target_layers too"
                                             : ", and the target is too short for default ids");
        return;
    }
    c->n_taps = c->n_layers;
    if (c->n_taps == 1)
        c->taps[0] = c->n_target_layers / 2;
    for (int i = 0; c->n_taps > 1 && i < c->n_taps; i++)
        c->taps[i] = (int)nearbyint(1 + i * (double)(c->n_target_layers - 4) / (c->n_taps - 1));
    warn(c, "%s: target_layer_ids is missing, default ids are used", report_path(file->path));
}

static void read_taps(const struct draft_keys *keys, struct draft_config *c) {
    const struct config_object *o = holder(keys, "target_layer_ids");
    int id_max;

    c->n_target_layers = (int)config_int(holder(keys, "num_target_layers"), "num_target_layers", 1, LAYERS_MAX, -1);
    /* The last layer's output is not a residual stream that is kept apart from the final norm: ids end at Lt - 2. */
    id_max = (c->n_target_layers < 0 ? LAYERS_MAX : c->n_target_layers) - 2;
    if (!config_get(o, "target_layer_ids")) {
        default_taps(o->file, c);
    } else {
        c->n_taps = config_ints(o, "target_layer_ids", TAPS_MAX, 0, id_max, c->taps);
        if (c->n_taps == 0)
            config_refuse(o->file, "%starget_layer_ids is empty", o->prefix);
    }
    for (int i = 0; i < c->n_taps; i++)
        for (int k = 0; k < i; k++)
            if (c->taps[i] == c->taps[k])
                config_refuse(o->file, "%starget_layer_ids names layer %d twice", o->prefix, c->taps[i]);
}

/* The raw keys count: a layer slides if layer_types says so and sliding_window is positive, whatever use_sliding_window
 * and max_window_layers say (a plain Qwen3 reader would derive full attention from them). */
static void read_layers(const struct config_object *root, struct draft_config *c) {
    json_t *types = config_get(root, "layer_types"), *item;
    int window = (int)config_int(root, "sliding_window", 0, VOCAB_MAX, 0);
    bool is_sliding = false;
    size_t i;

    if (!types) {
        if (config_bool(root, "use_sliding_window", false))
            config_refuse(root->file, "use_sliding_window without layer_types does not say which layers slide");
        return;
    }
    if (!json_is_array(types) || json_array_size(types) != (size_t)c->n_layers) {
        config_refuse(root->file, "layer_types must be an array of num_hidden_layers (%d) strings", c->n_layers);
        return;
    }
    json_array_foreach(types, i, item) {
        const char *type = json_is_string(item) ? json_string_value(item) : "not a string";

        if (strcmp(type, "sliding_attention") == 0) {
            is_sliding = true;
            c->sliding[i] = window > 0;
        } else if (strcmp(type, "full_attention") != 0) {
            config_refuse(root->file, "layer_types[%zu] \"%.100s\": unsupported layer type", i, type);
            return;
        }
    }
    c->window = is_sliding ? window : 0;
    if (is_sliding && window == 0)
        warn(c, "%s: layer_types has sliding_attention but there is no sliding_window: they see everything",
             report_path(root->file->path));
}

/* Concerns sliding layers only; full-attention layers are bidirectional inside the block. */
static bool resolve_causal(const struct draft_keys *keys, enum draft_causal override) {
    bool nested = config_bool(&keys->nested, "causal", true); /* read in any case, so that it is checked */
    bool configured = config_bool(&keys->root, "is_causal", nested);

    return override == DRAFT_CAUSAL_AUTO ? configured : override == DRAFT_CAUSAL_YES;
}

static void read_rope(const struct config_object *root, struct draft_config *c) {
    static const char *const types[][3] = {{"full_attention", NULL}, /* by has_full, has_sliding */
                                           {"sliding_attention", NULL},
                                           {"full_attention", "sliding_attention", NULL}};
    bool has_full = false, has_sliding = false;
    struct rope_config rope;

    for (int l = 0; l < c->n_layers; l++) {
        has_full |= !c->sliding[l];
        has_sliding |= c->sliding[l];
    }
    rope = rope_config_read(root, types[has_sliding ? (has_full ? 2 : 1) : 0], c->head_dim, 1.0);
    c->rotary_dim = rope.rotary_dim;
    c->rope_theta = rope.has_theta ? rope.theta : THETA_DEFAULT;
    if (!rope.has_theta)
        warn(c, "%s: no rope_theta in rope_parameters, at top level or in rope_scaling: %g is used",
             report_path(root->file->path), THETA_DEFAULT);
    if (!config_bool(root, "is_neox_style", true))
        config_refuse(root->file, "is_neox_style false: unsupported rotary layout");
}

static void read_attention(const struct config_object *root, struct draft_config *c) {
    c->n_heads = (int)config_int(root, "num_attention_heads", 1, HEADS_MAX, CONFIG_REQUIRED);
    c->n_kv_heads = (int)config_int(root, "num_key_value_heads", 1, HEADS_MAX, c->n_heads);
    if (root->file->error == 0 && c->n_heads % c->n_kv_heads != 0)
        config_refuse(root->file, "num_attention_heads %d is not a multiple of num_key_value_heads %d", c->n_heads,
                      c->n_kv_heads);
    c->head_dim = (int)config_int(root, "head_dim", 1, WIDTH_MAX, HEAD_DIM);
    if (c->head_dim != HEAD_DIM)
        config_refuse(root->file, "head_dim %d: unsupported head width of a drafter (supported: %d)", c->head_dim,
                      HEAD_DIM);
    c->has_bias = config_bool(root, "attention_bias", false);
}

static void read_architecture(const struct config_object *root) {
    static const char *const types[] = {"qwen3", NULL};
    json_t *names = config_get(root, "architectures"), *name;

    config_one_of(root, "model_type", types, "model type of a drafter");
    if (!names)
        return;
    name = json_is_array(names) && json_array_size(names) == 1 ? json_array_get(names, 0) : NULL;
    if (!name || !json_is_string(name))
        config_refuse(root->file, "architectures must be an array of one string");
    else if (strcmp(json_string_value(name), "DFlashDraftModel") != 0)
        config_refuse(root->file, "architectures[0] \"%.100s\": unsupported drafter (supported: DFlashDraftModel)",
                      json_string_value(name));
}

static void read_draft(const struct draft_keys *keys, enum draft_causal causal, struct draft_config *c) {
    static const char *const activations[] = {"silu", "swish", NULL};
    const struct config_object *root = &keys->root, *o;

    read_architecture(root);
    c->vocab = (int)config_int(root, "vocab_size", 2, VOCAB_MAX, CONFIG_REQUIRED);
    c->hidden = (int)config_int(root, "hidden_size", 1, WIDTH_MAX, CONFIG_REQUIRED);
    c->n_layers = (int)config_int(root, "num_hidden_layers", 1, DRAFT_LAYERS_MAX, CONFIG_REQUIRED);
    c->intermediate = (int)config_int(root, "intermediate_size", 1, WIDTH_MAX, CONFIG_REQUIRED);
    read_attention(root, c);
    read_layers(root, c);
    read_rope(root, c);
    c->sliding_causal = resolve_causal(keys, causal);
    c->rms_eps = config_real(root, "rms_norm_eps", 1e-12, 0.1, 1e-6);
    config_one_of(root, "hidden_act", activations, "activation");
    c->block_size = (int)config_int(holder(keys, "block_size"), "block_size", 1, BLOCK_ROWS_MAX, CONFIG_REQUIRED);
    o = holder(keys, "mask_token_id");
    c->mask_id = (int)config_int(o, "mask_token_id", 0, c->vocab - 1, CONFIG_REQUIRED);
    read_taps(keys, c);
    if (config_int(holder(keys, "draft_vocab_size"), "draft_vocab_size", 1, VOCAB_MAX, c->vocab) != c->vocab)
        config_refuse(root->file, "draft_vocab_size differs from vocab_size: a drafter with a vocabulary of its own is "
                                  "unsupported");
    quant_config_is_fp8(root);
}

int draft_config_parse(const char *path, const char *text, size_t n, enum draft_causal causal,
                       struct draft_config *ret_config, struct report *report) {
    struct draft_config config = {0};
    struct config_file file;
    struct draft_keys keys;
    int r = config_file_parse(&file, path, text, n, report);

    if (r == 0) {
        keys.root = config_root(&file);
        keys.nested = config_child(&keys.root, "dflash_config", "dflash_config.");
        read_draft(&keys, causal, &config);
        r = file.error;
    }
    config_file_deinit(&file);
    if (r == 0)
        *ret_config = config;
    return r;
}

int draft_config_read(const char *path, enum draft_causal causal, struct draft_config *ret_config,
                      struct report *report) {
    char *text;
    size_t n;
    int r = config_file_text(path, &text, &n, report);

    if (r != 0)
        return r;
    r = draft_config_parse(path, text, n, causal, ret_config, report);
    free(text);
    return r;
}

int draft_config_check(const char *path, const struct draft_config *draft, const struct qwen_config *target,
                       struct report *report) {
    const char *name = report_path(path);

    if (draft->hidden != target->hidden)
        return report_error(report, -EINVAL, "%s: hidden_size is %d, but the target's is %d", name, draft->hidden,
                            target->hidden);
    if (draft->vocab != target->vocab)
        return report_error(report, -EINVAL, "%s: vocab_size is %d, but the target's is %d", name, draft->vocab,
                            target->vocab);
    if (draft->n_target_layers >= 0 && draft->n_target_layers != target->n_layers)
        return report_error(report, -EINVAL, "%s: num_target_layers is %d, but the target has %d", name,
                            draft->n_target_layers, target->n_layers);
    for (int i = 0; i < draft->n_taps; i++)
        if (draft->taps[i] > target->n_layers - 2)
            return report_error(report, -EINVAL,
                                "%s: target_layer_ids[%d] is %d, not in 0..%d (the target has %d layers)", name, i,
                                draft->taps[i], target->n_layers - 2, target->n_layers);
    return 0;
}
