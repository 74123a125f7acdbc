/* util: small device functions of several op families. */
#pragma once
#include "cuda.cuh"

typedef __nv_bfloat16 bf16;

__device__ static inline float bf16_load(const void *base, size_t i) {
    return __bfloat162float(((const bf16 *)base)[i]);
}
__device__ static inline void bf16_store(void *base, size_t i, float v) {
    ((bf16 *)base)[i] = __float2bfloat16_rn(v);
}
__device__ static inline uint32_t pack_bf16(float low, float high) {
    __nv_bfloat162 v = __floats2bfloat162_rn(low, high);

    return *(uint32_t *)&v;
}
__device__ static inline float2 pair_of(uint32_t raw) { /* low, high */
    return make_float2(__uint_as_float(raw << 16), __uint_as_float(raw & 0xffff0000u));
}
/* In the upper half of a pair it is a float already; and pairs are converted at several times the rate of single values. */
__device__ static inline float round_bf16(float v) {
    return __uint_as_float(pack_bf16(0, v));
}
__device__ static inline float sigmoid(float x) {
    return 1.0f / (1.0f + expf(-x));
}

/* The rows an op has to do: 0 for a batch without segs. */
__device__ static inline int batch_rows(const struct batch &batch) {
    const int n_segs = *batch.n_segs, n_rows = *batch.n_rows; /* both loads at once */

    return n_segs > 0 ? n_rows : 0;
}
__device__ static inline int row_pos(const struct batch &batch, int row) {
    int seg = batch.row_seg[row];

    return batch.seg_pos[seg] + row - batch.seg_row[seg];
}

/* The sum over the lanes of a warp, in every lane, in one order. */
__device__ static inline float warp_sum(float v) {
    for (int m = 16; m > 0; m >>= 1)
        v += __shfl_xor_sync(0xffffffffu, v, m);
    return v;
}

/* The sum over a CTA of n_threads (a multiple of 32), in every thread; `shared` has room for one float per warp. */
__device__ static inline float cta_sum(float v, float *shared, int n_threads) {
    float sum = 0;

    v = warp_sum(v);
    if (threadIdx.x % 32 == 0)
        shared[threadIdx.x / 32] = v;
    __syncthreads();
    for (int i = 0; i < n_threads / 32; i++)
        sum += shared[i];
    __syncthreads();
    return sum;
}

__device__ static inline unsigned shared_address(const void *shared) {
    return (unsigned)__cvta_generic_to_shared(shared);
}

/* ---- asynchronous copies of 16 bytes into shared memory; with bytes 0 the destination is zeroed */
__device__ static inline void copy_async(void *shared, const void *global, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(bytes)
                 : "memory");
}
__device__ static inline void copy_commit(void) {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int N> __device__ static inline void copy_wait(void) { /* until at most N of this thread's groups are out */
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/* d += a . b: a 16x16 row major, b 16x8 column major, both bf16, in the fragment order of mma.m16n8k16. */
__device__ static inline void mma_bf16(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ static inline void ldmatrix_x4(uint32_t r[4], unsigned at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}
__device__ static inline void ldmatrix_x4(uint32_t r[4], const void *shared) {
    ldmatrix_x4(r, shared_address(shared));
}
__device__ static inline void ldmatrix_x4_trans(uint32_t r[4], unsigned at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}
__device__ static inline void ldmatrix_x4_trans(uint32_t r[4], const void *shared) {
    ldmatrix_x4_trans(r, shared_address(shared));
}
/* Of a card from compute capability 9.0 on. */
__device__ static inline void stmatrix_x4_trans(void *shared, const uint32_t r[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(shared_address(shared)),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}
/* Two values as the sum of two bf16 each. */
__device__ static inline void split_bf16(uint32_t *high, uint32_t *low, float a, float b) {
    *high = pack_bf16(a, b);
    *low = pack_bf16(a - __uint_as_float(*high << 16), b - __uint_as_float(*high & 0xffff0000u));
}

/* ---- overlap of two kernels in a row: the first says when the second may begin, and the second, if it was launched so,
 * waits for the first's results before it touches them. The first says so after it has waited itself, and each CTA waits: so
 * when the second begins, everything before the first is there, and may be read before the wait. */
__device__ static inline void may_launch_next(void) {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
__device__ static inline void wait_for_previous(void) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}
/* Launches a kernel so; before wait_for_previous() it touches nothing that the kernel before it may write, and it writes
 * nothing. */
template <typename... PARAMETERS, typename... ARGUMENTS>
static inline void launch_early(cudaStream_t stream, void (*kernel)(PARAMETERS...), dim3 grid, int n_threads,
                                int shared_bytes, const ARGUMENTS &...arguments) {
    cudaLaunchAttribute early = {};
    cudaLaunchConfig_t config = {};

    /* Kernels that run side by side must want shared memory and L1 cache divided alike. */
    cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = grid;
    config.blockDim = (unsigned)n_threads;
    config.dynamicSmemBytes = (size_t)shared_bytes;
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = 1;
    cudaLaunchKernelEx(&config, kernel, arguments...);
}
