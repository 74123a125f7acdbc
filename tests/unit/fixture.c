#include "fixture.h"
#include "safetensors.h"
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void fixture_open(struct fixture *f) {
    /* Some tests write a checkpoint hundreds of times: in memory where there is such a folder. */
    *f = (struct fixture){0};
    snprintf(f->folder, sizeof f->folder, "%s/spillway-test-XXXXXX",
             access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
    assert_non_null(mkdtemp(f->folder));
}

void fixture_close(struct fixture *f) {
    DIR *dir = opendir(f->folder);
    struct dirent *entry;

    assert_non_null(dir);
    while ((entry = readdir(dir)))
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
            assert_int_equal(0, remove(fixture_path(f, entry->d_name)));
    closedir(dir);
    assert_int_equal(0, rmdir(f->folder));
    fixture_clear(f);
    free(f->tensors);
    f->tensors = NULL;
}

const char *fixture_path(const struct fixture *f, const char *name) {
    static char paths[4][512];
    static int next;
    char *path = paths[next++ % 4];

    snprintf(path, sizeof paths[0], "%s/%s", f->folder, name);
    return path;
}

void fixture_write(const struct fixture *f, const char *name, const void *data, size_t n) {
    FILE *file = fopen(fixture_path(f, name), "wb");

    assert_non_null(file);
    assert_int_equal(n, fwrite(data, 1, n, file));
    assert_int_equal(0, fclose(file));
}

char *fixture_read(const char *path, size_t *ret_n) {
    FILE *file = fopen(path, "rb");
    char *text;
    long n;

    if (!file)
        fail_msg("%s cannot be opened", path);
    fseek(file, 0, SEEK_END);
    n = ftell(file);
    rewind(file);
    text = malloc((size_t)n + 1);
    assert_non_null(text);
    assert_int_equal(n, fread(text, 1, (size_t)n, file));
    fclose(file);
    text[n] = '\0';
    if (ret_n)
        *ret_n = (size_t)n;
    return text;
}

static struct fixture_tensor *append(struct fixture *f) {
    if (f->n_tensors == f->n_tensors_max) {
        f->n_tensors_max = f->n_tensors_max ? 2 * f->n_tensors_max : 64;
        f->tensors = realloc(f->tensors, (size_t)f->n_tensors_max * sizeof *f->tensors);
        assert_non_null(f->tensors);
    }
    f->tensors[f->n_tensors] = (struct fixture_tensor){0};
    return &f->tensors[f->n_tensors++];
}

void fixture_load(struct fixture *f, const char *path) {
    struct report report = {""};
    struct safetensors table;
    size_t n;
    char *data = fixture_read(path, &n);

    if (safetensors_parse(path, (const uint8_t *)data, n, &table, &report) != 0)
        fail_msg("%s", report.line);
    for (size_t i = 0; i < table.n_tensors; i++) {
        const struct safetensors_tensor *from = &table.tensors[i];
        struct fixture_tensor *t = append(f);

        snprintf(t->name, sizeof t->name, "%s", from->name);
        snprintf(t->dtype, sizeof t->dtype, "%s", from->dtype_name);
        t->n_dims = from->n_dims;
        memcpy(t->dims, from->dims, sizeof t->dims);
        t->bytes = from->bytes;
        t->data = malloc(from->bytes + 1);
        assert_non_null(t->data);
        memcpy(t->data, data + from->offset, from->bytes);
    }
    safetensors_deinit(&table);
    free(data);
}

void fixture_load_folder(struct fixture *f, const char *folder) {
    struct dirent *entry;
    DIR *dir = opendir(folder);

    if (!dir)
        fail_msg("%s cannot be opened", folder);
    while ((entry = readdir(dir))) {
        size_t n = strlen(entry->d_name);
        char path[1024];

        if (strncmp(entry->d_name, "model", 5) != 0 || n < 12 || strcmp(entry->d_name + n - 12, ".safetensors") != 0)
            continue;
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        fixture_load(f, path);
    }
    closedir(dir);
}

/* Element i of a made-up tensor: small, different for neighbours, exact in every type. */
static void put(uint8_t *at, const char *dtype, size_t i) {
    float value = (float)((int)(i * 7 % 31) - 15) / 16;
    uint32_t f32 = f32_bits(value);
    uint16_t half = strcmp(dtype, "F16") == 0 ? f16_from_f32(value) : bf16_from_f32(value);

    if (strcmp(dtype, "F32") == 0)
        memcpy(at, &f32, 4);
    else if (strcmp(dtype, "F8_E4M3") == 0)
        *at = e4m3_from_f32(value);
    else
        memcpy(at, &half, 2);
}

struct fixture_tensor *fixture_add(struct fixture *f, const char *dtype, const uint64_t *dims, const char *name) {
    struct fixture_tensor *t = append(f);
    size_t n = 1, size = strcmp(dtype, "F32") == 0 ? 4 : strcmp(dtype, "F8_E4M3") == 0 ? 1 : 2;

    snprintf(t->name, sizeof t->name, "%s", name);
    snprintf(t->dtype, sizeof t->dtype, "%s", dtype);
    for (; dims[t->n_dims]; t->n_dims++)
        n *= t->dims[t->n_dims] = dims[t->n_dims];
    t->bytes = n * size;
    t->data = malloc(t->bytes + 1);
    assert_non_null(t->data);
    for (size_t i = 0; i < n; i++)
        put(t->data + i * size, dtype, i);
    return t;
}

struct fixture_tensor *fixture_find(struct fixture *f, const char *name) {
    for (int i = 0; i < f->n_tensors; i++)
        if (strcmp(f->tensors[i].name, name) == 0)
            return &f->tensors[i];
    fail_msg("no tensor %s", name);
    return NULL;
}

void fixture_drop(struct fixture *f, const char *name) {
    struct fixture_tensor *t = fixture_find(f, name);

    free(t->data);
    *t = f->tensors[--f->n_tensors];
}

void fixture_clear(struct fixture *f) {
    for (int i = 0; i < f->n_tensors; i++)
        free(f->tensors[i].data);
    f->n_tensors = 0;
}

void fixture_save_part(const struct fixture *f, const char *file, int begin, int n, int pad) {
    FILE *out = fopen(fixture_path(f, file), "wb");
    uint64_t offset = 0, header_bytes;
    size_t n_header;
    char *header;
    FILE *h = open_memstream(&header, &n_header);

    assert_non_null(out);
    assert_non_null(h);
    fprintf(h, "{\"__metadata__\":{\"format\":\"pt\"}");
    for (int i = begin; i < begin + n; i++) {
        const struct fixture_tensor *t = &f->tensors[i];

        fprintf(h, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[", t->name, t->dtype);
        for (int d = 0; d < t->n_dims; d++)
            fprintf(h, "%s%llu", d ? "," : "", (unsigned long long)t->dims[d]);
        fprintf(h, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)offset,
                (unsigned long long)(offset + t->bytes));
        offset += t->bytes;
    }
    fprintf(h, "}");
    while (ftell(h) % 8 != 0)
        fputc(' ', h);
    fprintf(h, "%*s", pad, "");
    fclose(h);
    header_bytes = n_header;
    for (int i = 0; i < 8; i++)
        fputc((int)(header_bytes >> 8 * i & 255), out);
    fwrite(header, 1, n_header, out);
    free(header);
    for (int i = begin; i < begin + n; i++)
        assert_int_equal(f->tensors[i].bytes, fwrite(f->tensors[i].data, 1, f->tensors[i].bytes, out));
    assert_int_equal(0, fclose(out));
}

void fixture_save(const struct fixture *f) {
    fixture_save_part(f, "model.safetensors", 0, f->n_tensors, 0);
}

void assert_report(const struct report *report, ...) {
    const char *part;
    va_list args;

    assert_null(strchr(report->line, '\n'));
    va_start(args, report);
    while ((part = va_arg(args, const char *)))
        if (!strstr(report->line, part)) {
            va_end(args);
            fail_msg("the report \"%s\" lacks \"%s\"", report->line, part);
        }
    va_end(args);
}
