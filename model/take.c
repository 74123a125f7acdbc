#include "take.h"
#include "dummy.h"
#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { SCALE_BLOCK = 128, DIMS_MAX = 3 };

int take_init(struct take *take, struct checkpoint *checkpoint, struct shard_of shard, struct report *report) {
    assert(shard.size >= 1 && shard.rank >= 0 && shard.rank < shard.size);
    *take = (struct take){.checkpoint = checkpoint, .shard = shard, .report = report};
    take->taken = calloc(checkpoint->n_tensors + 1, sizeof *take->taken);
    if (!take->taken)
        return take->error = report_error(report, -ENOMEM, "%s: out of memory", checkpoint->name);
    return 0;
}

void take_deinit(struct take *take) {
    free(take->taken);
    take->taken = NULL;
}

void take_refuse(struct take *take, const char *format, ...) {
    char what[400];
    va_list args;

    if (take->error != 0)
        return;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    take->error = report_error(take->report, -EINVAL, "%s", what);
}

bool take_has(const struct take *take, const char *format, ...) {
    char name[TENSOR_NAME_MAX + 1];
    va_list args;

    va_start(args, format);
    vsnprintf(name, sizeof name, format, args);
    va_end(args);
    return checkpoint_find(take->checkpoint, name) != NULL;
}

void take_divide(struct take *take, const char *what, int n) {
    if (n % take->shard.size != 0)
        take_refuse(take, "%s: %s %d cannot be divided among %d ranks", take->checkpoint->name, what, n,
                    take->shard.size);
}

/* ---- finite? ---------------------------------------------------------------------------------------------------- */

/* Chunks of a constant length, so that the compiler vectorises the inner loop; the first bad chunk is searched again. */
enum { CHUNK = 4096 };

#define DEFINE_BAD_CHUNK(name, type, mask)                                                                             \
    static bool name(const type *x, size_t n) {                                                                        \
        type bad = 0;                                                                                                  \
                                                                                                                       \
        if (n == CHUNK)                                                                                                \
            for (size_t i = 0; i < CHUNK; i++)                                                                         \
                bad |= (type)((x[i] & (mask)) == (mask));                                                              \
        else                                                                                                           \
            for (size_t i = 0; i < n; i++)                                                                             \
                bad |= (type)((x[i] & (mask)) == (mask));                                                              \
        return bad;                                                                                                    \
    }
DEFINE_BAD_CHUNK(bad_f32, uint32_t, 0x7f800000u)
DEFINE_BAD_CHUNK(bad_bf16, uint16_t, 0x7f80)
DEFINE_BAD_CHUNK(bad_f16, uint16_t, 0x7c00)
DEFINE_BAD_CHUNK(bad_e4m3, uint8_t, 0x7f) /* its exponent has no infinities: only this pattern is a NaN */

static bool is_bad(enum dtype dtype, const void *data, size_t begin, size_t n) {
    switch (dtype) {
    case DTYPE_F32:
        return bad_f32((const uint32_t *)data + begin, n);
    case DTYPE_BF16:
        return bad_bf16((const uint16_t *)data + begin, n);
    case DTYPE_F16:
        return bad_f16((const uint16_t *)data + begin, n);
    default:
        return bad_e4m3((const uint8_t *)data + begin, n);
    }
}

/* Index of the first element that is NaN or infinite, or n. */
static size_t first_bad(enum dtype dtype, const void *data, size_t n) {
    for (size_t begin = 0; begin < n; begin += CHUNK) {
        size_t n_chunk = n - begin < CHUNK ? n - begin : CHUNK;

        if (!is_bad(dtype, data, begin, n_chunk))
            continue;
        while (!is_bad(dtype, data, begin, 1))
            begin++;
        return begin;
    }
    return n;
}

/* ---- one tensor ------------------------------------------------------------------------------------------------- */

