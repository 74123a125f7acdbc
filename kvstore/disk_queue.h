/* disk_queue: one way of having a file call made. Takes a request, gives back its id and the call's result, in any order.
 * It retries, times and counts nothing: that is disk.c, over each queue alike. Internal to disk*.c and their tests. */
#pragma once
#include "disk.h"

enum disk_call {
    DISK_CALL_READ,
    DISK_CALL_WRITE,
    DISK_CALL_SYNC,
    DISK_CALL_DROP,   /* forgets cached pages; bytes 0: to the end */
    DISK_CALL_CREATE, /* result: the descriptor */
    DISK_CALL_REMOVE, /* the name, and the descriptor if it succeeds */
};

struct disk_request {
    uint64_t id; /* never 0. The low half is < n_calls_max and no other request out has it */
    enum disk_call call;
    uint32_t segment;
    int fd;
    uint64_t offset;
    void *buffer;
    uint32_t bytes; /* of a segment to create: its size */
    const struct disk_folder *folder;
    bool is_direct;
};

struct disk_queue;
struct disk_queue_table {
    int (*start)(struct disk_queue *queue, const struct disk_request *request); /* -errno: no result will come */
    void (*send)(struct disk_queue *queue); /* what was started and waits for it, or for reap; NULL: nothing does */
    void (*cancel)(struct disk_queue *queue,
                   uint64_t id); /* its result comes, sooner if that can be. Unknown: nothing */
    bool (*reap)(struct disk_queue *queue, uint64_t *ret_id, int *ret_result); /* false: none now */
    void (*set_file)(struct disk_queue *queue, uint32_t segment, int fd);      /* -1: no such segment any more */
    void (*forget_buffers)(struct disk_queue *queue); /* unregisters them; nothing is out. NULL: it knows none */
    void (*close)(struct disk_queue *queue);          /* nothing is out */
};

struct disk_queue {
    const struct disk_queue_table *table;
};

/* Kept up to date by the queue. */
struct disk_uring_facts {
    bool has_registered_files, has_registered_buffers;
    int buffers_error;
};

/* Each makes event_fd readable when there is something to reap, and has no more than n_calls_max requests out. */
int disk_uring_open(const struct disk_options *options, uint32_t n_calls_max, int event_fd,
                    struct disk_uring_facts *facts,
                    struct disk_queue **ret_queue); /* knows neither CREATE nor REMOVE */
int disk_work_open(const struct disk_options *options, uint32_t n_calls_max, int event_fd,
                   struct disk_queue **ret_queue);

/* The call itself, blocking. Returns its result or -errno. */
int disk_request_run(const struct disk_request *request);
