/* backend_cpu: opens the CPU as a device and fills the backend table. The path of the fast kernels is picked once, here. */
#include "device.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

enum {
    LARGE_PAGE = 2 * 1024 * 1024,
    MAP_BYTES_MIN = LARGE_PAGE / 2, /* smaller blocks come from the heap */
    WEIGHT_LAYOUT_ID = 1,           /* weight.h; part of the cache fingerprint */
    PAGE_IMAGE_ID = 1,              /* plain rows: backend.h, kv_view */
};

/* ---- memory ------------------------------------------------------------------------------------------------------ */

void *cpu_mem_new(size_t bytes) {
    size_t map_bytes = align_up(bytes, LARGE_PAGE);
    char *map, *ptr;

    if (bytes > SIZE_MAX / 2)
        return NULL;
    if (bytes < MAP_BYTES_MIN) {
        ptr = aligned_alloc(64, align_up(bytes > 0 ? bytes : 1, 64));
        if (ptr != NULL)
            memset(ptr, 0, bytes);
        return ptr;
    }
    /* Large pages need an aligned block: map one page more and give both ends back. */
    map =
        mmap(NULL, map_bytes + LARGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED)
        return NULL;
    ptr = map + (-(uintptr_t)map & (LARGE_PAGE - 1));
    if (ptr > map)
        munmap(map, (size_t)(ptr - map));
    munmap(ptr + map_bytes, LARGE_PAGE - (size_t)(ptr - map));
    madvise(ptr, map_bytes, MADV_HUGEPAGE); /* only speed depends on it */
    madvise(ptr, map_bytes, MADV_DONTDUMP); /* what users wrote is not for those who read core dumps */
    return ptr;
}

void cpu_mem_free(void *ptr, size_t bytes) {
    if (ptr == NULL || bytes < MAP_BYTES_MIN)
        free(ptr);
    else
        munmap(ptr, align_up(bytes, LARGE_PAGE));
}

static int cpu_mem_alloc(struct device *device, enum mem_kind kind, size_t bytes, void **ret_ptr) {
    void *ptr = cpu_mem_new(bytes);

    (void)device;
    (void)kind; /* one memory serves both sides */
    if (ptr == NULL)
        return -ENOMEM;
    *ret_ptr = ptr;
    return 0;
}

static void cpu_mem_give(struct device *device, enum mem_kind kind, void *ptr, size_t bytes) {
    (void)device;
    (void)kind;
    cpu_mem_free(ptr, bytes);
}

static int cpu_mem_discard(struct device *device, enum mem_kind kind, void *ptr, size_t bytes) {
    (void)device;
    (void)kind;
    return madvise(ptr, bytes, MADV_DONTNEED) == 0 ? 0 : -errno;
}

/* ---- device ------------------------------------------------------------------------------------------------------ */

static const char *const isa_names[] = {
    [CPU_ISA_SCALAR] = "scalar",
    [CPU_ISA_AVX2] = "avx2",
    [CPU_ISA_AVX512BF16] = "avx512bf16",
    [CPU_ISA_AMX] = "amx",
};

#if defined(__x86_64__)
/* Tiles take a grant of the kernel beside the CPU's word. It holds for the process: threads made later have it too. */
static bool amx_is_granted(void) {
    enum { TILE_BIT = 1 << 24, BF16_BIT = 1 << 22, REQUEST_STATE = 0x1023, TILE_DATA = 18 };
    unsigned a, b, c, d;

    return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & TILE_BIT) != 0 && (d & BF16_BIT) != 0 &&
           syscall(SYS_arch_prctl, REQUEST_STATE, TILE_DATA) == 0;
}
#endif

