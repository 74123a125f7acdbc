#include "server.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <spillway_client.h>

enum { START_S = 120, STEP_MS = 50 };

static int find_program(char *path, size_t room) {
    static const char name[] = "/../../daemon/spillwayd"; /* from tools/bench */
    ssize_t n = readlink("/proc/self/exe", path, room - sizeof name);

    if (n < 0)
        return -errno;
    path[n] = '\0';
    memcpy(strrchr(path, '/'), name, sizeof name);
    if (access(path, X_OK) == 0)
        return 0;
    fprintf(stderr, "spillway-bench: %s: %s; name one with --spillwayd, or a socket with --socket\n", path,
            strerror(errno));
    return -ENOENT;
}

static void become(const char *program, const struct server_options *options, const struct server *server) {
    char socket[128], threads[64];
    char *arguments[2 * SERVER_SETTINGS_MAX + 6] = {(char *)program, "--set", socket, "--set", threads};
    int fd = open(server->log, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);

    snprintf(socket, sizeof socket, "server.socket=%s", server->socket);
    snprintf(threads, sizeof threads, "model.threads=%d", options->n_threads);
    for (int i = 0, n = 5; i < SERVER_SETTINGS_MAX && options->settings[i]; i++) {
        arguments[n++] = "--set";
        arguments[n++] = (char *)options->settings[i];
    }
    if (fd >= 0)
        dup2(fd, STDERR_FILENO);
    execv(program, arguments);
    _exit(127);
}

static bool is_ready(const char *socket) {
    struct spillway_options options = {.path = socket};
    struct spillway_result health = {0};
    struct spillway *client = NULL;
    bool ready = spillway_connect(&options, &client, NULL) == 0 && spillway_hello(client, NULL, NULL) == 0 &&
                 spillway_call(client, "server.health", NULL, NULL, &health, NULL) == 0 &&
                 spillway_get_bool(&health.object, "ready", false);

    spillway_result_free(&health);
    spillway_close(client);
    return ready;
}

static int wait_until_ready(struct server *server) {
    for (int i = 0; i < START_S * 1000 / STEP_MS; i++) {
        if (is_ready(server->socket))
            return 0;
        if (waitpid(server->pid, NULL, WNOHANG) == server->pid) {
            server->pid = 0;
            return -ECHILD;
        }
        nanosleep(&(struct timespec){.tv_nsec = STEP_MS * 1000000L}, NULL);
    }
    return -ETIMEDOUT;
}

static void print_log(const char *path) {
    char bytes[2048];
    FILE *f = fopen(path, "re");
    size_t n;

    while (f && (n = fread(bytes, 1, sizeof bytes, f)) > 0)
        fwrite(bytes, 1, n, stderr);
    if (f)
        fclose(f);
}

int server_start(const struct server_options *options, struct server *ret_server) {
    struct server server = {.folder = "/tmp/spillway-bench-XXXXXX"};
    char found[4096];
    const char *program = options->program ? options->program : found;
    int r = options->program ? 0 : find_program(found, sizeof found);

    if (r != 0)
        return r;
    if (!mkdtemp(server.folder))
        return -errno;
    snprintf(server.socket, sizeof server.socket, "%s/socket", server.folder);
    snprintf(server.log, sizeof server.log, "%s/log", server.folder);
    server.pid = fork();
    if (server.pid == 0)
        become(program, options, &server);
    r = server.pid < 0 ? -errno : wait_until_ready(&server);
    if (r != 0) {
        fprintf(stderr, "spillway-bench: %s does not become ready; its log:\n", program);
        print_log(server.log);
        server_stop(&server);
        return r;
    }
    *ret_server = server;
    return 0;
}

void server_stop(struct server *server) {
    if (server->pid > 0) {
        kill(server->pid, SIGTERM);
        waitpid(server->pid, NULL, 0);
    }
    if (server->folder[0]) {
        unlink(server->socket);
        unlink(server->log);
        rmdir(server->folder);
    }
    *server = (struct server){0};
}

int server_written_bytes(const struct server *server, uint64_t *ret_bytes) {
    static const char name[] = "\nwrite_bytes: ";
    char path[64], text[1024];
    const char *at;
    FILE *f;
    size_t n;

    snprintf(path, sizeof path, "/proc/%d/io", (int)server->pid);
    f = fopen(path, "re");
    if (!f)
        return -errno;
    n = fread(text, 1, sizeof text - 1, f);
    fclose(f);
    text[n] = '\0';
    at = strstr(text, name);
    if (!at)
        return -EPROTO;
    *ret_bytes = strtoull(at + sizeof name - 1, NULL, 10);
    return 0;
}
