/* attn_avx2: the FAST arithmetic of attention, in f32. A tile of 64 keys is converted once and serves all rows and heads
 * of the unit. The dot product of a (row, head, key) is one sum of 8 lanes over head_dim in steps of 8, the output of a
 * (row, head) one sum over its keys in order, whatever is computed beside it. head_dim is a multiple of 8. */
#include "attn_unit.h"
#include "mathx.h"

#define INLINE static inline __attribute__((always_inline))

struct span {
    bool block;            /* of the seg's own rows, else of context */
    int base;              /* key of scores[0] */
    struct attn_keys keys; /* what any row of the unit sees of it */
};

/* All of [row of the unit, head of the group] order. */
struct scratch {
    float *tile;                 /* [PAGE_TOKENS, head_dim] */
    float *scores;               /* [n, SPAN_TOKENS] then weights */
    float *span_out, *total_out; /* [n, head_dim] */
    float *span_max, *span_sum, *total_max, *total_sum;
    bool *seen; /* total_* hold something */
};

static size_t layout(const struct attn_args *a, char *base, struct scratch *s) {
    const size_t n = (size_t)ATTN_UNIT_ROWS * (size_t)(a->n_heads / a->n_kv_heads), d = (size_t)a->head_dim;
    const size_t floats[] = {PAGE_TOKENS * d, n * SPAN_TOKENS, n * d, n * d, n, n, n, n};
    float **const places[] = {&s->tile,     &s->scores,   &s->span_out,  &s->total_out,
                              &s->span_max, &s->span_sum, &s->total_max, &s->total_sum};
    size_t at = 0;

    for (size_t i = 0; i < ARRAY_LEN(floats); i++) {
        if (base)
            *places[i] = (float *)(void *)(base + at);
        at += align_up(floats[i] * sizeof(float), 64);
    }
    if (base)
        s->seen = (bool *)(base + at);
    return at + align_up(n * sizeof(bool), 64);
}

size_t attn_avx2_scratch_bytes(const struct attn_args *args) {
    struct scratch s = {0};

    return layout(args, NULL, &s);
}

/* ---- from one run over some spans to the next ---- */

struct carry {
    float max, sum;
    bool seen;
    _Alignas(32) float out[]; /* [head_dim] */
};

size_t attn_avx2_carry_bytes(const struct attn_args *args) {
    return sizeof(struct carry) + (size_t)args->head_dim * sizeof(float);
}

static void load_carry(const struct attn_unit *unit, struct scratch *s) {
    const int d = unit->args->head_dim, group = unit->args->n_heads / unit->args->n_kv_heads;

    for (int j = unit->row_begin, i = 0; j < unit->row_end; j++)
        for (int h = 0; h < group; h++, i++) {
            const struct carry *carry = (const void *)attn_carry(unit, j, unit->kv_head * group + h);

            s->total_max[i] = carry->max;
            s->total_sum[i] = carry->sum;
            s->seen[i] = carry->seen;
            memcpy(s->total_out + i * d, carry->out, (size_t)d * sizeof(float));
        }
}

static void save_carry(const struct attn_unit *unit, const struct scratch *s) {
    const int d = unit->args->head_dim, group = unit->args->n_heads / unit->args->n_kv_heads;

    for (int j = unit->row_begin, i = 0; j < unit->row_end; j++)
        for (int h = 0; h < group; h++, i++) {
            struct carry *carry = (void *)attn_carry(unit, j, unit->kv_head * group + h);

            carry->max = s->total_max[i];
            carry->sum = s->total_sum[i];
            carry->seen = s->seen[i];
            memcpy(carry->out, s->total_out + i * d, (size_t)d * sizeof(float));
        }
}

/* ---- tiles ---- */

static void load_bf16(float *dst, const uint16_t *src, int n) {
    for (int i = 0; i < n; i += 8) {
        __m128i h = _mm_loadu_si128((const __m128i *)(const void *)(src + i));

        _mm256_store_ps(dst + i, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16)));
    }
}

static void load_f16(float *dst, const uint16_t *src, int n) {
    for (int i = 0; i < n; i += 8)
        _mm256_store_ps(dst + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(src + i))));
}

/* The bits of an e4m3 value, put into an f16, are the value times 2^-8, subnormals included; only NaN is no NaN there. */
static void load_e4m3(float *dst, const uint8_t *src, int n) {
    for (int i = 0; i < n; i += 8) {
        __m128i b = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)(const void *)(src + i)));
        __m128i mag = _mm_and_si128(b, _mm_set1_epi16(0x7f)),
                sign = _mm_slli_epi16(_mm_and_si128(b, _mm_set1_epi16(0x80)), 8);
        __m128i nan = _mm_and_si128(_mm_cmpeq_epi16(mag, _mm_set1_epi16(0x7f)), _mm_set1_epi16(0x7e00));
        __m128i h = _mm_or_si128(_mm_or_si128(_mm_slli_epi16(mag, 7), sign), nan);

        _mm256_store_ps(dst + i, _mm256_mul_ps(_mm256_cvtph_ps(h), _mm256_set1_ps(256)));
    }
}

