/* metrics: what the process counts, and how it is written for Prometheus. Plain numbers of the loop thread: adding is an
 * add. Names, helps and labels are the table in metrics.c. Knows nobody who counts. */
#pragma once
#include <stdint.h>

#include "text.h"

enum metric_type { METRIC_COUNTER, METRIC_GAUGE };

/* Counters only grow; gauges are set. The label's values are beside each; where none is given, the label is 0. */
enum metric {
    METRIC_REQUESTS, /* generations that ended; enum proto_finish */
    METRIC_ERRORS,   /* error responses; enum proto_code */
    METRIC_PROMPT_TOKENS,
    METRIC_GENERATED_TOKENS, /* one for each token that a client was given or a stop withheld */
    METRIC_PREFILL_TOKENS,
    METRIC_CACHED_TOKENS, /* enum metric_tier */
    METRIC_RECOMPUTED_TOKENS,
    METRIC_DRAFT_STEPS,
    METRIC_DRAFT_PROPOSED,
    METRIC_DRAFT_ACCEPTED,
    METRIC_STEPS,     /* enum metric_part */
    METRIC_PLAN_ROWS, /* enum metric_part */
    METRIC_PLAN_ROOM, /* enum metric_part */
    METRIC_PREEMPTIONS,
    METRIC_QUEUED,
    METRIC_RUNNING,
    METRIC_PREEMPTED,
    METRIC_SESSIONS,
    METRIC_SESSIONS_UNWRITTEN,
    METRIC_SESSION_RECORDS, /* enum metric_record */
    METRIC_SESSION_RECORD_BYTES,
    METRIC_CONNECTIONS,
    METRIC_CONNECTIONS_ACCEPTED,
    METRIC_CONNECTIONS_REJECTED,
    METRIC_BAD_FRAMES,
    METRIC_SLOW_CLIENTS,
    METRIC_READ_BYTES,
    METRIC_WRITTEN_BYTES,
    METRIC_POOL_SLOTS, /* this and the next five: enum kv_group */
    METRIC_POOL_FREE,
    METRIC_POOL_INDEXED,
    METRIC_POOL_PINNED,
    METRIC_POOL_BYTES,
    METRIC_EVICTIONS,
    METRIC_PUBLISHED, /* enum kv_group */
    METRIC_RESTORE_POINTS,
    METRIC_STREAMING_PAGES, /* enum metric_tier */
    METRIC_STREAMED_BYTES,
    METRIC_STREAM_FENCES,
    METRIC_STREAM_LATE_FENCES,
    METRIC_STREAM_PASSES,
    METRIC_STREAM_PASS_BYTES,
    METRIC_STREAM_RESIDENT_PERCENT,
    METRIC_STREAM_RING_PERCENT,
    METRIC_SHARE_USERS, /* this and the next: enum metric_tier */
    METRIC_SHARE_KEPT,
    METRIC_HOST_SLOTS, /* this and the next five: enum kv_group */
    METRIC_HOST_CLEAN,
    METRIC_HOST_FILLING,
    METRIC_HOST_PINNED,
    METRIC_HOST_EVICTIONS,
    METRIC_HOST_AWAY,
    METRIC_PRESSURE_EVENTS,
    METRIC_PRESSURE_GIVEN_BYTES,
    METRIC_PRESSURE_GAVE_NONE,
    METRIC_SPILLED_BYTES,
    METRIC_SPILLS_SKIPPED, /* enum metric_spill */
    METRIC_RESTORES,       /* enum metric_restore */
    METRIC_RESTORED_BYTES,
    METRIC_RESTORE_US, /* enum kv_restore_stage; written in seconds */
    METRIC_WARMING,
    METRIC_WARMED_BYTES,
    METRIC_WARMED_PREFIXES,
    METRIC_SCRUBBED, /* this and the next: enum metric_tier */
    METRIC_SCRUB_DAMAGED,
    METRIC_SCRUBBED_BYTES,
    METRIC_SCRUB_ROUNDS,
    METRIC_DISK_SLOTS, /* this and the next four: enum kv_group */
    METRIC_DISK_STORED,
    METRIC_DISK_WRITING,
    METRIC_DISK_PINNED,
    METRIC_DISK_EVICTIONS,
    METRIC_DISK_FILE_BYTES,
    METRIC_DISK_ROOM_BYTES,
    METRIC_DISK_SAVES,
    METRIC_DISK_SAVED_BYTES,
    METRIC_DISK_READ_BYTES,
    METRIC_DISK_SKIPPED, /* enum metric_skip */
    METRIC_DISK_ERRORS,  /* enum metric_disk_error */
    METRIC_DISK_USED_BYTES,
    METRIC_DISK_NEVER_READ,
    METRIC_DISK_OFF,
    METRIC_DISK_WRITE_OFF,
    METRIC_DISK_BREAKER_OPENED,
    METRIC_DISK_BUDGET_BYTES,
    METRIC_DISK_SCANNING,
    METRIC_DISK_SCANNED,     /* enum metric_scanned */
    METRIC_DISK_COMPLETIONS, /* odd ones; enum metric_completion */
    METRIC_DISK_QUARANTINED_BYTES,
    METRIC_DISK_FEATURE, /* enum metric_feature */
    METRIC_LOOKUPS,      /* enum metric_lookup */
    METRIC_LOG_DROPPED,  /* struct log: n_lost */
    METRIC_LOOP_CPU_US,  /* written in seconds */
    METRIC_UPTIME_US,    /* written in seconds */
    METRIC_READY,
    METRIC_N
};

