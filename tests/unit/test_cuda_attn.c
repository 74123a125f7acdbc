/* qk, attn and draft_kv of the CUDA backend against the CPU's oracle. Everything in a page that a row may not see is NaN. */
#include "cuda_rig.h"

enum { LAYER = 1, N_LAYERS = 2, N_SEGS = 2 };

static struct rig rig;

static int teardown(void **state) {
    (void)state;
    rig_clear(&rig);
    return 0;
}

struct geometry {
    int heads, kv_heads, dim;
};
struct pages {
    struct kv_view view[N_SIDES];
    struct buf *arena;
    int n_pages_max;
    size_t page_bytes;
};

/* Pages of both slots at shuffled places; all bytes are 0xff, which is NaN in every element type, but the null page. */
static struct pages pages_new(struct geometry g, enum dtype dtype, int n_tokens, float k_scale, float v_scale) {
    const int n_max = n_tokens / PAGE_TOKENS + 1, n = 1 + N_SEGS * n_max;
    const float scales[2 * N_LAYERS] = {99, k_scale, 99, v_scale};
    struct pages p = {.n_pages_max = n_max, .page_bytes = kv_page_bytes(dtype, N_LAYERS, g.kv_heads, g.dim)};
    int32_t *table = malloc((size_t)(N_SEGS * n_max) * sizeof *table);
    char *poison = malloc((size_t)n * p.page_bytes);
    struct buf *table_buf, *scale_buf;

    for (int i = 0; i < N_SEGS * n_max; i++)
        table[i] = 1 + (i * 7 + 3) % (N_SEGS * n_max); /* a permutation unless 7 divides the count */
    if (N_SEGS * n_max % 7 == 0)
        for (int i = 0; i < N_SEGS * n_max; i++)
            table[i] = N_SEGS * n_max - i;
    memset(poison, 0xff, (size_t)n * p.page_bytes);
    memset(poison, 0, p.page_bytes);
    p.arena = rig_new(&rig, (size_t)n * p.page_bytes, 1, 1);
    rig_set_bytes(&rig, p.arena, poison, (size_t)n * p.page_bytes);
    table_buf = rig_words(&rig, table, (size_t)(N_SEGS * n_max));
    scale_buf = rig_words(&rig, scales, 2 * N_LAYERS);
    for (int i = 0; i < N_SIDES; i++)
        p.view[i] = (struct kv_view){.dtype = dtype,
                                     .n_layers = N_LAYERS,
                                     .n_kv_heads = g.kv_heads,
                                     .head_dim = g.dim,
                                     .arena = p.arena->mem[i],
                                     .page_bytes = p.page_bytes,
                                     .table = table_buf->mem[i],
                                     .n_pages_max = n_max,
                                     .k_scale = scale_buf->mem[i],
                                     .v_scale = (float *)scale_buf->mem[i] + N_LAYERS};
    free(table);
    free(poison);
    return p;
}

struct projection {
    struct buf *qkv, *q, *q_norm, *k_norm, *inv_freq, *block_k, *block_v;
    int stride;
};

/* Runs qk on both sides over fresh rows. */
static struct projection project(struct geometry g, struct rig_batch *batch, struct pages *pages, bool has_gate) {
    const size_t rows = (size_t)batch->side[CPU].n_rows_max, d = (size_t)g.dim;
    const int stride = (g.heads * (has_gate ? 2 : 1) + 2 * g.kv_heads) * g.dim + 8, rotary = g.dim / 4;
    float freq[128];
    struct projection p = {.stride = stride};

    for (int i = 0; i < rotary / 2; i++)
        freq[i] = powf(10000.0f, -2.0f * (float)i / (float)rotary);
    p.inv_freq = rig_words(&rig, freq, (size_t)rotary / 2);
    p.qkv = rig_floats(&rig, rows * (size_t)stride, 2, true);
    p.q_norm = rig_floats(&rig, d, 2, false);
    p.k_norm = rig_floats(&rig, d, 2, false);
    p.q = rig_poison(&rig, rows * (size_t)g.heads * d, true);
    p.block_k = rig_poison(&rig, rows * (size_t)g.kv_heads * d, true);
    p.block_v = rig_poison(&rig, rows * (size_t)g.kv_heads * d, true);
    for (int i = 0; i < N_SIDES; i++)
        RIG_RUN(&rig, i, qk,
                (&(struct qk_args){.batch = &batch->side[i],
                                   .qkv = p.qkv->mem[i],
                                   .qkv_stride = stride,
                                   .n_heads = g.heads,
                                   .n_kv_heads = g.kv_heads,
                                   .head_dim = g.dim,
                                   .has_gate = has_gate,
                                   .q_norm = p.q_norm->mem[i],
                                   .k_norm = p.k_norm->mem[i],
                                   .eps = 1e-6f,
                                   .rope = {p.inv_freq->mem[i], rotary},
                                   .q = p.q->mem[i],
                                   .kv = pages ? &pages->view[i] : NULL,
                                   .layer = LAYER,
                                   .block_k = p.block_k->mem[i],
                                   .block_v = p.block_v->mem[i]}));
    return p;
}

