/* config: every limit and switch of the process, and where each value came from. Text in, checked numbers out; knows no
 * model, socket or device. The table of keys is config_keys.c, the form of the text config_parse.h. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "report.h"
#include "text.h"

enum { CONFIG_KEYS_MAX = 64 }; /* config_keys.c asserts that the table fits */

enum config_backend { CONFIG_BACKEND_AUTO, CONFIG_BACKEND_CPU, CONFIG_BACKEND_CUDA };
enum config_numeric { CONFIG_NUMERIC_FAST, CONFIG_NUMERIC_BF16, CONFIG_NUMERIC_REFERENCE };
enum config_load_format { CONFIG_LOAD_SAFETENSORS, CONFIG_LOAD_DUMMY };
enum config_causal { CONFIG_CAUSAL_AUTO, CONFIG_CAUSAL_YES, CONFIG_CAUSAL_NO };
enum config_dtype { CONFIG_DTYPE_AUTO, CONFIG_DTYPE_F32, CONFIG_DTYPE_BF16, CONFIG_DTYPE_FP16, CONFIG_DTYPE_E4M3 };
enum config_restore { CONFIG_RESTORE_AUTO, CONFIG_RESTORE_ALWAYS, CONFIG_RESTORE_NEVER };

/* A field carries its key's name; durations add _ms. Strings are never NULL. Ranges and meanings: config_keys.c. */
struct config {
    struct {
        char *socket;
        int socket_mode; /* permission bits */
        int backlog;
        int64_t drain_timeout_ms, slow_timeout_ms;
        uint64_t output_high, output_low; /* bytes of one connection's output */
    } server;
    struct {
        char *path;
        int backend; /* enum config_backend */
        int numeric; /* enum config_numeric */
        int threads; /* 0: one per physical core */
        int load_format;
    } model;
    struct {
        char *path;     /* empty: no drafter */
        int block_size; /* 0: the drafter's own */
        int causal;     /* enum config_causal */
        bool fallback;
    } draft;
    struct {
        uint64_t device_bytes, host_bytes, disk_bytes;
        char *disk_path;        /* empty: none; see config_has_disk() */
        int dtype, draft_dtype; /* enum config_dtype */
        int restore;            /* enum config_restore */
        int disk_min_tokens;
        uint64_t disk_write_bytes_per_day; /* 0: no limit */
        int64_t disk_timeout_ms;           /* of one operation */
        int restore_points;                /* most restore points kept of one seq */
        bool shared_prefixes;
        int share_per_uid;               /* percent */
        uint64_t scrub_bytes_per_second; /* 0: none */
        int warm_up;                     /* percent of host_bytes */
    } kv;
    struct {
        int max_seqs, max_batch_tokens, prefill_chunk, queue_max;
    } sched;
    struct {
        int max_context; /* 0: the model's, or what fits into kv.device_bytes */
        int connections;
        int requests; /* unanswered ones of one connection */
        int requests_per_uid, sessions_per_uid;
        int session_tokens_per_uid; /* 0: no limit */
        uint64_t frame_bytes, pending_bytes;
    } limits;
    struct {
        int level; /* enum log_level */
    } log;
    char *origin[CONFIG_KEYS_MAX]; /* in the table's order: "built-in", "FILE:LINE", "--set" */
};

/* Later sources win: built-in values, the file, conf.d/ *.conf beside it in the order of their names, each --set. */
struct config_source {
    const char *file;        /* NULL: none, and no conf.d */
    const char *const *sets; /* [n_sets] "section.key=value" */
    int n_sets;
};

/* -EINVAL: refused, the report names file and line (or --set), the key, what was got and what is allowed; -ENOENT, -EIO,
 * ...: a file could not be read; -ENOMEM. On failure nothing is kept. */
int config_load(const struct config_source *source, struct config *ret_config, struct report *report);
void config_free(struct config *config);

/* Where a key's value comes from: "built-in", "FILE:LINE", "--set". */
const char *config_origin(const struct config *config, const char *section, const char *name);

/* There is a disk tier: kv.disk_path and kv.disk_bytes name one. */
bool config_has_disk(const struct config *config);

/* Every key with value and origin, in a form that config_load reads. */
void config_print(const struct config *config, struct text *out);
/* The commented file conf/spillway.conf: every key with its reason, unit, range and default. */
void config_print_template(struct text *out);

/* One key that differs between two configurations. */
struct config_change {
    const char *section, *key;
    bool at_run_time; /* config_adopt takes it over; else it needs a restart */
};
/* Returns how many there are; ret_changes holds them all if it has room for CONFIG_KEYS_MAX. */
int config_diff(const struct config *running, const struct config *fresh, struct config_change *ret_changes);
/* Takes over the values of `fresh` that may change at run time, with their origins; `fresh` is still to be freed. */
void config_adopt(struct config *running, struct config *fresh);
