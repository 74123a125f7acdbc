#include "steady.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>

#include "backend.h"
#include "base.h"
#include "bench.h"
#include "keep.h"
#include "load.h"

enum { WINDOWS_MAX = 100, FILL_PROMPTS = 4, FILL_TOKENS = 2048, CONTEXT = 65536, TIMEOUT_MS = 60000 };

struct steady {
    struct keep keep;        /* its client writes */
    struct spillway *reader; /* of the tokens */
    struct load_samples window, idle, busy;
    double last; /* token, seconds */
    bool is_recording, is_writing, has_call, has_ended;
    double write_s;
    int error;
};

/* ---- tokens --------------------------------------------------------------------------------------------------------- */

static void write_endless(void *user, msgpack_packer *packer) {
    (void)user;
    msgpack_pack_map(packer, 5);
    spillway_put(packer, "prompt");
    spillway_put(packer, "Count from 1 to 1000.");
    spillway_put(packer, "max_tokens");
    msgpack_pack_int(packer, CONTEXT - 256);
    spillway_put(packer, "temperature");
    msgpack_pack_int(packer, 0);
    spillway_put(packer, "ignore_eos");
    msgpack_pack_true(packer);
    spillway_put(packer, "speculate");
    msgpack_pack_false(packer);
}

static bool on_event(void *user, const struct spillway_event *event) {
    struct steady *steady = user;
    double now = bench_now();

    if (event->type != SPILLWAY_EVENT_DELTA)
        return true;
    if (steady->is_recording && steady->last > 0 && load_add(&steady->window, now - steady->last) != 0)
        steady->error = -ENOMEM;
    steady->last = now;
    return true;
}

static void on_ended(void *user, int status, const msgpack_object *result, const struct spillway_error *error) {
    struct steady *steady = user;

    (void)result;
    steady->has_ended = true;
    if (status != 0)
        steady->error = talk_complain(error, status);
}

static int start_tokens(struct steady *steady) {
    struct spillway_handler handler = {.on_event = on_event, .on_done = on_ended, .user = steady};
    struct spillway_error error;
    int r = talk_connect(steady->keep.server.socket, &steady->reader);

    if (r == 0) {
        r = spillway_start(steady->reader, "gen.start", write_endless, NULL, &handler, NULL, &error);
        r = r == 0 ? 0 : talk_complain(&error, r);
    }
    return r;
}

/* ---- writing -------------------------------------------------------------------------------------------------------- */

static void write_disk(void *user, msgpack_packer *packer) {
    (void)user;
    msgpack_pack_map(packer, 2);
    spillway_put(packer, "tier");
    spillway_put(packer, "disk");
    spillway_put(packer, "all");
    msgpack_pack_true(packer);
}

static void start_call(struct steady *steady, const char *method, spillway_write_fn *write_params,
                       void (*on_done)(void *user, int status, const msgpack_object *result,
                                       const struct spillway_error *error)) {
    struct spillway_handler handler = {.on_done = on_done, .user = steady};
    struct spillway_error error;
    int r = spillway_start(steady->keep.client, method, write_params, NULL, &handler, NULL, &error);

    if (r != 0)
        steady->error = talk_complain(&error, r);
    steady->has_call = r == 0;
}

static void on_forgotten(void *user, int status, const msgpack_object *result, const struct spillway_error *error);

static void on_written(void *user, int status, const msgpack_object *result, const struct spillway_error *error) {
    struct steady *steady = user;

    (void)result;
    steady->has_call = false;
    if (status != 0)
        steady->error = talk_complain(error, status);
    else if (steady->is_writing)
        start_call(steady, "cache.evict", write_disk, on_forgotten);
}

static void on_forgotten(void *user, int status, const msgpack_object *result, const struct spillway_error *error) {
    struct steady *steady = user;

    (void)result;
    steady->has_call = false;
    if (status != 0)
        steady->error = talk_complain(error, status);
    else
        start_call(steady, "cache.flush", NULL, on_written);
}

/* ---- windows -------------------------------------------------------------------------------------------------------- */

static int turn(struct steady *steady) {
    struct spillway *clients[] = {steady->reader, steady->keep.client};
    struct pollfd fds[ARRAY_LEN(clients)];
    struct spillway_error error;
    int r;

    for (size_t i = 0; i < ARRAY_LEN(clients); i++)
        fds[i] = (struct pollfd){.fd = spillway_fd(clients[i]), .events = spillway_poll_events(clients[i])};
    r = poll(fds, ARRAY_LEN(fds), TIMEOUT_MS);
    if (r == 0)
        return -ETIMEDOUT;
    for (size_t i = 0; i < ARRAY_LEN(clients); i++) {
        if (r < 0 || fds[i].revents == 0)
            continue;
        if (spillway_dispatch(clients[i], &error) != 0)
            return talk_complain(&error, -ECONNRESET);
    }
    if (steady->has_ended && steady->error == 0) {
        fprintf(stderr, "spillway-bench: kv: the answer ended before the time was over\n");
        return -EPROTO;
    }
    return steady->error;
}

