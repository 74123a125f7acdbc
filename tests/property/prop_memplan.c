/* The memory plan over random models and limits: what it grants adds up, what it refuses cannot be granted. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "format.h"
#include "memplan.h"
#include "residency.h"

#define CHECK(claim)                                                                                                   \
    do {                                                                                                               \
        if (!(claim)) {                                                                                                \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #claim);                                        \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

static uint64_t next_random(uint64_t *state) { /* splitmix64, S. Vigna's public domain constants */
    uint64_t z = *state += 0x9e3779b97f4a7c15u;

    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static int below(uint64_t *random, int n) {
    return (int)(next_random(random) % (uint64_t)n);
}

/* Between 1 and 2^bits, small and large ones equally often. */
static uint64_t some_bytes(uint64_t *random, int bits) {
    return 1 + (next_random(random) >> (64 - 1 - below(random, bits)));
}

static struct memplan_model some_model(uint64_t *random) {
    struct memplan_model m = {.max_positions = 1 + below(random, 1 << (8 + below(random, 12)))};

    m.slot_bytes[KV_TARGET_FULL] = some_bytes(random, 24);
    m.layer_bytes = m.slot_bytes[KV_TARGET_FULL] / (1 + (uint64_t)below(random, 16));
    if (below(random, 8) > 0) {
        m.slot_bytes[KV_TARGET_STATE] = some_bytes(random, 28);
        if (below(random, 2) > 0)
            m.open_bytes = some_bytes(random, 28);
    }
    if (below(random, 3) > 0)
        m.slot_bytes[KV_DRAFT_FULL] = some_bytes(random, 22);
    if (below(random, 3) > 0) {
        m.slot_bytes[KV_DRAFT_SLIDING] = some_bytes(random, 22);
        m.window = 1 + below(random, 4096);
    }
    return m;
}

static struct memplan_limits some_limits(uint64_t *random, const struct memplan_model *m) {
    return (struct memplan_limits){.device_bytes = some_bytes(random, 42),
                                   .host_bytes = below(random, 2) ? 0 : some_bytes(random, 42),
                                   .max_seqs = 1 + below(random, 1 << below(random, 11)),
                                   .prefill_chunk = 64 * (1 + below(random, 64)),
                                   .restore_points = below(random, 4) == 0 ? 0 : 1 + below(random, 64),
                                   .max_context = below(random, 2) ? 0 : 1 + below(random, m->max_positions)};
}

/* The longest context lies on the device and in host memory together, and what a streamed seq needs on the device is there. */
static void check_streamed(const struct memplan *p) {
    struct residency residency = residency_of(p->n_slots[KV_TARGET_FULL] - 1, p->limits.prefill_chunk);
    uint32_t n_host[KV_GROUP_N];

    memplan_host(&p->model, p->limits.host_bytes, FORMAT_ALIGN_MIN, n_host);
    CHECK(p->limits.host_bytes > 0 && p->n_host_pages == (int)n_host[KV_TARGET_FULL]);
    CHECK(residency.head >= 0 && p->region_spans % 2 == 0);
    CHECK(((int64_t)residency.most + p->n_host_pages) * PAGE_TOKENS >= p->max_context);
    CHECK((memplan_step_bytes(p) > 0) == ((int64_t)(p->n_slots[KV_TARGET_FULL] - 1) * PAGE_TOKENS < p->max_context));
}

