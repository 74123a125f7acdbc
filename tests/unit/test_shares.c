#include "fixture.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { RANKS = 2, WHOLE = RANKS }; /* index of the undivided load */

struct shares {
    struct fixture f;
    struct checkpoint *checkpoint;
    struct qwen_weights w[RANKS + 1];
};

static struct shard_of shard(int i) {
    return i == WHOLE ? (struct shard_of){0, 1} : (struct shard_of){i, RANKS};
}

static void share(struct shares *s, const struct qwen_config *config, const struct fixture_style *style) {
    struct report report = {""};

    fixture_open(&s->f);
    fixture_add_target(&s->f, config, style);
    fixture_save(&s->f);
    if (checkpoint_open(s->f.folder, &s->checkpoint, &report) != 0)
        fail_msg("%s", report.line);
    for (int i = 0; i <= RANKS; i++)
        if (qwen_weights_load(s->checkpoint, config, shard(i), &s->w[i], &report) != 0)
            fail_msg("%s", report.line);
}

static void discard(struct shares *s) {
    for (int i = 0; i <= RANKS; i++)
        qwen_weights_deinit(&s->w[i]);
    checkpoint_close(s->checkpoint);
    fixture_close(&s->f);
}

/* The shares side by side, in rows or in columns, are the whole. */
static void expect_rows(const struct tensor *whole, const struct tensor *first, const struct tensor *second) {
    struct tensor upper = tensor_rows(*whole, 0, first->n_rows);
    struct tensor lower = tensor_rows(*whole, first->n_rows, whole->n_rows - first->n_rows);

    assert_true(whole->n_rows > 0);
    assert_int_equal(whole->n_rows, first->n_rows + second->n_rows);
    assert_int_equal(first->n_rows, second->n_rows);
    assert_same_tensor(&upper, first);
    assert_same_tensor(&lower, second);
}

static void expect_cols(const struct tensor *whole, const struct tensor *first, const struct tensor *second) {
    struct tensor left = tensor_cols(*whole, 0, first->n_cols);
    struct tensor right = tensor_cols(*whole, first->n_cols, whole->n_cols - first->n_cols);

    assert_true(whole->n_cols > 0);
    assert_int_equal(whole->n_cols, first->n_cols + second->n_cols);
    assert_int_equal(first->n_cols, second->n_cols);
    assert_same_tensor(&left, first);
    assert_same_tensor(&right, second);
}

#define ROWS(field) expect_rows(&w[WHOLE]->field, &w[0]->field, &w[1]->field)
#define COLS(field) expect_cols(&w[WHOLE]->field, &w[0]->field, &w[1]->field)
#define EACH(field)                                                                                                    \
    do {                                                                                                               \
        assert_same_tensor(&w[WHOLE]->field, &w[0]->field);                                                            \
        assert_same_tensor(&w[WHOLE]->field, &w[1]->field);                                                            \
    } while (0)

static void expect_shares(struct shares *s, const struct qwen_config *config) {
    for (int l = 0; l < config->n_layers; l++) {
        const struct qwen_layer_weights *w[RANKS + 1];

        for (int i = 0; i <= RANKS; i++)
            w[i] = &s->w[i].layers[l];
        EACH(input_norm);
        EACH(post_norm);
        if (config->layers[l] == LAYER_FULL) {
            ROWS(q);
            ROWS(k);
            ROWS(v);
            COLS(o);
            EACH(q_norm);
        } else {
            for (int k = 0; k < 3; k++) {
                ROWS(in_qkv[k]);
                ROWS(conv_qkv[k]);
            }
            ROWS(in_z);
            ROWS(in_b);
            ROWS(in_a);
            COLS(a_log);
            COLS(dt_bias);
            COLS(gdn_out);
            EACH(gdn_norm);
        }
        if (config->n_experts == 0) {
            ROWS(gate);
            ROWS(up);
            COLS(down);
            continue;
        }
        EACH(router);
        EACH(shared_router);
        ROWS(shared_gate);
        ROWS(shared_up);
        COLS(shared_down);
        for (int e = 0; e < config->n_experts; e++) {
            ROWS(experts[e].gate);
            ROWS(experts[e].up);
            COLS(experts[e].down);
        }
    }
    assert_same_tensor(&s->w[WHOLE].embed, &s->w[0].embed);
    assert_same_tensor(&s->w[WHOLE].lm_head, &s->w[1].lm_head);
}

/* The three row blocks of in_proj_qkv and conv1d lie one after the other in the file. */
static void expect_blocks(const struct shares *s, const struct qwen_config *config) {
    const struct qwen_layer_weights *w = &s->w[WHOLE].layers[0];
    int k = config->gdn_k_heads * 128, v = config->gdn_v_heads * 128;

    assert_int_equal(2 * k + v, w->conv.n_rows);
    assert_ptr_equal((const char *)w->in_qkv[0].data + (size_t)k * w->in_qkv[0].row_bytes, w->in_qkv[1].data);
    assert_ptr_equal((const char *)w->in_qkv[1].data + (size_t)k * w->in_qkv[1].row_bytes, w->in_qkv[2].data);
    assert_ptr_equal((const char *)w->conv.data + (size_t)(2 * k) * w->conv.row_bytes, w->conv_qkv[2].data);
    assert_int_equal(k, w->in_qkv[0].n_rows);
    assert_int_equal(k, w->in_qkv[1].n_rows);
    assert_int_equal(v, w->in_qkv[2].n_rows);
}

