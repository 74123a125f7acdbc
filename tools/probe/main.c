/* spillway-probe: loads a checkpoint and prints what the network computes. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "options.h"
#include "text_input.h"
#include "value.h"

enum { EXIT_FAILED = 1, EXIT_USAGE = 2, EXIT_UNUSABLE = 77 };

static const char tiny_target[] = SHARE "/tiny/target", tiny_draft[] = SHARE "/tiny/draft";

/* What one call works on. */
struct run {
    struct command command;
    struct tokenizer *tokenizer; /* NULL if the folder has none and no text needs it */
    struct ids *inputs;
    int n_inputs;
};

static void print_ids(const int *ids, int n) {
    putchar('[');
    for (int i = 0; i < n; i++)
        printf(i ? ", %d" : "%d", ids[i]);
    putchar(']');
}

static void print_json_string(const char *bytes, size_t n) {
    struct value value = {.kind = VALUE_STRING, .text = {bytes, n}};
    struct text json;

    text_init(&json, 8 * n + 16);
    value_write_json(&json, &value);
    fwrite(json.bytes, 1, json.n, stdout);
    text_deinit(&json);
}

static bool is_stop(const struct model_info *info, int id) {
    for (int i = 0; i < info->n_stop; i++)
        if (info->stop[i] == id)
            return true;
    return false;
}

/* ids include a stop id that ended the run; text does not. */
static int print_text(const struct run *run, const struct model_info *info, const struct ids *out) {
    struct tokenizer_text text = {0};
    int n = out->n, r = 0;
    int32_t *ids;

    if (!run->tokenizer) {
        fputs("null", stdout);
        return 0;
    }
    if (n > 0 && !run->command.probe.ignore_eos && is_stop(info, out->id[n - 1]))
        n--;
    ids = malloc((size_t)n * sizeof *ids + 1);
    if (!ids)
        return -ENOMEM;
    for (int i = 0; i < n; i++)
        ids[i] = out->id[i];
    r = tokenizer_decode(run->tokenizer, ids, (size_t)n, 0, &text);
    if (r == 0)
        print_json_string(text.bytes ? text.bytes : "", text.n);
    tokenizer_text_deinit(&text);
    free(ids);
    return r;
}

static int print_generation(const struct run *run, const struct probe *probe, const struct generation *g) {
    int r;

    fputs("{\"text\": ", stdout);
    r = print_text(run, probe->info, &g->out);
    fputs(", \"ids\": ", stdout);
    print_ids(g->out.id, g->out.n);
    /* The first token comes from prefill; time and accept length are those of the passes behind it. */
    printf(", \"tokens_per_s\": %.2f", g->decode_s > 0 ? (g->out.n - 1) / g->decode_s : 0.0);
    if (probe->info->draft.n_layers > 0) {
        printf(", \"accept_length\": %.3f, \"steps\": [", g->n_steps > 0 ? (double)(g->out.n - 1) / g->n_steps : 0.0);
        for (int i = 0; i < g->n_steps; i++) {
            const struct generation_step *s = &g->steps[i];

            printf("%s{\"position\": %d, \"anchor\": %d, \"draft\": ", i ? ", " : "", s->position, s->anchor);
            print_ids(s->drafts, s->n_drafts);
            printf(", \"accepted\": %d}", s->accepted);
        }
        putchar(']');
    }
    puts("}");
    return r;
}

static int generate(const struct run *run, struct probe *probe, struct report *report) {
    struct generation *all = calloc((size_t)run->n_inputs, sizeof *all);
    int r = all ? probe_generate(probe, run->inputs, run->n_inputs, all, report)
                : report_error(report, -ENOMEM, "out of memory");

    for (int i = 0; r == 0 && i < run->n_inputs; i++)
        if (print_generation(run, probe, &all[i]) != 0)
            r = report_error(report, -ENOMEM, "out of memory for the text");
    for (int i = 0; all && i < run->n_inputs; i++)
        generation_free(&all[i]);
    free(all);
    return r;
}

static void print_check(const struct probe *probe) {
    const struct model_info *info = probe->info;

    printf("%s: ok: %d layers, hidden %d, vocab %d (%d ids in use), %.1f MiB of weights, %d tensors skipped by name\n",
           probe->options->model, info->target.n_layers, info->target.hidden, info->target.vocab, info->n_valid,
           (double)info->weight_bytes / 1048576, info->n_skipped);
    if (info->draft.n_layers > 0)
        printf("%s: ok: %d layers, blocks of %d, %d taps, %.1f MiB of weights\n", probe->options->draft,
               info->draft.n_layers, info->draft.block_size, info->draft.n_taps,
               (double)info->draft_weight_bytes / 1048576);
}

