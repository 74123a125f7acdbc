/* probe: a loaded pair with room for a few seqs, and what spillway-probe does with it. Runs blocking, step by step. */
#pragma once
#include <stdio.h>

#include "../space.h"

enum { PROBE_SPLITS_MAX = 4096, PROBE_ANCHORS_MAX = 256, PROBE_CHUNK_ROWS = 512, PROBE_SLOTS_MAX = 64 };

struct ids {
    int *id; /* malloc */
    int n;
};

struct probe_options {
    const char *model, *draft; /* folders */
    const char *backend, *isa;
    enum numeric numeric;
    enum dtype kv_dtype, draft_dtype;
    enum draft_causal draft_causal;
    int block_size, n_threads;
    bool dummy;
    int n_splits, splits[PROBE_SPLITS_MAX];
    int verify_rows; /* 0: everything by prefill; K: rows after the first chunk by the verify path, K at a time */
    const char *logits_path, *hidden_path, *routing_path, *draft_logits_path;
    int n_anchors, anchors[PROBE_ANCHORS_MAX];
    int n_generate;
    bool ignore_eos;
    int n_parallel; /* seqs of a batch in one pass */
};

struct probe {
    const struct probe_options *options;
    const struct backend *backend;
    struct device *device;
    struct stream *stream;
    struct model *model;
    const struct model_info *info;
    struct space space;
};

/* n_valid: as in model_options; n_input_max: ids of the longest input. Errors: report filled, negative errno. */
int probe_open(struct probe *probe, const struct probe_options *options, int n_valid, int n_input_max,
               struct report *report);
void probe_close(struct probe *probe);

/* Rows of the longest chunk in which probe_evaluate runs n_ids: a split may ask for more than there are. */
int probe_chunk_rows_max(const struct probe_options *options, int n_ids);
/* Runs the ids once and writes the files the options ask for. */
int probe_evaluate(struct probe *probe, const struct ids *ids, struct report *report);

/* One generation of a batch, its steps kept. */
struct generation_step {
    int position, anchor, n_drafts, drafts[BLOCK_ROWS_MAX], accepted;
};
struct generation {
    struct ids out;
    struct generation_step *steps; /* malloc */
    int n_steps;
    double decode_s; /* of the whole group it ran in */
};
/* Generates for n prompts, n_parallel of them at a time in one ragged batch. ret: [n], freed by generation_free. */
int probe_generate(struct probe *probe, const struct ids *prompts, int n, struct generation *ret,
                   struct report *report);
void generation_free(struct generation *generation);

/* Fills and runs one pass of given rows for one seq, blocking. */
int probe_feed(struct probe *probe, struct model_pass *pass, struct model_batch *input, int slot, const int *ids,
               int pos, int n_rows, int flags, bool all_outs);
