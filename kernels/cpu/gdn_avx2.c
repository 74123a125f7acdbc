/* gdn_avx2: the FAST arithmetic of the gated delta net, in f32. Dk and Dv are multiples of 8. */
#include "gdn_kernels.h"
#include "mathx.h"

#include <math.h>

enum { STATE_ROWS = 4 }; /* rows of S that advance together: their loads of k and q are shared, their sums overlap */

static void conv(const struct gdn_conv *a) {
    for (int ch = 0; ch < a->n_channels; ch += 8) {
        __m256i first = _mm256_mullo_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(a->taps));
        __m256 w[GDN_TAPS_MAX];

        for (int j = 0; j < a->taps; j++)
            w[j] = _mm256_i32gather_ps(a->weight + ch * a->taps + j, first, 4);
        for (int t = 0; t < a->n_rows; t++) {
            const float *m = a->window + t * a->stride + ch;
            __m256 sum = _mm256_mul_ps(w[0], _mm256_loadu_ps(m));

            for (int j = 1; j < a->taps; j++)
                sum = _mm256_fmadd_ps(w[j], _mm256_loadu_ps(m + j * a->stride), sum);
            _mm256_storeu_ps(a->out + t * a->stride + ch, _mm256_mul_ps(sum, mathx_sigmoid(sum)));
        }
    }
}

static float sum_of_squares(const float *x, int n) {
    __m256 sum = _mm256_setzero_ps();

    for (int i = 0; i < n; i += 8) {
        __m256 v = _mm256_loadu_ps(x + i);

        sum = _mm256_fmadd_ps(v, v, sum);
    }
    return mathx_sum(sum);
}

static void l2_norm(const float *x, int n, float scale, float *out) {
    __m256 factor = _mm256_set1_ps(scale / sqrtf(sum_of_squares(x, n) + 1e-6f));

    for (int i = 0; i < n; i += 8)
        _mm256_storeu_ps(out + i, _mm256_mul_ps(_mm256_loadu_ps(x + i), factor));
}

/* Two sums per row, over the even and the odd vectors of 8: with one, each addition would wait for the last. */
struct sums {
    __m256 even[STATE_ROWS], odd[STATE_ROWS];
};

static inline struct sums sums_zero(void) {
    struct sums sums;

    for (int r = 0; r < STATE_ROWS; r++)
        sums.even[r] = sums.odd[r] = _mm256_setzero_ps();
    return sums;
}

static inline __m128 sums_total(const struct sums *s) {
    return mathx_sum4(_mm256_add_ps(s->even[0], s->odd[0]), _mm256_add_ps(s->even[1], s->odd[1]),
                      _mm256_add_ps(s->even[2], s->odd[2]), _mm256_add_ps(s->even[3], s->odd[3]));
}

static inline void read_at(const float *s, int dk, const float *k, __m256 sum[STATE_ROWS]) {
    __m256 ki = _mm256_load_ps(k);

    for (int r = 0; r < STATE_ROWS; r++)
        sum[r] = _mm256_fmadd_ps(_mm256_load_ps(s + r * dk), ki, sum[r]);
}

static inline void update_at(float *s, int dk, const float *q, const float *k, const __m256 u[STATE_ROWS], __m256 decay,
                             __m256 sum[STATE_ROWS]) {
    __m256 ki = _mm256_load_ps(k), qi = _mm256_load_ps(q);

    for (int r = 0; r < STATE_ROWS; r++) {
        __m256 si = _mm256_fmadd_ps(u[r], ki, _mm256_mul_ps(decay, _mm256_load_ps(s + r * dk)));

        _mm256_store_ps(s + r * dk, si);
        sum[r] = _mm256_fmadd_ps(si, qi, sum[r]);
    }
}

