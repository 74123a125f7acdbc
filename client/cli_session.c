/* Sessions: token lists that the daemon keeps. */
#include "cli.h"

#define ONE_NAME .arguments = "NAME", .word_keys = {{"name", CLI_STRING}}, .n_words_min = 1, .n_words_max = 1

static const struct cli_option fork_options[] = {
    {"at", "at", CLI_INT, false, "N", "the copy begins with the first N tokens; otherwise all"},
    {0},
};

static const struct cli_option resume_options[] = {
    {"wait", "wait", CLI_TRUE, false, NULL, "return when they are there"},
    {0},
};

const struct cli_command cli_session_commands[] = {
    {.name = "sessions",
     .arguments = "",
     .summary = "List this user's sessions",
     .method = "session.list",
     .table = "sessions"},
    {.name = "session open",
     ONE_NAME,
     .summary = "Make a session, or find the one of that name",
     .method = "session.open"},
    {.name = "session close",
     ONE_NAME,
     .summary = "Forget a session and its record",
     .method = "session.close",
     .is_slow = true},
    {.name = "session info", ONE_NAME, .summary = "Show a session", .method = "session.info"},
    {.name = "session park",
     ONE_NAME,
     .summary = "Put a session down: durable, and off the device",
     .method = "session.park",
     .is_slow = true},
    {.name = "session resume",
     ONE_NAME,
     .summary = "Begin to fetch a session's pages to the device",
     .options = resume_options,
     .method = "session.resume",
     .is_slow = true},
    {.name = "session fork",
     .arguments = "NAME NEW_NAME",
     .summary = "Make a second session that shares pages with the first",
     .word_keys = {{"name", CLI_STRING}, {"new_name", CLI_STRING}},
     .n_words_min = 2,
     .n_words_max = 2,
     .options = fork_options,
     .method = "session.fork"},
    {.name = "session pin", ONE_NAME, .summary = "Keep a session's pages where they are", .method = "session.pin"},
    {.name = "session unpin", ONE_NAME, .summary = "Let a session's pages leave again", .method = "session.unpin"},
    {0},
};
