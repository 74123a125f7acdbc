/* A conversation: lines in, answers out. The history is kept here as messages, or by the daemon as a session. */
#include "cli_gen.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int cli_chat(struct cli *cli, const struct cli_args *args);

extern const struct cli_option cli_chat_options[];
const struct cli_option cli_chat_options[] = {
    {"system", "system", CLI_STRING, true, "TEXT", "a system message at the beginning"},
    {"reasoning", "reasoning", CLI_TRUE, true, NULL, "print the reasoning too if this is no terminal"},
    {0},
};

/* ---- lines --------------------------------------------------------------------------------------------------------- */

enum line { LINE_READ, LINE_INTERRUPTED, LINE_END };

struct lines {   /* of standard input. Not stdio, whose buffer poll() does not see */
    char *bytes; /* owned */
    size_t begin, end, n_room;
    bool is_at_end;
};

static bool make_room(struct lines *lines) {
    char *bytes;

    memmove(lines->bytes, lines->bytes + lines->begin, lines->end - lines->begin);
    lines->end -= lines->begin;
    lines->begin = 0;
    if (lines->n_room - lines->end > 0)
        return true;
    bytes = realloc(lines->bytes, 2 * lines->n_room);
    if (!bytes)
        return false;
    lines->bytes = bytes;
    lines->n_room *= 2;
    return true;
}

/* The next line without its newline; valid until the next call. */
static enum line read_line(struct lines *lines, int interrupts_fd, const char **ret_line, size_t *ret_n) {
    for (;;) {
        struct pollfd fds[] = {{.fd = STDIN_FILENO, .events = POLLIN}, {.fd = interrupts_fd, .events = POLLIN}};
        char *line = lines->bytes + lines->begin, *newline = memchr(line, '\n', lines->end - lines->begin);
        ssize_t n;

        if (newline || (lines->is_at_end && lines->end > lines->begin)) {
            *ret_line = line;
            *ret_n = newline ? (size_t)(newline - line) : lines->end - lines->begin;
            lines->begin += *ret_n + (newline != NULL);
            return LINE_READ;
        }
        if (lines->is_at_end || !make_room(lines))
            return LINE_END;
        if (poll(fds, 2, -1) < 0 && errno != EINTR)
            return LINE_END;
        if (fds[1].revents) {
            cli_interrupts_take(interrupts_fd);
            return LINE_INTERRUPTED;
        }
        n = read(STDIN_FILENO, lines->bytes + lines->end, lines->n_room - lines->end);
        if (n > 0)
            lines->end += (size_t)n;
        else if (n == 0 || errno != EINTR)
            lines->is_at_end = true;
    }
}

/* ---- the conversation ---------------------------------------------------------------------------------------------- */

struct chat {
    struct cli *cli;
    const struct cli_args *args;
    struct cli_gen gen;
    bool is_terminal;    /* standard input */
    const char *session; /* NULL: the history is here */
    json_t *messages;    /* all of them; in a session only those that the daemon has not seen */
    struct lines lines;
};

static int add_message(struct chat *chat, const char *role, const char *content, size_t n) {
    json_t *message = json_pack("{s:s,s:s%}", "role", role, "content", content, n);

    if (!message)
        return cli_fail(chat->cli, CLI_USAGE, "USAGE", "the message is not UTF-8");
    return json_array_append_new(chat->messages, message) == 0 ? CLI_OK : cli_fail_for_memory(chat->cli);
}

static int begin_history(struct chat *chat) {
    const char *system = json_string_value(json_object_get(chat->args->local, "system"));

    json_array_clear(chat->messages);
    return system ? add_message(chat, "system", system, strlen(system)) : CLI_OK;
}

/* The daemon makes the session, or has one to go on with, whose system message is in it already. */
static int open_session(struct chat *chat) {
    json_t *session;
    int status = cli_call(chat->cli, "session.open", json_pack("{s:s}", "name", chat->session), &session);

    if (status != CLI_OK)
        return status;
    if (cli_number_at(session, "n_tokens", 0) > 0)
        json_array_clear(chat->messages);
    if (chat->is_terminal && json_is_false(json_object_get(session, "durable")))
        fputs("(The daemon has no disk tier: this session ends with it.)\n", stderr);
    json_decref(session);
    return CLI_OK;
}

static int forget(struct chat *chat) {
    json_t *result;
    int status = begin_history(chat);

    if (status != CLI_OK || !chat->session)
        return status;
    status = cli_call(chat->cli, "session.close", json_pack("{s:s}", "name", chat->session), &result);
    if (status != CLI_OK)
        return status;
    json_decref(result);
    return open_session(chat);
}

