/* spillwayd: arguments, wiring from top to bottom, shutdown from bottom to top. */
#include <errno.h>
#include <getopt.h>
#include <malloc.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "process.h"

enum { EXIT_CONFIG = 78, EXIT_MODEL = 77, SETS_MAX = 64 };

static const char USAGE[] =
    "usage: spillwayd [--config FILE] [--set SECTION.KEY=VALUE]...\n"
    "                 [--check | --print-config | --plan | --version | --help]\n"
    "\n"
    "Serves a Qwen3.5 model with its DFlash drafter on a Unix socket. Without a configuration it serves the tiny pair\n"
    "it comes with.\n"
    "\n"
    "  --config FILE     read FILE, and conf.d/*.conf beside it\n"
    "  --set KEY=VALUE   set one key, such as sched.max_seqs=8; may be given often\n"
    "  --check           judge the configuration and the memory plan, and exit\n"
    "  --print-config    print every key with its value and origin, and exit\n"
    "  --plan            print what becomes of kv.device_bytes, and exit\n"
    "  --version         print the version, and exit\n"
    "\n"
    "Exit status: 0 done, 78 bad configuration or arguments, 77 the model or the device cannot be used, 1 otherwise.\n"
    "See spillwayd(8) and spillway.conf(5).\n";

enum action { ACTION_SERVE, ACTION_CHECK, ACTION_PRINT, ACTION_PLAN };

struct arguments {
    struct config_source source;
    const char *sets[SETS_MAX];
    enum action action;
};

/* -1: go on; else the exit status. */
static int read_arguments(int argc, char **argv, struct arguments *args) {
    enum { OPT_SET = 256, OPT_CHECK, OPT_PRINT, OPT_PLAN, OPT_VERSION };
    static const struct option OPTIONS[] = {
        {"config", required_argument, NULL, 'c'}, {"set", required_argument, NULL, OPT_SET},
        {"check", no_argument, NULL, OPT_CHECK},  {"print-config", no_argument, NULL, OPT_PRINT},
        {"plan", no_argument, NULL, OPT_PLAN},    {"version", no_argument, NULL, OPT_VERSION},
        {"help", no_argument, NULL, 'h'},         {0}};
    int option;

    *args = (struct arguments){0};
    while ((option = getopt_long(argc, argv, "c:h", OPTIONS, NULL)) != -1) {
        switch (option) {
        case 'c':
            args->source.file = optarg;
            break;
        case OPT_SET:
            if (args->source.n_sets == SETS_MAX) {
                fprintf(stderr, "spillwayd: at most %d times --set; use a file\n", SETS_MAX);
                return EXIT_CONFIG;
            }
            args->sets[args->source.n_sets++] = optarg;
            break;
        case OPT_CHECK:
            args->action = ACTION_CHECK;
            break;
        case OPT_PRINT:
            args->action = ACTION_PRINT;
            break;
        case OPT_PLAN:
            args->action = ACTION_PLAN;
            break;
        case OPT_VERSION:
            printf("spillwayd %s\n", SPILLWAY_VERSION);
            return 0;
        case 'h':
            fputs(USAGE, stdout);
            return 0;
        default:
            fputs("try spillwayd --help\n", stderr);
            return EXIT_CONFIG;
        }
    }
    if (optind < argc) {
        fprintf(stderr, "spillwayd: %s: takes options only; try spillwayd --help\n", argv[optind]);
        return EXIT_CONFIG;
    }
    args->source.sets = args->sets;
    return -1;
}

static int print_text(struct text *text) {
    bool whole = text->error == 0 && fwrite(text->bytes, 1, text->n, stdout) == text->n && fflush(stdout) == 0;

    text_deinit(text);
    return whole ? 0 : 1;
}

static int print_config(const struct config *config) {
    struct text text;

    text_init(&text, 1 << 20);
    config_print(config, &text);
    return print_text(&text);
}

/* --plan, and --check, which is silent when all is well. */
static int print_plan(const struct config *config, bool only_check) {
    struct memplan plan;
    struct report report;
    struct text text;
    int r = only_check && config_has_disk(config) ? cache_folder_look(config->kv.disk_path, &report) : 0;

    if (r != 0) {
        fprintf(stderr, "spillwayd: %s\n", report.line);
        return r == -EINVAL ? EXIT_CONFIG : 1;
    }
    if (pair_plan(config, &plan, &report) != 0) {
        fprintf(stderr, "spillwayd: %s\n", report.line);
        return EXIT_MODEL;
    }
    if (plan.notice[0])
        fprintf(stderr, "spillwayd: %s\n", plan.notice);
    if (only_check)
        return 0;
    text_init(&text, 1 << 20);
    memplan_print(&plan, &text);
    memplan_print_below(&plan.model, config->kv.host_bytes, config->kv.disk_bytes, &text);
    return print_text(&text);
}

/* Few arenas, and large blocks from the system alone: the memory of a burst goes back when it is over. */
static void bound_memory(void) {
    mallopt(M_ARENA_MAX, 2);
    mallopt(M_MMAP_THRESHOLD, 1 << 20);
}

/* As many descriptors as are allowed: one for each client. */
static void raise_limits(void) {
    struct rlimit limit;

    if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
        limit.rlim_cur = limit.rlim_max;
        setrlimit(RLIMIT_NOFILE, &limit);
    }
    signal(SIGPIPE, SIG_IGN);
}

/* Until somebody listens to it, a SIGHUP waits: it asks for a reload, and would end the process. */
static void hold_reload(void) {
    sigset_t set;

    sigemptyset(&set);
    sigaddset(&set, SIGHUP);
    sigprocmask(SIG_BLOCK, &set, NULL);
}

int main(int argc, char **argv) {
    struct process_env env = {.journal_stream = getenv("JOURNAL_STREAM")};
    struct arguments args;
    struct config config;
    struct report report;
    int r;

    hold_reload();
    r = read_arguments(argc, argv, &args);
    if (r >= 0)
        return r;
    r = config_load(&args.source, &config, &report);
    if (r != 0) {
        fprintf(stderr, "spillwayd: %s\n", report.line);
        return EXIT_CONFIG;
    }
    switch (args.action) {
    case ACTION_PRINT:
        r = print_config(&config);
        break;
    case ACTION_CHECK:
    case ACTION_PLAN:
        r = print_plan(&config, args.action == ACTION_CHECK);
        break;
    case ACTION_SERVE:
        raise_limits();
        bound_memory();
        if (!notify_env_take(&env.notify)) {
            fputs("spillwayd: out of memory\n", stderr);
            return 1;
        }
        r = process_run(&config, &args.source, &env); /* the configuration is its own from now on */
        notify_env_free(&env.notify);
        return r;
    }
    config_free(&config);
    return r;
}
