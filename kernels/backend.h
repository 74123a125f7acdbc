/* backend: THE table of what a device can do, one argument struct per op. Knows no model, no page policy, no socket.
 *
 * A pass is a recorded program: program_begin, ops, program_cut, program_end record; program_run enqueues. Op arguments
 * hold device buffers and bucket maxima, never a step's lengths: those are read from `struct batch` and `struct seq_ctl`
 * in device memory while the program runs. Running allocates nothing and synchronises nothing. Every op is a no-op for a
 * batch without segs. Pointers inside argument structs are device pointers unless said; argument structs and the small
 * structs they point to (batch, kv_view, state_view) are copied while recording.
 *
 * act: the element type of activation buffers, backend_caps.act_dtype (f32 on the CPU in every numeric mode, where the
 * mode decides which stored values are rounded to bf16; bf16 on CUDA).
 *
 * Return values: 0, or a negative errno (-ENOMEM, -EINVAL for arguments no backend can run, -EIO once the device is lost).
 */
#pragma once
#include "base.h"
#include "dtype.h"

struct device; /* one opened device; owned by the backend */
struct stream; /* work in order; streams meet only through events */
struct event;
struct program; /* a recorded pass */
struct weight;  /* packed matrices in the backend's own layout */

enum {
    PAGE_TOKENS = 64,    /* tokens of one page; delta-net grid, restore points and tiles rely on it */
    BLOCK_ROWS_MAX = 16, /* rows of a verify block */
    SPAN_TOKENS = 1024,  /* attention runs in spans at absolute multiples of this, merged in order */
    SEQ_STOP_IDS_MAX = 64,
    SEQ_BIAS_MAX = 1024, /* logit_bias entries of one seq */
    LOGPROBS_MAX = 20,
};

/* Where results are rounded (docs/design.md lists the points op by op).
 * FAST: f32 storage; GEMM inputs and delta-net conv columns are bf16; fp32 accumulation.
 * BF16: the oracle of the CUDA backend: FAST's points plus the residual stream and every act buffer rounded to bf16.
 * REFERENCE: nothing is rounded below f32. BF16 and REFERENCE run plain C with double precision inside an op. */
enum numeric { NUMERIC_FAST, NUMERIC_BF16, NUMERIC_REFERENCE };

struct backend_options {
    enum numeric numeric; /* CUDA: ignored, it has one mode */
    int n_threads;        /* CPU workers; 0: one per physical core */
    const char *isa;      /* CPU: NULL picks by cpuid; "scalar", "avx2", "avx512bf16", "amx": -ENOTSUP if absent */
    uint64_t delay_seed;  /* test mode: non-zero delays every queued item at random, so that wrong fences show */
};

struct backend_caps {
    enum dtype act_dtype;
    enum dtype conv_dtype;      /* element type of conv columns in a state slot: f32 in REFERENCE, else bf16 */
    int open_rows, open_inputs; /* of the open chunk: see state_view; 0: states have every row in them */
    char kernel_path[32]; /* "cpu-avx2-fast", ...; part of the cache fingerprint: other bits come from another path */
    uint32_t weight_layout_id, page_image_id;
    int n_threads;
};

enum mem_kind { MEM_DEVICE, MEM_HOST }; /* MEM_HOST: pinned, mapped: both sides may use the address */

/* STREAM_COMPUTE and STREAM_AUX run programs; LOAD and STORE copy; NOTIFY only waits and signals. */
enum stream_kind { STREAM_COMPUTE, STREAM_AUX, STREAM_LOAD, STREAM_STORE, STREAM_NOTIFY, STREAM_KIND_N };

/* ---- weights ---------------------------------------------------------------------------------------------------- */

/* A row block of one matrix as it lies in a checkpoint (host memory, row major, rows `row_bytes` apart; a multiple of
 * the element size; rows of made-up weights may overlap). */