static bool isa_is_there(enum cpu_isa isa) {
    switch (isa) {
    case CPU_ISA_SCALAR:
        return true;
#if defined(__x86_64__)
    case CPU_ISA_AVX2:
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    case CPU_ISA_AVX512BF16: /* its kernels and those of the other ops may use AVX2 and FMA too */
        return isa_is_there(CPU_ISA_AVX2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512bf16");
    case CPU_ISA_AMX:
        return isa_is_there(CPU_ISA_AVX2) && amx_is_granted();
#else
    case CPU_ISA_AVX2:
    case CPU_ISA_AVX512BF16:
    case CPU_ISA_AMX:
        return false;
#endif
    }
    return false;
}

static int pick_isa(const char *name, enum cpu_isa *ret_isa) {
    for (int i = (int)ARRAY_LEN(isa_names) - 1; i >= 0; i--) {
        if (name != NULL && strcmp(name, isa_names[i]) != 0)
            continue;
        if (isa_is_there((enum cpu_isa)i)) { /* not asked about paths that nobody wants: amx takes a grant */
            *ret_isa = (enum cpu_isa)i;
            return 0;
        }
        if (name != NULL)
            return -ENOTSUP;
    }
    return -EINVAL;
}

static void cpu_close(struct device *device) {
    if (device == NULL)
        return;
    cpu_queue_free(device->queue);
    cpu_workers_free(device->workers);
    free(device);
}

static int cpu_open(const struct backend_options *options, struct device **ret_device) {
    static const char *const numeric_names[] = {
        [NUMERIC_FAST] = "fast", [NUMERIC_BF16] = "bf16", [NUMERIC_REFERENCE] = "reference"};
    struct device *device;
    enum cpu_isa isa;
    int r;

    if ((unsigned)options->numeric >= ARRAY_LEN(numeric_names))
        return -EINVAL;
    r = pick_isa(options->isa, &isa);
    if (r < 0)
        return r;
    device = calloc(1, sizeof *device);
    if (device == NULL)
        return -ENOMEM;
    device->options = *options;
    device->options.isa = isa_names[isa]; /* the caller's string need not outlive this call */
    device->numeric = options->numeric;
    device->isa = isa;
    r = cpu_workers_new(options->n_threads, &device->workers);
    if (r == 0)
        r = cpu_queue_new(device, options->delay_seed, &device->queue);
    if (r < 0) {
        cpu_close(device);
        return r;
    }
    device->caps = (struct backend_caps){
        .act_dtype = DTYPE_F32,
        .conv_dtype = device->numeric == NUMERIC_REFERENCE ? DTYPE_F32 : DTYPE_BF16,
        .weight_layout_id = WEIGHT_LAYOUT_ID,
        .page_image_id = PAGE_IMAGE_ID,
        .n_threads = cpu_workers_count(device->workers),
    };
    /* REFERENCE and BF16 run the same plain C on every CPU. */
    snprintf(device->caps.kernel_path, sizeof device->caps.kernel_path, "cpu-%s-%s",
             device->numeric == NUMERIC_FAST ? isa_names[isa] : "plain", numeric_names[device->numeric]);
    *ret_device = device;
    return 0;
}

static const struct backend_caps *cpu_caps(const struct device *device) {
    return &device->caps;
}

static int cpu_status(const struct device *device) {
    (void)device;
    return 0;
}

const struct backend backend_cpu = {
    .name = "cpu",
    .open = cpu_open,
    .close = cpu_close,
    .caps = cpu_caps,
    .status = cpu_status,

    .mem_alloc = cpu_mem_alloc,
    .mem_free = cpu_mem_give,
    .mem_discard = cpu_mem_discard,

    .weight_pack = cpu_weight_pack,
    .weight_free = cpu_weight_free,
    .weight_bytes = cpu_weight_bytes,

    .stream_open = cpu_stream_open,
    .stream_close = cpu_stream_close,
    .event_new = cpu_event_new,
    .event_free = cpu_event_free,
    .event_record = cpu_event_record,
    .event_wait = cpu_event_wait,
    .event_wait_counted = cpu_event_wait_counted,
    .copy = cpu_copy,
    .notify = cpu_notify,

    .program_begin = cpu_program_begin,
    .program_cut = cpu_program_cut,
    .program_join = cpu_program_join,
    .program_end = cpu_program_end,
    .program_free = cpu_program_free,
    .program_run = cpu_program_run,
    .program_run_part = cpu_program_run_part,

    .embed = cpu_embed,
    .linear = cpu_linear,
    .gdn = cpu_gdn,
    .gdn_commit = cpu_gdn_commit,
    .qk = cpu_qk,
    .attn = cpu_attn,
    .head = cpu_head,
    .draft_rows = cpu_draft_rows,
    .verify_rows = cpu_verify_rows,
    .prepare = cpu_prepare,
    .draft_kv = cpu_draft_kv,
    .store_rows = cpu_store_rows,
    .moe = cpu_moe,
};
