#include "chat.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "report.h"
#include "value.h"

/* What the template does where the reference cases show it: messages are stripped as by Python's str.strip(); system
 * text goes under the tools; reasoning is kept after the last real user message, and then only if there is some; a
 * string in reasoning_content, even a blank one, keeps inline think tags where they are; an empty system message makes
 * an empty turn, but nothing under tools.
 *
 * Inferred from how such templates work, not shown by a case:
 *   - arguments may be missing; anything else that is no map is refused. We also take a string that holds a JSON
 *     object, since that is what many clients send; the template would refuse it.
 *   - a tool call may be the function itself, without the `function` around it.
 *   - a tool result as the very first message gets no head of a turn.
 *   - tool_calls that are no list, and reasoning_content that is no string, count as missing.
 *   - in a list of content parts, a part with a `text` is text whatever its type says, and a scalar there is spelled
 *     as by Python's str().
 * Refused here although the template renders something: images and videos, for which there is no encoder; tools that
 * are no list of maps, messages and parts that are no maps; keys of a message that neither it nor a client we know of
 * has, since they are slips. */

static const char tools_head[] = "<|im_start|>system\n"
                                 "# Tools\n\n"
                                 "You have access to the following functions:\n\n"
                                 "<tools>";
static const char tools_tail[] =
    "\n</tools>\n\n"
    "If you choose to call a function ONLY reply in the following format with NO suffix:\n\n"
    "<tool_call>\n"
    "<function=example_function_name>\n"
    "<parameter=example_parameter_1>\n"
    "value_1\n"
    "</parameter>\n"
    "<parameter=example_parameter_2>\n"
    "This is the value for the second parameter\n"
    "that can span\n"
    "multiple lines\n"
    "</parameter>\n"
    "</function>\n"
    "</tool_call>\n\n"
    "<IMPORTANT>\n"
    "Reminder:\n"
    "- Function calls MUST follow the specified format: an inner <function=...></function> block must be nested within "
    "<tool_call></tool_call> XML tags\n"
    "- Required parameters MUST be specified\n"
    "- You may provide optional reasoning for your function call in natural language BEFORE the function call, but NOT "
    "after\n"
    "- If there is no function call available, answer the question like normal with your current knowledge and do not "
    "tell the user about function calls\n"
    "</IMPORTANT>";

enum { TREE_FACTOR = 64 }; /* memory of a tree per byte of its JSON text: "[[[[" takes most */

struct renderer {
    const struct value *messages;
    const struct chat_options *options;
    struct chat_prompt *prompt;
    struct report *report;
    struct text joined;           /* the content of one message that came in parts */
    struct value_arena arguments; /* those of one tool call that came as JSON text */
    ptrdiff_t query_idx;          /* of the last real user message; -1: none */
};

void chat_prompt_init(struct chat_prompt *prompt, size_t bytes_max) {
    *prompt = (struct chat_prompt){0};
    text_init(&prompt->text, bytes_max);
}

void chat_prompt_deinit(struct chat_prompt *prompt) {
    text_deinit(&prompt->text);
    free(prompt->segments);
    *prompt = (struct chat_prompt){0};
}

/* Says that what was appended since the last segment has this origin. Failures stay in the text. */
static void close_segment(struct chat_prompt *prompt, bool is_markup) {
    struct chat_segment *last = prompt->n_segments ? &prompt->segments[prompt->n_segments - 1] : NULL;
    size_t begin = last ? last->end : 0, end = prompt->text.n;

    assert(prompt->n_segments <= prompt->n_segments_room && (prompt->segments || prompt->n_segments_room == 0));
    if (begin == end)
        return;
    if (last && last->is_markup == is_markup) {
        last->end = end;
        return;
    }
    if (prompt->n_segments == prompt->n_segments_room) {
        size_t n_room = prompt->n_segments_room ? prompt->n_segments_room * 2 : 32;
        struct chat_segment *segments = realloc(prompt->segments, n_room * sizeof *segments);

        if (!segments) {
            prompt->text.error = -ENOMEM;
            return;
        }
        prompt->segments = segments;
        prompt->n_segments_room = n_room;
    }
    prompt->segments[prompt->n_segments++] = (struct chat_segment){begin, end, is_markup};
}

