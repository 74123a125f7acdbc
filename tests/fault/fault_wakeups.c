/* A million operations come home, each with a wake-up, and any of the wake-ups is lost: all are taken, once, and none waits
 * longer than a second for that. */
#include "disk_queue.h"
#include "disk_rig.h"

#include <sys/eventfd.h>

enum { N_OPERATIONS = 1000000, LONGEST_US = 1000000, N_OUT_MAX = 64 };

/* Calls that are not made, and come home when the test says so. */
struct lossy {
    struct disk_queue queue;
    struct disk_queue *inner;
    uint64_t out[N_OUT_MAX], home[N_OUT_MAX];
    uint32_t n_out, n_home;
    uint64_t random, home_since_us, longest_us, n_lost, *now_us;
    int event_fd;
};

static uint32_t below(struct lossy *lossy, uint32_t n) {
    lossy->random = lossy->random * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((lossy->random >> 33) % n);
}

static int lossy_start(struct disk_queue *queue, const struct disk_request *request) {
    struct lossy *lossy = container_of(queue, struct lossy, queue);

    if (request->call == DISK_CALL_CREATE)
        return lossy->inner->table->start(lossy->inner, request);
    assert_true(lossy->n_out + lossy->n_home < N_OUT_MAX);
    lossy->out[lossy->n_out++] = request->id;
    return 0;
}

static bool lossy_reap(struct disk_queue *queue, uint64_t *ret_id, int *ret_result) {
    struct lossy *lossy = container_of(queue, struct lossy, queue);

    if (lossy->n_home == 0)
        return lossy->inner->table->reap(lossy->inner, ret_id, ret_result);
    *ret_id = lossy->home[--lossy->n_home];
    *ret_result = RIG_BUFFER_BYTES;
    if (lossy->n_home == 0 && *lossy->now_us - lossy->home_since_us > lossy->longest_us)
        lossy->longest_us = *lossy->now_us - lossy->home_since_us;
    return true;
}

static void lossy_cancel(struct disk_queue *queue, uint64_t id) {
    (void)queue, (void)id;
    fail_msg("nothing is cancelled");
}

static void lossy_set_file(struct disk_queue *queue, uint32_t segment, int fd) {
    (void)queue, (void)segment, (void)fd;
}

static void lossy_close(struct disk_queue *queue) {
    struct lossy *lossy = container_of(queue, struct lossy, queue);

    lossy->inner->table->close(lossy->inner);
}

static const struct disk_queue_table lossy_table = {
    .start = lossy_start,
    .cancel = lossy_cancel,
    .reap = lossy_reap,
    .set_file = lossy_set_file,
    .close = lossy_close,
};

static struct disk_queue *wrap(void *user, struct disk_queue *queue) {
    struct lossy *lossy = user;

    lossy->queue.table = &lossy_table;
    lossy->inner = queue;
    return &lossy->queue;
}

/* Some come home: of the wake-ups most are lost at times, and at others none. */
static void come_home(struct lossy *lossy) {
    uint32_t n_of_100_lost = below(lossy, 3) * 50;

    for (uint32_t n = below(lossy, lossy->n_out + 1); n > 0; n--) {
        uint32_t i = below(lossy, lossy->n_out);

        if (lossy->n_home == 0)
            lossy->home_since_us = *lossy->now_us;
        lossy->home[lossy->n_home++] = lossy->out[i];
        lossy->out[i] = lossy->out[--lossy->n_out];
        if (below(lossy, 100) < n_of_100_lost)
            lossy->n_lost++;
        else
            assert_int_equal(eventfd_write(lossy->event_fd, 1), 0);
    }
}

static void a_million_operations_come_home_though_wake_ups_are_lost(void **state) {
    static struct rig_op ops[N_OUT_MAX];
    struct lossy lossy = {.random = 5};
    struct disk_rig rig;
    struct disk_stats stats;
    uint64_t n_submitted = 0, n_ticks = 0, next_us = 0;

    (void)state;
    rig_make_folder(&rig, "/tmp");
    rig.options.n_ops_max = N_OUT_MAX;
    rig.options.deadline_us = 60 * (uint64_t)LONGEST_US;
    rig.options.no_ring = true;
    rig.options.wrap = wrap;
    rig.options.wrap_user = &lossy;
    lossy.now_us = &rig.now_us;
    rig_open_disk(&rig);
    lossy.event_fd = disk_fd(rig.disk);
    assert_int_equal(rig_do(&rig, rig_op(DISK_SEGMENT_ADD, 0)), 0);
    for (int i = 0; i < N_OUT_MAX; i++)
        ops[i] = rig_transfer(DISK_READ, 0, 0, rig_buffer(&rig, 0), RIG_BUFFER_BYTES);
    for (int i = 0; i < N_OUT_MAX; i++)
        ops[i].n_done = 1; /* at home */
    stats = rig_stats(&rig);
    while (stats.n_done[DISK_READ] < N_OPERATIONS) {
        struct pollfd pollfd = {.fd = lossy.event_fd, .events = POLLIN};

        for (int i = 0; i < N_OUT_MAX && n_submitted < N_OPERATIONS; i++)
            if (ops[i].n_done > 0) {
                ops[i].n_done = 0;
                rig_submit(&rig, &ops[i]);
                n_submitted++;
            }
        come_home(&lossy);
        if (poll(&pollfd, 1, 0) > 0) {
            disk_dispatch(rig.disk);
        } else if (next_us != 0 && rig.now_us >= next_us) {
            next_us = disk_tick(rig.disk, rig.now_us);
            n_ticks++;
        } else { /* the loop sleeps */
            next_us = next_us == 0 || next_us <= rig.now_us ? disk_send(rig.disk, rig.now_us) : next_us;
            rig.now_us += below(&lossy, LONGEST_US / 10);
            rig.now_us = next_us != 0 && next_us < rig.now_us ? next_us : rig.now_us;
        }
        stats = rig_stats(&rig);
        for (int i = 0; i < N_OUT_MAX; i++)
            assert_in_range(ops[i].n_done, 0, 1);
    }
    printf("%llu wake-ups lost, %llu ticks, the longest wait %llu us\n", (unsigned long long)lossy.n_lost,
           (unsigned long long)n_ticks, (unsigned long long)lossy.longest_us);
    assert_int_equal(stats.n_done[DISK_READ], N_OPERATIONS);
    assert_int_equal(stats.n_out + stats.n_unknown + stats.n_late, 0);
    assert_true(lossy.n_lost > N_OPERATIONS / 4 && n_ticks > 1000);
    assert_true(lossy.longest_us <= LONGEST_US);
    rig_free(&rig);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_million_operations_come_home_though_wake_ups_are_lost),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
