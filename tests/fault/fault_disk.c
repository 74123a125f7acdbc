/* Whatever its calls answer, or when, a disk credits no byte that did not move, ends each operation once, and touches no
 * buffer after it said that it is done. All of it through io_uring and through workers. */
#include "disk_rig.h"

struct mode {
    bool no_ring;
};

static void open_rig(void **state, struct disk_rig *rig) {
    const struct mode *mode = *state;

    rig_make_folder(rig, "/tmp");
    rig->faults = disk_faults_new();
    rig->options.no_ring = mode->no_ring;
    rig->options.wrap = disk_faults_wrap;
    rig->options.wrap_user = rig->faults;
    rig_open_disk(rig);
    if (rig_stats(rig).is_ring == mode->no_ring) {
        rig_free(rig);
        skip(); /* this kernel has no ring for us */
    }
    assert_int_equal(rig_do(rig, rig_op(DISK_SEGMENT_ADD, 0)), 0);
}

static struct rig_op read_into(const struct disk_rig *rig, uint32_t buffer_idx) {
    return rig_transfer(DISK_READ, 0, 0, rig_buffer(rig, buffer_idx), RIG_BUFFER_BYTES);
}

static struct rig_op write_from(const struct disk_rig *rig, uint32_t buffer_idx) {
    return rig_transfer(DISK_WRITE, 0, 0, rig_buffer(rig, buffer_idx), RIG_BUFFER_BYTES);
}

/* Buffer 0 lies on the disk, as content `seed`. */
static void write_content(struct disk_rig *rig, uint32_t seed) {
    rig_fill(rig_buffer(rig, 0), RIG_BUFFER_BYTES, seed);
    assert_int_equal(rig_do(rig, write_from(rig, 0)), 0);
}

static void expect_content(struct disk_rig *rig) {
    memset(rig_buffer(rig, 1), 0x55, RIG_BUFFER_BYTES);
    assert_int_equal(rig_do(rig, read_into(rig, 1)), 0);
    assert_memory_equal(rig_buffer(rig, 0), rig_buffer(rig, 1), RIG_BUFFER_BYTES);
}

static void expect_nothing_out(const struct disk_rig *rig) {
    struct disk_stats stats = rig_stats(rig);

    assert_int_equal(stats.n_out, 0);
    assert_int_equal(stats.n_out_late, 0);
    assert_int_equal(stats.out_late_bytes, 0);
}

/* One operation of each kind that works if no fault is in its way. */
static struct rig_op sample(const struct disk_rig *rig, enum disk_op_kind kind) {
    switch (kind) {
    case DISK_READ:
        return read_into(rig, 2);
    case DISK_WRITE:
        return write_from(rig, 0);
    case DISK_SYNC:
    case DISK_SEGMENT_REMOVE:
        return rig_op(kind, 0);
    case DISK_SEGMENT_ADD:
        break;
    }
    return rig_op(kind, 1);
}

static enum disk_call call_of(enum disk_op_kind kind) {
    static const enum disk_call calls[] = {DISK_CALL_READ, DISK_CALL_WRITE, DISK_CALL_SYNC, DISK_CALL_CREATE,
                                           DISK_CALL_REMOVE};
    return calls[kind];
}

/* ---- errors ------------------------------------------------------------------------------------------------------ */

static void error_of_any_call_is_reported_once_and_not_tried_again(void **state) {
    static const int errors[] = {EIO, ENOSPC, EROFS, EDQUOT, ENOMEM, ENODEV};
    struct disk_rig rig;

    open_rig(state, &rig);
    write_content(&rig, 1);
    for (int kind = DISK_READ; kind <= DISK_SEGMENT_REMOVE; kind++) {
        for (size_t e = 0; e < ARRAY_LEN(errors); e++) {
            uint32_t n_calls = disk_faults_n_calls(rig.faults, call_of(kind));

            disk_faults_add(rig.faults, call_of(kind), (struct disk_fault){.result = -errors[e]});
            assert_int_equal(rig_do(&rig, sample(&rig, kind)), -errors[e]);
            assert_int_equal(disk_faults_n_calls(rig.faults, call_of(kind)), n_calls + 1);
            assert_int_equal(rig_stats(&rig).n_failed[kind], e + 1);
            assert_true(disk_segment_exists(rig.disk, 0));
            assert_false(disk_segment_exists(rig.disk, 1));
        }
    }
    expect_content(&rig); /* also after a removal that failed */
    for (int kind = DISK_READ; kind <= DISK_SEGMENT_REMOVE; kind++)
        assert_int_equal(rig_do(&rig, sample(&rig, kind)), 0);
    expect_nothing_out(&rig);
    rig_free(&rig);
}