/* The pages of both sides become those of the CPU, so that attention is judged by itself. */
static void pages_equal(struct pages *pages) {
    char *bytes = malloc(pages->arena->bytes[CPU]);

    rig_copy(&rig.side[CPU], pages->arena->mem[CPU], bytes, pages->arena->bytes[CPU], false);
    rig_copy(&rig.side[GPU], pages->arena->mem[GPU], bytes, pages->arena->bytes[GPU], true);
    free(bytes);
}

static struct buf *attend(struct geometry g, struct rig_batch *batch, struct pages *pages, struct projection *p,
                          bool has_gate, bool use_block, bool causal, int window, struct buf *ctl) {
    const size_t n = (size_t)batch->side[CPU].n_rows_max * (size_t)(g.heads * g.dim);
    struct buf *out = rig_poison(&rig, n, true);
    float *q = rig_get(&rig, p->q, CPU);

    rig_set(&rig, p->q, q);
    free(q);
    for (int i = 0; i < N_SIDES; i++) {
        size_t act = i == CPU ? 4 : 2;

        RIG_RUN(&rig, i, attn,
                (&(struct attn_args){.batch = &batch->side[i],
                                     .q = p->q->mem[i],
                                     .n_heads = g.heads,
                                     .n_kv_heads = g.kv_heads,
                                     .head_dim = g.dim,
                                     .gate = has_gate ? (char *)p->qkv->mem[i] + (size_t)g.dim * act : NULL,
                                     .gate_stride = p->stride,
                                     .gate_head_stride = 2 * g.dim,
                                     .kv = &pages->view[i],
                                     .layer = LAYER,
                                     .block_k = use_block ? p->block_k->mem[i] : NULL,
                                     .block_v = use_block ? p->block_v->mem[i] : NULL,
                                     .block_causal = causal,
                                     .window = window,
                                     .ctl = ctl ? ctl->mem[i] : NULL,
                                     .out = out->mem[i]}));
    }
    return out;
}

/* Fills both slots' pages with len[slot] tokens, in chunks of 64, through qk. */
static void fill(struct geometry g, struct pages *pages, const int *len, bool has_gate) {
    for (int at = 0; at < len[0] || at < len[1]; at += 512) {
        int n[N_SEGS], pos[N_SEGS] = {at, at};

        for (int s = 0; s < N_SEGS; s++) /* slots are in falling order */
            n[s] = max_int(0, min_int(512, len[N_SEGS - 1 - s] - at));
        if (n[0] == 0 || n[1] == 0) { /* a seg has rows: the shorter one is written once more, with its last row */
            for (int s = 0; s < N_SEGS; s++)
                if (n[s] == 0) {
                    n[s] = 1;
                    pos[s] = len[N_SEGS - 1 - s] - 1;
                }
        }
        struct rig_batch batch = rig_batch(&rig, N_SEGS, n, pos, NULL, 1024);

        project(g, &batch, pages, has_gate);
    }
}

static void qk_agrees_in_every_element_type(void **state) {
    static const enum dtype dtypes[] = {DTYPE_BF16, DTYPE_F16, DTYPE_E4M3};
    const struct geometry g = {4, 2, 128};

    (void)state;
    for (size_t t = 0; t < ARRAY_LEN(dtypes); t++) {
        struct pages pages = pages_new(g, dtypes[t], 300, 0.5f, 2);
        struct rig_batch batch = rig_batch(&rig, N_SEGS, (int[]){5, 70}, (int[]){60, 200}, NULL, 80);
        struct projection p = project(g, &batch, &pages, true);
        char *want = malloc(pages.arena->bytes[CPU]), *got = malloc(pages.arena->bytes[CPU]);
        size_t n_differ = 0, n_written = 0;

        rig_compare(&rig, p.q, 0, 75 * 4 * 128, 2e-3, "qk, q");
        rig_copy(&rig.side[CPU], pages.arena->mem[CPU], want, pages.arena->bytes[CPU], false);
        rig_copy(&rig.side[GPU], pages.arena->mem[GPU], got, pages.arena->bytes[CPU], false);
        for (size_t i = 0; i < pages.arena->bytes[CPU]; i++) {
            n_differ += want[i] != got[i];
            n_written += want[i] != (char)0xff && want[i] != 0;
        }
        /* A value next to a rounding boundary may fall to either side. */
        printf("qk, pages in %s: %zu of %zu bytes differ\n", dtype_name(dtypes[t]), n_differ, n_written);
        assert_true(n_written > 75 * 2 * 2 * 128 / 2 && n_differ < n_written / 100);
        free(want);
        free(got);
        rig_clear(&rig);
    }
}

