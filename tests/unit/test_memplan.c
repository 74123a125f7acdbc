/* The memory plan: figures of known models, what is lowered, what is refused. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "memplan.h"

#define KIB UINT64_C(1024)
#define MIB (KIB * 1024)
#define GIB (MIB * 1024)

/* 16 full layers of 4 KiB a token and 48 delta-net layers; a drafter of 5 sliding layers of 4 kv heads of 128 and one
 * full layer. */
static struct memplan_model model_27b(void) {
    return (struct memplan_model){.slot_bytes = {[KV_TARGET_FULL] = 4 * MIB,
                                                 [KV_TARGET_STATE] = 150 * MIB,
                                                 [KV_DRAFT_FULL] = 128 * KIB,
                                                 [KV_DRAFT_SLIDING] = 640 * KIB},
                                  .window = 2048,
                                  .max_positions = 262144};
}

static struct memplan_limits limits(uint64_t device_bytes) {
    return (struct memplan_limits){
        .device_bytes = device_bytes, .max_seqs = 32, .prefill_chunk = 512, .restore_points = 8};
}

static uint64_t total(const struct memplan *plan) {
    uint64_t sum = (uint64_t)plan->max_seqs * plan->model.open_bytes;

    for (int g = 0; g < KV_GROUP_N; g++)
        sum += memplan_bytes(plan, (enum kv_group)g);
    return sum;
}

static struct memplan accepts(const struct memplan_model *m, const struct memplan_limits *l) {
    struct report report = {""};
    struct memplan plan;

    if (memplan_make(m, l, &plan, &report) != 0)
        fail_msg("%s", report.line);
    assert_true(total(&plan) <= l->device_bytes);
    assert_true((int64_t)(plan.n_slots[KV_TARGET_FULL] - 1) * PAGE_TOKENS >= plan.max_context);
    return plan;
}

static void refuses(const struct memplan_model *m, const struct memplan_limits *l, const char *words) {
    struct report report = {""};
    struct memplan plan;

    assert_int_equal(memplan_make(m, l, &plan, &report), -EINVAL);
    if (!strstr(report.line, words))
        fail_msg("'%s' does not say '%s'", report.line, words);
}

static void a_large_model_on_80_gib_is_divided_as_computed_by_hand(void **state) {
    struct memplan_model m = model_27b();
    struct memplan_limits l = limits(80 * GIB);
    struct memplan plan = accepts(&m, &l);

    (void)state;
    assert_int_equal(plan.max_seqs, 32); /* 64 states of 150 MiB: 9600 MiB of the allowed 20480 */
    assert_int_equal(plan.pages_per_restore_point, 33);
    assert_int_equal(plan.pages_per_seq_sliding, 33 + 8 + 1);
    /* 81920 - 9600 - 1345 * 0.625 - 4.125 MiB = 71475.25; a quarter in units of 150 + 33 * 0.625 MiB */
    assert_int_equal(plan.n_restore_points, 104);
    assert_int_equal(plan.n_slots[KV_TARGET_STATE], 64 + 104);
    assert_int_equal(plan.n_slots[KV_DRAFT_SLIDING], 1 + 32 * 42 + 104 * 33);
    /* 71475.25 - 104 * 170.625 = 53730.25 MiB in pages of 4.125 MiB, and the null page */
    assert_int_equal(plan.n_slots[KV_TARGET_FULL], 13025 + 1);
    assert_int_equal(plan.n_slots[KV_DRAFT_FULL], plan.n_slots[KV_TARGET_FULL]);
    assert_int_equal(plan.max_context, 262144);
    assert_string_equal(plan.notice, "");
    assert_true(l.device_bytes - total(&plan) < 5 * MIB);
}

static void states_over_a_quarter_lower_the_number_of_seqs(void **state) {
    struct memplan_model m = model_27b();
    struct memplan_limits l = limits(24 * GIB);
    struct memplan plan = accepts(&m, &l);

    (void)state;
    assert_int_equal(plan.max_seqs, 20); /* 6144 / 300 */
    assert_non_null(strstr(plan.notice, "sched.max_seqs lowered from 32 to 20"));
    assert_true(plan.n_restore_points >= 40); /* two for each, more than a quarter would give */
}

static void open_chunks_are_in_the_plan(void **state) {
    struct memplan_model m = model_27b();
    struct memplan_limits l = limits(24 * GIB);
    struct memplan plan;
    struct text out;

    (void)state;
    m.open_bytes = 95 * MIB;
    plan = accepts(&m, &l);
    assert_int_equal(plan.max_seqs, 20); /* it is states that may have a quarter */
    assert_true(l.device_bytes - total(&plan) < 5 * MIB);
    text_init(&out, 1 << 16);
    memplan_print(&plan, &out);
    text_add(&out, "", 1);
    assert_non_null(strstr(out.bytes, "1.9 GiB  rows since the last multiple of 64"));
    text_deinit(&out);
    l.max_context = 262144;
    l.device_bytes = 4 * GIB;
    refuses(&m, &l, "2 states of 157286400, an open chunk of 99614720, ");
}

