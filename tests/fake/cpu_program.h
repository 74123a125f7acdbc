/* cpu_program: a stand-in for the CPU backend's device, workers and program, so that one op can be tested alone. Runs
 * every worker's share one after the other in a given order; scratch is filled with NaN patterns before each op. Also
 * offers what tests of ops build again and again: ragged batches and repeatable random numbers. */
#pragma once
#include "cpu/cpu.h"

struct fake_device {
    struct device device;
    int n_workers;
    bool backwards; /* last worker first: shares must not depend on the order */
};

void fake_device_init(struct fake_device *fake, enum numeric numeric, enum cpu_isa isa, int n_workers);
/* The best path this machine can run. */
enum cpu_isa fake_best_isa(void);

struct program *fake_program_new(struct fake_device *fake);
void fake_program_run(struct program *program); /* all recorded ops */
void fake_program_free(struct program *program);

/* A batch in host memory; segs are appended one by one. */
struct batch *fake_batch_new(int n_segs_max, int n_rows_max);
void fake_batch_add(struct batch *batch, int slot, int pos, int n_rows, int flags);
void fake_batch_clear(struct batch *batch);
void fake_batch_free(struct batch *batch);

struct fake_random {
    uint64_t state;
};
uint64_t fake_random_u64(struct fake_random *r);
int fake_random_below(struct fake_random *r, int n);
float fake_random_float(struct fake_random *r, float lo, float hi);
float *fake_random_floats(struct fake_random *r, size_t n, float lo, float hi); /* heap; caller frees */
