#include "devmem.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

void devmem_init(struct devmem *mem, const struct backend *backend, struct device *device, struct stream *stream) {
    *mem = (struct devmem){.backend = backend, .device = device, .stream = stream};
}

void devmem_deinit(struct devmem *mem) {
    for (int i = 0; i < mem->n_blocks; i++)
        mem->backend->mem_free(mem->device, mem->blocks[i].kind, mem->blocks[i].ptr, mem->blocks[i].bytes);
    for (int i = 0; i < mem->n_weights; i++)
        mem->backend->weight_free(mem->device, mem->weights[i]);
    free(mem->blocks);
    free(mem->weights);
    *mem = (struct devmem){0};
}

/* Keeps the first error; returns NULL, so that a refusal is one statement. */
static void *refused(struct devmem *mem, int error) {
    if (mem->error == 0)
        mem->error = error;
    return NULL;
}

void *devmem_take(struct devmem *mem, enum mem_kind kind, size_t bytes) {
    void *ptr;
    int r;

    if (mem->n_blocks == mem->n_blocks_max) {
        int n_max = mem->n_blocks_max ? mem->n_blocks_max * 2 : 64;
        struct devmem_block *blocks = realloc(mem->blocks, (size_t)n_max * sizeof *blocks);

        if (!blocks)
            return refused(mem, -ENOMEM);
        mem->blocks = blocks;
        mem->n_blocks_max = n_max;
    }
    bytes = bytes ? bytes : 1;
    r = mem->backend->mem_alloc(mem->device, kind, bytes, &ptr);
    if (r != 0)
        return refused(mem, r);
    mem->blocks[mem->n_blocks++] = (struct devmem_block){.ptr = ptr, .bytes = bytes, .kind = kind};
    return ptr;
}

void *devmem_upload(struct devmem *mem, const void *src, size_t bytes) {
    void *dst = devmem_take(mem, MEM_DEVICE, bytes), *staging;
    int r;

    if (!dst)
        return NULL;
    r = mem->backend->mem_alloc(mem->device, MEM_HOST, bytes ? bytes : 1, &staging);
    if (r != 0)
        return refused(mem, r);
    memcpy(staging, src, bytes);
    r = mem->backend->copy(mem->stream, dst, staging, bytes);
    if (r == 0)
        r = backend_stream_wait(mem->backend, mem->stream);
    mem->backend->mem_free(mem->device, MEM_HOST, staging, bytes ? bytes : 1);
    return r == 0 ? dst : refused(mem, r);
}

struct weight *devmem_pack(struct devmem *mem, const struct weight_desc *desc) {
    struct weight *weight;
    int r;

    if (mem->n_weights == mem->n_weights_max) {
        int n_max = mem->n_weights_max ? mem->n_weights_max * 2 : 64;
        struct weight **weights = realloc(mem->weights, (size_t)n_max * sizeof *weights);

        if (!weights)
            return refused(mem, -ENOMEM);
        mem->weights = weights;
        mem->n_weights_max = n_max;
    }
    r = mem->backend->weight_pack(mem->device, desc, &weight);
    if (r != 0)
        return refused(mem, r);
    mem->weights[mem->n_weights++] = weight;
    return weight;
}

size_t devmem_bytes(const struct devmem *mem, enum mem_kind kind) {
    size_t bytes = 0;

    for (int i = 0; i < mem->n_blocks; i++)
        if (mem->blocks[i].kind == kind)
            bytes += mem->blocks[i].bytes;
    return bytes;
}

size_t devmem_weight_bytes(const struct devmem *mem) {
    size_t bytes = 0;

    for (int i = 0; i < mem->n_weights; i++)
        bytes += mem->backend->weight_bytes(mem->weights[i]);
    return bytes;
}
