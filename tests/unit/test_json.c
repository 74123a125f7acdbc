/* The JSON reader: what it accepts, what it refuses and where, and that it keeps inside the text. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base.h"
#include "json.h"
#include "report.h"

/* A copy of exactly n bytes, so that a sanitizer sees an over-read. */
static char *exact(const char *text, size_t n) {
    char *copy = malloc(n ? n : 1);

    assert_non_null(copy);
    memcpy(copy, text, n);
    return copy;
}

/* Reads everything; the reader's last state, without its text. */
static struct json_reader drain(const char *text, size_t n) {
    char *copy = exact(text, n);
    struct json_reader r;

    json_init(&r, copy, n);
    while (json_next(&r) > JSON_END)
        ;
    free(copy);
    r.text = NULL;
    return r;
}

static void accepts(const char *text) {
    struct json_reader r = drain(text, strlen(text));

    if (r.kind != JSON_END)
        fail_msg("%s: %s at %zu", text, r.error, r.error_at);
}

static void refuses(const char *text, size_t at) {
    struct json_reader r = drain(text, strlen(text));

    if (r.kind != JSON_ERROR)
        fail_msg("accepted: %s", text);
    if (r.error_at != at)
        fail_msg("%s: %s: at %zu, not at %zu", text, r.error, at, r.error_at);
}

static void grammar_is_that_of_rfc_8259(void **state) {
    (void)state;
    accepts("null");
    accepts(" [ ] ");
    accepts("{}");
    accepts("[true,false , null\t,\r\n-0,10.25e+3,1E9,\"\"]");
    accepts("{\"a\":{\"b\":[[],{}]},\"a\":1}");
    refuses("", 0);
    refuses("  ", 2);
    refuses("nul", 0);
    refuses("nullx", 4);
    refuses("[1,]", 3);
    refuses("[,1]", 1);
    refuses("[1 2]", 3);
    refuses("[1", 2);
    refuses("[1}", 2);
    refuses("{\"a\":1]", 6);
    refuses("{\"a\"}", 4);
    refuses("{\"a\":}", 5);
    refuses("{\"a\":1,}", 7);
    refuses("{1:2}", 1);
    refuses("{} {}", 3);
    refuses("1 2", 2);
    refuses("[01]", 1);
    refuses("[+1]", 1);
    refuses("[.5]", 1);
    refuses("[1.]", 1);
    refuses("[1e]", 1);
    refuses("[-]", 1);
    refuses("[NaN]", 1);
    refuses("\xEF\xBB\xBF{}", 0);
    refuses("['a']", 1);
}

static void strings_are_checked(void **state) {
    (void)state;
    accepts("\"\\u0000\\ud83d\\uDE00\\\"\\\\\\/\\b\\f\\n\\r\\t\"");
    accepts("\"\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80\xEF\xBF\xBF\"");
    refuses("\"abc", 0);
    refuses("\"\\\"", 0);
    refuses("\"a\nb\"", 2);
    refuses("\"\\x41\"", 1);
    refuses("\"\\", 1);
    refuses("\"\\u12g4\"", 1);
    refuses("\"\\u12", 1);
    refuses("\"\\ud83d\"", 1);
    refuses("\"\\ud83d\\u0041\"", 1);
    refuses("\"\\ude00\\ud83d\"", 1);
    refuses("\"\\ud83d\\ud83d\"", 1);
    refuses("\"\x80\"", 1);
    refuses("\"\xC0\x80\"", 1);
    refuses("\"\xE0\x9F\xBF\"", 1);
    refuses("\"\xED\xA0\x80\"", 1);
    refuses("\"\xF0\x8F\xBF\xBF\"", 1);
    refuses("\"\xF4\x90\x80\x80\"", 1);
    refuses("\"\xF5\x80\x80\x80\"", 1);
    refuses("\"\xE2\x82", 1);
}

static void a_zero_byte_is_no_end_of_text(void **state) {
    struct json_reader r;

    (void)state;
    r = drain("[1]\0", 4);
    assert_int_equal(r.kind, JSON_ERROR);
    assert_int_equal(r.error_at, 3);
    r = drain("\"\\\0\"", 4);
    assert_int_equal(r.kind, JSON_ERROR);
    assert_int_equal(r.error_at, 1);
}

static void strings_come_out_unescaped(void **state) {
    const char text[] = "{\"k\\u0065y\": \"a\\u00e9\\ud83d\\ude00\\u0000\\n\xC3\xA9\"}";
    const char value[] = "a\xC3\xA9\xF0\x9F\x98\x80\0\n\xC3\xA9";
    struct json_reader r;
    char out[16];

    (void)state;
    json_init(&r, text, sizeof text - 1);
    assert_int_equal(json_next(&r), JSON_OBJECT);
    assert_int_equal(json_next(&r), JSON_KEY);
    assert_true(json_is(&r, "key"));
    assert_false(json_is(&r, "kez"));
    assert_false(json_is(&r, "ke"));
    assert_false(json_is(&r, "k\\u0065y"));
    assert_int_equal(r.string_bytes, 3);
    json_unescape(&r, out);
    assert_memory_equal(out, "key", 3);
    assert_int_equal(json_next(&r), JSON_STRING);
    assert_int_equal(r.string_bytes, sizeof value - 1);
    json_unescape(&r, out);
    assert_memory_equal(out, value, sizeof value - 1);
    assert_int_equal(json_next(&r), JSON_OBJECT_END);
    assert_int_equal(json_next(&r), JSON_END);
    assert_int_equal(json_next(&r), JSON_END);
}

