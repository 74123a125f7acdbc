#include "cache_folder.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

enum { SHOWN_MAX = 160 };

static int explain(const char *path, const char *part, int r, struct report *report) {
    char where[SHOWN_MAX + 32];

    snprintf(where, sizeof where, "kv.disk_path: %s%s", report_path(path), part);
    switch (r) {
    case DISK_E_LOCKED:
        return report_error(report, CACHE_FOLDER_E_LOCKED,
                            "%s: another daemon uses this folder; stop it, or give this one a folder of its own",
                            where);
    case DISK_E_UNSAFE:
    case -EPERM: /* the lock file */
        return report_error(report, -EINVAL,
                            "%s: what others can read or write, or own, is not used for prompts: it must belong to uid "
                            "%u with mode 0700, its files with 0600",
                            where, (unsigned)geteuid());
    case DISK_E_NETWORK:
        return report_error(report, -EINVAL,
                            "%s: on a network file system locks and deadlines do not hold; use a "
                            "local disk",
                            where);
    case -ENOENT:
        return report_error(report, -EINVAL, "%s: the folder above it does not exist; make it first", where);
    case -ENOTDIR:
        return report_error(report, -EINVAL, "%s: it is a link or no folder, or something above it is none", where);
    default:
        return report_error(report, r, "%s: %s", where, strerror(-r));
    }
}

static int explain_secret(const char *path, int r, struct report *report) {
    if (r == SECRET_E_DAMAGED)
        return report_error(
            report, -EINVAL,
            "kv.disk_path: %s/secret is damaged, and without it nothing in the folder can be found; put "
            "back a copy of it, or remove it: then all cached pages and all sessions are lost",
            report_path(path));
    if (r == SECRET_E_UNSAFE)
        return report_error(report, -EINVAL,
                            "kv.disk_path: %s/secret is a link, no file, or open to others than uid %u; make it a file "
                            "of mode 0600, or remove it: then all cached pages and all sessions are lost",
                            report_path(path), (unsigned)geteuid());
    return report_error(report, r, "kv.disk_path: %s/secret: %s", report_path(path), strerror(-r));
}

int cache_folder_open(const char *path, struct cache_folder *ret_folder, struct report *report) {
    static const struct disk_folder none = {.fd = -1, .lock_fd = -1};
    struct cache_folder folder = {.root = none, .segments = none, .sessions = none};
    int r = disk_folder_open(path, &folder.root);

    if (r != 0)
        return explain(path, "", r, report);
    r = disk_folder_open_in(&folder.root, "segments", &folder.segments);
    if (r != 0)
        r = explain(path, "/segments", r, report);
    if (r == 0) {
        r = disk_folder_open_in(&folder.root, "sessions", &folder.sessions);
        if (r != 0)
            r = explain(path, "/sessions", r, report);
    }
    if (r == 0) {
        disk_folder_clean(&folder.root);
        r = secret_load(&folder.root, &folder.secret, &folder.is_new);
        if (r != 0)
            r = explain_secret(path, r, report);
    }
    if (r != 0) {
        cache_folder_close(&folder);
        return r;
    }
    *ret_folder = folder;
    return 0;
}

int cache_folder_look(const char *path, struct report *report) {
    int r = disk_folder_look(path);

    return r == 0 ? 0 : explain(path, "", r, report);
}

void cache_folder_close(struct cache_folder *folder) {
    if (folder->root.lock_fd <= 0) /* a lock is never standard input */
        return;
    disk_folder_close(&folder->sessions);
    disk_folder_close(&folder->segments);
    disk_folder_close(&folder->root);
    explicit_bzero(&folder->secret, sizeof folder->secret);
    *folder = (struct cache_folder){0};
}
