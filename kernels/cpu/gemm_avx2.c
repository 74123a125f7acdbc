/* gemm_avx2: FAST kernels with AVX2 and FMA, for CPUs without bf16 dot products. A 32-bit word of a panel holds a row's two
 * elements of a k pair; as bf16 is the upper half of an f32, a shift yields the even one and a mask the odd one. */
#include "gemm.h"
#include "unroll.h"

#include <assert.h>
#include <immintrin.h>

enum {
    TILE = 6,            /* 12 accumulators, 2 weights, 1 broadcast: 15 of 16 registers */
    VEC_PANELS = 4,      /* 8 accumulators: enough chains to hide the latency of the multiply-add */
    PREFETCH_BYTES = 768 /* ahead in each panel: a memory latency at the speed one core reads */
};

/* 8 rows */
static inline __m256i load_words(const char *w) {
    return _mm256_load_si256((const __m256i *)(const void *)w);
}

static inline __m256 even_of(__m256i words) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
}

static inline __m256 odd_of(__m256i words) {
    return _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32((int)0xffff0000u)));
}

/* Six tokens need all 16 registers: 12 sums, 2 weights, 1 broadcast, the mask. Left alone, compilers read the odd weights
 * and the broadcasts of later tokens early and spill sums; this holds each token's step in its place. */
static inline void keep_order(__m256 *lo, __m256 *hi) {
    __asm__ volatile("" : "+x"(*lo), "+x"(*hi) : : "memory");
}

__attribute__((always_inline)) static inline void tile(const char *w, const float *x, int n_pairs, const int n_tokens,
                                                       float (*acc)[PANEL_ROWS]) {
    __m256 lo[TILE], hi[TILE];

    UNROLL_FULL
    for (int t = 0; t < n_tokens; t++)
        lo[t] = hi[t] = _mm256_setzero_ps();
    for (int p = 0; p < n_pairs; p++, w += 64, x += 2 * n_tokens) {
        __m256 a = even_of(load_words(w)), b = even_of(load_words(w + 32));

        _mm_prefetch(w + PREFETCH_BYTES, _MM_HINT_T0);
        UNROLL_FULL
        for (int t = 0; t < n_tokens; t++) {
            __m256 v = _mm256_broadcast_ss(x + t);

            lo[t] = _mm256_fmadd_ps(a, v, lo[t]);
            hi[t] = _mm256_fmadd_ps(b, v, hi[t]);
            keep_order(&lo[t], &hi[t]);
        }
        a = odd_of(load_words(w));
        b = odd_of(load_words(w + 32));
        UNROLL_FULL
        for (int t = 0; t < n_tokens; t++) {
            __m256 v = _mm256_broadcast_ss(x + n_tokens + t);

            lo[t] = _mm256_fmadd_ps(a, v, lo[t]);
            hi[t] = _mm256_fmadd_ps(b, v, hi[t]);
            keep_order(&lo[t], &hi[t]);
        }
    }
    UNROLL_FULL
    for (int t = 0; t < n_tokens; t++) {
        _mm256_store_ps(acc[t], lo[t]);
        _mm256_store_ps(acc[t] + 8, hi[t]);
    }
}

static void tile_avx2(const void *panel, const void *x, int n_pairs, int n_tokens, float (*acc)[PANEL_ROWS]) {
    switch (n_tokens) {
    case 1:
        tile(panel, x, n_pairs, 1, acc);
        break;
    case 2:
        tile(panel, x, n_pairs, 2, acc);
        break;
    case 3:
        tile(panel, x, n_pairs, 3, acc);
        break;
    case 4:
        tile(panel, x, n_pairs, 4, acc);
        break;
    case 5:
        tile(panel, x, n_pairs, 5, acc);
        break;
    case 6:
        tile(panel, x, n_pairs, 6, acc);
        break;
    default:
        assert(!"a tile of more tokens than tile_max");
    }
}

__attribute__((always_inline)) static inline void vec(const char *w, size_t panel_bytes, const int n_panels,
                                                      const float *x, int n_pairs, float (*acc)[PANEL_ROWS]) {
    __m256 lo[VEC_PANELS], hi[VEC_PANELS];

    UNROLL_FULL
    for (int i = 0; i < n_panels; i++)
        lo[i] = hi[i] = _mm256_setzero_ps();
    for (int p = 0; p < n_pairs; p++, w += 64) {
        __m256 even = _mm256_broadcast_ss(x + 2 * p), odd = _mm256_broadcast_ss(x + 2 * p + 1);

        UNROLL_FULL
        for (int i = 0; i < n_panels; i++) {
            const char *row = w + (size_t)i * panel_bytes;
            __m256i a = load_words(row), b = load_words(row + 32);

            _mm_prefetch(row + PREFETCH_BYTES, _MM_HINT_T0);
            lo[i] = _mm256_fmadd_ps(odd_of(a), odd, _mm256_fmadd_ps(even_of(a), even, lo[i]));
            hi[i] = _mm256_fmadd_ps(odd_of(b), odd, _mm256_fmadd_ps(even_of(b), even, hi[i]));
        }
    }
    UNROLL_FULL
    for (int i = 0; i < n_panels; i++) {
        _mm256_store_ps(acc[i], lo[i]);
        _mm256_store_ps(acc[i] + 8, hi[i]);
    }
}

static void vec_avx2(const void *panel, size_t panel_bytes, int n_panels, const void *x, int n_pairs,
                     float (*acc)[PANEL_ROWS]) {
    switch (n_panels) {
    case 1:
        vec(panel, panel_bytes, 1, x, n_pairs, acc);
        break;
    case 2:
        vec(panel, panel_bytes, 2, x, n_pairs, acc);
        break;
    case 3:
        vec(panel, panel_bytes, 3, x, n_pairs, acc);
        break;
    case 4:
        vec(panel, panel_bytes, 4, x, n_pairs, acc);
        break;
    default:
        assert(!"more panels than vec_panels");
    }
}

const struct gemm_path gemm_path_avx2 = {
    .tile_max = TILE,
    .vec_panels = VEC_PANELS,
    .tile_bf16 = tile_avx2,
    .vec = vec_avx2,
};
