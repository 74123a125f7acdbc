#include "fingerprint.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include "text.h"

enum { READ_BYTES = 1 << 20, EPOCH = 1 /* counts up when a change of our own code changes results */ };

static int add_file(struct kv_digest *digest, const char *folder, const char *name, char *buffer,
                    struct report *report) {
    char path[4096];
    ssize_t n = 0;
    int fd;

    snprintf(path, sizeof path, "%s/%s", folder, name);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return report_error(report, -errno, "%s: %s", report_path(path), strerror(errno));
    while ((n = read(fd, buffer, READ_BYTES)) > 0 || (n < 0 && errno == EINTR))
        if (n > 0)
            kv_digest_add(digest, buffer, (size_t)n);
    kv_digest_end_part(digest);
    if (n < 0)
        n = report_error(report, -errno, "%s: %s", report_path(path), strerror(errno));
    close(fd);
    return (int)n;
}

static int is_weights(const struct dirent *entry) {
    return span_ends_with(span_of(entry->d_name), ".safetensors");
}

/* In the order of their names: shards are numbered. */
static int add_weights(struct kv_digest *digest, const char *folder, char *buffer, struct report *report) {
    struct dirent **entries;
    int n = scandir(folder, &entries, is_weights, alphasort), r = 0;

    if (n < 0)
        return report_error(report, -errno, "%s: %s", report_path(folder), strerror(errno));
    for (int i = 0; i < n; i++) {
        if (r == 0)
            r = add_file(digest, folder, entries[i]->d_name, buffer, report);
        free(entries[i]);
    }
    free(entries);
    return r;
}

struct reader {
    struct kv_digest *digest;
    char *buffer;
};

static int reader_init(struct reader *reader, const char *folder, struct report *report) {
    *reader = (struct reader){.buffer = malloc(READ_BYTES)};
    if (reader->buffer && kv_digest_new(&reader->digest) == 0)
        return 0;
    return report_error(report, -ENOMEM, "%s: out of memory", report_path(folder));
}

static void reader_deinit(struct reader *reader) {
    kv_digest_free(reader->digest);
    free(reader->buffer);
}

static void add_numbers(struct reader *reader, const int32_t *numbers, size_t bytes) {
    kv_digest_add(reader->digest, numbers, bytes);
    kv_digest_end_part(reader->digest);
}

static void add_words(struct reader *reader, const char *words) {
    kv_digest_add(reader->digest, words, strlen(words));
    kv_digest_end_part(reader->digest);
}

int fingerprint_read(const struct model_options *options, const char *backend, const struct backend_caps *caps,
                     uint8_t ret_bytes[KV_KEY_BYTES], struct report *report) {
    const int32_t numbers[] = {EPOCH,
                               PAGE_TOKENS,
                               (int32_t)options->kv_dtype,
                               (int32_t)caps->act_dtype,
                               (int32_t)caps->conv_dtype,
                               (int32_t)caps->weight_layout_id,
                               (int32_t)caps->page_image_id,
                               options->dummy,
                               0,  /* rank */
                               1}; /* of so many */
    const char *folder = options->target_folder;
    struct reader reader;
    int r = reader_init(&reader, folder, report);

    if (r == 0) {
        add_numbers(&reader, numbers, sizeof numbers);
        add_words(&reader, backend);
        add_words(&reader, caps->kernel_path);
        r = add_file(reader.digest, folder, "config.json", reader.buffer, report);
    }
    if (r == 0 && !options->dummy)
        r = add_file(reader.digest, folder, "tokenizer.json", reader.buffer, report);
    if (r == 0 && !options->dummy)
        r = add_weights(reader.digest, folder, reader.buffer, report);
    if (r == 0) {
        memset(ret_bytes, 0, KV_KEY_BYTES);
        kv_digest_read(reader.digest, ret_bytes);
    }
    reader_deinit(&reader);
    return r;
}

int fingerprint_read_drafter(const struct model_options *options, uint8_t ret_bytes[KV_DIGEST_BYTES],
                             struct report *report) {
    const int32_t numbers[] = {EPOCH, (int32_t)options->draft_dtype, options->block_size,
                               (int32_t)options->draft_causal, options->dummy};
    struct reader reader;
    int r;

    memset(ret_bytes, 0, KV_DIGEST_BYTES);
    if (!options->draft_folder)
        return 0;
    r = reader_init(&reader, options->draft_folder, report);
    if (r == 0) {
        add_numbers(&reader, numbers, sizeof numbers);
        r = add_file(reader.digest, options->draft_folder, "config.json", reader.buffer, report);
    }
    if (r == 0 && !options->dummy)
        r = add_weights(reader.digest, options->draft_folder, reader.buffer, report);
    if (r == 0)
        kv_digest_read(reader.digest, ret_bytes);
    reader_deinit(&reader);
    return r;
}

int fingerprint_read_vocabulary(const char *target_folder, uint8_t ret_bytes[KV_DIGEST_BYTES], struct report *report) {
    struct reader reader;
    int r = reader_init(&reader, target_folder, report);

    if (r == 0)
        r = add_file(reader.digest, target_folder, "tokenizer.json", reader.buffer, report);
    if (r == 0)
        kv_digest_read(reader.digest, ret_bytes);
    reader_deinit(&reader);
    return r;
}
