/* process: the daemon from its first to its last moment: socket, loading, serving, draining, signals, the service manager.
 *
 *   LOADING --pair loaded--> SERVING --SIGTERM, server.drain--> DRAINING --all answered, or drain_timeout--> exit
 *      '---cannot be loaded, SIGTERM---------------------------------------------------------------------> exit
 *
 * A second SIGTERM exits at once. */
#pragma once
#include "config.h"
#include "notify.h"
#include "service.h"

struct process_env {
    struct notify_env notify;
    const char *journal_stream; /* NULL: unset */
};

enum { PROCESS_EXIT_FAILED = 1, PROCESS_EXIT_MODEL = 77, PROCESS_EXIT_CONFIG = 78 };

/* Takes the configuration over; source is read again on SIGHUP. Returns the exit status. */
int process_run(struct config *config, const struct config_source *source, const struct process_env *env);
