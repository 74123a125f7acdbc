/* workers: threads that run one task together. Worker 0 is the caller; the others wait for the next epoch, at first
 * spinning (the next task of a pass comes within microseconds), then asleep on a futex, so that an idle process uses no
 * CPU. Knows nothing of streams or ops. */
#include "device.h"

#include <assert.h>
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum {
    SPIN_NS = 40 * 1000, /* longer than the gap between two ops of a pass, far below a scheduler tick */
    SPIN_PAUSES = 32,    /* pauses between two looks at the clock */
    N_WORKERS_MAX = 1024,
};

struct worker {
    struct cpu_workers *workers;
    pthread_t thread;
    int idx;
};

struct cpu_workers {
    int n;
    int *cpus;             /* [n] the CPU of each worker, or NULL: the scheduler decides */
    struct worker *worker; /* [n]; entry 0 has no thread of its own */
    int n_started;

    _Alignas(64) atomic_uint epoch; /* futex; a new value is a new task */
    atomic_int n_sleeping;
    bool stop;
    cpu_task_fn *fn;
    void *arg;

    _Alignas(64) atomic_uint n_left; /* futex; workers still at the task */
    atomic_int caller_sleeping;
};

static void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static int64_t now_ns(void) {
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Returns once *word differs from `seen`. A sleeper first counts itself in n_sleeping, then looks again; whoever changes
 * the word first changes it, then reads n_sleeping: one of the two sees the other. */
static void await_change(atomic_uint *word, unsigned seen, atomic_int *n_sleeping) {
    int64_t deadline = 0;

    for (;;) {
        for (int i = 0; i < SPIN_PAUSES; i++) {
            if (atomic_load_explicit(word, memory_order_acquire) != seen)
                return;
            relax();
        }
        if (deadline == 0)
            deadline = now_ns() + SPIN_NS;
        else if (now_ns() > deadline)
            break;
    }
    atomic_fetch_add(n_sleeping, 1);
    while (atomic_load(word) == seen)
        syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
    atomic_fetch_sub(n_sleeping, 1);
}

static void wake(atomic_uint *word, atomic_int *n_sleeping) {
    if (atomic_load(n_sleeping) > 0)
        syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

static void *worker_main(void *arg) {
    struct worker *worker = arg;
    struct cpu_workers *workers = worker->workers;
    unsigned epoch = 0;
    char name[16];

    snprintf(name, sizeof name, "worker-%d", worker->idx);
    pthread_setname_np(pthread_self(), name);
    for (;;) {
        await_change(&workers->epoch, epoch, &workers->n_sleeping);
        epoch++;
        if (workers->stop)
            return NULL;
        workers->fn(workers->arg, worker->idx, workers->n);
        if (atomic_fetch_sub(&workers->n_left, 1) == 1)
            wake(&workers->n_left, &workers->caller_sleeping);
    }
}

void cpu_workers_run(struct cpu_workers *workers, cpu_task_fn *fn, void *arg) {
    unsigned left;

    if (workers->n == 1) {
        fn(arg, 0, 1);
        return;
    }
    workers->fn = fn;
    workers->arg = arg;
    atomic_store_explicit(&workers->n_left, (unsigned)workers->n - 1, memory_order_relaxed);
    atomic_fetch_add(&workers->epoch, 1);
    wake(&workers->epoch, &workers->n_sleeping);
    fn(arg, 0, workers->n);
    while ((left = atomic_load_explicit(&workers->n_left, memory_order_acquire)) != 0)
        await_change(&workers->n_left, left, &workers->caller_sleeping);
}

void cpu_parallel(struct device *device, cpu_task_fn *fn, void *arg) {
    cpu_workers_run(device->workers, fn, arg);
}

/* The lowest CPU number that shares a core with `cpu`; the CPU itself where the kernel does not say. */
static int first_sibling(int cpu) {
    char path[96];
    int first = cpu;
    FILE *f;

    snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", cpu);
    f = fopen(path, "re");
    if (f == NULL)
        return cpu;
    if (fscanf(f, "%d", &first) != 1)
        first = cpu;
    fclose(f);
    return first;
}

/* One CPU per physical core this process may run on. Returns their number. */
static int list_cores(int cpus[CPU_SETSIZE]) {
    static_assert(CPU_SETSIZE >= N_WORKERS_MAX, "one entry per worker");
    int siblings[CPU_SETSIZE];
    cpu_set_t set;
    int n = 0;

    if (sched_getaffinity(0, sizeof set, &set) != 0)
        return 0;
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        bool is_new = CPU_ISSET(cpu, &set);
        int first = is_new ? first_sibling(cpu) : 0;

        for (int i = 0; i < n && is_new; i++)
            is_new = siblings[i] != first;
        if (is_new) {
            siblings[n] = first;
            cpus[n++] = cpu;
        }
    }
    return n;
}

static void pin(pthread_t thread, int cpu) {
    cpu_set_t set;

    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    pthread_setaffinity_np(thread, sizeof set, &set); /* only speed depends on it */
}

void cpu_workers_enter(struct cpu_workers *workers) {
    if (workers->cpus != NULL)
        pin(pthread_self(), workers->cpus[0]);
}

int cpu_workers_count(const struct cpu_workers *workers) {
    return workers->n;
}

int cpu_workers_new(int n_threads, struct cpu_workers **ret_workers) {
    int cpus[CPU_SETSIZE];
    int n_cores = list_cores(cpus), r = 0;
    struct cpu_workers *workers;

    if (n_threads < 0 || n_threads > N_WORKERS_MAX)
        return -EINVAL;
    workers = aligned_alloc(64, sizeof *workers);
    if (workers == NULL)
        return -ENOMEM;
    *workers = (struct cpu_workers){.n = n_threads > 0 ? n_threads : max_int(n_cores, 1)};
    workers->worker = calloc((size_t)workers->n, sizeof *workers->worker);
    if (workers->worker == NULL)
        r = -ENOMEM;
    /* A few workers on a large machine are not pinned: two processes would pick the same cores. */
    if (r == 0 && workers->n <= n_cores && workers->n > n_cores / 2) {
        workers->cpus = calloc((size_t)workers->n, sizeof *workers->cpus);
        if (workers->cpus == NULL)
            r = -ENOMEM;
        for (int i = 0; r == 0 && i < workers->n; i++)
            workers->cpus[i] = cpus[i];
    }
    workers->n_started = 1;
    for (int i = 1; r == 0 && i < workers->n; i++) {
        struct worker *worker = &workers->worker[i];

        *worker = (struct worker){.workers = workers, .idx = i};
        r = -pthread_create(&worker->thread, NULL, worker_main, worker);
        if (r != 0)
            break;
        workers->n_started++;
        if (workers->cpus != NULL)
            pin(worker->thread, workers->cpus[i]);
    }
    if (r != 0) {
        cpu_workers_free(workers);
        return r;
    }
    *ret_workers = workers;
    return 0;
}

void cpu_workers_free(struct cpu_workers *workers) {
    if (workers == NULL)
        return;
    workers->stop = true;
    atomic_fetch_add(&workers->epoch, 1);
    wake(&workers->epoch, &workers->n_sleeping);
    for (int i = 1; i < workers->n_started; i++)
        pthread_join(workers->worker[i].thread, NULL);
    free(workers->worker);
    free(workers->cpus);
    free(workers);
}
