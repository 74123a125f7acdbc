#include "scratch.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/vfs.h>
#include <unistd.h>

int scratch_make(const char *under, char ret_path[SCRATCH_PATH_BYTES]) {
    struct statfs status;
    int r = 0;

    ret_path[0] = '\0';
    if (statfs(under, &status) != 0)
        r = -errno;
    else if (status.f_type == TMPFS_MAGIC || status.f_type == RAMFS_MAGIC)
        r = -EINVAL;
    if (r == 0 && snprintf(ret_path, SCRATCH_PATH_BYTES, "%s/spillway-bench-XXXXXX", under) >= SCRATCH_PATH_BYTES)
        r = -ENAMETOOLONG;
    if (r == 0 && !mkdtemp(ret_path))
        r = -errno;
    if (r == 0)
        return 0;
    ret_path[0] = '\0';
    fprintf(stderr, "spillway-bench: %s: %s; name a folder on a disk with --folder\n", under,
            r == -EINVAL ? "it is memory, no disk" : strerror(-r));
    return r;
}

static void remove_content(int fd) {
    DIR *dir = fdopendir(fd); /* owns it */
    struct dirent *entry;

    while (dir && (entry = readdir(dir)) != NULL) {
        int child;

        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
            continue;
        if (unlinkat(dirfd(dir), entry->d_name, 0) == 0)
            continue;
        child = openat(dirfd(dir), entry->d_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        if (child >= 0)
            remove_content(child);
        unlinkat(dirfd(dir), entry->d_name, AT_REMOVEDIR);
    }
    if (dir)
        closedir(dir);
}

void scratch_remove(const char *path) {
    int fd = path[0] ? open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC) : -1;

    if (fd < 0)
        return;
    remove_content(fd);
    rmdir(path);
}
