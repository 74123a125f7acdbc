/* wire: msgpack bytes of one message, written piece by piece. A piece that does not fit makes the error sticky, so that
 * a writer looks at it once, where the message is sent. Knows msgpack, no message of the protocol. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "text.h"

struct value;

struct wire_out {
    struct text bytes; /* bytes.error: 0, -ENOMEM or -EMSGSIZE */
};

void wire_out_init(struct wire_out *out, size_t bytes_max);
void wire_out_deinit(struct wire_out *out);
void wire_out_clear(struct wire_out *out); /* forgets bytes and error, keeps the memory */

void wire_map(struct wire_out *out, uint32_t n_pairs);   /* 2 * n_pairs values follow, keys first */
void wire_array(struct wire_out *out, uint32_t n_items); /* n_items values follow */
void wire_key(struct wire_out *out, const char *name);
void wire_str(struct wire_out *out, struct span string); /* valid UTF-8 */
void wire_cstr(struct wire_out *out, const char *string);
void wire_lossy(struct wire_out *out, struct span string); /* what is not UTF-8 becomes U+FFFD */
void wire_int(struct wire_out *out, int64_t i);
void wire_uint(struct wire_out *out, uint64_t u);
void wire_float(struct wire_out *out, double number);
void wire_bool(struct wire_out *out, bool boolean);
void wire_nil(struct wire_out *out);
void wire_ids(struct wire_out *out, const int32_t *ids, uint32_t n); /* an array of them */

/* A tree. Integers beyond 64 bits, which JSON has and msgpack has not, become the nearest double. */
void wire_value(struct wire_out *out, const struct value *value);
