/* Stands in for the CUDA backend where it is not built: asking for it is answered with -ENODEV. */
#include <errno.h>

#include "../backend.h"

extern const struct backend backend_cuda;

static int absent_open(const struct backend_options *options, struct device **ret_device) {
    (void)options;
    (void)ret_device;
    return -ENODEV;
}

const struct backend backend_cuda = {.name = "cuda", .open = absent_open};
