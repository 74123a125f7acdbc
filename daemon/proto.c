#include "proto_internal.h"

#include <assert.h>
#include <errno.h>
#include <msgpack.h>
#include <stdlib.h>
#include <string.h>

#include "base.h"
#include "frame.h"

enum {
    ZONE_CHUNK_BYTES = 16 * 1024,
    /* No message needs as much: a value of one byte becomes a struct value and its digits, 40 bytes. */
    ARENA_BYTES_PER_BYTE = 128,
    ARENA_BYTES_MIN = 8 * 1024,
    SHOWN_BYTES_MAX = 60,
    SUGGEST_BYTES_MAX = 32, /* longer than any name in the tables */
};

/* ---- suggestions ---- */

/* How many insertions, removals and changes of a letter lie between the two; both short. */
static uint32_t distance(struct span a, struct span b) {
    uint8_t row[SUGGEST_BYTES_MAX + 1];

    for (size_t k = 0; k <= b.n; k++)
        row[k] = (uint8_t)k;
    for (size_t i = 0; i < a.n; i++) {
        uint8_t diagonal = row[0];

        row[0]++;
        for (size_t k = 0; k < b.n; k++) {
            uint8_t change = (uint8_t)(diagonal + (a.bytes[i] != b.bytes[k]));
            uint8_t step = (uint8_t)((row[k] < row[k + 1] ? row[k] : row[k + 1]) + 1);

            diagonal = row[k + 1];
            row[k + 1] = change < step ? change : step;
        }
    }
    return row[b.n];
}

const char *proto_suggest(struct span word, const void *names, uint32_t n, size_t stride) {
    const char *best = NULL;
    uint32_t best_distance = 3;

    if (word.n < 2 || word.n > SUGGEST_BYTES_MAX)
        return NULL;
    for (uint32_t i = 0; i < n; i++) {
        const char *name = *(const char *const *)(const void *)((const char *)names + i * stride);
        uint32_t d;

        if (strlen(name) > SUGGEST_BYTES_MAX)
            continue;
        d = distance(word, span_of(name));
        if (d < best_distance && d < word.n) {
            best = name;
            best_distance = d;
        }
    }
    return best;
}

/* ---- decoding ---- */

static int refuse(struct proto_refusal *refusal, enum proto_code code) {
    refusal->code = code;
    return PROTO_E_REFUSED;
}

static struct span span_of_str(const msgpack_object *object) {
    return (struct span){object->via.str.ptr, object->via.str.size};
}

struct shown {
    char text[SHOWN_BYTES_MAX + 1];
};

/* A client's word for a report, which itself makes control characters visible; a zero would end it. */
static struct shown shown(struct span word) {
    struct shown shown = {""};

    for (size_t i = 0; i < word.n && i < SHOWN_BYTES_MAX; i++)
        shown.text[i] = word.bytes[i] ? word.bytes[i] : '?';
    return shown;
}

/* [0, id, method, params] */
static int check_shape(const msgpack_object *message, struct proto_refusal *refusal) {
    const msgpack_object *part = message->via.array.ptr;
    uint32_t n = message->via.array.size;
    struct report *report = &refusal->report;

    refusal->code = PROTO_BAD_FRAME;
    if (part[0].type != MSGPACK_OBJECT_POSITIVE_INTEGER || part[0].via.u64 > 2)
        return report_error(report, PROTO_E_REFUSED, "the message's first element is none of 0, 1, 2");
    if (part[0].via.u64 > 0)
        return report_error(report, PROTO_E_REFUSED,
                            "a client sent a %s; only requests [0, id, method, params] come from clients",
                            part[0].via.u64 == 1 ? "response" : "notification");
    if (n != 4)
        return report_error(report, PROTO_E_REFUSED, "the request has %u elements; it is [0, id, method, params]", n);
    if (part[1].type != MSGPACK_OBJECT_POSITIVE_INTEGER || part[1].via.u64 > UINT32_MAX)
        return report_error(report, PROTO_E_REFUSED, "the request's id is no integer from 0 to %u", UINT32_MAX);
    refusal->id = (uint32_t)part[1].via.u64;
    if (part[2].type != MSGPACK_OBJECT_STR)
        return report_error(report, PROTO_E_REFUSED, "the method of request %u is no string", refusal->id);
    if (part[3].type != MSGPACK_OBJECT_MAP)
        return report_error(report, PROTO_E_REFUSED, "the params of request %u are no map", refusal->id);
    return 0;
}

static int find_method(struct span name, enum method *ret_method, struct proto_refusal *refusal) {
    const char *suggestion;

    for (uint32_t i = 0; i < METHOD_N; i++)
        if (span_is(name, proto_methods[i].name)) {
            *ret_method = (enum method)i;
            return 0;
        }
    suggestion = proto_suggest(name, proto_methods, METHOD_N, sizeof *proto_methods);
    report_line(&refusal->report, "there is no method \"%s\"%s%s%s", shown(name).text,
                suggestion ? "; did you mean \"" : "", suggestion ? suggestion : "", suggestion ? "\"?" : "");
    return refuse(refusal, PROTO_UNKNOWN_METHOD);
}

static const struct proto_param *find_param(const struct proto_method *about, struct span name) {
    for (uint32_t i = 0; i < about->n_params; i++)
        if (span_is(name, about->params[i].name))
            return &about->params[i];
    return NULL;
}

static int unknown_param(const struct proto_method *about, struct span name, struct report *report) {
    const char *suggestion = proto_suggest(name, about->params, about->n_params, sizeof *about->params);

    return report_error(report, PROTO_E_REFUSED, "there is no param \"%s\"%s%s%s", shown(name).text,
                        suggestion             ? "; did you mean \""
                        : about->n_params == 0 ? "; the method has none"
                                               : "",
                        suggestion ? suggestion : "", suggestion ? "\"?" : "");
}

