#include "log.h"

#include <assert.h>
#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base.h"

static const char *const level_names[] = {"error", "warn", "info", "debug"};
static const int syslog_priority[] = {3, 4, 6, 7};

/* ---- building a line ---------------------------------------------------------------------------------------------- */

/* What does not fit is cut, and the line then ends in " cut=true". */
struct line {
    char bytes[LOG_LINE_MAX];
    size_t n;
    bool cut;
};
static const char cut_mark[] = " cut=true\n";

static void add(struct line *line, const char *bytes, size_t n) {
    size_t room = sizeof line->bytes - line->n - (sizeof cut_mark - 1);

    if (n > room) {
        line->cut = true;
        n = 0; /* whole pieces only: half an escape says something else */
    }
    if (line->cut)
        return;
    memcpy(line->bytes + line->n, bytes, n);
    line->n += n;
}

__attribute__((format(printf, 2, 3))) static void add_format(struct line *line, const char *format, ...) {
    char piece[128];
    va_list args;
    int n;

    va_start(args, format);
    n = vsnprintf(piece, sizeof piece, format, args);
    va_end(args);
    if (n > 0)
        add(line, piece, (size_t)min_int(n, sizeof piece - 1));
}

static bool is_plain(const char *value, size_t n) {
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)value[i];

        if (c <= ' ' || c == '"' || c == '=' || c == '\\' || c >= 0x7f)
            return false;
    }
    return n > 0;
}

static void add_value(struct line *line, const char *value, size_t n) {
    if (is_plain(value, n)) {
        add(line, value, n);
        return;
    }
    add(line, "\"", 1);
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)value[i];

        if (c == '"' || c == '\\')
            add_format(line, "\\%c", c);
        else if (c == '\n')
            add(line, "\\n", 2);
        else if (c < ' ' || c >= 0x7f)
            add_format(line, "\\x%02x", c);
        else
            add(line, value + i, 1);
    }
    add(line, "\"", 1);
}

/* One conversion of a format: %[flags][width][.precision][length]type. */
struct conversion {
    char spec[32]; /* without the length, which becomes ll; a * of it is resolved */
    size_t n;
    int precision; /* -1: none */
    char length;   /* 0, l, L (ll), z, j */
    char type;
};

static int read_star(const char **format, va_list *args) {
    char *end;
    long number;

    if (**format == '*') {
        (*format)++;
        return va_arg(*args, int);
    }
    number = strtol(*format, &end, 10);
    *format = end;
    return (int)number;
}

static const char *read_conversion(const char *format, va_list *args, struct conversion *ret) {
    const char *start = format;

    *ret = (struct conversion){.spec = "%", .n = 1, .precision = -1};
    format += strspn(format, "-+ #0");
    assert(format - start < 8);
    memcpy(ret->spec + 1, start, (size_t)(format - start));
    ret->n += (size_t)(format - start);
    if (*format == '*' || (*format >= '1' && *format <= '9'))
        ret->n += (size_t)snprintf(ret->spec + ret->n, sizeof ret->spec - ret->n, "%d", read_star(&format, args));
    if (*format == '.') {
        format++;
        ret->precision = read_star(&format, args);
    }
    if (*format == 'l' || *format == 'z' || *format == 'j') {
        ret->length = *format++;
        if (*format == 'l') {
            ret->length = 'L';
            format++;
        }
    }
    ret->type = *format;
    return *format ? format + 1 : format;
}

static long long take_signed(const struct conversion *c, va_list *args) {
    return c->length == 'L'   ? va_arg(*args, long long)
           : c->length == 'l' ? va_arg(*args, long)
           : c->length == 'z' ? (long long)va_arg(*args, ssize_t)
           : c->length == 'j' ? (long long)va_arg(*args, intmax_t)
                              : va_arg(*args, int);
}

static unsigned long long take_unsigned(const struct conversion *c, va_list *args) {
    return c->length == 'L'   ? va_arg(*args, unsigned long long)
           : c->length == 'l' ? va_arg(*args, unsigned long)
           : c->length == 'z' ? va_arg(*args, size_t)
           : c->length == 'j' ? va_arg(*args, uintmax_t)
                              : va_arg(*args, unsigned);
}

static void add_string_arg(struct line *line, const struct conversion *c, va_list *args) {
    const char *value = va_arg(*args, const char *);

    if (!value)
        value = "";
    add_value(line, value, c->precision >= 0 ? strnlen(value, (size_t)c->precision) : strlen(value));
}

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral" /* specs are rebuilt from a format that the compiler has checked */
static void add_conversion(struct line *line, struct conversion *c, va_list *args) {
    char piece[128];
    int n = 0;

    switch (c->type) {
    case '%':
        add(line, "%", 1);
        return;
    case 's':
        add_string_arg(line, c, args);
        return;
    case 'c':
        add_value(line, (char[]){(char)va_arg(*args, int)}, 1);
        return;
    case 'd':
    case 'i':
        snprintf(c->spec + c->n, sizeof c->spec - c->n, "lld");
        n = snprintf(piece, sizeof piece, c->spec, take_signed(c, args));
        break;
    case 'u':
    case 'x':
        snprintf(c->spec + c->n, sizeof c->spec - c->n, "ll%c", c->type);
        n = snprintf(piece, sizeof piece, c->spec, take_unsigned(c, args));
        break;
    case 'f':
    case 'g':
        snprintf(c->spec + c->n, sizeof c->spec - c->n, ".*%c", c->type);
        n = snprintf(piece, sizeof piece, c->spec, c->precision >= 0 ? c->precision : 6, va_arg(*args, double));
        break;
    default:
        assert(!"a conversion that log_line does not know");
    }
    add(line, piece, (size_t)min_int(max_int(n, 0), sizeof piece - 1));
}
#pragma GCC diagnostic pop

