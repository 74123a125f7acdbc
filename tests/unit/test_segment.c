/* Chains lie in order, groups take no more than their share, and what a group does not use another can have. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "segment.h"

enum { MIB = 1 << 20, SEGMENT = 8 * MIB, N_SEGMENTS = 4, N_SLOTS = 127 /* of 64 KiB in a segment */ };

static struct segment_options four_segments(void) {
    return (struct segment_options){
        .n_segments_max = N_SEGMENTS,
        .segment_bytes = SEGMENT,
        .first_offset = 4096,
        .cap_bytes = N_SEGMENTS * (uint64_t)SEGMENT,
        .group = {[KV_TARGET_FULL] = {.slot_bytes = 65536, .cap_bytes = 3 * (uint64_t)SEGMENT},
                  [KV_TARGET_STATE] = {.slot_bytes = 3 * MIB, .cap_bytes = 2 * (uint64_t)SEGMENT}},
    };
}

static struct segment_map *open_map(void) {
    struct segment_options options = four_segments();
    struct segment_map *map;

    assert_int_equal(segment_open(&options, &map), 0);
    return map;
}

static void close_map(struct segment_map *map) {
    assert_null(segment_check(map));
    segment_close(map);
}

static uint32_t bind_next(struct segment_map *map, enum kv_group group) {
    uint32_t segment;

    assert_int_equal(segment_prepare(map, group, &segment), 0);
    segment_ready(map, segment);
    return segment;
}

static uint32_t take(struct segment_map *map, enum kv_group group, uint32_t near) {
    uint32_t slot;

    assert_int_equal(segment_take(map, group, near, &slot), 0);
    return slot;
}

static void slots_come_only_when_a_segment_is_ready(void **state) {
    struct segment_map *map = open_map();
    uint32_t segment, slot = 77;

    (void)state;
    assert_int_equal(segment_take(map, KV_TARGET_FULL, KV_NO_SLOT, &slot), SEGMENT_E_NEEDS_SEGMENT);
    assert_int_equal(segment_prepare(map, KV_TARGET_FULL, &segment), 0);
    assert_int_equal(segment_take(map, KV_TARGET_FULL, KV_NO_SLOT, &slot), SEGMENT_E_BUSY);
    assert_int_equal(segment_prepare(map, KV_TARGET_FULL, &segment), SEGMENT_E_BUSY);
    assert_int_equal(slot, 77);
    segment_ready(map, segment);
    assert_int_equal(take(map, KV_TARGET_FULL, KV_NO_SLOT), segment * N_SLOTS);
    close_map(map);
}

static void a_segment_that_could_not_be_made_is_asked_for_again(void **state) {
    struct segment_map *map = open_map();
    uint32_t segment, slot;

    (void)state;
    for (int has_file = 0; has_file < 2; has_file++) {
        assert_int_equal(segment_prepare(map, KV_TARGET_FULL, &segment), 0);
        segment_failed(map, segment, has_file);
        assert_int_equal(segment_state(map, segment), has_file ? SEGMENT_EMPTY : SEGMENT_ABSENT);
        assert_int_equal(segment_take(map, KV_TARGET_FULL, KV_NO_SLOT, &slot), SEGMENT_E_NEEDS_SEGMENT);
    }
    close_map(map);
}

static void two_chains_that_grow_side_by_side_lie_apart(void **state) {
    struct segment_map *map = open_map();
    uint32_t a, b, next_a, next_b;

    (void)state;
    bind_next(map, KV_TARGET_FULL);
    a = take(map, KV_TARGET_FULL, KV_NO_SLOT);
    b = take(map, KV_TARGET_FULL, KV_NO_SLOT);
    for (int i = 1; i < 32; i++) {
        next_a = take(map, KV_TARGET_FULL, a);
        next_b = take(map, KV_TARGET_FULL, b);
        assert_int_equal(next_a, a + 1);
        assert_int_equal(next_b, b + 1);
        a = next_a;
        b = next_b;
    }
    close_map(map);
}

static void a_chain_of_a_whole_segment_has_no_gap_and_goes_on_in_the_next(void **state) {
    struct segment_map *map = open_map();
    uint32_t slot, segment;
    uint64_t offset, before = 0;

    (void)state;
    bind_next(map, KV_TARGET_FULL);
    bind_next(map, KV_TARGET_FULL);
    slot = take(map, KV_TARGET_FULL, KV_NO_SLOT);
    for (uint32_t i = 1; i < 2 * N_SLOTS; i++) {
        segment_locate(map, KV_TARGET_FULL, slot, &segment, &before);
        slot = take(map, KV_TARGET_FULL, slot);
        assert_int_equal(slot, i);
        segment_locate(map, KV_TARGET_FULL, slot, &segment, &offset);
        assert_int_equal(segment, i / N_SLOTS);
        assert_int_equal(offset, i == N_SLOTS ? 4096 : before + 65536);
    }
    close_map(map);
}

