#include "secret.h"

#include <endian.h>
#include <errno.h>
#include <string.h>
#include <sys/random.h>

#define NAME "secret"

/* The file. Numbers are little endian. */
enum {
    AT_MAGIC = 0,
    AT_VERSION = 8,
    AT_STORE_ID = 16,
    AT_SECRET = AT_STORE_ID + FORMAT_STORE_ID_BYTES,
    AT_CHECKSUM = AT_SECRET + KV_KEY_BYTES, /* XXH3-64 of the bytes before it */
    FILE_BYTES = AT_CHECKSUM + 8,
};
static const char head[AT_STORE_ID + 1] = "SpwySecr\1\0\0\0\0\0\0\0"; /* magic and version */

static void encode(const struct secret *secret, uint8_t ret_bytes[FILE_BYTES]) {
    uint64_t checksum;

    memcpy(ret_bytes + AT_MAGIC, head, AT_STORE_ID);
    memcpy(ret_bytes + AT_STORE_ID, secret->store_id, sizeof secret->store_id);
    memcpy(ret_bytes + AT_SECRET, secret->bytes, sizeof secret->bytes);
    checksum = htole64(format_checksum(ret_bytes, AT_CHECKSUM));
    memcpy(ret_bytes + AT_CHECKSUM, &checksum, sizeof checksum);
}

static int decode(const uint8_t bytes[FILE_BYTES], struct secret *ret_secret) {
    uint64_t checksum;

    memcpy(&checksum, bytes + AT_CHECKSUM, sizeof checksum);
    if (memcmp(bytes, head, AT_STORE_ID) != 0 || le64toh(checksum) != format_checksum(bytes, AT_CHECKSUM))
        return SECRET_E_DAMAGED;
    memcpy(ret_secret->store_id, bytes + AT_STORE_ID, sizeof ret_secret->store_id);
    memcpy(ret_secret->bytes, bytes + AT_SECRET, sizeof ret_secret->bytes);
    return 0;
}

static int make(const struct disk_folder *folder, struct secret *ret_secret) {
    uint8_t bytes[FILE_BYTES];
    struct secret secret;
    int r = -EIO;

    if (getrandom(&secret, sizeof secret, 0) == (ssize_t)sizeof secret) {
        encode(&secret, bytes);
        r = disk_folder_replace(folder, NAME, bytes, sizeof bytes);
    }
    if (r == 0)
        *ret_secret = secret;
    explicit_bzero(bytes, sizeof bytes);
    explicit_bzero(&secret, sizeof secret);
    return r;
}

static int read_file(const struct disk_folder *folder, struct secret *ret_secret) {
    uint8_t bytes[FILE_BYTES];
    size_t n = 0;
    int r = disk_folder_read(folder, NAME, bytes, sizeof bytes, &n);

    if (r == -EPERM || r == -ELOOP || r == -EMEDIUMTYPE)
        r = SECRET_E_UNSAFE;
    else if (r == -EFBIG || (r == 0 && n != sizeof bytes))
        r = SECRET_E_DAMAGED;
    else if (r == 0)
        r = decode(bytes, ret_secret);
    explicit_bzero(bytes, sizeof bytes);
    return r;
}

int secret_load(const struct disk_folder *folder, struct secret *ret_secret, bool *ret_is_new) {
    int r = read_file(folder, ret_secret);
    bool is_new = r == -ENOENT;

    if (is_new)
        r = make(folder, ret_secret);
    if (r == 0)
        *ret_is_new = is_new;
    return r;
}
