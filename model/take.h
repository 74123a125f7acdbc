/* take: one tensor after another out of a checkpoint: by name, of a given shape and type, cut to this rank, and
 * ticked off, so that what is left over can be refused. Knows no network. The first refusal sticks and empties all
 * later takes: a loader is a plain list of tensors followed by one look at `error`. */
#pragma once
#include "checkpoint.h"

/* What a tensor is for: says whether it may be quantised, and the magnitude a made-up one has. */
enum take_kind {
    TAKE_PROJ,      /* matrix, quantised in FP8 checkpoints */
    TAKE_MATRIX,    /* matrix, left alone in published FP8 checkpoints; a scale is honoured all the same */
    TAKE_TABLE,     /* matrix that is read by rows: never quantised */
    TAKE_NEAR_ZERO, /* vectors: factors stored as w of 1 + w, and biases */
    TAKE_NEAR_ONE,  /* vectors: plain factors */
    TAKE_A_LOG,
    TAKE_DT_BIAS,
    TAKE_CONV,
    TAKE_KIND_N
};

/* The part of this rank: everything, or its share of the rows or columns. */
enum take_cut { CUT_NONE, CUT_ROWS, CUT_COLS };

struct take {
    struct checkpoint *checkpoint;
    struct shard_of shard;
    struct report *report;
    bool *taken; /* [checkpoint->n_tensors] */
    int error;
    int n_skipped;
    size_t skipped_bytes;
};

int take_init(struct take *take, struct checkpoint *checkpoint, struct shard_of shard, struct report *report);
void take_deinit(struct take *take);

__attribute__((format(printf, 2, 3))) void take_refuse(struct take *take, const char *format, ...);
__attribute__((format(printf, 2, 3))) bool take_has(const struct take *take, const char *format, ...);
/* Refuses a number of heads or a width that the ranks cannot share evenly. */
void take_divide(struct take *take, const char *what, int n);

__attribute__((format(printf, 6, 7))) struct tensor
take_matrix(struct take *take, enum take_kind kind, enum take_cut cut, int n_rows, int n_cols, const char *format, ...);
__attribute__((format(printf, 5, 6))) struct tensor take_vector(struct take *take, enum take_kind kind,
                                                                enum take_cut cut, int n, const char *format, ...);
/* Depthwise taps, [n, 1, n_taps] in the file, as [n, n_taps]. */
__attribute__((format(printf, 4, 5))) struct tensor take_conv(struct take *take, int n, int n_taps, const char *format,
                                                              ...);
/* n_stack equal matrices in one tensor, not cut: the first of them. */
__attribute__((format(printf, 5, 6))) struct tensor take_stack(struct take *take, int n_stack, int n_rows, int n_cols,
                                                               const char *format, ...);
struct tensor take_stack_at(struct tensor first, int i);
/* This rank's share of rows [begin, begin + n) or of all columns of a tensor that was taken whole. */
struct tensor take_share(struct take *take, struct tensor t, enum take_cut cut, int begin, int n, const char *name);

/* Refuses tensors that nobody took and that `is_skipped` does not know, and counts the others; then refuses taken ones
 * with an element that is NaN or infinite. */
void take_finish(struct take *take, bool (*is_skipped)(const char *name));
