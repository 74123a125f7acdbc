/* Frames: where a message ends however it comes, and every limit with its number. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <msgpack.h>

#include "base.h"
#include "frame.h"
#include "json_wire.h"

enum { BYTES_MAX = 1 << 20 };

/* The n bytes in pieces of n_step, each piece in memory that ends with it. */
static int scan_in_steps(const char *bytes, size_t n, size_t n_step, size_t bytes_max, size_t *ret_n,
                         struct report *report) {
    struct frame_scan scan;
    int e = FRAME_E_MORE;

    frame_scan_init(&scan, bytes_max);
    for (size_t i = 0; e == FRAME_E_MORE && i < n;) {
        size_t n_now = i + n_step < n ? i + n_step : n;
        char *copy = malloc(n_now);

        assert_non_null(copy);
        memcpy(copy, bytes, n_now);
        e = frame_scan(&scan, copy, n_now, ret_n, report);
        assert_true(e != FRAME_E_MORE || frame_scan_bytes_min(&scan) > n_now);
        free(copy);
        i = n_now;
    }
    return e;
}

static void refuses(const char *bytes, size_t n, size_t bytes_max, const char *why) {
    for (size_t n_step = 1; n_step <= n; n_step = n_step * 2 + 1) {
        struct report report = {0};
        size_t n_message;

        assert_int_equal(scan_in_steps(bytes, n, n_step, bytes_max, &n_message, &report), FRAME_E_BAD);
        if (!strstr(report.line, why))
            fail_msg("said \"%s\", not \"%s\"", report.line, why);
    }
}

static int unpack(const char *bytes, size_t n, struct report *report) {
    msgpack_zone zone;
    msgpack_object message;
    int e;

    assert_true(msgpack_zone_init(&zone, 8192));
    e = frame_unpack(bytes, n, &zone, &message, report);
    msgpack_zone_destroy(&zone);
    return e;
}

#define REFUSES(literal, bytes_max, why) refuses((literal), sizeof(literal) - 1, (bytes_max), (why))

static void a_message_ends_where_it_ends_in_whatever_pieces_it_comes(void **state) {
    struct wire_out out;
    size_t n;

    (void)state;
    wire_out_init(&out, BYTES_MAX);
    json_wire(&out, "[0, 300, \"gen.start\", {\"prompt\": \"a somewhat longer text than thirty-one bytes\", \"x\": "
                    "[1, -1, 70000, -70000, 1e9, 2.5, true, null, {}, [], [[]], {\"k\": {\"l\": []}}, \"\"]}]");
    n = out.bytes.n;
    text_add(&out.bytes, "\x94\x00\x01", 3); /* the next one begins */
    for (size_t n_step = 1; n_step <= out.bytes.n; n_step++) {
        struct report report = {0};
        size_t n_message = 0;

        assert_int_equal(scan_in_steps(out.bytes.bytes, out.bytes.n, n_step, BYTES_MAX, &n_message, &report), 0);
        assert_int_equal(n_message, n);
    }
    assert_int_equal(frame_peek_id(out.bytes.bytes, n), 300);
    wire_out_deinit(&out);
}

static void bytes_that_begin_no_message_are_refused_at_the_first(void **state) {
    (void)state;
    REFUSES("GET / HTTP/1.1", BYTES_MAX, "no message");
    REFUSES("\x92\x00\x01", BYTES_MAX, "no message");
    REFUSES("\x84\xa1k", BYTES_MAX, "no message");
    REFUSES("\xc1", BYTES_MAX, "byte 0 of the message is the byte 0xc1");
    REFUSES("\x94\x00\x01\xc1", BYTES_MAX, "byte 3 of the message is the byte 0xc1");
    REFUSES("\x94\x00\x01\xd4\x01\x02", BYTES_MAX, "byte 3 of the message is an extension type");
    REFUSES("\x94\x00\x01\xc7\x01\x02", BYTES_MAX, "extension type");
}

