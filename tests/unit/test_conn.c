/* Connections over real sockets in a real loop: whatever a client does, others go on and everything is given back. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>
#include <uv.h>

#include "base.h"
#include "frame.h"
#include "json_wire.h"
#include "proto.h"
#include "server.h"

enum { HELD_MAX = 64, WAIT_MS = 5000, BIG_BYTES = 16 << 20 };

/* ---- a server that answers, or keeps requests until it is told to answer ---- */

struct rig {
    uv_loop_t loop;
    struct server *server;
    struct server_options options;
    char folder[64], path[96];
    bool holds, is_closed;
    struct conn *held[HELD_MAX], *last;
    uint32_t held_id[HELD_MAX];
    int closes_after; /* that many requests, from inside on_request; 0: not */
    int n_held, n_requests, n_closes, n_slow, n_drained, n_fds;
    size_t prompt_bytes;
    size_t answer_bytes; /* of the string in an answer */
};

static int count_fds(void) {
    DIR *dir = opendir("/proc/self/fd");
    int n = 0;

    assert_non_null(dir);
    while (readdir(dir))
        n++;
    closedir(dir);
    return n;
}

static void respond(struct rig *rig, struct conn *conn, uint32_t id) {
    char *bytes = calloc(1, rig->answer_bytes + 1);
    struct wire_out out;

    assert_non_null(bytes);
    wire_out_init(&out, BIG_BYTES);
    proto_result_begin(&out, id);
    wire_map(&out, 1);
    wire_key(&out, "text");
    wire_str(&out, (struct span){bytes, rig->answer_bytes});
    assert_int_equal(conn_respond(conn, &out), 0);
    wire_out_deinit(&out);
    free(bytes);
}

static void on_request(void *user, struct conn *conn, struct request *request) {
    struct rig *rig = user;

    rig->n_requests++;
    rig->last = conn;
    if (request->method == METHOD_GEN_START)
        rig->prompt_bytes += request->gen->prompt.n;
    if (!rig->holds || request->method == METHOD_HELLO) {
        respond(rig, conn, request->id);
    } else {
        assert_true(rig->n_held < HELD_MAX);
        rig->held[rig->n_held] = conn;
        rig->held_id[rig->n_held++] = request->id;
    }
    request_free(request);
    if (rig->closes_after == rig->n_requests)
        conn_close(conn);
}

static void on_slow(void *user, struct conn *conn) {
    (void)conn;
    ((struct rig *)user)->n_slow++;
}

static void on_drained(void *user, struct conn *conn) {
    assert_false(conn_is_congested(conn));
    ((struct rig *)user)->n_drained++;
}

static void on_close(void *user, struct conn *conn) {
    struct rig *rig = user;

    rig->n_closes++;
    if (rig->last == conn)
        rig->last = NULL;
    for (int i = 0; i < rig->n_held; i++)
        if (rig->held[i] == conn)
            rig->held[i] = NULL;
}

static void on_server_closed(void *user) {
    ((struct rig *)user)->is_closed = true;
}

static int setup(void **state) {
    struct rig *rig = calloc(1, sizeof *rig);

    assert_non_null(rig);
    signal(SIGPIPE, SIG_IGN);
    rig->n_fds = count_fds();
    strcpy(rig->folder, "/tmp/test_conn.XXXXXX");
    assert_non_null(mkdtemp(rig->folder));
    snprintf(rig->path, sizeof rig->path, "%s/socket", rig->folder);
    assert_int_equal(uv_loop_init(&rig->loop), 0);
    rig->answer_bytes = 8;
    rig->options = (struct server_options){
        .path = rig->path,
        .mode = 0640,
        .listen_fd = -1,
        .backlog = 16,
        .conns_max = 40,
        .limits = {.frame_bytes = 1 << 20,
                   .input_bytes_max = 2 << 20,
                   .output_low_bytes = 64 << 10,
                   .output_high_bytes = 256 << 10,
                   .output_bytes_max = 8 << 20,
                   .requests_max = 4,
                   .slow_timeout_ms = 200,
                   .message_timeout_ms = 300,
                   .linger_ms = 200},
        .callbacks = {rig, on_request, on_slow, on_drained, on_close},
    };
    *state = rig;
    return 0;
}

