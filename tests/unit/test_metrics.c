/* Metrics: what is counted comes out, in the text format that Prometheus reads. */
#include <ctype.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "groups.h"
#include "metrics.h"
#include "proto.h"

static struct metrics metrics;
static struct text out;

static const struct metrics_build build = {.version = "0.1.0", .backend = "cpu", .model = "a\"b\\c\nd"};

static int start(void **state) {
    (void)state;
    metrics_init(&metrics);
    text_init(&out, 1 << 20);
    return 0;
}

static int stop(void **state) {
    (void)state;
    text_deinit(&out);
    return 0;
}

static const char *written(void) {
    text_clear(&out);
    metrics_write_prometheus(&metrics, &build, &out);
    text_add(&out, "", 1);
    assert_int_equal(out.error, 0);
    return out.bytes;
}

static void says(const char *line) {
    if (!strstr(written(), line))
        fail_msg("no '%s' in\n%s", line, out.bytes);
}

static void counters_and_gauges_come_out_under_their_label(void **state) {
    (void)state;
    metrics_add(&metrics, METRIC_REQUESTS, PROTO_FINISH_SLOW_CLIENT, 2);
    metrics_add(&metrics, METRIC_REQUESTS, PROTO_FINISH_STOP, 1);
    metrics_add(&metrics, METRIC_GENERATED_TOKENS, 0, 5);
    metrics_set(&metrics, METRIC_POOL_FREE, KV_DRAFT_SLIDING, 77);
    metrics_set(&metrics, METRIC_UPTIME_US, 0, 1500001);
    assert_int_equal(metrics_sum(&metrics, METRIC_REQUESTS), 3);
    assert_int_equal(metrics_get(&metrics, METRIC_REQUESTS, PROTO_FINISH_SLOW_CLIENT), 2);
    says("\nspillway_requests_total{finish_reason=\"slow_client\"} 2\n");
    says("\nspillway_requests_total{finish_reason=\"error\"} 0\n");
    says("\nspillway_generated_tokens_total 5\n");
    says("\nspillway_pool_free_slots{group=\"draft_sliding\"} 77\n");
    says("\nspillway_uptime_seconds 1.500001\n");
    says("# TYPE spillway_requests_total counter\n");
    says("# TYPE spillway_pool_free_slots gauge\n");
}

static void histograms_sum_up_their_buckets(void **state) {
    (void)state;
    metrics_observe(&metrics, METRIC_ACCEPT_LENGTH, 1);
    metrics_observe(&metrics, METRIC_ACCEPT_LENGTH, 3);
    metrics_observe(&metrics, METRIC_ACCEPT_LENGTH, 16);
    metrics_observe(&metrics, METRIC_ACCEPT_LENGTH, 17);
    says("# TYPE spillway_accept_length_tokens histogram\n");
    says("spillway_accept_length_tokens_bucket{le=\"1\"} 1\n");
    says("spillway_accept_length_tokens_bucket{le=\"2\"} 1\n");
    says("spillway_accept_length_tokens_bucket{le=\"3\"} 2\n");
    says("spillway_accept_length_tokens_bucket{le=\"16\"} 3\n");
    says("spillway_accept_length_tokens_bucket{le=\"+Inf\"} 4\n");
    says("spillway_accept_length_tokens_sum 37\nspillway_accept_length_tokens_count 4\n");
    metrics_observe(&metrics, METRIC_STEP_TIME, 0.0123);
    says("spillway_step_seconds_bucket{le=\"0.008\"} 0\nspillway_step_seconds_bucket{le=\"0.016\"} 1\n");
}

static void label_values_are_escaped(void **state) {
    (void)state;
    says("spillway_build_info{version=\"0.1.0\",backend=\"cpu\",kernel_path=\"\",model=\"a\\\"b\\\\c\\nd\",draft=\"\"} "
         "1\n");
}

static void labels_are_the_names_of_what_they_count(void **state) {
    (void)state;
    assert_int_equal(metrics_n_labels(METRIC_POOL_SLOTS), KV_GROUP_N);
    assert_string_equal(metrics_label(METRIC_POOL_SLOTS, KV_DRAFT_FULL), "draft_full");
    assert_int_equal(metrics_n_labels(METRIC_ERRORS), PROTO_N_CODES);
    assert_string_equal(metrics_label(METRIC_ERRORS, PROTO_QUOTA), "QUOTA");
    assert_string_equal(metrics_label(METRIC_CACHED_TOKENS, METRIC_TIER_DISK), "disk");
    assert_string_equal(metrics_label(METRIC_STEPS, METRIC_PART_CYCLE), "cycle");
    assert_string_equal(metrics_label(METRIC_LOOKUPS, METRIC_LOOKUP_MISS), "miss");
    assert_null(metrics_label(METRIC_QUEUED, 0));
    assert_int_equal(metrics_n_labels(METRIC_QUEUED), 1);
}

