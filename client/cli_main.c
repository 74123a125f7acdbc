/* spillway: finds the command and runs it. */
#include "cli.h"

#include <stdlib.h>
#include <string.h>

static const struct cli_command *const tables[] = {
    cli_gen_commands,   cli_server_commands, cli_session_commands,
    cli_cache_commands, cli_text_commands,   cli_doctor_commands,
};
enum { N_TABLES = sizeof tables / sizeof tables[0] };

static void print_commands(FILE *out, const char *family) {
    size_t n = strlen(family);

    for (size_t i = 0; i < N_TABLES; i++)
        for (const struct cli_command *command = tables[i]; command->name; command++)
            if (n == 0 || (strncmp(command->name, family, n) == 0 && command->name[n] == ' '))
                fprintf(out, "  %-16s %s\n", command->name, command->summary);
}

static void print_usage(FILE *out) {
    fputs("usage: spillway [--socket PATH] [--json] COMMAND [OPTION...] [ARGUMENT...]\n\n"
          "Talks to spillwayd. Commands:\n",
          out);
    print_commands(out, "");
    fputs("\n`spillway COMMAND --help` tells the options. Every command has these:\n", out);
    cli_print_options(out, cli_common_options);
    fputs("\nExit codes: 0 done; 1 the daemon refused or the request ended early; 2 wrong use; 3 no connection.\n",
          out);
}

static void print_help(const struct cli_command *command) {
    printf("usage: spillway %s [OPTION...]%s%s\n\n%s.\n", command->name, *command->arguments ? " " : "",
           command->arguments, command->summary);
    if (command->help)
        printf("%s\n", command->help);
    puts("\nOptions:");
    cli_print_options(stdout, command->options);
    cli_print_options(stdout, command->more_options);
    cli_print_options(stdout, cli_common_options);
}

/* A command is one word or two. NULL: there is none of this name. */
static const struct cli_command *find_command(int argc, char **argv, int *ret_n_words) {
    char name[64];

    for (int n_words = argc < 2 ? argc : 2; n_words > 0; n_words--) {
        snprintf(name, sizeof name, "%s%s%s", argv[0], n_words == 2 ? " " : "", n_words == 2 ? argv[1] : "");
        for (size_t i = 0; i < N_TABLES; i++)
            for (const struct cli_command *command = tables[i]; command->name; command++)
                if (strcmp(command->name, name) == 0) {
                    *ret_n_words = n_words;
                    return command;
                }
    }
    return NULL;
}

static bool is_family(const char *word) {
    return strcmp(word, "session") == 0 || strcmp(word, "cache") == 0;
}

static int no_command(struct cli *cli, int argc, char **argv) {
    if (!is_family(argv[0]))
        return cli_fail(cli, CLI_USAGE, "USAGE", "there is no command `%s`; `spillway --help` lists them", argv[0]);
    if (argc > 1 && strcmp(argv[1], "--help") == 0) {
        print_commands(stdout, argv[0]);
        return CLI_OK;
    }
    cli_complain(cli, CLI_USAGE, "USAGE", "`%s` needs one of these after it:", argv[0]);
    print_commands(stderr, argv[0]);
    return CLI_USAGE;
}

static int run_command(struct cli *cli, int argc, char **argv) {
    struct cli_args args;
    bool help = false;
    int n_words, status;

    cli->command = find_command(argc, argv, &n_words);
    if (!cli->command)
        return no_command(cli, argc, argv);
    status = cli_parse(cli, argc - n_words + 1, argv + n_words - 1, &args, &help);
    if (status == CLI_OK && help)
        print_help(cli->command);
    else if (status == CLI_OK)
        status = cli->command->run ? cli->command->run(cli, &args) : cli_run_method(cli, &args);
    json_decref(args.params);
    json_decref(args.local);
    return status;
}

/* The options that may stand before the command; their end is the command's place in argv. */
static int read_first_options(struct cli *cli, int argc, char **argv) {
    int i = 1;

    for (; i < argc && strncmp(argv[i], "--", 2) == 0; i++) {
        if (strcmp(argv[i], "--json") == 0)
            cli->json = true;
        else if (strcmp(argv[i], "--socket") == 0 && i + 1 < argc)
            cli->socket = argv[++i];
        else if (strncmp(argv[i], "--socket=", 9) == 0)
            cli->socket = argv[i] + 9;
        else
            break;
    }
    return i;
}

int main(int argc, char **argv) {
    const char *socket = getenv("SPILLWAY_SOCKET");
    struct cli cli = {.socket = socket && *socket ? socket : SPILLWAY_DEFAULT_SOCKET};
    int status, i = read_first_options(&cli, argc, argv);

    if (i == argc) {
        print_usage(stderr);
        return CLI_USAGE;
    }
    if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "help") == 0) {
        print_usage(stdout);
        return CLI_OK;
    }
    if (strcmp(argv[i], "--version") == 0) {
        puts("spillway " SPILLWAY_VERSION);
        return CLI_OK;
    }
    if (argv[i][0] == '-')
        return cli_fail(&cli, CLI_USAGE, "USAGE", "%s: not an option before the command", argv[i]);
    status = run_command(&cli, argc - i, argv + i);
    cli_disconnect(&cli);
    if (fflush(stdout) != 0 || ferror(stdout)) {
        fputs("spillway: standard output cannot be written\n", stderr);
        return status ? status : CLI_FAILED;
    }
    return status;
}
