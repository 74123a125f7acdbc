/* need: what a pass must read, held against the published sizes of the checkpoints. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <cmocka.h>

#include "need.h"

static const struct shape {
    const char *target, *draft;
    double n_params, n_draft_params; /* of the text model, a tied matrix once; of the drafter, norms included */
    bool is_tied;
    int kv_bytes; /* of a token */
} shapes[] = {
    {"qwen3.5-0.8b", NULL, 0.752e9, 0, true, 12 << 10},
    {"qwen3.5-2b", NULL, 1.882e9, 0, true, 12 << 10},
    {"qwen3.5-4b", "qwen3.5-4b-dflash", 4.206e9, 634425856, true, 32 << 10},
    {"qwen3.5-9b", "qwen3.5-9b-dflash", 8.954e9, 1291904512, false, 32 << 10},
    {"qwen3.5-27b", "qwen3.5-27b-dflash", 26.90e9, 2128682496, false, 64 << 10},
    {"qwen3.5-35b-a3b", "qwen3.5-35b-a3b-dflash", 34.66e9, 385906176, false, 20 << 10},
};

static struct model_info inspect(const struct shape *shape) {
    static const struct backend_caps caps = {.act_dtype = DTYPE_BF16, .conv_dtype = DTYPE_BF16};
    struct model_options options = {.dummy = true, .kv_dtype = DTYPE_BF16, .draft_dtype = DTYPE_BF16};
    char target[4096], draft[4096];
    struct report report = {""};
    struct model_info info;

    snprintf(target, sizeof target, SHAPES "/%s", shape->target);
    options.target_folder = target;
    if (shape->draft) {
        snprintf(draft, sizeof draft, SHAPES "/%s", shape->draft);
        options.draft_folder = draft;
    }
    if (model_inspect(&options, &caps, &info, &report) != 0)
        fail_msg("%s", report.line);
    return info;
}

static void assert_near(double value, double expected, double share) {
    if (value < expected * (1 - share) || value > expected * (1 + share))
        fail_msg("%.6g instead of %.6g", value, expected);
}

static double head(const struct model_info *info) {
    return (double)info->target.vocab * info->target.hidden;
}

static struct need need_of(const struct model_info *info, int n_seqs, int n_rows, int context, double n_experts) {
    return need_target(info, &(struct need_rows){n_seqs, n_rows, n_rows, context, true, n_experts});
}

static void weights_are_as_many_as_the_checkpoints_have(void **state) {
    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(shapes); i++) {
        struct model_info info = inspect(&shapes[i]);
        double bytes = need_of(&info, 1, 1, 0, info.target.n_experts).bytes - 3.0 * (double)info.state.slot_bytes;
        double params = bytes / 2 + (shapes[i].is_tied ? 0 : head(&info));

        assert_near(params, shapes[i].n_params, 1e-3);
    }
}

static void drafters_are_as_large_as_published_and_read_the_head_too(void **state) {
    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(shapes); i++) {
        struct model_info info = inspect(&shapes[i]);

        if (shapes[i].draft)
            assert_near(need_draft(&info, 1, 0).bytes / 2 - head(&info), shapes[i].n_draft_params, 1e-4);
    }
}

static void context_is_read_once_per_seq_and_weights_once_for_all(void **state) {
    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(shapes); i++) {
        struct model_info info = inspect(&shapes[i]);
        struct need one = need_of(&info, 1, 16, 1000, 8), eight = need_of(&info, 8, 16, 1000, 8);
        double slot = (double)info.state.slot_bytes;

        assert_near(one.kv_bytes, 1000.0 * shapes[i].kv_bytes, 1e-9);
        assert_near(eight.kv_bytes, 8 * one.kv_bytes, 1e-9);
        assert_near(eight.bytes - one.bytes, 7 * (one.kv_bytes + 3 * slot), 1e-9);
        assert_near(eight.ops, 8 * one.ops, 1e-9);
    }
}

static void only_chosen_experts_are_read(void **state) {
    struct model_info info = inspect(&shapes[5]);

    (void)state; /* 6.29 MB for each, on each of 40 layers */
    assert_near(need_of(&info, 1, 1, 0, 9).bytes - need_of(&info, 1, 1, 0, 8).bytes, 40 * 6.29e6, 1e-3);
    assert_near(need_of(&info, 1, 16, 0, 102).ops, need_of(&info, 1, 16, 0, 8).ops, 1e-9);
}

static void a_row_takes_two_operations_per_weight_and_four_per_key_and_head_element(void **state) {
    struct model_info info = inspect(&shapes[4]);
    double weights = need_of(&info, 1, 1, 0, 0).bytes - 3.0 * (double)info.state.slot_bytes;
    double keys = 4.0 * 24 * 256 * 16; /* of a key: heads, their size, full layers */

    (void)state;
    assert_near(need_of(&info, 1, 1, 999, 0).ops, weights + keys * 1000, 1e-9);
}

static void sliding_layers_see_their_window_alone(void **state) {
    struct model_info info = inspect(&shapes[4]);
    double layer = 2 * 8 * 128 * 2; /* K and V, heads, their size, bytes */

    (void)state;
    assert_near(need_draft(&info, 1, 4096).kv_bytes, 6 * layer * 4096, 1e-9);
    assert_near(need_draft(&info, 1, 32768).kv_bytes, 5 * layer * 4096 + layer * 32768, 1e-9);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(weights_are_as_many_as_the_checkpoints_have),
        cmocka_unit_test(drafters_are_as_large_as_published_and_read_the_head_too),
        cmocka_unit_test(context_is_read_once_per_seq_and_weights_once_for_all),
        cmocka_unit_test(only_chosen_experts_are_read),
        cmocka_unit_test(a_row_takes_two_operations_per_weight_and_four_per_key_and_head_element),
        cmocka_unit_test(sliding_layers_see_their_window_alone),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
