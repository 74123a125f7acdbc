#include "chats.h"

#include <errno.h>
#include <poll.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base.h"
#include "bench.h"
#include "talk.h"

enum {
    TEXT_BYTES = 16384,
    SYSTEM_NOTES = 85, /* some 1,000 tokens, for all alike */
    OWN_NOTES = 25,    /* some 300 */
    TURN_NOTES = 2,
    ANSWER_TOKENS = 32,
    TIMEOUT_MS = 10 * 60 * 1000,
};

struct chats;

struct chat {
    struct chats *chats;
    struct spillway *client;
    char session[32];
    uint64_t seed;
    int turn; /* the next */
    bool is_busy;
    double asked, next_ask; /* 0: it has not been answered yet */
    uint64_t n_before;      /* tokens of the session */
};

struct chats {
    const struct chats_options *options;
    struct chats_figures *figures;
    struct chat all[CHATS_MAX];
    int n_over, error;
};

/* ---- what is said --------------------------------------------------------------------------------------------------- */

static uint32_t draw(uint64_t *seed, uint32_t below) {
    *seed = *seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)((*seed >> 33) % below);
}

static void add_notes(uint64_t *seed, int n_notes, char *text, size_t room) {
    static const char *const colours[] = {"red", "blue", "green", "white", "black", "silver", "golden", "yellow"};
    static const char *const things[] = {"door", "tower", "garden", "bridge", "box", "attic"};
    size_t n = strlen(text);

    for (int i = 0; i < n_notes && n < room; i++)
        n += (size_t)snprintf(text + n, room - n, "The code of the %s %s is %u. ",
                              colours[draw(seed, ARRAY_LEN(colours))], things[draw(seed, ARRAY_LEN(things))],
                              1000 + draw(seed, 9000));
}

static void put_message(msgpack_packer *packer, const char *role, const char *text) {
    msgpack_pack_map(packer, 2);
    spillway_put(packer, "role");
    spillway_put(packer, role);
    spillway_put(packer, "content");
    spillway_put(packer, text);
}

static void write_turn(void *user, msgpack_packer *packer) {
    struct chat *chat = user;
    bool is_first = chat->turn == 0;
    char text[TEXT_BYTES] = "";

    msgpack_pack_map(packer, 5);
    spillway_put(packer, "session");
    spillway_put(packer, chat->session);
    spillway_put(packer, "messages");
    msgpack_pack_array(packer, is_first ? 2 : 1);
    if (is_first) {
        uint64_t seed = 1;

        add_notes(&seed, SYSTEM_NOTES, text, sizeof text);
        put_message(packer, "system", text);
        text[0] = '\0';
    }
    add_notes(&chat->seed, is_first ? OWN_NOTES : TURN_NOTES, text, sizeof text);
    snprintf(text + strlen(text), sizeof text - strlen(text), "What is the code of the red door?");
    put_message(packer, "user", text);
    spillway_put(packer, "thinking");
    msgpack_pack_false(packer);
    spillway_put(packer, "temperature");
    msgpack_pack_int(packer, 0);
    spillway_put(packer, "max_tokens");
    msgpack_pack_int(packer, ANSWER_TOKENS);
}

static void write_name(void *user, msgpack_packer *packer) {
    const struct chat *chat = user;

    msgpack_pack_map(packer, 1);
    spillway_put(packer, "name");
    spillway_put(packer, chat->session);
}

/* ---- turns ---------------------------------------------------------------------------------------------------------- */

static bool on_event(void *user, const struct spillway_event *event) {
    struct chat *chat = user;

    if (event->type == SPILLWAY_EVENT_DELTA && chat->asked > 0) {
        if (load_add(&chat->chats->figures->ttft, bench_now() - chat->asked) != 0)
            chat->chats->error = -ENOMEM;
        chat->asked = 0;
    }
    return true;
}

