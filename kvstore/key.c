#include "key.h"

#include <endian.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include <openssl/evp.h>
#include <openssl/hmac.h>

struct kv_hasher {
    EVP_MD *sha256; /* fetched once: a fetch per digest takes longer than the digest */
    EVP_MD_CTX *digest;
};

int kv_hasher_new(struct kv_hasher **ret_hasher) {
    struct kv_hasher *hasher = calloc(1, sizeof *hasher);

    if (hasher == NULL)
        return -ENOMEM;
    hasher->sha256 = EVP_MD_fetch(NULL, "SHA256", NULL);
    hasher->digest = EVP_MD_CTX_new();
    if (hasher->sha256 == NULL || hasher->digest == NULL) {
        kv_hasher_free(hasher);
        return -ENOMEM;
    }
    *ret_hasher = hasher;
    return 0;
}

void kv_hasher_free(struct kv_hasher *hasher) {
    if (hasher == NULL)
        return;
    EVP_MD_CTX_free(hasher->digest);
    EVP_MD_free(hasher->sha256);
    free(hasher);
}

int kv_key_root(const uint8_t secret[KV_KEY_BYTES], const uint8_t fingerprint[KV_KEY_BYTES], uint32_t uid,
                struct kv_key *ret_root) {
    uint8_t name[KV_KEY_BYTES + sizeof uid];
    struct kv_key root;
    unsigned n_bytes;

    memcpy(name, fingerprint, KV_KEY_BYTES);
    uid = htole32(uid);
    memcpy(name + KV_KEY_BYTES, &uid, sizeof uid);
    if (HMAC(EVP_sha256(), secret, KV_KEY_BYTES, name, sizeof name, root.bytes, &n_bytes) == NULL)
        return -EIO;
    *ret_root = root;
    return 0;
}

int kv_key_chain(struct kv_hasher *hasher, const struct kv_key *parent, const int32_t *tokens, uint32_t n_pages,
                 struct kv_key *ret_keys) {
    uint32_t page[PAGE_TOKENS];

    for (uint32_t i = 0; i < n_pages; i++, tokens += PAGE_TOKENS) {
        for (int k = 0; k < PAGE_TOKENS; k++)
            page[k] = htole32((uint32_t)tokens[k]);
        if (EVP_DigestInit_ex2(hasher->digest, hasher->sha256, NULL) != 1 ||
            EVP_DigestUpdate(hasher->digest, parent->bytes, KV_KEY_BYTES) != 1 ||
            EVP_DigestUpdate(hasher->digest, page, sizeof page) != 1 ||
            EVP_DigestFinal_ex(hasher->digest, ret_keys[i].bytes, NULL) != 1)
            return -EIO;
        parent = &ret_keys[i];
    }
    return 0;
}
