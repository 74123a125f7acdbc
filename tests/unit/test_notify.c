/* The service manager's protocol, against a socket that stands in for it. */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cmocka.h>

#include "notify.h"

static char folder[] = "/tmp/test_notify.XXXXXX";
static int manager = -1;
static char path[128];

/* A socket at folder/name, or an abstract one of the same name. */
static void open_manager(bool abstract) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    socklen_t n;

    snprintf(path, sizeof path, "%s/notify", folder);
    memcpy(address.sun_path, path, strlen(path));
    n = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + strlen(path) + 1);
    if (abstract) {
        address.sun_path[0] = '\0';
        path[0] = '@';
        n--;
    }
    manager = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    assert_true(manager >= 0);
    assert_int_equal(bind(manager, (struct sockaddr *)&address, n), 0);
}

static int close_manager(void **state) {
    (void)state;
    if (manager >= 0)
        close(manager);
    manager = -1;
    snprintf(path, sizeof path, "%s/notify", folder);
    unlink(path);
    return 0;
}

static const char *received(void) {
    static char message[512];
    ssize_t n = recv(manager, message, sizeof message - 1, 0);

    message[n > 0 ? n : 0] = '\0';
    return message;
}

static void messages_arrive_one_by_one(void **state) {
    (void)state;
    for (int abstract = 0; abstract < 2; abstract++) {
        struct notify notify;

        open_manager(abstract);
        assert_int_equal(notify_open(&notify, &(struct notify_env){.notify_socket = path}, 7), 0);
        assert_int_equal(notify.watchdog_us, 0);
        assert_int_equal(notify_status(&notify, "loading %d %%\nREADY=1", 40), 0);
        assert_string_equal(received(), "STATUS=loading 40 % READY=1");
        assert_int_equal(notify_extend(&notify, 5000000), 0);
        assert_string_equal(received(), "EXTEND_TIMEOUT_USEC=5000000");
        assert_int_equal(notify_ready(&notify), 0);
        assert_string_equal(received(), "READY=1");
        assert_int_equal(notify_watchdog(&notify), 0);
        assert_string_equal(received(), "WATCHDOG=1");
        assert_int_equal(notify_reloading(&notify, 12), 0);
        assert_string_equal(received(), "RELOADING=1\nMONOTONIC_USEC=12");
        assert_int_equal(notify_stopping(&notify), 0);
        assert_string_equal(received(), "STOPPING=1");
        notify_close(&notify);
        notify_close(&notify); /* is fine */
        close_manager(NULL);
    }
}

static void without_a_manager_nothing_happens(void **state) {
    struct notify notify;

    (void)state;
    assert_int_equal(notify_open(&notify, &(struct notify_env){.watchdog_usec = "5"}, 7), 0);
    assert_int_equal(notify.watchdog_us, 0);
    assert_int_equal(notify_ready(&notify), 0);
    assert_int_equal(notify_status(&notify, "x"), 0);
    notify_close(&notify);
}

static void a_manager_that_does_not_read_costs_messages_not_time(void **state) {
    struct notify notify;
    int r = 0;

    (void)state;
    open_manager(false);
    assert_int_equal(notify_open(&notify, &(struct notify_env){.notify_socket = path}, 7), 0);
    for (int i = 0; i < 100000 && r == 0; i++)
        r = notify_watchdog(&notify);
    assert_int_equal(r, -EAGAIN);
    close_manager(NULL);
    assert_int_equal(notify_ready(&notify), -ECONNREFUSED);
    notify_close(&notify);
}

static void the_watchdog_is_for_the_process_it_names(void **state) {
    struct notify_env env = {.watchdog_usec = "3000000", .watchdog_pid = "7"};
    struct notify notify;

    (void)state;
    open_manager(false);
    env.notify_socket = path;
    assert_int_equal(notify_open(&notify, &env, 7), 0);
    assert_int_equal(notify.watchdog_us, 3000000);
    notify_close(&notify);
    assert_int_equal(notify_open(&notify, &env, 8), 0);
    assert_int_equal(notify.watchdog_us, 0);
    notify_close(&notify);
    env.watchdog_pid = NULL;
    assert_int_equal(notify_open(&notify, &env, 8), 0);
    assert_int_equal(notify.watchdog_us, 3000000);
    notify_close(&notify);
}