static void interrupted_call_is_made_again_until_patience_ends(void **state) {
    static const int errors[] = {EINTR, EAGAIN};
    struct disk_rig rig;

    open_rig(state, &rig);
    write_content(&rig, 2);
    for (size_t e = 0; e < ARRAY_LEN(errors); e++) {
        struct disk_fault fault = {.result = -errors[e]};

        for (int kind = DISK_READ; kind <= DISK_SEGMENT_REMOVE; kind++) {
            uint64_t n_retries = rig_stats(&rig).n_retries;

            disk_faults_always(rig.faults, call_of(kind), fault);
            assert_int_equal(rig_do(&rig, sample(&rig, kind)), -errors[e]);
            assert_int_equal(rig_stats(&rig).n_retries, n_retries + 8);
            disk_faults_always(rig.faults, call_of(kind), (struct disk_fault){0});
            if (kind == DISK_SEGMENT_REMOVE)
                continue;
            disk_faults_add(rig.faults, call_of(kind), fault);
            disk_faults_add(rig.faults, call_of(kind), fault);
            assert_int_equal(rig_do(&rig, sample(&rig, kind)), 0);
            assert_int_equal(rig_stats(&rig).n_retries, n_retries + 10);
        }
        assert_int_equal(rig_do(&rig, rig_op(DISK_SEGMENT_REMOVE, 1)), 0);
    }
    expect_content(&rig);
    expect_nothing_out(&rig);
    rig_free(&rig);
}

static void direct_io_that_is_rejected_makes_the_disk_buffered(void **state) {
    struct disk_fault fault = {.result = -EINVAL};

    for (int kind = DISK_READ; kind <= DISK_SEGMENT_ADD; kind++) {
        struct disk_rig rig;

        open_rig(state, &rig);
        if (!rig_stats(&rig).is_direct) { /* there is nothing to reject */
            rig_free(&rig);
            skip();
        }
        write_content(&rig, 3);
        disk_faults_add(rig.faults, call_of(kind), fault);
        assert_int_equal(rig_do(&rig, sample(&rig, kind)), 0);
        assert_false(rig_stats(&rig).is_direct);
        expect_content(&rig);
        assert_int_equal(rig_do(&rig, rig_op(DISK_SYNC, 0)), 0);
        assert_true(disk_faults_n_calls(rig.faults, DISK_CALL_DROP) >= 2); /* after the read, after the sync */
        disk_faults_add(rig.faults, call_of(kind), fault);                 /* that was not the reason then */
        if (kind == DISK_SEGMENT_ADD)
            assert_int_equal(rig_do(&rig, rig_op(DISK_SEGMENT_ADD, 2)), -EINVAL);
        else
            assert_int_equal(rig_do(&rig, sample(&rig, kind)), -EINVAL);
        expect_content(&rig);
        rig_free(&rig);
    }
}

/* ---- lengths ----------------------------------------------------------------------------------------------------- */

static void short_transfer_is_completed_once_and_exact(void **state) {
    static const uint32_t short_by[] = {
        1, 100, 512, 4096, RIG_BUFFER_BYTES - 4096, RIG_BUFFER_BYTES - 1, RIG_BUFFER_BYTES};
    struct disk_rig rig;

    open_rig(state, &rig);
    for (uint32_t i = 0; i < ARRAY_LEN(short_by); i++) {
        struct disk_fault fault = {.short_by = short_by[i]};

        if (rig_stats(&rig).is_direct && short_by[i] % 4096 != 0)
            continue; /* that call would be rejected; for a buffered disk see below */
        write_content(&rig, 100 + i);
        disk_faults_add(rig.faults, DISK_CALL_READ, fault);
        expect_content(&rig);
        rig_fill(rig_buffer(&rig, 0), RIG_BUFFER_BYTES, 200 + i);
        disk_faults_add(rig.faults, DISK_CALL_WRITE, fault);
        assert_int_equal(rig_do(&rig, write_from(&rig, 0)), 0);
        expect_content(&rig);
    }
    assert_true(rig_stats(&rig).n_short >= 6);
    rig_free(&rig);
}

