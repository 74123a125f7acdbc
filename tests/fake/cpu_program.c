#include "cpu_program.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

enum { N_OPS_MAX = 16, N_KEPT_MAX = 512 };

struct program {
    struct fake_device *fake;
    int n_ops, n_kept;
    struct {
        cpu_op_fn *run;
        void *args;
        size_t scratch_bytes;
    } ops[N_OPS_MAX];
    void *kept[N_KEPT_MAX];
};

void fake_device_init(struct fake_device *fake, enum numeric numeric, enum cpu_isa isa, int n_workers) {
    *fake = (struct fake_device){.n_workers = n_workers};
    fake->device.numeric = numeric;
    fake->device.isa = isa;
    fake->device.caps.act_dtype = DTYPE_F32;
    fake->device.caps.conv_dtype = numeric == NUMERIC_REFERENCE ? DTYPE_F32 : DTYPE_BF16;
    fake->device.caps.n_threads = n_workers;
}

enum cpu_isa fake_best_isa(void) {
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return CPU_ISA_AVX2;
    return CPU_ISA_SCALAR;
}

/* ---- what the ops call ---- */

void cpu_parallel(struct device *device, cpu_task_fn *fn, void *arg) {
    struct fake_device *fake = container_of(device, struct fake_device, device);

    for (int i = 0; i < fake->n_workers; i++)
        fn(arg, fake->backwards ? fake->n_workers - 1 - i : i, fake->n_workers);
}

struct device *cpu_program_device(struct program *program) {
    return &program->fake->device;
}

const void *cpu_program_keep(struct program *program, const void *src, size_t bytes) {
    void *copy;

    if (!src)
        return NULL;
    assert(program->n_kept < N_KEPT_MAX);
    copy = malloc(bytes);
    assert(copy);
    program->kept[program->n_kept++] = memcpy(copy, src, bytes);
    return copy;
}

int cpu_program_add(struct program *program, cpu_op_fn *run, const void *args, size_t args_bytes,
                    size_t scratch_bytes) {
    assert(program->n_ops < N_OPS_MAX);
    program->ops[program->n_ops].run = run;
    program->ops[program->n_ops].args = (void *)(uintptr_t)cpu_program_keep(program, args, args_bytes);
    program->ops[program->n_ops++].scratch_bytes = scratch_bytes;
    return 0;
}

void cpu_rms_norm(const struct device *device, const float *x, const float *w, int n, float eps, float *out) {
    double sum = 0;

    (void)device;
    for (int i = 0; i < n; i++)
        sum += (double)x[i] * (double)x[i];
    for (int i = 0; i < n; i++)
        out[i] = (float)((double)x[i] / sqrt(sum / n + (double)eps) * (double)w[i]);
}

/* ---- what the tests call ---- */

struct program *fake_program_new(struct fake_device *fake) {
    struct program *program = calloc(1, sizeof *program);

    assert(program);
    program->fake = fake;
    return program;
}

void fake_program_run(struct program *program) {
    for (int i = 0; i < program->n_ops; i++) {
        size_t bytes = align_up(program->ops[i].scratch_bytes + 1, 64);
        void *scratch = aligned_alloc(64, bytes);

        assert(scratch);
        memset(scratch, 0xff, bytes);
        program->ops[i].run(&program->fake->device, program->ops[i].args, scratch);
        free(scratch);
    }
}

void fake_program_free(struct program *program) {
    for (int i = 0; i < program->n_kept; i++)
        free(program->kept[i]);
    free(program);
}

static int32_t *ints_new(int n) {
    int32_t *p = calloc((size_t)n, sizeof *p);

    assert(p);
    return p;
}

struct batch *fake_batch_new(int n_segs_max, int n_rows_max) {
    struct batch *b = calloc(1, sizeof *b);

    assert(b);
    *b = (struct batch){
        .n_segs_max = n_segs_max,
        .n_rows_max = n_rows_max,
        .n_outs_max = 1,
        .n_segs = ints_new(1),
        .n_rows = ints_new(1),
        .n_outs = ints_new(1),
        .seg_slot = ints_new(n_segs_max),
        .seg_row = ints_new(n_segs_max + 1),
        .seg_pos = ints_new(n_segs_max),
        .seg_flags = ints_new(n_segs_max),
        .row_token = ints_new(n_rows_max),
        .row_seg = ints_new(n_rows_max),
        .out_row = ints_new(1),
    };
    return b;
}

void fake_batch_add(struct batch *b, int slot, int pos, int n_rows, int flags) {
    int seg = (*b->n_segs)++;

    assert(seg < b->n_segs_max && *b->n_rows + n_rows <= b->n_rows_max);
    b->seg_slot[seg] = slot;
    b->seg_pos[seg] = pos;
    b->seg_flags[seg] = flags;
    b->seg_row[seg] = *b->n_rows;
    for (int i = 0; i < n_rows; i++)
        b->row_seg[(*b->n_rows)++] = seg;
    b->seg_row[seg + 1] = *b->n_rows;
}

void fake_batch_clear(struct batch *b) {
    *b->n_segs = 0;
    *b->n_rows = 0;
}

void fake_batch_free(struct batch *b) {
    int32_t *const arrays[] = {b->n_segs,  b->n_rows,    b->n_outs,    b->seg_slot, b->seg_row,
                               b->seg_pos, b->seg_flags, b->row_token, b->row_seg,  b->out_row};

    for (size_t i = 0; i < ARRAY_LEN(arrays); i++)
        free(arrays[i]);
    free(b);
}

uint64_t fake_random_u64(struct fake_random *r) { /* splitmix64 */
    uint64_t z = r->state += 0x9e3779b97f4a7c15u;

    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

int fake_random_below(struct fake_random *r, int n) {
    return (int)(fake_random_u64(r) % (uint64_t)n);
}

float fake_random_float(struct fake_random *r, float lo, float hi) {
    return lo + (hi - lo) * (float)(fake_random_u64(r) >> 40) * 0x1p-24f;
}

float *fake_random_floats(struct fake_random *r, size_t n, float lo, float hi) {
    float *p = malloc(n * sizeof *p);

    assert(p);
    for (size_t i = 0; i < n; i++)
        p[i] = fake_random_float(r, lo, hi);
    return p;
}
