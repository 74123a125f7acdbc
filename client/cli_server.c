/* The daemon as a whole: how it is, what runs, and telling it to reload or to stop. */
#include "cli.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static const struct cli_option status_options[] = {
    {"wait", "wait", CLI_SECONDS, true, "SECONDS", "until it serves, at most so long"},
    {0},
};
static const struct cli_option stats_options[] = {
    {"watch", "watch", CLI_TRUE, true, NULL, "again and again, with the change per second, until Ctrl-C"},
    {"interval", "interval", CLI_SECONDS, true, "SECONDS", "between two looks; otherwise 1"},
    {"count", "count", CLI_INT, true, "N", "stop after N looks"},
    {"metrics", "metrics", CLI_TRUE, true, NULL, "all counters, in the text format of Prometheus"},
    {0},
};

static double now_s(void) {
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static void pause_s(double s) {
    nanosleep(&(struct timespec){.tv_sec = (time_t)s, .tv_nsec = (long)((s - (double)(time_t)s) * 1e9)}, NULL);
}

/* ---- status -------------------------------------------------------------------------------------------------------- */

/* Waits until the daemon listens and says that it is ready. Only the last attempt complains. */
static int wait_until_ready(struct cli *cli, double wait_s) {
    const struct spillway_options options = {.path = cli->socket, .connect_timeout_ms = 1000, .call_timeout_ms = 1000};
    double end_s = now_s() + wait_s;

    for (;;) {
        struct spillway *client = NULL;
        struct spillway_result health = {0};
        bool is_ready = spillway_connect(&options, &client, NULL) == 0 && spillway_hello(client, NULL, NULL) == 0 &&
                        spillway_call(client, "server.health", NULL, NULL, &health, NULL) == 0 &&
                        spillway_get_bool(&health.object, "ready", false);

        spillway_result_free(&health);
        spillway_close(client);
        if (is_ready)
            return CLI_OK;
        if (now_s() >= end_s)
            return CLI_FAILED;
        pause_s(0.05);
    }
}

static int status_of_server(struct cli *cli, const struct cli_args *args) {
    double wait_s = cli_number_at(args->local, "wait", 0) / 1000;
    json_t *health, *both;
    bool is_ready;
    int status;

    if (wait_s > 0)
        wait_until_ready(cli, wait_s);
    status = cli_call(cli, "server.health", NULL, &health);
    if (status != CLI_OK)
        return status;
    is_ready = json_is_true(json_object_get(health, "ready"));
    both = json_pack("{s:s,s:o,s:O}", "socket", cli->socket, "health", health, "hello", cli->hello);
    if (!both)
        return cli_fail_for_memory(cli);
    cli_print_result(cli, both);
    json_decref(both);
    return wait_s > 0 && !is_ready ? CLI_FAILED : CLI_OK;
}

/* ---- stats --------------------------------------------------------------------------------------------------------- */

struct look {
    const json_t *now, *before; /* before: NULL at first */
    double elapsed_s;
    int width;
};

static const json_t *leaf_at(const json_t *map, const char *path) {
    char key[128];

    while (map && *path) {
        size_t n = strcspn(path, ".");

        snprintf(key, sizeof key, "%.*s", (int)n, path);
        map = json_object_get(map, key);
        path += n + (path[n] == '.');
    }
    return map;
}

static void widen(void *user, const char *path, const json_t *leaf) {
    struct look *look = user;

    (void)leaf;
    if ((int)strlen(path) > look->width)
        look->width = (int)strlen(path);
}

static void print_change(void *user, const char *path, const json_t *leaf) {
    const struct look *look = user;
    const json_t *before = look->before ? leaf_at(look->before, path) : NULL;
    char text[256];

    cli_format_leaf(leaf, text, sizeof text);
    printf("%-*s  %14s", look->width, path, text);
    if (json_is_number(leaf) && json_is_number(before)) {
        double change = json_number_value(leaf) - json_number_value(before);

        if (change != 0)
            printf("  %+12.1f /s", change / look->elapsed_s);
    }
    putchar('\n');
}

static void print_look(struct cli *cli, struct look *look) {
    if (cli->json) {
        cli_print_json(look->now);
        return;
    }
    if (isatty(STDOUT_FILENO))
        fputs("\033[H\033[J", stdout);
    cli_for_each_leaf(look->now, widen, look);
    cli_for_each_leaf(look->now, print_change, look);
    if (!isatty(STDOUT_FILENO))
        putchar('\n');
    fflush(stdout);
}

static int watch(struct cli *cli, double interval_s, long long n_looks) {
    json_t *before = NULL, *now;
    double before_s = 0, taken_s;
    int status = CLI_OK;

    for (long long i = 0; status == CLI_OK && (n_looks == 0 || i < n_looks); i++) {
        if (i > 0)
            pause_s(interval_s);
        status = cli_call(cli, "server.stats", NULL, &now);
        if (status != CLI_OK)
            break;
        taken_s = now_s();
        print_look(cli, &(struct look){.now = now, .before = before, .elapsed_s = taken_s - before_s});
        json_decref(before);
        before = now;
        before_s = taken_s;
    }
    json_decref(before);
    return status;
}

static int metrics(struct cli *cli) {
    json_t *result;
    int status = cli_call(cli, "server.metrics", NULL, &result);

    if (status != CLI_OK)
        return status;
    cli_print_text_of(cli, result);
    json_decref(result);
    return CLI_OK;
}

static int stats(struct cli *cli, const struct cli_args *args) {
    long long count = json_integer_value(json_object_get(args->local, "count"));

    if (json_is_true(json_object_get(args->local, "metrics")))
        return metrics(cli);
    if (json_is_true(json_object_get(args->local, "watch")))
        return watch(cli, cli_number_at(args->local, "interval", 1000) / 1000, count);
    return cli_run_method(cli, args);
}

const struct cli_command cli_server_commands[] = {
    {.name = "status",
     .arguments = "",
     .summary = "Show whether the daemon serves, and what",
     .help = "With --wait the exit code is 1 if it does not serve in time.",
     .options = status_options,
     .run = status_of_server},
    {.name = "stats",
     .arguments = "",
     .summary = "Show what the daemon does",
     .options = stats_options,
     .method = "server.stats",
     .run = stats},
    {.name = "gens",
     .arguments = "",
     .summary = "List the requests that run and wait",
     .method = "gen.list",
     .table = "gens"},
    {.name = "cancel",
     .arguments = "GEN",
     .summary = "End a request that runs or waits, by its number in `gens`",
     .word_keys = {{"gen", CLI_INT}},
     .n_words_min = 1,
     .n_words_max = 1,
     .method = "gen.cancel"},
    {.name = "reload",
     .arguments = "",
     .summary = "Read the configuration files again (administrator)",
     .method = "server.reload"},
    {.name = "drain",
     .arguments = "",
     .summary = "Finish what runs, then stop the daemon (administrator)",
     .method = "server.drain"},
    {0},
};
