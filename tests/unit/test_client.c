/* The client library against a daemon played by a thread: one script per case, over a real socket. */
#include "spillway_client.h"

#include <assert.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cmocka.h>

/* ---- the other side ------------------------------------------------------------------------------------------------ */

struct daemon {
    char folder[32], path[64];
    int listening_fd, fd; /* fd: of the one connection */
    pthread_t thread;
    void (*script)(struct daemon *daemon);
    msgpack_unpacker unpacker;
    msgpack_unpacked request; /* the last one heard */
    size_t piece_bytes;       /* of what it says; 0: all at once */
};

static void *run_script(void *user) {
    struct daemon *daemon = user;

    daemon->fd = accept(daemon->listening_fd, NULL, NULL);
    assert(daemon->fd >= 0);
    msgpack_unpacker_init(&daemon->unpacker, 4096);
    msgpack_unpacked_init(&daemon->request);
    daemon->script(daemon);
    msgpack_unpacked_destroy(&daemon->request);
    msgpack_unpacker_destroy(&daemon->unpacker);
    close(daemon->fd);
    return NULL;
}

static void daemon_start(struct daemon *daemon, void (*script)(struct daemon *daemon)) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};

    *daemon = (struct daemon){.folder = "/tmp/test_client.XXXXXX", .script = script};
    assert_non_null(mkdtemp(daemon->folder));
    snprintf(daemon->path, sizeof daemon->path, "%s/socket", daemon->folder);
    snprintf(address.sun_path, sizeof address.sun_path, "%s", daemon->path);
    daemon->listening_fd = socket(AF_UNIX, SOCK_STREAM, 0);
    assert_int_equal(bind(daemon->listening_fd, (struct sockaddr *)&address, sizeof address), 0);
    assert_int_equal(listen(daemon->listening_fd, 1), 0);
    assert_int_equal(pthread_create(&daemon->thread, NULL, run_script, daemon), 0);
}

static void daemon_join(struct daemon *daemon) {
    pthread_join(daemon->thread, NULL);
    close(daemon->listening_fd);
    unlink(daemon->path);
    rmdir(daemon->folder);
}

static void say(struct daemon *daemon, const void *bytes, size_t n) {
    size_t n_piece = daemon->piece_bytes ? daemon->piece_bytes : n;

    for (size_t i = 0; i < n; i += n_piece) {
        size_t n_now = n - i < n_piece ? n - i : n_piece;

        if (send(daemon->fd, (const char *)bytes + i, n_now, MSG_NOSIGNAL) != (ssize_t)n_now)
            return; /* the client has had enough */
        if (daemon->piece_bytes)
            usleep(200);
    }
}
#define SAY(daemon, literal) say(daemon, literal, sizeof(literal) - 1)

/* False at the end of the connection. */
static bool hear(struct daemon *daemon) {
    while (msgpack_unpacker_next(&daemon->unpacker, &daemon->request) != MSGPACK_UNPACK_SUCCESS) {
        ssize_t n;

        msgpack_unpacker_reserve_buffer(&daemon->unpacker, 65536);
        n = recv(daemon->fd, msgpack_unpacker_buffer(&daemon->unpacker), 65536, 0);
        if (n <= 0)
            return false;
        msgpack_unpacker_buffer_consumed(&daemon->unpacker, (size_t)n);
    }
    return true;
}

static void expect_request(struct daemon *daemon, const char *method) {
    const msgpack_object *members;
    bool heard = hear(daemon);

    assert(heard);
    members = daemon->request.data.via.array.ptr;
    assert(daemon->request.data.via.array.size == 4 && members[0].via.u64 == 0);
    assert(members[2].via.str.size == strlen(method));
    assert(memcmp(members[2].via.str.ptr, method, strlen(method)) == 0);
    assert(members[3].type == MSGPACK_OBJECT_MAP);
}

