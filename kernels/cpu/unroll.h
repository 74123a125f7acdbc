/* unroll: asks for a loop over a register tile to be unrolled in full, so that its array lives in registers. */
#pragma once
#if defined(__clang__)
#define UNROLL_FULL _Pragma("clang loop unroll(full)")
#else
#define UNROLL_FULL _Pragma("GCC unroll 32")
#endif
