/* Connections over real sockets in a real loop: requests, bad messages and large ones. Whatever a client does, others go
 * on and everything is given back. */
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "conn_rig.h"

/* ---- requests ---- */

static void many_requests_in_one_write_are_answered_in_order(void **state) {
    struct rig *rig = *state;
    struct client client;
    struct wire_out out;

    rig_start(rig);
    client = client_hello(rig);
    wire_out_init(&out, BIG_BYTES);
    for (int i = 0; i < 500; i++) {
        wire_array(&out, 4);
        wire_int(&out, 0);
        wire_int(&out, i % 100);
        wire_cstr(&out, "gen.list");
        wire_map(&out, 0);
    }
    client_send(&client, out.bytes.bytes, out.bytes.n);
    for (uint32_t i = 0; i < 500; i++)
        client_expect(&client, i % 100, NULL);
    assert_int_equal(rig->n_requests, 501);
    assert_int_equal(rig_stats(rig).n_requests, 501);
    wire_out_deinit(&out);
    client_close(&client);
    UNTIL(rig, rig_stats(rig).n_conns == 0);
    assert_int_equal(rig->n_closes, 1);
}

static void a_request_may_come_byte_by_byte(void **state) {
    struct rig *rig = *state;
    struct client client;
    struct wire_out out;

    rig_start(rig);
    client = client_hello(rig);
    wire_out_init(&out, BIG_BYTES);
    json_wire(&out, "[0, 9, \"gen.start\", {\"prompt\": \"some text\"}]");
    json_wire(&out, "[0, 10, \"gen.list\", {}]");
    for (size_t i = 0; i < out.bytes.n; i++) {
        client_send(&client, out.bytes.bytes + i, 1);
        rig_turn(rig);
    }
    client_expect(&client, 9, NULL);
    client_expect(&client, 10, NULL);
    assert_int_equal(rig->prompt_bytes, 9);
    wire_out_deinit(&out);
    client_close(&client);
}

static void what_the_table_refuses_is_answered_and_goes_no_further(void **state) {
    struct rig *rig = *state;
    struct client client;

    rig_start(rig);
    server_set_ready(rig->server, false);
    client = client_open(rig);
    client_send_json(&client, "[0, 2, \"server.health\", {}]");
    client_expect(&client, 2, "FORBIDDEN");
    client_send_json(&client, "[0, 3, \"hello\", {\"version\": 7}]");
    client_expect(&client, 3, "BAD_PARAM");
    client_send_json(&client, "[0, 4, \"hello\", {\"version\": 1}]");
    client_expect(&client, 4, NULL);
    client_send_json(&client, "[0, 5, \"gen.list\", {}]");
    client_expect(&client, 5, "MODEL_NOT_READY");
    client_send_json(&client, "[0, 6, \"server.health\", {}]");
    client_expect(&client, 6, NULL);
    server_set_ready(rig->server, true);
    client_send_json(&client, "[0, 7, \"gen.list\", {}]");
    client_expect(&client, 7, NULL);
    client_send_json(&client, "[0, 8, \"gen.stop\", {}]");
    client_expect(&client, 8, "UNKNOWN_METHOD");
    assert_int_equal(rig->n_requests, 3);
    assert_int_equal(rig_stats(rig).n_refused, 4);
    assert_int_equal(rig->n_errors[PROTO_FORBIDDEN], 1);
    assert_int_equal(rig->n_errors[PROTO_BAD_PARAM], 1);
    assert_int_equal(rig->n_errors[PROTO_MODEL_NOT_READY], 1);
    assert_int_equal(rig->n_errors[PROTO_UNKNOWN_METHOD], 1);
    assert_true(conn_is_admin(rig->last));
    assert_int_equal(conn_uid(rig->last), geteuid());
    assert_int_equal(conn_gid(rig->last), getegid());
    assert_int_equal(conn_pid(rig->last), getpid());
    assert_int_equal(conn_serial(rig->last), 1);
    client_close(&client);
}

/* As another user, blocking. */
static int run_stranger(const char *path) {
    static const char requests[] = "\x94\x00\x01\xa5hello\x81\xa7version\x01"
                                   "\x94\x00\x02\xacserver.drain\x80"
                                   "\x94\x00\x03\xa8gen.list\x80";
    char bytes[1024];
    size_t n = 0;
    int fd;

    if (setgid(65534) != 0 || setuid(65534) != 0)
        return 2;
    fd = rig_connect(path);
    if (send(fd, requests, sizeof requests - 1, 0) != (ssize_t)sizeof requests - 1)
        return 3;
    while (n < sizeof bytes && !memmem(bytes, n, "\x94\x01\x03\xc0", 4)) {
        ssize_t k = recv(fd, bytes + n, sizeof bytes - n, 0);

        if (k <= 0)
            return 4;
        n += (size_t)k;
    }
    return memmem(bytes, n, "FORBIDDEN", 9) ? 0 : 5;
}