static void say_event(struct daemon *daemon, uint32_t id, uint32_t seq, const char *type, const char *text) {
    msgpack_sbuffer buffer;
    msgpack_packer packer;

    msgpack_sbuffer_init(&buffer);
    msgpack_packer_init(&packer, &buffer, msgpack_sbuffer_write);
    msgpack_pack_array(&packer, 3);
    msgpack_pack_int(&packer, 2);
    spillway_put(&packer, "gen.event");
    msgpack_pack_map(&packer, 5);
    spillway_put(&packer, "id");
    msgpack_pack_uint32(&packer, id);
    spillway_put(&packer, "seq");
    msgpack_pack_uint32(&packer, seq);
    spillway_put(&packer, "type");
    spillway_put(&packer, type);
    spillway_put(&packer, strcmp(type, "notice") == 0 ? "reason" : "text");
    spillway_put(&packer, text);
    spillway_put(&packer, "channel");
    spillway_put(&packer, "content");
    say(daemon, buffer.data, buffer.size);
    msgpack_sbuffer_destroy(&buffer);
}

/* [1, id, nil, {"n": 7}]; ids count from 1 on every connection */
#define ANSWER(id) "\x94\x01" id "\xC0\x81\xA1n\x07"
/* [1, id, {"code": "BUSY", "message": "full"}, nil] */
#define REFUSAL(id)                                                                                                    \
    "\x94\x01" id "\x82\244code\244"                                                                                   \
    "BUSY\xA7message\xA4"                                                                                              \
    "full\xC0"

/* ---- this side ----------------------------------------------------------------------------------------------------- */

static struct spillway *open_client(struct daemon *daemon, struct spillway_options options) {
    struct spillway *client;
    struct spillway_error error;

    options.path = daemon->path;
    assert_int_equal(spillway_connect(&options, &client, &error), 0);
    return client;
}

/* Runs a request that must fail, and holds the error against what is expected. */
static void assert_call_fails(struct spillway *client, int status, const char *code, const char *part_of_message) {
    struct spillway_result result = {0};
    struct spillway_error error = {0};

    assert_int_equal(spillway_call(client, "server.stats", NULL, NULL, &result, &error), status);
    assert_string_equal(error.code, code);
    assert_non_null(strstr(error.message, part_of_message));
    assert_null(result.memory);
}

struct heard { /* what a handler was told */
    char text[64];
    unsigned n_events, n_done;
    int status;
    uint64_t n;
    char code[32];
    unsigned cancel_after; /* events; 0: never */
    struct spillway *client;
};

static bool note_event(void *user, const struct spillway_event *event) {
    struct heard *heard = user;

    heard->n_events++;
    if (event->type == SPILLWAY_EVENT_DELTA)
        snprintf(heard->text + strlen(heard->text), sizeof heard->text - strlen(heard->text), "%.*s",
                 (int)event->delta.text.n_bytes, event->delta.text.bytes);
    return heard->cancel_after == 0 || heard->n_events < heard->cancel_after;
}

static void note_done(void *user, int status, const msgpack_object *result, const struct spillway_error *error) {
    struct heard *heard = user;

    heard->n_done++;
    heard->status = status;
    heard->n = spillway_get_uint(result, "n", 0);
    if (error)
        snprintf(heard->code, sizeof heard->code, "%s", error->code);
}

static struct spillway_handler handler_of(struct heard *heard) {
    return (struct spillway_handler){.on_event = note_event, .on_done = note_done, .user = heard};
}

static void write_prompt(void *user, msgpack_packer *packer) {
    msgpack_pack_map(packer, 1);
    spillway_put(packer, "prompt");
    spillway_put(packer, user);
}

static int generate(struct spillway *client, struct heard *heard, struct spillway_error *error) {
    return spillway_generate(client, write_prompt, "hi", note_event, heard, NULL, error);
}

/* ---- cases: answers ------------------------------------------------------------------------------------------------ */

static void hello_then_answer(struct daemon *daemon) {
    expect_request(daemon, "hello");
    assert(spillway_get_uint(&daemon->request.data.via.array.ptr[3], "version", 0) == 1);
    SAY(daemon, ANSWER("\x01"));
    expect_request(daemon, "server.stats");
    SAY(daemon, ANSWER("\x02"));
    hear(daemon);
}

