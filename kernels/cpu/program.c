/* program: a recorded pass. Holds copies of all op arguments and one scratch block that the ops share; replaying it calls
 * the ops one after the other on the compute thread, allocates nothing and waits for nothing. Aux ops run in their place
 * in the chain, so joins need nothing. */
#include "device.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCK_BYTES = 32 * 1024 };

struct block { /* of argument copies */
    struct block *next;
    size_t used, bytes;
    _Alignas(64) char data[];
};

struct entry {
    cpu_op_fn *run;
    const void *args;
    int part; /* cuts before it */
};

struct program {
    struct device *device;
    struct block *blocks;
    struct entry *entries;
    int n_entries, n_entries_max;
    int n_cuts;
    int *part_begin; /* [n_cuts + 2] first entry of each part; once it has ended */
    void *scratch;
    size_t scratch_bytes;
    int error; /* first failure while recording */
    bool has_ended;
};

int cpu_program_begin(struct device *device, struct program **ret_program) {
    struct program *program = calloc(1, sizeof *program);

    if (program == NULL)
        return -ENOMEM;
    program->device = device;
    *ret_program = program;
    return 0;
}

struct device *cpu_program_device(struct program *program) {
    return program->device;
}

const void *cpu_program_keep(struct program *program, const void *src, size_t bytes) {
    struct block *block = program->blocks;
    size_t need = align_up(bytes > 0 ? bytes : 1, 64);
    void *copy;

    if (src == NULL)
        return NULL;
    if (block == NULL || block->bytes - block->used < need) {
        size_t block_bytes = need > BLOCK_BYTES ? need : BLOCK_BYTES;

        block = aligned_alloc(64, align_up(sizeof *block + block_bytes, 64));
        if (block == NULL) {
            program->error = -ENOMEM;
            return NULL;
        }
        block->next = program->blocks;
        block->used = 0;
        block->bytes = block_bytes;
        program->blocks = block;
    }
    copy = block->data + block->used;
    block->used += need;
    memcpy(copy, src, bytes);
    return copy;
}

static int append(struct program *program, const struct entry *entry) {
    if (program->has_ended)
        return -EINVAL;
    if (program->error == 0 && program->n_entries == program->n_entries_max) {
        int n_max = program->n_entries_max > 0 ? 2 * program->n_entries_max : 256;
        struct entry *entries = realloc(program->entries, (size_t)n_max * sizeof *entries);

        if (entries == NULL) {
            program->error = -ENOMEM;
        } else {
            program->entries = entries;
            program->n_entries_max = n_max;
        }
    }
    if (program->error != 0)
        return program->error;
    program->entries[program->n_entries++] = *entry;
    return 0;
}

int cpu_program_add(struct program *program, cpu_op_fn *run, const void *args, size_t args_bytes,
                    size_t scratch_bytes) {
    struct entry entry = {.run = run, .args = cpu_program_keep(program, args, args_bytes), .part = program->n_cuts};
    int r = append(program, &entry);

    if (r == 0 && scratch_bytes > program->scratch_bytes)
        program->scratch_bytes = scratch_bytes;
    return r;
}

int cpu_program_cut(struct program *program) {
    if (program->has_ended)
        return -EINVAL;
    program->n_cuts++;
    return program->error;
}

int cpu_program_join(struct program *program) {
    return program->has_ended ? -EINVAL : program->error;
}

int cpu_program_end(struct program *program) {
    if (program->has_ended)
        return -EINVAL;
    if (program->error != 0)
        return program->error;
    program->part_begin = calloc((size_t)program->n_cuts + 2, sizeof *program->part_begin);
    if (program->part_begin == NULL)
        return -ENOMEM;
    for (int i = 0; i < program->n_entries; i++)
        program->part_begin[program->entries[i].part + 1] = i + 1;
    for (int part = 0; part <= program->n_cuts; part++) /* an empty part ends where the one before it did */
        program->part_begin[part + 1] = max_int(program->part_begin[part + 1], program->part_begin[part]);
    if (program->scratch_bytes > 0) {
        program->scratch = cpu_mem_new(program->scratch_bytes);
        if (program->scratch == NULL)
            return -ENOMEM;
    }
    program->has_ended = true;
    return 0;
}

void cpu_program_free(struct program *program) {
    if (program == NULL)
        return;
    for (struct block *block = program->blocks, *next; block != NULL; block = next) {
        next = block->next;
        free(block);
    }
    cpu_mem_free(program->scratch, program->scratch_bytes);
    free(program->entries);
    free(program->part_begin);
    free(program);
}

int cpu_program_n_parts(const struct program *program) {
    return program->has_ended ? program->n_cuts + 1 : 0;
}

void cpu_program_replay(struct program *program, int part, int part_end) {
    for (int i = program->part_begin[part]; i < program->part_begin[part_end]; i++)
        program->entries[i].run(program->device, program->entries[i].args, program->scratch);
}