struct weight_part {
    const void *data;
    enum dtype dtype; /* F32, BF16, F16, or E4M3 with block scales */
    int n_rows;
    size_t row_bytes;
    const void *scale;      /* E4M3: [ceil(n_rows/128), ceil(n_cols/128)] multipliers, row major; else NULL */
    enum dtype scale_dtype; /* F32 or BF16 */
    int scale_cols;
};

enum weight_form {
    WEIGHT_ROWS,    /* parts are stacked: N = sum of n_rows */
    WEIGHT_GATE_UP, /* two parts per matrix, gate then up, of equal n_rows I; N = 2 I; interleaved as the backend likes */
};

struct weight_desc {
    enum weight_form form;
    int n_cols;                      /* K */
    int n_stack;                     /* 1, or the number of experts: equal shapes, each n_parts parts */
    int n_parts;                     /* per matrix */
    const struct weight_part *parts; /* [n_stack * n_parts] */
};

/* ---- batches, sequences ----------------------------------------------------------------------------------------- */

/* One ragged batch: n_segs segs (one per seq), each a run of rows at consecutive positions. int32, device memory. */
struct batch {
    int n_segs_max, n_rows_max, n_outs_max;
    int32_t *n_segs, *n_rows, *n_outs; /* [1] each */
    int32_t *seg_slot;                 /* [n_segs_max] the seq's place in ctl and in the tables */
    int32_t *seg_row;                  /* [n_segs_max + 1] first row; seg_row[n_segs] = n_rows */
    int32_t *seg_pos;                  /* [n_segs_max] position of the first row */
    int32_t *seg_flags;                /* [n_segs_max] SEG_* */
    int32_t *row_token;                /* [n_rows_max] */
    int32_t *row_seg;                  /* [n_rows_max] */
    int32_t *out_row;                  /* [n_outs_max] rows whose logits are wanted, ascending */
};
enum {
    SEG_PREFILL = 1, /* rows are given tokens: all of them are committed; else rows are [anchor, drafts...] */
    SEG_SAMPLE = 2,  /* prefill that ends a prompt: its last row is an output and yields the first token */
};

enum finish { FINISH_NONE, FINISH_STOP, FINISH_LENGTH, FINISH_CONTEXT, FINISH_CANCELLED, FINISH_NONFINITE };

/* temperature 0 is greedy. Neutral values: top_k 0, top_p 1, min_p 0, repetition 1, presence 0, frequency 0. */
struct sample_params {
    float temperature, top_p, min_p, repetition, presence, frequency;
    int32_t top_k;
    int32_t n_logprobs; /* -1: none; 0..LOGPROBS_MAX: the chosen token's, and that many best */
    uint64_t seed;
};

/* Everything the device keeps of one running seq. The host writes it at admission and edits fields by stream-ordered
 * copies; ops read it; only `prepare` advances it. */
struct seq_ctl {
    int32_t len;          /* N: committed positions: K/V and state hold exactly tokens [0, N) */
    int32_t anchor;       /* t[N], chosen and shown, not yet fed; -1 while the prompt is prefilled */
    int32_t n_generated;  /* tokens shown so far */
    int32_t max_tokens;   /* end with FINISH_LENGTH when n_generated reaches it */
    int32_t context_max;  /* end with FINISH_CONTEXT when N + 1 tokens exist and N + 1 == context_max */
    int32_t done;         /* enum finish; a done seq has no rows in any batch built on the device */
    int32_t cancel;       /* host: finish with FINISH_CANCELLED at the next prepare; tokens of that step are dropped */
    int32_t speculate;    /* 0: blocks of one row */
    int32_t may_snapshot; /* host grants one rolling restore point; prepare takes the grant back when it uses it */
    int32_t draft_valid_from; /* draft context below this position is not there and is masked */
    int32_t has_counts;       /* token counts and bias tables of this slot are in use */
    int32_t n_bias;
    int32_t n_stop_ids;
    int32_t stop_ids[SEQ_STOP_IDS_MAX];
    struct sample_params sample;
};

