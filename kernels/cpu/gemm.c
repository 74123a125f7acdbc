/* gemm: rows of f32 times packed weights. Packs the rows once, shares the panels out to the workers, and lets each product
 * leave through an `emit` function on the worker that computed it, so that an epilogue reads data that is still in cache. The
 * kernels live in gemm_plain.c, gemm_avx2.c, gemm_avx512.c and gemm_amx.c. */
#include "gemm.h"

#include <assert.h>

enum {
    PACK_ALONE_MAX = 8 * 1024,    /* elements below which waking the workers costs more than packing */
    PANELS_BYTES_MAX = 128 * 1024 /* panels that are kept in the second-level cache while the tiles of x pass by */
};

const struct gemm_path *gemm_path_of(const struct device *device) {
    if (device->numeric != NUMERIC_FAST)
        return &gemm_path_plain;
#if defined(__x86_64__)
    if (device->isa == CPU_ISA_AVX2)
        return &gemm_path_avx2;
    if (device->isa == CPU_ISA_AVX512BF16)
        return &gemm_path_avx512bf16;
    if (device->isa == CPU_ISA_AMX)
        return &gemm_path_amx;
#endif
    return &gemm_path_scalar;
}

/* ---- tiles: rows are cut into as few tiles as the path allows, of sizes that differ by one at most. A tile of n rows
 * from row r lies at packed element r * padded K, however the rows are cut. */
static int n_tiles_of(const struct gemm_path *path, int n_rows) {
    return (int)div_ceil((uint64_t)n_rows, (uint64_t)path->tile_max);
}

static int tile_begin(int n_rows, int n_tiles, int tile) {
    return (int)((int64_t)n_rows * tile / n_tiles);
}

size_t gemm_packed_row_bytes(int n_cols) { /* f32, the larger of the two forms */
    return align_up((size_t)n_cols, 2) * sizeof(float);
}

size_t gemm_packed_bytes(int n_rows, int n_cols) {
    return align_up((size_t)n_rows * gemm_packed_row_bytes(n_cols), 64);
}

size_t gemm_row_bytes(int n_cols) {
    return align_up((size_t)n_cols * sizeof(float), 64);
}

static const void *tile_at(const struct gemm_path *path, const void *packed, int row, int n_cols) {
    return (const char *)packed + (size_t)row * gemm_packed_row_bytes(n_cols) / (path->x_form == GEMM_X_F32 ? 1 : 2);
}

/* ---- packing ------------------------------------------------------------------------------------------------------ */

static void pack_tile(const struct device *device, const struct gemm_path *path, const struct gemm_rows *rows,
                      int begin, int end, void *packed, float *row_scratch) {
    void *tile = (void *)(uintptr_t)tile_at(path, packed, begin, rows->n_cols);
    int n_cols = rows->n_cols;
    size_t n = (size_t)(end - begin);

    for (int row = begin; row < end; row++) {
        const float *x = rows->x + (size_t)(rows->index != NULL ? rows->index[row] : row) * rows->stride;

        if (rows->norm != NULL) {
            cpu_rms_norm(device, x, rows->norm, n_cols, rows->eps, row_scratch);
            x = row_scratch;
        }
        if (path->x_form == GEMM_X_ROWS) {
            uint16_t *dst = (uint16_t *)tile + (size_t)(row - begin) * align_up((size_t)n_cols, 2);

            for (int k = 0; k < n_cols; k++)
                dst[k] = bf16_from_f32(x[k]);
            if (n_cols % 2 != 0)
                dst[n_cols] = 0;
        } else if (path->x_form == GEMM_X_PAIRS) {
            uint16_t *dst = (uint16_t *)tile + 2 * (size_t)(row - begin);

            for (int k = 0; k < n_cols; k++)
                dst[(size_t)(k / 2) * 2 * n + (size_t)(k % 2)] = bf16_from_f32(x[k]);
            if (n_cols % 2 != 0)
                dst[(size_t)(n_cols / 2) * 2 * n + 1] = 0;
        } else {
            float *dst = (float *)tile + (row - begin);

            for (int k = 0; k < n_cols; k++)
                dst[(size_t)k * n] = cpu_round_gemm_in(device, x[k]);
            if (n_cols % 2 != 0)
                dst[(size_t)n_cols * n] = 0;
        }
    }
}

