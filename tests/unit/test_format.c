/* What was written is read back; anything else is refused, and damage, another version and emptiness are told apart. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "format.h"

enum {
    PAYLOAD_BYTES = 3 * FORMAT_BLOCK_BYTES,
    SLOT_BYTES = FORMAT_BLOCK_BYTES + PAYLOAD_BYTES,
    SECTOR_BYTES = 512,
    AT_VERSION = 8, /* as format.h promises for every version */
    AT_BYTE_ORDER = 12,
    AT_CHECKSUM = 4088,
    AT_MUST_UNDERSTAND = 16, /* of this version */
    AT_MAY_IGNORE = 24,
    AT_FIRST_FIELD = 56,
};

struct block {
    uint8_t bytes[FORMAT_BLOCK_BYTES];
};

/* One of the three kinds of blocks, for what they have in common. */
struct kind {
    void (*example)(struct block *ret_block);
    int (*read)(const struct block *block);
};

static void fill(void *bytes, size_t n, uint8_t from) {
    for (size_t i = 0; i < n; i++)
        ((uint8_t *)bytes)[i] = (uint8_t)(from + i);
}

static struct format_slot example_slot(void) {
    struct format_slot slot = {
        .write_sequence = 0x0102030405060708,
        .generation = 9,
        .group = KV_TARGET_STATE,
        .flags = 0x80000001,
        .page_idx = 17,
        .draft_first_page = 18,
        .uid = UINT32_MAX,
        .saved_unix_s = 1700000000,
        .payload_bytes = PAYLOAD_BYTES,
        .payload_checksum = UINT64_MAX,
    };

    fill(slot.store_id, sizeof slot.store_id, 1);
    fill(slot.fingerprint, sizeof slot.fingerprint, 20);
    fill(slot.drafter, sizeof slot.drafter, 60);
    fill(&slot.key, sizeof slot.key, 80);
    fill(&slot.parent, sizeof slot.parent, 120);
    for (int i = 0; i < PAGE_TOKENS; i++)
        slot.tokens[i] = i * 3001;
    slot.tokens[PAGE_TOKENS - 1] = INT32_MAX;
    return slot;
}

static struct format_segment example_segment(void) {
    struct format_segment segment = {.write_sequence = 3,
                                     .segment = 12,
                                     .group = KV_DRAFT_SLIDING,
                                     .first_offset = 16384,
                                     .slot_bytes = 81920,
                                     .segment_bytes = FORMAT_SEGMENT_BYTES_MIN};

    fill(segment.store_id, sizeof segment.store_id, 1);
    return segment;
}

static struct format_super example_super(uint64_t write_sequence) {
    struct format_super super = {.write_sequence = write_sequence,
                                 .created_unix_s = 1700000000,
                                 .segment_bytes = FORMAT_SEGMENT_BYTES_MAX,
                                 .alignment = 8192,
                                 .slot_bytes = {1 << 20, 1 << 28, 0, 8192}};

    fill(super.store_id, sizeof super.store_id, 1);
    return super;
}

static void write_slot_block(struct block *ret_block) {
    struct format_slot slot = example_slot();

    format_slot_write(&slot, ret_block);
}

static void write_segment_block(struct block *ret_block) {
    struct format_segment segment = example_segment();

    format_segment_write(&segment, ret_block);
}

static void write_super_block(struct block *ret_block) {
    struct format_super super = example_super(1);

    format_super_write(&super, ret_block);
}

static int read_slot_block(const struct block *block) {
    struct format_slot slot;

    return format_slot_read(block, &slot);
}

static int read_segment_block(const struct block *block) {
    struct format_segment segment;

    return format_segment_read(block, &segment);
}

static int read_super_block(const struct block *block) {
    struct format_super super;

    return format_super_read(block, &super);
}

static const struct kind kinds[] = {{write_slot_block, read_slot_block},
                                    {write_segment_block, read_segment_block},
                                    {write_super_block, read_super_block}};