/* One line of the format: HELP, TYPE or `name{labels} number`. Copies the name. */
static void read_line(const char *line, size_t n, char name[128], const char **ret_type) {
    size_t n_name = 0, i;
    char *end;

    *ret_type = NULL;
    if (line[0] == '#') {
        const char *rest = line + 7;

        assert_true(strncmp(line, "# HELP ", 7) == 0 || strncmp(line, "# TYPE ", 7) == 0);
        while (rest[n_name] != ' ')
            n_name++;
        snprintf(name, 128, "%.*s", (int)n_name, rest);
        *ret_type = line[2] == 'T' ? rest + n_name + 1 : "help";
        return;
    }
    while (isalnum((unsigned char)line[n_name]) || line[n_name] == '_')
        n_name++;
    assert_true(n_name > strlen("spillway_"));
    snprintf(name, 128, "%.*s", (int)n_name, line);
    i = n_name;
    if (line[i] == '{') { /* up to the closing brace outside of quotes */
        bool quoted = false;

        for (i++; quoted || line[i] != '}'; i++) {
            assert_true(i < n);
            if (line[i] == '\\')
                i++;
            else if (line[i] == '"')
                quoted = !quoted;
        }
        i++;
    }
    assert_int_equal(line[i], ' ');
    assert_true(isdigit((unsigned char)line[i + 1]));
    (void)strtod(line + i + 1, &end);
    assert_ptr_equal(end, line + n);
}

/* Whether the sample belongs to the family: its name, or for histograms with a suffix. */
static bool belongs(const char *sample, const char *family, bool histogram) {
    size_t n = strlen(family);

    if (strncmp(sample, family, n) != 0)
        return false;
    return histogram ? strcmp(sample + n, "_bucket") == 0 || strcmp(sample + n, "_sum") == 0 ||
                           strcmp(sample + n, "_count") == 0
                     : sample[n] == '\0';
}

static void the_output_is_the_text_format_without_duplicates(void **state) {
    char family[128] = "", name[128];
    const char *text, *type;
    bool histogram = false;
    int n_families = 0, n_samples = 0;

    (void)state;
    metrics_observe(&metrics, METRIC_TTFT, 0.2);
    text = written();
    for (const char *line = text; *line;) {
        size_t n = strcspn(line, "\n");
        char again[160];

        assert_int_equal(line[n], '\n');
        read_line(line, n, name, &type);
        if (type && strcmp(type, "help") == 0) { /* a family begins, and never twice */
            snprintf(again, sizeof again, "# HELP %s ", name);
            assert_null(strstr(line + 1, again));
            snprintf(family, sizeof family, "%s", name);
            n_families++;
        } else if (type) {
            assert_string_equal(name, family);
            histogram = strncmp(type, "histogram\n", 10) == 0;
            assert_true(histogram || strncmp(type, "counter\n", 8) == 0 || strncmp(type, "gauge\n", 6) == 0);
            if (strncmp(type, "counter\n", 8) == 0) /* a counter's name says so */
                assert_string_equal(name + strlen(name) - 6, "_total");
        } else {
            size_t n_labelled = 0;
            char sample[512];

            assert_true(belongs(name, family, histogram));
            while (line[n_labelled] != ' ' || strcspn(line + n_labelled + 1, " ") < n - n_labelled - 1)
                n_labelled++; /* the last space stands before the number */
            snprintf(sample, sizeof sample, "\n%.*s ", (int)n_labelled, line);
            assert_null(strstr(line + 1, sample));
            n_samples++;
        }
        line += n + 1;
    }
    assert_int_equal(n_families, METRIC_N + METRIC_HISTOGRAM_N + 1);
    assert_true(n_samples > n_families);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, start, stop)

int main(void) {
    const struct CMUnitTest tests[] = {
        CASE(counters_and_gauges_come_out_under_their_label),
        CASE(histograms_sum_up_their_buckets),
        CASE(label_values_are_escaped),
        CASE(labels_are_the_names_of_what_they_count),
        CASE(the_output_is_the_text_format_without_duplicates),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
