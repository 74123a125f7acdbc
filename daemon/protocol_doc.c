/* protocol_doc: prints docs/protocol.md from the tables of proto.h. With a file's name it prints nothing and says
 * whether the file is what it would print. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "frame.h"
#include "proto.h"

static void print_intro(FILE *out) {
    fprintf(
        out,
        "# Protocol\n\n"
        "<!-- Printed by `protocol_doc` from the tables in daemon/proto_*.c; change those and print it again:\n"
        "     ninja -C build && build/daemon/protocol_doc > docs/protocol.md -->\n\n"
        "Version %d. Clients talk to the daemon over a Unix stream socket in msgpack-RPC. Messages are msgpack "
        "arrays, one after\nthe other without anything between them. Examples are written as JSON.\n\n"
        "| message | form | who sends it |\n|---|---|---|\n"
        "| request | `[0, id, method, params]` | the client |\n"
        "| response | `[1, id, error, result]`; one of the last two is nil | the daemon, exactly one for each "
        "request |\n"
        "| notification | `[2, method, params]` | the daemon |\n\n"
        "`id` is an integer from 0 to 2^32 - 1 that the client chooses; responses come in any order. It is the "
        "client's to keep\nthe ids of its open requests apart: the daemon takes one that is in use, and then nothing "
        "tells which response or event\nbelongs to which request. `params` and `result` are maps. A param that is "
        "nil counts as not given. An unknown param is an\nerror.\n\n",
        PROTO_VERSION);
    fprintf(out,
            "## Limits\n\n"
            "A message that breaks one of these gets one `BAD_FRAME` and the connection is closed, which cancels what "
            "it had running:\n\n"
            "* size: `limits.frame_bytes` of the configuration, 16 MiB unless changed; `hello` tells it;\n"
            "* values (numbers, strings, keys, containers): one for each %d bytes of that size, but at least %d;\n"
            "* containers inside each other: %d, the message's own array counts;\n"
            "* strings are valid UTF-8; keys of maps are strings and unique (also those of `logit_bias`: `\"123\"`); "
            "there are no\n  extension types;\n"
            "* a message must be complete some time after it began (60 s).\n\n",
            FRAME_VALUE_BYTES, FRAME_VALUES_MIN, FRAME_DEPTH_MAX);
    fprintf(out,
            "A client with many unanswered requests, or one that does not read what it is sent, is not read either "
            "until that changes.\nOne that does not read for long has its requests ended with `slow_client`, then is "
            "closed. Closing the socket, or only its\nsending side, ends the connection and cancels what it had "
            "running.\n\n"
            "Rights come from the user of the connecting process. Sessions and cached prefixes are private to a user. "
            "Methods marked\n*admin* are for uid 0 and the daemon's own.\n\n");
}

static void print_range(FILE *out, const struct proto_param *param) {
    switch (param->type) {
    case PARAM_BOOL:
        fprintf(out, "bool");
        break;
    case PARAM_INT:
        fprintf(out, "int, %.0f to %.0f", param->min, param->max);
        break;
    case PARAM_UINT64:
        fprintf(out, "int, 0 to 2^64 - 1");
        break;
    case PARAM_FLOAT:
        fprintf(out, "number, %s%g to %g", param->is_above_min ? "above " : "", param->min, param->max);
        break;
    case PARAM_STRING:
        fprintf(out, "string");
        break;
    case PARAM_NAME:
        fprintf(out, "string of 1 to %d bytes without control characters", PROTO_NAME_BYTES_MAX);
        break;
    case PARAM_CHOICE:
        for (const char *const *choice = param->choices; *choice; choice++)
            fprintf(out, "%s`\"%s\"`", choice == param->choices ? "" : ", ", *choice);
        break;
    case PARAM_IDS:
        fprintf(out, "[int], token ids from 0 to 2^31 - 1");
        break;
    case PARAM_STRINGS:
        fprintf(out, "[string], each 1 to %u bytes", param->bytes_max);
        break;
    case PARAM_BIAS:
        fprintf(out, "{\"token id\": number from %g to %g}", param->min, param->max);
        break;
    case PARAM_MAPS:
        fprintf(out, "[map]");
        break;
    }
    if (param->n_min > 0)
        fprintf(out, ", at least %u", param->n_min);
    if (param->n_max > 0)
        fprintf(out, ", at most %u", param->n_max);
}

static void print_fields(FILE *out, const char *title, const struct proto_field *fields, uint32_t n) {
    if (n == 0)
        return;
    fprintf(out, "| %s | type | |\n|---|---|---|\n", title);
    for (uint32_t i = 0; i < n; i++)
        fprintf(out, "| `%s` | %s | %s |\n", fields[i].name, fields[i].type, fields[i].doc);
    fprintf(out, "\n");
}

static void print_method(FILE *out, uint32_t id, const struct proto_method *method) {
    fprintf(out, "### %s\n\n%s%s%s\n\n", method->name, method->flags & METHOD_ADMIN ? "*admin* " : "", method->doc,
            method->flags & METHOD_WHILE_LOADING ? " Answers while the model is loaded." : "");
    if (method->n_params > 0)
        fprintf(out, "| param | type | default | |\n|---|---|---|---|\n");
    for (uint32_t i = 0; i < method->n_params; i++) {
        const struct proto_param *param = &method->params[i];

        fprintf(out, "| `%s` | ", param->name);
        print_range(out, param);
        fprintf(out, " | %s | %s |\n",
                param->is_required    ? "*required*"
                : param->default_text ? param->default_text
                                      : "",
                param->doc);
    }
    if (method->n_params > 0)
        fprintf(out, "\n");
    print_fields(out, "result", method->fields, method->n_fields);
    fprintf(out, "```\n-> [0, %u, \"%s\", %s]\n<- [1, %u, null, %s]\n```\n\n", id, method->name, method->example_params,
            id, method->example_result);
}

static void print_all(FILE *out) {
    print_intro(out);
    fprintf(out, "## Methods\n\nUntil `hello` was answered all others are refused. Methods that do not say otherwise "
                 "are refused with\n`MODEL_NOT_READY` while the model is loaded.\n\n");
    for (uint32_t i = 0; i < METHOD_N; i++)
        print_method(out, i + 1, &proto_methods[i]);
    fprintf(out,
            "## Events\n\nWhile a `gen.start` runs the daemon sends notifications `gen.event {id, seq, type, ...}`: "
            "`id` is the request's, `seq`\ncounts from 0. After the response none comes.\n\n");
    for (uint32_t i = 0; i < proto_n_events; i++) {
        const struct proto_event *event = &proto_events[i];

        fprintf(out, "### %s\n\n%s\n\n", event->type, event->doc);
        print_fields(out, "field", event->fields, event->n_fields);
        fprintf(out, "```\n<- [2, \"gen.event\", %s]\n```\n\n", event->example);
    }
    fprintf(out, "## Finish reasons\n\nWhat a `finish_reason` says, each with a result that has it.\n\n");
    for (uint32_t i = 0; i < PROTO_N_FINISHES; i++)
        fprintf(out, "### %s\n\n%s\n\n```\n<- [1, 7, null, %s]\n```\n\n", proto_finishes[i].name, proto_finishes[i].doc,
                proto_finishes[i].example);
    fprintf(out, "## Errors\n\nAn error is a map: `code` is for programs, `message` for people, `data` has numbers for "
                 "programs and may be empty.\n\n");
    for (uint32_t i = 0; i < PROTO_N_CODES; i++)
        fprintf(out, "### %s\n\n%s\n\n```\n<- [1, %d, %s, null]\n```\n%s", proto_codes[i].name, proto_codes[i].doc,
                i == PROTO_BAD_FRAME ? 0 : 7, proto_codes[i].example, i + 1 < PROTO_N_CODES ? "\n" : "");
}

/* 0 if the file holds these n bytes. */
static int compare(const char *path, const char *bytes, size_t n) {
    FILE *file = fopen(path, "rb");
    size_t i = 0;
    int c;

    if (!file) {
        fprintf(stderr, "%s: %s\n", path, strerror(errno));
        return 1;
    }
    while ((c = fgetc(file)) != EOF && i < n && (char)c == bytes[i])
        i++;
    fclose(file);
    if (c == EOF && i == n)
        return 0;
    fprintf(stderr, "%s is not what the tables say, from byte %zu on; print it again with protocol_doc\n", path, i);
    return 1;
}

int main(int argc, char **argv) {
    char *bytes = NULL;
    size_t n = 0;
    FILE *out = argc > 1 ? open_memstream(&bytes, &n) : stdout;
    int r = 0;

    if (!out)
        return 1;
    print_all(out);
    if (argc == 1)
        return fflush(stdout) != 0;
    if (fclose(out) != 0)
        return 1;
    r = compare(argv[1], bytes, n);
    free(bytes);
    return r;
}