/* After a deliberate change, so that more than the checksum has to see it. */
static void seal(struct block *block) {
    uint64_t checksum = format_checksum(block, AT_CHECKSUM);

    for (int i = 0; i < 8; i++)
        block->bytes[AT_CHECKSUM + i] = (uint8_t)(checksum >> (8 * i));
}

static void assert_slot_equal(const struct format_slot *a, const struct format_slot *b) {
    assert_memory_equal(a->store_id, b->store_id, sizeof a->store_id);
    assert_int_equal(a->write_sequence, b->write_sequence);
    assert_int_equal(a->generation, b->generation);
    assert_int_equal(a->group, b->group);
    assert_int_equal(a->flags, b->flags);
    assert_memory_equal(a->fingerprint, b->fingerprint, sizeof a->fingerprint);
    assert_memory_equal(a->drafter, b->drafter, sizeof a->drafter);
    assert_memory_equal(&a->key, &b->key, sizeof a->key);
    assert_memory_equal(&a->parent, &b->parent, sizeof a->parent);
    assert_int_equal(a->page_idx, b->page_idx);
    assert_int_equal(a->draft_first_page, b->draft_first_page);
    assert_int_equal(a->uid, b->uid);
    assert_memory_equal(a->tokens, b->tokens, sizeof a->tokens);
    assert_int_equal(a->saved_unix_s, b->saved_unix_s);
    assert_int_equal(a->payload_bytes, b->payload_bytes);
    assert_int_equal(a->payload_checksum, b->payload_checksum);
}

/* ---- what was written comes back ---- */

static void every_field_of_a_slot_comes_back(void **state) {
    struct format_slot slot = example_slot(), back;
    struct block block;

    (void)state;
    format_slot_write(&slot, &block);
    assert_int_equal(format_slot_read(&block, &back), 0);
    assert_slot_equal(&slot, &back);
}

static void every_field_of_a_segment_comes_back(void **state) {
    struct format_segment segment = example_segment(), back;
    struct block block;

    (void)state;
    format_segment_write(&segment, &block);
    assert_int_equal(format_segment_read(&block, &back), 0);
    assert_memory_equal(segment.store_id, back.store_id, sizeof back.store_id);
    assert_int_equal(segment.write_sequence, back.write_sequence);
    assert_int_equal(segment.segment, back.segment);
    assert_int_equal(segment.group, back.group);
    assert_int_equal(segment.first_offset, back.first_offset);
    assert_int_equal(segment.slot_bytes, back.slot_bytes);
    assert_int_equal(segment.segment_bytes, back.segment_bytes);
}

static void every_field_of_a_superblock_comes_back(void **state) {
    struct format_super super = example_super(77), back;
    struct block block;

    (void)state;
    format_super_write(&super, &block);
    assert_int_equal(format_super_read(&block, &back), 0);
    assert_memory_equal(super.store_id, back.store_id, sizeof back.store_id);
    assert_int_equal(super.write_sequence, back.write_sequence);
    assert_int_equal(super.created_unix_s, back.created_unix_s);
    assert_int_equal(super.segment_bytes, back.segment_bytes);
    assert_int_equal(super.alignment, back.alignment);
    assert_memory_equal(super.slot_bytes, back.slot_bytes, sizeof back.slot_bytes);
}

/* Pinned: what changes this number needs another FORMAT_VERSION. */
static void bytes_of_a_slot_header_are_those_of_version_1(void **state) {
    struct block block;

    (void)state;
    write_slot_block(&block);
    assert_memory_equal(block.bytes, "SpwySlot\1\0\0\0\4\3\2\1", 16);
    assert_int_equal(format_checksum(&block, sizeof block), UINT64_C(0xcdc78013e6294db4));
}

/* ---- what is refused ---- */

