/* format: the bytes of the disk tier. Three blocks of 4 KiB describe a store: the superblock (two copies, written in turn),
 * the head of each segment, and the header in front of each slot's payload. Pure: reads and writes memory only, trusts
 * nothing that it reads, knows no files.
 *
 *     slot      header, 4 KiB | payload | padding to the alignment
 *     segment   head, 4 KiB | padding to the alignment | slot 0 | slot 1 | ...
 *
 * Numbers are little endian. These stay where they are in every version, so that another version is told from damage:
 *
 *     0  magic, 8 bytes        8  version, u32        12  byte order of payloads, u32
 *     4088  checksum, u64: XXH3-64 of the 4088 bytes before it
 *
 * Damage and torn writes show in the checksums, never as another page: key and checksum of a payload lie in one block. */
#pragma once
#include "key.h"

enum {
    FORMAT_VERSION = 1,
    FORMAT_BLOCK_BYTES = 4096,
    FORMAT_STORE_ID_BYTES = 16,
    FORMAT_DRAFTER_BYTES = 16,
    FORMAT_ALIGN_MIN = 4096,
    FORMAT_ALIGN_MAX = 1 << 20,
    FORMAT_SEGMENT_BYTES_MIN = 8 << 20,
    FORMAT_SEGMENT_BYTES_MAX = 1 << 30,
};

enum {
    FORMAT_E_FREE = 1, /* zeros: never written, or blanked */
    FORMAT_E_BAD,      /* damaged, or never one of ours: may be overwritten */
    FORMAT_E_FOREIGN,  /* whole, but of a version, byte order or feature that we cannot read: not ours to overwrite */
    FORMAT_E_PAYLOAD,  /* the header is whole and the payload is not its */
};

/* XXH3-64. */
uint64_t format_checksum(const void *bytes, size_t n);

/* ---- slots ---- */

/* One page of one group. The restore point at b is the target_state of page b / PAGE_TOKENS - 1. */
struct format_slot {
    uint8_t store_id[FORMAT_STORE_ID_BYTES];
    uint64_t write_sequence; /* of two slots with one name the higher is the newer */
    uint64_t generation;     /* of the slot, at this writing */
    enum kv_group group;
    uint32_t flags; /* the store's, for its own use: any bits */
    uint8_t fingerprint[KV_KEY_BYTES];
    uint8_t drafter[FORMAT_DRAFTER_BYTES]; /* digest, draft groups; else zero */
    struct kv_key key;
    struct kv_key parent; /* zero iff page_idx is 0: the root follows from fingerprint and uid */
    uint32_t page_idx;
    uint32_t draft_first_page; /* target_state: from here on the drafter's context was there, <= page_idx + 1; else 0 */
    uint32_t uid;              /* whose namespace */
    int32_t tokens[PAGE_TOKENS];
    uint64_t saved_unix_s; /* informational: no decision may rest on it */
    uint32_t payload_bytes;
    uint64_t payload_checksum;
};

void format_slot_write(const struct format_slot *slot, void *ret_block);
int format_slot_read(const void *block, struct format_slot *ret_slot); /* FORMAT_E_* but not PAYLOAD */

/* payload: [payload_bytes], which the caller has held against the size of the slot. FORMAT_E_PAYLOAD. */
int format_slot_verify(const struct format_slot *slot, const void *payload);

/* Of a slot with this payload, or 0 if there can be none. */
uint32_t format_slot_bytes(uint64_t payload_bytes, uint32_t alignment);

/* ---- segments ---- */

/* What a segment file is carved into. Written before its first slot, and again when it is bound to another group. */
struct format_segment {
    uint8_t store_id[FORMAT_STORE_ID_BYTES];
    uint64_t write_sequence;
    uint32_t segment; /* its own number: a file under another's name is not taken for it */
    enum kv_group group;
    uint32_t first_offset; /* of slot 0 */
    uint32_t slot_bytes;
    uint32_t segment_bytes;
};

void format_segment_write(const struct format_segment *segment, void *ret_block);
int format_segment_read(const void *block, struct format_segment *ret_segment);

/* ---- the superblock ---- */

struct format_super {
    uint8_t store_id[FORMAT_STORE_ID_BYTES];
    uint64_t write_sequence;
    uint64_t created_unix_s;         /* informational */
    uint32_t segment_bytes;          /* a power of two */
    uint32_t alignment;              /* of offsets and slot sizes; a power of two */
    uint32_t slot_bytes[KV_GROUP_N]; /* of segments that are bound from now on; 0: no such group */
};

enum { FORMAT_SUPER_COPIES = 2, FORMAT_SUPER_BYTES = FORMAT_SUPER_COPIES * FORMAT_BLOCK_BYTES };

void format_super_write(const struct format_super *super, void *ret_block);
int format_super_read(const void *block, struct format_super *ret_super);

/* The newer of the two copies, and which one the next writing goes to. FOREIGN if either is: somebody newer was here. BAD
 * if none is whole; FREE if both are. ret_next is set on success only: a new store begins with copy 0. */
int format_super_pick(const void *copies, struct format_super *ret_super, int *ret_next);