/* The network's part: load, then evaluate or generate. */
static int run_network(struct run *run, struct report *report, int *ret_status) {
    const struct probe_options *o = &run->command.probe;
    int n_valid = run->tokenizer ? tokenizer_n_ids(run->tokenizer) : 0, n_input_max = 0, r;
    struct probe probe;

    for (int i = 0; i < run->n_inputs; i++)
        n_input_max = max_int(n_input_max, run->inputs[i].n);
    r = probe_open(&probe, o, n_valid, n_input_max, report);
    if (r != 0) {
        *ret_status = EXIT_UNUSABLE;
        return r;
    }
    if (probe.info->warning[0] != '\0')
        fprintf(stderr, "spillway-probe: warning: %s\n", probe.info->warning);
    for (int i = 0; r == 0 && i < run->n_inputs; i++)
        for (int k = 0; r == 0 && k < run->inputs[i].n; k++)
            if (run->inputs[i].id[k] >= probe.info->target.vocab)
                r = report_error(report, -EINVAL, "%s: id %d; %s knows ids below %d", run->command.source_arg,
                                 run->inputs[i].id[k], o->model, probe.info->target.vocab);
    if (r == 0 && run->command.check)
        print_check(&probe);
    if (r == 0 && (o->logits_path || o->hidden_path || o->routing_path || o->draft_logits_path))
        r = probe_evaluate(&probe, &run->inputs[0], report);
    if (r == 0 && o->n_generate > 0)
        r = generate(run, &probe, report);
    probe_close(&probe);
    return r;
}

static bool needs_network(const struct command *c) {
    const struct probe_options *o = &c->probe;

    return c->check || o->n_generate > 0 || o->logits_path || o->hidden_path || o->routing_path || o->draft_logits_path;
}

/* A folder without tokenizer.json is fine as long as no text becomes ids. */
static int open_tokenizer(struct run *run, struct report *report, int *ret_status) {
    const struct command *c = &run->command;
    bool needed = c->source == SOURCE_TEXT || (c->source == SOURCE_CHAT && (c->tokenize || needs_network(c)));
    int r = text_input_tokenizer(run->command.probe.model, &run->tokenizer, report);

    if (r == -ENOENT && !needed)
        return 0;
    if (r != 0)
        *ret_status = EXIT_UNUSABLE;
    return r;
}

static int read_inputs(struct run *run, struct report *report) {
    const struct command *c = &run->command;
    struct chat_prompt prompt;
    int r = 0;

    if (c->source == SOURCE_IDS || c->source == SOURCE_BATCH)
        return input_ids_file(c->source_arg, c->source == SOURCE_BATCH, 1 << 24, &run->inputs, &run->n_inputs, report);
    if (c->source == SOURCE_NONE)
        return 0;
    run->inputs = calloc(1, sizeof *run->inputs);
    if (!run->inputs)
        return report_error(report, -ENOMEM, "out of memory");
    run->n_inputs = 1;
    if (c->source == SOURCE_TEXT)
        return text_input_ids(run->tokenizer, c->source_arg, c->markup, run->inputs, report);
    chat_prompt_init(&prompt, TOKENIZER_TEXT_BYTES_MAX);
    r = text_input_chat(c->source_arg, &prompt, report);
    if (r == 0 && c->render)
        fwrite(prompt.text.bytes, 1, prompt.text.n, stdout);
    if (r == 0 && run->tokenizer)
        r = text_input_chat_ids(run->tokenizer, &prompt, run->inputs, report);
    chat_prompt_deinit(&prompt);
    return r;
}

int main(int argc, char **argv) {
    struct report report = {0};
    struct run run = {0};
    int status = 0, r;

    if (options_parse(argc, argv, &run.command, &report) != 0) {
        fprintf(stderr, "spillway-probe: %s\n", report.line);
        return EXIT_USAGE;
    }
    if (run.command.help) {
        fputs(options_usage, stdout);
        return 0;
    }
    if (!run.command.probe.model) {
        run.command.probe.model = tiny_target;
        run.command.probe.draft = run.command.probe.draft ? run.command.probe.draft : tiny_draft;
    }
    r = open_tokenizer(&run, &report, &status);
    if (r == 0)
        r = read_inputs(&run, &report);
    if (r == 0 && run.command.tokenize) {
        print_ids(run.inputs[0].id, run.inputs[0].n);
        putchar('\n');
    }
    if (r == 0 && needs_network(&run.command))
        r = run_network(&run, &report, &status);
    if (r == 0 && (fflush(stdout) != 0 || ferror(stdout)))
        r = report_error(&report, -EIO, "standard output cannot be written");
    tokenizer_free(run.tokenizer);
    ids_free_all(run.inputs, run.n_inputs);
    if (r == 0)
        return 0;
    fprintf(stderr, "spillway-probe: %s\n", report.line);
    return status ? status : EXIT_FAILED;
}
