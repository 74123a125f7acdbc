#include "talk.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"

enum { CALL_TIMEOUT_MS = 10 * 60 * 1000 };

int talk_complain(const struct spillway_error *error, int r) {
    fprintf(stderr, "spillway-bench: %s: %s\n", error->code, error->message);
    return r > 0 ? -EPROTO : r;
}

int talk_connect(const char *socket, struct spillway **ret_client) {
    struct spillway_options options = {.path = socket, .call_timeout_ms = CALL_TIMEOUT_MS};
    struct spillway_error error;
    int r = spillway_connect(&options, ret_client, &error);

    if (r == 0)
        r = spillway_hello(*ret_client, NULL, &error);
    return r == 0 ? 0 : talk_complain(&error, r);
}

int talk_metric(struct spillway *client, const char *name, double *ret_value) {
    struct spillway_result result = {0};
    struct spillway_error error;
    struct spillway_text text;
    char line[160];
    int n = snprintf(line, sizeof line, "\nspillway_%s ", name);
    int r = spillway_call(client, "server.metrics", NULL, NULL, &result, &error);
    const char *at;

    if (r != 0)
        return talk_complain(&error, r);
    text = spillway_get_text(&result.object, "text");
    at = memmem(text.bytes, text.n_bytes, line, (size_t)n);
    if (at)
        *ret_value = atof(at + n);
    else
        fprintf(stderr, "spillway-bench: the daemon has no metric %s\n", name);
    spillway_result_free(&result);
    return at ? 0 : -EPROTO;
}

int talk_flush(struct spillway *client) {
    struct spillway_error error;
    int r = spillway_call(client, "cache.flush", NULL, NULL, NULL, &error);

    return r == 0 ? 0 : talk_complain(&error, r);
}

static void write_tier(void *user, msgpack_packer *packer) {
    msgpack_pack_map(packer, 2);
    spillway_put(packer, "tier");
    spillway_put(packer, user);
    spillway_put(packer, "all");
    msgpack_pack_true(packer);
}

int talk_evict(struct spillway *client, const char *tier) {
    struct spillway_error error;
    int r = spillway_call(client, "cache.evict", write_tier, (void *)tier, NULL, &error);

    return r == 0 ? 0 : talk_complain(&error, r);
}

/* ---- generations ---------------------------------------------------------------------------------------------------- */

struct question {
    const int32_t *ids;
    int n_ids, n_tokens;
    double asked, first;
};

static void write_question(void *user, msgpack_packer *packer) {
    const struct question *question = user;

    msgpack_pack_map(packer, 4);
    spillway_put(packer, "prompt_ids");
    msgpack_pack_array(packer, (size_t)question->n_ids);
    for (int i = 0; i < question->n_ids; i++)
        msgpack_pack_int32(packer, question->ids[i]);
    spillway_put(packer, "max_tokens");
    msgpack_pack_int(packer, question->n_tokens);
    spillway_put(packer, "temperature");
    msgpack_pack_int(packer, 0);
    spillway_put(packer, "ignore_eos");
    msgpack_pack_true(packer);
}

static bool on_event(void *user, const struct spillway_event *event) {
    struct question *question = user;

    if (event->type == SPILLWAY_EVENT_DELTA && question->first == 0)
        question->first = bench_now();
    return true;
}

int talk_generate(struct spillway *client, const int32_t *ids, int n_ids, int n_tokens,
                  struct talk_answer *ret_answer) {
    struct question question = {.ids = ids, .n_ids = n_ids, .n_tokens = n_tokens, .asked = bench_now()};
    struct spillway_result result = {0};
    struct spillway_error error;
    const msgpack_object *usage, *cached;
    int r = spillway_generate(client, write_question, &question, on_event, &question, &result, &error);
    double done = bench_now();

    if (r != 0)
        return talk_complain(&error, r);
    usage = spillway_get(&result.object, "usage");
    cached = spillway_get(usage, "cached");
    *ret_answer = (struct talk_answer){.first_s = (question.first > 0 ? question.first : done) - question.asked,
                                       .done_s = done - question.asked,
                                       .n_prompt = spillway_get_uint(usage, "prompt", 0),
                                       .n_device = spillway_get_uint(cached, "device", 0),
                                       .n_host = spillway_get_uint(cached, "host", 0),
                                       .n_disk = spillway_get_uint(cached, "disk", 0)};
    spillway_result_free(&result);
    return 0;
}
