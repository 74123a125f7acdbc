#include "metrics.h"

#include <assert.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>

#include "base.h"
#include "groups.h"
#include "proto.h"
#include "restore.h"

struct label_set {
    const char *name;
    int n;
    const char *(*value)(int label);
};

static const char *finish_value(int label) {
    return proto_finish_name((enum proto_finish)label);
}
static const char *code_value(int label) {
    return proto_code_name((enum proto_code)label);
}
static const char *group_value(int label) {
    return kv_group_name((enum kv_group)label);
}
static const char *tier_value(int label) {
    return (const char *const[]){"device", "host", "disk"}[label];
}
static const char *part_value(int label) {
    return (const char *const[]){"prefill", "cycle"}[label];
}
static const char *spill_value(int label) {
    return (const char *const[]){"no_job", "no_slot", "failed"}[label];
}
static const char *restore_value(int label) {
    return (const char *const[]){"done", "failed"}[label];
}
static const char *stage_value(int label) {
    return (const char *const[]){"read", "check", "copy", "wait"}[label];
}
static const char *skip_value(int label) {
    return (const char *const[]){"short", "budget", "off", "full", "gone"}[label];
}
static const char *disk_error_value(int label) {
    return (const char *const[]){"read", "late", "write", "sync", "lost", "damaged", "blank"}[label];
}
static const char *scanned_value(int label) {
    return (const char *const[]){"all", "bad", "foreign"}[label];
}
static const char *completion_value(int label) {
    return (const char *const[]){"short", "unknown", "cancelled", "retried"}[label];
}
static const char *feature_value(int label) {
    return (const char *const[]){"direct_io", "io_uring", "registered_files", "registered_buffers"}[label];
}
static const char *record_value(int label) {
    return (const char *const[]){"written", "removed", "failed", "bad"}[label];
}
static const char *outcome_value(int label) {
    return (const char *const[]){"hit", "miss"}[label];
}

static const struct label_set finish_reasons = {"finish_reason", PROTO_N_FINISHES, finish_value};
static const struct label_set codes = {"code", PROTO_N_CODES, code_value};
static const struct label_set groups = {"group", KV_GROUP_N, group_value};
static const struct label_set tiers = {"tier", 3, tier_value};
static const struct label_set parts = {"part", 2, part_value};
static const struct label_set spills = {"cause", METRIC_SPILL_N, spill_value};
static const struct label_set restores = {"result", METRIC_RESTORE_N, restore_value};
static const struct label_set stages = {"stage", KV_RESTORE_STAGE_N, stage_value};
static const struct label_set skips = {"cause", METRIC_SKIP_N, skip_value};
static const struct label_set disk_errors = {"kind", METRIC_DISK_ERROR_N, disk_error_value};
static const struct label_set scanned = {"found", METRIC_SCANNED_N, scanned_value};
static const struct label_set completions = {"kind", METRIC_COMPLETION_N, completion_value};
static const struct label_set features = {"feature", METRIC_FEATURE_N, feature_value};
static const struct label_set record_outcomes = {"outcome", 4, record_value};
static const struct label_set outcomes = {"outcome", 2, outcome_value};
static_assert((int)PROTO_N_CODES <= METRIC_LABELS_MAX && (int)PROTO_N_FINISHES <= METRIC_LABELS_MAX,
              "struct metrics has a number for every label");

struct metric_row {
    const char *name; /* without spillway_ */
    enum metric_type type;
    const struct label_set *label;
    bool is_us; /* kept in microseconds, written in seconds */
    const char *help;
};

