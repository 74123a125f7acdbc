#include "options.h"

#include <errno.h>
#include <getopt.h>
#include <string.h>

enum { LIST_NUMBER_MAX = 1 << 24 }; /* as many tokens as an input may have */

const char options_usage[] =
    "usage: spillway-probe [--model DIR] [--draft DIR] INPUT OUTPUT...\n"
    "Loads a Qwen3.5 checkpoint and prints what the network computes. Without --model: the embedded tiny pair.\n"
    "\n"
    "Pair\n"
    "  --model DIR             folder of the target: config.json, *.safetensors, tokenizer.json\n"
    "  --draft DIR             folder of its DFlash drafter\n"
    "  --dummy                 random weights; the folders need a config.json only\n"
    "  --block-size B          rows of a block, 1..16 (default: the drafter's)\n"
    "  --draft-causal WHICH    auto|yes|no: sliding draft layers causal inside the block (default auto)\n"
    "Numbers\n"
    "  --backend NAME          cpu (default) or cuda\n"
    "  --numeric MODE          fast (default), bf16 or reference\n"
    "  --kv-dtype T            f32|bf16|fp16|e4m3 (default: f32 with reference, else bf16); f32 only with reference or "
    "bf16\n"
    "  --draft-dtype T         the same for the drafter's cache (default: as --kv-dtype's default)\n"
    "  --threads N             workers (default: one per core)\n"
    "  --isa PATH              cpu: scalar, avx2, avx512bf16 or amx instead of the best this machine has\n"
    "Input, one of\n"
    "  --ids FILE.json         an array of ids\n"
    "  --text S                text; markup in it stays text unless --markup is given\n"
    "  --chat FILE.json        {messages, tools, thinking, add_generation_prompt}\n"
    "  --batch FILE.json       an array of arrays of ids (with --generate)\n"
    "Output, any of\n"
    "  --logits F.npy          float32 [T, V]\n"
    "  --hidden F.npy          float32 [L, T, H]: embeddings, then the output of every layer but the last\n"
    "  --routing F.npy         int32 [L, T, k]: chosen experts of a MoE model\n"
    "  --anchors 1,40 --draft-logits F.npy\n"
    "                          float32 [n, B, V]: all rows of the block whose anchor sits at that position\n"
    "  --render                the rendered chat\n"
    "  --tokenize              ids as JSON\n"
    "  --generate N            greedy; JSON: ids (with the stop id), text, tokens_per_s, steps (with a drafter)\n"
    "  --check                 validate the folders only\n"
    "How it runs\n"
    "  --split 64,64,1,...     chunks of these sizes, then the rest (default: chunks of 512)\n"
    "  --verify K              rows after the first chunk go through the verify path, K (1..16) at a time\n"
    "  --ignore-eos            generate on after a stop id\n"
    "  --parallel P            --batch: P seqs side by side in one ragged batch (1..64, default 1)\n"
    "  --help\n"
    "Exit status: 0 done, 2 wrong usage, 77 a folder or the device cannot be used, 1 any other failure.\n";

enum option_id {
    OPT_MODEL = 256,
    OPT_DRAFT,
    OPT_DUMMY,
    OPT_BLOCK,
    OPT_CAUSAL,
    OPT_BACKEND,
    OPT_NUMERIC,
    OPT_KV,
    OPT_DRAFT_KV,
    OPT_THREADS,
    OPT_ISA,
    OPT_IDS,
    OPT_TEXT,
    OPT_MARKUP,
    OPT_CHAT,
    OPT_BATCH,
    OPT_LOGITS,
    OPT_HIDDEN,
    OPT_ROUTING,
    OPT_ANCHORS,
    OPT_DRAFT_LOGITS,
    OPT_RENDER,
    OPT_TOKENIZE,
    OPT_GENERATE,
    OPT_CHECK,
    OPT_SPLIT,
    OPT_VERIFY,
    OPT_IGNORE_EOS,
    OPT_PARALLEL,
    OPT_HELP,
};

static const struct option long_options[] = {
    {"model", 1, NULL, OPT_MODEL},
    {"draft", 1, NULL, OPT_DRAFT},
    {"dummy", 0, NULL, OPT_DUMMY},
    {"block-size", 1, NULL, OPT_BLOCK},
    {"draft-causal", 1, NULL, OPT_CAUSAL},
    {"backend", 1, NULL, OPT_BACKEND},
    {"numeric", 1, NULL, OPT_NUMERIC},
    {"kv-dtype", 1, NULL, OPT_KV},
    {"draft-dtype", 1, NULL, OPT_DRAFT_KV},
    {"threads", 1, NULL, OPT_THREADS},
    {"isa", 1, NULL, OPT_ISA},
    {"ids", 1, NULL, OPT_IDS},
    {"text", 1, NULL, OPT_TEXT},
    {"markup", 0, NULL, OPT_MARKUP},
    {"chat", 1, NULL, OPT_CHAT},
    {"batch", 1, NULL, OPT_BATCH},
    {"logits", 1, NULL, OPT_LOGITS},
    {"hidden", 1, NULL, OPT_HIDDEN},
    {"routing", 1, NULL, OPT_ROUTING},
    {"anchors", 1, NULL, OPT_ANCHORS},
    {"draft-logits", 1, NULL, OPT_DRAFT_LOGITS},
    {"render", 0, NULL, OPT_RENDER},
    {"tokenize", 0, NULL, OPT_TOKENIZE},
    {"generate", 1, NULL, OPT_GENERATE},
    {"check", 0, NULL, OPT_CHECK},
    {"split", 1, NULL, OPT_SPLIT},
    {"verify", 1, NULL, OPT_VERIFY},
    {"ignore-eos", 0, NULL, OPT_IGNORE_EOS},
    {"parallel", 1, NULL, OPT_PARALLEL},
    {"help", 0, NULL, OPT_HELP},
    {0},
};

