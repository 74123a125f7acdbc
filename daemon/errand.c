#include "errand.h"

#include <stddef.h>

#include "proto.h"
#include "service.h"

void errand_start(struct errand *errand, struct service *service, struct conn *conn, struct request *request) {
    struct errand **end = &service->errands;

    errand->next = NULL;
    errand->service = service;
    errand->conn = conn;
    errand->request = request;
    while (*end)
        end = &(*end)->next;
    *end = errand;
}

bool errands_turn(struct service *service) {
    struct errand **at = &service->errands;
    bool has_moved = false;

    while (*at) {
        struct errand *errand = *at;

        errand->has_moved = false;
        if (!errand->step(errand)) {
            has_moved |= errand->has_moved;
            at = &errand->next;
            continue;
        }
        has_moved = true;
        *at = errand->next;
        request_free(errand->request);
        errand->free(errand);
    }
    return has_moved;
}

void errands_stop(struct service *service) {
    for (struct errand *errand = service->errands; errand; errand = errand->next)
        errand->is_stopping = true;
}

void errands_conn_closed(struct service *service, struct conn *conn) {
    for (struct errand *errand = service->errands; errand; errand = errand->next)
        if (errand->conn == conn)
            errand->conn = NULL;
}
