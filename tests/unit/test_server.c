/* The listening socket: its mode, whose it is, and that it goes with the server. */
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include "conn_rig.h"

/* ---- the socket ---- */

static void the_socket_has_its_mode_and_goes_with_the_server(void **state) {
    struct rig *rig = *state;
    struct stat stat;
    mode_t before = umask(0);

    rig_start(rig);
    assert_int_equal(umask(before), 0);
    assert_int_equal(lstat(rig->path, &stat), 0);
    assert_int_equal(stat.st_mode & 07777, 0640);
    server_stop_accepting(rig->server);
    assert_int_equal(lstat(rig->path, &stat), -1);
}

static void a_socket_nobody_listens_on_is_replaced(void **state) {
    struct rig *rig = *state;
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    struct client client;

    strcpy(address.sun_path, rig->path);
    assert_int_equal(bind(fd, (struct sockaddr *)&address, sizeof address), 0);
    close(fd);
    rig_start(rig);
    client = client_hello(rig);
    client_close(&client);
}

static void refuses_to_open(struct rig *rig, const char *why) {
    struct report report = {0};
    struct server *server;

    assert_int_equal(server_open(&rig->loop, &rig->options, &server, &report), SERVER_E_REFUSED);
    if (!strstr(report.line, why))
        fail_msg("said \"%s\", not \"%s\"", report.line, why);
}

static void a_socket_in_use_and_a_file_are_left_alone(void **state) {
    struct rig *rig = *state;
    char path[200];
    FILE *file;

    rig_start(rig);
    refuses_to_open(rig, "another process listens on");
    server_stop_accepting(rig->server);
    file = fopen(rig->path, "w");
    assert_non_null(file);
    fclose(file);
    refuses_to_open(rig, "is there and is no socket");
    assert_int_equal(access(rig->path, F_OK), 0);
    memset(path, 'x', sizeof path);
    path[sizeof path - 1] = 0;
    rig->options.path = path;
    refuses_to_open(rig, "has 199 bytes; a socket's path has 1 to 107");
}

static void a_path_that_became_another_socket_is_not_removed(void **state) {
    struct rig *rig = *state;
    char aside[120];
    struct stat stat;

    rig_start(rig);
    snprintf(aside, sizeof aside, "%s.aside", rig->path);
    assert_int_equal(rename(rig->path, aside), 0);
    assert_int_equal(mknod(rig->path, S_IFREG | 0600, 0), 0);
    server_stop_accepting(rig->server);
    assert_int_equal(lstat(rig->path, &stat), 0);
    assert_int_equal(unlink(aside), 0);
}

static void a_socket_that_was_passed_in_is_taken_and_its_path_is_kept(void **state) {
    struct rig *rig = *state;
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct client client;
    struct stat stat;
    int fds[2];

    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
    close(fds[1]);
    rig->options.listen_fd = fds[0];
    refuses_to_open(rig, "does not listen");
    rig->options.listen_fd = socket(AF_INET, SOCK_STREAM, 0);
    refuses_to_open(rig, "is no Unix socket");
    rig->options.listen_fd = socket(AF_UNIX, SOCK_STREAM, 0);
    strcpy(address.sun_path, rig->path);
    assert_int_equal(bind(rig->options.listen_fd, (struct sockaddr *)&address, sizeof address), 0);
    assert_int_equal(listen(rig->options.listen_fd, 5), 0);
    rig_start(rig);
    client = client_hello(rig);
    client_close(&client);
    server_stop_accepting(rig->server);
    assert_int_equal(lstat(rig->path, &stat), 0);
}

static void closing_the_server_closes_all(void **state) {
    struct rig *rig = *state;
    struct client clients[3];

    rig_start(rig);
    rig->holds = true;
    for (int i = 0; i < 3; i++)
        clients[i] = client_hello(rig);
    client_send_json(&clients[0], "[0, 5, \"gen.list\", {}]");
    client_send(&clients[1], "\x94\x00", 2);
    rig_produce(rig, 2000000); /* the third does not read */
    UNTIL(rig, rig->n_held == 1);
    server_close(rig->server, rig_on_server_closed, rig);
    rig->server = NULL;
    UNTIL(rig, rig->is_closed);
    assert_int_equal(rig->n_closes, 3);
    client_expect_end(&clients[0]);
    client_expect_end(&clients[1]);
    for (int i = 0; i < 3; i++)
        client_close(&clients[i]);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        CASE(the_socket_has_its_mode_and_goes_with_the_server),
        CASE(a_socket_nobody_listens_on_is_replaced),
        CASE(a_socket_in_use_and_a_file_are_left_alone),
        CASE(a_path_that_became_another_socket_is_not_removed),
        CASE(a_socket_that_was_passed_in_is_taken_and_its_path_is_kept),
        CASE(closing_the_server_closes_all),
    };

    return rig_run_tests(tests, ARRAY_LEN(tests));
}