static void the_context_is_what_fits_unless_it_was_asked_for(void **state) {
    struct memplan_model m = model_27b();
    struct memplan_limits l = limits(8 * GIB);
    struct memplan plan = accepts(&m, &l);

    (void)state;
    assert_true(plan.max_context < 262144 && plan.max_context % PAGE_TOKENS == 0);
    assert_int_equal(plan.max_context, (plan.n_slots[KV_TARGET_FULL] - 1) * PAGE_TOKENS);
    assert_non_null(strstr(plan.notice, "context limited to"));

    l.max_context = 65536; /* restore points give way */
    plan = accepts(&m, &l);
    assert_int_equal(plan.max_context, 65536);
    l.max_context = 110000; /* and so do seqs */
    plan = accepts(&m, &l);
    assert_int_equal(plan.max_context, 110000);
    l.max_context = 200000;
    refuses(&m, &l, "one sequence of 200000 tokens needs");
    refuses(&m, &l, "lower limits.max_context");
    l.max_context = 262145;
    refuses(&m, &l, "the model was made for 262144 tokens at most");
}

/* The largest request that the refusal names fits, and not a page more. */
static void the_largest_request_of_a_refusal_fits(void **state) {
    struct memplan_model m = model_27b();
    struct memplan_limits l = limits(4 * GIB);
    struct report report;
    struct memplan plan;
    const char *words;
    int largest = 0;

    (void)state;
    l.max_context = 262144;
    assert_int_equal(memplan_make(&m, &l, &plan, &report), -EINVAL);
    words = strstr(report.line, "fits has ");
    assert_non_null(words);
    assert_int_equal(sscanf(words, "fits has %d tokens", &largest), 1);
    l.max_context = largest;
    plan = accepts(&m, &l);
    assert_int_equal(plan.max_seqs, 1);
    l.max_context = largest + 1;
    refuses(&m, &l, "one sequence");
}

static void more_memory_never_refuses_what_less_allowed(void **state) {
    struct memplan_model m = model_27b();
    struct memplan_limits l = limits(0);
    bool allowed = false;

    (void)state;
    l.max_context = 50000;
    for (uint64_t bytes = 3 * GIB; bytes < 6 * GIB; bytes += 7 * MIB) {
        struct report report;
        struct memplan plan;
        int r;

        l.device_bytes = bytes;
        r = memplan_make(&m, &l, &plan, &report);
        assert_true(r == 0 || !allowed);
        allowed = r == 0;
        assert_true(r != 0 || total(&plan) <= bytes);
    }
    assert_true(allowed);
}

static void groups_that_do_not_exist_get_nothing(void **state) {
    struct memplan_model m = {.slot_bytes = {[KV_TARGET_FULL] = 128 * KIB, [KV_TARGET_STATE] = MIB},
                              .max_positions = 4096};
    struct memplan_limits l = limits(64 * MIB);
    struct memplan plan;

    (void)state;
    plan = accepts(&m, &l);
    assert_int_equal(plan.n_slots[KV_DRAFT_FULL], 0);
    assert_int_equal(plan.n_slots[KV_DRAFT_SLIDING], 0);
    assert_int_equal(plan.max_seqs, 8);
    l.restore_points = 0;
    plan = accepts(&m, &l);
    assert_int_equal(plan.n_restore_points, 0);
    assert_int_equal(plan.n_slots[KV_TARGET_STATE], 16);
    assert_int_equal(plan.n_slots[KV_TARGET_FULL], (64 - 16) * 8);
    m.slot_bytes[KV_TARGET_STATE] = 0;
    plan = accepts(&m, &l);
    assert_int_equal(plan.n_slots[KV_TARGET_STATE], 0);
}

