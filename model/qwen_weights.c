#include "dummy.h"
#include "take.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* What the layers of one model have in common. */
struct loader {
    struct take take;
    const struct qwen_config *config;
    const char *prefix; /* of decoder tensors */
};

static bool starts_with(const char *s, const char *prefix) {
    return strncmp(s, prefix, strlen(prefix)) == 0;
}

static bool ends_with(const char *s, const char *suffix) {
    size_t n = strlen(s), n_suffix = strlen(suffix);

    return n >= n_suffix && strcmp(s + n - n_suffix, suffix) == 0;
}

/* Parts of the published checkpoints that this server does not run. */
static bool is_skipped(const char *name) {
    return starts_with(name, "model.visual.") || starts_with(name, "mtp.") || ends_with(name, "rotary_emb.inv_freq");
}

static void check_division(struct loader *l) {
    const struct qwen_config *c = l->config;
    struct take *t = &l->take;

    take_divide(t, "num_attention_heads", c->n_heads);
    take_divide(t, "num_key_value_heads", c->n_kv_heads);
    take_divide(t, "linear_num_key_heads", c->gdn_k_heads);
    take_divide(t, "linear_num_value_heads", c->gdn_v_heads);
    take_divide(t, "intermediate_size", c->intermediate);
    take_divide(t, "moe_intermediate_size", c->moe_width);
    take_divide(t, "shared_expert_intermediate_size", c->shared_width);
}

static void load_attention(struct loader *l, int i, struct qwen_layer_weights *w) {
    const struct qwen_config *c = l->config;
    int q_rows = c->n_heads * c->head_dim * (c->has_attn_gate ? 2 : 1), kv_rows = c->n_kv_heads * c->head_dim;
    struct take *t = &l->take;
    char p[64];

    snprintf(p, sizeof p, "%slayers.%d.self_attn.", l->prefix, i);
    w->q = take_matrix(t, TAKE_PROJ, CUT_ROWS, q_rows, c->hidden, "%sq_proj.weight", p);
    w->k = take_matrix(t, TAKE_PROJ, CUT_ROWS, kv_rows, c->hidden, "%sk_proj.weight", p);
    w->v = take_matrix(t, TAKE_PROJ, CUT_ROWS, kv_rows, c->hidden, "%sv_proj.weight", p);
    w->o = take_matrix(t, TAKE_PROJ, CUT_COLS, c->hidden, c->n_heads * c->head_dim, "%so_proj.weight", p);
    w->q_norm = take_vector(t, TAKE_NEAR_ZERO, CUT_NONE, c->head_dim, "%sq_norm.weight", p);
    w->k_norm = take_vector(t, TAKE_NEAR_ZERO, CUT_NONE, c->head_dim, "%sk_norm.weight", p);
}

static void load_delta_net(struct loader *l, int i, struct qwen_layer_weights *w) {
    const struct qwen_config *c = l->config;
    int k_rows = c->gdn_k_heads * c->gdn_head_dim_k, v_rows = c->gdn_v_heads * c->gdn_head_dim_v;
    const int begin[3] = {0, k_rows, 2 * k_rows}, n[3] = {k_rows, k_rows, v_rows};
    struct take *t = &l->take;
    struct tensor qkv;
    char p[64];

    snprintf(p, sizeof p, "%slayers.%d.linear_attn.", l->prefix, i);
    qkv = take_matrix(t, TAKE_PROJ, CUT_NONE, 2 * k_rows + v_rows, c->hidden, "%sin_proj_qkv.weight", p);
    w->conv = take_conv(t, 2 * k_rows + v_rows, c->conv_taps, "%sconv1d.weight", p);
    for (int k = 0; k < 3; k++) {
        w->in_qkv[k] = take_share(t, qkv, CUT_ROWS, begin[k], n[k], "in_proj_qkv.weight");
        w->conv_qkv[k] = take_share(t, w->conv, CUT_ROWS, begin[k], n[k], "conv1d.weight");
    }
    w->in_z = take_matrix(t, TAKE_PROJ, CUT_ROWS, v_rows, c->hidden, "%sin_proj_z.weight", p);
    w->in_b = take_matrix(t, TAKE_MATRIX, CUT_ROWS, c->gdn_v_heads, c->hidden, "%sin_proj_b.weight", p);
    w->in_a = take_matrix(t, TAKE_MATRIX, CUT_ROWS, c->gdn_v_heads, c->hidden, "%sin_proj_a.weight", p);
    w->a_log = take_vector(t, TAKE_A_LOG, CUT_COLS, c->gdn_v_heads, "%sA_log", p);
    w->dt_bias = take_vector(t, TAKE_DT_BIAS, CUT_COLS, c->gdn_v_heads, "%sdt_bias", p);
    w->gdn_norm = take_vector(t, TAKE_NEAR_ONE, CUT_NONE, c->gdn_head_dim_v, "%snorm.weight", p);
    w->gdn_out = take_matrix(t, TAKE_PROJ, CUT_COLS, c->hidden, v_rows, "%sout_proj.weight", p);
}