static void add_pairs(struct line *line, const char *format, va_list *args) {
    while (*format) {
        size_t n = strcspn(format, "%");
        struct conversion c;

        add(line, format, n);
        format += n;
        if (*format != '%')
            break;
        format = read_conversion(format + 1, args, &c);
        add_conversion(line, &c, args);
    }
}

static void add_time(struct line *line, int64_t now_us) {
    time_t seconds = (time_t)(now_us / 1000000);
    struct tm tm;

    gmtime_r(&seconds, &tm);
    add_format(line, "ts=%04d-%02d-%02dT%02d:%02d:%02d.%03dZ ", tm.tm_year + 1900, tm.tm_mon + 1, tm.tm_mday,
               tm.tm_hour, tm.tm_min, tm.tm_sec, (int)(now_us % 1000000 / 1000));
}

/* ---- limiting, writing -------------------------------------------------------------------------------------------- */

/* The event's row, found by the literal's text; NULL if the table is full of others. */
static struct log_event *find_event(struct log *log, const char *name) {
    for (int i = 0; i < LOG_EVENTS_MAX; i++) {
        struct log_event *event = &log->events[i];

        if (!event->name)
            event->name = name;
        if (event->name == name || strcmp(event->name, name) == 0)
            return event;
    }
    return NULL;
}

/* Whether one more line of the event may be written in this second. */
static bool admit(struct log_event *event, int64_t second) {
    if (event->second != second) {
        event->second = second;
        event->n = 0;
    }
    if (event->n < LOG_BURST) {
        event->n++;
        return true;
    }
    event->n_suppressed++;
    return false;
}

/* False: the other side is not ready; nothing or (only of a line longer than its room) a part was written. */
static bool write_line(const struct log *log, const struct line *line) {
    struct pollfd ready = {.fd = log->fd, .events = POLLOUT};
    ssize_t n;

    if (poll(&ready, 1, 0) != 1 || !(ready.revents & POLLOUT))
        return false;
    do
        n = write(log->fd, line->bytes, line->n);
    while (n < 0 && errno == EINTR);
    return n == (ssize_t)line->n;
}

/* format NULL: no pairs */
static void write_event(struct log *log, enum log_level level, const char *event, const char *format, va_list *args) {
    struct log_event *rate;
    struct line line = {.n = 0};
    int64_t now_us;

    if (level > log->level)
        return;
    now_us = log->now_us();
    rate = find_event(log, event);
    if (rate && !admit(rate, now_us / 1000000)) {
        log->n_lost++;
        return;
    }
    if (log->journal)
        add_format(&line, "<%d>", syslog_priority[level]);
    else
        add_time(&line, now_us);
    add_format(&line, "level=%s event=%s", level_names[level], event);
    if (log->n_dropped > 0)
        add_format(&line, " dropped=%llu", (unsigned long long)log->n_dropped);
    if (rate && rate->n_suppressed > 0)
        add_format(&line, " suppressed=%llu", (unsigned long long)rate->n_suppressed);
    if (format) {
        add(&line, " ", 1);
        add_pairs(&line, format, args);
    }
    if (line.cut) {
        memcpy(line.bytes + line.n, cut_mark, sizeof cut_mark - 1);
        line.n += sizeof cut_mark - 1;
    } else {
        line.bytes[line.n++] = '\n';
    }
    if (!write_line(log, &line)) {
        log->n_dropped++;
        log->n_lost++;
        return;
    }
    log->n_dropped = 0;
    if (rate)
        rate->n_suppressed = 0;
}

void log_line(struct log *log, enum log_level level, const char *event, const char *format, ...) {
    va_list args;

    va_start(args, format);
    write_event(log, level, event, format, &args);
    va_end(args);
}

void log_plain(struct log *log, enum log_level level, const char *event) {
    write_event(log, level, event, NULL, NULL);
}

/* ---- the rest ----------------------------------------------------------------------------------------------------- */

static int64_t wall_clock_us(void) {
    struct timespec now;

    clock_gettime(CLOCK_REALTIME, &now);
    return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

void log_init(struct log *log, int fd, enum log_level level, bool journal, int64_t (*now_us)(void)) {
    *log = (struct log){.fd = fd, .level = level, .journal = journal, .now_us = now_us ? now_us : wall_clock_us};
}

bool log_is_journal(int fd, const char *journal_stream) {
    char mine[64];
    struct stat st;

    if (!journal_stream || fstat(fd, &st) != 0)
        return false;
    snprintf(mine, sizeof mine, "%llu:%llu", (unsigned long long)st.st_dev, (unsigned long long)st.st_ino);
    return strcmp(mine, journal_stream) == 0;
}

void log_set_level(struct log *log, enum log_level level) {
    log->level = level;
}

const char *log_level_name(enum log_level level) {
    return level_names[level];
}

int log_level_find(const char *name) {
    for (size_t i = 0; i < ARRAY_LEN(level_names); i++)
        if (strcmp(level_names[i], name) == 0)
            return (int)i;
    return -1;
}
