/* pipe: copies of whole pieces of memory into shared memory, and the barriers that say when they are there. A barrier's
 * phase ends when as many threads have arrived as it was set up for and as many bytes have come as were announced. */
#pragma once
#include "util.cuh"

__device__ static inline void barrier_init(uint64_t *barrier, int n_arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(n_arrivals) : "memory");
}
/* After all barriers are set up, before __syncthreads(): the copies see them, too. */
__device__ static inline void barrier_publish(void) {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ static inline void barrier_arrive(uint64_t *barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ static inline void barrier_announce(uint64_t *barrier, int bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}
__device__ static inline void barrier_announce_and_arrive(uint64_t *barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}
/* When all copies of copy_async() that this thread has begun are there. */
__device__ static inline void barrier_arrive_when_copied(uint64_t *barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}
/* Until the phase of this parity has ended. */
__device__ static inline void barrier_wait(uint64_t *barrier, unsigned parity) {
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@done bra there;\n"
                 "bra again;\n"
                 "there:\n"
                 "}" ::"r"(shared_address(barrier)),
                 "r"(parity)
                 : "memory");
}

/* The same barrier of a CTA of this cluster. It says that shared memory has been read; stores to global memory it does not
 * order: that would be a wait for all of them. */
__device__ static inline void barrier_arrive_at(uint64_t *barrier, int cta) {
    asm volatile("{\n"
                 ".reg .b32 there;\n"
                 "mapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
                 "}" ::"r"(shared_address(barrier)),
                 "r"(cta)
                 : "memory");
}
/* All threads of the cluster. */
__device__ static inline void cluster_sync(void) {
    asm volatile("barrier.cluster.arrive.release.aligned;\n"
                 "barrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
}

/* Addresses and bytes are multiples of 16. */
__device__ static inline void copy_piece(void *shared, const void *global, int bytes, uint64_t *barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(shared)),
                 "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}
/* The same of what nobody reads again soon: it is the first to leave the L2 cache. */
__device__ static inline void copy_piece_once(void *shared, const void *global, int bytes, uint64_t *barrier) {
    uint64_t policy;

    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], "
        "%4;" ::"r"(shared_address(shared)),
        "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
        : "memory");
}

/* A place in a ring of N stages and the parity of its round. */
template <int N> struct ring_place {
    int stage;
    unsigned parity;

    __device__ void step(void) {
        if (++stage == N) {
            stage = 0;
            parity ^= 1;
        }
    }
};