static void put_markup(struct renderer *r, const char *markup) {
    text_add_string(&r->prompt->text, markup);
    close_segment(r->prompt, true);
}

static void put_text(struct renderer *r, struct span text) {
    text_add(&r->prompt->text, text.bytes, text.n);
    close_segment(r->prompt, false);
}

static const char *const role_names[] = {"system", "user", "assistant", "tool"};
enum role { ROLE_SYSTEM, ROLE_USER, ROLE_ASSISTANT, ROLE_TOOL, ROLE_NONE };

static enum role role_of(const struct value *message) {
    const struct value *role = value_get(message, "role");

    for (int i = 0; role && role->kind == VALUE_STRING && i < ROLE_NONE; i++)
        if (span_is(role->text, role_names[i]))
            return (enum role)i;
    return ROLE_NONE;
}

static bool has_type(const struct value *part, const char *name) {
    const struct value *type = value_get(part, "type");

    return type && type->kind == VALUE_STRING && span_is(type->text, name);
}

static int add_part(struct renderer *r, uint32_t message_idx, uint32_t part_idx, const struct value *part) {
    const struct value *text = value_get(part, "text");

    if (value_get(part, "image") || value_get(part, "image_url") || has_type(part, "image") ||
        value_get(part, "video") || has_type(part, "video"))
        return report_error(r->report, CHAT_E_REFUSED,
                            "messages[%u].content[%u]: images and videos are not supported, send text", message_idx,
                            part_idx);
    if (!text)
        return report_error(r->report, CHAT_E_REFUSED, "messages[%u].content[%u]: a part must be a map with a `text`",
                            message_idx, part_idx);
    if (!value_is_scalar(text))
        return report_error(r->report, CHAT_E_REFUSED, "messages[%u].content[%u].text: must be a string", message_idx,
                            part_idx);
    value_write_str(&r->joined, text);
    return 0;
}

/* A message's content, stripped. The span is good until the next call. */
static int read_content(struct renderer *r, uint32_t message_idx, struct span *ret_content) {
    const struct value *content = value_get(&r->messages->array.items[message_idx], "content");

    *ret_content = (struct span){0};
    if (!content || content->kind == VALUE_NIL)
        return 0;
    if (content->kind == VALUE_STRING) {
        *ret_content = span_strip(content->text);
        return 0;
    }
    if (content->kind != VALUE_ARRAY)
        return report_error(r->report, CHAT_E_REFUSED,
                            "messages[%u].content: must be a string, a list of text parts or nil", message_idx);
    text_clear(&r->joined);
    for (uint32_t i = 0; i < content->array.n; i++) {
        int e = add_part(r, message_idx, i, &content->array.items[i]);

        if (e != 0)
            return e;
    }
    if (r->joined.error != 0) {
        r->prompt->text.error = r->joined.error;
        return 0;
    }
    *ret_content = span_strip(text_span(&r->joined));
    return 0;
}

/* Of the last user message that is more than the result of a tool. */
static int find_query(struct renderer *r) {
    r->query_idx = -1;
    for (uint32_t i = r->messages->array.n; i-- > 0 && r->query_idx < 0;) {
        struct span content;
        int e;

        if (role_of(&r->messages->array.items[i]) != ROLE_USER)
            continue;
        e = read_content(r, i, &content);
        if (e != 0)
            return e;
        if (!span_starts_with(content, "<tool_response>") || !span_ends_with(content, "</tool_response>"))
            r->query_idx = i;
    }
    if (r->query_idx < 0 && !r->options->continuation)
        return report_error(r->report, CHAT_E_REFUSED, "messages: there is no user message with text of its own");
    return 0;
}

static bool has_tools(const struct value *tools) {
    return tools && tools->kind == VALUE_ARRAY && tools->array.n > 0;
}

enum { SHOWN_BYTES_MAX = 40 };

struct shown {
    char text[SHOWN_BYTES_MAX + 1];
};

