/* model: a loaded pair (target, and drafter if given) as passes on one device. Owns weights, activation buffers and
 * recorded programs. Does not know where pages live: groups' arenas and tables come in as views, seqs as seq_ctl. */
#pragma once
#include "groups.h"
#include "streamer.h"
#include "weights.h"

struct model;
struct model_pass;

struct model_options {
    const char *target_folder;
    const char *draft_folder; /* NULL: no drafter */
    bool dummy;               /* random weights for the config.json files alone */
    enum draft_causal draft_causal;
    int block_size; /* rows of a block; 0: the drafter's own; at most that */
    enum dtype kv_dtype, draft_dtype;
    int n_valid; /* ids the tokenizer can spell: others are never chosen; 0: all */
    /* bucket maxima: buffers are sized once, before the first program is recorded */
    int n_slots, n_segs_max;
    int n_rows_max;  /* rows of a prefill pass */
    int n_outs_max;  /* logit rows of a prefill pass */
    int n_steps_max; /* steps in flight that a ring can hold */
};

/* Everything of running seqs in device memory that the passes read and write; the caller's. */
struct model_space {
    struct kv_view target_full, draft_full, draft_sliding; /* n_layers 0 where the group does not exist */
    struct state_view target_state;
    struct seq_ctl *ctl; /* [n_slots] */
    struct seq_tables tables;
    struct streamer *streamer; /* of target_full; NULL: its pages are on the device */
};

struct model_info {
    struct qwen_config target;
    struct draft_config draft; /* n_layers 0: no drafter */
    struct generation_config generation;
    int n_stop, stop[EOS_MAX]; /* ids that end an answer: generation_config.json's, else config.json's */
    int block_size;            /* 1 without a drafter */
    int n_valid;
    struct kv_geometry groups[KV_GROUP_N];                 /* page groups; target_state: see state */
    struct state_view state;                               /* shape, slot_bytes, open_bytes; no memory */
    size_t weight_bytes, draft_weight_bytes, buffer_bytes; /* packed on the device */
    int n_skipped;                                         /* tensors of the file left out by name */
    char warning[256];                                     /* e.g. a drafter without rope_theta; empty if none */
};

/* Everything of the info that follows from the config.json files alone; the counts of bytes that weights and buffers take
 * are 0. For who wants to plan before anything is loaded. */
int model_inspect(const struct model_options *options, const struct backend_caps *caps, struct model_info *ret_info,
                  struct report *report);

/* On failure nothing is kept and the report's line names file, object and reason. */
int model_open(const struct backend *backend, struct device *device, const struct model_options *options,
               struct model **ret_model, struct report *report);
void model_close(struct model *model); /* after all passes are freed */
const struct model_info *model_info(const struct model *model);

/* A batch in one piece of memory, so that one copy moves it. */
struct model_batch {
    struct batch view;
    void *mem;
    size_t bytes;
    enum mem_kind kind;
};
int model_batch_new(struct model *model, enum mem_kind kind, int n_segs_max, int n_rows_max, int n_outs_max,
                    struct model_batch *ret_batch);
void model_batch_free(struct model *model, struct model_batch *batch);

enum pass_kind {
    PASS_PREFILL, /* given rows; delta-net state advances in place */
    PASS_RERUN,   /* given rows, at most BLOCK_ROWS_MAX a seg, through the verify path; all are committed */
    PASS_CYCLE,   /* draft, verify, accept, commit of every listed seq */
    PASS_DRAFT,   /* a draft block alone, logits of all its rows (tools) */
};
struct model_pass_options {
    enum pass_kind kind;
    int n_segs_max, n_rows_max, n_outs_max; /* PASS_CYCLE: rows and outs follow from n_segs_max and the block */
    bool all_logits; /* outputs are raw logits of out_row; no token is chosen (PASS_PREFILL, PASS_RERUN) */
    bool has_gate;   /* its runs may wait before each full-attention layer */
    bool hidden;     /* also keeps hidden states */
    bool routing;    /* also keeps the experts chosen */
};

int model_pass_new(struct model *model, const struct model_space *space, const struct model_pass_options *options,
                   struct model_pass **ret_pass);
void model_pass_free(struct model_pass *pass);

/* Enqueues one run. Inputs must be MEM_HOST memory that stays as it is until the step is done. streamed: pages of its seqs
 * that are not on the device; NULL: none, as ever without a streamer. gate: of a pass that has one; NULL: it waits for
 * nothing.
 * Batch of PASS_PREFILL, PASS_RERUN and PASS_DRAFT: a model_batch of exactly the pass's maxima. */
int model_pass_run(struct model_pass *pass, struct stream *compute, const struct model_batch *input,
                   const struct streamed *streamed, const struct pass_gate *gate);
/* PASS_CYCLE: host_list = [n, slot of each seq...], n_segs_max + 1 entries of MEM_HOST memory. */
int model_pass_run_cycle(struct model_pass *pass, struct stream *compute, const int32_t *host_list,
                         const struct streamed *streamed);

/* Where results land: the ring (MEM_HOST) for tokens; device memory for the rest. */
const struct step_ring *model_ring(const struct model *model);
const float *model_pass_logits(const struct model_pass *pass);    /* f32 [n_outs_max, vocab] */
const float *model_pass_hidden(const struct model_pass *pass);    /* f32 [n_layers, n_rows_max, hidden] or NULL */
const int32_t *model_pass_routing(const struct model_pass *pass); /* [n_layers, n_rows_max, top_k] or NULL */
