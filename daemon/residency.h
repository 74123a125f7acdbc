/* residency: which pages of a seq that is too large for the device stay there. Pages [0, head) and the newest ones do; what
 * lies between is in host memory and streamed (docs/design.md, "Contexts larger than the device"). Pure; header only. */
#pragma once
#include "backend.h"

struct residency {
    int most; /* pages of target_full that such a seq keeps on the device: an eighth is left to others */
    int tail; /* the newest of them: two chunks, a cycle and their rounding, which is what plans on their way may write */
    int head; /* its first pages; < 0: the device is too small for this */
    int more; /* that may stay beside these while it is alone: most of that eighth */
};

static inline struct residency residency_of(int n_device_pages, int chunk_rows) {
    int most = n_device_pages - n_device_pages / 8, tail = 2 * (int)div_ceil((uint64_t)chunk_rows, PAGE_TOKENS) + 3;

    return (struct residency){most, tail, most - tail,
                              max_int(0, n_device_pages / 8 - max_int(2, n_device_pages / 32))};
}

/* The fewest device pages with which it works. */
static inline int residency_pages_min(int chunk_rows) {
    int n = residency_of(0, chunk_rows).tail;

    while (residency_of(n, chunk_rows).head < 0)
        n++;
    return n;
}

/* How many pages more than `most` stay, steered by how often compute had to wait for what is streamed: a quarter of the
 * fences in each of two windows running, and an eighth of what may be is added; next to none in each of four, and as much
 * goes. In between nothing changes. */
struct residency_steering {
    int n_more;
    int n_late, n_quiet;                        /* windows running */
    uint64_t n_passes, n_fences, n_fences_late; /* when the window began */
};

enum { RESIDENCY_WINDOW_PASSES = 8, RESIDENCY_LATE_WINDOWS = 2, RESIDENCY_QUIET_WINDOWS = 4 };

/* n_passes, ...: of all passes that streamed so far. */
static inline void residency_steer(struct residency_steering *s, const struct residency *residency, uint64_t n_passes,
                                   uint64_t n_fences, uint64_t n_fences_late) {
    int step = max_int(1, residency->more / 8);
    uint64_t n = n_fences - s->n_fences, late = n_fences_late - s->n_fences_late;

    if (n_passes - s->n_passes < RESIDENCY_WINDOW_PASSES)
        return;
    s->n_passes = n_passes;
    s->n_fences = n_fences;
    s->n_fences_late = n_fences_late;
    s->n_late = late > 0 && late * 4 >= n ? s->n_late + 1 : 0;
    s->n_quiet = late * 32 <= n ? s->n_quiet + 1 : 0;
    if (s->n_late >= RESIDENCY_LATE_WINDOWS) {
        s->n_more = min_int(s->n_more + step, residency->more);
        s->n_late = 0;
    } else if (s->n_quiet >= RESIDENCY_QUIET_WINDOWS) {
        s->n_more = max_int(s->n_more - step, 0);
        s->n_quiet = 0;
    }
}
