#include "memplan.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>

#include "config.h"
#include "format.h"
#include "model.h"

enum { SLOTS_MAX = 1 << 28 }; /* of pages, and of restore points with their windows: sums stay inside an int */

/* Sums that exceed 64 bits fit nowhere, like the largest number. */
static uint64_t mul(uint64_t a, uint64_t b) {
    uint64_t product;

    return checked_mul(a, b, &product) ? product : UINT64_MAX;
}

static uint64_t add(uint64_t a, uint64_t b) {
    uint64_t sum;

    return checked_add(a, b, &sum) ? sum : UINT64_MAX;
}

/* ---- what things need --------------------------------------------------------------------------------------------- */

/* The pages that hold the `window` tokens before a boundary. */
static int window_pages(const struct memplan_model *m) {
    return m->window > 0 ? (int)div_ceil((uint64_t)m->window, PAGE_TOKENS) + 1 : 0;
}

/* ... while one chunk is written behind them, and a page more, as a cycle may begin one. */
static int sliding_pages_per_seq(const struct memplan_model *m, int prefill_chunk) {
    return m->window > 0 ? window_pages(m) + (int)div_ceil((uint64_t)prefill_chunk, PAGE_TOKENS) + 1 : 0;
}

/* target_full and draft_full pages cover the same tokens. */
static uint64_t full_page_bytes(const struct memplan_model *m) {
    return add(m->slot_bytes[KV_TARGET_FULL], m->slot_bytes[KV_DRAFT_FULL]);
}

/* Null pages, and what n_seqs running seqs need however short they are. */
static uint64_t fixed_bytes(const struct memplan_model *m, int prefill_chunk, int n_seqs) {
    uint64_t states = mul(2 * (uint64_t)n_seqs, m->slot_bytes[KV_TARGET_STATE]);
    uint64_t sliding = 1 + (uint64_t)n_seqs * (uint64_t)sliding_pages_per_seq(m, prefill_chunk);

    return add(add(states, mul(sliding, m->slot_bytes[KV_DRAFT_SLIDING])), full_page_bytes(m));
}

/* ... and one of them with so many tokens. */
static uint64_t needed_bytes(const struct memplan_model *m, const struct memplan_limits *l, int n_seqs, int n_tokens) {
    return add(fixed_bytes(m, l->prefill_chunk, n_seqs),
               mul(div_ceil((uint64_t)n_tokens, PAGE_TOKENS), full_page_bytes(m)));
}

static uint64_t restore_point_bytes(const struct memplan_model *m) {
    return add(m->slot_bytes[KV_TARGET_STATE], mul((uint64_t)window_pages(m), m->slot_bytes[KV_DRAFT_SLIDING]));
}

/* ---- dividing ----------------------------------------------------------------------------------------------------- */

/* The most seqs whose states take a quarter of the memory at most, beside one seq of n_tokens. 0: not even one fits. */
static int seqs_that_fit(const struct memplan_model *m, const struct memplan_limits *l, int n_tokens) {
    int n = l->max_seqs;

    while (n > 1 && mul(8 * (uint64_t)n, m->slot_bytes[KV_TARGET_STATE]) > l->device_bytes)
        n--;
    while (n > 0 && needed_bytes(m, l, n, n_tokens) > l->device_bytes)
        n--;
    return n;
}

/* A quarter of what running seqs leave; more, up to a half, if that is not two for each. What one seq of n_tokens needs
 * comes first. */
static int restore_points_that_fit(const struct memplan_model *m, const struct memplan_limits *l, int n_seqs,
                                   int n_tokens) {
    uint64_t each = restore_point_bytes(m), most = SLOTS_MAX / (uint64_t)max_int(window_pages(m), 1);
    uint64_t free_bytes, quarter, half, n;

    if (l->restore_points == 0 || m->slot_bytes[KV_TARGET_STATE] == 0)
        return 0;
    free_bytes = l->device_bytes - fixed_bytes(m, l->prefill_chunk, n_seqs);
    quarter = free_bytes / 4 / each;
    half = free_bytes / 2 / each;
    n = 2 * (uint64_t)n_seqs;
    n = n < half ? n : half;
    n = n > quarter ? n : quarter;
    free_bytes = l->device_bytes - needed_bytes(m, l, n_seqs, n_tokens);
    n = n < free_bytes / each ? n : free_bytes / each;
    return (int)(n < most ? n : most);
}

