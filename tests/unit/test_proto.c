/* The decoder: every example of the docs passes, every refusal names the param, what came and what is allowed. */
#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base.h"
#include "frame.h"
#include "json_wire.h"
#include "proto.h"

enum { BYTES_MAX = 16 << 20 };

/* As a connection does it: scanned, then decoded from memory that is gone afterwards. */
static int decode(const struct wire_out *out, struct request **ret_request, struct proto_refusal *ret_refusal) {
    struct frame_scan scan;
    char *copy = malloc(out->bytes.n);
    size_t n;
    int e;

    assert_non_null(copy);
    memcpy(copy, out->bytes.bytes, out->bytes.n);
    frame_scan_init(&scan, BYTES_MAX);
    e = frame_scan(&scan, copy, out->bytes.n, &n, &ret_refusal->report);
    assert_int_equal(e, 0);
    assert_int_equal(n, out->bytes.n);
    e = proto_decode(copy, n, ret_request, ret_refusal);
    free(copy);
    return e;
}

static int decode_json(const char *method, const char *params, struct request **ret_request,
                       struct proto_refusal *ret_refusal) {
    struct wire_out out;
    int e;

    wire_out_init(&out, BYTES_MAX);
    wire_array(&out, 4);
    wire_uint(&out, 0);
    wire_uint(&out, 7);
    wire_cstr(&out, method);
    json_wire(&out, params);
    e = decode(&out, ret_request, ret_refusal);
    wire_out_deinit(&out);
    return e;
}

static struct request *accepts(const char *method, const char *params) {
    struct proto_refusal refusal;
    struct request *request;

    if (decode_json(method, params, &request, &refusal) != 0)
        fail_msg("%s %s: %s", method, params, refusal.report.line);
    assert_int_equal(request->id, 7);
    assert_string_equal(proto_methods[request->method].name, method);
    return request;
}

static void refuses(const char *method, const char *params, enum proto_code code, const char *why) {
    struct proto_refusal refusal;
    struct request *request;

    if (decode_json(method, params, &request, &refusal) != PROTO_E_REFUSED)
        fail_msg("%s %s passed", method, params);
    if (code != refusal.code || !strstr(refusal.report.line, why))
        fail_msg("%s %s: said %s \"%s\", not \"%s\"", method, params, proto_code_name(refusal.code),
                 refusal.report.line, why);
    assert_int_equal(refusal.id, 7);
}

static void refuses_gen(const char *params, const char *why) {
    refuses("gen.start", params, PROTO_BAD_PARAM, why);
}

static void tables_are_complete(void **state) {
    (void)state;
    for (int i = 0; i < METHOD_N; i++) {
        const struct proto_method *method = &proto_methods[i];

        assert_non_null(method->name);
        assert_non_null(method->doc);
        assert_true(method->n_fields > 0 || strcmp(method->example_result, "{}") == 0);
        for (int k = 0; k < i; k++)
            assert_string_not_equal(proto_methods[k].name, method->name);
        for (uint32_t k = 0; k < method->n_params; k++) {
            assert_non_null(method->params[k].name);
            assert_non_null(method->params[k].doc);
            assert_true(method->params[k].type != PARAM_STRINGS || method->params[k].bytes_max > 0);
            assert_true((method->params[k].type == PARAM_CHOICE) == (method->params[k].choices != NULL));
        }
        for (uint32_t k = 0; k < method->n_fields; k++)
            assert_non_null(method->fields[k].doc);
    }
    for (int i = 0; i < PROTO_N_CODES; i++)
        assert_non_null(proto_codes[i].doc);
    for (int i = 0; i < PROTO_N_FINISHES; i++)
        assert_non_null(proto_finishes[i].doc);
}