static void odd_length_is_completed_from_an_aligned_offset(void **state) {
    struct disk_rig rig;

    open_rig(state, &rig);
    write_content(&rig, 5);
    memset(rig_buffer(&rig, 1), 0x55, RIG_BUFFER_BYTES);
    disk_faults_add(rig.faults, DISK_CALL_READ, (struct disk_fault){.result = 4096 + 512}); /* so it claims */
    assert_int_equal(rig_do(&rig, read_into(&rig, 1)), 0);
    assert_memory_equal(rig_buffer(&rig, 0) + 4096, rig_buffer(&rig, 1) + 4096, RIG_BUFFER_BYTES - 4096);
    rig_free(&rig);
}

static void second_short_transfer_is_an_error_and_credits_nothing(void **state) {
    struct disk_rig rig;
    struct disk_stats before, after;

    open_rig(state, &rig);
    write_content(&rig, 6);
    before = rig_stats(&rig);
    for (int i = 0; i < 2; i++) {
        struct disk_fault fault = {.short_by = i == 0 ? 4096 : RIG_BUFFER_BYTES};

        disk_faults_add(rig.faults, DISK_CALL_READ, fault);
        disk_faults_add(rig.faults, DISK_CALL_READ, fault);
        assert_int_equal(rig_do(&rig, read_into(&rig, 1)), -EIO);
        disk_faults_add(rig.faults, DISK_CALL_WRITE, fault);
        disk_faults_add(rig.faults, DISK_CALL_WRITE, fault);
        assert_int_equal(rig_do(&rig, write_from(&rig, 0)), -EIO);
    }
    after = rig_stats(&rig);
    assert_int_equal(after.read_bytes, before.read_bytes);
    assert_int_equal(after.written_bytes, before.written_bytes);
    assert_int_equal(after.n_short, before.n_short + 8);
    expect_content(&rig);
    rig_free(&rig);
}

static void more_than_was_asked_for_is_an_error(void **state) {
    struct disk_rig rig;

    open_rig(state, &rig);
    disk_faults_add(rig.faults, DISK_CALL_READ, (struct disk_fault){.result = RIG_BUFFER_BYTES + 4096});
    assert_int_equal(rig_do(&rig, read_into(&rig, 1)), -EIO);
    disk_faults_add(rig.faults, DISK_CALL_WRITE, (struct disk_fault){.result = RIG_BUFFER_BYTES + 1});
    assert_int_equal(rig_do(&rig, write_from(&rig, 0)), -EIO);
    disk_faults_add(rig.faults, DISK_CALL_SYNC, (struct disk_fault){.result = 1});
    assert_int_equal(rig_do(&rig, rig_op(DISK_SYNC, 0)), -EIO);
    rig_free(&rig);
}

/* ---- time -------------------------------------------------------------------------------------------------------- */

static void late_operation_is_cancelled_and_comes_home_with_timedout(void **state) {
    struct disk_rig rig;
    struct rig_op op;

    open_rig(state, &rig);
    for (int kind = DISK_READ; kind <= DISK_SEGMENT_REMOVE; kind++) {
        op = sample(&rig, kind);
        disk_faults_add(rig.faults, call_of(kind), (struct disk_fault){.is_held = true});
        rig_submit(&rig, &op);
        disk_tick(rig.disk, rig.now_us + RIG_DEADLINE_US - 1);
        assert_int_equal(op.n_late, 0);
        disk_tick(rig.disk, rig.now_us + RIG_DEADLINE_US);
        assert_int_equal(op.n_late, 1);
        assert_int_equal(rig_wait(&rig, &op), -ETIMEDOUT);
        assert_true(op.op.is_late);
        assert_int_equal(op.n_late, 1);
    }
    assert_int_equal(rig_stats(&rig).n_late, 5);
    assert_true(disk_segment_exists(rig.disk, 0));
    expect_nothing_out(&rig);
    rig_free(&rig);
}

