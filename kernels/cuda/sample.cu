/* sample: see sample.cuh. A first kernel reads all rows once and keeps the largest edited logit of every tile; then a CTA
 * per row chooses. An id at a given mass of the sorted row is found without sorting, as in kernels/cpu/sample.c: masses
 * are gathered by the upper 11 bits of the logit's ordinal, the bucket of the goal is split by the next 11, then by the
 * last 10; what is left are equal logits in the order of their ids. */
#include "sample.cuh"
#include "util.cuh"

#include <float.h>
#include <limits.h>

enum {
    SCAN_WARPS = 8,
    SCAN_CTAS = 64, /* per row */
    THREADS = 512,
    BUCKETS = 2048,
    NON_FINITE = INT_MIN, /* as a key: no finite logit has it */
};

/* ---- order: logits compare as integers of the same order (both zeros are one) --------------------------------------- */

__device__ static inline int32_t key_of(float logit) {
    int32_t bits = (int32_t)__float_as_uint(logit + 0.0f);

    return bits ^ (bits >> 31 & 0x7fffffff);
}
__device__ static inline float logit_of(int32_t key) {
    return __uint_as_float((uint32_t)(key ^ (key >> 31 & 0x7fffffff)));
}
__device__ static inline uint32_t ordinal_of(int32_t key) {
    return (uint32_t)key ^ 0x80000000u;
}

/* A logit at its place in the order "falling logit, then rising id". */
struct place {
    int32_t key, id;
};
__device__ static inline bool is_before(struct place a, struct place b) {
    return a.key > b.key || (a.key == b.key && a.id < b.id);
}
__device__ static inline struct place first_of(struct place a, struct place b) {
    return is_before(a, b) ? a : b;
}
__device__ static inline struct place warp_first(struct place p) {
    for (int m = 16; m > 0; m >>= 1)
        p = first_of(p, (struct place){__shfl_xor_sync(0xffffffffu, p.key, m), __shfl_xor_sync(0xffffffffu, p.id, m)});
    return p;
}

/* ---- the row, edited ------------------------------------------------------------------------------------------------ */

struct view {
    const float *logits;
    int n_valid, n_tiles, position;
    const struct seq_ctl *ctl; /* NULL: raw */
    const int32_t *counts;     /* NULL: no penalties */
    const int32_t *drafts;     /* of the block between the anchor and this row's token, this row's included */
    int n_drafts, n_bias;
    const int32_t *bias_id;
    const float *bias;
    int32_t *tile_max;
};

__device__ static struct view view_of(const struct sample_rows &a, int out) {
    const struct batch &batch = a.batch;
    struct view v = {};

    v.logits = a.logits + (size_t)out * (size_t)a.vocab;
    v.n_valid = a.n_valid;
    v.n_tiles = (a.n_valid + SAMPLE_TILE - 1) / SAMPLE_TILE;
    v.tile_max = a.tile_max + (size_t)out * (size_t)v.n_tiles;
    if (!a.is_argmax) {
        int row = batch.out_row[out], seg = batch.row_seg[row], idx = row - batch.seg_row[seg];
        int slot = batch.seg_slot[seg];
        const struct sample_params *params;

        v.ctl = &a.ctl[slot];
        params = &v.ctl->sample;
        v.position = batch.seg_pos[seg] + idx + 1;
        if (!(batch.seg_flags[seg] & SEG_PREFILL)) { /* the counts hold the anchor, but not yet the drafts after it */
            v.drafts = batch.row_token + batch.seg_row[seg] + 1;
            v.n_drafts = idx;
        }
        if (a.has_tables && v.ctl->has_counts && a.tables.counts != NULL &&
            (params->repetition != 1 || params->presence != 0 || params->frequency != 0))
            v.counts = a.tables.counts + (size_t)slot * (size_t)a.tables.vocab;
        if (a.has_tables && v.ctl->n_bias > 0 && a.tables.bias_id != NULL) {
            v.n_bias = v.ctl->n_bias;
            v.bias_id = a.tables.bias_id + (size_t)slot * SEQ_BIAS_MAX;
            v.bias = a.tables.bias + (size_t)slot * SEQ_BIAS_MAX;
        }
    }
    return v;
}

