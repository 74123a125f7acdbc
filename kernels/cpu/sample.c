#include "sample.h"

#include <assert.h>
#include <float.h>
#include <math.h>
#include <string.h>

/* ---- random numbers ---------------------------------------------------------------------------------------------- */

void sample_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t ret[4]) {
    uint32_t c[4] = {counter[0], counter[1], counter[2], counter[3]}, k[2] = {key[0], key[1]};

    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xd2511f53u * c[0], p1 = (uint64_t)0xcd9e8d57u * c[2];
        uint32_t next[4] = {(uint32_t)(p1 >> 32) ^ c[1] ^ k[0], (uint32_t)p1, (uint32_t)(p0 >> 32) ^ c[3] ^ k[1],
                            (uint32_t)p0};

        memcpy(c, next, sizeof c);
        k[0] += 0x9e3779b9u;
        k[1] += 0xbb67ae85u;
    }
    memcpy(ret, c, sizeof c);
}

double sample_uniform(uint64_t seed, uint64_t position, enum sample_purpose purpose) {
    const uint32_t counter[4] = {(uint32_t)position, (uint32_t)(position >> 32), (uint32_t)purpose, 0};
    const uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    uint32_t out[4];

    sample_philox(counter, key, out);
    return (double)(((uint64_t)out[0] << 32 | out[1]) >> 11) * 0x1p-53;
}

/* ---- order ------------------------------------------------------------------------------------------------------- */

/* Logits are compared as integers of the same order (both zeros are one), which compilers turn into vector code. */
static int32_t key_of(float logit) {
    int32_t bits = (int32_t)f32_bits(logit + 0.0f);

    return bits ^ (bits >> 31 & 0x7fffffff);
}

/* ---- the row, tile by tile --------------------------------------------------------------------------------------- */

static int tile_count(int n_valid) {
    return (int)div_ceil((uint64_t)n_valid, SAMPLE_TILE);
}
static int tile_size(int n_valid, int tile) {
    return min_int(SAMPLE_TILE, n_valid - tile * SAMPLE_TILE);
}

static bool tile_is_finite(const float *logits, int n) {
    int32_t largest = 0;

    for (int i = 0; i < n; i++) {
        int32_t magnitude = (int32_t)(f32_bits(logits[i]) & 0x7fffffffu);
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest < 0x7f800000;
}

static int32_t tile_max_key(const float *logits, int n) {
    int32_t largest = INT32_MIN;

    for (int i = 0; i < n; i++) {
        int32_t key = key_of(logits[i]);
        largest = key > largest ? key : largest;
    }
    return largest;
}

static int tile_find(const float *logits, int32_t key) {
    int i = 0;

    while (key_of(logits[i]) != key)
        i++;
    return i;
}

int32_t sample_argmax(const float *logits, int n_valid) {
    int32_t best = INT32_MIN;
    int best_tile = 0;

    for (int t = 0; t < tile_count(n_valid); t++) {
        const float *tile = logits + t * SAMPLE_TILE;
        int n = tile_size(n_valid, t);
        int32_t key = tile_max_key(tile, n);

        if (!tile_is_finite(tile, n))
            return -1;
        if (key > best) {
            best = key;
            best_tile = t;
        }
    }
    return best_tile * SAMPLE_TILE + tile_find(logits + best_tile * SAMPLE_TILE, best);
}

/* ---- choice ------------------------------------------------------------------------------------------------------ */

size_t sample_scratch_bytes(int n_valid) {
    (void)n_valid;
    return 64;
}

int32_t sample_choose(const struct sample_row *row, void *scratch, struct logprob_row *logprobs) {
    (void)scratch, (void)logprobs;
    return sample_argmax(row->logits, row->n_valid);
}