enum metric_tier { METRIC_TIER_DEVICE, METRIC_TIER_HOST, METRIC_TIER_DISK };
enum metric_record { METRIC_RECORD_WRITTEN, METRIC_RECORD_REMOVED, METRIC_RECORD_FAILED, METRIC_RECORD_BAD };
enum metric_part { METRIC_PART_PREFILL, METRIC_PART_CYCLE };
enum metric_lookup { METRIC_LOOKUP_HIT, METRIC_LOOKUP_MISS };
enum metric_spill { METRIC_SPILL_NO_JOB, METRIC_SPILL_NO_SLOT, METRIC_SPILL_FAILED, METRIC_SPILL_N };
enum metric_restore { METRIC_RESTORE_DONE, METRIC_RESTORE_FAILED, METRIC_RESTORE_N };
enum metric_skip {
    METRIC_SKIP_SHORT,
    METRIC_SKIP_BUDGET,
    METRIC_SKIP_OFF,
    METRIC_SKIP_FULL,
    METRIC_SKIP_GONE,
    METRIC_SKIP_N
};
enum metric_disk_error {
    METRIC_DISK_ERROR_READ,
    METRIC_DISK_ERROR_LATE,
    METRIC_DISK_ERROR_WRITE,
    METRIC_DISK_ERROR_SYNC,
    METRIC_DISK_ERROR_LOST,
    METRIC_DISK_ERROR_DAMAGED,
    METRIC_DISK_ERROR_BLANK,
    METRIC_DISK_ERROR_N
};
enum metric_scanned { METRIC_SCANNED_ALL, METRIC_SCANNED_BAD, METRIC_SCANNED_FOREIGN, METRIC_SCANNED_N };
enum metric_completion {
    METRIC_COMPLETION_SHORT,
    METRIC_COMPLETION_UNKNOWN,
    METRIC_COMPLETION_CANCELLED,
    METRIC_COMPLETION_RETRIED,
    METRIC_COMPLETION_N
};
enum metric_feature {
    METRIC_FEATURE_DIRECT,
    METRIC_FEATURE_RING,
    METRIC_FEATURE_FILES,
    METRIC_FEATURE_BUFFERS,
    METRIC_FEATURE_N
};
/* Seconds, but for the last. */
enum metric_histogram {
    METRIC_TTFT,
    METRIC_INTER_TOKEN,
    METRIC_QUEUE_TIME,
    METRIC_PREFILL_TIME,
    METRIC_REQUEST_TIME,
    METRIC_STEP_TIME,
    METRIC_ACCEPT_LENGTH,
    METRIC_HISTOGRAM_N
};

enum { METRIC_LABELS_MAX = 16, METRIC_BUCKETS_MAX = 20 };

struct metrics {
    int64_t values[METRIC_N][METRIC_LABELS_MAX];
    struct {
        uint64_t buckets[METRIC_BUCKETS_MAX + 1]; /* not yet summed up; the last is +Inf */
        uint64_t n;
        double sum;
    } histograms[METRIC_HISTOGRAM_N];
};

/* What spillway_build_info says. Not owned; any may be NULL. */
struct metrics_build {
    const char *version, *backend, *kernel_path, *model, *draft;
};

void metrics_init(struct metrics *metrics);
void metrics_add(struct metrics *metrics, enum metric metric, int label, int64_t n); /* counters: n >= 0 */
void metrics_set(struct metrics *metrics, enum metric metric, int label,
                 int64_t value); /* gauges, and totals that others keep */
int64_t metrics_get(const struct metrics *metrics, enum metric metric, int label);
int64_t metrics_sum(const struct metrics *metrics, enum metric metric); /* over all labels */
void metrics_observe(struct metrics *metrics, enum metric_histogram histogram, double value);

/* The number of values of the metric's label, 1 without a label; and the i-th. NULL: it has no label. */
int metrics_n_labels(enum metric metric);
const char *metrics_label(enum metric metric, int label);

/* Prometheus' text format 0.0.4. */
void metrics_write_prometheus(const struct metrics *metrics, const struct metrics_build *build, struct text *out);
