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
static float logit_of(int32_t key) {
    return f32_from_bits((uint32_t)(key ^ (key >> 31 & 0x7fffffff)));
}

/* A logit at its place in the order "falling logit, then rising id". */
struct place {
    int32_t key, id;
};
static bool is_before(struct place a, struct place b) {
    return a.key > b.key || (a.key == b.key && a.id < b.id);
}

/* The first `cap` of the places offered, as a heap whose root is the last of them. */
struct firsts {
    struct place *heap;
    int n, cap;
};

static void sift_down(struct place *heap, int n, struct place item) {
    int at = 0, child;

    while ((child = 2 * at + 1) < n) {
        if (child + 1 < n && is_before(heap[child], heap[child + 1]))
            child++;
        if (is_before(heap[child], item))
            break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = item;
}

static void firsts_offer(struct firsts *firsts, struct place item) {
    if (firsts->n < firsts->cap) {
        int at = firsts->n++;

        for (; at > 0 && is_before(firsts->heap[(at - 1) / 2], item); at = (at - 1) / 2)
            firsts->heap[at] = firsts->heap[(at - 1) / 2];
        firsts->heap[at] = item;
    } else if (is_before(item, firsts->heap[0])) {
        sift_down(firsts->heap, firsts->n, item);
    }
}

static void firsts_sort(struct firsts *firsts) {
    for (int n = firsts->n - 1; n > 0; n--) {
        struct place last = firsts->heap[0];

        sift_down(firsts->heap, n, firsts->heap[n]);
        firsts->heap[n] = last;
    }
}

/* ---- the row, tile by tile --------------------------------------------------------------------------------------- */

static int tile_count(int n_valid) {
    return (int)div_ceil((uint64_t)n_valid, SAMPLE_TILE);
}
static int tile_size(int n_valid, int tile) {
    return min_int(SAMPLE_TILE, n_valid - tile * SAMPLE_TILE);
}

/* The two readers of whole rows. Compilers make vector code of them where the size is a constant. */
static inline bool is_finite_n(const float *logits, int n) {
    int32_t largest = 0;

    for (int i = 0; i < n; i++) {
        int32_t magnitude = (int32_t)(f32_bits(logits[i]) & 0x7fffffffu);
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest < 0x7f800000;
}
static inline int32_t max_key_n(const float *logits, int n) {
    int32_t largest = INT32_MIN;

    for (int i = 0; i < n; i++) {
        int32_t key = key_of(logits[i]);
        largest = key > largest ? key : largest;
    }
    return largest;
}
static bool tile_is_finite(const float *logits, int n) {
    return n == SAMPLE_TILE ? is_finite_n(logits, SAMPLE_TILE) : is_finite_n(logits, n);
}
static int32_t tile_max_key(const float *logits, int n) {
    return n == SAMPLE_TILE ? max_key_n(logits, SAMPLE_TILE) : max_key_n(logits, n);
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

/* ---- bias and penalties ------------------------------------------------------------------------------------------ */

enum {
    FEW_MAX = 256, /* up to this top_k the candidates are sorted, above it they are searched */
    BUCKETS = 2048,
};

struct scratch {
    double mass[BUCKETS];
    double weight[FEW_MAX];
    struct place tiles[FEW_MAX], ids[FEW_MAX];
};

/* A row with its edits. The edited logits exist a tile at a time: a copy of the row per worker would be a megabyte. */
struct view {
    const struct sample_row *row;
    const struct sample_params *params;
    struct scratch *scratch;
    int n_tiles, n_bias;
    const int32_t *counts; /* [n_valid] or NULL: no penalty acts */
    const int32_t *bias_id;
    const float *bias;
    int32_t *tile_max; /* [n_tiles] keys of edited logits */
    uint8_t *has_bias; /* [n_tiles] */
    float best;        /* the largest edited logit */
};

size_t sample_scratch_bytes(int n_valid) {
    size_t n_tiles = (size_t)tile_count(n_valid);

    return align_up(sizeof(struct scratch) + n_tiles * (sizeof(int32_t) + 1), 64);
}

static struct view view_of(const struct sample_row *row, void *scratch) {
    const struct seq_ctl *ctl = row->ctl;
    const struct seq_tables *tables = row->tables;
    const struct sample_params *params = &ctl->sample;
    struct view v = {.row = row, .params = params, .scratch = scratch, .n_tiles = tile_count(row->n_valid)};

    v.tile_max = (int32_t *)(void *)((char *)scratch + sizeof(struct scratch));
    v.has_bias = (uint8_t *)(v.tile_max + v.n_tiles);
    memset(v.has_bias, 0, (size_t)v.n_tiles);
    if (tables == NULL)
        return v;
    if (ctl->has_counts && tables->counts &&
        (params->repetition != 1 || params->presence != 0 || params->frequency != 0))
        v.counts = tables->counts + (size_t)row->slot * (size_t)tables->vocab;
    if (ctl->n_bias > 0 && tables->bias_id) {
        v.n_bias = ctl->n_bias;
        v.bias_id = tables->bias_id + (size_t)row->slot * SEQ_BIAS_MAX;
        v.bias = tables->bias + (size_t)row->slot * SEQ_BIAS_MAX;
    }
    for (int i = 0; i < v.n_bias; i++)
        if (v.bias_id[i] >= 0 && v.bias_id[i] < row->n_valid)
            v.has_bias[v.bias_id[i] / SAMPLE_TILE] = 1;
    return v;
}

static float penalise(float logit, int32_t count, const struct sample_params *params) {
    int32_t n_generated = count >> 1;

    if (count == 0)
        return logit;
    logit = logit > 0 ? logit / params->repetition : logit * params->repetition;
    if (n_generated > 0)
        logit = logit - params->presence - params->frequency * (float)n_generated;
    return logit;
}

/* The edited logits of a tile, in `buf` if there are edits. -INFINITY is an id that cannot be chosen. */
static const float *tile_logits(const struct view *v, int tile, float buf[SAMPLE_TILE]) {
    int first = tile * SAMPLE_TILE, n = tile_size(v->row->n_valid, tile);
    const float *raw = v->row->logits + first;
    int32_t count[SAMPLE_TILE];

    if (v->counts == NULL && !v->has_bias[tile])
        return raw;
    memcpy(buf, raw, (size_t)n * sizeof *buf);
    if (v->has_bias[tile])
        for (int i = 0; i < v->n_bias; i++)
            if (v->bias_id[i] >= first && v->bias_id[i] < first + n)
                buf[v->bias_id[i] - first] += v->bias[i];
    if (v->counts) {
        memcpy(count, v->counts + first, (size_t)n * sizeof *count);
        for (int i = 0; i < v->row->n_drafts; i++)
            if (v->row->drafts[i] >= first && v->row->drafts[i] < first + n)
                count[v->row->drafts[i] - first] += 2;
        for (int i = 0; i < n; i++)
            buf[i] = penalise(buf[i], count[i], v->params);
    }
    for (int i = 0; i < n; i++) /* absurd parameters must not make what cannot be ordered */
        buf[i] = isnan(buf[i]) ? -INFINITY : buf[i] > FLT_MAX ? FLT_MAX : buf[i];
    return buf;
}

/* ---- weights ----------------------------------------------------------------------------------------------------- */

/* Not normalised: the best id has 1. */
static double weight_of(const struct view *v, float logit) {
    return exp(((double)logit - (double)v->best) / (double)v->params->temperature);
}

/* min_p as a bound on logits: the order of logits then decides alone, however exp rounds. */
static double min_p_floor(const struct view *v) {
    double min_p = (double)v->params->min_p;

    if (min_p <= 0)
        return -INFINITY;
    return min_p >= 1 ? (double)v->best : (double)v->best + (double)v->params->temperature * log(min_p);
}

static double draw(const struct view *v) {
    return sample_uniform(v->params->seed, (uint64_t)v->row->position, SAMPLE_TARGET);
}

/* ---- few candidates: sort them ----------------------------------------------------------------------------------- */

/* The k first ids lie in the k tiles whose first ids come first: an id of any other tile has k ids before it. */
static struct firsts top_k_ids(const struct view *v, int k) {
    struct firsts tiles = {.heap = v->scratch->tiles, .cap = k}, ids = {.heap = v->scratch->ids, .cap = k};
    float buf[SAMPLE_TILE];

    for (int t = 0; t < v->n_tiles; t++) /* tiles of one maximum: the lower has the lower id */
        firsts_offer(&tiles, (struct place){v->tile_max[t], t});
    for (int i = 0; i < tiles.n; i++) {
        int tile = tiles.heap[i].id;
        const float *logits = tile_logits(v, tile, buf);

        for (int j = 0; j < tile_size(v->row->n_valid, tile); j++)
            firsts_offer(&ids, (struct place){key_of(logits[j]), tile * SAMPLE_TILE + j});
    }
    firsts_sort(&ids);
    return ids;
}

static double sum_weights(const double *weight, int n) {
    double sum = 0;

    for (int i = 0; i < n; i++)
        sum += weight[i];
    return sum;
}

static int32_t choose_of_few(const struct view *v, int k) {
    struct firsts ids = top_k_ids(v, k);
    double *weight = v->scratch->weight, floor = min_p_floor(v), so_far = 0, target;
    int n = ids.n, i;

    for (i = 0; i < n; i++)
        weight[i] = weight_of(v, logit_of(ids.heap[i].key));
    if (v->params->top_p < 1) {
        target = (double)v->params->top_p * sum_weights(weight, n);
        for (i = 0; i < n - 1 && (so_far += weight[i]) < target; i++)
            ;
        n = i + 1;
    }
    while (n > 1 && (double)logit_of(ids.heap[n - 1].key) < floor)
        n--;
    target = draw(v) * sum_weights(weight, n);
    for (i = 0, so_far = 0; i < n - 1 && (so_far += weight[i]) <= target; i++)
        ;
    return ids.heap[i].id;
}

/* ---- many candidates: search --------------------------------------------------------------------------------------
 * An id at a given mass of the sorted row is found without sorting: masses are gathered by the upper 11 bits of the
 * logit's ordinal, the bucket of the goal is split by the next 11, then by the last 10; what is left are equal logits
 * in the order of their ids. Each level reads the row once. */

static uint32_t ordinal_of(int32_t key) {
    return (uint32_t)key ^ 0x80000000u;
}

enum seek {
    SEEK_COUNT,   /* the goal-th id */
    SEEK_NUCLEUS, /* the first id up to which the share `goal` of the mass is reached */
    SEEK_DRAW,    /* the first id up to which it is exceeded */
};

static bool reaches(enum seek seek, double mass, double target) {
    return seek == SEEK_DRAW ? mass > target : mass >= target;
}

/* Gathers the ids up to and including `last` whose ordinals are in [lowest, lowest + buckets << shift). */
static void gather(const struct view *v, enum seek seek, struct place last, uint32_t lowest, int n_buckets, int shift) {
    double *mass = v->scratch->mass;
    float buf[SAMPLE_TILE];

    memset(mass, 0, (size_t)n_buckets * sizeof *mass);
    for (int t = 0; t < v->n_tiles; t++) {
        const float *logits;

        if (ordinal_of(v->tile_max[t]) < lowest || v->tile_max[t] < last.key)
            continue;
        logits = tile_logits(v, t, buf);
        for (int i = 0; i < tile_size(v->row->n_valid, t); i++) {
            struct place place = {key_of(logits[i]), t * SAMPLE_TILE + i};
            uint64_t bucket = (uint64_t)(uint32_t)(ordinal_of(place.key) - lowest) >> shift;

            if (ordinal_of(place.key) >= lowest && bucket < (uint64_t)n_buckets && !is_before(last, place))
                mass[bucket] += seek == SEEK_COUNT ? 1 : weight_of(v, logits[i]);
        }
    }
}

/* Among ids of one logit, in their order. */
static struct place seek_equal(const struct view *v, enum seek seek, struct place last, int32_t key, double so_far,
                               double target) {
    double weight = seek == SEEK_COUNT ? 1 : weight_of(v, logit_of(key));
    struct place found = {key, -1};
    float buf[SAMPLE_TILE];

    for (int t = 0; t < v->n_tiles; t++) {
        const float *logits;

        if (v->tile_max[t] < key)
            continue;
        logits = tile_logits(v, t, buf);
        for (int i = 0; i < tile_size(v->row->n_valid, t); i++) {
            struct place place = {key, t * SAMPLE_TILE + i};

            if (key_of(logits[i]) != key || is_before(last, place))
                continue;
            found = place;
            if (reaches(seek, so_far += weight, target))
                return found;
        }
    }
    return found; /* sums of parts may round below the sum of the whole: then it is the last */
}

static struct place seek_place(const struct view *v, enum seek seek, struct place last, double goal) {
    static const struct { int n_buckets, shift; } levels[] = {{2048, 21}, {2048, 10}, {1024, 0}};
    const double *mass = v->scratch->mass;
    double so_far = 0, target = goal;
    uint32_t lowest = 0;

    for (size_t level = 0; level < ARRAY_LEN(levels); level++) {
        int n_buckets = levels[level].n_buckets, bucket = -1;

        gather(v, seek, last, lowest, n_buckets, levels[level].shift);
        if (level == 0 && seek != SEEK_COUNT)
            target = goal * sum_weights(mass, n_buckets);
        for (int b = n_buckets - 1; b >= 0; b--) {
            if (mass[b] == 0)
                continue;
            if (bucket >= 0)
                so_far += mass[bucket];
            bucket = b;
            if (reaches(seek, so_far + mass[b], target))
                break;
        }
        assert(bucket >= 0); /* the best id has weight 1; a bucket that was chosen has weight */
        lowest += (uint32_t)bucket << levels[level].shift;
    }
    return seek_equal(v, seek, last, (int32_t)(lowest ^ 0x80000000u), so_far, target);
}

/* The last place whose logit is not below `floor`. */
static struct place floor_place(double floor) {
    float bound = floor > -(double)FLT_MAX ? (float)floor : -FLT_MAX;

    if ((double)bound < floor)
        bound = nextafterf(bound, INFINITY);
    return (struct place){key_of(bound), INT32_MAX};
}

static int32_t choose_of_many(const struct view *v, int k) {
    struct place last = {INT32_MIN, INT32_MAX}, bound = floor_place(min_p_floor(v));

    if (k < v->row->n_valid)
        last = seek_place(v, SEEK_COUNT, last, k);
    if (v->params->top_p < 1)
        last = seek_place(v, SEEK_NUCLEUS, last, (double)v->params->top_p);
    if (is_before(bound, last))
        last = bound;
    return seek_place(v, SEEK_DRAW, last, draw(v)).id;
}

/* ---- choice ------------------------------------------------------------------------------------------------------ */

/* Of the raw row, whatever bias and penalties say. */
static void write_logprobs(const struct view *v, int32_t chosen, struct logprob_row *ret) {
    const float *logits = v->row->logits;
    struct firsts ids = {.heap = v->scratch->ids,
                         .cap = min_int(min_int(v->params->n_logprobs, LOGPROBS_MAX), v->row->n_valid)};
    int32_t best = INT32_MIN;
    double sum = 0, log_sum;

    for (int t = 0; t < v->n_tiles; t++) {
        int first = t * SAMPLE_TILE, n = tile_size(v->row->n_valid, t);
        int32_t tile_best = tile_max_key(logits + first, n);

        best = tile_best > best ? tile_best : best;
        if (ids.cap == 0 || (ids.n == ids.cap && tile_best <= ids.heap[0].key))
            continue;
        for (int i = 0; i < n; i++)
            firsts_offer(&ids, (struct place){key_of(logits[first + i]), first + i});
    }
    for (int id = 0; id < v->row->n_valid; id++)
        sum += exp((double)logits[id] - (double)logit_of(best));
    log_sum = (double)logit_of(best) + log(sum);
    firsts_sort(&ids);
    ret->chosen = (float)((double)logits[chosen] - log_sum);
    ret->n_top = ids.n;
    for (int i = 0; i < ids.n; i++) {
        ret->top_id[i] = ids.heap[i].id;
        ret->top[i] = (float)((double)logits[ids.heap[i].id] - log_sum);
    }
}

/* Fills tile_max and best. The first id of the largest edited logit, or -1. */
static int32_t scan(struct view *v) {
    float buf[SAMPLE_TILE];
    int best_tile = 0;

    for (int t = 0; t < v->n_tiles; t++) {
        int n = tile_size(v->row->n_valid, t);

        if (!tile_is_finite(v->row->logits + t * SAMPLE_TILE, n))
            return -1;
        v->tile_max[t] = tile_max_key(tile_logits(v, t, buf), n);
        if (v->tile_max[t] > v->tile_max[best_tile])
            best_tile = t;
    }
    v->best = logit_of(v->tile_max[best_tile]);
    if (v->best == -INFINITY)
        return -1;
    return best_tile * SAMPLE_TILE + tile_find(tile_logits(v, best_tile, buf), v->tile_max[best_tile]);
}

int32_t sample_choose(const struct sample_row *row, void *scratch, struct logprob_row *logprobs) {
    struct view v = view_of(row, scratch);
    int k = v.params->top_k > 0 ? min_int(v.params->top_k, row->n_valid) : row->n_valid;
    int32_t chosen = scan(&v);

    if (chosen < 0)
        return -1;
    if (v.params->temperature > 0)
        chosen = k <= FEW_MAX ? choose_of_few(&v, k) : choose_of_many(&v, k);
    if (logprobs && v.params->n_logprobs >= 0)
        write_logprobs(&v, chosen, logprobs);
    return chosen;
}
