/* fake_batch: a struct batch with its own arrays, filled row by row. Header only. */
#pragma once
#include "backend.h"

enum { FAKE_SEGS_MAX = 8, FAKE_ROWS_MAX = 512 };

struct fake_batch {
    struct batch batch;
    int32_t n[3], seg_slot[FAKE_SEGS_MAX], seg_row[FAKE_SEGS_MAX + 1], seg_pos[FAKE_SEGS_MAX], seg_flags[FAKE_SEGS_MAX];
    int32_t row_token[FAKE_ROWS_MAX], row_seg[FAKE_ROWS_MAX], out_row[FAKE_ROWS_MAX];
};

static inline void fake_batch_init(struct fake_batch *b, int n_segs_max, int n_rows_max, int n_outs_max) {
    *b = (struct fake_batch){0};
    b->batch = (struct batch){n_segs_max, n_rows_max, n_outs_max,   &b->n[0],     &b->n[1],   &b->n[2],  b->seg_slot,
                              b->seg_row, b->seg_pos, b->seg_flags, b->row_token, b->row_seg, b->out_row};
}
static inline void fake_batch_seg(struct fake_batch *b, int slot, int pos, int flags) {
    int seg = b->n[0]++;

    b->seg_slot[seg] = slot;
    b->seg_pos[seg] = pos;
    b->seg_flags[seg] = flags;
    b->seg_row[seg + 1] = b->n[1];
}
static inline void fake_batch_row(struct fake_batch *b, int32_t token, bool is_out) {
    int row = b->n[1]++;

    b->row_token[row] = token;
    b->row_seg[row] = b->n[0] - 1;
    b->seg_row[b->n[0]] = row + 1;
    if (is_out)
        b->out_row[b->n[2]++] = row;
}