struct verify_case {
    struct geometry g;
    enum dtype dtype;
    int len[N_SEGS], n_rows[N_SEGS]; /* by slot */
    int window;
    bool has_gate;
    int n_rows_max;
};

static void context_attention_agrees(void **state) {
    static const struct verify_case cases[] = {
        {{4, 1, 256}, DTYPE_BF16, {1, 2}, {1, 1}, 0, true, 8},
        {{4, 1, 256}, DTYPE_BF16, {65, 1040}, {1, 16}, 0, true, 32},
        {{6, 1, 256}, DTYPE_BF16, {130, 2100}, {16, 16}, 0, true, 64},
        {{8, 2, 256}, DTYPE_E4M3, {63, 700}, {7, 16}, 0, false, 32},
        {{4, 2, 128}, DTYPE_F16, {64, 129}, {2, 16}, 0, false, 32},
        {{4, 2, 128}, DTYPE_BF16, {500, 1500}, {4, 12}, 100, false, 32},
        {{4, 2, 64}, DTYPE_BF16, {500, 1500}, {100, 200}, 0, false, 400},
        {{4, 1, 256}, DTYPE_BF16, {520, 1300}, {150, 250}, 0, true, 500},
    };

    (void)state;
    for (size_t c = 0; c < ARRAY_LEN(cases); c++) {
        const struct verify_case *v = &cases[c];
        struct pages pages = pages_new(v->g, v->dtype, max_int(v->len[0], v->len[1]) + 64, 0.5f, 0.25f);
        int n[N_SEGS] = {v->n_rows[1], v->n_rows[0]}, pos[N_SEGS] = {v->len[1] - n[0], v->len[0] - n[1]};
        struct rig_batch batch;
        struct projection p;
        struct buf *out;
        char what[96];

        fill(v->g, &pages, v->len, v->has_gate);
        batch = rig_batch(&rig, N_SEGS, n, pos, NULL, v->n_rows_max);
        p = project(v->g, &batch, &pages, v->has_gate);
        pages_equal(&pages);
        out = attend(v->g, &batch, &pages, &p, v->has_gate, false, false, v->window, NULL);
        snprintf(what, sizeof what, "attn %d/%d x %d %s, %d and %d keys", v->g.heads, v->g.kv_heads, v->g.dim,
                 dtype_name(v->dtype), v->len[0], v->len[1]);
        rig_compare(&rig, out, 0, (size_t)((n[0] + n[1]) * v->g.heads * v->g.dim), 4e-3, what);
        rig_clear(&rig);
    }
}

static void draft_attention_agrees(void **state) {
    static const struct {
        int window;
        bool causal;
        int valid_from;
    } cases[] = {
        {0, false, 0}, {0, false, 100}, {200, true, 0}, {200, false, 1100}, {10, true, 0}, {0, false, 1300},
    };
    const struct geometry g = {4, 2, 128};
    const int len[N_SEGS] = {1300, 70};

    (void)state;
    for (size_t c = 0; c < ARRAY_LEN(cases); c++) {
        struct pages pages = pages_new(g, DTYPE_BF16, 1400, 1, 1);
        struct seq_ctl ctl[N_SEGS] = {{.draft_valid_from = cases[c].valid_from}, {.draft_valid_from = 3}};
        struct buf *ctl_buf = rig_words(&rig, ctl, sizeof ctl / 4), *out;
        struct rig_batch batch;
        struct projection p;

        fill(g, &pages, len, false);
        pages_equal(&pages);
        batch = rig_batch(&rig, N_SEGS, (int[]){16, 16}, (int[]){len[1], len[0]}, NULL, 32);
        p = project(g, &batch, NULL, false);
        out = attend(g, &batch, &pages, &p, false, true, cases[c].causal, cases[c].window, ctl_buf);
        rig_compare(&rig, out, 0, (size_t)(32 * g.heads * g.dim), 4e-3, "attn, draft block");
        rig_clear(&rig);
    }
}

