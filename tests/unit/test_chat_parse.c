/* The parser of the model's output: what becomes of marks, text and calls, and that the cut into pieces never matters.
 *
 * Outputs are written with one byte per mark, below 6 so that it is no text. What came out is written as
 * "R{reasoning}", "T{content}" and "C{name arguments}", deltas of a kind joined. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base.h"
#include "chat.h"
#include "chat_cases.h"
#include "chat_parse.h"
#include "utf8.h"

#define THINK "\1"
#define THINK_END "\2"
#define CALL_BEGIN "\3"
#define CALL_END "\4"
#define END "\5"
#define CALL(body) CALL_BEGIN "\n<function=" body "\n</function>\n" CALL_END

enum { ID_BASE = 1000, TEXT_BYTES_MAX = 1 << 20 };

static const char *const mark_spellings[] = {"<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>"};

struct record {
    struct text text;
    int last_kind;
};

static void assert_utf8(struct span text) {
    for (size_t i = 0; i < text.n;) {
        uint32_t cp;
        int n = utf8_decode((const unsigned char *)text.bytes + i, text.n - i, &cp);

        assert_true(n > 0);
        i += (size_t)n;
    }
}

static void on_event(void *user, const struct chat_event *event) {
    static const char *const opens[] = {"R{", "T{", "C{"};
    struct record *record = user;

    assert_utf8(event->text);
    assert_true(event->text.n > 0);
    if (event->kind == CHAT_EVENT_CALL || (int)event->kind != record->last_kind) {
        if (record->last_kind >= 0)
            text_add_string(&record->text, "}");
        text_add_string(&record->text, opens[event->kind]);
    }
    text_add(&record->text, event->text.bytes, event->text.n);
    if (event->kind == CHAT_EVENT_CALL) {
        text_add_string(&record->text, " ");
        value_write_json(&record->text, event->arguments);
    }
    record->last_kind = event->kind;
}

static void start(struct chat_parse *parse, struct chat_parse_config config, struct record *record) {
    *record = (struct record){.last_kind = -1};
    text_init(&record->text, TEXT_BYTES_MAX);
    for (int mark = 0; mark < CHAT_N_MARKS; mark++)
        config.mark_ids[mark] = ID_BASE + mark;
    if (config.call_bytes_max == 0)
        config.call_bytes_max = TEXT_BYTES_MAX;
    if (config.arguments_bytes_max == 0)
        config.arguments_bytes_max = TEXT_BYTES_MAX;
    config.on_event = on_event;
    config.user = record;
    chat_parse_init(parse, &config);
}

static void finish(struct chat_parse *parse, struct record *record) {
    chat_parse_end(parse);
    chat_parse_end(parse);
    if (record->last_kind >= 0)
        text_add_string(&record->text, "}");
    text_add(&record->text, "", 1);
    assert_int_equal(record->text.error, 0);
    chat_parse_deinit(parse);
}

static void feed(struct chat_parse *parse, int32_t id, const char *bytes, size_t n) {
    char *copy = malloc(n ? n : 1); /* exactly the bytes, so that a sanitizer sees an over-read */

    assert_non_null(copy);
    memcpy(copy, bytes, n);
    chat_parse_token(parse, id, (struct span){copy, n});
    free(copy);
}

/* Feeds the output in pieces that end at the bytes where `cuts` has a 1; with ids also before and after each mark. */
static void feed_cut(struct chat_parse *parse, const char *output, size_t n, const bool *cuts, bool with_ids) {
    size_t begin = 0;

    for (size_t i = 0; i < n; i++) {
        if (with_ids && output[i] > 0 && output[i] < 6) {
            const char *spelling = mark_spellings[output[i] - 1];

            if (begin < i)
                feed(parse, -1, output + begin, i - begin);
            feed(parse, ID_BASE + output[i] - 1, spelling, strlen(spelling));
            begin = i + 1;
        } else if (cuts[i]) {
            feed(parse, 7, output + begin, i + 1 - begin);
            begin = i + 1;
        }
    }
    if (begin < n)
        feed(parse, -1, output + begin, n - begin);
}

