/* value: what a JSON or msgpack document says, as a tree in an arena. Whoever reads a document fills it: the protocol
 * from msgpack, value_from_json() from text. Integers keep all their digits, since the chat template prints what the
 * caller wrote; maps keep their order. Knows no schema and no message. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "text.h"

struct report;

enum { VALUE_DEPTH_MAX = 64 }; /* containers inside each other, in every tree handed to this file */
enum {
    VALUE_E_BAD = 1,  /* not the text of a document; the report says where */
    VALUE_E_FULL = 2, /* the arena's limit is met, or there is no memory */
};

enum value_kind { VALUE_NIL, VALUE_BOOL, VALUE_INT, VALUE_FLOAT, VALUE_STRING, VALUE_ARRAY, VALUE_MAP };

struct value {
    enum value_kind kind;
    union {
        bool boolean;
        double number;    /* FLOAT; may be infinite or no number if msgpack says so */
        struct span text; /* STRING: valid UTF-8, may hold zero bytes. INT: decimal digits as Python prints them */
        struct {
            struct value *items;
            uint32_t n, n_room;
        } array;
        struct {
            struct value_pair *pairs; /* keys are unique: the reader sees to it */
            uint32_t n, n_room;
        } map;
    };
};

struct value_pair {
    struct span key;
    struct value value;
};

/* Memory of trees: given back all at once. Spans and pointers in a tree point into its arena. */
struct value_arena {
    struct value_chunk *chunks; /* newest first */
    size_t n_free;              /* bytes left in the newest */
    size_t bytes, bytes_max;    /* held by all chunks; their limit */
};

void value_arena_init(struct value_arena *arena, size_t bytes_max);
void value_arena_deinit(struct value_arena *arena);
void value_arena_clear(struct value_arena *arena);            /* ends every tree in it */
void *value_alloc(struct value_arena *arena, size_t n_bytes); /* aligned for all types; NULL: VALUE_E_FULL */

/* Builders. A container starts as (struct value){.kind = VALUE_ARRAY} and grows by *_add, which hand out a nil to be
 * filled before the next add. They return 0 or VALUE_E_FULL; then the tree is as before. */
int value_set_int64(struct value_arena *arena, struct value *value, int64_t i);
int value_set_uint64(struct value_arena *arena, struct value *value, uint64_t u);
int value_set_string(struct value_arena *arena, struct value *value, struct span string); /* copies */
int value_array_add(struct value_arena *arena, struct value *array, struct value **ret_item);
int value_map_add(struct value_arena *arena, struct value *map, struct span key, struct value **ret_value); /* copies */

/* The same tree in another arena: VALUE_E_FULL as the builders. */
int value_copy(struct value_arena *arena, const struct value *value, struct value *ret_copy);

/* Reads one JSON document (RFC 8259, see json.h). A map with the same key twice is refused, like a number too large for
 * a double, and like more than depth_max <= VALUE_DEPTH_MAX containers inside each other. Size is limited by the arena:
 * a refused document leaves its memory in there. `name` is what the report calls the text. */
int value_from_json(struct value_arena *arena, const char *name, struct span json, int depth_max,
                    struct value *ret_value, struct report *report);

/* What the map has under `key`, or NULL; NULL also if the value is no map. */
const struct value *value_get(const struct value *map, const char *key);
const struct value *value_get_span(const struct value *map, struct span key);

/* Appends the value as JSON on one line, spelled as Python's json.dumps(value, ensure_ascii=False): ", " and ": "
 * between things, only controls, quotes and backslashes escaped, Infinity and NaN bare. */
void value_write_json(struct text *out, const struct value *value);

/* Appends a scalar as Python's str() spells it: None, True, 1e+21, a string as it is. */
void value_write_str(struct text *out, const struct value *scalar);

static inline bool value_is_scalar(const struct value *value) {
    return value->kind < VALUE_ARRAY;
}