/* The fields an example has are fields of the table. */
static void has_only(const char *json, const struct proto_field *fields, uint32_t n, const char *const *more) {
    struct value_arena arena;
    struct report report;
    struct value value;

    value_arena_init(&arena, 1 << 16);
    if (value_from_json(&arena, "example", span_of(json), FRAME_DEPTH_MAX, &value, &report) != 0)
        fail_msg("%s: %s", json, report.line);
    assert_int_equal(value.kind, VALUE_MAP);
    for (uint32_t i = 0; i < value.map.n; i++) {
        bool is_known = false;

        for (uint32_t k = 0; k < n; k++)
            is_known |= span_is(value.map.pairs[i].key, fields[k].name);
        for (; more && *more && !is_known; more++)
            is_known |= span_is(value.map.pairs[i].key, *more);
        if (!is_known)
            fail_msg("%s: no field %.*s", json, (int)value.map.pairs[i].key.n, value.map.pairs[i].key.bytes);
    }
    value_arena_deinit(&arena);
}

static void every_example_of_the_docs_is_what_the_decoder_takes(void **state) {
    static const char *const event_fields[] = {"id", "seq", "type", NULL};

    (void)state;
    for (int i = 0; i < METHOD_N; i++) {
        const struct proto_method *method = &proto_methods[i];

        request_free(accepts(method->name, method->example_params));
        has_only(method->example_result, method->fields, method->n_fields, NULL);
    }
    for (uint32_t i = 0; i < proto_n_events; i++)
        has_only(proto_events[i].example, proto_events[i].fields, proto_events[i].n_fields, event_fields);
    for (int i = 0; i < PROTO_N_FINISHES; i++) {
        char reason[64];

        has_only(proto_finishes[i].example, proto_methods[METHOD_GEN_START].fields,
                 proto_methods[METHOD_GEN_START].n_fields, NULL);
        snprintf(reason, sizeof reason, "\"finish_reason\": \"%s\"", proto_finish_name((enum proto_finish)i));
        assert_non_null(strstr(proto_finishes[i].example, reason));
    }
    for (int i = 0; i < PROTO_N_CODES; i++) {
        static const struct proto_field error_fields[] = {{"code", "", ""}, {"message", "", ""}, {"data", "", ""}};
        char code[64];

        has_only(proto_codes[i].example, error_fields, ARRAY_LEN(error_fields), NULL);
        snprintf(code, sizeof code, "\"code\": \"%s\"", proto_code_name((enum proto_code)i));
        assert_non_null(strstr(proto_codes[i].example, code));
    }
}

static void params_not_given_have_their_defaults(void **state) {
    struct request *request = accepts("gen.start", "{\"prompt\": \"x\", \"temperature\": null, \"tools\": null}");
    const struct gen_params *gen = request->gen;

    (void)state;
    assert_int_equal(gen->prompt_kind, GEN_PROMPT_TEXT);
    assert_true(span_is(gen->prompt, "x"));
    assert_false(gen->markup);
    assert_null(gen->messages);
    assert_null(gen->tools);
    assert_int_equal(gen->thinking, -1);
    assert_int_equal(gen->max_tokens, -1);
    assert_true(isnan(gen->temperature) && isnan(gen->top_p) && isnan(gen->min_p) && isnan(gen->repetition_penalty) &&
                isnan(gen->presence_penalty) && isnan(gen->frequency_penalty));
    assert_int_equal(gen->top_k, -1);
    assert_false(gen->has_seed);
    assert_int_equal(gen->n_bias + gen->n_stop + gen->n_stop_ids, 0);
    assert_false(gen->ignore_eos);
    assert_int_equal(gen->logprobs, -1);
    assert_true(gen->stream);
    assert_false(gen->return_ids);
    assert_true(gen->speculate);
    assert_int_equal(gen->session.n, 0);
    assert_int_equal(gen->priority, 0);
    assert_int_equal(gen->deadline_ms, -1);
    assert_int_equal(gen->cache, GEN_CACHE_USE);
    request_free(request);
}