/* The output with its marks spelled, for parsers that get no ids. */
static size_t spell(const char *output, char *out) {
    size_t n = 0;

    for (; *output; output++) {
        const char *piece = output, *spelling = *output > 0 && *output < 6 ? mark_spellings[*output - 1] : NULL;
        size_t n_piece = spelling ? strlen(spelling) : 1;

        memcpy(out + n, spelling ? spelling : piece, n_piece);
        n += n_piece;
    }
    return n;
}

static uint64_t random_state;

static uint32_t random_below(uint32_t n) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 33) % n;
}

static void expect_bytes(const char *output, size_t n, struct chat_parse_config config, const char *expected) {
    enum { N_RANDOM = 50 };
    bool *cuts = calloc(n + 1, sizeof *cuts);

    assert_non_null(cuts);
    for (size_t trial = 0; trial < n + 1 + N_RANDOM; trial++) {
        struct record record;
        struct chat_parse parse;

        memset(cuts, 0, n + 1);
        if (trial < n) /* one cut, at every byte; trial n: at each byte */
            cuts[trial] = true;
        for (size_t i = 0; trial >= n && i < n; i++)
            cuts[i] = trial == n || random_below(4) == 0;
        start(&parse, config, &record);
        feed_cut(&parse, output, n, cuts, !config.text_marks);
        finish(&parse, &record);
        if (strcmp(record.text.bytes, expected) != 0)
            fail_msg("%s trial %zu: \"%.*s\"\ngives %s\nnot   %s", config.text_marks ? "text" : "ids", trial, (int)n,
                     output, record.text.bytes, expected);
        text_deinit(&record.text);
    }
    free(cuts);
}

static void expect_ids(const char *output, struct chat_parse_config config, const char *expected) {
    config.text_marks = false;
    expect_bytes(output, strlen(output), config, expected);
}

static void expect_text(const char *output, struct chat_parse_config config, const char *expected) {
    char *spelled = malloc(strlen(output) * 12 + 1);

    assert_non_null(spelled);
    config.text_marks = true;
    expect_bytes(spelled, spell(output, spelled), config, expected);
    free(spelled);
}

/* With ids and without, from within reasoning or not. */
static void expect(bool in_reasoning, const char *output, const char *expected) {
    struct chat_parse_config config = {.in_reasoning = in_reasoning};

    expect_ids(output, config, expected);
    expect_text(output, config, expected);
}

static void reasoning_and_content_lose_the_newlines_of_the_format(void **state) {
    (void)state;
    expect(true, "Let me see.\n" THINK_END "\n\nHello.", "R{Let me see.}T{Hello.}");
    expect(true, "\n\na\n\nb\n\n" THINK_END "\n\n\nc\n\nd\n", "R{a\n\nb}T{c\n\nd\n}");
    expect(true, THINK_END "\n\nx", "T{x}");
    expect(true, "\n" THINK_END "\n\n", "");
    expect(true, " " THINK_END " ", "R{ }T{ }");
    expect(true, "cut short\n", "R{cut short\n}");
    expect(true, "", "");
    expect(false, "\n\nHello <b> & < i", "T{Hello <b> & < i}");
    expect(false, "a\n\n\n", "T{a\n\n\n}");
    expect(false, "\n", "");
}

static void think_tags_count_where_reasoning_can_begin_and_end(void **state) {
    (void)state;
    expect(true, THINK "\nr\n" THINK_END "x", "R{r}T{x}");
    expect(false, THINK "\nr\n" THINK_END "\n\nx", "R{r}T{x}");
    expect(false, "\n\n" THINK "r" THINK_END "x" THINK "y" THINK_END "z", "R{r}T{x<think>y</think>z}");
    expect(true, "a" THINK "b" THINK_END "c" THINK_END "d", "R{a<think>b}T{c</think>d}");
    expect(true, "r" THINK_END "\n" THINK "\ns" THINK_END "x", "R{r\ns}T{x}");
}

