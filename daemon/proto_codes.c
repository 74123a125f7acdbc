#include "proto.h"

#include "base.h"

const struct proto_about proto_codes[PROTO_N_CODES] = {
    [PROTO_BAD_FRAME] =
        {"BAD_FRAME",
         "The bytes are no message, or one that breaks a limit. `id` is 0 where none could be read. The connection is "
         "closed after this response, and what it had running is cancelled.",
         "{\"code\": \"BAD_FRAME\", \"message\": \"byte 12 of the message is an extension type; there are none in this "
         "protocol\", \"data\": {}}"},
    [PROTO_BAD_PARAM] =
        {"BAD_PARAM", "A param is unknown, missing, of the wrong type, out of range or does not go with another one.",
         "{\"code\": \"BAD_PARAM\", \"message\": \"gen.start: \\\"top_p\\\" is 1.5; it must be above 0 up to 1\", "
         "\"data\": {}}"},
    [PROTO_UNKNOWN_METHOD] =
        {"UNKNOWN_METHOD", "There is no such method in this version.",
         "{\"code\": \"UNKNOWN_METHOD\", \"message\": \"there is no method \\\"gen.stop\\\"; did you mean "
         "\\\"gen.start\\\"?\", \"data\": {}}"},
    [PROTO_CONTEXT_LENGTH] =
        {"CONTEXT_LENGTH", "The prompt can never fit: into the context, or into the memory for pages.",
         "{\"code\": \"CONTEXT_LENGTH\", \"message\": \"the prompt has 40000 tokens; the context has 32768\", "
         "\"data\": {\"n_prompt\": 40000, \"n_context\": 32768}}"},
    [PROTO_BUSY] =
        {"BUSY",
         "A queue or the number of connections is full: `data.retry_ms` says when to try again. Or another request "
         "uses what this one is about, a session or the disk, and must end first. With too many connections this comes "
         "with "
         "`id` 0 before any request, and the connection is closed.",
         "{\"code\": \"BUSY\", \"message\": \"all places are taken and 16 requests wait for one, "
         "sched.queue_max is 16; try again in 900 ms\", \"data\": {\"n_waiting\": 16, \"retry_ms\": 900}}"},
    [PROTO_QUOTA] =
        {"QUOTA", "The user has as many of something as one user may have.",
         "{\"code\": \"QUOTA\", \"message\": \"user 1000 has 64 sessions, the limit is 64\", \"data\": {\"n\": 64, "
         "\"n_max\": 64}}"},
    [PROTO_NOT_FOUND] = {"NOT_FOUND", "No session or running request of that name or id is this user's.",
                         "{\"code\": \"NOT_FOUND\", \"message\": \"there is no session \\\"notes\\\"; "
                         "session.open makes one\", \"data\": {}}"},
    [PROTO_FORBIDDEN] =
        {"FORBIDDEN", "The method is for the administrator, or came before `hello`.",
         "{\"code\": \"FORBIDDEN\", \"message\": \"server.drain is for uid 0 and the daemon's own; this connection is "
         "of uid 1000\", \"data\": {}}"},
    [PROTO_CANCELLED] =
        {"CANCELLED", "The request was cancelled before it was admitted. Later it ends with a result instead.",
         "{\"code\": \"CANCELLED\", \"message\": \"cancelled after 120 ms in the queue\", \"data\": {}}"},
    [PROTO_SLOW_CLIENT] =
        {"SLOW_CLIENT", "The client did not read what it was sent, so a request of it that waited was given up.",
         "{\"code\": \"SLOW_CLIENT\", \"message\": \"1048576 bytes were not read for 10000 ms\", \"data\": {}}"},
    [PROTO_SHUTTING_DOWN] =
        {"SHUTTING_DOWN", "The daemon takes no new work, since it drains or stops.",
         "{\"code\": \"SHUTTING_DOWN\", \"message\": \"the daemon stops; connect again when it is back\", \"data\": "
         "{}}"},
    [PROTO_NO_SPACE] =
        {"NO_SPACE", "A tier has no room for what was asked, and nothing in it may leave.",
         "{\"code\": \"NO_SPACE\", \"message\": \"no room on disk for 812 pages of session \\\"notes\\\"\", \"data\": "
         "{}}"},
    [PROTO_CORRUPT] =
        {"CORRUPT",
         "What was stored does not match its checksum and cannot be computed anew: the record of a session. Damaged "
         "pages "
         "are computed again instead.",
         "{\"code\": \"CORRUPT\", \"message\": \"the record of session \\\"notes\\\" does not match its checksum\", "
         "\"data\": {}}"},
    [PROTO_MODEL_NOT_READY] =
        {"MODEL_NOT_READY", "The model is still being loaded. `server.health` says how far it is.",
         "{\"code\": \"MODEL_NOT_READY\", \"message\": \"the model is still being loaded\", \"data\": {}}"},
    [PROTO_DEADLINE] = {"DEADLINE",
                        "The request's deadline passed before it was admitted. Later it ends with a result instead.",
                        "{\"code\": \"DEADLINE\", \"message\": \"500 ms passed in the queue\", \"data\": {}}"},
    [PROTO_INTERNAL] =
        {"INTERNAL", "Something broke in the daemon; its log says what. The request may be tried again.",
         "{\"code\": \"INTERNAL\", \"message\": \"no memory for a response of 1048576 bytes\", \"data\": {}}"},
};

