#include "safetensors.h"
#include "json.h"
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { METADATA_MAX = 256 };

struct parser {
    const char *path;
    struct report *report;
    struct json_reader json;
    uint64_t data_offset, file_bytes;
    struct safetensors table;
    size_t n_tensors_max, names_used;
};

static const struct dtype_code {
    const char *name;
    int bits, dtype;
} dtype_codes[] = {
    {"F32", 32, DTYPE_F32}, {"BF16", 16, DTYPE_BF16},
    {"F16", 16, DTYPE_F16}, {"F8_E4M3", 8, DTYPE_E4M3},
    {"BOOL", 8, -1},        {"U8", 8, -1},
    {"I8", 8, -1},          {"I16", 16, -1},
    {"U16", 16, -1},        {"I32", 32, -1},
    {"U32", 32, -1},        {"I64", 64, -1},
    {"U64", 64, -1},        {"F64", 64, -1},
    {"F8_E5M2", 8, -1},     {"F8_E8M0", 8, -1},
    {"F4", 4, -1},          {"F6_E2M3", 6, -1},
    {"F6_E3M2", 6, -1},     {"C64", 64, -1},
};

bool tensor_name_is_valid(const char *name, size_t n) {
    if (n == 0 || n > TENSOR_NAME_MAX)
        return false;
    for (size_t i = 0; i < n; i++)
        if (name[i] < 0x20 || name[i] > 0x7e)
            return false;
    return true;
}

const char *tensor_name_keep(const struct json_reader *json, char *names, size_t *used) {
    char *name = names + *used;

    json_unescape(json, name);
    if (!tensor_name_is_valid(name, json->string_bytes))
        return NULL;
    name[json->string_bytes] = '\0';
    *used += json->string_bytes + 1;
    return name;
}

const char *safetensors_shape(const uint64_t *dims, int n_dims, char *out, size_t n_out) {
    size_t used = 0;

    out[0] = '\0';
    for (int i = 0; i < n_dims && used < n_out; i++)
        used += (size_t)snprintf(out + used, n_out - used, "%s%" PRIu64, i ? ", " : "[", dims[i]);
    if (used < n_out)
        snprintf(out + used, n_out - used, "%s", n_dims ? "]" : "[]");
    return out;
}

/* The header is not what the format wants, at the current token; `name` is the tensor it is about, or NULL. */
static int refuse(struct parser *p, const char *name, const char *why) {
    json_fail(&p->json, why);
    return report_error(p->report, -EINVAL, "%s: %s%sheader byte %zu: %s", p->path, name ? name : "", name ? ": " : "",
                        p->json.error_at + 8, p->json.error);
}

static int parse_metadata(struct parser *p) {
    size_t names_used = p->names_used;
    const char *keys[METADATA_MAX];
    int n_keys = 0;

    if (json_next(&p->json) != JSON_OBJECT)
        return refuse(p, "__metadata__", "must be an object");
    while (json_next(&p->json) == JSON_KEY) {
        const char *key = tensor_name_keep(&p->json, p->table.names, &p->names_used);

        if (!key)
            return refuse(p, "__metadata__", "a key is empty, too long or not printable");
        for (int i = 0; i < n_keys; i++)
            if (strcmp(keys[i], key) == 0)
                return refuse(p, "__metadata__", "duplicate key");
        if (n_keys == METADATA_MAX)
            return refuse(p, "__metadata__", "too many keys");
        keys[n_keys++] = key;
        if (json_next(&p->json) != JSON_STRING)
            return refuse(p, "__metadata__", "must map strings to strings");
    }
    if (p->json.kind != JSON_OBJECT_END)
        return refuse(p, "__metadata__", "broken object");
    p->names_used = names_used;
    return 0;
}

static int parse_dtype(struct parser *p, struct safetensors_tensor *t, int *ret_bits) {
    if (json_next(&p->json) == JSON_STRING)
        for (size_t i = 0; i < ARRAY_LEN(dtype_codes); i++)
            if (json_is(&p->json, dtype_codes[i].name)) {
                t->dtype_name = dtype_codes[i].name;
                t->dtype = dtype_codes[i].dtype;
                *ret_bits = dtype_codes[i].bits;
                return 0;
            }
    return refuse(p, t->name, "dtype is none of the format's types");
}

static int parse_shape(struct parser *p, struct safetensors_tensor *t) {
    if (json_next(&p->json) != JSON_ARRAY)
        return refuse(p, t->name, "shape must be an array of sizes");
    while (json_next(&p->json) == JSON_NUMBER) {
        if (t->n_dims == SAFETENSORS_DIMS_MAX)
            return refuse(p, t->name, "shape has too many dimensions");
        if (!json_u64(&p->json, INT64_MAX, &t->dims[t->n_dims]))
            return refuse(p, t->name, "shape must be an array of sizes");
        t->n_dims++;
    }
    return p->json.kind == JSON_ARRAY_END ? 0 : refuse(p, t->name, "shape must be an array of sizes");
}

