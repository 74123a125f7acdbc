#include "model.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "dflash.h"
#include "qwen.h"

struct model {
    const struct backend *backend;
    struct device *device;
    struct model_options options;
    struct model_info info;
    struct qwen target;
    struct dflash draft; /* info.draft.n_layers > 0 */
    struct stream *load; /* uploads while opening */
    struct devmem mem;   /* buffers below, shared by all passes: passes of one device run one after the other */
    struct qwen_buffers buffers;
    struct dflash_buffers draft_buffers;
    float *logits;    /* f32 [n_logit_rows, vocab] */
    int n_logit_rows; /* the most outputs any pass may have */
    int32_t *chosen, *draft_chosen;
    struct logprob_row *logprobs;
    struct gdn_record record; /* empty for a backend with open chunks */
    int32_t *seg_commit, *seg_snapshot;
    struct step_ring ring;
};

struct model_pass {
    struct model *model;
    struct model_pass_options options;
    struct model_batch batch;       /* PASS_CYCLE: the verify batch */
    struct model_batch draft_batch; /* PASS_CYCLE with a drafter */
    int32_t *list;                  /* PASS_CYCLE: device copy of host_list */
    struct dflash_tap tap;
    struct program *program;
    struct streamer *streamer; /* of its space */
    struct kv_view full;       /* of its space */
    struct devmem mem;
    float *hidden;
    int32_t *routing;
};

/* ---- opening ------------------------------------------------------------------------------------------------------ */

static int load_target(struct model *model, struct report *report) {
    const struct model_options *o = &model->options;
    struct checkpoint *checkpoint = NULL;
    struct qwen_weights weights;
    int r;

    if (o->dummy) {
        r = qwen_weights_dummy(&model->info.target, 1, &checkpoint, &weights, report);
    } else {
        r = checkpoint_open(o->target_folder, &checkpoint, report);
        if (r == 0)
            r = qwen_weights_load(checkpoint, &model->info.target, (struct shard_of){0, 1}, &weights, report);
    }
    if (r == 0) {
        r = qwen_init(&model->target, model->backend, model->device, model->load, &model->info.target, &weights,
                      report);
        model->info.n_skipped = weights.n_skipped;
        qwen_weights_deinit(&weights);
    }
    checkpoint_close(checkpoint);
    return r;
}

static int load_draft(struct model *model, struct report *report) {
    const struct model_options *o = &model->options;
    const struct draft_config *config = &model->info.draft;
    struct checkpoint *checkpoint = NULL;
    struct draft_weights weights;
    int r;

    if (config->n_layers == 0)
        return 0;
    if (o->dummy) {
        r = draft_weights_dummy(config, 2, &checkpoint, &weights, report);
    } else {
        r = checkpoint_open(o->draft_folder, &checkpoint, report);
        if (r == 0)
            r = draft_weights_load(checkpoint, config, (struct shard_of){0, 1}, &weights, report);
    }
    if (r == 0) {
        r = dflash_init(&model->draft, model->backend, model->device, model->load, config, &weights, report);
        draft_weights_deinit(&weights);
    }
    checkpoint_close(checkpoint);
    return r;
}

static bool take_ring(struct model *model) {
    struct step_ring *ring = &model->ring;
    size_t n;

    ring->n_steps_max = max_int(model->options.n_steps_max, 2);
    ring->n_segs_max = model->options.n_segs_max;
    n = (size_t)ring->n_steps_max;
    ring->n_steps = devmem_take(&model->mem, MEM_HOST, sizeof *ring->n_steps);
    ring->n_segs = devmem_take(&model->mem, MEM_HOST, n * sizeof *ring->n_segs);
    ring->out = devmem_take(&model->mem, MEM_HOST, n * (size_t)ring->n_segs_max * sizeof *ring->out);
    return ring->n_steps && ring->n_segs && ring->out;
}

static bool take_record(struct model *model, int n_rows) {
    const struct qwen_config *c = &model->info.target;
    const size_t conv_bytes = dtype_bytes(model->backend->caps(model->device)->conv_dtype);
    size_t rows = (size_t)model->target.n_gdn * (size_t)n_rows;
    size_t kv_width = (size_t)c->gdn_k_heads * (size_t)c->gdn_head_dim_k + (size_t)qwen_value_dim(c);
    struct gdn_record *record = &model->record;

    record->m = devmem_take(&model->mem, MEM_DEVICE, rows * (size_t)qwen_conv_dim(c) * conv_bytes);
    record->kv = devmem_take(&model->mem, MEM_DEVICE, rows * kv_width * sizeof(float));
    record->g_beta = devmem_take(&model->mem, MEM_DEVICE, rows * 2 * (size_t)c->gdn_v_heads * sizeof(float));
    return record->m && record->kv && record->g_beta;
}

