/* cli_gen: runs one generation, shows it while it comes, and lets Ctrl-C end it instead of the program. */
#pragma once
#include "cli.h"

extern const struct cli_option cli_gen_options[]; /* become parameters of gen.start */

struct cli_gen {
    bool show_reasoning; /* also if standard output is no terminal */
    bool print_events;   /* each as a line of JSON; no text */
    bool print_text;     /* while it comes */
    int interrupts_fd;   /* readable after Ctrl-C; made by cli_interrupts_open() */
};

/* From now on Ctrl-C makes this fd readable and does nothing else. */
int cli_interrupts_open(struct cli *cli, int *ret_fd);
void cli_interrupts_take(int fd); /* forgets those that came */
void cli_interrupts_close(int fd);

/* `params` is taken over. The caller owns *ret_result. CLI_FAILED also without a message of the daemon: the second Ctrl-C
 * did not wait for the answer to the first. */
int cli_gen_run(struct cli *cli, const struct cli_gen *gen, json_t *params, json_t **ret_result);

/* How the answer ended and how fast it came, as one line on stderr. */
void cli_gen_print_summary(const json_t *result);
/* True: the answer is as long as the model or the caller wanted it. */
bool cli_gen_is_complete(const json_t *result);
