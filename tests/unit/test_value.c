/* Value trees: numbers and order survive, limits hold, and both spellings are those of Python. */
#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base.h"
#include "report.h"
#include "value.h"

static struct value_arena arena;

static int setup(void **state) {
    (void)state;
    value_arena_init(&arena, 1 << 20);
    return 0;
}

static int teardown(void **state) {
    (void)state;
    value_arena_deinit(&arena);
    return 0;
}

static struct value parse(const char *json) {
    struct report report = {0};
    struct value value;
    size_t n = strlen(json);
    char *copy = malloc(n ? n : 1); /* exactly the text, so that a sanitizer sees an over-read */

    assert_non_null(copy);
    memcpy(copy, json, n);
    if (value_from_json(&arena, "test", (struct span){copy, n}, VALUE_DEPTH_MAX, &value, &report) != 0)
        fail_msg("%s: %s", json, report.line);
    free(copy);
    return value;
}

static void refuses(const char *json, const char *why) {
    struct report report = {0};
    struct value value;

    assert_int_equal(value_from_json(&arena, "test", span_of(json), VALUE_DEPTH_MAX, &value, &report), VALUE_E_BAD);
    if (!strstr(report.line, why))
        fail_msg("%s: said \"%s\", not \"%s\"", json, report.line, why);
}

static void writes(const struct value *value, bool as_json, const char *expected) {
    struct text text;

    text_init(&text, 1 << 20);
    if (as_json)
        value_write_json(&text, value);
    else
        value_write_str(&text, value);
    assert_int_equal(text.error, 0);
    text_add(&text, "", 1);
    assert_string_equal(text.bytes, expected);
    text_deinit(&text);
}

static void round_trips(const char *json, const char *expected) {
    struct value value = parse(json);

    writes(&value, true, expected);
}

static void json_is_written_as_python_dumps_it(void **state) {
    (void)state;
    round_trips("null", "null");
    round_trips(" [ true,false , null ] ", "[true, false, null]");
    round_trips("{\"b\":1,\"a\":{},\"\":[]}", "{\"b\": 1, \"a\": {}, \"\": []}");
    round_trips("[[[],{}],[{\"k\":[1,{\"z\":\"ż\"}]}]]", "[[[], {}], [{\"k\": [1, {\"z\": \"ż\"}]}]]");
    round_trips("\"\\u0000\\u001f\\b\\f\\n\\r\\t\\\"\\\\\\/\x7f \\u017c\\ud83d\\ude00\"",
                "\"\\u0000\\u001f\\b\\f\\n\\r\\t\\\"\\\\/\x7f ż😀\"");
}

static void integers_keep_their_digits(void **state) {
    (void)state;
    round_trips("[12345678901234567890, -1, 0, -0, 123456789012345678901234567890123456789012345678901234567890]",
                "[12345678901234567890, -1, 0, 0, 123456789012345678901234567890123456789012345678901234567890]");
}

static void floats_are_spelled_as_by_python(void **state) {
    /* From Python 3: repr(float(text)). The powers of two among them have a shorter spelling than the nearest one. */
    static const char *const cases[][2] = {
        {"1e21", "1e+21"},
        {"0.1", "0.1"},
        {"-1.5", "-1.5"},
        {"1.0", "1.0"},
        {"-0.0", "-0.0"},
        {"0e5", "0.0"},
        {"100.0", "100.0"},
        {"1e15", "1000000000000000.0"},
        {"1e16", "1e+16"},
        {"9999999999999998.0", "9999999999999998.0"},
        {"123456789012345680.0", "1.2345678901234568e+17"},
        {"0.0001", "0.0001"},
        {"0.00001", "1e-05"},
        {"0.00012345", "0.00012345"},
        {"1.25e-7", "1.25e-07"},
        {"3.141592653589793", "3.141592653589793"},
        {"0.30000000000000004", "0.30000000000000004"},
        {"5e-324", "5e-324"},
        {"2.2250738585072014e-308", "2.2250738585072014e-308"},
        {"1.7976931348623157e308", "1.7976931348623157e+308"},
        {"1e100", "1e+100"},
        {"1e-400", "0.0"},
        {"5.9604644775390625e-08", "5.960464477539063e-08"},
        {"6.617444900424221404e-24", "6.617444900424222e-24"},
        {"9.5367431640625e-07", "9.5367431640625e-07"},
        {"9007199254740993.0", "9007199254740992.0"},
        {"4.35", "4.35"},
        {"0.999999999999999999", "1.0"},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct value value = parse(cases[i][0]);

        assert_int_equal(value.kind, VALUE_FLOAT);
        writes(&value, true, cases[i][1]);
        writes(&value, false, cases[i][1]);
    }
}