static void a_fragmented_segment_gives_its_longest_run(void **state) {
    struct segment_map *map = open_map();
    uint32_t slot = KV_NO_SLOT;

    (void)state;
    bind_next(map, KV_TARGET_FULL);
    for (int i = 0; i < N_SLOTS; i++)
        slot = take(map, KV_TARGET_FULL, slot);
    segment_give(map, KV_TARGET_FULL, 3);
    for (uint32_t i = 60; i < 70; i++)
        segment_give(map, KV_TARGET_FULL, i);
    segment_give(map, KV_TARGET_FULL, 100);
    assert_int_equal(take(map, KV_TARGET_FULL, KV_NO_SLOT), 60);
    assert_int_equal(take(map, KV_TARGET_FULL, 2), 3);
    assert_int_equal(take(map, KV_TARGET_FULL, 40), 61);
    close_map(map);
}

static void a_group_takes_no_more_than_its_share(void **state) {
    struct segment_map *map = open_map();
    uint32_t slot, segment;

    (void)state;
    for (int i = 0; i < 3; i++)
        bind_next(map, KV_TARGET_FULL);
    for (int i = 0; i < 3 * N_SLOTS; i++)
        take(map, KV_TARGET_FULL, KV_NO_SLOT);
    assert_int_equal(segment_take(map, KV_TARGET_FULL, KV_NO_SLOT, &slot), SEGMENT_E_FULL);
    assert_int_equal(segment_prepare(map, KV_TARGET_FULL, &segment), SEGMENT_E_FULL);
    assert_int_equal(bind_next(map, KV_TARGET_STATE), 3); /* so there is one for the others */
    assert_int_equal(segment_take(map, KV_DRAFT_FULL, KV_NO_SLOT, &slot), SEGMENT_E_FULL);
    close_map(map);
}

static void an_unused_segment_changes_its_group_and_a_used_one_does_not(void **state) {
    struct segment_map *map = open_map();
    uint32_t segment, slot;

    (void)state;
    segment_set_cap(map, SEGMENT);
    bind_next(map, KV_TARGET_FULL);
    slot = take(map, KV_TARGET_FULL, KV_NO_SLOT);
    assert_int_equal(segment_prepare(map, KV_TARGET_STATE, &segment), SEGMENT_E_FULL);
    segment_give(map, KV_TARGET_FULL, slot);
    assert_int_equal(bind_next(map, KV_TARGET_STATE), 0);
    assert_false(segment_is_taken(map, KV_TARGET_FULL, slot));
    assert_int_equal(take(map, KV_TARGET_STATE, KV_NO_SLOT), 0);
    assert_int_equal(take(map, KV_TARGET_STATE, 0), 1);
    assert_int_equal(segment_take(map, KV_TARGET_STATE, 1, &slot), SEGMENT_E_FULL);
    close_map(map);
}

static void a_retired_segment_takes_no_slot_and_leaves_when_the_last_is_home(void **state) {
    struct segment_map *map = open_map();
    uint32_t segment = bind_next(map, KV_TARGET_FULL), slot = take(map, KV_TARGET_FULL, KV_NO_SLOT), other, first;
    struct segment_stats stats;
    enum kv_group group;

    (void)state;
    segment_retire(map, segment);
    assert_int_equal(segment_take(map, KV_TARGET_FULL, slot, &other), SEGMENT_E_NEEDS_SEGMENT);
    segment_stats(map, &stats);
    assert_int_equal(stats.group[KV_TARGET_FULL].n_slots, 0);
    assert_int_equal(stats.group[KV_TARGET_FULL].n_taken_elsewhere, 1);
    assert_int_equal(stats.bytes, SEGMENT);
    assert_int_equal(segment_slots(map, segment, &group, &first), N_SLOTS);
    assert_int_equal(group, KV_TARGET_FULL);
    assert_true(segment_is_taken(map, KV_TARGET_FULL, slot));
    segment_give(map, KV_TARGET_FULL, slot);
    segment_removed(map, segment);
    assert_int_equal(segment_state(map, segment), SEGMENT_ABSENT);
    close_map(map);
}

static void a_scanned_segment_gives_only_what_was_not_marked(void **state) {
    struct segment_map *map = open_map();
    uint32_t slot;

    (void)state;
    segment_set_cap(map, SEGMENT);
    segment_found(map, 2, KV_TARGET_STATE);
    segment_mark_taken(map, KV_TARGET_STATE, 2 * 2);
    assert_int_equal(segment_take(map, KV_TARGET_STATE, KV_NO_SLOT, &slot), SEGMENT_E_BUSY);
    segment_ready(map, 2);
    assert_int_equal(take(map, KV_TARGET_STATE, KV_NO_SLOT), 2 * 2 + 1);
    assert_int_equal(segment_take(map, KV_TARGET_STATE, KV_NO_SLOT, &slot), SEGMENT_E_FULL);
    close_map(map);
}

