#include "digest.h"

#include <errno.h>
#include <stdlib.h>
#include <xxhash.h>

struct kv_digest {
    XXH3_state_t *state;
    uint64_t n_part; /* bytes of the part so far */
};

int kv_digest_new(struct kv_digest **ret_digest) {
    struct kv_digest *digest = calloc(1, sizeof *digest);

    if (!digest)
        return -ENOMEM;
    digest->state = XXH3_createState();
    if (!digest->state) {
        free(digest);
        return -ENOMEM;
    }
    XXH3_128bits_reset(digest->state);
    *ret_digest = digest;
    return 0;
}

void kv_digest_free(struct kv_digest *digest) {
    if (!digest)
        return;
    XXH3_freeState(digest->state);
    free(digest);
}

void kv_digest_add(struct kv_digest *digest, const void *bytes, size_t n) {
    XXH3_128bits_update(digest->state, bytes, n);
    digest->n_part += n;
}

void kv_digest_end_part(struct kv_digest *digest) {
    uint64_t n = digest->n_part;

    XXH3_128bits_update(digest->state, &n, sizeof n);
    digest->n_part = 0;
}

void kv_digest_read(const struct kv_digest *digest, uint8_t ret_bytes[KV_DIGEST_BYTES]) {
    XXH128_canonical_t canonical;

    XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(digest->state));
    for (size_t i = 0; i < KV_DIGEST_BYTES; i++)
        ret_bytes[i] = canonical.digest[i];
}
