#include "json.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

#include "report.h"
#include "utf8.h"

static_assert(JSON_DEPTH_MAX <= 64, "depth_is_object has one bit per depth");

static enum json_kind fail_at(struct json_reader *r, size_t at, const char *error) {
    if (r->kind != JSON_ERROR) {
        r->kind = JSON_ERROR;
        r->error = error;
        r->error_at = at;
    }
    return JSON_ERROR;
}

/* Where the current token begins, for messages. */
static size_t token_at(const struct json_reader *r) {
    if (r->kind == JSON_KEY || r->kind == JSON_STRING)
        return (size_t)(r->token - r->text) - 1;
    if (r->kind == JSON_NUMBER)
        return (size_t)(r->token - r->text);
    return r->pos;
}

static void skip_space(struct json_reader *r) {
    while (r->pos < r->n) {
        char c = r->text[r->pos];

        if (c != ' ' && c != '\n' && c != '\r' && c != '\t')
            return;
        r->pos++;
    }
}

static bool in_object(const struct json_reader *r) {
    return r->depth > 0 && (r->depth_is_object >> (r->depth - 1) & 1);
}

/* The four digits after a \u, or -1. */
static int hex4(const char *s, const char *end) {
    int value = 0;

    if (end - s < 4)
        return -1;
    for (int i = 0; i < 4; i++) {
        char c = s[i];

        if (c >= '0' && c <= '9')
            value = value * 16 + (c - '0');
        else if ((c | 0x20) >= 'a' && (c | 0x20) <= 'f')
            value = value * 16 + ((c | 0x20) - 'a' + 10);
        else
            return -1;
    }
    return value;
}

/* One escape sequence: s is behind the backslash. Returns the bytes it takes there, or 0 and *ret_error. */
static int read_escape(const char *s, const char *end, uint32_t *ret_cp, const char **ret_error) {
    static const char letters[] = "\"\\/bfnrt", values[] = "\"\\/\b\f\n\r\t";
    const char *letter;
    int high, low;

    *ret_error = "unknown escape sequence in a string";
    if (s == end || *s == 0)
        return 0;
    letter = strchr(letters, *s);
    if (letter) {
        *ret_cp = (uint32_t)values[letter - letters];
        return 1;
    }
    if (*s != 'u')
        return 0;
    high = hex4(s + 1, end);
    *ret_error = "\\u without four hexadecimal digits";
    if (high < 0)
        return 0;
    *ret_cp = (uint32_t)high;
    if (high < 0xD800 || high > 0xDFFF)
        return 5;
    *ret_error = "half of a surrogate pair alone";
    if (high > 0xDBFF || end - s < 11 || s[5] != '\\' || s[6] != 'u')
        return 0;
    low = hex4(s + 7, end);
    if (low < 0xDC00 || low > 0xDFFF)
        return 0;
    *ret_cp = 0x10000 + ((uint32_t)(high - 0xD800) << 10) + (uint32_t)(low - 0xDC00);
    return 11;
}

/* pos is behind the opening quote; leaves it behind the closing one. */
static enum json_kind read_string(struct json_reader *r, enum json_kind kind) {
    const char *start = r->text + r->pos, *end = r->text + r->n, *s = start;
    size_t saved = 0; /* bytes that go away by unescaping */

    for (;;) {
        const char *error;
        char scratch[UTF8_CHAR_BYTES_MAX];
        unsigned char c;
        uint32_t cp;
        int n_bytes;

        if (s == end)
            return fail_at(r, (size_t)(start - r->text) - 1, "string without an end");
        c = (unsigned char)*s;
        if (c == '"')
            break;
        if (c < 0x20)
            return fail_at(r, (size_t)(s - r->text), "control character in a string");
        if (c == '\\') {
            n_bytes = read_escape(s + 1, end, &cp, &error);
            if (n_bytes == 0)
                return fail_at(r, (size_t)(s - r->text), error);
            saved += (size_t)(1 + n_bytes - utf8_encode(cp, scratch));
            s += 1 + n_bytes;
        } else if (c < 0x80) {
            s++;
        } else {
            n_bytes = utf8_decode((const unsigned char *)s, (size_t)(end - s), &cp);
            if (n_bytes <= 0)
                return fail_at(r, (size_t)(s - r->text), "invalid UTF-8 in a string");
            s += n_bytes;
        }
    }
    r->token = start;
    r->token_bytes = (size_t)(s - start);
    r->string_bytes = r->token_bytes - saved;
    r->pos = (size_t)(s + 1 - r->text);
    return r->kind = kind;
}

