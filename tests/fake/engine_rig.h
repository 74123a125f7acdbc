/* engine_rig: an engine over the CPU backend and a small made-up pair of networks, small enough that a turn takes a
 * millisecond, with few ids, so that drafts are right by chance now and then. */
#pragma once
#include "copies.h"
#include "disk_faults.h"
#include "engine.h"
#include "workers.h"

#define ENGINE_RIG_CHECK(claim)                                                                                        \
    do {                                                                                                               \
        if (!(claim)) {                                                                                                \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #claim);                                        \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

enum {
    ENGINE_RIG_VOCAB = 64,
    ENGINE_RIG_IDS = 6, /* that are ever chosen */
    ENGINE_RIG_WINDOW = 100,
    ENGINE_RIG_WORKS_MAX = 2,
};

/* The device with the pair; engines over it are made one after the other. */
struct engine_rig_pair {
    const struct backend *backend;
    struct device *device;
    struct model *model;
};

struct engine_rig_options {
    int n_places, n_context, chunk_rows, batch_rows;
    int n_seqs_max;
    int n_slots[KV_GROUP_N]; /* usable ones */
    double draft_min_accept;
    int n_below[KV_GROUP_N]; /* slots of a host tier; none of target_full: there is no such tier */
    uint64_t disk_bytes;     /* of a disk tier below that; 0: there is none */
    const char *disk_path;   /* its folder, made if it is missing, and kept; NULL: one of its own under /tmp */
    uint64_t deadline_us;    /* of its operations; 0: a minute */
    bool restores_by_cost;   /* where that is faster than computing; else always */
    int region_spans;        /* of the ring, if seqs that are too large for the device stream from it; else 0 */
};

struct engine_rig {
    struct engine_rig_pair *pair;
    struct kv_store *store;
    struct device_thread *thread;
    struct copies copies;
    struct kv_shelf *shelf; /* NULL, as the next two: no host tier */
    struct kv_spill *spill;
    struct kv_restores *restores;
    struct kv_work_item *works[ENGINE_RIG_WORKS_MAX]; /* checksums that wait to be made */
    int n_works;
    bool fails_copies; /* those that come home next */
    struct {           /* the disk tier */
        char path[64];
        struct disk_folder folder;
        struct workers *workers;
        struct kv_work work;
        struct disk_faults *faults;
        struct kv_vault *vault; /* NULL: there is none */
    } disk;
    struct engine *engine;
    struct engine_rig_options options;
};

/* From now on time passes by engine_rig_pass() alone; or it is the machine's again. */
void engine_rig_stop_clock(bool stop);
void engine_rig_pass(uint64_t us);

void engine_rig_pair_open(struct engine_rig_pair *pair, const struct backend *backend,
                          const struct backend_options *options, int n_places_max, int n_rows_max);
void engine_rig_pair_close(struct engine_rig_pair *pair);

/* Pools in which everything fits. */
struct engine_rig_options engine_rig_roomy(int n_places, int n_context);
/* The store alone. */
struct kv_store *engine_rig_store_open(const struct engine_rig_pair *pair, const struct engine_rig_options *options);
void engine_rig_open(struct engine_rig *rig, struct engine_rig_pair *pair, const struct engine_rig_options *options);
/* Asserts, by kv_store_close(), that every slot came home. */
void engine_rig_close(struct engine_rig *rig);
void engine_rig_remove_disk(struct engine_rig *rig); /* the next close does, though the folder was to be kept */

/* Waits for a plan to come home, if one is out, and looks at it. False: none was out. */
bool engine_rig_dispatch(struct engine_rig *rig);
/* One turn of the loop: plans are sent, then they and copies waited for. False: there was nothing to do. */
bool engine_rig_turn(struct engine_rig *rig);
/* The same of the tiers below: copies that are home, a checksum that waits, the disk's operations. Waits for them if it is
 * told to. False: there was nothing to wait for. */
bool engine_rig_dispatch_copies(struct engine_rig *rig, bool wait);
void engine_rig_check(const struct engine_rig *rig); /* of the store and the tiers below */
/* The disk tier is opened anew, as after a restart, and has read what its folder holds. Nothing is on its way. */
void engine_rig_reopen_disk(struct engine_rig *rig);
/* No seq and no plan is left, and every slot is free or in the index. */
void engine_rig_check_is_idle(const struct engine_rig *rig);