static void with_host_memory_longer_contexts_are_streamed(void **state) {
    struct memplan_model m = model_27b();
    struct memplan_limits l = limits(24 * GIB);
    struct report report = {""};
    struct memplan plan;
    struct text out;

    (void)state;
    m.layer_bytes = m.slot_bytes[KV_TARGET_FULL] / 16;
    l.max_context = 262144;
    l.max_seqs = 4;
    l.host_bytes = 16 * GIB;
    assert_int_equal(memplan_make(&m, &l, &plan, &report), 0);
    assert_int_equal(plan.region_spans, 0); /* 4097 pages of 4.125 MiB and 8 states fit */
    l.device_bytes = 12 * GIB;
    assert_int_equal(memplan_make(&m, &l, &plan, &report), 0);
    assert_int_equal(plan.max_context, 262144);
    assert_int_equal(plan.region_spans, 32); /* 32 * 16 * 256 KiB = 128 MiB, below a 32nd of 12 GiB */
    assert_int_equal(plan.n_slots[KV_DRAFT_FULL], 4096 + 1);
    assert_int_equal(plan.n_host_pages,
                     (16384 - 4096 - 819.2) * 1024 / (4224 + 8)); /* 70 % of it; with the drafter's page, two headers */
    assert_true(total(&plan) + 128 * MIB <= l.device_bytes);
    assert_true(memplan_step_bytes(&plan) >= (uint64_t)(4096 - (plan.n_slots[KV_TARGET_FULL] - 1)) * 4 * MIB);
    text_init(&out, 1 << 16);
    memplan_print(&plan, &out);
    text_add(&out, "", 1);
    assert_non_null(strstr(out.bytes, "128.0 MiB  32768 tokens of one layer"));
    assert_non_null(strstr(out.bytes, "from host memory in each step of the longest"));
    text_deinit(&out);
    l.host_bytes = 4 * GIB; /* not enough: 4 GiB hold some 45 thousand tokens */
    assert_int_equal(memplan_make(&m, &l, &plan, &report), -EINVAL);
    assert_non_null(strstr(report.line, " (with kv.host_bytes "));
    assert_int_equal(sscanf(strstr(report.line, " (with kv.host_bytes "), " (with kv.host_bytes %d", &l.max_context),
                     1);
    assert_int_equal(memplan_make(&m, &l, &plan, &report), 0); /* so many do fit */
    l.max_context = 262144;
    l.host_bytes = 0;
    refuses(&m, &l, "one sequence of 262144 tokens needs");
    l.host_bytes = 4 * GIB;
    l.max_context = 0; /* what both hold */
    assert_int_equal(memplan_make(&m, &l, &plan, &report), 0);
    assert_true(plan.max_context > (plan.n_slots[KV_TARGET_FULL] - 1) * PAGE_TOKENS && plan.max_context < 262144);
    assert_non_null(strstr(plan.notice, "kv.device_bytes and kv.host_bytes hold no more"));
}

static void sums_beyond_64_bits_are_refused_not_wrapped(void **state) {
    struct memplan_model m = model_27b();
    struct memplan_limits l = limits(UINT64_C(64) << 40);

    (void)state;
    m.slot_bytes[KV_TARGET_STATE] = UINT64_MAX / 2;
    refuses(&m, &l, "one sequence of 256 tokens needs 18446744073709551615");
    m = model_27b();
    m.slot_bytes[KV_TARGET_FULL] = UINT64_MAX - 1;
    refuses(&m, &l, "The largest request that fits has 0 tokens");
}

static void the_table_names_every_group_and_limit(void **state) {
    static const char *const words[] = {"target_full",
                                        "833600 tokens",
                                        "32 live, 32 rolling, 104 restore points",
                                        "42 for each sequence, 33 for each restore point",
                                        "after load",
                                        "max_seqs"};
    struct memplan_model m = model_27b();
    struct memplan_limits l = limits(80 * GIB);
    struct memplan plan = accepts(&m, &l);
    struct text out;

    (void)state;
    text_init(&out, 1 << 16);
    memplan_print(&plan, &out);
    text_add(&out, "", 1);
    for (size_t i = 0; i < ARRAY_LEN(words); i++)
        if (!strstr(out.bytes, words[i]))
            fail_msg("no '%s' in\n%s", words[i], out.bytes);
    text_deinit(&out);
}

static void tiers_below_are_named_if_they_are_there(void **state) {
    struct memplan_model m = {.slot_bytes = {[KV_TARGET_FULL] = 60 << 10, [KV_TARGET_STATE] = 124 << 10}};
    struct text out;

    (void)state;
    text_init(&out, 1 << 16);
    memplan_print_below(&m, 0, 0, &out);
    assert_int_equal(out.n, 0);
    memplan_print_below(&m, 256 << 20, 0, &out);
    text_add(&out, "", 1);
    assert_non_null(strstr(out.bytes, "kv.host_bytes"));
    assert_non_null(strstr(out.bytes, "512 restore points")); /* a quarter, of 128 KiB each with its header */
    assert_null(strstr(out.bytes, "kv.disk_bytes"));
    text_clear(&out);
    memplan_print_below(&m, 0, 100 << 20, &out);
    text_add(&out, "", 1);
    assert_non_null(strstr(out.bytes, "76800 tokens, 160 restore points")); /* 75 MiB of 64 KiB, 20 MiB of 128 KiB */
    text_deinit(&out);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_large_model_on_80_gib_is_divided_as_computed_by_hand),
        cmocka_unit_test(states_over_a_quarter_lower_the_number_of_seqs),
        cmocka_unit_test(open_chunks_are_in_the_plan),
        cmocka_unit_test(the_context_is_what_fits_unless_it_was_asked_for),
        cmocka_unit_test(the_largest_request_of_a_refusal_fits),
        cmocka_unit_test(more_memory_never_refuses_what_less_allowed),
        cmocka_unit_test(groups_that_do_not_exist_get_nothing),
        cmocka_unit_test(with_host_memory_longer_contexts_are_streamed),
        cmocka_unit_test(sums_beyond_64_bits_are_refused_not_wrapped),
        cmocka_unit_test(the_table_names_every_group_and_limit),
        cmocka_unit_test(tiers_below_are_named_if_they_are_there),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
