/* gen_build: the prompt of a gen.start becomes a seq that the engine can run. Touches nothing but what it is handed. */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cuts.h"
#include "gen_internal.h"

static struct prompt_input input_of(const struct gen_build *build, uint32_t n_tokens_max) {
    const struct gen_params *p = build->params;
    const struct session *session = build->session;
    struct prompt_input input = {.n_tokens_max = n_tokens_max};

    switch (p->prompt_kind) {
    case GEN_PROMPT_TEXT:
        input.kind = PROMPT_TEXT;
        input.text = p->prompt;
        input.markup = p->markup;
        break;
    case GEN_PROMPT_IDS:
        input.kind = PROMPT_IDS;
        input.ids = p->prompt_ids;
        input.n_ids = p->n_prompt_ids;
        break;
    case GEN_PROMPT_MESSAGES:
        input.kind = PROMPT_MESSAGES;
        input.messages = p->messages;
        input.tools = p->tools;
        input.thinking = p->thinking >= 0 ? p->thinking : build->pair->default_thinking;
        input.continuation = session && session->n > 0;
        input.close_turn = input.continuation && session->tokens[session->n - 1] != build->pair->rules.turn_close;
        break;
    }
    return input;
}

static float given_or(double given, float otherwise) {
    return isnan(given) ? otherwise : (float)given;
}

static void set_sampling(const struct gen_build *build, struct seq *seq) {
    const struct generation_config *defaults = &build->pair->info->generation;
    const struct gen_params *p = build->params;
    struct sample_params *s = &seq->sample;

    s->temperature = given_or(p->temperature, defaults->do_sample ? defaults->temperature : 0);
    s->top_p = given_or(p->top_p, defaults->top_p);
    s->top_k = p->top_k >= 0 ? (int32_t)p->top_k : defaults->top_k;
    s->min_p = given_or(p->min_p, 0);
    s->repetition = given_or(p->repetition_penalty, 1);
    s->presence = given_or(p->presence_penalty, 0);
    s->frequency = given_or(p->frequency_penalty, 0);
    s->n_logprobs = p->logprobs;
    s->seed = p->has_seed ? p->seed : build->seed;
    for (uint32_t i = 0; i < p->n_bias; i++) {
        seq->bias_id[i] = p->bias[i].id;
        seq->bias[i] = p->bias[i].bias;
    }
}

static int set_stop_ids(struct gen_build *build, struct seq *seq) {
    const struct gen_params *p = build->params;
    const struct model_info *info = build->pair->info;
    int n_own = p->ignore_eos ? 0 : info->n_stop;

    if (n_own + (int)p->n_stop_ids > SEQ_STOP_IDS_MAX)
        return report_error(&build->report, PROMPT_E_REFUSED,
                            "stop_ids: %u are given and the model has %d of its own; together %d is the most",
                            p->n_stop_ids, n_own, SEQ_STOP_IDS_MAX);
    for (int i = 0; i < n_own; i++)
        seq->stop_ids[seq->n_stop_ids++] = info->stop[i];
    for (uint32_t i = 0; i < p->n_stop_ids; i++)
        seq->stop_ids[seq->n_stop_ids++] = p->stop_ids[i];
    return 0;
}

static int check_id(struct gen_build *build, const char *param, int32_t id) {
    int n_valid = build->pair->info->n_valid;

    return id >= 0 && id < n_valid ? 0
                                   : report_error(&build->report, PROMPT_E_REFUSED,
                                                  "%s: id %d; this model's ids are 0..%d", param, id, n_valid - 1);
}

static int check_ids(struct gen_build *build) {
    const struct gen_params *p = build->params;
    int r = 0;

    for (uint32_t i = 0; i < p->n_bias && r == 0; i++)
        r = check_id(build, "logit_bias", p->bias[i].id);
    for (uint32_t i = 0; i < p->n_stop_ids && r == 0; i++)
        r = check_id(build, "stop_ids", p->stop_ids[i]);
    return r;
}

static int make_seq(struct gen_build *build, const struct prompt *prompt) {
    const struct gen_params *p = build->params;
    int n_before = build->session ? build->session->n : 0, n_context = build->pair->plan.max_context;
    int n = n_before + (int)prompt->n;
    int64_t n_max = p->max_tokens < 0 ? n_context : p->max_tokens + n;
    struct cuts_prompt cuts = {.n = n,
                               .n_system = n_before > 0 ? 0 : (int)prompt->n_system,
                               .n_head = prompt->n_head > 0 ? n_before + (int)prompt->n_head : 0,
                               .n_max = min_int(build->n_restore_points, SEQ_CUTS_MAX)};
    struct kv_hasher *hasher;
    struct seq *seq;
    int r;

    seq = build->seq = seq_new((int)(n_max < n_context ? n_max : n_context) + BLOCK_ROWS_MAX, (int)p->n_bias);
    if (!seq)
        return -ENOMEM;
    if (n_before > 0)
        memcpy(seq->tokens, build->session->tokens, (size_t)n_before * sizeof *seq->tokens);
    memcpy(seq->tokens + n_before, prompt->ids, prompt->n * sizeof *seq->tokens);
    seq->n_prompt = seq->n_tokens = n;
    seq->max_tokens = (int)(p->max_tokens < 0 || p->max_tokens > n_context ? n_context : p->max_tokens);
    seq->speculate = p->speculate;
    seq->priority = p->priority;
    seq->cache = p->cache == GEN_CACHE_BYPASS                        ? SEQ_CACHE_BYPASS
                 : p->cache == GEN_CACHE_NO_STORE || cuts.n_max <= 0 ? SEQ_CACHE_NO_STORE
                                                                     : SEQ_CACHE_USE;
    seq->root = build->root;
    seq->uid = build->uid;
    seq->is_kept = build->session != NULL;
    seq->n_cuts = cuts_find(&cuts, seq->cuts);
    set_sampling(build, seq);
    r = set_stop_ids(build, seq);
    if (r != 0)
        return r;
    r = kv_hasher_new(&hasher);
    if (r != 0)
        return r;
    if (kv_key_chain(hasher, &seq->root, seq->tokens, (uint32_t)(n / PAGE_TOKENS), seq->keys) == 0)
        seq->n_keys = n / PAGE_TOKENS;
    kv_hasher_free(hasher);
    return 0;
}

void gen_build_run(struct gen_build *build) {
    int n_before = build->session ? build->session->n : 0, n_context = build->pair->plan.max_context;
    struct prompt_input input;
    struct prompt prompt;

    /* A prompt leaves room for one token at least. */
    input = input_of(build, (uint32_t)max_int(0, n_context - 1 - n_before));
    build->result = check_ids(build);
    if (build->result != 0)
        return;
    build->result = prompt_build(&build->pair->rules, &input, &prompt, &build->report);
    build->n_tokens = n_before + (int)prompt.n;
    if (build->result != 0)
        return;
    build->in_reasoning = prompt.in_reasoning;
    build->result = make_seq(build, &prompt);
    prompt_deinit(&prompt);
    if (build->result != 0) {
        seq_free(build->seq);
        build->seq = NULL;
    }
}
