/* Output of a generation: what is shown of which token, on which channel and when; that no cut into steps matters; and
 * all of it held against the obvious model, which looks at the whole text at once.
 *
 * What came out is written as "R{reasoning}", "T{content}" and "C{name arguments}", deltas of a channel joined. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base.h"
#include "output.h"
#include "report.h"
#include "utf8.h"

enum { TEXT_BYTES_MAX = 1 << 20, IDS_MAX = 4096, EMOJI_BYTES = 4 };

#define CALL_F "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"

static struct tokenizer *tokenizer;
static int32_t marks[CHAT_N_MARKS];

static int set_up(void **state) {
    struct report report = {0};

    (void)state;
    if (tokenizer_open(TINY_TOKENIZER, &tokenizer, &report) != 0) {
        fprintf(stderr, "%s\n", report.line);
        return -1;
    }
    output_find_marks(tokenizer, marks);
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    tokenizer_free(tokenizer);
    return 0;
}

/* ---- one run ---- */

struct record {
    struct text joined;
    int last; /* channel, or -1 */
    int32_t ids[IDS_MAX];
    uint32_t n_ids, n_fed, n_deltas, n_calls;
    const struct output_config *config;
};

static void assert_utf8(struct span text) {
    for (size_t i = 0; i < text.n;) {
        uint32_t cp;
        int n = utf8_decode((const unsigned char *)text.bytes + i, text.n - i, &cp);

        assert_true(n > 0);
        i += (size_t)n;
    }
}

static void record_delta(struct record *record, const struct output_event *event) {
    static const char *const opens[] = {"T{", "R{", "C{"};

    assert_true(event->text.n > 0 || event->n_ids > 0);
    assert_true(event->channel != OUTPUT_TOOL || event->text.n == 0);
    assert_true(record->n_ids + event->n_ids <= record->n_fed); /* none before it was fed */
    for (uint32_t i = 0; i < event->n_ids; i++) {
        record->ids[record->n_ids++] = event->ids[i];
        if (event->logprobs)
            assert_true(event->logprobs[i].chosen == (float)event->ids[i]);
    }
    record->n_deltas++;
    if (event->text.n == 0)
        return;
    if (record->last != (int)event->channel)
        text_add_string(&record->joined, opens[event->channel]);
    record->last = (int)event->channel;
    text_add(&record->joined, event->text.bytes, event->text.n);
}

static void on_event(void *user, const struct output_event *event) {
    struct record *record = user;

    assert_utf8(event->text);
    for (uint32_t i = 0; i < record->config->n_stops && event->channel == OUTPUT_CONTENT; i++)
        assert_true(event->text.n == 0 || !memmem(event->text.bytes, event->text.n, record->config->stops[i].bytes,
                                                  record->config->stops[i].n));
    if (event->kind == OUTPUT_DELTA) {
        record_delta(record, event);
        return;
    }
    assert_int_equal(event->call_idx, record->n_calls++);
    text_add_string(&record->joined, "C{");
    text_add(&record->joined, event->text.bytes, event->text.n);
    text_add_string(&record->joined, " ");
    value_write_json(&record->joined, event->arguments);
    text_add_string(&record->joined, "}");
    record->last = -1;
}

/* How a token list is cut into blocks. */
struct cut {
    uint32_t n_first, n_then; /* 0: at random, from seed */
    uint32_t seed;
};

static const struct cut one_by_one = {1, 1, 0}, all_at_once = {IDS_MAX, IDS_MAX, 0};

static uint32_t next_random(uint32_t *seed) {
    *seed = *seed * 1664525u + 1013904223u;
    return *seed >> 8;
}

static struct output_config config_of(enum output_mode mode) {
    return (struct output_config){
        .tokenizer = tokenizer,
        .mode = mode,
        .marks = marks,
        .wants_ids = true,
        .text_bytes_max = TEXT_BYTES_MAX,
        .call_bytes_max = TEXT_BYTES_MAX,
        .calls_bytes_max = TEXT_BYTES_MAX,
    };
}

static void record_init(struct record *record, const struct output_config *config) {
    *record = (struct record){.last = -1, .config = config};
    text_init(&record->joined, TEXT_BYTES_MAX);
}

static int start(struct output *output, struct output_config config, struct record *record) {
    config.on_event = on_event;
    config.user = record;
    return output_init(output, &config);
}

