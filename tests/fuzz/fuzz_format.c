/* Blocks of a disk: what a reader accepts is in range, and writing it again gives a block that reads the same. The first
 * byte chooses the kind of block, whether the rest is the block itself or changes to a whole one, and whether the checksum
 * is made to match, so that the checks behind it are reached. A change is three bytes: where, twice, and what to xor. */
#include <assert.h>
#include <string.h>

#include "format.h"

enum { KIND = 3, IS_RAW = 4, IS_SEALED = 8, AT_CHECKSUM = FORMAT_BLOCK_BYTES - 8 };
enum kind { SLOT, SEGMENT, SUPER, SUPER_PAIR };

struct block {
    uint8_t bytes[FORMAT_BLOCK_BYTES];
};

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void make_whole(enum kind kind, struct block *block) {
    struct format_slot slot = {.group = KV_TARGET_STATE,
                               .page_idx = 3,
                               .draft_first_page = 2,
                               .payload_bytes = 65536,
                               .parent.bytes = {1},
                               .uid = 1000};
    struct format_segment segment = {
        .first_offset = 4096, .slot_bytes = 69632, .segment_bytes = FORMAT_SEGMENT_BYTES_MIN};
    struct format_super super = {
        .segment_bytes = FORMAT_SEGMENT_BYTES_MIN, .alignment = 4096, .slot_bytes = {69632, 1 << 20, 8192}};

    if (kind == SLOT)
        format_slot_write(&slot, block);
    else if (kind == SEGMENT)
        format_segment_write(&segment, block);
    else
        format_super_write(&super, block);
}

static void seal(struct block *block) {
    uint64_t checksum = format_checksum(block, AT_CHECKSUM);

    for (int i = 0; i < 8; i++)
        block->bytes[AT_CHECKSUM + i] = (uint8_t)(checksum >> (8 * i));
}

static void check_slot(const struct block *block) {
    static const uint8_t payload[65536]; /* of a slot as large as the one that make_whole() makes */
    struct format_slot slot, again;
    struct block copy, copy_again;
    int e = format_slot_read(block, &slot);

    assert(e >= 0 && e <= FORMAT_E_FOREIGN);
    if (e != 0)
        return;
    assert((uint32_t)slot.group < KV_GROUP_N && slot.page_idx < INT32_MAX / PAGE_TOKENS);
    assert(slot.draft_first_page <= slot.page_idx + 1);
    assert(format_slot_bytes(slot.payload_bytes, FORMAT_ALIGN_MIN) >= FORMAT_BLOCK_BYTES + slot.payload_bytes);
    if (format_slot_bytes(slot.payload_bytes, FORMAT_ALIGN_MIN) == FORMAT_BLOCK_BYTES + sizeof payload)
        assert(format_slot_verify(&slot, payload) ==
               (slot.payload_checksum == format_checksum(payload, slot.payload_bytes) ? 0 : FORMAT_E_PAYLOAD));
    format_slot_write(&slot, &copy);
    assert(format_slot_read(&copy, &again) == 0);
    format_slot_write(&again, &copy_again);
    assert(memcmp(&copy, &copy_again, sizeof copy) == 0);
}

static void check_segment(const struct block *block) {
    struct format_segment segment, again;
    struct block copy, copy_again;
    int e = format_segment_read(block, &segment);

    assert(e >= 0 && e <= FORMAT_E_FOREIGN);
    if (e != 0)
        return;
    assert((uint32_t)segment.group < KV_GROUP_N && segment.segment_bytes <= FORMAT_SEGMENT_BYTES_MAX);
    assert((uint64_t)segment.first_offset + segment.slot_bytes <= segment.segment_bytes);
    format_segment_write(&segment, &copy);
    assert(format_segment_read(&copy, &again) == 0);
    format_segment_write(&again, &copy_again);
    assert(memcmp(&copy, &copy_again, sizeof copy) == 0);
}

static void check_super(const struct block *block) {
    struct format_super super, again;
    struct block copy, copy_again;
    int e = format_super_read(block, &super);

    assert(e >= 0 && e <= FORMAT_E_FOREIGN);
    if (e != 0)
        return;
    for (int g = 0; g < KV_GROUP_N; g++)
        assert((uint64_t)super.slot_bytes[g] + super.alignment <= super.segment_bytes);
    format_super_write(&super, &copy);
    assert(format_super_read(&copy, &again) == 0);
    format_super_write(&again, &copy_again);
    assert(memcmp(&copy, &copy_again, sizeof copy) == 0);
}

static void check_pair(const struct block *copies) {
    struct format_super super;
    int next, e = format_super_pick(copies, &super, &next);

    assert(e >= 0 && e <= FORMAT_E_FOREIGN);
    if (e == 0)
        assert(format_super_read(&copies[1 - next], &super) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    struct block blocks[FORMAT_SUPER_COPIES] = {0};
    enum kind kind;
    size_t n_bytes;

    if (n < 1)
        return 0;
    kind = data[0] & KIND;
    n_bytes = kind == SUPER_PAIR ? sizeof blocks : sizeof blocks[0];
    if (data[0] & IS_RAW) {
        memcpy(blocks, data + 1, n - 1 < n_bytes ? n - 1 : n_bytes);
    } else {
        make_whole(kind, &blocks[0]);
        make_whole(kind, &blocks[1]);
        for (size_t i = 1; i + 3 <= n; i += 3)
            ((uint8_t *)blocks)[(data[i] | (size_t)data[i + 1] << 8) % n_bytes] ^= data[i + 2];
    }
    if (data[0] & IS_SEALED) {
        seal(&blocks[0]);
        seal(&blocks[1]);
    }
    if (kind == SLOT)
        check_slot(&blocks[0]);
    else if (kind == SEGMENT)
        check_segment(&blocks[0]);
    else if (kind == SUPER)
        check_super(&blocks[0]);
    else
        check_pair(blocks);
    return 0;
}
