/* session_files: one file for each session, with its newest record. Owns the bytes on their way to the disk; a worker
 * writes them, one file after the other, each by a temporary file, fsync and rename. What changes while a write is out, or
 * waits for one, is written once, as it is then. Knows no sessions, only their records.
 *
 *     CLEAN --put--> QUEUED --its turn--> OUT --written, nothing newer--> CLEAN
 *                      ^  ^                | '---put while out, done--> QUEUED
 *                      |  '---retry--- FAILED <--not written--'
 *     a removed file goes the same way, and is gone where it would be CLEAN
 *
 * A failure costs durability only: it is told, counted, and tried again with the next write that works, and after a
 * while. One thread makes all calls but session_files_load(). */
#pragma once
#include "disk_folder.h"
#include "key.h"
#include "session_record.h"
#include "work.h"

struct session_file;
struct session_files;

struct session_names { /* what the names of files depend on, beside uid and name of the session */
    uint8_t secret[KV_KEY_BYTES];
    uint8_t vocabulary[KV_DIGEST_BYTES];
};

struct session_files_options {
    const struct disk_folder *folder; /* outlives it */
    struct kv_work work;
    struct session_names names;
    uint64_t (*now_us)(void);
    uint64_t retry_us;
    /* Records could be written until now and cannot any more: -errno; or they can again: 0. */
    void (*on_trouble)(void *user, int error);
    void *user;
};

int session_files_open(const struct session_files_options *options, struct session_files **ret_files); /* -ENOMEM */
void session_files_close(struct session_files *files); /* nothing is out; NULL is fine */

/* The file of a session; nothing is written yet. -ENOMEM, -EIO. */
int session_files_add(struct session_files *files, uint32_t uid, struct span name, struct session_file **ret_file);

/* Shall be what the file holds. The record is copied. -ENOMEM: the file stays as it is, and counts as failed. */
int session_files_put(struct session_files *files, struct session_file *file, const struct session_record *record);

struct session_wait { /* embedded in who waits */
    struct session_wait *next;
    uint64_t round;
    void (*done)(struct session_wait *wait, int result);
};
/* Shall be no more; the caller lets go of it. wait: NULL, or who is told. */
void session_files_remove(struct session_files *files, struct session_file *file, struct session_wait *wait);
/* done(0) when what was put last is on the disk; -errno when it was tried and failed. Only after a put. */
void session_files_wait(struct session_file *file, struct session_wait *wait);

/* What was put last could not even be kept: there was no memory. Only another put helps. */
bool session_file_is_lost(const struct session_file *file);
/* What was put last is there, or will be as far as one knows. */
bool session_file_is_durable(const struct session_file *file);

/* Nothing is queued or out; what failed may still be to be written. */
bool session_files_is_idle(const struct session_files *files);
/* What failed is tried again now. */
void session_files_retry(struct session_files *files);
/* Retries what failed if it is time. Returns when to call it next; 0: not before another write. */
uint64_t session_files_tick(struct session_files *files);

struct session_files_stats {
    uint64_t n_written, n_removed, n_failed, bytes;
    uint32_t n_files, n_unwritten; /* now; of them those that are not as they shall be */
    int error;                     /* of the last that failed: -errno */
};
void session_files_stats(const struct session_files *files, struct session_files_stats *ret_stats);

/* ---- at start ---- */

enum { SESSION_FILES_BAD_MAX = 256, SESSION_FILES_NAME_BYTES = 80 };

struct session_files_found {
    uint32_t n_whole, n_damaged, n_unreadable, n_foreign; /* foreign: of another vocabulary or version */
    struct session_files_bad {
        char name[SESSION_FILES_NAME_BYTES];
        int error;                /* 0: damaged; else why it could not be read */
    } bad[SESSION_FILES_BAD_MAX]; /* the first ones damaged or unreadable */
    uint32_t n_bad;
};
/* What the file of a session is called. -ENOMEM, -EIO. */
int session_files_name(const struct session_names *names, uint32_t uid, struct span name,
                       char ret_name[SESSION_FILES_NAME_BYTES]);
/* Reads every record of the folder, once, and hands out those of this vocabulary; damaged ones stay where they are. Blocks;
 * any thread. -errno: the folder cannot be listed, or what `each` returned. */
int session_files_load(const struct disk_folder *folder, const struct session_names *names,
                       int (*each)(void *user, const struct session_record *record), void *user,
                       struct session_files_found *ret_found);
