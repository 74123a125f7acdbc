/* counting_backend: the CPU backend, and how often it was asked for what may take its time. One at a time. */
#pragma once
#include "backend.h"

enum counted_call {
    COUNTED_MEM_ALLOC,
    COUNTED_MEM_FREE,
    COUNTED_WEIGHT_PACK,
    COUNTED_STREAM_OPEN,
    COUNTED_EVENT_NEW,
    COUNTED_PROGRAM_BEGIN,
    COUNTED_PROGRAM_RUN,
    COUNTED_COPY,
    COUNTED_NOTIFY,
    COUNTED_N,
};

struct backend counting_backend(void);
void counting_backend_clear(void);
uint64_t counting_backend_count(enum counted_call call);