static void every_power_of_two_reads_back(void **state) {
    (void)state;
    for (int exponent = -1074; exponent < 1024; exponent++) {
        struct value value = {.kind = VALUE_FLOAT, .number = ldexp(1, exponent)};
        struct text text;

        text_init(&text, 100);
        value_write_str(&text, &value);
        text_add(&text, "", 1);
        assert_true(strtod(text.bytes, NULL) == value.number);
        assert_true(text.n <= 24);
        text_deinit(&text);
    }
}

static void scalars_as_str_are_those_of_python(void **state) {
    struct value value = {.kind = VALUE_NIL};

    (void)state;
    writes(&value, false, "None");
    value = (struct value){.kind = VALUE_BOOL, .boolean = true};
    writes(&value, false, "True");
    value.boolean = false;
    writes(&value, false, "False");
    value = parse("\"a\\n\\\"b\"");
    writes(&value, false, "a\n\"b");
    value = (struct value){.kind = VALUE_FLOAT, .number = -(double)INFINITY};
    writes(&value, false, "-inf");
    writes(&value, true, "-Infinity");
    value.number = (double)NAN;
    writes(&value, false, "nan");
    writes(&value, true, "NaN");
}

static void bad_documents_are_refused_with_a_reason(void **state) {
    char many[4096] = "{";

    (void)state;
    refuses("", "test");
    refuses("[1,", "test");
    refuses("[1] 2", "test");
    refuses("01", "test");
    refuses("\"\\ud800\"", "test");
    refuses("{\"a\":1,\"b\":2,\"a\":3}", "the same key twice");
    refuses("[{\"x\":[{\"a\":1,\"\\u0061\":1}]}]", "the same key twice");
    refuses("[1e999]", "too large");
    for (int i = 0; i < 100; i++)
        snprintf(many + strlen(many), sizeof many - strlen(many), "\"key %d\":%d,", i, i);
    strcat(many, "\"key 7\":0}");
    refuses(many, "the same key twice");
    *strrchr(many, '7') = 'x';
    assert_int_equal(parse(many).map.n, 101);
}

static void depth_is_limited_by_the_caller(void **state) {
    struct report report;
    struct value value;

    (void)state;
    assert_int_equal(value_from_json(&arena, "t", span_of("[[1]]"), 2, &value, &report), 0);
    assert_int_equal(value_from_json(&arena, "t", span_of("[{\"a\":[]}]"), 2, &value, &report), VALUE_E_BAD);
    assert_non_null(strstr(report.line, "too many containers"));
    assert_int_equal(value_from_json(&arena, "t", span_of("1"), 0, &value, &report), 0);
    assert_int_equal(value_from_json(&arena, "t", span_of("[]"), 0, &value, &report), VALUE_E_BAD);
}

static void a_full_arena_refuses_and_holds_its_limit(void **state) {
    char json[20001] = "[";
    struct value_arena small;
    struct report report;
    struct value value;

    (void)state;
    while (strlen(json) < 20000 - 2)
        strcat(json, "0,");
    json[strlen(json) - 1] = ']';
    for (size_t bytes_max = 0; bytes_max < 8000; bytes_max += 577) {
        value_arena_init(&small, bytes_max);
        assert_int_equal(value_from_json(&small, "t", span_of(json), 4, &value, &report), VALUE_E_FULL);
        assert_true(small.bytes <= bytes_max);
        value_arena_deinit(&small);
    }
    assert_int_equal(parse(json).kind, VALUE_ARRAY);
}

static void builders_make_the_same_tree(void **state) {
    struct value map = {.kind = VALUE_MAP}, *value, *item;

    (void)state;
    assert_int_equal(value_map_add(&arena, &map, span_of("ints"), &value), 0);
    *value = (struct value){.kind = VALUE_ARRAY};
    for (int64_t i = -2; i <= 7; i++) {
        assert_int_equal(value_array_add(&arena, value, &item), 0);
        assert_int_equal(value_set_int64(&arena, item, i), 0);
    }
    assert_int_equal(value_map_add(&arena, &map, span_of("min"), &value), 0);
    assert_int_equal(value_set_int64(&arena, value, INT64_MIN), 0);
    assert_int_equal(value_map_add(&arena, &map, span_of("max"), &value), 0);
    assert_int_equal(value_set_uint64(&arena, value, UINT64_MAX), 0);
    assert_int_equal(value_map_add(&arena, &map, span_of("s"), &value), 0);
    assert_int_equal(value_set_string(&arena, value, (struct span){"a\0b", 3}), 0);
    writes(&map, true,
           "{\"ints\": [-2, -1, 0, 1, 2, 3, 4, 5, 6, 7], \"min\": -9223372036854775808, \"max\": "
           "18446744073709551615, \"s\": \"a\\u0000b\"}");
    assert_ptr_equal(value_get(&map, "s"), value);
    assert_null(value_get(&map, "t"));
    assert_null(value_get(value, "s"));
}

