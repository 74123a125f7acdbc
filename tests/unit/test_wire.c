/* Writing: the bytes msgpack asks for, and errors that stick. */
#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "json_wire.h"
#include "proto.h"

static struct wire_out out;

static int setup(void **state) {
    (void)state;
    wire_out_init(&out, 1 << 16);
    return 0;
}

static int teardown(void **state) {
    (void)state;
    wire_out_deinit(&out);
    return 0;
}

static void wrote(const char *bytes, size_t n) {
    assert_int_equal(out.bytes.error, 0);
    assert_int_equal(out.bytes.n, n);
    assert_memory_equal(out.bytes.bytes, bytes, n);
    wire_out_clear(&out);
}

#define WROTE(literal) wrote((literal), sizeof(literal) - 1)

static void each_kind_takes_its_shortest_form(void **state) {
    (void)state;
    wire_map(&out, 1);
    wire_key(&out, "k");
    wire_array(&out, 7);
    wire_int(&out, -1);
    wire_int(&out, 127);
    wire_uint(&out, UINT64_MAX);
    wire_int(&out, INT64_MIN);
    wire_bool(&out, true);
    wire_bool(&out, false);
    wire_nil(&out);
    WROTE("\x81\xa1k\x97\xff\x7f\xcf\xff\xff\xff\xff\xff\xff\xff\xff\xd3\x80\0\0\0\0\0\0\0\xc3\xc2\xc0");
    wire_float(&out, 1.5);
    WROTE("\xcb\x3f\xf8\0\0\0\0\0\0");
    wire_str(&out, (struct span){0});
    WROTE("\xa0");
    wire_ids(&out, (const int32_t[]){1, 300}, 2);
    WROTE("\x92\x01\xcd\x01\x2c");
}

static void trees_become_what_they_say(void **state) {
    (void)state;
    json_wire(&out, "{\"a\": [null, true, -3, 1.5, \"x\"], \"b\": {}}");
    WROTE("\x82\xa1\x61\x95\xc0\xc3\xfd\xcb\x3f\xf8\0\0\0\0\0\0\xa1x\xa1\x62\x80");
    json_wire(&out, "[18446744073709551615, -9223372036854775808]");
    WROTE("\x92\xcf\xff\xff\xff\xff\xff\xff\xff\xff\xd3\x80\0\0\0\0\0\0\0");
    json_wire(&out, "[18446744073709551616, -9223372036854775809, 100000000000000000000000]"); /* no msgpack integer */
    WROTE("\x93\xcb\x43\xf0\0\0\0\0\0\0\xcb\xc3\xe0\0\0\0\0\0\0\xcb\x44\xb5\x2d\x02\xc7\xe1\x4a\xf6");
}

static void lossy_strings_are_whole_characters(void **state) {
    (void)state;
    wire_lossy(&out, span_of("a\xe2\x82"));
    WROTE("\xa4"
          "a\xef\xbf\xbd");
    wire_lossy(&out, span_of("\xff\xc3\xa4"));
    WROTE("\xa5\xef\xbf\xbd\xc3\xa4");
}

static void a_message_beyond_the_limit_keeps_its_error_until_it_is_cleared(void **state) {
    struct wire_out small;

    (void)state;
    wire_out_init(&small, 8);
    wire_cstr(&small, "longer than that");
    assert_int_equal(small.bytes.error, -EMSGSIZE);
    wire_nil(&small);
    assert_int_equal(small.bytes.error, -EMSGSIZE);
    wire_out_clear(&small);
    wire_nil(&small);
    assert_int_equal(small.bytes.error, 0);
    assert_int_equal(small.bytes.n, 1);
    wire_out_deinit(&small);
}

static void messages_have_the_forms_of_the_protocol(void **state) {
    const struct proto_number data = {"n_max", 3};

    (void)state;
    proto_result_begin(&out, 7);
    wire_map(&out, 0);
    WROTE("\x94\x01\x07\xc0\x80");
    proto_error(&out, 7, PROTO_BUSY, "full\xff");
    WROTE("\x94\x01\x07\x83\xa4"
          "code\xa4"
          "BUSY\xa7"
          "message\xa7"
          "full\xef\xbf\xbd\xa4"
          "data\x80\xc0");
    proto_error_data(&out, 7, PROTO_BUSY, "", &data, 1);
    WROTE("\x94\x01\x07\x83\xa4"
          "code\xa4"
          "BUSY\xa7"
          "message\xa0\xa4"
          "data\x81\xa5"
          "n_max\x03\xc0");
    proto_gen_event_begin(&out, 7, 2, "delta", 0);
    WROTE("\x93\x02\xa9gen.event\x83\xa2id\x07\xa3seq\x02\xa4type\xa5"
          "delta");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(each_kind_takes_its_shortest_form, setup, teardown),
        cmocka_unit_test_setup_teardown(trees_become_what_they_say, setup, teardown),
        cmocka_unit_test_setup_teardown(lossy_strings_are_whole_characters, setup, teardown),
        cmocka_unit_test_setup_teardown(a_message_beyond_the_limit_keeps_its_error_until_it_is_cleared, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(messages_have_the_forms_of_the_protocol, setup, teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