static void what_a_head_declares_must_fit_into_the_limit(void **state) {
    (void)state;
    REFUSES("\x94\x00\x01\xdb\xff\xff\xff\xff", BYTES_MAX, "declares 4294967295 more bytes");
    REFUSES("\x94\x00\x01\xc6\x00\x10\x00\x00", BYTES_MAX, "declares 1048576 more bytes");
    REFUSES("\x94\x00\x01\xdd\xff\xff\xff\xff", BYTES_MAX, "declares 4294967295 more values");
    REFUSES("\x94\x00\x01\xdf\xff\xff\xff\xff", BYTES_MAX, "declares 8589934590 more values");
    REFUSES("\x94\x00\x01\xda\x00\x20", 32, "at least 39 bytes, the limit is 32"); /* and one byte for params */
    REFUSES("\x94\x00\x01\x9f\x9f", 32, "the limit is 32");
    REFUSES("\x94\x00\x01\xdd\x00\x02\x00\x00", BYTES_MAX, "at least 131077 values, the limit is 131072");
}

static void a_message_of_exactly_the_limit_passes(void **state) {
    static const char message[] = "\x94\x00\x01\xa3"
                                  "abc\x80";
    struct report report;
    size_t n;

    (void)state;
    assert_int_equal(scan_in_steps(message, 8, 1, 8, &n, &report), 0);
    assert_int_equal(n, 8);
    assert_int_equal(scan_in_steps(message, 8, 1, 7, &n, &report), FRAME_E_BAD);
}

static void sixteen_containers_inside_each_other_pass_and_seventeen_do_not(void **state) {
    char message[3 + FRAME_DEPTH_MAX + 2] = "\x94\x00\x01";
    struct report report;
    size_t n;

    (void)state;
    memset(message + 3, '\x91', FRAME_DEPTH_MAX);
    message[3 + FRAME_DEPTH_MAX - 1] = '\xc0'; /* 15 arrays in the message's own */
    message[3 + FRAME_DEPTH_MAX] = '\x80';
    assert_int_equal(scan_in_steps(message, 3 + FRAME_DEPTH_MAX + 1, 1, BYTES_MAX, &n, &report), 0);
    assert_int_equal(unpack(message, n, &report), 0);
    message[3 + FRAME_DEPTH_MAX - 1] = '\x91';
    refuses(message, sizeof message, BYTES_MAX, "inside 16 others");
}

static void a_large_message_in_small_pieces_is_walked_once(void **state) {
    struct frame_scan scan;
    struct report report;
    enum { N = 8 << 20 };
    char *bytes = calloc(1, N);
    size_t n_message = 0, n_calls = 0;
    int e = FRAME_E_MORE;

    (void)state;
    assert_non_null(bytes);
    memcpy(bytes, "\x94\x00\x01\xa1m\x81\xa6prompt\xdb\x00\x7f\xff\x00", 18);
    frame_scan_init(&scan, 16 << 20);
    for (size_t n = 1; e == FRAME_E_MORE && n < N; n += 64) { /* 131072 calls; a walk from the start would take hours */
        e = frame_scan(&scan, bytes, n, &n_message, &report);
        assert_true(n > 32 ? frame_scan_bytes_min(&scan) == 18 + 0x7fff00 : true);
        n_calls++;
    }
    assert_int_equal(e, 0);
    assert_int_equal(n_message, 18 + 0x7fff00);
    assert_true(n_calls > 100000);
    free(bytes);
}

