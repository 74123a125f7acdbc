/* backend_cuda: opens a GPU as a device and fills the backend table: memory, streams, events, copies, notification.
 * CUDA's errors become errno here. A stream of the table is a CUDA stream; nothing here waits on the step path. */
#include "gdn.cuh"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    MAJOR_MIN = 8,          /* compute capability: bf16 matrix units, asynchronous copies */
    WEIGHT_LAYOUT_ID = 102, /* fragments: weight.cuh */
    PAGE_IMAGE_ID = 1,      /* plain rows: backend.h, kv_view */
};

struct stream {
    struct device *device;
    enum stream_kind kind;
    cudaStream_t cuda;
    struct notice *notices; /* ring; a host function reads its own entry */
    unsigned n_notices;
};
struct notice {
    int eventfd;
};
enum { NOTICES_MAX = 1024 }; /* far more than may be out at a time */

struct event {
    struct device *device;
    cudaEvent_t cuda;
};

int cuda_result(struct device *device, cudaError_t error) {
    if (error == cudaSuccess)
        return 0;
    cudaGetLastError(); /* takes an error that is not sticky off the thread */
    if (error == cudaErrorMemoryAllocation)
        return -ENOMEM;
    __atomic_store_n(&device->is_lost, 1, __ATOMIC_RELAXED);
    return -EIO;
}

/* ---- device ------------------------------------------------------------------------------------------------------- */

static void cuda_close(struct device *device) {
    if (device == NULL)
        return;
    cudaFree(device->pack_device);
    cudaFreeHost(device->pack_host);
    if (device->load != NULL)
        cudaStreamDestroy(device->load);
    free(device);
}

/* -ENODEV: no driver or no GPU. -ENOTSUP: a GPU that is too old for this code. */
static int cuda_open(const struct backend_options *options, struct device **ret_device) {
    struct device *device;
    cudaDeviceProp prop;
    int n = 0, r;

    (void)options; /* one numeric mode, no worker threads */
    if (cudaGetDeviceCount(&n) != cudaSuccess || n == 0) {
        cudaGetLastError();
        return -ENODEV;
    }
    if (cudaGetDeviceProperties(&prop, 0) != cudaSuccess)
        return -EIO;
    if (prop.major < MAJOR_MIN || prop.sharedMemPerBlockOptin < SHARED_BYTES)
        return -ENOTSUP;
    device = (struct device *)calloc(1, sizeof *device);
    if (device == NULL)
        return -ENOMEM;
    device->caps.act_dtype = DTYPE_BF16;
    device->caps.conv_dtype = DTYPE_BF16;
    device->caps.open_rows = OPEN_ROWS;
    device->caps.open_inputs = OPEN_INPUTS;
    device->caps.weight_layout_id = WEIGHT_LAYOUT_ID;
    device->caps.page_image_id = PAGE_IMAGE_ID;
    device->caps.n_threads = 1;
    device->is_sm90 = prop.major == 9 && prop.minor == 0;
    device->n_multiprocessors = prop.multiProcessorCount;
    snprintf(device->caps.kernel_path, sizeof device->caps.kernel_path, "cuda-chunk64-%d%d", prop.major, prop.minor);
    r = cuda_result(device, cudaSetDevice(0));
    if (r == 0)
        r = cuda_result(device, cudaStreamCreateWithFlags(&device->load, cudaStreamNonBlocking));
    if (r == 0)
        r = cuda_result(device, cudaHostAlloc(&device->pack_host, PACK_BYTES, cudaHostAllocDefault));
    if (r == 0)
        r = cuda_result(device, cudaMalloc(&device->pack_device, PACK_BYTES));
    if (r < 0) {
        cuda_close(device);
        return r;
    }
    *ret_device = device;
    return 0;
}

static const struct backend_caps *cuda_caps(const struct device *device) {
    return &device->caps;
}

/* A context that broke says so to every call; the loop's timer asks. */
static int cuda_status(const struct device *device) {
    cudaError_t error;

    if (__atomic_load_n(&device->is_lost, __ATOMIC_RELAXED))
        return -EIO;
    error = cudaStreamQuery(device->load);
    return error == cudaSuccess || error == cudaErrorNotReady ? 0 : -EIO;
}

/* ---- memory ------------------------------------------------------------------------------------------------------- */

static int cuda_mem_alloc(struct device *device, enum mem_kind kind, size_t bytes, void **ret_ptr) {
    void *ptr = NULL;
    int r;

    if (bytes == 0)
        bytes = 1;
    if (kind == MEM_HOST) {
        r = cuda_result(device, cudaHostAlloc(&ptr, bytes, cudaHostAllocMapped | cudaHostAllocPortable));
        if (r < 0)
            return r;
        memset(ptr, 0, bytes);
    } else {
        r = cuda_result(device, cudaMalloc(&ptr, bytes));
        if (r < 0)
            return r;
        r = cuda_result(device, cudaMemsetAsync(ptr, 0, bytes, device->load));
        if (r == 0)
            r = cuda_result(device, cudaStreamSynchronize(device->load));
        if (r < 0) {
            cudaFree(ptr);
            return r;
        }
    }
    *ret_ptr = ptr;
    return 0;
}

static void cuda_mem_free(struct device *device, enum mem_kind kind, void *ptr, size_t bytes) {
    (void)device;
    (void)bytes;
    if (kind == MEM_HOST)
        cudaFreeHost(ptr);
    else
        cudaFree(ptr);
}

/* Pinned memory goes as it came: whole. */
static int cuda_mem_discard(struct device *device, enum mem_kind kind, void *ptr, size_t bytes) {
    (void)device;
    (void)kind;
    (void)ptr;
    (void)bytes;
    return -ENOTSUP;
}