static const struct metric_row rows[METRIC_N] = {
    [METRIC_REQUESTS] = {"requests_total", METRIC_COUNTER, &finish_reasons, .help = "Generations that ended."},
    [METRIC_ERRORS] = {"errors_total", METRIC_COUNTER, &codes, .help = "Error responses."},
    [METRIC_PROMPT_TOKENS] = {"prompt_tokens_total", METRIC_COUNTER, .help = "Prompt tokens of admitted generations."},
    [METRIC_GENERATED_TOKENS] = {"generated_tokens_total", METRIC_COUNTER, .help = "Tokens generated and kept."},
    [METRIC_PREFILL_TOKENS] = {"prefill_tokens_total", METRIC_COUNTER,
                               .help = "Prompt tokens that were computed, those of preempted requests again."},
    [METRIC_CACHED_TOKENS] = {"cached_tokens_total", METRIC_COUNTER, &tiers,
                              .help = "Prompt tokens that were not computed because a tier held them."},
    [METRIC_RECOMPUTED_TOKENS] = {"recomputed_tokens_total", METRIC_COUNTER,
                                  .help = "Prompt tokens that a tier held and that were computed all the same."},
    [METRIC_DRAFT_STEPS] = {"draft_steps_total", METRIC_COUNTER, .help = "Verify passes of requests that draft."},
    [METRIC_DRAFT_PROPOSED] = {"draft_proposed_tokens_total", METRIC_COUNTER, .help = "Tokens the drafter proposed."},
    [METRIC_DRAFT_ACCEPTED] = {"draft_accepted_tokens_total", METRIC_COUNTER,
                               .help = "Proposed tokens that the model chose too."},
    [METRIC_STEPS] = {"steps_total", METRIC_COUNTER, &parts, .help = "Device passes."},
    [METRIC_PLAN_ROWS] = {"plan_rows_total", METRIC_COUNTER, &parts, .help = "Rows of device passes."},
    [METRIC_PLAN_ROOM] = {"plan_room_rows_total", METRIC_COUNTER, &parts,
                          .help = "Rows that those device passes had room for."},
    [METRIC_PREEMPTIONS] = {"preemptions_total", METRIC_COUNTER,
                            .help = "Sequences that gave their pages up for others and went on later."},
    [METRIC_QUEUED] = {"queued_requests", METRIC_GAUGE, .help = "Admitted requests that wait."},
    [METRIC_RUNNING] = {"running_seqs", METRIC_GAUGE, .help = "Sequences that run."},
    [METRIC_PREEMPTED] = {"preempted_seqs", METRIC_GAUGE, .help = "Preempted sequences that wait to go on."},
    [METRIC_SESSIONS] = {"sessions", METRIC_GAUGE, .help = "Open sessions."},
    [METRIC_SESSIONS_UNWRITTEN] = {"sessions_unwritten", METRIC_GAUGE,
                                   .help = "Sessions whose last change is not on disk yet."},
    [METRIC_SESSION_RECORDS] = {"session_records_total", METRIC_COUNTER, &record_outcomes,
                                .help = "Records of sessions written, removed, not written, and found damaged."},
    [METRIC_SESSION_RECORD_BYTES] = {"session_record_bytes_total", METRIC_COUNTER,
                                     .help = "Bytes of records of sessions written."},
    [METRIC_CONNECTIONS] = {"connections", METRIC_GAUGE, .help = "Open connections."},
    [METRIC_CONNECTIONS_ACCEPTED] = {"connections_accepted_total", METRIC_COUNTER, .help = "Connections taken."},
    [METRIC_CONNECTIONS_REJECTED] = {"connections_rejected_total", METRIC_COUNTER,
                                     .help = "Connections closed at once: there were too many."},
    [METRIC_BAD_FRAMES] = {"bad_frames_total", METRIC_COUNTER, .help = "Connections closed for what they sent."},
    [METRIC_SLOW_CLIENTS] = {"slow_clients_total", METRIC_COUNTER,
                             .help = "Connections whose requests ended because nobody read their output."},
    [METRIC_READ_BYTES] = {"socket_read_bytes_total", METRIC_COUNTER, .help = "Bytes read from clients."},
    [METRIC_WRITTEN_BYTES] = {"socket_written_bytes_total", METRIC_COUNTER, .help = "Bytes written to clients."},
    [METRIC_POOL_SLOTS] = {"pool_slots", METRIC_GAUGE, &groups, .help = "Slots of the device pool."},
    [METRIC_POOL_FREE] = {"pool_free_slots", METRIC_GAUGE, &groups, .help = "Slots that hold nothing."},
    [METRIC_POOL_INDEXED] = {"pool_indexed_slots", METRIC_GAUGE, &groups,
                             .help = "Slots that a later request can find."},
    [METRIC_POOL_PINNED] = {"pool_pinned_slots", METRIC_GAUGE, &groups,
                            .help = "Slots that a sequence or a copy needs now."},
    [METRIC_POOL_BYTES] = {"pool_bytes", METRIC_GAUGE, &groups, .help = "Memory of the device pool."},
    [METRIC_EVICTIONS] = {"evictions_total", METRIC_COUNTER, &groups, .help = "Slots emptied to make room."},
    [METRIC_PUBLISHED] = {"published_total", METRIC_COUNTER, &groups, .help = "Slots made findable."},
    [METRIC_RESTORE_POINTS] = {"restore_points", METRIC_GAUGE, .help = "Places from which a request can go on."},
    [METRIC_STREAMING_PAGES] = {"streaming_seq_pages", METRIC_GAUGE, &tiers,
                                .help = "Pages of the sequence that the device does not hold, by where they are."},
    [METRIC_STREAMED_BYTES] = {"streamed_bytes_total", METRIC_COUNTER,
                               .help = "Bytes of pages that passes read from host memory."},
    [METRIC_STREAM_FENCES] = {"stream_fences_total", METRIC_COUNTER,
                              .help = "Fences of such pages that passes have gone through."},
    [METRIC_SHARE_USERS] = {"share_users", METRIC_GAUGE, &tiers, .help = "Users who have pages in the tier."},
    [METRIC_SHARE_KEPT] = {"share_kept_total", METRIC_COUNTER, &tiers,
                           .help =
                               "Slots that were the longest unused and stayed, because they are in a user's share."},
    [METRIC_STREAM_LATE_FENCES] = {"stream_late_fences_total", METRIC_COUNTER,
                                   .help = "Of these, where compute had to wait. Not known of a GPU."},
    [METRIC_STREAM_PASSES] = {"stream_passes_total", METRIC_COUNTER, .help = "Passes that read such pages."},
    [METRIC_STREAM_PASS_BYTES] = {"stream_pass_bytes", METRIC_GAUGE, .help = "Bytes of them that the last pass read."},
    [METRIC_STREAM_RESIDENT_PERCENT] = {"stream_resident_percent", METRIC_GAUGE,
                                        .help = "Share of its pages that the device holds."},
    [METRIC_STREAM_RING_PERCENT] = {"stream_ring_percent", METRIC_GAUGE,
                                    .help = "Share of the ring that a layer's streamed pages fill."},
    [METRIC_HOST_SLOTS] = {"host_slots", METRIC_GAUGE, &groups, .help = "Slots of the host tier."},
    [METRIC_HOST_CLEAN] = {"host_clean_slots", METRIC_GAUGE, &groups,
                           .help = "Slots of the host tier that hold a whole page."},
    [METRIC_HOST_FILLING] = {"host_filling_slots", METRIC_GAUGE, &groups,
                             .help = "Slots of the host tier that are being filled."},
    [METRIC_HOST_PINNED] = {"host_pinned_slots", METRIC_GAUGE, &groups,
                            .help = "Slots of the host tier that a copy or a write needs now."},
    [METRIC_HOST_EVICTIONS] = {"host_evictions_total", METRIC_COUNTER, &groups,
                               .help = "Slots of the host tier emptied to make room."},
    [METRIC_HOST_AWAY] = {"host_away_slots", METRIC_GAUGE, &groups,
                          .help = "Slots whose memory the system has for now."},
    [METRIC_PRESSURE_EVENTS] = {"pressure_events_total", METRIC_COUNTER,
                                .help = "Times that the kernel said memory was short."},
    [METRIC_PRESSURE_GIVEN_BYTES] = {"pressure_given_bytes_total", METRIC_COUNTER,
                                     .help = "Bytes of the host tier given back for that."},
    [METRIC_PRESSURE_GAVE_NONE] = {"pressure_gave_none_total", METRIC_COUNTER,
                                   .help = "Such times at which there was nothing to give back."},
    [METRIC_SPILLED_BYTES] = {"spilled_bytes_total", METRIC_COUNTER, .help = "Bytes copied from device to host."},
    [METRIC_SPILLS_SKIPPED] = {"spills_skipped_total", METRIC_COUNTER, &spills,
                               .help = "Copies to the host tier that were not made."},
    [METRIC_RESTORES] = {"restores_total", METRIC_COUNTER, &restores, .help = "Prefixes brought back to the device."},
    [METRIC_RESTORED_BYTES] = {"restored_bytes_total", METRIC_COUNTER, .help = "Bytes copied from host to device."},
    [METRIC_RESTORE_US] = {"restore_seconds_total", METRIC_COUNTER, &stages, .is_us = true,
                           .help = "Time of restores; what goes on side by side counts for the first of the stages."},
    [METRIC_WARMING] = {"warming", METRIC_GAUGE,
                        .help = "1 while prefixes are brought from disk to host memory after the start."},
    [METRIC_WARMED_BYTES] = {"warmed_bytes_total", METRIC_COUNTER, .help = "Bytes of pages brought up so."},
    [METRIC_WARMED_PREFIXES] = {"warmed_prefixes_total", METRIC_COUNTER, .help = "Prefixes brought up so, whole ones."},
    [METRIC_SCRUBBED] = {"scrubbed_total", METRIC_COUNTER, &tiers,
                         .help = "Slots held against their checksums while there was nothing else to do."},
    [METRIC_SCRUB_DAMAGED] = {"scrub_damaged_total", METRIC_COUNTER, &tiers,
                              .help = "Those of them that were damaged."},
    [METRIC_SCRUBBED_BYTES] = {"scrubbed_bytes_total", METRIC_COUNTER, .help = "Bytes of these slots."},
    [METRIC_SCRUB_ROUNDS] = {"scrub_rounds_total", METRIC_COUNTER, .help = "How often all slots were gone through."},
    [METRIC_DISK_SLOTS] = {"disk_slots", METRIC_GAUGE, &groups, .help = "Slots of the segments on disk."},
    [METRIC_DISK_STORED] = {"disk_stored_slots", METRIC_GAUGE, &groups, .help = "Slots on disk that can be found."},
    [METRIC_DISK_WRITING] = {"disk_writing_slots", METRIC_GAUGE, &groups,
                             .help = "Slots on disk that are being written."},
    [METRIC_DISK_PINNED] = {"disk_pinned_slots", METRIC_GAUGE, &groups,
                            .help = "Slots on disk that a restore needs now."},
    [METRIC_DISK_EVICTIONS] = {"disk_evictions_total", METRIC_COUNTER, &groups,
                               .help = "Slots on disk emptied to make room."},
    [METRIC_DISK_FILE_BYTES] = {"disk_file_bytes", METRIC_GAUGE, .help = "Size of the segment files."},
    [METRIC_DISK_ROOM_BYTES] = {"disk_room_bytes", METRIC_GAUGE,
                                .help =
                                    "Most that the segment files may have: kv.disk_bytes, or less if the file system "
                                    "has no room for that."},
    [METRIC_DISK_SAVES] = {"disk_saves_total", METRIC_COUNTER, .help = "Prefixes written to disk."},
    [METRIC_DISK_SAVED_BYTES] = {"disk_saved_bytes_total", METRIC_COUNTER, .help = "Bytes of pages written to disk."},
    [METRIC_DISK_READ_BYTES] = {"disk_read_bytes_total", METRIC_COUNTER, .help = "Bytes of pages read from disk."},
    [METRIC_DISK_SKIPPED] = {"disk_skipped_total", METRIC_COUNTER, &skips,
                             .help = "Prefixes or pages that were not written to disk."},
    [METRIC_DISK_ERRORS] = {"disk_errors_total", METRIC_COUNTER, &disk_errors,
                            .help = "Operations on disk that failed, pages lost or damaged with them."},
    [METRIC_DISK_USED_BYTES] = {"disk_used_bytes_total", METRIC_COUNTER,
                                .help = "Bytes of pages on disk that were needed, each page once."},
    [METRIC_DISK_NEVER_READ] = {"disk_never_read_total", METRIC_COUNTER,
                                .help = "Slots on disk emptied without having been read."},
    [METRIC_DISK_OFF] = {"disk_off", METRIC_GAUGE, .help = "1 while the disk makes trouble and is left alone."},
    [METRIC_DISK_WRITE_OFF] = {"disk_write_off", METRIC_GAUGE, .help = "1 while nothing can be written to disk."},
    [METRIC_DISK_BREAKER_OPENED] = {"disk_breaker_opened_total", METRIC_COUNTER,
                                    .help = "How often the disk was left alone."},
    [METRIC_DISK_BUDGET_BYTES] = {"disk_budget_bytes", METRIC_GAUGE,
                                  .help = "Bytes that may be written today; -1 without a limit."},
    [METRIC_DISK_SCANNING] = {"disk_scanning", METRIC_GAUGE, .help = "1 while the folder is being read at start."},
    [METRIC_DISK_SCANNED] = {"disk_scanned_total", METRIC_COUNTER, &scanned,
                             .help = "Slot headers read at start; those that were damaged or another store's."},
    [METRIC_DISK_COMPLETIONS] = {"disk_odd_completions_total", METRIC_COUNTER, &completions,
                                 .help = "Operations on disk that ended otherwise than asked."},
    [METRIC_DISK_QUARANTINED_BYTES] = {"disk_quarantined_bytes", METRIC_GAUGE,
                                       .help = "Memory that the kernel keeps past the deadline of its operation."},
    [METRIC_DISK_FEATURE] = {"disk_feature", METRIC_GAUGE, &features,
                             .help = "1 if the disk tier uses it, 0 if it does without."},
    [METRIC_LOOKUPS] = {"prefix_lookups_total", METRIC_COUNTER, &outcomes,
                        .help = "Prompts looked up, by whether any of their beginning was held."},
    [METRIC_LOG_DROPPED] = {"log_dropped_total", METRIC_COUNTER, .help = "Log lines that could not be written."},
    [METRIC_LOOP_CPU_US] = {"loop_cpu_seconds_total", METRIC_COUNTER, .is_us = true,
                            .help = "Processor time of the loop thread."},
    [METRIC_UPTIME_US] = {"uptime_seconds", METRIC_GAUGE, .is_us = true, .help = "Time since the process began."},
    [METRIC_READY] = {"ready", METRIC_GAUGE, .help = "1 while generations are served."},
};