/* What the model said, in the form in which it goes back into the next request. */
static int keep_answer(struct chat *chat, const json_t *result) {
    const json_t *answer = json_object_get(result, "message");
    json_t *content = json_object_get(answer, "content"), *reasoning = json_object_get(answer, "reasoning");
    json_t *calls = json_object_get(answer, "tool_calls");
    json_t *message;

    if (chat->session) { /* it has them now */
        json_array_clear(chat->messages);
        return CLI_OK;
    }
    message = json_pack("{s:s,s:s}", "role", "assistant", "content",
                        json_is_string(content) ? json_string_value(content) : "");
    if (reasoning)
        json_object_set(message, "reasoning_content", reasoning);
    if (calls)
        json_object_set(message, "tool_calls", calls);
    return json_array_append_new(chat->messages, message) == 0 ? CLI_OK : cli_fail_for_memory(chat->cli);
}

static int answer(struct chat *chat) {
    json_t *params = json_deep_copy(chat->args->params), *result;
    int status;

    if (!params || json_object_set_new(params, "messages", json_deep_copy(chat->messages)) != 0)
        return cli_fail_for_memory(chat->cli);
    status = cli_gen_run(chat->cli, &chat->gen, params, &result);
    if (status != CLI_OK) { /* the daemon has not taken the message */
        json_array_remove(chat->messages, json_array_size(chat->messages) - 1);
        return status;
    }
    if (chat->cli->json)
        cli_print_json(result);
    else if (!chat->gen.print_events && !isatty(STDOUT_FILENO))
        putchar('\n');
    cli_gen_print_summary(result);
    status = keep_answer(chat, result);
    json_decref(result);
    return status;
}

static int obey(struct chat *chat, const char *order) {
    if (strcmp(order, "/clear") == 0)
        return forget(chat);
    if (strcmp(order, "/history") == 0) {
        cli_print_json(chat->messages);
        return CLI_OK;
    }
    fputs("/clear    forget the conversation\n"
          "/history  print the messages that are kept here\n"
          "/quit     end the program, as Ctrl-D\n",
          stderr);
    return CLI_OK;
}

/* One message: a line, and those after it while they end in a backslash. */
static enum line read_message(struct chat *chat, char **ret_message, size_t *ret_n) {
    char *message = NULL;
    size_t n = 0;

    for (;;) {
        const char *line;
        size_t n_line;
        enum line kind;
        bool goes_on;
        char *more;

        if (chat->is_terminal) {
            fputs(n ? "... " : "> ", stderr);
            fflush(stderr);
        }
        kind = read_line(&chat->lines, chat->gen.interrupts_fd, &line, &n_line);
        if (kind != LINE_READ) {
            free(message);
            return kind;
        }
        goes_on = n_line > 0 && line[n_line - 1] == '\\';
        more = realloc(message, n + n_line + 1);
        if (!more) {
            free(message);
            return LINE_END;
        }
        message = more;
        memcpy(message + n, line, n_line);
        n += n_line;
        if (goes_on) {
            message[n - 1] = '\n';
            continue;
        }
        message[n] = 0;
        *ret_message = message;
        *ret_n = n;
        return LINE_READ;
    }
}

/* An error of one answer does not end the conversation, unless nobody is there who could do better. */
static int talk(struct chat *chat) {
    int status = CLI_OK;

    while (status == CLI_OK || chat->is_terminal) {
        char *message;
        size_t n;
        enum line kind = read_message(chat, &message, &n);

        if (kind == LINE_INTERRUPTED) {
            fputs("\n(Ctrl-D ends the program.)\n", stderr);
            continue;
        }
        if (kind == LINE_END)
            break;
        if (strcmp(message, "/quit") == 0) {
            free(message);
            break;
        }
        if (message[0] == '/')
            status = obey(chat, message);
        else if (n > 0) {
            status = add_message(chat, "user", message, n);
            if (status == CLI_OK)
                status = answer(chat);
        }
        free(message);
    }
    if (chat->is_terminal)
        fputc('\n', stderr);
    return status;
}

int cli_chat(struct cli *cli, const struct cli_args *args) {
    struct chat chat = {
        .cli = cli,
        .args = args,
        .gen = {.show_reasoning = json_is_true(json_object_get(args->local, "reasoning")), .print_text = !cli->json},
        .is_terminal = isatty(STDIN_FILENO),
        .session = json_string_value(json_object_get(args->params, "session")),
        .messages = json_array(),
        .lines = {.bytes = malloc(4096), .n_room = 4096},
    };
    int status = chat.messages && chat.lines.bytes ? CLI_OK : cli_fail_for_memory(cli);

    if (status == CLI_OK)
        status = cli_connect(cli);
    if (status == CLI_OK)
        status = begin_history(&chat);
    if (status == CLI_OK && chat.session)
        status = open_session(&chat);
    if (status == CLI_OK)
        status = cli_interrupts_open(cli, &chat.gen.interrupts_fd);
    if (status == CLI_OK) {
        status = talk(&chat);
        cli_interrupts_close(chat.gen.interrupts_fd);
    }
    json_decref(chat.messages);
    free(chat.lines.bytes);
    return status;
}
