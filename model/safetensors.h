/* safetensors: the table of tensors of one file, from its header. Works on a buffer; knows no folder, no model. What it
 * returns is checked: unique printable names, known types, sizes that fit shapes, and data ranges that lie in the file,
 * do not overlap and leave no byte over. Format: u64 little-endian header length, JSON header, data. */
#pragma once
#include "base.h"
#include "dtype.h"
#include "report.h"

struct json_reader;

enum {
    SAFETENSORS_HEADER_MAX = 100000000, /* the format's own limit */
    SAFETENSORS_TENSORS_MAX = 1 << 20,
    SAFETENSORS_DIMS_MAX = 8,
    TENSOR_NAME_MAX = 200, /* the longest in use is below 90 */
};

struct safetensors_tensor {
    const char *name;
    const char *dtype_name; /* as in the file */
    int dtype;              /* enum dtype, or -1: a type no weight may have */
    int n_dims;
    uint64_t dims[SAFETENSORS_DIMS_MAX];
    uint64_t offset, bytes; /* from the start of the file */
};

struct safetensors {
    struct safetensors_tensor *tensors; /* [n_tensors], sorted by name */
    size_t n_tensors;
    char *names; /* what the names point into */
};

/* `data` is the whole file. -EINVAL: the report names path, tensor and reason. */
int safetensors_parse(const char *path, const uint8_t *data, size_t n, struct safetensors *ret_table,
                      struct report *report);
void safetensors_deinit(struct safetensors *table);

/* "[2, 3]" for reports. */
const char *safetensors_shape(const uint64_t *dims, int n_dims, char *out, size_t n_out);
/* Names that a report can show: 1..TENSOR_NAME_MAX printable ASCII characters. */
bool tensor_name_is_valid(const char *name, size_t n);
/* Keeps the reader's current KEY or STRING, unescaped and with a zero behind it, at names + *used, which moves on. NULL: no
 * valid name. Each has its two quotes in the text, so all names of a text fit in as many bytes as the text has. */
const char *tensor_name_keep(const struct json_reader *json, char *names, size_t *used);
