/* later: a request whose answer takes a worker. A pure function over copies runs in libuv's pool, then the loop answers,
 * unless the client has gone. */
#pragma once
#include <uv.h>

#include "service.h"

struct later {
    struct service *service;
    struct conn *conn; /* NULL: nobody waits, or nobody any more */
    struct later *next;
    uv_work_t work;
    void (*run)(struct later *later);    /* in a worker */
    void (*finish)(struct later *later); /* on the loop, after later_end(); frees what embeds it */
};

/* From now on it hears of the end of the conn. */
void later_begin(struct later *later, struct service *service, struct conn *conn);
void later_start(struct later *later);
void later_end(struct later *later);

void later_conn_closed(struct service *service, struct conn *conn);