/* Feeds until the list or the output ends, and ends it. What output_end() says. */
static int feed_all(struct output *output, struct record *record, const int32_t *ids, uint32_t n, struct cut cut) {
    struct logprob_row rows[IDS_MAX];
    int r = 0;

    for (uint32_t i = 0; i < n; i++)
        rows[i] = (struct logprob_row){.chosen = (float)ids[i]};
    for (uint32_t at = 0, n_used; at < n && r == 0; at += n_used) {
        uint32_t n_block = at == 0 ? cut.n_first : cut.n_then;
        struct output_block block = {.ids = ids + at, .logprobs = rows + at};

        if (n_block == 0)
            n_block = 1 + next_random(&cut.seed) % 5;
        block.n = n_block < n - at ? n_block : n - at;
        record->n_fed = at + block.n;
        r = output_feed(output, &block, &n_used);
        assert_true(n_used > 0 && n_used <= block.n && (r != 0 || n_used == block.n));
    }
    assert_true(record->n_fed >= output->n_completion);
    r = output_end(output);
    assert_int_equal(record->n_ids, output->n_completion);
    assert_memory_equal(record->ids, ids, record->n_ids * sizeof *ids);
    assert_int_equal(output->ids.n, output->n_completion);
    assert_int_equal(output_calls(output)->array.n, record->n_calls);
    return r;
}

/* ---- by hand ---- */

static struct tokenizer_ids encode(const char *text) {
    struct tokenizer_ids ids = {0};

    assert_int_equal(tokenizer_encode(tokenizer, text, strlen(text), TOKENIZER_MARKUP, &ids), 0);
    assert_true(ids.n <= IDS_MAX);
    return ids;
}

/* The model writes `text`; whatever the cut, this comes out of it. Returns the tokens used. */
static uint32_t shows_result(struct output_config config, const char *text, const char *expected, int result) {
    struct tokenizer_ids ids = encode(text);
    uint32_t n_completion = 0;

    for (uint32_t i = 0; i < 12; i++) {
        struct cut cut = {i, i, 7 * i};
        struct record record;
        struct output output;

        record_init(&record, &config);
        assert_int_equal(start(&output, config, &record), 0);
        assert_int_equal(feed_all(&output, &record, ids.ids, (uint32_t)ids.n, cut), result);
        if (!span_is(text_span(&record.joined), expected))
            fail_msg("showed \"%.*s\", not \"%s\"", (int)record.joined.n, record.joined.bytes, expected);
        assert_true(i == 0 || n_completion == output.n_completion);
        n_completion = output.n_completion;
        output_deinit(&output);
        text_deinit(&record.joined);
    }
    tokenizer_ids_deinit(&ids);
    return n_completion;
}

static void shows(enum output_mode mode, const char *text, const char *expected) {
    shows_result(config_of(mode), text, expected, 0);
}

static void stops(enum output_mode mode, const char *stop, const char *text, const char *expected) {
    struct output_config config = config_of(mode);
    struct span span = span_of(stop);

    config.n_stops = 1;
    config.stops = &span;
    shows_result(config, text, expected, OUTPUT_E_STOPPED);
}

static void plain_text_comes_out_whole(void **state) {
    (void)state;
    shows(OUTPUT_PLAIN, "", "");
    shows(OUTPUT_PLAIN, "\n\nHello <think> </tool_call> \n\n", "T{\n\nHello <think> </tool_call> \n\n");
    shows(OUTPUT_PLAIN, "a\xF0\x9F\x98\x80\xE4\xB8\xAD", "T{a\xF0\x9F\x98\x80\xE4\xB8\xAD");
}

static void special_tokens_have_no_text(void **state) {
    (void)state;
    shows(OUTPUT_PLAIN, "a<|im_end|>b<|endoftext|>", "T{ab");
    shows(OUTPUT_CHAT, "a<|im_end|>b<|im_start|>c<|endoftext|>", "T{abc"); /* who wants no end gets none */
}

static void an_emoji_waits_for_its_last_token(void **state) {
    struct tokenizer_ids ids = encode("\xF0\x9F\x98\x80");
    struct output_config config = config_of(OUTPUT_PLAIN);
    struct record record;
    struct output output;

    (void)state;
    assert_int_equal(ids.n, EMOJI_BYTES); /* a token for each byte */
    for (int mode = OUTPUT_PLAIN; mode <= OUTPUT_CHAT; mode++) {
        config.mode = (enum output_mode)mode;
        record_init(&record, &config);
        assert_int_equal(start(&output, config, &record), 0);
        for (uint32_t i = 0, n_used; i < EMOJI_BYTES; i++) {
            record.n_fed = i + 1;
            assert_int_equal(output_feed(&output, &(struct output_block){.ids = ids.ids + i, .n = 1}, &n_used), 0);
            assert_int_equal(record.n_deltas, i + 1 == EMOJI_BYTES);
            assert_int_equal(record.n_ids, i + 1 == EMOJI_BYTES ? EMOJI_BYTES : 0);
        }
        assert_int_equal(output_end(&output), 0);
        assert_true(span_is(output_content(&output), "\xF0\x9F\x98\x80"));
        output_deinit(&output);
        text_deinit(&record.joined);

        record_init(&record, &config); /* its last token never comes */
        assert_int_equal(start(&output, config, &record), 0);
        assert_int_equal(feed_all(&output, &record, ids.ids, EMOJI_BYTES - 1, one_by_one), 0);
        assert_true(span_is(output_content(&output), "\xEF\xBF\xBD"));
        assert_int_equal(record.n_deltas, 1);
        output_deinit(&output);
        text_deinit(&record.joined);
    }
    tokenizer_ids_deinit(&ids);
}