/* ---- bits: the same keys, cut for CTAs in every way --------------------------------------------------------------- */

/* Plain values in the first len[slot] tokens of each slot, on the GPU; all else stays NaN. */
static void fill_at_random(struct geometry g, struct pages *pages, const int *len) {
    const enum dtype dtype = pages->view[GPU].dtype;
    const size_t n_table = (size_t)(N_SEGS * pages->n_pages_max), bytes = pages->arena->bytes[GPU];
    const size_t elem = dtype_bytes(dtype), row = (size_t)g.dim * elem, tile = PAGE_TOKENS * row;
    const size_t layer_bytes = kv_layer_bytes(&pages->view[GPU]);
    int32_t *table = malloc(n_table * sizeof *table);
    char *image = malloc(bytes);

    rig_copy(&rig.side[GPU], (void *)(uintptr_t)pages->view[GPU].table, table, n_table * sizeof *table, false);
    rig_copy(&rig.side[GPU], pages->arena->mem[GPU], image, bytes, false);
    for (int slot = 0; slot < N_SEGS; slot++)
        for (int t = 0; t < len[slot]; t++) {
            char *page = image + (size_t)table[slot * pages->n_pages_max + t / PAGE_TOKENS] * pages->page_bytes +
                         LAYER * layer_bytes + (size_t)(t % PAGE_TOKENS) * row;

            for (int i = 0; i < 2 * g.kv_heads; i++)
                for (int d = 0; d < g.dim; d++) {
                    char *at = page + (size_t)i * tile + (size_t)d * elem;
                    float v = rig_random(&rig) * 2;
                    uint32_t bits;

                    memcpy(&bits, &v, sizeof bits);
                    if (dtype == DTYPE_E4M3)
                        *at = (char)((bits >> 24 & 0x80) | 0x20 | (bits >> 4 & 0x1f)); /* 0.03 to 1.9 */
                    else
                        memcpy(at,
                               &(uint16_t){dtype == DTYPE_BF16
                                               ? bf16_from_f32(v)
                                               : (uint16_t)((bits >> 16 & 0x8000) | 0x3000 | (bits & 0xfff))},
                               2);
                }
        }
    rig_copy(&rig.side[GPU], pages->arena->mem[GPU], image, bytes, true);
    free(table);
    free(image);
}

/* Runs the op on the GPU once, or over the pieces one after the other. What is returned is the caller's. */
static float *attend_in_pieces(struct attn_args args, const struct attn_spans *pieces, int n_pieces) {
    const struct side *side = &rig.side[GPU];
    const size_t n = (size_t)args.batch->n_rows_max * (size_t)(args.n_heads * args.head_dim);
    struct buf *out = rig_poison(&rig, n, true);
    struct buf *spans = n_pieces > 0 ? rig_words(&rig, pieces, 2) : NULL;
    struct program *program;

    args.out = out->mem[GPU];
    args.spans = spans ? spans->mem[GPU] : NULL;
    assert_int_equal(side->backend->program_begin(side->device, &program), 0);
    assert_int_equal(side->backend->program_cut(program), 0);
    assert_int_equal(side->backend->attn(program, &args), 0);
    assert_int_equal(side->backend->program_cut(program), 0);
    assert_int_equal(side->backend->program_end(program), 0);
    for (int i = 0; i < max_int(n_pieces, 1); i++) {
        if (spans)
            rig_set_bytes(&rig, spans, &pieces[i], sizeof pieces[i]);
        assert_int_equal(side->backend->program_run_part(side->stream, program, 1), 0);
        assert_int_equal(backend_stream_wait(side->backend, side->stream), 0);
    }
    side->backend->program_free(program);
    return rig_get(&rig, out, GPU);
}

static void assert_same_bits(const float *want, const float *got, size_t n, const char *what) {
    size_t n_differ = 0, n_not_finite = 0, n_zero = 0;

    for (size_t i = 0; i < n; i++) {
        n_differ += memcmp(&want[i], &got[i], sizeof want[i]) != 0;
        n_not_finite += isfinite(want[i]) ? 0 : 1;
        n_zero += want[i] == 0;
    }
    printf("%-72s %zu of %zu differ\n", what, n_differ, n);
    assert_int_equal(n_differ, 0);
    assert_int_equal(n_not_finite, 0); /* written, by both, */
    assert_true(n_zero < n / 8);       /* from keys */
}

