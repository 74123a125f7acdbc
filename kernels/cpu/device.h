/* device: what the machinery of the CPU backend (workers, streams, programs, memory) offers to backend_cpu.c and to its
 * unit tests. Ops include cpu.h only. */
#pragma once
#include "cpu.h"

/* ---- backend_cpu.c: zeroed, 64-byte aligned; large blocks on large pages. NULL without memory. */
void *cpu_mem_new(size_t bytes);
void cpu_mem_free(void *ptr, size_t bytes);

/* ---- workers.c. n_threads 0: one per physical core this process may use. The threads sleep when nothing runs. */
int cpu_workers_new(int n_threads, struct cpu_workers **ret_workers);
void cpu_workers_free(struct cpu_workers *workers);
int cpu_workers_count(const struct cpu_workers *workers);
/* Makes the calling thread worker 0, the one that may call cpu_workers_run. */
void cpu_workers_enter(struct cpu_workers *workers);
void cpu_workers_run(struct cpu_workers *workers, cpu_task_fn *fn, void *arg);

/* ---- stream.c. delay_seed: see backend_options. */
int cpu_queue_new(struct device *device, uint64_t delay_seed, struct cpu_queue **ret_queue);
void cpu_queue_free(struct cpu_queue *queue); /* after all streams are closed */
/* Runs fn on the compute thread, where cpu_parallel may be used, and returns when it is done. */
void cpu_queue_call(struct cpu_queue *queue, void (*fn)(void *arg), void *arg);

int cpu_stream_open(struct device *device, enum stream_kind kind, struct stream **ret_stream);
void cpu_stream_close(struct stream *stream);
int cpu_event_new(struct device *device, struct event **ret_event);
void cpu_event_free(struct event *event);
int cpu_event_record(struct stream *stream, struct event *event);
int cpu_event_wait(struct stream *stream, struct event *event);
int cpu_event_wait_counted(struct stream *stream, struct event *event, uint64_t *n_late);
int cpu_copy(struct stream *stream, void *dst, const void *src, size_t bytes);
int cpu_notify(struct stream *stream, int eventfd);
int cpu_program_run(struct stream *stream, struct program *program);
int cpu_program_run_part(struct stream *stream, struct program *program, int part);

/* ---- program.c */
int cpu_program_begin(struct device *device, struct program **ret_program);
int cpu_program_cut(struct program *program);
int cpu_program_join(struct program *program);
int cpu_program_end(struct program *program);
void cpu_program_free(struct program *program);
int cpu_program_n_parts(const struct program *program); /* 0 until program_end succeeded */
void cpu_program_replay(struct program *program, int part,
                        int part_end); /* parts [part, part_end); compute thread only */

/* ---- weight.c */
int cpu_weight_pack(struct device *device, const struct weight_desc *desc, struct weight **ret_weight);
void cpu_weight_free(struct device *device, struct weight *weight);
size_t cpu_weight_bytes(const struct weight *weight);