static void calls_inside_reasoning_are_reasoning(void **state) {
    (void)state;
    expect(true, "a\n" CALL("f>") "\n" THINK_END "b", "R{a\n<tool_call>\n<function=f>\n</function>\n</tool_call>}T{b}");
}

static void calls_come_between_content(void **state) {
    (void)state;
    expect(false, CALL("f>"), "C{f {}}");
    expect(true, "r\n" THINK_END "\n\n" CALL("f>\n<parameter=a>\n1\n</parameter>"), "R{r}C{f {\"a\": \"1\"}}");
    expect(false, "Hi.\n\n" CALL("f>") "\n" CALL("g>") "\n", "T{Hi.}C{f {}}C{g {}}");
    expect(false, "Hi.\n\n" CALL("f>") "\n\nBye.", "T{Hi.}C{f {}}T{\n\nBye.}");
    expect(false, CALL("f>") "\n\nBye.\n", "C{f {}}T{Bye.\n}");
    expect(false, CALL("f>") "\n" THINK "\nhm\n" THINK_END "\n\n" CALL("g>"), "C{f {}}R{hm}C{g {}}");
}

static void values_keep_all_that_is_theirs(void **state) {
    (void)state;
    expect(false, CALL("f>\n<parameter=a>\n\n</parameter>\n<parameter=b>\nx\n\ny\n\n</parameter>"),
           "C{f {\"a\": \"\", \"b\": \"x\\n\\ny\\n\"}}");
    expect(false, CALL("f>\n<parameter=a>\n</parameter>\n</parameter>"), "C{f {\"a\": \"</parameter>\"}}");
    expect(false, CALL("f>\n<parameter=a>\n</function>\n</parameter>\n</function> no\n</parameter>"),
           "C{f {\"a\": \"</function>\\n</parameter>\\n</function> no\"}}");
    expect(false, CALL("f>\n<parameter=a>\n" CALL_BEGIN CALL_END THINK THINK_END " x\n</parameter>"),
           "C{f {\"a\": \"<tool_call></tool_call><think></think> x\"}}");
    expect(false, CALL("f>\n<parameter=a>\nż日👩\n</parameter>"), "C{f {\"a\": \"ż日👩\"}}");
    /* Without the format's newlines, as models write at times. */
    expect(false, CALL_BEGIN "<function=f><parameter=a>1</parameter><parameter=b></parameter></function>" CALL_END,
           "C{f {\"a\": \"1\", \"b\": \"\"}}");
}

static void malformed_calls_are_content(void **state) {
    static const char *const bodies[] = {
        "",
        "{\"name\": \"f\"}",
        "\n<function=f>\n",
        "\n<function=>\n</function>\n",
        "\n<function=f\n>\n</function>\n",
        "\n<function=f>\n</function>\nx\n",
        "\nx<function=f>\n</function>\n",
        "\n<function=f>\nx\n</function>\n",
        "\n<function=f>\n<parameter=>\n1\n</parameter>\n</function>\n",
        "\n<function=f>\n<parameter=a>\n1\n</parameter>\n",
        "\n<function=f>\n<parameter=a>\n1\n</function>\n",
        "\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=a>\n1\n</parameter>\n</function>\n",
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(bodies); i++) {
        char output[256], expected[256];

        snprintf(output, sizeof output, "a\n\n" CALL_BEGIN "%s" CALL_END "\n\nb", bodies[i]);
        snprintf(expected, sizeof expected, "T{a\n\n<tool_call>%s</tool_call>\n\nb}", bodies[i]);
        expect(false, output, expected);
    }
    expect(false, CALL_END "a" CALL_END, "T{</tool_call>a</tool_call>}");
    expect(false, CALL_BEGIN "\n<function=f>\n</function>", "T{<tool_call>\n<function=f>\n</function>}");
    expect(false, "a\n" CALL_BEGIN "\n<function=f>\n<parameter=a>\n" CALL_END "b",
           "T{a\n<tool_call>\n<function=f>\n<parameter=a>\n</tool_call>b}");
    expect(false, CALL_BEGIN "x" CALL("f>"), "T{<tool_call>x}C{f {}}");
}