struct cut_case {
    struct geometry g;
    enum dtype dtype;
    int len[N_SEGS], n_rows[N_SEGS]; /* by slot; the second may have no rows */
    int window;
    bool has_own, is_causal; /* the seg's own block rows behind len tokens of context; else the last of them */
    int valid_from;
};

/* A program that is run over pieces of spans is not cut: its CTAs run through all blocks. With 256 heads of 64 a batch is cut
 * into blocks up to 387 rows times blocks: 1 row up to 24,768 keys, 7 rows up to 3,520, 16 rows up to 1,536. */
static void every_cut_gives_the_same_bits(void **state) {
    static const struct cut_case cases[] = {
        {{24, 4, 256}, DTYPE_BF16, .len = {1, 0}, .n_rows = {1, 0}},
        {{24, 4, 256}, DTYPE_BF16, .len = {63, 0}, .n_rows = {1, 0}},
        {{24, 4, 256}, DTYPE_BF16, .len = {64, 65}, .n_rows = {1, 1}},
        {{24, 4, 256}, DTYPE_BF16, .len = {64, 0}, .n_rows = {16, 0}},
        {{24, 4, 256}, DTYPE_BF16, .len = {65, 0}, .n_rows = {16, 0}},
        {{24, 4, 256}, DTYPE_BF16, .len = {79, 128}, .n_rows = {16, 7}},
        {{24, 4, 256}, DTYPE_BF16, .len = {1023, 1024}, .n_rows = {1, 1}},
        {{24, 4, 256}, DTYPE_BF16, .len = {1025, 1040}, .n_rows = {1, 16}},
        {{24, 4, 256}, DTYPE_BF16, .len = {1030, 2050}, .n_rows = {16, 7}},
        {{24, 4, 256}, DTYPE_E4M3, .len = {1025, 127}, .n_rows = {16, 1}},
        {{24, 4, 256}, DTYPE_F16, .len = {1100, 129}, .n_rows = {7, 16}},
        {{16, 4, 256}, DTYPE_BF16, .len = {700, 1029}, .n_rows = {100, 100}},
        {{16, 4, 256}, DTYPE_BF16, .len = {300, 1029}, .n_rows = {130, 200}}, /* more rows than are cut */
        {{8, 2, 256}, DTYPE_BF16, .len = {3000, 2000}, .n_rows = {1, 16}, .window = 1000},
        {{8, 2, 256}, DTYPE_BF16, .len = {1100, 70}, .n_rows = {16, 16}, .window = 10},
        {{256, 1, 64}, DTYPE_BF16, .len = {1536, 0}, .n_rows = {16, 0}}, /* blocks, and the next one spans */
        {{256, 1, 64}, DTYPE_BF16, .len = {1537, 0}, .n_rows = {16, 0}},
        {{256, 1, 64}, DTYPE_BF16, .len = {3520, 0}, .n_rows = {7, 0}},
        {{256, 1, 64}, DTYPE_E4M3, .len = {3521, 0}, .n_rows = {7, 0}},
        {{256, 1, 64}, DTYPE_BF16, .len = {24768, 0}, .n_rows = {1, 0}},
        {{256, 1, 64}, DTYPE_BF16, .len = {24769, 0}, .n_rows = {1, 0}},
        {{256, 1, 64}, DTYPE_BF16, .len = {3000, 100}, .n_rows = {8, 8}}, /* one seg in spans, one in blocks */
        {{4, 1, 64}, DTYPE_F16, .len = {32767, 0}, .n_rows = {1, 0}},     /* 512 blocks, and one more */
        {{4, 1, 64}, DTYPE_BF16, .len = {32769, 0}, .n_rows = {1, 0}},
        {{256, 1, 64}, DTYPE_BF16, .len = {20400, 20400}, .n_rows = {100, 100}}, /* no room for the second */
        {{32, 8, 128}, DTYPE_BF16, .len = {1300, 70}, .n_rows = {16, 16}, .has_own = true},
        {{32, 8, 128}, DTYPE_BF16, .len = {1024, 64}, .n_rows = {16, 1}, .has_own = true, .is_causal = true},
        {{32, 8, 128}, DTYPE_BF16, .len = {1300, 2048}, .n_rows = {16, 16}, .has_own = true, .valid_from = 100},
        {{32, 8, 128},
         DTYPE_BF16,
         .len = {5000, 70},
         .n_rows = {16, 7},
         .has_own = true,
         .valid_from = 1300}, /* 70 sees none of it */
        {{32, 8, 128},
         DTYPE_BF16,
         .len = {5000, 2047},
         .n_rows = {16, 7},
         .has_own = true,
         .is_causal = true,
         .window = 2048},
        {{32, 8, 128},
         DTYPE_BF16,
         .len = {1100, 1030},
         .n_rows = {16, 16},
         .has_own = true,
         .is_causal = true,
         .window = 5},
        {{8, 2, 128}, DTYPE_BF16, .len = {20000, 63}, .n_rows = {16, 16}, .has_own = true},
        {{4, 1, 64},
         DTYPE_BF16,
         .len = {130, 1030},
         .n_rows = {100, 70},
         .has_own = true}, /* own rows of more than a block */
    };
    static const struct attn_spans all[] = {{0, ATTN_SPANS_END}}, two[] = {{0, 1}, {1, ATTN_SPANS_END}},
                                   more[] = {{0, 1}, {1, 2}, {2, 19}, {19, ATTN_SPANS_END}};

    (void)state;
    for (size_t c = 0; c < ARRAY_LEN(cases); c++) {
        const struct cut_case *v = &cases[c];
        const struct geometry g = v->g;
        const int n_segs = v->n_rows[1] > 0 ? 2 : 1, n_all = v->n_rows[0] + v->n_rows[1];
        const size_t n = (size_t)n_all * (size_t)(g.heads * g.dim), n_own = (size_t)(n_all * g.kv_heads * g.dim);
        struct pages pages = pages_new(g, v->dtype, max_int(v->len[0], v->len[1]) + 1, 0.5f, 0.25f);
        struct seq_ctl ctl[N_SEGS] = {{.draft_valid_from = v->valid_from}, {.draft_valid_from = v->valid_from}};
        int rows[N_SEGS], pos[N_SEGS];
        struct rig_batch batch;
        struct attn_args args;
        float *cut, *whole;
        char what[128];

        for (int i = 0; i < n_segs; i++) { /* slots are in falling order */
            rows[i] = v->n_rows[n_segs - 1 - i];
            pos[i] = v->len[n_segs - 1 - i] - (v->has_own ? 0 : rows[i]);
        }
        fill_at_random(g, &pages, v->len);
        batch = rig_batch(&rig, n_segs, rows, pos, NULL, n_all);
        args = (struct attn_args){.batch = &batch.side[GPU],
                                  .q = rig_floats(&rig, n, 2, true)->mem[GPU],
                                  .n_heads = g.heads,
                                  .n_kv_heads = g.kv_heads,
                                  .head_dim = g.dim,
                                  .gate = rig_floats(&rig, n, 2, true)->mem[GPU],
                                  .gate_stride = g.heads * g.dim,
                                  .gate_head_stride = g.dim,
                                  .kv = &pages.view[GPU],
                                  .layer = LAYER,
                                  .block_k = v->has_own ? rig_floats(&rig, n_own, 1, true)->mem[GPU] : NULL,
                                  .block_v = v->has_own ? rig_floats(&rig, n_own, 1, true)->mem[GPU] : NULL,
                                  .block_causal = v->is_causal,
                                  .window = v->window,
                                  .ctl = v->has_own ? rig_words(&rig, ctl, sizeof ctl / 4)->mem[GPU] : NULL};
        cut = attend_in_pieces(args, NULL, 0);
        for (int i = 0; i < 3; i++) {
            const struct attn_spans *const pieces = i == 0 ? all : i == 1 ? two : more;

            whole = attend_in_pieces(args, pieces, (int[]){1, 2, 4}[i]);
            snprintf(what, sizeof what, "cut %d/%d x %d %s, %d and %d rows, %d and %d keys, %d runs", g.heads,
                     g.kv_heads, g.dim, dtype_name(v->dtype), v->n_rows[0], v->n_rows[1], v->len[0], v->len[1],
                     (int[]){1, 2, 4}[i]);
            assert_same_bits(cut, whole, n, what);
            free(whole);
        }
        free(cut);
        rig_clear(&rig);
    }
}

