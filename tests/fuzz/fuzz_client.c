/* What a daemon may send, in pieces: whatever it is, every request ends exactly once, events come only before that, and
 * once the connection is lost it stays so. The first byte says how long the pieces are. */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "client_internal.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

#define CHECK(fact)                                                                                                    \
    do {                                                                                                               \
        if (!(fact))                                                                                                   \
            abort();                                                                                                   \
    } while (0)

enum { N_REQUESTS = 3, BYTES_MAX = 32 << 10 /* what a socket holds for sure */ };

struct told { /* what one request was told */
    unsigned n_done;
    uint64_t n_events;
};

static bool on_event(void *user, const struct spillway_event *event) {
    struct told *told = user;

    CHECK(told->n_done == 0 && event->seq == told->n_events);
    told->n_events++;
    if (event->type == SPILLWAY_EVENT_DELTA) /* both lie in the message */
        CHECK(event->delta.text.n_bytes < BYTES_MAX && event->delta.channel.n_bytes < BYTES_MAX);
    return told->n_events % 4 != 3;
}

static void on_done(void *user, int status, const msgpack_object *result, const struct spillway_error *error) {
    struct told *told = user;

    CHECK(told->n_done++ == 0);
    CHECK((status == 0) == (error == NULL) && (status < 0) == (result == NULL));
    CHECK(!error || memchr(error->message, 0, sizeof error->message));
    spillway_get_double(spillway_get(result, "usage"), "n", 0);
}

static struct spillway *open_pair(int *ret_daemon) {
    struct spillway *client = calloc(1, sizeof *client);
    int fds[2];

    CHECK(client && socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, fds) == 0);
    client->fd = fds[0];
    client->frame_bytes_max = 4096;
    spillway_scan_begin(&client->scan, client->frame_bytes_max);
    *ret_daemon = fds[1];
    return client;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    static const char *const methods[N_REQUESTS] = {"gen.start", "server.stats", "gen.start"};
    struct told told[N_REQUESTS] = {0};
    struct spillway *client;
    size_t n_piece, at = 1;
    int daemon, status = 0;

    if (n < 2 || n > BYTES_MAX)
        return 0;
    n_piece = data[0] ? data[0] : n;
    client = open_pair(&daemon);
    for (int i = 0; i < N_REQUESTS; i++) {
        const struct spillway_handler handler = {.on_event = on_event, .on_done = on_done, .user = &told[i]};

        CHECK(spillway_start(client, methods[i], NULL, NULL, &handler, NULL, NULL) == 0);
    }
    while (status == 0 && at < n) {
        size_t n_now = n - at < n_piece ? n - at : n_piece;

        CHECK(write(daemon, data + at, n_now) == (ssize_t)n_now);
        at += n_now;
        status = spillway_dispatch(client, NULL);
    }
    close(daemon);
    while (status == 0)
        status = spillway_dispatch(client, NULL);
    CHECK(status < 0 && spillway_dispatch(client, NULL) == status && client->n_calls == 0);
    for (int i = 0; i < N_REQUESTS; i++)
        CHECK(told[i].n_done == 1);
    spillway_close(client);
    return 0;
}