static void every_flipped_bit_is_damage(void **state) {
    struct block block;

    (void)state;
    for (size_t k = 0; k < ARRAY_LEN(kinds); k++) {
        kinds[k].example(&block);
        for (int bit = 0; bit < 8 * FORMAT_BLOCK_BYTES; bit++) {
            block.bytes[bit / 8] ^= (uint8_t)(1 << bit % 8);
            assert_int_equal(kinds[k].read(&block), FORMAT_E_BAD);
            block.bytes[bit / 8] ^= (uint8_t)(1 << bit % 8);
        }
        assert_int_equal(kinds[k].read(&block), 0);
    }
}

static void zeros_are_free_and_other_content_is_bad(void **state) {
    struct block block;

    (void)state;
    for (size_t k = 0; k < ARRAY_LEN(kinds); k++) {
        memset(&block, 0, sizeof block);
        assert_int_equal(kinds[k].read(&block), FORMAT_E_FREE);
        block.bytes[FORMAT_BLOCK_BYTES - 1] = 1;
        assert_int_equal(kinds[k].read(&block), FORMAT_E_BAD);
        memset(&block, 0xff, sizeof block);
        assert_int_equal(kinds[k].read(&block), FORMAT_E_BAD);
    }
}

static void one_kind_of_block_is_not_taken_for_another(void **state) {
    struct block block;

    (void)state;
    for (size_t k = 0; k < ARRAY_LEN(kinds); k++) {
        kinds[k].example(&block);
        for (size_t other = 0; other < ARRAY_LEN(kinds); other++)
            assert_int_equal(kinds[other].read(&block), other == k ? 0 : FORMAT_E_BAD);
    }
}

static void another_version_is_foreign(void **state) {
    struct block block;

    (void)state;
    for (size_t k = 0; k < ARRAY_LEN(kinds); k++)
        for (uint8_t version = 0; version < 4; version++) {
            if (version == FORMAT_VERSION)
                continue;
            kinds[k].example(&block);
            memset(&block.bytes[AT_FIRST_FIELD], 0xa5, 200); /* and it may have other fields */
            block.bytes[AT_VERSION] = version;
            seal(&block);
            assert_int_equal(kinds[k].read(&block), FORMAT_E_FOREIGN);
        }
}

static void payloads_of_the_other_byte_order_are_foreign(void **state) {
    struct block block;

    (void)state;
    for (size_t k = 0; k < ARRAY_LEN(kinds); k++) {
        kinds[k].example(&block);
        memcpy(&block.bytes[AT_BYTE_ORDER], block.bytes[AT_BYTE_ORDER] == 4 ? "\1\2\3\4" : "\4\3\2\1", 4);
        seal(&block);
        assert_int_equal(kinds[k].read(&block), FORMAT_E_FOREIGN);
    }
}

static void a_feature_that_must_be_understood_is_foreign_and_one_that_may_be_ignored_is_not(void **state) {
    struct block block;

    (void)state;
    for (size_t k = 0; k < ARRAY_LEN(kinds); k++)
        for (int bit = 0; bit < 64; bit++) {
            kinds[k].example(&block);
            block.bytes[AT_MUST_UNDERSTAND + bit / 8] = (uint8_t)(1 << bit % 8);
            seal(&block);
            assert_int_equal(kinds[k].read(&block), FORMAT_E_FOREIGN);

            kinds[k].example(&block);
            block.bytes[AT_MAY_IGNORE + bit / 8] = (uint8_t)(1 << bit % 8);
            seal(&block);
            assert_int_equal(kinds[k].read(&block), 0);
        }
}

/* Puts a number over the one at a place of a slot header and says what a reader makes of it. */
static int read_slot_with(enum kv_group group, size_t at, uint32_t n) {
    struct format_slot slot = example_slot();
    struct block block;

    slot.group = group;
    slot.draft_first_page = 0;
    format_slot_write(&slot, &block);
    for (size_t i = 0; i < 4; i++)
        block.bytes[at + i] = (uint8_t)(n >> (8 * i));
    seal(&block);
    return read_slot_block(&block);
}