/* -INFINITY is an id that cannot be chosen. */
__device__ static float edited(const struct view &v, int id) {
    float logit = v.logits[id];

    if (v.counts == NULL && v.n_bias == 0)
        return logit;
    for (int i = 0; i < v.n_bias; i++)
        if (v.bias_id[i] == id)
            logit += v.bias[i];
    if (v.counts != NULL) {
        const struct sample_params *params = &v.ctl->sample;
        int32_t count = v.counts[id];

        for (int i = 0; i < v.n_drafts; i++)
            count += v.drafts[i] == id ? 2 : 0;
        if (count != 0)
            logit = logit > 0 ? logit / params->repetition : logit * params->repetition;
        if (count >> 1 > 0)
            logit = logit - params->presence - params->frequency * (float)(count >> 1);
    }
    /* absurd parameters must not make what cannot be ordered */
    return isnan(logit) ? -INFINITY : logit > FLT_MAX ? FLT_MAX : logit;
}

__global__ static void __launch_bounds__(SCAN_WARPS * 32) scan(struct sample_rows a) {
    int out = (int)blockIdx.y, lane = (int)threadIdx.x % 32;
    struct view v;

    wait_for_previous();
    may_launch_next();
    if (out >= *a.batch.n_outs)
        return;
    v = view_of(a, out);
    for (int t = (int)(blockIdx.x * SCAN_WARPS + threadIdx.x / 32); t < v.n_tiles; t += SCAN_CTAS * SCAN_WARPS) {
        int32_t best = INT_MIN;
        bool is_finite = true;

        for (int id = t * SAMPLE_TILE + lane; id < min(v.n_valid, (t + 1) * SAMPLE_TILE); id += 32) {
            is_finite &= isfinite(v.logits[id]);
            best = max(best, key_of(edited(v, id)));
        }
        best = __reduce_max_sync(0xffffffffu, best);
        is_finite = __all_sync(0xffffffffu, is_finite);
        if (lane == 0)
            v.tile_max[t] = is_finite ? best : (int32_t)NON_FINITE;
    }
}

/* ---- random numbers: Philox4x32 with 10 rounds, as in kernels/cpu/sample.c ------------------------------------------ */

__device__ static double uniform(uint64_t seed, uint64_t position) {
    uint32_t c[4] = {(uint32_t)position, (uint32_t)(position >> 32), 0 /* the target's sample */, 0};
    uint32_t k[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};

    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xd2511f53u * c[0], p1 = (uint64_t)0xcd9e8d57u * c[2];

        c[0] = (uint32_t)(p1 >> 32) ^ c[1] ^ k[0];
        c[1] = (uint32_t)p1;
        c[2] = (uint32_t)(p0 >> 32) ^ c[3] ^ k[1];
        c[3] = (uint32_t)p0;
        k[0] += 0x9e3779b9u;
        k[1] += 0xbb67ae85u;
    }
    return (double)(((uint64_t)c[0] << 32 | c[1]) >> 11) * 0x1p-53;
}

/* ---- search --------------------------------------------------------------------------------------------------------- */

enum seek {
    SEEK_COUNT,   /* the goal-th id */
    SEEK_NUCLEUS, /* the first id up to which the share `goal` of the mass is reached */
    SEEK_DRAW,    /* the first id up to which it is exceeded */
};

struct choice { /* in shared memory */
    unsigned long long mass[BUCKETS];
    struct place first[THREADS / 32];
    double sums[THREADS / 32];
    struct place found;
    unsigned long long so_far, total;
    double target;
    uint32_t lowest;
};

__device__ static inline bool reaches(enum seek seek, unsigned long long mass, double target) {
    return seek == SEEK_DRAW ? (double)mass > target : (double)mass >= target;
}

/* Sums of a row stay below 2^53, so that they are exact as doubles. */
__device__ static inline unsigned long long weight_of(const struct view &v, float best, int32_t key) {
    float logit = logit_of(key);
    double w = exp(((double)logit - (double)best) / (double)v.ctl->sample.temperature);

    return (unsigned long long)(w * 0x1p35);
}

