/* Memory that is short: the host tier gives some back in steps, what is needed stays, and it comes back when it is quiet. The
 * kernel's word is played by urgent data on a socket, which poll tells in the same way. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#include <uv.h>

#include "pressure.h"

enum { N_PAGES = 32, PAYLOAD = (1 << 20) - FORMAT_BLOCK_BYTES, QUIET_MS = 30, STEP = N_PAGES / PRESSURE_STEPS };

struct rig {
    uv_loop_t loop;
    const struct backend *backend;
    struct device *device;
    struct kv_shelf *shelf;
    struct pressure *pressure;
    int ours, theirs; /* ends of the connection */
    int n_changes;
};

static void on_change(void *user, const struct pressure_stats *stats) {
    struct rig *rig = user;

    rig->n_changes++;
    assert_int_equal(stats->is_short, rig->n_changes % 2 == 1);
}

static void connect_ends(struct rig *rig) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t n = sizeof address;
    int listening = socket(AF_INET, SOCK_STREAM, 0);

    assert_int_equal(bind(listening, (struct sockaddr *)&address, n), 0);
    assert_int_equal(getsockname(listening, (struct sockaddr *)&address, &n), 0);
    assert_int_equal(listen(listening, 1), 0);
    rig->ours = socket(AF_INET, SOCK_STREAM, 0);
    assert_int_equal(connect(rig->ours, (struct sockaddr *)&address, n), 0);
    rig->theirs = accept(listening, NULL, NULL);
    assert_true(rig->theirs >= 0);
    close(listening);
}

static void open_rig(struct rig *rig) {
    struct kv_shelf_options shelf = {.alignment = FORMAT_ALIGN_MIN};
    struct pressure_options options = {.loop = &rig->loop, .quiet_ms = QUIET_MS, .on_change = on_change, .user = rig};

    *rig = (struct rig){.backend = backend_find("cpu")};
    assert_int_equal(rig->backend->open(&(struct backend_options){.n_threads = 1}, &rig->device), 0);
    shelf.backend = rig->backend;
    shelf.device = rig->device;
    shelf.group[KV_TARGET_FULL].payload_bytes = PAYLOAD;
    shelf.group[KV_TARGET_FULL].n_slots = N_PAGES;
    assert_int_equal(kv_shelf_open(&shelf, &rig->shelf), 0);
    assert_int_equal(uv_loop_init(&rig->loop), 0);
    connect_ends(rig);
    options.fd = rig->ours;
    options.shelf = rig->shelf;
    assert_int_equal(pressure_start(&options, &rig->pressure), 0);
}

static void close_rig(struct rig *rig) {
    pressure_stop(rig->pressure);
    uv_run(&rig->loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&rig->loop), 0);
    close(rig->theirs);
    assert_null(kv_shelf_check(rig->shelf));
    kv_shelf_close(rig->shelf);
    rig->backend->close(rig->device);
}

static struct pressure_stats look(const struct rig *rig) {
    struct pressure_stats stats;

    pressure_stats(rig->pressure, &stats);
    return stats;
}

static struct kv_shelf_group_stats pages(const struct rig *rig) {
    struct kv_shelf_group_stats stats;

    kv_shelf_stats(rig->shelf, KV_TARGET_FULL, &stats);
    return stats;
}

static void be_short_of_memory(struct rig *rig) {
    uint64_t n = look(rig).n_events;
    char c;

    assert_int_equal(send(rig->theirs, "!", 1, MSG_OOB), 1);
    while (look(rig).n_events == n)
        uv_run(&rig->loop, UV_RUN_ONCE);
    while (recv(rig->ours, &c, 1, MSG_OOB) != 1)
        assert_true(errno == EAGAIN || errno == EINVAL);
    assert_null(kv_shelf_check(rig->shelf));
}

static uint32_t fill(struct rig *rig, int which) {
    int32_t tokens[PAGE_TOKENS] = {which};
    struct kv_page_name name = {.key.bytes = {(uint8_t)which}, .page_idx = (uint32_t)which, .tokens = tokens};
    uint32_t record;
    void *payload;

    assert_int_equal(kv_shelf_reserve(rig->shelf, &name, KV_TARGET_FULL, &record, &payload), 0);
    memset(payload, which + 1, PAYLOAD);
    kv_shelf_filled(rig->shelf, record, KV_TARGET_FULL, 1);
    return record;
}

static bool is_there(const struct rig *rig, int which) {
    int32_t tokens[PAGE_TOKENS] = {which};
    struct kv_page_name name = {.key.bytes = {(uint8_t)which}, .page_idx = (uint32_t)which, .tokens = tokens};
    uint32_t record = kv_shelf_find(rig->shelf, &name);
    const char *payload;

    if (!kv_shelf_has(rig->shelf, record, KV_TARGET_FULL))
        return false;
    payload = kv_shelf_pin(rig->shelf, record, KV_TARGET_FULL);
    assert_int_equal(payload[0], which + 1);
    assert_memory_equal(payload, payload + 1, PAYLOAD - 1);
    kv_shelf_unpin(rig->shelf, record, KV_TARGET_FULL);
    return true;
}

