#include "fake/counting_backend.h"

#include <stdatomic.h>

static atomic_uint_fast64_t counts[COUNTED_N];

static const struct backend *cpu(void) {
    return backend_find("cpu");
}

static int counted_mem_alloc(struct device *device, enum mem_kind kind, size_t bytes, void **ret_ptr) {
    counts[COUNTED_MEM_ALLOC]++;
    return cpu()->mem_alloc(device, kind, bytes, ret_ptr);
}

static void counted_mem_free(struct device *device, enum mem_kind kind, void *ptr, size_t bytes) {
    counts[COUNTED_MEM_FREE]++;
    cpu()->mem_free(device, kind, ptr, bytes);
}

static int counted_weight_pack(struct device *device, const struct weight_desc *desc, struct weight **ret_weight) {
    counts[COUNTED_WEIGHT_PACK]++;
    return cpu()->weight_pack(device, desc, ret_weight);
}

static int counted_stream_open(struct device *device, enum stream_kind kind, struct stream **ret_stream) {
    counts[COUNTED_STREAM_OPEN]++;
    return cpu()->stream_open(device, kind, ret_stream);
}

static int counted_event_new(struct device *device, struct event **ret_event) {
    counts[COUNTED_EVENT_NEW]++;
    return cpu()->event_new(device, ret_event);
}

static int counted_program_begin(struct device *device, struct program **ret_program) {
    counts[COUNTED_PROGRAM_BEGIN]++;
    return cpu()->program_begin(device, ret_program);
}

static int counted_program_run(struct stream *stream, struct program *program) {
    counts[COUNTED_PROGRAM_RUN]++;
    return cpu()->program_run(stream, program);
}

static int counted_copy(struct stream *stream, void *dst, const void *src, size_t bytes) {
    counts[COUNTED_COPY]++;
    return cpu()->copy(stream, dst, src, bytes);
}

static int counted_notify(struct stream *stream, int eventfd) {
    counts[COUNTED_NOTIFY]++;
    return cpu()->notify(stream, eventfd);
}

struct backend counting_backend(void) {
    struct backend backend = *cpu();

    backend.mem_alloc = counted_mem_alloc;
    backend.mem_free = counted_mem_free;
    backend.weight_pack = counted_weight_pack;
    backend.stream_open = counted_stream_open;
    backend.event_new = counted_event_new;
    backend.program_begin = counted_program_begin;
    backend.program_run = counted_program_run;
    backend.copy = counted_copy;
    backend.notify = counted_notify;
    return backend;
}

void counting_backend_clear(void) {
    for (int i = 0; i < COUNTED_N; i++)
        counts[i] = 0;
}

uint64_t counting_backend_count(enum counted_call call) {
    return counts[call];
}
