#include "npy.h"

#include <errno.h>
#include <stdint.h>
#include <string.h>

int npy_open(struct npy *npy, const char *path, const char *type, const long *shape, int n_dims) {
    char header[256];
    int n;

    *npy = (struct npy){.path = path, .file = fopen(path, "wb")};
    if (!npy->file)
        return -errno;
    n = snprintf(header, sizeof header, "{'descr': '%s', 'fortran_order': False, 'shape': (", type);
    for (int i = 0; i < n_dims; i++)
        n += snprintf(header + n, sizeof header - (size_t)n, "%ld,", shape[i]);
    n += snprintf(header + n, sizeof header - (size_t)n, "), }");
    while ((10 + n + 1) % 64 != 0) /* magic, version, length; data starts at a multiple of 64 */
        header[n++] = ' ';
    header[n++] = '\n';
    npy_write(npy, "\x93NUMPY\x01\x00", 8);
    npy_write(npy, (uint8_t[2]){(uint8_t)n, (uint8_t)(n >> 8)}, 2);
    return npy_write(npy, header, (size_t)n);
}

int npy_write(struct npy *npy, const void *elements, size_t bytes) {
    return fwrite(elements, 1, bytes, npy->file) == bytes ? 0 : -EIO;
}

int npy_close(struct npy *npy) {
    int r = 0;

    if (npy->file && ferror(npy->file))
        r = -EIO;
    if (npy->file && fclose(npy->file) != 0)
        r = -EIO;
    npy->file = NULL;
    return r;
}
