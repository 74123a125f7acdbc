#include "proto_internal.h"

#include "base.h"
#include "frame.h"

/* The largest integer that every client can name; sizes in bytes and token counts stay below. */
#define INT_MAX_53 9007199254740992.0

#define PARAMS(array) .params = (array), .n_params = ARRAY_LEN(array)
#define FIELDS(array) .fields = (array), .n_fields = ARRAY_LEN(array)

static const char *const tier_choices[] = {"device", "host", "disk", NULL};
static const char *const level_choices[] = {"error", "warn", "info", "debug", NULL};

static const struct proto_param hello_params[] = {
    {.name = "version",
     .type = PARAM_INT,
     .is_required = true,
     .min = PROTO_VERSION,
     .max = PROTO_VERSION,
     .doc = "of the protocol that the client speaks"},
};
static const struct proto_field hello_fields[] = {
    {"version", "int", "of the protocol, 1"},
    {"features", "[string]", "what this daemon can do beyond version 1"},
    {"limits", "map", "`{frame_bytes, requests, context}`: of a message, of unanswered requests, of a conversation"},
    {"model", "map or nil", "as of `model.info`; nil while it is loaded"},
    {"uid", "int", "the user this connection belongs to"},
};
static const struct proto_field model_fields[] = {
    {"name", "string", "of the checkpoint's folder"},
    {"n_vocab", "int", "token ids are below it"},
    {"n_context", "int", "tokens of a conversation at most"},
    {"fingerprint", "string", "changes with anything that may change tokens"},
    {"draft", "map or nil", "`{name, block}`: the drafter; nil if there is none"},
    {"backend", "string", "what computes"},
};
static const struct proto_param tokenize_params[] = {
    {.name = "text", .type = PARAM_STRING, .is_required = true, .doc = "text to cut into tokens"},
    {.name = "markup", .type = PARAM_BOOL, .default_text = "false", .doc = "it may hold markup such as `<|im_start|>`"},
};
static const struct proto_field tokenize_fields[] = {{"ids", "[int]", "its tokens"}};
static const struct proto_param detokenize_params[] = {
    {.name = "ids", .type = PARAM_IDS, .is_required = true, .doc = "token ids"},
};
static const struct proto_field detokenize_fields[] = {
    {"text", "string", "their text; bytes that are no UTF-8 become U+FFFD"},
};
static const struct proto_param render_params[] = {
    {.name = "messages", .type = PARAM_MAPS, .is_required = true, .doc = "as of `gen.start`"},
    {.name = "tools", .type = PARAM_MAPS, .default_text = "none", .doc = "as of `gen.start`"},
    {.name = "thinking", .type = PARAM_BOOL, .default_text = "the template's", .doc = "as of `gen.start`"},
    {.name = "add_generation_prompt",
     .type = PARAM_BOOL,
     .default_text = "true",
     .doc = "end with the head of the assistant's turn"},
};
static const struct proto_field render_fields[] = {
    {"text", "string", "what the template makes of them"},
    {"ids", "[int]", "its tokens"},
    {"cached", "{device, host, disk}", "how many of them each tier has"},
};
static const struct proto_param cancel_params[] = {
    {.name = "id",
     .type = PARAM_INT,
     .min = 0,
     .max = UINT32_MAX,
     .doc = "of a `gen.start` of this connection, the latest if several have it; exactly one of `id` and `gen`"},
    {.name = "gen",
     .type = PARAM_INT,
     .min = 1,
     .max = INT_MAX_53,
     .doc = "its number in `gen.list`, of any connection of this user; of any user for the administrator"},
};
static const struct proto_field list_fields[] = {
    {"gens", "[map]",
     "of this user; of all for the administrator: `{gen, id, uid, state, session, n_prompt, n_tokens, age_ms}`; "
     "`gen` is the daemon's number, `id` the client's"},
};
static const struct proto_param session_params[] = {
    {.name = "name", .type = PARAM_NAME, .is_required = true, .doc = "of the session"},
};
static const struct proto_param fork_params[] = {
    {.name = "name", .type = PARAM_NAME, .is_required = true, .doc = "of the session to copy"},
    {.name = "new_name", .type = PARAM_NAME, .is_required = true, .doc = "of the copy"},
    {.name = "at",
     .type = PARAM_INT,
     .min = 0,
     .max = INT32_MAX,
     .default_text = "all",
     .doc = "tokens that the copy begins with"},
};
static const struct proto_field session_fields[] = {
    {"name", "string", "of the session"},
    {"n_tokens", "int", "of its conversation"},
    {"restore_point", "int",
     "tokens from which its next turn could go on when that was last looked for, while it is parked: when it was put "
     "down; `cached` says what is left of it"},
    {"cached", "{device, host, disk}", "how many of them each tier has"},
    {"pinned", "bool",
     "its pages do not leave the device; while it is parked they have left it, and stay again when session.resume or "
     "its next turn brought them back"},
    {"parked", "bool", "it was put down, and nobody has come back to it"},
    {"durable", "bool",
     "it outlives the daemon: there is a disk tier, and it takes records; while it is parked: its pages up to "
     "`restore_point` are there too"},
};
static const struct proto_field sessions_fields[] = {{"sessions", "[map]", "of this user, each as `session.info`"}};
static const struct proto_param resume_params[] = {
    {.name = "name", .type = PARAM_NAME, .is_required = true, .doc = "of the session"},
    {.name = "wait", .type = PARAM_BOOL, .default_text = "false", .doc = "answer when its pages are on the device"},
};
static const struct proto_field park_fields[] = {
    {"tokens", "int", "of its conversation that its next turn need not compute again"},
    {"bytes", "int", "of the device that became free; what other sessions share stays"},
    {"tier", "string",
     "where they all are now: \"disk\" or \"host\"; \"none\": no tier below the device has them, and what other "
     "sessions do not share is computed again"},
    {"durable", "bool", "they outlive the daemon, and so does the session"},
};
static const struct proto_param lookup_params[] = {
    {.name = "prompt_ids", .type = PARAM_IDS, .is_required = true, .n_min = 1, .doc = "token ids of a prompt"},
    {.name = "prefetch", .type = PARAM_BOOL, .default_text = "false", .doc = "begin to fetch them to the device"},
};
static const struct proto_field lookup_fields[] = {
    {"device", "int", "tokens that would come from the device"},
    {"host", "int", "from host memory"},
    {"disk", "int", "from disk"},
};
static const struct proto_field cache_stats_fields[] = {
    {"tiers", "map", "`{device, host, disk}`, each `{bytes, used_bytes, pages, hits, spilled, fetched, evicted}`"},
};
static const struct proto_param evict_params[] = {
    {.name = "tier", .type = PARAM_CHOICE, .is_required = true, .choices = tier_choices, .doc = "where to make room"},
    {.name = "bytes",
     .type = PARAM_INT,
     .min = 1,
     .max = INT_MAX_53,
     .doc = "at least so many; exactly one of `bytes` and `all`"},
    {.name = "all", .type = PARAM_BOOL, .doc = "true: everything that nobody uses"},
};
static const struct proto_field evict_fields[] = {
    {"pages", "int", "that left the tier"},
    {"bytes", "int", "that they had"},
};
static const struct proto_field verify_fields[] = {
    {"checked", "int", "pages and states that were read"},
    {"damaged", "int", "of these, not what was written, and dropped"},
    {"unread", "int", "that the disk did not give in time"},
};
static const struct proto_field flush_fields[] = {
    {"saved", "int", "pages and states that were written meanwhile"},
    {"bytes", "int", "that they have"},
};
static const struct proto_param purge_params[] = {
    {.name = "uid",
     .type = PARAM_INT,
     .min = 0,
     .max = UINT32_MAX - 1,
     .default_text = "the connection's",
     .doc = "whose; that of others needs an administrator"},
};
static const struct proto_field purge_fields[] = {
    {"device", "int", "bytes that went from the device"},
    {"host", "int", "from host memory"},
    {"disk", "int", "from disk"},
    {"left", "int", "pages that requests still used after half a minute, and that stay"},
};
static const struct proto_field health_fields[] = {
    {"live", "bool", "the loop runs: true in every answer"},
    {"ready", "bool", "requests are served"},
    {"progressing", "bool", "work is done, or there is none"},
    {"phase", "string", "\"loading\", \"serving\" or \"draining\""},
    {"percent", "int",
     "of the phase: loading, what is done; serving, 100; draining, 0 to 99: of the requests that ran when it began, "
     "those that have ended"},
};
static const struct proto_field stats_fields[] = {
    {"uptime_ms", "int", "since the start"},
    {"connections", "map", "`{open, accepted, refused}`"},
    {"requests", "map", "`{running, waiting, finished}`"},
    {"tokens", "map", "`{prompt, completion, proposed, accepted}`: counts since the start"},
};
static const struct proto_field metrics_fields[] = {{"text", "string", "in the text format of Prometheus"}};
static const struct proto_field config_fields[] = {
    {"values", "map", "every key `section.key`: `{value, origin}`"},
};
static const struct proto_field reload_fields[] = {
    {"changed", "[string]", "keys with a new value"},
    {"needs_restart", "[string]", "keys with a new value that counts from the next start"},
};
static const struct proto_field drain_fields[] = {{"running", "int", "requests that are still to finish"}};
static const struct proto_param level_params[] = {
    {.name = "level", .type = PARAM_CHOICE, .is_required = true, .choices = level_choices, .doc = "from now on"},
};
static const struct proto_field level_fields[] = {{"previous", "string", "the level until now"}};

