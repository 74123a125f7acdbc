/* gate: where a pass may be made to wait for its pages. A program with a gate has 2 n + 1 parts for n full-attention layers:
 * part 2 l + 1 is the attention of layer l. Header only. */
#pragma once
#include "backend.h"

struct pass_gate {
    /* When all before the attention of full layer l is enqueued, and before it is: for waits on compute. */
    int (*open)(void *user, int layer);
    void *user;
};

/* The whole program; gate NULL: it waits for nothing. */
static inline int gate_run(const struct backend *backend, struct stream *compute, struct program *program, int n_layers,
                           const struct pass_gate *gate) {
    int r = 0;

    if (!gate)
        return backend->program_run(compute, program);
    for (int layer = 0; r == 0 && layer < n_layers; layer++) {
        r = backend->program_run_part(compute, program, 2 * layer);
        if (r == 0)
            r = gate->open(gate->user, layer);
        if (r == 0)
            r = backend->program_run_part(compute, program, 2 * layer + 1);
    }
    return r != 0 ? r : backend->program_run_part(compute, program, 2 * n_layers);
}