static bool take_buffers(struct model *model) {
    const struct model_options *o = &model->options;
    const struct qwen_config *c = &model->info.target;
    const struct backend_caps *caps = model->backend->caps(model->device);
    struct devmem *mem = &model->mem;
    int block_rows = o->n_segs_max * max_int(model->info.block_size, 1);
    int verify_rows = o->n_segs_max * BLOCK_ROWS_MAX; /* PASS_RERUN may fill a block without a drafter */
    int rows = max_int(o->n_rows_max, verify_rows);
    size_t n_outs;

    model->n_logit_rows = max_int(o->n_outs_max, verify_rows);
    n_outs = (size_t)model->n_logit_rows;
    model->logits = devmem_take(mem, MEM_DEVICE, n_outs * (size_t)c->vocab * sizeof(float));
    model->chosen = devmem_take(mem, MEM_DEVICE, n_outs * sizeof(int32_t));
    model->draft_chosen = devmem_take(mem, MEM_DEVICE, (size_t)block_rows * sizeof(int32_t));
    model->logprobs = devmem_take(mem, MEM_DEVICE, n_outs * sizeof *model->logprobs);
    model->seg_commit = devmem_take(mem, MEM_DEVICE, (size_t)o->n_segs_max * sizeof(int32_t));
    model->seg_snapshot = devmem_take(mem, MEM_DEVICE, (size_t)o->n_segs_max * sizeof(int32_t));
    return model->logits && model->chosen && model->draft_chosen && model->logprobs && model->seg_commit &&
           model->seg_snapshot && (caps->open_rows > 0 || take_record(model, verify_rows)) && take_ring(model) &&
           qwen_buffers_take(&model->buffers, c, mem, caps->act_dtype, rows) &&
           (model->info.draft.n_layers == 0 ||
            dflash_buffers_take(&model->draft_buffers, &model->info.draft, mem, caps->act_dtype, rows, block_rows));
}

int model_open(const struct backend *backend, struct device *device, const struct model_options *options,
               struct model **ret_model, struct report *report) {
    struct model *model = calloc(1, sizeof *model);
    int r = 0;

    if (!model)
        return report_error(report, -ENOMEM, "%s: out of memory", options->target_folder);
    model->backend = backend;
    model->device = device;
    model->options = *options;
    devmem_init(&model->mem, backend, device, NULL);
    if (options->n_slots < 1 || options->n_segs_max < 1 || options->n_rows_max < 1 || options->n_outs_max < 1)
        r = report_error(report, -EINVAL, "%s: a model needs room for at least one seq and one row",
                         options->target_folder);
    if (r == 0)
        r = model_inspect(options, backend->caps(device), &model->info, report);
    if (r == 0) {
        r = backend->stream_open(device, STREAM_LOAD, &model->load);
        if (r != 0)
            report_error(report, r, "%s: the device gives no stream: %s", options->target_folder, strerror(-r));
    }
    if (r == 0)
        r = load_target(model, report);
    if (r == 0)
        r = load_draft(model, report);
    if (r == 0 && !take_buffers(model))
        r = report_error(report, -ENOMEM, "%s: activation buffers (%d rows, %d logit rows) do not fit into memory",
                         options->target_folder, options->n_rows_max, options->n_outs_max);
    if (r != 0) {
        model_close(model);
        return r;
    }
    model->info.weight_bytes = devmem_weight_bytes(&model->target.mem) + devmem_bytes(&model->target.mem, MEM_DEVICE);
    if (model->info.draft.n_layers > 0)
        model->info.draft_weight_bytes =
            devmem_weight_bytes(&model->draft.mem) + devmem_bytes(&model->draft.mem, MEM_DEVICE);
    model->info.buffer_bytes = devmem_bytes(&model->mem, MEM_DEVICE);
    *ret_model = model;
    return 0;
}

