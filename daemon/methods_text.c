/* methods_text: texts to tokens and back, and how much of a prompt is cached. run() is a function over the request and
 * what never changes while the daemon serves; only what looks at the index is done on the loop. */
#include <stdlib.h>
#include <string.h>

#include "conn.h"
#include "later.h"
#include "methods_internal.h"
#include "prefetch.h"

enum { INLINE_BYTES = 16 * 1024 /* of a request: what is done on the loop, in well under a millisecond */ };

struct text_call {
    struct later later;
    struct request *request;
    struct wire_out out;
    int refusal; /* see struct call */

    /* of a prompt that is looked up */
    struct kv_key root;
    struct kv_key *keys; /* [n_pages] */
    const int32_t *ids;
    uint32_t n_pages;
    struct prompt prompt; /* of chat.render */
};

static struct call call_of(struct text_call *text) {
    return (struct call){text->later.service, text->later.conn, text->request, &text->out, &text->refusal, NULL};
}

/* ---- in a worker, or not -------------------------------------------------------------------------------------------- */

static void tokenize(const struct call *call) {
    struct tokenizer_ids ids = {0};
    struct span text = {0};
    bool markup = false;
    int r;

    request_get_str(call->request, "text", &text);
    request_get_bool(call->request, "markup", &markup);
    r = tokenizer_encode(call->service->pair.tokenizer, text.bytes, text.n, markup ? TOKENIZER_MARKUP : 0, &ids);
    if (r != 0) {
        refuse(call, PROTO_INTERNAL, "out of memory");
    } else {
        begin(call, 1);
        wire_key(call->out, "ids");
        wire_ids(call->out, ids.ids, (uint32_t)ids.n);
    }
    tokenizer_ids_deinit(&ids);
}

/* False: an id is not the model's, and that was said. */
static bool check_ids(const struct call *call, const int32_t *ids, uint32_t n) {
    int n_valid = call->service->pair.info->n_valid;
    struct report report;

    for (uint32_t i = 0; i < n; i++)
        if (ids[i] < 0 || ids[i] >= n_valid) {
            report_line(&report, "id %u of the list is %d; this model's ids are 0..%d", i, ids[i], n_valid - 1);
            refuse(call, PROTO_BAD_PARAM, report.line);
            return false;
        }
    return true;
}

static void detokenize(const struct call *call) {
    struct tokenizer_text text = {0};
    const int32_t *ids = NULL;
    uint32_t n = 0;

    request_get_ids(call->request, "ids", &ids, &n);
    if (!check_ids(call, ids, n))
        return;
    if (tokenizer_decode(call->service->pair.tokenizer, ids, n, 0, &text) != 0) {
        refuse(call, PROTO_INTERNAL, "out of memory");
    } else {
        begin(call, 1);
        wire_key(call->out, "text");
        wire_str(call->out, (struct span){text.bytes, text.n});
    }
    tokenizer_text_deinit(&text);
}

/* Without keys, for whatever reason, nothing is found. */
static void make_keys(struct text_call *text, const int32_t *ids, uint32_t n) {
    uint32_t n_pages = n > 0 ? (n - 1) / PAGE_TOKENS : 0;
    struct kv_hasher *hasher = NULL;

    text->keys = calloc((size_t)n_pages + 1, sizeof *text->keys);
    if (text->keys && kv_hasher_new(&hasher) == 0 && kv_key_chain(hasher, &text->root, ids, n_pages, text->keys) == 0) {
        text->ids = ids;
        text->n_pages = n_pages;
    }
    kv_hasher_free(hasher);
}

static void render(const struct call *call, struct text_call *text) {
    const struct pair *pair = &call->service->pair;
    struct prompt_input input = {
        .kind = PROMPT_MESSAGES, .n_tokens_max = INT32_MAX, .thinking = pair->default_thinking, .keep_text = true};
    bool add_generation_prompt = true;
    struct report report;
    int r;

    request_get_value(call->request, "messages", &input.messages);
    request_get_value(call->request, "tools", &input.tools);
    request_get_bool(call->request, "thinking", &input.thinking);
    request_get_bool(call->request, "add_generation_prompt", &add_generation_prompt);
    input.no_generation_prompt = !add_generation_prompt;
    r = prompt_build(&pair->rules, &input, &text->prompt, &report);
    if (r != 0) {
        refuse(call, r > 0 ? PROTO_BAD_PARAM : PROTO_INTERNAL, r > 0 ? report.line : strerror(-r));
        return;
    }
    make_keys(text, text->prompt.ids, text->prompt.n);
    begin(call, 3);
    wire_key(call->out, "text");
    wire_str(call->out, text_span(&text->prompt.rendered));
    wire_key(call->out, "ids");
    wire_ids(call->out, text->prompt.ids, text->prompt.n);
}

static void lookup(const struct call *call, struct text_call *text) {
    const int32_t *ids = NULL;
    uint32_t n = 0;

    request_get_ids(call->request, "prompt_ids", &ids, &n);
    if (check_ids(call, ids, n))
        make_keys(text, ids, n);
}

static void run(struct later *later) {
    struct text_call *text = container_of(later, struct text_call, later);
    struct call call = call_of(text);

    if (text->request->method == METHOD_TEXT_TOKENIZE)
        tokenize(&call);
    else if (text->request->method == METHOD_TEXT_DETOKENIZE)
        detokenize(&call);
    else if (text->request->method == METHOD_CHAT_RENDER)
        render(&call, text);
    else
        lookup(&call, text);
}

/* ---- on the loop ---------------------------------------------------------------------------------------------------- */

static struct found find_cached(const struct text_call *text) {
    if (text->n_pages == 0)
        return (struct found){0};
    return service_find(text->later.service, text->keys, text->ids, (int)text->n_pages);
}

/* As far as few enough are asked for; who asks is told what is where, not what comes. */
static void begin_prefetch(const struct text_call *text) {
    bool prefetch = false;

    request_get_bool(text->request, "prefetch", &prefetch);
    if (prefetch && text->n_pages > 0)
        prefetch_start(text->later.service, text->keys, text->ids, (int)text->n_pages, NULL, NULL, NULL);
}

static void free_text_call(struct text_call *text) {
    wire_out_deinit(&text->out);
    prompt_deinit(&text->prompt);
    free(text->keys);
    request_free(text->request);
    free(text);
}

static void finish(struct later *later) {
    struct text_call *text = container_of(later, struct text_call, later);
    struct call call = call_of(text);

    later_end(later);
    if (call.conn && text->refusal < 0 && text->request->method == METHOD_CHAT_RENDER)
        put_cached(call.out, find_cached(text));
    if (call.conn && text->refusal < 0 && text->request->method == METHOD_CACHE_LOOKUP) {
        proto_result_begin(call.out, call.request->id);
        service_write_tiers(call.out, find_cached(text));
        begin_prefetch(text);
    }
    if (call.conn)
        call_answer(&call);
    free_text_call(text);
}

void methods_text_start(struct service *service, struct conn *conn, struct request *request) {
    struct text_call *text = calloc(1, sizeof *text);

    if (!text || sessions_root(service->sessions, conn_uid(conn), &text->root) != 0) {
        call_fail(service, conn, request);
        request_free(request);
        free(text);
        return;
    }
    text->request = request;
    text->refusal = -1;
    wire_out_init(&text->out, SERVICE_MESSAGE_BYTES_MAX);
    text->later.run = run;
    text->later.finish = finish;
    later_begin(&text->later, service, conn);
    if (request_bytes(request) > INLINE_BYTES) {
        later_start(&text->later);
    } else {
        run(&text->later);
        finish(&text->later);
    }
}
