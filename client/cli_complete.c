/* One answer to one prompt. */
#include "cli_gen.h"

#include <stdlib.h>
#include <string.h>

static const struct cli_option options[] = {
    {"file", "file", CLI_STRING, true, "FILE", "the prompt; -: standard input, also if there is no PROMPT"},
    {"messages", "messages", CLI_JSON_FILE, true, "FILE",
     "a JSON list of messages, or a map {messages, tools, thinking}"},
    {"chat", "chat", CLI_TRUE, true, NULL, "the prompt is a message of the user, for the chat template"},
    {"ids", "prompt_ids", CLI_JSON_FILE, false, "FILE", "the prompt as a JSON list of token ids"},
    {"markup", "markup", CLI_TRUE, false, NULL, "the prompt may hold markup such as <|im_start|>"},
    {"logprobs", "logprobs", CLI_INT, false, "N", "with --json: of each token and the N best beside it"},
    {"return-ids", "return_ids", CLI_TRUE, false, NULL, "with --json: token ids"},
    {"events", "events", CLI_TRUE, true, NULL, "print each event as a line of JSON, then the result"},
    {"reasoning", "reasoning", CLI_TRUE, true, NULL, "print the reasoning too if this is no terminal"},
    {"stats", "stats", CLI_TRUE, true, NULL, "then tell tokens/s and accept length on standard error"},
    {0},
};

static bool is_set(const struct cli_args *args, const char *key) {
    return json_is_true(json_object_get(args->local, key));
}

/* The prompt as text, from the command line or a file. */
static int read_text(struct cli *cli, const struct cli_args *args, json_t **ret_text) {
    const char *file = json_string_value(json_object_get(args->local, "file"));
    char *bytes;
    size_t n_bytes;
    int status;

    if (args->n_words == 1) {
        *ret_text = json_string(args->words[0]);
    } else {
        status = cli_read_file(cli, file ? file : "-", &bytes, &n_bytes);
        if (status != CLI_OK)
            return status;
        *ret_text = json_stringn(bytes, n_bytes);
        free(bytes);
    }
    return *ret_text ? CLI_OK : cli_fail(cli, CLI_USAGE, "USAGE", "the prompt is not UTF-8");
}

/* Exactly one prompt, of whichever kind, becomes a parameter. */
static int set_prompt(struct cli *cli, const struct cli_args *args) {
    json_t *messages = json_object_get(args->local, "messages"), *text;
    int n_prompts = (args->n_words == 1) + (json_object_get(args->local, "file") != NULL) + (messages != NULL) +
                    (json_object_get(args->params, "prompt_ids") != NULL);
    int status;

    if (n_prompts > 1)
        return cli_fail(cli, CLI_USAGE, "USAGE", "give one of PROMPT, --file, --messages, --ids");
    if (json_object_get(args->params, "prompt_ids"))
        return CLI_OK;
    if (messages) {
        status = cli_use_messages(cli, messages, args->params);
        json_object_del(args->params, "add_generation_prompt"); /* gen.start always does */
        return status;
    }
    status = read_text(cli, args, &text);
    if (status != CLI_OK)
        return status;
    if (is_set(args, "chat"))
        json_object_set_new(args->params, "messages", json_pack("[{s:s,s:o}]", "role", "user", "content", text));
    else
        json_object_set_new(args->params, "prompt", text);
    return CLI_OK;
}

static int complete(struct cli *cli, const struct cli_args *args) {
    struct cli_gen gen = {.show_reasoning = is_set(args, "reasoning"), .print_events = is_set(args, "events")};
    json_t *result;
    int status = set_prompt(cli, args);

    if (status == CLI_OK)
        status = cli_interrupts_open(cli, &gen.interrupts_fd);
    if (status != CLI_OK)
        return status;
    gen.print_text = !cli->json && !gen.print_events;
    if (cli->json && !gen.print_events)
        json_object_set_new(args->params, "stream", json_false());
    status = cli_gen_run(cli, &gen, json_incref(args->params), &result);
    cli_interrupts_close(gen.interrupts_fd);
    if (status != CLI_OK)
        return status;
    if (!gen.print_text)
        cli_print_json(result);
    if (is_set(args, "stats"))
        cli_gen_print_summary(result);
    status = cli_gen_is_complete(result) ? CLI_OK : CLI_FAILED;
    if (status != CLI_OK && !is_set(args, "stats"))
        fprintf(stderr, "spillway: the answer ended early: %s\n",
                json_string_value(json_object_get(result, "finish_reason")));
    json_decref(result);
    return status;
}

int cli_chat(struct cli *cli, const struct cli_args *args);
extern const struct cli_option cli_chat_options[];

const struct cli_command cli_gen_commands[] = {
    {.name = "chat",
     .arguments = "",
     .summary = "Talk with the model",
     .help =
         "Ctrl-C ends the answer, Ctrl-D the program. A line that ends in \\ goes on in the next one. /clear forgets\n"
         "the conversation, /help lists what else there is. With --session the daemon keeps the conversation.",
     .options = cli_chat_options,
     .more_options = cli_gen_options,
     .run = cli_chat},
    {.name = "complete",
     .arguments = "[PROMPT]",
     .summary = "Print the answer to one prompt",
     .help = "Without PROMPT it is read from standard input. Ctrl-C ends the answer and keeps what has come. The exit "
             "code\n"
             "is 1 if the answer ended early: cancelled, deadline, shutdown, slow_client or error.",
     .n_words_max = 1,
     .options = options,
     .more_options = cli_gen_options,
     .run = complete},
    {0},
};
