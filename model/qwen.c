#include "qwen.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

int qwen_conv_dim(const struct qwen_config *c) {
    return 2 * c->gdn_k_heads * c->gdn_head_dim_k + qwen_value_dim(c);
}

int qwen_value_dim(const struct qwen_config *c) {
    return c->gdn_v_heads * c->gdn_head_dim_v;
}

int qwen_qkv_width(const struct qwen_config *c) {
    return (c->n_heads * (c->has_attn_gate ? 2 : 1) + 2 * c->n_kv_heads) * c->head_dim;
}

struct state_view qwen_state_view(const struct qwen_config *c) {
    int n_gdn = 0;

    for (int i = 0; i < c->n_layers; i++)
        n_gdn += c->layers[i] == LAYER_LINEAR;
    return (struct state_view){.n_layers = n_gdn,
                               .n_k_heads = c->gdn_k_heads,
                               .n_v_heads = c->gdn_v_heads,
                               .head_dim_k = c->gdn_head_dim_k,
                               .head_dim_v = c->gdn_head_dim_v,
                               .conv_taps = c->conv_taps};
}

int qwen_kv_members(const struct qwen_config *c, enum dtype kv_dtype, struct kv_member *ret_members) {
    int n = 0;

    for (int i = 0; i < c->n_layers; i++)
        if (c->layers[i] == LAYER_FULL)
            ret_members[n++] = (struct kv_member){
                .group = KV_TARGET_FULL, .n_kv_heads = c->n_kv_heads, .head_dim = c->head_dim, .dtype = kv_dtype};
    return n;
}

/* ---- loading ----------------------------------------------------------------------------------------------------- */

static const float *upload_neg_a(struct devmem *mem, const struct tensor *a_log) {
    int n = a_log->n_rows * a_log->n_cols;
    float *values = malloc((size_t)n * sizeof *values + 1);
    const float *uploaded;

    if (!values)
        return NULL;
    for (int i = 0; i < n; i++)
        values[i] = (float)-exp((double)tensor_at(a_log, 0, i));
    uploaded = devmem_upload(mem, values, (size_t)n * sizeof *values);
    free(values);
    return uploaded;
}

static bool init_full(struct qwen_layer *layer, struct devmem *mem, const struct qwen_layer_weights *w) {
    layer->qkv = pack_rows(mem, (const struct tensor *const[]){&w->q, &w->k, &w->v}, 3);
    layer->o = pack_matrix(mem, &w->o);
    layer->q_norm = pack_vector(mem, &w->q_norm, true);
    layer->k_norm = pack_vector(mem, &w->k_norm, true);
    return layer->qkv && layer->o && layer->q_norm && layer->k_norm;
}

static bool init_gdn(struct qwen_layer *layer, struct devmem *mem, const struct qwen_layer_weights *w) {
    layer->in_mz =
        pack_rows(mem, (const struct tensor *const[]){&w->in_qkv[0], &w->in_qkv[1], &w->in_qkv[2], &w->in_z}, 4);
    layer->in_ba = pack_rows(mem, (const struct tensor *const[]){&w->in_b, &w->in_a}, 2);
    layer->gdn_out = pack_matrix(mem, &w->gdn_out);
    layer->conv =
        pack_vectors(mem, (const struct tensor *const[]){&w->conv_qkv[0], &w->conv_qkv[1], &w->conv_qkv[2]}, 3, false);
    layer->neg_a = upload_neg_a(mem, &w->a_log);
    layer->dt_bias = pack_vector(mem, &w->dt_bias, false);
    layer->gdn_norm = pack_vector(mem, &w->gdn_norm, false); /* plain w, unlike every other norm of the target */
    return layer->in_mz && layer->in_ba && layer->gdn_out && layer->conv && layer->neg_a && layer->dt_bias &&
           layer->gdn_norm;
}