static void admin_methods_are_not_for_other_users(void **state) {
    struct rig *rig = *state;
    int status = -1;
    pid_t pid;

    if (geteuid() != 0) /* cannot become another user */
        skip();
    rig->options.mode = 0666;
    rig_start(rig);
    assert_int_equal(chmod(rig->folder, 0755), 0);
    pid = fork();
    if (pid == 0)
        _exit(run_stranger(rig->path));
    UNTIL(rig, waitpid(pid, &status, WNOHANG) == pid);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
}

/* ---- bad messages ---- */

static void garbage_gets_one_bad_frame_and_the_end_and_others_go_on(void **state) {
    static const struct {
        const char *bytes;
        size_t n;
        uint32_t id;
    } cases[] = {
        {"GET / HTTP/1.1\r\n\r\n", 18, 0},
        {"\x94\x00\x05\xc1", 4, 5},
        {"\x94\x00\x06\xdd\xff\xff\xff\xff", 8, 6},
        {"\x94\x01\x05\xc0\x80", 5, 0},
        {"\x94\x00\x07\xa5hello\x82\xa1k\x01\xa1k\x01", 16, 7},
    };
    struct rig *rig = *state;
    struct client good;

    rig_start(rig);
    good = client_hello(rig);
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct client client = client_hello(rig);

        client_send(&client, cases[i].bytes, cases[i].n);
        client_expect(&client, cases[i].id, "BAD_FRAME");
        client_expect_end(&client);
        client_close(&client);
        assert_int_equal(rig->n_closes, (int)i + 1);
        assert_int_equal(rig_stats(rig).n_bad_frames, i + 1);
        client_send_json(&good, "[0, 9, \"gen.list\", {}]");
        client_expect(&good, 9, NULL);
    }
    UNTIL(rig, rig_stats(rig).n_conns == 1);
    client_close(&good);
}

static void requests_before_the_bad_one_are_answered(void **state) {
    struct rig *rig = *state;
    struct client client;
    struct wire_out out;

    rig_start(rig);
    client = client_hello(rig);
    wire_out_init(&out, BIG_BYTES);
    json_wire(&out, "[0, 2, \"gen.list\", {}]");
    text_add(&out.bytes, "\xc1 and more", 10);
    client_send(&client, out.bytes.bytes, out.bytes.n);
    client_expect(&client, 2, NULL);
    client_expect(&client, 0, "BAD_FRAME");
    client_expect_end(&client);
    wire_out_deinit(&out);
    client_close(&client);
}

static void a_client_may_vanish_at_any_byte(void **state) {
    struct rig *rig = *state;
    struct wire_out out;

    rig_start(rig);
    rig->options.conns_max = 4;
    wire_out_init(&out, BIG_BYTES);
    json_wire(&out, "[0, 1, \"hello\", {\"version\": 1}]");
    json_wire(&out, "[0, 2, \"gen.start\", {\"prompt\": \"a prompt\"}]");
    for (size_t n = 0; n <= out.bytes.n; n++)
        for (int is_half_close = 0; is_half_close < 2; is_half_close++) {
            struct client client = client_open(rig);

            client_send(&client, out.bytes.bytes, n);
            if (is_half_close) {
                shutdown(client.fd, SHUT_WR);
                UNTIL(rig, (client_receive(&client), client.at_end)); /* whatever it got before */
            }
            client_close(&client);
            UNTIL(rig, rig_stats(rig).n_accepted == 2 * n + (size_t)is_half_close + 1 && rig_stats(rig).n_conns == 0);
        }
    assert_int_equal(rig->n_closes, rig_stats(rig).n_accepted);
    assert_int_equal(rig_stats(rig).output_bytes, 0);
    assert_int_equal(rig_stats(rig).input_bytes, 0);
    wire_out_deinit(&out);
}

