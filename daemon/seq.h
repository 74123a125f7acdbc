/* seq: one growing list of tokens being served, as the engine sees it. Made by who asks for tokens, owned by the engine
 * from engine_submit on. Knows no client and no text.
 *
 *   WAITING --place, pages--> FEEDING --prompt done--> DECODING --done, stop, cancel--> LEAVING --plans home--> freed
 *      ^                         |                        |
 *      '-- plans home -- PREEMPTED <---- pages ran out ---'
 */
#pragma once
#include "backend.h"
#include "restore.h"
#include "store.h"

struct engine;
struct seq;

enum seq_state { SEQ_WAITING, SEQ_FEEDING, SEQ_DECODING, SEQ_PREEMPTED, SEQ_LEAVING };

enum seq_cache { SEQ_CACHE_USE, SEQ_CACHE_NO_STORE, SEQ_CACHE_BYPASS };

/* Why a seq ended, beyond what the device decides (enum finish). */
enum seq_end {
    SEQ_END_STOP,      /* a stop id */
    SEQ_END_LENGTH,    /* max_tokens */
    SEQ_END_CONTEXT,   /* no room for another token */
    SEQ_END_NONFINITE, /* the device produced no number: weights, kernel or hardware are broken */
    SEQ_END_NO_SPACE,  /* alone on the device, and still no page for it: pinned sessions hold them */
    SEQ_END_DEVICE,    /* the device is lost */
};

enum { SEQ_CUTS_MAX = 64, SEQ_PRIORITY_MIN = -100, SEQ_PRIORITY_MAX = 100 };

/* What was measured of it; times in microseconds of the loop's clock. */
struct seq_stats {
    int n_cached;                        /* tokens of the prompt that were not computed at first admission */
    int n_restored;                      /* of these, from below */
    int n_from_disk;                     /* of these, whose pages only the disk had */
    int n_recomputed;                    /* tokens that were held there and run again all the same */
    int n_steps, n_proposed, n_accepted; /* verify passes, and drafts in them */
    int n_by_steps;                      /* tokens that verify passes committed */
    int n_accepted_now;                  /* in on_tokens: so many of these tokens, the first ones, were drafts */
    int n_preempted;
    uint64_t restore_us /* began */, restored_us, admitted_us, first_token_us;
};

struct seq_calls {
    /* Its first admission: seq->stats.n_cached is known. */
    void (*on_admitted)(void *user);
    /* Some of the prompt is done. */
    void (*on_progress)(void *user, int n_done, int n_total);
    /* New tokens, at the end of seq->tokens already; logprobs NULL unless asked for. May call engine_end(). */
    void (*on_tokens)(void *user, const int32_t *tokens, int n, const struct logprob_row *logprobs);
    /* The last call. The seq is the engine's alone afterwards. */
    void (*on_end)(void *user, enum seq_end why);
};

struct seq {
    /* ---- set before engine_submit ---- */
    int32_t *tokens; /* [n_tokens_max] owned; the prompt, then what was generated */
    int n_prompt, n_tokens, n_tokens_max;
    int max_tokens; /* to generate */
    struct sample_params sample;
    int32_t stop_ids[SEQ_STOP_IDS_MAX];
    int n_stop_ids;
    int32_t *bias_id; /* [n_bias] owned, with bias */
    float *bias;
    int n_bias;
    bool speculate;
    int priority; /* SEQ_PRIORITY_MIN..SEQ_PRIORITY_MAX; higher goes first */
    enum seq_cache cache;
    struct kv_key root;  /* of the namespace */
    uint32_t uid;        /* whose it is; UINT32_MAX: of all */
    bool is_kept;        /* it will be gone on with: what it leaves is worth writing to disk */
    struct kv_key *keys; /* [n_tokens_max / 64] owned; known: [0, n_keys) */
    int n_keys;
    int cuts[SEQ_CUTS_MAX]; /* ascending: multiples of 64 up to n_prompt where restore points are wanted */
    int n_cuts;
    const struct seq_calls *calls;
    void *user;
    bool is_parked; /* may be set at any time: it decodes no further, and keeps what it has */

    /* ---- the engine's ---- */
    struct engine *engine;
    enum seq_state state;
    struct seq *next, *prev; /* of those in its state: engine_internal.h, waiting.h */
    uint64_t order, submitted_us;
    int slot;           /* its place, or -1 */
    int len;            /* positions known to be committed */
    int n_fed;          /* given tokens handed to plans */
    int n_given;        /* tokens that are fed: the prompt, and after a preemption all but the last */
    int n_cycles;       /* in plans on their way */
    uint64_t last_plan; /* the newest plan it is in */
    int n_passed_by;
    bool has_ended;             /* on_end was called, or is not wanted any more */
    struct kv_restore *restore; /* of pages from below: until it has a place, or, handed over, until they have come */
    bool is_restoring;          /* it is on its way, and the seq is not admitted before */
    bool is_given_up;           /* it took too long */
    bool was_restored;          /* pages below were looked for */
    struct kv_found found;      /* before it was restored; zero: nothing was looked for */
    bool has_lost_restore;      /* not all of one came: it is not tried again */
    bool publishes_late;        /* at its end: pages that others had published too took the room that it needs */
    uint64_t restore_plan;      /* copies the restore point it begins with; 0: that is done, or not sent */
    bool is_granted;            /* plans on their way may write the rolling restore point */
    int rolled;                 /* tokens of the one in the rolling slot, to be held; 0: none */
    bool draws_drafts;          /* drafting is on now */
    float drafted_tokens;       /* moving average of tokens per verify pass while drafting */
    int n_plain;                /* verify passes since drafting was switched off */
    struct seq_stats stats;
};
