#include "dummy.h"
#include "take.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct loader {
    struct take take;
    const struct draft_config *config;
    const char *prefix; /* "" or "model." */
};

static bool ends_with(const char *s, const char *suffix) {
    size_t n = strlen(s), n_suffix = strlen(suffix);

    return n >= n_suffix && strcmp(s + n - n_suffix, suffix) == 0;
}

static bool is_skipped(const char *name) {
    return ends_with(name, "rotary_emb.inv_freq");
}

/* Parts that other drafters of the family have. To ignore one would load a network that drafts nonsense. */
static void refuse_foreign(struct take *t) {
    static const struct {
        const char *part, *what;
    } foreign[] = {
        {"embed_tokens", "an embedding of its own"}, {"lm_head", "an output head of its own"},
        {"d2t", "a vocabulary of its own"},          {"t2d", "a vocabulary of its own"},
        {"mask_embedding", "a mask embedding"},      {"sink", "attention sinks"},
    };
    char *path;

    for (size_t i = 0; i < t->checkpoint->n_tensors; i++)
        for (size_t k = 0; k < ARRAY_LEN(foreign); k++)
            if (strstr(t->checkpoint->tensors[i].entry->name, foreign[k].part))
                take_refuse(t, "%s: %s: a drafter with %s is unsupported", t->checkpoint->tensors[i].file->name,
                            t->checkpoint->tensors[i].entry->name, foreign[k].what);
    if (t->checkpoint->dummy || asprintf(&path, "%s/mask_embedding.pt", t->checkpoint->folder) < 0)
        return;
    if (access(path, F_OK) == 0)
        take_refuse(t, "%s: a drafter with a mask embedding is unsupported", report_path(path));
    free(path);
}

static void check_division(struct loader *l) {
    take_divide(&l->take, "num_attention_heads", l->config->n_heads);
    take_divide(&l->take, "num_key_value_heads", l->config->n_kv_heads);
    take_divide(&l->take, "intermediate_size", l->config->intermediate);
}

static void load_biases(struct loader *l, int i, struct draft_layer_weights *w) {
    const struct draft_config *c = l->config;
    struct take *t = &l->take;
    struct tensor o;
    char p[64];

    snprintf(p, sizeof p, "%slayers.%d.self_attn.", l->prefix, i);
    w->q_bias = take_vector(t, TAKE_NEAR_ZERO, CUT_COLS, c->n_heads * c->head_dim, "%sq_proj.bias", p);
    w->k_bias = take_vector(t, TAKE_NEAR_ZERO, CUT_COLS, c->n_kv_heads * c->head_dim, "%sk_proj.bias", p);
    w->v_bias = take_vector(t, TAKE_NEAR_ZERO, CUT_COLS, c->n_kv_heads * c->head_dim, "%sv_proj.bias", p);
    o = take_vector(t, TAKE_NEAR_ZERO, CUT_NONE, c->hidden, "%so_proj.bias", p);
    if (t->shard.rank == 0) /* the sum over ranks must have it once */
        w->o_bias = o;
}

