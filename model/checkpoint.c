#include "checkpoint.h"
#include "dummy.h"
#include "shard_index.h"
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define INDEX_NAME "model.safetensors.index.json"
#define SINGLE_NAME "model.safetensors"

static char *join(const char *folder, const char *name) {
    char *path;

    return asprintf(&path, "%s/%s", folder, name) < 0 ? NULL : path;
}

/* Maps a regular file of at least one byte. Negative errno with a report. */
static int map_file(const char *path, const uint8_t **ret_data, size_t *ret_bytes, struct report *report) {
    const char *name = report_path(path);
    struct stat st;
    void *map;
    int r = 0, fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a FIFO must not block before it is refused */

    if (fd < 0)
        return report_error(report, -errno, "%s: %s", name, strerror(errno));
    if (fstat(fd, &st) != 0) {
        r = report_error(report, -errno, "%s: %s", name, strerror(errno));
    } else if (!S_ISREG(st.st_mode)) {
        r = report_error(report, -EINVAL, "%s: not a regular file", name);
    } else if (st.st_size == 0) {
        r = report_error(report, -EINVAL, "%s: the file is empty: truncated?", name);
    } else {
        map = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (map == MAP_FAILED) {
            r = report_error(report, -errno, "%s: cannot be mapped: %s", name, strerror(errno));
        } else {
            *ret_data = map;
            *ret_bytes = (size_t)st.st_size;
        }
    }
    close(fd);
    return r;
}

static void unmap_file(const uint8_t *data, size_t bytes) {
    if (data)
        munmap((void *)(uintptr_t)data, bytes);
}

/* Takes the path over. */
static int open_file(struct checkpoint *c, char *path, struct report *report) {
    struct checkpoint_file *file = &c->files[c->n_files++];
    int r;

    if (!path)
        return report_error(report, -ENOMEM, "%s: out of memory", c->name);
    file->path = path;
    file->name = report_path(path);
    r = map_file(path, &file->data, &file->bytes, report);
    if (r == 0)
        r = safetensors_parse(path, file->data, file->bytes, &file->table, report);
    return r;
}

static int by_name(const void *a, const void *b) {
    return strcmp(((const struct checkpoint_tensor *)a)->entry->name,
                  ((const struct checkpoint_tensor *)b)->entry->name);
}

/* One table over all files; a name in two of them is refused. */
static int merge(struct checkpoint *c, struct report *report) {
    size_t n = 0;

    for (int i = 0; i < c->n_files; i++)
        n += c->files[i].table.n_tensors;
    c->tensors = calloc(n + 1, sizeof *c->tensors);
    if (!c->tensors)
        return report_error(report, -ENOMEM, "%s: out of memory", c->name);
    for (int i = 0; i < c->n_files; i++)
        for (size_t k = 0; k < c->files[i].table.n_tensors; k++)
            c->tensors[c->n_tensors++] =
                (struct checkpoint_tensor){.entry = &c->files[i].table.tensors[k], .file = &c->files[i]};
    qsort(c->tensors, c->n_tensors, sizeof *c->tensors, by_name);
    for (size_t i = 1; i < c->n_tensors; i++)
        if (by_name(&c->tensors[i - 1], &c->tensors[i]) == 0)
            return report_error(report, -EINVAL, "%s: %s: also in %s", c->tensors[i].file->name,
                                c->tensors[i].entry->name, c->tensors[i - 1].file->name);
    return 0;
}

/* Every tensor is where the index says, and the index misses none. Files are opened in the index's order. */
static int check_index(const struct checkpoint *c, const struct shard_index *index, struct report *report) {
    for (size_t i = 0; i < index->n_entries; i++) {
        const struct shard_entry *entry = &index->entries[i];
        const struct checkpoint_tensor *tensor = checkpoint_find(c, entry->tensor);

        if (!tensor || tensor->file != &c->files[entry->file_idx])
            return report_error(report, -EINVAL, "%s: %s: not in %s, where %s says it is",
                                c->files[entry->file_idx].name, entry->tensor, entry->file, INDEX_NAME);
    }
    for (size_t i = 0; i < c->n_tensors; i++)
        if (!shard_index_find(index, c->tensors[i].entry->name))
            return report_error(report, -EINVAL, "%s: %s: not in %s", c->tensors[i].file->name,
                                c->tensors[i].entry->name, INDEX_NAME);
    return 0;
}

/* A file that the index names. */
static int open_named(struct checkpoint *c, const char *file, struct report *report) {
    int r = open_file(c, join(c->folder, file), report);

    if (r == -ENOENT)
        return report_error(report, r, "%s/%s: missing, but %s names it", c->name, file, INDEX_NAME);
    return r;
}

