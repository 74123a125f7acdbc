/* cuda_rig: every op on two devices, the CPU's oracle (NUMERIC_BF16) and the GPU, with the same random inputs. A buffer
 * lies on both; results are fetched as f32 and compared. Outputs are poisoned with NaN before. Without a card: exit 77. */
#pragma once
#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "backend.h"

enum { CPU, GPU, N_SIDES, BUFS_MAX = 256, EXIT_SKIP = 77 };

struct side {
    const struct backend *backend;
    struct device *device;
    struct stream *stream;
};
struct buf {
    void *mem[N_SIDES];
    size_t bytes[N_SIDES];
    size_t n;    /* elements, as floats are fetched */
    bool is_act; /* f32 on the CPU, bf16 on the GPU */
};
struct rig {
    struct side side[N_SIDES];
    struct buf bufs[BUFS_MAX];
    int n_bufs;
    struct weight *weights[BUFS_MAX][N_SIDES];
    int n_weights;
    uint64_t random;
};

static inline float rig_random(struct rig *rig) { /* in [-1, 1) */
    rig->random = rig->random * 6364136223846793005u + 1442695040888963407u;
    return (float)((int32_t)(rig->random >> 40) - (1 << 23)) * 0x1p-23f;
}
static inline int rig_below(struct rig *rig, int n) {
    return (int)((rig_random(rig) + 1) * 0.5f * (float)n) % n;
}

static inline void rig_open(struct rig *rig) {
    struct backend_options options = {.numeric = NUMERIC_BF16};

    *rig = (struct rig){.random = 0x5eed};
    for (int i = 0; i < N_SIDES; i++) {
        struct side *side = &rig->side[i];
        int r;

        side->backend = backend_find(i == CPU ? "cpu" : "cuda");
        r = side->backend->open(&options, &side->device);
        if (i == GPU && r == -ENODEV) {
            printf("no card, or built without CUDA\n");
            exit(EXIT_SKIP);
        }
        assert_int_equal(r, 0);
        assert_int_equal(side->backend->stream_open(side->device, STREAM_COMPUTE, &side->stream), 0);
    }
}

/* Frees the buffers made since there were n_bufs. */
static inline void rig_forget(struct rig *rig, int n_bufs) {
    for (; rig->n_bufs > n_bufs; rig->n_bufs--)
        for (int i = 0; i < N_SIDES; i++)
            rig->side[i].backend->mem_free(rig->side[i].device, MEM_DEVICE, rig->bufs[rig->n_bufs - 1].mem[i],
                                           rig->bufs[rig->n_bufs - 1].bytes[i]);
}

/* Frees all buffers and weights. */
static inline void rig_clear(struct rig *rig) {
    rig_forget(rig, 0);
    for (int i = 0; i < N_SIDES; i++) {
        struct side *side = &rig->side[i];

        for (int w = 0; w < rig->n_weights; w++)
            side->backend->weight_free(side->device, rig->weights[w][i]);
    }
    rig->n_weights = 0;
}

static inline void rig_close(struct rig *rig) {
    rig_clear(rig);
    for (int i = 0; i < N_SIDES; i++) {
        assert_int_equal(rig->side[i].backend->status(rig->side[i].device), 0);
        rig->side[i].backend->stream_close(rig->side[i].stream);
        rig->side[i].backend->close(rig->side[i].device);
    }
}

/* Between device memory and the host, through pinned memory. */
static inline void rig_copy(struct side *side, void *device, void *host, size_t bytes, bool to_device) {
    void *pinned;

    assert_int_equal(side->backend->mem_alloc(side->device, MEM_HOST, bytes, &pinned), 0);
    if (to_device)
        memcpy(pinned, host, bytes);
    assert_int_equal(side->backend->copy(side->stream, to_device ? device : pinned, to_device ? pinned : device, bytes),
                     0);
    assert_int_equal(backend_stream_wait(side->backend, side->stream), 0);
    if (!to_device)
        memcpy(host, pinned, bytes);
    side->backend->mem_free(side->device, MEM_HOST, pinned, bytes);
}

static inline void rig_set_bytes(struct rig *rig, const struct buf *buf, const void *bytes, size_t n_bytes) {
    for (int i = 0; i < N_SIDES; i++)
        rig_copy(&rig->side[i], buf->mem[i], (void *)(uintptr_t)bytes, n_bytes, true);
}