static void strip_takes_what_python_takes(void **state) {
    static const uint32_t spaces[] = {0x09,   0x0A,   0x0B,   0x0C,   0x0D,   0x1C,   0x1D,   0x1E,   0x1F,   0x20,
                                      0x85,   0xA0,   0x1680, 0x2000, 0x2001, 0x2002, 0x2003, 0x2004, 0x2005, 0x2006,
                                      0x2007, 0x2008, 0x2009, 0x200A, 0x2028, 0x2029, 0x202F, 0x205F, 0x3000};
    size_t n_stripped = 0;

    (void)state;
    for (uint32_t cp = 0; cp <= 0x10FFFF; cp++) {
        char text[16];
        size_t n = 0;
        bool is_space = false;

        if (cp >= 0xD800 && cp <= 0xDFFF)
            continue;
        for (size_t i = 0; i < ARRAY_LEN(spaces); i++)
            is_space |= spaces[i] == cp;
        for (int i = 0; i < 2; i++) { /* the character, an x, the character */
            if (cp < 0x80) {
                text[n++] = (char)cp;
            } else if (cp < 0x800) {
                text[n++] = (char)(0xC0 | cp >> 6);
                text[n++] = (char)(0x80 | (cp & 0x3F));
            } else if (cp < 0x10000) {
                text[n++] = (char)(0xE0 | cp >> 12);
                text[n++] = (char)(0x80 | (cp >> 6 & 0x3F));
                text[n++] = (char)(0x80 | (cp & 0x3F));
            } else {
                text[n++] = (char)(0xF0 | cp >> 18);
                text[n++] = (char)(0x80 | (cp >> 12 & 0x3F));
                text[n++] = (char)(0x80 | (cp >> 6 & 0x3F));
                text[n++] = (char)(0x80 | (cp & 0x3F));
            }
            if (i == 0)
                text[n++] = 'x';
        }
        assert_int_equal(span_strip((struct span){text, n}).n, is_space ? 1 : n);
        n_stripped += is_space;
    }
    assert_int_equal(n_stripped, ARRAY_LEN(spaces));
    assert_int_equal(span_strip(span_of(" \n\xC2\xA0\xE2\x80\xA8")).n, 0);
    assert_int_equal(span_strip((struct span){NULL, 0}).n, 0);
    assert_int_equal(span_strip(span_of("\xA0 ")).n, 1); /* half a character is none */
}

static void a_copy_outlives_its_source(void **state) {
    static const char json[] = "{\"a\": [1, -2.5, \"x\\u0000y\", {}, []], \"b\": {\"c\": null, \"d\": true}, "
                               "\"e\": 123456789012345678901234567890}";
    struct value_arena other;
    struct value value = parse(json), copy;

    (void)state;
    value_arena_init(&other, 1 << 16);
    assert_int_equal(value_copy(&other, &value, &copy), 0);
    value_arena_clear(&arena);
    writes(&copy, true, json);
    value_arena_deinit(&other);
}

static void a_copy_into_a_small_arena_is_refused(void **state) {
    struct value value = parse("[\"0123456789\", {\"key\": [1, 2, 3, 4, 5, 6, 7, 8, 9]}]"), copy = {.kind = VALUE_BOOL};
    size_t n_bytes = 0;

    (void)state;
    for (int r = VALUE_E_FULL; r != 0; n_bytes += 16) {
        struct value_arena other;

        value_arena_init(&other, n_bytes);
        r = value_copy(&other, &value, &copy);
        assert_true(r == 0 || (r == VALUE_E_FULL && copy.kind == VALUE_BOOL));
        value_arena_deinit(&other);
        assert_true(n_bytes < 1 << 14);
    }
    assert_true(n_bytes > 256);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(json_is_written_as_python_dumps_it, setup, teardown),
        cmocka_unit_test_setup_teardown(integers_keep_their_digits, setup, teardown),
        cmocka_unit_test_setup_teardown(floats_are_spelled_as_by_python, setup, teardown),
        cmocka_unit_test_setup_teardown(every_power_of_two_reads_back, setup, teardown),
        cmocka_unit_test_setup_teardown(scalars_as_str_are_those_of_python, setup, teardown),
        cmocka_unit_test_setup_teardown(bad_documents_are_refused_with_a_reason, setup, teardown),
        cmocka_unit_test_setup_teardown(depth_is_limited_by_the_caller, setup, teardown),
        cmocka_unit_test_setup_teardown(a_full_arena_refuses_and_holds_its_limit, setup, teardown),
        cmocka_unit_test_setup_teardown(builders_make_the_same_tree, setup, teardown),
        cmocka_unit_test_setup_teardown(a_copy_outlives_its_source, setup, teardown),
        cmocka_unit_test_setup_teardown(a_copy_into_a_small_arena_is_refused, setup, teardown),
        cmocka_unit_test(strip_takes_what_python_takes),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
