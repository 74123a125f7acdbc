/* prepare beside an obvious model: a decoder without drafts that takes one token at a time and looks at every limit
 * after each. First every case of one block, then random runs of several seqs over many steps. */
#include "../fake/fake_batch.h"
#include "../fake/cpu_program.h"

#include <assert.h>
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

enum { SLOTS = 6, VOCAB = 640, RING_STEPS = 3, MASK = 639, TOKENS_MAX = 512 };

struct world {
    struct fake_device fake;
    struct seq_ctl ctl[SLOTS];
    int32_t counts[SLOTS * VOCAB];
    struct seq_tables tables;
    int32_t n_seqs, seq_slot[SLOTS];
    struct fake_batch draft, verify, prefill;
    int32_t draft_ids[FAKE_ROWS_MAX], chosen[FAKE_ROWS_MAX];
    struct logprob_row logprobs[FAKE_ROWS_MAX];
    int32_t seg_commit[SLOTS], seg_snapshot[SLOTS];
    uint64_t n_steps;
    int32_t ring_n_segs[RING_STEPS];
    struct step_out out[RING_STEPS * SLOTS];
    struct step_ring ring;
    struct program *draft_rows[BLOCK_ROWS_MAX + 1], *verify_rows[BLOCK_ROWS_MAX + 1], *prepare, *prepare_prefill;
};

static struct world *world_new(void) {
    struct world *w = calloc(1, sizeof *w);

    CHECK(w);
    fake_device_init(&w->fake, NUMERIC_REFERENCE, CPU_ISA_SCALAR, 1);
    w->tables = (struct seq_tables){.vocab = VOCAB, .counts = w->counts};
    fake_batch_init(&w->draft, SLOTS, SLOTS * BLOCK_ROWS_MAX, SLOTS * BLOCK_ROWS_MAX);
    fake_batch_init(&w->verify, SLOTS, SLOTS * BLOCK_ROWS_MAX, SLOTS * BLOCK_ROWS_MAX);
    fake_batch_init(&w->prefill, SLOTS, FAKE_ROWS_MAX, SLOTS);
    w->ring = (struct step_ring){RING_STEPS, SLOTS, &w->n_steps, w->ring_n_segs, w->out};
    for (int block = 1; block <= BLOCK_ROWS_MAX; block++) {
        struct rows_args args = {&w->n_seqs, w->seq_slot,     SLOTS,        block,           MASK,
                                 w->ctl,     &w->draft.batch, w->draft_ids, &w->verify.batch};

        w->draft_rows[block] = fake_program_new(&w->fake);
        w->verify_rows[block] = fake_program_new(&w->fake);
        CHECK(cpu_draft_rows(w->draft_rows[block], &args) == 0);
        CHECK(cpu_verify_rows(w->verify_rows[block], &args) == 0);
    }
    for (int i = 0; i < 2; i++) {
        struct prepare_args args = {.batch = i == 0 ? &w->verify.batch : &w->prefill.batch,
                                    .chosen = w->chosen,
                                    .logprobs = w->logprobs,
                                    .ctl = w->ctl,
                                    .tables = &w->tables,
                                    .seg_commit = w->seg_commit,
                                    .seg_snapshot = w->seg_snapshot,
                                    .ring = &w->ring};
        struct program **program = i == 0 ? &w->prepare : &w->prepare_prefill;

        *program = fake_program_new(&w->fake);
        CHECK(cpu_prepare(*program, &args) == 0);
    }
    for (int i = 0; i < FAKE_ROWS_MAX; i++) /* each output has its own, so that a mix-up shows */
        w->logprobs[i] = (struct logprob_row){.chosen = (float)-i, .n_top = 1, .top_id = {i}};
    return w;
}

static void world_free(struct world *w) {
    for (int block = 1; block <= BLOCK_ROWS_MAX; block++) {
        fake_program_free(w->draft_rows[block]);
        fake_program_free(w->verify_rows[block]);
    }
    fake_program_free(w->prepare);
    fake_program_free(w->prepare_prefill);
    free(w);
}

/* ---- the model --------------------------------------------------------------------------------------------------- */

/* One token at a time: what a decoder without drafts shows from here on, `text[i]` being what the target says after i
 * more tokens, -1 for a bad row. */
