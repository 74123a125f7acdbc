#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <errno.h>
#include <getopt.h>
#include <string.h>

#include "base.h"
#include "options.h"

static int parse_split(const char *list, struct command *ret, struct report *report) {
    char *argv[] = {"spillway-probe", "--check", "--split", (char *)(uintptr_t)list};

    optind = 0; /* getopt starts anew */
    return options_parse(ARRAY_LEN(argv), argv, ret, report);
}

/* ---- --split ---- */

static void a_split_is_numbers_with_commas_between_them(void **state) {
    struct report report = {0};
    struct command c = {0};

    (void)state;
    assert_int_equal(parse_split("64,1,16777216", &c, &report), 0);
    assert_int_equal(c.probe.n_splits, 3);
    assert_int_equal(c.probe.splits[0], 64);
    assert_int_equal(c.probe.splits[1], 1);
    assert_int_equal(c.probe.splits[2], 16777216);
    assert_int_equal(parse_split("7", &c, &report), 0);
    assert_int_equal(c.probe.n_splits, 1);
}

static void any_other_split_is_refused_with_the_number_that_is_wrong(void **state) {
    static const struct {
        const char *list, *wrong;
    } cases[] = {
        {"", "number 1 is ''"},
        {",", "number 1 is ''"},
        {"1,", "number 2 is ''"},
        {",1", "number 1 is ''"},
        {"1,,2", "number 2 is ''"},
        {"0", "number 1 is '0'"},
        {"64,00", "number 2 is '00'"},
        {"+1", "number 1 is '+1'"},
        {"1,-1", "number 2 is '-1'"},
        {" 1", "number 1 is ' 1'"},
        {"1, 2", "number 2 is ' 2'"},
        {"1 ,2", "number 1 is '1 '"},
        {"1x", "number 1 is '1x'"},
        {"0x10", "number 1 is '0x10'"},
        {"16777217", "number 1 is '16777217'"},
        {"4294967297", "number 1 is '4294967297'"},
        {"1,99999999999999999999", "number 2 is '99999999999999999999'"},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct command c = {.render = true};
        struct report report = {0};

        print_message("'%s'\n", cases[i].list);
        assert_int_equal(parse_split(cases[i].list, &c, &report), -EINVAL);
        assert_non_null(strstr(report.line, "--split"));
        assert_non_null(strstr(report.line, cases[i].wrong));
        assert_non_null(strstr(report.line, "1..16777216"));
        assert_true(c.render); /* written on success only */
    }
}

static void a_single_number_has_neither_sign_nor_space(void **state) {
    static const char *const bad[] = {"", "+1", " 1", "1 ", "-1", "0", "17", "99999999999999999999"};

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
        char *argv[] = {"spillway-probe", "--check", "--block-size", (char *)(uintptr_t)bad[i]};
        struct report report = {0};
        struct command c;

        print_message("'%s'\n", bad[i]);
        optind = 0;
        assert_int_equal(options_parse(ARRAY_LEN(argv), argv, &c, &report), -EINVAL);
        assert_non_null(strstr(report.line, "--block-size"));
        assert_non_null(strstr(report.line, "1..16"));
    }
}

/* ---- buffers ---- */

/* Bytes of the model's buffers for an input of n_ids and the given chunks. */
static size_t buffer_bytes(const struct probe_options *options, int n_ids, int n_splits, const int *splits) {
    static const char folder[] = GOLDEN_FOLDER "/dense-a";
    struct probe_options o = *options;
    struct report report = {0};
    struct probe probe;
    size_t bytes;

    o.model = folder;
    o.backend = "cpu";
    o.numeric = NUMERIC_REFERENCE;
    o.n_threads = 1;
    o.n_splits = n_splits;
    for (int i = 0; i < n_splits; i++)
        o.splits[i] = splits[i];
    assert_int_equal(probe_open(&probe, &o, 0, n_ids, &report), 0);
    bytes = probe.info->buffer_bytes;
    probe_close(&probe);
    return bytes;
}

static void buffers_hold_the_rows_that_run_whatever_the_split_says(void **state) {
    static const struct probe_options logits = {.logits_path = "unused"};
    size_t bytes = buffer_bytes(&logits, 40, 1, (int[]){40});

    (void)state;
    assert_int_equal(buffer_bytes(&logits, 40, 0, NULL), bytes);
    assert_int_equal(buffer_bytes(&logits, 40, 2, (int[]){3, 100000}), bytes);
    assert_true(buffer_bytes(&logits, 40, 3, (int[]){1, 20, 1}) < bytes);
    assert_true(buffer_bytes(&logits, 100000, 1, (int[]){1000}) > bytes);
}

static void generation_needs_its_own_chunk_and_no_split(void **state) {
    static const struct probe_options generation = {.n_generate = 8};
    size_t bytes = buffer_bytes(&generation, 40, 0, NULL);

    (void)state;
    assert_int_equal(buffer_bytes(&generation, 40, 1, (int[]){100000}), bytes);
    assert_int_equal(buffer_bytes(&generation, 40, 1, (int[]){1}), bytes);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_split_is_numbers_with_commas_between_them),
        cmocka_unit_test(any_other_split_is_refused_with_the_number_that_is_wrong),
        cmocka_unit_test(a_single_number_has_neither_sign_nor_space),
        cmocka_unit_test(buffers_hold_the_rows_that_run_whatever_the_split_says),
        cmocka_unit_test(generation_needs_its_own_chunk_and_no_split),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