static int parse_offsets(struct parser *p, struct safetensors_tensor *t, uint64_t offsets[2]) {
    if (json_next(&p->json) == JSON_ARRAY)
        for (int i = 0; i < 2; i++)
            if (json_next(&p->json) != JSON_NUMBER || !json_u64(&p->json, INT64_MAX, &offsets[i]))
                return refuse(p, t->name, "data_offsets must be two byte offsets");
    if (json_next(&p->json) != JSON_ARRAY_END)
        return refuse(p, t->name, "data_offsets must be two byte offsets");
    return 0;
}

/* Offsets into the data against the file's size and the shape's. */
static int check_range(struct parser *p, struct safetensors_tensor *t, const uint64_t offsets[2], int bits) {
    uint64_t n = (uint64_t)bits, data_bytes = p->file_bytes - p->data_offset;
    char shape[200];

    if (offsets[0] > offsets[1])
        return report_error(p->report, -EINVAL,
                            "%s: %s: data_offsets end at %" PRIu64 ", before their begin at %" PRIu64, p->path, t->name,
                            offsets[1], offsets[0]);
    if (offsets[1] > data_bytes)
        return report_error(p->report, -EINVAL,
                            "%s: %s: data ends at byte %" PRIu64 " of the data, but the file has only %" PRIu64
                            " bytes of data: truncated?",
                            p->path, t->name, offsets[1], data_bytes);
    for (int i = 0; i < t->n_dims; i++)
        if (!checked_mul(n, t->dims[i], &n))
            return report_error(p->report, -EINVAL, "%s: %s: shape %s overflows", p->path, t->name,
                                safetensors_shape(t->dims, t->n_dims, shape, sizeof shape));
    if (n % 8 != 0 || n / 8 != offsets[1] - offsets[0])
        return report_error(p->report, -EINVAL, "%s: %s: data_offsets span %" PRIu64 " bytes, but %s %s needs %" PRIu64,
                            p->path, t->name, offsets[1] - offsets[0], t->dtype_name,
                            safetensors_shape(t->dims, t->n_dims, shape, sizeof shape), n / 8);
    t->offset = p->data_offset + offsets[0];
    t->bytes = offsets[1] - offsets[0];
    return 0;
}

static int parse_tensor(struct parser *p, const char *name, struct safetensors_tensor *ret_tensor) {
    static const char *const fields[] = {"dtype", "shape", "data_offsets"};
    struct safetensors_tensor t = {.name = name};
    uint64_t seen = 0, offsets[2] = {0};
    int r, bits = 0;

    if (json_next(&p->json) != JSON_OBJECT)
        return refuse(p, name, "must be an object");
    while (json_next(&p->json) == JSON_KEY) {
        switch (json_field(&p->json, fields, ARRAY_LEN(fields), &seen)) {
        case 0:
            r = parse_dtype(p, &t, &bits);
            break;
        case 1:
            r = parse_shape(p, &t);
            break;
        case 2:
            r = parse_offsets(p, &t, offsets);
            break;
        default:
            return refuse(p, name, "unknown field");
        }
        if (r != 0)
            return r;
    }
    if (p->json.kind != JSON_OBJECT_END)
        return refuse(p, name, "broken object");
    if (seen != 7)
        return refuse(p, name, "dtype, shape or data_offsets is missing");
    r = check_range(p, &t, offsets, bits);
    if (r == 0)
        *ret_tensor = t;
    return r;
}

static int add_tensor(struct parser *p, const char *name) {
    struct safetensors *table = &p->table;
    int r;

    if (table->n_tensors == SAFETENSORS_TENSORS_MAX)
        return refuse(p, name, "too many tensors");
    if (table->n_tensors == p->n_tensors_max) {
        size_t n_max = p->n_tensors_max ? 2 * p->n_tensors_max : 64;
        struct safetensors_tensor *grown = realloc(table->tensors, n_max * sizeof *grown);

        if (!grown)
            return report_error(p->report, -ENOMEM, "%s: out of memory for the header", p->path);
        table->tensors = grown;
        p->n_tensors_max = n_max;
    }
    r = parse_tensor(p, name, &table->tensors[table->n_tensors]);
    if (r == 0)
        table->n_tensors++;
    return r;
}

