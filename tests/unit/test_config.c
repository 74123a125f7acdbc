#include "fixture.h"
#include "config.h"
#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* ---- edited configurations --------------------------------------------------------------------------------------- */

/* Sets "a.b.c" of the object to a JSON value, making objects on the way; NULL removes it. */
static void edit(json_t *root, const char *path, const char *value) {
    json_t *at = root, *parsed;
    char *copy = strdup(path), *rest = copy, *dot;

    while ((dot = strchr(rest, '.'))) {
        *dot = '\0';
        if (!json_is_object(json_object_get(at, rest)))
            json_object_set_new(at, rest, json_object());
        at = json_object_get(at, rest);
        rest = dot + 1;
    }
    if (!value) {
        json_object_del(at, rest);
    } else {
        parsed = json_loads(value, JSON_DECODE_ANY, NULL);
        assert_non_null(parsed);
        assert_int_equal(0, json_object_set_new(at, rest, parsed));
    }
    free(copy);
}

/* The file of the source tree with up to three edits: path, value pairs ended by NULL. */
static char *edited(const char *file, const char *const *edits) {
    char path[512], *text;
    json_t *root;

    snprintf(path, sizeof path, "%s/%s", SOURCE_ROOT, file);
    root = json_load_file(path, 0, NULL);
    if (!root)
        fail_msg("%s cannot be read", path);
    for (; *edits; edits += 2)
        edit(root, edits[0], strcmp(edits[1], "-") == 0 ? NULL : edits[1]);
    text = json_dumps(root, 0);
    json_decref(root);
    return text;
}

static const char dense[] = "tests/golden/dense-a/config.json", nested[] = "tests/golden/moe-a/config.json",
                  fp8[] = "tests/golden/fp8-a/config.json", draft[] = "tests/golden/dense-a-draft/config.json",
                  sliding[] = "tests/golden/dense-a-draft-sliding/config.json";

#define EDITS(...)                                                                                                     \
    (const char *const[]) {                                                                                            \
        __VA_ARGS__, NULL                                                                                              \
    }

static int parse_target(const char *file, const char *const *edits, struct qwen_config *config, struct report *report) {
    char *text = edited(file, edits);
    int r = qwen_config_parse("t/config.json", text, strlen(text), config, report);

    free(text);
    return r;
}

static int parse_draft(const char *file, const char *const *edits, enum draft_causal causal,
                       struct draft_config *config, struct report *report) {
    char *text = edited(file, edits);
    int r = draft_config_parse("d/config.json", text, strlen(text), causal, config, report);

    free(text);
    return r;
}

static struct qwen_config good_target(const char *file, const char *const *edits) {
    struct report report = {""};
    struct qwen_config config;

    if (parse_target(file, edits, &config, &report) != 0)
        fail_msg("%s", report.line);
    return config;
}

static struct draft_config good_draft(const char *file, const char *const *edits) {
    struct report report = {""};
    struct draft_config config;

    if (parse_draft(file, edits, DRAFT_CAUSAL_AUTO, &config, &report) != 0)
        fail_msg("%s", report.line);
    return config;
}

struct refusal {
    const char *path, *value; /* "-": removed */
    const char *part, *other; /* of the report */
};

static void refuse_targets(const char *file, const struct refusal *cases, size_t n) {
    for (size_t i = 0; i < n; i++) {
        struct qwen_config config = {.vocab = 1234567};
        struct report report = {""};

        if (parse_target(file, EDITS(cases[i].path, cases[i].value), &config, &report) != -EINVAL)
            fail_msg("%s = %s is not refused", cases[i].path, cases[i].value);
        assert_report(&report, "t/config.json: ", cases[i].part, cases[i].other, NULL);
        assert_int_equal(1234567, config.vocab); /* untouched */
    }
}

static void refuse_drafts(const char *file, const struct refusal *cases, size_t n) {
    for (size_t i = 0; i < n; i++) {
        struct draft_config config = {.vocab = 1234567};
        struct report report = {""};

        if (parse_draft(file, EDITS(cases[i].path, cases[i].value), DRAFT_CAUSAL_AUTO, &config, &report) != -EINVAL)
            fail_msg("%s = %s is not refused", cases[i].path, cases[i].value);
        assert_report(&report, "d/config.json: ", cases[i].part, cases[i].other, NULL);
        assert_int_equal(1234567, config.vocab);
    }
}

/* ---- targets ------------------------------------------------------------------------------------------------------ */

