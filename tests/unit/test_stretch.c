/* Stretches: every stage of a matrix belongs to one part, and where tiles are cut is the same seen from either side. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base.h"
#include "cuda/stretch.h"

/* Of the matrices of Qwen3.5 0.8B to 27B, and some that fit nothing. */
static const struct stretches shapes[] = {
    {272, 80, 0}, {40, 272, 0}, {128, 80, 0}, {40, 96, 0}, {1940, 80, 0}, {144, 40, 0}, {20, 144, 0},
    {20, 64, 0},  {96, 40, 0},  {1, 80, 0},   {1, 40, 0},  {1, 1, 0},     {1, 3, 0},    {2, 5, 0},
    {7, 13, 0},   {132, 4, 0},  {133, 1, 0},  {5, 4, 0},   {131, 79, 0},  {3, 1000, 0},
};

static void check_parts(struct stretches s) {
    int at = 0;

    assert_int_equal(stretch_begin(s, 0), 0);
    assert_int_equal(stretch_begin(s, s.n_parts), s.n_tiles * s.n_stages);
    for (int part = 0; part < s.n_parts; part++) {
        int begin = stretch_begin(s, part), end = stretch_begin(s, part + 1), n_sent = 0;

        assert_true(begin < end);
        assert_true(end - begin <= (int)div_ceil((uint64_t)s.n_tiles * (uint64_t)s.n_stages, (uint64_t)s.n_parts));
        assert_int_equal(begin, at);
        while (at < end) {
            struct stretch_piece piece = stretch_piece_at(s, at, end);
            struct stretch_parts parts = stretch_parts_of_tile(s, piece.tile);

            assert_int_equal(piece.tile * s.n_stages + piece.begin, at);
            assert_true(piece.begin < piece.end && piece.end <= s.n_stages);
            assert_true(part >= parts.first && part < parts.first + parts.n);
            assert_int_equal(parts.n == 1, piece.begin == 0 && piece.end == s.n_stages);
            assert_int_equal(part == parts.first, piece.begin == 0);
            n_sent += piece.begin > 0;
            for (int stage = piece.begin; stage < piece.end; stage++)
                assert_int_equal(stretch_part_of(s, piece.tile * s.n_stages + stage), part);
            at += piece.end - piece.begin;
        }
        assert_int_equal(at, end);
        assert_true(n_sent <= 1);
    }
}

static void parts_are_even_and_leave_nothing_out(void **state) {
    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(shapes); i++) {
        assert_true(stretches_may_be_even(shapes[i].n_tiles, shapes[i].n_stages));
        check_parts(stretches_even(shapes[i].n_tiles, shapes[i].n_stages));
    }
}

static void whole_tiles_are_not_cut(void **state) {
    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(shapes); i++) {
        struct stretches s = stretches_whole(shapes[i].n_tiles, shapes[i].n_stages);

        check_parts(s);
        for (int tile = 0; tile < s.n_tiles; tile++)
            assert_int_equal(stretch_parts_of_tile(s, tile).n, 1);
    }
}

/* What the kernel of tiles does to find the ends of a tile's chains. */
static void chains_of_a_tile_end_where_parts_begin(void **state) {
    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(shapes); i++) {
        struct stretches s = stretches_even(shapes[i].n_tiles, shapes[i].n_stages);

        for (int tile = 0; tile < s.n_tiles; tile++) {
            struct stretch_parts parts = stretch_parts_of_tile(s, tile);
            int part = parts.first, begin = 0;

            for (; begin < s.n_stages; part++) {
                int end = min_int(s.n_stages, stretch_begin(s, part + 1) - tile * s.n_stages);
                struct stretch_piece piece = stretch_piece_at(s, tile * s.n_stages + begin, stretch_begin(s, part + 1));

                assert_int_equal(piece.end, end);
                assert_int_equal(max_int(0, stretch_begin(s, part) - tile * s.n_stages), begin);
                begin = end;
            }
            assert_int_equal(part, parts.first + parts.n);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(parts_are_even_and_leave_nothing_out),
        cmocka_unit_test(whole_tiles_are_not_cut),
        cmocka_unit_test(chains_of_a_tile_end_where_parts_begin),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
