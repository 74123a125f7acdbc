#include "breaker.h"

#include <assert.h>

void kv_breaker_init(struct kv_breaker *breaker, const struct kv_breaker_options *options) {
    *breaker = (struct kv_breaker){.options = *options};
}

void kv_breaker_trip(struct kv_breaker *breaker, uint64_t now_us) {
    if (breaker->state == KV_BREAKER_OPEN)
        return;
    breaker->state = KV_BREAKER_OPEN;
    breaker->n_opened++;
    breaker->is_trying = false;
    breaker->probe_at_us = now_us + breaker->options.probe_us;
}

static void set_closed(struct kv_breaker *breaker) {
    breaker->state = KV_BREAKER_CLOSED;
    breaker->is_trying = false;
    breaker->n_errors = breaker->n_late = 0;
    breaker->window_end_us = 0;
}

static void count_trouble(struct kv_breaker *breaker, enum kv_breaker_report report, uint64_t now_us) {
    const struct kv_breaker_options *options = &breaker->options;

    if (now_us >= breaker->window_end_us) { /* a window begins with the first trouble after the last one */
        breaker->n_errors = breaker->n_late = 0;
        breaker->window_end_us = now_us + options->window_us;
    }
    breaker->n_errors += report == KV_BREAKER_FAILED;
    breaker->n_late += report == KV_BREAKER_LATE;
    if (breaker->n_errors > options->n_errors_max || breaker->n_late > options->n_late_max)
        kv_breaker_trip(breaker, now_us);
}

bool kv_breaker_is_ready(const struct kv_breaker *breaker) {
    return breaker->state != KV_BREAKER_OPEN && !breaker->is_trying;
}

bool kv_breaker_admits(struct kv_breaker *breaker, uint64_t *ret_ticket) {
    if (!kv_breaker_is_ready(breaker))
        return false;
    breaker->is_trying = breaker->state == KV_BREAKER_HALF_OPEN;
    *ret_ticket = breaker->n_opened;
    return true;
}

void kv_breaker_report(struct kv_breaker *breaker, uint64_t ticket, enum kv_breaker_report report, uint64_t now_us) {
    if (ticket != breaker->n_opened || breaker->state == KV_BREAKER_OPEN)
        return;
    if (breaker->state == KV_BREAKER_HALF_OPEN && report == KV_BREAKER_WORKED)
        set_closed(breaker);
    else if (breaker->state == KV_BREAKER_HALF_OPEN)
        kv_breaker_trip(breaker, now_us);
    else if (report != KV_BREAKER_WORKED)
        count_trouble(breaker, report, now_us);
}

bool kv_breaker_wants_probe(struct kv_breaker *breaker, uint64_t now_us) {
    if (breaker->state != KV_BREAKER_OPEN || breaker->is_trying || now_us < breaker->probe_at_us)
        return false;
    breaker->is_trying = true;
    return true;
}

void kv_breaker_report_probe(struct kv_breaker *breaker, bool has_worked, uint64_t now_us) {
    assert(breaker->state == KV_BREAKER_OPEN && breaker->is_trying);
    breaker->is_trying = false;
    if (has_worked)
        breaker->state = KV_BREAKER_HALF_OPEN;
    else
        breaker->probe_at_us = now_us + breaker->options.probe_us;
}
