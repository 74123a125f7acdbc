/* schedule: who is admitted, who is fed how many rows, who has to leave. Pure: looks at numbers, touches nothing. Decoding
 * seqs are in every plan and are not chosen here; they only take from the budget. */
#pragma once
#include <stdbool.h>
#include <stdint.h>

struct schedule_seq {
    int priority;     /* higher goes first */
    uint64_t order;   /* of arrival: lower is older */
    bool is_waiting;  /* for admission; else it has a place and is being fed */
    bool is_parked;   /* it does not go on for now */
    bool is_replay;   /* fed through the verify path: at most SCHEDULE_REPLAY_ROWS a plan */
    bool is_fed;      /* all it was given is on its way or done: it decodes */
    int n_left;       /* tokens still to be fed; at least 1 unless is_fed */
    int n_to_cut;     /* tokens to where a piece must end: a restore point, or the end of what is fed; 1..n_left */
    uint32_t n_pages; /* pages of target_full it still has to take until it decodes */
    int n_passed_by;  /* waiting: how often a younger seq was admitted before it */
};

enum {
    SCHEDULE_REPLAY_ROWS = 16,
    SCHEDULE_PASSED_BY_MAX = 16, /* then everybody behind it waits too */
};

/* Who is admitted, in order: by urgency, then age, as long as places and pages last. One that does not fit lets others
 * pass by, but not for ever. ret_seqs: indexes, room for n_seqs. */
int schedule_admit(const struct schedule_seq *seqs, int n_seqs, int n_places, uint32_t n_pages, int *ret_seqs);

struct schedule_rows {
    int chunk;  /* rows of given tokens a plan may have; a multiple of 64 */
    int batch;  /* rows of a plan, those of decoding seqs included; feeding may always use 64 */
    int decode; /* rows that decoding seqs may need in this plan */
};
struct schedule_feed {
    int seq, n_rows; /* seq: index into the given list */
};
/* Who of those with a place is fed how many rows. A piece ends at a multiple of 64 or at its cut, and no seq is fed twice.
 * The oldest of the most urgent is always fed; of the others those with the least to go come first, so that short prompts
 * need not wait for long ones. ret_feed: room for n_seqs. Returns how many. */
int schedule_feed(const struct schedule_seq *seqs, int n_seqs, const struct schedule_rows *rows,
                  struct schedule_feed *ret_feed);

/* Who leaves when pages run out: of those with a place a parked one, else of the least urgent the youngest; -1 if there is
 * none. */
int schedule_victim(const struct schedule_seq *seqs, int n_seqs);
