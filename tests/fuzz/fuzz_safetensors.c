/* Safetensors files and shard indexes: whatever the bytes are, they are refused with one line or give a table that can
 * be used without further checks. */
#include "safetensors.h"
#include "shard_index.h"
#include <assert.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void fuzz_file(const uint8_t *data, size_t n) {
    struct report report = {""};
    struct safetensors table;
    uint64_t total = 0;
    char shape[300];

    if (safetensors_parse("x", data, n, &table, &report) != 0) {
        assert(report.line[0] && !strchr(report.line, '\n'));
        return;
    }
    for (size_t i = 0; i < table.n_tensors; i++) {
        const struct safetensors_tensor *t = &table.tensors[i];

        assert(tensor_name_is_valid(t->name, strlen(t->name)));
        assert(i == 0 || strcmp(table.tensors[i - 1].name, t->name) < 0);
        assert(t->n_dims >= 0 && t->n_dims <= SAFETENSORS_DIMS_MAX && t->dtype >= -1 && t->dtype < DTYPE_N);
        assert(t->offset >= 8 && t->offset <= n && t->bytes <= n - t->offset);
        safetensors_shape(t->dims, t->n_dims, shape, sizeof shape);
        total += t->bytes;
    }
    assert(total <= n - 8);
    safetensors_deinit(&table);
}

static void fuzz_index(const char *text, size_t n) {
    struct report report = {""};
    struct shard_index index;

    if (shard_index_parse("x", text, n, &index, &report) != 0) {
        assert(report.line[0] && !strchr(report.line, '\n'));
        return;
    }
    assert(index.n_files >= 1 && (size_t)index.n_files <= index.n_entries);
    for (size_t i = 0; i < index.n_entries; i++) {
        const struct shard_entry *entry = &index.entries[i];

        assert(entry->file_idx >= 0 && entry->file_idx < index.n_files);
        assert(strcmp(entry->file, index.files[entry->file_idx]) == 0);
        assert(!strchr(entry->file, '/') && !strstr(entry->file, ".."));
        assert(shard_index_find(&index, entry->tensor) == entry);
    }
    shard_index_deinit(&index);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    fuzz_file(data, n);
    fuzz_index((const char *)data, n);
    return 0;
}
