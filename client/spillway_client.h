/* spillway_client: talks to a spillwayd over its Unix socket (protocol version 1, docs/protocol.md). Requests are written
 * and results are read with msgpack-c; the library adds the connection, the pairing of answers with requests, the events
 * of generations, and bounds on what it accepts from the other side. It knows no meaning of a parameter.
 *
 * Threads: a client is used by one thread at a time; different clients are independent. The library has no globals,
 * starts no thread, installs no signal handler and raises no SIGPIPE. Callbacks run inside spillway_dispatch() and the
 * calls that wait; they may start, cancel and read, but not wait or dispatch (-EINVAL), nor close (aborts).
 *
 * Units: times are milliseconds, sizes bytes; n_* counts. Strings that the library takes end in a zero and are only read
 * during the call. Strings and objects that it hands to a callback live until the callback returns.
 *
 * Errors: functions that can fail return
 *   0                     done
 *   SPILLWAY_E_REFUSED    the daemon answered with an error; the connection is as good as before
 *   -ETIMEDOUT            no answer in time; the connection stays, and a late answer is dropped
 *   -EINTR                of spillway_wait(): a signal came; the connection stays
 *   -EINVAL               the caller asked for what cannot be sent; nothing was sent
 *   other negative errno  the connection cannot be had, or is over: only spillway_close() is left
 * and, if they failed, say in `ret_error` (NULL: not wanted) what happened. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <msgpack.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SPILLWAY_API __attribute__((visibility("default")))
#define SPILLWAY_DEFAULT_SOCKET "/run/spillway/spillway.sock"

enum { SPILLWAY_PROTOCOL = 1 };
enum { SPILLWAY_E_REFUSED = 1 };

struct spillway; /* one connection */

struct spillway_error {
    /* The daemon's code, such as BUSY or CONTEXT_LENGTH; or one of this library: CONNECT (no connection), CLOSED (the
     * daemon ended it), PROTOCOL (it sent what version 1 does not allow), TIMEOUT, INTERRUPTED, BAD_CALL, NO_MEMORY. */
    char code[32];
    char message[512];
};

struct spillway_options {
    const char *path;         /* NULL: SPILLWAY_DEFAULT_SOCKET */
    int connect_timeout_ms;   /* 0: 5,000 */
    int call_timeout_ms;      /* of spillway_hello and spillway_call; 0: 30,000; negative: no limit */
    int silence_timeout_ms;   /* of spillway_generate: longest time without any event; 0 or negative: no limit */
    uint32_t frame_bytes_max; /* of one message in either direction; 0: 16 MiB */
};

/* Connects, and sends nothing yet. `options` may be NULL. The caller owns *ret_client. */
SPILLWAY_API int spillway_connect(const struct spillway_options *options, struct spillway **ret_client,
                                  struct spillway_error *ret_error);
/* Ends the connection and with it, in the daemon, all that was started on it. Callbacks of unfinished requests do not
 * come. NULL is fine. */
SPILLWAY_API void spillway_close(struct spillway *client);

/* ---- requests that wait -------------------------------------------------------------------------------------------- */

/* Writes the parameters of a request: exactly one map with string keys. */
typedef void spillway_write_fn(void *user, msgpack_packer *packer);

/* What the daemon answered. Owned by the caller, who gives it back with spillway_result_free(). */
struct spillway_result {
    msgpack_object object;
    void *memory; /* that `object` points into */
};
SPILLWAY_API void spillway_result_free(struct spillway_result *result); /* an all-zero one is fine */

/* The first request on every connection. The result tells version, features, limits, model and uid. `ret_result` may be
 * NULL. */
SPILLWAY_API int spillway_hello(struct spillway *client, struct spillway_result *ret_result,
                                struct spillway_error *ret_error);

/* Any method but gen.start. `write_params` may be NULL: no parameters. `ret_result` may be NULL. */
SPILLWAY_API int spillway_call(struct spillway *client, const char *method, spillway_write_fn *write_params, void *user,
                               struct spillway_result *ret_result, struct spillway_error *ret_error);

enum spillway_event_type {
    SPILLWAY_EVENT_OTHER, /* a type that this version of the library does not know: see `object` */
    SPILLWAY_EVENT_ACCEPTED,
    SPILLWAY_EVENT_PROGRESS,
    SPILLWAY_EVENT_DELTA,
    SPILLWAY_EVENT_TOOL_CALL,
    SPILLWAY_EVENT_NOTICE,
};

struct spillway_text { /* UTF-8, no zero at the end */
    const char *bytes;
    size_t n_bytes;
};

