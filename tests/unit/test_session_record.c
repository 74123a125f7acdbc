#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "session_record.h"

static int32_t tokens[1000];

static struct session_record record_of(const char *name, uint32_t n_tokens) {
    for (int i = 0; i < 1000; i++)
        tokens[i] = 7919 * i;
    return (struct session_record){.uid = 4000000000,
                                   .name = span_of(name),
                                   .vocabulary = {9, 8, 7},
                                   .is_parked = true,
                                   .restore_point = n_tokens / 64 * 64,
                                   .tokens = tokens,
                                   .n_tokens = n_tokens};
}

static uint8_t *bytes_of(const struct session_record *record, size_t *ret_n) {
    uint8_t *bytes;

    *ret_n = session_record_bytes(record);
    bytes = malloc(*ret_n);
    assert_non_null(bytes);
    session_record_write(record, bytes);
    return bytes;
}

static void what_was_written_is_read(void **state) {
    static const char *const names[] = {"a", "ab", "abc", "abcd", "d\303\251j\303\240 vu"};
    static const uint32_t counts[] = {0, 1, 63, 64, 1000};

    (void)state;
    for (int i = 0; i < 5; i++)
        for (int k = 0; k < 5; k++) {
            struct session_record record = record_of(names[i], counts[k]), again;
            size_t n;
            uint8_t *bytes = bytes_of(&record, &n);

            assert_int_equal(session_record_read(bytes, n, &again), 0);
            assert_int_equal(again.uid, record.uid);
            assert_true(span_is(again.name, names[i]));
            assert_memory_equal(again.vocabulary, record.vocabulary, sizeof record.vocabulary);
            assert_false(again.is_pinned);
            assert_true(again.is_parked);
            assert_int_equal(again.restore_point, record.restore_point);
            assert_int_equal(again.n_tokens, counts[k]);
            if (counts[k] > 0)
                assert_memory_equal(again.tokens, tokens, counts[k] * sizeof *tokens);
            free(bytes);
        }
}

static void every_changed_bit_and_every_cut_is_seen(void **state) {
    struct session_record record = record_of("notes", 70), again;
    uint8_t *whole, *bytes;
    size_t n;

    (void)state;
    whole = bytes_of(&record, &n);
    bytes = malloc(n);
    assert_non_null(bytes);
    for (size_t bit = 0; bit < 8 * n; bit++) {
        memcpy(bytes, whole, n);
        bytes[bit / 8] ^= (uint8_t)(1 << bit % 8);
        assert_int_equal(session_record_read(bytes, n, &again),
                         bit / 64 == 1 && bit / 32 == 2 ? SESSION_RECORD_E_FOREIGN : SESSION_RECORD_E_DAMAGED);
    }
    for (size_t cut = 0; cut < n; cut++) {
        memcpy(bytes, whole, cut);
        assert_int_equal(session_record_read(bytes, cut, &again), SESSION_RECORD_E_DAMAGED);
    }
    free(bytes);
    free(whole);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_was_written_is_read),
        cmocka_unit_test(every_changed_bit_and_every_cut_is_seen),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
