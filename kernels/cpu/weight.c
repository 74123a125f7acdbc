/* weight: checkpoint tensors to packed panels (gemm.h), at load time, on all workers. Each worker packs the panels it will
 * later read, so that their memory lies near it. */
#include "device.h"
#include "gemm.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>

enum { SCALE_BLOCK = 128 };

/* ---- reading a checkpoint row ------------------------------------------------------------------------------------ */

static float load_f32(const void *base, size_t i) { /* tensors of a mapped file need not be aligned */
    float f;

    memcpy(&f, (const char *)base + i * sizeof f, sizeof f);
    return f;
}

static uint16_t load_u16(const void *base, size_t i) {
    uint16_t u;

    memcpy(&u, (const char *)base + i * sizeof u, sizeof u);
    return u;
}

static void read_row(const struct weight_part *part, int row, int n_cols, float *out) {
    const char *src = (const char *)part->data + (size_t)row * part->row_bytes;

    switch (part->dtype) {
    case DTYPE_F32:
        memcpy(out, src, (size_t)n_cols * sizeof *out);
        break;
    case DTYPE_BF16:
        for (int k = 0; k < n_cols; k++)
            out[k] = bf16_to_f32(load_u16(src, (size_t)k));
        break;
    case DTYPE_F16:
        for (int k = 0; k < n_cols; k++)
            out[k] = f16_to_f32(load_u16(src, (size_t)k));
        break;
    case DTYPE_E4M3:
        for (int k = 0; k < n_cols; k++) {
            size_t i = (size_t)(row / SCALE_BLOCK) * (size_t)part->scale_cols + (size_t)(k / SCALE_BLOCK);
            float scale =
                part->scale_dtype == DTYPE_F32 ? load_f32(part->scale, i) : bf16_to_f32(load_u16(part->scale, i));

            out[k] = e4m3_to_f32((uint8_t)src[k]) * scale;
        }
        break;
    case DTYPE_N:
        break;
    }
}

/* ---- packing ------------------------------------------------------------------------------------------------------ */

struct pack {
    struct device *device;
    const struct weight_desc *desc;
    struct weight *weight;
    float *rows; /* [n_threads, n_cols] one row per worker */
};

/* The part and the row in it that hold row r of a panel; NULL for padding. */
static const struct weight_part *find_row(const struct weight_desc *desc, int stack_idx, int panel, int r,
                                          int *ret_row) {
    const struct weight_part *part = desc->parts + (size_t)stack_idx * (size_t)desc->n_parts;
    const struct weight_part *end = part + desc->n_parts;
    int row;

    if (desc->form == WEIGHT_GATE_UP) {
        part += panel % 2;
        end = part + 1;
        panel /= 2;
    }
    row = panel * PANEL_ROWS + r;
    for (; part < end; part++) {
        if (row < part->n_rows) {
            *ret_row = row;
            return part;
        }
        row -= part->n_rows;
    }
    return NULL;
}

static void pack_row(const struct pack *pack, const struct weight_part *part, int row, char *panel, int r,
                     float *values) {
    const struct weight *weight = pack->weight;

    if (weight->elem == DTYPE_BF16 && part->dtype == DTYPE_BF16) {
        const char *src = (const char *)part->data + (size_t)row * part->row_bytes;
        uint16_t *dst = (uint16_t *)(void *)panel + 2 * r;

        for (int k = 0; k + 1 < weight->n_cols; k += 2, dst += 2 * PANEL_ROWS)
            memcpy(dst, src + (size_t)k * 2, 4);
        if (weight->n_cols % 2 != 0)
            *dst = load_u16(src, (size_t)weight->n_cols - 1);
        return;
    }
    read_row(part, row, weight->n_cols, values);
    for (int k = 0; k < weight->n_cols; k++) {
        size_t at = ((size_t)(k / 2) * PANEL_ROWS + (size_t)r) * 2 + (size_t)(k % 2);

        if (weight->elem == DTYPE_BF16)
            ((uint16_t *)(void *)panel)[at] = bf16_from_f32(values[k]);
        else
            ((float *)(void *)panel)[at] = values[k];
    }
}

static void pack_share(void *arg, int worker, int n_workers) {
    const struct pack *pack = arg;
    const struct weight *weight = pack->weight;
    float *values = pack->rows + (size_t)worker * (size_t)weight->n_cols;
    struct cpu_range range =
        cpu_share(weight->n_stack * weight->n_panels, weight->form == WEIGHT_GATE_UP ? 2 : 1, worker, n_workers);

    for (int i = range.begin; i < range.end; i++) {
        char *panel = weight->data + (size_t)i * weight->panel_bytes; /* zeroed memory: padding is in place */

        for (int r = 0, row; r < PANEL_ROWS; r++) {
            const struct weight_part *part = find_row(pack->desc, i / weight->n_panels, i % weight->n_panels, r, &row);

            if (part != NULL)
                pack_row(pack, part, row, panel, r, values);
        }
    }
}