static void numbers_come_as_text_and_as_checked_integers(void **state) {
    const char text[] = "[0, 18446744073709551615, 18446744073709551616, -1, 1.0, 1e3, 42, \"7\"]";
    struct json_reader r;
    uint64_t value = 5;

    (void)state;
    json_init(&r, text, sizeof text - 1);
    json_next(&r);
    json_next(&r);
    assert_true(json_u64(&r, UINT64_MAX, &value) && value == 0);
    json_next(&r);
    assert_true(json_u64(&r, UINT64_MAX, &value) && value == UINT64_MAX);
    value = 5;
    for (int i = 0; i < 4; i++) {
        assert_int_equal(json_next(&r), JSON_NUMBER);
        assert_false(json_u64(&r, UINT64_MAX, &value));
    }
    assert_int_equal(r.token_bytes, 3);
    assert_memory_equal(r.token, "1e3", 3);
    json_next(&r);
    assert_false(json_u64(&r, 41, &value));
    assert_int_equal(value, 5);
    assert_true(json_u64(&r, 42, &value) && value == 42);
    json_next(&r);
    assert_false(json_u64(&r, 42, &value));
}

static void skipping_lands_behind_the_value(void **state) {
    const char text[] = "{\"a\":{\"x\":[1,{\"y\":[]}],\"z\":\"]}\"},\"b\":3,\"c\":[1,[2],3],\"d\":4}";
    struct json_reader r;

    (void)state;
    json_init(&r, text, sizeof text - 1);
    json_next(&r);
    json_next(&r);
    assert_int_equal(json_skip(&r), 0);
    assert_int_equal(json_next(&r), JSON_KEY);
    assert_true(json_is(&r, "b"));
    assert_int_equal(json_skip(&r), 0);
    assert_int_equal(json_next(&r), JSON_KEY);
    assert_int_equal(json_next(&r), JSON_ARRAY);
    assert_int_equal(json_next(&r), JSON_NUMBER);
    assert_int_equal(json_leave(&r), 0);
    assert_int_equal(json_next(&r), JSON_KEY);
    assert_true(json_is(&r, "d"));
    assert_int_equal(json_leave(&r), 0);
    assert_int_equal(json_next(&r), JSON_END);
    assert_int_equal(json_leave(&r), -EINVAL);

    json_init(&r, "[]", 2);
    json_next(&r);
    assert_int_equal(json_skip(&r), -EINVAL); /* no value comes next */
    assert_int_equal(r.kind, JSON_ERROR);
    json_init(&r, "[[1,[", 5);
    assert_int_equal(json_skip(&r), -EINVAL);
}

static void duplicate_keys_are_told(void **state) {
    static const char *const names[] = {"a", "b"};
    const char text[] = "{\"b\":1,\"x\":2,\"x\":3,\"\\u0062\":4}";
    struct json_reader r;
    uint64_t seen = 0;

    (void)state;
    json_init(&r, text, sizeof text - 1);
    json_next(&r);
    json_next(&r);
    assert_int_equal(json_field(&r, names, 2, &seen), 1);
    for (int i = 0; i < 2; i++) {
        json_skip(&r);
        json_next(&r);
        assert_int_equal(json_field(&r, names, 2, &seen), -1);
        assert_int_equal(r.kind, JSON_KEY);
    }
    json_skip(&r);
    json_next(&r);
    assert_int_equal(json_field(&r, names, 2, &seen), -1);
    assert_int_equal(r.kind, JSON_ERROR);
    assert_int_equal(r.error_at, 19);
    assert_int_equal(seen, 2);
}

static void depth_is_limited(void **state) {
    char text[2 * JSON_DEPTH_MAX + 2];

    (void)state;
    memset(text, '[', JSON_DEPTH_MAX);
    memset(text + JSON_DEPTH_MAX, ']', JSON_DEPTH_MAX);
    text[2 * JSON_DEPTH_MAX] = 0;
    accepts(text);
    memset(text, '[', JSON_DEPTH_MAX + 1);
    memset(text + JSON_DEPTH_MAX + 1, ']', JSON_DEPTH_MAX + 1);
    assert_int_equal(drain(text, sizeof text).error_at, JSON_DEPTH_MAX);
    for (int i = 0; i < 20; i++)
        memcpy(text + 5 * i, "{\"a\":", 5);
    assert_int_equal(drain(text, 100).error_at, 100); /* objects count the same; this one only ends too early */
}

static void a_refusal_names_file_place_and_reason(void **state) {
    struct report report;
    struct json_reader r;

    (void)state;
    json_init(&r, "{\"a\":\"b\"}", 9);
    for (int i = 0; i < 3; i++)
        json_next(&r);
    assert_int_equal(json_refuse(&r, "x.json", &report), -EINVAL);
    assert_string_equal(report.line, "x.json: byte 5: not what should be here");
    assert_int_equal(json_fail(&r, "a number should be here"), JSON_ERROR);
    assert_int_equal(json_fail(&r, "too late"), JSON_ERROR);
    assert_int_equal(json_next(&r), JSON_ERROR);
    json_refuse(&r, "x.json", &report);
    assert_string_equal(report.line, "x.json: byte 5: a number should be here");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(grammar_is_that_of_rfc_8259),
        cmocka_unit_test(strings_are_checked),
        cmocka_unit_test(a_zero_byte_is_no_end_of_text),
        cmocka_unit_test(strings_come_out_unescaped),
        cmocka_unit_test(numbers_come_as_text_and_as_checked_integers),
        cmocka_unit_test(skipping_lands_behind_the_value),
        cmocka_unit_test(duplicate_keys_are_told),
        cmocka_unit_test(depth_is_limited),
        cmocka_unit_test(a_refusal_names_file_place_and_reason),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
