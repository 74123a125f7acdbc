/* stretch: which part of a matrix each CTA of the kernel for few rows reads. Pure; C and CUDA.
 *
 * A matrix is n_tiles tiles of n_stages stages of K each, one tile after the other. This row of stages is cut into n_parts
 * stretches of equal length, within one stage. Where a cut falls inside a tile, the tile's sums over K are cut there, in
 * every kernel: so the cuts are a function of the matrix's shape alone. */
#pragma once
#include <stdbool.h>
#include <stdint.h>

#ifdef __CUDACC__
#define STRETCH_FN __host__ __device__ static inline
#else
#define STRETCH_FN static inline
#endif

enum {
    STRETCH_CTAS = 132,    /* multiprocessors of the card this is cut for */
    STRETCH_STAGES_MIN = 4 /* a shorter stretch costs more in sums than it saves */
};

struct stretches {
    int n_tiles, n_stages, n_parts;
};

/* Each tile whole: for matrices of which only some are used, and by how many rows is not known. */
STRETCH_FN struct stretches stretches_whole(int n_tiles, int n_stages) {
    struct stretches s = {n_tiles, n_stages, n_tiles};

    return s;
}
STRETCH_FN struct stretches stretches_even(int n_tiles, int n_stages) {
    int n = n_tiles * n_stages / STRETCH_STAGES_MIN;
    struct stretches s = {n_tiles, n_stages, n < 1 ? 1 : n > STRETCH_CTAS ? STRETCH_CTAS : n};

    return s;
}
/* Numbers fit 32 bits: the device divides no longer ones. */
STRETCH_FN bool stretches_may_be_even(int n_tiles, int n_stages) {
    return (int64_t)n_tiles * n_stages < INT32_MAX / STRETCH_CTAS;
}

/* The first stage of a part; of part n_parts, the end. */
STRETCH_FN int stretch_begin(struct stretches s, int part) {
    return s.n_parts == s.n_tiles ? part * s.n_stages
                                  : (int)((unsigned)(part * s.n_tiles * s.n_stages) / (unsigned)s.n_parts);
}
STRETCH_FN int stretch_part_of(struct stretches s, int stage) {
    return s.n_parts == s.n_tiles ? stage / s.n_stages
                                  : (int)((unsigned)((stage + 1) * s.n_parts - 1) / (unsigned)(s.n_tiles * s.n_stages));
}

struct stretch_parts { /* that have a share of a tile */
    int first, n;
};
STRETCH_FN struct stretch_parts stretch_parts_of_tile(struct stretches s, int tile) {
    struct stretch_parts parts;

    parts.first = stretch_part_of(s, tile * s.n_stages);
    parts.n = stretch_part_of(s, (tile + 1) * s.n_stages - 1) - parts.first + 1;
    return parts;
}

/* What a part has of one tile: stages [begin, end) of it. Only the first of a part's pieces may begin inside its tile. */
struct stretch_piece {
    int tile, begin, end;
};
/* `at`: a stage of the part, not yet done, and first stage of the piece; the piece after it begins at `at` + its length. */
STRETCH_FN struct stretch_piece stretch_piece_at(struct stretches s, int at, int part_end) {
    struct stretch_piece piece;
    int left;

    piece.tile = at / s.n_stages;
    piece.begin = at % s.n_stages;
    left = s.n_stages - piece.begin;
    piece.end = piece.begin + (left < part_end - at ? left : part_end - at);
    return piece;
}
