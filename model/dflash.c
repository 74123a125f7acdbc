#include "dflash.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static int kv_width(const struct draft_config *c) {
    return c->n_kv_heads * c->head_dim;
}

static int qkv_width(const struct draft_config *c) {
    return c->n_heads * c->head_dim + 2 * kv_width(c);
}

static int stacked_width(const struct draft_config *c) {
    return c->n_layers * 2 * kv_width(c);
}

void dflash_kv_members(const struct draft_config *c, enum dtype kv_dtype, struct kv_member *ret_members) {
    for (int i = 0; i < c->n_layers; i++)
        ret_members[i] = (struct kv_member){.group = c->sliding[i] ? KV_DRAFT_SLIDING : KV_DRAFT_FULL,
                                            .n_kv_heads = c->n_kv_heads,
                                            .head_dim = c->head_dim,
                                            .window = c->sliding[i] ? c->window : 0,
                                            .dtype = kv_dtype};
}

/* ---- loading ----------------------------------------------------------------------------------------------------- */

static void map_taps(struct dflash *draft) {
    const struct draft_config *c = &draft->config;

    for (int i = 0; i < LAYERS_MAX; i++)
        draft->tap_of_layer[i] = -1;
    draft->first_tap_layer = draft->last_tap_layer = c->taps[0];
    for (int i = 0; i < c->n_taps; i++) {
        draft->tap_of_layer[c->taps[i]] = i;
        draft->first_tap_layer = min_int(draft->first_tap_layer, c->taps[i]);
        draft->last_tap_layer = max_int(draft->last_tap_layer, c->taps[i]);
    }
}

static bool init_layer(struct dflash_layer *layer, const struct draft_config *c, struct devmem *mem,
                       const struct draft_layer_weights *w) {
    layer->input_norm = pack_vector(mem, &w->input_norm, false);
    layer->post_norm = pack_vector(mem, &w->post_norm, false);
    layer->q_norm = pack_vector(mem, &w->q_norm, false);
    layer->k_norm = pack_vector(mem, &w->k_norm, false);
    layer->qkv = pack_rows(mem, (const struct tensor *const[]){&w->q, &w->k, &w->v}, 3);
    layer->o = pack_matrix(mem, &w->o);
    layer->gate_up = pack_gate_up(mem, &w->gate, &w->up);
    layer->down = pack_matrix(mem, &w->down);
    if (c->has_bias) {
        layer->qkv_bias =
            pack_vectors(mem, (const struct tensor *const[]){&w->q_bias, &w->k_bias, &w->v_bias}, 3, false);
        layer->o_bias = pack_vector(mem, &w->o_bias, false);
        if (!layer->qkv_bias || !layer->o_bias)
            return false;
    }
    return layer->input_norm && layer->post_norm && layer->q_norm && layer->k_norm && layer->qkv && layer->o &&
           layer->gate_up && layer->down;
}

static bool init_context(struct dflash *draft, struct devmem *mem, const struct draft_weights *w) {
    const struct draft_config *c = &draft->config;
    const struct tensor *stacked[2 * DRAFT_LAYERS_MAX], *bias[2 * DRAFT_LAYERS_MAX];

    for (int i = 0; i < c->n_taps; i++) {
        struct tensor columns = tensor_cols(w->fc, i * c->hidden, c->hidden);

        draft->fc[i] = pack_matrix(mem, &columns);
        if (!draft->fc[i])
            return false;
    }
    for (int i = 0; i < c->n_layers; i++) {
        stacked[2 * i] = &w->layers[i].k;
        stacked[2 * i + 1] = &w->layers[i].v;
        bias[2 * i] = &w->layers[i].k_bias;
        bias[2 * i + 1] = &w->layers[i].v_bias;
    }
    draft->wkv = pack_rows(mem, stacked, 2 * c->n_layers);
    draft->wkv_bias = c->has_bias ? pack_vectors(mem, bias, 2 * c->n_layers, false) : NULL;
    draft->hidden_norm = pack_vector(mem, &w->hidden_norm, false);
    draft->norm = pack_vector(mem, &w->norm, false);
    draft->rope = (struct rope_table){pack_inv_freq(mem, c->rope_theta, c->rotary_dim), c->rotary_dim};
    return draft->wkv && (!c->has_bias || draft->wkv_bias) && draft->hidden_norm && draft->norm && draft->rope.inv_freq;
}