/* Per-slot tables of the penalties. counts[slot][id]: (times generated) << 1 | (occurs in the prompt). */
struct seq_tables {
    int vocab;
    int32_t *counts;  /* [n_slots, vocab]; NULL if penalties are never used */
    int32_t *bias_id; /* [n_slots, SEQ_BIAS_MAX] */
    float *bias;      /* [n_slots, SEQ_BIAS_MAX] */
};

/* log-softmax of the raw logits of one output row */
struct logprob_row {
    float chosen;
    int32_t n_top;
    int32_t top_id[LOGPROBS_MAX]; /* by falling logit, ties by lower id */
    float top[LOGPROBS_MAX];
};

/* What one seg of a step produced, in MEM_HOST memory. */
struct step_out {
    int32_t slot;
    int32_t n_tokens; /* new tokens shown; 0 for a prefill chunk that does not end the prompt */
    int32_t tokens[BLOCK_ROWS_MAX];
    int32_t n_proposed, n_accepted; /* drafts verified; drafts that stand and were shown */
    int32_t pos;                    /* position of the seg's first row */
    int32_t anchor_before;          /* token of the first row */
    int32_t drafts[BLOCK_ROWS_MAX - 1];
    int32_t len, anchor, done;                   /* seq_ctl after the step */
    int32_t snapshot_len;                        /* b of the restore point written to the rolling slot, or 0 */
    struct logprob_row logprobs[BLOCK_ROWS_MAX]; /* of tokens[i]; filled if the seq asks for logprobs */
};
struct step_ring { /* MEM_HOST; entry k of step s: out[(s % n_steps_max) * n_segs_max + k] */
    int n_steps_max, n_segs_max;
    uint64_t *n_steps; /* steps published so far; release-stored after the entries */
    int32_t *n_segs;   /* [n_steps_max] */
    struct step_out *out;
};

/* ---- caches ----------------------------------------------------------------------------------------------------- */

/* Layers that share page geometry and retention (docs/design.md, "Page groups"). */
enum kv_group { KV_TARGET_FULL, KV_TARGET_STATE, KV_DRAFT_FULL, KV_DRAFT_SLIDING, KV_GROUP_N };

/* K/V pages of one group. A page holds PAGE_TOKENS consecutive tokens of every layer of the group, page_bytes long,
 * in the backend's page image: one segment of kv_layer_bytes() after the other, layer by layer (CPU: [layer][K, V]
 * [kv head][token][head_dim], plain rows). Page 0 is the null page: allocated, zeroed, never written, harmless to read.
 *
 * A page that is not on the device has the table entry ~i: before an op reads it, its segment of the op's layer is copied
 * to place i of the ring (docs/design.md, "Contexts larger than the device"). Nothing writes such a page. */
struct kv_view {
    enum dtype dtype;
    int n_layers, n_kv_heads, head_dim;
    void *arena;
    void *ring;           /* segments of one layer, kv_layer_bytes() each; NULL: all pages are on the device */
    size_t page_bytes;    /* kv_page_bytes() */
    const int32_t *table; /* [n_slots, n_pages_max] page numbers, or ~ of places in the ring */
    int n_pages_max;
    const float *k_scale; /* [n_layers] stored = k / scale, read back stored * scale; by every writer and reader */
    const float *v_scale; /* [n_layers] */
};
static inline size_t kv_page_bytes(enum dtype dtype, int n_layers, int n_kv_heads, int head_dim) {
    return (size_t)n_layers * 2 * (size_t)n_kv_heads * PAGE_TOKENS * (size_t)head_dim * dtype_bytes(dtype);
}
static inline size_t kv_layer_bytes(const struct kv_view *kv) {
    return kv->page_bytes / (size_t)kv->n_layers;
}

