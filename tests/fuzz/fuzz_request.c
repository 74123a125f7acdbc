/* Messages of a client: each becomes a request that keeps to the table and to its memory, or a refusal that says why.
 * Input is one message without its head: the index of the method, then params. An index beyond the table: all of it. */
#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "frame.h"
#include "proto.h"
#include "wire.h"

enum { BYTES_MAX = 1 << 16 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void check_gen(const struct gen_params *gen) {
    assert((gen->prompt_kind == GEN_PROMPT_IDS) == (gen->n_prompt_ids > 0));
    assert((gen->prompt_kind == GEN_PROMPT_MESSAGES) == (gen->messages != NULL));
    assert(gen->messages || !gen->tools);
    assert(isnan(gen->temperature) || (gen->temperature >= 0 && gen->temperature <= 2));
    assert(isnan(gen->top_p) || (gen->top_p > 0 && gen->top_p <= 1));
    assert(gen->max_tokens == -1 || gen->max_tokens >= 1);
    assert(gen->logprobs >= -1 && gen->logprobs <= PROTO_LOGPROBS_MAX);
    assert(gen->n_stop <= PROTO_STOP_MAX && gen->n_stop_ids <= PROTO_STOP_IDS_MAX && gen->n_bias <= PROTO_BIAS_MAX);
    for (uint32_t i = 0; i < gen->n_stop; i++)
        assert(gen->stop[i].n >= 1 && gen->stop[i].n <= PROTO_STOP_BYTES_MAX);
    for (uint32_t i = 0; i < gen->n_stop_ids; i++)
        assert(gen->stop_ids[i] >= 0);
    for (uint32_t i = 0; i < gen->n_prompt_ids; i++)
        assert(gen->prompt_ids[i] >= 0);
    for (uint32_t i = 0; i < gen->n_bias; i++)
        assert(gen->bias[i].id >= 0 && fabsf(gen->bias[i].bias) <= 100);
}

/* A tree of a request goes out as it came in. */
static void check_tree(const struct value *tree) {
    struct wire_out out;

    wire_out_init(&out, 4 * BYTES_MAX);
    wire_value(&out, tree);
    assert(out.bytes.error == 0);
    wire_out_deinit(&out);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    struct frame_scan scan;
    struct proto_refusal refusal;
    struct request *request = NULL;
    struct report report;
    struct wire_out out;
    char *copy;
    size_t n_message;
    int e;

    if (n < 1 || n > BYTES_MAX)
        return 0;
    wire_out_init(&out, 2 * BYTES_MAX);
    if (data[0] < METHOD_N) {
        wire_array(&out, 4);
        wire_int(&out, 0);
        wire_int(&out, 7);
        wire_cstr(&out, proto_methods[data[0]].name);
    }
    text_add(&out.bytes, (const char *)data + 1, n - 1);
    frame_scan_init(&scan, BYTES_MAX);
    e = frame_scan(&scan, out.bytes.bytes, out.bytes.n, &n_message, &report);
    if (e == 0) {
        copy = malloc(n_message);
        if (!copy)
            abort();
        memcpy(copy, out.bytes.bytes, n_message);
        e = proto_decode(copy, n_message, &request, &refusal);
        free(copy); /* nothing of the request lies in there */
        assert(e == 0 || (e == PROTO_E_REFUSED && refusal.report.line[0] && refusal.code < PROTO_N_CODES));
        if (e == 0) {
            assert(request->method < METHOD_N);
            assert((request->method == METHOD_GEN_START) == (request->gen != NULL));
            assert(request_bytes(request) <= (16 << 10) + 128 * n_message);
            if (request->gen)
                check_gen(request->gen);
            if (request->gen && request->gen->messages)
                check_tree(request->gen->messages);
        }
        request_free(request);
    }
    wire_out_deinit(&out);
    return 0;
}
