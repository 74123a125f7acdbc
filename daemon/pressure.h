/* pressure: when memory is short in the process's cgroup the host tier gives some of it back, step by step, and takes it
 * again, as slowly, when it has been quiet. Owns the watch and the timer. What may leave is decided here: what is on disk
 * too, or anything that nobody pins where there is no disk.
 *
 *     QUIET --pressure--> SHORT --quiet for a while, all steps taken back--> QUIET */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "shelf.h"
#include "vault.h"

struct uv_loop_s;
struct pressure;

struct pressure_stats {
    bool is_short;
    uint64_t n_events;                 /* since the start */
    uint64_t away_bytes;               /* now: given back to the system */
    uint64_t given_bytes, n_gave_none; /* since the start; events at which there was nothing to give */
};

struct pressure_options {
    struct uv_loop_s *loop;
    int fd; /* in a priority state when memory is short: pressure_trigger(); the pressure's from the start on */
    struct kv_shelf *shelf;
    struct kv_vault *vault; /* NULL: there is no disk */
    uint64_t quiet_ms;      /* without an event, before a step is taken back */
    void (*on_change)(void *user, const struct pressure_stats *stats); /* of is_short */
    void *user;
};

enum { PRESSURE_STEPS = 8 /* of this many parts of the host tier; half of it stays */ };

/* The kernel's word on memory in this process's cgroup, as a file to be armed: /proc/self/cgroup's second version. -ENOENT. */
int pressure_path(char *ret_path, size_t path_bytes);
/* A descriptor for pressure_options.fd, armed; or -errno: the kernel or its rights do not allow it. */
int pressure_trigger(const char *path);

int pressure_start(const struct pressure_options *options, struct pressure **ret_pressure); /* 0 or -errno */
void pressure_stop(
    struct pressure *pressure); /* before the loop ends; NULL is fine. The memory goes with the loop's handles */
/* Once per turn of the loop: a step that waits for the disk to be quiet. */
void pressure_turn(struct pressure *pressure);
void pressure_stats(const struct pressure *pressure, struct pressure_stats *ret_stats);
