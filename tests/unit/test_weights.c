#include "fixture.h"
#include "weights.h"
#include "checkpoint.h"
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct shard_of whole = {0, 1};

static const char *reference(const char *folder, const char *file) {
    static char path[2][512];
    static int next;
    char *p = path[next++ % 2];

    snprintf(p, sizeof path[0], "%s/%s%s%s", SOURCE_ROOT, folder, *file ? "/" : "", file);
    return p;
}

static const char *const targets[] = {"tests/golden/dense-a", "tests/golden/moe-a", "tests/golden/fp8-a",
                                      "share/tiny/target"};
static const char *const drafts[] = {"tests/golden/dense-a-draft", "tests/golden/dense-a-draft-sliding",
                                     "tests/golden/dense-a-draft-unsorted-bias", "share/tiny/draft"};

static void read_target(const char *folder, struct qwen_config *config) {
    struct report report = {""};

    if (qwen_config_read(reference(folder, "config.json"), config, &report) != 0)
        fail_msg("%s", report.line);
}

static void read_draft(const char *folder, struct draft_config *config) {
    struct report report = {""};

    if (draft_config_read(reference(folder, "config.json"), DRAFT_CAUSAL_AUTO, config, &report) != 0)
        fail_msg("%s", report.line);
}

/* Opens and loads; the report is printed by the caller. */
static int load_target(const char *folder, const struct qwen_config *config, struct report *report) {
    struct checkpoint *checkpoint = NULL;
    struct qwen_weights weights = {.n_skipped = 77};
    int r = checkpoint_open(folder, &checkpoint, report);

    if (r != 0)
        return r;
    r = qwen_weights_load(checkpoint, config, whole, &weights, report);
    if (r == 0)
        qwen_weights_deinit(&weights);
    else
        assert_int_equal(77, weights.n_skipped); /* nothing is handed out */
    checkpoint_close(checkpoint);
    return r;
}

static int load_draft(const char *folder, const struct draft_config *config, struct report *report) {
    struct checkpoint *checkpoint = NULL;
    struct draft_weights weights = {0};
    int r = checkpoint_open(folder, &checkpoint, report);

    if (r != 0)
        return r;
    r = draft_weights_load(checkpoint, config, whole, &weights, report);
    if (r == 0)
        draft_weights_deinit(&weights);
    checkpoint_close(checkpoint);
    return r;
}

static void reference_checkpoints_load(void **state) {
    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(targets); i++) {
        struct report report = {""};
        struct qwen_config config;

        read_target(targets[i], &config);
        if (load_target(reference(targets[i], ""), &config, &report) != 0)
            fail_msg("%s", report.line);
    }
    for (size_t i = 0; i < ARRAY_LEN(drafts); i++) {
        struct report report = {""};
        struct draft_config config;

        read_draft(drafts[i], &config);
        if (load_draft(reference(drafts[i], ""), &config, &report) != 0)
            fail_msg("%s", report.line);
    }
}

/* ---- whole or nothing ---------------------------------------------------------------------------------------------- */

static void refuse_target(struct fixture *f, const struct qwen_config *config, const char *tensor, const char *reason) {
    struct report report = {""};

    fixture_save(f);
    if (load_target(f->folder, config, &report) != -EINVAL)
        fail_msg("not refused: %s %s", tensor, reason);
    assert_report(&report, f->folder, "/model.safetensors: ", tensor, reason, NULL);
}

static void refuse_draft(struct fixture *f, const struct draft_config *config, const char *tensor, const char *reason) {
    struct report report = {""};

    fixture_save(f);
    if (load_draft(f->folder, config, &report) != -EINVAL)
        fail_msg("not refused: %s %s", tensor, reason);
    assert_report(&report, f->folder, "/model.safetensors: ", tensor, reason, NULL);
}

static bool is_skipped_name(const char *name) {
    return strncmp(name, "model.visual.", 13) == 0 || strncmp(name, "mtp.", 4) == 0;
}

/* The name that a refusal must have when `name` is gone: a scale's absence shows at its weight, a lone fc decides the prefix. */
static void weight_of(const char *name, char *out, size_t n_out) {
    char *scale;

    snprintf(out, n_out, "%s: ", name);
    scale = strstr(out, "_scale_inv: ");
    if (scale)
        strcpy(scale, ": ");
}

