#include "evict.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define ORDER_NEEDED (UINT64_C(1) << 63)

int kv_evict_init(struct kv_evict *evict, uint32_t n_records) {
    *evict = (struct kv_evict){.n_records = n_records};
    memset(evict->first, 0xff, sizeof evict->first); /* KV_NO_RECORD */
    if (n_records == 0)
        return 0;
    evict->nodes = calloc(n_records, sizeof *evict->nodes);
    return evict->nodes ? 0 : -ENOMEM;
}

void kv_evict_deinit(struct kv_evict *evict) {
    free(evict->nodes);
    *evict = (struct kv_evict){0};
}

uint64_t kv_evict_order(bool is_needed, uint64_t used) {
    assert(used < ORDER_NEEDED);
    return used | (is_needed ? ORDER_NEEDED : 0);
}

/* ---- the heap ------------------------------------------------------------------------------------------------------- */

static uint8_t rank_of(const struct kv_evict *evict, uint32_t record) {
    return record == KV_NO_RECORD ? 0 : evict->nodes[record].rank;
}

/* The shorter way down is the right one. True: the rank is another than it was. */
static bool balance(struct kv_evict *evict, uint32_t record) {
    struct kv_candidate *node = &evict->nodes[record];
    uint8_t rank = node->rank;

    if (rank_of(evict, node->left) < rank_of(evict, node->right)) {
        uint32_t right = node->right;

        node->right = node->left;
        node->left = right;
    }
    node->rank = (uint8_t)(rank_of(evict, node->right) + 1);
    return node->rank != rank;
}

/* One heap of two, along their right ways, which are no longer than log2 of their sizes. */
static uint32_t meld(struct kv_evict *evict, uint32_t a, uint32_t b) {
    uint32_t top = KV_NO_RECORD, at = KV_NO_RECORD;

    while (a != KV_NO_RECORD || b != KV_NO_RECORD) {
        bool is_a = b == KV_NO_RECORD || (a != KV_NO_RECORD && evict->nodes[a].order <= evict->nodes[b].order);
        uint32_t next = is_a ? a : b;

        if (at == KV_NO_RECORD)
            top = next;
        else
            evict->nodes[at].right = next;
        evict->nodes[next].parent = at;
        at = next;
        if (a == KV_NO_RECORD || b == KV_NO_RECORD)
            break;
        *(is_a ? &a : &b) = evict->nodes[next].right;
    }
    for (; at != KV_NO_RECORD; at = evict->nodes[at].parent)
        balance(evict, at);
    return top;
}

void kv_evict_remove(struct kv_evict *evict, uint32_t record) {
    struct kv_candidate *node;
    uint32_t at, rest;

    if (evict->n == 0 || evict->nodes[record].rank == 0)
        return;
    node = &evict->nodes[record];
    at = node->parent;
    rest = meld(evict, node->left, node->right);
    if (rest != KV_NO_RECORD)
        evict->nodes[rest].parent = at;
    if (at == KV_NO_RECORD)
        evict->first[node->owner] = rest;
    else
        *(evict->nodes[at].left == record ? &evict->nodes[at].left : &evict->nodes[at].right) = rest;
    while (at != KV_NO_RECORD && balance(evict, at))
        at = evict->nodes[at].parent;
    node->rank = 0;
    evict->n--;
}

void kv_evict_put(struct kv_evict *evict, uint32_t record, uint32_t owner, uint64_t order) {
    kv_evict_remove(evict, record);
    evict->nodes[record] = (struct kv_candidate){.order = order,
                                                 .left = KV_NO_RECORD,
                                                 .right = KV_NO_RECORD,
                                                 .parent = KV_NO_RECORD,
                                                 .owner = (uint8_t)owner,
                                                 .rank = 1};
    evict->first[owner] = meld(evict, evict->first[owner], record);
    evict->n++;
}

/* ---- choosing ------------------------------------------------------------------------------------------------------- */

static uint64_t order_of_first(const struct kv_evict *evict, uint32_t owner) {
    uint32_t first = evict->first[owner];

    return first == KV_NO_RECORD ? UINT64_MAX : evict->nodes[first].order;
}

uint32_t kv_evict_first(const struct kv_evict *evict) {
    uint64_t lowest = UINT64_MAX;
    uint32_t record = KV_NO_RECORD;

    for (uint32_t o = 0; evict->n > 0 && o < KV_SHARE_OWNERS; o++)
        if (order_of_first(evict, o) < lowest) {
            lowest = order_of_first(evict, o);
            record = evict->first[o];
        }
    return record;
}

uint32_t kv_evict_first_for(const struct kv_evict *evict, struct kv_share *share, enum kv_group group, uint32_t n_slots,
                            uint32_t wanting) {
    uint64_t orders[KV_SHARE_OWNERS];
    uint32_t loser;

    if (evict->n == 0)
        return KV_NO_RECORD;
    for (uint32_t o = 0; o < KV_SHARE_OWNERS; o++)
        orders[o] = order_of_first(evict, o);
    loser = kv_share_loser(share, group, n_slots, wanting, orders);
    return loser == KV_SHARE_OWNERS ? KV_NO_RECORD : evict->first[loser];
}

bool kv_evict_find(const struct kv_evict *evict, uint32_t record, uint64_t *ret_order) {
    if (evict->n == 0 || evict->nodes[record].rank == 0)
        return false;
    *ret_order = evict->nodes[record].order;
    return true;
}

/* ---- check ---------------------------------------------------------------------------------------------------------- */

static const char *check_node(const struct kv_evict *evict, uint32_t record) {
    const struct kv_candidate *node = &evict->nodes[record];
    const struct kv_candidate *parent = node->parent == KV_NO_RECORD ? NULL : &evict->nodes[node->parent];

    if (parent ? parent->left != record && parent->right != record : evict->first[node->owner] != record)
        return "a candidate is not where it says";
    if (parent && (parent->rank == 0 || parent->owner != node->owner))
        return "a candidate hangs off one that is none, or another owner's";
    if (parent && parent->order > node->order)
        return "a candidate stands behind one that leaves later";
    if (node->rank != rank_of(evict, node->right) + 1 || rank_of(evict, node->left) < rank_of(evict, node->right))
        return "the ranks of candidates are wrong";
    return NULL;
}

const char *kv_evict_check(const struct kv_evict *evict) {
    const char *wrong = NULL;
    uint32_t n = 0;

    for (uint32_t record = 0; wrong == NULL && record < evict->n_records; record++) {
        if (evict->nodes[record].rank == 0)
            continue;
        n++;
        wrong = check_node(evict, record);
    }
    return wrong != NULL || n == evict->n ? wrong : "the candidates are not as many as they are said to be";
}
