/* bench_system: a daemon and its clients on the tiny pair. Every figure stands beside what bounds it: tokens per second
 * beside what the same passes give without a daemon, measured just before; the first token beside the bare pass over a
 * prompt of mean length, alone; times between tokens beside a bare cycle; the loop's CPU time beside its budget. */
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "bare.h"
#include "base.h"
#include "bench.h"
#include "load.h"
#include "server.h"

#define LOOP_US_MAX 30.0 /* of the loop thread, a token */

enum { PLACES = 32 /* built-in sched.max_seqs */ };

struct level {
    int n_clients;
    bool has_bare;
    struct bare_cost bare;
    struct load_result load;
    double accept, loop_us, ttft[2], inter[2], gap[2], bare_tokens_per_s;
};

/* Tokens per second of bare passes that do what the daemon did: as many verify passes, as many prompt tokens. */
static double bare_rate(const struct level *level) {
    const struct bare_cost *bare = &level->bare;
    const struct load_result *load = &level->load;
    double n_seqs = min_int(level->n_clients, PLACES);
    double drafted = (double)load->n_proposed / (bare->block_rows - 1);
    double plain = (double)load->n_steps - drafted;
    double seconds = (drafted * bare->drafted + plain * bare->plain) / n_seqs +
                     (double)(load->n_prompt - load->n_cached) * bare->prompt_token;

    return (double)load->n_tokens / seconds;
}

static void sum_up(struct level *level) {
    struct load_result *load = &level->load;

    level->accept = load->n_steps > 0 ? (double)(load->n_tokens - load->n_requests) / (double)load->n_steps : 0;
    level->loop_us = load->n_tokens > 0 ? load->loop_cpu_s / (double)load->n_tokens * 1e6 : 0;
    for (int i = 0; i < 2; i++) {
        double p = i == 0 ? 0.5 : 0.99;

        level->ttft[i] = load_percentile(&load->ttft, p) * 1e3;
        level->inter[i] = load_percentile(&load->inter_token, p) * 1e3;
        level->gap[i] = load_percentile(&load->gap, p) * 1e3;
    }
    if (level->has_bare)
        level->bare_tokens_per_s = bare_rate(level);
}

/* p50, p99 and the bare one. */
static void print_times(const double times[2], bool has_bare, double bare) {
    if (times[1] > 0)
        printf(" | %7.1f %7.1f", times[0], times[1]);
    else
        printf(" | %7s %7s", "-", "-");
    if (has_bare)
        printf(" %7.1f", bare);
}

static void print_head(bool has_bare) {
    const char *bare = has_bare ? "    bare" : "", *room = has_bare ? "        " : "";

    printf("clients | tokens/s%s | first token, ms%s | between tokens %s | between deltas %s | accept |  loop, us\n",
           has_bare ? "   share of bare" : "", room, room, room);
    printf("        |         %s", has_bare ? "         passes " : "");
    for (int i = 0; i < 3; i++)
        printf(" |     p50     p99%s", bare);
    printf(" | length |   a token\n");
    fflush(stdout);
}

static void print_level(const struct level *level) {
    const struct load_result *load = &level->load;
    const struct bare_cost *bare = &level->bare;
    double prompt = (double)load->n_prompt / (double)load->n_requests * bare->prompt_token * 1e3;

    printf("%7d | %8.1f", level->n_clients, load->tokens_per_s);
    if (level->has_bare)
        printf("  %4.2f of %6.1f", load->tokens_per_s / level->bare_tokens_per_s, level->bare_tokens_per_s);
    print_times(level->ttft, level->has_bare, prompt);
    print_times(level->inter, level->has_bare, level->accept > 0 ? bare->drafted * 1e3 / level->accept : 0);
    print_times(level->gap, level->has_bare, bare->drafted * 1e3);
    printf(" | %6.2f | %4.1f of %.0f\n", level->accept, level->loop_us, LOOP_US_MAX);
    fflush(stdout);
}