static void load_row(enum dtype dtype, float *dst, const void *src, int n) {
    if (dtype == DTYPE_BF16)
        load_bf16(dst, src, n);
    else if (dtype == DTYPE_F16)
        load_f16(dst, src, n);
    else if (dtype == DTYPE_E4M3)
        load_e4m3(dst, src, n);
    else
        memcpy(dst, src, (size_t)n * sizeof *dst);
}

/* The part of a tile that starts at key `first` which any row sees; the dots run over whole eights of keys, whose
 * unseen ones are zeros here. */
static void load_tile(const struct attn_unit *unit, const struct span *span, enum kv_half half, int first,
                      float *tile) {
    const struct attn_args *a = unit->args;
    const struct attn_keys in = attn_clip(span->keys, first, first + PAGE_TOKENS);
    const int d = a->head_dim, slot = a->batch->seg_slot[unit->seg];
    int page = span->block ? 0 : kv_page_of(a->kv, slot, first);

    for (int i = (in.lo - first) & ~7; i < ((in.hi - first + 7) & ~7); i++) {
        int key = first + i;

        if (key < in.lo || key >= in.hi)
            memset(tile + i * d, 0, (size_t)d * sizeof *tile);
        else if (span->block)
            memcpy(tile + i * d, attn_block_row(unit, half, key), (size_t)d * sizeof *tile);
        else
            load_row(a->kv->dtype, tile + i * d, kv_row(a->kv, page, a->layer, half, unit->kv_head, key), d);
    }
}

/* ---- scores ---- */

/* n_q heads by n_k keys, n_q * n_k == 8: as many sums as it takes to keep the multipliers busy. */
INLINE void dots(const float *q, const float *k, int d, int n_q, int n_k, __m256 scale, float *scores) {
    __m256 sum[8];

    for (int i = 0; i < 8; i++)
        sum[i] = _mm256_setzero_ps();
    for (int i = 0; i < d; i += 8)
        for (int x = 0; x < n_k; x++) {
            __m256 ki = _mm256_load_ps(k + x * d + i);

            for (int h = 0; h < n_q; h++)
                sum[h * n_k + x] = _mm256_fmadd_ps(_mm256_loadu_ps(q + h * d + i), ki, sum[h * n_k + x]);
        }
    for (int i = 0; i < 8; i += 4) {
        __m128 s = _mm_mul_ps(mathx_sum4(sum[i], sum[i + 1], sum[i + 2], sum[i + 3]), _mm256_castps256_ps128(scale));

        if (n_k == 2) {
            _mm_storel_pi((__m64 *)(void *)(scores + i / 2 * SPAN_TOKENS), s);
            _mm_storeh_pi((__m64 *)(void *)(scores + (i / 2 + 1) * SPAN_TOKENS), s);
        } else {
            _mm_storeu_ps(n_k == 4 ? scores + i / 4 * SPAN_TOKENS : scores + i, s);
        }
    }
}

/* One row's scores with keys [begin, end) of the tile, both multiples of 8; scores points at the tile's first key. */
static void score_row(const float *q, const float *tile, int d, int group, int begin, int end, float scale,
                      float *scores) {
    const __m256 scale8 = _mm256_set1_ps(scale);
    int h = 0;

    for (; h + 4 <= group; h += 4)
        for (int i = begin; i < end; i += 2)
            dots(q + h * d, tile + i * d, d, 4, 2, scale8, scores + h * SPAN_TOKENS + i);
    for (; h + 2 <= group; h += 2)
        for (int i = begin; i < end; i += 4)
            dots(q + h * d, tile + i * d, d, 2, 4, scale8, scores + h * SPAN_TOKENS + i);
    for (; h < group; h++)
        for (int i = begin; i < end; i += 8)
            dots(q + h * d, tile + i * d, d, 1, 8, scale8, scores + h * SPAN_TOKENS + i);
}

/* ---- weights ---- */

/* scores[begin, end) := e^(score - max); what lies around them in the same eights becomes 0. */
static void softmax(float *scores, int begin, int end, float *ret_max, float *ret_sum) {
    const __m256 none = _mm256_set1_ps(-__builtin_inff());
    __m256 max = none, sum = _mm256_setzero_ps();

    for (int i = begin & ~7; i < end; i += 8)
        max = _mm256_max_ps(_mm256_blendv_ps(none, _mm256_load_ps(scores + i), mathx_lanes(i, begin, end)), max);
    *ret_max = mathx_max(max);
    max = _mm256_set1_ps(*ret_max);
    for (int i = begin & ~7; i < end; i += 8) {
        __m256 p = mathx_exp(_mm256_sub_ps(_mm256_load_ps(scores + i), max));

        p = _mm256_and_ps(p, mathx_lanes(i, begin, end));
        _mm256_store_ps(scores + i, p);
        sum = _mm256_add_ps(sum, p);
    }
    *ret_sum = mathx_sum(sum);
}

