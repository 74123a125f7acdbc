#include "backend.h"

#include <errno.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

extern const struct backend backend_cpu, backend_cuda;

const struct backend *backend_find(const char *name) {
    if (strcmp(name, "cpu") == 0)
        return &backend_cpu;
    if (strcmp(name, "cuda") == 0)
        return &backend_cuda;
    return NULL;
}

int backend_stream_wait(const struct backend *backend, struct stream *stream) {
    uint64_t count;
    int fd, r;

    fd = eventfd(0, EFD_CLOEXEC);
    if (fd < 0)
        return -errno;
    r = backend->notify(stream, fd);
    while (r == 0 && read(fd, &count, sizeof count) < 0)
        if (errno != EINTR)
            r = -errno;
    close(fd);
    return r;
}
