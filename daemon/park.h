/* park: sessions are put down. Their pages go to the lowest tier there is, and leave the device; their record says so. */
#pragma once
#include <stdbool.h>

struct service;

/* At the end of the process: everything that sessions need to go on goes to the disk, in the order in which they were used
 * last. An errand of nobody; over when there is no more, or it is told to stop. False: nothing is to be done. */
bool park_all_start(struct service *service);
