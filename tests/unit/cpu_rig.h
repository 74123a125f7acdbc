/* cpu_rig: a CPU device with one compute stream, random matrices, and calls of the internals on the compute thread. */
#pragma once
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "cpu/device.h"
#include "cpu/gemm.h"

extern const struct backend backend_cpu;

struct rig {
    struct device *device;
    struct stream *stream;
    uint64_t random;
};

static inline struct rig rig_open(const struct backend_options *options) {
    struct rig rig = {.random = 0x1234567};

    assert_int_equal(backend_cpu.open(options, &rig.device), 0);
    assert_int_equal(backend_cpu.stream_open(rig.device, STREAM_COMPUTE, &rig.stream), 0);
    return rig;
}

static inline void rig_close(struct rig *rig) {
    backend_cpu.stream_close(rig->stream);
    backend_cpu.close(rig->device);
}

static inline float rig_random(struct rig *rig) { /* in [-1, 1) */
    rig->random = rig->random * 6364136223846793005u + 1442695040888963407u;
    return (float)((int32_t)(rig->random >> 40) - (1 << 23)) * 0x1p-23f;
}

struct matrix {
    int n_rows, n_cols;
    enum dtype dtype;
    void *raw;  /* as a checkpoint holds it */
    float *f32; /* the values */
};

static inline struct matrix matrix_new(struct rig *rig, int n_rows, int n_cols, enum dtype dtype) {
    struct matrix m = {n_rows, n_cols, dtype, NULL, NULL};
    size_t n = (size_t)n_rows * (size_t)n_cols;

    m.raw = calloc(n, dtype_bytes(dtype));
    m.f32 = calloc(n, sizeof *m.f32);
    for (size_t i = 0; i < n; i++) {
        float v = rig_random(rig);

        switch (dtype) {
        case DTYPE_F32:
            ((float *)m.raw)[i] = m.f32[i] = v;
            break;
        case DTYPE_BF16:
            ((uint16_t *)m.raw)[i] = bf16_from_f32(v);
            m.f32[i] = bf16_round(v);
            break;
        case DTYPE_F16:
            ((uint16_t *)m.raw)[i] = f16_from_f32(v);
            m.f32[i] = f16_to_f32(f16_from_f32(v));
            break;
        default:
            ((uint8_t *)m.raw)[i] = e4m3_from_f32(v);
            m.f32[i] = e4m3_to_f32(e4m3_from_f32(v));
            break;
        }
    }
    return m;
}

static inline void matrix_free(struct matrix *m) {
    free(m->raw);
    free(m->f32);
}

static inline struct weight_part matrix_part(const struct matrix *m) {
    return (struct weight_part){
        .data = m->raw, .dtype = m->dtype, .n_rows = m->n_rows, .row_bytes = (size_t)m->n_cols * dtype_bytes(m->dtype)};
}

/* WEIGHT_ROWS of one matrix; n_stack equal row blocks are experts. */
static inline struct weight *rig_pack(struct rig *rig, const struct matrix *m, int n_stack) {
    struct weight_part *parts = calloc((size_t)n_stack, sizeof *parts);
    struct weight_desc desc = {WEIGHT_ROWS, m->n_cols, n_stack, 1, parts};
    struct weight *weight = NULL;

    for (int e = 0; e < n_stack; e++) {
        parts[e] = matrix_part(m);
        parts[e].n_rows = m->n_rows / n_stack;
        parts[e].data = (char *)m->raw + (size_t)e * (size_t)parts[e].n_rows * parts[e].row_bytes;
    }
    assert_int_equal(backend_cpu.weight_pack(rig->device, &desc, &weight), 0);
    free(parts);
    return weight;
}

/* WEIGHT_GATE_UP: m holds, expert after expert, the gate rows and then the up rows. */
static inline struct weight *rig_pack_gate_up(struct rig *rig, const struct matrix *m, int n_stack) {
    struct weight_part *parts = calloc(2 * (size_t)n_stack, sizeof *parts);
    struct weight_desc desc = {WEIGHT_GATE_UP, m->n_cols, n_stack, 2, parts};
    struct weight *weight = NULL;

    for (int i = 0; i < 2 * n_stack; i++) {
        parts[i] = matrix_part(m);
        parts[i].n_rows = m->n_rows / n_stack / 2;
        parts[i].data = (char *)m->raw + (size_t)i * (size_t)parts[i].n_rows * parts[i].row_bytes;
    }
    assert_int_equal(backend_cpu.weight_pack(rig->device, &desc, &weight), 0);
    free(parts);
    return weight;
}

struct rig_gemm_call {
    struct device *device;
    const struct weight *weight;
    int stack_idx;
    const float *x;
    int x_stride, n_rows;
    float *y;
    int y_stride;
};

static inline void rig_gemm_run(void *arg) {
    const struct rig_gemm_call *c = arg;
    size_t bytes = cpu_gemm_scratch_bytes(c->n_rows, cpu_weight_cols(c->weight));
    void *scratch = cpu_mem_new(bytes);

    cpu_gemm(c->device, c->weight, c->stack_idx, c->x, c->x_stride, c->n_rows, c->y, c->y_stride, scratch);
    cpu_mem_free(scratch, bytes);
}

static inline void rig_gemm(struct rig *rig, const struct weight *weight, int stack_idx, const float *x, int x_stride,
                            int n_rows, float *y, int y_stride) {
    struct rig_gemm_call call = {rig->device, weight, stack_idx, x, x_stride, n_rows, y, y_stride};

    cpu_queue_call(rig->device->queue, rig_gemm_run, &call);
}

/* A batch of one seg whose rows count from 0; all its arrays in one block. */
static inline struct batch rig_batch(int n_rows_max) {
    size_t n = (size_t)n_rows_max;
    int32_t *ints = calloc(8 + 3 * n, sizeof *ints);

    ints[0] = 1;
    ints[1] = n_rows_max;
    return (struct batch){.n_segs_max = 1,
                          .n_rows_max = n_rows_max,
                          .n_outs_max = n_rows_max,
                          .n_segs = ints,
                          .n_rows = ints + 1,
                          .n_outs = ints + 2,
                          .seg_row = ints + 3,
                          .seg_slot = ints + 5,
                          .seg_pos = ints + 6,
                          .seg_flags = ints + 7,
                          .row_token = ints + 8,
                          .row_seg = ints + 8 + n,
                          .out_row = ints + 8 + 2 * n};
}

static inline void rig_batch_free(struct batch *batch) {
    free(batch->n_segs);
}

static inline struct program *rig_begin(struct rig *rig) {
    struct program *program;

    assert_int_equal(backend_cpu.program_begin(rig->device, &program), 0);
    return program;
}

static inline void rig_run(struct rig *rig, struct program *program) {
    assert_int_equal(backend_cpu.program_run(rig->stream, program), 0);
    assert_int_equal(backend_stream_wait(&backend_cpu, rig->stream), 0);
}