static void channels_are_told_apart(void **state) {
    struct output_config config = config_of(OUTPUT_CHAT);

    (void)state;
    shows(OUTPUT_CHAT, "Hello.", "T{Hello.");
    shows(OUTPUT_CHAT, "<think>\nWell.\n</think>\n\nHello.", "R{Well.T{Hello.");
    shows(OUTPUT_CHAT, "I call.\n\n" CALL_F "\n" CALL_F, "T{I call.C{f {\"x\": \"1\"}}C{f {\"x\": \"1\"}}");
    shows(OUTPUT_CHAT, "a" CALL_F "b", "T{aC{f {\"x\": \"1\"}}T{b");
    shows(OUTPUT_CHAT, "a<tool_call>\nnone\n</tool_call>", "T{a<tool_call>\nnone\n</tool_call>");
    config.in_reasoning = true;
    shows_result(config, "\nSo " CALL_F "!\n</think>\n\nYes.", "R{So " CALL_F "!T{Yes.", 0);
    shows_result(config, "So", "R{So", 0); /* cut off: it never becomes content */
}

static void a_stop_string_ends_the_text_before_it(void **state) {
    (void)state;
    for (int mode = OUTPUT_PLAIN; mode <= OUTPUT_CHAT; mode++) {
        stops((enum output_mode)mode, "three", "one two three four", "T{one two ");
        stops((enum output_mode)mode, "one", "one two", "");
        stops((enum output_mode)mode, "o t", "one two three", "T{one tw");
        stops((enum output_mode)mode, "aab", "aaaaaab", "T{aaaa");
        stops((enum output_mode)mode, "aabaaac", "aabaaabaaac", "T{aaba"); /* falls back to "aa" inside itself */
        stops((enum output_mode)mode, "\xF0\x9F\x98\x80", "a\xF0\x9F\x98\x81\xF0\x9F\x98\x80", "T{a\xF0\x9F\x98\x81");
        stops((enum output_mode)mode, "\n\n", "a\n\nb", "T{a");
    }
}

/* The first bytes wait, come out when the match fails, and are gone when it does not. */
static void a_stop_string_across_three_tokens_is_held_back(void **state) {
    static const char *const pieces[] = {"a", "b", "c", "d"};
    struct output_config config = config_of(OUTPUT_PLAIN);
    struct span stop = span_of("abc");
    struct record record;
    struct output output;
    int32_t ids[ARRAY_LEN(pieces)];
    uint32_t n_used;

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(pieces); i++)
        ids[i] = tokenizer_find(tokenizer, pieces[i]);
    config.n_stops = 1;
    config.stops = &stop;
    record_init(&record, &config);
    assert_int_equal(start(&output, config, &record), 0);
    record.n_fed = 6;
    assert_int_equal(output_feed(&output, &(struct output_block){.n = 2, .ids = ids}, &n_used), 0);
    assert_int_equal(record.n_deltas, 0);
    assert_int_equal(output.n_held, 2);
    assert_int_equal(output_feed(&output, &(struct output_block){.n = 1, .ids = ids}, &n_used), 0);
    assert_true(span_is(output_content(&output), "ab")); /* "aba": the last byte may yet begin it */
    assert_int_equal(output.n_held, 1);
    assert_int_equal(output_feed(&output, &(struct output_block){.n = 3, .ids = ids + 1}, &n_used), OUTPUT_E_STOPPED);
    assert_int_equal(n_used, 2); /* the d of the block is dropped */
    assert_int_equal(output_end(&output), OUTPUT_E_STOPPED);
    assert_true(span_is(output_content(&output), "ab"));
    assert_int_equal(output.n_completion, 5);
    assert_int_equal(record.n_ids, 5);
    output_deinit(&output);
    text_deinit(&record.joined);
}

