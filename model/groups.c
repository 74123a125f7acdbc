#include "groups.h"

#include <errno.h>

const char *kv_group_name(enum kv_group group) {
    static const char *const names[KV_GROUP_N] = {"target_full", "target_state", "draft_full", "draft_sliding"};

    return (unsigned)group < KV_GROUP_N ? names[group] : NULL;
}

static int check_member(const char *owner, int i, const struct kv_member *m, struct report *report) {
    const char *name = kv_group_name(m->group);

    if (!name)
        return report_error(report, -EINVAL, "%s: attention layer %d names unknown page group %d", owner, i,
                            (int)m->group);
    if (m->group == KV_TARGET_STATE)
        return report_error(report, -EINVAL, "%s: attention layer %d names group %s, which holds no K/V pages", owner,
                            i, name);
    if (m->n_kv_heads < 1 || m->head_dim < 1)
        return report_error(report, -EINVAL, "%s: attention layer %d of group %s has %d kv heads of %d", owner, i, name,
                            m->n_kv_heads, m->head_dim);
    if ((m->group == KV_DRAFT_SLIDING) != (m->window > 0))
        return report_error(report, -EINVAL, "%s: attention layer %d of group %s has window %d", owner, i, name,
                            m->window);
    return 0;
}

int kv_groups_build(const char *owner, const struct kv_member *members, int n, struct kv_geometry *ret_groups,
                    int *ret_layer, struct report *report) {
    struct kv_geometry groups[KV_GROUP_N] = {0};

    if (n < 1)
        return report_error(report, -EINVAL, "%s: no attention layer: every page group is empty", owner);
    for (int i = 0; i < n; i++) {
        const struct kv_member *m = &members[i];
        int r = check_member(owner, i, m, report);
        struct kv_geometry *g;

        if (r != 0)
            return r;
        g = &groups[m->group];
        if (g->n_layers > 0 && (g->n_kv_heads != m->n_kv_heads || g->head_dim != m->head_dim ||
                                g->window != m->window || g->dtype != m->dtype))
            return report_error(report, -EINVAL,
                                "%s: group %s mixes geometries: layer %d has %d kv heads of %d (%s, window %d), the "
                                "group %d of %d (%s, window %d)",
                                owner, kv_group_name(m->group), i, m->n_kv_heads, m->head_dim, dtype_name(m->dtype),
                                m->window, g->n_kv_heads, g->head_dim, dtype_name(g->dtype), g->window);
        g->n_kv_heads = m->n_kv_heads;
        g->head_dim = m->head_dim;
        g->window = m->window;
        g->dtype = m->dtype;
        ret_layer[i] = g->n_layers++;
    }
    for (int g = 0; g < KV_GROUP_N; g++) {
        if (groups[g].n_layers > 0)
            groups[g].page_bytes =
                kv_page_bytes(groups[g].dtype, groups[g].n_layers, groups[g].n_kv_heads, groups[g].head_dim);
        ret_groups[g] = groups[g];
    }
    return 0;
}