struct histogram_row {
    const char *name, *help;
    double bounds[METRIC_BUCKETS_MAX]; /* ascending; ends with 0 */
};

#define REQUEST_BOUNDS                                                                                                 \
    { 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600 }
#define STEP_BOUNDS                                                                                                    \
    { 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.125, 0.25, 0.5, 1, 2.5 }

static const struct histogram_row histogram_rows[METRIC_HISTOGRAM_N] = {
    [METRIC_TTFT] = {"time_to_first_token_seconds", "From a request's arrival to its first token.", REQUEST_BOUNDS},
    [METRIC_INTER_TOKEN] = {"inter_token_seconds",
                            "Time between the tokens of a request; tokens of one step share its time.", STEP_BOUNDS},
    [METRIC_QUEUE_TIME] = {"queue_seconds", "From a request's arrival to its first pass.", REQUEST_BOUNDS},
    [METRIC_PREFILL_TIME] = {"prefill_seconds", "From a request's first pass to the end of its prompt.",
                             REQUEST_BOUNDS},
    [METRIC_REQUEST_TIME] = {"request_seconds", "From a request's arrival to its response.", REQUEST_BOUNDS},
    [METRIC_STEP_TIME] = {"step_seconds", "From a plan to its results.", STEP_BOUNDS},
    [METRIC_ACCEPT_LENGTH] = {"accept_length_tokens",
                              "Tokens that one verify pass committed for one sequence.",
                              {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}},
};

