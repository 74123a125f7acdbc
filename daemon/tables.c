#include "tables.h"

#include <assert.h>
#include <errno.h>

static bool open_group(struct tables *t, const struct kv_geometry *g, void *arena, enum kv_group group,
                       struct kv_view *ret_view) {
    size_t n = (size_t)t->n_slots * (size_t)t->n_pages_max;
    float ones[LAYERS_MAX];
    struct kv_view v = {.dtype = g->dtype,
                        .n_layers = g->n_layers,
                        .n_kv_heads = g->n_kv_heads,
                        .head_dim = g->head_dim,
                        .arena = arena,
                        .page_bytes = g->page_bytes,
                        .n_pages_max = t->n_pages_max};

    *ret_view = (struct kv_view){0};
    if (g->n_layers == 0)
        return true;
    for (int i = 0; i < g->n_layers; i++)
        ones[i] = 1.0f;
    v.table = devmem_take(&t->mem, MEM_DEVICE, n * sizeof *v.table);
    v.k_scale = devmem_upload(&t->mem, ones, (size_t)g->n_layers * sizeof *ones);
    v.v_scale = devmem_upload(&t->mem, ones, (size_t)g->n_layers * sizeof *ones);
    t->pages[group] = devmem_take(&t->mem, MEM_HOST, n * sizeof **t->pages);
    *ret_view = v;
    return v.table && v.k_scale && v.v_scale && t->pages[group];
}

static bool open_seqs(struct tables *t, const struct model_info *info, void *state_arena) {
    struct model_space *v = &t->view;
    size_t n = (size_t)t->n_slots, n_counts = n * (size_t)info->target.vocab, n_bias = n * SEQ_BIAS_MAX;

    v->target_state = info->state;
    v->target_state.arena = state_arena;
    v->target_state.live = devmem_take(&t->mem, MEM_DEVICE, n * sizeof *t->live);
    v->target_state.rolling = devmem_take(&t->mem, MEM_DEVICE, n * sizeof *t->rolling);
    v->target_state.open = devmem_take(&t->mem, MEM_DEVICE, n * info->state.open_bytes);
    v->ctl = devmem_take(&t->mem, MEM_DEVICE, n * sizeof *v->ctl);
    v->tables.vocab = info->target.vocab;
    v->tables.counts = devmem_take(&t->mem, MEM_DEVICE, n_counts * sizeof *t->counts);
    v->tables.bias_id = devmem_take(&t->mem, MEM_DEVICE, n_bias * sizeof *t->bias_id);
    v->tables.bias = devmem_take(&t->mem, MEM_DEVICE, n_bias * sizeof *t->bias);
    t->zero_state = devmem_take(&t->mem, MEM_DEVICE, info->state.slot_bytes);
    t->live = devmem_take(&t->mem, MEM_HOST, n * sizeof *t->live);
    t->rolling = devmem_take(&t->mem, MEM_HOST, n * sizeof *t->rolling);
    t->ctl = devmem_take(&t->mem, MEM_HOST, n * sizeof *t->ctl);
    t->counts = devmem_take(&t->mem, MEM_HOST, n_counts * sizeof *t->counts);
    t->bias_id = devmem_take(&t->mem, MEM_HOST, n_bias * sizeof *t->bias_id);
    t->bias = devmem_take(&t->mem, MEM_HOST, n_bias * sizeof *t->bias);
    return t->zero_state && v->target_state.live && v->target_state.rolling && v->target_state.open && v->ctl &&
           v->tables.counts && v->tables.bias_id && v->tables.bias && t->live && t->rolling && t->ctl && t->counts &&
           t->bias_id && t->bias;
}

int tables_open(struct tables *t, const struct backend *backend, struct device *device, struct stream *load,
                const struct model_info *info, void *const arenas[KV_GROUP_N], int n_slots, int n_pages_max) {
    *t = (struct tables){.n_slots = n_slots, .n_pages_max = n_pages_max};
    devmem_init(&t->mem, backend, device, load);
    if (open_group(t, &info->groups[KV_TARGET_FULL], arenas[KV_TARGET_FULL], KV_TARGET_FULL, &t->view.target_full) &&
        open_group(t, &info->groups[KV_DRAFT_FULL], arenas[KV_DRAFT_FULL], KV_DRAFT_FULL, &t->view.draft_full) &&
        open_group(t, &info->groups[KV_DRAFT_SLIDING], arenas[KV_DRAFT_SLIDING], KV_DRAFT_SLIDING,
                   &t->view.draft_sliding) &&
        open_seqs(t, info, arenas[KV_TARGET_STATE]))
        return 0;
    tables_close(t);
    return -ENOMEM;
}

void tables_close(struct tables *t) {
    devmem_deinit(&t->mem);
}

void *tables_state(const struct tables *t, uint32_t state_slot) {
    return (char *)t->view.target_state.arena + (size_t)state_slot * t->view.target_state.slot_bytes;
}

void device_copies_add(struct device_copies *copies, void *dst, const void *src, size_t bytes) {
    assert(copies->n < copies->n_max); /* sized for the worst plan */
    copies->copies[copies->n++] = (struct device_copy){dst, src, bytes};
}

static const int32_t *device_table(const struct tables *t, enum kv_group group) {
    return group == KV_TARGET_FULL  ? t->view.target_full.table
           : group == KV_DRAFT_FULL ? t->view.draft_full.table
                                    : t->view.draft_sliding.table;
}

void tables_push_pages(const struct tables *t, struct device_copies *copies, enum kv_group group, int slot,
                       int first_page, int n_pages) {
    size_t at = (size_t)slot * (size_t)t->n_pages_max + (size_t)first_page;

    if (n_pages > 0) /* the view is const to the passes; this is its writer */
        device_copies_add(copies, (int32_t *)device_table(t, group) + at, t->pages[group] + at,
                          (size_t)n_pages * sizeof(int32_t));
}

void tables_push_states(const struct tables *t, struct device_copies *copies, int slot) {
    device_copies_add(copies, (int32_t *)t->view.target_state.live + slot, t->live + slot, sizeof *t->live);
    device_copies_add(copies, (int32_t *)t->view.target_state.rolling + slot, t->rolling + slot, sizeof *t->rolling);
}

void tables_push_ctl(const struct tables *t, struct device_copies *copies, int slot) {
    device_copies_add(copies, t->view.ctl + slot, t->ctl + slot, sizeof *t->ctl);
}

void tables_push_counts(const struct tables *t, struct device_copies *copies, int slot) {
    size_t vocab = (size_t)t->view.tables.vocab, at = (size_t)slot * vocab;

    device_copies_add(copies, t->view.tables.counts + at, t->counts + at, vocab * sizeof *t->counts);
}

void tables_push_bias(const struct tables *t, struct device_copies *copies, int slot, int n_bias) {
    size_t at = (size_t)slot * SEQ_BIAS_MAX;

    if (n_bias == 0)
        return;
    device_copies_add(copies, t->view.tables.bias_id + at, t->bias_id + at, (size_t)n_bias * sizeof *t->bias_id);
    device_copies_add(copies, t->view.tables.bias + at, t->bias + at, (size_t)n_bias * sizeof *t->bias);
}
