#include "server.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "base.h"
#include "conn_internal.h"
#include "proto.h"
#include "watch.h"

enum {
    ACCEPT_MAX = 32,       /* in one turn */
    ACCEPT_PAUSE_MS = 100, /* when descriptors or memory are out; a socket that waits stays readable */
    LOCK_TRIES = 100,
    LOCK_PAUSE_US = 10 * 1000,
    REJECTION_BYTES_MAX = 512,
    RETRY_MS = 1000, /* nobody knows when a client leaves */
};

struct server {
    struct conn_hub hub;
    uint32_t conns_max;
    int fd; /* listening; -1: closed */
    struct watch *watch;
    uv_timer_t pause;
    bool has_path; /* it is ours to remove if it still is the socket we made */
    struct sockaddr_un address;
    dev_t dev;
    ino_t ino;
    bool is_closing, hub_is_closed, pause_is_closed;
    void (*on_closed)(void *user);
    void *on_closed_user;
};

/* ---- the socket ---- */

static int check_given(int fd, struct report *report) {
    int type = 0, is_listening = 0;
    struct sockaddr_storage address = {0};
    socklen_t n = sizeof address, n_int = sizeof type;

    if (getsockname(fd, (struct sockaddr *)&address, &n) != 0 || address.ss_family != AF_UNIX)
        return report_error(report, SERVER_E_REFUSED, "descriptor %d, which was passed in, is no Unix socket", fd);
    if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &n_int) != 0 || type != SOCK_STREAM)
        return report_error(report, SERVER_E_REFUSED, "the socket passed in as descriptor %d is no stream socket", fd);
    n_int = sizeof is_listening;
    if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &is_listening, &n_int) != 0 || !is_listening)
        return report_error(report, SERVER_E_REFUSED,
                            "the socket passed in as descriptor %d does not listen; set Accept=no in its unit", fd);
    if (fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK) != 0 || fcntl(fd, F_SETFD, FD_CLOEXEC) != 0)
        return -errno;
    return 0;
}

/* Removes a socket that nobody listens on. */
static int remove_stale(const struct sockaddr_un *address, struct report *report) {
    const char *path = address->sun_path;
    struct stat stat;
    int fd, r;

    if (lstat(path, &stat) != 0)
        return errno == ENOENT ? 0 : report_error(report, -errno, "%s: %s", report_path(path), strerror(errno));
    if (!S_ISSOCK(stat.st_mode))
        return report_error(report, SERVER_E_REFUSED, "%s is there and is no socket; remove it or set server.socket",
                            report_path(path));
    fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return -errno;
    r = connect(fd, (const struct sockaddr *)address, sizeof *address) == 0 ? 0 : errno;
    close(fd);
    if (r == 0 || r == EAGAIN) /* EAGAIN: its backlog is full */
        return report_error(report, SERVER_E_REFUSED, "another process listens on %s; stop it or set server.socket",
                            report_path(path));
    if (r != ECONNREFUSED)
        return report_error(report, -r, "%s: cannot tell whether somebody listens: %s", report_path(path), strerror(r));
    if (unlink(path) != 0)
        return report_error(report, -errno, "%s: nobody listens on it, and it cannot be removed: %s", report_path(path),
                            strerror(errno));
    return 0;
}

static int bind_at(int fd, const struct sockaddr_un *address, unsigned mode, struct report *report) {
    mode_t umask_before = umask(~mode & 0777); /* a chmod afterwards would leave a moment with the wrong mode */
    int r = bind(fd, (const struct sockaddr *)address, sizeof *address) == 0 ? 0 : -errno;

    umask(umask_before);
    if (r != 0)
        report_line(report, "%s: cannot make the socket: %s", report_path(address->sun_path), strerror(-r));
    return r;
}

/* The folder, locked: two daemons that start at once must not take each other's new socket for a stale one. */
static int lock_folder(const char *path, int *ret_fd, struct report *report) {
    char folder[sizeof((struct sockaddr_un *)NULL)->sun_path];
    const char *slash = strrchr(path, '/');
    int fd, r = -1;

    if (!slash)
        snprintf(folder, sizeof folder, ".");
    else
        snprintf(folder, sizeof folder, "%.*s", slash == path ? 1 : (int)(slash - path), path);
    fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return report_error(report, -errno, "%s, the folder of the socket: %s", folder, strerror(errno));
    for (int i = 0; i < LOCK_TRIES && r != 0; i++) {
        r = flock(fd, LOCK_EX | LOCK_NB);
        if (r != 0)
            usleep(LOCK_PAUSE_US);
    }
    if (r != 0) {
        close(fd);
        return report_error(report, -EBUSY, "%s, the folder of the socket, is locked by another process", folder);
    }
    *ret_fd = fd;
    return 0;
}

static int open_path(struct server *server, const struct server_options *options, struct report *report) {
    struct stat stat;
    int folder_fd = -1, r;

    server->address.sun_family = AF_UNIX;
    if (strlen(options->path) >= sizeof server->address.sun_path || !options->path[0])
        return report_error(report, SERVER_E_REFUSED, "server.socket has %zu bytes; a socket's path has 1 to %zu",
                            strlen(options->path), sizeof server->address.sun_path - 1);
    memcpy(server->address.sun_path, options->path, strlen(options->path) + 1);
    server->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (server->fd < 0)
        return report_error(report, -errno, "cannot make a socket: %s", strerror(errno));
    r = lock_folder(options->path, &folder_fd, report);
    if (r != 0)
        return r;
    r = remove_stale(&server->address, report);
    if (r == 0)
        r = bind_at(server->fd, &server->address, options->mode, report);
    if (r == 0 && lstat(options->path, &stat) == 0) {
        server->has_path = true;
        server->dev = stat.st_dev;
        server->ino = stat.st_ino;
    }
    if (r == 0 && listen(server->fd, options->backlog) != 0)
        r = report_error(report, -errno, "%s: cannot listen: %s", report_path(options->path), strerror(errno));
    close(folder_fd);
    return r;
}