/* A caller's word for a report; a zero in it would end the line. */
static struct shown shown(struct span word) {
    struct shown shown = {""};

    word = span_cut(word, SHOWN_BYTES_MAX);
    for (size_t i = 0; i < word.n; i++)
        shown.text[i] = word.bytes[i] ? word.bytes[i] : '?';
    return shown;
}

/* The template's, and those that clients carry along, which are ignored. */
static bool is_message_key(struct span key) {
    static const char *const keys[] = {"role",         "content", "reasoning_content", "tool_calls", "name",
                                       "tool_call_id", "refusal", "annotations",       "reasoning"};

    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        if (span_is(key, keys[i]))
            return true;
    return false;
}

/* A key that is nil counts as not given: answers of other servers, sent back, are full of them. */
static int check_keys(struct renderer *r, uint32_t message_idx, const struct value *message) {
    for (uint32_t i = 0; i < message->map.n; i++) {
        struct span key = message->map.pairs[i].key;

        if (message->map.pairs[i].value.kind != VALUE_NIL && !is_message_key(key))
            return report_error(r->report, CHAT_E_REFUSED,
                                "messages[%u]: there is no key \"%s\"; a message has role, content, "
                                "reasoning_content, tool_calls, and may have name, tool_call_id, refusal, annotations "
                                "and reasoning, which are ignored",
                                message_idx, shown(key).text);
    }
    return 0;
}

static int check_message(struct renderer *r, uint32_t message_idx) {
    static const char roles[] = "system, user, assistant or tool";
    const struct value *message = &r->messages->array.items[message_idx], *role = value_get(message, "role");
    int e;

    if (message->kind != VALUE_MAP)
        return report_error(r->report, CHAT_E_REFUSED, "messages[%u]: must be a map", message_idx);
    e = check_keys(r, message_idx, message);
    if (e != 0 || role_of(message) != ROLE_NONE)
        return e;
    if (!role || role->kind == VALUE_NIL)
        return report_error(r->report, CHAT_E_REFUSED, "messages[%u].role: is missing; it must be %s", message_idx,
                            roles);
    if (role->kind != VALUE_STRING)
        return report_error(r->report, CHAT_E_REFUSED, "messages[%u].role: must be a string: %s", message_idx, roles);
    return report_error(r->report, CHAT_E_REFUSED, "messages[%u].role: is \"%s\"; it must be %s", message_idx,
                        shown(role->text).text, roles);
}

static int check_request(struct renderer *r, const struct value *tools) {
    if (r->messages->kind != VALUE_ARRAY || r->messages->array.n == 0)
        return report_error(r->report, CHAT_E_REFUSED, "messages: must be a list with at least one message");
    if (tools && tools->kind != VALUE_NIL && tools->kind != VALUE_ARRAY)
        return report_error(r->report, CHAT_E_REFUSED, "tools: must be a list of maps or nil");
    for (uint32_t i = 0; has_tools(tools) && i < tools->array.n; i++)
        if (tools->array.items[i].kind != VALUE_MAP)
            return report_error(r->report, CHAT_E_REFUSED, "tools[%u]: must be a map", i);
    if (has_tools(tools) && r->options->continuation)
        return report_error(r->report, CHAT_E_REFUSED, "tools: belong to the start of a conversation");
    for (uint32_t i = 0; i < r->messages->array.n; i++) {
        int e = check_message(r, i);

        if (e != 0)
            return e;
    }
    return 0;
}

/* The first turn: the tools, the caller's system message, or both. */
static int put_head(struct renderer *r, const struct value *tools) {
    bool has_system = role_of(&r->messages->array.items[0]) == ROLE_SYSTEM;
    struct span system = {0};
    int e;

    if (r->options->continuation) {
        put_markup(r, "\n");
        return 0;
    }
    if (!has_tools(tools) && !has_system)
        return 0;
    if (has_tools(tools)) {
        put_markup(r, tools_head);
        for (uint32_t i = 0; i < tools->array.n; i++) {
            put_markup(r, "\n");
            value_write_json(&r->prompt->text, &tools->array.items[i]);
            close_segment(r->prompt, false);
        }
        put_markup(r, tools_tail);
    } else {
        put_markup(r, "<|im_start|>system\n");
    }
    if (has_system) {
        e = read_content(r, 0, &system);
        if (e != 0)
            return e;
    }
    if (has_tools(tools) && system.n > 0)
        put_markup(r, "\n\n");
    put_text(r, system);
    put_markup(r, "<|im_end|>\n");
    return 0;
}

