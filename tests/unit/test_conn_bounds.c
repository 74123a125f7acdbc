/* Connections that bring too much or take too little: each bound holds, is answered, and harms nobody else. */
#include <sys/resource.h>
#include <sys/socket.h>

#include "conn_rig.h"

/* ---- too much ---- */

static void unanswered_requests_stop_the_reading(void **state) {
    struct rig *rig = *state;
    struct client client;

    rig_start(rig);
    rig->holds = true;
    client = client_hello(rig);
    for (int i = 0; i < 10; i++)
        client_send_json(&client, "[0, 5, \"gen.list\", {}]");
    UNTIL(rig, rig->n_held == 4);
    for (int i = 0; i < 50; i++)
        rig_turn(rig);
    assert_int_equal(rig->n_held, 4);
    for (int i = 0; i < 10; i++) {
        UNTIL(rig, rig->n_held > i);
        rig_respond(rig, rig->held[i], rig->held_id[i]);
        client_expect(&client, 5, NULL);
    }
    assert_int_equal(rig->n_held, 10);
    client_close(&client);
}

static void a_client_that_vanishes_while_it_is_not_read_is_noticed(void **state) {
    struct rig *rig = *state;
    struct client client;

    rig_start(rig);
    rig->holds = true;
    client = client_hello(rig);
    for (int i = 0; i < 10; i++)
        client_send_json(&client, "[0, 5, \"gen.list\", {}]");
    UNTIL(rig, rig->n_held == 4);
    client_close(&client);
    UNTIL(rig, rig->n_closes == 1 && rig_stats(rig).n_conns == 0);
}

static void output_above_the_high_mark_is_congestion_until_it_is_read(void **state) {
    struct rig *rig = *state;
    struct client client;

    rig->options.limits.slow_timeout_ms = 60000;
    rig_start(rig);
    client = client_hello(rig);
    rig_produce(rig, 200000);
    assert_false(conn_is_congested(rig->last));
    rig_produce(rig, 1000000);
    assert_true(conn_is_congested(rig->last));
    for (int i = 0; i < 20; i++)
        rig_turn(rig); /* the socket takes some, not all */
    assert_true(conn_is_congested(rig->last));
    assert_true(conn_output_bytes(rig->last) > 256 << 10);
    client_send_json(&client, "[0, 5, \"gen.list\", {}]"); /* is not read now */
    for (int i = 0; i < 20; i++)
        rig_turn(rig);
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

    rig_start(rig);
    good = client_hello(rig);
    client = client_hello(rig);
    rig_produce(rig, 2000000);
    UNTIL(rig, rig->n_slow == 1);
    assert_int_equal(rig->n_closes, 0);
    UNTIL(rig, rig->n_closes == 1);
    assert_int_equal(rig->n_slow, 1);
    assert_int_equal(rig_stats(rig).n_slow_closes, 1);
    UNTIL(rig, rig_stats(rig).n_conns == 1);
    assert_int_equal(rig_stats(rig).output_bytes, 0);
    client_send_json(&good, "[0, 5, \"gen.list\", {}]");
    client_expect(&good, 5, NULL);
    client_close(&client);
    client_close(&good);
}

static void a_client_that_reads_slowly_is_not_slow(void **state) {
    struct rig *rig = *state;
    struct client client;
    size_t n = 0;

    rig_start(rig);
    client = client_hello(rig);
    rig_produce(rig, 4000000);
    while (n < 3980000) { /* 4 MB in about a second; each 200 ms take more than the 192 KiB between the marks */
        client_receive(&client);
        usleep(3000);
        rig_turn(rig);
        n = client.in.n;
    }
    assert_int_equal(rig->n_slow, 0);
    assert_int_equal(rig->n_closes, 0);
    client_close(&client);
}

static void more_output_than_a_connection_may_have_closes_it(void **state) {
    struct rig *rig = *state;
    struct client client;

    rig_start(rig);
    client = client_hello(rig);
    rig_produce(rig, 9 << 20);
    assert_true(conn_output_bytes(rig->last) <= 8 << 20);
    UNTIL(rig, rig->n_closes == 1 && rig_stats(rig).n_conns == 0);
    client_close(&client);
}

static void a_client_may_vanish_in_the_middle_of_output(void **state) {
    struct rig *rig = *state;
    struct client client;

    rig_start(rig);
    for (int i = 0; i < 3; i++) {
        client = client_hello(rig);
        rig_produce(rig, 3000000);
        for (int k = 0; k < i * 5; k++)
            client_receive(&client);
        rig_turn(rig);
        client_close(&client);
        UNTIL(rig, rig->n_closes == i + 1 && rig_stats(rig).n_conns == 0);
    }
    assert_int_equal(rig_stats(rig).output_bytes, 0);
}

static void a_large_answer_arrives_whole(void **state) {
    struct rig *rig = *state;
    struct client client;

    rig->options.limits.slow_timeout_ms = 60000;
    rig_start(rig);
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

    rig_start(rig);
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
    rig_start(rig);
    for (int i = 0; i < 3; i++)
        clients[i] = client_hello(rig);
    extra = client_open(rig);
    client_expect(&extra, 0, "BUSY");
    client_expect_end(&extra);
    client_close(&extra);
    assert_int_equal(rig_stats(rig).n_rejected, 1);
    client_close(&clients[0]);
    UNTIL(rig, rig_stats(rig).n_conns == 2);
    clients[0] = client_hello(rig);
    for (int i = 0; i < 3; i++)
        client_close(&clients[i]);
}

static void what_was_sent_before_conn_close_arrives(void **state) {
    struct rig *rig = *state;
    struct client client;

    rig_start(rig);
    rig->holds = true;
    client = client_hello(rig);
    client_send_json(&client, "[0, 5, \"gen.list\", {}]");
    UNTIL(rig, rig->n_held == 1);
    rig_respond(rig, rig->held[0], 5);
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

    rig_start(rig);
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

    rig_start(rig);
    first = client_hello(rig);
    second = client_open(rig);
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    none = (struct rlimit){(rlim_t)second.fd + 1, before.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &none), 0); /* all below are in use */
    for (int i = 0; i < 50; i++) {
        uv_run(&rig->loop, UV_RUN_NOWAIT);
        usleep(1000);
    }
    assert_in_range(rig_stats(rig).n_accept_errors, 1, 2); /* not one for each pass over the loop */
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

    rig_start(rig);
    client = client_hello(rig);
    for (int i = 0; i < 5; i++)
        rig_turn(rig);
    stats = rig_stats(rig);
    assert_int_equal(uv_backend_timeout(&rig->loop), -1); /* the loop would wait for ever */
    assert_int_equal(stats.n_conns, 1);
    client_close(&client);
}

int main(void) {
    const struct CMUnitTest tests[] = {
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
    };

    return rig_run_tests(tests, ARRAY_LEN(tests));
}