static void params_given_arrive_as_given(void **state) {
    struct request *request =
        accepts("gen.start",
                "{\"messages\": [{\"role\": \"user\", \"content\": \"h\\u00e4\"}], \"tools\": [{\"n\": 1}], "
                "\"thinking\": true, \"max_tokens\": 5, \"temperature\": 0, \"top_p\": 1, \"top_k\": 40, \"min_p\": "
                "0.5, \"repetition_penalty\": 1.25, \"presence_penalty\": -2, \"frequency_penalty\": 2, "
                "\"logit_bias\": {\"0\": -100, \"2147483647\": 1.5}, \"seed\": 18446744073709551615, \"stop\": "
                "[\"a\", \"\\u0000b\"], \"stop_ids\": [3, 2147483647], \"ignore_eos\": true, \"logprobs\": 0, "
                "\"stream\": false, \"return_ids\": true, \"session\": \"n\\u00f6tes\", \"priority\": -100, "
                "\"deadline_ms\": 86400000, \"speculate\": false, \"cache\": \"bypass\"}");
    const struct gen_params *gen = request->gen;

    (void)state;
    assert_int_equal(gen->prompt_kind, GEN_PROMPT_MESSAGES);
    assert_int_equal(gen->messages->array.n, 1);
    assert_true(span_is(value_get(&gen->messages->array.items[0], "content")->text, "h\xc3\xa4"));
    assert_true(span_is(value_get(&gen->tools->array.items[0], "n")->text, "1"));
    assert_int_equal(gen->thinking, 1);
    assert_int_equal(gen->max_tokens, 5);
    assert_true(gen->temperature == 0 && gen->top_p == 1 && gen->min_p == 0.5 && gen->repetition_penalty == 1.25);
    assert_true(gen->presence_penalty == -2 && gen->frequency_penalty == 2);
    assert_int_equal(gen->top_k, 40);
    assert_int_equal(gen->n_bias, 2);
    assert_true(gen->bias[0].id == 0 && gen->bias[0].bias == -100);
    assert_true(gen->bias[1].id == INT32_MAX && gen->bias[1].bias == 1.5F);
    assert_true(gen->has_seed && gen->seed == UINT64_MAX);
    assert_int_equal(gen->n_stop, 2);
    assert_true(gen->stop[1].n == 2 && gen->stop[1].bytes[0] == 0);
    assert_int_equal(gen->n_stop_ids, 2);
    assert_int_equal(gen->stop_ids[1], INT32_MAX);
    assert_true(gen->ignore_eos && !gen->stream && gen->return_ids && !gen->speculate);
    assert_int_equal(gen->logprobs, 0);
    assert_true(span_is(gen->session, "n\xc3\xb6tes"));
    assert_int_equal(gen->priority, -100);
    assert_int_equal(gen->deadline_ms, 86400000);
    assert_int_equal(gen->cache, GEN_CACHE_BYPASS);
    request_free(request);
}

