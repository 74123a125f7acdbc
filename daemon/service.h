/* service: what the handlers of requests share. Wired by main.c; each part's own header says what it is. */
#pragma once
#include "cache_folder.h"
#include "config.h"
#include "log.h"
#include "metrics.h"
#include "pair.h"
#include "session_files.h"
#include "sessions.h"
#include "wire.h"

struct conn;
struct errand;
struct later;
struct reload;
struct request;
struct server;
struct uv_loop_s;

enum { SERVICE_MESSAGE_BYTES_MAX = 256 << 20 };

enum service_phase { SERVICE_LOADING, SERVICE_SERVING, SERVICE_DRAINING };

struct service {
    struct uv_loop_s *loop;
    struct config config;
    struct log log;
    struct metrics metrics;
    struct server *server;
    enum service_phase phase;
    struct pair_progress progress;
    struct pair pair;           /* from SERVING on */
    struct sessions *sessions;  /* from SERVING on */
    struct pressure *pressure;  /* NULL: there is no host tier, or nothing to watch */
    struct tiers *tiers;        /* NULL without a disk tier */
    struct cache_folder folder; /* zero without a disk tier, as are the next ones */
    struct session_names session_names;
    struct session_files *files; /* from SERVING on */
    struct session_files_found sessions_found;
    uint32_t n_sessions_unfit; /* records with tokens that this model does not know */
    struct gens *gens;
    int n_draining;                         /* gens when the end began */
    struct errand *errands;                 /* oldest first */
    int n_prefetches, n_prefetches_waiting; /* on their way; all that are not over */
    struct wire_out out;                    /* of the message at hand */
    uint64_t started_us;
    uint64_t stuck_us;                      /* a device that finishes no plan for so long is stuck */
    void (*drain)(struct service *service); /* as SIGTERM */
    const struct config_source *source;     /* read again by a reload */
    struct later *laters;                   /* requests that workers are at */
    struct reload *reloads;                 /* the first is running */
};

uint64_t service_now_us(void); /* monotonic */

/* What a prompt of n_pages pages would find: tokens from each tier. */
struct found {
    int device, host, disk;
};
struct found service_find(const struct service *service, const struct kv_key *keys, const int32_t *tokens, int n_pages);
/* Writes the map {device, host, disk}. */
void service_write_tiers(struct wire_out *out, struct found found);

/* Work moves, or there is none. */
bool service_is_progressing(const struct service *service);

/* How much of the phase is over. Draining never says 100: the process ends with it. */
int service_percent(const struct service *service);

/* Grows as long as anything comes on: loading, requests, copies between tiers, records of sessions. */
uint64_t service_progress(const struct service *service);

/* Nothing is on its way between device and host. */
bool service_is_quiet(const struct service *service);

/* Brings gauges and totals that others keep up to date. */
void service_update_metrics(struct service *service);

/* Answers or begins one request of a conn; takes the request over. */
void service_request(struct service *service, struct conn *conn, struct request *request);
/* Once a turn: what waits goes on, if its time has come. True: something began, and the turn is not over. */
bool service_turn(struct service *service);
void service_conn_closed(struct service *service, struct conn *conn);
