/* The connection: bytes in and out, answers and events paired with requests. What waits is in call.c. */
#include "client_internal.h"

#include <assert.h>
#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { RECEIVE_BYTES = 64 << 10, RECEIVES_PER_DISPATCH = 16 };
enum { REQUEST = 0, RESPONSE = 1, NOTIFICATION = 2 };
enum { CONNECT_PAUSE_MS = 10 }; /* between attempts while the daemon's queue of connections is full */

int spillway_client_error(struct spillway_error *ret_error, int status, const char *code, const char *format, ...) {
    va_list args;

    if (!ret_error)
        return status;
    *ret_error = (struct spillway_error){0};
    snprintf(ret_error->code, sizeof ret_error->code, "%s", code);
    va_start(args, format);
    vsnprintf(ret_error->message, sizeof ret_error->message, format, args);
    va_end(args);
    return status;
}

static int no_memory(struct spillway_error *ret_error) {
    return spillway_client_error(ret_error, -ENOMEM, "NO_MEMORY", "no memory for the connection's buffers");
}

static int over(const struct spillway *client, struct spillway_error *ret_error) {
    if (ret_error)
        *ret_error = client->lost;
    return client->status;
}

/* ---- open and close ------------------------------------------------------------------------------------------------ */

/* A daemon whose queue of new connections is full answers EAGAIN: it is busy for a moment. */
static int connect_in_time(int fd, const struct sockaddr_un *address, int timeout_ms) {
    for (int waited_ms = 0;; waited_ms += CONNECT_PAUSE_MS) {
        if (connect(fd, (const struct sockaddr *)address, sizeof *address) == 0)
            return 0;
        if (errno == EINTR)
            continue;
        if (errno != EAGAIN)
            return -errno;
        if (waited_ms >= timeout_ms)
            return -ETIMEDOUT;
        nanosleep(&(struct timespec){.tv_nsec = CONNECT_PAUSE_MS * 1000000L}, NULL);
    }
}

static int connect_error(struct spillway_error *ret_error, int status, const char *path) {
    const char *advice = "";

    if (status == -ENOENT || status == -ECONNREFUSED)
        advice = ": is spillwayd running, and is this its server.socket?";
    else if (status == -EACCES)
        advice = ": the socket's mode (server.socket_mode) or its folder's does not admit this user";
    else if (status == -ETIMEDOUT)
        advice = ": the daemon does not take new connections";
    return spillway_client_error(ret_error, status, "CONNECT", "%s: %s%s", path, strerror(-status), advice);
}

int spillway_connect(const struct spillway_options *options, struct spillway **ret_client,
                     struct spillway_error *ret_error) {
    const struct spillway_options defaults = {0}, *o = options ? options : &defaults;
    const char *path = o->path ? o->path : SPILLWAY_DEFAULT_SOCKET;
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct spillway *client;
    int r;

    if (strlen(path) >= sizeof address.sun_path)
        return spillway_client_error(ret_error, -EINVAL, "BAD_CALL",
                                     "a socket's path has at most %zu bytes, this one %zu: %s",
                                     sizeof address.sun_path - 1, strlen(path), path);
    client = calloc(1, sizeof *client);
    if (!client)
        return no_memory(ret_error);
    memcpy(address.sun_path, path, strlen(path) + 1);
    memcpy(client->path, path, strlen(path) + 1);
    client->call_timeout_ms = o->call_timeout_ms ? o->call_timeout_ms : 30000;
    client->silence_timeout_ms = o->silence_timeout_ms ? o->silence_timeout_ms : -1;
    client->frame_bytes_max = o->frame_bytes_max ? o->frame_bytes_max : 16u << 20;
    spillway_scan_begin(&client->scan, client->frame_bytes_max);
    client->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    r = client->fd < 0 ? -errno : 0;
    if (r == 0)
        r = connect_in_time(client->fd, &address, o->connect_timeout_ms ? o->connect_timeout_ms : 5000);
    if (r != 0) {
        spillway_close(client);
        return connect_error(ret_error, r, path);
    }
    *ret_client = client;
    return 0;
}