/* The place in the row that the search ends at, among those not after `last`. All threads of the CTA. */
__device__ static struct place seek_place(const struct view &v, struct choice *ch, enum seek seek, struct place last,
                                          float best, double goal) {
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;

    if (threadIdx.x == 0) {
        ch->so_far = 0;
        ch->lowest = 0;
        ch->target = goal;
    }
    for (int level = 0; level < 3; level++) {
        const int shift = level == 0 ? 21 : level == 1 ? 10 : 0, n_buckets = level == 2 ? 1024 : BUCKETS;
        uint32_t lowest;

        for (int b = (int)threadIdx.x; b < BUCKETS; b += THREADS)
            ch->mass[b] = 0;
        __syncthreads();
        lowest = ch->lowest;
        for (int t = warp; t < v.n_tiles; t += THREADS / 32) {
            if (ordinal_of(v.tile_max[t]) < lowest || v.tile_max[t] < last.key)
                continue;
            for (int id = t * SAMPLE_TILE + lane; id < min(v.n_valid, (t + 1) * SAMPLE_TILE); id += 32) {
                struct place place = {key_of(edited(v, id)), id};
                uint32_t above = ordinal_of(place.key) - lowest;

                if (ordinal_of(place.key) >= lowest && above >> shift < (uint32_t)n_buckets && !is_before(last, place))
                    atomicAdd(&ch->mass[above >> shift], seek == SEEK_COUNT ? 1ull : weight_of(v, best, place.key));
            }
        }
        __syncthreads();
        if (warp == 0) { /* lane 0 has the highest buckets */
            const int per_lane = n_buckets / 32, top = n_buckets - 1 - lane * per_lane;
            unsigned long long mine = 0, before = 0, total = 0;
            int bucket = -1;
            double target;
            bool is_here;
            unsigned here, some;

            for (int i = 0; i < per_lane; i++)
                mine += ch->mass[top - i];
            for (int l = 0; l < 32; l++) {
                unsigned long long m = __shfl_sync(0xffffffffu, mine, l);

                total += m;
                before += l < lane ? m : 0;
            }
            if (level == 0 && seek != SEEK_COUNT && lane == 0)
                ch->target = goal * (double)total;
            __syncwarp();
            target = ch->target;
            before += ch->so_far;
            is_here = mine > 0 && reaches(seek, before + mine, target);
            here = __ballot_sync(0xffffffffu, is_here);
            some = __ballot_sync(0xffffffffu, mine > 0); /* if none reaches it, the last that weighs anything */
            if (lane == (here != 0 ? __ffs((int)here) - 1 : 31 - __clz((int)some))) {
                for (int i = 0; i < per_lane; i++) {
                    unsigned long long m = ch->mass[top - i];

                    if (m == 0)
                        continue;
                    if (bucket >= 0)
                        before += ch->mass[bucket];
                    bucket = top - i;
                    if (reaches(seek, before + m, target))
                        break;
                }
                ch->so_far = before;
                ch->lowest = lowest + ((uint32_t)bucket << shift);
            }
        }
        __syncthreads();
    }
    if (warp == 0) { /* among ids of one logit: the n-th */
        int32_t key = (int32_t)(ch->lowest ^ 0x80000000u);
        unsigned long long weight = seek == SEEK_COUNT ? 1 : weight_of(v, best, key);
        double missing = (ch->target - (double)ch->so_far) / (double)(weight > 0 ? weight : 1);
        double wanted = seek == SEEK_DRAW ? floor(missing) + 1 : ceil(missing);
        int n = wanted < 1 ? 1 : wanted > v.n_valid ? v.n_valid : (int)wanted, id = -1;

        for (int t = 0; t < v.n_tiles && n > 0; t++) {
            if (v.tile_max[t] < key)
                continue;
            for (int first = t * SAMPLE_TILE; first < min(v.n_valid, (t + 1) * SAMPLE_TILE) && n > 0; first += 32) {
                bool is_one = first + lane < v.n_valid && key_of(edited(v, first + lane)) == key &&
                              !is_before(last, (struct place){key, first + lane});
                unsigned ones = __ballot_sync(0xffffffffu, is_one);

                while (ones != 0 && n > 0) { /* where the row ends before the n-th, it is the last */
                    id = first + __ffs((int)ones) - 1;
                    ones &= ones - 1;
                    n--;
                }
            }
        }
        if (lane == 0)
            ch->found = (struct place){key, id};
    }
    __syncthreads();
    return ch->found;
}

/* The first of the places that come after `after`, in every thread; raw: of the raw logits. */
__device__ static struct place next_place(const struct view &v, struct choice *ch, struct place after, bool raw) {
    struct place best = {INT_MIN, INT_MAX};
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;

    for (int id = (int)threadIdx.x; id < v.n_valid; id += THREADS) {
        struct place place = {key_of(raw ? v.logits[id] : edited(v, id)), id};

        if (is_before(after, place))
            best = first_of(best, place);
    }
    best = warp_first(best);
    if (lane == 0)
        ch->first[warp] = best;
    __syncthreads();
    for (int i = 0; i < THREADS / 32; i++)
        best = first_of(best, ch->first[i]);
    __syncthreads();
    return best;
}

/* The last place whose logit is not below min_p's bound. */
__device__ static struct place floor_place(const struct view &v, float best) {
    double min_p = (double)v.ctl->sample.min_p, floor = -INFINITY;
    float bound;

    if (min_p >= 1)
        floor = (double)best;
    else if (min_p > 0)
        floor = (double)best + (double)v.ctl->sample.temperature * log(min_p);
    bound = floor > -(double)FLT_MAX ? (float)floor : -FLT_MAX;
    if ((double)bound < floor)
        bound = nextafterf(bound, INFINITY);
    return (struct place){key_of(bound), INT_MAX};
}