static void a_call_over_its_limit_is_content(void **state) {
    struct chat_parse_config config = {.call_bytes_max = 12};

    (void)state;
    expect_ids("a\n" CALL("f>") "b", config, "T{a\n<tool_call>\n<function=f>\n</function>\n</tool_call>b}");
    expect_text("a\n" CALL("f>") "b", config, "T{a\n<tool_call>\n<function=f>\n</function>\n</tool_call>b}");
    config.call_bytes_max = 40;
    expect_text(CALL("f>") CALL("long name that is over>"), config,
                "C{f {}}T{<tool_call>\n<function=long name that is over>\n</function>\n</tool_call>}");
    config = (struct chat_parse_config){.arguments_bytes_max = 64};
    expect_ids(CALL("f>\n<parameter=a>\n1\n</parameter>"), config,
               "T{<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>}");
}

static void ids_decide_if_they_are_known(void **state) {
    struct chat_parse_config config = {.in_reasoning = true};

    (void)state;
    expect_ids("a</think>b" THINK_END "<tool_call>\n<function=f>\n</function>\n</tool_call>", config,
               "R{a</think>b}T{<tool_call>\n<function=f>\n</function>\n</tool_call>}");
    config.in_reasoning = false;
    expect_ids(CALL("f>\n<parameter=a>\n</tool_call>\n</parameter>"), config, "C{f {\"a\": \"</tool_call>\"}}");
    expect_ids("<|im_end|>a" END "b" CALL("f>"), config, "T{<|im_end|>a}");
    expect_text("a" END "b", config, "T{a<|im_end|>b}");
}

static void bytes_that_are_no_text_are_replaced(void **state) {
    (void)state;
    expect(false, "a\xff\xc3(\xe6\x97", "T{a\xef\xbf\xbd\xef\xbf\xbd(\xef\xbf\xbd}");
    expect(true, "\xf0\x9f\x91" THINK_END "\xa9", "R{\xef\xbf\xbd}T{\xef\xbf\xbd}");
    expect(false, CALL("f>\n<parameter=a>\n\xe6\x97<\n</parameter>"), "C{f {\"a\": \"\xef\xbf\xbd<\"}}");
}

static void half_marks_are_text(void **state) {
    (void)state;
    expect(true, "a</thin</think", "R{a</thin</think}");
    expect(false, "<tool_cal<<tool_call\n<tool_call", "T{<tool_cal<<tool_call\n<tool_call}");
    expect(false, "<think", "T{<think}");
    expect(true, "</" THINK_END "<", "R{</}T{<}");
}

