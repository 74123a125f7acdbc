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

/* Fills the line and returns `error`, so that a refusal is one statement: return report_error(r, -EINVAL, "..."). */
__attribute__((format(printf, 3, 4))) static inline int report_error(struct report *report, int error,
                                                                     const char *format, ...) {
    va_list args;

    va_start(args, format);
    vsnprintf(report->line, sizeof report->line, format, args);
    va_end(args);
    for (char *c = report->line; *c; c++) /* names come from foreign files; the report stays one line */
        if ((unsigned char)*c < 0x20 || *c == 0x7f)
            *c = '?';
    return error;
}
