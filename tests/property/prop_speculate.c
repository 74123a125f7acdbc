/* Speculation loses nothing: with the ops of a cycle (draft_rows, verify_rows, head, prepare) over a toy target, a seq
 * shows the same tokens, logprobs and end with any drafter, in any company, as alone and without one. Greedy and
 * sampled, with penalties and bias. */
#include "../fake/fake_batch.h"
#include "../fake/cpu_program.h"
#include "../fake/fake_weight.h"
#include "cpu/sample.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define CHECK(claim)                                                                                                   \
    do {                                                                                                               \
        if (!(claim)) {                                                                                                \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #claim);                                        \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

enum { SLOTS = 4, HIDDEN = 6, VOCAB = 320, N_VALID = 311, TOKENS_MAX = 200, MASK = 310 };

struct text {
    int32_t tokens[TOKENS_MAX];
    int n_prompt, n_tokens;
    float logprob[TOKENS_MAX];
    int32_t second[TOKENS_MAX]; /* second best of the raw row */
};

struct world {
    struct fake_device fake;
    struct weight lm_head;
    float w[VOCAB * HIDDEN], norm[HIDDEN], x[FAKE_ROWS_MAX * HIDDEN], logits[SLOTS * BLOCK_ROWS_MAX * VOCAB];
    struct seq_ctl ctl[SLOTS];
    int32_t counts[SLOTS * VOCAB], bias_id[SLOTS * SEQ_BIAS_MAX];
    float bias[SLOTS * SEQ_BIAS_MAX];
    struct seq_tables tables;
    struct text text[SLOTS];
    int32_t n_seqs, seq_slot[SLOTS];
    struct fake_batch draft, verify;
    int32_t draft_ids[FAKE_ROWS_MAX], chosen[FAKE_ROWS_MAX], seg_commit[SLOTS], seg_snapshot[SLOTS];
    struct logprob_row logprobs[FAKE_ROWS_MAX];
    uint64_t n_steps;
    int32_t ring_n_segs[1];
    struct step_out out[SLOTS];
    int n_accepted;
};

static double uniform(uint64_t *state) {
    return sample_uniform(0x5eed, (*state)++, SAMPLE_TARGET);
}
static int below(uint64_t *state, int n) {
    return (int)(uniform(state) * n);
}

static void init(struct world *w, int n_threads) {
    uint64_t fixed = 1;

    memset(w, 0, sizeof *w);
    fake_device_init(&w->fake, NUMERIC_REFERENCE, CPU_ISA_SCALAR, n_threads);
    w->fake.backwards = true;
    for (int i = 0; i < VOCAB * HIDDEN; i++)
        w->w[i] = (float)(3 * uniform(&fixed) - 1.5);
    for (int i = 0; i < HIDDEN; i++)
        w->norm[i] = 1;
    w->lm_head = (struct weight){VOCAB, HIDDEN, w->w};
    w->tables = (struct seq_tables){VOCAB, w->counts, w->bias_id, w->bias};
    fake_batch_init(&w->draft, SLOTS, SLOTS * BLOCK_ROWS_MAX, SLOTS * BLOCK_ROWS_MAX);
    fake_batch_init(&w->verify, SLOTS, SLOTS * BLOCK_ROWS_MAX, SLOTS * BLOCK_ROWS_MAX);
}

/* A seq after its prefill, drawn from `random`. */
static void admit(struct world *w, int slot, uint64_t random) {
    struct seq_ctl *ctl = &w->ctl[slot];
    struct text *text = &w->text[slot];
    struct sample_params *params = &ctl->sample;

    text->n_prompt = 2 + below(&random, 20);
    for (int i = 0; i < text->n_prompt; i++) {
        text->tokens[i] = below(&random, N_VALID);
        w->counts[slot * VOCAB + text->tokens[i]] |= 1;
    }
    text->n_tokens = text->n_prompt;
    ctl->len = text->n_prompt - 1;
    ctl->anchor = text->tokens[ctl->len];
    ctl->max_tokens = 1 + below(&random, 60);
    ctl->context_max = text->n_prompt + 10 + below(&random, 60);
    ctl->n_stop_ids = 1;
    ctl->stop_ids[0] = below(&random, N_VALID);
    ctl->has_counts = 1;
    ctl->n_bias = below(&random, 4);
    for (int i = 0; i < ctl->n_bias; i++) {
        w->bias_id[slot * SEQ_BIAS_MAX + i] = below(&random, N_VALID);
        w->bias[slot * SEQ_BIAS_MAX + i] = (float)(4 * uniform(&random) - 2);
    }
    *params = (struct sample_params){.temperature = below(&random, 3) == 0 ? 0 : (float)(0.3 + uniform(&random)),
                                     .top_p = below(&random, 2) ? 1 : 0.9f,
                                     .min_p = below(&random, 3) ? 0 : 0.05f,
                                     .repetition = below(&random, 2) ? 1 : 1.4f,
                                     .presence = below(&random, 2) ? 0 : 0.6f,
                                     .frequency = below(&random, 2) ? 0 : 0.8f,
                                     .top_k = below(&random, 2) ? 0 : 12,
                                     .n_logprobs = 2,
                                     .seed = (uint64_t)below(&random, 1000000)};
}

/* The hidden row after n tokens: a function of all of them, as in a network. */
static void hidden_row(const int32_t *tokens, int n, float *x) {
    uint64_t hash = 17;

    for (int i = 0; i < n; i++) {
        hash = (hash ^ (uint64_t)(uint32_t)tokens[i]) * 0x9e3779b97f4a7c15u;
        hash ^= hash >> 29;
    }
    for (int i = 0; i < HIDDEN; i++)
        x[i] = (float)(sample_uniform(hash, (uint64_t)i, SAMPLE_TARGET) - 0.5);
}

/* A drafter that is right in five of six places: it knows what the seq shows without one. */
static void propose(struct world *w, const struct text *plain, uint64_t *random, int block) {
    for (int seg = 0; seg < w->draft.n[0]; seg++) {
        int slot = w->draft.seg_slot[seg], n = w->text[slot].n_tokens;

        for (int d = 0; d < block - 1; d++) {
            int32_t right = n + d < plain[slot].n_tokens ? plain[slot].tokens[n + d] : 0;

            w->draft_ids[seg * (block - 1) + d] = below(random, 6) ? right : below(random, N_VALID);
        }
    }
}

static void cycle(struct world *w, int block, const struct text *plain, uint64_t *random) {
    struct rows_args rows = {&w->n_seqs, w->seq_slot,     SLOTS,        block,           MASK,
                             w->ctl,     &w->draft.batch, w->draft_ids, &w->verify.batch};
    struct step_ring ring = {1, SLOTS, &w->n_steps, w->ring_n_segs, w->out};
    struct head_args head = {.batch = &w->verify.batch,
                             .x = w->x,
                             .hidden = HIDDEN,
                             .norm = w->norm,
                             .eps = 1e-6f,
                             .lm_head = &w->lm_head,
                             .vocab = VOCAB,
                             .n_valid = N_VALID,
                             .mode = HEAD_SELECT,
                             .logits = w->logits,
                             .chosen = w->chosen,
                             .ctl = w->ctl,
                             .tables = &w->tables,
                             .logprobs = w->logprobs};
    struct prepare_args prepare = {&w->verify.batch, w->chosen,     w->logprobs,     w->ctl,
                                   &w->tables,       w->seg_commit, w->seg_snapshot, &ring};
    struct program *draft_pass = fake_program_new(&w->fake), *rows_pass = fake_program_new(&w->fake),
                   *verify_pass = fake_program_new(&w->fake);

    CHECK(cpu_draft_rows(draft_pass, &rows) == 0 && cpu_verify_rows(rows_pass, &rows) == 0);
    CHECK(cpu_head(verify_pass, &head) == 0 && cpu_prepare(verify_pass, &prepare) == 0);
    fake_program_run(draft_pass);
    if (plain)
        propose(w, plain, random, block);
    fake_program_run(rows_pass);
    for (int row = 0; row < w->verify.n[1]; row++) {
        int seg = w->verify.row_seg[row], n = w->verify.seg_pos[seg] + row - w->verify.seg_row[seg];
        struct text *text = &w->text[w->verify.seg_slot[seg]];

        text->tokens[n] = w->verify.row_token[row]; /* drafts lie behind what was shown until they are overwritten */
        hidden_row(text->tokens, n + 1, w->x + row * HIDDEN);
    }
    fake_program_run(verify_pass);
    for (int seg = 0; seg < w->verify.n[0]; seg++) {
        const struct step_out *out = &w->out[seg];
        struct text *text = &w->text[out->slot];

        for (int i = 0; i < out->n_tokens; i++) {
            CHECK(out->logprobs[i].n_top == 2);
            text->logprob[text->n_tokens] = out->logprobs[i].chosen;
            text->second[text->n_tokens] = out->logprobs[i].top_id[1];
            text->tokens[text->n_tokens++] = out->tokens[i];
        }
        w->n_accepted += out->n_accepted;
    }
    fake_program_free(draft_pass);
    fake_program_free(rows_pass);
    fake_program_free(verify_pass);
}

static void check_same_text(const struct text *a, const struct text *b) {
    CHECK(a->n_tokens == b->n_tokens);
    CHECK(memcmp(a->tokens, b->tokens, (size_t)a->n_tokens * sizeof *a->tokens) == 0);
    for (int i = a->n_prompt; i < a->n_tokens; i++)
        CHECK(a->logprob[i] == b->logprob[i] && a->second[i] == b->second[i]);
}

int main(int argc, char **argv) {
    uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 0) : (uint64_t)time(NULL), random = seed;
    static struct world alone, together;
    static struct text plain[SLOTS];
    int finish[SLOTS], n_tokens = 0, n_accepted = 0;

    printf("seed %llu\n", (unsigned long long)seed);
    fflush(stdout);
    for (int run = 0; run < 30; run++) {
        bool running = true;

        for (int slot = 0; slot < SLOTS; slot++) {
            init(&alone, 1);
            admit(&alone, slot, seed + (uint64_t)(1000 * (SLOTS * run + slot)));
            alone.n_seqs = 1;
            alone.seq_slot[0] = slot;
            while (alone.ctl[slot].done == FINISH_NONE)
                cycle(&alone, 1, NULL, NULL);
            plain[slot] = alone.text[slot];
            finish[slot] = alone.ctl[slot].done;
            CHECK(finish[slot] != FINISH_NONFINITE);
        }
        init(&together, 3);
        for (int slot = 0; slot < SLOTS; slot++) {
            admit(&together, slot, seed + (uint64_t)(1000 * (SLOTS * run + slot)));
            together.ctl[slot].speculate = 1;
        }
        while (running) {
            running = false;
            together.n_seqs = 0;
            for (int slot = 0; slot < SLOTS; slot++) {
                running |= together.ctl[slot].done == FINISH_NONE;
                if (below(&random, 3))
                    together.seq_slot[together.n_seqs++] = slot;
            }
            cycle(&together, 1 + below(&random, BLOCK_ROWS_MAX), plain, &random);
        }
        for (int slot = 0; slot < SLOTS; slot++) {
            check_same_text(&plain[slot], &together.text[slot]);
            CHECK(together.ctl[slot].done == finish[slot]);
            n_tokens += plain[slot].n_tokens - plain[slot].n_prompt;
        }
        n_accepted += together.n_accepted;
    }
    printf("%d tokens, %d of them drafted\n", n_tokens, n_accepted);
    CHECK(n_accepted > n_tokens / 3);
    return 0;
}