static void buffer_of_a_late_read_is_the_kernels_until_done(void **state) {
    struct disk_rig rig;
    struct rig_op op;

    open_rig(state, &rig);
    write_content(&rig, 7);
    memset(rig_buffer(&rig, 1), 0x55, RIG_BUFFER_BYTES);
    op = read_into(&rig, 1);
    disk_faults_add(rig.faults, DISK_CALL_READ, (struct disk_fault){.is_held = true, .is_deaf = true});
    rig_submit(&rig, &op);
    for (int i = 1; i <= 30; i++) { /* half a minute passes */
        rig.now_us += 1000000;
        disk_tick(rig.disk, rig.now_us);
        rig_turn(&rig, 0);
        assert_int_equal(op.n_late, 1);
        assert_int_equal(op.n_done, 0);
        assert_int_equal(rig_stats(&rig).n_out_late, 1);
        assert_int_equal(rig_stats(&rig).out_late_bytes, RIG_BUFFER_BYTES);
    }
    /* Others are not held up. */
    assert_int_equal(rig_do(&rig, read_into(&rig, 2)), 0);
    assert_memory_equal(rig_buffer(&rig, 0), rig_buffer(&rig, 2), RIG_BUFFER_BYTES);
    assert_int_equal((unsigned char)rig_buffer(&rig, 1)[0], 0x55);
    disk_faults_release(rig.faults); /* now the kernel writes into it */
    assert_int_equal(rig_wait(&rig, &op), 0);
    assert_true(op.op.is_late);
    assert_memory_equal(rig_buffer(&rig, 0), rig_buffer(&rig, 1), RIG_BUFFER_BYTES);
    expect_nothing_out(&rig);
    rig_free(&rig);
}

static void late_short_or_interrupted_operation_is_not_tried_again(void **state) {
    static const struct disk_fault faults[] = {{.is_held = true, .is_deaf = true, .short_by = 4096},
                                               {.is_held = true, .is_deaf = true, .result = -EAGAIN},
                                               {.is_held = true, .is_deaf = true, .result = -EINVAL},
                                               {.is_held = true, .is_deaf = true, .result = -EIO}};
    struct disk_rig rig;

    open_rig(state, &rig);
    for (size_t i = 0; i < ARRAY_LEN(faults); i++) {
        struct rig_op op = read_into(&rig, 1);
        uint32_t n_calls = disk_faults_n_calls(rig.faults, DISK_CALL_READ);

        disk_faults_add(rig.faults, DISK_CALL_READ, faults[i]);
        rig_submit(&rig, &op);
        disk_tick(rig.disk, rig.now_us + RIG_DEADLINE_US);
        disk_faults_release(rig.faults);
        assert_int_equal(rig_wait(&rig, &op), -ETIMEDOUT);
        assert_int_equal(disk_faults_n_calls(rig.faults, DISK_CALL_READ), n_calls + 1);
    }
    rig_free(&rig);
}

static void hung_disk_fills_up_and_says_so(void **state) {
    struct disk_rig rig;
    struct rig_op ops[RIG_N_OPS], more;

    open_rig(state, &rig);
    disk_faults_always(rig.faults, DISK_CALL_READ, (struct disk_fault){.is_held = true, .is_deaf = true});
    for (uint32_t i = 0; i < RIG_N_OPS; i++) {
        ops[i] = read_into(&rig, i);
        rig_submit(&rig, &ops[i]);
    }
    disk_tick(rig.disk, rig.now_us + RIG_DEADLINE_US);
    assert_int_equal(rig_stats(&rig).n_out_late, RIG_N_OPS);
    more = read_into(&rig, RIG_N_OPS);
    assert_int_equal(disk_submit(rig.disk, &more.op, rig.now_us), DISK_E_FULL);
    assert_int_equal(disk_close(rig.disk), RIG_N_OPS); /* and the disk is not gone */
    for (uint32_t i = 0; i < RIG_N_OPS; i++)
        assert_int_equal(ops[i].n_done, 0);
    disk_faults_release(rig.faults);
    for (uint32_t i = 0; i < RIG_N_OPS; i++)
        assert_int_equal(rig_wait(&rig, &ops[i]), 0);
    rig_free(&rig);
}

