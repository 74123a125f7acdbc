/* sample: one token from each row of raw logits. The rules (order of the edits, of ties, of the draw) are those of
 * kernels/cpu/sample.h. Weights are 35-bit fractions of the best token's, summed as integers: the sum does not depend on
 * the order in which threads add. Internal to head.cu and sample.cu. */
#pragma once
#include "cuda.cuh"

enum { SAMPLE_TILE = 128 }; /* ids whose largest logit is kept, so that later readings of a row skip most of it */

struct sample_rows {
    struct batch batch;
    const float *logits; /* [n_outs, vocab] raw */
    int vocab, n_valid;
    bool is_argmax; /* of the raw logits, nothing else is looked at */
    const struct seq_ctl *ctl;
    struct seq_tables tables;
    bool has_tables;
    int32_t *chosen; /* -1: a raw logit of a valid id is not finite, or the bias leaves no id */
    struct logprob_row *logprobs;
    int32_t *tile_max; /* [n_outs_max, n_tiles] scratch */
};
static inline size_t sample_tile_bytes(int n_valid) { /* of one row */
    return (size_t)div_ceil((uint64_t)n_valid, SAMPLE_TILE) * sizeof(int32_t);
}
void sample_launch(const struct launch *launch, const struct sample_rows *rows);
