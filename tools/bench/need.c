#include "need.h"

#define BF16_BYTES 2.0

/* Matrix elements that every token meets, but for the experts it chooses and the head. */
static double body(const struct qwen_config *c) {
    double hidden = c->hidden, value_dim = (double)c->gdn_v_heads * c->gdn_head_dim_v;
    double conv_dim = 2.0 * c->gdn_k_heads * c->gdn_head_dim_k + value_dim;
    double heads = (double)c->n_heads * c->head_dim, kv = (double)c->n_kv_heads * c->head_dim;
    double linear = hidden * (conv_dim + value_dim + 2 * c->gdn_v_heads) + value_dim * hidden;
    double full = hidden * (heads * (c->has_attn_gate ? 2 : 1) + 2 * kv) + heads * hidden;
    double mlp =
        c->n_experts > 0 ? hidden * (c->n_experts + 1) + 3 * hidden * c->shared_width : 3 * hidden * c->intermediate;
    double sum = 0;

    for (int l = 0; l < c->n_layers; l++)
        sum += mlp + (c->layers[l] == LAYER_FULL ? full : linear);
    return sum;
}

static double expert(const struct qwen_config *c) {
    return 3.0 * c->hidden * c->moe_width;
}

static int n_full(const struct qwen_config *c) {
    int n = 0;

    for (int l = 0; l < c->n_layers; l++)
        n += c->layers[l] == LAYER_FULL;
    return n;
}

static double token_bytes(const struct kv_geometry *g) {
    return (double)g->page_bytes / PAGE_TOKENS;
}

struct need need_target(const struct model_info *info, const struct need_rows *rows) {
    const struct qwen_config *c = &info->target;
    double n_seqs = rows->n_seqs, n_rows = n_seqs * rows->n_rows, n_outs = n_seqs * rows->n_outs;
    double head = (double)c->vocab * c->hidden, experts = c->n_experts > 0 ? expert(c) * c->n_layers : 0;
    double keys = n_rows * (rows->context + (rows->n_rows + 1) / 2.0);
    double n_states = !rows->is_frozen ? 2 : info->state.open_bytes > 0 ? 1 : 3;
    struct need need;

    need.kv_bytes = n_seqs * token_bytes(&info->groups[KV_TARGET_FULL]) * rows->context;
    need.bytes = BF16_BYTES * (body(c) + experts * rows->n_experts + (rows->n_outs > 0 ? head : 0)) + need.kv_bytes +
                 n_seqs * n_states * (double)info->state.slot_bytes;
    need.ops = 2 * (n_rows * (body(c) + experts * c->top_k) + n_outs * head) +
               4.0 * c->n_heads * c->head_dim * n_full(c) * keys;
    return need;
}

struct need need_draft(const struct model_info *info, int n_seqs, int context) {
    const struct draft_config *c = &info->draft;
    const struct kv_geometry *full = &info->groups[KV_DRAFT_FULL], *sliding = &info->groups[KV_DRAFT_SLIDING];
    double hidden = c->hidden, heads = (double)c->n_heads * c->head_dim, kv = (double)c->n_kv_heads * c->head_dim;
    double fc = hidden * hidden * c->n_taps, head = (double)info->target.vocab * hidden;
    double layers = c->n_layers * (hidden * (heads + 2 * kv) + heads * hidden + 3 * hidden * c->intermediate);
    double n_rows = (double)n_seqs * info->block_size, n_outs = (double)n_seqs * (info->block_size - 1);
    double seen = min_int(context, sliding->window); /* by a sliding layer */
    struct need need;

    need.kv_bytes = n_seqs * (token_bytes(full) * context + token_bytes(sliding) * seen);
    need.bytes = BF16_BYTES * (fc + layers + head) + need.kv_bytes;
    need.ops = 2 * (n_rows * (fc + layers + c->n_layers * 2 * hidden * kv) + n_outs * head) +
               4 * heads * n_rows * (full->n_layers * (double)context + sliding->n_layers * seen);
    return need;
}