__device__ static int32_t draw(const struct view &v, struct choice *ch, float best) {
    const struct sample_params *params = &v.ctl->sample;
    struct place last = {INT_MIN, INT_MAX}, bound = floor_place(v, best);

    if (params->top_k > 0 && params->top_k < v.n_valid)
        last = seek_place(v, ch, SEEK_COUNT, last, best, params->top_k);
    if (params->top_p < 1)
        last = seek_place(v, ch, SEEK_NUCLEUS, last, best, (double)params->top_p);
    if (is_before(bound, last))
        last = bound;
    return seek_place(v, ch, SEEK_DRAW, last, best, uniform(params->seed, (uint64_t)v.position)).id;
}

/* Of the raw row, whatever bias and penalties say. */
__device__ static void write_logprobs(const struct view &v, struct choice *ch, int32_t chosen,
                                      struct logprob_row *ret) {
    const int warp = (int)threadIdx.x / 32, n = min(min(v.ctl->sample.n_logprobs, LOGPROBS_MAX), v.n_valid);
    struct place place = next_place(v, ch, (struct place){INT_MAX, -1}, true);
    const float best = logit_of(place.key);
    double sum = 0, log_sum;

    for (int id = (int)threadIdx.x; id < v.n_valid; id += THREADS)
        sum += exp((double)v.logits[id] - (double)best);
    for (int m = 16; m > 0; m >>= 1)
        sum += __shfl_xor_sync(0xffffffffu, sum, m);
    if (threadIdx.x % 32 == 0)
        ch->sums[warp] = sum;
    __syncthreads();
    sum = 0;
    for (int i = 0; i < THREADS / 32; i++)
        sum += ch->sums[i];
    log_sum = (double)best + log(sum);
    if (threadIdx.x == 0) {
        ret->chosen = (float)((double)v.logits[chosen] - log_sum);
        ret->n_top = n;
    }
    for (int i = 0; i < n; i++) {
        if (threadIdx.x == 0) {
            ret->top_id[i] = place.id;
            ret->top[i] = (float)((double)v.logits[place.id] - log_sum);
        }
        if (i + 1 < n)
            place = next_place(v, ch, place, true);
    }
}

__global__ static void __launch_bounds__(THREADS) choose(struct sample_rows a) {
    __shared__ struct choice ch;
    const int out = (int)blockIdx.x, warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    struct place tile = {INT_MIN, INT_MAX}; /* its key is the tile's largest, its id the tile */
    bool is_finite = true;
    int32_t chosen = -1;
    struct view v;

    wait_for_previous();
    may_launch_next();
    if (out >= *a.batch.n_outs)
        return;
    v = view_of(a, out);
    for (int t = (int)threadIdx.x; t < v.n_tiles; t += THREADS) {
        is_finite &= v.tile_max[t] != NON_FINITE;
        tile = first_of(tile, (struct place){v.tile_max[t], t});
    }
    is_finite = __syncthreads_and(is_finite);
    tile = warp_first(tile);
    if (lane == 0)
        ch.first[warp] = tile;
    __syncthreads();
    for (int i = 0; i < THREADS / 32; i++)
        tile = first_of(tile, ch.first[i]);
    __syncthreads();
    if (is_finite && logit_of(tile.key) != -INFINITY) {
        struct place best = {INT_MIN, INT_MAX};

        for (int id = tile.id * SAMPLE_TILE + lane; id < min(v.n_valid, (tile.id + 1) * SAMPLE_TILE); id += 32)
            best = first_of(best, (struct place){key_of(edited(v, id)), id});
        best = warp_first(best);
        chosen = best.id;
        if (v.ctl != NULL && v.ctl->sample.temperature > 0)
            chosen = draw(v, &ch, logit_of(best.key));
        if (v.ctl != NULL && a.logprobs != NULL && v.ctl->sample.n_logprobs >= 0)
            write_logprobs(v, &ch, chosen, &a.logprobs[out]);
    }
    if (threadIdx.x == 0)
        a.chosen[out] = chosen;
}

void sample_launch(const struct launch *launch, const struct sample_rows *rows) {
    unsigned n_outs = (unsigned)rows->batch.n_outs_max;

    launch_early(launch->stream, scan, dim3(SCAN_CTAS, n_outs), SCAN_WARPS * 32, 0, *rows);
    launch_early(launch->stream, choose, dim3(n_outs), THREADS, 0, *rows);
}