/* One tensor for all experts: [E, 2 * width, H] gate rows then up rows, and [E, H, width]. */
static void load_fused_experts(struct loader *l, const char *p, struct qwen_layer_weights *w) {
    const struct qwen_config *c = l->config;
    struct take *t = &l->take;
    struct tensor gate_up, down;

    gate_up = take_stack(t, c->n_experts, 2 * c->moe_width, c->hidden, "%sexperts.gate_up_proj", p);
    down = take_stack(t, c->n_experts, c->hidden, c->moe_width, "%sexperts.down_proj", p);
    for (int e = 0; e < c->n_experts && t->error == 0; e++) {
        struct tensor both = take_stack_at(gate_up, e);

        w->experts[e].gate = take_share(t, both, CUT_ROWS, 0, c->moe_width, "experts.gate_up_proj");
        w->experts[e].up = take_share(t, both, CUT_ROWS, c->moe_width, c->moe_width, "experts.gate_up_proj");
        w->experts[e].down = take_share(t, take_stack_at(down, e), CUT_COLS, 0, c->moe_width, "experts.down_proj");
    }
}

static void load_moe(struct loader *l, int i, struct qwen_layer_weights *w) {
    const struct qwen_config *c = l->config;
    struct take *t = &l->take;
    char p[64];

    snprintf(p, sizeof p, "%slayers.%d.mlp.", l->prefix, i);
    w->experts = calloc((size_t)c->n_experts, sizeof *w->experts);
    if (!w->experts) {
        if (t->error == 0)
            t->error = report_error(t->report, -ENOMEM, "%s: out of memory", t->checkpoint->name);
        return;
    }
    w->router = take_matrix(t, TAKE_MATRIX, CUT_NONE, c->n_experts, c->hidden, "%sgate.weight", p);
    w->shared_router = take_matrix(t, TAKE_MATRIX, CUT_NONE, 1, c->hidden, "%sshared_expert_gate.weight", p);
    w->shared_gate =
        take_matrix(t, TAKE_PROJ, CUT_ROWS, c->shared_width, c->hidden, "%sshared_expert.gate_proj.weight", p);
    w->shared_up = take_matrix(t, TAKE_PROJ, CUT_ROWS, c->shared_width, c->hidden, "%sshared_expert.up_proj.weight", p);
    w->shared_down =
        take_matrix(t, TAKE_PROJ, CUT_COLS, c->hidden, c->shared_width, "%sshared_expert.down_proj.weight", p);
    /* 16-bit checkpoints have the experts fused, FP8 ones apart. */
    if (take_has(t, "%sexperts.gate_up_proj", p) || take_has(t, "%sexperts.down_proj", p)) {
        load_fused_experts(l, p, w);
        return;
    }
    for (int e = 0; e < c->n_experts && t->error == 0; e++) {
        struct expert_weights *x = &w->experts[e];

        x->gate = take_matrix(t, TAKE_PROJ, CUT_ROWS, c->moe_width, c->hidden, "%sexperts.%d.gate_proj.weight", p, e);
        x->up = take_matrix(t, TAKE_PROJ, CUT_ROWS, c->moe_width, c->hidden, "%sexperts.%d.up_proj.weight", p, e);
        x->down = take_matrix(t, TAKE_PROJ, CUT_COLS, c->hidden, c->moe_width, "%sexperts.%d.down_proj.weight", p, e);
    }
}

static void load_dense(struct loader *l, int i, struct qwen_layer_weights *w) {
    const struct qwen_config *c = l->config;
    struct take *t = &l->take;
    char p[64];

    snprintf(p, sizeof p, "%slayers.%d.mlp.", l->prefix, i);
    w->gate = take_matrix(t, TAKE_PROJ, CUT_ROWS, c->intermediate, c->hidden, "%sgate_proj.weight", p);
    w->up = take_matrix(t, TAKE_PROJ, CUT_ROWS, c->intermediate, c->hidden, "%sup_proj.weight", p);
    w->down = take_matrix(t, TAKE_PROJ, CUT_COLS, c->hidden, c->intermediate, "%sdown_proj.weight", p);
}

