/* Group kv: the store. What it writes to a disk and reads from it, what checksums cost, how long a lookup takes, how long
 * the first token of a prefix that comes from below, and what writing does to those who decode meanwhile. */
#include <stdio.h>

#include "base.h"
#include "bench.h"
#include "ceiling.h"
#include "lookup.h"
#include "pace.h"
#include "prefix.h"
#include "steady.h"

#define MIB (1024.0 * 1024)
#define SHARE_MIN 0.90
#define LOOKUP_US_MAX 50.0
#define STEP_RATIO_MAX 1.02

struct figures {
    struct pace_figures pace[PACE_SHAPES];
    double read_loop; /* bytes per second of one core */
    struct lookup_figures lookup;
    struct prefix_figures prefix;
    struct steady_figures steady;
};

static const char *const shape_names[PACE_SHAPES] = {[PACE_27B] = "27B, bf16", [PACE_TINY] = "tiny pair"};

/* ---- disk ----------------------------------------------------------------------------------------------------------- */

static void print_pace(const struct pace_figures *f, const char *name) {
    printf("%-9s %7.1f | %6.2f %6.2f  %4.2f of %4.2f %3d | %6.2f %6.2f  %4.2f of %4.2f %3d | %6.4f\n", name,
           (double)f->bytes / MIB, f->write.rate / 1e9, f->write.plain / 1e9, f->write.share, SHARE_MIN, f->write.depth,
           f->read.rate / 1e9, f->read.plain / 1e9, f->read.share, SHARE_MIN, f->read.depth,
           (double)f->written_bytes / (double)f->payload_bytes);
    fflush(stdout);
}

static int time_read_loop(int n_repeats, double *ret_rate) {
    double samples[16];
    int n = min_int(n_repeats, ARRAY_LEN(samples));
    struct ceiling_read read;
    int r = ceiling_read_open(&read);

    if (r != 0)
        return r;
    for (int i = 0; i < n; i++)
        samples[i] = ceiling_read_rate(&read, 1);
    *ret_rate = bench_median(samples, n);
    ceiling_read_close(&read);
    return 0;
}

static int run_disk(const struct bench_options *options, struct figures *figures) {
    int r = 0;

    printf("chains of pages to disk, until they survive a power cut, and back onto the shelf, checked; beside the "
           "store a\n"
           "plain io_uring loop that writes and reads the same bytes of the same files\n"
           "              | write, GB/s                      | read, GB/s                       | bytes written,\n"
           "              MiB |  store  plain  share        deep |  store  plain  share        deep | of those kept\n");
    for (int shape = 0; r == 0 && shape < PACE_SHAPES; shape++) {
        r = pace_measure(options, (enum pace_shape)shape, &figures->pace[shape]);
        if (r == 0)
            print_pace(&figures->pace[shape], shape_names[shape]);
    }
    if (r == 0)
        r = time_read_loop(options->n_repeats, &figures->read_loop);
    if (r == 0)
        printf("checksums: %.2f GB/s on one core, %.2f of the plain read loop's %.2f; reading at its rate above takes "
               "%.2f "
               "of a core\n\n",
               figures->pace[PACE_27B].checksum / 1e9, figures->pace[PACE_27B].checksum / figures->read_loop,
               figures->read_loop / 1e9, figures->pace[PACE_27B].read.rate / figures->pace[PACE_27B].checksum);
    return r;
}

/* ---- lookups -------------------------------------------------------------------------------------------------------- */

