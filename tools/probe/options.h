/* options: the command line of spillway-probe as one checked struct. */
#pragma once
#include "probe.h"

enum probe_source { SOURCE_NONE, SOURCE_IDS, SOURCE_TEXT, SOURCE_CHAT, SOURCE_BATCH };

struct command {
    struct probe_options probe;
    enum probe_source source;
    const char *source_arg; /* file, or the text itself */
    bool markup;            /* --text: markup is markup */
    bool render, tokenize, check, help;
    bool has_kv_dtype, has_draft_dtype;
};

extern const char options_usage[];

/* 0, or -EINVAL with a report. argv is kept: strings point into it. */
int options_parse(int argc, char **argv, struct command *ret_command, struct report *report);
