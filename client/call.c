/* Requests that wait for their answer, over those that do not (client.c). */
#include "client_internal.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct held { /* an answer that outlives its message */
    msgpack_unpacked unpacked;
    unsigned char message[];
};

struct waiting {
    struct spillway *client;
    spillway_event_fn *on_event;
    void *event_user;
    bool is_done;
    int status;
    int64_t heard_ms; /* when the request was sent, or its last event came */
    struct spillway_result result;
    struct spillway_error error;
};

static int64_t now_ms(void) {
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000) + now.tv_nsec / 1000000;
}

/* A copy of the message that is being read: its fourth member is the result. */
static int hold_result(const struct spillway *client, struct spillway_result *ret_result) {
    struct held *held = malloc(sizeof *held + client->n_message_bytes);

    if (!held)
        return -ENOMEM;
    memcpy(held->message, client->message, client->n_message_bytes);
    msgpack_unpacked_init(&held->unpacked);
    if (msgpack_unpack_next(&held->unpacked, (const char *)held->message, client->n_message_bytes, NULL) !=
        MSGPACK_UNPACK_SUCCESS) {
        msgpack_unpacked_destroy(&held->unpacked);
        free(held);
        return -ENOMEM;
    }
    *ret_result = (struct spillway_result){.object = held->unpacked.data.via.array.ptr[3], .memory = held};
    return 0;
}

void spillway_result_free(struct spillway_result *result) {
    struct held *held = result->memory;

    if (held)
        msgpack_unpacked_destroy(&held->unpacked);
    free(held);
    *result = (struct spillway_result){0};
}

static bool on_event(void *user, const struct spillway_event *event) {
    struct waiting *waiting = user;

    waiting->heard_ms = now_ms();
    return !waiting->on_event || waiting->on_event(waiting->event_user, event);
}

static void on_done(void *user, int status, const msgpack_object *result, const struct spillway_error *error) {
    struct waiting *waiting = user;

    (void)result;
    waiting->is_done = true;
    waiting->status = status;
    if (error)
        waiting->error = *error;
    if (status == 0 && hold_result(waiting->client, &waiting->result) != 0)
        waiting->status =
            spillway_client_error(&waiting->error, -ENOMEM, "NO_MEMORY", "no memory to keep an answer of %zu bytes",
                                  waiting->client->n_message_bytes);
}

int spillway_wait(struct spillway *client, int timeout_ms, struct spillway_error *ret_error) {
    struct pollfd poll_fd = {.fd = client->fd, .events = spillway_poll_events(client)};
    int n = 1;

    if (client->status == 0 && !client->in_callback)
        n = poll(&poll_fd, 1, timeout_ms);
    if (n == 0)
        return spillway_client_error(ret_error, -ETIMEDOUT, "TIMEOUT", "%s: nothing came for %d ms", client->path,
                                     timeout_ms);
    if (n < 0 && errno == EINTR)
        return spillway_client_error(ret_error, -EINTR, "INTERRUPTED", "%s: a signal came", client->path);
    return spillway_dispatch(client, ret_error);
}

/* The daemon did not answer. Nobody waits for the answer any more; a generation is told to end. */
static int give_up(struct spillway *client, const char *method, uint32_t id, int timeout_ms,
                   struct spillway_error *ret_error) {
    struct call *call = spillway_client_find(client, id);
    bool is_gen = call->is_gen;

    call->is_abandoned = true;
    if (is_gen && spillway_cancel(client, id, NULL) == 0)
        spillway_dispatch(client, NULL); /* the answer may come right here, and end `call` */
    return spillway_client_error(ret_error, -ETIMEDOUT, "TIMEOUT", "%s: no %s %s within %d ms", client->path,
                                 is_gen ? "sign of" : "answer to", method, timeout_ms);
}

/* Every request that waits comes through here. */
static int wait_for_answer(struct waiting *waiting, const char *method, spillway_write_fn *write_params,
                           void *write_user, int timeout_ms, struct spillway_result *ret_result,
                           struct spillway_error *ret_error) {
    const struct spillway_handler handler = {.on_event = on_event, .on_done = on_done, .user = waiting};
    struct spillway *client = waiting->client;
    uint32_t id;
    int r;

    if (client->in_callback)
        return spillway_client_error(ret_error, -EINVAL, "BAD_CALL", "a callback may not wait");
    r = spillway_start(client, method, write_params, write_user, &handler, &id, ret_error);
    if (r != 0)
        return r;
    waiting->heard_ms = now_ms();
    while (!waiting->is_done) {
        int64_t left_ms = timeout_ms < 0 ? -1 : waiting->heard_ms + timeout_ms - now_ms();

        if (timeout_ms >= 0 && left_ms <= 0)
            return give_up(client, method, id, timeout_ms, ret_error);
        spillway_wait(client, (int)left_ms, NULL); /* if the connection is lost, on_done says so */
    }
    if (waiting->status != 0) {
        if (ret_error)
            *ret_error = waiting->error;
        return waiting->status;
    }
    if (ret_result)
        *ret_result = waiting->result;
    else
        spillway_result_free(&waiting->result);
    return 0;
}

int spillway_call(struct spillway *client, const char *method, spillway_write_fn *write_params, void *user,
                  struct spillway_result *ret_result, struct spillway_error *ret_error) {
    struct waiting waiting = {.client = client};

    return wait_for_answer(&waiting, method, write_params, user, client->call_timeout_ms, ret_result, ret_error);
}

static void write_version(void *user, msgpack_packer *packer) {
    (void)user;
    msgpack_pack_map(packer, 1);
    spillway_put(packer, "version");
    msgpack_pack_int(packer, SPILLWAY_PROTOCOL);
}

int spillway_hello(struct spillway *client, struct spillway_result *ret_result, struct spillway_error *ret_error) {
    return spillway_call(client, "hello", write_version, NULL, ret_result, ret_error);
}

int spillway_generate(struct spillway *client, spillway_write_fn *write_params, void *write_user,
                      spillway_event_fn *on_event_fn, void *event_user, struct spillway_result *ret_result,
                      struct spillway_error *ret_error) {
    struct waiting waiting = {.client = client, .on_event = on_event_fn, .event_user = event_user};

    return wait_for_answer(&waiting, "gen.start", write_params, write_user, client->silence_timeout_ms, ret_result,
                           ret_error);
}
