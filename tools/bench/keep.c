#include "keep.h"

#include <stdio.h>

enum { SETTINGS = 9 };

int keep_open(const struct keep_options *options, struct keep *ret_keep) {
    struct server_options server = {.program = options->spillwayd, .n_threads = options->n_threads};
    char lines[SETTINGS][SCRATCH_PATH_BYTES + 32];
    struct keep keep = {0};
    int n = 0, r = 0;

    snprintf(lines[n++], sizeof lines[0], "kv.device_bytes=%uMiB", options->device_mib);
    snprintf(lines[n++], sizeof lines[0], "kv.host_bytes=%uMiB", options->host_mib);
    snprintf(lines[n++], sizeof lines[0], "limits.max_context=%d", options->max_context);
    snprintf(lines[n++], sizeof lines[0], "sched.max_seqs=%d", options->max_seqs);
    if (options->restore_always)
        snprintf(lines[n++], sizeof lines[0], "kv.restore=always");
    if (options->disk_mib > 0) {
        r = scratch_make(options->folder, keep.folder);
        snprintf(lines[n++], sizeof lines[0], "kv.disk_path=%s/cache", keep.folder);
        snprintf(lines[n++], sizeof lines[0], "kv.disk_bytes=%uMiB", options->disk_mib);
        snprintf(lines[n++], sizeof lines[0], "kv.disk_min_tokens=%d", options->disk_min_tokens);
    }
    for (int i = 0; i < n; i++)
        server.settings[i] = lines[i];
    if (r == 0)
        r = server_start(&server, &keep.server);
    if (r == 0)
        r = talk_connect(keep.server.socket, &keep.client);
    if (r != 0)
        keep_close(&keep);
    else
        *ret_keep = keep;
    return r;
}

void keep_close(struct keep *keep) {
    spillway_close(keep->client);
    server_stop(&keep->server);
    scratch_remove(keep->folder);
    *keep = (struct keep){0};
}