static void check_hello_then_answer(size_t piece_bytes) {
    struct daemon daemon;
    struct spillway *client;
    struct spillway_result hello = {0}, stats = {0};

    daemon_start(&daemon, hello_then_answer);
    daemon.piece_bytes = piece_bytes; /* the script looks at it after the first request */
    client = open_client(&daemon, (struct spillway_options){0});
    assert_int_equal(spillway_hello(client, &hello, NULL), 0);
    assert_int_equal(spillway_call(client, "server.stats", NULL, NULL, &stats, NULL), 0);
    assert_int_equal(spillway_get_uint(&hello.object, "n", 0), 7);
    assert_int_equal(spillway_get_uint(&stats.object, "n", 0), 7);
    spillway_result_free(&hello);
    spillway_result_free(&stats);
    spillway_close(client);
    daemon_join(&daemon);
}

static void results_outlive_the_next_request(void **state) {
    (void)state;
    check_hello_then_answer(0);
}

static void answers_that_come_byte_by_byte_are_read(void **state) {
    (void)state;
    check_hello_then_answer(1);
}

static void second_before_first(struct daemon *daemon) {
    expect_request(daemon, "a");
    expect_request(daemon, "b");
    SAY(daemon, REFUSAL("\x02") ANSWER("\x01"));
    hear(daemon);
}

static void answers_out_of_order_reach_their_requests(void **state) {
    struct heard a = {0}, b = {0};
    struct spillway_handler handler_a = handler_of(&a), handler_b = handler_of(&b);
    struct daemon daemon;
    struct spillway *client;
    uint32_t id;

    (void)state;
    daemon_start(&daemon, second_before_first);
    client = open_client(&daemon, (struct spillway_options){0});
    assert_int_equal(spillway_poll_events(client), POLLIN);
    assert_int_equal(spillway_start(client, "a", NULL, NULL, &handler_a, &id, NULL), 0);
    assert_int_equal(id, 1);
    assert_int_equal(spillway_start(client, "b", NULL, NULL, &handler_b, &id, NULL), 0);
    assert_int_equal(id, 2);
    assert_int_equal(spillway_poll_events(client), POLLIN | POLLOUT);
    while (a.n_done == 0 || b.n_done == 0)
        assert_int_equal(spillway_wait(client, -1, NULL), 0);
    assert_int_equal(a.status, 0);
    assert_int_equal(a.n, 7);
    assert_int_equal(b.status, SPILLWAY_E_REFUSED);
    assert_string_equal(b.code, "BUSY");
    assert_int_equal(a.n_done + b.n_done, 2);
    spillway_close(client);
    daemon_join(&daemon);
}

static void refuse_then_answer(struct daemon *daemon) {
    expect_request(daemon, "server.stats");
    SAY(daemon, REFUSAL("\x01"));
    expect_request(daemon, "server.stats");
    SAY(daemon, ANSWER("\x02"));
    hear(daemon);
}

static void a_refusal_keeps_the_connection(void **state) {
    struct daemon daemon;
    struct spillway *client;

    (void)state;
    daemon_start(&daemon, refuse_then_answer);
    client = open_client(&daemon, (struct spillway_options){0});
    assert_call_fails(client, SPILLWAY_E_REFUSED, "BUSY", "full");
    assert_int_equal(spillway_call(client, "server.stats", NULL, NULL, NULL, NULL), 0);
    spillway_close(client);
    daemon_join(&daemon);
}

static void answer_late(struct daemon *daemon) {
    expect_request(daemon, "server.stats");
    expect_request(daemon, "server.stats");
    SAY(daemon, ANSWER("\x01") ANSWER("\x02"));
    hear(daemon);
}

