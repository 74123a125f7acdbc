#include "session_record.h"

#include <assert.h>
#include <endian.h>
#include <string.h>

#include "base.h"
#include "format.h"
#include "utf8.h"

enum {
    AT_VERSION = 8,
    AT_FLAGS = 12,
    AT_UID = 16,
    AT_NAME_BYTES = 20,
    AT_TOKENS = 24,
    AT_RESTORE_POINT = 28,
    AT_VOCABULARY = 32,
    CHECKSUM_BYTES = 8,
    VERSION = 1,
};
enum { FLAG_PINNED = 1, FLAG_PARKED = 2, FLAGS_KNOWN = FLAG_PINNED | FLAG_PARKED };
static const char magic[AT_VERSION + 1] = "SpwySess";

static_assert(AT_VOCABULARY + KV_DIGEST_BYTES == SESSION_RECORD_HEAD_BYTES, "the name follows the digest");

static void put_u32(uint8_t *bytes, size_t at, uint32_t value) {
    value = htole32(value);
    memcpy(bytes + at, &value, sizeof value);
}

static uint32_t get_u32(const uint8_t *bytes, size_t at) {
    uint32_t value;

    memcpy(&value, bytes + at, sizeof value);
    return le32toh(value);
}

static size_t at_tokens(size_t n_name) {
    return SESSION_RECORD_HEAD_BYTES + align_up(n_name, sizeof(int32_t));
}

static size_t bytes_of(size_t n_name, uint32_t n_tokens) {
    return at_tokens(n_name) + n_tokens * sizeof(int32_t) + CHECKSUM_BYTES;
}

size_t session_record_bytes(const struct session_record *record) {
    return bytes_of(record->name.n, record->n_tokens);
}

void session_record_write(const struct session_record *record, void *ret_bytes) {
    size_t n = session_record_bytes(record), at = at_tokens(record->name.n);
    uint8_t *bytes = ret_bytes;
    uint64_t checksum;

    assert(record->name.n >= 1 && record->name.n <= SESSION_RECORD_NAME_BYTES_MAX);
    assert(record->n_tokens <= SESSION_RECORD_TOKENS_MAX);
    memset(bytes, 0, at);
    memcpy(bytes, magic, AT_VERSION);
    put_u32(bytes, AT_VERSION, VERSION);
    put_u32(bytes, AT_FLAGS, (record->is_pinned ? FLAG_PINNED : 0) | (record->is_parked ? FLAG_PARKED : 0));
    put_u32(bytes, AT_UID, record->uid);
    put_u32(bytes, AT_NAME_BYTES, (uint32_t)record->name.n);
    put_u32(bytes, AT_TOKENS, record->n_tokens);
    put_u32(bytes, AT_RESTORE_POINT, record->restore_point);
    memcpy(bytes + AT_VOCABULARY, record->vocabulary, sizeof record->vocabulary);
    memcpy(bytes + SESSION_RECORD_HEAD_BYTES, record->name.bytes, record->name.n);
    for (uint32_t i = 0; i < record->n_tokens; i++)
        put_u32(bytes, at + i * sizeof(int32_t), (uint32_t)record->tokens[i]);
    checksum = htole64(format_checksum(bytes, n - CHECKSUM_BYTES));
    memcpy(bytes + n - CHECKSUM_BYTES, &checksum, sizeof checksum);
}

static bool is_name(struct span name) {
    for (size_t i = 0; i < name.n;) {
        uint32_t cp = 0;
        int k = utf8_decode((const unsigned char *)name.bytes + i, name.n - i, &cp);

        if (k <= 0 || cp < 0x20 || (cp >= 0x7f && cp < 0xa0))
            return false;
        i += (size_t)k;
    }
    return true;
}

static bool is_padded_with_zeros(const uint8_t *bytes, size_t n_name) {
    for (size_t i = SESSION_RECORD_HEAD_BYTES + n_name; i < at_tokens(n_name); i++)
        if (bytes[i] != 0)
            return false;
    return true;
}

static bool is_whole(const uint8_t *bytes, size_t n) {
    uint64_t checksum;

    memcpy(&checksum, bytes + n - CHECKSUM_BYTES, sizeof checksum);
    return le64toh(checksum) == format_checksum(bytes, n - CHECKSUM_BYTES);
}

int session_record_read(void *at, size_t n, struct session_record *ret_record) {
    uint8_t *bytes = at;
    struct session_record record;
    uint32_t n_name, flags;
    int32_t *tokens;

    if (n < SESSION_RECORD_HEAD_BYTES + CHECKSUM_BYTES || memcmp(bytes, magic, AT_VERSION) != 0)
        return SESSION_RECORD_E_DAMAGED;
    if (get_u32(bytes, AT_VERSION) != VERSION)
        return SESSION_RECORD_E_FOREIGN;
    n_name = get_u32(bytes, AT_NAME_BYTES);
    flags = get_u32(bytes, AT_FLAGS);
    record = (struct session_record){.uid = get_u32(bytes, AT_UID),
                                     .name = {(char *)bytes + SESSION_RECORD_HEAD_BYTES, n_name},
                                     .is_pinned = flags & FLAG_PINNED,
                                     .is_parked = flags & FLAG_PARKED,
                                     .restore_point = get_u32(bytes, AT_RESTORE_POINT),
                                     .n_tokens = get_u32(bytes, AT_TOKENS)};
    if (n_name < 1 || n_name > SESSION_RECORD_NAME_BYTES_MAX || record.n_tokens > SESSION_RECORD_TOKENS_MAX ||
        n != bytes_of(n_name, record.n_tokens) || !is_whole(bytes, n))
        return SESSION_RECORD_E_DAMAGED;
    if ((flags & ~(uint32_t)FLAGS_KNOWN) != 0 || record.restore_point % PAGE_TOKENS != 0 ||
        record.restore_point > record.n_tokens || !is_name(record.name) || !is_padded_with_zeros(bytes, n_name))
        return SESSION_RECORD_E_DAMAGED;
    memcpy(record.vocabulary, bytes + AT_VOCABULARY, sizeof record.vocabulary);
    tokens = (int32_t *)(void *)(bytes + at_tokens(n_name));
    for (uint32_t i = 0; i < record.n_tokens; i++) {
        tokens[i] = (int32_t)le32toh((uint32_t)tokens[i]);
        if (tokens[i] < 0)
            return SESSION_RECORD_E_DAMAGED;
    }
    record.tokens = tokens;
    *ret_record = record;
    return 0;
}