static int run_lookups(const struct bench_options *options, struct figures *figures) {
    struct lookup_figures *f = &figures->lookup;
    int r = lookup_measure(options->folder, options->n_entries, f);

    if (r != 0)
        return r;
    printf("what a prompt finds among %u pages, us of the thread, of %.0f; beside it what making its keys takes\n"
           "tokens | all on the device | all on disk     |   keys\n"
           "       |     p50     p99   |     p50     p99 |\n",
           f->n_entries, LOOKUP_US_MAX);
    for (int i = 0; i < LOOKUP_ROWS; i++)
        printf("%6u | %7.1f %7.1f   | %7.1f %7.1f | %6.1f\n", f->n_pages[i] * PAGE_TOKENS, f->device[i].p50 * 1e6,
               f->device[i].p99 * 1e6, f->disk[i].p50 * 1e6, f->disk[i].p99 * 1e6, f->hash[i] * 1e6);
    printf("one page in the catalog of the disk: %.2f, p99 %.2f\n\n", f->one.p50 * 1e6, f->one.p99 * 1e6);
    fflush(stdout);
    return 0;
}

/* ---- a prefix ------------------------------------------------------------------------------------------------------- */

/* The way up is what it takes beyond a prefix that is on the device. */
static void print_source(const struct prefix_figures *f, const char *name, double seconds, double floor) {
    double up = seconds - f->device;

    printf("%-8s | %8.3f  %6.4f", name, seconds, seconds / f->cold);
    if (floor > 0 && up > 0)
        printf(" | %6.2f  %4.2f of %5.2f", (double)f->bytes / up / 1e9, (double)f->bytes / up / floor, floor / 1e9);
    printf("\n");
}

static int run_prefix(const struct bench_options *options, struct figures *figures) {
    struct prefix_figures *f = &figures->prefix;
    int r = prefix_measure(options, f);

    if (r != 0)
        return r;
    printf("first token after a prefix of %d tokens of the tiny pair, %.1f MiB\n"
           "         |  seconds  share of | way up, GB/s, and share of a\n"
           "         |          computing | plain copy, a plain disk\n",
           f->n_tokens, (double)f->bytes / MIB);
    print_source(f, "computed", f->cold, 0);
    print_source(f, "device", f->device, 0);
    print_source(f, "host", f->host, f->copy_bytes_per_s);
    print_source(f, "disk", f->disk, figures->pace[PACE_TINY].read.plain);
    printf("\n");
    fflush(stdout);
    return 0;
}

/* ---- steps ---------------------------------------------------------------------------------------------------------- */

static int run_steady(const struct bench_options *options, struct figures *figures) {
    struct steady_figures *f = &figures->steady;
    int r = steady_measure(options, f);

    if (r != 0)
        return r;
    printf("one seq that decodes on one thread, a token a step, ms, in %d windows without and with writeback at full "
           "rate\n"
           "      |    idle | writing |  ratio\n",
           f->n_windows);
    printf("  p50 | %7.2f | %7.2f | %6.3f\n", f->idle_p50 * 1e3, f->busy_p50 * 1e3, f->ratio_p50);
    printf("  p99 | %7.2f | %7.2f | %6.3f of %.2f where a core is free\n", f->idle_p99 * 1e3, f->busy_p99 * 1e3,
           f->ratio_p99, STEP_RATIO_MAX);
    printf("steps | %7d | %7d |\nwriting %.2f GB/s, %.2f of the plain loop above\n", f->n_idle, f->n_busy,
           f->written_bytes_per_s / 1e9, f->written_bytes_per_s / figures->pace[PACE_TINY].write.plain);
    fflush(stdout);
    return 0;
}

/* ---- all ------------------------------------------------------------------------------------------------------------ */

static void write_pace(FILE *f, const char *name, const struct pace *pace) {
    fprintf(f, "\"%s\": {\"bytes_per_s\": %.0f, \"plain_bytes_per_s\": %.0f, \"share\": %.4f, \"depth\": %d}", name,
            pace->rate, pace->plain, pace->share, pace->depth);
}