static void flat_target_is_read(void **state) {
    struct qwen_config c = good_target(dense, EDITS("x", "1"));

    (void)state;
    assert_int_equal(512, c.vocab);
    assert_int_equal(128, c.hidden);
    assert_int_equal(4, c.n_layers);
    assert_int_equal(LAYER_LINEAR, c.layers[2]);
    assert_int_equal(LAYER_FULL, c.layers[3]);
    assert_int_equal(256, c.intermediate);
    assert_int_equal(2, c.n_heads);
    assert_int_equal(1, c.n_kv_heads);
    assert_int_equal(256, c.head_dim);
    assert_int_equal(64, c.rotary_dim);
    assert_true(c.rope_theta == 1e7);
    assert_true(c.has_attn_gate);
    assert_int_equal(1, c.gdn_k_heads);
    assert_int_equal(2, c.gdn_v_heads);
    assert_int_equal(4, c.conv_taps);
    assert_int_equal(GATE_SILU, c.gdn_gate);
    assert_true(c.rms_eps == 1e-6);
    assert_int_equal(0, c.n_experts);
    assert_true(c.has_tied_key && !c.tied_key);
    assert_false(c.nested);
    assert_int_equal(4096, c.max_positions);
    assert_int_equal(1, c.n_eos);
    assert_int_equal(1, c.eos[0]);
    assert_false(c.fp8);
}

static void nested_target_is_read(void **state) {
    struct qwen_config c = good_target(nested, EDITS("x", "1"));

    (void)state;
    assert_true(c.nested);
    assert_int_equal(8, c.n_experts);
    assert_int_equal(2, c.top_k);
    assert_int_equal(128, c.moe_width);
    assert_int_equal(128, c.shared_width);
    assert_int_equal(0, c.intermediate);
    assert_int_equal(1, c.n_eos);
    assert_true(good_target(fp8, EDITS("x", "1")).fp8);
}

static void every_key_with_a_fallback_may_be_absent(void **state) {
    static const char text[] =
        "{\"architectures\":[\"Qwen3_5ForCausalLM\"],\"hidden_size\":1024,\"num_hidden_layers\":24,"
        "\"intermediate_size\":3584,\"num_attention_heads\":8,\"num_key_value_heads\":2,"
        "\"rope_parameters\":{\"rope_theta\":10000000}}";
    struct report report = {""};
    struct qwen_config c;

    (void)state;
    if (qwen_config_parse("c", text, strlen(text), &c, &report) != 0)
        fail_msg("%s", report.line);
    assert_int_equal(248320, c.vocab);
    assert_int_equal(256, c.head_dim);
    for (int l = 0; l < 24; l++)
        assert_int_equal((l + 1) % 4 == 0 ? LAYER_FULL : LAYER_LINEAR, c.layers[l]);
    assert_int_equal(64, c.rotary_dim);
    assert_true(c.rms_eps == 1e-6);
    assert_true(c.has_attn_gate);
    assert_int_equal(16, c.gdn_k_heads);
    assert_int_equal(32, c.gdn_v_heads);
    assert_int_equal(128, c.gdn_head_dim_k);
    assert_int_equal(128, c.gdn_head_dim_v);
    assert_int_equal(4, c.conv_taps);
    assert_int_equal(GATE_SILU, c.gdn_gate);
    assert_false(c.has_tied_key || c.tied_key || c.ambiguous_tied_key);
    assert_int_equal(262144, c.max_positions);
    assert_int_equal(0, c.n_eos);
    assert_false(c.fp8);
}

static void layer_types_win_over_the_interval(void **state) {
    struct qwen_config c = good_target(
        dense, EDITS("full_attention_interval", "2", "layer_types",
                     "[\"full_attention\",\"linear_attention\",\"linear_attention\",\"linear_attention\"]"));

    (void)state;
    assert_int_equal(LAYER_FULL, c.layers[0]);
    assert_int_equal(LAYER_LINEAR, c.layers[1]);
    c = good_target(dense, EDITS("layer_types", "-", "full_attention_interval", "2"));
    assert_int_equal(LAYER_LINEAR, c.layers[0]);
    assert_int_equal(LAYER_FULL, c.layers[1]);
    assert_int_equal(LAYER_FULL, c.layers[3]);
}

