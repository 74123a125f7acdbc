#include "memplan.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>

#include "config.h"
#include "format.h"
#include "model.h"
#include "residency.h"

enum {
    SLOTS_MAX = 1 << 28, /* of pages, and of restore points with their windows: sums stay inside an int */
    REGION_SPANS_MIN = STREAMER_REGION_SPANS_MIN,
    REGION_SPANS_MAX = 32,
};

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

/* States of running seqs, with the chunks that are open beside them. */
static uint64_t running_bytes(const struct memplan_model *m, int n_seqs) {
    return mul((uint64_t)n_seqs, add(mul(2, m->slot_bytes[KV_TARGET_STATE]), m->open_bytes));
}

/* Null pages, and what n_seqs running seqs need however short they are. */
static uint64_t fixed_bytes(const struct memplan_model *m, int prefill_chunk, int n_seqs) {
    uint64_t states = running_bytes(m, n_seqs);
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

/* What follows from the number of seqs and of restore points, and what these leave for pages of the full groups. */
static uint64_t divide_fixed(struct memplan *plan, uint64_t device_bytes) {
    const struct memplan_model *m = &plan->model;
    int chunk = plan->limits.prefill_chunk;

    plan->pages_per_seq_sliding = sliding_pages_per_seq(m, chunk);
    plan->pages_per_restore_point = window_pages(m);
    plan->n_slots[KV_TARGET_STATE] =
        m->slot_bytes[KV_TARGET_STATE] > 0 ? 2 * plan->max_seqs + plan->n_restore_points : 0;
    plan->n_slots[KV_DRAFT_SLIDING] = m->window > 0 ? 1 + plan->max_seqs * plan->pages_per_seq_sliding +
                                                          plan->n_restore_points * plan->pages_per_restore_point
                                                    : 0;
    return device_bytes - fixed_bytes(m, chunk, plan->max_seqs) -
           mul((uint64_t)plan->n_restore_points, restore_point_bytes(m));
}

static int slots_within(uint64_t n) {
    return n < SLOTS_MAX ? (int)n : SLOTS_MAX;
}

/* Every context fits the device. False: not one does. */
static bool divide_resident(struct memplan *plan, int asked) {
    const struct memplan_limits *l = &plan->limits;
    int n_pages;

    plan->max_seqs = seqs_that_fit(&plan->model, l, asked);
    if (plan->max_seqs == 0)
        return false;
    plan->n_restore_points = restore_points_that_fit(&plan->model, l, plan->max_seqs, asked);
    /* the null page is in fixed_bytes */
    n_pages = slots_within(1 + divide_fixed(plan, l->device_bytes) / full_page_bytes(&plan->model));
    plan->n_slots[KV_TARGET_FULL] = n_pages;
    plan->n_slots[KV_DRAFT_FULL] = plan->model.slot_bytes[KV_DRAFT_FULL] > 0 ? n_pages : 0;
    plan->max_context = l->max_context > 0 ? l->max_context : plan->model.max_positions;
    if (plan->max_context > (int64_t)(n_pages - 1) * PAGE_TOKENS)
        plan->max_context = (n_pages - 1) * PAGE_TOKENS;
    return true;
}

/* A thirty-second of the device, as far as that helps: with more in the air copies are no faster. */
static int region_spans_that_fit(const struct memplan_model *m, uint64_t device_bytes) {
    uint64_t span_bytes = mul(SPAN_TOKENS / PAGE_TOKENS, m->layer_bytes), n = device_bytes / 32 / span_bytes;

    return max_int(REGION_SPANS_MIN, (int)(n < REGION_SPANS_MAX ? n : REGION_SPANS_MAX) & ~1);
}

static uint64_t ring_bytes(const struct memplan *plan) {
    return mul((uint64_t)plan->region_spans * (SPAN_TOKENS / PAGE_TOKENS), plan->model.layer_bytes);
}

/* Pages of draft_full, which is not streamed: those of the longest context, if the target keeps what it cannot do without;
 * else half of the memory, so that the shorter ones are drafted. */
static uint64_t draft_pages_that_fit(const struct memplan_model *m, uint64_t free_bytes, uint64_t n_wanted, int n_min) {
    uint64_t target = m->slot_bytes[KV_TARGET_FULL], draft = m->slot_bytes[KV_DRAFT_FULL], most, half;

    if (draft == 0)
        return 0;
    most = (free_bytes - mul((uint64_t)n_min, target)) / draft;
    half = free_bytes / 2 / draft;
    if (n_wanted <= most)
        return n_wanted;
    return half < most ? half : most;
}

/* The fewest device pages of target_full for a context that was asked for: what streaming cannot do without, and what host
 * memory does not hold of it. */
static int pages_to_stream(const struct memplan *plan) {
    int n_min = residency_pages_min(plan->limits.prefill_chunk);
    int n_asked = (int)div_ceil((uint64_t)plan->limits.max_context, PAGE_TOKENS), n_stay = n_asked - plan->n_host_pages;

    return n_stay > 0 ? max_int(n_min, (int)div_ceil(8 * (uint64_t)n_stay, 7)) : n_min; /* an eighth is for others */
}

/* With a ring of region_spans. False: it does not fit beside what else is needed. */
static bool divide_with_ring(struct memplan *plan, int wanted) {
    const struct memplan_model *m = &plan->model;
    struct memplan_limits l = plan->limits;
    int n_needed = pages_to_stream(plan), n_pages;
    uint64_t n_wanted = div_ceil((uint64_t)wanted, PAGE_TOKENS), target = m->slot_bytes[KV_TARGET_FULL];
    uint64_t free_bytes, n_draft, n_most;

    if (ring_bytes(plan) >= l.device_bytes)
        return false;
    l.device_bytes -= ring_bytes(plan);
    plan->max_seqs = seqs_that_fit(m, &l, n_needed * PAGE_TOKENS);
    if (plan->max_seqs == 0)
        return false;
    plan->n_restore_points = restore_points_that_fit(m, &l, plan->max_seqs, n_needed * PAGE_TOKENS);
    free_bytes = divide_fixed(plan, l.device_bytes);
    n_most = free_bytes / target + (uint64_t)plan->n_host_pages;
    n_draft = draft_pages_that_fit(m, free_bytes, n_wanted < n_most ? n_wanted : n_most, n_needed);
    n_pages = slots_within((free_bytes - n_draft * m->slot_bytes[KV_DRAFT_FULL]) / target);
    plan->n_slots[KV_TARGET_FULL] = 1 + n_pages; /* the null pages are in fixed_bytes */
    if (m->slot_bytes[KV_DRAFT_FULL] > 0)
        plan->n_slots[KV_DRAFT_FULL] = 1 + slots_within(n_draft);
    n_most = (uint64_t)residency_of(n_pages, l.prefill_chunk).most + (uint64_t)plan->n_host_pages;
    plan->max_context = n_wanted <= n_most ? wanted : (int)n_most * PAGE_TOKENS;
    return plan->max_context >= l.max_context;
}

/* Longer contexts are streamed from host memory, through a ring: as large a one as helps, or as fits. False: that allows no
 * longer one than the device alone. */
static bool divide_streamed(struct memplan *plan, int wanted, int max_context_resident) {
    uint32_t n_host[KV_GROUP_N];

    if (plan->limits.host_bytes == 0 || plan->model.layer_bytes == 0)
        return false;
    memplan_host(&plan->model, plan->limits.host_bytes, FORMAT_ALIGN_MIN, n_host);
    plan->n_host_pages = slots_within(n_host[KV_TARGET_FULL]);
    plan->region_spans = region_spans_that_fit(&plan->model, plan->limits.device_bytes);
    while (plan->region_spans > REGION_SPANS_MIN && !divide_with_ring(plan, wanted))
        plan->region_spans -= 2;
    return divide_with_ring(plan, wanted) && plan->max_context > max_context_resident;
}

static int refuse(const struct memplan_model *m, const struct memplan_limits *l, int n_tokens, struct report *report) {
    struct memplan streamed = {.model = *m, .limits = *l};
    uint64_t fixed = fixed_bytes(m, l->prefill_chunk, 1), largest = 0;
    char with_host[64] = "", open_words[64] = "";

    streamed.limits.max_context = 0;
    if (divide_streamed(&streamed, m->max_positions, 0))
        snprintf(with_host, sizeof with_host, " (with kv.host_bytes %d or more)", streamed.max_context);
    if (m->open_bytes > 0)
        snprintf(open_words, sizeof open_words, ", an open chunk of %" PRIu64, m->open_bytes);
    if (fixed < l->device_bytes)
        largest = (l->device_bytes - fixed) / full_page_bytes(m) * PAGE_TOKENS;
    return report_error(
        report, -EINVAL,
        "kv.device_bytes = %" PRIu64 ": one sequence of %d tokens needs %" PRIu64 ": 2 states of %" PRIu64 "%s"
        ", %d draft pages of %" PRIu64 ", %" PRIu64 " pages of %" PRIu64 " (null pages included). The "
        "largest request that fits has %" PRIu64 " tokens%s: raise kv.device_bytes%s",
        l->device_bytes, n_tokens, needed_bytes(m, l, 1, n_tokens), m->slot_bytes[KV_TARGET_STATE], open_words,
        m->window > 0 ? 1 + sliding_pages_per_seq(m, l->prefill_chunk) : 0, m->slot_bytes[KV_DRAFT_SLIDING],
        1 + div_ceil((uint64_t)n_tokens, PAGE_TOKENS), full_page_bytes(m), largest, with_host,
        l->max_context > 0 && largest > 0 ? " or lower limits.max_context" : "");
}

int memplan_make(const struct memplan_model *model, const struct memplan_limits *limits, struct memplan *ret_plan,
                 struct report *report) {
    struct memplan resident = {.model = *model, .limits = *limits}, streamed = resident, *plan = &resident;
    int asked = limits->max_context > 0 ? limits->max_context : min_int(model->max_positions, MEMPLAN_CONTEXT_MIN);
    int wanted = limits->max_context > 0 ? limits->max_context : model->max_positions;
    bool fits;

    if (asked > model->max_positions)
        return report_error(report, -EINVAL, "limits.max_context = %d: the model was made for %d tokens at most", asked,
                            model->max_positions);
    fits = divide_resident(&resident, asked);
    if ((!fits || resident.max_context < wanted) && divide_streamed(&streamed, wanted, fits ? resident.max_context : 0))
        plan = &streamed;
    else if (!fits)
        return refuse(model, limits, asked, report);
    if (plan->max_context < wanted)
        add_notice(plan, "context limited to %d of the model's %d tokens: kv.device_bytes%s no more", plan->max_context,
                   model->max_positions, plan == &streamed ? " and kv.host_bytes hold" : " holds");
    if (plan->max_seqs < limits->max_seqs)
        add_notice(plan,
                   "sched.max_seqs lowered from %d to %d: states would take more than kv.device_bytes has for them",
                   limits->max_seqs, plan->max_seqs);
    *ret_plan = *plan;
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

static uint64_t open_bytes(const struct memplan *plan) {
    return mul((uint64_t)plan->max_seqs, plan->model.open_bytes);
}

uint64_t memplan_step_bytes(const struct memplan *plan) {
    int n_pages = (int)div_ceil((uint64_t)plan->max_context, PAGE_TOKENS), n_device = plan->n_slots[KV_TARGET_FULL] - 1;

    if (n_pages <= n_device)
        return 0;
    return (uint64_t)(n_pages - residency_of(n_device, plan->limits.prefill_chunk).most) *
           plan->model.slot_bytes[KV_TARGET_FULL];
}

uint64_t memplan_token_bytes(const struct memplan *plan) {
    return plan->model.slot_bytes[KV_TARGET_FULL] / PAGE_TOKENS;
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
    used += add(ring_bytes(plan), open_bytes(plan));
    if (open_bytes(plan) > 0) {
        format_bytes(open_bytes(plan), words);
        add_line(out, "%-37s %12s  rows since the last multiple of %d, of each sequence", "open chunks", words,
                 PAGE_TOKENS);
    }
    if (plan->region_spans > 0) {
        format_bytes(ring_bytes(plan), words);
        add_line(out, "%-37s %12s  %d tokens of one layer", "ring of streamed pages", words,
                 plan->region_spans * SPAN_TOKENS);
    }
    format_bytes(used, words);
    add_line(out, "%-37s %12s  of kv.device_bytes = %" PRIu64, "together", words, plan->limits.device_bytes);
    add_beside(out, "weights, beside that", plan->model.weight_bytes);
    add_beside(out, "work buffers, beside that", plan->model.buffer_bytes);
    add_line(out, "%-37s %12d  sequences at a time", "max_seqs", plan->max_seqs);
    add_line(out, "%-37s %12d  tokens of one sequence", "max_context", plan->max_context);
    if (plan->region_spans > 0) {
        format_bytes(memplan_step_bytes(plan), words);
        add_line(out,
                 "%-37s %12s  from host memory in each step of the longest: %" PRIu64 " tokens of %" PRIu64
                 " bytes; none up to %" PRId64 " tokens",
                 "streamed", words, memplan_step_bytes(plan) / memplan_token_bytes(plan), memplan_token_bytes(plan),
                 (int64_t)(plan->n_slots[KV_TARGET_FULL] - 1) * PAGE_TOKENS);
    }
    if (plan->notice[0])
        add_line(out, "notice: %s", plan->notice);
}

static void add_tier(struct text *out, const char *key, uint64_t bytes, uint64_t n_pages, uint64_t n_states) {
    char words[16];

    format_bytes(bytes, words);
    add_line(out, "%-37s %12s  %" PRIu64 " tokens, %" PRIu64 " restore points", key, words, n_pages * PAGE_TOKENS,
             n_states);
}

void memplan_print_below(const struct memplan_model *m, uint64_t host_bytes, uint64_t disk_bytes, struct text *out) {
    uint64_t page_bytes = (uint64_t)format_slot_bytes(m->slot_bytes[KV_TARGET_FULL], FORMAT_ALIGN_MIN) +
                          format_slot_bytes(m->slot_bytes[KV_DRAFT_FULL], FORMAT_ALIGN_MIN);
    uint64_t state_bytes = format_slot_bytes(m->slot_bytes[KV_TARGET_STATE], FORMAT_ALIGN_MIN);
    uint32_t n_slots[KV_GROUP_N];

    memplan_host(m, host_bytes, FORMAT_ALIGN_MIN, n_slots);
    if (host_bytes > 0)
        add_tier(out, "host memory, kv.host_bytes", host_bytes, n_slots[KV_TARGET_FULL], n_slots[KV_TARGET_STATE]);
    if (disk_bytes > 0)
        add_tier(out, "disk, kv.disk_bytes", disk_bytes, disk_bytes / 100 * MEMPLAN_DISK_PAGES_SHARE / page_bytes,
                 state_bytes > 0 ? disk_bytes / 100 * MEMPLAN_DISK_STATES_SHARE / state_bytes : 0);
}

/* ---- from what others have ---------------------------------------------------------------------------------------- */

static uint64_t layer_bytes_of(const struct kv_geometry *g) {
    return g->n_layers > 0 ? g->page_bytes / (size_t)g->n_layers : 0;
}

struct memplan_model memplan_model_of(const struct model_info *info) {
    struct memplan_model model = {.window = info->groups[KV_DRAFT_SLIDING].window,
                                  .layer_bytes = layer_bytes_of(&info->groups[KV_TARGET_FULL]),
                                  .max_positions = info->target.max_positions,
                                  .weight_bytes = info->weight_bytes + info->draft_weight_bytes,
                                  .buffer_bytes = info->buffer_bytes};

    for (int g = 0; g < KV_GROUP_N; g++)
        model.slot_bytes[g] = info->groups[g].page_bytes;
    model.slot_bytes[KV_TARGET_STATE] = info->state.n_layers > 0 ? info->state.slot_bytes : 0;
    model.open_bytes = info->state.n_layers > 0 ? info->state.open_bytes : 0;
    return model;
}

struct memplan_limits memplan_limits_of(const struct config *config) {
    return (struct memplan_limits){.device_bytes = config->kv.device_bytes,
                                   .host_bytes = config->kv.host_bytes,
                                   .max_seqs = config->sched.max_seqs,
                                   .prefill_chunk = config->sched.prefill_chunk,
                                   .restore_points = config->kv.restore_points,
                                   .max_context = config->limits.max_context};
}