/* ---- counting ----------------------------------------------------------------------------------------------------- */

void metrics_init(struct metrics *metrics) {
    *metrics = (struct metrics){0};
}

int metrics_n_labels(enum metric metric) {
    return rows[metric].label ? rows[metric].label->n : 1;
}

const char *metrics_label(enum metric metric, int label) {
    return rows[metric].label ? rows[metric].label->value(label) : NULL;
}

static int64_t *value_of(struct metrics *metrics, enum metric metric, int label) {
    assert(label >= 0 && label < metrics_n_labels(metric));
    return &metrics->values[metric][label];
}

void metrics_add(struct metrics *metrics, enum metric metric, int label, int64_t n) {
    *value_of(metrics, metric, label) += n;
}

void metrics_set(struct metrics *metrics, enum metric metric, int label, int64_t value) {
    *value_of(metrics, metric, label) = value;
}

int64_t metrics_get(const struct metrics *metrics, enum metric metric, int label) {
    assert(label >= 0 && label < metrics_n_labels(metric));
    return metrics->values[metric][label];
}

int64_t metrics_sum(const struct metrics *metrics, enum metric metric) {
    int64_t sum = 0;

    for (int i = 0; i < metrics_n_labels(metric); i++)
        sum += metrics->values[metric][i];
    return sum;
}