static bool init_ffn(struct qwen_layer *layer, struct devmem *mem, const struct qwen_layer_weights *w, int n_experts) {
    if (n_experts == 0) {
        layer->gate_up = pack_gate_up(mem, &w->gate, &w->up);
        layer->down = pack_matrix(mem, &w->down);
        return layer->gate_up && layer->down;
    }
    layer->router = pack_rows(mem, (const struct tensor *const[]){&w->router, &w->shared_router}, 2);
    layer->experts_gate_up = pack_experts(mem, WEIGHT_GATE_UP, w->experts, n_experts);
    layer->experts_down = pack_experts(mem, WEIGHT_ROWS, w->experts, n_experts);
    layer->shared_gate_up = pack_gate_up(mem, &w->shared_gate, &w->shared_up);
    layer->shared_down = pack_matrix(mem, &w->shared_down);
    return layer->router && layer->experts_gate_up && layer->experts_down && layer->shared_gate_up &&
           layer->shared_down;
}

int qwen_init(struct qwen *qwen, const struct backend *backend, struct device *device, struct stream *stream,
              const struct qwen_config *config, const struct qwen_weights *weights, struct report *report) {
    struct devmem *mem = &qwen->mem;
    bool ok;
    int r;

    *qwen = (struct qwen){.config = *config};
    devmem_init(mem, backend, device, stream);
    qwen->layers = calloc((size_t)config->n_layers, sizeof *qwen->layers);
    ok = qwen->layers != NULL;
    for (int i = 0; ok && i < config->n_layers; i++) {
        struct qwen_layer *layer = &qwen->layers[i];
        const struct qwen_layer_weights *w = &weights->layers[i];

        layer->kind = config->layers[i];
        layer->idx = layer->kind == LAYER_FULL ? qwen->n_full++ : qwen->n_gdn++;
        layer->input_norm = pack_vector(mem, &w->input_norm, true);
        layer->post_norm = pack_vector(mem, &w->post_norm, true);
        ok = layer->input_norm && layer->post_norm &&
             (layer->kind == LAYER_FULL ? init_full(layer, mem, w) : init_gdn(layer, mem, w)) &&
             init_ffn(layer, mem, w, config->n_experts);
    }
    if (ok) {
        qwen->embed = pack_matrix(mem, &weights->embed);
        qwen->lm_head = weights->tied ? qwen->embed : pack_matrix(mem, &weights->lm_head);
        qwen->final_norm = pack_vector(mem, &weights->final_norm, true);
        qwen->rope =
            (struct rope_table){pack_inv_freq(mem, config->rope_theta, config->rotary_dim), config->rotary_dim};
        ok = qwen->embed && qwen->lm_head && qwen->final_norm && qwen->rope.inv_freq;
    }
    if (ok)
        return 0;
    r = mem->error ? mem->error : -ENOMEM;
    report_error(report, r, "target: the device did not take its weights (%zu MiB were placed): %s",
                 (devmem_weight_bytes(mem) + devmem_bytes(mem, MEM_DEVICE)) >> 20, strerror(-r));
    qwen_deinit(qwen);
    return r;
}

void qwen_deinit(struct qwen *qwen) {
    if (qwen->mem.backend)
        devmem_deinit(&qwen->mem);
    free(qwen->layers);
    *qwen = (struct qwen){0};
}

bool qwen_buffers_take(struct qwen_buffers *b, const struct qwen_config *c, struct devmem *mem, enum dtype act_dtype,
                       int n_rows_max) {
    size_t row = (size_t)n_rows_max * dtype_bytes(act_dtype);

    b->x = devmem_take(mem, MEM_DEVICE, row * (size_t)c->hidden);
    b->mz = devmem_take(mem, MEM_DEVICE, row * (size_t)(qwen_conv_dim(c) + qwen_value_dim(c)));
    b->ba = devmem_take(mem, MEM_DEVICE, (size_t)n_rows_max * 2 * (size_t)c->gdn_v_heads * sizeof(float));
    b->gdn_out = devmem_take(mem, MEM_DEVICE, row * (size_t)qwen_value_dim(c));
    b->qkv = devmem_take(mem, MEM_DEVICE, row * (size_t)qwen_qkv_width(c));
    b->q = devmem_take(mem, MEM_DEVICE, row * (size_t)(c->n_heads * c->head_dim));
    b->attn = devmem_take(mem, MEM_DEVICE, row * (size_t)(c->n_heads * c->head_dim));
    b->ffn = devmem_take(mem, MEM_DEVICE, row * (size_t)c->intermediate);
    return b->x && b->mz && b->ba && b->gdn_out && b->qkv && b->q && b->attn && b->ffn;
}

