/* gen: one gen.start from its request to its one response.
 *
 *   BUILDING --prompt tokenised, maybe on a worker--> RUNNING --last token, stop string, cancel, ...--> answered, freed
 *       '------- refused, cancelled, gone: an error ------'
 *
 * An error as response means that the request was never admitted; from RUNNING on there is always a result. When the
 * client is gone there is nobody to answer, and all else is the same. */
#pragma once
#include "proto.h"
#include "service.h"

struct gens;

int gens_open(struct service *service, struct gens **ret_gens);
/* Nothing runs any more: gens_end_all() was called, and no worker is out. */
void gens_close(struct gens *gens);

/* Takes the request over. */
void gens_start(struct service *service, struct conn *conn, struct request *request);
/* False: this connection has no such generation. */
bool gens_cancel(struct gens *gens, struct conn *conn, uint32_t id);
/* By the number that gen.list shows. False: this user, or with of_all any user, has no such generation. */
bool gens_cancel_number(struct gens *gens, uid_t uid, bool of_all, uint64_t number);

void gens_conn_slow(struct gens *gens, struct conn *conn);
void gens_conn_congested(struct gens *gens, struct conn *conn, bool is_congested);
void gens_conn_closed(struct gens *gens, struct conn *conn);

/* Heartbeats and deadlines; several times a second. */
void gens_tick(struct gens *gens);
/* Every one that still runs ends now, with this reason. */
void gens_end_all(struct gens *gens, enum proto_finish why);

int gens_count(const struct gens *gens); /* those without a response yet, and workers that are out */
/* The list for gen.list: of one user, or of all. Writes an array. */
void gens_write_list(const struct gens *gens, uid_t uid, bool of_all, struct wire_out *out);
