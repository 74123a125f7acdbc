/* Tokens of a hostile model with hostile stop strings: whole characters, no stop string in what is shown, each id in one
 * delta, and the same whatever the cut into steps.
 *
 * Input: flags, seed of the cut, number of stop strings, each as its length and bytes; then the tokens: 0x0e..0x17 are
 * the ten added ones in the order of their ids, 0x01 is followed by any id in two bytes, other bytes stand for the token
 * of that byte. */
#include <assert.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "output.h"
#include "report.h"
#include "utf8.h"

enum { INPUT_BYTES_MAX = 1 << 14, RECORD_BYTES_MAX = 1 << 22, ADDED_FIRST = 4086, STOPS_MAX = 5 };

/* Opened once, since it takes longer than a run. */
static struct {
    struct tokenizer *tokenizer;
    int32_t marks[CHAT_N_MARKS], byte_ids[256];
} tiny;

struct record {
    const struct output_config *config;
    struct text joined;
    size_t run_begin; /* in joined: content without anything between */
    int last;         /* channel, or -1 */
    int32_t ids[INPUT_BYTES_MAX];
    uint32_t n_ids, n_fed;
};

static void open_tiny(void) {
    struct report report;

    if (tiny.tokenizer)
        return;
    if (tokenizer_open(TINY_TOKENIZER, &tiny.tokenizer, &report) != 0) {
        fprintf(stderr, "%s\n", report.line);
        abort();
    }
    output_find_marks(tiny.tokenizer, tiny.marks);
    for (int32_t id = 0; id < ADDED_FIRST; id++) {
        size_t n;
        const char *bytes = tokenizer_bytes(tiny.tokenizer, id, &n);

        if (bytes && n == 1)
            tiny.byte_ids[(unsigned char)bytes[0]] = id;
    }
}

static bool is_utf8(struct span text) {
    for (size_t i = 0; i < text.n;) {
        uint32_t cp;
        int n = utf8_decode((const unsigned char *)text.bytes + i, text.n - i, &cp);

        if (n <= 0)
            return false;
        i += (size_t)n;
    }
    return true;
}

static void check_run(const struct record *record) {
    struct span run = span_from(text_span(&record->joined), record->run_begin);

    for (uint32_t i = 0; record->last == OUTPUT_CONTENT && i < record->config->n_stops; i++)
        assert(!memmem(run.bytes, run.n, record->config->stops[i].bytes, record->config->stops[i].n));
}

static void begin_run(struct record *record, int channel) {
    check_run(record);
    text_add(&record->joined, &"\xfd\xfe\xff"[channel], 1); /* no text has these */
    record->run_begin = record->joined.n;
}

static void on_event(void *user, const struct output_event *event) {
    struct record *record = user;

    assert(is_utf8(event->text) && record->n_ids + event->n_ids <= record->n_fed);
    if (event->n_ids > 0)
        memcpy(record->ids + record->n_ids, event->ids, event->n_ids * sizeof *event->ids);
    record->n_ids += event->n_ids;
    assert(event->kind == OUTPUT_TOOL_CALL || event->text.n + event->n_ids > 0);
    if (event->text.n == 0)
        return;
    if (event->kind == OUTPUT_TOOL_CALL || record->last != (int)event->channel)
        begin_run(record, event->channel);
    record->last = (int)event->channel;
    text_add(&record->joined, event->text.bytes, event->text.n);
    if (event->kind == OUTPUT_TOOL_CALL)
        value_write_json(&record->joined, event->arguments);
}

