#include "cli_gen.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <time.h>
#include <unistd.h>

const struct cli_option cli_gen_options[] = {
    {"max-tokens", "max_tokens", CLI_INT, false, "N", "end after N tokens; otherwise at the end of the context"},
    {"temperature", "temperature", CLI_REAL, false, "X", "0 always takes the best token; otherwise the model's"},
    {"top-p", "top_p", CLI_REAL, false, "X", "only the fewest tokens that together have this probability"},
    {"top-k", "top_k", CLI_INT, false, "N", "only the N best tokens; 0: all"},
    {"min-p", "min_p", CLI_REAL, false, "X", "only tokens with this share of the best one's probability"},
    {"repetition-penalty", "repetition_penalty", CLI_REAL, false, "X", "1: none"},
    {"presence-penalty", "presence_penalty", CLI_REAL, false, "X", "0: none"},
    {"frequency-penalty", "frequency_penalty", CLI_REAL, false, "X", "0: none"},
    {"logit-bias", "logit_bias", CLI_BIAS, false, "ID=BIAS", "added to the logit of a token; may be repeated"},
    {"seed", "seed", CLI_INT, false, "N", "the same seed and request give the same answer"},
    {"stop", "stop", CLI_STRINGS, false, "TEXT", "ends the answer and is not part of it; may be repeated"},
    {"stop-id", "stop_ids", CLI_INTS, false, "ID", "a token that ends the answer; may be repeated"},
    {"ignore-eos", "ignore_eos", CLI_TRUE, false, NULL, "the model's own end tokens do not end it"},
    {"thinking", "thinking", CLI_TRUE, false, NULL, "the answer begins with reasoning"},
    {"no-thinking", "thinking", CLI_FALSE, false, NULL, "it does not"},
    {"tools", "tools", CLI_JSON_FILE, false, "FILE", "a JSON list of tools that the model may call"},
    {"session", "session", CLI_STRING, false, "NAME", "go on in this session; messages are only the new ones"},
    {"priority", "priority", CLI_INT, false, "N", "of two that wait, the higher runs first; otherwise 0"},
    {"deadline", "deadline_ms", CLI_SECONDS, false, "SECONDS", "after which the answer ends"},
    {"no-speculate", "speculate", CLI_FALSE, false, NULL, "without the drafter; the answer is the same"},
    {"cache", "cache", CLI_STRING, false, "MODE", "use, no_store (leave no pages) or bypass (look for none either)"},
    {0},
};

/* ---- Ctrl-C -------------------------------------------------------------------------------------------------------- */

int cli_interrupts_open(struct cli *cli, int *ret_fd) {
    sigset_t set;
    int fd;

    sigemptyset(&set);
    sigaddset(&set, SIGINT);
    fd = signalfd(-1, &set, SFD_NONBLOCK | SFD_CLOEXEC);
    if (fd < 0)
        return cli_fail(cli, CLI_FAILED, "SIGNALS", "signalfd: %s", strerror(errno));
    sigprocmask(SIG_BLOCK, &set, NULL);
    *ret_fd = fd;
    return CLI_OK;
}

void cli_interrupts_take(int fd) {
    struct signalfd_siginfo info;

    while (read(fd, &info, sizeof info) == sizeof info)
        ;
}

void cli_interrupts_close(int fd) {
    sigset_t set;

    sigemptyset(&set);
    sigaddset(&set, SIGINT);
    cli_interrupts_take(fd);
    close(fd);
    sigprocmask(SIG_UNBLOCK, &set, NULL);
}

/* ---- what is shown while it comes ---------------------------------------------------------------------------------- */

enum { BAR_WIDTH = 30 };

struct running {
    const struct cli_gen *gen;
    bool is_done, is_dim, has_bar;
    bool is_terminal, is_error_terminal;
    double progress_begin_s;
    uint64_t progress_begin;
    char last; /* byte of the text; 0: none yet */
    int status;
    json_t *json; /* the result, or what the daemon said is wrong */
    struct spillway_error error;
};

