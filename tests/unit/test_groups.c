/* groups: unknown, empty and mixed groups are refused at start, with the layer and both geometries in the line. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "groups.h"

static struct kv_member member(enum kv_group group, int window) {
    return (struct kv_member){.group = group, .n_kv_heads = 2, .head_dim = 128, .window = window, .dtype = DTYPE_BF16};
}

static void refuses(const struct kv_member *members, int n, const char *words) {
    struct kv_geometry groups[KV_GROUP_N];
    struct report report = {0};
    int layer[8];

    memset(groups, 0x5a, sizeof groups);
    assert_int_equal(kv_groups_build("draft/config.json", members, n, groups, layer, &report), -EINVAL);
    assert_non_null(strstr(report.line, "draft/config.json"));
    if (!strstr(report.line, words))
        fail_msg("'%s' does not say '%s'", report.line, words);
    assert_int_equal(((unsigned char *)groups)[0], 0x5a); /* nothing is returned with a refusal */
}

static void members_are_numbered_within_their_group(void **state) {
    struct kv_member members[] = {member(KV_DRAFT_SLIDING, 24), member(KV_DRAFT_FULL, 0), member(KV_DRAFT_SLIDING, 24)};
    struct kv_geometry groups[KV_GROUP_N];
    struct report report;
    int layer[3];

    (void)state;
    assert_int_equal(kv_groups_build("x", members, 3, groups, layer, &report), 0);
    assert_int_equal(layer[0], 0);
    assert_int_equal(layer[1], 0);
    assert_int_equal(layer[2], 1);
    assert_int_equal(groups[KV_DRAFT_SLIDING].n_layers, 2);
    assert_int_equal(groups[KV_DRAFT_SLIDING].window, 24);
    assert_int_equal(groups[KV_DRAFT_SLIDING].page_bytes, 2 * 2 * 2 * 64 * 128 * 2);
    assert_int_equal(groups[KV_DRAFT_FULL].n_layers, 1);
    assert_int_equal(groups[KV_TARGET_FULL].n_layers, 0);
}

static void one_kind_of_layer_publishes_one_group(void **state) {
    struct kv_member members[] = {member(KV_DRAFT_FULL, 0), member(KV_DRAFT_FULL, 0)};
    struct kv_geometry groups[KV_GROUP_N];
    struct report report;
    int layer[2];

    (void)state;
    assert_int_equal(kv_groups_build("x", members, 2, groups, layer, &report), 0);
    assert_int_equal(groups[KV_DRAFT_FULL].n_layers, 2);
    assert_int_equal(groups[KV_DRAFT_SLIDING].n_layers, 0);
}

static void unknown_group_is_refused(void **state) {
    struct kv_member members[] = {member(KV_DRAFT_FULL, 0), member((enum kv_group)9, 0)};

    (void)state;
    refuses(members, 2, "layer 1 names unknown page group 9");
}

static void state_group_holds_no_attention_layer(void **state) {
    struct kv_member members[] = {member(KV_TARGET_STATE, 0)};

    (void)state;
    refuses(members, 1, "target_state");
}

static void no_member_at_all_is_refused(void **state) {
    (void)state;
    refuses(NULL, 0, "no attention layer");
}

static void mixed_geometry_is_refused(void **state) {
    struct kv_member members[] = {member(KV_DRAFT_FULL, 0), member(KV_DRAFT_FULL, 0)};
    struct kv_member windows[] = {member(KV_DRAFT_SLIDING, 24), member(KV_DRAFT_SLIDING, 25)};

    (void)state;
    refuses(windows, 2, "mixes geometries");
    members[1].n_kv_heads = 4;
    refuses(members, 2, "mixes geometries");
    members[1] = member(KV_DRAFT_FULL, 0);
    members[1].head_dim = 64;
    refuses(members, 2, "mixes geometries");
    members[1] = member(KV_DRAFT_FULL, 0);
    members[1].dtype = DTYPE_E4M3;
    refuses(members, 2, "mixes geometries");
}

static void a_window_belongs_to_the_sliding_group_and_only_there(void **state) {
    struct kv_member full = member(KV_DRAFT_FULL, 24), sliding = member(KV_DRAFT_SLIDING, 0);

    (void)state;
    refuses(&full, 1, "has window 24");
    refuses(&sliding, 1, "has window 0");
}

static void every_group_has_its_name(void **state) {
    (void)state;
    assert_string_equal(kv_group_name(KV_TARGET_FULL), "target_full");
    assert_string_equal(kv_group_name(KV_TARGET_STATE), "target_state");
    assert_string_equal(kv_group_name(KV_DRAFT_FULL), "draft_full");
    assert_string_equal(kv_group_name(KV_DRAFT_SLIDING), "draft_sliding");
    assert_null(kv_group_name((enum kv_group)4));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(members_are_numbered_within_their_group),
        cmocka_unit_test(one_kind_of_layer_publishes_one_group),
        cmocka_unit_test(unknown_group_is_refused),
        cmocka_unit_test(state_group_holds_no_attention_layer),
        cmocka_unit_test(no_member_at_all_is_refused),
        cmocka_unit_test(mixed_geometry_is_refused),
        cmocka_unit_test(a_window_belongs_to_the_sliding_group_and_only_there),
        cmocka_unit_test(every_group_has_its_name),
    };

    return cmocka_run_group_tests_name("groups", tests, NULL, NULL);
}