static void a_slot_with_numbers_out_of_range_is_bad(void **state) {
    enum { GROUP = 56, PARENT = 144, PAGE_IDX = 176, DRAFT_FIRST_PAGE = 180, BYTES = 188, N_TOKENS = 216 };
    const struct {
        enum kv_group group;
        size_t at;
        uint32_t n;
        int e;
    } cases[] = {
        {KV_TARGET_FULL, GROUP, KV_GROUP_N - 1, 0},
        {KV_TARGET_FULL, GROUP, KV_GROUP_N, FORMAT_E_BAD},
        {KV_TARGET_FULL, GROUP, UINT32_MAX, FORMAT_E_BAD},
        {KV_TARGET_FULL, PAGE_IDX, INT32_MAX / PAGE_TOKENS - 1, 0},
        {KV_TARGET_FULL, PAGE_IDX, INT32_MAX / PAGE_TOKENS, FORMAT_E_BAD},
        {KV_TARGET_FULL, PAGE_IDX, UINT32_MAX, FORMAT_E_BAD},
        {KV_TARGET_FULL, PAGE_IDX, 0, FORMAT_E_BAD}, /* its parent is not zero */
        {KV_TARGET_FULL, DRAFT_FIRST_PAGE, 1, FORMAT_E_BAD},
        {KV_TARGET_STATE, DRAFT_FIRST_PAGE, 18, 0},
        {KV_TARGET_STATE, DRAFT_FIRST_PAGE, 19, FORMAT_E_BAD},
        {KV_TARGET_STATE, DRAFT_FIRST_PAGE, UINT32_MAX, FORMAT_E_BAD},
        {KV_TARGET_FULL, BYTES, 1, 0},
        {KV_TARGET_FULL, BYTES, 0, FORMAT_E_BAD},
        {KV_TARGET_FULL, BYTES, FORMAT_SEGMENT_BYTES_MAX - 2 * FORMAT_BLOCK_BYTES, 0},
        {KV_TARGET_FULL, BYTES, FORMAT_SEGMENT_BYTES_MAX - 2 * FORMAT_BLOCK_BYTES + 1, FORMAT_E_BAD},
        {KV_TARGET_FULL, BYTES, UINT32_MAX, FORMAT_E_BAD},
        {KV_TARGET_FULL, N_TOKENS, PAGE_TOKENS / 2, FORMAT_E_FOREIGN}, /* pages of another size */
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(cases); i++)
        assert_int_equal(read_slot_with(cases[i].group, cases[i].at, cases[i].n), cases[i].e);
}

static void only_page_0_has_no_parent(void **state) {
    struct format_slot slot = example_slot(), back;
    struct block block;

    (void)state;
    memset(&slot.parent, 0, sizeof slot.parent);
    slot.page_idx = slot.draft_first_page = 0;
    format_slot_write(&slot, &block);
    assert_int_equal(format_slot_read(&block, &back), 0);
    assert_slot_equal(&slot, &back);
    block.bytes[176] = 1; /* page_idx */
    seal(&block);
    assert_int_equal(read_slot_block(&block), FORMAT_E_BAD);
}