static void check_plan(const struct memplan *p) {
    const struct memplan_model *m = &p->model;
    const struct memplan_limits *l = &p->limits;
    uint64_t total = 0;

    for (int g = 0; g < KV_GROUP_N; g++) {
        CHECK((p->n_slots[g] > 0) == (m->slot_bytes[g] > 0));
        total += memplan_bytes(p, (enum kv_group)g);
    }
    total += (uint64_t)p->max_seqs * m->open_bytes;
    total += (uint64_t)p->region_spans * (SPAN_TOKENS / PAGE_TOKENS) * m->layer_bytes;
    CHECK(total <= l->device_bytes);
    CHECK(p->max_seqs >= 1 && p->max_seqs <= l->max_seqs);
    CHECK(p->max_context >= 1 && p->max_context <= m->max_positions);
    CHECK(l->max_context == 0 || p->max_context == l->max_context);
    if (p->region_spans > 0) {
        check_streamed(p);
    } else {
        CHECK((int64_t)(p->n_slots[KV_TARGET_FULL] - 1) * PAGE_TOKENS >= p->max_context);
        CHECK(m->slot_bytes[KV_DRAFT_FULL] == 0 || p->n_slots[KV_DRAFT_FULL] == p->n_slots[KV_TARGET_FULL]);
        CHECK(memplan_step_bytes(p) == 0);
    }
    CHECK(p->n_restore_points >= 0 && (l->restore_points > 0 || p->n_restore_points == 0));
    if (m->slot_bytes[KV_TARGET_STATE] > 0) {
        uint64_t states = 2 * (uint64_t)p->max_seqs;

        CHECK(p->n_slots[KV_TARGET_STATE] == (int)states + p->n_restore_points);
        CHECK(p->max_seqs == 1 || 4 * states * m->slot_bytes[KV_TARGET_STATE] <= l->device_bytes);
    }
    if (m->window > 0) {
        CHECK((p->pages_per_restore_point - 1) * PAGE_TOKENS >= m->window);
        CHECK((p->pages_per_seq_sliding - 2) * PAGE_TOKENS >= m->window + l->prefill_chunk);
        CHECK(p->n_slots[KV_DRAFT_SLIDING] ==
              1 + p->max_seqs * p->pages_per_seq_sliding + p->n_restore_points * p->pages_per_restore_point);
    }
    CHECK((p->notice[0] != '\0') ==
          (p->max_seqs < l->max_seqs || (l->max_context == 0 && p->max_context < m->max_positions)));
}

/* Whether one seq alone, without restore points, fits: summed up the long way. */
static bool can_fit_the_device(const struct memplan_model *m, const struct memplan_limits *l) {
    int n_tokens = l->max_context > 0 ? l->max_context : min_int(m->max_positions, MEMPLAN_CONTEXT_MIN);
    uint64_t sum = 2 * m->slot_bytes[KV_TARGET_STATE] + m->open_bytes;

    for (int token = -PAGE_TOKENS; token < n_tokens; token += PAGE_TOKENS) /* the null page first */
        sum += m->slot_bytes[KV_TARGET_FULL] + m->slot_bytes[KV_DRAFT_FULL];
    if (m->window > 0)
        for (int token = -3 * PAGE_TOKENS; token < m->window + l->prefill_chunk; token += PAGE_TOKENS)
            sum += m->slot_bytes[KV_DRAFT_SLIDING];
    return sum <= l->device_bytes;
}

int main(int argc, char **argv) {
    uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 10) : (uint64_t)time(NULL), random = seed;
    int n_granted = 0, n_streamed = 0, n_refused = 0;

    printf("seed %llu\n", (unsigned long long)seed);
    for (int i = 0; i < 200000; i++) {
        struct memplan_model m = some_model(&random);
        struct memplan_limits l = some_limits(&random, &m);
        struct report report = {""};
        struct memplan plan;

        if (memplan_make(&m, &l, &plan, &report) == 0) {
            check_plan(&plan);
            CHECK(plan.region_spans > 0 || can_fit_the_device(&m, &l));
            l.device_bytes += some_bytes(&random, 42); /* more memory allows at least as much */
            CHECK(memplan_make(&m, &l, &plan, &report) == 0);
            check_plan(&plan);
            n_granted++;
            n_streamed += plan.region_spans > 0;
        } else {
            CHECK(report.line[0] && !can_fit_the_device(&m, &l));
            n_refused++;
        }
    }
    printf("%d granted, %d of them with streamed contexts, %d refused\n", n_granted, n_streamed, n_refused);
    return n_granted == 0 || n_streamed == 0 || n_refused == 0;
}
