#include "chat_call.h"

#include <string.h>

#include "base.h"
#include "report.h"
#include "value.h"

enum { SCHEMA_DEPTH_MAX = 8 };
enum type_bits {
    TYPE_NULL = 1,
    TYPE_BOOLEAN = 2,
    TYPE_INTEGER = 4,
    TYPE_NUMBER = 8,
    TYPE_STRING = 16,
    TYPE_ARRAY = 32,
    TYPE_OBJECT = 64,
};

static unsigned type_named(const struct value *name) {
    static const struct {
        const char *name;
        unsigned type;
    } types[] = {
        {"null", TYPE_NULL},     {"boolean", TYPE_BOOLEAN}, {"integer", TYPE_INTEGER}, {"number", TYPE_NUMBER},
        {"string", TYPE_STRING}, {"array", TYPE_ARRAY},     {"object", TYPE_OBJECT},
    };

    for (size_t i = 0; name->kind == VALUE_STRING && i < ARRAY_LEN(types); i++)
        if (span_is(name->text, types[i].name))
            return types[i].type;
    return 0;
}

static unsigned type_of(const struct value *value) {
    static const unsigned types[] = {
        [VALUE_NIL] = TYPE_NULL,     [VALUE_BOOL] = TYPE_BOOLEAN,  [VALUE_INT] = TYPE_INTEGER,
        [VALUE_FLOAT] = TYPE_NUMBER, [VALUE_STRING] = TYPE_STRING, [VALUE_ARRAY] = TYPE_ARRAY,
        [VALUE_MAP] = TYPE_OBJECT,
    };

    return types[value->kind];
}

/* The types a schema names: by `type`, else by its alternatives, else by the values it lists. 0: it says nothing. */
static unsigned types_of_schema(const struct value *schema, int depth) {
    static const char *const alternatives[] = {"anyOf", "oneOf"};
    const struct value *type = value_get(schema, "type"), *list;
    unsigned types = 0;

    if (type && type->kind == VALUE_STRING)
        return type_named(type);
    if (type && type->kind == VALUE_ARRAY) {
        for (uint32_t i = 0; i < type->array.n; i++)
            types |= type_named(&type->array.items[i]);
        return types;
    }
    for (size_t a = 0; depth < SCHEMA_DEPTH_MAX && a < ARRAY_LEN(alternatives); a++) {
        list = value_get(schema, alternatives[a]);
        for (uint32_t i = 0; list && list->kind == VALUE_ARRAY && i < list->array.n; i++)
            types |= types_of_schema(&list->array.items[i], depth + 1);
    }
    list = value_get(schema, "enum");
    for (uint32_t i = 0; types == 0 && list && list->kind == VALUE_ARRAY && i < list->array.n; i++)
        types |= type_of(&list->array.items[i]);
    return types;
}

/* The map of a tool's properties, or NULL. */
static const struct value *properties_of(const struct value *tools, struct span name) {
    for (uint32_t i = 0; tools && tools->kind == VALUE_ARRAY && i < tools->array.n; i++) {
        const struct value *tool = &tools->array.items[i], *function = value_get(tool, "function"), *tool_name;

        if (function)
            tool = function;
        tool_name = value_get(tool, "name");
        if (!tool_name || tool_name->kind != VALUE_STRING || !span_equal(tool_name->text, name))
            continue;
        tool = value_get(tool, "parameters");
        return tool ? value_get(tool, "properties") : NULL;
    }
    return NULL;
}

