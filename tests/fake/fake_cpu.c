#include "fake_cpu.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { OPS_MAX = 8, KEPT_MAX = 32 };

struct program {
    struct device *device;
    int n_ops, n_kept;
    struct {
        cpu_op_fn *run;
        void *args;
        size_t scratch_bytes;
    } ops[OPS_MAX];
    void *kept[KEPT_MAX];
};

struct program *fake_program_new(struct device *device) {
    struct program *program = calloc(1, sizeof *program);

    assert(program);
    program->device = device;
    return program;
}

void fake_program_free(struct program *program) {
    for (int i = 0; i < program->n_ops; i++)
        free(program->ops[i].args);
    for (int i = 0; i < program->n_kept; i++)
        free(program->kept[i]);
    free(program);
}

void fake_program_run(struct program *program) {
    for (int i = 0; i < program->n_ops; i++) {
        size_t bytes = align_up(program->ops[i].scratch_bytes + 1, 64);
        void *scratch = aligned_alloc(64, bytes);

        assert(scratch);
        memset(scratch, 0xa5, bytes);
        program->ops[i].run(program->device, program->ops[i].args, scratch);
        free(scratch);
    }
}

static void *copy_of(const void *src, size_t bytes) {
    void *copy = malloc(bytes);

    assert(copy);
    memcpy(copy, src, bytes);
    return copy;
}

int cpu_program_add(struct program *program, cpu_op_fn *run, const void *args, size_t args_bytes,
                    size_t scratch_bytes) {
    assert(program->n_ops < OPS_MAX);
    program->ops[program->n_ops].run = run;
    program->ops[program->n_ops].args = copy_of(args, args_bytes);
    program->ops[program->n_ops++].scratch_bytes = scratch_bytes;
    return 0;
}

const void *cpu_program_keep(struct program *program, const void *src, size_t bytes) {
    if (src == NULL)
        return NULL;
    assert(program->n_kept < KEPT_MAX);
    return program->kept[program->n_kept++] = copy_of(src, bytes);
}

struct device *cpu_program_device(struct program *program) {
    return program->device;
}

void cpu_parallel(struct device *device, cpu_task_fn *fn, void *arg) {
    for (int worker = device->caps.n_threads - 1; worker >= 0; worker--)
        fn(arg, worker, device->caps.n_threads);
}

void cpu_gemm(struct device *device, const struct weight *weight, int stack_idx, const float *x, int x_stride,
              int n_rows, float *y, int y_stride, void *scratch) {
    (void)device;
    assert(stack_idx == 0);
    memset(scratch, 0x5a, cpu_gemm_scratch_bytes(n_rows, weight->n_cols));
    for (int r = 0; r < n_rows; r++)
        for (int n = 0; n < weight->n_rows; n++) {
            double sum = 0;

            for (int k = 0; k < weight->n_cols; k++)
                sum += (double)weight->w[(size_t)n * (size_t)weight->n_cols + (size_t)k] * (double)x[r * x_stride + k];
            y[(size_t)r * (size_t)y_stride + (size_t)n] = (float)sum;
        }
}
size_t cpu_gemm_scratch_bytes(int n_rows, int n_cols) {
    return (size_t)n_rows * (size_t)n_cols + 1;
}
int cpu_weight_rows(const struct weight *weight) {
    return weight->n_rows;
}
int cpu_weight_cols(const struct weight *weight) {
    return weight->n_cols;
}

void cpu_rms_norm(const struct device *device, const float *x, const float *w, int n, float eps, float *out) {
    double sum = 0;

    (void)device;
    for (int i = 0; i < n; i++)
        sum += (double)x[i] * (double)x[i];
    for (int i = 0; i < n; i++)
        out[i] = (float)((double)x[i] / sqrt(sum / n + (double)eps) * (double)w[i]);
}
