/* Workers, streams, events, programs of the CPU backend, also with every item delayed at random. */
#include "cpu_rig.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

static const struct backend *const cpu = &backend_cpu;

static void wait_for(struct stream *stream) {
    assert_int_equal(backend_stream_wait(cpu, stream), 0);
}

/* ---- memory ------------------------------------------------------------------------------------------------------- */

/* VmFlags of the mapping with this address. */
static void read_flags(const void *address, char ret_flags[512]) {
    FILE *smaps = fopen("/proc/self/smaps", "r");
    unsigned long begin, end;
    bool is_it = false;
    char line[512];

    assert_non_null(smaps);
    ret_flags[0] = '\0';
    while (ret_flags[0] == '\0' && fgets(line, sizeof line, smaps)) {
        if (sscanf(line, "%lx-%lx ", &begin, &end) == 2)
            is_it = begin <= (uintptr_t)address && (uintptr_t)address < end;
        else if (is_it && strncmp(line, "VmFlags:", 8) == 0)
            strcpy(ret_flags, line + 8); /* NOLINT: as large */
    }
    fclose(smaps);
}

static void what_users_wrote_is_in_no_core_dump(void **state) {
    enum { BYTES = 8 << 20 };
    struct device *device;
    char flags[512];

    (void)state;
    assert_int_equal(cpu->open(&(struct backend_options){.n_threads = 1}, &device), 0);
    for (enum mem_kind kind = MEM_DEVICE; kind <= MEM_HOST; kind++) {
        char *memory;

        assert_int_equal(cpu->mem_alloc(device, kind, BYTES, (void **)&memory), 0);
        read_flags(memory, flags);
        assert_non_null(strstr(flags, " dd"));
        read_flags(memory + BYTES - 1, flags);
        assert_non_null(strstr(flags, " dd"));
        cpu->mem_free(device, kind, memory, BYTES);
    }
    cpu->close(device);
}

/* ---- workers ------------------------------------------------------------------------------------------------------ */

enum { N_WORKERS = 5 };

struct tally {
    struct device *device;
    int n_calls[N_WORKERS]; /* by worker: plain ints, so that a missing barrier is a race */
    int n_workers;
};

static void count_call(void *arg, int worker, int n_workers) {
    struct tally *tally = arg;

    tally->n_calls[worker]++;
    if (worker == 0)
        tally->n_workers = n_workers;
}

static void run_500_tasks(void *arg) {
    struct tally *tally = arg;

    for (int i = 0; i < 500; i++) {
        if (i % 100 == 99) /* long enough for the workers to fall asleep */
            nanosleep(&(struct timespec){.tv_nsec = 500 * 1000}, NULL);
        cpu_parallel(tally->device, count_call, tally);
        for (int w = 0; w < tally->n_workers; w++)
            assert_int_equal(tally->n_calls[w], i + 1);
    }
}

static void every_worker_runs_every_task_once(void **state) {
    (void)state;
    for (int n = 1; n <= N_WORKERS; n++) {
        struct rig rig = rig_open(&(struct backend_options){.n_threads = n});
        struct tally tally = {.device = rig.device};

        cpu_queue_call(rig.device->queue, run_500_tasks, &tally);
        assert_int_equal(tally.n_workers, n);
        assert_int_equal(cpu->caps(rig.device)->n_threads, n);
        rig_close(&rig);
    }
}

static void shares_cover_a_range_once_in_whole_grains(void **state) {
    static const int grains[] = {1, 2, 16};

    (void)state;
    for (int n = 0; n < 100; n++)
        for (int n_workers = 1; n_workers < 8; n_workers++)
            for (size_t g = 0; g < ARRAY_LEN(grains); g++) {
                int at = 0;

                for (int w = 0; w < n_workers; w++) {
                    struct cpu_range range = cpu_share(n, grains[g], w, n_workers);

                    assert_int_equal(range.begin, at);
                    assert_true(range.end >= range.begin);
                    assert_true(range.begin % grains[g] == 0 || range.begin == n);
                    at = range.end;
                }
                assert_int_equal(at, n);
            }
}