/* The places of rope_theta, first to last. */
static void target_rope_theta_is_found_in_six_layouts(void **state) {
    static const char *const places[] = {"rope_parameters.rope_theta", "rope_parameters.full_attention.rope_theta",
                                         "rope_theta", "rope_scaling.rope_theta"};
    struct qwen_config c;

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(places); i++) {
        c = good_target(dense, EDITS("rope_parameters.rope_theta", "-", places[i], "5e5"));
        assert_true(c.rope_theta == 5e5);
        for (size_t later = i + 1; later < ARRAY_LEN(places); later++) {
            c = good_target(dense, EDITS("rope_parameters.rope_theta", "-", places[i], "5e5", places[later], "7e5"));
            assert_true(c.rope_theta == 5e5);
        }
    }
    /* Without rope_parameters at all, and with everything directly in text_config as re-saved files have it. */
    c = good_target(dense, EDITS("rope_parameters", "-", "rope_theta", "10000000"));
    assert_true(c.rope_theta == 1e7);
    assert_int_equal(64, c.rotary_dim);
    c = good_target(nested, EDITS("text_config.rope_parameters", "-", "text_config.rope_theta", "2e6",
                                  "text_config.rope_type", "\"default\"", "text_config.mrope_section", "[11,11,10]",
                                  "text_config.mrope_interleaved", "true", "text_config.model_type", "\"qwen3_5\""));
    assert_true(c.rope_theta == 2e6);
}

static void rotary_share_is_found_in_its_places(void **state) {
    (void)state;
    assert_int_equal(128, good_target(dense, EDITS("rope_parameters.partial_rotary_factor", "0.5")).rotary_dim);
    assert_int_equal(
        128, good_target(dense, EDITS("rope_parameters.partial_rotary_factor", "-", "partial_rotary_factor", "0.5"))
                 .rotary_dim);
    assert_int_equal(64, good_target(dense, EDITS("rope_parameters.partial_rotary_factor", "-")).rotary_dim);
}

static void gates_and_their_two_spellings(void **state) {
    (void)state;
    assert_int_equal(GATE_SILU, good_target(dense, EDITS("output_gate_type", "\"swish\"")).gdn_gate);
    assert_int_equal(GATE_SILU, good_target(dense, EDITS("output_gate_type", "\"silu\"")).gdn_gate);
    assert_int_equal(GATE_SIGMOID, good_target(dense, EDITS("output_gate_type", "\"sigmoid\"")).gdn_gate);
    assert_false(good_target(dense, EDITS("attn_output_gate", "false")).has_attn_gate);
}

static void tied_key_counts_on_either_level(void **state) {
    struct qwen_config c =
        good_target(nested, EDITS("tie_word_embeddings", "true", "text_config.tie_word_embeddings", "-"));

    (void)state;
    assert_true(c.tied_key && c.has_tied_key);
    c = good_target(nested, EDITS("tie_word_embeddings", "-", "text_config.tie_word_embeddings", "true"));
    assert_true(c.tied_key && c.has_tied_key);
    c = good_target(nested, EDITS("tie_word_embeddings", "true", "text_config.tie_word_embeddings", "false"));
    assert_true(c.ambiguous_tied_key && !c.has_tied_key && !c.tied_key);
}

static void eos_is_one_id_or_several_on_either_level(void **state) {
    struct qwen_config c = good_target(dense, EDITS("eos_token_id", "[5, 6]"));

    (void)state;
    assert_int_equal(2, c.n_eos);
    assert_int_equal(6, c.eos[1]);
    c = good_target(nested, EDITS("text_config.eos_token_id", "null", "eos_token_id", "9"));
    assert_int_equal(1, c.n_eos);
    assert_int_equal(9, c.eos[0]);
}

