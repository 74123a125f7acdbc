/* cuda_calls: linked before the CUDA runtime (ld --wrap), it counts what a program asks of it and hands it on. What holds a
 * thread or the device up is counted apart from what work is made of. The counts lie in memory that the test reads as
 * /proc/PID/fd/N, "memfd:cuda_calls": an array of struct count.
 *
 * No CUDA header is needed: handles are pointers, enums are ints. A name that meson.build does not wrap does not link. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* name in the runtime, parameters, arguments */
#define CALLS(_)                                                                                                       \
    _(cudaDeviceSynchronize, (void), ())                                                                               \
    _(cudaStreamSynchronize, (void *stream), (stream))                                                                 \
    _(cudaEventSynchronize, (void *event), (event))                                                                    \
    _(cudaStreamQuery, (void *stream), (stream))                                                                       \
    _(cudaEventQuery, (void *event), (event))                                                                          \
    _(cudaMalloc, (void **ret_ptr, size_t bytes), (ret_ptr, bytes))                                                    \
    _(cudaMallocAsync, (void **ret_ptr, size_t bytes, void *stream), (ret_ptr, bytes, stream))                         \
    _(cudaMallocHost, (void **ret_ptr, size_t bytes), (ret_ptr, bytes))                                                \
    _(cudaHostAlloc, (void **ret_ptr, size_t bytes, unsigned flags), (ret_ptr, bytes, flags))                          \
    _(cudaHostRegister, (void *ptr, size_t bytes, unsigned flags), (ptr, bytes, flags))                                \
    _(cudaHostUnregister, (void *ptr), (ptr))                                                                          \
    _(cudaFree, (void *ptr), (ptr))                                                                                    \
    _(cudaFreeAsync, (void *ptr, void *stream), (ptr, stream))                                                         \
    _(cudaFreeHost, (void *ptr), (ptr))                                                                                \
    _(cudaMemcpy, (void *dst, const void *src, size_t bytes, int kind), (dst, src, bytes, kind))                       \
    _(cudaMemset, (void *ptr, int value, size_t bytes), (ptr, value, bytes))                                           \
    _(cudaStreamCreateWithPriority, (void **ret_stream, unsigned flags, int priority), (ret_stream, flags, priority))  \
    _(cudaStreamBeginCapture, (void *stream, int mode), (stream, mode))                                                \
    _(cudaGraphInstantiate, (void **ret_exec, void *graph, unsigned long long flags), (ret_exec, graph, flags))        \
    _(cudaGraphLaunch, (void *exec, void *stream), (exec, stream))

/* and what is counted by what it is called with */
#define KINDS(_) _(copies, , ) _(pageable_copies, , ) _(host_functions, , ) _(other_host_functions, , )

#define NUMBER(name, params, args) CALL_##name,
enum call { CALLS(NUMBER) KINDS(NUMBER) CALL_N };

struct count {
    char name[48];
    uint64_t n_main, n_others; /* by the process's first thread, by the others */
};

#define NAME(name, params, args) {#name, 0, 0},
static const struct count none[CALL_N] = {CALLS(NAME) KINDS(NAME)};
static struct count *counts;

/* Before main(), and so before any call. */
__attribute__((constructor)) static void share_counts(void) {
    int fd = memfd_create("cuda_calls", MFD_CLOEXEC);
    void *shared = MAP_FAILED;

    if (fd >= 0 && ftruncate(fd, sizeof none) == 0)
        shared = mmap(NULL, sizeof none, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (shared == MAP_FAILED)
        abort();
    counts = memcpy(shared, none, sizeof none);
}

static void count(enum call call) {
    uint64_t *n = gettid() == getpid() ? &counts[call].n_main : &counts[call].n_others;

    __atomic_add_fetch(n, 1, __ATOMIC_RELAXED);
}

/* Reserved names are what ld --wrap makes. */
#define WRAP(name, params, args)                                                                                       \
    int __real_##name params;                                                                                          \
    int __wrap_##name params;                                                                                          \
    int __wrap_##name params {                                                                                         \
        count(CALL_##name);                                                                                            \
        return __real_##name args;                                                                                     \
    }
CALLS(WRAP)

/* The first word of struct cudaPointerAttributes is the kind of memory; 0: not known to the runtime, pageable. */
static int is_pageable(const void *ptr) {
    union {
        int kind;
        char bytes[256];
    } attributes = {0};
    extern int cudaPointerGetAttributes(void *ret_attributes, const void *ptr);

    return cudaPointerGetAttributes(&attributes, ptr) != 0 || attributes.kind == 0;
}

int __real_cudaMemcpyAsync(void *dst, const void *src, size_t bytes, int kind, void *stream);
int __wrap_cudaMemcpyAsync(void *dst, const void *src, size_t bytes, int kind, void *stream);
int __wrap_cudaMemcpyAsync(void *dst, const void *src, size_t bytes, int kind, void *stream) {
    count(CALL_copies);
    if (is_pageable(dst) || is_pageable(src))
        count(CALL_pageable_copies);
    return __real_cudaMemcpyAsync(dst, src, bytes, kind, stream);
}

/* The first one is that of notices: there is no way to a step before the first of those. */
int __real_cudaLaunchHostFunc(void *stream, void (*run)(void *user), void *user);
int __wrap_cudaLaunchHostFunc(void *stream, void (*run)(void *user), void *user);
int __wrap_cudaLaunchHostFunc(void *stream, void (*run)(void *user), void *user) {
    static void (*first)(void *user);
    void (*before)(void *user) = NULL;

    count(CALL_host_functions);
    if (!__atomic_compare_exchange_n(&first, &before, run, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED) && before != run)
        count(CALL_other_host_functions);
    return __real_cudaLaunchHostFunc(stream, run, user);
}
