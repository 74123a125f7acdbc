/* figures: what was measured, a line each with the time, the floor and the share of it, on stdout and as JSON. A floor is
 * what the bytes and operations that a case cannot do without take at the rates of the roof; the share is floor / time. */
#pragma once
#include <stdbool.h>
#include <stdio.h>

#include "roof.h"

enum figure_way {
    FIGURE_DEVICE, /* reads device memory or multiplies: the larger of the two floors */
    FIGURE_UP,     /* bytes that go up the link */
    FIGURE_DOWN,
};

enum { FIGURE_EXTRAS_MAX = 6 };

struct figure {
    const char *group, *shape, *name; /* shape NULL: none */
    int context, batch;               /* tokens before the first row; seqs. 0: does not apply */
    enum figure_way way;
    double seconds; /* median */
    double bytes, ops;
    int n_extras;
    struct {
        const char *name;
        double value;
    } extras[FIGURE_EXTRAS_MAX];
};

struct figures {
    FILE *json; /* NULL: none; not owned */
    struct roof measured, documented;
    const char *group, *shape; /* of the last line */
    int n;
};

void figure_add(struct figure *figure, const char *name, double value); /* also said in the line and the JSON */

void figures_begin(struct figures *figures, const char *kernel_path); /* once the roof is known */
void figures_put(struct figures *figures, const struct figure *figure);
void figures_end(struct figures *figures);