/* The last row of a context alone, in blocks of 7 and 16, and in a prefill of more rows than are cut. */
static void a_row_has_the_same_bits_in_every_block(void **state) {
    static const struct {
        struct geometry g;
        enum dtype dtype;
        int len;
    } cases[] = {
        {{6, 1, 256}, DTYPE_BF16, 2300}, {{6, 1, 256}, DTYPE_BF16, 2304}, {{6, 1, 256}, DTYPE_BF16, 2305},
        {{4, 2, 256}, DTYPE_E4M3, 1024}, {{4, 2, 128}, DTYPE_F16, 1025},  {{256, 1, 64}, DTYPE_BF16, 1537},
        {{4, 1, 64}, DTYPE_BF16, 320},
    };
    static const int n_rows_max[] = {1, 7, 16, 300, 300}, n_rows[] = {1, 7, 16, 16, 300};

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        const struct geometry g = cases[i].g;
        const int len = cases[i].len;
        const size_t row = (size_t)(g.heads * g.dim);
        struct pages pages = pages_new(g, cases[i].dtype, len, 0.5f, 0.25f);
        float *q = rig_randoms(&rig, 300 * row, 2), *first = NULL;

        fill_at_random(g, &pages, (int[]){len, 0});
        for (size_t c = 0; c < ARRAY_LEN(n_rows); c++) {
            const int n = n_rows[c];
            struct rig_batch batch = rig_batch(&rig, 1, &n, (int[]){len - n}, NULL, n_rows_max[c]);
            struct buf *q_at = rig_new(&rig, (size_t)n * row, 4, 2); /* the last rows */
            float *got;
            char what[64];

            rig_set(&rig, q_at, q + (size_t)(300 - n) * row);
            got = attend_in_pieces((struct attn_args){.batch = &batch.side[GPU],
                                                      .q = q_at->mem[GPU],
                                                      .n_heads = g.heads,
                                                      .n_kv_heads = g.kv_heads,
                                                      .head_dim = g.dim,
                                                      .kv = &pages.view[GPU],
                                                      .layer = LAYER},
                                   NULL, 0);
            snprintf(what, sizeof what, "row %d of %d/%d x %d, among %d", len - 1, g.heads, g.kv_heads, g.dim, n);
            if (first)
                assert_same_bits(first, got + (size_t)(n - 1) * row, row, what);
            else
                first = memcpy(malloc(row * sizeof *first), got, row * sizeof *first);
            if (n > 1) /* a comparison that would pass for any row proves nothing */
                assert_memory_not_equal(first, got + (size_t)(n - 2) * row, row * sizeof *first);
            free(got);
        }
        free(first);
        free(q);
        rig_clear(&rig);
    }
}