static void strings_are_utf8_and_keys_are_unique_strings(void **state) {
    static const struct {
        const char *bytes;
        size_t n;
        const char *why;
    } cases[] = {
        {"\x94\x00\x01\xa1m\x81\xa1k\xa2\xc3\x28", 11, "the string at byte 9 of the message is not UTF-8: its byte 0"},
        {"\x94\x00\x01\xa1m\x81\xa2\xed\xa0\xc0", 10, "not UTF-8"},
        {"\x94\x00\x01\xa1m\x81\xa3k\xe2\x82\xc0", 11, "its byte 1 is 0xe2"},
        {"\x94\x00\x01\xa1m\x81\x05\xc0", 8, "is no string"},
        {"\x94\x00\x01\xa1m\x82\xa1k\xc0\xa1k\xc0", 12, "has \"k\" twice"},
        {"\x94\x00\x01\xa1m\x91\x82\xa0\xc0\xa0\xc0", 11, "twice"},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct report report = {0};
        size_t n;

        assert_int_equal(scan_in_steps(cases[i].bytes, cases[i].n, 3, BYTES_MAX, &n, &report), 0);
        assert_int_equal(n, cases[i].n);
        assert_int_equal(unpack(cases[i].bytes, n, &report), FRAME_E_BAD);
        if (!strstr(report.line, cases[i].why))
            fail_msg("said \"%s\", not \"%s\"", report.line, cases[i].why);
    }
}

static void the_same_key_is_found_among_many(void **state) {
    struct wire_out out;
    struct report report;

    (void)state;
    for (uint32_t same = 0; same < 2; same++) {
        wire_out_init(&out, BYTES_MAX);
        wire_array(&out, 3);
        wire_int(&out, 2);
        wire_cstr(&out, "m");
        wire_map(&out, 5000);
        for (uint32_t i = 0; i < 5000; i++) {
            char key[16];

            snprintf(key, sizeof key, "%u", i == 4321 && same ? 77 : i);
            wire_key(&out, key);
            wire_nil(&out);
        }
        assert_int_equal(unpack(out.bytes.bytes, out.bytes.n, &report), same ? FRAME_E_BAD : 0);
        if (same)
            assert_non_null(strstr(report.line, "has \"77\" twice"));
        wire_out_deinit(&out);
    }
}

static void ids_are_read_from_the_beginning_of_requests_only(void **state) {
    (void)state;
    assert_int_equal(frame_peek_id("\x94\x00\x07", 3), 7);
    assert_int_equal(frame_peek_id("\x94\x00\xcc\xff", 4), 255);
    assert_int_equal(frame_peek_id("\x94\x00\xcd\x01\x00", 5), 256);
    assert_int_equal(frame_peek_id("\x94\x00\xce\x00\x01\x00\x00", 7), 65536);
    assert_int_equal(frame_peek_id("\x94\x00\xcf\x00\x00\x00\x00\x00\x00\x00\x09", 11), 9);
    assert_int_equal(frame_peek_id("\x94\x00\xcf\x00\x00\x00\x01\x00\x00\x00\x09", 11), 0); /* no u32 */
    assert_int_equal(frame_peek_id("\x94\x00\xce\x00\x01", 5), 0);
    assert_int_equal(frame_peek_id("\x94\x00\xff", 3), 0);
    assert_int_equal(frame_peek_id("\x94\x01\x07", 3), 0);
    assert_int_equal(frame_peek_id("\x93\x00\x07", 3), 0);
    assert_int_equal(frame_peek_id("\x94\x00", 2), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_message_ends_where_it_ends_in_whatever_pieces_it_comes),
        cmocka_unit_test(bytes_that_begin_no_message_are_refused_at_the_first),
        cmocka_unit_test(what_a_head_declares_must_fit_into_the_limit),
        cmocka_unit_test(a_message_of_exactly_the_limit_passes),
        cmocka_unit_test(sixteen_containers_inside_each_other_pass_and_seventeen_do_not),
        cmocka_unit_test(a_large_message_in_small_pieces_is_walked_once),
        cmocka_unit_test(strings_are_utf8_and_keys_are_unique_strings),
        cmocka_unit_test(the_same_key_is_found_among_many),
        cmocka_unit_test(ids_are_read_from_the_beginning_of_requests_only),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
