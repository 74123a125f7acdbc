/* cli: what the commands of `spillway` share. A command is a row of a table: its words and options become the parameters
 * of a method, and its result is printed; only those that do more have a function of their own.
 *
 * Functions that return int return an exit code. Whoever returns another than CLI_OK has said why. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

#include <jansson.h>

#include "spillway_client.h"

enum cli_exit { CLI_OK = 0, CLI_FAILED = 1, CLI_USAGE = 2, CLI_UNREACHABLE = 3 };

enum cli_kind {            /* how an argument is written, and what it becomes */
                CLI_TRUE,  /* no argument */
                CLI_FALSE, /* no argument */
                CLI_INT,
                CLI_REAL,
                CLI_SECONDS, /* 1.5 becomes 1500: milliseconds */
                CLI_SIZE,    /* 64MiB becomes bytes */
                CLI_STRING,
                CLI_STRINGS,   /* may be repeated: a list */
                CLI_INTS,      /* may be repeated: a list */
                CLI_BIAS,      /* ID=BIAS, may be repeated: a map */
                CLI_JSON_FILE, /* the document in that file; - is standard input */
};

struct cli_option {
    const char *name; /* without the dashes */
    const char *key;  /* in the parameters; in the command's own settings if is_local */
    enum cli_kind kind;
    bool is_local;
    const char *argument; /* as the help calls it; NULL: none */
    const char *help;
};

struct cli_word {
    const char *key; /* NULL ends a list */
    enum cli_kind kind;
};

struct cli;
struct cli_args {
    json_t *params; /* of the method: a map */
    json_t *local;  /* what concerns the command alone: a map */
    char **words;
    int n_words;
};

struct cli_command {
    const char *name;                                /* `session open` */
    const char *arguments;                           /* as the help calls them; "" if none */
    const char *summary;                             /* one line */
    const char *help;                                /* more; NULL: the summary says all */
    const struct cli_option *options, *more_options; /* lists that end in a row without a name; NULL: none */
    struct cli_word word_keys[3];                    /* words that become parameters */
    int n_words_min, n_words_max;
    const char *method; /* called with the parameters by cli_run_method() */
    const char *table;  /* member of the result that is a list, printed as a table; NULL: print all */
    bool is_slow;       /* waits longer: it moves pages or finishes other requests */
    int (*run)(struct cli *cli, const struct cli_args *args);
};

struct cli {
    const char *socket;
    bool json;
    int timeout_ms; /* 0: the command's own */
    const struct cli_command *command;
    struct spillway *client; /* NULL until connected */
    json_t *hello;           /* what the daemon said of itself */
};

/* ---- tables of commands, each ending in a row without a name ------------------------------------------------------- */

extern const struct cli_command cli_gen_commands[];     /* cli_complete.c, cli_chat.c */
extern const struct cli_command cli_server_commands[];  /* cli_server.c */
extern const struct cli_command cli_session_commands[]; /* cli_session.c */
extern const struct cli_command cli_cache_commands[];   /* cli_cache.c */
extern const struct cli_command cli_text_commands[];    /* cli_text.c */
extern const struct cli_command cli_doctor_commands[];  /* cli_doctor.c */

/* ---- cli_options.c ------------------------------------------------------------------------------------------------- */

extern const struct cli_option cli_common_options[];

/* argv[0] is the command. Fills `args`, whose maps the caller owns in every case. *ret_help: the help was asked for. */
int cli_parse(struct cli *cli, int argc, char **argv, struct cli_args *args, bool *ret_help);
void cli_print_options(FILE *out, const struct cli_option *options);

/* ---- cli_call.c ---------------------------------------------------------------------------------------------------- */

int cli_connect(struct cli *cli); /* and hello; fine if it is done already */
void cli_disconnect(struct cli *cli);
/* Connects if need be. `params` is taken over; NULL: none. The caller owns *ret_result. */
int cli_call(struct cli *cli, const char *method, json_t *params, json_t **ret_result);
int cli_run_method(struct cli *cli, const struct cli_args *args);

/* ---- cli_json.c ---------------------------------------------------------------------------------------------------- */

/* NULL: no memory, or not UTF-8. What JSON cannot say (binary strings, NaN) becomes null. */
json_t *cli_json_of(const msgpack_object *object);
spillway_write_fn cli_write_json; /* user: const json_t * */
/* The document in a file; - is standard input. */
int cli_read_json(struct cli *cli, const char *path, json_t **ret_document);
/* Puts into `params`, where it has none: the messages of a document, which is their list, or a map of which `messages`,
 * `tools`, `thinking` and `add_generation_prompt` are taken if they are not null. */
int cli_use_messages(struct cli *cli, const json_t *document, json_t *params);
/* All bytes of a file; - is standard input. Ends in a zero that is not counted. The caller frees it. */
int cli_read_file(struct cli *cli, const char *path, char **ret_bytes, size_t *ret_n_bytes);
/* What `a.b` names in nested maps; else `otherwise`. */
double cli_number_at(const json_t *map, const char *path, double otherwise);

/* ---- cli_output.c -------------------------------------------------------------------------------------------------- */

/* Tell an error: to stdout if --json was given, and as a line on stderr in every case. */
void cli_complain(struct cli *cli, int status, const char *code, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
void cli_complain_as(struct cli *cli, int status, const json_t *error); /* {code, message, data?} */

/* The same, with the value `status`: return cli_fail(cli, CLI_USAGE, ...). Macros and inline, so that static analysis sees
 * the value come back. */
#define cli_fail(cli, status, ...) (cli_complain((cli), (status), __VA_ARGS__), (status))
static inline int cli_fail_for_memory(struct cli *cli) {
    return cli_fail(cli, CLI_FAILED, "NO_MEMORY", "no memory, or a text that is not UTF-8");
}

void cli_print_json(const json_t *value);                    /* one line */
int cli_print_result(struct cli *cli, const json_t *result); /* --json, or a line for each leaf */
void cli_print_table(const json_t *rows);                    /* maps with scalar members */
/* Text of the model or of others: on a terminal without control characters but newline and tab. */
void cli_print_text(FILE *out, const char *bytes, size_t n_bytes);
/* The text that the result holds; with --json the result. */
void cli_print_text_of(const struct cli *cli, const json_t *result);

/* A leaf of nested maps: its path and value as text. */
typedef void cli_leaf_fn(void *user, const char *path, const json_t *leaf);
void cli_for_each_leaf(const json_t *value, cli_leaf_fn *on_leaf, void *user);
void cli_format_leaf(const json_t *leaf, char *text, size_t n_room);
