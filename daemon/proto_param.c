#include "proto_internal.h"

#include <errno.h>
#include <inttypes.h>
#include <msgpack.h>
#include <stdio.h>

#include "utf8.h"

static const char *type_name(const msgpack_object *object) {
    switch (object->type) {
    case MSGPACK_OBJECT_NIL:
        return "nil";
    case MSGPACK_OBJECT_BOOLEAN:
        return "a bool";
    case MSGPACK_OBJECT_POSITIVE_INTEGER:
        return "an integer";
    case MSGPACK_OBJECT_NEGATIVE_INTEGER:
        return "a negative integer";
    case MSGPACK_OBJECT_FLOAT32:
    case MSGPACK_OBJECT_FLOAT64:
        return "a float";
    case MSGPACK_OBJECT_STR:
        return "a string";
    case MSGPACK_OBJECT_ARRAY:
        return "an array";
    case MSGPACK_OBJECT_MAP:
        return "a map";
    default:
        return "binary data";
    }
}

static int wrong_type(const char *name, const msgpack_object *object, const char *wanted, struct report *report) {
    return report_error(report, PROTO_E_REFUSED, "\"%s\" is %s; it must be %s", name, type_name(object), wanted);
}

/* How much of what a client wrote is repeated to it. */
static int shown(struct span text) {
    return (int)span_cut(text, 60).n;
}

static bool is_integer(const msgpack_object *object) {
    return object->type == MSGPACK_OBJECT_POSITIVE_INTEGER || object->type == MSGPACK_OBJECT_NEGATIVE_INTEGER;
}

static int decode_int(const struct proto_param *param, const msgpack_object *object, int64_t *ret,
                      struct report *report) {
    char wanted[96];

    if (!is_integer(object)) {
        snprintf(wanted, sizeof wanted, "an integer from %.0f to %.0f", param->min, param->max);
        return wrong_type(param->name, object, wanted, report);
    }
    if (object->type == MSGPACK_OBJECT_NEGATIVE_INTEGER && (double)object->via.i64 < param->min)
        return report_error(report, PROTO_E_REFUSED, "\"%s\" is %" PRId64 "; it must be from %.0f to %.0f", param->name,
                            object->via.i64, param->min, param->max);
    if (object->type == MSGPACK_OBJECT_POSITIVE_INTEGER &&
        ((double)object->via.u64 > param->max || (double)object->via.u64 < param->min))
        return report_error(report, PROTO_E_REFUSED, "\"%s\" is %" PRIu64 "; it must be from %.0f to %.0f", param->name,
                            object->via.u64, param->min, param->max);
    *ret = object->via.i64;
    return 0;
}

static int decode_number(const struct proto_param *param, const msgpack_object *object, double *ret,
                         struct report *report) {
    const char *from = param->is_above_min ? "above" : "from", *to = param->is_above_min ? "up to" : "to";
    double number;
    char wanted[96];

    if (object->type == MSGPACK_OBJECT_POSITIVE_INTEGER)
        number = (double)object->via.u64;
    else if (object->type == MSGPACK_OBJECT_NEGATIVE_INTEGER)
        number = (double)object->via.i64;
    else if (object->type == MSGPACK_OBJECT_FLOAT64 || object->type == MSGPACK_OBJECT_FLOAT32)
        number = object->via.f64;
    else {
        snprintf(wanted, sizeof wanted, "a number %s %g %s %g", from, param->min, to, param->max);
        return wrong_type(param->name, object, wanted, report);
    }
    if (!(number >= param->min && number <= param->max) || (param->is_above_min && number == param->min))
        return report_error(report, PROTO_E_REFUSED, "\"%s\" is %g; it must be %s %g %s %g", param->name, number, from,
                            param->min, to, param->max);
    *ret = number;
    return 0;
}

static int copy(struct value_arena *arena, const msgpack_object_str *string, struct span *ret) {
    struct value value;

    if (value_set_string(arena, &value, (struct span){string->ptr, string->size}) != 0)
        return -ENOMEM;
    *ret = value.text;
    return 0;
}

