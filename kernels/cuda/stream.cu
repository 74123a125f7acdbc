/* stream: products of few rows: the weights pass by once, as fast as memory gives them.
 *
 * A CTA reads stretches of the matrix (stretch.h), which lie in one piece each. One warp brings stages of weights and x
 * into a ring, across tiles; the others have a block of 16 rows of each tile. A multiprocessor holds one CTA, and the next
 * product's fills its ring with weights as soon as this one's has left, while others still run. A tile that is cut belongs
 * to the CTA that has its first piece: the others send it their sums. */
#include "gemm.cuh"
#include "pipe.cuh"
#include "row.cuh"

enum {
    CONSUMERS = TILE_BLOCKS, /* warps */
    THREADS = (CONSUMERS + 1) * 32,
    W_BYTES = STAGE_STEPS * STEP_BYTES, /* of a stage */
    X_ROW_BYTES = STAGE_STEPS * 32,
    X_STRIDE = X_ROW_BYTES + 16,  /* between rows of a stage: keeps banks apart */
    SHARED_MAX = 136 * 1024,      /* no two CTAs fit a multiprocessor, but one and a CTA of the delta rule */
    ROW_BYTES = ROW_COLS_MAX * 2, /* of the one row that is normed here */
    SUMS_OF_PRODUCT = STRETCH_CTAS * TILE_BLOCKS * (STREAM_ROWS / 8) * 32, /* float4 */
    BATCH = 8,                                                             /* sums that are loaded at once */
};
static_assert(2 * SUMS_OF_PRODUCT * sizeof(float4) <= SUMS_BYTES, "two products' sums fit");

/* What x is: up to so many rows, in groups of 16, or one row that is normed here. */
enum rows_kind { ROWS_16, ROWS_32, ROWS_64, ROW_NORMED };

__host__ __device__ constexpr int n_groups_of(enum rows_kind kind) {
    return kind == ROWS_64 ? 4 : kind == ROWS_32 ? 2 : 1;
}
__host__ __device__ constexpr int stage_bytes(enum rows_kind kind) {
    return W_BYTES + (kind == ROW_NORMED ? 0 : n_groups_of(kind) * 16 * X_STRIDE);
}
__host__ __device__ constexpr int n_stages(enum rows_kind kind) {
    return (SHARED_MAX - (kind == ROW_NORMED ? ROW_BYTES : 0)) / (stage_bytes(kind) + 2 * (int)sizeof(uint64_t));
}
__host__ __device__ constexpr int shared_bytes(enum rows_kind kind) {
    return n_stages(kind) * (stage_bytes(kind) + 2 * (int)sizeof(uint64_t)) + (kind == ROW_NORMED ? ROW_BYTES : 0);
}

struct product {
    const char *w;
    struct gemm_out out;
    struct stretches stretches;
    float4 *sums; /* [parts, blocks, squares, lanes], of the pieces that do not begin a tile; zero: not yet sent */
};
struct args {
    struct gemm_x x;
    struct gemm_rows rows; /* ROW_NORMED, instead of x */
    struct row_count count;
    int n_max, rows_max; /* n_max: rows of x that may be read; beyond rows_max nothing is done */
    int n_steps;
    bool is_early; /* weights may come before the kernel before has ended */
    struct product products[2];
    int n_products;
    size_t matrix_bytes;
    const int32_t *n_groups, *group_expert; /* NULL: one matrix, all rows */
};

/* A CTA's way through the pieces of its stretches: a part comes after the part behind it, so that the CTA that waits for
 * sums has the higher number and is not the one to keep the other from running. */
struct way {
    int item, at, end; /* a part of a product, of a group; stages of the part that are left */
    int product, part, group;
};

__device__ static inline int n_items_of(const struct args &a) {
    int n = a.products[0].stretches.n_parts;

    if (a.n_groups != NULL)
        return n * *a.n_groups;
    return a.n_products == 2 ? n + a.products[1].stretches.n_parts : n;
}

/* False: there is no more. */
__device__ static inline bool next_piece(const struct args &a, int n_items, struct way *way,
                                         struct stretch_piece *piece) {
    if (way->at == way->end) {
        const int n = a.products[0].stretches.n_parts;
        int item;

        way->item += way->item < 0 ? (int)blockIdx.x + 1 : (int)gridDim.x;
        if (way->item >= n_items)
            return false;
        item = n_items - 1 - way->item;
        way->group = a.n_groups != NULL ? item / n : 0;
        way->product = a.n_groups == NULL && item >= n;
        way->part = item - (a.n_groups != NULL ? way->group * n : way->product ? n : 0);
        way->at = stretch_begin(a.products[way->product].stretches, way->part);
        way->end = stretch_begin(a.products[way->product].stretches, way->part + 1);
    }
    *piece = stretch_piece_at(a.products[way->product].stretches, way->at, way->end);
    way->at += piece->end - piece->begin;
    return true;
}

