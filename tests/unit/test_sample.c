/* sample: the choice of a token beside a model that sorts the whole row, and the edges of every parameter. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "cpu/sample.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { VOCAB_MAX = 2100, SLOT = 1 };

struct fixture {
    float logits[VOCAB_MAX];
    struct seq_ctl ctl;
    int32_t counts[2 * VOCAB_MAX], bias_id[2 * SEQ_BIAS_MAX];
    float bias[2 * SEQ_BIAS_MAX];
    struct seq_tables tables;
    struct sample_row row;
};

static void setup(struct fixture *f, int n_valid) {
    memset(f, 0, sizeof *f);
    f->ctl.has_counts = 1;
    f->ctl.sample = (struct sample_params){.top_p = 1, .repetition = 1, .n_logprobs = -1, .seed = 42};
    f->tables = (struct seq_tables){VOCAB_MAX, f->counts, f->bias_id, f->bias};
    f->row = (struct sample_row){
        .logits = f->logits, .n_valid = n_valid, .ctl = &f->ctl, .tables = &f->tables, .slot = SLOT, .position = 1};
}

static int32_t choose_with(struct fixture *f, struct logprob_row *logprobs) {
    size_t bytes = sample_scratch_bytes(f->row.n_valid);
    void *scratch = aligned_alloc(64, bytes);
    int32_t id;

    assert_non_null(scratch);
    memset(scratch, f->row.position, bytes); /* whatever an earlier op left there */
    id = sample_choose(&f->row, scratch, logprobs);
    free(scratch);
    return id;
}
static int32_t choose(struct fixture *f) {
    return choose_with(f, NULL);
}

static double random_at(uint64_t i) {
    return sample_uniform(0xabcdef, i, SAMPLE_TARGET);
}
static void fill_random(struct fixture *f, uint64_t seed, float step) { /* step > 0: many equal logits */
    for (int i = 0; i < f->row.n_valid; i++) {
        float logit = (float)(12 * random_at(seed * VOCAB_MAX + (uint64_t)i) - 6);
        f->logits[i] = step > 0 ? step * rintf(logit / step) : logit;
    }
}

/* ---- the model: edit, sort everything, cut, walk ------------------------------------------------------------------ */

struct candidate {
    int32_t id;
    float logit;
    double weight;
};
static int by_falling_logit(const void *a_, const void *b_) {
    const struct candidate *a = a_, *b = b_;

    return a->logit != b->logit ? (a->logit < b->logit) - (a->logit > b->logit) : (a->id > b->id) - (a->id < b->id);
}

static float model_logit(const struct fixture *f, int id) {
    const struct sample_params *p = &f->ctl.sample;
    int32_t count = f->counts[SLOT * VOCAB_MAX + id];
    int n_generated;
    float logit = f->logits[id];

    for (int i = 0; i < f->ctl.n_bias; i++)
        logit += f->bias_id[SLOT * SEQ_BIAS_MAX + i] == id ? f->bias[SLOT * SEQ_BIAS_MAX + i] : 0;
    for (int i = 0; i < f->row.n_drafts; i++)
        count += f->row.drafts[i] == id ? 2 : 0;
    n_generated = count / 2;
    if (count > 0)
        logit = logit > 0 ? logit / p->repetition : logit * p->repetition;
    if (n_generated > 0)
        logit = logit - p->presence - p->frequency * (float)n_generated;
    return logit;
}

/* What remains after all cuts; weights sum to *ret_mass. */
static int model_candidates(const struct fixture *f, struct candidate *c, double *ret_mass) {
    const struct sample_params *p = &f->ctl.sample;
    int n = f->row.n_valid;
    double mass = 0, so_far = 0;

    for (int id = 0; id < n; id++)
        c[id] = (struct candidate){.id = id, .logit = model_logit(f, id)};
    qsort(c, (size_t)n, sizeof *c, by_falling_logit);
    if (p->top_k > 0 && p->top_k < n)
        n = p->top_k;
    for (int i = 0; i < n; i++)
        mass += c[i].weight = exp(((double)c[i].logit - (double)c[0].logit) / (double)p->temperature);
    for (int i = 0; p->top_p < 1 && i < n; i++)
        if ((so_far += c[i].weight) >= (double)p->top_p * mass)
            n = i + 1;
    for (int i = 1; i < n; i++)
        if (c[i].weight < (double)p->min_p)
            n = i;
    *ret_mass = 0;
    for (int i = 0; i < n; i++)
        *ret_mass += c[i].weight;
    return n;
}

