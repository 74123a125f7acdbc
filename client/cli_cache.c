/* The tiers of the KV cache. */
#include "cli.h"

#include <stdlib.h>

static const struct cli_option evict_options[] = {
    {"bytes", "bytes", CLI_SIZE, false, "SIZE", "at least so many"},
    {"all", "all", CLI_TRUE, false, NULL, "everything that nobody uses"},
    {0},
};
static const struct cli_option lookup_options[] = {
    {"ids", "prompt_ids", CLI_JSON_FILE, false, "FILE",
     "a JSON list of token ids instead of a text; -: standard input"},
    {"markup", "markup", CLI_TRUE, true, NULL, "the text may hold markup such as <|im_start|>"},
    {"prefetch", "prefetch", CLI_TRUE, false, NULL, "begin to fetch them to the device"},
    {0},
};
static const struct cli_option purge_options[] = {
    {"uid", "uid", CLI_INT, false, "UID", "that user's pages instead of one's own (administrator)"},
    {0},
};

/* A text becomes the ids that the method wants. */
static int tokenize(struct cli *cli, const struct cli_args *args) {
    json_t *result, *params = json_pack("{s:s,s:b}", "text", args->words[0], "markup",
                                        json_is_true(json_object_get(args->local, "markup")));
    int status;

    if (!params)
        return cli_fail_for_memory(cli);
    status = cli_call(cli, "text.tokenize", params, &result);
    if (status != CLI_OK)
        return status;
    json_object_set(args->params, "prompt_ids", json_object_get(result, "ids"));
    json_decref(result);
    return CLI_OK;
}

static int lookup(struct cli *cli, const struct cli_args *args) {
    int status = CLI_OK;

    if ((args->n_words == 1) == (json_object_get(args->params, "prompt_ids") != NULL))
        return cli_fail(cli, CLI_USAGE, "USAGE", "give a TEXT or --ids FILE");
    if (args->n_words == 1)
        status = tokenize(cli, args);
    return status == CLI_OK ? cli_run_method(cli, args) : status;
}

const struct cli_command cli_cache_commands[] = {
    {.name = "cache stats", .arguments = "", .summary = "Show what each tier holds", .method = "cache.stats"},
    {.name = "cache lookup",
     .arguments = "[TEXT]",
     .summary = "Show how much of a prompt would not have to be computed",
     .n_words_max = 1,
     .options = lookup_options,
     .method = "cache.lookup",
     .run = lookup},
    {.name = "cache evict",
     .arguments = "device|host|disk",
     .summary = "Make room in a tier (administrator)",
     .help = "Copies to lower tiers that are due come first. One of --bytes and --all is needed.",
     .word_keys = {{"tier", CLI_STRING}},
     .n_words_min = 1,
     .n_words_max = 1,
     .options = evict_options,
     .method = "cache.evict",
     .is_slow = true},
    {.name = "cache verify",
     .arguments = "",
     .summary = "Read every page on disk and drop the bad ones (administrator)",
     .method = "cache.verify",
     .is_slow = true},
    {.name = "cache flush",
     .arguments = "",
     .summary = "Wait until all that is due is on disk (administrator)",
     .method = "cache.flush",
     .is_slow = true},
    {.name = "cache purge",
     .arguments = "",
     .summary = "Drop a user's pages from all tiers",
     .help = "Sessions stay, and compute their next turn anew; close them to drop what was said.",
     .options = purge_options,
     .method = "cache.purge",
     .is_slow = true},
    {0},
};