static int decode_name(const struct proto_param *param, const msgpack_object *object, struct value_arena *arena,
                       struct span *ret, struct report *report) {
    const msgpack_object_str *name = &object->via.str;

    if (object->type != MSGPACK_OBJECT_STR)
        return wrong_type(param->name, object, "a string", report);
    if (name->size < 1 || name->size > PROTO_NAME_BYTES_MAX)
        return report_error(report, PROTO_E_REFUSED, "\"%s\" has %u bytes; a name has 1 to %d", param->name, name->size,
                            PROTO_NAME_BYTES_MAX);
    for (size_t i = 0; i < name->size;) {
        uint32_t cp = 0;
        int k = utf8_decode((const unsigned char *)name->ptr + i, name->size - i, &cp);

        if (k <= 0 || cp < 0x20 || (cp >= 0x7f && cp < 0xa0))
            return report_error(report, PROTO_E_REFUSED,
                                "\"%s\" has the control character U+%04X as byte %zu; a name is text on one line",
                                param->name, (unsigned)cp, i);
        i += (size_t)k;
    }
    return copy(arena, name, ret);
}

static int decode_choice(const struct proto_param *param, const msgpack_object *object, struct span *ret,
                         struct report *report) {
    struct text list;

    if (object->type == MSGPACK_OBJECT_STR)
        for (const char *const *choice = param->choices; *choice; choice++)
            if (span_is((struct span){object->via.str.ptr, object->via.str.size}, *choice)) {
                *ret = span_of(*choice);
                return 0;
            }
    text_init(&list, 256);
    for (const char *const *choice = param->choices; *choice; choice++) {
        text_add_string(&list, choice == param->choices ? "one of \"" : ", \"");
        text_add_string(&list, *choice);
        text_add_string(&list, "\"");
    }
    text_add(&list, "", 1);
    if (list.error == 0 && object->type == MSGPACK_OBJECT_STR)
        report_line(report, "\"%s\" is \"%.*s\"; it must be %s", param->name,
                    shown((struct span){object->via.str.ptr, object->via.str.size}), object->via.str.ptr, list.bytes);
    else
        wrong_type(param->name, object, list.error ? "one of a few strings" : list.bytes, report);
    text_deinit(&list);
    return PROTO_E_REFUSED;
}

static int check_count(const struct proto_param *param, uint32_t n, const char *things, struct report *report) {
    if (n < param->n_min)
        return report_error(report, PROTO_E_REFUSED, "\"%s\" has %u %s; it must have at least %u", param->name, n,
                            things, param->n_min);
    if (param->n_max > 0 && n > param->n_max)
        return report_error(report, PROTO_E_REFUSED, "\"%s\" has %u %s; it may have at most %u", param->name, n, things,
                            param->n_max);
    return 0;
}

static int decode_ids(const struct proto_param *param, const msgpack_object *object, struct value_arena *arena,
                      struct param_value *ret_value, struct report *report) {
    const msgpack_object_array *array = &object->via.array;
    int32_t *ids = NULL;
    int e;

    if (object->type != MSGPACK_OBJECT_ARRAY)
        return wrong_type(param->name, object, "an array of token ids", report);
    e = check_count(param, array->size, "ids", report);
    if (e)
        return e;
    if (array->size > 0) {
        ids = value_alloc(arena, array->size * sizeof(*ids));
        if (!ids)
            return -ENOMEM;
    }
    for (uint32_t i = 0; i < array->size; i++) {
        const msgpack_object *item = &array->ptr[i];

        if (item->type != MSGPACK_OBJECT_POSITIVE_INTEGER || item->via.u64 > INT32_MAX)
            return report_error(report, PROTO_E_REFUSED,
                                is_integer(item) ? "\"%s\"[%u] is out of range; token ids are from 0 to %d"
                                                 : "\"%s\"[%u] is no integer; token ids are from 0 to %d",
                                param->name, i, INT32_MAX);
        ids[i] = (int32_t)item->via.u64;
    }
    ret_value->ids = ids;
    ret_value->n = array->size;
    return 0;
}

