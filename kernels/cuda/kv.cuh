/* kv: where an element of a K/V page lies and how it is written. Pages hold plain rows, as on the CPU. Internal to rope.cu
 * and attn.cu. */
#pragma once
#include "util.cuh"

#include <cuda_fp16.h>
#include <cuda_fp8.h>

enum kv_half { KV_K, KV_V };

__device__ static inline int kv_page_of(const struct kv_view &kv, int slot, int pos) {
    return kv.table[(size_t)slot * (size_t)kv.n_pages_max + (size_t)(pos / PAGE_TOKENS)];
}

__host__ __device__ static inline size_t kv_elem_bytes(enum dtype dtype) {
    return dtype == DTYPE_F32 ? 4 : dtype == DTYPE_E4M3 ? 1 : 2;
}

/* The rows [PAGE_TOKENS, head_dim] of one head in a page, or in what the ring holds of it. layer_bytes: of a page. */
__device__ static inline char *kv_rows(const struct kv_view &kv, size_t layer_bytes, int page, int layer,
                                       enum kv_half half, int head) {
    size_t tile = (size_t)half * (size_t)kv.n_kv_heads + (size_t)head;
    char *segment = page < 0 ? (char *)kv.ring + (size_t)~page * layer_bytes
                             : (char *)kv.arena + (size_t)page * kv.page_bytes + (size_t)layer * layer_bytes;

    return segment + tile * PAGE_TOKENS * (size_t)kv.head_dim * kv_elem_bytes(kv.dtype);
}
/* One token's. */
__device__ static inline char *kv_row(const struct kv_view &kv, int page, int layer, enum kv_half half, int head,
                                      int pos) {
    return kv_rows(kv, kv.page_bytes / (size_t)kv.n_layers, page, layer, half, head) +
           (size_t)(pos % PAGE_TOKENS) * (size_t)kv.head_dim * kv_elem_bytes(kv.dtype);
}

/* Where one head's K or V of the token at pos goes. NULL: its page is gone (null page), or not on the device and complete. */
struct kv_place {
    char *row;
    float scale;
};
__device__ static inline struct kv_place kv_place_of(const struct kv_view &kv, int slot, int layer, enum kv_half half,
                                                     int head, int pos) {
    const float scale = half == KV_K ? kv.k_scale[layer] : kv.v_scale[layer];
    const int page = kv_page_of(kv, slot, pos);

    return {page > 0 ? kv_row(kv, page, layer, half, head, pos) : NULL, scale};
}

/* By one warp. */
__device__ static inline void kv_write(const struct kv_view &kv, struct kv_place place, const float *x) {
    char *dst = place.row;

    if (dst == NULL)
        return;
    for (int i = (int)threadIdx.x % 32; i < kv.head_dim; i += 32) {
        float v = x[i] / place.scale;

        switch (kv.dtype) {
        case DTYPE_F32:
            ((float *)dst)[i] = v;
            break;
        case DTYPE_BF16:
            bf16_store(dst, (size_t)i, v);
            break;
        case DTYPE_F16:
            ((__half *)dst)[i] = __float2half_rn(v);
            break;
        case DTYPE_E4M3:
            ((__nv_fp8_storage_t *)dst)[i] = __nv_cvt_float_to_fp8(v, __NV_SATFINITE, __NV_E4M3);
            break;
        case DTYPE_N:
            break;
        }
    }
}

/* 8 stored elements from i on, a multiple of 8, as bf16, unscaled: e4m3 is exact, fp16 and f32 are rounded. */
__device__ static inline uint4 kv_load8(enum dtype dtype, const char *row, int i) {
    uint4 raw, v = {};
    uint2 bytes;
    float4 a, b;

    switch (dtype) {
    case DTYPE_BF16:
        v = *(const uint4 *)(row + i * 2);
        break;
    case DTYPE_F32:
        a = ((const float4 *)row)[i / 4];
        b = ((const float4 *)row)[i / 4 + 1];
        v = {pack_bf16(a.x, a.y), pack_bf16(a.z, a.w), pack_bf16(b.x, b.y), pack_bf16(b.z, b.w)};
        break;
    case DTYPE_F16:
        raw = *(const uint4 *)(row + i * 2);
        for (int j = 0; j < 4; j++) {
            float2 pair = __half22float2(((const __half2 *)&raw)[j]);

            (&v.x)[j] = pack_bf16(pair.x, pair.y);
        }
        break;
    case DTYPE_E4M3:
        bytes = *(const uint2 *)(row + i);
        for (int j = 0; j < 4; j++) {
            __half2_raw h = __nv_cvt_fp8x2_to_halfraw2(((const __nv_fp8x2_storage_t *)&bytes)[j], __NV_E4M3);
            float2 pair = __half22float2(h);

            (&v.x)[j] = pack_bf16(pair.x, pair.y);
        }
        break;
    case DTYPE_N:
        break;
    }
    return v;
}