static int parse_header(struct parser *p) {
    bool has_metadata = false;
    int r;

    if (json_next(&p->json) != JSON_OBJECT)
        return refuse(p, NULL, "the header must be an object");
    while (json_next(&p->json) == JSON_KEY) {
        const char *name = tensor_name_keep(&p->json, p->table.names, &p->names_used);

        if (!name)
            return refuse(p, NULL, "a tensor name is empty, too long or not printable");
        if (strcmp(name, "__metadata__") != 0) {
            r = add_tensor(p, name);
        } else if (has_metadata) {
            return refuse(p, name, "duplicate key");
        } else {
            has_metadata = true;
            r = parse_metadata(p);
        }
        if (r != 0)
            return r;
    }
    if (p->json.kind != JSON_OBJECT_END || json_next(&p->json) != JSON_END)
        return refuse(p, NULL, "broken header");
    return 0;
}

static int by_name(const void *a, const void *b) {
    return strcmp(((const struct safetensors_tensor *)a)->name, ((const struct safetensors_tensor *)b)->name);
}

static int by_offset(const void *a, const void *b) {
    const struct safetensors_tensor *x = *(const struct safetensors_tensor *const *)a;
    const struct safetensors_tensor *y = *(const struct safetensors_tensor *const *)b;

    if (x->offset != y->offset)
        return x->offset < y->offset ? -1 : 1;
    return (x->bytes > y->bytes) - (x->bytes < y->bytes); /* empty tensors before the one that begins there */
}

static int check_names(struct parser *p) {
    struct safetensors *table = &p->table;

    if (table->n_tensors)
        qsort(table->tensors, table->n_tensors, sizeof *table->tensors, by_name);
    for (size_t i = 1; i < table->n_tensors; i++)
        if (strcmp(table->tensors[i - 1].name, table->tensors[i].name) == 0)
            return report_error(p->report, -EINVAL, "%s: %s: duplicate key in the header", p->path,
                                table->tensors[i].name);
    return 0;
}

/* In the order of the data each tensor begins where the one before ends, and the last ends with the file. */
static int check_layout(struct parser *p) {
    struct safetensors *table = &p->table;
    const struct safetensors_tensor **order = calloc(table->n_tensors + 1, sizeof *order);
    uint64_t end = p->data_offset;
    int r = 0;

    if (!order)
        return report_error(p->report, -ENOMEM, "%s: out of memory for the header", p->path);
    for (size_t i = 0; i < table->n_tensors; i++)
        order[i] = &table->tensors[i];
    qsort(order, table->n_tensors, sizeof *order, by_offset);
    for (size_t i = 0; i < table->n_tensors && r == 0; i++) {
        if (order[i]->offset < end)
            r = report_error(p->report, -EINVAL, "%s: %s: data overlaps that of %s", p->path, order[i]->name,
                             order[i - 1]->name);
        else if (order[i]->offset > end)
            r = report_error(p->report, -EINVAL, "%s: %s: %" PRIu64 " bytes before its data belong to no tensor",
                             p->path, order[i]->name, order[i]->offset - end);
        end = order[i]->offset + order[i]->bytes;
    }
    if (r == 0 && end != p->file_bytes)
        r = report_error(p->report, -EINVAL, "%s: the last %" PRIu64 " bytes of the file belong to no tensor", p->path,
                         p->file_bytes - end);
    free(order);
    return r;
}

int safetensors_parse(const char *path, const uint8_t *data, size_t n, struct safetensors *ret_table,
                      struct report *report) {
    struct parser p = {.path = report_path(path), .report = report, .file_bytes = n};
    uint64_t header_bytes = 0;
    int r;

    if (n < 8)
        return report_error(report, -EINVAL, "%s: %zu bytes are too short for a safetensors file: truncated?", p.path,
                            n);
    for (int i = 0; i < 8; i++)
        header_bytes |= (uint64_t)data[i] << 8 * i;
    if (header_bytes > SAFETENSORS_HEADER_MAX)
        return report_error(report, -EINVAL, "%s: header length %" PRIu64 " is above the limit of %d", p.path,
                            header_bytes, SAFETENSORS_HEADER_MAX);
    if (header_bytes > n - 8)
        return report_error(report, -EINVAL, "%s: header length %" PRIu64 " exceeds the file of %zu bytes: truncated?",
                            p.path, header_bytes, n);
    p.data_offset = 8 + header_bytes;
    p.table.names = malloc((size_t)header_bytes + 1);
    if (!p.table.names)
        return report_error(report, -ENOMEM, "%s: out of memory for the header", p.path);
    json_init(&p.json, (const char *)data + 8, (size_t)header_bytes);
    r = parse_header(&p);
    if (r == 0)
        r = check_names(&p);
    if (r == 0)
        r = check_layout(&p);
    if (r != 0) {
        safetensors_deinit(&p.table);
        return r;
    }
    *ret_table = p.table;
    return 0;
}

void safetensors_deinit(struct safetensors *table) {
    free(table->tensors);
    free(table->names);
    *table = (struct safetensors){0};
}