static void load_layer(struct loader *l, int i, struct qwen_layer_weights *w) {
    const struct qwen_config *c = l->config;
    struct take *t = &l->take;

    w->input_norm =
        take_vector(t, TAKE_NEAR_ZERO, CUT_NONE, c->hidden, "%slayers.%d.input_layernorm.weight", l->prefix, i);
    if (c->layers[i] == LAYER_FULL)
        load_attention(l, i, w);
    else
        load_delta_net(l, i, w);
    w->post_norm = take_vector(t, TAKE_NEAR_ZERO, CUT_NONE, c->hidden, "%slayers.%d.post_attention_layernorm.weight",
                               l->prefix, i);
    if (c->n_experts > 0)
        load_moe(l, i, w);
    else
        load_dense(l, i, w);
}

/* The file decides by what it has, and must then agree with the config, where an absent key means untied. */
static void load_head(struct loader *l, struct qwen_weights *w) {
    const struct qwen_config *c = l->config;
    struct take *t = &l->take;
    bool has_head = t->checkpoint->dummy ? !c->tied_key : take_has(t, "lm_head.weight");

    w->embed = take_matrix(t, TAKE_TABLE, CUT_NONE, c->vocab, c->hidden, "%sembed_tokens.weight", l->prefix);
    w->final_norm = take_vector(t, TAKE_NEAR_ZERO, CUT_NONE, c->hidden, "%snorm.weight", l->prefix);
    w->tied = !has_head;
    if (w->tied && c->has_tied_key && !c->tied_key)
        take_refuse(t, "%s: lm_head.weight: missing, but tie_word_embeddings is false", t->checkpoint->name);
    if (w->tied && !c->has_tied_key && !c->ambiguous_tied_key)
        take_refuse(t, "%s: lm_head.weight: missing, and config.json does not say tie_word_embeddings",
                    t->checkpoint->name);
    if (!w->tied && c->tied_key)
        take_refuse(t, "%s: lm_head.weight: present, but tie_word_embeddings is true", t->checkpoint->name);
    w->lm_head = w->tied ? w->embed : take_matrix(t, TAKE_MATRIX, CUT_NONE, c->vocab, c->hidden, "lm_head.weight");
}

int qwen_weights_load(struct checkpoint *checkpoint, const struct qwen_config *config, struct shard_of shard,
                      struct qwen_weights *ret_weights, struct report *report) {
    struct loader l = {.config = config, .prefix = config->nested ? "model.language_model." : "model."};
    struct qwen_weights w = {0};
    int r = take_init(&l.take, checkpoint, shard, report);

    if (r == 0) {
        w.layers = calloc((size_t)config->n_layers, sizeof *w.layers);
        w.n_layers = config->n_layers;
        if (!w.layers)
            r = report_error(report, -ENOMEM, "%s: out of memory", checkpoint->name);
    }
    if (r == 0) {
        check_division(&l);
        load_head(&l, &w);
        for (int i = 0; i < config->n_layers && l.take.error == 0; i++)
            load_layer(&l, i, &w.layers[i]);
        take_finish(&l.take, is_skipped);
        w.n_skipped = l.take.n_skipped;
        w.skipped_bytes = l.take.skipped_bytes;
        r = l.take.error;
    }
    take_deinit(&l.take);
    if (r != 0) {
        qwen_weights_deinit(&w);
        return r;
    }
    *ret_weights = w;
    return 0;
}

void qwen_weights_deinit(struct qwen_weights *w) {
    for (int i = 0; w->layers && i < w->n_layers; i++)
        free(w->layers[i].experts);
    free(w->layers);
    *w = (struct qwen_weights){0};
}

int qwen_weights_dummy(const struct qwen_config *c, uint64_t seed, struct checkpoint **ret_checkpoint,
                       struct qwen_weights *ret_weights, struct report *report) {
    int attention = c->n_heads * c->head_dim * 2, gdn_k = c->gdn_k_heads * c->gdn_head_dim_k,
        gdn_v = c->gdn_v_heads * c->gdn_head_dim_v;
    int cols = max_int(max_int(c->hidden, attention),
                       max_int(gdn_v, max_int(c->intermediate, max_int(c->moe_width, c->shared_width))));
    struct dummy_shape shape = {.rows_max = max_int(max_int(c->vocab, c->n_experts), max_int(cols, 2 * gdn_k + gdn_v)),
                                .cols_max = cols,
                                .hidden = c->hidden,
                                .fp8 = c->fp8};
    struct checkpoint *checkpoint;
    int r = checkpoint_dummy(&shape, seed, &checkpoint, report);

    if (r != 0)
        return r;
    r = qwen_weights_load(checkpoint, c, (struct shard_of){0, 1}, ret_weights, report);
    if (r != 0)
        checkpoint_close(checkpoint);
    else
        *ret_checkpoint = checkpoint;
    return r;
}
