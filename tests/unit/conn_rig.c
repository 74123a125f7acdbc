#include "conn_rig.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>

/* ---- a server that answers, or keeps requests until it is told to answer ---- */

static int count_fds(void) {
    DIR *dir = opendir("/proc/self/fd");
    int n = 0;

    assert_non_null(dir);
    while (readdir(dir))
        n++;
    closedir(dir);
    return n;
}

void rig_respond(struct rig *rig, struct conn *conn, uint32_t id) {
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
        rig_respond(rig, conn, request->id);
    } else {
        assert_true(rig->n_held < HELD_MAX);
        rig->held[rig->n_held] = conn;
        rig->held_id[rig->n_held++] = request->id;
    }
    request_free(request);
    if (rig->closes_after == rig->n_requests)
        conn_close(conn);
}

static void on_error(void *user, enum proto_code code) {
    ((struct rig *)user)->n_errors[code]++;
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

void rig_on_server_closed(void *user) {
    ((struct rig *)user)->is_closed = true;
}

int rig_setup(void **state) {
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
        .callbacks = {rig, on_request, on_error, on_slow, on_drained, on_close},
    };
    *state = rig;
    return 0;
}

void rig_start(struct rig *rig) {
    struct report report;

    if (server_open(&rig->loop, &rig->options, &rig->server, &report) != 0)
        fail_msg("%s", report.line);
    server_set_ready(rig->server, true);
}

/* One pass over the loop, without waiting long. */
void rig_turn(struct rig *rig) {
    uv_run(&rig->loop, UV_RUN_NOWAIT);
    usleep(100);
}

struct server_stats rig_stats(struct rig *rig) {
    struct server_stats stats;

    server_read_stats(rig->server, &stats);
    return stats;
}

int rig_teardown(void **state) {
    struct rig *rig = *state;

    if (rig->server) {
        server_close(rig->server, rig_on_server_closed, rig);
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

int rig_connect(const char *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

    assert_true(fd >= 0);
    strcpy(address.sun_path, path);
    assert_int_equal(connect(fd, (struct sockaddr *)&address, sizeof address), 0);
    return fd;
}

struct client client_open(struct rig *rig) {
    struct client client = {.rig = rig, .fd = rig_connect(rig->path)};

    assert_int_equal(fcntl(client.fd, F_SETFL, O_NONBLOCK), 0);
    text_init(&client.in, 64 << 20);
    return client;
}

void client_close(struct client *client) {
    close(client->fd);
    text_deinit(&client->in);
}

void client_send(struct client *client, const char *bytes, size_t n) {
    for (size_t i = 0; i < n;) {
        ssize_t n_sent = send(client->fd, bytes + i, n - i, 0);

        if (n_sent > 0)
            i += (size_t)n_sent;
        else if (errno == EPIPE || errno == ECONNRESET)
            return;
        else
            rig_turn(client->rig);
    }
}

void client_send_json(struct client *client, const char *json) {
    struct wire_out out;

    wire_out_init(&out, BIG_BYTES);
    json_wire(&out, json);
    client_send(client, out.bytes.bytes, out.bytes.n);
    wire_out_deinit(&out);
}

void client_receive(struct client *client) {
    char bytes[16384];
    ssize_t n = recv(client->fd, bytes, sizeof bytes, 0);

    if (n > 0)
        text_add(&client->in, bytes, (size_t)n);
    else if (n == 0 || errno == ECONNRESET)
        client->at_end = true;
}

/* The next message as it came. */
struct span client_message(struct client *client) {
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
        rig_turn(client->rig);
        client_receive(client);
    }
    assert_int_equal(e, 0);
    client->n_read += n;
    return (struct span){client->in.bytes + client->n_read - n, n};
}

/* The next message is the response to id; an error with that code, or a result if code is NULL. */
void client_expect(struct client *client, uint32_t id, const char *code) {
    struct span message = client_message(client);

    assert_memory_equal(message.bytes, "\x94\x01", 2);
    assert_int_equal((uint8_t)message.bytes[2], id); /* tests use ids below 128 */
    if (!code)
        assert_int_equal((uint8_t)message.bytes[3], 0xc0);
    else if (span_find(message, code) < 0)
        fail_msg("no %s in %.*s", code, (int)message.n, message.bytes);
}

void client_expect_end(struct client *client) {
    UNTIL(client->rig, (client_receive(client), client->at_end));
    assert_int_equal(client->in.n, client->n_read);
}

struct client client_hello(struct rig *rig) {
    struct client client = client_open(rig);

    client_send_json(&client, "[0, 1, \"hello\", {\"version\": 1}]");
    client_expect(&client, 1, NULL);
    return client;
}

void rig_produce(struct rig *rig, size_t n_bytes) {
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

int rig_run_tests(const struct CMUnitTest *tests, size_t n) {
    uv_loop_t loop;

    if (uv_loop_init(&loop) != 0 || uv_loop_close(&loop) != 0)
        return 1;
    return _cmocka_run_group_tests("tests", tests, n, NULL, NULL);
}