static int32_t model_choose(const struct fixture *f) {
    static struct candidate c[VOCAB_MAX];
    double mass, so_far = 0, target;
    int n = model_candidates(f, c, &mass);

    target = mass * sample_uniform(f->ctl.sample.seed, (uint64_t)f->row.position, SAMPLE_TARGET);
    for (int i = 0; i < n; i++)
        if ((so_far += c[i].weight) > target)
            return c[i].id;
    return c[n - 1].id;
}

/* ---- random numbers ---------------------------------------------------------------------------------------------- */

static void philox_gives_the_published_answers(void **state) {
    /* From the known-answer file of the authors' Random123 distribution, philox4x32 with 10 rounds. */
    static const struct {
        uint32_t counter[4], key[2], answer[4];
    } cases[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        uint32_t ret[4];

        sample_philox(cases[i].counter, cases[i].key, ret);
        assert_memory_equal(ret, cases[i].answer, sizeof ret);
    }
}

static void uniform_depends_on_seed_position_and_purpose(void **state) {
    const enum sample_purpose other = (enum sample_purpose)(SAMPLE_TARGET + 1);
    double u = sample_uniform(7, 9, SAMPLE_TARGET), sum = 0;

    (void)state;
    assert_true(u == sample_uniform(7, 9, SAMPLE_TARGET));
    assert_true(u != sample_uniform(8, 9, SAMPLE_TARGET) && u != sample_uniform(7 + (1ull << 32), 9, SAMPLE_TARGET));
    assert_true(u != sample_uniform(7, 10, SAMPLE_TARGET) && u != sample_uniform(7, 9 + (1ull << 32), SAMPLE_TARGET));
    assert_true(u != sample_uniform(7, 9, other));
    for (uint64_t i = 0; i < 10000; i++) {
        u = sample_uniform(i, 3, SAMPLE_TARGET);
        assert_true(u >= 0 && u < 1);
        sum += u;
    }
    assert_true(fabs(sum / 10000 - 0.5) < 0.015);
}

/* ---- greedy ------------------------------------------------------------------------------------------------------ */

static void greedy_takes_the_largest_and_the_lowest_of_equals(void **state) {
    static const int sizes[] = {1, 2, 127, 128, 129, 256, 1000};
    struct fixture f;

    (void)state;
    for (size_t s = 0; s < ARRAY_LEN(sizes); s++)
        for (int best = 0; best < sizes[s]; best += best < 3 ? 1 : 61) {
            setup(&f, sizes[s]);
            for (int i = 0; i < sizes[s]; i++)
                f.logits[i] = -3 - (float)(i % 7);
            for (int i = best; i < sizes[s]; i += 50)
                f.logits[i] = -2;
            assert_int_equal(choose(&f), best);
            assert_int_equal(sample_argmax(f.logits, sizes[s]), best);
        }
}

static void both_zeros_are_equal(void **state) {
    struct fixture f;

    (void)state;
    setup(&f, 300);
    for (int i = 0; i < 300; i++)
        f.logits[i] = i == 7 ? -0.0f : i > 7 ? 0.0f : -1;
    assert_int_equal(choose(&f), 7);
    assert_int_equal(sample_argmax(f.logits, 300), 7);
    f.ctl.sample.temperature = 1;
    f.ctl.sample.top_k = 1;
    assert_int_equal(choose(&f), 7);
}

static void padding_is_never_chosen(void **state) {
    struct fixture f;

    (void)state;
    setup(&f, 200);
    fill_random(&f, 1, 0);
    for (int i = 200; i < 300; i++)
        f.logits[i] = i % 2 ? 1000 : NAN;
    assert_in_range(choose(&f), 0, 199);
    assert_in_range(sample_argmax(f.logits, 200), 0, 199);
    f.ctl.sample.temperature = 5;
    for (f.row.position = 0; f.row.position < 500; f.row.position++)
        assert_in_range(choose(&f), 0, 199);
}