int dflash_init(struct dflash *draft, const struct backend *backend, struct device *device, struct stream *stream,
                const struct draft_config *config, const struct draft_weights *weights, struct report *report) {
    struct devmem *mem = &draft->mem;
    int n_full = 0, n_sliding = 0;
    bool ok;
    int r;

    *draft = (struct dflash){.config = *config};
    devmem_init(mem, backend, device, stream);
    map_taps(draft);
    draft->layers = calloc((size_t)config->n_layers, sizeof *draft->layers);
    ok = draft->layers != NULL;
    for (int i = 0; ok && i < config->n_layers; i++) {
        struct dflash_layer *layer = &draft->layers[i];

        /* Full-attention layers are always bidirectional inside the block; causality concerns sliding layers only. */
        layer->group = config->sliding[i] ? KV_DRAFT_SLIDING : KV_DRAFT_FULL;
        layer->idx = config->sliding[i] ? n_sliding++ : n_full++;
        layer->block_causal = config->sliding[i] && config->sliding_causal;
        layer->window = config->sliding[i] ? config->window : 0;
        ok = init_layer(layer, config, mem, &weights->layers[i]);
    }
    if (ok && init_context(draft, mem, weights))
        return 0;
    r = mem->error ? mem->error : -ENOMEM;
    report_error(report, r, "drafter: the device did not take its weights (%zu MiB were placed): %s",
                 (devmem_weight_bytes(mem) + devmem_bytes(mem, MEM_DEVICE)) >> 20, strerror(-r));
    dflash_deinit(draft);
    return r;
}

void dflash_deinit(struct dflash *draft) {
    if (draft->mem.backend)
        devmem_deinit(&draft->mem);
    free(draft->layers);
    *draft = (struct dflash){0};
}

bool dflash_buffers_take(struct dflash_buffers *b, const struct draft_config *c, struct devmem *mem,
                         enum dtype act_dtype, int n_rows_max, int n_block_rows_max) {
    size_t row = (size_t)n_block_rows_max * dtype_bytes(act_dtype);

    b->fc_acc = devmem_take(mem, MEM_DEVICE, (size_t)n_rows_max * (size_t)c->hidden * sizeof(float));
    b->kv_rows = devmem_take(mem, MEM_DEVICE, (size_t)n_rows_max * (size_t)stacked_width(c) * sizeof(float));
    b->x = devmem_take(mem, MEM_DEVICE, row * (size_t)c->hidden);
    b->qkv = devmem_take(mem, MEM_DEVICE, row * (size_t)qkv_width(c));
    b->q = devmem_take(mem, MEM_DEVICE, row * (size_t)(c->n_heads * c->head_dim));
    b->attn = devmem_take(mem, MEM_DEVICE, row * (size_t)(c->n_heads * c->head_dim));
    b->block_k = devmem_take(mem, MEM_DEVICE, row * (size_t)kv_width(c));
    b->block_v = devmem_take(mem, MEM_DEVICE, row * (size_t)kv_width(c));
    b->ffn = devmem_take(mem, MEM_DEVICE, row * (size_t)c->intermediate);
    return b->fc_acc && b->kv_rows && b->x && b->qkv && b->q && b->attn && b->block_k && b->block_v && b->ffn;
}

/* ---- the network ------------------------------------------------------------------------------------------------- */

void dflash_after_layer(void *dflash_tap, struct recorder *rec, int layer) {
    const struct dflash_tap *tap = dflash_tap;
    const struct dflash *draft = tap->draft;
    const struct draft_config *c = &draft->config;
    int i = draft->tap_of_layer[layer];

    if (i < 0)
        return;
    record_linear(rec, &(struct linear_args){
                           .batch = tap->batch,
                           .x = tap->x,
                           .x_stride = c->hidden,
                           .n_outs = 1,
                           .out = {{.weight = draft->fc[i],
                                    .epilogue = layer == draft->first_tap_layer ? LINEAR_STORE_F32 : LINEAR_ADD_F32,
                                    .y = tap->buffers->fc_acc,
                                    .y_stride = c->hidden}},
                           .aux = true});
    if (layer != draft->last_tap_layer)
        return;
    record_linear(rec, &(struct linear_args){.batch = tap->batch,
                                             .x = tap->buffers->fc_acc,
                                             .x_stride = c->hidden,
                                             .x_is_f32 = true,
                                             .norm = draft->hidden_norm,
                                             .eps = (float)c->rms_eps,
                                             .n_outs = 1,
                                             .out = {{.weight = draft->wkv,
                                                      .bias = draft->wkv_bias,
                                                      .epilogue = LINEAR_STORE_F32,
                                                      .y = tap->buffers->kv_rows,
                                                      .y_stride = stacked_width(c)}},
                                             .aux = true});
}

static const struct kv_view *group_view(const struct dflash_layer *layer, const struct kv_view *full,
                                        const struct kv_view *sliding) {
    return layer->group == KV_DRAFT_SLIDING ? sliding : full;
}

