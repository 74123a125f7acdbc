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
    struct kv_digest *digest = NULL;
    char *buffer = malloc(READ_BYTES);
    int r = buffer ? kv_digest_new(&digest) : -ENOMEM;

    if (r == 0) {
        kv_digest_add(digest, numbers, sizeof numbers);
        kv_digest_end_part(digest);
        kv_digest_add(digest, backend, strlen(backend));
        kv_digest_end_part(digest);
        kv_digest_add(digest, caps->kernel_path, strlen(caps->kernel_path));
        kv_digest_end_part(digest);
        r = add_file(digest, options->target_folder, "config.json", buffer, report);
    }
    if (r == 0 && !options->dummy) {
        r = add_file(digest, options->target_folder, "tokenizer.json", buffer, report);
        if (r == 0)
            r = add_weights(digest, options->target_folder, buffer, report);
    }
    if (r == 0) {
        memset(ret_bytes, 0, KV_KEY_BYTES);
        kv_digest_read(digest, ret_bytes);
    } else if (r == -ENOMEM) {
        report_line(report, "%s: out of memory", report_path(options->target_folder));
    }
    kv_digest_free(digest);
    free(buffer);
    return r;
}

int fingerprint_read_vocabulary(const char *target_folder, uint8_t ret_bytes[KV_DIGEST_BYTES], struct report *report) {
    struct kv_digest *digest = NULL;
    char *buffer = malloc(READ_BYTES);
    int r = buffer ? kv_digest_new(&digest) : -ENOMEM;

    if (r == 0)
        r = add_file(digest, target_folder, "tokenizer.json", buffer, report);
    else
        report_line(report, "%s: out of memory", report_path(target_folder));
    if (r == 0)
        kv_digest_read(digest, ret_bytes);
    kv_digest_free(digest);
    free(buffer);
    return r;
}
