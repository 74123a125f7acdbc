/* depot: the disk tier without a daemon: a shelf and a vault of our own in a folder, and chains of made-up pages with a
 * restore point at the end of each, which lie on the shelf, on disk, or on both. One thread. */
#pragma once
#include <stdbool.h>
#include <stdint.h>

#include "vault.h"

struct depot;

struct depot_options {
    const char *folder; /* a temporary one is made in it */
    struct {
        size_t payload_bytes; /* 0: no such group */
        uint32_t n_pages;     /* the last so many of a chain have one; all but target_state */
    } group[KV_GROUP_N];
    uint32_t n_pages, n_chains;
    uint64_t disk_bytes;
    int n_workers;
};

/* With all chains on the shelf. 0, or negative errno after a line on stderr. */
int depot_open(const struct depot_options *options, struct depot **ret_depot);
void depot_close(struct depot *depot); /* and removes the folder; NULL is fine */

/* Each gives back how long it took; 0 or negative errno. */
int depot_save(struct depot *depot, double *ret_seconds);             /* all to disk, until it survives a power cut */
int depot_read(struct depot *depot, int n_side, double *ret_seconds); /* all back onto the emptied shelf */
int depot_play(struct depot *depot, double *ret_seconds);             /* the operations of the last of these, plainly */
int depot_forget(struct depot *depot);                                /* nothing is on disk any more */
int depot_checksum(struct depot *depot, double *ret_bytes_per_s); /* of the target pages on the shelf, on one core */

uint64_t depot_bytes(const struct depot *depot);         /* of the last saving or reading, with headers */
int depot_depth(const struct depot *depot);              /* operations side by side in it */
uint64_t depot_payload_bytes(const struct depot *depot); /* of all that is kept on disk, without headers */
void depot_stats(const struct depot *depot, struct kv_vault_stats *ret_stats);
