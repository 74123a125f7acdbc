/* server: a spillwayd of our own for the time of a benchmark, on a socket in a temporary folder. */
#pragma once
#include <stdint.h>
#include <sys/types.h>

enum { SERVER_SETTINGS_MAX = 24 };

struct server_options {
    const char *program;                       /* NULL: the spillwayd of the build folder this program lies in */
    int n_threads;                             /* 0: its own choice */
    const char *settings[SERVER_SETTINGS_MAX]; /* section.key=value, up to the first NULL */
};

struct server {
    pid_t pid;
    char folder[64], socket[96], log[96];
};

/* Returns when it is ready. 0, or negative errno after a line on stderr. */
int server_start(const struct server_options *options, struct server *ret_server);
/* Fine for a zeroed one. */
void server_stop(struct server *server);

/* What it has had written to disks so far, as the kernel counts. */
int server_written_bytes(const struct server *server, uint64_t *ret_bytes);