static void targets_that_cannot_run_are_refused_by_name(void **state) {
    static const struct refusal flat[] = {
        {"architectures", "[\"LlamaForCausalLM\"]", "LlamaForCausalLM", "unsupported architecture"},
        {"architectures", "[]", "architectures", "one string"},
        {"architectures", "[1]", "architectures", "one string"},
        {"model_type", "\"qwen4_exp\"", "qwen4_exp", "model_type"},
        {"model_type", "7", "model_type", "string"},
        {"text_config", "[]", "text_config", "object"},
        {"vocab_size", "0", "vocab_size", "0"},
        {"vocab_size", "1.5", "vocab_size", "integer"},
        {"vocab_size", "99999999999", "vocab_size", "99999999999"},
        {"hidden_size", "-", "hidden_size", "missing"},
        {"hidden_size", "-1", "hidden_size", "-1"},
        {"hidden_size", "1000000000", "hidden_size", "1000000000"},
        {"hidden_size", "\"128\"", "hidden_size", "integer"},
        {"num_hidden_layers", "-", "num_hidden_layers", "missing"},
        {"num_hidden_layers", "257", "num_hidden_layers", "257"},
        {"num_hidden_layers", "5", "layer_types", "5"},
        {"layer_types", "\"full_attention\"", "layer_types", "array"},
        {"layer_types", "[\"linear_attention\",\"linear_attention\",\"mamba\",\"full_attention\"]", "layer_types[2]",
         "mamba"},
        {"layer_types", "[\"linear_attention\",\"linear_attention\",3,\"full_attention\"]", "layer_types[2]",
         "unsupported"},
        {"full_attention_interval", "0", "full_attention_interval", "0"},
        {"intermediate_size", "-", "intermediate_size", "missing"},
        {"intermediate_size", "0", "intermediate_size", "0"},
        {"num_attention_heads", "-", "num_attention_heads", "missing"},
        {"num_key_value_heads", "3", "num_attention_heads 2", "num_key_value_heads 3"},
        {"num_key_value_heads", "0", "num_key_value_heads", "0"},
        {"head_dim", "128", "head_dim 128", "unsupported head width"},
        {"linear_key_head_dim", "64", "linear_key_head_dim 64", "unsupported head width"},
        {"linear_value_head_dim", "256", "linear_value_head_dim 256", "unsupported head width"},
        {"linear_conv_kernel_dim", "3", "linear_conv_kernel_dim 3", "supported: 4"},
        {"linear_num_value_heads", "0", "linear_num_value_heads", "0"},
        {"linear_num_key_heads", "3", "linear_num_key_heads 3", "multiple"},
        {"attention_bias", "true", "attention_bias", "unsupported"},
        {"attention_bias", "1", "attention_bias", "true or false"},
        {"output_gate_type", "null", "output_gate_type null", "unsupported"},
        {"output_gate_type", "\"tanh\"", "tanh", "unsupported gate"},
        {"mamba_ssm_dtype", "\"bfloat16\"", "mamba_ssm_dtype", "bfloat16"},
        {"hidden_act", "\"gelu\"", "hidden_act", "gelu"},
        {"rms_norm_eps", "0", "rms_norm_eps", "0"},
        {"rms_norm_eps", "-1e-6", "rms_norm_eps", "-1e-06"},
        {"rope_parameters", "3", "rope_parameters", "object"},
        {"rope_parameters.rope_theta", "-", "rope_theta is missing", "silently wrong"},
        {"rope_parameters.rope_theta", "null", "rope_theta is missing", "silently wrong"},
        {"rope_parameters.rope_theta", "0", "rope_parameters.rope_theta", "0"},
        {"rope_parameters.rope_theta", "\"1e7\"", "rope_parameters.rope_theta", "number"},
        {"rope_parameters.rope_type", "\"yarn\"", "rope_parameters.rope_type", "yarn"},
        {"rope_parameters.full_attention.rope_type", "\"yarn\"", "rope_parameters.full_attention.rope_type", "yarn"},
        {"rope_type", "\"llama3\"", "rope_type", "llama3"},
        {"rope_scaling.type", "\"linear\"", "rope_scaling.type", "linear"},
        {"rope_scaling.rope_type", "\"dynamic\"", "rope_scaling.rope_type", "dynamic"},
        {"rope_parameters.partial_rotary_factor", "0.012", "partial_rotary_factor", "even"},
        {"rope_parameters.partial_rotary_factor", "0.0", "partial_rotary_factor", "even"},
        {"rope_parameters.partial_rotary_factor", "1.5", "partial_rotary_factor", "1.5"},
        {"num_experts", "8", "num_experts", "dense"},
        {"max_position_embeddings", "0", "max_position_embeddings", "0"},
        {"tie_word_embeddings", "\"no\"", "tie_word_embeddings", "true or false"},
        {"eos_token_id", "512", "eos_token_id", "512"},
        {"eos_token_id", "[1, -1]", "eos_token_id[1]", "-1"},
        {"eos_token_id", "[1,2,3,4,5,6,7,8,9]", "eos_token_id", "9 entries"},
        {"eos_token_id", "\"a\"", "eos_token_id", "array of integers"},
        {"quantization_config", "true", "quantization_config", "object"},
        {"compression_config.format", "\"int4\"", "compression_config", "unsupported quantisation"},
        {"hidden_act", "\"a\\nb\"", "a?b", "unsupported"},
    };
    static const struct refusal moe[] = {
        {"text_config.num_experts", "-", "text_config.num_experts", "missing"},
        {"text_config.num_experts", "100000", "text_config.num_experts", "100000"},
        {"text_config.num_experts_per_tok", "9", "text_config.num_experts_per_tok", "9"},
        {"text_config.num_experts_per_tok", "0", "text_config.num_experts_per_tok", "0"},
        {"text_config.moe_intermediate_size", "-", "text_config.moe_intermediate_size", "missing"},
        {"text_config.shared_expert_intermediate_size", "-", "shared_expert_intermediate_size", "missing"},
        {"text_config.mlp_only_layers", "[0]", "mlp_only_layers", "unsupported"},
        {"text_config.decoder_sparse_step", "2", "decoder_sparse_step", "unsupported"},
        {"text_config.model_type", "\"llama\"", "text_config.model_type", "llama"},
        {"text_config.rope_parameters.rope_theta", "-", "text_config.rope_parameters.rope_theta", "missing"},
        {"text_config.quantization_config.quant_method", "\"gptq\"", "quant_method", "gptq"},
    };
    static const struct refusal quantised[] = {
        {"quantization_config.quant_method", "\"awq\"", "quantization_config.quant_method", "awq"},
        {"quantization_config.quant_method", "-", "quantization_config.quant_method", "missing"},
        {"quantization_config.fmt", "\"e5m2\"", "quantization_config.fmt", "e5m2"},
        {"quantization_config.activation_scheme", "\"static\"", "activation_scheme", "static"},
        {"quantization_config.weight_block_size", "[64, 64]", "weight_block_size", "[128, 128]"},
        {"quantization_config.weight_block_size", "[128, 128, 1]", "weight_block_size", "3 entries"},
        {"quantization_config.weight_block_size", "null", "weight_block_size", "[128, 128]"},
    };

    (void)state;
    refuse_targets(dense, flat, ARRAY_LEN(flat));
    refuse_targets(nested, moe, ARRAY_LEN(moe));
    refuse_targets(fp8, quantised, ARRAY_LEN(quantised));
}