static int plain_decode(const struct seq_ctl *before, int n_exist, const int32_t *text, int n_text, int32_t *tokens,
                        int *ret_finish) {
    int n = 0;

    *ret_finish = FINISH_NONE;
    for (;;) {
        bool stops = false;

        for (int i = 0; n > 0 && i < before->n_stop_ids; i++)
            stops |= before->stop_ids[i] == tokens[n - 1];
        if (stops)
            *ret_finish = FINISH_STOP;
        else if (before->n_generated + n >= before->max_tokens)
            *ret_finish = FINISH_LENGTH;
        else if (n_exist + n >= before->context_max)
            *ret_finish = FINISH_CONTEXT;
        else if (n < n_text && text[n] < 0)
            *ret_finish = FINISH_NONFINITE;
        if (*ret_finish != FINISH_NONE || n == n_text)
            return n;
        tokens[n] = text[n];
        n++;
    }
}

struct expected {
    int n_tokens, n_accepted, finish;
    int32_t tokens[BLOCK_ROWS_MAX];
};

/* text[i]: what the target says if the first i drafts stand. */
static struct expected model_block(const struct seq_ctl *before, const int32_t *text, const int32_t *drafts,
                                   int n_rows) {
    struct expected e = {0};
    int32_t plain[BLOCK_ROWS_MAX + 1];
    int finish, n_plain = plain_decode(before, before->len + 1, text, n_rows, plain, &finish);

    if (before->cancel) {
        e.finish = FINISH_CANCELLED;
        return e;
    }
    while (e.n_tokens < n_plain) { /* a further row counts only if the draft before it was right */
        bool right = e.n_tokens < n_rows - 1 && drafts[e.n_tokens] == plain[e.n_tokens];

        e.tokens[e.n_tokens] = plain[e.n_tokens];
        e.n_tokens++;
        e.n_accepted += right;
        if (!right)
            break;
    }
    if (e.n_tokens == n_plain && (e.n_accepted == e.n_tokens || finish != FINISH_NONFINITE))
        e.finish = finish; /* a bad row is only met if everything before it was a right draft */
    return e;
}

/* ---- checks ------------------------------------------------------------------------------------------------------ */

static const struct step_out *published(const struct world *w, uint64_t step, int n_segs) {
    CHECK(w->n_steps == step + 1);
    CHECK(w->ring_n_segs[step % RING_STEPS] == n_segs);
    return &w->out[(step % RING_STEPS) * SLOTS];
}

/* Everything prepare did for one seg of the verify batch. `ctl` is seq_ctl before. Edits counts to what they must be. */
static void check_block(struct world *w, int seg, struct seq_ctl ctl, const struct expected *e, int32_t *counts,
                        const struct step_out *out) {
    int slot = w->verify.seg_slot[seg], first = w->verify.seg_row[seg], n_rows = w->verify.seg_row[seg + 1] - first;
    int len_before = ctl.len, snapshot_len = 0, n_proposed = e->finish == FINISH_CANCELLED ? 0 : n_rows - 1;

    CHECK(out->slot == slot && out->pos == len_before && out->anchor_before == ctl.anchor);
    CHECK(out->n_proposed == n_proposed && out->n_accepted == e->n_accepted && out->n_tokens == e->n_tokens);
    CHECK(memcmp(out->drafts, w->verify.row_token + first + 1, (size_t)n_proposed * sizeof(int32_t)) == 0);
    for (int i = 0; i < e->n_tokens; i++) {
        CHECK(out->tokens[i] == e->tokens[i]);
        if (ctl.sample.n_logprobs >= 0)
            CHECK(out->logprobs[i].top_id[0] == first + i && out->logprobs[i].chosen == (float)-(first + i));
        if (ctl.has_counts)
            counts[slot * VOCAB + e->tokens[i]] += 2;
        ctl.anchor = e->tokens[i];
        ctl.len++;
        ctl.n_generated++;
        if (ctl.len % PAGE_TOKENS == 0)
            snapshot_len = ctl.len;
    }
    ctl.done = e->finish;
    if (!ctl.may_snapshot || ctl.done == FINISH_NONFINITE)
        snapshot_len = 0;
    if (snapshot_len > 0)
        ctl.may_snapshot = 0;
    CHECK(memcmp(&w->ctl[slot], &ctl, sizeof ctl) == 0);
    CHECK(memcmp(counts + slot * VOCAB, w->counts + slot * VOCAB, VOCAB * sizeof *counts) == 0);
    CHECK(w->seg_commit[seg] == ctl.len - len_before);
    CHECK(w->seg_snapshot[seg] == (snapshot_len > 0 ? snapshot_len - len_before : 0));
    CHECK(out->snapshot_len == snapshot_len);
    CHECK(out->len == ctl.len && out->anchor == ctl.anchor && out->done == ctl.done);
}