static void refusals_name_the_param_what_came_and_what_is_allowed(void **state) {
    (void)state;
    refuses_gen("{\"prompt\": \"x\", \"temprature\": 1}", "no param \"temprature\"; did you mean \"temperature\"?");
    refuses_gen("{\"prompt\": \"x\", \"zzz\": 1}", "no param \"zzz\"");
    refuses_gen("{\"prompt\": 5}", "gen.start: \"prompt\" is an integer; it must be a string");
    refuses_gen("{\"prompt\": \"x\", \"temperature\": 2.5}", "\"temperature\" is 2.5; it must be from 0 to 2");
    refuses_gen("{\"prompt\": \"x\", \"temperature\": \"1\"}", "is a string; it must be a number from 0 to 2");
    refuses_gen("{\"prompt\": \"x\", \"top_p\": 0}", "\"top_p\" is 0; it must be above 0 up to 1");
    refuses_gen("{\"prompt\": \"x\", \"min_p\": -0.1}", "it must be from 0 to 1");
    refuses_gen("{\"prompt\": \"x\", \"max_tokens\": 0}", "\"max_tokens\" is 0; it must be from 1 to 2147483647");
    refuses_gen("{\"prompt\": \"x\", \"max_tokens\": 1.5}", "is a float; it must be an integer from 1");
    refuses_gen("{\"prompt\": \"x\", \"max_tokens\": -9223372036854775808}", "is -9223372036854775808");
    refuses_gen("{\"prompt\": \"x\", \"max_tokens\": 18446744073709551615}", "is 18446744073709551615");
    refuses_gen("{\"prompt\": \"x\", \"logprobs\": 21}", "it must be from 0 to 20");
    refuses_gen("{\"prompt\": \"x\", \"seed\": -1}", "\"seed\" is a negative integer; it must be an integer from 0");
    refuses_gen("{\"prompt\": \"x\", \"stream\": 1}", "it must be true or false");
    refuses_gen("{\"prompt\": \"x\", \"cache\": \"no\"}",
                "\"cache\" is \"no\"; it must be one of \"use\", \"no_store\", \"bypass\"");
    refuses_gen("{\"prompt\": \"x\", \"cache\": 1}",
                "is an integer; it must be one of \"use\", \"no_store\", \"bypass\"");
    refuses_gen("{\"prompt\": \"x\", \"stop\": \"a\"}", "is a string; it must be an array of strings");
    refuses_gen("{\"prompt\": \"x\", \"stop\": [\"a\", \"\"]}", "\"stop\"[1] has 0 bytes; each has 1 to 256");
    refuses_gen("{\"prompt\": \"x\", \"stop\": [1]}", "\"stop\"[0] is an integer");
    refuses_gen("{\"prompt\": \"x\", \"stop\": [\"1\",\"2\",\"3\",\"4\",\"5\",\"6\",\"7\",\"8\",\"9\",\"a\",\"b\","
                "\"c\",\"d\",\"e\",\"f\",\"g\",\"h\"]}",
                "\"stop\" has 17 strings; it may have at most 16");
    refuses_gen("{\"prompt\": \"x\", \"stop_ids\": [1, -1]}", "\"stop_ids\"[1] is out of range");
    refuses_gen("{\"prompt_ids\": [2147483648]}",
                "\"prompt_ids\"[0] is out of range; token ids are from 0 to 2147483647");
    refuses_gen("{\"prompt_ids\": [1.0]}", "\"prompt_ids\"[0] is no integer");
    refuses_gen("{\"prompt_ids\": []}", "\"prompt_ids\" has 0 ids; it must have at least 1");
    refuses_gen("{\"prompt\": \"x\", \"logit_bias\": {\"01\": 1}}", "has the key \"01\"; keys are token ids");
    refuses_gen("{\"prompt\": \"x\", \"logit_bias\": {\"2147483648\": 1}}", "has the key \"2147483648\"");
    refuses_gen("{\"prompt\": \"x\", \"logit_bias\": {\"5\": 101}}", "\"logit_bias.5\" is 101; it must be from -100");
    refuses_gen("{\"prompt\": \"x\", \"session\": \"\"}", "\"session\" has 0 bytes; a name has 1 to 128");
    refuses_gen("{\"prompt\": \"x\", \"session\": \"a\\nb\"}", "the control character U+000A as byte 1");
    refuses_gen("{\"prompt\": \"x\", \"session\": \"a\\u0085b\"}", "the control character U+0085");
    refuses_gen("{\"messages\": [1]}", "\"messages\"[0] is an integer; it must be a map");
    refuses_gen("{\"messages\": {}}", "is a map; it must be an array of maps");
    refuses("session.open", "{}", PROTO_BAD_PARAM, "session.open: \"name\" is missing: of the session");
    refuses("hello", "{\"version\": 2}", PROTO_BAD_PARAM, "\"version\" is 2; it must be from 1 to 1");
    refuses("gen.list", "{\"x\": 1}", PROTO_BAD_PARAM, "no param \"x\"; the method has none");
    refuses("gen.strat", "{}", PROTO_UNKNOWN_METHOD, "no method \"gen.strat\"; did you mean \"gen.start\"?");
    refuses("", "{}", PROTO_UNKNOWN_METHOD, "no method \"\"");
}