static void any_dropped_or_renamed_tensor_of_a_target_is_refused(void **state) {
    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(targets) - 1; i++) { /* the tiny target has the same tensors as dense-a */
        struct qwen_config config;
        struct fixture f;

        read_target(targets[i], &config);
        fixture_open(&f);
        fixture_load_folder(&f, reference(targets[i], ""));
        for (int k = 0; k < f.n_tensors; k++) {
            struct fixture_tensor kept = f.tensors[k];
            char name[240];

            if (is_skipped_name(kept.name))
                continue;
            weight_of(kept.name, name, sizeof name);
            f.tensors[k] = f.tensors[--f.n_tensors];
            refuse_target(&f, &config, name, strstr(kept.name, "_scale_inv") ? "dtype is F8_E4M3" : "missing");
            f.tensors[f.n_tensors++] = f.tensors[k];
            f.tensors[k] = kept;
            snprintf(f.tensors[k].name, sizeof f.tensors[k].name, "model.renamed%d", k);
            refuse_target(&f, &config, name, "");
            f.tensors[k] = kept;
        }
        fixture_close(&f);
    }
}

static void any_dropped_or_renamed_tensor_of_a_drafter_is_refused(void **state) {
    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(drafts) - 1; i++) {
        struct draft_config config;
        struct fixture f;

        read_draft(drafts[i], &config);
        fixture_open(&f);
        fixture_load_folder(&f, reference(drafts[i], ""));
        for (int k = 0; k < f.n_tensors; k++) {
            struct fixture_tensor kept = f.tensors[k];
            char name[240];

            weight_of(kept.name, name, sizeof name);
            f.tensors[k] = f.tensors[--f.n_tensors];
            refuse_draft(&f, &config, name, "missing");
            f.tensors[f.n_tensors++] = f.tensors[k];
            f.tensors[k] = kept;
            snprintf(f.tensors[k].name, sizeof f.tensors[k].name, "renamed%d", k);
            refuse_draft(&f, &config, name, "missing");
            f.tensors[k] = kept;
        }
        fixture_close(&f);
    }
}

static void an_extra_tensor_is_refused(void **state) {
    static const uint64_t dims[] = {4, 0};
    static const char *const extra[] = {"model.layers.0.self_attn.q_proj.weight",
                                        "model.layers.4.input_layernorm.weight", "model.layers.0.mlp.gate_proj.bias",
                                        "model.norm.weight_scale_inv", "x"};
    struct qwen_config config;
    struct fixture f;

    (void)state;
    read_target(targets[0], &config);
    fixture_open(&f);
    fixture_load_folder(&f, reference(targets[0], ""));
    for (size_t i = 0; i < ARRAY_LEN(extra); i++) {
        fixture_add(&f, "F32", dims, extra[i]);
        refuse_target(&f, &config, extra[i], "unexpected tensor");
        fixture_drop(&f, extra[i]);
    }
    fixture_close(&f);
}

static void skipped_tensors_are_counted(void **state) {
    static const uint64_t dims[] = {4, 0};
    struct checkpoint *checkpoint = NULL;
    struct report report = {""};
    struct qwen_weights weights;
    struct qwen_config config;
    struct fixture f;

    (void)state;
    read_target("tests/golden/moe-a", &config);
    fixture_open(&f);
    fixture_load_folder(&f, reference("tests/golden/moe-a", ""));
    fixture_add(&f, "I16", dims, "model.language_model.layers.3.self_attn.rotary_emb.inv_freq");
    fixture_save(&f);
    assert_int_equal(0, checkpoint_open(f.folder, &checkpoint, &report));
    if (qwen_weights_load(checkpoint, &config, whole, &weights, &report) != 0)
        fail_msg("%s", report.line);
    assert_int_equal(3, weights.n_skipped);
    assert_int_equal(32 + 32 + 8, weights.skipped_bytes);
    qwen_weights_deinit(&weights);
    checkpoint_close(checkpoint);
    fixture_close(&f);
}

