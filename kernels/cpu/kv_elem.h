/* kv_elem: where an element of a K/V page lies and how it is converted. Every writer and reader of the CPU backend goes
 * through here: stored = x / scale in the group's element type (e4m3 saturates), read back as stored * scale, where the
 * reader may fold the scale into what it computes next. Internal to kernels/cpu. Header only. */
#pragma once
#include "../backend.h"

enum kv_half { KV_K, KV_V };

static inline int kv_page_of(const struct kv_view *kv, int slot, int pos) {
    return kv->table[(size_t)slot * (size_t)kv->n_pages_max + (size_t)(pos / PAGE_TOKENS)];
}

/* One token's row [head_dim] in a page, or in what the ring holds of it. */
static inline char *kv_row(const struct kv_view *kv, int page, int layer, enum kv_half half, int head, int pos) {
    size_t row_bytes = (size_t)kv->head_dim * dtype_bytes(kv->dtype), layer_bytes = kv_layer_bytes(kv);
    size_t tile = (size_t)half * (size_t)kv->n_kv_heads + (size_t)head;
    char *segment = page < 0 ? (char *)kv->ring + (size_t)~page * layer_bytes
                             : (char *)kv->arena + (size_t)page * kv->page_bytes + (size_t)layer * layer_bytes;

    return segment + (tile * PAGE_TOKENS + (size_t)(pos % PAGE_TOKENS)) * row_bytes;
}

static inline void kv_elems_store(enum dtype dtype, void *dst, const float *src, int n, float scale) {
    switch (dtype) {
    case DTYPE_F32:
        for (int i = 0; i < n; i++)
            ((float *)dst)[i] = src[i] / scale;
        break;
    case DTYPE_BF16:
        for (int i = 0; i < n; i++)
            ((uint16_t *)dst)[i] = bf16_from_f32(src[i] / scale);
        break;
    case DTYPE_F16:
        for (int i = 0; i < n; i++)
            ((uint16_t *)dst)[i] = f16_from_f32(src[i] / scale);
        break;
    case DTYPE_E4M3:
        for (int i = 0; i < n; i++)
            ((uint8_t *)dst)[i] = e4m3_from_f32(src[i] / scale);
        break;
    case DTYPE_N:
        break;
    }
}

/* The stored values; the caller applies the scale. */
static inline void kv_elems_load(enum dtype dtype, float *dst, const void *src, int n) {
    switch (dtype) {
    case DTYPE_F32:
        memcpy(dst, src, (size_t)n * sizeof *dst);
        break;
    case DTYPE_BF16:
        for (int i = 0; i < n; i++)
            dst[i] = bf16_to_f32(((const uint16_t *)src)[i]);
        break;
    case DTYPE_F16:
        for (int i = 0; i < n; i++)
            dst[i] = f16_to_f32(((const uint16_t *)src)[i]);
        break;
    case DTYPE_E4M3:
        for (int i = 0; i < n; i++)
            dst[i] = e4m3_to_f32(((const uint8_t *)src)[i]);
        break;
    case DTYPE_N:
        break;
    }
}

/* Writes one head's K or V of the token at pos. A position whose page is gone (null page) is dropped: that is how the
 * rows of a long prefill that a sliding group no longer holds end. A page that is not on the device is complete. */
static inline void kv_write(const struct kv_view *kv, int slot, int layer, enum kv_half half, int head, int pos,
                            const float *x) {
    int page = kv_page_of(kv, slot, pos);
    float scale = half == KV_K ? kv->k_scale[layer] : kv->v_scale[layer];

    if (page > 0)
        kv_elems_store(kv->dtype, kv_row(kv, page, layer, half, head, pos), x, kv->head_dim, scale);
}
