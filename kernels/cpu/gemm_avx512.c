/* gemm_avx512: FAST kernels with AVX-512 BF16. One dot-product instruction takes a k pair of all 16 rows of a panel and a
 * token's pair, broadcast from memory. Its internal order is the CPU's and the same in every lane, so a row's bits do not
 * depend on the tile it is in; subnormal inputs and results count as zero. */
#include "gemm.h"
#include "unroll.h"

#include <assert.h>
#include <immintrin.h>

enum {
    TILE = 16,             /* 16 accumulators of 32 registers; the panel is read once for a whole verify block */
    VEC_PANELS = 8,        /* as many chains as hide the latency of the dot product */
    PREFETCH_BYTES = 1024, /* ahead in each panel */
};

/* x: [n_pairs][n_tokens] words of two bf16 */
__attribute__((always_inline)) static inline void tile(const char *w, const int32_t *x, int n_pairs, const int n_tokens,
                                                       float (*acc)[PANEL_ROWS]) {
    __m512 sum[TILE];

    UNROLL_FULL
    for (int t = 0; t < n_tokens; t++)
        sum[t] = _mm512_setzero_ps();
    for (int p = 0; p < n_pairs; p++, w += 64, x += n_tokens) {
        __m512bh row = (__m512bh)_mm512_load_si512(w);

        _mm_prefetch(w + PREFETCH_BYTES, _MM_HINT_T0);
        UNROLL_FULL
        for (int t = 0; t < n_tokens; t++)
            sum[t] = _mm512_dpbf16_ps(sum[t], row, (__m512bh)_mm512_set1_epi32(x[t]));
    }
    UNROLL_FULL
    for (int t = 0; t < n_tokens; t++)
        _mm512_store_ps(acc[t], sum[t]);
}

static void tile_avx512(const void *panel, const void *x, int n_pairs, int n_tokens, float (*acc)[PANEL_ROWS]) {
    switch (n_tokens) {
#define CASE(n)                                                                                                        \
    case n:                                                                                                            \
        tile(panel, x, n_pairs, n, acc);                                                                               \
        break;
        CASE(1)
        CASE(2)
        CASE(3)
        CASE(4)
        CASE(5)
        CASE(6)
        CASE(7)
        CASE(8)
        CASE(9)
        CASE(10)
        CASE(11)
        CASE(12)
        CASE(13)
        CASE(14)
        CASE(15)
        CASE(16)
#undef CASE
    default:
        assert(!"a tile of more tokens than tile_max");
    }
}

__attribute__((always_inline)) static inline void vec(const char *w, size_t panel_bytes, const int n_panels,
                                                      const int32_t *x, int n_pairs, float (*acc)[PANEL_ROWS]) {
    __m512 sum[VEC_PANELS];

    UNROLL_FULL
    for (int i = 0; i < n_panels; i++)
        sum[i] = _mm512_setzero_ps();
    for (int p = 0; p < n_pairs; p++, w += 64) {
        __m512bh token = (__m512bh)_mm512_set1_epi32(x[p]);

        UNROLL_FULL
        for (int i = 0; i < n_panels; i++) {
            const char *row = w + (size_t)i * panel_bytes;

            _mm_prefetch(row + PREFETCH_BYTES, _MM_HINT_T0);
            sum[i] = _mm512_dpbf16_ps(sum[i], (__m512bh)_mm512_load_si512(row), token);
        }
    }
    UNROLL_FULL
    for (int i = 0; i < n_panels; i++)
        _mm512_store_ps(acc[i], sum[i]);
}

static void vec_avx512(const void *panel, size_t panel_bytes, int n_panels, const void *x, int n_pairs,
                       float (*acc)[PANEL_ROWS]) {
    switch (n_panels) {
#define CASE(n)                                                                                                        \
    case n:                                                                                                            \
        vec(panel, panel_bytes, n, x, n_pairs, acc);                                                                   \
        break;
        CASE(1)
        CASE(2)
        CASE(3)
        CASE(4)
        CASE(5)
        CASE(6)
        CASE(7)
        CASE(8)
#undef CASE
    default:
        assert(!"more panels than vec_panels");
    }
}

const struct gemm_path gemm_path_avx512bf16 = {
    .tile_max = TILE,
    .vec_panels = VEC_PANELS,
    .x_form = GEMM_X_PAIRS,
    .tile_bf16 = tile_avx512,
    .vec = vec_avx512,
};
