/* vault: the disk tier. Pages go down into it from the shelf's memory and come back into it, with their headers, as they
 * lie on disk; what it holds survives the process. Owns the disk, its segments and slots, and what is on its way.
 *
 * Nothing is taken on trust: a page that is read is held against its name, its header and its checksum, and what does not
 * match is forgotten and counted: a miss, never an answer. A disk that makes trouble is left alone until it works again.
 *
 * One thread makes all calls. Only open and close block. Callbacks come out of dispatch and turn, never from inside the
 * call that they belong to. */
#pragma once
#include "disk.h"
#include "shelf.h"

struct kv_vault;

enum { KV_VAULT_E_NONE = 1 /* it is not there */, KV_VAULT_E_BUSY, KV_VAULT_E_OFF };

enum kv_vault_save {
    KV_VAULT_SAVE_WORTH, /* if it is long enough and the day's bytes allow */
    KV_VAULT_SAVE_MUST,  /* a park, a flush, the end of the process */
};

/* What became of one saving. */
struct kv_vault_saved {
    enum kv_vault_save why;
    uint32_t n_tokens;   /* of the chain */
    uint32_t n_slots;    /* written */
    uint64_t bytes, us;  /* of these; from its first page to its last */
    const char *outcome; /* "done", or a literal that says why not, or not all */
};

struct kv_vault_options {
    const struct disk_folder *folder; /* of the segments; outlives the vault, as do the next two */
    const struct kv_work *work;
    struct kv_shelf *shelf;
    const struct disk_buffer *buffers; /* the shelf's memory, to be registered */
    uint32_t n_buffers;
    uint8_t store_id[FORMAT_STORE_ID_BYTES];
    uint8_t fingerprint[KV_KEY_BYTES];
    uint8_t drafter[FORMAT_DRAFTER_BYTES];
    uint64_t disk_bytes;
    struct {
        uint32_t slot_bytes; /* header and payload, as the shelf's slots; 0: no such group */
        uint32_t share;      /* percent of disk_bytes that it may take from the others */
    } group[KV_GROUP_N];
    uint32_t share_percent;       /* of what is stored of a group, that each user keeps; 0: there are no shares */
    uint32_t warm_percent;        /* of the shelf, that is filled at open with what was written last; 0: nothing */
    uint32_t n_pages_max;         /* of a chain */
    uint32_t n_pages_min;         /* shorter chains are not kept, unless they must be */
    uint64_t write_bytes_per_day; /* beyond it only what must be kept is written; 0: no limit */
    uint64_t deadline_us;         /* of one operation */
    uint64_t (*now_us)(void);     /* a monotonic clock */
    void (*on_saved)(void *user, const struct kv_vault_saved *saved); /* may be NULL */
    void *user;
    bool no_ring, no_direct;
    struct disk_queue *(*wrap)(void *user, struct disk_queue *queue); /* for faults */
    void *wrap_user;
};

/* Opens the segments that the folder has, and begins to read what they hold. Files of this store that cannot be used any
 * more go: of another size, or damaged in their heads; more than disk_bytes allow are emptied and go, later. Files of others
 * stay. -EINVAL for options that cannot work; or what broke. */
int kv_vault_open(const struct kv_vault_options *options, struct kv_vault **ret_vault);
/* Cancels what is on its way, without callbacks. 0: it is gone. Else so many operations are the kernel's still: call again
 * later, or leave vault, shelf and buffers as they are until the process ends. */
uint32_t kv_vault_close(struct kv_vault *vault);

int kv_vault_fd(const struct kv_vault *vault); /* readable: dispatch */
void kv_vault_dispatch(struct kv_vault *vault);
/* To be called once per turn of the loop, after all else: begins what there is to do, looks at deadlines, syncs, probes.
 * Returns when to call it next at the latest, on the clock; 0: not before something else happens. */
uint64_t kv_vault_turn(struct kv_vault *vault);

/* ---- down ---- */

