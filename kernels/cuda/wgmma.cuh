/* wgmma: products of a warpgroup, 64 rows of W by WGMMA_ROWS rows of x by a step of 16 columns: W's fragments in
 * registers, x in shared memory. They run while the threads go on: from wgmma_begin() until wgmma_wait() has said that a
 * group is done, its registers are nobody else's. Code of compute capability 9.0a alone. */
#pragma once
#include "pipe.cuh"

enum { WGMMA_ROWS = 80, WGMMA_SQUARES = WGMMA_ROWS / 8 };

/* Registers that were written may be operands from here on. */
__device__ static inline void wgmma_begin(void) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
/* What was begun since the last group is one. */
__device__ static inline void wgmma_end_group(void) {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/* Until at most N groups are under way; d, of the group that had to end, may be read from here on. */
template <int N> __device__ static inline void wgmma_wait(float d[WGMMA_SQUARES][4]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
#pragma unroll
    for (int i = 0; i < WGMMA_SQUARES; i++) /* no read of it is moved to before the wait */
        asm volatile("" : "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])::"memory");
}

/* x: rows of 128 bytes, 16-byte unit u of row r at u ^ (r & 7), from an address that is a multiple of 1024; of it this
 * describes the 16 columns from column 16 * step on. */
__device__ static inline uint64_t wgmma_x(const void *x, int step) {
    const uint64_t rows8_bytes = 1024;

    return (uint64_t)1 << 62 | rows8_bytes >> 4 << 32 | (uint64_t)1 << 16 |
           (uint64_t)((shared_address(x) + (unsigned)step * 32) >> 4 & 0x3fff);
}

/* d := w . x, or d += w . x */
__device__ static inline void wgmma(float d[WGMMA_SQUARES][4], uint4 w, uint64_t x, bool is_sum) {
    asm volatile("{\n"
                 ".reg .pred add;\n"
                 "setp.ne.b32 add, %45, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39"
                 "}, {%40, %41, %42, %43}, %44, add, 1, 1, 0;\n"
                 "}"
                 : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]),
                   "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
                   "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]),
                   "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
                   "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]),
                   "+f"(d[7][2]), "+f"(d[7][3]), "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]),
                   "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3])
                 : "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w), "l"(x), "r"((int)is_sum));
}