static inline struct buf *rig_new(struct rig *rig, size_t n, size_t cpu_elem, size_t gpu_elem) {
    struct buf *buf = &rig->bufs[rig->n_bufs];

    assert_true(rig->n_bufs < BUFS_MAX);
    *buf = (struct buf){.n = n, .bytes = {n * cpu_elem, n * gpu_elem}, .is_act = cpu_elem != gpu_elem};
    for (int i = 0; i < N_SIDES; i++)
        assert_int_equal(rig->side[i].backend->mem_alloc(rig->side[i].device, MEM_DEVICE, buf->bytes[i], &buf->mem[i]),
                         0);
    rig->n_bufs++;
    return buf;
}
static inline struct buf *rig_words(struct rig *rig, const void *words, size_t n) { /* 4 bytes each */
    struct buf *buf = rig_new(rig, n, 4, 4);

    rig_set_bytes(rig, buf, words, n * 4);
    return buf;
}

static inline void rig_set(struct rig *rig, const struct buf *buf, const float *values) {
    uint16_t *half = malloc(buf->n * sizeof *half);
    float *rounded = malloc(buf->n * sizeof *rounded);

    for (size_t i = 0; i < buf->n; i++) {
        half[i] = bf16_from_f32(values[i]);
        rounded[i] = buf->is_act ? bf16_round(values[i]) : values[i];
    }
    rig_copy(&rig->side[CPU], buf->mem[CPU], rounded, buf->n * 4, true);
    rig_copy(&rig->side[GPU], buf->mem[GPU], buf->is_act ? (void *)half : (void *)rounded, buf->bytes[GPU], true);
    free(half);
    free(rounded);
}

static inline float *rig_randoms(struct rig *rig, size_t n, float scale) {
    float *values = malloc(n * sizeof *values);

    for (size_t i = 0; i < n; i++)
        values[i] = rig_random(rig) * scale;
    return values;
}

static inline struct buf *rig_floats(struct rig *rig, size_t n, float scale, bool is_act) {
    struct buf *buf = rig_new(rig, n, 4, is_act ? 2 : 4);
    float *values = rig_randoms(rig, n, scale);

    rig_set(rig, buf, values);
    free(values);
    return buf;
}
/* An output: NaN until it is written. */
static inline struct buf *rig_poison(struct rig *rig, size_t n, bool is_act) {
    struct buf *buf = rig_new(rig, n, 4, is_act ? 2 : 4);
    float *values = malloc(n * sizeof *values);

    for (size_t i = 0; i < n; i++)
        values[i] = NAN;
    rig_set(rig, buf, values);
    free(values);
    return buf;
}

static inline float *rig_get(struct rig *rig, const struct buf *buf, int side) {
    void *raw = malloc(buf->bytes[side]);
    float *values = malloc(buf->n * sizeof *values);

    rig_copy(&rig->side[side], buf->mem[side], raw, buf->bytes[side], false);
    for (size_t i = 0; i < buf->n; i++)
        values[i] = buf->bytes[side] == buf->n * 2 ? bf16_to_f32(((uint16_t *)raw)[i]) : ((float *)raw)[i];
    free(raw);
    return values;
}

/* Norm of the difference over the norm of the oracle's, over elements [from, to) of both. */
static inline void rig_compare(struct rig *rig, const struct buf *buf, size_t from, size_t to, double limit,
                               const char *what) {
    float *want = rig_get(rig, buf, CPU), *got = rig_get(rig, buf, GPU);
    double diff = 0, norm = 0, error;

    for (size_t i = from; i < to; i++) {
        double d = (double)got[i] - (double)want[i];

        diff += d * d;
        norm += (double)want[i] * (double)want[i];
    }
    error = sqrt(diff) / (norm > 0 ? sqrt(norm) : 1);
    printf("%-56s %.2e (limit %.0e)\n", what, error, limit);
    if (!(error <= limit))
        for (size_t i = from, n = 0; i < to && n < 8; i++)
            if (!(fabs((double)got[i] - (double)want[i]) <= limit * fabs((double)want[i]))) {
                printf("  [%zu] %g, wanted %g\n", i - from, (double)got[i], (double)want[i]);
                n++;
            }
    assert_true(error <= limit);
    free(want);
    free(got);
}
static inline void rig_compare_words(struct rig *rig, const struct buf *buf, const char *what) {
    int32_t *want = malloc(buf->bytes[CPU]), *got = malloc(buf->bytes[CPU]);

    rig_copy(&rig->side[CPU], buf->mem[CPU], want, buf->bytes[CPU], false);
    rig_copy(&rig->side[GPU], buf->mem[GPU], got, buf->bytes[CPU], false);
    for (size_t i = 0; i < buf->bytes[CPU] / 4; i++)
        if (want[i] != got[i]) {
            printf("%s: word %zu is %d, wanted %d\n", what, i, got[i], want[i]);
            fail();
        }
    free(want);
    free(got);
}

/* ---- weights */