static void write_level(FILE *f, const struct level *level, bool is_first) {
    const struct load_result *load = &level->load;

    fprintf(f, "%s\n  {\"clients\": %d, \"tokens_per_s\": %.1f, ", is_first ? "" : ",", level->n_clients,
            load->tokens_per_s);
    if (level->has_bare)
        fprintf(f,
                "\"bare_tokens_per_s\": %.1f, \"bare_drafted_ms\": %.3f, \"bare_plain_ms\": %.3f, "
                "\"bare_prompt_token_us\": %.2f, ",
                level->bare_tokens_per_s, level->bare.drafted * 1e3, level->bare.plain * 1e3,
                level->bare.prompt_token * 1e6);
    fprintf(f,
            "\"ttft_ms\": {\"p50\": %.2f, \"p99\": %.2f}, \"inter_token_ms\": {\"p50\": %.3f, \"p99\": %.3f}, "
            "\"delta_gap_ms\": {\"p50\": %.2f, \"p99\": %.2f}, \"accept_length\": %.3f, \"loop_us_per_token\": %.2f, "
            "\"loop_us_per_token_max\": %.0f, \"requests\": %llu, \"tokens\": %llu, \"prompt_tokens\": %llu, "
            "\"cached_tokens\": %llu, \"verify_passes\": %llu, \"drafts\": %llu}",
            level->ttft[0], level->ttft[1], level->inter[0], level->inter[1], level->gap[0], level->gap[1],
            level->accept, level->loop_us, LOOP_US_MAX, (unsigned long long)load->n_requests,
            (unsigned long long)load->n_tokens, (unsigned long long)load->n_prompt, (unsigned long long)load->n_cached,
            (unsigned long long)load->n_steps, (unsigned long long)load->n_proposed);
}

static int run_level(const struct bench_options *options, const char *socket, uint32_t *question, struct level *level) {
    struct load_options load = {.socket = socket,
                                .n_clients = level->n_clients,
                                .warm_s = 1 + options->n_seconds * 0.1,
                                .seconds = options->n_seconds,
                                .first_question = *question};
    int r = 0;

    if (level->has_bare) /* passes of a daemon of unknown configuration are not ours to compare with */
        r = bare_measure(min_int(level->n_clients, PLACES), options->n_threads, options->n_repeats, &level->bare);
    if (r == 0)
        r = load_run(&load, &level->load);
    *question = level->load.next_question;
    if (r == 0)
        sum_up(level);
    return r;
}

static int run_levels(const struct bench_options *options, const char *socket, bool has_bare, FILE *json) {
    static const int counts[] = {1, 4, 16, 64};
    uint32_t question = 0;
    int r = 0;

    print_head(has_bare);
    if (json)
        fprintf(json, "{\"seconds\": %d, \"levels\": [", options->n_seconds);
    for (size_t i = 0; r == 0 && i < ARRAY_LEN(counts); i++) {
        struct level level = {.n_clients = counts[i], .has_bare = has_bare};

        r = run_level(options, socket, &question, &level);
        if (r == 0) {
            print_level(&level);
            if (json)
                write_level(json, &level, i == 0);
        }
        load_result_free(&level.load);
    }
    if (json)
        fprintf(json, "]}\n");
    return r;
}

static int run(const struct bench_options *options) {
    struct server_options program = {.program = options->spillwayd, .n_threads = options->n_threads};
    struct server server = {0};
    FILE *json;
    int r = bench_open_json(options, &json);

    if (r == 0 && !options->socket)
        r = server_start(&program, &server);
    if (r == 0)
        r = run_levels(options, options->socket ? options->socket : server.socket, !options->socket, json);
    server_stop(&server);
    return bench_close_json(json, r);
}

const struct bench_group bench_system = {
    .name = "system",
    .summary =
        "a daemon with 1, 4, 16 and 64 clients; --spillwayd FILE or --socket PATH, --seconds N each, --json FILE",
    .run = run,
};