static void what_is_held_back_at_the_end_is_shown(void **state) {
    struct output_config config = config_of(OUTPUT_PLAIN);
    struct span stop = span_of("end.");

    (void)state;
    config.n_stops = 1;
    config.stops = &stop;
    shows_result(config, "the end", "T{the end", 0);
    config.mode = OUTPUT_CHAT;
    shows_result(config, "the end" CALL_F ".", "T{the endC{f {\"x\": \"1\"}}T{.", 0);
}

static void the_match_complete_first_counts_and_then_the_longest(void **state) {
    static const struct {
        const char *stops[3], *text, *expected;
        uint32_t idx;
    } cases[] = {
        {{"ab", "abc"}, "xabc", "T{x", 0},    /* a prefix of the other is complete first */
        {{"abcd", "bc"}, "xabcd", "T{xa", 1}, /* also if it begins later */
        {{"bc", "abc"}, "xabc", "T{x", 1},    /* the same last byte: the longer */
        {{"abd", "abc", "c"}, "ababc", "T{ab", 1}, {{"q", "ab", "ab"}, "ab", "", 1}, /* the same: the first */
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct output_config config = config_of(OUTPUT_PLAIN);
        struct tokenizer_ids ids = encode(cases[i].text);
        struct span spans[3];
        struct record record;
        struct output output;

        config.stops = spans;
        for (; config.n_stops < 3 && cases[i].stops[config.n_stops]; config.n_stops++)
            spans[config.n_stops] = span_of(cases[i].stops[config.n_stops]);
        shows_result(config, cases[i].text, cases[i].expected, OUTPUT_E_STOPPED);
        record_init(&record, &config);
        assert_int_equal(start(&output, config, &record), 0);
        feed_all(&output, &record, ids.ids, (uint32_t)ids.n, all_at_once);
        assert_int_equal(output.stop_idx, cases[i].idx);
        output_deinit(&output);
        text_deinit(&record.joined);
        tokenizer_ids_deinit(&ids);
    }
}

static void stop_strings_are_looked_for_in_content_alone(void **state) {
    (void)state;
    stops(OUTPUT_CHAT, "Yes", "<think>\nYes.\n</think>\n\nYes.", "R{Yes.");
    stops(OUTPUT_CHAT, "function", CALL_F "function", "C{f {\"x\": \"1\"}}");
    stops(OUTPUT_CHAT, "function", "a<tool_call> function", "T{a<tool_call> "); /* what is no call is content */
    stops(OUTPUT_CHAT, "</think>", "</think> and", "");                         /* and so is a mark out of place */
}

static void a_stop_string_seen_only_at_the_end_counts(void **state) {
    (void)state;
    stops(OUTPUT_CHAT, "\n", "a\n", "T{a"); /* the newline waited for what follows */
    stops(OUTPUT_CHAT, "<tool_call>", "a<tool_call>\n", "T{a");
}

static void tokens_behind_a_stop_string_are_not_used(void **state) {
    struct output_config config = config_of(OUTPUT_PLAIN);
    struct span stop = span_of("2");

    (void)state;
    config.n_stops = 1;
    config.stops = &stop;
    assert_int_equal(shows_result(config, "0123456789", "T{01", OUTPUT_E_STOPPED), 3); /* a token for each digit */
}

static void the_stop_id_counts_and_has_no_text(void **state) {
    struct tokenizer_ids ids = encode("<think>\nWell.\n</think>\n\nYes");
    struct output_config config = config_of(OUTPUT_CHAT);
    struct output_block block = {.n = (uint32_t)ids.n, .ids = ids.ids, .ends_with_stop_id = true};
    struct record record;
    struct output output;
    uint32_t n_used;

    (void)state;
    record_init(&record, &config);
    record.n_fed = block.n;
    assert_int_equal(start(&output, config, &record), 0);
    assert_int_equal(output_feed(&output, &block, &n_used), 0);
    assert_int_equal(n_used, block.n);
    assert_int_equal(output_end(&output), 0);
    assert_false(span_ends_with(output_content(&output), "s"));
    assert_true(span_starts_with(output_content(&output), "Y") || output_content(&output).n == 0);
    assert_int_equal(output.n_completion, block.n);
    assert_int_equal(record.n_ids, block.n);
    output_deinit(&output);
    text_deinit(&record.joined);
    tokenizer_ids_deinit(&ids);
}

