/* engine: carries out what the scheduler decides. Owns the seqs from their submission on, the places they run in, the
 * plans on their way to the device and back. All calls come from the loop thread; nothing here waits for the device.
 * Knows no clients: results leave through the calls of each seq. */
#pragma once
#include "device_thread.h"
#include "restore.h"
#include "seq.h"
#include "spill.h"

struct engine;

struct engine_options {
    const struct backend *backend;
    struct device *device;
    struct model *model;
    struct kv_store *store;
    struct device_thread *thread;
    struct kv_spill *spill;       /* NULL: no tier below the device */
    struct kv_restores *restores; /* NULL: nothing comes back */
    struct kv_shelf *shelf;       /* NULL: a seq fits the device, or is refused */
    int region_spans;             /* of the ring through which pages of seqs that do not fit come; with a shelf */
    bool restore_always;          /* else where it is faster than computing */
    int n_places;                 /* seqs that run side by side */
    int n_seqs_max;               /* with those that wait */
    int n_context;                /* tokens of the longest seq, prompt and answer */
    int chunk_rows;               /* given rows of a plan; a multiple of 64 */
    int batch_rows;               /* rows of a plan */
    double draft_min_accept;      /* drafting pays from this many tokens per verify pass on; 0: always; < 0: measured */
    uint64_t (*now_us)(void);     /* a monotonic clock */
};

/* Records the passes and warms them up: takes seconds, blocks, and may run on another thread than the rest. */
int engine_open(const struct engine_options *options, struct engine **ret_engine, struct report *report);
/* Ends what still runs, without calls. The device thread has stopped, so nothing is on its way. */
void engine_close(struct engine *engine);

/* Readable when plans are done; then engine_dispatch. */
int engine_fd(const struct engine *engine);
void engine_dispatch(struct engine *engine);

/* Once per turn of the loop, after its events: sends plans while there is something to do. */
void engine_turn(struct engine *engine);

/* Takes the seq over. E_TOO_LARGE: it can never run here; E_BUSY: too many wait. Then the seq stays the caller's. */
enum { ENGINE_E_TOO_LARGE = 1, ENGINE_E_BUSY = 2 };
int engine_submit(struct engine *engine, struct seq *seq);
/* The caller wants no more of it: no call comes after this. What it holds is back within DEVICE_PLANS_MAX plans. */
void engine_end(struct engine *engine, struct seq *seq);

/* A seq with its arrays sized, all else zero or neutral. NULL: no memory. */
struct seq *seq_new(int n_tokens_max, int n_bias);
void seq_free(struct seq *seq);

struct engine_view { /* for health and statistics */
    int n_waiting, n_running, n_leaving, n_places;
    int n_free_places; /* also of those that leave, as soon as their plans are home */
    int n_in_flight;   /* plans */
    uint64_t n_plans, n_prefills, n_prefill_rows, n_replay_rows, n_cycles, n_cycle_seqs, n_preemptions; /* since open */
    uint64_t waits_since_us;               /* when the device began with the plan that it is at; 0: none is out */
    uint32_t n_device_pages, n_host_pages; /* of target_full: the most one seq can have there, and beside that */
    uint32_t n_streamed, n_stays;          /* pages of the seq that streams: in host memory, on the device */
    uint32_t n_ring_pages;                 /* of one layer, that its ring holds at a time; 0: nobody can stream */
    uint64_t streamed_bytes, n_fences, n_late, n_streamed_passes, streamed_pass_bytes; /* struct streamer_stats */
    double link_bytes_per_us; /* from host memory to the device, as measured at the start; 0: nobody can stream */
    double draft_min_accept;
    int error; /* 0, or why the device is lost */
};
void engine_look(const struct engine *engine, struct engine_view *ret_view);
