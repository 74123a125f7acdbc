/* cuda: what the files of the CUDA backend share: the device, recording, errors. Internal to kernels/cuda.
 *
 * Rules every op keeps: a row's result depends on nothing but the row's own inputs, never on the other rows of the batch,
 * the number of rows or the grid; sums run in one fixed order, so there are no float atomics; multiply-adds are written
 * out (fmaf), the compiler contracts nothing. Results are rounded where NUMERIC_BF16 of the CPU backend rounds them.
 * Grids are sized by bucket maxima; how many rows there are is read on the device, and CTAs beyond them leave. */
#pragma once
#include <cuda_bf16.h>
#include <cuda_runtime.h>
extern "C" {
#include "../backend.h"
}

struct device {
    struct backend_caps caps;
    cudaStream_t load; /* packing and capture: load time only */
    void *pack_host;   /* pinned, PACK_BYTES */
    void *pack_device; /* PACK_BYTES */
    bool is_sm90;
    struct work_mem *work_mem; /* the largest yet, or NULL: programs run one after another, and share it */
    int is_lost;               /* atomic; once set it stays: a sticky error breaks the whole context */
    int n_multiprocessors;
};
enum {
    PACK_BYTES = 32 * 1024 * 1024,
    SHARED_BYTES = 224 * 1024, /* of a CTA: the least a card must offer */
};

/* ---- backend_cuda.cu: 0, -ENOMEM, or -EIO, after which the device counts as lost. */
int cuda_result(struct device *device, cudaError_t error);

/* ---- program.cu: recording. `launch` enqueues the kernels of one op; it runs once, while its part of the
 * program is captured. Scratch is 256-byte aligned and shared by all ops; sums are zero bits before an op and must be so
 * after it. */
enum { SUMS_BYTES = 9 * 1024 * 1024 };
struct launch {
    cudaStream_t stream;
    char *scratch;
    float *sums;
    bool is_sm90; /* compute capability 9.0: kernels of *_sm90.cu run */
    int n_multiprocessors;
};
typedef void cuda_launch_fn(const struct launch *launch, const void *args);
int cuda_program_add(struct program *program, cuda_launch_fn *fn, const void *args, size_t args_bytes,
                     size_t scratch_bytes);

int cuda_program_begin(struct device *device, struct program **ret_program);
int cuda_program_cut(struct program *program);
int cuda_program_join(struct program *program);
int cuda_program_end(struct program *program);
void cuda_program_free(struct program *program);
int cuda_program_n_parts(const struct program *program); /* 0 before it has ended */
int cuda_program_launch(struct program *program, struct device *device, cudaStream_t stream, int part, int part_end);

/* ---- weight.cu */
int cuda_weight_pack(struct device *device, const struct weight_desc *desc, struct weight **ret_weight);
void cuda_weight_free(struct device *device, struct weight *weight);
size_t cuda_weight_bytes(const struct weight *weight);

/* ---- ops, one file per family */
int cuda_embed(struct program *program, const struct embed_args *args);           /* linear.cu */
int cuda_linear(struct program *program, const struct linear_args *args);         /* linear.cu */
int cuda_gdn(struct program *program, const struct gdn_args *args);               /* gdn.cu */
int cuda_gdn_commit(struct program *program, const struct gdn_commit_args *args); /* gdn.cu */
int cuda_qk(struct program *program, const struct qk_args *args);                 /* rope.cu */
int cuda_draft_kv(struct program *program, const struct draft_kv_args *args);     /* rope.cu */
int cuda_attn(struct program *program, const struct attn_args *args);             /* attn.cu */
int cuda_moe(struct program *program, const struct moe_args *args);               /* moe.cu */
int cuda_head(struct program *program, const struct head_args *args);             /* head.cu */
int cuda_draft_rows(struct program *program, const struct rows_args *args);       /* prepare.cu */
int cuda_verify_rows(struct program *program, const struct rows_args *args);      /* prepare.cu */
int cuda_prepare(struct program *program, const struct prepare_args *args);       /* prepare.cu */
int cuda_store_rows(struct program *program, const struct store_rows_args *args); /* linear.cu */