/* ---- the network ------------------------------------------------------------------------------------------------- */

static void record_full_attention(struct recorder *rec, const struct qwen *qwen, const struct qwen_layer *layer,
                                  const struct qwen_pass *pass) {
    const struct qwen_config *c = &qwen->config;
    const struct qwen_buffers *b = pass->buffers;
    size_t act_bytes = dtype_bytes(rec->backend->caps(qwen->mem.device)->act_dtype);
    int width = qwen_qkv_width(c), q_width = c->n_heads * c->head_dim;

    record_linear(rec, &(struct linear_args){.batch = pass->batch,
                                             .x = b->x,
                                             .x_stride = c->hidden,
                                             .norm = layer->input_norm,
                                             .eps = (float)c->rms_eps,
                                             .n_outs = 1,
                                             .out = {{.weight = layer->qkv, .y = b->qkv, .y_stride = width}}});
    record_qk(rec, &(struct qk_args){.batch = pass->batch,
                                     .qkv = b->qkv,
                                     .qkv_stride = width,
                                     .n_heads = c->n_heads,
                                     .n_kv_heads = c->n_kv_heads,
                                     .head_dim = c->head_dim,
                                     .has_gate = c->has_attn_gate,
                                     .q_norm = layer->q_norm,
                                     .k_norm = layer->k_norm,
                                     .eps = (float)c->rms_eps,
                                     .rope = qwen->rope,
                                     .q = b->q,
                                     .kv = pass->full,
                                     .layer = layer->idx});
    if (pass->has_gate)
        record_cut(rec);
    record_attn(rec, &(struct attn_args){
                         .batch = pass->batch,
                         .q = b->q,
                         .n_heads = c->n_heads,
                         .n_kv_heads = c->n_kv_heads,
                         .head_dim = c->head_dim,
                         .gate = c->has_attn_gate ? (const char *)b->qkv + (size_t)c->head_dim * act_bytes : NULL,
                         .gate_stride = width,
                         .gate_head_stride = 2 * c->head_dim,
                         .kv = pass->full,
                         .layer = layer->idx,
                         .spans = pass->spans,
                         .out = b->attn});
    if (pass->has_gate)
        record_cut(rec);
    record_linear(rec, &(struct linear_args){
                           .batch = pass->batch,
                           .x = b->attn,
                           .x_stride = q_width,
                           .n_outs = 1,
                           .out = {{.weight = layer->o, .epilogue = LINEAR_ADD, .y = b->x, .y_stride = c->hidden}}});
}

static void record_delta_net(struct recorder *rec, const struct qwen *qwen, const struct qwen_layer *layer,
                             const struct qwen_pass *pass) {
    const struct qwen_config *c = &qwen->config;
    const struct qwen_buffers *b = pass->buffers;
    int mz_width = qwen_conv_dim(c) + qwen_value_dim(c);

    record_linear(rec, &(struct linear_args){.batch = pass->batch,
                                             .x = b->x,
                                             .x_stride = c->hidden,
                                             .norm = layer->input_norm,
                                             .eps = (float)c->rms_eps,
                                             .n_outs = 2,
                                             .out = {{.weight = layer->in_mz, .y = b->mz, .y_stride = mz_width},
                                                     {.weight = layer->in_ba,
                                                      .epilogue = LINEAR_STORE_F32,
                                                      .y = b->ba,
                                                      .y_stride = 2 * c->gdn_v_heads}}});
    record_gdn(rec, &(struct gdn_args){.batch = pass->batch,
                                       .state = pass->state,
                                       .layer = layer->idx,
                                       .mode = pass->gdn_mode,
                                       .mz = b->mz,
                                       .mz_stride = mz_width,
                                       .ba = b->ba,
                                       .conv = layer->conv,
                                       .neg_a = layer->neg_a,
                                       .dt_bias = layer->dt_bias,
                                       .norm = layer->gdn_norm,
                                       .eps = (float)c->rms_eps,
                                       .gate = c->gdn_gate,
                                       .record = pass->record,
                                       .out = b->gdn_out});
    record_linear(rec,
                  &(struct linear_args){
                      .batch = pass->batch,
                      .x = b->gdn_out,
                      .x_stride = qwen_value_dim(c),
                      .n_outs = 1,
                      .out = {{.weight = layer->gdn_out, .epilogue = LINEAR_ADD, .y = b->x, .y_stride = c->hidden}}});
}