static void foreign_segments_count_and_are_not_touched_until_reclaimed(void **state) {
    struct segment_map *map = open_map();
    uint32_t segment;

    (void)state;
    segment_set_cap(map, SEGMENT);
    segment_found_foreign(map, 1);
    assert_int_equal(segment_prepare(map, KV_TARGET_FULL, &segment), SEGMENT_E_FULL);
    segment_reclaim(map, 1);
    assert_int_equal(bind_next(map, KV_TARGET_FULL), 1);
    close_map(map);
}

static void a_lower_cap_sheds_the_least_used_first(void **state) {
    struct segment_map *map = open_map();
    uint32_t segment;

    (void)state;
    bind_next(map, KV_TARGET_FULL);
    bind_next(map, KV_TARGET_FULL);
    for (int i = 0; i < N_SLOTS + 1; i++)
        take(map, KV_TARGET_FULL, KV_NO_SLOT);
    segment_found_foreign(map, 3);
    assert_false(segment_surplus(map, &segment));
    segment_set_cap(map, SEGMENT + 1);
    assert_true(segment_surplus(map, &segment));
    assert_int_equal(segment, 1); /* the one with fewer pages, and not the one that may not be ours */
    assert_int_equal(segment_n_taken(map, 1), 1);
    segment_retire(map, 1);
    assert_true(segment_surplus(map, &segment));
    assert_int_equal(segment, 0);
    segment_retire(map, 0);
    assert_false(segment_surplus(map, &segment));
    assert_int_equal(segment_prepare(map, KV_TARGET_STATE, &segment), SEGMENT_E_FULL); /* they are still there */
    close_map(map);
}

static void sizes_that_do_not_fit_are_refused(void **state) {
    struct segment_options options;
    struct segment_map *map;

    (void)state;
    options = four_segments();
    options.group[KV_TARGET_STATE].slot_bytes = SEGMENT; /* and a head */
    assert_int_equal(segment_open(&options, &map), -EINVAL);
    options = four_segments();
    options.group[KV_TARGET_STATE].slot_bytes = 4096;
    assert_int_equal(segment_open(&options, &map), -EINVAL);
    options = four_segments();
    options.n_segments_max = 1 << 30;
    assert_int_equal(segment_open(&options, &map), -EINVAL);
    options = four_segments();
    options.first_offset = 0;
    assert_int_equal(segment_open(&options, &map), -EINVAL);
    options = (struct segment_options){.n_segments_max = 1, .segment_bytes = SEGMENT, .first_offset = 4096};
    assert_int_equal(segment_open(&options, &map), -EINVAL);
}

static void a_disk_has_32_segments_or_more_of_8_mib_to_1_gib(void **state) {
    (void)state;
    assert_int_equal(segment_bytes_for(0), 8 * MIB);
    assert_int_equal(segment_bytes_for(UINT64_C(512) * MIB - 1), 8 * MIB);
    assert_int_equal(segment_bytes_for(UINT64_C(512) * MIB), 16 * MIB);
    assert_int_equal(segment_bytes_for(UINT64_C(32768) * MIB - 1), 512 * MIB);
    assert_int_equal(segment_bytes_for(UINT64_C(32768) * MIB), 1024 * MIB);
    assert_int_equal(segment_bytes_for(UINT64_MAX), 1024 * MIB);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(slots_come_only_when_a_segment_is_ready),
        cmocka_unit_test(a_segment_that_could_not_be_made_is_asked_for_again),
        cmocka_unit_test(two_chains_that_grow_side_by_side_lie_apart),
        cmocka_unit_test(a_chain_of_a_whole_segment_has_no_gap_and_goes_on_in_the_next),
        cmocka_unit_test(a_fragmented_segment_gives_its_longest_run),
        cmocka_unit_test(a_group_takes_no_more_than_its_share),
        cmocka_unit_test(an_unused_segment_changes_its_group_and_a_used_one_does_not),
        cmocka_unit_test(a_retired_segment_takes_no_slot_and_leaves_when_the_last_is_home),
        cmocka_unit_test(a_scanned_segment_gives_only_what_was_not_marked),
        cmocka_unit_test(foreign_segments_count_and_are_not_touched_until_reclaimed),
        cmocka_unit_test(a_lower_cap_sheds_the_least_used_first),
        cmocka_unit_test(sizes_that_do_not_fit_are_refused),
        cmocka_unit_test(a_disk_has_32_segments_or_more_of_8_mib_to_1_gib),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