/* ---- the warp that brings ------------------------------------------------------------------------------------------ */

/* A CTA's stages, one after the other. */
struct feed {
    struct way way;
    struct stretch_piece piece;
    bool has_stage;
    const char *tile; /* the piece's */

    __device__ void open(const struct args &a, int n_items) {
        has_stage = next_piece(a, n_items, &way, &piece);
        if (!has_stage)
            return;
        tile = a.products[way.product].w + (size_t)piece.tile * (size_t)a.n_steps * STEP_BYTES;
        if (a.n_groups != NULL)
            tile += (size_t)a.group_expert[way.group] * a.matrix_bytes;
    }
    __device__ void step(const struct args &a, int n_items) {
        if (++piece.begin == piece.end)
            open(a, n_items);
    }
    __device__ const char *w(void) const {
        return tile + (size_t)piece.begin * W_BYTES;
    }
    __device__ int n_steps(const struct args &a) const {
        return min(STAGE_STEPS, a.n_steps - piece.begin * STAGE_STEPS);
    }
};

template <enum rows_kind KIND>
__device__ static inline void bring(const struct args &a, char *ring, uint64_t *full, uint64_t *empty) {
    constexpr int STAGES = n_stages(KIND), STAGE_BYTES = stage_bytes(KIND);
    const int lane = (int)threadIdx.x % 32, row = lane / 8, unit = lane % 8; /* 16 bytes of a row of x */
    const bool is_early = a.is_early && a.n_groups == NULL;
    const size_t x_row_bytes = a.x.stride * sizeof(bf16);
    const char *x = (const char *)(a.x.data + (size_t)row * a.x.stride) + unit * 16;
    struct feed feed = {{-1, 0, 0, 0, 0, 0}, {0, 0, 0}, false, NULL};
    ring_place<STAGES> place = {};
    int n_items = 0, n_early = 0, n_rows = a.n_max;

    /* Lane 0. */
    auto bring_w = [&](const struct feed &f, int stage) {
        const int bytes = f.n_steps(a) * STEP_BYTES;

        barrier_announce_and_arrive(&full[stage], bytes);
        copy_piece_once(ring + stage * STAGE_BYTES, f.w(), bytes, &full[stage]);
    };
    /* All lanes. */
    auto bring_x = [&](int stage) {
        const char *src = x + (size_t)feed.way.group * 16 * x_row_bytes + (size_t)feed.piece.begin * X_ROW_BYTES;
        const bool is_there = unit < feed.n_steps(a) * 2;

#pragma unroll
        for (int i = 0; i < 4 * n_groups_of(KIND); i++)
            if (is_there && row + i * 4 < n_rows)
                copy_async(ring + stage * STAGE_BYTES + W_BYTES + (row + i * 4) * X_STRIDE + unit * 16,
                           src + (size_t)(i * 4) * x_row_bytes, 16);
        barrier_arrive_when_copied(&full[stage]);
    };

    if (is_early) {
        struct feed early = feed;

        n_items = n_items_of(a);
        early.open(a, n_items);
        feed = early;
        for (; n_early < STAGES && early.has_stage; n_early++, early.step(a, n_items))
            if (lane == 0)
                bring_w(early, n_early);
    }
    wait_for_previous();
    if (!is_early) {
        n_rows = a.n_groups != NULL ? 16 : count_rows(a.count);
        if (n_rows == 0 || n_rows > a.rows_max)
            return;
        n_items = n_items_of(a);
        feed.open(a, n_items);
    }
    for (int i = 0; feed.has_stage; i++, place.step(), feed.step(a, n_items)) {
        if (is_early && i == STAGES) { /* the first x comes before it is known how many rows there are */
            if (count_rows(a.count) == 0)
                break;
        }
        if (i >= STAGES)
            barrier_wait(&empty[place.stage], place.parity ^ 1);
        if (lane == 0 && i >= n_early)
            bring_w(feed, place.stage);
        if constexpr (KIND != ROW_NORMED)
            bring_x(place.stage);
    }
    if (is_early && count_rows(a.count) == 0) /* what is on its way must have come before the CTA may leave */
        for (int i = 0; i < n_early; i++)
            barrier_wait(&full[i], 0);
}

/* ---- the warps that multiply --------------------------------------------------------------------------------------- */