static void pack_tiles(const struct device *device, const struct gemm_rows *rows, struct cpu_range tiles, int n_tiles,
                       void *packed, float *row_scratch) {
    const struct gemm_path *path = gemm_path_of(device);

    for (int tile = tiles.begin; tile < tiles.end; tile++)
        pack_tile(device, path, rows, tile_begin(rows->n_rows, n_tiles, tile),
                  tile_begin(rows->n_rows, n_tiles, tile + 1), packed, row_scratch);
}

struct pack_task {
    struct device *device;
    const struct gemm_rows *rows;
    int n_tiles;
    void *packed;
    char *row_scratch;
};

static void pack_share(void *arg, int worker, int n_workers) {
    const struct pack_task *task = arg;
    char *row_scratch = task->row_scratch;

    if (row_scratch != NULL)
        row_scratch += (size_t)worker * gemm_row_bytes(task->rows->n_cols);
    pack_tiles(task->device, task->rows, cpu_share(task->n_tiles, 1, worker, n_workers), task->n_tiles, task->packed,
               (float *)(void *)row_scratch);
}

void gemm_pack_alone(const struct device *device, const struct gemm_rows *rows, void *packed, float *row_scratch) {
    int n_tiles = n_tiles_of(gemm_path_of(device), rows->n_rows);

    pack_tiles(device, rows, (struct cpu_range){0, n_tiles}, n_tiles, packed, row_scratch);
}

void gemm_pack(struct device *device, const struct gemm_rows *rows, void *packed, void *row_scratch) {
    struct pack_task task = {device, rows, n_tiles_of(gemm_path_of(device), rows->n_rows), packed, row_scratch};

    if (task.n_tiles == 1 || (int64_t)rows->n_rows * rows->n_cols <= PACK_ALONE_MAX)
        gemm_pack_alone(device, rows, packed, row_scratch);
    else
        cpu_parallel(device, pack_share, &task);
}

/* ---- products ----------------------------------------------------------------------------------------------------- */

struct run_task {
    const struct gemm_path *path;
    const struct gemm_job *jobs;
    int n_jobs;
    int64_t cost; /* of all units */
};

static int64_t unit_cost(const struct gemm_job *job) {
    /* Reading a panel costs about as much as four tokens on it. */
    return (int64_t)(job->n_rows + 4) * job->weight->n_pairs * (job->weight->form == WEIGHT_GATE_UP ? 2 : 1);
}

/* One token: the panels are read once, several at a time, so each is a stream of its own for the prefetchers. */
static void run_units_vec(const struct gemm_path *path, const struct gemm_job *job, struct cpu_range units) {
    const struct weight *weight = job->weight;
    int per_unit = weight->form == WEIGHT_GATE_UP ? 2 : 1, step = path->vec_panels / per_unit;
    _Alignas(64) float acc[8][PANEL_ROWS];

    assert(path->vec_panels <= 8 && step > 0);
    for (int unit = units.begin; unit < units.end; unit += step) {
        int n = min_int(step, units.end - unit);

        path->vec(weight_panel(weight, job->stack_idx, unit * per_unit), weight->panel_bytes, n * per_unit, job->packed,
                  weight->n_pairs, acc);
        for (int i = 0; i < n; i++)
            job->emit(job, unit + i, 0, 1, (const float(*)[PANEL_ROWS]) & acc[i * per_unit],
                      per_unit == 2 ? (const float(*)[PANEL_ROWS]) & acc[i * 2 + 1] : NULL);
    }
}

