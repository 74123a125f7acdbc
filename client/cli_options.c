/* Arguments of a command: options and words, by its row of the table. */
#include "cli.h"

#include <errno.h>
#include <getopt.h>
#include <stdlib.h>
#include <string.h>

enum { OPTIONS_MAX = 48 };
enum { OPTION_BASE = 256 }; /* above every character that getopt uses */

const struct cli_option cli_common_options[] = {
    {"json", "json", CLI_TRUE, true, NULL, "print one line of JSON, for programs; errors as {\"error\": ...}"},
    {"socket", "socket", CLI_STRING, true, "PATH",
     "of the daemon; otherwise $SPILLWAY_SOCKET, then " SPILLWAY_DEFAULT_SOCKET},
    {"timeout", "timeout", CLI_SECONDS, true, "SECONDS", "for an answer; otherwise 10, or 600 where pages move"},
    {"help", "help", CLI_TRUE, true, NULL, "print this help"},
    {0},
};

void cli_print_options(FILE *out, const struct cli_option *options) {
    for (; options && options->name; options++) {
        char text[64];

        snprintf(text, sizeof text, "--%s%s%s", options->name, options->argument ? " " : "",
                 options->argument ? options->argument : "");
        fprintf(out, "  %-28s %s\n", text, options->help);
    }
}

static int bad_value(struct cli *cli, const char *name, const char *value, const char *wanted) {
    return cli_fail(cli, CLI_USAGE, "USAGE", "%s: `%s` is not %s", name, value, wanted);
}

static json_t *read_int(const char *text) {
    char *end;
    long long n;

    errno = 0;
    n = strtoll(text, &end, 10);
    return errno == 0 && end != text && *end == 0 ? json_integer(n) : NULL;
}

static json_t *read_real(const char *text) {
    char *end;
    double x = strtod(text, &end);

    return end != text && *end == 0 ? json_real(x) : NULL; /* json_real refuses what is not finite */
}

static json_t *read_milliseconds(const char *text) {
    char *end;
    double x = strtod(text, &end);

    return end != text && *end == 0 && x > 0 && x < 1e6 ? json_integer((json_int_t)(x * 1000 + 0.5)) : NULL;
}

static json_t *read_size(const char *text) {
    static const char *const units[] = {"", "KiB", "MiB", "GiB"};
    char *end;
    long long n;

    errno = 0;
    n = strtoll(text, &end, 10);
    if (errno != 0 || end == text || n < 0)
        return NULL;
    for (unsigned i = 0; i < 4; i++)
        if (strcmp(end, units[i]) == 0)
            return n <= INT64_MAX >> (10 * i) ? json_integer(n << (10 * i)) : NULL;
    return NULL;
}

/* The list under `key`, made if it is missing. NULL: no memory. */
static json_t *list_at(json_t *map, const char *key) {
    json_t *list = json_object_get(map, key);

    if (list)
        return list;
    if (json_object_set_new(map, key, json_array()) != 0)
        return NULL;
    return json_object_get(map, key);
}

static int add_bias(struct cli *cli, json_t *map, const char *key, const char *name, const char *text) {
    size_t n_id = strcspn(text, "=");
    char id[24];
    json_t *bias = text[n_id] ? read_real(text + n_id + 1) : NULL;

    snprintf(id, sizeof id, "%.*s", (int)n_id, text);
    if (!bias || n_id == 0 || strspn(id, "0123456789") != n_id) {
        json_decref(bias);
        return bad_value(cli, name, text, "ID=BIAS, as 1411=-2.5");
    }
    if (!json_object_get(map, key))
        json_object_set_new(map, key, json_object());
    return json_object_set_new(json_object_get(map, key), id, bias) == 0 ? CLI_OK : cli_fail_for_memory(cli);
}

