#include "product.h"

#include <errno.h>
#include <stdlib.h>

enum { ROW_STEP = 32, WORDS_BYTES = 64 }; /* elements from row to row of the made-up numbers, which overlap */

static int pack_copies(struct product *p, int n_copies) {
    size_t n_values = (size_t)p->n * ROW_STEP + (size_t)p->k;
    int n_parts = p->epilogue == LINEAR_SWIGLU ? 2 : 1, r = 0;
    uint16_t *data = malloc(n_values * sizeof *data);
    struct weight_part parts[2];
    struct weight_desc desc = {n_parts == 2 ? WEIGHT_GATE_UP : WEIGHT_ROWS, p->k, 1, n_parts, parts};
    uint32_t state = 1;

    if (data == NULL)
        return -ENOMEM;
    for (size_t i = 0; i < n_values; i++) {
        state = state * 1664525u + 1013904223u;
        data[i] = bf16_from_f32((float)(int32_t)state * 0x1p-36f);
    }
    for (int i = 0; i < n_parts; i++)
        parts[i] = (struct weight_part){.data = data + (size_t)i * (size_t)(p->n / n_parts) * ROW_STEP,
                                        .dtype = DTYPE_BF16,
                                        .n_rows = p->n / n_parts,
                                        .row_bytes = ROW_STEP * sizeof *data};
    for (; r == 0 && p->n_copies < n_copies; p->n_copies += r == 0)
        r = p->rig->backend->weight_pack(p->rig->device, &desc, &p->weights[p->n_copies]);
    free(data);
    return r;
}

static int fill_x(struct product *p) {
    struct rig *rig = p->rig;
    enum dtype dtype = rig->backend->caps(rig->device)->act_dtype;
    void *host = NULL;
    int r = rig->backend->mem_alloc(rig->device, MEM_HOST, p->x_bytes, &host);

    if (r != 0)
        return r;
    for (size_t i = 0; i < p->x_bytes / dtype_bytes(dtype); i++) {
        float value = (float)(int32_t)(i * 2654435761u) * 0x1p-31f;

        if (dtype == DTYPE_BF16)
            ((uint16_t *)host)[i] = bf16_from_f32(value);
        else
            ((float *)host)[i] = value;
    }
    r = rig->backend->copy(rig->compute, p->x, host, p->x_bytes);
    if (r == 0)
        r = backend_stream_wait(rig->backend, rig->compute);
    rig->backend->mem_free(rig->device, MEM_HOST, host, p->x_bytes);
    return r;
}

int product_open(struct product *p, struct rig *rig, int n, int k, enum linear_epilogue epilogue, int rows_max,
                 size_t bytes) {
    const struct backend *backend = rig->backend;
    size_t matrix_bytes = (size_t)n * (size_t)k * 2;
    void *words = NULL, *host_words = NULL;
    int r;

    *p = (struct product){.rig = rig, .n = n, .k = k, .rows_max = rows_max, .epilogue = epilogue};
    p->x_bytes = (size_t)rows_max * (size_t)k * dtype_bytes(backend->caps(rig->device)->act_dtype);
    p->y_bytes = (size_t)rows_max * (size_t)n * sizeof(float);
    r = backend->mem_alloc(rig->device, MEM_DEVICE, WORDS_BYTES, &words);
    p->words = words;
    if (r == 0)
        r = backend->mem_alloc(rig->device, MEM_HOST, WORDS_BYTES, &host_words);
    p->host_words = host_words;
    if (r == 0)
        r = backend->mem_alloc(rig->device, MEM_DEVICE, p->x_bytes, &p->x);
    if (r == 0)
        r = backend->mem_alloc(rig->device, MEM_DEVICE, p->y_bytes, &p->y);
    if (r == 0)
        r = fill_x(p);
    return r == 0 ? pack_copies(p, min_int(PRODUCT_COPIES_MAX, (int)div_ceil(bytes, matrix_bytes))) : r;
}

void product_close(struct product *p) {
    const struct backend *backend = p->rig->backend;

    while (p->n_copies > 0)
        backend->weight_free(p->rig->device, p->weights[--p->n_copies]);
    if (p->y)
        backend->mem_free(p->rig->device, MEM_DEVICE, p->y, p->y_bytes);
    if (p->x)
        backend->mem_free(p->rig->device, MEM_DEVICE, p->x, p->x_bytes);
    if (p->host_words)
        backend->mem_free(p->rig->device, MEM_HOST, p->host_words, WORDS_BYTES);
    if (p->words)
        backend->mem_free(p->rig->device, MEM_DEVICE, p->words, WORDS_BYTES);
    *p = (struct product){0};
}

static int record(struct product *p, int n_rows, int n_copies, struct program **ret_program) {
    const struct backend *backend = p->rig->backend;
    struct batch batch = {
        .n_segs_max = 1, .n_rows_max = n_rows, .n_segs = p->words, .n_rows = p->words + 1, .n_outs = p->words + 2};
    struct linear_args args = {
        .batch = &batch,
        .x = p->x,
        .x_stride = p->k,
        .n_outs = 1,
        .out = {{NULL, NULL, p->epilogue, p->y, p->epilogue == LINEAR_SWIGLU ? p->n / 2 : p->n}}};
    int r = backend->program_begin(p->rig->device, ret_program);

    for (int i = 0; r == 0 && i < n_copies; i++) {
        args.out[0].weight = p->weights[i];
        r = backend->linear(*ret_program, &args);
    }
    return r == 0 ? backend->program_end(*ret_program) : r;
}

int product_time(struct product *p, int n_rows, int n_copies, double *ret_seconds) {
    struct rig *rig = p->rig;
    struct program *program = NULL;
    double seconds = 0;
    int r;

    p->host_words[0] = 1;
    p->host_words[1] = n_rows;
    r = rig->backend->copy(rig->compute, p->words, p->host_words, 2 * sizeof(int32_t));
    if (r == 0)
        r = record(p, n_rows, n_copies, &program);
    if (r == 0)
        r = rig_time(rig, program, rig->options->n_repeats, &seconds);
    if (program)
        rig->backend->program_free(program);
    if (r == 0)
        *ret_seconds = seconds / n_copies;
    return r;
}