/* ---- output ---- */

/* out[n_h, 8 * n_v of head_dim] += weights . V over keys [begin, end) of the tile */
INLINE void weigh(const float *p, const float *v, int d, int begin, int end, int n_h, int n_v, float *out) {
    __m256 sum[8];

    for (int h = 0; h < n_h; h++)
        for (int x = 0; x < n_v; x++)
            sum[h * n_v + x] = _mm256_load_ps(out + h * d + 8 * x);
    for (int i = begin; i < end; i++)
        for (int h = 0; h < n_h; h++) {
            __m256 w = _mm256_broadcast_ss(p + h * SPAN_TOKENS + i);

            for (int x = 0; x < n_v; x++)
                sum[h * n_v + x] = _mm256_fmadd_ps(w, _mm256_load_ps(v + i * d + 8 * x), sum[h * n_v + x]);
        }
    for (int h = 0; h < n_h; h++)
        for (int x = 0; x < n_v; x++)
            _mm256_store_ps(out + h * d + 8 * x, sum[h * n_v + x]);
}

INLINE void weigh_heads(const float *p, const float *v, int d, int begin, int end, int n_h, float *out) {
    const int n_v = 8 / n_h;
    int i = 0;

    for (; i + 8 * n_v <= d; i += 8 * n_v)
        weigh(p, v + i, d, begin, end, n_h, n_v, out + i);
    for (; i < d; i += 8)
        weigh(p, v + i, d, begin, end, n_h, 1, out + i);
}

/* One row's output so far, more keys [begin, end) of the tile; p points at the weight of the tile's first key. */
static void weigh_row(const float *p, const float *tile, int d, int group, int begin, int end, float *out) {
    int h = 0;

    for (; h + 4 <= group; h += 4)
        weigh_heads(p + h * SPAN_TOKENS, tile, d, begin, end, 4, out + h * d);
    for (; h + 2 <= group; h += 2)
        weigh_heads(p + h * SPAN_TOKENS, tile, d, begin, end, 2, out + h * d);
    for (; h < group; h++)
        weigh_heads(p + h * SPAN_TOKENS, tile, d, begin, end, 1, out + h * d);
}

static void merge(struct scratch *s, int i, int d, float v_scale) {
    float *total = s->total_out + i * d, *span = s->span_out + i * d;
    float max = s->seen[i] && s->total_max[i] > s->span_max[i] ? s->total_max[i] : s->span_max[i];
    __m256 a, b, max8 = _mm256_set1_ps(max), scale = _mm256_set1_ps(v_scale);

    if (!s->seen[i]) {
        for (int x = 0; x < d; x += 8)
            _mm256_store_ps(total + x, _mm256_mul_ps(_mm256_load_ps(span + x), scale));
        s->total_sum[i] = s->span_sum[i];
    } else {
        a = mathx_exp(_mm256_sub_ps(_mm256_set1_ps(s->total_max[i]), max8));
        b = mathx_exp(_mm256_sub_ps(_mm256_set1_ps(s->span_max[i]), max8));
        s->total_sum[i] = s->total_sum[i] * _mm256_cvtss_f32(a) + s->span_sum[i] * _mm256_cvtss_f32(b);
        for (int x = 0; x < d; x += 8) {
            __m256 y = _mm256_mul_ps(_mm256_mul_ps(_mm256_load_ps(span + x), scale), b);

            _mm256_store_ps(total + x, _mm256_fmadd_ps(_mm256_load_ps(total + x), a, y));
        }
    }
    s->total_max[i] = max;
    s->seen[i] = true;
}

/* ---- the unit ---- */

static struct attn_keys span_keys(const struct attn_unit *unit, const struct span *span, int j) {
    struct attn_keys keys = span->block ? attn_block_keys(unit, j) : attn_context_keys(unit, j);

    return attn_clip(keys, span->keys.lo, span->keys.hi);
}

