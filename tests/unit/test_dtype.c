/* Every bf16, f16 and e4m3 value, and roundings to them against a model that searches the nearest value. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>

#include "base.h"
#include "dtype.h"

/* The value of sign|exponent|mantissa bits, by the definition. */
static double value_of(unsigned bits, int n_exp, int n_man, int bias) {
    unsigned man = bits & ((1u << n_man) - 1), exp = bits >> n_man & ((1u << n_exp) - 1),
             sign = bits >> (n_exp + n_man);
    double v = exp == 0 ? ldexp(man, 1 - bias - n_man) : ldexp(man + (double)(1u << n_man), (int)exp - bias - n_man);

    return sign ? -v : v;
}

static void bf16_values_are_exact_and_come_back(void **state) {
    (void)state;
    for (unsigned b = 0; b < 65536; b++) {
        float f = bf16_to_f32((uint16_t)b);

        if ((b & 0x7f80) != 0x7f80)
            assert_true((double)f == value_of(b, 8, 7, 127));
        else
            assert_true((b & 0x7f) == 0 ? isinf(f) : isnan(f));
        if (isnan(f))
            assert_true(isnan(bf16_to_f32(bf16_from_f32(f))));
        else
            assert_int_equal(bf16_from_f32(f), b);
    }
}

static void f16_values_are_exact_and_come_back(void **state) {
    (void)state;
    for (unsigned b = 0; b < 65536; b++) {
        float f = f16_to_f32((uint16_t)b);

        if ((b & 0x7c00) != 0x7c00)
            assert_true((double)f == value_of(b, 5, 10, 15));
        else
            assert_true((b & 0x3ff) == 0 ? isinf(f) : isnan(f));
        if (isnan(f))
            assert_true(isnan(f16_to_f32(f16_from_f32(f))));
        else
            assert_int_equal(f16_from_f32(f), b);
    }
}

static void e4m3_values_are_exact_and_come_back(void **state) {
    (void)state;
    for (unsigned b = 0; b < 256; b++) {
        float f = e4m3_to_f32((uint8_t)b);

        if ((b & 0x7f) == 0x7f) {
            assert_true(isnan(f));
            assert_int_equal(e4m3_from_f32(f) & 0x7f, 0x7f);
        } else {
            assert_true((double)f == value_of(b, 4, 3, 7));
            assert_int_equal(e4m3_from_f32(f), b);
        }
    }
}

/* Around every pair of neighbours: the lower one, just below the middle, the middle, just above it. `count` codes from 0
 * up are finite and ascending; above the last one comes `beyond` (an infinity, or the last one again). */
static void check_rounding(unsigned count, unsigned beyond, float (*to_f32)(unsigned), unsigned (*from_f32)(float),
                           double last_step) {
    for (unsigned b = 0; b < count; b++) {
        double lo = (double)to_f32(b), hi = b + 1 < count ? (double)to_f32(b + 1) : lo + last_step;
        float middle = (float)((lo + hi) / 2);
        unsigned next = b + 1 < count ? b + 1 : beyond;

        assert_int_equal(from_f32((float)lo), b);
        if ((double)middle != (lo + hi) / 2)
            continue; /* below the smallest f32 */
        assert_int_equal(from_f32(nextafterf(middle, 0)), b);
        assert_int_equal(from_f32(middle), b % 2 == 0 ? b : next);
        assert_int_equal(from_f32(nextafterf(middle, INFINITY)), next);
    }
}

static float bf16_up(unsigned b) {
    return bf16_to_f32((uint16_t)b);
}
static unsigned bf16_down(float f) {
    assert_int_equal(bf16_from_f32(-f), bf16_from_f32(f) | 0x8000);
    return bf16_from_f32(f);
}
static float f16_up(unsigned b) {
    return f16_to_f32((uint16_t)b);
}
static unsigned f16_down(float f) {
    assert_int_equal(f16_from_f32(-f), f16_from_f32(f) | 0x8000);
    return f16_from_f32(f);
}
static float e4m3_up(unsigned b) {
    return e4m3_to_f32((uint8_t)b);
}
static unsigned e4m3_down(float f) {
    assert_int_equal(e4m3_from_f32(-f), e4m3_from_f32(f) | 0x80);
    return e4m3_from_f32(f);
}

static void roundings_go_to_the_nearest_and_ties_to_even(void **state) {
    (void)state;
    check_rounding(0x7f80, 0x7f80, bf16_up, bf16_down, 0x1p120);
    check_rounding(0x7c00, 0x7c00, f16_up, f16_down, 32);
    check_rounding(0x7f, 0x7e, e4m3_up, e4m3_down, 32);
}

static void out_of_range_values_become_infinite_or_saturate(void **state) {
    (void)state;
    assert_int_equal(bf16_from_f32(INFINITY), 0x7f80);
    assert_int_equal(bf16_from_f32(-INFINITY), 0xff80);
    assert_int_equal(f16_from_f32(1e30f), 0x7c00);
    assert_int_equal(f16_from_f32(-INFINITY), 0xfc00);
    assert_int_equal(e4m3_from_f32(1e30f), 0x7e);
    assert_int_equal(e4m3_from_f32(-INFINITY), 0xfe);
    assert_int_equal(e4m3_from_f32(1e-30f), 0);
    assert_int_equal(e4m3_from_f32(-1e-30f), 0x80);
    assert_true(isnan(bf16_round(f32_from_bits(0x7f800001u)))); /* a NaN whose upper half is infinity */
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bf16_values_are_exact_and_come_back),
        cmocka_unit_test(f16_values_are_exact_and_come_back),
        cmocka_unit_test(e4m3_values_are_exact_and_come_back),
        cmocka_unit_test(roundings_go_to_the_nearest_and_ties_to_even),
        cmocka_unit_test(out_of_range_values_become_infinite_or_saturate),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
