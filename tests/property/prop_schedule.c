/* The scheduler over random crowds: every plan keeps its budget, pieces end where they may, the oldest of the most urgent
 * is always fed, and nobody of the most urgent waits longer than the work before it takes. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base.h"
#include "schedule.h"

#define CHECK(claim)                                                                                                   \
    do {                                                                                                               \
        if (!(claim)) {                                                                                                \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #claim);                                        \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

enum { SEQS_MAX = 40, GRID = 64, PRIORITIES = 3 };

static uint64_t random_state;

static int below(int n) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (int)((random_state >> 33) % (uint64_t)n);
}

static bool goes_before(const struct schedule_seq *a, const struct schedule_seq *b) {
    return a->priority != b->priority ? a->priority > b->priority : a->order < b->order;
}

/* ---- one plan ---- */

static int find_first(const struct schedule_seq *seqs, int n) {
    int first = -1;

    for (int i = 0; i < n; i++)
        if (!seqs[i].is_waiting && !seqs[i].is_fed && (first < 0 || goes_before(&seqs[i], &seqs[first])))
            first = i;
    return first;
}

static void check_feed(const struct schedule_seq *seqs, int n, const struct schedule_rows *rows,
                       const struct schedule_feed *feed, int n_feed) {
    int budget = max_int(GRID, min_int(rows->chunk, rows->batch - rows->decode)), first = find_first(seqs, n);
    bool is_fed[SEQS_MAX] = {false};

    for (int i = 0; i < n_feed; i++) {
        const struct schedule_seq *seq = &seqs[feed[i].seq];
        int n_rows = feed[i].n_rows;

        CHECK(feed[i].seq >= 0 && feed[i].seq < n && !is_fed[feed[i].seq]);
        is_fed[feed[i].seq] = true;
        CHECK(!seq->is_waiting && !seq->is_fed);
        CHECK(n_rows > 0 && n_rows <= seq->n_to_cut);
        if (seq->is_replay)
            CHECK(n_rows <= SCHEDULE_REPLAY_ROWS);
        else
            CHECK(n_rows == seq->n_to_cut || n_rows % GRID == 0);
        budget -= n_rows;
    }
    CHECK(budget >= 0);
    CHECK(first < 0 ? n_feed == 0 : is_fed[first]);
}

static void draw(struct schedule_seq *seq, uint64_t order) {
    *seq = (struct schedule_seq){.priority = below(PRIORITIES),
                                 .order = order,
                                 .is_waiting = below(3) == 0,
                                 .is_replay = below(4) == 0,
                                 .n_pages = (uint32_t)below(20),
                                 .n_passed_by = below(2 * SCHEDULE_PASSED_BY_MAX)};
    seq->is_fed = !seq->is_waiting && below(3) == 0;
    seq->n_left = seq->is_fed ? 0 : 1 + below(below(2) ? 100 : 5000);
    seq->n_to_cut = seq->is_fed ? 0 : 1 + below(seq->n_left);
}

static void check_admission(const struct schedule_seq *seqs, int n, int n_places, uint32_t n_pages) {
    uint64_t n_promised = 0;
    int admitted[SEQS_MAX], n_admitted = schedule_admit(seqs, n, n_places, n_pages, admitted);
    bool is_in[SEQS_MAX] = {false};

    CHECK(n_admitted >= 0 && n_admitted <= n_places);
    for (int i = 0; i < n; i++)
        n_promised += seqs[i].is_waiting ? 0 : seqs[i].n_pages;
    for (int i = 0; i < n_admitted; i++) {
        CHECK(seqs[admitted[i]].is_waiting && !is_in[admitted[i]]);
        CHECK(i == 0 || goes_before(&seqs[admitted[i - 1]], &seqs[admitted[i]]));
        is_in[admitted[i]] = true;
        n_promised += seqs[admitted[i]].n_pages;
    }
    CHECK(n_admitted == 0 || n_promised <= n_pages);
    for (int i = 0; i < n; i++)
        for (int k = 0; k < n_admitted; k++) /* who was passed by too often is not again */
            CHECK(is_in[i] || !seqs[i].is_waiting || seqs[i].n_passed_by < SCHEDULE_PASSED_BY_MAX ||
                  goes_before(&seqs[admitted[k]], &seqs[i]));
    for (int i = 0; i < n && n_admitted < n_places; i++) { /* the most urgent is not kept waiting if it fits */
        bool is_first = seqs[i].is_waiting;

        for (int k = 0; k < n; k++)
            is_first &= k == i || !seqs[k].is_waiting || goes_before(&seqs[i], &seqs[k]);
        if (is_first && !is_in[i])
            CHECK(n_promised + seqs[i].n_pages > n_pages);
    }
}