static void run_span(const struct attn_unit *unit, const struct span *span, struct scratch *s) {
    const struct attn_args *a = unit->args;
    const int d = a->head_dim, group = a->n_heads / a->n_kv_heads, head0 = unit->kv_head * group;
    const float k_scale = span->block ? 1 : a->kv->k_scale[a->layer],
                v_scale = span->block ? 1 : a->kv->v_scale[a->layer];
    const float scale = (float)((double)k_scale / sqrt(d));
    const int first_tile = span->keys.lo / PAGE_TOKENS * PAGE_TOKENS;

    for (int first = first_tile; first < span->keys.hi; first += PAGE_TOKENS) {
        load_tile(unit, span, KV_K, first, s->tile);
        for (int j = unit->row_begin; j < unit->row_end; j++) {
            struct attn_keys keys = attn_clip(span_keys(unit, span, j), first, first + PAGE_TOKENS);

            if (keys.lo < keys.hi)
                score_row((const float *)a->q + attn_row_at(unit, j, head0), s->tile, d, group, (keys.lo - first) & ~7,
                          (keys.hi - first + 7) & ~7, scale,
                          s->scores + (j - unit->row_begin) * group * SPAN_TOKENS + first - span->base);
        }
    }
    for (int j = unit->row_begin; j < unit->row_end; j++) {
        struct attn_keys keys = span_keys(unit, span, j);
        int i0 = (j - unit->row_begin) * group;

        for (int i = i0; i < i0 + group && keys.lo < keys.hi; i++)
            softmax(s->scores + i * SPAN_TOKENS, keys.lo - span->base, keys.hi - span->base, &s->span_max[i],
                    &s->span_sum[i]);
        memset(s->span_out + i0 * d, 0, (size_t)(group * d) * sizeof(float));
    }
    for (int first = first_tile; first < span->keys.hi; first += PAGE_TOKENS) {
        load_tile(unit, span, KV_V, first, s->tile);
        for (int j = unit->row_begin; j < unit->row_end; j++) {
            struct attn_keys keys = attn_clip(span_keys(unit, span, j), first, first + PAGE_TOKENS);
            int i0 = (j - unit->row_begin) * group;

            if (keys.lo < keys.hi)
                weigh_row(s->scores + i0 * SPAN_TOKENS + first - span->base, s->tile, d, group, keys.lo - first,
                          keys.hi - first, s->span_out + i0 * d);
        }
    }
    for (int j = unit->row_begin; j < unit->row_end; j++) {
        struct attn_keys keys = span_keys(unit, span, j);
        int i0 = (j - unit->row_begin) * group;

        for (int i = i0; i < i0 + group && keys.lo < keys.hi; i++)
            merge(s, i, d, v_scale);
    }
}

static void finish_row(const struct attn_unit *unit, int j, int h, const struct scratch *s) {
    const struct attn_args *a = unit->args;
    const int d = a->head_dim, group = a->n_heads / a->n_kv_heads, head = unit->kv_head * group + h;
    const int i = (j - unit->row_begin) * group + h;
    const size_t row = (size_t)a->batch->seg_row[unit->seg] + (size_t)j;
    const float *gate =
        a->gate ? (const float *)a->gate + row * (size_t)a->gate_stride + (size_t)head * (size_t)a->gate_head_stride
                : NULL;
    float *out = (float *)a->out + attn_row_at(unit, j, head);

    for (int x = 0; x < d; x += 8) {
        __m256 y = _mm256_setzero_ps();

        if (s->seen[i])
            y = _mm256_div_ps(_mm256_load_ps(s->total_out + i * d + x), _mm256_set1_ps(s->total_sum[i]));
        if (gate)
            y = _mm256_mul_ps(y, mathx_sigmoid(_mm256_loadu_ps(gate + x)));
        _mm256_storeu_ps(out + x, y);
    }
}

/* Rows follow each other, so the first sees farthest back and the last farthest forward. */
static struct attn_keys unit_keys(const struct attn_unit *unit,
                                  struct attn_keys (*row_keys)(const struct attn_unit *, int)) {
    return (struct attn_keys){row_keys(unit, unit->row_begin).lo, row_keys(unit, unit->row_end - 1).hi};
}

void attn_avx2_unit(const struct attn_unit *unit, void *scratch) {
    const struct attn_args *a = unit->args;
    const int group = a->n_heads / a->n_kv_heads;
    const struct attn_keys context = unit_keys(unit, attn_context_keys), block = unit_keys(unit, attn_block_keys);
    struct scratch s = {0};

    layout(a, scratch, &s);
    memset(s.seen, 0, (size_t)(ATTN_UNIT_ROWS * group) * sizeof *s.seen);
    if (unit->spans.begin > 0)
        load_carry(unit, &s);
    for (int base = context.lo / SPAN_TOKENS * SPAN_TOKENS; base < context.hi; base += SPAN_TOKENS) {
        struct span span = {false, base, attn_clip(context, base, base + SPAN_TOKENS)};

        run_span(unit, &span, &s);
    }
    if (block.lo < block.hi)
        run_span(unit, &(struct span){true, 0, block}, &s);
    if (unit->spans.end != ATTN_SPANS_END) {
        save_carry(unit, &s);
        return;
    }
    for (int j = unit->row_begin; j < unit->row_end; j++)
        for (int h = 0; h < group; h++)
            finish_row(unit, j, h, &s);
}