static void a_late_answer_is_dropped(void **state) {
    struct daemon daemon;
    struct spillway *client;

    (void)state;
    daemon_start(&daemon, answer_late);
    client = open_client(&daemon, (struct spillway_options){.call_timeout_ms = 200});
    assert_call_fails(client, -ETIMEDOUT, "TIMEOUT", "server.stats");
    assert_int_equal(spillway_call(client, "server.stats", NULL, NULL, NULL, NULL), 0);
    spillway_close(client);
    daemon_join(&daemon);
}

/* ---- cases: generations -------------------------------------------------------------------------------------------- */

static void stream_two_words(struct daemon *daemon) {
    daemon->piece_bytes = 3;
    expect_request(daemon, "gen.start");
    say_event(daemon, 1, 0, "notice", "why");
    say_event(daemon, 1, 1, "delta", "two ");
    say_event(daemon, 1, 2, "news of a later version", "");
    say_event(daemon, 1, 3, "delta", "w\xC3\xB6rds");
    SAY(daemon, ANSWER("\x01"));
    hear(daemon);
}

static void events_come_in_order_before_the_answer(void **state) {
    struct heard heard = {0};
    struct spillway_result result;
    struct daemon daemon;
    struct spillway *client;

    (void)state;
    daemon_start(&daemon, stream_two_words);
    client = open_client(&daemon, (struct spillway_options){0});
    assert_int_equal(spillway_generate(client, write_prompt, "hi", note_event, &heard, &result, NULL), 0);
    assert_string_equal(heard.text, "two w\xC3\xB6rds");
    assert_int_equal(heard.n_events, 4);
    assert_int_equal(spillway_get_uint(&result.object, "n", 0), 7);
    spillway_result_free(&result);
    spillway_close(client);
    daemon_join(&daemon);
}

static void stream_until_cancelled(struct daemon *daemon) {
    expect_request(daemon, "gen.start");
    say_event(daemon, 1, 0, "delta", "a");
    say_event(daemon, 1, 1, "delta", "b");
    expect_request(daemon, "gen.cancel");
    assert(spillway_get_uint(&daemon->request.data.via.array.ptr[3], "id", 0) == 1);
    say_event(daemon, 1, 2, "delta", "c");
    SAY(daemon, ANSWER("\x02") ANSWER("\x01"));
    assert(!hear(daemon)); /* no second cancel */
}

static void a_callback_that_says_no_cancels_once(void **state) {
    struct heard heard = {.cancel_after = 1};
    struct daemon daemon;
    struct spillway *client;

    (void)state;
    daemon_start(&daemon, stream_until_cancelled);
    client = open_client(&daemon, (struct spillway_options){0});
    assert_int_equal(generate(client, &heard, NULL), 0);
    assert_int_equal(heard.n_events, 3);
    spillway_close(client);
    daemon_join(&daemon);
}

static void fall_silent(struct daemon *daemon) {
    expect_request(daemon, "gen.start");
    say_event(daemon, 1, 0, "delta", "a");
    expect_request(daemon, "gen.cancel");
    say_event(daemon, 1, 1, "delta", "b");
    SAY(daemon, ANSWER("\x02") ANSWER("\x01"));
    expect_request(daemon, "server.stats");
    SAY(daemon, ANSWER("\x03"));
    hear(daemon);
}

static void silence_cancels_the_generation_and_keeps_the_connection(void **state) {
    struct heard heard = {0};
    struct spillway_error error;
    struct daemon daemon;
    struct spillway *client;

    (void)state;
    daemon_start(&daemon, fall_silent);
    client = open_client(&daemon, (struct spillway_options){.silence_timeout_ms = 200});
    assert_int_equal(generate(client, &heard, &error), -ETIMEDOUT);
    assert_string_equal(error.code, "TIMEOUT");
    assert_int_equal(spillway_call(client, "server.stats", NULL, NULL, NULL, NULL), 0);
    assert_int_equal(heard.n_events, 1);
    spillway_close(client);
    daemon_join(&daemon);
}

static bool wait_in_callback(void *user, const struct spillway_event *event) {
    struct heard *heard = user;
    struct spillway_error error;

    (void)event;
    assert_int_equal(spillway_call(heard->client, "server.stats", NULL, NULL, NULL, &error), -EINVAL);
    assert_int_equal(spillway_wait(heard->client, -1, &error), -EINVAL);
    assert_string_equal(error.code, "BAD_CALL");
    heard->n_events++;
    return true;
}

