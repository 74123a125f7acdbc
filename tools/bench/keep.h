/* keep: a daemon of our own with the tiny pair and tiers below the device, on a scratch folder, and a client of it. */
#pragma once
#include "scratch.h"
#include "server.h"
#include "talk.h"

struct keep_options {
    const char *spillwayd, *folder;          /* as of the benchmark */
    int n_threads;                           /* that compute; 0: the daemon's choice */
    unsigned device_mib, host_mib, disk_mib; /* the last two may be 0: no such tier */
    bool restore_always;                     /* else where that is faster */
    int disk_min_tokens, max_context, max_seqs;
};

struct keep {
    struct server server;
    struct spillway *client;
    char folder[SCRATCH_PATH_BYTES];
};

int keep_open(const struct keep_options *options, struct keep *ret_keep);
void keep_close(struct keep *keep); /* fine for a zeroed one */