static const char *name_of(int id) {
    for (const struct option *o = long_options; o->name; o++)
        if (o->val == id)
            return o->name;
    return "?";
}

/* n digits and nothing else, no sign and no space, that make a number in min..max. */
static bool read_number(const char *text, size_t n, int min, int max, int *ret) {
    int64_t v = 0;

    for (size_t i = 0; i < n; i++) {
        if (text[i] < '0' || text[i] > '9')
            return false;
        v = 10 * v + (text[i] - '0');
        if (v > max)
            return false;
    }
    if (n == 0 || v < min)
        return false;
    *ret = (int)v;
    return true;
}

static int parse_int(int option, const char *text, int min, int max, int *ret, struct report *report) {
    if (!read_number(text, strlen(text), min, max, ret))
        return report_error(report, -EINVAL, "--%s %s: a number in %d..%d is needed", name_of(option), text, min, max);
    return 0;
}

static int parse_list(int option, const char *text, int n_max, int *list, int *ret_n, struct report *report) {
    int n = 0;

    for (const char *at = text;; at++) { /* over the comma */
        size_t bytes = strcspn(at, ",");

        if (n == n_max)
            return report_error(report, -EINVAL, "--%s: more than %d numbers", name_of(option), n_max);
        if (!read_number(at, bytes, 1, LIST_NUMBER_MAX, &list[n]))
            return report_error(report, -EINVAL,
                                "--%s: number %d is '%.*s'; numbers in 1..%d are needed, a comma between each two",
                                name_of(option), n + 1, (int)(bytes < 40 ? bytes : 40), at, LIST_NUMBER_MAX);
        n++;
        at += bytes;
        if (*at == '\0')
            break;
    }
    *ret_n = n;
    return 0;
}

static int parse_word(int option, const char *text, const char *const *words, int n, int *ret, struct report *report) {
    char known[128] = "";

    for (int i = 0; i < n; i++) {
        if (strcmp(text, words[i]) == 0) {
            *ret = i;
            return 0;
        }
        strncat(known, i ? ", " : "", sizeof known - strlen(known) - 1);
        strncat(known, words[i], sizeof known - strlen(known) - 1);
    }
    return report_error(report, -EINVAL, "--%s %s: one of %s is needed", name_of(option), text, known);
}

static int parse_dtype(int option, const char *text, enum dtype *ret, struct report *report) {
    static const char *const names[] = {"f32", "bf16", "fp16", "e4m3"};
    int i, r = parse_word(option, text, names, DTYPE_N, &i, report);

    if (r == 0)
        *ret = (enum dtype)i;
    return r;
}

static int set_source(struct command *c, enum probe_source source, const char *arg, struct report *report) {
    if (c->source != SOURCE_NONE)
        return report_error(report, -EINVAL, "more than one of --ids, --text, --chat and --batch");
    c->source = source;
    c->source_arg = arg;
    return 0;
}