static void write_json(FILE *f, const struct figures *figures) {
    const struct lookup_figures *lookup = &figures->lookup;
    const struct prefix_figures *prefix = &figures->prefix;
    const struct steady_figures *steady = &figures->steady;

    fprintf(f, "{\"disk\": [");
    for (int shape = 0; shape < PACE_SHAPES; shape++) {
        const struct pace_figures *pace = &figures->pace[shape];

        fprintf(f, "%s\n  {\"shape\": \"%s\", \"bytes\": %llu, ", shape > 0 ? "," : "", shape_names[shape],
                (unsigned long long)pace->bytes);
        write_pace(f, "write", &pace->write);
        fprintf(f, ", ");
        write_pace(f, "read", &pace->read);
        fprintf(f, ", \"checksum_bytes_per_s\": %.0f, \"written_bytes\": %llu, \"kept_bytes\": %llu}", pace->checksum,
                (unsigned long long)pace->written_bytes, (unsigned long long)pace->payload_bytes);
    }
    fprintf(f,
            "],\n\"read_loop_bytes_per_s\": %.0f,\n\"lookup\": {\"entries\": %u, \"one_us\": {\"p50\": %.3f, \"p99\": "
            "%.3f}, "
            "\"prompts\": [",
            figures->read_loop, lookup->n_entries, lookup->one.p50 * 1e6, lookup->one.p99 * 1e6);
    for (int i = 0; i < LOOKUP_ROWS; i++)
        fprintf(f,
                "%s\n  {\"tokens\": %u, \"device_us\": {\"p50\": %.2f, \"p99\": %.2f}, \"disk_us\": {\"p50\": %.2f, "
                "\"p99\": %.2f}, \"keys_us\": %.2f}",
                i > 0 ? "," : "", lookup->n_pages[i] * PAGE_TOKENS, lookup->device[i].p50 * 1e6,
                lookup->device[i].p99 * 1e6, lookup->disk[i].p50 * 1e6, lookup->disk[i].p99 * 1e6,
                lookup->hash[i] * 1e6);
    fprintf(f,
            "]},\n\"prefix\": {\"tokens\": %d, \"bytes\": %llu, \"computed_s\": %.4f, \"device_s\": %.4f, \"host_s\": "
            "%.4f, "
            "\"disk_s\": %.4f, \"copy_bytes_per_s\": %.0f},\n",
            prefix->n_tokens, (unsigned long long)prefix->bytes, prefix->cold, prefix->device, prefix->host,
            prefix->disk, prefix->copy_bytes_per_s);
    fprintf(f,
            "\"steps\": {\"windows\": %d, \"idle\": {\"n\": %d, \"p50_ms\": %.3f, \"p99_ms\": %.3f}, \"writing\": "
            "{\"n\": %d, "
            "\"p50_ms\": %.3f, \"p99_ms\": %.3f}, \"ratio_p50\": %.4f, \"ratio_p99\": %.4f, \"written_bytes_per_s\": "
            "%.0f}}\n",
            steady->n_windows, steady->n_idle, steady->idle_p50 * 1e3, steady->idle_p99 * 1e3, steady->n_busy,
            steady->busy_p50 * 1e3, steady->busy_p99 * 1e3, steady->ratio_p50, steady->ratio_p99,
            steady->written_bytes_per_s);
}

static int run(const struct bench_options *options) {
    struct figures figures = {0};
    FILE *json;
    int r = bench_open_json(options, &json);

    if (r == 0)
        r = run_disk(options, &figures);
    if (r == 0)
        r = run_lookups(options, &figures);
    if (r == 0)
        r = run_prefix(options, &figures);
    if (r == 0)
        r = run_steady(options, &figures);
    if (json && r == 0)
        write_json(json, &figures);
    return bench_close_json(json, r);
}

const struct bench_group bench_kv = {
    .name = "kv",
    .summary =
        "the store: disk, checksums, lookups, prefixes, steps while it writes; --folder PATH on a disk (/var/tmp),\n"
        "             --entries N looked up in, --tokens N of a prefix, --seconds N of steps, --json FILE",
    .run = run,
};