static void load_layer(struct loader *l, int i, struct draft_layer_weights *w) {
    const struct draft_config *c = l->config;
    int q_rows = c->n_heads * c->head_dim, kv_rows = c->n_kv_heads * c->head_dim;
    struct take *t = &l->take;
    char p[64];

    snprintf(p, sizeof p, "%slayers.%d.", l->prefix, i);
    w->input_norm = take_vector(t, TAKE_NEAR_ONE, CUT_NONE, c->hidden, "%sinput_layernorm.weight", p);
    w->post_norm = take_vector(t, TAKE_NEAR_ONE, CUT_NONE, c->hidden, "%spost_attention_layernorm.weight", p);
    w->q = take_matrix(t, TAKE_PROJ, CUT_ROWS, q_rows, c->hidden, "%sself_attn.q_proj.weight", p);
    w->k = take_matrix(t, TAKE_PROJ, CUT_ROWS, kv_rows, c->hidden, "%sself_attn.k_proj.weight", p);
    w->v = take_matrix(t, TAKE_PROJ, CUT_ROWS, kv_rows, c->hidden, "%sself_attn.v_proj.weight", p);
    w->o = take_matrix(t, TAKE_PROJ, CUT_COLS, c->hidden, q_rows, "%sself_attn.o_proj.weight", p);
    w->q_norm = take_vector(t, TAKE_NEAR_ONE, CUT_NONE, c->head_dim, "%sself_attn.q_norm.weight", p);
    w->k_norm = take_vector(t, TAKE_NEAR_ONE, CUT_NONE, c->head_dim, "%sself_attn.k_norm.weight", p);
    w->gate = take_matrix(t, TAKE_PROJ, CUT_ROWS, c->intermediate, c->hidden, "%smlp.gate_proj.weight", p);
    w->up = take_matrix(t, TAKE_PROJ, CUT_ROWS, c->intermediate, c->hidden, "%smlp.up_proj.weight", p);
    w->down = take_matrix(t, TAKE_PROJ, CUT_COLS, c->hidden, c->intermediate, "%smlp.down_proj.weight", p);
    if (c->has_bias)
        load_biases(l, i, w);
}

int draft_weights_load(struct checkpoint *checkpoint, const struct draft_config *config, struct shard_of shard,
                       struct draft_weights *ret_weights, struct report *report) {
    struct loader l = {.config = config, .prefix = ""};
    struct draft_weights w = {0};
    struct take *t = &l.take;
    int r = take_init(t, checkpoint, shard, report);

    if (r == 0) {
        w.layers = calloc((size_t)config->n_layers, sizeof *w.layers);
        if (!w.layers)
            r = report_error(report, -ENOMEM, "%s: out of memory", checkpoint->name);
    }
    if (r == 0) {
        if (!take_has(t, "fc.weight") && take_has(t, "model.fc.weight"))
            l.prefix = "model.";
        refuse_foreign(t);
        check_division(&l);
        w.fc = take_matrix(t, TAKE_PROJ, CUT_NONE, config->hidden, config->n_taps * config->hidden, "%sfc.weight",
                           l.prefix);
        w.hidden_norm = take_vector(t, TAKE_NEAR_ONE, CUT_NONE, config->hidden, "%shidden_norm.weight", l.prefix);
        w.norm = take_vector(t, TAKE_NEAR_ONE, CUT_NONE, config->hidden, "%snorm.weight", l.prefix);
        for (int i = 0; i < config->n_layers && t->error == 0; i++)
            load_layer(&l, i, &w.layers[i]);
        take_finish(t, is_skipped);
        r = t->error;
    }
    take_deinit(t);
    if (r != 0) {
        draft_weights_deinit(&w);
        return r;
    }
    *ret_weights = w;
    return 0;
}

void draft_weights_deinit(struct draft_weights *w) {
    free(w->layers);
    *w = (struct draft_weights){0};
}

int draft_weights_dummy(const struct draft_config *c, uint64_t seed, struct checkpoint **ret_checkpoint,
                        struct draft_weights *ret_weights, struct report *report) {
    int widest = max_int(max_int(c->hidden, c->intermediate), c->n_heads * c->head_dim);
    struct dummy_shape shape = {
        .rows_max = widest, .cols_max = max_int(widest, c->n_taps * c->hidden), .hidden = c->hidden, .fp8 = false};
    struct checkpoint *checkpoint;
    int r = checkpoint_dummy(&shape, seed, &checkpoint, report);

    if (r != 0)
        return r;
    r = draft_weights_load(checkpoint, c, (struct shard_of){0, 1}, ret_weights, report);
    if (r != 0)
        checkpoint_close(checkpoint);
    else
        *ret_checkpoint = checkpoint;
    return r;
}