static struct span drop_last(struct span span, char c) {
    while (span.n > 0 && span.bytes[span.n - 1] == c)
        span.n--;
    return span;
}

/* Reasoning that stands inside the content: up to the first closing tag and from the last opening tag before it; the
 * content is what follows the last closing tag. */
static void split_inline(struct span *content, struct span *ret_reasoning) {
    ptrdiff_t first = span_find(*content, "</think>"), last = span_find_last(*content, "</think>"), open;
    struct span before;

    *ret_reasoning = (struct span){0};
    if (first < 0)
        return;
    before = drop_last((struct span){content->bytes, (size_t)first}, '\n');
    open = span_find_last(before, "<think>");
    if (open >= 0)
        before = span_from(before, (size_t)open + strlen("<think>"));
    *ret_reasoning = span_skip(before, '\n');
    *content = span_skip(span_from(*content, (size_t)last + strlen("</think>")), '\n');
}

static void put_value(struct renderer *r, const struct value *value) {
    if (value_is_scalar(value))
        value_write_str(&r->prompt->text, value);
    else
        value_write_json(&r->prompt->text, value);
    close_segment(r->prompt, false);
}

/* The map of arguments, read from JSON text if it came so; NULL in *ret_arguments: there are none. */
static int read_arguments(struct renderer *r, const struct value *function, const char *name, struct value *parsed,
                          const struct value **ret_arguments) {
    const struct value *arguments = value_get(function, "arguments");

    *ret_arguments = arguments;
    if (!arguments || arguments->kind == VALUE_MAP)
        return 0;
    if (arguments->kind != VALUE_STRING)
        return report_error(r->report, CHAT_E_REFUSED, "%s: must be a map, or a string that holds a JSON object", name);
    value_arena_clear(&r->arguments);
    if (value_from_json(&r->arguments, name, arguments->text, VALUE_DEPTH_MAX, parsed, r->report) != 0)
        return CHAT_E_REFUSED;
    if (parsed->kind != VALUE_MAP)
        return report_error(r->report, CHAT_E_REFUSED, "%s: the JSON text must be an object", name);
    *ret_arguments = parsed;
    return 0;
}

static int put_tool_call(struct renderer *r, uint32_t message_idx, uint32_t call_idx, const struct value *call) {
    const struct value *function = value_get(call, "function"), *name, *arguments;
    struct value parsed;
    char where[96];
    int e;

    if (!function)
        function = call;
    name = value_get(function, "name");
    if (!name || name->kind != VALUE_STRING)
        return report_error(r->report, CHAT_E_REFUSED, "messages[%u].tool_calls[%u]: must have a `name`, a string",
                            message_idx, call_idx);
    snprintf(where, sizeof where, "messages[%u].tool_calls[%u].arguments", message_idx, call_idx);
    e = read_arguments(r, function, where, &parsed, &arguments);
    if (e != 0)
        return e;
    put_markup(r, "<tool_call>\n<function=");
    put_text(r, name->text);
    put_markup(r, ">\n");
    for (uint32_t i = 0; arguments && i < arguments->map.n; i++) {
        put_markup(r, "<parameter=");
        put_text(r, arguments->map.pairs[i].key);
        put_markup(r, ">\n");
        put_value(r, &arguments->map.pairs[i].value);
        put_markup(r, "\n</parameter>\n");
    }
    put_markup(r, "</function>\n</tool_call>");
    return 0;
}