/* Delta-net states: slot = per layer [S: n_v_heads x head_dim_v x head_dim_k f32, k contiguous] then
 * [conv columns: 3 x conv_dim of conv_dtype, oldest first], layer after layer. S after exactly `len` tokens; or, with
 * backend_caps.open_rows, at the last multiple of PAGE_TOKENS, and of the rows since then, the open chunk, each seq keeps
 * what their part in S follows from. Who puts a state into a live slot does so at a multiple of PAGE_TOKENS; the open chunk
 * of the seq has no rows then, whatever lies there. */
struct state_view {
    int n_layers, n_k_heads, n_v_heads, head_dim_k, head_dim_v, conv_taps;
    void *arena;
    size_t slot_bytes;      /* state_slot_bytes() */
    const int32_t *live;    /* [n_slots] state slot in which the seq lives */
    const int32_t *rolling; /* [n_slots] its rolling restore slot */
    void *open;             /* [n_slots] open chunks, open_bytes each, in the backend's own order */
    size_t open_bytes;      /* state_open_bytes(); 0: there are none */
};
static inline int state_conv_dim(const struct state_view *s) {
    return 2 * s->n_k_heads * s->head_dim_k + s->n_v_heads * s->head_dim_v;
}
static inline size_t state_layer_bytes(const struct state_view *s, enum dtype conv_dtype) {
    return align_up((size_t)s->n_v_heads * (size_t)s->head_dim_v * (size_t)s->head_dim_k * 4 +
                        (size_t)(s->conv_taps - 1) * (size_t)state_conv_dim(s) * dtype_bytes(conv_dtype),
                    64);
}
static inline size_t state_slot_bytes(const struct state_view *s, enum dtype conv_dtype) {
    return (size_t)s->n_layers * state_layer_bytes(s, conv_dtype);
}
/* Per layer: rows after the convolution with decay and beta, and inputs of the convolution. */
static inline size_t state_open_bytes(const struct state_view *s, enum dtype conv_dtype, int open_rows,
                                      int open_inputs) {
    return (size_t)s->n_layers *
           align_up((size_t)(open_rows + open_inputs) * (size_t)state_conv_dim(s) * dtype_bytes(conv_dtype) +
                        (size_t)open_rows * 2 * (size_t)s->n_v_heads * sizeof(float),
                    64);
}

/* ---- op arguments ----------------------------------------------------------------------------------------------- */

/* x[row] = embedding[row_token[row]]; ids outside [0, N) read row 0. */
struct embed_args {
    const struct batch *batch;
    const struct weight *table; /* WEIGHT_ROWS [vocab, hidden] */
    void *x;                    /* act [n_rows, hidden] */
};

/* y = epilogue(W . prologue(x)) for one or two weights that share the prologue. Prologue: RMS norm over all K columns,
 * x * rsqrt(mean(x^2) + eps) * norm (norm holds the effective factor: 1+w is folded at load), if norm is given. */
enum linear_epilogue {
    LINEAR_STORE,     /* act */
    LINEAR_STORE_F32, /* f32, never rounded */
    LINEAR_ADD,       /* act residual stream: y += result */
    LINEAR_ADD_F32,   /* f32 accumulator: y += result */
    LINEAR_SWIGLU,    /* WEIGHT_GATE_UP: act y[n_rows, I] = silu(gate) * up */
};
struct linear_out {
    const struct weight *weight; /* [N, K] */
    const float *bias;           /* f32 [N] or NULL */
    enum linear_epilogue epilogue;
    void *y;
    int y_stride; /* elements */
};
struct linear_args {
    const struct batch *batch;
    const void *x; /* act, or f32 if x_is_f32; [n_rows, K], rows x_stride elements apart */
    int x_stride;
    bool x_is_f32;
    const float *norm; /* f32 [K] or NULL */
    float eps;
    int n_outs; /* 1 or 2 */
    struct linear_out out[2];
    bool aux; /* may run beside the ops that follow, up to program_join; x is then kept by the backend: it may change */
};

