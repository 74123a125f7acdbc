#include "shard_index.h"
#include "json.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct parser {
    const char *path;
    struct report *report;
    struct json_reader json;
    struct shard_index index;
    size_t n_entries_max, names_used;
};

static int refuse(struct parser *p, const char *tensor, const char *why) {
    json_fail(&p->json, why);
    return report_error(p->report, -EINVAL, "%s: %s%sbyte %zu: %s", p->path, tensor ? tensor : "", tensor ? ": " : "",
                        p->json.error_at, p->json.error);
}

static bool file_name_is_valid(const char *name) {
    static const char suffix[] = ".safetensors";
    size_t n = strlen(name);

    return !strchr(name, '/') && !strstr(name, "..") && n >= sizeof suffix &&
           strcmp(name + n - (sizeof suffix - 1), suffix) == 0;
}

static int add_entry(struct parser *p) {
    struct shard_index *index = &p->index;
    struct shard_entry entry = {.tensor = tensor_name_keep(&p->json, p->index.names, &p->names_used)};

    if (!entry.tensor)
        return refuse(p, NULL, "a tensor name is empty, too long or not printable");
    if (index->n_entries == SAFETENSORS_TENSORS_MAX)
        return refuse(p, entry.tensor, "too many tensors");
    if (json_next(&p->json) != JSON_STRING)
        return refuse(p, entry.tensor, "must name a file");
    entry.file = tensor_name_keep(&p->json, p->index.names, &p->names_used);
    if (!entry.file || !file_name_is_valid(entry.file))
        return report_error(p->report, -EINVAL,
                            "%s: %s: file name \"%s\" is refused: it must end in .safetensors and have no / and no ..",
                            p->path, entry.tensor, entry.file ? entry.file : "(not printable)");
    if (index->n_entries == p->n_entries_max) {
        size_t n_max = p->n_entries_max ? 2 * p->n_entries_max : 64;
        struct shard_entry *grown = realloc(index->entries, n_max * sizeof *grown);

        if (!grown)
            return report_error(p->report, -ENOMEM, "%s: out of memory", p->path);
        index->entries = grown;
        p->n_entries_max = n_max;
    }
    index->entries[index->n_entries++] = entry;
    return 0;
}

static int parse_map(struct parser *p) {
    int r;

    if (json_next(&p->json) != JSON_OBJECT)
        return refuse(p, NULL, "weight_map must be an object");
    while (json_next(&p->json) == JSON_KEY) {
        r = add_entry(p);
        if (r != 0)
            return r;
    }
    return p->json.kind == JSON_OBJECT_END ? 0 : refuse(p, NULL, "broken weight_map");
}

static int parse_index(struct parser *p) {
    static const char *const fields[] = {"weight_map", "metadata"};
    uint64_t seen = 0;
    int r;

    if (json_next(&p->json) != JSON_OBJECT)
        return refuse(p, NULL, "the index must be an object");
    while (json_next(&p->json) == JSON_KEY) {
        int field = json_field(&p->json, fields, ARRAY_LEN(fields), &seen);

        if (field == 0) {
            r = parse_map(p);
            if (r != 0)
                return r;
        } else if (json_skip(&p->json) != 0) { /* total_size and the like: the files speak for themselves */
            break;
        }
    }
    if (p->json.kind != JSON_OBJECT_END || json_next(&p->json) != JSON_END)
        return refuse(p, NULL, "broken index");
    if (p->index.n_entries == 0)
        return refuse(p, NULL, "weight_map is missing or empty");
    return 0;
}

static int by_file(const void *a, const void *b) {
    return strcmp(((const struct shard_entry *)a)->file, ((const struct shard_entry *)b)->file);
}

static int by_tensor(const void *a, const void *b) {
    return strcmp(((const struct shard_entry *)a)->tensor, ((const struct shard_entry *)b)->tensor);
}

/* Numbers the files, then sorts for look-ups. */
static int sort_entries(struct parser *p) {
    struct shard_index *index = &p->index;
    int n_files = 1;

    qsort(index->entries, index->n_entries, sizeof *index->entries, by_file);
    for (size_t i = 1; i < index->n_entries; i++)
        n_files += strcmp(index->entries[i - 1].file, index->entries[i].file) != 0;
    if (n_files > SHARDS_MAX)
        return report_error(p->report, -EINVAL, "%s: names %d files, more than the supported %d", p->path, n_files,
                            SHARDS_MAX);
    index->files = calloc((size_t)n_files, sizeof *index->files);
    if (!index->files)
        return report_error(p->report, -ENOMEM, "%s: out of memory", p->path);
    for (size_t i = 0; i < index->n_entries; i++) {
        if (i == 0 || strcmp(index->entries[i - 1].file, index->entries[i].file) != 0)
            index->files[index->n_files++] = index->entries[i].file;
        index->entries[i].file_idx = index->n_files - 1;
    }
    qsort(index->entries, index->n_entries, sizeof *index->entries, by_tensor);
    for (size_t i = 1; i < index->n_entries; i++)
        if (strcmp(index->entries[i - 1].tensor, index->entries[i].tensor) == 0)
            return report_error(p->report, -EINVAL, "%s: %s: duplicate key in weight_map", p->path,
                                index->entries[i].tensor);
    return 0;
}

int shard_index_parse(const char *path, const char *text, size_t n, struct shard_index *ret_index,
                      struct report *report) {
    struct parser p = {.path = report_path(path), .report = report};
    int r;

    if (n > SHARD_INDEX_BYTES_MAX)
        return report_error(report, -EINVAL, "%s: %zu bytes are above the limit of %d", p.path, n,
                            SHARD_INDEX_BYTES_MAX);
    p.index.names = malloc(n + 1);
    if (!p.index.names)
        return report_error(report, -ENOMEM, "%s: out of memory", p.path);
    json_init(&p.json, text, n);
    r = parse_index(&p);
    if (r == 0)
        r = sort_entries(&p);
    if (r != 0) {
        shard_index_deinit(&p.index);
        return r;
    }
    *ret_index = p.index;
    return 0;
}

void shard_index_deinit(struct shard_index *index) {
    free(index->entries);
    free(index->files);
    free(index->names);
    *index = (struct shard_index){0};
}

const struct shard_entry *shard_index_find(const struct shard_index *index, const char *tensor) {
    struct shard_entry key = {.tensor = tensor};

    return bsearch(&key, index->entries, index->n_entries, sizeof key, by_tensor);
}