static void tokens_of_reasoning_are_counted_with_their_marks(void **state) {
    struct tokenizer_ids ids = encode("<think>\nWell, yes.\n</think>\n\nYes."),
                         thought = encode("<think>\nWell, yes.\n</think>");
    struct output_config config = config_of(OUTPUT_CHAT);
    struct record record;
    struct output output;

    (void)state;
    for (int in_reasoning = 0; in_reasoning < 2; in_reasoning++) { /* the prompt has the opening mark */
        config.in_reasoning = in_reasoning;
        record_init(&record, &config);
        assert_int_equal(start(&output, config, &record), 0);
        feed_all(&output, &record, ids.ids + in_reasoning, (uint32_t)ids.n - (uint32_t)in_reasoning, one_by_one);
        assert_int_equal(output.n_reasoning, thought.n - (size_t)in_reasoning);
        assert_true(span_is(output_reasoning(&output), "Well, yes."));
        assert_true(span_is(output_content(&output), "Yes."));
        output_deinit(&output);
        text_deinit(&record.joined);
    }
    tokenizer_ids_deinit(&ids);
    tokenizer_ids_deinit(&thought);
}

static void calls_are_kept_with_typed_arguments(void **state) {
    static const char tools_json[] =
        "[{\"name\":\"f\",\"parameters\":{\"properties\":{\"x\":{\"type\":\"integer\"}}}}]";
    struct tokenizer_ids ids = encode("Look.\n" CALL_F "\n" CALL_F);
    struct output_config config = config_of(OUTPUT_CHAT);
    struct value_arena arena;
    struct report report;
    struct value tools;
    struct record record;
    struct output output;
    struct text text;

    (void)state;
    value_arena_init(&arena, 1 << 16);
    assert_int_equal(value_from_json(&arena, "tools", span_of(tools_json), VALUE_DEPTH_MAX, &tools, &report), 0);
    config.tools = &tools;
    record_init(&record, &config);
    assert_int_equal(start(&output, config, &record), 0);
    assert_int_equal(feed_all(&output, &record, ids.ids, (uint32_t)ids.n, one_by_one), 0);
    text_init(&text, 1 << 16);
    value_write_json(&text, output_calls(&output));
    assert_true(span_is(text_span(&text), "[{\"name\": \"f\", \"arguments\": {\"x\": 1}}, "
                                          "{\"name\": \"f\", \"arguments\": {\"x\": 1}}]"));
    assert_true(span_is(output_content(&output), "Look."));
    output_deinit(&output);
    text_deinit(&record.joined);
    text_deinit(&text);
    value_arena_deinit(&arena);
    tokenizer_ids_deinit(&ids);
}

static void ids_of_a_call_come_right_before_it(void **state) {
    struct tokenizer_ids ids = encode("a" CALL_F);
    struct output_config config = config_of(OUTPUT_CHAT);
    struct record record;
    struct output output;
    uint32_t n_used;

    (void)state;
    record_init(&record, &config);
    assert_int_equal(start(&output, config, &record), 0);
    record.n_fed = (uint32_t)ids.n;
    assert_int_equal(output_feed(&output, &(struct output_block){.n = (uint32_t)ids.n, .ids = ids.ids}, &n_used), 0);
    assert_int_equal(record.n_deltas, 2); /* the text with one id, the call with the others */
    assert_int_equal(record.n_ids, ids.n);
    assert_int_equal(output_end(&output), 0);
    assert_int_equal(record.n_deltas, 2);
    output_deinit(&output);
    text_deinit(&record.joined);
    tokenizer_ids_deinit(&ids);
}

static void a_block_makes_one_delta(void **state) {
    struct tokenizer_ids ids = encode("one two three four five");
    struct output_config config = config_of(OUTPUT_CHAT);
    struct record record;
    struct output output;

    (void)state;
    config.wants_ids = false;
    record_init(&record, &config);
    assert_int_equal(start(&output, config, &record), 0);
    for (uint32_t i = 0, n_used; i < 2; i++) {
        struct output_block block = {.ids = ids.ids + i, .n = i == 0 ? 1 : (uint32_t)ids.n - 1};

        assert_int_equal(output_feed(&output, &block, &n_used), 0);
        assert_int_equal(record.n_deltas, i + 1);
    }
    assert_int_equal(output_end(&output), 0);
    assert_int_equal(record.n_deltas, 2);
    assert_int_equal(record.n_ids, 0); /* nobody wants them */
    assert_true(span_is(output_content(&output), "one two three four five"));
    output_deinit(&output);
    text_deinit(&record.joined);
    tokenizer_ids_deinit(&ids);
}

static void limits_end_the_output_and_what_came_before_stands(void **state) {
    struct output_config config = config_of(OUTPUT_PLAIN);

    (void)state;
    config.text_bytes_max = 8;
    shows_result(config, "0123456789", "T{01234567", OUTPUT_E_FULL);
    config = config_of(OUTPUT_CHAT);
    config.calls_bytes_max = 1024; /* the parser has as much for one call */
    shows_result(config, CALL_F CALL_F CALL_F CALL_F CALL_F CALL_F, "C{f {\"x\": \"1\"}}C{f {\"x\": \"1\"}}",
                 OUTPUT_E_FULL);
    config.call_bytes_max = 16;
    shows_result(config, CALL_F, "T{" CALL_F, 0);
}