static void start(struct rig *rig) {
    struct report report;

    if (server_open(&rig->loop, &rig->options, &rig->server, &report) != 0)
        fail_msg("%s", report.line);
    server_set_ready(rig->server, true);
}

/* One pass over the loop, without waiting long. */
static void turn(struct rig *rig) {
    uv_run(&rig->loop, UV_RUN_NOWAIT);
    usleep(100);
}

#define UNTIL(rig, condition)                                                                                          \
    do {                                                                                                               \
        uint64_t begin_ = uv_hrtime();                                                                                 \
        while (!(condition)) {                                                                                         \
            turn(rig);                                                                                                 \
            if (uv_hrtime() - begin_ > WAIT_MS * 1000000ULL)                                                           \
                fail_msg("line %d: never came: %s", __LINE__, #condition);                                             \
        }                                                                                                              \
    } while (0)

static struct server_stats stats_of(struct rig *rig) {
    struct server_stats stats;

    server_read_stats(rig->server, &stats);
    return stats;
}

static int teardown(void **state) {
    struct rig *rig = *state;

    if (rig->server) {
        server_close(rig->server, on_server_closed, rig);
        UNTIL(rig, rig->is_closed);
    }
    uv_run(&rig->loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&rig->loop), 0);
    unlink(rig->path);
    assert_int_equal(rmdir(rig->folder), 0);
    assert_int_equal(count_fds(), rig->n_fds);
    free(rig);
    return 0;
}

/* ---- a client ---- */

struct client {
    struct rig *rig;
    int fd;
    struct text in;
    size_t n_read; /* bytes of it that were looked at */
    bool at_end;
};

static int connect_to(const char *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

    assert_true(fd >= 0);
    strcpy(address.sun_path, path);
    assert_int_equal(connect(fd, (struct sockaddr *)&address, sizeof address), 0);
    return fd;
}

static struct client client_open(struct rig *rig) {
    struct client client = {.rig = rig, .fd = connect_to(rig->path)};

    assert_int_equal(fcntl(client.fd, F_SETFL, O_NONBLOCK), 0);
    text_init(&client.in, 64 << 20);
    return client;
}

static void client_close(struct client *client) {
    close(client->fd);
    text_deinit(&client->in);
}

static void client_send(struct client *client, const char *bytes, size_t n) {
    for (size_t i = 0; i < n;) {
        ssize_t n_sent = send(client->fd, bytes + i, n - i, 0);

        if (n_sent > 0)
            i += (size_t)n_sent;
        else if (errno == EPIPE || errno == ECONNRESET)
            return;
        else
            turn(client->rig);
    }
}

static void client_send_json(struct client *client, const char *json) {
    struct wire_out out;

    wire_out_init(&out, BIG_BYTES);
    json_wire(&out, json);
    client_send(client, out.bytes.bytes, out.bytes.n);
    wire_out_deinit(&out);
}

static void client_receive(struct client *client) {
    char bytes[16384];
    ssize_t n = recv(client->fd, bytes, sizeof bytes, 0);

    if (n > 0)
        text_add(&client->in, bytes, (size_t)n);
    else if (n == 0 || errno == ECONNRESET)
        client->at_end = true;
}

/* The next message as it came. */
static struct span client_message(struct client *client) {
    struct frame_scan scan;
    struct report report;
    uint64_t begin = uv_hrtime();
    size_t n = 0;
    int e;

    frame_scan_init(&scan, BIG_BYTES);
    for (;;) {
        e = frame_scan(&scan, client->in.bytes + client->n_read, client->in.n - client->n_read, &n, &report);
        if (e != FRAME_E_MORE)
            break;
        if (client->at_end || uv_hrtime() - begin > WAIT_MS * 1000000ULL)
            fail_msg("no message came");
        turn(client->rig);
        client_receive(client);
    }
    assert_int_equal(e, 0);
    client->n_read += n;
    return (struct span){client->in.bytes + client->n_read - n, n};
}

/* The next message is the response to id; an error with that code, or a result if code is NULL. */
static void client_expect(struct client *client, uint32_t id, const char *code) {
    struct span message = client_message(client);

    assert_memory_equal(message.bytes, "\x94\x01", 2);
    assert_int_equal((uint8_t)message.bytes[2], id); /* tests use ids below 128 */
    if (!code)
        assert_int_equal((uint8_t)message.bytes[3], 0xc0);
    else if (span_find(message, code) < 0)
        fail_msg("no %s in %.*s", code, (int)message.n, message.bytes);
}

