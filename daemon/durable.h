/* durable: sessions outlive the process. Joins the sessions with their files: what of a session is written when, and what
 * becomes of the files at the start. Without a disk tier nothing is written, and nothing else changes. */
#pragma once
#include <sys/types.h>

#include "proto.h"
#include "report.h"
#include "session_files.h"

struct service;
struct session;

/* Reads what is kept into the service's sessions, which are open and empty. Blocks; on the thread that loads. -errno with
 * a line. */
int durable_load(struct service *service, struct report *report);
/* Says what was found; from then on sessions are written. On the loop. -ENOMEM. */
int durable_open(struct service *service);
void durable_close(struct service *service); /* nothing is out; before the sessions */

/* The session is new, or has changed. wait: NULL, or who is told when that is on disk, or was tried in vain; false: nothing
 * is to be waited for. */
bool durable_keep(struct service *service, struct session *session, struct session_wait *wait);
/* Drops the session, and its file. wait: NULL, or who is told; false: nothing is to be waited for. */
bool durable_drop(struct service *service, struct session *session, struct session_wait *wait);
/* Why there is no session of this name: NOT_FOUND, or CORRUPT: its record is damaged, or could not be read. The line says
 * what to do. */
enum proto_code durable_missing(const struct service *service, uid_t uid, struct span name, struct report *report);
/* Removes such a record. False: there is none. */
bool durable_drop_damaged(struct service *service, uid_t uid, struct span name, struct session_wait *wait);
/* Where its next turn would go on from, which becomes its restore point: nothing found leaves the one that was seen. That of
 * a parked session says what it was put down with, and so durable_keep() does not look for it. */
void durable_look(const struct service *service, struct session *session);
/* Tokens that could be read back from the disk alone. */
int durable_n_on_disk(const struct service *service, const struct session *session);
/* What it is now is on disk, or will be as far as one knows; of a parked one also what it was put down with. */
bool durable_is(const struct service *service, const struct session *session);

/* What could not be written is tried again now. */
void durable_retry(struct service *service);
/* Sessions whose files are not what they should be, those of closed ones among them; and why: -errno, or 0. */
uint32_t durable_n_unwritten(const struct service *service, int *ret_error);
/* Retries what failed. Returns when to call it next, in microseconds of the monotonic clock; 0: not before something is
 * kept. */
uint64_t durable_tick(struct service *service);
bool durable_is_idle(const struct service *service);