static int decode_params(struct request *request, const msgpack_object_map *map, struct report *report) {
    const struct proto_method *about = &proto_methods[request->method];
    int e;

    for (uint32_t i = 0; i < map->size; i++) {
        struct span name = span_of_str(&map->ptr[i].key);
        const struct proto_param *param = find_param(about, name);
        struct param_value *value;

        if (!param)
            return unknown_param(about, name, report);
        if (map->ptr[i].val.type == MSGPACK_OBJECT_NIL) /* says: not given */
            continue;
        value = &request->values[param - about->params];
        e = proto_param_decode(param, &map->ptr[i].val, &request->arena, value, report);
        if (e)
            return e;
        value->is_set = true;
    }
    for (uint32_t i = 0; i < about->n_params; i++)
        if (about->params[i].is_required && !request->values[i].is_set)
            return report_error(report, PROTO_E_REFUSED, "\"%s\" is missing: %s", about->params[i].name,
                                about->params[i].doc);
    e = proto_check_rules(request, report);
    if (e == 0 && request->method == METHOD_GEN_START)
        e = proto_gen_fill(request);
    return e;
}

static int decode_message(const msgpack_object *message, size_t n_bytes, struct request **ret_request,
                          struct proto_refusal *refusal) {
    const msgpack_object *part = message->via.array.ptr;
    struct report report = {0};
    struct request *request;
    enum method method;
    int e = check_shape(message, refusal);

    if (!e)
        e = find_method(span_of_str(&part[2]), &method, refusal);
    if (e)
        return e;
    request = calloc(1, sizeof *request);
    if (!request)
        return -ENOMEM;
    request->id = refusal->id;
    request->method = method;
    value_arena_init(&request->arena, ARENA_BYTES_MIN + n_bytes * ARENA_BYTES_PER_BYTE);
    if (proto_methods[method].n_params > 0) {
        request->values = calloc(proto_methods[method].n_params, sizeof *request->values);
        if (!request->values)
            e = -ENOMEM;
    }
    if (!e)
        e = decode_params(request, &part[3].via.map, &report);
    if (e) {
        request_free(request);
        report_line(&refusal->report, "%s: %s", proto_methods[method].name, report.line);
        return e < 0 ? e : refuse(refusal, PROTO_BAD_PARAM);
    }
    *ret_request = request;
    return 0;
}

int proto_decode(const char *bytes, size_t n, struct request **ret_request, struct proto_refusal *ret_refusal) {
    msgpack_zone zone;
    msgpack_object message;
    int e;

    *ret_refusal = (struct proto_refusal){.id = frame_peek_id(bytes, n), .code = PROTO_BAD_FRAME};
    if (!msgpack_zone_init(&zone, ZONE_CHUNK_BYTES))
        return -ENOMEM;
    e = frame_unpack(bytes, n, &zone, &message, &ret_refusal->report);
    if (e == FRAME_E_BAD)
        e = PROTO_E_REFUSED;
    else if (e == 0)
        e = decode_message(&message, n, ret_request, ret_refusal);
    msgpack_zone_destroy(&zone);
    return e;
}

void request_free(struct request *request) {
    if (!request)
        return;
    value_arena_deinit(&request->arena);
    free(request->values);
    free(request);
}

size_t request_bytes(const struct request *request) {
    return sizeof *request + proto_methods[request->method].n_params * sizeof *request->values + request->arena.bytes;
}

/* ---- reading ---- */

static const struct param_value *value_of(const struct request *request, const char *name, unsigned types) {
    const struct proto_method *about = &proto_methods[request->method];
    const struct proto_param *param = find_param(about, span_of(name));

    assert(param);
    assert(types & 1u << param->type);
    return &request->values[param - about->params];
}

const struct param_value *proto_value(const struct request *request, const char *name) {
    return value_of(request, name, ~0u);
}

bool request_get_bool(const struct request *request, const char *name, bool *ret) {
    const struct param_value *value = value_of(request, name, 1u << PARAM_BOOL);

    if (value->is_set)
        *ret = value->boolean;
    return value->is_set;
}

bool request_get_int(const struct request *request, const char *name, int64_t *ret) {
    const struct param_value *value = value_of(request, name, 1u << PARAM_INT);

    if (value->is_set)
        *ret = value->integer;
    return value->is_set;
}

bool request_get_float(const struct request *request, const char *name, double *ret) {
    const struct param_value *value = value_of(request, name, 1u << PARAM_FLOAT);

    if (value->is_set)
        *ret = value->number;
    return value->is_set;
}

bool request_get_str(const struct request *request, const char *name, struct span *ret) {
    const struct param_value *value =
        value_of(request, name, 1u << PARAM_STRING | 1u << PARAM_NAME | 1u << PARAM_CHOICE);

    if (value->is_set)
        *ret = value->text;
    return value->is_set;
}

bool request_get_ids(const struct request *request, const char *name, const int32_t **ret_ids, uint32_t *ret_n) {
    const struct param_value *value = value_of(request, name, 1u << PARAM_IDS);

    if (value->is_set) {
        *ret_ids = value->ids;
        *ret_n = value->n;
    }
    return value->is_set;
}

bool request_get_value(const struct request *request, const char *name, const struct value **ret) {
    const struct param_value *value = value_of(request, name, 1u << PARAM_MAPS);

    if (value->is_set)
        *ret = value->tree;
    return value->is_set;
}