struct spillway_event {
    enum spillway_event_type type;
    uint32_t id;                  /* of the request */
    uint64_t seq;                 /* from 0, without gaps */
    const msgpack_object *object; /* the whole event, a map */
    union {
        struct {
            uint64_t n_prompt, n_cached_device, n_cached_host, n_cached_disk; /* tokens */
            uint64_t queue;                                                   /* requests before this one */
        } accepted;
        struct {
            uint64_t done, total; /* tokens of the prompt */
        } progress;
        struct {
            struct spillway_text text, channel; /* channel: content, reasoning or tool */
        } delta;
        struct {
            struct spillway_text reason;
        } notice;
    };
};

/* False cancels the generation; its answer, with finish_reason `cancelled`, still comes. */
typedef bool spillway_event_fn(void *user, const struct spillway_event *event);

/* gen.start, until its answer is there. `on_event` may be NULL. When silence_timeout_ms ends the wait, the generation
 * has been cancelled. */
SPILLWAY_API int spillway_generate(struct spillway *client, spillway_write_fn *write_params, void *write_user,
                                   spillway_event_fn *on_event, void *event_user, struct spillway_result *ret_result,
                                   struct spillway_error *ret_error);

/* ---- requests in the caller's own loop ----------------------------------------------------------------------------- */

struct spillway_handler {
    spillway_event_fn *on_event; /* of gen.start only; may be NULL */
    /* Comes exactly once, never from inside spillway_start(). Status 0: `result` is set. SPILLWAY_E_REFUSED: `error` is
     * set, and `result` is the daemon's error {code, message, data?}. A negative errno: only `error` is set. May be
     * NULL. */
    void (*on_done)(void *user, int status, const msgpack_object *result, const struct spillway_error *error);
    void *user;
};

/* Queues a request, any method. Non-zero: nothing was queued and no callback will come. `handler` may be NULL: the answer
 * is dropped. *ret_id (NULL: not wanted) names it in spillway_cancel() until on_done. */
SPILLWAY_API int spillway_start(struct spillway *client, const char *method, spillway_write_fn *write_params,
                                void *write_user, const struct spillway_handler *handler, uint32_t *ret_id,
                                struct spillway_error *ret_error);
/* Queues gen.cancel. The generation's own answer still comes: with finish_reason `cancelled`, or with another one if it was
 * done by then. */
SPILLWAY_API int spillway_cancel(struct spillway *client, uint32_t id, struct spillway_error *ret_error);

/* The socket, and what to poll() it for at this moment: POLLIN, and POLLOUT while bytes wait to be sent. The fd stays the
 * client's. */
SPILLWAY_API int spillway_fd(const struct spillway *client);
SPILLWAY_API short spillway_poll_events(const struct spillway *client);
/* Sends and receives what is possible without waiting and runs the callbacks. Non-zero: the connection is over, and every
 * started request has had its on_done. */
SPILLWAY_API int spillway_dispatch(struct spillway *client, struct spillway_error *ret_error);
/* poll() and dispatch once: waits until the socket is ready, for at most timeout_ms (negative: no limit). -ETIMEDOUT:
 * nothing came; -EINTR: a signal came. */
SPILLWAY_API int spillway_wait(struct spillway *client, int timeout_ms, struct spillway_error *ret_error);

/* ---- reading results ----------------------------------------------------------------------------------------------- */

/* What the map has under `key`, or NULL; NULL also if `map` is NULL or no map. So calls nest:
 * spillway_get(spillway_get(result, "usage"), "draft"). */
SPILLWAY_API const msgpack_object *spillway_get(const msgpack_object *map, const char *key);
/* The same as a type; `otherwise` if it is missing or of another type. Integers count as doubles, not the reverse. */
SPILLWAY_API uint64_t spillway_get_uint(const msgpack_object *map, const char *key, uint64_t otherwise);
SPILLWAY_API double spillway_get_double(const msgpack_object *map, const char *key, double otherwise);
SPILLWAY_API bool spillway_get_bool(const msgpack_object *map, const char *key, bool otherwise);
SPILLWAY_API struct spillway_text spillway_get_text(const msgpack_object *map, const char *key); /* else n_bytes 0 */

/* ---- writing parameters -------------------------------------------------------------------------------------------- */

/* A key or a string value. msgpack_pack_map(), msgpack_pack_int64() and so on do the rest. */
SPILLWAY_API void spillway_put(msgpack_packer *packer, const char *string);

#ifdef __cplusplus
}
#endif