static int refuse(const struct memplan_model *m, const struct memplan_limits *l, int n_tokens, struct report *report) {
    uint64_t fixed = fixed_bytes(m, l->prefill_chunk, 1), largest = 0;

    if (fixed < l->device_bytes)
        largest = (l->device_bytes - fixed) / full_page_bytes(m) * PAGE_TOKENS;
    return report_error(
        report, -EINVAL,
        "kv.device_bytes = %" PRIu64 ": one sequence of %d tokens needs %" PRIu64 ": 2 states of %" PRIu64
        ", %d draft pages of %" PRIu64 ", %" PRIu64 " pages of %" PRIu64 " (null pages included). The "
        "largest request that fits has %" PRIu64 " tokens: raise kv.device_bytes%s",
        l->device_bytes, n_tokens, needed_bytes(m, l, 1, n_tokens), m->slot_bytes[KV_TARGET_STATE],
        m->window > 0 ? 1 + sliding_pages_per_seq(m, l->prefill_chunk) : 0, m->slot_bytes[KV_DRAFT_SLIDING],
        1 + div_ceil((uint64_t)n_tokens, PAGE_TOKENS), full_page_bytes(m), largest,
        l->max_context > 0 && largest > 0 ? " or lower limits.max_context" : "");
}

__attribute__((format(printf, 2, 3))) static void add_notice(struct memplan *plan, const char *format, ...) {
    size_t n = strlen(plan->notice);
    va_list args;

    if (n > 0 && n + 2 < sizeof plan->notice) {
        memcpy(plan->notice + n, "; ", 3);
        n += 2;
    }
    va_start(args, format);
    vsnprintf(plan->notice + n, sizeof plan->notice - n, format, args);
    va_end(args);
}

int memplan_make(const struct memplan_model *model, const struct memplan_limits *limits, struct memplan *ret_plan,
                 struct report *report) {
    struct memplan plan = {.model = *model, .limits = *limits};
    int asked = limits->max_context > 0 ? limits->max_context : min_int(model->max_positions, MEMPLAN_CONTEXT_MIN);
    uint64_t n_pages, full;

    if (asked > model->max_positions)
        return report_error(report, -EINVAL, "limits.max_context = %d: the model was made for %d tokens at most", asked,
                            model->max_positions);
    plan.max_seqs = seqs_that_fit(model, limits, asked);
    if (plan.max_seqs == 0)
        return refuse(model, limits, asked, report);
    plan.pages_per_seq_sliding = sliding_pages_per_seq(model, limits->prefill_chunk);
    plan.pages_per_restore_point = window_pages(model);
    plan.n_restore_points = restore_points_that_fit(model, limits, plan.max_seqs, asked);

    full = limits->device_bytes - fixed_bytes(model, limits->prefill_chunk, plan.max_seqs) -
           mul((uint64_t)plan.n_restore_points, restore_point_bytes(model));
    n_pages = 1 + full / full_page_bytes(model); /* the null page is in fixed_bytes */
    if (n_pages > SLOTS_MAX)
        n_pages = SLOTS_MAX;
    plan.n_slots[KV_TARGET_FULL] = (int)n_pages;
    plan.n_slots[KV_DRAFT_FULL] = model->slot_bytes[KV_DRAFT_FULL] > 0 ? (int)n_pages : 0;
    plan.n_slots[KV_TARGET_STATE] =
        model->slot_bytes[KV_TARGET_STATE] > 0 ? 2 * plan.max_seqs + plan.n_restore_points : 0;
    plan.n_slots[KV_DRAFT_SLIDING] = model->window > 0 ? 1 + plan.max_seqs * plan.pages_per_seq_sliding +
                                                             plan.n_restore_points * plan.pages_per_restore_point
                                                       : 0;
    plan.max_context = limits->max_context > 0 ? limits->max_context : model->max_positions;
    if (plan.max_context > (int64_t)(n_pages - 1) * PAGE_TOKENS) {
        plan.max_context = (int)(n_pages - 1) * PAGE_TOKENS;
        add_notice(&plan, "context limited to %d of the model's %d tokens: kv.device_bytes holds no more",
                   plan.max_context, model->max_positions);
    }
    if (plan.max_seqs < limits->max_seqs)
        add_notice(&plan,
                   "sched.max_seqs lowered from %d to %d: states would take more than kv.device_bytes has for them",
                   limits->max_seqs, plan.max_seqs);
    *ret_plan = plan;
    return 0;
}

/* slot_bytes: 0: there is no such group. */
static uint32_t slots_of(uint64_t bytes, uint64_t slot_bytes) {
    uint64_t n = slot_bytes > 0 ? bytes / slot_bytes : 0;

    return n < SLOTS_MAX ? (uint32_t)n : SLOTS_MAX;
}

void memplan_host(const struct memplan_model *m, uint64_t host_bytes, uint32_t alignment,
                  uint32_t ret_slots[KV_GROUP_N]) {
    uint64_t sliding = m->slot_bytes[KV_DRAFT_SLIDING] > 0 ? host_bytes / 20 : 0, states = host_bytes / 4;
    uint32_t slot_bytes[KV_GROUP_N];

    for (int g = 0; g < KV_GROUP_N; g++)
        slot_bytes[g] = format_slot_bytes(m->slot_bytes[g], alignment);
    ret_slots[KV_DRAFT_SLIDING] = slots_of(sliding, slot_bytes[KV_DRAFT_SLIDING]);
    ret_slots[KV_TARGET_STATE] = slots_of(states, slot_bytes[KV_TARGET_STATE]);
    ret_slots[KV_TARGET_FULL] =
        slots_of(host_bytes - states - sliding, (uint64_t)slot_bytes[KV_TARGET_FULL] + slot_bytes[KV_DRAFT_FULL]);
    ret_slots[KV_DRAFT_FULL] = m->slot_bytes[KV_DRAFT_FULL] > 0 ? ret_slots[KV_TARGET_FULL] : 0;
}