static void a_half_message_ends_with_bad_frame_after_its_time(void **state) {
    struct rig *rig = *state;
    struct client client;

    rig_start(rig);
    client = client_hello(rig);
    client_send(&client, "\x94\x00\x05\xa8gen", 7);
    client_expect(&client, 5, "BAD_FRAME");
    client_expect_end(&client);
    client_close(&client);
    client = client_hello(rig);
    client_send(&client, "\x94\x00\x06\xa8gen", 7);
    rig_turn(rig);
    shutdown(client.fd, SHUT_WR);
    client_expect(&client, 6, "BAD_FRAME");
    client_expect_end(&client);
    client_close(&client);
}

/* ---- large messages ---- */

static void send_large(struct client *client, size_t n_prompt) {
    struct wire_out out;
    char *bytes = malloc(n_prompt);

    assert_non_null(bytes);
    memset(bytes, 'a', n_prompt);
    wire_out_init(&out, BIG_BYTES);
    wire_array(&out, 4);
    wire_int(&out, 0);
    wire_int(&out, 3);
    wire_cstr(&out, "gen.start");
    wire_map(&out, 1);
    wire_key(&out, "prompt");
    wire_str(&out, (struct span){bytes, n_prompt});
    client_send(client, out.bytes.bytes, out.bytes.n);
    wire_out_deinit(&out);
    free(bytes);
}

static void large_messages_share_a_limit_and_all_arrive(void **state) {
    enum { N = 12, PROMPT_BYTES = 1000000 };
    struct rig *rig = *state;
    struct client clients[N];
    char *bytes = malloc(PROMPT_BYTES);
    size_t n_sent[N] = {0}, input_bytes_max = 0;
    struct wire_out out;
    int n_done = 0;

    assert_non_null(bytes);
    memset(bytes, 'a', PROMPT_BYTES);
    rig->options.limits.message_timeout_ms = 60000;
    rig_start(rig);
    for (int i = 0; i < N; i++)
        clients[i] = client_hello(rig);
    wire_out_init(&out, BIG_BYTES);
    wire_array(&out, 4);
    wire_int(&out, 0);
    wire_int(&out, 3);
    wire_cstr(&out, "gen.start");
    wire_map(&out, 1);
    wire_key(&out, "prompt");
    wire_str(&out, (struct span){bytes, PROMPT_BYTES});
    while (n_done < N) { /* all at once, a piece of each in turn: 12 MB of messages through 2 MiB */
        for (int i = 0; i < N; i++) {
            size_t n = out.bytes.n - n_sent[i] < 50000 ? out.bytes.n - n_sent[i] : 50000;
            ssize_t k = n > 0 ? send(clients[i].fd, out.bytes.bytes + n_sent[i], n, 0) : 0;

            if (k > 0) {
                n_sent[i] += (size_t)k;
                n_done += n_sent[i] == out.bytes.n;
            }
        }
        rig_turn(rig);
        if (rig_stats(rig).input_bytes > input_bytes_max)
            input_bytes_max = rig_stats(rig).input_bytes;
    }
    for (int i = 0; i < N; i++) {
        client_expect(&clients[i], 3, NULL);
        client_close(&clients[i]);
    }
    assert_int_equal(rig->prompt_bytes, (size_t)N * PROMPT_BYTES);
    assert_true(input_bytes_max > 1 << 20);
    assert_true(input_bytes_max <= rig->options.limits.input_bytes_max + rig->options.limits.frame_bytes);
    assert_int_equal(rig_stats(rig).input_bytes, 0);
    wire_out_deinit(&out);
    free(bytes);
}

static void a_message_beyond_the_limit_is_refused_before_it_came(void **state) {
    struct rig *rig = *state;
    struct client client;

    rig_start(rig);
    client = client_hello(rig);
    send_large(&client, (1 << 20) - 20);
    client_expect(&client, 3, "BAD_FRAME");
    client_expect_end(&client);
    client_close(&client);
    client = client_hello(rig);
    send_large(&client, (1 << 20) - 30);
    client_expect(&client, 3, NULL);
    client_close(&client);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        CASE(many_requests_in_one_write_are_answered_in_order),
        CASE(a_request_may_come_byte_by_byte),
        CASE(what_the_table_refuses_is_answered_and_goes_no_further),
        CASE(admin_methods_are_not_for_other_users),
        CASE(garbage_gets_one_bad_frame_and_the_end_and_others_go_on),
        CASE(requests_before_the_bad_one_are_answered),
        CASE(a_client_may_vanish_at_any_byte),
        CASE(a_half_message_ends_with_bad_frame_after_its_time),
        CASE(large_messages_share_a_limit_and_all_arrive),
        CASE(a_message_beyond_the_limit_is_refused_before_it_came),
    };

    return rig_run_tests(tests, ARRAY_LEN(tests));
}
