/* mathx: what the AVX2 paths need beyond the instruction set. Every lane is computed by itself, so a value does not
 * depend on its place in a vector; sums over lanes run in one fixed order. Only for files built with -mavx2 -mfma. */
#pragma once
#include <immintrin.h>

/* e^x within 2 ulp; 0 below -87.33 (no subnormals), infinity above 88.37; NaN stays NaN. */
static inline __m256 mathx_exp(__m256 x) {
    const __m256 lo = _mm256_set1_ps(-87.33f), hi = _mm256_set1_ps(88.37f);
    __m256 clamped = _mm256_min_ps(hi, _mm256_max_ps(lo, x)); /* min and max hand on a NaN in their second operand */
    __m256 n = _mm256_round_ps(_mm256_mul_ps(clamped, _mm256_set1_ps(1.44269504f)),
                               _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r =
        _mm256_fnmadd_ps(n, _mm256_set1_ps(0x1.62e4p-1f), clamped); /* ln 2 in two parts: n times the first is exact */
    __m256 p = _mm256_set1_ps(1.0f / 5040);
    __m256i exponent;

    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(1.42860682e-6f), r);
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 720));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 120));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 24));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 6));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.5f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1));
    exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    p = _mm256_mul_ps(p, _mm256_castsi256_ps(exponent));
    p = _mm256_andnot_ps(_mm256_cmp_ps(x, lo, _CMP_LT_OQ), p);
    p = _mm256_blendv_ps(p, _mm256_set1_ps(__builtin_inff()), _mm256_cmp_ps(x, hi, _CMP_GT_OQ));
    return _mm256_blendv_ps(p, x, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}

static inline __m256 mathx_sigmoid(__m256 x) {
    const __m256 one = _mm256_set1_ps(1);

    return _mm256_div_ps(one, _mm256_add_ps(one, mathx_exp(_mm256_sub_ps(_mm256_setzero_ps(), x))));
}

/* The four sums over lanes. */
static inline __m128 mathx_sum4(__m256 a, __m256 b, __m256 c, __m256 d) {
    __m256 s = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));

    return _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
}

static inline float mathx_sum(__m256 a) {
    return _mm_cvtss_f32(mathx_sum4(a, a, a, a));
}

static inline float mathx_max(__m256 a) {
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));

    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_shuffle_ps(m, m, 1)));
}

/* Lanes i with begin <= first + i < end are all ones. */
static inline __m256 mathx_lanes(int first, int begin, int end) {
    __m256i i = _mm256_add_epi32(_mm256_set1_epi32(first), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    __m256i in = _mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(begin), i),
                                     _mm256_cmpgt_epi32(_mm256_set1_epi32(end), i));

    return _mm256_castsi256_ps(in);
}