static void client_expect_end(struct client *client) {
    UNTIL(client->rig, (client_receive(client), client->at_end));
    assert_int_equal(client->in.n, client->n_read);
}

static struct client client_hello(struct rig *rig) {
    struct client client = client_open(rig);

    client_send_json(&client, "[0, 1, \"hello\", {\"version\": 1}]");
    client_expect(&client, 1, NULL);
    return client;
}

/* ---- requests ---- */

static void many_requests_in_one_write_are_answered_in_order(void **state) {
    struct rig *rig = *state;
    struct client client;
    struct wire_out out;

    start(rig);
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
    assert_int_equal(stats_of(rig).n_requests, 501);
    wire_out_deinit(&out);
    client_close(&client);
    UNTIL(rig, stats_of(rig).n_conns == 0);
    assert_int_equal(rig->n_closes, 1);
}

static void a_request_may_come_byte_by_byte(void **state) {
    struct rig *rig = *state;
    struct client client;
    struct wire_out out;

    start(rig);
    client = client_hello(rig);
    wire_out_init(&out, BIG_BYTES);
    json_wire(&out, "[0, 9, \"gen.start\", {\"prompt\": \"some text\"}]");
    json_wire(&out, "[0, 10, \"gen.list\", {}]");
    for (size_t i = 0; i < out.bytes.n; i++) {
        client_send(&client, out.bytes.bytes + i, 1);
        turn(rig);
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

    start(rig);
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
    assert_int_equal(stats_of(rig).n_refused, 4);
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
    fd = connect_to(path);
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
    start(rig);
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

    start(rig);
    good = client_hello(rig);
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct client client = client_hello(rig);

        client_send(&client, cases[i].bytes, cases[i].n);
        client_expect(&client, cases[i].id, "BAD_FRAME");
        client_expect_end(&client);
        client_close(&client);
        assert_int_equal(rig->n_closes, (int)i + 1);
        assert_int_equal(stats_of(rig).n_bad_frames, i + 1);
        client_send_json(&good, "[0, 9, \"gen.list\", {}]");
        client_expect(&good, 9, NULL);
    }
    UNTIL(rig, stats_of(rig).n_conns == 1);
    client_close(&good);
}

static void requests_before_the_bad_one_are_answered(void **state) {
    struct rig *rig = *state;
    struct client client;
    struct wire_out out;

    start(rig);
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

    start(rig);
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
            UNTIL(rig, stats_of(rig).n_accepted == 2 * n + (size_t)is_half_close + 1 && stats_of(rig).n_conns == 0);
        }
    assert_int_equal(rig->n_closes, stats_of(rig).n_accepted);
    assert_int_equal(stats_of(rig).output_bytes, 0);
    assert_int_equal(stats_of(rig).input_bytes, 0);
    wire_out_deinit(&out);
}

static void a_half_message_ends_with_bad_frame_after_its_time(void **state) {
    struct rig *rig = *state;
    struct client client;

    start(rig);
    client = client_hello(rig);
    client_send(&client, "\x94\x00\x05\xa8gen", 7);
    client_expect(&client, 5, "BAD_FRAME");
    client_expect_end(&client);
    client_close(&client);
    client = client_hello(rig);
    client_send(&client, "\x94\x00\x06\xa8gen", 7);
    turn(rig);
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
    start(rig);
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
        turn(rig);
        if (stats_of(rig).input_bytes > input_bytes_max)
            input_bytes_max = stats_of(rig).input_bytes;
    }
    for (int i = 0; i < N; i++) {
        client_expect(&clients[i], 3, NULL);
        client_close(&clients[i]);
    }
    assert_int_equal(rig->prompt_bytes, (size_t)N * PROMPT_BYTES);
    assert_true(input_bytes_max > 1 << 20);
    assert_true(input_bytes_max <= rig->options.limits.input_bytes_max + rig->options.limits.frame_bytes);
    assert_int_equal(stats_of(rig).input_bytes, 0);
    wire_out_deinit(&out);
    free(bytes);
}

