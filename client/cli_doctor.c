/* What may be wrong between this program and answers, one line each, with what to do about it. */
#include "cli.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum verdict { OK, WARN, FAIL };
static const char *const verdict_names[] = {"ok", "warn", "fail"};

struct doctor {
    struct cli *cli;
    json_t *checks;
    bool failed;
    pid_t daemon; /* 0: not known */
};

/* `advice` is NULL if there is nothing to do. */
__attribute__((format(printf, 5, 6))) static void note(struct doctor *doctor, enum verdict verdict, const char *check,
                                                       const char *advice, const char *format, ...) {
    char detail[768];
    va_list args;

    va_start(args, format);
    vsnprintf(detail, sizeof detail, format, args);
    va_end(args);
    doctor->failed |= verdict == FAIL;
    json_array_append_new(doctor->checks, json_pack("{s:s,s:s,s:s,s:s?}", "check", check, "verdict",
                                                    verdict_names[verdict], "detail", detail, "advice", advice));
    if (doctor->cli->json)
        return;
    printf("%-4s  %-12s %s\n", verdict_names[verdict], check, detail);
    if (advice)
        printf("      %-12s -> %s\n", "", advice);
    fflush(stdout);
}

/* ---- the socket and who answers on it ------------------------------------------------------------------------------ */

static bool check_socket(struct doctor *doctor) {
    const char *path = doctor->cli->socket;
    struct stat st;

    if (stat(path, &st) != 0) {
        note(doctor, FAIL, "socket", "start spillwayd (systemctl start spillway), or give --socket its server.socket",
             "%s: %s", path, strerror(errno));
        return false;
    }
    if (!S_ISSOCK(st.st_mode)) {
        note(doctor, FAIL, "socket", "give --socket the daemon's server.socket", "%s is no socket", path);
        return false;
    }
    note(doctor, OK, "socket", NULL, "%s, mode %04o, owner %u:%u", path, (unsigned)st.st_mode & 07777u, st.st_uid,
         st.st_gid);
    if (access(path, W_OK) != 0) {
        note(doctor, FAIL, "permission", "join the socket's group (then log in anew), or widen server.socket_mode",
             "user %u may not write to it: %s", getuid(), strerror(errno));
        return false;
    }
    note(doctor, OK, "permission", NULL, "user %u may use it", getuid());
    return true;
}

static double now_ms(void) {
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec * 1e-6;
}

/* Not cli_connect(): a refusal is a finding here. */
static bool check_hello(struct doctor *doctor) {
    struct cli *cli = doctor->cli;
    int timeout_ms = cli->timeout_ms ? cli->timeout_ms : 5000;
    const struct spillway_options options = {
        .path = cli->socket, .connect_timeout_ms = timeout_ms, .call_timeout_ms = timeout_ms};
    struct spillway_result hello = {0};
    struct spillway_error error;
    double begin_ms = now_ms();
    struct ucred peer;
    socklen_t n = sizeof peer;
    uint64_t version;
    int r = spillway_connect(&options, &cli->client, &error);

    if (r != 0) {
        note(doctor, FAIL, "connection",
             r == -ECONNREFUSED ? "nobody listens: a daemon left this file behind; start spillwayd, which replaces it"
                                : "see the daemon's log (journalctl -u spillwayd)",
             "%s", error.message);
        return false;
    }
    if (getsockopt(spillway_fd(cli->client), SOL_SOCKET, SO_PEERCRED, &peer, &n) == 0)
        doctor->daemon = peer.pid;
    r = spillway_hello(cli->client, &hello, &error);
    if (r != 0) {
        note(doctor, FAIL, "connection",
             r == -ETIMEDOUT ? "the daemon's loop does not run: see its log (journalctl -u spillwayd), restart it"
                             : "is this a spillwayd, and of this version?",
             "%s: %s", error.code, error.message);
        return false;
    }
    note(doctor, OK, "connection", NULL, "hello answered after %.1f ms", now_ms() - begin_ms);
    version = spillway_get_uint(&hello.object, "version", 0);
    if (version == SPILLWAY_PROTOCOL)
        note(doctor, OK, "version", NULL, "both speak protocol version %d; this program is %s", SPILLWAY_PROTOCOL,
             SPILLWAY_VERSION);
    else
        note(doctor, FAIL, "version", "install client and daemon of the same release",
             "the daemon speaks protocol version %llu, this program %d", (unsigned long long)version,
             SPILLWAY_PROTOCOL);
    spillway_result_free(&hello);
    return true;
}

static void check_health(struct doctor *doctor) {
    struct spillway_result health = {0};
    struct spillway_error error;
    struct spillway_text phase;
    bool is_ready;

    if (spillway_call(doctor->cli->client, "server.health", NULL, NULL, &health, &error) != 0) {
        note(doctor, FAIL, "health", "see the daemon's log (journalctl -u spillwayd)", "%s: %s", error.code,
             error.message);
        return;
    }
    phase = spillway_get_text(&health.object, "phase");
    is_ready = spillway_get_bool(&health.object, "ready", false);
    if (!spillway_get_bool(&health.object, "progressing", true))
        note(doctor, FAIL, "health", "work is out and does not come back: see the daemon's log, restart it",
             "the daemon makes no progress (phase %.*s)", (int)phase.n_bytes, phase.bytes);
    else
        note(doctor, is_ready ? OK : WARN, "health",
             is_ready ? NULL : "wait: `spillway status --wait 600` returns when it serves", "phase %.*s, %llu %%",
             (int)phase.n_bytes, phase.bytes, (unsigned long long)spillway_get_uint(&health.object, "percent", 0));
    spillway_result_free(&health);
}

