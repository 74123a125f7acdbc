/* Asks the daemon one question and prints the answer while it comes.
 *
 *   cc example.c $(pkg-config --cflags --libs spillway-client) -o example
 *   ./example [SOCKET] "What is the code of the red door?" */
#include <inttypes.h>
#include <stdio.h>

#include <spillway_client.h>

static void write_params(void *user, msgpack_packer *packer) {
    const char *question = user;

    msgpack_pack_map(packer, 2);
    spillway_put(packer, "messages");
    msgpack_pack_array(packer, 1);
    msgpack_pack_map(packer, 2);
    spillway_put(packer, "role");
    spillway_put(packer, "user");
    spillway_put(packer, "content");
    spillway_put(packer, question);
    spillway_put(packer, "max_tokens");
    msgpack_pack_uint64(packer, 256);
}

static bool on_event(void *user, const struct spillway_event *event) {
    (void)user;
    if (event->type == SPILLWAY_EVENT_DELTA) {
        fwrite(event->delta.text.bytes, 1, event->delta.text.n_bytes, stdout);
        fflush(stdout);
    }
    return true; /* false would cancel */
}

int main(int argc, char **argv) {
    struct spillway_options options = {.path = argc > 2 ? argv[1] : NULL};
    struct spillway_result result = {0};
    struct spillway_error error;
    struct spillway *client = NULL;
    int r;

    if (argc < 2) {
        fprintf(stderr, "usage: example [SOCKET] QUESTION\n");
        return 2;
    }
    r = spillway_connect(&options, &client, &error);
    if (r == 0)
        r = spillway_hello(client, NULL, &error);
    if (r == 0)
        r = spillway_generate(client, write_params, argv[argc - 1], on_event, NULL, &result, &error);
    if (r == 0) {
        const msgpack_object *usage = spillway_get(&result.object, "usage");
        struct spillway_text reason = spillway_get_text(&result.object, "finish_reason");

        printf("\n%" PRIu64 " tokens, finish_reason %.*s\n", spillway_get_uint(usage, "completion", 0),
               (int)reason.n_bytes, reason.bytes);
    } else {
        fprintf(stderr, "%s: %s\n", error.code, error.message);
    }
    spillway_result_free(&result);
    spillway_close(client);
    return r == 0 ? 0 : 1;
}
