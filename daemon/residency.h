/* residency: which pages of a seq that is too large for the device stay there. Pages [0, head) and the newest ones do; what
 * lies between is in host memory and streamed (docs/design.md, "Contexts larger than the device"). Pure; header only. */
#pragma once
#include "backend.h"

struct residency {
    int most; /* pages of target_full that such a seq keeps on the device: an eighth is left to others */
    int tail; /* the newest of them: two chunks, a cycle and their rounding, which is what plans on their way may write */
    int head; /* its first pages; < 0: the device is too small for this */
};

static inline struct residency residency_of(int n_device_pages, int chunk_rows) {
    int most = n_device_pages - n_device_pages / 8, tail = 2 * (int)div_ceil((uint64_t)chunk_rows, PAGE_TOKENS) + 3;

    return (struct residency){most, tail, most - tail};
}

/* The fewest device pages with which it works. */
static inline int residency_pages_min(int chunk_rows) {
    int n = residency_of(0, chunk_rows).tail;

    while (residency_of(n, chunk_rows).head < 0)
        n++;
    return n;
}
