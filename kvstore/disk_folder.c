#include "disk_folder.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/magic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#define LOCK_NAME "lock"
#define PROBE_NAME ".direct"
#define NEW_SUFFIX ".new" /* under construction; what a crash leaves of it is overwritten or removed */
#define SEGMENT_PREFIX "segment-"
enum { SEGMENT_DIGITS = 8, SEGMENTS_MAX = 100000000 };

static const uint32_t network_magics[] = {NFS_SUPER_MAGIC, SMB_SUPER_MAGIC,  CIFS_SUPER_MAGIC, SMB2_SUPER_MAGIC,
                                          AFS_SUPER_MAGIC, CEPH_SUPER_MAGIC, V9FS_MAGIC,       CODA_SUPER_MAGIC};

struct name {
    char text[NAME_MAX + 1];
};

/* ---- checks ------------------------------------------------------------------------------------------------------ */

static int check_ours(int fd, mode_t type) {
    struct stat status;

    if (fstat(fd, &status) != 0)
        return -errno;
    if ((status.st_mode & S_IFMT) != type)
        return -EMEDIUMTYPE;
    return status.st_uid == geteuid() && (status.st_mode & 077) == 0 ? 0 : DISK_E_UNSAFE;
}

static int check_local(int fd) {
    struct statfs status;

    if (fstatfs(fd, &status) != 0)
        return -errno;
    for (size_t i = 0; i < sizeof(network_magics) / sizeof(network_magics[0]); i++) {
        if ((uint32_t)status.f_type == network_magics[i])
            return DISK_E_NETWORK;
    }
    return 0;
}

/* Names can be made in it, by the rights that we act with. */
static int check_writable(int fd) {
    return faccessat(fd, ".", W_OK | X_OK, AT_EACCESS) == 0 ? 0 : -errno;
}

/* A descriptor or -errno. */
static int open_file(const struct disk_folder *folder, const char *name, int flags) {
    int r, fd = openat(folder->fd, name, flags | O_NOFOLLOW | O_CLOEXEC, 0600);

    if (fd < 0)
        return -errno;
    r = check_ours(fd, S_IFREG);
    if (r == 0)
        return fd;
    close(fd);
    return r == DISK_E_UNSAFE ? -EPERM : r;
}

static int sync_folder(const struct disk_folder *folder) {
    return fsync(folder->fd) == 0 ? 0 : -errno;
}

/* ---- the folder -------------------------------------------------------------------------------------------------- */

static int lock(struct disk_folder *folder) {
    struct flock whole = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    int fd = open_file(folder, LOCK_NAME, O_RDWR | O_CREAT);

    if (fd < 0)
        return fd;
    folder->lock_fd = fd;
    if (fcntl(fd, F_OFD_SETLK, &whole) == 0)
        return 0;
    return errno == EAGAIN || errno == EACCES ? DISK_E_LOCKED : -errno;
}