static void waiting_in_a_callback_is_refused(void **state) {
    struct heard heard = {0};
    struct daemon daemon;

    (void)state;
    daemon_start(&daemon, stream_two_words);
    heard.client = open_client(&daemon, (struct spillway_options){0});
    assert_int_equal(spillway_generate(heard.client, write_prompt, "hi", wait_in_callback, &heard, NULL, NULL), 0);
    assert_int_equal(heard.n_events, 4);
    spillway_close(heard.client);
    daemon_join(&daemon);
}

/* ---- cases: a daemon that misbehaves ------------------------------------------------------------------------------- */

/* The script answers a generation; the client must see it through to a lost connection with this code. */
static void check_lost(void (*script)(struct daemon *daemon), int status, const char *code,
                       const char *part_of_message) {
    struct heard gen = {0}, other = {0};
    struct spillway_handler handler = handler_of(&gen), other_handler = handler_of(&other);
    struct spillway_error error;
    struct daemon daemon;
    struct spillway *client;
    int r = 0;

    daemon_start(&daemon, script);
    client = open_client(&daemon, (struct spillway_options){.frame_bytes_max = 1 << 20});
    assert_int_equal(spillway_start(client, "gen.start", NULL, NULL, &handler, NULL, &error), 0);
    assert_int_equal(spillway_start(client, "other", NULL, NULL, &other_handler, NULL, &error), 0);
    while (r == 0)
        r = spillway_wait(client, -1, &error);
    assert_int_equal(r, status);
    assert_string_equal(error.code, code);
    if (!strstr(error.message, part_of_message))
        fail_msg("message: %s", error.message);
    assert_int_equal(gen.n_done, 1);
    assert_int_equal(other.n_done, 1); /* nobody waits for ever */
    assert_int_equal(other.status, status);
    assert_string_equal(other.code, code);
    assert_call_fails(client, status, code, part_of_message);
    spillway_close(client);
    daemon_join(&daemon);
}

static void say_event_after_answer(struct daemon *daemon) {
    expect_request(daemon, "gen.start");
    SAY(daemon, ANSWER("\x01"));
    say_event(daemon, 1, 0, "delta", "a");
    hear(daemon);
    hear(daemon);
}

static void an_event_after_the_answer_ends_the_connection(void **state) {
    (void)state;
    check_lost(say_event_after_answer, -EPROTO, "PROTOCOL", "after its answer");
}

static void skip_an_event(struct daemon *daemon) {
    expect_request(daemon, "gen.start");
    say_event(daemon, 1, 0, "delta", "a");
    say_event(daemon, 1, 2, "delta", "c");
    hear(daemon);
    hear(daemon);
}

static void a_gap_in_the_events_ends_the_connection(void **state) {
    (void)state;
    check_lost(skip_an_event, -EPROTO, "PROTOCOL", "gap");
}

static void close_in_the_middle(struct daemon *daemon) {
    expect_request(daemon, "gen.start");
    expect_request(daemon, "other");
    say(daemon, ANSWER("\x01"), 4);
}

static void a_daemon_that_closes_in_the_middle_is_noticed(void **state) {
    (void)state;
    check_lost(close_in_the_middle, -ECONNRESET, "CLOSED", "middle of a message");
}

static void say_bad_frame(struct daemon *daemon) {
    expect_request(daemon, "gen.start");
    SAY(daemon, "\x94\x01\x00\x82\244code\251BAD_FRAME\247message\250too deep\xC0");
}

static void what_the_daemon_says_before_it_hangs_up_is_told(void **state) {
    (void)state;
    check_lost(say_bad_frame, -EPROTO, "BAD_FRAME", "too deep");
}

#define SCRIPT(name, literal)                                                                                          \
    static void name(struct daemon *daemon) {                                                                          \
        hear(daemon);                                                                                                  \
        SAY(daemon, literal);                                                                                          \
        hear(daemon);                                                                                                  \
        hear(daemon);                                                                                                  \
    }