uint64_t memplan_bytes(const struct memplan *plan, enum kv_group group) {
    return (uint64_t)plan->n_slots[group] * plan->model.slot_bytes[group];
}

/* ---- printing ----------------------------------------------------------------------------------------------------- */

__attribute__((format(printf, 2, 3))) static void add_line(struct text *out, const char *format, ...) {
    char line[320];
    va_list args;
    int n;

    va_start(args, format);
    n = vsnprintf(line, sizeof line, format, args);
    va_end(args);
    text_add(out, line, (size_t)min_int(max_int(n, 0), sizeof line - 1));
    text_add_string(out, "\n");
}

static void format_bytes(uint64_t bytes, char ret_words[16]) {
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    double size = (double)bytes;
    int unit = 0;

    while (size >= 1024 && unit < 4) {
        size /= 1024;
        unit++;
    }
    snprintf(ret_words, 16, unit == 0 ? "%.0f %s" : "%.1f %s", size, units[unit]);
}

static void add_group(struct text *out, const struct memplan *plan, enum kv_group group) {
    char each[16], all[16], holds[96] = "";

    if (plan->model.slot_bytes[group] == 0) {
        add_line(out, "%-14s         none", kv_group_name(group));
        return;
    }
    format_bytes(plan->model.slot_bytes[group], each);
    format_bytes(memplan_bytes(plan, group), all);
    if (group == KV_TARGET_STATE)
        snprintf(holds, sizeof holds, "%d live, %d rolling, %d restore points", plan->max_seqs, plan->max_seqs,
                 plan->n_restore_points);
    else if (group == KV_DRAFT_SLIDING)
        snprintf(holds, sizeof holds, "%d for each sequence, %d for each restore point", plan->pages_per_seq_sliding,
                 plan->pages_per_restore_point);
    else
        snprintf(holds, sizeof holds, "%" PRId64 " tokens", (int64_t)(plan->n_slots[group] - 1) * PAGE_TOKENS);
    add_line(out, "%-14s %12s %9d %12s  %s", kv_group_name(group), each, plan->n_slots[group], all, holds);
}

static void add_beside(struct text *out, const char *name, uint64_t bytes) {
    char words[16];

    format_bytes(bytes, words);
    add_line(out, "%-37s %12s", name, bytes > 0 ? words : "after load");
}

void memplan_print(const struct memplan *plan, struct text *out) {
    uint64_t used = 0;
    char words[16];

    add_line(out, "%-14s %12s %9s %12s  %s", "group", "slot", "slots", "bytes", "holds");
    for (int g = 0; g < KV_GROUP_N; g++) {
        add_group(out, plan, (enum kv_group)g);
        used += memplan_bytes(plan, (enum kv_group)g);
    }
    format_bytes(used, words);
    add_line(out, "%-37s %12s  of kv.device_bytes = %" PRIu64, "together", words, plan->limits.device_bytes);
    add_beside(out, "weights, beside that", plan->model.weight_bytes);
    add_beside(out, "work buffers, beside that", plan->model.buffer_bytes);
    add_line(out, "%-37s %12d  sequences at a time", "max_seqs", plan->max_seqs);
    add_line(out, "%-37s %12d  tokens of one sequence", "max_context", plan->max_context);
    if (plan->notice[0])
        add_line(out, "notice: %s", plan->notice);
}

/* ---- from what others have ---------------------------------------------------------------------------------------- */

struct memplan_model memplan_model_of(const struct model_info *info) {
    struct memplan_model model = {.window = info->groups[KV_DRAFT_SLIDING].window,
                                  .max_positions = info->target.max_positions,
                                  .weight_bytes = info->weight_bytes + info->draft_weight_bytes,
                                  .buffer_bytes = info->buffer_bytes};

    for (int g = 0; g < KV_GROUP_N; g++)
        model.slot_bytes[g] = info->groups[g].page_bytes;
    model.slot_bytes[KV_TARGET_STATE] = info->state.n_layers > 0 ? info->state.slot_bytes : 0;
    return model;
}

struct memplan_limits memplan_limits_of(const struct config *config) {
    return (struct memplan_limits){.device_bytes = config->kv.device_bytes,
                                   .max_seqs = config->sched.max_seqs,
                                   .prefill_chunk = config->sched.prefill_chunk,
                                   .restore_points = config->kv.restore_points,
                                   .max_context = config->limits.max_context};
}