static void wrong_shapes_and_types_are_refused(void **state) {
    static const char name[] = "model.layers.0.linear_attn.in_proj_qkv.weight";
    static const char scale[] = "model.layers.0.linear_attn.in_proj_qkv.weight_scale_inv";
    struct qwen_config config;
    struct fixture_tensor *t, kept;
    struct fixture f;

    (void)state;
    read_target("tests/golden/fp8-a", &config);
    fixture_open(&f);
    fixture_load_folder(&f, reference("tests/golden/fp8-a", ""));
    t = fixture_find(&f, name);
    kept = *t;
    t->dims[0] = 256; /* transposed: as many bytes */
    t->dims[1] = 512;
    refuse_target(&f, &config, name, "shape is [256, 512], expected [512, 256]");
    *t = kept;
    t->n_dims = 1;
    t->dims[0] = 512 * 256;
    refuse_target(&f, &config, name, "shape is [131072], expected [512, 256]");
    *t = kept;
    strcpy(t->dtype, "U8");
    refuse_target(&f, &config, name, "dtype is U8, expected F8_E4M3");
    *t = kept;
    strcpy(t->dtype, "F8_E5M2");
    refuse_target(&f, &config, name, "dtype is F8_E5M2");
    *t = kept;
    t = fixture_find(&f, scale);
    kept = *t;
    t->dims[0] = 2;
    t->dims[1] = 4;
    refuse_target(&f, &config, scale, "shape is [2, 4], expected [4, 2]");
    *t = kept;
    strcpy(t->dtype, "I32");
    refuse_target(&f, &config, scale, "dtype is I32, expected F32 or BF16");
    *t = kept;
    t = fixture_find(&f, "model.embed_tokens.weight");
    strcpy(t->dtype, "I16");
    refuse_target(&f, &config, "model.embed_tokens.weight", "dtype is I16, expected BF16, F16 or F32");
    strcpy(t->dtype, "BF16");
    t = fixture_find(&f, "model.layers.0.linear_attn.conv1d.weight");
    t->dims[1] = 4;
    t->dims[2] = 1;
    refuse_target(&f, &config, "conv1d.weight", "shape is [512, 4, 1], expected [512, 1, 4]");
    fixture_close(&f);
}

static void values_that_are_not_finite_are_refused(void **state) {
    static const struct {
        const char *folder, *name;
        uint32_t bits;
    } cases[] = {
        {"tests/golden/dense-a", "model.layers.0.linear_attn.A_log", 0x7f800000},
        {"tests/golden/dense-a", "model.layers.0.linear_attn.norm.weight", 0xffc00001},
        {"tests/golden/dense-a", "lm_head.weight", 0x7f80},
        {"tests/golden/dense-a", "model.embed_tokens.weight", 0xffc0},
        {"tests/golden/dense-a", "model.layers.3.mlp.down_proj.weight", 0x7f81},
        {"tests/golden/fp8-a", "model.layers.0.mlp.up_proj.weight", 0x7f},
        {"tests/golden/fp8-a", "model.layers.3.self_attn.o_proj.weight", 0xff},
        {"tests/golden/fp8-a", "model.layers.3.self_attn.o_proj.weight_scale_inv", 0x7f800000},
        {"tests/golden/fp8-a", "model.layers.0.mlp.up_proj.weight_scale_inv", 0x7fc00000},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct qwen_config config;
        struct fixture_tensor *t;
        char element[64];
        struct fixture f;
        size_t size, n;

        read_target(cases[i].folder, &config);
        fixture_open(&f);
        fixture_load_folder(&f, reference(cases[i].folder, ""));
        t = fixture_find(&f, cases[i].name);
        size = t->dtype[0] == 'B' ? 2 : t->dtype[1] == '8' ? 1 : 4;
        n = t->bytes / size;
        for (int place = 0; place < 3; place++) { /* first, somewhere, last */
            size_t at = place == 0 ? 0 : place == 1 ? n * 2 / 3 : n - 1;
            uint32_t kept = 0;

            memcpy(&kept, t->data + at * size, size);
            memcpy(t->data + at * size, &cases[i].bits, size); /* little-endian */
            snprintf(element, sizeof element, ": element %zu is NaN or infinite", at);
            refuse_target(&f, &config, cases[i].name, element);
            memcpy(t->data + at * size, &kept, size);
        }
        fixture_close(&f);
    }
}

/* ---- ways of storing one network ------------------------------------------------------------------------------------ */

struct loaded {
    struct fixture f;
    struct checkpoint *checkpoint;
    struct qwen_weights w;
};