/* ---- the machine --------------------------------------------------------------------------------------------------- */

/* The soft limit of locked memory of a process, from its table in /proc. False: it cannot be read. */
static bool read_memlock(pid_t pid, char *ret_limit, size_t n_room) {
    char path[64], line[256];
    bool found = false;
    FILE *file;

    snprintf(path, sizeof path, "/proc/%d/limits", (int)pid);
    file = fopen(path, "re");
    if (!file)
        return false;
    while (!found && fgets(line, sizeof line, file)) {
        static const char name[] = "Max locked memory";

        if (strncmp(line, name, sizeof name - 1) == 0) {
            char *value = line + sizeof name - 1 + strspn(line + sizeof name - 1, " ");

            snprintf(ret_limit, n_room, "%.*s", (int)strcspn(value, " "), value);
            found = true;
        }
    }
    fclose(file);
    return found;
}

static bool is_spillwayd(pid_t pid) {
    char path[64], name[32] = "";
    FILE *file;

    snprintf(path, sizeof path, "/proc/%d/comm", (int)pid);
    file = fopen(path, "re");
    if (file) {
        if (fgets(name, sizeof name, file))
            name[strcspn(name, "\n")] = 0;
        fclose(file);
    }
    return strcmp(name, "spillwayd") == 0;
}

/* Whoever listens first owns the socket: with socket activation that is not the daemon. */
static void check_memlock(struct doctor *doctor) {
    static const char advice[] =
        "pinned host memory needs it: LimitMEMLOCK=infinity in the unit, or ulimit -l unlimited";
    char limit[64];
    bool is_daemon = doctor->daemon > 0 && is_spillwayd(doctor->daemon);

    if (!read_memlock(is_daemon ? doctor->daemon : getpid(), limit, sizeof limit)) {
        note(doctor, WARN, "memory lock", "run this as the daemon's user or as root",
             "the daemon's limit cannot be read: %s", strerror(errno));
        return;
    }
    note(doctor, strcmp(limit, "unlimited") == 0 ? OK : WARN, "memory lock",
         strcmp(limit, "unlimited") == 0 ? NULL : advice, "%s%s for %s", limit,
         strcmp(limit, "unlimited") == 0 ? "" : " bytes",
         is_daemon ? "the daemon" : "this program (the daemon's own is not known)");
}

static void check_io_uring(struct doctor *doctor) {
    struct io_uring_params params = {0};
    long fd = syscall(SYS_io_uring_setup, 1, &params);

    if (fd >= 0) {
        close((int)fd);
        note(doctor, OK, "io_uring", NULL, "available to this program");
        return;
    }
    note(doctor, WARN, "io_uring",
         errno == ENOSYS
             ? "the disk tier needs a kernel with io_uring"
             : "the disk tier needs it: see /proc/sys/kernel/io_uring_disabled and the container's seccomp profile",
         "not available to this program: %s", strerror(errno));
}

static void check_devices(struct doctor *doctor) {
    static const char *const nodes[] = {"/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia-uvm"};
    char missing[128] = "", closed[128] = "";

    for (size_t i = 0; i < sizeof nodes / sizeof nodes[0]; i++) {
        char *list = access(nodes[i], F_OK) != 0 ? missing : access(nodes[i], R_OK | W_OK) != 0 ? closed : NULL;

        if (list)
            snprintf(list + strlen(list), 128 - strlen(list), " %s", nodes[i]);
    }
    if (strstr(missing, nodes[0]))
        note(doctor, WARN, "device", "for a GPU load its driver; the CPU backend (model.backend = cpu) needs none",
             "there are no NVIDIA device nodes");
    else if (*missing || *closed)
        note(doctor, FAIL, "device", "run nvidia-modprobe -u; give the daemon's user access (group video or render)",
             "missing:%s; no access:%s", *missing ? missing : " none", *closed ? closed : " none");
    else
        note(doctor, OK, "device", NULL, "NVIDIA device nodes are there and open to user %u", getuid());
}

static int doctor_run(struct cli *cli, const struct cli_args *args) {
    struct doctor doctor = {.cli = cli, .checks = json_array()};
    bool is_connected = check_socket(&doctor) && check_hello(&doctor);

    (void)args;
    if (is_connected)
        check_health(&doctor);
    check_memlock(&doctor);
    check_io_uring(&doctor);
    check_devices(&doctor);
    if (cli->json) {
        json_t *report = json_pack("{s:b,s:O}", "ok", !doctor.failed, "checks", doctor.checks);

        cli_print_json(report);
        json_decref(report);
    }
    json_decref(doctor.checks);
    if (!is_connected)
        return CLI_UNREACHABLE;
    return doctor.failed ? CLI_FAILED : CLI_OK;
}

const struct cli_command cli_doctor_commands[] = {
    {.name = "doctor",
     .arguments = "",
     .summary = "Check what answers depend on, and say what to do",
     .help = "Limits and devices are those of this user and machine; the daemon's own limit of locked memory is read "
             "if it\n"
             "may be. The exit code is 1 if a check failed, 3 if the daemon could not be reached.",
     .run = doctor_run},
    {0},
};