/* ---- streams and events ------------------------------------------------------------------------------------------- */

static void cuda_stream_close(struct stream *stream) {
    if (stream == NULL)
        return;
    if (stream->cuda != NULL) {
        cuda_result(stream->device, cudaStreamSynchronize(stream->cuda));
        cudaStreamDestroy(stream->cuda);
    }
    free(stream->notices);
    free(stream);
}

static int cuda_stream_open(struct device *device, enum stream_kind kind, struct stream **ret_stream) {
    struct stream *stream;
    int least, most, r;

    if ((unsigned)kind >= STREAM_KIND_N)
        return -EINVAL;
    stream = (struct stream *)calloc(1, sizeof *stream);
    if (stream == NULL)
        return -ENOMEM;
    stream->device = device;
    stream->kind = kind;
    stream->notices = (struct notice *)calloc(NOTICES_MAX, sizeof *stream->notices);
    r = stream->notices == NULL ? -ENOMEM : cuda_result(device, cudaDeviceGetStreamPriorityRange(&least, &most));
    if (r == 0)
        r = cuda_result(device, cudaStreamCreateWithPriority(&stream->cuda, cudaStreamNonBlocking,
                                                             kind == STREAM_COMPUTE ? most : least));
    if (r < 0) {
        cuda_stream_close(stream);
        return r;
    }
    *ret_stream = stream;
    return 0;
}

static int cuda_event_new(struct device *device, struct event **ret_event) {
    struct event *event = (struct event *)calloc(1, sizeof *event);
    int r;

    if (event == NULL)
        return -ENOMEM;
    event->device = device;
    r = cuda_result(device, cudaEventCreateWithFlags(&event->cuda, cudaEventDisableTiming));
    if (r < 0) {
        free(event);
        return r;
    }
    *ret_event = event;
    return 0;
}

static void cuda_event_free(struct event *event) {
    if (event == NULL)
        return;
    cudaEventDestroy(event->cuda);
    free(event);
}

static int cuda_event_record(struct stream *stream, struct event *event) {
    return cuda_result(stream->device, cudaEventRecord(event->cuda, stream->cuda));
}

static int cuda_event_wait(struct stream *stream, struct event *event) {
    return cuda_result(stream->device, cudaStreamWaitEvent(stream->cuda, event->cuda, 0));
}

/* Nothing on the device tells how long a wait was. */
static int cuda_event_wait_counted(struct stream *stream, struct event *event, uint64_t *n_late) {
    (void)n_late;
    return cuda_event_wait(stream, event);
}

static int cuda_copy(struct stream *stream, void *dst, const void *src, size_t bytes) {
    if (stream->kind == STREAM_NOTIFY)
        return -EINVAL;
    return cuda_result(stream->device, cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, stream->cuda));
}

static void write_eventfd(void *arg) {
    const struct notice *notice = (const struct notice *)arg;
    uint64_t one = 1;
    ssize_t n;

    do
        n = write(notice->eventfd, &one, sizeof one);
    while (n < 0 && errno == EINTR); /* anything else is a bad descriptor: nobody is left to be told */
}

static int cuda_notify(struct stream *stream, int eventfd) {
    struct notice *notice = &stream->notices[stream->n_notices++ % NOTICES_MAX];

    if (eventfd < 0)
        return -EINVAL;
    notice->eventfd = eventfd;
    return cuda_result(stream->device, cudaLaunchHostFunc(stream->cuda, write_eventfd, notice));
}

static int run_parts(struct stream *stream, struct program *program, int part, int part_end) {
    if (stream->kind != STREAM_COMPUTE && stream->kind != STREAM_AUX)
        return -EINVAL;
    return cuda_program_launch(program, stream->device, stream->cuda, part, part_end);
}

static int cuda_program_run(struct stream *stream, struct program *program) {
    return run_parts(stream, program, 0, cuda_program_n_parts(program));
}

static int cuda_program_run_part(struct stream *stream, struct program *program, int part) {
    return run_parts(stream, program, part, part + 1);
}

extern "C" {
extern const struct backend backend_cuda;
const struct backend backend_cuda = {
    .name = "cuda",
    .open = cuda_open,
    .close = cuda_close,
    .caps = cuda_caps,
    .status = cuda_status,

    .mem_alloc = cuda_mem_alloc,
    .mem_free = cuda_mem_free,
    .mem_discard = cuda_mem_discard,

    .weight_pack = cuda_weight_pack,
    .weight_free = cuda_weight_free,
    .weight_bytes = cuda_weight_bytes,

    .stream_open = cuda_stream_open,
    .stream_close = cuda_stream_close,
    .event_new = cuda_event_new,
    .event_free = cuda_event_free,
    .event_record = cuda_event_record,
    .event_wait = cuda_event_wait,
    .event_wait_counted = cuda_event_wait_counted,
    .copy = cuda_copy,
    .notify = cuda_notify,

    .program_begin = cuda_program_begin,
    .program_cut = cuda_program_cut,
    .program_join = cuda_program_join,
    .program_end = cuda_program_end,
    .program_free = cuda_program_free,
    .program_run = cuda_program_run,
    .program_run_part = cuda_program_run_part,

    .embed = cuda_embed,
    .linear = cuda_linear,
    .gdn = cuda_gdn,
    .gdn_commit = cuda_gdn_commit,
    .qk = cuda_qk,
    .attn = cuda_attn,
    .moe = cuda_moe,
    .head = cuda_head,
    .draft_rows = cuda_draft_rows,
    .verify_rows = cuda_verify_rows,
    .prepare = cuda_prepare,
    .draft_kv = cuda_draft_kv,
    .store_rows = cuda_store_rows,
};
}
