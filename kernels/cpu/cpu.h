/* cpu: what the files of the CPU backend share: the device, the workers, recording, rounding points, GEMM. Internal to
 * kernels/cpu and its unit tests.
 *
 * Rules every op keeps: a row's result depends on nothing but the row's own inputs (never on the other rows of the batch,
 * the number of rows, or the number of workers); work is split by fixed ranges; sums run in one fixed order; fused
 * multiply-adds are written out (fmaf, intrinsics), the compiler contracts nothing. REFERENCE and BF16 run plain C in
 * double inside an op and round where a value is stored; FAST runs the path picked at open. */
#pragma once
#include "../backend.h"

enum cpu_isa { CPU_ISA_SCALAR, CPU_ISA_AVX2, CPU_ISA_AVX512BF16, CPU_ISA_AMX };

struct cpu_workers; /* workers.c: pinned threads; one of them is the caller of cpu_parallel */
struct cpu_queue;   /* stream.c: the compute thread and the copy thread */

struct device {
    struct backend_options options;
    struct backend_caps caps;
    enum numeric numeric;
    enum cpu_isa isa;
    struct cpu_workers *workers;
    struct cpu_queue *queue;
};

/* ---- workers.c: fn(arg, worker, n_workers) once on every worker; returns when all are done. Compute thread only. */
typedef void cpu_task_fn(void *arg, int worker, int n_workers);
void cpu_parallel(struct device *device, cpu_task_fn *fn, void *arg);

struct cpu_range {
    int begin, end;
};
/* The fixed share of worker w in [0, n): contiguous, sizes differ by at most one grain. */
static inline struct cpu_range cpu_share(int n, int grain, int worker, int n_workers) {
    int64_t n_grains = (int64_t)div_ceil((uint64_t)n, (uint64_t)grain);
    int64_t b = n_grains * worker / n_workers * grain, e = n_grains * (worker + 1) / n_workers * grain;

    return (struct cpu_range){(int)(b < n ? b : n), (int)(e < n ? e : n)};
}

/* ---- program.c: recording. An op is a function over its copied arguments and its scratch. */
typedef void cpu_op_fn(struct device *device, const void *args, void *scratch);
/* Scratch is 64-byte aligned, shared by all ops of the program (each op may use all of what it asked for). */
int cpu_program_add(struct program *program, cpu_op_fn *run, const void *args, size_t args_bytes, size_t scratch_bytes);
/* A copy of a small struct that lives as long as the program; NULL in: NULL out; NULL on -ENOMEM with a non-NULL src
 * (cpu_program_add then also fails, so callers need not check). */
const void *cpu_program_keep(struct program *program, const void *src, size_t bytes);
struct device *cpu_program_device(struct program *program);

/* ---- rounding points: where BF16 rounds a stored act value, and where GEMM inputs are rounded in FAST and BF16. */
static inline float cpu_round_act(const struct device *device, float v) {
    return device->numeric == NUMERIC_BF16 ? bf16_round(v) : v;
}
static inline float cpu_round_gemm_in(const struct device *device, float v) {
    return device->numeric == NUMERIC_REFERENCE ? v : bf16_round(v);
}

/* ---- gemm.c */
/* y[r][n] = sum over k of W[stack_idx][n][k] x[r][k]: x f32 [n_rows, K] (rounded by cpu_round_gemm_in inside),
 * y f32 [n_rows, N], not rounded. For WEIGHT_GATE_UP y is [gate | up]. scratch: cpu_gemm_scratch_bytes(n_rows, K).
 * Runs on all workers. */
void cpu_gemm(struct device *device, const struct weight *weight, int stack_idx, const float *x, int x_stride,
              int n_rows, float *y, int y_stride, void *scratch);
size_t cpu_gemm_scratch_bytes(int n_rows, int n_cols);
int cpu_weight_rows(const struct weight *weight); /* N */
int cpu_weight_cols(const struct weight *weight); /* K */

/* ---- norm.c: out[i] = x[i] * rsqrt(mean(x^2) + eps) * w[i], one row; not rounded beyond f32. */
void cpu_rms_norm(const struct device *device, const float *x, const float *w, int n, float eps, float *out);

/* ---- linear.c: out[i] = silu(gate[i]) * up[i], not rounded beyond f32; out may be gate. */
void cpu_swiglu(const struct device *device, const float *gate, const float *up, int n, float *out);

/* ---- ops, one file per family; they fill backend_cpu's table */
int cpu_embed(struct program *program, const struct embed_args *args);           /* linear.c */
int cpu_linear(struct program *program, const struct linear_args *args);         /* linear.c */
int cpu_gdn(struct program *program, const struct gdn_args *args);               /* gdn.c */
int cpu_gdn_commit(struct program *program, const struct gdn_commit_args *args); /* gdn.c */
int cpu_qk(struct program *program, const struct qk_args *args);                 /* rope.c */
int cpu_draft_kv(struct program *program, const struct draft_kv_args *args);     /* rope.c */
int cpu_attn(struct program *program, const struct attn_args *args);             /* attn.c */
int cpu_moe(struct program *program, const struct moe_args *args);               /* moe.c */
int cpu_head(struct program *program, const struct head_args *args); /* head.c: norm, lm_head, hands over to sample.c */
int cpu_draft_rows(struct program *program, const struct rows_args *args);       /* prepare.c */
int cpu_verify_rows(struct program *program, const struct rows_args *args);      /* prepare.c */
int cpu_prepare(struct program *program, const struct prepare_args *args);       /* prepare.c */
int cpu_store_rows(struct program *program, const struct store_rows_args *args); /* norm.c */