/* Three runs over a span each, the pages of the first span read from the ring, and one run over all of them. */
static void spans_one_by_one_have_the_bits_of_all_at_once(void **state) {
    enum { N_ROWS = 16, LEN = 2300, N_RING = SPAN_TOKENS / PAGE_TOKENS };
    static const struct attn_spans pieces[] = {{0, 1}, {1, 2}, {2, ATTN_SPANS_END}};
    const struct geometry g = {6, 1, 256};
    struct pages pages = pages_new(g, DTYPE_BF16, 2400, 1, 1);
    struct buf *q = rig_floats(&rig, (size_t)(N_ROWS * g.heads * g.dim), 2, true);
    const size_t layer_bytes = kv_layer_bytes(&pages.view[GPU]), n_table = (size_t)(N_SEGS * pages.n_pages_max);
    struct buf *ring = rig_new(&rig, N_RING * layer_bytes, 1, 1);
    struct rig_batch batch = rig_batch(&rig, 1, (int[]){N_ROWS}, (int[]){LEN - N_ROWS}, NULL, N_ROWS);
    const struct side *side = &rig.side[GPU];
    int32_t *entries = malloc(n_table * sizeof *entries);
    struct kv_view streamed = pages.view[GPU];
    struct attn_args args = {.batch = &batch.side[GPU],
                             .q = q->mem[GPU],
                             .n_heads = g.heads,
                             .n_kv_heads = g.kv_heads,
                             .head_dim = g.dim,
                             .kv = &pages.view[GPU],
                             .layer = LAYER};
    float *want, *got;

    (void)state;
    fill(g, &pages, (int[]){LEN, LEN}, false);
    want = attend_in_pieces(args, NULL, 0);

    rig_copy(&rig.side[GPU], (void *)(uintptr_t)streamed.table, entries, n_table * sizeof *entries, false);
    for (int i = 0; i < N_RING; i++) {
        const char *segment =
            (char *)streamed.arena + (size_t)entries[i] * streamed.page_bytes + (size_t)LAYER * layer_bytes;

        assert_int_equal(
            side->backend->copy(side->stream, (char *)ring->mem[GPU] + (size_t)i * layer_bytes, segment, layer_bytes),
            0);
        entries[i] = ~i;
    }
    streamed.table = rig_words(&rig, entries, n_table)->mem[GPU];
    streamed.ring = ring->mem[GPU];
    args.kv = &streamed;
    got = attend_in_pieces(args, pieces, ARRAY_LEN(pieces));
    assert_same_bits(want, got, q->n, "pages of the first span in the ring, 3 runs");
    free(got);
    got = attend_in_pieces(args, NULL, 0);
    assert_same_bits(want, got, q->n, "pages of the first span in the ring, cut");
    free(want);
    free(got);
    free(entries);
}

