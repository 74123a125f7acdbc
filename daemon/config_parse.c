#include "config_parse.h"

#include <errno.h>
#include <stdbool.h>
#include <string.h>

#include "base.h"

/* Set by C's rules of the "C" locale, whatever the process has. */
static bool is_blank(char c) {
    return c == ' ' || c == '\t';
}

static bool is_control(char c) {
    return ((unsigned char)c < 0x20 && c != '\t') || c == 0x7f;
}

static bool is_name_char(char c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_';
}

static char *skip_blanks(char *p) {
    while (is_blank(*p))
        p++;
    return p;
}

static void cut_blanks(char *begin) {
    size_t n = strlen(begin);

    while (n > 0 && is_blank(begin[n - 1]))
        begin[--n] = '\0';
}

static bool is_name(const char *name) {
    size_t n = 0;

    while (is_name_char(name[n]))
        n++;
    return n > 0 && n <= CONFIG_NAME_MAX && name[n] == '\0';
}

/* Cuts a comment from what follows a value: the first # after white space. */
static void cut_comment(char *p) {
    for (char *c = p; *c; c++)
        if (*c == '#' && (c == p || is_blank(c[-1]))) {
            *c = '\0';
            break;
        }
    cut_blanks(p);
}

/* Takes the quotes off in place. False: no closing quote, an unknown escape, or something behind the closing quote. */
static bool unquote(char *value) {
    char *to = value, *from = value + 1;

    for (; *from && *from != '"'; from++) {
        if (*from == '\\' && *++from != '"' && *from != '\\')
            return false;
        *to++ = *from;
    }
    if (*from != '"')
        return false;
    cut_comment(++from);
    *to = '\0';
    return *from == '\0';
}

struct parser {
    const char *file;
    int line;
    char section[CONFIG_NAME_MAX + 1];
    int (*on_pair)(void *user, const struct config_pair *pair, struct report *report);
    void *user;
};

static int take_section(struct parser *parser, char *p, struct report *report) {
    char *end = strchr(p, ']'), *name = skip_blanks(p + 1);

    if (end) {
        cut_comment(end + 1);
        *end = '\0';
        cut_blanks(name);
    }
    if (!end || *skip_blanks(end + 1) || !is_name(name))
        return report_error(report, -EINVAL, "%s:%d: not a section: expected [name] alone on its line",
                            report_path(parser->file), parser->line);
    memcpy(parser->section, name, strlen(name) + 1);
    return parser->on_pair(
        parser->user, &(struct config_pair){.file = parser->file, .line = parser->line, .section = parser->section},
        report);
}

static int take_pair(struct parser *parser, char *key, char *equals, struct report *report) {
    struct config_pair pair = {.file = parser->file, .line = parser->line, .section = parser->section, .key = key};
    char *value = skip_blanks(equals + 1);

    *equals = '\0';
    cut_blanks(key);
    if (!is_name(key))
        return report_error(report, -EINVAL, "%s:%d: not a key: '%.64s' (lower case, digits and _, at most %d bytes)",
                            report_path(parser->file), parser->line, key, CONFIG_NAME_MAX);
    if (parser->section[0] == '\0')
        return report_error(report, -EINVAL, "%s:%d: %s stands before any [section]", report_path(parser->file),
                            parser->line, key);
    if (*value != '"')
        cut_comment(value);
    else if (!unquote(value))
        return report_error(report, -EINVAL,
                            "%s:%d: the quoted value of %s must end with a quote; inside, write \\\" and \\\\",
                            report_path(parser->file), parser->line, key);
    pair.value = value;
    return parser->on_pair(parser->user, &pair, report);
}

static int take_line(struct parser *parser, char *line, struct report *report) {
    char *p = skip_blanks(line), *equals;

    if (*p == '\0' || *p == '#' || *p == ';')
        return 0;
    if (*p == '[')
        return take_section(parser, p, report);
    equals = strchr(p, '=');
    if (!equals)
        return report_error(report, -EINVAL, "%s:%d: neither [section], nor key = value, nor a comment: '%.40s'",
                            report_path(parser->file), parser->line, p);
    return take_pair(parser, p, equals, report);
}

