/* vault_internal: the insides of a vault. vault.c: its life, its turns, what leaves; vault_folder.c: the files that were
 * there before; vault_segments.c: files, syncs; vault_save.c: pages go down; vault_read.c: pages come up; vault_scan.c: what
 * the folder held at open; vault_warm.c: what of that is brought up at once; vault_verify.c: everything is read once, or a
 * slot now and then. */
#pragma once
#include "breaker.h"
#include "catalog.h"
#include "segment.h"
#include "vault.h"

enum {
    VAULT_WRITES = 4,  /* pages on their way down */
    VAULT_READS = 64,  /* pages on their way up */
    VAULT_SCANS = 8,   /* runs of slots */
    VAULT_SYNCS = 4,   /* segments */
    VAULT_BLANKS = 4,  /* headers */
    VAULT_QUEUE = 256, /* chains that wait to be saved */
    VAULT_OPS = VAULT_WRITES + VAULT_READS + VAULT_SCANS + VAULT_SYNCS + VAULT_BLANKS +
                4,     /* a file, one to go, a probe, a check */
    VAULT_PURGES = 16, /* while the folder is read */
    VAULT_SUSPECTS = 32,
    VAULT_WARM_POINTS = 256, /* the chains of those written last may be brought up at start */
    VAULT_NEAR_SLOTS = 2,    /* on either side of one that could not be read */
};

/* Headers of small slots are read with what lies between them: a disk that does few operations a second still reads much. */
enum { VAULT_SCAN_BYTES = 1 << 20 };

struct vault_write { /* a page on its way down */
    struct kv_vault *vault;
    bool is_busy, is_reported;
    bool is_given_up; /* the chain does not wait for it */
    bool is_unwanted; /* goes as soon as it is there */
    struct disk_op op;
    uint32_t record, shelf_record; /* WRITING; pinned */
    enum kv_group group;
    uint64_t ticket;
};

struct vault_fetch { /* a page on its way up */
    struct kv_vault *vault;
    bool is_busy, is_reported;
    struct disk_op op;
    uint32_t record, shelf_record; /* pinned, or KV_NO_RECORD while its readers are answered; FILLING */
    enum kv_group group;
    uint64_t ticket;
    struct kv_vault_read *waiting;
    struct vault_fetch *next; /* in the list that it waits in, or is checked in */
    uint64_t came_us;         /* of those who wait */
    uint64_t checksum;
    int result;
};

struct vault_fetch_list {
    struct vault_fetch *first, *last;
};

struct vault_check { /* pages that a worker is at */
    struct kv_vault *vault;
    bool is_busy;
    struct kv_work_item work;
    struct vault_fetch_list fetches;
};

struct vault_save { /* a chain that waits */
    struct kv_key key;
    uint32_t shelf_record; /* of its end, if it still has this key */
    enum kv_vault_save why;
    bool is_pages; /* there is no restore point yet */
};

struct vault_file { /* a segment being made, or bound anew */
    bool is_busy;
    struct disk_op op;
    uint32_t segment;
    enum kv_group group;
    void *block;
    uint64_t ticket;
    bool is_reported;
};

struct vault_sync {
    struct kv_vault *vault;
    bool is_busy;
    struct disk_op op;
    uint64_t tick; /* what was stored by then is synced with it */
};

struct vault_blank {
    struct kv_vault *vault;
    bool is_busy;
    struct disk_op op;
    uint32_t slot;
    enum kv_group group;
};

struct vault_scan_read {
    struct kv_vault *vault;
    bool is_busy, is_given_up; /* nobody waits for it any more */
    bool is_home;              /* and waits for those before it */
    struct disk_op op;
    void *block; /* [VAULT_SCAN_BYTES] */
    uint32_t first_slot, n_slots;
    uint32_t n_singly; /* still to be read one by one */
};

struct vault_warm_point { /* a restore point that the folder held */
    uint32_t record;
    uint64_t write_sequence;
};

struct vault_warm_read {
    struct kv_vault *vault;
    struct kv_vault_read read;
};

struct vault_segment {
    uint64_t dirty_bytes, dirty_since_us;
    uint64_t first_tick; /* of what is not synced; 0: all is */
    uint64_t next_tick;  /* the same of what came during a sync */
    uint64_t synced_tick;
    uint64_t bound_sequence;  /* of its head: what was written into it before is nobody's */
    bool is_syncing, is_late; /* a sync is out; past its deadline */
    bool is_leaving;          /* retired, and what is still written into it goes too */
    bool is_outdated;         /* foreign, but ours of another geometry: makes room when there is none */
};