static void arguments_get_the_types_of_the_schema(void **state) {
    static const char tools_json[] =
        "[{\"name\":\"other\"},{\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":{\"type\":\"object\","
        "\"properties\":{\"s\":{\"type\":\"string\"},\"i\":{\"type\":\"integer\"},\"n\":{\"type\":\"number\"},\"b\":{"
        "\"type\":\"boolean\"},\"o\":{\"type\":\"object\"},\"a\":{\"type\":\"array\"},\"z\":{\"type\":\"null\"},\"sn\":"
        "{"
        "\"type\":[\"string\",\"null\"]},\"any\":{\"anyOf\":[{\"type\":\"integer\"},{\"oneOf\":[{\"type\":\"array\"}]}]"
        "}"
        ",\"e\":{\"enum\":[1,\"x\"]},\"odd\":{\"type\":5},\"none\":{}}}}}]";
    static const char *const cases[][3] = {
        {"s", "5", "\"5\""},
        {"s", " null ", "\" null \""},
        {"i", "5", "5"},
        {"i", " -12345678901234567890\n", "-12345678901234567890"},
        {"i", "5.0", "\"5.0\""},
        {"i", "five", "\"five\""},
        {"i", "[5]", "\"[5]\""},
        {"i", "", "\"\""},
        {"n", "5", "5"},
        {"n", "1e+21", "1e+21"},
        {"n", "1e999", "\"1e999\""},
        {"n", "inf", "\"inf\""},
        {"b", "True", "true"},
        {"b", "false", "false"},
        {"b", "False", "false"},
        {"b", "yes", "\"yes\""},
        {"b", "1", "\"1\""},
        {"o", "{\"k\": [1, {\"z\": \"ż\"}], \"e\": \"\"}", "{\"k\": [1, {\"z\": \"ż\"}], \"e\": \"\"}"},
        {"o", "{\"k\": 1, \"k\": 2}", "\"{\\\"k\\\": 1, \\\"k\\\": 2}\""},
        {"o", "[]", "\"[]\""},
        {"a", "[\n  1,\n  \"a\"\n]", "[1, \"a\"]"},
        {"a", "['a']", "\"['a']\""},
        {"z", "None", "null"},
        {"z", "null", "null"},
        {"z", "nil", "\"nil\""},
        {"sn", "None", "null"},
        {"sn", "5", "\"5\""},
        {"any", "7", "7"},
        {"any", "[7]", "[7]"},
        {"any", "7.5", "\"7.5\""},
        {"e", "1", "1"},
        {"e", "x", "\"x\""},
        {"odd", "1", "\"1\""},
        {"none", "1", "\"1\""},
        {"unknown", "1", "\"1\""},
    };
    struct value_arena arena;
    struct report report;
    struct value tools;

    (void)state;
    value_arena_init(&arena, TEXT_BYTES_MAX);
    if (value_from_json(&arena, "tools", span_of(tools_json), VALUE_DEPTH_MAX, &tools, &report) != 0)
        fail_msg("%s", report.line);
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        char output[256], expected[256];

        snprintf(output, sizeof output, CALL("f>\n<parameter=%s>\n%s\n</parameter>"), cases[i][0], cases[i][1]);
        snprintf(expected, sizeof expected, "C{f {\"%s\": %s}}", cases[i][0], cases[i][2]);
        expect_ids(output, (struct chat_parse_config){.tools = &tools}, expected);
        snprintf(output, sizeof output, CALL("g>\n<parameter=%s>\n5\n</parameter>"), cases[i][0]);
        snprintf(expected, sizeof expected, "C{g {\"%s\": \"5\"}}", cases[i][0]);
        expect_ids(output, (struct chat_parse_config){.tools = &tools}, expected);
    }
    value_arena_deinit(&arena);
}

static void content_is_not_held_back_without_need(void **state) {
    static const char *const pieces[][2] = {
        /* fed, delivered so far */
        {"Hel", "T{Hel"},
        {"lo\n", "T{Hello"},
        {"\nyou", "T{Hello\n\nyou"},
        {" <tool", "T{Hello\n\nyou "},
        {"s>", "T{Hello\n\nyou <tools>"},
        {"<think>", "T{Hello\n\nyou <tools><think>"},
        {"\xe6\x97", "T{Hello\n\nyou <tools><think>"},
        {"\xa5<", "T{Hello\n\nyou <tools><think>日"},
    };
    struct record record;
    struct chat_parse parse;

    (void)state;
    start(&parse, (struct chat_parse_config){.text_marks = true}, &record);
    for (size_t i = 0; i < ARRAY_LEN(pieces); i++) {
        feed(&parse, -1, pieces[i][0], strlen(pieces[i][0]));
        assert_true(span_is(text_span(&record.text), pieces[i][1]));
    }
    finish(&parse, &record);
    text_deinit(&record.text);
}