static void broken_text_is_refused(void **state) {
    static const struct {
        const char *text, *part;
    } cases[] = {
        {"", "line"},
        {"{", "line"},
        {"[]", "not a JSON object"},
        {"3", "line"},
        {"{\"hidden_size\":1,\"hidden_size\":2}", "duplicate"},
        {"{\"text_config\":{\"a\":1,\"a\":1}}", "duplicate"},
        {"{\"a\":1} x", "line"},
        {"{\"hidden_size\":123456789012345678901234567890}", "too big"},
        {"{\"a\":\"\xff\"}", "line"},
        {"{}", "architectures and model_type are missing"},
    };
    struct generation_config g;
    struct draft_config d;
    struct qwen_config c;

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct report report = {""};

        assert_int_equal(-EINVAL, qwen_config_parse("a/c.json", cases[i].text, strlen(cases[i].text), &c, &report));
        assert_report(&report, "a/c.json: ", cases[i].part, NULL);
        assert_int_equal(-EINVAL, draft_config_parse("a/c.json", cases[i].text, strlen(cases[i].text),
                                                     DRAFT_CAUSAL_AUTO, &d, &report));
        if (strcmp(cases[i].text, "{}") != 0)
            assert_int_equal(-EINVAL,
                             generation_config_parse("a/c.json", cases[i].text, strlen(cases[i].text), &g, &report));
    }
}

static void files_that_cannot_be_read_say_so(void **state) {
    struct report report = {""};
    struct qwen_config c;
    struct draft_config d;
    struct fixture f;

    (void)state;
    fixture_open(&f);
    assert_int_equal(-ENOENT, qwen_config_read(fixture_path(&f, "config.json"), &c, &report));
    assert_report(&report, f.folder, "config.json", "No such file", NULL);
    assert_int_equal(-ENOENT, draft_config_read(fixture_path(&f, "config.json"), DRAFT_CAUSAL_AUTO, &d, &report));
    assert_int_equal(-EINVAL, qwen_config_read(f.folder, &c, &report));
    assert_report(&report, f.folder, "not a regular file", NULL);
    assert_int_equal(0, mkfifo(fixture_path(&f, "fifo"), 0600));
    assert_int_equal(-EINVAL, qwen_config_read(fixture_path(&f, "fifo"), &c, &report));
    assert_report(&report, "fifo", "not a regular file", NULL);
    fixture_close(&f);
}

/* ---- drafters ----------------------------------------------------------------------------------------------------- */

static void drafter_is_read(void **state) {
    struct draft_config c = good_draft("tests/golden/dense-a-draft-unsorted-bias/config.json", EDITS("x", "1"));

    (void)state;
    assert_int_equal(512, c.vocab);
    assert_int_equal(128, c.hidden);
    assert_int_equal(2, c.n_layers);
    assert_int_equal(256, c.intermediate);
    assert_int_equal(4, c.n_heads);
    assert_int_equal(2, c.n_kv_heads);
    assert_int_equal(128, c.head_dim);
    assert_int_equal(128, c.rotary_dim);
    assert_true(c.rope_theta == 1e7);
    assert_true(c.has_bias);
    assert_int_equal(8, c.block_size);
    assert_int_equal(511, c.mask_id);
    assert_int_equal(3, c.n_taps);
    assert_int_equal(2, c.taps[0]); /* the order of the file */
    assert_int_equal(0, c.taps[1]);
    assert_int_equal(1, c.taps[2]);
    assert_int_equal(4, c.n_target_layers);
    assert_false(c.sliding[0] || c.sliding[1]);
    assert_int_equal(0, c.window);
    assert_string_equal("", c.warning);
}

