#include "bpe.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define FREE_SLOT UINT64_MAX

enum {
    RANK_BITS = 21,
    ID_BITS = 21,
    NO_NODE = -1,
    HEAP_WAYS = 4, /* half the depth of a binary heap, and the children share a cache line */
};

static_assert(BPE_MERGES_MAX <= 1 << RANK_BITS && BPE_IDS_MAX < 1 << ID_BITS && 2 * ID_BITS + RANK_BITS <= 63,
              "a slot holds two ids and a rank, and is never all ones");

static uint64_t pair_of(int32_t left, int32_t right) {
    return (uint64_t)left << ID_BITS | (uint64_t)right;
}

static uint64_t slot_of(const struct bpe *bpe, uint64_t pair) {
    uint64_t hash = pair * UINT64_C(0x9E3779B97F4A7C15);

    return (hash ^ hash >> 32) & bpe->slot_mask;
}

static int32_t rank_of(const struct bpe *bpe, int32_t left, int32_t right) {
    uint64_t pair = pair_of(left, right);

    for (uint64_t at = slot_of(bpe, pair);; at = (at + 1) & bpe->slot_mask) {
        uint64_t slot = bpe->slots[at];

        if (slot >> RANK_BITS == pair)
            return (int32_t)(slot & ((1u << RANK_BITS) - 1));
        if (slot == FREE_SLOT)
            return BPE_NO_RANK;
    }
}

int bpe_init(struct bpe *bpe, int32_t n_merges_max) {
    uint64_t n_slots = 16;

    assert(n_merges_max >= 0 && n_merges_max <= BPE_MERGES_MAX);
    *bpe = (struct bpe){.n_merges_max = n_merges_max};
    while (n_slots < 2 * (uint64_t)n_merges_max + 1)
        n_slots *= 2;
    bpe->slots = malloc(n_slots * sizeof *bpe->slots);
    bpe->merged = malloc(((size_t)n_merges_max + 1) * sizeof *bpe->merged);
    bpe->byte_ranks = malloc(256 * 256 * sizeof *bpe->byte_ranks);
    if (!bpe->slots || !bpe->merged || !bpe->byte_ranks) {
        bpe_deinit(bpe);
        return -ENOMEM;
    }
    memset(bpe->slots, 0xFF, n_slots * sizeof *bpe->slots);
    bpe->slot_mask = n_slots - 1;
    return 0;
}

void bpe_deinit(struct bpe *bpe) {
    free(bpe->slots);
    free(bpe->merged);
    free(bpe->byte_ranks);
    *bpe = (struct bpe){0};
}

bool bpe_add(struct bpe *bpe, int32_t left, int32_t right, int32_t merged) {
    uint64_t pair = pair_of(left, right), at = slot_of(bpe, pair);

    assert(bpe->n_merges < bpe->n_merges_max);
    for (; bpe->slots[at] != FREE_SLOT; at = (at + 1) & bpe->slot_mask)
        if (bpe->slots[at] >> RANK_BITS == pair)
            return false;
    bpe->slots[at] = pair << RANK_BITS | (uint64_t)bpe->n_merges;
    bpe->merged[bpe->n_merges++] = merged;
    return true;
}

void bpe_finish(struct bpe *bpe) {
    for (int left = 0; left < 256; left++)
        for (int right = 0; right < 256; right++)
            bpe->byte_ranks[left << 8 | right] = rank_of(bpe, bpe->byte_id[left], bpe->byte_id[right]);
}

static int32_t byte_rank(const struct bpe *bpe, const unsigned char *word) {
    return bpe->byte_ranks[word[0] << 8 | word[1]];
}

/* Looks through all pairs for the best one after each merge: fastest while they are few. */
static size_t encode_short(const struct bpe *bpe, const unsigned char *word, size_t n, int32_t *ids) {
    int32_t ranks[BPE_SHORT_BYTES]; /* of the pairs (i, i + 1) */

    for (size_t i = 0; i < n; i++)
        ids[i] = bpe->byte_id[word[i]];
    for (size_t i = 0; i + 1 < n; i++)
        ranks[i] = byte_rank(bpe, word + i);
    for (;;) {
        uint32_t best_rank = (uint32_t)BPE_NO_RANK; /* as unsigned above every rank */
        size_t best = 0;

        for (size_t i = 0; i + 1 < n; i++)
            if ((uint32_t)ranks[i] < best_rank) {
                best_rank = (uint32_t)ranks[i];
                best = i;
            }
        if (best_rank == (uint32_t)BPE_NO_RANK)
            return n;
        ids[best] = bpe->merged[best_rank];
        n--;
        for (size_t i = best + 1; i < n; i++) {
            ids[i] = ids[i + 1];
            ranks[i - 1] = ranks[i];
        }
        if (best > 0)
            ranks[best - 1] = rank_of(bpe, ids[best - 1], ids[best]);
        if (best + 1 < n)
            ranks[best] = rank_of(bpe, ids[best], ids[best + 1]);
    }
}