static void a_non_finite_logit_is_no_choice(void **state) {
    const float bad[] = {NAN, -NAN, INFINITY, -INFINITY};
    struct logprob_row logprobs = {.n_top = 77};
    struct fixture f;

    (void)state;
    for (size_t b = 0; b < ARRAY_LEN(bad); b++)
        for (int at = 0; at < 300; at += 13)
            for (int temperature = 0; temperature < 2; temperature++) {
                setup(&f, 300);
                fill_random(&f, 2, 0);
                f.logits[at] = bad[b];
                f.ctl.sample.temperature = (float)temperature;
                f.ctl.sample.n_logprobs = 3;
                assert_int_equal(choose_with(&f, &logprobs), -1);
                assert_int_equal(sample_argmax(f.logits, 300), -1);
                assert_int_equal(logprobs.n_top, 77);
            }
}

static void the_largest_finite_logits_are_ordinary(void **state) {
    struct fixture f;

    (void)state;
    setup(&f, 400);
    for (int i = 0; i < 400; i++)
        f.logits[i] = -FLT_MAX;
    f.logits[399] = FLT_MAX;
    assert_int_equal(choose(&f), 399);
    f.ctl.sample.temperature = 0.01f;
    assert_int_equal(choose(&f), 399);
    f.ctl.sample.top_k = 5;
    f.ctl.sample.min_p = 1e-30f;
    assert_int_equal(choose(&f), 399);
}

/* ---- cuts -------------------------------------------------------------------------------------------------------- */

static void cuts_equal_a_full_sort(void **state) {
    static const int sizes[] = {5, 128, 255, 700, 2100}, top_ks[] = {0, 1, 2, 20, 255, 256, 257, 600, 5000};
    static const float top_ps[] = {1, 0.95f, 0.5f, 0}, min_ps[] = {0, 0.02f, 0.5f};
    struct fixture f;
    uint64_t seed = 0;

    (void)state;
    for (size_t s = 0; s < ARRAY_LEN(sizes); s++)
        for (size_t k = 0; k < ARRAY_LEN(top_ks); k++)
            for (size_t p = 0; p < ARRAY_LEN(top_ps); p++)
                for (size_t m = 0; m < ARRAY_LEN(min_ps); m++) {
                    setup(&f, sizes[s]);
                    seed++;
                    fill_random(&f, seed, seed % 3 == 0 ? 0 : seed % 3 == 1 ? 0.5f : 4);
                    f.ctl.sample.temperature = seed % 2 ? 0.7f : 3;
                    f.ctl.sample.top_k = top_ks[k];
                    f.ctl.sample.top_p = top_ps[p];
                    f.ctl.sample.min_p = min_ps[m];
                    for (f.row.position = 0; f.row.position < 4; f.row.position++)
                        assert_int_equal(choose(&f), model_choose(&f));
                }
}

static void top_1_is_greedy(void **state) {
    struct fixture f;

    (void)state;
    for (uint64_t seed = 0; seed < 50; seed++) {
        int32_t greedy;

        setup(&f, 500);
        fill_random(&f, seed, 1);
        greedy = choose(&f);
        f.ctl.sample.temperature = 2;
        f.ctl.sample.top_k = 1;
        assert_int_equal(choose(&f), greedy);
        f.ctl.sample.top_k = 0;
        f.ctl.sample.top_p = 0;
        assert_int_equal(choose(&f), greedy);
    }
}

/* Which of the first ids are ever drawn, as bits. */
static uint32_t drawn(struct fixture *f) {
    uint32_t ids = 0;

    for (f->row.position = 0; f->row.position < 150; f->row.position++) {
        int32_t id = choose(f);

        assert_in_range(id, 0, 31);
        ids |= 1u << id;
    }
    return ids;
}

/* Four equal ids, the rest without any weight; with 4 ids the row is sorted, with 600 it is searched. */
static void top_p_keeps_the_smallest_prefix_that_reaches_it(void **state) {
    static const struct {
        float top_p;
        uint32_t ids;
    } cases[] = {{0, 1}, {0.25f, 1}, {0.26f, 3}, {0.5f, 3}, {0.51f, 7}, {0.75f, 7}, {0.76f, 15}, {1, 15}};
    struct fixture f;

    (void)state;
    for (int n_valid = 4; n_valid <= 600; n_valid += 596)
        for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
            setup(&f, n_valid);
            for (int id = 4; id < n_valid; id++)
                f.logits[id] = -5000;
            f.ctl.sample.temperature = 1;
            f.ctl.sample.top_p = cases[i].top_p;
            assert_int_equal(drawn(&f), cases[i].ids);
        }
}