static void both_layouts_are_read_and_the_nested_one_wins(void **state) {
    struct draft_config c =
        good_draft(draft, EDITS("dflash_config", "-", "target_layer_ids", "[2, 1]", "mask_token_id", "7"));

    (void)state;
    assert_int_equal(2, c.n_taps);
    assert_int_equal(2, c.taps[0]);
    assert_int_equal(7, c.mask_id);
    c = good_draft(draft, EDITS("target_layer_ids", "[2, 1]", "mask_token_id", "7", "dflash_config.block_size", "5",
                                "dflash_config.num_target_layers", "6"));
    assert_int_equal(3, c.n_taps);
    assert_int_equal(511, c.mask_id);
    assert_int_equal(5, c.block_size);
    assert_int_equal(6, c.n_target_layers);
    assert_int_equal(5, good_draft(draft, EDITS("block_size", "-", "dflash_config.block_size", "5")).block_size);
    assert_int_equal(-1, good_draft(draft, EDITS("num_target_layers", "-")).n_target_layers);
}

static void absent_ids_follow_the_rule_of_the_family(void **state) {
    static const int expected[] = {1, 8, 15, 22, 29};
    struct draft_config c = good_draft(draft, EDITS("dflash_config.target_layer_ids", "-", "num_target_layers", "32",
                                                    "num_hidden_layers", "5", "layer_types", "-"));

    (void)state;
    assert_int_equal(5, c.n_taps);
    assert_memory_equal(expected, c.taps, sizeof expected);
    assert_non_null(strstr(c.warning, "d/config.json: target_layer_ids"));
    c = good_draft(draft, EDITS("dflash_config.target_layer_ids", "-", "num_target_layers", "32", "num_hidden_layers",
                                "1", "layer_types", "-"));
    assert_int_equal(1, c.n_taps);
    assert_int_equal(16, c.taps[0]);
}

static void draft_rope_theta_is_found_in_six_layouts(void **state) {
    static const char *const places[] = {"rope_parameters.rope_theta", "rope_parameters.full_attention.rope_theta",
                                         "rope_theta", "rope_scaling.rope_theta"};
    struct draft_config c;

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(places); i++) {
        c = good_draft(draft, EDITS("rope_parameters.rope_theta", "-", places[i], "5e5"));
        assert_true(c.rope_theta == 5e5);
        assert_string_equal("", c.warning);
        for (size_t later = i + 1; later < ARRAY_LEN(places); later++) {
            c = good_draft(draft, EDITS("rope_parameters.rope_theta", "-", places[i], "5e5", places[later], "7e5"));
            assert_true(c.rope_theta == 5e5);
        }
    }
    c = good_draft(sliding, EDITS("rope_parameters.rope_theta", "-", "rope_parameters.full_attention.rope_theta", "3e5",
                                  "rope_parameters.sliding_attention.rope_theta", "3e5"));
    assert_true(c.rope_theta == 3e5);
    /* Nothing found: the base of plain Qwen3, and a warning that names the file. */
    c = good_draft(draft, EDITS("rope_parameters.rope_theta", "-"));
    assert_true(c.rope_theta == 1e6);
    assert_non_null(strstr(c.warning, "d/config.json"));
    assert_non_null(strstr(c.warning, "rope_theta"));
    c = good_draft(draft, EDITS("rope_parameters", "-"));
    assert_true(c.rope_theta == 1e6);
    assert_int_equal(64, good_draft(draft, EDITS("rope_parameters.partial_rotary_factor", "0.5")).rotary_dim);
}

/* A plain Qwen3 reader nulls the window unless use_sliding_window is true; the raw keys count here. */
static void sliding_layers_come_from_the_raw_keys(void **state) {
    struct draft_config c = good_draft(sliding, EDITS("use_sliding_window", "false", "max_window_layers", "28"));

    (void)state;
    assert_true(c.sliding[0] && !c.sliding[1] && c.sliding[2]);
    assert_int_equal(24, c.window);
    c = good_draft(sliding, EDITS("use_sliding_window", "-"));
    assert_true(c.sliding[0] && !c.sliding[1] && c.sliding[2]);
    /* A window that no layer uses is none. */
    c = good_draft(draft, EDITS("sliding_window", "24", "use_sliding_window", "true"));
    assert_false(c.sliding[0] || c.sliding[1]);
    assert_int_equal(0, c.window);
    c = good_draft(sliding, EDITS("sliding_window", "null"));
    assert_false(c.sliding[0] || c.sliding[2]);
    assert_non_null(strstr(c.warning, "sliding_window"));
}

