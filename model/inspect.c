/* What follows from the config.json files of a pair alone: shapes, groups, stop ids. Reads no weights. */
#include "model.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "dflash.h"
#include "qwen.h"

static int read_target(const struct model_options *o, struct model_info *info, struct report *report) {
    char path[4096];
    int r;

    snprintf(path, sizeof path, "%s/config.json", o->target_folder);
    r = qwen_config_read(path, &info->target, report);
    if (r != 0)
        return r;
    snprintf(path, sizeof path, "%s/generation_config.json", o->target_folder);
    return generation_config_read(path, &info->generation, report);
}

static int read_draft(const struct model_options *o, struct model_info *info, struct report *report) {
    char path[4096];
    int r;

    if (!o->draft_folder)
        return 0;
    snprintf(path, sizeof path, "%s/config.json", o->draft_folder);
    r = draft_config_read(path, o->draft_causal, &info->draft, report);
    if (r == 0)
        r = draft_config_check(path, &info->draft, &info->target, report);
    if (r == 0 && o->block_size > info->draft.block_size)
        r = report_error(report, -EINVAL, "%s: block_size is %d; blocks of %d rows were asked for", path,
                         info->draft.block_size, o->block_size);
    return r;
}

static int build_groups(const struct model_options *o, struct model_info *info, struct report *report) {
    struct kv_geometry draft_groups[KV_GROUP_N] = {0};
    struct kv_member members[LAYERS_MAX];
    int layer[LAYERS_MAX], r;

    r = kv_groups_build(o->target_folder, members, qwen_kv_members(&info->target, o->kv_dtype, members), info->groups,
                        layer, report);
    if (r != 0)
        return r;
    if (info->draft.n_layers > 0) {
        dflash_kv_members(&info->draft, o->draft_dtype, members);
        r = kv_groups_build(o->draft_folder, members, info->draft.n_layers, draft_groups, layer, report);
        if (r != 0)
            return r;
        info->groups[KV_DRAFT_FULL] = draft_groups[KV_DRAFT_FULL];
        info->groups[KV_DRAFT_SLIDING] = draft_groups[KV_DRAFT_SLIDING];
    }
    return 0;
}

int model_inspect(const struct model_options *options, const struct backend_caps *caps, struct model_info *ret_info,
                  struct report *report) {
    struct model_info info = {0};
    int r = read_target(options, &info, report);

    if (r == 0)
        r = read_draft(options, &info, report);
    if (r == 0)
        r = build_groups(options, &info, report);
    if (r != 0)
        return r;
    info.state = qwen_state_view(&info.target);
    info.state.slot_bytes = state_slot_bytes(&info.state, caps->conv_dtype);
    if (caps->open_rows > 0)
        info.state.open_bytes = state_open_bytes(&info.state, caps->conv_dtype, caps->open_rows, caps->open_inputs);
    info.block_size = info.draft.n_layers == 0  ? 1
                      : options->block_size > 0 ? options->block_size
                                                : info.draft.block_size;
    info.n_stop = info.generation.n_eos > 0 ? info.generation.n_eos : info.target.n_eos;
    memcpy(info.stop, info.generation.n_eos > 0 ? info.generation.eos : info.target.eos, sizeof info.stop);
    info.n_valid = options->n_valid > 0 ? min_int(options->n_valid, info.target.vocab) : info.target.vocab;
    memcpy(info.warning, info.draft.warning, sizeof info.warning);
    *ret_info = info;
    return 0;
}
