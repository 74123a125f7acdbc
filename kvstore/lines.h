/* lines: the cache lines of what a walk will touch soon. Pure. */
#pragma once
#include <stddef.h>
#include <stdint.h>

/* Asks for the memory of n bytes: every line that they lie in. */
static inline void lines_prefetch(const void *at, size_t n) {
    enum { LINE_BYTES = 64 };
    const char *line = (const char *)at - (uintptr_t)at % LINE_BYTES;

    for (; line < (const char *)at + n; line += LINE_BYTES)
        __builtin_prefetch(line);
}
