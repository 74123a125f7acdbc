/* waiting: the seqs that wait for a place, most urgent first, of equal priority the oldest first. Owns no seq; nothing here
 * takes longer the more of them wait, but for one that comes back among others that came back. */
#pragma once
#include "seq.h"

enum { WAITING_PRIORITIES = SEQ_PRIORITY_MAX - SEQ_PRIORITY_MIN + 1 };

struct waiting {
    struct {
        struct seq *first, *last;
    } line[WAITING_PRIORITIES]; /* of SEQ_PRIORITY_MIN + index */
    int n;
};

void waiting_put(struct waiting *waiting, struct seq *seq);
void waiting_remove(struct waiting *waiting, struct seq *seq);

struct seq *waiting_first(const struct waiting *waiting); /* NULL: nobody waits */
struct seq *waiting_next(const struct waiting *waiting, const struct seq *seq);