static int turn_until(struct steady *steady, double until) {
    int r = 0;

    while (r == 0 && bench_now() < until)
        r = turn(steady);
    return r;
}

/* Records nothing until what was begun before is over. */
static int run_window(struct steady *steady, bool is_busy, double seconds, struct load_samples *all) {
    double start;
    int r = 0;

    steady->window.n = 0;
    steady->is_writing = is_busy;
    if (is_busy)
        start_call(steady, "cache.evict", write_disk, on_forgotten);
    r = turn_until(steady, bench_now() + 0.1);
    start = bench_now();
    steady->is_recording = true;
    if (r == 0)
        r = turn_until(steady, start + seconds);
    steady->is_recording = false;
    steady->write_s += is_busy ? bench_now() - start : 0;
    steady->is_writing = false;
    while (r == 0 && steady->has_call)
        r = turn(steady);
    for (size_t i = 0; r == 0 && i < steady->window.n; i++)
        r = load_add(all, steady->window.values[i]);
    return r;
}

static int run_windows(struct steady *steady, double seconds, struct steady_figures *figures) {
    double ratio_p50[WINDOWS_MAX], ratio_p99[WINDOWS_MAX];
    int r = turn_until(steady, bench_now() + 1);

    for (int i = 0; r == 0 && i < figures->n_windows; i++) {
        double p50, p99;

        r = run_window(steady, false, seconds, &steady->idle);
        p50 = load_percentile(&steady->window, 0.5);
        p99 = load_percentile(&steady->window, 0.99);
        if (r == 0)
            r = run_window(steady, true, seconds, &steady->busy);
        ratio_p50[i] = load_percentile(&steady->window, 0.5) / p50;
        ratio_p99[i] = load_percentile(&steady->window, 0.99) / p99;
    }
    if (r != 0)
        return r;
    figures->ratio_p50 = bench_median(ratio_p50, figures->n_windows);
    figures->ratio_p99 = bench_median(ratio_p99, figures->n_windows);
    return 0;
}

static int fill_host(struct steady *steady) {
    int32_t *ids = calloc(FILL_TOKENS, sizeof *ids);
    struct talk_answer answer;
    int r = ids ? 0 : -ENOMEM;

    for (int k = 0; r == 0 && k < FILL_PROMPTS; k++) {
        for (int i = 0; i < FILL_TOKENS; i++)
            ids[i] = 300 + (i * 7 + k * 1009) % 3600;
        r = talk_generate(steady->keep.client, ids, FILL_TOKENS, 1, &answer);
    }
    free(ids);
    return r == 0 ? talk_flush(steady->keep.client) : r;
}

static int measure(struct steady *steady, double seconds, struct steady_figures *figures) {
    double before = 0, after = 0;
    int r = fill_host(steady);

    if (r == 0)
        r = start_tokens(steady);
    if (r == 0)
        r = talk_metric(steady->keep.client, "disk_saved_bytes_total", &before);
    if (r == 0)
        r = run_windows(steady, seconds, figures);
    if (r == 0)
        r = talk_metric(steady->keep.client, "disk_saved_bytes_total", &after);
    figures->n_idle = (int)steady->idle.n;
    figures->n_busy = (int)steady->busy.n;
    figures->idle_p50 = load_percentile(&steady->idle, 0.5);
    figures->idle_p99 = load_percentile(&steady->idle, 0.99);
    figures->busy_p50 = load_percentile(&steady->busy, 0.5);
    figures->busy_p99 = load_percentile(&steady->busy, 0.99);
    figures->written_bytes_per_s = steady->write_s > 0 ? (after - before) / steady->write_s : 0;
    return r;
}

int steady_measure(const struct bench_options *options, struct steady_figures *ret_figures) {
    struct keep_options keep = {.spillwayd = options->spillwayd,
                                .folder = options->folder,
                                .n_threads = 1, /* the other cores are for what writes */
                                .device_mib = 512,
                                .host_mib = 512,
                                .disk_mib = 2048,
                                .restore_always = true,
                                .disk_min_tokens = PAGE_TOKENS,
                                .max_context = CONTEXT,
                                .max_seqs = 2};
    struct steady steady = {0};
    int n_windows = min_int(options->n_repeats, WINDOWS_MAX);
    int r = keep_open(&keep, &steady.keep);

    *ret_figures = (struct steady_figures){.n_windows = n_windows};
    if (r == 0)
        r = measure(&steady, (double)options->n_seconds / n_windows, ret_figures);
    spillway_close(steady.reader);
    keep_close(&steady.keep);
    free(steady.window.values);
    free(steady.idle.values);
    free(steady.busy.values);
    return r;
}