/* Puts one argument under its key; `name` is what messages call it. */
static int put(struct cli *cli, json_t *map, const char *key, enum cli_kind kind, const char *name, const char *text) {
    json_t *value = NULL, *list = NULL;
    const char *wanted = "UTF-8";
    int status;

    switch (kind) {
    case CLI_TRUE:
        value = json_true();
        break;
    case CLI_FALSE:
        value = json_false();
        break;
    case CLI_INT:
    case CLI_INTS:
        value = read_int(text);
        wanted = "a whole number";
        break;
    case CLI_REAL:
        value = read_real(text);
        wanted = "a number";
        break;
    case CLI_SECONDS:
        value = read_milliseconds(text);
        wanted = "a number of seconds above 0";
        break;
    case CLI_SIZE:
        value = read_size(text);
        wanted = "a size, as 4096, 64MiB or 2GiB";
        break;
    case CLI_STRING:
    case CLI_STRINGS:
        value = json_string(text);
        break;
    case CLI_BIAS:
        return add_bias(cli, map, key, name, text);
    case CLI_JSON_FILE:
        status = cli_read_json(cli, text, &value);
        if (status != CLI_OK)
            return status;
        break;
    }
    if (!value)
        return bad_value(cli, name, text, wanted);
    if (kind != CLI_STRINGS && kind != CLI_INTS)
        return json_object_set_new(map, key, value) == 0 ? CLI_OK : cli_fail_for_memory(cli);
    list = list_at(map, key);
    return list && json_array_append_new(list, value) == 0 ? CLI_OK : cli_fail_for_memory(cli);
}

static int see(struct cli *cli) {
    fprintf(stderr, "See: spillway %s --help\n", cli->command->name);
    return CLI_USAGE;
}

static int put_words(struct cli *cli, struct cli_args *args) {
    const struct cli_command *command = cli->command;

    if (args->n_words < command->n_words_min || args->n_words > command->n_words_max) {
        cli_complain(cli, CLI_USAGE, "USAGE", "usage: spillway %s [OPTION...]%s%s", command->name,
                     *command->arguments ? " " : "", command->arguments);
        return see(cli);
    }
    for (int i = 0; i < args->n_words && command->word_keys[i].key; i++) {
        const struct cli_word *word = &command->word_keys[i];
        int status = put(cli, args->params, word->key, word->kind, word->key, args->words[i]);

        if (status != CLI_OK)
            return status;
    }
    return CLI_OK;
}

static void use_common(struct cli *cli, const json_t *local) {
    const char *socket = json_string_value(json_object_get(local, "socket"));

    if (json_is_true(json_object_get(local, "json")))
        cli->json = true;
    if (socket)
        cli->socket = socket;
    if (json_object_get(local, "timeout"))
        cli->timeout_ms = (int)json_integer_value(json_object_get(local, "timeout"));
}

int cli_parse(struct cli *cli, int argc, char **argv, struct cli_args *args, bool *ret_help) {
    const struct cli_option *const lists[] = {cli_common_options, cli->command->options, cli->command->more_options};
    const struct cli_option *options[OPTIONS_MAX];
    struct option long_options[OPTIONS_MAX + 1] = {0};
    int c, n = 0, status = CLI_OK;

    *args = (struct cli_args){.params = json_object(), .local = json_object()};
    if (!args->params || !args->local)
        return cli_fail_for_memory(cli);
    for (size_t i = 0; i < 3; i++)
        for (const struct cli_option *o = lists[i]; o && o->name && n < OPTIONS_MAX; o++, n++) {
            options[n] = o;
            long_options[n] =
                (struct option){o->name, o->argument ? required_argument : no_argument, NULL, OPTION_BASE + n};
        }
    optind = 0; /* main has used it before */
    opterr = 0;
    while ((c = getopt_long(argc, argv, ":", long_options, NULL)) != -1) {
        if (c < OPTION_BASE) {
            cli_complain(cli, CLI_USAGE, "USAGE", c == ':' ? "%s needs an argument" : "%s: no such option",
                         argv[optind - 1]);
            return see(cli);
        }
        const struct cli_option *o = options[c - OPTION_BASE];
        char name[64];

        snprintf(name, sizeof name, "--%s", o->name);
        status = put(cli, o->is_local ? args->local : args->params, o->key, o->kind, name, optarg);
        use_common(cli, args->local); /* at once: errors of later ones may be wanted as JSON */
        if (status != CLI_OK)
            return status;
    }
    *ret_help = json_is_true(json_object_get(args->local, "help"));
    args->words = argv + optind;
    args->n_words = argc - optind;
    return *ret_help ? CLI_OK : put_words(cli, args);
}