#define RESULT_OF(reason, text)                                                                                        \
    "{\"text\": \"" text "\", \"message\": {\"content\": \"" text "\"}, \"finish_reason\": \"" reason                  \
    "\", \"usage\": {\"prompt\": 12, \"completion\": 8, \"reasoning\": 0, \"cached\": {\"device\": 0, \"host\": 0, "   \
    "\"disk\": 0}, \"recomputed\": 0, \"draft\": {\"steps\": 2, \"proposed\": 30, \"accepted\": 5}}, \"timings\": "    \
    "{\"queue_ms\": 0.1, \"restore_ms\": 0.0, \"prefill_ms\": 9.5, \"decode_ms\": 14.0, \"ttft_ms\": 9.9}"

const struct proto_about proto_finishes[PROTO_N_FINISHES] = {
    [PROTO_FINISH_STOP] = {"stop", "The model ended its answer, or gave one of `stop_ids`.",
                           RESULT_OF("stop", "The code is 4711.") "}"},
    [PROTO_FINISH_STOP_STRING] = {"stop_string",
                                  "The text came to one of `stop`, which `stop_match` names. The text ends before it.",
                                  RESULT_OF("stop_string", "The code is") ", \"stop_match\": \" 4711\"}"},
    [PROTO_FINISH_LENGTH] = {"length", "`max_tokens` tokens were given.", RESULT_OF("length", "The code") "}"},
    [PROTO_FINISH_CONTEXT] = {"context", "The context is full.", RESULT_OF("context", "The code is 47") "}"},
    [PROTO_FINISH_TOOL_CALLS] =
        {"tool_calls", "The answer ended with tool calls; `message.tool_calls` has them.",
         "{\"text\": \"\", \"message\": {\"content\": \"\", \"tool_calls\": [{\"name\": \"open_door\", \"arguments\": "
         "{\"color\": \"red\"}}]}, \"finish_reason\": \"tool_calls\", \"usage\": {\"prompt\": 140, \"completion\": 22, "
         "\"reasoning\": 0, \"cached\": {\"device\": 128, \"host\": 0, \"disk\": 0}, \"recomputed\": 0, \"draft\": "
         "{\"steps\": 4, \"proposed\": 60, \"accepted\": 17}}, \"timings\": {\"queue_ms\": 0.1, \"restore_ms\": 0.0, "
         "\"prefill_ms\": 3.1, \"decode_ms\": 30.2, \"ttft_ms\": 3.4}}"},
    [PROTO_FINISH_CANCELLED] = {"cancelled", "`gen.cancel` ended it.", RESULT_OF("cancelled", "The co") "}"},
    [PROTO_FINISH_DEADLINE] = {"deadline", "`deadline_ms` passed.", RESULT_OF("deadline", "The code is") "}"},
    [PROTO_FINISH_SHUTDOWN] = {"shutdown", "The daemon stopped before the answer was complete.",
                               RESULT_OF("shutdown", "The code is 4") "}"},
    [PROTO_FINISH_SLOW_CLIENT] = {"slow_client", "The client did not read its events for too long.",
                                  RESULT_OF("slow_client", "The") "}"},
    [PROTO_FINISH_ERROR] = {"error", "Something broke in the step that should have gone on; what is there is right.",
                            RESULT_OF("error", "The code is 471") "}"},
};

