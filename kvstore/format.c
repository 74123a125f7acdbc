#include "format.h"

#include <assert.h>
#include <endian.h>
#include <string.h>
#include <xxhash.h>

enum { MAGIC_BYTES = 8 };
static const char slot_magic[MAGIC_BYTES + 1] = "SpwySlot";
static const char segment_magic[MAGIC_BYTES + 1] = "SpwySegm";
static const char super_magic[MAGIC_BYTES + 1] = "SpwySupr";

#define BYTE_ORDER_TAG UINT32_C(0x01020304)        /* as the machine that wrote the payloads keeps it in memory */
#define PAGE_IDX_MAX (INT32_MAX / PAGE_TOKENS - 1) /* positions are int32 */
#define PAYLOAD_BYTES_MAX (FORMAT_SEGMENT_BYTES_MAX - 2 * FORMAT_BLOCK_BYTES)

/* Where things lie. */
enum {
    AT_MAGIC = 0,
    AT_VERSION = 8,
    AT_BYTE_ORDER = 12,
    AT_MUST_UNDERSTAND = 16, /* feature bits: a reader that knows not all of them leaves the block alone */
    AT_MAY_IGNORE = 24,
    AT_STORE_ID = 32,
    AT_WRITE_SEQUENCE = 48,
    AT_CHECKSUM = FORMAT_BLOCK_BYTES - 8,

    AT_SLOT_GROUP = 56,
    AT_SLOT_FLAGS = 60,
    AT_SLOT_FINGERPRINT = 64,
    AT_SLOT_DRAFTER = 96,
    AT_SLOT_KEY = 112,
    AT_SLOT_PARENT = 144,
    AT_SLOT_PAGE_IDX = 176,
    AT_SLOT_DRAFT_FIRST_PAGE = 180,
    AT_SLOT_UID = 184,
    AT_SLOT_PAYLOAD_BYTES = 188,
    AT_SLOT_PAYLOAD_CHECKSUM = 192,
    AT_SLOT_GENERATION = 200,
    AT_SLOT_SAVED = 208,
    AT_SLOT_N_TOKENS = 216,
    AT_SLOT_TOKENS = 220,

    AT_SEGMENT_NUMBER = 56,
    AT_SEGMENT_GROUP = 60,
    AT_SEGMENT_FIRST_OFFSET = 64,
    AT_SEGMENT_SLOT_BYTES = 68,
    AT_SEGMENT_BYTES = 72,

    AT_SUPER_CREATED = 56,
    AT_SUPER_SEGMENT_BYTES = 64,
    AT_SUPER_ALIGNMENT = 68,
    AT_SUPER_N_GROUPS = 72,
    AT_SUPER_SLOT_BYTES = 76,
};
static_assert(AT_SLOT_TOKENS + 4 * PAGE_TOKENS <= AT_CHECKSUM, "a slot header fits its block");
static_assert(AT_SUPER_SLOT_BYTES + 4 * KV_GROUP_N <= AT_CHECKSUM, "a superblock fits its block");

/* ---- numbers and names in a block -------------------------------------------------------------------------------- */

static void put_u32(void *block, size_t at, uint32_t n) {
    n = htole32(n);
    memcpy((char *)block + at, &n, sizeof n);
}

static void put_u64(void *block, size_t at, uint64_t n) {
    n = htole64(n);
    memcpy((char *)block + at, &n, sizeof n);
}

static uint32_t get_u32(const void *block, size_t at) {
    uint32_t n;

    memcpy(&n, (const char *)block + at, sizeof n);
    return le32toh(n);
}

static uint64_t get_u64(const void *block, size_t at) {
    uint64_t n;

    memcpy(&n, (const char *)block + at, sizeof n);
    return le64toh(n);
}

static void put_bytes(void *block, size_t at, const void *bytes, size_t n) {
    memcpy((char *)block + at, bytes, n);
}

static void get_bytes(const void *block, size_t at, void *ret_bytes, size_t n) {
    memcpy(ret_bytes, (const char *)block + at, n);
}

static bool is_zero(const void *bytes, size_t n) {
    const uint8_t *byte = bytes;

    return byte[0] == 0 && memcmp(byte, byte + 1, n - 1) == 0;
}

static bool is_power_of_two(uint64_t n) {
    return n != 0 && (n & (n - 1)) == 0;
}

uint64_t format_checksum(const void *bytes, size_t n) {
    return XXH3_64bits(bytes, n);
}

