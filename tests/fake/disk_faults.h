/* disk_faults: faults between a disk and the queues that make its calls. The calls themselves are real.
 *
 *     struct disk_faults *faults = disk_faults_new();
 *     options.wrap = disk_faults_wrap, options.wrap_user = faults;
 *     disk_faults_add(faults, DISK_CALL_READ, (struct disk_fault){.short_by = 4096});
 *
 * A held call has not been made: after release it is, into or out of the buffer that it was given. */
#pragma once
#include "disk_queue.h"

struct disk_faults;

struct disk_fault {    /* all zero: none */
    int result;        /* not 0: the call is not made and ends so */
    uint32_t short_by; /* bytes that the call is asked for less; all: it is not made and ends with 0 */
    uint32_t n_copies; /* of its completion, beside the first */
    bool is_held;      /* until disk_faults_release() */
    bool is_deaf;      /* a held one: to being cancelled */
};

struct disk_faults *disk_faults_new(void);
void disk_faults_free(struct disk_faults *faults); /* after the disk is closed */
struct disk_queue *disk_faults_wrap(void *user, struct disk_queue *queue);

/* For the next call of this kind that has no fault yet. */
void disk_faults_add(struct disk_faults *faults, enum disk_call call, struct disk_fault fault);
uint32_t disk_faults_n_waiting(const struct disk_faults *faults, enum disk_call call); /* that no call has had yet */
/* For every call of this kind without one; all zero: none again. */
void disk_faults_always(struct disk_faults *faults, enum disk_call call, struct disk_fault fault);

void disk_faults_release(struct disk_faults *faults);             /* what is held is made now, the last one first */
void disk_faults_answer(struct disk_faults *faults, uint64_t id); /* a completion of this id, asked for or not */
void disk_faults_reverse(struct disk_faults *faults, bool is_reversed); /* completions: the last one first */

uint32_t disk_faults_n_held(const struct disk_faults *faults);
uint32_t disk_faults_n_calls(const struct disk_faults *faults, enum disk_call call);
uint64_t disk_faults_last_id(const struct disk_faults *faults);
