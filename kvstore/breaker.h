/* breaker: whether a disk that makes trouble is still asked. Pure: who owns it reports what happened and when.
 *
 *     CLOSED --too much trouble in a window, or tripped--> OPEN --probe works--> HALF_OPEN --its operation works--> CLOSED
 *                                                           ^                       |
 *                                                           '-----it fails----------'
 */
#pragma once
#include <stdbool.h>
#include <stdint.h>

struct kv_breaker_options {
    uint32_t n_errors_max, n_late_max; /* in one window; one more opens it */
    uint64_t window_us;
    uint64_t probe_us; /* from opening to a probe, and from one that failed to the next */
};

struct kv_breaker {
    struct kv_breaker_options options;
    enum kv_breaker_state { KV_BREAKER_CLOSED, KV_BREAKER_OPEN, KV_BREAKER_HALF_OPEN } state;
    uint32_t n_errors, n_late;
    uint64_t window_end_us;
    uint64_t probe_at_us;
    bool is_trying; /* OPEN: a probe is out. HALF_OPEN: the one operation is */
    uint64_t n_opened;
};

enum kv_breaker_report { KV_BREAKER_WORKED, KV_BREAKER_FAILED, KV_BREAKER_LATE };

void kv_breaker_init(struct kv_breaker *breaker, const struct kv_breaker_options *options);

/* Whether an operation may start. If so, it is to be reported once with the ticket: what began before the breaker opened
 * says nothing about the time after it. */
bool kv_breaker_admits(struct kv_breaker *breaker, uint64_t *ret_ticket);
bool kv_breaker_is_ready(const struct kv_breaker *breaker); /* it would */
void kv_breaker_report(struct kv_breaker *breaker, uint64_t ticket, enum kv_breaker_report report, uint64_t now_us);

/* Whether to write and read a place that nobody uses. If so, it is to be reported once. */
bool kv_breaker_wants_probe(struct kv_breaker *breaker, uint64_t now_us);
void kv_breaker_report_probe(struct kv_breaker *breaker, bool has_worked, uint64_t now_us);

/* For trouble that is too much the first time: a buffer that the kernel does not give back. */
void kv_breaker_trip(struct kv_breaker *breaker, uint64_t now_us);