static int decode_strings(const struct proto_param *param, const msgpack_object *object, struct value_arena *arena,
                          struct param_value *ret_value, struct report *report) {
    const msgpack_object_array *array = &object->via.array;
    struct span *strings = NULL;
    int e;

    if (object->type != MSGPACK_OBJECT_ARRAY)
        return wrong_type(param->name, object, "an array of strings", report);
    e = check_count(param, array->size, "strings", report);
    if (e)
        return e;
    if (array->size > 0) {
        strings = value_alloc(arena, array->size * sizeof(*strings));
        if (!strings)
            return -ENOMEM;
    }
    for (uint32_t i = 0; i < array->size; i++) {
        const msgpack_object *item = &array->ptr[i];

        if (item->type != MSGPACK_OBJECT_STR)
            return report_error(report, PROTO_E_REFUSED, "\"%s\"[%u] is %s; it must be a string", param->name, i,
                                type_name(item));
        if (item->via.str.size < 1 || item->via.str.size > param->bytes_max)
            return report_error(report, PROTO_E_REFUSED, "\"%s\"[%u] has %u bytes; each has 1 to %u", param->name, i,
                                item->via.str.size, param->bytes_max);
        e = copy(arena, &item->via.str, &strings[i]);
        if (e)
            return e;
    }
    ret_value->strings = strings;
    ret_value->n = array->size;
    return 0;
}

/* Decimal digits as one writes them: no sign, no leading zero. Thus different keys are different ids. */
static bool read_id(const msgpack_object_str *key, int32_t *ret_id) {
    int64_t id = 0;

    if (key->size < 1 || key->size > 10 || (key->size > 1 && key->ptr[0] == '0'))
        return false;
    for (uint32_t i = 0; i < key->size; i++) {
        if (key->ptr[i] < '0' || key->ptr[i] > '9')
            return false;
        id = id * 10 + (key->ptr[i] - '0');
    }
    if (id > INT32_MAX)
        return false;
    *ret_id = (int32_t)id;
    return true;
}

static int decode_bias(const struct proto_param *param, const msgpack_object *object, struct value_arena *arena,
                       struct param_value *ret_value, struct report *report) {
    const msgpack_object_map *map = &object->via.map;
    struct bias_entry *bias = NULL;
    int e;

    if (object->type != MSGPACK_OBJECT_MAP)
        return wrong_type(param->name, object, "a map of token ids to numbers", report);
    e = check_count(param, map->size, "ids", report);
    if (e)
        return e;
    if (map->size > 0) {
        bias = value_alloc(arena, map->size * sizeof(*bias));
        if (!bias)
            return -ENOMEM;
    }
    for (uint32_t i = 0; i < map->size; i++) {
        const msgpack_object_str *key = &map->ptr[i].key.via.str;
        struct proto_param one = *param;
        char name[96];
        double number;

        if (!read_id(key, &bias[i].id))
            return report_error(report, PROTO_E_REFUSED,
                                "\"%s\" has the key \"%.*s\"; keys are token ids in digits, from \"0\" to \"%d\"",
                                param->name, shown((struct span){key->ptr, key->size}), key->ptr, INT32_MAX);
        snprintf(name, sizeof name, "%s.%d", param->name, bias[i].id);
        one.name = name;
        e = decode_number(&one, &map->ptr[i].val, &number, report);
        if (e)
            return e;
        bias[i].bias = (float)number;
    }
    ret_value->bias = bias;
    ret_value->n = map->size;
    return 0;
}

static int decode_tree(const char *name, const msgpack_object *object, struct value_arena *arena,
                       struct value *ret_value, struct report *report);

/* Containers get exactly the room they need, since their count is known. */
static int decode_array(const char *name, const msgpack_object_array *array, struct value_arena *arena,
                        struct value *ret_value, struct report *report) {
    struct value value = {.kind = VALUE_ARRAY};

    if (array->size > 0) {
        value.array.items = value_alloc(arena, array->size * sizeof(*value.array.items));
        if (!value.array.items)
            return -ENOMEM;
    }
    value.array.n_room = array->size;
    for (; value.array.n < array->size; value.array.n++) {
        int e = decode_tree(name, &array->ptr[value.array.n], arena, &value.array.items[value.array.n], report);

        if (e)
            return e;
    }
    *ret_value = value;
    return 0;
}

static int decode_map(const char *name, const msgpack_object_map *map, struct value_arena *arena,
                      struct value *ret_value, struct report *report) {
    struct value value = {.kind = VALUE_MAP};

    if (map->size > 0) {
        value.map.pairs = value_alloc(arena, map->size * sizeof(*value.map.pairs));
        if (!value.map.pairs)
            return -ENOMEM;
    }
    value.map.n_room = map->size;
    for (; value.map.n < map->size; value.map.n++) {
        struct value_pair *pair = &value.map.pairs[value.map.n];
        int e = copy(arena, &map->ptr[value.map.n].key.via.str, &pair->key);

        if (!e)
            e = decode_tree(name, &map->ptr[value.map.n].val, arena, &pair->value, report);
        if (e)
            return e;
    }
    *ret_value = value;
    return 0;
}

