/* reload: the configuration is read again in a worker, and what may change at run time is taken over. One after the
 * other, in the order in which they were asked for, so that an older file never replaces a newer one. */
#pragma once
#include "service.h"

/* For SIGHUP: conn and request NULL. Takes the request over; done may be NULL. */
void reload_start(struct service *service, struct conn *conn, struct request *request,
                  void (*done)(struct service *service));
