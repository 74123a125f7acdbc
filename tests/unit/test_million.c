/* A million pages: what the index and the catalog keep for each, how many of them one eviction looks at, and what finding one
 * and taking note of one at the start cost. Memory and numbers are exact; times are ten times what is asked for, so that a
 * loaded machine does not fail them. The linker sends the store's calls of malloc here (--wrap in meson.build). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base.h"
#include "catalog.h"
#include "format.h"
#include "index.h"
#include "segment.h"

enum {
    N = 1000000,
    CHAIN = 500, /* pages of a chain; the last one has a restore point */
    N_STATES = N / CHAIN,
    N_LOOKUPS = 200000,
    INDEX_BYTES_MAX = 512,   /* for each page: its tokens are half of it */
    CATALOG_BYTES_MAX = 128, /* for each slot of the disk, with its place in the segments */
    MOVED_MAX = 42,          /* candidates that one eviction puts elsewhere: two ways down a heap of a million */
    N_EVICTIONS = 16,
    SLACK = 10, /* of a loaded machine */
};
static const double LOOKUP_P99_S = 50e-6, NOTE_S = 5e-6;

/* The linker chose these names. NOLINTBEGIN(bugprone-reserved-identifier) */
void *__real_malloc(size_t bytes);
void *__real_calloc(size_t n, size_t bytes);
void *__wrap_malloc(size_t bytes);
void *__wrap_calloc(size_t n, size_t bytes);
/* NOLINTEND(bugprone-reserved-identifier) */

static uint64_t n_bytes;

void *__wrap_malloc(size_t bytes) {
    n_bytes += bytes;
    return __real_malloc(bytes);
}

void *__wrap_calloc(size_t n, size_t bytes) {
    n_bytes += n * bytes;
    return __real_calloc(n, bytes);
}