static int set_typed(struct value_arena *arena, struct value *value, struct span text, unsigned types) {
    struct span bare = span_strip(text);
    struct value parsed;
    struct report ignored;

    if ((types & TYPE_NULL) && (span_is(bare, "null") || span_is(bare, "None"))) {
        *value = (struct value){.kind = VALUE_NIL};
        return 0;
    }
    if ((types & TYPE_BOOLEAN) &&
        (span_is(bare, "true") || span_is(bare, "True") || span_is(bare, "false") || span_is(bare, "False"))) {
        *value = (struct value){.kind = VALUE_BOOL, .boolean = bare.n == 4};
        return 0;
    }
    if (types & TYPE_NUMBER)
        types |= TYPE_INTEGER;
    types &= TYPE_INTEGER | TYPE_NUMBER | TYPE_ARRAY | TYPE_OBJECT;
    if (types && value_from_json(arena, "", bare, VALUE_DEPTH_MAX - 1, &parsed, &ignored) == 0 &&
        (type_of(&parsed) & types)) {
        *value = parsed;
        return 0;
    }
    return value_set_string(arena, value, text);
}

static struct span skip_space(struct span span) {
    while (span.n > 0 && strchr(" \t\r\n", span.bytes[0]) && span.bytes[0])
        span = span_from(span, 1);
    return span;
}

/* Behind `tag`, if the span begins with it. */
static bool take(struct span *span, const char *tag) {
    if (!span_starts_with(*span, tag))
        return false;
    *span = span_from(*span, strlen(tag));
    return true;
}

/* "NAME>": not empty, on one line. */
static bool take_name(struct span *span, struct span *ret_name) {
    size_t n = 0;

    while (n < span->n && span->bytes[n] != '>' && span->bytes[n] != '\n')
        n++;
    if (n == 0 || n == span->n || span->bytes[n] != '>')
        return false;
    *ret_name = (struct span){span->bytes, n};
    *span = span_from(*span, n + 1);
    return true;
}

static bool take_function_end(struct span *span) {
    struct span rest = skip_space(*span);

    if (!take(&rest, "</function>") || skip_space(rest).n > 0)
        return false;
    *span = (struct span){rest.bytes, 0};
    return true;
}

static bool take_value(struct span *span, struct span *ret_value) {
    struct span value, rest = *span;
    ptrdiff_t at;

    take(&rest, "\n");
    value.bytes = rest.bytes;
    while ((at = span_find(rest, "</parameter>")) >= 0) {
        struct span after = span_from(rest, (size_t)at + strlen("</parameter>")), end = after;

        if (span_starts_with(skip_space(after), "<parameter=") || take_function_end(&end)) {
            value.n = (size_t)(rest.bytes + at - value.bytes);
            if (span_ends_with(value, "\n"))
                value.n--;
            *ret_value = value;
            *span = after;
            return true;
        }
        rest = after;
    }
    return false;
}

int chat_call_parse(struct value_arena *arena, struct span body, const struct value *tools, struct span *ret_name,
                    struct value *ret_arguments) {
    struct value arguments = {.kind = VALUE_MAP}, *value;
    const struct value *properties;
    struct span rest = skip_space(body), name, key, text;

    if (!take(&rest, "<function=") || !take_name(&rest, &name))
        return CHAT_CALL_E_MALFORMED;
    properties = properties_of(tools, name);
    while (!take_function_end(&rest)) {
        const struct value *schema;

        rest = skip_space(rest);
        if (!take(&rest, "<parameter=") || !take_name(&rest, &key) || !take_value(&rest, &text))
            return CHAT_CALL_E_MALFORMED;
        if (arguments.map.n == CHAT_CALL_PARAMETERS_MAX || value_get_span(&arguments, key))
            return CHAT_CALL_E_MALFORMED;
        schema = properties ? value_get_span(properties, key) : NULL;
        if (value_map_add(arena, &arguments, key, &value) != 0 ||
            set_typed(arena, value, text, schema ? types_of_schema(schema, 0) : 0) != 0)
            return CHAT_CALL_E_MALFORMED;
    }
    *ret_name = name;
    *ret_arguments = arguments;
    return 0;
}

bool chat_call_is_closed(struct span body) {
    while (body.n > 0 && strchr(" \t\r\n", body.bytes[body.n - 1]) && body.bytes[body.n - 1])
        body.n--;
    return span_ends_with(body, "</parameter>") || span_ends_with(body, "</function>");
}
