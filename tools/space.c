#include "space.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static bool open_group(struct space *space, const struct kv_geometry *g, struct kv_view *ret_view) {
    size_t n_table = (size_t)space->n_slots * (size_t)space->n_pages;
    float ones[LAYERS_MAX];
    struct kv_view v = {0};
    int32_t *table;

    *ret_view = v;
    if (g->n_layers == 0)
        return true;
    table = malloc(n_table * sizeof *table);
    if (!table)
        return false;
    for (size_t i = 0; i < n_table; i++)
        table[i] = (int32_t)(1 + i); /* page 0 is the null page */
    for (int i = 0; i < g->n_layers; i++)
        ones[i] = 1.0f;
    v = (struct kv_view){.dtype = g->dtype,
                         .n_layers = g->n_layers,
                         .n_kv_heads = g->n_kv_heads,
                         .head_dim = g->head_dim,
                         .page_bytes = g->page_bytes,
                         .n_pages_max = space->n_pages};
    v.arena = devmem_take(&space->mem, MEM_DEVICE, (n_table + 1) * g->page_bytes);
    v.table = devmem_upload(&space->mem, table, n_table * sizeof *table);
    v.k_scale = devmem_upload(&space->mem, ones, (size_t)g->n_layers * sizeof *ones);
    v.v_scale = devmem_upload(&space->mem, ones, (size_t)g->n_layers * sizeof *ones);
    free(table);
    *ret_view = v;
    return v.arena && v.table && v.k_scale && v.v_scale;
}

static bool open_states(struct space *space, const struct state_view *shape) {
    struct state_view *s = &space->view.target_state;
    size_t n = (size_t)space->n_slots;
    int32_t *slots = malloc(2 * n * sizeof *slots);

    *s = *shape;
    if (!slots)
        return false;
    for (size_t i = 0; i < 2 * n; i++)
        slots[i] = (int32_t)i;
    s->arena = devmem_take(&space->mem, MEM_DEVICE, 2 * n * s->slot_bytes);
    s->live = devmem_upload(&space->mem, slots, n * sizeof *slots);
    s->rolling = devmem_upload(&space->mem, slots + n, n * sizeof *slots);
    s->open = devmem_take(&space->mem, MEM_DEVICE, n * s->open_bytes);
    free(slots);
    return s->arena && s->live && s->rolling && s->open;
}

int space_open(struct space *space, const struct backend *backend, struct device *device, struct stream *stream,
               const struct model *model, int n_slots, int n_tokens_max) {
    const struct model_info *info = model_info(model);

    *space = (struct space){.backend = backend,
                            .stream = stream,
                            .n_slots = n_slots,
                            .n_pages = (int)div_ceil((uint64_t)n_tokens_max + BLOCK_ROWS_MAX, PAGE_TOKENS)};
    devmem_init(&space->mem, backend, device, stream);
    space->view.ctl = devmem_take(&space->mem, MEM_DEVICE, (size_t)n_slots * sizeof(struct seq_ctl));
    space->view.tables.vocab = info->target.vocab;
    space->staging = devmem_take(&space->mem, MEM_HOST, sizeof *space->staging);
    space->zero_state = devmem_take(&space->mem, MEM_HOST, info->state.slot_bytes);
    if (space->view.ctl && space->staging && space->zero_state &&
        open_group(space, &info->groups[KV_TARGET_FULL], &space->view.target_full) &&
        open_group(space, &info->groups[KV_DRAFT_FULL], &space->view.draft_full) &&
        open_group(space, &info->groups[KV_DRAFT_SLIDING], &space->view.draft_sliding) &&
        open_states(space, &info->state))
        return 0;
    space_close(space);
    return -ENOMEM;
}

void space_close(struct space *space) {
    if (space->mem.backend)
        devmem_deinit(&space->mem);
    *space = (struct space){0};
}

int space_admit(struct space *space, int slot, const struct seq_ctl *ctl) {
    const struct state_view *s = &space->view.target_state;
    int r;

    *space->staging = *ctl;
    r = space->backend->copy(space->stream, space->view.ctl + slot, space->staging, sizeof *ctl);
    if (r == 0 && s->slot_bytes > 0)
        r = space->backend->copy(space->stream, (char *)s->arena + (size_t)slot * s->slot_bytes, space->zero_state,
                                 s->slot_bytes);
    return r != 0 ? r : backend_stream_wait(space->backend, space->stream);
}

int space_read(struct space *space, void *dst_host, const void *src, size_t bytes) {
    void *pinned;
    int r = space->backend->mem_alloc(space->mem.device, MEM_HOST, bytes ? bytes : 1, &pinned);

    if (r != 0)
        return r;
    r = space->backend->copy(space->stream, pinned, src, bytes);
    if (r == 0)
        r = backend_stream_wait(space->backend, space->stream);
    if (r == 0)
        memcpy(dst_host, pinned, bytes);
    space->backend->mem_free(space->mem.device, MEM_HOST, pinned, bytes ? bytes : 1);
    return r;
}

void space_fill(struct model_batch *input, int slot, const int *ids, int pos, int n_rows, int flags, bool all_outs) {
    struct batch *b = &input->view;

    *b->n_segs = 1;
    *b->n_rows = n_rows;
    *b->n_outs = all_outs ? n_rows : flags & SEG_SAMPLE ? 1 : 0;
    b->seg_slot[0] = slot;
    b->seg_pos[0] = pos;
    b->seg_flags[0] = flags;
    b->seg_row[0] = 0;
    b->seg_row[1] = n_rows;
    for (int i = 0; i < n_rows; i++) {
        b->row_token[i] = ids[i];
        b->row_seg[i] = 0;
    }
    for (int i = 0; i < *b->n_outs; i++)
        b->out_row[i] = all_outs ? i : n_rows - 1;
}

struct seq_ctl space_ctl(int max_tokens, int context_max, const int *stop_ids, int n_stop_ids) {
    struct seq_ctl ctl = {.anchor = -1,
                          .max_tokens = max_tokens,
                          .context_max = context_max,
                          .speculate = 1,
                          .n_stop_ids = min_int(n_stop_ids, SEQ_STOP_IDS_MAX),
                          .sample = {.top_p = 1, .repetition = 1, .n_logprobs = -1}};

    for (int i = 0; i < ctl.n_stop_ids; i++)
        ctl.stop_ids[i] = stop_ids[i];
    return ctl;
}
