/* Log lines: their form, that values cannot break it, limits of rate and length, and that a full pipe never blocks. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "log.h"

static int64_t now;

static int64_t fake_now(void) {
    return now;
}

static int ends[2];
static struct log mylog;
static char written[1 << 17];

static int open_log(void **state) {
    (void)state;
    now = INT64_C(1700000000123456);
    if (pipe2(ends, O_NONBLOCK) != 0)
        return -1;
    log_init(&mylog, ends[1], LOG_INFO, false, fake_now);
    return 0;
}

static int close_log(void **state) {
    (void)state;
    return close(ends[0]) | close(ends[1]);
}

/* What was written since the last call. */
static const char *take(void) {
    ssize_t n = read(ends[0], written, sizeof written - 1);

    written[n > 0 ? n : 0] = '\0';
    return written;
}

static void a_line_has_time_level_event_and_pairs(void **state) {
    (void)state;
    log_line(&mylog, LOG_INFO, "request.done", "id=%u ms=%.1f n=%zu x=%" PRId64 " off=%d%%", 7u, 1.25, (size_t)3,
             INT64_C(-9), 50);
    assert_string_equal(take(),
                        "ts=2023-11-14T22:13:20.123Z level=info event=request.done id=7 ms=1.2 n=3 x=-9 off=50%\n");
    log_line(&mylog, LOG_WARN, "x", "%s", "");
    assert_string_equal(take(), "ts=2023-11-14T22:13:20.123Z level=warn event=x \"\"\n");
}

static void the_journal_gets_a_priority_and_keeps_its_own_time(void **state) {
    (void)state;
    mylog.journal = true;
    log_plain(&mylog, LOG_ERROR, "device.lost");
    log_line(&mylog, LOG_INFO, "ready", "a=%05d b=%x c=%-3d", 42, 255u, 1);
    assert_string_equal(take(), "<3>level=error event=device.lost\n<6>level=info event=ready a=00042 b=ff c=1  \n");
}

static void levels_below_the_limit_are_not_written(void **state) {
    (void)state;
    log_plain(&mylog, LOG_DEBUG, "x");
    assert_string_equal(take(), "");
    log_set_level(&mylog, LOG_DEBUG);
    log_plain(&mylog, LOG_DEBUG, "x");
    assert_non_null(strstr(take(), "level=debug event=x\n"));
    log_set_level(&mylog, LOG_ERROR);
    log_plain(&mylog, LOG_WARN, "x");
    assert_string_equal(take(), "");
}

static void values_can_neither_end_the_line_nor_add_keys(void **state) {
    const char *volatile none = NULL; /* the compiler need not know */

    (void)state;
    mylog.journal = true;
    log_line(&mylog, LOG_INFO, "x", "a=%s b=%s c=%s d=%s", "plain-/path.1", "a b=c", "q\"\\\n\x01\xc3\xa9", "");
    assert_string_equal(take(),
                        "<6>level=info event=x a=plain-/path.1 b=\"a b=c\" c=\"q\\\"\\\\\\n\\x01\\xc3\\xa9\" d=\"\"\n");
    log_line(&mylog, LOG_INFO, "x", "a=%.*s b=%.2s c=%s d=%c", 3, "abcdef", "xyz", none, '=');
    assert_string_equal(take(), "<6>level=info event=x a=abc b=xy c=\"\" d=\"=\"\n");
}

static void a_long_line_is_cut_and_says_so(void **state) {
    char *value = malloc(5000);
    const char *line;

    (void)state;
    assert_non_null(value);
    memset(value, 'v', 4999);
    value[4999] = '\0';
    log_line(&mylog, LOG_INFO, "x", "a=1 b=%s c=2", value);
    line = take();
    assert_true(strlen(line) <= LOG_LINE_MAX);
    assert_non_null(strstr(line, "a=1 b= cut=true\n"));
    memset(value, ' ', 4999); /* quoted: grows piece by piece */
    log_line(&mylog, LOG_INFO, "x", "a=%s", value);
    line = take();
    assert_true(strlen(line) <= LOG_LINE_MAX);
    assert_string_equal(line + strlen(line) - strlen(" cut=true\n"), " cut=true\n");
    free(value);
}

static void one_event_cannot_flood_and_others_are_not_touched(void **state) {
    const char *line;
    int n = 0;

    (void)state;
    for (int i = 0; i < LOG_BURST + 50; i++)
        log_plain(&mylog, LOG_INFO, "flood");
    for (const char *c = take(); *c; c++)
        n += *c == '\n';
    assert_int_equal(n, LOG_BURST);
    assert_int_equal(mylog.n_lost, 50);
    log_plain(&mylog, LOG_INFO, "other");
    assert_non_null(strstr(take(), "event=other\n"));
    now += 1000000;
    log_line(&mylog, LOG_INFO, "flood", "a=1");
    line = take();
    assert_non_null(strstr(line, "event=flood suppressed=50 a=1\n"));
    log_line(&mylog, LOG_INFO, "flood", "a=1");
    assert_null(strstr(take(), "suppressed"));
}

static void a_full_pipe_drops_lines_and_counts_them(void **state) {
    char fill[4096] = "";
    int flags = fcntl(ends[1], F_GETFL);

    (void)state;
    while (write(ends[1], fill, sizeof fill) > 0)
        ;
    assert_int_equal(fcntl(ends[1], F_SETFL, flags & ~O_NONBLOCK), 0); /* a write that blocks would hang the test */
    log_plain(&mylog, LOG_INFO, "x");
    log_plain(&mylog, LOG_INFO, "x");
    assert_int_equal(mylog.n_dropped, 2);
    while (read(ends[0], written, sizeof written) > 0)
        ;
    log_plain(&mylog, LOG_INFO, "x");
    assert_non_null(strstr(take(), "event=x dropped=2\n"));
    assert_int_equal(mylog.n_dropped, 0);
    assert_int_equal(mylog.n_lost, 2);
}

static void the_journal_is_known_by_device_and_inode(void **state) {
    char words[64];
    struct stat st;

    (void)state;
    assert_int_equal(fstat(ends[1], &st), 0);
    snprintf(words, sizeof words, "%llu:%llu", (unsigned long long)st.st_dev, (unsigned long long)st.st_ino);
    assert_true(log_is_journal(ends[1], words));
    assert_false(log_is_journal(ends[1], "1:1"));
    assert_false(log_is_journal(ends[1], NULL));
    assert_false(log_is_journal(-1, words));
}

static void levels_are_found_by_name(void **state) {
    (void)state;
    assert_int_equal(log_level_find("warn"), LOG_WARN);
    assert_int_equal(log_level_find("loud"), -1);
    assert_string_equal(log_level_name(LOG_DEBUG), "debug");
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, open_log, close_log)

int main(void) {
    const struct CMUnitTest tests[] = {
        CASE(a_line_has_time_level_event_and_pairs),
        CASE(the_journal_gets_a_priority_and_keeps_its_own_time),
        CASE(levels_below_the_limit_are_not_written),
        CASE(values_can_neither_end_the_line_nor_add_keys),
        CASE(a_long_line_is_cut_and_says_so),
        CASE(one_event_cannot_flood_and_others_are_not_touched),
        CASE(a_full_pipe_drops_lines_and_counts_them),
        CASE(the_journal_is_known_by_device_and_inode),
        CASE(levels_are_found_by_name),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
