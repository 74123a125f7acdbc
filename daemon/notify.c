#include "notify.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "base.h"

/* ---- environment -------------------------------------------------------------------------------------------------- */

static bool take_variable(const char *name, const char **ret_value) {
    const char *value = getenv(name);

    *ret_value = value ? strdup(value) : NULL;
    unsetenv(name);
    return !value || *ret_value;
}

bool notify_env_take(struct notify_env *ret_env) {
    struct notify_env env = {0};
    bool ok = take_variable("NOTIFY_SOCKET", &env.notify_socket);

    ok = take_variable("WATCHDOG_USEC", &env.watchdog_usec) && ok;
    ok = take_variable("WATCHDOG_PID", &env.watchdog_pid) && ok;
    ok = take_variable("LISTEN_FDS", &env.listen_fds) && ok;
    ok = take_variable("LISTEN_PID", &env.listen_pid) && ok;
    ok = take_variable("LISTEN_FDNAMES", &env.listen_fdnames) && ok;
    if (!ok) {
        notify_env_free(&env);
        return false;
    }
    *ret_env = env;
    return true;
}

void notify_env_free(struct notify_env *env) {
    const char *values[] = {env->notify_socket, env->watchdog_usec, env->watchdog_pid,
                            env->listen_fds,    env->listen_pid,    env->listen_fdnames};

    for (size_t i = 0; i < ARRAY_LEN(values); i++)
        free((char *)values[i]);
    *env = (struct notify_env){0};
}

/* A whole number from 0 to 2^62 and nothing else. */
static bool read_number(const char *text, int64_t *ret_number) {
    int64_t number = 0;

    if (!*text)
        return false;
    for (; *text; text++) {
        if (*text < '0' || *text > '9' || number > (INT64_C(1) << 62) / 10 - 1)
            return false;
        number = number * 10 + (*text - '0');
    }
    *ret_number = number;
    return true;
}

/* Whether a variable is meant for this process; -EINVAL if it is no number. Unset: *ret is what the protocol says. */
static int is_mine(const char *text, int64_t pid, bool unset, bool *ret) {
    int64_t number;

    if (!text) {
        *ret = unset;
        return 0;
    }
    if (!read_number(text, &number))
        return -EINVAL;
    *ret = number == pid;
    return 0;
}

/* ---- sockets handed over ------------------------------------------------------------------------------------------ */

int notify_listen_fds(const struct notify_env *env, int64_t pid, struct notify_listen ret[NOTIFY_LISTEN_MAX]) {
    const char *names = env->listen_fdnames ? env->listen_fdnames : "";
    int64_t n = 0;
    bool mine;
    int r = is_mine(env->listen_pid, pid, false, &mine);

    if (r != 0)
        return r;
    if (!mine || !env->listen_fds)
        return 0;
    if (!read_number(env->listen_fds, &n))
        return -EINVAL;
    if (n > NOTIFY_LISTEN_MAX)
        return -E2BIG;
    for (int i = 0; i < (int)n; i++) {
        size_t n_name = strcspn(names, ":");
        int fd = NOTIFY_LISTEN_FD + i, flags = fcntl(fd, F_GETFD);

        if (flags < 0 || fcntl(fd, F_SETFD, flags | FD_CLOEXEC) < 0)
            return -errno;
        ret[i].fd = fd;
        snprintf(ret[i].name, sizeof ret[i].name, "%.*s", (int)min_int((int)n_name, 63), names);
        names += n_name + (names[n_name] == ':');
    }
    return (int)n;
}

/* ---- messages ----------------------------------------------------------------------------------------------------- */

/* The manager's socket: a path, or with @ an abstract name. Returns the address' length, 0 if it is neither. */
static socklen_t read_address(const char *text, struct sockaddr_un *ret_address) {
    size_t n = strlen(text);

    if ((text[0] != '/' && text[0] != '@') || n < 2 || n >= sizeof ret_address->sun_path)
        return 0;
    *ret_address = (struct sockaddr_un){.sun_family = AF_UNIX};
    memcpy(ret_address->sun_path, text, n + 1);
    if (text[0] == '@')
        ret_address->sun_path[0] = '\0'; /* an abstract name has no zero at its end */
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + n + (text[0] == '/'));
}

int notify_open(struct notify *notify, const struct notify_env *env, int64_t pid) {
    int64_t watchdog_us = 0;
    struct sockaddr_un address;
    socklen_t n_address;
    bool mine;
    int r, fd;

    *notify = (struct notify){.fd = -1};
    if (!env->notify_socket || !*env->notify_socket)
        return 0;
    n_address = read_address(env->notify_socket, &address);
    r = is_mine(env->watchdog_pid, pid, true, &mine);
    if (n_address == 0 || r != 0)
        return -EINVAL;
    if (mine && env->watchdog_usec && !read_number(env->watchdog_usec, &watchdog_us))
        return -EINVAL;
    fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return -errno;
    if (connect(fd, (struct sockaddr *)&address, n_address) != 0) {
        r = -errno;
        close(fd);
        return r;
    }
    *notify = (struct notify){.fd = fd, .watchdog_us = watchdog_us};
    return 0;
}

void notify_close(struct notify *notify) {
    if (notify->fd >= 0)
        close(notify->fd);
    *notify = (struct notify){.fd = -1};
}

static int send_message(const struct notify *notify, const char *message) {
    if (notify->fd < 0)
        return 0;
    while (send(notify->fd, message, strlen(message), MSG_NOSIGNAL) < 0)
        if (errno != EINTR)
            return -errno;
    return 0;
}

int notify_ready(struct notify *notify) {
    return send_message(notify, "READY=1");
}

int notify_stopping(struct notify *notify) {
    return send_message(notify, "STOPPING=1");
}

int notify_watchdog(struct notify *notify) {
    return send_message(notify, "WATCHDOG=1");
}

int notify_extend(struct notify *notify, int64_t us) {
    char message[64];

    snprintf(message, sizeof message, "EXTEND_TIMEOUT_USEC=%lld", (long long)us);
    return send_message(notify, message);
}

int notify_reloading(struct notify *notify, int64_t monotonic_us) {
    char message[64];

    snprintf(message, sizeof message, "RELOADING=1\nMONOTONIC_USEC=%lld", (long long)monotonic_us);
    return send_message(notify, message);
}

int notify_status(struct notify *notify, const char *format, ...) {
    char message[256] = "STATUS=";
    va_list args;

    va_start(args, format);
    vsnprintf(message + 7, sizeof message - 7, format, args);
    va_end(args);
    for (char *c = message; *c; c++) /* a second line would be another message */
        if (*c == '\n' || *c == '\r')
            *c = ' ';
    return send_message(notify, message);
}
