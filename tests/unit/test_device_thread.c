#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <poll.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "device_thread.h"

enum { N = 1000 };

static atomic_int n_copies_left; /* then copies fail; the count may go on below 0 */
static atomic_bool records_fail;

static int counted_copy(struct stream *stream, void *dst, const void *src, size_t bytes) {
    return n_copies_left-- > 0 ? backend_find("cpu")->copy(stream, dst, src, bytes) : -EIO;
}

static int failing_record(struct stream *stream, struct event *event) {
    return records_fail ? -ENODEV : backend_find("cpu")->event_record(stream, event);
}

struct rig {
    struct backend backend;
    struct device *device;
    struct device_thread *thread;
    int done_fd;
};

static void open_rig(struct rig *rig, uint64_t delay_seed) {
    n_copies_left = 1 << 30;
    records_fail = false;
    rig->backend = *backend_find("cpu");
    rig->backend.copy = counted_copy;
    rig->backend.event_record = failing_record;
    rig->done_fd = eventfd(0, EFD_CLOEXEC);
    assert_true(rig->done_fd >= 0);
    assert_int_equal(
        rig->backend.open(&(struct backend_options){.n_threads = 1, .delay_seed = delay_seed}, &rig->device), 0);
    assert_int_equal(device_thread_start(&rig->backend, rig->device, rig->done_fd, &rig->thread), 0);
}

static void close_rig(struct rig *rig) {
    device_thread_stop(rig->thread);
    rig->backend.close(rig->device);
    close(rig->done_fd);
}

static uint64_t wait_done(struct rig *rig) {
    uint64_t n = 0;

    assert_int_equal(read(rig->done_fd, &n, sizeof n), sizeof n);
    return n;
}

/* a += 1 by way of copies: b := next of a's values. Each work copies one value on. */
struct chain {
    int32_t values[N + 1];
    struct device_copy before[DEVICE_PLANS_MAX], between[DEVICE_PLANS_MAX];
    int32_t half[DEVICE_PLANS_MAX];
    struct device_work work[DEVICE_PLANS_MAX];
};

static struct device_work *link_of(struct chain *chain, int i) {
    int k = i % DEVICE_PLANS_MAX;

    chain->before[k] = (struct device_copy){&chain->half[k], &chain->values[i], sizeof(int32_t)};
    chain->between[k] = (struct device_copy){&chain->values[i + 1], &chain->half[k], sizeof(int32_t)};
    chain->work[k] =
        (struct device_work){.before = {&chain->before[k], 1, 1}, .between = {&chain->between[k], 1, 1}, .error = 77};
    return &chain->work[k];
}

static void run_chain(uint64_t delay_seed, int n) {
    static struct chain chain;
    struct rig rig;
    int n_sent = 0, n_done = 0;

    memset(&chain, 0, sizeof chain);
    chain.values[0] = 4711;
    open_rig(&rig, delay_seed);
    while (n_done < n) {
        while (n_sent < n && n_sent - n_done < DEVICE_PLANS_MAX)
            device_thread_submit(rig.thread, link_of(&chain, n_sent++));
        for (uint64_t done = wait_done(&rig); done > 0; done--) {
            assert_int_equal(chain.work[n_done % DEVICE_PLANS_MAX].error, 0);
            n_done++;
            assert_int_equal(chain.values[n_done], 4711); /* what is reported done is done */
        }
        assert_true(n_done <= n_sent);
    }
    close_rig(&rig);
}

static void work_is_done_in_order_and_reported_after_it(void **state) {
    (void)state;
    run_chain(0, N);
}

static void late_streams_change_nothing(void **state) {
    (void)state;
    run_chain(99, N / 10);
}

static void stopping_waits_for_what_was_submitted(void **state) {
    static struct chain chain;
    struct rig rig;

    (void)state;
    memset(&chain, 0, sizeof chain);
    chain.values[0] = 4711;
    open_rig(&rig, 5);
    device_thread_submit(rig.thread, link_of(&chain, 0));
    device_thread_submit(rig.thread, link_of(&chain, 1));
    close_rig(&rig);
    assert_int_equal(chain.values[2], 4711);
}

static void work_that_is_not_enqueued_whole_says_so(void **state) {
    static struct chain chain;
    struct rig rig;

    (void)state;
    memset(&chain, 0, sizeof chain);
    open_rig(&rig, 0);
    n_copies_left = 3;
    device_thread_submit(rig.thread, link_of(&chain, 0));
    device_thread_submit(rig.thread, link_of(&chain, 1));
    for (uint64_t done = 0; done < 2;)
        done += wait_done(&rig);
    assert_int_equal(chain.work[0].error, 0);
    assert_int_equal(chain.work[1].error, -EIO);
    close_rig(&rig);
}

static void a_device_that_reports_nothing_any_more_is_reported(void **state) {
    static struct chain chain;
    struct rig rig;

    (void)state;
    memset(&chain, 0, sizeof chain);
    open_rig(&rig, 0);
    records_fail = true;
    device_thread_submit(rig.thread, link_of(&chain, 0));
    assert_int_equal(wait_done(&rig), 1);
    assert_int_equal(chain.work[0].error, -ENODEV);
    close_rig(&rig);
}

static void without_work_it_does_nothing(void **state) {
    struct rig rig;
    struct pollfd pollfd;

    (void)state;
    open_rig(&rig, 0);
    pollfd = (struct pollfd){.fd = rig.done_fd, .events = POLLIN};
    assert_int_equal(poll(&pollfd, 1, 5), 0);
    close_rig(&rig);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(work_is_done_in_order_and_reported_after_it),
        cmocka_unit_test(late_streams_change_nothing),
        cmocka_unit_test(stopping_waits_for_what_was_submitted),
        cmocka_unit_test(work_that_is_not_enqueued_whole_says_so),
        cmocka_unit_test(a_device_that_reports_nothing_any_more_is_reported),
        cmocka_unit_test(without_work_it_does_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
