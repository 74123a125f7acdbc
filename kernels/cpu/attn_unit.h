/* attn_unit: the piece of attention that one worker computes alone: some consecutive rows of one seg, all query heads of
 * one kv head. Says which keys a row sees and how they fall into spans; the arithmetic is in attn.c (the oracle) and
 * attn_avx2.c. Internal to attn*.c.
 *
 * A span is [k * SPAN_TOKENS, (k + 1) * SPAN_TOKENS) of positions; a draft's own block rows are one more span after all
 * others. Each span yields (max, sum, output) from its own keys alone, and spans are merged in order: whoever computes
 * the spans of a row elsewhere, or later, gets the same bits. */
#pragma once
#include "cpu.h"
#include "kv_elem.h"

enum { ATTN_UNIT_ROWS = 16 };

struct attn_unit {
    const struct device *device;
    const struct attn_args *args;
    int seg, kv_head;
    int row_begin, row_end;  /* of the seg's rows, at most ATTN_UNIT_ROWS */
    struct attn_spans spans; /* of this run */
    char *carry;             /* [rows of the batch, heads] what earlier runs leave to later ones */
    size_t carry_bytes;      /* of one of them */
};

/* Context keys are positions; block keys are rows of the seg. [lo, hi), empty if lo >= hi. */
struct attn_keys {
    int lo, hi;
};

static inline struct attn_keys attn_context_keys(const struct attn_unit *unit, int j) {
    const struct attn_args *a = unit->args;
    int start = a->batch->seg_pos[unit->seg], pos = start + j;
    struct attn_keys keys = {0, a->block_k ? start : pos + 1};

    if (a->block_k && a->ctl)
        keys.lo = a->ctl[a->batch->seg_slot[unit->seg]].draft_valid_from;
    if (a->window > 0)
        keys.lo = max_int(keys.lo, pos - (a->window - 1));
    keys.lo = max_int(keys.lo, unit->spans.begin * SPAN_TOKENS);
    if (unit->spans.end != ATTN_SPANS_END)
        keys.hi = min_int(keys.hi, unit->spans.end * SPAN_TOKENS);
    return keys;
}

static inline struct attn_keys attn_block_keys(const struct attn_unit *unit, int j) {
    const struct attn_args *a = unit->args;
    int n_rows = a->batch->seg_row[unit->seg + 1] - a->batch->seg_row[unit->seg];
    struct attn_keys keys = {0, 0};

    if (!a->block_k || unit->spans.end != ATTN_SPANS_END)
        return keys;
    keys.hi = a->block_causal ? j + 1 : n_rows;
    if (a->window > 0)
        keys.lo = max_int(0, j - (a->window - 1));
    return keys;
}

static inline struct attn_keys attn_clip(struct attn_keys keys, int begin, int end) {
    return (struct attn_keys){max_int(keys.lo, begin), min_int(keys.hi, end)};
}

/* One row [head_dim] of q or out. */
static inline size_t attn_row_at(const struct attn_unit *unit, int j, int head) {
    const struct attn_args *a = unit->args;

    return ((size_t)(a->batch->seg_row[unit->seg] + j) * (size_t)a->n_heads + (size_t)head) * (size_t)a->head_dim;
}

static inline char *attn_carry(const struct attn_unit *unit, int j, int head) {
    const struct attn_args *a = unit->args;

    return unit->carry +
           ((size_t)(a->batch->seg_row[unit->seg] + j) * (size_t)a->n_heads + (size_t)head) * unit->carry_bytes;
}

static inline const float *attn_block_row(const struct attn_unit *unit, enum kv_half half, int i) {
    const struct attn_args *a = unit->args;
    const float *x = half == KV_K ? a->block_k : a->block_v;

    return x + ((size_t)(a->batch->seg_row[unit->seg] + i) * (size_t)a->n_kv_heads + (size_t)unit->kv_head) *
                   (size_t)a->head_dim;
}

/* attn_avx2.c: head_dim is a multiple of 8. */
void attn_avx2_unit(const struct attn_unit *unit, void *scratch);
size_t attn_avx2_scratch_bytes(const struct attn_args *args); /* of one worker */
size_t attn_avx2_carry_bytes(const struct attn_args *args);   /* of one (row, head) */