/* A sum's own bits say that it is there. Zero is sent as -0, which no sum is that began as +0. */
__device__ static inline float as_sent(float v) {
    return v == 0 ? -0.0f : v;
}
__device__ static inline void send_sum(float4 *to, const float v[4]) {
    asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)),
                 "f"(as_sent(v[0])), "f"(as_sent(v[1])), "f"(as_sent(v[2])), "f"(as_sent(v[3]))
                 : "memory");
}
__device__ static inline float4 load_sum(const float4 *from) {
    float4 v;

    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(__cvta_generic_to_global(from))
                 : "memory");
    return v;
}
__device__ static inline bool is_sent(float4 v) {
    return __float_as_uint(v.x) != 0 && __float_as_uint(v.y) != 0 && __float_as_uint(v.z) != 0 &&
           __float_as_uint(v.w) != 0;
}

/* N squares of a block of a part. */
template <int N> __device__ static inline float4 *sums_of(const struct product &p, int part, int warp) {
    return p.sums + (part * TILE_BLOCKS + warp) * N * 32 + (int)threadIdx.x % 32;
}
template <int N>
__device__ static inline void send_sums(const struct product &p, int part, int warp, int n_rows, const float d[N][4]) {
    float4 *to = sums_of<N>(p, part, warp);

#pragma unroll
    for (int i = 0; i < N; i++)
        if (i * 8 < n_rows)
            send_sum(&to[i * 32], d[i]);
}
/* The sums of the pieces behind the first, in order; leaves zeros for the next product. */
template <int N>
__device__ static inline void add_sums(const struct product &p, struct stretch_parts parts, int warp, int n_rows,
                                       float d[N][4]) {
#pragma unroll
    for (int i = 0; i < N; i++) {
        if (i * 8 >= n_rows)
            continue;
        for (int first = 1; first < parts.n; first += BATCH) {
            float4 v[BATCH];

#pragma unroll
            for (int j = 0; j < BATCH; j++) /* all loads at once */
                v[j] = load_sum(sums_of<N>(p, parts.first + min(first + j, parts.n - 1), warp) + i * 32);
#pragma unroll
            for (int j = 0; j < BATCH; j++) {
                float4 *from = sums_of<N>(p, parts.first + first + j, warp) + i * 32;

                if (first + j >= parts.n)
                    break;
                while (!is_sent(v[j]))
                    v[j] = load_sum(from);
                __stcg(from, make_float4(0, 0, 0, 0));
                d[i][0] += v[j].x;
                d[i][1] += v[j].y;
                d[i][2] += v[j].z;
                d[i][3] += v[j].w;
            }
        }
    }
}

/* All warps but the one that brings. */
__device__ static inline void consumers_sync(void) {
    asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS * 32) : "memory");
}

template <enum rows_kind KIND>
__device__ static inline void multiply(const struct args &a, const char *ring, uint64_t *full, uint64_t *empty,
                                       char *row) {
    constexpr int STAGES = n_stages(KIND), STAGE_BYTES = stage_bytes(KIND), N_GROUPS = n_groups_of(KIND);
    constexpr int N = KIND == ROW_NORMED ? 1 : 2 * N_GROUPS; /* squares */
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    /* Of ldmatrix: the row of x and the half of a step that this lane names. */
    const int x_at = W_BYTES + (lane / 16 * 8 + lane % 8) * X_STRIDE + lane / 8 % 2 * 16;
    const int w_at = warp * FRAG_BYTES + lane * 16;
    struct way way = {-1, 0, 0, 0, 0, 0};
    ring_place<STAGES> place = {};
    struct stretch_piece piece;
    int n_rows, n_items;

    if constexpr (KIND == ROW_NORMED) {
        __shared__ float squares_of_warps[CONSUMERS];
        float factor[ROW_PIECES][8];

        row_factors(a.rows, factor); /* no kernel writes these: they may come early */
        wait_for_previous();
        may_launch_next();
        n_rows = count_rows(a.count);
        row_norm(a.rows, factor, (bf16 *)row, squares_of_warps, [] { consumers_sync(); });
    } else {
        wait_for_previous();
        may_launch_next();
        n_rows = a.n_groups != NULL ? 16 : count_rows(a.count);
    }
    if (n_rows == 0 || n_rows > a.rows_max)
        return;
    n_items = n_items_of(a);
    while (next_piece(a, n_items, &way, &piece)) {
        const struct product &p = a.products[way.product];
        const int block = piece.tile * TILE_BLOCKS + warp, row0 = way.group * 16;
        float sum[N][4] = {}, before[N][4] = {};

        if (piece.begin == 0)
            emit_before<N>(p.out, block, row0, row0 + n_rows, before);
        for (int stage = piece.begin; stage < piece.end; stage++, place.step()) {
            const char *src = ring + place.stage * STAGE_BYTES;
            const int n = min(STAGE_STEPS, a.n_steps - stage * STAGE_STEPS);
            float d[N][4] = {};
            uint32_t x[4];

            barrier_wait(&full[place.stage], place.parity);
#pragma unroll
            for (int step = 0; step < STAGE_STEPS; step++) {
                uint4 w;

                if (step >= n)
                    break;
                w = *(const uint4 *)(src + w_at + step * STEP_BYTES);
                if constexpr (KIND == ROW_NORMED) { /* all eight rows of a matrix are the one row */
                    if (step % 2 == 0)              /* of two steps */
                        ldmatrix_x4(x, row + stage * X_ROW_BYTES + step * 32 + lane / 8 * 16);
                    mma_bf16(d[0], &w.x, x[step % 2 * 2], x[step % 2 * 2 + 1]);
                } else {
#pragma unroll
                    for (int g = 0; g < N_GROUPS; g++) {
                        if (g * 16 >= n_rows)
                            continue;
                        ldmatrix_x4(x, src + x_at + g * 16 * X_STRIDE + step * 32);
                        mma_bf16(d[2 * g], &w.x, x[0], x[1]);
                        mma_bf16(d[2 * g + 1], &w.x, x[2], x[3]);
                    }
                }
            }
            __syncwarp();
            if (lane == 0)
                barrier_arrive(&empty[place.stage]);
#pragma unroll
            for (int i = 0; i < N; i++)
#pragma unroll
                for (int c = 0; c < 4; c++)
                    sum[i][c] += d[i][c];
        }
        if (piece.begin > 0) {
            send_sums<N>(p, way.part, warp, n_rows, sum);
            continue;
        }
        if (piece.end < p.stretches.n_stages)
            add_sums<N>(p, stretch_parts_of_tile(p.stretches, piece.tile), warp, n_rows, sum);
        emit<N>(p.out, block, row0, row0 + n_rows, sum, before);
    }
}