SCRIPT(say_a_long_string, "\x94\x01\x01\xC0\x81\xA1s\xDB\x10\x00\x00\x00") /* 256 MiB */
SCRIPT(say_a_wide_array, "\x94\x01\x01\xC0\x81\xA1s\xDD\xFF\xFF\xFF\xFF")
SCRIPT(say_a_wide_map, "\x94\x01\x01\xC0\x81\xA1s\xDF\xFF\xFF\xFF\xFF")
SCRIPT(say_something_deep, "\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x01")
SCRIPT(say_no_msgpack, "\x94\x01\x01\xC0\x81\xA1s\xC1")
SCRIPT(say_no_utf8, "\x94\x01\x01\xC0\x81\xA1s\xA2\xC3(")
SCRIPT(say_a_number, "\x07")
SCRIPT(say_a_request, "\x94\x00\x01\xA1m\x80")
SCRIPT(say_both, "\x94\x01\x01\x82\244code\xA1x\xA7message\xA1x\x80")
SCRIPT(say_neither, "\x94\x01\x01\xC0\xC0")
SCRIPT(say_an_error_without_code, "\x94\x01\x01\x80\xC0")
SCRIPT(answer_no_request, ANSWER("\x05"))

static void a_message_that_breaks_a_limit_ends_the_connection(void **state) {
    (void)state;
    check_lost(say_a_long_string, -EPROTO, "PROTOCOL", "too long");
    check_lost(say_a_wide_array, -EPROTO, "PROTOCOL", "too many objects");
    check_lost(say_a_wide_map, -EPROTO, "PROTOCOL", "too many objects");
    check_lost(say_something_deep, -EPROTO, "PROTOCOL", "too deep");
}

static void what_is_no_message_ends_the_connection(void **state) {
    (void)state;
    check_lost(say_no_msgpack, -EPROTO, "PROTOCOL", "no msgpack");
    check_lost(say_no_utf8, -EPROTO, "PROTOCOL", "UTF-8");
    check_lost(say_a_number, -EPROTO, "PROTOCOL", "no array");
    check_lost(say_a_request, -EPROTO, "PROTOCOL", "neither a response");
    check_lost(say_both, -EPROTO, "PROTOCOL", "exactly one");
    check_lost(say_neither, -EPROTO, "PROTOCOL", "exactly one");
    check_lost(say_an_error_without_code, -EPROTO, "PROTOCOL", "exactly one");
    check_lost(answer_no_request, -EPROTO, "PROTOCOL", "no request");
}

/* ---- cases: what cannot be sent or reached ------------------------------------------------------------------------- */

static void write_nothing(void *user, msgpack_packer *packer) {
    (void)user;
    (void)packer;
}

static void write_two(void *user, msgpack_packer *packer) {
    (void)user;
    msgpack_pack_map(packer, 0);
    msgpack_pack_map(packer, 0);
}

static void write_a_number(void *user, msgpack_packer *packer) {
    (void)user;
    msgpack_pack_int(packer, 1);
}

static void write_the_half(void *user, msgpack_packer *packer) {
    (void)user;
    msgpack_pack_map(packer, 1);
    spillway_put(packer, "key");
}

static void answer_one(struct daemon *daemon) {
    expect_request(daemon, "good");
    SAY(daemon, ANSWER("\x06"));
    hear(daemon);
}

