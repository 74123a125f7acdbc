/* Records of sessions: what the reader accepts is in range, and writing it again gives the same bytes. The first byte says
 * whether the rest is the record itself or changes to a whole one, and whether the checksum is made to match, so that the
 * checks behind it are reached. A change is two bytes: where, and what to xor. */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "format.h"
#include "session_record.h"

enum { IS_RAW = 1, IS_SEALED = 2, TOKENS = 70, CHECKSUM_BYTES = 8 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static uint8_t *make_whole(size_t *ret_n) {
    int32_t tokens[TOKENS];
    struct session_record record = {.uid = 1000,
                                    .name = span_of("n\303\266tes"),
                                    .vocabulary = {1, 2, 3},
                                    .is_pinned = true,
                                    .restore_point = 64,
                                    .tokens = tokens,
                                    .n_tokens = TOKENS};
    uint8_t *bytes = malloc(*ret_n = session_record_bytes(&record));

    for (int i = 0; i < TOKENS; i++)
        tokens[i] = 31 * i;
    assert(bytes);
    session_record_write(&record, bytes);
    return bytes;
}

static void seal(uint8_t *bytes, size_t n) {
    uint64_t checksum = format_checksum(bytes, n - CHECKSUM_BYTES);

    for (size_t i = 0; i < CHECKSUM_BYTES; i++)
        bytes[n - CHECKSUM_BYTES + i] = (uint8_t)(checksum >> (8 * i));
}

static void check(uint8_t *bytes, size_t n) {
    uint8_t *before = malloc(n ? n : 1), *again;
    struct session_record record;
    int r;

    assert(before);
    memcpy(before, bytes, n);
    r = session_record_read(bytes, n, &record);
    assert(r == 0 || r == SESSION_RECORD_E_DAMAGED || r == SESSION_RECORD_E_FOREIGN);
    if (r == 0) {
        assert(record.name.n >= 1 && record.name.n <= SESSION_RECORD_NAME_BYTES_MAX);
        assert(record.restore_point <= record.n_tokens && session_record_bytes(&record) == n);
        for (uint32_t i = 0; i < record.n_tokens; i++)
            assert(record.tokens[i] >= 0);
        again = malloc(n);
        assert(again);
        session_record_write(&record, again);
        assert(memcmp(again, before, n) == 0);
        free(again);
    }
    free(before);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    uint8_t *bytes;
    size_t n_bytes;

    if (n < 1)
        return 0;
    if (data[0] & IS_RAW) {
        n_bytes = n - 1;
        bytes = malloc(n_bytes ? n_bytes : 1);
        assert(bytes);
        memcpy(bytes, data + 1, n_bytes);
    } else {
        bytes = make_whole(&n_bytes);
        for (size_t i = 1; i + 2 <= n; i += 2)
            bytes[data[i] % n_bytes] ^= data[i + 1];
    }
    if (data[0] & IS_SEALED && n_bytes >= CHECKSUM_BYTES)
        seal(bytes, n_bytes);
    check(bytes, n_bytes);
    free(bytes);
    return 0;
}