void spillway_close(struct spillway *client) {
    if (!client)
        return;
    assert(!client->in_callback);
    while (client->calls) {
        struct call *call = client->calls;

        client->calls = call->next;
        free(call);
    }
    if (client->fd >= 0)
        close(client->fd);
    free(client->in.at);
    free(client->out.at);
    free(client);
}

/* ---- requests out -------------------------------------------------------------------------------------------------- */

static int reserve(struct bytes *bytes, size_t n) {
    size_t n_used = bytes->end - bytes->begin, n_room = bytes->n_room;
    unsigned char *at;

    if (bytes->n_room - bytes->end >= n)
        return 0;
    if (n_used > 0)
        memmove(bytes->at, bytes->at + bytes->begin, n_used);
    bytes->begin = 0;
    bytes->end = n_used;
    if (n_room - n_used >= n)
        return 0;
    while (n_room - n_used < n)
        n_room = n_room ? 2 * n_room : RECEIVE_BYTES;
    at = realloc(bytes->at, n_room);
    if (!at)
        return -ENOMEM;
    bytes->at = at;
    bytes->n_room = n_room;
    return 0;
}

struct request_out { /* msgpack-c writes here */
    struct bytes *bytes;
    size_t n_bytes, n_bytes_max;
    int status; /* 0, -ENOMEM or -EMSGSIZE; then nothing more is written */
};

static int write_request(void *user, const char *bytes, size_t n) {
    struct request_out *out = user;

    if (out->status == 0 && n > out->n_bytes_max - out->n_bytes)
        out->status = -EMSGSIZE;
    if (out->status == 0)
        out->status = reserve(out->bytes, n);
    if (out->status != 0)
        return -1;
    memcpy(out->bytes->at + out->bytes->end, bytes, n);
    out->bytes->end += n;
    out->n_bytes += n;
    return 0;
}

struct call *spillway_client_find(struct spillway *client, uint32_t id) {
    struct call *call = client->calls;

    while (call && call->id != id)
        call = call->next;
    return call;
}

static uint32_t next_id(struct spillway *client) {
    do
        client->last_id++;
    while (client->last_id == 0 ||
           spillway_client_find(client, client->last_id)); /* 0 means: no request could be read */
    return client->last_id;
}

/* The last n bytes of `out` are one message, and its parameters, the last n_params bytes, are a map. */
static bool is_request(const struct spillway *client, size_t n, size_t n_params) {
    const unsigned char *end = client->out.at + client->out.end;
    struct scan scan;
    size_t n_message;

    spillway_scan_begin(&scan, client->frame_bytes_max);
    if (n_params == 0 || spillway_scan_step(&scan, end - n, n, &n_message) != 0 || n_message != n)
        return false;
    return (end[-(ptrdiff_t)n_params] & 0xF0) == 0x80 || end[-(ptrdiff_t)n_params] >= 0xDE;
}

static int queue_request(struct spillway *client, uint32_t id, const char *method, spillway_write_fn *write_params,
                         void *user, struct spillway_error *ret_error) {
    struct request_out out = {.bytes = &client->out, .n_bytes_max = client->frame_bytes_max};
    msgpack_packer packer;
    size_t n_head;

    msgpack_packer_init(&packer, &out, write_request);
    msgpack_pack_array(&packer, 4);
    msgpack_pack_int(&packer, REQUEST);
    msgpack_pack_uint32(&packer, id);
    spillway_put(&packer, method);
    n_head = out.n_bytes;
    if (write_params)
        write_params(user, &packer);
    else
        msgpack_pack_map(&packer, 0);
    if (out.status == 0 && is_request(client, out.n_bytes, out.n_bytes - n_head))
        return 0;
    client->out.end -= out.n_bytes;
    if (out.status == -ENOMEM)
        return no_memory(ret_error);
    if (out.status == -EMSGSIZE)
        return spillway_client_error(ret_error, -EINVAL, "BAD_CALL",
                                     "the request %s is longer than a message may be: %zu bytes", method,
                                     client->frame_bytes_max);
    return spillway_client_error(
        ret_error, -EINVAL, "BAD_CALL",
        "the parameters of %s are not written as exactly one map, at most %d deep, of UTF-8 strings", method,
        SCAN_DEPTH_MAX - 1);
}

