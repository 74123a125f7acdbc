/* kv_rig: a store over memory of the CPU backend, and seqs that fill pages as a device would: with a tag of what the page
 * stands for, so that a wrong slot shows. */
#pragma once
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lease.h"
#include "store.h"
#include "store_internal.h"

#define KV_RIG_CHECK(claim)                                                                                            \
    do {                                                                                                               \
        if (!(claim)) {                                                                                                \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #claim);                                        \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

enum { KV_RIG_SLOT_BYTES = 64, KV_RIG_PAGES_MAX = 48 };

struct kv_rig {
    const struct backend *backend;
    struct device *device;
    struct kv_store *store;
    struct kv_hasher *hasher;
};

/* n_slots: usable ones, 0 for a group that does not exist. */
static inline struct kv_rig kv_rig_open_shared(const uint32_t n_slots[KV_GROUP_N], uint32_t window_tokens,
                                               uint32_t n_records_max, uint32_t share_percent) {
    struct kv_rig rig = {.backend = backend_find("cpu")};
    struct kv_store_options options = {
        .sliding_window_tokens = window_tokens, .n_records_max = n_records_max, .share_percent = share_percent};

    KV_RIG_CHECK(rig.backend->open(&(struct backend_options){.n_threads = 1}, &rig.device) == 0);
    options.backend = rig.backend;
    options.device = rig.device;
    for (int g = 0; g < KV_GROUP_N; g++) {
        options.group[g].slot_bytes = KV_RIG_SLOT_BYTES;
        options.group[g].n_slots = n_slots[g] > 0 && g != KV_TARGET_STATE ? n_slots[g] + 1 : n_slots[g];
    }
    KV_RIG_CHECK(kv_store_open(&options, &rig.store) == 0);
    KV_RIG_CHECK(kv_hasher_new(&rig.hasher) == 0);
    return rig;
}

static inline struct kv_rig kv_rig_open(const uint32_t n_slots[KV_GROUP_N], uint32_t window_tokens,
                                        uint32_t n_records_max) {
    return kv_rig_open_shared(n_slots, window_tokens, n_records_max, 0);
}

static inline void kv_rig_close(struct kv_rig *rig) {
    kv_hasher_free(rig->hasher);
    kv_store_close(rig->store);
    rig->backend->close(rig->device);
}

static inline void kv_rig_check(const struct kv_rig *rig) {
    char line[200];

    if (kv_store_check(rig->store, line, sizeof line) != 0) {
        fprintf(stderr, "%s\n", line);
        abort();
    }
}

static inline uint64_t *kv_rig_tag(const struct kv_rig *rig, enum kv_group group, uint32_t slot) {
    return (uint64_t *)(void *)((char *)kv_store_arena(rig->store, group) + (size_t)slot * KV_RIG_SLOT_BYTES);
}

/* One token list of one user, and the slots that are its own. */
struct kv_seq {
    struct kv_lease lease;
    uint32_t uid, n_pages; /* of the token list */
    uint32_t n_filled;     /* pages that the seq has: its own and the lease's */
    int32_t tokens[KV_RIG_PAGES_MAX * PAGE_TOKENS];
    struct kv_key keys[KV_RIG_PAGES_MAX];
    uint64_t tags[KV_RIG_PAGES_MAX];
    uint32_t own[KV_RIG_PAGES_MAX][KV_GROUP_N];
    struct kv_match match;
};

/* A new list for a seq that holds nothing. Page i of the list is filled with kinds[i]. */
static inline void kv_seq_list(struct kv_seq *seq, struct kv_rig *rig, uint32_t uid, const char *kinds) {
    struct kv_key root;

    seq->uid = seq->lease.uid = uid;
    seq->n_pages = (uint32_t)strlen(kinds);
    for (uint32_t i = 0; i < seq->n_pages; i++) {
        uint64_t before = i > 0 ? seq->tags[i - 1] : uid + 1;

        for (int k = 0; k < PAGE_TOKENS; k++)
            seq->tokens[i * PAGE_TOKENS + (uint32_t)k] = kinds[i] * 1000 + k;
        seq->tags[i] = (before ^ (uint64_t)kinds[i]) * UINT64_C(0x9e3779b97f4a7c15) + i;
    }
    KV_RIG_CHECK(kv_store_root(rig->store, uid, &root) == 0);
    KV_RIG_CHECK(kv_key_chain(rig->hasher, &root, seq->tokens, seq->n_pages, seq->keys) == 0);
}

static inline void kv_seq_init(struct kv_seq *seq, struct kv_rig *rig, uint32_t uid, const char *kinds) {
    memset(seq, 0, sizeof *seq);
    KV_RIG_CHECK(kv_lease_init(&seq->lease, rig->store, KV_RIG_PAGES_MAX) == 0);
    memset(seq->own, 0xff, sizeof seq->own); /* KV_NO_SLOT */
    kv_seq_list(seq, rig, uid, kinds);
}

static inline uint64_t kv_seq_tag(const struct kv_seq *seq, enum kv_group group, uint32_t page) {
    return seq->tags[page] * 4 + (uint64_t)group;
}

/* Every slot that the seq reads holds what its tokens say. */
static inline void kv_seq_check(const struct kv_seq *seq, const struct kv_rig *rig) {
    for (uint32_t page = 0; page < seq->n_filled; page++)
        for (int g = 0; g < KV_GROUP_N; g++) {
            uint32_t leased = kv_lease_slot(&seq->lease, (enum kv_group)g, page), own = seq->own[page][g];

            if (leased != KV_NO_SLOT)
                KV_RIG_CHECK(*kv_rig_tag(rig, (enum kv_group)g, leased) == kv_seq_tag(seq, (enum kv_group)g, page));
            if (own != KV_NO_SLOT)
                KV_RIG_CHECK(*kv_rig_tag(rig, (enum kv_group)g, own) == kv_seq_tag(seq, (enum kv_group)g, page));
            KV_RIG_CHECK(g != KV_TARGET_FULL || leased != KV_NO_SLOT || own != KV_NO_SLOT);
        }
}

static inline struct kv_match kv_seq_lookup(const struct kv_seq *seq, const struct kv_rig *rig) {
    struct kv_match match;

    kv_store_lookup(rig->store, seq->keys, seq->tokens, seq->n_pages, &match);
    return match;
}

static inline void kv_seq_match(struct kv_seq *seq, struct kv_rig *rig) {
    kv_store_match(rig->store, &seq->lease, seq->keys, seq->tokens, seq->n_pages, &seq->match);
    seq->n_filled = seq->match.n_tokens / PAGE_TOKENS;
    if (seq->n_filled > 0)
        KV_RIG_CHECK(*kv_rig_tag(rig, KV_TARGET_STATE, seq->match.state_slot) ==
                     kv_seq_tag(seq, KV_TARGET_STATE, seq->n_filled - 1));
    kv_seq_check(seq, rig);
}

/* A slot of the group for the page, with the page in it. */
static inline int kv_seq_take(struct kv_seq *seq, struct kv_rig *rig, enum kv_group group, uint32_t page) {
    int r = kv_store_take(rig->store, group, &seq->own[page][group]);

    if (r == 0)
        *kv_rig_tag(rig, group, seq->own[page][group]) = kv_seq_tag(seq, group, page);
    return r;
}

static inline int kv_seq_publish(struct kv_seq *seq, uint32_t page, bool ret_taken[KV_GROUP_N]) {
    int r = kv_lease_publish_page(&seq->lease, page, &seq->keys[page], seq->tokens + page * PAGE_TOKENS, seq->own[page],
                                  ret_taken);

    for (int g = 0; g < KV_GROUP_N && r == 0; g++)
        if (ret_taken[g])
            seq->own[page][g] = KV_NO_SLOT;
    return r;
}

/* E_FULL: no slot; nothing is kept. */
static inline int kv_seq_publish_state(struct kv_seq *seq, struct kv_rig *rig, uint32_t n_pages, bool *ret_taken) {
    uint32_t slot;
    int r = kv_store_take(rig->store, KV_TARGET_STATE, &slot);

    if (r != 0)
        return r;
    *kv_rig_tag(rig, KV_TARGET_STATE, slot) = kv_seq_tag(seq, KV_TARGET_STATE, n_pages - 1);
    kv_lease_publish_state(&seq->lease, n_pages, slot, ret_taken);
    if (!*ret_taken)
        kv_store_give(rig->store, KV_TARGET_STATE, slot);
    return 0;
}

/* Pages of the list that the seq lacks are computed and published, up to n_pages, and a restore point there. False: no slot. */
static inline bool kv_seq_compute(struct kv_seq *seq, struct kv_rig *rig, uint32_t n_pages) {
    for (; seq->n_filled < n_pages; seq->n_filled++) {
        bool taken[KV_GROUP_N];

        if (kv_seq_take(seq, rig, KV_TARGET_FULL, seq->n_filled) != 0)
            return false;
        kv_seq_take(seq, rig, KV_DRAFT_FULL, seq->n_filled);
        kv_seq_take(seq, rig, KV_DRAFT_SLIDING, seq->n_filled);
        KV_RIG_CHECK(kv_seq_publish(seq, seq->n_filled, taken) == 0);
    }
    return kv_seq_publish_state(seq, rig, n_pages, &(bool){false}) == 0;
}

/* Lets go of everything; what was published stays in the index. */
static inline void kv_seq_end(struct kv_seq *seq, struct kv_rig *rig) {
    kv_lease_release(&seq->lease);
    for (uint32_t page = 0; page < KV_RIG_PAGES_MAX; page++)
        for (int g = 0; g < KV_GROUP_N; g++)
            if (seq->own[page][g] != KV_NO_SLOT) {
                kv_store_give(rig->store, (enum kv_group)g, seq->own[page][g]);
                seq->own[page][g] = KV_NO_SLOT;
            }
    seq->n_filled = 0;
}

static inline void kv_seq_deinit(struct kv_seq *seq, struct kv_rig *rig) {
    kv_seq_end(seq, rig);
    kv_lease_deinit(&seq->lease);
}