static void count(struct chat *chat, const msgpack_object *usage) {
    struct chats_figures *sum = chat->chats->figures;
    const msgpack_object *cached = spillway_get(usage, "cached");
    uint64_t n_prompt = spillway_get_uint(usage, "prompt", 0), n_tokens = spillway_get_uint(usage, "completion", 0);
    uint64_t n_device = spillway_get_uint(cached, "device", 0), n_host = spillway_get_uint(cached, "host", 0);
    uint64_t n_disk = spillway_get_uint(cached, "disk", 0);

    sum->n_answers++;
    sum->n_tokens += n_tokens;
    sum->n_prompt += n_prompt;
    sum->n_device += n_device;
    sum->n_host += n_host;
    sum->n_disk += n_disk;
    sum->n_recomputed += spillway_get_uint(usage, "recomputed", 0);
    sum->n_seen += chat->turn == 0 ? n_device + n_host + n_disk : chat->n_before;
    chat->n_before = n_prompt + n_tokens;
}

static void on_done(void *user, int status, const msgpack_object *result, const struct spillway_error *error) {
    struct chat *chat = user;
    const struct chats_options *options = chat->chats->options;

    chat->is_busy = false;
    if (status != 0) {
        chat->chats->error = talk_complain(error, status);
        return;
    }
    count(chat, spillway_get(result, "usage"));
    chat->turn++;
    chat->chats->n_over += chat->turn == options->n_turns;
    chat->next_ask = bench_now() + options->think_s * (0.5 + draw(&chat->seed, 1000) / 1000.0);
}

static int ask(struct chat *chat) {
    struct spillway_handler handler = {.on_event = on_event, .on_done = on_done, .user = chat};
    struct spillway_error error;
    int r;

    chat->asked = bench_now();
    chat->is_busy = true;
    r = spillway_start(chat->client, "gen.start", write_turn, chat, &handler, NULL, &error);
    return r == 0 ? 0 : talk_complain(&error, r);
}

/* They come one after the other, within the time that one thinks. */
static int begin(struct chats *chats, int i) {
    struct chat *chat = &chats->all[i];
    struct spillway_error error;
    int r = talk_connect(chats->options->socket, &chat->client);

    chat->chats = chats;
    chat->seed = (uint64_t)i + 2;
    chat->next_ask = bench_now() + chats->options->think_s * i / chats->options->n_chats;
    snprintf(chat->session, sizeof chat->session, "chat-%d", i);
    if (r != 0)
        return r;
    r = spillway_call(chat->client, "session.open", write_name, chat, NULL, &error);
    return r == 0 ? 0 : talk_complain(&error, r);
}

static bool is_due(const struct chat *chat, double now) {
    return !chat->is_busy && chat->turn < chat->chats->options->n_turns && chat->next_ask <= now;
}

static int turn(struct chats *chats) {
    int n = chats->options->n_chats, wait_ms = TIMEOUT_MS, r = 0;
    struct pollfd fds[CHATS_MAX];
    struct spillway_error error;
    double now = bench_now();

    for (int i = 0; r == 0 && i < n; i++) {
        struct chat *chat = &chats->all[i];

        if (is_due(chat, now))
            r = ask(chat);
        if (!chat->is_busy && chat->turn < chats->options->n_turns)
            wait_ms = min_int(wait_ms, (int)((chat->next_ask - now) * 1e3) + 1);
        fds[i] = (struct pollfd){.fd = spillway_fd(chat->client), .events = spillway_poll_events(chat->client)};
    }
    if (r == 0)
        r = poll(fds, (nfds_t)n, wait_ms) < 0 ? -errno : 0;
    for (int i = 0; r == 0 && i < n; i++)
        if (fds[i].revents != 0 && spillway_dispatch(chats->all[i].client, &error) != 0)
            r = talk_complain(&error, -ECONNRESET);
    return r == 0 ? chats->error : r;
}

int chats_run(const struct chats_options *options, struct chats_figures *ret_figures) {
    struct chats *chats = calloc(1, sizeof *chats);
    double start;
    int r = chats ? 0 : -ENOMEM;

    *ret_figures = (struct chats_figures){0};
    if (!chats)
        return r;
    chats->options = options;
    chats->figures = ret_figures;
    start = bench_now();
    for (int i = 0; r == 0 && i < options->n_chats; i++)
        r = begin(chats, i);
    while (r == 0 && chats->n_over < options->n_chats)
        r = turn(chats);
    ret_figures->seconds = bench_now() - start;
    for (int i = 0; i < options->n_chats; i++)
        spillway_close(chats->all[i].client);
    free(chats);
    return r;
}

void chats_figures_free(struct chats_figures *figures) {
    free(figures->ttft.values);
    *figures = (struct chats_figures){0};
}