static int put_assistant(struct renderer *r, uint32_t message_idx, struct span content) {
    const struct value *message = &r->messages->array.items[message_idx];
    const struct value *calls = value_get(message, "tool_calls"), *given = value_get(message, "reasoning_content");
    struct span reasoning;

    if (given && given->kind == VALUE_STRING)
        reasoning = given->text;
    else
        split_inline(&content, &reasoning);
    reasoning = span_strip(reasoning);
    put_markup(r, "<|im_start|>assistant\n");
    if ((ptrdiff_t)message_idx > r->query_idx && reasoning.n > 0) {
        put_markup(r, "<think>\n");
        put_text(r, reasoning);
        put_markup(r, "\n</think>\n\n");
    }
    put_text(r, content);
    for (uint32_t i = 0; calls && calls->kind == VALUE_ARRAY && i < calls->array.n; i++) {
        int e;

        if (i > 0)
            put_markup(r, "\n");
        else if (span_strip(content).n > 0)
            put_markup(r, "\n\n");
        e = put_tool_call(r, message_idx, i, &calls->array.items[i]);
        if (e != 0)
            return e;
    }
    put_markup(r, "<|im_end|>\n");
    return 0;
}

/* Results in a row share one user turn. */
static void put_tool_result(struct renderer *r, uint32_t message_idx, struct span content) {
    const struct value *messages = r->messages->array.items;
    bool is_first = message_idx == 0, is_last = message_idx + 1 == r->messages->array.n;

    if (is_first ? r->options->continuation : role_of(&messages[message_idx - 1]) != ROLE_TOOL)
        put_markup(r, "<|im_start|>user");
    put_markup(r, "\n<tool_response>\n");
    put_text(r, content);
    put_markup(r, "\n</tool_response>");
    if (is_last || role_of(&messages[message_idx + 1]) != ROLE_TOOL)
        put_markup(r, "<|im_end|>\n");
}

static int put_message(struct renderer *r, uint32_t message_idx) {
    struct span content;
    int e = read_content(r, message_idx, &content);

    if (e != 0)
        return e;
    switch (role_of(&r->messages->array.items[message_idx])) {
    case ROLE_SYSTEM: /* put_head() has written the first */
        if (message_idx > 0 || r->options->continuation)
            return report_error(r->report, CHAT_E_REFUSED,
                                "messages[%u]: a system message may only be the first of a conversation", message_idx);
        return 0;
    case ROLE_USER:
        put_markup(r, "<|im_start|>user\n");
        put_text(r, content);
        put_markup(r, "<|im_end|>\n");
        return 0;
    case ROLE_ASSISTANT:
        return put_assistant(r, message_idx, content);
    case ROLE_TOOL:
        put_tool_result(r, message_idx, content);
        return 0;
    case ROLE_NONE: /* check_message() */
        break;
    }
    return 0;
}

static int render(struct renderer *r, const struct value *tools) {
    int e = check_request(r, tools);

    if (e == 0)
        e = find_query(r);
    if (e == 0)
        e = put_head(r, tools);
    for (uint32_t i = 0; e == 0 && i < r->messages->array.n; i++)
        e = put_message(r, i);
    if (e != 0)
        return e;
    if (r->options->add_generation_prompt)
        put_markup(r, r->options->thinking ? "<|im_start|>assistant\n<think>\n"
                                           : "<|im_start|>assistant\n<think>\n\n</think>\n\n");
    if (r->prompt->text.error == -EMSGSIZE)
        return report_error(r->report, CHAT_E_REFUSED, "messages: the prompt would be longer than %zu bytes",
                            r->prompt->text.n_max);
    return r->prompt->text.error;
}

int chat_render(const struct value *messages, const struct value *tools, const struct chat_options *options,
                struct chat_prompt *prompt, struct report *report) {
    struct renderer r = {.messages = messages, .options = options, .prompt = prompt, .report = report};
    int e;

    text_clear(&prompt->text);
    prompt->n_segments = 0;
    text_init(&r.joined, prompt->text.n_max);
    value_arena_init(&r.arguments,
                     prompt->text.n_max < SIZE_MAX / TREE_FACTOR ? prompt->text.n_max * TREE_FACTOR : SIZE_MAX);
    e = render(&r, tools);
    text_deinit(&r.joined);
    value_arena_deinit(&r.arguments);
    return e;
}