static inline struct weight **rig_pack(struct rig *rig, enum weight_form form, int n_rows, int n_cols, int n_stack,
                                       float scale) {
    size_t n = (size_t)n_stack * (size_t)n_rows * (size_t)n_cols;
    int n_parts = form == WEIGHT_GATE_UP ? 2 : 1;
    struct weight_part *parts = calloc((size_t)(n_stack * n_parts), sizeof *parts);
    struct weight_desc desc = {form, n_cols, n_stack, n_parts, parts};
    uint16_t *raw = malloc(n * sizeof *raw);

    for (size_t i = 0; i < n; i++)
        raw[i] = bf16_from_f32(rig_random(rig) * scale);
    for (int p = 0; p < n_stack * n_parts; p++)
        parts[p] = (struct weight_part){.data = raw + (size_t)p * (size_t)(n_rows / n_parts) * (size_t)n_cols,
                                        .dtype = DTYPE_BF16,
                                        .n_rows = n_rows / n_parts,
                                        .row_bytes = (size_t)n_cols * 2};
    assert_true(rig->n_weights < BUFS_MAX);
    for (int i = 0; i < N_SIDES; i++)
        assert_int_equal(
            rig->side[i].backend->weight_pack(rig->side[i].device, &desc, &rig->weights[rig->n_weights][i]), 0);
    free(raw);
    free(parts);
    return rig->weights[rig->n_weights++];
}

/* ---- batches. Segs of n_rows[i] rows at pos[i], slots in falling order, every row an output. */
struct rig_batch {
    struct batch side[N_SIDES];
    int n_rows;
};
static inline struct rig_batch rig_batch(struct rig *rig, int n_segs, const int *n_rows, const int *pos,
                                         const int *flags, int n_rows_max) {
    size_t n = (size_t)n_rows_max, s = (size_t)n_segs;
    int32_t *words = calloc(3 + 4 * s + 1 + 3 * n, sizeof *words);
    int32_t *slot = words + 3, *seg_pos = slot + s, *seg_flags = seg_pos + s, *seg_row = seg_flags + s;
    int32_t *token = seg_row + s + 1, *row_seg = token + n, *out_row = row_seg + n;
    struct rig_batch batch = {.n_rows = 0};
    struct buf *buf;

    for (int i = 0; i < n_segs; i++) {
        slot[i] = n_segs - 1 - i;
        seg_pos[i] = pos[i];
        seg_flags[i] = flags ? flags[i] : 0;
        seg_row[i] = batch.n_rows;
        for (int j = 0; j < n_rows[i]; j++, batch.n_rows++) {
            token[batch.n_rows] = rig_below(rig, 60000);
            row_seg[batch.n_rows] = i;
            out_row[batch.n_rows] = batch.n_rows;
        }
    }
    seg_row[n_segs] = batch.n_rows;
    words[0] = n_segs;
    words[1] = words[2] = batch.n_rows;
    buf = rig_words(rig, words, 3 + 4 * s + 1 + 3 * n);
    for (int i = 0; i < N_SIDES; i++) {
        int32_t *w = buf->mem[i];

        batch.side[i] = (struct batch){.n_segs_max = n_segs,
                                       .n_rows_max = n_rows_max,
                                       .n_outs_max = n_rows_max,
                                       .n_segs = w,
                                       .n_rows = w + 1,
                                       .n_outs = w + 2,
                                       .seg_slot = w + (slot - words),
                                       .seg_row = w + (seg_row - words),
                                       .seg_pos = w + (seg_pos - words),
                                       .seg_flags = w + (seg_flags - words),
                                       .row_token = w + (token - words),
                                       .row_seg = w + (row_seg - words),
                                       .out_row = w + (out_row - words)};
    }
    free(words);
    return batch;
}
static inline struct rig_batch rig_rows(struct rig *rig, int n_rows, int n_rows_max) { /* one seg from position 0 */
    return rig_batch(rig, 1, &n_rows, (int[]){0}, NULL, n_rows_max);
}

/* ---- running one op: RIG_RUN(rig, side, op, &args) records a program of it, runs it and waits. */
#define RIG_RUN(rig, i, op, args)                                                                                      \
    do {                                                                                                               \
        const struct side *side_ = &(rig)->side[i];                                                                    \
        struct program *program_;                                                                                      \
        assert_int_equal(side_->backend->program_begin(side_->device, &program_), 0);                                  \
        assert_int_equal(side_->backend->op(program_, args), 0);                                                       \
        assert_int_equal(side_->backend->program_end(program_), 0);                                                    \
        assert_int_equal(side_->backend->program_run(side_->stream, program_), 0);                                     \
        assert_int_equal(backend_stream_wait(side_->backend, side_->stream), 0);                                       \
        side_->backend->program_free(program_);                                                                        \
    } while (0)