/* Gated delta net of one layer: causal conv + SiLU, q/k l2 norm, gates, recurrence, gated norm (qwen3_5 spec 3.4).
 * FROZEN (at most BLOCK_ROWS_MAX rows a seg) changes nothing of the seq: what its rows leave for commit lies in the record,
 * or behind the rows of the open chunk. ADVANCE (prefill) also writes the state back, and the open chunk. */
enum gdn_mode { GDN_ADVANCE, GDN_FROZEN };
enum gate_act { GATE_SILU, GATE_SIGMOID };
struct gdn_record { /* of a FROZEN pass, all layers; what commit replays. Not used by a backend with open chunks */
    void *m;        /* conv_dtype [n_layers, n_rows_max, conv_dim] raw conv inputs */
    float *kv; /* f32 [n_layers, n_rows_max, n_k_heads * Dk + n_v_heads * Dv] k before its norm, v, after conv + SiLU */
    float *g_beta; /* f32 [n_layers, n_rows_max, 2 * n_v_heads] g then beta, as used */
};
struct gdn_args {
    const struct batch *batch;
    const struct state_view *state;
    int layer; /* among the delta-net layers */
    enum gdn_mode mode;
    const void *mz; /* act [n_rows, mz_stride]: conv_dim inputs (q heads, k heads, v heads), then z [Hv * Dv] */
    int mz_stride;
    const float *ba;      /* f32 [n_rows, 2 * Hv] b then a */
    const float *conv;    /* f32 [conv_dim, taps] the last tap multiplies the current token */
    const float *neg_a;   /* f32 [Hv] -exp(A_log) */
    const float *dt_bias; /* f32 [Hv] */
    const float *norm;    /* f32 [Dv] plain w */
    float eps;
    enum gate_act gate;
    const struct gdn_record *record; /* FROZEN */
    void *out;                       /* act [n_rows, Hv * Dv] */
};
/* S and conv of every layer := after the first seg_commit[seg] rows of the FROZEN pass, by the same step function;
 * after seg_snapshot[seg] rows (if > 0), at a multiple of PAGE_TOKENS, also into the rolling slot. Segs with commit 0 keep
 * their state. */
struct gdn_commit_args {
    const struct batch *batch;
    const struct state_view *state;
    const struct gdn_record *record;
    const int32_t *seg_commit, *seg_snapshot; /* [n_segs_max] */
};

/* Head split, optional bias, q/k RMS norm per head, RoPE (half-split pairs (i, i + rotary/2) of the first rotary_dim
 * dims; angle = f32 product of position and inv_freq[i]), and the K/V write.
 * qkv row: q heads (each head_dim, or head_dim query + head_dim gate if has_gate), k heads, v heads.
 * K/V go to pages (kv != NULL) at the row's position, or to block_k/block_v. */
struct rope_table {
    const float *inv_freq; /* f32 [rotary_dim / 2] */
    int rotary_dim;
};
struct qk_args {
    const struct batch *batch;
    const void *qkv; /* act [n_rows, qkv_stride] */
    int qkv_stride;
    int n_heads, n_kv_heads, head_dim;
    bool has_gate;
    const float *q_norm, *k_norm; /* f32 [head_dim] effective factors */
    float eps;
    struct rope_table rope;
    void *q; /* act [n_rows, n_heads * head_dim] */
    const struct kv_view *kv;
    int layer;               /* within the group */
    void *block_k, *block_v; /* act [n_rows, n_kv_heads * head_dim] */
};