static void sift_down(struct bpe_scratch *s, size_t at) {
    uint64_t entry = s->heap[at];

    for (;;) {
        size_t first = HEAP_WAYS * at + 1, least = first;
        size_t end = first + HEAP_WAYS < s->n_heap ? first + HEAP_WAYS : s->n_heap;

        for (size_t child = first + 1; child < end; child++)
            if (s->heap[child] < s->heap[least])
                least = child;
        if (first >= s->n_heap || s->heap[least] >= entry)
            break;
        s->heap[at] = s->heap[least];
        at = least;
    }
    s->heap[at] = entry;
}

static void push(struct bpe_scratch *s, uint32_t node) {
    uint64_t entry = (uint64_t)s->nodes[node].rank << 32 | node;
    size_t at = s->n_heap++;

    while (at > 0 && s->heap[(at - 1) / HEAP_WAYS] > entry) {
        s->heap[at] = s->heap[(at - 1) / HEAP_WAYS];
        at = (at - 1) / HEAP_WAYS;
    }
    s->heap[at] = entry;
}

static uint64_t pop(struct bpe_scratch *s) {
    uint64_t entry = s->heap[0];

    s->heap[0] = s->heap[--s->n_heap];
    if (s->n_heap > 0)
        sift_down(s, 0);
    return entry;
}

/* The pair (node, its next) has become another one. */
static void refresh(const struct bpe *bpe, struct bpe_scratch *s, uint32_t node) {
    struct bpe_node *left = &s->nodes[node];

    left->rank = left->next == (uint32_t)NO_NODE ? BPE_NO_RANK : rank_of(bpe, left->id, s->nodes[left->next].id);
    if (left->rank != BPE_NO_RANK)
        push(s, node);
}

static int reserve(struct bpe_scratch *s, size_t n) {
    size_t heap_max = 3 * n; /* n - 1 first pairs, and at most two new ones for each of n - 1 merges */

    if (n > s->nodes_max) {
        bpe_scratch_deinit(s);
        s->nodes = malloc(n * sizeof *s->nodes);
        s->heap = malloc(heap_max * sizeof *s->heap);
        if (!s->nodes || !s->heap) {
            bpe_scratch_deinit(s);
            return -ENOMEM;
        }
        s->nodes_max = n;
        s->heap_max = heap_max;
    }
    return 0;
}

void bpe_scratch_deinit(struct bpe_scratch *scratch) {
    free(scratch->nodes);
    free(scratch->heap);
    *scratch = (struct bpe_scratch){0};
}

/* A heap of pairs over a linked list of symbols: O(n log n). An entry whose pair is gone stays in the heap and is told by
 * its rank: every pair that ever starts at one node is longer than the one before it, so no rank comes back there. */
static int encode_long(const struct bpe *bpe, struct bpe_scratch *s, const unsigned char *word, size_t n, int32_t *ids,
                       size_t *ret_n_ids) {
    size_t n_ids = 0;
    int r = reserve(s, n);

    if (r != 0)
        return r;
    s->n_heap = 0;
    for (size_t i = 0; i < n; i++) {
        struct bpe_node *node = &s->nodes[i];

        node->id = bpe->byte_id[word[i]];
        node->rank = i + 1 < n ? byte_rank(bpe, word + i) : BPE_NO_RANK;
        node->previous = (uint32_t)i - 1; /* NO_NODE for the first */
        node->next = i + 1 < n ? (uint32_t)i + 1 : (uint32_t)NO_NODE;
        if (node->rank != BPE_NO_RANK)
            s->heap[s->n_heap++] = (uint64_t)node->rank << 32 | i;
    }
    for (size_t i = s->n_heap / HEAP_WAYS + 1; i-- > 0;)
        if (i < s->n_heap)
            sift_down(s, i);
    while (s->n_heap > 0) {
        uint64_t entry = pop(s);
        struct bpe_node *left = &s->nodes[(uint32_t)entry], *right;

        if (left->rank != (int32_t)(entry >> 32))
            continue;
        right = &s->nodes[left->next];
        left->id = bpe->merged[left->rank];
        left->next = right->next;
        right->rank = BPE_NO_RANK; /* its entries die with it */
        if (left->next != (uint32_t)NO_NODE)
            s->nodes[left->next].previous = (uint32_t)entry;
        refresh(bpe, s, (uint32_t)entry);
        if (left->previous != (uint32_t)NO_NODE)
            refresh(bpe, s, left->previous);
    }
    for (uint32_t i = 0; i != (uint32_t)NO_NODE; i = s->nodes[i].next)
        ids[n_ids++] = s->nodes[i].id;
    *ret_n_ids = n_ids;
    return 0;
}

int bpe_encode(const struct bpe *bpe, struct bpe_scratch *scratch, const unsigned char *word, size_t n,
               int32_t *ret_ids, size_t *ret_n_ids) {
    assert(n > 0 && n < UINT32_MAX / 4);
    if (n > BPE_SHORT_BYTES)
        return encode_long(bpe, scratch, word, n, ret_ids, ret_n_ids);
    *ret_n_ids = encode_short(bpe, word, n, ret_ids);
    return 0;
}