const char *proto_code_name(enum proto_code code) {
    return proto_codes[code].name;
}

const char *proto_finish_name(enum proto_finish finish) {
    return proto_finishes[finish].name;
}

/* ---- events ---- */

static const struct proto_field accepted_fields[] = {
    {"n_prompt", "int", "tokens of the prompt"},
    {"cached", "{device, host, disk}", "how many of them each tier has"},
    {"queue", "int", "requests that come before this one; 0 if it runs"},
};
static const struct proto_field progress_fields[] = {
    {"done", "int", "tokens of the prompt that are in place, restored or computed"},
    {"total", "int", "tokens of the prompt"},
};
static const struct proto_field delta_fields[] = {
    {"text", "string", "the next piece; whole characters, nothing of a stop string"},
    {"channel", "string", "\"content\", \"reasoning\" or \"tool\""},
    {"ids", "[int]", "with `return_ids`: the tokens since the last delta, which may reach beyond its text"},
    {"logprobs", "[map]", "with `logprobs`: for each token {id, logprob, top: [{id, logprob}]}"},
};
static const struct proto_field tool_call_fields[] = {
    {"index", "int", "from 0, counts the calls of this answer"},
    {"name", "string", "of the tool"},
    {"arguments", "map", "with the types that the tool's parameters declare"},
};
static const struct proto_field notice_fields[] = {
    {"reason", "string", "for programs, such as \"preempted\""},
    {"message", "string", "for people"},
};

const struct proto_event proto_events[] = {
    {"accepted", ARRAY_LEN(accepted_fields), accepted_fields, "The first one: the request was admitted or queued.",
     "{\"id\": 7, \"seq\": 0, \"type\": \"accepted\", \"n_prompt\": 1200, \"cached\": {\"device\": 1024, \"host\": 0, "
     "\"disk\": 0}, \"queue\": 0}"},
    {"progress", ARRAY_LEN(progress_fields), progress_fields,
     "At least every 5 s while the prompt is computed or its pages are restored.",
     "{\"id\": 7, \"seq\": 1, \"type\": \"progress\", \"done\": 1088, \"total\": 1200}"},
    {"delta", ARRAY_LEN(delta_fields), delta_fields, "The next piece of the answer. None comes with `stream: false`.",
     "{\"id\": 7, \"seq\": 2, \"type\": \"delta\", \"text\": \"The code is\", \"channel\": \"content\"}"},
    {"tool_call", ARRAY_LEN(tool_call_fields), tool_call_fields, "A tool call that is complete.",
     "{\"id\": 7, \"seq\": 3, \"type\": \"tool_call\", \"index\": 0, \"name\": \"open_door\", \"arguments\": "
     "{\"color\": \"red\"}}"},
    {"notice", ARRAY_LEN(notice_fields), notice_fields,
     "Something that makes this request slower than usual, or otherwise worth to know.",
     "{\"id\": 7, \"seq\": 4, \"type\": \"notice\", \"reason\": \"preempted\", \"message\": \"its pages were needed; "
     "it goes on when there is room\"}"},
};
const uint32_t proto_n_events = ARRAY_LEN(proto_events);
