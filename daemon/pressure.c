#include "pressure.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <uv.h>

/* Some task stood still for 0.15 s of 2 s. Windows of whole 2 s need no privilege. */
static const char TRIGGER[] = "some 150000 2000000";

enum { RETRY_MS = 50 };

struct pressure {
    struct pressure_options options;
    uv_poll_t poll;
    uv_timer_t timer;
    int n_handles;
    bool is_wanted; /* a step, which waits for the disk */
    uint64_t quiet_since_ms;
    struct pressure_stats stats;
};

/* ---- the kernel's word ---------------------------------------------------------------------------------------------- */

int pressure_path(char *ret_path, size_t path_bytes) {
    static const char *const mounts[] = {"/sys/fs/cgroup", "/sys/fs/cgroup/unified"};
    FILE *file = fopen("/proc/self/cgroup", "re");
    char line[4096], *group = NULL;

    if (!file)
        return -errno;
    while (!group && fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = '\0';
        if (strncmp(line, "0::/", 4) == 0)
            group = line + 4;
    }
    fclose(file);
    for (size_t i = 0; group && i < ARRAY_LEN(mounts); i++) {
        int n = snprintf(ret_path, path_bytes, "%s/%s%smemory.pressure", mounts[i], group, *group ? "/" : "");

        if (n > 0 && (size_t)n < path_bytes && access(ret_path, R_OK | W_OK) == 0)
            return 0;
    }
    return -ENOENT;
}

int pressure_trigger(const char *path) {
    int fd = open(path, O_RDWR | O_NONBLOCK | O_CLOEXEC), error;

    if (fd < 0)
        return -errno;
    if (write(fd, TRIGGER, sizeof TRIGGER) == (ssize_t)sizeof TRIGGER)
        return fd;
    error = errno;
    close(fd);
    return -error;
}

/* ---- steps ---------------------------------------------------------------------------------------------------------- */

static uint64_t shelf_bytes(const struct pressure *p) {
    uint64_t bytes = 0;

    for (int g = 0; g < KV_GROUP_N; g++) {
        struct kv_shelf_group_stats stats;

        kv_shelf_stats(p->options.shelf, (enum kv_group)g, &stats);
        bytes += stats.n_slots * kv_shelf_slot_bytes(p->options.shelf, (enum kv_group)g);
    }
    return bytes;
}

static bool is_on_disk(void *user, const struct kv_page_name *name, enum kv_group group) {
    struct pressure *p = user;

    return kv_vault_has(p->options.vault, &name->key, name->page_idx, group);
}

static void set_short(struct pressure *p, bool is_short) {
    if (p->stats.is_short == is_short)
        return;
    p->stats.is_short = is_short;
    p->options.on_change(p->options.user, &p->stats);
}

/* The kernel holds what is registered with it, whatever becomes of the mapping, so that goes first. */
static void give(struct pressure *p) {
    uint64_t bytes;

    if (p->options.vault && !kv_vault_forget_buffers(p->options.vault))
        return; /* something is on its way */
    p->is_wanted = false;
    bytes = kv_shelf_shrink(p->options.shelf, shelf_bytes(p) / PRESSURE_STEPS, p->options.vault ? is_on_disk : NULL, p);
    p->stats.away_bytes += bytes;
    p->stats.given_bytes += bytes;
    p->stats.n_gave_none += bytes == 0;
    set_short(p, true);
}

static void on_timer(uv_timer_t *timer) {
    struct pressure *p = timer->data;
    uint64_t now_ms = uv_now(p->options.loop);

    if (p->is_wanted)
        give(p);
    if (now_ms - p->quiet_since_ms >= p->options.quiet_ms) {
        p->is_wanted = false;
        p->stats.away_bytes -= kv_shelf_grow(p->options.shelf, shelf_bytes(p) / PRESSURE_STEPS);
        p->quiet_since_ms = now_ms;
        if (p->stats.away_bytes == 0) {
            set_short(p, false);
            return;
        }
    }
    uv_timer_start(timer, on_timer, p->is_wanted ? RETRY_MS : p->quiet_since_ms + p->options.quiet_ms - now_ms, 0);
}

/* An event while the last one's step still waits asks for no other. */
static void on_pressure(uv_poll_t *poll, int status, int events) {
    struct pressure *p = poll->data;

    if (status < 0 || !(events & UV_PRIORITIZED)) { /* the cgroup is gone */
        uv_poll_stop(poll);
        return;
    }
    p->stats.n_events++;
    p->is_wanted = true;
    p->quiet_since_ms = uv_now(p->options.loop);
    give(p);
    uv_timer_start(&p->timer, on_timer, p->is_wanted ? RETRY_MS : p->options.quiet_ms, 0);
}

void pressure_turn(struct pressure *p) {
    if (p && p->is_wanted)
        give(p);
}

void pressure_stats(const struct pressure *p, struct pressure_stats *ret_stats) {
    *ret_stats = p->stats;
}

/* ---- its life ------------------------------------------------------------------------------------------------------- */

static void on_closed(uv_handle_t *handle) {
    struct pressure *p = handle->data;

    if (--p->n_handles > 0)
        return;
    close(p->options.fd);
    free(p);
}

int pressure_start(const struct pressure_options *options, struct pressure **ret_pressure) {
    struct pressure *p = calloc(1, sizeof *p);
    int r;

    if (!p)
        return -ENOMEM;
    p->options = *options;
    r = uv_poll_init(options->loop, &p->poll, options->fd);
    if (r != 0) {
        free(p);
        return r;
    }
    uv_timer_init(options->loop, &p->timer);
    p->poll.data = p->timer.data = p;
    p->n_handles = 2;
    r = uv_poll_start(&p->poll, UV_PRIORITIZED, on_pressure);
    if (r != 0) {
        pressure_stop(p);
        return r;
    }
    *ret_pressure = p;
    return 0;
}

void pressure_stop(struct pressure *p) {
    if (!p)
        return;
    uv_close((uv_handle_t *)&p->poll, on_closed);
    uv_close((uv_handle_t *)&p->timer, on_closed);
}