static void a_message_beyond_the_limit_is_refused_before_it_came(void **state) {
    struct rig *rig = *state;
    struct client client;

    start(rig);
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

/* ---- too much ---- */

static void unanswered_requests_stop_the_reading(void **state) {
    struct rig *rig = *state;
    struct client client;

    start(rig);
    rig->holds = true;
    client = client_hello(rig);
    for (int i = 0; i < 10; i++)
        client_send_json(&client, "[0, 5, \"gen.list\", {}]");
    UNTIL(rig, rig->n_held == 4);
    for (int i = 0; i < 50; i++)
        turn(rig);
    assert_int_equal(rig->n_held, 4);
    for (int i = 0; i < 10; i++) {
        UNTIL(rig, rig->n_held > i);
        respond(rig, rig->held[i], rig->held_id[i]);
        client_expect(&client, 5, NULL);
    }
    assert_int_equal(rig->n_held, 10);
    client_close(&client);
}

static void a_client_that_vanishes_while_it_is_not_read_is_noticed(void **state) {
    struct rig *rig = *state;
    struct client client;

    start(rig);
    rig->holds = true;
    client = client_hello(rig);
    for (int i = 0; i < 10; i++)
        client_send_json(&client, "[0, 5, \"gen.list\", {}]");
    UNTIL(rig, rig->n_held == 4);
    client_close(&client);
    UNTIL(rig, rig->n_closes == 1 && stats_of(rig).n_conns == 0);
}

static void produce(struct rig *rig, size_t n_bytes) {
    struct wire_out out;
    char bytes[1000] = {0};

    wire_out_init(&out, BIG_BYTES);
    for (size_t n = 0; n < n_bytes; n += sizeof bytes) {
        proto_event_begin(&out, "gen.event");
        wire_map(&out, 1);
        wire_key(&out, "text");
        wire_str(&out, (struct span){bytes, sizeof bytes});
        assert_int_equal(conn_send(rig->last, &out), 0);
        assert_int_equal(out.bytes.n, 0);
    }
    wire_out_deinit(&out);
}

static void output_above_the_high_mark_is_congestion_until_it_is_read(void **state) {
    struct rig *rig = *state;
    struct client client;

    rig->options.limits.slow_timeout_ms = 60000;
    start(rig);
    client = client_hello(rig);
    produce(rig, 200000);
    assert_false(conn_is_congested(rig->last));
    produce(rig, 1000000);
    assert_true(conn_is_congested(rig->last));
    for (int i = 0; i < 20; i++)
        turn(rig); /* the socket takes some, not all */
    assert_true(conn_is_congested(rig->last));
    assert_true(conn_output_bytes(rig->last) > 256 << 10);
    client_send_json(&client, "[0, 5, \"gen.list\", {}]"); /* is not read now */
    for (int i = 0; i < 20; i++)
        turn(rig);
    assert_int_equal(rig->n_requests, 1);
    for (int i = 0; i < 1200; i++)
        assert_memory_equal(client_message(&client).bytes, "\x93\x02", 2);
    client_expect(&client, 5, NULL);
    assert_int_equal(rig->n_drained, 1);
    assert_int_equal(rig->n_slow, 0);
    client_close(&client);
}

static void a_client_that_does_not_read_is_reported_then_closed(void **state) {
    struct rig *rig = *state;
    struct client client, good;

    start(rig);
    good = client_hello(rig);
    client = client_hello(rig);
    produce(rig, 2000000);
    UNTIL(rig, rig->n_slow == 1);
    assert_int_equal(rig->n_closes, 0);
    UNTIL(rig, rig->n_closes == 1);
    assert_int_equal(rig->n_slow, 1);
    assert_int_equal(stats_of(rig).n_slow_closes, 1);
    UNTIL(rig, stats_of(rig).n_conns == 1);
    assert_int_equal(stats_of(rig).output_bytes, 0);
    client_send_json(&good, "[0, 5, \"gen.list\", {}]");
    client_expect(&good, 5, NULL);
    client_close(&client);
    client_close(&good);
}

static void a_client_that_reads_slowly_is_not_slow(void **state) {
    struct rig *rig = *state;
    struct client client;
    size_t n = 0;

    start(rig);
    client = client_hello(rig);
    produce(rig, 4000000);
    while (n < 3980000) { /* 4 MB in about a second; each 200 ms take more than the 192 KiB between the marks */
        client_receive(&client);
        usleep(3000);
        turn(rig);
        n = client.in.n;
    }
    assert_int_equal(rig->n_slow, 0);
    assert_int_equal(rig->n_closes, 0);
    client_close(&client);
}

static void more_output_than_a_connection_may_have_closes_it(void **state) {
    struct rig *rig = *state;
    struct client client;

    start(rig);
    client = client_hello(rig);
    produce(rig, 9 << 20);
    assert_true(conn_output_bytes(rig->last) <= 8 << 20);
    UNTIL(rig, rig->n_closes == 1 && stats_of(rig).n_conns == 0);
    client_close(&client);
}

static void a_client_may_vanish_in_the_middle_of_output(void **state) {
    struct rig *rig = *state;
    struct client client;

    start(rig);
    for (int i = 0; i < 3; i++) {
        client = client_hello(rig);
        produce(rig, 3000000);
        for (int k = 0; k < i * 5; k++)
            client_receive(&client);
        turn(rig);
        client_close(&client);
        UNTIL(rig, rig->n_closes == i + 1 && stats_of(rig).n_conns == 0);
    }
    assert_int_equal(stats_of(rig).output_bytes, 0);
}

static void a_large_answer_arrives_whole(void **state) {
    struct rig *rig = *state;
    struct client client;

    rig->options.limits.slow_timeout_ms = 60000;
    start(rig);
    client = client_hello(rig);
    rig->answer_bytes = 5000000;
    client_send_json(&client, "[0, 5, \"gen.list\", {}]");
    client_expect(&client, 5, NULL);
    rig->answer_bytes = 8;
    client_send_json(&client, "[0, 6, \"gen.list\", {}]");
    client_expect(&client, 6, NULL);
    client_close(&client);
}

static void an_answer_that_did_not_fit_can_be_replaced(void **state) {
    struct rig *rig = *state;
    struct client client;
    struct wire_out out;

    start(rig);
    rig->holds = true;
    client = client_hello(rig);
    client_send_json(&client, "[0, 5, \"gen.list\", {}]");
    UNTIL(rig, rig->n_held == 1);
    wire_out_init(&out, 100);
    wire_str(&out, (struct span){(const char[200]){0}, 200});
    assert_int_equal(conn_respond(rig->last, &out), -EMSGSIZE);
    proto_error(&out, 5, PROTO_INTERNAL, "too long");
    assert_int_equal(conn_respond(rig->last, &out), 0);
    client_expect(&client, 5, "INTERNAL");
    wire_out_deinit(&out);
    client_close(&client);
}

static void connections_beyond_the_limit_are_told_so(void **state) {
    struct rig *rig = *state;
    struct client clients[3], extra;

    rig->options.conns_max = 3;
    start(rig);
    for (int i = 0; i < 3; i++)
        clients[i] = client_hello(rig);
    extra = client_open(rig);
    client_expect(&extra, 0, "BUSY");
    client_expect_end(&extra);
    client_close(&extra);
    assert_int_equal(stats_of(rig).n_rejected, 1);
    client_close(&clients[0]);
    UNTIL(rig, stats_of(rig).n_conns == 2);
    clients[0] = client_hello(rig);
    for (int i = 0; i < 3; i++)
        client_close(&clients[i]);
}

static void what_was_sent_before_conn_close_arrives(void **state) {
    struct rig *rig = *state;
    struct client client;

    start(rig);
    rig->holds = true;
    client = client_hello(rig);
    client_send_json(&client, "[0, 5, \"gen.list\", {}]");
    UNTIL(rig, rig->n_held == 1);
    respond(rig, rig->held[0], 5);
    conn_close(rig->held[0]);
    assert_int_equal(rig->n_closes, 0); /* not from inside */
    client_expect(&client, 5, NULL);
    client_expect_end(&client);
    assert_int_equal(rig->n_closes, 1);
    client_close(&client);
}

static void conn_close_in_a_callback_ends_what_was_pipelined(void **state) {
    struct rig *rig = *state;
    struct client client;
    struct wire_out out;

    start(rig);
    client = client_hello(rig);
    rig->closes_after = 3;
    wire_out_init(&out, BIG_BYTES);
    for (int i = 0; i < 5; i++)
        json_wire(&out, "[0, 5, \"gen.list\", {}]");
    client_send(&client, out.bytes.bytes, out.bytes.n);
    client_expect(&client, 5, NULL);
    client_expect(&client, 5, NULL);
    client_expect_end(&client);
    assert_int_equal(rig->n_requests, 3);
    assert_int_equal(rig->n_closes, 1);
    wire_out_deinit(&out);
    client_close(&client);
}

static void without_descriptors_accepting_pauses_and_goes_on(void **state) {
    struct rig *rig = *state;
    struct client first, second;
    struct rlimit before, none;

    start(rig);
    first = client_hello(rig);
    second = client_open(rig);
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    none = (struct rlimit){(rlim_t)second.fd + 1, before.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &none), 0); /* all below are in use */
    for (int i = 0; i < 50; i++) {
        uv_run(&rig->loop, UV_RUN_NOWAIT);
        usleep(1000);
    }
    assert_in_range(stats_of(rig).n_accept_errors, 1, 2); /* not one for each pass over the loop */
    client_send_json(&first, "[0, 5, \"gen.list\", {}]");
    client_expect(&first, 5, NULL);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
    client_send_json(&second, "[0, 1, \"hello\", {\"version\": 1}]");
    client_expect(&second, 1, NULL);
    client_close(&first);
    client_close(&second);
}