static int decode_tree(const char *name, const msgpack_object *object, struct value_arena *arena,
                       struct value *ret_value, struct report *report) {
    switch (object->type) {
    case MSGPACK_OBJECT_NIL:
        *ret_value = (struct value){.kind = VALUE_NIL};
        return 0;
    case MSGPACK_OBJECT_BOOLEAN:
        *ret_value = (struct value){.kind = VALUE_BOOL, .boolean = object->via.boolean};
        return 0;
    case MSGPACK_OBJECT_POSITIVE_INTEGER:
        return value_set_uint64(arena, ret_value, object->via.u64) ? -ENOMEM : 0;
    case MSGPACK_OBJECT_NEGATIVE_INTEGER:
        return value_set_int64(arena, ret_value, object->via.i64) ? -ENOMEM : 0;
    case MSGPACK_OBJECT_FLOAT32:
    case MSGPACK_OBJECT_FLOAT64:
        *ret_value = (struct value){.kind = VALUE_FLOAT, .number = object->via.f64};
        return 0;
    case MSGPACK_OBJECT_STR:
        *ret_value = (struct value){.kind = VALUE_STRING};
        return copy(arena, &object->via.str, &ret_value->text);
    case MSGPACK_OBJECT_ARRAY:
        return decode_array(name, &object->via.array, arena, ret_value, report);
    case MSGPACK_OBJECT_MAP:
        return decode_map(name, &object->via.map, arena, ret_value, report);
    default:
        return report_error(report, PROTO_E_REFUSED, "\"%s\" holds binary data; text is sent as strings", name);
    }
}

static int decode_maps(const struct proto_param *param, const msgpack_object *object, struct value_arena *arena,
                       struct param_value *ret_value, struct report *report) {
    struct value *tree;
    int e;

    if (object->type != MSGPACK_OBJECT_ARRAY)
        return wrong_type(param->name, object, "an array of maps", report);
    e = check_count(param, object->via.array.size, "items", report);
    if (e)
        return e;
    for (uint32_t i = 0; i < object->via.array.size; i++)
        if (object->via.array.ptr[i].type != MSGPACK_OBJECT_MAP)
            return report_error(report, PROTO_E_REFUSED, "\"%s\"[%u] is %s; it must be a map", param->name, i,
                                type_name(&object->via.array.ptr[i]));
    tree = value_alloc(arena, sizeof *tree);
    if (!tree)
        return -ENOMEM;
    e = decode_tree(param->name, object, arena, tree, report);
    if (!e)
        ret_value->tree = tree;
    return e;
}

int proto_param_decode(const struct proto_param *param, const msgpack_object *object, struct value_arena *arena,
                       struct param_value *ret_value, struct report *report) {
    switch (param->type) {
    case PARAM_BOOL:
        if (object->type != MSGPACK_OBJECT_BOOLEAN)
            return wrong_type(param->name, object, "true or false", report);
        ret_value->boolean = object->via.boolean;
        return 0;
    case PARAM_INT:
        return decode_int(param, object, &ret_value->integer, report);
    case PARAM_UINT64:
        if (object->type != MSGPACK_OBJECT_POSITIVE_INTEGER)
            return wrong_type(param->name, object, "an integer from 0 to 2^64 - 1", report);
        ret_value->unsigned_integer = object->via.u64;
        return 0;
    case PARAM_FLOAT:
        return decode_number(param, object, &ret_value->number, report);
    case PARAM_STRING:
        if (object->type != MSGPACK_OBJECT_STR)
            return wrong_type(param->name, object, "a string", report);
        return copy(arena, &object->via.str, &ret_value->text);
    case PARAM_NAME:
        return decode_name(param, object, arena, &ret_value->text, report);
    case PARAM_CHOICE:
        return decode_choice(param, object, &ret_value->text, report);
    case PARAM_IDS:
        return decode_ids(param, object, arena, ret_value, report);
    case PARAM_STRINGS:
        return decode_strings(param, object, arena, ret_value, report);
    case PARAM_BIAS:
        return decode_bias(param, object, arena, ret_value, report);
    case PARAM_MAPS:
        return decode_maps(param, object, arena, ret_value, report);
    }
    return report_error(report, PROTO_E_REFUSED, "\"%s\" has no decoder", param->name);
}
