/* pack: tensors of a checkpoint -> packed weights and small f32 vectors on the device. */
#pragma once
#include "devmem.h"
#include "weights.h"

enum { PACK_PARTS_MAX = 2 * DRAFT_LAYERS_MAX };

/* Row blocks of equal n_cols stacked into one matrix. NULL on failure. */
struct weight *pack_rows(struct devmem *mem, const struct tensor *const *parts, int n_parts);
struct weight *pack_matrix(struct devmem *mem, const struct tensor *t);
struct weight *pack_gate_up(struct devmem *mem, const struct tensor *gate, const struct tensor *up);
/* One weight of n_experts matrices; form WEIGHT_GATE_UP takes gate and up, WEIGHT_ROWS takes down. */
struct weight *pack_experts(struct devmem *mem, enum weight_form form, const struct expert_weights *experts,
                            int n_experts);

/* Vectors and small matrices, row major, concatenated, as f32; `plus_one` folds the 1+w of the target's norms. */
const float *pack_vectors(struct devmem *mem, const struct tensor *const *parts, int n_parts, bool plus_one);
const float *pack_vector(struct devmem *mem, const struct tensor *t, bool plus_one);
/* inv_freq[i] = theta^(-2i / rotary_dim) in f64, stored f32; [rotary_dim / 2] */
const float *pack_inv_freq(struct devmem *mem, double theta, int rotary_dim);