static void nonsense_is_refused(void **state) {
    char longest[200] = "/";
    struct notify notify;
    struct notify_env env = {.notify_socket = "relative"};

    (void)state;
    assert_int_equal(notify_open(&notify, &env, 7), -EINVAL);
    assert_int_equal(notify.fd, -1);
    memset(longest + 1, 'x', sizeof longest - 2);
    env.notify_socket = longest;
    assert_int_equal(notify_open(&notify, &env, 7), -EINVAL);
    env.notify_socket = "/no/such/socket";
    assert_int_equal(notify_open(&notify, &env, 7), -ENOENT);
    open_manager(false);
    env = (struct notify_env){.notify_socket = path, .watchdog_usec = "5s"};
    assert_int_equal(notify_open(&notify, &env, 7), -EINVAL);
    env = (struct notify_env){.notify_socket = path, .watchdog_usec = "99999999999999999999"};
    assert_int_equal(notify_open(&notify, &env, 7), -EINVAL);
    env = (struct notify_env){.notify_socket = path, .watchdog_usec = "5", .watchdog_pid = ""};
    assert_int_equal(notify_open(&notify, &env, 7), -EINVAL);
}

/* Descriptors from NOTIFY_LISTEN_FD on, as a manager would leave them: dup2 clears close-on-exec. */
static void sockets_are_named_and_closed_on_exec(void **state) {
    struct notify_env env = {.listen_fds = "2", .listen_pid = "7", .listen_fdnames = "client:"};
    struct notify_listen listen[NOTIFY_LISTEN_MAX];
    int saved[2];

    (void)state;
    for (int i = 0; i < 2; i++) {
        saved[i] = fcntl(NOTIFY_LISTEN_FD + i, F_DUPFD_CLOEXEC, 20);
        assert_int_equal(dup2(STDIN_FILENO, NOTIFY_LISTEN_FD + i), NOTIFY_LISTEN_FD + i);
    }
    assert_int_equal(notify_listen_fds(&env, 7, listen), 2);
    assert_int_equal(listen[0].fd, NOTIFY_LISTEN_FD);
    assert_string_equal(listen[0].name, "client");
    assert_string_equal(listen[1].name, "");
    assert_true(fcntl(NOTIFY_LISTEN_FD, F_GETFD) & FD_CLOEXEC);
    assert_true(fcntl(NOTIFY_LISTEN_FD + 1, F_GETFD) & FD_CLOEXEC);
    env.listen_fdnames = NULL;
    assert_int_equal(notify_listen_fds(&env, 7, listen), 2);
    assert_string_equal(listen[0].name, "");
    for (int i = 0; i < 2; i++) {
        close(NOTIFY_LISTEN_FD + i);
        if (saved[i] >= 0) {
            dup2(saved[i], NOTIFY_LISTEN_FD + i);
            close(saved[i]);
        }
    }
}

static void sockets_of_another_process_are_left_alone(void **state) {
    struct notify_listen listen[NOTIFY_LISTEN_MAX];

    (void)state;
    assert_int_equal(notify_listen_fds(&(struct notify_env){.listen_fds = "1", .listen_pid = "8"}, 7, listen), 0);
    assert_int_equal(notify_listen_fds(&(struct notify_env){.listen_fds = "1"}, 7, listen), 0);
    assert_int_equal(notify_listen_fds(&(struct notify_env){.listen_pid = "7"}, 7, listen), 0);
    assert_int_equal(notify_listen_fds(&(struct notify_env){.listen_fds = "x", .listen_pid = "7"}, 7, listen), -EINVAL);
    assert_int_equal(notify_listen_fds(&(struct notify_env){.listen_fds = "1", .listen_pid = "-7"}, 7, listen),
                     -EINVAL);
    assert_int_equal(notify_listen_fds(&(struct notify_env){.listen_fds = "9", .listen_pid = "7"}, 7, listen), -E2BIG);
}

static void the_environment_is_taken_once(void **state) {
    struct notify_env env;

    (void)state;
    setenv("NOTIFY_SOCKET", "/x", 1);
    setenv("LISTEN_FDS", "1", 1);
    unsetenv("WATCHDOG_USEC");
    assert_true(notify_env_take(&env));
    assert_string_equal(env.notify_socket, "/x");
    assert_string_equal(env.listen_fds, "1");
    assert_null(env.watchdog_usec);
    assert_null(getenv("NOTIFY_SOCKET"));
    assert_null(getenv("LISTEN_FDS"));
    notify_env_free(&env);
    assert_true(notify_env_take(&env));
    assert_null(env.notify_socket);
    notify_env_free(&env);
}

static int make_folder(void **state) {
    (void)state;
    return mkdtemp(folder) ? 0 : -1;
}

static int remove_folder(void **state) {
    (void)state;
    return rmdir(folder);
}

#define CASE(name) cmocka_unit_test_teardown(name, close_manager)

int main(void) {
    const struct CMUnitTest tests[] = {
        CASE(messages_arrive_one_by_one),
        CASE(without_a_manager_nothing_happens),
        CASE(a_manager_that_does_not_read_costs_messages_not_time),
        CASE(the_watchdog_is_for_the_process_it_names),
        CASE(nonsense_is_refused),
        CASE(sockets_are_named_and_closed_on_exec),
        CASE(sockets_of_another_process_are_left_alone),
        CASE(the_environment_is_taken_once),
    };

    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