/* ---- what all blocks have ---------------------------------------------------------------------------------------- */

static void begin(void *block, const char magic[MAGIC_BYTES + 1], const uint8_t store_id[FORMAT_STORE_ID_BYTES],
                  uint64_t write_sequence) {
    uint32_t byte_order = BYTE_ORDER_TAG;

    memset(block, 0, FORMAT_BLOCK_BYTES); /* feature bits too: there are none yet */
    put_bytes(block, AT_MAGIC, magic, MAGIC_BYTES);
    put_u32(block, AT_VERSION, FORMAT_VERSION);
    put_bytes(block, AT_BYTE_ORDER, &byte_order, sizeof byte_order);
    put_bytes(block, AT_STORE_ID, store_id, FORMAT_STORE_ID_BYTES);
    put_u64(block, AT_WRITE_SEQUENCE, write_sequence);
}

static void seal(void *block) {
    put_u64(block, AT_CHECKSUM, format_checksum(block, AT_CHECKSUM));
}

/* Damage first: a version is another one only in a block that is whole. */
static int check_block(const void *block, const char magic[MAGIC_BYTES + 1]) {
    uint32_t byte_order;

    if (memcmp(block, magic, MAGIC_BYTES) != 0)
        return is_zero(block, FORMAT_BLOCK_BYTES) ? FORMAT_E_FREE : FORMAT_E_BAD;
    if (get_u64(block, AT_CHECKSUM) != format_checksum(block, AT_CHECKSUM))
        return FORMAT_E_BAD;
    get_bytes(block, AT_BYTE_ORDER, &byte_order, sizeof byte_order);
    if (get_u32(block, AT_VERSION) != FORMAT_VERSION || byte_order != BYTE_ORDER_TAG ||
        get_u64(block, AT_MUST_UNDERSTAND) != 0)
        return FORMAT_E_FOREIGN;
    return 0;
}

/* ---- slots ------------------------------------------------------------------------------------------------------- */

static bool slot_is_sound(const struct format_slot *slot) {
    bool is_first = is_zero(&slot->parent, sizeof slot->parent);
    uint32_t draft_first_page_max = slot->group == KV_TARGET_STATE ? slot->page_idx + 1 : 0;

    return (uint32_t)slot->group < KV_GROUP_N && slot->page_idx <= PAGE_IDX_MAX && is_first == (slot->page_idx == 0) &&
           slot->draft_first_page <= draft_first_page_max && slot->payload_bytes > 0 &&
           slot->payload_bytes <= PAYLOAD_BYTES_MAX;
}

void format_slot_write(const struct format_slot *slot, void *ret_block) {
    assert(slot_is_sound(slot));
    begin(ret_block, slot_magic, slot->store_id, slot->write_sequence);
    put_u32(ret_block, AT_SLOT_GROUP, slot->group);
    put_u32(ret_block, AT_SLOT_FLAGS, slot->flags);
    put_bytes(ret_block, AT_SLOT_FINGERPRINT, slot->fingerprint, sizeof slot->fingerprint);
    put_bytes(ret_block, AT_SLOT_DRAFTER, slot->drafter, sizeof slot->drafter);
    put_bytes(ret_block, AT_SLOT_KEY, &slot->key, sizeof slot->key);
    put_bytes(ret_block, AT_SLOT_PARENT, &slot->parent, sizeof slot->parent);
    put_u32(ret_block, AT_SLOT_PAGE_IDX, slot->page_idx);
    put_u32(ret_block, AT_SLOT_DRAFT_FIRST_PAGE, slot->draft_first_page);
    put_u32(ret_block, AT_SLOT_UID, slot->uid);
    put_u32(ret_block, AT_SLOT_PAYLOAD_BYTES, slot->payload_bytes);
    put_u64(ret_block, AT_SLOT_PAYLOAD_CHECKSUM, slot->payload_checksum);
    put_u64(ret_block, AT_SLOT_GENERATION, slot->generation);
    put_u64(ret_block, AT_SLOT_SAVED, slot->saved_unix_s);
    put_u32(ret_block, AT_SLOT_N_TOKENS, PAGE_TOKENS);
    for (size_t i = 0; i < PAGE_TOKENS; i++)
        put_u32(ret_block, AT_SLOT_TOKENS + 4 * i, (uint32_t)slot->tokens[i]);
    seal(ret_block);
}

