/* lookup: how long it takes to find what a cache of very many pages has of a prompt. The pages belong to chains of
 * LOOKUP_CHAIN_PAGES; prompts are beginnings of chains drawn at random, all of which is there, so that a lookup walks to
 * its end. Nothing but names is kept: no page has bytes. */
#pragma once
#include <stdint.h>

enum { LOOKUP_CHAIN_PAGES = 512, LOOKUP_STATE_EVERY = 8, LOOKUP_ROWS = 3 };

struct lookup_times { /* seconds */
    double p50, p99;
};

struct lookup_figures {
    uint32_t n_entries;            /* pages; restore points come on top, one for LOOKUP_STATE_EVERY pages */
    struct lookup_times one;       /* of one page of the disk's catalog */
    uint32_t n_pages[LOOKUP_ROWS]; /* of a prompt */
    struct lookup_times device[LOOKUP_ROWS], disk[LOOKUP_ROWS]; /* all of it there, and nothing above */
    double hash[LOOKUP_ROWS];                                   /* to make the keys of its pages */
};

/* folder: where an empty disk tier may be. 0, or negative errno after a line on stderr. */
int lookup_measure(const char *folder, int n_entries, struct lookup_figures *ret_figures);
