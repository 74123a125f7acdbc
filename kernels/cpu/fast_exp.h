/* fast_exp: exp for the FAST numeric mode. Free of branches and of calls, so that loops over it vectorise; the same bits
 * however the compiler vectorises it, since nothing is contracted. At most 1.1 ulp off where the result is normal (a test runs
 * through it); results below 2^-126 become about 2^-126, results above the largest float infinity. */
#pragma once
#include "../dtype.h"

static inline float fast_exp(float x) {
    const float magic = 0x1.8p23f; /* adding it leaves the nearest integer in the low bits */
    /* The comparisons keep a NaN. */
    float c = x > 88.8f ? 88.8f : x;
    float n, r, p;
    int32_t i;

    c = c < -87.33f ? -87.33f : c;
    n = c * 0x1.715476p0f + magic;
    i = (int32_t)(f32_bits(n) - f32_bits(magic));
    n -= magic;
    r = c - n * 0x1.62e4p-1f; /* ln 2 in two parts; the first has trailing zeros, so the product is exact */
    r = r - n * 0x1.7f7d1cp-20f;
    p = 0x1.6d119ap-10f;
    p = p * r + 0x1.120cp-7f;
    p = p * r + 0x1.555518p-5f;
    p = p * r + 0x1.5554dcp-3f;
    p = p * r + 0.5f;
    p = p * (r * r) + r;
    /* 2^i in two factors: i reaches 128, which no single factor holds. */
    p = p * f32_from_bits((uint32_t)((i >> 1) + 127) << 23) + f32_from_bits((uint32_t)((i >> 1) + 127) << 23);
    return p * f32_from_bits((uint32_t)(i - (i >> 1) + 127) << 23);
}