/* Several tokens: a few panels stay in cache while all tiles of x pass by. */
static void run_units_tiled(const struct gemm_path *path, const struct gemm_job *job, struct cpu_range units) {
    const struct weight *weight = job->weight;
    gemm_tile_fn *tile_fn = weight->elem == DTYPE_BF16 ? path->tile_bf16 : path->tile_f32;
    int n_tiles = n_tiles_of(path, job->n_rows), per_unit = weight->form == WEIGHT_GATE_UP ? 2 : 1;
    int step = max_int(1, (int)(PANELS_BYTES_MAX / (weight->panel_bytes * (size_t)per_unit)));
    _Alignas(64) float acc[2][GEMM_TILE_MAX][PANEL_ROWS];

    assert(path->tile_max <= GEMM_TILE_MAX);
    for (int first = units.begin; first < units.end; first += step)
        for (int tile = 0; tile < n_tiles; tile++) {
            int row = tile_begin(job->n_rows, n_tiles, tile), n = tile_begin(job->n_rows, n_tiles, tile + 1) - row;
            const void *x = tile_at(path, job->packed, row, weight->n_cols);

            for (int unit = first; unit < min_int(first + step, units.end); unit++) {
                for (int i = 0; i < per_unit; i++)
                    tile_fn(weight_panel(weight, job->stack_idx, unit * per_unit + i), x, weight->n_pairs, n, acc[i]);
                job->emit(job, unit, row, n, (const float(*)[PANEL_ROWS])acc[0],
                          per_unit == 2 ? (const float(*)[PANEL_ROWS])acc[1] : NULL);
            }
        }
}

static void run_share(void *arg, int worker, int n_workers) {
    const struct run_task *task = arg;
    int64_t at = 0; /* cost of all units before; unit i is the worker's whose share holds the cost at its begin */
    int64_t begin = task->cost * worker / n_workers, end = task->cost * (worker + 1) / n_workers;

    for (const struct gemm_job *job = task->jobs; job < task->jobs + task->n_jobs && at < end; job++) {
        int n_units = gemm_units(job->weight);
        int64_t cost = unit_cost(job);
        struct cpu_range units;

        if (job->n_rows == 0)
            continue;
        units.begin = begin <= at ? 0 : (int)div_ceil((uint64_t)(begin - at), (uint64_t)cost);
        units.end = (int)div_ceil((uint64_t)(end - at), (uint64_t)cost);
        units.begin = min_int(units.begin, n_units);
        units.end = min_int(units.end, n_units);
        if (job->n_rows == 1 && task->path->vec != NULL)
            run_units_vec(task->path, job, units);
        else
            run_units_tiled(task->path, job, units);
        at += cost * n_units;
    }
}

void gemm_run(struct device *device, const struct gemm_job *jobs, int n_jobs) {
    struct run_task task = {.path = gemm_path_of(device), .jobs = jobs, .n_jobs = n_jobs};

    for (int i = 0; i < n_jobs; i++)
        if (jobs[i].n_rows > 0)
            task.cost += unit_cost(&jobs[i]) * gemm_units(jobs[i].weight);
    if (task.cost > 0)
        cpu_parallel(device, run_share, &task);
}

/* ---- the plain product of cpu.h ------------------------------------------------------------------------------------ */

struct product {
    float *y;
    size_t stride;
};

static void emit_product(const struct gemm_job *job, int unit, int row, int n_rows, const float (*acc)[PANEL_ROWS],
                         const float (*acc_up)[PANEL_ROWS]) {
    const struct product *product = job->arg;
    int n_cols = job->weight->form == WEIGHT_GATE_UP ? job->weight->n_rows / 2 : job->weight->n_rows;
    int first = unit * PANEL_ROWS, n = min_int(PANEL_ROWS, n_cols - first);

    for (int i = 0; i < n_rows; i++) {
        float *y = product->y + (size_t)(row + i) * product->stride + first;

        memcpy(y, acc[i], (size_t)n * sizeof *y);
        if (acc_up != NULL)
            memcpy(y + n_cols, acc_up[i], (size_t)n * sizeof *y);
    }
}

size_t cpu_gemm_scratch_bytes(int n_rows, int n_cols) {
    return gemm_packed_bytes(n_rows, n_cols);
}

void cpu_gemm(struct device *device, const struct weight *weight, int stack_idx, const float *x, int x_stride,
              int n_rows, float *y, int y_stride, void *scratch) {
    struct gemm_rows rows = {.x = x, .stride = (size_t)x_stride, .n_rows = n_rows, .n_cols = weight->n_cols};
    struct product product = {y, (size_t)y_stride};
    struct gemm_job job = {weight, stack_idx, scratch, n_rows, emit_product, &product};

    if (n_rows == 0)
        return;
    gemm_pack(device, &rows, scratch, NULL);
    gemm_run(device, &job, 1);
}