void metrics_observe(struct metrics *metrics, enum metric_histogram histogram, double value) {
    const double *bounds = histogram_rows[histogram].bounds;
    int i = 0;

    while (i < METRIC_BUCKETS_MAX && bounds[i] > 0 && value > bounds[i])
        i++;
    if (i == METRIC_BUCKETS_MAX || bounds[i] <= 0)
        i = METRIC_BUCKETS_MAX; /* +Inf */
    metrics->histograms[histogram].buckets[i]++;
    metrics->histograms[histogram].n++;
    metrics->histograms[histogram].sum += value;
}

/* ---- writing ------------------------------------------------------------------------------------------------------ */

__attribute__((format(printf, 2, 3))) static void add_format(struct text *out, const char *format, ...) {
    char line[512];
    va_list args;
    int n;

    va_start(args, format);
    n = vsnprintf(line, sizeof line, format, args);
    va_end(args);
    assert(n >= 0 && n < (int)sizeof line); /* names and helps are ours and short */
    text_add(out, line, (size_t)n);
}

static void add_head(struct text *out, const char *name, const char *type, const char *help) {
    add_format(out, "# HELP spillway_%s %s\n# TYPE spillway_%s %s\n", name, help, name, type);
}

static void add_number(struct text *out, int64_t value, bool is_us) {
    if (is_us)
        add_format(out, "%" PRId64 ".%06" PRId64 "\n", value / 1000000, value % 1000000);
    else
        add_format(out, "%" PRId64 "\n", value);
}