static void top_p_comes_after_top_k_and_before_min_p(void **state) {
    struct fixture f;

    (void)state;
    for (int n_valid = 10; n_valid <= 610; n_valid += 600) {
        setup(&f, n_valid);
        for (int id = 0; id < n_valid; id++)
            f.logits[id] = id < 4 ? 0 : id < 10 ? -1 : -5000; /* weights 1 1 1 1 and six times 0.37 */
        f.ctl.sample.temperature = 1;
        f.ctl.sample.top_p = 0.5f;
        assert_int_equal(drawn(&f), 0xf); /* of 6.2 */
        f.ctl.sample.top_k = 4;
        assert_int_equal(drawn(&f), 0x3); /* of 4 */
        f.ctl.sample.top_k = 0;
        f.ctl.sample.min_p = 0.9f;
        assert_int_equal(drawn(&f), 0xf); /* not half of the four that min_p leaves */
        f.ctl.sample.top_p = 0.9f;
        assert_int_equal(drawn(&f), 0xf);
        f.ctl.sample.min_p = 0.3f;
        assert_int_equal(drawn(&f), 0x1ff); /* 4 + 5 x 0.37 = 5.8 reach 5.6 of 6.2, nine ids */
    }
}

static void min_p_is_relative_to_the_best_after_temperature(void **state) {
    struct fixture f;

    (void)state;
    for (int n_valid = 8; n_valid <= 608; n_valid += 600) {
        setup(&f, n_valid);
        for (int id = 0; id < n_valid; id++)
            f.logits[id] = id < 8 ? 100 - 0.5f * (float)id : -5000;
        f.ctl.sample.temperature = 1;
        f.ctl.sample.min_p = 0.3f; /* ln: -1.2 */
        assert_int_equal(drawn(&f), 0x7);
        f.ctl.sample.temperature = 0.5f;
        assert_int_equal(drawn(&f), 0x3);
        f.ctl.sample.temperature = 2;
        assert_int_equal(drawn(&f), 0x1f);
        f.ctl.sample.min_p = 1;
        f.logits[5] = 100;
        assert_int_equal(drawn(&f), 0x21);
    }
}

static void min_p_excludes_a_logit_just_below_its_bound(void **state) {
    int n_below = 0;
    struct fixture f;

    (void)state;
    for (int n_valid = 3; n_valid <= 603; n_valid += 600)
        for (int i = 1; i < 20; i += 2) {
            float min_p = (float)i / 20, below = (float)log((double)min_p);

            if ((double)below >= log((double)min_p))
                below = nextafterf(below, -INFINITY);
            else
                n_below++; /* the bound itself, rounded, is below the bound */
            setup(&f, n_valid);
            for (int id = 0; id < n_valid; id++)
                f.logits[id] = -5000;
            f.logits[0] = 0;
            f.logits[1] = below;
            f.logits[2] = nextafterf(below, INFINITY);
            f.ctl.sample.temperature = 1;
            f.ctl.sample.min_p = min_p;
            assert_int_equal(drawn(&f), 0x5);
        }
    assert_true(n_below > 2);
}

/* ---- bias and penalties ------------------------------------------------------------------------------------------ */

static void penalties_act_on_what_was_seen(void **state) {
    struct fixture f;
    int32_t *counts;

    (void)state;
    setup(&f, 300);
    counts = f.counts + SLOT * VOCAB_MAX;
    for (int i = 0; i < 300; i++)
        f.logits[i] = -8;
    f.logits[3] = 4; /* was in the prompt */
    f.logits[200] = 3;
    f.logits[299] = 2.5f; /* generated twice */
    counts[3] = 1;
    counts[299] = 2 << 1;
    assert_int_equal(choose(&f), 3);
    f.ctl.sample.repetition = 2; /* 4 -> 2 */
    assert_int_equal(choose(&f), 200);
    f.ctl.sample.repetition = 0.5f; /* 4 -> 8, 2.5 -> 5 */
    f.logits[3] = 0;
    assert_int_equal(choose(&f), 299);
    f.ctl.sample.presence = 1.5f; /* 5 -> 3.5 */
    assert_int_equal(choose(&f), 299);
    f.ctl.sample.frequency = 0.3f; /* 3.5 -> 2.9 */
    assert_int_equal(choose(&f), 200);
    f.ctl.sample.repetition = 1;
    f.ctl.sample.presence = 100;
    f.logits[3] = 4; /* the prompt's are not generated ones */
    assert_int_equal(choose(&f), 3);
    f.ctl.sample.presence = -1; /* 2.5 -> 3.5 - 0.6 */
    f.logits[3] = -8;
    assert_int_equal(choose(&f), 200);
    f.ctl.has_counts = 0;
    f.ctl.sample.presence = 100;
    f.logits[299] = 5;
    assert_int_equal(choose(&f), 299);
}