static void tick_says_when_the_next_deadline_is(void **state) {
    struct disk_rig rig;
    struct rig_op a, b;

    open_rig(state, &rig);
    assert_int_equal(disk_tick(rig.disk, rig.now_us), 0);
    disk_faults_always(rig.faults, DISK_CALL_READ, (struct disk_fault){.is_held = true});
    a = read_into(&rig, 1);
    b = read_into(&rig, 2);
    b.op.deadline_us = rig.now_us + 10;
    rig_submit(&rig, &a);
    rig_submit(&rig, &b);
    assert_int_equal(disk_tick(rig.disk, rig.now_us), rig.now_us + 10);
    disk_tick(rig.disk, rig.now_us + 10);
    assert_int_equal(rig_wait(&rig, &b), -ETIMEDOUT);
    assert_int_equal(disk_tick(rig.disk, rig.now_us + 11), rig.now_us + RIG_DEADLINE_US);
    assert_int_equal(a.n_late, 0);
    disk_cancel(rig.disk, &a.op);
    assert_int_equal(rig_wait(&rig, &a), -ECANCELED);
    assert_int_equal(disk_tick(rig.disk, rig.now_us + 12), 0);
    rig_free(&rig);
}

static void lost_wakeup_is_made_up_by_tick(void **state) {
    struct disk_rig rig;
    struct rig_op op;

    open_rig(state, &rig);
    op = read_into(&rig, 1);
    rig_submit(&rig, &op);
    for (int i = 0; op.n_done == 0; i++) {
        uint64_t swallowed;
        ssize_t n = read(disk_fd(rig.disk), &swallowed, sizeof(swallowed));

        (void)n;
        assert_true(i < 1000);
        workers_dispatch(rig.workers);
        usleep(1000);
        disk_tick(rig.disk, rig.now_us);
    }
    assert_int_equal(op.op.result, 0);
    rig_free(&rig);
}

/* ---- cancelling -------------------------------------------------------------------------------------------------- */

static void cancelled_operation_comes_home_before_its_buffer_is_free(void **state) {
    struct disk_rig rig;
    struct rig_op op;

    open_rig(state, &rig);
    write_content(&rig, 8);
    op = read_into(&rig, 1);
    disk_faults_add(rig.faults, DISK_CALL_READ, (struct disk_fault){.is_held = true, .is_deaf = true});
    rig_submit(&rig, &op);
    disk_cancel(rig.disk, &op.op);
    disk_cancel(rig.disk, &op.op);
    rig_turn(&rig, 0);
    assert_int_equal(op.n_done, 0);
    memset(rig_buffer(&rig, 1), 0x55, RIG_BUFFER_BYTES);
    disk_faults_release(rig.faults);
    assert_int_equal(rig_wait(&rig, &op), 0); /* it was faster, and every byte is there */
    assert_memory_equal(rig_buffer(&rig, 0), rig_buffer(&rig, 1), RIG_BUFFER_BYTES);

    op = read_into(&rig, 1);
    disk_faults_add(rig.faults, DISK_CALL_READ, (struct disk_fault){.is_held = true});
    rig_submit(&rig, &op);
    disk_cancel(rig.disk, &op.op);
    assert_int_equal(op.n_done, 0); /* never from inside */
    assert_int_equal(rig_wait(&rig, &op), -ECANCELED);
    assert_int_equal(rig_stats(&rig).n_cancelled, 2);
    expect_nothing_out(&rig);
    rig_free(&rig);
}

static void real_calls_that_are_cancelled_end_once_and_either_way(void **state) {
    struct disk_rig rig;
    struct rig_op ops[RIG_N_OPS];

    open_rig(state, &rig);
    for (int round = 0; round < 50; round++) {
        for (uint32_t i = 0; i < RIG_N_OPS; i++) {
            ops[i] = read_into(&rig, i);
            rig_submit(&rig, &ops[i]);
        }
        for (uint32_t i = RIG_N_OPS; i-- > 0;)
            disk_cancel(rig.disk, &ops[i].op);
        for (uint32_t i = 0; i < RIG_N_OPS; i++) {
            rig_wait(&rig, &ops[i]);
            assert_true(ops[i].op.result == 0 || ops[i].op.result == -ECANCELED);
        }
    }
    expect_nothing_out(&rig);
    assert_int_equal(rig_stats(&rig).n_unknown, 0);
    rig_free(&rig);
}

static void close_cancels_what_waits_and_reports_it(void **state) {
    struct disk_rig rig;
    struct rig_op deaf, waiting;

    open_rig(state, &rig);
    deaf = read_into(&rig, 1);
    waiting = read_into(&rig, 2);
    disk_faults_add(rig.faults, DISK_CALL_READ, (struct disk_fault){.is_held = true, .is_deaf = true});
    disk_faults_add(rig.faults, DISK_CALL_READ, (struct disk_fault){.is_held = true});
    rig_submit(&rig, &deaf);
    rig_submit(&rig, &waiting);
    assert_int_equal(disk_close(rig.disk), 1);
    assert_int_equal(waiting.n_done, 1);
    assert_int_equal(waiting.op.result, -ECANCELED);
    assert_int_equal(deaf.n_done, 0);
    disk_faults_release(rig.faults);
    rig_close_disk(&rig);
    assert_int_equal(deaf.n_done, 1);
    rig_free(&rig);
}

