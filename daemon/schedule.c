#include "schedule.h"

#include "base.h"

enum { GRID = 64 };

static bool is_more_urgent(const struct schedule_seq *a, const struct schedule_seq *b) {
    return a->priority != b->priority ? a->priority > b->priority : a->order < b->order;
}

static bool is_shorter(const struct schedule_seq *a, const struct schedule_seq *b) {
    if (a->priority != b->priority)
        return a->priority > b->priority;
    return a->n_left != b->n_left ? a->n_left < b->n_left : a->order < b->order;
}

/* Insertion sort of indexes: lists are short and nearly sorted from turn to turn. */
static int sorted_insert(const struct schedule_seq *seqs, int *list, int n, int seq) {
    int i = n;

    for (; i > 0 && is_more_urgent(&seqs[seq], &seqs[list[i - 1]]); i--)
        list[i] = list[i - 1];
    list[i] = seq;
    return n + 1;
}

int schedule_admit(const struct schedule_seq *seqs, int n_seqs, int n_places, uint32_t n_pages, int *ret_seqs) {
    uint64_t n_promised = 0; /* pages that those being fed will still take */
    int n_waiting = 0, n_admitted = 0;

    for (int i = 0; i < n_seqs; i++) {
        if (seqs[i].is_waiting)
            n_waiting = sorted_insert(seqs, ret_seqs, n_waiting, i);
        else
            n_promised += seqs[i].n_pages;
    }
    for (int i = 0; i < n_waiting && n_admitted < n_places; i++) { /* the sorted list is thinned out in place */
        const struct schedule_seq *seq = &seqs[ret_seqs[i]];

        if (n_promised + seq->n_pages <= n_pages) {
            n_promised += seq->n_pages;
            ret_seqs[n_admitted++] = ret_seqs[i];
        } else if (seq->n_passed_by >= SCHEDULE_PASSED_BY_MAX) {
            break;
        }
    }
    return n_admitted;
}

static bool is_feeding(const struct schedule_seq *seq) {
    return !seq->is_waiting && !seq->is_fed;
}

static int piece(const struct schedule_seq *seq, int n_rows_max) {
    int n = min_int(seq->n_to_cut, n_rows_max);

    if (seq->is_replay)
        return min_int(n, SCHEDULE_REPLAY_ROWS);
    return n == seq->n_to_cut ? n : n - n % GRID;
}

int schedule_feed(const struct schedule_seq *seqs, int n_seqs, const struct schedule_rows *rows,
                  struct schedule_feed *ret_feed) {
    int budget = max_int(GRID, min_int(rows->chunk, rows->batch - rows->decode));
    int first = -1, n_list = 0, n_feed = 0, reserved;

    for (int i = 0; i < n_seqs; i++)
        if (is_feeding(&seqs[i]) && (first < 0 || is_more_urgent(&seqs[i], &seqs[first])))
            first = i;
    if (first < 0)
        return 0;
    for (int i = 0; i < n_seqs; i++) { /* the others, shortest first */
        int at = n_list;

        if (!is_feeding(&seqs[i]) || i == first)
            continue;
        for (; at > 0 && is_shorter(&seqs[i], &seqs[ret_feed[at - 1].seq]); at--)
            ret_feed[at] = ret_feed[at - 1];
        ret_feed[at].seq = i;
        n_list++;
    }
    reserved = piece(&seqs[first], GRID);
    for (int i = 0; i < n_list; i++) {
        int seq = ret_feed[i].seq, n = piece(&seqs[seq], budget - reserved);

        if (n > 0) {
            ret_feed[n_feed++] = (struct schedule_feed){seq, n};
            budget -= n;
        }
    }
    ret_feed[n_feed++] = (struct schedule_feed){first, max_int(reserved, piece(&seqs[first], budget))};
    return n_feed;
}

static bool leaves_before(const struct schedule_seq *a, const struct schedule_seq *b) {
    return a->is_parked != b->is_parked ? a->is_parked : is_more_urgent(b, a);
}

int schedule_victim(const struct schedule_seq *seqs, int n_seqs) {
    int victim = -1;

    for (int i = 0; i < n_seqs; i++)
        if (!seqs[i].is_waiting && (victim < 0 || leaves_before(&seqs[i], &seqs[victim])))
            victim = i;
    return victim;
}
