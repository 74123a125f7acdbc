/* tiers: the tiers below the device in the life of the process: when the disk is opened, that each turn of the loop takes them
 * along, what the log and the metrics say of them. What they do is kvstore/'s. */
#pragma once
#include <stdbool.h>

#include "metrics.h"
#include "report.h"

struct kv_share;
struct service;
struct tiers;

/* On the loop, when the pair is loaded. Fine without a disk tier. */
int tiers_open(struct service *service, struct report *report);
/* Before the loop ends: stops what it watches. */
void tiers_stop(struct service *service);
void tiers_free(struct service *service);

/* Once per turn of the loop, after its events. */
void tiers_turn(struct service *service);

/* Nothing is on its way between the tiers that will still end. */
bool tiers_are_quiet(const struct service *service);

void tiers_update_metrics(struct service *service);
void tiers_update_share(struct metrics *metrics, enum metric_tier tier, const struct kv_share *share);