static void bad_stop_strings_are_refused(void **state) {
    static char many[OUTPUT_STOP_BYTES_MAX + 1];
    struct span spans[OUTPUT_STOPS_MAX + 1];
    struct output_config config = config_of(OUTPUT_PLAIN);
    struct record record;
    struct output output;

    (void)state;
    memset(many, 'x', sizeof many);
    for (size_t i = 0; i < ARRAY_LEN(spans); i++)
        spans[i] = (struct span){many, OUTPUT_STOP_BYTES_MAX};
    record_init(&record, &config);
    config.stops = spans;
    config.n_stops = OUTPUT_STOPS_MAX;
    assert_int_equal(start(&output, config, &record), 0);
    output_deinit(&output);
    config.n_stops = OUTPUT_STOPS_MAX + 1;
    assert_int_equal(start(&output, config, &record), -EINVAL);
    output_deinit(&output);
    config.n_stops = 2;
    spans[1].n = 0;
    assert_int_equal(start(&output, config, &record), -EINVAL);
    output_deinit(&output);
    spans[1].n = OUTPUT_STOP_BYTES_MAX + 1;
    assert_int_equal(start(&output, config, &record), -EINVAL);
    output_deinit(&output);
}

/* ---- beside the obvious model ---- */

/* All that is shown, stop strings aside: runs of one kind, calls as text. */
enum { RUNS_MAX = IDS_MAX };
struct model {
    struct text text;
    struct {
        int kind; /* enum chat_event_kind */
        size_t begin, end;
    } runs[RUNS_MAX];
    size_t n_runs;
};

static void on_chat_event(void *user, const struct chat_event *event) {
    struct model *model = user;

    if (model->n_runs == 0 || event->kind == CHAT_EVENT_CALL ||
        model->runs[model->n_runs - 1].kind != (int)event->kind) {
        model->runs[model->n_runs].kind = (int)event->kind;
        model->runs[model->n_runs++].begin = model->text.n;
    }
    text_add(&model->text, event->text.bytes, event->text.n);
    if (event->kind == CHAT_EVENT_CALL) {
        text_add_string(&model->text, " ");
        value_write_json(&model->text, event->arguments);
    }
    model->runs[model->n_runs - 1].end = model->text.n;
}

static void model_chat(struct model *model, bool in_reasoning, const int32_t *ids, uint32_t n, bool ends) {
    struct chat_parse_config config = {
        .in_reasoning = in_reasoning,
        .call_bytes_max = TEXT_BYTES_MAX,
        .arguments_bytes_max = TEXT_BYTES_MAX,
        .on_event = on_chat_event,
        .user = model,
    };
    struct chat_parse parse;

    memcpy(config.mark_ids, marks, sizeof marks);
    chat_parse_init(&parse, &config);
    for (uint32_t i = 0; i < n; i++) {
        struct span bytes = {0};

        if (!tokenizer_is_special(tokenizer, ids[i]))
            bytes.bytes = tokenizer_bytes(tokenizer, ids[i], &bytes.n);
        chat_parse_token(&parse, ids[i], bytes);
    }
    if (ends)
        chat_parse_end(&parse);
    chat_parse_deinit(&parse);
}

static void model_plain(struct model *model, const int32_t *ids, uint32_t n, bool ends) {
    struct tokenizer_stream stream = {0};
    struct tokenizer_text text = {0};

    for (uint32_t i = 0; i < n; i++)
        assert_int_equal(tokenizer_stream_feed(tokenizer, &stream, ids[i], TOKENIZER_SKIP_SPECIAL, &text), 0);
    if (ends)
        assert_int_equal(tokenizer_stream_flush(&stream, &text), 0);
    text_add(&model->text, text.bytes, text.n);
    model->n_runs = text.n > 0;
    model->runs[0].kind = CHAT_EVENT_CONTENT;
    model->runs[0].begin = 0;
    model->runs[0].end = text.n;
    tokenizer_text_deinit(&text);
}

/* Cuts the runs at the first stop string. Which one, or -1. */
static int model_stop(struct model *model, const struct output_config *config) {
    for (size_t run = 0; run < model->n_runs; run++) {
        if (model->runs[run].kind != CHAT_EVENT_CONTENT)
            continue;
        for (size_t end = model->runs[run].begin; end <= model->runs[run].end; end++) {
            int best = -1;

            for (uint32_t i = 0; i < config->n_stops; i++) {
                struct span stop = config->stops[i];

                if (end - model->runs[run].begin >= stop.n &&
                    memcmp(model->text.bytes + end - stop.n, stop.bytes, stop.n) == 0 &&
                    (best < 0 || stop.n > config->stops[best].n))
                    best = (int)i;
            }
            if (best < 0)
                continue;
            model->runs[run].end = end - config->stops[best].n;
            model->n_runs = run + 1;
            return best;
        }
    }
    return -1;
}