/* Paged GQA attention with softmax scale head_dim^-0.5; head h reads kv head h / (n_heads / n_kv_heads).
 * Without block_k: keys are the pages' positions <= the row's position. With block_k (draft): keys are pages' positions
 * p with valid_from <= p < seg_pos, then the seg's own block rows i: all, or i <= j if block_causal.
 * window W > 0: only keys with p >= position - (W - 1). Output: softmax(..)V, times sigmoid(gate) if gate is given.
 * A row with no visible key yields zeros.
 *
 * With spans the op does a piece: the keys of spans [begin, end) of SPAN_TOKENS, block rows being behind all of them. It may
 * then be run several times, over [0, a), [a, b), ... [z, ATTN_SPANS_END), while no other op of its program runs: what the
 * spans so far have yielded (max, sum and weighted values of each row and head, fp32 or better) is kept in between and merged
 * in order, so the result has the bits of one run over [0, ATTN_SPANS_END). Only the last run writes `out`. */
enum { ATTN_SPANS_END = INT32_MAX };
struct attn_spans {
    int32_t begin, end;
};
struct attn_args {
    const struct batch *batch;
    const void *q; /* act [n_rows, n_heads * head_dim] after qk */
    int n_heads, n_kv_heads, head_dim;
    const void *gate; /* act: gate of head h at gate + row * gate_stride + h * gate_head_stride; or NULL */
    int gate_stride, gate_head_stride;
    const struct kv_view *kv;
    int layer;
    const void *block_k, *block_v;
    bool block_causal;
    int window;
    const struct seq_ctl *ctl;      /* for draft_valid_from; NULL: 0 */
    const struct attn_spans *spans; /* [1] device memory; NULL: all */
    void *out;                      /* act [n_rows, n_heads * head_dim] */
};

/* x += sum over top_k of w_e * down_e(swiglu_e(h)) + sigmoid(h . shared_gate) * shared(h), h = rmsnorm(x). */
struct moe_args {
    const struct batch *batch;
    void *x; /* act [n_rows, hidden] residual stream, in and out */
    int hidden, n_experts, top_k, width, shared_width;
    const float *norm;
    float eps;
    const struct weight *router;  /* WEIGHT_ROWS [n_experts + 1, hidden]: the last row is the shared expert's gate */
    const struct weight *gate_up; /* WEIGHT_GATE_UP, n_stack = n_experts */
    const struct weight *down;    /* WEIGHT_ROWS, n_stack = n_experts */
    const struct weight *shared_gate_up, *shared_down;
    const int32_t *forced; /* [n_rows_max, top_k] expert ids to use instead of the router's choice, or NULL (tests) */
    int32_t *routing;      /* [n_rows_max, top_k] ids chosen by falling probability, ties by lower id; or NULL */
};

/* Final norm, lm_head on the rows of batch->out_row, and the choice of a token. */
enum head_mode {
    HEAD_LOGITS, /* only logits */
    HEAD_ARGMAX, /* chosen = argmax, ties to the lowest id (drafts) */
    HEAD_SELECT, /* chosen by the seq's sample_params, penalties and bias, keyed by (seed, position of the new token, purpose) */
};
struct head_args {
    const struct batch *batch;
    const void *x; /* act [n_rows, hidden] */
    int hidden;
    const float *norm;
    float eps;
    const struct weight *lm_head; /* WEIGHT_ROWS [vocab, hidden] */
    int vocab, n_valid;           /* ids >= n_valid are padding rows and never chosen */
    enum head_mode mode;
    float *logits;   /* f32 [n_outs_max, vocab] raw */
    int32_t *chosen; /* [n_outs_max]; -1 if a logit of a valid id is not finite */
    const struct seq_ctl *ctl;
    const struct seq_tables *tables;
    struct logprob_row *logprobs; /* [n_outs_max] or NULL */
};

/* Builds the batches of a cycle from seq_ctl. draft_rows: for every listed seq that is not done, speculates and has
 * room for two rows or more: all `block` rows [anchor, mask, mask, ...] at position len, outputs rows 1.. .
 * verify_rows: for every listed seq that is not done: min(block, max_tokens - n_generated, context_max - 1 - len) rows
 * [anchor, drafts] (one row if it did not draft), every row an output. It is never less than one row, so that a seq
 * whose limits the host lowers while it runs still meets prepare, which ends it.
 * Listed seqs have an anchor and are listed once; the two ops get the same list. `cancel` changes no row here. */
