/* store_rows: copies activation rows out as f32. */
#include "cpu.h"

#include <string.h>

struct store_rows_job {
    const struct store_rows_args *args;
    int n_rows;
};

static void store_rows_share(void *arg, int worker, int n_workers) {
    const struct store_rows_job *job = arg;
    struct cpu_range rows = cpu_share(job->n_rows, 1, worker, n_workers);
    size_t width = (size_t)job->args->width, first = (size_t)rows.begin * width;

    if (rows.begin < rows.end)
        memcpy(job->args->dst + first, (const float *)job->args->x + first,
               (size_t)(rows.end - rows.begin) * width * sizeof(float));
}

static void run_store_rows(struct device *device, const void *args, void *scratch) {
    const struct store_rows_args *a = args;
    struct store_rows_job job = {a, *a->batch->n_rows};

    (void)scratch;
    if (job.n_rows > 0)
        cpu_parallel(device, store_rows_share, &job);
}

int cpu_store_rows(struct program *program, const struct store_rows_args *args) {
    struct store_rows_args a = *args;

    a.batch = cpu_program_keep(program, args->batch, sizeof *args->batch);
    return cpu_program_add(program, run_store_rows, &a, sizeof a, 0);
}
