/* groups: which layers share page geometry and retention. Every attention layer names its group from construction;
 * start-up checks that the groups are whole before anything is allocated. */
#pragma once
#include "backend.h"
#include "report.h"

/* What one attention layer asks of its group. */
struct kv_member {
    enum kv_group group;
    int n_kv_heads, head_dim;
    int window; /* 0: every position stays */
    enum dtype dtype;
};

struct kv_geometry {
    int n_layers; /* 0: the group does not exist for this pair */
    int n_kv_heads, head_dim, window;
    enum dtype dtype;
    size_t page_bytes;
};

const char *kv_group_name(enum kv_group group); /* NULL for an unknown group */

/* Groups `n` members; ret_groups[KV_GROUP_N], ret_layer[n] = index within the member's group, in the order given.
 * -EINVAL with a report: no members, unknown group, a page group that may not hold attention layers (target_state),
 * members of one group that differ in heads, head size, window or element type, a sliding group without a window. */
int kv_groups_build(const char *owner, const struct kv_member *members, int n, struct kv_geometry *ret_groups,
                    int *ret_layer, struct report *report);