static void parameters_that_are_no_map_are_not_sent(void **state) {
    spillway_write_fn *const writers[] = {write_nothing, write_two, write_a_number, write_the_half};
    static char long_prompt[5000];
    struct spillway_error error;
    struct daemon daemon;
    struct spillway *client;

    (void)state;
    memset(long_prompt, 'x', sizeof long_prompt - 1);
    daemon_start(&daemon, answer_one);
    client = open_client(&daemon, (struct spillway_options){.frame_bytes_max = 4096});
    for (size_t i = 0; i < 4; i++) {
        assert_int_equal(spillway_call(client, "bad", writers[i], NULL, NULL, &error), -EINVAL);
        assert_string_equal(error.code, "BAD_CALL");
    }
    assert_int_equal(spillway_call(client, "bad", write_prompt, long_prompt, NULL, &error), -EINVAL);
    assert_non_null(strstr(error.message, "4096 bytes"));
    assert_int_equal(spillway_call(client, "good", NULL, NULL, NULL, NULL), 0);
    spillway_close(client);
    daemon_join(&daemon);
}

static void read_late(struct daemon *daemon) {
    usleep(100000);
    expect_request(daemon, "gen.start");
    SAY(daemon, ANSWER("\x01"));
    hear(daemon);
}

static void a_long_request_waits_for_a_slow_daemon(void **state) {
    size_t n = 8 << 20; /* more than a socket holds */
    char *prompt = malloc(n + 1);
    struct daemon daemon;
    struct spillway *client;

    (void)state;
    assert_non_null(prompt);
    memset(prompt, 'x', n);
    prompt[n] = 0;
    daemon_start(&daemon, read_late);
    client = open_client(&daemon, (struct spillway_options){0});
    assert_int_equal(spillway_generate(client, write_prompt, prompt, NULL, NULL, NULL, NULL), 0);
    spillway_close(client);
    daemon_join(&daemon);
    free(prompt);
}

static void a_missing_daemon_is_told_with_advice(void **state) {
    struct spillway_options options = {.path = "/nonexistent/spillway.sock"};
    struct spillway_error error;
    struct spillway *client = NULL;
    char path[200];

    (void)state;
    assert_int_equal(spillway_connect(&options, &client, &error), -ENOENT);
    assert_string_equal(error.code, "CONNECT");
    assert_non_null(strstr(error.message, "/nonexistent/spillway.sock"));
    assert_non_null(strstr(error.message, "is spillwayd running"));
    memset(path, 'x', sizeof path - 1);
    path[sizeof path - 1] = 0;
    options.path = path;
    assert_int_equal(spillway_connect(&options, &client, &error), -EINVAL);
    assert_null(client);
}

static void a_missing_key_reads_as_its_stand_in(void **state) {
    (void)state;
    assert_null(spillway_get(NULL, "key"));
    assert_int_equal(spillway_get_uint(NULL, "key", 3), 3);
    assert_true(spillway_get_bool(NULL, "key", true));
    assert_true(spillway_get_double(NULL, "key", 0.5) == 0.5);
    assert_int_equal(spillway_get_text(NULL, "key").n_bytes, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(results_outlive_the_next_request),
        cmocka_unit_test(answers_that_come_byte_by_byte_are_read),
        cmocka_unit_test(answers_out_of_order_reach_their_requests),
        cmocka_unit_test(a_refusal_keeps_the_connection),
        cmocka_unit_test(a_late_answer_is_dropped),
        cmocka_unit_test(events_come_in_order_before_the_answer),
        cmocka_unit_test(a_callback_that_says_no_cancels_once),
        cmocka_unit_test(silence_cancels_the_generation_and_keeps_the_connection),
        cmocka_unit_test(waiting_in_a_callback_is_refused),
        cmocka_unit_test(an_event_after_the_answer_ends_the_connection),
        cmocka_unit_test(a_gap_in_the_events_ends_the_connection),
        cmocka_unit_test(a_daemon_that_closes_in_the_middle_is_noticed),
        cmocka_unit_test(what_the_daemon_says_before_it_hangs_up_is_told),
        cmocka_unit_test(a_message_that_breaks_a_limit_ends_the_connection),
        cmocka_unit_test(what_is_no_message_ends_the_connection),
        cmocka_unit_test(parameters_that_are_no_map_are_not_sent),
        cmocka_unit_test(a_long_request_waits_for_a_slow_daemon),
        cmocka_unit_test(a_missing_daemon_is_told_with_advice),
        cmocka_unit_test(a_missing_key_reads_as_its_stand_in),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