void dflash_record_context(struct recorder *rec, const struct dflash *draft, const struct dflash_buffers *buffers,
                           const struct batch *batch, const int32_t *seg_commit, const struct kv_view *full,
                           const struct kv_view *sliding) {
    const struct draft_config *c = &draft->config;
    struct draft_kv_layer layers[DRAFT_LAYERS_MAX];

    for (int i = 0; i < c->n_layers; i++)
        layers[i] = (struct draft_kv_layer){.kv = group_view(&draft->layers[i], full, sliding),
                                            .layer = draft->layers[i].idx,
                                            .k_norm = draft->layers[i].k_norm};
    record_join(rec);
    record_draft_kv(rec, &(struct draft_kv_args){.batch = batch,
                                                 .kv_rows = buffers->kv_rows,
                                                 .n_layers = c->n_layers,
                                                 .n_kv_heads = c->n_kv_heads,
                                                 .head_dim = c->head_dim,
                                                 .eps = (float)c->rms_eps,
                                                 .rope = draft->rope,
                                                 .seg_commit = seg_commit,
                                                 .layers = layers});
}

static void record_block_layer(struct recorder *rec, const struct dflash *draft, const struct dflash_layer *layer,
                               const struct dflash_buffers *b, const struct batch *batch, const struct seq_ctl *ctl,
                               const struct kv_view *kv) {
    const struct draft_config *c = &draft->config;
    float eps = (float)c->rms_eps;

    record_linear(rec,
                  &(struct linear_args){
                      .batch = batch,
                      .x = b->x,
                      .x_stride = c->hidden,
                      .norm = layer->input_norm,
                      .eps = eps,
                      .n_outs = 1,
                      .out = {{.weight = layer->qkv, .bias = layer->qkv_bias, .y = b->qkv, .y_stride = qkv_width(c)}}});
    record_qk(rec, &(struct qk_args){.batch = batch,
                                     .qkv = b->qkv,
                                     .qkv_stride = qkv_width(c),
                                     .n_heads = c->n_heads,
                                     .n_kv_heads = c->n_kv_heads,
                                     .head_dim = c->head_dim,
                                     .q_norm = layer->q_norm,
                                     .k_norm = layer->k_norm,
                                     .eps = eps,
                                     .rope = draft->rope,
                                     .q = b->q,
                                     .block_k = b->block_k,
                                     .block_v = b->block_v});
    record_attn(rec, &(struct attn_args){.batch = batch,
                                         .q = b->q,
                                         .n_heads = c->n_heads,
                                         .n_kv_heads = c->n_kv_heads,
                                         .head_dim = c->head_dim,
                                         .kv = kv,
                                         .layer = layer->idx,
                                         .block_k = b->block_k,
                                         .block_v = b->block_v,
                                         .block_causal = layer->block_causal,
                                         .window = layer->window,
                                         .ctl = ctl,
                                         .out = b->attn});
    record_linear(rec, &(struct linear_args){.batch = batch,
                                             .x = b->attn,
                                             .x_stride = c->n_heads * c->head_dim,
                                             .n_outs = 1,
                                             .out = {{.weight = layer->o,
                                                      .bias = layer->o_bias,
                                                      .epilogue = LINEAR_ADD,
                                                      .y = b->x,
                                                      .y_stride = c->hidden}}});
    record_linear(
        rec,
        &(struct linear_args){
            .batch = batch,
            .x = b->x,
            .x_stride = c->hidden,
            .norm = layer->post_norm,
            .eps = eps,
            .n_outs = 1,
            .out = {{.weight = layer->gate_up, .epilogue = LINEAR_SWIGLU, .y = b->ffn, .y_stride = c->intermediate}}});
    record_linear(rec, &(struct linear_args){
                           .batch = batch,
                           .x = b->ffn,
                           .x_stride = c->intermediate,
                           .n_outs = 1,
                           .out = {{.weight = layer->down, .epilogue = LINEAR_ADD, .y = b->x, .y_stride = c->hidden}}});
}

void dflash_record_block(struct recorder *rec, const struct dflash *draft, const struct dflash_buffers *buffers,
                         const struct batch *batch, const struct weight *embed, const struct seq_ctl *ctl,
                         const struct kv_view *full, const struct kv_view *sliding) {
    record_embed(rec, &(struct embed_args){.batch = batch, .table = embed, .x = buffers->x});
    for (int i = 0; i < draft->config.n_layers; i++)
        record_block_layer(rec, draft, &draft->layers[i], buffers, batch, ctl,
                           group_view(&draft->layers[i], full, sliding));
}
