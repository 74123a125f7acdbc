/* sample: one token from one row of raw logits. Pure: the result depends on the arguments alone, never on the batch, the
 * block, earlier calls or the numeric mode, so that greedy is argmax everywhere.
 *
 * Order: logit bias, repetition, presence and frequency penalty; temperature; top_k; top_p; min_p (relative to the best
 * token); draw. The draw inverts the cumulative distribution over the remaining ids sorted by falling logit, ties by
 * lower id, with a number made from (seed, position of the token, purpose) alone. */
#pragma once
#include "../backend.h"

enum { SAMPLE_TILE = 128 }; /* ids whose largest logit is kept, so that top_k reads few of them again */

struct sample_row {
    const float *logits; /* [n_valid or more] raw */
    int n_valid;
    const struct seq_ctl *ctl;
    const struct seq_tables *tables; /* NULL: no penalties, no bias */
    int slot;                        /* row of the tables */
    const int32_t *drafts; /* [n_drafts] tokens of the block between the anchor and this row's, this row's included: */
    int n_drafts;          /* the penalties see them as generated; ids outside [0, n_valid) are ignored */
    int position;          /* of the token that is chosen */
};

/* The id, or -1 if a raw logit of a valid id is not finite or the bias leaves no id. logprobs may be NULL; it is
 * written if a token was chosen and sample.n_logprobs >= 0. scratch: sample_scratch_bytes(n_valid), 64-byte aligned. */
int32_t sample_choose(const struct sample_row *row, void *scratch, struct logprob_row *logprobs);
size_t sample_scratch_bytes(int n_valid);

/* The id of the largest of n_valid logits, the lowest if several are; -1 if one is not finite. */
int32_t sample_argmax(const float *logits, int n_valid);

/* Philox4x32 with 10 rounds: J. Salmon, M. Moraes, R. Dror, D. Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3",
 * SC'11. */
void sample_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t ret[4]);

/* What a random number is for: two uses at one position must not share one. */
enum sample_purpose { SAMPLE_TARGET };
double sample_uniform(uint64_t seed, uint64_t position, enum sample_purpose purpose); /* [0, 1), 53 bits */