static void params_that_exclude_or_need_each_other_say_so(void **state) {
    (void)state;
    refuses_gen("{}", "there is no prompt; exactly one of");
    refuses_gen("{\"prompt\": null}", "there is no prompt");
    refuses_gen("{\"prompt\": \"x\", \"prompt_ids\": [1]}", "\"prompt\" and \"prompt_ids\" are both given");
    refuses_gen("{\"messages\": [{}], \"prompt_ids\": [1]}", "\"prompt_ids\" and \"messages\" are both given");
    refuses_gen("{\"prompt_ids\": [1], \"markup\": true}", "\"markup\" goes with \"prompt\" only");
    refuses_gen("{\"prompt\": \"x\", \"tools\": []}", "\"tools\" goes with \"messages\" only");
    refuses_gen("{\"prompt\": \"x\", \"thinking\": false}", "\"thinking\" goes with \"messages\" only");
    refuses("cache.evict", "{\"tier\": \"host\"}", PROTO_BAD_PARAM, "exactly one of \"bytes\" and \"all\"");
    refuses("cache.evict", "{\"tier\": \"host\", \"all\": true, \"bytes\": 1}", PROTO_BAD_PARAM, "exactly one of");
    request_free(accepts("cache.evict", "{\"tier\": \"host\", \"all\": false, \"bytes\": 9007199254740992}"));
}

static void messages_that_are_no_requests_are_bad_frames(void **state) {
    static const struct {
        const char *json, *why;
        uint32_t id;
    } cases[] = {
        {"[1, 5, null, {}]", "a client sent a response", 0},
        {"[2, \"gen.event\", {}]", "a client sent a notification", 0},
        {"[0, \"m\", {}]", "the request has 3 elements", 0},
        {"[3, 5, \"m\", {}]", "none of 0, 1, 2", 0},
        {"[-1, 5, \"m\", {}]", "none of 0, 1, 2", 0},
        {"[\"0\", 5, \"m\", {}]", "none of 0, 1, 2", 0},
        {"[0, -5, \"m\", {}]", "id is no integer from 0 to 4294967295", 0},
        {"[0, 4294967296, \"m\", {}]", "id is no integer", 0},
        {"[0, 5, 6, {}]", "the method of request 5 is no string", 5},
        {"[0, 4294967295, \"hello\", []]", "the params of request 4294967295 are no map", UINT32_MAX},
        {"[0, 5, \"hello\", null]", "are no map", 5},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct proto_refusal refusal;
        struct request *request;
        struct wire_out out;

        wire_out_init(&out, BYTES_MAX);
        json_wire(&out, cases[i].json);
        assert_int_equal(decode(&out, &request, &refusal), PROTO_E_REFUSED);
        assert_int_equal(refusal.code, PROTO_BAD_FRAME);
        assert_int_equal(refusal.id, cases[i].id);
        if (!strstr(refusal.report.line, cases[i].why))
            fail_msg("%s: said \"%s\", not \"%s\"", cases[i].json, refusal.report.line, cases[i].why);
        wire_out_deinit(&out);
    }
}

