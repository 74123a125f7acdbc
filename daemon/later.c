#include "later.h"

#include <assert.h>

void later_begin(struct later *later, struct service *service, struct conn *conn) {
    later->service = service;
    later->conn = conn;
    later->next = service->laters;
    service->laters = later;
}

static void on_work(uv_work_t *work) {
    struct later *later = work->data;

    later->run(later);
}

static void on_worked(uv_work_t *work, int status) {
    struct later *later = work->data;

    (void)status; /* nobody calls uv_cancel */
    later->finish(later);
}

void later_start(struct later *later) {
    int r;

    later->work.data = later;
    r = uv_queue_work(later->service->loop, &later->work, on_work, on_worked);
    assert(r == 0); /* it fails without a function only */
}

void later_end(struct later *later) {
    struct later **at = &later->service->laters;

    while (*at != later)
        at = &(*at)->next;
    *at = later->next;
}

void later_conn_closed(struct service *service, struct conn *conn) {
    for (struct later *later = service->laters; later; later = later->next)
        if (later->conn == conn)
            later->conn = NULL;
}