int spillway_start(struct spillway *client, const char *method, spillway_write_fn *write_params, void *write_user,
                   const struct spillway_handler *handler, uint32_t *ret_id, struct spillway_error *ret_error) {
    struct call *call;
    int r;

    if (client->status != 0)
        return over(client, ret_error);
    if (client->n_calls == CLIENT_CALLS_MAX)
        return spillway_client_error(ret_error, -EINVAL, "BAD_CALL", "%d requests already wait for an answer",
                                     CLIENT_CALLS_MAX);
    call = calloc(1, sizeof *call);
    if (!call)
        return no_memory(ret_error);
    call->id = next_id(client);
    call->is_gen = strcmp(method, "gen.start") == 0;
    if (handler)
        call->handler = *handler;
    r = queue_request(client, call->id, method, write_params, write_user, ret_error);
    if (r != 0) {
        free(call);
        return r;
    }
    call->next = client->calls;
    client->calls = call;
    client->n_calls++;
    if (ret_id)
        *ret_id = call->id;
    return 0;
}

static void write_id(void *user, msgpack_packer *packer) {
    msgpack_pack_map(packer, 1);
    spillway_put(packer, "id");
    msgpack_pack_uint32(packer, *(const uint32_t *)user);
}

int spillway_cancel(struct spillway *client, uint32_t id, struct spillway_error *ret_error) {
    return spillway_start(client, "gen.cancel", write_id, &id, NULL, NULL, ret_error);
}

/* ---- answers in ---------------------------------------------------------------------------------------------------- */

static struct call *take_call(struct spillway *client, uint32_t id) {
    for (struct call **link = &client->calls; *link; link = &(*link)->next) {
        struct call *call = *link;

        if (call->id == id) {
            *link = call->next;
            client->n_calls--;
            return call;
        }
    }
    return NULL;
}

/* Tells whoever waits, and frees the call. */
static void finish_call(struct spillway *client, struct call *call, int status, const msgpack_object *result,
                        const struct spillway_error *error) {
    if (call->handler.on_done && !call->is_abandoned) {
        client->in_callback = true;
        call->handler.on_done(call->handler.user, status, result, error);
        client->in_callback = false;
    }
    free(call);
}

/* The connection is over. The value is -errno, as of every function below that reads messages. */
static int lose(struct spillway *client, int status, const char *code, const char *why) {
    client->status = spillway_client_error(&client->lost, status, code, "%s: %s", client->path, why);
    shutdown(client->fd, SHUT_RDWR);
    while (client->calls) {
        struct call *call = take_call(client, client->calls->id);

        finish_call(client, call, client->status, NULL, &client->lost);
    }
    return client->status;
}

static int lose_for_protocol(struct spillway *client, const char *why) {
    return lose(client, -EPROTO, "PROTOCOL", why);
}

static bool read_u32(const msgpack_object *object, uint32_t *ret) {
    if (object->type != MSGPACK_OBJECT_POSITIVE_INTEGER || object->via.u64 > UINT32_MAX)
        return false;
    *ret = (uint32_t)object->via.u64;
    return true;
}

static bool read_error(const msgpack_object *object, struct spillway_error *ret_error) {
    struct spillway_text code = spillway_get_text(object, "code"), message = spillway_get_text(object, "message");

    if (code.n_bytes == 0 || code.n_bytes >= sizeof ret_error->code)
        return false;
    spillway_client_error(ret_error, 0, "", "%.*s", message.n_bytes < 4096 ? (int)message.n_bytes : 4096,
                          message.n_bytes ? message.bytes : "");
    memcpy(ret_error->code, code.bytes, code.n_bytes);
    return true;
}