static void parts_are_run_by_number(void **state) {
    const struct side *side = &rig.side[GPU];
    struct program *program;

    (void)state;
    assert_int_equal(side->backend->program_begin(side->device, &program), 0);
    assert_int_equal(side->backend->program_cut(program), 0);
    assert_int_equal(side->backend->program_end(program), 0);
    assert_int_equal(side->backend->program_run_part(side->stream, program, 1), 0);
    assert_int_equal(side->backend->program_run_part(side->stream, program, 2), -EINVAL);
    side->backend->program_free(program);
}

static void draft_kv_writes_committed_rows(void **state) {
    const struct geometry g = {4, 2, 128};
    struct pages full = pages_new(g, DTYPE_BF16, 200, 1, 1), sliding = pages_new(g, DTYPE_BF16, 200, 1, 1);
    struct rig_batch batch = rig_batch(&rig, N_SEGS, (int[]){16, 40}, (int[]){60, 100}, (int[]){0, SEG_PREFILL}, 64);
    struct buf *rows = rig_floats(&rig, 64 * 2 * 2 * 2 * 128, 1, false), *norm = rig_floats(&rig, 128, 1, false);
    struct buf *commit = rig_words(&rig, (int32_t[]){5, 0}, 2);
    float freq[64];
    struct buf *inv_freq;
    const struct pages *const both[] = {&full, &sliding};

    (void)state;
    for (int i = 0; i < 64; i++)
        freq[i] = powf(10000.0f, -(float)i / 64.0f);
    inv_freq = rig_words(&rig, freq, 64);
    for (int i = 0; i < N_SIDES; i++) {
        const struct draft_kv_layer layers[] = {{&full.view[i], 1, norm->mem[i]}, {&sliding.view[i], 0, norm->mem[i]}};

        RIG_RUN(&rig, i, draft_kv,
                (&(struct draft_kv_args){.batch = &batch.side[i],
                                         .kv_rows = rows->mem[i],
                                         .n_layers = 2,
                                         .n_kv_heads = 2,
                                         .head_dim = 128,
                                         .eps = 1e-6f,
                                         .rope = {inv_freq->mem[i], 128},
                                         .seg_commit = commit->mem[i],
                                         .layers = layers}));
    }
    for (int k = 0; k < 2; k++) {
        size_t bytes = both[k]->arena->bytes[CPU], n_differ = 0, n_written = 0;
        uint16_t *want = malloc(bytes), *got = malloc(bytes);

        rig_copy(&rig.side[CPU], both[k]->arena->mem[CPU], want, bytes, false);
        rig_copy(&rig.side[GPU], both[k]->arena->mem[GPU], got, bytes, false);
        for (size_t i = both[k]->page_bytes / 2; i < bytes / 2; i++) {
            assert_int_equal(want[i] == 0xffff, got[i] == 0xffff);
            n_written += want[i] != 0xffff;
            n_differ += want[i] != got[i];
        }
        printf("draft_kv: %zu of %zu elements differ\n", n_differ, n_written);
        assert_int_equal(n_written, (5 + 40) * 2 * 2 * 128);
        assert_true(n_differ < n_written / 100);
        free(want);
        free(got);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(qk_agrees_in_every_element_type, teardown),
        cmocka_unit_test_teardown(context_attention_agrees, teardown),
        cmocka_unit_test_teardown(draft_attention_agrees, teardown),
        cmocka_unit_test_teardown(every_cut_gives_the_same_bits, teardown),
        cmocka_unit_test_teardown(a_row_has_the_same_bits_in_every_block, teardown),
        cmocka_unit_test_teardown(spans_one_by_one_have_the_bits_of_all_at_once, teardown),
        cmocka_unit_test_teardown(parts_are_run_by_number, teardown),
        cmocka_unit_test_teardown(draft_kv_writes_committed_rows, teardown),
    };
    int failed;

    rig_open(&rig);
    failed = cmocka_run_group_tests(tests, NULL, NULL);
    rig_close(&rig);
    return failed;
}