static void nothing_runs_while_nothing_happens(void **state) {
    struct rig *rig = *state;
    struct client client;
    struct server_stats stats;

    start(rig);
    client = client_hello(rig);
    for (int i = 0; i < 5; i++)
        turn(rig);
    stats = stats_of(rig);
    assert_int_equal(uv_backend_timeout(&rig->loop), -1); /* the loop would wait for ever */
    assert_int_equal(stats.n_conns, 1);
    client_close(&client);
}

/* ---- the socket ---- */

static void the_socket_has_its_mode_and_goes_with_the_server(void **state) {
    struct rig *rig = *state;
    struct stat stat;
    mode_t before = umask(0);

    start(rig);
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
    start(rig);
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

    start(rig);
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

    start(rig);
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
    start(rig);
    client = client_hello(rig);
    client_close(&client);
    server_stop_accepting(rig->server);
    assert_int_equal(lstat(rig->path, &stat), 0);
}

static void closing_the_server_closes_all(void **state) {
    struct rig *rig = *state;
    struct client clients[3];

    start(rig);
    rig->holds = true;
    for (int i = 0; i < 3; i++)
        clients[i] = client_hello(rig);
    client_send_json(&clients[0], "[0, 5, \"gen.list\", {}]");
    client_send(&clients[1], "\x94\x00", 2);
    produce(rig, 2000000); /* the third does not read */
    UNTIL(rig, rig->n_held == 1);
    server_close(rig->server, on_server_closed, rig);
    rig->server = NULL;
    UNTIL(rig, rig->is_closed);
    assert_int_equal(rig->n_closes, 3);
    client_expect_end(&clients[0]);
    client_expect_end(&clients[1]);
    for (int i = 0; i < 3; i++)
        client_close(&clients[i]);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

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
        CASE(unanswered_requests_stop_the_reading),
        CASE(a_client_that_vanishes_while_it_is_not_read_is_noticed),
        CASE(output_above_the_high_mark_is_congestion_until_it_is_read),
        CASE(a_client_that_does_not_read_is_reported_then_closed),
        CASE(a_client_that_reads_slowly_is_not_slow),
        CASE(more_output_than_a_connection_may_have_closes_it),
        CASE(a_client_may_vanish_in_the_middle_of_output),
        CASE(a_large_answer_arrives_whole),
        CASE(an_answer_that_did_not_fit_can_be_replaced),
        CASE(connections_beyond_the_limit_are_told_so),
        CASE(what_was_sent_before_conn_close_arrives),
        CASE(conn_close_in_a_callback_ends_what_was_pipelined),
        CASE(without_descriptors_accepting_pauses_and_goes_on),
        CASE(nothing_runs_while_nothing_happens),
        CASE(the_socket_has_its_mode_and_goes_with_the_server),
        CASE(a_socket_nobody_listens_on_is_replaced),
        CASE(a_socket_in_use_and_a_file_are_left_alone),
        CASE(a_path_that_became_another_socket_is_not_removed),
        CASE(a_socket_that_was_passed_in_is_taken_and_its_path_is_kept),
        CASE(closing_the_server_closes_all),
    };
    uv_loop_t loop; /* the first one of a process opens descriptors for good */

    if (uv_loop_init(&loop) != 0 || uv_loop_close(&loop) != 0)
        return 1;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
