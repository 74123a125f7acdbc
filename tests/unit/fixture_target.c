#include "fixture.h"
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { PROJ = 1 }; /* quantised in fp8 files */

struct writer {
    struct fixture *f;
    const struct fixture_style *style;
    char prefix[64];
};

/* rows 0: a vector; stack 0: a matrix. */
static void add(struct writer *w, int flags, int stack, int rows, int cols, const char *format, ...) {
    const bool fp8 = (flags & PROJ) && w->style->fp8;
    uint64_t dims[4] = {0};
    char name[200], scale[220];
    int n = 0;
    va_list args;

    va_start(args, format);
    snprintf(name, sizeof name, "%s", w->prefix);
    vsnprintf(name + strlen(name), sizeof name - strlen(name), format, args);
    va_end(args);
    if (stack)
        dims[n++] = (uint64_t)stack;
    if (rows)
        dims[n++] = (uint64_t)rows;
    dims[n++] = (uint64_t)cols;
    fixture_add(w->f, fp8 ? "F8_E4M3" : w->style->dtype, dims, name);
    if (!fp8)
        return;
    snprintf(scale, sizeof scale, "%s_scale_inv", name);
    dims[n - 1] = div_ceil((uint64_t)cols, 128);
    dims[n - 2] = div_ceil((uint64_t)rows, 128);
    fixture_add(w->f, w->style->scale_dtype, dims, scale);
}

static void add_attention(struct writer *w, const struct qwen_config *c) {
    add(w, PROJ, 0, c->n_heads * c->head_dim * (c->has_attn_gate ? 2 : 1), c->hidden, "self_attn.q_proj.weight");
    add(w, PROJ, 0, c->n_kv_heads * c->head_dim, c->hidden, "self_attn.k_proj.weight");
    add(w, PROJ, 0, c->n_kv_heads * c->head_dim, c->hidden, "self_attn.v_proj.weight");
    add(w, PROJ, 0, c->hidden, c->n_heads * c->head_dim, "self_attn.o_proj.weight");
    add(w, 0, 0, 0, c->head_dim, "self_attn.q_norm.weight");
    add(w, 0, 0, 0, c->head_dim, "self_attn.k_norm.weight");
}

static void add_delta_net(struct writer *w, const struct qwen_config *c) {
    int v = c->gdn_v_heads * c->gdn_head_dim_v, qkv = 2 * c->gdn_k_heads * c->gdn_head_dim_k + v;

    add(w, PROJ, 0, qkv, c->hidden, "linear_attn.in_proj_qkv.weight");
    add(w, PROJ, 0, v, c->hidden, "linear_attn.in_proj_z.weight");
    add(w, 0, 0, c->gdn_v_heads, c->hidden, "linear_attn.in_proj_b.weight");
    add(w, 0, 0, c->gdn_v_heads, c->hidden, "linear_attn.in_proj_a.weight");
    add(w, 0, qkv, 1, c->conv_taps, "linear_attn.conv1d.weight");
    add(w, 0, 0, 0, c->gdn_v_heads, "linear_attn.A_log");
    add(w, 0, 0, 0, c->gdn_v_heads, "linear_attn.dt_bias");
    add(w, 0, 0, 0, c->gdn_head_dim_v, "linear_attn.norm.weight");
    add(w, PROJ, 0, c->hidden, v, "linear_attn.out_proj.weight");
}

static void add_mlp(struct writer *w, int width, int hidden, const char *p) {
    add(w, PROJ, 0, width, hidden, "%sgate_proj.weight", p);
    add(w, PROJ, 0, width, hidden, "%sup_proj.weight", p);
    add(w, PROJ, 0, hidden, width, "%sdown_proj.weight", p);
}

static void add_moe(struct writer *w, const struct qwen_config *c) {
    add(w, 0, 0, c->n_experts, c->hidden, "mlp.gate.weight");
    add(w, 0, 0, 1, c->hidden, "mlp.shared_expert_gate.weight");
    add_mlp(w, c->shared_width, c->hidden, "mlp.shared_expert.");
    if (!w->style->per_expert) {
        add(w, PROJ, c->n_experts, 2 * c->moe_width, c->hidden, "mlp.experts.gate_up_proj");
        add(w, PROJ, c->n_experts, c->hidden, c->moe_width, "mlp.experts.down_proj");
        return;
    }
    for (int e = 0; e < c->n_experts; e++) {
        char p[64];

        snprintf(p, sizeof p, "mlp.experts.%d.", e);
        add_mlp(w, c->moe_width, c->hidden, p);
    }
}

void fixture_add_target(struct fixture *f, const struct qwen_config *c, const struct fixture_style *style) {
    const char *prefix = c->nested ? "model.language_model." : "model.";
    struct writer w = {.f = f, .style = style};

    if (!style->tied)
        add(&w, 0, 0, c->vocab, c->hidden, "lm_head.weight");
    snprintf(w.prefix, sizeof w.prefix, "%s", prefix);
    add(&w, 0, 0, c->vocab, c->hidden, "embed_tokens.weight");
    add(&w, 0, 0, 0, c->hidden, "norm.weight");
    for (int l = 0; l < c->n_layers; l++) {
        snprintf(w.prefix, sizeof w.prefix, "%slayers.%d.", prefix, l);
        add(&w, 0, 0, 0, c->hidden, "input_layernorm.weight");
        add(&w, 0, 0, 0, c->hidden, "post_attention_layernorm.weight");
        if (c->layers[l] == LAYER_FULL)
            add_attention(&w, c);
        else
            add_delta_net(&w, c);
        if (c->n_experts > 0)
            add_moe(&w, c);
        else
            add_mlp(&w, c->intermediate, c->hidden, "mlp.");
    }
}

struct qwen_config fixture_odd_config(bool moe) {
    struct qwen_config c = {.vocab = 777,
                            .hidden = 192,
                            .n_layers = 2,
                            .layers = {LAYER_LINEAR, LAYER_FULL},
                            .intermediate = moe ? 0 : 320,
                            .n_heads = 6,
                            .n_kv_heads = 2,
                            .head_dim = 256,
                            .rotary_dim = 64,
                            .rope_theta = 1e7,
                            .has_attn_gate = true,
                            .gdn_k_heads = 2,
                            .gdn_v_heads = 6,
                            .gdn_head_dim_k = 128,
                            .gdn_head_dim_v = 128,
                            .conv_taps = 4,
                            .rms_eps = 1e-6};

    if (moe) {
        c.n_experts = 3;
        c.top_k = 2;
        c.moe_width = 64;
        c.shared_width = 192;
    }
    return c;
}

void assert_same_tensor(const struct tensor *a, const struct tensor *b) {
    assert_int_equal(a->n_rows, b->n_rows);
    assert_int_equal(a->n_cols, b->n_cols);
    for (int row = 0; row < a->n_rows; row++)
        for (int col = 0; col < a->n_cols; col++)
            if (tensor_at(a, row, col) != tensor_at(b, row, col))
                fail_msg("[%d, %d]: %g and %g", row, col, (double)tensor_at(a, row, col),
                         (double)tensor_at(b, row, col));
}
