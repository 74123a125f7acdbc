/* base: the only helpers shared by all folders. Header only; knows nothing of devices, models or caches. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define ARRAY_LEN(a) (sizeof(a) / sizeof((a)[0]))
#define container_of(ptr, type, member) ((type *)(void *)((char *)(ptr)-offsetof(type, member)))

static inline size_t align_up(size_t n, size_t align) { /* align: a power of two */
    return (n + align - 1) & ~(align - 1);
}
static inline uint64_t div_ceil(uint64_t n, uint64_t d) {
    return n / d + (n % d != 0);
}
/* False on overflow; *ret is then unchanged. */
static inline bool checked_mul(uint64_t a, uint64_t b, uint64_t *ret) {
    uint64_t product;

    if (__builtin_mul_overflow(a, b, &product))
        return false;
    *ret = product;
    return true;
}
static inline bool checked_add(uint64_t a, uint64_t b, uint64_t *ret) {
    uint64_t sum;

    if (__builtin_add_overflow(a, b, &sum))
        return false;
    *ret = sum;
    return true;
}
static inline int min_int(int a, int b) {
    return a < b ? a : b;
}
static inline uint64_t min_u64(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}
static inline uint64_t max_u64(uint64_t a, uint64_t b) {
    return a > b ? a : b;
}
static inline int max_int(int a, int b) {
    return a > b ? a : b;
}
