/* bpe: byte pair encoding of one word. Knows merges and ids, nothing of characters, files or added tokens. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    BPE_IDS_MAX = 1 << 20,    /* ids lie below it */
    BPE_MERGES_MAX = 1 << 21, /* so that two ids and a rank fit into 64 bits */
    BPE_SHORT_BYTES = 64,     /* longer words are merged with a heap */
    BPE_NO_RANK = -1,
};

struct bpe {
    int32_t byte_id[256]; /* the token that is this one byte */
    int32_t
        *byte_ranks; /* [256 * 256] rank of the pair of two bytes, or BPE_NO_RANK: the first look-up of every pair */
    uint64_t *slots; /* left << 42 | right << 21 | rank, open addressing; all ones: free */
    uint64_t slot_mask;
    int32_t *merged; /* [n_merges] rank -> the token that the pair becomes */
    int32_t n_merges, n_merges_max;
};

int bpe_init(struct bpe *bpe, int32_t n_merges_max);
void bpe_deinit(struct bpe *bpe);
/* Adds the merge of the next rank. False: the pair has one already. */
bool bpe_add(struct bpe *bpe, int32_t left, int32_t right, int32_t merged);
/* After the last merge, with byte_id filled: what bpe_encode() needs. */
void bpe_finish(struct bpe *bpe);

/* One symbol of a long word. */
struct bpe_node {
    int32_t id, rank; /* rank of the pair (this, next), or BPE_NO_RANK */
    uint32_t previous, next;
};

/* Buffers of one caller for long words, zero at first: about 40 bytes per byte of the longest word. */
struct bpe_scratch {
    struct bpe_node *nodes;
    uint64_t *heap; /* rank << 32 | node: the lowest rank first, the leftmost of them first */
    size_t nodes_max, heap_max, n_heap;
};

void bpe_scratch_deinit(struct bpe_scratch *scratch);

/* Writes the ids of a word of n bytes to ret_ids, which has room for n, and their number. 0 or -ENOMEM. */
int bpe_encode(const struct bpe *bpe, struct bpe_scratch *scratch, const unsigned char *word, size_t n,
               int32_t *ret_ids, size_t *ret_n_ids);