/* STATE_ROWS rows of S by one token; returns their o. */
static inline __m128 step(float *s, int dk, const float *q, const float *k, __m128 v, float decay, float beta) {
    struct sums sums = sums_zero();
    __m256 u8[STATE_ROWS];
    float u[STATE_ROWS];
    __m128 read;
    int i;

    for (i = 0; i + 16 <= dk; i += 16) {
        read_at(s + i, dk, k + i, sums.even);
        read_at(s + i + 8, dk, k + i + 8, sums.odd);
    }
    if (i < dk)
        read_at(s + i, dk, k + i, sums.even);
    read = _mm_mul_ps(_mm_set1_ps(decay), sums_total(&sums));
    _mm_storeu_ps(u, _mm_mul_ps(_mm_set1_ps(beta), _mm_sub_ps(v, read)));
    for (int r = 0; r < STATE_ROWS; r++)
        u8[r] = _mm256_set1_ps(u[r]);

    sums = sums_zero();
    for (i = 0; i + 16 <= dk; i += 16) {
        update_at(s + i, dk, q + i, k + i, u8, _mm256_set1_ps(decay), sums.even);
        update_at(s + i + 8, dk, q + i + 8, k + i + 8, u8, _mm256_set1_ps(decay), sums.odd);
    }
    if (i < dk)
        update_at(s + i, dk, q + i, k + i, u8, _mm256_set1_ps(decay), sums.even);
    return sums_total(&sums);
}

/* Without q (commit) k stands in for it and the output goes nowhere: S takes the same operations either way. */
static void steps(const struct gdn_steps *a) {
    const size_t block = (size_t)STATE_ROWS * (size_t)a->dk;
    float *kn = a->scratch, *qn = kn + GDN_RUN_ROWS_MAX * a->dk, *s = qn + GDN_RUN_ROWS_MAX * a->dk;
    float decay[GDN_RUN_ROWS_MAX];

    for (int t = 0; t < a->n_rows; t++) {
        decay[t] = (float)exp((double)a->g[t * a->g_stride]);
        l2_norm(a->k + t * a->k_stride, a->dk, 1, kn + t * a->dk);
        if (a->q)
            l2_norm(a->q + t * a->q_stride, a->dk, 1 / sqrtf((float)a->dk), qn + t * a->dk);
    }
    for (int v = 0; v < a->dv; v += STATE_ROWS) {
        memcpy(s, a->s_in + v * a->dk, block * sizeof *s);
        for (int t = 0; t < a->n_rows; t++) {
            const float *k = kn + t * a->dk, *q = a->q ? qn + t * a->dk : k;
            __m128 o =
                step(s, a->dk, q, k, _mm_loadu_ps(a->v + t * a->v_stride + v), decay[t], a->beta[t * a->beta_stride]);

            if (a->q)
                _mm_storeu_ps(a->o + t * a->dv + v, o);
        }
        if (a->s_out)
            memcpy(a->s_out + v * a->dk, s, block * sizeof *s);
    }
}

static void gated_norm(const struct gdn_gated_norm *a) {
    for (int t = 0; t < a->n_rows; t++) {
        const float *o = a->o + t * a->dv, *z = a->z + (size_t)t * (size_t)a->z_stride;
        float *out = a->out + (size_t)t * (size_t)a->out_stride;
        __m256 scale = _mm256_set1_ps(1 / sqrtf(sum_of_squares(o, a->dv) / (float)a->dv + a->eps));

        for (int i = 0; i < a->dv; i += 8) {
            __m256 zi = _mm256_loadu_ps(z + i), act = mathx_sigmoid(zi);
            __m256 y = _mm256_mul_ps(_mm256_mul_ps(_mm256_loadu_ps(o + i), scale), _mm256_loadu_ps(a->w + i));

            if (a->gate == GATE_SILU)
                act = _mm256_mul_ps(act, zi);
            _mm256_storeu_ps(out + i, _mm256_mul_ps(y, act));
        }
    }
}

const struct gdn_kernels gdn_kernels_avx2 = {conv, steps, gated_norm};