/* ---- completions that lie ---------------------------------------------------------------------------------------- */

static void second_completion_is_counted_and_dropped(void **state) {
    struct disk_rig rig;

    open_rig(state, &rig);
    write_content(&rig, 9);
    for (int kind = DISK_READ; kind <= DISK_SEGMENT_ADD; kind++) {
        struct rig_op op = sample(&rig, kind);

        disk_faults_add(rig.faults, call_of(kind), (struct disk_fault){.n_copies = 2});
        rig_submit(&rig, &op);
        assert_int_equal(rig_wait(&rig, &op), 0);
        rig_turn(&rig, 0);
        assert_int_equal(op.n_done, 1);
        assert_int_equal(rig_stats(&rig).n_unknown, 2 * (kind + 1));
    }
    expect_content(&rig);
    rig_free(&rig);
}

struct chained {
    struct rig_op first, second;
    struct disk_rig *rig;
};

static void submit_second(struct disk_op *op) {
    struct chained *chained = container_of(op, struct chained, first.op);

    chained->first.n_done++;
    chained->second = read_into(chained->rig, 2);
    rig_submit(chained->rig, &chained->second);
}

static void second_completion_never_ends_the_next_tenant_of_its_place(void **state) {
    struct disk_rig rig;
    struct chained chained;

    open_rig(state, &rig);
    chained = (struct chained){.first = read_into(&rig, 1), .rig = &rig};
    chained.first.op.done = submit_second; /* takes the place that has just become free */
    disk_faults_add(rig.faults, DISK_CALL_READ, (struct disk_fault){.n_copies = 3});
    disk_faults_add(rig.faults, DISK_CALL_READ, (struct disk_fault){.is_held = true, .is_deaf = true});
    rig_submit(&rig, &chained.first);
    rig_wait(&rig, &chained.first);
    for (int i = 0; i < 5; i++)
        rig_turn(&rig, 0);
    assert_int_equal(rig_stats(&rig).n_unknown, 3);
    assert_int_equal(chained.second.n_done, 0);
    disk_faults_release(rig.faults);
    assert_int_equal(rig_wait(&rig, &chained.second), 0);
    rig_free(&rig);
}

static void foreign_completion_is_counted_and_dropped(void **state) {
    struct disk_rig rig;
    struct rig_op op;
    uint64_t id;

    open_rig(state, &rig);
    op = read_into(&rig, 1);
    disk_faults_add(rig.faults, DISK_CALL_READ, (struct disk_fault){.is_held = true, .is_deaf = true});
    rig_submit(&rig, &op);
    id = disk_faults_last_id(rig.faults);
    disk_faults_answer(rig.faults, 0);
    disk_faults_answer(rig.faults, UINT64_MAX);
    disk_faults_answer(rig.faults, RIG_N_OPS);
    disk_faults_answer(rig.faults, id + 1);
    disk_faults_answer(rig.faults, id - ((uint64_t)1 << 32)); /* an earlier tenant */
    disk_faults_answer(rig.faults, id + ((uint64_t)1 << 32)); /* a later one */
    rig_turn(&rig, 0);
    assert_int_equal(rig_stats(&rig).n_unknown, 6);
    assert_int_equal(op.n_done, 0);
    disk_faults_release(rig.faults);
    assert_int_equal(rig_wait(&rig, &op), 0);
    rig_free(&rig);
}

