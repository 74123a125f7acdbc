#include "weights.h"
#include <assert.h>

enum { SCALE_BLOCK = 128 };

struct tensor tensor_rows(struct tensor t, int begin, int n) {
    assert(begin >= 0 && n >= 0 && begin <= t.n_rows - n);
    assert(!t.scale || begin % SCALE_BLOCK == 0);
    t.data = (const char *)t.data + (size_t)begin * t.row_bytes;
    if (t.scale)
        t.scale =
            (const char *)t.scale + (size_t)(begin / SCALE_BLOCK) * (size_t)t.scale_cols * dtype_bytes(t.scale_dtype);
    t.n_rows = n;
    return t;
}

struct tensor tensor_cols(struct tensor t, int begin, int n) {
    assert(begin >= 0 && n >= 0 && begin <= t.n_cols - n);
    assert(!t.scale || begin % SCALE_BLOCK == 0);
    t.data = (const char *)t.data + (size_t)begin * dtype_bytes(t.dtype);
    if (t.scale)
        t.scale = (const char *)t.scale + (size_t)(begin / SCALE_BLOCK) * dtype_bytes(t.scale_dtype);
    t.n_cols = n;
    return t;
}

static float element(enum dtype dtype, const void *data, size_t i) {
    switch (dtype) {
    case DTYPE_F32:
        return ((const float *)data)[i];
    case DTYPE_BF16:
        return bf16_to_f32(((const uint16_t *)data)[i]);
    case DTYPE_F16:
        return f16_to_f32(((const uint16_t *)data)[i]);
    default:
        return e4m3_to_f32(((const uint8_t *)data)[i]);
    }
}

float tensor_at(const struct tensor *t, int row, int col) {
    float value;

    assert(row >= 0 && row < t->n_rows && col >= 0 && col < t->n_cols);
    value = element(t->dtype, (const char *)t->data + (size_t)row * t->row_bytes, (size_t)col);
    if (t->scale)
        value *= element(t->scale_dtype, t->scale,
                         (size_t)(row / SCALE_BLOCK) * (size_t)t->scale_cols + (size_t)(col / SCALE_BLOCK));
    return value;
}