static size_t skip_digits(const struct json_reader *r, size_t at) {
    while (at < r->n && r->text[at] >= '0' && r->text[at] <= '9')
        at++;
    return at;
}

static enum json_kind read_number(struct json_reader *r) {
    size_t start = r->pos, at = start, digits;

    if (r->text[at] == '-')
        at++;
    digits = at;
    at = skip_digits(r, at);
    if (at == digits || (r->text[digits] == '0' && at > digits + 1))
        return fail_at(r, start, "malformed number");
    if (at < r->n && r->text[at] == '.') {
        digits = ++at;
        at = skip_digits(r, at);
        if (at == digits)
            return fail_at(r, start, "malformed number");
    }
    if (at < r->n && (r->text[at] == 'e' || r->text[at] == 'E')) {
        at++;
        if (at < r->n && (r->text[at] == '+' || r->text[at] == '-'))
            at++;
        digits = at;
        at = skip_digits(r, at);
        if (at == digits)
            return fail_at(r, start, "malformed number");
    }
    r->token = r->text + start;
    r->token_bytes = at - start;
    r->pos = at;
    return r->kind = JSON_NUMBER;
}

static enum json_kind read_word(struct json_reader *r, const char *word, enum json_kind kind) {
    size_t n = strlen(word);

    if (r->n - r->pos < n || memcmp(r->text + r->pos, word, n) != 0)
        return fail_at(r, r->pos, "unexpected character");
    r->pos += n;
    return r->kind = kind;
}

static enum json_kind open_container(struct json_reader *r, enum json_kind kind) {
    uint64_t bit = UINT64_C(1) << (r->depth & 63);

    if (r->depth == JSON_DEPTH_MAX)
        return fail_at(r, r->pos, "nested too deeply");
    r->depth_is_object = kind == JSON_OBJECT ? r->depth_is_object | bit : r->depth_is_object & ~bit;
    r->depth++;
    r->has_member = false;
    r->pos++;
    return r->kind = kind;
}

static enum json_kind close_container(struct json_reader *r) {
    enum json_kind kind = in_object(r) ? JSON_OBJECT_END : JSON_ARRAY_END;

    r->depth--;
    r->has_member = true; /* the container itself is a member of the one around it */
    r->is_complete = r->depth == 0;
    r->pos++;
    return r->kind = kind;
}

static enum json_kind read_value(struct json_reader *r) {
    char c;

    if (r->pos == r->n)
        return fail_at(r, r->pos, "text ends where a value should be");
    c = r->text[r->pos];
    if (c == '{')
        return open_container(r, JSON_OBJECT);
    if (c == '[')
        return open_container(r, JSON_ARRAY);
    r->has_member = true;
    r->is_complete = r->depth == 0;
    if (c == '"') {
        r->pos++;
        return read_string(r, JSON_STRING);
    }
    if (c == '-' || (c >= '0' && c <= '9'))
        return read_number(r);
    if (c == 't')
        return read_word(r, "true", JSON_TRUE);
    if (c == 'f')
        return read_word(r, "false", JSON_FALSE);
    return read_word(r, "null", JSON_NULL);
}

static enum json_kind read_key(struct json_reader *r) {
    if (r->pos == r->n || r->text[r->pos] != '"')
        return fail_at(r, r->pos, "a key in quotes should be here");
    r->pos++;
    if (read_string(r, JSON_KEY) == JSON_ERROR)
        return JSON_ERROR;
    skip_space(r);
    if (r->pos == r->n || r->text[r->pos] != ':')
        return fail_at(r, r->pos, "a colon should follow the key");
    r->pos++;
    return JSON_KEY;
}

void json_init(struct json_reader *r, const char *text, size_t n) {
    *r = (struct json_reader){.text = text, .n = n};
}