static void completions_in_any_order_end_their_own_operation(void **state) {
    struct disk_rig rig;
    struct rig_op ops[RIG_N_OPS];
    uint32_t counter = 0;

    open_rig(state, &rig);
    disk_faults_always(rig.faults, DISK_CALL_WRITE, (struct disk_fault){.is_held = true});
    disk_faults_always(rig.faults, DISK_CALL_READ, (struct disk_fault){.is_held = true});
    disk_faults_reverse(rig.faults, true);
    for (int kind = DISK_WRITE; kind >= DISK_READ; kind--) {
        for (uint32_t i = 0; i < RIG_N_OPS; i++) {
            char *buffer = rig_buffer(&rig, kind == DISK_WRITE ? i : RIG_N_OPS + i);

            if (kind == DISK_WRITE)
                rig_fill(buffer, RIG_BUFFER_BYTES, i);
            ops[i] = rig_transfer(kind, 0, (uint64_t)i * RIG_BUFFER_BYTES, buffer, RIG_BUFFER_BYTES);
            ops[i].counter = &counter;
            rig_submit(&rig, &ops[i]);
        }
        disk_faults_release(rig.faults);
        for (uint32_t i = 0; i < RIG_N_OPS; i++)
            assert_int_equal(rig_wait(&rig, &ops[i]), 0);
    }
    assert_memory_equal(rig_buffer(&rig, 0), rig_buffer(&rig, RIG_N_OPS), (size_t)RIG_N_OPS * RIG_BUFFER_BYTES);
    assert_int_equal(counter, 2 * RIG_N_OPS);
    rig_free(&rig);
}

static void segment_that_was_made_too_late_is_there_all_the_same(void **state) {
    struct disk_rig rig;
    struct rig_op op;

    open_rig(state, &rig);
    op = rig_op(DISK_SEGMENT_ADD, 1);
    disk_faults_add(rig.faults, DISK_CALL_CREATE, (struct disk_fault){.is_held = true, .is_deaf = true});
    rig_submit(&rig, &op);
    disk_tick(rig.disk, rig.now_us + RIG_DEADLINE_US);
    assert_int_equal(op.n_late, 1);
    assert_int_equal(disk_submit(rig.disk, &(struct disk_op){.kind = DISK_SEGMENT_ADD, .segment = 1}, 0), -EBUSY);
    disk_faults_release(rig.faults);
    assert_int_equal(rig_wait(&rig, &op), 0);
    assert_true(disk_segment_exists(rig.disk, 1));
    rig_free(&rig);
}

/* ---- anything at any time ---------------------------------------------------------------------------------------- */

enum { STEPS = 4000, PLACES = RIG_SEGMENT_BYTES / RIG_BUFFER_BYTES };

struct random_op {
    struct rig_op op;
    bool is_out;
    uint32_t place, seed;
};

static uint32_t next_random(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*state >> 33);
}

static struct disk_fault random_fault(uint64_t *random) {
    static const int errors[] = {EIO, EAGAIN, EINTR, ENOSPC, ENOMEM};
    struct disk_fault fault = {0};

    switch (next_random(random) % 8) {
    case 0:
        fault.result = -errors[next_random(random) % ARRAY_LEN(errors)];
        break;
    case 1:
        fault.short_by = 4096 * (1 + next_random(random) % (RIG_BUFFER_BYTES / 4096));
        break;
    case 2:
        fault.n_copies = 1 + next_random(random) % 2;
        break;
    case 3:
        fault.is_held = true;
        fault.is_deaf = next_random(random) % 2;
        break;
    default:
        break;
    }
    return fault;
}

/* A read may return only what the last write of that place left there; after a failed one that is not known. */
static void end_random(struct random_op *mine, uint32_t content[PLACES], char *expected) {
    const struct disk_op *op = &mine->op.op;

    mine->is_out = false;
    assert_int_equal(mine->op.n_done, 1);
    if (op->kind == DISK_WRITE) {
        content[mine->place] = op->result == 0 ? mine->seed : 0;
    } else if (op->result == 0 && content[mine->place] != 0) {
        rig_fill(expected, RIG_BUFFER_BYTES, content[mine->place]);
        assert_memory_equal(op->buffer, expected, RIG_BUFFER_BYTES);
    }
}