/* The line's bytes with a zero at the end. A carriage return before the newline goes with it. */
static int copy_line(const struct parser *parser, const char *bytes, size_t n, char *ret_line, struct report *report) {
    if (n > 0 && bytes[n - 1] == '\r')
        n--;
    if (n > CONFIG_LINE_MAX)
        return report_error(report, -EINVAL, "%s:%d: the line has %zu bytes, at most %d are allowed",
                            report_path(parser->file), parser->line, n, CONFIG_LINE_MAX);
    for (size_t i = 0; i < n; i++)
        if (is_control(bytes[i]))
            return report_error(report, -EINVAL, "%s:%d: byte %zu is 0x%02x: not a text file?",
                                report_path(parser->file), parser->line, i + 1, (unsigned char)bytes[i]);
    memcpy(ret_line, bytes, n);
    ret_line[n] = '\0';
    return 0;
}

int config_parse(const char *file, const char *bytes, size_t n,
                 int (*on_pair)(void *user, const struct config_pair *pair, struct report *report), void *user,
                 struct report *report) {
    struct parser parser = {.file = file, .on_pair = on_pair, .user = user};
    char line[CONFIG_LINE_MAX + 1];
    size_t begin = 0;

    if (n > CONFIG_TEXT_MAX)
        return report_error(report, -EINVAL, "%s: %zu bytes, at most %d are allowed", report_path(file), n,
                            CONFIG_TEXT_MAX);
    while (begin < n) {
        const char *end = memchr(bytes + begin, '\n', n - begin);
        size_t n_line = end ? (size_t)(end - bytes) - begin : n - begin;
        int r;

        parser.line++;
        r = copy_line(&parser, bytes + begin, n_line, line, report);
        if (r == 0)
            r = take_line(&parser, line, report);
        if (r != 0)
            return r;
        begin += n_line + 1;
    }
    return 0;
}

int config_parse_set(const char *set, int (*on_pair)(void *user, const struct config_pair *pair, struct report *report),
                     void *user, struct report *report) {
    const char *dot = strchr(set, '.'), *equals = strchr(set, '=');
    char section[CONFIG_NAME_MAX + 1], key[CONFIG_NAME_MAX + 1];
    struct config_pair pair = {.file = "--set", .section = section, .key = key};
    size_t n_section, n_key;

    if (!dot || !equals || dot > equals)
        return report_error(report, -EINVAL, "--set %.64s: expected section.key=value", set);
    n_section = (size_t)(dot - set);
    n_key = (size_t)(equals - dot) - 1;
    if (n_section > CONFIG_NAME_MAX || n_key > CONFIG_NAME_MAX)
        return report_error(report, -EINVAL, "--set %.64s: a name has at most %d bytes", set, CONFIG_NAME_MAX);
    if (strlen(equals + 1) > CONFIG_LINE_MAX)
        return report_error(report, -EINVAL, "--set %.*s: the value has more than %d bytes", (int)(equals - set), set,
                            CONFIG_LINE_MAX);
    for (const char *c = equals + 1; *c; c++) /* a newline would look like another key where values are printed */
        if (is_control(*c))
            return report_error(report, -EINVAL, "--set %.*s: byte %d of the value is 0x%02x; it is text of one line",
                                (int)(equals - set), set, (int)(c - equals), (unsigned char)*c);
    memcpy(section, set, n_section);
    section[n_section] = '\0';
    memcpy(key, dot + 1, n_key);
    key[n_key] = '\0';
    if (!is_name(section) || !is_name(key))
        return report_error(report, -EINVAL, "--set %.64s: a name is made of lower case, digits and _", set);
    pair.value = equals + 1;
    return on_pair(user, &pair, report);
}