static int open_existing(int parent_fd, const char *path, struct disk_folder *ret_folder) {
    struct disk_folder folder = {.fd = -1, .lock_fd = -1};
    int r;

    folder.fd = openat(parent_fd, path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (folder.fd < 0)
        return errno == ELOOP ? -ENOTDIR : -errno;
    r = check_ours(folder.fd, S_IFDIR);
    if (r != 0) {
        disk_folder_close(&folder);
        return r;
    }
    *ret_folder = folder;
    return 0;
}

static int open_folder(int parent_fd, const char *path, struct disk_folder *ret_folder) {
    if (mkdirat(parent_fd, path, 0700) != 0 && errno != EEXIST)
        return -errno;
    return open_existing(parent_fd, path, ret_folder);
}

int disk_folder_open(const char *path, struct disk_folder *ret_folder) {
    struct disk_folder folder = {.fd = -1, .lock_fd = -1};
    int r = open_folder(AT_FDCWD, path, &folder);

    if (r != 0)
        return r;
    r = check_local(folder.fd);
    if (r == 0)
        r = lock(&folder);
    if (r != 0) {
        disk_folder_close(&folder);
        return r;
    }
    *ret_folder = folder;
    return 0;
}

/* -ENOENT where mkdir() would say so, too. */
static int look_above(const char *path) {
    char above[PATH_MAX];
    size_t n = strnlen(path, sizeof(above));
    int fd, r;

    if (n == sizeof(above))
        return -ENAMETOOLONG;
    memcpy(above, path, n + 1);
    while (n > 1 && above[n - 1] == '/')
        n--;
    while (n > 0 && above[n - 1] != '/')
        n--;
    if (n == 0)
        above[n++] = '.';
    above[n] = '\0';
    fd = open(above, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    r = check_local(fd);
    if (r == 0)
        r = check_writable(fd);
    close(fd);
    return r;
}

int disk_folder_look(const char *path) {
    struct disk_folder folder = {.fd = -1, .lock_fd = -1};
    int r, fd;

    if (path[0] == '\0')
        return -ENOENT;
    r = open_existing(AT_FDCWD, path, &folder);
    if (r != 0)
        return r == -ENOENT ? look_above(path) : r;
    r = check_local(folder.fd);
    if (r == 0)
        r = check_writable(folder.fd);
    if (r == 0) {
        fd = open_file(&folder, LOCK_NAME, O_RDWR);
        if (fd >= 0)
            close(fd);
        r = fd >= 0 || fd == -ENOENT ? 0 : fd;
    }
    disk_folder_close(&folder);
    return r;
}

int disk_folder_open_in(const struct disk_folder *parent, const char *name, struct disk_folder *ret_folder) {
    return open_folder(parent->fd, name, ret_folder);
}

void disk_folder_close(struct disk_folder *folder) {
    if (folder->fd >= 0)
        close(folder->fd);
    if (folder->lock_fd >= 0)
        close(folder->lock_fd);
    *folder = (struct disk_folder){.fd = -1, .lock_fd = -1};
}

int disk_folder_check(const struct disk_folder *folder, const char *path) {
    struct stat ours, there;

    if (fstat(folder->fd, &ours) != 0)
        return -errno;
    if (lstat(path, &there) != 0)
        return errno == ENOENT || errno == ENOTDIR ? -ESTALE : -errno;
    if (ours.st_nlink == 0 || ours.st_dev != there.st_dev || ours.st_ino != there.st_ino)
        return -ESTALE;
    return check_ours(folder->fd, S_IFDIR);
}

static bool is_new(const char *name) {
    size_t n = strlen(name), n_suffix = strlen(NEW_SUFFIX);

    return n > n_suffix && strcmp(name + n - n_suffix, NEW_SUFFIX) == 0;
}

/* Every name of one kind: those under construction, or all others. */
static int list(const struct disk_folder *folder, bool new_ones, void (*each)(void *user, const char *name),
                void *user) {
    int fd = openat(folder->fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *dir = fd >= 0 ? fdopendir(fd) : NULL;
    const struct dirent *entry;
    int r;

    if (dir == NULL) {
        r = -errno;
        if (fd >= 0)
            close(fd);
        return r;
    }
    while (errno = 0, (entry = readdir(dir)) != NULL) { /* NOLINT(concurrency-mt-unsafe): the stream is ours */
        if (entry->d_name[0] != '.' && strcmp(entry->d_name, LOCK_NAME) != 0 && is_new(entry->d_name) == new_ones)
            each(user, entry->d_name);
    }
    r = -errno;
    closedir(dir);
    return r;
}

int disk_folder_list(const struct disk_folder *folder, void (*each)(void *user, const char *name), void *user) {
    return list(folder, false, each, user);
}

int disk_folder_free_bytes(const struct disk_folder *folder, uint64_t *ret_bytes) {
    struct statvfs status;

    if (fstatvfs(folder->fd, &status) != 0)
        return -errno;
    *ret_bytes = (uint64_t)status.f_bavail * status.f_frsize;
    return 0;
}

static void remove_name(void *user, const char *name) {
    const struct disk_folder *folder = user;

    unlinkat(folder->fd, name, 0);
}

void disk_folder_clean(const struct disk_folder *folder) {
    struct disk_folder mine = *folder;

    list(folder, true, remove_name, &mine);
}

/* ---- small files ------------------------------------------------------------------------------------------------- */

int disk_folder_read(const struct disk_folder *folder, const char *name, void *buffer, size_t bytes_max,
                     size_t *ret_bytes) {
    char *to = buffer, beyond;
    size_t n = 0;
    ssize_t r = 0;
    int fd = open_file(folder, name, O_RDONLY | O_NONBLOCK); /* a fifo of that name does not hold us up */

    if (fd < 0)
        return fd;
    do { /* one byte more, to see that there is none */
        r = n < bytes_max ? read(fd, to + n, bytes_max - n) : read(fd, &beyond, 1);
        if (r > 0)
            n += (size_t)r;
    } while ((r > 0 && n <= bytes_max) || (r < 0 && errno == EINTR));
    r = r < 0 ? -errno : 0;
    close(fd);
    if (r != 0)
        return (int)r;
    if (n > bytes_max)
        return -EFBIG;
    *ret_bytes = n;
    return 0;
}

static int write_all(int fd, const char *data, size_t bytes) {
    for (size_t n = 0; n < bytes;) {
        ssize_t r = write(fd, data + n, bytes - n);

        if (r < 0 && errno != EINTR)
            return -errno;
        if (r == 0)
            return -EIO;
        n += r > 0 ? (size_t)r : 0;
    }
    return 0;
}

static int new_name(const char *name, struct name *ret_name) {
    int n = snprintf(ret_name->text, sizeof(ret_name->text), "%s" NEW_SUFFIX, name);

    return n > 0 && (size_t)n < sizeof(ret_name->text) ? 0 : -ENAMETOOLONG;
}

/* A new file under its temporary name; what a crash left there goes first. */
static int create_new(const struct disk_folder *folder, const struct name *name, int flags) {
    if (unlinkat(folder->fd, name->text, 0) != 0 && errno != ENOENT)
        return -errno;
    return open_file(folder, name->text, flags | O_CREAT | O_EXCL);
}

/* From the temporary name to the final one, durably. */
static int finish_new(const struct disk_folder *folder, int fd, const struct name *from, const char *name) {
    if (fsync(fd) != 0 || renameat(folder->fd, from->text, folder->fd, name) != 0)
        return -errno;
    return sync_folder(folder);
}

int disk_folder_replace(const struct disk_folder *folder, const char *name, const void *data, size_t bytes) {
    struct name temporary;
    int fd, r = new_name(name, &temporary);

    if (r != 0)
        return r;
    fd = create_new(folder, &temporary, O_WRONLY);
    if (fd < 0)
        return fd;
    r = write_all(fd, data, bytes);
    if (r == 0)
        r = finish_new(folder, fd, &temporary, name);
    close(fd);
    if (r != 0)
        unlinkat(folder->fd, temporary.text, 0);
    return r;
}

int disk_folder_remove(const struct disk_folder *folder, const char *name) {
    return unlinkat(folder->fd, name, 0) == 0 ? sync_folder(folder) : -errno;
}

/* ---- segments ---------------------------------------------------------------------------------------------------- */

static struct name segment_name(uint32_t segment) {
    struct name name;

    snprintf(name.text, sizeof(name.text), SEGMENT_PREFIX "%0*u", SEGMENT_DIGITS, segment);
    return name;
}

bool disk_segment_parse(const char *name, uint32_t *ret_segment) {
    size_t n_prefix = strlen(SEGMENT_PREFIX);
    uint32_t segment = 0;

    if (strncmp(name, SEGMENT_PREFIX, n_prefix) != 0 || strlen(name) != n_prefix + SEGMENT_DIGITS)
        return false;
    for (const char *c = name + n_prefix; *c != '\0'; c++) {
        if (*c < '0' || *c > '9')
            return false;
        segment = segment * 10 + (uint32_t)(*c - '0');
    }
    *ret_segment = segment;
    return true;
}

/* All blocks are ours before the first write. A file system that cannot preallocate gets a file of that length: there a
 * write may still meet a full disk. */
static int preallocate(int fd, uint64_t bytes) {
    int r;

    do {
        r = fallocate(fd, 0, 0, (off_t)bytes) == 0 ? 0 : -errno;
    } while (r == -EINTR);
    if (r == -EOPNOTSUPP)
        r = ftruncate(fd, (off_t)bytes) == 0 ? 0 : -errno;
    return r;
}

int disk_segment_create(const struct disk_folder *folder, uint32_t segment, uint64_t bytes, bool is_direct) {
    struct name name, temporary;
    int fd, r;

    if (segment >= SEGMENTS_MAX)
        return -EINVAL;
    name = segment_name(segment);
    if (faccessat(folder->fd, name.text, F_OK, AT_SYMLINK_NOFOLLOW) == 0)
        return -EEXIST;
    r = new_name(name.text, &temporary);
    if (r != 0)
        return r;
    fd = create_new(folder, &temporary, O_RDWR | (is_direct ? O_DIRECT : 0));
    if (fd >= 0) {
        r = preallocate(fd, bytes);
        if (r == 0)
            r = finish_new(folder, fd, &temporary, name.text);
        if (r == 0)
            return fd;
        close(fd);
        unlinkat(folder->fd, name.text, 0); /* renamed, but not durably */
        fd = r;
    }
    unlinkat(folder->fd, temporary.text, 0); /* a refused direct open has made the file all the same */
    return fd;
}

int disk_segment_open(const struct disk_folder *folder, uint32_t segment, uint64_t bytes, bool is_direct) {
    struct name name = segment_name(segment);
    struct stat status;
    int r = 0, fd = open_file(folder, name.text, O_RDWR | (is_direct ? O_DIRECT : 0));

    if (fd < 0)
        return fd;
    if (fstat(fd, &status) != 0)
        r = -errno;
    else if ((uint64_t)status.st_size != bytes)
        r = -EMEDIUMTYPE;
    else if ((uint64_t)status.st_blocks * 512 < bytes) /* a copy of a store may have holes */
        r = preallocate(fd, bytes);
    if (r != 0)
        close(fd);
    return r != 0 ? r : fd;
}

int disk_segment_peek(const struct disk_folder *folder, uint32_t segment, void *ret_bytes, size_t n,
                      uint64_t *ret_file_bytes) {
    struct name name = segment_name(segment);
    struct stat status = {0};
    size_t n_read = 0;
    ssize_t r = 1;
    int fd = open_file(folder, name.text, O_RDONLY | O_NONBLOCK);

    if (fd < 0)
        return fd;
    while (n_read < n && (r > 0 || (r < 0 && errno == EINTR))) {
        r = pread(fd, (char *)ret_bytes + n_read, n - n_read, (off_t)n_read);
        n_read += r > 0 ? (size_t)r : 0;
    }
    r = r < 0 || fstat(fd, &status) != 0 ? -errno : 0;
    close(fd);
    if (r != 0)
        return (int)r;
    memset((char *)ret_bytes + n_read, 0, n - n_read);
    *ret_file_bytes = (uint64_t)status.st_size;
    return 0;
}

int disk_segment_remove(const struct disk_folder *folder, uint32_t segment) {
    struct name name = segment_name(segment);

    if (unlinkat(folder->fd, name.text, 0) != 0)
        return -errno;
    sync_folder(folder); /* if that fails the file may be back after a power cut: its slots verify themselves */
    return 0;
}

uint32_t disk_folder_alignment(const struct disk_folder *folder) {
    uint32_t align = DISK_ALIGN_MIN;
    struct statx status;
    int fd = open_file(folder, PROBE_NAME, O_RDWR | O_CREAT | O_DIRECT);

    unlinkat(folder->fd, PROBE_NAME, 0); /* also where direct I/O is refused, the file was made */
    if (fd < 0)
        return 0;
    if (statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &status) == 0 && (status.stx_mask & STATX_DIOALIGN) != 0) {
        uint32_t wanted = status.stx_dio_mem_align > status.stx_dio_offset_align ? status.stx_dio_mem_align
                                                                                 : status.stx_dio_offset_align;
        align = status.stx_dio_offset_align == 0 ? 0 : wanted > align ? wanted : align;
    }
    close(fd);
    return align;
}
