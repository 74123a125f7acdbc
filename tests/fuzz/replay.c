/* A main for fuzzers built without libFuzzer: runs every file of the given folder once. No file is a failure. */
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static int replay_file(const char *path) {
    FILE *f = fopen(path, "rb");
    uint8_t *data;
    long n;

    if (!f || fseek(f, 0, SEEK_END) != 0 || (n = ftell(f)) < 0) {
        fprintf(stderr, "%s: cannot be read\n", path);
        return 1;
    }
    rewind(f);
    data = malloc(n ? (size_t)n : 1); /* exactly n bytes, so that an over-read is seen */
    if (!data || fread(data, 1, (size_t)n, f) != (size_t)n)
        abort();
    fclose(f);
    LLVMFuzzerTestOneInput(data, (size_t)n);
    free(data);
    return 0;
}

int main(int argc, char **argv) {
    struct dirent *entry;
    int n_files = 0;
    DIR *dir;

    if (argc != 2 || !(dir = opendir(argv[1]))) {
        fprintf(stderr, "usage: %s CORPUS_FOLDER\n", argv[0]);
        return 1;
    }
    while ((entry = readdir(dir))) {
        char path[4096];

        if (entry->d_name[0] == '.')
            continue;
        snprintf(path, sizeof path, "%s/%s", argv[1], entry->d_name);
        if (replay_file(path) != 0)
            return 1;
        n_files++;
    }
    closedir(dir);
    printf("%d inputs replayed\n", n_files);
    return n_files == 0;
}