static int take_response(struct spillway *client, const msgpack_object *message) {
    const msgpack_object *members = message->via.array.ptr, *result = &members[3];
    bool is_error = members[2].type != MSGPACK_OBJECT_NIL;
    struct spillway_error error;
    struct call *call;
    uint32_t id;

    if (message->via.array.size != 4 || !read_u32(&members[1], &id))
        return lose_for_protocol(client, "a response that is not [1, id, error, result]");
    if (is_error != (result->type == MSGPACK_OBJECT_NIL) || (!is_error && result->type != MSGPACK_OBJECT_MAP) ||
        (is_error && !read_error(&members[2], &error)))
        return lose_for_protocol(client, "a response without exactly one error {code, message} or result map");
    if (id == 0 && is_error) /* it could not even read the id: it closes the connection */
        return lose(client, -EPROTO, error.code, error.message);
    call = take_call(client, id);
    if (!call)
        return lose_for_protocol(client, "a response to no request, or a second one");
    if (is_error)
        finish_call(client, call, SPILLWAY_E_REFUSED, &members[2], &error);
    else
        finish_call(client, call, 0, result, NULL);
    return 0;
}

static bool text_is(struct spillway_text text, const char *string) {
    return text.n_bytes == strlen(string) && memcmp(text.bytes, string, text.n_bytes) == 0;
}

static void read_event(const msgpack_object *params, struct spillway_event *event) {
    struct spillway_text type = spillway_get_text(params, "type");
    const msgpack_object *cached = spillway_get(params, "cached");

    if (text_is(type, "delta")) {
        event->type = SPILLWAY_EVENT_DELTA;
        event->delta.text = spillway_get_text(params, "text");
        event->delta.channel = spillway_get_text(params, "channel");
    } else if (text_is(type, "progress")) {
        event->type = SPILLWAY_EVENT_PROGRESS;
        event->progress.done = spillway_get_uint(params, "done", 0);
        event->progress.total = spillway_get_uint(params, "total", 0);
    } else if (text_is(type, "accepted")) {
        event->type = SPILLWAY_EVENT_ACCEPTED;
        event->accepted.n_prompt = spillway_get_uint(params, "n_prompt", 0);
        event->accepted.n_cached_device = spillway_get_uint(cached, "device", 0);
        event->accepted.n_cached_host = spillway_get_uint(cached, "host", 0);
        event->accepted.n_cached_disk = spillway_get_uint(cached, "disk", 0);
        event->accepted.queue = spillway_get_uint(params, "queue", 0);
    } else if (text_is(type, "notice")) {
        event->type = SPILLWAY_EVENT_NOTICE;
        event->notice.reason = spillway_get_text(params, "reason");
    } else if (text_is(type, "tool_call")) {
        event->type = SPILLWAY_EVENT_TOOL_CALL;
    }
}

static int take_event(struct spillway *client, const msgpack_object *params) {
    const msgpack_object *id = spillway_get(params, "id");
    struct spillway_event event = {.type = SPILLWAY_EVENT_OTHER, .object = params};
    struct call *call;
    bool go_on;

    if (!id || !read_u32(id, &event.id))
        return lose_for_protocol(client, "an event without the id of a request");
    call = spillway_client_find(client, event.id);
    if (!call || !call->is_gen)
        return lose_for_protocol(client, "an event of no generation, or after its answer");
    event.seq = spillway_get_uint(params, "seq", UINT64_MAX);
    if (event.seq != call->n_events)
        return lose_for_protocol(client, "events of a generation with a gap or out of order");
    call->n_events++;
    if (!call->handler.on_event || call->is_abandoned)
        return 0;
    read_event(params, &event);
    client->in_callback = true;
    go_on = call->handler.on_event(call->handler.user, &event);
    client->in_callback = false;
    if (!go_on && !call->is_cancelled)
        call->is_cancelled = spillway_cancel(client, call->id, NULL) == 0; /* else at the next event */
    return 0;
}

