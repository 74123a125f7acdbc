#include "share.h"

#include <assert.h>

void kv_share_init(struct kv_share *share, uint32_t percent) {
    *share = (struct kv_share){.percent = percent, .n_owners = 1, .owners[KV_SHARE_NOBODY].uid = KV_NO_UID};
}

uint32_t kv_share_number(struct kv_share *share, uint32_t uid) {
    uint32_t free = KV_SHARE_OWNERS;

    if (uid == KV_NO_UID)
        return KV_SHARE_NOBODY;
    for (uint32_t o = 1; o < share->n_owners; o++) {
        if (share->owners[o].uid == uid)
            return o;
        if (share->owners[o].n == 0 && free == KV_SHARE_OWNERS)
            free = o;
    }
    if (free == KV_SHARE_OWNERS) {
        if (share->n_owners == KV_SHARE_OWNERS)
            return KV_SHARE_OWNERS - 1;
        free = share->n_owners++;
    }
    share->owners[free].uid = uid;
    return free;
}

void kv_share_hold(struct kv_share *share, uint32_t owner, enum kv_group group) {
    share->owners[owner].n_held[group]++;
    share->owners[owner].n++;
}

void kv_share_let_go(struct kv_share *share, uint32_t owner, enum kv_group group) {
    assert(share->owners[owner].n_held[group] > 0);
    share->owners[owner].n_held[group]--;
    share->owners[owner].n--;
}

/* What one user keeps of the group. */
static uint32_t share_of_one(const struct kv_share *share, enum kv_group group, uint32_t n_slots, uint32_t wanting) {
    uint64_t most = (uint64_t)n_slots * share->percent / 100;
    uint32_t n_users = 0;

    for (uint32_t o = 1; o < share->n_owners; o++)
        n_users += share->owners[o].n_held[group] > 0 || o == wanting;
    return n_users > 0 ? (uint32_t)min_u64(most, n_slots / n_users) : (uint32_t)most;
}

enum standing { STANDS_FIRST /* it has more than its share */, STANDS_SECOND /* it wants one itself */, STANDS_LAST };

uint32_t kv_share_loser(struct kv_share *share, enum kv_group group, uint32_t n_slots, uint32_t wanting,
                        const uint64_t *orders) {
    uint32_t most = share_of_one(share, group, n_slots, wanting), loser = KV_SHARE_OWNERS;
    enum standing standing = wanting == KV_SHARE_NOBODY ? STANDS_LAST : STANDS_SECOND; /* of the loser; at most */
    uint64_t oldest = UINT64_MAX;

    for (uint32_t o = 0; o < share->n_owners; o++) {
        enum standing mine = o == KV_SHARE_NOBODY || share->owners[o].n_held[group] > most ? STANDS_FIRST
                             : o == wanting                                                ? STANDS_SECOND
                                                                                           : STANDS_LAST;

        oldest = min_u64(oldest, orders[o]);
        if (orders[o] == UINT64_MAX || mine > standing ||
            (mine == standing && loser != KV_SHARE_OWNERS && orders[o] >= orders[loser]))
            continue;
        loser = o;
        standing = mine;
    }
    share->n_kept += loser != KV_SHARE_OWNERS && orders[loser] != oldest;
    return loser;
}

uint32_t kv_share_n_held(const struct kv_share *share, enum kv_group group) {
    uint32_t n = 0;

    for (uint32_t o = 1; o < share->n_owners; o++)
        n += share->owners[o].n_held[group];
    return n;
}

uint32_t kv_share_n_users(const struct kv_share *share) {
    uint32_t n = 0;

    for (uint32_t o = 1; o < share->n_owners; o++)
        n += share->owners[o].n > 0;
    return n;
}