static void repetition_pushes_negative_logits_down(void **state) {
    struct fixture f;

    (void)state;
    setup(&f, 2);
    f.logits[0] = -1;
    f.logits[1] = -1.5f;
    f.counts[SLOT * VOCAB_MAX] = 1;
    assert_int_equal(choose(&f), 0);
    f.ctl.sample.repetition = 2;
    assert_int_equal(choose(&f), 1);
}

static void drafts_before_the_row_count_as_generated(void **state) {
    int32_t drafts[] = {5, -1, 7, 7, 100000};
    struct fixture f;

    (void)state;
    setup(&f, 300);
    f.logits[5] = 3;
    f.logits[7] = 2.8f;
    f.logits[299] = 2.52f;
    f.ctl.sample.frequency = 0.25f;
    f.row.drafts = drafts;
    assert_int_equal(choose(&f), 5);
    f.row.n_drafts = 1; /* 5: 2.75 */
    assert_int_equal(choose(&f), 7);
    f.row.n_drafts = 3;                 /* 7: 2.55 */
    f.counts[SLOT * VOCAB_MAX + 5] = 2; /* 5: 2.5 */
    assert_int_equal(choose(&f), 7);
    f.row.n_drafts = 5; /* 7: 2.3 */
    assert_int_equal(choose(&f), 299);
}

static void drafts_are_the_same_as_counts(void **state) {
    static int32_t drafts[BLOCK_ROWS_MAX - 1];
    struct fixture f, g;

    (void)state;
    for (uint64_t seed = 0; seed < 40; seed++) {
        setup(&f, 700);
        fill_random(&f, seed, 0.25f);
        f.ctl.sample = (struct sample_params){.temperature = 1.5f,
                                              .top_p = 0.9f,
                                              .repetition = 1.3f,
                                              .presence = 0.4f,
                                              .frequency = 0.2f,
                                              .top_k = seed % 2 ? 40 : 0};
        g = f;
        g.row.logits = g.logits;
        g.row.ctl = &g.ctl;
        g.tables.counts = g.counts;
        g.row.tables = &g.tables;
        for (int i = 0; i < BLOCK_ROWS_MAX - 1; i++) {
            drafts[i] = (int32_t)(700 * random_at(seed * 100 + (uint64_t)i));
            g.counts[SLOT * VOCAB_MAX + drafts[i]] += 2;
        }
        f.row.drafts = drafts;
        f.row.n_drafts = BLOCK_ROWS_MAX - 1;
        for (f.row.position = 0; f.row.position < 20; f.row.position++) {
            g.row.position = f.row.position;
            assert_int_equal(choose(&f), choose(&g));
            assert_int_equal(choose(&f), model_choose(&f));
        }
    }
}

static void add_bias(struct fixture *f, int32_t id, float bias) {
    f->bias_id[SLOT * SEQ_BIAS_MAX + f->ctl.n_bias] = id;
    f->bias[SLOT * SEQ_BIAS_MAX + f->ctl.n_bias++] = bias;
}

static void bias_comes_before_the_penalties(void **state) {
    struct fixture f;

    (void)state;
    setup(&f, 300);
    f.logits[10] = 2;
    f.logits[290] = 1;
    add_bias(&f, 290, 2);
    add_bias(&f, -1, 1000);
    add_bias(&f, 300, 1000);
    assert_int_equal(choose(&f), 290);
    f.counts[SLOT * VOCAB_MAX + 290] = 1;
    f.ctl.sample.repetition = 2; /* (1 + 2) / 2, not 1 / 2 + 2 */
    assert_int_equal(choose(&f), 10);
    f.ctl.sample.repetition = 1.4f;
    assert_int_equal(choose(&f), 290);
}

