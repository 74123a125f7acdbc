/* config.json of targets and drafters, and generation_config.json: refused with one line, or numbers within the bounds
 * that other code relies on. */
#include "config.h"
#include <assert.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void check_target(const struct qwen_config *c) {
    assert(c->vocab >= 2 && c->vocab <= VOCAB_MAX && c->hidden >= 1 && c->hidden <= WIDTH_MAX);
    assert(c->n_layers >= 1 && c->n_layers <= LAYERS_MAX);
    assert(c->n_kv_heads >= 1 && c->n_heads <= HEADS_MAX && c->n_heads % c->n_kv_heads == 0);
    assert(c->gdn_k_heads >= 1 && c->gdn_v_heads <= HEADS_MAX && c->gdn_v_heads % c->gdn_k_heads == 0);
    assert(c->rotary_dim >= 2 && c->rotary_dim <= c->head_dim && c->rotary_dim % 2 == 0);
    assert(c->rope_theta >= 1 && c->rms_eps > 0);
    assert((c->n_experts > 0) != (c->intermediate > 0));
    assert(c->n_experts == 0 || (c->top_k >= 1 && c->top_k <= c->n_experts && c->moe_width > 0 && c->shared_width > 0));
    assert(c->n_eos >= 0 && c->n_eos <= EOS_MAX);
    for (int i = 0; i < c->n_eos; i++)
        assert(c->eos[i] >= 0 && c->eos[i] < c->vocab);
}

static void check_draft(const struct draft_config *c) {
    assert(c->n_layers >= 1 && c->n_layers <= DRAFT_LAYERS_MAX);
    assert(c->n_kv_heads >= 1 && c->n_heads <= HEADS_MAX && c->n_heads % c->n_kv_heads == 0);
    assert(c->block_size >= 1 && c->block_size <= BLOCK_ROWS_MAX && c->mask_id >= 0 && c->mask_id < c->vocab);
    assert(c->n_taps >= 1 && c->n_taps <= TAPS_MAX && c->rope_theta >= 1);
    for (int i = 0; i < c->n_taps; i++) {
        assert(c->taps[i] >= 0 && c->taps[i] <= (c->n_target_layers < 0 ? LAYERS_MAX : c->n_target_layers) - 2);
        for (int k = 0; k < i; k++)
            assert(c->taps[i] != c->taps[k]);
    }
    for (int l = 0; l < c->n_layers; l++)
        assert(!c->sliding[l] || c->window > 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    const char *text = (const char *)data;
    struct generation_config generation;
    struct qwen_config target;
    struct draft_config draft;
    struct report report = {""};

    if (qwen_config_parse("x", text, n, &target, &report) == 0)
        check_target(&target);
    else
        assert(report.line[0] && !strchr(report.line, '\n'));
    report.line[0] = '\0';
    if (draft_config_parse("x", text, n, DRAFT_CAUSAL_AUTO, &draft, &report) == 0)
        check_draft(&draft);
    else
        assert(report.line[0] && !strchr(report.line, '\n'));
    if (generation_config_parse("x", text, n, &generation, &report) == 0)
        assert(generation.n_eos <= EOS_MAX && generation.top_p > 0 && generation.temperature >= 0);
    return 0;
}
