/* session_record: the bytes that keep one session on disk. Pure: reads and writes memory only, trusts nothing that it
 * reads, knows no files.
 *
 *      0  magic, 8 bytes             8  version, u32           12  flags, u32
 *     16  uid, u32                  20  name bytes, u32        24  tokens, u32       28  restore point, u32
 *     32  digest of the vocabulary, 16 bytes
 *     48  name, padded with zeros to a multiple of 4
 *     ..  tokens, i32 each          ..  checksum, u64: XXH3-64 of all bytes before it
 *
 * Numbers are little endian. A record of another version is told from damage by magic and version, which stay. */
#pragma once
#include <stdbool.h>
#include <stdint.h>

#include "digest.h"
#include "text.h"

enum {
    SESSION_RECORD_NAME_BYTES_MAX = 128,
    SESSION_RECORD_TOKENS_MAX = 1 << 24,
    SESSION_RECORD_HEAD_BYTES = 48,
    SESSION_RECORD_BYTES_MAX =
        SESSION_RECORD_HEAD_BYTES + SESSION_RECORD_NAME_BYTES_MAX + 4 * SESSION_RECORD_TOKENS_MAX + 8,
};

enum {
    SESSION_RECORD_E_DAMAGED = 1,
    SESSION_RECORD_E_FOREIGN, /* of another version, which may be whole */
};

struct session_record {
    uint32_t uid;
    struct span name;                    /* 1 to NAME_BYTES_MAX bytes of UTF-8 without control characters */
    uint8_t vocabulary[KV_DIGEST_BYTES]; /* what the tokens are ids of */
    bool is_pinned, is_parked;
    uint32_t restore_point; /* tokens at the last one that it was seen to have; a multiple of 64, <= n_tokens */
    const int32_t *tokens;  /* [n_tokens] all >= 0 */
    uint32_t n_tokens;      /* <= TOKENS_MAX */
};

size_t session_record_bytes(const struct session_record *record);
void session_record_write(const struct session_record *record, void *ret_bytes); /* [session_record_bytes()] */

/* at: n bytes, aligned to 4. They become the record's memory: its name and tokens lie in them, in this machine's order.
 * SESSION_RECORD_E_*. */
int session_record_read(void *at, size_t n, struct session_record *ret_record);
