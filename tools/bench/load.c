#include "load.h"

#include <errno.h>
#include <poll.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base.h"
#include "bench.h"
#include "talk.h"

enum { NOTES = 8, QUESTION_BYTES = 1024, TIMEOUT_MS = 60 * 1000 };

struct load;

struct client { /* one connection with one request on its way */
    struct load *load;
    struct spillway *connection;
    double asked, last_delta; /* last_delta 0: none yet */
    bool is_busy;
};

struct load {
    const struct load_options *options;
    struct load_result *result;
    struct client clients[LOAD_CLIENTS_MAX];
    double begin, end; /* of the measured time */
    uint64_t n_window_tokens;
    int n_busy, error;
};

/* ---- samples -------------------------------------------------------------------------------------------------------- */

static int add_samples(struct load_samples *samples, double value, int n) {
    if (samples->n + (size_t)n > samples->n_room) {
        size_t n_room = 2 * samples->n_room + (size_t)n + 1024;
        double *grown = realloc(samples->values, n_room * sizeof *grown);

        if (!grown)
            return -ENOMEM;
        samples->values = grown;
        samples->n_room = n_room;
    }
    for (int i = 0; i < n; i++)
        samples->values[samples->n++] = value;
    return 0;
}

int load_add(struct load_samples *samples, double value) {
    return add_samples(samples, value, 1);
}

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

double load_percentile(struct load_samples *samples, double p) {
    if (samples->n == 0)
        return 0;
    qsort(samples->values, samples->n, sizeof *samples->values, compare);
    return samples->values[(size_t)(p * (double)(samples->n - 1) + 0.5)];
}

void load_result_free(struct load_result *result) {
    free(result->ttft.values);
    free(result->inter_token.values);
    free(result->gap.values);
    *result = (struct load_result){0};
}

/* ---- questions ------------------------------------------------------------------------------------------------------ */

static uint32_t draw(uint64_t *seed, uint32_t below) {
    *seed = *seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)((*seed >> 33) % below);
}

static size_t write_notes(uint64_t *seed, char *text, size_t room) {
    static const char *const colours[NOTES] = {"red", "blue", "green", "white", "black", "silver", "golden", "yellow"};
    static const char *const things[] = {"door", "tower", "garden", "bridge", "box", "attic"};
    uint32_t colour = draw(seed, NOTES), thing = draw(seed, ARRAY_LEN(things)), asked = draw(seed, NOTES);
    size_t n = (size_t)snprintf(text, room, "Read these notes.\n\n");

    for (uint32_t i = 0; i < NOTES; i++)
        n += (size_t)snprintf(text + n, room - n, "The code of the %s %s is %u. ", colours[(colour + i) % NOTES],
                              things[(thing + i) % ARRAY_LEN(things)], 1000 + draw(seed, 9000));
    n += (size_t)snprintf(text + n, room - n, "\n\nWhat is the code of the %s %s?", colours[(colour + asked) % NOTES],
                          things[(thing + asked) % ARRAY_LEN(things)]);
    return n;
}

static void write_question(uint32_t number, char text[QUESTION_BYTES]) {
    uint64_t seed = number;

    draw(&seed, 2);
    if (number % 2 == 0) {
        write_notes(&seed, text, QUESTION_BYTES);
    } else {
        uint32_t from = 1 + draw(&seed, 60);

        snprintf(text, QUESTION_BYTES, "Count from %u to %u.", from, from + 12 + draw(&seed, 24));
    }
}

static void write_params(void *user, msgpack_packer *packer) {
    char text[QUESTION_BYTES];

    write_question(*(const uint32_t *)user, text);
    msgpack_pack_map(packer, 5);
    spillway_put(packer, "messages");
    msgpack_pack_array(packer, 1);
    msgpack_pack_map(packer, 2);
    spillway_put(packer, "role");
    spillway_put(packer, "user");
    spillway_put(packer, "content");
    spillway_put(packer, text);
    spillway_put(packer, "thinking");
    msgpack_pack_false(packer);
    spillway_put(packer, "temperature");
    msgpack_pack_int(packer, 0);
    spillway_put(packer, "max_tokens");
    msgpack_pack_int(packer, LOAD_ANSWER_TOKENS);
    spillway_put(packer, "return_ids"); /* says how many tokens a delta has */
    msgpack_pack_true(packer);
}

/* ---- clients -------------------------------------------------------------------------------------------------------- */

static void record_delta(struct client *client, int n_tokens) {
    struct load *load = client->load;
    struct load_result *result = load->result;
    double now = bench_now();
    int r = 0;

    if (client->last_delta == 0 && client->asked >= load->begin && client->asked < load->end)
        r = add_samples(&result->ttft, now - client->asked, 1);
    if (now >= load->begin && now < load->end) {
        double gap = now - client->last_delta;

        load->n_window_tokens += (uint64_t)n_tokens;
        if (r == 0 && client->last_delta > 0)
            r = add_samples(&result->gap, gap, 1);
        if (r == 0 && client->last_delta > 0 && n_tokens > 0)
            r = add_samples(&result->inter_token, gap / n_tokens, n_tokens);
    }
    client->last_delta = now;
    if (r != 0)
        load->error = r;
}