static void bias_can_ban_ids_but_not_all(void **state) {
    struct fixture f;

    (void)state;
    for (int temperature = 0; temperature < 2; temperature++) {
        setup(&f, 3);
        f.logits[1] = 9;
        f.ctl.sample.temperature = (float)temperature;
        f.ctl.sample.repetition = 2;
        f.counts[SLOT * VOCAB_MAX + 1] = 1;
        add_bias(&f, 1, -INFINITY);
        f.ctl.sample.repetition = 0; /* absurd: -INFINITY * 0 */
        assert_int_not_equal(choose(&f), 1);
        f.ctl.sample.repetition = 2;
        for (f.row.position = 0; f.row.position < 100; f.row.position++)
            assert_int_not_equal(choose(&f), 1);
        add_bias(&f, 0, -INFINITY);
        for (f.row.position = 0; f.row.position < 100; f.row.position++)
            assert_int_equal(choose(&f), 2);
        add_bias(&f, 2, -INFINITY);
        assert_int_equal(choose(&f), -1);
    }
}

static void edited_rows_equal_a_full_sort(void **state) {
    struct fixture f;

    (void)state;
    for (uint64_t seed = 0; seed < 300; seed++) {
        setup(&f, 1000);
        fill_random(&f, seed, seed % 2 ? 0 : 0.5f);
        f.ctl.sample.temperature = 1;
        f.ctl.sample.repetition = 1.5f;
        f.ctl.sample.presence = 0.5f;
        f.ctl.sample.frequency = 0.1f;
        f.ctl.sample.top_k = seed % 3 == 0 ? 0 : seed % 3 == 1 ? 30 : 400;
        f.ctl.sample.top_p = seed % 5 == 0 ? 1 : 0.8f;
        for (int i = 0; i < 400; i++)
            f.counts[SLOT * VOCAB_MAX + (int)(1000 * random_at(seed * 1000 + (uint64_t)i))] = i % 9;
        for (int i = 0; i < 20; i++)
            add_bias(&f, i * 47, (float)(i - 10));
        for (f.row.position = 0; f.row.position < 3; f.row.position++)
            assert_int_equal(choose(&f), model_choose(&f));
    }
}

/* ---- logprobs ---------------------------------------------------------------------------------------------------- */

static void logprobs_are_of_the_raw_row(void **state) {
    struct logprob_row a = {.n_top = 77}, b;
    struct fixture f;
    double sum = 0;
    int32_t chosen;

    (void)state;
    setup(&f, 20);
    fill_random(&f, 3, 1);
    choose_with(&f, &a);
    assert_int_equal(a.n_top, 77); /* not asked for */
    f.ctl.sample.n_logprobs = LOGPROBS_MAX;
    chosen = choose_with(&f, &a);
    assert_int_equal(chosen, a.top_id[0]);
    assert_int_equal(a.n_top, 20);
    assert_true(a.chosen == a.top[0]);
    for (int i = 0; i < 20; i++) {
        sum += exp((double)a.top[i]);
        if (i > 0)
            assert_true(a.top[i - 1] > a.top[i] || (a.top[i - 1] == a.top[i] && a.top_id[i - 1] < a.top_id[i]));
        assert_true(fabsf(a.top[i] - a.top[0] - (f.logits[a.top_id[i]] - f.logits[a.top_id[0]])) < 1e-5f);
    }
    assert_true(fabs(sum - 1) < 1e-6);
    add_bias(&f, a.top_id[19], 50);
    f.ctl.sample.temperature = 0.5f;
    assert_int_equal(choose_with(&f, &b), a.top_id[19]);
    assert_true(b.chosen == a.top[19]);
    assert_memory_equal(a.top_id, b.top_id, sizeof a.top_id);
    assert_memory_equal(a.top, b.top, sizeof a.top);
}

static void logprobs_count_as_asked(void **state) {
    static struct candidate c[VOCAB_MAX];
    struct logprob_row logprobs;
    struct fixture f;
    double mass;

    (void)state;
    for (int n_logprobs = 0; n_logprobs <= LOGPROBS_MAX; n_logprobs++) {
        setup(&f, 1500);
        fill_random(&f, 100 + (uint64_t)n_logprobs, 0.5f);
        f.ctl.sample.temperature = 1;
        model_candidates(&f, c, &mass);
        f.ctl.sample.n_logprobs = n_logprobs;
        choose_with(&f, &logprobs);
        assert_int_equal(logprobs.n_top, n_logprobs);
        for (int i = 0; i < n_logprobs; i++) {
            assert_int_equal(logprobs.top_id[i], c[i].id);
            assert_true(fabs((double)logprobs.top[i] - log(c[i].weight / mass)) < 1e-5);
        }
    }
}