/* The pages up to the restore point of this record, and it, shall be on disk too, as far as the shelf has them. What is there
 * already is not written again. Best effort: what cannot be is counted. */
void kv_vault_save(struct kv_vault *vault, uint32_t shelf_record, enum kv_vault_save why);
/* The pages alone of a chain that is longer than the shelf, up to this record's: its other pages come later. Returns a number
 * for kv_vault_has_saved(). */
uint64_t kv_vault_save_pages(struct kv_vault *vault, uint32_t shelf_record, enum kv_vault_save why);
/* That saving is over: kv_vault_has() says what came of it. */
bool kv_vault_has_saved(const struct kv_vault *vault, uint64_t save);
/* As kv_vault_save() for every restore point on the shelf that is long enough. */
void kv_vault_save_all(struct kv_vault *vault);
bool kv_vault_is_saving(const struct kv_vault *vault); /* something is still to be written */
/* Nothing is on its way, or waits for it, that will still end by itself. */
bool kv_vault_is_quiet(const struct kv_vault *vault);
bool kv_vault_forget_buffers(struct kv_vault *vault); /* before the shelf gives memory back: disk_forget_buffers() */

struct kv_vault_flush { /* embedded in who waits */
    void (*done)(struct kv_vault_flush *flush, int result);
    struct kv_vault_flush *next;
    uint64_t n_unsaved; /* when done: pages and states that must be saved, and are not on disk */
    uint64_t n_saves, n_alls, n_failed_syncs, tick; /* the vault's */
    bool is_written;
};
/* done(0) when everything that was to be saved or blanked before this call is written, as far as it could be, and survives
 * a power cut; -EIO: a sync failed or is late, or the disk is off. Who wants to know what could not be looks at n_unsaved. */
void kv_vault_flush(struct kv_vault *vault, struct kv_vault_flush *flush);
void kv_vault_flush_cancel(struct kv_vault *vault, struct kv_vault_flush *flush); /* no done comes; or it came */

/* ---- up ---- */

/* What the folder held at open is not all known yet. */
bool kv_vault_is_scanning(const struct kv_vault *vault);
/* What the folder held is, or will be, brought onto the shelf, as far as that is wanted. */
bool kv_vault_is_warming(const struct kv_vault *vault);
/* Whether that may go on: not while anybody waits for something else. True at open. */
void kv_vault_let_warm(struct kv_vault *vault, bool may);
/* By the key alone: what is read is held against the whole name. */
bool kv_vault_has(const struct kv_vault *vault, const struct kv_key *key, uint32_t page_idx, enum kv_group group);
uint32_t kv_vault_uid(const struct kv_vault *vault, const struct kv_page_name *name,
                      enum kv_group group); /* it has it */
/* For a walk along a chain, as kv_shelf_prefetch_entry() and kv_shelf_prefetch_record(). */
void kv_vault_prefetch_entry(const struct kv_vault *vault, const struct kv_key *key);
void kv_vault_prefetch_record(const struct kv_vault *vault, const struct kv_key *key);
/* Keeps it from leaving, so that it can be read later. False: it is not there. */
bool kv_vault_pin(struct kv_vault *vault, const struct kv_page_name *name, enum kv_group group, uint32_t *ret_record);
void kv_vault_unpin(struct kv_vault *vault, uint32_t record);
/* As if it had just come, in all its groups. Who uses a chain touches it from its end to its beginning, so that it leaves
 * from its end. */
void kv_vault_touch(struct kv_vault *vault, const struct kv_page_name *name);

struct kv_vault_read { /* embedded in who waits */
    /* 0: the shelf has it CLEAN now, and keeps it at least until this call returns. Else it will not come: -EBADMSG: what
     * was read is not this page; -ETIMEDOUT, -EIO. */
    void (*done)(struct kv_vault_read *read, int result);
    struct kv_vault_read *next;
    void *fetch;      /* the vault's */
    uint64_t came_us; /* the vault's: when its bytes had come, and were to be checked; 0: they have not */
};
/* Reads a page onto the shelf. Those who want the same at a time share one reading. E_NONE; E_OFF: the disk is left alone
 * now; E_BUSY: as many are on their way as may be, or the shelf has no slot: try again when something has come. */
