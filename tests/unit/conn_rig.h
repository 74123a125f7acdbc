/* conn_rig: a real server in a loop that the test turns, and clients of it that never block. */
#pragma once
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>
#include <uv.h>

#include "base.h"
#include "frame.h"
#include "json_wire.h"
#include "proto.h"
#include "server.h"

enum { HELD_MAX = 64, WAIT_MS = 5000, BIG_BYTES = 16 << 20 };

/* The server answers each request at once, or keeps it until it is told to answer. */
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
    int n_errors[PROTO_N_CODES];
    size_t prompt_bytes;
    size_t answer_bytes; /* of the string in an answer */
};

struct client {
    struct rig *rig;
    int fd;
    struct text in;
    size_t n_read; /* bytes of it that were looked at */
    bool at_end;
};

/* Turns the loop until the claim holds. */
#define UNTIL(rig, condition)                                                                                          \
    do {                                                                                                               \
        uint64_t begin_ = uv_hrtime();                                                                                 \
        while (!(condition)) {                                                                                         \
            rig_turn(rig);                                                                                             \
            if (uv_hrtime() - begin_ > WAIT_MS * 1000000ULL)                                                           \
                fail_msg("line %d: never came: %s", __LINE__, #condition);                                             \
        }                                                                                                              \
    } while (0)

void rig_respond(struct rig *rig, struct conn *conn, uint32_t id);
int rig_setup(void **state);
void rig_start(struct rig *rig);
void rig_turn(struct rig *rig);
struct server_stats rig_stats(struct rig *rig);
int rig_teardown(void **state);
void rig_on_server_closed(void *user);
/* Sends events of 1000 bytes to rig->last, n_bytes in all. */
void rig_produce(struct rig *rig, size_t n_bytes);
int rig_connect(const char *path);
struct client client_open(struct rig *rig);
void client_close(struct client *client);
void client_send(struct client *client, const char *bytes, size_t n);
void client_send_json(struct client *client, const char *json);
void client_receive(struct client *client);
/* The next message, as it came. */
struct span client_message(struct client *client);
/* The next message is the response to id < 128: an error of that code, or a result if code is NULL. */
void client_expect(struct client *client, uint32_t id, const char *code);
/* Nothing more comes. */
void client_expect_end(struct client *client);
struct client client_hello(struct rig *rig);

#define CASE(name) cmocka_unit_test_setup_teardown(name, rig_setup, rig_teardown)

/* The first loop of a process opens descriptors for good; afterwards each case counts them. */
int rig_run_tests(const struct CMUnitTest *tests, size_t n);
