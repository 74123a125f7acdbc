/* The forms of values: text to field and back. */
#include "config_keys.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base.h"

struct unit {
    const char *name;
    uint64_t factor;
};
/* Largest first: a value is written with the largest unit that divides it. */
static const struct unit byte_units[] = {{"TiB", UINT64_C(1) << 40},
                                         {"GiB", UINT64_C(1) << 30},
                                         {"MiB", UINT64_C(1) << 20},
                                         {"KiB", UINT64_C(1) << 10},
                                         {"", 1},
                                         {NULL, 0}};
static const struct unit time_units[] = {{"h", 3600000}, {"min", 60000}, {"s", 1000}, {"ms", 1}, {NULL, 0}};
static const struct unit no_units[] = {{"", 1}, {NULL, 0}};

static const struct unit *units_of(const struct config_key *key) {
    return key->type == CONFIG_BYTES ? byte_units : key->type == CONFIG_DURATION ? time_units : no_units;
}

static void *field(const struct config_key *key, struct config *config) {
    return (char *)config + key->offset;
}

static const void *const_field(const struct config_key *key, const struct config *config) {
    return (const char *)config + key->offset;
}

/* Digits of the base and nothing else up to `end`; false also if there are none or the number exceeds 64 bits. */
static bool read_digits(const char *text, const char *end, unsigned base, uint64_t *ret_number) {
    uint64_t number = 0;

    if (text == end)
        return false;
    for (; text < end; text++) {
        if (*text < '0' || *text >= (char)('0' + base) || !checked_mul(number, base, &number) ||
            !checked_add(number, (uint64_t)(*text - '0'), &number))
            return false;
    }
    *ret_number = number;
    return true;
}

/* A number and its unit; a zero needs none. */
static bool read_number(const struct config_key *key, const char *text, uint64_t *ret_number) {
    const char *end = text;
    uint64_t number;

    while (*end >= '0' && *end <= '9')
        end++;
    if (!read_digits(text, end, 10, &number))
        return false;
    while (*end == ' ')
        end++;
    for (const struct unit *unit = units_of(key); unit->name; unit++)
        if (strcmp(end, unit->name) == 0 || (number == 0 && *end == '\0'))
            return checked_mul(number, unit->factor, ret_number);
    return false;
}

static bool is_allowed(const struct config_key *key, uint64_t number) {
    return number >= key->min && number <= key->max && (key->multiple == 0 || number % (unsigned)key->multiple == 0);
}

static int read_word(const struct config_key *key, const char *text) {
    for (int i = 0; key->words[i]; i++)
        if (strcmp(key->words[i], text) == 0)
            return i;
    return -EINVAL;
}

static int read_string(const struct config_key *key, const char *text, char **string) {
    size_t n = strlen(text);
    char *copy;

    if (n < key->min || n > key->max)
        return -EINVAL;
    copy = strdup(text);
    if (!copy)
        return -ENOMEM;
    free(*string);
    *string = copy;
    return 0;
}

int config_value_read(const struct config_key *key, const char *text, struct config *config) {
    void *to = field(key, config);
    uint64_t number;
    int word;

    switch (key->type) {
    case CONFIG_STRING:
        return read_string(key, text, to);
    case CONFIG_WORD:
        word = read_word(key, text);
        if (word >= 0)
            *(int *)to = word;
        return word < 0 ? word : 0;
    case CONFIG_BOOL:
        if (strcmp(text, "true") != 0 && strcmp(text, "false") != 0)
            return -EINVAL;
        *(bool *)to = text[0] == 't';
        return 0;
    case CONFIG_MODE:
        if (!read_digits(text, text + strlen(text), 8, &number) || !is_allowed(key, number))
            return -EINVAL;
        *(int *)to = (int)number;
        return 0;
    case CONFIG_INT:
    case CONFIG_BYTES:
    case CONFIG_DURATION:
        break;
    }
    if (!read_number(key, text, &number) || !is_allowed(key, number))
        return -EINVAL;
    if (key->type == CONFIG_INT)
        *(int *)to = (int)number;
    else if (key->type == CONFIG_BYTES)
        *(uint64_t *)to = number;
    else
        *(int64_t *)to = (int64_t)number;
    return 0;
}

static void write_number(const struct config_key *key, uint64_t number, char *ret_words, size_t n) {
    const struct unit *unit = units_of(key);

    while (number % unit->factor != 0)
        unit++;
    if (number == 0)
        unit = no_units;
    snprintf(ret_words, n, "%" PRIu64 "%s", number / unit->factor, unit->name);
}