static int model_run(struct model *model, const struct output_config *config, const int32_t *ids, uint32_t n,
                     bool ends) {
    text_clear(&model->text);
    model->n_runs = 0;
    if (config->mode == OUTPUT_CHAT)
        model_chat(model, config->in_reasoning, ids, n, ends);
    else
        model_plain(model, ids, n, ends);
    assert_int_equal(model->text.error, 0);
    return model_stop(model, config);
}

static void model_write(const struct model *model, struct text *out) {
    static const char *const opens[] = {"R{", "T{", "C{"};

    for (size_t run = 0; run < model->n_runs; run++) {
        size_t n = model->runs[run].end - model->runs[run].begin;

        if (n > 0) {
            text_add_string(out, opens[model->runs[run].kind]);
            text_add(out, model->text.bytes + model->runs[run].begin, n);
        }
        if (model->runs[run].kind == CHAT_EVENT_CALL)
            text_add_string(out, "}");
    }
}

/* Pieces that meet each other often enough to make reasoning, calls and stop strings. */
static uint32_t random_ids(int32_t *ids, uint32_t *seed) {
    static const char *const pieces[] = {"a",           "b",
                                         "ab",          "aab",
                                         " ",           "\n",
                                         "\n\n",        "the",
                                         " the",        "\xF0\x9F\x98\x80",
                                         "\xC3\xA9",    "<think>",
                                         "</think>",    "<|im_end|>",
                                         "<tool_call>", "</tool_call>",
                                         CALL_F,        "<tool_call>\n<function=g>\n</function>\n</tool_call>",
                                         "1.",          "\xE4\xB8\xAD"};
    uint32_t n = 0, n_wanted = next_random(seed) % 120;

    while (n < n_wanted) {
        struct tokenizer_ids piece;

        if (next_random(seed) % 8 == 0) { /* any token, half a character included */
            ids[n++] = (int32_t)(next_random(seed) % 4096);
            continue;
        }
        piece = encode(pieces[next_random(seed) % (next_random(seed) % 2 ? 8 : ARRAY_LEN(pieces))]);
        memcpy(ids + n, piece.ids, piece.n * sizeof *ids);
        n += (uint32_t)piece.n;
        tokenizer_ids_deinit(&piece);
    }
    return n;
}

/* Whole characters that occur, or nearly so. */
static struct span random_stop(struct span text, char *buffer, uint32_t *seed) {
    static const char *const fixed[] = {"aab", "ab", "\n", "the", "<tool_call>", "\xF0\x9F\x98\x80", "aabaab", "a\n"};
    size_t begin, n;

    if (text.n == 0 || next_random(seed) % 3 == 0)
        return span_of(fixed[next_random(seed) % ARRAY_LEN(fixed)]);
    begin = next_random(seed) % text.n;
    while (begin > 0 && ((unsigned char)text.bytes[begin] & 0xC0) == 0x80)
        begin--;
    n = 1 + next_random(seed) % 12;
    while (begin + n < text.n && ((unsigned char)text.bytes[begin + n] & 0xC0) == 0x80)
        n++;
    if (begin + n > text.n)
        n = text.n - begin;
    memcpy(buffer, text.bytes + begin, n);
    if (next_random(seed) % 4 == 0)
        buffer[n++] = 'b';
    return (struct span){buffer, n};
}

static void equals_model(const struct output_config *config, struct model *model, const int32_t *ids, uint32_t n,
                         uint32_t *seed) {
    uint32_t n_expected = n;
    struct text expected;
    int stop = model_run(model, config, ids, n, true);

    text_init(&expected, TEXT_BYTES_MAX);
    model_write(model, &expected);
    for (uint32_t k = 1; stop >= 0 && k < n_expected; k++)
        if (model_run(model, config, ids, k, false) >= 0)
            n_expected = k;
    for (int i = 0; i < 4; i++) {
        struct cut cut = i == 0 ? one_by_one : i == 1 ? all_at_once : (struct cut){0, 0, next_random(seed)};
        struct record record;
        struct output output;

        record_init(&record, config);
        assert_int_equal(start(&output, *config, &record), 0);
        assert_int_equal(feed_all(&output, &record, ids, n, cut), stop < 0 ? 0 : OUTPUT_E_STOPPED);
        if (!span_equal(text_span(&record.joined), text_span(&expected)))
            fail_msg("showed \"%.*s\", not \"%.*s\"", (int)record.joined.n, record.joined.bytes, (int)expected.n,
                     expected.bytes);
        assert_int_equal(output.n_completion, n_expected);
        if (stop >= 0)
            assert_int_equal(output.stop_idx, stop);
        output_deinit(&output);
        text_deinit(&record.joined);
    }
    text_deinit(&expected);
}