static void check_batch_shape(const struct fake_batch *b) {
    int row = 0;

    CHECK(b->seg_row[0] == 0 && b->seg_row[b->n[0]] == b->n[1]);
    for (int seg = 0; seg < b->n[0]; seg++) {
        CHECK(b->seg_row[seg] == row && b->seg_row[seg + 1] > row);
        for (; row < b->seg_row[seg + 1]; row++)
            CHECK(b->row_seg[row] == seg);
    }
    for (int i = 1; i < b->n[2]; i++)
        CHECK(b->out_row[i - 1] < b->out_row[i]);
}

static int min3(int a, int b, int c) {
    return min_int(a, min_int(b, c));
}

/* Runs draft_rows and verify_rows and checks both batches; drafts[slot] are what the drafter says. */
static void build_and_check(struct world *w, int block, int32_t drafts[SLOTS][BLOCK_ROWS_MAX]) {
    int seg = 0, draft_seg = 0;

    fake_program_run(w->draft_rows[block]);
    check_batch_shape(&w->draft);
    for (int i = 0; i < w->draft.n[0]; i++)
        memcpy(w->draft_ids + i * (block - 1), drafts[w->draft.seg_slot[i]], (size_t)(block - 1) * sizeof(int32_t));
    fake_program_run(w->verify_rows[block]);
    check_batch_shape(&w->verify);
    for (int i = 0; i < w->n_seqs; i++) {
        int slot = w->seq_slot[i];
        const struct seq_ctl *ctl = &w->ctl[slot];
        int room = min3(block, ctl->max_tokens - ctl->n_generated, ctl->context_max - 1 - ctl->len);
        int n_rows = ctl->speculate ? max_int(room, 1) : 1;

        if (ctl->done)
            continue;
        if (n_rows > 1) {
            const int32_t *token = w->draft.row_token + w->draft.seg_row[draft_seg];

            CHECK(w->draft.seg_slot[draft_seg] == slot && w->draft.seg_pos[draft_seg] == ctl->len);
            CHECK(w->draft.seg_row[draft_seg + 1] - w->draft.seg_row[draft_seg] == block);
            CHECK(w->draft.seg_flags[draft_seg] == 0 && token[0] == ctl->anchor);
            for (int r = 1; r < block; r++) {
                CHECK(token[r] == MASK);
                CHECK(w->draft.out_row[draft_seg * (block - 1) + r - 1] == draft_seg * block + r);
            }
            draft_seg++;
        }
        CHECK(w->verify.seg_slot[seg] == slot && w->verify.seg_pos[seg] == ctl->len && w->verify.seg_flags[seg] == 0);
        CHECK(w->verify.seg_row[seg + 1] - w->verify.seg_row[seg] == n_rows);
        CHECK(w->verify.row_token[w->verify.seg_row[seg]] == ctl->anchor);
        CHECK(memcmp(w->verify.row_token + w->verify.seg_row[seg] + 1, drafts[slot],
                     (size_t)(n_rows - 1) * sizeof(int32_t)) == 0);
        seg++;
    }
    CHECK(w->draft.n[0] == draft_seg && w->draft.n[2] == draft_seg * (block - 1));
    CHECK(w->verify.n[0] == seg && w->verify.n[2] == w->verify.n[1]);
    for (int i = 0; i < w->verify.n[2]; i++)
        CHECK(w->verify.out_row[i] == i);
}

/* ---- every case of one block ------------------------------------------------------------------------------------- */

struct one {
    int block, len, n_right, stop_row, bad_row, room_max, room_context, may_snapshot, cancel;
};