struct kv_vault {
    struct kv_vault_options options;
    bool is_closing;
    uint32_t n_work; /* items that workers are at */
    struct disk *disk;
    struct segment_map *segments;
    struct catalog *catalog;
    struct kv_breaker breaker;
    uint32_t n_segments_max, alignment, segment_bytes;
    struct vault_segment *segment; /* [n_segments_max] */
    uint64_t tick;                 /* of the last storing */
    uint64_t write_sequence;       /* the highest so far */
    void *blocks;                  /* of the small operations below, aligned */
    void *zeros;                   /* a block of them */

    /* vault_save.c */
    struct vault_write writes[VAULT_WRITES];
    struct vault_save queue[VAULT_QUEUE]; /* ring */
    uint32_t queue_first, n_queued;
    uint32_t next_of_all; /* of kv_vault_save_all, a record of the shelf; KV_NO_RECORD: none runs */
    struct {              /* the chain at hand */
        bool is_running, is_of_all;
        bool is_unwanted;  /* purged meanwhile */
        uint32_t *records; /* [n_pages_max] of the shelf, by page, if they still have these keys; KV_NO_RECORD: none */
        struct kv_key *keys; /* [n_pages_max] */
        uint32_t uid;
        uint32_t n, at; /* pages; the next to look at, counted from the beginning */
        int group;
        uint32_t draft_first_page;
        uint32_t near[KV_GROUP_N]; /* slots of the pages before */
        uint32_t n_out;            /* writes */
        struct kv_vault_saved saved;
        uint64_t began_us;
    } save;
    uint64_t n_saves_asked, n_saves_done, n_alls_asked, n_alls_done;
    uint64_t n_unsaved; /* pages and states of chains that must be saved, which were not on disk when that was over */
    struct kv_vault_flush *flushes;
    double budget_bytes;
    uint64_t budget_us;
    uint64_t write_off_until_us; /* 0: writing works */

    /* vault_segments.c */
    struct vault_file file;
    uint64_t room_bytes;       /* whole files: what was asked for, or what the file system has room for */
    uint64_t no_file_until_us; /* 0: the file system has space for another */
    struct {                   /* of a retired file */
        bool is_busy;
        struct disk_op op;
        uint32_t next;        /* to look at */
        uint64_t retry_at_us; /* 0: none failed lately */
    } removal;
    struct vault_sync syncs[VAULT_SYNCS];
    bool must_sync;
    uint64_t n_failed_syncs, dirty_bytes;

    /* vault_read.c */
    struct vault_fetch fetches[VAULT_READS];
    struct vault_fetch_list to_check; /* they have come */
    struct vault_check checks[VAULT_READS];

    /* vault_scan.c */
    struct vault_scan_read scans[VAULT_SCANS];
    void *scan_memory; /* [VAULT_SCANS] of VAULT_SCAN_BYTES; until all is known */
    enum vault_scan_state { VAULT_SCAN_HEADS, VAULT_SCAN_SLOTS, VAULT_SCAN_DONE } scan_state;
    uint32_t scan_segment;        /* at which it is */
    uint32_t scan_slot, scan_end; /* of its group: the next to read, and the first of the next segment */
    uint32_t scan_taken;          /* the next to be taken note of: in order, so that a chain is */
    enum kv_group scan_group;
    uint32_t n_scans_out;
    uint32_t purged[VAULT_PURGES],
        n_purged; /* users whose pages are not to be found by it; more than those: nobody's are */

    /* vault.c */
    uint64_t n_slots_found; /* in the segments that were there */
    uint32_t n_records_max;
    uint32_t n_foreign_slots; /* taken by what is not ours to overwrite */
    uint32_t n_quarantined;   /* operations that did not come home; the breaker opened for so many */
    uint64_t quarantine_us;   /* when it opens for those beyond, or 0 */
    struct {
        uint32_t slot;
        enum kv_group group;
    } * to_blank; /* [n_records_max] stack */
    uint32_t n_to_blank;
    struct vault_blank blanks[VAULT_BLANKS];
    struct {
        bool is_busy, has_slot;
        struct disk_op op;
        uint32_t slot;
        enum kv_group group;
        void *block;
    } probe;

    /* vault_verify.c */
    struct {
        struct kv_vault_verify *user;                  /* NULL: none runs */
        struct kv_vault_scrub *scrub;                  /* who waits for the one that is out; NULL: nobody */
        bool is_out, is_asked;                         /* by the user */
        uint32_t record;                               /* guarded while it is out */
        uint32_t next, next_cold;                      /* to look at: for the user, and for the scrubber */
        uint32_t suspects[VAULT_SUSPECTS], n_suspects; /* to look at first: near ones that could not be read */
        struct disk_op op;
        struct kv_work_item work;
        void *buffer;
        enum kv_group group;
        struct format_slot header;
        int result;
    } verify;

