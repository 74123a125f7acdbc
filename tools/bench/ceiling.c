#include "ceiling.h"

#include <pthread.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "bench.h"

enum { READ_BYTES = 1 << 30, PEAK_STEPS = 4000000, THREADS_MAX = CEILING_THREADS_MAX };

struct crew {
    int n;
    void (*fn)(void *arg, int worker, int n);
    void *arg;
};

struct crew_member {
    const struct crew *crew;
    int idx;
    pthread_t thread;
};

static void *crew_main(void *arg) {
    struct crew_member *member = arg;

    member->crew->fn(member->crew->arg, member->idx, member->crew->n);
    return NULL;
}

static double crew_seconds(const struct crew *crew) { /* thread start is noise beside 50 ms and more */
    static struct crew_member members[THREADS_MAX];
    double t = bench_now();

    for (int i = 0; i < crew->n; i++) {
        members[i] = (struct crew_member){.crew = crew, .idx = i};
        pthread_create(&members[i].thread, NULL, crew_main, &members[i]);
    }
    for (int i = 0; i < crew->n; i++)
        pthread_join(members[i].thread, NULL);
    return bench_now() - t;
}

static void read_share(void *arg, int worker, int n) {
    struct ceiling_read *loop = arg;
    size_t begin = loop->n_words * (size_t)worker / (size_t)n / 32 * 32;
    size_t end = loop->n_words * (size_t)(worker + 1) / (size_t)n / 32 * 32;
    uint64_t sum[32] = {0};

    for (size_t i = begin; i < end; i += 32)
        for (int j = 0; j < 32; j++)
            sum[j] ^= loop->words[i + (size_t)j];
    for (int j = 1; j < 32; j++)
        sum[0] ^= sum[j];
    loop->sums[worker] = sum[0];
}

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) static float peak_avx2(void) {
    __m256 sum[12], a = _mm256_set1_ps(1.0000001f), b = _mm256_set1_ps(1e-9f);
    float out[8];

    for (int i = 0; i < 12; i++)
        sum[i] = _mm256_set1_ps((float)i);
    for (int step = 0; step < PEAK_STEPS; step++)
#if defined(__clang__)
#pragma clang loop unroll(full)
#else
#pragma GCC unroll 12
#endif
        for (int i = 0; i < 12; i++)
            sum[i] = _mm256_fmadd_ps(sum[i], a, b);
    for (int i = 1; i < 12; i++)
        sum[0] = _mm256_add_ps(sum[0], sum[i]);
    _mm256_storeu_ps(out, sum[0]);
    return out[0];
}

__attribute__((target("avx512f,avx512bf16"))) static float peak_avx512bf16(void) {
    __m512 sum[16];
    __m512bh a = (__m512bh)_mm512_set1_epi32(0x3f803f80), b = (__m512bh)_mm512_set1_epi32(0x30003000);
    float out[16];

    for (int i = 0; i < 16; i++)
        sum[i] = _mm512_set1_ps((float)i);
    for (int step = 0; step < PEAK_STEPS; step++)
#if defined(__clang__)
#pragma clang loop unroll(full)
#else
#pragma GCC unroll 16
#endif
        for (int i = 0; i < 16; i++)
            sum[i] = _mm512_dpbf16_ps(sum[i], a, b);
    for (int i = 1; i < 16; i++)
        sum[0] = _mm512_add_ps(sum[0], sum[i]);
    _mm512_storeu_ps(out, sum[0]);
    return out[0];
}
#endif

struct peak_loop {
    const char *isa;
    float sums[THREADS_MAX];
};

static void peak_share(void *arg, int worker, int n) {
    struct peak_loop *loop = arg;

    (void)n;
#if defined(__x86_64__)
    loop->sums[worker] = strcmp(loop->isa, "avx2") == 0 ? peak_avx2() : peak_avx512bf16();
#else
    loop->sums[worker] = 0;
#endif
}

double ceiling_gflops(const char *isa, int n_threads) {
    static struct peak_loop loop;
    double flops = (double)n_threads * PEAK_STEPS;

    if (strcmp(isa, "avx2") == 0)
        flops *= 12 * 8 * 2;
    else if (strcmp(isa, "avx512bf16") == 0)
        flops *= 16 * 32 * 2;
    else
        return 0;
    loop.isa = isa;
    return flops / crew_seconds(&(struct crew){n_threads, peak_share, &loop}) * 1e-9;
}

int ceiling_read_open(struct ceiling_read *read) {
    const struct backend *backend = backend_find("cpu");
    void *words = NULL;
    int r;

    *read = (struct ceiling_read){0};
    r = backend->open(&(struct backend_options){.n_threads = 1}, &read->device);
    if (r == 0)
        r = backend->mem_alloc(read->device, MEM_DEVICE, READ_BYTES, &words); /* on large pages, as weights are */
    if (r != 0 || words == NULL) {
        ceiling_read_close(read);
        return r;
    }
    read->words = words;
    read->n_words = READ_BYTES / 8;
    for (size_t i = 0; i < read->n_words; i++)
        read->words[i] = i;
    return 0;
}

void ceiling_read_close(struct ceiling_read *read) {
    const struct backend *backend = backend_find("cpu");

    if (read->words)
        backend->mem_free(read->device, MEM_DEVICE, read->words, READ_BYTES);
    if (read->device)
        backend->close(read->device);
    *read = (struct ceiling_read){0};
}

double ceiling_read_rate(struct ceiling_read *read, int n_threads) {
    return READ_BYTES / crew_seconds(&(struct crew){n_threads, read_share, read});
}