static void shares_of_a_dense_target_make_the_whole(void **state) {
    struct qwen_config config = fixture_odd_config(false);
    struct shares s;

    (void)state;
    share(&s, &config, &(struct fixture_style){.dtype = "BF16"});
    expect_shares(&s, &config);
    expect_blocks(&s, &config);
    discard(&s);
    config.has_attn_gate = false;
    share(&s, &config, &(struct fixture_style){.dtype = "F32"});
    expect_shares(&s, &config);
    discard(&s);
}

static void shares_of_experts_make_the_whole(void **state) {
    struct qwen_config config = fixture_odd_config(true);
    struct shares s;

    (void)state;
    for (int apart = 0; apart < 2; apart++) {
        share(&s, &config, &(struct fixture_style){.dtype = "BF16", .per_expert = apart});
        expect_shares(&s, &config);
        discard(&s);
    }
}

static void shares_of_fp8_blocks_make_the_whole(void **state) {
    struct qwen_config config = fixture_odd_config(false);
    struct shares s;

    (void)state;
    config.intermediate = 512;
    share(&s, &config, &(struct fixture_style){.dtype = "BF16", .fp8 = true, .scale_dtype = "BF16"});
    expect_shares(&s, &config);
    expect_blocks(&s, &config);
    discard(&s);
    config = fixture_odd_config(true);
    config.moe_width = config.shared_width = 256;
    for (int apart = 0; apart < 2; apart++) {
        share(&s, &config,
              &(struct fixture_style){.dtype = "BF16", .fp8 = true, .scale_dtype = "F32", .per_expert = apart});
        expect_shares(&s, &config);
        discard(&s);
    }
}

static void refuse(const struct qwen_config *config, const struct fixture_style *style, struct shard_of of,
                   const char *tensor, const char *reason) {
    struct checkpoint *checkpoint = NULL;
    struct qwen_weights weights;
    struct report report = {""};
    struct fixture f;

    fixture_open(&f);
    fixture_add_target(&f, config, style);
    fixture_save(&f);
    assert_int_equal(0, checkpoint_open(f.folder, &checkpoint, &report));
    assert_int_equal(-EINVAL, qwen_weights_load(checkpoint, config, of, &weights, &report));
    assert_report(&report, f.folder, tensor, reason, NULL);
    checkpoint_close(checkpoint);
    fixture_close(&f);
}

static void what_ranks_cannot_share_is_refused(void **state) {
    const struct fixture_style plain = {.dtype = "BF16"};
    const struct fixture_style fp8 = {.dtype = "BF16", .fp8 = true, .scale_dtype = "F32"};
    struct qwen_config config = fixture_odd_config(false);

    (void)state;
    refuse(&config, &plain, (struct shard_of){0, 4}, "num_attention_heads 6", "4 ranks");
    refuse(&config, &plain, (struct shard_of){2, 3}, "num_key_value_heads 2", "3 ranks");
    config.intermediate = 321;
    refuse(&config, &plain, (struct shard_of){0, 2}, "intermediate_size 321", "2 ranks");
    config.intermediate = 320; /* 160 each, which no scale block ends at */
    refuse(&config, &fp8, (struct shard_of){0, 2}, "mlp.gate_proj.weight: ", "shares of 160 rows");
    refuse(&config, &fp8, (struct shard_of){1, 2}, "mlp.gate_proj.weight: ", "FP8 blocks of 128");
    config = fixture_odd_config(true);
    config.moe_width = 65;
    refuse(&config, &plain, (struct shard_of){1, 2}, "moe_intermediate_size 65", "2 ranks");
    config.moe_width = 64;
    config.shared_width = 193;
    refuse(&config, &plain, (struct shard_of){1, 2}, "shared_expert_intermediate_size 193", "2 ranks");
}

static void shares_of_a_drafter_make_the_whole(void **state) {
    static const char folder[] = SOURCE_ROOT "/tests/golden/dense-a-draft-unsorted-bias";
    struct checkpoint *checkpoint = NULL;
    struct draft_weights weights[RANKS + 1];
    struct report report = {""};
    struct draft_config config;

    (void)state;
    if (draft_config_read(SOURCE_ROOT "/tests/golden/dense-a-draft-unsorted-bias/config.json", DRAFT_CAUSAL_AUTO,
                          &config, &report) != 0 ||
        checkpoint_open(folder, &checkpoint, &report) != 0)
        fail_msg("%s", report.line);
    for (int i = 0; i <= RANKS; i++)
        if (draft_weights_load(checkpoint, &config, shard(i), &weights[i], &report) != 0)
            fail_msg("%s", report.line);
    for (int l = 0; l < config.n_layers; l++) {
        const struct draft_layer_weights *w[RANKS + 1];

        for (int i = 0; i <= RANKS; i++)
            w[i] = &weights[i].layers[l];
        ROWS(q);
        ROWS(k);
        ROWS(v);
        COLS(o);
        ROWS(gate);
        ROWS(up);
        COLS(down);
        COLS(q_bias);
        COLS(k_bias);
        COLS(v_bias);
        EACH(input_norm);
        EACH(k_norm);
        /* Ranks are summed: only one of them adds the bias of the output. */
        assert_same_tensor(&w[WHOLE]->o_bias, &w[0]->o_bias);
        assert_null(w[1]->o_bias.data);
    }
    for (int i = 0; i <= RANKS; i++)
        draft_weights_deinit(&weights[i]);
    checkpoint_close(checkpoint);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shares_of_a_dense_target_make_the_whole), cmocka_unit_test(shares_of_experts_make_the_whole),
        cmocka_unit_test(shares_of_fp8_blocks_make_the_whole),     cmocka_unit_test(what_ranks_cannot_share_is_refused),
        cmocka_unit_test(shares_of_a_drafter_make_the_whole),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
