/* dtype: element formats of weights, caches and activations, and their exact conversions. Header only.
 * bf16: upper half of an IEEE binary32. f16: IEEE binary16. e4m3: OCP FP8 E4M3 ("fn": no infinities, S.1111.111 is NaN,
 * largest finite value 448), as in "OCP 8-bit Floating Point Specification", rev. 1.0. All roundings are to nearest, ties to even. */
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

enum dtype { DTYPE_F32, DTYPE_BF16, DTYPE_F16, DTYPE_E4M3, DTYPE_N };

static inline size_t dtype_bytes(enum dtype t) {
    return t == DTYPE_F32 ? 4 : t == DTYPE_E4M3 ? 1 : 2;
}
static inline const char *dtype_name(enum dtype t) {
    static const char *const names[DTYPE_N] = {"f32", "bf16", "fp16", "e4m3"};
    return t < DTYPE_N ? names[t] : "?";
}

static inline float f32_from_bits(uint32_t bits) {
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}
static inline uint32_t f32_bits(float f) {
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits;
}

static inline float bf16_to_f32(uint16_t h) {
    return f32_from_bits((uint32_t)h << 16);
}
static inline uint16_t bf16_from_f32(float f) {
    uint32_t u = f32_bits(f);

    if ((u & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)(u >> 16 | 0x40); /* stays a NaN, made quiet */
    return (uint16_t)((u + 0x7fffu + (u >> 16 & 1)) >> 16);
}
static inline float bf16_round(float f) {
    return bf16_to_f32(bf16_from_f32(f));
}

static inline float f16_to_f32(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exp = h >> 10 & 31, man = h & 0x3ff;

    if (exp == 31)
        return f32_from_bits(sign | 0x7f800000u | man << 13);
    if (exp == 0) { /* zero or subnormal: man * 2^-24 is exact in f32 */
        float f = (float)man * 0x1p-24f;
        return sign ? -f : f;
    }
    return f32_from_bits(sign | (exp + 112) << 23 | man << 13);
}
static inline uint16_t f16_from_f32(float f) {
    uint32_t u = f32_bits(f), sign = u >> 16 & 0x8000, mag = u & 0x7fffffffu;

    if (mag > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00);
    if (mag >= 0x477ff000u) /* rounds to 65520 or more: infinity */
        return (uint16_t)(sign | 0x7c00);
    if (mag < 0x38800000u) { /* below 2^-14: subnormal; adding 0.5 rounds at 2^-24 */
        float r = f32_from_bits(mag) + 0.5f;
        return (uint16_t)(sign | (f32_bits(r) - 0x3f000000u));
    }
    return (uint16_t)(sign | ((mag - 0x38000000u + 0xfffu + (mag >> 13 & 1)) >> 13));
}

static inline float e4m3_to_f32(uint8_t b) {
    uint32_t exp = b >> 3 & 15, man = b & 7;
    float f;

    if ((b & 0x7f) == 0x7f)
        return NAN;
    if (exp == 0)
        f = (float)man * 0x1p-9f;
    else
        f = f32_from_bits((exp + 120) << 23 | man << 20);
    return b & 0x80 ? -f : f;
}
/* Saturating: finite values beyond 448 and infinities become +-448; only NaN stays NaN. */
static inline uint8_t e4m3_from_f32(float f) {
    uint32_t u = f32_bits(f), sign = u >> 24 & 0x80, mag = u & 0x7fffffffu;

    if (mag > 0x7f800000u)
        return (uint8_t)(sign | 0x7f);
    if (mag >= 0x43e00000u) /* 448 and more */
        return (uint8_t)(sign | 0x7e);
    if (mag < 0x3c800000u) { /* below 2^-6: subnormal; adding 2^14 rounds at 2^-9 */
        float r = f32_from_bits(mag) + 0x1p14f;
        return (uint8_t)(sign | (f32_bits(r) - 0x46800000u));
    }
    return (uint8_t)(sign | ((mag - 0x3c000000u + 0x7ffffu + (mag >> 20 & 1)) >> 20));
}