static void store(struct loaded *l, const struct qwen_config *config, struct fixture_style style) {
    struct report report = {""};

    fixture_open(&l->f);
    fixture_add_target(&l->f, config, &style);
    fixture_save(&l->f);
    if (checkpoint_open(l->f.folder, &l->checkpoint, &report) != 0 ||
        qwen_weights_load(l->checkpoint, config, whole, &l->w, &report) != 0)
        fail_msg("%s", report.line);
}

static void discard(struct loaded *l) {
    qwen_weights_deinit(&l->w);
    checkpoint_close(l->checkpoint);
    fixture_close(&l->f);
}

static void element_types_hold_the_same_values(void **state) {
    static const char *const dtypes[] = {"F32", "BF16", "F16"};
    struct qwen_config config = fixture_odd_config(false);
    struct loaded loaded[3];

    (void)state;
    for (int i = 0; i < 3; i++)
        store(&loaded[i], &config, (struct fixture_style){.dtype = dtypes[i]});
    for (int i = 1; i < 3; i++) {
        assert_same_tensor(&loaded[0].w.lm_head, &loaded[i].w.lm_head);
        assert_same_tensor(&loaded[0].w.layers[0].in_qkv[1], &loaded[i].w.layers[0].in_qkv[1]);
        assert_same_tensor(&loaded[0].w.layers[0].conv, &loaded[i].w.layers[0].conv);
        assert_same_tensor(&loaded[0].w.layers[0].a_log, &loaded[i].w.layers[0].a_log);
        assert_same_tensor(&loaded[0].w.layers[1].q, &loaded[i].w.layers[1].q);
    }
    assert_false(loaded[0].w.tied);
    for (int i = 0; i < 3; i++)
        discard(&loaded[i]);
}

/* 192 columns and 320 rows: the last block is cut short in both directions. */
static void ragged_fp8_blocks_take_their_scales(void **state) {
    struct qwen_config config = fixture_odd_config(false);
    struct loaded f32, bf16;

    (void)state;
    store(&f32, &config, (struct fixture_style){.dtype = "BF16", .fp8 = true, .scale_dtype = "F32"});
    store(&bf16, &config, (struct fixture_style){.dtype = "BF16", .fp8 = true, .scale_dtype = "BF16"});
    {
        const struct fixture_tensor *q = fixture_find(&f32.f, "model.layers.0.mlp.gate_proj.weight");
        const struct fixture_tensor *s = fixture_find(&f32.f, "model.layers.0.mlp.gate_proj.weight_scale_inv");
        const struct tensor *gate = &f32.w.layers[0].gate;

        assert_int_equal(2, gate->scale_cols);
        assert_int_equal(3, s->dims[0]);
        for (int row = 0; row < 320; row++)
            for (int col = 0; col < 192; col++) {
                float scale;

                memcpy(&scale, s->data + 4 * (row / 128 * 2 + col / 128), 4);
                assert_true(tensor_at(gate, row, col) == e4m3_to_f32(q->data[row * 192 + col]) * scale);
            }
    }
    assert_same_tensor(&f32.w.layers[0].down, &bf16.w.layers[0].down);
    assert_same_tensor(&f32.w.layers[0].in_qkv[2], &bf16.w.layers[0].in_qkv[2]);
    assert_null(f32.w.layers[0].in_b.scale);
    discard(&f32);
    discard(&bf16);
}

