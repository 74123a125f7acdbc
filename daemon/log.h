/* log: one structured line for one event: ts=... level=info event=request.done id=7 ... Owns its descriptor's use, not the
 * descriptor. Used by the loop thread alone; never blocks: a line that the other side does not take is dropped and
 * counted. Text of prompts and answers is never handed to it. */
#pragma once
#include <stdbool.h>
#include <stdint.h>

enum log_level { LOG_ERROR, LOG_WARN, LOG_INFO, LOG_DEBUG };
enum { LOG_LINE_MAX = 2048, LOG_EVENTS_MAX = 64, LOG_BURST = 200 /* lines of one event in one second */ };

struct log_event { /* how often one event was written in the running second */
    const char *name;
    int64_t second;
    int n;
    uint64_t n_suppressed;
};
struct log {
    int fd;
    enum log_level level;
    bool journal;                            /* lines begin with <N>; the journal has the time */
    int64_t (*now_us)(void);                 /* wall clock, microseconds */
    uint64_t n_dropped;                      /* lines since the last one that was taken */
    uint64_t n_lost;                         /* dropped or suppressed since log_init */
    struct log_event events[LOG_EVENTS_MAX]; /* open table by name; a full one stops limiting the rest */
};

/* journal: log_is_journal() of the descriptor. now_us NULL: the real clock. */
void log_init(struct log *log, int fd, enum log_level level, bool journal, int64_t (*now_us)(void));
/* Whether fd is the stream that $JOURNAL_STREAM ("device:inode", NULL if unset) names. */
bool log_is_journal(int fd, const char *journal_stream);
void log_set_level(struct log *log, enum log_level level); /* from now on */
const char *log_level_name(enum log_level level);
/* -1: no such level. */
int log_level_find(const char *name);

/* `event` is a literal; `format` is printf's for "key=%s key=%d ...", with the conversions d i u x c s (l ll z j * .* and
 * precisions) f g. A %s is quoted and escaped where needed, so that a value can neither end the line nor add keys. */
__attribute__((format(printf, 4, 5))) void log_line(struct log *log, enum log_level level, const char *event,
                                                    const char *format, ...);
/* An event without pairs. */
void log_plain(struct log *log, enum log_level level, const char *event);
