/* digest: a short name for the content of large things that pages depend on: weights, tokenizers, geometry. Tells
 * contents apart that differ by accident, as files do; it is no proof against somebody who makes two alike on purpose.
 * Runs at the speed of memory (XXH3, 128 bits). Knows no files. */
#pragma once
#include <stddef.h>
#include <stdint.h>

enum { KV_DIGEST_BYTES = 16 };

struct kv_digest; /* a running one */

int kv_digest_new(struct kv_digest **ret_digest); /* -ENOMEM */
void kv_digest_free(struct kv_digest *digest);    /* NULL is fine */

/* Parts are told apart: ("ab", "c") and ("a", "bc") differ, if each part is closed by kv_digest_end_part(). */
void kv_digest_add(struct kv_digest *digest, const void *bytes, size_t n);
void kv_digest_end_part(struct kv_digest *digest);
void kv_digest_read(const struct kv_digest *digest, uint8_t ret_bytes[KV_DIGEST_BYTES]);
