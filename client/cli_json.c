/* JSON and msgpack, both ways, and documents in files. */
#include "cli.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static json_t *map_of(const msgpack_object_map *map) {
    json_t *object = json_object();

    for (uint32_t i = 0; object && i < map->size; i++) {
        const msgpack_object *key = &map->ptr[i].key;
        json_t *value = key->type == MSGPACK_OBJECT_STR ? cli_json_of(&map->ptr[i].val) : NULL;

        if (!value || json_object_setn_new(object, key->via.str.ptr, key->via.str.size, value) != 0) {
            json_decref(object);
            return NULL;
        }
    }
    return object;
}

static json_t *array_of(const msgpack_object_array *array) {
    json_t *items = json_array();

    for (uint32_t i = 0; items && i < array->size; i++) {
        json_t *item = cli_json_of(&array->ptr[i]);

        if (!item || json_array_append_new(items, item) != 0) {
            json_decref(items);
            return NULL;
        }
    }
    return items;
}

json_t *cli_json_of(const msgpack_object *object) { // NOLINT(misc-no-recursion): the library limits the depth
    switch (object->type) {
    case MSGPACK_OBJECT_BOOLEAN:
        return json_boolean(object->via.boolean);
    case MSGPACK_OBJECT_POSITIVE_INTEGER:
        return object->via.u64 <= INT64_MAX ? json_integer((json_int_t)object->via.u64)
                                            : json_real((double)object->via.u64);
    case MSGPACK_OBJECT_NEGATIVE_INTEGER:
        return json_integer(object->via.i64);
    case MSGPACK_OBJECT_FLOAT32:
    case MSGPACK_OBJECT_FLOAT64:
        return isfinite(object->via.f64) ? json_real(object->via.f64) : json_null();
    case MSGPACK_OBJECT_STR:
        return json_stringn(object->via.str.ptr, object->via.str.size);
    case MSGPACK_OBJECT_ARRAY:
        return array_of(&object->via.array);
    case MSGPACK_OBJECT_MAP:
        return map_of(&object->via.map);
    default:
        return json_null();
    }
}

static void write_value(msgpack_packer *packer, const json_t *value);

static void write_map(msgpack_packer *packer, const json_t *map) {
    void *at;

    msgpack_pack_map(packer, json_object_size(map));
    for (at = json_object_iter((json_t *)map); at; at = json_object_iter_next((json_t *)map, at)) {
        spillway_put(packer, json_object_iter_key(at));
        write_value(packer, json_object_iter_value(at));
    }
}

static void write_value(msgpack_packer *packer, const json_t *value) {
    switch (json_typeof(value)) {
    case JSON_OBJECT:
        write_map(packer, value);
        break;
    case JSON_ARRAY:
        msgpack_pack_array(packer, json_array_size(value));
        for (size_t i = 0; i < json_array_size(value); i++)
            write_value(packer, json_array_get(value, i));
        break;
    case JSON_STRING:
        msgpack_pack_str(packer, json_string_length(value));
        msgpack_pack_str_body(packer, json_string_value(value), json_string_length(value));
        break;
    case JSON_INTEGER:
        msgpack_pack_int64(packer, json_integer_value(value));
        break;
    case JSON_REAL:
        msgpack_pack_double(packer, json_real_value(value));
        break;
    case JSON_TRUE:
        msgpack_pack_true(packer);
        break;
    case JSON_FALSE:
        msgpack_pack_false(packer);
        break;
    case JSON_NULL:
        msgpack_pack_nil(packer);
        break;
    }
}

void cli_write_json(void *user, msgpack_packer *packer) {
    write_value(packer, user);
}

int cli_read_file(struct cli *cli, const char *path, char **ret_bytes, size_t *ret_n_bytes) {
    FILE *file = strcmp(path, "-") == 0 ? stdin : fopen(path, "rbe");
    size_t n = 0, n_room = 0;
    char *bytes = NULL;
    int status = CLI_OK;

    if (!file)
        return cli_fail(cli, CLI_USAGE, "FILE", "%s: %s", path, strerror(errno));
    do {
        if (n_room - n < 2) {
            char *more = realloc(bytes, n_room ? 2 * n_room : 4096);

            if (!more) {
                status = cli_fail_for_memory(cli);
                break;
            }
            bytes = more;
            n_room = n_room ? 2 * n_room : 4096;
        }
        n += fread(bytes + n, 1, n_room - n - 1, file);
    } while (!feof(file) && !ferror(file));
    if (status == CLI_OK && ferror(file))
        status = cli_fail(cli, CLI_USAGE, "FILE", "%s: cannot be read", path);
    if (file != stdin)
        fclose(file);
    if (status != CLI_OK) {
        free(bytes);
        return status;
    }
    bytes[n] = 0;
    *ret_bytes = bytes;
    *ret_n_bytes = n;
    return CLI_OK;
}

int cli_read_json(struct cli *cli, const char *path, json_t **ret_document) {
    json_error_t error;
    json_t *document;
    char *bytes;
    size_t n;
    int status = cli_read_file(cli, path, &bytes, &n);

    if (status != CLI_OK)
        return status;
    document = json_loadb(bytes, n, JSON_REJECT_DUPLICATES, &error);
    free(bytes);
    if (!document)
        return cli_fail(cli, CLI_USAGE, "FILE", "%s:%d: not JSON: %s", path, error.line, error.text);
    *ret_document = document;
    return CLI_OK;
}

int cli_use_messages(struct cli *cli, const json_t *document, json_t *params) {
    static const char *const keys[] = {"messages", "tools", "thinking", "add_generation_prompt"};

    if (!json_is_object(document))
        return json_object_set(params, "messages", (json_t *)document) == 0 ? CLI_OK : cli_fail_for_memory(cli);
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        json_t *member = json_object_get(document, keys[i]);

        if (member && !json_is_null(member) && !json_object_get(params, keys[i]) &&
            json_object_set(params, keys[i], member) != 0)
            return cli_fail_for_memory(cli);
    }
    return CLI_OK;
}

double cli_number_at(const json_t *map, const char *path, double otherwise) {
    char key[64];

    for (;;) {
        size_t n = strcspn(path, ".");

        snprintf(key, sizeof key, "%.*s", (int)n, path);
        map = json_object_get(map, key);
        if (!map)
            return otherwise;
        if (path[n] == 0)
            return json_is_number(map) ? json_number_value(map) : otherwise;
        path += n + 1;
    }
}
