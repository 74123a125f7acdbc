#include "wire.h"

#include <assert.h>
#include <errno.h>
#include <msgpack.h>
#include <stdlib.h>
#include <string.h>

#include "value.h"

enum { INT_DIGITS_MAX = 20 }; /* of 64 bits, with a sign */

static int add(void *data, const char *bytes, size_t n) {
    struct wire_out *out = data;

    text_add(&out->bytes, bytes, n);
    return 0; /* the error sticks in the text */
}

static msgpack_packer packer_of(struct wire_out *out) {
    return (msgpack_packer){.data = out, .callback = add};
}

void wire_out_init(struct wire_out *out, size_t bytes_max) {
    text_init(&out->bytes, bytes_max);
}

void wire_out_deinit(struct wire_out *out) {
    text_deinit(&out->bytes);
}

void wire_out_clear(struct wire_out *out) {
    text_clear(&out->bytes);
}

void wire_map(struct wire_out *out, uint32_t n_pairs) {
    msgpack_packer packer = packer_of(out);

    msgpack_pack_map(&packer, n_pairs);
}

void wire_array(struct wire_out *out, uint32_t n_items) {
    msgpack_packer packer = packer_of(out);

    msgpack_pack_array(&packer, n_items);
}

void wire_str(struct wire_out *out, struct span string) {
    msgpack_packer packer = packer_of(out);

    if (string.n > UINT32_MAX) {
        out->bytes.error = out->bytes.error ? out->bytes.error : -EMSGSIZE;
        return;
    }
    msgpack_pack_str(&packer, string.n);
    text_add(&out->bytes, string.bytes, string.n);
}

void wire_cstr(struct wire_out *out, const char *string) {
    wire_str(out, span_of(string));
}

void wire_key(struct wire_out *out, const char *name) {
    wire_cstr(out, name);
}

void wire_lossy(struct wire_out *out, struct span string) {
    struct text text;

    text_init(&text, out->bytes.n_max);
    text_add_lossy(&text, string);
    if (text.error != 0 && out->bytes.error == 0)
        out->bytes.error = text.error;
    wire_str(out, text_span(&text));
    text_deinit(&text);
}

void wire_int(struct wire_out *out, int64_t i) {
    msgpack_packer packer = packer_of(out);

    msgpack_pack_int64(&packer, i);
}

void wire_uint(struct wire_out *out, uint64_t u) {
    msgpack_packer packer = packer_of(out);

    msgpack_pack_uint64(&packer, u);
}

void wire_float(struct wire_out *out, double number) {
    msgpack_packer packer = packer_of(out);

    msgpack_pack_double(&packer, number);
}

void wire_bool(struct wire_out *out, bool boolean) {
    msgpack_packer packer = packer_of(out);

    if (boolean)
        msgpack_pack_true(&packer);
    else
        msgpack_pack_false(&packer);
}

void wire_nil(struct wire_out *out) {
    msgpack_packer packer = packer_of(out);

    msgpack_pack_nil(&packer);
}

void wire_ids(struct wire_out *out, const int32_t *ids, uint32_t n) {
    wire_array(out, n);
    for (uint32_t i = 0; i < n; i++)
        wire_int(out, ids[i]);
}

static void add_digits(struct wire_out *out, struct span digits) {
    char copy[INT_DIGITS_MAX + 1], *end;
    char *long_copy;
    bool is_negative = digits.n > 0 && digits.bytes[0] == '-';

    assert(digits.n > 0);
    if (digits.n <= INT_DIGITS_MAX) {
        memcpy(copy, digits.bytes, digits.n);
        copy[digits.n] = 0;
        errno = 0;
        if (is_negative) {
            long long i = strtoll(copy, &end, 10);

            if (errno == 0 && *end == 0) {
                wire_int(out, i);
                return;
            }
        } else {
            unsigned long long u = strtoull(copy, &end, 10);

            if (errno == 0 && *end == 0) {
                wire_uint(out, u);
                return;
            }
        }
    }
    long_copy = strndup(digits.bytes, digits.n);
    if (!long_copy) {
        out->bytes.error = out->bytes.error ? out->bytes.error : -ENOMEM;
        return;
    }
    wire_float(out, strtod(long_copy, NULL));
    free(long_copy);
}

void wire_value(struct wire_out *out, const struct value *value) {
    switch (value->kind) {
    case VALUE_NIL:
        wire_nil(out);
        break;
    case VALUE_BOOL:
        wire_bool(out, value->boolean);
        break;
    case VALUE_INT:
        add_digits(out, value->text);
        break;
    case VALUE_FLOAT:
        wire_float(out, value->number);
        break;
    case VALUE_STRING:
        wire_str(out, value->text);
        break;
    case VALUE_ARRAY:
        wire_array(out, value->array.n);
        for (uint32_t i = 0; i < value->array.n; i++)
            wire_value(out, &value->array.items[i]);
        break;
    case VALUE_MAP:
        wire_map(out, value->map.n);
        for (uint32_t i = 0; i < value->map.n; i++) {
            wire_str(out, value->map.pairs[i].key);
            wire_value(out, &value->map.pairs[i].value);
        }
        break;
    }
}