static void remove_path(struct server *server) {
    struct stat stat;

    if (server->has_path && lstat(server->address.sun_path, &stat) == 0 && stat.st_dev == server->dev &&
        stat.st_ino == server->ino)
        unlink(server->address.sun_path);
    server->has_path = false;
}

/* ---- accepting ---- */

static void reject(struct server *server, int fd) {
    struct proto_number data[] = {{"n_max", server->conns_max}, {"retry_ms", RETRY_MS}};
    struct report report;
    struct wire_out out;

    wire_out_init(&out, REJECTION_BYTES_MAX);
    report_line(&report, "%u clients are connected, limits.connections is %u; try again in %d ms",
                server->hub.stats.n_conns, server->conns_max, RETRY_MS);
    proto_error_data(&out, 0, PROTO_BUSY, report.line, data, ARRAY_LEN(data));
    if (out.bytes.error == 0) /* a new socket has room for it; if not, the client sees the end alone */
        (void)!send(fd, out.bytes.bytes, out.bytes.n, MSG_DONTWAIT | MSG_NOSIGNAL);
    wire_out_deinit(&out);
    close(fd);
    server->hub.stats.n_rejected++;
    server->hub.callbacks.on_error(server->hub.callbacks.user, PROTO_BUSY);
}

static void on_readable(void *user);

static void on_pause_over(uv_timer_t *timer) {
    struct server *server = timer->data;

    if (watch_start(server->hub.loop, server->fd, on_readable, server, &server->watch) != 0)
        uv_timer_start(timer, on_pause_over, ACCEPT_PAUSE_MS, 0);
}

static void pause_accepting(struct server *server) {
    server->hub.stats.n_accept_errors++;
    watch_stop(server->watch);
    server->watch = NULL;
    uv_timer_start(&server->pause, on_pause_over, ACCEPT_PAUSE_MS, 0);
}

static void on_readable(void *user) {
    struct server *server = user;

    for (int i = 0; i < ACCEPT_MAX; i++) {
        int fd = accept4(server->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

        if (fd < 0 && (errno == EINTR || errno == ECONNABORTED))
            continue;
        if (fd < 0) {
            if (errno != EAGAIN)
                pause_accepting(server);
            return;
        }
        if (server->hub.stats.n_conns >= server->conns_max)
            reject(server, fd);
        else
            conn_open(&server->hub, fd);
    }
}

/* ---- the life of a server ---- */

static void free_if_closed(struct server *server) {
    if (!server->hub_is_closed || !server->pause_is_closed)
        return;
    if (server->on_closed)
        server->on_closed(server->on_closed_user);
    free(server);
}

static void on_hub_closed(struct conn_hub *hub) {
    struct server *server = container_of(hub, struct server, hub);

    server->hub_is_closed = true;
    free_if_closed(server);
}

static void on_pause_closed(uv_handle_t *handle) {
    struct server *server = handle->data;

    server->pause_is_closed = true;
    free_if_closed(server);
}

static void close_if_empty(struct conn_hub *hub) {
    struct server *server = container_of(hub, struct server, hub);

    if (!server->is_closing || !link_is_alone(&hub->conns))
        return;
    conn_hub_close(hub);
    uv_close((uv_handle_t *)&server->pause, on_pause_closed);
}

int server_open(uv_loop_t *loop, const struct server_options *options, struct server **ret_server,
                struct report *report) {
    struct server *server = calloc(1, sizeof *server);
    int r;

    report->line[0] = 0;
    if (!server)
        return report_error(report, -ENOMEM, "no memory for a server");
    server->fd = options->listen_fd;
    server->conns_max = options->conns_max;
    r = options->listen_fd >= 0 ? check_given(options->listen_fd, report) : open_path(server, options, report);
    if (r == 0)
        r = watch_start(loop, server->fd, on_readable, server, &server->watch);
    if (r == 0)
        r = conn_hub_init(&server->hub, loop, options);
    if (r != 0) {
        if (r < 0 && !report->line[0])
            report_line(report, "cannot listen: %s", strerror(-r));
        watch_stop(server->watch);
        remove_path(server);
        if (server->fd >= 0)
            close(server->fd);
        free(server);
        return r;
    }
    server->hub.on_empty = close_if_empty;
    server->hub.on_closed = on_hub_closed;
    uv_timer_init(loop, &server->pause);
    server->pause.data = server;
    *ret_server = server;
    return 0;
}

void server_set_ready(struct server *server, bool is_ready) {
    server->hub.is_ready = is_ready;
}

void server_stop_accepting(struct server *server) {
    if (server->fd < 0)
        return;
    uv_timer_stop(&server->pause);
    watch_stop(server->watch);
    server->watch = NULL;
    remove_path(server);
    close(server->fd);
    server->fd = -1;
}

void server_close(struct server *server, void (*on_closed)(void *user), void *user) {
    server_stop_accepting(server);
    server->on_closed = on_closed;
    server->on_closed_user = user;
    server->is_closing = true;
    for (struct link *link = server->hub.conns.next; link != &server->hub.conns; link = link->next)
        conn_close(container_of(link, struct conn, in_conns));
    close_if_empty(&server->hub);
}

void server_read_stats(const struct server *server, struct server_stats *ret_stats) {
    *ret_stats = server->hub.stats;
    ret_stats->input_bytes = server->hub.input_bytes;
}
