/* json: a pull reader over JSON text in memory, for large foreign files (tokenizer.json, safetensors headers and indexes).
 * It allocates nothing, never recurses and never reads outside the text. Strict: RFC 8259 grammar, valid UTF-8, paired
 * surrogates, one value per text, at most JSON_DEPTH_MAX containers inside each other. It keeps no tree and remembers
 * no keys: json_field() tells duplicates among the keys a caller knows, a caller that collects names finds the others.
 *
 *     json_init(&r, text, n);
 *     if (json_next(&r) == JSON_OBJECT)
 *         while (json_next(&r) == JSON_KEY)
 *             if (json_is(&r, "name") && json_next(&r) == JSON_STRING) ...
 *             else json_skip(&r);
 *     if (r.kind != JSON_OBJECT_END || json_next(&r) != JSON_END)
 *         return json_refuse(&r, path, report);
 */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct report;

enum { JSON_DEPTH_MAX = 64 };

enum json_kind {
    JSON_START, /* nothing read yet */
    JSON_ERROR, /* sticky: every later call says it again */
    JSON_END,   /* the one value was read and only white space follows; sticky too */
    JSON_OBJECT,
    JSON_OBJECT_END,
    JSON_ARRAY,
    JSON_ARRAY_END,
    JSON_KEY, /* a string before its colon; its value comes next */
    JSON_STRING,
    JSON_NUMBER,
    JSON_TRUE,
    JSON_FALSE,
    JSON_NULL,
};

struct json_reader {
    const char *text;
    size_t n, pos;
    enum json_kind kind;          /* of the token last read */
    const char *token;            /* KEY, STRING: what stands between the quotes, still escaped; NUMBER: its text */
    size_t token_bytes;           /* of that span */
    size_t string_bytes;          /* KEY, STRING: bytes after unescaping, at most token_bytes; may contain zero bytes */
    const char *error;            /* JSON_ERROR: what is wrong */
    size_t error_at;              /* and at which byte of the text */
    int depth;                    /* containers open now */
    uint64_t depth_is_object;     /* bit d: the container at depth d + 1 is an object */
    bool has_member, is_complete; /* the innermost container has a member already; the outermost value has ended */
};

void json_init(struct json_reader *r, const char *text, size_t n);

enum json_kind json_next(struct json_reader *r);

/* Reads the next value with all that is inside it, checking its syntax. Returns 0 or -EINVAL: the text is bad, or no
 * value comes next. */
int json_skip(struct json_reader *r);

/* Leaves the innermost open container, skipping the members it still has. Returns 0 or -EINVAL. */
int json_leave(struct json_reader *r);

/* The current KEY or STRING, unescaped, equals `text`. False for every other kind. */
bool json_is(const struct json_reader *r, const char *text);

/* Which of n_names <= 64 names the current KEY is: its index, or -1 for none of them. *seen (0 at first) remembers them; a
 * second key of one name is JSON_ERROR, and -1. */
int json_field(struct json_reader *r, const char *const *names, int n_names, uint64_t *seen);

/* Writes the unescaped bytes of the current KEY or STRING, r->string_bytes of them, without a zero at the end. */
void json_unescape(const struct json_reader *r, char *out);

/* The current NUMBER as an integer in 0..max: no sign, fraction or exponent. False otherwise. */
bool json_u64(const struct json_reader *r, uint64_t max, uint64_t *ret_value);

/* Turns the reader into JSON_ERROR at the current token, for a caller that finds it of the wrong kind or value. Keeps an
 * error that is already there. Returns JSON_ERROR. */
enum json_kind json_fail(struct json_reader *r, const char *error);

/* Fills the report with "PATH: byte N: what is wrong" and returns -EINVAL. Not in JSON_ERROR it says that the token is not
 * what the file should have there. */
int json_refuse(const struct json_reader *r, const char *path, struct report *report);
