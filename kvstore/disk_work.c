/* disk_work: blocking calls on the work interface. For everything where the kernel has no io_uring for us, else for making
 * and removing segments. */
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#include "base.h"
#include "disk_queue.h"

/* The threads have other work too. Calls into a disk that hangs must leave some of them free. */
enum { N_RUNNING_MAX = 3 };

struct call {
    struct kv_work_item item;
    struct disk_work *disk;
    struct disk_request request;
    int result;
    enum { HOME, WAITING, RUNNING, FINISHED } state;
    atomic_bool is_cancelled; /* only a running call asks */
    struct call *next;
};

struct list {
    struct call *first, *last;
};

/*  HOME --start--> WAITING --first in line, < N_RUNNING_MAX--> RUNNING --done--> FINISHED --reap--> HOME
 *                     '-----------------cancelled------------------------------->'                      */
struct disk_work {
    struct disk_queue queue;
    const struct kv_work *work;
    int event_fd;
    struct list waiting, finished;
    uint32_t n_running, n_calls;
    struct call calls[];
};

static void list_add(struct list *list, struct call *call) {
    call->next = NULL;
    if (list->first == NULL)
        list->first = call;
    else
        list->last->next = call;
    list->last = call;
}

static struct call *list_take(struct list *list) {
    struct call *call = list->first;

    if (call != NULL)
        list->first = call->next;
    return call;
}

static void list_remove(struct list *list, const struct call *call) {
    struct list rest = {0};

    for (struct call *each; (each = list_take(list)) != NULL;) {
        if (each != call)
            list_add(&rest, each);
    }
    *list = rest;
}

/* ---- the calls, on any thread ------------------------------------------------------------------------------------ */

int disk_request_run(const struct disk_request *request) {
    off_t offset = (off_t)request->offset;
    ssize_t n = 0;
    int r;

    switch (request->call) {
    case DISK_CALL_READ:
        n = pread(request->fd, request->buffer, request->bytes, offset);
        break;
    case DISK_CALL_WRITE:
        n = pwrite(request->fd, request->buffer, request->bytes, offset);
        break;
    case DISK_CALL_SYNC:
        n = fdatasync(request->fd);
        break;
    case DISK_CALL_DROP:
        return -posix_fadvise(request->fd, offset, request->bytes, POSIX_FADV_DONTNEED);
    case DISK_CALL_CREATE:
        return disk_segment_create(request->folder, request->segment, request->bytes, request->is_direct);
    case DISK_CALL_REMOVE:
        r = disk_segment_remove(request->folder, request->segment);
        if (r == 0)
            close(request->fd);
        return r;
    }
    return n >= 0 ? (int)n : -errno;
}

static void on_run(struct kv_work_item *item) {
    struct call *call = container_of(item, struct call, item);

    call->result = atomic_load(&call->is_cancelled) ? -ECANCELED : disk_request_run(&call->request);
}

/* ---- the queue, on the loop thread ------------------------------------------------------------------------------- */

static void finish(struct disk_work *disk, struct call *call, int result) {
    uint64_t one = 1;
    ssize_t n;

    call->result = result;
    call->state = FINISHED;
    list_add(&disk->finished, call);
    n = write(disk->event_fd, &one, sizeof(one)); /* fails only if it is readable as it is */
    (void)n;
}

static void pump(struct disk_work *disk) {
    while (disk->waiting.first != NULL && disk->n_running < N_RUNNING_MAX) {
        struct call *call = disk->waiting.first;
        int r = disk->work->submit(disk->work->user, &call->item);

        if (r != 0 && disk->n_running > 0)
            return; /* again when one of them is done */
        list_take(&disk->waiting);
        if (r != 0) {
            finish(disk, call, r);
            continue;
        }
        call->state = RUNNING;
        disk->n_running++;
    }
}

static void on_done(struct kv_work_item *item) {
    struct call *call = container_of(item, struct call, item);

    call->disk->n_running--;
    finish(call->disk, call, call->result);
    pump(call->disk);
}

static int work_start(struct disk_queue *queue, const struct disk_request *request) {
    struct disk_work *disk = container_of(queue, struct disk_work, queue);
    struct call *call = &disk->calls[(uint32_t)request->id];

    assert((uint32_t)request->id < disk->n_calls && call->state == HOME);
    call->item = (struct kv_work_item){.run = on_run, .done = on_done};
    call->disk = disk;
    call->request = *request;
    call->state = WAITING;
    atomic_store(&call->is_cancelled, false);
    list_add(&disk->waiting, call);
    pump(disk);
    return 0;
}

static void work_cancel(struct disk_queue *queue, uint64_t id) {
    struct disk_work *disk = container_of(queue, struct disk_work, queue);
    struct call *call = &disk->calls[(uint32_t)id];

    if ((uint32_t)id >= disk->n_calls || call->request.id != id)
        return;
    atomic_store(&call->is_cancelled, true); /* if a thread has not begun with it */
    if (call->state == WAITING) {
        list_remove(&disk->waiting, call);
        finish(disk, call, -ECANCELED);
    }
}

static bool work_reap(struct disk_queue *queue, uint64_t *ret_id, int *ret_result) {
    struct disk_work *disk = container_of(queue, struct disk_work, queue);
    struct call *call;

    pump(disk);
    call = list_take(&disk->finished);
    if (call == NULL)
        return false;
    call->state = HOME;
    *ret_id = call->request.id;
    *ret_result = call->result;
    return true;
}

static void work_set_file(struct disk_queue *queue, uint32_t segment, int fd) {
    (void)queue;
    (void)segment;
    (void)fd;
}

static void work_close(struct disk_queue *queue) {
    struct disk_work *disk = container_of(queue, struct disk_work, queue);

    assert(disk->n_running == 0 && disk->waiting.first == NULL);
    free(disk);
}

static const struct disk_queue_table work_table = {
    .start = work_start,
    .cancel = work_cancel,
    .reap = work_reap,
    .set_file = work_set_file,
    .close = work_close,
};

int disk_work_open(const struct disk_options *options, int event_fd, struct disk_queue **ret_queue) {
    struct disk_work *disk = calloc(1, sizeof(*disk) + options->n_ops_max * sizeof(disk->calls[0]));

    if (disk == NULL)
        return -ENOMEM;
    disk->queue.table = &work_table;
    disk->work = options->work;
    disk->event_fd = event_fd;
    disk->n_calls = options->n_ops_max;
    *ret_queue = &disk->queue;
    return 0;
}