int format_slot_read(const void *block, struct format_slot *ret_slot) {
    struct format_slot slot = {0};
    int r = check_block(block, slot_magic);

    if (r != 0)
        return r;
    if (get_u32(block, AT_SLOT_N_TOKENS) != PAGE_TOKENS)
        return FORMAT_E_FOREIGN;
    get_bytes(block, AT_STORE_ID, slot.store_id, sizeof slot.store_id);
    slot.write_sequence = get_u64(block, AT_WRITE_SEQUENCE);
    slot.generation = get_u64(block, AT_SLOT_GENERATION);
    slot.group = get_u32(block, AT_SLOT_GROUP);
    slot.flags = get_u32(block, AT_SLOT_FLAGS);
    get_bytes(block, AT_SLOT_FINGERPRINT, slot.fingerprint, sizeof slot.fingerprint);
    get_bytes(block, AT_SLOT_DRAFTER, slot.drafter, sizeof slot.drafter);
    get_bytes(block, AT_SLOT_KEY, &slot.key, sizeof slot.key);
    get_bytes(block, AT_SLOT_PARENT, &slot.parent, sizeof slot.parent);
    slot.page_idx = get_u32(block, AT_SLOT_PAGE_IDX);
    slot.draft_first_page = get_u32(block, AT_SLOT_DRAFT_FIRST_PAGE);
    slot.uid = get_u32(block, AT_SLOT_UID);
    for (size_t i = 0; i < PAGE_TOKENS; i++)
        slot.tokens[i] = (int32_t)get_u32(block, AT_SLOT_TOKENS + 4 * i);
    slot.saved_unix_s = get_u64(block, AT_SLOT_SAVED);
    slot.payload_bytes = get_u32(block, AT_SLOT_PAYLOAD_BYTES);
    slot.payload_checksum = get_u64(block, AT_SLOT_PAYLOAD_CHECKSUM);
    if (!slot_is_sound(&slot))
        return FORMAT_E_BAD;
    *ret_slot = slot;
    return 0;
}

int format_slot_verify(const struct format_slot *slot, const void *payload) {
    return format_checksum(payload, slot->payload_bytes) == slot->payload_checksum ? 0 : FORMAT_E_PAYLOAD;
}

uint32_t format_slot_bytes(uint64_t payload_bytes, uint32_t alignment) {
    assert(is_power_of_two(alignment) && alignment <= FORMAT_ALIGN_MAX);
    if (payload_bytes == 0 || payload_bytes > PAYLOAD_BYTES_MAX)
        return 0;
    return (uint32_t)align_up(FORMAT_BLOCK_BYTES + payload_bytes, alignment);
}

/* ---- segments ---------------------------------------------------------------------------------------------------- */

static bool segment_size_is_sound(uint32_t segment_bytes) {
    return is_power_of_two(segment_bytes) && segment_bytes >= FORMAT_SEGMENT_BYTES_MIN &&
           segment_bytes <= FORMAT_SEGMENT_BYTES_MAX;
}

static bool segment_is_sound(const struct format_segment *segment) {
    return (uint32_t)segment->group < KV_GROUP_N && segment_size_is_sound(segment->segment_bytes) &&
           segment->first_offset >= FORMAT_BLOCK_BYTES && segment->first_offset <= FORMAT_ALIGN_MAX &&
           segment->first_offset % FORMAT_ALIGN_MIN == 0 && segment->slot_bytes > FORMAT_BLOCK_BYTES &&
           segment->slot_bytes % FORMAT_ALIGN_MIN == 0 &&
           segment->slot_bytes <= segment->segment_bytes - segment->first_offset;
}

void format_segment_write(const struct format_segment *segment, void *ret_block) {
    assert(segment_is_sound(segment));
    begin(ret_block, segment_magic, segment->store_id, segment->write_sequence);
    put_u32(ret_block, AT_SEGMENT_NUMBER, segment->segment);
    put_u32(ret_block, AT_SEGMENT_GROUP, segment->group);
    put_u32(ret_block, AT_SEGMENT_FIRST_OFFSET, segment->first_offset);
    put_u32(ret_block, AT_SEGMENT_SLOT_BYTES, segment->slot_bytes);
    put_u32(ret_block, AT_SEGMENT_BYTES, segment->segment_bytes);
    seal(ret_block);
}