static void pack_all(void *arg) {
    struct pack *pack = arg;

    cpu_parallel(pack->device, pack_share, pack);
}

/* ---- checks ------------------------------------------------------------------------------------------------------- */

static bool part_is_valid(const struct weight_part *part, int n_cols) {
    if (part->data == NULL || part->n_rows <= 0 || (unsigned)part->dtype >= DTYPE_N)
        return false;
    if (part->row_bytes == 0 || part->row_bytes % dtype_bytes(part->dtype) != 0)
        return false;
    if (part->dtype != DTYPE_E4M3)
        return part->scale == NULL;
    return part->scale != NULL && (part->scale_dtype == DTYPE_F32 || part->scale_dtype == DTYPE_BF16) &&
           part->scale_cols >= (int)div_ceil((uint64_t)n_cols, SCALE_BLOCK);
}

/* Fills the shape of the weight. */
static int check(const struct device *device, const struct weight_desc *desc, struct weight *weight) {
    uint64_t n_rows = 0, n_panels, bytes;

    if (desc->n_cols <= 0 || desc->n_cols == INT_MAX || desc->n_stack <= 0 || desc->n_parts <= 0 || desc->parts == NULL)
        return -EINVAL;
    if (desc->form != WEIGHT_ROWS && desc->form != WEIGHT_GATE_UP)
        return -EINVAL;
    weight->elem = DTYPE_BF16;
    for (int e = 0; e < desc->n_stack; e++) {
        const struct weight_part *parts = desc->parts + (size_t)e * (size_t)desc->n_parts;

        for (int i = 0; i < desc->n_parts; i++) {
            if (!part_is_valid(&parts[i], desc->n_cols) || parts[i].n_rows != desc->parts[i].n_rows)
                return -EINVAL;
            if (parts[i].dtype != DTYPE_BF16 && device->numeric != NUMERIC_FAST)
                weight->elem = DTYPE_F32;
        }
    }
    for (int i = 0; i < desc->n_parts; i++)
        n_rows += (uint64_t)desc->parts[i].n_rows;
    n_panels = div_ceil(n_rows, PANEL_ROWS);
    if (desc->form == WEIGHT_GATE_UP) {
        if (desc->n_parts != 2 || desc->parts[0].n_rows != desc->parts[1].n_rows)
            return -EINVAL;
        n_panels = 2 * div_ceil(n_rows / 2, PANEL_ROWS);
    }
    if (n_rows > INT_MAX || n_panels * (uint64_t)desc->n_stack > INT_MAX)
        return -EINVAL;
    weight->form = desc->form;
    weight->n_rows = (int)n_rows;
    weight->n_cols = desc->n_cols;
    weight->n_stack = desc->n_stack;
    weight->n_pairs = desc->n_cols / 2 + desc->n_cols % 2;
    weight->n_panels = (int)n_panels;
    weight->panel_bytes = (size_t)weight->n_pairs * 2 * PANEL_ROWS * dtype_bytes(weight->elem);
    if (!checked_mul(n_panels * (uint64_t)desc->n_stack, weight->panel_bytes, &bytes))
        return -EINVAL;
    weight->bytes = (size_t)bytes;
    return 0;
}

int cpu_weight_pack(struct device *device, const struct weight_desc *desc, struct weight **ret_weight) {
    struct weight *weight = calloc(1, sizeof *weight);
    struct pack pack = {.device = device, .desc = desc, .weight = weight};
    int r;

    if (weight == NULL)
        return -ENOMEM;
    r = check(device, desc, weight);
    if (r == 0) {
        weight->data = cpu_mem_new(weight->bytes);
        pack.rows = calloc((size_t)device->caps.n_threads * (size_t)weight->n_cols, sizeof *pack.rows);
        if (weight->data == NULL || pack.rows == NULL)
            r = -ENOMEM;
    }
    if (r == 0)
        cpu_queue_call(device->queue, pack_all, &pack);
    free(pack.rows);
    if (r < 0) {
        cpu_weight_free(device, weight);
        return r;
    }
    *ret_weight = weight;
    return 0;
}

void cpu_weight_free(struct device *device, struct weight *weight) {
    (void)device;
    if (weight == NULL)
        return;
    cpu_mem_free(weight->data, weight->bytes);
    free(weight);
}

size_t cpu_weight_bytes(const struct weight *weight) {
    return weight->bytes;
}

int cpu_weight_rows(const struct weight *weight) {
    return weight->n_rows;
}

int cpu_weight_cols(const struct weight *weight) {
    return weight->n_cols;
}