/* Finds, checks and ticks off; NULL after a refusal. `types` says in words what the dtype mask allows. */
static struct checkpoint_tensor *claim(struct take *take, const char *name, const uint64_t *dims, int n_dims,
                                       unsigned dtypes, const char *types, const void **ret_data) {
    struct checkpoint_tensor *found;
    const struct safetensors_tensor *entry;
    char is[200], wanted[200];
    const void *data;

    if (take->error != 0)
        return NULL;
    found = checkpoint_find(take->checkpoint, name);
    if (!found) {
        take_refuse(take, "%s: %s: missing", take->checkpoint->name, name);
        return NULL;
    }
    entry = found->entry;
    if (entry->n_dims != n_dims || memcmp(entry->dims, dims, (size_t)n_dims * sizeof *dims) != 0) {
        take_refuse(take, "%s: %s: shape is %s, expected %s", found->file->name, name,
                    safetensors_shape(entry->dims, entry->n_dims, is, sizeof is),
                    safetensors_shape(dims, n_dims, wanted, sizeof wanted));
        return NULL;
    }
    if (entry->dtype < 0 || !(dtypes >> entry->dtype & 1)) {
        take_refuse(take, "%s: %s: dtype is %s, expected %s", found->file->name, name, entry->dtype_name, types);
        return NULL;
    }
    data = checkpoint_data(found);
    if (!data) {
        take->error = report_error(take->report, -ENOMEM, "%s: %s: out of memory", found->file->name, name);
        return NULL;
    }
    take->taken[found - take->checkpoint->tensors] = true;
    *ret_data = data;
    return found;
}

/* The tensor as the file has it: rows and columns are the last two dimensions, those before are stacked. */
static struct tensor take_whole(struct take *take, enum take_kind kind, const uint64_t *dims, int n_dims, int n_rows,
                                int n_cols, const char *name) {
    const unsigned plain = 1u << DTYPE_F32 | 1u << DTYPE_BF16 | 1u << DTYPE_F16;
    struct tensor t = {.n_rows = n_rows, .n_cols = n_cols};
    struct checkpoint_tensor *weight, *scale;
    char scales[TENSOR_NAME_MAX + 16];
    uint64_t scale_dims[DIMS_MAX];
    const void *data;

    if (take->error != 0)
        return (struct tensor){0};
    if (take->checkpoint->dummy)
        return dummy_tensor(take->checkpoint->dummy, kind, n_rows, n_cols, name);
    snprintf(scales, sizeof scales, "%s_scale_inv", name);
    /* The presence of a scale decides: FP8 data without one has no values, other data with one has two. */
    if ((kind != TAKE_PROJ && kind != TAKE_MATRIX) || !checkpoint_find(take->checkpoint, scales)) {
        weight = claim(take, name, dims, n_dims, plain, "BF16, F16 or F32 (or F8_E4M3 with a weight_scale_inv)", &data);
        if (!weight)
            return (struct tensor){0};
    } else {
        weight = claim(take, name, dims, n_dims, 1u << DTYPE_E4M3, "F8_E4M3, as there is a scale", &data);
        for (int i = 0; i < n_dims; i++)
            scale_dims[i] = i < n_dims - 2 ? dims[i] : div_ceil(dims[i], SCALE_BLOCK);
        scale = claim(take, scales, scale_dims, n_dims, 1u << DTYPE_F32 | 1u << DTYPE_BF16, "F32 or BF16", &t.scale);
        if (!weight || !scale)
            return (struct tensor){0};
        t.scale_dtype = (enum dtype)scale->entry->dtype;
        t.scale_cols = (int)scale_dims[n_dims - 1];
    }
    t.data = data;
    t.dtype = (enum dtype)weight->entry->dtype;
    t.row_bytes = (size_t)n_cols * dtype_bytes(t.dtype);
    return t;
}

struct tensor take_share(struct take *take, struct tensor t, enum take_cut cut, int begin, int n, const char *name) {
    int n_share = n / take->shard.size, from = begin + take->shard.rank * n_share;

    if (take->error != 0)
        return (struct tensor){0};
    if (n % take->shard.size != 0) {
        take_refuse(take, "%s: %s: %d %s cannot be divided among %d ranks", take->checkpoint->name, name, n,
                    cut == CUT_COLS ? "columns" : "rows", take->shard.size);
        return (struct tensor){0};
    }
    /* A cut inside a block of scales would need the same scale on both sides at another offset. */
    if (t.scale && (begin % SCALE_BLOCK != 0 || (take->shard.size > 1 && n_share % SCALE_BLOCK != 0))) {
        take_refuse(take, "%s: %s: FP8 blocks of %d cannot be cut into shares of %d %s", take->checkpoint->name, name,
                    SCALE_BLOCK, n_share, cut == CUT_COLS ? "columns" : "rows");
        return (struct tensor){0};
    }
    return cut == CUT_COLS ? tensor_cols(t, from, n_share) : tensor_rows(t, from, n_share);
}