int kv_vault_read(struct kv_vault *vault, const struct kv_page_name *name, enum kv_group group,
                  struct kv_vault_read *read);
void kv_vault_read_cancel(struct kv_vault *vault, struct kv_vault_read *read);

/* ---- administration ---- */

/* Drops what is not pinned, the longest unused first, and blanks its header. Returns the bytes. */
uint64_t kv_vault_evict_bytes(struct kv_vault *vault, uint64_t n_bytes);
/* The same for all of one user, and for what of him is being saved or is yet to be found in the folder. Pinned ones go when
 * they are unpinned. */
uint64_t kv_vault_purge(struct kv_vault *vault, uint32_t uid);

/* Reads everything once and holds it against its checksum; what is damaged is forgotten. -EALREADY: one is running. */
struct kv_vault_verify {
    void (*done)(struct kv_vault_verify *verify);
    uint64_t n_checked, n_damaged, n_unread;
};
int kv_vault_verify(struct kv_vault *vault, struct kv_vault_verify *verify);
void kv_vault_verify_cancel(struct kv_vault *vault);

/* The same for one slot, if the disk has nothing else to do: of those near one that could not be read, else the next of all.
 * E_BUSY: not now; E_NONE: all have been looked at, or no suspect is left; the next call begins again. */
struct kv_vault_scrub {
    void (*done)(struct kv_vault_scrub *scrub);
    uint32_t bytes; /* that are read */
    bool is_damaged, is_unread;
};
int kv_vault_scrub(struct kv_vault *vault, struct kv_vault_scrub *scrub, bool only_suspects);
void kv_vault_scrub_cancel(struct kv_vault *vault); /* no done comes */
bool kv_vault_has_suspects(const struct kv_vault *vault);

struct kv_vault_stats {
    struct {
        uint32_t n_stored, n_writing, n_pinned, n_slots; /* slots of the segments bound to it */
        uint64_t n_evicted;
    } group[KV_GROUP_N];
    uint64_t segment_bytes, bytes, cap_bytes; /* of one file; of all; the most */
    uint64_t room_bytes;                      /* of all: what was asked for, or what the file system has room for */
    uint64_t n_saves, n_saved_pages, saved_bytes, n_reads, read_bytes;
    uint64_t n_skipped_short, n_skipped_budget, n_skipped_off, n_skipped_full, n_skipped_gone, n_write_errors;
    uint64_t n_read_errors, n_read_late, n_damaged; /* damaged: read, and not what it should be */
    uint64_t n_syncs, n_sync_errors, n_lost;        /* lost: pages whose sync failed */
    uint64_t used_bytes;                            /* of pages, once for each that was read, or meant to be */
    uint64_t n_never_read;                          /* pages that left without having been read */
    uint64_t n_to_blank, n_blank_errors;            /* headers still to be blanked; that could not be */
    uint64_t n_remove_errors;                       /* of files that were too many, or retired */
    uint64_t budget_bytes;                          /* left of the day's; UINT64_MAX: no limit */
    uint64_t n_breaker_opened;
    bool is_off, is_write_off;                                   /* the breaker is open; no space, or read only */
    int write_error;                                             /* the last one: -errno */
    uint32_t n_segments, n_segments_scanned, n_segments_foreign; /* those found at open */
    uint64_t n_scanned, n_scan_bad, n_scan_foreign;              /* slots */
    bool is_scanning;
    uint64_t n_warm_chains, n_warm_pages, warm_bytes, warm_us; /* brought up at open: whole ones; of these and others */
    bool is_warming;
    struct disk_stats disk;
};
void kv_vault_stats(const struct kv_vault *vault, struct kv_vault_stats *ret_stats);
const struct kv_share *kv_vault_share(const struct kv_vault *vault);

/* NULL, or what is wrong. For tests. */
const char *kv_vault_check(const struct kv_vault *vault);