static double now_s(void) {
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* As good as a hash: what the tables look at are its first bytes. */
static struct kv_key key_of(uint32_t i) {
    struct kv_key key;
    uint64_t x = i + 1;

    for (size_t at = 0; at < sizeof key.bytes; at += sizeof x) {
        x = (x ^ x >> 31) * UINT64_C(0x9e3779b97f4a7c15);
        x ^= x >> 29;
        memcpy(key.bytes + at, &x, sizeof x);
    }
    return key;
}

static int by_time(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

/* Of pages in no order. */
static double p99_s(const char *what, bool (*look)(uint32_t i)) {
    double *took = __real_malloc(N_LOOKUPS * sizeof *took), p99;
    uint64_t random = 7;

    assert_non_null(took);
    for (int k = 0; k < N_LOOKUPS; k++) {
        double began;
        bool is_found;

        random = random * 6364136223846793005u + 1442695040888963407u;
        began = now_s();
        is_found = look((uint32_t)((random >> 33) % N));
        took[k] = now_s() - began;
        assert_true(is_found);
    }
    qsort(took, N_LOOKUPS, sizeof *took, by_time);
    p99 = took[N_LOOKUPS / 100 * 99];
    printf("%s: p50 %.2f us, p99 %.2f us\n", what, took[N_LOOKUPS / 2] * 1e6, p99 * 1e6);
    free(took);
    return p99;
}

/* ---- the index ------------------------------------------------------------------------------------------------------- */

static struct kv_index index_;
static uint32_t *record_of; /* [N] of page i */

static void fill_tokens(uint32_t i, int32_t tokens[PAGE_TOKENS]) {
    for (int k = 0; k < PAGE_TOKENS; k++)
        tokens[k] = (int32_t)(i + (uint32_t)k);
}

static bool find_in_index(uint32_t i) {
    struct kv_key key = key_of(i);
    int32_t tokens[PAGE_TOKENS];

    fill_tokens(i, tokens);
    return kv_index_find(&index_, &key, i % CHAIN == 0 ? KV_NO_RECORD : record_of[i - 1], tokens) == record_of[i];
}

static void fill_index(void) {
    static const uint32_t n_slots[KV_GROUP_N] = {
        [KV_TARGET_FULL] = N, [KV_TARGET_STATE] = N_STATES, [KV_DRAFT_FULL] = N, [KV_DRAFT_SLIDING] = N};

    n_bytes = 0;
    assert_int_equal(kv_index_init(&index_, N, n_slots, 2048, 25), 0);
    printf("index: %.1f bytes for each page\n", (double)n_bytes / N);
    assert_in_range(n_bytes / N, 1, INDEX_BYTES_MAX);
    record_of = __real_malloc(N * sizeof *record_of);
    assert_non_null(record_of);
    for (uint32_t i = 0; i < N; i++) {
        struct kv_key key = key_of(i);
        int32_t tokens[PAGE_TOKENS];

        fill_tokens(i, tokens);
        assert_int_equal(
            kv_index_add(&index_, &key, i % CHAIN == 0 ? KV_NO_RECORD : record_of[i - 1], tokens, 1, i, &record_of[i]),
            0);
        kv_index_attach(&index_, record_of[i], KV_DRAFT_FULL, i);
        if (i % CHAIN == CHAIN - 1)
            kv_index_attach(&index_, record_of[i], KV_TARGET_STATE, i / CHAIN);
    }
}

/* How many candidates of the group stand elsewhere after its first one left. */
static uint32_t n_moved_by_eviction(enum kv_group group, struct kv_candidate *before) {
    struct kv_evict *evict = &index_.group[group].evict;
    uint32_t record = kv_evict_first(evict), n_moved = 0;

    assert_int_not_equal(record, KV_NO_RECORD);
    memcpy(before, evict->nodes, N * sizeof *before);
    kv_index_detach(&index_, record, group);
    for (uint32_t i = 0; i < N; i++)
        n_moved += memcmp(&before[i], &evict->nodes[i], sizeof *before) != 0;
    return n_moved;
}

static void evict_all(void) {
    static const enum kv_group order[] = {KV_TARGET_STATE, KV_DRAFT_FULL, KV_TARGET_FULL};
    double began = now_s();
    uint32_t n = 0, record;

    for (size_t i = 0; i < ARRAY_LEN(order); i++)
        for (; (record = kv_evict_first(&index_.group[order[i]].evict)) != KV_NO_RECORD; n++)
            kv_index_detach(&index_, record, order[i]);
    printf("index: %u evictions in %.2f s\n", n, now_s() - began);
    assert_int_equal(n, N_STATES + 2 * N - N_EVICTIONS);
    assert_true(now_s() - began < SLACK * NOTE_S * n);
}

static void a_million_pages_in_the_index(void **state) {
    struct kv_candidate *before = __real_malloc(N * sizeof *before);
    uint64_t n_bytes_full;
    uint32_t n_moved_max = 0;

    (void)state;
    assert_non_null(before);
    fill_index();
    n_bytes_full = n_bytes;
    assert_true(p99_s("index", find_in_index) < SLACK * LOOKUP_P99_S);
    for (int k = 0; k < N_EVICTIONS; k++) {
        uint32_t n_moved = n_moved_by_eviction(KV_DRAFT_FULL, before);

        n_moved_max = n_moved > n_moved_max ? n_moved : n_moved_max;
    }
    printf("index: an eviction moved up to %u of %u candidates\n", n_moved_max, index_.group[KV_DRAFT_FULL].evict.n);
    assert_in_range(n_moved_max, 1, MOVED_MAX);
    assert_int_equal(n_bytes, n_bytes_full); /* nothing is allocated on the way */
    free(before);
    free(record_of);
    evict_all();
    kv_index_deinit(&index_);
}

/* ---- the catalog, as a start fills it --------------------------------------------------------------------------------- */

static struct catalog *catalog;

static bool find_in_catalog(uint32_t i) {
    struct kv_key key = key_of(i);

    return catalog_find(catalog, &key, i % CHAIN, KV_TARGET_FULL) != KV_NO_RECORD;
}

static struct segment_map *open_segments(uint32_t n_segments, uint32_t slot_bytes) {
    struct segment_options options = {.n_segments_max = n_segments,
                                      .segment_bytes = FORMAT_SEGMENT_BYTES_MIN,
                                      .first_offset = FORMAT_BLOCK_BYTES,
                                      .cap_bytes = (uint64_t)n_segments * FORMAT_SEGMENT_BYTES_MIN};
    struct segment_map *map;

    options.group[KV_TARGET_FULL].slot_bytes = slot_bytes;
    options.group[KV_TARGET_FULL].cap_bytes = options.cap_bytes;
    assert_int_equal(segment_open(&options, &map), 0);
    return map;
}

/* What the scan does with a header that it has read. */
static void note(struct segment_map *map, const void *block, uint32_t segment, uint32_t slot) {
    struct catalog_entry entry = {.group = KV_TARGET_FULL, .slot = slot, .segment = segment};
    struct format_slot header;
    uint32_t record;

    assert_int_equal(format_slot_read(block, &header), 0);
    entry.key = header.key;
    entry.page_idx = header.page_idx;
    assert_int_equal(catalog_put(catalog, &entry, &record), 0);
    catalog_found(catalog, record);
    segment_mark_taken(map, KV_TARGET_FULL, slot);
}

static void a_million_pages_in_the_catalog(void **state) {
    enum { SLOT_BYTES = 2 * FORMAT_BLOCK_BYTES, PER_SEGMENT = FORMAT_SEGMENT_BYTES_MIN / SLOT_BYTES - 1 };
    uint32_t n_segments = N / PER_SEGMENT + 1, i = 0;
    struct segment_map *map;
    double took_s = 0, began;
    uint64_t n_bytes_full;

    (void)state;
    n_bytes = 0;
    assert_int_equal(catalog_open(N, 25, &catalog), 0);
    map = open_segments(n_segments, SLOT_BYTES);
    n_bytes_full = n_bytes;
    printf("catalog and segments: %.1f bytes for each slot\n", (double)n_bytes / N);
    assert_in_range(n_bytes / N, 1, CATALOG_BYTES_MAX);
    for (uint32_t segment = 0; segment < n_segments; segment++) {
        enum kv_group group;
        uint32_t first, n;

        segment_found(map, segment, KV_TARGET_FULL);
        n = segment_slots(map, segment, &group, &first);
        assert_int_equal(n, PER_SEGMENT);
        for (uint32_t slot = first; slot < first + n && i < N; slot++, i++) {
            struct format_slot header = {.write_sequence = i + 1,
                                         .generation = i + 1,
                                         .group = KV_TARGET_FULL,
                                         .key = key_of(i),
                                         .page_idx = i % CHAIN,
                                         .payload_bytes = FORMAT_BLOCK_BYTES};
            uint8_t block[FORMAT_BLOCK_BYTES];

            if (header.page_idx > 0)
                header.parent = key_of(i - 1);
            format_slot_write(&header, block);
            began = now_s();
            note(map, block, segment, slot);
            took_s += now_s() - began;
        }
        segment_ready(map, segment);
    }
    printf("a million headers taken note of in %.2f s\n", took_s);
    assert_true(took_s < SLACK * NOTE_S * N);
    assert_true(p99_s("catalog", find_in_catalog) < SLACK * LOOKUP_P99_S);
    began = now_s();
    for (uint32_t n = 0; n < N; n++) { /* all leave: each is the first that is looked at */
        uint32_t record = catalog_oldest(catalog, KV_TARGET_FULL);

        assert_int_not_equal(record, KV_NO_RECORD);
        segment_give(map, KV_TARGET_FULL, catalog_look(catalog, record).slot);
        assert_true(catalog_drop(catalog, record));
    }
    printf("a million evictions in %.2f s\n", now_s() - began);
    assert_true(now_s() - began < SLACK * NOTE_S * N);
    assert_int_equal(n_bytes, n_bytes_full);
    assert_null(catalog_check(catalog));
    segment_close(map);
    catalog_close(catalog);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_million_pages_in_the_index),
        cmocka_unit_test(a_million_pages_in_the_catalog),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