    /* vault_warm.c */
    struct {
        enum vault_warm_state { VAULT_WARM_GATHERING, VAULT_WARM_CHAINS, VAULT_WARM_OVER } state;
        bool may; /* nobody waits for anything */
        struct vault_warm_point points[VAULT_WARM_POINTS];
        uint32_t n, next;      /* points; from this one on they are to be brought up, in this order */
        uint32_t record, slot; /* of the page at hand; KV_NO_RECORD: there is none yet */
        bool is_end;           /* it is the last of its chain */
        bool is_out, has_header, has_failed;
        struct disk_op op; /* reads its header */
        void *block;
        struct format_slot header;
        struct vault_warm_read reads[KV_GROUP_N];
        uint32_t n_out; /* of them */
        uint64_t began_us;
    } warm;

    struct kv_vault_stats stats; /* its counters */
};

/* What is read is what the record says it is: 0, or FORMAT_E_*. slot: header and payload. Any thread. */
int vault_hold_against(const struct kv_vault *vault, enum kv_group group, const void *slot,
                       struct format_slot *ret_header);

/* Its slot is blanked, so that it does not come back at the next start, and free then; at once if nobody reads it. */
void vault_forget(struct kv_vault *vault, uint32_t record);
void vault_pin(struct kv_vault *vault, uint32_t record);
void vault_unpin(struct kv_vault *vault, uint32_t record);
void vault_unguard(struct kv_vault *vault, uint32_t record);
/* A taken slot without a record: the same. */
void vault_blank(struct kv_vault *vault, enum kv_group group, uint32_t slot);
uint32_t vault_n_to_blank(const struct kv_vault *vault);
bool vault_is_blanking(const struct kv_vault *vault); /* a slot comes free soon */
/* False: what is to be blanked must be so before another record can be put. */
bool vault_has_room(const struct kv_vault *vault);
/* It leaves so that its slot can be written anew at once. */
void vault_evict(struct kv_vault *vault, uint32_t record);
void vault_locate(const struct kv_vault *vault, enum kv_group group, uint32_t slot, struct disk_op *op);

bool vault_may_write(struct kv_vault *vault);
bool vault_is_no_space(int error); /* the disk works, and does not take it */
/* A write or a file could not be: what that means for those to come. */
void vault_write_failed(struct kv_vault *vault, int error);
void vault_report(struct kv_vault *vault, uint64_t ticket, bool *is_reported, enum kv_breaker_report report);

void vault_save_turn(struct kv_vault *vault);
void vault_purge_saves(struct kv_vault *vault, uint32_t uid); /* what of him is on its way, or waits */
bool vault_is_reading(const struct kv_vault *vault);          /* somebody waits for a page */

/* folder */
int vault_survey(struct kv_vault *vault); /* sizes and numbers of segments; -EINVAL: there can be none; -errno */
int vault_mark_strangers(struct kv_vault *vault); /* numbers that a file has which the disk could not open; -errno */

/* segments */
/* Begins to make one for the group. False: there is none to be had. */
bool vault_prepare_segment(struct kv_vault *vault, enum kv_group group);
void vault_stored_in(struct kv_vault *vault, uint32_t segment, uint32_t bytes);
void vault_retire(struct kv_vault *vault, uint32_t segment); /* it takes no new pages */
void vault_files_turn(struct kv_vault *vault);               /* files that are too many, or retired and empty, go */
/* What is found no more is still in the files, and will not be soon: in one that goes or gets another group, or it is to be
 * found and blanked. */
bool vault_is_forgetting(const struct kv_vault *vault);
bool vault_cannot_remove(const struct kv_vault *vault); /* a file that is to go stays for now */
void vault_drop_outdated(struct kv_vault *vault);       /* files of which nobody knows whose pages they hold */
bool vault_has_late_sync(const struct kv_vault *vault);
void vault_sync_turn(struct kv_vault *vault);
uint64_t vault_sync_due_us(const struct kv_vault *vault);          /* 0: nothing is to be synced */
bool vault_is_synced(const struct kv_vault *vault, uint64_t tick); /* all that was stored by then */

void vault_read_init(struct kv_vault *vault);
void vault_read_turn(struct kv_vault *vault);
void vault_read_stop(struct kv_vault *vault); /* at close: what has come is not checked any more */
void vault_scan_init(struct kv_vault *vault);
void vault_scan_turn(struct kv_vault *vault);
void vault_warm_init(struct kv_vault *vault, void *block);                               /* aligned, for a header */
void vault_warm_found(struct kv_vault *vault, uint32_t record, uint64_t write_sequence); /* a restore point */
void vault_warm_turn(struct kv_vault *vault);
void vault_verify_turn(struct kv_vault *vault);
void vault_suspect_near(struct kv_vault *vault, uint32_t record); /* it could not be read */