static void add_metric(struct text *out, const struct metric_row *row, const int64_t *values) {
    add_head(out, row->name, row->type == METRIC_COUNTER ? "counter" : "gauge", row->help);
    if (!row->label) {
        add_format(out, "spillway_%s ", row->name);
        add_number(out, values[0], row->is_us);
        return;
    }
    for (int i = 0; i < row->label->n; i++) {
        add_format(out, "spillway_%s{%s=\"%s\"} ", row->name, row->label->name, row->label->value(i));
        add_number(out, values[i], row->is_us);
    }
}

static void add_histogram(struct text *out, const struct metrics *metrics, enum metric_histogram histogram) {
    const struct histogram_row *row = &histogram_rows[histogram];
    uint64_t n = 0;

    add_head(out, row->name, "histogram", row->help);
    for (int i = 0; i < METRIC_BUCKETS_MAX && row->bounds[i] > 0; i++) {
        n += metrics->histograms[histogram].buckets[i];
        add_format(out, "spillway_%s_bucket{le=\"%g\"} %" PRIu64 "\n", row->name, row->bounds[i], n);
    }
    add_format(out, "spillway_%s_bucket{le=\"+Inf\"} %" PRIu64 "\n", row->name, metrics->histograms[histogram].n);
    add_format(out, "spillway_%s_sum %.9g\n", row->name, metrics->histograms[histogram].sum);
    add_format(out, "spillway_%s_count %" PRIu64 "\n", row->name, metrics->histograms[histogram].n);
}

/* A label value: backslash, quote and newline are escaped, as the format wants. */
static void add_label(struct text *out, const char *name, const char *value) {
    text_add_string(out, name);
    text_add_string(out, "=\"");
    for (const char *c = value ? value : ""; *c; c++) {
        if (*c == '"' || *c == '\\')
            text_add_string(out, "\\");
        text_add(out, *c == '\n' ? "\\n" : c, *c == '\n' ? 2 : 1);
    }
    text_add_string(out, "\"");
}

static void add_build(struct text *out, const struct metrics_build *build) {
    add_head(out, "build_info", "gauge", "What runs; always 1.");
    text_add_string(out, "spillway_build_info{");
    add_label(out, "version", build->version);
    add_label(out, ",backend", build->backend);
    add_label(out, ",kernel_path", build->kernel_path);
    add_label(out, ",model", build->model);
    add_label(out, ",draft", build->draft);
    text_add_string(out, "} 1\n");
}

void metrics_write_prometheus(const struct metrics *metrics, const struct metrics_build *build, struct text *out) {
    add_build(out, build);
    for (int i = 0; i < METRIC_N; i++)
        add_metric(out, &rows[i], metrics->values[i]);
    for (int i = 0; i < METRIC_HISTOGRAM_N; i++)
        add_histogram(out, metrics, (enum metric_histogram)i);
}
