#include "disk_faults.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "base.h"

enum { N_CALLS = DISK_CALL_REMOVE + 1, SCRIPT_MAX = 64, OUT_MAX = 8192, READY_MAX = 2 * OUT_MAX, N_QUEUES = 2 };

struct completion {
    uint64_t id;
    int result;
};

struct out {
    struct disk_request request;
    struct disk_fault fault;
    bool is_held;
};

struct faulty {
    struct disk_queue queue;
    struct disk_queue *inner;
    struct disk_faults *faults;
    struct out out[OUT_MAX]; /* by the low half of the id */
    struct completion ready[READY_MAX];
    uint32_t n_ready;
};

struct disk_faults {
    struct disk_fault script[N_CALLS][SCRIPT_MAX], always[N_CALLS];
    uint32_t n_script[N_CALLS], n_played[N_CALLS], n_calls[N_CALLS];
    bool is_reversed;
    uint64_t last_id;
    struct faulty *queues[N_QUEUES];
    uint32_t n_queues;
};

static void need(bool claim, const char *text) {
    if (!claim) {
        fprintf(stderr, "disk_faults: not so: %s\n", text);
        abort();
    }
}

static void answer(struct faulty *faulty, uint64_t id, int result) {
    need(faulty->n_ready < READY_MAX, "there is room for a completion");
    faulty->ready[faulty->n_ready++] = (struct completion){id, result};
}

/* ---- the queue --------------------------------------------------------------------------------------------------- */

static int make(struct faulty *faulty, const struct out *out) {
    struct disk_request request = out->request;

    if (out->fault.result != 0 || (out->fault.short_by > 0 && out->fault.short_by >= request.bytes)) {
        for (uint32_t i = 0; i <= out->fault.n_copies; i++)
            answer(faulty, request.id, out->fault.result);
        return 0;
    }
    request.bytes -= out->fault.short_by;
    return faulty->inner->table->start(faulty->inner, &request);
}

static int faulty_start(struct disk_queue *queue, const struct disk_request *request) {
    struct faulty *faulty = container_of(queue, struct faulty, queue);
    struct disk_faults *faults = faulty->faults;
    struct out *out = &faulty->out[(uint32_t)request->id];
    enum disk_call call = request->call;

    need((uint32_t)request->id < OUT_MAX, "an id is in range");
    *out = (struct out){.request = *request, .fault = faults->always[call]};
    if (faults->n_played[call] < faults->n_script[call])
        out->fault = faults->script[call][faults->n_played[call]++];
    faults->n_calls[call]++;
    faults->last_id = request->id;
    out->is_held = out->fault.is_held;
    return out->is_held ? 0 : make(faulty, out);
}

static void faulty_cancel(struct disk_queue *queue, uint64_t id) {
    struct faulty *faulty = container_of(queue, struct faulty, queue);
    struct out *out = &faulty->out[(uint32_t)id];

    if (!out->is_held) {
        faulty->inner->table->cancel(faulty->inner, id);
    } else if (!out->fault.is_deaf && out->request.id == id) {
        out->is_held = false;
        answer(faulty, id, -ECANCELED);
    }
}

static void take_inner(struct faulty *faulty) {
    uint64_t id;
    int result;

    while (faulty->inner->table->reap(faulty->inner, &id, &result)) {
        const struct out *out = &faulty->out[(uint32_t)id];

        for (uint32_t i = 0; i <= out->fault.n_copies; i++)
            answer(faulty, id, result);
    }
}

static bool faulty_reap(struct disk_queue *queue, uint64_t *ret_id, int *ret_result) {
    struct faulty *faulty = container_of(queue, struct faulty, queue);
    struct completion first;

    take_inner(faulty);
    if (faulty->n_ready == 0)
        return false;
    if (faulty->faults->is_reversed) {
        first = faulty->ready[--faulty->n_ready];
    } else {
        first = faulty->ready[0];
        faulty->n_ready--;
        for (uint32_t i = 0; i < faulty->n_ready; i++)
            faulty->ready[i] = faulty->ready[i + 1];
    }
    *ret_id = first.id;
    *ret_result = first.result;
    return true;
}

static void faulty_set_file(struct disk_queue *queue, uint32_t segment, int fd) {
    struct faulty *faulty = container_of(queue, struct faulty, queue);

    faulty->inner->table->set_file(faulty->inner, segment, fd);
}

static void faulty_close(struct disk_queue *queue) {
    struct faulty *faulty = container_of(queue, struct faulty, queue);

    faulty->inner->table->close(faulty->inner);
}

static const struct disk_queue_table faulty_table = {
    .start = faulty_start,
    .cancel = faulty_cancel,
    .reap = faulty_reap,
    .set_file = faulty_set_file,
    .close = faulty_close,
};

struct disk_queue *disk_faults_wrap(void *user, struct disk_queue *queue) {
    struct disk_faults *faults = user;
    struct faulty *faulty = calloc(1, sizeof(*faulty));

    need(faulty != NULL && faults->n_queues < N_QUEUES, "a queue can be wrapped");
    faulty->queue.table = &faulty_table;
    faulty->inner = queue;
    faulty->faults = faults;
    faults->queues[faults->n_queues++] = faulty;
    return &faulty->queue;
}

/* ---- what a test says -------------------------------------------------------------------------------------------- */

struct disk_faults *disk_faults_new(void) {
    struct disk_faults *faults = calloc(1, sizeof(*faults));

    need(faults != NULL, "there is memory");
    return faults;
}

void disk_faults_free(struct disk_faults *faults) {
    for (uint32_t i = 0; i < faults->n_queues; i++)
        free(faults->queues[i]);
    free(faults);
}

void disk_faults_add(struct disk_faults *faults, enum disk_call call, struct disk_fault fault) {
    if (faults->n_script[call] == faults->n_played[call])
        faults->n_script[call] = faults->n_played[call] = 0;
    need(faults->n_script[call] < SCRIPT_MAX, "there is room for a fault");
    faults->script[call][faults->n_script[call]++] = fault;
}

uint32_t disk_faults_n_waiting(const struct disk_faults *faults, enum disk_call call) {
    return faults->n_script[call] - faults->n_played[call];
}

void disk_faults_always(struct disk_faults *faults, enum disk_call call, struct disk_fault fault) {
    faults->always[call] = fault;
}

void disk_faults_release(struct disk_faults *faults) {
    for (uint32_t q = 0; q < faults->n_queues; q++) {
        struct faulty *faulty = faults->queues[q];

        for (uint32_t i = OUT_MAX; i-- > 0;) {
            int r;

            if (!faulty->out[i].is_held)
                continue;
            faulty->out[i].is_held = false;
            r = make(faulty, &faulty->out[i]);
            if (r != 0)
                answer(faulty, faulty->out[i].request.id, r);
        }
    }
}

void disk_faults_answer(struct disk_faults *faults, uint64_t id) {
    answer(faults->queues[0], id, 0);
}

void disk_faults_reverse(struct disk_faults *faults, bool is_reversed) {
    faults->is_reversed = is_reversed;
}

uint32_t disk_faults_n_held(const struct disk_faults *faults) {
    uint32_t n = 0;

    for (uint32_t q = 0; q < faults->n_queues; q++) {
        for (uint32_t i = 0; i < OUT_MAX; i++)
            n += faults->queues[q]->out[i].is_held;
    }
    return n;
}

uint32_t disk_faults_n_calls(const struct disk_faults *faults, enum disk_call call) {
    return faults->n_calls[call];
}

uint64_t disk_faults_last_id(const struct disk_faults *faults) {
    return faults->last_id;
}