void model_close(struct model *model) {
    if (!model)
        return;
    devmem_deinit(&model->mem);
    dflash_deinit(&model->draft);
    qwen_deinit(&model->target);
    if (model->load)
        model->backend->stream_close(model->load);
    free(model);
}

const struct model_info *model_info(const struct model *model) {
    return &model->info;
}

const struct step_ring *model_ring(const struct model *model) {
    return &model->ring;
}

/* ---- batches ------------------------------------------------------------------------------------------------------ */

int model_batch_new(struct model *model, enum mem_kind kind, int n_segs_max, int n_rows_max, int n_outs_max,
                    struct model_batch *ret_batch) {
    size_t n_segs = (size_t)n_segs_max, n_rows = (size_t)n_rows_max, n_outs = (size_t)n_outs_max;
    size_t n_words = 3 + n_segs * 3 + (n_segs + 1) + n_rows * 2 + n_outs;
    struct model_batch batch = {.kind = kind, .bytes = n_words * sizeof(int32_t)};
    struct batch *view = &batch.view;
    int32_t *word;
    int r;

    r = model->backend->mem_alloc(model->device, kind, batch.bytes, &batch.mem);
    if (r != 0)
        return r;
    word = batch.mem;
    *view = (struct batch){.n_segs_max = n_segs_max, .n_rows_max = n_rows_max, .n_outs_max = n_outs_max};
    view->n_segs = word++;
    view->n_rows = word++;
    view->n_outs = word++;
    view->seg_slot = word;
    view->seg_pos = word += n_segs;
    view->seg_flags = word += n_segs;
    view->seg_row = word += n_segs;
    view->row_token = word += n_segs + 1;
    view->row_seg = word += n_rows;
    view->out_row = word + n_rows;
    *ret_batch = batch;
    return 0;
}

void model_batch_free(struct model *model, struct model_batch *batch) {
    if (batch->mem)
        model->backend->mem_free(model->device, batch->kind, batch->mem, batch->bytes);
    *batch = (struct model_batch){0};
}

/* ---- passes ------------------------------------------------------------------------------------------------------- */

static void record_target_head(struct recorder *rec, const struct model_pass *pass, const struct model_space *space,
                               enum head_mode mode) {
    const struct model *model = pass->model;

    record_head(rec, &(struct head_args){.batch = &pass->batch.view,
                                         .x = model->buffers.x,
                                         .hidden = model->info.target.hidden,
                                         .norm = model->target.final_norm,
                                         .eps = (float)model->info.target.rms_eps,
                                         .lm_head = model->target.lm_head,
                                         .vocab = model->info.target.vocab,
                                         .n_valid = model->info.n_valid,
                                         .mode = mode,
                                         .logits = model->logits,
                                         .chosen = model->chosen,
                                         .ctl = space->ctl,
                                         .tables = &space->tables,
                                         .logprobs = model->logprobs});
}

static void record_draft_head(struct recorder *rec, const struct model_pass *pass, const struct batch *batch,
                              enum head_mode mode) {
    const struct model *model = pass->model;

    record_head(rec, &(struct head_args){.batch = batch,
                                         .x = model->draft_buffers.x,
                                         .hidden = model->info.draft.hidden,
                                         .norm = model->draft.norm,
                                         .eps = (float)model->info.draft.rms_eps,
                                         .lm_head = model->target.lm_head,
                                         .vocab = model->info.target.vocab,
                                         .n_valid = model->info.n_valid,
                                         .mode = mode,
                                         .logits = model->logits,
                                         .chosen = model->draft_chosen});
}

static void record_prepare_op(struct recorder *rec, const struct model_pass *pass, const struct model_space *space) {
    const struct model *model = pass->model;

    record_prepare(rec, &(struct prepare_args){.batch = &pass->batch.view,
                                               .chosen = model->chosen,
                                               .logprobs = model->logprobs,
                                               .ctl = space->ctl,
                                               .tables = &space->tables,
                                               .seg_commit = model->seg_commit,
                                               .seg_snapshot = model->seg_snapshot,
                                               .ring = &model->ring});
}