enum json_kind json_next(struct json_reader *r) {
    if (r->kind == JSON_ERROR || r->kind == JSON_END)
        return r->kind;
    skip_space(r);
    if (r->is_complete) {
        if (r->pos < r->n)
            return fail_at(r, r->pos, "something follows the end of the value");
        return r->kind = JSON_END;
    }
    if (r->depth == 0 || r->kind == JSON_KEY)
        return read_value(r);
    if (r->pos == r->n)
        return fail_at(r, r->pos, "text ends inside an object or array");
    if (r->text[r->pos] == (in_object(r) ? '}' : ']'))
        return close_container(r);
    if (r->has_member) {
        if (r->text[r->pos] != ',')
            return fail_at(r, r->pos, "a comma or the end of the object or array should be here");
        r->pos++;
        skip_space(r);
    }
    return in_object(r) ? read_key(r) : read_value(r);
}

int json_leave(struct json_reader *r) {
    int outer = r->depth - 1;

    if (outer < 0)
        fail_at(r, r->pos, "no object or array to leave");
    while (r->kind != JSON_ERROR && r->depth > outer)
        json_next(r);
    return r->kind == JSON_ERROR ? -EINVAL : 0;
}

int json_skip(struct json_reader *r) {
    switch (json_next(r)) {
    case JSON_OBJECT:
    case JSON_ARRAY:
        return json_leave(r);
    case JSON_STRING:
    case JSON_NUMBER:
    case JSON_TRUE:
    case JSON_FALSE:
    case JSON_NULL:
        return 0;
    default:
        json_fail(r, "no value to skip");
        return -EINVAL;
    }
}

bool json_is(const struct json_reader *r, const char *text) {
    size_t n = strlen(text);
    const char *s = r->token, *end;

    if ((r->kind != JSON_KEY && r->kind != JSON_STRING) || r->string_bytes != n)
        return false;
    if (r->token_bytes == n)
        return memcmp(s, text, n) == 0;
    end = s + r->token_bytes;
    while (s < end) {
        char unit[UTF8_CHAR_BYTES_MAX] = {*s};
        int n_unit = 1;

        if (*s++ == '\\') {
            const char *error;
            uint32_t cp;

            s += read_escape(s, end, &cp, &error);
            n_unit = utf8_encode(cp, unit);
        }
        if (memcmp(text, unit, (size_t)n_unit) != 0)
            return false;
        text += n_unit;
    }
    return true;
}

int json_field(struct json_reader *r, const char *const *names, int n_names, uint64_t *seen) {
    assert(n_names <= 64);
    if (r->kind != JSON_KEY)
        return -1;
    for (int i = 0; i < n_names; i++) {
        if (!json_is(r, names[i]))
            continue;
        if (*seen >> i & 1) {
            json_fail(r, "the same key again");
            return -1;
        }
        *seen |= UINT64_C(1) << i;
        return i;
    }
    return -1;
}

void json_unescape(const struct json_reader *r, char *out) {
    const char *s = r->token, *end = s + r->token_bytes;

    assert(r->kind == JSON_KEY || r->kind == JSON_STRING);
    if (r->token_bytes == r->string_bytes) {
        memcpy(out, s, r->token_bytes);
        return;
    }
    while (s < end) {
        const char *error;
        uint32_t cp = 0;

        if (*s != '\\') {
            *out++ = *s++;
            continue;
        }
        s++;
        s += read_escape(s, end, &cp, &error);
        out += utf8_encode(cp, out);
    }
}

bool json_u64(const struct json_reader *r, uint64_t max, uint64_t *ret_value) {
    uint64_t value = 0;

    if (r->kind != JSON_NUMBER)
        return false;
    for (size_t i = 0; i < r->token_bytes; i++) {
        unsigned digit = (unsigned)(unsigned char)r->token[i] - '0';

        if (digit > 9 || __builtin_mul_overflow(value, 10, &value) || __builtin_add_overflow(value, digit, &value))
            return false;
    }
    if (value > max)
        return false;
    *ret_value = value;
    return true;
}

enum json_kind json_fail(struct json_reader *r, const char *error) {
    return fail_at(r, token_at(r), error);
}

int json_refuse(const struct json_reader *r, const char *path, struct report *report) {
    if (r->kind == JSON_ERROR)
        return report_error(report, -EINVAL, "%s: byte %zu: %s", path, r->error_at, r->error);
    return report_error(report, -EINVAL, "%s: byte %zu: not what should be here", path, token_at(r));
}