int format_segment_read(const void *block, struct format_segment *ret_segment) {
    struct format_segment segment = {0};
    int r = check_block(block, segment_magic);

    if (r != 0)
        return r;
    get_bytes(block, AT_STORE_ID, segment.store_id, sizeof segment.store_id);
    segment.write_sequence = get_u64(block, AT_WRITE_SEQUENCE);
    segment.segment = get_u32(block, AT_SEGMENT_NUMBER);
    segment.group = get_u32(block, AT_SEGMENT_GROUP);
    segment.first_offset = get_u32(block, AT_SEGMENT_FIRST_OFFSET);
    segment.slot_bytes = get_u32(block, AT_SEGMENT_SLOT_BYTES);
    segment.segment_bytes = get_u32(block, AT_SEGMENT_BYTES);
    if (!segment_is_sound(&segment))
        return FORMAT_E_BAD;
    *ret_segment = segment;
    return 0;
}

/* ---- the superblock ---------------------------------------------------------------------------------------------- */

static bool super_is_sound(const struct format_super *super) {
    if (!segment_size_is_sound(super->segment_bytes) || !is_power_of_two(super->alignment) ||
        super->alignment < FORMAT_ALIGN_MIN || super->alignment > FORMAT_ALIGN_MAX)
        return false;
    for (int g = 0; g < KV_GROUP_N; g++) {
        uint32_t slot_bytes = super->slot_bytes[g];

        if (slot_bytes != 0 && (slot_bytes <= FORMAT_BLOCK_BYTES || slot_bytes % super->alignment != 0 ||
                                slot_bytes > super->segment_bytes - super->alignment))
            return false;
    }
    return true;
}

void format_super_write(const struct format_super *super, void *ret_block) {
    assert(super_is_sound(super));
    begin(ret_block, super_magic, super->store_id, super->write_sequence);
    put_u64(ret_block, AT_SUPER_CREATED, super->created_unix_s);
    put_u32(ret_block, AT_SUPER_SEGMENT_BYTES, super->segment_bytes);
    put_u32(ret_block, AT_SUPER_ALIGNMENT, super->alignment);
    put_u32(ret_block, AT_SUPER_N_GROUPS, KV_GROUP_N);
    for (size_t g = 0; g < KV_GROUP_N; g++)
        put_u32(ret_block, AT_SUPER_SLOT_BYTES + 4 * g, super->slot_bytes[g]);
    seal(ret_block);
}

int format_super_read(const void *block, struct format_super *ret_super) {
    struct format_super super = {0};
    int r = check_block(block, super_magic);

    if (r != 0)
        return r;
    if (get_u32(block, AT_SUPER_N_GROUPS) != KV_GROUP_N)
        return FORMAT_E_FOREIGN;
    get_bytes(block, AT_STORE_ID, super.store_id, sizeof super.store_id);
    super.write_sequence = get_u64(block, AT_WRITE_SEQUENCE);
    super.created_unix_s = get_u64(block, AT_SUPER_CREATED);
    super.segment_bytes = get_u32(block, AT_SUPER_SEGMENT_BYTES);
    super.alignment = get_u32(block, AT_SUPER_ALIGNMENT);
    for (size_t g = 0; g < KV_GROUP_N; g++)
        super.slot_bytes[g] = get_u32(block, AT_SUPER_SLOT_BYTES + 4 * g);
    if (!super_is_sound(&super))
        return FORMAT_E_BAD;
    *ret_super = super;
    return 0;
}

int format_super_pick(const void *copies, struct format_super *ret_super, int *ret_next) {
    struct format_super super[FORMAT_SUPER_COPIES];
    int e[FORMAT_SUPER_COPIES], newer;

    for (int i = 0; i < FORMAT_SUPER_COPIES; i++)
        e[i] = format_super_read((const char *)copies + (size_t)i * FORMAT_BLOCK_BYTES, &super[i]);
    if (e[0] == FORMAT_E_FOREIGN || e[1] == FORMAT_E_FOREIGN)
        return FORMAT_E_FOREIGN;
    if (e[0] != 0 && e[1] != 0)
        return e[0] == FORMAT_E_FREE && e[1] == FORMAT_E_FREE ? FORMAT_E_FREE : FORMAT_E_BAD;
    newer = e[0] != 0 || (e[1] == 0 && super[1].write_sequence > super[0].write_sequence) ? 1 : 0;
    *ret_super = super[newer];
    *ret_next = 1 - newer;
    return 0;
}
