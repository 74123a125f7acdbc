/* report: one line saying what was wrong, with which file and object, and what to do. Filled by whoever refuses. */
#pragma once
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

struct report {
    char line[512];
};

/* What a report shows of a path: at most its last 160 bytes, so that the reason behind it fits. */
static inline const char *report_path(const char *path) {
    size_t n = strlen(path);

    return n > 160 ? path + n - 160 : path;
}

/* Fills the line; its value is `error`, so that a refusal is one statement: return report_error(r, -EINVAL, "...").
 * A macro, because static analysis does not see the value come back through a variadic function. */
#define report_error(report, error, ...) (report_line((report), __VA_ARGS__), report_value(error))

static inline int report_value(int error) {
    return error;
}
__attribute__((format(printf, 2, 3))) static inline void report_line(struct report *report, const char *format, ...) {
    va_list args;

    va_start(args, format);
    vsnprintf(report->line, sizeof report->line, format, args);
    va_end(args);
    for (char *c = report->line; *c; c++) /* names come from foreign files; the report stays one line */
        if ((unsigned char)*c < 0x20 || *c == 0x7f)
            *c = '?';
}
