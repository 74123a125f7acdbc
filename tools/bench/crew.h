/* crew: threads behind the store's work interface, as a daemon has them: items run on any of them, and are done in the
 * thread that dispatches. */
#pragma once
#include "work.h"

struct crew;

int crew_open(int n_threads, struct crew **ret_crew); /* negative errno */
void crew_close(struct crew *crew);                   /* nothing is out; NULL is fine */
struct kv_work crew_work(struct crew *crew);

int crew_fd(const struct crew *crew); /* readable: dispatch */
void crew_dispatch(struct crew *crew);
