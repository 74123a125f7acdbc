#include "pack.h"

#include <math.h>
#include <stdlib.h>

static struct weight_part part_of(const struct tensor *t) {
    return (struct weight_part){.data = t->data,
                                .dtype = t->dtype,
                                .n_rows = t->n_rows,
                                .row_bytes = t->row_bytes,
                                .scale = t->scale,
                                .scale_dtype = t->scale_dtype,
                                .scale_cols = t->scale_cols};
}

struct weight *pack_rows(struct devmem *mem, const struct tensor *const *parts, int n_parts) {
    struct weight_part list[PACK_PARTS_MAX];
    struct weight_desc desc = {.form = WEIGHT_ROWS, .n_stack = 1, .n_parts = n_parts, .parts = list};

    if (n_parts < 1 || n_parts > PACK_PARTS_MAX)
        return NULL;
    desc.n_cols = parts[0]->n_cols;
    for (int i = 0; i < n_parts; i++)
        list[i] = part_of(parts[i]);
    return devmem_pack(mem, &desc);
}

struct weight *pack_matrix(struct devmem *mem, const struct tensor *t) {
    return pack_rows(mem, &t, 1);
}

struct weight *pack_gate_up(struct devmem *mem, const struct tensor *gate, const struct tensor *up) {
    struct weight_part list[2] = {part_of(gate), part_of(up)};
    struct weight_desc desc = {
        .form = WEIGHT_GATE_UP, .n_cols = gate->n_cols, .n_stack = 1, .n_parts = 2, .parts = list};

    return devmem_pack(mem, &desc);
}

struct weight *pack_experts(struct devmem *mem, enum weight_form form, const struct expert_weights *experts,
                            int n_experts) {
    int n_parts = form == WEIGHT_GATE_UP ? 2 : 1;
    struct weight_part *list = calloc((size_t)n_experts * (size_t)n_parts, sizeof *list);
    struct weight_desc desc = {.form = form, .n_stack = n_experts, .n_parts = n_parts, .parts = list};
    struct weight *weight;

    if (!list)
        return NULL;
    desc.n_cols = n_parts == 2 ? experts[0].gate.n_cols : experts[0].down.n_cols;
    for (int e = 0; e < n_experts; e++) {
        if (n_parts == 2) {
            list[2 * e] = part_of(&experts[e].gate);
            list[2 * e + 1] = part_of(&experts[e].up);
        } else {
            list[e] = part_of(&experts[e].down);
        }
    }
    weight = devmem_pack(mem, &desc);
    free(list);
    return weight;
}

const float *pack_vectors(struct devmem *mem, const struct tensor *const *parts, int n_parts, bool plus_one) {
    const float *uploaded;
    float *values;
    size_t n = 0, at = 0;

    for (int i = 0; i < n_parts; i++)
        n += (size_t)parts[i]->n_rows * (size_t)parts[i]->n_cols;
    values = malloc(n * sizeof *values + 1);
    if (!values)
        return NULL;
    for (int i = 0; i < n_parts; i++)
        for (int row = 0; row < parts[i]->n_rows; row++)
            for (int col = 0; col < parts[i]->n_cols; col++)
                values[at++] = tensor_at(parts[i], row, col) + (plus_one ? 1.0f : 0.0f);
    uploaded = devmem_upload(mem, values, n * sizeof *values);
    free(values);
    return uploaded;
}

const float *pack_vector(struct devmem *mem, const struct tensor *t, bool plus_one) {
    return pack_vectors(mem, &t, 1, plus_one);
}

const float *pack_inv_freq(struct devmem *mem, double theta, int rotary_dim) {
    const float *uploaded;
    float *values = malloc((size_t)rotary_dim / 2 * sizeof *values + 1);

    if (!values)
        return NULL;
    for (int i = 0; i < rotary_dim / 2; i++)
        values[i] = (float)pow(theta, -2.0 * i / rotary_dim);
    uploaded = devmem_upload(mem, values, (size_t)rotary_dim / 2 * sizeof *values);
    free(values);
    return uploaded;
}