static int take_message(struct spillway *client, const msgpack_object *message) {
    const msgpack_object *members = message->via.array.ptr;
    uint32_t kind;

    if (message->type != MSGPACK_OBJECT_ARRAY || message->via.array.size < 3 || !read_u32(&members[0], &kind))
        return lose_for_protocol(client, "a message that is no array of msgpack-RPC");
    if (kind == RESPONSE)
        return take_response(client, message);
    if (kind != NOTIFICATION || message->via.array.size != 3 || members[1].type != MSGPACK_OBJECT_STR ||
        members[2].type != MSGPACK_OBJECT_MAP)
        return lose_for_protocol(client, "a message that is neither a response nor [2, method, params]");
    if (text_is((struct spillway_text){members[1].via.str.ptr, members[1].via.str.size}, "gen.event"))
        return take_event(client, &members[2]);
    return 0; /* a notification of a later daemon */
}

/* All whole messages that are here. */
static int take_messages(struct spillway *client) {
    while (client->in.begin < client->in.end) {
        const unsigned char *at = client->in.at + client->in.begin;
        size_t n_bytes;
        int r = spillway_scan_step(&client->scan, at, client->in.end - client->in.begin, &n_bytes);
        msgpack_unpacked unpacked;

        if (r == SCAN_E_MORE)
            break;
        if (r != 0)
            return lose_for_protocol(client, r == SCAN_E_LIMIT
                                                 ? "a message that is too long, too deep, or of too many objects"
                                                 : "bytes that are no msgpack with UTF-8 strings");
        msgpack_unpacked_init(&unpacked);
        if (msgpack_unpack_next(&unpacked, (const char *)at, n_bytes, NULL) != MSGPACK_UNPACK_SUCCESS) {
            msgpack_unpacked_destroy(&unpacked);
            return lose(client, -ENOMEM, "NO_MEMORY", "no memory to read a message");
        }
        client->message = at;
        client->n_message_bytes = n_bytes;
        r = take_message(client, &unpacked.data);
        client->message = NULL;
        msgpack_unpacked_destroy(&unpacked);
        if (r != 0)
            return r;
        client->in.begin += n_bytes;
        spillway_scan_begin(&client->scan, client->frame_bytes_max);
    }
    return 0;
}

static int receive(struct spillway *client) {
    for (int i = 0; i < RECEIVES_PER_DISPATCH; i++) {
        ssize_t n;
        int r;

        if (reserve(&client->in, RECEIVE_BYTES) != 0)
            return lose(client, -ENOMEM, "NO_MEMORY", "no memory to receive a message");
        n = recv(client->fd, client->in.at + client->in.end, RECEIVE_BYTES, 0);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return 0;
        if (n < 0)
            return lose(client, -errno, "CLOSED", strerror(errno));
        if (n == 0)
            return lose(client, -ECONNRESET, "CLOSED",
                        client->in.begin < client->in.end
                            ? "the daemon closed the connection in the middle of a message"
                            : "the daemon closed the connection");
        client->in.end += (size_t)n;
        r = take_messages(client);
        if (r != 0)
            return r;
    }
    return 0;
}

static void flush(struct spillway *client) {
    while (client->out.begin < client->out.end && !client->is_deaf) {
        ssize_t n =
            send(client->fd, client->out.at + client->out.begin, client->out.end - client->out.begin, MSG_NOSIGNAL);

        if (n >= 0)
            client->out.begin += (size_t)n;
        else if (errno == EAGAIN || errno == EWOULDBLOCK)
            return;
        else if (errno != EINTR)
            client->is_deaf = true; /* receiving finds out why */
    }
}

/* ---- in the caller's loop ------------------------------------------------------------------------------------------ */

int spillway_fd(const struct spillway *client) {
    return client->fd;
}

short spillway_poll_events(const struct spillway *client) {
    return POLLIN | (client->out.begin < client->out.end && !client->is_deaf ? POLLOUT : 0);
}

int spillway_dispatch(struct spillway *client, struct spillway_error *ret_error) {
    if (client->in_callback)
        return spillway_client_error(ret_error, -EINVAL, "BAD_CALL", "a callback may not wait or dispatch");
    if (client->status == 0) {
        flush(client);
        if (receive(client) == 0)
            flush(client); /* what callbacks queued */
    }
    return client->status == 0 ? 0 : over(client, ret_error);
}
