/* memplan: how kv.device_bytes is divided among the pools of the four groups, and what that allows: how many sequences,
 * how long a context. Pure arithmetic; allocates nothing, asks no device. */
#pragma once
#include <stdint.h>

#include "backend.h"
#include "report.h"
#include "text.h"

struct config;
struct model_info;

/* What a pair asks for. */
struct memplan_model {
    uint64_t slot_bytes[KV_GROUP_N];     /* of a page, of a state; 0: the group does not exist */
    uint64_t open_bytes;                 /* open chunks of one running seq, beside its states; 0: there are none */
    uint64_t layer_bytes;                /* of a page of target_full: what streaming moves at a time */
    int window;                          /* of draft_sliding, tokens; 0: the group does not exist */
    int max_positions;                   /* the longest context the model was made for */
    uint64_t weight_bytes, buffer_bytes; /* beside kv.device_bytes; 0: not known before loading */
};
struct memplan_limits {
    uint64_t device_bytes, host_bytes; /* host_bytes 0: a context fits the device */
    int max_seqs, prefill_chunk;
    int restore_points; /* most of one seq; 0: none are kept */
    int max_context;    /* 0: the model's, or what fits */
};

/* Slots of page groups include slot 0, the null page. Of target_state the first 2 * max_seqs are the live and the
 * rolling states of running seqs, the others hold restore points. */
struct memplan {
    struct memplan_model model;
    struct memplan_limits limits;
    int max_seqs, max_context;
    int n_slots[KV_GROUP_N];
    int n_restore_points;        /* restore points that the pools hold, each with its window of draft_sliding */
    int pages_per_seq_sliding;   /* draft_sliding pages that one running seq may need at a time */
    int pages_per_restore_point; /* draft_sliding pages that one restore point lists */
    int region_spans;            /* of the ring for contexts that the device does not hold; 0: there are none */
    int n_host_pages; /* of target_full that a context may have beside those on the device; 0 without a ring */
    char notice[256]; /* what was lowered and why; empty: nothing */
};

enum { MEMPLAN_CONTEXT_MIN = 256 /* a device that holds no more is refused */ };

/* -EINVAL: one seq of the context asked for, or of MEMPLAN_CONTEXT_MIN, does not fit; the report has the sum, which is the
 * device_bytes that would do, and the largest request that fits. With host memory, a context that the device does not hold
 * is streamed, and the report says what both hold. */
int memplan_make(const struct memplan_model *model, const struct memplan_limits *limits, struct memplan *ret_plan,
                 struct report *report);
/* Slots of the host tier, with their headers: 70 % of its bytes for pages of target and drafter side by side, 25 % for restore points, 5 % for
 * the drafter's windows; so none of them displaces another. */
void memplan_host(const struct memplan_model *model, uint64_t host_bytes, uint32_t alignment,
                  uint32_t ret_slots[KV_GROUP_N]);

/* Of kv.disk_bytes, in percent: pages of target and drafter, restore points, the drafter's windows. */
enum { MEMPLAN_DISK_PAGES_SHARE = 75, MEMPLAN_DISK_STATES_SHARE = 20, MEMPLAN_DISK_SLIDING_SHARE = 5 };

uint64_t memplan_bytes(const struct memplan *plan, enum kv_group group);
/* What each step of the longest context brings from host memory; 0: the device holds it. */
uint64_t memplan_step_bytes(const struct memplan *plan);
uint64_t memplan_token_bytes(const struct memplan *plan); /* of them, a token has so many */
/* The table for people. */
void memplan_print(const struct memplan *plan, struct text *out);
/* And what the tiers below hold, those of 0 bytes left out. */
void memplan_print_below(const struct memplan_model *model, uint64_t host_bytes, uint64_t disk_bytes, struct text *out);

struct memplan_model memplan_model_of(const struct model_info *info);
struct memplan_limits memplan_limits_of(const struct config *config);
