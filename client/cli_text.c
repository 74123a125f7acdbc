/* Text and tokens, without a generation. */
#include "cli.h"

#include <stdlib.h>
#include <string.h>

static const struct cli_option tokenize_options[] = {
    {"file", "file", CLI_STRING, true, "FILE", "the text; -: standard input, also if there is no TEXT"},
    {"markup", "markup", CLI_TRUE, false, NULL, "the text may hold markup such as <|im_start|>"},
    {0},
};
static const struct cli_option render_options[] = {
    {"tools", "tools", CLI_JSON_FILE, false, "FILE", "a JSON list of tools"},
    {"thinking", "thinking", CLI_TRUE, false, NULL, "the answer would begin with reasoning"},
    {"no-thinking", "thinking", CLI_FALSE, false, NULL, "it would not"},
    {"no-generation-prompt", "add_generation_prompt", CLI_FALSE, false, NULL,
     "without the head of the assistant's turn"},
    {0},
};

static int tokenize(struct cli *cli, const struct cli_args *args) {
    const char *file = json_string_value(json_object_get(args->local, "file"));
    char *text = NULL;
    size_t n_bytes;
    json_t *result;
    int status;

    if (args->n_words == 1 && file)
        return cli_fail(cli, CLI_USAGE, "USAGE", "give a TEXT or --file FILE");
    if (args->n_words == 1) {
        json_object_set_new(args->params, "text", json_string(args->words[0]));
    } else {
        status = cli_read_file(cli, file ? file : "-", &text, &n_bytes);
        if (status != CLI_OK)
            return status;
        json_object_set_new(args->params, "text", json_stringn(text, n_bytes));
        free(text);
    }
    if (!json_object_get(args->params, "text"))
        return cli_fail(cli, CLI_USAGE, "USAGE", "the text is not UTF-8");
    status = cli_call(cli, "text.tokenize", json_incref(args->params), &result);
    if (status != CLI_OK)
        return status;
    cli_print_json(cli->json ? result : json_object_get(result, "ids"));
    json_decref(result);
    return CLI_OK;
}

static int render(struct cli *cli, const struct cli_args *args) {
    json_t *document, *result;
    int status = cli_read_json(cli, args->n_words ? args->words[0] : "-", &document);

    if (status != CLI_OK)
        return status;
    status = cli_use_messages(cli, document, args->params);
    json_decref(document);
    if (status != CLI_OK)
        return status;
    status = cli_call(cli, "chat.render", json_incref(args->params), &result);
    if (status != CLI_OK)
        return status;
    cli_print_text_of(cli, result);
    json_decref(result);
    return CLI_OK;
}

const struct cli_command cli_text_commands[] = {
    {.name = "tokenize",
     .arguments = "[TEXT]",
     .summary = "Print the token ids of a text",
     .n_words_max = 1,
     .options = tokenize_options,
     .run = tokenize},
    {.name = "render",
     .arguments = "[FILE]",
     .summary = "Print what the chat template makes of messages",
     .help = "FILE, or standard input, holds a JSON list of messages, or a map {messages, tools, thinking,\n"
             "add_generation_prompt}; members that are null count as missing.",
     .n_words_max = 1,
     .options = render_options,
     .run = render},
    {0},
};