static int open_sharded(struct checkpoint *c, const char *index_path, struct report *report) {
    struct shard_index index = {0};
    const uint8_t *text = NULL;
    size_t n = 0;
    int r = map_file(index_path, &text, &n, report);

    if (r == 0)
        r = shard_index_parse(index_path, (const char *)text, n, &index, report);
    if (r == 0) {
        c->files = calloc((size_t)index.n_files, sizeof *c->files);
        if (!c->files)
            r = report_error(report, -ENOMEM, "%s: out of memory", c->name);
    }
    for (int i = 0; r == 0 && i < index.n_files; i++)
        r = open_named(c, index.files[i], report);
    if (r == 0)
        r = merge(c, report);
    if (r == 0)
        r = check_index(c, &index, report);
    shard_index_deinit(&index);
    unmap_file(text, n);
    return r;
}

static int open_single(struct checkpoint *c, const char *path, struct report *report) {
    char *copy = strdup(path);
    int r;

    c->files = calloc(1, sizeof *c->files);
    if (!copy || !c->files) {
        free(copy);
        return report_error(report, -ENOMEM, "%s: out of memory", c->name);
    }
    r = open_file(c, copy, report);
    return r == 0 ? merge(c, report) : r;
}

static int open_folder(struct checkpoint *c, struct report *report) {
    char *index_path = join(c->folder, INDEX_NAME), *single_path = join(c->folder, SINGLE_NAME);
    bool has_index, has_single;
    int r;

    if (!index_path || !single_path) {
        r = report_error(report, -ENOMEM, "%s: out of memory", c->name);
    } else {
        has_index = access(index_path, F_OK) == 0;
        has_single = access(single_path, F_OK) == 0;
        if (has_index)
            r = open_sharded(c, index_path, report);
        else if (has_single)
            r = open_single(c, single_path, report);
        else
            r = report_error(report, -ENOENT, "%s: holds neither %s nor %s", c->name, SINGLE_NAME, INDEX_NAME);
        /* One of the two is a leftover, and which one cannot be known. */
        if (r == 0 && has_index && has_single) {
            bool is_used = false;

            for (int i = 0; i < c->n_files; i++)
                is_used |= strcmp(c->files[i].path, single_path) == 0;
            if (!is_used)
                r = report_error(report, -EINVAL, "%s: there is also %s, which does not name it: remove one of the two",
                                 report_path(single_path), INDEX_NAME);
        }
    }
    free(index_path);
    free(single_path);
    return r;
}

int checkpoint_open(const char *folder, struct checkpoint **ret_checkpoint, struct report *report) {
    struct checkpoint *c = calloc(1, sizeof *c);
    int r;

    if (c)
        c->folder = strdup(folder);
    if (!c || !c->folder) {
        r = report_error(report, -ENOMEM, "%s: out of memory", report_path(folder));
    } else {
        c->name = report_path(c->folder);
        r = open_folder(c, report);
        if (r == 0 && c->n_files == 1)
            c->name = c->files[0].name;
    }
    if (r != 0) {
        checkpoint_close(c);
        return r;
    }
    *ret_checkpoint = c;
    return 0;
}

int checkpoint_dummy(const struct dummy_shape *shape, uint64_t seed, struct checkpoint **ret_checkpoint,
                     struct report *report) {
    struct checkpoint *c = calloc(1, sizeof *c);

    if (c)
        c->folder = strdup("dummy weights");
    if (!c || !c->folder || dummy_pool_new(shape, seed, &c->dummy) != 0) {
        checkpoint_close(c);
        return report_error(report, -ENOMEM, "dummy weights: out of memory");
    }
    c->name = c->folder;
    *ret_checkpoint = c;
    return 0;
}

void checkpoint_close(struct checkpoint *c) {
    if (!c)
        return;
    for (size_t i = 0; i < c->n_tensors; i++)
        free(c->tensors[i].copy);
    for (int i = 0; i < c->n_files; i++) {
        safetensors_deinit(&c->files[i].table);
        unmap_file(c->files[i].data, c->files[i].bytes);
        free(c->files[i].path);
    }
    dummy_pool_free(c->dummy);
    free(c->tensors);
    free(c->files);
    free(c->folder);
    free(c);
}

struct checkpoint_tensor *checkpoint_find(const struct checkpoint *c, const char *name) {
    struct safetensors_tensor entry = {.name = name};
    struct checkpoint_tensor key = {.entry = &entry};

    return c->n_tensors ? bsearch(&key, c->tensors, c->n_tensors, sizeof key, by_name) : NULL;
}

const void *checkpoint_data(struct checkpoint_tensor *tensor) {
    const uint8_t *data = tensor->file->data + tensor->entry->offset;

    /* The format does not promise alignment: a header of odd length shifts all data. Files of the usual writers are
     * aligned, so a copy is the exception. */
    if (tensor->entry->dtype < 0 || (uintptr_t)data % dtype_bytes((enum dtype)tensor->entry->dtype) == 0)
        return data;
    if (!tensor->copy) {
        tensor->copy = malloc(tensor->entry->bytes);
        if (tensor->copy)
            memcpy(tensor->copy, data, tensor->entry->bytes);
    }
    return tensor->copy;
}