/* The fused tensors cut by hand are the tensors apart. */
static void fused_and_separate_experts_are_the_same(void **state) {
    struct qwen_config config = fixture_odd_config(true);

    (void)state;
    for (int fp8 = 0; fp8 < 2; fp8++) {
        struct fixture_style style = {.dtype = "BF16", .fp8 = fp8, .scale_dtype = "F32"};
        struct loaded fused, apart;
        size_t size = fp8 ? 1 : 2;

        config.moe_width = fp8 ? 128 : 64; /* a scale block may not hold both gate and up rows */
        store(&fused, &config, style);
        style.per_expert = true;
        fixture_open(&apart.f);
        fixture_add_target(&apart.f, &config, &style);
        for (int l = 0; l < 2; l++)
            for (int e = 0; e < 3; e++)
                for (int k = 0; k < 3; k++)
                    for (int scale = 0; scale <= fp8; scale++) {
                        static const char *const parts[] = {"gate", "up", "down"};
                        struct fixture_tensor *from, *to;
                        char name[128];

                        snprintf(name, sizeof name, "model.layers.%d.mlp.experts.%s_proj%s", l,
                                 k < 2 ? "gate_up" : "down", scale ? "_scale_inv" : "");
                        from = fixture_find(&fused.f, name);
                        snprintf(name, sizeof name, "model.layers.%d.mlp.experts.%d.%s_proj.weight%s", l, e, parts[k],
                                 scale ? "_scale_inv" : "");
                        to = fixture_find(&apart.f, name);
                        memcpy(to->data, from->data + (k < 2 ? (size_t)(2 * e + k) : (size_t)e) * to->bytes, to->bytes);
                    }
        fixture_save(&apart.f);
        {
            struct report report = {""};

            if (checkpoint_open(apart.f.folder, &apart.checkpoint, &report) != 0 ||
                qwen_weights_load(apart.checkpoint, &config, whole, &apart.w, &report) != 0)
                fail_msg("%s", report.line);
        }
        for (int l = 0; l < 2; l++)
            for (int e = 0; e < 3; e++) {
                assert_same_tensor(&fused.w.layers[l].experts[e].gate, &apart.w.layers[l].experts[e].gate);
                assert_same_tensor(&fused.w.layers[l].experts[e].up, &apart.w.layers[l].experts[e].up);
                assert_same_tensor(&fused.w.layers[l].experts[e].down, &apart.w.layers[l].experts[e].down);
            }
        assert_int_equal(size, dtype_bytes(fused.w.layers[0].experts[2].up.dtype));
        discard(&fused);
        discard(&apart);
    }
}

static void separate_experts_must_be_complete(void **state) {
    struct qwen_config config = fixture_odd_config(true);
    struct fixture_style style = {.dtype = "BF16", .per_expert = true};
    static const char *const names[] = {"model.layers.0.mlp.experts.0.gate_proj.weight",
                                        "model.layers.1.mlp.experts.2.down_proj.weight",
                                        "model.layers.1.mlp.experts.1.up_proj.weight"};

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(names); i++) {
        struct fixture f;

        fixture_open(&f);
        fixture_add_target(&f, &config, &style);
        fixture_drop(&f, names[i]);
        refuse_target(&f, &config, names[i], "missing");
        fixture_close(&f);
    }
    {
        struct fixture f;

        fixture_open(&f);
        fixture_add_target(&f, &config, &style);
        config.n_experts = 2; /* the router of three is then wrong too */
        refuse_target(&f, &config, "mlp.gate.weight", "shape is [3, 192], expected [2, 192]");
        fixture_close(&f);
    }
}

static void fused_fp8_experts_of_odd_width_are_refused(void **state) {
    struct qwen_config config = fixture_odd_config(true);
    struct fixture f;

    (void)state;
    fixture_open(&f);
    fixture_add_target(&f, &config, &(struct fixture_style){.dtype = "BF16", .fp8 = true, .scale_dtype = "F32"});
    refuse_target(&f, &config, "experts.gate_up_proj", "FP8 blocks of 128 cannot be cut");
    fixture_close(&f);
}

static void the_head_is_tied_if_absent_and_the_key_must_agree(void **state) {
    struct qwen_config config = fixture_odd_config(false);
    struct report report = {""};
    struct loaded l;
    struct fixture f;

    (void)state;
    config.has_tied_key = config.tied_key = true;
    store(&l, &config, (struct fixture_style){.dtype = "BF16", .tied = true});
    assert_true(l.w.tied);
    assert_ptr_equal(l.w.embed.data, l.w.lm_head.data);
    discard(&l);
    fixture_open(&f);
    fixture_add_target(&f, &config, &(struct fixture_style){.dtype = "BF16", .tied = true});
    config.tied_key = false;
    refuse_target(&f, &config, "lm_head.weight: ", "tie_word_embeddings is false");
    config.has_tied_key = false;
    refuse_target(&f, &config, "lm_head.weight: ", "does not say tie_word_embeddings");
    config.ambiguous_tied_key = true;
    assert_int_equal(0, load_target(f.folder, &config, &report));
    fixture_add(&f, "BF16", (const uint64_t[]){777, 192, 0}, "lm_head.weight");
    fixture_save(&f);
    assert_int_equal(0, load_target(f.folder, &config, &report));
    config.ambiguous_tied_key = false;
    assert_int_equal(0, load_target(f.folder, &config, &report));
    config.has_tied_key = config.tied_key = true;
    refuse_target(&f, &config, "lm_head.weight: ", "present, but tie_word_embeddings is true");
    fixture_close(&f);
}