#define EXAMPLE_INFO                                                                                                   \
    "{\"name\": \"notes\", \"n_tokens\": 1240, \"restore_point\": 1216, \"cached\": {\"device\": 1216, \"host\": 0, "  \
    "\"disk\": 0}, \"pinned\": false, \"parked\": false, \"durable\": true}"
#define EXAMPLE_NAME "{\"name\": \"notes\"}"
#define EXAMPLE_MODEL                                                                                                  \
    "{\"name\": \"tiny\", \"n_vocab\": 2048, \"n_context\": 4096, \"fingerprint\": \"5f0c\", \"draft\": {\"name\": "   \
    "\"tiny-draft\", \"block\": 16}, \"backend\": \"cpu\"}"
#define EXAMPLE_MESSAGES "[{\"role\": \"user\", \"content\": \"What is the code of the red door?\"}]"

const struct proto_method proto_methods[METHOD_N] = {
    [METHOD_HELLO] = {.name = "hello",
                      .flags = METHOD_BEFORE_HELLO | METHOD_WHILE_LOADING,
                      PARAMS(hello_params),
                      FIELDS(hello_fields),
                      .doc = "The first request of every connection; others before it are refused with `FORBIDDEN`.",
                      .example_params = "{\"version\": 1}",
                      .example_result =
                          "{\"version\": 1, \"features\": [], \"limits\": {\"frame_bytes\": 16777216, "
                          "\"requests\": 256, \"context\": 4096}, \"model\": " EXAMPLE_MODEL ", \"uid\": 1000}"},
    [METHOD_MODEL_INFO] = {.name = "model.info",
                           FIELDS(model_fields),
                           .doc = "What is served.",
                           .example_params = "{}",
                           .example_result = EXAMPLE_MODEL},
    [METHOD_TEXT_TOKENIZE] = {.name = "text.tokenize",
                              PARAMS(tokenize_params),
                              FIELDS(tokenize_fields),
                              .doc = "Text to token ids.",
                              .example_params = "{\"text\": \"the red door\", \"markup\": false}",
                              .example_result = "{\"ids\": [262, 810, 1411]}"},
    [METHOD_TEXT_DETOKENIZE] = {.name = "text.detokenize",
                                PARAMS(detokenize_params),
                                FIELDS(detokenize_fields),
                                .doc = "Token ids to text.",
                                .example_params = "{\"ids\": [262, 810, 1411]}",
                                .example_result = "{\"text\": \"the red door\"}"},
    [METHOD_CHAT_RENDER] = {.name = "chat.render",
                            PARAMS(render_params),
                            FIELDS(render_fields),
                            .doc = "What `gen.start` would run on for these messages.",
                            .example_params = "{\"messages\": " EXAMPLE_MESSAGES ", \"thinking\": false}",
                            .example_result =
                                "{\"text\": \"<|im_start|>user\\nWhat is the code of the red "
                                "door?<|im_end|>\\n<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n\", "
                                "\"ids\": [2045, 310], \"cached\": {\"device\": 0, \"host\": 0, \"disk\": "
                                "0}}"},
    [METHOD_GEN_START] =
        {.name = "gen.start",
         PARAMS(proto_gen_start_params),
         FIELDS(proto_gen_start_fields),
         .doc =
             "Runs the model on exactly one of `prompt`, `prompt_ids` and `messages`. While it runs the daemon sends "
             "`gen.event`s; then comes exactly one response and no event after it. A request that was admitted "
             "always ends with a result; an error says that it was not.",
         .example_params = "{\"messages\": " EXAMPLE_MESSAGES ", \"max_tokens\": 64, \"temperature\": 0, \"stop\": "
                           "[\"\\n\\n\"], \"logit_bias\": {\"1411\": -2.5}, \"seed\": 42}",
         .example_result = "{\"text\": \"The code is 4711.\", \"message\": {\"content\": \"The code is 4711.\"}, "
                           "\"finish_reason\": \"stop\", \"usage\": {\"prompt\": 1200, \"completion\": 9, "
                           "\"reasoning\": 0, \"cached\": {\"device\": 1024, \"host\": 0, \"disk\": 0}, "
                           "\"recomputed\": 0, \"draft\": {\"steps\": 2, \"proposed\": 30, \"accepted\": 6}}, "
                           "\"timings\": {\"queue_ms\": 0.1, \"restore_ms\": 0.0, \"prefill_ms\": 12.5, \"decode_ms\": "
                           "14.0, \"ttft_ms\": 12.9}}"},
    [METHOD_GEN_CANCEL] = {.name = "gen.cancel",
                           PARAMS(cancel_params),
                           .doc = "Ends a running or waiting `gen.start`; its own response still comes. `NOT_FOUND` if "
                                  "there is none, such as one that has just ended. The result is empty.",
                           .example_params = "{\"id\": 7}",
                           .example_result = "{}"},
    [METHOD_GEN_LIST] = {.name = "gen.list",
                         FIELDS(list_fields),
                         .doc = "What runs and waits.",
                         .example_params = "{}",
                         .example_result =
                             "{\"gens\": [{\"gen\": 12, \"id\": 7, \"uid\": 1000, \"state\": \"decode\", \"session\": "
                             "\"notes\", \"n_prompt\": 1200, \"n_tokens\": 5, \"age_ms\": 31}]}"},
    [METHOD_SESSION_OPEN] = {.name = "session.open",
                             PARAMS(session_params),
                             FIELDS(session_fields),
                             .doc = "Makes a session, or finds the one of that name. Sessions are private to a user.",
                             .example_params = EXAMPLE_NAME,
                             .example_result = "{\"name\": \"notes\", \"n_tokens\": 0, \"restore_point\": 0, "
                                               "\"cached\": {\"device\": 0, \"host\": 0, \"disk\": 0}, \"pinned\": "
                                               "false, \"parked\": false, \"durable\": true}"},
    [METHOD_SESSION_CLOSE] = {.name = "session.close",
                              PARAMS(session_params),
                              .doc = "Forgets it and its record. The result is empty.",
                              .example_params = EXAMPLE_NAME,
                              .example_result = "{}"},
    [METHOD_SESSION_LIST] = {.name = "session.list",
                             FIELDS(sessions_fields),
                             .doc = "The sessions of this user.",
                             .example_params = "{}",
                             .example_result = "{\"sessions\": [" EXAMPLE_INFO "]}"},
    [METHOD_SESSION_INFO] = {.name = "session.info",
                             PARAMS(session_params),
                             FIELDS(session_fields),
                             .doc = "One session.",
                             .example_params = EXAMPLE_NAME,
                             .example_result = EXAMPLE_INFO},
    [METHOD_SESSION_PARK] = {.name = "session.park",
                             PARAMS(session_params),
                             FIELDS(park_fields),
                             .doc =
                                 "Puts it down: answers when its pages are in the lowest tier there is, with a disk "
                                 "tier they and its record are durable, and the device is free of them. `BUSY` while a "
                                 "request uses it.",
                             .example_params = EXAMPLE_NAME,
                             .example_result =
                                 "{\"tokens\": 1216, \"bytes\": 2490368, \"tier\": \"disk\", \"durable\": true}"},
    [METHOD_SESSION_RESUME] = {.name = "session.resume",
                               PARAMS(resume_params),
                               FIELDS(session_fields),
                               .doc =
                                   "Begins to fetch its pages to the device, if they are below it and are to be used "
                                   "(`kv.restore`). A few fetch at a time, the others wait; `BUSY` if many do.",
                               .example_params = "{\"name\": \"notes\", \"wait\": true}",
                               .example_result = EXAMPLE_INFO},
    [METHOD_SESSION_FORK] = {.name = "session.fork",
                             PARAMS(fork_params),
                             FIELDS(session_fields),
                             .doc = "A second session that shares the pages of what they have in common.",
                             .example_params = "{\"name\": \"notes\", \"new_name\": \"notes-2\", \"at\": 1024}",
                             .example_result = "{\"name\": \"notes-2\", \"n_tokens\": 1024, \"restore_point\": 1024, "
                                               "\"cached\": {\"device\": 1024, \"host\": 0, \"disk\": 0}, "
                                               "\"pinned\": false, \"parked\": false, \"durable\": true}"},
    [METHOD_SESSION_PIN] =
        {.name = "session.pin",
         PARAMS(session_params),
         FIELDS(session_fields),
         .doc = "Its pages do not leave the device. `QUOTA` if the user's pinned sessions would hold more than "
                "`kv.share_per_uid` of it, `NO_SPACE` if those of all would hold more than half.",
         .example_params = EXAMPLE_NAME,
         .example_result = EXAMPLE_INFO},
    [METHOD_SESSION_UNPIN] = {.name = "session.unpin",
                              PARAMS(session_params),
                              FIELDS(session_fields),
                              .doc = "They may leave again.",
                              .example_params = EXAMPLE_NAME,
                              .example_result = EXAMPLE_INFO},
    [METHOD_CACHE_LOOKUP] =
        {.name = "cache.lookup",
         PARAMS(lookup_params),
         FIELDS(lookup_fields),
         .doc = "How much of a prompt would not have to be computed. What `prefetch` begins to fetch is "
                "not counted as there yet.",
         .example_params = "{\"prompt_ids\": [262, 810, 1411], \"prefetch\": false}",
         .example_result = "{\"device\": 1024, \"host\": 0, \"disk\": 0}"},
    [METHOD_CACHE_STATS] = {.name = "cache.stats",
                            FIELDS(cache_stats_fields),
                            .doc = "The tiers.",
                            .example_params = "{}",
                            .example_result = "{\"tiers\": {\"device\": {\"bytes\": 67108864, \"used_bytes\": 1048576, "
                                              "\"pages\": 16, \"hits\": 3, \"spilled\": 0, \"fetched\": 0, "
                                              "\"evicted\": 0}}}"},
    [METHOD_CACHE_EVICT] = {.name = "cache.evict",
                            .flags = METHOD_ADMIN,
                            PARAMS(evict_params),
                            FIELDS(evict_fields),
                            .doc = "Makes room in a tier, after the copies to lower tiers that are due. From host "
                                   "memory leaves what is long enough to be kept only when the disk has it.",
                            .example_params = "{\"tier\": \"device\", \"all\": true}",
                            .example_result = "{\"pages\": 16, \"bytes\": 1048576}"},
    [METHOD_CACHE_VERIFY] =
        {.name = "cache.verify",
         .flags = METHOD_ADMIN,
         FIELDS(verify_fields),
         .doc = "Reads every page on disk and drops those that do not match their checksum. `BUSY` while "
                "another one does.",
         .example_params = "{}",
         .example_result = "{\"checked\": 812, \"damaged\": 0, \"unread\": 0}"},
    [METHOD_CACHE_FLUSH] =
        {.name = "cache.flush",
         .flags = METHOD_ADMIN,
         FIELDS(flush_fields),
         .doc = "Answers when everything that is due to be on disk is there, and "
                "survives a power cut: pages and records of sessions. What could not be written before is "
                "tried again first. `NO_SPACE`: not all of it is there; `data` has `records`, of sessions, and "
                "`pages`, which include states, that the disk did not take.",
         .example_params = "{}",
         .example_result = "{\"saved\": 16, \"bytes\": 2490368}"},
    [METHOD_CACHE_PURGE] =
        {.name = "cache.purge",
         PARAMS(purge_params),
         FIELDS(purge_fields),
         .doc = "Drops a user's pages from all tiers and blanks what names them on disk, for good by the time "
                "it answers; the flash behind it may keep the bytes. Sessions stay, and compute their next turn anew: "
                "close them to drop what was said. What requests of this user use is waited for.",
         .example_params = "{\"uid\": 1000}",
         .example_result = "{\"device\": 2490368, \"host\": 0, \"disk\": 4980736, \"left\": 0}"},
    [METHOD_SERVER_HEALTH] = {.name = "server.health",
                              .flags = METHOD_WHILE_LOADING,
                              FIELDS(health_fields),
                              .doc = "Whether it serves.",
                              .example_params = "{}",
                              .example_result = "{\"live\": true, \"ready\": false, \"progressing\": true, \"phase\": "
                                                "\"loading\", \"percent\": 40}"},
    [METHOD_SERVER_STATS] = {.name = "server.stats",
                             .flags = METHOD_WHILE_LOADING,
                             FIELDS(stats_fields),
                             .doc = "What it does.",
                             .example_params = "{}",
                             .example_result =
                                 "{\"uptime_ms\": 60000, \"connections\": {\"open\": 2, \"accepted\": 9, "
                                 "\"refused\": 0}, \"requests\": {\"running\": 1, \"waiting\": 0, "
                                 "\"finished\": 12}, \"tokens\": {\"prompt\": 14400, \"completion\": 512, "
                                 "\"proposed\": 1200, \"accepted\": 380}}"},
    [METHOD_SERVER_METRICS] = {.name = "server.metrics",
                               FIELDS(metrics_fields),
                               .doc = "All counters.",
                               .example_params = "{}",
                               .example_result = "{\"text\": \"# TYPE spillway_requests_total counter\\n"
                                                 "spillway_requests_total 12\\n\"}"},
    [METHOD_SERVER_CONFIG] = {.name = "server.config",
                              .flags = METHOD_ADMIN,
                              FIELDS(config_fields),
                              .doc = "The configuration in use.",
                              .example_params = "{}",
                              .example_result = "{\"values\": {\"sched.queue_max\": {\"value\": \"256\", \"origin\": "
                                                "\"built-in\"}}}"},
    [METHOD_SERVER_RELOAD] = {.name = "server.reload",
                              .flags = METHOD_ADMIN,
                              FIELDS(reload_fields),
                              .doc = "Reads the configuration files again, as SIGHUP does.",
                              .example_params = "{}",
                              .example_result = "{\"changed\": [\"log.level\"], \"needs_restart\": []}"},
    [METHOD_SERVER_DRAIN] = {.name = "server.drain",
                             .flags = METHOD_ADMIN,
                             FIELDS(drain_fields),
                             .doc = "Takes no new work, finishes what runs, then stops, as SIGTERM does.",
                             .example_params = "{}",
                             .example_result = "{\"running\": 1}"},
    [METHOD_SERVER_LOG_LEVEL] = {.name = "server.log_level",
                                 .flags = METHOD_ADMIN,
                                 PARAMS(level_params),
                                 FIELDS(level_fields),
                                 .doc = "How much is logged, until the next start or reload.",
                                 .example_params = "{\"level\": \"debug\"}",
                                 .example_result = "{\"previous\": \"info\"}"},
};