static void run_one(struct world *w, const struct one *c) {
    int32_t drafts[SLOTS][BLOCK_ROWS_MAX] = {{0}}, text[BLOCK_ROWS_MAX];
    static int32_t counts[SLOTS * VOCAB];
    uint64_t step = w->n_steps;
    struct seq_ctl *ctl = &w->ctl[3], before;
    struct expected e;
    int n_rows;

    memset(ctl, 0, sizeof *ctl);
    ctl->len = c->len;
    ctl->anchor = 7;
    ctl->n_generated = 5;
    ctl->max_tokens = 5 + c->room_max;
    ctl->context_max = c->len + 1 + c->room_context;
    ctl->speculate = 1;
    ctl->may_snapshot = c->may_snapshot;
    ctl->cancel = c->cancel;
    ctl->has_counts = c->len & 1;
    ctl->sample.n_logprobs = c->len % 3 - 1;
    ctl->n_stop_ids = 2;
    ctl->stop_ids[0] = 1;
    ctl->stop_ids[1] = c->stop_row >= 0 ? 100 + c->stop_row : 2;
    for (int i = 0; i < BLOCK_ROWS_MAX; i++) {
        text[i] = i == c->bad_row ? -1 : 100 + i;
        /* After the first wrong draft right ones follow again: they must not be taken. */
        drafts[3][i] = i == c->n_right ? 300 : 100 + i;
    }
    w->n_seqs = 1;
    w->seq_slot[0] = 3;
    build_and_check(w, c->block, drafts);
    n_rows = w->verify.n[1];
    for (int r = 0; r < n_rows; r++) /* behind a wrong draft the target says something else, or is broken */
        w->chosen[r] = r <= c->n_right ? text[r] : c->len % 2 ? 100 + r : -1;
    before = *ctl;
    memcpy(counts, w->counts, sizeof counts);
    fake_program_run(w->prepare);
    e = model_block(&before, text, drafts[3], n_rows);
    check_block(w, 0, before, &e, counts, published(w, step, 1));
}

static void every_cut_at_every_row(struct world *w) {
    static const int blocks[] = {1, 2, 4, 16};
    int n_cases = 0;

    for (size_t i = 0; i < ARRAY_LEN(blocks); i++)
        for (int n_right = 0; n_right < blocks[i]; n_right++)
            for (int stop_row = -1; stop_row < blocks[i]; stop_row++)
                for (int room_max = 0; room_max <= blocks[i] + 1; room_max++)
                    for (int room_context = 0; room_context <= blocks[i] + 1; room_context++) {
                        struct one c = {.block = blocks[i],
                                        .len = 63 + n_cases * 37 % 192, /* all alignments in turn */
                                        .n_right = n_right,
                                        .stop_row = stop_row,
                                        .bad_row = -1,
                                        .room_max = room_max,
                                        .room_context = room_context,
                                        .may_snapshot = n_cases % 5 != 0};
                        run_one(w, &c);
                        n_cases++;
                    }
    printf("every cut at every row: %d blocks\n", n_cases);
}

static void every_snapshot_alignment(struct world *w) {
    static const int blocks[] = {1, 2, 4, 16};
    int n_cases = 0;

    for (size_t i = 0; i < ARRAY_LEN(blocks); i++)
        for (int len = 1; len <= 130; len++)
            for (int n_right = 0; n_right < blocks[i]; n_right++)
                for (int cut = 0; cut < 6; cut++) {
                    struct one c = {.block = blocks[i],
                                    .len = len,
                                    .n_right = n_right,
                                    .stop_row = cut == 1 ? n_right / 2 : -1,
                                    .bad_row = cut == 2 ? n_right : -1,
                                    .room_max = cut == 3 ? n_right + 1 : 100,
                                    .room_context = cut == 4 ? n_right + 1 : 100,
                                    .cancel = cut == 5};

                    for (c.may_snapshot = 0; c.may_snapshot < 2; c.may_snapshot++, n_cases++)
                        run_one(w, &c);
                }
    printf("every snapshot alignment: %d blocks\n", n_cases);
}

static void every_bad_row(struct world *w) {
    static const int blocks[] = {1, 2, 4, 16};
    int n_cases = 0;

    for (size_t i = 0; i < ARRAY_LEN(blocks); i++)
        for (int n_right = 0; n_right < blocks[i]; n_right++)
            for (int bad_row = 0; bad_row < blocks[i]; bad_row++)
                for (int stop_row = -1; stop_row < blocks[i]; stop_row++)
                    for (int room = 0; room <= blocks[i]; room++)
                        for (int cancel = 0; cancel < 2; cancel++, n_cases++) {
                            struct one c = {blocks[i], 50 + n_cases % 30, n_right, stop_row, bad_row,
                                            room,      blocks[i],         1,       cancel};
                            run_one(w, &c);
                        }
    printf("every bad row: %d blocks\n", n_cases);
}