static void long_deltas_are_cut_between_characters(void **state) {
    (void)state;
    for (size_t n_before = 0; n_before < 4; n_before++) { /* each phase against the delta's size */
        char output[2048] = {0}, expected[2056];

        memset(output, 'x', n_before);
        while (strlen(output) + 4 < 3 * CHAT_PARSE_DELTA_BYTES)
            strcat(output, "日a");
        snprintf(expected, sizeof expected, "T{%s}", output);
        expect_ids(output, (struct chat_parse_config){0}, expected);
    }
}

/* ---- what the template renders is parsed back ---- */

/* A schema that says for each argument the type it has. */
static void schema_of(struct value_arena *arena, const struct value *name, const struct value *arguments,
                      struct value *tools) {
    static const char *const types[] = {"null", "boolean", "integer", "number", "string", "array", "object"};
    struct value *tool, *place, *properties;

    *tools = (struct value){.kind = VALUE_ARRAY};
    assert_int_equal(value_array_add(arena, tools, &tool), 0);
    *tool = (struct value){.kind = VALUE_MAP};
    assert_int_equal(value_map_add(arena, tool, span_of("name"), &place), 0);
    *place = *name;
    assert_int_equal(value_map_add(arena, tool, span_of("parameters"), &place), 0);
    *place = (struct value){.kind = VALUE_MAP};
    assert_int_equal(value_map_add(arena, place, span_of("properties"), &properties), 0);
    *properties = (struct value){.kind = VALUE_MAP};
    for (uint32_t i = 0; i < arguments->map.n; i++) {
        assert_int_equal(value_map_add(arena, properties, arguments->map.pairs[i].key, &place), 0);
        *place = (struct value){.kind = VALUE_MAP};
        assert_int_equal(value_map_add(arena, place, span_of("type"), &tool), 0);
        assert_int_equal(value_set_string(arena, tool, span_of(types[arguments->map.pairs[i].value.kind])), 0);
    }
}

/* Feeds a rendered prompt from byte `begin` on: the marks in its markup by id, all else as text. */
static void feed_prompt(struct chat_parse *parse, const struct chat_prompt *prompt, size_t begin) {
    for (size_t i = 0; i < prompt->n_segments; i++) {
        struct chat_segment segment = prompt->segments[i];

        if (segment.end <= begin)
            continue;
        for (size_t at = segment.begin > begin ? segment.begin : begin; at < segment.end;) {
            struct span rest = {prompt->text.bytes + at, segment.end - at};
            size_t n = 1;
            int32_t id = -1;

            for (int mark = 0; segment.is_markup && mark < (int)ARRAY_LEN(mark_spellings); mark++)
                if (span_starts_with(rest, mark_spellings[mark])) {
                    n = strlen(mark_spellings[mark]);
                    id = ID_BASE + mark;
                }
            feed(parse, id, rest.bytes, n);
            at += n;
        }
    }
}

