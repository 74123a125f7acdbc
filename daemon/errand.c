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

void errands_turn(struct service *service) {
    struct errand **at = &service->errands;

    while (*at) {
        struct errand *errand = *at;

        if (!errand->step(errand)) {
            at = &errand->next;
            continue;
        }
        *at = errand->next;
        request_free(errand->request);
        errand->free(errand);
    }
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