/* ---- distribution ------------------------------------------------------------------------------------------------ */

/* The value that chi-square with df degrees exceeds with probability 1e-3 (Wilson and Hilferty 1931). */
static double chi_square_limit(int df) {
    double d = 2 / (9.0 * df);

    return df * pow(1 - d + 3.0902 * sqrt(d), 3);
}

/* Draws along positions, or along seeds, against the probabilities of the model. */
static void expect_distribution(struct fixture *f, bool along_seeds) {
    enum { DRAWS = 3000 };
    static struct candidate c[VOCAB_MAX];
    static int n_seen[VOCAB_MAX];
    double mass, chi_square = 0, rest = 0;
    int n = model_candidates(f, c, &mass), n_cells = 0, n_rest = 0;

    memset(n_seen, 0, sizeof n_seen);
    for (int i = 0; i < DRAWS; i++) {
        if (along_seeds)
            f->ctl.sample.seed = (uint64_t)i;
        else
            f->row.position = i;
        n_seen[choose(f)]++;
    }
    for (int i = 0; i < n; i++) {
        double expected = DRAWS * c[i].weight / mass;

        if (expected < 10) { /* too rare for a cell of its own */
            rest += expected;
            n_rest += n_seen[c[i].id];
        } else {
            chi_square += pow(n_seen[c[i].id] - expected, 2) / expected;
            n_cells++;
        }
        n_seen[c[i].id] = 0;
    }
    if (rest >= 5) {
        chi_square += pow(n_rest - rest, 2) / rest;
        n_cells++;
    }
    for (int id = 0; id < f->row.n_valid; id++)
        assert_int_equal(n_seen[id], 0); /* nothing but what the cuts leave */
    assert_true(n_cells > 2);
    assert_true(chi_square < chi_square_limit(n_cells - 1));
}

static void draws_have_the_probabilities_of_the_model(void **state) {
    struct fixture f;

    (void)state;
    for (int i = 0; i < 16; i++) { /* sorted with 12 ids, searched with 300 */
        setup(&f, i & 1 ? 12 : 300);
        fill_random(&f, 40 + (uint64_t)i, 0);
        f.ctl.sample.temperature = 2;
        f.ctl.sample.seed = (uint64_t)i;
        if (i & 2)
            f.ctl.sample.top_p = 0.8f;
        if (i & 4)
            f.ctl.sample.top_k = i & 1 ? 7 : 270;
        if (i & 8)
            f.ctl.sample.min_p = 0.05f;
        expect_distribution(&f, false);
        if (i < 4)
            expect_distribution(&f, true);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(philox_gives_the_published_answers),
        cmocka_unit_test(uniform_depends_on_seed_position_and_purpose),
        cmocka_unit_test(greedy_takes_the_largest_and_the_lowest_of_equals),
        cmocka_unit_test(both_zeros_are_equal),
        cmocka_unit_test(padding_is_never_chosen),
        cmocka_unit_test(a_non_finite_logit_is_no_choice),
        cmocka_unit_test(the_largest_finite_logits_are_ordinary),
        cmocka_unit_test(cuts_equal_a_full_sort),
        cmocka_unit_test(top_1_is_greedy),
        cmocka_unit_test(top_p_keeps_the_smallest_prefix_that_reaches_it),
        cmocka_unit_test(top_p_comes_after_top_k_and_before_min_p),
        cmocka_unit_test(min_p_is_relative_to_the_best_after_temperature),
        cmocka_unit_test(min_p_excludes_a_logit_just_below_its_bound),
        cmocka_unit_test(penalties_act_on_what_was_seen),
        cmocka_unit_test(repetition_pushes_negative_logits_down),
        cmocka_unit_test(drafts_before_the_row_count_as_generated),
        cmocka_unit_test(drafts_are_the_same_as_counts),
        cmocka_unit_test(bias_comes_before_the_penalties),
        cmocka_unit_test(bias_can_ban_ids_but_not_all),
        cmocka_unit_test(edited_rows_equal_a_full_sort),
        cmocka_unit_test(logprobs_are_of_the_raw_row),
        cmocka_unit_test(logprobs_count_as_asked),
        cmocka_unit_test(draws_have_the_probabilities_of_the_model),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