static void binary_data_is_no_text(void **state) {
    static const char prompt[] = "\x94\x00\x07\xa9gen.start\x81\xa6prompt\xc4\x01x";
    static const char messages[] = "\x94\x00\x07\xa9gen.start\x81\xa8messages\x91\x81\xa7"
                                   "content\xc4\x01x";
    struct proto_refusal refusal;
    struct request *request;

    (void)state;
    assert_int_equal(proto_decode(prompt, sizeof prompt - 1, &request, &refusal), PROTO_E_REFUSED);
    assert_string_equal(refusal.report.line, "gen.start: \"prompt\" is binary data; it must be a string");
    assert_int_equal(proto_decode(messages, sizeof messages - 1, &request, &refusal), PROTO_E_REFUSED);
    assert_non_null(strstr(refusal.report.line, "\"messages\" holds binary data"));
    assert_int_equal(refusal.code, PROTO_BAD_PARAM);
}

static void numbers_that_are_none_are_out_of_range(void **state) {
    static const double numbers[] = {NAN, INFINITY, -INFINITY};

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(numbers); i++) {
        struct proto_refusal refusal;
        struct request *request;
        struct wire_out out;

        wire_out_init(&out, BYTES_MAX);
        json_wire(&out, "[0, 7, \"gen.start\"]");
        out.bytes.bytes[0] = '\x94';
        wire_map(&out, 2);
        wire_key(&out, "prompt");
        wire_cstr(&out, "x");
        wire_key(&out, "temperature");
        wire_float(&out, numbers[i]);
        assert_int_equal(decode(&out, &request, &refusal), PROTO_E_REFUSED);
        assert_non_null(strstr(refusal.report.line, "it must be from 0 to 2"));
        wire_out_deinit(&out);
    }
}

static void many_ids_arrive_in_one_piece(void **state) {
    enum { N = 200000 };
    struct proto_refusal refusal;
    struct request *request;
    struct wire_out out;

    (void)state;
    wire_out_init(&out, BYTES_MAX);
    json_wire(&out, "[0, 7, \"cache.lookup\"]");
    out.bytes.bytes[0] = '\x94';
    wire_map(&out, 1);
    wire_key(&out, "prompt_ids");
    wire_array(&out, N);
    for (int i = 0; i < N; i++)
        wire_int(&out, i * 7);
    assert_int_equal(decode(&out, &request, &refusal), 0);
    const int32_t *ids;
    uint32_t n;
    assert_true(request_get_ids(request, "prompt_ids", &ids, &n));
    assert_int_equal(n, N);
    for (int i = 0; i < N; i++)
        assert_true(ids[i] == i * 7);
    assert_true(request_bytes(request) < N * sizeof(int32_t) + (16 << 10));
    request_free(request);
    wire_out_deinit(&out);
}

static void handlers_read_what_was_given(void **state) {
    struct request *request = accepts("session.fork", "{\"name\": \"a\", \"new_name\": \"b\"}");
    struct span span;
    int64_t at = 99;
    bool is_all = false;

    (void)state;
    assert_true(request_get_str(request, "new_name", &span));
    assert_true(span_is(span, "b"));
    assert_false(request_get_int(request, "at", &at));
    assert_int_equal(at, 99);
    assert_null(request->gen);
    request_free(request);
    request = accepts("cache.evict", "{\"tier\": \"host\", \"all\": true}");
    assert_true(request_get_bool(request, "all", &is_all) && is_all);
    assert_true(request_get_str(request, "tier", &span) && span_is(span, "host"));
    request_free(request);
    request_free(NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tables_are_complete),
        cmocka_unit_test(every_example_of_the_docs_is_what_the_decoder_takes),
        cmocka_unit_test(params_not_given_have_their_defaults),
        cmocka_unit_test(params_given_arrive_as_given),
        cmocka_unit_test(refusals_name_the_param_what_came_and_what_is_allowed),
        cmocka_unit_test(params_that_exclude_or_need_each_other_say_so),
        cmocka_unit_test(messages_that_are_no_requests_are_bad_frames),
        cmocka_unit_test(binary_data_is_no_text),
        cmocka_unit_test(numbers_that_are_none_are_out_of_range),
        cmocka_unit_test(many_ids_arrive_in_one_piece),
        cmocka_unit_test(handlers_read_what_was_given),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
