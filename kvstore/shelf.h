/* shelf: what the host tier holds, found by key. One record per page key with a slot of pinned memory for each group that
 * has one; the restore point at the page's end is its target_state slot, as in the index of the device.
 *
 *     free --reserve--> FILLING --copied, checksum known--> CLEAN --evicted--> free
 *                          '-----copy failed, abandoned---------------------> free
 *
 * Only CLEAN copies are found. What is pinned stays. Records of one chain need not be whole: who looks for a prefix sees
 * for himself where it breaks. Each group has slots of its own, so that restore points, pages and draft pages never
 * displace each other; nor do users take from each other what is in their shares (share.h). All memory is reserved in open;
 * where the system is short of it, some may be given back for a time. A slot begins with FORMAT_BLOCK_BYTES for the header
 * that it has on disk, so that both are written and read in one. */
#pragma once
#include "evict.h"
#include "format.h"
#include "key.h"
#include "layout.h"
#include "pool.h"

struct kv_shelf;

enum { KV_SHELF_E_FULL = 1, KV_SHELF_E_EXISTS = 2 };

struct kv_shelf_options {
    const struct backend *backend;
    struct device *device;
    uint32_t alignment;     /* of slots in memory and on disk; a power of two >= FORMAT_ALIGN_MIN */
    uint32_t share_percent; /* that each user keeps of a group's slots; 0: there are no shares */
    struct {
        size_t payload_bytes;
        uint32_t n_slots; /* 0: nothing of this group is kept */
    } group[KV_GROUP_N];
};

/* What names a page. Key, number and tokens tell it from all others; the rest goes into its header on disk. */
struct kv_page_name {
    struct kv_key key;
    uint32_t page_idx;
    const int32_t *tokens;       /* [PAGE_TOKENS] */
    const struct kv_key *parent; /* of the page before; NULL: there is none, or it does not matter */
    uint32_t uid;                /* whose namespace, KV_NO_UID: nobody's; or it does not matter */
};

int kv_shelf_open(const struct kv_shelf_options *options, struct kv_shelf **ret_shelf); /* -ENOMEM and the backend's */
void kv_shelf_close(struct kv_shelf *shelf); /* nothing is pinned or filling */

/* The record with this key and exactly these tokens, or KV_NO_RECORD. */
uint32_t kv_shelf_find(const struct kv_shelf *shelf, const struct kv_page_name *name);
bool kv_shelf_has(const struct kv_shelf *shelf, uint32_t record, enum kv_group group); /* CLEAN */

/* A record by the key alone: for a walk from a page to those before it, and for who only asks what is there. */
uint32_t kv_shelf_find_key(const struct kv_shelf *shelf, const struct kv_key *key, uint32_t page_idx);

/* For a walk by keys alone along a chain: asks for the memory that a find of this key will touch, first the table's, then,
 * when that has come, the record's. */
void kv_shelf_prefetch_entry(const struct kv_shelf *shelf, const struct kv_key *key);
void kv_shelf_prefetch_record(const struct kv_shelf *shelf, const struct kv_key *key);

/* The next record from `record` on that has a CLEAN restore point, or KV_NO_RECORD: for walks over all. */
uint32_t kv_shelf_next_state(const struct kv_shelf *shelf, uint32_t record);
/* The next CLEAN copy from this record and group on, in their order; false: there is none. For walks over all. */
bool kv_shelf_next_clean(const struct kv_shelf *shelf, uint32_t *record, int *group);
/* Of an existing record; points into it. */
struct kv_page_name kv_shelf_name(const struct kv_shelf *shelf, uint32_t record);

/* A slot to fill, and where its payload goes. E_EXISTS: it has one, CLEAN or FILLING. E_FULL: everything of this group is pinned,
 * filling or in others' shares, or there is no such group. What leaves to make room is the longest unused that its user's
 * share does not keep. */
int kv_shelf_reserve(struct kv_shelf *shelf, const struct kv_page_name *name, enum kv_group group, uint32_t *ret_record,
                     void **ret_payload);
void kv_shelf_filled(struct kv_shelf *shelf, uint32_t record, enum kv_group group, uint64_t checksum);
void kv_shelf_abandon(struct kv_shelf *shelf, uint32_t record, enum kv_group group);

/* The payload of a CLEAN copy, to be read; the header before it is whose who writes it to disk. A pinned one is where it is until it is unpinned; unpinning makes it the most recently used. */
void *kv_shelf_pin(struct kv_shelf *shelf, uint32_t record, enum kv_group group);
void kv_shelf_unpin(struct kv_shelf *shelf, uint32_t record, enum kv_group group);
void kv_shelf_unpin_unused(struct kv_shelf *shelf, uint32_t record, enum kv_group group); /* it keeps its place */
uint64_t kv_shelf_checksum(const struct kv_shelf *shelf, uint32_t record, enum kv_group group);

/* As if it had just come; nothing happens to what is not CLEAN, or pinned. Who uses a chain touches it from its end to its
 * beginning, so that it leaves from its end. */
void kv_shelf_touch(struct kv_shelf *shelf, const struct kv_page_name *name);

/* The opposite: it leaves before all others. */
void kv_shelf_let_leave(struct kv_shelf *shelf, const struct kv_page_name *name);

/* It turned out to be damaged: nobody finds it any more. It may be pinned; then it goes when it is unpinned. */
void kv_shelf_drop(struct kv_shelf *shelf, uint32_t record, enum kv_group group);

/* Drops what is not needed, the longest unused of all groups first. Returns the bytes. */
uint64_t kv_shelf_evict_bytes(struct kv_shelf *shelf, uint64_t n_bytes);

/* The same for all of one user's. What is pinned goes when it is unpinned; what is being filled stays. */
uint64_t kv_shelf_purge(struct kv_shelf *shelf, uint32_t uid);

/* Gives memory back to the system, n_bytes or somewhat more: slots that are free, then those of clean copies that nobody pins
 * and that may go (may_go NULL: any), the longest unused first. They are away until kv_shelf_grow(); half of each group's
 * slots never go. Nothing else may know of the memory: no kernel that holds it registered. Returns the bytes. */
uint64_t kv_shelf_shrink(struct kv_shelf *shelf, uint64_t n_bytes,
                         bool (*may_go)(void *user, const struct kv_page_name *name, enum kv_group group), void *user);
uint64_t kv_shelf_grow(struct kv_shelf *shelf,
                       uint64_t n_bytes); /* slots that were away can be used again. The bytes */

struct kv_shelf_group_stats {
    uint32_t n_slots, n_free, n_filling, n_clean, n_pinned; /* n_slots = n_free + n_filling + n_clean + n_away */
    uint32_t n_away;
    uint64_t n_evicted;
};
void kv_shelf_stats(const struct kv_shelf *shelf, enum kv_group group, struct kv_shelf_group_stats *ret_stats);
const struct kv_share *kv_shelf_share(const struct kv_shelf *shelf);
size_t kv_shelf_payload_bytes(const struct kv_shelf *shelf, enum kv_group group);
size_t kv_shelf_slot_bytes(const struct kv_shelf *shelf, enum kv_group group);
/* The memory of the group's slots; false: it has none. */
bool kv_shelf_memory(const struct kv_shelf *shelf, enum kv_group group, void **ret_start, size_t *ret_bytes);

/* NULL, or what is wrong. For tests. */
const char *kv_shelf_check(const struct kv_shelf *shelf);