/* Target layers on pass->batch, head, acceptance, commit of state and draft context. */
static void record_target(struct recorder *rec, struct model_pass *pass, const struct model_space *space) {
    struct model *model = pass->model;
    bool frozen = pass->options.kind != PASS_PREFILL, has_draft = model->info.draft.n_layers > 0;
    struct qwen_pass target = {.batch = &pass->batch.view,
                               .buffers = &model->buffers,
                               .full = &space->target_full,
                               .state = &space->target_state,
                               .gdn_mode = frozen ? GDN_FROZEN : GDN_ADVANCE,
                               .record = frozen ? &model->record : NULL,
                               .hidden = pass->hidden,
                               .routing = pass->routing,
                               .has_gate = pass->options.has_gate || space->streamer,
                               .spans = space->streamer ? streamer_spans(space->streamer) : NULL};

    if (has_draft) {
        pass->tap = (struct dflash_tap){.draft = &model->draft,
                                        .buffers = &model->draft_buffers,
                                        .batch = &pass->batch.view,
                                        .x = model->buffers.x};
        target.after_layer = dflash_after_layer;
        target.after_layer_arg = &pass->tap;
    }
    qwen_record_layers(rec, &model->target, &target);
    record_target_head(rec, pass, space, pass->options.all_logits ? HEAD_LOGITS : HEAD_SELECT);
    record_prepare_op(rec, pass, space);
    if (frozen)
        record_gdn_commit(rec, &(struct gdn_commit_args){.batch = &pass->batch.view,
                                                         .state = &space->target_state,
                                                         .record = &model->record,
                                                         .seg_commit = model->seg_commit,
                                                         .seg_snapshot = model->seg_snapshot});
    if (has_draft)
        dflash_record_context(rec, &model->draft, &model->draft_buffers, &pass->batch.view, model->seg_commit,
                              &space->draft_full, &space->draft_sliding);
}

static void record_cycle(struct recorder *rec, struct model_pass *pass, const struct model_space *space) {
    struct model *model = pass->model;
    bool has_draft = model->info.draft.n_layers > 0;
    struct rows_args rows = {.n_seqs = pass->list,
                             .seq_slot = pass->list + 1,
                             .n_seqs_max = pass->options.n_segs_max,
                             .block = model->info.block_size,
                             .mask_id = model->info.draft.mask_id,
                             .ctl = space->ctl,
                             .draft = has_draft ? &pass->draft_batch.view : NULL,
                             .draft_ids = model->draft_chosen,
                             .verify = &pass->batch.view};

    if (has_draft) {
        record_draft_rows(rec, &rows);
        dflash_record_block(rec, &model->draft, &model->draft_buffers, &pass->draft_batch.view, model->target.embed,
                            space->ctl, &space->draft_full, &space->draft_sliding);
        record_draft_head(rec, pass, &pass->draft_batch.view, HEAD_ARGMAX);
    }
    record_verify_rows(rec, &rows);
    record_target(rec, pass, space);
}

static int take_pass_memory(struct model_pass *pass) {
    struct model *model = pass->model;
    const struct qwen_config *c = &model->info.target;
    struct model_pass_options *o = &pass->options;
    size_t layer_rows;
    int r;

    if (o->kind == PASS_CYCLE)
        o->n_rows_max = o->n_outs_max = o->n_segs_max * model->info.block_size;
    r = model_batch_new(model, MEM_DEVICE, o->n_segs_max, o->n_rows_max, o->n_outs_max, &pass->batch);
    if (r == 0 && o->kind == PASS_CYCLE && model->info.draft.n_layers > 0)
        r = model_batch_new(model, MEM_DEVICE, o->n_segs_max, o->n_rows_max, o->n_outs_max, &pass->draft_batch);
    if (r != 0)
        return r;
    layer_rows = (size_t)c->n_layers * (size_t)o->n_rows_max;
    pass->list = devmem_take(&pass->mem, MEM_DEVICE, (size_t)(o->n_segs_max + 1) * sizeof(int32_t));
    if (o->hidden)
        pass->hidden = devmem_take(&pass->mem, MEM_DEVICE, layer_rows * (size_t)c->hidden * sizeof(float));
    if (o->routing && c->n_experts > 0)
        pass->routing = devmem_take(&pass->mem, MEM_DEVICE, layer_rows * (size_t)c->top_k * sizeof(int32_t));
    return pass->list && (!o->hidden || pass->hidden) && (!o->routing || c->n_experts == 0 || pass->routing) ? 0
                                                                                                             : -ENOMEM;
}