static int parse_one(struct command *c, int option, char *arg, struct report *report) {
    static const char *const causal[] = {"auto", "yes", "no"}, *const numeric[] = {"fast", "bf16", "reference"};
    struct probe_options *o = &c->probe;
    int i, r = 0;

    switch ((enum option_id)option) {
    case OPT_MODEL:
        o->model = arg;
        break;
    case OPT_DRAFT:
        o->draft = arg;
        break;
    case OPT_DUMMY:
        o->dummy = true;
        break;
    case OPT_BLOCK:
        r = parse_int(option, arg, 1, BLOCK_ROWS_MAX, &o->block_size, report);
        break;
    case OPT_CAUSAL:
        r = parse_word(option, arg, causal, 3, &i, report);
        if (r == 0)
            o->draft_causal = (enum draft_causal)i;
        break;
    case OPT_BACKEND:
        o->backend = arg;
        break;
    case OPT_NUMERIC:
        r = parse_word(option, arg, numeric, 3, &i, report);
        if (r == 0)
            o->numeric = (enum numeric)i;
        break;
    case OPT_KV:
        c->has_kv_dtype = true;
        r = parse_dtype(option, arg, &o->kv_dtype, report);
        break;
    case OPT_DRAFT_KV:
        c->has_draft_dtype = true;
        r = parse_dtype(option, arg, &o->draft_dtype, report);
        break;
    case OPT_THREADS:
        r = parse_int(option, arg, 1, 1024, &o->n_threads, report);
        break;
    case OPT_ISA:
        o->isa = arg;
        break;
    case OPT_IDS:
        r = set_source(c, SOURCE_IDS, arg, report);
        break;
    case OPT_TEXT:
        r = set_source(c, SOURCE_TEXT, arg, report);
        break;
    case OPT_MARKUP:
        c->markup = true;
        break;
    case OPT_CHAT:
        r = set_source(c, SOURCE_CHAT, arg, report);
        break;
    case OPT_BATCH:
        r = set_source(c, SOURCE_BATCH, arg, report);
        break;
    case OPT_LOGITS:
        o->logits_path = arg;
        break;
    case OPT_HIDDEN:
        o->hidden_path = arg;
        break;
    case OPT_ROUTING:
        o->routing_path = arg;
        break;
    case OPT_ANCHORS:
        r = parse_list(option, arg, PROBE_ANCHORS_MAX, o->anchors, &o->n_anchors, report);
        break;
    case OPT_DRAFT_LOGITS:
        o->draft_logits_path = arg;
        break;
    case OPT_RENDER:
        c->render = true;
        break;
    case OPT_TOKENIZE:
        c->tokenize = true;
        break;
    case OPT_GENERATE:
        r = parse_int(option, arg, 1, 1 << 24, &o->n_generate, report);
        break;
    case OPT_CHECK:
        c->check = true;
        break;
    case OPT_SPLIT:
        r = parse_list(option, arg, PROBE_SPLITS_MAX, o->splits, &o->n_splits, report);
        break;
    case OPT_VERIFY:
        r = parse_int(option, arg, 1, BLOCK_ROWS_MAX, &o->verify_rows, report);
        break;
    case OPT_IGNORE_EOS:
        o->ignore_eos = true;
        break;
    case OPT_PARALLEL:
        r = parse_int(option, arg, 1, PROBE_SLOTS_MAX, &o->n_parallel, report);
        break;
    case OPT_HELP:
        c->help = true;
        break;
    }
    return r;
}

/* What does not go together. */
static int check_command(const struct command *c, struct report *report) {
    const struct probe_options *o = &c->probe;
    bool evaluates = o->logits_path || o->hidden_path || o->routing_path || o->draft_logits_path;

    if (o->numeric == NUMERIC_FAST && (o->kv_dtype == DTYPE_F32 || o->draft_dtype == DTYPE_F32))
        return report_error(report, -EINVAL,
                            "f32 caches are for --numeric reference and bf16; fast takes bf16, fp16 or e4m3");
    if (!evaluates && !c->render && !c->tokenize && !c->check && o->n_generate == 0)
        return report_error(report, -EINVAL, "nothing to do: give --generate, --logits, --tokenize, --check ...");
    if ((o->n_anchors > 0) != (o->draft_logits_path != NULL))
        return report_error(report, -EINVAL, "--anchors and --draft-logits go together");
    if (c->source == SOURCE_NONE && (evaluates || c->render || c->tokenize || o->n_generate > 0))
        return report_error(report, -EINVAL, "no input: give one of --ids, --text, --chat and --batch");
    if (c->source == SOURCE_BATCH && (evaluates || c->render || c->tokenize))
        return report_error(report, -EINVAL, "--batch goes with --generate only");
    if (c->render && c->source != SOURCE_CHAT)
        return report_error(report, -EINVAL, "--render needs --chat");
    return 0;
}

int options_parse(int argc, char **argv, struct command *ret_command, struct report *report) {
    struct command c = {.probe = {.backend = "cpu", .n_parallel = 1}};
    int option, r = 0;
    enum dtype dtype;

    opterr = 0;
    while (r == 0 && (option = getopt_long(argc, argv, ":", long_options, NULL)) != -1) {
        if (option == '?')
            r = report_error(report, -EINVAL, "%s: unknown option; --help lists them", argv[optind - 1]);
        else if (option == ':')
            r = report_error(report, -EINVAL, "%s: a value is missing", argv[optind - 1]);
        else
            r = parse_one(&c, option, optarg, report);
    }
    if (r == 0 && !c.help && optind < argc)
        r = report_error(report, -EINVAL, "%s: no option; --help lists them", argv[optind]);
    dtype = c.probe.numeric == NUMERIC_REFERENCE ? DTYPE_F32 : DTYPE_BF16;
    if (!c.has_kv_dtype)
        c.probe.kv_dtype = dtype;
    if (!c.has_draft_dtype)
        c.probe.draft_dtype = dtype;
    if (r == 0 && !c.help)
        r = check_command(&c, report);
    if (r == 0)
        *ret_command = c;
    return r;
}