static void a_segment_with_numbers_out_of_range_is_bad(void **state) {
    enum { NUMBER = 56, GROUP = 60, FIRST_OFFSET = 64, SLOT_BYTES_AT = 68, BYTES = 72 };
    const struct {
        size_t at;
        uint32_t n;
        int e;
    } cases[] = {
        {NUMBER, UINT32_MAX, 0}, /* the reader compares it with the name of the file */
        {GROUP, KV_GROUP_N, FORMAT_E_BAD},
        {FIRST_OFFSET, 0, FORMAT_E_BAD},
        {FIRST_OFFSET, 4096, 0},
        {FIRST_OFFSET, 6144, FORMAT_E_BAD},
        {FIRST_OFFSET, FORMAT_ALIGN_MAX + 4096, FORMAT_E_BAD},
        {FIRST_OFFSET, UINT32_MAX & ~4095u, FORMAT_E_BAD},
        {SLOT_BYTES_AT, 0, FORMAT_E_BAD},
        {SLOT_BYTES_AT, 4096, FORMAT_E_BAD}, /* no room for a payload */
        {SLOT_BYTES_AT, 8192, 0},
        {SLOT_BYTES_AT, 8193, FORMAT_E_BAD},
        {SLOT_BYTES_AT, FORMAT_SEGMENT_BYTES_MIN - 16384, 0},
        {SLOT_BYTES_AT, FORMAT_SEGMENT_BYTES_MIN - 12288, FORMAT_E_BAD},
        {BYTES, 0, FORMAT_E_BAD},
        {BYTES, FORMAT_SEGMENT_BYTES_MIN / 2, FORMAT_E_BAD},
        {BYTES, FORMAT_SEGMENT_BYTES_MAX, 0},
        {BYTES, 3u << 23, FORMAT_E_BAD},
        {BYTES, 2u * FORMAT_SEGMENT_BYTES_MAX, FORMAT_E_BAD},
    };
    struct block block;

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        write_segment_block(&block);
        for (size_t k = 0; k < 4; k++)
            block.bytes[cases[i].at + k] = (uint8_t)(cases[i].n >> (8 * k));
        seal(&block);
        assert_int_equal(read_segment_block(&block), cases[i].e);
    }
}

static void a_superblock_with_numbers_out_of_range_is_bad(void **state) {
    enum { BYTES = 64, ALIGNMENT = 68, N_GROUPS = 72, SLOT_BYTES_AT = 76 };
    const struct {
        size_t at;
        uint32_t n;
        int e;
    } cases[] = {
        {BYTES, 0, FORMAT_E_BAD},
        {BYTES, FORMAT_SEGMENT_BYTES_MIN, FORMAT_E_BAD}, /* smaller than one of the slots */
        {BYTES, FORMAT_SEGMENT_BYTES_MAX - 1, FORMAT_E_BAD},
        {BYTES, 2u * FORMAT_SEGMENT_BYTES_MAX, FORMAT_E_BAD},
        {ALIGNMENT, 0, FORMAT_E_BAD},
        {ALIGNMENT, 512, FORMAT_E_BAD},
        {ALIGNMENT, 4096, 0},
        {ALIGNMENT, 12288, FORMAT_E_BAD},
        {ALIGNMENT, 16384, FORMAT_E_BAD}, /* the sliding group's slots are no multiple of it */
        {ALIGNMENT, UINT32_C(1) << 31, FORMAT_E_BAD},
        {N_GROUPS, KV_GROUP_N + 1, FORMAT_E_FOREIGN},
        {SLOT_BYTES_AT, 0, 0},
        {SLOT_BYTES_AT, 4096, FORMAT_E_BAD},
        {SLOT_BYTES_AT + 12, 8192 + 4096, FORMAT_E_BAD},
        {SLOT_BYTES_AT + 12, FORMAT_SEGMENT_BYTES_MAX - 8192, 0},
        {SLOT_BYTES_AT + 12, FORMAT_SEGMENT_BYTES_MAX, FORMAT_E_BAD},
    };
    struct block block;

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        write_super_block(&block);
        for (size_t k = 0; k < 4; k++)
            block.bytes[cases[i].at + k] = (uint8_t)(cases[i].n >> (8 * k));
        seal(&block);
        assert_int_equal(read_super_block(&block), cases[i].e);
    }
}

/* ---- payloads ---- */

static void write_slot(uint8_t *image, uint8_t from) {
    struct format_slot slot = example_slot();

    slot.key.bytes[0] = from;
    slot.write_sequence = from;
    for (size_t i = 0; i < PAYLOAD_BYTES; i++)
        image[FORMAT_BLOCK_BYTES + i] = (uint8_t)(from + i * 7 + i / 256);
    slot.payload_checksum = format_checksum(image + FORMAT_BLOCK_BYTES, PAYLOAD_BYTES);
    format_slot_write(&slot, image);
}

static int verify_slot(const uint8_t *image, struct format_slot *ret_slot) {
    int r = format_slot_read(image, ret_slot);

    return r != 0 ? r : format_slot_verify(ret_slot, image + FORMAT_BLOCK_BYTES);
}