static void any_output_equals_the_obvious_model(void **state) {
    static struct model model;
    static int32_t ids[IDS_MAX];
    uint32_t seed, n_stopped = 0, n_runs = 0;

    (void)state;
    text_init(&model.text, TEXT_BYTES_MAX);
    for (int round = 0; round < 3000; round++) {
        struct output_config config = config_of(round % 3 == 0 ? OUTPUT_PLAIN : OUTPUT_CHAT);
        char buffers[4][64];
        struct span spans[4];
        uint32_t n;

        seed = (uint32_t)round;
        n = random_ids(ids, &seed);
        config.in_reasoning = next_random(&seed) % 2;
        model_run(&model, &config, ids, n, true);
        config.stops = spans;
        config.n_stops = next_random(&seed) % 5;
        for (uint32_t i = 0; i < config.n_stops; i++)
            spans[i] = random_stop(text_span(&model.text), buffers[i], &seed);
        n_stopped += model_run(&model, &config, ids, n, true) >= 0;
        n_runs += (uint32_t)model.n_runs;
        equals_model(&config, &model, ids, n, &seed);
    }
    assert_true(n_stopped > 500 && n_runs > 3000); /* the rounds are worth something */
    text_deinit(&model.text);
}

static void hostile_stop_strings_cost_no_more_than_others(void **state) {
    enum { ROUNDS = 40000 };
    static char as[OUTPUT_STOP_BYTES_MAX];
    struct output_config config = config_of(OUTPUT_PLAIN);
    struct tokenizer_ids ids = encode("aaaaaaaa");
    struct span spans[OUTPUT_STOPS_MAX];
    struct record record;
    struct output output;
    uint32_t n_used;

    (void)state;
    memset(as, 'a', sizeof as);
    as[sizeof as - 1] = 'b';
    for (size_t i = 0; i < ARRAY_LEN(spans); i++)
        spans[i] = (struct span){as + i, sizeof as - i};
    config.wants_ids = false;
    config.n_stops = ARRAY_LEN(spans);
    config.stops = spans;
    record_init(&record, &config);
    assert_int_equal(start(&output, config, &record), 0);
    for (int i = 0; i < ROUNDS; i++) {
        assert_int_equal(output_feed(&output, &(struct output_block){.n = (uint32_t)ids.n, .ids = ids.ids}, &n_used),
                         0);
        assert_true(output.n_held < sizeof as);
    }
    assert_int_equal(output_end(&output), 0);
    assert_int_equal(output_content(&output).n, 8 * ROUNDS);
    output_deinit(&output);
    text_deinit(&record.joined);
    tokenizer_ids_deinit(&ids);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(plain_text_comes_out_whole),
        cmocka_unit_test(special_tokens_have_no_text),
        cmocka_unit_test(an_emoji_waits_for_its_last_token),
        cmocka_unit_test(channels_are_told_apart),
        cmocka_unit_test(a_stop_string_ends_the_text_before_it),
        cmocka_unit_test(a_stop_string_across_three_tokens_is_held_back),
        cmocka_unit_test(what_is_held_back_at_the_end_is_shown),
        cmocka_unit_test(the_match_complete_first_counts_and_then_the_longest),
        cmocka_unit_test(stop_strings_are_looked_for_in_content_alone),
        cmocka_unit_test(a_stop_string_seen_only_at_the_end_counts),
        cmocka_unit_test(tokens_behind_a_stop_string_are_not_used),
        cmocka_unit_test(the_stop_id_counts_and_has_no_text),
        cmocka_unit_test(tokens_of_reasoning_are_counted_with_their_marks),
        cmocka_unit_test(calls_are_kept_with_typed_arguments),
        cmocka_unit_test(ids_of_a_call_come_right_before_it),
        cmocka_unit_test(a_block_makes_one_delta),
        cmocka_unit_test(limits_end_the_output_and_what_came_before_stands),
        cmocka_unit_test(bad_stop_strings_are_refused),
        cmocka_unit_test(any_output_equals_the_obvious_model),
        cmocka_unit_test(hostile_stop_strings_cost_no_more_than_others),
    };

    return cmocka_run_group_tests(tests, set_up, tear_down);
}