static void check_crowds(int n_crowds) {
    for (int crowd = 0; crowd < n_crowds; crowd++) {
        struct schedule_rows rows = {GRID * (1 + below(8)), GRID + below(1000), below(600)};
        struct schedule_seq seqs[SEQS_MAX];
        struct schedule_feed feed[SEQS_MAX];
        int n = below(SEQS_MAX + 1), victim;

        for (int i = 0; i < n; i++)
            draw(&seqs[i], (uint64_t)i * 3);
        check_feed(seqs, n, &rows, feed, schedule_feed(seqs, n, &rows, feed));
        check_admission(seqs, n, below(8), (uint32_t)below(120));
        victim = schedule_victim(seqs, n);
        for (int i = 0; i < n; i++)
            CHECK(seqs[i].is_waiting || i == victim || (victim >= 0 && goes_before(&seqs[i], &seqs[victim])));
    }
}

/* ---- many plans ---- */

struct life {
    struct schedule_seq seq;
    int n_pages_held, cut;
    int n_plans_fed, n_tokens; /* since it has its place; all that it is to be fed */
    bool is_there;
};

/* Seqs come, wait, are fed and go; no newcomer is more urgent than those there. One place, chunk and page cost for all. */
static void check_lives(int n_turns) {
    enum { PLACES = 6, PAGES = 60, CHUNK = 256, BATCH = 512 };
    static struct life lives[SEQS_MAX];
    uint64_t order = 0, oldest_waits[SEQS_MAX] = {0};
    int n_fed = 0;

    memset(lives, 0, sizeof lives);
    for (int turn = 0; turn < n_turns; turn++) {
        struct schedule_rows rows = {CHUNK, BATCH, below(BATCH)};
        struct schedule_seq seqs[SEQS_MAX];
        struct schedule_feed feed[SEQS_MAX];
        int at[SEQS_MAX], n = 0, n_held = 0, n_placed = 0, admitted[SEQS_MAX], n_admitted, n_feed;

        for (int i = 0; i < SEQS_MAX; i++)
            if (!lives[i].is_there && below(10) == 0) {
                int n_left = 1 + below(below(3) ? 200 : 3000);

                lives[i] = (struct life){.is_there = true, .n_tokens = n_left};
                lives[i].seq =
                    (struct schedule_seq){.order = ++order, .is_waiting = true, .n_left = n_left, .n_to_cut = n_left};
                lives[i].seq.n_pages = (uint32_t)div_ceil((uint64_t)n_left, GRID);
                oldest_waits[i] = 0;
            }
        for (uint64_t o = 0; o <= order; o++) /* by age, as the engine lists them */
            for (int i = 0; i < SEQS_MAX; i++)
                if (lives[i].is_there && lives[i].seq.order == o) {
                    at[n] = i;
                    seqs[n++] = lives[i].seq;
                    n_held += lives[i].n_pages_held;
                    n_placed += !lives[i].seq.is_waiting;
                }
        n_admitted = schedule_admit(seqs, n, PLACES - n_placed, (uint32_t)(PAGES - n_held), admitted);
        for (int i = 0; i < n_admitted; i++) {
            seqs[admitted[i]].is_waiting = lives[at[admitted[i]]].seq.is_waiting = false;
            for (int k = 0; k < admitted[i]; k++)
                lives[at[k]].seq.n_passed_by += seqs[k].is_waiting;
        }
        n_feed = schedule_feed(seqs, n, &rows, feed);
        check_feed(seqs, n, &rows, feed, n_feed);
        for (int i = 0; i < n_feed; i++) {
            struct life *life = &lives[at[feed[i].seq]];

            life->seq.n_left -= feed[i].n_rows;
            life->seq.n_to_cut = life->seq.n_left;
            life->n_pages_held = (int)div_ceil((uint64_t)(life->n_tokens - life->seq.n_left), GRID);
            life->seq.n_pages = (uint32_t)((int)div_ceil((uint64_t)life->n_tokens, GRID) - life->n_pages_held);
            CHECK(life->n_pages_held <= PAGES);
        }
        for (int i = 0; i < SEQS_MAX; i++) {
            struct life *life = &lives[i];

            if (!life->is_there)
                continue;
            CHECK(life->seq.n_passed_by <= SCHEDULE_PASSED_BY_MAX + PLACES);
            /* All that stood before it, and as many as passed it by, at one grid step a plan: nobody waits longer. */
            CHECK(++oldest_waits[i] < (uint64_t)(SEQS_MAX + SCHEDULE_PASSED_BY_MAX + PLACES) * (3000 / GRID + 1));
            if (life->seq.n_left == 0) { /* it decodes, and goes */
                life->is_there = false;
                n_fed++;
            }
        }
    }
    printf("%d seqs were fed in %d plans\n", n_fed, n_turns);
    CHECK(n_fed > n_turns / 20);
}

int main(int argc, char **argv) {
    uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 0) : (uint64_t)time(NULL);
    int n = argc > 2 ? atoi(argv[2]) : 100000;

    printf("seed %llu\n", (unsigned long long)seed);
    fflush(stdout);
    random_state = seed;
    check_crowds(n);
    check_lives(n / 20);
    return 0;
}