static bool on_event(void *user, const struct spillway_event *event) {
    const msgpack_object *ids = spillway_get(event->object, "ids");

    if (event->type == SPILLWAY_EVENT_DELTA)
        record_delta(user, ids && ids->type == MSGPACK_OBJECT_ARRAY ? (int)ids->via.array.size : 0);
    return true;
}

static void on_done(void *user, int status, const msgpack_object *result, const struct spillway_error *error);

static void ask(struct client *client) {
    struct load *load = client->load;
    struct spillway_handler handler = {.on_event = on_event, .on_done = on_done, .user = client};
    struct spillway_error error;
    int r;

    client->last_delta = 0;
    client->asked = bench_now();
    r = spillway_start(client->connection, "gen.start", write_params, &load->result->next_question, &handler, NULL,
                       &error);
    if (r != 0) {
        load->error = talk_complain(&error, r);
        return;
    }
    load->result->next_question++;
    client->is_busy = true;
    load->n_busy++;
}

static void on_done(void *user, int status, const msgpack_object *result, const struct spillway_error *error) {
    struct client *client = user;
    struct load *load = client->load;
    struct load_result *sum = load->result;
    const msgpack_object *usage = spillway_get(result, "usage"), *draft = spillway_get(usage, "draft");

    client->is_busy = false;
    load->n_busy--;
    if (status != 0) {
        load->error = talk_complain(error, status);
        return;
    }
    sum->n_requests++;
    sum->n_tokens += spillway_get_uint(usage, "completion", 0);
    sum->n_prompt += spillway_get_uint(usage, "prompt", 0);
    sum->n_cached += spillway_get_uint(spillway_get(usage, "cached"), "device", 0);
    sum->n_steps += spillway_get_uint(draft, "steps", 0);
    sum->n_proposed += spillway_get_uint(draft, "proposed", 0);
    if (load->error == 0 && bench_now() < load->end)
        ask(client);
}

static int wait_for_answers(struct load *load) {
    struct pollfd fds[LOAD_CLIENTS_MAX];
    struct spillway_error error;
    int n = load->options->n_clients, r;

    for (int i = 0; i < n; i++)
        fds[i] = (struct pollfd){.fd = spillway_fd(load->clients[i].connection),
                                 .events = spillway_poll_events(load->clients[i].connection)};
    r = poll(fds, (nfds_t)n, TIMEOUT_MS);
    if (r < 0)
        return errno == EINTR ? 0 : -errno;
    if (r == 0) {
        fprintf(stderr, "spillway-bench: system: no word from the daemon for %d s\n", TIMEOUT_MS / 1000);
        return -ETIMEDOUT;
    }
    for (int i = 0; i < n; i++) {
        if (fds[i].revents == 0)
            continue;
        r = spillway_dispatch(load->clients[i].connection, &error);
        if (r != 0)
            return talk_complain(&error, r);
    }
    return load->error;
}

/* CPU seconds of the daemon's loop thread so far. */
static int read_loop_cpu(const char *socket, double *ret_seconds) {
    struct spillway *client = NULL;
    int r = talk_connect(socket, &client);

    if (r == 0)
        r = talk_metric(client, "loop_cpu_seconds_total", ret_seconds);
    spillway_close(client);
    return r;
}

int load_run(const struct load_options *options, struct load_result *ret_result) {
    struct load *load = calloc(1, sizeof *load);
    double cpu_before = 0, cpu_after = 0;
    int r = load ? read_loop_cpu(options->socket, &cpu_before) : -ENOMEM;

    *ret_result = (struct load_result){.next_question = options->first_question};
    if (!load)
        return r;
    load->options = options;
    load->result = ret_result;
    for (int i = 0; r == 0 && i < options->n_clients; i++) {
        load->clients[i].load = load;
        r = talk_connect(options->socket, &load->clients[i].connection);
    }
    load->begin = bench_now() + options->warm_s;
    load->end = load->begin + options->seconds;
    for (int i = 0; r == 0 && i < options->n_clients; i++) {
        ask(&load->clients[i]);
        r = load->error;
    }
    while (r == 0 && load->n_busy > 0)
        r = wait_for_answers(load);
    for (int i = 0; i < options->n_clients; i++)
        spillway_close(load->clients[i].connection);
    if (r == 0)
        r = read_loop_cpu(options->socket, &cpu_after);
    ret_result->tokens_per_s = (double)load->n_window_tokens / options->seconds;
    ret_result->loop_cpu_s = cpu_after - cpu_before;
    free(load);
    return r;
}
