/* What a step costs beside the step: calls of the backend that may take their time, and memory, both counted. The linker
 * sends the project's calls of malloc here (--wrap in meson.build); libraries' own are not counted. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "cuts.h"
#include "fake/counting_backend.h"
#include "fake/engine_rig.h"
#include "store.h"

enum { CONTEXT = 512, N_PLACES = 4, N_SEQS = 40, N_STEPS = 1000 };

/* The linker chose these names. NOLINTBEGIN(bugprone-reserved-identifier) */
void *__real_malloc(size_t bytes);
void *__real_calloc(size_t n, size_t bytes);
void *__real_realloc(void *ptr, size_t bytes);
void *__wrap_malloc(size_t bytes);
void *__wrap_calloc(size_t n, size_t bytes);
void *__wrap_realloc(void *ptr, size_t bytes);
/* NOLINTEND(bugprone-reserved-identifier) */

static atomic_int n_allocations;

void *__wrap_malloc(size_t bytes) {
    n_allocations++;
    return __real_malloc(bytes);
}

void *__wrap_calloc(size_t n, size_t bytes) {
    n_allocations++;
    return __real_calloc(n, bytes);
}

void *__wrap_realloc(void *ptr, size_t bytes) {
    n_allocations++;
    return __real_realloc(ptr, bytes);
}

static int n_ended;

static void on_admitted(void *user) {
    (void)user;
}

static void on_progress(void *user, int n_done, int n_total) {
    (void)user, (void)n_done, (void)n_total;
}

static void on_tokens(void *user, const int32_t *tokens, int n, const struct logprob_row *logprobs) {
    (void)user, (void)tokens, (void)n, (void)logprobs;
}

static void on_end(void *user, enum seq_end why) {
    (void)user, (void)why;
    n_ended++;
}

static const struct seq_calls CALLS = {on_admitted, on_progress, on_tokens, on_end};

static struct seq *new_seq(const struct engine_rig *rig, int i) {
    struct seq *seq = seq_new(CONTEXT + BLOCK_ROWS_MAX, 1);

    assert_non_null(seq);
    seq->n_prompt = seq->n_tokens = 20 + i * 37 % 250;
    for (int k = 0; k < seq->n_prompt; k++)
        seq->tokens[k] = (k * (i % 3 + 1)) % 61;
    seq->max_tokens = 100 + i * 13 % 150;
    seq->sample.repetition = i % 2 ? 1 : 1.1f;
    assert_int_equal(kv_store_root(rig->store, 1, &seq->root), 0);
    seq->n_cuts = cuts_find(&(struct cuts_prompt){.n = seq->n_prompt, .n_system = 70, .n_max = 4}, seq->cuts);
    seq->calls = &CALLS;
    return seq;
}

static void a_step_allocates_nothing_and_opens_nothing(void **state) {
    struct backend backend = counting_backend();
    struct engine_rig_options options = engine_rig_roomy(N_PLACES, CONTEXT);
    struct seq *seqs[N_SEQS];
    struct engine_rig_pair pair;
    struct engine_rig rig;
    struct engine_view view;

    (void)state;
    options.n_slots[KV_TARGET_FULL] = 18; /* somebody will have to leave, and restore points too */
    options.n_slots[KV_TARGET_STATE] = 12;
    engine_rig_pair_open(&pair, &backend, &(struct backend_options){.n_threads = 1}, N_PLACES, 256);
    engine_rig_open(&rig, &pair, &options);
    for (int i = 0; i < N_SEQS; i++)
        seqs[i] = new_seq(&rig, i);
    assert_true(n_allocations > N_SEQS); /* they are counted */
    counting_backend_clear();
    n_allocations = 0;
    for (int i = 0; i < N_SEQS; i++)
        assert_int_equal(engine_submit(rig.engine, seqs[i]), 0);
    while (engine_rig_turn(&rig))
        continue;
    assert_int_equal(n_allocations, 0);
    engine_look(rig.engine, &view);
    assert_int_equal(n_ended, N_SEQS);
    assert_true(view.n_plans >= N_STEPS);
    assert_true(view.n_preemptions > 0);
    assert_int_equal(counting_backend_count(COUNTED_MEM_ALLOC), 0);
    assert_int_equal(counting_backend_count(COUNTED_MEM_FREE), 0);
    assert_int_equal(counting_backend_count(COUNTED_WEIGHT_PACK), 0);
    assert_int_equal(counting_backend_count(COUNTED_STREAM_OPEN), 0);
    assert_int_equal(counting_backend_count(COUNTED_EVENT_NEW), 0);
    assert_int_equal(counting_backend_count(COUNTED_PROGRAM_BEGIN), 0);
    assert_int_equal(counting_backend_count(COUNTED_NOTIFY), view.n_plans);
    print_message("%llu plans: %.2f programs, %.2f copies each\n", (unsigned long long)view.n_plans,
                  (double)counting_backend_count(COUNTED_PROGRAM_RUN) / (double)view.n_plans,
                  (double)counting_backend_count(COUNTED_COPY) / (double)view.n_plans);
    engine_rig_check_is_idle(&rig);
    engine_rig_close(&rig);
    engine_rig_pair_close(&pair);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_step_allocates_nothing_and_opens_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