/* Buffers were sized at open: a pass must stay inside them. */
static bool fits(const struct model *model, const struct model_pass_options *o) {
    const struct model_options *m = &model->options;
    int rows_max = max_int(m->n_rows_max, m->n_segs_max * BLOCK_ROWS_MAX);

    if (o->n_segs_max < 1 || o->n_segs_max > m->n_segs_max)
        return false;
    if (o->kind == PASS_CYCLE)
        return !o->all_logits;
    if (o->n_rows_max < 1 || o->n_outs_max < 1 || o->n_outs_max > model->n_logit_rows)
        return false;
    if (o->kind == PASS_DRAFT)
        return model->info.draft.n_layers > 0 && o->n_rows_max <= o->n_segs_max * model->info.block_size;
    return o->n_rows_max <= (o->kind == PASS_RERUN ? o->n_segs_max * BLOCK_ROWS_MAX : rows_max);
}

int model_pass_new(struct model *model, const struct model_space *space, const struct model_pass_options *options,
                   struct model_pass **ret_pass) {
    struct recorder rec = {.backend = model->backend};
    struct model_pass *pass;
    int r;

    if (!fits(model, options))
        return -EINVAL;
    pass = calloc(1, sizeof *pass);
    if (!pass)
        return -ENOMEM;
    pass->model = model;
    pass->options = *options;
    pass->streamer = space->streamer;
    pass->full = space->target_full;
    devmem_init(&pass->mem, model->backend, model->device, NULL);
    r = take_pass_memory(pass);
    if (r == 0)
        r = model->backend->program_begin(model->device, &rec.program);
    if (r == 0) {
        pass->program = rec.program;
        switch (options->kind) {
        case PASS_PREFILL:
        case PASS_RERUN:
            record_target(&rec, pass, space);
            break;
        case PASS_CYCLE:
            record_cycle(&rec, pass, space);
            break;
        case PASS_DRAFT:
            dflash_record_block(&rec, &model->draft, &model->draft_buffers, &pass->batch.view, model->target.embed,
                                space->ctl, &space->draft_full, &space->draft_sliding);
            record_draft_head(&rec, pass, &pass->batch.view, HEAD_LOGITS);
            break;
        }
        r = rec.error;
        if (r == 0)
            r = model->backend->program_end(pass->program);
    }
    if (r != 0) {
        model_pass_free(pass);
        return r;
    }
    *ret_pass = pass;
    return 0;
}

void model_pass_free(struct model_pass *pass) {
    if (!pass)
        return;
    if (pass->program)
        pass->model->backend->program_free(pass->program);
    model_batch_free(pass->model, &pass->batch);
    model_batch_free(pass->model, &pass->draft_batch);
    devmem_deinit(&pass->mem);
    free(pass);
}

static int run_program(struct model_pass *pass, struct stream *compute, const struct streamed *streamed,
                       const struct pass_gate *gate) {
    if (streamed && streamed->n_seqs > 0)
        return streamer_run(pass->streamer, compute, pass->program, &pass->full, streamed, gate);
    return gate_run(pass->model->backend, compute, pass->program, pass->full.n_layers, gate);
}

int model_pass_run(struct model_pass *pass, struct stream *compute, const struct model_batch *input,
                   const struct streamed *streamed, const struct pass_gate *gate) {
    int r;

    if (input->bytes != pass->batch.bytes || pass->options.kind == PASS_CYCLE || (gate && !pass->options.has_gate))
        return -EINVAL;
    r = pass->model->backend->copy(compute, pass->batch.mem, input->mem, input->bytes);
    return r != 0 ? r : run_program(pass, compute, streamed, gate);
}

int model_pass_run_cycle(struct model_pass *pass, struct stream *compute, const int32_t *host_list,
                         const struct streamed *streamed) {
    int r;

    if (pass->options.kind != PASS_CYCLE)
        return -EINVAL;
    r = pass->model->backend->copy(compute, pass->list, host_list,
                                   (size_t)(pass->options.n_segs_max + 1) * sizeof *host_list);
    return r != 0 ? r : run_program(pass, compute, streamed, NULL);
}

const float *model_pass_logits(const struct model_pass *pass) {
    return pass->model->logits;
}

const float *model_pass_hidden(const struct model_pass *pass) {
    return pass->hidden;
}

const int32_t *model_pass_routing(const struct model_pass *pass) {
    return pass->routing;
}
