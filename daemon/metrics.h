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
    METRIC_STREAMING_PAGES,
    METRIC_STREAMED_BYTES,
    METRIC_STREAM_FENCES,
    METRIC_LOOKUPS,     /* enum metric_lookup */
    METRIC_LOG_DROPPED, /* struct log: n_lost */
    METRIC_LOOP_CPU_US, /* written in seconds */
    METRIC_UPTIME_US,   /* written in seconds */
    METRIC_READY,
    METRIC_N
};

enum metric_tier { METRIC_TIER_DEVICE, METRIC_TIER_HOST, METRIC_TIER_DISK };
enum metric_part { METRIC_PART_PREFILL, METRIC_PART_CYCLE };
enum metric_lookup { METRIC_LOOKUP_HIT, METRIC_LOOKUP_MISS };
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
