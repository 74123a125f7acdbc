/* shard_index: model.safetensors.index.json: which tensor is in which file of the folder. Works on a buffer. What it
 * returns is checked: unique names, and file names that cannot leave the folder. */
#pragma once
#include "safetensors.h"

enum { SHARD_INDEX_BYTES_MAX = 128 << 20, SHARDS_MAX = 4096 };

struct shard_entry {
    const char *tensor, *file;
    int file_idx;
};

struct shard_index {
    struct shard_entry *entries; /* [n_entries], sorted by tensor */
    size_t n_entries;
    const char **files; /* [n_files], sorted */
    int n_files;
    char *names;
};

int shard_index_parse(const char *path, const char *text, size_t n, struct shard_index *ret_index,
                      struct report *report);
void shard_index_deinit(struct shard_index *index);
const struct shard_entry *shard_index_find(const struct shard_index *index, const char *tensor);
