/* talk: what benchmarks ask a daemon for, in a line each. What goes wrong is said on stderr and is a negative errno. */
#pragma once
#include <stdbool.h>
#include <stdint.h>

#include <spillway_client.h>

int talk_complain(const struct spillway_error *error, int r); /* the error, r or -EPROTO */

int talk_connect(const char *socket, struct spillway **ret_client);

/* One value of server.metrics; the name with its labels, without "spillway_". */
int talk_metric(struct spillway *client, const char *name, double *ret_value);

int talk_flush(struct spillway *client);                   /* all that is to be on disk is there */
int talk_evict(struct spillway *client, const char *tier); /* all of it */

struct talk_answer {
    double first_s, done_s;                      /* from sending to the first token and to the end */
    uint64_t n_prompt, n_device, n_host, n_disk; /* tokens; of the prompt, those that were not computed */
};
/* n_tokens tokens after these ids, whatever they are. */
int talk_generate(struct spillway *client, const int32_t *ids, int n_ids, int n_tokens, struct talk_answer *ret_answer);