static void damage_of_a_payload_is_told_from_damage_of_its_header(void **state) {
    uint8_t image[SLOT_BYTES];
    struct format_slot slot;

    (void)state;
    write_slot(image, 1);
    assert_int_equal(verify_slot(image, &slot), 0);
    for (size_t at = 0; at < SLOT_BYTES; at += 61) {
        image[at] ^= 0x10;
        assert_int_equal(verify_slot(image, &slot), at < FORMAT_BLOCK_BYTES ? FORMAT_E_BAD : FORMAT_E_PAYLOAD);
        image[at] ^= 0x10;
    }
}

/* A power cut leaves any front part of the new content before the rest of the old, or the other way round. */
static void a_slot_torn_at_any_sector_is_refused(void **state) {
    uint8_t old[SLOT_BYTES], new[SLOT_BYTES], torn[SLOT_BYTES];
    struct format_slot slot;

    (void)state;
    write_slot(old, 1);
    write_slot(new, 2);
    for (size_t at = 0; at <= SLOT_BYTES; at += SECTOR_BYTES) {
        for (int is_backwards = 0; is_backwards < 2; is_backwards++) {
            const uint8_t *front = is_backwards ? old : new, *rest = is_backwards ? new : old;
            int e;

            memcpy(torn, front, at);
            memcpy(torn + at, rest + at, SLOT_BYTES - at);
            e = verify_slot(torn, &slot);
            if (at == 0 || at == SLOT_BYTES) {
                assert_int_equal(e, 0);
                assert_int_equal(slot.key.bytes[0], at == 0 ? rest[112] : front[112]);
            } else {
                assert_int_equal(e, at < FORMAT_BLOCK_BYTES ? FORMAT_E_BAD : FORMAT_E_PAYLOAD);
            }
        }
    }
}

static void a_slot_that_never_got_its_header_or_its_payload_is_refused(void **state) {
    uint8_t image[SLOT_BYTES];
    struct format_slot slot;

    (void)state;
    write_slot(image, 1);
    memset(image + FORMAT_BLOCK_BYTES, 0, PAYLOAD_BYTES);
    assert_int_equal(verify_slot(image, &slot), FORMAT_E_PAYLOAD);
    write_slot(image, 1);
    memset(image, 0, FORMAT_BLOCK_BYTES);
    assert_int_equal(verify_slot(image, &slot), FORMAT_E_FREE);
}

static void a_slot_has_room_for_header_and_payload_at_every_alignment(void **state) {
    (void)state;
    assert_int_equal(format_slot_bytes(1, 4096), 8192);
    assert_int_equal(format_slot_bytes(4096, 4096), 8192);
    assert_int_equal(format_slot_bytes(4097, 4096), 12288);
    assert_int_equal(format_slot_bytes(4 << 20, 16384), (4 << 20) + 16384);
    assert_int_equal(format_slot_bytes(FORMAT_SEGMENT_BYTES_MAX - 8192, FORMAT_ALIGN_MAX), FORMAT_SEGMENT_BYTES_MAX);
    assert_int_equal(format_slot_bytes(0, 4096), 0);
    assert_int_equal(format_slot_bytes(FORMAT_SEGMENT_BYTES_MAX, 4096), 0);
    assert_int_equal(format_slot_bytes(UINT64_MAX, 4096), 0);
}

/* ---- two superblocks ---- */

static void the_newer_superblock_counts_and_the_other_is_written_next(void **state) {
    struct block copies[FORMAT_SUPER_COPIES];
    struct format_super super;
    int next = -1;

    (void)state;
    memset(copies, 0, sizeof copies);
    assert_int_equal(format_super_pick(copies, &super, &next), FORMAT_E_FREE);
    assert_int_equal(next, -1);
    next = 0;
    for (uint64_t sequence = 1; sequence < 5; sequence++) { /* as a store lives */
        super = example_super(sequence);
        format_super_write(&super, &copies[next]);
        assert_int_equal(format_super_pick(copies, &super, &next), 0);
        assert_int_equal(super.write_sequence, sequence);
        assert_int_equal(next, sequence % 2);
    }
}