static void round_trip(struct value_arena *arena, const struct value *message, uint32_t call_idx) {
    static const char head[] = "\n<|im_start|>assistant\n";
    const struct value *calls = value_get(message, "tool_calls");
    const struct value *function = value_get(&calls->array.items[call_idx], "function");
    const struct value *name = value_get(function, "name"), *arguments = value_get(function, "arguments");
    const struct value *reasoning = value_get(message, "reasoning_content"), *content = value_get(message, "content");
    struct value messages = {.kind = VALUE_ARRAY}, *only, *place, tools;
    struct text expected;
    struct record record;
    struct chat_parse parse;
    struct chat_prompt prompt;
    struct report report;

    assert_int_equal(value_array_add(arena, &messages, &only), 0);
    *only = (struct value){.kind = VALUE_MAP};
    for (uint32_t i = 0; i < message->map.n; i++) { /* the message with this call alone */
        assert_int_equal(value_map_add(arena, only, message->map.pairs[i].key, &place), 0);
        *place = message->map.pairs[i].value;
    }
    place = (struct value *)(uintptr_t)value_get(only, "tool_calls");
    place->array.items += call_idx;
    place->array.n = 1;
    schema_of(arena, name, arguments, &tools);

    chat_prompt_init(&prompt, TEXT_BYTES_MAX);
    if (chat_render(&messages, NULL, &(struct chat_options){.continuation = true}, &prompt, &report) != 0)
        fail_msg("%s", report.line);
    assert_true(span_starts_with(text_span(&prompt.text), head));
    start(&parse, (struct chat_parse_config){.tools = &tools}, &record);
    feed_prompt(&parse, &prompt, strlen(head));
    finish(&parse, &record);

    text_init(&expected, TEXT_BYTES_MAX);
    text_add_string(&expected, "}C{");
    text_add(&expected, name->text.bytes, name->text.n);
    text_add_string(&expected, " ");
    value_write_json(&expected, arguments);
    text_add_string(&expected, "}");
    text_add(&expected, "", 1);
    record.text.n--;
    if (!span_ends_with(text_span(&record.text), expected.bytes + (record.text.bytes[0] == 'C')))
        fail_msg("gives %s\nnot   %s", record.text.bytes, expected.bytes);

    /* What comes before the call, if nothing was split out of the content. */
    if (!reasoning || span_strip(reasoning->text).n == 0) {
        struct span text = content->kind == VALUE_STRING ? span_strip(content->text) : (struct span){0};

        text_clear(&expected);
        if (text.n > 0 && span_find(text, "</think>") < 0) {
            text_add_string(&expected, "T{");
            text_add(&expected, text.bytes, text.n);
            text_add_string(&expected, "}C{");
            text_add(&expected, "", 1);
            assert_true(span_starts_with(text_span(&record.text), expected.bytes));
        }
    }
    text_deinit(&expected);
    text_deinit(&record.text);
    chat_prompt_deinit(&prompt);
}

static void rendered_calls_are_parsed_back(void **state) {
    struct value_arena arena;
    struct value cases;
    int n_calls = 0;

    (void)state;
    value_arena_init(&arena, 64 << 20);
    cases = chat_cases_read(&arena);
    for (uint32_t i = 0; i < cases.array.n; i++) {
        const struct value *messages = value_get(&cases.array.items[i], "messages");

        for (uint32_t m = 0; m < messages->array.n; m++) {
            const struct value *calls = value_get(&messages->array.items[m], "tool_calls");

            for (uint32_t call = 0; calls && call < calls->array.n; call++, n_calls++)
                round_trip(&arena, &messages->array.items[m], call);
        }
    }
    assert_true(n_calls > 0);
    value_arena_deinit(&arena);
}

static int seed(void **state) {
    (void)state;
    random_state = 20240607;
    print_message("seed %llu\n", (unsigned long long)random_state);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reasoning_and_content_lose_the_newlines_of_the_format),
        cmocka_unit_test(think_tags_count_where_reasoning_can_begin_and_end),
        cmocka_unit_test(calls_inside_reasoning_are_reasoning),
        cmocka_unit_test(calls_come_between_content),
        cmocka_unit_test(values_keep_all_that_is_theirs),
        cmocka_unit_test(malformed_calls_are_content),
        cmocka_unit_test(a_call_over_its_limit_is_content),
        cmocka_unit_test(ids_decide_if_they_are_known),
        cmocka_unit_test(bytes_that_are_no_text_are_replaced),
        cmocka_unit_test(half_marks_are_text),
        cmocka_unit_test(arguments_get_the_types_of_the_schema),
        cmocka_unit_test(content_is_not_held_back_without_need),
        cmocka_unit_test(long_deltas_are_cut_between_characters),
        cmocka_unit_test(rendered_calls_are_parsed_back),
    };

    return cmocka_run_group_tests(tests, seed, NULL);
}
