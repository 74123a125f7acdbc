/* recorder: a program being recorded, with the first error kept, so that a network reads as a plain list of ops. */
#pragma once
#include "backend.h"

struct recorder {
    const struct backend *backend;
    struct program *program;
    int error; /* 0, or what the first refused op answered; later ops are not recorded */
};

#define RECORDER_OP(op, args_type)                                                                                     \
    static inline void record_##op(struct recorder *rec, const struct args_type *args) {                               \
        if (rec->error == 0)                                                                                           \
            rec->error = rec->backend->op(rec->program, args);                                                         \
    }
RECORDER_OP(embed, embed_args)
RECORDER_OP(linear, linear_args)
RECORDER_OP(gdn, gdn_args)
RECORDER_OP(gdn_commit, gdn_commit_args)
RECORDER_OP(qk, qk_args)
RECORDER_OP(attn, attn_args)
RECORDER_OP(moe, moe_args)
RECORDER_OP(head, head_args)
RECORDER_OP(draft_rows, rows_args)
RECORDER_OP(verify_rows, rows_args)
RECORDER_OP(prepare, prepare_args)
RECORDER_OP(draft_kv, draft_kv_args)
RECORDER_OP(store_rows, store_rows_args)
#undef RECORDER_OP

static inline void record_cut(struct recorder *rec) {
    if (rec->error == 0)
        rec->error = rec->backend->program_cut(rec->program);
}
static inline void record_join(struct recorder *rec) {
    if (rec->error == 0)
        rec->error = rec->backend->program_join(rec->program);
}
