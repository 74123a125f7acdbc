/* checkpoint: the mapped safetensors files of one folder and one table of their tensors; or a dummy that makes up its
 * tensors. Knows file names and the index, no network. Internal to the weight loaders. */
#pragma once
#include "safetensors.h"
#include "weights.h"

struct dummy_pool;
struct dummy_shape;

struct checkpoint_file {
    char *path;
    const char *name;    /* the end of path, for reports */
    const uint8_t *data; /* mapped, read-only */
    size_t bytes;
    struct safetensors table;
};

struct checkpoint_tensor {
    const struct safetensors_tensor *entry;
    const struct checkpoint_file *file;
    void *copy; /* of data that lies at an address its element type may not have; else NULL */
};

struct checkpoint {
    char *folder;
    const char *name;              /* for reports: the end of folder, or of the file where one file is all there is */
    struct checkpoint_file *files; /* [n_files] */
    int n_files;
    struct checkpoint_tensor *tensors; /* [n_tensors], sorted by name */
    size_t n_tensors;
    struct dummy_pool *dummy; /* not NULL: there are no files */
};

/* NULL: no such tensor. */
struct checkpoint_tensor *checkpoint_find(const struct checkpoint *checkpoint, const char *name);
/* Its data, aligned to the size of its elements. NULL: out of memory for a copy. */
const void *checkpoint_data(struct checkpoint_tensor *tensor);

int checkpoint_dummy(const struct dummy_shape *shape, uint64_t seed, struct checkpoint **ret_checkpoint,
                     struct report *report);
