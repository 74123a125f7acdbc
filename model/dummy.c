#include "dummy.h"
#include <errno.h>
#include <math.h>
#include <stdlib.h>

/* Rows of a matrix begin this far apart. */
enum { ROW_STEP = 64, SLACK = 1 << 20, SCALE_SLACK = 4096 };
/* e4m3 codes are drawn with this deviation; the scale undoes it. */
#define E4M3_DEVIATION 64.0f

struct block {
    void *data;
    size_t bytes;
    enum dtype dtype;
};

struct dummy_pool {
    uint64_t seed;
    struct block blocks[TAKE_KIND_N]; /* [TAKE_MATRIX] serves tables too; [TAKE_PROJ] is e4m3, or empty without fp8 */
    struct block scales;
};

static uint64_t mix(uint64_t *state) { /* splitmix64 */
    uint64_t z = *state += 0x9e3779b97f4a7c15u;

    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* Near enough to a normal variate of deviation 1: the sum of four uniform ones. Never 0. */
static float normal(uint64_t *state) {
    uint64_t bits = mix(state);
    int sum = 0;

    for (int i = 0; i < 4; i++)
        sum += (int)(bits >> 16 * i & 0xffff);
    return ((float)(sum - 2 * 65535) + 0.5f) / 37837.0f; /* 65536 * (4 / 12)^0.5 */
}

static float uniform(uint64_t *state) {
    return (float)(mix(state) >> 40) * 0x1p-24f;
}

static float draw(enum take_kind kind, float matrix_deviation, uint64_t *state) {
    switch (kind) {
    case TAKE_PROJ:
        return normal(state) * E4M3_DEVIATION;
    case TAKE_NEAR_ZERO:
        return normal(state) * 0.1f;
    case TAKE_NEAR_ONE:
        return 1 + normal(state) * 0.1f;
    case TAKE_A_LOG:
        return logf(0.05f + 8 * uniform(state));
    case TAKE_DT_BIAS:
        return normal(state) * 0.5f - 1;
    case TAKE_CONV:
        return normal(state) * 0.4f;
    default:
        return normal(state) * matrix_deviation;
    }
}

static bool fill(struct block *block, enum dtype dtype, size_t n, enum take_kind kind, float deviation,
                 uint64_t *state) {
    block->dtype = dtype;
    block->bytes = n * dtype_bytes(dtype);
    block->data = aligned_alloc(64, align_up(block->bytes, 64));
    if (!block->data)
        return false;
    for (size_t i = 0; i < n; i++) {
        float f = draw(kind, deviation, state);

        if (dtype == DTYPE_E4M3) {
            uint8_t code = e4m3_from_f32(f);

            ((uint8_t *)block->data)[i] = code & 0x7f ? code : 0x38; /* a zero becomes a one */
        } else {
            ((uint16_t *)block->data)[i] = bf16_from_f32(f);
        }
    }
    return true;
}

static bool fill_scales(struct block *block, size_t n, float deviation, uint64_t *state) {
    block->dtype = DTYPE_F32;
    block->bytes = n * sizeof(float);
    block->data = aligned_alloc(64, align_up(block->bytes, 64));
    for (size_t i = 0; block->data && i < n; i++)
        ((float *)block->data)[i] = deviation / E4M3_DEVIATION * (0.75f + 0.5f * uniform(state));
    return block->data != NULL;
}

int dummy_pool_new(const struct dummy_shape *shape, uint64_t seed, struct dummy_pool **ret_pool) {
    struct dummy_pool *pool = calloc(1, sizeof *pool);
    size_t rows = (size_t)shape->rows_max, cols = (size_t)shape->cols_max;
    float deviation = 1 / sqrtf((float)shape->hidden);
    uint64_t state = seed;
    bool ok;

    if (!pool)
        return -ENOMEM;
    pool->seed = seed;
    ok = fill(&pool->blocks[TAKE_MATRIX], DTYPE_BF16, (rows * ROW_STEP + SLACK) / 2 + cols, TAKE_MATRIX, deviation,
              &state);
    for (enum take_kind kind = TAKE_NEAR_ZERO; ok && kind < TAKE_KIND_N;
         kind++) /* conv channels have a few taps each */
        ok = fill(&pool->blocks[kind], DTYPE_BF16, (kind == TAKE_CONV ? rows * 8 : cols) + SCALE_SLACK, kind, deviation,
                  &state);
    if (ok && shape->fp8) {
        ok = fill(&pool->blocks[TAKE_PROJ], DTYPE_E4M3, rows * ROW_STEP + SLACK + cols, TAKE_PROJ, deviation, &state);
        if (ok)
            ok = fill_scales(&pool->scales, div_ceil(rows, 128) * div_ceil(cols, 128) + SCALE_SLACK, deviation, &state);
    }
    if (!ok) {
        dummy_pool_free(pool);
        return -ENOMEM;
    }
    *ret_pool = pool;
    return 0;
}

void dummy_pool_free(struct dummy_pool *pool) {
    if (!pool)
        return;
    for (int i = 0; i < TAKE_KIND_N; i++)
        free(pool->blocks[i].data);
    free(pool->scales.data);
    free(pool);
}

/* A place in the block with `span` bytes behind it, at a whole cache line: names give places. */
static const void *place(const struct block *block, size_t span, uint64_t *state) {
    return (const char *)block->data + mix(state) % ((block->bytes - span) / 64 + 1) * 64;
}

struct tensor dummy_tensor(const struct dummy_pool *pool, enum take_kind kind, int n_rows, int n_cols,
                           const char *name) {
    bool is_matrix = kind == TAKE_PROJ || kind == TAKE_MATRIX || kind == TAKE_TABLE;
    const struct block *block = &pool->blocks[kind];
    uint64_t state = pool->seed;
    struct tensor t = {.n_rows = n_rows, .n_cols = n_cols};
    size_t row_bytes;

    for (const char *c = name; *c; c++)
        state = (state ^ (unsigned char)*c) * 0x100000001b3u;
    if (is_matrix && !block->data)
        block = &pool->blocks[TAKE_MATRIX];
    t.dtype = block->dtype;
    row_bytes = (size_t)n_cols * dtype_bytes(t.dtype);
    t.row_bytes = is_matrix && row_bytes > ROW_STEP ? ROW_STEP : row_bytes;
    t.data = place(block, (size_t)(n_rows - 1) * t.row_bytes + row_bytes, &state);
    if (t.dtype == DTYPE_E4M3) {
        t.scale_dtype = DTYPE_F32;
        t.scale_cols = (int)div_ceil((uint64_t)n_cols, 128);
        t.scale = place(&pool->scales, div_ceil((uint64_t)n_rows, 128) * (size_t)t.scale_cols * sizeof(float), &state);
    }
    return t;
}
