/* disk_folder: the folder in which the disk tier keeps its files. Owns its descriptor, the lock and the names of segments;
 * checks that folder and files are ours alone. Knows nothing of what the files hold.
 *
 * Every function blocks: for start-up, or for a worker; never for the loop thread. They keep no state, so any thread may
 * call them. Nothing follows a link, all names are relative to the descriptor, all files have mode 0600. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct disk_folder {
    int fd;
    int lock_fd; /* -1: a folder within a locked one */
};

enum {
    DISK_E_LOCKED = 2,  /* another process lives here */
    DISK_E_UNSAFE = 3,  /* not owned by us, or open to group or others */
    DISK_E_NETWORK = 4, /* locks and deadlines do not hold on a network file system */
};

/* Makes the folder with mode 0700 if only its last part is missing, and locks it until close or the end of the process.
 * DISK_E_*, or -errno: -ENOTDIR also for a link. */
int disk_folder_open(const char *path, struct disk_folder *ret_folder);
/* Whether that would work, but for the lock, which may be held: makes nothing and locks nothing. Also -EACCES or -EROFS where
 * no file could be made, or not the folder. */
int disk_folder_look(const char *path);
/* A folder within it, made if missing; it has no lock of its own. */
int disk_folder_open_in(const struct disk_folder *parent, const char *name, struct disk_folder *ret_folder);
void disk_folder_close(struct disk_folder *folder);

/* -ESTALE: what lies at `path` is not this folder any more, or it is deleted. DISK_E_UNSAFE: its mode was changed. */
int disk_folder_check(const struct disk_folder *folder, const char *path);

/* Every name except the lock, files under construction and dots. */
int disk_folder_list(const struct disk_folder *folder, void (*each)(void *user, const char *name), void *user);
/* What may be written into its file system by this user. */
int disk_folder_free_bytes(const struct disk_folder *folder, uint64_t *ret_bytes);
/* Removes what a crash left under construction, as far as that works. Nothing may be under construction now. */
void disk_folder_clean(const struct disk_folder *folder);

/* ---- small files, read and replaced as a whole ---- */

/* -ENOENT, -EFBIG for more than bytes_max; -EMEDIUMTYPE for what is no file, -EPERM for one that is not ours alone. */
int disk_folder_read(const struct disk_folder *folder, const char *name, void *buffer, size_t bytes_max,
                     size_t *ret_bytes);
/* When this returns 0, the new content survives a power cut; before, the old one does. */
int disk_folder_replace(const struct disk_folder *folder, const char *name, const void *data, size_t bytes);
int disk_folder_remove(const struct disk_folder *folder, const char *name);

/* ---- segment files ---- */

/* False if `name` is not that of a segment. */
bool disk_segment_parse(const char *name, uint32_t *ret_segment);

/* A whole and preallocated file, durable, under its name: or none at all. Returns its descriptor or -errno: -EEXIST if
 * there is one, -EINVAL if the file system has no direct I/O, -ENOSPC, -EDQUOT. */
int disk_segment_create(const struct disk_folder *folder, uint32_t segment, uint64_t bytes, bool is_direct);
/* An existing one; preallocates what is missing of it. -EMEDIUMTYPE: no file of that size;
 * -EPERM: not ours alone; -ELOOP: a link. */
int disk_segment_open(const struct disk_folder *folder, uint32_t segment, uint64_t bytes, bool is_direct);
/* The first bytes of one, zeros beyond its end, and its size. -errno as for disk_segment_open(). */
int disk_segment_peek(const struct disk_folder *folder, uint32_t segment, void *ret_bytes, size_t n,
                      uint64_t *ret_file_bytes);
int disk_segment_remove(const struct disk_folder *folder, uint32_t segment);

/* Alignment of address, offset and length: a power of two >= DISK_ALIGN_MIN. 0: the file system has no direct I/O. */
enum { DISK_ALIGN_MIN = 4096 };
uint32_t disk_folder_alignment(const struct disk_folder *folder);