/* ---- drafters ------------------------------------------------------------------------------------------------------- */

static void a_model_prefix_is_stripped(void **state) {
    struct draft_config config;
    struct report report = {""};
    struct fixture f;

    (void)state;
    read_draft(drafts[2], &config);
    fixture_open(&f);
    fixture_load_folder(&f, reference(drafts[2], ""));
    for (int i = 0; i < f.n_tensors; i++) {
        char name[201];

        snprintf(name, sizeof name, "%s", f.tensors[i].name);
        snprintf(f.tensors[i].name, sizeof f.tensors[i].name, "model.%.190s", name);
    }
    fixture_save(&f);
    if (load_draft(f.folder, &config, &report) != 0)
        fail_msg("%s", report.line);
    fixture_drop(&f, "model.norm.weight");
    refuse_draft(&f, &config, "model.norm.weight: ", "missing");
    fixture_close(&f);
}

static void foreign_parts_of_drafters_are_refused_by_name(void **state) {
    static const struct {
        const char *name, *reason;
    } cases[] = {
        {"embed_tokens.weight", "an embedding of its own"},
        {"model.embed_tokens.weight", "an embedding of its own"},
        {"lm_head.weight", "an output head of its own"},
        {"d2t", "a vocabulary of its own"},
        {"t2d", "a vocabulary of its own"},
        {"mask_embedding", "a mask embedding"},
        {"layers.0.self_attn.sinks", "attention sinks"},
        {"layers.0.self_attn.q_proj.bias", "unexpected tensor"},
        {"layers.2.input_layernorm.weight", "unexpected tensor"},
    };
    struct report report = {""};
    struct draft_config config;
    struct fixture f;

    (void)state;
    read_draft(drafts[0], &config);
    fixture_open(&f);
    fixture_load_folder(&f, reference(drafts[0], ""));
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        fixture_add(&f, "BF16", (const uint64_t[]){8, 0}, cases[i].name);
        refuse_draft(&f, &config, cases[i].name, cases[i].reason);
        fixture_drop(&f, cases[i].name);
    }
    fixture_write(&f, "mask_embedding.pt", "x", 1);
    fixture_save(&f);
    assert_int_equal(-EINVAL, load_draft(f.folder, &config, &report));
    assert_report(&report, f.folder, "/mask_embedding.pt: ", "unsupported", NULL);
    fixture_close(&f);
}

static void fc_must_be_as_wide_as_its_taps(void **state) {
    struct draft_config config;
    struct fixture f;

    (void)state;
    read_draft(drafts[0], &config);
    fixture_open(&f);
    fixture_load_folder(&f, reference(drafts[0], ""));
    config.n_taps = 2;
    refuse_draft(&f, &config, "fc.weight: ", "shape is [128, 384], expected [128, 256]");
    config.n_taps = 3;
    config.has_bias = true;
    refuse_draft(&f, &config, "layers.0.self_attn.q_proj.bias: ", "missing");
    fixture_close(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reference_checkpoints_load),
        cmocka_unit_test(any_dropped_or_renamed_tensor_of_a_target_is_refused),
        cmocka_unit_test(any_dropped_or_renamed_tensor_of_a_drafter_is_refused),
        cmocka_unit_test(an_extra_tensor_is_refused),
        cmocka_unit_test(skipped_tensors_are_counted),
        cmocka_unit_test(wrong_shapes_and_types_are_refused),
        cmocka_unit_test(values_that_are_not_finite_are_refused),
        cmocka_unit_test(element_types_hold_the_same_values),
        cmocka_unit_test(ragged_fp8_blocks_take_their_scales),
        cmocka_unit_test(fused_and_separate_experts_are_the_same),
        cmocka_unit_test(separate_experts_must_be_complete),
        cmocka_unit_test(fused_fp8_experts_of_odd_width_are_refused),
        cmocka_unit_test(the_head_is_tied_if_absent_and_the_key_must_agree),
        cmocka_unit_test(a_model_prefix_is_stripped),
        cmocka_unit_test(foreign_parts_of_drafters_are_refused_by_name),
        cmocka_unit_test(fc_must_be_as_wide_as_its_taps),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
