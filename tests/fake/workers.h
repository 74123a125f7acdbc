/* workers: threads behind the work interface. Items that have run are done when the test says so, in workers_dispatch(). */
#pragma once
#include <stdint.h>

#include "work.h"

struct workers;

struct workers *workers_new(uint32_t n_threads);
void workers_free(struct workers *workers); /* nothing is out */
struct kv_work workers_interface(struct workers *workers);

/* Calls done() of every item that has run. Returns how many. */
uint32_t workers_dispatch(struct workers *workers);
int workers_fd(const struct workers *workers);         /* readable: dispatch */
uint32_t workers_n_out(const struct workers *workers); /* submitted, not done */

/* The next n submits answer -EAGAIN. */
void workers_refuse(struct workers *workers, uint32_t n);
