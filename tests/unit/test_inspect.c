/* model_inspect: what it says before anything is loaded is what the loaded model says. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "model.h"

static const struct model_options tiny = {.target_folder = SHARE "/tiny/target",
                                          .draft_folder = SHARE "/tiny/draft",
                                          .kv_dtype = DTYPE_BF16,
                                          .draft_dtype = DTYPE_F16,
                                          .n_slots = 1,
                                          .n_segs_max = 1,
                                          .n_rows_max = 64,
                                          .n_outs_max = 1,
                                          .n_steps_max = 2};
static const struct backend_caps caps = {.act_dtype = DTYPE_F32, .conv_dtype = DTYPE_BF16};

static void assert_same_group(const struct kv_geometry *a, const struct kv_geometry *b) {
    assert_int_equal(a->n_layers, b->n_layers);
    assert_int_equal(a->n_kv_heads, b->n_kv_heads);
    assert_int_equal(a->head_dim, b->head_dim);
    assert_int_equal(a->window, b->window);
    assert_int_equal(a->dtype, b->dtype);
    assert_int_equal(a->page_bytes, b->page_bytes);
}

static void what_is_said_before_loading_holds_afterwards(void **state) {
    const struct backend *backend = backend_find("cpu");
    const struct model_info *loaded;
    struct report report = {""};
    struct device *device;
    struct model_info info;
    struct model *model;

    (void)state;
    assert_int_equal(backend->open(&(struct backend_options){.n_threads = 1}, &device), 0);
    if (model_inspect(&tiny, backend->caps(device), &info, &report) != 0 ||
        model_open(backend, device, &tiny, &model, &report) != 0)
        fail_msg("%s", report.line);
    loaded = model_info(model);
    for (int g = 0; g < KV_GROUP_N; g++)
        assert_same_group(&info.groups[g], &loaded->groups[g]);
    assert_int_equal(info.state.n_layers, loaded->state.n_layers);
    assert_int_equal(info.state.slot_bytes, loaded->state.slot_bytes);
    assert_int_equal(info.block_size, loaded->block_size);
    assert_int_equal(info.n_valid, loaded->n_valid);
    assert_int_equal(info.n_stop, loaded->n_stop);
    assert_memory_equal(info.stop, loaded->stop, sizeof info.stop);
    assert_int_equal(info.weight_bytes, 0);
    assert_true(loaded->weight_bytes > 0);
    model_close(model);
    backend->close(device);
}

static void shapes_of_the_tiny_pair_are_as_computed_by_hand(void **state) {
    struct report report = {""};
    struct model_info info;

    (void)state;
    assert_int_equal(model_inspect(&tiny, &caps, &info, &report), 0);
    assert_int_equal(info.groups[KV_TARGET_FULL].page_bytes, 2 * 2 * 64 * 256 * 2);
    assert_int_equal(info.groups[KV_DRAFT_FULL].page_bytes, 2 * 2 * 64 * 128 * 2);
    assert_int_equal(info.groups[KV_DRAFT_SLIDING].page_bytes, 2 * 2 * 2 * 64 * 128 * 2);
    assert_int_equal(info.groups[KV_DRAFT_SLIDING].window, 256);
    assert_int_equal(info.state.slot_bytes, 6 * (4 * 128 * 128 * 4 + 3 * 1024 * 2));
    assert_int_equal(info.block_size, 16);
    assert_int_equal(info.target.max_positions, 262144);
}

static void a_pair_that_does_not_fit_is_refused_before_loading(void **state) {
    struct model_options options = tiny;
    struct report report = {""};
    struct model_info info;

    (void)state;
    memset(&info, 0x5a, sizeof info);
    options.block_size = 17;
    assert_int_equal(model_inspect(&options, &caps, &info, &report), -EINVAL);
    assert_non_null(strstr(report.line, "block_size is 16; blocks of 17 rows were asked for"));
    options = tiny;
    options.draft_folder = SHARE "/tiny/target";
    assert_int_equal(model_inspect(&options, &caps, &info, &report), -EINVAL);
    options.target_folder = SHARE "/no-such-folder";
    assert_int_equal(model_inspect(&options, &caps, &info, &report), -ENOENT);
    assert_non_null(strstr(report.line, "no-such-folder"));
    assert_int_equal(*(unsigned char *)&info, 0x5a); /* nothing is returned with a refusal */
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_said_before_loading_holds_afterwards),
        cmocka_unit_test(shapes_of_the_tiny_pair_are_as_computed_by_hand),
        cmocka_unit_test(a_pair_that_does_not_fit_is_refused_before_loading),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