static void causality_is_resolved_in_order(void **state) {
    static const struct {
        const char *is_causal, *nested_causal;
        enum draft_causal override;
        bool expected;
    } cases[] = {
        {"-", "-", DRAFT_CAUSAL_AUTO, true},        {"-", "false", DRAFT_CAUSAL_AUTO, false},
        {"-", "true", DRAFT_CAUSAL_AUTO, true},     {"false", "true", DRAFT_CAUSAL_AUTO, false},
        {"true", "false", DRAFT_CAUSAL_AUTO, true}, {"null", "false", DRAFT_CAUSAL_AUTO, false},
        {"false", "false", DRAFT_CAUSAL_YES, true}, {"true", "true", DRAFT_CAUSAL_NO, false},
        {"-", "-", DRAFT_CAUSAL_NO, false},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct report report = {""};
        struct draft_config c;

        if (parse_draft(sliding, EDITS("is_causal", cases[i].is_causal, "dflash_config.causal", cases[i].nested_causal),
                        cases[i].override, &c, &report) != 0)
            fail_msg("%s", report.line);
        assert_int_equal(cases[i].expected, c.sliding_causal);
    }
}

static void drafters_that_cannot_run_are_refused_by_name(void **state) {
    static const struct refusal cases[] = {
        {"architectures", "[\"DFlash2DraftModel\"]", "DFlash2DraftModel", "unsupported drafter"},
        {"architectures", "\"DFlashDraftModel\"", "architectures", "one string"},
        {"model_type", "\"llama\"", "model_type", "llama"},
        {"dflash_config", "[1]", "dflash_config", "object"},
        {"vocab_size", "-", "vocab_size", "missing"},
        {"hidden_size", "-", "hidden_size", "missing"},
        {"num_hidden_layers", "33", "num_hidden_layers", "33"},
        {"intermediate_size", "-", "intermediate_size", "missing"},
        {"num_attention_heads", "5", "num_attention_heads 5", "num_key_value_heads 2"},
        {"head_dim", "64", "head_dim 64", "unsupported head width"},
        {"rms_norm_eps", "2", "rms_norm_eps", "2"},
        {"hidden_act", "\"relu\"", "hidden_act", "relu"},
        {"attention_bias", "\"yes\"", "attention_bias", "true or false"},
        {"block_size", "-", "block_size", "missing"},
        {"block_size", "null", "block_size", "missing"},
        {"block_size", "0", "block_size", "0"},
        {"block_size", "17", "block_size", "17"},
        {"dflash_config.block_size", "\"8\"", "dflash_config.block_size", "integer"},
        {"dflash_config.mask_token_id", "-", "mask_token_id", "missing"},
        {"dflash_config.mask_token_id", "512", "dflash_config.mask_token_id", "512"},
        {"dflash_config.mask_token_id", "-1", "dflash_config.mask_token_id", "-1"},
        {"dflash_config.target_layer_ids", "[0, 1.5]", "target_layer_ids[1]", "integer"},
        {"dflash_config.target_layer_ids", "[0, true]", "target_layer_ids[1]", "integer"},
        {"dflash_config.target_layer_ids", "[0, 1, 0]", "target_layer_ids", "twice"},
        {"dflash_config.target_layer_ids", "[3]", "target_layer_ids[0]", "3"},
        {"dflash_config.target_layer_ids", "[-1]", "target_layer_ids[0]", "-1"},
        {"dflash_config.target_layer_ids", "[]", "target_layer_ids", "empty"},
        {"dflash_config.target_layer_ids", "2", "target_layer_ids", "array"},
        {"dflash_config.target_layer_ids", "-", "target_layer_ids is missing", "too short"},
        {"num_target_layers", "0", "num_target_layers", "0"},
        {"layer_types", "[\"full_attention\"]", "layer_types", "2"},
        {"layer_types", "[\"full_attention\",\"chunked_attention\"]", "layer_types[1]", "chunked_attention"},
        {"sliding_window", "-3", "sliding_window", "-3"},
        {"is_causal", "\"auto\"", "is_causal", "true or false"},
        {"dflash_config.causal", "2", "dflash_config.causal", "true or false"},
        {"rope_parameters.rope_type", "\"yarn\"", "rope_parameters.rope_type", "yarn"},
        {"rope_scaling.type", "\"yarn\"", "rope_scaling.type", "yarn"},
        {"is_neox_style", "false", "is_neox_style", "unsupported"},
        {"draft_vocab_size", "256", "draft_vocab_size", "unsupported"},
        {"quantization_config.quant_method", "\"gptq\"", "quant_method", "gptq"},
    };
    static const struct refusal slides[] = {
        {"layer_types", "-", "use_sliding_window", "layer_types"},
    };
    struct draft_config c;
    struct report report = {""};

    (void)state;
    refuse_drafts(draft, cases, ARRAY_LEN(cases));
    refuse_drafts(sliding, slides, ARRAY_LEN(slides));
    assert_int_equal(-EINVAL,
                     parse_draft(sliding,
                                 EDITS("rope_parameters.rope_theta", "-", "rope_parameters.full_attention.rope_theta",
                                       "1e6", "rope_parameters.sliding_attention.rope_theta", "1e4"),
                                 DRAFT_CAUSAL_AUTO, &c, &report));
    assert_report(&report, "d/config.json", "sliding_attention.rope_theta", "another layer type", NULL);
}

