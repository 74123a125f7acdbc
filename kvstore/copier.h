/* copier: how the store asks for copies between device and pinned memory. The process fills it with its device thread: the
 * store itself never meets a stream. */
#pragma once
#include "backend.h"

enum { KV_COPIES_MAX = 32 }; /* of one batch */

enum kv_copy_direction { KV_COPY_SPILL, KV_COPY_FETCH, KV_COPY_DIRECTION_N }; /* down from the device, up to it */

struct kv_transfer {
    void *dst;
    const void *src;
    size_t bytes;
};

/* A batch; embedded in who waits for it. Batches of one direction run in order, and copies inside a batch in any order. */
struct kv_copy_batch {
    enum kv_copy_direction direction;
    int n;
    struct kv_transfer transfers[KV_COPIES_MAX];
    int result;                                /* 0 or a negative errno, before done is called */
    void (*done)(struct kv_copy_batch *batch); /* on the loop, never from inside submit */
    struct kv_copy_batch *next;                /* the copier's */
};

struct kv_copier {
    int (*submit)(void *user, struct kv_copy_batch *batch); /* 0: done will come. -errno: it will not */
    void *user;
};
