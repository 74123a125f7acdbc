/* pair: what is loaded: device, model and drafter, tokenizer, store and engine, made from a configuration in the order in
 * which they need each other. Loading blocks and runs on a worker thread; what comes out belongs to the loop. */
#pragma once
#include "cache_folder.h"
#include "config.h"
#include "copies.h"
#include "engine.h"
#include "memplan.h"
#include "output.h"
#include "digest.h"
#include "prompt.h"
#include "scrub.h"
#include "secret.h"

enum { PAIR_SPILLS = 8, PAIR_RESTORES = 8 /* chains on their way at a time */ };

struct pair {
    const struct backend *backend;
    struct device *device;
    struct model *model;
    const struct model_info *info;
    struct tokenizer *tokenizer;
    struct prompt_rules rules;
    int32_t marks[CHAT_N_MARKS];
    struct memplan plan;
    struct kv_store *store;
    struct device_thread *thread;
    struct copies *copies;
    struct kv_shelf *shelf; /* this and the next two: NULL without a host tier */
    struct kv_spill *spill;
    struct kv_restores *restores;
    struct kv_vault *vault; /* NULL without a disk tier */
    struct kv_scrub *scrub; /* NULL without a host tier, or kv.scrub_bytes_per_second */
    uint32_t alignment;     /* of the host tier's slots */
    uint8_t drafter[KV_DIGEST_BYTES], fingerprint_bytes[KV_KEY_BYTES];
    struct engine *engine;
    bool default_thinking;
    char *name, *draft_name;                /* of the folders */
    char fingerprint[2 * KV_KEY_BYTES + 1]; /* hex */
};

/* How far loading is; written by the worker, read by anybody. */
struct pair_progress {
    int percent;      /* atomic */
    const char *what; /* atomic: a literal */
};

/* 0, or a negative errno with a line: nothing is kept. work: for pages' checksums; used on the loop. folder: NULL without a
 * disk tier; outlives the pair. */
int pair_open(const struct config *config, uint64_t (*now_us)(void), const struct kv_work *work,
              const struct cache_folder *folder, struct pair_progress *progress, struct pair *ret_pair,
              struct report *report);
/* The disk tier, below a host tier that is open already; on the loop. on_saved: see vault.h. */
int pair_open_disk(struct pair *pair, const struct config *config, const struct cache_folder *folder,
                   const struct kv_work *work, uint64_t (*now_us)(void),
                   void (*on_saved)(void *user, const struct kv_vault_saved *saved), void *user, struct report *report);
/* What looks for damage in both tiers; on the loop, after the disk was opened. -ENOMEM. */
int pair_open_scrub(struct pair *pair, const struct config *config, const struct kv_work *work,
                    uint64_t (*now_us)(void));
/* Stops the device thread; what was on its way is done. The loop then gives out the last results of copies, and closes. */
void pair_stop(struct pair *pair);
void pair_close(struct pair *pair);

/* The memory plan of a configuration, from the config.json files alone. */
int pair_plan(const struct config *config, struct memplan *ret_plan, struct report *report);