static void drafter_is_held_against_its_target(void **state) {
    static const struct refusal cases[] = {
        {"hidden_size", "256", "hidden_size is 256", "128"},
        {"vocab_size", "600", "vocab_size is 600", "512"},
        {"num_target_layers", "6", "num_target_layers is 6", "4"},
    };
    struct qwen_config target = good_target(dense, EDITS("x", "1"));
    struct draft_config c = good_draft(draft, EDITS("x", "1"));
    struct report report = {""};

    (void)state;
    assert_int_equal(0, draft_config_check("d/config.json", &c, &target, &report));
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        c = good_draft(draft, EDITS(cases[i].path, cases[i].value));
        assert_int_equal(-EINVAL, draft_config_check("d/config.json", &c, &target, &report));
        assert_report(&report, "d/config.json: ", cases[i].part, cases[i].other, NULL);
    }
    c = good_draft(draft, EDITS("num_target_layers", "-", "dflash_config.target_layer_ids", "[0, 3]"));
    assert_int_equal(-EINVAL, draft_config_check("d/config.json", &c, &target, &report));
    assert_report(&report, "d/config.json: ", "target_layer_ids[1] is 3", NULL);
}

/* ---- generation_config.json ---------------------------------------------------------------------------------------- */

static void generation_defaults(void **state) {
    struct generation_config c = {.n_eos = 3};
    struct report report = {""};

    (void)state;
    assert_int_equal(0, generation_config_read("/nonexistent/generation_config.json", &c, &report));
    assert_int_equal(0, c.n_eos);
    assert_false(c.do_sample);
    assert_true(c.temperature == 0 && c.top_p == 1 && c.top_k == 0);
    assert_int_equal(0, generation_config_read(SOURCE_ROOT "/share/tiny/target/generation_config.json", &c, &report));
    assert_int_equal(2, c.n_eos);
    assert_int_equal(4088, c.eos[0]);
    assert_true(c.do_sample && c.temperature == 0.7f && c.top_p == 0.8f && c.top_k == 20);
    assert_int_equal(-EINVAL, generation_config_parse("g.json", "{\"top_p\":2}", 11, &c, &report));
    assert_report(&report, "g.json: ", "top_p", NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(flat_target_is_read),
        cmocka_unit_test(nested_target_is_read),
        cmocka_unit_test(every_key_with_a_fallback_may_be_absent),
        cmocka_unit_test(layer_types_win_over_the_interval),
        cmocka_unit_test(target_rope_theta_is_found_in_six_layouts),
        cmocka_unit_test(rotary_share_is_found_in_its_places),
        cmocka_unit_test(gates_and_their_two_spellings),
        cmocka_unit_test(tied_key_counts_on_either_level),
        cmocka_unit_test(eos_is_one_id_or_several_on_either_level),
        cmocka_unit_test(targets_that_cannot_run_are_refused_by_name),
        cmocka_unit_test(broken_text_is_refused),
        cmocka_unit_test(files_that_cannot_be_read_say_so),
        cmocka_unit_test(drafter_is_read),
        cmocka_unit_test(both_layouts_are_read_and_the_nested_one_wins),
        cmocka_unit_test(absent_ids_follow_the_rule_of_the_family),
        cmocka_unit_test(draft_rope_theta_is_found_in_six_layouts),
        cmocka_unit_test(sliding_layers_come_from_the_raw_keys),
        cmocka_unit_test(causality_is_resolved_in_order),
        cmocka_unit_test(drafters_that_cannot_run_are_refused_by_name),
        cmocka_unit_test(drafter_is_held_against_its_target),
        cmocka_unit_test(generation_defaults),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