static double now_s(void) {
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static void clear_bar(struct running *running) {
    if (running->has_bar)
        fputs("\r\033[K", stderr);
    running->has_bar = false;
}

static void draw_bar(struct running *running, uint64_t done, uint64_t total) {
    int n_full = total > 0 && done <= total ? (int)(done * BAR_WIDTH / total) : BAR_WIDTH;
    double elapsed_s;

    if (!running->is_error_terminal)
        return;
    if (running->progress_begin_s == 0) {
        running->progress_begin_s = now_s();
        running->progress_begin = done;
    }
    elapsed_s = now_s() - running->progress_begin_s;
    fputs("\r\033[K[", stderr);
    for (int i = 0; i < BAR_WIDTH; i++)
        fputc(i < n_full ? '#' : '.', stderr);
    fprintf(stderr, "] %llu of %llu tokens read", (unsigned long long)done, (unsigned long long)total);
    if (elapsed_s > 0 && done > running->progress_begin)
        fprintf(stderr, ", %.0f/s", (double)(done - running->progress_begin) / elapsed_s);
    fflush(stderr);
    running->has_bar = true;
}

static void set_dim(struct running *running, bool is_dim) {
    if (running->is_dim == is_dim)
        return;
    running->is_dim = is_dim;
    if (running->is_terminal)
        fputs(is_dim ? "\033[2m" : "\033[0m", stdout);
    if (!is_dim && running->last && running->last != '\n')
        putchar('\n');
}

static bool text_is(struct spillway_text text, const char *string) {
    return text.n_bytes == strlen(string) && memcmp(text.bytes, string, text.n_bytes) == 0;
}

static void print_delta(struct running *running, const struct spillway_event *event) {
    bool is_reasoning = text_is(event->delta.channel, "reasoning");

    if (text_is(event->delta.channel, "tool") || event->delta.text.n_bytes == 0)
        return; /* tool calls are printed when they are whole */
    if (is_reasoning && !running->is_terminal && !running->gen->show_reasoning)
        return;
    set_dim(running, is_reasoning);
    cli_print_text(stdout, event->delta.text.bytes, event->delta.text.n_bytes);
    running->last = event->delta.text.bytes[event->delta.text.n_bytes - 1];
    fflush(stdout);
}

static bool on_event(void *user, const struct spillway_event *event) {
    struct running *running = user;

    if (running->gen->print_events) {
        json_t *json = cli_json_of(event->object);

        cli_print_json(json);
        json_decref(json);
        return true;
    }
    if (event->type == SPILLWAY_EVENT_PROGRESS) {
        draw_bar(running, event->progress.done, event->progress.total);
    } else if (event->type == SPILLWAY_EVENT_NOTICE) {
        clear_bar(running);
        fputs("spillway: notice: ", stderr);
        cli_print_text(stderr, event->notice.reason.bytes, event->notice.reason.n_bytes);
        fputc('\n', stderr);
    } else if (event->type == SPILLWAY_EVENT_DELTA && running->gen->print_text) {
        clear_bar(running);
        print_delta(running, event);
    }
    return true;
}

static void on_done(void *user, int status, const msgpack_object *result, const struct spillway_error *error) {
    struct running *running = user;

    running->is_done = true;
    running->status = status;
    running->json = result ? cli_json_of(result) : NULL;
    if (error)
        running->error = *error;
}

/* ---- running ------------------------------------------------------------------------------------------------------- */

/* False: the second Ctrl-C, which does not wait. */
static bool take_interrupt(struct cli *cli, const struct cli_gen *gen, uint32_t id, bool *is_cancelled) {
    cli_interrupts_take(gen->interrupts_fd);
    if (*is_cancelled)
        return false;
    *is_cancelled = spillway_cancel(cli->client, id, NULL) == 0;
    return true;
}

/* Until the answer is there, or the wait is over for another reason, which running->error tells. */
static void wait_for_answer(struct cli *cli, const struct cli_gen *gen, struct running *running, uint32_t id) {
    bool is_cancelled = false;

    while (!running->is_done) {
        struct pollfd fds[] = {{.fd = spillway_fd(cli->client), .events = spillway_poll_events(cli->client)},
                               {.fd = gen->interrupts_fd, .events = POLLIN}};
        int n = poll(fds, 2, cli->timeout_ms ? cli->timeout_ms : -1);

        if (n == 0) {
            snprintf(running->error.code, sizeof running->error.code, "TIMEOUT");
            snprintf(running->error.message, sizeof running->error.message, "no sign of the request for %d ms",
                     cli->timeout_ms);
            return;
        }
        if (n > 0 && fds[1].revents && !take_interrupt(cli, gen, id, &is_cancelled)) {
            snprintf(running->error.code, sizeof running->error.code, "INTERRUPTED");
            snprintf(running->error.message, sizeof running->error.message,
                     "left without waiting for the end of the request");
            return;
        }
        spillway_dispatch(cli->client, NULL); /* if the connection is lost, on_done says so */
    }
}

static void print_tool_calls(const json_t *result) {
    const json_t *calls = json_object_get(json_object_get(result, "message"), "tool_calls");

    for (size_t i = 0; i < json_array_size(calls); i++)
        cli_print_json(json_array_get(calls, i));
}

int cli_gen_run(struct cli *cli, const struct cli_gen *gen, json_t *params, json_t **ret_result) {
    struct running running = {
        .gen = gen, .is_terminal = isatty(STDOUT_FILENO), .is_error_terminal = isatty(STDERR_FILENO)};
    const struct spillway_handler handler = {.on_event = on_event, .on_done = on_done, .user = &running};
    uint32_t id;
    int r, status = cli_connect(cli);

    if (status != CLI_OK) {
        json_decref(params);
        return status;
    }
    r = spillway_start(cli->client, "gen.start", cli_write_json, params, &handler, &id, &running.error);
    json_decref(params);
    if (r == 0)
        wait_for_answer(cli, gen, &running, id);
    clear_bar(&running);
    set_dim(&running, false);
    if (running.is_done && running.status == 0 && running.json) {
        if (running.last && running.last != '\n' && running.is_terminal)
            putchar('\n');
        if (gen->print_text)
            print_tool_calls(running.json);
        fflush(stdout);
        *ret_result = running.json;
        return CLI_OK;
    }
    if (running.json)
        cli_complain_as(cli, CLI_FAILED, running.json);
    else if (running.is_done && running.status == 0)
        cli_fail_for_memory(cli);
    else
        cli_complain(cli, CLI_FAILED, running.error.code, "%s", running.error.message);
    json_decref(running.json);
    if (!running.is_done || running.status < 0) /* nobody may tell `running` any more */
        cli_disconnect(cli);
    return CLI_FAILED;
}

/* Tokens committed by verify passes, per pass: what stood of each draft and one of the target's own, but for the last draft
 * if the answer ended in it. The first token comes from the prompt. */
static double accept_length(const json_t *result) {
    double steps = cli_number_at(result, "usage.draft.steps", 0);
    double n = steps + cli_number_at(result, "usage.draft.accepted", 0);
    double n_max = cli_number_at(result, "usage.completion", 0) - 1;

    return steps > 0 ? (n < n_max ? n : n_max) / steps : 0;
}

void cli_gen_print_summary(const json_t *result) {
    double completion = cli_number_at(result, "usage.completion", 0),
           decode_ms = cli_number_at(result, "timings.decode_ms", 0);
    double cached = cli_number_at(result, "usage.cached.device", 0) + cli_number_at(result, "usage.cached.host", 0) +
                    cli_number_at(result, "usage.cached.disk", 0);
    const char *reason = json_string_value(json_object_get(result, "finish_reason"));

    fprintf(stderr, "[%.0f tokens", completion);
    if (decode_ms > 0)
        fprintf(stderr, ", %.1f tokens/s", completion * 1000 / decode_ms);
    if (accept_length(result) > 0)
        fprintf(stderr, ", accept length %.2f", accept_length(result));
    fprintf(stderr, ", first after %.0f ms, prompt %.0f of which %.0f cached",
            cli_number_at(result, "timings.ttft_ms", 0), cli_number_at(result, "usage.prompt", 0), cached);
    if (reason && strcmp(reason, "stop") != 0)
        fprintf(stderr, ", ended by %s", reason);
    fputs("]\n", stderr);
}

bool cli_gen_is_complete(const json_t *result) {
    static const char *const wanted[] = {"stop", "stop_string", "length", "context", "tool_calls"};
    const char *reason = json_string_value(json_object_get(result, "finish_reason"));

    for (size_t i = 0; reason && i < sizeof wanted / sizeof wanted[0]; i++)
        if (strcmp(reason, wanted[i]) == 0)
            return true;
    return false;
}