struct rows_args {
    const int32_t *n_seqs, *seq_slot; /* [1], [n_seqs_max] the plan's list */
    int n_seqs_max;
    int block; /* B, 1..BLOCK_ROWS_MAX */
    int32_t mask_id;
    const struct seq_ctl *ctl;
    struct batch *draft;      /* draft_rows writes it, verify_rows reads it; NULL without a drafter */
    const int32_t *draft_ids; /* verify_rows: chosen of the draft head, in draft->out_row order */
    struct batch *verify;     /* verify_rows writes it */
};

/* Acceptance and bookkeeping, the only code that decides it. Per seg: longest prefix of drafts equal to the target's own
 * choices, plus the target's next token; cut after the first token that is a stop id, reaches max_tokens or fills the
 * context (in this order of precedence at one token); seg_commit = tokens shown (prefill: all rows); counts, len, anchor,
 * n_generated, done advance. seg_snapshot = rows up to the multiple of PAGE_TOKENS in (len_before, len_after] if granted.
 *   limits    a seq that has no room before the step (max_tokens 0, a prompt that fills the context) shows nothing and
 *             ends with FINISH_LENGTH or FINISH_CONTEXT
 *   -1        an accepted row without a choice ends the seq with FINISH_NONFINITE; tokens of rows before it stand, and
 *             no restore point is taken; a -1 beyond the first rejected draft means nothing
 *   cancel    comes first: no token, and a block commits nothing. A seq that is done keeps its reason
 *   prefill   commits its rows always, also of a seq that is cancelled or done: its pass has moved the state already,
 *             and len says what the state holds. No restore point: a chunk ends where the host wants one, who copies
 *             the live state. Without SEG_SAMPLE there is no token; the anchor stays
 *   counts    the host writes the prompt bits before the first SEG_SAMPLE or verify pass, prepare adds what is shown
 *   n_proposed = rows - 1 of a block, n_accepted = tokens shown that were drafts; both 0 if it is cancelled or done
 * Every seg must start at its seq's len, and a seq has one seg. One step is published per run, also if the batch is
 * empty, so that the host can tell steps by counting. Of step_out only the entries that its counts name are written. */
struct prepare_args {
    const struct batch *batch;
    const int32_t *chosen; /* [n_outs_max] of HEAD_SELECT */
    const struct logprob_row *logprobs;
    struct seq_ctl *ctl;
    const struct seq_tables *tables;
    int32_t *seg_commit, *seg_snapshot; /* [n_segs_max] */
    const struct step_ring *ring;
};

/* Draft context: bias, k norm, RoPE and scatter of the stacked projections of all draft layers, rows j < seg_commit only
 * (all rows of SEG_PREFILL segs). */
struct draft_kv_layer {
    const struct kv_view *kv; /* the layer's group */
    int layer;                /* within the group */
    const float *k_norm;      /* f32 [head_dim] */
};
struct draft_kv_args {
    const struct batch *batch;
    const float *kv_rows; /* f32 [n_rows, n_layers * 2 * n_kv_heads * head_dim]: K_0 V_0 K_1 V_1 ..., bias included */
    int n_layers, n_kv_heads, head_dim;
    float eps;
    struct rope_table rope;
    const int32_t *seg_commit;
    const struct draft_kv_layer *layers; /* [n_layers] host memory, copied while recording */
};

/* dst rows := src rows of the batch, f32 out (hidden states for the probe). */
struct store_rows_args {
    const struct batch *batch;
    const void *x; /* act [n_rows, width] */
    int width;
    float *dst; /* f32 [n_rows_max, width] */
};

/* ---- the table --------------------------------------------------------------------------------------------------- */