/* No batch built on the device lists a done seq; one built by the host may. */
static void a_done_seq_keeps_its_reason(struct world *w) {
    struct one c = {
        .block = 4, .len = 62, .n_right = 3, .stop_row = -1, .bad_row = -1, .room_max = 9, .room_context = 9};
    struct seq_ctl before;
    const struct step_out *out;
    uint64_t step;

    run_one(w, &c);
    step = w->n_steps;
    w->ctl[3].len = c.len;
    w->ctl[3].done = FINISH_STOP;
    w->ctl[3].cancel = w->ctl[3].may_snapshot = 1;
    before = w->ctl[3];
    fake_program_run(w->prepare);
    out = published(w, step, 1);
    CHECK(memcmp(&before, &w->ctl[3], sizeof before) == 0);
    CHECK(w->seg_commit[0] == 0 && w->seg_snapshot[0] == 0);
    CHECK(out->n_tokens == 0 && out->n_proposed == 0 && out->done == FINISH_STOP && out->len == c.len);
}

/* ---- random runs ------------------------------------------------------------------------------------------------- */

static uint64_t next_random(uint64_t *state) { /* splitmix64, S. Vigna's public domain constants */
    uint64_t z = *state += 0x9e3779b97f4a7c15u;

    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}
static int below(uint64_t *state, int n) {
    return (int)(next_random(state) % (uint64_t)n);
}

struct seq_model {
    int32_t tokens[TOKENS_MAX]; /* prompt, then what was shown */
    int n_prompt, n_tokens, n_fed, bad_at;
    struct seq_ctl at_start;
    bool was_cancelled;
};

/* The target: a function of all tokens before, as a network is. */
static int32_t target_says(const struct seq_model *seq, const int32_t *tokens, int n_tokens) {
    uint64_t hash = 99;

    for (int i = 0; i < n_tokens; i++) {
        hash ^= (uint64_t)tokens[i];
        next_random(&hash);
    }
    return n_tokens == seq->bad_at ? -1 : below(&hash, 40);
}

static void admit(struct world *w, struct seq_model *seq, int slot, uint64_t *random) {
    struct seq_ctl *ctl = &w->ctl[slot];

    memset(seq, 0, sizeof *seq);
    memset(ctl, 0, sizeof *ctl);
    memset(w->counts + slot * VOCAB, 0, VOCAB * sizeof *w->counts);
    seq->n_prompt = seq->n_tokens = 1 + below(random, 150);
    seq->bad_at = below(random, 10) == 0 ? seq->n_prompt + below(random, 60) : -1;
    for (int i = 0; i < seq->n_prompt; i++) {
        seq->tokens[i] = below(random, 600);
        w->counts[slot * VOCAB + seq->tokens[i]] |= 1;
    }
    ctl->anchor = -1;
    ctl->max_tokens = below(random, 120);
    ctl->context_max = seq->n_prompt + below(random, 150);
    ctl->speculate = below(random, 4) != 0;
    ctl->may_snapshot = below(random, 2);
    ctl->has_counts = below(random, 2);
    ctl->sample.n_logprobs = below(random, 3) - 1;
    ctl->n_stop_ids = below(random, 3);
    for (int i = 0; i < ctl->n_stop_ids; i++)
        ctl->stop_ids[i] = below(random, 40);
    seq->at_start = *ctl;
}

/* A chunk of every seq that is still in its prompt, as the host would build it ahead of the device: also of seqs that
 * are cancelled or done by then. */
