#include "evict.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define KV_NO_PLACE UINT32_MAX
#define ORDER_NEEDED (UINT64_C(1) << 63)

int kv_evict_init(struct kv_evict *evict, uint32_t n_records, uint32_t n_max) {
    *evict = (struct kv_evict){0};
    if (n_max == 0)
        return 0;
    evict->heap = calloc(n_max, sizeof *evict->heap);
    evict->place = malloc((size_t)n_records * sizeof *evict->place);
    if (evict->heap == NULL || evict->place == NULL) {
        kv_evict_deinit(evict);
        return -ENOMEM;
    }
    memset(evict->place, 0xff, (size_t)n_records * sizeof *evict->place); /* KV_NO_PLACE */
    evict->n_max = n_max;
    return 0;
}

void kv_evict_deinit(struct kv_evict *evict) {
    free(evict->heap);
    free(evict->place);
    *evict = (struct kv_evict){0};
}

uint64_t kv_evict_order(bool is_needed, uint64_t used) {
    assert(used < ORDER_NEEDED);
    return used | (is_needed ? ORDER_NEEDED : 0);
}

static void set(struct kv_evict *evict, uint32_t i, struct kv_candidate candidate) {
    evict->heap[i] = candidate;
    evict->place[candidate.record] = i;
}

/* Puts the candidate where place i and the order allow it to stand. */
static void settle(struct kv_evict *evict, uint32_t i, struct kv_candidate candidate) {
    uint32_t child;

    for (; i > 0 && evict->heap[(i - 1) / 2].order > candidate.order; i = (i - 1) / 2)
        set(evict, i, evict->heap[(i - 1) / 2]);
    for (; (child = 2 * i + 1) < evict->n; i = child) {
        if (child + 1 < evict->n && evict->heap[child + 1].order < evict->heap[child].order)
            child++;
        if (evict->heap[child].order >= candidate.order)
            break;
        set(evict, i, evict->heap[child]);
    }
    set(evict, i, candidate);
}

void kv_evict_put(struct kv_evict *evict, uint32_t record, uint64_t order) {
    uint32_t i = evict->place[record];

    if (i == KV_NO_PLACE) {
        assert(evict->n < evict->n_max);
        i = evict->n++;
    }
    settle(evict, i, (struct kv_candidate){.order = order, .record = record});
}

void kv_evict_remove(struct kv_evict *evict, uint32_t record) {
    uint32_t i;

    if (evict->n == 0 || evict->place[record] == KV_NO_PLACE)
        return;
    i = evict->place[record];
    evict->place[record] = KV_NO_PLACE;
    evict->n--;
    if (i < evict->n)
        settle(evict, i, evict->heap[evict->n]);
}

uint32_t kv_evict_first(const struct kv_evict *evict) {
    return evict->n > 0 ? evict->heap[0].record : KV_NO_RECORD;
}

bool kv_evict_find(const struct kv_evict *evict, uint32_t record, uint64_t *ret_order) {
    if (evict->n == 0 || evict->place[record] == KV_NO_PLACE)
        return false;
    *ret_order = evict->heap[evict->place[record]].order;
    return true;
}

const char *kv_evict_check(const struct kv_evict *evict) {
    for (uint32_t i = 0; i < evict->n; i++) {
        if (evict->place[evict->heap[i].record] != i)
            return "a candidate is not where its record says";
        if (i > 0 && evict->heap[(i - 1) / 2].order > evict->heap[i].order)
            return "a candidate stands behind one that leaves later";
    }
    return NULL;
}
