/* Reading what the daemon sent, and writing a string. */
#include <string.h>

#include "spillway_client.h"

const msgpack_object *spillway_get(const msgpack_object *map, const char *key) {
    size_t n = strlen(key);

    if (!map || map->type != MSGPACK_OBJECT_MAP)
        return NULL;
    for (uint32_t i = 0; i < map->via.map.size; i++) {
        const msgpack_object_kv *pair = &map->via.map.ptr[i];

        if (pair->key.type == MSGPACK_OBJECT_STR && pair->key.via.str.size == n &&
            memcmp(pair->key.via.str.ptr, key, n) == 0)
            return &pair->val;
    }
    return NULL;
}

uint64_t spillway_get_uint(const msgpack_object *map, const char *key, uint64_t otherwise) {
    const msgpack_object *value = spillway_get(map, key);

    return value && value->type == MSGPACK_OBJECT_POSITIVE_INTEGER ? value->via.u64 : otherwise;
}

double spillway_get_double(const msgpack_object *map, const char *key, double otherwise) {
    const msgpack_object *value = spillway_get(map, key);

    if (!value)
        return otherwise;
    switch (value->type) {
    case MSGPACK_OBJECT_FLOAT32:
    case MSGPACK_OBJECT_FLOAT64:
        return value->via.f64;
    case MSGPACK_OBJECT_POSITIVE_INTEGER:
        return (double)value->via.u64;
    case MSGPACK_OBJECT_NEGATIVE_INTEGER:
        return (double)value->via.i64;
    default:
        return otherwise;
    }
}

bool spillway_get_bool(const msgpack_object *map, const char *key, bool otherwise) {
    const msgpack_object *value = spillway_get(map, key);

    return value && value->type == MSGPACK_OBJECT_BOOLEAN ? value->via.boolean : otherwise;
}

struct spillway_text spillway_get_text(const msgpack_object *map, const char *key) {
    const msgpack_object *value = spillway_get(map, key);

    if (!value || value->type != MSGPACK_OBJECT_STR)
        return (struct spillway_text){.bytes = "", .n_bytes = 0};
    return (struct spillway_text){.bytes = value->via.str.ptr, .n_bytes = value->via.str.size};
}

void spillway_put(msgpack_packer *packer, const char *string) {
    size_t n = strlen(string);

    msgpack_pack_str(packer, n);
    msgpack_pack_str_body(packer, string, n);
}
