/* key: names of pages. The key of page i stands for all tokens up to the page's end, of one user, on one model:
 *
 *     root  = HMAC-SHA256(secret, fingerprint || uid as u32)
 *     key_i = SHA-256(key_{i-1} || the page's PAGE_TOKENS ids as i32)         little endian; key_{-1} is the root
 *
 * Other roots give other keys, so nobody can find, or probe for, what another user's prompts left. Pure: any thread may
 * call these, with a hasher of its own. Knows no slots. */
#pragma once
#include "backend.h"

enum { KV_KEY_BYTES = 32 };

struct kv_key {
    uint8_t bytes[KV_KEY_BYTES];
};

/* What hashing needs to allocate. One thread at a time may use it. */
struct kv_hasher;

int kv_hasher_new(struct kv_hasher **ret_hasher); /* -ENOMEM */
void kv_hasher_free(struct kv_hasher *hasher);

/* -EIO if libcrypto cannot hash. */
int kv_key_root(const uint8_t secret[KV_KEY_BYTES], const uint8_t fingerprint[KV_KEY_BYTES], uint32_t uid,
                struct kv_key *ret_root);

/* Keys of `n_pages` pages that follow the one of `parent` (a root, or the key of the page before). tokens:
 * [n_pages * PAGE_TOKENS]. Allocates nothing. -EIO if libcrypto cannot hash; ret_keys then holds anything. */
int kv_key_chain(struct kv_hasher *hasher, const struct kv_key *parent, const int32_t *tokens, uint32_t n_pages,
                 struct kv_key *ret_keys);
