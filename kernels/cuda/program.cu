/* program: a recorded pass. Ops are kept as launch functions with copies of their arguments; program_end captures each
 * part, what lies between two cuts, into a graph of its own. Aux ops run in their place in the chain, so joins need
 * nothing. Programs of a device run one after another, so a program takes the memory of an earlier one if that is enough. */
#include "cuda.cuh"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct entry {
    cuda_launch_fn *fn;
    void *args;
    int part; /* cuts before it */
};

struct work_mem { /* sums, then scratch */
    char *mem;
    size_t bytes;
    int n_users;
};

struct program {
    struct device *device;
    struct entry *entries;
    int n_entries, n_entries_max;
    size_t scratch_bytes;
    struct work_mem *work;
    int n_cuts;
    cudaGraphExec_t *graphs; /* [n_cuts + 1] */
    int error;               /* first failure while recording */
    bool has_ended;
};

int cuda_program_begin(struct device *device, struct program **ret_program) {
    struct program *program = (struct program *)calloc(1, sizeof *program);

    if (program == NULL)
        return -ENOMEM;
    program->device = device;
    *ret_program = program;
    return 0;
}

static int add(struct program *program, cuda_launch_fn *fn, void *args) {
    if (program->n_entries == program->n_entries_max) {
        int n_max = program->n_entries_max > 0 ? 2 * program->n_entries_max : 256;
        struct entry *entries = (struct entry *)realloc(program->entries, (size_t)n_max * sizeof *entries);

        if (entries == NULL)
            return -ENOMEM;
        program->entries = entries;
        program->n_entries_max = n_max;
    }
    program->entries[program->n_entries].part = program->n_cuts;
    program->entries[program->n_entries].fn = fn;
    program->entries[program->n_entries++].args = args;
    return 0;
}

int cuda_program_add(struct program *program, cuda_launch_fn *fn, const void *args, size_t args_bytes,
                     size_t scratch_bytes) {
    void *copy;

    if (program->has_ended)
        return -EINVAL;
    if (program->error != 0)
        return program->error;
    copy = malloc(args_bytes);
    if (copy != NULL) {
        memcpy(copy, args, args_bytes);
        program->error = add(program, fn, copy);
    } else {
        program->error = -ENOMEM;
    }
    if (program->error != 0)
        free(copy);
    if (scratch_bytes > program->scratch_bytes)
        program->scratch_bytes = scratch_bytes;
    return program->error;
}

int cuda_program_cut(struct program *program) {
    if (program->has_ended)
        return -EINVAL;
    program->n_cuts++;
    return program->error;
}

int cuda_program_join(struct program *program) {
    return program->has_ended ? -EINVAL : program->error;
}

static int capture(struct program *program, int part) {
    struct device *device = program->device;
    char *mem = program->work->mem;
    struct launch launch = {device->load, mem + SUMS_BYTES, (float *)(void *)mem, device->is_sm90,
                            device->n_multiprocessors};
    cudaGraph_t graph = NULL;
    cudaError_t error;
    int r;

    r = cuda_result(device, cudaStreamBeginCapture(device->load, cudaStreamCaptureModeThreadLocal));
    if (r < 0)
        return r;
    for (int i = 0; i < program->n_entries; i++)
        if (program->entries[i].part == part)
            program->entries[i].fn(&launch, program->entries[i].args);
    error = cudaGetLastError(); /* of a launch that was refused */
    r = cuda_result(device, cudaStreamEndCapture(device->load, &graph));
    if (r == 0)
        r = cuda_result(device, error);
    if (r == 0)
        r = cuda_result(device, cudaGraphInstantiate(&program->graphs[part], graph, 0));
    if (graph != NULL)
        cudaGraphDestroy(graph);
    if (r == 0)
        r = cuda_result(device, cudaGraphUpload(program->graphs[part], device->load));
    if (r == 0)
        r = cuda_result(device, cudaStreamSynchronize(device->load));
    return r;
}

static void leave_work_mem(struct device *device, struct work_mem *work) {
    if (work == NULL || --work->n_users > 0)
        return;
    if (device->work_mem == work)
        device->work_mem = NULL;
    cudaFree(work->mem);
    free(work);
}

static int join_work_mem(struct device *device, size_t bytes, struct work_mem **ret_work) {
    struct work_mem *work = device->work_mem;
    int r;

    if (work != NULL && work->bytes >= bytes) {
        work->n_users++;
        *ret_work = work;
        return 0;
    }
    work = (struct work_mem *)calloc(1, sizeof *work);
    if (work == NULL)
        return -ENOMEM;
    work->bytes = bytes;
    work->n_users = 1;
    r = cuda_result(device, cudaMalloc((void **)&work->mem, bytes));
    if (r == 0)
        r = cuda_result(device, cudaMemsetAsync(work->mem, 0, bytes, device->load));
    if (r == 0)
        r = cuda_result(device, cudaStreamSynchronize(device->load));
    if (r != 0) {
        leave_work_mem(device, work);
        return r;
    }
    device->work_mem = work;
    *ret_work = work;
    return 0;
}

int cuda_program_end(struct program *program) {
    int r;

    if (program->has_ended)
        return -EINVAL;
    if (program->error != 0)
        return program->error;
    program->graphs = (cudaGraphExec_t *)calloc((size_t)program->n_cuts + 1, sizeof *program->graphs);
    r = program->graphs == NULL ? -ENOMEM
                                : join_work_mem(program->device, SUMS_BYTES + program->scratch_bytes, &program->work);
    for (int part = 0; r == 0 && part <= program->n_cuts; part++)
        r = capture(program, part);
    program->has_ended = r == 0;
    return r;
}

void cuda_program_free(struct program *program) {
    if (program == NULL)
        return;
    for (int part = 0; program->graphs != NULL && part <= program->n_cuts; part++)
        if (program->graphs[part] != NULL)
            cudaGraphExecDestroy(program->graphs[part]);
    free(program->graphs);
    leave_work_mem(program->device, program->work);
    for (int i = 0; i < program->n_entries; i++)
        free(program->entries[i].args);
    free(program->entries);
    free(program);
}

int cuda_program_n_parts(const struct program *program) {
    return program->has_ended ? program->n_cuts + 1 : 0;
}

int cuda_program_launch(struct program *program, struct device *device, cudaStream_t stream, int part, int part_end) {
    int r = 0;

    if (program->device != device || part < 0 || part >= part_end || part_end > cuda_program_n_parts(program))
        return -EINVAL;
    for (; r == 0 && part < part_end; part++)
        r = cuda_result(device, cudaGraphLaunch(program->graphs[part], stream));
    return r;
}