static void record_ffn(struct recorder *rec, const struct qwen *qwen, const struct qwen_layer *layer, int i,
                       const struct qwen_pass *pass) {
    const struct qwen_config *c = &qwen->config;
    const struct qwen_buffers *b = pass->buffers;
    size_t routing_at = (size_t)i * (size_t)pass->batch->n_rows_max * (size_t)c->top_k;

    if (layer->router) {
        record_moe(rec, &(struct moe_args){.batch = pass->batch,
                                           .x = b->x,
                                           .hidden = c->hidden,
                                           .n_experts = c->n_experts,
                                           .top_k = c->top_k,
                                           .width = c->moe_width,
                                           .shared_width = c->shared_width,
                                           .norm = layer->post_norm,
                                           .eps = (float)c->rms_eps,
                                           .router = layer->router,
                                           .gate_up = layer->experts_gate_up,
                                           .down = layer->experts_down,
                                           .shared_gate_up = layer->shared_gate_up,
                                           .shared_down = layer->shared_down,
                                           .forced = pass->forced_routing ? pass->forced_routing + routing_at : NULL,
                                           .routing = pass->routing ? pass->routing + routing_at : NULL});
        return;
    }
    record_linear(
        rec,
        &(struct linear_args){
            .batch = pass->batch,
            .x = b->x,
            .x_stride = c->hidden,
            .norm = layer->post_norm,
            .eps = (float)c->rms_eps,
            .n_outs = 1,
            .out = {{.weight = layer->gate_up, .epilogue = LINEAR_SWIGLU, .y = b->ffn, .y_stride = c->intermediate}}});
    record_linear(rec, &(struct linear_args){
                           .batch = pass->batch,
                           .x = b->ffn,
                           .x_stride = c->intermediate,
                           .n_outs = 1,
                           .out = {{.weight = layer->down, .epilogue = LINEAR_ADD, .y = b->x, .y_stride = c->hidden}}});
}

static void record_hidden(struct recorder *rec, const struct qwen *qwen, int i, const struct qwen_pass *pass) {
    size_t rows = (size_t)i * (size_t)pass->batch->n_rows_max;

    if (pass->hidden && i < qwen->config.n_layers)
        record_store_rows(rec, &(struct store_rows_args){.batch = pass->batch,
                                                         .x = pass->buffers->x,
                                                         .width = qwen->config.hidden,
                                                         .dst = pass->hidden + rows * (size_t)qwen->config.hidden});
}

void qwen_record_layers(struct recorder *rec, const struct qwen *qwen, const struct qwen_pass *pass) {
    record_embed(rec, &(struct embed_args){.batch = pass->batch, .table = qwen->embed, .x = pass->buffers->x});
    record_hidden(rec, qwen, 0, pass);
    for (int i = 0; i < qwen->config.n_layers; i++) {
        const struct qwen_layer *layer = &qwen->layers[i];

        if (layer->kind == LAYER_FULL)
            record_full_attention(rec, qwen, layer, pass);
        else
            record_delta_net(rec, qwen, layer, pass);
        record_ffn(rec, qwen, layer, i, pass);
        record_hidden(rec, qwen, i + 1, pass);
        if (pass->after_layer)
            pass->after_layer(pass->after_layer_arg, rec, i);
    }
}