static struct tensor cut_share(struct take *take, struct tensor t, enum take_cut cut, const char *name) {
    if (cut == CUT_NONE)
        return t;
    return take_share(take, t, cut, 0, cut == CUT_COLS ? t.n_cols : t.n_rows, name);
}

struct tensor take_matrix(struct take *take, enum take_kind kind, enum take_cut cut, int n_rows, int n_cols,
                          const char *format, ...) {
    const uint64_t dims[2] = {(uint64_t)n_rows, (uint64_t)n_cols};
    char name[TENSOR_NAME_MAX + 1];
    va_list args;

    va_start(args, format);
    vsnprintf(name, sizeof name, format, args);
    va_end(args);
    return cut_share(take, take_whole(take, kind, dims, 2, n_rows, n_cols, name), cut, name);
}

struct tensor take_vector(struct take *take, enum take_kind kind, enum take_cut cut, int n, const char *format, ...) {
    const uint64_t dims[1] = {(uint64_t)n};
    char name[TENSOR_NAME_MAX + 1];
    va_list args;

    va_start(args, format);
    vsnprintf(name, sizeof name, format, args);
    va_end(args);
    return cut_share(take, take_whole(take, kind, dims, 1, 1, n, name), cut, name);
}

struct tensor take_conv(struct take *take, int n, int n_taps, const char *format, ...) {
    const uint64_t dims[3] = {(uint64_t)n, 1, (uint64_t)n_taps};
    char name[TENSOR_NAME_MAX + 1];
    va_list args;

    va_start(args, format);
    vsnprintf(name, sizeof name, format, args);
    va_end(args);
    return take_whole(take, TAKE_CONV, dims, 3, n, n_taps, name);
}

struct tensor take_stack(struct take *take, int n_stack, int n_rows, int n_cols, const char *format, ...) {
    const uint64_t dims[3] = {(uint64_t)n_stack, (uint64_t)n_rows, (uint64_t)n_cols};
    char name[TENSOR_NAME_MAX + 1];
    va_list args;

    va_start(args, format);
    vsnprintf(name, sizeof name, format, args);
    va_end(args);
    return take_whole(take, TAKE_PROJ, dims, 3, n_rows, n_cols, name);
}

struct tensor take_stack_at(struct tensor first, int i) {
    struct tensor t = first;

    if (!t.data)
        return t;
    t.data = (const char *)t.data + (size_t)i * (size_t)t.n_rows * t.row_bytes;
    if (t.scale)
        t.scale = (const char *)t.scale + (size_t)i * div_ceil((uint64_t)t.n_rows, SCALE_BLOCK) * (size_t)t.scale_cols *
                                              dtype_bytes(t.scale_dtype);
    return t;
}

static void check_finite(struct take *take, struct checkpoint_tensor *t) {
    enum dtype dtype = (enum dtype)t->entry->dtype;
    size_t n = t->entry->bytes / dtype_bytes(dtype), bad = first_bad(dtype, checkpoint_data(t), n);

    if (bad < n)
        take_refuse(take, "%s: %s: element %zu is NaN or infinite", t->file->name, t->entry->name, bad);
}

void take_finish(struct take *take, bool (*is_skipped)(const char *name)) {
    struct checkpoint *c = take->checkpoint;

    for (size_t i = 0; take->error == 0 && i < c->n_tensors; i++) {
        if (take->taken[i])
            continue;
        if (!is_skipped(c->tensors[i].entry->name))
            take_refuse(take, "%s: %s: unexpected tensor", c->tensors[i].file->name, c->tensors[i].entry->name);
        take->n_skipped++;
        take->skipped_bytes += c->tensors[i].entry->bytes;
    }
    /* Last, since it reads all data: what names and shapes tell is told at once, whatever the size. */
    for (size_t i = 0; take->error == 0 && i < c->n_tensors; i++)
        if (take->taken[i])
            check_finite(take, &c->tensors[i]);
}
