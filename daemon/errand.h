/* errand: a request that takes several turns of the loop before it can be answered, or the same without a request. What it
 * waits for wakes the loop; once a turn it looks whether it can go on. Begins and ends on the loop. */
#pragma once
#include <stdbool.h>

struct conn;
struct errand;
struct request;
struct service;

struct errand { /* embedded in what it is about, which it frees */
    struct errand *next;
    struct service *service;
    struct conn *conn;       /* NULL: nobody waits for an answer, or nobody any more */
    struct request *request; /* owned; NULL: none */
    bool is_stopping;        /* the process ends: it is to be over as soon as it can */
    bool has_moved;          /* a step sets it: something began, so the turn is not over */
    /* True: it is over, and answered if somebody waits. */
    bool (*step)(struct errand *errand);
    void (*free)(struct errand *errand);
};

/* Takes the request over. The first step comes at the end of this turn. */
void errand_start(struct errand *errand, struct service *service, struct conn *conn, struct request *request);
/* True: something began. Then it is to be called again, after all else that a turn does. */
bool errands_turn(struct service *service);
void errands_stop(struct service *service);
void errands_conn_closed(struct service *service, struct conn *conn);