/* Returns what output_end() says. */
static int run(struct output *output, struct output_config config, const int32_t *ids, uint32_t n, uint32_t seed,
               struct record *record) {
    int r = 0;

    *record = (struct record){.config = &config, .last = -1};
    text_init(&record->joined, RECORD_BYTES_MAX);
    config.on_event = on_event;
    config.user = record;
    r = output_init(output, &config);
    assert(r == 0);
    for (uint32_t at = 0, n_used; at < n && r == 0; at += n_used) {
        struct output_block block = {.ids = ids + at, .n = seed ? 1 + (seed >> 24) % 17 : 1};

        seed = seed * 1664525u + 1013904223u * (seed != 0);
        if (block.n > n - at)
            block.n = n - at;
        record->n_fed = at + block.n;
        r = output_feed(output, &block, &n_used);
        assert(r >= 0 && n_used > 0 && n_used <= block.n && (r != 0 || n_used == block.n));
        record->n_fed = at + n_used;
    }
    r = output_end(output);
    check_run(record);
    assert(record->n_ids == record->n_fed && output->n_completion == record->n_fed);
    assert(memcmp(record->ids, ids, record->n_ids * sizeof *ids) == 0);
    assert(output->n_reasoning <= output->n_completion && record->joined.error == 0);
    return r;
}

/* Takes stop strings that are fit to be some from the input; the rest of it. */
static struct span take_stops(struct span input, struct span *stops, uint32_t *ret_n) {
    uint32_t n_wanted = (unsigned char)input.bytes[0] % (STOPS_MAX + 1);

    *ret_n = 0;
    input = span_from(input, 1);
    for (; n_wanted > 0 && input.n > 0; n_wanted--) {
        struct span stop = {input.bytes + 1, (unsigned char)input.bytes[0]};

        if (stop.n > input.n - 1)
            stop.n = input.n - 1;
        input = span_from(input, 1 + stop.n);
        if (stop.n > 0 && is_utf8(stop))
            stops[(*ret_n)++] = stop;
    }
    return input;
}

static uint32_t read_ids(struct span input, int32_t *ids) {
    uint32_t n = 0;

    for (size_t i = 0; i < input.n; i++) {
        unsigned char byte = (unsigned char)input.bytes[i];

        if (byte == 1 && input.n - i > 2) {
            ids[n++] = (unsigned char)input.bytes[i + 1] | (unsigned char)input.bytes[i + 2] << 8;
            i += 2;
        } else {
            ids[n++] = byte >= 0x0e && byte <= 0x17 ? ADDED_FIRST + byte - 0x0e : tiny.byte_ids[byte];
        }
    }
    return n;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    static struct record whole, cut;
    static int32_t ids[INPUT_BYTES_MAX];
    struct span stops[STOPS_MAX], rest;
    struct output_config config = {.wants_ids = true, .stops = stops, .marks = tiny.marks};
    struct output one_by_one, in_steps;
    uint32_t n_ids;
    int r;

    if (n < 3 || n > INPUT_BYTES_MAX)
        return 0;
    open_tiny();
    config.tokenizer = tiny.tokenizer;
    config.mode = data[0] & 1 ? OUTPUT_CHAT : OUTPUT_PLAIN;
    config.in_reasoning = data[0] & 2;
    config.text_bytes_max = data[0] & 4 ? 64 : 1 << 20;
    config.call_bytes_max = data[0] & 8 ? 64 : 1 << 16;
    config.calls_bytes_max = data[0] & 16 ? 2048 : 1 << 20;
    rest = take_stops((struct span){(const char *)data + 2, n - 2}, stops, &config.n_stops);
    n_ids = read_ids(rest, ids);
    r = run(&one_by_one, config, ids, n_ids, 0, &whole);
    if (run(&in_steps, config, ids, n_ids, (uint32_t)data[1] << 24 | 0x5bd1e9, &cut) != r)
        abort();
    assert(span_equal(text_span(&whole.joined), text_span(&cut.joined)) && whole.n_ids == cut.n_ids);
    assert(one_by_one.n_reasoning == in_steps.n_reasoning && one_by_one.stop_idx == in_steps.stop_idx);
    output_deinit(&one_by_one);
    output_deinit(&in_steps);
    text_deinit(&whole.joined);
    text_deinit(&cut.joined);
    return 0;
}
