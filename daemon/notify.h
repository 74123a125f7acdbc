/* notify: what the service manager tells the process at its start, and what the process tells it. sd_notify's protocol
 * over a datagram socket; without a manager every call does nothing. Never blocks. */
#pragma once
#include <stdbool.h>
#include <stdint.h>

enum { NOTIFY_LISTEN_MAX = 8, NOTIFY_LISTEN_FD = 3 /* the first descriptor handed over */ };

/* The manager's variables as text; NULL where unset. */
struct notify_env {
    const char *notify_socket, *watchdog_usec, *watchdog_pid;
    const char *listen_fds, *listen_pid, *listen_fdnames;
};

struct notify {
    int fd;              /* -1: no manager */
    int64_t watchdog_us; /* WATCHDOG=1 is expected at least this often; 0: not at all */
};

/* Copies of the variables, which are removed so that no child takes them for its own. Called once, before threads. False:
 * out of memory. */
bool notify_env_take(struct notify_env *ret_env);
void notify_env_free(struct notify_env *env);

/* 0, also without a manager. -EINVAL: the variables are nonsense (a socket that is neither a path nor abstract, a
 * number that is none); or the errno of the socket. */
int notify_open(struct notify *notify, const struct notify_env *env, int64_t pid);
void notify_close(struct notify *notify);

/* 0, also without a manager; -EAGAIN: its queue is full, the message is lost; another errno. */
int notify_ready(struct notify *notify);
int notify_stopping(struct notify *notify);
int notify_watchdog(struct notify *notify);
int notify_extend(struct notify *notify, int64_t us);              /* from now; for start, reload and stop */
int notify_reloading(struct notify *notify, int64_t monotonic_us); /* notify_ready() says that it is done */
/* One line for `systemctl status`; line breaks become blanks. */
__attribute__((format(printf, 2, 3))) int notify_status(struct notify *notify, const char *format, ...);

/* Sockets handed over: descriptors NOTIFY_LISTEN_FD and up, with their names ("" if none was given). They are made
 * close-on-exec. Returns their number, 0 if they are for another process; -EINVAL, -E2BIG: nonsense or too many. */
struct notify_listen {
    int fd;
    char name[64];
};
int notify_listen_fds(const struct notify_env *env, int64_t pid, struct notify_listen ret[NOTIFY_LISTEN_MAX]);