static void prefill_step(struct world *w, struct seq_model *seqs, uint64_t *random) {
    static int32_t counts[SLOTS * VOCAB];
    struct seq_ctl before[SLOTS];
    const struct step_out *out;
    uint64_t step = w->n_steps;

    fake_batch_init(&w->prefill, SLOTS, FAKE_ROWS_MAX, SLOTS);
    for (int slot = 0; slot < SLOTS; slot++) {
        struct seq_model *seq = &seqs[slot];
        int n = min_int(1 + below(random, 80), seq->n_prompt - seq->n_fed);
        bool ends = seq->n_fed + n == seq->n_prompt;

        if (n == 0 || below(random, 3) == 0)
            continue;
        fake_batch_seg(&w->prefill, slot, seq->n_fed, SEG_PREFILL | (ends ? SEG_SAMPLE : 0));
        for (int i = 0; i < n; i++)
            fake_batch_row(&w->prefill, seq->tokens[seq->n_fed + i], ends && i == n - 1);
        if (ends)
            w->chosen[w->prefill.n[2] - 1] = target_says(seq, seq->tokens, seq->n_prompt);
        seq->n_fed += n;
    }
    memcpy(before, w->ctl, sizeof before);
    memcpy(counts, w->counts, sizeof counts);
    fake_program_run(w->prepare_prefill);
    out = published(w, step, w->prefill.n[0]);
    for (int seg = 0, n_outs = 0; seg < w->prefill.n[0]; seg++, out++) {
        int slot = w->prefill.seg_slot[seg], n_rows = w->prefill.seg_row[seg + 1] - w->prefill.seg_row[seg];
        struct seq_model *seq = &seqs[slot];
        struct seq_ctl ctl = before[slot];
        bool samples = w->prefill.seg_flags[seg] & SEG_SAMPLE;
        int n_tokens = 0, finish = FINISH_NONE;

        CHECK(out->slot == slot && out->pos == ctl.len && out->n_proposed == 0 && out->n_accepted == 0);
        CHECK(out->anchor_before == seq->tokens[ctl.len] && out->snapshot_len == 0);
        CHECK(w->seg_commit[seg] == n_rows && w->seg_snapshot[seg] == 0);
        ctl.len += n_rows;
        if (ctl.done == FINISH_NONE && ctl.cancel)
            ctl.done = FINISH_CANCELLED;
        if (ctl.done == FINISH_NONE && samples) {
            n_tokens = plain_decode(&ctl, seq->n_prompt, &w->chosen[n_outs], 1, &seq->tokens[seq->n_prompt], &finish);
            ctl.done = finish;
        }
        CHECK(out->n_tokens == n_tokens);
        if (n_tokens == 1) {
            ctl.anchor = seq->tokens[seq->n_tokens++];
            ctl.n_generated = 1;
            CHECK(out->tokens[0] == ctl.anchor);
            counts[slot * VOCAB + ctl.anchor] += ctl.has_counts ? 2 : 0;
            if (ctl.sample.n_logprobs >= 0)
                CHECK(out->logprobs[0].top_id[0] == n_outs);
        }
        CHECK(memcmp(&w->ctl[slot], &ctl, sizeof ctl) == 0);
        CHECK(out->len == ctl.len && out->anchor == ctl.anchor && out->done == ctl.done);
        n_outs += samples;
    }
    CHECK(memcmp(counts, w->counts, sizeof counts) == 0);
}

static void cycle_step(struct world *w, struct seq_model *seqs, uint64_t *random) {
    static int32_t counts[SLOTS * VOCAB];
    int32_t drafts[SLOTS][BLOCK_ROWS_MAX] = {{0}}, text[BLOCK_ROWS_MAX];
    struct seq_ctl before[SLOTS];
    const struct step_out *out;
    uint64_t step = w->n_steps;
    int block = 1 + below(random, BLOCK_ROWS_MAX), turn = below(random, SLOTS);

    w->n_seqs = 0;
    for (int i = 0; i < SLOTS; i++) { /* done seqs may be listed, those in their prompt may not */
        int slot = (i + turn) % SLOTS;
        struct seq_model *seq = &seqs[slot];

        if (w->ctl[slot].anchor < 0 && w->ctl[slot].done == FINISH_NONE)
            continue;
        if (below(random, 4) > 0)
            w->seq_slot[w->n_seqs++] = slot;
        for (int d = 0, n = seq->n_tokens; d < block - 1; d++) {
            int32_t *at = &seq->tokens[n + d]; /* room: TOKENS_MAX exceeds every limit by a block */

            *at = target_says(seq, seq->tokens, n + d);
            if (below(random, 6) == 0)
                *at = below(random, 42) - 1; /* a drafter may fail, too */
            drafts[slot][d] = *at;
        }
    }
    build_and_check(w, block, drafts);
    for (int seg = 0; seg < w->verify.n[0]; seg++) {
        struct seq_model *seq = &seqs[w->verify.seg_slot[seg]];

        for (int row = w->verify.seg_row[seg]; row < w->verify.seg_row[seg + 1]; row++) /* drafts lie behind tokens */
            w->chosen[row] = target_says(seq, seq->tokens, seq->n_tokens + row - w->verify.seg_row[seg]);
    }
    memcpy(before, w->ctl, sizeof before);
    memcpy(counts, w->counts, sizeof counts);
    fake_program_run(w->prepare);
    out = published(w, step, w->verify.n[0]);
    for (int seg = 0; seg < w->verify.n[0]; seg++) {
        int slot = w->verify.seg_slot[seg], n_rows = w->verify.seg_row[seg + 1] - w->verify.seg_row[seg];
        struct seq_model *seq = &seqs[slot];
        struct expected e;

        for (int i = 0, n = seq->n_tokens; i < n_rows; i++) {
            text[i] = target_says(seq, seq->tokens, n + i);
            seq->tokens[n + i] = text[i];
        }
        e = model_block(&before[slot], text, drafts[slot], n_rows);
        check_block(w, seg, before[slot], &e, counts, &out[seg]);
        seq->n_tokens += e.n_tokens;
    }
    CHECK(memcmp(counts, w->counts, sizeof counts) == 0);
}