static void random_faults_lose_no_operation_and_spoil_no_content(void **state) {
    static char expected[RIG_BUFFER_BYTES];
    struct random_op ops[RIG_N_OPS] = {0};
    uint32_t content[PLACES] = {0}, n_done = 0, n_submitted = 0;
    uint64_t random = 20261130;
    struct disk_rig rig;
    struct disk_stats stats;

    open_rig(state, &rig);
    print_message("seed %llu\n", (unsigned long long)random);
    for (uint32_t step = 0; step < STEPS; step++) {
        uint32_t place = next_random(&random) % PLACES;
        struct random_op *mine = &ops[place]; /* one operation for each place */

        if (!mine->is_out) {
            enum disk_op_kind kind = next_random(&random) % 2 ? DISK_READ : DISK_WRITE;

            *mine = (struct random_op){.is_out = true, .place = place, .seed = step + 1};
            if (kind == DISK_WRITE)
                rig_fill(rig_buffer(&rig, place), RIG_BUFFER_BYTES, step + 1);
            mine->op =
                rig_transfer(kind, 0, (uint64_t)place * RIG_BUFFER_BYTES, rig_buffer(&rig, place), RIG_BUFFER_BYTES);
            disk_faults_add(rig.faults, call_of(kind), random_fault(&random));
            rig_submit(&rig, &mine->op);
            n_submitted++;
        } else if (next_random(&random) % 4 == 0 && mine->op.n_done == 0) {
            disk_cancel(rig.disk, &mine->op.op);
        }
        if (next_random(&random) % 16 == 0)
            disk_faults_release(rig.faults);
        disk_faults_reverse(rig.faults, next_random(&random) % 2);
        rig.now_us += next_random(&random) % (RIG_DEADLINE_US / 8);
        disk_tick(rig.disk, rig.now_us);
        rig_turn(&rig, 0);
        for (uint32_t i = 0; i < RIG_N_OPS; i++) {
            if (ops[i].is_out && ops[i].op.n_done > 0) {
                end_random(&ops[i], content, expected);
                n_done++;
            }
        }
    }
    disk_faults_release(rig.faults);
    for (uint32_t i = 0; i < RIG_N_OPS; i++) {
        if (ops[i].is_out) {
            rig_wait(&rig, &ops[i].op);
            end_random(&ops[i], content, expected);
            n_done++;
        }
    }
    stats = rig_stats(&rig);
    assert_int_equal(n_done, n_submitted);
    assert_int_equal(stats.n_done[DISK_READ] + stats.n_failed[DISK_READ] + stats.n_done[DISK_WRITE] +
                         stats.n_failed[DISK_WRITE],
                     n_done);
    assert_true(stats.n_late > 0 && stats.n_short > 0 && stats.n_unknown > 0 && stats.n_cancelled > 0);
    expect_nothing_out(&rig);
    rig_free(&rig);
}

static int set_ring(void **state) {
    static struct mode ring = {.no_ring = false};

    *state = &ring;
    return 0;
}

static int set_workers(void **state) {
    static struct mode workers = {.no_ring = true};

    *state = &workers;
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(error_of_any_call_is_reported_once_and_not_tried_again),
        cmocka_unit_test(interrupted_call_is_made_again_until_patience_ends),
        cmocka_unit_test(direct_io_that_is_rejected_makes_the_disk_buffered),
        cmocka_unit_test(short_transfer_is_completed_once_and_exact),
        cmocka_unit_test(odd_length_is_completed_from_an_aligned_offset),
        cmocka_unit_test(second_short_transfer_is_an_error_and_credits_nothing),
        cmocka_unit_test(more_than_was_asked_for_is_an_error),
        cmocka_unit_test(late_operation_is_cancelled_and_comes_home_with_timedout),
        cmocka_unit_test(buffer_of_a_late_read_is_the_kernels_until_done),
        cmocka_unit_test(late_short_or_interrupted_operation_is_not_tried_again),
        cmocka_unit_test(hung_disk_fills_up_and_says_so),
        cmocka_unit_test(tick_says_when_the_next_deadline_is),
        cmocka_unit_test(lost_wakeup_is_made_up_by_tick),
        cmocka_unit_test(cancelled_operation_comes_home_before_its_buffer_is_free),
        cmocka_unit_test(real_calls_that_are_cancelled_end_once_and_either_way),
        cmocka_unit_test(close_cancels_what_waits_and_reports_it),
        cmocka_unit_test(second_completion_is_counted_and_dropped),
        cmocka_unit_test(second_completion_never_ends_the_next_tenant_of_its_place),
        cmocka_unit_test(foreign_completion_is_counted_and_dropped),
        cmocka_unit_test(completions_in_any_order_end_their_own_operation),
        cmocka_unit_test(segment_that_was_made_too_late_is_there_all_the_same),
        cmocka_unit_test(random_faults_lose_no_operation_and_spoil_no_content),
    };
    int n_failed = cmocka_run_group_tests_name("io_uring", tests, set_ring, NULL);

    return n_failed + cmocka_run_group_tests_name("workers", tests, set_workers, NULL);
}