/* In quotes where the plain form would lose a blank or a #. */
static void write_string(const char *string, struct text *out) {
    size_t n = strlen(string);
    bool plain = string[0] != '"' && string[0] != '#' && !strstr(string, " #") && !strstr(string, "\t#") &&
                 (n == 0 || (string[0] != ' ' && string[0] != '\t' && string[n - 1] != ' ' && string[n - 1] != '\t'));

    if (plain) {
        text_add(out, string, n);
        return;
    }
    text_add_string(out, "\"");
    for (; *string; string++) {
        if (*string == '"' || *string == '\\')
            text_add_string(out, "\\");
        text_add(out, string, 1);
    }
    text_add_string(out, "\"");
}

void config_value_write(const struct config_key *key, const struct config *config, struct text *out) {
    const void *from = const_field(key, config);
    char words[64] = "";

    switch (key->type) {
    case CONFIG_STRING:
        write_string(*(char *const *)from, out);
        return;
    case CONFIG_WORD:
        text_add_string(out, key->words[*(const int *)from]);
        return;
    case CONFIG_BOOL:
        text_add_string(out, *(const bool *)from ? "true" : "false");
        return;
    case CONFIG_MODE:
        snprintf(words, sizeof words, "%04o", (unsigned)*(const int *)from);
        break;
    case CONFIG_INT:
        write_number(key, (uint64_t) * (const int *)from, words, sizeof words);
        break;
    case CONFIG_BYTES:
        write_number(key, *(const uint64_t *)from, words, sizeof words);
        break;
    case CONFIG_DURATION:
        write_number(key, (uint64_t) * (const int64_t *)from, words, sizeof words);
        break;
    }
    text_add_string(out, words);
}

bool config_value_equal(const struct config_key *key, const struct config *a, const struct config *b) {
    const void *in_a = const_field(key, a), *in_b = const_field(key, b);

    switch (key->type) {
    case CONFIG_STRING:
        return strcmp(*(char *const *)in_a, *(char *const *)in_b) == 0;
    case CONFIG_BOOL:
        return *(const bool *)in_a == *(const bool *)in_b;
    case CONFIG_INT:
    case CONFIG_WORD:
    case CONFIG_MODE:
        return *(const int *)in_a == *(const int *)in_b;
    case CONFIG_BYTES:
    case CONFIG_DURATION:
        return memcmp(in_a, in_b, sizeof(uint64_t)) == 0;
    }
    assert(!"a type of key that is not compared");
    return false;
}

void config_value_copy(const struct config_key *key, const struct config *from, struct config *to) {
    size_t n = key->type == CONFIG_BOOL                                    ? sizeof(bool)
               : key->type == CONFIG_BYTES || key->type == CONFIG_DURATION ? sizeof(uint64_t)
                                                                           : sizeof(int);

    assert(key->type != CONFIG_STRING); /* a string has an owner */
    memcpy(field(key, to), const_field(key, from), n);
}

static void list_words(const struct config_key *key, char *ret_words, size_t n) {
    size_t used = (size_t)snprintf(ret_words, n, "%s", key->words[0]);

    for (int i = 1; key->words[i] && used < n; i++)
        used += (size_t)snprintf(ret_words + used, n - used, "%s%s", key->words[i + 1] ? ", " : " or ", key->words[i]);
}

void config_value_allowed(const struct config_key *key, char *ret_words, size_t n) {
    char min[32], max[32], multiple[48] = "";

    switch (key->type) {
    case CONFIG_WORD:
        list_words(key, ret_words, n);
        return;
    case CONFIG_BOOL:
        snprintf(ret_words, n, "true or false");
        return;
    case CONFIG_STRING:
        snprintf(ret_words, n, "%" PRIu64 " to %" PRIu64 " bytes of text", key->min, key->max);
        return;
    case CONFIG_MODE:
        snprintf(ret_words, n, "an octal number from %04" PRIo64 " to %04" PRIo64, key->min, key->max);
        return;
    case CONFIG_INT:
    case CONFIG_BYTES:
    case CONFIG_DURATION:
        break;
    }
    write_number(key, key->min, min, sizeof min);
    write_number(key, key->max, max, sizeof max);
    if (key->multiple > 0)
        snprintf(multiple, sizeof multiple, ", a multiple of %d", key->multiple);
    snprintf(ret_words, n, "%s from %s to %s%s%s",
             key->type == CONFIG_BYTES      ? "a size"
             : key->type == CONFIG_DURATION ? "a duration"
                                            : "a whole number",
             min, max, multiple,
             key->type == CONFIG_BYTES      ? ", with KiB, MiB, GiB, TiB or none for bytes"
             : key->type == CONFIG_DURATION ? ", with ms, s, min or h"
                                            : "");
}