/* However the drafts came, what was shown is what a decoder without drafts shows. */
static void check_whole_run(const struct world *w, const struct seq_model *seq, int slot) {
    const struct seq_ctl *ctl = &w->ctl[slot];
    int32_t alone[TOKENS_MAX], tokens[TOKENS_MAX];
    int finish = FINISH_NONE, n_shown = 0;

    memcpy(alone, seq->tokens, (size_t)seq->n_prompt * sizeof *alone);
    while (finish == FINISH_NONE) {
        struct seq_ctl so_far = seq->at_start;
        int n = seq->n_prompt + n_shown;

        so_far.n_generated = n_shown;
        alone[n] = target_says(seq, alone, n);
        n_shown += plain_decode(&so_far, n, &alone[n], 1, tokens, &finish);
    }
    CHECK(ctl->len == seq->n_prompt + max_int(0, seq->n_tokens - seq->n_prompt - 1) || ctl->done == FINISH_CANCELLED);
    CHECK(memcmp(alone, seq->tokens, (size_t)seq->n_tokens * sizeof *alone) == 0);
    if (ctl->done != FINISH_CANCELLED)
        CHECK(ctl->done == finish && seq->n_tokens == seq->n_prompt + n_shown && ctl->n_generated == n_shown);
}

static void random_runs(struct world *w, uint64_t seed) {
    static struct seq_model seqs[SLOTS];
    uint64_t random = seed;
    int n_ended[FINISH_NONFINITE + 1] = {0};

    for (int slot = 0; slot < SLOTS; slot++)
        admit(w, &seqs[slot], slot, &random);
    for (int i = 0; i < 4000; i++) {
        int slot = below(&random, SLOTS);

        if (below(&random, 40) == 0)
            w->ctl[slot].cancel = 1;
        if (below(&random, 3) == 0)
            w->ctl[slot].may_snapshot = 1;
        prefill_step(w, seqs, &random);
        cycle_step(w, seqs, &random);
        slot = below(&random, SLOTS);
        if (w->ctl[slot].done != FINISH_NONE) {
            check_whole_run(w, &seqs[slot], slot);
            n_ended[w->ctl[slot].done]++;
            admit(w, &seqs[slot], slot, &random);
        }
    }
    printf("random runs: stop %d, length %d, context %d, cancelled %d, non-finite %d\n", n_ended[FINISH_STOP],
           n_ended[FINISH_LENGTH], n_ended[FINISH_CONTEXT], n_ended[FINISH_CANCELLED], n_ended[FINISH_NONFINITE]);
    for (int finish = FINISH_STOP; finish <= FINISH_NONFINITE; finish++)
        CHECK(n_ended[finish] > 0);
}

int main(int argc, char **argv) {
    uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 0) : (uint64_t)time(NULL);
    struct world *w = world_new();

    printf("seed %llu\n", (unsigned long long)seed);
    fflush(stdout);
    every_cut_at_every_row(w);
    every_snapshot_alignment(w);
    every_bad_row(w);
    a_done_seq_keeps_its_reason(w);
    random_runs(w, seed);
    world_free(w);
    return 0;
}
