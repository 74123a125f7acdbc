#include "waiting.h"

#include <assert.h>

static int line_of(const struct seq *seq) {
    assert(seq->priority >= SEQ_PRIORITY_MIN && seq->priority <= SEQ_PRIORITY_MAX);
    return seq->priority - SEQ_PRIORITY_MIN;
}

void waiting_put(struct waiting *waiting, struct seq *seq) {
    struct seq **first = &waiting->line[line_of(seq)].first, **last = &waiting->line[line_of(seq)].last;
    struct seq *after = *last;

    /* Who is new goes to the end; who comes back after a preemption is older than nearly all. */
    if (after && after->order > seq->order)
        for (after = NULL; (after ? after->next : *first)->order < seq->order;)
            after = after ? after->next : *first;
    seq->prev = after;
    seq->next = after ? after->next : *first;
    *(seq->prev ? &seq->prev->next : first) = seq;
    *(seq->next ? &seq->next->prev : last) = seq;
    waiting->n++;
}

void waiting_remove(struct waiting *waiting, struct seq *seq) {
    struct seq **first = &waiting->line[line_of(seq)].first, **last = &waiting->line[line_of(seq)].last;

    *(seq->prev ? &seq->prev->next : first) = seq->next;
    *(seq->next ? &seq->next->prev : last) = seq->prev;
    seq->next = seq->prev = NULL;
    waiting->n--;
}

static struct seq *first_below(const struct waiting *waiting, int line) {
    while (--line >= 0)
        if (waiting->line[line].first)
            return waiting->line[line].first;
    return NULL;
}

struct seq *waiting_first(const struct waiting *waiting) {
    return waiting->n > 0 ? first_below(waiting, WAITING_PRIORITIES) : NULL;
}

struct seq *waiting_next(const struct waiting *waiting, const struct seq *seq) {
    return seq->next ? seq->next : first_below(waiting, line_of(seq));
}