static void a_torn_superblock_leaves_the_one_before(void **state) {
    struct block copies[FORMAT_SUPER_COPIES], new;
    struct format_super super = example_super(8);
    int next;

    (void)state;
    format_super_write(&super, &copies[1]);
    super = example_super(7);
    format_super_write(&super, &copies[0]);
    super = example_super(9);
    super.alignment = 4096;
    format_super_write(&super, &new);
    for (size_t at = SECTOR_BYTES; at < FORMAT_BLOCK_BYTES; at += SECTOR_BYTES) {
        memcpy(&copies[0], &new, at); /* the rest is of sequence 7 */
        assert_int_equal(format_super_pick(copies, &super, &next), 0);
        assert_int_equal(super.write_sequence, 8);
        assert_int_equal(next, 0);
    }
    memcpy(&copies[0], &new, sizeof new);
    assert_int_equal(format_super_pick(copies, &super, &next), 0);
    assert_int_equal(super.write_sequence, 9);
}

static void two_damaged_superblocks_are_bad_and_a_foreign_one_decides(void **state) {
    struct block copies[FORMAT_SUPER_COPIES];
    struct format_super super = {.write_sequence = 99};
    int next = -1;

    (void)state;
    write_super_block(&copies[0]);
    copies[0].bytes[100] ^= 1;
    memset(&copies[1], 0, sizeof copies[1]);
    assert_int_equal(format_super_pick(copies, &super, &next), FORMAT_E_BAD);
    copies[1] = copies[0];
    assert_int_equal(format_super_pick(copies, &super, &next), FORMAT_E_BAD);

    for (int foreign = 0; foreign < FORMAT_SUPER_COPIES; foreign++) {
        write_super_block(&copies[0]);
        write_super_block(&copies[1]);
        copies[foreign].bytes[AT_VERSION] = FORMAT_VERSION + 1;
        seal(&copies[foreign]);
        assert_int_equal(format_super_pick(copies, &super, &next), FORMAT_E_FOREIGN);
    }
    assert_int_equal(super.write_sequence, 99);
    assert_int_equal(next, -1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_field_of_a_slot_comes_back),
        cmocka_unit_test(every_field_of_a_segment_comes_back),
        cmocka_unit_test(every_field_of_a_superblock_comes_back),
        cmocka_unit_test(bytes_of_a_slot_header_are_those_of_version_1),
        cmocka_unit_test(every_flipped_bit_is_damage),
        cmocka_unit_test(zeros_are_free_and_other_content_is_bad),
        cmocka_unit_test(one_kind_of_block_is_not_taken_for_another),
        cmocka_unit_test(another_version_is_foreign),
        cmocka_unit_test(payloads_of_the_other_byte_order_are_foreign),
        cmocka_unit_test(a_feature_that_must_be_understood_is_foreign_and_one_that_may_be_ignored_is_not),
        cmocka_unit_test(a_slot_with_numbers_out_of_range_is_bad),
        cmocka_unit_test(only_page_0_has_no_parent),
        cmocka_unit_test(a_segment_with_numbers_out_of_range_is_bad),
        cmocka_unit_test(a_superblock_with_numbers_out_of_range_is_bad),
        cmocka_unit_test(damage_of_a_payload_is_told_from_damage_of_its_header),
        cmocka_unit_test(a_slot_torn_at_any_sector_is_refused),
        cmocka_unit_test(a_slot_that_never_got_its_header_or_its_payload_is_refused),
        cmocka_unit_test(a_slot_has_room_for_header_and_payload_at_every_alignment),
        cmocka_unit_test(the_newer_superblock_counts_and_the_other_is_written_next),
        cmocka_unit_test(a_torn_superblock_leaves_the_one_before),
        cmocka_unit_test(two_damaged_superblocks_are_bad_and_a_foreign_one_decides),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