template <enum rows_kind KIND>
__global__ static void __launch_bounds__(THREADS, 1) stream(const __grid_constant__ struct args a) {
    extern __shared__ __align__(128) char ring[];
    char *row = ring + n_stages(KIND) * stage_bytes(KIND);
    uint64_t *full = (uint64_t *)(row + (KIND == ROW_NORMED ? ROW_BYTES : 0)), *empty = full + n_stages(KIND);

    if (threadIdx.x == 0) {
        for (int i = 0; i < n_stages(KIND); i++) {
            barrier_init(&full[i], KIND == ROW_NORMED ? 1 : 1 + 32); /* who announces w, and all who copy x */
            barrier_init(&empty[i], CONSUMERS);
        }
        barrier_publish();
    }
    __syncthreads();
    if (threadIdx.x / 32 == CONSUMERS)
        bring<KIND>(a, ring, full, empty);
    else
        multiply<KIND>(a, ring, full, empty, row);
}

/* ---- launch ------------------------------------------------------------------------------------------------------- */

template <enum rows_kind KIND>
static void launch_kind(const struct launch *launch, const struct args *args, int n_items) {
    static_assert(shared_bytes(KIND) <= SHARED_MAX && 2 * shared_bytes(KIND) > SHARED_BYTES, "one CTA fits");
    cudaFuncSetAttribute(stream<KIND>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes(KIND));
    launch_early(launch->stream, stream<KIND>, dim3((unsigned)min_int(n_items, launch->n_multiprocessors)), THREADS,
                 shared_bytes(KIND), *args);
}

void stream_launch(const struct launch *launch, const struct gemm_job *job) {
    struct args args = {};
    float4 *sums = (float4 *)launch->sums;
    int n_items = 0;

    args.x = job->x;
    args.count = job->count;
    args.n_max = job->n_max;
    args.rows_max = STREAM_ROWS;
    args.n_steps = job->products[0].weight->n_steps;
    args.is_early = job->n_max <= STREAM_ROWS; /* else another kernel may be the one that runs */
    args.n_products = job->n_products;
    args.matrix_bytes = job->products[0].weight->matrix_bytes;
    for (int i = 0; i < job->n_products; i++) {
        const struct weight *weight = job->products[i].weight;
        struct product *p = &args.products[i];

        p->w = weight->data;
        p->out = job->products[i].out;
        p->stretches = weight->stretches;
        p->sums = sums;
        sums += SUMS_OF_PRODUCT;
        n_items += weight->stretches.n_parts;
    }
    if (job->groups != NULL) {
        args.n_groups = job->groups->n;
        args.group_expert = job->groups->expert;
        n_items *= job->groups->n_max;
    }
    if (job->rows != NULL) {
        args.rows = *job->rows;
        launch_kind<ROW_NORMED>(launch, &args, n_items);
    } else if (job->groups != NULL || job->n_max <= 16) {
        launch_kind<ROWS_16>(launch, &args, n_items);
    } else if (job->n_max <= 32) {
        launch_kind<ROWS_32>(launch, &args, n_items);
    } else {
        launch_kind<ROWS_64>(launch, &args, n_items);
    }
}
