/* config_parse: the form of a configuration text. Lines are [section], key = value, comments and blanks; nothing else.
 * A comment begins with # or ; at the start of a line, or with # after white space. A value in double quotes may hold
 * # and outer blanks; in quotes, \" and \\ stand for themselves. Knows no key. */
#pragma once
#include <stddef.h>

#include "report.h"
#include "text.h"

enum { CONFIG_TEXT_MAX = 1 << 20, CONFIG_LINE_MAX = 4096, CONFIG_NAME_MAX = 64 };

/* One `key = value`, or, with both NULL, a section's own line. The strings end with a zero and live until the callback
 * returns. */
struct config_pair {
    const char *file;
    int line;
    const char *section, *key, *value;
};

/* Calls on_pair for every pair in order, and stops with what it returns if that is not 0. -EINVAL with file and line in
 * the report: a line that is none of the above, a value before any section, too long a line, a zero or control byte. */
int config_parse(const char *file, const char *bytes, size_t n,
                 int (*on_pair)(void *user, const struct config_pair *pair, struct report *report), void *user,
                 struct report *report);
/* The same for "section.key=value"; `file` of the pair is "--set" and its line 0. */
int config_parse_set(const char *set, int (*on_pair)(void *user, const struct config_pair *pair, struct report *report),
                     void *user, struct report *report);