static double cpu_seconds(void) {
    struct rusage usage;

    getrusage(RUSAGE_SELF, &usage);
    return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
           1e-6 * (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

static void an_idle_device_uses_no_cpu(void **state) {
    struct rig rig = rig_open(&(struct backend_options){.n_threads = 3});
    struct tally tally = {.device = rig.device};
    double before;

    (void)state;
    cpu_queue_call(rig.device->queue, run_500_tasks, &tally);
    nanosleep(&(struct timespec){.tv_nsec = 20 * 1000 * 1000}, NULL); /* past the spinning */
    before = cpu_seconds();
    nanosleep(&(struct timespec){.tv_nsec = 200 * 1000 * 1000}, NULL);
    assert_true(cpu_seconds() - before < 0.010);
    rig_close(&rig);
}

/* ---- streams: the ops of these programs use atomics, so that a missing wait is a wrong value and not undefined ------- */

struct move_args { /* dst := src */
    atomic_int *dst, *src;
};

static void run_move(struct device *device, const void *args, void *scratch) {
    const struct move_args *move = args;

    (void)device;
    (void)scratch;
    atomic_store(move->dst, atomic_load(move->src));
}

static struct program *record_move(struct device *device, atomic_int *dst, atomic_int *src) {
    struct program *program;

    assert_int_equal(cpu->program_begin(device, &program), 0);
    assert_int_equal(cpu_program_add(program, run_move, &(struct move_args){dst, src}, sizeof(struct move_args), 0), 0);
    assert_int_equal(cpu->program_end(program), 0);
    return program;
}

static int count_wrong_values(bool with_wait, uint64_t seed) {
    enum { N_ROUNDS = 60 };
    struct device *device;
    struct stream *first, *second;
    struct event *event;
    atomic_int a = 0, b = 0, c = 0;
    struct program *to_b, *to_c;
    int n_wrong = 0;

    assert_int_equal(cpu->open(&(struct backend_options){.n_threads = 1, .delay_seed = seed}, &device), 0);
    assert_int_equal(cpu->stream_open(device, STREAM_COMPUTE, &first), 0);
    assert_int_equal(cpu->stream_open(device, STREAM_AUX, &second), 0);
    assert_int_equal(cpu->event_new(device, &event), 0);
    to_b = record_move(device, &b, &a);
    to_c = record_move(device, &c, &b);
    for (int i = 1; i <= N_ROUNDS; i++) {
        atomic_store(&a, i);
        assert_int_equal(cpu->program_run(first, to_b), 0);
        assert_int_equal(cpu->event_record(first, event), 0);
        if (with_wait)
            assert_int_equal(cpu->event_wait(second, event), 0);
        assert_int_equal(cpu->program_run(second, to_c), 0);
        wait_for(second);
        wait_for(first);
        n_wrong += atomic_load(&c) != i;
    }
    cpu->program_free(to_b);
    cpu->program_free(to_c);
    cpu->event_free(event);
    cpu->stream_close(first);
    cpu->stream_close(second);
    cpu->close(device);
    return n_wrong;
}

static void delays_show_a_missing_wait_and_spare_a_right_one(void **state) {
    (void)state;
    assert_true(count_wrong_values(false, 1) > 0);
    assert_int_equal(count_wrong_values(true, 1), 0);
    assert_int_equal(count_wrong_values(true, 0), 0);
}

static void run_block(struct device *device, const void *args, void *scratch) { /* until the test lets go */
    atomic_int *const *gate = args;

    (void)device;
    (void)scratch;
    while (atomic_load(*gate) == 0)
        nanosleep(&(struct timespec){.tv_nsec = 100 * 1000}, NULL);
}

static void copies_run_beside_a_busy_compute_thread(void **state) {
    struct rig rig = rig_open(&(struct backend_options){.n_threads = 1});
    struct stream *load;
    struct program *program;
    atomic_int gate = 0, *gate_ptr = &gate;
    int src = 7, dst = 0;

    (void)state;
    assert_int_equal(cpu->stream_open(rig.device, STREAM_LOAD, &load), 0);
    assert_int_equal(cpu->program_begin(rig.device, &program), 0);
    assert_int_equal(cpu_program_add(program, run_block, &gate_ptr, sizeof gate_ptr, 0), 0);
    assert_int_equal(cpu->program_end(program), 0);
    assert_int_equal(cpu->program_run(rig.stream, program), 0);
    assert_int_equal(cpu->copy(load, &dst, &src, sizeof dst), 0);
    wait_for(load);
    assert_int_equal(dst, 7);
    atomic_store(&gate, 1);
    wait_for(rig.stream);
    cpu->program_free(program);
    cpu->stream_close(load);
    rig_close(&rig);
}

/* A wait means the latest record made before it: a later record of the same event does not move it. */
static void a_wait_is_for_the_latest_record_made_before_it(void **state) {
    struct rig rig = rig_open(&(struct backend_options){.n_threads = 1});
    struct stream *store;
    struct event *event, *never;
    struct program *program;
    atomic_int gate = 0, *gate_ptr = &gate;

    (void)state;
    assert_int_equal(cpu->stream_open(rig.device, STREAM_STORE, &store), 0);
    assert_int_equal(cpu->event_new(rig.device, &event), 0);
    assert_int_equal(cpu->event_new(rig.device, &never), 0);
    assert_int_equal(cpu->program_begin(rig.device, &program), 0);
    assert_int_equal(cpu_program_add(program, run_block, &gate_ptr, sizeof gate_ptr, 0), 0);
    assert_int_equal(cpu->program_end(program), 0);

    assert_int_equal(cpu->event_wait(store, never), 0); /* never recorded: no wait */
    wait_for(store);
    assert_int_equal(cpu->event_record(rig.stream, event), 0); /* nothing before it: done at once */
    assert_int_equal(cpu->event_wait(store, event), 0);
    assert_int_equal(cpu->program_run(rig.stream, program), 0);
    assert_int_equal(cpu->event_record(rig.stream, event), 0); /* behind the blocked program */
    wait_for(store);                                           /* does not hang */
    assert_int_equal(cpu->event_wait(store, event), 0);
    cpu->event_free(event); /* an event may go while a wait is pending */
    cpu->event_free(never);
    atomic_store(&gate, 1);
    wait_for(store);
    wait_for(rig.stream);
    cpu->program_free(program);
    cpu->stream_close(store);
    rig_close(&rig);
}

static void a_wait_that_comes_too_early_is_counted_once(void **state) {
    struct rig rig = rig_open(&(struct backend_options){.n_threads = 1});
    struct stream *store;
    struct event *event;
    struct program *program;
    atomic_int gate = 0, *gate_ptr = &gate;
    uint64_t n_late = 0;

    (void)state;
    assert_int_equal(cpu->stream_open(rig.device, STREAM_STORE, &store), 0);
    assert_int_equal(cpu->event_new(rig.device, &event), 0);
    assert_int_equal(cpu->program_begin(rig.device, &program), 0);
    assert_int_equal(cpu_program_add(program, run_block, &gate_ptr, sizeof gate_ptr, 0), 0);
    assert_int_equal(cpu->program_end(program), 0);

    assert_int_equal(cpu->event_record(rig.stream, event), 0); /* nothing before it: done at once */
    assert_int_equal(cpu->event_wait_counted(store, event, &n_late), 0);
    wait_for(store);
    assert_int_equal(__atomic_load_n(&n_late, __ATOMIC_RELAXED), 0);
    assert_int_equal(cpu->program_run(rig.stream, program), 0);
    assert_int_equal(cpu->event_record(rig.stream, event), 0);
    assert_int_equal(cpu->event_wait_counted(store, event, &n_late), 0);
    while (__atomic_load_n(&n_late, __ATOMIC_RELAXED) == 0)
        usleep(100);
    atomic_store(&gate, 1);
    wait_for(store);
    wait_for(rig.stream);
    assert_int_equal(__atomic_load_n(&n_late, __ATOMIC_RELAXED), 1);
    cpu->event_free(event);
    cpu->program_free(program);
    cpu->stream_close(store);
    rig_close(&rig);
}

static void long_copies_are_whole_and_notify_counts(void **state) {
    enum { BYTES = 5 * 1000 * 1000 + 3, N_COPIES = 3 };
    struct rig rig = rig_open(&(struct backend_options){.n_threads = 1, .delay_seed = 5});
    struct stream *load, *store, *notify;
    struct event *event;
    char *src, *dst, *back;
    uint64_t count;
    int fd = eventfd(0, 0);

    (void)state;
    assert_int_equal(cpu->mem_alloc(rig.device, MEM_HOST, BYTES, (void **)&src), 0);
    assert_int_equal(cpu->mem_alloc(rig.device, MEM_DEVICE, BYTES, (void **)&dst), 0);
    assert_int_equal(cpu->mem_alloc(rig.device, MEM_HOST, BYTES, (void **)&back), 0);
    assert_int_equal((uintptr_t)dst % 64, 0);
    for (int i = 0; i < BYTES; i++) {
        assert_int_equal(dst[i], 0);
        src[i] = (char)(i * 31);
    }
    assert_int_equal(cpu->stream_open(rig.device, STREAM_LOAD, &load), 0);
    assert_int_equal(cpu->stream_open(rig.device, STREAM_STORE, &store), 0);
    assert_int_equal(cpu->stream_open(rig.device, STREAM_NOTIFY, &notify), 0);
    assert_int_equal(cpu->event_new(rig.device, &event), 0);
    for (int i = 0; i < N_COPIES; i++) {
        assert_int_equal(cpu->copy(load, dst, src, BYTES), 0);
        assert_int_equal(cpu->event_record(load, event), 0);
        assert_int_equal(cpu->event_wait(store, event), 0);
        assert_int_equal(cpu->copy(store, back, dst, BYTES), 0);
        assert_int_equal(cpu->event_record(store, event), 0);
        assert_int_equal(cpu->event_wait(load, event), 0); /* before the next round writes dst */
        assert_int_equal(cpu->event_wait(notify, event), 0);
        assert_int_equal(cpu->notify(notify, fd), 0);
    }
    assert_int_equal(cpu->copy(load, NULL, NULL, 0), 0);
    for (uint64_t n = 0; n < N_COPIES; n += count)
        assert_int_equal(read(fd, &count, sizeof count), sizeof count);
    assert_memory_equal(back, src, BYTES);
    assert_int_equal(cpu->copy(notify, dst, src, 1), -EINVAL);
    close(fd);
    cpu->event_free(event);
    cpu->stream_close(load);
    cpu->stream_close(store);
    cpu->stream_close(notify);
    cpu->mem_free(rig.device, MEM_HOST, src, BYTES);
    cpu->mem_free(rig.device, MEM_DEVICE, dst, BYTES);
    cpu->mem_free(rig.device, MEM_HOST, back, BYTES);
    rig_close(&rig);
}

static void a_full_stream_makes_the_caller_wait_and_loses_nothing(void **state) {
    enum { N = 10000 };
    struct rig rig = rig_open(&(struct backend_options){.n_threads = 1});
    struct stream *load;
    static int src[N], dst[N];

    (void)state;
    assert_int_equal(cpu->stream_open(rig.device, STREAM_LOAD, &load), 0);
    for (int i = 0; i < N; i++) {
        src[i] = i + 1;
        assert_int_equal(cpu->copy(load, &dst[i], &src[i], sizeof src[i]), 0);
    }
    wait_for(load);
    assert_memory_equal(dst, src, sizeof src);
    cpu->stream_close(load);
    rig_close(&rig);
}

static void streams_can_be_opened_again_and_again(void **state) {
    struct rig rig = rig_open(&(struct backend_options){.n_threads = 1});
    struct event *event;

    (void)state;
    assert_int_equal(cpu->event_new(rig.device, &event), 0);
    for (int i = 0; i < 200; i++) {
        struct stream *stream;
        int src = i, dst = -1;

        assert_int_equal(cpu->stream_open(rig.device, STREAM_LOAD, &stream), 0);
        assert_int_equal(cpu->event_wait(stream, event), 0); /* recorded on a stream that is closed by now */
        assert_int_equal(cpu->copy(stream, &dst, &src, sizeof dst), 0);
        assert_int_equal(cpu->event_record(stream, event), 0);
        cpu->stream_close(stream);
        assert_int_equal(dst, i);
    }
    cpu->event_free(event);
    rig_close(&rig);
}

/* ---- programs ----------------------------------------------------------------------------------------------------- */

struct append_args {
    const struct batch *batch;
    int digit;
    int *log;
};

static void run_append(struct device *device, const void *args, void *scratch) {
    const struct append_args *append = args;
    char *bytes = scratch;

    (void)device;
    assert_int_equal((uintptr_t)scratch % 64, 0);
    memset(bytes, append->digit, (size_t)append->digit * 1000); /* all it asked for */
    *append->log = *append->log * 10 + append->digit + *append->batch->n_rows;
}

static void a_program_replays_copies_of_its_arguments(void **state) {
    struct rig rig = rig_open(&(struct backend_options){.n_threads = 2});
    struct program *program;
    int log = 0;
    int32_t n_rows = 0;

    (void)state;
    assert_int_equal(cpu->program_begin(rig.device, &program), 0);
    assert_int_equal(cpu->program_run(rig.stream, program), -EINVAL); /* not ended */
    assert_null(cpu_program_keep(program, NULL, 8));
    for (int i = 1; i <= 3; i++) {
        struct batch batch = {.n_rows = &n_rows};
        struct append_args args = {cpu_program_keep(program, &batch, sizeof batch), i, &log};

        assert_int_equal(cpu_program_add(program, run_append, &args, sizeof args, (size_t)i * 1000), 0);
        assert_int_equal(cpu->program_cut(program), 0);
        assert_int_equal(cpu->program_join(program), 0);
        memset(&args, 0xee, sizeof args);
        memset(&batch, 0xee, sizeof batch);
    }
    for (int i = 0; i < 2000; i++) { /* more than one block of copies */
        const int *copy = cpu_program_keep(program, &i, sizeof i);

        assert_int_equal(*copy, i);
    }
    assert_int_equal(cpu->program_end(program), 0);
    assert_int_equal(cpu->program_end(program), -EINVAL);
    assert_int_equal(cpu->program_cut(program), -EINVAL);
    assert_int_equal(cpu->program_run(rig.stream, program), 0);
    wait_for(rig.stream);
    assert_int_equal(log, 123);
    n_rows = 1; /* read at each run */
    log = 0;
    assert_int_equal(cpu->program_run(rig.stream, program), 0);
    wait_for(rig.stream);
    assert_int_equal(log, 234);
    cpu->program_free(program);
    rig_close(&rig);
}

static void parts_of_a_program_run_alone(void **state) {
    struct rig rig = rig_open(&(struct backend_options){.n_threads = 1});
    struct program *program;
    int log = 0;
    int32_t n_rows = 0;

    (void)state;
    assert_int_equal(cpu->program_begin(rig.device, &program), 0);
    for (int i = 1; i <= 4; i++) { /* parts: 1 2, nothing, 3, 4 */
        struct batch batch = {.n_rows = &n_rows};
        struct append_args args = {cpu_program_keep(program, &batch, sizeof batch), i, &log};

        for (int n_cuts = i == 3 ? 2 : i == 4; n_cuts > 0; n_cuts--)
            assert_int_equal(cpu->program_cut(program), 0);
        assert_int_equal(cpu_program_add(program, run_append, &args, sizeof args, (size_t)i * 1000), 0);
    }
    assert_int_equal(cpu->program_run_part(rig.stream, program, 0), -EINVAL); /* not ended */
    assert_int_equal(cpu->program_end(program), 0);
    for (int part = 3; part >= 0; part--)
        assert_int_equal(cpu->program_run_part(rig.stream, program, part), 0);
    assert_int_equal(cpu->program_run_part(rig.stream, program, 4), -EINVAL);
    assert_int_equal(cpu->program_run_part(rig.stream, program, -1), -EINVAL);
    wait_for(rig.stream);
    assert_int_equal(log, 4312);
    log = 0;
    assert_int_equal(cpu->program_run(rig.stream, program), 0);
    wait_for(rig.stream);
    assert_int_equal(log, 1234);
    cpu->program_free(program);
    rig_close(&rig);
}

static void programs_run_on_compute_and_aux_only(void **state) {
    struct rig rig = rig_open(&(struct backend_options){.n_threads = 1});
    atomic_int a = 3, b = 0;
    struct program *program = record_move(rig.device, &b, &a);
    struct stream *stream;

    (void)state;
    for (int kind = 0; kind < STREAM_KIND_N; kind++) {
        bool is_fit = kind == STREAM_COMPUTE || kind == STREAM_AUX;

        assert_int_equal(cpu->stream_open(rig.device, (enum stream_kind)kind, &stream), 0);
        assert_int_equal(cpu->program_run(stream, program), is_fit ? 0 : -EINVAL);
        cpu->stream_close(stream);
    }
    assert_int_equal(atomic_load(&b), 3);
    assert_int_equal(cpu->stream_open(rig.device, STREAM_KIND_N, &stream), -EINVAL);
    cpu->program_free(program);
    rig_close(&rig);
}

static void a_device_says_what_it_is(void **state) {
    struct device *device;

    (void)state;
    assert_ptr_equal(backend_find("cpu"), cpu);
    assert_int_equal(cpu->open(&(struct backend_options){.isa = "z80"}, &device), -EINVAL);
    assert_int_equal(cpu->open(&(struct backend_options){.n_threads = -1}, &device), -EINVAL);
    assert_int_equal(cpu->open(&(struct backend_options){.isa = "scalar"}, &device), 0);
    assert_string_equal(cpu->caps(device)->kernel_path, "cpu-scalar-fast");
    assert_int_equal(cpu->caps(device)->act_dtype, DTYPE_F32);
    assert_int_equal(cpu->caps(device)->conv_dtype, DTYPE_BF16);
    assert_true(cpu->caps(device)->n_threads >= 1);
    assert_int_equal(cpu->status(device), 0);
    cpu->close(device);
    assert_int_equal(cpu->open(&(struct backend_options){.numeric = NUMERIC_REFERENCE}, &device), 0);
    assert_string_equal(cpu->caps(device)->kernel_path, "cpu-plain-reference");
    assert_int_equal(cpu->caps(device)->conv_dtype, DTYPE_F32);
    cpu->close(device);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_users_wrote_is_in_no_core_dump),
        cmocka_unit_test(every_worker_runs_every_task_once),
        cmocka_unit_test(shares_cover_a_range_once_in_whole_grains),
        cmocka_unit_test(an_idle_device_uses_no_cpu),
        cmocka_unit_test(delays_show_a_missing_wait_and_spare_a_right_one),
        cmocka_unit_test(copies_run_beside_a_busy_compute_thread),
        cmocka_unit_test(a_wait_is_for_the_latest_record_made_before_it),
        cmocka_unit_test(a_wait_that_comes_too_early_is_counted_once),
        cmocka_unit_test(long_copies_are_whole_and_notify_counts),
        cmocka_unit_test(a_full_stream_makes_the_caller_wait_and_loses_nothing),
        cmocka_unit_test(streams_can_be_opened_again_and_again),
        cmocka_unit_test(a_program_replays_copies_of_its_arguments),
        cmocka_unit_test(parts_of_a_program_run_alone),
        cmocka_unit_test(programs_run_on_compute_and_aux_only),
        cmocka_unit_test(a_device_says_what_it_is),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
