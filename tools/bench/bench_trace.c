/* Group trace: conversations with time to think, more than the device holds, with tiers below it and without: how much of
 * their prompts was not computed again, what was written in vain, how long first tokens take. */
#include <errno.h>
#include <stdio.h>

#include "base.h"
#include "bench.h"
#include "chats.h"
#include "keep.h"

#define REUSED_MIN 0.90
#define MIB (1024.0 * 1024)

enum { DEVICE_MIB = 64, HOST_MIB = 32, DISK_MIB = 1024, PLACES = 4, CONTEXT = 4096, MIN_TOKENS = 256 };

struct trace {
    struct chats_figures chats;
    double ttft_mean, ttft[2];
    double saved_bytes, used_bytes, read_bytes; /* disk: written; of pages needed again; read */
    uint64_t written_bytes;                     /* by the process, as the kernel counts */
};

static double mean(const struct load_samples *samples) {
    double sum = 0;

    for (size_t i = 0; i < samples->n; i++)
        sum += samples->values[i];
    return samples->n > 0 ? sum / (double)samples->n : 0;
}

static int look_at_disk(struct keep *keep, struct trace *trace) {
    int r = talk_flush(keep->client);

    if (r == 0)
        r = talk_metric(keep->client, "disk_saved_bytes_total", &trace->saved_bytes);
    if (r == 0)
        r = talk_metric(keep->client, "disk_used_bytes_total", &trace->used_bytes);
    if (r == 0)
        r = talk_metric(keep->client, "disk_read_bytes_total", &trace->read_bytes);
    return r == 0 ? server_written_bytes(&keep->server, &trace->written_bytes) : r;
}

static int replay(const struct bench_options *options, bool has_tiers, struct trace *trace) {
    struct keep_options daemon = {.spillwayd = options->spillwayd,
                                  .folder = options->folder,
                                  .n_threads = options->n_threads,
                                  .device_mib = DEVICE_MIB,
                                  .host_mib = has_tiers ? HOST_MIB : 0,
                                  .disk_mib = has_tiers ? DISK_MIB : 0,
                                  .disk_min_tokens = MIN_TOKENS,
                                  .max_context = CONTEXT,
                                  .max_seqs = PLACES};
    struct chats_options chats = {
        .n_chats = options->n_chats, .n_turns = options->n_turns, .think_s = options->n_seconds / 3.0};
    struct keep keep = {0};
    int r = keep_open(&daemon, &keep);

    if (r != 0)
        return r;
    chats.socket = keep.server.socket;
    r = chats_run(&chats, &trace->chats);
    trace->ttft_mean = mean(&trace->chats.ttft);
    trace->ttft[0] = load_percentile(&trace->chats.ttft, 0.5);
    trace->ttft[1] = load_percentile(&trace->chats.ttft, 0.99);
    if (r == 0 && has_tiers)
        r = look_at_disk(&keep, trace);
    keep_close(&keep);
    return r;
}

static double share(uint64_t part, uint64_t whole) {
    return whole > 0 ? (double)part / (double)whole : 0;
}

static void print_run(const char *name, const struct trace *trace) {
    const struct chats_figures *c = &trace->chats;
    uint64_t n_reused = c->n_device + c->n_host + c->n_disk;

    printf("%-12s | %7llu | %5.3f of %4.2f    %5.3f | %5.3f %5.3f %5.3f | %5.3f | %8.1f %8.1f %8.1f | %6.0f\n", name,
           (unsigned long long)c->n_prompt, share(n_reused, c->n_prompt), REUSED_MIN, share(c->n_seen, c->n_prompt),
           share(c->n_device, c->n_prompt), share(c->n_host, c->n_prompt), share(c->n_disk, c->n_prompt),
           share(c->n_recomputed, c->n_prompt), trace->ttft_mean * 1e3, trace->ttft[0] * 1e3, trace->ttft[1] * 1e3,
           c->seconds);
    fflush(stdout);
}

static void print_disk(const struct trace *trace) {
    printf("disk: %.1f MiB of pages written, %.1f MiB (%.3f) of them not read again until the end; read %.1f MiB.\n"
           "      The kernel counts %.1f MiB written by the process: %.3f of the pages\n",
           trace->saved_bytes / MIB, (trace->saved_bytes - trace->used_bytes) / MIB,
           trace->saved_bytes > 0 ? 1 - trace->used_bytes / trace->saved_bytes : 0, trace->read_bytes / MIB,
           (double)trace->written_bytes / MIB,
           trace->saved_bytes > 0 ? (double)trace->written_bytes / trace->saved_bytes : 0);
}

static void write_run(FILE *f, const char *name, const struct trace *trace) {
    const struct chats_figures *c = &trace->chats;

    fprintf(
        f,
        "\"%s\": {\"seconds\": %.2f, \"answers\": %llu, \"tokens\": %llu, \"prompt_tokens\": %llu, \"device\": %llu, "
        "\"host\": %llu, \"disk\": %llu, \"seen_before\": %llu, \"recomputed\": %llu, \"ttft_ms\": {\"mean\": %.2f, "
        "\"p50\": %.2f, \"p99\": "
        "%.2f}, \"saved_bytes\": %.0f, \"used_bytes\": %.0f, \"read_bytes\": %.0f, \"written_bytes\": %llu}",
        name, c->seconds, (unsigned long long)c->n_answers, (unsigned long long)c->n_tokens,
        (unsigned long long)c->n_prompt, (unsigned long long)c->n_device, (unsigned long long)c->n_host,
        (unsigned long long)c->n_disk, (unsigned long long)c->n_seen, (unsigned long long)c->n_recomputed,
        trace->ttft_mean * 1e3, trace->ttft[0] * 1e3, trace->ttft[1] * 1e3, trace->saved_bytes, trace->used_bytes,
        trace->read_bytes, (unsigned long long)trace->written_bytes);
}

static int run(const struct bench_options *options) {
    struct trace with = {0}, without = {0};
    FILE *json;
    int r;

    if (options->n_chats < 1 || options->n_chats > CHATS_MAX || options->n_turns < 1)
        return -EINVAL;
    r = bench_open_json(options, &json);
    printf("%d conversations x %d turns, think-time %.1f s; device %d MiB, host %d MiB, disk %d MiB\n",
           options->n_chats, options->n_turns, options->n_seconds / 3.0, DEVICE_MIB, HOST_MIB, DISK_MIB);
    printf("             |  tokens | share of them         | of these, from      |  held, | first token, ms            "
           "| whole,\n"
           "             |      of | reused       possible | device  host  disk  |    run |                            "
           "| trace,\n"
           "             | prompts |                       |                     |  again |     mean      p50      p99 "
           "|      s\n");
    fflush(stdout);
    if (r == 0)
        r = replay(options, true, &with);
    if (r == 0) {
        print_run("with tiers", &with);
        r = replay(options, false, &without);
    }
    if (r == 0) {
        print_run("device alone", &without);
        print_disk(&with);
        printf("mean time to the first token: %.3f of that without tiers\n", with.ttft_mean / without.ttft_mean);
    }
    if (json && r == 0) {
        fprintf(json, "{\n");
        write_run(json, "tiers", &with);
        fprintf(json, ",\n");
        write_run(json, "device", &without);
        fprintf(json, "}\n");
    }
    chats_figures_free(&with.chats);
    chats_figures_free(&without.chats);
    return bench_close_json(json, r);
}

const struct bench_group bench_trace = {
    .name = "trace",
    .summary = "conversations with and without tiers below the device; --chats N, --turns N, --folder PATH on a disk,\n"
               "             --seconds N: three times what they think between turns, --json FILE",
    .run = run,
};