struct backend {
    const char *name;
    int (*open)(const struct backend_options *options, struct device **ret_device);
    void (*close)(struct device *device); /* after all streams are closed and all memory is freed */
    const struct backend_caps *(*caps)(const struct device *device);
    int (*status)(const struct device *device); /* 0, or -EIO after a sticky device error */

    int (*mem_alloc)(struct device *device, enum mem_kind kind, size_t bytes,
                     void **ret_ptr); /* zeroed, 64-byte aligned or better */
    void (*mem_free)(struct device *device, enum mem_kind kind, void *ptr, size_t bytes);

    /* What lies there is lost, and the system has the memory behind it until it is written again. ptr and bytes: whole pages
     * of 4 KiB inside what mem_alloc gave. -ENOTSUP: this memory cannot be given back in part. */
    int (*mem_discard)(struct device *device, enum mem_kind kind, void *ptr, size_t bytes);

    int (*weight_pack)(struct device *device, const struct weight_desc *desc,
                       struct weight **ret_weight); /* synchronous: load time only */
    void (*weight_free)(struct device *device, struct weight *weight);
    size_t (*weight_bytes)(const struct weight *weight);

    int (*stream_open)(struct device *device, enum stream_kind kind, struct stream **ret_stream);
    void (*stream_close)(struct stream *stream); /* after its work is done */
    int (*event_new)(struct device *device, struct event **ret_event);
    void (*event_free)(struct event *event);
    int (*event_record)(struct stream *stream, struct event *event);
    int (*event_wait)(struct stream *stream,
                      struct event *event); /* for the latest record made before this call; none: no wait */
    int (*event_wait_counted)(
        struct stream *stream, struct event *event,
        uint64_t *n_late); /* the same; adds 1, atomically, if the stream comes to it too early and
                                                    has to wait. A backend that cannot tell adds nothing */
    int (*copy)(struct stream *stream, void *dst, const void *src,
                size_t bytes);                         /* any of device and MEM_HOST memory */
    int (*notify)(struct stream *stream, int eventfd); /* adds 1 to the eventfd once all work before it is done */

    int (*program_begin)(struct device *device, struct program **ret_program);
    int (*program_cut)(struct program *program);  /* what follows is the next part */
    int (*program_join)(struct program *program); /* main chain waits for all aux ops before it */
    int (*program_end)(struct program *program);  /* sizes and allocates its scratch */
    void (*program_free)(struct program *program);
    /* All parts in order. Runs of a device's programs must not overlap: they may share scratch. */
    int (*program_run)(struct stream *stream, struct program *program);
    int (*program_run_part)(struct stream *stream, struct program *program,
                            int part); /* the ops between two cuts; part 0 is what comes before the first */

    int (*embed)(struct program *program, const struct embed_args *args);
    int (*linear)(struct program *program, const struct linear_args *args);
    int (*gdn)(struct program *program, const struct gdn_args *args);
    int (*gdn_commit)(struct program *program, const struct gdn_commit_args *args);
    int (*qk)(struct program *program, const struct qk_args *args);
    int (*attn)(struct program *program, const struct attn_args *args);
    int (*moe)(struct program *program, const struct moe_args *args);
    int (*head)(struct program *program, const struct head_args *args);
    int (*draft_rows)(struct program *program, const struct rows_args *args);
    int (*verify_rows)(struct program *program, const struct rows_args *args);
    int (*prepare)(struct program *program, const struct prepare_args *args);
    int (*draft_kv)(struct program *program, const struct draft_kv_args *args);
    int (*store_rows)(struct program *program, const struct store_rows_args *args);
};

/* "cpu" or "cuda"; NULL for any other name. A backend that is not built in has an open() that answers -ENODEV. */
const struct backend *backend_find(const char *name);

/* Blocks the caller until all work enqueued on the stream so far is done. For tools, tests and start-up; never on a step path. */
int backend_stream_wait(const struct backend *backend, struct stream *stream);
