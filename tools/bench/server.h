/* server: a spillwayd of our own for the time of a benchmark, on a socket in a temporary folder. */
#pragma once
#include <sys/types.h>

struct server {
    pid_t pid;
    char folder[64], socket[96], log[96];
};

/* Returns when it is ready. `program` NULL: the spillwayd of the build folder this program lies in. n_threads 0: its own
 * choice. 0, or negative errno after a line on stderr. */
int server_start(const char *program, int n_threads, struct server *ret_server);
/* Fine for a zeroed one. */
void server_stop(struct server *server);
