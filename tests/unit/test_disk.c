/* A disk writes and reads back, through io_uring and through workers, direct and buffered; and it lives in a folder that
 * is its alone. */
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <linux/filter.h>
#include <linux/seccomp.h>

#include "disk_rig.h"

static void open_ring(struct disk_rig *rig) {
    rig_make_folder(rig, "/tmp");
    rig_open_disk(rig);
    if (!rig_stats(rig).is_ring) {
        rig_free(rig);
        skip(); /* this kernel has no ring for us: the workers are tested */
    }
}

static void open_workers(struct disk_rig *rig) {
    rig_make_folder(rig, "/tmp");
    rig->options.no_ring = true;
    rig_open_disk(rig);
    assert_false(rig_stats(rig).is_ring);
}

/* Writes all of a segment in pieces, syncs, reopens, reads it in other pieces. */
static void write_and_read_back(struct disk_rig *rig) {
    struct rig_op ops[RIG_N_OPS];
    uint32_t n = RIG_SEGMENT_BYTES / RIG_BUFFER_BYTES;
    struct disk_stats stats;

    assert_true(n <= RIG_N_OPS && 2 * n <= RIG_N_BUFFERS);
    assert_int_equal(rig_do(rig, rig_op(DISK_SEGMENT_ADD, 1)), 0);
    for (uint32_t i = 0; i < n; i++) {
        rig_fill(rig_buffer(rig, i), RIG_BUFFER_BYTES, i);
        ops[i] = rig_transfer(DISK_WRITE, 1, (uint64_t)i * RIG_BUFFER_BYTES, rig_buffer(rig, i), RIG_BUFFER_BYTES);
        rig_submit(rig, &ops[i]);
    }
    for (uint32_t i = 0; i < n; i++)
        assert_int_equal(rig_wait(rig, &ops[i]), 0);
    assert_int_equal(rig_do(rig, rig_op(DISK_SYNC, 1)), 0);
    stats = rig_stats(rig);
    assert_int_equal(stats.written_bytes, RIG_SEGMENT_BYTES);
    assert_int_equal(stats.n_done[DISK_WRITE], n);
    rig_close_disk(rig);

    rig_open_disk(rig);
    assert_true(disk_segment_exists(rig->disk, 1));
    assert_false(disk_segment_exists(rig->disk, 0));
    for (uint32_t i = 0; i < n; i++) {
        ops[i] = rig_transfer(DISK_READ, 1, (uint64_t)i * RIG_BUFFER_BYTES, rig_buffer(rig, n + i), RIG_BUFFER_BYTES);
        rig_submit(rig, &ops[i]);
    }
    for (uint32_t i = 0; i < n; i++)
        assert_int_equal(rig_wait(rig, &ops[i]), 0);
    assert_memory_equal(rig_buffer(rig, 0), rig_buffer(rig, n), RIG_SEGMENT_BYTES);
    stats = rig_stats(rig);
    assert_int_equal(stats.read_bytes, RIG_SEGMENT_BYTES);
    assert_int_equal(stats.n_segments, 1);
    assert_int_equal(stats.n_short + stats.n_retries + stats.n_unknown + stats.n_out, 0);
}

static void ring_reads_what_it_wrote(void **state) {
    struct disk_rig rig;

    (void)state;
    open_ring(&rig);
    write_and_read_back(&rig);
    assert_true(rig_stats(&rig).has_registered_files);
    rig_free(&rig);
}

static void workers_read_what_they_wrote(void **state) {
    struct disk_rig rig;

    (void)state;
    open_workers(&rig);
    write_and_read_back(&rig);
    rig_free(&rig);
}

