/* share: whose the slots of a tier are, and who gives one up when somebody wants one. Each user keeps what he has of a
 * group's slots whatever others do, up to his share: `percent` of them, and no more than an equal part for each user who
 * has any. What is beyond that leaves first, the longest unused of all users; then what belongs to who wants the slot.
 * Pure counting.
 *
 * Users are counted under numbers that are handed out here. Those who come when all numbers are taken share the last one.
 * Number 0 is nobody's: what a running request cannot do without, which no share holds up. */
#pragma once
#include "layout.h"

enum { KV_SHARE_OWNERS = 64, KV_SHARE_NOBODY = 0 };
#define KV_NO_UID (UINT32_MAX - 1) /* of what is nobody's; UINT32_MAX names what users share */

struct kv_share_owner {
    uint32_t uid;
    uint32_t n_held[KV_GROUP_N], n; /* slots, of each group and of all */
};

struct kv_share {
    uint32_t percent;  /* 0: there are no shares */
    uint32_t n_owners; /* numbers that were ever used are below */
    struct kv_share_owner owners[KV_SHARE_OWNERS];
    uint64_t n_kept; /* slots that were the longest unused and stayed, in their user's share */
};

void kv_share_init(struct kv_share *share, uint32_t percent);

/* The user's number; one that holds nothing may be another's after the next call. */
uint32_t kv_share_number(struct kv_share *share, uint32_t uid);
void kv_share_hold(struct kv_share *share, uint32_t owner, enum kv_group group);
void kv_share_let_go(struct kv_share *share, uint32_t owner, enum kv_group group);

/* Whose slot goes to `wanting`. n_slots: of the group, which shares are parts of; orders: [KV_SHARE_OWNERS] of what would
 * leave first of each owner's, the lowest first, UINT64_MAX: nothing may. KV_SHARE_OWNERS: nobody's. */
uint32_t kv_share_loser(struct kv_share *share, enum kv_group group, uint32_t n_slots, uint32_t wanting,
                        const uint64_t *orders);

/* Slots of users, and users who have any. */
uint32_t kv_share_n_held(const struct kv_share *share, enum kv_group group);
uint32_t kv_share_n_users(const struct kv_share *share);
