#include "proto_internal.h"

#include <errno.h>
#include <math.h>

#include "base.h"

/* ---- rules between params ---- */

static bool is_set(const struct request *request, const char *name) {
    return proto_value(request, name)->is_set;
}

static int refuse_beside(const char *name, const char *wanted, struct report *report) {
    return report_error(report, PROTO_E_REFUSED, "\"%s\" goes with \"%s\" only, and there is no \"%s\"", name, wanted,
                        wanted);
}

static int check_gen_start(const struct request *request, struct report *report) {
    static const char *const prompts[] = {"prompt", "prompt_ids", "messages"};
    const char *given[ARRAY_LEN(prompts)];
    int n_given = 0;

    for (size_t i = 0; i < ARRAY_LEN(prompts); i++)
        if (is_set(request, prompts[i]))
            given[n_given++] = prompts[i];
    if (n_given == 0)
        return report_error(
            report, PROTO_E_REFUSED,
            "there is no prompt; exactly one of \"prompt\", \"prompt_ids\", \"messages\" must be given");
    if (n_given > 1)
        return report_error(report, PROTO_E_REFUSED,
                            "\"%s\" and \"%s\" are both given; exactly one of \"prompt\", \"prompt_ids\", \"messages\" "
                            "must be",
                            given[0], given[1]);
    if (is_set(request, "markup") && !is_set(request, "prompt"))
        return refuse_beside("markup", "prompt", report);
    if (is_set(request, "tools") && !is_set(request, "messages"))
        return refuse_beside("tools", "messages", report);
    if (is_set(request, "thinking") && !is_set(request, "messages"))
        return refuse_beside("thinking", "messages", report);
    return 0;
}

static int check_gen_cancel(const struct request *request, struct report *report) {
    if (is_set(request, "id") == is_set(request, "gen"))
        return report_error(report, PROTO_E_REFUSED, "exactly one of \"id\" and \"gen\" must be given");
    return 0;
}

static int check_cache_evict(const struct request *request, struct report *report) {
    bool is_all = false;

    request_get_bool(request, "all", &is_all);
    if (is_set(request, "bytes") == is_all)
        return report_error(report, PROTO_E_REFUSED, "exactly one of \"bytes\" and \"all\": true must be given");
    return 0;
}

int proto_check_rules(const struct request *request, struct report *report) {
    switch (request->method) {
    case METHOD_GEN_CANCEL:
        return check_gen_cancel(request, report);
    case METHOD_GEN_START:
        return check_gen_start(request, report);
    case METHOD_CACHE_EVICT:
        return check_cache_evict(request, report);
    default:
        return 0;
    }
}

/* ---- gen.start ---- */

static double number_of(const struct request *request, const char *name) {
    double number = NAN;

    request_get_float(request, name, &number);
    return number;
}

static int64_t integer_of(const struct request *request, const char *name, int64_t otherwise) {
    request_get_int(request, name, &otherwise);
    return otherwise;
}

static bool bool_of(const struct request *request, const char *name, bool otherwise) {
    request_get_bool(request, name, &otherwise);
    return otherwise;
}

static void fill_prompt(const struct request *request, struct gen_params *gen) {
    if (request_get_str(request, "prompt", &gen->prompt))
        gen->prompt_kind = GEN_PROMPT_TEXT;
    else if (request_get_ids(request, "prompt_ids", &gen->prompt_ids, &gen->n_prompt_ids))
        gen->prompt_kind = GEN_PROMPT_IDS;
    else if (request_get_value(request, "messages", &gen->messages))
        gen->prompt_kind = GEN_PROMPT_MESSAGES;
    gen->markup = bool_of(request, "markup", false);
    request_get_value(request, "tools", &gen->tools);
    gen->thinking = is_set(request, "thinking") ? bool_of(request, "thinking", false) : -1;
}

static void fill_sampling(const struct request *request, struct gen_params *gen) {
    const struct param_value *seed = proto_value(request, "seed"), *bias = proto_value(request, "logit_bias");

    gen->temperature = number_of(request, "temperature");
    gen->top_p = number_of(request, "top_p");
    gen->min_p = number_of(request, "min_p");
    gen->repetition_penalty = number_of(request, "repetition_penalty");
    gen->presence_penalty = number_of(request, "presence_penalty");
    gen->frequency_penalty = number_of(request, "frequency_penalty");
    gen->top_k = integer_of(request, "top_k", -1);
    gen->has_seed = seed->is_set;
    if (seed->is_set)
        gen->seed = seed->unsigned_integer;
    if (bias->is_set) {
        gen->bias = bias->bias;
        gen->n_bias = bias->n;
    }
}

static void fill_end(const struct request *request, struct gen_params *gen) {
    const struct param_value *stop = proto_value(request, "stop");

    gen->max_tokens = integer_of(request, "max_tokens", -1);
    if (stop->is_set) {
        gen->stop = stop->strings;
        gen->n_stop = stop->n;
    }
    request_get_ids(request, "stop_ids", &gen->stop_ids, &gen->n_stop_ids);
    gen->ignore_eos = bool_of(request, "ignore_eos", false);
    gen->deadline_ms = integer_of(request, "deadline_ms", -1);
}

int proto_gen_fill(struct request *request) {
    struct gen_params *gen = value_alloc(&request->arena, sizeof *gen);
    struct span cache = {0};

    if (!gen)
        return -ENOMEM;
    *gen = (struct gen_params){0};
    fill_prompt(request, gen);
    fill_sampling(request, gen);
    fill_end(request, gen);
    gen->logprobs = (int)integer_of(request, "logprobs", -1);
    gen->stream = bool_of(request, "stream", true);
    gen->return_ids = bool_of(request, "return_ids", false);
    gen->speculate = bool_of(request, "speculate", true);
    gen->priority = (int)integer_of(request, "priority", 0);
    request_get_str(request, "session", &gen->session);
    request_get_str(request, "cache", &cache);
    gen->cache = span_is(cache, "no_store") ? GEN_CACHE_NO_STORE
                 : span_is(cache, "bypass") ? GEN_CACHE_BYPASS
                                            : GEN_CACHE_USE;
    request->gen = gen;
    return 0;
}
