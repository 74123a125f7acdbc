/* npy: arrays written in NumPy's .npy format, version 1.0 (numpy.lib.format), little endian, C order. */
#pragma once
#include <stdio.h>

struct npy {
    FILE *file;
    const char *path;
};

/* `type`: "<f4" or "<i4". Shape is fixed at the start; elements follow by npy_write. 0 or negative errno. */
int npy_open(struct npy *npy, const char *path, const char *type, const long *shape, int n_dims);
int npy_write(struct npy *npy, const void *elements, size_t bytes);
int npy_close(struct npy *npy);