static void buffered_mode_reads_what_it_wrote(void **state) {
    (void)state;
    for (int no_ring = 0; no_ring < 2; no_ring++) {
        struct disk_rig rig;

        rig_make_folder(&rig, access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
        rig.options.no_ring = no_ring;
        rig.options.no_direct = true;
        rig_open_disk(&rig);
        assert_false(rig_stats(&rig).is_direct);
        write_and_read_back(&rig);
        rig_free(&rig);
    }
}

/* ---- what a submit refuses --------------------------------------------------------------------------------------- */

static void requests_that_cannot_be_are_refused_and_leave_nothing_out(void **state) {
    struct disk_rig rig;
    struct rig_op op;

    (void)state;
    open_workers(&rig);
    assert_int_equal(rig_do(&rig, rig_op(DISK_SEGMENT_ADD, 0)), 0);
    op = rig_op(DISK_SEGMENT_ADD, 0);
    assert_int_equal(disk_submit(rig.disk, &op.op, 0), -EEXIST);
    op = rig_op(DISK_SEGMENT_ADD, RIG_N_SEGMENTS);
    assert_int_equal(disk_submit(rig.disk, &op.op, 0), -ENOENT);
    op = rig_op(DISK_SYNC, 2);
    assert_int_equal(disk_submit(rig.disk, &op.op, 0), -ENOENT);
    op = rig_transfer(DISK_READ, 0, 0, rig_buffer(&rig, 0), 0);
    assert_int_equal(disk_submit(rig.disk, &op.op, 0), -EINVAL);
    op = rig_transfer(DISK_READ, 0, RIG_SEGMENT_BYTES - 4096, rig_buffer(&rig, 0), 8192);
    assert_int_equal(disk_submit(rig.disk, &op.op, 0), -EINVAL);
    op = rig_transfer(DISK_READ, 0, UINT64_MAX - 4095, rig_buffer(&rig, 0), 8192);
    assert_int_equal(disk_submit(rig.disk, &op.op, 0), -EINVAL);
    if (rig_stats(&rig).is_direct) {
        op = rig_transfer(DISK_READ, 0, 512, rig_buffer(&rig, 0), 4096);
        assert_int_equal(disk_submit(rig.disk, &op.op, 0), -EINVAL);
        op = rig_transfer(DISK_READ, 0, 0, rig_buffer(&rig, 0) + 8, 4096);
        assert_int_equal(disk_submit(rig.disk, &op.op, 0), -EINVAL);
    }
    assert_int_equal(rig_stats(&rig).n_out, 0);
    rig_free(&rig);
}

static void full_disk_queue_says_so_and_takes_more_when_one_is_home(void **state) {
    struct disk_rig rig;
    struct rig_op ops[RIG_N_OPS], more;

    (void)state;
    open_workers(&rig); /* nothing comes home before workers_dispatch() */
    assert_int_equal(rig_do(&rig, rig_op(DISK_SEGMENT_ADD, 0)), 0);
    for (uint32_t i = 0; i < RIG_N_OPS; i++) {
        ops[i] = rig_transfer(DISK_READ, 0, 0, rig_buffer(&rig, i), 4096);
        rig_submit(&rig, &ops[i]);
    }
    more = rig_transfer(DISK_READ, 0, 0, rig_buffer(&rig, RIG_N_OPS), 4096);
    assert_int_equal(disk_submit(rig.disk, &more.op, rig.now_us), DISK_E_FULL);
    rig_wait(&rig, &ops[0]);
    rig_submit(&rig, &more);
    assert_int_equal(rig_wait(&rig, &more), 0);
    for (uint32_t i = 1; i < RIG_N_OPS; i++)
        assert_int_equal(rig_wait(&rig, &ops[i]), 0);
    rig_free(&rig);
}

static void workers_never_have_more_than_three_calls_at_once(void **state) {
    struct disk_rig rig;
    struct rig_op ops[8];

    (void)state;
    open_workers(&rig);
    assert_int_equal(rig_do(&rig, rig_op(DISK_SEGMENT_ADD, 0)), 0);
    for (uint32_t i = 0; i < ARRAY_LEN(ops); i++) {
        ops[i] = rig_transfer(DISK_READ, 0, 0, rig_buffer(&rig, i), 4096);
        rig_submit(&rig, &ops[i]);
        assert_true(workers_n_out(rig.workers) <= 3);
    }
    for (uint32_t i = 0; i < ARRAY_LEN(ops); i++)
        assert_int_equal(rig_wait(&rig, &ops[i]), 0);
    rig_free(&rig);
}

static void refusing_workers_delay_a_call_or_fail_it(void **state) {
    struct disk_rig rig;
    struct rig_op a, b;

    (void)state;
    open_workers(&rig);
    assert_int_equal(rig_do(&rig, rig_op(DISK_SEGMENT_ADD, 0)), 0);
    a = rig_transfer(DISK_READ, 0, 0, rig_buffer(&rig, 0), 4096);
    b = rig_transfer(DISK_READ, 0, 4096, rig_buffer(&rig, 1), 4096);
    rig_submit(&rig, &a);
    workers_refuse(rig.workers, 1);
    rig_submit(&rig, &b); /* waits for a */
    assert_int_equal(rig_wait(&rig, &a), 0);
    assert_int_equal(rig_wait(&rig, &b), 0);
    assert_int_equal(rig_stats(&rig).n_retries, 0);
    workers_refuse(rig.workers, 1000);
    assert_int_equal(rig_do(&rig, rig_transfer(DISK_READ, 0, 0, rig_buffer(&rig, 0), 4096)), -EAGAIN);
    workers_refuse(rig.workers, 0);
    assert_int_equal(rig_do(&rig, rig_transfer(DISK_READ, 0, 0, rig_buffer(&rig, 0), 4096)), 0);
    rig_free(&rig);
}

/* ---- segments ---------------------------------------------------------------------------------------------------- */

static void new_segment_has_all_its_blocks_and_mode_0600(void **state) {
    struct disk_rig rig;
    struct stat status;

    (void)state;
    open_workers(&rig);
    assert_int_equal(rig_do(&rig, rig_op(DISK_SEGMENT_ADD, 3)), 0);
    assert_int_equal(fstatat(rig.folder.fd, "segment-00000003", &status, AT_SYMLINK_NOFOLLOW), 0);
    assert_int_equal(status.st_size, RIG_SEGMENT_BYTES);
    assert_true(status.st_blocks * 512 >= RIG_SEGMENT_BYTES);
    assert_int_equal(status.st_mode, S_IFREG | 0600);
    rig_free(&rig);
}

static void removed_segment_is_gone_and_may_be_made_again(void **state) {
    (void)state;
    for (int no_ring = 0; no_ring < 2; no_ring++) {
        struct disk_rig rig;
        struct rig_op remove = rig_op(DISK_SEGMENT_REMOVE, 0), read;

        rig_make_folder(&rig, "/tmp");
        rig.options.no_ring = no_ring;
        rig_open_disk(&rig);
        assert_int_equal(rig_do(&rig, rig_op(DISK_SEGMENT_ADD, 0)), 0);
        read = rig_transfer(DISK_READ, 0, 0, rig_buffer(&rig, 0), 4096);
        rig_submit(&rig, &read);
        assert_int_equal(disk_submit(rig.disk, &remove.op, 0), -EBUSY);
        assert_int_equal(rig_wait(&rig, &read), 0);
        rig_submit(&rig, &remove);
        assert_false(disk_segment_exists(rig.disk, 0));
        read = rig_transfer(DISK_READ, 0, 0, rig_buffer(&rig, 0), 4096);
        assert_int_equal(disk_submit(rig.disk, &read.op, 0), -ENOENT);
        assert_int_equal(rig_wait(&rig, &remove), 0);
        assert_int_equal(faccessat(rig.folder.fd, "segment-00000000", F_OK, 0), -1);
        assert_int_equal(rig_do(&rig, rig_op(DISK_SEGMENT_ADD, 0)), 0);
        assert_int_equal(rig_do(&rig, rig_transfer(DISK_READ, 0, 0, rig_buffer(&rig, 0), 4096)), 0);
        rig_free(&rig);
    }
}

static void make_file(const struct disk_rig *rig, const char *name, off_t bytes, mode_t mode) {
    int fd = openat(rig->folder.fd, name, O_RDWR | O_CREAT | O_EXCL, 0600);

    assert_true(fd >= 0);
    assert_int_equal(ftruncate(fd, bytes), 0);
    assert_int_equal(fchmod(fd, mode), 0);
    close(fd);
}

static void only_whole_segments_that_are_ours_are_opened(void **state) {
    struct disk_rig rig;
    struct stat status;

    (void)state;
    rig_make_folder(&rig, "/tmp");
    make_file(&rig, "segment-00000000", RIG_SEGMENT_BYTES, 0600); /* with holes: they are filled */
    make_file(&rig, "segment-00000001", RIG_SEGMENT_BYTES, 0640);
    make_file(&rig, "segment-00000002", RIG_SEGMENT_BYTES - 1, 0600);
    assert_int_equal(symlinkat("segment-00000000", rig.folder.fd, "segment-00000003"), 0);
    make_file(&rig, "segment-00000004", RIG_SEGMENT_BYTES, 0600); /* beyond the last */
    make_file(&rig, "segment-4", RIG_SEGMENT_BYTES, 0600);        /* these are not our names */
    make_file(&rig, "segment-0000000x", RIG_SEGMENT_BYTES, 0600);
    rig_open_disk(&rig);
    assert_true(disk_segment_exists(rig.disk, 0));
    assert_int_equal(rig_stats(&rig).n_segments, 1);
    assert_int_equal(rig_stats(&rig).n_segments_refused, 4);
    assert_int_equal(fstatat(rig.folder.fd, "segment-00000000", &status, 0), 0);
    assert_true(status.st_blocks * 512 >= RIG_SEGMENT_BYTES);
    assert_int_equal(rig_do(&rig, rig_op(DISK_SEGMENT_ADD, 1)), -EEXIST); /* what is not ours is not overwritten */
    rig_free(&rig);
}

static void rest_of_a_crashed_creation_is_no_segment_and_no_obstacle(void **state) {
    struct disk_rig rig;

    (void)state;
    rig_make_folder(&rig, "/tmp");
    make_file(&rig, "segment-00000000.new", 4096, 0600);
    rig_open_disk(&rig);
    assert_int_equal(rig_stats(&rig).n_segments + rig_stats(&rig).n_segments_refused, 0);
    assert_int_equal(rig_do(&rig, rig_op(DISK_SEGMENT_ADD, 0)), 0);
    rig_free(&rig);
}

/* ---- the folder -------------------------------------------------------------------------------------------------- */

static void second_owner_is_refused_until_the_first_is_gone(void **state) {
    struct disk_rig rig;
    struct disk_folder second;
    int status;
    pid_t pid;

    (void)state;
    rig_make_folder(&rig, "/tmp");
    assert_int_equal(disk_folder_open(rig.path, &second), DISK_E_LOCKED);
    pid = fork();
    assert_true(pid >= 0);
    if (pid == 0)
        _exit(disk_folder_open(rig.path, &second) == DISK_E_LOCKED ? 0 : 1);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
    disk_folder_close(&rig.folder);
    assert_int_equal(disk_folder_open(rig.path, &rig.folder),
                     0); /* the lock file that is left behind holds nobody up */
    rig_free(&rig);
}

static void folder_open_to_others_is_refused(void **state) {
    static const mode_t modes[] = {0777, 0770, 0750, 0701, 0755};
    struct disk_rig rig;
    struct disk_folder folder;

    (void)state;
    rig_make_folder(&rig, "/tmp");
    disk_folder_close(&rig.folder);
    for (size_t i = 0; i < ARRAY_LEN(modes); i++) {
        assert_int_equal(chmod(rig.path, modes[i]), 0);
        assert_int_equal(disk_folder_open(rig.path, &folder), DISK_E_UNSAFE);
    }
    assert_int_equal(chmod(rig.path, 0700), 0);
    if (geteuid() == 0) {
        assert_int_equal(chown(rig.path, 12345, 12345), 0);
        assert_int_equal(disk_folder_open(rig.path, &folder), DISK_E_UNSAFE);
        assert_int_equal(chown(rig.path, 0, 0), 0);
    }
    assert_int_equal(disk_folder_open(rig.path, &rig.folder), 0);
    rig_free(&rig);
}

static void links_and_files_are_no_folder_and_a_link_is_no_lock(void **state) {
    struct disk_rig rig;
    struct disk_folder folder;
    char other[80];

    (void)state;
    rig_make_folder(&rig, "/tmp");
    snprintf(other, sizeof(other), "%s-link", rig.path);
    assert_int_equal(symlink(rig.path, other), 0);
    assert_int_equal(disk_folder_open(other, &folder), -ENOTDIR);
    unlink(other);
    make_file(&rig, "file", 0, 0600);
    snprintf(other, sizeof(other), "%s/file", rig.path);
    assert_int_equal(disk_folder_open(other, &folder), -ENOTDIR);
    snprintf(other, sizeof(other), "%s/no/such", rig.path);
    assert_int_equal(disk_folder_open(other, &folder), -ENOENT);

    disk_folder_close(&rig.folder);
    snprintf(other, sizeof(other), "%s/lock", rig.path);
    assert_int_equal(unlink(other), 0);
    assert_int_equal(symlink("file", other), 0);
    assert_int_equal(disk_folder_open(rig.path, &folder), -ELOOP);
    assert_int_equal(unlink(other), 0);
    assert_int_equal(disk_folder_open(rig.path, &rig.folder), 0);
    rig_free(&rig);
}

/* As somebody who is not above all rights. */
static int look_as_another(const char *path) {
    int status;
    pid_t pid = fork();

    assert_true(pid >= 0);
    if (pid == 0)
        _exit(geteuid() == 0 && seteuid(12345) != 0 ? 0 : -disk_folder_look(path));
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    return -WEXITSTATUS(status);
}

static void a_look_says_what_opening_would_and_changes_nothing(void **state) {
    struct disk_rig rig;
    char other[80];

    (void)state;
    rig_make_folder(&rig, "/tmp");
    make_file(&rig, "file", 0, 0600);
    assert_int_equal(disk_folder_look(rig.path), 0); /* although it is locked */
    disk_folder_close(&rig.folder);
    assert_int_equal(chmod(rig.path, 0750), 0);
    assert_int_equal(disk_folder_look(rig.path), DISK_E_UNSAFE);
    assert_int_equal(chmod(rig.path, 0700), 0);
    if (geteuid() == 0) {
        assert_int_equal(chown(rig.path, 12345, 12345), 0);
        assert_int_equal(disk_folder_look(rig.path), DISK_E_UNSAFE);
    }
    snprintf(other, sizeof(other), "%s/..", rig.path);
    assert_int_equal(chmod(other, 0711), 0); /* the other one comes this far */
    snprintf(other, sizeof(other), "%s/lock", rig.path);
    assert_int_equal(unlink(other), 0);
    assert_int_equal(look_as_another(rig.path), 0);
    assert_int_equal(chmod(rig.path, 0500), 0);
    assert_int_equal(look_as_another(rig.path), -EACCES);
    snprintf(other, sizeof(other), "%s/new", rig.path);
    assert_int_equal(look_as_another(other), -EACCES); /* it could not be made */
    assert_int_equal(chmod(rig.path, 0700), 0);
    if (geteuid() == 0)
        assert_int_equal(chown(rig.path, 0, 0), 0);

    assert_int_equal(disk_folder_look(other), 0);
    snprintf(other, sizeof(other), "%s/new//", rig.path);
    assert_int_equal(disk_folder_look(other), 0);
    assert_int_equal(access(other, F_OK), -1);
    snprintf(other, sizeof(other), "%s/no/such", rig.path);
    assert_int_equal(disk_folder_look(other), -ENOENT);
    assert_int_equal(disk_folder_look(""), -ENOENT);
    snprintf(other, sizeof(other), "%s/file", rig.path);
    assert_int_equal(disk_folder_look(other), -ENOTDIR);
    snprintf(other, sizeof(other), "%s/file/new", rig.path);
    assert_int_equal(disk_folder_look(other), -ENOTDIR);
    snprintf(other, sizeof(other), "%s-link", rig.path);
    assert_int_equal(symlink(rig.path, other), 0);
    assert_int_equal(disk_folder_look(other), -ENOTDIR);
    unlink(other);

    assert_int_equal(disk_folder_look(rig.path), 0);
    snprintf(other, sizeof(other), "%s/lock", rig.path);
    assert_int_equal(access(other, F_OK), -1); /* no lock was left there */
    assert_int_equal(disk_folder_open(rig.path, &rig.folder), 0);
    assert_int_equal(chmod(other, 0644), 0);
    assert_int_equal(disk_folder_look(rig.path), -EPERM);
    rig_free(&rig);
}

static void folder_that_was_replaced_or_opened_up_is_noticed(void **state) {
    struct disk_rig rig;
    char moved[80];

    (void)state;
    rig_make_folder(&rig, "/tmp");
    snprintf(moved, sizeof(moved), "%s-moved", rig.path);
    assert_int_equal(disk_folder_check(&rig.folder, rig.path), 0);
    assert_int_equal(rename(rig.path, moved), 0);
    assert_int_equal(disk_folder_check(&rig.folder, rig.path), -ESTALE);
    assert_int_equal(symlink(moved, rig.path), 0);
    assert_int_equal(disk_folder_check(&rig.folder, rig.path), -ESTALE);
    assert_int_equal(unlink(rig.path), 0);
    assert_int_equal(mkdir(rig.path, 0700), 0);
    assert_int_equal(disk_folder_check(&rig.folder, rig.path), -ESTALE);
    assert_int_equal(rmdir(rig.path), 0);
    assert_int_equal(rename(moved, rig.path), 0);
    assert_int_equal(chmod(rig.path, 0755), 0);
    assert_int_equal(disk_folder_check(&rig.folder, rig.path), DISK_E_UNSAFE);
    rig_free(&rig);
}

static void count_name(void *user, const char *name) {
    assert_string_equal(name, "record");
    (*(int *)user)++;
}

static void small_file_is_replaced_as_a_whole(void **state) {
    struct disk_rig rig;
    struct disk_folder inner;
    char buffer[16] = "";
    size_t n = 0;
    int n_names = 0;

    (void)state;
    rig_make_folder(&rig, "/tmp");
    assert_int_equal(disk_folder_open_in(&rig.folder, "inner", &inner), 0);
    assert_int_equal(disk_folder_alignment(&inner), disk_folder_alignment(&rig.folder));
    assert_int_equal(disk_folder_read(&inner, "record", buffer, sizeof(buffer), &n), -ENOENT);
    assert_int_equal(disk_folder_replace(&inner, "record", "one", 3), 0);
    make_file(&(struct disk_rig){.folder = inner}, "record.new", 4096, 0600); /* what a crash leaves behind */
    assert_int_equal(disk_folder_replace(&inner, "record", "second", 6), 0);
    assert_int_equal(disk_folder_read(&inner, "record", buffer, sizeof(buffer), &n), 0);
    assert_int_equal(n, 6);
    assert_memory_equal(buffer, "second", 6);
    assert_int_equal(disk_folder_read(&inner, "record", buffer, 6, &n), 0);
    assert_int_equal(disk_folder_read(&inner, "record", buffer, 5, &n), -EFBIG);
    make_file(&(struct disk_rig){.folder = inner}, "other.new", 4096, 0600);
    assert_int_equal(disk_folder_list(&inner, count_name, &n_names), 0);
    assert_int_equal(n_names, 1);
    disk_folder_clean(&inner);
    assert_int_equal(faccessat(inner.fd, "other.new", F_OK, 0), -1);
    assert_int_equal(faccessat(inner.fd, "record", F_OK, 0), 0);
    assert_int_equal(fchmodat(inner.fd, "record", 0644, 0), 0);
    assert_int_equal(disk_folder_read(&inner, "record", buffer, sizeof(buffer), &n), -EPERM);
    assert_int_equal(disk_folder_remove(&inner, "record"), 0);
    assert_int_equal(mkfifoat(inner.fd, "record", 0600), 0);
    assert_int_equal(disk_folder_read(&inner, "record", buffer, sizeof(buffer), &n), -EMEDIUMTYPE);
    assert_int_equal(disk_folder_remove(&inner, "record"), 0);
    disk_folder_close(&inner);
    rig_free(&rig);
}

/* ---- what the machine may refuse: each in a process of its own ---------------------------------------------------- */

enum { CHILD_SKIPS = 77 };

/* This program again, for one case of those below. */
static void in_child(const char *name) {
    int status;
    pid_t pid = fork();

    assert_true(pid >= 0);
    if (pid == 0) {
        execl("/proc/self/exe", "test_disk", name, (char *)NULL);
        _exit(1);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    if (WEXITSTATUS(status) == CHILD_SKIPS)
        skip();
    assert_int_equal(WEXITSTATUS(status), 0);
}

static int forbid_ring(int error) {
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (unsigned)error),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {.len = ARRAY_LEN(filter), .filter = filter};

    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

static void work_without_ring(int error) {
    struct disk_rig rig;

    if (!forbid_ring(error))
        _exit(CHILD_SKIPS);
    rig_make_folder(&rig, "/tmp");
    rig_open_disk(&rig);
    assert_false(rig_stats(&rig).is_ring);
    assert_int_equal(rig_stats(&rig).ring_error, -error);
    write_and_read_back(&rig);
    rig_free(&rig);
}

static void work_without_ring_enosys(void **state) {
    (void)state;
    work_without_ring(ENOSYS);
}

static void work_without_ring_eperm(void **state) {
    (void)state;
    work_without_ring(EPERM);
}

static void work_without_ring_enomem(void **state) {
    (void)state;
    work_without_ring(ENOMEM);
}

static void kernel_without_io_uring_leaves_the_work_to_workers(void **state) {
    (void)state;
    in_child("work_without_ring_enosys");
    in_child("work_without_ring_eperm");
    in_child("work_without_ring_enomem");
}

static void open_with_memlock(rlim_t bytes, struct disk_rig *rig) {
    struct rlimit limit = {.rlim_cur = bytes, .rlim_max = bytes};

    if (geteuid() == 0 && setresuid(65533, 65533, 65533) != 0) /* the limit does not hold for the superuser */
        _exit(CHILD_SKIPS);
    if (setrlimit(RLIMIT_MEMLOCK, &limit) != 0)
        _exit(CHILD_SKIPS);
    rig_make_folder(rig, "/tmp");
    rig_open_disk(rig);
}

static void memlock_holds_the_ring_only(void **state) {
    struct disk_rig rig;

    (void)state;
    open_with_memlock(RIG_N_BUFFERS * RIG_BUFFER_BYTES / 4, &rig);
    if (!rig_stats(&rig).is_ring) /* as without a limit */
        _exit(CHILD_SKIPS);
    assert_false(rig_stats(&rig).has_registered_buffers);
    assert_int_equal(rig_stats(&rig).buffers_error, -ENOMEM);
    write_and_read_back(&rig);
    rig_free(&rig);
}

static void memlock_holds_nothing(void **state) {
    struct disk_rig rig;

    (void)state;
    open_with_memlock(0, &rig); /* a kernel may count the ring itself, or not */
    assert_false(rig_stats(&rig).has_registered_buffers);
    write_and_read_back(&rig);
    rig_free(&rig);
}

static void buffers_over_the_locked_memory_limit_are_used_unregistered(void **state) {
    (void)state;
    in_child("memlock_holds_the_ring_only");
    in_child("memlock_holds_nothing");
}

static void few_descriptors(void **state) {
    struct rlimit limit = {.rlim_cur = 16, .rlim_max = 16};
    struct disk_rig rig;

    (void)state;
    rig_make_folder(&rig, "/tmp");
    rig.options.n_segments_max = 64;
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0)
        _exit(CHILD_SKIPS);
    rig_open_disk(&rig);
    assert_false(rig_stats(&rig).has_registered_files); /* more than the limit allows */
    write_and_read_back(&rig);
    rig_free(&rig);
}

static void files_over_the_descriptor_limit_are_used_unregistered(void **state) {
    (void)state;
    in_child("few_descriptors");
}

/* In a mount namespace, so that the machine sees nothing of it. */
static int mount_private(const char *kind, const char *options) {
    return unshare(CLONE_NEWNS) == 0 && mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0 &&
           mount("none", "/mnt", kind, 0, options) == 0;
}

static void no_direct(bool no_ring) {
    struct disk_rig rig;

    if (!mount_private("ramfs", NULL)) /* refuses O_DIRECT, and knows no fallocate */
        _exit(CHILD_SKIPS);
    rig_make_folder(&rig, "/mnt");
    rig.options.no_ring = no_ring;
    rig_open_disk(&rig);
    assert_false(rig_stats(&rig).is_direct);
    assert_int_equal(disk_alignment(rig.disk), DISK_ALIGN_MIN);
    write_and_read_back(&rig);
    rig_free(&rig);
}

static void no_direct_ring(void **state) {
    (void)state;
    no_direct(false);
}

static void no_direct_workers(void **state) {
    (void)state;
    no_direct(true);
}

static void file_system_without_direct_io_is_used_buffered(void **state) {
    (void)state;
    in_child("no_direct_ring");
    in_child("no_direct_workers");
}

static void full_disk(void **state) {
    struct disk_rig rig;

    (void)state;
    if (!mount_private("tmpfs", "size=2560k")) /* two segments and a half */
        _exit(CHILD_SKIPS);
    rig_make_folder(&rig, "/mnt");
    rig_open_disk(&rig);
    assert_int_equal(rig_do(&rig, rig_op(DISK_SEGMENT_ADD, 0)), 0);
    assert_int_equal(rig_do(&rig, rig_op(DISK_SEGMENT_ADD, 1)), 0);
    assert_int_equal(rig_do(&rig, rig_op(DISK_SEGMENT_ADD, 2)), -ENOSPC);
    assert_false(disk_segment_exists(rig.disk, 2));
    assert_int_equal(rig_do(&rig, rig_transfer(DISK_WRITE, 1, 0, rig_buffer(&rig, 0), 4096)), 0); /* others go on */
    assert_int_equal(rig_do(&rig, rig_op(DISK_SEGMENT_REMOVE, 0)), 0);
    assert_int_equal(rig_do(&rig, rig_op(DISK_SEGMENT_ADD, 2)), 0);
    rig_free(&rig);
}

static void full_file_system_refuses_a_segment_and_keeps_nothing_of_it(void **state) {
    (void)state;
    in_child("full_disk");
}

/* With an argument: one of the cases for a process of its own. */
int main(int argc, char **argv) {
    static const struct CMUnitTest children[] = {
        cmocka_unit_test(work_without_ring_enosys),
        cmocka_unit_test(work_without_ring_eperm),
        cmocka_unit_test(work_without_ring_enomem),
        cmocka_unit_test(memlock_holds_the_ring_only),
        cmocka_unit_test(memlock_holds_nothing),
        cmocka_unit_test(few_descriptors),
        cmocka_unit_test(no_direct_ring),
        cmocka_unit_test(no_direct_workers),
        cmocka_unit_test(full_disk),
    };
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ring_reads_what_it_wrote),
        cmocka_unit_test(workers_read_what_they_wrote),
        cmocka_unit_test(buffered_mode_reads_what_it_wrote),
        cmocka_unit_test(requests_that_cannot_be_are_refused_and_leave_nothing_out),
        cmocka_unit_test(full_disk_queue_says_so_and_takes_more_when_one_is_home),
        cmocka_unit_test(workers_never_have_more_than_three_calls_at_once),
        cmocka_unit_test(refusing_workers_delay_a_call_or_fail_it),
        cmocka_unit_test(new_segment_has_all_its_blocks_and_mode_0600),
        cmocka_unit_test(removed_segment_is_gone_and_may_be_made_again),
        cmocka_unit_test(only_whole_segments_that_are_ours_are_opened),
        cmocka_unit_test(rest_of_a_crashed_creation_is_no_segment_and_no_obstacle),
        cmocka_unit_test(second_owner_is_refused_until_the_first_is_gone),
        cmocka_unit_test(folder_open_to_others_is_refused),
        cmocka_unit_test(links_and_files_are_no_folder_and_a_link_is_no_lock),
        cmocka_unit_test(a_look_says_what_opening_would_and_changes_nothing),
        cmocka_unit_test(folder_that_was_replaced_or_opened_up_is_noticed),
        cmocka_unit_test(small_file_is_replaced_as_a_whole),
        cmocka_unit_test(kernel_without_io_uring_leaves_the_work_to_workers),
        cmocka_unit_test(buffers_over_the_locked_memory_limit_are_used_unregistered),
        cmocka_unit_test(files_over_the_descriptor_limit_are_used_unregistered),
        cmocka_unit_test(file_system_without_direct_io_is_used_buffered),
        cmocka_unit_test(full_file_system_refuses_a_segment_and_keeps_nothing_of_it),
    };

    if (argc > 1) {
        cmocka_set_test_filter(argv[1]);
        return cmocka_run_group_tests(children, NULL, NULL);
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
