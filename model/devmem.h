/* devmem: the device memory, host memory and packed weights of one owner, given back together. Used while loading and when passes are made. */
#pragma once
#include "backend.h"

struct devmem_block {
    void *ptr;
    size_t bytes;
    enum mem_kind kind;
};
struct devmem {
    const struct backend *backend;
    struct device *device;
    struct stream *stream; /* for uploads; not owned */
    struct devmem_block *blocks;
    int n_blocks, n_blocks_max;
    struct weight **weights;
    int n_weights, n_weights_max;
    int error; /* of the first refusal since init; 0 if there was none */
};

void devmem_init(struct devmem *mem, const struct backend *backend, struct device *device, struct stream *stream);
void devmem_deinit(struct devmem *mem);

/* Zeroed memory; NULL when there is none left. */
void *devmem_take(struct devmem *mem, enum mem_kind kind, size_t bytes);
/* A device copy of host data, complete on return; NULL on failure. */
void *devmem_upload(struct devmem *mem, const void *src, size_t bytes);
/* Packs a matrix into the backend's layout; NULL on failure. */
struct weight *devmem_pack(struct devmem *mem, const struct weight_desc *desc);
size_t devmem_bytes(const struct devmem *mem, enum mem_kind kind);
size_t devmem_weight_bytes(const struct devmem *mem);