static long resident_mib(void) {
    FILE *file = fopen("/proc/self/statm", "r");
    long all, resident;

    assert_int_equal(fscanf(file, "%ld %ld", &all, &resident), 2);
    fclose(file);
    return resident * sysconf(_SC_PAGESIZE) >> 20;
}

static void memory_goes_in_steps_down_to_half_and_comes_back_when_it_is_quiet(void **state) {
    struct rig rig;
    long before;

    (void)state;
    open_rig(&rig);
    for (int i = 0; i < N_PAGES - 2; i++)
        fill(&rig, i);
    before = resident_mib();
    for (int n = 1; n <= PRESSURE_STEPS / 2; n++) {
        be_short_of_memory(&rig);
        assert_int_equal(pages(&rig).n_away, n * STEP);
        assert_int_equal(look(&rig).given_bytes, (uint64_t)n * STEP << 20);
    }
    be_short_of_memory(&rig);
    assert_int_equal(pages(&rig).n_away, N_PAGES / 2);
    assert_int_equal(pages(&rig).n_free, 0);
    assert_int_equal(look(&rig).n_gave_none, 1);
    assert_int_equal(rig.n_changes, 1);
    assert_true(before - resident_mib() >= N_PAGES / 2 - 3); /* two of them had never been used */
    for (int i = 0; i < N_PAGES - 2; i++)                    /* the longest unused went */
        assert_int_equal(is_there(&rig, i), i >= N_PAGES / 2 - 2);
    while (look(&rig).is_short)
        uv_run(&rig.loop, UV_RUN_ONCE);
    assert_int_equal(rig.n_changes, 2);
    assert_int_equal(pages(&rig).n_away, 0);
    assert_int_equal(look(&rig).away_bytes, 0);
    for (int i = 0; i < N_PAGES / 2; i++)
        fill(&rig, 100 + i);
    assert_int_equal(pages(&rig).n_clean, N_PAGES);
    assert_true(is_there(&rig, 100) && is_there(&rig, N_PAGES - 3));
    close_rig(&rig);
}

static void pressure_that_goes_on_keeps_it_away(void **state) {
    struct rig rig;
    uint64_t end;

    (void)state;
    open_rig(&rig);
    be_short_of_memory(&rig);
    end = uv_now(&rig.loop) + 3 * QUIET_MS;
    while (uv_now(&rig.loop) < end) {
        usleep(QUIET_MS * 1000 / 5);
        be_short_of_memory(&rig);
        assert_true(look(&rig).is_short);
    }
    assert_int_equal(rig.n_changes, 1);
    close_rig(&rig); /* with memory away, and a timer that runs */
}

static void what_is_pinned_or_being_filled_stays(void **state) {
    static const int32_t tokens[PAGE_TOKENS] = {200};
    const struct kv_page_name name = {.key.bytes = {200}, .page_idx = 200, .tokens = tokens};
    uint32_t records[N_PAGES], filling;
    struct rig rig;
    void *payload;

    (void)state;
    open_rig(&rig);
    for (int i = 0; i < N_PAGES - 1; i++) {
        records[i] = fill(&rig, i);
        if (i != 5)
            kv_shelf_pin(rig.shelf, records[i], KV_TARGET_FULL);
    }
    assert_int_equal(kv_shelf_reserve(rig.shelf, &name, KV_TARGET_FULL, &filling, &payload), 0);
    be_short_of_memory(&rig);
    be_short_of_memory(&rig);
    assert_int_equal(pages(&rig).n_away, 1);
    assert_false(is_there(&rig, 5));
    kv_shelf_abandon(rig.shelf, filling, KV_TARGET_FULL);
    for (int i = 0; i < N_PAGES - 1; i++)
        if (i != 5)
            kv_shelf_unpin(rig.shelf, records[i], KV_TARGET_FULL);
    for (int i = 0; i < N_PAGES - 1; i++)
        assert_int_equal(is_there(&rig, i), i != 5);
    close_rig(&rig);
}

/* The kernel's own file takes the trigger, and is watched; others are refused, with a reason. */
static void the_kernel_is_asked_where_it_answers(void **state) {
    struct pressure_options options = {.quiet_ms = 1};
    struct pressure *pressure;
    char path[4200];
    uv_loop_t loop;
    int fd, r = pressure_path(path, sizeof path);

    (void)state;
    assert_int_equal(pressure_trigger("/nowhere/memory.pressure"), -ENOENT);
    assert_true(r == 0 || r == -ENOENT);
    fd = pressure_trigger(r == 0 ? path : "/proc/pressure/memory");
    if (fd < 0) {
        print_message("no trigger on memory pressure here: %s\n", strerror(-fd));
        skip();
    }
    assert_int_equal(uv_loop_init(&loop), 0);
    options.loop = &loop;
    options.fd = fd;
    assert_int_equal(pressure_start(&options, &pressure), 0);
    pressure_stop(pressure);
    uv_run(&loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&loop), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(memory_goes_in_steps_down_to_half_and_comes_back_when_it_is_quiet),
        cmocka_unit_test(pressure_that_goes_on_keeps_it_away),
        cmocka_unit_test(what_is_pinned_or_being_filled_stays),
        cmocka_unit_test(the_kernel_is_asked_where_it_answers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
